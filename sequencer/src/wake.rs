//! Sleeping without missing anything: a thread says that it is about to park, looks once more, parks; who brings work looks whether it sleeps.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::Thread;
use std::time::Duration;

/// The bell of one thread.
#[derive(Default)]
pub(crate) struct Wake {
    is_parked: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Wake {
    /// Called once by the thread that will park.
    pub fn adopt(&self) {
        self.thread.get_or_init(std::thread::current);
    }

    /// Parks for at most `timeout`, unless `has_work` says otherwise after the bell is armed.
    pub fn park(&self, timeout: Duration, has_work: impl FnOnce() -> bool) {
        self.is_parked.store(true, Ordering::SeqCst);
        // Pairs with the fence in `ring`: either we see the work, or its bringer sees us parked.
        fence(Ordering::SeqCst);
        if !has_work() {
            std::thread::park_timeout(timeout);
        }
        self.is_parked.store(false, Ordering::SeqCst);
    }

    /// Wakes the thread if it sleeps. Call it behind the store that brings the work; costs a fence while the thread is awake.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.is_parked.load(Ordering::Relaxed)
            && self.is_parked.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}
