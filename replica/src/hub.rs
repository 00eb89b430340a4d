//! Distribution to followers: recent records in memory, and a bounded queue per follower.
//!
//! A follower whose queue is full is detached. It catches up from files and attaches again. The
//! replica never waits for a follower.

use std::collections::VecDeque;

use tokio::sync::mpsc::{self, Receiver, Sender};
use types::Sequence;

use crate::effects::{Applied, Batch};

/// Minimum weight of the window: the number of its records, effects and reports. Records alone do
/// not measure it, since a mass cancel is one record with an effect per order.
const WINDOW_WEIGHT: usize = 65_536;
/// Maximum number of batches queued per follower.
const QUEUE_BATCHES: usize = 256;

/// Input of an attached follower.
pub(crate) struct Attached {
    /// Batches of the window at the time of attachment; read before the queue.
    from_window: VecDeque<Batch>,
    queue: Receiver<Batch>,
}

impl Attached {
    /// The next batch; `None` when detached. Cancel safe.
    pub async fn next(&mut self) -> Option<Batch> {
        match self.from_window.pop_front() {
            Some(batch) => Some(batch),
            None => self.queue.recv().await,
        }
    }

    /// The next batch, if one is queued.
    pub fn try_next(&mut self) -> Option<Batch> {
        self.from_window
            .pop_front()
            .or_else(|| self.queue.try_recv().ok())
    }
}

pub(crate) struct Hub {
    window: VecDeque<Batch>,
    weight: usize,
    /// The window contains every record after this one.
    window_after: Sequence,
    followers: Vec<(&'static str, Sender<Batch>)>,
    ended: Option<String>,
}

impl Hub {
    /// Hub of a replica at `position`.
    pub fn new(position: Sequence) -> Self {
        Self {
            window: VecDeque::new(),
            weight: 0,
            window_after: position,
            followers: Vec::new(),
            ended: None,
        }
    }

    /// Adds a batch to the window and to every queue. Detaches the followers whose queue is full.
    pub fn publish(&mut self, batch: Batch) {
        self.followers.retain(|(name, queue)| {
            let is_queued = queue.try_send(batch.clone()).is_ok();
            if !is_queued && !queue.is_closed() {
                metrics::counter!("replica_detached_total", "follower" => *name).increment(1);
            }
            is_queued
        });
        self.weight += weight(&batch);
        self.window.push_back(batch);
        while let Some(oldest) = self.window.front()
            && self.weight - weight(oldest) >= WINDOW_WEIGHT
        {
            self.weight -= weight(oldest);
            self.window_after = oldest.last();
            self.window.pop_front();
        }
    }

    /// Attaches a follower that has everything up to `after`; `None` when it must catch up first.
    ///
    /// # Errors
    /// Publishing has ended, for the returned reason.
    pub fn attach(
        &mut self,
        name: &'static str,
        after: Sequence,
    ) -> Result<Option<Attached>, String> {
        self.check_running()?;
        if after < self.window_after {
            return Ok(None);
        }
        let (follower, queue) = mpsc::channel(QUEUE_BATCHES);
        self.followers.push((name, follower));
        let had = self.window.partition_point(|batch| batch.last() <= after);
        let from_window = self.window.range(had..).cloned();
        Ok(Some(Attached {
            from_window: from_window.collect(),
            queue,
        }))
    }

    /// The batch of the window that contains a record.
    pub fn batch_containing(&self, sequence: Sequence) -> Option<Batch> {
        let at = self.window.partition_point(|batch| batch.last() < sequence);
        self.window.get(at).cloned()
    }

    /// Checks that publishing has not ended.
    ///
    /// # Errors
    /// The reason why it has.
    pub fn check_running(&self) -> Result<(), String> {
        self.ended.clone().map_or(Ok(()), Err)
    }

    /// True when a follower at `after` could attach.
    pub fn reaches(&self, after: Sequence) -> bool {
        after >= self.window_after
    }

    /// Ends publishing. Followers still get the queued batches.
    pub fn end(&mut self, reason: String) {
        self.followers.clear();
        self.ended.get_or_insert(reason);
    }
}

fn weight(batch: &Batch) -> usize {
    let of = |applied: &Applied| applied.effects.len() + applied.reports.len();
    batch.len() + batch.iter().map(of).sum::<usize>()
}
