//! Room `replica`: the one reader of the journal. It decodes each record once, applies it to a
//! second machine, compares the events, and hands what it did to bounded subscribers: session
//! messages, history, settlement, Kafka; reads are answered from its state (`design.md` 6).
//!
//! | file | what |
//! |---|---|
//! | `facts` | what a record did: effects with orders and holds, and the sessions' numbered messages |
//! | `state` | the machine and the tables beside it: a pure fold |
//! | `names` | what indexes stand for |
//! | `image` | checkpoints |
//! | `live` | the thread, and what others may ask of it |
//! | `hub`, `follower` | followers: a queue each; one that falls behind reads from files |
//! | `catch_up` | a replica from a checkpoint on, for a while |
//! | `offline` | a checkpoint of a journal at rest |
//!
//! Architecture invariants: the replica never waits for a follower; a difference between the
//! replica and the journal stops publishing and closes admission to new orders; the same journal
//! gives the same effects and numbers to every reader.

mod catch_up;
mod facts;
mod follower;
mod hub;
mod image;
mod live;
mod names;
mod offline;
mod state;

pub use catch_up::{CatchUp, ReplicaError};
pub use facts::{Applied, Batch, Effect, Hold, Moved, Order, Session, Trade, TradeStatus};
pub use follower::Follower;
pub use image::{Checkpoint, restore};
pub use live::{LiveReplica, PART, Replica};
pub use names::{HoldName, Names};
pub use offline::{SnapshotError, snapshot};
pub use state::{Differs, State};
pub use types::command::Cause;
