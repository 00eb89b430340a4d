//! One append-only log per engine node: sequenced commands and their events as framed bytes,
//! durable in admission order.
//!
//! - [`frame`]: how a frame and a mark look, the checksum chain.
//! - [`aligned`]: buffers and blocks as a disk wants them.
//! - [`storage`]: what the log needs of a disk; real files, and a memory disk that loses power ([`fault`]).
//! - [`log`]: opening (torn tail cut, hole refused), the commit position. [`Appender`]: frames and
//!   their hand-over. `writer`: the thread with natural group commit.
//! - `survey`, `walk`: the walk behind opening; [`walk()`], [`walk_after`], [`check`] and [`list`]
//!   are the parts of it that only read.
//! - [`Front`]: takes whole segments away from the beginning.
//! - [`snapshot`]: states of the machine behind the log, one file each, found again newest first.
//! - [`reader`]: tails frames up to the commit position, the last ones from memory (`recent`).
//!   [`Follower`]: the same from another process, up to the last mark.
//!
//! The room knows nothing of what the payloads mean. Invariants: what [`log::Commit`] reports
//! durable is found again after any crash; a reader never sees a frame that a crash could still
//! take away; a batch is durable before the next one is written; a durable block is never written
//! again.

pub mod aligned;
mod appender;
pub mod fault;
mod follower;
pub mod frame;
mod front;
pub mod log;
pub mod reader;
mod recent;
pub mod snapshot;
pub mod storage;
mod survey;
mod walk;
mod writer;

pub use appender::Appender;
pub use follower::Follower;
pub use frame::{Frame, FrameKind, SMALL_BYTES};
pub use front::Front;
pub use log::{Commit, Config, Journal, JournalError, JournalFailed, Listener, Stats};
pub use reader::Reader;
pub use snapshot::{Snapshot, Snapshots};
pub use storage::{FileStorage, Mode, Storage, is_out_of_descriptors, make_folder};
pub use survey::{Checked, SegmentInfo, check, list, removed_through, walk, walk_after};
