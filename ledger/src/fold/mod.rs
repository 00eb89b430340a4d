//! The posting fold: `(working set, now, command) -> new rows and effects, or a refusal`. Uses no
//! clock, randomness, file or `async`.
//!
//! Every write of the ledger is one [`Command`]. A single call is a batch of one. A refused command
//! changes nothing, with two exceptions that the contract requires: an expiry that it found stays
//! (T31), and a business refusal stays bound to its key. The caller supplies ids, so equal inputs
//! produce equal rows.

mod accounts;
mod acts;
mod batch;
mod command;
mod holds;
mod lifecycle;
mod limits;
mod operations;
mod read_set;
mod steps;

pub use command::{
    Answer, Author, Batch, CallKey, Command, CommandKind, CommandResult, LimitTerms, NewHold,
    NewOperation, NewPosting, Posted, Replay, Source, Step, StepKind, StoredAnswer, StoredOutcome,
    StoredRefusal, Target,
};
pub use read_set::ReadSet;

use crate::{
    book::{AnswerKey, Book},
    model::{Call, Id},
    refusal::{Refusal, Refused},
};

/// Generator of ids for new rows.
pub type Ids<'a> = &'a mut dyn FnMut() -> Id;

/// Result of a command.
pub type Outcome = Result<CommandResult, Refused>;

/// Called after each operation of a batch and after each command. The rows created so far stay
/// unless the batch is refused.
pub type OnProgress<'a> = &'a mut dyn FnMut(&mut Book);

/// Folds one command into the working set. Its effects carry `index`.
pub fn fold(
    book: &mut Book,
    index: usize,
    command: &Command,
    ids: Ids,
    on_progress: OnProgress,
) -> Outcome {
    book.command_index = index;
    holds::expire_touched(book, command);
    let answer_key = answer_key(book, command);
    let stored = answer_key
        .as_ref()
        .and_then(|key| book.answers.get(key))
        .cloned();
    if let Some(stored) = stored {
        return replay(book, command, stored);
    }
    let savepoint = book.savepoint();
    let before = acts::before(book, command);
    let outcome = dispatch(book, command, ids, on_progress);
    match &outcome {
        Ok(result) => {
            acts::record(book, command, result, &before);
            if let (Some(key), Some(stored)) = (answer_key, command.to_store(result)) {
                book.answers.put(key, stored);
            }
        }
        Err(refused) => {
            book.rollback(savepoint);
            if let Some(key) = answer_key.filter(|_| refused.refusal.stays_bound()) {
                let stored = StoredAnswer::refused(refused, command.digest());
                book.answers.put(key, stored);
            }
        }
    }
    outcome
}

fn dispatch(book: &mut Book, command: &Command, ids: Ids, on_progress: OnProgress) -> Outcome {
    match &command.kind {
        CommandKind::Post(batch) => batch::post(book, command, batch, ids, on_progress),
        CommandKind::CreateHold(hold) => holds::create(book, command, hold, ids),
        CommandKind::ReleaseHold { hold_id, reason } => {
            holds::release(book, command, hold_id, reason)
        }
        CommandKind::ConsumeHold { .. } => holds::consume(book, command, ids),
        CommandKind::AdjustHold { hold_id, remaining } => {
            holds::adjust(book, command, hold_id, remaining)
        }
        CommandKind::ExpireHolds(due) => {
            holds::expire_due(book, due);
            Ok(CommandResult::new(Answer::Done))
        }
        CommandKind::Finalize { targets, tx_hash } => {
            lifecycle::finalize(book, command, targets, tx_hash.as_ref())
        }
        CommandKind::Confirm { targets, tx_hash } => {
            lifecycle::confirm(book, targets, tx_hash.as_ref())
        }
        CommandKind::Receipt { tx_hash, reverted } => {
            lifecycle::receipt(book, tx_hash, *reverted, ids)
        }
        CommandKind::Reverse {
            operation_id,
            reason,
        } => lifecycle::reverse(book, command, operation_id, reason, ids),
        CommandKind::SetStatus {
            subaccount_id,
            status,
            ..
        } => accounts::set_status(book, subaccount_id, *status),
        CommandKind::CreateUser { user_id } => accounts::create_user(book, user_id),
        CommandKind::BlockUser { user_id, blocked } => {
            accounts::block_user(book, user_id, *blocked)
        }
        CommandKind::RegisterInstrument {
            instrument_id,
            decimals,
        } => accounts::register_instrument(book, instrument_id, *decimals),
        CommandKind::SetLimit {
            limit, may_raise, ..
        } => limits::set(book, limit, *may_raise),
        CommandKind::RemoveLimit { limit_id, .. } => limits::remove(book, limit_id),
        CommandKind::PurgePendingReceipts { .. } => Ok(CommandResult::new(Answer::Done)),
    }
}

/// The (call, user, key) under which the answer of this command is stored. `None` if the rows
/// themselves answer a replay. The user is the owner of the touched object, so a key never returns
/// another user's answer (T12).
fn answer_key(book: &Book, command: &Command) -> Option<AnswerKey> {
    let key = command.key.as_ref()?;
    let owner = |hold_id: &Id| Some(book.holds.get(hold_id)?.terms.user_id.clone());
    let (call, user) = match &command.kind {
        CommandKind::Post(batch) if batch.single => {
            let operation = batch.operations.first()?.as_ref().ok()?;
            return Some((
                Call::CreateOperation,
                operation.user_id.clone(),
                operation.idempotency_key.clone(),
            ));
        }
        // A batch with a source is answered by its stored position.
        CommandKind::Post(batch) if batch.source.is_some() => return None,
        CommandKind::Post(_) => (Call::CreateOperations, key.user_id.clone()),
        CommandKind::CreateHold(hold) => (Call::CreateHold, accounts::owner(&hold.subaccount_id)?),
        CommandKind::ReleaseHold { hold_id, .. } => (Call::ReleaseHold, owner(hold_id)?),
        CommandKind::ConsumeHold { hold_id, .. } => (Call::ConsumeHold, owner(hold_id)?),
        CommandKind::AdjustHold { hold_id, .. } => (Call::AdjustHold, owner(hold_id)?),
        CommandKind::Reverse { operation_id, .. } => (
            Call::ReverseOperation,
            book.operations.get(operation_id)?.terms.user_id.clone(),
        ),
        CommandKind::SetStatus { subaccount_id, .. } => {
            (Call::SetSubAccountStatus, accounts::owner(subaccount_id)?)
        }
        CommandKind::SetLimit { .. } => (Call::SetVelocityLimit, key.user_id.clone()),
        CommandKind::RemoveLimit { .. } => (Call::RemoveVelocityLimit, key.user_id.clone()),
        _ => return None,
    };
    Some((call, user, key.key.clone()))
}

/// Replays the stored answer, even if the request differs (T12).
fn replay(book: &Book, command: &Command, stored: StoredAnswer) -> Outcome {
    let replay = Replay::of(stored.digest == command.digest());
    let answer = match stored.outcome {
        StoredOutcome::Refused { reason, at } => {
            return Err(Refused::replayed(Refusal::bound(&reason), at, replay));
        }
        StoredOutcome::Hold { hold, operation_id } => Answer::Hold {
            hold,
            operation: operation_id.and_then(|id| operations::posted(book, &id, replay)),
        },
        StoredOutcome::Batch(outcomes) => Answer::Batch {
            outcomes: outcomes
                .into_iter()
                .map(|outcome| match outcome {
                    Ok(id) => operations::posted(book, &id, Replay::Same)
                        .ok_or(Refusal::OperationNotFound.into()),
                    Err(stored) => Err(Refused::replayed(stored.refusal(), None, Replay::Same)),
                })
                .collect(),
        },
        StoredOutcome::Limit(limit) => Answer::Limit(limit),
        StoredOutcome::SubAccount(id) => match book.subaccounts.get(&id) {
            Some(subaccount) => Answer::SubAccount(subaccount.clone()),
            None => return Err(Refusal::SubAccountNotFound.into()),
        },
    };
    Ok(CommandResult { answer, replay })
}
