//! Mutual exclusion per key: changes of one user's money, steps of one operation.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// Number of keys above which unused ones are dropped.
const IDLE_KEYS_MAX: usize = 1_024;

/// Locks by key.
pub struct KeyedMutex<K>(Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>);

impl<K> Default for KeyedMutex<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> KeyedMutex<K> {
    /// Waits for the key's lock; it is released when the guard is dropped.
    pub async fn lock(&self, key: impl Into<K>) -> OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() >= IDLE_KEYS_MAX {
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
        for key in 1..=2 * IDLE_KEYS_MAX {
            drop(locks.lock(key).await);
        }
        assert!(locks.0.lock().unwrap().len() <= IDLE_KEYS_MAX);
        tokio::select! {
            biased;
            _ = locks.lock(0_usize) => panic!("the key is held"),
            () = std::future::ready(()) => {}
        }
        drop(held);
        drop(locks.lock(0_usize).await);
    }
}
