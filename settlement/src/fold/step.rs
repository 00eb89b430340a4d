//! How a record changes the fold: commands draw and fund, events spend, return and end.

use types::command::{Amend, Fund, New};
use types::{
    Command, Done, Envelope, Event, EventEnvelope, Handle, Lots, Minor, PoolKind, Reserve, Side,
    Ticks, order_uuid, reserve,
};

use super::{Change, Fold, FoldError, Moved, Order, Pool, Traded};
use crate::plan::Ending;

/// What a filled side did.
struct Fill {
    open: Lots,
    value: Minor,
    units: Minor,
}

impl Fold {
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
            | Command::SetKillSwitch(_)
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
