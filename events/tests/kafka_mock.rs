//! The Kafka implementation on librdkafka's mock brokers, without an installed broker. `full` runs
//! the whole contract on a real broker.

mod common;

use std::collections::HashMap;

use common::{event, in_time, receive};
use events::{Kafka, Log, Record};
use rdkafka::mocking::MockCluster;

#[tokio::test(flavor = "multi_thread")]
async fn headers_keys_and_order_are_preserved_and_a_group_resumes() {
    let cluster = MockCluster::new(3).unwrap();
    cluster.create_topic("t", 12, 3).unwrap();
    // The mock coordinator detects a leaving member only by its session timeout.
    let options = [
        ("session.timeout.ms", "3000"),
        ("heartbeat.interval.ms", "300"),
    ];
    let options = options.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let kafka = Kafka::connect(&cluster.bootstrap_servers(), &HashMap::from(options)).unwrap();
    let sent: Vec<_> = (0..20)
        .map(|number| event("t", "one-key", number))
        .collect();
    kafka.publish(&sent).await.unwrap();
    let mut with_header = Record::from(event("t", "one-key", 20));
    with_header
        .headers
        .push(("dlq_reason".into(), "because".into()));
    kafka
        .append(std::slice::from_ref(&with_header))
        .await
        .unwrap();

    let mut subscription = kafka.subscribe("g", &["t"]).await.unwrap();
    let taken = receive(&mut subscription, 21).await;
    let received: Vec<_> = taken
        .iter()
        .map(|delivery| delivery.record.event.clone())
        .collect();
    assert_eq!(received[..20], sent);
    assert_eq!(taken[20].record, with_header);
    subscription.commit(&taken[9].position).await.unwrap();
    drop(subscription);

    let mut again = kafka.subscribe("g", &["t"]).await.unwrap();
    assert_eq!(receive(&mut again, 1).await[0].record.event, sent[10]);
}

/// Unavailable brokers are not an error of the subscription: a caller would pause after each of the
/// many errors.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_waits_while_the_brokers_are_away() {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("t", 1, 1).unwrap();
    let kafka = Kafka::connect(&cluster.bootstrap_servers(), &HashMap::new()).unwrap();
    let sent = [event("t", "key", 0), event("t", "key", 1)];
    kafka.publish(&sent[..1]).await.unwrap();
    let mut subscription = kafka.subscribe("g", &["t"]).await.unwrap();
    assert_eq!(receive(&mut subscription, 1).await[0].record.event, sent[0]);

    cluster.broker_down(1).unwrap();
    let mut failing = kafka.failing();
    let away = failing.wait_for(Option::is_some);
    tokio::select! {
        found = subscription.next() => panic!("read {:?} without brokers", found.map(drop)),
        noticed = in_time("the outage is noticed", away) => drop(noticed.unwrap()),
    }
    cluster.broker_up(1).unwrap();
    let both = async { tokio::join!(kafka.publish(&sent[1..]), subscription.next()) };
    let (published, next) = in_time("the brokers are used again", both).await;
    published.unwrap();
    assert_eq!(next.unwrap().record.event, sent[1]);
}
