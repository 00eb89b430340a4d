//! Recovery: applies the journalled commands again and compares every event with the journal's.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use journal::{FileStorage, Frame, Journal, JournalError, Storage};
use types::Sequence;

use crate::checkpoint::CheckpointError;
use crate::core::Core;
use crate::image::{self, ImageError};
use crate::record::RecordBuilder;

/// Why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(
        "the newest snapshot is at {snapshot}, but the journal ends at {journal}: durable records \
         are missing; restore the journal from a backup"
    )]
    SnapshotAhead {
        snapshot: Sequence,
        journal: Sequence,
    },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{} is in use by another process", .0.display())]
    InUse(PathBuf),
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// Applies records and compares their events.
pub(crate) struct Replay {
    pub core: Core,
    records: RecordBuilder,
    /// Sequence of the core at the start: records up to it are skipped.
    from: Sequence,
    until: Option<Sequence>,
}

impl Replay {
    pub fn new(core: Core, until: Option<Sequence>) -> Self {
        Self {
            from: core.sequence(),
            core,
            records: RecordBuilder::default(),
            until,
        }
    }

    /// Adds a frame; applies the record that it completes.
    ///
    /// # Errors
    /// The journal has a gap, or its events differ from those computed now.
    pub fn frame(&mut self, frame: &Frame) -> Result<(), String> {
        let is_past = self.until.is_some_and(|until| frame.sequence > until.get());
        if is_past || frame.sequence <= self.from.get() {
            return Ok(());
        }
        let Some(record) = self.records.add(frame)? else {
            return Ok(());
        };
        let (sequence, before) = (record.command.sequence, self.core.sequence());
        if sequence != before.next() {
            return Err(format!("command {sequence} does not follow {before}"));
        }
        let (then, now) = (&record.events, self.core.apply(&record.command));
        let same = then.iter().zip(now).take_while(|(then, now)| then == now);
        let same = same.count();
        if let Some(event) = then.get(same) {
            return Err(format!(
                "command {sequence} caused {event:?} when it was journalled and causes {:?} now",
                now.get(same)
            ));
        }
        if same < now.len() {
            return Err(format!(
                "command {sequence} caused {same} events when it was journalled and causes {} now",
                now.len()
            ));
        }
        Ok(())
    }
}

/// Opens the journal and applies its records to the core, which is empty or from a snapshot.
///
/// The journal is known to have been durable up to `reach`.
pub(crate) fn open(
    storage: Arc<dyn Storage>,
    config: journal::Config,
    core: Core,
    reach: Sequence,
) -> Result<(Journal, Core), StartError> {
    let mut replay = Replay::new(core, None);
    let (after, reach) = (replay.from, reach.get());
    let opened = Journal::open_reaching(storage, config, after.get(), reach, |frame| {
        replay.frame(frame)
    });
    let journal = opened.map_err(|error| match error {
        JournalError::Lost { end, after: lacks } if lacks == after.get() => {
            StartError::SnapshotAhead {
                snapshot: after,
                journal: Sequence(end),
            }
        }
        JournalError::Lost { end, after: lacks } => CheckpointError::Ahead {
            known: Sequence(lacks),
            journal: Sequence(end),
        }
        .into(),
        error => error.into(),
    })?;
    Ok((journal, replay.core))
}

/// The state after command `until` (or at the end) of the journal in `dir`.
///
/// Starts at the first record, or at the newest snapshot in `dir/snapshots` at or before `until` if
/// records were removed. Compares every event. Only reads: the end of a journal in use may look
/// damaged.
///
/// # Errors
/// [`StartError`]: the journal is damaged, its events differ from those computed now, or it begins
/// after every snapshot.
pub fn replay(dir: &Path, until: Option<Sequence>) -> Result<Core, StartError> {
    let storage = FileStorage::read_only(dir).map_err(JournalError::Io)?;
    let limits = crate::limits::limits();
    let core = if journal::removed_through(&storage)? == 0 {
        None
    } else {
        let until = until.unwrap_or(Sequence(u64::MAX));
        image::load(&dir.join("snapshots"), until, limits)?
    };
    let mut replay = Replay::new(core.unwrap_or_else(|| Core::new(limits)), until);
    let after = replay.from.get();
    let end = journal::visit_frames_after(&storage, after, |frame| replay.frame(frame))?;
    if end < after {
        return Err(StartError::SnapshotAhead {
            snapshot: Sequence(after),
            journal: Sequence(end),
        });
    }
    Ok(replay.core)
}

/// Locks `dir` for this process while the returned file is open.
pub(crate) fn lock(dir: &Path) -> Result<std::fs::File, StartError> {
    journal::make_folder(dir).map_err(JournalError::Io)?;
    let file = std::fs::File::create(dir.join("lock")).map_err(JournalError::Io)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(StartError::InUse(dir.to_path_buf())),
        Err(std::fs::TryLockError::Error(error)) => Err(JournalError::Io(error).into()),
    }
}
