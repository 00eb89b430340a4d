//! Outbox on SQLite: events of a transaction share rows ([`crate::pack`]). The next write
//! transaction deletes the relayed rows.
//!
//! After a crash before the delete the rows are published again with the same ids, which consumers
//! drop. Positions are never reused, so a late delete removes no other rows.

use async_recursion::async_recursion as boxed;
use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::Sqlite;
use crate::{
    Error, Event, Log, inbox,
    multi_row::{MultiRow, Script},
    outbox::{Queue, RelayResult},
    pack::{self, OutboxRow},
};

/// Maximum rows per publication, each with up to [`pack::RECORDS_MAX`] events.
const BATCH: i64 = 64;

static APPEND: MultiRow = MultiRow::new(
    "INSERT INTO outbox (count, events) SELECT * FROM (VALUES ",
    2,
    ") LIMIT +?",
);

/// Appends events in the caller's transaction, in slice order.
///
/// # Errors
/// [`Error::Store`].
#[boxed]
pub async fn append_in_tx(tx: &mut SqliteConnection, events: &[Event]) -> Result<(), Error> {
    let mut script = Script::default();
    let rows: Vec<&[Event]> = events.chunks(pack::RECORDS_MAX).collect();
    script
        .add(tx, &APPEND, &rows, |events, row| {
            row.put(events.len() as i64);
            row.put(pack::pack(events.iter().map(|event| (event, &[][..]))));
        })
        .await?;
    Ok(script.run(tx).await?)
}

/// The oldest rows that are not relayed.
async fn oldest(db: &Sqlite) -> Result<Vec<OutboxRow>, Error> {
    // `+`: see [`MultiRow`].
    let rows: Vec<(i64, i64, Vec<u8>)> = sqlx::query_as(
        "SELECT position, count, events FROM outbox WHERE position > $1 ORDER BY position LIMIT +$2",
    )
    .bind(db.relayed())
    .bind(BATCH)
    .fetch_all(db.read())
    .await?;
    let row = |(position, count, value)| OutboxRow {
        position,
        count,
        value,
    };
    Ok(rows.into_iter().map(row).collect())
}

/// Publishes the oldest rows and marks them as relayed.
pub(super) async fn publish_oldest(db: &Sqlite, log: &dyn Log) -> Result<RelayResult, Error> {
    let rows = oldest(db).await?;
    let relayed = RelayResult {
        events: rows
            .iter()
            .map(|row| row.count.unsigned_abs() as usize)
            .sum(),
        more_soon: rows.len() == BATCH as usize,
        // A commit with few events is one row.
        is_stream: rows.len() > 1,
    };
    if let Some(last) = rows.last().map(|row| row.position) {
        log.publish_rows(rows).await?;
        db.set_relayed(last);
    }
    Ok(relayed)
}

#[async_trait]
impl Queue for Sqlite {
    async fn backlog(&self) -> Result<i64, Error> {
        let sql = "SELECT COALESCE(SUM(count), 0) FROM outbox WHERE position > $1";
        Ok(sqlx::query_scalar(sql)
            .bind(self.relayed())
            .fetch_one(self.read())
            .await?)
    }

    async fn relay_batch(&self, log: &dyn Log) -> Result<RelayResult, Error> {
        let relayed = publish_oldest(self, log).await?;
        if relayed.events == 0 {
            self.delete_relayed().await?;
        }
        Ok(relayed)
    }

    async fn wait_for_commit(&self) {
        Sqlite::wait_for_commit(self).await;
    }

    fn name(&self) -> String {
        self.path().display().to_string()
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
