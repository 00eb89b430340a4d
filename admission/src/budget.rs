//! Daily TRADING budget of each user (`design.md` 3). The value of an order is charged at entry.
//! The value that it did not trade returns when it ends.
//!
//! A command adds its charge to `used`. A closing event replaces the order's charge by its traded
//! value. Both are additions, so the sum does not depend on how events interleave with later
//! commands.

use types::command::{Amend, New, SetBudget};
use types::{Command, Minor, RejectReason, UserIx};

use crate::admission::{Admission, moscow_day};
use crate::request::{Reject, RejectDetails};
use crate::state::{OpenOrder, table_row};

table_row! {
    /// Budget of a user for one day.
    #[derive(Default)]
    pub struct Budget {
        /// Moscow day, 0 = never set.
        pub day: u32,
        /// The day's limit, as last read from identity.
        pub limit: Minor,
        /// Value that identity had counted at the first reading of the day.
        pub used_before: Minor,
        /// Charges of the day's open orders, and what its ended orders have traded.
        pub used: Minor,
    }
}

impl Budget {
    /// Value that the user may still order on `day`; zero if the budget is of another day.
    pub fn left(&self, day: u32) -> Minor {
        match self.day == day {
            true => (self.limit - self.used_before - self.used).or_zero(),
            false => Minor::ZERO,
        }
    }

    /// Stores a reading. A later reading of the same day replaces only the limit: identity counts
    /// late what these orders have used.
    pub(crate) fn set(&mut self, c: &SetBudget) {
        if c.day != self.day {
            *self = Self {
                day: c.day,
                limit: c.limit_minor,
                used_before: c.limit_minor - c.left_minor,
                used: Minor::ZERO,
            };
        }
        self.limit = c.limit_minor;
    }

    pub(crate) fn hash_words(&self) -> [u64; 4] {
        let amounts = [self.limit, self.used_before, self.used];
        let [limit, before, used] = amounts.map(|amount| amount.0 as u64);
        [u64::from(self.day), limit, before, used]
    }
}

table_row! {
    /// Part of an open order in its user's budget.
    pub struct OrderBudget {
        /// Moscow day of the budget that the order is charged to.
        pub day: u32,
        /// Charge for the order and its amends.
        pub charged: Minor,
        /// Value that identity approved for this order: trades up to it are not charged.
        pub free: Minor,
    }
}

impl OrderBudget {
    pub(crate) fn hash_words(&self) -> [u64; 3] {
        [
            u64::from(self.day),
            self.charged.0 as u64,
            self.free.0 as u64,
        ]
    }
}

impl Admission {
    pub(crate) fn admit_budget(&self, c: SetBudget) -> Result<Command, Reject> {
        let row = self.user(c.user).ok_or(RejectReason::UnknownUser)?;
        let (limit, left) = (c.limit_minor, c.left_minor);
        if left.is_negative() || left > limit {
            return Err(RejectReason::Malformed.into());
        }
        // Unchanged, or of an earlier day.
        let known = (row.budget.day, row.budget.limit);
        if c.day < known.0 || (c.day, limit) == known {
            return Err(RejectReason::DuplicateRequest.into());
        }
        Ok(Command::SetBudget(c))
    }

    /// Amount that a command charges to the user's budget of the day: `needed`, or zero if identity
    /// has `checked` this order.
    #[inline(always)]
    pub(crate) fn check_budget(
        &self,
        user: UserIx,
        needed: Minor,
        checked: bool,
        now_ns: u64,
    ) -> Result<Minor, Reject> {
        if checked || needed.is_zero() {
            return Ok(Minor::ZERO);
        }
        let left = self.tables.users[user.index()]
            .budget
            .left(moscow_day(now_ns));
        if needed > left {
            let details = RejectDetails::Budget { left, needed };
            return Err(Reject::with(RejectReason::LimitExceeded, details));
        }
        Ok(needed)
    }

    /// Amount that an amend adds to an order's charge. `value` and `before` are the highest values
    /// that the order may have with and without the amend. An order pays once for its highest
    /// value. An order of an earlier day pays for each growth.
    pub(crate) fn budget_growth(&self, order: &OpenOrder, value: Minor, before: Minor) -> Minor {
        let known = match self.returns_budget(order) {
            true => order.budget.charged + order.budget.free,
            false => before,
        };
        (value - known).or_zero()
    }

    /// True if an amend's charge becomes part of the order's charge. False if the order is of an
    /// earlier day: the amend's charge then never returns.
    pub(crate) fn returns_budget(&self, order: &OpenOrder) -> bool {
        self.tables.users[order.user.index()].budget.day == order.budget.day
    }

    #[inline]
    pub(crate) fn order_budget(&self, c: &New) -> OrderBudget {
        // An order without a charge was approved by identity, or has no value.
        let free = match c.budget_minor.is_zero() {
            true => {
                let terms = &self.tables.instruments[c.instrument.index()].spec.terms;
                terms.value(c.price, c.quantity).unwrap_or(Minor::MAX)
            }
            false => Minor::ZERO,
        };
        OrderBudget {
            day: self.tables.users[c.user.index()].budget.day,
            charged: c.budget_minor,
            free,
        }
    }

    #[inline]
    pub(crate) fn charge_budget(&mut self, user: UserIx, amount: Minor) {
        self.tables.users[user.index()].budget.used += amount;
    }

    /// Charges an amend. In a replay the order may have ended already: its trades are counted, and
    /// a charge that returns would return at once.
    pub(crate) fn charge_amend(&mut self, c: &Amend) {
        if c.budget_minor.is_zero() {
            return;
        }
        if !c.budget_returns {
            return self.charge_budget(c.user, c.budget_minor);
        }
        let slot = &mut self.tables.slots[c.handle.slot as usize].order;
        let order = slot.as_mut().filter(|order| order.handle == c.handle);
        if let Some(order) = order {
            order.budget.charged += c.budget_minor;
            self.charge_budget(c.user, c.budget_minor);
        }
    }

    /// Replaces the charge of an order that has ended by the value of its trades.
    #[inline]
    pub(crate) fn settle_budget(&mut self, user: UserIx, order: OrderBudget, traded: Minor) {
        let budget = &mut self.tables.users[user.index()].budget;
        if order.day == budget.day {
            budget.used += (traded - order.free).or_zero() - order.charged;
            assert!(!budget.used.is_negative(), "an order returns its charge");
        }
    }
}
