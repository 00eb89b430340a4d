//! Commands that settlement journals: progress, bust trades, and blocks of users with a difference
//! between journal and ledger (`design.md` 4).
//!
//! Invariants:
//! - The `Bust` of a trade is journalled before any `Settled` whose `finalized` includes the trade.
//! - Records that settlement itself journals cause no further `Settled`: an idle market writes
//!   nothing.
//! - A command is retried until it is journalled; health part `settlement-journal` is failing
//!   meanwhile. A `Settled` refused with `Busy` is dropped: the next round submits the current
//!   positions.
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
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Longest single wait for the replica.
const REPLICA_WAIT_MAX: Duration = Duration::from_secs(2);

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

/// Why a block, cancel or unblock failed. `Replica` stops the worker; the others are retried.
#[derive(Debug, thiserror::Error)]
enum BlockError {
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    #[error("the replica has not reached sequence {0} in time")]
    ReplicaLag(Sequence),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// State of the workers [`Commands::report_progress`] and [`Commands::follow_suspensions`].
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
            let advanced = progress.wait_for(|p| p.reportable() != reported || p.busts != busts);
            let changed = self.shared.unless_stopped(advanced).await?;
            drop(changed.expect("the tracker outlives its workers"));
            // One snapshot: a bust is journalled before a position that includes it.
            let (current, new_busts) = self.shared.tracker.report();
            busts = current.busts;
            for bust in new_busts {
                // The first report repeats the busts of earlier runs. Only those that a crash left
                // unjournalled are submitted.
                let is_known = |state: &State| state.core().admission().is_bust(bust.trade);
                if !self.replica.read(is_known) {
                    self.submit_until_journalled(Command::Bust(bust)).await?;
                }
            }
            if current.reportable() != reported && self.submit_settled(current).await? {
                reported = current.reportable();
            }
            let pause = tokio::time::sleep(INTERVAL);
            self.shared.unless_stopped(pause).await?;
        }
    }

    /// Journals a `Settled` if a position has advanced. Returns false on `Busy`: the caller retries
    /// with the current positions.
    async fn submit_settled(&self, current: Progress) -> Result<bool, Halt> {
        let known = self.replica.settlement();
        let is_further = current.settled > known.posted
            || current.finalized > known.finalized
            || current.trades_final > known.trades_final;
        if !is_further {
            return Ok(true);
        }
        let settled = Command::Settled(Settled {
            posted: current.settled,
            finalized: current.finalized,
            trades_final: current.trades_final,
        });
        match (self.journal)(settled).await {
            Err(SubmitError::Busy) => return Ok(false),
            Ok(Some(_)) => self.shared.tracker.own_journalled(),
            Ok(None) => {}
            Err(_) => drop(self.submit_until_journalled(settled).await?),
        }
        Ok(true)
    }

    /// Blocks users with a difference and unblocks them once it has cleared, until shutdown. A
    /// block by another cause remains. Steps are idempotent, so a restart repeats them.
    ///
    /// # Errors
    /// [`Halt`].
    pub async fn follow_suspensions(self) -> Result<(), Halt> {
        self.unblock_unrecorded().await?;
        let mut suspended = self.shared.suspended.subscribe();
        let (mut blocked, mut done) = (BTreeSet::new(), BTreeMap::new());
        loop {
            let suspensions = suspended.borrow_and_update().clone();
            done.retain(|user_id, _| suspensions.contains_key(user_id));
            let differs = |user_id: &String| suspensions.get(user_id) == Some(&Suspension::Differs);
            blocked.retain(|user_id| differs(user_id));
            let mut must_retry = false;
            // Blocks first: they do not wait for engines, so one user's cancels delay no other
            // user's block.
            for user_id in suspensions.keys().filter(|user_id| differs(user_id)) {
                if !blocked.contains(user_id) {
                    match self.track_failure(user_id, self.block(user_id)).await? {
                        true => drop(blocked.insert(user_id.clone())),
                        false => must_retry = true,
                    }
                }
            }
            for (user_id, suspension) in &suspensions {
                if done.get(user_id) == Some(suspension) {
                    continue;
                }
                let is_done = match suspension {
                    Suspension::Differs => {
                        self.track_failure(user_id, self.cancel(user_id)).await?
                    }
                    Suspension::Agrees => self.track_failure(user_id, self.lift(user_id)).await?,
                };
                match is_done {
                    true => drop(done.insert(user_id.clone(), *suspension)),
                    false => must_retry = true,
                }
            }
            tokio::select! {
                changed = suspended.changed() => changed.expect("`self.shared` owns the sender"),
                () = tokio::time::sleep(RETRY_PAUSE), if must_retry => {}
                () = self.shared.shutdown.cancelled() => return Ok(()),
            }
        }
    }

    /// Runs `work` for a user. On failure logs it, fails the health and returns false: the caller
    /// must retry.
    async fn track_failure(
        &self,
        user_id: &str,
        work: impl Future<Output = Result<(), BlockError>>,
    ) -> Result<bool, Halt> {
        let failures = &self.shared.failures;
        match self.shared.unless_stopped(work).await? {
            Ok(()) => failures.clear(failure::JOURNAL, user_id),
            Err(BlockError::Replica(error)) => return Err(error.into()),
            Err(error) => {
                tracing::warn!(user_id, %error, "block, cancel or unblock of the user failed; retrying");
                failures.note(failure::JOURNAL, user_id, &error.to_string(), false);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Unblocks users that the journal blocks for a difference that the store does not list, for
    /// example after a restore of the store from a backup. If the difference still exists, the
    /// comparison blocks the user again.
    async fn unblock_unrecorded(&self) -> Result<(), Halt> {
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
            self.submit_until_journalled(Command::UnblockUser(UnblockUser { user, cause }))
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
        // Also logged after a restart, when the block is journalled already.
        tracing::error!(
            user_id,
            severity = "critical",
            "user is blocked: journal and ledger differ by the holds logged for this user_id"
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

    /// Unblocks the user, then ends the suspension in the store.
    async fn lift(&self, user_id: &str) -> Result<(), BlockError> {
        let shared = &self.shared;
        if let Some(user) = self.user(user_id).await? {
            if shared.suspended.borrow().get(user_id) != Some(&Suspension::Agrees) {
                // The user has a difference again: the next round blocks the user.
                return Ok(());
            }
            let cause = BlockCause::Difference;
            let unblock = Command::UnblockUser(UnblockUser { user, cause });
            let sequence = (self.journal)(unblock).await?;
            // The suspension ends in the store only after the unblock is applied.
            self.wait_applied(sequence.unwrap_or(self.replica.assigned()))
                .await?;
            tracing::info!(user_id, "user unblocked: journal and ledger agree again");
        }
        shared.repo.mark_lifted(user_id, now_us()).await?;
        shared.publish_suspensions().await?;
        Ok(())
    }

    /// Index of a user; `None` if the journal has no `BindUser` of this id. A suspended user has a
    /// hold and so is bound, but the replica may not have applied that record: waits once.
    async fn user(&self, user_id: &str) -> Result<Option<UserIx>, BlockError> {
        let Ok(id) = UserId::new(user_id) else {
            return Ok(None);
        };
        let names = self.replica.names();
        if let Some(user) = names.user_ix(&id) {
            return Ok(Some(user));
        }
        self.wait_applied(self.replica.durable()).await?;
        Ok(names.user_ix(&id))
    }

    /// Waits until the replica has applied `sequence`.
    async fn wait_applied(&self, sequence: Sequence) -> Result<(), BlockError> {
        let applied = tokio::time::timeout(REPLICA_WAIT_MAX, self.replica.wait(sequence)).await;
        Ok(applied.map_err(|_| BlockError::ReplicaLag(sequence))??)
    }

    /// Repeats a command until it is journalled; returns its sequence as [`JournalPort`] does.
    async fn submit_until_journalled(&self, command: Command) -> Result<Option<Sequence>, Halt> {
        let submitted = until_journalled(&self.shared, command.name(), || (self.journal)(command));
        let sequence = submitted.await?;
        let is_own = matches!(command, Command::Settled(_) | Command::Bust(_));
        if is_own && sequence.is_some() {
            self.shared.tracker.own_journalled();
        }
        Ok(sequence)
    }
}
