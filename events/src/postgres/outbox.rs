//! Outbox and inbox on PostgreSQL, with concurrent transactions.
//!
//! Positions are assigned when a row is written and become visible at commit, possibly out of
//! order. The relay reads rows by position and stops at the first row whose transaction id is at or
//! above the horizon. The horizon is the xmin of the current snapshot: the oldest open transaction
//! on the server. A transaction below the horizon has ended and inserts no further rows. A row
//! restored from another server may have a transaction id at or above xmax; it counts as committed.
//! The relay deletes exactly the rows it read, after they are durable in the log, so a row that
//! appears later at a lower position is not skipped.
//!
//! Events of one key are published in commit order if their writers hold a common lock from before
//! the append until the commit. The ledger holds its sub-account locks. Writers of one key without
//! a common lock have no defined order; their events follow the positions.
//!
//! One relay publishes at a time. It holds a session-level advisory lock, keyed by the oid of the
//! outbox table, until a batch publishes nothing. Known limitations: a relay that is frozen with an
//! open connection blocks the others; any open transaction with changes on the server holds the
//! relay back.

use async_recursion::async_recursion as boxed;
use async_trait::async_trait;
use sqlx::{Connection, FromRow, PgConnection, postgres::PgRow};
use uuid::Uuid;

use super::Postgres;
use crate::{
    Error, Event, Log, inbox,
    outbox::{Queue, RelayResult},
};

/// Maximum rows per publication.
const BATCH: i64 = 2_048;

crate::row! {
    struct Row {
        position: i64,
        id: String,
        aggregatetype: String,
        aggregateid: String,
        type_name: String,
        payload: Vec<u8>,
        subject: String,
        source: String,
        correlation_id: String,
        occurred_at_us: i64,
    }
}

impl Row {
    fn into_event(self) -> Result<Event, Error> {
        let id = Uuid::parse_str(&self.id).map_err(|error| Error::Malformed {
            position: format!("outbox {}", self.position),
            reason: error.to_string(),
        })?;
        Ok(Event {
            id,
            topic: self.aggregatetype,
            key: self.aggregateid,
            type_name: self.type_name,
            subject: self.subject,
            source: self.source,
            correlation_id: self.correlation_id,
            occurred_at_us: self.occurred_at_us,
            payload: self.payload,
        })
    }
}

/// Appends events to the outbox in one statement, in the caller's transaction and in slice order.
///
/// # Errors
/// [`Error::Store`], also for an id that is in the outbox already.
#[boxed]
pub async fn append_in_tx(tx: &mut PgConnection, events: &[Event]) -> Result<(), Error> {
    if events.is_empty() {
        return Ok(());
    }
    let texts = |get: fn(&Event) -> &str| events.iter().map(get).collect::<Vec<_>>();
    let ids: Vec<String> = events.iter().map(|event| event.id.to_string()).collect();
    let payloads: Vec<&[u8]> = events.iter().map(|event| &*event.payload).collect();
    let times: Vec<i64> = events.iter().map(|event| event.occurred_at_us).collect();
    sqlx::query(
        "INSERT INTO outbox \
         (id, aggregatetype, aggregateid, type, payload, subject, source, correlation_id, occurred_at_us) \
         SELECT id, topic, key, type, payload, subject, source, correlation_id, at_us \
         FROM UNNEST($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], \
         $7::text[], $8::text[], $9::bigint[]) \
         WITH ORDINALITY AS e \
         (id, topic, key, type, payload, subject, source, correlation_id, at_us, place) ORDER BY place",
    )
    .bind(ids)
    .bind(texts(|event| &event.topic))
    .bind(texts(|event| &event.key))
    .bind(texts(|event| &event.type_name))
    .bind(payloads)
    .bind(texts(|event| &event.subject))
    .bind(texts(|event| &event.source))
    .bind(texts(|event| &event.correlation_id))
    .bind(times)
    .execute(tx)
    .await?;
    Ok(())
}

/// As [`crate::inbox::accept_in_tx`]. A second transaction with the same event waits for the first.
///
/// # Errors
/// [`Error::Store`].
pub async fn accept_in_tx(
    tx: &mut PgConnection,
    consumer: &str,
    event_id: Uuid,
) -> Result<bool, Error> {
    let accepted = accept_many_in_tx(tx, consumer, &[event_id]).await?;
    Ok(accepted == [true])
}

/// As [`inbox::accept_many_in_tx`].
///
/// # Errors
/// [`Error::Store`].
pub async fn accept_many_in_tx(
    tx: &mut PgConnection,
    consumer: &str,
    event_ids: &[Uuid],
) -> Result<Vec<bool>, Error> {
    let mut texts: Vec<String> = event_ids.iter().map(Uuid::to_string).collect();
    // Sorted, so concurrent transactions with the same events do not deadlock.
    texts.sort_unstable();
    let accepted: Vec<String> = sqlx::query_scalar(
        "INSERT INTO inbox (consumer, event_id, accepted_at_us) SELECT $1, id, $3 FROM UNNEST($2::text[]) AS id \
         ON CONFLICT DO NOTHING RETURNING event_id",
    )
    .bind(consumer)
    .bind(texts)
    .bind(service_kit::clock::now_us())
    .fetch_all(tx)
    .await?;
    Ok(inbox::flag_first_occurrences(
        event_ids,
        accepted.into_iter().collect(),
    ))
}

#[async_trait]
impl Queue for Postgres {
    async fn backlog(&self) -> Result<i64, Error> {
        Ok(sqlx::query_scalar("SELECT COUNT(*) FROM outbox")
            .fetch_one(self.read())
            .await?)
    }

    async fn relay_batch(&self, log: &dyn Log) -> Result<RelayResult, Error> {
        let mut slot = self.relay.lock().await;
        // After an error or a cancellation the connection is dropped, which releases its advisory
        // lock.
        let mut relay = match slot.take() {
            Some(relay) => relay,
            None => RelayConnection {
                connection: PgConnection::connect_with(&self.options).await?,
                has_lock: false,
            },
        };
        let relayed = relay.relay_batch(log).await?;
        *slot = Some(relay);
        Ok(relayed)
    }

    async fn wait_for_commit(&self) {
        Postgres::wait_for_commit(self).await;
    }

    fn name(&self) -> String {
        self.location()
    }

    async fn next_consumer(&self, after: &str) -> Result<Option<String>, Error> {
        let query = sqlx::query_scalar(inbox::NEXT_CONSUMER).bind(after);
        Ok(query.fetch_one(self.read()).await?)
    }

    async fn inbox_page(
        &self,
        consumer: &str,
        after: &str,
        until: &str,
    ) -> Result<Vec<(String, i64)>, Error> {
        let query = sqlx::query_as(inbox::PAGE).bind(consumer).bind(after);
        let query = query.bind(until).bind(inbox::PAGE_IDS);
        Ok(query.fetch_all(self.read()).await?)
    }

    async fn forget(
        &self,
        consumer: &str,
        after: &str,
        through: &str,
        before_us: i64,
    ) -> Result<u64, Error> {
        let mut tx = self.write().await?;
        let query = sqlx::query(inbox::FORGET).bind(consumer).bind(after);
        let query = query.bind(through).bind(before_us);
        let forgotten = query.execute(&mut *tx).await?.rows_affected();
        tx.commit().await?;
        Ok(forgotten)
    }
}

/// The relay's connection.
pub(crate) struct RelayConnection {
    connection: PgConnection,
    /// Whether it holds the publishing lock.
    has_lock: bool,
}

impl RelayConnection {
    pub async fn close(self) -> Result<(), sqlx::Error> {
        self.connection.close().await
    }

    async fn relay_batch(&mut self, log: &dyn Log) -> Result<RelayResult, Error> {
        if !self.has_lock {
            let sql = "SELECT pg_try_advisory_lock('outbox'::regclass::oid::bigint << 8)";
            let lock = sqlx::query_scalar(sql).fetch_one(&mut self.connection);
            self.has_lock = lock.await?;
        }
        if !self.has_lock {
            return Ok(RelayResult {
                events: 0,
                more_soon: true,
                is_stream: false,
            });
        }
        let relayed = publish(&mut self.connection, log).await?;
        if relayed.events == 0 {
            sqlx::query("SELECT pg_advisory_unlock('outbox'::regclass::oid::bigint << 8)")
                .execute(&mut self.connection)
                .await?;
            self.has_lock = false;
        }
        Ok(relayed)
    }
}

async fn publish(connection: &mut PgConnection, log: &dyn Log) -> Result<RelayResult, Error> {
    let found: Vec<PgRow> = sqlx::query(
        "SELECT position, id, aggregatetype, aggregateid, type AS type_name, payload, subject, \
         source, correlation_id, occurred_at_us, \
         transaction_id < pg_snapshot_xmin(pg_current_snapshot()) \
         OR transaction_id >= pg_snapshot_xmax(pg_current_snapshot()) \
         AS is_relayable FROM outbox ORDER BY position LIMIT $1",
    )
    .bind(BATCH)
    .fetch_all(&mut *connection)
    .await?;
    let mut events = Vec::with_capacity(found.len());
    let mut positions = Vec::with_capacity(found.len());
    for row in &found {
        if !sqlx::Row::try_get::<bool, _>(row, "is_relayable")? {
            break;
        }
        let row: Row = FromRow::from_row(row)?;
        positions.push(row.position);
        events.push(row.into_event()?);
    }
    if !events.is_empty() {
        log.publish(&events).await?;
        sqlx::query("DELETE FROM outbox WHERE position = ANY($1)")
            .bind(&positions)
            .execute(connection)
            .await?;
    }
    Ok(RelayResult {
        events: events.len(),
        more_soon: events.len() < found.len() || found.len() == BATCH as usize,
        is_stream: false,
    })
}
