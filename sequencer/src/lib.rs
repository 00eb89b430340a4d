//! The trading path in one place: sequence and time for every command, the ring in front of each engine, the hot thread that drives admission,
//! rings and engines in turn, and recovery from the journal.
//!
//! - [`core`]: admission and books as one pure machine over sequenced commands; what recovery, replay and the hot thread share.
//! - [`port`]: how requests get in and answers out; from any thread, never blocking.
//! - `hot`: the hot thread: queue, admission, sequence, rings, journal, answers. `flight`: commands between their rings. `timers`: what time owes.
//! - `lane`, `crew`: the rings around each engine, and who polls it: the hot thread (`fused`), one thread (`shared`) or one each (`pinned`).
//! - [`stats`]: counters to be read from outside.
//! - [`reader`]: complete records behind the commit position, for settlement, history and sessions.
//! - [`image`]: the state as a snapshot, and the shadow that makes it.
//! - [`recover`]: from the journal to the books, comparing every event on the way.
//!
//! Architecture invariants: nothing reaches a book that is not in the journal's buffer; an answer given here is *accepted*, only the commit position makes
//! it *durable*; the hot thread never waits for a disk, a lock held during I/O, or a full ring.

pub mod backlog;
pub mod config;
pub mod core;
mod crew;
mod flight;
pub mod handle;
mod hot;
pub mod image;
mod lane;
pub mod port;
pub mod reader;
pub mod record;
pub mod recover;
pub mod stats;
mod timers;
mod wake;

pub use backlog::Backlog;
pub use config::{Clock, Config, Layout};
pub use core::Core;
pub use handle::{Commit, SequencerHandle};
pub use image::Shadow;
pub use journal::JournalFailed;
pub use port::{NotTaken, Outcome, Port, Reply};
pub use reader::{ReadError, Reader};
pub use record::Record;
pub use recover::{StartError, replay};
pub use stats::Stats;
