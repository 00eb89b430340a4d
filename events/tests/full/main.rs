//! The contract tests on a real Kafka broker and a real PostgreSQL. `cargo test` skips them. Run
//! `tests/services/kafka.sh start` and `tests/services/postgres.sh start`, then
//! `KAFKA_BROKERS=<printed address> POSTGRES_URL=<printed URL> cargo test -p events --test full`.

#[path = "../common/mod.rs"]
mod common;
mod postgres;
#[path = "../../../tests/services/server.rs"]
mod server;

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use events::{Kafka, Log, topics};
use uuid::Uuid;

struct Fixture {
    kafka: Kafka,
    /// Distinguishes topics and groups from those of earlier runs on the broker.
    run: Uuid,
}

#[async_trait]
impl common::Fixture for Fixture {
    fn log(&self) -> Arc<dyn Log> {
        Arc::new(self.kafka.clone())
    }

    async fn topic(&self, name: &str) -> String {
        let topic = format!("test.{}.{name}", self.run);
        let both = [topic.clone(), topics::dlq(&topic)];
        self.kafka.create_topics(&both).await.unwrap();
        topic
    }
}

fn kafka() -> Kafka {
    let brokers = std::env::var("KAFKA_BROKERS")
        .expect("KAFKA_BROKERS is not set: run `tests/services/kafka.sh start` and pass the printed address");
    Kafka::connect(&brokers, &HashMap::new()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_contract_holds_on_kafka() {
    let fixture = Fixture {
        kafka: kafka(),
        run: Uuid::now_v7(),
    };
    common::all(&fixture).await;
}

// rows: R238 R239 R240 R241 R242 R243
#[tokio::test(flavor = "multi_thread")]
async fn r238_the_platforms_topics_exist_after_ensure_topics() {
    let kafka = kafka();
    kafka.ensure_topics().await.unwrap();
    // The second call finds them all.
    kafka.ensure_topics().await.unwrap();
    for topic in topics::ALL {
        kafka
            .publish(&[common::event(topic, "k", 1)])
            .await
            .unwrap();
        let group = format!("reader-{}", Uuid::now_v7());
        let mut subscription = kafka.subscribe(&group, &[topic]).await.unwrap();
        // A long-lived broker may have records of earlier runs.
        while common::receive(&mut subscription, 1).await[0].record.event
            != common::event(topic, "k", 1)
        {}
    }
}
