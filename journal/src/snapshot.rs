//! Snapshots: the caller's state at one sequence as bytes, one file each, written atomically.
//!
//! ```text
//!  0            8              16           24        28        32
//!  | "XSNAP001" | sequence u64 | bytes u64  | crc u32 | zero    | payload |
//! ```
//!
//! `crc` is CRC-32C of the sequence, the length and the payload. A file is written under another
//! name, synced, and then renamed. A file with a bad checksum is skipped, and an older one is used.
//! A snapshot only saves replay time: the log is the source of truth.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::storage::{is_out_of_descriptors, make_folder};

const MAGIC: &[u8; 8] = b"XSNAP001";
const HEADER_BYTES: usize = 32;
/// Minimum number of snapshots kept: the newest, and one in case it is damaged.
const KEEP: usize = 2;
/// Bytes verified at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Number of files that this process has begun: part of their temporary names.
static WRITTEN: AtomicU64 = AtomicU64::new(0);
/// Time of this process's first write, in nanoseconds since the Unix epoch: part of temporary
/// names. A pid would not do, since in a container every process is pid 1.
static LIFE: LazyLock<u128> = LazyLock::new(|| {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos())
});

/// A snapshot read from disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Node sequence of the last command it includes.
    pub sequence: u64,
    pub payload: Vec<u8>,
}

/// Folder with the snapshots of one log.
#[derive(Clone, Debug)]
pub struct Snapshots {
    dir: PathBuf,
    kept: usize,
}

impl Snapshots {
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_path_buf(),
            kept: KEEP,
        }
    }

    /// Sets the number of snapshots to keep, at least 2.
    #[must_use]
    pub fn with_kept(self, kept: usize) -> Self {
        Self {
            kept: kept.max(KEEP),
            ..self
        }
    }

    /// Writes a snapshot, durable when it returns. Removes nothing: see [`Snapshots::prune`].
    ///
    /// # Errors
    /// The folder cannot be created or written.
    pub fn write(&self, sequence: u64, payload: &[u8]) -> io::Result<PathBuf> {
        make_folder(&self.dir)?;
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let half = format!("{sequence:020}-{}-{number}.part", *LIFE);
        let (half, path) = (self.dir.join(half), self.path(sequence));
        let written =
            write_file(&half, sequence, payload).and_then(|()| std::fs::rename(&half, &path));
        if written.is_err() {
            // The incomplete file may occupy the last free space. The caller gets the first error.
            drop(std::fs::remove_file(&half));
        }
        written?;
        File::open(&self.dir)?.sync_all()?;
        Ok(path)
    }

    /// Removes all but the newest good snapshots at or before `own`; returns the removed sequences.
    ///
    /// `own` is the snapshot that the caller has just written. Later ones are not touched. Bad
    /// snapshots and those that `is_usable` rejects do not count as good. Also removes incomplete
    /// files of earlier processes: only one process writes at a time.
    ///
    /// # Errors
    /// The folder cannot be read, or a file cannot be removed.
    pub fn prune(&self, own: u64, is_usable: impl Fn(u64) -> bool) -> io::Result<Vec<u64>> {
        let (_, older) = self.split(own, is_usable)?;
        self.remove(older)
    }

    /// As [`Snapshots::prune`], but keeps older snapshots at growing distances.
    ///
    /// A snapshot is removed if its older neighbour is at most twice as far from `own` as its newer
    /// one. A replay to any record then starts at most about twice as far back as that record. For
    /// each of the `needed` sequences the newest snapshot at or before it is kept. Snapshots before
    /// `first` are removed, since the log does not continue them.
    ///
    /// # Errors
    /// As [`Snapshots::prune`].
    pub fn thin(
        &self,
        own: u64,
        first: u64,
        needed: &[u64],
        is_usable: impl Fn(u64) -> bool,
    ) -> io::Result<Vec<u64>> {
        let (mut newer, older) = self.split(own, is_usable)?;
        let start_for = |needed: &u64| match newer <= *needed {
            true => None,
            false => older.iter().find(|sequence| *sequence <= needed),
        };
        let needed: Vec<u64> = needed.iter().filter_map(start_for).copied().collect();
        let mut removed = Vec::new();
        for (at, sequence) in older.iter().enumerate() {
            let beyond = older.get(at + 1).filter(|beyond| **beyond >= first);
            let is_between = beyond.is_some_and(|beyond| own - beyond <= 2 * (own - newer));
            if *sequence < first || (is_between && !needed.contains(sequence)) {
                removed.push(*sequence);
            } else {
                newer = *sequence;
            }
        }
        self.remove(removed)
    }

    /// Returns the oldest of the `kept` newest good snapshots, and the sequences before it.
    ///
    /// Only snapshots at or before `own` count. The sequences are newest first.
    fn split(&self, own: u64, is_usable: impl Fn(u64) -> bool) -> io::Result<(u64, Vec<u64>)> {
        let mut sequences = self.sequences()?;
        sequences.retain(|sequence| *sequence <= own);
        let (mut good, mut oldest) = (0, own);
        while good < self.kept
            && let Some(sequence) = sequences.pop()
        {
            good += usize::from(is_usable(sequence) && self.is_good(sequence));
            oldest = sequence;
        }
        sequences.reverse();
        Ok((oldest, sequences))
    }

    /// Removes the given snapshots, and incomplete files of earlier processes.
    fn remove(&self, sequences: Vec<u64>) -> io::Result<Vec<u64>> {
        for sequence in &sequences {
            std::fs::remove_file(self.path(*sequence))?;
        }
        let ours = format!("-{}-", *LIFE);
        for entry in std::fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.ends_with(".part") && !name.contains(&ours) {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(sequences)
    }

    /// The newest good snapshot at or before `until`. Skips bad ones with a warning.
    ///
    /// # Errors
    /// The folder cannot be read, or there is no file descriptor. In the second case the snapshot
    /// may be good, and the log may not reach back to an older one.
    pub fn newest(&self, until: u64) -> io::Result<Option<Snapshot>> {
        for sequence in self.sequences()?.into_iter().rev() {
            if sequence > until {
                continue;
            }
            let path = self.path(sequence);
            match std::fs::read(&path) {
                Ok(bytes) => match read(sequence, bytes) {
                    Some(snapshot) => return Ok(Some(snapshot)),
                    None => {
                        tracing::warn!(file = %path.display(), "damaged snapshot skipped; trying an older one");
                    }
                },
                Err(error) if is_out_of_descriptors(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(
                        %error,
                        file = %path.display(),
                        "unreadable snapshot skipped; trying an older one"
                    );
                }
            }
        }
        Ok(None)
    }

    /// Sequences of the good snapshots, ascending. Reads all files.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn good(&self) -> io::Result<Vec<u64>> {
        let mut good = self.sequences()?;
        good.retain(|sequence| self.is_good(*sequence));
        Ok(good)
    }

    /// True when the snapshot is whole. Reads the whole file; logs a warning when that fails.
    pub fn is_good(&self, sequence: u64) -> bool {
        let path = self.path(sequence);
        check(&path, sequence).unwrap_or_else(|error| {
            tracing::warn!(%error, file = %path.display(), "cannot read snapshot");
            false
        })
    }

    /// Sequences of the snapshot files present, ascending; not verified.
    pub fn sequences(&self) -> io::Result<Vec<u64>> {
        let entries = match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut sequences = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let number = name.to_string_lossy().strip_suffix(".snap").map(str::parse);
            if let Some(Ok(sequence)) = number {
                sequences.push(sequence);
            }
        }
        sequences.sort_unstable();
        Ok(sequences)
    }

    fn path(&self, sequence: u64) -> PathBuf {
        self.dir.join(format!("{sequence:020}.snap"))
    }
}

fn write_file(path: &Path, sequence: u64, payload: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&header(sequence, payload))?;
    file.write_all(payload)?;
    file.sync_all()
}

fn header(sequence: u64, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let bytes = payload.len() as u64;
    let crc = crc32c::crc32c_append(fields_crc(sequence, bytes), payload);
    encode_header(sequence, bytes, crc)
}

/// Checksum of the header fields; that of the payload continues it.
fn fields_crc(sequence: u64, bytes: u64) -> u32 {
    crc32c::crc32c(&encode_header(sequence, bytes, 0)[8..24])
}

fn encode_header(sequence: u64, bytes: u64, crc: u32) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&sequence.to_le_bytes());
    header[16..24].copy_from_slice(&bytes.to_le_bytes());
    header[24..28].copy_from_slice(&crc.to_le_bytes());
    header
}

/// True when the file is the whole snapshot of that sequence. Reads it in chunks.
fn check(path: &Path, sequence: u64) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let Some(payload) = bytes.checked_sub(HEADER_BYTES as u64) else {
        return Ok(false);
    };
    let mut found = [0; HEADER_BYTES];
    file.read_exact(&mut found)?;
    let (mut crc, mut left) = (fields_crc(sequence, payload), payload);
    let mut chunk = vec![0; CHUNK_BYTES];
    while left > 0 {
        let size = CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES));
        file.read_exact(&mut chunk[..size])?;
        crc = crc32c::crc32c_append(crc, &chunk[..size]);
        left -= size as u64;
    }
    Ok(found == encode_header(sequence, payload, crc))
}

/// Parses the bytes of a file; `None` unless they are the whole snapshot of that sequence.
fn read(sequence: u64, mut bytes: Vec<u8>) -> Option<Snapshot> {
    let (found, payload) = bytes.split_at_checked(HEADER_BYTES)?;
    if found != header(sequence, payload) {
        return None;
    }
    bytes.drain(..HEADER_BYTES);
    Some(Snapshot {
        sequence,
        payload: bytes,
    })
}
