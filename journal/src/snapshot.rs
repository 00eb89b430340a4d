//! Snapshots: the state at one sequence as bytes of the caller's, one file each, whole or not there.
//!
//! ```text
//!  0            8              16           24        28        32
//!  | "XSNAP001" | sequence u64 | bytes u64  | crc u32 | zero    | payload |
//! ```
//!
//! `crc` is CRC-32C of the sequence, the length and the payload. A file is written under another name, synced, and then renamed. One that does not check
//! is passed over for the one before it: a snapshot saves time, the log alone holds the truth.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"XSNAP001";
const HEADER_BYTES: usize = 32;
/// Snapshots kept unless told otherwise: the newest, and one in case it is damaged.
const KEEP: usize = 2;

/// A state found again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Node sequence of the last command in it.
    pub sequence: u64,
    pub payload: Vec<u8>,
}

/// The folder of the snapshots of one log.
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

    /// The same folder with room for `kept` snapshots, 1 at least.
    #[must_use]
    pub fn keep(self, kept: usize) -> Self {
        Self {
            kept: kept.max(1),
            ..self
        }
    }

    /// Writes a snapshot, durable when it returns, and removes all but the newest.
    pub fn write(&self, sequence: u64, payload: &[u8]) -> io::Result<PathBuf> {
        std::fs::create_dir_all(&self.dir)?;
        let half = self.dir.join("next.part");
        let mut file = File::create(&half)?;
        file.write_all(&header(sequence, payload))?;
        file.write_all(payload)?;
        file.sync_all()?;
        let path = self.path(sequence);
        std::fs::rename(&half, &path)?;
        File::open(&self.dir)?.sync_all()?;
        for old in self.sequences()?.iter().rev().skip(self.kept) {
            std::fs::remove_file(self.path(*old))?;
        }
        Ok(path)
    }

    /// The newest good snapshot at or before `until`.
    pub fn newest(&self, until: u64) -> io::Result<Option<Snapshot>> {
        for sequence in self.sequences()?.into_iter().rev() {
            if sequence > until {
                continue;
            }
            let path = self.path(sequence);
            match read(sequence, &std::fs::read(&path)?) {
                Some(snapshot) => return Ok(Some(snapshot)),
                None => {
                    tracing::warn!(file = %path.display(), "a damaged snapshot was passed over");
                }
            }
        }
        Ok(None)
    }

    /// Sequences of the snapshots that are whole, ascending.
    pub fn good(&self) -> io::Result<Vec<u64>> {
        let mut good = self.sequences()?;
        let mut bytes = Vec::with_capacity(good.len());
        for sequence in &good {
            bytes.push(std::fs::read(self.path(*sequence))?);
        }
        let mut bytes = bytes.into_iter();
        good.retain(|sequence| {
            let bytes = bytes.next().unwrap_or_default();
            read(*sequence, &bytes).is_some()
        });
        Ok(good)
    }

    /// Sequences of the snapshots that are there, ascending.
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

fn header(sequence: u64, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&sequence.to_le_bytes());
    header[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header[8..24]), payload);
    header[24..28].copy_from_slice(&crc.to_le_bytes());
    header
}

/// The snapshot in `bytes`; `None` when it is not the whole one of that sequence.
fn read(sequence: u64, bytes: &[u8]) -> Option<Snapshot> {
    let (found, payload) = bytes.split_at_checked(HEADER_BYTES)?;
    (found == header(sequence, payload)).then(|| Snapshot {
        sequence,
        payload: payload.to_vec(),
    })
}
