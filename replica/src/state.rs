//! State of the journal: the core that the hot thread runs, and the replica's own tables.
//!
//! The tables contain the data of orders, holds and sessions that admission does not need. The
//! state is a pure fold: the same records produce the same effects and message numbers.

use admission::{Admission, AdmissionConfig, OpenOrder, Report, ReportSink};
use sequencer::core::CoreObserver;
use sequencer::{Core, Record};
use std::sync::Arc;
use types::command::{BoundsOf, Cause};
use types::{
    Command, Envelope, Event, EventEnvelope, Handle, HoldIx, HoldKind, HoldPart, Id128,
    InstrumentIx, Lots, Minor, NodeId, OrderStatus, Sequence, SessionIx, Side, UserIx, derived,
    order_hold, order_uuid,
};

use crate::effects::{Applied, Effect, Hold, Moved, Order, Session, Trade, TradeStatus};
use crate::names::Names;
use crate::orders::{OrderDetails, Orders};

/// Data of a hold that admission does not need.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize,
)]
pub(crate) struct HoldDetails {
    pub funded: Minor,
    pub defunded: Minor,
    pub orders: u64,
    pub taken_at: Sequence,
    pub changed_ns: u64,
    pub used_ns: u64,
}

/// Data of a session that admission does not need.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize,
)]
pub(crate) struct SessionDetails {
    pub changed_ns: u64,
}

/// The replica's own tables, by the core's indexes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tables {
    pub orders: Orders,
    pub holds: Vec<HoldDetails>,
    pub sessions: Vec<SessionDetails>,
    /// Trading holds, oldest first. They are few, since most holds serve one order.
    pub trading: Vec<HoldIx>,
}

/// A record's events differ from those that the replica computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("command {0} was journalled with other events than the replica computes")]
pub struct Differs(pub Sequence);

/// The state of a node at one record.
pub struct State {
    node: NodeId,
    core: Core,
    tables: Tables,
    names: Arc<Names>,
}

impl State {
    pub fn new(node: NodeId, limits: AdmissionConfig) -> Self {
        Self {
            node,
            core: Core::new(limits),
            tables: Tables::default(),
            names: Arc::default(),
        }
    }

    pub(crate) fn from_parts(node: NodeId, core: Core, tables: Tables) -> Self {
        let names = Names::default();
        let admission = core.admission();
        let mut users = 0;
        while let Some(user) = admission.user(UserIx(users)) {
            names.add_user(user.id);
            users += 1;
        }
        for spec in admission.instruments() {
            names.set_instrument(*spec);
        }
        for (_, balance) in admission.holds() {
            names.add_hold(balance);
        }
        Self {
            node,
            core,
            tables,
            names: Arc::new(names),
        }
    }

    /// Applies the next record; returns its effects.
    ///
    /// # Errors
    /// [`Differs`]. The state must then be discarded.
    ///
    /// # Panics
    /// The record does not follow the last one, or breaks an invariant of admission or of a book.
    pub fn apply(&mut self, record: &Record) -> Result<Applied, Differs> {
        let envelope = &record.command;
        let cause = Cause::of(envelope);
        let mut recorder = EffectRecorder {
            node: self.node,
            cause,
            tables: &mut self.tables,
            names: &self.names,
            // A command and each of its events has at most one effect.
            effects: Vec::with_capacity(record.events.len() + 1),
            reports: Vec::with_capacity(record.events.len()),
        };
        if self.core.apply_observed(envelope, &mut recorder) != record.events {
            return Err(Differs(envelope.sequence));
        }
        let EffectRecorder {
            effects, reports, ..
        } = recorder;
        Ok(Applied {
            cause,
            effects,
            reports,
        })
    }

    pub fn node(&self) -> NodeId {
        self.node
    }

    pub fn core(&self) -> &Core {
        &self.core
    }

    /// As [`Core::release_unused`].
    pub(crate) fn release_unused(&mut self, turn: usize) {
        self.core.release_unused(turn);
    }

    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Ids and specs for the indexes, shared with other threads.
    pub fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// Last record applied.
    pub fn sequence(&self) -> Sequence {
        self.core.sequence()
    }

    /// An open order.
    pub fn order(&self, handle: Handle) -> Option<Order> {
        let open = self.core.admission().order(handle)?;
        Some(self.tables.order(open))
    }

    /// The open order with a public id, and the time of its last change: `None` if a checkpoint
    /// restored the order and nothing has changed it since.
    pub fn open_order(&self, id: Id128) -> Option<(Order, Option<u64>)> {
        let from = derived::derived_from(id, self.node)?;
        let (handle, updated_ns) = self.tables.orders.find(id, from.sequence_low)?;
        Some((self.order(handle)?, updated_ns))
    }

    /// The user's open order whose main ledger hold has this id.
    ///
    /// Visits the orders that the user entered in the hold's millisecond, ended ones included,
    /// whatever the number of the user's open orders.
    pub fn order_with_main_hold(&self, user: UserIx, hold_id: Id128) -> Option<Handle> {
        let entered = self.tables.orders.entered_with(user, hold_id);
        let mut open = entered.filter(|(handle, _)| {
            let order = self.core.admission().order(*handle);
            order.is_some_and(|order| order.user == user)
        });
        let found = open.find(|(_, id)| order_hold(*id, HoldPart::Main) == hold_id);
        found.map(|(handle, _)| handle)
    }

    /// Open orders in slot order.
    pub fn orders(&self) -> impl Iterator<Item = Order> + '_ {
        let open = self.core.admission().orders();
        open.map(|order| self.tables.order(order))
    }

    /// A hold, closed ones included.
    pub fn hold(&self, hold: HoldIx) -> Option<Hold> {
        self.tables.hold(self.core.admission(), hold)
    }

    /// As [`State::hold`], by the ledger's id.
    pub fn hold_of(&self, hold_id: Id128) -> Option<Hold> {
        self.hold(self.core.admission().hold_ix(hold_id)?)
    }

    /// Settlement state of the trade with this public id, made by command `sequence`.
    ///
    /// A bust is journalled before settlement's position passes the trade.
    pub fn trade_status(&self, sequence: Sequence, trade: Id128) -> TradeStatus {
        let admission = self.core.admission();
        if admission.is_bust(trade) {
            TradeStatus::Failed
        } else if sequence <= admission.settlement().finalized {
            TradeStatus::Settled
        } else {
            TradeStatus::Pending
        }
    }

    /// Every trading hold, closed ones included, oldest first.
    pub fn trading_holds(&self) -> impl DoubleEndedIterator<Item = Hold> + '_ {
        let hold = |ix: &HoldIx| self.hold(*ix).expect("trading hold was funded");
        self.tables.trading.iter().map(hold)
    }

    /// A session, closed ones included.
    pub fn session(&self, session: SessionIx) -> Option<Session> {
        self.tables.session(self.core.admission(), session)
    }

    /// Every session, by index.
    pub fn sessions(&self) -> impl Iterator<Item = Session> + '_ {
        (0..self.tables.sessions.len()).map_while(|at| {
            let ix = SessionIx(u32::try_from(at).expect("more than 2^32 sessions"));
            self.session(ix)
        })
    }
}

impl Tables {
    fn order(&self, open: &OpenOrder) -> Order {
        let details = self.orders.details(open.handle);
        let filled = open.filled();
        Order {
            id: details.id,
            handle: open.handle,
            instrument: open.instrument,
            user: open.user,
            session: open.session,
            hold: open.hold,
            client_order_id: open.client_order_id,
            side: open.side,
            terms: details.terms,
            price: open.price,
            quantity: open.quantity,
            open: open.open,
            filled,
            fill_totals: open.fill_totals,
            fee_rate: open.fee_rate,
            status: match (open.open.is_zero(), filled.is_zero()) {
                (true, _) => OrderStatus::Filled,
                (false, true) => OrderStatus::Open,
                (false, false) => OrderStatus::PartiallyFilled,
            },
            sequence: open.sequence,
            created_ns: open.time_ns,
            reserved: open.reserved,
        }
    }

    fn hold(&self, admission: &Admission, hold: HoldIx) -> Option<Hold> {
        let balance = admission.hold(hold)?;
        let details = self.holds.get(hold.index())?;
        Some(Hold {
            hold,
            hold_id: balance.hold_id,
            kind: balance.kind,
            user: balance.user,
            asset: balance.asset,
            held: balance.undrawn + balance.reserved,
            funded: details.funded,
            defunded: details.defunded,
            funding_seq: balance.funding_seq,
            open_orders: balance.open_orders,
            orders: details.orders,
            closed: balance.closed,
            taken_at: details.taken_at,
            changed_ns: details.changed_ns,
            used_ns: details.used_ns,
        })
    }

    fn session(&self, admission: &Admission, session: SessionIx) -> Option<Session> {
        let row = admission.session(session)?;
        let details = self.sessions.get(session.index())?;
        Some(Session {
            session,
            user: row.user,
            key: row.key,
            open: row.open,
            cancel_on_disconnect: row.cancel_on_disconnect,
            stp_group: row.stp_group,
            client_seq: row.client_seq,
            changed_ns: details.changed_ns,
            last_number: row.last_number,
        })
    }
}

/// Converts the core's changes into effects and updates the tables.
struct EffectRecorder<'a> {
    node: NodeId,
    cause: Cause,
    tables: &'a mut Tables,
    names: &'a Names,
    effects: Vec<Effect>,
    reports: Vec<Report>,
}

impl ReportSink for EffectRecorder<'_> {
    fn report(&mut self, report: &Report) {
        self.reports.push(*report);
    }
}

impl CoreObserver for EffectRecorder<'_> {
    fn on_command(&mut self, envelope: &Envelope, admission: &Admission) {
        match &envelope.command {
            Command::BindUser(c) => {
                self.names.add_user(c.id);
                self.push(Effect::User(c.user, c.id));
            }
            Command::SetInstrument(c) => self.instrument(admission, c.spec.ix),
            Command::OpenSession(c) => self.session(admission, c.session),
            Command::CloseSession(c) => self.session(admission, c.session),
            Command::Fund(c) => {
                if c.hold.index() == self.tables.holds.len() {
                    self.tables.holds.push(HoldDetails::default());
                    if c.kind == HoldKind::Trading {
                        self.tables.trading.push(c.hold);
                    }
                    let balance = admission.hold(c.hold).expect("hold was just funded");
                    self.names.add_hold(balance);
                }
                self.hold(admission, c.hold, |details, cause| {
                    details.funded += c.amount_minor;
                    details.changed_ns = cause.time_ns;
                    details.used_ns = cause.time_ns;
                });
            }
            Command::Defund(c) => self.hold(admission, c.hold, |details, cause| {
                details.defunded += c.amount_minor;
                details.taken_at = cause.sequence;
            }),
            Command::CloseHold(c) => self.hold(admission, c.hold, |details, cause| {
                details.changed_ns = cause.time_ns;
                details.taken_at = cause.sequence;
            }),
            Command::New(c) => self.entered(admission, c),
            Command::Settled(_) => {
                // From the state: if nothing is left to settle, the positions include this record.
                let known = admission.settlement();
                self.push(Effect::Settled {
                    posted: known.posted,
                    finalized: known.finalized,
                });
            }
            Command::Bust(c) => self.push(Effect::Bust(*c)),
            Command::SetOrderBounds(c) => self.names.note_member_change(c.of),
            Command::SetMemberGroup(c) => {
                self.names.note_member_change(BoundsOf::User(c.user));
            }
            Command::SetPhase(_)
            | Command::BlockUser(_)
            | Command::UnblockUser(_)
            | Command::SetBudget(_)
            | Command::ForgetSession(_)
            | Command::Cancel(_)
            | Command::Amend(_)
            | Command::MassCancel(_)
            | Command::CancelSlice(_)
            | Command::CancelAllAfter(_)
            | Command::SetKillSwitch(_)
            | Command::SuspectClock(_)
            | Command::ConfirmClock(_)
            | Command::Refused(_)
            | Command::ExpireOrders(_) => {}
        }
    }

    fn on_event(&mut self, e: &EventEnvelope, effects: &admission::Effects, admission: &Admission) {
        match &e.event {
            Event::Accepted(event) => {
                let order = self.open_order(admission, event.handle);
                self.push(Effect::Accepted(order));
            }
            Event::Rested(event) => {
                let order = self.open_order(admission, event.handle);
                self.push(Effect::Rested(order));
            }
            Event::Rejected(event) => {
                let (mut order, moved) = self.event_order(effects, admission);
                order.status = OrderStatus::Rejected;
                self.push(Effect::Refused(order, moved, event.reason));
            }
            Event::Trade(event) => self.trade(e, event, effects, admission),
            Event::Amended(event) => {
                let (order, moved) = self.event_order(effects, admission);
                let effect = Effect::Amended {
                    order,
                    moved,
                    kept_priority: event.kept_priority,
                };
                self.push(effect);
            }
            Event::Reduced(event) => {
                let (order, moved) = self.event_order(effects, admission);
                let effect = Effect::Reduced {
                    order,
                    moved,
                    quantity: event.quantity,
                    reason: event.reason,
                };
                self.push(effect);
            }
            Event::Cancelled(event) => {
                let (mut order, moved) = self.event_order(effects, admission);
                order.open = Lots::ZERO;
                order.status = OrderStatus::Cancelled;
                let effect = Effect::Cancelled {
                    order,
                    moved,
                    quantity: event.quantity,
                    reason: event.reason,
                };
                self.push(effect);
            }
            Event::PhaseChanged(_) => self.instrument(admission, e.instrument),
            Event::AmendRejected(event) => self.push(Effect::ChangeRefused(event.reason)),
            Event::CancelRejected(event) => self.push(Effect::ChangeRefused(event.reason)),
        }
    }
}

impl EffectRecorder<'_> {
    fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    fn instrument(&mut self, admission: &Admission, ix: InstrumentIx) {
        let spec = admission.spec(ix).expect("instrument was just set");
        self.names.set_instrument(*spec);
        self.push(Effect::Instrument(*spec));
    }

    fn session(&mut self, admission: &Admission, session: SessionIx) {
        if session.index() == self.tables.sessions.len() {
            self.tables.sessions.push(SessionDetails::default());
        }
        self.tables.sessions[session.index()].changed_ns = self.cause.time_ns;
        let session = self.tables.session(admission, session);
        self.push(Effect::Session(session.expect("session was just stored")));
    }

    fn hold(
        &mut self,
        admission: &Admission,
        hold: HoldIx,
        change: impl FnOnce(&mut HoldDetails, &Cause),
    ) {
        change(&mut self.tables.holds[hold.index()], &self.cause);
        let hold = self.tables.hold(admission, hold);
        self.push(Effect::Hold(hold.expect("hold is known")));
    }

    fn entered(&mut self, admission: &Admission, c: &types::command::New) {
        let cause = &self.cause;
        let details = OrderDetails {
            generation: c.handle.generation,
            id: order_uuid(cause.time_ns, self.node, cause.sequence),
            terms: c.into(),
        };
        let (by, updated_ns) = ((c.user, cause.sequence), Some(cause.time_ns));
        let orders = &mut self.tables.orders;
        orders.insert(c.handle.slot, by, details, updated_ns);
        let details = &mut self.tables.holds[c.hold.index()];
        details.orders += 1;
        details.used_ns = cause.time_ns;
        let order = self.open_order(admission, c.handle);
        self.push(Effect::Entered(order));
    }

    fn trade(
        &mut self,
        e: &EventEnvelope,
        event: &types::event::Trade,
        effects: &admission::Effects,
        admission: &Admission,
    ) {
        let (maker, maker_moved) = self.event_order(effects, admission);
        let taker = effects.taker.as_ref().expect("trade without a taker");
        let (taker, taker_moved) = self.moved(taker, admission);
        let (buy, sell) = match taker.side {
            Side::Buy => (&taker_moved, &maker_moved),
            Side::Sell => (&maker_moved, &taker_moved),
        };
        let trade = Trade {
            id: e.trade_uuid(self.node),
            instrument: e.instrument,
            number: event.trade_number,
            price: event.price,
            quantity: event.quantity,
            value_minor: buy.spent.main,
            units_minor: sell.spent.main,
            fee_minor: buy.spent.fee,
            maker,
            taker,
            maker_moved,
            taker_moved,
        };
        self.push(Effect::Traded(Box::new(trade)));
    }

    /// The order that an event names, as it is after the event, and the movements of its money.
    fn event_order(
        &mut self,
        effects: &admission::Effects,
        admission: &Admission,
    ) -> (Order, Moved) {
        let effect = effects.order.as_ref();
        self.moved(effect.expect("event names no open order"), admission)
    }

    fn moved(&mut self, effect: &admission::Effect, admission: &Admission) -> (Order, Moved) {
        let order = self.changed(&effect.order);
        let balance = admission.hold(order.hold).expect("order without a hold");
        if effect.closed {
            self.tables.holds[order.hold.index()].used_ns = self.cause.time_ns;
        }
        let moved = Moved {
            spent: effect.spent,
            returned: effect.returned,
            held: balance.undrawn + balance.reserved,
            hold_orders: balance.open_orders,
        };
        (order, moved)
    }

    fn open_order(&mut self, admission: &Admission, handle: Handle) -> Order {
        let open = admission.order(handle);
        self.changed(open.expect("event names no open order"))
    }

    fn changed(&mut self, order: &OpenOrder) -> Order {
        let orders = &mut self.tables.orders;
        orders.set_updated(order.handle, self.cause.time_ns);
        self.tables.order(order)
    }
}
