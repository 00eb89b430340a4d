//! Distribution to followers: recent records in memory, and a bounded queue per follower.
//!
//! A follower whose queue is full is detached; it catches up from files and attaches again. The
//! replica never waits for a follower.

use std::collections::VecDeque;

use tokio::sync::mpsc::{self, Receiver, Sender};
use types::Sequence;

use crate::effects::{Applied, Batch};

/// Minimum weight of the window, in records plus effects and reports. A mass cancel is one record
/// with an effect per order.
const WINDOW_WEIGHT: usize = 65_536;
/// Maximum of batches queued for one follower.
const QUEUE_BATCHES: usize = 256;

/// Input of an attached follower.
pub(crate) struct Attached {
    /// Batches from the window.
    backlog: VecDeque<Batch>,
    queue: Receiver<Batch>,
}

impl Attached {
    /// The next batch; `None` after the end. Cancel safe.
    pub async fn next(&mut self) -> Option<Batch> {
        match self.backlog.pop_front() {
            Some(batch) => Some(batch),
            None => self.queue.recv().await,
        }
    }

    /// The next batch, if one is queued.
    pub fn try_next(&mut self) -> Option<Batch> {
        self.backlog
            .pop_front()
            .or_else(|| self.queue.try_recv().ok())
    }
}

pub(crate) struct Hub {
    window: VecDeque<Batch>,
    weight: usize,
    /// The window contains every record after this one.
    begins: Sequence,
    followers: Vec<(&'static str, Sender<Batch>)>,
    ended: Option<String>,
}

impl Hub {
    /// Hub of a replica at position `begins`.
    pub fn new(begins: Sequence) -> Self {
        Self {
            window: VecDeque::new(),
            weight: 0,
            begins,
            followers: Vec::new(),
            ended: None,
        }
    }

    pub fn publish(&mut self, batch: Batch) {
        self.followers.retain(|(name, queue)| {
            let is_taken = queue.try_send(batch.clone()).is_ok();
            if !is_taken && !queue.is_closed() {
                metrics::counter!("replica_detached_total", "follower" => *name).increment(1);
            }
            is_taken
        });
        self.weight += weight(&batch);
        self.window.push_back(batch);
        while let Some(oldest) = self.window.front()
            && self.weight - weight(oldest) >= WINDOW_WEIGHT
        {
            self.weight -= weight(oldest);
            self.begins = oldest.last();
            self.window.pop_front();
        }
    }

    /// Attaches a follower that has everything up to `after`; `None` when it must catch up first.
    ///
    /// # Errors
    /// Publishing has ended; the reason.
    pub fn attach(
        &mut self,
        name: &'static str,
        after: Sequence,
    ) -> Result<Option<Attached>, String> {
        self.is_running()?;
        if after < self.begins {
            return Ok(None);
        }
        let (follower, queue) = mpsc::channel(QUEUE_BATCHES);
        self.followers.push((name, follower));
        let had = self.window.partition_point(|batch| batch.last() <= after);
        let backlog = self.window.range(had..).cloned();
        Ok(Some(Attached {
            backlog: backlog.collect(),
            queue,
        }))
    }

    /// The recent batch with a record.
    pub fn batch_containing(&self, sequence: Sequence) -> Option<Batch> {
        let at = self.window.partition_point(|batch| batch.last() < sequence);
        self.window.get(at).cloned()
    }

    /// # Errors
    /// Publishing has ended; the reason.
    pub fn is_running(&self) -> Result<(), String> {
        self.ended.clone().map_or(Ok(()), Err)
    }

    /// True when a follower at `after` could attach.
    pub fn reaches(&self, after: Sequence) -> bool {
        after >= self.begins
    }

    /// Ends publishing. Followers still read what is queued.
    pub fn end(&mut self, reason: String) {
        self.followers.clear();
        self.ended.get_or_insert(reason);
    }
}

fn weight(batch: &Batch) -> usize {
    let of = |applied: &Applied| applied.effects.len() + applied.reports.len();
    batch.len() + batch.iter().map(of).sum::<usize>()
}
