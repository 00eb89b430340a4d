//! Conversions between the sandbox's types and the messages of `dfa.identity.v1`.

use proto::{
    common::v1 as common,
    convert::{self, to_decimal, to_timestamp_us},
    identity::v1 as pb,
};
use rpc::{Caller, status::invalid_argument};
use sha2::{Digest, Sha256};
use tonic::Status;
use types::{Decimal, LimitType};

use crate::identity::repo::User;

pub fn profile(user: &User) -> pb::UserProfile {
    let status = if user.blocked.is_some() {
        pb::UserStatus::Blocked
    } else {
        pb::UserStatus::Active
    };
    pb::UserProfile {
        user_id: user.user_id.clone(),
        kyc_status: user.kyc_level,
        bank_account: user.bank_account.clone(),
        status: status as i32,
        qualified_investor: user.qualified_investor,
        onchain_address: user.onchain_address.clone(),
        full_name_hash: user.full_name_hash.clone(),
        created_at: Some(to_timestamp_us(user.created_at_us)),
    }
}

/// The profile as the caller sees it: who need not know the account gets it masked.
pub fn profile_for(caller: &Caller, user: &User) -> pb::UserProfile {
    let mut shown = profile(user);
    if !caller.sees_bank_account_of(&user.user_id) {
        shown.bank_account = rail::account::masked(&user.bank_account);
    }
    shown
}

pub fn limit_type(number: i32) -> Result<LimitType, Status> {
    LimitType::from_code(number)
        .ok_or_else(|| invalid_argument("limit_type", "must be one of the limit types"))
}

/// `None` when unset.
pub fn kyc_level(number: i32) -> Result<Option<i32>, Status> {
    match common::KycStatus::try_from(number) {
        Ok(common::KycStatus::Unspecified) => Ok(None),
        Ok(level) => Ok(Some(level as i32)),
        Err(_) => Err(invalid_argument("kyc_status", "is not a KYC level")),
    }
}

/// An amount to check: roubles of the bank or the ledger, above zero.
pub fn amount(field: &'static str, value: Option<&common::Money>) -> Result<Decimal, Status> {
    let value = value.ok_or_else(|| invalid_argument(field, "is required"))?;
    rubles(field, value)?;
    convert::positive(value.amount.as_ref())
        .map_err(|error| invalid_argument(field, error.to_string()))
}

/// The value of an order in roubles: not negative. It is checked even if quantities are counted, so
/// that no call with nonsense is accepted (D49).
pub fn notional(value: &common::Money) -> Result<Decimal, Status> {
    rubles("notional", value)?;
    let notional = convert::decimal(value.amount.as_ref())
        .map_err(|error| invalid_argument("notional", error.to_string()))?;
    if notional.is_negative() {
        return Err(invalid_argument("notional", "must not be negative"));
    }
    Ok(notional)
}

/// A limit in roubles: not negative, exact in kopecks.
pub fn limit_amount(value: &common::Money) -> Result<Decimal, Status> {
    rubles("daily_limit", value)?;
    let limit = convert::decimal(value.amount.as_ref())
        .map_err(|error| invalid_argument("daily_limit", error.to_string()))?;
    if limit.is_negative() {
        return Err(invalid_argument("daily_limit", "must not be negative"));
    }
    convert::minor(limit, "RUB", 2)
        .map_err(|error| invalid_argument("daily_limit", error.to_string()))?;
    Ok(limit)
}

pub fn rubles(field: &'static str, value: &common::Money) -> Result<(), Status> {
    match value.currency_code.as_str() {
        "RUB" | types::CFA_RUB => Ok(()),
        other => convert::currency(other, "RUB")
            .map_err(|error| invalid_argument(field, error.to_string())),
    }
}

pub fn money(amount: Decimal) -> common::Money {
    common::Money {
        currency_code: "RUB".to_owned(),
        amount: Some(to_decimal(amount)),
    }
}

/// An account that the bank accepts: rouble, with a valid control key (D49).
pub fn checked_account(account: String) -> Result<String, Status> {
    let checked = rail::account::check(&account);
    checked.map_err(|error| invalid_argument("bank_account", error.to_string()))?;
    Ok(account)
}

/// Generates an account at the sandbox bank for a user created without one.
pub fn account_of(user_id: &str) -> String {
    let hash = Sha256::digest(user_id.as_bytes());
    let sequence = u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]]);
    rail::account::number("40817", sequence)
}

pub fn hash_name(full_name: &str) -> String {
    if full_name.is_empty() {
        return String::new();
    }
    hex::encode(Sha256::digest(full_name.as_bytes()))
}
