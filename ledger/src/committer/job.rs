//! What waits for the writer, and where its outcome goes.

use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::{
    Error,
    fold::{Act, Answer, Answered, Command, Outcome},
};

/// What an event asks for. It is noted as taken in the transaction of its effect.
#[derive(Debug)]
pub struct Asked {
    pub event_id: Uuid,
    pub command: Command,
    pub context: rpc::Context,
}

/// The outcome of a command, each time that it is folded, and then whether the last one is durable.
/// Until it is, nobody may be told of it.
pub struct Early {
    pub folded: mpsc::UnboundedReceiver<Outcome>,
    pub durable: oneshot::Receiver<Result<(), Error>>,
}

/// Where the outcome of one command goes.
pub(super) enum Reply {
    /// Once it is durable.
    Whole(oneshot::Sender<Result<Outcome, Error>>),
    /// To whoever makes an answer of it meanwhile.
    Early {
        folded: mpsc::UnboundedSender<Outcome>,
        durable: oneshot::Sender<Result<(), Error>>,
    },
}

impl Reply {
    /// Tells what the fold made, where somebody wants to know already.
    pub(super) fn tell(&self, outcome: &mut Outcome) {
        if let Reply::Early { folded, .. } = self {
            let told = std::mem::replace(outcome, Ok(Answered::new(Answer::Done)));
            let _ = folded.send(told);
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
        asked: Vec<Asked>,
        reply: oneshot::Sender<Result<Vec<Outcome>, Error>>,
    },
}

impl Job {
    /// Events are taken in order up to the first refused one, and what a limit counts is loaded
    /// before a group is folded: each has a transaction of its own.
    pub(super) fn is_alone(&self) -> bool {
        match self {
            Job::Events { .. } => true,
            Job::One { command, .. } => {
                matches!(command.act, Act::SetLimit { .. } | Act::RemoveLimit { .. })
            }
        }
    }

    pub(super) fn weight(&self) -> usize {
        match self {
            Job::Events { asked, .. } => asked.iter().map(|asked| asked.command.weight()).sum(),
            Job::One { command, .. } => command.weight(),
        }
    }

    /// A caller that went away has its answer stored under its key.
    pub(super) fn answer(self, mut outcomes: Result<Vec<Outcome>, Error>) {
        match self {
            Job::Events { reply, .. } => drop(reply.send(outcomes)),
            Job::One { reply, .. } => {
                let outcome = outcomes.as_mut().map(|outcomes| outcomes.remove(0));
                let outcome = outcome.map_err(|error| std::mem::replace(error, Error::Closed));
                match reply {
                    Reply::Whole(reply) => drop(reply.send(outcome)),
                    Reply::Early { durable, .. } => drop(durable.send(outcome.map(drop))),
                }
            }
        }
    }
}

/// Gives each command of a group its outcome.
pub(super) fn answer(mut group: Vec<Job>, outcomes: Vec<Outcome>) {
    if let [Job::Events { .. }] = group.as_slice() {
        group.remove(0).answer(Ok(outcomes));
        return;
    }
    for (job, outcome) in group.into_iter().zip(outcomes) {
        job.answer(Ok(vec![outcome]));
    }
}

impl Command {
    /// Operations and hold steps in it.
    pub fn weight(&self) -> usize {
        match &self.act {
            Act::Post(batch) => batch.operations.len() + batch.steps.len(),
            Act::Finalize { targets, .. } | Act::Confirm { targets, .. } => targets.len(),
            Act::ExpireHolds(due) => due.len(),
            _ => 1,
        }
    }
}
