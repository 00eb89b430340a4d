//! Account ids, and routing to the reserve of each instrument (specification 2.6, T16).

use std::borrow::Cow;

use types::subaccount;
pub use types::subaccount::SubAccountName;

use crate::model::AccountType;

/// Replaces the reserve of all instruments by the reserve of `instrument_id` (T16).
pub fn routed<'a>(subaccount_id: &'a str, instrument_id: &str) -> Cow<'a, str> {
    if subaccount_id == subaccount::RESERVE_OF_ALL {
        Cow::Owned(subaccount::reserve(instrument_id))
    } else {
        Cow::Borrowed(subaccount_id)
    }
}

/// Account id such as `<user>:MAIN`. A user has one account per type.
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
