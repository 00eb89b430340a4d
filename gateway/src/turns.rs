//! One at a time per key: the changes of one user's money, the comings and goings of one session.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// Keys past which those that nobody waits for are dropped.
const IDLE_KEYS_MAX: usize = 1_024;

/// Locks by key.
pub struct Turns<K>(Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>);

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> Turns<K> {
    /// Waits for the key's turn; it ends when the guard is dropped.
    pub async fn take(&self, key: K) -> OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() >= IDLE_KEYS_MAX {
                all.retain(|_, lock| Arc::strong_count(lock) > 1);
            }
            all.entry(key).or_default().clone()
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_has_one_turn_at_a_time_and_idle_keys_go() {
        let turns = Turns::default();
        let held = turns.take(0).await;
        for key in 1..=2 * IDLE_KEYS_MAX {
            drop(turns.take(key).await);
        }
        assert!(turns.0.lock().unwrap().len() <= IDLE_KEYS_MAX);
        tokio::select! {
            biased;
            _ = turns.take(0) => panic!("the key is taken"),
            () = std::future::ready(()) => {}
        }
        drop(held);
        drop(turns.take(0).await);
    }
}
