//! Contract tests of [`events::Log`], run on each implementation.
//!
//! Each test creates its own topics through the fixture. Time limits only turn a hang into a
//! failure; no test asserts speed.

#![allow(dead_code, reason = "a test target uses some of the helpers")]

pub mod outbox;
pub mod victim;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use events::{
    Delivery, Event, Failure, Log, Poison, Record, RetryLater, RetryPolicy, Stopped, Subscription,
    consume_batches, consume_with, dlq, report_health, topics,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

#[async_trait]
pub trait Fixture: Send + Sync {
    fn log(&self) -> Arc<dyn Log>;
    /// A fresh topic (with its dead-letter topic) for one test.
    async fn topic(&self, name: &str) -> String;
}

pub async fn all(fixture: &dyn Fixture) {
    records_are_delivered_in_key_order(fixture).await;
    a_waiting_subscriber_is_woken_by_a_publisher(fixture).await;
    groups_have_separate_stored_positions(fixture).await;
    failed_records_are_retried_before_later_ones(fixture).await;
    a_record_waits_for_an_unavailable_peer_without_a_limit(fixture).await;
    a_record_waits_for_an_unavailable_store_without_a_limit(fixture).await;
    dead_letters_are_replayed_to_their_group_only(fixture).await;
    a_stopped_consumer_resumes_where_it_stopped(fixture).await;
    available_records_are_handled_together_in_order(fixture).await;
    a_stopped_batch_resumes_after_the_handled_records(fixture).await;
}

/// Retries without waiting.
pub const FAST: RetryPolicy = RetryPolicy {
    first_ms: 1,
    max_ms: 2,
    attempts_max: 4,
};

pub fn event(topic: &str, key: &str, number: usize) -> Event {
    let id = Uuid::new_v5(
        &Uuid::NAMESPACE_OID,
        format!("{topic}/{key}/{number}").as_bytes(),
    );
    Event {
        id,
        topic: topic.to_owned(),
        key: key.to_owned(),
        type_name: "dfa.ledger.v1.HoldCreated".to_owned(),
        subject: format!("hold-{number}"),
        source: "ledger".to_owned(),
        correlation_id: format!("corr-{number}"),
        occurred_at_us: 1_763_706_000_000_000 + number as i64,
        payload: number.to_be_bytes().to_vec(),
    }
}

pub async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(90), future)
        .await
        .unwrap_or_else(|_| panic!("{what}: timed out"))
}

pub async fn receive(subscription: &mut Subscription, count: usize) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let next = in_time("next record", subscription.next()).await;
        taken.push(next.expect("the log can be read"));
    }
    taken
}

fn by_key(events: impl IntoIterator<Item = Event>) -> BTreeMap<String, Vec<Event>> {
    let mut keys = BTreeMap::<String, Vec<Event>>::new();
    for event in events {
        keys.entry(event.key.clone()).or_default().push(event);
    }
    keys
}

async fn records_are_delivered_in_key_order(fixture: &dyn Fixture) {
    let topic = fixture.topic("order").await;
    let sent: Vec<Event> = (0..600)
        .map(|number| event(&topic, &format!("key-{}", number % 7), number))
        .collect();
    for batch in sent.chunks(50) {
        fixture.log().publish(batch).await.unwrap();
    }
    let mut subscription = fixture.log().subscribe("order", &[&topic]).await.unwrap();
    let taken = receive(&mut subscription, sent.len()).await;
    assert!(
        taken
            .iter()
            .all(|delivery| delivery.record.headers.is_empty())
    );
    let received = taken.into_iter().map(|delivery| delivery.record.event);
    assert_eq!(by_key(received), by_key(sent));
}

async fn a_waiting_subscriber_is_woken_by_a_publisher(fixture: &dyn Fixture) {
    let (first, second) = (fixture.topic("wake-1").await, fixture.topic("wake-2").await);
    let mut subscription = fixture
        .log()
        .subscribe("wake", &[&first, &second])
        .await
        .unwrap();
    let waiting = tokio::spawn(async move { receive(&mut subscription, 2).await });
    tokio::task::yield_now().await;
    fixture
        .log()
        .publish(&[event(&first, "k", 1)])
        .await
        .unwrap();
    fixture
        .log()
        .publish(&[event(&second, "k", 2)])
        .await
        .unwrap();
    let topics: BTreeSet<_> = in_time("both records", waiting)
        .await
        .unwrap()
        .into_iter()
        .map(|delivery| delivery.record.event.topic)
        .collect();
    assert_eq!(topics, BTreeSet::from([first, second]));
}

async fn groups_have_separate_stored_positions(fixture: &dyn Fixture) {
    let topic = fixture.topic("groups").await;
    let sent: Vec<Event> = (0..20)
        .map(|number| event(&topic, "one-key", number))
        .collect();
    fixture.log().publish(&sent).await.unwrap();

    let mut first = fixture.log().subscribe("group-a", &[&topic]).await.unwrap();
    let taken = receive(&mut first, 12).await;
    // 12 are received and 5 committed: the others are redelivered.
    first.commit(&taken[4].position).await.unwrap();
    drop(first);
    let mut again = fixture.log().subscribe("group-a", &[&topic]).await.unwrap();
    let rest = receive(&mut again, 15).await;
    assert_eq!(rest[0].record.event, sent[5]);
    assert_eq!(rest[14].record.event, sent[19]);

    let mut other = fixture.log().subscribe("group-b", &[&topic]).await.unwrap();
    assert_eq!(receive(&mut other, 20).await[0].record.event, sent[0]);
}

/// Runs a consumer in the background.
fn run<H, F>(
    fixture: &dyn Fixture,
    group: &'static str,
    topic: &str,
    handler: H,
) -> (tokio::task::JoinHandle<()>, CancellationToken)
where
    H: Fn(Event) -> F + Send + Sync + 'static,
    F: Future<Output = events::HandlerResult> + Send + 'static,
{
    let (log, topic, stop) = (fixture.log(), topic.to_owned(), CancellationToken::new());
    let shutdown = stop.clone();
    let task = tokio::spawn(async move {
        consume_with(log, group, &[&topic], handler, shutdown, FAST)
            .await
            .unwrap();
    });
    (task, stop)
}

async fn stop(consumer: (tokio::task::JoinHandle<()>, CancellationToken)) {
    consumer.1.cancel();
    in_time("consumer stops", consumer.0).await.unwrap();
}

async fn failed_records_are_retried_before_later_ones(fixture: &dyn Fixture) {
    let topic = fixture.topic("retry").await;
    let sent: Vec<Event> = (0..5)
        .map(|number| event(&topic, "one-key", number))
        .collect();
    fixture.log().publish(&sent).await.unwrap();
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let failures = Arc::new(Mutex::new(2));
    let consumer = run(fixture, "retry", &topic, move |event| {
        let (tx, failures) = (tx.clone(), failures.clone());
        async move {
            if event.subject == "hold-1" {
                let mut left = failures.lock().unwrap();
                if *left > 0 {
                    *left -= 1;
                    return Err("not yet".into());
                }
            }
            tx.send(event.subject).unwrap();
            Ok(())
        }
    });
    for number in 0..5 {
        let handled = in_time("handled", rx.recv()).await.unwrap();
        assert_eq!(handled, format!("hold-{number}"));
    }
    stop(consumer).await;
}

async fn a_record_waits_for_an_unavailable_peer_without_a_limit(fixture: &dyn Fixture) {
    let topic = fixture.topic("later").await;
    let sent: Vec<Event> = (0..3)
        .map(|number| event(&topic, "one-key", number))
        .collect();
    fixture.log().publish(&sent).await.unwrap();
    let (health_tx, mut health) = tokio::sync::mpsc::unbounded_channel();
    let end = CancellationToken::new();
    let (log, ended) = (fixture.log(), end.clone());
    let report = tokio::spawn(async move {
        let set = |part: &str, reason: Option<&str>| {
            health_tx
                .send((part.to_owned(), reason.map(str::to_owned)))
                .unwrap();
        };
        report_health(log, &["later"], set, ended).await;
    });
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    // First the record itself fails, one time fewer than the attempt limit. Then the peer is
    // unavailable for many more attempts than the limit.
    let peer = Arc::new(tokio::sync::Semaphore::new(0));
    let tries = Arc::new(Mutex::new(0));
    let (back, seen) = (peer.clone(), tries.clone());
    let consumer = run(fixture, "later", &topic, move |event| {
        let (tx, peer, tries) = (tx.clone(), peer.clone(), tries.clone());
        async move {
            if event.subject == "hold-1" && peer.available_permits() == 0 {
                let mut tries = tries.lock().unwrap();
                *tries += 1;
                return if *tries < FAST.attempts_max {
                    Err("a failure that counts".into())
                } else {
                    Err(RetryLater("the peer is away".into()).into())
                };
            }
            tx.send(event.subject).unwrap();
            Ok(())
        }
    });
    let part = format!("later:{topic}");
    let away = in_time("waiting is reported", health.recv()).await.unwrap();
    assert_eq!(away, (part.clone(), Some("the peer is away".to_owned())));
    in_time("many tries", async {
        while *seen.lock().unwrap() < 10 * FAST.attempts_max {
            tokio::task::yield_now().await;
        }
    })
    .await;
    back.add_permits(1);
    for number in 0..3 {
        let handled = in_time("handled", rx.recv()).await.unwrap();
        assert_eq!(handled, format!("hold-{number}"));
    }
    let cleared = in_time("the end of waiting is reported", health.recv()).await;
    assert_eq!(cleared.unwrap(), (part, None));
    stop(consumer).await;
    end.cancel();
    in_time("the report ends", report).await.unwrap();
}

/// A handler may return its store's error as is or wrapped in its own.
#[derive(Debug, thiserror::Error)]
enum OwnError {
    #[error("store: {0}")]
    Store(#[from] events::Error),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

async fn a_record_waits_for_an_unavailable_store_without_a_limit(fixture: &dyn Fixture) {
    let topic = fixture.topic("store").await;
    let sent = [event(&topic, "one-key", 0), event(&topic, "one-key", 1)];
    fixture.log().publish(&sent).await.unwrap();
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let tries = Arc::new(Mutex::new(0));
    let consumer = run(fixture, "store", &topic, move |event| {
        let (tx, tries) = (tx.clone(), tries.clone());
        async move {
            let mut tries = tries.lock().unwrap();
            *tries += 1;
            let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
            if *tries < 10 * FAST.attempts_max {
                return Err(match *tries % 4 {
                    0 => sqlx::Error::PoolTimedOut.into(),
                    1 => events::Error::Files(full()).into(),
                    2 => OwnError::from(events::Error::Files(full())).into(),
                    _ => OwnError::from(sqlx::Error::Io(full())).into(),
                });
            }
            tx.send(event.subject).unwrap();
            Ok(())
        }
    });
    for number in 0..2 {
        let handled = in_time("handled", rx.recv()).await.unwrap();
        assert_eq!(handled, format!("hold-{number}"));
    }
    stop(consumer).await;
    let letters = dlq::list(&*fixture.log(), &[&topic], Some("store")).await;
    assert_eq!(letters.unwrap(), []);
}

async fn dead_letters_are_replayed_to_their_group_only(fixture: &dyn Fixture) {
    let topic = fixture.topic("dead").await;
    let sent: Vec<Event> = (0..3)
        .map(|number| event(&topic, "one-key", number))
        .collect();
    fixture.log().publish(&sent).await.unwrap();
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let is_repaired = Arc::new(Mutex::new(false));
    let healthy = tx.clone();
    let of_handler = is_repaired.clone();
    let failing = run(fixture, "failing", &topic, move |event| {
        let (tx, is_repaired) = (tx.clone(), of_handler.clone());
        async move {
            match (event.subject.as_str(), *is_repaired.lock().unwrap()) {
                ("hold-0", false) => return Err(Poison("cannot be read".into()).into()),
                ("hold-1", false) => return Err("never works".into()),
                _ => {}
            }
            tx.send(("failing", event.subject)).unwrap();
            Ok(())
        }
    });
    let handled = in_time("the record after the dead-lettered ones", rx.recv())
        .await
        .unwrap();
    assert_eq!(handled, ("failing", "hold-2".to_owned()));

    let dead = topics::dlq(&topic);
    let mut letters = fixture
        .log()
        .subscribe("inspector", &[&dead])
        .await
        .unwrap();
    let letters: Vec<Record> = receive(&mut letters, 2)
        .await
        .into_iter()
        .map(|letter| letter.record)
        .collect();
    assert_eq!(letters[0].event.id, sent[0].id);
    assert_eq!(letters[0].event.payload, sent[0].payload);
    assert_eq!(letters[0].header(dlq::REASON), Some("cannot be read"));
    assert_eq!(letters[0].header(dlq::GROUP), Some("failing"));
    assert_eq!(letters[0].header(dlq::ATTEMPTS), Some("1"));
    assert_eq!(letters[1].header(dlq::REASON), Some("never works"));
    assert_eq!(letters[1].header(dlq::ATTEMPTS), Some("4"));

    // A second group has handled all three; the replay must skip it.
    let other = run(fixture, "healthy", &topic, move |event| {
        let tx = healthy.clone();
        async move {
            tx.send(("healthy", event.subject)).unwrap();
            Ok(())
        }
    });
    for number in 0..3 {
        let handled = in_time("the other group", rx.recv()).await.unwrap();
        assert_eq!(handled, ("healthy", format!("hold-{number}")));
    }
    *is_repaired.lock().unwrap() = true;
    let log = fixture.log();
    let list = async |group: Option<&'static str>| {
        let found = dlq::list(&*log, &[&topic], group).await.unwrap();
        found
            .into_iter()
            .map(|letter| (letter.event_id, letter.reason, letter.is_replayed))
            .collect::<Vec<_>>()
    };
    let letter =
        |number: usize, reason: &str, replayed| (sent[number].id, reason.to_owned(), replayed);
    let both = |replayed| {
        [
            letter(0, "cannot be read", replayed),
            letter(1, "never works", replayed),
        ]
    };
    assert_eq!(list(None).await, both(false));
    assert_eq!(list(Some("failing")).await, both(false));
    assert!(list(Some("healthy")).await.is_empty());
    for (group, expected) in [(Some("healthy"), 0), (Some("failing"), 2), (None, 0)] {
        let replayed = dlq::replay(&*log, &[&topic], group).await.unwrap();
        assert_eq!(replayed.len(), expected, "{group:?}");
        assert!(replayed.iter().all(|letter| letter.topic == topic));
    }
    assert_eq!(list(None).await, both(true));
    for number in 0..2 {
        let handled = in_time("the replayed record", rx.recv()).await.unwrap();
        assert_eq!(handled, ("failing", format!("hold-{number}")));
    }
    // A later record reaches both groups. The healthy group has received no replayed record before
    // it.
    fixture
        .log()
        .publish(&[event(&topic, "one-key", 9)])
        .await
        .unwrap();
    let last = [
        in_time("last", rx.recv()).await,
        in_time("last", rx.recv()).await,
    ];
    let last: BTreeSet<_> = last.into_iter().flatten().collect();
    assert_eq!(
        last,
        BTreeSet::from([
            ("failing", "hold-9".to_owned()),
            ("healthy", "hold-9".to_owned())
        ])
    );
    stop(failing).await;
    stop(other).await;
}

async fn a_stopped_consumer_resumes_where_it_stopped(fixture: &dyn Fixture) {
    let topic = fixture.topic("stop").await;
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    for round in 0..3 {
        fixture
            .log()
            .publish(&[event(&topic, "one-key", round)])
            .await
            .unwrap();
        let tx = tx.clone();
        let consumer = run(fixture, "stop", &topic, move |event| {
            let tx = tx.clone();
            async move {
                tx.send(event.subject).unwrap();
                Ok(())
            }
        });
        // Committed positions may lag after a crash, never after a stop: each record is handled
        // once.
        let handled = in_time("handled", rx.recv()).await.unwrap();
        assert_eq!(handled, format!("hold-{round}"));
        stop(consumer).await;
    }
}

async fn available_records_are_handled_together_in_order(fixture: &dyn Fixture) {
    const TOGETHER: usize = 4;
    let topic = fixture.topic("together").await;
    let sent: Vec<Event> = (0..11)
        .map(|number| event(&topic, "one-key", number))
        .collect();
    fixture.log().publish(&sent).await.unwrap();
    // Subjects per call. The sixth record fails once, at any place of its batch.
    let calls = Arc::new(Mutex::new(Vec::<Vec<String>>::new()));
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let (log, token, noted) = (fixture.log(), CancellationToken::new(), calls.clone());
    let (shutdown, of_task) = (token.clone(), topic.clone());
    let task = tokio::spawn(async move {
        let handler = |events: Vec<Event>| {
            let (tx, noted) = (tx.clone(), noted.clone());
            async move {
                let subjects: Vec<String> = events.into_iter().map(|event| event.subject).collect();
                let fails = |subject: &String| {
                    subject == "hold-5" && !noted.lock().unwrap().concat().contains(subject)
                };
                let failed = subjects.iter().position(fails);
                noted.lock().unwrap().push(subjects.clone());
                for subject in &subjects[..failed.unwrap_or(subjects.len())] {
                    tx.send(subject.clone()).unwrap();
                }
                let stopped = |handled| Stopped {
                    handled,
                    error: "not now".into(),
                };
                failed.map_or(Ok(()), |handled| Err(stopped(handled)))
            }
        };
        consume_batches(log, "together", &[&of_task], TOGETHER, handler, shutdown)
            .await
            .unwrap();
    });
    let mut handled = Vec::new();
    while handled.len() < sent.len() {
        handled.push(in_time("handled", rx.recv()).await.unwrap());
    }
    let subjects: Vec<String> = sent.into_iter().map(|event| event.subject).collect();
    assert_eq!(handled, subjects);
    stop((task, token)).await;
    let calls = calls.lock().unwrap().clone();
    assert!(calls.iter().all(|call| call.len() <= TOGETHER), "{calls:?}");
    assert!(calls.iter().any(|call| call.len() > 1), "{calls:?}");
    assert!(calls.contains(&vec!["hold-5".to_owned()]), "{calls:?}");
    let left = fixture.log().backlog("together", &[&topic]).await.unwrap();
    assert!(left.is_empty(), "{left:?}");
}

/// How a batch handler ends after a shutdown request.
#[derive(Clone, Copy)]
enum Ends {
    /// All records are handled.
    Whole,
    /// This number of records is handled; the next one fails with this error.
    After(usize, fn() -> Failure),
}

async fn a_stopped_batch_resumes_after_the_handled_records(fixture: &dyn Fixture) {
    const TOGETHER: usize = 4;
    let topic = fixture.topic("middle").await;
    let sent: Vec<Event> = (0..19)
        .map(|number| event(&topic, "one-key", number))
        .collect();
    fixture.log().publish(&sent).await.unwrap();
    let subjects: Vec<String> = sent.iter().map(|event| event.subject.clone()).collect();
    let mut handled: Vec<String> = Vec::new();
    // Shutdown is requested while the handler runs. The handler then ends in each of these ways.
    for ends in [
        Ends::After(2, || "not now".into()),
        Ends::Whole,
        Ends::After(1, || RetryLater("the peer is away".into()).into()),
        Ends::After(3, || Poison("cannot be read".into()).into()),
        Ends::After(0, || "not now".into()),
    ] {
        let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
        let shutdown = CancellationToken::new();
        let (stop, handled_tx) = (shutdown.clone(), &tx);
        let handler = |events: Vec<Event>| {
            let stop = stop.clone();
            async move {
                assert!(!stop.is_cancelled(), "called again after the stop");
                stop.cancel();
                let done = match ends {
                    Ends::Whole => events.len(),
                    Ends::After(done, _) => done.min(events.len()),
                };
                for event in &events[..done] {
                    handled_tx.send(event.subject.clone()).unwrap();
                }
                match ends {
                    Ends::After(_, error) if done < events.len() => Err(Stopped {
                        handled: done,
                        error: error(),
                    }),
                    _ => Ok(()),
                }
            }
        };
        let log = fixture.log();
        let topics = [topic.as_str()];
        let consumed = consume_batches(log, "middle", &topics, TOGETHER, handler, shutdown);
        in_time("the consumer stops", consumed).await.unwrap();
        while let Ok(subject) = rx.try_recv() {
            handled.push(subject);
        }
        let left = fixture.log().backlog("middle", &topics).await.unwrap();
        let left = left.into_iter().map(|delivery| delivery.record.event);
        let left: Vec<Event> = left.collect();
        assert_eq!(
            left,
            sent[handled.len()..],
            "every handled record is committed"
        );
    }
    let letters = fixture
        .log()
        .backlog("inspector", &[&topics::dlq(&topic)])
        .await
        .unwrap();
    assert!(letters.is_empty(), "a stop creates no dead letters");
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let last = run(fixture, "middle", &topic, move |event| {
        let tx = tx.clone();
        async move {
            tx.send(event.subject).unwrap();
            Ok(())
        }
    });
    while handled.len() < sent.len() {
        handled.push(in_time("the rest", rx.recv()).await.unwrap());
    }
    stop(last).await;
    assert_eq!(handled, subjects);
}
