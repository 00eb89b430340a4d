//! The file of the key of a store's seals.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::Hash;
use crate::{Error, files};

/// File with the key of a store's seals.
pub fn key_file(store: &Path) -> PathBuf {
    with_end(store, ".seal.key")
}

/// File of a new key until the first seals are committed. So a first start that is interrupted
/// leaves no key without seals.
fn new_key_file(store: &Path) -> PathBuf {
    with_end(store, ".seal.key.new")
}

fn with_end(store: &Path, end: &str) -> PathBuf {
    let mut name = store.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

/// True if the store has been sealed: its key exists.
pub fn exists(store: &Path) -> bool {
    is_there(&key_file(store))
}

fn is_there(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() > 0)
}

/// Reads the key.
///
/// # Errors
/// [`Error::Files`]: there is none, or the file has none.
pub fn read(store: &Path) -> Result<Hash, Error> {
    let path = key_file(store);
    // A crash between the commit of the first seals and [`keep`].
    let path = match is_there(&path) {
        true => path,
        false => new_key_file(store),
    };
    let text = fs::read(&path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
    parse(&path, &text)
}

/// Reads the key, or makes a new one.
///
/// # Errors
/// [`Error::Files`]: a file cannot be read or written, or has no key.
pub fn read_or_make(store: &Path) -> Result<Hash, Error> {
    if exists(store) {
        return read(store);
    }
    let path = new_key_file(store);
    let make = || Ok::<_, io::Error>(hex::encode(rand::random::<Hash>()).into_bytes());
    let text = files::read_or_create(&path, files::PRIVATE, make)?;
    parse(&path, &text)
}

/// Gives a new key its name, after the commit of the first seals. Durable on return.
///
/// # Errors
/// [`Error::Files`].
pub fn keep(store: &Path) -> Result<(), Error> {
    if exists(store) {
        return Ok(());
    }
    fs::rename(new_key_file(store), key_file(store))?;
    let folder = store.parent().filter(|parent| *parent != Path::new(""));
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(())
}

/// Removes the key.
///
/// # Errors
/// [`Error::Files`].
pub fn remove(store: &Path) -> Result<(), Error> {
    for path in [key_file(store), new_key_file(store)] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

fn parse(path: &Path, text: &[u8]) -> Result<Hash, Error> {
    let mut key = Hash::default();
    hex::decode_to_slice(text.trim_ascii(), &mut key).map_err(|error| {
        let text = format!("{}: {error}", path.display());
        Error::Files(io::Error::new(io::ErrorKind::InvalidData, text))
    })?;
    Ok(key)
}
