//! Numbered messages of sessions, derived from commands and their events (`design.md` 2).
//!
//! Hot thread, replica and recovery number with this code, each in the order of the journal: a
//! command's own messages first, then those of its events by instrument and index, then the end of
//! a mass cancel. So a message has the same number in all three. A message costs one access to the
//! order and one to its session's row.
//!
//! Three kinds of commands have messages for sessions that did not send them:
//! - `Fund`, `Defund` and `CloseHold` of a trading hold: one for each session of its user, open or
//!   not. The figures are read from the state: the caller has applied everything up to the command
//!   and nothing after it.
//! - `Settled`: one for each session with a trade that the new positions pass and the positions of
//!   its last message did not. A session whose trades are all final costs nothing. Any other costs
//!   at most one message per `Settled`: 30 to 80 ns each, measured with 10,000 sessions.
//! - `Bust`: one for each of the two orders.

use types::command::{Bust, Cause, FundingCause, RequestKind, Settled};
use types::event::{Event, Trade};
use types::{
    AssetIx, CancelReason, Command, EventEnvelope, Handle, HoldIx, HoldKind, Id128, InstrumentIx,
    Lots, Minor, RejectReason, Reserve, Sequence, SessionIx, Side, Ticks,
};

use crate::admission::Admission;
use crate::state::OpenOrder;

/// A numbered message of a session. Its sequence and times are those of its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub session: SessionIx,
    /// `NONE` if no instrument is concerned.
    pub instrument: InstrumentIx,
    /// 1, 2, 3, ... per session.
    pub number: u64,
    /// Client sequence of the session's request that it answers, 0 for none.
    pub client_seq: u64,
    /// 0 for none.
    pub client_order_id: u64,
    /// `NONE` for none.
    pub handle: Handle,
    pub body: ReportBody,
}

/// Content of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportBody {
    /// The order of this command reached the book.
    Acknowledged {
        side: Side,
        price: Ticks,
        open: Lots,
    },
    /// Admission or the book refused the request.
    Rejected {
        request: RequestKind,
        reason: RejectReason,
        /// [`crate::Reject::limit`]; of the book's `PRICE_BAND` the band's limit, in ticks.
        limit: u64,
    },
    Filled {
        side: Side,
        is_taker: bool,
        /// Index of the event among its command's on this instrument: the trade's public id derives
        /// from it.
        index: u32,
        trade_number: u64,
        price: Ticks,
        quantity: Lots,
        /// Open quantity after the trade.
        open: Lots,
        /// Charged to this order.
        fee: Minor,
        /// The order on the other side.
        counter: Handle,
    },
    /// The order has ended with this quantity unfilled.
    Cancelled {
        reason: CancelReason,
        quantity: Lots,
    },
    Amended {
        kept_priority: bool,
        price: Ticks,
        /// Total, including the filled part.
        quantity: Lots,
        open: Lots,
    },
    /// Self-trade prevention removed this quantity.
    Reduced {
        reason: CancelReason,
        quantity: Lots,
        open: Lots,
    },
    /// Number of orders that the mass cancel ended, on the instrument it named or on all.
    MassCancelled {
        count: u32,
        /// At most this many follow in slices; 0 = the mass cancel is complete.
        remaining: u32,
    },
    /// Journalled time in nanoseconds at which the session's orders end unless it renews the timer;
    /// 0 = never.
    CancelAllAfter { at_ns: u64 },
    /// A trading hold of the session's user, after the command.
    HoldChanged {
        asset: AssetIx,
        /// The ledger hold.
        hold_id: Id128,
        undrawn: Minor,
        /// Sum of the reserves of its open orders.
        drawn: Minor,
        cause: FundingCause,
    },
    /// Settlement has passed a trade of the session.
    Settled {
        posted: Sequence,
        finalized: Sequence,
        trades_final: u64,
    },
    /// A trade of the order is bust.
    Busted {
        trade: Id128,
        trade_number: u64,
        side: Side,
    },
}

/// Receives reports in the order in which they are numbered.
pub trait ReportSink {
    fn report(&mut self, report: &Report);
}

/// Reports are numbered and dropped.
impl ReportSink for () {
    #[inline(always)]
    fn report(&mut self, _: &Report) {}
}

impl ReportSink for alloc::vec::Vec<Report> {
    fn report(&mut self, report: &Report) {
        self.push(*report);
    }
}

/// The receiving session, and the order that a report is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject {
    session: SessionIx,
    client_order_id: u64,
    handle: Handle,
}

impl Subject {
    /// The subject of a report about no order.
    pub fn session(session: SessionIx) -> Self {
        Self {
            session,
            client_order_id: 0,
            handle: Handle::NONE,
        }
    }
}

/// What a report needs of an order, after its event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Brief {
    subject: Subject,
    price: Ticks,
    quantity: Lots,
    open: Lots,
    side: Side,
    /// Charged by the event.
    fee: Minor,
}

impl Brief {
    #[inline(always)]
    pub fn of(order: &OpenOrder, spent: Reserve) -> Self {
        Self {
            subject: Subject {
                session: order.session,
                client_order_id: order.client_order_id,
                handle: order.handle,
            },
            price: order.price,
            quantity: order.quantity,
            open: order.open,
            side: order.side,
            fee: spent.fee,
        }
    }
}

/// Orders that an event named: one, or maker and taker of a trade.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Touched {
    pub order: Option<Brief>,
    pub taker: Option<Brief>,
}

impl Admission {
    /// Numbers the messages of a command itself: see the module documentation.
    #[inline]
    pub fn report_command(&mut self, cause: &Cause, command: &Command, to: &mut impl ReportSink) {
        if !matches!(
            command,
            Command::New(_) | Command::Cancel(_) | Command::Amend(_)
        ) {
            self.report_rarely(cause, command, to);
        }
    }

    #[cold]
    fn report_rarely(&mut self, cause: &Cause, command: &Command, to: &mut impl ReportSink) {
        let (subject, instrument, body) = match command {
            Command::Refused(c) => {
                let subject = Subject {
                    session: c.session,
                    client_order_id: c.client_order_id,
                    handle: c.handle,
                };
                let body = ReportBody::Rejected {
                    request: c.request,
                    reason: c.reason,
                    limit: c.limit,
                };
                (subject, c.instrument, body)
            }
            Command::CancelAllAfter(c) => {
                // Not from the state: a later command may be applied already.
                let at_ns = c.at_ns(cause.time_ns);
                let body = ReportBody::CancelAllAfter { at_ns };
                (Subject::session(c.session), InstrumentIx::NONE, body)
            }
            Command::Fund(c) => return self.report_hold(c.hold, FundingCause::Fund, to),
            Command::Defund(c) => return self.report_hold(c.hold, FundingCause::Defund, to),
            Command::CloseHold(c) => return self.report_hold(c.hold, FundingCause::Close, to),
            Command::Settled(c) => return self.report_settled(c, to),
            Command::Bust(c) => return self.report_bust(c, to),
            _ => return,
        };
        self.report_out_of_line(subject, instrument, cause.client_seq, body, to);
    }

    /// Reports to every session of the user of a trading hold. A single-order hold belongs to the
    /// platform and is not reported.
    fn report_hold(&mut self, hold: HoldIx, cause: FundingCause, to: &mut impl ReportSink) {
        let balance = &self.tables.holds[hold.index()];
        if balance.kind != HoldKind::Trading {
            return;
        }
        let user = balance.user;
        let body = ReportBody::HoldChanged {
            asset: balance.asset,
            hold_id: balance.hold_id,
            undrawn: balance.undrawn,
            drawn: balance.reserved,
            cause,
        };
        let mut at = 0;
        while let Some(session) = self.order_lists.sessions_of(user).get(at) {
            self.report_out_of_line(Subject::session(*session), InstrumentIx::NONE, 0, body, to);
            at += 1;
        }
    }

    /// Reports to the sessions with a trade that these positions pass, by index.
    fn report_settled(&mut self, c: &Settled, to: &mut impl ReportSink) {
        // From the command: the state may have the positions of a later one.
        let body = ReportBody::Settled {
            posted: c.posted,
            finalized: c.finalized,
            trades_final: c.trades_final,
        };
        let mut from = 0;
        while let Some(session) = self.awaiting.next(from) {
            let unsettled = &mut self.tables.sessions[session.index()].unsettled;
            let is_covered = unsettled.advance_to(c.posted, c.finalized);
            if !unsettled.any() {
                self.awaiting.remove(session);
            }
            if is_covered {
                self.report_out_of_line(Subject::session(session), InstrumentIx::NONE, 0, body, to);
            }
            from = session.index() + 1;
        }
    }

    /// Reports to the sessions of both orders, the buyer's first.
    fn report_bust(&mut self, c: &Bust, to: &mut impl ReportSink) {
        for (party, side) in [(&c.buy, Side::Buy), (&c.sell, Side::Sell)] {
            let subject = Subject {
                session: party.session,
                client_order_id: party.client_order_id,
                handle: party.handle,
            };
            let body = ReportBody::Busted {
                trade: c.trade,
                trade_number: c.trade_number,
                side,
            };
            self.report_out_of_line(subject, c.instrument, 0, body, to);
        }
    }

    /// Numbers the message of a command that comes after those of its events: of a mass cancel or
    /// its last slice, the number of orders ended.
    #[inline]
    pub fn report_end(
        &mut self,
        cause: &Cause,
        command: &Command,
        events: usize,
        to: &mut impl ReportSink,
    ) {
        if !matches!(
            command,
            Command::New(_) | Command::Cancel(_) | Command::Amend(_)
        ) {
            self.report_rare_end(cause, command, events, to);
        }
    }

    #[cold]
    fn report_rare_end(
        &mut self,
        cause: &Cause,
        command: &Command,
        events: usize,
        to: &mut impl ReportSink,
    ) {
        // Each event of these commands ends an order.
        let count = || u32::try_from(events).expect("no more events than slots");
        match command {
            Command::MassCancel(c) => {
                let (count, remaining) = (count(), c.remaining);
                let subject = Subject::session(c.session);
                let body = ReportBody::MassCancelled { count, remaining };
                self.report_out_of_line(subject, c.instrument, cause.client_seq, body, to);
                self.report_sweep(command, cause.sequence, count, to);
            }
            Command::CancelSlice(_) | Command::SetKillSwitch(_) => {
                self.report_sweep(command, cause.sequence, count(), to);
            }
            _ => {}
        }
    }

    /// Numbers the messages of an event that was applied.
    #[inline]
    pub(crate) fn report_event(
        &mut self,
        e: &EventEnvelope,
        cause: &Cause,
        touched: &Touched,
        to: &mut impl ReportSink,
    ) {
        let instrument = e.instrument;
        match &e.event {
            Event::Accepted(event) => {
                let order = self.order(event.handle);
                let order = order.expect("an accepted order is open");
                let brief = Brief::of(order, Reserve::ZERO);
                let body = ReportBody::Acknowledged {
                    side: brief.side,
                    price: brief.price,
                    open: brief.open,
                };
                self.report_in_place(brief.subject, instrument, cause.client_seq, body, to);
            }
            Event::Rejected(event) => {
                let order = touched_order(touched);
                let body = ReportBody::Rejected {
                    request: RequestKind::New,
                    reason: event.reason,
                    limit: self.book_limit(event.reason, instrument, order.price),
                };
                self.report_out_of_line(order.subject, instrument, cause.client_seq, body, to);
            }
            Event::Trade(event) => self.report_trade(e, event, touched, to),
            Event::Amended(event) => {
                let order = touched_order(touched);
                let body = ReportBody::Amended {
                    kept_priority: event.kept_priority,
                    price: order.price,
                    quantity: order.quantity,
                    open: order.open,
                };
                self.report_both(order, instrument, cause, RequestKind::Amend, body, to);
            }
            Event::Reduced(event) => {
                let order = touched_order(touched);
                let body = ReportBody::Reduced {
                    reason: event.reason,
                    quantity: event.quantity,
                    open: order.open,
                };
                self.report_out_of_line(order.subject, instrument, 0, body, to);
            }
            Event::Cancelled(event) => {
                let order = touched_order(touched);
                let body = ReportBody::Cancelled {
                    reason: event.reason,
                    quantity: event.quantity,
                };
                self.report_both(order, instrument, cause, RequestKind::Cancel, body, to);
            }
            Event::AmendRejected(event) => {
                let (request, reason) = (RequestKind::Amend, event.reason);
                self.report_refused(event.handle, instrument, cause, request, reason, to);
            }
            Event::CancelRejected(event) => {
                let (request, reason) = (RequestKind::Cancel, event.reason);
                self.report_refused(event.handle, instrument, cause, request, reason, to);
            }
            Event::Rested(_) | Event::PhaseChanged(_) => {}
        }
    }

    /// Reports to the maker, then to the taker.
    #[inline]
    fn report_trade(
        &mut self,
        e: &EventEnvelope,
        event: &Trade,
        touched: &Touched,
        to: &mut impl ReportSink,
    ) {
        let taker = touched.taker.as_ref().expect("a trade has a taker");
        let maker = touched_order(touched);
        for (order, counter, is_taker) in [(maker, taker, false), (taker, maker, true)] {
            let body = ReportBody::Filled {
                side: order.side,
                is_taker,
                index: e.index,
                trade_number: event.trade_number,
                price: event.price,
                quantity: event.quantity,
                open: order.open,
                fee: order.fee,
                counter: counter.subject.handle,
            };
            self.report_in_place(order.subject, e.instrument, 0, body, to);
            self.note_trade(order.subject.session, e.sequence);
        }
    }

    /// Marks the session to get a message when settlement passes the trade.
    #[inline]
    fn note_trade(&mut self, session: SessionIx, sequence: Sequence) {
        if let Some(row) = self.tables.sessions.get_mut(session.index()) {
            if !row.unsettled.any() {
                self.awaiting.insert(session);
            }
            row.unsettled.note_trade(sequence);
        }
    }

    /// Reports to the order's session, and to the requesting session if that is another one.
    #[inline(always)]
    fn report_both(
        &mut self,
        order: &Brief,
        instrument: InstrumentIx,
        cause: &Cause,
        request: RequestKind,
        body: ReportBody,
        to: &mut impl ReportSink,
    ) {
        let is_asked = cause.request == request;
        let is_own = is_asked && cause.session == order.subject.session;
        let client_seq = if is_own { cause.client_seq } else { 0 };
        self.report_in_place(order.subject, instrument, client_seq, body, to);
        if is_asked && !is_own {
            let asker = Subject {
                session: cause.session,
                ..order.subject
            };
            self.report_out_of_line(asker, instrument, cause.client_seq, body, to);
        }
    }

    /// Reports to the session whose request the book refuses.
    fn report_refused(
        &mut self,
        handle: Handle,
        instrument: InstrumentIx,
        cause: &Cause,
        request: RequestKind,
        reason: RejectReason,
        to: &mut impl ReportSink,
    ) {
        let (client_order_id, mut price) = match self.order(handle) {
            Some(open) => (open.client_order_id, open.price),
            None => (0, Ticks::ZERO),
        };
        if cause.amended_price != Ticks::ZERO {
            price = cause.amended_price;
        }
        let subject = Subject {
            session: cause.session,
            client_order_id,
            handle,
        };
        let limit = self.book_limit(reason, instrument, price);
        let body = ReportBody::Rejected {
            request,
            reason,
            limit,
        };
        self.report_out_of_line(subject, instrument, cause.client_seq, body, to);
    }

    /// Limit value of a refusal by the book, 0 for none: for `PRICE_BAND` the limit of the band
    /// that the price exceeds, in ticks; for `PRICE_TICK` and `QUANTITY_LOT` the maximum.
    ///
    /// The band is that of the refusal: a change of an instrument waits until no command is in
    /// flight. So a live message has the same limit as one that is rebuilt from the journal.
    #[cold]
    fn book_limit(&self, reason: RejectReason, instrument: InstrumentIx, price: Ticks) -> u64 {
        let spec = &self.tables.instruments[instrument.index()].spec;
        let ticks = match reason {
            RejectReason::PriceBand if price < spec.band_low => spec.band_low,
            RejectReason::PriceBand => spec.band_high,
            RejectReason::PriceTick => Ticks::ORDER_MAX,
            RejectReason::QuantityLot => return Lots::ORDER_MAX.0,
            _ => return 0,
        };
        u64::try_from(ticks.0).unwrap_or(0)
    }

    /// Numbers a message. Inlined, so that frequent messages are built where the sink stores them.
    #[inline(always)]
    fn report_in_place(
        &mut self,
        subject: Subject,
        instrument: InstrumentIx,
        client_seq: u64,
        body: ReportBody,
        to: &mut impl ReportSink,
    ) {
        if subject.session.is_none() {
            return;
        }
        let row = &mut self.tables.sessions[subject.session.index()];
        row.last_number += 1;
        let report = Report {
            session: subject.session,
            instrument,
            number: row.last_number,
            client_seq,
            client_order_id: subject.client_order_id,
            handle: subject.handle,
            body,
        };
        to.report(&report);
    }

    /// As [`Admission::report_in_place`], not inlined: for rare messages.
    #[inline(never)]
    pub(crate) fn report_out_of_line(
        &mut self,
        subject: Subject,
        instrument: InstrumentIx,
        client_seq: u64,
        body: ReportBody,
        to: &mut impl ReportSink,
    ) {
        self.report_in_place(subject, instrument, client_seq, body, to);
    }
}

#[inline(always)]
fn touched_order(touched: &Touched) -> &Brief {
    let order = touched.order.as_ref();
    order.expect("the event names an open order")
}
