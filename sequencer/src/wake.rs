//! Sleeping without missing anything: a thread says that it is about to park, looks once more, parks; who brings work looks whether it sleeps.
//!
//! Between the two lies a barrier on each side. The one of who brings work would wait until his stores are seen everywhere, for each request; so where the
//! system can, the thread that parks, seldom, has it make all threads of the process pass a barrier, and who brings work pays nothing.

use std::sync::LazyLock;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence, fence};
use std::thread::Thread;
use std::time::Duration;

use rustix::thread::{MembarrierCommand, membarrier};

/// The system makes others pass a barrier.
static HAS_BARRIER: LazyLock<bool> =
    LazyLock::new(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok());

/// How long a thread sleeps that a ring may not have seen.
const UNHEARD: Duration = Duration::from_millis(1);

/// The bell of one thread.
pub(crate) struct Wake {
    is_parked: AtomicBool,
    has_barrier: bool,
    thread: OnceLock<Thread>,
}

impl Default for Wake {
    fn default() -> Self {
        Self {
            is_parked: AtomicBool::new(false),
            has_barrier: *HAS_BARRIER,
            thread: OnceLock::new(),
        }
    }
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
        let has_passed =
            !self.has_barrier || membarrier(MembarrierCommand::PrivateExpedited).is_ok();
        if !has_work() {
            // Without the barrier a ring may not see us: then only for a moment.
            std::thread::park_timeout(if has_passed {
                timeout
            } else {
                UNHEARD.min(timeout)
            });
        }
        self.is_parked.store(false, Ordering::SeqCst);
    }

    /// Wakes the thread if it sleeps. Call it behind the store that brings the work.
    #[inline]
    pub fn ring(&self) {
        if self.has_barrier {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
        if self.is_parked.load(Ordering::Relaxed)
            && self.is_parked.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}
