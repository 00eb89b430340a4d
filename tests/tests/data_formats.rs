//! Data folders of earlier versions open in this one.
//!
//! From format 8 on, a change of the journal's format requires a migration, and a folder of the
//! previous format in `tests/data`. From `stores-1` on the same holds for the stores: `cargo xtask
//! data-directory NAME` makes a folder. Folders never change and are never removed.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tests::call::text;
use tests::process::Platform;
use tests::shared::run;

/// Oldest format that has a folder.
const OLDEST: u32 = 8;
/// Number of trades that `platform demo` makes.
const TRADES: u64 = 3;
/// Without it the archive's unused trading holds end: it is older than a quarter of an hour.
const IDLE_HOLDS_STAY: (&str, &str) = ("PLATFORM_MARKET__TRADING_HOLD_IDLE_MS", "315360000000");

fn archives() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// Unpacks an archive into a new working folder; returns the latter.
fn unpacked(name: &str) -> PathBuf {
    let archive = archives().join(name);
    let folder = tempfile::tempdir().expect("a folder").keep();
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&archive).arg("-C").arg(&folder);
    let status = tar.status().expect("tar runs");
    assert!(status.success(), "cannot unpack {}", archive.display());
    folder
}

#[test]
fn a_data_folder_of_every_format_since_the_eighth_opens_and_goes_on() {
    run(async {
        for format in OLDEST..=types::command::FORMAT {
            let mut platform =
                Platform::start_in(unpacked(&format!("format-{format}.tar.gz")), &[]).await;
            let proof = platform.proof().await;
            assert_ne!(proof["instruments"], json!([]), "format {format}: {proof}");
            let user = platform.trader().await;
            platform.deposit(&user, "10.00").await;
            platform.stop().await;

            let data = platform.data_dir().display().to_string();
            let replay = ["--json", "--data-dir", &data, "journal", "replay"];
            let replayed = platform.cli(&replay).await.success().json();
            assert_eq!(replayed["trades"], json!(TRADES), "format {format}");
            platform.restart().await;
            platform.proof().await;
            platform.stop().await;
        }
    });
}

/// Oldest archive of the stores.
const OLDEST_STORES: &str = "stores-1.tar.gz";

/// Archives that `cargo xtask data-directory` made.
fn stores() -> Vec<String> {
    let found = std::fs::read_dir(archives()).expect("a folder");
    let names = found.map(|entry| entry.expect("an entry").file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let is_archive = |name: &String| name.starts_with("stores-") && name.ends_with(".tar.gz");
    let mut names: Vec<String> = names.filter(is_archive).collect();
    names.sort();
    names
}

/// Asserts that `now` repeats `before`. Objects may have further fields: contracts grow.
#[track_caller]
fn assert_repeats(before: &Value, now: &Value, path: &str) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            for (name, value) in before {
                let found = now.get(name).unwrap_or(&Value::Null);
                assert_repeats(value, found, &format!("{path}/{name}"));
            }
        }
        (Value::Array(before), Value::Array(now)) => {
            assert_eq!(now.len(), before.len(), "{path}");
            for (index, (before, now)) in before.iter().zip(now).enumerate() {
                assert_repeats(before, now, &format!("{path}/{index}"));
            }
        }
        _ => assert_eq!(now, before, "{path}"),
    }
}

/// Repeats the commands of the archive and compares their answers.
async fn repeats(platform: &Platform, facts: &[Value]) {
    for fact in facts {
        let words = fact["command"].as_array().expect("a command");
        let words = words.iter().map(|word| word.as_str().expect("a word"));
        let command: Vec<&str> = std::iter::once("--json").chain(words).collect();
        let now = platform.cli(&command).await.success().json();
        assert_repeats(&fact["answer"], &now, &command.join(" "));
    }
}

/// The answer of the archive to a command.
fn answer<'a>(facts: &'a [Value], command: &[&str]) -> &'a Value {
    let found = facts.iter().find(|fact| fact["command"] == json!(command));
    &found.unwrap_or_else(|| panic!("no {command:?}"))["answer"]
}

/// Checks every row, with and without the running platform; leaves it stopped.
async fn every_row_is_right(platform: &mut Platform) {
    let data = platform.data_dir().display().to_string();
    let full = ["--json", "--data-dir", data.as_str(), "proof", "--full"];
    let proof = platform.cli(&full).await.success().json();
    assert_eq!(
        (&proof["ok"], &proof["check"]["ok"]),
        (&json!(true), &json!(true)),
        "{proof}"
    );
    platform.stop().await;
    let check = ["--json", "--data-dir", data.as_str(), "data", "check"];
    let checked = platform.cli(&check).await.success().json();
    assert_eq!(checked["ok"], json!(true), "{checked}");
}

/// Buys the unit of the open order, which the book still has.
async fn the_open_order_trades(platform: &Platform, facts: &[Value]) {
    let open = answer(facts, &["order", "list", "--status", "OPEN"]);
    let orders = open["orders"].as_array().expect("orders");
    assert_eq!(orders.len(), 1, "{open}");
    let (order, bond) = (&orders[0], text(&orders[0], "/instrumentId"));
    let price = text(order, "/price/value");
    let trades = [
        "trade",
        "list",
        "--instrument-id",
        &*bond,
        "--page-size",
        "1000",
    ];
    let trades = answer(facts, &trades)["trades"].as_array();
    let count = trades.expect("trades").len();
    let buyer = platform.rich("1000.00").await;
    platform.place(&buyer, &bond, "BUY", &price, "1").await;
    let trades = platform.settled(&bond, count + 1).await;
    let with_order = trades
        .iter()
        .any(|trade| trade["sellOrderId"] == order["orderId"]);
    assert!(with_order, "{trades:?}");
}

#[test]
fn the_stores_of_every_committed_data_folder_open_with_their_balances_and_go_on() {
    run(async {
        let names = stores();
        let has_oldest = names.iter().any(|name| name == OLDEST_STORES);
        assert!(has_oldest, "tests/data has no {OLDEST_STORES}: {names:?}");
        for name in names {
            println!("{name}");
            let folder = unpacked(&name);
            let facts = std::fs::read_to_string(folder.join("facts.json")).expect("facts");
            let facts: Vec<Value> = serde_json::from_str(&facts).expect("JSON");
            let mut platform = Platform::start_in(folder, &[IDLE_HOLDS_STAY]).await;
            repeats(&platform, &facts).await;
            every_row_is_right(&mut platform).await;
            platform.restart_with(&[IDLE_HOLDS_STAY]).await;
            repeats(&platform, &facts).await;
            the_open_order_trades(&platform, &facts).await;
            platform.proof().await;
            every_row_is_right(&mut platform).await;
        }
    });
}
