//! Names of accounts, and the one reserve that stands for every instrument's (specification 2.6, T16).

use std::borrow::Cow;

use types::subaccount;
pub use types::subaccount::SubAccountName;

use crate::model::AccountType;

/// The specification's one reserve for every instrument; postings of another instrument are led to
/// that instrument's own (T16).
const RESERVE_OF_ALL: &str = "system:reserve:CFA-EQ";

/// Leads a posting of `instrument_id` that names the reserve of all instruments to that instrument's own reserve (T16).
pub fn routed<'a>(subaccount_id: &'a str, instrument_id: &str) -> Cow<'a, str> {
    if subaccount_id == RESERVE_OF_ALL {
        Cow::Owned(subaccount::reserve(instrument_id))
    } else {
        Cow::Borrowed(subaccount_id)
    }
}

/// `<user>:MAIN`: one account of each type per user, so its id is derived.
pub fn account_id(user_id: &str, kind: AccountType) -> String {
    format!("{user_id}:{}", kind.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t16_reserve_of_all_is_led_to_the_instruments_own() {
        assert_eq!(
            routed("system:reserve:CFA-EQ", "BOND-1"),
            "system:reserve:BOND-1"
        );
        assert_eq!(
            routed("system:reserve:CFA-EQ", "CFA-EQ"),
            "system:reserve:CFA-EQ"
        );
        assert_eq!(routed("u1:BOND-1", "BOND-1"), "u1:BOND-1");
    }
}
