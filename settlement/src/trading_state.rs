//! Order and hold state at settlement's own position, built from the replica's effects: open orders
//! by slot, and the amount that the ledger must still have per hold.
//!
//! Admission computes reserves, returns and fees; effects contain the results. Asserted per effect:
//!
//! - a hold's balance before = its balance after + spent;
//! - an order's reserve before <= its reserve after + spent + returned. Both are equal unless an
//!   amend has drawn its growth since.
//!
//! Names of users, instruments and holds come from the live replica, which has applied at least the
//! records up to this position.
//!
//! Cost: one order copy per effect. Memory: one order per slot ever used, 16 bytes per hold ever
//! funded.

use std::sync::Arc;

use replica::{Applied, Cause, Effect, Hold, Names, Order, State, Trade};
use types::{
    AssetIx, Handle, HoldIx, HoldKind, Id128, InstrumentId, InstrumentIx, InstrumentSpec, Minor,
    Reserve, Sequence, Side, UserId, UserIx,
};

use crate::plan::{Amount, ReturnReason};

/// Balance of a trading hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldBalance {
    /// The ledger hold.
    pub hold_id: Id128,
    pub user: UserIx,
    pub asset: AssetIx,
    /// Amount that the ledger must have in the hold and its children: undrawn plus the reserves of
    /// open orders.
    pub held: Minor,
    /// The hold was created for one order, which has ended. Settlement releases the rest, and later
    /// funding has no effect.
    pub is_emptied: bool,
}

/// An effect's change of an order's money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderMoney {
    pub order: Order,
    /// Reserve before the effect.
    pub before: Reserve,
    /// Part of the reserve that the trade spent.
    pub spent: Reserve,
    /// Set if the order has ended.
    pub ended: Option<ReturnReason>,
}

impl OrderMoney {
    /// Reason for the return of the unneeded reserve.
    pub fn return_reason(&self) -> ReturnReason {
        self.ended.unwrap_or(ReturnReason::LessNeeded)
    }
}

/// A match with both orders' money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TradeMoney {
    pub trade: Id128,
    pub sequence: Sequence,
    pub trade_number: u64,
    pub executed_ns: u64,
    pub instrument: InstrumentIx,
    pub units: Minor,
    pub value: Minor,
    pub fee: Minor,
    pub buy: OrderMoney,
    pub sell: OrderMoney,
}

/// Money changes of a record, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A hold was funded. Negative: defunded or closed.
    Funded {
        trading_hold: HoldIx,
        by: Minor,
    },
    Entered(Order),
    Moved(OrderMoney),
    Traded(TradeMoney),
    /// The order that the hold was created for has ended: the rest becomes available.
    Emptied {
        trading_hold: HoldIx,
        order: Id128,
        reason: ReturnReason,
    },
}

/// Copied fields of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    minor: Minor,
    /// Created for one order.
    is_single: bool,
    is_emptied: bool,
}

/// Order and hold state at [`TradingState::position`].
#[derive(Clone, Debug)]
pub struct TradingState {
    position: Sequence,
    trades: u64,
    names: Arc<Names>,
    /// By slot.
    orders: Vec<Option<Order>>,
    /// By index.
    holds: Vec<Held>,
}

impl TradingState {
    /// Copies a replica's state. `names`: of the live replica, which adds later ones.
    pub fn of(state: &State, names: Arc<Names>) -> Self {
        let mut orders = Vec::new();
        for order in state.orders() {
            // Ascending by slot: the push below lands on the order's own slot.
            orders.resize(order.handle.slot as usize, None);
            orders.push(Some(order));
        }
        let holds = (0..).map_while(|ix| state.hold(HoldIx(ix)));
        let held = |hold: Hold| {
            let is_single = hold.kind == HoldKind::Order;
            let is_emptied = is_single && hold.orders > 0 && hold.open_orders == 0;
            Held {
                minor: if is_emptied { Minor::ZERO } else { hold.held },
                is_single,
                is_emptied,
            }
        };
        Self {
            position: state.sequence(),
            trades: state.core().trades(),
            names,
            holds: holds.map(held).collect(),
            orders,
        }
    }

    /// Sequence of the last record applied.
    pub fn position(&self) -> Sequence {
        self.position
    }

    /// Trades up to the position.
    pub fn trades(&self) -> u64 {
        self.trades
    }

    /// All holds that were ever funded.
    pub fn holds(&self) -> impl Iterator<Item = (HoldIx, HoldBalance)> + '_ {
        let all = (0u32..).map(HoldIx).take(self.holds.len());
        all.map(|ix| (ix, self.hold(ix)))
    }

    pub fn hold(&self, ix: HoldIx) -> HoldBalance {
        let (name, held) = (self.names.hold(ix), self.holds[ix.index()]);
        HoldBalance {
            hold_id: name.hold_id,
            user: name.user,
            asset: name.asset,
            held: held.minor,
            is_emptied: held.is_emptied,
        }
    }

    /// Amount that the ledger must have in a hold and its children.
    pub fn held(&self, ix: HoldIx) -> Minor {
        self.holds[ix.index()].minor
    }

    pub fn orders(&self) -> impl Iterator<Item = &Order> {
        self.orders.iter().flatten()
    }

    pub fn order(&self, handle: Handle) -> Option<&Order> {
        let order = self.orders.get(handle.slot as usize)?.as_ref();
        order.filter(|order| order.handle == handle)
    }

    pub fn user(&self, ix: UserIx) -> UserId {
        self.names.user(ix)
    }

    pub fn instrument(&self, ix: InstrumentIx) -> InstrumentSpec {
        self.names.instrument(ix)
    }

    /// Decimals of money and of every instrument.
    pub fn scales(&self) -> impl Iterator<Item = (InstrumentId, u8)> {
        let instruments = self.names.instruments().into_iter();
        let money = amount(&self.names, AssetIx::MONEY, Minor::ZERO);
        let money = std::iter::once((money.instrument, money.decimals));
        money.chain(instruments.map(|spec| (spec.id, spec.decimals)))
    }

    pub fn amount(&self, asset: AssetIx, minor: Minor) -> Amount {
        amount(&self.names, asset, minor)
    }

    /// Applies one record and appends its money changes to `out`.
    ///
    /// # Panics
    /// The record is not the next one, or its effects do not match the trading state.
    pub fn apply(&mut self, applied: &Applied, out: &mut Vec<Change>) {
        let sequence = applied.sequence();
        assert_eq!(
            sequence,
            self.position.next(),
            "sequences of records are contiguous"
        );
        for effect in &applied.effects {
            self.apply_effect(&applied.cause, effect, out);
        }
        self.position = sequence;
    }

    fn apply_effect(&mut self, cause: &Cause, effect: &Effect, out: &mut Vec<Change>) {
        match effect {
            Effect::Hold(hold) => self.apply_funding(hold, out),
            Effect::Entered(order) => self.insert_order(order, out),
            Effect::Refused(order, moved, reason) => {
                self.change_order(order, moved, Some(ReturnReason::Rejected(*reason)), out);
            }
            Effect::Traded(trade) => self.apply_trade(cause, trade, out),
            Effect::Amended { order, moved, .. } | Effect::Reduced { order, moved, .. } => {
                self.change_order(order, moved, None, out);
            }
            Effect::Cancelled {
                order,
                moved,
                reason,
                ..
            } => self.change_order(order, moved, Some(ReturnReason::Cancelled(*reason)), out),
            Effect::User(..)
            | Effect::Instrument(_)
            | Effect::Session(_)
            | Effect::Accepted(_)
            | Effect::Rested(_)
            | Effect::ChangeRefused(_)
            | Effect::Settled { .. }
            | Effect::Bust(_) => {}
        }
    }

    fn apply_funding(&mut self, hold: &Hold, out: &mut Vec<Change>) {
        let ix = hold.hold;
        let is_new = ix.index() == self.holds.len();
        if is_new {
            self.holds.push(Held {
                minor: Minor::ZERO,
                is_single: hold.kind == HoldKind::Order,
                is_emptied: false,
            });
        }
        let held = &mut self.holds[ix.index()];
        if held.is_emptied {
            return;
        }
        let by = hold.held - held.minor;
        held.minor = hold.held;
        if is_new || !by.is_zero() {
            out.push(Change::Funded {
                trading_hold: ix,
                by,
            });
        }
    }

    fn insert_order(&mut self, order: &Order, out: &mut Vec<Change>) {
        let slot = order.handle.slot as usize;
        if self.orders.len() <= slot {
            self.orders.resize(slot + 1, None);
        }
        let is_emptied = self.holds[order.hold.index()].is_emptied;
        assert!(!is_emptied, "order {} draws on a released hold", order.id);
        let before = self.orders[slot].replace(*order);
        assert!(before.is_none(), "a slot serves one order at a time");
        out.push(Change::Entered(*order));
    }

    fn change_order(
        &mut self,
        order: &Order,
        moved: &replica::Moved,
        ended: Option<ReturnReason>,
        out: &mut Vec<Change>,
    ) {
        let change = self.update_order(order, moved, ended);
        out.push(Change::Moved(change));
        self.end_single_hold(&change, moved.hold_orders, out);
    }

    fn apply_trade(&mut self, cause: &Cause, trade: &Trade, out: &mut Vec<Change>) {
        let filled = |order: &Order| order.open.is_zero().then_some(ReturnReason::Filled);
        let (maker, taker) = (&trade.maker, &trade.taker);
        let made = self.update_order(maker, &trade.maker_moved, filled(maker));
        let took = self.update_order(taker, &trade.taker_moved, filled(taker));
        let made = (made, trade.maker_moved.hold_orders);
        let took = (took, trade.taker_moved.hold_orders);
        let ((buy, buy_orders), (sell, sell_orders)) = match taker.side {
            Side::Buy => (took, made),
            Side::Sell => (made, took),
        };
        assert!(
            buy.spent.main == trade.value_minor
                && buy.spent.fee == trade.fee_minor
                && sell.spent.total() == trade.units_minor,
            "trade {} is not paid in full by both orders",
            trade.id
        );
        self.trades += 1;
        out.push(Change::Traded(TradeMoney {
            trade: trade.id,
            sequence: cause.sequence,
            trade_number: trade.number,
            executed_ns: cause.time_ns,
            instrument: trade.instrument,
            units: trade.units_minor,
            value: trade.value_minor,
            fee: trade.fee_minor,
            buy,
            sell,
        }));
        self.end_single_hold(&buy, buy_orders, out);
        self.end_single_hold(&sell, sell_orders, out);
    }

    /// Sets an order and its hold to the state in the effect; returns the order's money before and
    /// after.
    fn update_order(
        &mut self,
        order: &Order,
        moved: &replica::Moved,
        ended: Option<ReturnReason>,
    ) -> OrderMoney {
        let (spent, after) = (moved.spent, order.reserved);
        let before = Reserve {
            main: after.main + spent.main + moved.returned.main,
            fee: after.fee + spent.fee + moved.returned.fee,
        };
        let place = &mut self.orders[order.handle.slot as usize];
        let known = place.filter(|known| known.handle == order.handle);
        let known = known
            .expect("effects of an order follow its entry")
            .reserved;
        // `before` may be more: an amend draws its growth with its command, which has no effect.
        assert!(
            known.main <= before.main && known.fee <= before.fee,
            "reserve of order {}: {known:?} before, {before:?} in the effect",
            order.id
        );
        let held = &mut self.holds[order.hold.index()];
        assert_eq!(
            held.minor,
            moved.held + spent.total(),
            "hold of order {}: held before = held after + spent",
            order.id
        );
        held.minor = moved.held;
        *place = ended.is_none().then_some(*order);
        OrderMoney {
            order: *order,
            before,
            spent,
            ended,
        }
    }

    /// Ends a hold that was created for one order, once that order has ended.
    fn end_single_hold(&mut self, moved: &OrderMoney, hold_orders: u32, out: &mut Vec<Change>) {
        let held = &mut self.holds[moved.order.hold.index()];
        if held.is_single && moved.ended.is_some() && hold_orders == 0 {
            held.minor = Minor::ZERO;
            held.is_emptied = true;
            out.push(Change::Emptied {
                trading_hold: moved.order.hold,
                order: moved.order.id,
                reason: moved.return_reason(),
            });
        }
    }
}

/// An amount of an asset, with instrument id and decimals.
pub fn amount(names: &Names, asset: AssetIx, minor: Minor) -> Amount {
    match asset.instrument() {
        None => Amount::rubles(minor),
        Some(ix) => names.instrument(ix).amount(minor),
    }
}

/// Number of a record's effects that may add rows to a plan.
pub fn money_effects(applied: &Applied) -> usize {
    let moves = |effect: &Effect| match effect {
        Effect::Refused(..)
        | Effect::Traded(_)
        | Effect::Amended { .. }
        | Effect::Reduced { .. }
        | Effect::Cancelled { .. } => true,
        Effect::User(..)
        | Effect::Instrument(_)
        | Effect::Session(_)
        | Effect::Hold(_)
        | Effect::Entered(_)
        | Effect::Accepted(_)
        | Effect::Rested(_)
        | Effect::ChangeRefused(_)
        | Effect::Settled { .. }
        | Effect::Bust(_) => false,
    };
    let effects = applied.effects.iter();
    effects.filter(|effect| moves(effect)).count()
}
