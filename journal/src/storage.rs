//! Storage interface of the log: numbered segments of fixed size, written in whole blocks.
//!
//! Each segment is synced on its own.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use crate::aligned::{Blocks, Buffer};

/// Write granularity: the block of current devices and file systems. Smaller writes would rewrite
/// a durable block.
const BLOCK_BYTES: usize = 4096;
/// Segment files kept open for reading: the tail, and the places of slower readers.
const READ_OPEN_MAX: usize = 4;
/// Bytes per write of zeros to a new segment. A larger write would occupy a core for longer than a
/// log write does.
const ZEROS_BYTES: usize = 128 << 10;

/// How a write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `O_DIRECT` and `O_DSYNC`: bypasses the page cache, durable when the write returns.
    Direct,
    /// Page cache, then `fdatasync`: for file systems that refuse `O_DIRECT`.
    Synced,
    /// Not synced: only where losing the log does not matter.
    Unsynced,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Synced => "fdatasync",
            Self::Unsynced => "unsynced",
        }
    }
}

/// True when the process or the system is out of file descriptors: the call may be retried.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Storage of segments. Offsets are bytes from the start of a segment.
///
/// What was written to a segment before a [`Storage::sync`] of it survives a power loss.
pub trait Storage: Send + Sync + 'static {
    /// Numbers of the segments that exist, ascending.
    fn segments(&self) -> io::Result<Vec<u64>>;
    /// Creates a segment of zeros, or replaces the one with that number; durable when it returns.
    fn create(&self, segment: u64, bytes: u64) -> io::Result<()>;
    /// Prepares an existing segment for writing, so that a write needs only the disk.
    fn begin(&self, segment: u64) -> io::Result<()> {
        let _ = segment;
        Ok(())
    }
    /// Removes a segment; durable when it returns.
    fn remove(&self, segment: u64) -> io::Result<()>;
    /// Size of a segment.
    fn size(&self, segment: u64) -> io::Result<u64>;
    /// Writes at an offset that is a multiple of [`Storage::block_bytes`].
    fn write(&self, segment: u64, offset: u64, blocks: Blocks<'_>) -> io::Result<()>;
    fn sync(&self, segment: u64) -> io::Result<()>;
    /// Makes all readable data durable, also data that another process wrote. Called on opening.
    fn make_durable(&self, segment: u64) -> io::Result<()>;
    /// Fills `into` up to the segment's end; returns the number of bytes read.
    fn read(&self, segment: u64, offset: u64, into: &mut [u8]) -> io::Result<usize>;
    /// Name of a segment for messages.
    fn name(&self, segment: u64) -> String;
    /// Block size: offsets and lengths of writes are multiples of it.
    fn block_bytes(&self) -> usize;
    fn mode(&self) -> Mode;
}

/// Segments as files `<number>.log` in a folder.
pub struct FileStorage {
    dir: PathBuf,
    /// The segment written last stays open.
    open: Mutex<Option<(u64, Arc<File>)>>,
    /// Recently read segments, newest first. Separate from the writer's file, which is opened for
    /// direct I/O: reads of any length need the page cache.
    read: Mutex<VecDeque<(u64, Arc<File>)>>,
    mode: Mode,
    is_read_only: bool,
}

impl FileStorage {
    /// Creates the folder and probes its file system for direct writes.
    ///
    /// The mode is [`Mode::Direct`] if they work, otherwise [`Mode::Synced`]; without `sync` it is
    /// [`Mode::Unsynced`].
    ///
    /// # Errors
    /// The folder cannot be created or written.
    pub fn new(dir: &Path, sync: bool) -> io::Result<Self> {
        make_folder(dir)?;
        // First: on a full disk this may free the needed space.
        remove_incomplete(dir)?;
        let mode = match sync {
            false => Mode::Unsynced,
            true if supports_direct(dir)? => Mode::Direct,
            true => Mode::Synced,
        };
        Self::with_mode(dir, mode)
    }

    /// As [`FileStorage::new`], with the given mode.
    pub fn with_mode(dir: &Path, mode: Mode) -> io::Result<Self> {
        make_folder(dir)?;
        remove_incomplete(dir)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            open: Mutex::default(),
            read: Mutex::default(),
            mode,
            is_read_only: false,
        })
    }

    /// Opens an existing folder read-only.
    ///
    /// # Errors
    /// The folder does not exist.
    pub fn read_only(dir: &Path) -> io::Result<Self> {
        std::fs::read_dir(dir)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            open: Mutex::default(),
            read: Mutex::default(),
            mode: Mode::Synced,
            is_read_only: true,
        })
    }

    /// Creates a file of zeros, so that no later write allocates.
    fn fill_with_zeros(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        if self.mode == Mode::Direct {
            // Without `O_DSYNC`: a flush per chunk would delay those of the log's writes.
            options.custom_flags(OFlags::DIRECT.bits().cast_signed());
        }
        let file = options.open(path)?;
        // Allocated up front: a full disk fails here, and the blocks are contiguous.
        match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
        // Zeros, not only an allocation: a first write would also write file system metadata.
        let mut zeros = Buffer::default();
        zeros.resize(ZEROS_BYTES);
        let mut offset = 0;
        while offset < bytes {
            let chunk = ZEROS_BYTES.min(usize::try_from(bytes - offset).unwrap_or(usize::MAX));
            file.write_all_at(
                Blocks::new(&zeros.bytes()[..chunk], BLOCK_BYTES).bytes(),
                offset,
            )?;
            offset += chunk as u64;
        }
        if self.mode != Mode::Unsynced {
            file.sync_all()?;
        }
        Ok(())
    }

    fn path(&self, segment: u64) -> PathBuf {
        self.dir.join(format!("{segment:010}.log"))
    }

    fn file(&self, segment: u64) -> io::Result<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((number, file)) = &*open
            && *number == segment
        {
            return Ok(file.clone());
        }
        let file = Arc::new(self.options().read(true).open(self.path(segment))?);
        *open = Some((segment, file.clone()));
        Ok(file)
    }

    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.write(true);
        if self.mode == Mode::Direct {
            options.custom_flags(direct_flags());
        }
        options
    }

    fn close_files(&self, segment: u64) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.as_ref().is_some_and(|(number, _)| *number == segment) {
            *open = None;
        }
        drop(open);
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.retain(|(number, _)| *number != segment);
    }

    fn file_to_read(&self, segment: u64) -> io::Result<Arc<File>> {
        // Opened for each read: another process may replace the file of a segment.
        if self.is_read_only {
            return File::open(self.path(segment)).map(Arc::new);
        }
        // Held while a file is opened, so that `close_files` runs before or after.
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let known = read.iter().position(|(number, _)| *number == segment);
        let entry = match known.and_then(|at| read.remove(at)) {
            Some(entry) => entry,
            None => (segment, Arc::new(File::open(self.path(segment))?)),
        };
        let file = entry.1.clone();
        read.push_front(entry);
        read.truncate(READ_OPEN_MAX);
        Ok(file)
    }

    fn sync_dir(&self) -> io::Result<()> {
        if self.mode == Mode::Unsynced {
            return Ok(());
        }
        File::open(&self.dir)?.sync_all()
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.is_read_only {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the journal storage is open read-only",
            ));
        }
        Ok(())
    }
}

/// Creates a folder and its missing parents; durable when it returns.
///
/// # Errors
/// The folder cannot be created, or a parent cannot be synced.
pub fn make_folder(dir: &Path) -> io::Result<()> {
    let mut parents = Vec::new();
    let mut at = dir;
    while !at.exists() {
        let parent = match at.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        parents.push(parent);
        at = parent;
    }
    std::fs::create_dir_all(dir)?;
    for parent in parents {
        File::open(parent)?.sync_all()?;
    }
    Ok(())
}

fn direct_flags() -> i32 {
    (OFlags::DIRECT | OFlags::DSYNC).bits().cast_signed()
}

/// Tries a direct write in the folder. Some file systems refuse the open, others the write.
fn supports_direct(dir: &Path) -> io::Result<bool> {
    let path = dir.join("probe.part");
    let tried = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(direct_flags())
        .open(&path)
        .and_then(|file| {
            let mut block = Buffer::default();
            block.resize(BLOCK_BYTES);
            file.write_all_at(block.padded(BLOCK_BYTES).bytes(), 0)
        });
    if path.exists() {
        std::fs::remove_file(&path)?;
    }
    match tried {
        Ok(()) => Ok(true),
        Err(error)
            if [Errno::INVAL, Errno::OPNOTSUPP]
                .iter()
                .any(|refusal| error.raw_os_error() == Some(refusal.raw_os_error())) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Removes files that a crash or a full disk left incomplete.
fn remove_incomplete(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "part")
        {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

impl Storage for FileStorage {
    fn segments(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            if let Some(number) = name
                .to_string_lossy()
                .strip_suffix(".log")
                .and_then(|stem| stem.parse().ok())
            {
                numbers.push(number);
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn create(&self, segment: u64, bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        assert_eq!(bytes % BLOCK_BYTES as u64, 0, "whole blocks");
        // Written under another name first: a crash leaves no incomplete segment.
        let half = self.dir.join(format!("{segment:010}.part"));
        let made = self.fill_with_zeros(&half, bytes);
        if made.is_err() {
            // The incomplete file may occupy the last free space.
            let _ = std::fs::remove_file(&half);
        }
        made?;
        std::fs::rename(&half, self.path(segment))?;
        self.close_files(segment);
        self.sync_dir()
    }

    fn begin(&self, segment: u64) -> io::Result<()> {
        self.check_writable()?;
        self.file(segment).map(drop)
    }

    fn remove(&self, segment: u64) -> io::Result<()> {
        self.check_writable()?;
        std::fs::remove_file(self.path(segment))?;
        // After the unlink: a reader that reopens the file in between would keep its space in use.
        self.close_files(segment);
        self.sync_dir()
    }

    fn size(&self, segment: u64) -> io::Result<u64> {
        Ok(std::fs::metadata(self.path(segment))?.len())
    }

    fn write(&self, segment: u64, offset: u64, blocks: Blocks<'_>) -> io::Result<()> {
        self.check_writable()?;
        assert_eq!(offset % BLOCK_BYTES as u64, 0, "aligned offset");
        self.file(segment)?.write_all_at(blocks.bytes(), offset)
    }

    fn sync(&self, segment: u64) -> io::Result<()> {
        match self.mode {
            // Direct writes are durable when they return.
            Mode::Direct | Mode::Unsynced => Ok(()),
            Mode::Synced => self.file(segment)?.sync_data(),
        }
    }

    fn make_durable(&self, segment: u64) -> io::Result<()> {
        self.check_writable()?;
        if self.mode == Mode::Unsynced {
            return Ok(());
        }
        self.file(segment)?.sync_data()
    }

    fn read(&self, segment: u64, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let file = self.file_to_read(segment)?;
        let mut done = 0;
        while done < into.len() {
            match file.read_at(&mut into[done..], offset + done as u64)? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    fn name(&self, segment: u64) -> String {
        self.path(segment).display().to_string()
    }

    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn mode(&self) -> Mode {
        self.mode
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::fcntl_getfl;

    use super::*;

    #[test]
    fn a_segment_is_opened_with_the_flags_of_its_mode() {
        let folder = tempfile::tempdir().expect("folder");
        let chosen = FileStorage::new(folder.path(), true)
            .expect("a folder")
            .mode();
        for mode in [chosen, Mode::Synced, Mode::Unsynced] {
            let storage = FileStorage::with_mode(folder.path(), mode).expect("a folder");
            storage.create(1, BLOCK_BYTES as u64).expect("made");
            let mut block = Buffer::default();
            block.resize(BLOCK_BYTES);
            storage
                .write(1, 0, block.padded(BLOCK_BYTES))
                .expect("written");
            // The writer's descriptor.
            let open = storage.open.lock().expect("no panic").clone();
            let (_, file) = open.expect("the segment stays open");
            let flags = fcntl_getfl(&*file).expect("flags");
            let both = OFlags::DIRECT | OFlags::DSYNC;
            let expected = match mode {
                Mode::Direct => both,
                Mode::Synced | Mode::Unsynced => OFlags::empty(),
            };
            assert_eq!(flags & both, expected, "{mode:?}");
        }
    }

    #[test]
    fn readers_keep_a_few_segments_open_and_no_removed_one() {
        let folder = tempfile::tempdir().expect("folder");
        let storage = FileStorage::with_mode(folder.path(), Mode::Unsynced).expect("a folder");
        let write = |segment, byte| {
            let mut block = Buffer::default();
            block.resize(1);
            block.bytes_mut()[0] = byte;
            let blocks = block.padded(BLOCK_BYTES);
            storage.write(segment, 0, blocks).expect("written");
        };
        let first_byte = |segment| {
            let mut byte = [0];
            let read = storage.read(segment, 0, &mut byte);
            read.map(|count| (count, byte[0]))
        };
        let many = READ_OPEN_MAX as u64 + 2;
        for segment in 1..=many {
            storage.create(segment, BLOCK_BYTES as u64).expect("made");
            write(segment, 7);
            assert_eq!(first_byte(segment).expect("read"), (1, 7));
        }
        let open = || -> Vec<u64> {
            let read = storage.read.lock().expect("no panic");
            read.iter().map(|(segment, _)| *segment).collect()
        };
        assert_eq!(open(), [6, 5, 4, 3]);
        first_byte(4).expect("read");
        assert_eq!(open(), [4, 6, 5, 3]);
        storage.remove(6).expect("removed");
        let gone = first_byte(6).expect_err("the segment was removed");
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
        // Created again under the same number: not the old file.
        storage.create(4, BLOCK_BYTES as u64).expect("made");
        assert_eq!(first_byte(4).expect("read"), (1, 0));
    }

    #[test]
    fn a_folder_is_created_with_its_parents() {
        let folder = tempfile::tempdir().expect("folder");
        let dir = folder.path().join("a/b/c");
        make_folder(&dir).expect("made");
        make_folder(&dir).expect("there already");
        assert!(dir.is_dir());
        std::fs::write(dir.join("file"), b"x").expect("written");
        assert!(make_folder(&dir.join("file/d")).is_err());
    }
}
