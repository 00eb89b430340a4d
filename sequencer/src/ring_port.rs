//! The way into the hot thread for a front that polls: a ring of requests in, a ring of reports out, one hand at each end.
//!
//! Once the rings are made nothing here allocates, locks or enters the kernel, but for the bell of a hot thread that sleeps. The hot thread never waits
//! for a front: reports that do not fit wait in a spill, and while there is one no further request is taken from that front, so the spill is bounded by
//! the reports of the requests under way. When the hot thread ends it leaves the spill, and an answer for each request that it has not taken, as its
//! last words: a list that the front reads behind the ring.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use admission::{Request, SessionRequest};
use disruptor::{
    BusySpin, EventPoller, Polling, Producer, SingleConsumerBarrier, SingleProducer,
    SingleProducerBarrier, build_single_producer,
};
use types::{
    CancelReason, Command, Envelope, Event, EventEnvelope, Handle, Id128, InstrumentIx, Lots,
    RejectReason, Sequence, UserIx,
};

use crate::port::{Gate, NotTaken};

/// Requests taken out of a ring at once.
const INBOX: usize = 64;
/// Reports put aside without a further allocation. What is not touched costs address space alone.
const SPILL_ROOM: usize = 65_536;

/// What has become of the order that a request made or named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No order of its own, or all of it was traded: the events say so.
    Nothing,
    /// The order rests with this open quantity.
    Rests { open: Lots },
    /// The amend is done and the order rests.
    Amended { open: Lots, kept_priority: bool },
    /// The order has ended with this quantity unfilled.
    Cancelled {
        reason: CancelReason,
        quantity: Lots,
    },
    /// The book has refused the order, the amend or the cancel.
    Rejected(RejectReason),
    /// Admission has refused the request, and the journal says so.
    Refused(RejectReason),
}

/// A request that is sequenced and matched: *accepted*, not yet durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The front's own name for the request.
    pub tag: u64,
    pub sequence: Sequence,
    /// Journalled nanoseconds since 1970.
    pub time_ns: u64,
    /// The order it made or named; `NONE` for other requests.
    pub handle: Handle,
    /// Where that order is.
    pub instrument: InstrumentIx,
    /// [`Report::Event`]s that follow: everything but what `outcome` says.
    pub events: u32,
    pub outcome: Outcome,
}

/// What the hot thread reports to a front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    Taken(Taken),
    /// Of the last [`Report::Taken`]: its trades, and what happened to other orders. A handle names an order of the whole node; commands to all
    /// instruments report them by index.
    Event(Event),
    /// The request is not in the journal.
    NotTaken {
        tag: u64,
        reason: NotTaken,
    },
}

/// A report in the ring: whole cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(Report);

/// A request in the ring: two cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Asked {
    tag: u64,
    request: Request,
}

const _: () = assert!(size_of::<Line>() == 64);
const _: () = assert!(size_of::<Asked>() <= 128);

/// Reports that a hot thread which has ended leaves for a front. Locked once by each: at the end.
type LastWords = Arc<Mutex<Vec<Report>>>;

/// A front's end of the rings.
pub struct RingPort {
    requests: SingleProducer<Asked, SingleConsumerBarrier>,
    reports: EventPoller<Line, SingleProducerBarrier>,
    gate: Arc<Gate>,
    last_words: LastWords,
    /// Told to the other end when this one is dropped.
    is_gone: Arc<AtomicBool>,
}

/// The hot thread's end of the rings.
pub(crate) struct RingEnd {
    requests: EventPoller<Asked, SingleProducerBarrier>,
    reports: SingleProducer<Line, SingleConsumerBarrier>,
    spill: VecDeque<Report>,
    /// Requests taken out of the ring together: one look at the other core's cache for all that wait.
    inbox: Box<[Asked; INBOX]>,
    /// How many they are.
    inbox_count: usize,
    /// The first of them that is not served.
    inbox_at: usize,
    last_words: LastWords,
    /// The front is gone: nobody reads any more.
    is_gone: Arc<AtomicBool>,
    /// It is gone and everything it asked is taken.
    is_closed: bool,
}

/// Makes the rings. `capacity`, a power of two, is the number of requests, and of reports, that they hold.
pub(crate) fn connect(gate: Arc<Gate>, capacity: usize) -> (RingPort, RingEnd) {
    // What a slot holds before its first use is never read.
    let unused = SessionRequest {
        key: Id128::NONE,
        user: UserIx::NONE,
        stp_group: None,
        cancel_on_disconnect: false,
    };
    let asked = move || Asked {
        tag: 0,
        request: Request::OpenSession(unused),
    };
    let report = || {
        Line(Report::NotTaken {
            tag: 0,
            reason: NotTaken::Stopping,
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
        is_gone,
        is_closed: false,
    };
    (port, end)
}

impl RingPort {
    /// Hands over a request; never blocks.
    ///
    /// # Errors
    /// [`NotTaken::Busy`] when the ring is full, [`NotTaken::Stopping`], [`NotTaken::JournalFailed`]: nothing will be reported for it.
    pub fn submit(&mut self, tag: u64, request: &Request) -> Result<(), NotTaken> {
        self.gate.check()?;
        self.requests
            .try_publish(|slot| {
                slot.tag = tag;
                slot.request = *request;
            })
            .map_err(|_| NotTaken::Busy)?;
        self.gate.wake.ring();
        Ok(())
    }

    /// Gives the reports that are there, in order; true when there were any.
    ///
    /// # Errors
    /// [`NotTaken::Stopping`]: the hot thread has ended and everything it said has been read, whatever the size of the ring. A request without an answer
    /// by then slipped in behind its end and is not in the journal.
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
        self.gate.wake.ring();
    }
}

impl RingEnd {
    /// Takes requests out of the ring, unless some are out already or reports wait for room; false when there is none to serve.
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
                    *place = *asked;
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

    /// Place and tag of the next of the requests that [`RingEnd::fill`] has taken out, unless reports wait for room. It is read where it lies.
    #[inline]
    pub fn next(&mut self) -> Option<(usize, u64)> {
        if self.is_behind() {
            return None;
        }
        let at = self.inbox_at;
        if at >= self.inbox_count {
            return None;
        }
        self.inbox_at += 1;
        Some((at, self.inbox[at].tag))
    }

    /// The request that [`RingEnd::next`] named.
    #[inline]
    pub fn request(&self, at: usize) -> &Request {
        &self.inbox[at].request
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

    /// A command of this front is complete.
    pub fn taken(&mut self, tag: u64, command: &Envelope, events: &[EventEnvelope]) {
        let (handle, instrument) = match &command.command {
            Command::New(c) => (c.handle, c.instrument),
            Command::Cancel(c) => (c.handle, c.instrument),
            Command::Amend(c) => (c.handle, c.instrument),
            Command::Refused(c) => (c.handle, c.instrument),
            _ => (Handle::NONE, InstrumentIx::NONE),
        };
        let mut outcome = match &command.command {
            Command::Refused(c) => Outcome::Refused(c.reason),
            _ => Outcome::Nothing,
        };
        let mut told = 0;
        for event in events {
            if let Some(is_now) = outcome_of(&event.event, handle, outcome) {
                outcome = is_now;
                told += 1;
            }
        }
        let taken = Report::Taken(Taken {
            tag,
            sequence: command.sequence,
            time_ns: command.time_ns,
            handle,
            instrument,
            events: u32::try_from(events.len() - told).expect("events of a command fit 32 bits"),
            outcome,
        });
        if told == events.len() {
            return self.put(taken);
        }
        let others = events
            .iter()
            .filter(|event| outcome_of(&event.event, handle, outcome).is_none())
            .map(|event| Report::Event(event.event));
        let reports = std::iter::once(taken).chain(others);
        // All of them become visible at once, where they fit.
        let is_published = self.spill.is_empty()
            && self
                .reports
                .try_batch_publish(1 + events.len() - told, |slots| {
                    for (slot, report) in slots.zip(reports.clone()) {
                        *slot = Line(report);
                    }
                })
                .is_ok();
        if !is_published {
            reports.for_each(|report| self.put(report));
        }
    }

    pub fn not_taken(&mut self, tag: u64, reason: NotTaken) {
        self.put(Report::NotTaken { tag, reason });
    }

    fn put(&mut self, report: Report) {
        let is_put = self.spill.is_empty()
            && self
                .reports
                .try_publish(|slot| *slot = Line(report))
                .is_ok();
        if !is_put {
            self.spill.push_back(report);
        }
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
        let unserved = &self.inbox[self.inbox_at..self.inbox_count];
        let mut left: Vec<u64> = unserved.iter().map(|asked| asked.tag).collect();
        if let Ok(mut asked) = self.requests.poll() {
            left.extend((&mut asked).map(|asked| asked.tag));
        }
        let refused = left.into_iter().map(|tag| Report::NotTaken {
            tag,
            reason: NotTaken::Stopping,
        });
        // Before the ring of reports ends, which tells the front to look here.
        words(&self.last_words).extend(self.spill.drain(..).chain(refused));
    }
}

/// What an event makes of the order `own`, which stood at `before`; `None` when the event tells of a trade or of another order.
fn outcome_of(event: &Event, own: Handle, before: Outcome) -> Option<Outcome> {
    let (handle, outcome) = match event {
        Event::Accepted(e) if e.rests => (e.handle, Outcome::Rests { open: e.open }),
        Event::Accepted(e) => (e.handle, Outcome::Nothing),
        Event::Rested(e) => {
            let open = e.open;
            let outcome = match before {
                Outcome::Amended { kept_priority, .. } => Outcome::Amended {
                    open,
                    kept_priority,
                },
                _ => Outcome::Rests { open },
            };
            (e.handle, outcome)
        }
        Event::Amended(e) => (
            e.handle,
            Outcome::Amended {
                open: e.open,
                kept_priority: e.kept_priority,
            },
        ),
        Event::Cancelled(e) => (
            e.handle,
            Outcome::Cancelled {
                reason: e.reason,
                quantity: e.quantity,
            },
        ),
        Event::Rejected(e) => (e.handle, Outcome::Rejected(e.reason)),
        Event::AmendRejected(e) => (e.handle, Outcome::Rejected(e.reason)),
        Event::CancelRejected(e) => (e.handle, Outcome::Rejected(e.reason)),
        Event::Trade(_) | Event::Reduced(_) | Event::MassCancelled(_) | Event::PhaseChanged(_) => {
            return None;
        }
    };
    (!own.is_none() && handle == own).then_some(outcome)
}
