//! Velocity limits in the fold: set, remove, count.
//!
//! Every posting in the scope of a limit counts, and is refused if usage would exceed the limit.
//! Postings that have already happened count but are not refused:
//! - postings of an event;
//! - postings of a batch with a source;
//! - a service's payment out of a hold, except of an offer (as with a freeze, D15);
//! - a service's enforcement act.
//!
//! Reversing entries neither count nor are refused.

use types::{Minor, SYSTEM_USER};

use super::{Answer, Command, CommandKind, CommandResult, LimitTerms, Outcome, operations};
use crate::{
    book::Book,
    limit::{Side, VelocityLimit, WINDOW_S_MAX},
    model::{Id, Operation, OperationType, Posting, Scope},
    refusal::{Excess, Refusal},
};

/// Creates a limit or changes its terms. Equal terms change nothing.
///
/// # Errors
/// [`Refusal::ApprovalRequired`] for terms that allow what the present ones refuse, without
/// `may_raise`.
pub fn set(book: &mut Book, new: &LimitTerms, may_raise: bool) -> Outcome {
    if !new.user_id.is_empty() && types::UserId::new(&new.user_id).is_err()
        || &*new.user_id == SYSTEM_USER
    {
        return Err(
            Refusal::invalid("limit.user_id", "must be a user, or empty for every user").into(),
        );
    }
    if !(1..=WINDOW_S_MAX).contains(&new.window_s) {
        let problem = format!("must be 1 to {WINDOW_S_MAX}");
        return Err(Refusal::invalid("limit.window_seconds", problem).into());
    }
    let decimals = *book
        .scales
        .get(&new.instrument_id)
        .ok_or(Refusal::InstrumentNotFound)?;
    let amount = new
        .amount
        .to_minor(decimals)
        .ok()
        .filter(|minor| *minor >= 0)
        .ok_or_else(|| {
            let problem = format!("must not be negative, with at most {decimals} decimals");
            Refusal::invalid("limit.amount", problem)
        })?;
    let known = book.limits.get(&new.limit_id).cloned();
    let limit = VelocityLimit {
        limit_id: new.limit_id.clone(),
        user_id: new.user_id.clone(),
        account_kind: new.account_kind,
        instrument_id: new.instrument_id.clone(),
        decimals,
        side: new.side,
        window_s: new.window_s,
        amount: Minor(amount),
        kinds: new.kinds,
        created_at_us: known
            .as_ref()
            .map_or(book.now_us, |known| known.created_at_us),
        updated_at_us: book.now_us,
    };
    if let Some(known) = known.as_ref().filter(|known| known.has_same_terms(&limit)) {
        return Ok(CommandResult::new(Answer::Limit(known.clone())));
    }
    let raises = (known.as_ref()).is_some_and(|known| !limit.is_as_strict_as(known));
    if raises && !may_raise {
        return Err(Refusal::ApprovalRequired.into());
    }
    book.limits.put(limit.limit_id.clone(), limit.clone());
    Ok(CommandResult::new(Answer::Limit(limit)))
}

/// Removes a limit.
///
/// # Errors
/// [`Refusal::LimitNotFound`].
pub fn remove(book: &mut Book, limit_id: &Id) -> Outcome {
    let known = book
        .limits
        .get(limit_id)
        .cloned()
        .ok_or(Refusal::LimitNotFound)?;
    book.limits.remove(limit_id);
    Ok(CommandResult::new(Answer::Limit(known)))
}

/// Counts the postings of an operation that was just written.
///
/// # Errors
/// [`Refusal::LimitExceeded`] of the first limit, by id, that a posting exceeds.
pub fn count(book: &mut Book, command: &Command, operation_id: &Id) -> Result<(), Refusal> {
    if book.limits.is_empty() {
        return Ok(());
    }
    let Some(operation) = book.operations.get(operation_id) else {
        return Ok(());
    };
    let (kind, scope) = (operation.terms.kind, operation.terms.scope);
    let has_happened = scope == Scope::Event
        || matches!(&command.kind, CommandKind::Post(batch) if batch.source.is_some());
    let is_ordered = command.is_service && kind == OperationType::Enforcement;
    for posting in book.postings_of(operation_id).to_vec() {
        let is_promised = command.is_service
            && operations::is_promised(
                kind,
                posting.hold_id.as_ref(),
                &posting.amount.instrument_id,
                &posting.credit_subaccount_id,
            );
        for (limit, subaccount_id) in applicable(book, kind, &posting) {
            let used = book.used(&limit.limit_id, subaccount_id);
            let after = used + i128::from(posting.amount.minor.0);
            let must_fit = !has_happened && !is_promised && !is_ordered;
            if must_fit && after > i128::from(limit.amount.0) {
                return Err(exceeded(&limit, subaccount_id, used, &posting));
            }
            book.used
                .put((limit.limit_id, subaccount_id.clone()), after);
        }
    }
    Ok(())
}

/// Stops counting a reversed operation.
pub fn uncount(book: &mut Book, operation: &Operation) {
    if book.limits.is_empty() {
        return;
    }
    let terms = operation.terms.clone();
    for posting in book.postings_of(&terms.operation_id).to_vec() {
        for (limit, subaccount_id) in applicable(book, terms.kind, &posting) {
            let counts =
                terms.reverses.is_none() && posting.created_at_us > limit.since_us(book.now_us);
            if counts {
                let used = book.used(&limit.limit_id, subaccount_id);
                let after = used - i128::from(posting.amount.minor.0);
                book.used
                    .put((limit.limit_id, subaccount_id.clone()), after);
            }
        }
    }
}

/// Limits that apply to a posting, in order of id, each with the limited sub-account.
fn applicable<'a>(
    book: &Book,
    kind: OperationType,
    posting: &'a Posting,
) -> Vec<(VelocityLimit, &'a Id)> {
    let mut applicable: Vec<(VelocityLimit, &Id)> = book
        .limits
        .values()
        .filter(|limit| limit.kinds.contains(kind))
        .filter_map(|limit| {
            let subaccount_id = match limit.side {
                Side::Debit => &posting.debit_subaccount_id,
                Side::Credit => &posting.credit_subaccount_id,
            };
            limit
                .applies_to(subaccount_id)
                .then(|| (limit.clone(), subaccount_id))
        })
        .collect();
    applicable.sort_by(|(a, _), (b, _)| a.limit_id.cmp(&b.limit_id));
    applicable
}

fn exceeded(limit: &VelocityLimit, subaccount_id: &Id, used: i128, posting: &Posting) -> Refusal {
    let decimal = |minor: i128| {
        types::Decimal::new(minor, limit.decimals).expect("sums of 64-bit amounts fit 38 digits")
    };
    let of = i128::from(limit.amount.0);
    Refusal::LimitExceeded(Some(Box::new(Excess {
        limit_id: limit.limit_id.to_string(),
        subaccount_id: subaccount_id.to_string(),
        instrument_id: limit.instrument_id.to_string(),
        window_s: limit.window_s,
        amount: decimal(of),
        used: decimal(used),
        left: decimal((of - used).max(0)),
        asked: decimal(posting.amount.minor.0.into()),
    })))
}
