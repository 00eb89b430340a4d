//! Queued commands and the channels for their outcomes.

use tokio::sync::{oneshot, watch};
use uuid::Uuid;

use crate::{
    Error,
    fold::{Answer, Command, CommandKind, CommandResult, Outcome},
};

/// The command of a consumed event. The transaction of the command adds the event to the inbox.
#[derive(Debug)]
pub struct InboxCommand {
    pub event_id: Uuid,
    pub command: Command,
    pub context: rpc::Context,
}

/// Outcome of a command before it is durable. `folded` has the outcome of the last fold, `durable`
/// receives the result of the commit. The caller must not use the outcome outside the process
/// before `durable` succeeds.
pub struct EarlyOutcome {
    pub folded: watch::Receiver<Option<Outcome>>,
    pub durable: oneshot::Receiver<Result<(), Error>>,
}

/// Receiver of the outcome of one command.
pub(super) enum Reply {
    /// Gets the outcome after the commit.
    AfterCommit(oneshot::Sender<Result<Outcome, Error>>),
    /// Gets the outcome after each fold, to build the response meanwhile, and then the result of
    /// the commit.
    AfterFold {
        folded: watch::Sender<Option<Outcome>>,
        durable: oneshot::Sender<Result<(), Error>>,
    },
}

impl Reply {
    /// Sends the outcome of a fold to [`Reply::AfterFold`].
    pub(super) fn send_early(&self, outcome: &mut Outcome) {
        if let Reply::AfterFold { folded, .. } = self {
            let early = std::mem::replace(outcome, Ok(CommandResult::new(Answer::Done)));
            folded.send_replace(Some(early));
        }
    }
}

pub(super) enum Job {
    One {
        command: Command,
        context: rpc::Context,
        reply: Reply,
    },
    Events {
        consumer: &'static str,
        inbox: Vec<InboxCommand>,
        reply: oneshot::Sender<Result<Vec<Outcome>, Error>>,
    },
}

impl Job {
    /// True if the job needs its own transaction. Events do: they are accepted in order up to the
    /// first refusal. Changes of limits do: usage is loaded before a group is folded.
    pub(super) fn needs_own_group(&self) -> bool {
        match self {
            Job::Events { .. } => true,
            Job::One { command, .. } => {
                matches!(
                    command.kind,
                    CommandKind::SetLimit { .. } | CommandKind::RemoveLimit { .. }
                )
            }
        }
    }

    pub(super) fn weight(&self) -> usize {
        match self {
            Job::Events { inbox, .. } => inbox.iter().map(|item| item.command.weight()).sum(),
            Job::One { command, .. } => command.weight(),
        }
    }

    /// Sends the outcomes. A caller that disconnected gets its stored answer when it retries with
    /// its key.
    pub(super) fn reply(self, mut outcomes: Result<Vec<Outcome>, Error>) {
        match self {
            Job::Events { reply, .. } => drop(reply.send(outcomes)),
            Job::One { reply, .. } => {
                let outcome = outcomes.as_mut().map(|outcomes| outcomes.remove(0));
                let outcome = outcome.map_err(|error| std::mem::replace(error, Error::Closed));
                match reply {
                    Reply::AfterCommit(reply) => drop(reply.send(outcome)),
                    Reply::AfterFold { durable, .. } => drop(durable.send(outcome.map(drop))),
                }
            }
        }
    }
}

/// Sends each command's outcome to its caller.
pub(super) fn reply_to_group(mut group: Vec<Job>, outcomes: Vec<Outcome>) {
    if let [Job::Events { .. }] = group.as_slice() {
        group.remove(0).reply(Ok(outcomes));
        return;
    }
    for (job, outcome) in group.into_iter().zip(outcomes) {
        job.reply(Ok(vec![outcome]));
    }
}

impl Command {
    /// Number of operations and hold steps, of targets, or of holds to expire; 1 for any other
    /// command.
    pub fn weight(&self) -> usize {
        match &self.kind {
            CommandKind::Post(batch) => batch.operations.len() + batch.steps.len(),
            CommandKind::Finalize { targets, .. } | CommandKind::Confirm { targets, .. } => {
                targets.len()
            }
            CommandKind::ExpireHolds(due) => due.len(),
            _ => 1,
        }
    }
}
