//! Untimed preparation of the `flow` benchmark: translates a flow into the commands that admission
//! would send, applies them once and verifies the trades.
//!
//! Each order has its own user, so self-trade prevention runs at each match and never fires. Slots
//! are assigned as by admission: the slot freed last comes first, and 512 slots are added when none
//! is free.

use std::collections::VecDeque;

use engine::{Book, BookConfig, EventSink};
use types::command::{Amend, Cancel, New};
use types::{
    CancelReason, Command, Envelope, Event, EventEnvelope, Handle, Id128, InstrumentId,
    InstrumentIx, InstrumentParams, InstrumentSpec, Lots, Minor, OrderType, Quote, Reserve,
    Sequence, SessionIx, Side, Ticks, TimeInForce, UserIx,
};

use crate::xflow::{Flow, Kind, Op, Record, TapeHash};

/// Slots added when none is free.
const BLOCK: u32 = 512;
const IX: InstrumentIx = InstrumentIx(0);

/// Commands of a flow, and the result of applying them once.
pub struct PreparedFlow {
    pub spec: InstrumentSpec,
    pub prefill: Vec<Envelope>,
    pub timed: Vec<Envelope>,
    pub result: FlowResult,
}

/// Result of a flow in the book.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowResult {
    /// Trades of the timed records.
    pub trades: u64,
    /// Traded lots of the timed records.
    pub quantity: u64,
    /// Hash of all trades, prefill included.
    pub tape: TapeHash,
    /// Trades of the timed records between two different orders. Each one passed self-trade
    /// prevention, since each order has its own user.
    pub stp_checks: u64,
    /// Resting orders at the end.
    pub resting: u32,
    pub state_hash: u64,
    pub events: u64,
}

/// An empty book with the capacity that it has in the platform.
pub fn new_book(spec: InstrumentSpec) -> Book {
    Book::new(spec, BookConfig::default())
}

/// Slots of the orders, assigned as by admission.
#[derive(Default)]
struct Slots {
    free: VecDeque<u32>,
    generations: Vec<u32>,
}

impl Slots {
    fn allocate(&mut self) -> Handle {
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
    /// Handles, by order id of the file.
    handles: Vec<Handle>,
    /// Order ids of the file, by slot.
    ids: Vec<u64>,
    sequence: u64,
    result: FlowResult,
}

impl PreparedFlow {
    /// Translates the flow and applies it once. Panics if a cancel or replace names an order that
    /// does not rest.
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
        let mut translator = Translator {
            slots: Slots::default(),
            handles: vec![Handle::NONE; header.id_max as usize + 1],
            ids: Vec::new(),
            sequence: 0,
            result: FlowResult::default(),
        };
        let (prefill, timed) = flow.records.split_at(header.prefill as usize);
        let prefill: Vec<_> = prefill
            .iter()
            .map(|r| translator.apply(&mut book, &spec, r))
            .collect();
        (
            translator.result.trades,
            translator.result.quantity,
            translator.result.stp_checks,
        ) = (0, 0, 0);
        let timed: Vec<_> = timed
            .iter()
            .map(|r| translator.apply(&mut book, &spec, r))
            .collect();
        book.check_invariants();
        let result = FlowResult {
            resting: book.resting(),
            state_hash: book.state_hash(),
            events: book.event_number(),
            ..translator.result
        };
        Self {
            spec,
            prefill,
            timed,
            result,
        }
    }

    /// True if trades, quantity, tape hash and resting orders equal those of the file's header.
    pub fn tape_ok(&self, flow: &Flow) -> bool {
        let (found, expected) = (&self.result, &flow.header);
        found.trades == expected.trades
            && found.quantity == expected.quantity
            && found.tape.0 == expected.tape
            && u64::from(found.resting) == expected.resting_end
    }
}

impl Translator {
    fn apply(&mut self, book: &mut Book, spec: &InstrumentSpec, record: &Record) -> Envelope {
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
            self.record_event(&event.event);
        }
        envelope
    }

    fn command(&mut self, book: &Book, spec: &InstrumentSpec, record: &Record) -> Command {
        let user = UserIx(record.id as u32);
        match record.op {
            Op::New(kind) => {
                let handle = self.slots.allocate();
                self.handles[record.id as usize] = handle;
                if self.ids.len() <= handle.slot as usize {
                    self.ids.resize(handle.slot as usize + 1, 0);
                }
                self.ids[handle.slot as usize] = record.id;
                Command::New(new_order(spec, record, kind, handle, user))
            }
            Op::Cancel => Command::Cancel(Cancel {
                handle: self.resting_handle(book, record),
                instrument: IX,
                user,
                session: SessionIx::NONE,
                reason: CancelReason::UserRequest,
                client_seq: 0,
                key_hash: Id128::NONE,
            }),
            Op::Replace { .. } => {
                let handle = self.resting_handle(book, record);
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

    fn resting_handle(&self, book: &Book, record: &Record) -> Handle {
        let handle = self.handles[record.id as usize];
        assert!(
            !handle.is_none() && book.is_resting(handle),
            "invalid flow: order {} does not rest",
            record.id
        );
        handle
    }

    fn record_event(&mut self, event: &Event) {
        if let Event::Trade(trade) = event {
            let [maker, taker] = [trade.maker, trade.taker].map(|h| self.ids[h.slot as usize]);
            self.result.trades += 1;
            self.result.quantity += trade.quantity.0;
            self.result.stp_checks += u64::from(maker != taker);
            self.result
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
    // The file's market orders have no protection price. Use the far limit of the band.
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
