//! The front's estimate of each user's remaining daily budget, and whether the user's KYC level
//! allows orders. Admission keeps the authoritative count of the budget.
//!
//! The front subtracts each order of a session before it submits the order. What admission charges
//! for an RPC call is subtracted once the call is admitted. The estimate ignores amends of
//! sessions, and budget that ended orders return. An order above the estimate is therefore not
//! refused: the estimate is read again from the replica, and if it is still too low, identity
//! checks the order (`design.md` 3). If admission refuses an order that the estimate covered, the
//! next order reads the estimate again.
//!
//! The KYC level is read with the limit and after each event of identity about the user. Sessions
//! stay open while it is too low: the front refuses their new orders and amends (R146).

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use types::{Minor, UserIx};

use crate::market::Market;

/// Pause between two rounds of [`run`]. Several events of a user within a pause cost one read.
const PAUSE: Duration = Duration::from_millis(250);
/// Time between two looks whether a Moscow day has begun.
const DAY_LOOK: Duration = Duration::from_secs(1);
/// Time from the start of a day to the reads of its limits. A clock of identity that is as much
/// behind still answers with what was used on the day before.
const DAY_SETTLED_NS: u64 = 5_000_000_000;
/// Maximum users that [`run`] reads concurrently: identity may be slow about some of them.
const READS_MAX: usize = 8;

/// Estimate and KYC level of one user.
#[derive(Default)]
pub struct Budget {
    /// In kopecks.
    left_minor: AtomicI64,
    /// Moscow day of the estimate; 0 = must be read again.
    day: AtomicU32,
    /// Number of invalidations.
    version: AtomicU32,
    /// The user's KYC level is below STANDARD.
    is_kyc_too_low: AtomicBool,
}

impl Budget {
    /// Subtracts an order's value. Returns false and subtracts nothing if the estimate does not
    /// cover it.
    pub fn try_spend(&self, needed: Minor, day: u32) -> bool {
        if self.day.load(Ordering::Acquire) != day {
            return false;
        }
        let spend = |left: i64| (left >= needed.0).then(|| left - needed.0);
        self.left_minor
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, spend)
            .is_ok()
    }

    /// Subtracts what admission has charged for an RPC call. Zero is the lowest estimate.
    pub fn charge(&self, charged: Minor) {
        let charge = |left: i64| Some(left.saturating_sub(charged.0).max(0));
        let before = self
            .left_minor
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, charge);
        before.expect("any estimate can be charged");
    }

    /// True when the estimate is of another day or was invalidated.
    pub fn is_stale(&self, day: u32) -> bool {
        self.day.load(Ordering::Acquire) != day
    }

    /// The version to pass to [`Budget::set`]. Get it before you read the budget.
    pub fn version(&self) -> u32 {
        self.version.load(Ordering::SeqCst)
    }

    /// Sets a budget that was read after [`Budget::version`] returned `version`. If the estimate
    /// was invalidated since, it stays invalid.
    pub fn set(&self, left: Minor, day: u32, version: u32) {
        self.left_minor.store(left.0, Ordering::Release);
        self.day.store(day, Ordering::SeqCst);
        if self.version() != version {
            self.day.store(0, Ordering::SeqCst);
        }
    }

    /// Sets the estimate to zero, so that the next order reads it again. Call it when admission has
    /// refused an order that the estimate covered: amends, or calls at the same moment, have used
    /// the budget.
    pub fn exhaust(&self) {
        self.left_minor.store(0, Ordering::Release);
    }

    /// Marks the estimate as unknown. The next order reads it again.
    pub fn invalidate(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.day.store(0, Ordering::SeqCst);
    }

    /// True if the user's KYC level, as last read, is too low for new orders and amends.
    pub fn is_kyc_too_low(&self) -> bool {
        self.is_kyc_too_low.load(Ordering::Acquire)
    }

    /// Stores whether the KYC level is too low. Returns true if that is a change.
    pub fn set_kyc_too_low(&self, is_too_low: bool) -> bool {
        self.is_kyc_too_low.swap(is_too_low, Ordering::AcqRel) != is_too_low
    }
}

/// Budget estimates of all users.
#[derive(Default)]
pub struct Budgets {
    estimates: Mutex<HashMap<UserIx, Arc<Budget>>>,
    /// Users to be read by [`run`].
    changed: Mutex<Changed>,
    has_changed: Notify,
}

impl Budgets {
    pub fn of_user(&self, user: UserIx) -> Arc<Budget> {
        lock(&self.estimates).entry(user).or_default().clone()
    }

    /// Makes [`run`] read a user's KYC level and limit. The event consumer does not wait for the
    /// read: identity may be unavailable, and the next event may block a user.
    pub fn queue_refresh(&self, user: UserIx) {
        lock(&self.changed).waiting.insert(user);
        self.has_changed.notify_one();
    }

    /// True while a session of the user is open: it shares the estimate.
    pub fn is_in_session(&self, user: UserIx) -> bool {
        lock(&self.estimates).get(&user).is_some_and(is_shared)
    }

    /// Makes [`run`] read the users with open sessions. Admission has no budget of a new day, and a
    /// session's first request of it may be an amend, which reads none.
    fn queue_sessions(&self) {
        let estimates = lock(&self.estimates);
        let in_session = estimates.iter().filter(|(_, budget)| is_shared(budget));
        let users = in_session.map(|(user, _)| *user);
        lock(&self.changed).waiting.extend(users);
    }

    /// Moves the users that wait, except those whose read has not ended, to those being read.
    fn take_changed(&self) -> Vec<UserIx> {
        let changed = &mut *lock(&self.changed);
        let users: Vec<_> = changed
            .waiting
            .difference(&changed.reading)
            .copied()
            .collect();
        for user in &users {
            changed.waiting.remove(user);
            changed.reading.insert(*user);
        }
        users
    }

    fn end_read(&self, user: UserIx) {
        let mut changed = lock(&self.changed);
        changed.reading.remove(&user);
        if changed.waiting.contains(&user) {
            self.has_changed.notify_one();
        }
    }
}

fn is_shared(budget: &Arc<Budget>) -> bool {
    Arc::strong_count(budget) > 1
}

/// Users to be read.
#[derive(Default)]
struct Changed {
    waiting: BTreeSet<UserIx>,
    reading: BTreeSet<UserIx>,
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads KYC level and limit of the users that changed in identity, and at the start of a Moscow
/// day of those with open sessions, until shutdown. Retries failed reads.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let budgets = &market.budgets;
    let mut reads = JoinSet::<Option<(UserIx, Status)>>::new();
    let reading = async {
        let settled_day = || market.day_before(DAY_SETTLED_NS);
        let mut day = settled_day();
        loop {
            let changed = budgets.has_changed.notified();
            let _ = tokio::time::timeout(DAY_LOOK, changed).await;
            if day != settled_day() {
                day = settled_day();
                budgets.queue_sessions();
            }
            // Every user is read before a failed read is retried, and by one read at a time, so
            // that none delays the others.
            let users = budgets.take_changed();
            let mut failed = None;
            for user in users {
                if reads.len() >= READS_MAX
                    && let Some(ended) = reads.join_next().await
                {
                    failed = ended.expect("a read does not panic").or(failed);
                }
                reads.spawn(refresh(market.clone(), user));
            }
            // The round does not wait for its last reads.
            while let Some(ended) = reads.try_join_next() {
                failed = ended.expect("a read does not panic").or(failed);
            }
            if let Some((user, status)) = failed {
                tracing::warn!(%status, user = user.0, "KYC level or limit of a user not read from identity: retrying");
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = reading => {}
        () = shutdown.cancelled() => {}
    }
}

/// Reads a user. Returns the error of a read that is queued again.
async fn refresh(market: Arc<Market>, user: UserIx) -> Option<(UserIx, Status)> {
    let read = market.refresh_user(user).await;
    market.budgets.end_read(user);
    match read {
        // A retry cannot help a user who is unknown to identity.
        Err(status) if status.code() != Code::NotFound => {
            market.budgets.queue_refresh(user);
            Some((user, status))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_of_one_day_and_never_overdrawn() {
        let budget = Budget::default();
        assert!(budget.is_stale(7) && !budget.try_spend(Minor(1), 7));
        budget.set(Minor(100), 7, budget.version());
        assert!(budget.try_spend(Minor(60), 7));
        assert!(
            !budget.try_spend(Minor(41), 7),
            "one kopeck above the budget"
        );
        assert!(budget.try_spend(Minor(40), 7));
        assert!(!budget.try_spend(Minor(1), 8), "yesterday's budget is void");
        budget.set(Minor(100), 7, budget.version());
        budget.charge(Minor(99));
        assert!(!budget.try_spend(Minor(2), 7), "a call was charged");
        budget.charge(Minor(99));
        assert!(budget.try_spend(Minor(0), 7) && !budget.try_spend(Minor(1), 7));
        budget.set(Minor(100), 8, budget.version());
        budget.exhaust();
        assert!(!budget.is_stale(8) && !budget.try_spend(Minor(1), 8));
        // Invalidated while it was read.
        let version = budget.version();
        budget.invalidate();
        budget.set(Minor(100), 8, version);
        assert!(budget.is_stale(8));
    }

    // rows: R146
    #[test]
    fn r146_a_kyc_level_that_is_too_low_stays_so_until_it_is_read_again() {
        let budget = Budget::default();
        assert!(!budget.is_kyc_too_low(), "a login has checked the level");
        assert!(budget.set_kyc_too_low(true) && !budget.set_kyc_too_low(true));
        budget.invalidate();
        budget.set(Minor(100), 7, budget.version());
        assert!(budget.is_kyc_too_low(), "the budget does not change it");
        assert!(budget.set_kyc_too_low(false) && !budget.is_kyc_too_low());
    }
}
