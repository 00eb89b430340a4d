//! Audit records of a service on PostgreSQL (D34), as [`crate::audit`] on SQLite.
//!
//! Writers are concurrent: each holds a lock of the table from the read of the last record until
//! its commit. Append the record last, so that the lock is held shortly and is the last one taken.

use service_kit::audit::Act;
use sqlx::{Connection, PgConnection, PgExecutor, QueryBuilder};

use super::outbox;
use crate::{
    Error,
    audit::{
        Encode, INSERT_RECORD, LAST_RECORD, NEXT_RECORDS, PAGE, RecordFilter, RecordRow, Sealed,
        Verified, Walk, end_of_chain, hash_if,
    },
};

/// Serialises the appends of a chain until the end of the transaction.
const LOCK: &str = "SELECT pg_advisory_xact_lock('audit_records'::regclass::oid::bigint << 8)";

/// As [`crate::audit::append_in_tx`].
///
/// # Errors
/// [`Error::Store`].
pub async fn append_in_tx(
    tx: &mut PgConnection,
    service: &'static str,
    at_us: i64,
    act: Act<'_>,
    encode: Encode,
) -> Result<(), Error> {
    sqlx::query(LOCK).execute(&mut *tx).await?;
    let last: Option<(i64, Vec<u8>)> = sqlx::query_as(LAST_RECORD).fetch_optional(&mut *tx).await?;
    let sealed = Sealed::after(end_of_chain(last)?, service, at_us, act);
    sqlx::query(INSERT_RECORD)
        .bind(sealed.record.sequence)
        .bind(at_us)
        .bind(act.actor)
        .bind(act.action)
        .bind(act.object_id)
        .bind(act.before)
        .bind(act.after)
        .bind(act.reason)
        .bind(act.request_id)
        .bind(act.correlation_id)
        .bind(&sealed.previous[..])
        .bind(&sealed.hash[..])
        .execute(&mut *tx)
        .await?;
    outbox::append_in_tx(tx, &[sealed.event(service, encode)]).await
}

/// As [`crate::audit::list`].
///
/// # Errors
/// [`Error::Store`].
pub async fn list(
    db: impl PgExecutor<'_>,
    filter: RecordFilter<'_>,
    before: i64,
    limit: i64,
) -> Result<Vec<RecordRow>, Error> {
    let mut query =
        QueryBuilder::<sqlx::Postgres>::new("SELECT * FROM audit_records WHERE sequence < ");
    query.push_bind(before);
    for (column, value) in [("object_id", filter.object_id), ("actor", filter.actor)] {
        if !value.is_empty() {
            query.push(format!(" AND {column} = ")).push_bind(value);
        }
    }
    query
        .push(" ORDER BY sequence DESC LIMIT ")
        .push_bind(limit);
    Ok(query.build_query_as().fetch_all(db).await?)
}

/// Opens a service's database, which a running service may write at the time.
async fn open(url: &str, service: &str) -> Result<PgConnection, Error> {
    let mut db = PgConnection::connect(url).await?;
    let is_older = "SELECT to_regclass('audit_records') IS NULL";
    if sqlx::query_scalar(is_older).fetch_one(&mut db).await? {
        let text = format!("start this release once on the store of {service}");
        return Err(Error::Files(std::io::Error::other(text)));
    }
    Ok(db)
}

/// As [`crate::audit::record_hash`].
///
/// # Errors
/// As [`verify`].
pub async fn record_hash(url: &str, service: &str, sequence: i64) -> Result<Option<String>, Error> {
    let mut db = open(url, service).await?;
    let next = sqlx::query_as(NEXT_RECORDS).bind(sequence.saturating_sub(1));
    let row: Option<RecordRow> = next.bind(1_i64).fetch_optional(&mut db).await?;
    Ok(hash_if(row, sequence))
}

/// Checks the audit records of a service's database, in one snapshot and page by page.
///
/// # Errors
/// [`Error::Files`]: this release has not opened the database yet; [`Error::Store`].
pub async fn verify(url: &str, service: &str) -> Result<Verified, Error> {
    let mut db = open(url, service).await?;
    let mut tx = db.begin().await?;
    sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        .execute(&mut *tx)
        .await?;
    let mut walk = Walk::new(service);
    while walk.goes_on() {
        let page = sqlx::query_as(NEXT_RECORDS).bind(walk.last.0).bind(PAGE);
        let page: Vec<RecordRow> = page.fetch_all(&mut *tx).await?;
        walk.add(&page)?;
    }
    Ok(walk.verified)
}
