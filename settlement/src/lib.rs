//! Room `settlement`: follows the replica and drives each trade's delivery against payment through ledger and chain.
//!
//! | file | what |
//! |---|---|
//! | `copies` | the replica's last effects at settlement's own position: open orders, balances of holds |
//! | `carve` | orders' own holds: split, paid from, given back; the invariant |
//! | `plan` | what one ledger transaction does |
//! | `batch` | the settler: records in, sealed batches out |
//! | `saga` | the life of a sealed batch, step by step |
//! | `bust` | what sessions are told of a bust trade, as bytes |
//! | `repo` | the store: which step of which batch is done |
//! | `request` | plans as requests to ledger and chain |
//! | `progress` | how far settlement is, for those who wait or must not run ahead |
//! | `run` | the workers: follows, posts, brings to the chain, finalizes, journals how far it is |
//! | `failpoint` | where tests kill the process |
//!
//! Architecture invariants: `copies` to `saga` read no clock, no file, no network, and compute no
//! reserve and no fee: effects carry them; no chain step is taken before the trade's ledger
//! transaction is committed; the position in the journal is kept by the ledger, in the transaction
//! of the money, and settlement has no checkpoint of its own.

pub mod batch;
mod bust;
pub mod carve;
pub mod copies;
pub mod failpoint;
pub mod plan;
mod progress;
mod repo;
mod request;
mod run;
pub mod saga;

pub use progress::{Lag, Progress, Stats, Suspension};
pub use repo::{BreakRow, StoreError};
pub use run::{
    JournalPort, SettlementConfig, SettlementDeps, SettlementHandle, StartError, journal_port,
    settled_through, start,
};
