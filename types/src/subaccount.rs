//! Ids of the ledger's sub-accounts (specification 2.6, T16, T36): `<user>:<instrument>` and
//! `system:<purpose>:<instrument>`. A user id contains no `:`, and no user is called `system`.

use alloc::format;
use alloc::string::String;

/// Owner of the reserve, fee and other house sub-accounts.
pub const SYSTEM_USER: &str = "system";
/// Instrument id of ledger money.
pub const CFA_RUB: &str = "CFA-RUB";

/// The user's own sub-account.
pub fn of_user(user_id: &str, instrument_id: &str) -> String {
    format!("{user_id}:{instrument_id}")
}

/// Counterparty of issue and redemption.
pub fn reserve(instrument_id: &str) -> String {
    format!("{SYSTEM_USER}:reserve:{instrument_id}")
}

/// Fees that the house earned.
pub fn fees(instrument_id: &str) -> String {
    format!("{SYSTEM_USER}:fees:{instrument_id}")
}
