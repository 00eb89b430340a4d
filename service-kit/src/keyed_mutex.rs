//! Async mutual exclusion per key, for example per user, operation or consumer group.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// At this number of keys [`KeyedMutex::lock`] drops the keys without a holder or waiter.
const PURGE_AT_KEYS: usize = 1_024;

/// One mutex per key, created on first use.
pub struct KeyedMutex<K>(Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>);

impl<K> Default for KeyedMutex<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> KeyedMutex<K> {
    /// Waits for the key's lock. Dropping the guard releases it.
    pub async fn lock(&self, key: impl Into<K>) -> OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() >= PURGE_AT_KEYS {
                all.retain(|_, lock| Arc::strong_count(lock) > 1);
            }
            all.entry(key.into()).or_default().clone()
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_has_one_holder_and_idle_keys_are_dropped() {
        let locks = KeyedMutex::<usize>::default();
        let held = locks.lock(0_usize).await;
        for key in 1..=2 * PURGE_AT_KEYS {
            drop(locks.lock(key).await);
        }
        assert!(locks.0.lock().unwrap().len() <= PURGE_AT_KEYS);
        tokio::select! {
            biased;
            _ = locks.lock(0_usize) => panic!("the key is held"),
            () = std::future::ready(()) => {}
        }
        drop(held);
        drop(locks.lock(0_usize).await);
    }
}
