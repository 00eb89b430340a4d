//! Any altered row of any store is found by one command: `platform proof --full`, or without a
//! running platform `platform data check`, its part over the files.
//!
//! The table-driven test alters one row of every table of every file of a data folder. A new table
//! is sealed unless its service exempts it; a table that no check covers is listed in [`UNCHECKED`]
//! with its reason, or the test fails.

mod anchors;
mod balances;
mod history;
mod operations;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rusqlite::Connection;
use serde_json::{Value, json};
use tests::process::{Finished, Platform};
use tests::shared::run;

/// Files without a check of their rows.
const OTHER_FILES: [(&str, &str); 4] = [
    (
        "bank/bank.db",
        "the sandbox bank: reconciliation compares its balance",
    ),
    (
        "chain/chain.sqlite",
        "the embedded chain: ledger and registry are compared with it",
    ),
    ("events/log.db", "copies of changes whose rows are checked"),
    (
        "events/offsets.db",
        "positions: one past the records is found, and a repeated event changes nothing",
    ),
];

/// Tables without a check of their rows; an empty file: in every file.
const UNCHECKED: [(&str, &str, &str); 12] = [
    ("", "outbox", "a queue: its rows leave within moments"),
    (
        "",
        "inbox",
        "ids of applied events: a repeated event changes nothing",
    ),
    ("", "_sqlx_migrations", "checksums, checked at each start"),
    (
        "chain/connector.sqlite",
        "attempt",
        "a changed signed transaction is invalid",
    ),
    (
        "chain/connector.sqlite",
        "cursor",
        "hashes of read blocks, compared with the chain",
    ),
    (
        "chain/connector.sqlite",
        "unconfirmed",
        "hashes of read blocks, compared with the chain",
    ),
    (
        "ledger/ledger.sqlite",
        "operations_listed",
        "how far the list of a user reaches",
    ),
    (
        "market/market.db",
        "requests",
        "correlation ids of calls, which the journal does not have",
    ),
    (
        "market/market.db",
        "client_order_ids",
        "texts of calls, of which the journal has the numbers",
    ),
    (
        "market/market.db",
        "positions",
        "sums of the CFA service's events; no money follows from them",
    ),
    (
        "market/market.db",
        "listed",
        "status of instruments at the last import, which is repeated",
    ),
    (
        "market/market.db",
        "feed",
        "position of the events: a repeated event changes nothing",
    ),
];

/// Rows to alter where rows of a table are checked in two ways: an order's hold and a trade have no
/// seal, and the time of a transfer is neither that of a holder's first units nor of a supply.
const ROWS: [(&str, [&str; 2]); 3] = [
    (
        "holds",
        [
            "WHERE parent_hold_id IS NULL",
            "WHERE parent_hold_id IS NOT NULL",
        ],
    ),
    (
        "operation",
        [
            "WHERE flow <> 6 AND status = 7",
            "WHERE flow = 6 AND status = 7",
        ],
    ),
    (
        "holding_history",
        [
            "",
            "AS h WHERE NOT EXISTS (SELECT 1 FROM supply_history s \
             WHERE s.token = h.token AND s.block_number = h.block_number) \
             AND EXISTS (SELECT 1 FROM holding_history f WHERE f.token = h.token \
             AND f.address = h.address AND f.block_number < h.block_number)",
        ],
    ),
];

/// A file of the data folder without the guards of its tables.
struct Store {
    name: String,
    path: PathBuf,
    pristine: PathBuf,
}

impl Store {
    fn open(data: &Path, name: &str) -> Self {
        let path = data.join(name);
        let db = Connection::open(&path).expect("opens");
        let triggers: Vec<String> =
            names(&db, "SELECT name FROM sqlite_schema WHERE type = 'trigger'");
        for trigger in triggers {
            db.execute_batch(&format!("DROP TRIGGER \"{trigger}\""))
                .expect("dropped");
        }
        db.close().expect("closed");
        let pristine = path.with_extension("pristine");
        std::fs::copy(&path, &pristine).expect("copied");
        Self {
            name: name.to_owned(),
            path,
            pristine,
        }
    }

    fn tables(&self) -> Vec<String> {
        let db = Connection::open(&self.path).expect("opens");
        names(
            &db,
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite!_%' ESCAPE '!' \
             ORDER BY name",
        )
    }

    /// Executes a statement as another program. Returns the number of changed rows.
    fn execute(&self, sql: &str) -> usize {
        let db = Connection::open(&self.path).expect("opens");
        db.execute_batch("PRAGMA foreign_keys = OFF; PRAGMA ignore_check_constraints = ON")
            .expect("settings");
        let changed = db
            .execute(sql, [])
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
        db.close().expect("closed");
        changed
    }

    /// Alters one of the `rows` of a table: its first column that is no key, or its first column. A
    /// number is changed by more than there are rows, since it may be unique.
    /// False: there are none.
    fn alter(&self, table: &str, rows: &str) -> bool {
        let db = Connection::open(&self.path).expect("opens");
        let columns: Vec<(String, i64)> = db
            .prepare(&format!("PRAGMA table_info(\"{table}\")"))
            .and_then(|mut rows| {
                let rows = rows.query_map([], |row| Ok((row.get("name")?, row.get("pk")?)))?;
                rows.collect()
            })
            .expect("columns");
        drop(db);
        let keys: Vec<&str> = (columns.iter())
            .filter(|(_, key)| *key > 0)
            .map(|(name, _)| name.as_str())
            .collect();
        assert!(
            !keys.is_empty(),
            "{}: {table} has no primary key",
            self.name
        );
        let column = columns.iter().find(|(_, key)| *key == 0);
        let column = column.map_or(columns[0].0.as_str(), |(name, _)| name.as_str());
        let keys = keys.join(", ");
        let sql = format!(
            "UPDATE \"{table}\" SET \"{column}\" = CASE typeof(\"{column}\") \
             WHEN 'text' THEN \"{column}\" || 'x' WHEN 'blob' THEN CAST(\"{column}\" || x'00' AS BLOB) \
             WHEN 'null' THEN 1 ELSE \"{column}\" + 1000003 END \
             WHERE ({keys}) = (SELECT {keys} FROM \"{table}\" {rows} LIMIT 1)"
        );
        self.execute(&sql) > 0
    }

    fn restore(&self) {
        for end in ["-wal", "-shm"] {
            let mut name = self.path.as_os_str().to_owned();
            name.push(end);
            let _ = std::fs::remove_file(name);
        }
        std::fs::copy(&self.pristine, &self.path).expect("restored");
    }
}

fn names(db: &Connection, sql: &str) -> Vec<String> {
    let mut rows = db.prepare(sql).expect("prepared");
    let rows = rows.query_map([], |row| row.get(0)).expect("rows");
    rows.collect::<Result<_, _>>().expect("names")
}

async fn check(platform: &Platform) -> Finished {
    let data = platform.data_dir().display().to_string();
    platform
        .cli(&["--json", "--data-dir", &data, "data", "check"])
        .await
}

/// A platform that has run the whole life of an asset, with a limit and an open hold, stopped.
async fn stopped() -> Platform {
    let mut platform = Platform::start().await;
    platform.cli(&["demo"]).await.success();
    let user = platform.rich("50.00").await;
    platform.set_limit(&user, "TRADING", "1000").await;
    platform.trading_hold(&user, "CFA-RUB", "5.00").await;
    platform.stop().await;
    platform
}

/// Names of the stores below the folder.
fn stores(data: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for folder in std::fs::read_dir(data).expect("a folder") {
        let folder = folder.expect("an entry").path();
        for file in std::fs::read_dir(folder).into_iter().flatten() {
            let path = file.expect("an entry").path();
            if path
                .extension()
                .is_some_and(|end| end == "db" || end == "sqlite")
            {
                let name = path.strip_prefix(data).expect("below");
                found.insert(name.display().to_string());
            }
        }
    }
    found
}

// rows: R188 R215
#[test]
fn r188_an_altered_row_of_any_table_of_any_store_is_found() {
    run(async {
        let platform = stopped().await;
        let data = platform.data_dir();
        let checked = check(&platform).await.success().json();
        assert_eq!(checked["ok"], json!(true), "{checked}");
        assert!(checked["rows_per_s"].as_u64() > Some(0), "{checked}");
        let is_other = |name: &str| OTHER_FILES.iter().any(|(file, _)| *file == name);
        let mut missed = Vec::new();
        let mut altered = 0;
        for name in stores(&data).iter().filter(|name| !is_other(name)) {
            let store = Store::open(&data, name);
            for table in store.tables() {
                let is_unchecked = UNCHECKED.iter().any(|(file, unchecked, _)| {
                    (file.is_empty() || *file == *name) && *unchecked == table
                });
                if is_unchecked {
                    continue;
                }
                let rows = ROWS.iter().find(|(name, _)| *name == table);
                for rows in rows.map_or(&[""] as &[&str], |(_, rows)| rows.as_slice()) {
                    if !store.alter(&table, rows) {
                        continue;
                    }
                    altered += 1;
                    let found = check(&platform).await;
                    if found.status.success() {
                        missed.push(format!("{name}: {table} {rows}"));
                    }
                    store.restore();
                }
            }
        }
        assert!(missed.is_empty(), "altered and not found: {missed:?}");
        assert!(altered > 30, "{altered} tables have rows");
        check(&platform).await.success();
    });
}

/// What an outside reviewer altered: most of it passed every command then.
#[test]
fn r188_thirteen_tamperings_are_named() {
    const LEDGER: &str = "ledger/ledger.sqlite";
    const CFA: &str = "cfa/cfa.sqlite";
    // Store, statements, part of a finding.
    let cases: [(&str, &[&str], &str); 13] = [
        (
            LEDGER,
            &[
                "UPDATE sub_accounts SET balance = balance + 100 WHERE subaccount_id = 'system:fees:CFA-RUB'",
            ],
            "balance",
        ),
        (
            LEDGER,
            &["DELETE FROM postings WHERE posting_no = (SELECT MAX(posting_no) FROM postings)"],
            "block",
        ),
        (
            LEDGER,
            &[
                "UPDATE postings SET amount = amount + 1 WHERE posting_no = (SELECT MAX(posting_no) FROM postings)",
            ],
            "posting",
        ),
        (
            LEDGER,
            &[
                "UPDATE operations SET kind = CASE kind WHEN 1 THEN 2 ELSE 1 END \
                 WHERE rowid = (SELECT MAX(rowid) FROM operations)",
            ],
            "hash",
        ),
        (
            LEDGER,
            &["UPDATE operations SET status = 5 WHERE operation_id = \
               (SELECT operation_id FROM operations WHERE status = 7 AND tx_hash IS NOT NULL LIMIT 1)"],
            "status",
        ),
        (
            LEDGER,
            &[
                "UPDATE operations SET tx_hash = '0x' || substr(tx_hash, 4) || 'a' WHERE operation_id = \
               (SELECT operation_id FROM operations WHERE status = 7 AND tx_hash IS NOT NULL \
               AND external_ref IS NOT NULL LIMIT 1)",
            ],
            "transaction",
        ),
        (
            LEDGER,
            &[
                "UPDATE sub_accounts SET held = held + 1 WHERE subaccount_id = \
               (SELECT subaccount_id FROM sub_accounts WHERE balance - held - unsettled > 0 LIMIT 1)",
            ],
            "held",
        ),
        (
            LEDGER,
            &[
                "DELETE FROM postings WHERE operation_id = \
                 (SELECT operation_id FROM operations ORDER BY block DESC, place DESC LIMIT 1)",
                "DELETE FROM operations WHERE rowid = \
                 (SELECT rowid FROM operations ORDER BY block DESC, place DESC LIMIT 1)",
            ],
            "block",
        ),
        (
            LEDGER,
            &["UPDATE sub_accounts SET freeze = 2 WHERE subaccount_id = 'system:fees:CFA-RUB'"],
            "sub_accounts 'system:fees:CFA-RUB': changed",
        ),
        (
            CFA,
            &["UPDATE holding SET units = units + 1 \
                 WHERE (token, address) = (SELECT token, address FROM holding LIMIT 1)"],
            "holding of token",
        ),
        (
            CFA,
            &[
                "UPDATE operation SET units_minor = units_minor + 1, amount = amount || '0' WHERE operation_id = \
               (SELECT operation_id FROM operation WHERE flow <> 6 AND status = 7 LIMIT 1)",
            ],
            "operation",
        ),
        (
            CFA,
            &["UPDATE instrument SET issued_minor = issued_minor - 1 WHERE issued_minor > 0"],
            "instrument",
        ),
        (
            "payments/payments.db",
            &["UPDATE intents SET status = 'PENDING' WHERE payment_id = \
               (SELECT payment_id FROM intents WHERE status = 'SUCCESS' LIMIT 1)"],
            "intents",
        ),
    ];
    run(async {
        let platform = stopped().await;
        let data = platform.data_dir();
        for (name, statements, part) in cases {
            let store = Store::open(&data, name);
            for sql in statements {
                assert!(store.execute(sql) > 0, "{sql}");
            }
            let found = check(&platform).await;
            assert!(!found.status.success(), "{statements:?}");
            assert!(
                named(&found.json()).iter().any(|text| text.contains(part)),
                "{part}: {found:?}"
            );
            store.restore();
        }
    });
}

fn named(checked: &Value) -> Vec<String> {
    let parts = checked["parts"].as_array().cloned().unwrap_or_default();
    let findings = parts.iter().flat_map(|part| part["findings"].as_array());
    let texts = findings.flatten().filter_map(Value::as_str);
    texts.map(str::to_owned).collect()
}

/// Accepts the altered rows of a stopped platform. The next start seals them.
async fn accept(platform: &Platform) -> Value {
    let data = platform.data_dir().display().to_string();
    let args = ["--json", "--data-dir", &data, "data", "accept-rows"];
    platform.cli(&args).await.success().json()
}

/// An operator who has found the cause of an alteration, or has lost a key, ends the finding.
#[test]
fn an_alteration_is_accepted_by_a_command_of_its_own() {
    run(async {
        let mut platform = stopped().await;
        let data = platform.data_dir();
        assert_eq!(accept(&platform).await, json!([]));
        let store = Store::open(&data, "identity/identity.db");
        let altered = store.execute("UPDATE limits SET daily = '7' WHERE limit_type = 'TRADING'");
        assert!(altered > 0);
        assert!(!check(&platform).await.status.success());
        let accepted = accept(&platform).await;
        assert_eq!(accepted[0]["store"], json!("identity"), "{accepted}");
        assert_eq!(accepted[0]["table"], json!("limits"), "{accepted}");
        platform.restart().await;
        platform.stop().await;
        check(&platform).await.success();

        let key = data.join("payments/payments.db.seal.key");
        std::fs::remove_file(&key).expect("removed");
        let logged = platform.start_refused().await;
        assert!(logged.contains("platform data accept-rows"), "{logged}");
        let accepted = accept(&platform).await;
        assert_eq!(accepted[0]["store"], json!("payments"), "{accepted}");
        platform.restart().await;
        platform.stop().await;
        assert!(key.is_file());
        check(&platform).await.success();
    });
}
