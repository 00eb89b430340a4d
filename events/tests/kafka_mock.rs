//! The Kafka implementation on librdkafka's mock brokers: the normal paths, without an installed
//! broker. `full` runs the whole contract on a real one.

mod common;

use std::collections::HashMap;

use common::{event, take};
use events::{Kafka, Log, Record};
use rdkafka::mocking::MockCluster;

#[tokio::test(flavor = "multi_thread")]
async fn headers_keys_and_order_go_through_and_a_group_resumes() {
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
    let taken = take(&mut subscription, 21).await;
    let received: Vec<_> = taken
        .iter()
        .map(|delivery| delivery.record.event.clone())
        .collect();
    assert_eq!(received[..20], sent);
    assert_eq!(taken[20].record, with_header);
    subscription.commit(&taken[9].position).await.unwrap();
    drop(subscription);

    let mut again = kafka.subscribe("g", &["t"]).await.unwrap();
    assert_eq!(take(&mut again, 1).await[0].record.event, sent[10]);
}
