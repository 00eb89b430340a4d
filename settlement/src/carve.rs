//! Orders' own holds: when they are split out of a trading hold, what is paid out of them, what goes back (`design.md` 4, T03, T05, T20).
//!
//! An order is carved when it has a fill or has been open for a while; before that its money lies in the trading hold and nothing of it is in the
//! ledger. Returns are kept back and merged until something else is split out of the same trading hold or the batch ends; so each prefix of a
//! plan is covered, and a hundred price improvements of an order are one row.
//!
//! Invariant behind each change, per pool: trading hold = free + reserves of orders not carved - returns kept back; child = its order's reserve +
//! its return kept back.

use std::collections::{HashMap, VecDeque};

use types::{Handle, HoldIx, HoldPart, Id128, Minor, Sequence, order_hold};

use crate::fold::{Change, Fold, Moved, Order, Traded};
use crate::plan::{Ending, Movement, PaidFrom, Plan, TradeLeg};

/// A hold of an order, as the ledger has it once the plan is posted and returns are given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Child {
    /// It was split off once. One that was used up stays and can be grown again while its order lives.
    pub exists: bool,
    pub remaining: Minor,
}

/// The two holds of a carved order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carved {
    pub main: Child,
    pub fee: Child,
}

impl Carved {
    fn part_mut(&mut self, part: HoldPart) -> &mut Child {
        match part {
            HoldPart::Main => &mut self.main,
            HoldPart::Fee => &mut self.fee,
        }
    }
}

/// Money that a child gives back at the next chance.
#[derive(Clone, Copy, Debug)]
struct Return {
    hold: Id128,
    order: Id128,
    amount: Minor,
    ending: Ending,
}

/// Splits, pays and returns.
#[derive(Clone, Debug, Default)]
pub struct Carver {
    carved: HashMap<Handle, Carved>,
    /// Orders not carved yet, in order of entry; those that have gone or were carved are skipped.
    young: VecDeque<(u64, Handle)>,
    /// Per pool, in the order in which they came up.
    returns: HashMap<HoldIx, Vec<Return>>,
    kept: usize,
}

impl Carver {
    /// Returns kept back, over all pools.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Takes over what the ledger has: the carved orders and, for the rest, the orders in order of entry.
    pub fn adopt(carved: HashMap<Handle, Carved>, fold: &Fold) -> Self {
        let mut young: Vec<_> = fold
            .orders()
            .filter(|order| !carved.contains_key(&order.handle))
            .map(|order| (order.entered_ns, order.handle))
            .collect();
        young.sort_unstable();
        Self {
            carved,
            young: young.into(),
            returns: HashMap::new(),
            kept: 0,
        }
    }

    /// The holds of a carved order.
    pub fn of(&self, handle: Handle) -> Option<&Carved> {
        self.carved.get(&handle)
    }

    /// When the oldest order that is not carved entered.
    pub fn oldest_ns(&mut self, fold: &Fold) -> Option<u64> {
        while let Some(&(entered_ns, handle)) = self.young.front() {
            let is_open = fold.order(handle).is_some();
            if is_open && !self.carved.contains_key(&handle) {
                return Some(entered_ns);
            }
            self.young.pop_front();
        }
        None
    }

    /// Adds what a change means to the plan.
    pub fn apply(&mut self, fold: &Fold, change: &Change, plan: &mut Plan) {
        match change {
            Change::Entered(order) => self.young.push_back((order.entered_ns, order.handle)),
            Change::Moved(moved) => self.moved(fold, moved, plan),
            Change::Traded(traded) => self.traded(fold, traded, plan),
            Change::Emptied {
                pool,
                order,
                ending,
            } => {
                self.give_back(fold, *pool, plan);
                let hold = fold.pool(*pool).hold;
                plan.push(
                    *pool,
                    Movement::Release {
                        hold,
                        order: *order,
                        ending: *ending,
                    },
                );
            }
        }
    }

    /// Carves orders that entered at or before `horizon_ns`, oldest first, until the plan has `weight` rows, and gives back what is kept back.
    pub fn finish(&mut self, fold: &Fold, horizon_ns: u64, weight: usize, plan: &mut Plan) {
        while plan.weight() + self.kept < weight
            && self.oldest_ns(fold).is_some_and(|at| at <= horizon_ns)
        {
            let (_, handle) = self
                .young
                .pop_front()
                .expect("an oldest order stands in front");
            let order = *fold.order(handle).expect("only open orders stand in front");
            self.carve(fold, &order, order.reserve, plan);
        }
        let mut pools: Vec<_> = self.returns.keys().copied().collect();
        pools.sort_unstable();
        for pool in pools {
            self.give_back(fold, pool, plan);
        }
    }

    fn traded(&mut self, fold: &Fold, traded: &Traded, plan: &mut Plan) {
        for side in [&traded.buy, &traded.sell] {
            if !self.carved.contains_key(&side.order.handle) {
                self.carve(fold, &side.order, side.before, plan);
            }
        }
        let spec = fold.instrument(traded.instrument);
        let money = |minor| fold.amount(types::AssetIx::MONEY, minor);
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
            buyer: fold.user(traded.buy.order.user),
            seller: fold.user(traded.sell.order.user),
            units: fold.amount(types::AssetIx::units(traded.instrument), traded.units),
            value: money(traded.value),
            fee: money(traded.fee),
            paid_from,
        });
        plan.pools
            .extend([traded.buy.order.pool, traded.sell.order.pool]);
        self.moved(fold, &traded.buy, plan);
        self.moved(fold, &traded.sell, plan);
    }

    /// Brings the children of a carved order to what it reserves now. An order that is not carved has nothing in the ledger to move.
    fn moved(&mut self, fold: &Fold, moved: &Moved, plan: &mut Plan) {
        let handle = moved.order.handle;
        let Some(mut carved) = self.carved.get(&handle).copied() else {
            return;
        };
        let (spent, after) = (moved.spent, moved.order.reserve);
        let parts = [
            (HoldPart::Main, spent.main, after.main),
            (HoldPart::Fee, spent.fee, after.fee),
        ];
        for (part, spent, after) in parts {
            let child = carved.part_mut(part);
            child.remaining -= spent;
            assert!(
                !child.remaining.is_negative(),
                "order {} pays more than its hold",
                moved.order.id
            );
            if after < child.remaining {
                self.keep_back(&moved.order, part, child, after, moved.ending());
            } else if after > child.remaining {
                self.grow(fold, &moved.order, part, child, after, plan);
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
        child: &mut Child,
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

    /// Grows a child to `after`: first by its own return kept back, then out of the trading hold.
    fn grow(
        &mut self,
        fold: &Fold,
        order: &Order,
        part: HoldPart,
        child: &mut Child,
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
        self.give_back(fold, order.pool, plan);
        let amount = fold.amount(fold.pool(order.pool).asset, after - child.remaining);
        if child.exists {
            let hold = order_hold(order.id, part);
            plan.push(order.pool, Movement::Grow { hold, amount });
        } else {
            plan.push(order.pool, split(fold, order, part, after));
            child.exists = true;
        }
        child.remaining = after;
    }

    /// Splits both holds of an order out of its trading hold, as large as what it reserves.
    fn carve(&mut self, fold: &Fold, order: &Order, reserve: types::Reserve, plan: &mut Plan) {
        self.give_back(fold, order.pool, plan);
        let mut carved = Carved::default();
        for (part, amount) in [(HoldPart::Main, reserve.main), (HoldPart::Fee, reserve.fee)] {
            if !amount.is_zero() {
                plan.push(order.pool, split(fold, order, part, amount));
                *carved.part_mut(part) = Child {
                    exists: true,
                    remaining: amount,
                };
            }
        }
        self.carved.insert(order.handle, carved);
    }

    fn give_back(&mut self, fold: &Fold, pool: HoldIx, plan: &mut Plan) {
        let returns = self.returns.remove(&pool).unwrap_or_default();
        self.kept -= returns.len();
        for kept in returns {
            let amount = fold.amount(fold.pool(pool).asset, kept.amount);
            plan.push(
                pool,
                Movement::Return {
                    hold: kept.hold,
                    amount,
                    order: kept.order,
                    ending: kept.ending,
                },
            );
        }
    }
}

fn split(fold: &Fold, order: &Order, part: HoldPart, amount: Minor) -> Movement {
    let pool = fold.pool(order.pool);
    Movement::Split {
        parent: pool.hold,
        hold: order_hold(order.id, part),
        amount: fold.amount(pool.asset, amount),
        order: order.id,
        part,
    }
}

/// A hold that the ledger keeps for the market.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerHold {
    pub hold: Id128,
    pub parent: Option<Id128>,
    pub remaining: Minor,
}

/// A difference between the fold and the ledger, with both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Break {
    pub name: BreakName,
    pub at: Sequence,
    pub pool: HoldIx,
    pub user: types::UserIx,
    /// The hold that differs.
    pub hold: Id128,
    pub expected: Minor,
    pub found: Minor,
}

/// What kind of difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BreakName {
    /// Trading hold and children have less than free + reserves.
    HoldShort,
    /// Trading hold and children have more: funding under way, or money that the journal does not know.
    HoldSurplus,
    /// A child has not what its order reserves.
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
pub fn compare(fold: &Fold, ix: HoldIx, found: Minor) -> Option<Break> {
    let pool = fold.pool(ix);
    let name = match found.cmp(&pool.total()) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Less => BreakName::HoldShort,
        std::cmp::Ordering::Greater => BreakName::HoldSurplus,
    };
    Some(Break {
        name,
        at: fold.position(),
        pool: ix,
        user: pool.user,
        hold: pool.hold,
        expected: pool.total(),
        found,
    })
}

/// Finds the carved orders among the active holds of the ledger.
pub fn carved_in_ledger(
    fold: &Fold,
    holds: &HashMap<Id128, LedgerHold>,
) -> (HashMap<Handle, Carved>, Vec<Break>) {
    let mut carved = HashMap::new();
    let mut breaks = Vec::new();
    for order in fold.orders() {
        // The main hold lives as long as its order, so it alone says whether the order is carved.
        if !holds.contains_key(&order_hold(order.id, HoldPart::Main)) {
            continue;
        }
        let mut taken = Carved::default();
        let parts = [
            (HoldPart::Main, order.reserve.main),
            (HoldPart::Fee, order.reserve.fee),
        ];
        for (part, expected) in parts {
            let hold = order_hold(order.id, part);
            let found = holds.get(&hold).map_or(Minor::ZERO, |h| h.remaining);
            if found != expected {
                breaks.push(Break {
                    name: BreakName::OrderHoldDiffers,
                    at: fold.position(),
                    pool: order.pool,
                    user: order.user,
                    hold,
                    expected,
                    found,
                });
            }
            // A fee hold with nothing left is no longer active: fees were charged, so it was there.
            let used_up = part == HoldPart::Fee && !order.done.fee_minor.is_zero();
            *taken.part_mut(part) = Child {
                exists: used_up || !expected.is_zero(),
                remaining: expected,
            };
        }
        carved.insert(order.handle, taken);
    }
    (carved, breaks)
}
