//! Parking without lost wake-ups, for a thread that also waits for file descriptors.
//!
//! A thread says that it is about to park, looks once more, and sleeps in `poll(2)`; who brings work
//! stores it and then looks whether the thread sleeps. Each side needs a barrier in between. The
//! thread that parks, which is seldom, issues membarrier(2) for all threads of the process, so that
//! bringing work costs a compiler fence and one load.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::thread::{MembarrierCommand, membarrier};

/// The system can make the other threads of the process pass a barrier.
static HAS_BARRIER: LazyLock<bool> =
    LazyLock::new(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok());

/// Longest sleep of a thread that a wake-up may miss.
const UNSURE_MAX: Duration = Duration::from_millis(1);

/// Where one thread sleeps. Others wake it with [`Parker::unpark`].
pub struct Parker {
    is_parked: AtomicBool,
    has_barrier: bool,
    /// Readable after a wake-up. `None` where the process had no descriptor left: then no sleep is
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
    /// Sleeps for at most `timeout`, or until a descriptor of `fds` is readable, unless `has_work`
    /// says otherwise once the sleep is announced. One thread at a time.
    pub fn park(&self, timeout: Duration, fds: &[BorrowedFd<'_>], has_work: impl FnOnce() -> bool) {
        self.is_parked.store(true, Ordering::SeqCst);
        // Pairs with the fence in `unpark`: either the work is seen here, or its bringer sees us parked.
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
        // The event's descriptor stands in where one is missing: polled twice, it does no harm.
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
        // Interrupted or not: the caller looks again.
        let _ = poll(&mut list, Some(&timeout));
        if let Some(event) = &self.event {
            let mut count = [0; 8];
            let _ = rustix::io::read(event, &mut count);
        }
    }

    /// Wakes the thread if it sleeps. Call it after the store that brings the work.
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
