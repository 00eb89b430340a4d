//! Hold steps of a batch (`design.md` 4): open, split, grow, return, shrink, spend.
//!
//! A consumed child can grow again from its parent while its order is open. A step without an
//! amount means all that remains. Such a step does nothing on a consumed, released or expired hold,
//! so that it cannot block a batch that derives from a log.

use types::Minor;

use super::{
    Command, Ids, StepKind,
    holds::{
        active_hold, consume_unposted, grow, insert, minor_of_hold, open, put, release_amount,
        require_access,
    },
};
use crate::{
    book::Book,
    model::{Amount, Hold, HoldStatus, HoldTerms, Id},
    refusal::Refusal,
};

/// Executes one step of a batch.
pub fn step(book: &mut Book, command: &Command, step: &StepKind, ids: Ids) -> Result<(), Refusal> {
    match step {
        StepKind::Open(new) => {
            open(book, command, new, ids).map_err(|refusal| refusal.under("open"))?;
        }
        StepKind::Split {
            parent_hold_id,
            hold_id,
            amount,
            reason,
        } => {
            let parent = active_hold(book, command, parent_hold_id)?;
            let amount = minor_of_hold(&parent, amount, "split.amount")?;
            split(book, parent, hold_id, amount, reason)?;
        }
        StepKind::Grow { hold_id, amount } => {
            let hold = book.holds.get(hold_id).ok_or(Refusal::HoldNotFound)?;
            let is_emptied_child =
                hold.status == HoldStatus::Consumed && hold.terms.parent_hold_id.is_some();
            let hold = if is_emptied_child {
                require_access(hold.clone(), command)?
            } else {
                active_hold(book, command, hold_id)?
            };
            let amount = minor_of_hold(&hold, amount, "grow.amount")?;
            grow(book, hold, amount).map_err(|refusal| refusal.under("grow"))?;
        }
        StepKind::Return {
            hold_id,
            amount,
            reason,
        } => {
            return_to_parent(book, command, hold_id, amount.as_ref(), reason)?;
        }
        StepKind::Shrink {
            hold_id,
            amount,
            reason,
        } => {
            let ends = amount.is_none();
            let Some((hold, amount)) =
                releasable(book, command, hold_id, amount.as_ref(), "shrink.amount")?
            else {
                return Ok(());
            };
            release_amount(
                book,
                hold,
                amount,
                ends.then_some((HoldStatus::Released, reason.as_str())),
            );
        }
        StepKind::Spend { hold_id, amount } => {
            let hold = active_hold(book, command, hold_id)?;
            if hold.terms.destination_subaccount_id.is_some() {
                // Such a hold pays its destination and no one else.
                let why = "is a hold with a destination";
                return Err(Refusal::invalid("spend.hold_id", why));
            }
            let amount = minor_of_hold(&hold, amount, "spend.amount")?;
            if amount > hold.remaining {
                return Err(Refusal::HoldAmountExceeded);
            }
            consume_unposted(book, hold, amount);
        }
    }
    Ok(())
}

fn return_to_parent(
    book: &mut Book,
    command: &Command,
    hold_id: &Id,
    amount: Option<&Amount>,
    reason: &str,
) -> Result<(), Refusal> {
    let field = "return_to_parent.amount";
    let Some((hold, amount)) = releasable(book, command, hold_id, amount, field)? else {
        return Ok(());
    };
    if hold.terms.parent_hold_id.is_none() {
        return Err(Refusal::invalid(
            "return_to_parent.hold_id",
            "is a hold without parent",
        ));
    }
    let end = if hold.consumed.is_zero() {
        HoldStatus::Released
    } else {
        HoldStatus::Consumed
    };
    let ends = amount == hold.remaining;
    release_amount(book, hold, amount, ends.then_some((end, reason)));
    Ok(())
}

/// Returns the hold and the amount to release. `None` if the hold has ended and the step has no
/// amount.
fn releasable(
    book: &Book,
    command: &Command,
    hold_id: &Id,
    amount: Option<&Amount>,
    field: &str,
) -> Result<Option<(Hold, Minor)>, Refusal> {
    let hold = book.holds.get(hold_id);
    let ended = hold.is_some_and(|hold| !hold.is_active());
    if ended && amount.is_none() {
        return Ok(None);
    }
    let hold = active_hold(book, command, hold_id)?;
    let amount = match amount {
        Some(amount) => minor_of_hold(&hold, amount, field)?,
        None => hold.remaining,
    };
    if amount > hold.remaining {
        return Err(Refusal::HoldAmountExceeded);
    }
    Ok(Some((hold, amount)))
}

fn split(
    book: &mut Book,
    mut parent: Hold,
    hold_id: &Id,
    amount: Minor,
    reason: &str,
) -> Result<(), Refusal> {
    if book.holds.get(hold_id).is_some() {
        return Err(Refusal::HoldExists);
    }
    if amount > parent.remaining {
        return Err(Refusal::HoldAmountExceeded);
    }
    parent.remaining -= amount;
    parent.split_off += amount;
    let of = &parent.terms;
    let terms = HoldTerms {
        hold_id: hold_id.clone(),
        subaccount_id: of.subaccount_id.clone(),
        user_id: of.user_id.clone(),
        instrument_id: of.instrument_id.clone(),
        decimals: of.decimals,
        reason: reason.to_owned(),
        owner: of.owner.clone(),
        parent_hold_id: Some(of.hold_id.clone()),
        destination_subaccount_id: None,
        expires_at_us: of.expires_at_us,
        created_at_us: book.now_us,
    };
    put(book, parent);
    insert(book, terms, amount);
    Ok(())
}
