//! Batches (D19): operations and hold steps, executed in order.
//!
//! A batch is all or nothing unless it is independent. A batch with a source is applied once, in
//! the order of its source (`design.md` 4).

use super::{
    Answer, Batch, Command, CommandResult, Ids, NewOperation, OnProgress, Outcome, Posted, Replay,
    Source, StoredAnswer, StoredOutcome, accounts,
    operations::{create, posted},
    steps,
};
use crate::{
    book::Book,
    model::{Call, Scope, SourcePosition},
    refusal::{Position, Refusal, Refused},
};

/// Executes CreateOperation and CreateOperations.
pub fn post(
    book: &mut Book,
    command: &Command,
    batch: &Batch,
    ids: Ids,
    on_progress: OnProgress,
) -> Outcome {
    if batch.operations.is_empty() && batch.steps.is_empty() && batch.source.is_none() {
        return Err(Refusal::invalid("operations", "must not be empty").into());
    }
    if batch.independent && (batch.source.is_some() || !batch.steps.is_empty()) {
        return Err(
            Refusal::invalid("mode", "must be all or nothing with a source or hold steps").into(),
        );
    }
    if let Some(source) = &batch.source
        && advance(book, source, command.digest())? == Advance::Repeat
    {
        return Ok(CommandResult {
            answer: Answer::Batch {
                outcomes: stored_operations(book, batch),
            },
            replay: Replay::Same,
        });
    }
    for (index, (instrument_id, decimals)) in batch.scales.iter().enumerate() {
        accounts::bind_scale(book, instrument_id, *decimals).map_err(|refusal| match refusal {
            Refusal::Invalid { field, problem } => {
                Refusal::invalid(format!("instrument_scales[{index}].{field}"), problem)
            }
            other => other,
        })?;
    }
    let outcomes = run(book, command, batch, ids, on_progress)?;
    let replay = match outcomes.as_slice() {
        [Ok(posted)] if batch.single => posted.replay,
        _ => Replay::No,
    };
    Ok(CommandResult {
        answer: Answer::Batch { outcomes },
        replay,
    })
}

fn run(
    book: &mut Book,
    command: &Command,
    batch: &Batch,
    ids: Ids,
    on_progress: OnProgress,
) -> Result<Vec<Result<Posted, Refused>>, Refused> {
    // Sorted stably: steps with the same index keep their order.
    let mut steps: Vec<usize> = (0..batch.steps.len()).collect();
    let place = |index: &usize| {
        batch.steps[*index]
            .as_ref()
            .map_or(0, |step| step.before_operation)
    };
    steps.sort_by_key(place);
    let mut steps = steps.into_iter().peekable();
    let mut outcomes = Vec::with_capacity(batch.operations.len());
    for (index, operation) in batch.operations.iter().enumerate() {
        while let Some(step) = steps.next_if(|step| place(step) <= index) {
            run_step(book, command, batch, step, ids)?;
        }
        let savepoint = book.savepoint();
        let outcome = match operation {
            Ok(new) => create(book, command, batch.scope(), new, ids),
            Err(malformed) => Err(malformed.clone().into()),
        };
        if let Err(refused) = &outcome {
            if !batch.independent {
                return Err(refused.clone().at(Position::Operation(index)));
            }
            book.rollback(savepoint);
            bind_refusal(book, operation, &refused.refusal);
        }
        outcomes.push(outcome);
        on_progress(book);
    }
    for step in steps {
        run_step(book, command, batch, step, ids)?;
    }
    Ok(outcomes)
}

fn run_step(
    book: &mut Book,
    command: &Command,
    batch: &Batch,
    index: usize,
    ids: Ids,
) -> Result<(), Refused> {
    let done = match &batch.steps[index] {
        Ok(step) => steps::step(book, command, &step.kind, ids),
        Err(malformed) => Err(malformed.clone()),
    };
    done.map_err(|refusal| Refused::from(refusal).at(Position::HoldStep(index)))
}

impl Batch {
    fn scope(&self) -> Scope {
        if self.from_event {
            Scope::Event
        } else {
            Scope::Create
        }
    }
}

/// Binds the refusal of an operation in an independent batch to its own key.
fn bind_refusal(book: &mut Book, operation: &Result<NewOperation, Refusal>, refusal: &Refusal) {
    let Ok(new) = operation else { return };
    if refusal.stays_bound() {
        let key = (
            Call::CreateOperation,
            new.user_id.clone(),
            new.idempotency_key.clone(),
        );
        if book.answers.get(&key).is_some() {
            // Refused before: this refusal repeats the stored one.
            return;
        }
        let outcome = StoredOutcome::Refused {
            reason: refusal.bound_reason().to_owned(),
            at: None,
        };
        book.answers.put(
            key,
            StoredAnswer {
                digest: new.digest,
                outcome,
            },
        );
    }
}

#[derive(PartialEq, Eq)]
enum Advance {
    Next,
    Repeat,
}

/// Advances the position of a source. `Repeat`: the batch was applied before.
fn advance(book: &mut Book, source: &Source, digest: i64) -> Result<Advance, Refusal> {
    let (first, through) = (source.first_sequence, source.through_sequence);
    if first == 0 || through < first {
        return Err(Refusal::invalid(
            "through_sequence",
            "must not be below first_sequence, and sequences start at 1",
        ));
    }
    let known = book.sources.get(&source.name);
    let applied = known.map_or(0, |known| known.through_sequence);
    if through <= applied {
        let conflicts = known.is_some_and(|known| {
            known.through_sequence == through
                && (known.first_sequence != first || known.digest != digest)
        });
        return if conflicts {
            Err(Refusal::SourceConflict)
        } else {
            Ok(Advance::Repeat)
        };
    }
    if first != applied + 1 {
        return Err(Refusal::SourceGap {
            expected_first: applied + 1,
        });
    }
    let position = SourcePosition {
        through_sequence: through,
        first_sequence: first,
        digest,
    };
    book.sources.put(source.name.clone(), position);
    Ok(Advance::Next)
}

/// The operations that the batch created when it was applied, found by their keys.
fn stored_operations(book: &Book, batch: &Batch) -> Vec<Result<Posted, Refused>> {
    let find = |new: &NewOperation| {
        let operation = book.operation_by_key(Scope::Create, &new.user_id, &new.idempotency_key)?;
        let replay = Replay::of(operation.terms.digest == new.digest);
        posted(book, &operation.terms.operation_id, replay)
    };
    batch
        .operations
        .iter()
        .map(|new| {
            let new = new.as_ref().map_err(|malformed| malformed.clone())?;
            Ok(find(new).ok_or(Refusal::OperationNotFound)?)
        })
        .collect()
}
