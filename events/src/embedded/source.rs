//! A group member on the embedded log: cursors, prefetch, waiting.
//!
//! Topics are read in chunks and merged by position. After a full chunk its topic may have more
//! records, so a read returns only records up to the lowest end of a full chunk.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use async_trait::async_trait;
use sqlx::sqlite::SqlitePool;
use tokio::sync::{Notify, OwnedMutexGuard};

use super::Embedded;
use crate::{Delivery, Error, Position, log::Source, pack};

/// Rows per read and topic.
const CHUNK: i64 = 64;
/// Longest sleep of a waiting member, in milliseconds.
const POLL_MS: u64 = 1_000;

pub(super) struct Member {
    log: Embedded,
    group: String,
    topics: Vec<String>,
    active: Option<Active>,
}

/// State of a group's active member.
struct Active {
    /// Last returned or skipped position, per topic.
    cursors: Vec<i64>,
    ready: VecDeque<Delivery>,
    /// Notified of records published since the last read.
    published: Arc<Notify>,
    _locks: Vec<OwnedMutexGuard<()>>,
}

impl Member {
    pub(super) fn new(log: Embedded, group: &str, topics: &[&str]) -> Self {
        let mut topics: Vec<String> = topics.iter().map(|topic| (*topic).to_owned()).collect();
        // Locks are taken in sorted order, so members with overlapping topics cannot deadlock.
        topics.sort();
        topics.dedup();
        Member {
            log,
            group: group.to_owned(),
            topics,
            active: None,
        }
    }

    async fn activate(&mut self) -> Result<&mut Active, Error> {
        if self.active.is_none() {
            let mut locks = Vec::new();
            for topic in &self.topics {
                let key = (self.group.clone(), topic.clone());
                locks.push(self.log.0.members.lock(key).await);
            }
            self.log.0.register(&self.group, &self.topics).await?;
            let cursors = self.log.0.committed(&self.group, &self.topics).await?;
            // Registered before the first read, so no later publication is missed.
            let published = self.log.0.wakes.register(&self.topics);
            self.active = Some(Active {
                cursors,
                ready: VecDeque::new(),
                published,
                _locks: locks,
            });
        }
        Ok(self.active.as_mut().expect("made above"))
    }
}

#[async_trait]
impl Source for Member {
    async fn next(&mut self) -> Result<Delivery, Error> {
        self.activate().await?;
        let (log, topics) = (self.log.clone(), self.topics.clone());
        let active = self.activate().await?;
        loop {
            if let Some(delivery) = active.ready.pop_front() {
                return Ok(delivery);
            }
            active.ready = read_chunk(log.0.log.read(), &topics, &mut active.cursors).await?;
            if active.ready.is_empty() {
                // A publication since the read has left a permit in the `Notify`.
                let poll = Duration::from_millis(POLL_MS);
                let _ = tokio::time::timeout(poll, active.published.notified()).await;
            }
        }
    }

    fn try_next(&mut self) -> Option<Delivery> {
        self.active.as_mut()?.ready.pop_front()
    }

    fn is_assigned(&self, _: &Position) -> bool {
        true
    }

    async fn commit(&mut self, position: &Position) -> Result<(), Error> {
        self.log.0.commit(&self.group, position).await
    }
}

crate::row! {
    struct Row {
        position: i64,
        count: i64,
        records: Vec<u8>,
    }
}

/// Returns the next records after the cursors, in order, and advances the cursors.
pub(super) async fn read_chunk(
    pool: &SqlitePool,
    topics: &[String],
    cursors: &mut [i64],
) -> Result<VecDeque<Delivery>, Error> {
    let mut ready: Vec<Delivery> = Vec::new();
    let mut horizon = i64::MAX;
    for (topic, cursor) in topics.iter().zip(&*cursors) {
        // The first row may start before the cursor and end after it. `+`: see
        // [`crate::multi_row::MultiRow`].
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT position, count, records FROM log WHERE topic = $1 AND position >= \
             COALESCE((SELECT MAX(position) FROM log WHERE topic = $1 AND position <= $2), 0) \
             AND position + count > $2 \
             ORDER BY position LIMIT +$3",
        )
        .bind(topic)
        .bind(cursor + 1)
        .bind(CHUNK)
        .fetch_all(pool)
        .await?;
        if rows.len() as i64 == CHUNK {
            let end = rows.last().map(|row| row.position + row.count - 1);
            horizon = horizon.min(end.unwrap_or(horizon));
        }
        for row in rows {
            let unread = row.into_deliveries(topic)?;
            ready.extend(unread.filter(|delivery| delivery.position.offset > *cursor));
        }
    }
    ready.retain(|delivery| delivery.position.offset <= horizon);
    ready.sort_by_key(|delivery| delivery.position.offset);
    for Delivery { position, .. } in &ready {
        let index = topics.iter().position(|topic| *topic == position.topic);
        cursors[index.expect("only these topics were read")] = position.offset;
    }
    Ok(ready.into())
}

pub(super) fn malformed(position: &str, reason: String) -> Error {
    Error::Malformed {
        position: position.to_owned(),
        reason,
    }
}

impl Row {
    fn into_deliveries(self, topic: &str) -> Result<impl Iterator<Item = Delivery>, Error> {
        let records = pack::unpack(&self.records, self.count)
            .map_err(|reason| malformed(&format!("{topic}/0@{}", self.position), reason))?;
        Ok(records
            .into_iter()
            .zip(self.position..)
            .map(|(record, offset)| Delivery {
                position: Position {
                    topic: record.event.topic.clone(),
                    partition: 0,
                    offset,
                },
                record,
            }))
    }
}
