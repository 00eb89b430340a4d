//! Append-only log of one engine node: sequenced commands and their events as framed bytes.
//!
//! Frames become durable in the order of admission.
//!
//! - [`frame`]: frame and mark layout, checksum chain.
//! - [`aligned`]: page-aligned buffers and whole blocks for direct I/O.
//! - [`storage`]: the storage interface; real files, and an in-memory disk that loses power
//!   ([`fault`]).
//! - [`log`]: opening (truncates a torn tail, refuses a hole) and the commit position.
//!   [`Appender`]: makes frames and hands them to the writer. `writer`: the thread with natural
//!   group commit.
//! - `scan`, `chain`: the scan that opening a log runs. [`visit_frames`], [`visit_frames_after`],
//!   [`check`] and [`list`] are its read-only parts.
//! - [`SegmentTruncator`]: removes whole segments from the log's beginning.
//! - [`snapshot`]: the caller's state at a sequence, one file each. Bad files are skipped.
//! - [`reader`]: tails frames up to the commit position, recent ones from memory (`recent`).
//!   [`Follower`]: the same from another process, up to the last mark.
//!
//! This crate does not interpret payloads. Invariants:
//!
//! - Records that [`log::Commit`] reports durable survive any crash.
//! - A reader never sees a frame that a crash could still lose.
//! - A batch is durable before the next one is written.
//! - A durable block is never rewritten.

pub mod aligned;
mod appender;
mod chain;
pub mod fault;
mod follower;
pub mod frame;
pub mod log;
pub mod reader;
mod recent;
mod scan;
pub mod snapshot;
pub mod storage;
mod truncate;
mod writer;

pub use appender::{Appender, Room};
pub use follower::Follower;
pub use frame::{Frame, FrameKind, SMALL_BYTES};
pub use log::{Commit, Config, Journal, JournalError, JournalFailed, Listener, Stats};
pub use reader::Reader;
pub use scan::{
    Checked, SegmentInfo, check, list, removed_through, visit_frames, visit_frames_after,
};
pub use snapshot::{Snapshot, Snapshots};
pub use storage::{FileStorage, Mode, Storage, is_out_of_descriptors, make_folder};
pub use truncate::SegmentTruncator;
