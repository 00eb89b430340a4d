//! Translates the harness's messages to commands of the book, and the book's events to reports.

use core::ffi::c_void;

use engine::{Book, BookConfig, EventSink};
use types::event::Event;
use types::{
    CancelReason, Command, Envelope, EventEnvelope, Handle, Id128, InstrumentId, InstrumentIx,
    InstrumentParams, InstrumentSpec, Lots, Minor, Quote, Reserve, Sequence, SessionIx, Side,
    Ticks, TimeInForce, UserIx, command,
};

use crate::abi::{self, Amend, Cancel, NewOrder, Push, Report};
use crate::orders::Orders;

const IX: InstrumentIx = InstrumentIx(0);
/// Initial capacity of the book in orders.
const ORDERS_INITIAL: u32 = 1 << 20;

/// The harness's report queue.
#[derive(Clone, Copy)]
pub struct Reports {
    push: Push,
    sink: *mut c_void,
}

impl Reports {
    /// Wraps the harness's queue.
    ///
    /// # Safety
    /// `push` may be called with `sink` as long as a copy of this exists.
    #[allow(unsafe_code)]
    pub unsafe fn new(push: Push, sink: *mut c_void) -> Self {
        Self { push, sink }
    }

    /// Enqueues a report; spins while the queue is full.
    #[inline]
    fn send(self, report: &Report) {
        // SAFETY: the caller of `new` guarantees that `push` may be called with `sink`; the report
        // outlives the call.
        #[allow(unsafe_code)]
        while unsafe { (self.push)(self.sink, report) } == 0 {
            core::hint::spin_loop();
        }
    }
}

/// A book with the orders that the harness's messages name.
pub struct Adapter {
    book: Book,
    orders: Orders,
    reports: Reports,
    sequence: u64,
}

impl Adapter {
    pub fn new(reports: Reports) -> Self {
        let config = BookConfig {
            orders: ORDERS_INITIAL,
            ..BookConfig::default()
        };
        Self {
            book: Book::new(instrument(), config),
            orders: Orders::new(),
            reports,
            sequence: 0,
        }
    }

    /// Processes a new order. The ABI has no report for a rejected order, so none is sent if the
    /// book rejects the order or its id is in use.
    pub fn new_order(&mut self, message: &NewOrder) {
        let Some(handle) = self.orders.open(message.order_id) else {
            return;
        };
        let side = side(message.side);
        let command = Command::New(new_order(message, handle, side));
        self.apply(
            command,
            ReportFields::new(message.sequence, side, message.price),
        );
    }

    /// Processes a cancel.
    pub fn cancel(&mut self, message: &Cancel) {
        let handle = self.orders.handle(message.order_id);
        // The report contains side and price, the event does not.
        let order = self.book.order(handle);
        let (side, price) = order.map_or((Side::Buy, 0), |order| (order.side, order.price.0));
        let command = Command::Cancel(command::Cancel {
            handle,
            instrument: IX,
            user: UserIx(handle.slot),
            session: SessionIx::NONE,
            reason: CancelReason::UserRequest,
            client_seq: 0,
            key_hash: Id128::NONE,
        });
        self.apply(
            command,
            ReportFields::new(message.sequence, side, price).with_order_id(message.order_id),
        );
    }

    /// Processes an amend. The harness sends the open quantity and the book expects the total, so
    /// the filled quantity is added.
    pub fn amend(&mut self, message: &Amend) {
        let handle = self.orders.handle(message.order_id);
        let order = self.book.order(handle);
        let filled = order.map_or(Lots::ZERO, |order| order.quantity - order.open);
        let command = Command::Amend(command::Amend {
            handle,
            instrument: IX,
            user: UserIx(handle.slot),
            session: SessionIx::NONE,
            client_seq: 0,
            price: Some(Ticks(message.price)),
            quantity: Some(filled + Lots(message.quantity.into())),
            draw: Reserve::ZERO,
            budget_minor: Minor::ZERO,
            budget_returns: false,
            key_hash: Id128::NONE,
            new_client_order_id: 0,
        });
        let side = side(message.side);
        let fields = ReportFields::new(message.sequence, side, message.price);
        self.apply(command, fields.with_order_id(message.order_id));
    }

    fn apply(&mut self, command: Command, fields: ReportFields) {
        self.sequence += 1;
        let envelope = Envelope {
            sequence: Sequence(self.sequence),
            time_ns: self.sequence,
            command,
            received_ns: self.sequence,
        };
        let (orders, reports) = (&mut self.orders, self.reports);
        self.book.apply(
            &envelope,
            &mut ReportSink {
                orders,
                reports,
                fields,
            },
        );
    }

    /// Best price of a side.
    pub fn best_price(&self, of: u8) -> Option<i64> {
        Some(self.book.best(side(of))?.0)
    }

    /// Open quantity at a price; iterates over the better levels.
    pub fn depth_at(&self, price: i64, of: u8) -> u64 {
        let found = self
            .book
            .depth(side(of))
            .find(|level| level.price.0 == price);
        found.map_or(0, |level| level.open.0)
    }
}

/// Fields that the reports of a message copy from it.
#[derive(Clone, Copy)]
struct ReportFields {
    sequence: u64,
    side: Side,
    price: i64,
    /// The order named by a cancel or an amend, live or not.
    order_id: u64,
}

impl ReportFields {
    fn new(sequence: u64, side: Side, price: i64) -> Self {
        Self {
            sequence,
            side,
            price,
            order_id: 0,
        }
    }

    fn with_order_id(self, order_id: u64) -> Self {
        Self { order_id, ..self }
    }

    /// A report about one order. The quantity fits, because quantities of the ABI have 32 bits.
    #[inline]
    fn report(&self, kind: u8, order_id: u64, quantity: Lots) -> Report {
        Report {
            kind,
            side: self.side.index() as u8,
            sequence: self.sequence,
            order_id,
            price: self.price,
            quantity: quantity.0 as u32,
            ..Report::default()
        }
    }
}

/// Translates the events of one message to reports, and frees closed orders.
struct ReportSink<'a> {
    orders: &'a mut Orders,
    reports: Reports,
    fields: ReportFields,
}

impl EventSink for ReportSink<'_> {
    #[inline]
    fn event(&mut self, envelope: &EventEnvelope) {
        let fields = &self.fields;
        let id = |handle| self.orders.id(handle);
        let report = match &envelope.event {
            Event::Accepted(e) => Some(fields.report(abi::ORDER_ACK, id(e.handle), e.open)),
            Event::Amended(e) => Some(fields.report(abi::MODIFY_ACK, id(e.handle), e.open)),
            Event::Cancelled(e) => Some(fields.report(abi::CANCEL_ACK, id(e.handle), e.quantity)),
            Event::Trade(e) => Some(Report {
                kind: abi::TRADE,
                sequence: fields.sequence,
                price: e.price.0,
                quantity: e.quantity.0 as u32,
                maker_order_id: id(e.maker),
                taker_order_id: id(e.taker),
                ..Report::default()
            }),
            Event::CancelRejected(_) => Some(Report {
                kind: abi::CANCEL_REJECT,
                sequence: fields.sequence,
                order_id: fields.order_id,
                ..Report::default()
            }),
            Event::AmendRejected(_) => Some(Report {
                kind: abi::MODIFY_REJECT,
                sequence: fields.sequence,
                order_id: fields.order_id,
                ..Report::default()
            }),
            Event::Rejected(_) | Event::Rested(_) | Event::Reduced(_) | Event::PhaseChanged(_) => {
                None
            }
        };
        if let Some(report) = &report {
            self.reports.send(report);
        }
        for handle in envelope.event.closed().into_iter().flatten() {
            self.orders.close(handle);
        }
    }

    #[inline]
    fn quote(&mut self, _: InstrumentIx, _: Quote) {}
}

fn side(of: u8) -> Side {
    if of == abi::BUY {
        Side::Buy
    } else {
        Side::Sell
    }
}

/// Each live order has its own user, so self-trade prevention runs at each match and never fires.
#[inline]
fn new_order(message: &NewOrder, handle: Handle, side: Side) -> command::New {
    let user = UserIx(handle.slot);
    let time_in_force = if message.ioc == 0 {
        TimeInForce::Gtc
    } else {
        TimeInForce::Ioc
    };
    let (price, quantity) = (Ticks(message.price), Lots(message.quantity.into()));
    command::New {
        time_in_force,
        client_order_id: message.order_id,
        ..command::New::limit(IX, handle, user, side, price, quantity)
    }
}

/// An instrument whose band allows every price of the book. The harness's tick is half a cent, but
/// its value is irrelevant: nothing is paid.
fn instrument() -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix: IX,
        ..InstrumentParams::new(InstrumentId::new("HARNESS").expect("an id"))
    })
    .expect("a consistent instrument")
}
