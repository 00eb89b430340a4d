//! Checkpoints of those who read the journal: a reader's own state at one of its records, so that a start reads
//! on from there instead of from the first record. The bytes are the reader's; file format and folder are those
//! of snapshots ([`journal::snapshot`]).
//!
//! Invariants: a checkpoint says nothing that the journal up to its record did not say, so that one from it and
//! the records behind it is the state from the first record; it is written by a thread of its own, never by the
//! hot thread; one that does not check or restore is passed over for the one before it.

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

/// Pause after a checkpoint that could not be written.
const RETRY: Duration = Duration::from_secs(10);

/// When a checkpoint is made and what is kept.
#[derive(Clone, Debug)]
pub struct SnapshotConfig {
    /// Commands from one checkpoint to the next: what a restart replays at most.
    pub every_commands: u64,
    /// Time from one checkpoint to the next, if there was any command.
    pub every: Duration,
    /// Good checkpoints kept, 2 at least.
    pub kept: usize,
    /// Who may have to go on from where it stands: the newest checkpoint at or before that is kept.
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

/// The states of one reader that this process has gone on from or has written: a start can use them. What else
/// lies in a folder may be of another version, or ahead of a database that was put back from a copy.
#[derive(Clone, Debug, Default)]
pub struct Proven(Arc<Files>);

#[derive(Debug, Default)]
struct Files {
    proven: Mutex<BTreeSet<u64>>,
    /// Held while files are removed, or counted on while segments are.
    removal: Mutex<()>,
}

impl Proven {
    /// A start can go on from the state at `sequence`.
    pub fn note(&self, sequence: Sequence) {
        self.lock().insert(sequence.get());
    }

    pub(crate) fn has(&self, sequence: u64) -> bool {
        self.lock().contains(&sequence)
    }

    /// These were removed.
    pub(crate) fn forget(&self, sequences: &[u64]) {
        self.lock().retain(|sequence| !sequences.contains(sequence));
    }

    /// What the reader has on disk stays as long as this is held.
    pub(crate) fn hold(&self) -> MutexGuard<'_, ()> {
        self.0
            .removal
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.proven.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a reader cannot go on from its checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("checkpoints: {0}")]
    Io(#[from] io::Error),
    #[error(
        "a state behind the journal stands at {known}, the journal ends at {journal}: durable records are missing; restore the journal from a copy"
    )]
    Ahead { known: Sequence, journal: Sequence },
}

impl CheckpointError {
    /// No file descriptor: the same call may be made again.
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

    /// The newest one at or before `until` that checks and that `restore` takes. `restore` passes a
    /// checkpoint over with `None`; with a reason, which is logged as a warning.
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
            let restored = restored(found, &mut restore).flatten();
            let (None, Some(before)) = (&restored, sequence.checked_sub(1)) else {
                return Ok(restored);
            };
            until = before;
        }
        Ok(None)
    }

    /// The oldest one at or behind `from` that checks and that `restore` takes.
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
            if let Some(state) = found.and_then(|found| restored(found, &mut restore)) {
                return Ok(Some(state));
            }
        }
        Ok(None)
    }

    /// Where the newest one that checks stands; [`Sequence::ZERO`] without.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn end(&self) -> io::Result<Sequence> {
        // Not by `is_good`, which takes one that no descriptor was left for as damaged.
        let newest = self.snapshots.newest(u64::MAX)?;
        Ok(newest.map_or(Sequence::ZERO, |found| Sequence(found.sequence)))
    }
}

/// The state of a file; `None`, with a warning, when `restore` does not take it.
fn restored<T>(
    found: Snapshot,
    restore: &mut impl FnMut(Sequence, &AlignedVec) -> Result<T, String>,
) -> Option<T> {
    // Archives are read where they lie, at the alignment they were made for.
    let mut payload = AlignedVec::with_capacity(found.payload.len());
    payload.extend_from_slice(&found.payload);
    let state = restore(Sequence(found.sequence), &payload);
    state
        .inspect_err(|reason| {
            let sequence = found.sequence;
            tracing::warn!(reason, sequence, "a saved state was passed over");
        })
        .ok()
}

/// Writes a reader's checkpoints when they are due, one at a time, on a thread of low priority.
pub struct CheckpointKeeper {
    reader: &'static str,
    config: SnapshotConfig,
    snapshots: Snapshots,
    /// Where the last one stands, and when it was begun.
    saved: Sequence,
    saved_at: Instant,
    /// When the last one failed, if it did.
    failed_at: Option<Instant>,
    proven: Proven,
    writing: Option<JoinHandle<Option<Sequence>>>,
}

impl CheckpointKeeper {
    /// For the reader of that name, whose state was last written at `saved`. What is written is noted in `proven`.
    pub fn new(
        reader: &'static str,
        dir: &Path,
        config: SnapshotConfig,
        saved: Sequence,
        proven: Proven,
    ) -> Self {
        Self {
            reader,
            snapshots: Snapshots::new(dir).keep(config.kept),
            config,
            saved,
            saved_at: Instant::now(),
            failed_at: None,
            proven,
            writing: None,
        }
    }

    /// Where the newest one stands that is known to be written.
    pub fn saved(&self) -> Sequence {
        self.saved
    }

    /// Whether the state at `position` should be written now; not while one is being written. One that failed
    /// is tried again after ten seconds, or sooner where one is due more often.
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

    /// Writes the state at `position`. A failure is logged, and retried when the next one is due.
    /// `removed_through` returns the last record that has left the journal, and is called when the
    /// checkpoint is durable. Of older checkpoints stay the newest good ones, as many as the settings
    /// say, and, the further back the fewer, some from where the journal begins.
    pub fn write(
        &mut self,
        position: Sequence,
        removed_through: impl FnOnce() -> io::Result<Sequence> + Send + 'static,
        encode: impl FnOnce() -> Result<AlignedVec, RkyvError> + Send + 'static,
    ) {
        self.finish();
        self.saved_at = Instant::now();
        let (reader, snapshots) = (self.reader, self.snapshots.clone());
        let proven = self.proven.clone();
        let followers = self.config.followers.clone();
        let started = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || {
                priority::lower(priority::WRITING_CHECKPOINTS);
                let written = write(reader, &snapshots, &proven, position, encode);
                if written.is_some() {
                    let needed: Vec<u64> = followers.iter().map(Durable::through).collect();
                    let first = removed_through();
                    thin(reader, &snapshots, &proven, position, first, &needed);
                }
                written
            });
        match started {
            Ok(writing) => self.writing = Some(writing),
            Err(error) => {
                tracing::error!(%error, reader, "no checkpoint was written; tried again later");
                self.failed_at = Some(Instant::now());
            }
        }
    }

    /// Waits for the one that is being written.
    fn finish(&mut self) {
        if let Some(writing) = self.writing.take() {
            let written = writing.join().unwrap_or_else(|_| {
                tracing::error!(reader = self.reader, "a checkpoint ended with a panic");
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

/// Gives the position once it is durable.
fn write(
    reader: &'static str,
    snapshots: &Snapshots,
    proven: &Proven,
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
            tracing::error!(
                error,
                reader,
                "no checkpoint was written; tried again later"
            );
            metrics::counter!("checkpoint_failures_total", "reader" => reader).increment(1);
            return None;
        }
    };
    proven.note(position);
    metrics::counter!("checkpoints_total", "reader" => reader).increment(1);
    metrics::gauge!("checkpoint_sequence", "reader" => reader).set(position.get() as f64);
    tracing::info!(
        reader,
        sequence = position.get(),
        bytes,
        seconds = began.elapsed().as_secs_f64(),
        "a checkpoint is written"
    );
    Some(position)
}

/// Removes older checkpoints.
fn thin(
    reader: &'static str,
    snapshots: &Snapshots,
    proven: &Proven,
    position: Sequence,
    first: io::Result<Sequence>,
    needed: &[u64],
) {
    let _held = proven.hold();
    let is_of_use = |sequence| proven.has(sequence);
    let first = first.map(Sequence::get);
    match first.and_then(|first| snapshots.thin(position.get(), first, needed, is_of_use)) {
        Ok(removed) => proven.forget(&removed),
        // The new one is there: what cannot be removed now is removed another time.
        Err(error) => tracing::warn!(%error, reader, "older checkpoints stay"),
    }
}
