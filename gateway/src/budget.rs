//! What is left of a user's daily budget, as the front knows it; the count itself is admission's.
//!
//! Every order of a session is subtracted when it is sent; nothing returns here, and amends and
//! calls are not seen. An order above the figure is not refused: the figure is read again from the
//! replica, which has what ended orders have returned, and then identity checks that very order
//! (`design.md` 3). Once admission refuses an order that the figure covered, the next one reads it
//! again.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use types::{Minor, UserIx};

use crate::market::Market;

/// Pause between two rounds. Events of one user within it cost one read.
const PAUSE: Duration = Duration::from_millis(250);

#[derive(Default)]
pub struct Budget {
    left_minor: AtomicI64,
    /// Moscow day of the figure; 0 = must be read again.
    day: AtomicU32,
    /// How often the figure was dropped.
    drops: AtomicU32,
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

    /// A mark for [`Budget::set`], taken before the figure is read.
    pub fn mark(&self) -> u32 {
        self.drops.load(Ordering::SeqCst)
    }

    /// Sets a figure that was read after `mark`. One that was dropped meanwhile stays dropped.
    pub fn set(&self, left: Minor, day: u32, mark: u32) {
        self.left_minor.store(left.0, Ordering::Release);
        self.day.store(day, Ordering::SeqCst);
        if self.mark() != mark {
            self.day.store(0, Ordering::SeqCst);
        }
    }

    /// Admission has refused an order that this figure covered: amends, calls and other sessions
    /// have used it. The next order reads it again.
    pub fn use_up(&self) {
        self.left_minor.store(0, Ordering::Release);
    }

    pub fn drop_figure(&self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
        self.day.store(0, Ordering::SeqCst);
    }
}

/// Budgets of the users who trade here.
#[derive(Default)]
pub struct Budgets {
    figures: Mutex<HashMap<UserIx, Arc<Budget>>>,
    /// Users whose limit identity has changed.
    changed: Mutex<BTreeSet<UserIx>>,
    has_changed: Notify,
}

impl Budgets {
    pub fn of(&self, user: UserIx) -> Arc<Budget> {
        lock(&self.figures).entry(user).or_default().clone()
    }

    /// Asks [`run`] to read a user's limit. Events do not wait for it: the next one may block a
    /// user, and identity may be away.
    pub fn reset(&self, user: UserIx) {
        lock(&self.changed).insert(user);
        self.has_changed.notify_one();
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads limits that identity has changed, until shutdown. A read that fails is repeated.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let budgets = &market.budgets;
    let reading = async {
        loop {
            budgets.has_changed.notified().await;
            // All of them before the first is repeated: one that fails delays no other.
            let users = std::mem::take(&mut *lock(&budgets.changed));
            let mut failed = None;
            for user in users {
                match market.reset_budget(user).await {
                    // Unknown to identity: there is nothing to repeat.
                    Err(status) if status.code() != Code::NotFound => {
                        budgets.reset(user);
                        failed = Some((user, status));
                    }
                    _ => {}
                }
            }
            if let Some((user, status)) = failed {
                tracing::warn!(%status, user = user.0, "limit not read: the next attempt follows");
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = reading => {}
        () = shutdown.cancelled() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_of_one_day_and_never_overdrawn() {
        let budget = Budget::default();
        assert!(budget.is_stale(7) && !budget.take(Minor(1), 7));
        budget.set(Minor(100), 7, budget.mark());
        assert!(budget.take(Minor(60), 7));
        assert!(!budget.take(Minor(41), 7), "one kopeck above the budget");
        assert!(budget.take(Minor(40), 7));
        assert!(!budget.take(Minor(1), 8), "yesterday's budget is void");
        budget.set(Minor(100), 8, budget.mark());
        budget.use_up();
        assert!(!budget.is_stale(8) && !budget.take(Minor(1), 8));
        // Dropped while it was read.
        let mark = budget.mark();
        budget.drop_figure();
        budget.set(Minor(100), 8, mark);
        assert!(budget.is_stale(8));
    }
}
