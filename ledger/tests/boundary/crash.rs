//! `kill -9` of a ledger during writes: acknowledged operations exist once, all others can be
//! retried, and each event is emitted once.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};

use events::{Embedded, Log, topics};
use ledger::{LedgerConfig, LedgerDeps, LedgerHandle, StoreUrl};
use proto::{
    common::v1::OperationType,
    ledger::v1::{ledger_service_client::LedgerServiceClient, *},
};
use tokio_util::sync::CancellationToken;

use crate::{harness::*, rows::Database, victim::Victim};

/// Passes the folder to the child; without it the child test does nothing.
const CHILD_FOLDER: &str = "LEDGER_TEST_CHILD_FOLDER";
/// URL of the child's rows; empty: SQLite.
const CHILD_URL: &str = "LEDGER_TEST_CHILD_URL";
/// Distinguishes this run's keys from those of earlier runs.
const CHILD_RUN: &str = "LEDGER_TEST_CHILD_RUN";
/// Number of concurrent clients; each pays the next one.
const CLIENTS: usize = 6;
/// Operations per call of a client. The calls of the first client are so large that the ledger
/// builds their response during the write.
fn operations_per_call(client: usize) -> usize {
    if client == 0 { 64 } else { 3 }
}

/// Acknowledged calls after which the process is killed, per run.
const KILLED_AFTER: [usize; 5] = [1, 7, 20, 45, 90];

struct Running {
    handle: LedgerHandle,
    log: Embedded,
    slot: rpc::LocalSlot,
    shutdown: CancellationToken,
}

impl Running {
    async fn start(store: &Store) -> Self {
        let log = Embedded::open(store.folder.join("log")).await.unwrap();
        let unknown = rpc::Channel::local(&rpc::LocalSlot::new(), "sandbox.service");
        let deps = LedgerDeps::new(Arc::new(log.clone()), unknown);
        let shutdown = CancellationToken::new();
        let handle = ledger::start(store.config(), deps, shutdown.clone());
        let handle = handle.await.unwrap();
        let slot = testkit::in_memory(handle.service().routes);
        Running {
            handle,
            log,
            slot,
            shutdown,
        }
    }

    fn client(&self) -> Client {
        LedgerServiceClient::new(rpc::Channel::local(&self.slot, "sandbox.service"))
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.slot.clear();
        self.handle.stopped().await;
        self.log.close().await;
    }
}

/// Where a ledger keeps its log and its rows.
struct Store {
    folder: PathBuf,
    url: String,
}

impl Store {
    fn config(&self) -> LedgerConfig {
        LedgerConfig {
            data_dir: self.folder.clone(),
            url: StoreUrl::new(self.url.clone()),
            ..LedgerConfig::default()
        }
    }
}

fn sub_account(client: usize) -> String {
    format!("u{client}:{RUB}")
}

/// One call of several payments, under its own key.
fn payments(key: &str, client: usize) -> CreateOperationsRequest {
    let (from, to) = (sub_account(client), sub_account((client + 1) % CLIENTS));
    let user = format!("u{client}");
    let legs: [Leg; 1] = [(&from, &to, "0.01", RUB)];
    let payment = |number| {
        let key = format!("{key}-{number}");
        item(OperationType::Payment, &user, &key, &legs)
    };
    CreateOperationsRequest {
        context: write(key),
        operations: (0..operations_per_call(client)).map(payment).collect(),
        ..Default::default()
    }
}

/// Not a test: the process that the next test kills. Prints each key before the request and after
/// the acknowledgement.
#[tokio::test(flavor = "multi_thread")]
async fn child_pays_until_killed() {
    let Ok(folder) = std::env::var(CHILD_FOLDER) else {
        return;
    };
    let run = std::env::var(CHILD_RUN).unwrap();
    let store = Store {
        folder: PathBuf::from(folder),
        url: std::env::var(CHILD_URL).unwrap(),
    };
    let ledger = Running::start(&store).await;
    for client in 0..CLIENTS {
        let legs: [Leg; 1] = [("system:reserve:CFA-RUB", &sub_account(client), "1000", RUB)];
        let (user, key) = (format!("u{client}"), format!("fund-{client}"));
        let request = operation(OperationType::Deposit, &user, &key, &legs);
        ledger.client().create_operation(request).await.unwrap();
    }
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (mut calls, run) = (ledger.client(), run.clone());
            tokio::spawn(async move {
                for number in 0.. {
                    let key = format!("run{run}-{client}-{number}");
                    println!("\nasked {key}");
                    let paid = calls.create_operations(payments(&key, client)).await;
                    paid.unwrap();
                    println!("\npaid {key}");
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
}

/// Keys that the child has printed.
#[derive(Default)]
struct Printed {
    asked: BTreeSet<String>,
    paid: BTreeSet<String>,
}

/// Runs the child until `after` more calls are acknowledged, and kills it.
fn run_and_kill(store: &Store, run: usize, after: usize, printed: &mut Printed) {
    let name = "crash::child_pays_until_killed";
    let folder = store.folder.to_str().expect("text");
    let env = [
        (CHILD_FOLDER, folder),
        (CHILD_URL, &store.url),
        (CHILD_RUN, &run.to_string()),
    ];
    let mut child = Victim::spawn(name, env);
    let target = printed.paid.len() + after;
    // Lines printed before the kill count, even if they are read after it.
    while let Some(line) = child.next_line() {
        if let Some(key) = line.strip_prefix("asked ") {
            printed.asked.insert(key.to_owned());
        } else if let Some(key) = line.strip_prefix("paid ") {
            printed.paid.insert(key.to_owned());
        }
        if printed.paid.len() >= target {
            child.kill();
        }
    }
    assert!(printed.paid.len() >= target, "run {run} ended by itself");
}

/// The client of a key.
fn client_of(key: &str) -> usize {
    key.split('-').nth(1).unwrap().parse().unwrap()
}

/// Number of creation events per operation.
async fn created_events(log: &Embedded) -> BTreeMap<String, usize> {
    let mut made = BTreeMap::new();
    for delivery in log.backlog("reader", &[topics::LEDGER]).await.unwrap() {
        let event = delivery.record.event;
        if event.short_type() == "OperationCreatedEvent" {
            *made.entry(event.subject).or_default() += 1;
        }
    }
    made
}

// rows: R248
#[tokio::test]
async fn r248_kill_9_while_groups_are_written_loses_and_doubles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::fresh().await;
    let store = Store {
        folder: folder.path().to_owned(),
        url: database.url.clone(),
    };
    let mut printed = Printed::default();
    for (run, after) in KILLED_AFTER.into_iter().enumerate() {
        run_and_kill(&store, run, after, &mut printed);
    }
    let found = ledger::verify(&store.config()).await.unwrap();
    assert_eq!(found.fault, None, "after the last kill");
    let ledger = Running::start(&store).await;
    let operations = retry(&ledger, &printed).await;
    assert_balances(&ledger, &printed).await;
    let log = ledger.log.clone();
    let made = eventually(|| async {
        let made = created_events(&log).await;
        (made.len() >= operations.len() + CLIENTS).then_some(made)
    })
    .await;
    assert_eq!(made.len(), operations.len() + CLIENTS);
    assert!(made.values().all(|times| *times == 1), "{made:?}");
    assert!(operations.iter().all(|id| made.contains_key(id)));
    drop(log);
    ledger.stop().await;
    let found = ledger::verify(&store.config()).await.unwrap();
    assert_eq!(found.fault, None);
}

/// Sends every requested call again. Returns the ids of the operations; asserts that each exists
/// once.
async fn retry(ledger: &Running, printed: &Printed) -> BTreeSet<String> {
    let mut operations = BTreeSet::new();
    for key in &printed.asked {
        let mut client = ledger.client();
        let again = client.create_operations(payments(key, client_of(key)));
        let again = again.await.unwrap().into_inner();
        if printed.paid.contains(key) {
            assert!(again.replayed, "{key} was acknowledged but is lost");
        }
        for outcome in again.outcomes {
            assert_eq!(outcome.error_message, "", "{key}");
            operations.insert(outcome.operation.unwrap().operation_id);
        }
    }
    let asked = printed
        .asked
        .iter()
        .map(|key| operations_per_call(client_of(key)));
    assert_eq!(operations.len(), asked.sum::<usize>());
    operations
}

/// Asserts each client's balance: its payments and receipts by the requested calls.
async fn assert_balances(ledger: &Running, printed: &Printed) {
    let mut minor = [100_000_i64; CLIENTS];
    for client in printed.asked.iter().map(|key| client_of(key)) {
        minor[client] -= operations_per_call(client) as i64;
        minor[(client + 1) % CLIENTS] += operations_per_call(client) as i64;
    }
    for (client, minor) in minor.into_iter().enumerate() {
        let request = GetBalanceRequest {
            subaccount_id: sub_account(client),
            ..Default::default()
        };
        let balance = ledger.client().get_balance(request).await.unwrap();
        let balance = balance.into_inner().balance.unwrap().value;
        let expected = format!("{}.{:02}", minor / 100, minor % 100);
        assert_eq!(balance, expected, "of client {client}");
    }
}
