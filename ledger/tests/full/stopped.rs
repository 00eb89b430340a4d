//! Servers that stop or are killed while a ledger runs. Each test starts its own server.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use events::{Kafka, topics};
use proto::{common::v1::OperationType, identity::v1::UserCreatedEvent, ledger::v1::*};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::{
    harness::*,
    rows::{Database, audit},
    server::Server,
};

async fn over_broker(broker: &Server) -> World {
    let kafka = Kafka::connect(&broker.address, &HashMap::new()).unwrap();
    kafka.ensure_topics().await.unwrap();
    let requests = ledger::request_and_reply_topics();
    kafka.create_topics(&requests).await.unwrap();
    World::on_log(Arc::new(kafka)).await
}

async fn until_known(world: &World, user: &str) {
    let request = GetSubAccountRequest {
        subaccount_id: format!("{user}:{RUB}"),
        ..Default::default()
    };
    let known = async || {
        let found = world.client.clone().get_sub_account(request.clone()).await;
        found.ok()
    };
    eventually(known).await;
}

async fn publish_user(world: &World, user: &str) {
    let created = UserCreatedEvent {
        user_id: user.to_owned(),
        ..Default::default()
    };
    let name = "dfa.identity.v1.UserCreatedEvent";
    world.publish(topics::IDENTITY, name, user, &created).await;
}

/// Ids of the holds in the order of their events; `None` if no broker answers. After a kill an
/// event may be in the log twice; its repeat is dropped.
async fn published_holds(world: &World) -> Option<Vec<String>> {
    let published = world.log.backlog(&fresh(), &[topics::LEDGER]).await.ok()?;
    let published = published.into_iter().map(|delivery| delivery.record.event);
    let published = published.filter(|event| event.short_type() == "HoldCreatedEvent");
    let mut published: Vec<String> = published.map(|event| event.subject).collect();
    published.dedup();
    Some(published)
}

/// Holds do not wait for the broker; events in both directions wait for it.
// rows: R213 R248 R336
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r213_holds_work_while_the_broker_is_stopped_or_killed_and_their_events_follow() {
    let broker = Server::kafka();
    let world = over_broker(&broker).await;
    let health = world.handle.service().health;
    world.fund("u1", RUB, "100").await;
    publish_user(&world, "before").await;
    until_known(&world, "before").await;
    let mut holds = Vec::new();
    for (end, held) in [
        (Server::stop as fn(&Server), "40.00"),
        (Server::kill as fn(&Server), "80.00"),
    ] {
        end(&broker);
        let hold = world.hold("u1", RUB, "40").await;
        assert_eq!(world.balance("u1:CFA-RUB").await[1], held);
        let reason = eventually(async || health.failing().remove("events")).await;
        assert_eq!(reason, "all brokers are down");
        broker.start_again();
        holds.push(hold.hold_id);
        eventually(async || (published_holds(&world).await? == holds).then_some(())).await;
        let user = format!("after-{held}");
        publish_user(&world, &user).await;
        until_known(&world, &user).await;
        eventually(async || health.failing().is_empty().then_some(())).await;
    }
}

/// Pays until `stop` and returns the number of payments. Each payment is repeated under its key
/// until it is acknowledged.
async fn pay_until(
    mut client: Client,
    payer: usize,
    paid: Arc<AtomicUsize>,
    stop: CancellationToken,
) -> usize {
    let mut own = 0;
    while !stop.is_cancelled() {
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "0.01", RUB)];
        let request = operation(
            OperationType::Payment,
            "u1",
            &format!("{payer}-{own}"),
            &legs,
        );
        while let Err(status) = client.create_operation(request.clone()).await {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        own += 1;
        paid.fetch_add(1, Ordering::SeqCst);
    }
    own
}

// rows: R214 R248
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r214_a_killed_database_server_loses_and_doubles_nothing() {
    const PAYERS: usize = 4;
    let server = Server::postgres();
    let world = World::on(Database::on(server.address.clone()).await, None).await;
    world.fund("u1", RUB, "1000").await;
    let (paid, stop) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
    let mut payers = JoinSet::new();
    for payer in 0..PAYERS {
        let client = world.client.clone();
        payers.spawn(pay_until(client, payer, paid.clone(), stop.clone()));
    }
    let more = async |count: usize| {
        let due = paid.load(Ordering::SeqCst) + count;
        eventually(async || (paid.load(Ordering::SeqCst) >= due).then_some(())).await;
    };
    for _ in 0..3 {
        more(40).await;
        server.kill();
        server.start_again();
    }
    more(40).await;
    stop.cancel();
    let joined = tokio::time::timeout(PATIENCE, payers.join_all()).await;
    let total: usize = joined.expect("the payers stop").into_iter().sum();

    let left = types::Decimal::from_minor(100_000 - i64::try_from(total).unwrap(), 2);
    let [balance, ..] = world.balance("u1:CFA-RUB").await;
    assert_eq!(balance.parse::<types::Decimal>().unwrap(), left);
    let rows = world.rows().await;
    audit(&rows, "after the kills").await;
    let made = "SELECT COUNT(*)::text FROM operations WHERE kind = 4";
    assert_eq!(rows.texts(made).await, [total.to_string()]);
    rows.close().await;
    let found = ledger::verify(&world.config()).await.unwrap();
    assert_eq!(found.fault, None);
    world.assert_books_balance().await;
    let mut watch = world.watch().await;
    world.fund("last", RUB, "1").await;
    let is_last = |event: &events::Event| event.subject.starts_with("last:");
    let seen = watch.until(is_last).await;
    let made = seen
        .iter()
        .filter(|event| event.short_type() == "OperationCreatedEvent");
    let made: Vec<_> = made.map(|event| event.id).collect();
    let once: BTreeSet<_> = made.iter().collect();
    // The payments and two deposits.
    assert_eq!((made.len(), once.len()), (total + 2, total + 2));
}
