//! The single writer: folds queued commands in memory and writes one transaction per group.
//!
//! **Group commit.** The next group gathers while the last one becomes durable. A lone command does
//! not wait; N concurrent commands share one fsync. An answer is sent only after its transaction is
//! durable.
//!
//! **Failures.** Each command of a group is atomic on its own. A failing command does not fail its
//! group: the group is retried one command at a time. A group that conflicts with another ledger or
//! loses its connection is folded again from the start. If it was committed after all, the keys of
//! its commands or the inbox of its event show this, or nothing is left to do. Retries last
//! [`worker::RETRY_TIME_MAX`]; while the store is known to be unavailable a group has a single
//! attempt.
//!
//! **Inline writes.** On SQLite a write blocks its thread until the disk answers. A small command
//! that finds the writer idle is therefore written on the caller's thread, which saves two thread
//! wake-ups, a sixth of its time. The caller's deadline is not checked during the write.
//!
//! **Bounds.** [`QUEUE_COMMANDS_MAX`] queued commands (further callers wait);
//! [`GROUP_COMMANDS_MAX`] and [`GROUP_WEIGHT_MAX`] per transaction.

mod job;
mod worker;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Mutex, mpsc, oneshot, watch},
    task::block_in_place,
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

pub use job::{EarlyOutcome, InboxCommand};
use job::{Job, Reply};
use worker::Worker;

use crate::{
    Clock, Error,
    fold::{Command, Outcome},
    repo::Store,
};

pub const QUEUE_COMMANDS_MAX: usize = 4_096;
pub const GROUP_COMMANDS_MAX: usize = 512;
/// [`Command::weight`] from which a group takes no further command. Its last command may exceed it.
pub const GROUP_WEIGHT_MAX: usize = 8_192;

/// [`Command::weight`] from which a command is large. For a smaller one, waking another thread
/// costs more than it saves.
pub const LARGE_WEIGHT_MIN: usize = 64;

/// Handle of the writer. Clones share it.
#[derive(Clone)]
pub struct Committer {
    queue: mpsc::Sender<Job>,
    /// For writes on the caller's thread; `None` if the store does not block its thread.
    worker: Option<Arc<Mutex<Worker>>>,
    span: tracing::Span,
}

impl Committer {
    /// Starts the writer, on its own thread if the store blocks it. The writer ends when `shutdown`
    /// is cancelled and the queue is written, and then sends to the returned receiver. After a
    /// failed assertion it drops the sender instead.
    ///
    /// # Errors
    /// [`Error::Events`]: the thread cannot be started.
    pub fn spawn(
        store: Store,
        clock: Clock,
        health: rpc::Health,
        shutdown: CancellationToken,
    ) -> Result<(Self, oneshot::Receiver<()>), Error> {
        let (queue, receiver) = mpsc::channel(QUEUE_COMMANDS_MAX);
        let has_thread = store.blocks_thread();
        let worker = Arc::new(Mutex::new(Worker::new(store, clock, health)));
        let span = tracing::info_span!("worker", service_name = "ledger", worker = "committer");
        let committer = Committer {
            queue,
            worker: has_thread.then(|| worker.clone()),
            span: span.clone(),
        };
        let (ended, end) = oneshot::channel();
        let work = async move {
            if run(&worker, receiver, shutdown).await {
                let _ = ended.send(());
            }
        };
        let work = work.instrument(span);
        if has_thread {
            let runtime = Handle::current();
            std::thread::Builder::new()
                .name("ledger-writer".to_owned())
                .spawn(move || runtime.block_on(work))
                .map_err(events::Error::Files)?;
        } else {
            tokio::spawn(work);
        }
        Ok((committer, end))
    }

    /// Folds and commits one command.
    ///
    /// # Errors
    /// [`Error::Closed`] at shutdown, otherwise the store's error. A refusal is an [`Outcome`], not
    /// an error.
    pub async fn submit(&self, command: Command, context: rpc::Context) -> Result<Outcome, Error> {
        let (reply, answer) = oneshot::channel();
        let job = Job::One {
            command,
            context,
            reply: Reply::AfterCommit(reply),
        };
        if let Some(job) = self.write_inline(job) {
            self.send(job).await?;
        }
        answer.await.map_err(|_| Error::Closed)?
    }

    /// Queues commands together, so that they can share a group. The outcomes are in the order of
    /// the commands. No command depends on the success of another.
    ///
    /// # Errors
    /// As [`Self::submit`], for the first command that failed. Other commands may be committed.
    pub async fn submit_all(
        &self,
        commands: Vec<Command>,
        context: &rpc::Context,
    ) -> Result<Vec<Outcome>, Error> {
        let mut answers = Vec::with_capacity(commands.len());
        for command in commands {
            let (reply, answer) = oneshot::channel();
            self.send(Job::One {
                command,
                context: context.clone(),
                reply: Reply::AfterCommit(reply),
            })
            .await?;
            answers.push(answer);
        }
        let mut outcomes = Vec::with_capacity(answers.len());
        for answer in answers {
            outcomes.push(answer.await.map_err(|_| Error::Closed)??);
        }
        Ok(outcomes)
    }

    /// Writes the job on the caller's thread. Returns the job if it must be queued: it is large or
    /// needs its own group, the writer is busy or stopped, the runtime has one thread, or the
    /// caller is no spawned task. Outside of tasks, as in `main`, the inner `block_on` and the
    /// caller's own share the parking of their thread, and wake-ups of the caller would be lost.
    fn write_inline(&self, job: Job) -> Option<Job> {
        let may_inline = self.queue.capacity() == QUEUE_COMMANDS_MAX
            && job.weight() < LARGE_WEIGHT_MIN
            && !job.needs_own_group()
            && tokio::task::try_id().is_some();
        let runtime = Handle::current();
        let Some(worker) = (self.worker.as_ref())
            .filter(|_| may_inline && runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
        else {
            return Some(job);
        };
        let Ok(mut worker) = worker.try_lock() else {
            return Some(job);
        };
        // Checked under the lock: the writer closes the queue before it takes the lock for the last
        // time.
        if worker.is_broken() || self.queue.is_closed() {
            return Some(job);
        }
        block_in_place(|| {
            let write = worker.commit(vec![job]).instrument(self.span.clone());
            // A failed assertion stops the writer but not the caller's task.
            let _ = catch_unwind(AssertUnwindSafe(|| runtime.block_on(write)));
        });
        None
    }

    /// As [`Self::submit`], for a large command: the caller builds the response during the write.
    ///
    /// # Errors
    /// [`Error::Closed`] at shutdown.
    pub async fn submit_early(
        &self,
        command: Command,
        context: rpc::Context,
    ) -> Result<EarlyOutcome, Error> {
        let (folded, outcome) = watch::channel(None);
        let (durable, end) = oneshot::channel();
        self.send(Job::One {
            command,
            context,
            reply: Reply::AfterFold { folded, durable },
        })
        .await?;
        Ok(EarlyOutcome {
            folded: outcome,
            durable: end,
        })
    }

    /// Folds the commands of events in order and commits them together. An event that this consumer
    /// accepted before changes nothing. The first refusal is the last outcome; that event and the
    /// events after it are not accepted.
    ///
    /// # Errors
    /// As [`Self::submit`]. On an error no event is accepted.
    pub async fn accept_events(
        &self,
        consumer: &'static str,
        inbox: Vec<InboxCommand>,
    ) -> Result<Vec<Outcome>, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Job::Events {
            consumer,
            inbox,
            reply,
        })
        .await?;
        answer.await.map_err(|_| Error::Closed)?
    }

    async fn send(&self, job: Job) -> Result<(), Error> {
        self.queue.send(job).await.map_err(|_| Error::Closed)
    }
}

/// Writes queued jobs until `shutdown` and the end of the queue. Returns `false` after a failed
/// assertion.
async fn run(
    worker: &Mutex<Worker>,
    mut queue: mpsc::Receiver<Job>,
    shutdown: CancellationToken,
) -> bool {
    loop {
        let first = tokio::select! {
            biased;
            job = queue.recv() => job,
            () = shutdown.cancelled(), if !queue.is_closed() => {
                queue.close();
                continue;
            }
        };
        // Waits for a caller that writes on its own thread.
        let mut worker = worker.lock().await;
        if worker.is_broken() {
            drop((first, worker));
            queue.close();
            // Callers that are waiting to enter the queue get `Error::Closed` too.
            while queue.recv().await.is_some() {}
            return false;
        }
        let Some(first) = first else { return true };
        let mut weight = first.weight();
        let mut group = vec![first];
        while !group[0].needs_own_group()
            && group.len() < GROUP_COMMANDS_MAX
            && weight < GROUP_WEIGHT_MAX
        {
            let Ok(job) = queue.try_recv() else { break };
            if job.needs_own_group() {
                worker.commit(std::mem::take(&mut group)).await;
                group.push(job);
                break;
            }
            weight += job.weight();
            group.push(job);
        }
        worker.commit(group).await;
        worker.run_deferred().await;
    }
}
