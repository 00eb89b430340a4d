//! The log on Kafka: idempotent producer with acks=all, D24 headers, message key = event key,
//! positions stored after the handler.
//!
//! A message never expires in the producer (`message.timeout.ms` 0): otherwise a later message of
//! its key would overtake it. So `publish` waits while the brokers are down, and [`Log::failing`]
//! has the reason. Stored positions reach the broker every 200 ms and when a subscription is
//! dropped. A crash redelivers the records since the last of these commits. A subscription dropped
//! during an outage redelivers the records handled since the outage began.

mod leader_hints;
mod member;
mod record;

use futures::future::BoxFuture;
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rdkafka::{
    ClientConfig, ClientContext, Message, Offset, Statistics, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, Rebalance, StreamConsumer},
    error::{KafkaError, RDKafkaErrorCode},
    producer::{FutureProducer, FutureRecord},
};
use tokio::sync::watch;

use crate::{
    Delivery, Error, Event, Log, Position, Record, Subscription, Waiting, kafka::member::Member,
    topics,
};

/// Pause before a message is offered again to a producer with a full queue.
const QUEUE_FULL_PAUSE_MS: u64 = 20;
/// Broker timeout of a backlog read.
const BROKER_TIMEOUT: Duration = Duration::from_secs(30);

/// Silence after which a backlog read counts as complete.
const IDLE_TIMEOUT: Duration = Duration::from_millis(500);
/// Metadata requests before a topic counts as missing: a new topic may not have reached the broker
/// yet.
const TOPIC_TRIES: u32 = 3;

/// Handle to a cluster; clones share the producer.
#[derive(Clone)]
pub struct Kafka(Arc<Inner>);

struct Inner {
    config: ClientConfig,
    context: Context,
    producer: FutureProducer<Context>,
    waiting: Waiting,
    /// Age at which the topics have no record any more; unset: unknown.
    retention: OnceLock<Duration>,
}

impl Kafka {
    /// Creates the clients; brokers are contacted in the background. `options` are librdkafka's
    /// (`security.protocol`, `sasl.*`). The settings that the delivery guarantees need override
    /// them.
    ///
    /// # Errors
    /// [`Error::Kafka`] for an option that librdkafka refuses.
    pub fn connect(brokers: &str, options: &HashMap<String, String>) -> Result<Self, Error> {
        let mut config = ClientConfig::new();
        // The default of ten seconds would add as much to each outage.
        config.set("reconnect.backoff.max.ms", "1000");
        for (name, value) in options {
            config.set(name, value);
        }
        config
            .set("bootstrap.servers", brokers)
            .set("client.id", "platform")
            .set("statistics.interval.ms", "5000");
        let context = Context::default();
        let producer = config
            .clone()
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("message.timeout.ms", "0")
            .set("compression.type", "lz4")
            .set("linger.ms", "2")
            .create_with_context(context.clone())?;
        Ok(Kafka(Arc::new(Inner {
            config,
            context,
            producer,
            waiting: Waiting::default(),
            retention: OnceLock::new(),
        })))
    }

    /// States the age at which the topics have no record any more. Inboxes then remove older ids.
    /// The first call counts.
    pub fn set_retention(&self, age: Duration) {
        let _ = self.0.retention.set(age);
    }

    /// Creates the missing topics of the platform and their dead-letter topics: 12 partitions
    /// (D25), the cluster's default replication.
    ///
    /// # Errors
    /// [`Error::Kafka`].
    pub fn ensure_topics(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            let names: Vec<String> = topics::ALL
                .iter()
                .flat_map(|topic| [(*topic).to_owned(), topics::dlq(topic)])
                .collect();
            self.create_topics(&names).await
        })
    }

    /// Creates the topics that do not exist.
    ///
    /// # Errors
    /// [`Error::Kafka`].
    pub fn create_topics<'a>(&'a self, names: &'a [String]) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            let admin: AdminClient<Context> =
                self.0.config.create_with_context(self.0.context.clone())?;
            let wanted: Vec<NewTopic<'_>> = names
                .iter()
                .map(|name| NewTopic::new(name, topics::PARTITIONS, TopicReplication::Fixed(-1)))
                .collect();
            let options = AdminOptions::new().operation_timeout(Some(Duration::from_secs(30)));
            for result in admin.create_topics(&wanted, &options).await? {
                match result {
                    Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
                    Err((topic, code)) => {
                        tracing::error!(topic, %code, "cannot create the topic");
                        return Err(KafkaError::AdminOp(code).into());
                    }
                }
            }
            Ok(())
        })
    }
}

#[async_trait]
impl Log for Kafka {
    async fn append(&self, records: &[Record]) -> Result<(), Error> {
        let mut deliveries = Vec::with_capacity(records.len());
        for record in records {
            let event = &record.event;
            let mut message = FutureRecord::to(&event.topic)
                .key(&event.key)
                .payload(&event.payload)
                .timestamp(event.occurred_at_us / 1_000)
                .headers(record::headers(record));
            let delivery = loop {
                match self.0.producer.send_result(message) {
                    Ok(delivery) => break delivery,
                    Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back)) => {
                        message = back;
                        tokio::time::sleep(Duration::from_millis(QUEUE_FULL_PAUSE_MS)).await;
                    }
                    Err((error, _)) => return Err(produce_error(error, event)),
                }
            };
            deliveries.push((delivery, event));
        }
        for (delivery, event) in deliveries {
            delivery
                .await
                .map_err(|_| Error::Closed)?
                .map_err(|(error, _)| produce_error(error, event))?;
        }
        self.0.context.set_reachable();
        Ok(())
    }

    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error> {
        let consumer: StreamConsumer<Context> = self
            .0
            .config
            .clone()
            .set("group.id", group)
            .set("enable.auto.commit", "true")
            .set("enable.auto.offset.store", "false")
            .set("auto.commit.interval.ms", "200")
            .set("auto.offset.reset", "earliest")
            .set("isolation.level", "read_committed")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("topic.metadata.refresh.interval.ms", "10000")
            // Above the longest pause between attempts (D26: 5 min). A member whose record waits
            // longer leaves the group; the record is redelivered after it was handled.
            .set("max.poll.interval.ms", "900000")
            .create_with_context(self.0.context.clone())?;
        consumer.subscribe(topics)?;
        let member = Member::new(consumer, self.0.context.clone());
        Ok(Subscription(Box::new(member)))
    }

    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, Error> {
        let consumer = self.detached_consumer(group)?;
        let topics: Vec<String> = topics.iter().map(|topic| (*topic).to_owned()).collect();
        let read = move || {
            let mut backlog = Vec::new();
            for topic in &topics {
                read_backlog(&consumer, topic, &mut backlog)?;
            }
            Ok(backlog)
        };
        tokio::task::spawn_blocking(read)
            .await
            .map_err(|_| Error::Closed)?
    }

    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error> {
        let consumer = self.detached_consumer(group)?;
        let mut next = TopicPartitionList::new();
        let offset = Offset::Offset(position.offset + 1);
        next.add_partition_offset(&position.topic, position.partition, offset)?;
        tokio::task::spawn_blocking(move || consumer.commit(&next, CommitMode::Sync))
            .await
            .map_err(|_| Error::Closed)??;
        Ok(())
    }

    async fn delivers_since(&self) -> Result<Option<i64>, Error> {
        let since = |age: &Duration| {
            let age_us = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
            service_kit::clock::now_us().saturating_sub(age_us)
        };
        Ok(self.0.retention.get().map(since))
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.0.context.failing.subscribe()
    }

    fn waiting(&self) -> &Waiting {
        &self.0.waiting
    }
}

impl Kafka {
    /// A consumer that reads and sets a group's positions without joining the group.
    fn detached_consumer(&self, group: &str) -> Result<BaseConsumer<Context>, Error> {
        let consumer = self
            .0
            .config
            .clone()
            .set("group.id", group)
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("isolation.level", "read_committed")
            .create_with_context(self.0.context.clone())?;
        Ok(consumer)
    }
}

/// The error of a failed send: [`Error::Refused`] if the producer (`message.max.bytes`) or the
/// broker refuses the record for its size.
fn produce_error(error: KafkaError, event: &Event) -> Error {
    match error.rdkafka_error_code() {
        Some(
            code @ (RDKafkaErrorCode::MessageSizeTooLarge
            | RDKafkaErrorCode::MessageBatchTooLarge
            | RDKafkaErrorCode::InvalidMessageSize),
        ) => Error::Refused {
            topic: event.topic.clone(),
            bytes: event.payload.len(),
            reason: code.to_string(),
        },
        _ => error.into(),
    }
}

/// Reads one topic from the group's positions to the current end of each partition.
fn read_backlog(
    consumer: &BaseConsumer<Context>,
    topic: &str,
    backlog: &mut Vec<Delivery>,
) -> Result<(), Error> {
    let from = consumer.committed_offsets(partitions(consumer, topic)?, BROKER_TIMEOUT)?;
    let mut wanted = TopicPartitionList::new();
    // High watermark of each partition that has records to read.
    let mut ends = HashMap::new();
    for partition in from.elements_for_topic(topic) {
        let (low, high) =
            consumer.fetch_watermarks(topic, partition.partition(), BROKER_TIMEOUT)?;
        let next = match partition.offset() {
            Offset::Offset(next) => next.max(low),
            _ => low,
        };
        if next < high {
            wanted.add_partition_offset(topic, partition.partition(), Offset::Offset(next))?;
            ends.insert(partition.partition(), high);
        }
    }
    consumer.assign(&wanted)?;
    let mut ended = HashSet::new();
    while !ends.is_empty() {
        // Records may follow a partition's EOF. If none arrive, the last offsets are transaction
        // markers, not records.
        let all_ended = ends.keys().all(|partition| ended.contains(partition));
        let patience = if all_ended {
            IDLE_TIMEOUT
        } else {
            BROKER_TIMEOUT
        };
        match consumer.poll(patience) {
            None if all_ended => break,
            None => {
                return Err(
                    KafkaError::MessageConsumption(RDKafkaErrorCode::RequestTimedOut).into(),
                );
            }
            Some(Ok(message)) => {
                let Some(end) = ends.get(&message.partition()).copied() else {
                    continue;
                };
                if message.offset() < end {
                    backlog.push(record::delivery(&message));
                }
                if message.offset() + 1 >= end {
                    ends.remove(&message.partition());
                }
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                ended.insert(partition);
            }
            Some(Err(error)) => return Err(error.into()),
        }
    }
    consumer.unassign()?;
    Ok(())
}

/// Partitions of a topic; empty if the topic is still missing after retries.
fn partitions(
    consumer: &BaseConsumer<Context>,
    topic: &str,
) -> Result<TopicPartitionList, KafkaError> {
    let mut partitions = TopicPartitionList::new();
    for _ in 0..TOPIC_TRIES {
        let metadata = consumer.fetch_metadata(Some(topic), BROKER_TIMEOUT)?;
        for known in metadata
            .topics()
            .iter()
            .filter(|known| known.name() == topic)
        {
            match known.error().map(RDKafkaErrorCode::from) {
                None
                | Some(
                    RDKafkaErrorCode::UnknownTopicOrPartition
                    | RDKafkaErrorCode::LeaderNotAvailable,
                ) => {}
                Some(code) => return Err(KafkaError::MetadataFetch(code)),
            }
            for partition in known.partitions() {
                partitions.add_partition(topic, partition.id());
            }
        }
        if partitions.count() > 0 {
            break;
        }
        std::thread::sleep(IDLE_TIMEOUT);
    }
    Ok(partitions)
}

/// State reported by the clients in the background.
#[derive(Clone)]
struct Context {
    failing: Arc<watch::Sender<Option<String>>>,
    /// A member could not leave its group in time. Later members do not wait.
    leaves_slowly: Arc<AtomicBool>,
}

impl Default for Context {
    fn default() -> Self {
        Context {
            failing: Arc::new(watch::Sender::new(None)),
            leaves_slowly: Arc::default(),
        }
    }
}

impl Context {
    fn set_reachable(&self) {
        self.leaves_slowly.store(false, Ordering::Relaxed);
        self.failing
            .send_if_modified(|failing| failing.take().is_some());
    }
}

impl ClientContext for Context {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::warn!(error = %error, reason, "Kafka client");
        if error.rdkafka_error_code() == Some(RDKafkaErrorCode::AllBrokersDown) {
            self.failing.send_if_modified(|failing| {
                let changed = failing.is_none();
                failing.get_or_insert_with(|| "all brokers are down".to_owned());
                changed
            });
        }
    }

    fn stats(&self, statistics: Statistics) {
        if statistics
            .brokers
            .values()
            .any(|broker| broker.state == "UP")
        {
            self.set_reachable();
        }
    }
}

impl ConsumerContext for Context {
    fn post_rebalance(&self, _: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        tracing::info!(?rebalance, "group rebalanced");
    }

    fn commit_callback(&self, result: Result<(), KafkaError>, _: &TopicPartitionList) {
        match result {
            Ok(()) | Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::NoOffset)) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot commit positions; records may be redelivered")
            }
        }
    }
}
