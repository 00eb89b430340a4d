//! Commands that settlement journals: progress, bust trades, and blocks of users with a difference
//! between journal and ledger (`design.md` 4).
//!
//! Invariants: a trade's `Bust` is journalled before a `Settled` passes it; settlement's own
//! records alone cause no `Settled`, so an idle market has an idle journal; a command is repeated
//! until it is journalled, and the health is failing meanwhile.
//!
//! Cost: at most ten `Settled` per second, independent of the number of batches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use replica::{Replica, ReplicaError, State};
use sequencer::{Port, SubmitError};
use types::command::{BlockCause, BlockUser, MassCancel, Settled, UnblockUser};
use types::{Command, Sequence, UserId, UserIx};

use super::retry::until_journalled;
use super::{Halt, Shared, failure, now_us};
use crate::progress::{Progress, Suspension};
use crate::repo::StoreError;

/// Interval between two `Settled`.
const INTERVAL: Duration = Duration::from_millis(100);
/// Pause before a failed block or unblock is retried.
const LATE: Duration = Duration::from_secs(1);
/// Longest wait for the replica per user.
const PATIENCE: Duration = Duration::from_secs(2);

/// Journals a command of settlement. Returns its sequence; `None` if its effect is journalled
/// already.
pub type JournalPort =
    Arc<dyn Fn(Command) -> BoxFuture<'static, Result<Option<Sequence>, SubmitError>> + Send + Sync>;

/// The [`JournalPort`] of a running node.
pub fn journal_port(port: Port) -> JournalPort {
    Arc::new(move |command| {
        let port = port.clone();
        Box::pin(async move { port.settlement(command).await })
    })
}

/// Why a block or unblock has to be retried.
#[derive(Debug, thiserror::Error)]
enum BlockError {
    #[error(transparent)]
    SubmitError(#[from] SubmitError),
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    #[error("the replica has not applied the command in time")]
    Behind,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// State of both workers.
#[derive(Clone)]
pub(super) struct Commands {
    pub shared: Arc<Shared>,
    pub replica: Replica,
    pub journal: JournalPort,
}

impl Commands {
    /// Journals progress and bust trades until shutdown.
    ///
    /// # Errors
    /// [`Halt`].
    pub async fn report_progress(self) -> Result<(), Halt> {
        let mut progress = self.shared.tracker.watch();
        let mut reported = Progress::default().reportable();
        let mut busts = 0;
        loop {
            let wanted = progress.wait_for(|p| p.reportable() != reported || p.busts != busts);
            let changed = self.shared.unless_stopped(wanted).await?;
            drop(changed.expect("the tracker outlives its workers"));
            // One snapshot: busts are journalled before the position passes them.
            let (now, bust_now) = self.shared.tracker.report();
            busts = now.busts;
            for bust in bust_now {
                // Those of earlier runs are journalled already, except perhaps the last ones.
                let is_known = |state: &State| state.core().admission().is_bust(bust.trade);
                if !self.replica.read(is_known) {
                    self.ask(Command::Bust(bust)).await?;
                }
            }
            if now.reportable() != reported && self.settled(now).await? {
                reported = now.reportable();
            }
            let pause = tokio::time::sleep(INTERVAL);
            self.shared.unless_stopped(pause).await?;
        }
    }

    /// Journals progress. Returns false if the market is busy: the next attempt reports a later
    /// position.
    async fn settled(&self, now: Progress) -> Result<bool, Halt> {
        let known = self.replica.settlement();
        let is_further = now.settled > known.posted
            || now.finalized > known.finalized
            || now.trades_final > known.trades_final;
        if !is_further {
            return Ok(true);
        }
        let settled = Command::Settled(Settled {
            posted: now.settled,
            finalized: now.finalized,
            trades_final: now.trades_final,
        });
        match (self.journal)(settled).await {
            Err(SubmitError::Busy) => return Ok(false),
            Ok(Some(_)) => self.shared.tracker.own_journalled(),
            Ok(None) => {}
            Err(_) => drop(self.ask(settled).await?),
        }
        Ok(true)
    }

    /// Blocks users with a difference and unblocks them once it has cleared, until shutdown. A
    /// block by another cause remains. Steps are idempotent, so a restart repeats them.
    ///
    /// # Errors
    /// [`Halt`].
    pub async fn follow_suspensions(self) -> Result<(), Halt> {
        self.forget_unknown().await?;
        let mut suspended = self.shared.suspended.subscribe();
        let (mut blocked, mut done) = (BTreeSet::new(), BTreeMap::new());
        loop {
            let wanted = suspended.borrow_and_update().clone();
            done.retain(|user_id, _| wanted.contains_key(user_id));
            let differs = |user_id: &String| wanted.get(user_id) == Some(&Suspension::Differs);
            blocked.retain(|user_id| differs(user_id));
            let mut is_late = false;
            // Blocks first: they do not wait for engines, so one user's cancels delay no other
            // user's block.
            for user_id in wanted.keys().filter(|user_id| differs(user_id)) {
                if !blocked.contains(user_id) {
                    match self.noted(user_id, self.block(user_id)).await? {
                        true => drop(blocked.insert(user_id.clone())),
                        false => is_late = true,
                    }
                }
            }
            for (user_id, suspension) in &wanted {
                if done.get(user_id) == Some(suspension) {
                    continue;
                }
                let is_done = match suspension {
                    Suspension::Differs => self.noted(user_id, self.cancel(user_id)).await?,
                    Suspension::Agrees => self.noted(user_id, self.lift(user_id)).await?,
                };
                match is_done {
                    true => drop(done.insert(user_id.clone(), *suspension)),
                    false => is_late = true,
                }
            }
            tokio::select! {
                changed = suspended.changed() => changed.expect("the sender is shared with this"),
                () = tokio::time::sleep(LATE), if is_late => {}
                () = self.shared.shutdown.cancelled() => return Ok(()),
            }
        }
    }

    /// Returns true on success; otherwise the health is failing until a retry succeeds.
    async fn noted(
        &self,
        user_id: &str,
        work: impl Future<Output = Result<(), BlockError>>,
    ) -> Result<bool, Halt> {
        let failures = &self.shared.failures;
        match self.shared.unless_stopped(work).await? {
            Ok(()) => failures.clear(failure::JOURNAL, user_id),
            Err(BlockError::Replica(error)) => return Err(error.into()),
            Err(error) => {
                tracing::warn!(user_id, %error, "cannot journal a block or unblock of the user; retrying");
                failures.note(failure::JOURNAL, user_id, &error.to_string(), false);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Unblocks users whose block is in the journal but not in the store.
    ///
    /// The store was then restored from a copy. The comparison blocks a user again if the
    /// difference still exists.
    async fn forget_unknown(&self) -> Result<(), Halt> {
        let suspended = self.shared.suspended.borrow().clone();
        let unknown: Vec<UserIx> = self.replica.read(|state| {
            let admission = state.core().admission();
            let users = (0..)
                .map(UserIx)
                .map_while(|ix| Some((ix, admission.user(ix)?)));
            let unknown = users.filter(|(_, user)| {
                user.blocks.has(BlockCause::Difference) && !suspended.contains_key(user.id.as_str())
            });
            unknown.map(|(ix, _)| ix).collect()
        });
        for user in unknown {
            let cause = BlockCause::Difference;
            self.ask(Command::UnblockUser(UnblockUser { user, cause }))
                .await?;
        }
        Ok(())
    }

    /// Blocks new orders of the user.
    async fn block(&self, user_id: &str) -> Result<(), BlockError> {
        let Some(user) = self.user(user_id).await? else {
            return Ok(());
        };
        let cause = BlockCause::Difference;
        (self.journal)(Command::BlockUser(BlockUser { user, cause })).await?;
        tracing::error!(
            user_id,
            severity = "critical",
            "user blocked: journal and ledger differ"
        );
        Ok(())
    }

    /// Cancels the open orders of a blocked user.
    async fn cancel(&self, user_id: &str) -> Result<(), BlockError> {
        if let Some(user) = self.user(user_id).await? {
            let cancel = MassCancel::of_blocked(user);
            (self.journal)(Command::MassCancel(cancel)).await?;
        }
        Ok(())
    }

    async fn lift(&self, user_id: &str) -> Result<(), BlockError> {
        let shared = &self.shared;
        if let Some(user) = self.user(user_id).await? {
            if shared.suspended.borrow().get(user_id) != Some(&Suspension::Agrees) {
                // It differs again: the next round blocks the user.
                return Ok(());
            }
            let cause = BlockCause::Difference;
            let unblock = Command::UnblockUser(UnblockUser { user, cause });
            let sequence = (self.journal)(unblock).await?;
            // The unblock must be applied before the store forgets it.
            self.reached(sequence.unwrap_or(self.replica.assigned()))
                .await?;
            tracing::info!(user_id, "user unblocked: journal and ledger agree again");
        }
        shared.repo.lifted(user_id, now_us()).await?;
        shared.publish_suspensions().await?;
        Ok(())
    }

    /// Index of a user. A user with a hold is bound.
    async fn user(&self, user_id: &str) -> Result<Option<UserIx>, BlockError> {
        let Ok(id) = UserId::new(user_id) else {
            return Ok(None);
        };
        let names = self.replica.names();
        if let Some(user) = names.user_ix(&id) {
            return Ok(Some(user));
        }
        self.reached(self.replica.durable()).await?;
        Ok(names.user_ix(&id))
    }

    async fn reached(&self, sequence: Sequence) -> Result<(), BlockError> {
        let reached = tokio::time::timeout(PATIENCE, self.replica.wait(sequence)).await;
        Ok(reached.map_err(|_| BlockError::Behind)??)
    }

    /// Repeats a command until it is journalled.
    async fn ask(&self, command: Command) -> Result<Option<Sequence>, Halt> {
        let asking = until_journalled(&self.shared, command.name(), || (self.journal)(command));
        let sequence = asking.await?;
        let is_own = matches!(command, Command::Settled(_) | Command::Bust(_));
        if is_own && sequence.is_some() {
            self.shared.tracker.own_journalled();
        }
        Ok(sequence)
    }
}
