//! Failpoints: a test kills the process between a step of an operation or of a batch of trades and
//! its record.

pub use service_kit::failpoint::reach;

pub const BURN_SUBMITTED: &str = "cfa.burn_submitted";
pub const PAYOUT_STARTED: &str = "cfa.payout_started";
pub const PAYOUT_RELEASED: &str = "cfa.payout_released";
pub const HOLD_CONSUMED: &str = "cfa.hold_consumed";
pub const MINTED_BACK: &str = "cfa.minted_back";
pub const HOLD_RELEASED: &str = "cfa.hold_released";

/// The burn's receipt is recorded; the payout is not released.
pub const BURN_FINAL: &str = "cfa.burn_final";

/// A deposit's operation is recorded; nothing is submitted to the chain.
pub const ISSUE_RECORDED: &str = "cfa.issue_recorded";
/// The mint is submitted; its transaction hash is not recorded.
pub const MINT_SUBMITTED: &str = "cfa.mint_submitted";
/// Identity has reserved the day limit; the reservation is not recorded.
pub const LIMIT_RESERVED: &str = "cfa.limit_reserved";
/// Identity has refused the day limit; the refusal is not recorded.
pub const LIMIT_REFUSED: &str = "cfa.limit_refused";

/// The ledger has the hold or the postings of an operation; this is not recorded.
pub const GATED: &str = "cfa.gated";
/// The chain transaction of an issue or a redemption of units or of a transfer is submitted; its
/// hash is not recorded.
pub const SUBMITTED: &str = "cfa.submitted";
/// The ledger's operation is final; this is not recorded.
pub const FINALIZED: &str = "cfa.finalized";
/// The ledger's operation is reversed; this is not recorded.
pub const REVERSED: &str = "cfa.reversed";

/// A transaction of an issue's redemption is submitted, its funding first; nothing of it is
/// recorded.
pub const REDEMPTION_SUBMITTED: &str = "cfa.redemption_submitted";
/// The ledger has the operations of a part of the distribution; this is not recorded.
pub const PART_POSTED: &str = "cfa.part_posted";
/// The end of a part is recorded, that of the redemption is not.
pub const PART_ENDED: &str = "cfa.part_ended";

/// A batch and its operations are stored; nothing is submitted.
pub const BATCH_STORED: &str = "cfa.batch_stored";
/// A batch's transaction is submitted; its hash is not recorded.
pub const BATCH_SUBMITTED: &str = "cfa.batch_submitted";
/// A batch's end is recorded; no caller knows it.
pub const BATCH_ENDED: &str = "cfa.batch_ended";
