//! The numbered streams of all sessions: folded from the journal at the commit position, kept in a window, handed to whoever is logged in.
//!
//! Invariants: a session's numbers are 1, 2, 3, ... without a gap and the same after every replay; a live session gets each number once; what has
//! left the window is told again from the journal ([`crate::past`]), as far as that goes back. Cost: one lock a batch of records, at most [`WINDOW_MESSAGES_MAX`] messages kept a session
//! and [`IDLE_MESSAGES_MAX`] for all that have no client.

mod image;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use sequencer::Record;
use tokio::sync::watch;
use types::{
    CFA_RUB, Handle, HoldIx, HoldPart, Id128, InstrumentSpec, NodeId, PoolKind, Sequence,
    SessionIx, UserIx, order_hold,
};
use wire::{DisconnectCode, InstrumentDefinition, LoginAccepted, ServerMessage, Text, encode};

use crate::fold::{Fact, Fold};
use crate::numbered;
use crate::quic::outbound::Outbound;

pub use image::Place;

/// Messages of a session that can be sent again without reading the journal.
pub const WINDOW_MESSAGES_MAX: usize = 16_384;
/// Messages kept for all sessions together that nobody is logged in to. Past it the ones longest without a client lose theirs: they are told from the journal, as far as
/// that goes back.
pub const IDLE_MESSAGES_MAX: usize = 1 << 20;
/// Messages of a window written at once to a client that comes back.
const PIECE_MESSAGES: usize = 4_096;

/// A message kept for a resume: encoded for channel 0.
#[derive(Clone)]
struct Kept {
    /// The request it answers for good, 0 for none.
    answers: u64,
    bytes: Bytes,
}

/// Where a live session's messages go.
#[derive(Clone)]
struct Live {
    outbound: Arc<Outbound>,
    channel: u16,
    /// Tells this login from every other.
    claim: u64,
    /// Number of the last message handed over while the client is still catching up.
    sent: u64,
    /// The client has everything: new messages go out at once.
    follows: bool,
}

#[derive(Default)]
struct Stream {
    /// Number of the last message.
    last: u64,
    window: VecDeque<Kept>,
    live: Option<Live>,
    /// Messages of its window counted as idle.
    idle: usize,
    /// Stands in the queue of idle sessions.
    queued: bool,
}

impl Stream {
    /// Number of the oldest message in the window.
    fn first_kept(&self) -> u64 {
        self.last + 1 - self.window.len() as u64
    }

    fn push(&mut self, message: &ServerMessage) {
        self.last += 1;
        let kept = Kept {
            answers: message.answers(),
            bytes: encoded(message, self.last),
        };
        if let Some(live) = self.live.as_ref().filter(|live| live.follows) {
            live.outbound.push(live.channel, &kept.bytes);
        }
        if self.window.len() == WINDOW_MESSAGES_MAX {
            self.window.pop_front();
        }
        self.window.push_back(kept);
    }
}

/// Sessions that nobody is logged in to, longest first.
#[derive(Default)]
struct Idle {
    messages: usize,
    queue: VecDeque<usize>,
}

impl Idle {
    /// A session without a client has got messages, or has lost its client.
    fn note(&mut self, at: usize, stream: &mut Stream) {
        self.messages += stream.window.len() - stream.idle;
        stream.idle = stream.window.len();
        if !stream.queued {
            stream.queued = true;
            self.queue.push_back(at);
        }
    }

    fn forget(&mut self, stream: &mut Stream) {
        self.messages -= stream.idle;
        stream.idle = 0;
    }

    fn keep_bound(&mut self, streams: &mut [Stream], messages_max: usize) {
        while self.messages > messages_max {
            let at = self
                .queue
                .pop_front()
                .expect("idle messages have a session");
            let stream = &mut streams[at];
            stream.queued = false;
            if stream.live.is_none() {
                self.forget(stream);
                stream.window = VecDeque::new();
            } else {
                debug_assert_eq!(stream.idle, 0);
            }
        }
    }
}

struct State {
    fold: Fold,
    streams: Vec<Stream>,
    sessions: HashMap<Id128, SessionIx>,
    idle: Idle,
    /// Of the last login.
    claim: u64,
    resting: Resting,
    facts: Vec<Fact>,
}

/// Resting orders by the main hold that settlement carves for them, and back.
#[derive(Default)]
struct Resting {
    by_hold: HashMap<Id128, Handle>,
    holds: HashMap<Handle, Id128>,
}

impl Resting {
    fn note(&mut self, fact: &Fact) {
        match fact {
            Fact::Rested(order) if !self.holds.contains_key(&order.handle) => {
                let hold_id = order_hold(order.id, HoldPart::Main);
                self.by_hold.insert(hold_id, order.handle);
                self.holds.insert(order.handle, hold_id);
            }
            Fact::Cancelled { order, .. } => self.forget(order.handle),
            Fact::Traded(trade) => {
                for order in [&trade.maker, &trade.taker] {
                    if order.open.is_zero() {
                        self.forget(order.handle);
                    }
                }
            }
            _ => {}
        }
    }

    fn forget(&mut self, handle: Handle) {
        if let Some(hold_id) = self.holds.remove(&handle) {
            self.by_hold.remove(&hold_id);
        }
    }
}

/// Shared by the dispatcher, which writes, and the logins, which attach.
pub struct Streams {
    state: Mutex<State>,
    position: watch::Sender<Sequence>,
}

/// What a login asks for.
pub struct Attach {
    pub session: SessionIx,
    pub channel: u16,
    pub last_sequence: u64,
    pub from_now: bool,
    pub throttle_per_s: u32,
    pub heartbeat_ms: u32,
    pub time_ns: u64,
}

/// How far a client that comes back has got.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// There is more in the window.
    More,
    /// What comes behind this number has left the window: read it from the journal.
    OlderThanWindow { after: u64 },
    /// It has everything, and gets what comes.
    Follows,
    /// The session is somebody else's now.
    Gone,
}

/// What becomes of a request that was sent again.
#[derive(Debug, PartialEq, Eq)]
pub enum Again {
    Sent,
    /// Not durable yet, or on its way to a client that is catching up.
    ToCome,
    /// It has left the window: only the journal has it.
    Older,
}

impl Streams {
    pub fn new(node: NodeId) -> Self {
        Self {
            state: Mutex::new(State {
                fold: Fold::new(node),
                streams: Vec::new(),
                sessions: HashMap::new(),
                idle: Idle::default(),
                claim: 0,
                resting: Resting::default(),
                facts: Vec::new(),
            }),
            position: watch::Sender::new(Sequence::ZERO),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes records in and publishes the position behind the last one. `changed` is shown every instrument that is new or changed.
    pub fn apply(&self, records: &[Record], mut changed: impl FnMut(&InstrumentSpec)) {
        let Some(last) = records.last() else { return };
        let mut state = self.lock();
        for record in records {
            let State {
                fold,
                streams,
                sessions,
                idle,
                resting,
                facts,
                ..
            } = &mut *state;
            facts.clear();
            let cause = fold.apply(&record.command, &record.events, facts);
            for fact in facts.iter() {
                resting.note(fact);
                match fact {
                    Fact::Session(session) => {
                        while streams.len() <= session.session.index() {
                            streams.push(Stream::default());
                        }
                        sessions.insert(session.key, session.session);
                    }
                    Fact::Instrument(spec) => {
                        changed(spec);
                        broadcast(streams, spec);
                    }
                    _ => numbered::messages(&cause, fact, |session, message| {
                        let stream = &mut streams[session.index()];
                        stream.push(&message);
                        if stream.live.is_none() {
                            idle.note(session.index(), stream);
                        }
                    }),
                }
            }
        }
        let State { streams, idle, .. } = &mut *state;
        idle.keep_bound(streams, IDLE_MESSAGES_MAX);
        drop(state);
        self.position.send_replace(last.command.sequence);
    }

    /// The instruments so far.
    pub fn specs(&self) -> Vec<InstrumentSpec> {
        self.lock().fold.instruments().to_vec()
    }

    /// Last record taken in.
    pub fn position(&self) -> Sequence {
        *self.position.borrow()
    }

    /// Returns when the streams hold everything up to `sequence`.
    pub async fn wait(&self, sequence: Sequence) {
        let mut position = self.position.subscribe();
        position
            .wait_for(|position| *position >= sequence)
            .await
            .expect("the sender lives in self");
    }

    /// A session by its key, and the number of its last message.
    pub fn session(&self, key: Id128) -> Option<(SessionIx, u64)> {
        let state = self.lock();
        let session = *state.sessions.get(&key)?;
        Some((session, state.streams[session.index()].last))
    }

    /// Sessions of a user with their keys.
    pub fn sessions_of(&self, user: UserIx) -> Vec<(SessionIx, Id128)> {
        let state = self.lock();
        let sessions = state.fold.sessions().iter();
        sessions
            .filter(|session| session.user == user)
            .map(|session| (session.session, session.key))
            .collect()
    }

    /// Tells the login and makes the session the connection's, taken over where it is live elsewhere. What its client lacks is then given by
    /// [`Streams::advance`]. Returns the claim that names this login from now on. The caller has the session's turn and has opened it in the journal.
    pub fn attach(&self, outbound: &Arc<Outbound>, attach: &Attach) -> u64 {
        let mut state = self.lock();
        let State {
            fold,
            streams,
            idle,
            claim,
            ..
        } = &mut *state;
        *claim += 1;
        let session = fold.sessions()[attach.session.index()];
        let stream = &mut streams[attach.session.index()];
        let last_sequence = match attach.from_now {
            true => stream.last,
            false => attach.last_sequence,
        };
        assert!(last_sequence <= stream.last, "looked at before the opening");
        if let Some(old) = stream.live.take() {
            old.outbound
                .end_channel(old.channel, DisconnectCode::TakenOver);
        }
        for spec in fold.instruments() {
            outbound.send(attach.channel, &definition(spec).into());
        }
        let accepted = LoginAccepted {
            session: attach.session.get(),
            last_client_seq: session.client_seq,
            next_sequence: last_sequence + 1,
            node: fold.node().get(),
            throttle_per_s: attach.throttle_per_s,
            heartbeat_ms: attach.heartbeat_ms,
            time_ns: attach.time_ns,
        };
        outbound.send(attach.channel, &accepted.into());
        idle.forget(stream);
        stream.live = Some(Live {
            outbound: outbound.clone(),
            channel: attach.channel,
            claim: *claim,
            sent: last_sequence,
            follows: last_sequence == stream.last,
        });
        *claim
    }

    /// Gives a client that comes back its next piece out of the window.
    pub fn advance(&self, session: SessionIx, claim: u64) -> Step {
        let mut state = self.lock();
        let stream = &mut state.streams[session.index()];
        let (first_kept, last) = (stream.first_kept(), stream.last);
        let Some(live) = stream.live.as_mut().filter(|live| live.claim == claim) else {
            return Step::Gone;
        };
        if live.follows {
            return Step::Follows;
        }
        if live.sent + 1 < first_kept {
            return Step::OlderThanWindow { after: live.sent };
        }
        let skip = (live.sent + 1 - first_kept) as usize;
        for kept in stream.window.iter().skip(skip).take(PIECE_MESSAGES) {
            live.outbound.push(live.channel, &kept.bytes);
            live.sent += 1;
        }
        live.follows = live.sent == last;
        match live.follows {
            true => Step::Follows,
            false => Step::More,
        }
    }

    /// Gives a client that comes back messages from the journal, the ones right behind `after`. False when the session is not its any more.
    pub fn hand_over(
        &self,
        session: SessionIx,
        claim: u64,
        after: u64,
        messages: &[Bytes],
    ) -> bool {
        let mut state = self.lock();
        let stream = &mut state.streams[session.index()];
        let Some(live) = stream.live.as_mut().filter(|live| live.claim == claim) else {
            return false;
        };
        assert!(
            live.sent == after && !live.follows,
            "one task brings a client up to now"
        );
        for bytes in messages {
            live.outbound.push(live.channel, bytes);
        }
        live.sent += messages.len() as u64;
        live.follows = live.sent == stream.last;
        true
    }

    /// The connection has let go of the session. False when another one has taken it over meanwhile.
    pub fn detach(&self, session: SessionIx, claim: u64) -> bool {
        self.let_go(session, |live| live.claim == claim).is_some()
    }

    /// Ends a session's channel, if it has one.
    pub fn end(&self, session: SessionIx, code: DisconnectCode) -> bool {
        match self.let_go(session, |_| true) {
            Some(live) => {
                live.outbound.end_channel(live.channel, code);
                true
            }
            None => false,
        }
    }

    fn let_go(&self, session: SessionIx, which: impl FnOnce(&Live) -> bool) -> Option<Live> {
        let mut state = self.lock();
        let State { streams, idle, .. } = &mut *state;
        let stream = &mut streams[session.index()];
        let gone = stream.live.take_if(|live| which(live))?;
        idle.note(session.index(), stream);
        Some(gone)
    }

    /// True while a connection has the session.
    pub fn is_live(&self, session: SessionIx) -> bool {
        self.lock().streams[session.index()].live.is_some()
    }

    /// True while the login of this claim has the session.
    pub fn is_of(&self, session: SessionIx, claim: u64) -> bool {
        let state = self.lock();
        let live = &state.streams[session.index()].live;
        live.as_ref().is_some_and(|live| live.claim == claim)
    }

    /// Sends the original answer to a request again, under its number.
    pub fn send_again(&self, session: SessionIx, client_seq: u64) -> Again {
        let state = self.lock();
        if client_seq > state.fold.sessions()[session.index()].client_seq {
            return Again::ToCome;
        }
        let stream = &state.streams[session.index()];
        let Some(live) = &stream.live else {
            return Again::ToCome;
        };
        // Answers stand in the order of their requests.
        let newest_first = stream.window.iter().enumerate().rev();
        let mut near = newest_first.take_while(|(_, k)| k.answers == 0 || k.answers >= client_seq);
        match near.find(|(_, kept)| kept.answers == client_seq) {
            Some((at, _)) if !live.follows && stream.first_kept() + at as u64 > live.sent => {
                Again::ToCome
            }
            Some((_, kept)) => {
                live.outbound.push(live.channel, &kept.bytes);
                Again::Sent
            }
            None => Again::Older,
        }
    }

    /// The pool of a ledger hold, as far as the journal is durable.
    pub fn pool(&self, hold_id: Id128) -> Option<crate::fold::Pool> {
        self.lock().fold.pool_of(hold_id).copied()
    }

    /// The newest trading holds of a user (empty = of everybody) for an asset (empty = any), closed ones included, whose index is below `before`.
    pub fn trading_holds(
        &self,
        user_id: &str,
        instrument_id: &str,
        before: i64,
        rows: usize,
    ) -> Vec<HoldIx> {
        let state = self.lock();
        let fold = &state.fold;
        let is_of = |pool: &&crate::fold::Pool| {
            let asset = match pool.asset.instrument() {
                None => CFA_RUB,
                Some(ix) => fold.instrument(ix).id.as_str(),
            };
            i64::from(pool.hold.get()) < before
                && (user_id.is_empty() || fold.user(pool.user).as_str() == user_id)
                && (instrument_id.is_empty() || asset == instrument_id)
        };
        let newest_first = fold.trading_pools().rev().filter(is_of).take(rows);
        newest_first.map(|pool| pool.hold).collect()
    }

    /// Trading holds left behind, see [`Fold::abandoned`].
    pub fn abandoned(&self, before_ns: u64) -> Vec<HoldIx> {
        self.lock().fold.abandoned(before_ns)
    }

    /// The open orders that a ledger hold stands behind, and its pool where it is a trading hold that nobody has closed.
    pub fn behind(&self, hold_id: Id128) -> (Option<HoldIx>, Vec<Handle>) {
        let state = self.lock();
        let Some(pool) = state.fold.pool_of(hold_id) else {
            let order = state.resting.by_hold.get(&hold_id);
            return (None, order.copied().into_iter().collect());
        };
        if pool.closed {
            return (None, Vec::new());
        }
        let orders = match pool.open_orders {
            // Settlement releases the hold of an order that has ended: no need to look.
            0 => Vec::new(),
            _ => {
                let all = state.fold.orders();
                let drawing = all.filter(|order| order.pool == pool.hold);
                drawing.map(|order| order.handle).collect()
            }
        };
        let serves = pool.kind == PoolKind::Trading;
        (serves.then_some(pool.hold), orders)
    }
}

/// A numbered message as it is kept: for channel 0.
pub fn encoded(message: &ServerMessage, number: u64) -> Bytes {
    let mut bytes = BytesMut::new();
    encode(message, 0, number, &mut bytes);
    bytes.freeze()
}

fn broadcast(streams: &[Stream], spec: &InstrumentSpec) {
    let message = definition(spec).into();
    for live in streams.iter().filter_map(|stream| stream.live.as_ref()) {
        live.outbound.send(live.channel, &message);
    }
}

fn definition(spec: &InstrumentSpec) -> InstrumentDefinition {
    let (tick, lot) = (spec.tick_size(), spec.lot_size());
    let mantissa = |value: types::Decimal| {
        i64::try_from(value.mantissa()).expect("a tick or lot was made from 64 bits")
    };
    InstrumentDefinition {
        instrument: spec.ix.get(),
        id: Text::truncated(spec.id.as_str()),
        decimals: spec.decimals,
        phase: spec.phase,
        tick_mantissa: mantissa(tick),
        tick_scale: tick.scale(),
        lot_mantissa: mantissa(lot),
        lot_scale: lot.scale(),
        value_minor: spec.terms.value_minor,
        units_minor: spec.terms.units_minor,
        band_low_ticks: spec.band_low.0,
        band_high_ticks: spec.band_high.0,
        fee_ppm: spec.fee_rate.0,
    }
}
