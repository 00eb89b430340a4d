//! What a log is: durable, ordered by key, read by groups that remember how far they are.
//!
//! Two implementations, [`crate::Embedded`] and [`crate::Kafka`], pass one contract test suite.

use async_trait::async_trait;
use tokio::sync::watch;

use crate::{Error, Event, Record};

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
    /// Appends in order; when it returns, all of them are durable. After an error any prefix, also of each key, may be in the log:
    /// publish the same events again, with the same ids.
    async fn publish(&self, events: &[Event]) -> Result<(), Error> {
        let records: Vec<Record> = events.iter().cloned().map(Record::from).collect();
        self.append(&records).await
    }

    /// As [`Log::publish`], with further headers.
    async fn append(&self, records: &[Record]) -> Result<(), Error>;

    /// Joins a group. A new group starts at the beginning of the topics, a known one after its last committed record. Members of one
    /// group share its topics; a record goes to one of them.
    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error>;

    /// Why the log cannot be reached at the moment, if so; for `/health`.
    fn failing(&self) -> watch::Receiver<Option<String>>;
}

/// A member of a group.
pub struct Subscription(pub(crate) Box<dyn Source>);

impl Subscription {
    /// The next record; waits for one. Cancel safe: a record is lost from view only after it has been returned, and comes again to the
    /// group if it is not committed.
    ///
    /// # Errors
    /// [`Error`] of the log. The subscription stays usable.
    pub async fn next(&mut self) -> Result<Delivery, Error> {
        self.0.next().await
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
    async fn commit(&mut self, position: &Position) -> Result<(), Error>;
}
