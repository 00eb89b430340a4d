//! The journal folded into what settlement must know: users, instruments, pools of blocked money, open orders and what they reserve.
//!
//! The same arithmetic as admission: `types::reserve` for what an order keeps, and a return is always before - after - spent. Invariant, per
//! pool at each sequence: `free + sum of reserves of its open orders` = money funded - money defunded - money spent on trades (`design.md` 4).
//!
//! The fold sees a command and its events together, so an event of an order that has already gone (an amend that lost the race against a fill)
//! names an unknown handle and moves nothing.

use types::command::{Amend, Fund, New};
use types::{
    AssetIx, Command, Done, Envelope, Event, EventEnvelope, FeeRate, Handle, HoldIx, Id128,
    InstrumentId, InstrumentIx, InstrumentSpec, Lots, Minor, NodeId, PoolKind, Reserve, Sequence,
    Side, Ticks, UserId, UserIx, order_uuid, reserve,
};

use crate::plan::{Amount, CFA_RUB, Ending};

/// The journal says something that cannot be: settlement stops in front of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("journal record {sequence} cannot be settled: {what}")]
pub struct FoldError {
    pub sequence: Sequence,
    pub what: String,
}

/// Money behind one trading hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    pub kind: PoolKind,
    pub user: UserIx,
    pub asset: AssetIx,
    /// The ledger hold.
    pub hold: Id128,
    /// What no order reserves.
    pub free: Minor,
    /// What open orders reserve, all of them together.
    pub reserved: Minor,
    pub orders: u32,
    pub funding_seq: u64,
    /// Nothing is behind it any more: closed by command, or a pool of size one whose order has gone. Later funding moves nothing.
    pub is_closed: bool,
}

impl Pool {
    /// What the ledger must still have in the trading hold and its children.
    pub fn total(&self) -> Minor {
        self.free + self.reserved
    }
}

/// An open order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    pub id: Id128,
    pub handle: Handle,
    pub instrument: InstrumentIx,
    pub user: UserIx,
    pub pool: HoldIx,
    pub side: Side,
    pub price: Ticks,
    pub open: Lots,
    pub done: Done,
    pub fee_rate: FeeRate,
    pub reserve: Reserve,
    pub entered_ns: u64,
}

/// What an event did to an order's money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The order after the event.
    pub order: Order,
    /// What it reserved just before.
    pub before: Reserve,
    /// What left the reserve for the trade.
    pub spent: Reserve,
    /// Set when the order has ended.
    pub ended: Option<Ending>,
}

impl Moved {
    /// Why what is not needed any more goes back.
    pub fn ending(&self) -> Ending {
        self.ended.unwrap_or(Ending::Less)
    }
}

/// A match with both orders' money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traded {
    pub trade: Id128,
    pub sequence: Sequence,
    pub trade_number: u64,
    pub executed_ns: u64,
    pub instrument: InstrumentIx,
    pub units: Minor,
    pub value: Minor,
    pub fee: Minor,
    pub buy: Moved,
    pub sell: Moved,
}

/// What a record meant for money, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Entered(Order),
    Moved(Moved),
    Traded(Traded),
    /// The one order of a pool of size one has ended: what is left of the hold becomes available.
    Emptied {
        pool: HoldIx,
        order: Id128,
        ending: Ending,
    },
}

/// The fold.
#[derive(Clone, Debug)]
pub struct Fold {
    node: NodeId,
    position: Sequence,
    users: Vec<UserId>,
    instruments: Vec<InstrumentSpec>,
    pools: Vec<Pool>,
    orders: Vec<Option<Order>>,
    trades: u64,
    money: InstrumentId,
}

/// What a filled side did.
struct Fill {
    open: Lots,
    value: Minor,
    units: Minor,
}

impl Fold {
    pub fn new(node: NodeId) -> Self {
        Self {
            node,
            position: Sequence::ZERO,
            users: Vec::new(),
            instruments: Vec::new(),
            pools: Vec::new(),
            orders: Vec::new(),
            trades: 0,
            money: InstrumentId::new(CFA_RUB).expect("the name is within the alphabet"),
        }
    }

    /// Sequence of the last record folded.
    pub fn position(&self) -> Sequence {
        self.position
    }

    /// Trades folded so far.
    pub fn trades(&self) -> u64 {
        self.trades
    }

    pub fn pools(&self) -> impl Iterator<Item = (HoldIx, &Pool)> {
        (0u32..).map(HoldIx).zip(&self.pools)
    }

    pub fn pool(&self, ix: HoldIx) -> &Pool {
        &self.pools[ix.index()]
    }

    pub fn orders(&self) -> impl Iterator<Item = &Order> {
        self.orders.iter().flatten()
    }

    pub fn order(&self, handle: Handle) -> Option<&Order> {
        self.orders
            .get(handle.slot as usize)?
            .as_ref()
            .filter(|order| order.handle == handle)
    }

    pub fn user(&self, ix: UserIx) -> UserId {
        self.users[ix.index()]
    }

    /// How many users there are.
    pub fn users(&self) -> usize {
        self.users.len()
    }

    pub fn instrument(&self, ix: InstrumentIx) -> &InstrumentSpec {
        &self.instruments[ix.index()]
    }

    /// Decimals of money and of every instrument.
    pub fn scales(&self) -> impl Iterator<Item = (InstrumentId, u8)> + '_ {
        let money = (self.money, types::instrument::MONEY_DECIMALS);
        std::iter::once(money).chain(self.instruments.iter().map(|spec| (spec.id, spec.decimals)))
    }

    /// An amount of a pool's asset.
    pub fn amount(&self, asset: AssetIx, minor: Minor) -> Amount {
        match asset.instrument() {
            None => Amount {
                instrument: self.money,
                decimals: types::instrument::MONEY_DECIMALS,
                minor,
            },
            Some(ix) => Amount {
                instrument: self.instrument(ix).id,
                decimals: self.instrument(ix).decimals,
                minor,
            },
        }
    }

    /// Users whose money the record may touch.
    pub fn touched(&self, command: &Envelope, events: &[EventEnvelope]) -> Vec<UserIx> {
        let mut users = Vec::new();
        let mut add_order = |handle: Handle| users.extend(self.order(handle).map(|o| o.user));
        for event in events {
            match &event.event {
                Event::Trade(e) => {
                    add_order(e.maker);
                    add_order(e.taker);
                }
                Event::Cancelled(e) => add_order(e.handle),
                Event::Reduced(e) => add_order(e.handle),
                Event::Amended(e) => add_order(e.handle),
                _ => {}
            }
        }
        if let Command::New(new) = &command.command {
            users.push(new.user);
        }
        users
    }

    /// Folds one record: a command with all its events. `out` gets what it meant for money.
    pub fn apply(
        &mut self,
        command: &Envelope,
        events: &[EventEnvelope],
        out: &mut Vec<Change>,
    ) -> Result<(), FoldError> {
        if command.sequence != self.position.next() {
            return Err(FoldError {
                sequence: command.sequence,
                what: format!("it does not follow {}", self.position),
            });
        }
        let sequence = command.sequence;
        let mut run = || {
            self.command(command, out)?;
            for event in events {
                self.event(event, out)?;
            }
            Ok(())
        };
        run().map_err(|what| FoldError { sequence, what })?;
        self.position = sequence;
        Ok(())
    }

    fn command(&mut self, envelope: &Envelope, out: &mut Vec<Change>) -> Result<(), String> {
        match &envelope.command {
            Command::BindUser(c) => put(&mut self.users, c.user.index(), c.id, "user"),
            Command::SetInstrument(c) => put(
                &mut self.instruments,
                c.spec.ix.index(),
                c.spec,
                "instrument",
            ),
            Command::Fund(c) => self.fund(c),
            Command::Defund(c) => {
                let pool = self.pool_mut(c.hold)?;
                if c.funding_seq <= pool.funding_seq || pool.is_closed {
                    return Ok(());
                }
                pool.funding_seq = c.funding_seq;
                take(pool, c.amount_minor)
            }
            Command::CloseHold(c) => {
                let pool = self.pool_mut(c.hold)?;
                if c.funding_seq <= pool.funding_seq {
                    return Ok(());
                }
                if pool.orders > 0 {
                    return Err(format!("pool {} is closed with open orders", c.hold));
                }
                pool.funding_seq = c.funding_seq;
                pool.free = Minor::ZERO;
                pool.is_closed = true;
                Ok(())
            }
            Command::New(c) => self.enter(envelope, c, out),
            Command::Amend(c) => self.draw(c),
            // The events say which orders ended; the rest moves no money.
            Command::SetPhase(_)
            | Command::OpenSession(_)
            | Command::CloseSession(_)
            | Command::BlockUser(_)
            | Command::UnblockUser(_)
            | Command::SetBudget(_)
            | Command::Cancel(_)
            | Command::MassCancel(_)
            | Command::ExpireOrders(_)
            | Command::Refused(_) => Ok(()),
        }
    }

    fn fund(&mut self, c: &Fund) -> Result<(), String> {
        if c.hold.index() == self.pools.len() {
            self.pools.push(Pool {
                kind: c.kind,
                user: c.user,
                asset: c.asset,
                hold: c.hold_id,
                free: Minor::ZERO,
                reserved: Minor::ZERO,
                orders: 0,
                funding_seq: 0,
                is_closed: false,
            });
        }
        let pool = self.pool_mut(c.hold)?;
        if c.funding_seq <= pool.funding_seq || pool.is_closed {
            return Ok(());
        }
        pool.funding_seq = c.funding_seq;
        if pool.hold != c.hold_id {
            return Err(format!("pool {} is funded from another hold", c.hold));
        }
        pool.free = pool
            .free
            .checked_add(c.amount_minor)
            .ok_or("a pool leaves 64 bits")?;
        Ok(())
    }

    fn enter(&mut self, envelope: &Envelope, c: &New, out: &mut Vec<Change>) -> Result<(), String> {
        let order = Order {
            id: order_uuid(envelope.time_ns, self.node, envelope.sequence),
            handle: c.handle,
            instrument: c.instrument,
            user: c.user,
            pool: c.pool,
            side: c.side,
            price: c.price,
            open: c.quantity,
            done: Done::default(),
            fee_rate: c.fee_rate,
            reserve: c.draw,
            entered_ns: envelope.time_ns,
        };
        if self.instruments.len() <= c.instrument.index() || self.users.len() <= c.user.index() {
            return Err("order names an unknown user or instrument".into());
        }
        let slot = c.handle.slot as usize;
        if self.orders.len() <= slot {
            self.orders.resize(slot + 1, None);
        }
        if self.orders[slot].is_some() {
            return Err(format!("slot of order {} is taken", c.handle));
        }
        let pool = self.pool_mut(c.pool)?;
        take(pool, c.draw.total())?;
        pool.reserved += c.draw.total();
        pool.orders += 1;
        self.orders[slot] = Some(order);
        out.push(Change::Entered(order));
        Ok(())
    }

    /// An amend's growth is drawn before the book has seen it; the event that follows sets what is really needed.
    fn draw(&mut self, c: &Amend) -> Result<(), String> {
        let Some(order) = self.order(c.handle).copied() else {
            return Ok(());
        };
        let reserve = order
            .reserve
            .checked_add(c.draw)
            .ok_or("a reserve leaves 64 bits")?;
        let pool = self.pool_mut(order.pool)?;
        take(pool, c.draw.total())?;
        pool.reserved += c.draw.total();
        self.orders[c.handle.slot as usize] = Some(Order { reserve, ..order });
        Ok(())
    }

    fn event(&mut self, envelope: &EventEnvelope, out: &mut Vec<Change>) -> Result<(), String> {
        let keep = |order: &Order| (order.price, order.open);
        match &envelope.event {
            Event::Rejected(e) => self.set(
                e.handle,
                |o| (o.price, Lots::ZERO),
                Some(Ending::Rejected(e.reason)),
                out,
            ),
            Event::Trade(_) => self.trade(envelope, out),
            Event::Amended(e) => self.set(e.handle, |_| (e.price, e.open), None, out),
            Event::AmendRejected(e) => self.set(e.handle, keep, None, out),
            Event::Reduced(e) => {
                let ended = e.open.is_zero().then_some(Ending::Cancelled(e.reason));
                self.set(e.handle, |o| (o.price, e.open), ended, out)
            }
            Event::Cancelled(e) => {
                let ended = Some(Ending::Cancelled(e.reason));
                self.set(e.handle, |o| (o.price, Lots::ZERO), ended, out)
            }
            // An accepted order is as `New` said: a market order carries its protection price there too.
            Event::Accepted(_)
            | Event::Rested(_)
            | Event::CancelRejected(_)
            | Event::MassCancelled(_)
            | Event::PhaseChanged(_) => Ok(()),
        }
    }

    /// Sets price and open quantity of an order without a trade.
    fn set(
        &mut self,
        handle: Handle,
        terms: impl FnOnce(&Order) -> (Ticks, Lots),
        ended: Option<Ending>,
        out: &mut Vec<Change>,
    ) -> Result<(), String> {
        let Some(mut order) = self.order(handle).copied() else {
            return Ok(());
        };
        (order.price, order.open) = terms(&order);
        let moved = self.move_reserve(order, Reserve::ZERO, ended)?;
        out.push(Change::Moved(moved));
        self.emptied(&moved, out);
        Ok(())
    }

    fn trade(&mut self, envelope: &EventEnvelope, out: &mut Vec<Change>) -> Result<(), String> {
        let Event::Trade(e) = &envelope.event else {
            return Ok(());
        };
        let spec = self
            .instruments
            .get(envelope.instrument.index())
            .ok_or("trade on an unknown instrument")?;
        let value = spec
            .terms
            .value(e.price, e.quantity)
            .ok_or("a trade leaves 64 bits")?;
        let units = spec
            .terms
            .units(e.quantity)
            .ok_or("a trade leaves 64 bits")?;
        let (maker, taker) = (
            self.fill(
                e.maker,
                &Fill {
                    open: e.maker_open,
                    value,
                    units,
                },
            )?,
            self.fill(
                e.taker,
                &Fill {
                    open: e.taker_open,
                    value,
                    units,
                },
            )?,
        );
        let (buy, sell) = match e.taker_side {
            Side::Buy => (taker, maker),
            Side::Sell => (maker, taker),
        };
        if buy.order.side != Side::Buy || sell.order.side != Side::Sell {
            return Err("a trade between two orders of one side".into());
        }
        self.trades += 1;
        out.push(Change::Traded(Traded {
            trade: envelope.trade_uuid(self.node),
            sequence: envelope.sequence,
            trade_number: e.trade_number,
            executed_ns: envelope.time_ns,
            instrument: envelope.instrument,
            units,
            value,
            fee: buy.spent.fee,
            buy,
            sell,
        }));
        self.emptied(&buy, out);
        self.emptied(&sell, out);
        Ok(())
    }

    fn fill(&mut self, handle: Handle, fill: &Fill) -> Result<Moved, String> {
        let mut order = *self
            .order(handle)
            .ok_or_else(|| format!("trade of the unknown order {handle}"))?;
        let done = order
            .done
            .after_trade(order.side, fill.value, order.fee_rate);
        let spent = match order.side {
            Side::Buy => Reserve {
                main: fill.value,
                fee: done.fee_minor - order.done.fee_minor,
            },
            Side::Sell => Reserve {
                main: fill.units,
                fee: Minor::ZERO,
            },
        };
        order.done = done;
        order.open = fill.open;
        let ended = fill.open.is_zero().then_some(Ending::Filled);
        self.move_reserve(order, spent, ended)
    }

    /// Sets an order's reserve from its terms; what is neither kept nor spent returns to the pool.
    fn move_reserve(
        &mut self,
        mut order: Order,
        spent: Reserve,
        ended: Option<Ending>,
    ) -> Result<Moved, String> {
        let before = order.reserve;
        let terms = &self.instrument(order.instrument).terms;
        let after = reserve(
            terms,
            order.side,
            order.price,
            order.open,
            order.done,
            order.fee_rate,
        )
        .map_err(|error| error.to_string())?;
        if spent.main > before.main || spent.fee > before.fee {
            return Err(format!("order {} spends more than it reserved", order.id));
        }
        order.reserve = after;
        let pool = self.pool_mut(order.pool)?;
        pool.reserved = pool.reserved - before.total() + after.total();
        pool.free = pool.free + before.total() - after.total() - spent.total();
        if pool.free.is_negative() {
            return Err(format!(
                "pool {} is overdrawn by order {}",
                order.pool, order.id
            ));
        }
        if ended.is_some() {
            pool.orders -= 1;
        }
        self.orders[order.handle.slot as usize] = ended.is_none().then_some(order);
        Ok(Moved {
            order,
            before,
            spent,
            ended,
        })
    }

    /// A pool of size one goes with its order: what is left of it is released by settlement.
    fn emptied(&mut self, moved: &Moved, out: &mut Vec<Change>) {
        let pool = &mut self.pools[moved.order.pool.index()];
        if pool.kind == PoolKind::Order && moved.ended.is_some() && pool.orders == 0 {
            pool.free = Minor::ZERO;
            pool.is_closed = true;
            out.push(Change::Emptied {
                pool: moved.order.pool,
                order: moved.order.id,
                ending: moved.ending(),
            });
        }
    }

    fn pool_mut(&mut self, ix: HoldIx) -> Result<&mut Pool, String> {
        self.pools
            .get_mut(ix.index())
            .ok_or_else(|| format!("pool {ix} is unknown"))
    }
}

fn take(pool: &mut Pool, amount: Minor) -> Result<(), String> {
    if amount.is_negative() || amount > pool.free {
        return Err(format!(
            "hold {} has {} free, {amount} drawn",
            pool.hold, pool.free
        ));
    }
    pool.free -= amount;
    Ok(())
}

/// Sets entry `index` of a table that grows densely.
fn put<T>(table: &mut Vec<T>, index: usize, value: T, what: &str) -> Result<(), String> {
    match index.cmp(&table.len()) {
        std::cmp::Ordering::Less => table[index] = value,
        std::cmp::Ordering::Equal => table.push(value),
        std::cmp::Ordering::Greater => return Err(format!("{what} {index} is not the next")),
    }
    Ok(())
}
