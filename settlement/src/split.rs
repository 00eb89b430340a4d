//! Holds of orders: split out of a trading hold, payment, return (`design.md` 4, T03, T05, T20).
//!
//! An order's holds are split at its first fill, or once it has been open for `Limits::wait_ns`.
//! Until then its reserve stays in the trading hold and the ledger has no row for it. Returns are
//! deferred and merged until the next split out of the same trading hold or the end of the batch.
//! So no prefix of a plan overdraws a hold, and N price improvements of an order are one row.
//!
//! Invariant before each change: trading hold = undrawn + reserves of unsplit orders - deferred
//! returns; child = its order's reserve + its deferred return.

use std::collections::{HashMap, VecDeque};

use replica::Order;
use types::command::{Bust, TradeParty};
use types::{Handle, HoldIx, HoldPart, Id128, Minor, Sequence, order_hold};

use crate::plan::{HoldMovement, Plan, ReturnReason, TradeHolds, TradeLeg};
use crate::trading_state::{Change, OrderMoney, TradeMoney, TradingState};

/// A hold of an order in the ledger, after the plan and its returns are posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OrderHold {
    /// The hold was split. A used-up hold remains and can grow again while its order is open.
    pub exists: bool,
    pub remaining: Minor,
}

/// The two holds of a split order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SplitHolds {
    pub main: OrderHold,
    pub fee: OrderHold,
}

impl SplitHolds {
    fn part_mut(&mut self, part: HoldPart) -> &mut OrderHold {
        match part {
            HoldPart::Main => &mut self.main,
            HoldPart::Fee => &mut self.fee,
        }
    }
}

/// A return that is deferred to the next split or the end of the batch.
#[derive(Clone, Copy, Debug)]
struct Return {
    hold: Id128,
    order: Id128,
    amount: Minor,
    reason: ReturnReason,
}

/// Plans the splits, payments and returns of order holds.
#[derive(Clone, Debug, Default)]
pub struct HoldSplitter {
    split_holds: HashMap<Handle, SplitHolds>,
    /// Orders with unsplit holds, by entry time. Ended and split ones are skipped on read.
    pending: VecDeque<(u64, Handle)>,
    /// Deferred returns per trading hold, in order of origin.
    returns: HashMap<HoldIx, Vec<Return>>,
    deferred: usize,
    /// By hold index.
    ledger: Vec<LedgerAmounts>,
}

/// Remaining amounts of a trading hold in the ledger after the plan so far is posted.
#[derive(Clone, Copy, Debug, Default)]
struct LedgerAmounts {
    /// Negative while a return of defunded money is deferred.
    own: Minor,
    /// Sum of its order holds.
    children: Minor,
}

impl LedgerAmounts {
    fn split(&mut self, amount: Minor) {
        self.own -= amount;
        self.children += amount;
    }
}

impl HoldSplitter {
    /// Deferred returns over all trading holds.
    pub fn deferred(&self) -> usize {
        self.deferred
    }

    /// Starts from the ledger's state: `split_holds` of the split orders. All others are pending.
    pub fn from_ledger(
        split_holds: HashMap<Handle, SplitHolds>,
        trading_state: &TradingState,
    ) -> Self {
        let mut ledger: Vec<LedgerAmounts> = trading_state
            .holds()
            .map(|(_, hold)| LedgerAmounts {
                own: hold.held,
                children: Minor::ZERO,
            })
            .collect();
        for order in trading_state.orders() {
            if let Some(holds) = split_holds.get(&order.handle) {
                let children = holds.main.remaining + holds.fee.remaining;
                ledger[order.hold.index()].split(children);
            }
        }
        let mut pending: Vec<_> = trading_state
            .orders()
            .filter(|order| !split_holds.contains_key(&order.handle))
            .map(|order| (order.created_ns, order.handle))
            .collect();
        pending.sort_unstable();
        Self {
            split_holds,
            pending: pending.into(),
            returns: HashMap::new(),
            deferred: 0,
            ledger,
        }
    }

    /// The holds of a split order.
    pub fn holds_of(&self, handle: Handle) -> Option<&SplitHolds> {
        self.split_holds.get(&handle)
    }

    /// Entry time of the oldest unsplit order, in journal nanoseconds.
    pub fn oldest_ns(&mut self, trading_state: &TradingState) -> Option<u64> {
        while let Some(&(entered_ns, handle)) = self.pending.front() {
            let is_open = trading_state.order(handle).is_some();
            if is_open && !self.split_holds.contains_key(&handle) {
                return Some(entered_ns);
            }
            self.pending.pop_front();
        }
        None
    }

    /// Adds the ledger effects of a change to the plan.
    pub fn apply(&mut self, trading_state: &TradingState, change: &Change, plan: &mut Plan) {
        match change {
            Change::Funded { trading_hold, by } => self.apply_funding(*trading_hold, *by),
            Change::Entered(order) => self.pending.push_back((order.created_ns, order.handle)),
            Change::Moved(moved) => self.adjust_holds(trading_state, moved, plan),
            Change::Traded(traded) => self.apply_trade(trading_state, traded, plan),
            Change::Emptied {
                trading_hold,
                order,
                reason,
            } => {
                self.return_to_parent(trading_state, *trading_hold, plan);
                let release = HoldMovement::Release {
                    hold: trading_state.hold(*trading_hold).hold_id,
                    order: *order,
                    reason: *reason,
                };
                self.push(*trading_hold, release, plan);
            }
        }
    }

    /// Splits holds of orders entered at or before `horizon_ns`, then plans all deferred returns.
    ///
    /// Splits oldest first, until the plan has `weight` rows.
    pub fn finish(
        &mut self,
        trading_state: &TradingState,
        horizon_ns: u64,
        weight: usize,
        plan: &mut Plan,
    ) {
        while plan.weight() + self.deferred < weight
            && self
                .oldest_ns(trading_state)
                .is_some_and(|at| at <= horizon_ns)
        {
            let (_, handle) = self
                .pending
                .pop_front()
                .expect("oldest_ns returned the first entry");
            let order = *trading_state
                .order(handle)
                .expect("oldest_ns skips ended orders");
            self.split(trading_state, &order, order.reserved, plan);
        }
        let mut trading_holds: Vec<_> = self.returns.keys().copied().collect();
        trading_holds.sort_unstable();
        for trading_hold in trading_holds {
            self.return_to_parent(trading_state, trading_hold, plan);
        }
    }

    /// Asserts that a hold and its children add up to the journal's amount. Requires that no return
    /// is deferred.
    pub fn check(&self, trading_state: &TradingState, trading_hold: HoldIx) {
        let LedgerAmounts { own, children } = self.ledger[trading_hold.index()];
        let held = trading_state.held(trading_hold);
        assert!(
            own + children == held && !own.is_negative() && !children.is_negative(),
            "hold {trading_hold}: ledger has {own} + {children} in children, journal has {held}"
        );
    }

    fn apply_funding(&mut self, trading_hold: HoldIx, by: Minor) {
        if self.ledger.len() <= trading_hold.index() {
            self.ledger
                .resize(trading_hold.index() + 1, LedgerAmounts::default());
        }
        self.ledger[trading_hold.index()].own += by;
    }

    /// Adds a movement to the plan and applies it to the ledger amounts.
    fn push(&mut self, trading_hold: HoldIx, movement: HoldMovement, plan: &mut Plan) {
        let ledger = &mut self.ledger[trading_hold.index()];
        match &movement {
            HoldMovement::Split { amount, .. } | HoldMovement::Grow { amount, .. } => {
                ledger.split(amount.minor);
            }
            HoldMovement::Return { amount, .. } => {
                ledger.own += amount.minor;
                ledger.children -= amount.minor;
            }
            HoldMovement::Release { .. } => ledger.own = Minor::ZERO,
        }
        plan.push(trading_hold, movement);
    }

    fn apply_trade(&mut self, trading_state: &TradingState, traded: &TradeMoney, plan: &mut Plan) {
        for side in [&traded.buy, &traded.sell] {
            if !self.split_holds.contains_key(&side.order.handle) {
                self.split(trading_state, &side.order, side.before, plan);
            }
        }
        let spec = trading_state.instrument(traded.instrument);
        let money = |minor| trading_state.amount(types::AssetIx::MONEY, minor);
        let holds = TradeHolds {
            buyer_main: order_hold(traded.buy.order.id, HoldPart::Main),
            buyer_fee: (!traded.fee.is_zero())
                .then(|| order_hold(traded.buy.order.id, HoldPart::Fee)),
            seller_main: order_hold(traded.sell.order.id, HoldPart::Main),
        };
        plan.add_trade(TradeLeg {
            trade: traded.trade,
            sequence: traded.sequence,
            trade_number: traded.trade_number,
            executed_ns: traded.executed_ns,
            instrument: spec.id,
            buyer: trading_state.user(traded.buy.order.user),
            seller: trading_state.user(traded.sell.order.user),
            units: trading_state.amount(types::AssetIx::units(traded.instrument), traded.units),
            value: money(traded.value),
            fee: money(traded.fee),
            holds,
            bust: Bust {
                trade: traded.trade,
                trade_number: traded.trade_number,
                instrument: traded.instrument,
                buy: trade_party(&traded.buy.order),
                sell: trade_party(&traded.sell.order),
            },
        });
        plan.trading_holds
            .extend([traded.buy.order.hold, traded.sell.order.hold]);
        self.adjust_holds(trading_state, &traded.buy, plan);
        self.adjust_holds(trading_state, &traded.sell, plan);
    }

    /// Adjusts the holds of a split order to its current reserve. An unsplit order has no holds.
    fn adjust_holds(&mut self, trading_state: &TradingState, moved: &OrderMoney, plan: &mut Plan) {
        let handle = moved.order.handle;
        let Some(mut split_holds) = self.split_holds.get(&handle).copied() else {
            return;
        };
        let (spent, after) = (moved.spent, moved.order.reserved);
        self.ledger[moved.order.hold.index()].children -= spent.total();
        let parts = [
            (HoldPart::Main, spent.main, after.main),
            (HoldPart::Fee, spent.fee, after.fee),
        ];
        for (part, spent, after) in parts {
            let child = split_holds.part_mut(part);
            child.remaining -= spent;
            assert!(
                !child.remaining.is_negative(),
                "order {} spends more than its hold",
                moved.order.id
            );
            if after < child.remaining {
                self.defer_return(&moved.order, part, child, after, moved.return_reason());
            } else if after > child.remaining {
                self.grow(trading_state, &moved.order, part, child, after, plan);
            }
        }
        if moved.ended.is_some() {
            self.split_holds.remove(&handle);
        } else {
            self.split_holds.insert(handle, split_holds);
        }
    }

    fn defer_return(
        &mut self,
        order: &Order,
        part: HoldPart,
        child: &mut OrderHold,
        after: Minor,
        reason: ReturnReason,
    ) {
        let hold = order_hold(order.id, part);
        let amount = child.remaining - after;
        child.remaining = after;
        let returns = self.returns.entry(order.hold).or_default();
        match returns.iter_mut().find(|r| r.hold == hold) {
            Some(deferred) => {
                deferred.amount += amount;
                deferred.reason = reason;
            }
            None => {
                returns.push(Return {
                    hold,
                    order: order.id,
                    amount,
                    reason,
                });
                self.deferred += 1;
            }
        }
    }

    /// Grows a child to `after`: first from its own deferred return, then from the trading hold.
    fn grow(
        &mut self,
        trading_state: &TradingState,
        order: &Order,
        part: HoldPart,
        child: &mut OrderHold,
        after: Minor,
        plan: &mut Plan,
    ) {
        if child.exists
            && let Some(returns) = self.returns.get_mut(&order.hold)
        {
            let hold = order_hold(order.id, part);
            if let Some(at) = returns.iter().position(|r| r.hold == hold) {
                let taken = returns[at].amount.min(after - child.remaining);
                returns[at].amount -= taken;
                child.remaining += taken;
                if returns[at].amount.is_zero() {
                    returns.remove(at);
                    self.deferred -= 1;
                }
            }
        }
        if child.remaining == after {
            return;
        }
        self.return_to_parent(trading_state, order.hold, plan);
        let amount = trading_state.amount(
            trading_state.hold(order.hold).asset,
            after - child.remaining,
        );
        if child.exists {
            let hold = order_hold(order.id, part);
            self.push(order.hold, HoldMovement::Grow { hold, amount }, plan);
        } else {
            self.push(order.hold, split(trading_state, order, part, after), plan);
            child.exists = true;
        }
        child.remaining = after;
    }

    /// Splits both holds of an order out of its trading hold, to the amounts it reserves.
    fn split(
        &mut self,
        trading_state: &TradingState,
        order: &Order,
        reserve: types::Reserve,
        plan: &mut Plan,
    ) {
        self.return_to_parent(trading_state, order.hold, plan);
        let mut split_holds = SplitHolds::default();
        for (part, amount) in reserve.parts() {
            if !amount.is_zero() {
                self.push(order.hold, split(trading_state, order, part, amount), plan);
                *split_holds.part_mut(part) = OrderHold {
                    exists: true,
                    remaining: amount,
                };
            }
        }
        self.split_holds.insert(order.handle, split_holds);
    }

    /// Plans all deferred returns to a trading hold.
    fn return_to_parent(
        &mut self,
        trading_state: &TradingState,
        trading_hold: HoldIx,
        plan: &mut Plan,
    ) {
        let returns = self.returns.remove(&trading_hold).unwrap_or_default();
        self.deferred -= returns.len();
        for deferred in returns {
            let amount =
                trading_state.amount(trading_state.hold(trading_hold).asset, deferred.amount);
            let movement = HoldMovement::Return {
                hold: deferred.hold,
                amount,
                order: deferred.order,
                reason: deferred.reason,
            };
            self.push(trading_hold, movement, plan);
        }
    }
}

fn split(
    trading_state: &TradingState,
    order: &Order,
    part: HoldPart,
    amount: Minor,
) -> HoldMovement {
    let trading_hold = trading_state.hold(order.hold);
    HoldMovement::Split {
        parent: trading_hold.hold_id,
        hold: order_hold(order.id, part),
        amount: trading_state.amount(trading_hold.asset, amount),
        order: order.id,
        part,
    }
}

/// A ledger hold that the market owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerHold {
    pub hold: Id128,
    pub parent: Option<Id128>,
    pub remaining: Minor,
}

/// A difference between journal and ledger, with both amounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Break {
    pub name: BreakName,
    pub at: Sequence,
    pub trading_hold: HoldIx,
    pub user: types::UserIx,
    /// The differing hold.
    pub hold: Id128,
    pub expected: Minor,
    pub found: Minor,
}

types::code_enum! {
    /// Kind of difference.
    #[derive(PartialOrd, Ord)]
    BreakName: u8 {
        /// Trading hold and children have less than undrawn + reserves.
        HoldShort = 1 "HOLD_SHORT",
        /// Trading hold and children have more: funding in progress, or money that the journal does
        /// not know.
        HoldSurplus = 2 "HOLD_SURPLUS",
        /// A child's amount differs from its order's reserve.
        OrderHoldDiffers = 3 "ORDER_HOLD_DIFFERS",
    }
}

/// Compares the sum of a trading hold and its children (`found`) with the journal (`design.md` 4).
pub fn compare(trading_state: &TradingState, ix: HoldIx, found: Minor) -> Option<Break> {
    let trading_hold = trading_state.hold(ix);
    let name = match found.cmp(&trading_hold.held) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Less => BreakName::HoldShort,
        std::cmp::Ordering::Greater => BreakName::HoldSurplus,
    };
    Some(Break {
        name,
        at: trading_state.position(),
        trading_hold: ix,
        user: trading_hold.user,
        hold: trading_hold.hold_id,
        expected: trading_hold.held,
        found,
    })
}

/// Compares one hold of an order with its expected amount.
pub fn compare_part(
    trading_state: &TradingState,
    order: &Order,
    hold: Id128,
    expected: Minor,
    found: Minor,
) -> Option<Break> {
    (found != expected).then(|| Break {
        name: BreakName::OrderHoldDiffers,
        at: trading_state.position(),
        trading_hold: order.hold,
        user: order.user,
        hold,
        expected,
        found,
    })
}

/// Finds the split orders among the ledger's active holds, and holds that differ from the journal.
pub fn splits_in_ledger(
    trading_state: &TradingState,
    holds: &HashMap<Id128, LedgerHold>,
) -> (HashMap<Handle, SplitHolds>, Vec<Break>) {
    let mut split_holds = HashMap::new();
    let mut breaks = Vec::new();
    for order in trading_state.orders() {
        // A split order has an active main hold until it ends.
        if !holds.contains_key(&order_hold(order.id, HoldPart::Main)) {
            continue;
        }
        let mut found_holds = SplitHolds::default();
        for (part, expected) in order.reserved.parts() {
            let hold = order_hold(order.id, part);
            let found = holds.get(&hold).map_or(Minor::ZERO, |h| h.remaining);
            breaks.extend(compare_part(trading_state, order, hold, expected, found));
            // A used-up fee hold is no longer active. Charged fees prove that it existed.
            let used_up = part == HoldPart::Fee && !order.fill_totals.fee_minor.is_zero();
            *found_holds.part_mut(part) = OrderHold {
                exists: used_up || !expected.is_zero(),
                remaining: expected,
            };
        }
        split_holds.insert(order.handle, found_holds);
    }
    (split_holds, breaks)
}

/// The identifiers that an order has in its session.
fn trade_party(order: &Order) -> TradeParty {
    TradeParty {
        session: order.session,
        handle: order.handle,
        client_order_id: order.client_order_id,
    }
}
