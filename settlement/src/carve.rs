//! Orders' own holds: when they are split out of a trading hold, what is paid out of them, what goes back
//! (`design.md` 4, T03, T05, T20).
//!
//! An order is carved when it has a fill or has been open for a while; before that its money lies in the
//! trading hold and nothing of it is in the ledger. Returns are kept back and merged until something else is
//! split out of the same trading hold or the batch ends; so each prefix of a plan is covered, and a hundred
//! price improvements of an order are one row.
//!
//! Invariant behind each change, per pool: trading hold = free + reserves of orders not carved - returns kept
//! back; child = its order's reserve + its return kept back.

use std::collections::{HashMap, VecDeque};

use replica::Order;
use types::command::{Bust, TradeParty};
use types::{Handle, HoldIx, HoldPart, Id128, Minor, Sequence, order_hold};

use crate::copies::{Change, Copies, Moved, Traded};
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
    /// By hold.
    ledger: Vec<InLedger>,
}

/// What the ledger has left of a trading hold once the plan so far is posted.
#[derive(Clone, Copy, Debug, Default)]
struct InLedger {
    /// Negative while a return that was defunded is kept back.
    own: Minor,
    /// In the holds of its orders.
    children: Minor,
}

impl InLedger {
    fn split(&mut self, amount: Minor) {
        self.own -= amount;
        self.children += amount;
    }
}

impl Carver {
    /// Returns kept back, over all pools.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Takes over what the ledger has: the carved orders and, for the rest, the orders in order of entry.
    pub fn adopt(carved: HashMap<Handle, Carved>, copies: &Copies) -> Self {
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
        let mut young: Vec<_> = copies
            .orders()
            .filter(|order| !carved.contains_key(&order.handle))
            .map(|order| (order.created_ns, order.handle))
            .collect();
        young.sort_unstable();
        Self {
            carved,
            young: young.into(),
            returns: HashMap::new(),
            kept: 0,
            ledger,
        }
    }

    /// The holds of a carved order.
    pub fn of(&self, handle: Handle) -> Option<&Carved> {
        self.carved.get(&handle)
    }

    /// When the oldest order that is not carved entered.
    pub fn oldest_ns(&mut self, copies: &Copies) -> Option<u64> {
        while let Some(&(entered_ns, handle)) = self.young.front() {
            let is_open = copies.order(handle).is_some();
            if is_open && !self.carved.contains_key(&handle) {
                return Some(entered_ns);
            }
            self.young.pop_front();
        }
        None
    }

    /// Adds what a change means to the plan.
    pub fn apply(&mut self, copies: &Copies, change: &Change, plan: &mut Plan) {
        match change {
            Change::Funded { pool, by } => self.funded(*pool, *by),
            Change::Entered(order) => self.young.push_back((order.created_ns, order.handle)),
            Change::Moved(moved) => self.moved(copies, moved, plan),
            Change::Traded(traded) => self.traded(copies, traded, plan),
            Change::Emptied {
                pool,
                order,
                ending,
            } => {
                self.give_back(copies, *pool, plan);
                let release = Movement::Release {
                    hold: copies.hold(*pool).hold_id,
                    order: *order,
                    ending: *ending,
                };
                self.push(*pool, release, plan);
            }
        }
    }

    /// Carves orders that entered at or before `horizon_ns`, oldest first, until the plan has `weight` rows,
    /// and gives back what is kept back.
    pub fn finish(&mut self, copies: &Copies, horizon_ns: u64, weight: usize, plan: &mut Plan) {
        while plan.weight() + self.kept < weight
            && self.oldest_ns(copies).is_some_and(|at| at <= horizon_ns)
        {
            let (_, handle) = self
                .young
                .pop_front()
                .expect("an oldest order stands in front");
            let order = *copies
                .order(handle)
                .expect("only open orders stand in front");
            self.carve(copies, &order, order.reserved, plan);
        }
        let mut pools: Vec<_> = self.returns.keys().copied().collect();
        pools.sort_unstable();
        for pool in pools {
            self.give_back(copies, pool, plan);
        }
    }

    /// Asserts that the ledger has of a hold, with its children, what the journal says: before a
    /// batch is written, with nothing kept back.
    pub fn check(&self, copies: &Copies, pool: HoldIx) {
        let InLedger { own, children } = self.ledger[pool.index()];
        let held = copies.held(pool);
        assert!(
            own + children == held && !own.is_negative() && !children.is_negative(),
            "hold {pool}: {own} and {children} in its children, {held} by the journal"
        );
    }

    fn funded(&mut self, pool: HoldIx, by: Minor) {
        if self.ledger.len() <= pool.index() {
            self.ledger.resize(pool.index() + 1, InLedger::default());
        }
        self.ledger[pool.index()].own += by;
    }

    /// Adds a movement to the plan and does the same here.
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
                self.carve(copies, &side.order, side.before, plan);
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

    /// Brings the children of a carved order to what it reserves now. An order that is not carved has nothing
    /// in the ledger to move.
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
                "order {} pays more than its hold",
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
        copies: &Copies,
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
        self.give_back(copies, order.pool, plan);
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

    /// Splits both holds of an order out of its trading hold, as large as what it reserves.
    fn carve(&mut self, copies: &Copies, order: &Order, reserve: types::Reserve, plan: &mut Plan) {
        self.give_back(copies, order.pool, plan);
        let mut carved = Carved::default();
        for (part, amount) in reserve.parts() {
            if !amount.is_zero() {
                self.push(order.pool, split(copies, order, part, amount), plan);
                *carved.part_mut(part) = Child {
                    exists: true,
                    remaining: amount,
                };
            }
        }
        self.carved.insert(order.handle, carved);
    }

    fn give_back(&mut self, copies: &Copies, pool: HoldIx, plan: &mut Plan) {
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

/// A hold that the ledger keeps for the market.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerHold {
    pub hold: Id128,
    pub parent: Option<Id128>,
    pub remaining: Minor,
}

/// A difference between the journal and the ledger, with both sides.
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

/// Compares one hold of an order with what it must have.
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

/// Finds the carved orders among the active holds of the ledger.
pub fn carved_in_ledger(
    copies: &Copies,
    holds: &HashMap<Id128, LedgerHold>,
) -> (HashMap<Handle, Carved>, Vec<Break>) {
    let mut carved = HashMap::new();
    let mut breaks = Vec::new();
    for order in copies.orders() {
        // The main hold lives as long as its order, so it alone says whether the order is carved.
        if !holds.contains_key(&order_hold(order.id, HoldPart::Main)) {
            continue;
        }
        let mut taken = Carved::default();
        for (part, expected) in order.reserved.parts() {
            let hold = order_hold(order.id, part);
            let found = holds.get(&hold).map_or(Minor::ZERO, |h| h.remaining);
            breaks.extend(compare_part(copies, order, hold, expected, found));
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

/// The order of a trade as its session knows it.
fn party(order: &Order) -> TradeParty {
    TradeParty {
        session: order.session,
        handle: order.handle,
        client_order_id: order.client_order_id,
    }
}
