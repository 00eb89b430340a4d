//! One operation and its postings (4.4.1, D17, D18): check, apply, write.

use std::sync::Arc;

use types::{CFA_RUB, Minor, UserId, subaccount};

use super::{
    Command, CommandKind, Ids, NewOperation, NewPosting, Posted, Replay, StoredOutcome, accounts,
    holds, lifecycle, limits,
};
use crate::{
    book::Book,
    effects::{Effect, PostingCreated},
    model::{
        Call, Id, Link, Operation, OperationStatus, OperationTerms, OperationType, Posting, Scope,
        SubAccount, SubAccountStatus, Units,
    },
    names,
    refusal::{Refusal, Refused},
};

/// An operation with its postings, in its current state.
pub fn posted(book: &Book, operation_id: &Id, replay: Replay) -> Option<Posted> {
    Some(Posted {
        operation: book.operations.get(operation_id)?.clone(),
        postings: book.postings_of(operation_id).to_vec(),
        replay,
    })
}

/// Writes one operation, or returns the one that its key created before (T12).
pub fn create(
    book: &mut Book,
    command: &Command,
    scope: Scope,
    new: &NewOperation,
    ids: Ids,
) -> Result<Posted, Refused> {
    if let Some(stored) = book.operation_by_key(scope, &new.user_id, &new.idempotency_key) {
        let replay = Replay::of(stored.terms.digest == new.digest);
        let id = stored.terms.operation_id.clone();
        return Ok(posted(book, &id, replay).expect("just found by its key"));
    }
    if let Some(refused) = stored_refusal(book, command, new) {
        return Err(refused);
    }
    check(new)?;
    let reference = new
        .external_ref
        .as_ref()
        .map(|reference| (new.kind, reference.clone()));
    let by_reference = reference
        .as_ref()
        .and_then(|key| book.by_reference.get(key))
        .cloned();
    if let Some(known) = &by_reference
        && scope == Scope::Event
    {
        lifecycle::finalize_one(book, known, new.tx_hash.as_ref());
        return Ok(posted(book, known, Replay::Same).expect("just found by its reference"));
    }
    let operation_id = new.operation_id.clone().unwrap_or_else(&mut *ids);
    if by_reference.is_some() || book.operations.get(&operation_id).is_some() {
        return Err(Refusal::OperationExists.into());
    }
    let moves = new
        .postings
        .iter()
        .enumerate()
        .map(|(index, posting)| resolve(book, command, new.kind, index, posting))
        .collect::<Result<Vec<_>, _>>()?;
    let operation = operation_of(book, scope, new, operation_id.clone());
    write(book, operation, moves, ids)?;
    limits::count(book, command, &operation_id)?;
    if let Some(tx_hash) = &new.tx_hash {
        book.by_tx
            .entry(tx_hash.clone())
            .or_default()
            .push(operation_id.clone());
    }
    if new.is_final {
        lifecycle::finalize_one(book, &operation_id, new.tx_hash.as_ref());
    }
    lifecycle::apply_pending_receipts(book, &operation_id, ids)?;
    Ok(posted(book, &operation_id, Replay::No).expect("just written"))
}

/// The stored refusal of the operation's key. Only a batch of several stores them.
fn stored_refusal(book: &Book, command: &Command, new: &NewOperation) -> Option<Refused> {
    let of_batch = matches!(&command.kind, CommandKind::Post(batch) if !batch.single);
    let key = || {
        let (user_id, key) = (new.user_id.clone(), new.idempotency_key.clone());
        (Call::CreateOperation, user_id, key)
    };
    let stored = of_batch.then(|| book.answers.get(&key())).flatten()?;
    let StoredOutcome::Refused { reason, .. } = &stored.outcome else {
        return None;
    };
    let replay = Replay::of(stored.digest == new.digest);
    Some(Refused::replayed(Refusal::bound(reason), None, replay))
}

fn check(new: &NewOperation) -> Result<(), Refusal> {
    let is_user = UserId::new(&new.user_id).is_ok();
    if !is_user || new.idempotency_key.is_empty() {
        let field = if is_user {
            "operation.idempotency_key"
        } else {
            "operation.user_id"
        };
        return Err(Refusal::invalid(field, "must be given and well formed"));
    }
    if new.postings.is_empty() {
        return Err(Refusal::invalid("postings", "must not be empty"));
    }
    Ok(())
}

fn operation_of(book: &Book, scope: Scope, new: &NewOperation, operation_id: Id) -> Operation {
    let status = match (new.awaits_chain, &new.tx_hash) {
        (false, _) => OperationStatus::Settled,
        (true, None) => OperationStatus::Processing,
        (true, Some(_)) => OperationStatus::OnchainSubmitted,
    };
    Operation {
        terms: Arc::new(OperationTerms {
            operation_id,
            scope,
            kind: new.kind,
            user_id: new.user_id.clone(),
            idempotency_key: new.idempotency_key.clone(),
            external_ref: new.external_ref.clone(),
            awaits_chain: new.awaits_chain,
            reverses: None,
            digest: new.digest,
            created_at_us: book.now_us,
        }),
        status,
        tx_hash: new.tx_hash.clone(),
        rejection_code: None,
        rejection_message: None,
        finalized_at_us: None,
        reversed_by: None,
    }
}

/// One checked movement, not yet applied.
pub struct Move {
    pub debit_subaccount_id: Id,
    pub credit_subaccount_id: Id,
    pub units: Units,
    pub hold_id: Option<Id>,
    pub unsettled: bool,
    /// A reversing entry, maturity or an enforcement act by a service (D47), or a payment out of a
    /// hold ([`is_promised`]).
    pub may_debit_frozen: bool,
    /// A reversing entry that debits an unsettled credit.
    pub debits_unsettled: bool,
    pub index: usize,
}

fn resolve(
    book: &mut Book,
    command: &Command,
    kind: OperationType,
    index: usize,
    posting: &NewPosting,
) -> Result<Move, Refusal> {
    let field = |name: &str| format!("postings[{index}].{name}");
    let instrument_id = &posting.amount.instrument_id;
    let routed = |id: &Id| match names::routed(id, instrument_id) {
        std::borrow::Cow::Borrowed(_) => id.clone(),
        std::borrow::Cow::Owned(own) => own.into(),
    };
    let debit_id = routed(&posting.debit_subaccount_id);
    let credit_id = routed(&posting.credit_subaccount_id);
    if debit_id == credit_id {
        return Err(Refusal::invalid(
            field("credit_subaccount_id"),
            "must differ from the debit side",
        ));
    }
    let debit = accounts::to_debit(book, command, &debit_id)?;
    let minor = holds::minor_of(&debit, &posting.amount, "amount")
        .map_err(|refusal| refusal.of_posting(index))?;
    let credit = accounts::to_credit(book, &credit_id)?;
    if credit.terms.instrument_id != debit.terms.instrument_id {
        return Err(Refusal::invalid(
            field("credit_subaccount_id"),
            format!("must be of instrument {}", debit.terms.instrument_id),
        ));
    }
    if let Some(hold_id) = &posting.hold_id {
        let hold = holds::active_hold(book, command, hold_id)?;
        if hold.terms.subaccount_id != debit_id {
            return Err(Refusal::invalid(
                field("hold_id"),
                "is a hold on another sub-account",
            ));
        }
        if hold
            .terms
            .destination_subaccount_id
            .as_ref()
            .is_some_and(|to| *to != credit_id)
        {
            return Err(Refusal::invalid(
                field("credit_subaccount_id"),
                "is not the destination of the hold",
            ));
        }
    }
    Ok(Move {
        may_debit_frozen: match &posting.hold_id {
            hold @ Some(_) => is_promised(kind, hold.as_ref(), instrument_id, &credit_id),
            None => {
                command.is_service
                    && (kind == OperationType::Enforcement
                        || is_redemption(kind, instrument_id, &credit_id))
            }
        },
        units: debit.units(minor),
        debit_subaccount_id: debit_id,
        credit_subaccount_id: credit_id,
        hold_id: posting.hold_id.clone(),
        unsettled: posting.unsettled,
        debits_unsettled: false,
        index,
    })
}

/// True for a payment out of a hold, which may debit a frozen sub-account (D15). False for an
/// offer, which its user may withdraw: the payment of an issue, and units redeemed out of a hold.
/// Its hold does not pay once the sub-account is frozen.
pub(super) fn is_promised(
    kind: OperationType,
    hold_id: Option<&Id>,
    instrument_id: &str,
    credit_id: &str,
) -> bool {
    hold_id.is_some()
        && kind != OperationType::Issuance
        && !is_redemption(kind, instrument_id, credit_id)
}

/// True for units returned to their own reserve. Maturity, without a hold, pays every holder,
/// including a frozen one, whose payout is credited and stays frozen. False for CFA-RUB, whose
/// redemption is a payout to the bank.
fn is_redemption(kind: OperationType, instrument_id: &str, credit_id: &str) -> bool {
    kind == OperationType::Redemption
        && instrument_id != CFA_RUB
        && credit_id == subaccount::reserve(instrument_id)
}

/// Applies the movements and writes the operation with its postings. Checks cover after the last
/// movement (D17).
pub fn write(
    book: &mut Book,
    operation: Operation,
    moves: Vec<Move>,
    ids: Ids,
) -> Result<(), Refusal> {
    let terms = operation.terms.clone();
    book.push_effect(Effect::OperationCreated {
        operation_id: terms.operation_id.clone(),
        kind: terms.kind,
        user_id: terms.user_id.clone(),
        amount: moves[0].units.clone(),
        status: operation.status,
    });
    let mut before: Vec<SubAccount> = Vec::with_capacity(moves.len());
    let mut postings = Vec::with_capacity(moves.len());
    for movement in moves {
        if before
            .iter()
            .all(|seen| seen.terms.subaccount_id != movement.debit_subaccount_id)
        {
            before.extend(book.subaccounts.get(&movement.debit_subaccount_id).cloned());
        }
        postings.push(apply(book, &terms.operation_id, movement, ids)?);
    }
    for was in &before {
        let now = book.subaccounts.get(&was.terms.subaccount_id);
        if !now.is_some_and(SubAccount::is_covered) {
            return Err(accounts::shortage(was));
        }
    }
    if let Some(reference) = &terms.external_ref {
        book.by_reference
            .put((terms.kind, reference.clone()), terms.operation_id.clone());
    }
    let key = (
        terms.scope,
        terms.user_id.clone(),
        terms.idempotency_key.clone(),
    );
    book.by_key.put(key, terms.operation_id.clone());
    book.postings.put(terms.operation_id.clone(), postings);
    book.operations.put(terms.operation_id.clone(), operation);
    Ok(())
}

fn apply(book: &mut Book, operation_id: &Id, movement: Move, ids: Ids) -> Result<Posting, Refusal> {
    let number = book.next_posting;
    let debit = debit(book, &movement, number)?;
    book.next_posting += 1;
    let credit = credit(book, &movement, number)?;
    let posting = Posting {
        posting_id: ids(),
        operation_id: operation_id.clone(),
        ordinal: movement.index as u32,
        debit_subaccount_id: movement.debit_subaccount_id,
        credit_subaccount_id: movement.credit_subaccount_id,
        amount: movement.units,
        hold_id: movement.hold_id,
        unsettled: movement.unsettled,
        debit_balance_after: debit.after,
        debit_version: debit.version,
        credit_balance_after: credit.after,
        credit_version: credit.version,
        created_at_us: book.now_us,
        link: Link {
            number,
            debit_previous: debit.previous,
            credit_previous: credit.previous,
        },
    };
    push_posting_effects(book, &posting, debit.before, credit.before);
    Ok(posting)
}

/// A sub-account before and after a posting.
struct Side {
    before: Minor,
    after: Minor,
    version: u64,
    /// Number of the sub-account's posting before; 0: none.
    previous: i64,
}

fn out_of_range(movement: &Move) -> Refusal {
    let field = format!("postings[{}].amount.amount", movement.index);
    Refusal::invalid(field, "is out of range")
}

fn side(book: &Book, id: &Id) -> Result<SubAccount, Refusal> {
    let found = book.subaccounts.get(id).cloned();
    found.ok_or(Refusal::SubAccountNotFound)
}

fn debit(book: &mut Book, movement: &Move, number: i64) -> Result<Side, Refusal> {
    let minor = movement.units.minor;
    let mut debit = side(book, &movement.debit_subaccount_id)?;
    match debit.status() {
        SubAccountStatus::Closed => return Err(Refusal::SubAccountClosed),
        SubAccountStatus::Frozen if !movement.may_debit_frozen => {
            return Err(Refusal::SubAccountFrozen);
        }
        _ => {}
    }
    let before = debit.balance;
    let after = before.checked_sub(minor);
    debit.balance = after.ok_or_else(|| out_of_range(movement))?;
    debit.version += 1;
    let previous = std::mem::replace(&mut debit.last_posting, number);
    if movement.debits_unsettled {
        debit.unsettled -= minor;
    }
    if let Some(hold_id) = &movement.hold_id {
        // Read again: an earlier posting of this operation may have consumed part of this hold.
        let hold = book.holds.get(hold_id).cloned();
        let hold = hold.ok_or(Refusal::HoldNotFound)?;
        if minor > hold.remaining {
            return Err(Refusal::HoldAmountExceeded);
        }
        debit.held -= minor;
        holds::consume_amount(book, hold, minor);
    }
    let (after, version) = (debit.balance, debit.version);
    accounts::put(book, debit);
    Ok(Side {
        before,
        after,
        version,
        previous,
    })
}

fn credit(book: &mut Book, movement: &Move, number: i64) -> Result<Side, Refusal> {
    let minor = movement.units.minor;
    let mut credit = side(book, &movement.credit_subaccount_id)?;
    // A credit reopens a closed sub-account (T37), because a movement that has settled elsewhere
    // must not be refused here. A freeze stays.
    credit.closed = false;
    let before = credit.balance;
    let after = before.checked_add(minor);
    credit.balance = after.ok_or_else(|| out_of_range(movement))?;
    credit.version += 1;
    let previous = std::mem::replace(&mut credit.last_posting, number);
    if movement.unsettled {
        let unsettled = credit.unsettled.checked_add(minor);
        credit.unsettled = unsettled.ok_or_else(|| out_of_range(movement))?;
    }
    let (after, version) = (credit.balance, credit.version);
    accounts::put(book, credit);
    Ok(Side {
        before,
        after,
        version,
        previous,
    })
}

fn push_posting_effects(
    book: &mut Book,
    posting: &Posting,
    debit_before: Minor,
    credit_before: Minor,
) {
    book.push_effect(Effect::PostingCreated(PostingCreated {
        posting_id: posting.posting_id.clone(),
        operation_id: posting.operation_id.clone(),
        debit_subaccount_id: posting.debit_subaccount_id.clone(),
        credit_subaccount_id: posting.credit_subaccount_id.clone(),
        amount: posting.amount.clone(),
    }));
    let decimals = posting.amount.decimals;
    let decimal = |minor: Minor| types::Decimal::from_minor(minor.0, decimals);
    for (subaccount_id, old, new) in [
        (
            &posting.debit_subaccount_id,
            debit_before,
            posting.debit_balance_after,
        ),
        (
            &posting.credit_subaccount_id,
            credit_before,
            posting.credit_balance_after,
        ),
    ] {
        book.push_effect(Effect::BalanceUpdated {
            subaccount_id: subaccount_id.clone(),
            old: decimal(old),
            new: decimal(new),
            operation_id: posting.operation_id.clone(),
        });
    }
}
