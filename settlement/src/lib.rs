//! Drives each trade's delivery versus payment through ledger and chain.
//!
//! | file | contents |
//! |---|---|
//! | `trading_state` | orders and hold balances at settlement's position, from replica effects |
//! | `split` | order holds: split, spent, returned; the hold invariant |
//! | `plan` | contents of one ledger transaction |
//! | `batch` | the settler: records in, sealed batches out |
//! | `saga` | state machine of a sealed batch |
//! | `bust` | stored form of `Bust` commands |
//! | `repo` | the store: completed steps per batch |
//! | `request` | plans as requests to ledger and chain |
//! | `progress` | settlement's positions, for the sequencer, the journal and waiting callers |
//! | `run` | the workers: post to the ledger, submit to the chain, finalize, journal progress |
//! | `api` | the calls for operators: status, batches, differences, retry, bust |
//! | `failpoint` | places where tests kill the process |
//!
//! Architecture invariants: `trading_state` to `saga` read no clock, file or network, and compute
//! no reserve and no fee: effects contain both. No chain step precedes the commit of the trade's
//! ledger transaction. The ledger stores the journal position in the transaction that moves the
//! money. Settlement has no checkpoint of its own.

mod api;
pub mod batch;
mod bust;
pub mod failpoint;
pub mod plan;
mod progress;
mod repo;
mod request;
mod run;
pub mod saga;
pub mod split;
pub mod trading_state;

pub use progress::{Lag, Progress, Stats, Suspension};
pub use repo::{BreakRow, StoreError, bust_or_open, open_batch_ids};
pub use run::{
    JournalPort, SettlementConfig, SettlementDeps, SettlementHandle, StartError, journal_port,
    sealed_store, settled_through, start, verify_audit,
};
