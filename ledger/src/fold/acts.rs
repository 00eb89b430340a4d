//! Audit records of a command (D34): who did what, with the state before and after.
//!
//! Recorded is what a person changes, and every change of a limit or of a sub-account's status. A
//! refused or repeated command has no record, and a limit that is set to its own terms.

use super::{Answer, Author, Command, CommandKind, CommandResult, Replay};
use crate::{
    audit::Act,
    book::Book,
    effects::Effect,
    model::{Hold, Id},
};

const LIMIT_SET: &str = "limit.set";

/// State of the command's object before the command; empty: none, or not needed.
pub fn before(book: &Book, command: &Command) -> String {
    if command.author.is_none() {
        return String::new();
    }
    let text = match &command.kind {
        CommandKind::SetStatus { subaccount_id, .. } => book
            .subaccounts
            .get(subaccount_id)
            .map(|row| row.status().to_string()),
        CommandKind::SetLimit { limit, .. } => book
            .limits
            .get(&limit.limit_id)
            .map(|known| known.audit_text()),
        CommandKind::ReleaseHold { hold_id, .. }
        | CommandKind::ConsumeHold { hold_id, .. }
        | CommandKind::AdjustHold { hold_id, .. } => book.holds.get(hold_id).map(hold_text),
        CommandKind::Finalize { targets, .. } => targets
            .first()
            .and_then(|target| super::lifecycle::find(book, target))
            .and_then(|id| book.operations.get(&id))
            .map(|operation| operation.status.as_str().to_owned()),
        _ => None,
    };
    text.unwrap_or_default()
}

fn hold_text(hold: &Hold) -> String {
    let remaining = hold.units(hold.remaining).decimal();
    let (subaccount_id, status) = (&hold.terms.subaccount_id, hold.status.as_str());
    format!("{remaining} of {subaccount_id}, {status}")
}

/// Name and reason of what a command does to a hold.
fn hold_action(kind: &CommandKind) -> (&'static str, &str) {
    match kind {
        CommandKind::CreateHold(new) => ("hold.created", new.reason.as_str()),
        CommandKind::ReleaseHold { reason, .. } => ("hold.released", reason.as_str()),
        CommandKind::ConsumeHold { .. } => ("hold.consumed", ""),
        _ => ("hold.adjusted", ""),
    }
}

/// Adds the records of a command that was executed.
pub fn record(book: &mut Book, command: &Command, result: &CommandResult, before: &str) {
    let Some(author) = &command.author else {
        return;
    };
    if result.replay != Replay::No {
        return;
    }
    for act in acts(book, command, author, result, before) {
        // Equal terms change nothing. A status may have several causes, so an equal one may be a
        // change.
        if act.action == LIMIT_SET && act.before == act.after {
            continue;
        }
        book.push_effect(Effect::ActRecorded(Box::new(act)));
    }
}

fn acts(
    book: &Book,
    command: &Command,
    author: &Author,
    result: &CommandResult,
    before: &str,
) -> Vec<Act> {
    let act = |action: &'static str, object_id: &Id, after: String, reason: &str| Act {
        action,
        actor: author.subject.clone(),
        object_id: object_id.clone(),
        before: before.to_owned(),
        after,
        reason: reason.to_owned(),
        request_id: author.request_id.clone(),
        correlation_id: author.correlation_id.clone(),
    };
    match (&command.kind, &result.answer) {
        (CommandKind::Post(_), Answer::Batch { outcomes }) => outcomes
            .iter()
            .flatten()
            .filter(|posted| posted.replay == Replay::No)
            .map(|posted| {
                let (terms, status) = (&posted.operation.terms, posted.operation.status);
                let after = format!("{} {}", terms.kind.as_str(), status.as_str());
                act("operation.created", &terms.operation_id, after, "")
            })
            .collect(),
        (
            CommandKind::Reverse {
                operation_id,
                reason,
            },
            Answer::Batch { outcomes },
        ) => {
            let reversal = outcomes.iter().flatten().next();
            let by = reversal.map(|posted| &*posted.operation.terms.operation_id);
            let after = format!("reversed by {}", by.unwrap_or_default());
            vec![act("operation.reversed", operation_id, after, reason)]
        }
        (CommandKind::Finalize { targets, .. }, _) => targets
            .iter()
            .filter_map(|target| super::lifecycle::find(book, target))
            .filter_map(|id| book.operations.get(&id))
            .map(|operation| {
                let after = operation.status.as_str().to_owned();
                let id = &operation.terms.operation_id;
                act("operation.finalized", id, after, "")
            })
            .collect(),
        (kind, Answer::Hold { hold, .. }) => {
            let (action, reason) = hold_action(kind);
            vec![act(action, &hold.terms.hold_id, hold_text(hold), reason)]
        }
        (
            CommandKind::SetStatus {
                subaccount_id,
                reason,
                ..
            },
            Answer::SubAccount(row),
        ) => {
            let after = row.status().to_string();
            vec![act("subaccount.status", subaccount_id, after, reason)]
        }
        (CommandKind::SetLimit { reason, .. }, Answer::Limit(limit)) => {
            let after = limit.audit_text();
            vec![act(LIMIT_SET, &limit.limit_id, after, reason)]
        }
        (CommandKind::RemoveLimit { reason, .. }, Answer::Limit(limit)) => {
            let mut removed = act("limit.removed", &limit.limit_id, String::new(), reason);
            removed.before = limit.audit_text();
            vec![removed]
        }
        _ => Vec::new(),
    }
}
