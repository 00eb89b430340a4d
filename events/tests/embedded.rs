//! The embedded log: the contract tests, damage, and recovery after `kill -9`.

mod common;

use std::{path::Path, sync::Arc};

use async_trait::async_trait;
use common::{event, in_time, receive, victim::Victim};
use events::{Embedded, Log, embedded, topics};

struct Fixture(Embedded);

#[async_trait]
impl common::Fixture for Fixture {
    fn log(&self) -> Arc<dyn Log> {
        Arc::new(self.0.clone())
    }

    async fn topic(&self, name: &str) -> String {
        name.to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_contract_holds() {
    let folder = tempfile::tempdir().unwrap();
    common::all(&Fixture(Embedded::open(folder.path()).await.unwrap())).await;
}

// rows: R238 R239 R240 R241 R242 R243
#[tokio::test]
async fn r238_every_topic_of_the_platform_carries_events() {
    let names = [
        "platform.cfa.events.v1",
        "platform.payments.events.v1",
        "platform.market.events.v1",
        "platform.ledger.events.v1",
        "platform.identity.events.v1",
        "platform.chain.events.v1",
    ];
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    for name in names {
        assert!(topics::ALL.contains(&name), "{name}");
        log.publish(&[event(name, "k", 1)]).await.unwrap();
        let mut subscription = log.subscribe("reader", &[name]).await.unwrap();
        assert_eq!(
            receive(&mut subscription, 1).await[0].record.event,
            event(name, "k", 1)
        );
    }
}

#[tokio::test]
async fn a_subscription_to_several_topics_keeps_the_order_of_publication() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    // More than a chunk of one topic before the first record of the other.
    let sent: Vec<_> = (0..700)
        .map(|number| event(if number % 300 == 299 { "b" } else { "a" }, "k", number))
        .collect();
    log.publish(&sent).await.unwrap();
    let mut subscription = log.subscribe("g", &["b", "a"]).await.unwrap();
    let received: Vec<_> = receive(&mut subscription, 700)
        .await
        .into_iter()
        .map(|delivery| delivery.record.event)
        .collect();
    assert_eq!(received, sent);
}

#[tokio::test]
async fn the_second_member_of_a_group_takes_over_from_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    let sent: Vec<_> = (0..3).map(|number| event("t", "k", number)).collect();
    log.publish(&sent).await.unwrap();
    let mut first = log.subscribe("g", &["t"]).await.unwrap();
    let taken = receive(&mut first, 1).await;
    let mut second = log.subscribe("g", &["t"]).await.unwrap();
    let waiting = tokio::spawn(async move { receive(&mut second, 2).await });
    tokio::task::yield_now().await;
    first.commit(&taken[0].position).await.unwrap();
    drop(first);
    let rest = in_time("take over", waiting).await.unwrap();
    assert_eq!(rest[0].record.event, sent[1]);
}

#[tokio::test]
async fn the_same_event_published_again_is_in_the_log_once() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    let sent: Vec<_> = (0..3).map(|number| event("t", "k", number)).collect();
    log.publish(&sent[..2]).await.unwrap();
    log.publish(&sent).await.unwrap();
    let mut subscription = log.subscribe("g", &["t"]).await.unwrap();
    let received: Vec<_> = receive(&mut subscription, 3)
        .await
        .into_iter()
        .map(|delivery| delivery.record.event)
        .collect();
    assert_eq!(received, sent);
}

#[tokio::test]
async fn published_ids_are_known_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let sent: Vec<_> = (0..300)
        .map(|number| event(if number % 7 == 0 { "b" } else { "a" }, "k", number))
        .collect();
    let log = Embedded::open(folder.path()).await.unwrap();
    log.publish(&sent[..200]).await.unwrap();
    log.close().await;
    let log = Embedded::open(folder.path()).await.unwrap();
    log.publish(&sent[150..]).await.unwrap();
    // Another process may have written since.
    let other = Embedded::open(folder.path()).await.unwrap();
    other.publish(&[event("a", "k", 300)]).await.unwrap();
    log.publish(&[event("a", "k", 300), event("a", "k", 301)])
        .await
        .unwrap();
    let mut subscription = log.subscribe("g", &["a", "b"]).await.unwrap();
    let received: Vec<_> = receive(&mut subscription, 302)
        .await
        .into_iter()
        .map(|delivery| delivery.record.event)
        .collect();
    assert_eq!(received[..300], sent);
    assert_eq!(
        received[300..],
        [event("a", "k", 300), event("a", "k", 301)]
    );
}

#[tokio::test]
async fn a_group_resumes_within_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    let sent: Vec<_> = (0..300).map(|number| event("t", "k", number)).collect();
    log.publish(&sent).await.unwrap();
    for from in [0, 1, 100, 127, 128, 129, 299] {
        let mut subscription = log.subscribe("g", &["t"]).await.unwrap();
        let taken = receive(&mut subscription, 1).await.remove(0);
        assert_eq!(taken.record.event, sent[from]);
        let next = [1, 100, 127, 128, 129, 299, 300];
        let last = next.into_iter().find(|next| *next > from).unwrap() - 1;
        let position = events::Position {
            offset: taken.position.offset + (last - from) as i64,
            ..taken.position
        };
        subscription.commit(&position).await.unwrap();
    }
    let left = log.backlog("g", &["t"]).await.unwrap();
    assert!(left.is_empty());
}

#[tokio::test]
async fn a_damaged_row_is_an_error_that_names_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    log.publish(&[event("t", "k", 0)]).await.unwrap();
    log.close().await;
    let file = folder.path().join("log.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(file);
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    sqlx::query("UPDATE log SET records = CAST(substr(records, 1, 9) || x'ff' || substr(records, 11) AS BLOB)")
        .execute(&pool)
        .await
        .unwrap();
    pool.close().await;
    let log = Embedded::open(folder.path()).await.unwrap();
    let failed = log.backlog("g", &["t"]).await.unwrap_err().to_string();
    assert!(failed.contains("t/0@1"), "{failed}");
}

/// Folder for the child process; without it the child test does nothing.
const CHILD_FOLDER: &str = "EVENTS_TEST_CHILD_FOLDER";

/// Not a test: the process that the next test kills. Prints each number once its event is
/// acknowledged.
#[tokio::test]
async fn child_publishes_until_killed() {
    let Ok(folder) = std::env::var(CHILD_FOLDER) else {
        return;
    };
    let log = Embedded::open(Path::new(&folder)).await.unwrap();
    let mut subscription = log.subscribe("g", &["t"]).await.unwrap();
    for number in 0.. {
        log.publish(&[event("t", "k", number)]).await.unwrap();
        let taken = receive(&mut subscription, 1).await;
        subscription.commit(&taken[0].position).await.unwrap();
        println!("acknowledged {number}");
    }
}

#[tokio::test]
async fn acknowledged_events_survive_kill_9() {
    let folder = tempfile::tempdir().unwrap();
    let name = "child_publishes_until_killed";
    let mut child = Victim::spawn(name, [(CHILD_FOLDER, folder.path())]);
    let mut acknowledged = 0;
    while let Some(line) = child.next_line() {
        // The test harness may print to the same line.
        if let Some((_, number)) = line.split_once("acknowledged ") {
            acknowledged = number.parse::<usize>().unwrap();
        }
        if acknowledged == 40 {
            child.kill();
        }
    }
    assert!(acknowledged >= 40);

    let log = Embedded::open(folder.path()).await.unwrap();
    let mut all = log.subscribe("fresh", &["t"]).await.unwrap();
    for (number, delivery) in receive(&mut all, acknowledged + 1).await.iter().enumerate() {
        assert_eq!(delivery.record.event, event("t", "k", number));
    }
    // The group resumes after its last acknowledged record, which may be the last one.
    let marker = event("t", "other", usize::MAX);
    log.publish(std::slice::from_ref(&marker)).await.unwrap();
    let mut group = log.subscribe("g", &["t"]).await.unwrap();
    let next = receive(&mut group, 1).await.remove(0).record.event;
    let number = usize::from_be_bytes(next.payload.as_slice().try_into().unwrap());
    assert!(
        next == marker || number > acknowledged,
        "the group resumes at {number}, but {acknowledged} was acknowledged"
    );
}

#[tokio::test]
async fn records_beyond_an_age_are_removed_once_they_are_consumed() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    for number in 0..60 {
        log.publish(&[event("read", "k", number)]).await.unwrap();
    }
    let time_of = |number: usize| event("read", "k", number).occurred_at_us;
    assert_eq!(log.delivers_since().await.unwrap(), None, "no group");
    let mut group = log.subscribe("group", &["read"]).await.unwrap();
    let last = receive(&mut group, 40).await.pop().unwrap();
    log.commit("group", &last.position).await.unwrap();
    assert_eq!(log.delivers_since().await.unwrap(), Some(time_of(0)));

    assert_eq!(log.remove_older(time_of(0), 10).await.unwrap(), 0);
    assert_eq!(log.remove_older(time_of(30), 10).await.unwrap(), 30);
    assert_eq!(log.delivers_since().await.unwrap(), Some(time_of(30)));
    // The last 35 records of the log stay, whatever their age.
    assert_eq!(log.remove_older(time_of(60), 35).await.unwrap(), 0);
    // Those that the group has consumed, except the last.
    assert_eq!(log.remove_older(time_of(60), 10).await.unwrap(), 9);
    assert_eq!(log.delivers_since().await.unwrap(), Some(time_of(39)));
    let rest = log.backlog("group", &["read"]).await.unwrap();
    assert_eq!(rest.len(), 20);
    assert_eq!(rest[0].record.event, event("read", "k", 40));
}

#[tokio::test]
async fn dead_letters_of_other_groups_stay_after_a_replay() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    let dead = topics::dlq("read");
    for number in 0..5 {
        log.publish(&[event(&dead, "k", number)]).await.unwrap();
    }
    let letters = log.backlog("dlq-replay.one", &[&dead]).await.unwrap();
    let last = &letters.last().unwrap().position;
    log.commit("dlq-replay.one", last).await.unwrap();
    assert_eq!(log.remove_older(i64::MAX, 1).await.unwrap(), 0);
    assert_eq!(log.remove_all_but(1).await.unwrap(), 0);
    let letters = log.backlog("dlq-replay.two", &[&dead]).await.unwrap();
    assert_eq!(letters.len(), 5);
}

#[tokio::test]
async fn only_consumed_records_are_removed_and_positions_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    let publish = async |topic: &str, numbers: std::ops::Range<usize>| {
        for number in numbers {
            log.publish(&[event(topic, "k", number)]).await.unwrap();
        }
    };
    publish("read", 0..50).await;
    publish("unread", 50..60).await;
    publish("read", 60..70).await;
    let mut slow = log.subscribe("slow", &["read"]).await.unwrap();
    let mut fast = log.subscribe("fast", &["read"]).await.unwrap();
    let consume = async |group: &str, from: &mut events::Subscription, count: usize| {
        let last = receive(from, count).await.pop().unwrap();
        log.commit(group, &last.position).await.unwrap();
    };
    consume("fast", &mut fast, 60).await;
    consume("slow", &mut slow, 40).await;

    // Those that the slow group has, except the last.
    assert_eq!(log.remove_all_but(10).await.unwrap(), 39);
    assert_eq!(log.remove_all_but(10).await.unwrap(), 0);
    assert_eq!(log.backlog("new", &["read"]).await.unwrap().len(), 21);
    assert_eq!(log.backlog("slow", &["read"]).await.unwrap().len(), 20);
    assert_eq!(log.backlog("new", &["unread"]).await.unwrap().len(), 10);
    consume("slow", &mut slow, 20).await;
    // A group that has consumed nothing yet.
    let mut late = log.subscribe("late", &["read"]).await.unwrap();
    receive(&mut late, 1).await;
    assert_eq!(log.remove_all_but(15).await.unwrap(), 0);
    let rest = log.backlog("late", &["read"]).await.unwrap();
    log.commit("late", &rest.last().unwrap().position)
        .await
        .unwrap();
    // The last 15 records of all topics stay.
    assert_eq!(log.remove_all_but(15).await.unwrap(), 11);
    assert_eq!(log.backlog("new", &["read"]).await.unwrap().len(), 10);

    // Records after a removal and a restart follow the last one.
    drop((slow, fast, late));
    log.close().await;
    let log = Embedded::open(folder.path()).await.unwrap();
    log.publish(&[event("read", "k", 70)]).await.unwrap();
    let rest = log.backlog("slow", &["read"]).await.unwrap();
    assert_eq!(rest.len(), 1);
    assert_eq!(rest[0].record.event, event("read", "k", 70));
}

/// Changes the position of a group as another program.
fn set_position(folder: &Path, group: &str, topic: &str, position: i64) {
    let db = rusqlite::Connection::open(folder.join("offsets.db")).unwrap();
    let sql = "UPDATE offsets SET topic = ?2, position = ?3 WHERE consumer_group = ?1";
    let changed = db.execute(sql, (group, topic, position)).unwrap();
    assert_eq!(changed, 1);
    db.close().unwrap();
}

// rows: R188
#[tokio::test]
async fn r188_a_position_that_skips_records_or_is_of_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path()).await.unwrap();
    // Positions: 1 to 5, 6 and 7, 8.
    for (topic, numbers) in [("read", 0..5), ("other", 5..7), ("read", 7..8)] {
        for number in numbers {
            log.publish(&[event(topic, "k", number)]).await.unwrap();
        }
    }
    let mut group = log.subscribe("group", &["read"]).await.unwrap();
    let last = receive(&mut group, 3).await.pop().unwrap();
    log.commit("group", &last.position).await.unwrap();
    assert_eq!(log.remove_all_but(1).await.unwrap(), 2);
    // A group that has consumed nothing yet, of a topic without records.
    let mut late = log.subscribe("late", &["none"]).await.unwrap();
    let nothing = std::time::Duration::from_millis(20);
    let received = tokio::time::timeout(nothing, late.next()).await;
    assert!(received.is_err());
    let check = async || embedded::check_positions(folder.path()).await.unwrap();
    let sound = embedded::PositionCheck {
        positions: 2,
        findings: Vec::new(),
    };
    assert_eq!(check().await, sound, "of a running log");
    drop((group, late));
    log.close().await;

    // The last record, the last consumed one, and one that is removed, as after a power loss.
    for position in [8, 3, 1] {
        set_position(folder.path(), "group", "read", position);
        assert_eq!(check().await, sound, "{position}");
    }
    for (topic, position, fault) in [
        ("read", 9, "after the last record, 8: the group skips"),
        ("read", 6, "that of no record"),
        ("read", -1, "negative"),
        ("none at all", 1, "after the last record, 0"),
    ] {
        set_position(folder.path(), "group", topic, position);
        let found = check().await.findings;
        assert_eq!(found.len(), 1, "{topic} {position}: {found:?}");
        let named = format!("position {position} of group group in topic {topic}: is {fault}");
        assert!(found[0].starts_with(&named), "{found:?}");
    }
}
