//! The `settle` benchmark: from the journal of trades to finality on chain, and its floor.
//!
//! | file | contents |
//! |---|---|
//! | `flow` | journal records of trades between members |
//! | `platform` | chain, ledger, CFA service and settlement over one folder and journal |
//! | `members` | users, issued money and units, trading holds |
//! | `capture` | rows that a platform writes, by transaction |
//! | `floor` | the captured rows as bare statements and the batches in bare revm, both at once |
//! | `files` | copies of a data folder, its used bytes and figures of its stores |

pub mod capture;
pub mod files;
pub mod floor;
pub mod flow;
pub mod members;
pub mod platform;
