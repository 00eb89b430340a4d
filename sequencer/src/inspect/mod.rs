//! Offline inspection of a journal: the output of `platform journal`, as values and as JSON.
//!
//! Only reads. The end of a journal that a running node writes may look damaged: retry, or inspect
//! a copy. [`Folder::follow`] is for a running node.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::Book;
use journal::{FileStorage, Follower, Frame, FrameKind, JournalError, SegmentInfo, Snapshots};
use serde::Serialize;
use types::{Phase, Sequence, Side};

use crate::core::Core;
use crate::image::{self, ImageError};
use crate::record::{Record, RecordBuilder};
use crate::recover::{self, Replay, StartError, replay};

mod text;

/// Why a journal cannot be inspected.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the journal ends at {end}; there is no state at {until}")]
    Beyond { until: Sequence, end: Sequence },
}

/// The folder of a journal, with its snapshots in `snapshots` below it.
pub struct Folder {
    dir: PathBuf,
}

/// Contents of the folder.
#[derive(Debug, Serialize)]
pub struct Listing {
    pub segments: Vec<SegmentLine>,
    pub snapshots: Vec<SnapshotLine>,
}

/// One segment.
#[derive(Debug, Serialize)]
pub struct SegmentLine {
    pub number: u64,
    pub file: String,
    /// Size of the file.
    pub bytes: u64,
    /// Bytes used by batches.
    pub used_bytes: u64,
    /// Number of writes.
    pub batches: u64,
    /// `null` while the segment is empty.
    pub first: Option<u64>,
    pub last: Option<u64>,
}

/// One snapshot.
#[derive(Debug, Serialize)]
pub struct SnapshotLine {
    pub sequence: u64,
    /// True when the checksum matches.
    pub is_whole: bool,
}

/// Result of [`Folder::verify`].
#[derive(Debug, Default, Serialize)]
pub struct Verified {
    pub segments: usize,
    pub commands: u64,
    pub events: u64,
    /// First command present.
    pub first: u64,
    /// Last command present.
    pub last: u64,
    /// The events of the commands after this one were computed again and compared. `null`: the
    /// journal's beginning was removed and no snapshot replaces it, so only the chain was checked.
    pub compared_after: Option<u64>,
    pub trades: u64,
    /// Hexadecimal.
    pub state_hash: String,
    /// Snapshots that restore. Those after `compared_after` equal the state of the journal.
    pub snapshots: Vec<u64>,
    /// Snapshots that are damaged or do not restore: a start skips them.
    pub bad_snapshots: Vec<u64>,
    /// File and offset of a torn tail, which the next start truncates.
    pub torn_tail: Option<(String, u64)>,
}

/// The state at one sequence.
#[derive(Debug, Serialize)]
pub struct State {
    pub sequence: u64,
    pub time_ns: u64,
    pub trades: u64,
    /// Hexadecimal.
    pub state_hash: String,
    pub books: Vec<BookState>,
}

/// One book, best prices first.
#[derive(Debug, Serialize)]
pub struct BookState {
    pub instrument: String,
    pub phase: Phase,
    pub orders: u32,
    /// Hexadecimal.
    pub state_hash: String,
    pub bids: Vec<Level>,
    pub asks: Vec<Level>,
}

/// One price level.
#[derive(Debug, Serialize)]
pub struct Level {
    pub price: String,
    pub quantity: String,
    pub orders: usize,
}

/// A snapshot that was written.
#[derive(Debug, Serialize)]
pub struct Written {
    pub sequence: u64,
    /// Hexadecimal.
    pub state_hash: String,
    pub bytes: usize,
}

impl Folder {
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_path_buf(),
        }
    }

    fn storage(&self) -> Result<FileStorage, JournalError> {
        Ok(FileStorage::read_only(&self.dir)?)
    }

    fn snapshots(&self) -> Snapshots {
        Snapshots::new(&self.snapshot_dir())
    }

    /// Lists segments and snapshots by their own metadata; records are not checked.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn list(&self) -> Result<Listing, InspectError> {
        let segments = journal::list(&self.storage()?)?;
        let snapshots = self.snapshots();
        let good = snapshots.good().map_err(JournalError::Io)?;
        let all = snapshots.sequences().map_err(JournalError::Io)?;
        Ok(Listing {
            segments: segments.into_iter().map(SegmentLine::from).collect(),
            snapshots: all
                .into_iter()
                .map(|sequence| SnapshotLine {
                    sequence,
                    is_whole: good.contains(&sequence),
                })
                .collect(),
        })
    }

    /// Checks checksums, chain and sequences. Computes every event again and compares it with the
    /// journalled one. Compares the state with each snapshot on the way.
    ///
    /// # Errors
    /// The first check that fails, with file and offset.
    pub fn verify(&self) -> Result<Verified, InspectError> {
        let storage = self.storage()?;
        let limits = crate::limits::limits();
        let removed = journal::removed_through(&storage)?;
        let (mut start, mut hashes) = (None, BTreeMap::new());
        let mut verified = Verified::default();
        for sequence in self.snapshots().sequences().map_err(JournalError::Io)? {
            match image::load(&self.dir.join("snapshots"), Sequence(sequence), limits)? {
                Some(core) if core.sequence().get() == sequence => {
                    hashes.insert(sequence, core.state_hash());
                    verified.snapshots.push(sequence);
                    if start.is_none() && sequence >= removed {
                        start = Some(core);
                    }
                }
                _ => verified.bad_snapshots.push(sequence),
            }
        }
        if removed == 0 {
            start = Some(Core::new(limits));
        }
        verified.compared_after = start.as_ref().map(|core| core.sequence().get());
        let mut replay = start.map(|core| Replay::new(core, None));
        let checked = journal::check(&storage, |frame| {
            verified.count(frame);
            let Some(replay) = &mut replay else {
                return Ok(());
            };
            replay.frame(frame)?;
            let sequence = replay.core.sequence().get();
            if frame.unit_end
                && frame.sequence == sequence
                && let Some(hash) = hashes.get(&sequence)
                && *hash != replay.core.state_hash()
            {
                return Err(format!(
                    "the snapshot at {sequence} differs from the state that the journal produces"
                ));
            }
            Ok(())
        })?;
        let end = Sequence(checked.sequence);
        if let Some(snapshot) = verified.snapshots.last().map(|last| Sequence(*last))
            && snapshot > end
        {
            return Err(StartError::SnapshotAhead {
                snapshot,
                journal: end,
            }
            .into());
        }
        verified.segments = journal::list(&storage)?.len();
        verified.torn_tail = checked.torn;
        if let Some(replay) = replay {
            verified.trades = replay.core.trades();
            verified.state_hash = hex(replay.core.state_hash());
        }
        Ok(verified)
    }

    /// The first command present.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn first(&self) -> Result<u64, InspectError> {
        Ok(journal::removed_through(&self.storage()?)? + 1)
    }

    /// Passes every record in `range` to `visit`, in order; returns the journal's last sequence.
    ///
    /// # Errors
    /// The journal is damaged, the first record of `range` was removed, or `visit` fails.
    pub fn dump(
        &self,
        range: RangeInclusive<u64>,
        mut visit: impl FnMut(Record) -> Result<(), String>,
    ) -> Result<Sequence, InspectError> {
        let mut records = RecordBuilder::default();
        let after = range.start().saturating_sub(1);
        let end = journal::visit_frames_after(&self.storage()?, after, |frame| {
            if !range.contains(&frame.sequence) {
                return Ok(());
            }
            let record = records.add(frame)?.map(Record::take);
            record.map_or(Ok(()), &mut visit)
        })?;
        Ok(Sequence(end))
    }

    /// As [`Folder::dump`] for a running node: passes records to `visit` as they become durable.
    ///
    /// Ends at the end of `range`. At the journal's current end it calls `wait`, which sleeps and
    /// returns false to stop. The node's last batch is passed on only when the next one follows,
    /// which proves it durable.
    ///
    /// # Errors
    /// The journal is damaged, the first record of `range` was removed, or `visit` fails.
    pub fn follow(
        &self,
        range: RangeInclusive<u64>,
        mut visit: impl FnMut(Record) -> Result<(), String>,
        mut wait: impl FnMut() -> bool,
    ) -> Result<(), InspectError> {
        let mut records = RecordBuilder::default();
        let after = range.start().saturating_sub(1);
        let mut follower = Follower::new(Arc::new(self.storage()?), after);
        loop {
            let Some(frame) = follower.try_next()? else {
                match wait() {
                    true => continue,
                    false => return Ok(()),
                }
            };
            if frame.sequence > *range.end() {
                return Ok(());
            }
            let at = |reason| JournalError::Content {
                file: self.dir.display().to_string(),
                offset: 0,
                reason,
            };
            let reason = |reason| at(format!("record {}: {reason}", frame.sequence));
            if let Some(record) = records.add(&frame).map_err(reason)? {
                let is_last = record.command.sequence.get() == *range.end();
                visit(record.take()).map_err(at)?;
                if is_last {
                    return Ok(());
                }
            }
        }
    }

    /// Books and state hash after command `until`, or at the end, with every event compared.
    ///
    /// # Errors
    /// As [`replay`]; [`InspectError::Beyond`].
    pub fn state(&self, until: Option<Sequence>) -> Result<State, InspectError> {
        let core = self.replay(until)?;
        Ok(State {
            sequence: core.sequence().get(),
            time_ns: core.time_ns(),
            trades: core.trades(),
            state_hash: hex(core.state_hash()),
            books: core.books().map(BookState::of).collect(),
        })
    }

    /// Locks the folder while the returned file is open, and syncs every segment.
    ///
    /// The sync is for checkpoints: one must not survive records that it contains.
    ///
    /// # Errors
    /// There is no journal, or a node runs in the folder.
    pub fn lock(&self) -> Result<std::fs::File, InspectError> {
        // Checked first: the lock would create the folder.
        drop(self.storage()?);
        let lock = recover::lock(&self.dir)?;
        sync_segments(&self.dir).map_err(JournalError::Io)?;
        Ok(lock)
    }

    /// Last record that was removed from the journal's beginning.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn removed_through(&self) -> Result<Sequence, InspectError> {
        Ok(Sequence(journal::removed_through(&self.storage()?)?))
    }

    /// Folder of the snapshots.
    pub fn snapshot_dir(&self) -> PathBuf {
        self.dir.join("snapshots")
    }

    fn replay(&self, until: Option<Sequence>) -> Result<Core, InspectError> {
        let core = replay(&self.dir, until)?;
        match until {
            Some(until) if core.sequence() < until => Err(InspectError::Beyond {
                until,
                end: core.sequence(),
            }),
            _ => Ok(core),
        }
    }
}

fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

impl From<SegmentInfo> for SegmentLine {
    fn from(info: SegmentInfo) -> Self {
        Self {
            number: info.number,
            file: info.name,
            bytes: info.bytes,
            used_bytes: info.used_bytes,
            batches: info.batches,
            first: info.sequences.map(|(first, _)| first),
            last: info.sequences.map(|(_, last)| last),
        }
    }
}

impl Verified {
    fn count(&mut self, frame: &Frame) {
        match frame.kind {
            FrameKind::Command => self.commands += 1,
            FrameKind::Event => self.events += 1,
        }
        if self.first == 0 {
            self.first = frame.sequence;
        }
        self.last = frame.sequence;
    }
}

impl BookState {
    fn of(book: &Book) -> Self {
        let spec = book.spec();
        let side = |side: Side| {
            let mut levels: Vec<Level> = Vec::new();
            let mut orders: BTreeMap<i64, usize> = BTreeMap::new();
            for order in book.orders(side) {
                *orders.entry(order.price.get()).or_default() += 1;
            }
            for level in book.depth(side) {
                levels.push(Level {
                    price: spec.price(level.price).to_string(),
                    quantity: spec.quantity(level.open).to_string(),
                    orders: orders.get(&level.price.get()).copied().unwrap_or_default(),
                });
            }
            levels
        };
        Self {
            instrument: spec.id.to_string(),
            phase: spec.phase,
            orders: book.resting(),
            state_hash: hex(book.state_hash()),
            bids: side(Side::Buy),
            asks: side(Side::Sell),
        }
    }
}

/// Syncs every segment in `dir`.
fn sync_segments(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            std::fs::File::open(path)?.sync_data()?;
        }
    }
    Ok(())
}
