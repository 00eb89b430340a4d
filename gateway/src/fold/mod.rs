//! What the journal says, told order by order: one pure fold that the session streams and the projection share.
//!
//! `apply` takes one record (a command with all its events) and gives the facts it brought, in the order of the events. State kept: users,
//! instruments, sessions, pools and *open* orders; a closed order leaves with its closing fact. No clock, no I/O: the same journal gives the same
//! facts, whatever number of times it is read.

mod facts;
mod image;

use std::collections::HashMap;

use types::command::{self, RequestKind};
use types::{
    Command, Done, Envelope, Event, EventEnvelope, Handle, HoldIx, Id128, InstrumentIx,
    InstrumentSpec, Lots, Minor, NodeId, OrderStatus, PoolKind, RejectReason, Sequence, Side,
    UserId, UserIx, fee, order_uuid,
};

use facts::cause;
pub use facts::{Cause, Fact, Order, Pool, Session, Trade};
pub use image::FoldImage;

/// The fold.
pub struct Fold {
    node: NodeId,
    sequence: Sequence,
    /// Of the record being applied.
    time_ns: u64,
    users: Vec<UserId>,
    instruments: Vec<InstrumentSpec>,
    sessions: Vec<Session>,
    pools: Vec<Pool>,
    pools_by_id: HashMap<Id128, HoldIx>,
    /// Trading holds, oldest first: few among the pools, most of which served one order.
    trading: Vec<HoldIx>,
    orders: HashMap<Handle, Order>,
}

impl Fold {
    pub fn new(node: NodeId) -> Self {
        Self {
            node,
            sequence: Sequence::ZERO,
            time_ns: 0,
            users: Vec::new(),
            instruments: Vec::new(),
            sessions: Vec::new(),
            pools: Vec::new(),
            pools_by_id: HashMap::new(),
            trading: Vec::new(),
            orders: HashMap::new(),
        }
    }

    /// Last command applied.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    pub fn node(&self) -> NodeId {
        self.node
    }

    pub fn user(&self, user: UserIx) -> &UserId {
        &self.users[user.index()]
    }

    pub fn instruments(&self) -> &[InstrumentSpec] {
        &self.instruments
    }

    pub fn instrument(&self, instrument: InstrumentIx) -> &InstrumentSpec {
        &self.instruments[instrument.index()]
    }

    pub fn sessions(&self) -> &[Session] {
        &self.sessions
    }

    /// A pool, closed ones included.
    pub fn pool(&self, hold: HoldIx) -> Option<&Pool> {
        self.pools.get(hold.index())
    }

    /// The pool of a ledger hold.
    pub fn pool_of(&self, hold_id: Id128) -> Option<&Pool> {
        self.pools_by_id
            .get(&hold_id)
            .map(|hold| &self.pools[hold.index()])
    }

    /// Every trading hold, closed ones included, oldest first.
    pub fn trading_pools(&self) -> impl DoubleEndedIterator<Item = &Pool> {
        self.trading.iter().map(|hold| &self.pools[hold.index()])
    }

    /// Trading holds that nobody has used since `before_ns`, of users whose last session ended before that (`design.md` 4). A user who never had a session
    /// manages his holds by call.
    pub fn abandoned(&self, before_ns: u64) -> Vec<HoldIx> {
        let mut gone: HashMap<UserIx, bool> = HashMap::new();
        for session in &self.sessions {
            let is_gone = !session.open && session.changed_ns < before_ns;
            *gone.entry(session.user).or_insert(true) &= is_gone;
        }
        let idle = self
            .trading_pools()
            .filter(|pool| !pool.closed && pool.open_orders == 0 && pool.used_ns < before_ns);
        idle.filter(|pool| gone.get(&pool.user) == Some(&true))
            .map(|pool| pool.hold)
            .collect()
    }

    /// Open orders, in no order.
    pub fn orders(&self) -> impl Iterator<Item = &Order> {
        self.orders.values()
    }

    /// Adds the facts of one record behind `facts` and says what caused them.
    ///
    /// # Panics
    /// A record that does not follow the last one, or an event of an order nobody entered: a broken journal or our bug.
    pub fn apply(
        &mut self,
        envelope: &Envelope,
        events: &[EventEnvelope],
        facts: &mut Vec<Fact>,
    ) -> Cause {
        assert_eq!(
            envelope.sequence,
            self.sequence.next(),
            "records come in journal order"
        );
        self.sequence = envelope.sequence;
        self.time_ns = envelope.time_ns;
        let cause = cause(envelope);
        if let Some((session, client_seq)) = envelope.command.client() {
            self.sessions[session.index()].client_seq = client_seq;
        }
        let entering = self.command(envelope, facts);
        for event in events {
            self.event(event, &entering, facts);
        }
        cause
    }

    /// State of admission-level commands; the order of a `New`.
    fn command(&mut self, envelope: &Envelope, facts: &mut Vec<Fact>) -> Option<Order> {
        match &envelope.command {
            Command::BindUser(c) => {
                assert_eq!(c.user.index(), self.users.len(), "users are bound densely");
                self.users.push(c.id);
                facts.push(Fact::User(c.user, c.id));
            }
            Command::SetInstrument(c) => {
                match self.instruments.get_mut(c.spec.ix.index()) {
                    Some(known) => *known = c.spec,
                    None => {
                        assert_eq!(c.spec.ix.index(), self.instruments.len());
                        self.instruments.push(c.spec);
                    }
                }
                facts.push(Fact::Instrument(c.spec));
            }
            Command::OpenSession(c) => {
                let client_seq = self
                    .sessions
                    .get(c.session.index())
                    .map_or(0, |known| known.client_seq);
                let session = Session {
                    session: c.session,
                    user: c.user,
                    key: c.key,
                    open: true,
                    cancel_on_disconnect: c.cancel_on_disconnect,
                    stp_group: c.stp_group,
                    client_seq,
                    changed_ns: envelope.time_ns,
                };
                match self.sessions.get_mut(c.session.index()) {
                    Some(known) => *known = session,
                    None => self.sessions.push(session),
                }
                facts.push(Fact::Session(session));
            }
            Command::CloseSession(c) => {
                let session = &mut self.sessions[c.session.index()];
                session.open = false;
                session.changed_ns = envelope.time_ns;
                facts.push(Fact::Session(*session));
            }
            Command::Fund(c) => self.fund(c, envelope.time_ns, facts),
            Command::Defund(c) => {
                let pool = &mut self.pools[c.hold.index()];
                pool.funding_seq = c.funding_seq;
                pool.defunded += c.amount_minor;
                pool.taken_at = envelope.sequence;
                facts.push(Fact::Pool(*pool));
            }
            Command::CloseHold(c) => {
                let pool = &mut self.pools[c.hold.index()];
                pool.funding_seq = c.funding_seq;
                pool.closed = true;
                pool.changed_ns = envelope.time_ns;
                pool.taken_at = envelope.sequence;
                facts.push(Fact::Pool(*pool));
            }
            Command::New(c) => return Some(self.entering(envelope, c)),
            Command::Refused(c) => facts.push(Fact::RequestRefused {
                request: c.request,
                handle: c.handle,
                client_order_id: c.client_order_id,
                reason: c.reason,
            }),
            Command::SetPhase(_)
            | Command::BlockUser(_)
            | Command::UnblockUser(_)
            | Command::SetBudget(_)
            | Command::Cancel(_)
            | Command::Amend(_)
            | Command::MassCancel(_)
            | Command::SetKillSwitch(_)
            | Command::ExpireOrders(_) => {}
        }
        None
    }

    fn fund(&mut self, c: &command::Fund, time_ns: u64, facts: &mut Vec<Fact>) {
        if self.pools.len() == c.hold.index() {
            self.pools_by_id.insert(c.hold_id, c.hold);
            if c.kind == PoolKind::Trading {
                self.trading.push(c.hold);
            }
            self.pools.push(Pool {
                hold: c.hold,
                hold_id: c.hold_id,
                kind: c.kind,
                user: c.user,
                asset: c.asset,
                funded: Minor::ZERO,
                funding_seq: 0,
                open_orders: 0,
                closed: false,
                changed_ns: time_ns,
                defunded: Minor::ZERO,
                taken_at: Sequence::ZERO,
                orders: 0,
                used_ns: time_ns,
            });
        }
        let pool = &mut self.pools[c.hold.index()];
        pool.funded += c.amount_minor;
        pool.changed_ns = time_ns;
        pool.used_ns = time_ns;
        pool.funding_seq = c.funding_seq;
        facts.push(Fact::Pool(*pool));
    }

    fn entering(&mut self, envelope: &Envelope, c: &command::New) -> Order {
        let order = Order {
            id: order_uuid(envelope.time_ns, self.node, envelope.sequence),
            handle: c.handle,
            instrument: c.instrument,
            user: c.user,
            session: c.session,
            pool: c.pool,
            client_order_id: c.client_order_id,
            side: c.side,
            order_type: c.order_type,
            time_in_force: c.time_in_force,
            post_only: c.post_only,
            stp: c.stp,
            expire_at_ns: c.expire_at_ns,
            price: c.price,
            quantity: c.quantity,
            open: c.quantity,
            filled: Lots::ZERO,
            done: Done::default(),
            fee_rate: c.fee_rate,
            status: OrderStatus::Open,
            sequence: envelope.sequence,
            created_ns: envelope.time_ns,
            key_hash: c.key_hash,
        };
        let earlier = self.orders.insert(c.handle, order);
        assert!(earlier.is_none(), "a handle names one open order");
        if let Some(pool) = self.pools.get_mut(c.pool.index()) {
            pool.open_orders += 1;
            pool.orders += 1;
            pool.used_ns = envelope.time_ns;
        }
        order
    }

    fn event(&mut self, e: &EventEnvelope, entering: &Option<Order>, facts: &mut Vec<Fact>) {
        match &e.event {
            Event::Accepted(event) => {
                let order = self.open_order(event.handle);
                order.price = event.price;
                let order = *order;
                facts.push(Fact::Entered(order));
                if event.rests {
                    facts.push(Fact::Rested(order));
                }
            }
            Event::Rejected(event) => {
                let mut order = self.close(event.handle, facts);
                order.status = OrderStatus::Rejected;
                facts.push(Fact::Refused(order, event.reason));
            }
            Event::Rested(event) => facts.push(Fact::Rested(*self.open_order(event.handle))),
            Event::Trade(event) => self.trade(e, event, facts),
            Event::Amended(event) => {
                let order = self.open_order(event.handle);
                order.price = event.price;
                order.quantity = event.quantity;
                order.open = event.open;
                let order = *order;
                facts.push(Fact::Amended {
                    order,
                    kept_priority: event.kept_priority,
                });
            }
            Event::AmendRejected(event) => {
                facts.push(self.gone(RequestKind::Amend, event.handle, event.reason));
            }
            Event::CancelRejected(event) => {
                facts.push(self.gone(RequestKind::Cancel, event.handle, event.reason));
            }
            Event::Reduced(event) => {
                let order = self.open_order(event.handle);
                order.quantity -= event.quantity;
                order.open = event.open;
                facts.push(Fact::Reduced {
                    order: *order,
                    quantity: event.quantity,
                    reason: event.reason,
                });
            }
            Event::Cancelled(event) => {
                let mut order = self.close(event.handle, facts);
                order.open = Lots::ZERO;
                order.status = OrderStatus::Cancelled;
                facts.push(Fact::Cancelled {
                    order,
                    quantity: event.quantity,
                    reason: event.reason,
                });
            }
            Event::MassCancelled(event) => facts.push(Fact::MassCancelled {
                instrument: e.instrument,
                count: event.count,
            }),
            Event::PhaseChanged(event) => {
                let spec = &mut self.instruments[e.instrument.index()];
                spec.phase = event.phase;
                facts.push(Fact::Instrument(*spec));
            }
        }
        debug_assert!(entering.is_none_or(|order| order.sequence == e.sequence));
    }

    fn trade(&mut self, e: &EventEnvelope, event: &types::event::Trade, facts: &mut Vec<Fact>) {
        let terms = self.instruments[e.instrument.index()].terms;
        let value = terms
            .value(event.price, event.quantity)
            .expect("admission has admitted the value of the whole order");
        let mut charged = Minor::ZERO;
        let mut after = |order: &mut Order, open: Lots| {
            if order.side == Side::Buy {
                charged = fee(order.done, value, order.fee_rate);
            }
            order.done = order.done.after_trade(order.side, value, order.fee_rate);
            order.filled += event.quantity;
            order.open = open;
            order.status = if open.is_zero() {
                OrderStatus::Filled
            } else {
                OrderStatus::PartiallyFilled
            };
            *order
        };
        let maker = after(self.open_order(event.maker), event.maker_open);
        let taker = after(self.open_order(event.taker), event.taker_open);
        facts.push(Fact::Traded(Trade {
            id: e.trade_uuid(self.node),
            instrument: e.instrument,
            number: event.trade_number,
            price: event.price,
            quantity: event.quantity,
            value_minor: value,
            fee_minor: charged,
            maker,
            taker,
        }));
        for handle in e.event.closed().into_iter().flatten() {
            self.close(handle, facts);
        }
    }

    fn open_order(&mut self, handle: Handle) -> &mut Order {
        self.orders
            .get_mut(&handle)
            .expect("events speak of open orders")
    }

    /// Takes the order out; its pool has one order less.
    fn close(&mut self, handle: Handle, facts: &mut Vec<Fact>) -> Order {
        let order = self
            .orders
            .remove(&handle)
            .expect("an order is closed once");
        if let Some(pool) = self.pools.get_mut(order.pool.index()) {
            pool.open_orders -= 1;
            pool.used_ns = self.time_ns;
            if pool.open_orders == 0 {
                facts.push(Fact::PoolIdle(*pool));
            }
        }
        order
    }

    fn gone(&self, request: RequestKind, handle: Handle, reason: RejectReason) -> Fact {
        Fact::RequestRefused {
            request,
            handle,
            client_order_id: self
                .orders
                .get(&handle)
                .map_or(0, |order| order.client_order_id),
            reason,
        }
    }
}
