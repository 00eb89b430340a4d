//! Life cycle of an operation after posting: final, failed, reversed (D10, D20, T30).
//!
//! Transitions: SETTLED, PROCESSING, ONCHAIN_SUBMITTED -> FINALIZED | FAILED. An unsettled credit
//! becomes spendable at FINALIZED. An operation is reversed at most once. Reversal of an open
//! operation makes it FAILED, so that a later finality notice cannot release the same money twice.
//! Only services end an operation that awaits the chain, or make one final that the chain confirms
//! (`design.md` 9 and 10).

use std::sync::Arc;

use types::Minor;

use super::{
    Answer, Command, CommandResult, Ids, Outcome, Replay, Target, accounts, limits,
    operations::{self, Move},
};
use crate::{
    book::Book,
    effects::Effect,
    model::{Id, Operation, OperationStatus, OperationTerms, OperationType, PendingReceipt, Scope},
    refusal::{Position, Refusal, Refused},
};

/// Number of `REJECTION_REASON_CODE_INTEGRATION_ERROR`.
const INTEGRATION_ERROR: i32 = 3;
/// The text of T51.
const REVERTED: &str = "Blockchain transaction reverted";

/// FinalizeOperation(s): every target must exist and be open or final.
pub fn finalize(
    book: &mut Book,
    command: &Command,
    targets: &[Target],
    tx_hash: Option<&Id>,
) -> Outcome {
    let mut changed = 0;
    for (index, target) in targets.iter().enumerate() {
        changed += u32::from(
            finalize_target(book, command, target, tx_hash)
                .map_err(|refusal| Refused::from(refusal).at(Position::Operation(index)))?,
        );
    }
    Ok(CommandResult {
        answer: Answer::Finalized { changed },
        replay: if changed == 0 {
            Replay::Same
        } else {
            Replay::No
        },
    })
}

/// Makes one operation final. Returns `false` if it was final before.
fn finalize_target(
    book: &mut Book,
    command: &Command,
    target: &Target,
    tx_hash: Option<&Id>,
) -> Result<bool, Refusal> {
    let id = find(book, target).ok_or(Refusal::OperationNotFound)?;
    let operation = book.operations.get(&id).ok_or(Refusal::OperationNotFound)?;
    match operation.status {
        OperationStatus::Finalized => {
            let other_hash = tx_hash.is_some()
                && operation.tx_hash.is_some()
                && operation.tx_hash.as_ref() != tx_hash;
            if other_hash {
                return Err(Refusal::OperationStatus);
            }
            Ok(false)
        }
        status if status.is_open() => {
            require_proof(operation, command, tx_hash)?;
            Ok(finalize_one(book, &id, tx_hash))
        }
        _ => Err(Refusal::OperationStatus),
    }
}

/// Finality reported by an event. Parks a notice for an unknown operation. An operation that
/// already ended is left unchanged.
pub fn confirm(book: &mut Book, targets: &[Target], tx_hash: Option<&Id>) -> Outcome {
    let mut changed = 0;
    for target in targets {
        match find(book, target) {
            Some(id) => changed += u32::from(finalize_one(book, &id, tx_hash)),
            None => park(book, target_key(target), tx_hash.cloned(), false),
        }
    }
    Ok(CommandResult::new(Answer::Finalized { changed }))
}

/// The receipt of a transaction: its operations become final, or fail with reversing entries if it
/// reverted. Parks a notice if no operation has the hash.
pub fn receipt(book: &mut Book, tx_hash: &Id, reverted: bool, ids: Ids) -> Outcome {
    let mut operation_ids = book.by_tx.get(tx_hash).cloned().unwrap_or_default();
    operation_ids.retain(|id| book.operations.get(id).is_some());
    if operation_ids.is_empty() {
        park(book, tx_key(tx_hash), Some(tx_hash.clone()), reverted);
    }
    let mut changed = 0;
    for id in operation_ids {
        let before = book.operations.get(&id).map(|operation| operation.status);
        if reverted {
            fail_one(book, &id, ids)?;
        } else {
            finalize_one(book, &id, Some(tx_hash));
        }
        changed += u32::from(book.operations.get(&id).map(|operation| operation.status) != before);
    }
    Ok(CommandResult::new(Answer::Finalized { changed }))
}

/// Moves an open operation to FINALIZED. Returns `false` if it is unknown or already ended.
pub fn finalize_one(book: &mut Book, operation_id: &Id, tx_hash: Option<&Id>) -> bool {
    let Some(mut operation) = book.operations.get(operation_id).cloned() else {
        return false;
    };
    if !operation.status.is_open() {
        return false;
    }
    let postings = book.postings_of(operation_id).iter();
    let unsettled: Vec<(Id, Minor)> = postings
        .filter(|posting| posting.unsettled)
        .map(|posting| (posting.credit_subaccount_id.clone(), posting.amount.minor))
        .collect();
    for (credit_id, minor) in unsettled {
        let mut credit = book
            .subaccounts
            .get(&credit_id)
            .cloned()
            .expect("sub-accounts of a loaded operation are loaded with it");
        credit.unsettled -= minor;
        accounts::put(book, credit);
    }
    operation.tx_hash = tx_hash.cloned().or(operation.tx_hash);
    operation.finalized_at_us = Some(book.now_us);
    set_status(book, operation, OperationStatus::Finalized, "");
    true
}

/// Reverses an open operation whose transaction reverted. A final operation stays final.
fn fail_one(book: &mut Book, operation_id: &Id, ids: Ids) -> Result<(), Refusal> {
    let Some(operation) = book.operations.get(operation_id).cloned() else {
        return Ok(());
    };
    if !operation.status.is_open() {
        return Ok(());
    }
    let key = Id::from(format!("revert:{operation_id}"));
    reverse_one(
        book,
        operation,
        Scope::Event,
        key,
        0,
        REVERTED,
        Some(INTEGRATION_ERROR),
        ids,
    )?;
    Ok(())
}

/// ReverseOperation (D20): posts the mirrored postings under the caller's key.
pub fn reverse(
    book: &mut Book,
    command: &Command,
    operation_id: &Id,
    reason: &str,
    ids: Ids,
) -> Outcome {
    let operation = book
        .operations
        .get(operation_id)
        .cloned()
        .ok_or(Refusal::OperationNotFound)?;
    let key = command
        .key
        .as_ref()
        .map_or_else(|| operation_id.clone(), |key| key.key.clone());
    if let Some(stored) = book.operation_by_key(Scope::Reverse, &operation.terms.user_id, &key) {
        let replay = Replay::of(stored.terms.digest == command.digest());
        let id = stored.terms.operation_id.clone();
        return Ok(answer(book, &id, replay));
    }
    if operation.reversed_by.is_some() {
        return Err(Refusal::AlreadyReversed.into());
    }
    if !operation.status.is_open() && operation.status != OperationStatus::Finalized {
        return Err(Refusal::OperationStatus.into());
    }
    require_service(&operation, command)?;
    let id = reverse_one(
        book,
        operation,
        Scope::Reverse,
        key,
        command.digest(),
        reason,
        None,
        ids,
    )?;
    Ok(answer(book, &id, Replay::No))
}

/// Refuses a caller other than a service for an open operation that awaits the chain. Only services
/// know the outcome on the chain. Another caller could contradict it: undo a confirmed transfer, or
/// release money of a transaction that reverts.
fn require_service(operation: &Operation, command: &Command) -> Result<(), Refusal> {
    let in_flight = operation.terms.awaits_chain && operation.status.is_open();
    if in_flight && !command.is_service {
        return Err(Refusal::OperationInFlight);
    }
    Ok(())
}

/// Requires the proof of the chain for an open operation. Only services, which read the receipt,
/// make an operation final that has a transaction on chain, and only they name the transaction.
fn require_proof(
    operation: &Operation,
    command: &Command,
    tx_hash: Option<&Id>,
) -> Result<(), Refusal> {
    if !command.is_service {
        if operation.terms.awaits_chain || is_confirmed_by_chain(operation.terms.kind) {
            return Err(Refusal::OperationInFlight);
        }
        if tx_hash.is_some() {
            let problem = "must be empty: the operation has no transaction on chain";
            return Err(Refusal::invalid("onchain_tx_hash", problem));
        }
    }
    if operation.terms.awaits_chain && tx_hash.is_none() && operation.tx_hash.is_none() {
        let problem = "must be given: the operation has a transaction on chain";
        return Err(Refusal::invalid("onchain_tx_hash", problem));
    }
    Ok(())
}

/// True for a type whose operations move units or money on chain. The CFA service makes them final,
/// also those that were posted without awaiting the chain.
fn is_confirmed_by_chain(kind: OperationType) -> bool {
    use OperationType::{
        Coupon, Deposit, Enforcement, Issuance, P2pTransfer, Redemption, TradeBuy, TradeSell,
    };
    matches!(
        kind,
        Deposit | P2pTransfer | Issuance | Redemption | TradeBuy | TradeSell | Enforcement | Coupon
    )
}

fn answer(book: &Book, id: &Id, replay: Replay) -> CommandResult {
    CommandResult {
        answer: Answer::Batch {
            outcomes: operations::posted(book, id, replay)
                .map(Ok)
                .into_iter()
                .collect(),
        },
        replay,
    }
}

/// Writes the reversal of an operation. An open operation ends FAILED. Its unsettled credits are
/// debited as unsettled, so that a trade can always be reversed (`design.md` 4).
fn reverse_one(
    book: &mut Book,
    mut operation: Operation,
    scope: Scope,
    key: Id,
    digest: i64,
    reason: &str,
    rejection_code: Option<i32>,
    ids: Ids,
) -> Result<Id, Refusal> {
    let was_open = operation.status.is_open();
    let of = operation.terms.clone();
    let moves: Vec<Move> = book
        .postings_of(&of.operation_id)
        .iter()
        .rev()
        .enumerate()
        .map(|(index, posting)| Move {
            debit_subaccount_id: posting.credit_subaccount_id.clone(),
            credit_subaccount_id: posting.debit_subaccount_id.clone(),
            units: posting.amount.clone(),
            hold_id: None,
            unsettled: false,
            may_debit_frozen: true,
            debits_unsettled: posting.unsettled && was_open,
            index,
        })
        .collect();
    assert!(
        !moves.is_empty(),
        "the postings of the operation are not loaded"
    );
    let reversal_id = ids();
    let reversal = Operation {
        terms: Arc::new(OperationTerms {
            operation_id: reversal_id.clone(),
            scope,
            kind: of.kind,
            user_id: of.user_id.clone(),
            idempotency_key: key,
            external_ref: None,
            awaits_chain: false,
            reverses: Some(of.operation_id.clone()),
            digest,
            created_at_us: book.now_us,
        }),
        status: OperationStatus::Settled,
        tx_hash: None,
        rejection_code: None,
        rejection_message: None,
        finalized_at_us: None,
        reversed_by: None,
    };
    operations::write(book, reversal, moves, ids)?;
    limits::uncount(book, &operation);
    operation.reversed_by = Some(reversal_id.clone());
    if was_open {
        operation.rejection_code = rejection_code;
        operation.rejection_message = Some(reason.to_owned());
        set_status(book, operation, OperationStatus::Failed, reason);
    } else {
        book.operations.put(of.operation_id.clone(), operation);
    }
    Ok(reversal_id)
}

fn set_status(book: &mut Book, mut operation: Operation, new: OperationStatus, reason: &str) {
    let operation_id = operation.terms.operation_id.clone();
    book.push_effect(Effect::StatusChanged {
        operation_id: operation_id.clone(),
        old: operation.status,
        new,
        reason: reason.to_owned(),
    });
    operation.status = new;
    book.operations.put(operation_id, operation);
}

/// Applies the notices that were parked before the operation was created.
pub fn apply_pending_receipts(book: &mut Book, operation_id: &Id, ids: Ids) -> Result<(), Refusal> {
    if book.pending_receipts.is_empty() {
        return Ok(());
    }
    let Some(operation) = book.operations.get(operation_id).cloned() else {
        return Ok(());
    };
    for key in pending_receipt_keys(&operation) {
        let Some(notice) = book.pending_receipts.get(&key).cloned() else {
            continue;
        };
        if notice.reverted {
            fail_one(book, operation_id, ids)?;
        } else {
            finalize_one(book, operation_id, notice.tx_hash.as_ref());
        }
        book.pending_receipts.remove(&key);
    }
    Ok(())
}

fn park(book: &mut Book, key: Id, tx_hash: Option<Id>, reverted: bool) {
    let notice = PendingReceipt {
        tx_hash,
        reverted,
        at_us: book.now_us,
    };
    if book.pending_receipts.get(&key).is_none() {
        book.pending_receipts.put(key, notice);
    }
}

/// Id of the operation that a target names.
pub fn find(book: &Book, target: &Target) -> Option<Id> {
    match target {
        Target::Id(id) => book
            .operations
            .get(id)
            .map(|operation| operation.terms.operation_id.clone()),
        Target::Key { user_id, key } => book
            .by_key
            .get(&(Scope::Create, user_id.clone(), key.clone()))
            .cloned(),
        Target::Reference { kind, external_ref } => book
            .by_reference
            .get(&(*kind, external_ref.clone()))
            .cloned(),
    }
}

pub fn tx_key(tx_hash: &Id) -> Id {
    format!("tx:{tx_hash}").into()
}

pub fn target_key(target: &Target) -> Id {
    match target {
        Target::Id(id) => format!("id:{id}"),
        Target::Key { user_id, key } => format!("key:{user_id}:{key}"),
        Target::Reference { kind, external_ref } => format!("ref:{}:{external_ref}", kind.code()),
    }
    .into()
}

/// Keys under which notices about this operation may be parked.
fn pending_receipt_keys(operation: &Operation) -> Vec<Id> {
    let terms = &operation.terms;
    new_operation_receipt_keys(
        &terms.user_id,
        &terms.idempotency_key,
        terms
            .external_ref
            .as_ref()
            .map(|reference| (terms.kind, reference)),
        operation.tx_hash.as_ref(),
    )
}

pub fn new_operation_receipt_keys(
    user_id: &Id,
    key: &Id,
    reference: Option<(OperationType, &Id)>,
    tx_hash: Option<&Id>,
) -> Vec<Id> {
    let mut keys = vec![target_key(&Target::Key {
        user_id: user_id.clone(),
        key: key.clone(),
    })];
    keys.extend(reference.map(|(kind, external_ref)| {
        target_key(&Target::Reference {
            kind,
            external_ref: external_ref.clone(),
        })
    }));
    keys.extend(tx_hash.map(tx_key));
    keys
}
