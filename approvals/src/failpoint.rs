//! Places where a test can kill the process: between the steps of an approved call.

pub use service_kit::failpoint::reach;

/// The attempt is recorded as begun, nothing is sent.
pub const CALL_BEGUN: &str = "approvals.call_begun";
/// The call was answered, its result is not recorded.
pub const CALL_ANSWERED: &str = "approvals.call_answered";
