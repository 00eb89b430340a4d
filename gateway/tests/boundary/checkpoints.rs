//! The market after a journal truncation. Sessions, books, history and money continue from
//! checkpoints as with the whole journal.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use client::{Error, LoginOptions};
use journal::Snapshots;
use sequencer::SnapshotConfig;
use sequencer::inspect::Folder;
use sqlx::Connection;
use testkit::{PATIENCE, Registry, ServiceDoubles};
use types::{RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::sessions::{Raw, raw_login};
use crate::world::*;

const FOLDER: &str = "MARKET_CHECKPOINT_FOLDER";
/// Number of the newest messages whose records the truncated journal still has.
const KEPT: usize = 10;

/// Frequent checkpoints, and a journal that is truncated to 64 KiB.
fn truncating() -> Settings {
    Settings {
        checkpoints: Some(SnapshotConfig {
            every_commands: 20,
            every: Duration::from_millis(50),
            kept: 2,
            ..SnapshotConfig::default()
        }),
        segment_bytes: 64 << 10,
        retain_bytes: Some(64 << 10),
        ..Settings::unthrottled()
    }
}

/// Like [`truncating`], but without new checkpoints and without truncation.
fn without_truncation() -> Settings {
    Settings {
        checkpoints: None,
        retain_bytes: None,
        ..truncating()
    }
}

/// Number of the journal's first segment.
fn first_segment(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder.join("journal")).unwrap();
    let numbers = files.filter_map(|file| {
        let name = file.unwrap().file_name();
        name.to_string_lossy().strip_suffix(".log")?.parse().ok()
    });
    numbers.min().unwrap()
}

/// Trades until the journal starts after segment `beyond`. Ann's session enters orders with client
/// ids after `first_id`, which rest, trade with bob or are cancelled. Returns the session's last
/// message number.
async fn trade(world: &World, beyond: u64, first_id: u64) -> u64 {
    // Earlier messages may have been removed from window and journal.
    let options = LoginOptions {
        from_now: true,
        ..with_money("ann", "a")
    };
    let (ann, mut of_ann) = world.session(options).await;
    let (mut id, mut last) = (first_id, 0);
    let deadline = Instant::now() + PATIENCE;
    while first_segment(&world.folder) <= beyond {
        assert!(Instant::now() < deadline, "nothing is removed");
        id += 1;
        ann.send(0, wire_order(id, Side::Buy, 1_000 + id as i64 % 5, 2))
            .await
            .unwrap();
        let entered = loop {
            let report = next_numbered(&mut of_ann).await;
            last = report.sequence;
            if let ServerMessage::OrderAck(ack) = report.message {
                break ack;
            }
        };
        if id % 4 == 0 {
            world.place(sell("bob", "10", "1")).await.unwrap();
            last = next_numbered(&mut of_ann).await.sequence;
        } else if id % 7 != 0 {
            ann.send(0, cancel(entered.engine_order_id)).await.unwrap();
            last = next_numbered(&mut of_ann).await.sequence;
        }
    }
    last
}

fn cancel(engine_order_id: u64) -> wire::Cancel {
    wire::Cancel {
        engine_order_id,
        client_order_id: 0,
    }
}

/// The market's visible state.
async fn visible_state(world: &mut World) -> impl PartialEq + std::fmt::Debug + use<> {
    world.settled().await;
    let (status, book) = (world.status().await, world.book().await);
    let trades = world.trades("bob").await;
    let mut money = Vec::new();
    for user_id in ["ann", "bob"] {
        for instrument_id in ["CFA-RUB", BOND] {
            money.push(world.balance(user_id, instrument_id).await);
        }
    }
    (
        status.instruments,
        status.trades_settled,
        book,
        trades,
        money,
    )
}

async fn members(folder: &Path, settings: Settings) -> World {
    let mut world = World::with(folder, settings).await;
    world.user("ann", "1000000", "0").await;
    world.user("bob", "0", "100000").await;
    world
}

/// Every numbered message of ann's session after `after`, up to `last`.
async fn session_messages(world: &World, after: u64, last: u64) -> Vec<ServerMessage> {
    let options = LoginOptions {
        last_sequence: after,
        ..login("ann", "a")
    };
    let (_ann, mut reports) = world.session(options).await;
    let mut messages = Vec::new();
    while after + (messages.len() as u64) < last {
        let report = next_numbered(&mut reports).await;
        assert_eq!(report.sequence, after + messages.len() as u64 + 1);
        messages.push(report.message);
    }
    messages
}

#[tokio::test]
async fn a_market_with_a_truncated_journal_is_the_same_market() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), truncating()).await;
    let first = world
        .place_with("bob", "first", sell("bob", "500", "1"))
        .await
        .unwrap();
    let last = trade(&world, 6, 0).await;
    let messages = session_messages(&world, 0, last).await;
    let before = visible_state(&mut world).await;
    let mut world = world.restart(without_truncation()).await;
    assert!(first_segment(&world.folder) > 6);
    assert_eq!(visible_state(&mut world).await, before);
    // The windows ended with the process, so these messages come from the truncated journal.
    for back in [KEPT, 3] {
        let first = messages.len() - back;
        let resent = session_messages(&world, first as u64, last).await;
        assert_eq!(resent, messages[first..]);
    }

    // A key from before the truncation gets its stored answer. Its order is found and cancelled.
    let again = world
        .place_with("bob", "first", sell("bob", "500", "1"))
        .await
        .unwrap();
    assert_eq!(again.order_id, first.order_id);
    world.cancel("bob", &first.order_id).await.unwrap();
    // The session continues, and the journal is truncated further.
    let world = world.restart(truncating()).await;
    let gone = first_segment(&world.folder);
    let (ann, mut of_ann) = world
        .session(LoginOptions {
            last_sequence: last,
            ..login("ann", "a")
        })
        .await;
    ann.send(0, wire_order(9_999, Side::Buy, 100, 1))
        .await
        .unwrap();
    assert_eq!(next_numbered(&mut of_ann).await.sequence, last + 1);
    drop((ann, of_ann));
    trade(&world, gone + 2, 10_000).await;
    world.stop().await;
    // The history's position is within the journal. It is zero without a history.
    let published = gateway::published_through(&folder.path().join("gateway")).await;
    let journal = Folder::new(&folder.path().join("journal"))
        .verify()
        .unwrap();
    assert!((1..=journal.last).contains(&published.unwrap().get()));
    let nothing = gateway::published_through(&folder.path().join("none")).await;
    assert_eq!(nothing.unwrap(), types::Sequence::ZERO);
}

/// Body of the child process that is killed. Does nothing in an ordinary test run.
#[tokio::test]
async fn child_trades_and_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let world = members(Path::new(&folder), truncating()).await;
    let last = trade(&world, 4, 0).await;
    let messages = session_messages(&world, last - KEPT as u64, last).await;
    std::fs::write(Path::new(&folder).join("messages"), format!("{messages:?}")).unwrap();
    std::fs::write(Path::new(&folder).join("last"), last.to_string()).unwrap();
    // The registry's double dies with this process, so no call to it may be in flight.
    world.settled().await;
    std::process::abort();
}

#[tokio::test]
async fn a_killed_market_continues_with_a_truncated_journal() {
    let folder = tempfile::tempdir().unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "checkpoints::child_trades_and_is_killed",
            "--exact",
            "--nocapture",
        ])
        .env(FOLDER, folder.path())
        .status()
        .unwrap();
    assert!(!status.success(), "the child is killed");
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let last: u64 = read("last").parse().unwrap();
    let (identity, registry) =
        <(std::sync::Arc<ServiceDoubles>, std::sync::Arc<Registry>)>::default();
    identity.upsert_user("ann", |_| {});
    identity.upsert_user("bob", |_| {});
    registry.list(bond(BOND));
    let mut world = World::start(folder.path(), without_truncation(), identity, registry).await;
    assert!(first_segment(&world.folder) > 4);
    world.settled().await;
    let messages = session_messages(&world, last - KEPT as u64, last).await;
    assert_eq!(format!("{messages:?}"), read("messages"));
    // Each trade is settled once: the sum of both positions is unchanged.
    let bought = world.balance("ann", BOND).await.0.parse::<u64>().unwrap();
    let left = world.balance("bob", BOND).await.0.parse::<u64>().unwrap();
    assert_eq!(bought + left, 100_000);
    let trades = world.status().await.instruments[0].trades;
    assert_eq!(
        (bought, world.status().await.trades_settled),
        (trades, trades)
    );
    world.stop().await;
}

/// A client that resumes before the oldest available message gets MESSAGES_REMOVED.
#[tokio::test]
async fn r343_a_client_that_lacks_removed_messages_gets_messages_removed() {
    const ORDERS: u64 = 9_000;
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), truncating()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    for id in 1..=ORDERS {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
        ann.send(0, cancel_own(id)).await.unwrap();
    }
    until(&mut of_ann, |m| match m {
        ServerMessage::Cancelled(c) if c.client_seq == 2 * ORDERS => Some(()),
        _ => None,
    })
    .await;
    let deadline = Instant::now() + PATIENCE;
    // A segment is removed only if two checkpoints follow it and settlement is past it. Further
    // trades cause both.
    world.user("carl", "1000000", "0").await;
    while first_segment(&world.folder) == 1 {
        assert!(Instant::now() < deadline, "nothing is removed");
        world.place(sell("bob", "20", "1")).await.unwrap();
        world.place(buy("carl", "20", "1")).await.unwrap();
    }
    cut(&ann, &mut of_ann).await;
    // The closing connection may lose the code: the client logs in again.
    let mut refused = None;
    for _ in 0..10 {
        let (connection, mut reports) = world.connect().await;
        let answered = connection.login(0, login("ann", "a"));
        refused = match in_time("the login is answered", answered).await {
            Ok(_) => {
                let code = until(&mut reports, |m| match m {
                    ServerMessage::Disconnect(end) => DisconnectCode::from_code(end.code),
                    _ => None,
                });
                Some(code.await)
            }
            Err(Error::Disconnected { code, .. }) => code,
            Err(Error::Stream) => continue,
            Err(other) => panic!("{other:?}"),
        };
        break;
    }
    let refused = refused.expect("an answered login");
    assert_eq!(refused, DisconnectCode::MessagesRemoved);
    // A login from now on is accepted.
    let options = LoginOptions {
        from_now: true,
        ..login("ann", "a")
    };
    let (ann, mut of_ann) = world.session(options).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    assert_eq!(next_numbered(&mut of_ann).await.sequence, 2 * ORDERS + 1);
    world.stop().await;
}

/// The rows of commands that the journal no longer has are counted, and open orders compared.
// rows: R188
#[tokio::test]
async fn r188_the_history_is_compared_with_a_truncated_journal() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), truncating()).await;
    world.place(sell("bob", "500", "1")).await.unwrap();
    trade(&world, 1, 0).await;
    world.settled().await;
    world.stop().await;
    let config = gateway::GatewayConfig {
        data_dir: folder.path().join("gateway"),
        ..gateway::GatewayConfig::default()
    };
    let journal = folder.path().join("journal");
    let verified = gateway::verify_history(&config, &journal).await.unwrap();
    assert_eq!(verified.findings, Vec::<String>::new());
    let is_removed = |text: &&String| text.ends_with("which the journal no longer has");
    let removed = verified.not_compared.iter().filter(is_removed).count();
    assert!(removed > 0, "{:?}", verified.not_compared);

    // The first order is open since before the journal's beginning.
    let store = config.data_dir.join("market.db");
    let url = format!("sqlite://{}", store.display());
    let mut db = sqlx::SqliteConnection::connect(&url).await.unwrap();
    let alter = "UPDATE orders SET quantity = quantity + 1 \
         WHERE sequence = (SELECT MIN(sequence) FROM orders)";
    sqlx::query(alter).execute(&mut db).await.unwrap();
    db.close().await.unwrap();
    let verified = gateway::verify_history(&config, &journal).await.unwrap();
    assert_eq!(verified.findings.len(), 1, "{:?}", verified.findings);
    let found = &verified.findings[0];
    assert!(
        found.starts_with("orders ") && found.ends_with(": changed"),
        "{found}"
    );
}

/// Of requests that are resent together, those that the journal still has get their first answers.
/// Only the others get ALREADY_SEEN.
#[tokio::test]
async fn r343_an_answer_that_has_left_the_journal_affects_no_other() {
    const ORDERS: u64 = 25_000;
    let folder = tempfile::tempdir().unwrap();
    let whole = Settings {
        retain_bytes: None,
        ..truncating()
    };
    let world = members(folder.path(), whole).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    for id in 1..=ORDERS {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
        ann.send(0, cancel_own(id)).await.unwrap();
        // A client that sends everything before it reads is disconnected as a slow consumer.
        if id % 1_000 == 0 {
            until(&mut of_ann, |m| match m {
                ServerMessage::Cancelled(c) if c.client_seq == 2 * id => Some(()),
                _ => None,
            })
            .await;
        }
    }
    drop((ann, of_ann));
    // The kept part of the journal starts after the first requests and before the window. A file is
    // gone if the journal, which runs, has just renamed its next segment.
    let bytes: u64 = std::fs::read_dir(folder.path().join("journal"))
        .unwrap()
        .filter_map(|file| file.unwrap().metadata().ok())
        .filter(std::fs::Metadata::is_file)
        .map(|file| file.len())
        .sum();
    let kept = Settings {
        retain_bytes: Some(bytes * 2 / 5),
        ..truncating()
    };
    let world = world.restart(kept).await;
    let options = LoginOptions {
        from_now: true,
        ..login("ann", "a")
    };
    let (ann, mut of_ann) = world.session(options).await;
    let deadline = Instant::now() + PATIENCE;
    let mut id = ORDERS;
    while first_segment(&world.folder) == 1 {
        assert!(Instant::now() < deadline, "nothing is removed");
        // A new checkpoint needs a new command. Each command takes a whole block, so too many of
        // them would push out the rest.
        if id < ORDERS + 20 {
            id += 1;
            ann.send(0, wire_order(id, Side::Buy, 100, 1))
                .await
                .unwrap();
            next_numbered(&mut of_ann).await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    drop((ann, of_ann));
    // A stop completes a removal that has started. Nothing is removed after it.
    let world = world.restart(without_truncation()).await;
    // The kept part is readable from its oldest checkpoint. The sequence of a request's record is
    // at least its client sequence, so the record of request `kept` is after the checkpoint.
    let dir = world.folder.join("journal");
    let first = Folder::new(&dir).first().unwrap();
    let states = Snapshots::new(&dir.join("snapshots")).sequences().unwrap();
    let mut usable = states.into_iter().filter(|at| at + 1 >= first);
    let kept = usable.next().expect("a checkpoint of the kept part") + 1;
    assert!(kept < 2 * ORDERS - 16_500, "{kept} is in the window");

    let mut raw = Raw::connect(&world).await;
    let now = wire::Login {
        flags: wire::LOGIN_FROM_NOW,
        ..raw_login("ann", "a", 0)
    };
    raw.login(0, now).await;
    for again in [1, kept, 2, kept + 1] {
        raw.send(0, again, wire_order(again, Side::Buy, 100, 1))
            .await;
    }
    let mut answers = std::collections::BTreeMap::new();
    while answers.len() < 4 {
        let (header, message) = raw.next_with_heartbeats().await;
        match message {
            ServerMessage::OrderAck(ack) => {
                answers.insert(ack.client_seq, header.sequence);
            }
            ServerMessage::Cancelled(cancelled) => {
                answers.insert(cancelled.client_seq, header.sequence);
            }
            ServerMessage::Rejected(rejected) => {
                assert_eq!(rejected.reason, RejectReason::AlreadySeen);
                answers.insert(rejected.client_seq, header.sequence);
            }
            _ => {}
        }
    }
    let expected = [(1, 0), (2, 0), (kept, kept), (kept + 1, kept + 1)];
    assert_eq!(answers, expected.into());
    world.stop().await;
}

/// Cancels the order with a client order id.
pub fn cancel_own(client_order_id: u64) -> wire::Cancel {
    wire::Cancel {
        engine_order_id: 0,
        client_order_id,
    }
}
