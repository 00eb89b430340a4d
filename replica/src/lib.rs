//! The node's one reader of the journal: applies it to a second core, publishes the effects.
//!
//! Decodes each record once, applies it, compares the events, and hands its effects to bounded
//! subscribers: session messages, history, settlement, Kafka. Reads are served from its state
//! (`design.md` 6).
//!
//! | file | contents |
//! |---|---|
//! | `effects` | what a record changed, with orders and holds; session messages and their numbers |
//! | `state` | the core and the replica's own tables: a pure fold |
//! | `orders` | details of open orders, found by slot and by public id |
//! | `names` | ids and specs of dense indexes |
//! | `image` | checkpoints |
//! | `live` | the thread and its handle for other threads |
//! | `hub`, `follower` | followers: one queue each; a follower that lags reads from files |
//! | `catch_up` | a temporary replica, started from a checkpoint |
//! | `offline` | writes a checkpoint of a stopped node's journal |
//!
//! Architecture invariants: the replica never waits for a follower; a difference between replica
//! and journal stops publishing and closes admission to new orders; the same journal has
//! the same effects and numbers for every reader.

mod catch_up;
mod effects;
mod follower;
mod hub;
mod image;
mod live;
mod names;
mod offline;
mod orders;
mod state;

pub use catch_up::{CatchUp, ReplicaError};
pub use effects::{Applied, Batch, Effect, Hold, Moved, Order, Session, Trade, TradeStatus};
pub use follower::Follower;
pub use image::{Checkpoint, restore};
pub use live::{LiveReplica, PART, Replica};
pub use names::{HoldName, Names};
pub use offline::{SnapshotError, snapshot};
pub use state::{Differs, State};
pub use types::command::Cause;
