//! The request topics (4.4), emitted events (6.5) and consumed events (6.6) on a real Kafka broker.
//! There is a single test: the broker has one set of topics, with the records of earlier runs.

use std::{cell::Cell, collections::HashMap, sync::Arc};

use events::{Event, Kafka, Log, Record, Subscription, topics};
use ledger::{CORRELATION_HEADER, REQUEST_TOPICS};
use prost::Message;
use proto::{common::v1::OperationType, identity::v1::UserCreatedEvent, ledger::v1::*};

use crate::{
    harness::*,
    refusals::{CONSUMPTIONS, FINALITIES, HOLDS, OPERATIONS, RELEASES, code_of, pay, valid_hold},
    requests::{Reply, committed_operation, of_many_postings},
};

/// Sends requests over topics, with one reader of all replies.
struct Asker {
    log: Arc<dyn Log>,
    replies: Subscription,
    read: HashMap<String, Vec<Reply>>,
}

impl Asker {
    async fn new(log: &Arc<dyn Log>) -> Self {
        let topics: Vec<String> = (REQUEST_TOPICS.iter())
            .map(|(topic, _)| format!("{topic}.reply"))
            .collect();
        let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
        let replies = log.subscribe(&format!("asker-{}", fresh()), &topics).await;
        Asker {
            log: log.clone(),
            replies: replies.unwrap(),
            read: HashMap::new(),
        }
    }

    /// Sends a request `times` times, as a retrying producer does; returns its correlation id.
    async fn send(&self, topic: &str, payload: Vec<u8>, times: usize) -> String {
        let correlation = fresh();
        let event = Event {
            id: uuid::Uuid::now_v7(),
            topic: topic.to_owned(),
            key: correlation.clone(),
            type_name: String::new(),
            subject: String::new(),
            source: "test".to_owned(),
            correlation_id: correlation.clone(),
            occurred_at_us: START_US,
            payload,
        };
        let headers = vec![(CORRELATION_HEADER.to_owned(), correlation.clone())];
        let record = Record { event, headers };
        let records = vec![record; times];
        self.log.append(&records).await.unwrap();
        correlation
    }

    /// Waits for `count` replies to one request.
    async fn replies(&mut self, correlation: &str, count: usize) -> Vec<Reply> {
        while self.read.get(correlation).map_or(0, Vec::len) < count {
            let delivery = tokio::time::timeout(PATIENCE, self.replies.next())
                .await
                .expect("a reply comes")
                .unwrap();
            let record = delivery.record;
            let Some(to) = record.header(CORRELATION_HEADER).map(str::to_owned) else {
                continue;
            };
            self.read.entry(to).or_default().push(Reply {
                headers: record.headers.into_iter().collect(),
                payload: record.event.payload,
            });
        }
        self.read.remove(correlation).unwrap()
    }

    async fn ask<M: Message + Default>(&mut self, topic: &str, request: &impl Message) -> M {
        let correlation = self.send(topic, request.encode_to_vec(), 1).await;
        let reply = self.replies(&correlation, 1).await.remove(0);
        assert_eq!(reply.headers.get("error-code"), None, "{topic}");
        M::decode(reply.payload.as_slice()).unwrap()
    }

    /// Sends all requests, then expects each to be refused with its text.
    async fn refused(&mut self, topic: &str, all: Vec<(Vec<u8>, &str)>) {
        let mut sent = Vec::new();
        for (payload, text) in all {
            sent.push((self.send(topic, payload, 1).await, text));
        }
        for (correlation, text) in sent {
            let reply = self.replies(&correlation, 1).await.remove(0);
            assert_eq!(
                code_of(&reply),
                ("INVALID_ARGUMENT", "INVALID_ARGUMENT", text)
            );
        }
    }
}

async fn kafka() -> Arc<dyn Log> {
    // A small limit, so a reply can be too large.
    let options = HashMap::from([("message.max.bytes".to_owned(), "8000".to_owned())]);
    let kafka = Kafka::connect(&crate::brokers(), &options).unwrap();
    kafka.ensure_topics().await.unwrap();
    let requests = ledger::request_and_reply_topics();
    kafka.create_topics(&requests).await.unwrap();
    Arc::new(kafka)
}

// rows: R192 R195 R198 R199 R200 R202 R203 R222 R235 R241 R242 R248
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r201_requests_events_and_refusals_on_a_real_broker() {
    let world = World::on_log(kafka().await).await;
    let mut asker = Asker::new(&world.log).await;
    let mut published = world.watch().await;

    // The same event twice creates the user's account once.
    let user = format!("kafka-{}", fresh());
    let created = UserCreatedEvent {
        user_id: user.clone(),
        ..Default::default()
    };
    let name = "dfa.identity.v1.UserCreatedEvent";
    let event = world.publish(topics::IDENTITY, name, &user, &created).await;
    world.log.publish(&[event]).await.unwrap();
    let own = format!("{user}:{RUB}");
    let request = GetSubAccountRequest {
        subaccount_id: own.clone(),
        ..Default::default()
    };
    eventually(|| async {
        world
            .client
            .clone()
            .get_sub_account(request.clone())
            .await
            .ok()
    })
    .await;

    // A duplicate request acts once, and both get a reply.
    let legs = [("system:reserve:CFA-RUB", own.as_str(), "100", RUB)];
    let deposit = operation(OperationType::Deposit, &user, &fresh(), &legs);
    let topic = "ledger.createOperation";
    let correlation = asker.send(topic, deposit.encode_to_vec(), 2).await;
    let both = asker.replies(&correlation, 2).await;
    let ids: Vec<String> = both
        .iter()
        .map(|reply| CreateOperationResponse::decode(reply.payload.as_slice()).unwrap())
        .map(|answer| answer.operation.unwrap().operation_id)
        .collect();
    assert_eq!(ids[0], ids[1]);
    assert_eq!(world.balance(&own).await[0], "100.00");

    // An oversized reply is replaced by the committed ids, and the topic continues.
    let large = of_many_postings(&format!("many-{user}"), 60);
    let correlation = asker.send(topic, large.encode_to_vec(), 1).await;
    let reply = asker.replies(&correlation, 1).await.remove(0);
    let id = committed_operation(&reply);
    assert_eq!(world.get_operation(&id).await.postings.len(), 60);

    // A hold over topics: opened, partly consumed, released.
    let hold = CreateHoldRequest {
        context: write(&fresh()),
        hold: Some(new_hold(&user, RUB, "10")),
    };
    let answer: CreateHoldResponse = asker.ask("ledger.createHold", &hold).await;
    let hold_id = answer.hold.unwrap().hold_id;
    let consume = ConsumeHoldRequest {
        context: write(&fresh()),
        hold_id: hold_id.clone(),
        amount: amount(RUB, "4"),
        ..Default::default()
    };
    asker
        .ask::<ConsumeHoldResponse>("ledger.consumeHold", &consume)
        .await;
    let release = ReleaseHoldRequest {
        context: write(&fresh()),
        hold_id,
        reason: "test".to_owned(),
    };
    asker
        .ask::<ReleaseHoldResponse>("ledger.releaseHold", &release)
        .await;

    // Invalid values of every field, bytes that are not a request, insufficient balance.
    world.fund("u1", RUB, "100").await;
    world.fund("u1", BOND, "5").await;
    let invalid = OPERATIONS.iter().map(|(invalidate, text)| {
        let mut request = pay(&fresh());
        invalidate(&mut request);
        (request.encode_to_vec(), *text)
    });
    asker.refused(topic, invalid.collect()).await;
    let invalid = HOLDS.iter().map(|(invalidate, text)| {
        let mut request = valid_hold();
        invalidate(&mut request);
        (request.encode_to_vec(), *text)
    });
    asker.refused("ledger.createHold", invalid.collect()).await;
    let hold_id = world.hold("u1", RUB, "10").await.hold_id;
    let invalid = RELEASES.iter().map(|(invalidate, text)| {
        let mut request = ReleaseHoldRequest {
            context: write(&fresh()),
            hold_id: hold_id.clone(),
            reason: String::new(),
        };
        invalidate(&mut request);
        (request.encode_to_vec(), *text)
    });
    asker.refused("ledger.releaseHold", invalid.collect()).await;
    let invalid = CONSUMPTIONS.iter().map(|(invalidate, text)| {
        let mut request = ConsumeHoldRequest {
            context: write(&fresh()),
            hold_id: hold_id.clone(),
            ..Default::default()
        };
        invalidate(&mut request);
        (request.encode_to_vec(), *text)
    });
    asker.refused("ledger.consumeHold", invalid.collect()).await;
    let invalid = FINALITIES.iter().map(|(invalidate, text)| {
        let mut request = FinalizeOperationRequest {
            context: write(&fresh()),
            operation_id: ids[0].clone(),
            onchain_tx_hash: String::new(),
        };
        invalidate(&mut request);
        (request.encode_to_vec(), *text)
    });
    asker
        .refused("ledger.finalizeOperation", invalid.collect())
        .await;
    let correlation = asker.send(topic, vec![0xFF; 9], 1).await;
    let reply = asker.replies(&correlation, 1).await.remove(0);
    assert!(reply.headers["error-message"].starts_with("value: is no request"));
    let legs = [(own.as_str(), "shop:CFA-RUB", "100.01", RUB)];
    let poor = operation(OperationType::Payment, &user, &fresh(), &legs);
    let correlation = asker.send(topic, poor.encode_to_vec(), 1).await;
    let reply = asker.replies(&correlation, 1).await.remove(0);
    let expected = (
        "FAILED_PRECONDITION",
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    assert_eq!(code_of(&reply), expected);

    // The operation's event occurs once, despite the duplicate request. The order between
    // partitions is undefined, so the test waits for both events.
    let last = format!("last-{user}");
    world.fund(&last, RUB, "1").await;
    let (is_last, is_made) = (Cell::new(false), Cell::new(false));
    let is_of = |event: &Event, name: &str, of: &str| {
        event.short_type() == name && event.subject.starts_with(of)
    };
    let seen = published
        .until(|event| {
            is_last.set(is_last.get() || is_of(event, "BalanceUpdatedEvent", &last));
            is_made.set(is_made.get() || is_of(event, "OperationCreatedEvent", &ids[0]));
            is_last.get() && is_made.get()
        })
        .await;
    let made = seen
        .iter()
        .filter(|event| is_of(event, "OperationCreatedEvent", &ids[0]));
    assert_eq!(made.count(), 1, "{}", ids[0]);
    world.assert_books_balance().await;
}
