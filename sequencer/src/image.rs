//! The state of a node as a snapshot, and the shadow that makes it: a second machine that follows the journal behind the commit position, compares
//! every event, and is written down whenever somebody wants. No live engine stops for a snapshot (`design.md` 6).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use admission::{Admission, AdmissionConfig, AdmissionImage};
use engine::{Book, BookImage};
use journal::Snapshots;
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use types::Sequence;

use crate::checkpoint::Checkpoints;
use crate::core::{Core, book_config};
use crate::reader::{ReadError, Reader};

/// Everything that the journal up to one sequence determines.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct CoreImage {
    /// Of the format: another one is passed over and the journal replayed.
    version: u32,
    trades: u64,
    state_hash: u64,
    admission: AdmissionImage,
    books: Vec<BookImage>,
}

const VERSION: u32 = 3;

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("snapshot storage: {0}")]
    Io(#[from] std::io::Error),
    #[error("the snapshot cannot be read: {0}")]
    Format(#[from] RkyvError),
    #[error("the snapshot has version {0} of the format, this program reads {VERSION}")]
    Version(u32),
    #[error("the snapshot's state hash is {found:#x} after restoring, {expected:#x} was written")]
    Hash { expected: u64, found: u64 },
    #[error("the snapshot holds a state that no node can be in: {0}")]
    Invariant(String),
}

impl Core {
    pub fn image(&self) -> CoreImage {
        CoreImage {
            version: VERSION,
            trades: self.trades(),
            state_hash: self.state_hash(),
            admission: self.admission().image(),
            books: self.books().map(Book::image).collect(),
        }
    }

    /// The machine of an image, with the same state hash.
    ///
    /// # Errors
    /// [`ImageError::Hash`] when it is not, [`ImageError::Invariant`] when admission or a book cannot have made it.
    pub fn restore(image: &CoreImage, config: AdmissionConfig) -> Result<Self, ImageError> {
        // Both rooms assert their invariants. Here a broken one is the file's fault, and there is a log to replay instead.
        let restored = catch_unwind(AssertUnwindSafe(|| Self::restored(image, config)));
        restored.unwrap_or_else(|panic| {
            let reason = panic.downcast_ref::<String>().map(String::as_str);
            let reason = reason.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(ImageError::Invariant(reason.unwrap_or_default().to_owned()))
        })
    }

    fn restored(image: &CoreImage, config: AdmissionConfig) -> Result<Self, ImageError> {
        // Before a book makes room for them: a damaged slot may ask for more memory than there is.
        let slots = image.admission.slots.len();
        let mut orders = image.books.iter().flat_map(|book| &book.orders);
        if orders.any(|order| order.handle.slot as usize >= slots) {
            let reason = "an order rests in a slot that admission does not have";
            return Err(ImageError::Invariant(reason.to_owned()));
        }
        let admission = Admission::restore(&image.admission, config);
        let books = image.books.iter();
        let books = books.map(|book| Book::restore(book, book_config(config.orders_max)));
        let core = Self::from_parts(admission, books.collect(), image.trades);
        let (expected, found) = (image.state_hash, core.state_hash());
        if expected != found {
            return Err(ImageError::Hash { expected, found });
        }
        Ok(core)
    }
}

/// Writes the state down; gives the bytes of it.
///
/// # Errors
/// The folder cannot be written.
pub fn save(snapshots: &Snapshots, core: &Core) -> Result<usize, ImageError> {
    let bytes = rkyv::to_bytes::<RkyvError>(&core.image())?;
    snapshots.write(core.sequence().get(), &bytes)?;
    Ok(bytes.len())
}

/// The newest state that was written down and restores, at or before `until`; `None` when there is none. One that does not is passed over with a warning:
/// a snapshot saves time, the journal holds the truth as far as it goes back.
///
/// # Errors
/// The folder cannot be read.
pub fn load(
    dir: &Path,
    until: Sequence,
    config: AdmissionConfig,
) -> Result<Option<Core>, ImageError> {
    let restored = Checkpoints::new(dir).newest(until, |_, payload| {
        decode(payload)
            .and_then(|image| Core::restore(&image, config))
            .map_err(|error| error.to_string())
    });
    Ok(restored?)
}

fn decode(payload: &AlignedVec) -> Result<CoreImage, ImageError> {
    let image = rkyv::from_bytes::<CoreImage, RkyvError>(payload)?;
    if image.version != VERSION {
        return Err(ImageError::Version(image.version));
    }
    Ok(image)
}

/// Why a shadow stops.
#[derive(Debug, thiserror::Error)]
pub enum ShadowError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("command {0} was journalled with other events than the shadow computes")]
    Differs(Sequence),
    #[error("at command {0} the live machine has another state than the shadow")]
    Hash(Sequence),
}

/// A second machine behind the commit position. It belongs on a thread of low priority: [`Shadow::catch_up`] works until it has caught up.
pub struct Shadow {
    core: Core,
    reader: Reader,
    dir: std::path::PathBuf,
}

impl Shadow {
    pub(crate) fn new(core: Core, reader: Reader, dir: &Path) -> Self {
        Self {
            core,
            reader,
            dir: dir.to_path_buf(),
        }
    }

    /// Follows to the commit position and gives the sequence reached.
    ///
    /// # Errors
    /// [`ShadowError::Differs`]: the live node and its journal say different things. Stop and look.
    pub fn catch_up(&mut self) -> Result<Sequence, ShadowError> {
        while self.step(usize::MAX)? {}
        Ok(self.core.sequence())
    }

    /// Follows by at most `records`; false at the commit position.
    ///
    /// # Errors
    /// As [`Shadow::catch_up`].
    pub fn step(&mut self, records: usize) -> Result<bool, ShadowError> {
        for _ in 0..records {
            let Some(record) = self.reader.try_next()? else {
                return Ok(false);
            };
            if self.core.apply(&record.command) != record.events {
                return Err(ShadowError::Differs(record.command.sequence));
            }
        }
        Ok(true)
    }

    /// Writes down where the shadow stands.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn save(&self) -> Result<Sequence, ShadowError> {
        self.save_in(&Snapshots::new(&self.dir))?;
        Ok(self.core.sequence())
    }

    /// The same in a folder with rules of its own; gives the bytes written.
    pub(crate) fn save_in(&self, snapshots: &Snapshots) -> Result<usize, ShadowError> {
        Ok(save(snapshots, &self.core)?)
    }

    pub fn core(&self) -> &Core {
        &self.core
    }
}
