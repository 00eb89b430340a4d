//! Several ledgers on one database, also while their connections are killed.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use prost::Message;
use proto::{common::v1::OperationType, ledger::v1::*};
use rand::{Rng, SeedableRng, rngs::StdRng};
use testkit::messages::approved;
use tokio::task::JoinSet;
use tonic::Code;

use crate::{harness::*, rows::audit};

const HOT: usize = 10;
const EACH: &str = "1000";

async fn fund_hot(world: &World) {
    for user in 0..HOT {
        world.fund(&format!("hot{user}"), RUB, EACH).await;
    }
}

/// Results of the writers' calls.
#[derive(Default)]
struct Tally {
    operations: usize,
    holds: usize,
    consumed: usize,
    refused: usize,
}

/// Runs one writer: it transfers between hot sub-accounts, opens holds on them, consumes parts of
/// those holds, and repeats some calls under their key.
async fn writer(mut client: Client, seed: u64, steps: usize) -> Tally {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut tally = Tally::default();
    let refused = |status: tonic::Status| {
        assert_eq!(
            status.code(),
            Code::FailedPrecondition,
            "seed {seed}: {status}"
        );
        assert_eq!(status.message(), "Insufficient balance", "seed {seed}");
    };
    for step in 0..steps {
        let key = format!("w{seed}-{step}");
        let from = rng.random_range(0..HOT);
        let to = (from + rng.random_range(1..HOT)) % HOT;
        let value = rng.random_range(1..200).to_string();
        if rng.random_bool(0.7) {
            let legs: [Leg; 1] = [(
                &format!("hot{from}:{RUB}"),
                &format!("hot{to}:{RUB}"),
                &value,
                RUB,
            )];
            let request = operation(OperationType::Payment, &format!("hot{from}"), &key, &legs);
            match client.create_operation(approved(request.clone())).await {
                Ok(_) => tally.operations += 1,
                Err(status) => {
                    refused(status);
                    tally.refused += 1;
                    continue;
                }
            }
            if rng.random_bool(0.2) {
                let again = client.create_operation(approved(request)).await;
                assert!(is_replay(&again.unwrap()));
            }
            continue;
        }
        let request = CreateHoldRequest {
            context: write(&key),
            hold: Some(new_hold(&format!("hot{from}"), RUB, &value)),
        };
        let hold = match client.create_hold(request).await {
            Ok(answer) => answer.into_inner().hold.unwrap(),
            Err(status) => {
                refused(status);
                tally.refused += 1;
                continue;
            }
        };
        tally.holds += 1;
        let request = ConsumeHoldRequest {
            context: write(&key),
            hold_id: hold.hold_id.clone(),
            amount: amount(RUB, "1"),
            ..Default::default()
        };
        client.consume_hold(approved(request)).await.unwrap();
        tally.consumed += 1;
        if rng.random_bool(0.8) && value != "1" {
            let request = ReleaseHoldRequest {
                context: write(&key),
                hold_id: hold.hold_id,
                reason: "test".to_owned(),
            };
            client.release_hold(request).await.unwrap();
        }
    }
    tally
}

/// Runs a writer per seed on both ledgers and adds their results. Half of the writers make approved
/// calls of persons, which have audit records.
async fn run_writers(worlds: [&World; 2], seeds: Range<u64>, steps: usize, all: &mut Tally) {
    let mut tasks = JoinSet::new();
    for seed in seeds {
        let world = worlds[(seed % 2) as usize];
        let client = match seed / 2 % 2 {
            0 => world.client.clone(),
            _ => world.as_caller(testkit::APPROVED),
        };
        tasks.spawn(writer(client, seed, steps));
    }
    while let Some(tally) = tasks.join_next().await {
        let tally = tally.unwrap();
        all.operations += tally.operations;
        all.holds += tally.holds;
        all.consumed += tally.consumed;
        all.refused += tally.refused;
    }
}

async fn assert_nothing_lost_or_twice(world: &World, all: &Tally) {
    let rows = world.rows().await;
    audit(&rows, "after the writers").await;
    let count = rows
        .texts("SELECT COUNT(*)::text FROM operations WHERE idempotency_key LIKE 'w%' AND kind = 4")
        .await;
    assert_eq!(count, [all.operations.to_string()]);
    let count = rows.texts("SELECT COUNT(*)::text FROM holds").await;
    assert_eq!(count, [all.holds.to_string()]);
    let sums = rows.texts("SELECT SUM(consumed)::text FROM holds").await;
    assert_eq!(sums, [(all.consumed * 100).to_string()]);
    let twice = "SELECT object_id FROM audit_records WHERE action IN ('operation.created', 'hold.created') \
         GROUP BY object_id HAVING COUNT(*) > 1";
    let none: [&str; 0] = [];
    assert_eq!(rows.texts(twice).await, none, "recorded twice");
    rows.close().await;
    world.assert_books_balance().await;
    // One chain of blocks and one of audit records for both ledgers.
    let found = ledger::verify(&world.config()).await.unwrap();
    assert_eq!(found.fault, None);
    assert!(found.audit_records > 0);
    assert!(found.operations >= all.operations as u64);
}

/// Asserts that each event occurs once, and that the balances of each sub-account form a gapless
/// chain: the events of a key are in commit order.
async fn assert_events_are_a_chain(watch: &mut Watch, world: &World) {
    world.fund("last", RUB, "1").await;
    let seen = watch
        .until(|event| {
            event.short_type() == "BalanceUpdatedEvent" && event.subject.starts_with("last")
        })
        .await;
    let ids: BTreeSet<_> = seen.iter().map(|event| event.id).collect();
    assert_eq!(ids.len(), seen.len(), "an event was published twice");
    let mut balances = BTreeMap::<String, String>::new();
    for event in seen
        .iter()
        .filter(|event| event.short_type() == "BalanceUpdatedEvent")
    {
        let update = BalanceUpdatedEvent::decode(event.payload.as_slice()).unwrap();
        let (old, new) = (
            update.old_balance.unwrap().value,
            update.new_balance.unwrap().value,
        );
        let before = balances.insert(update.subaccount_id.clone(), new);
        assert!(
            before.is_none_or(|before| before == old),
            "{}",
            update.subaccount_id
        );
    }
    for (subaccount, balance) in balances {
        assert_eq!(world.balance(&subaccount).await[0], balance, "{subaccount}");
    }
}

// rows: R214 R237 R248
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_fifty_writers_on_ten_hot_sub_accounts_through_two_ledgers() {
    let world = World::new().await;
    let mut watch = world.watch().await;
    let second = world.second().await;
    fund_hot(&world).await;
    let mut all = Tally::default();
    run_writers([&world, &second], 0..50, 20, &mut all).await;
    assert!(
        all.operations > 100 && all.holds > 50,
        "the writers made too few operations or holds"
    );
    assert_nothing_lost_or_twice(&second, &all).await;
    assert_events_are_a_chain(&mut watch, &world).await;
}

// rows: R200 R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_parts_of_one_hold_consumed_at_once_through_two_ledgers() {
    let world = World::new().await;
    let second = world.second().await;
    world.fund("u1", RUB, "100").await;
    let hold = world.hold("u1", RUB, "100").await;
    let mut tasks = JoinSet::new();
    for n in 0..150 {
        let mut client = [&world, &second][n % 2].client.clone();
        let request = ConsumeHoldRequest {
            context: write(&format!("c{n}")),
            hold_id: hold.hold_id.clone(),
            amount: amount(RUB, "1"),
            ..Default::default()
        };
        tasks.spawn(async move { client.consume_hold(request).await });
    }
    let mut consumed = 0;
    while let Some(answer) = tasks.join_next().await {
        match answer.unwrap() {
            Ok(_) => consumed += 1,
            Err(status) => assert_eq!(status.message(), "Hold is not active"),
        }
    }
    assert_eq!(consumed, 100);
    assert_eq!(
        world.get_hold(&hold.hold_id).await.status(),
        HoldStatus::Consumed
    );
    world.assert_books_balance().await;
}

// rows: R195 R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_one_key_through_two_ledgers_acts_once() {
    let world = World::new().await;
    let second = world.second().await;
    for round in 0..20 {
        // The user is new, so both ledgers try to create accounts, sub-accounts and the operation.
        let user = format!("new{round}");
        let to = format!("{user}:{RUB}");
        let legs: [Leg; 1] = [("system:reserve:CFA-RUB", &to, "5", RUB)];
        let request = operation(OperationType::Deposit, &user, "key", &legs);
        let (mut first, mut other) = (world.client.clone(), second.client.clone());
        let (one, two) = tokio::join!(
            first.create_operation(request.clone()),
            other.create_operation(request)
        );
        let (one, two) = (one.unwrap(), two.unwrap());
        assert!(
            is_replay(&one) != is_replay(&two),
            "exactly one is a replay"
        );
        assert_eq!(
            one.into_inner().operation.unwrap().operation_id,
            two.into_inner().operation.unwrap().operation_id
        );
        assert_eq!(world.balance(&to).await[0], "5.00");
    }
    world.assert_books_balance().await;
}

/// Minimum sessions that the test kills, and maximum rounds of writers until then.
const KILLED_MIN: i64 = 11;
const ROUNDS_MAX: u64 = 50;

/// Kills sessions of the ledgers until `stop`; counts them.
async fn kill_sessions(
    world: &World,
    killed: &AtomicI64,
    stop: &tokio_util::sync::CancellationToken,
) {
    let rows = world.rows().await;
    let mut rng = StdRng::seed_from_u64(7);
    let mut seen = Vec::new();
    while !stop.is_cancelled() {
        tokio::time::sleep(Duration::from_millis(rng.random_range(3..40))).await;
        // On a busy machine the ledgers need time to write between two kills.
        let sql = "SELECT COUNT(*)::text FROM audit_blocks";
        let blocks = rows.texts(sql).await;
        if std::mem::replace(&mut seen, blocks.clone()) == blocks && rng.random_bool(0.9) {
            continue;
        }
        // Mostly sessions in a transaction, at times all sessions.
        let condition = match rng.random_range(0..4) {
            0 => "true",
            1 => "query = 'COMMIT'",
            _ => "xact_start IS NOT NULL",
        };
        let count = world.database.terminate(condition).await;
        killed.fetch_add(count, Ordering::SeqCst);
    }
    rows.close().await;
}

// rows: R214 R237 R248
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r214_connections_killed_while_writers_write_lose_nothing() {
    let world = Arc::new(World::new().await);
    let mut watch = world.watch().await;
    let second = world.second().await;
    fund_hot(&world).await;
    let killed = Arc::new(AtomicI64::new(0));
    let stop = tokio_util::sync::CancellationToken::new();
    let saboteur = tokio::spawn({
        let (world, killed, stop) = (world.clone(), killed.clone(), stop.clone());
        async move { kill_sessions(&world, &killed, &stop).await }
    });
    // Fast writers end before enough sessions are killed, so further rounds follow.
    let mut all = Tally::default();
    for round in 0.. {
        let killed = killed.load(Ordering::SeqCst);
        if round > 0 && killed >= KILLED_MIN {
            break;
        }
        assert!(round < ROUNDS_MAX, "only {killed} sessions were killed");
        run_writers([&world, &second], round * 20..round * 20 + 20, 20, &mut all).await;
    }
    stop.cancel();
    saboteur.await.unwrap();
    assert_nothing_lost_or_twice(&world, &all).await;
    // The relay publishes a batch again if the kill prevented its deletion. The log deduplicates by
    // event id.
    assert_events_are_a_chain(&mut watch, &world).await;
}
