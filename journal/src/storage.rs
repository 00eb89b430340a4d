//! What the log needs of a disk: numbered segments of fixed size, written at offsets, synced one by one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A place for segments. Offsets are bytes from the start of a segment. After [`Storage::sync`] returned, what was written before it survives power loss.
pub trait Storage: Send + Sync + 'static {
    /// Numbers of the segments that exist, ascending.
    fn segments(&self) -> io::Result<Vec<u64>>;
    /// Makes a segment of zeros; durable when it returns.
    fn create(&self, segment: u64, bytes: u64) -> io::Result<()>;
    fn write(&self, segment: u64, offset: u64, bytes: &[u8]) -> io::Result<()>;
    fn sync(&self, segment: u64) -> io::Result<()>;
    /// Fills `into` as far as the segment goes; gives the bytes read.
    fn read(&self, segment: u64, offset: u64, into: &mut [u8]) -> io::Result<usize>;
    /// Name of a segment for messages.
    fn name(&self, segment: u64) -> String;
}

/// Segments as files `<number>.log` in a folder.
pub struct FileStorage {
    dir: PathBuf,
    /// The segment that was used last stays open.
    open: Mutex<Option<(u64, std::sync::Arc<File>)>>,
    sync: bool,
}

impl FileStorage {
    /// # Errors
    /// The folder cannot be made.
    pub fn new(dir: &Path, sync: bool) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            open: Mutex::new(None),
            sync,
        })
    }

    fn path(&self, segment: u64) -> PathBuf {
        self.dir.join(format!("{segment:010}.log"))
    }

    fn file(&self, segment: u64) -> io::Result<std::sync::Arc<File>> {
        let mut open = self
            .open
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((number, file)) = &*open
            && *number == segment
        {
            return Ok(file.clone());
        }
        let file = std::sync::Arc::new(
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(self.path(segment))?,
        );
        *open = Some((segment, file.clone()));
        Ok(file)
    }
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
        // Written under another name first: a crash leaves no half-made segment behind.
        let half = self.dir.join("next.part");
        let file = File::create(&half)?;
        let zeros = vec![0u8; 1 << 20];
        let mut offset = 0;
        while offset < bytes {
            let chunk = zeros
                .len()
                .min(usize::try_from(bytes - offset).unwrap_or(usize::MAX));
            file.write_all_at(&zeros[..chunk], offset)?;
            offset += chunk as u64;
        }
        file.sync_all()?;
        std::fs::rename(&half, self.path(segment))?;
        File::open(&self.dir)?.sync_all()
    }

    fn write(&self, segment: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(segment)?.write_all_at(bytes, offset)
    }

    fn sync(&self, segment: u64) -> io::Result<()> {
        if self.sync {
            self.file(segment)?.sync_data()
        } else {
            Ok(())
        }
    }

    fn read(&self, segment: u64, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        // Readers bring their own descriptor, so that the writer's stays in place.
        let file = File::open(self.path(segment))?;
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
}
