//! One append-only log per engine node: sequenced commands and their events as framed bytes, durable in admission order.
//!
//! - [`frame`]: how a frame looks, its checksum chain.
//! - [`storage`]: what the log needs of a disk; real files, and a memory disk that loses power ([`fault`]).
//! - [`log`]: opening (torn tail cut, hole refused), the writer thread with natural group commit, the commit position.
//! - `survey`: the walk behind opening; [`walk`] is the part of it that only reads.
//! - [`snapshot`]: states of the machine behind the log, one file each, found again newest first.
//! - [`reader`]: tails frames up to the commit position.
//!
//! The room knows nothing of what the payloads mean. Invariants: what [`log::Commit`] reports durable is found again after any crash; a
//! reader never sees a frame that a crash could still take away; a batch is durable before the next one is written.

pub mod fault;
pub mod frame;
pub mod log;
pub mod reader;
pub mod snapshot;
pub mod storage;
mod survey;

pub use frame::{Frame, FrameKind};
pub use log::{Appender, Commit, Config, Journal, JournalError, JournalFailed};
pub use reader::Reader;
pub use snapshot::{Snapshot, Snapshots};
pub use storage::{FileStorage, Storage};
pub use survey::walk;
