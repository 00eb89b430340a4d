//! The state of a node as a snapshot.
//!
//! The replica makes the snapshot and adds its own tables. A start of the hot thread needs only the
//! core.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use admission::{Admission, AdmissionConfig, AdmissionImage, Session};
use engine::{Book, BookImage};
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use types::command::FORMAT;
use types::{Sequence, SessionIx};

use crate::checkpoint::Checkpoints;
use crate::core::{Core, book_config};

/// Everything that the journal up to one sequence determines.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct CoreImage {
    /// Version of the format. A snapshot of another version is skipped.
    version: u32,
    trades: u64,
    state_hash: u64,
    admission: AdmissionImage,
    books: Vec<BookImage>,
    /// The replica's own tables, in a format that only the replica reads.
    replica_tables: Vec<u8>,
}

/// Version of the image, equal to that of commands and events. Every change of the image raises it.
const VERSION: u32 = FORMAT;

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
    #[error("the snapshot contains an invalid state: {0}")]
    Invariant(String),
}

impl Core {
    /// Image of the core, without the replica's tables.
    pub fn image(&self) -> CoreImage {
        CoreImage {
            replica_tables: Vec::new(),
            version: VERSION,
            trades: self.trades(),
            state_hash: self.state_hash(),
            admission: self.admission().image(),
            books: self.books().map(Book::image).collect(),
        }
    }

    /// Restores the core of an image and compares the state hash.
    ///
    /// # Errors
    /// [`ImageError::Hash`] when the hash differs, [`ImageError::Invariant`] when the image breaks
    /// an invariant of admission or of a book.
    pub fn restore(image: &CoreImage, config: AdmissionConfig) -> Result<Self, ImageError> {
        // Admission and books assert their invariants. A file that breaks one is skipped, and the
        // journal is replayed instead.
        let restored = catch_unwind(AssertUnwindSafe(|| Self::restored(image, config)));
        restored.unwrap_or_else(|panic| Err(ImageError::Invariant(panic_text(&*panic))))
    }

    fn restored(image: &CoreImage, config: AdmissionConfig) -> Result<Self, ImageError> {
        // Checked before books allocate: a damaged slot could need more memory than there is.
        let slots = image.admission.slots.len();
        let mut orders = image.books.iter().flat_map(|book| &book.orders);
        if orders.any(|order| order.handle.slot as usize >= slots) {
            let reason = "an order rests in a slot that admission does not have";
            return Err(ImageError::Invariant(reason.to_owned()));
        }
        // Likewise for best prices, which are stored by instrument.
        let numbers = image.books.iter().map(|book| book.spec.ix.index());
        if !numbers.eq(0..image.admission.instruments.len()) {
            let reason = "there is not one book for each instrument";
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

/// Message of a caught panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a text").to_owned()
}

impl CoreImage {
    /// Decodes a snapshot's payload.
    ///
    /// # Errors
    /// [`ImageError::Format`], [`ImageError::Version`].
    pub fn decode(payload: &AlignedVec) -> Result<Self, ImageError> {
        let image = rkyv::from_bytes::<Self, RkyvError>(payload)?;
        if image.version != VERSION {
            return Err(ImageError::Version(image.version));
        }
        Ok(image)
    }

    /// # Errors
    /// Out of memory.
    pub fn encode(&self) -> Result<AlignedVec, RkyvError> {
        rkyv::to_bytes::<RkyvError>(self)
    }

    /// Adds the replica's own tables.
    #[must_use]
    pub fn with_replica_tables(self, replica_tables: Vec<u8>) -> Self {
        Self {
            replica_tables,
            ..self
        }
    }

    /// A session as admission has it.
    pub fn session(&self, session: SessionIx) -> Option<&Session> {
        self.admission.sessions.get(session.index())
    }

    /// The replica's own tables.
    pub fn replica_tables(&self) -> &[u8] {
        &self.replica_tables
    }
}

/// Restores the newest snapshot at or before `until` that can be restored; `None` if there is none.
///
/// Others are skipped with a warning: the journal is the source of truth, as far as it goes back.
///
/// # Errors
/// The folder cannot be read.
pub fn load(
    dir: &Path,
    until: Sequence,
    config: AdmissionConfig,
) -> Result<Option<Core>, ImageError> {
    let restored = Checkpoints::new(dir).newest(until, |_, payload| {
        CoreImage::decode(payload)
            .and_then(|image| Core::restore(&image, config).map(Some))
            .map_err(|error| error.to_string())
    });
    Ok(restored?)
}

#[cfg(test)]
mod tests {
    use types::command::SetInstrument;
    use types::{
        Command, Envelope, InstrumentId, InstrumentIx, InstrumentParams, InstrumentSpec, Ticks,
    };

    use super::*;

    #[test]
    fn an_image_with_a_book_of_an_unknown_instrument_is_refused() {
        let spec = InstrumentSpec::new(&InstrumentParams {
            ix: InstrumentIx(0),
            band_high: Ticks(1_000),
            ..InstrumentParams::new(InstrumentId::new("BOND").expect("an id"))
        });
        let spec = spec.expect("a consistent instrument");
        let mut core = Core::new(crate::limits());
        core.apply(&Envelope {
            sequence: Sequence(1),
            time_ns: 1,
            received_ns: 1,
            command: Command::SetInstrument(SetInstrument { spec }),
        });
        let mut image = core.image();
        assert!(Core::restore(&image, crate::limits()).is_ok());
        // Best prices would allocate a slot for each of 2^32 instruments.
        image.books[0].spec.ix = InstrumentIx(u32::MAX - 1);
        let refused = Core::restore(&image, crate::limits()).err();
        assert!(
            matches!(refused, Some(ImageError::Invariant(_))),
            "{refused:?}"
        );
    }
}
