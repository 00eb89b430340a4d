//! Translates a flow into the commands that admission would send, and their events into a tape: the
//! untimed part of the `flow` benchmark, and its verification.
//!
//! Each order has its own user, so that self-trade prevention compares at each match and never
//! fires. Slots are assigned as by admission: the one freed last, or a new block of 512 if none is
//! free.

use std::collections::VecDeque;

use engine::{Book, BookConfig, EventSink};
use types::command::{Amend, Cancel, New};
use types::{
    CancelReason, Command, Envelope, Event, EventEnvelope, Handle, Id128, InstrumentId,
    InstrumentIx, InstrumentParams, InstrumentSpec, Lots, Minor, OrderType, Quote, Reserve,
    Sequence, SessionIx, Side, Ticks, TimeInForce, UserIx,
};

use crate::xflow::{Flow, Kind, Op, Record, TapeHash};

const BLOCK: u32 = 512;
const IX: InstrumentIx = InstrumentIx(0);

/// Commands ready to apply, and their expected outcome.
pub struct Drive {
    pub spec: InstrumentSpec,
    pub prefill: Vec<Envelope>,
    pub timed: Vec<Envelope>,
    pub outcome: Outcome,
}

/// Outcome of a flow in the book.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Trades and lots of the timed records.
    pub trades: u64,
    pub quantity: u64,
    /// Over prefill and timed records.
    pub tape: TapeHash,
    /// Matches of the timed records that compared two different groups.
    pub stp_checks: u64,
    pub resting: u32,
    pub state_hash: u64,
    pub events: u64,
}

/// The flow's book: its band is the file's price range. Capacity as in the platform.
pub fn new_book(spec: InstrumentSpec) -> Book {
    Book::new(spec, BookConfig::default())
}

/// Slots, assigned as by admission.
#[derive(Default)]
struct Slots {
    free: VecDeque<u32>,
    generations: Vec<u32>,
}

impl Slots {
    fn take(&mut self) -> Handle {
        if self.free.is_empty() {
            let from = self.generations.len() as u32;
            self.free.extend(from..from + BLOCK);
            self.generations.resize((from + BLOCK) as usize, 0);
        }
        let slot = self.free.pop_front().expect("just filled");
        let generation = &mut self.generations[slot as usize];
        *generation += 1;
        Handle {
            slot,
            generation: *generation,
        }
    }
}

/// Collects the events of a book.
#[derive(Default)]
pub struct Collect(pub Vec<EventEnvelope>);

impl EventSink for Collect {
    fn event(&mut self, event: &EventEnvelope) {
        self.0.push(*event);
    }

    fn quote(&mut self, _: InstrumentIx, _: Quote) {}
}

struct Translator {
    slots: Slots,
    /// By file id.
    handles: Vec<Handle>,
    /// File id of the order in a slot.
    ids: Vec<u64>,
    sequence: u64,
    outcome: Outcome,
}

impl Drive {
    /// Plays the flow once, untimed. Panics if the flow names an order that does not rest: the file
    /// is invalid.
    pub fn new(flow: &Flow) -> Self {
        let header = &flow.header;
        let spec = InstrumentSpec::new(&InstrumentParams {
            ix: IX,
            band_low: Ticks(header.price_low.max(1)),
            band_high: Ticks(header.price_high),
            ..InstrumentParams::new(InstrumentId::new("FLOW").expect("an id"))
        })
        .expect("a consistent instrument");
        let mut book = new_book(spec);
        let mut t = Translator {
            slots: Slots::default(),
            handles: vec![Handle::NONE; header.id_max as usize + 1],
            ids: Vec::new(),
            sequence: 0,
            outcome: Outcome::default(),
        };
        let (prefill, timed) = flow.records.split_at(header.prefill as usize);
        let prefill: Vec<_> = prefill
            .iter()
            .map(|r| t.play(&mut book, &spec, r))
            .collect();
        (t.outcome.trades, t.outcome.quantity, t.outcome.stp_checks) = (0, 0, 0);
        let timed: Vec<_> = timed.iter().map(|r| t.play(&mut book, &spec, r)).collect();
        book.check_invariants();
        let outcome = Outcome {
            resting: book.resting(),
            state_hash: book.state_hash(),
            events: book.event_number(),
            ..t.outcome
        };
        Self {
            spec,
            prefill,
            timed,
            outcome,
        }
    }

    /// True if trades, quantity, tape and resting orders match the file's.
    pub fn tape_ok(&self, flow: &Flow) -> bool {
        let (found, expected) = (&self.outcome, &flow.header);
        found.trades == expected.trades
            && found.quantity == expected.quantity
            && found.tape.0 == expected.tape
            && u64::from(found.resting) == expected.resting_end
    }
}

impl Translator {
    fn play(&mut self, book: &mut Book, spec: &InstrumentSpec, record: &Record) -> Envelope {
        self.sequence += 1;
        let envelope = Envelope {
            sequence: Sequence(self.sequence),
            time_ns: self.sequence,
            received_ns: self.sequence,
            command: self.command(book, spec, record),
        };
        let mut events = Collect::default();
        book.apply(&envelope, &mut events);
        for event in &events.0 {
            self.learn(&event.event);
        }
        envelope
    }

    fn command(&mut self, book: &Book, spec: &InstrumentSpec, record: &Record) -> Command {
        let user = UserIx(record.id as u32);
        match record.op {
            Op::New(kind) => {
                let handle = self.slots.take();
                self.handles[record.id as usize] = handle;
                if self.ids.len() <= handle.slot as usize {
                    self.ids.resize(handle.slot as usize + 1, 0);
                }
                self.ids[handle.slot as usize] = record.id;
                Command::New(new_order(spec, record, kind, handle, user))
            }
            Op::Cancel => Command::Cancel(Cancel {
                handle: self.resting(book, record),
                instrument: IX,
                user,
                session: SessionIx::NONE,
                reason: CancelReason::UserRequest,
                client_seq: 0,
                key_hash: Id128::NONE,
            }),
            Op::Replace { .. } => {
                let handle = self.resting(book, record);
                let order = book.order(handle).expect("the order rests");
                let filled = order.quantity - order.open;
                Command::Amend(Amend {
                    handle,
                    instrument: IX,
                    user,
                    session: SessionIx::NONE,
                    client_seq: 0,
                    new_client_order_id: 0,
                    price: Some(Ticks(record.price)),
                    quantity: Some(filled + Lots(record.quantity)),
                    draw: Reserve::ZERO,
                    budget_minor: Minor::ZERO,
                    budget_returns: false,
                    key_hash: Id128::NONE,
                })
            }
        }
    }

    fn resting(&self, book: &Book, record: &Record) -> Handle {
        let handle = self.handles[record.id as usize];
        assert!(
            !handle.is_none() && book.is_resting(handle),
            "invalid flow: order {} does not rest",
            record.id
        );
        handle
    }

    fn learn(&mut self, event: &Event) {
        if let Event::Trade(trade) = event {
            let [maker, taker] = [trade.maker, trade.taker].map(|h| self.ids[h.slot as usize]);
            self.outcome.trades += 1;
            self.outcome.quantity += trade.quantity.0;
            self.outcome.stp_checks += u64::from(maker != taker);
            self.outcome
                .tape
                .trade(maker, taker, trade.price.0, trade.quantity.0);
        }
        for handle in event.closed().into_iter().flatten() {
            self.slots.free.push_front(handle.slot);
        }
    }
}

fn new_order(
    spec: &InstrumentSpec,
    record: &Record,
    kind: Kind,
    handle: Handle,
    user: UserIx,
) -> New {
    let side = if record.side == 0 {
        Side::Buy
    } else {
        Side::Sell
    };
    // A market order of the file has no protection price: use the far end of the band.
    let price = match (kind, side) {
        (Kind::Market, Side::Buy) => spec.band_high,
        (Kind::Market, Side::Sell) => spec.band_low,
        _ => Ticks(record.price),
    };
    New {
        order_type: if kind == Kind::Market {
            OrderType::Market
        } else {
            OrderType::Limit
        },
        time_in_force: match kind {
            Kind::Gtc => TimeInForce::Gtc,
            Kind::Ioc | Kind::Market => TimeInForce::Ioc,
            Kind::Fok => TimeInForce::Fok,
        },
        client_order_id: record.id,
        ..New::limit(
            InstrumentIx(0),
            handle,
            user,
            side,
            price,
            Lots(record.quantity),
        )
    }
}
