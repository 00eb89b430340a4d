//! The trading path: sequencing, the hot thread, the engines' rings, recovery from the journal.
//!
//! - [`core`]: admission and books as one pure state machine over sequenced commands, shared by
//!   recovery, replay and the hot thread.
//! - [`port`], [`ring_port`]: non-blocking submission of requests, over a queue from any thread or
//!   over rings for a front that polls.
//! - `hot`: the hot thread: queue, admission, sequence, rings, journal, answers. `in_flight`:
//!   commands in flight. `timers`: timers of sessions. `expiries`: the next expiry of each book.
//! - [`inline_node`]: single-threaded driver that the caller polls.
//! - `sink`: sink for complete records: the journal, or none. `codec`, `varint`: their encoding.
//! - `engine_ring`, `engine_pool`: the rings of each engine, and the threads that poll it: one for
//!   all (`shared`) or several (`pinned`). In layout `fused` the hot thread has the books.
//! - `window_pool`: threads that prepare memory for price windows that grow.
//! - [`stats`]: counters for metrics.
//! - [`reader`]: complete records up to the commit position, for settlement, history and sessions.
//! - [`image`]: the state as a snapshot, which the replica makes.
//! - [`checkpoint`]: when checkpoints are written, and which of them a restart can use.
//! - [`retention`]: truncates the journal while the node runs.
//! - [`inspect`]: offline inspection of a journal.
//! - [`recover`]: recovery from the journal, with a comparison of every event.
//!
//! Architecture invariants:
//!
//! - Commands that an iteration of the hot thread has answered are in the journal's buffer at the
//!   end of the iteration.
//! - An answer means *accepted*. A command is *durable* once the commit position reaches it.
//! - The hot thread waits for no disk. Before its end it waits for no lock that is held for long:
//!   those of a prepared price window and of a lent book are held for a few instructions. A request
//!   waits for a full ring for at most 10 ms. `hot` names the waits for engines without a limit.

pub mod backlog;
pub mod checkpoint;
mod codec;
pub mod config;
pub mod core;
mod engine_pool;
mod engine_ring;
mod expiries;
pub mod handle;
mod hot;
pub mod image;
mod in_flight;
pub mod inline_node;
pub mod inspect;
mod limits;
pub mod park;
mod polled;
pub mod port;
pub mod priority;
pub mod reader;
pub mod record;
pub mod recover;
pub mod retention;
pub mod ring_port;
mod sink;
pub mod stats;
mod timers;
mod varint;
mod window_pool;

pub use backlog::{Backlog, Bounds, IntakeCause, Stage};
pub use checkpoint::{
    CheckpointError, CheckpointKeeper, Checkpoints, SnapshotConfig, UsableCheckpoints,
};
pub use config::{Clock, Config, Layout};
pub use core::Core;
pub use handle::{Commit, ReplicaParts, SequencerHandle, Volatile};
pub use image::ImageError;
pub use inline_node::InlineNode;
pub use journal::JournalFailed;
pub use limits::limits;
pub use park::Parker;
pub use polled::{Polled, run_polled};
pub use port::{Outcome, Port, Reply, SubmitError};
pub use reader::{ReadError, Reader};
pub use record::Record;
pub use recover::{StartError, replay};
pub use retention::{Durable, Retention};
pub use ring_port::{Opened, OrderToTrade, Report, RingPort, Stamp, Submission};
pub use stats::Stats;
