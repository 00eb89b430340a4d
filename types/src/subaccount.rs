//! Ids of the ledger's sub-accounts (specification 2.6, T16, T36).
//!
//! `<user>:<instrument>`, `<user>:<instrument>:blocked` and `system:<purpose>:<instrument>`. A user
//! id contains no `:`, and no user is called `system`.

use alloc::format;
use alloc::string::String;

use crate::code_enum;
use crate::text::{InstrumentId, UserId};

/// Owner of the reserve, fee and other house sub-accounts.
pub const SYSTEM_USER: &str = "system";
/// Instrument id of ledger money.
pub const CFA_RUB: &str = "CFA-RUB";
/// Owner of the fee sub-accounts and of the fees' address on chain.
pub const FEES: &str = "system:fees";
/// Owner, also on chain, of what the redemption of an issue has collected and not distributed yet.
pub const REDEMPTION: &str = "system:redemption";
/// Owner, also on chain, of the units and payments of a placement that is being delivered.
pub const PLACEMENT: &str = "system:placement";
/// The specification's single reserve for all instruments. Its postings are routed to the
/// instrument's own reserve (T16).
pub const RESERVE_OF_ALL: &str = "system:reserve:CFA-EQ";

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
    format!("{FEES}:{instrument_id}")
}

/// The id without the suffix `:blocked`: the chain does not distinguish seized units.
pub fn strip_blocked(subaccount_id: &str) -> &str {
    subaccount_id
        .strip_suffix(":blocked")
        .unwrap_or(subaccount_id)
}

/// Purpose of a sub-account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose<'a> {
    /// Spendable by its user.
    User,
    /// Seized units of its user.
    Blocked,
    /// `reserve`, `fees` or another house purpose.
    System(&'a str),
}

/// A parsed sub-account name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubAccountName<'a> {
    pub user_id: &'a str,
    pub instrument_id: &'a str,
    pub purpose: Purpose<'a>,
}

code_enum! {
    /// The account of a user that contains a sub-account.
    AccountType: i32 { Main = 1 "MAIN", Invest = 2 "INVEST", Blocked = 3 "BLOCKED" }
}

impl<'a> SubAccountName<'a> {
    /// `None` for a text that is not a sub-account name.
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

    /// CFA-RUB belongs to MAIN, other instruments to INVEST, seized units to BLOCKED (T36).
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

    /// True for reserves and fees.
    ///
    /// A reserve is negative by the supply in circulation, and a fee may have to be refunded (T17).
    /// Any other house sub-account pays out only what it received.
    pub fn may_be_negative(&self) -> bool {
        matches!(self.purpose, Purpose::System("reserve" | "fees"))
    }
}

/// Holder of a sub-account's units: a user's id or `system:<purpose>`.
///
/// `None` for a reserve, whose units are not in circulation.
pub fn holder(subaccount_id: &str) -> Option<&str> {
    let name = SubAccountName::parse(subaccount_id)?;
    match name.purpose {
        Purpose::System("reserve") => None,
        Purpose::System(purpose) => Some(&subaccount_id[..SYSTEM_USER.len() + 1 + purpose.len()]),
        Purpose::User | Purpose::Blocked => Some(name.user_id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t36_names_are_parsed_or_refused() {
        let user = of_user("u1", "BOND-1");
        let user = SubAccountName::parse(&user).unwrap();
        assert_eq!((user.user_id, user.instrument_id), ("u1", "BOND-1"));
        assert_eq!(user.account_type(), AccountType::Invest);
        let seized = SubAccountName::parse("u1:CFA-RUB:blocked").unwrap();
        assert_eq!(seized.account_type(), AccountType::Blocked);
        let fees = fees(CFA_RUB);
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
        for (id, of) in [
            ("u1:BOND-1", Some("u1")),
            ("u1:BOND-1:blocked", Some("u1")),
            ("system:fees:CFA-RUB", Some("system:fees")),
            ("system:reserve:CFA-RUB", None),
        ] {
            assert_eq!(holder(id), of, "{id}");
        }
    }
}
