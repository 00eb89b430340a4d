//! Life cycle of a hold (3.3, D11, T03, T04, T10, T31; `design.md` 4).
//!
//! The unused remainder of a child returns to its parent while the parent is active, and otherwise
//! to available money. A hold emptied by consumption is CONSUMED.

use std::sync::Arc;

use types::Minor;

use super::{
    Answer, Command, CommandKind, CommandResult, Ids, NewHold, NewOperation, NewPosting, Outcome,
    accounts, operations,
};
use crate::{
    book::Book,
    effects::{Effect, HoldChange},
    model::{Amount, Hold, HoldStatus, HoldTerms, Id, Scope, SubAccount, SubAccountStatus},
    names::SubAccountName,
    refusal::Refusal,
};

/// Owners whose holds only services create and touch: `market` for trading holds with their
/// children, `cfa` for redemptions, subscriptions and offers.
const SERVICE_OWNERS: [&str; 2] = ["market", "cfa"];

/// Expires the due holds that the command names. The expiry stays even if the command is refused
/// (T31).
pub fn expire_touched(book: &mut Book, command: &Command) {
    book.expired_now.clear();
    if matches!(command.kind, CommandKind::ExpireHolds(_)) {
        return;
    }
    let mut touched = Vec::new();
    command.for_each_hold(&mut |hold_id| touched.push(hold_id.clone()));
    for hold_id in touched {
        let Some(hold) = book.holds.get(&hold_id) else {
            continue;
        };
        let is_unreported = hold.status == HoldStatus::Expired && !hold.expiry_reported;
        if hold.is_due(book.now_us) {
            let hold = hold.clone();
            expire(book, hold, true);
        } else if is_unreported {
            let reported = Hold {
                expiry_reported: true,
                ..hold.clone()
            };
            put(book, reported);
        } else {
            continue;
        }
        book.expired_now.push(hold_id);
    }
}

/// Expires every due hold of the list.
pub fn expire_due(book: &mut Book, hold_ids: &[Id]) {
    for hold_id in hold_ids {
        if let Some(hold) = book
            .holds
            .get(hold_id)
            .filter(|hold| hold.is_due(book.now_us))
        {
            let hold = hold.clone();
            expire(book, hold, false);
        }
    }
}

fn expire(book: &mut Book, mut hold: Hold, reported: bool) {
    let rest = hold.remaining;
    hold.released += rest;
    hold.remaining = Minor::ZERO;
    hold.status = HoldStatus::Expired;
    hold.expiry_reported = reported;
    return_to_parent_of(book, &hold, rest);
    let reason = "Expired".to_owned();
    push_change(book, &hold, HoldChange::Released { reason });
    put(book, hold);
}

fn push_change(book: &mut Book, hold: &Hold, change: HoldChange) {
    book.push_effect(Effect::HoldChanged {
        hold_id: hold.terms.hold_id.clone(),
        subaccount_id: hold.terms.subaccount_id.clone(),
        change,
    });
}

/// CreateHold. An existing hold with the given id on the same sub-account is returned as a replay.
pub fn create(book: &mut Book, command: &Command, new: &NewHold, ids: Ids) -> Outcome {
    if let Some(stored) = new.hold_id.as_ref().and_then(|id| book.holds.get(id)) {
        if stored.terms.subaccount_id != new.subaccount_id {
            return Err(Refusal::HoldExists.into());
        }
        return Ok(CommandResult {
            answer: Answer::Hold {
                hold: stored.clone(),
                operation: None,
            },
            replay: super::Replay::Same,
        });
    }
    let hold = open(book, command, new, ids)?;
    Ok(CommandResult::new(Answer::Hold {
        hold,
        operation: None,
    }))
}

/// Opens a hold on available money.
pub(super) fn open(
    book: &mut Book,
    command: &Command,
    new: &NewHold,
    ids: Ids,
) -> Result<Hold, Refusal> {
    if is_service_owner(&new.owner) && !command.is_service {
        return Err(Refusal::invalid("hold.owner", "is reserved for services"));
    }
    let hold_id = new.hold_id.clone().unwrap_or_else(&mut *ids);
    if book.holds.get(&hold_id).is_some() {
        return Err(Refusal::HoldExists);
    }
    let subaccount = accounts::to_debit(book, command, &new.subaccount_id)?;
    let amount = minor_of(&subaccount, &new.amount, "hold.amount")?;
    if let Some(destination) = &new.destination_subaccount_id {
        let same = SubAccountName::parse(destination)
            .is_some_and(|name| *name.instrument_id == *subaccount.terms.instrument_id);
        if !same || *destination == new.subaccount_id {
            return Err(Refusal::invalid(
                "hold.destination_subaccount_id",
                "must be another sub-account of the same instrument",
            ));
        }
    }
    if new.expires_at_us.is_some_and(|at_us| at_us <= book.now_us) {
        let problem = "must be in the future";
        return Err(Refusal::invalid("hold.expires_at", problem));
    }
    let terms = HoldTerms {
        hold_id,
        subaccount_id: new.subaccount_id.clone(),
        user_id: subaccount.terms.user_id.clone(),
        instrument_id: subaccount.terms.instrument_id.clone(),
        decimals: subaccount.terms.decimals,
        reason: new.reason.clone(),
        owner: new.owner.clone(),
        parent_hold_id: None,
        destination_subaccount_id: new.destination_subaccount_id.clone(),
        expires_at_us: new.expires_at_us,
        created_at_us: book.now_us,
    };
    reserve(book, subaccount, amount)?;
    Ok(insert(book, terms, amount))
}

/// Writes a new ACTIVE hold and its effect.
pub(super) fn insert(book: &mut Book, terms: HoldTerms, amount: Minor) -> Hold {
    let hold = Hold {
        terms: Arc::new(terms),
        amount,
        remaining: amount,
        added: Minor::ZERO,
        split_off: Minor::ZERO,
        consumed: Minor::ZERO,
        released: Minor::ZERO,
        returned: Minor::ZERO,
        status: HoldStatus::Active,
        expiry_reported: false,
        updated_at_us: book.now_us,
    };
    let (amount, reason) = (hold.units(amount), hold.terms.reason.clone());
    push_change(book, &hold, HoldChange::Created { amount, reason });
    put(book, hold.clone());
    hold
}

/// ReleaseHold: ACTIVE -> RELEASED, even if partly consumed (D11).
pub fn release(book: &mut Book, command: &Command, hold_id: &Id, reason: &str) -> Outcome {
    let hold = active_hold(book, command, hold_id)?;
    let rest = hold.remaining;
    let hold = release_amount(book, hold, rest, Some((HoldStatus::Released, reason)));
    Ok(CommandResult::new(Answer::Hold {
        hold,
        operation: None,
    }))
}

/// ConsumeHold: all or part (T03). With a destination the posting is written in the same
/// transaction (T10).
pub fn consume(book: &mut Book, command: &Command, ids: Ids) -> Outcome {
    let CommandKind::ConsumeHold {
        hold_id,
        amount,
        operation_kind,
        external_ref,
    } = &command.kind
    else {
        unreachable!("called for ConsumeHold only");
    };
    let hold = active_hold(book, command, hold_id)?;
    let amount = match amount {
        Some(amount) => minor_of_hold(&hold, amount, "amount")?,
        None => hold.remaining,
    };
    if amount > hold.remaining {
        return Err(Refusal::HoldAmountExceeded.into());
    }
    let mut operation = None;
    match &hold.terms.destination_subaccount_id {
        Some(destination) if !amount.is_zero() => {
            let units = hold.units(amount);
            let new = NewOperation {
                operation_id: None,
                kind: *operation_kind,
                user_id: hold.terms.user_id.clone(),
                idempotency_key: command
                    .key
                    .as_ref()
                    .map_or_else(|| hold_id.clone(), |key| key.key.clone()),
                external_ref: external_ref.clone(),
                tx_hash: None,
                awaits_chain: false,
                postings: vec![NewPosting {
                    debit_subaccount_id: hold.terms.subaccount_id.clone(),
                    credit_subaccount_id: destination.clone(),
                    amount: Amount {
                        value: units.decimal(),
                        instrument_id: units.instrument_id,
                    },
                    hold_id: Some(hold_id.clone()),
                    unsettled: false,
                }],
                digest: command.digest(),
                is_final: false,
            };
            operation = Some(operations::create(
                book,
                command,
                Scope::Consume,
                &new,
                ids,
            )?);
        }
        _ => {
            consume_unposted(book, hold, amount);
        }
    }
    let hold = book
        .holds
        .get(hold_id)
        .cloned()
        .ok_or(Refusal::HoldNotFound)?;
    Ok(CommandResult::new(Answer::Hold { hold, operation }))
}

/// Consumes `amount` of a hold without a posting: it is available again.
pub(super) fn consume_unposted(book: &mut Book, hold: Hold, amount: Minor) {
    let mut subaccount = subaccount_of(book, &hold);
    subaccount.held -= amount;
    accounts::put(book, subaccount);
    consume_amount(book, hold, amount);
}

/// Consumes `amount` of a hold. The caller updates the sub-account.
pub fn consume_amount(book: &mut Book, mut hold: Hold, amount: Minor) {
    hold.remaining -= amount;
    hold.consumed += amount;
    if hold.remaining.is_zero() {
        hold.status = HoldStatus::Consumed;
        push_change(book, &hold, HoldChange::Consumed);
    }
    put(book, hold);
}

/// AdjustHold: `remaining` is the amount that stays reserved.
pub fn adjust(book: &mut Book, command: &Command, hold_id: &Id, remaining: &Amount) -> Outcome {
    let hold = active_hold(book, command, hold_id)?;
    let target = scaled_of_hold(&hold, remaining, "remaining_amount")?;
    if target.is_negative() {
        return Err(Refusal::invalid("remaining_amount.amount", "must not be negative").into());
    }
    let hold = if target > hold.remaining {
        let growth = target - hold.remaining;
        grow(book, hold, growth).map_err(|refusal| refusal.under("remaining_amount"))?
    } else {
        let surplus = hold.remaining - target;
        release_amount(book, hold, surplus, None)
    };
    Ok(CommandResult::new(Answer::Hold {
        hold,
        operation: None,
    }))
}

/// Grows a hold from its parent's remainder, or from available money if it has no parent.
pub(super) fn grow(book: &mut Book, mut hold: Hold, amount: Minor) -> Result<Hold, Refusal> {
    match &hold.terms.parent_hold_id {
        Some(parent_id) => {
            let mut parent = book
                .holds
                .get(parent_id)
                .cloned()
                .ok_or(Refusal::HoldNotFound)?;
            if !parent.is_active() {
                return Err(Refusal::HoldNotActive);
            }
            if amount > parent.remaining {
                return Err(Refusal::HoldAmountExceeded);
            }
            parent.remaining -= amount;
            parent.split_off += amount;
            put(book, parent);
        }
        None => {
            let subaccount = subaccount_of(book, &hold);
            reserve(book, subaccount, amount)?;
        }
    }
    hold.add(amount)?;
    hold.status = HoldStatus::Active;
    put(book, hold.clone());
    Ok(hold)
}

/// Moves available money into `held`.
fn reserve(book: &mut Book, mut subaccount: SubAccount, amount: Minor) -> Result<(), Refusal> {
    match subaccount.status() {
        SubAccountStatus::Active => {}
        SubAccountStatus::Frozen => return Err(Refusal::SubAccountFrozen),
        SubAccountStatus::Closed => return Err(Refusal::SubAccountClosed),
    }
    if amount > subaccount.available() {
        return Err(accounts::shortage(&subaccount));
    }
    subaccount.held += amount;
    accounts::put(book, subaccount);
    Ok(())
}

/// Releases `amount` of a hold. Ends the hold with this status and reason if `end` is set.
pub(super) fn release_amount(
    book: &mut Book,
    mut hold: Hold,
    amount: Minor,
    end: Option<(HoldStatus, &str)>,
) -> Hold {
    hold.remaining -= amount;
    hold.released += amount;
    return_to_parent_of(book, &hold, amount);
    if let Some((status, reason)) = end {
        hold.status = status;
        let reason = reason.to_owned();
        let change = match status {
            HoldStatus::Consumed => HoldChange::Consumed,
            _ => HoldChange::Released { reason },
        };
        push_change(book, &hold, change);
    }
    put(book, hold.clone());
    hold
}

/// Returns `amount` to the parent if it is active and not due, otherwise to available money.
fn return_to_parent_of(book: &mut Book, hold: &Hold, amount: Minor) {
    let parent = hold
        .terms
        .parent_hold_id
        .as_ref()
        .and_then(|id| book.holds.get(id));
    match parent.filter(|parent| parent.is_active() && !parent.is_due(book.now_us)) {
        Some(parent) => {
            let mut parent = parent.clone();
            parent.add_returned(amount);
            put(book, parent);
        }
        None => {
            let mut subaccount = subaccount_of(book, hold);
            subaccount.held -= amount;
            accounts::put(book, subaccount);
        }
    }
}

/// Returns an ACTIVE hold that the caller may touch, or the refusal of 4.4.3.
pub fn active_hold(book: &Book, command: &Command, hold_id: &Id) -> Result<Hold, Refusal> {
    let hold = book.holds.get(hold_id).ok_or(Refusal::HoldNotFound)?;
    let hold = require_access(hold.clone(), command)?;
    if hold.is_active() {
        return Ok(hold);
    }
    if book.expired_now.contains(hold_id) {
        return Err(Refusal::HoldExpired);
    }
    Err(Refusal::HoldNotActive)
}

/// Refuses a caller other than a service for a hold of a service.
pub(super) fn require_access(hold: Hold, command: &Command) -> Result<Hold, Refusal> {
    if is_service_owner(&hold.terms.owner) && !command.is_service {
        return Err(Refusal::HoldInUse);
    }
    Ok(hold)
}

fn is_service_owner(owner: &str) -> bool {
    SERVICE_OWNERS.contains(&owner)
}

fn subaccount_of(book: &Book, hold: &Hold) -> SubAccount {
    book.subaccounts
        .get(&hold.terms.subaccount_id)
        .cloned()
        .expect("the sub-account of a loaded hold is loaded")
}

pub(super) fn put(book: &mut Book, mut hold: Hold) {
    hold.assert_equation();
    hold.updated_at_us = book.now_us;
    book.holds.put(hold.terms.hold_id.clone(), hold);
}

/// Converts a positive amount of the sub-account's instrument to minor units.
pub fn minor_of(subaccount: &SubAccount, amount: &Amount, field: &str) -> Result<Minor, Refusal> {
    let of = &subaccount.terms;
    require_positive(
        scaled(&of.instrument_id, of.decimals, amount, field)?,
        field,
    )
}

pub(super) fn minor_of_hold(hold: &Hold, amount: &Amount, field: &str) -> Result<Minor, Refusal> {
    require_positive(scaled_of_hold(hold, amount, field)?, field)
}

fn scaled_of_hold(hold: &Hold, amount: &Amount, field: &str) -> Result<Minor, Refusal> {
    scaled(
        &hold.terms.instrument_id,
        hold.terms.decimals,
        amount,
        field,
    )
}

fn scaled(
    instrument_id: &Id,
    decimals: u8,
    amount: &Amount,
    field: &str,
) -> Result<Minor, Refusal> {
    if amount.instrument_id != *instrument_id {
        return Err(Refusal::invalid(
            format!("{field}.currency_code"),
            format!("must be {instrument_id}"),
        ));
    }
    amount
        .value
        .to_minor(decimals)
        .map(Minor)
        .map_err(|error| Refusal::invalid(format!("{field}.amount"), error.to_string()))
}

fn require_positive(minor: Minor, field: &str) -> Result<Minor, Refusal> {
    if minor <= Minor::ZERO {
        return Err(Refusal::invalid(
            format!("{field}.amount"),
            "must be positive",
        ));
    }
    Ok(minor)
}
