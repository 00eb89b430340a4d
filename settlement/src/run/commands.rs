//! What settlement journals itself: how far it is, bust trades, and blocks of users whose money
//! differs between journal and ledger (`design.md` 4).
//!
//! Invariants: a trade's `Bust` is journalled before a `Settled` passes it; no `Settled` follows
//! from settlement's own records alone, so a market at rest has a journal at rest; a command is
//! repeated until it is journalled, and the health shows it meanwhile.
//!
//! Cost: at most ten `Settled` a second, whatever the number of batches.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use replica::{Replica, ReplicaError, State};
use sequencer::{NotTaken, Port};
use types::command::{BlockCause, BlockUser, Bust, MassCancel, Settled, UnblockUser};
use types::{Command, Sequence, UserId, UserIx};

use super::retry::{Stopped, until_journalled, until_kept};
use super::{Shared, now_us};
use crate::progress::{Progress, Suspension};

/// Time between two `Settled`.
const INTERVAL: Duration = Duration::from_millis(100);

/// The way into the journal: the sequence that a command of settlement's was given, `None` for one
/// whose effect is journalled already.
pub type JournalPort =
    Arc<dyn Fn(Command) -> BoxFuture<'static, Result<Option<Sequence>, NotTaken>> + Send + Sync>;

/// The way into the journal of a running node.
pub fn journal_port(port: Port) -> JournalPort {
    Arc::new(move |command| {
        let port = port.clone();
        Box::pin(async move { port.settlement(command).await })
    })
}

/// Why nothing is journalled any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Halt {
    #[error("shutting down")]
    Stopped,
    #[error(transparent)]
    Replica(#[from] ReplicaError),
}

impl From<Stopped> for Halt {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

/// What the workers below share.
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
            tokio::select! {
                changed = wanted => drop(changed.expect("the tracker outlives its workers")),
                () = self.shared.shutdown.cancelled() => return Ok(()),
            }
            // Taken together: busts are known before the position passes them.
            let (now, trades_final, bust_now) = self.shared.tracker.report();
            busts = now.busts;
            for trade in bust_now {
                // Those of before the start are journalled already, but for the last ones.
                let is_known = |state: &State| state.core().admission().is_bust(trade);
                if !self.replica.read(is_known) {
                    self.ask(Command::Bust(Bust { trade })).await?;
                }
            }
            if now.reportable() == reported {
                continue;
            }
            reported = now.reportable();
            let known = self.replica.settlement();
            if now.settled <= known.posted && now.finalized <= known.finalized {
                continue;
            }
            let settled = Settled {
                posted: now.settled,
                finalized: now.finalized,
                trades_final,
            };
            self.ask(Command::Settled(settled)).await?;
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                () = self.shared.shutdown.cancelled() => return Ok(()),
            }
        }
    }

    /// Blocks users with a difference, and lifts the block once it has gone, until shutdown. Another
    /// cause keeps a user blocked. Doing a thing twice changes nothing, so a restart does it again.
    ///
    /// # Errors
    /// [`Halt`].
    pub async fn follow_suspensions(self) -> Result<(), Halt> {
        let mut suspended = self.shared.suspended.subscribe();
        let mut done = BTreeMap::new();
        loop {
            let wanted = suspended.borrow_and_update().clone();
            done.retain(|user_id, _| wanted.contains_key(user_id));
            for (user_id, suspension) in wanted {
                if done.get(&user_id) == Some(&suspension) {
                    continue;
                }
                match suspension {
                    Suspension::Differs => self.block(&user_id).await?,
                    Suspension::Agrees => self.lift(&user_id).await?,
                }
                done.insert(user_id, suspension);
            }
            tokio::select! {
                changed = suspended.changed() => changed.expect("the sender is shared with this"),
                () = self.shared.shutdown.cancelled() => return Ok(()),
            }
        }
    }

    /// No more orders of the user; then the open ones are cancelled.
    async fn block(&self, user_id: &str) -> Result<(), Halt> {
        let Some(user) = self.user(user_id).await? else {
            return Ok(());
        };
        let cause = BlockCause::Difference;
        self.ask(Command::BlockUser(BlockUser { user, cause }))
            .await?;
        let cancel = MassCancel::of_blocked(user);
        self.ask(Command::MassCancel(cancel)).await?;
        tracing::error!(
            user_id,
            severity = "critical",
            "user blocked, orders cancelled: journal and ledger differ"
        );
        Ok(())
    }

    async fn lift(&self, user_id: &str) -> Result<(), Halt> {
        if let Some(user) = self.user(user_id).await? {
            let cause = BlockCause::Difference;
            let unblock = Command::UnblockUser(UnblockUser { user, cause });
            let sequence = self.ask(unblock).await?;
            // Durable before the store forgets it.
            self.reached(sequence.unwrap_or(self.replica.assigned()))
                .await?;
            tracing::info!(user_id, "user unblocked: journal and ledger agree again");
        }
        let shared = &self.shared;
        until_kept(shared, user_id, || async {
            shared.repo.lifted(user_id, now_us()).await?;
            shared.publish_suspensions().await
        })
        .await?;
        Ok(())
    }

    /// The index of a user, who has a hold and so is bound.
    async fn user(&self, user_id: &str) -> Result<Option<UserIx>, Halt> {
        self.reached(self.replica.durable()).await?;
        let Ok(id) = UserId::new(user_id) else {
            return Ok(None);
        };
        let user = |state: &State| state.core().admission().user_ix(&id);
        Ok(self.replica.read(user))
    }

    async fn reached(&self, sequence: Sequence) -> Result<(), Halt> {
        tokio::select! {
            reached = self.replica.wait(sequence) => Ok(reached?),
            () = self.shared.shutdown.cancelled() => Err(Halt::Stopped),
        }
    }

    /// Repeats a command until it is journalled.
    async fn ask(&self, command: Command) -> Result<Option<Sequence>, Stopped> {
        let sequence =
            until_journalled(&self.shared, command.name(), || (self.journal)(command)).await?;
        let is_own = matches!(command, Command::Settled(_) | Command::Bust(_));
        if is_own && sequence.is_some() {
            self.shared.tracker.own_journalled();
        }
        Ok(sequence)
    }
}
