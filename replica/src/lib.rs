//! The node's one reader of the journal: applies it to a second core, publishes the effects.
//!
//! The replica decodes each record once, applies it, compares the events, and hands its effects to
//! followers over bounded queues: sessions, history, settlement, feed. Reads are served from its
//! state (`design.md` 6).
//!
//! | file | contents |
//! |---|---|
//! | `effects` | the changes that a record made, with orders and holds; numbered session messages |
//! | `state` | the core and the replica's own tables: a pure fold |
//! | `orders` | details of open orders, found by slot and by public id |
//! | `names` | ids and specs for the indexes in effects |
//! | `image` | checkpoints |
//! | `live` | the thread and its handle for other threads |
//! | `hub`, `follower` | followers: one queue each; a follower that lags reads from files |
//! | `catch_up` | a temporary replica, started from a checkpoint |
//! | `offline` | replays a journal from its files; writes a checkpoint of a stopped node |
//!
//! Architecture invariants:
//!
//! - The replica never waits for a follower.
//! - A difference between replica and journal ends publishing and closes admission to new orders.
//! - The same journal has the same effects and message numbers for every reader.

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
pub use image::{Checkpoint, SessionPosition, restore};
pub use live::{LiveReplica, PART, Replica};
pub use names::{HoldName, Names};
pub use offline::{SnapshotError, earliest_state, replay, snapshot};
pub use state::{Differs, State};
pub use types::command::Cause;
