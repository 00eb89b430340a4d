//! Audit records of a service on SQLite (D34): stored in the transaction of the act, each sealed
//! with the one before it ([`service_kit::audit`]), and published. [`crate::postgres::audit`] does
//! the same on PostgreSQL.
//!
//! The service's migrations create the table `audit_records`, append-only by its triggers.

use std::path::Path;

use service_kit::audit::{Act, AuditRecord, BEGINNING, Broken, Hash};
use sqlx::{
    Connection, QueryBuilder, Sqlite, SqliteConnection, SqliteExecutor,
    sqlite::SqliteConnectOptions,
};
use uuid::Uuid;

use crate::{Error, Event, outbox, topics};

/// The last audit record: (sequence, hash).
pub const LAST_RECORD: &str = "SELECT sequence, hash FROM audit_records \
     WHERE sequence = (SELECT MAX(sequence) FROM audit_records)";

/// Adds an audit record: sequence, time, actor, action, object, state before and after, reason,
/// request id, correlation id, the previous hash and its own.
pub const INSERT_RECORD: &str = "INSERT INTO audit_records (sequence, at_us, actor, action, object_id, before, after, \
     reason, request_id, correlation_id, previous_hash, hash) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)";

/// Records per read of [`verify`].
pub(crate) const PAGE: i64 = 1_000;

/// The records after a sequence.
pub(crate) const NEXT_RECORDS: &str =
    "SELECT * FROM audit_records WHERE sequence > $1 ORDER BY sequence LIMIT $2";

crate::row! {
    /// An audit record.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct RecordRow {
        pub sequence: i64,
        pub at_us: i64,
        pub actor: String,
        pub action: String,
        pub object_id: String,
        pub before: String,
        pub after: String,
        pub reason: String,
        pub request_id: String,
        pub correlation_id: String,
        pub previous_hash: Vec<u8>,
        pub hash: Vec<u8>,
    }
}

impl RecordRow {
    pub fn record(&self) -> AuditRecord<'_> {
        AuditRecord {
            sequence: self.sequence,
            at_us: self.at_us,
            act: Act {
                action: &self.action,
                actor: &self.actor,
                object_id: &self.object_id,
                before: &self.before,
                after: &self.after,
                reason: &self.reason,
                request_id: &self.request_id,
                correlation_id: &self.correlation_id,
            },
        }
    }

    /// Checks that the record follows the one before it (sequence, hash) and matches its hash.
    pub fn check(&self, service: &str, last: (i64, Hash)) -> Option<Broken> {
        let record = self.record();
        record.check(service, last, &self.previous_hash, &self.hash)
    }
}

/// A stored hash.
///
/// # Errors
/// [`Error::Store`]: it does not have 32 bytes.
pub fn hash_of(sequence: i64, bytes: &[u8]) -> Result<Hash, Error> {
    let damaged = |_| {
        let text = format!("hash of audit record {sequence} has {} bytes", bytes.len());
        Error::Store(sqlx::Error::Decode(text.into()))
    };
    Hash::try_from(bytes).map_err(damaged)
}

/// Content of the event of a record: (service, event id, record).
pub type Encode = fn(&str, &str, &AuditRecord<'_>) -> Vec<u8>;

/// Seals an act of a service and publishes it.
///
/// # Errors
/// [`Error::Store`].
pub async fn append_in_tx(
    tx: &mut SqliteConnection,
    service: &'static str,
    at_us: i64,
    act: Act<'_>,
    encode: Encode,
) -> Result<(), Error> {
    let events = seal_in_tx(tx, service, &[(at_us, act)], encode).await?;
    outbox::append_in_tx(tx, &events).await
}

/// Seals acts of a service, each with its time, in this order. Returns their events, which the
/// caller publishes in the same transaction.
///
/// # Errors
/// [`Error::Store`].
pub async fn seal_in_tx(
    tx: &mut SqliteConnection,
    service: &'static str,
    acts: &[(i64, Act<'_>)],
    encode: Encode,
) -> Result<Vec<Event>, Error> {
    let last: Option<(i64, Vec<u8>)> = sqlx::query_as(LAST_RECORD).fetch_optional(&mut *tx).await?;
    let mut last = end_of_chain(last)?;
    let mut events = Vec::with_capacity(acts.len());
    for (at_us, act) in acts {
        let sealed = Sealed::after(last, service, *at_us, *act);
        let (record, act) = (sealed.record, sealed.record.act);
        sqlx::query(INSERT_RECORD)
            .bind(record.sequence)
            .bind(record.at_us)
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
        events.push(sealed.event(service, encode));
        last = (record.sequence, sealed.hash);
    }
    Ok(events)
}

/// The last record of a chain: sequence and hash.
pub(crate) fn end_of_chain(last: Option<(i64, Vec<u8>)>) -> Result<(i64, Hash), Error> {
    match last {
        Some((sequence, hash)) => Ok((sequence, hash_of(sequence, &hash)?)),
        None => Ok(BEGINNING),
    }
}

/// A record with its hashes.
pub(crate) struct Sealed<'a> {
    pub record: AuditRecord<'a>,
    pub previous: Hash,
    pub hash: Hash,
}

impl<'a> Sealed<'a> {
    /// The record of an act after the last one (sequence, hash).
    pub fn after((last, previous): (i64, Hash), service: &str, at_us: i64, act: Act<'a>) -> Self {
        let record = AuditRecord {
            sequence: last + 1,
            at_us,
            act,
        };
        Self {
            hash: record.hash(service, &previous),
            record,
            previous,
        }
    }

    /// The event that publishes the record.
    pub fn event(&self, service: &'static str, encode: Encode) -> Event {
        let AuditRecord { at_us, act, .. } = self.record;
        // One event per record, also across restarts.
        let id = Uuid::new_v5(&Uuid::NAMESPACE_OID, &self.hash);
        Event {
            id,
            topic: topics::AUDIT.to_owned(),
            key: act.object_id.to_owned(),
            type_name: "dfa.audit.v1.AuditRecordEvent".to_owned(),
            subject: act.object_id.to_owned(),
            source: service.to_owned(),
            correlation_id: act.correlation_id.to_owned(),
            occurred_at_us: at_us,
            payload: encode(service, &id.to_string(), &self.record),
        }
    }
}

/// Selects audit records; empty fields match everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecordFilter<'a> {
    pub actor: &'a str,
    pub object_id: &'a str,
}

/// Records with a sequence below `before`, newest first.
///
/// # Errors
/// [`Error::Store`].
pub async fn list(
    db: impl SqliteExecutor<'_>,
    filter: RecordFilter<'_>,
    before: i64,
    limit: i64,
) -> Result<Vec<RecordRow>, Error> {
    let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM audit_records WHERE sequence < ");
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

/// Result of [`verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Records that continue the chain.
    pub records: u64,
    /// Hash of the last of them, hex.
    pub head: String,
    /// `None`: all records are valid.
    pub broken: Option<Broken>,
}

/// Opens a service's file, which a running service may write at the time.
async fn open(path: &Path) -> Result<SqliteConnection, Error> {
    if !path.exists() {
        let text = format!("there is no store {}", path.display());
        return Err(Error::Files(std::io::Error::other(text)));
    }
    let options = SqliteConnectOptions::new().filename(path).read_only(true);
    let mut db = SqliteConnection::connect_with(&options).await?;
    let is_older = "SELECT NOT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'audit_records')";
    if sqlx::query_scalar(is_older).fetch_one(&mut db).await? {
        let text = format!("start this release once on the store {}", path.display());
        return Err(Error::Files(std::io::Error::other(text)));
    }
    Ok(db)
}

/// Hash of an audit record of a service's file in hex, for a comparison with an anchor outside the
/// file. `None`: the file has no such record.
///
/// # Errors
/// As [`verify`].
pub async fn record_hash(path: &Path, sequence: i64) -> Result<Option<String>, Error> {
    let mut db = open(path).await?;
    let next = sqlx::query_as(NEXT_RECORDS).bind(sequence.saturating_sub(1));
    let row: Option<RecordRow> = next.bind(1_i64).fetch_optional(&mut db).await?;
    Ok(hash_if(row, sequence))
}

/// Hash of a record in hex, if it has this sequence.
pub(crate) fn hash_if(row: Option<RecordRow>, sequence: i64) -> Option<String> {
    let row = row.filter(|row| row.sequence == sequence)?;
    Some(service_kit::audit::hex(&row.hash))
}

/// Checks the audit records of a service's file, which a running service may write at the time.
/// Reads in one transaction, page by page.
///
/// # Errors
/// [`Error::Files`]: no file, or one that this release has not opened yet; [`Error::Store`].
pub async fn verify(path: &Path, service: &str) -> Result<Verified, Error> {
    let mut db = open(path).await?;
    let mut tx = db.begin().await?;
    let mut walk = Walk::new(service);
    while walk.goes_on() {
        let page = sqlx::query_as(NEXT_RECORDS).bind(walk.last.0).bind(PAGE);
        let page: Vec<RecordRow> = page.fetch_all(&mut *tx).await?;
        walk.add(&page)?;
    }
    Ok(walk.verified)
}

/// Checks a chain page by page.
pub(crate) struct Walk<'a> {
    service: &'a str,
    /// The last record that continues the chain: sequence and hash.
    pub last: (i64, Hash),
    pub verified: Verified,
    is_done: bool,
}

impl<'a> Walk<'a> {
    pub fn new(service: &'a str) -> Self {
        Self {
            service,
            last: BEGINNING,
            verified: Verified {
                records: 0,
                head: service_kit::audit::hex(&BEGINNING.1),
                broken: None,
            },
            is_done: false,
        }
    }

    /// False at the end of the chain, or at its first invalid record.
    pub fn goes_on(&self) -> bool {
        !self.is_done
    }

    /// Checks the records after the last one. An empty page is the end.
    pub fn add(&mut self, page: &[RecordRow]) -> Result<(), Error> {
        self.is_done = page.is_empty();
        for row in page {
            self.verified.broken = row.check(self.service, self.last);
            if self.verified.broken.is_some() {
                self.is_done = true;
                return Ok(());
            }
            self.last = (row.sequence, hash_of(row.sequence, &row.hash)?);
            self.verified.records += 1;
            self.verified.head = service_kit::audit::hex(&row.hash);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrations;

    const TABLE: &str = include_str!("../../payments/migrations/sqlite/0008_audit_records.sql");

    fn act(object_id: &str) -> Act<'_> {
        Act {
            action: "payout.cancelled",
            actor: "anna, approved by boris (approval a1)",
            object_id,
            before: "PENDING",
            after: "FAILED",
            reason: "test",
            request_id: "q",
            correlation_id: "c",
        }
    }

    fn encode(service: &str, id: &str, record: &AuditRecord<'_>) -> Vec<u8> {
        assert_eq!(id.len(), 36);
        format!("{service} {}", record.sequence).into_bytes()
    }

    // rows: R215
    #[tokio::test]
    async fn r215_records_form_a_chain_and_a_changed_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.db");
        let missing = verify(&path, "payments").await.unwrap_err().to_string();
        assert!(missing.contains("there is no store"), "{missing}");
        let migrator = migrations::migrator(&[("0001_audit", TABLE)]);
        let db = crate::Sqlite::open(&path, &migrator).await.unwrap();
        for object_id in ["p1", "p2", "p1"] {
            let mut tx = db.write().await.unwrap();
            let done = append_in_tx(&mut tx, "payments", 5, act(object_id), encode);
            done.await.unwrap();
            tx.commit().await.unwrap();
        }
        let of = |object_id| RecordFilter {
            object_id,
            ..Default::default()
        };
        let sequences = async |filter, before| -> Vec<i64> {
            let rows = list(db.read(), filter, before, 10).await.unwrap();
            rows.into_iter().map(|row| row.sequence).collect()
        };
        assert_eq!(sequences(of(""), i64::MAX).await, [3, 2, 1]);
        assert_eq!(sequences(of("p1"), 3).await, [1]);
        let verified = verify(&path, "payments").await.unwrap();
        assert_eq!((verified.records, verified.broken), (3, None));
        let hash = async |sequence| record_hash(&path, sequence).await.unwrap();
        assert_eq!(hash(3).await, Some(verified.head));
        assert_ne!(hash(2).await, hash(3).await);
        assert_eq!((hash(0).await, hash(4).await), (None, None));
        let of_another = verify(&path, "identity").await.unwrap().broken.unwrap();
        assert_eq!(of_another.sequence, 1);
        let error = async |sql: &'static str| {
            let mut tx = db.write().await.unwrap();
            let done = sqlx::query(sql).execute(&mut *tx).await;
            done.unwrap_err().to_string()
        };
        let changed = error("UPDATE audit_records SET actor = 'x'").await;
        assert!(changed.contains("audit records never change"), "{changed}");
        let deleted = error("DELETE FROM audit_records").await;
        assert!(deleted.contains("never deleted"), "{deleted}");
        let mut tx = db.write().await.unwrap();
        for sql in [
            "DROP TRIGGER audit_records_never_change",
            "UPDATE audit_records SET after = 'SUCCESS' WHERE sequence = 2",
        ] {
            sqlx::query(sql).execute(&mut *tx).await.unwrap();
        }
        tx.commit().await.unwrap();
        let broken = verify(&path, "payments").await.unwrap().broken.unwrap();
        assert_eq!(
            (broken.sequence, broken.differs),
            (2, "hash (the record was changed)")
        );
        db.close().await;
    }
}
