//! Lower bound of a user's remaining daily budget, which admission counts down.
//!
//! Every order is subtracted when it is sent, refused ones included, so the figure never exceeds
//! admission's. An order above it is not refused here: the budget is read again once, then identity
//! checks that very order (`design.md` 3).

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use types::{Minor, UserIx};

pub struct Budget {
    left_minor: AtomicI64,
    /// Moscow day of the figure; 0 = must be read again.
    day: AtomicU32,
    /// The limit that the last figure derives from, [`UNKNOWN`] before the first.
    limit_minor: AtomicI64,
}

/// No limit has been read yet.
const UNKNOWN: i64 = -1;

impl Default for Budget {
    fn default() -> Self {
        Self {
            left_minor: AtomicI64::new(0),
            day: AtomicU32::new(0),
            limit_minor: AtomicI64::new(UNKNOWN),
        }
    }
}

impl Budget {
    /// Subtracts an order. False, and nothing subtracted, when the budget does not cover it.
    pub fn take(&self, needed: Minor, day: u32) -> bool {
        if self.day.load(Ordering::Acquire) != day {
            return false;
        }
        let take = |left: i64| (left >= needed.0).then(|| left - needed.0);
        self.left_minor
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
            .is_ok()
    }

    /// True when the figure is of another day or was dropped.
    pub fn is_stale(&self, day: u32) -> bool {
        self.day.load(Ordering::Acquire) != day
    }

    pub fn set(&self, left: Minor, day: u32) {
        self.left_minor.store(left.0, Ordering::Release);
        self.day.store(day, Ordering::Release);
    }

    /// How much a limit just read exceeds the previous one. Only one of several readers gets a
    /// raise.
    pub fn raised(&self, limit: Minor) -> Minor {
        match self.limit_minor.swap(limit.0, Ordering::AcqRel) {
            UNKNOWN => Minor::ZERO,
            before => Minor(limit.0.saturating_sub(before).max(0)),
        }
    }

    /// The raise was not journalled: the next reader gets it again. A raise measured against it
    /// meanwhile keeps its figure, so nothing is counted twice.
    pub fn not_raised(&self, raise: Minor) {
        let lower = |limit: i64| (limit != UNKNOWN).then(|| limit - raise.0);
        let _ = self
            .limit_minor
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, lower);
    }

    pub fn drop_figure(&self) {
        self.day.store(0, Ordering::Release);
    }
}

/// Budgets of the users who trade here.
#[derive(Default)]
pub struct Budgets(Mutex<HashMap<UserIx, Arc<Budget>>>);

impl Budgets {
    pub fn of(&self, user: UserIx) -> Arc<Budget> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(user)
            .or_default()
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_of_one_day_and_never_overdrawn() {
        let budget = Budget::default();
        assert!(budget.is_stale(7) && !budget.take(Minor(1), 7));
        budget.set(Minor(100), 7);
        assert!(budget.take(Minor(60), 7));
        assert!(!budget.take(Minor(41), 7), "one kopeck above the budget");
        assert!(budget.take(Minor(40), 7));
        assert!(!budget.take(Minor(1), 8), "yesterday's budget is void");
        budget.set(Minor(100), 8);
        budget.drop_figure();
        assert!(budget.is_stale(8));
        let raises = [100, 100, 150, 120].map(|limit| budget.raised(Minor(limit)).0);
        assert_eq!(raises, [0, 0, 50, 0]);
        // A raise that was not journalled is kept, also if the limit was read again meanwhile.
        let raise = budget.raised(Minor(200));
        let later = budget.raised(Minor(250));
        assert_eq!((raise, later), (Minor(80), Minor(50)));
        budget.not_raised(raise);
        assert_eq!(budget.raised(Minor(250)), raise);
        assert_eq!(budget.raised(Minor(250)), Minor::ZERO);
    }
}
