//! The trading path in one place: sequence and time for every command, the ring in front of each engine, the
//! hot thread that drives admission, rings and engines in turn, and recovery from the journal.
//!
//! - [`core`]: admission and books as one pure machine over sequenced commands; what recovery, replay and the
//!   hot thread share.
//! - [`port`], [`ring_port`]: how requests get in and answers out, never blocking: from any thread over a
//!   queue, or over rings for a front that polls.
//! - `hot`: the hot thread: queue, admission, sequence, rings, journal, answers. `flight`: commands between
//!   their rings. `timers`: what time owes.
//! - [`by_hand`]: the same without a thread, turned by its owner.
//! - `keep`: what is kept of it: the journal, or nothing. `flat`, `pack`: how a record is laid into it.
//! - `lane`, `crew`: the rings around each engine, and who polls it: the hot thread (`fused`), one thread
//!   (`shared`) or one each (`pinned`).
//! - [`stats`]: counters to be read from outside.
//! - [`reader`]: complete records behind the commit position, for settlement, history and sessions.
//! - [`image`]: the state as a snapshot, which the replica makes.
//! - [`checkpoint`]: when states of the node are written down, and which a start can use.
//! - [`retention`]: removes the journal's beginning when nobody needs it.
//! - [`inspect`]: a journal at rest, for people.
//! - [`recover`]: from the journal to the books, comparing every event on the way.
//!
//! Architecture invariants: what a round of the hot thread has answered is in the journal's buffer at the end
//! of that round; an answer given here is *accepted*, only the commit position makes it *durable*; the hot
//! thread never waits for a disk or a lock, nor for a full ring longer than 10 ms.

pub mod backlog;
pub mod by_hand;
pub mod checkpoint;
pub mod config;
pub mod core;
mod crew;
mod flat;
mod flight;
pub mod handle;
mod hot;
pub mod image;
pub mod inspect;
mod keep;
mod lane;
mod limits;
mod pack;
pub mod park;
mod polled;
pub mod port;
pub mod priority;
pub mod reader;
pub mod record;
pub mod recover;
pub mod retention;
pub mod ring_port;
pub mod stats;
mod timers;

pub use backlog::{Backlog, Bounds, Laggard, Stage};
pub use by_hand::ByHand;
pub use checkpoint::{CheckpointError, CheckpointKeeper, Checkpoints, Proven, SnapshotConfig};
pub use config::{Clock, Config, Layout};
pub use core::Core;
pub use handle::{Commit, ReplicaParts, SequencerHandle, Volatile};
pub use image::ImageError;
pub use journal::JournalFailed;
pub use limits::limits;
pub use park::Parker;
pub use polled::{Polled, run_polled};
pub use port::{NotTaken, Outcome, Port, Reply};
pub use reader::{ReadError, Reader};
pub use record::Record;
pub use recover::{StartError, replay};
pub use retention::{Durable, Retention};
pub use ring_port::{Asked, Opened, Ratio, Report, RingPort, Stamp};
pub use stats::Stats;
