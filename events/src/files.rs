//! Atomic writes of small files: keys, certificates and the manifest of the data folder.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Mutex, PoisonError},
};

/// Mode of a file that only the platform may read.
pub const PRIVATE: u32 = 0o600;
/// Mode of a world-readable file.
pub const PUBLIC: u32 = 0o644;

/// Replaces a file atomically; durable on return. A crash leaves the old or the new file. The
/// temporary file has a fixed name, so the next write replaces the one that a crash left.
///
/// # Errors
/// The file cannot be written; the old one remains.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".draft");
    let draft = Path::new(&draft);
    let written = (|| {
        // Removed rather than overwritten: a leftover may have another mode.
        match fs::remove_file(draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(mode);
        let mut file = options.open(draft)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(draft, path)
    })();
    if written.is_err() {
        // Frees its space, which may matter on a full disk.
        let _ = fs::remove_file(draft);
    }
    written?;
    let folder = path.parent().filter(|parent| *parent != Path::new(""));
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Reads a file. Creates it if it is missing or empty: older versions left an empty one when their
/// first start was interrupted.
///
/// # Errors
/// The file cannot be read or written, or `make` fails.
pub fn read_or_create<E: From<io::Error>>(
    path: &Path,
    mode: u32,
    make: impl FnOnce() -> Result<Vec<u8>, E>,
) -> Result<Vec<u8>, E> {
    // Serializes creation in this process: a second caller reads the file of the first.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    match fs::read(path) {
        Ok(bytes) if !bytes.is_empty() => return Ok(bytes),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let bytes = make()?;
    replace(path, &bytes, mode)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        entries
            .map(|entry| name(entry).to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn a_leftover_of_an_interrupted_write_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(folder.path().join("key.draft"), "half of ano").unwrap();
        fs::write(&path, "").unwrap();
        let made = || Ok::<_, io::Error>(b"made".to_vec());
        assert_eq!(read_or_create(&path, PRIVATE, made).unwrap(), b"made");
        let other = || Ok::<_, io::Error>(b"other".to_vec());
        assert_eq!(read_or_create(&path, PRIVATE, other).unwrap(), b"made");
        assert_eq!(names(folder.path()), ["key"]);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, PRIVATE);
    }
}
