//! Places where a test can kill the process: between a step of a payout or refund and its record.

pub use service_kit::failpoint::reach;

/// The order is recorded as begun, nothing is sent to the bank.
pub const ORDER_BEGUN: &str = "payments.order_begun";
/// The order was sent to the bank, its answer is not recorded.
pub const ORDER_SENT: &str = "payments.order_sent";

/// The bank's result is written, its event is not; the transaction is open.
pub const RESULT_WRITTEN: &str = "payments.result_written";
/// Result and event are written, the transaction is not committed.
pub const EVENT_WRITTEN: &str = "payments.event_written";
/// Result and event are committed.
pub const RESULT_COMMITTED: &str = "payments.result_committed";
