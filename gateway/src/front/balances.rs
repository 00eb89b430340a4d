//! Ledger balances for the sessions of their user: unnumbered, the latest value only. The ledger's events
//! are merged per sub-account before they reach the front, and again while a client reads slowly.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use types::{AssetIx, Minor, UserIx};
use wire::LedgerBalance;

use super::desk::Order;
use super::session::At;
use super::{Front, RESUME_BYTES, connection};
use crate::market::Market;

/// Pause between two rounds of balances: settlement changes those of a busy user thousands of times a second.
const PACE: Duration = Duration::from_millis(100);
/// Balances in one order to the front.
const AT_ONCE: usize = 256;

/// What has changed since the last round. Bounded by what the ledger changes within [`PACE`], at most one per
/// sub-account.
#[derive(Default)]
pub struct Balances {
    changed: Mutex<HashMap<(UserIx, AssetIx), LedgerBalance>>,
    has_changed: Notify,
}

impl Balances {
    /// Replaces the balance of a sub-account, in minor units of the asset, as of `time_ns` since 1970.
    /// Call it in the order of the ledger's events.
    pub fn note(&self, user: UserIx, asset: AssetIx, balance: Minor, time_ns: u64) {
        let balance = LedgerBalance {
            asset: asset.get(),
            balance_minor: balance.0,
            time_ns,
        };
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.insert((user, asset), balance);
        drop(changed);
        self.has_changed.notify_one();
    }

    fn take(&self) -> Vec<(UserIx, LedgerBalance)> {
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = changed.drain();
        taken.map(|((user, _), balance)| (user, balance)).collect()
    }
}

/// Hands changed balances to the front until shutdown.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let hand_on = async {
        loop {
            market.balances.has_changed.notified().await;
            for some in market.balances.take().chunks(AT_ONCE) {
                market.orders.give(Order::Balances(some.to_vec())).await;
            }
            tokio::time::sleep(PACE).await;
        }
    };
    shutdown.run_until_cancelled(hand_on).await;
}

impl Front {
    /// Keeps balances for the connected sessions of their users, each in place of the one before.
    pub(super) fn take_balances(&mut self, now: Instant, balances: Vec<(UserIx, LedgerBalance)>) {
        let state = &mut self.state;
        for (user, balance) in balances {
            let sessions = state.sessions.users.get(&user);
            for at in sessions.map_or_else(Vec::new, |user| user.sessions.clone()) {
                let session = state.sessions.row(at);
                if session.owner.is_none() {
                    continue;
                }
                if session.balances.is_empty() {
                    state.with_balances.push(at);
                }
                session.balances.insert(balance.asset, balance);
            }
        }
        self.send_balances(now);
    }

    /// Sends what clients have room for; true when a session is done.
    pub(super) fn send_balances(&mut self, now: Instant) -> bool {
        let mut sessions = std::mem::take(&mut self.state.with_balances);
        let before = sessions.len();
        sessions.retain(|at| !self.send_balances_of(now, *at));
        let did_work = sessions.len() < before;
        self.state.with_balances = sessions;
        did_work
    }

    /// False while the client has no room.
    fn send_balances_of(&mut self, now: Instant, at: At) -> bool {
        let session = self.state.sessions.row(at);
        let Some(owner) = session.owner else {
            return true;
        };
        let Some(link) = self.endpoint.link(owner.connection) else {
            return true;
        };
        if link.waiting_bytes() >= RESUME_BYTES {
            return false;
        }
        for balance in std::mem::take(&mut session.balances).into_values() {
            connection::send(link, now, owner.channel, &balance.into());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_sub_account_the_last_balance_is_handed_on_once() {
        let balances = Balances::default();
        let (ann, bob) = (UserIx(1), UserIx(2));
        for minor in 1..=1_000_i64 {
            let at = minor.unsigned_abs();
            balances.note(ann, AssetIx::MONEY, Minor(minor), at);
            balances.note(bob, AssetIx::MONEY, Minor(-minor), at);
        }
        let mut taken = balances.take();
        taken.sort_by_key(|(user, _)| *user);
        let of = |balance_minor| LedgerBalance {
            asset: 0,
            balance_minor,
            time_ns: 1_000,
        };
        assert_eq!(taken, [(ann, of(1_000)), (bob, of(-1_000))]);
        assert!(balances.take().is_empty());
    }
}
