//! One append-only log per engine node: sequenced commands and their events as framed bytes, durable in admission order.
//!
//! - [`frame`]: how a frame looks, its checksum chain.
//! - [`storage`]: what the log needs of a disk; real files, and a memory disk that loses power ([`fault`]).
//! - [`log`]: opening (torn tail cut, hole refused), the writer thread with natural group commit, the commit position.
//! - [`reader`]: tails frames up to the commit position.
//!
//! The room knows nothing of what the payloads mean. Invariants: what [`log::Commit`] reports durable is found again after any crash; a
//! reader never sees a frame that a crash could still take away; a batch is durable before the next one is written.

pub mod fault;
pub mod frame;
pub mod log;
pub mod reader;
pub mod storage;

pub use frame::{Frame, FrameKind};
pub use log::{Appender, Commit, Config, Journal, JournalError, JournalFailed};
pub use reader::Reader;
pub use storage::{FileStorage, Storage};
