//! Client of an open loop: one thread sends the requests of a load at a fixed rate, regardless of
//! the answers, and reads the reports.
//!
//! Latency counts from the time at which a request is *due*, so a stall delays every request after
//! it (no coordinated omission). A request is *accepted* when the client reads its answer and
//! *durable* when the commit position has passed it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use admission::{ReportBody, Request};
use hdrhistogram::Histogram;
use sequencer::{Commit, Report, RingPort, Submission, SubmitError};
use types::Sequence;

use crate::hop::{Timer, histogram};
use crate::load::Load;

/// Maximum requests in flight; a power of two.
const WINDOW: usize = 1 << 16;
/// Maximum due requests that the client sends before it polls, like a front that submits the
/// requests of a datagram.
pub const SENT_TOGETHER: usize = 8;
/// Maximum wait for the journal at the end.
const DURABLE_WAIT_MAX: Duration = Duration::from_secs(10);

/// Rings to a thread that answers requests: those of a node, or bare ones.
pub trait Rings {
    /// Submits a request; never blocks.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] if the ring is full. Any other error is final.
    fn submit(&mut self, request: &Request) -> Result<(), SubmitError>;

    /// Passes the waiting reports to `each`, in order.
    ///
    /// # Errors
    /// The other thread has ended.
    fn poll(&mut self, each: impl FnMut(&Report)) -> Result<(), SubmitError>;
}

impl Rings for RingPort {
    #[inline]
    fn submit(&mut self, request: &Request) -> Result<(), SubmitError> {
        RingPort::submit(self, Submission::default(), request)
    }

    #[inline]
    fn poll(&mut self, each: impl FnMut(&Report)) -> Result<(), SubmitError> {
        RingPort::poll(self, each)?;
        Ok(())
    }
}

/// Rate and duration of a run.
#[derive(Clone, Copy)]
pub struct Timing {
    /// Requests per second.
    pub rate: u64,
    pub seconds: u64,
    /// Warm-up in seconds, not measured.
    pub warm_up: u64,
}

/// Results of a run. Latencies are in nanoseconds.
pub struct Results {
    pub accepted: Histogram<u64>,
    pub durable: Histogram<u64>,
    /// Requests with a latency.
    pub requests: u64,
    /// Those of `requests` that were rejected.
    pub rejected: u64,
    /// Requests answered by `Report::NotSubmitted`, with the warm-up. The latencies exclude them,
    /// so those of a run that has any are too low.
    pub not_submitted: u64,
    /// Attempts that found the request ring full. The request is retried and keeps its due time.
    pub ring_full: u64,
    /// Reports that answer no request.
    pub events: u64,
}

/// State of the client thread.
pub struct Client<'a, R> {
    rings: R,
    load: &'a mut Load,
    /// `None`: nothing becomes durable.
    commit: Option<Commit>,
    /// Due times in nanoseconds since the start, by request number modulo [`WINDOW`].
    due_ns: Box<[u64]>,
    /// Sequence and due time of the requests that are accepted and not yet durable.
    pending: VecDeque<(Sequence, u64)>,
    pub results: Results,
    /// End of the warm-up. Requests due earlier are not counted.
    warm_up_end_ns: u64,
    timer: Timer,
}

impl<'a, R: Rings> Client<'a, R> {
    pub fn new(rings: R, load: &'a mut Load, commit: Option<Commit>) -> Self {
        Self {
            rings,
            load,
            commit,
            due_ns: vec![0; WINDOW].into_boxed_slice(),
            pending: VecDeque::with_capacity(1 << 20),
            results: Results {
                accepted: histogram(),
                durable: histogram(),
                requests: 0,
                rejected: 0,
                not_submitted: 0,
                ring_full: 0,
                events: 0,
            },
            warm_up_end_ns: 0,
            timer: Timer::start(),
        }
    }

    fn now_ns(&self) -> u64 {
        self.timer.ns()
    }

    /// Sends the requests, and returns when all of them are answered and durable.
    ///
    /// # Errors
    /// The other thread has ended, or the journal does not become durable.
    pub fn run(&mut self, timing: Timing) -> anyhow::Result<()> {
        let total = timing.rate * (timing.warm_up + timing.seconds);
        let due_ns = |number: u64| number * 1_000_000_000 / timing.rate;
        self.timer = Timer::start();
        self.warm_up_end_ns = timing.warm_up * 1_000_000_000;
        let (mut sent, mut answered) = (0, 0);
        let mut unsent: Option<Request> = None;
        let mut next_due_ns = 0;
        while answered < total {
            for _ in 0..SENT_TOGETHER {
                let is_due = sent < total && self.now_ns() >= next_due_ns;
                if !is_due || sent - answered >= WINDOW as u64 {
                    break;
                }
                let request = unsent.take().unwrap_or_else(|| self.load.next_request());
                self.due_ns[sent as usize % WINDOW] = next_due_ns;
                self.load.set_tag(&request, sent);
                match self.rings.submit(&request) {
                    Ok(()) => {
                        sent += 1;
                        next_due_ns = due_ns(sent);
                    }
                    Err(SubmitError::Busy) => {
                        self.results.ring_full += 1;
                        unsent = Some(request);
                        break;
                    }
                    Err(other) => anyhow::bail!("the node stopped: {other}"),
                }
            }
            answered += self.read_reports()?;
            self.read_commit();
        }
        let deadline = Instant::now() + DURABLE_WAIT_MAX;
        while !self.pending.is_empty() {
            self.read_commit();
            anyhow::ensure!(
                Instant::now() < deadline,
                "timed out waiting for the journal"
            );
        }
        Ok(())
    }

    /// Reads the available reports. Returns the number of answers among them.
    fn read_reports(&mut self) -> anyhow::Result<u64> {
        let mut answered = 0;
        let (load, due_ns, results) = (&mut *self.load, &self.due_ns, &mut self.results);
        let (pending, warm_up_end_ns, timer) =
            (&mut self.pending, self.warm_up_end_ns, &self.timer);
        let has_journal = self.commit.is_some();
        self.rings.poll(|report| match report {
            Report::SessionMessage(stamp, message) => {
                results.events += u64::from(message.client_seq == 0);
                let Some(tag) = load.on_report(message) else {
                    return;
                };
                answered += 1;
                let due_ns = due_ns[tag as usize % WINDOW];
                if has_journal {
                    pending.push_back((stamp.sequence, due_ns));
                }
                if due_ns >= warm_up_end_ns {
                    // One clock reading per report, since processing a batch takes time.
                    let ns = timer.ns().saturating_sub(due_ns).max(1);
                    results.accepted.saturating_record(ns);
                    results.requests += 1;
                    let is_rejected = matches!(message.body, ReportBody::Rejected { .. });
                    results.rejected += u64::from(is_rejected);
                }
            }
            Report::NotSubmitted { .. } => {
                answered += 1;
                results.not_submitted += 1;
            }
            Report::Opened(_)
            | Report::Submitted { .. }
            | Report::OrderToTrade(..)
            | Report::TakenOver { .. } => {}
        })?;
        Ok(answered)
    }

    fn read_commit(&mut self) {
        let Some(commit) = &self.commit else { return };
        if self.pending.is_empty() {
            return;
        }
        let position = commit.position();
        if self
            .pending
            .front()
            .is_none_or(|(sequence, _)| *sequence > position)
        {
            return;
        }
        let now_ns = self.now_ns();
        while let Some((sequence, due_ns)) = self.pending.front().copied() {
            if sequence > position {
                break;
            }
            self.pending.pop_front();
            if due_ns >= self.warm_up_end_ns {
                let ns = now_ns.saturating_sub(due_ns).max(1);
                self.results.durable.saturating_record(ns);
            }
        }
    }
}
