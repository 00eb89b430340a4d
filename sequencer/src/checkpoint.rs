//! Checkpoints of the journal's readers: a reader's state at one record.
//!
//! A restart resumes at a checkpoint instead of at the first record. The reader defines the
//! payload. File format and folder are those of snapshots ([`journal::snapshot`]).
//!
//! Invariants:
//!
//! - A checkpoint is a function of the journal up to its record, so a checkpoint plus the later
//!   records equals a replay from the first record.
//! - A thread of its own writes it, never the hot thread.
//! - A checkpoint that is damaged or does not restore is skipped, and an older one is used.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use journal::{Snapshot, Snapshots};
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use types::Sequence;

use crate::priority;
use crate::retention::Durable;

/// Pause after a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// When a checkpoint is made and what is kept.
#[derive(Clone, Debug)]
pub struct SnapshotConfig {
    /// Commands between two checkpoints. A restart replays about as many at most.
    pub every_commands: u64,
    /// Time between two checkpoints, unless there was no command.
    pub every: Duration,
    /// Valid checkpoints kept, at least 2.
    pub kept: usize,
    /// Consumers that resume from their own positions. For each, the newest checkpoint at or before
    /// its position is kept.
    pub followers: Vec<Durable>,
}

impl Default for SnapshotConfig {
    fn default() -> Self {
        Self {
            every_commands: 1_000_000,
            every: Duration::from_secs(60),
            kept: 2,
            followers: Vec::new(),
        }
    }
}

/// Checkpoints of one reader that a restart can use: those that this process restored or wrote.
///
/// Other files in the folder may have another version, or be ahead of a database that was restored
/// from a backup.
#[derive(Clone, Debug, Default)]
pub struct UsableCheckpoints(Arc<Files>);

#[derive(Debug, Default)]
struct Files {
    usable: Mutex<BTreeSet<u64>>,
    /// Serializes the removal of checkpoints with that of segments.
    removal: Mutex<()>,
}

impl UsableCheckpoints {
    /// Marks the checkpoint at `sequence` as usable for a restart.
    pub fn insert(&self, sequence: Sequence) {
        self.lock().insert(sequence.get());
    }

    pub(crate) fn contains(&self, sequence: u64) -> bool {
        self.lock().contains(&sequence)
    }

    /// Unmarks checkpoints that were removed.
    pub(crate) fn remove(&self, sequences: &[u64]) {
        self.lock().retain(|sequence| !sequences.contains(sequence));
    }

    /// Locks the removal of the reader's checkpoints while the guard is held.
    pub(crate) fn lock_removal(&self) -> MutexGuard<'_, ()> {
        self.0
            .removal
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.usable.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a reader cannot resume from its checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("checkpoints: {0}")]
    Io(#[from] io::Error),
    #[error(
        "a store or checkpoint is at record {known}, but the journal ends at {journal}: durable \
         records are missing; restore the journal from a backup"
    )]
    Ahead { known: Sequence, journal: Sequence },
}

impl CheckpointError {
    /// True when the process is out of file descriptors. The call may be retried.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Io(error) if journal::is_out_of_descriptors(error))
    }
}

/// The folder of one reader's checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    snapshots: Snapshots,
}

impl Checkpoints {
    pub fn new(dir: &Path) -> Self {
        Self {
            snapshots: Snapshots::new(dir),
        }
    }

    /// The newest valid checkpoint at or before `until` that `restore` accepts.
    ///
    /// `restore` skips a checkpoint with `None`, or with an error, which is logged as a warning.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn newest<T>(
        &self,
        until: Sequence,
        mut restore: impl FnMut(Sequence, &AlignedVec) -> Result<Option<T>, String>,
    ) -> io::Result<Option<T>> {
        let mut until = until.get();
        while let Some(found) = self.snapshots.newest(until)? {
            let sequence = found.sequence;
            let restored = try_restore(found, &mut restore).flatten();
            let (None, Some(before)) = (&restored, sequence.checked_sub(1)) else {
                return Ok(restored);
            };
            until = before;
        }
        Ok(None)
    }

    /// The oldest valid checkpoint at or after `from` that `restore` accepts.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn oldest<T>(
        &self,
        from: Sequence,
        mut restore: impl FnMut(Sequence, &AlignedVec) -> Result<T, String>,
    ) -> io::Result<Option<T>> {
        let mut sequences = self.snapshots.sequences()?;
        sequences.retain(|sequence| *sequence >= from.get());
        for sequence in sequences {
            let found = self.snapshots.newest(sequence)?;
            let found = found.filter(|found| found.sequence == sequence);
            if let Some(state) = found.and_then(|found| try_restore(found, &mut restore)) {
                return Ok(Some(state));
            }
        }
        Ok(None)
    }

    /// Sequence of the newest valid checkpoint; [`Sequence::ZERO`] if there is none.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn newest_sequence(&self) -> io::Result<Sequence> {
        // Not `is_good`, which returns false for a whole file if there is no file descriptor.
        let newest = self.snapshots.newest(u64::MAX)?;
        Ok(newest.map_or(Sequence::ZERO, |found| Sequence(found.sequence)))
    }
}

/// Restores the state of a file; `None`, with a warning, if `restore` returns an error.
fn try_restore<T>(
    found: Snapshot,
    restore: &mut impl FnMut(Sequence, &AlignedVec) -> Result<T, String>,
) -> Option<T> {
    // rkyv reads an archive in place and needs its alignment.
    let mut payload = AlignedVec::with_capacity(found.payload.len());
    payload.extend_from_slice(&found.payload);
    let state = restore(Sequence(found.sequence), &payload);
    state
        .inspect_err(|reason| {
            let sequence = found.sequence;
            tracing::warn!(
                reason,
                sequence,
                "checkpoint skipped: it cannot be restored"
            );
        })
        .ok()
}

/// Writes a reader's checkpoints when they are due, one at a time, on a thread of low priority.
pub struct CheckpointKeeper {
    reader: &'static str,
    config: SnapshotConfig,
    snapshots: Snapshots,
    /// Sequence of the last checkpoint.
    saved: Sequence,
    /// When the last write began.
    saved_at: Instant,
    /// When the last write failed, if it did.
    failed_at: Option<Instant>,
    usable: UsableCheckpoints,
    writing: Option<JoinHandle<Option<Sequence>>>,
}

impl CheckpointKeeper {
    /// `saved` is the sequence of the reader's last checkpoint. New ones are added to `usable`.
    pub fn new(
        reader: &'static str,
        dir: &Path,
        config: SnapshotConfig,
        saved: Sequence,
        usable: UsableCheckpoints,
    ) -> Self {
        Self {
            reader,
            snapshots: Snapshots::new(dir).with_kept(config.kept),
            config,
            saved,
            saved_at: Instant::now(),
            failed_at: None,
            usable,
            writing: None,
        }
    }

    /// Sequence of the newest checkpoint that is known to be written.
    pub fn saved(&self) -> Sequence {
        self.saved
    }

    /// True when a checkpoint at `position` is due; false while a write runs.
    ///
    /// A failed write is due again after ten seconds, or after [`SnapshotConfig::every`] if that is
    /// shorter.
    pub fn is_due(&mut self, position: Sequence) -> bool {
        if self.writing.as_ref().is_some_and(|w| !w.is_finished()) {
            return false;
        }
        self.finish();
        let new = position.get().saturating_sub(self.saved.get());
        if let Some(failed_at) = self.failed_at {
            return new > 0 && failed_at.elapsed() >= RETRY.min(self.config.every);
        }
        new >= self.config.every_commands
            || (new > 0 && self.saved_at.elapsed() >= self.config.every)
    }

    /// Writes the state at `position` on a new thread.
    ///
    /// A failure is logged and retried when the next checkpoint is due. Once the checkpoint is
    /// durable, older ones are removed. The newest valid ones stay, as many as configured, and
    /// others at growing distances, back to the beginning of the journal. `removed_through` returns
    /// the last record that was removed from the journal.
    pub fn write(
        &mut self,
        position: Sequence,
        removed_through: impl FnOnce() -> io::Result<Sequence> + Send + 'static,
        encode: impl FnOnce() -> Result<AlignedVec, RkyvError> + Send + 'static,
    ) {
        self.finish();
        self.saved_at = Instant::now();
        let (reader, snapshots) = (self.reader, self.snapshots.clone());
        let usable = self.usable.clone();
        let followers = self.config.followers.clone();
        let started = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || {
                priority::lower(priority::WRITING_CHECKPOINTS);
                let written = write(reader, &snapshots, &usable, position, encode);
                if written.is_some() {
                    let needed: Vec<u64> = followers.iter().map(Durable::through).collect();
                    let first = removed_through();
                    thin(reader, &snapshots, &usable, position, first, &needed);
                }
                written
            });
        match started {
            Ok(writing) => self.writing = Some(writing),
            Err(error) => {
                tracing::error!(%error, reader, "cannot start a thread to write the checkpoint; retried later");
                self.failed_at = Some(Instant::now());
            }
        }
    }

    /// Waits for the running write, if there is one.
    fn finish(&mut self) {
        if let Some(writing) = self.writing.take() {
            let written = writing.join().unwrap_or_else(|_| {
                tracing::error!(reader = self.reader, "the checkpoint thread panicked");
                None
            });
            self.failed_at = written.is_none().then(Instant::now);
            self.saved = written.unwrap_or(self.saved);
        }
    }
}

impl Drop for CheckpointKeeper {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Writes a checkpoint. Returns its position once it is durable, `None` after a failure.
fn write(
    reader: &'static str,
    snapshots: &Snapshots,
    usable: &UsableCheckpoints,
    position: Sequence,
    encode: impl FnOnce() -> Result<AlignedVec, RkyvError>,
) -> Option<Sequence> {
    let began = Instant::now();
    let written = encode()
        .map_err(|error| error.to_string())
        .and_then(|bytes| match snapshots.write(position.get(), &bytes) {
            Ok(_) => Ok(bytes.len()),
            Err(error) => Err(error.to_string()),
        });
    let bytes = match written {
        Ok(bytes) => bytes,
        Err(error) => {
            tracing::error!(error, reader, "checkpoint not written; retried later");
            metrics::counter!("checkpoint_failures_total", "reader" => reader).increment(1);
            return None;
        }
    };
    usable.insert(position);
    metrics::counter!("checkpoints_total", "reader" => reader).increment(1);
    metrics::gauge!("checkpoint_sequence", "reader" => reader).set(position.get() as f64);
    tracing::info!(
        reader,
        sequence = position.get(),
        bytes,
        seconds = began.elapsed().as_secs_f64(),
        "checkpoint written"
    );
    Some(position)
}

/// Removes older checkpoints; see [`Snapshots::thin`].
fn thin(
    reader: &'static str,
    snapshots: &Snapshots,
    usable: &UsableCheckpoints,
    position: Sequence,
    first: io::Result<Sequence>,
    needed: &[u64],
) {
    let _held = usable.lock_removal();
    let is_usable = |sequence| usable.contains(sequence);
    let first = first.map(Sequence::get);
    match first.and_then(|first| snapshots.thin(position.get(), first, needed, is_usable)) {
        Ok(removed) => usable.remove(&removed),
        // Retried after the next checkpoint.
        Err(error) => tracing::warn!(%error, reader, "older checkpoints could not be removed"),
    }
}
