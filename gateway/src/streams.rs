//! The numbered streams of all sessions: folded from the journal at the commit position, kept in a window, handed to whoever is logged in.
//!
//! Invariants: a session's numbers are 1, 2, 3, ... without a gap and the same after every replay; a live session gets each number once; what has
//! left the window is rebuilt from the journal. Cost: one lock a batch of records, at most [`WINDOW_MESSAGES_MAX`] messages kept a session.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use client::wire::{
    DisconnectCode, InstrumentDefinition, LoginAccepted, ServerMessage, Text, encode,
};
use sequencer::Record;
use settlement::ids::{Part, order_hold};
use tokio::sync::watch;
use types::{Handle, HoldIx, Id128, InstrumentSpec, NodeId, PoolKind, Sequence, SessionIx, UserIx};

use crate::fold::{Fact, Fold};
use crate::market::Market;
use crate::numbered;
use crate::quic::outbound::Outbound;

/// Messages of a session that can be sent again without reading the journal.
pub const WINDOW_MESSAGES_MAX: usize = 16_384;

/// A message kept for a resume: encoded for channel 0.
#[derive(Clone)]
pub struct Kept {
    /// The request it answers for good, 0 for none.
    pub answers: u64,
    pub bytes: Bytes,
}

/// Where a live session's messages go.
#[derive(Clone)]
struct Live {
    outbound: Arc<Outbound>,
    channel: u16,
}

#[derive(Default)]
struct Stream {
    /// Number of the last message.
    last: u64,
    window: VecDeque<Kept>,
    live: Option<Live>,
}

impl Stream {
    /// Number of the oldest message in the window.
    fn first_kept(&self) -> u64 {
        self.last + 1 - self.window.len() as u64
    }

    fn push(&mut self, message: &ServerMessage) {
        self.last += 1;
        let kept = kept(message, self.last);
        if let Some(live) = &self.live {
            live.outbound.push(live.channel, &kept.bytes);
        }
        if self.window.len() == WINDOW_MESSAGES_MAX {
            self.window.pop_front();
        }
        self.window.push_back(kept);
    }
}

struct State {
    fold: Fold,
    streams: Vec<Stream>,
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
                let hold_id = order_hold(order.id, Part::Main);
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

/// Why a login cannot be attached now.
#[derive(Debug, PartialEq, Eq)]
pub enum AttachError {
    /// The client claims a number that was never sent.
    Ahead,
    /// Messages from this number on are older than the window: rebuild them and try again.
    OlderThanWindow { first_kept: u64 },
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
    /// Messages rebuilt from the journal, encoded for channel 0, from `last_sequence + 1` on.
    pub rebuilt: Vec<Bytes>,
}

impl Streams {
    pub fn new(node: NodeId) -> Self {
        Self {
            state: Mutex::new(State {
                fold: Fold::new(node),
                streams: Vec::new(),
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
                resting,
                facts,
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
                    }
                    Fact::Instrument(spec) => {
                        changed(spec);
                        broadcast(streams, spec);
                    }
                    _ => numbered::messages(&cause, fact, |session, message| {
                        streams[session.index()].push(&message);
                    }),
                }
            }
        }
        drop(state);
        self.position.send_replace(last.command.sequence);
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

    /// Tells the login and everything after its last number, then keeps the session's messages coming. A session that is live elsewhere is
    /// taken over.
    pub fn attach(&self, outbound: &Arc<Outbound>, attach: &Attach) -> Result<(), AttachError> {
        let mut state = self.lock();
        let State { fold, streams, .. } = &mut *state;
        let session = fold.sessions()[attach.session.index()];
        let stream = &mut streams[attach.session.index()];
        let last_sequence = if attach.from_now {
            stream.last
        } else {
            attach.last_sequence
        };
        if last_sequence > stream.last {
            return Err(AttachError::Ahead);
        }
        let rebuilt = &attach.rebuilt[..];
        let rebuilt_last = last_sequence + rebuilt.len() as u64;
        if rebuilt_last + 1 < stream.first_kept() {
            return Err(AttachError::OlderThanWindow {
                first_kept: stream.first_kept(),
            });
        }
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
        let keep = stream
            .last
            .saturating_sub(last_sequence)
            .min(rebuilt.len() as u64);
        for bytes in &rebuilt[..keep as usize] {
            outbound.push(attach.channel, bytes);
        }
        let skip = (rebuilt_last + 1).saturating_sub(stream.first_kept());
        for kept in stream.window.iter().skip(skip as usize) {
            outbound.push(attach.channel, &kept.bytes);
        }
        stream.live = Some(Live {
            outbound: outbound.clone(),
            channel: attach.channel,
        });
        Ok(())
    }

    /// The connection has let go of the session. False when another one has taken it over meanwhile.
    pub fn detach(&self, session: SessionIx, outbound: &Arc<Outbound>, channel: u16) -> bool {
        let mut state = self.lock();
        let stream = &mut state.streams[session.index()];
        let ours = stream
            .live
            .as_ref()
            .is_some_and(|live| Arc::ptr_eq(&live.outbound, outbound) && live.channel == channel);
        if ours {
            stream.live = None;
        }
        ours
    }

    /// Sends the original answer to a request again, under its number. False when it has left the window (or is not durable yet: then it is
    /// still to come).
    pub fn send_again(&self, session: SessionIx, client_seq: u64) -> bool {
        let state = self.lock();
        let stream = &state.streams[session.index()];
        let Some(live) = &stream.live else {
            return false;
        };
        let kept = stream
            .window
            .iter()
            .rev()
            .find(|kept| kept.answers == client_seq);
        match kept {
            Some(kept) => {
                live.outbound.push(live.channel, &kept.bytes);
                true
            }
            None => false,
        }
    }

    /// The pool of a ledger hold, as far as the journal is durable.
    pub fn pool(&self, hold_id: Id128) -> Option<crate::fold::Pool> {
        self.lock().fold.pool_of(hold_id).copied()
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

    /// Ends every live session of a user.
    pub fn end_user(&self, user: UserIx, code: DisconnectCode) {
        let mut state = self.lock();
        let State { fold, streams, .. } = &mut *state;
        for session in fold.sessions().iter().filter(|s| s.user == user) {
            if let Some(live) = streams[session.session.index()].live.take() {
                live.outbound.end_channel(live.channel, code);
            }
        }
    }
}

/// The messages of one session with numbers above `after`, read from the journal as far as the streams have come.
pub async fn rebuild(
    market: &Market,
    session: SessionIx,
    after: u64,
) -> Result<Vec<Kept>, sequencer::ReadError> {
    let through = market.streams.position();
    let mut reader = market.read_journal(Sequence::ZERO);
    let mut fold = Fold::new(market.node);
    let mut facts = Vec::new();
    let mut number = 0;
    let mut rebuilt = Vec::new();
    while fold.sequence() < through {
        let record = reader.next().await?;
        facts.clear();
        let cause = fold.apply(&record.command, &record.events, &mut facts);
        for fact in &facts {
            numbered::messages(&cause, fact, |to, message| {
                if to != session {
                    return;
                }
                number += 1;
                if number > after {
                    rebuilt.push(kept(&message, number));
                }
            });
        }
    }
    Ok(rebuilt)
}

/// The original answer to a request that has left the window; `None` while it is not durable.
pub async fn find_answer(
    market: &Market,
    session: SessionIx,
    client_seq: u64,
) -> Result<Option<Bytes>, sequencer::ReadError> {
    let mut all = rebuild(market, session, 0).await?.into_iter();
    Ok(all
        .find(|kept| kept.answers == client_seq)
        .map(|kept| kept.bytes))
}

fn kept(message: &ServerMessage, number: u64) -> Kept {
    let mut bytes = BytesMut::new();
    encode(message, 0, number, &mut bytes);
    Kept {
        answers: message.answers(),
        bytes: bytes.freeze(),
    }
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
