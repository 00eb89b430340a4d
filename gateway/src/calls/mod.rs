//! What this room asks of other services, in its own words: the only place outside `api` that sees their wire types.

pub mod cfa;
pub mod identity;
pub mod ledger;

pub use cfa::{Cfa, Listed, ListedStatus};
pub use identity::Identity;
pub use ledger::{Ledger, LedgerHold};
