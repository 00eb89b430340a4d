//! Audit records of what callers set in the market (D34): phases, kill switches, bounds and groups
//! of members, confirmations of the clock, and cancels of other users' orders.
//!
//! The journal has each act, its time and the hash of its idempotency key, but not the caller. This
//! store has the caller, in a chain. It cannot be rebuilt from the journal.
//!
//! 1. Before the command the act is stored, by the hash of its key.
//! 2. After the command is durable its record is sealed, in the transaction that marks the act as
//!    recorded.
//! 3. A crash or a dropped call between the two leaves the act. [`run`] asks the history for its
//!    key: the act is recorded if the journal has it, else removed.
//!
//! So each act in the journal has one record, and a repeat adds none. Known limitation: a call that
//! reduces risk waits at most [`NOTE_WAIT`] for the first step, and goes on without it. If its
//! record cannot be written either, it is kept in memory and retried: a process that crashes before
//! loses it, and the act is in the journal and in the log only. So does a caller that leaves before
//! the answer while the store fails.

mod repo;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use events::Sqlite;
use events::audit::{RecordFilter, RecordRow};
use rpc::{Caller, Context};
use service_kit::KeyedMutex;
use service_kit::audit::Act;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use types::Id128;

use crate::market::{Market, now_us};
use crate::orders::Answered;
use crate::{Error, GatewayConfig, refusal};
use repo::ActRow;

/// Name of this service in its audit records.
const SERVICE: &str = "market";
/// The store in the service's data folder.
const FILE: &str = "acts.db";
/// How long a call that reduces risk waits for this store before its command.
const NOTE_WAIT: Duration = Duration::from_millis(50);
/// Age at which [`run`] takes up an act. Its command is then in the journal, or never will be.
const PENDING_US: i64 = 60_000_000;
/// Acts per interval of [`run`].
const PAGE: i64 = 64;
/// Acts in memory whose records could not be written. Beyond it they are only logged.
const UNWRITTEN_MAX: usize = 1_024;

/// Whether an act is stored before its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Noted {
    /// By this call.
    New,
    /// By an earlier call with the key, without a record.
    Pending,
    /// It has its record.
    Recorded,
    /// No: the store failed, and the call reduces risk.
    Failed,
}

/// An act of a caller.
pub struct NewAct<'a> {
    pub caller: &'a Caller,
    pub context: &'a Context,
    /// As in the act's command.
    pub key_hash: Id128,
    pub action: &'static str,
    pub object_id: String,
    /// State before, as of the replica's position; empty: unknown.
    pub before: String,
    pub after: String,
    pub reason: String,
    /// It must not wait for a slow store.
    pub reduces_risk: bool,
}

/// What an act has set, as its audit record states it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub object_id: String,
    pub after: String,
}

impl Setting {
    /// INTERNAL: the state after the act has another form than this release writes.
    pub fn unreadable(&self) -> Status {
        refusal::internal(Error::Stored(self.after.clone()))
    }
}

impl NewAct<'_> {
    fn act(&self) -> Act<'_> {
        Act {
            before: &self.before,
            after: &self.after,
            reason: &self.reason,
            ..rpc::audit::act(self.caller, self.context, self.action, &self.object_id)
        }
    }
}

/// The store, all of whose rows have seals.
pub fn sealed_store(config: &GatewayConfig) -> events::SealedStore {
    events::SealedStore {
        name: SERVICE,
        path: file(config),
        sealing: &events::Sealing::ALL,
    }
}

fn file(config: &GatewayConfig) -> PathBuf {
    config.data_dir.join(FILE)
}

/// Checks the audit records (D34), with or without a running service.
///
/// # Errors
/// [`events::Error`]: no store of this release, or one that cannot be read.
pub async fn verify_audit(
    config: &GatewayConfig,
) -> Result<events::audit::Verified, events::Error> {
    events::audit::verify(&file(config), SERVICE).await
}

/// The store of acts.
pub struct Acts {
    pub db: Sqlite,
    /// One call per key at a time.
    keys: KeyedMutex<Id128>,
    /// Acts in the journal whose records could not be written.
    unwritten: Mutex<Vec<(Id128, ActRow)>>,
    /// Longest wait for the store.
    wait: Duration,
}

impl Acts {
    /// # Errors
    /// The store cannot be opened.
    pub async fn open(config: &GatewayConfig) -> Result<Self, Error> {
        let store = sealed_store(config);
        Ok(Self {
            db: Sqlite::open_sealed(store.path, &repo::MIGRATOR, store.sealing).await?,
            keys: KeyedMutex::default(),
            unwritten: Mutex::default(),
            wait: Duration::from_millis(config.read_wait_ms),
        })
    }

    /// Makes a call that sets something, and records it.
    ///
    /// # Errors
    /// Those of the call. UNAVAILABLE before the call if the store fails and the call does not
    /// reduce risk.
    pub async fn perform<T>(
        &self,
        act: NewAct<'_>,
        call: impl Future<Output = Result<Answered<T>, Status>>,
    ) -> Result<Answered<T>, Status> {
        let _one = self.keys.lock(act.key_hash).await;
        let noted = self.note(&act).await?;
        let answered = call.await;
        match (&answered, noted) {
            (Ok(_), Noted::Recorded) => {}
            (Ok(answered), Noted::New) if answered.replayed => self.forget(&act).await,
            // `run` records the stored act, which is that of the first call.
            (Ok(answered), _) if answered.replayed => {}
            (Ok(_), _) => self.record(&act).await,
            (Err(status), Noted::New) if is_refusal(status) => self.forget(&act).await,
            (Err(status), Noted::Failed) if !is_refusal(status) => self.note_late(&act).await,
            // Its command may be in the journal: `run` asks for it.
            (Err(_), _) => {}
        }
        answered
    }

    /// As [`Self::perform`]; also returns what the call has set. A repeat gets what the first call
    /// of its key has set, whatever the repeat asks for (D50). That is unknown of a call before
    /// this store existed, or whose act is lost with a crash, and of one that reduces risk while
    /// the store cannot be read: a repeat gets what it asks for.
    ///
    /// # Errors
    /// Those of [`Self::perform`]. UNAVAILABLE for another repeat while the store cannot be read.
    pub async fn set<T>(
        &self,
        act: NewAct<'_>,
        call: impl Future<Output = Result<Answered<T>, Status>>,
    ) -> Result<(Answered<T>, Setting), Status> {
        let (key_hash, reduces_risk) = (act.key_hash, act.reduces_risk);
        let asked = Setting {
            object_id: act.object_id.clone(),
            after: act.after.clone(),
        };
        let answered = self.perform(act, call).await?;
        let stored = match answered.replayed {
            true => match self.setting(key_hash).await {
                Err(_) if reduces_risk => None,
                found => found?,
            },
            false => None,
        };
        Ok((answered, stored.unwrap_or(asked)))
    }

    async fn setting(&self, key_hash: Id128) -> Result<Option<Setting>, Status> {
        let unwritten = {
            let unwritten = self.unwritten();
            let of_key = unwritten.iter().find(|(key, _)| *key == key_hash);
            of_key.map(|(_, row)| row.setting())
        };
        if unwritten.is_some() {
            return Ok(unwritten);
        }
        let reading = repo::setting(&self.db, key_hash);
        match tokio::time::timeout(self.wait, reading).await {
            Ok(Ok(setting)) => Ok(setting),
            Ok(Err(error)) => Err(refusal::internal(error)),
            Err(_) => Err(refusal::store_busy()),
        }
    }

    async fn note(&self, act: &NewAct<'_>) -> Result<Noted, Status> {
        let wait = match act.reduces_risk {
            true => NOTE_WAIT.min(self.wait),
            false => self.wait,
        };
        let noting = repo::note(&self.db, act.key_hash, act.act(), now_us());
        match tokio::time::timeout(wait, noting).await {
            Ok(Ok((noted, is_same))) => {
                if !is_same {
                    rpc::context::note_difference(act.action, &act.context.idempotency_key);
                }
                Ok(noted)
            }
            failed if act.reduces_risk => {
                let action = act.action;
                tracing::warn!(
                    ?failed,
                    action,
                    "store too slow: an act proceeds before it is stored"
                );
                Ok(Noted::Failed)
            }
            Ok(Err(error)) => Err(refusal::internal(error)),
            Err(_) => Err(refusal::store_busy()),
        }
    }

    /// Stores an act after its call has failed, for [`run`]: the command may be in the journal.
    async fn note_late(&self, act: &NewAct<'_>) {
        let noting = repo::note(&self.db, act.key_hash, act.act(), now_us());
        let noted = tokio::time::timeout(self.wait, noting).await;
        if !matches!(noted, Ok(Ok(_))) {
            tracing::error!(
                ?noted,
                action = act.action,
                by = act.caller.subject,
                object_id = act.object_id,
                after = act.after,
                reason = act.reason,
                "an act whose call has failed is not stored: it has no audit record if it took effect"
            );
        }
    }

    /// Records an act that is in the journal. After a failure [`run`] does.
    async fn record(&self, act: &NewAct<'_>) {
        let recording = repo::record(&self.db, act.key_hash, Some(act.act()), now_us());
        let failed = match tokio::time::timeout(self.wait, recording).await {
            Ok(Ok(())) => return,
            failed => failed,
        };
        tracing::error!(
            ?failed,
            action = act.action,
            by = act.caller.subject,
            object_id = act.object_id,
            after = act.after,
            reason = act.reason,
            "audit record of an act is not written yet"
        );
        metrics::counter!("market_audit_delayed_total").increment(1);
        let mut unwritten = self.unwritten();
        if unwritten.len() < UNWRITTEN_MAX {
            unwritten.push((act.key_hash, ActRow::of(act.act())));
        }
    }

    /// Writes the records that could not be written, in the order of their acts.
    async fn retry(&self) -> Result<(), Error> {
        loop {
            let first = self.unwritten().first().cloned();
            let Some((key_hash, row)) = first else {
                return Ok(());
            };
            let _one = self.keys.lock(key_hash).await;
            repo::record(&self.db, key_hash, Some(row.act()), now_us()).await?;
            self.unwritten().retain(|(key, _)| *key != key_hash);
        }
    }

    fn unwritten(&self) -> MutexGuard<'_, Vec<(Id128, ActRow)>> {
        let locked = self.unwritten.lock();
        locked.expect("no code panics while it holds the lock")
    }

    /// Writes the records that could not be written, and closes the store.
    pub async fn close(&self) {
        let written = tokio::time::timeout(self.wait, self.retry()).await;
        if !matches!(written, Ok(Ok(()))) {
            let records = self.unwritten().len();
            tracing::error!(
                ?written,
                records,
                "audit records of acts are in the log only"
            );
        }
        self.db.close().await;
    }

    async fn forget(&self, act: &NewAct<'_>) {
        let forgetting = repo::forget(&self.db, act.key_hash);
        let done = tokio::time::timeout(self.wait, forgetting).await;
        if !matches!(done, Ok(Ok(()))) {
            // `run` removes it.
            tracing::debug!(?done, action = act.action, "a refused act is still stored");
        }
    }

    /// Audit records with a sequence below `before`, newest first.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn records(
        &self,
        filter: RecordFilter<'_>,
        before: i64,
        limit: i64,
    ) -> Result<Vec<RecordRow>, Error> {
        repo::records(&self.db, filter, before, limit).await
    }
}

/// Whether a call has certainly not acted.
fn is_refusal(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition | Code::PermissionDenied
    )
}

/// Resolves the acts that a crash or a dropped call has left, until shutdown.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(market.config.sweep_interval_ms.max(10));
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = shutdown.cancelled() => return,
        }
        if let Err(status) = resolve(&market).await {
            let reason = status.message();
            tracing::warn!(reason, "acts without a record cannot be resolved; retrying");
        }
    }
}

/// Records or removes the oldest acts without a record.
async fn resolve(market: &Market) -> Result<(), Status> {
    let acts = &market.acts;
    market.access_store(acts.retry()).await?;
    let before_us = now_us() - PENDING_US;
    let pending = repo::pending(&acts.db, before_us, PAGE);
    let pending = market.access_store(pending).await?;
    if pending.is_empty() {
        return Ok(());
    }
    market.await_fresh_history().await?;
    for key_hash in pending {
        let _one = acts.keys.lock(key_hash).await;
        let answer = market.answered(key_hash).await?;
        if answer.is_some_and(|answer| answer.refusal.is_none()) {
            let recording = repo::record(&acts.db, key_hash, None, now_us());
            market.access_store(recording).await?;
            tracing::warn!(%key_hash, "audit record of an interrupted call written");
        } else {
            let forgetting = repo::forget(&acts.db, key_hash);
            market.access_store(forgetting).await?;
        }
    }
    Ok(())
}
