//! What a log is: durable, ordered by key, read by groups that remember how far they are.
//!
//! Two implementations, [`crate::Embedded`] and [`crate::Kafka`], pass one contract test suite.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{Error, Event, OutboxRow, Record};

/// Where a record stands in its topic. Offsets grow within a partition; they need not be gapless.
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

/// One record on its way to a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    pub record: Record,
    pub position: Position,
}

/// A durable event log.
#[async_trait]
pub trait Log: Send + Sync + 'static {
    /// Appends in order; when it returns, all of them are durable. After an error any prefix, also
    /// of each key, may be in the log: publish the same events again, with the same ids.
    /// [`Error::Refused`]: one of them is never taken, for instance for its size.
    async fn publish(&self, events: &[Event]) -> Result<(), Error> {
        let records: Vec<Record> = events.iter().cloned().map(Record::from).collect();
        self.append(&records).await
    }

    /// As [`Log::publish`], of rows of an outbox on SQLite in their order.
    async fn publish_rows(&self, rows: Vec<OutboxRow>) -> Result<(), Error> {
        let mut events = Vec::new();
        for row in &rows {
            events.extend(row.events()?);
        }
        self.publish(&events).await
    }

    /// As [`Log::publish`], with further headers.
    async fn append(&self, records: &[Record]) -> Result<(), Error>;

    /// Joins a group. A new group starts at the beginning of the topics, a known one after its last
    /// committed record. Members of one group share its topics; a record goes to one of them.
    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error>;

    /// What a group has not committed of the topics, up to the end at the time of the call, in the
    /// order of each partition. Joins nothing and changes nothing; for a look from outside, where a
    /// subscription would wait for more.
    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, Error>;

    /// As [`Subscription::commit`], for a group that has no members at the moment.
    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error>;

    /// Why the log cannot be reached at the moment, if so; for `/health`.
    fn failing(&self) -> watch::Receiver<Option<String>>;

    /// Which groups of this process wait for a peer or a store; see [`report_health`].
    fn waiting(&self) -> &Waiting;
}

/// Consumers that cannot go on because a peer or a store is away ([`crate::Later`]): the reason by group and topic.
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

/// Tells what keeps events from moving, until shutdown: `tell(part, Some(reason))` when a part
/// begins to fail or fails for another reason, `tell(part, None)` when it works again. Parts are
/// `events`, the log itself, and `<group>:<topic>` for each consumer of `groups` that waits for a
/// peer or a store. Meant for a service's health.
pub async fn report_health(
    log: Arc<dyn Log>,
    groups: &[&str],
    mut tell: impl FnMut(&str, Option<&str>),
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
            tell(part, None);
        }
        for (part, reason) in &failing {
            tell(part, Some(reason));
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
    /// The next record; waits for one. Cancel safe: a record is lost from view only after it has
    /// been returned, and comes again to the group if it is not committed.
    ///
    /// # Errors
    /// [`Error`] of the log. The subscription stays usable.
    pub async fn next(&mut self) -> Result<Delivery, Error> {
        self.0.next().await
    }

    /// The next records, at least one and at most `max`, as many as are at hand; waits for the
    /// first. Cancel safe as [`Self::next`].
    ///
    /// # Errors
    /// [`Error`] of the log, before the first record. The subscription stays usable.
    pub async fn next_many(&mut self, max: usize) -> Result<Vec<Delivery>, Error> {
        let mut deliveries = vec![self.0.next().await?];
        while deliveries.len() < max {
            match self.0.at_hand() {
                Some(delivery) => deliveries.push(delivery),
                None => break,
            }
        }
        Ok(deliveries)
    }

    /// Whether a record that was returned is still this member's to handle.
    pub fn is_ours(&self, position: &Position) -> bool {
        self.0.is_ours(position)
    }

    /// The group is done with this record and everything before it in its partition.
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
    /// The next record where that needs no waiting.
    fn at_hand(&mut self) -> Option<Delivery>;
    /// False when the record's partition went to another member.
    fn is_ours(&self, position: &Position) -> bool;
    async fn commit(&mut self, position: &Position) -> Result<(), Error>;
}
