//! Accounts and sub-accounts: opened on UserCreated or at first use (T37), frozen and closed (D15).

use std::sync::Arc;

use types::{CFA_RUB, InstrumentId, Minor, UserId, subaccount};

use super::{Answer, Command, CommandResult, Outcome};
use crate::{
    book::Book,
    model::{
        Account, AccountType, FREEZE_STAFF, FREEZE_USER_BLOCK, Id, SubAccount, SubAccountStatus,
        SubAccountTerms, User,
    },
    names::{self, SubAccountName},
    refusal::{Refusal, Shortage},
};

/// Returns the user in a sub-account id.
pub fn owner(subaccount_id: &str) -> Option<Id> {
    SubAccountName::parse(subaccount_id).map(|name| name.user_id.into())
}

/// Returns the sub-account to credit. Opens it if it is missing.
pub fn to_credit(book: &mut Book, subaccount_id: &Id) -> Result<SubAccount, Refusal> {
    if let Some(subaccount) = book.subaccounts.get(subaccount_id) {
        return Ok(subaccount.clone());
    }
    let name = SubAccountName::parse(subaccount_id).ok_or(Refusal::SubAccountNotFound)?;
    ensure(book, subaccount_id, name)
}

/// Returns the sub-account to debit or to hold on. Opens a missing sub-account of a known user with
/// a balance of zero, so that the caller is refused for a shortage and not for an unknown id. Opens
/// a missing system sub-account, because some may be negative.
///
/// # Errors
/// `SystemSubAccount` for a command of a person, also if two persons approved it (`design.md` 10).
pub fn to_debit(
    book: &mut Book,
    command: &Command,
    subaccount_id: &Id,
) -> Result<SubAccount, Refusal> {
    if !command.is_service && is_system(subaccount_id) {
        return Err(Refusal::SystemSubAccount);
    }
    if let Some(subaccount) = book.subaccounts.get(subaccount_id) {
        return Ok(subaccount.clone());
    }
    let name = SubAccountName::parse(subaccount_id).ok_or(Refusal::SubAccountNotFound)?;
    if !name.is_system() && book.users.get(name.user_id).is_none() {
        return Err(Refusal::SubAccountNotFound);
    }
    ensure(book, subaccount_id, name)
}

fn is_system(subaccount_id: &str) -> bool {
    SubAccountName::parse(subaccount_id).is_some_and(|name| name.is_system())
}

fn ensure(
    book: &mut Book,
    subaccount_id: &Id,
    name: SubAccountName,
) -> Result<SubAccount, Refusal> {
    let decimals = *book
        .scales
        .get(name.instrument_id)
        .ok_or(Refusal::InstrumentNotFound)?;
    Ok(make(book, subaccount_id, name, decimals))
}

fn make(book: &mut Book, subaccount_id: &Id, name: SubAccountName, decimals: u8) -> SubAccount {
    let user = ensure_user(book, &name.user_id.into());
    let account_id = ensure_account(book, &user.user_id, name.account_type());
    let now_us = book.now_us;
    let subaccount = SubAccount {
        terms: Arc::new(SubAccountTerms {
            subaccount_id: subaccount_id.clone(),
            account_id,
            user_id: user.user_id.clone(),
            instrument_id: name.instrument_id.into(),
            decimals,
            may_be_negative: name.may_be_negative(),
            created_at_us: now_us,
        }),
        balance: Minor::ZERO,
        held: Minor::ZERO,
        unsettled: Minor::ZERO,
        version: 0,
        freeze: if user.blocked { FREEZE_USER_BLOCK } else { 0 },
        closed: false,
        updated_at_us: now_us,
        last_posting: 0,
    };
    book.subaccounts
        .put(subaccount_id.clone(), subaccount.clone());
    subaccount
}

fn ensure_user(book: &mut Book, user_id: &Id) -> User {
    if let Some(user) = book.users.get(user_id) {
        return user.clone();
    }
    let user = User {
        user_id: user_id.clone(),
        blocked: false,
    };
    book.users.put(user_id.clone(), user.clone());
    user
}

fn ensure_account(book: &mut Book, user_id: &Id, kind: AccountType) -> Id {
    let account_id = Id::from(names::account_id(user_id, kind));
    if book.accounts.get(&account_id).is_none() {
        let account = Account {
            account_id: account_id.clone(),
            user_id: user_id.clone(),
            kind,
            created_at_us: book.now_us,
            updated_at_us: book.now_us,
        };
        book.accounts.put(account_id.clone(), account);
    }
    account_id
}

/// UserCreated: opens accounts MAIN and INVEST and an empty CFA-RUB sub-account. BLOCKED is opened
/// at the first seizure.
pub fn create_user(book: &mut Book, user_id: &Id) -> Outcome {
    UserId::new(user_id).map_err(|error| Refusal::invalid("user_id", error.to_string()))?;
    ensure_user(book, user_id);
    ensure_account(book, user_id, AccountType::Invest);
    to_credit(book, &subaccount::of_user(user_id, CFA_RUB).into())?;
    Ok(CommandResult::new(Answer::Done))
}

/// UserBlocked and UserUnblocked: freezes or unfreezes all sub-accounts of the user. Sub-accounts
/// that are opened while the user is blocked start frozen.
pub fn block_user(book: &mut Book, user_id: &Id, blocked: bool) -> Outcome {
    create_user(book, user_id)?;
    book.users.put(
        user_id.clone(),
        User {
            user_id: user_id.clone(),
            blocked,
        },
    );
    let mut own: Vec<SubAccount> = book
        .subaccounts
        .values()
        .filter(|subaccount| subaccount.terms.user_id == *user_id)
        .cloned()
        .collect();
    own.sort_by(|a, b| a.terms.subaccount_id.cmp(&b.terms.subaccount_id));
    for mut subaccount in own {
        let freeze = if blocked {
            subaccount.freeze | FREEZE_USER_BLOCK
        } else {
            subaccount.freeze & !FREEZE_USER_BLOCK
        };
        if freeze != subaccount.freeze {
            subaccount.freeze = freeze;
            put(book, subaccount);
        }
    }
    Ok(CommandResult::new(Answer::Done))
}

/// ACTIVE <-> FROZEN by staff, ACTIVE -> CLOSED when empty (D15). A sub-account of a blocked user
/// stays frozen until the user is unblocked.
pub fn set_status(book: &mut Book, subaccount_id: &Id, status: SubAccountStatus) -> Outcome {
    let mut subaccount = book
        .subaccounts
        .get(subaccount_id)
        .cloned()
        .ok_or(Refusal::SubAccountNotFound)?;
    if is_system(subaccount_id) && status != SubAccountStatus::Active {
        return Err(Refusal::SystemSubAccount.into());
    }
    if subaccount.closed && status != SubAccountStatus::Closed {
        return Err(Refusal::SubAccountClosed.into());
    }
    match status {
        SubAccountStatus::Active => subaccount.freeze &= !FREEZE_STAFF,
        SubAccountStatus::Frozen => subaccount.freeze |= FREEZE_STAFF,
        SubAccountStatus::Closed if subaccount.closed => {}
        SubAccountStatus::Closed => {
            if subaccount.freeze != 0 {
                return Err(Refusal::SubAccountFrozen.into());
            }
            if !subaccount.balance.is_zero() || !subaccount.held.is_zero() {
                return Err(Refusal::SubAccountNotEmpty.into());
            }
            subaccount.closed = true;
        }
    }
    put(book, subaccount.clone());
    Ok(CommandResult::new(Answer::SubAccount(subaccount)))
}

/// InstrumentRegistered: as [`bind_scale`].
pub fn register_instrument(book: &mut Book, instrument_id: &Id, decimals: u8) -> Outcome {
    bind_scale(book, instrument_id, decimals)?;
    Ok(CommandResult::new(Answer::Done))
}

/// Binds the decimals of an instrument and opens its reserve. Different decimals than bound before
/// are refused.
pub fn bind_scale(book: &mut Book, instrument_id: &Id, decimals: u8) -> Result<(), Refusal> {
    InstrumentId::new(instrument_id)
        .map_err(|error| Refusal::invalid("instrument_id", error.to_string()))?;
    if decimals > types::decimal::SCALE_MAX {
        return Err(Refusal::invalid("decimals", "must be at most 18"));
    }
    match book.scales.get(instrument_id) {
        Some(known) if *known == decimals => Ok(()),
        Some(known) => Err(Refusal::invalid(
            "decimals",
            format!("instrument {instrument_id} has {known} decimals"),
        )),
        None => {
            book.scales.put(instrument_id.clone(), decimals);
            let mut reserve = to_credit(book, &subaccount::reserve(instrument_id).into())?;
            if reserve.terms.decimals != decimals {
                // The reserve of CFA-EQ exists before its decimals are known. It has no postings
                // yet.
                assert!(
                    reserve.version == 0,
                    "reserve has postings before its decimals are known: {reserve:?}"
                );
                let of = &reserve.terms;
                reserve.terms = Arc::new(SubAccountTerms {
                    subaccount_id: of.subaccount_id.clone(),
                    account_id: of.account_id.clone(),
                    user_id: of.user_id.clone(),
                    instrument_id: of.instrument_id.clone(),
                    decimals,
                    may_be_negative: of.may_be_negative,
                    created_at_us: of.created_at_us,
                });
                put(book, reserve);
            }
            Ok(())
        }
    }
}

/// Stores a changed sub-account in the working set.
///
/// # Panics
/// Bug: `held` or `unsettled` is negative.
pub fn put(book: &mut Book, mut subaccount: SubAccount) {
    assert!(
        !subaccount.held.is_negative() && !subaccount.unsettled.is_negative(),
        "held or unsettled is negative: {subaccount:?}"
    );
    subaccount.updated_at_us = book.now_us;
    book.subaccounts
        .put(subaccount.terms.subaccount_id.clone(), subaccount);
}

/// `Insufficient balance` with the figures of this state of the sub-account.
pub fn shortage(subaccount: &SubAccount) -> Refusal {
    let decimal = |minor| subaccount.units(minor).decimal();
    Refusal::InsufficientBalance(Some(Box::new(Shortage {
        subaccount_id: subaccount.terms.subaccount_id.to_string(),
        balance: decimal(subaccount.balance),
        held: decimal(subaccount.held),
        unsettled: decimal(subaccount.unsettled),
        available: decimal(subaccount.available()),
    })))
}
