//! Failpoints: a test kills the process between a step of a saga and its record.

pub use service_kit::failpoint::reach;

pub const BURN_SUBMITTED: &str = "cfa.burn_submitted";
pub const PAYOUT_STARTED: &str = "cfa.payout_started";
pub const PAYOUT_RELEASED: &str = "cfa.payout_released";
/// Payments has cancelled the payout, or stated that the bank has it; this is not recorded.
pub const PAYOUT_CANCELLED: &str = "cfa.payout_cancelled";
pub const HOLD_CONSUMED: &str = "cfa.hold_consumed";
/// The mint of burned tokens is submitted; its receipt is not read.
pub const MINT_BACK_SENT: &str = "cfa.mint_back_sent";
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
/// Identity has ended the reservations of ended operations; this is not recorded.
pub const LIMITS_ENDED: &str = "cfa.limits_ended";
/// Identity has ended the reservations of ended subscriptions; this is not recorded.
pub const OFFER_LIMITS_ENDED: &str = "cfa.offer_limits_ended";

/// The ledger has the hold or the postings of an operation; this is not recorded.
pub const GATED: &str = "cfa.gated";
/// The transaction of an issue, redemption or transfer of units is submitted; its hash is not
/// recorded.
pub const UNITS_SUBMITTED: &str = "cfa.units_submitted";
/// The ledger has made the operation final; that is not recorded.
pub const OPERATION_SETTLED: &str = "cfa.operation_settled";
/// The ledger's operation is reversed; this is not recorded.
pub const REVERSED: &str = "cfa.reversed";
/// The payment or the units of an offer are held; the offer is not active.
pub const OFFER_HELD: &str = "cfa.offer_held";
/// The payment or the units of an ended offer are released; this is not recorded.
pub const OFFER_RELEASED: &str = "cfa.offer_released";

/// A transaction of a redemption or coupon is submitted, its funding first; nothing of it is
/// recorded.
pub const REDEMPTION_SUBMITTED: &str = "cfa.redemption_submitted";
/// A transaction of the redemption of an issue is in a block, first the funding, then the parts; it
/// is not recorded.
pub const REDEMPTION_STEP: &str = "cfa.redemption_step";
/// The ledger has the operations of a part of the distribution; this is not recorded.
pub const PART_POSTED: &str = "cfa.part_posted";
/// The end of a part is recorded, that of the redemption is not.
pub const PART_ENDED: &str = "cfa.part_ended";

/// The snapshot of a coupon is recorded; nothing is paid.
pub const COUPON_RECORDED: &str = "cfa.coupon_recorded";

/// A batch and its operations are stored; nothing is submitted.
pub const BATCH_STORED: &str = "cfa.batch_stored";
/// A batch's transaction is submitted; its hash is not recorded.
pub const BATCH_SUBMITTED: &str = "cfa.batch_submitted";
/// A batch's end is recorded; no caller knows it.
pub const BATCH_ENDED: &str = "cfa.batch_ended";

/// Identity has reserved the limits of a subscription; its hold is not made.
pub const SUBSCRIPTION_RESERVED: &str = "cfa.subscription_reserved";
/// The period of a placement has ended; its subscribers are not screened.
pub const PLACEMENT_CLOSING: &str = "cfa.placement_closing";
/// The allotment, or the failure, is recorded; no payment is released.
pub const PLACEMENT_DECIDED: &str = "cfa.placement_decided";
/// Payments without an allotment are released; the release is not recorded.
pub const PLACEMENT_RELEASED: &str = "cfa.placement_released";
/// The ledger has posted the issue to the placement account; the chain has not.
pub const PLACEMENT_MINT_POSTED: &str = "cfa.placement_mint_posted";
/// The chain has issued the units; the ledger's operation is not final.
pub const PLACEMENT_MINTED: &str = "cfa.placement_minted";
/// The operations of a part are recorded; the ledger has not posted them.
pub const PLACEMENT_PART_RECORDED: &str = "cfa.placement_part_recorded";
/// The ledger has posted a part; the posting is not recorded.
pub const PLACEMENT_PART_POSTED: &str = "cfa.placement_part_posted";
/// The chain has exchanged a part; the ledger's operations are not final.
pub const PLACEMENT_PART_EXCHANGED: &str = "cfa.placement_part_exchanged";
/// The ledger's operations of a part are final; the part is not recorded.
pub const PLACEMENT_PART_FINAL: &str = "cfa.placement_part_final";
/// The chain has paid the issuer; the ledger's operation is not final.
pub const PLACEMENT_PAID: &str = "cfa.placement_paid";

/// A freeze is recorded; the ledger has not frozen the units.
pub const FREEZE_RECORDED: &str = "cfa.freeze_recorded";
/// The ledger has frozen the units; this is not recorded.
pub const FREEZE_HELD: &str = "cfa.freeze_held";
/// The transaction of a freeze is submitted; nothing of it is recorded.
pub const FREEZE_SUBMITTED: &str = "cfa.freeze_submitted";
/// The lifting of a freeze is recorded; nothing is submitted to the chain.
pub const LIFT_RECORDED: &str = "cfa.lift_recorded";
/// The transaction that lifts a freeze is submitted; nothing of it is recorded.
pub const LIFT_SUBMITTED: &str = "cfa.lift_submitted";
/// The ledger has released the units of a lifted freeze; this is not recorded.
pub const FREEZE_RELEASED: &str = "cfa.freeze_released";
/// The transaction that unfreezes the units of a forced transfer is submitted; the transfer is not.
pub const UNFREEZE_SUBMITTED: &str = "cfa.unfreeze_submitted";
/// The addresses of a part of a move are recorded; the part is not submitted.
pub const MOVE_LISTED: &str = "cfa.move_listed";
/// A transaction of a move of all holders is submitted; nothing of it is recorded.
pub const MOVE_SUBMITTED: &str = "cfa.move_submitted";
/// A transaction of a move is in a block; the end of its step is not recorded.
pub const MOVE_STEP: &str = "cfa.move_step";
/// The instrument has its new token; no caller knows it.
pub const MOVE_ENDED: &str = "cfa.move_ended";

/// A break is recorded; its instrument is not halted.
pub const BREAK_RECORDED: &str = "cfa.break_recorded";
