//! The embedded log: one process, two SQLite files, no server.
//!
//! `log.db` is synchronous FULL: published events survive `kill -9` and power loss. Group positions
//! are in `offsets.db`, synchronous NORMAL: they survive `kill -9`. A power loss may set them back,
//! so records are redelivered. All topics share one sequence, so a subscription to several
//! topics sees publication order; each topic is one partition. Publishers of the same process wake
//! the subscribers of their topics; subscribers poll once per second for other processes. The
//! second member of a group waits until the first is dropped. Records of one topic that are
//! published together share rows ([`crate::pack`]). Nothing is removed unless [`Embedded::retain`]
//! runs.

mod positions;
mod recent;
mod retention;
mod source;
mod wakes;

pub use positions::{PositionCheck, check_positions};
pub use retention::{RETAIN_MIN, Retention};

use futures::future::BoxFuture;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use service_kit::KeyedMutex;
use sqlx::sqlite::SqliteSynchronous;
use tokio::sync::watch;

use crate::{
    Delivery, Error, Event, Log, Position, Record, Sqlite, Subscription, Waiting,
    multi_row::{MultiRow, Script},
    pack::{self, Contents, OutboxRow},
};
use recent::Recent;

const OFFSETS_SCHEMA: &str = "CREATE TABLE IF NOT EXISTS offsets (\
     consumer_group TEXT NOT NULL, topic TEXT NOT NULL, position BIGINT NOT NULL, \
     PRIMARY KEY (consumer_group, topic)) WITHOUT ROWID";

static APPEND: MultiRow = MultiRow::new(
    "INSERT INTO log (position, topic, count, records) SELECT * FROM (VALUES ",
    4,
    ") LIMIT +?",
);

/// A borrowed record: the event and its additional headers.
type Borrowed<'a> = (&'a Event, &'a [(String, String)]);

/// A row of the log.
struct LogRow {
    topic: Arc<str>,
    count: i64,
    /// Packed records ([`pack`]).
    value: Vec<u8>,
}

/// Rows for records, in order; adjacent records of one topic share rows.
fn log_rows(records: &[Borrowed<'_>]) -> Vec<LogRow> {
    let runs = records.chunk_by(|a, b| a.0.topic == b.0.topic);
    let runs = runs.flat_map(|run| run.chunks(pack::RECORDS_MAX));
    let row = |run: &[Borrowed<'_>]| LogRow {
        topic: run[0].0.topic.as_str().into(),
        count: run.len() as i64,
        value: pack::pack(run.iter().copied()),
    };
    runs.map(row).collect()
}

/// Minimum events of an outbox row that is copied unchanged. Smaller rows are repacked together.
const COPIED_EVENTS_MIN: i64 = 32;

/// Log rows for the new events of outbox rows. An outbox row is copied unchanged if it is large
/// enough, has no headers, and all its events are new and of one topic.
fn rows_of_outbox(
    rows: Vec<(OutboxRow, Contents)>,
    recent: &mut Recent,
) -> Result<Vec<LogRow>, Error> {
    let mut result = Vec::with_capacity(rows.len());
    let mut unpacked: Vec<Event> = Vec::new();
    let repack = |unpacked: &mut Vec<Event>| {
        let records: Vec<Borrowed> = unpacked.iter().map(|event| (event, &[][..])).collect();
        let rows = log_rows(&records);
        unpacked.clear();
        rows
    };
    for (row, found) in rows {
        let topic = match found.topics.as_slice() {
            [topic] if row.count >= COPIED_EVENTS_MIN && !found.has_headers => topic.as_str(),
            _ => {
                unpacked.extend(row.events()?.filter(|event| recent.add(event, &[])));
                continue;
            }
        };
        let are_new: Vec<bool> = recent.add_all(topic, &found.ids).collect();
        if are_new.iter().all(|is_new| *is_new) {
            result.extend(repack(&mut unpacked));
            result.push(LogRow {
                topic: topic.into(),
                count: row.count,
                value: row.value,
            });
        } else {
            let mut are_new = are_new.into_iter();
            unpacked.extend(row.events()?.filter(|_| are_new.next() == Some(true)));
        }
    }
    result.extend(repack(&mut unpacked));
    Ok(result)
}

/// Handle to an embedded log; clones share it.
#[derive(Clone)]
pub struct Embedded(Arc<Inner>);

struct Inner {
    log: Sqlite,
    offsets: Sqlite,
    /// Recently published ids, as known to the writer.
    recent: tokio::sync::Mutex<Recent>,
    /// Members that wait for records of this process.
    wakes: wakes::Wakes,
    failing: watch::Sender<Option<String>>,
    waiting: Waiting,
    /// One lock per group and topic, held by the group's active member.
    members: KeyedMutex<(String, String)>,
}

impl Embedded {
    /// Opens (and creates) the log in a folder.
    ///
    /// # Errors
    /// [`Error::Files`], [`Error::Store`].
    pub fn open(folder: impl AsRef<Path>) -> BoxFuture<'static, Result<Self, Error>> {
        Self::open_folder(folder.as_ref().to_owned())
    }

    fn open_folder(folder: PathBuf) -> BoxFuture<'static, Result<Self, Error>> {
        Box::pin(async move {
            let log = Sqlite::open_bare(&folder.join("log.db"), SqliteSynchronous::Full).await?;
            let offsets =
                Sqlite::open_bare(&folder.join("offsets.db"), SqliteSynchronous::Normal).await?;
            let mut tx = log.write().await?;
            sqlx::raw_sql(include_str!("schema.sql"))
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            let mut tx = offsets.write().await?;
            sqlx::raw_sql(OFFSETS_SCHEMA).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(Embedded(Arc::new(Inner {
                log,
                offsets,
                recent: tokio::sync::Mutex::default(),
                wakes: wakes::Wakes::default(),
                failing: watch::Sender::new(None),
                waiting: Waiting::default(),
                members: KeyedMutex::default(),
            })))
        })
    }

    /// Waits for running calls and closes both files.
    pub fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.0.log.close().await;
            self.0.offsets.close().await;
        })
    }

    /// Writes the records that are not in the log and wakes the members that wait for them.
    async fn add(&self, records: &[Borrowed<'_>]) -> Result<(), Error> {
        if records.is_empty() {
            return Ok(());
        }
        let new_rows = |recent: &mut Recent| {
            let mut new = Vec::with_capacity(records.len());
            for (event, headers) in records {
                if recent.add(event, headers) {
                    new.push((*event, *headers));
                }
            }
            Ok(log_rows(&new))
        };
        let topics = records.iter().map(|(event, _)| event.topic.as_str());
        self.write(topics, new_rows).await
    }

    /// Writes the rows from `make` and wakes the topics' members. Wakes them even if nothing is
    /// new: an earlier attempt may have written the rows and failed before the wake.
    async fn write<'a>(
        &self,
        topics: impl Iterator<Item = &'a str>,
        make: impl FnOnce(&mut Recent) -> Result<Vec<LogRow>, Error>,
    ) -> Result<(), Error> {
        let written = self.0.write(make).await;
        self.0.failing.send_if_modified(|failing| {
            let now = written.as_ref().err().map(ToString::to_string);
            let changed = *failing != now;
            *failing = now;
            changed
        });
        written?;
        self.0.wakes.wake(topics);
        Ok(())
    }
}

#[async_trait]
impl Log for Embedded {
    /// Overridden to avoid a copy: a relay passes thousands of events.
    async fn publish(&self, events: &[Event]) -> Result<(), Error> {
        let records: Vec<Borrowed> = events.iter().map(|event| (event, &[][..])).collect();
        self.add(&records).await
    }

    /// Copies a row with many events of one topic without unpacking it.
    async fn publish_rows(&self, rows: Vec<OutboxRow>) -> Result<(), Error> {
        if rows.is_empty() {
            return Ok(());
        }
        // Validated before the write: an unreadable row is not a failure of the log.
        let found: Vec<Contents> = (rows.iter().map(OutboxRow::scan)).collect::<Result<_, _>>()?;
        let topics: BTreeSet<String> = found
            .iter()
            .flat_map(|found| &found.topics)
            .cloned()
            .collect();
        let rows = rows.into_iter().zip(found).collect();
        self.write(topics.iter().map(String::as_str), |recent| {
            rows_of_outbox(rows, recent)
        })
        .await
    }

    async fn append(&self, records: &[Record]) -> Result<(), Error> {
        let records = records
            .iter()
            .map(|record| (&record.event, &*record.headers));
        self.add(&records.collect::<Vec<Borrowed>>()).await
    }

    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error> {
        let source = source::Member::new(self.clone(), group, topics);
        Ok(Subscription(Box::new(source)))
    }

    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, Error> {
        let topics: Vec<String> = topics.iter().map(|topic| (*topic).to_owned()).collect();
        let mut cursors = self.0.committed(group, &topics).await?;
        let mut backlog = Vec::new();
        loop {
            let chunk = source::read_chunk(self.0.log.read(), &topics, &mut cursors).await?;
            if chunk.is_empty() {
                return Ok(backlog);
            }
            backlog.extend(chunk);
        }
    }

    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error> {
        self.0.commit(group, position).await
    }

    async fn delivers_since(&self) -> Result<Option<i64>, Error> {
        self.oldest_us().await
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.0.failing.subscribe()
    }

    fn waiting(&self) -> &Waiting {
        &self.0.waiting
    }
}

impl Inner {
    /// Committed position of a group per topic; 0 if there is none.
    async fn committed(&self, group: &str, topics: &[String]) -> Result<Vec<i64>, Error> {
        let mut cursors = Vec::with_capacity(topics.len());
        for topic in topics {
            let committed = self.position(group, topic).await?;
            cursors.push(committed.unwrap_or(0));
        }
        Ok(cursors)
    }

    /// Committed position of a group; `None` if there is none.
    async fn position(&self, group: &str, topic: &str) -> Result<Option<i64>, Error> {
        let committed = sqlx::query_scalar(
            "SELECT position FROM offsets WHERE consumer_group = $1 AND topic = $2",
        )
        .bind(group)
        .bind(topic)
        .fetch_optional(self.offsets.read())
        .await?;
        Ok(committed)
    }

    /// Stores position 0 for topics of which the group has consumed nothing yet, so that retention
    /// keeps their records. Writes nothing if each has a position.
    async fn register(&self, group: &str, topics: &[String]) -> Result<(), Error> {
        for topic in topics {
            if self.position(group, topic).await?.is_some() {
                continue;
            }
            let position = Position {
                topic: topic.clone(),
                partition: 0,
                offset: 0,
            };
            self.commit(group, &position).await?;
        }
        Ok(())
    }

    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error> {
        let mut tx = self.offsets.write().await?;
        sqlx::query(
            "INSERT INTO offsets (consumer_group, topic, position) VALUES ($1, $2, $3) \
             ON CONFLICT (consumer_group, topic) DO UPDATE SET position = MAX(position, excluded.position)",
        )
        .bind(group)
        .bind(&position.topic)
        .bind(position.offset)
        .execute(&mut *tx)
        .await?;
        tx.commit().await
    }

    /// Writes the rows from `make` in one transaction.
    async fn write(
        &self,
        make: impl FnOnce(&mut Recent) -> Result<Vec<LogRow>, Error>,
    ) -> Result<(), Error> {
        let mut recent = self.recent.lock().await;
        let mut tx = self.log.write().await?;
        let mut next = recent.begin(&mut tx).await?;
        let rows = make(&mut recent)?;
        let mut script = Script::default();
        script
            .add(&mut tx, &APPEND, &rows, |row, values| {
                values.put(next);
                values.put(row.topic.clone());
                values.put(row.count);
                values.put(row.value.clone());
                next += row.count;
            })
            .await?;
        script.run(&mut tx).await?;
        tx.commit().await?;
        recent.confirm(next);
        Ok(())
    }
}
