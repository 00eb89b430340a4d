//! A journal with a live replica and without a node: a test appends the records.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use journal::{Appender, FileStorage, Journal};
use replica::{LiveReplica, Replica, ReplicaError};
use sequencer::{
    Backlog, Checkpoints, Config, Reader, ReplicaParts, SnapshotConfig, Volatile, record,
};
use types::Sequence;

use super::{Record, bounds, node};

/// Commands per checkpoint.
pub const CHECKPOINT_COMMANDS: u64 = 20;

pub struct Journalled {
    live: LiveReplica,
    appender: Mutex<Appender>,
    /// Replaces the hot thread, whose port the replica uses.
    _node: Volatile,
    journal: Journal,
}

/// Each record is one write and fills one block, so a segment has sixteen records.
fn open(folder: &Path) -> Journal {
    let storage = FileStorage::new(&folder.join("journal"), false).unwrap();
    let config = journal::Config {
        segment_bytes: 64 << 10,
        pending_bytes_max: 1 << 20,
        recent_bytes: 64 << 10,
    };
    let removed = journal::removed_through(&storage).unwrap();
    Journal::open_after(Arc::new(storage), config, removed, |_| Ok(())).unwrap()
}

impl Journalled {
    /// Opens a folder with or without data. Blocks while the replica reads its checkpoint.
    pub fn open(folder: &Path, backlog: Arc<Backlog>) -> Result<Self, ReplicaError> {
        let journal = open(folder);
        let volatile = Volatile::start(Config::new(folder), backlog.clone()).unwrap();
        let parts = ReplicaParts {
            reader: Reader::new(journal.reader(0)),
            dir: folder.join("snapshots"),
            limits: bounds(),
            usable: Default::default(),
            port: volatile.port(),
            stats: volatile.stats().clone(),
            backlog,
        };
        let checkpoints = SnapshotConfig {
            every_commands: CHECKPOINT_COMMANDS,
            every: Duration::from_secs(3_600),
            ..SnapshotConfig::default()
        };
        Ok(Self {
            live: LiveReplica::start(node(), parts, Some(checkpoints))?,
            appender: Mutex::new(journal.appender()),
            _node: volatile,
            journal,
        })
    }

    pub fn replica(&self) -> Replica {
        self.live.replica()
    }

    /// Appends the missing records and waits until they are durable.
    pub fn feed(&self, records: &[Record]) {
        let mut appender = self.appender.lock().unwrap();
        let commit = self.journal.commit();
        for record in records {
            let sequence = record.command.sequence.get();
            if sequence > commit.position() {
                record::append(&mut appender, &record.command, &record.events);
                appender.flush();
            }
            let deadline = Instant::now() + testkit::PATIENCE;
            while commit.position() < sequence {
                assert!(Instant::now() < deadline, "{sequence} is not durable");
                std::thread::yield_now();
            }
        }
    }
}

/// Removes segments whose records are all at or before `through`; returns the last record removed.
pub fn truncate(folder: &Path, through: Sequence) -> Sequence {
    let journal = open(folder);
    let truncator = journal.truncator();
    truncator.remove(through.get()).unwrap();
    Sequence(truncator.removed_through().unwrap())
}

/// Sequences of the valid checkpoints, oldest first.
pub fn checkpoints(folder: &Path) -> Vec<Sequence> {
    let checkpoints = Checkpoints::new(&folder.join("snapshots"));
    let mut found = Vec::new();
    let mut until = Sequence(u64::MAX);
    while let Some(at) = checkpoints.newest(until, |at, _| Ok(Some(at))).unwrap() {
        found.insert(0, at);
        until = Sequence(at.get() - 1);
    }
    found
}
