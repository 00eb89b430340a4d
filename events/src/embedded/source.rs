//! A member of a group on the embedded log: cursors, prefetch, waiting.
//!
//! Topics are read in chunks and merged by position. A chunk that came full may be followed by more of its topic, so only records up to
//! the lowest end of a full chunk are handed out before the next read.

use std::{collections::VecDeque, time::Duration};

use async_trait::async_trait;
use sqlx::{FromRow, sqlite::SqlitePool};
use tokio::sync::{OwnedMutexGuard, watch};
use uuid::Uuid;

use super::Embedded;
use crate::{Delivery, Error, Event, Position, Record, log::Source};

/// Records read at once from a topic.
const CHUNK: i64 = 256;
/// How long a waiting member sleeps at most, in milliseconds.
const POLL_MS: u64 = 1_000;

pub(super) struct Member {
    log: Embedded,
    group: String,
    topics: Vec<String>,
    active: Option<Active>,
}

/// What a member has once it is the active one of its group.
struct Active {
    /// Last position handed out or skipped, for each topic.
    cursors: Vec<i64>,
    ready: VecDeque<Delivery>,
    head: watch::Receiver<i64>,
    _locks: Vec<OwnedMutexGuard<()>>,
}

impl Member {
    pub(super) fn new(log: Embedded, group: &str, topics: &[&str]) -> Self {
        let mut topics: Vec<String> = topics.iter().map(|topic| (*topic).to_owned()).collect();
        // Locks are taken in one order, so that members with overlapping topics cannot wait for each other.
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
                locks.push(self.log.member_lock(&self.group, topic).lock_owned().await);
            }
            let cursors = self.log.0.committed(&self.group, &self.topics).await?;
            self.active = Some(Active {
                cursors,
                ready: VecDeque::new(),
                head: self.log.0.head.subscribe(),
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
            // Seen before reading, so that a record published meanwhile ends the wait below.
            active.head.mark_unchanged();
            active.ready = read_chunk(log.0.log.read(), &topics, &mut active.cursors).await?;
            if active.ready.is_empty() {
                let poll = Duration::from_millis(POLL_MS);
                let _ = tokio::time::timeout(poll, active.head.changed()).await;
            }
        }
    }

    async fn commit(&mut self, position: &Position) -> Result<(), Error> {
        self.log.0.commit(&self.group, position).await
    }
}

#[derive(FromRow)]
struct Row {
    position: i64,
    topic: String,
    id: String,
    key: String,
    r#type: String,
    subject: String,
    source: String,
    correlation_id: String,
    occurred_at_us: i64,
    payload: Vec<u8>,
    headers: Option<String>,
}

/// The next records after the cursors, in order; moves the cursors past them.
pub(super) async fn read_chunk(
    pool: &SqlitePool,
    topics: &[String],
    cursors: &mut [i64],
) -> Result<VecDeque<Delivery>, Error> {
    let mut rows: Vec<Row> = Vec::new();
    let mut horizon = i64::MAX;
    for (topic, cursor) in topics.iter().zip(&*cursors) {
        let chunk: Vec<Row> = sqlx::query_as(
            "SELECT * FROM log WHERE topic = $1 AND position > $2 ORDER BY position LIMIT $3",
        )
        .bind(topic)
        .bind(cursor)
        .bind(CHUNK)
        .fetch_all(pool)
        .await?;
        if chunk.len() as i64 == CHUNK {
            horizon = horizon.min(chunk.last().map_or(horizon, |row| row.position));
        }
        rows.extend(chunk);
    }
    rows.retain(|row| row.position <= horizon);
    rows.sort_by_key(|row| row.position);
    let deliveries = rows
        .into_iter()
        .map(Row::into_delivery)
        .collect::<Result<VecDeque<_>, _>>()?;
    for Delivery { position, .. } in &deliveries {
        let index = topics.iter().position(|topic| *topic == position.topic);
        cursors[index.expect("only these topics were read")] = position.offset;
    }
    Ok(deliveries)
}

impl Row {
    fn into_delivery(self) -> Result<Delivery, Error> {
        let position = Position {
            topic: self.topic.clone(),
            partition: 0,
            offset: self.position,
        };
        let malformed = |reason: String| Error::Malformed {
            position: position.to_string(),
            reason,
        };
        let id = Uuid::parse_str(&self.id).map_err(|error| malformed(error.to_string()))?;
        let headers = match &self.headers {
            None => Vec::new(),
            Some(text) => {
                serde_json::from_str(text).map_err(|error| malformed(error.to_string()))?
            }
        };
        let event = Event {
            id,
            topic: self.topic,
            key: self.key,
            type_name: self.r#type,
            subject: self.subject,
            source: self.source,
            correlation_id: self.correlation_id,
            occurred_at_us: self.occurred_at_us,
            payload: self.payload,
        };
        Ok(Delivery {
            record: Record { event, headers },
            position,
        })
    }
}
