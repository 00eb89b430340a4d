//! Holds of orders: splitting out of a trading hold, payment, return (`design.md` 4, T03, T05,
//! T20).
//!
//! An order's holds are split at its first fill or after it was open for a while. Until then its
//! reserve stays in the trading hold and the ledger has no row for it. Returns are deferred and
//! merged until the next split out of the same trading hold or the end of the batch. So every
//! prefix of a plan is covered, and a hundred price improvements of an order are one row.
//!
//! Invariant before each change, per pool: trading hold = undrawn + reserves of unsplit orders -
//! deferred returns; child = its order's reserve + its deferred return.

use std::collections::{HashMap, VecDeque};

use replica::Order;
use types::command::{Bust, TradeParty};
use types::{Handle, HoldIx, HoldPart, Id128, Minor, Sequence, order_hold};

use crate::copies::{Change, Copies, Moved, Traded};
use crate::plan::{Ending, Movement, PaidFrom, Plan, TradeLeg};

/// A hold of an order in the ledger, after the plan and its returns are posted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OrderHold {
    /// It was split. A used-up hold remains and can grow again while its order is open.
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
    ending: Ending,
}

/// Plans the splits, payments and returns of order holds.
#[derive(Clone, Debug, Default)]
pub struct HoldSplitter {
    carved: HashMap<Handle, SplitHolds>,
    /// Orders with unsplit holds, by entry time. Ended and split ones are skipped on read.
    pending: VecDeque<(u64, Handle)>,
    /// Deferred returns per pool, in order of origin.
    returns: HashMap<HoldIx, Vec<Return>>,
    kept: usize,
    /// By hold index.
    ledger: Vec<InLedger>,
}

/// Remaining amounts of a trading hold in the ledger after the plan so far is posted.
#[derive(Clone, Copy, Debug, Default)]
struct InLedger {
    /// Negative while a defunded return is deferred.
    own: Minor,
    /// Sum of its order holds.
    children: Minor,
}

impl InLedger {
    fn split(&mut self, amount: Minor) {
        self.own -= amount;
        self.children += amount;
    }
}

impl HoldSplitter {
    /// Deferred returns over all pools.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Starts from the ledger's state: split orders as found, all others pending by entry time.
    pub fn adopt(carved: HashMap<Handle, SplitHolds>, copies: &Copies) -> Self {
        let mut ledger: Vec<InLedger> = copies
            .holds()
            .map(|(_, hold)| InLedger {
                own: hold.held,
                children: Minor::ZERO,
            })
            .collect();
        for order in copies.orders() {
            if let Some(holds) = carved.get(&order.handle) {
                let children = holds.main.remaining + holds.fee.remaining;
                ledger[order.pool.index()].split(children);
            }
        }
        let mut pending: Vec<_> = copies
            .orders()
            .filter(|order| !carved.contains_key(&order.handle))
            .map(|order| (order.created_ns, order.handle))
            .collect();
        pending.sort_unstable();
        Self {
            carved,
            pending: pending.into(),
            returns: HashMap::new(),
            kept: 0,
            ledger,
        }
    }

    /// The holds of a split order.
    pub fn of(&self, handle: Handle) -> Option<&SplitHolds> {
        self.carved.get(&handle)
    }

    /// Entry time of the oldest unsplit order.
    pub fn oldest_ns(&mut self, copies: &Copies) -> Option<u64> {
        while let Some(&(entered_ns, handle)) = self.pending.front() {
            let is_open = copies.order(handle).is_some();
            if is_open && !self.carved.contains_key(&handle) {
                return Some(entered_ns);
            }
            self.pending.pop_front();
        }
        None
    }

    /// Adds the ledger effects of a change to the plan.
    pub fn apply(&mut self, copies: &Copies, change: &Change, plan: &mut Plan) {
        match change {
            Change::Funded { pool, by } => self.funded(*pool, *by),
            Change::Entered(order) => self.pending.push_back((order.created_ns, order.handle)),
            Change::Moved(moved) => self.moved(copies, moved, plan),
            Change::Traded(traded) => self.traded(copies, traded, plan),
            Change::Emptied {
                pool,
                order,
                ending,
            } => {
                self.return_to_parent(copies, *pool, plan);
                let release = Movement::Release {
                    hold: copies.hold(*pool).hold_id,
                    order: *order,
                    ending: *ending,
                };
                self.push(*pool, release, plan);
            }
        }
    }

    /// Splits holds of orders entered at or before `horizon_ns`, then plans all deferred returns.
    ///
    /// Splits oldest first, until the plan has `weight` rows.
    pub fn finish(&mut self, copies: &Copies, horizon_ns: u64, weight: usize, plan: &mut Plan) {
        while plan.weight() + self.kept < weight
            && self.oldest_ns(copies).is_some_and(|at| at <= horizon_ns)
        {
            let (_, handle) = self
                .pending
                .pop_front()
                .expect("oldest_ns returned the first entry");
            let order = *copies.order(handle).expect("oldest_ns skips ended orders");
            self.split(copies, &order, order.reserved, plan);
        }
        let mut pools: Vec<_> = self.returns.keys().copied().collect();
        pools.sort_unstable();
        for pool in pools {
            self.return_to_parent(copies, pool, plan);
        }
    }

    /// Asserts that a hold and its children add up to the journal's amount. Called before a batch
    /// is written, with no deferred returns.
    pub fn check(&self, copies: &Copies, pool: HoldIx) {
        let InLedger { own, children } = self.ledger[pool.index()];
        let held = copies.held(pool);
        assert!(
            own + children == held && !own.is_negative() && !children.is_negative(),
            "hold {pool}: ledger has {own} + {children} in children, journal has {held}"
        );
    }

    fn funded(&mut self, pool: HoldIx, by: Minor) {
        if self.ledger.len() <= pool.index() {
            self.ledger.resize(pool.index() + 1, InLedger::default());
        }
        self.ledger[pool.index()].own += by;
    }

    /// Adds a movement to the plan and to the ledger amounts here.
    fn push(&mut self, pool: HoldIx, movement: Movement, plan: &mut Plan) {
        let ledger = &mut self.ledger[pool.index()];
        match &movement {
            Movement::Split { amount, .. } | Movement::Grow { amount, .. } => {
                ledger.split(amount.minor);
            }
            Movement::Return { amount, .. } => {
                ledger.own += amount.minor;
                ledger.children -= amount.minor;
            }
            Movement::Release { .. } => ledger.own = Minor::ZERO,
        }
        plan.push(pool, movement);
    }

    fn traded(&mut self, copies: &Copies, traded: &Traded, plan: &mut Plan) {
        for side in [&traded.buy, &traded.sell] {
            if !self.carved.contains_key(&side.order.handle) {
                self.split(copies, &side.order, side.before, plan);
            }
        }
        let spec = copies.instrument(traded.instrument);
        let money = |minor| copies.amount(types::AssetIx::MONEY, minor);
        let paid_from = PaidFrom {
            buyer_main: order_hold(traded.buy.order.id, HoldPart::Main),
            buyer_fee: (!traded.fee.is_zero())
                .then(|| order_hold(traded.buy.order.id, HoldPart::Fee)),
            seller_main: order_hold(traded.sell.order.id, HoldPart::Main),
        };
        plan.settle(TradeLeg {
            trade: traded.trade,
            sequence: traded.sequence,
            trade_number: traded.trade_number,
            executed_ns: traded.executed_ns,
            instrument: spec.id,
            buyer: copies.user(traded.buy.order.user),
            seller: copies.user(traded.sell.order.user),
            units: copies.amount(types::AssetIx::units(traded.instrument), traded.units),
            value: money(traded.value),
            fee: money(traded.fee),
            paid_from,
            bust: Bust {
                trade: traded.trade,
                trade_number: traded.trade_number,
                instrument: traded.instrument,
                buy: party(&traded.buy.order),
                sell: party(&traded.sell.order),
            },
        });
        plan.pools
            .extend([traded.buy.order.pool, traded.sell.order.pool]);
        self.moved(copies, &traded.buy, plan);
        self.moved(copies, &traded.sell, plan);
    }

    /// Adjusts the children of a split order to its current reserve. An unsplit order has nothing
    /// in the ledger.
    fn moved(&mut self, copies: &Copies, moved: &Moved, plan: &mut Plan) {
        let handle = moved.order.handle;
        let Some(mut carved) = self.carved.get(&handle).copied() else {
            return;
        };
        let (spent, after) = (moved.spent, moved.order.reserved);
        self.ledger[moved.order.pool.index()].children -= spent.total();
        let parts = [
            (HoldPart::Main, spent.main, after.main),
            (HoldPart::Fee, spent.fee, after.fee),
        ];
        for (part, spent, after) in parts {
            let child = carved.part_mut(part);
            child.remaining -= spent;
            assert!(
                !child.remaining.is_negative(),
                "order {} spends more than its hold",
                moved.order.id
            );
            if after < child.remaining {
                self.keep_back(&moved.order, part, child, after, moved.ending());
            } else if after > child.remaining {
                self.grow(copies, &moved.order, part, child, after, plan);
            }
        }
        if moved.ended.is_some() {
            self.carved.remove(&handle);
        } else {
            self.carved.insert(handle, carved);
        }
    }

    fn keep_back(
        &mut self,
        order: &Order,
        part: HoldPart,
        child: &mut OrderHold,
        after: Minor,
        ending: Ending,
    ) {
        let hold = order_hold(order.id, part);
        let amount = child.remaining - after;
        child.remaining = after;
        let returns = self.returns.entry(order.pool).or_default();
        match returns.iter_mut().find(|r| r.hold == hold) {
            Some(kept) => {
                kept.amount += amount;
                kept.ending = ending;
            }
            None => {
                returns.push(Return {
                    hold,
                    order: order.id,
                    amount,
                    ending,
                });
                self.kept += 1;
            }
        }
    }

    /// Grows a child to `after`: first from its own deferred return, then from the trading hold.
    fn grow(
        &mut self,
        copies: &Copies,
        order: &Order,
        part: HoldPart,
        child: &mut OrderHold,
        after: Minor,
        plan: &mut Plan,
    ) {
        if child.exists
            && let Some(returns) = self.returns.get_mut(&order.pool)
        {
            let hold = order_hold(order.id, part);
            if let Some(at) = returns.iter().position(|r| r.hold == hold) {
                let taken = returns[at].amount.min(after - child.remaining);
                returns[at].amount -= taken;
                child.remaining += taken;
                if returns[at].amount.is_zero() {
                    returns.remove(at);
                    self.kept -= 1;
                }
            }
        }
        if child.remaining == after {
            return;
        }
        self.return_to_parent(copies, order.pool, plan);
        let amount = copies.amount(copies.hold(order.pool).asset, after - child.remaining);
        if child.exists {
            let hold = order_hold(order.id, part);
            self.push(order.pool, Movement::Grow { hold, amount }, plan);
        } else {
            self.push(order.pool, split(copies, order, part, after), plan);
            child.exists = true;
        }
        child.remaining = after;
    }

    /// Splits both holds of an order out of its trading hold, to the amounts it reserves.
    fn split(&mut self, copies: &Copies, order: &Order, reserve: types::Reserve, plan: &mut Plan) {
        self.return_to_parent(copies, order.pool, plan);
        let mut carved = SplitHolds::default();
        for (part, amount) in reserve.parts() {
            if !amount.is_zero() {
                self.push(order.pool, split(copies, order, part, amount), plan);
                *carved.part_mut(part) = OrderHold {
                    exists: true,
                    remaining: amount,
                };
            }
        }
        self.carved.insert(order.handle, carved);
    }

    fn return_to_parent(&mut self, copies: &Copies, pool: HoldIx, plan: &mut Plan) {
        let returns = self.returns.remove(&pool).unwrap_or_default();
        self.kept -= returns.len();
        for kept in returns {
            let amount = copies.amount(copies.hold(pool).asset, kept.amount);
            let back = Movement::Return {
                hold: kept.hold,
                amount,
                order: kept.order,
                ending: kept.ending,
            };
            self.push(pool, back, plan);
        }
    }
}

fn split(copies: &Copies, order: &Order, part: HoldPart, amount: Minor) -> Movement {
    let pool = copies.hold(order.pool);
    Movement::Split {
        parent: pool.hold_id,
        hold: order_hold(order.id, part),
        amount: copies.amount(pool.asset, amount),
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
    pub pool: HoldIx,
    pub user: types::UserIx,
    /// The differing hold.
    pub hold: Id128,
    pub expected: Minor,
    pub found: Minor,
}

/// Kind of difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BreakName {
    /// Trading hold and children have less than undrawn + reserves.
    HoldShort,
    /// Trading hold and children have more: funding in progress, or money unknown to the journal.
    HoldSurplus,
    /// A child's amount differs from its order's reserve.
    OrderHoldDiffers,
}

impl BreakName {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HoldShort => "HOLD_SHORT",
            Self::HoldSurplus => "HOLD_SURPLUS",
            Self::OrderHoldDiffers => "ORDER_HOLD_DIFFERS",
        }
    }
}

/// Compares one pool with the sum of its trading hold and children (`design.md` 4, the invariant).
pub fn compare(copies: &Copies, ix: HoldIx, found: Minor) -> Option<Break> {
    let pool = copies.hold(ix);
    let name = match found.cmp(&pool.held) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Less => BreakName::HoldShort,
        std::cmp::Ordering::Greater => BreakName::HoldSurplus,
    };
    Some(Break {
        name,
        at: copies.position(),
        pool: ix,
        user: pool.user,
        hold: pool.hold_id,
        expected: pool.held,
        found,
    })
}

/// Compares one hold of an order with its expected amount.
pub fn compare_part(
    copies: &Copies,
    order: &Order,
    hold: Id128,
    expected: Minor,
    found: Minor,
) -> Option<Break> {
    (found != expected).then(|| Break {
        name: BreakName::OrderHoldDiffers,
        at: copies.position(),
        pool: order.pool,
        user: order.user,
        hold,
        expected,
        found,
    })
}

/// Finds the split orders among the ledger's active holds.
pub fn splits_in_ledger(
    copies: &Copies,
    holds: &HashMap<Id128, LedgerHold>,
) -> (HashMap<Handle, SplitHolds>, Vec<Break>) {
    let mut carved = HashMap::new();
    let mut breaks = Vec::new();
    for order in copies.orders() {
        // The main hold lives as long as its order, so it alone shows whether the order is split.
        if !holds.contains_key(&order_hold(order.id, HoldPart::Main)) {
            continue;
        }
        let mut taken = SplitHolds::default();
        for (part, expected) in order.reserved.parts() {
            let hold = order_hold(order.id, part);
            let found = holds.get(&hold).map_or(Minor::ZERO, |h| h.remaining);
            breaks.extend(compare_part(copies, order, hold, expected, found));
            // A used-up fee hold is no longer active. Charged fees prove that it existed.
            let used_up = part == HoldPart::Fee && !order.done.fee_minor.is_zero();
            *taken.part_mut(part) = OrderHold {
                exists: used_up || !expected.is_zero(),
                remaining: expected,
            };
        }
        carved.insert(order.handle, taken);
    }
    (carved, breaks)
}

/// The order of a trade, by its session's identifiers.
fn party(order: &Order) -> TradeParty {
    TradeParty {
        session: order.session,
        handle: order.handle,
        client_order_id: order.client_order_id,
    }
}
