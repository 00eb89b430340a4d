//! The store: all SQL of this crate, in the dialects of SQLite and PostgreSQL. A change and its
//! audit record share one transaction. On PostgreSQL a transaction locks the row that it decides
//! on, and the person whose keys or open requests it reads.

use std::sync::{Arc, LazyLock};

use events::audit::{self, RecordFilter, RecordRow, Verified};
use futures::future::BoxFuture;
use service_kit::audit::Act;
use sqlx::{
    PgConnection, PgPool, Row, SqliteConnection, SqlitePool, migrate::Migrator, postgres::PgRow,
    sqlite::SqliteRow,
};
use tokio_util::sync::CancellationToken;

use crate::{
    Error, SOURCE,
    config::ApprovalsConfig,
    model::{Approval, Status, hash},
};

/// Schema, applied after that of the outbox and inbox.
static SQLITE: LazyLock<Migrator> =
    events::migrations!("migrations/sqlite": "0001_approvals", "0002_audit_records");
static POSTGRES: LazyLock<Migrator> =
    events::migrations!("migrations/postgres": "0001_approvals", "0002_audit_records");

/// Columns of a list: without the request, which may have 64 KiB.
macro_rules! listed {
    () => {
        "approval_id, method, hash, reason, document, requester, request_key, request_digest, \
         status, decider, decision_key, decision_digest, decision_reason, attempts, \
         next_attempt_at_us, execute_by_us, result_code, result_text, correlation_id, \
         created_at_us, expires_at_us, decided_at_us, ended_at_us"
    };
}

/// Position of a page: rows strictly before it in (created, id) order.
#[derive(Clone, Copy, Debug)]
pub struct PageBound<'a> {
    pub created_at_us: i64,
    pub id: &'a str,
    pub limit: i64,
}

/// The statements in one dialect. `lock`: locks a person until the end of the transaction;
/// `for_update`: locks the row that is read; the others name an index where the dialect can.
macro_rules! dialect {
    (
        $dialect:ident, $pool:ty, $connection:ty, $row:ty, lock: $lock:expr,
        for_update: $for_update:literal, by_status: $by_status:literal, open: $open:literal,
        expiring: $expiring:literal, due: $due:literal
    ) => {
        mod $dialect {
            use super::*;

            fn decode(what: String) -> sqlx::Error {
                sqlx::Error::Decode(what.into())
            }

            /// A row without its request.
            fn read_listed(row: &$row) -> sqlx::Result<Approval> {
                let status: String = row.try_get("status")?;
                let number = |column: &'static str| row.try_get::<i64, _>(column);
                let small = |column: &'static str| {
                    let value = number(column)?;
                    i32::try_from(value).map_err(|_| decode(format!("{column} = {value}")))
                };
                let approval = Approval {
                    approval_id: row.try_get("approval_id")?,
                    method: row.try_get("method")?,
                    request: Vec::new(),
                    hash: row.try_get("hash")?,
                    reason: row.try_get("reason")?,
                    document: row.try_get("document")?,
                    requester: row.try_get("requester")?,
                    request_key: row.try_get("request_key")?,
                    request_digest: number("request_digest")?,
                    status: status.parse().map_err(|_| decode(status))?,
                    decider: row.try_get("decider")?,
                    decision_key: row.try_get("decision_key")?,
                    decision_digest: number("decision_digest")?,
                    decision_reason: row.try_get("decision_reason")?,
                    attempts: small("attempts")?.unsigned_abs(),
                    next_attempt_at_us: number("next_attempt_at_us")?,
                    execute_by_us: number("execute_by_us")?,
                    result_code: small("result_code")?,
                    result_text: row.try_get("result_text")?,
                    correlation_id: row.try_get("correlation_id")?,
                    created_at_us: number("created_at_us")?,
                    expires_at_us: number("expires_at_us")?,
                    decided_at_us: number("decided_at_us")?,
                    ended_at_us: number("ended_at_us")?,
                };
                match approval.contradiction() {
                    None => Ok(approval),
                    Some(what) => Err(decode(format!("{what}: {}", approval.approval_id))),
                }
            }

            /// A whole row. Its request must have the hash that was approved.
            fn read(row: &$row) -> sqlx::Result<Approval> {
                let approval = Approval {
                    request: row.try_get("request")?,
                    ..read_listed(row)?
                };
                if hash(&approval.method, &approval.request) != approval.hash {
                    let id = approval.approval_id;
                    return Err(decode(format!("request of {id} differs from its hash")));
                }
                Ok(approval)
            }

            pub async fn lock_person(tx: &mut $connection, person: &str) -> sqlx::Result<()> {
                const LOCK: Option<&str> = $lock;
                if let Some(lock) = LOCK {
                    sqlx::query(lock).bind(person).execute(tx).await?;
                }
                Ok(())
            }

            pub async fn get(pool: &$pool, id: &str) -> sqlx::Result<Option<Approval>> {
                sqlx::query("SELECT * FROM approvals WHERE approval_id = $1")
                    .bind(id)
                    .fetch_optional(pool)
                    .await?
                    .as_ref()
                    .map(read)
                    .transpose()
            }

            pub async fn lock(tx: &mut $connection, id: &str) -> sqlx::Result<Option<Approval>> {
                sqlx::query(concat!(
                    "SELECT * FROM approvals WHERE approval_id = $1",
                    $for_update
                ))
                .bind(id)
                .fetch_optional(tx)
                .await?
                .as_ref()
                .map(read)
                .transpose()
            }

            pub async fn requested(
                tx: &mut $connection,
                requester: &str,
                key: &str,
            ) -> sqlx::Result<Option<Approval>> {
                sqlx::query("SELECT * FROM approvals WHERE requester = $1 AND request_key = $2")
                    .bind(requester)
                    .bind(key)
                    .fetch_optional(tx)
                    .await?
                    .as_ref()
                    .map(read)
                    .transpose()
            }

            pub async fn decided(
                tx: &mut $connection,
                decider: &str,
                key: &str,
            ) -> sqlx::Result<Option<Approval>> {
                sqlx::query(
                    "SELECT * FROM approvals WHERE decider = $1 AND decision_key = $2 \
                     AND decider <> ''",
                )
                .bind(decider)
                .bind(key)
                .fetch_optional(tx)
                .await?
                .as_ref()
                .map(read)
                .transpose()
            }

            pub async fn open(tx: &mut $connection, requester: &str) -> sqlx::Result<i64> {
                sqlx::query_scalar(concat!(
                    "SELECT COUNT(*) FROM approvals",
                    $open,
                    " WHERE requester = $1 AND status = 'PENDING'"
                ))
                .bind(requester)
                .fetch_one(tx)
                .await
            }

            pub async fn insert(tx: &mut $connection, approval: &Approval) -> sqlx::Result<()> {
                sqlx::query(concat!(
                    "INSERT INTO approvals (request, ",
                    listed!(),
                    ") VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, \
                     $16, $17, $18, $19, $20, $21, $22, $23, $24)"
                ))
                .bind(&approval.request)
                .bind(&approval.approval_id)
                .bind(&approval.method)
                .bind(&approval.hash)
                .bind(&approval.reason)
                .bind(&approval.document)
                .bind(&approval.requester)
                .bind(&approval.request_key)
                .bind(approval.request_digest)
                .bind(approval.status.as_str())
                .bind(&approval.decider)
                .bind(&approval.decision_key)
                .bind(approval.decision_digest)
                .bind(&approval.decision_reason)
                .bind(i64::from(approval.attempts))
                .bind(approval.next_attempt_at_us)
                .bind(approval.execute_by_us)
                .bind(i64::from(approval.result_code))
                .bind(&approval.result_text)
                .bind(&approval.correlation_id)
                .bind(approval.created_at_us)
                .bind(approval.expires_at_us)
                .bind(approval.decided_at_us)
                .bind(approval.ended_at_us)
                .execute(tx)
                .await?;
                Ok(())
            }

            /// Updates the columns that change during the life of an approval.
            pub async fn update(tx: &mut $connection, approval: &Approval) -> sqlx::Result<()> {
                sqlx::query(
                    "UPDATE approvals SET status = $2, decider = $3, decision_key = $4, \
                     decision_digest = $5, decision_reason = $6, attempts = $7, \
                     next_attempt_at_us = $8, execute_by_us = $9, result_code = $10, \
                     result_text = $11, decided_at_us = $12, ended_at_us = $13 \
                     WHERE approval_id = $1",
                )
                .bind(&approval.approval_id)
                .bind(approval.status.as_str())
                .bind(&approval.decider)
                .bind(&approval.decision_key)
                .bind(approval.decision_digest)
                .bind(&approval.decision_reason)
                .bind(i64::from(approval.attempts))
                .bind(approval.next_attempt_at_us)
                .bind(approval.execute_by_us)
                .bind(i64::from(approval.result_code))
                .bind(&approval.result_text)
                .bind(approval.decided_at_us)
                .bind(approval.ended_at_us)
                .execute(tx)
                .await?;
                Ok(())
            }

            pub async fn list(
                pool: &$pool,
                status: Option<Status>,
                bound: PageBound<'_>,
            ) -> sqlx::Result<Vec<Approval>> {
                let rows = match status {
                    None => {
                        sqlx::query(concat!(
                            "SELECT ",
                            listed!(),
                            " FROM approvals WHERE (created_at_us, approval_id) < ($1, $2) \
                             ORDER BY created_at_us DESC, approval_id DESC LIMIT $3"
                        ))
                        .bind(bound.created_at_us)
                        .bind(bound.id)
                        .bind(bound.limit)
                        .fetch_all(pool)
                        .await?
                    }
                    Some(status) => {
                        sqlx::query(concat!(
                            "SELECT ",
                            listed!(),
                            " FROM approvals",
                            $by_status,
                            " WHERE status = $4 AND (created_at_us, approval_id) < ($1, $2) \
                             ORDER BY created_at_us DESC, approval_id DESC LIMIT $3"
                        ))
                        .bind(bound.created_at_us)
                        .bind(bound.id)
                        .bind(bound.limit)
                        .bind(status.as_str())
                        .fetch_all(pool)
                        .await?
                    }
                };
                rows.iter().map(read_listed).collect()
            }

            pub async fn expiring(
                pool: &$pool,
                now_us: i64,
                limit: i64,
            ) -> sqlx::Result<Vec<String>> {
                sqlx::query_scalar(concat!(
                    "SELECT approval_id FROM approvals",
                    $expiring,
                    " WHERE status = 'PENDING' AND expires_at_us <= $1 \
                     ORDER BY expires_at_us LIMIT $2"
                ))
                .bind(now_us)
                .bind(limit)
                .fetch_all(pool)
                .await
            }

            pub async fn due(pool: &$pool, now_us: i64, limit: i64) -> sqlx::Result<Vec<String>> {
                sqlx::query_scalar(concat!(
                    "SELECT approval_id FROM approvals",
                    $due,
                    " WHERE status = 'APPROVED' AND next_attempt_at_us <= $1 \
                     ORDER BY next_attempt_at_us LIMIT $2"
                ))
                .bind(now_us)
                .bind(limit)
                .fetch_all(pool)
                .await
            }

            /// Time of the next expiry or attempt.
            pub async fn next_us(pool: &$pool) -> sqlx::Result<Option<i64>> {
                let expiry: Option<i64> = sqlx::query_scalar(concat!(
                    "SELECT MIN(expires_at_us) FROM approvals",
                    $expiring,
                    " WHERE status = 'PENDING'"
                ))
                .fetch_one(pool)
                .await?;
                let attempt: Option<i64> = sqlx::query_scalar(concat!(
                    "SELECT MIN(next_attempt_at_us) FROM approvals",
                    $due,
                    " WHERE status = 'APPROVED'"
                ))
                .fetch_one(pool)
                .await?;
                Ok(expiry.into_iter().chain(attempt).min())
            }
        }
    };
}

dialect!(
    sqlite, SqlitePool, SqliteConnection, SqliteRow, lock: None, for_update: "",
    by_status: " INDEXED BY approvals_by_status", open: " INDEXED BY approvals_open",
    expiring: " INDEXED BY approvals_expiring", due: " INDEXED BY approvals_due"
);
dialect!(
    postgres, PgPool, PgConnection, PgRow,
    lock: Some("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"), for_update: " FOR UPDATE",
    by_status: "", open: "", expiring: "", due: ""
);

/// The database; clones share the connections.
#[derive(Clone)]
pub enum Store {
    Sqlite(events::Sqlite),
    Postgres(events::Postgres),
}

/// A write transaction. Dropped without commit it is rolled back.
pub enum Tx {
    Sqlite(events::Tx),
    Postgres(events::postgres::Tx),
}

/// Calls a read in the store's dialect.
macro_rules! read {
    ($store:expr, $statement:ident($($value:expr),*)) => {
        match $store {
            Store::Sqlite(db) => sqlite::$statement(db.read(), $($value),*).await,
            Store::Postgres(db) => postgres::$statement(db.read(), $($value),*).await,
        }
    };
}

/// Calls a statement of a transaction in its dialect.
macro_rules! within {
    ($tx:expr, $statement:ident($($value:expr),*)) => {
        match $tx {
            Tx::Sqlite(tx) => sqlite::$statement(tx, $($value),*).await,
            Tx::Postgres(tx) => postgres::$statement(tx, $($value),*).await,
        }
    };
}

impl Store {
    /// # Errors
    /// [`Error`].
    pub async fn open(config: &ApprovalsConfig) -> Result<Self, Error> {
        if config.url.is_empty() {
            let store = crate::sealed_store(config);
            let opened = events::Sqlite::open_sealed(store.path, &SQLITE, store.sealing);
            return Ok(Self::Sqlite(opened.await?));
        }
        let url = config.url.postgres();
        let url = url.ok_or_else(|| Error::Url(config.url.clone()))?;
        Ok(Self::Postgres(
            events::Postgres::open(url, &POSTGRES).await?,
        ))
    }

    pub async fn write(&self) -> Result<Tx, events::Error> {
        match self {
            Self::Sqlite(db) => db.write().await.map(Tx::Sqlite),
            Self::Postgres(db) => db.write().await.map(Tx::Postgres),
        }
    }

    pub async fn get(&self, id: &str) -> sqlx::Result<Option<Approval>> {
        read!(self, get(id))
    }

    /// Approvals without their requests, newest first.
    pub async fn list(
        &self,
        status: Option<Status>,
        bound: PageBound<'_>,
    ) -> sqlx::Result<Vec<Approval>> {
        read!(self, list(status, bound))
    }

    /// Audit records with a sequence below `before`, newest first.
    pub async fn audit_records(
        &self,
        filter: RecordFilter<'_>,
        before: i64,
        limit: i64,
    ) -> Result<Vec<RecordRow>, events::Error> {
        match self {
            Store::Sqlite(db) => audit::list(db.read(), filter, before, limit).await,
            Store::Postgres(db) => {
                events::postgres::audit::list(db.read(), filter, before, limit).await
            }
        }
    }

    /// Ids of undecided requests whose time is over.
    pub async fn expiring(&self, now_us: i64, limit: i64) -> sqlx::Result<Vec<String>> {
        read!(self, expiring(now_us, limit))
    }

    /// Ids of approved calls whose next attempt is due.
    pub async fn due(&self, now_us: i64, limit: i64) -> sqlx::Result<Vec<String>> {
        read!(self, due(now_us, limit))
    }

    /// Time of the next expiry or attempt, in microseconds.
    pub async fn next_us(&self) -> sqlx::Result<Option<i64>> {
        read!(self, next_us())
    }

    /// Publishes the outbox until `shutdown`.
    pub fn relay(
        self,
        log: Arc<dyn events::Log>,
        shutdown: CancellationToken,
    ) -> BoxFuture<'static, ()> {
        match self {
            Self::Sqlite(db) => Box::pin(events::outbox::Relay::run(db, log, shutdown)),
            Self::Postgres(db) => Box::pin(events::outbox::Relay::run(db, log, shutdown)),
        }
    }

    pub async fn close(&self) {
        match self {
            Self::Sqlite(db) => db.close().await,
            Self::Postgres(db) => db.close().await,
        }
    }
}

impl Tx {
    /// Locks a person: its keys and the number of its open requests do not change until the end of
    /// the transaction.
    pub async fn lock_person(&mut self, person: &str) -> sqlx::Result<()> {
        within!(self, lock_person(person))
    }

    /// An approval, locked until the end of the transaction.
    pub async fn lock(&mut self, id: &str) -> sqlx::Result<Option<Approval>> {
        within!(self, lock(id))
    }

    /// The request of a person with this idempotency key.
    pub async fn requested(
        &mut self,
        requester: &str,
        key: &str,
    ) -> sqlx::Result<Option<Approval>> {
        within!(self, requested(requester, key))
    }

    /// The approval that a person decided with this call and idempotency key.
    pub async fn decided(&mut self, decider: &str, key: &str) -> sqlx::Result<Option<Approval>> {
        within!(self, decided(decider, key))
    }

    /// Number of undecided requests of a person.
    pub async fn open(&mut self, requester: &str) -> sqlx::Result<i64> {
        within!(self, open(requester))
    }

    /// # Panics
    /// The approval violates an invariant.
    pub async fn insert(&mut self, approval: &Approval) -> sqlx::Result<()> {
        check(approval);
        within!(self, insert(approval))
    }

    /// # Panics
    /// The approval violates an invariant.
    pub async fn update(&mut self, approval: &Approval) -> sqlx::Result<()> {
        check(approval);
        within!(self, update(approval))
    }

    /// Seals and publishes an act. On PostgreSQL all later records wait for the commit.
    pub async fn record(&mut self, at_us: i64, act: Act<'_>) -> Result<(), events::Error> {
        let encode = rpc::audit::event;
        match self {
            Tx::Sqlite(tx) => audit::append_in_tx(tx, SOURCE, at_us, act, encode).await,
            Tx::Postgres(tx) => {
                events::postgres::audit::append_in_tx(tx, SOURCE, at_us, act, encode).await
            }
        }
    }

    pub async fn commit(self) -> Result<(), events::Error> {
        match self {
            Tx::Sqlite(tx) => tx.commit().await,
            Tx::Postgres(tx) => tx.commit().await,
        }
    }
}

/// Checks the audit records of a store, which a running service may write at the time.
pub async fn verify_audit(config: &ApprovalsConfig) -> Result<Verified, Error> {
    if config.url.is_empty() {
        let path = crate::sealed_store(config).path;
        return Ok(audit::verify(&path, SOURCE).await?);
    }
    let url = config.url.postgres();
    let url = url.ok_or_else(|| Error::Url(config.url.clone()))?;
    Ok(events::postgres::audit::verify(url, SOURCE).await?)
}

fn check(approval: &Approval) {
    let contradiction = approval.contradiction();
    assert!(contradiction.is_none(), "{contradiction:?}: {approval:?}");
}
