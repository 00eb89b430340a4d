//! The numbered streams of all sessions: what the replica tells of the journal, kept in a window,
//! handed to whoever is logged in.
//!
//! Invariants: a session's numbers are 1, 2, 3, ... without a gap and the same after every replay,
//! since the replica gives them; a live session gets each number once; what is not in the window,
//! of before the start for instance, is told again from the journal ([`crate::past`]), as far as
//! that goes back. Cost: one lock a batch of records, at most [`WINDOW_MESSAGES_MAX`] messages kept
//! a session and [`IDLE_MESSAGES_MAX`] for all that have no client.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use replica::{Batch, Effect, State as NodeState};
use tokio::sync::watch;
use types::{
    Handle, HoldPart, Id128, InstrumentSpec, NodeId, Sequence, SessionIx, UserIx, order_hold,
};
use wire::{DisconnectCode, InstrumentDefinition, LoginAccepted, ServerMessage, Text, encode};

use crate::numbered;
use crate::quic::outbound::Outbound;

/// Messages of a session that can be sent again without reading the journal.
pub const WINDOW_MESSAGES_MAX: usize = 16_384;
/// Messages kept for all sessions together that nobody is logged in to. Past it the ones longest
/// without a client lose theirs: they are told from the journal, as far as that goes back.
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

struct Stream {
    key: Id128,
    user: UserIx,
    /// The last request of it that is durable.
    client_seq: u64,
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
    fn new(session: &replica::Session) -> Self {
        Self {
            key: session.key,
            user: session.user,
            client_seq: session.client_seq,
            last: session.last_number,
            window: VecDeque::new(),
            live: None,
            idle: 0,
            queued: false,
        }
    }

    /// Number of the oldest message in the window.
    fn first_kept(&self) -> u64 {
        self.last + 1 - self.window.len() as u64
    }

    fn push(&mut self, number: u64, message: &ServerMessage) {
        self.last += 1;
        assert_eq!(number, self.last, "a session's numbers have no gap");
        let bytes = self.keep(number, message);
        if let Some(live) = self.live.as_ref().filter(|live| live.follows) {
            live.outbound.push(live.channel, &bytes);
        }
    }

    /// Puts a message behind the window's last one.
    fn keep(&mut self, number: u64, message: &ServerMessage) -> Bytes {
        let kept = Kept {
            answers: message.answers(),
            bytes: encoded(message, number),
        };
        let bytes = kept.bytes.clone();
        if self.window.len() == WINDOW_MESSAGES_MAX {
            self.window.pop_front();
        }
        self.window.push_back(kept);
        bytes
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
    node: NodeId,
    instruments: Vec<InstrumentSpec>,
    /// By session index.
    streams: Vec<Stream>,
    sessions: HashMap<Id128, SessionIx>,
    idle: Idle,
    /// Of the last login.
    claim: u64,
    resting: Resting,
}

/// Resting orders by the main hold that settlement carves for them, and back.
#[derive(Default)]
struct Resting {
    by_hold: HashMap<Id128, Handle>,
    holds: HashMap<Handle, Id128>,
}

impl Resting {
    fn note(&mut self, effect: &Effect) {
        match effect {
            Effect::Rested(order) => self.add(order.handle, order.id),
            Effect::Cancelled { order, .. } => self.forget(order.handle),
            Effect::Traded(trade) => {
                for order in [&trade.maker, &trade.taker] {
                    if order.open.is_zero() {
                        self.forget(order.handle);
                    }
                }
            }
            _ => {}
        }
    }

    fn add(&mut self, handle: Handle, order_id: Id128) {
        self.holds.entry(handle).or_insert_with(|| {
            let hold_id = order_hold(order_id, HoldPart::Main);
            self.by_hold.insert(hold_id, handle);
            hold_id
        });
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
    /// The streams behind a state of the node, with the messages of the records before it in their
    /// windows.
    pub fn new(state: &NodeState, recent: &[Batch]) -> Self {
        let mut streams: Vec<Stream> = state.sessions().map(|s| Stream::new(&s)).collect();
        let mut idle = Idle::default();
        for applied in recent.iter().flat_map(|batch| batch.iter()) {
            for told in &applied.effects {
                numbered::messages(&applied.cause, told, |to, message| {
                    let stream = &mut streams[to.session.index()];
                    stream.keep(to.number, &message);
                    idle.note(to.session.index(), stream);
                });
            }
        }
        idle.keep_bound(&mut streams, IDLE_MESSAGES_MAX);
        let sessions = state.sessions().map(|s| (s.key, s.session));
        let mut resting = Resting::default();
        for order in state.orders() {
            resting.add(order.handle, order.id);
        }
        Self {
            state: Mutex::new(State {
                node: state.node(),
                instruments: state.names().instruments(),
                sessions: sessions.collect(),
                streams,
                idle,
                claim: 0,
                resting,
            }),
            position: watch::Sender::new(state.sequence()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes records in and publishes the position behind the last one.
    pub fn apply(&self, batch: &Batch) {
        let mut state = self.lock();
        let State {
            instruments,
            streams,
            sessions,
            idle,
            resting,
            ..
        } = &mut *state;
        for applied in batch.iter() {
            let cause = &applied.cause;
            if !cause.session.is_none() {
                streams[cause.session.index()].client_seq = cause.client_seq;
            }
            for told in &applied.effects {
                resting.note(&told.effect);
                match &told.effect {
                    Effect::Session(session) => {
                        if session.session.index() == streams.len() {
                            streams.push(Stream::new(session));
                        }
                        sessions.insert(session.key, session.session);
                    }
                    Effect::Instrument(spec) => {
                        match instruments.get_mut(spec.ix.index()) {
                            Some(known) => *known = *spec,
                            None => instruments.push(*spec),
                        }
                        broadcast(streams, spec);
                    }
                    _ => numbered::messages(cause, told, |to, message| {
                        let stream = &mut streams[to.session.index()];
                        stream.push(to.number, &message);
                        if stream.live.is_none() {
                            idle.note(to.session.index(), stream);
                        }
                    }),
                }
            }
        }
        idle.keep_bound(streams, IDLE_MESSAGES_MAX);
        drop(state);
        self.position.send_replace(batch.last());
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
        let streams = (0..).map(SessionIx).zip(&state.streams);
        let own = streams.filter(|(_, stream)| stream.user == user);
        own.map(|(session, stream)| (session, stream.key)).collect()
    }

    /// Tells the login and makes the session the connection's, taken over where it is live
    /// elsewhere. What its client lacks is then given by [`Streams::advance`]. Returns the claim
    /// that names this login from now on. The caller has the session's turn and has opened it in
    /// the journal.
    pub fn attach(&self, outbound: &Arc<Outbound>, attach: &Attach) -> u64 {
        let mut state = self.lock();
        let State {
            node,
            instruments,
            streams,
            idle,
            claim,
            ..
        } = &mut *state;
        *claim += 1;
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
        for spec in instruments.iter() {
            outbound.send(attach.channel, &definition(spec).into());
        }
        let accepted = LoginAccepted {
            session: attach.session.get(),
            last_client_seq: stream.client_seq,
            next_sequence: last_sequence + 1,
            node: node.get(),
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

    /// Gives a client that comes back messages from the journal, the ones right behind `after`.
    /// False when the session is not its any more.
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
        let stream = &state.streams[session.index()];
        if client_seq > stream.client_seq {
            return Again::ToCome;
        }
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

    /// The open order whose own main hold this is.
    pub fn order_of(&self, hold_id: Id128) -> Option<Handle> {
        self.lock().resting.by_hold.get(&hold_id).copied()
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
