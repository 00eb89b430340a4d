//! Places where a test can kill the process, in the order of a batch's steps.

pub use service_kit::failpoint::reach;

pub const SEALED: &str = "settlement.sealed";
/// Trades have left a batch that the ledger refuses; the batch is stored and not posted.
pub const WITHDRAWN: &str = "settlement.withdrawn";
pub const POSTED: &str = "settlement.posted";
pub const SUBMITTED: &str = "settlement.submitted";
pub const FINALIZED: &str = "settlement.finalized";
/// The operations of bust trades are reversed.
pub const BUSTED: &str = "settlement.busted";
