//! The way into the hot thread for a front that polls: a ring of requests in, a ring of reports out, one hand
//! at each end.
//!
//! Once the rings are made nothing here allocates, locks or enters the kernel, but for the bell of a hot thread
//! that sleeps. The hot thread never waits for a front: reports that do not fit wait in a spill, and while
//! there is one no further request is taken from that front, so the spill is bounded by the reports of the
//! requests under way. When the hot thread ends it leaves the spill, and an answer for each request that it has
//! not taken, as its last words: a list that the front reads behind the ring.

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
use crate::port::{Gate, NotTaken};

/// Requests taken out of a ring at once.
const INBOX: usize = 64;
/// Reports put aside without a further allocation. What is not touched costs address space alone.
const SPILL_ROOM: usize = 65_536;

/// Place and times of the command behind a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub sequence: Sequence,
    /// Journalled nanoseconds since 1970.
    pub time_ns: u64,
    /// When the front read the request.
    pub received_ns: u64,
}

/// A session that is open from its command on, at this front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The front's own name for the request.
    pub tag: u64,
    /// The login's epoch: requests that name an earlier one are refused.
    pub epoch: Sequence,
    pub session: SessionIx,
    pub user: UserIx,
    pub stp_group: StpGroup,
    /// The member group of the user.
    pub group: MemberGroup,
    /// The last request seen before.
    pub client_seq: u64,
    /// Number of the last message before: later ones come as reports.
    pub last_number: u64,
    /// When its dead man's switch fires, journalled nanoseconds; 0 = it is off.
    pub cancel_all_at_ns: u64,
}

/// A user's order messages of the day (`design.md` 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio {
    pub messages: u64,
    /// As many as the day's trades allow.
    pub allowed: u64,
}

/// What the hot thread reports to a front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// A numbered message of one of the front's sessions: *accepted*, not yet durable. The one with a
    /// client sequence answers the session's request.
    Numbered(Stamp, admission::Report),
    Opened(Opened),
    /// The front's request has become this command, and no other report says so.
    Taken {
        tag: u64,
        stamp: Stamp,
    },
    /// The front's request is not in the journal.
    NotTaken {
        tag: u64,
        session: SessionIx,
        client_seq: u64,
        request: RequestKind,
        reason: NotTaken,
    },
    /// The session's user has sent most of the order messages that the day's trades allow.
    OrderToTrade(SessionIx, Ratio),
    /// Another front has the session from this login on.
    TakenOver {
        session: SessionIx,
        epoch: Sequence,
    },
}

/// A report in the ring: whole cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(Report);

/// What a front says of a request beside the request itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Comes back with the answer that names no session.
    pub tag: u64,
    /// Epoch of the login it came over; zero = any.
    pub epoch: Sequence,
    /// When the front read it, nanoseconds since 1970; zero = now.
    pub received_ns: u64,
    /// Past the session's rate: only what reduces risk is taken, a cancel of an own open order or a
    /// mass cancel of all orders of the session or the user.
    pub is_over_rate: bool,
}

/// A request in the ring.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Place {
    asked: Asked,
    request: Request,
}

const _: () = assert!(size_of::<Line>() == 128);
const _: () = assert!(size_of::<Place>() <= 192);

/// Reports that a hot thread which has ended leaves for a front. Locked once by each: at the end.
type LastWords = Arc<Mutex<Vec<Report>>>;

/// A front's end of the rings.
pub struct RingPort {
    requests: SingleProducer<Place, SingleConsumerBarrier>,
    reports: EventPoller<Line, SingleProducerBarrier>,
    gate: Arc<Gate>,
    last_words: LastWords,
    /// Told to the other end when this one is dropped.
    is_gone: Arc<AtomicBool>,
}

/// The hot thread's end of the rings.
pub(crate) struct RingEnd {
    requests: EventPoller<Place, SingleProducerBarrier>,
    reports: SingleProducer<Line, SingleConsumerBarrier>,
    spill: VecDeque<Report>,
    /// Requests taken out of the ring together: one look at the other core's cache for all that wait.
    inbox: Box<[Place; INBOX]>,
    /// How many they are.
    inbox_count: usize,
    /// The first of them that is not served.
    inbox_at: usize,
    last_words: LastWords,
    /// Where the front sleeps.
    front: Arc<Parker>,
    /// The front is gone: its reports are dropped.
    is_gone: Arc<AtomicBool>,
    /// It is gone and everything it asked is taken.
    is_closed: bool,
}

/// Makes the rings. `capacity`, a power of two, is the number of requests, and of reports, that they hold.
pub(crate) fn connect(gate: Arc<Gate>, front: Arc<Parker>, capacity: usize) -> (RingPort, RingEnd) {
    // What a slot holds before its first use is never read.
    let unused = SessionRequest {
        key: Id128::NONE,
        user: UserIx::NONE,
        stp_group: None,
        cancel_on_disconnect: false,
    };
    let asked = move || Place {
        asked: Asked::default(),
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
    /// Hands over a request; never blocks.
    ///
    /// # Errors
    /// [`NotTaken::Busy`] when the ring is full, [`NotTaken::Stopping`], [`NotTaken::JournalFailed`]: nothing
    /// will be reported for it.
    pub fn submit(&mut self, asked: Asked, request: &Request) -> Result<(), NotTaken> {
        self.gate.check()?;
        self.requests
            .try_publish(|slot| {
                slot.asked = asked;
                slot.request = *request;
            })
            .map_err(|_| NotTaken::Busy)?;
        self.gate.parker.unpark();
        Ok(())
    }

    /// True when [`RingPort::poll`] would give a report.
    pub fn has_report(&self) -> bool {
        self.reports.has_available()
    }

    /// Gives the reports that are there, in order; true when there were any.
    ///
    /// # Errors
    /// [`NotTaken::Stopping`]: the hot thread has ended and everything it said has been read, whatever the size
    /// of the ring. A request without an answer by then slipped in behind its end and is not in the journal.
    pub fn poll(&mut self, mut each: impl FnMut(&Report)) -> Result<bool, NotTaken> {
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
                    return Err(NotTaken::Stopping);
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
    /// Takes requests out of the ring, unless some are out already or reports wait for room; false when there
    /// is none to serve.
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
                    // By its parts: without the padding, and short enough to be copied without a call.
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

    /// Place of the next of the requests that [`RingEnd::fill`] has taken out, unless reports wait for
    /// room. It is read where it is.
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

    /// The request that [`RingEnd::next`] named.
    #[inline]
    pub fn request(&self, at: usize) -> &Request {
        &self.inbox[at].request
    }

    /// What the front said of it.
    #[inline]
    pub fn asked(&self, at: usize) -> &Asked {
        &self.inbox[at].asked
    }

    /// The request that [`RingEnd::next`] named is not taken.
    pub fn refuse(&mut self, at: usize, reason: NotTaken) {
        let report = not_taken(&self.inbox[at], reason);
        self.put(|| report);
    }

    /// More reports wait than a front that runs leaves behind.
    pub fn is_overrun(&self) -> bool {
        self.spill.len() > SPILL_ROOM / 2
    }

    /// Wakes the front where it has a thread of its own that sleeps.
    pub fn wake(&self) {
        self.front.unpark();
    }

    /// True when a request waits that [`RingEnd::next`] would give.
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

    /// Puts a report into the ring, where it is made, or aside while that is full.
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

    /// Moves what was put aside into the ring; true when nothing waits any more.
    fn flush(&mut self) -> bool {
        while let Some(report) = self.spill.front().copied() {
            if self
                .reports
                .try_publish(|slot| *slot = Line(report))
                .is_err()
            {
                if self.is_gone() {
                    // Reports to nobody.
                    self.spill.clear();
                    return true;
                }
                return false;
            }
            self.spill.pop_front();
            if self.spill.is_empty() {
                // Begin where the memory is that was used already.
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
        let refuse = |place: &Place| not_taken(place, NotTaken::Stopping);
        let unserved = &self.inbox[self.inbox_at..self.inbox_count];
        let mut refused: Vec<Report> = unserved.iter().map(refuse).collect();
        if let Ok(mut places) = self.requests.poll() {
            refused.extend((&mut places).map(refuse));
        }
        // Before the ring of reports ends, which tells the front to look here.
        words(&self.last_words).extend(self.spill.drain(..).chain(refused));
        self.front.unpark();
    }
}

fn not_taken(place: &Place, reason: NotTaken) -> Report {
    let (session, client_seq) = place.request.client().unwrap_or((SessionIx::NONE, 0));
    Report::NotTaken {
        tag: place.asked.tag,
        session,
        client_seq,
        request: place.request.kind(),
        reason,
    }
}
