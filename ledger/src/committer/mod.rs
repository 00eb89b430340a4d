//! The one writer of money: commands queue up, a group is folded in memory and written in one transaction.
//!
//! Natural group commit: while one group is being made durable the next one gathers, so a lone
//! command waits for nobody and a crowd shares one fsync. Each command of a group is all or nothing
//! on its own. An answer leaves only after its transaction is durable. A group that the store
//! refuses is tried again command by command, so that one bad apple spoils nobody's write. A group
//! that lost to another ledger or lost its connection is folded again from the start, whoever asks
//! sees nothing of it: what was written after all is found by the keys of its commands, by the
//! inbox of its event, or leaves nothing to do. It is tried for [`worker::PATIENCE`], while the
//! store is known to be away once. Where the writer keeps its thread until the disk has answered
//! (SQLite), a small command that finds nobody writing is written by the thread that brings it: two
//! wakings of a sleeping thread are a sixth of what a lone command takes. A deadline of its caller
//! is not kept meanwhile. Bounds: [`QUEUE_COMMANDS_MAX`] waiting (callers wait beyond),
//! [`GROUP_COMMANDS_MAX`] and [`GROUP_WEIGHT_MAX`] in one transaction.

mod job;
mod worker;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Mutex, mpsc, oneshot},
    task::block_in_place,
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

pub use job::{Asked, Early};
use job::{Job, Reply};
use worker::Worker;

use crate::{
    Clock, Error,
    fold::{Command, Outcome},
    repo::Store,
};

pub const QUEUE_COMMANDS_MAX: usize = 4_096;
pub const GROUP_COMMANDS_MAX: usize = 512;
/// Operations and hold steps of one transaction, unless a single command has more.
pub const GROUP_WEIGHT_MAX: usize = 8_192;

/// Operations and hold steps from which on a command is large: below, waking another thread for it
/// costs more than it gives.
pub const LARGE_WEIGHT_MIN: usize = 64;

/// Hands commands to the committer task.
#[derive(Clone)]
pub struct Committer {
    queue: mpsc::Sender<Job>,
    /// `None`: callers never write themselves.
    worker: Option<Arc<Mutex<Worker>>>,
    span: tracing::Span,
}

impl Committer {
    /// Starts the writer, on a thread of its own where the store wants one. It ends when `shutdown`
    /// is cancelled and what was queued is written, which the receiver hears; it hears nothing of
    /// one that was stopped by a failed assertion.
    ///
    /// # Errors
    /// [`Error::Events`]: no thread is to be had.
    pub fn spawn(
        store: Store,
        clock: Clock,
        health: rpc::Health,
        shutdown: CancellationToken,
    ) -> Result<(Self, oneshot::Receiver<()>), Error> {
        let (queue, receiver) = mpsc::channel(QUEUE_COMMANDS_MAX);
        let has_thread = store.keeps_its_thread();
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
    /// [`Error::Closed`] at shutdown, otherwise what the store answered. A refusal is an [`Outcome`], not an error.
    pub async fn submit(&self, command: Command, context: rpc::Context) -> Result<Outcome, Error> {
        let (reply, answer) = oneshot::channel();
        let job = Job::One {
            command,
            context,
            reply: Reply::Whole(reply),
        };
        if let Some(job) = self.write_here(job) {
            self.send(job).await?;
        }
        answer.await.map_err(|_| Error::Closed)?
    }

    /// Writes it on this thread, unless it is large, or somebody is writing or waits to: then it comes back.
    fn write_here(&self, job: Job) -> Option<Job> {
        let is_quiet = self.queue.capacity() == QUEUE_COMMANDS_MAX
            && job.weight() < LARGE_WEIGHT_MIN
            && !job.is_alone();
        let runtime = Handle::current();
        let Some(worker) = (self.worker.as_ref())
            .filter(|_| is_quiet && runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
        else {
            return Some(job);
        };
        let Ok(mut worker) = worker.try_lock() else {
            return Some(job);
        };
        // Behind the lock: the writer's thread closes the queue before it takes the lock for the last time.
        if worker.is_broken() || self.queue.is_closed() {
            return Some(job);
        }
        block_in_place(|| {
            let write = worker.commit(vec![job]).instrument(self.span.clone());
            // A failed assertion ends the writer, not whoever asked.
            let _ = catch_unwind(AssertUnwindSafe(|| runtime.block_on(write)));
        });
        None
    }

    /// As [`Self::submit`], for a large command: the caller makes the answer while it is being written.
    ///
    /// # Errors
    /// [`Error::Closed`] at shutdown.
    pub async fn submit_early(
        &self,
        command: Command,
        context: rpc::Context,
    ) -> Result<Early, Error> {
        let (folded, outcomes) = mpsc::unbounded_channel();
        let (durable, end) = oneshot::channel();
        self.send(Job::One {
            command,
            context,
            reply: Reply::Early { folded, durable },
        })
        .await?;
        Ok(Early {
            folded: outcomes,
            durable: end,
        })
    }

    /// Folds what events ask for in their order and commits it together, each once per consumer:
    /// what was taken before changes nothing. The first refused one ends the answer; neither it nor
    /// anything behind it is taken.
    ///
    /// # Errors
    /// As [`Self::submit`]; then none is taken.
    pub async fn take(
        &self,
        consumer: &'static str,
        asked: Vec<Asked>,
    ) -> Result<Vec<Outcome>, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Job::Events {
            consumer,
            asked,
            reply,
        })
        .await?;
        answer.await.map_err(|_| Error::Closed)?
    }

    async fn send(&self, job: Job) -> Result<(), Error> {
        self.queue.send(job).await.map_err(|_| Error::Closed)
    }
}

/// Writes what is queued, until `shutdown` and the end of the queue; `false`: an assertion failed.
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
        // Whoever writes by himself ends first.
        let mut worker = worker.lock().await;
        if worker.is_broken() {
            drop((first, worker));
            queue.close();
            // Whoever is on the way into it hears of the end too.
            while queue.recv().await.is_some() {}
            return false;
        }
        let Some(first) = first else { return true };
        let mut weight = first.weight();
        let mut group = vec![first];
        while !group[0].is_alone() && group.len() < GROUP_COMMANDS_MAX && weight < GROUP_WEIGHT_MAX
        {
            let Ok(job) = queue.try_recv() else { break };
            if job.is_alone() {
                worker.commit(std::mem::take(&mut group)).await;
                group.push(job);
                break;
            }
            weight += job.weight();
            group.push(job);
        }
        worker.commit(group).await;
        worker.catch_up().await;
    }
}
