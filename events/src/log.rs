//! Event log interface: durable, ordered by key, read by groups with stored positions.
//!
//! Two implementations, [`crate::Embedded`] and [`crate::Kafka`], pass the same contract tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{Error, Event, OutboxRow, Record};

/// Position of a record in its topic. Offsets increase within a partition, possibly with gaps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}@{}", self.topic, self.partition, self.offset)
    }
}

/// A record with its position, as delivered to a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    pub record: Record,
    pub position: Position,
}

/// A durable event log.
#[async_trait]
pub trait Log: Send + Sync + 'static {
    /// Appends in order; all events are durable on return. After an error the log may have any
    /// prefix of each key's events: publish the same events again, with the same ids.
    /// [`Error::Refused`]: an event can never be stored, for example because of its size.
    async fn publish(&self, events: &[Event]) -> Result<(), Error> {
        let records: Vec<Record> = events.iter().cloned().map(Record::from).collect();
        self.append(&records).await
    }

    /// As [`Log::publish`], for outbox rows of SQLite in their order.
    async fn publish_rows(&self, rows: Vec<OutboxRow>) -> Result<(), Error> {
        let mut events = Vec::new();
        for row in &rows {
            events.extend(row.events()?);
        }
        self.publish(&events).await
    }

    /// As [`Log::publish`], with additional headers.
    async fn append(&self, records: &[Record]) -> Result<(), Error>;

    /// Joins a group. A new group starts at the beginning of the topics, a known one after its last
    /// committed record. Members of a group share its topics; each record goes to one of them.
    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error>;

    /// A group's uncommitted records of the topics, up to the current end, in partition order. Does
    /// not join the group, commits nothing and does not wait for further records.
    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, Error>;

    /// As [`Subscription::commit`], for a group without members.
    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error>;

    /// Time in microseconds since which every record that the log may still deliver was appended;
    /// `None`: unknown. An inbox needs no ids that it accepted before.
    async fn delivers_since(&self) -> Result<Option<i64>, Error> {
        Ok(None)
    }

    /// The reason while the log is unreachable, for `/health`.
    fn failing(&self) -> watch::Receiver<Option<String>>;

    /// Groups of this process that wait for a peer or a store; see [`report_health`].
    fn waiting(&self) -> &Waiting;
}

/// Consumers blocked by an unavailable peer or store ([`crate::RetryLater`]): reason by group and
/// topic.
#[derive(Debug, Default)]
pub struct Waiting(watch::Sender<BTreeMap<(String, String), String>>);

impl Waiting {
    pub(crate) fn set(&self, group: &str, topic: &str, reason: &str) {
        self.0.send_if_modified(|waiting| {
            let key = (group.to_owned(), topic.to_owned());
            waiting.insert(key, reason.to_owned()).as_deref() != Some(reason)
        });
    }

    pub(crate) fn clear(&self, group: &str, topic: &str) {
        self.0.send_if_modified(|waiting| {
            waiting
                .remove(&(group.to_owned(), topic.to_owned()))
                .is_some()
        });
    }
}

/// Reports blocked event flow until shutdown, for a service's health.
///
/// Calls `set(part, Some(reason))` when a part fails or its reason changes, `set(part, None)`
/// when it recovers. Parts: `events`, the log itself, and `<group>:<topic>` for each consumer of
/// `groups` that waits for a peer or a store.
pub async fn report_health(
    log: Arc<dyn Log>,
    groups: &[&str],
    mut set: impl FnMut(&str, Option<&str>),
    shutdown: CancellationToken,
) {
    let mut unreachable = log.failing();
    let mut waiting = log.waiting().0.subscribe();
    let mut shown: BTreeSet<String> = BTreeSet::new();
    loop {
        let mut failing: BTreeMap<String, String> = waiting
            .borrow_and_update()
            .iter()
            .filter(|((group, _), _)| groups.contains(&group.as_str()))
            .map(|((group, topic), reason)| (format!("{group}:{topic}"), reason.clone()))
            .collect();
        if let Some(reason) = unreachable.borrow_and_update().clone() {
            failing.insert("events".to_owned(), reason);
        }
        for part in shown.iter().filter(|part| !failing.contains_key(*part)) {
            set(part, None);
        }
        for (part, reason) in &failing {
            set(part, Some(reason));
        }
        shown = failing.into_keys().collect();
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = unreachable.changed() => if changed.is_err() { return },
            changed = waiting.changed() => if changed.is_err() { return },
        }
    }
}

/// A member of a group.
pub struct Subscription(pub(crate) Box<dyn Source>);

impl Subscription {
    /// Waits for the next record. Cancel safe: a cancelled call loses no record. A record that is
    /// never committed is redelivered to the group.
    ///
    /// # Errors
    /// [`Error`] of the log. The subscription stays usable.
    pub async fn next(&mut self) -> Result<Delivery, Error> {
        self.0.next().await
    }

    /// Returns the available records, from one to `max`; waits for the first. Cancel safe as
    /// [`Self::next`].
    ///
    /// # Errors
    /// [`Error`] of the log, before the first record. The subscription stays usable.
    pub async fn next_many(&mut self, max: usize) -> Result<Vec<Delivery>, Error> {
        let mut deliveries = vec![self.0.next().await?];
        while deliveries.len() < max {
            match self.0.try_next() {
                Some(delivery) => deliveries.push(delivery),
                None => break,
            }
        }
        Ok(deliveries)
    }

    /// Whether the record's partition is still assigned to this member.
    pub fn is_assigned(&self, position: &Position) -> bool {
        self.0.is_assigned(position)
    }

    /// Marks this record and all earlier ones in its partition as done.
    ///
    /// # Errors
    /// [`Error`] of the log.
    pub async fn commit(&mut self, position: &Position) -> Result<(), Error> {
        self.0.commit(position).await
    }
}

#[async_trait]
pub(crate) trait Source: Send {
    async fn next(&mut self) -> Result<Delivery, Error>;
    /// The next record that is available without waiting.
    fn try_next(&mut self) -> Option<Delivery>;
    /// False if the record's partition was reassigned.
    fn is_assigned(&self, position: &Position) -> bool;
    async fn commit(&mut self, position: &Position) -> Result<(), Error>;
}
