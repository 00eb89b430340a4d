//! Submission for a front that polls: a ring of requests in, a ring of reports out.
//!
//! One thread at each end. Once the rings are made nothing here allocates, locks or enters the
//! kernel, except to wake a hot thread that sleeps. The hot thread never waits for a front: reports
//! that do not fit go to a spill, and while there is one no further request is taken from that
//! front, so the spill is bounded by the reports of the requests in flight. When the hot thread
//! ends it leaves the spill, and an answer for each request that it has not taken, in a list that
//! the front reads after the ring.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use admission::{Request, SessionRequest};
use disruptor::{
    BusySpin, EventPoller, Polling, Producer, SingleConsumerBarrier, SingleProducer,
    SingleProducerBarrier, build_single_producer,
};
use types::command::{MemberGroup, RequestKind};
use types::{Id128, Sequence, SessionIx, StpGroup, UserIx};

use crate::park::Parker;
use crate::port::{Gate, SubmitError};

/// Requests taken out of a ring at once.
const INBOX: usize = 64;
/// Capacity of the spill without an allocation. Untouched memory costs address space alone.
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

/// A session that its command has opened at this front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The front's tag of the request.
    pub tag: u64,
    /// The login's epoch: requests with an earlier one are refused.
    pub epoch: Sequence,
    pub session: SessionIx,
    pub user: UserIx,
    pub stp_group: StpGroup,
    /// The member group of the user.
    pub group: MemberGroup,
    /// Client sequence of the last request seen before.
    pub client_seq: u64,
    /// Number of the last message before; later ones come as reports.
    pub last_number: u64,
    /// When its dead man's switch fires, in journalled nanoseconds; 0 = it is off.
    pub cancel_all_at_ns: u64,
}

/// A user's order messages of the day (`design.md` 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio {
    pub messages: u64,
    /// Messages that the day's trades allow.
    pub allowed: u64,
}

/// What the hot thread reports to a front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// A numbered message of a session of the front: *accepted*, not yet durable. The one with a
    /// client sequence answers the session's request.
    Numbered(Stamp, admission::Report),
    Opened(Opened),
    /// The front's request has become this command; no other report answers it.
    Submitted {
        tag: u64,
        stamp: Stamp,
    },
    /// The front's request is not in the journal.
    SubmitError {
        tag: u64,
        session: SessionIx,
        client_seq: u64,
        request: RequestKind,
        reason: SubmitError,
    },
    /// The session's user has sent most of the order messages that the day's trades allow.
    OrderToTrade(SessionIx, Ratio),
    /// Another front owns the session from this login on.
    TakenOver {
        session: SessionIx,
        epoch: Sequence,
    },
}

/// A report in the ring, in whole cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(Report);

/// Metadata that a front submits with a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submission {
    /// Returned with an answer that names no session.
    pub tag: u64,
    /// Epoch of the login that it came over; zero = any.
    pub epoch: Sequence,
    /// When the front read it, nanoseconds since 1970; zero = now.
    pub received_ns: u64,
    /// Above the session's rate: only a request that reduces risk passes, a cancel of an own open
    /// order or a mass cancel of all orders of the session or the user.
    pub is_over_rate: bool,
}

/// A request in the ring.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Place {
    asked: Submission,
    request: Request,
}

const _: () = assert!(size_of::<Line>() == 128);
const _: () = assert!(size_of::<Place>() <= 192);

/// Final reports of a hot thread that has ended. Each side locks them once, at the end.
type LastWords = Arc<Mutex<Vec<Report>>>;

/// A front's end of the rings.
pub struct RingPort {
    requests: SingleProducer<Place, SingleConsumerBarrier>,
    reports: EventPoller<Line, SingleProducerBarrier>,
    gate: Arc<Gate>,
    last_words: LastWords,
    /// Set when this end is dropped.
    is_gone: Arc<AtomicBool>,
}

/// The hot thread's end of the rings.
pub(crate) struct RingEnd {
    requests: EventPoller<Place, SingleProducerBarrier>,
    reports: SingleProducer<Line, SingleConsumerBarrier>,
    spill: VecDeque<Report>,
    /// Requests taken out of the ring together: one access to the other core's cache for all.
    inbox: Box<[Place; INBOX]>,
    /// Number of requests in `inbox`.
    inbox_count: usize,
    /// Index of the first one that is not served.
    inbox_at: usize,
    last_words: LastWords,
    /// Parker of the front.
    front: Arc<Parker>,
    /// The front is gone: its reports are dropped.
    is_gone: Arc<AtomicBool>,
    /// The front is gone and all its requests are taken.
    is_closed: bool,
}

/// Makes the rings, each with room for `capacity` (a power of two) requests or reports.
pub(crate) fn connect(gate: Arc<Gate>, front: Arc<Parker>, capacity: usize) -> (RingPort, RingEnd) {
    // No slot is read before its first use.
    let unused = SessionRequest {
        key: Id128::NONE,
        user: UserIx::NONE,
        stp_group: None,
        cancel_on_disconnect: false,
    };
    let asked = move || Place {
        asked: Submission::default(),
        request: Request::OpenSession(unused),
    };
    let report = || {
        Line(Report::TakenOver {
            session: SessionIx::NONE,
            epoch: Sequence::ZERO,
        })
    };
    let (requests_poller, builder) =
        build_single_producer(capacity, asked, BusySpin).new_event_poller();
    let requests = builder.build();
    let (reports_poller, builder) =
        build_single_producer(capacity, report, BusySpin).new_event_poller();
    let reports = builder.build();
    let is_gone = Arc::new(AtomicBool::new(false));
    let last_words = LastWords::default();
    let port = RingPort {
        requests,
        reports: reports_poller,
        gate,
        last_words: last_words.clone(),
        is_gone: is_gone.clone(),
    };
    let end = RingEnd {
        requests: requests_poller,
        reports,
        spill: VecDeque::with_capacity(SPILL_ROOM),
        inbox: Box::new([asked(); INBOX]),
        inbox_count: 0,
        inbox_at: 0,
        last_words,
        front,
        is_gone,
        is_closed: false,
    };
    (port, end)
}

impl RingPort {
    /// Submits a request; never blocks.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] when the ring is full, [`SubmitError::Stopping`],
    /// [`SubmitError::JournalFailed`]: nothing is reported for it.
    pub fn submit(&mut self, asked: Submission, request: &Request) -> Result<(), SubmitError> {
        self.gate.check()?;
        self.requests
            .try_publish(|slot| {
                slot.asked = asked;
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
    /// [`SubmitError::Stopping`]: the hot thread has ended and everything it reported has been
    /// read, whatever the size of the ring. A request without an answer by then came after its end
    /// and is not in the journal.
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
                let last_words = &mut *words(&self.last_words);
                if last_words.is_empty() {
                    return Err(SubmitError::Stopping);
                }
                std::mem::take(last_words).iter().for_each(each);
                Ok(true)
            }
        }
    }
}

fn words(shared: &LastWords) -> std::sync::MutexGuard<'_, Vec<Report>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for RingPort {
    fn drop(&mut self) {
        self.is_gone.store(true, Ordering::Release);
        self.gate.parker.unpark();
    }
}

impl RingEnd {
    /// Takes requests out of the ring, unless some are out already or reports wait for room; false
    /// when there is none to serve.
    #[inline]
    pub fn fill(&mut self) -> bool {
        if !self.flush() {
            return false;
        }
        if self.inbox_at < self.inbox_count {
            return true;
        }
        match self.requests.take(INBOX as u64) {
            Ok(mut asked) => {
                (self.inbox_at, self.inbox_count) = (0, 0);
                for (place, asked) in self.inbox.iter_mut().zip(&mut asked) {
                    // By fields: without the padding, and short enough to be copied without a call.
                    (place.asked, place.request) = (asked.asked, asked.request);
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

    /// Index of the next request that [`RingEnd::fill`] has taken out, unless reports wait for
    /// room. It is read in place.
    #[inline]
    pub fn next(&mut self) -> Option<usize> {
        if self.is_behind() {
            return None;
        }
        let at = self.inbox_at;
        if at >= self.inbox_count {
            return None;
        }
        self.inbox_at += 1;
        Some(at)
    }

    /// The request at an index of [`RingEnd::next`].
    #[inline]
    pub fn request(&self, at: usize) -> &Request {
        &self.inbox[at].request
    }

    /// The metadata of that request.
    #[inline]
    pub fn asked(&self, at: usize) -> &Submission {
        &self.inbox[at].asked
    }

    /// Reports that the request at an index of [`RingEnd::next`] is not taken.
    pub fn refuse(&mut self, at: usize, reason: SubmitError) {
        let report = not_taken(&self.inbox[at], reason);
        self.put(|| report);
    }

    /// More reports wait than a running front leaves unread.
    pub fn is_overrun(&self) -> bool {
        self.spill.len() > SPILL_ROOM / 2
    }

    /// Wakes the front if it has a thread of its own that sleeps.
    pub fn wake(&self) {
        self.front.unpark();
    }

    /// True when a request waits that [`RingEnd::next`] would return.
    pub fn has_request(&self) -> bool {
        self.spill.is_empty() && (self.inbox_at < self.inbox_count || self.requests.has_available())
    }

    /// True while reports wait for room.
    pub fn is_behind(&self) -> bool {
        !self.spill.is_empty()
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Constructs a report in the ring, or in the spill while the ring is full.
    #[inline(always)]
    pub fn put(&mut self, report: impl Fn() -> Report) {
        let is_put = self.spill.is_empty()
            && self
                .reports
                .try_publish(|slot| *slot = Line(report()))
                .is_ok();
        if !is_put {
            self.set_aside(report());
        }
    }

    #[cold]
    fn set_aside(&mut self, report: Report) {
        self.spill.push_back(report);
    }

    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Moves the spill into the ring; true when nothing waits any more.
    fn flush(&mut self) -> bool {
        while let Some(report) = self.spill.front().copied() {
            if self
                .reports
                .try_publish(|slot| *slot = Line(report))
                .is_err()
            {
                if self.is_gone() {
                    // The front is gone.
                    self.spill.clear();
                    return true;
                }
                return false;
            }
            self.spill.pop_front();
            if self.spill.is_empty() {
                // Resets the head, so that memory already touched is used again.
                self.spill.clear();
            }
        }
        true
    }
}

impl Drop for RingEnd {
    fn drop(&mut self) {
        if self.is_gone() {
            return;
        }
        let refuse = |place: &Place| not_taken(place, SubmitError::Stopping);
        let unserved = &self.inbox[self.inbox_at..self.inbox_count];
        let mut refused: Vec<Report> = unserved.iter().map(refuse).collect();
        if let Ok(mut places) = self.requests.poll() {
            refused.extend((&mut places).map(refuse));
        }
        // Before the ring of reports closes, which makes the front read this list.
        words(&self.last_words).extend(self.spill.drain(..).chain(refused));
        self.front.unpark();
    }
}

fn not_taken(place: &Place, reason: SubmitError) -> Report {
    let (session, client_seq) = place.request.client().unwrap_or((SessionIx::NONE, 0));
    Report::SubmitError {
        tag: place.asked.tag,
        session,
        client_seq,
        request: place.request.kind(),
        reason,
    }
}
