//! The store of audit records: all SQL of this folder.

use std::sync::LazyLock;

use events::Sqlite;
use events::audit::{self, RecordFilter, RecordRow};
use service_kit::audit::Act;
use sqlx::SqliteConnection;
use types::Id128;

use super::{Noted, SERVICE, Setting};
use crate::Error;

/// The schema. Applied after the schema of outbox and inbox.
pub static MIGRATOR: LazyLock<sqlx::migrate::Migrator> =
    events::migrations!("migrations/acts": "0001_acts");

const INSERT: &str = "INSERT INTO acts (key_hash, at_us, actor, action, object_id, before, after, reason, \
     request_id, correlation_id) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) \
     ON CONFLICT (key_hash) DO NOTHING";

events::row! {
    /// A stored act.
    #[derive(Clone)]
    pub struct ActRow {
        actor: String,
        action: String,
        object_id: String,
        before: String,
        after: String,
        reason: String,
        request_id: String,
        correlation_id: String,
    }
}

impl ActRow {
    pub fn of(act: Act<'_>) -> Self {
        Self {
            actor: act.actor.to_owned(),
            action: act.action.to_owned(),
            object_id: act.object_id.to_owned(),
            before: act.before.to_owned(),
            after: act.after.to_owned(),
            reason: act.reason.to_owned(),
            request_id: act.request_id.to_owned(),
            correlation_id: act.correlation_id.to_owned(),
        }
    }

    pub fn setting(&self) -> Setting {
        Setting {
            object_id: self.object_id.clone(),
            after: self.after.clone(),
        }
    }

    pub fn act(&self) -> Act<'_> {
        Act {
            action: &self.action,
            actor: &self.actor,
            object_id: &self.object_id,
            before: &self.before,
            after: &self.after,
            reason: &self.reason,
            request_id: &self.request_id,
            correlation_id: &self.correlation_id,
        }
    }
}

const SELECT: &str = "SELECT recorded, object_id, after FROM acts WHERE key_hash = $1";

/// Stores an act unless its key is stored. True: it is new.
async fn insert_in_tx(
    tx: &mut SqliteConnection,
    key_hash: Id128,
    act: Act<'_>,
    now_us: i64,
) -> Result<bool, Error> {
    let done = sqlx::query(INSERT)
        .bind(key_hash.to_string())
        .bind(now_us)
        .bind(act.actor)
        .bind(act.action)
        .bind(act.object_id)
        .bind(act.before)
        .bind(act.after)
        .bind(act.reason)
        .bind(act.request_id)
        .bind(act.correlation_id)
        .execute(tx)
        .await?;
    Ok(done.rows_affected() == 1)
}

/// Stores an act before its command. Also returns whether the stored act of the key sets the same.
pub async fn note(
    db: &Sqlite,
    key_hash: Id128,
    act: Act<'_>,
    now_us: i64,
) -> Result<(Noted, bool), Error> {
    let mut tx = db.write().await?;
    if insert_in_tx(&mut tx, key_hash, act, now_us).await? {
        tx.commit().await?;
        return Ok((Noted::New, true));
    }
    let (recorded, object_id, after): (i64, String, String) = sqlx::query_as(SELECT)
        .bind(key_hash.to_string())
        .fetch_one(&mut *tx)
        .await?;
    let noted = match recorded {
        0 => Noted::Pending,
        _ => Noted::Recorded,
    };
    Ok((noted, (&*object_id, &*after) == (act.object_id, act.after)))
}

/// What the stored act of a key has set.
pub async fn setting(db: &Sqlite, key_hash: Id128) -> Result<Option<Setting>, Error> {
    let row: Option<(i64, String, String)> = sqlx::query_as(SELECT)
        .bind(key_hash.to_string())
        .fetch_optional(db.read())
        .await?;
    Ok(row.map(|(_, object_id, after)| Setting { object_id, after }))
}

/// Records the act of a key, once, in the service's chain. `act` replaces a stored act without a
/// record, whose call has not acted. `None`: records the stored act.
pub async fn record(
    db: &Sqlite,
    key_hash: Id128,
    act: Option<Act<'_>>,
    now_us: i64,
) -> Result<(), Error> {
    let mut tx = db.write().await?;
    if let Some(act) = act {
        forget_in_tx(&mut tx, key_hash).await?;
        insert_in_tx(&mut tx, key_hash, act, now_us).await?;
    }
    let row: Option<ActRow> = sqlx::query_as(
        "UPDATE acts SET recorded = 1 WHERE key_hash = $1 AND recorded = 0 \
         RETURNING actor, action, object_id, before, after, reason, request_id, correlation_id",
    )
    .bind(key_hash.to_string())
    .fetch_optional(&mut *tx)
    .await?;
    if let Some(row) = &row {
        let encode = rpc::audit::event;
        audit::append_in_tx(&mut tx, SERVICE, now_us, row.act(), encode).await?;
    }
    Ok(tx.commit().await?)
}

/// Removes an act whose command is not in the journal.
pub async fn forget(db: &Sqlite, key_hash: Id128) -> Result<(), Error> {
    let mut tx = db.write().await?;
    forget_in_tx(&mut tx, key_hash).await?;
    Ok(tx.commit().await?)
}

async fn forget_in_tx(tx: &mut SqliteConnection, key_hash: Id128) -> Result<(), Error> {
    sqlx::query("DELETE FROM acts WHERE key_hash = $1 AND recorded = 0")
        .bind(key_hash.to_string())
        .execute(tx)
        .await?;
    Ok(())
}

/// Keys of acts that were stored before a time and are not recorded, oldest first.
pub async fn pending(db: &Sqlite, before_us: i64, limit: i64) -> Result<Vec<Id128>, Error> {
    let keys: Vec<String> = sqlx::query_scalar(
        "SELECT key_hash FROM acts INDEXED BY acts_pending WHERE recorded = 0 AND at_us < $1 \
         ORDER BY at_us LIMIT $2",
    )
    .bind(before_us)
    .bind(limit)
    .fetch_all(db.read())
    .await?;
    let parse = |text: String| Id128::parse(&text).ok_or(Error::Stored(text));
    keys.into_iter().map(parse).collect()
}

/// Audit records with a sequence below `before`, newest first.
pub async fn records(
    db: &Sqlite,
    filter: RecordFilter<'_>,
    before: i64,
    limit: i64,
) -> Result<Vec<RecordRow>, Error> {
    Ok(audit::list(db.read(), filter, before, limit).await?)
}
