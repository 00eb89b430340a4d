//! Loads rows into the working set, for all databases.

use std::collections::BTreeSet;

use super::rows::{
    AccountRow, AnswerRow, HoldRow, OperationRow, PostingRow, SubAccountRow, corrupt,
};
use crate::{
    Error,
    book::Book,
    fold::{Command, ReadSet, StoredOutcome},
    model::{Account, Call, Hold, Id, Operation, Posting, SourcePosition, SubAccount, User},
    names::SubAccountName,
};

/// Loads holds. Adds the rows to which they refer to the read set.
pub fn holds(read_set: &mut ReadSet, book: &mut Book, found: Vec<HoldRow>) -> Result<(), Error> {
    for row in found {
        hold(read_set, book, Hold::try_from(row)?);
    }
    Ok(())
}

pub fn hold(read_set: &mut ReadSet, book: &mut Book, hold: Hold) {
    read_set.add_hold(&hold);
    book.holds.load(hold.terms.hold_id.clone(), hold);
}

/// Loads operations by id, key, reference and transaction hash.
pub fn operations(book: &mut Book, found: Vec<OperationRow>) -> Result<(), Error> {
    for row in found {
        operation(book, Operation::try_from(row)?);
    }
    Ok(())
}

pub fn operation(book: &mut Book, operation: Operation) {
    let terms = operation.terms.clone();
    let id = terms.operation_id.clone();
    let key = (
        terms.scope,
        terms.user_id.clone(),
        terms.idempotency_key.clone(),
    );
    book.by_key.load(key, id.clone());
    if let Some(reference) = &terms.external_ref {
        book.by_reference
            .load((terms.kind, reference.clone()), id.clone());
    }
    if let Some(tx_hash) = &operation.tx_hash {
        let carriers = book.by_tx.entry(tx_hash.clone()).or_default();
        if !carriers.contains(&id) {
            carriers.push(id.clone());
        }
    }
    book.operations.load(id, operation);
}

/// Loads postings. `found` is ordered by operation.
pub fn postings(read_set: &mut ReadSet, book: &mut Book, found: Vec<PostingRow>) {
    let mut group: Vec<Posting> = Vec::new();
    for posting in found.into_iter().map(Posting::from) {
        let last = group.last();
        if last.is_some_and(|last| last.operation_id != posting.operation_id) {
            postings_of_one(read_set, book, std::mem::take(&mut group));
        }
        group.push(posting);
    }
    postings_of_one(read_set, book, group);
}

/// Loads the postings of one operation, if it has any.
pub fn postings_of_one(read_set: &mut ReadSet, book: &mut Book, postings: Vec<Posting>) {
    let Some(first) = postings.first() else {
        return;
    };
    let operation_id = first.operation_id.clone();
    for posting in &postings {
        read_set.add_posting(posting);
    }
    book.postings.load(operation_id, postings);
}

pub fn subaccounts(book: &mut Book, found: Vec<SubAccountRow>) {
    for row in found {
        let row = SubAccount::from(row);
        book.subaccounts.load(row.terms.subaccount_id.clone(), row);
    }
}

pub fn accounts(book: &mut Book, found: Vec<AccountRow>) -> Result<(), Error> {
    for row in found {
        let account = Account::try_from(row)?;
        book.accounts.load(account.account_id.clone(), account);
    }
    Ok(())
}

/// Loads users from (user, blocked).
pub fn users(book: &mut Book, found: Vec<(String, bool)>) {
    for (user_id, blocked) in found {
        let user_id = Id::from(user_id);
        book.users.load(user_id.clone(), User { user_id, blocked });
    }
}

/// Instruments whose decimals are needed to open a sub-account or to bind decimals.
pub fn instruments(read_set: &ReadSet, commands: &[&Command], book: &Book) -> BTreeSet<Id> {
    let mut instruments: BTreeSet<Id> = read_set
        .subaccount_ids
        .iter()
        .filter(|id| book.subaccounts.get(*id).is_none())
        .filter_map(|id| SubAccountName::parse(id))
        .map(|name| name.instrument_id.into())
        .collect();
    for command in commands {
        command.for_each_scale(&mut |id| {
            instruments.insert(id.clone());
        });
    }
    instruments
}

/// Loads stored answers. Returns the operations to which they refer.
pub fn answers(book: &mut Book, found: Vec<AnswerRow>) -> Result<BTreeSet<Id>, Error> {
    let mut operations = BTreeSet::new();
    for row in found {
        let call = Call::from_code(row.call)
            .ok_or_else(|| corrupt("stored answer", &row.idempotency_key))?;
        let answer = row.answer()?;
        match &answer.outcome {
            StoredOutcome::Batch(outcomes) => operations.extend(outcomes.iter().flatten().cloned()),
            StoredOutcome::Hold { operation_id, .. } => operations.extend(operation_id.clone()),
            StoredOutcome::Refused { .. }
            | StoredOutcome::SubAccount(_)
            | StoredOutcome::Limit(_) => {}
        }
        book.answers.load(
            (call, row.user_id.into(), row.idempotency_key.into()),
            answer,
        );
    }
    Ok(operations)
}

/// Loads positions from (source, first sequence, last sequence, digest).
pub fn sources(book: &mut Book, found: Vec<(String, i64, i64, i64)>) {
    for (source, first, through, digest) in found {
        let position = SourcePosition {
            first_sequence: first.unsigned_abs(),
            through_sequence: through.unsigned_abs(),
            digest,
        };
        book.sources.load(source.into(), position);
    }
}
