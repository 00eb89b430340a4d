//! Submission of requests to the hot thread.
//!
//! A port has a bounded queue, wakes the hot thread only if it sleeps, and gets an answer for every
//! request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use admission::{Reject, Request};
use async_recursion::async_recursion as boxed;
use crossbeam::queue::ArrayQueue;
use tokio::sync::{mpsc, oneshot};
use types::{Command, RejectReason, Sequence};

use crate::backlog::Stage;
use crate::config::{Clock, Config, Layout};
use crate::core::Core;
use crate::park::Parker;
use crate::polled::Polled;
use crate::record::Record;
use crate::ring_port::{self, HotRingPort, RingPort};

/// Why a request is not in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue or a ring is full, or the journal's disk lags. The request may be retried.
    #[error("BUSY")]
    Busy,
    #[error("the platform is stopping")]
    Stopping,
    #[error("the journal has failed")]
    JournalFailed,
    /// Refused without a journal record, such as a repeat or a request of an unknown session.
    #[error("{0}")]
    Refused(Reject),
}

/// Outcome of a request: its record, *accepted* and not yet durable, or why there is none.
pub type Outcome = Result<Record, SubmitError>;

/// Receiver of the outcome.
pub enum Reply {
    None,
    Oneshot(oneshot::Sender<Outcome>),
    /// One channel for the outcomes of several requests, distinguished by a tag.
    Channel {
        tx: mpsc::UnboundedSender<(u64, Outcome)>,
        tag: u64,
    },
}

impl Reply {
    pub(crate) fn send(self, outcome: Outcome) {
        // The request takes effect also if the receiver is gone.
        match self {
            Self::None => {}
            Self::Oneshot(tx) => drop(tx.send(outcome)),
            Self::Channel { tx, tag } => drop(tx.send((tag, outcome))),
        }
    }
}

/// A closure that reads the state between two commands.
pub type Inspection = Box<dyn FnOnce(&Core) + Send>;

pub(crate) enum Job {
    Request(Request, Reply),
    Inspect(Inspection),
    /// A front's rings.
    Attach(Box<HotRingPort>),
    /// A front that shares the hot thread.
    Host(Box<dyn Polled>),
}

/// State shared by ports and the hot thread.
pub(crate) struct Gate {
    pub queue: ArrayQueue<Job>,
    pub parker: Arc<Parker>,
    pub layout: Layout,
    /// New requests are refused; waiting ones are served.
    pub is_stopping: AtomicBool,
    /// The journal has failed.
    pub is_failed: AtomicBool,
    /// Code of the [`Stage`].
    pub stage: AtomicU64,
    pub clock: Clock,
    /// Time of the last command, as last published by the hot thread.
    pub time_ns: AtomicU64,
    /// The hot thread has ended.
    is_closed: AtomicBool,
}

impl Gate {
    pub fn new(config: &Config) -> Self {
        Self {
            queue: ArrayQueue::new(config.queue_capacity),
            layout: config.layout,
            clock: config.clock.clone(),
            time_ns: AtomicU64::new(0),
            parker: Arc::default(),
            is_stopping: AtomicBool::new(false),
            is_failed: AtomicBool::new(false),
            stage: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Makes the hot thread serve the waiting requests and end.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.parker.unpark();
    }

    /// Refuses requests while the node stops and after a journal failure.
    pub fn check(&self) -> Result<(), SubmitError> {
        if self.is_stopping.load(Ordering::Acquire) {
            return Err(SubmitError::Stopping);
        }
        if self.is_failed.load(Ordering::Acquire) {
            return Err(SubmitError::JournalFailed);
        }
        Ok(())
    }

    /// Called when the hot thread has ended. Waiting and later requests are answered `Stopping`.
    pub fn close(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.is_closed.store(true, Ordering::SeqCst);
        self.refuse_queued();
    }

    fn refuse_queued(&self) {
        while let Some(job) = self.queue.pop() {
            // The drop of an inspection closes its channel, which its caller sees.
            if let Job::Request(_, reply) = job {
                reply.send(Err(SubmitError::Stopping));
            }
        }
    }
}

/// Submits requests to the hot thread. Cheap to clone; requests of one thread keep their order.
#[derive(Clone)]
pub struct Port {
    pub(crate) gate: Arc<Gate>,
}

impl Port {
    /// Submits a request; never blocks.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] if the queue is full, [`SubmitError::Stopping`],
    /// [`SubmitError::JournalFailed`]. After an error `reply` gets nothing.
    pub fn submit(&self, request: Request, reply: Reply) -> Result<(), SubmitError> {
        self.push(Job::Request(request, reply))
    }

    /// Submits a request and waits until it is sequenced and matched.
    #[boxed]
    pub async fn call(&self, request: Request) -> Outcome {
        let (tx, rx) = oneshot::channel();
        self.submit(request, Reply::Oneshot(tx))?;
        rx.await.unwrap_or(Err(SubmitError::Stopping))
    }

    /// Journals a settlement command: `Settled`, `Bust`, a block, its end or a mass cancel.
    ///
    /// Returns its sequence; `None` if its effect is journalled already.
    ///
    /// # Errors
    /// [`SubmitError`].
    ///
    /// # Panics
    /// The command is not a settlement command.
    #[boxed]
    pub async fn settlement(&self, command: Command) -> Result<Option<Sequence>, SubmitError> {
        let request = Request::of_settlement(&command);
        match self.call(request.expect("a settlement command")).await {
            Ok(record) => Ok(Some(record.command.sequence)),
            Err(SubmitError::Refused(reject))
                if reject.reason == RejectReason::DuplicateRequest =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Runs `read` on the hot thread between two commands. It must be short.
    ///
    /// # Errors
    /// [`SubmitError::Busy`], [`SubmitError::Stopping`].
    pub async fn inspect<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Core) -> T + Send + 'static,
    ) -> Result<T, SubmitError> {
        let (tx, rx) = oneshot::channel();
        self.inspect_with(Box::new(move |core| drop(tx.send(read(core)))))?;
        rx.await.map_err(|_| SubmitError::Stopping)
    }

    /// As [`Port::inspect`], for a closure that reports its result itself.
    pub fn inspect_with(&self, read: Inspection) -> Result<(), SubmitError> {
        self.push(Job::Inspect(read))
    }

    /// False when the node stops, its hot thread has ended or its journal has failed.
    pub fn is_open(&self) -> bool {
        self.gate.check().is_ok()
    }

    /// Stage of the backpressure, as last published by the hot thread.
    pub fn stage(&self) -> Stage {
        Stage::of_code(self.gate.stage.load(Ordering::Relaxed))
    }

    /// The node's clock.
    pub fn clock(&self) -> &Clock {
        &self.gate.clock
    }

    /// Time that the next command would have: the later of the clock and the last command.
    pub fn time_ns(&self) -> u64 {
        let last_ns = self.gate.time_ns.load(Ordering::Relaxed);
        self.gate.clock.now_ns().max(last_ns)
    }

    /// Creates the rings of a front, each with `capacity` slots (a power of two).
    ///
    /// `front` is the parker of the front's thread.
    ///
    /// # Errors
    /// [`SubmitError::Busy`], [`SubmitError::Stopping`].
    pub fn rings(&self, capacity: usize, front: Arc<Parker>) -> Result<RingPort, SubmitError> {
        let (port, hot_port) = ring_port::connect(self.gate.clone(), front, capacity);
        self.push(Job::Attach(Box::new(hot_port)))?;
        Ok(port)
    }

    /// Which thread has the books.
    pub fn layout(&self) -> Layout {
        self.gate.layout
    }

    /// The hot thread's parker, also for a front that shares the thread.
    pub fn parker(&self) -> Arc<Parker> {
        self.gate.parker.clone()
    }

    /// Makes the hot thread poll a front per iteration, until the front is over (layout `fused`).
    ///
    /// # Errors
    /// [`SubmitError::Busy`], [`SubmitError::Stopping`].
    pub fn host(&self, polled: Box<dyn Polled>) -> Result<(), SubmitError> {
        self.push(Job::Host(polled))
    }

    fn push(&self, job: Job) -> Result<(), SubmitError> {
        match self.gate.check() {
            Err(SubmitError::JournalFailed) if !matches!(job, Job::Request(..)) => {}
            outcome => outcome?,
        }
        self.gate.queue.push(job).map_err(|_| SubmitError::Busy)?;
        self.gate.parker.unpark();
        // The hot thread may have drained the queue for the last time before this push.
        if self.gate.is_closed.load(Ordering::SeqCst) {
            self.gate.refuse_queued();
        }
        Ok(())
    }
}
