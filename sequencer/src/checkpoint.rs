//! Checkpoints of those who read the journal: a reader's own state at one of its records, so that a start reads on from there instead of from the first
//! record. The bytes are the reader's; file format and folder are those of snapshots ([`journal::snapshot`]).
//!
//! Invariants: a checkpoint says nothing that the journal up to its record did not say, so that one from it and the records behind it is the state from the first record; it
//! is written by a thread of its own, never by the hot thread; one that does not check or restore is passed over for the one before it.

use std::io;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Instant;

use journal::Snapshots;
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use types::Sequence;

use crate::snapshots::{SnapshotConfig, lower_priority};

/// Why a reader cannot go on from its checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("checkpoints: {0}")]
    Io(#[from] io::Error),
    #[error(
        "a checkpoint stands at {checkpoint}, the journal ends at {journal}: durable records are missing; restore the journal from a copy"
    )]
    Ahead {
        checkpoint: Sequence,
        journal: Sequence,
    },
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

    /// The newest one at or before `until` that checks and that `restore` takes; a reason from it passes the checkpoint over with a warning.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn newest<T>(
        &self,
        until: Sequence,
        mut restore: impl FnMut(Sequence, &AlignedVec) -> Result<T, String>,
    ) -> io::Result<Option<T>> {
        let mut until = until.get();
        while let Some(found) = self.snapshots.newest(until)? {
            // Archives are read where they lie, at the alignment they were made for.
            let mut payload = AlignedVec::with_capacity(found.payload.len());
            payload.extend_from_slice(&found.payload);
            match restore(Sequence(found.sequence), &payload) {
                Ok(state) => return Ok(Some(state)),
                Err(reason) => tracing::warn!(
                    reason,
                    sequence = found.sequence,
                    "a saved state was passed over"
                ),
            }
            let Some(before) = found.sequence.checked_sub(1) else {
                break;
            };
            until = before;
        }
        Ok(None)
    }

    /// Makes sure that no checkpoint says more than the journal, which ends at `end`: what will be journalled there is something else.
    ///
    /// # Errors
    /// [`CheckpointError::Ahead`].
    pub fn refuse_ahead(&self, end: Sequence) -> Result<(), CheckpointError> {
        let newest = self.snapshots.newest(u64::MAX)?;
        match newest.map(|newest| Sequence(newest.sequence)) {
            Some(checkpoint) if checkpoint > end => Err(CheckpointError::Ahead {
                checkpoint,
                journal: end,
            }),
            _ => Ok(()),
        }
    }
}

/// Which older checkpoints stay when one was written.
#[derive(Clone, Copy, Debug)]
pub enum Older {
    /// So many good ones as the settings say.
    Few,
    /// These and, the further back the fewer, some at or behind the record given: for a reader who is asked about the past.
    Past(Sequence),
}

/// Writes a reader's checkpoints when they are due, one at a time, on a thread of low priority.
pub struct CheckpointKeeper {
    reader: &'static str,
    config: SnapshotConfig,
    snapshots: Snapshots,
    /// Where the last one stands, and when it was begun.
    saved: Sequence,
    saved_at: Instant,
    writing: Option<JoinHandle<Option<Sequence>>>,
}

impl CheckpointKeeper {
    /// For the reader of that name, whose state was last written at `saved`.
    pub fn new(reader: &'static str, dir: &Path, config: SnapshotConfig, saved: Sequence) -> Self {
        Self {
            reader,
            snapshots: Snapshots::new(dir).keep(config.kept),
            config,
            saved,
            saved_at: Instant::now(),
            writing: None,
        }
    }

    /// Whether the state at `position` should be written now; not while one is being written.
    pub fn is_due(&mut self, position: Sequence) -> bool {
        if self.writing.as_ref().is_some_and(|w| !w.is_finished()) {
            return false;
        }
        self.finish();
        let new = position.get().saturating_sub(self.saved.get());
        new >= self.config.every_commands
            || (new > 0 && self.saved_at.elapsed() >= self.config.every)
    }

    /// Writes the state at `position`. What fails is said aloud and tried again when the next one is due.
    pub fn write(
        &mut self,
        position: Sequence,
        older: Older,
        encode: impl FnOnce() -> Result<AlignedVec, RkyvError> + Send + 'static,
    ) {
        self.finish();
        self.saved_at = Instant::now();
        let (reader, snapshots) = (self.reader, self.snapshots.clone());
        let started = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || {
                lower_priority();
                write(reader, &snapshots, position, older, encode)
            });
        match started {
            Ok(writing) => self.writing = Some(writing),
            Err(error) => tracing::error!(%error, reader, "no checkpoint was written"),
        }
    }

    /// Waits for the one that is being written.
    fn finish(&mut self) {
        if let Some(writing) = self.writing.take() {
            match writing.join() {
                Ok(Some(saved)) => self.saved = saved,
                Ok(None) => {}
                Err(_) => tracing::error!(reader = self.reader, "a checkpoint ended with a panic"),
            }
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
    position: Sequence,
    older: Older,
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
    metrics::counter!("checkpoints_total", "reader" => reader).increment(1);
    metrics::gauge!("checkpoint_sequence", "reader" => reader).set(position.get() as f64);
    tracing::info!(
        reader,
        sequence = position.get(),
        bytes,
        seconds = began.elapsed().as_secs_f64(),
        "a checkpoint is written"
    );
    let removed = match older {
        Older::Few => snapshots.prune(position.get()),
        Older::Past(first) => snapshots.thin(position.get(), first.get()),
    };
    // The new one is there: what cannot be removed now is removed another time.
    if let Err(error) = removed {
        tracing::warn!(%error, reader, "older checkpoints stay");
    }
    Some(position)
}
