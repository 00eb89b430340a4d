//! Start, stop and restart; demonstration and replay; the commands of the README.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use tests::call::{AUDITOR, number, text};
use tests::member::Terminal;
use tests::process::{LISTENERS, Platform};
use tests::shared::{platform, run};
use tests::world::User;
use types::{Decimal, NodeId, Sequence, Side, derived};

#[test]
fn an_interrupted_start_exits_cleanly() {
    run(async { assert_eq!(Platform::interrupted_start().await, Some(0)) });
}

/// Runs in an empty folder, without configuration, home folder or PATH.
// rows: R349 R261
#[test]
fn r349_one_command_starts_everything_with_its_doubles() {
    run(async {
        let nothing_else = [("PATH", ""), ("HOME", "/nonexistent")];
        let mut platform = Platform::start_with(&nothing_else).await;
        let config = platform.folder().join("platform.toml");
        assert!(!config.exists(), "{}", config.display());
        for listener in LISTENERS
            .into_iter()
            .filter(|name| !matches!(*name, "trading" | "chain_rpc"))
        {
            let (status, body) = platform.get(listener, "/health", "").await;
            assert_eq!(
                (listener, status, body),
                (listener, 200, json!({ "status": "ok" }))
            );
        }
        for listener in LISTENERS
            .into_iter()
            .filter(|name| !matches!(*name, "trading" | "chain_rpc" | "bank"))
        {
            assert_eq!(
                platform.get(listener, "/livez", "").await.0,
                200,
                "{listener}"
            );
            assert_eq!(
                platform.get(listener, "/readyz", "").await.0,
                200,
                "{listener}"
            );
            let (status, metrics) = platform.get(listener, "/metrics", "").await;
            assert!(
                status == 200 && metrics.as_str().is_some_and(|text| text.contains("# TYPE")),
                "{listener}: {metrics}"
            );
        }
        assert_index_on_every_http_port(&platform).await;
        let request =
            json!({ "jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber", "params": [] });
        let answer = tests::process::client()
            .post(platform.url("chain_rpc"))
            .json(&request)
            .send()
            .await;
        let answer: Value = answer.expect("an answer").json().await.expect("JSON");
        assert!(
            answer["result"]
                .as_str()
                .is_some_and(|number| number.starts_with("0x")),
            "{answer}"
        );
        // A user, a payment and an order show that identity, bank, chain and market work.
        let (user, bond) = (platform.rich("10.00").await, platform.bond().await);
        let mut terminal = Terminal::open(&platform, &user, &bond).await;
        platform.trading_hold(&user, "CFA-RUB", "5.00").await;
        terminal.acknowledged(1, Side::Buy, 100, 1).await;
        platform.proof().await;
        platform.stop().await;
    });
}

/// Asserts that `GET /` lists protocols and services without a credential.
async fn assert_index_on_every_http_port(platform: &Platform) {
    for listener in LISTENERS.into_iter().filter(|name| *name != "trading") {
        let (status, index) = platform.get(listener, "/", "").await;
        assert_eq!((listener, status), (listener, 200), "{index}");
        assert_eq!(
            index["server"],
            json!("digital financial assets platform"),
            "{listener}: {index}"
        );
        for list in ["protocols", "services"] {
            let is_named = |names: &Vec<Value>| names.iter().any(Value::is_string);
            assert!(
                index[list].as_array().is_some_and(is_named),
                "{listener}: {index}"
            );
        }
    }
}

// rows: R349 R350
#[test]
fn r350_the_demonstration_tells_its_story_and_everything_balances() {
    run(async {
        let platform = platform().await;
        let demo = platform.cli(&["--json", "demo"]).await;
        assert!(demo.status.success(), "{demo:?}");
        let summary = demo.json();
        assert_eq!(summary["reconciliation"], json!("Balanced"), "{summary}");
        assert_eq!(summary["proof"], json!("ok"), "{summary}");
        let steps = summary["steps"].as_array().map_or(0, Vec::len);
        assert!(steps > 10, "{summary}");
        let printed = platform.cli(&["demo"]).await.success();
        // Human-readable output has a line with the number of each step.
        for number in 1..=steps {
            let begins = format!("{number:>3}  ");
            let is_printed = printed.stdout.lines().any(|line| line.starts_with(&begins));
            assert!(is_printed, "no step {number}: {}", printed.stdout);
        }
        assert!(
            printed.stdout.contains("reconciliation Balanced, proof ok"),
            "{}",
            printed.stdout
        );

        let proof = platform.proof().await;
        let rub = proof["instruments"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|one| one["instrument_id"] == json!("CFA-RUB"));
        let rub = rub.expect("CFA-RUB is proved");
        assert_eq!(
            number(&rub["chain_supply"]),
            number(&rub["ledger_supply"]),
            "{rub}"
        );
    });
}

#[test]
fn a_replay_of_made_up_flow_settles_every_trade_and_is_proved() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let args = ["--json", "replay", "--synthetic", "7", "--rows", "1000"];
        let replay = tests::process::run(folder.path(), &args).await;
        assert!(replay.status.success(), "{replay:?}");
        let report = replay.json();
        assert_eq!(report["proof"], json!("ok"), "{report}");
        assert_eq!(report["rows"], json!(1_000), "{report}");
        assert_eq!(report["trades"], report["trades_expected"], "{report}");
        assert_eq!(report["trades_settled"], report["trades"], "{report}");
        assert_eq!(
            report["same_maker"], report["same_maker_expected"],
            "{report}"
        );
        assert!(
            report["trades"].as_u64().is_some_and(|trades| trades > 20),
            "{report}"
        );
    });
}

#[test]
fn a_replay_leaves_no_open_order_behind() {
    run(async {
        let platform = platform().await;
        let args = ["replay", "--json", "--synthetic", "7", "--rows", "400"];
        let replay = platform.cli(&args).await;
        assert!(replay.status.success(), "{replay:?}");
        let instrument = &replay.json()["instrument"];
        let book = platform
            .ok(
                AUDITOR,
                "market.GetOrderBook",
                json!({ "instrumentId": instrument }),
            )
            .await;
        assert_eq!(&book["snapshot"]["instrumentId"], instrument, "{book}");
        // A side without levels is omitted from the JSON.
        for side in ["bids", "asks"] {
            let levels = book["snapshot"][side].as_array();
            assert!(levels.is_none_or(Vec::is_empty), "{book}");
        }
    });
}

#[test]
fn ctrl_c_and_sigterm_end_with_zero_in_time_whatever_is_connected() {
    run(async {
        let mut platform = Platform::start().await;
        let (user, bond) = (platform.rich("100.00").await, platform.bond().await);
        platform.trading_hold(&user, "CFA-RUB", "50.00").await;
        let mut terminal = Terminal::open(&platform, &user, &bond).await;
        terminal.acknowledged(1, Side::Buy, 1_000, 1).await;
        platform.stop_by("INT").await;
        platform.restart().await;
        let order = open_orders(&platform, &user).await;
        assert_eq!(order.len(), 1, "{order:?}");
        platform.stop_by("TERM").await;
        assert!(!platform.is_running());
    });
}

async fn open_orders(platform: &Platform, user: &User) -> Vec<Value> {
    let orders = platform
        .all(
            AUDITOR,
            "market.ListOrders",
            "orders",
            json!({ "userId": user.id }),
        )
        .await;
    orders.into_iter().filter(tests::ledger::is_open).collect()
}

#[test]
fn a_restart_resumes_the_state_of_the_previous_run() {
    run(async {
        let mut platform = Platform::start().await;
        let (seller, buyer, bond) = (
            platform.trader().await,
            platform.rich("5000.00").await,
            platform.bond().await,
        );
        platform.issue(&bond, &seller, "10").await;
        platform.trading_hold(&buyer, "CFA-RUB", "2000.00").await;
        let resting = platform.place(&seller, &bond, "SELL", "100.00", "6").await;
        platform.place(&buyer, &bond, "BUY", "100.00", "2").await;
        platform.place(&buyer, &bond, "BUY", "90.00", "3").await;
        platform.settled(&bond, 1).await;
        let book = async |platform: &Platform| {
            let answer = platform
                .ok(
                    AUDITOR,
                    "market.GetOrderBook",
                    json!({ "instrumentId": bond }),
                )
                .await;
            (
                answer["snapshot"]["bids"].clone(),
                answer["snapshot"]["asks"].clone(),
                answer["snapshot"]["phase"].clone(),
            )
        };
        let settled_hash = async |platform: &Platform| {
            text(
                &platform
                    .ok(AUDITOR, "market.GetMarketStatus", json!({}))
                    .await,
                "/stateHash",
            )
        };
        let (before, book_before) = (stable_state(&platform).await, book(&platform).await);
        assert_eq!(
            number(&book_before.1[0]["quantity"]),
            number(&json!("4")),
            "{book_before:?}"
        );
        assert!(!settled_hash(&platform).await.is_empty());

        platform.stop().await;
        platform.restart().await;
        assert_eq!(stable_state(&platform).await, before);
        assert_eq!(book(&platform).await, book_before);

        // The resting order of the first run trades in the second.
        platform.place(&buyer, &bond, "BUY", "100.00", "4").await;
        platform.settled(&bond, 2).await;
        let order = platform
            .ok(
                AUDITOR,
                "market.GetOrder",
                json!({ "orderId": text(&resting, "/orderId") }),
            )
            .await;
        assert_eq!(
            order["order"]["status"],
            json!("ORDER_STATUS_FILLED"),
            "{order}"
        );
        platform.balance_is(&seller.cash(), "600.00").await;
        platform.proof().await;
        assert_followed(&platform).await;
        platform.stop().await;
    });
}

/// Replays the journal of a stopped platform. State, book and the ids of orders and trades equal
/// those that calls returned before the stop. The same holds for a copy of the journal without
/// snapshots.
// rows: R180
#[test]
fn r180_replay_command_reproduces_state_trades_and_ids() {
    run(async {
        let mut platform = Platform::start().await;
        let seller = platform.trader().await;
        let (buyer, bond) = (platform.rich("5000.00").await, platform.bond().await);
        platform.issue(&bond, &seller, "20").await;
        platform.trading_hold(&buyer, "CFA-RUB", "2000.00").await;
        for price in ["10.00", "11.00", "12.00"] {
            platform.place(&seller, &bond, "SELL", price, "2").await;
        }
        // One order that takes three levels, one order of a session, and one that rests.
        platform.place(&buyer, &bond, "BUY", "12.00", "5").await;
        let mut terminal = Terminal::open(&platform, &buyer, &bond).await;
        terminal.acknowledged(1, Side::Buy, 1_200, 1).await;
        platform.place(&buyer, &bond, "BUY", "9.00", "3").await;
        platform.settled(&bond, 4).await;
        drop(terminal);
        let answers = Answers::of(&platform, &bond).await;
        assert_eq!((answers.trades.len(), answers.orders.len()), (4, 6));
        platform.stop().await;

        let journal = platform.data_dir().join("journal");
        answers.assert_replayed(&platform, &journal, &bond).await;
        let copy = tempfile::tempdir().expect("a folder");
        for entry in std::fs::read_dir(&journal).expect("the journal") {
            let path = entry.expect("an entry").path();
            if path.is_file() {
                let to = copy.path().join(path.file_name().expect("a name"));
                std::fs::copy(&path, to).expect("copied");
            }
        }
        answers.assert_replayed(&platform, copy.path(), &bond).await;
        platform.restart().await;
        let again = Answers::of(&platform, &bond).await;
        assert_eq!(
            (again.trades, again.orders),
            (answers.trades, answers.orders)
        );
        platform.stop().await;
    });
}

/// Answers of the market's reads at one command sequence.
struct Answers {
    sequence: u64,
    state_hash: String,
    bids: Value,
    trades: BTreeSet<String>,
    orders: BTreeSet<String>,
}

impl Answers {
    async fn of(platform: &Platform, bond: &str) -> Self {
        let of_bond = json!({ "instrumentId": bond });
        let status = platform.ok(AUDITOR, "market.GetMarketStatus", json!({}));
        let status = status.await;
        let book = platform.ok(AUDITOR, "market.GetOrderBook", of_bond.clone());
        let ids = async |name: &str, field: &str, id: &str| {
            let all = platform.all(AUDITOR, name, field, of_bond.clone()).await;
            all.iter().map(|one| text(one, id)).collect()
        };
        Self {
            sequence: text(&status, "/commitSequence").parse().expect("a number"),
            state_hash: text(&status, "/stateHash"),
            bids: book.await["snapshot"]["bids"].clone(),
            trades: ids("market.ListTrades", "trades", "/tradeId").await,
            orders: ids("market.ListOrders", "orders", "/orderId").await,
        }
    }

    /// Asserts that the `journal` commands compute the same state, book and ids from `journal`.
    async fn assert_replayed(&self, platform: &Platform, journal: &Path, bond: &str) {
        let (dir, until) = (journal.display().to_string(), self.sequence.to_string());
        let ask = async |words: &[&str]| {
            let all = [&["--json", "journal", "--dir", dir.as_str()], words].concat();
            platform.cli(&all).await.success()
        };
        let state = ask(&["replay", "--until", &until]).await.json();
        assert_eq!(state["sequence"], json!(self.sequence), "{state}");
        assert_eq!(state["state_hash"], json!(self.state_hash), "{state}");
        let whole = ask(&["replay"]).await.json();
        assert_eq!(whole["trades"], json!(self.trades.len()), "{whole}");
        let mut books = whole["books"].as_array().expect("books").iter();
        let book = books.find(|book| book["instrument"] == json!(bond));
        let book = book.expect("the bond's");
        let levels = |side: &Value| -> Vec<[Decimal; 2]> {
            let levels = side.as_array().into_iter().flatten();
            let level = |level: &Value| ["price", "quantity"].map(|name| number(&level[name]));
            levels.map(level).collect()
        };
        let bids = levels(&self.bids);
        assert_eq!((bids.len(), levels(&book["bids"])), (1, bids), "{book}");
        assert_eq!(book["asks"], json!([]), "{book}");

        // `verify` recomputes every event and compares it with the journal's.
        let verified = ask(&["verify"]).await.json();
        assert_eq!(verified["trades"], whole["trades"], "{verified}");
        assert_eq!(verified["state_hash"], whole["state_hash"], "{verified}");
        let (orders, trades) = ids_of(&ask(&["dump"]).await.stdout);
        assert_eq!((&orders, &trades), (&self.orders, &self.trades));
    }
}

/// Ids of the orders and trades in a dump of the journal.
fn ids_of(dump: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let node = NodeId::new(1).expect("a node");
    let (mut orders, mut trades) = (BTreeSet::new(), BTreeSet::new());
    for line in dump.lines() {
        let record: Value = serde_json::from_str(line).expect("an object a line");
        let count = |name: &str| record[name].as_u64().expect("a number");
        let (time_ns, sequence) = (count("time_ns"), Sequence(count("sequence")));
        if record["command"]["type"] == json!("NEW") {
            orders.insert(derived::order_uuid(time_ns, node, sequence).to_string());
        }
        let events = record["events"].as_array().expect("events");
        for (index, event) in (0..).zip(events) {
            if event["event"]["type"] == json!("TRADE") {
                trades.insert(derived::trade_uuid(time_ns, node, sequence, index).to_string());
            }
        }
    }
    (orders, trades)
}

/// Follows the journal of the running platform from a second process, which stops at sequence 4. A
/// follower returns all batches but the last one.
async fn assert_followed(platform: &Platform) {
    let words = ["--json", "journal", "dump", "--follow", "--until", "4"];
    let dumped = platform.cli(&words).await.success().stdout;
    let lines = dumped.lines().map(serde_json::from_str::<Value>);
    let lines: Vec<Value> = lines.map(|line| line.expect("an object a line")).collect();
    let sequences: Vec<_> = lines.iter().map(|line| line["sequence"].as_u64()).collect();
    assert_eq!(sequences, [1, 2, 3, 4].map(Some), "{dumped}");
    assert!(
        lines.iter().all(|line| line["command"]["type"].is_string()),
        "{dumped}"
    );
}

/// Waits until the state is stable; returns it. It is stable once settlement has split off the
/// holds of every open order and two readings are equal.
async fn stable_state(platform: &Platform) -> tests::ledger::State {
    let deadline = std::time::Instant::now() + tests::process::PATIENCE;
    let mut last = None;
    loop {
        let holds = platform.active_holds().await;
        let names = |order: &Value| {
            let id = order["orderId"].as_str().expect("an id");
            holds.iter().any(|hold| {
                hold["reason"]
                    .as_str()
                    .is_some_and(|reason| reason.contains(id))
            })
        };
        let orders = platform
            .all(AUDITOR, "market.ListOrders", "orders", json!({}))
            .await;
        let is_split = orders
            .iter()
            .filter(|order| tests::ledger::is_open(order))
            .all(names);
        let now = Some(platform.state().await);
        match now {
            Some(state) if is_split && last.as_ref() == Some(&state) => return state,
            state => last = state,
        }
        assert!(
            std::time::Instant::now() < deadline,
            "the state does not become stable: {last:?}"
        );
        // Stays below the 500 reads per second of a caller.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

// rows: R349
#[test]
fn the_commands_of_the_readme_work() {
    run(async {
        let platform = platform().await;
        let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
        let readme = std::fs::read_to_string(readme).expect("README.md");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("README.md"), &readme).expect("written");
        let (mut curls, mut commands, mut variables) = (0, 0, String::new());
        let mut printed = [
            ("<that link>", "qrPayload: "),
            ("<that signature>", "signature: "),
        ]
        .map(|(place, name)| (place, name, String::new()));
        for line in shell_lines(&readme) {
            if line.starts_with("HASH=") {
                variables.push_str(&format!("{line}\n"));
            } else if line.starts_with("curl ") {
                let answer = run_line(&with_ports_of(platform, &line), folder.path())
                    .await
                    .unwrap_or_else(|error| panic!("{error}"));
                assert!(
                    !answer.trim().is_empty() && !answer.contains("\"code\""),
                    "{line}\n{answer}"
                );
                curls += 1;
            } else if let Some(rest) = line.strip_prefix("platform ") {
                let binary = tests::process::binary();
                let (binary, url) = (binary.display(), platform.url("all"));
                let data = platform.data_dir();
                let data = data.display();
                let mut command =
                    format!("{variables}{binary} --url {url} --data-dir {data} {rest}");
                for (place, _, text) in &printed {
                    command = command.replace(place, text);
                }
                let answer = run_line_until_success(&command, folder.path()).await;
                for (_, name, text) in &mut printed {
                    let found = answer
                        .lines()
                        .find_map(|line| line.trim().strip_prefix(*name));
                    *text = found.map_or(text.clone(), str::to_owned);
                }
                commands += 1;
            }
        }
        assert!(
            curls >= 4 && commands >= 5,
            "too few examples in the README: {curls} curl lines and {commands} commands"
        );
    });
}

/// Lines of the shell blocks of a Markdown text, with continued lines joined.
fn shell_lines(readme: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for block in readme.split("```sh\n").skip(1) {
        let block = block
            .split("```")
            .next()
            .unwrap_or_default()
            .replace("\\\n", " ");
        lines.extend(block.lines().map(str::to_owned));
    }
    lines
}

/// Replaces the default addresses in a line by those of this platform.
fn with_ports_of(platform: &Platform, line: &str) -> String {
    let ports = [
        (8080, "all"),
        (8081, "ledger"),
        (8082, "cfa"),
        (8083, "payments"),
        (8084, "market"),
        (8085, "identity"),
    ];
    ports
        .into_iter()
        .fold(line.to_owned(), |text, (port, listener)| {
            text.replace(
                &format!("127.0.0.1:{port}"),
                &platform.address(listener).to_string(),
            )
        })
}

/// Runs a line in a shell in `folder`; returns its standard output, or the failure.
async fn run_line(line: &str, folder: &Path) -> Result<String, String> {
    let running = tokio::process::Command::new("sh")
        .args(["-c", line])
        .current_dir(folder)
        .kill_on_drop(true)
        .output();
    let done = tokio::time::timeout(5 * tests::process::PATIENCE, running)
        .await
        .unwrap_or_else(|_| panic!("timed out: {line}"))
        .expect("a shell");
    if done.status.success() {
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    } else {
        Err(format!("{line}\n{done:?}"))
    }
}

/// Like [`run_line`], with retries for a minute: the effect of the line before may take a moment.
async fn run_line_until_success(line: &str, folder: &Path) -> String {
    let deadline = std::time::Instant::now() + tests::process::PATIENCE;
    loop {
        match run_line(line, folder).await {
            Ok(answer) => return answer,
            Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}
