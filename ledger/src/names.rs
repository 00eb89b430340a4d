//! Names of accounts and sub-accounts (specification 2.6, T16, T36).
//!
//! `<user>:<instrument>`, `<user>:<instrument>:blocked`, `system:<purpose>:<instrument>`. A user id
//! has no `:`, and nobody is called `system`.

use std::borrow::Cow;

use types::{CFA_RUB, InstrumentId, SYSTEM_USER, UserId, subaccount};

use crate::model::AccountType;

/// The specification's one reserve for every instrument; postings of another instrument are led to
/// that instrument's own (T16).
const RESERVE_OF_ALL: &str = "system:reserve:CFA-EQ";

/// What a sub-account is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose<'a> {
    /// Spendable by its user.
    User,
    /// Seized units of its user.
    Blocked,
    /// `reserve`, `fees` or another house purpose.
    System(&'a str),
}

/// A sub-account name taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubAccountName<'a> {
    pub user_id: &'a str,
    pub instrument_id: &'a str,
    pub purpose: Purpose<'a>,
}

impl<'a> SubAccountName<'a> {
    /// `None` for a text that is no sub-account name.
    pub fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(':');
        let (first, second, third) = (parts.next()?, parts.next()?, parts.next());
        if parts.next().is_some() {
            return None;
        }
        let name = if first == SYSTEM_USER {
            let is_purpose = !second.is_empty()
                && second.len() <= 32
                && second.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
            SubAccountName {
                user_id: SYSTEM_USER,
                instrument_id: third.filter(|_| is_purpose)?,
                purpose: Purpose::System(second),
            }
        } else {
            let purpose = match third {
                None => Purpose::User,
                Some("blocked") => Purpose::Blocked,
                Some(_) => return None,
            };
            SubAccountName {
                user_id: UserId::new(first).is_ok().then_some(first)?,
                instrument_id: second,
                purpose,
            }
        };
        InstrumentId::new(name.instrument_id).ok()?;
        Some(name)
    }

    /// CFA-RUB lives in MAIN, other instruments in INVEST, seized units in BLOCKED (T36).
    pub fn account_type(&self) -> AccountType {
        match self.purpose {
            Purpose::Blocked => AccountType::Blocked,
            _ if self.instrument_id == CFA_RUB => AccountType::Main,
            _ => AccountType::Invest,
        }
    }

    pub fn is_system(&self) -> bool {
        matches!(self.purpose, Purpose::System(_))
    }

    /// The reserve is negative by the supply in circulation, and a fee may have to be given back
    /// (T17). Any other house sub-account pays out only what it received.
    pub fn may_be_negative(&self) -> bool {
        matches!(self.purpose, Purpose::System("reserve" | "fees"))
    }
}

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
    fn t36_names_are_taken_apart_or_refused() {
        let user = subaccount::of_user("u1", "BOND-1");
        let user = SubAccountName::parse(&user).unwrap();
        assert_eq!((user.user_id, user.instrument_id), ("u1", "BOND-1"));
        assert_eq!(user.account_type(), AccountType::Invest);
        let seized = SubAccountName::parse("u1:CFA-RUB:blocked").unwrap();
        assert_eq!(seized.account_type(), AccountType::Blocked);
        let fees = subaccount::fees(CFA_RUB);
        let fees = SubAccountName::parse(&fees).unwrap();
        assert!(fees.is_system() && fees.may_be_negative());
        assert!(
            !SubAccountName::parse("system:redemption:CFA-RUB")
                .unwrap()
                .may_be_negative()
        );
        for bad in [
            "",
            "u1",
            "u1:",
            ":CFA-RUB",
            "u1:bond",
            "u1:CFA-RUB:x",
            "u1:CFA-RUB:blocked:x",
            "system:CFA-RUB",
            "system::CFA-RUB",
        ] {
            assert_eq!(SubAccountName::parse(bad), None, "{bad}");
        }
    }

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
