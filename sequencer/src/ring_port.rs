//! Submission for a front that polls: a ring of requests in, a ring of reports out.
//!
//! One thread at each end. Once the rings are made nothing here allocates, locks or enters the
//! kernel, except to wake a hot thread that sleeps. The hot thread never waits for a front. Reports
//! that do not fit in the ring go to the spill queue. While the spill is not empty, no request of
//! that front is read, so the requests in flight bound the spill. On shutdown the hot thread
//! appends the spill and a `Stopping` report per unread request to a list. The front reads the list
//! after the ring.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use admission::{Rates, Request, RequestName, SessionRequest};
use disruptor::{
    BusySpin, EventPoller, Polling, Producer, SingleConsumerBarrier, SingleProducer,
    SingleProducerBarrier, build_single_producer,
};
use types::command::MemberGroup;
use types::{Id128, Sequence, SessionIx, StpGroup, UserIx};

use crate::park::Parker;
use crate::port::{Gate, SubmitError};

/// Maximum requests copied out of a ring in one batch.
const INBOX: usize = 64;
/// Preallocated capacity of the spill queue. Pages that are never written use address space but no
/// memory.
const SPILL_ROOM: usize = 65_536;

/// Sequence and times of the command that a report is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub sequence: Sequence,
    /// Journalled nanoseconds since 1970.
    pub time_ns: u64,
    /// When the front read the request.
    pub received_ns: u64,
}

/// Report of an applied `OpenSession` that this front submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The front's tag of the request.
    pub tag: u64,
    /// The login's epoch: requests with an earlier one are refused.
    pub epoch: Sequence,
    pub session: SessionIx,
    pub user: UserIx,
    pub stp_group: StpGroup,
    /// Member group of the user.
    pub group: MemberGroup,
    /// Message rates of the user.
    pub rates: Rates,
    /// Last client sequence of the session at the time of this login.
    pub client_seq: u64,
    /// Number of the session's last message at the time of this login; later messages arrive as
    /// reports.
    pub last_number: u64,
    /// Time of the session's dead man's switch, in journalled nanoseconds; 0 = it is off.
    pub cancel_all_at_ns: u64,
}

/// A user's order messages of the day (`design.md` 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderToTrade {
    pub messages: u64,
    /// Messages that the day's trades allow.
    pub allowed: u64,
}

/// What the hot thread reports to a front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// A numbered message of a session of the front: *accepted*, not yet durable. If it has a
    /// client sequence, it is the answer to that request.
    SessionMessage(Stamp, admission::Report),
    Opened(Opened),
    /// The request was journalled as this command; no session message answers it.
    Submitted {
        tag: u64,
        stamp: Stamp,
    },
    /// The front's request is not in the journal.
    NotSubmitted {
        tag: u64,
        session: SessionIx,
        client_seq: u64,
        request: RequestName,
        /// [`Submission::received_ns`].
        received_ns: u64,
        reason: SubmitError,
    },
    /// Warning: the user has used more than 80 % of the order messages that the day's trades allow.
    OrderToTrade(SessionIx, OrderToTrade),
    /// Another front owns the session from this login on.
    TakenOver {
        session: SessionIx,
        epoch: Sequence,
    },
}

/// Ring slot of a report, aligned to cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct ReportSlot(Report);

/// Metadata that a front submits with a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submission {
    /// Opaque to the sequencer; copied into [`Opened`], [`Report::Submitted`] and
    /// [`Report::NotSubmitted`].
    pub tag: u64,
    /// Epoch of the login that sent the request; zero skips the check.
    pub epoch: Sequence,
    /// When the front read it, nanoseconds since 1970; zero = now.
    pub received_ns: u64,
    /// The session is above its message rate. Only a cancel of its own open order, or a mass cancel
    /// of the session or user, is accepted.
    pub is_over_rate: bool,
}

impl Submission {
    /// When the request of a command of `now_ns` was read, within what the journal can express.
    #[inline]
    pub(crate) fn received_ns(&self, now_ns: u64) -> u64 {
        match self.received_ns {
            0 => now_ns,
            at => at.clamp(now_ns.saturating_sub(u64::from(u32::MAX)), now_ns),
        }
    }
}

/// Ring slot of a request.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct RequestSlot {
    submission: Submission,
    request: Request,
}

const _: () = assert!(size_of::<ReportSlot>() == 128);
const _: () = assert!(size_of::<RequestSlot>() <= 192);

/// Final reports of a hot thread that has ended. Each side locks them once, at the end.
type FinalReports = Arc<Mutex<Vec<Report>>>;

/// Port of a front: it submits requests and polls reports.
pub struct RingPort {
    requests: SingleProducer<RequestSlot, SingleConsumerBarrier>,
    reports: EventPoller<ReportSlot, SingleProducerBarrier>,
    gate: Arc<Gate>,
    final_reports: FinalReports,
    /// Set when this port is dropped.
    front_dropped: Arc<AtomicBool>,
}

/// Port of the hot thread: it reads requests and puts reports.
pub(crate) struct HotRingPort {
    requests: EventPoller<RequestSlot, SingleProducerBarrier>,
    reports: SingleProducer<ReportSlot, SingleConsumerBarrier>,
    spill: VecDeque<Report>,
    /// Requests copied out of the ring in one batch, so the batch pays one cache miss.
    inbox: Box<[RequestSlot; INBOX]>,
    /// Number of requests in `inbox`.
    inbox_count: usize,
    /// Index of the first request that is not served.
    inbox_at: usize,
    final_reports: FinalReports,
    /// Parker of the front.
    front: Arc<Parker>,
    /// The front has dropped its port: its reports are dropped.
    front_dropped: Arc<AtomicBool>,
    /// The front has dropped its port and all its requests are read.
    is_closed: bool,
    /// [`HotRingPort::has_just_closed`] has returned true.
    is_end_seen: bool,
}

/// Makes the rings, each with room for `capacity` (a power of two) requests or reports.
pub(crate) fn connect(
    gate: Arc<Gate>,
    front: Arc<Parker>,
    capacity: usize,
) -> (RingPort, HotRingPort) {
    // Placeholder: a slot is written before it is read.
    let unused = SessionRequest {
        key: Id128::NONE,
        user: UserIx::NONE,
        stp_group: None,
        cancel_on_disconnect: false,
    };
    let request = move || RequestSlot {
        submission: Submission::default(),
        request: Request::OpenSession(unused),
    };
    let report = || {
        ReportSlot(Report::TakenOver {
            session: SessionIx::NONE,
            epoch: Sequence::ZERO,
        })
    };
    let (requests_poller, builder) =
        build_single_producer(capacity, request, BusySpin).new_event_poller();
    let requests = builder.build();
    let (reports_poller, builder) =
        build_single_producer(capacity, report, BusySpin).new_event_poller();
    let reports = builder.build();
    let front_dropped = Arc::new(AtomicBool::new(false));
    let final_reports = FinalReports::default();
    let port = RingPort {
        requests,
        reports: reports_poller,
        gate,
        final_reports: final_reports.clone(),
        front_dropped: front_dropped.clone(),
    };
    let hot_port = HotRingPort {
        requests: requests_poller,
        reports,
        spill: VecDeque::with_capacity(SPILL_ROOM),
        inbox: Box::new([request(); INBOX]),
        inbox_count: 0,
        inbox_at: 0,
        final_reports,
        front,
        front_dropped,
        is_closed: false,
        is_end_seen: false,
    };
    (port, hot_port)
}

impl RingPort {
    /// Submits a request; never blocks.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] if the ring is full, [`SubmitError::Stopping`],
    /// [`SubmitError::JournalFailed`]. After an error no report follows for the request.
    pub fn submit(&mut self, submission: Submission, request: &Request) -> Result<(), SubmitError> {
        self.gate.check()?;
        self.requests
            .try_publish(|slot| {
                slot.submission = submission;
                slot.request = *request;
            })
            .map_err(|_| SubmitError::Busy)?;
        self.gate.parker.unpark();
        Ok(())
    }

    /// True when [`RingPort::poll`] would pass a report.
    pub fn has_report(&self) -> bool {
        self.reports.has_available()
    }

    /// Passes the waiting reports to `each`, in order; true when there were any.
    ///
    /// # Errors
    /// [`SubmitError::Stopping`]: the hot thread has ended and all its reports have been read. A
    /// request without a report was submitted after the hot thread ended. It is not in the journal.
    pub fn poll(&mut self, mut each: impl FnMut(&Report)) -> Result<bool, SubmitError> {
        match self.reports.poll() {
            Ok(mut reports) => {
                for report in &mut reports {
                    each(&report.0);
                }
                Ok(true)
            }
            Err(Polling::NoEvents) => Ok(false),
            Err(Polling::Shutdown) => {
                let final_reports = &mut *lock_final_reports(&self.final_reports);
                if final_reports.is_empty() {
                    return Err(SubmitError::Stopping);
                }
                std::mem::take(final_reports).iter().for_each(each);
                Ok(true)
            }
        }
    }
}

fn lock_final_reports(shared: &FinalReports) -> std::sync::MutexGuard<'_, Vec<Report>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for RingPort {
    fn drop(&mut self) {
        self.front_dropped.store(true, Ordering::Release);
        self.gate.parker.unpark();
    }
}

impl HotRingPort {
    /// Copies requests from the ring to the inbox if the inbox is empty and the spill is empty.
    /// Returns whether a request is ready.
    #[inline]
    pub fn fill(&mut self) -> bool {
        if !self.flush() {
            return false;
        }
        if self.inbox_at < self.inbox_count {
            return true;
        }
        match self.requests.take(INBOX as u64) {
            Ok(mut slots) => {
                (self.inbox_at, self.inbox_count) = (0, 0);
                for (copy, slot) in self.inbox.iter_mut().zip(&mut slots) {
                    // Copied per field: skips the padding and avoids a call to memcpy.
                    (copy.submission, copy.request) = (slot.submission, slot.request);
                    self.inbox_count += 1;
                }
                true
            }
            Err(Polling::NoEvents) => false,
            Err(Polling::Shutdown) => {
                self.is_closed = true;
                false
            }
        }
    }

    /// Index in the inbox of the next request; `None` if there is none or the spill is not empty.
    /// The caller reads it with `request` and `submission`, without a copy.
    #[inline]
    pub fn next(&mut self) -> Option<usize> {
        if self.has_spill() {
            return None;
        }
        let at = self.inbox_at;
        if at >= self.inbox_count {
            return None;
        }
        self.inbox_at += 1;
        Some(at)
    }

    /// The request at an index of [`HotRingPort::next`].
    #[inline]
    pub fn request(&self, at: usize) -> &Request {
        &self.inbox[at].request
    }

    /// The metadata of that request.
    #[inline]
    pub fn submission(&self, at: usize) -> &Submission {
        &self.inbox[at].submission
    }

    /// Reports that the request at an index of [`HotRingPort::next`] was refused with `reason`.
    pub fn refuse(&mut self, at: usize, reason: SubmitError) {
        let report = submit_error_report(&self.inbox[at], reason);
        self.put(|| report);
    }

    /// True when the spill is more than half full: the front has stopped polling.
    pub fn is_overrun(&self) -> bool {
        self.spill.len() > SPILL_ROOM / 2
    }

    /// Wakes the front if it has a thread of its own that sleeps.
    pub fn wake(&self) {
        self.front.unpark();
    }

    /// True when a request waits that [`HotRingPort::next`] would return.
    pub fn has_request(&self) -> bool {
        self.spill.is_empty() && (self.inbox_at < self.inbox_count || self.requests.has_available())
    }

    /// True while the spill is not empty.
    pub fn has_spill(&self) -> bool {
        !self.spill.is_empty()
    }

    /// True when the front has dropped its port and all its requests are read.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// As [`HotRingPort::is_closed`], true once only.
    pub fn has_just_closed(&mut self) -> bool {
        self.is_closed && !std::mem::replace(&mut self.is_end_seen, true)
    }

    /// Constructs a report in the ring, or in the spill while the ring is full.
    #[inline(always)]
    pub fn put(&mut self, report: impl Fn() -> Report) {
        let is_put = self.spill.is_empty()
            && self
                .reports
                .try_publish(|slot| *slot = ReportSlot(report()))
                .is_ok();
        if !is_put {
            self.push_spill(report());
        }
    }

    #[cold]
    fn push_spill(&mut self, report: Report) {
        self.spill.push_back(report);
    }

    fn front_dropped(&self) -> bool {
        self.front_dropped.load(Ordering::Acquire)
    }

    /// Moves the spill into the ring; true if the spill is empty afterwards.
    fn flush(&mut self) -> bool {
        while let Some(report) = self.spill.front().copied() {
            if self
                .reports
                .try_publish(|slot| *slot = ReportSlot(report))
                .is_err()
            {
                if self.front_dropped() {
                    self.spill.clear();
                    return true;
                }
                return false;
            }
            self.spill.pop_front();
            if self.spill.is_empty() {
                // `clear` resets the head of the deque, so the next spill reuses pages that are
                // already resident.
                self.spill.clear();
            }
        }
        true
    }
}

impl Drop for HotRingPort {
    fn drop(&mut self) {
        if self.front_dropped() {
            return;
        }
        let refuse = |slot: &RequestSlot| submit_error_report(slot, SubmitError::Stopping);
        let unserved = &self.inbox[self.inbox_at..self.inbox_count];
        let mut refused: Vec<Report> = unserved.iter().map(refuse).collect();
        if let Ok(mut slots) = self.requests.poll() {
            refused.extend((&mut slots).map(refuse));
        }
        // Must precede the drop of `reports`: its shutdown makes the front read this list.
        lock_final_reports(&self.final_reports).extend(self.spill.drain(..).chain(refused));
        self.front.unpark();
    }
}

fn submit_error_report(slot: &RequestSlot, reason: SubmitError) -> Report {
    let (session, client_seq) = slot.request.client().unwrap_or((SessionIx::NONE, 0));
    Report::NotSubmitted {
        tag: slot.submission.tag,
        session,
        client_seq,
        request: slot.request.name(),
        received_ns: slot.submission.received_ns,
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn rings(capacity: usize) -> (RingPort, HotRingPort) {
        let gate = Gate::new(&Config::new(std::path::Path::new("unused")));
        connect(Arc::new(gate), Arc::default(), capacity)
    }

    fn submit(front: &mut RingPort, tag: u64) {
        let submission = Submission {
            tag,
            ..Submission::default()
        };
        let request = Request::ForgetSession {
            session: SessionIx(0),
            epoch: Sequence::ZERO,
        };
        front.submit(submission, &request).expect("room");
    }

    fn put(hot: &mut HotRingPort, tags: std::ops::RangeInclusive<u64>) {
        for tag in tags {
            let stamp = Stamp {
                sequence: Sequence(tag),
                time_ns: 0,
                received_ns: 0,
            };
            hot.put(|| Report::Submitted { tag, stamp });
        }
    }

    /// Tags of the published reports.
    fn read(front: &mut RingPort) -> Vec<u64> {
        let mut tags = Vec::new();
        let polled = front.poll(|report| match report {
            Report::Submitted { tag, .. } | Report::NotSubmitted { tag, .. } => tags.push(*tag),
            other => panic!("{other:?}"),
        });
        polled.map_or_else(|_| vec![u64::MAX], |_| tags)
    }

    #[test]
    fn a_refusal_reports_when_the_front_read_the_request() {
        let (mut front, mut hot) = rings(16);
        let submission = Submission {
            received_ns: 42,
            ..Submission::default()
        };
        let request = Request::ForgetSession {
            session: SessionIx(0),
            epoch: Sequence::ZERO,
        };
        front.submit(submission, &request).expect("room");
        assert!(hot.fill());
        let at = hot.next().expect("a request");
        hot.refuse(at, SubmitError::Busy);
        let mut read_at = Vec::new();
        let polled = front.poll(|report| match report {
            Report::NotSubmitted { received_ns, .. } => read_at.push(*received_ns),
            other => panic!("{other:?}"),
        });
        assert_eq!((polled, read_at), (Ok(true), vec![42]));
    }

    #[test]
    fn a_front_that_does_not_read_gets_all_reports_later_and_none_of_its_requests_served() {
        let (mut front, mut hot) = rings(16);
        put(&mut hot, 1..=40);
        submit(&mut front, 7);
        assert!(hot.has_spill() && !hot.fill() && !hot.has_request());
        assert_eq!(read(&mut front), Vec::from_iter(1..=16));
        assert!(!hot.fill(), "the ring is full again");
        assert_eq!(read(&mut front), Vec::from_iter(17..=32));
        put(&mut hot, 41..=41);
        assert!(hot.fill() && !hot.has_spill() && hot.has_request());
        assert_eq!(read(&mut front), Vec::from_iter(33..=41));
    }

    #[test]
    fn the_reports_of_a_front_that_is_gone_are_dropped() {
        let (front, mut hot) = rings(16);
        put(&mut hot, 1..=40);
        drop(front);
        assert!(hot.has_spill() && !hot.fill());
        assert!(!hot.has_spill() && !hot.has_request());
    }

    #[test]
    fn at_the_end_the_spill_follows_the_ring_and_unserved_requests_are_refused() {
        let (mut front, mut hot) = rings(16);
        put(&mut hot, 1..=20);
        (21..=22).for_each(|tag| submit(&mut front, tag));
        drop(hot);
        assert_eq!(read(&mut front), Vec::from_iter(1..=16));
        assert_eq!(read(&mut front), Vec::from_iter(17..=22));
        assert_eq!(read(&mut front), [u64::MAX]);
    }
}
