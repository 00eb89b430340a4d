//! Parking without lost wake-ups, for a thread that also waits for file descriptors.
//!
//! The consumer announces that it parks, checks for work once more, and sleeps in `poll(2)`. The
//! producer stores work and then checks whether the consumer sleeps. Each side needs a barrier
//! between its two steps. The consumer, which parks rarely, issues membarrier(2) for all threads of
//! the process, so that the producer needs only a compiler fence and one load.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::thread::{MembarrierCommand, membarrier};

/// True when membarrier(2) can issue a barrier on the other threads of the process.
static HAS_BARRIER: LazyLock<bool> =
    LazyLock::new(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok());

/// Longest sleep without a barrier or an event descriptor, when a wake-up may be missed.
const UNSURE_MAX: Duration = Duration::from_millis(1);

/// Parking place of one thread. Others wake it with [`Parker::unpark`].
pub struct Parker {
    is_parked: AtomicBool,
    has_barrier: bool,
    /// Readable after a wake-up. `None` if the process had no descriptor left: no sleep is then
    /// longer than [`UNSURE_MAX`].
    event: Option<OwnedFd>,
}

impl Default for Parker {
    fn default() -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Self {
            is_parked: AtomicBool::new(false),
            has_barrier: *HAS_BARRIER,
            event: eventfd(0, flags).ok(),
        }
    }
}

impl Parker {
    /// Sleeps for at most `timeout`, or until a descriptor of `fds` is readable. Returns at once
    /// when `has_work` is true after the sleep is announced. One thread at a time.
    pub fn park(&self, timeout: Duration, fds: &[BorrowedFd<'_>], has_work: impl FnOnce() -> bool) {
        self.is_parked.store(true, Ordering::SeqCst);
        // Pairs with the fence in `unpark`: this thread sees the work, or the producer sees that
        // this thread is parked.
        fence(Ordering::SeqCst);
        let is_sure = self.event.is_some()
            && (!self.has_barrier || membarrier(MembarrierCommand::PrivateExpedited).is_ok());
        if !has_work() {
            let timeout = match is_sure {
                true => timeout,
                false => timeout.min(UNSURE_MAX),
            };
            self.sleep(timeout, fds);
        }
        self.is_parked.store(false, Ordering::SeqCst);
    }

    fn sleep(&self, timeout: Duration, fds: &[BorrowedFd<'_>]) {
        // With one descriptor it is polled twice, which does no harm.
        let event = self.event.as_ref().map(AsFd::as_fd);
        let mut all = event.into_iter().chain(fds.iter().copied());
        let Some(first) = all.next() else {
            std::thread::sleep(timeout);
            return;
        };
        let second = all.next().unwrap_or(first);
        assert!(all.next().is_none(), "a thread waits for one socket");
        let mut list = [first, second].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // Also after an interrupt the caller checks for work.
        let _ = poll(&mut list, Some(&timeout));
        if let Some(event) = &self.event {
            let mut count = [0; 8];
            let _ = rustix::io::read(event, &mut count);
        }
    }

    /// Wakes the thread if it sleeps. The caller must have stored the work before.
    #[inline]
    pub fn unpark(&self) {
        if self.has_barrier {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
        if self.is_parked.load(Ordering::Relaxed) && self.is_parked.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if let Some(event) = &self.event {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }
}
