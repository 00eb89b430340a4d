//! Any altered row of any store is found by one command: `platform proof --full`, or without a
//! running platform `platform data check`, its part over the files.
//!
//! The table-driven test alters one row of every table of every file of a data folder. A new table
//! is sealed unless its service exempts it; a table that no check covers is listed in [`UNCHECKED`]
//! with its reason, or the test fails.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use service_kit::audit::{Act, AuditRecord, BEGINNING, Hash};
use sha2::{Digest, Sha256};
use tests::call::AUDITOR;
use tests::process::{Finished, Platform};
use tests::shared::run;
use tests::{number, text};

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
        "positions of consumers: a repeated event changes nothing",
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

/// Bank and embedded chain stand in for outside systems, so their rows have no seals.
// rows: R188
#[test]
fn r188_altered_balances_of_the_bank_and_of_the_chain_are_named_by_the_proof() {
    run(async {
        let mut platform = Platform::start().await;
        let user = platform.rich("47.11").await;
        platform.rich("10.00").await;
        let request = json!({ "instrumentId": "CFA-RUB" });
        let money = platform.ok(AUDITOR, "cfa.GetInstrument", request).await;
        let token = text(&money, "/instrument/smartContractAddress");
        platform.proof().await;
        platform.stop().await;

        let bank = Store::open(&platform.data_dir(), "bank/bank.db");
        let altered = |by: &str| format!("UPDATE account SET balance_minor = balance_minor {by}");
        assert_eq!(bank.execute(&altered("+ 100")), 1);
        let found = difference(&mut platform, "BANK").await;
        assert_eq!(found["instrument_id"], json!("CFA-RUB"), "{found}");
        assert_eq!(bank.execute(&altered("- 100")), 1);

        // The low half of a holder's slot is the balance, the rest is zero (`CfaToken.sol`). No
        // other slot of the token has this number.
        let chain = Store::open(&platform.data_dir(), "chain/chain.sqlite");
        let token = token.trim_start_matches("0x");
        let altered = format!(
            "UPDATE slot SET value = x'{:064x}' WHERE address = x'{token}' AND value = x'{:064x}'",
            4_811, 4_711
        );
        assert_eq!(chain.execute(&altered), 1, "{altered}");
        let found = difference(&mut platform, "HOLDER").await;
        assert_eq!(
            (&found["instrument_id"], &found["holder"]),
            (&json!("CFA-RUB"), &json!(user.id)),
            "{found}"
        );
    });
}

/// Starts a stopped platform and takes its proof; returns the difference with this name, which must
/// be 1.00.
async fn difference(platform: &mut Platform, name: &str) -> Value {
    platform.restart().await;
    let proof = platform.full_proof().await;
    platform.stop().await;
    assert!(!proof.status.success(), "{proof:?}");
    let proof = proof.json();
    let mut differences = proof["differences"].as_array().into_iter().flatten();
    let found = differences.find(|one| one["name"] == json!(name));
    let found = found.unwrap_or_else(|| panic!("no {name}: {proof}"));
    let amount = number(&found["difference"]);
    assert_eq!(amount, number(&json!("1.00")), "{found}");
    found.clone()
}

/// Trades have no seals: the ledger and their batches have the same.
#[test]
fn r188_an_altered_deleted_or_added_trade_is_found() {
    const TRADE: &str =
        "(SELECT operation_id FROM operation WHERE flow = 6 AND status = 7 LIMIT 1)";
    run(async {
        let platform = stopped().await;
        let store = Store::open(&platform.data_dir(), "cfa/cfa.sqlite");
        let db = Connection::open(&store.path).expect("opens");
        let columns = names(&db, "SELECT name FROM pragma_table_info('operation')");
        db.close().expect("closed");
        let own = ["operation_id", "external_ref", "idempotency_key"];
        let copied = columns
            .iter()
            .map(|name| match own.contains(&name.as_str()) {
                true => format!("{name} || '-2'"),
                false => name.clone(),
            });
        let copied = copied.collect::<Vec<_>>().join(", ");
        for (sql, part) in [
            (
                format!("DELETE FROM operation WHERE operation_id = {TRADE}"),
                "no trade",
            ),
            (
                format!("UPDATE operation SET status = 8 WHERE operation_id = {TRADE}"),
                "no trade",
            ),
            (
                format!("UPDATE operation SET external_ref = 'x' WHERE operation_id = {TRADE}"),
                "no trade",
            ),
            (
                format!(
                    "INSERT INTO operation SELECT {copied} FROM operation WHERE operation_id = {TRADE}"
                ),
                "more trades are final",
            ),
            (
                format!("UPDATE operation SET batch_id = NULL WHERE operation_id = {TRADE}"),
                "final in no batch",
            ),
        ] {
            assert_eq!(store.execute(&sql), 1, "{sql}");
            let found = named(&check(&platform).await.json());
            assert!(
                found.iter().any(|text| text.contains(part)),
                "{sql}: {found:?}"
            );
            store.restore();
        }
        check(&platform).await.success();
    });
}

/// The history has no seals: the journal has the same.
#[test]
fn r188_an_altered_deleted_or_added_row_of_the_history_is_found() {
    const ORDER: &str = "(SELECT sequence FROM orders WHERE filled > 0 LIMIT 1)";
    const TRADE: &str = "(SELECT MAX(id) FROM trades)";
    // An answer that names no order may have no sequence: the call may have noted it first.
    const ANSWER: &str = "(SELECT key_hash FROM answers WHERE order_sequence > 0 LIMIT 1)";
    run(async {
        let platform = stopped().await;
        let store = Store::open(&platform.data_dir(), "market/market.db");
        let db = Connection::open(&store.path).expect("opens");
        // Copies a row under another key.
        let copy = |table: &str, key: &str, new: &str, rows: &str| {
            let columns = names(
                &db,
                &format!("SELECT name FROM pragma_table_info('{table}')"),
            );
            let copied = columns.iter().map(|name| match name == key {
                true => new,
                false => name.as_str(),
            });
            let copied = copied.collect::<Vec<_>>().join(", ");
            format!("INSERT INTO {table} SELECT {copied} FROM {table} {rows}")
        };
        let first = "WHERE sequence = (SELECT MIN(sequence) FROM orders)";
        let last = format!("WHERE id = {TRADE}");
        let answer = format!("WHERE key_hash = {ANSWER}");
        let after = "(SELECT sequence + 1 FROM projection)";
        let cases = [
            (
                format!("UPDATE orders SET filled = filled - 1 WHERE sequence = {ORDER}"),
                ("orders ", ": changed"),
            ),
            (
                format!("UPDATE orders SET created_ns = created_ns + 1 WHERE sequence = {ORDER}"),
                ("orders ", ": changed"),
            ),
            (
                format!("DELETE FROM orders WHERE sequence = {ORDER}"),
                ("orders ", ": deleted"),
            ),
            (
                copy("orders", "sequence", "sequence - 1", first),
                ("orders ", ": added"),
            ),
            (
                copy("orders", "sequence", after, first),
                ("orders: 1 rows", ""),
            ),
            (
                format!("UPDATE trades SET price = price + 1 WHERE id = {TRADE}"),
                ("trades ", ": changed"),
            ),
            (
                format!("DELETE FROM trades WHERE id = {TRADE}"),
                ("trades ", ": deleted"),
            ),
            (copy("trades", "id", "id + 1", &last), ("trades ", ": added")),
            (
                format!("UPDATE answers SET cancelled = cancelled + 1 {answer}"),
                ("answers ", ": changed"),
            ),
            (
                format!("UPDATE answers SET sequence = 0 {answer}"),
                ("answers ", ": changed"),
            ),
            (format!("DELETE FROM answers {answer}"), ("answers ", ": deleted")),
            (
                copy("answers", "key_hash", "randomblob(16)", &answer),
                ("answers ", ": added"),
            ),
            (
                "INSERT INTO users (user_id) VALUES ('mallory')".to_owned(),
                ("users mallory: added", ""),
            ),
            (
                "UPDATE instruments SET lot_mantissa = lot_mantissa * 10, lot_scale = lot_scale + 1 \
                 WHERE instrument = (SELECT MIN(instrument) FROM instruments)"
                    .to_owned(),
                ("instruments ", ": changed"),
            ),
        ];
        db.close().expect("closed");
        for (sql, (begin, end)) in cases {
            assert_eq!(store.execute(&sql), 1, "{sql}");
            let found = named(&check(&platform).await.json());
            assert!(
                found
                    .iter()
                    .any(|text| text.starts_with(begin) && text.ends_with(end)),
                "{sql}: {found:?}"
            );
            store.restore();
        }
        let checked = check(&platform).await.success().json();
        let parts = checked["parts"].as_array().expect("parts");
        let history = parts.iter().find(|part| part["name"] == json!("history"));
        let history = history.expect("a part of the history");
        assert!(history["rows"].as_u64() > Some(0), "{history}");
        let unchecked = history["not_checked"].as_array().expect("a list");
        assert_eq!(unchecked.len(), 1, "the journal is whole: {unchecked:?}");
    });
}

/// A trade is in the ledger before it is in a batch. So a trade that is neither final nor in the
/// ledger was executed by a command after the ledger's position, or never.
#[test]
fn r188_an_added_trade_that_is_not_final_is_found() {
    run(async {
        let platform = stopped().await;
        let store = Store::open(&platform.data_dir(), "cfa/cfa.sqlite");
        let db = Connection::open(&store.path).expect("opens");
        let columns = names(&db, "SELECT name FROM pragma_table_info('operation')");
        db.close().expect("closed");
        // CREATED with the id of another trade of the same command, and FAILED with no trade's id.
        for (status, id) in [("1", "substr(ID, 1, 30) || 'fffff0'"), ("9", "ID || '-2'")] {
            let copied = columns.iter().map(|name| match name.as_str() {
                "operation_id" | "external_ref" | "idempotency_key" | "trade_id" => {
                    id.replace("ID", name)
                }
                "status" => status.to_owned(),
                "batch_id" | "tx_hash" | "finalized_at_us" => "NULL".to_owned(),
                _ => name.clone(),
            });
            let copied = copied.collect::<Vec<_>>().join(", ");
            let sql = format!(
                "INSERT INTO operation SELECT {copied} FROM operation \
                 WHERE flow = 6 AND status = 7 LIMIT 1"
            );
            assert_eq!(store.execute(&sql), 1, "{sql}");
            let found = named(&check(&platform).await.json());
            assert!(
                found.iter().any(|text| text.ends_with("never executed")),
                "{sql}: {found:?}"
            );
            store.restore();
        }
        check(&platform).await.success();
    });
}

/// The blocks of the ledger seal neither status nor transaction. An operation that is set back
/// agrees with the rows of the ledger, but not with those of the CFA service.
#[test]
fn r188_a_final_operation_of_the_ledger_that_is_set_back_is_found() {
    const FEE: &str = "(SELECT operation_id FROM operations WHERE kind = 14 AND status = 7 \
         AND tx_hash IS NOT NULL LIMIT 1)";
    const ISSUE: &str = "(SELECT operation_id FROM operations WHERE kind = 5 AND status = 7 \
         AND awaits_chain AND external_ref NOT LIKE 'placement:%' LIMIT 1)";
    const FUNDING: &str = "(SELECT operation_id FROM operations WHERE status = 7 \
         AND operation_id LIKE '%:fund' LIMIT 1)";
    let unsettled = format!("FROM postings WHERE unsettled AND operation_id = {ISSUE}");
    let cases = [
        (
            vec![format!(
                "UPDATE operations SET status = 6, finalized_at_us = NULL WHERE operation_id = {FEE}"
            )],
            "not final in the ledger",
        ),
        (
            vec![format!(
                "UPDATE operations SET status = 5, finalized_at_us = NULL, tx_hash = NULL \
                 WHERE operation_id = {FEE}"
            )],
            "not final in the ledger",
        ),
        (
            vec![
                format!(
                    "UPDATE sub_accounts SET unsettled = unsettled + (SELECT SUM(amount) {unsettled} \
                     AND credit_subaccount_id = subaccount_id) \
                     WHERE subaccount_id IN (SELECT credit_subaccount_id {unsettled})"
                ),
                format!(
                    "UPDATE operations SET status = 6, finalized_at_us = NULL \
                     WHERE operation_id = {ISSUE}"
                ),
            ],
            "not final in the ledger",
        ),
        (
            vec![format!(
                "UPDATE operations SET tx_hash = NULL WHERE operation_id = {FEE}"
            )],
            "none in the ledger",
        ),
        // Funds a distribution: the CFA service has no operation for it.
        (
            vec![format!(
                "UPDATE operations SET status = 6, finalized_at_us = NULL WHERE operation_id = {FUNDING}"
            )],
            "has a final transaction, not final in the ledger",
        ),
        (
            vec![format!(
                "UPDATE operations SET status = 5, finalized_at_us = NULL, tx_hash = NULL \
                 WHERE operation_id = {FUNDING}"
            )],
            "final at the CFA service, not final in the ledger",
        ),
        (
            vec![format!(
                "UPDATE operations SET tx_hash = NULL WHERE operation_id = {FUNDING}"
            )],
            "final without a transaction",
        ),
    ];
    run(async {
        let platform = stopped().await;
        let store = Store::open(&platform.data_dir(), "ledger/ledger.sqlite");
        for (statements, part) in cases {
            for sql in &statements {
                assert!(store.execute(sql) > 0, "{sql}");
            }
            let found = named(&check(&platform).await.json());
            assert_eq!(found.len(), 1, "{statements:?}: {found:?}");
            assert!(found[0].ends_with(part), "{statements:?}: {found:?}");
            store.restore();
        }
        check(&platform).await.success();
    });
}

/// As an altered transfer of a holder to itself, which has the only row of its block: the tables of
/// the registry agree, and only the chain has the block's time.
#[test]
fn r188_an_altered_time_of_a_whole_block_is_found() {
    const BLOCK: &str = "(SELECT MIN(block_number) FROM holding_history)";
    run(async {
        let platform = stopped().await;
        let store = Store::open(&platform.data_dir(), "cfa/cfa.sqlite");
        for table in ["holding_history", "supply_history"] {
            let sql =
                format!("UPDATE {table} SET time_us = time_us - 1 WHERE block_number = {BLOCK}");
            assert!(store.execute(&sql) > 0, "{sql}");
        }
        for (column, end) in [("since_us", "MIN"), ("updated_at_us", "MAX")] {
            let sql = format!(
                "UPDATE holding SET {column} = (SELECT {end}(time_us) FROM holding_history h \
                 WHERE h.token = holding.token AND h.address = holding.address)"
            );
            assert!(store.execute(&sql) > 0, "{sql}");
        }
        let found = named(&check(&platform).await.json());
        assert_eq!(found.len(), 1, "{found:?}");
        let text = "has another time on the chain";
        assert!(found[0].ends_with(text), "{found:?}");
        store.restore();

        // The time of the last transfer of a holder, also without the blocks of the chain.
        let sql = "UPDATE holding SET updated_at_us = updated_at_us - 1 \
             WHERE (token, address) = (SELECT token, address FROM holding LIMIT 1)";
        assert_eq!(store.execute(sql), 1);
        let found = named(&check(&platform).await.json());
        assert!(found[0].starts_with("holding of token"), "{found:?}");
    });
}

fn named(checked: &Value) -> Vec<String> {
    let parts = checked["parts"].as_array().cloned().unwrap_or_default();
    let findings = parts.iter().flat_map(|part| part["findings"].as_array());
    let texts = findings.flatten().filter_map(Value::as_str);
    texts.map(str::to_owned).collect()
}

/// An operator who has found the cause of an alteration, or has lost a key, ends the finding.
#[test]
fn an_alteration_is_accepted_by_a_command_of_its_own() {
    run(async {
        let mut platform = stopped().await;
        let data = platform.data_dir();
        let accept = async |platform: &Platform| {
            let data = platform.data_dir().display().to_string();
            let args = ["--json", "--data-dir", &data, "data", "accept-rows"];
            platform.cli(&args).await.success().json()
        };
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

/// The altered amount of a trade, whose row has no seal, and the same command with the proof.
#[test]
fn r188_the_proof_of_a_running_platform_names_an_altered_trade() {
    run(async {
        let mut platform = stopped().await;
        platform.restart().await;
        let proof = platform.full_proof().await.success().json();
        assert_eq!(
            (&proof["ok"], &proof["check"]["ok"]),
            (&json!(true), &json!(true)),
            "{proof}"
        );
        platform.stop().await;
        let store = Store::open(&platform.data_dir(), "cfa/cfa.sqlite");
        let altered = store.execute(
            "UPDATE operation SET units_minor = units_minor + 1 WHERE operation_id = \
             (SELECT operation_id FROM operation WHERE flow = 6 AND status = 7 LIMIT 1)",
        );
        assert_eq!(altered, 1, "a trade");
        platform.restart().await;
        let found = platform.full_proof().await;
        assert!(!found.status.success(), "{found:?}");
        let texts = named(&found.json()["check"]);
        assert!(
            texts.iter().any(|text| text.contains("amount of")),
            "{texts:?}"
        );
        platform.stop().await;
    });
}

/// Sealed columns of an operation and of a posting of the ledger, in the order of the encoding.
const OPERATION: [&str; 10] = [
    "operation_id",
    "scope",
    "kind",
    "user_id",
    "idempotency_key",
    "external_ref",
    "awaits_chain",
    "reverses",
    "digest",
    "created_at_us",
];
const POSTING: [&str; 13] = [
    "ordinal",
    "posting_id",
    "debit_subaccount_id",
    "credit_subaccount_id",
    "instrument_id",
    "amount",
    "hold_id",
    "unsettled",
    "debit_balance_after",
    "debit_version",
    "credit_balance_after",
    "credit_version",
    "created_at_us",
];
/// Those that may be empty.
const OPTIONAL: [&str; 3] = ["external_ref", "reverses", "hold_id"];

/// Encoding of rows of the ledger, each after a tag.
fn encoded(db: &Connection, tag: u8, columns: &[&str], rows: &str) -> Vec<u8> {
    let sql = format!("SELECT {} FROM {rows}", columns.join(", "));
    let mut statement = db.prepare(&sql).expect("prepared");
    let mut rows = statement.query([]).expect("rows");
    let mut bytes = Vec::new();
    while let Some(row) = rows.next().expect("a row") {
        bytes.push(tag);
        for (at, column) in columns.iter().enumerate() {
            let value = row.get_ref(at).expect("a value");
            if OPTIONAL.contains(column) {
                bytes.push(u8::from(value != ValueRef::Null));
            }
            match value {
                ValueRef::Null => {}
                ValueRef::Integer(number) => bytes.extend(number.to_be_bytes()),
                ValueRef::Text(text) => {
                    let length = u32::try_from(text.len()).expect("a short text");
                    bytes.extend(length.to_be_bytes());
                    bytes.extend(text);
                }
                other => panic!("{column}: {other:?}"),
            }
        }
    }
    bytes
}

/// Makes the blocks of a ledger a chain over its rows as they are. The encoding is that of
/// `ledger/src/audit.rs`.
fn chain_blocks(db: &Connection) {
    let blocks = "SELECT block, sealed_at_us, operations, postings FROM audit_blocks \
         WHERE block > 0 ORDER BY block";
    let mut blocks = db.prepare(blocks).expect("prepared");
    let blocks = blocks.query_map([], |row| {
        Ok([row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?])
    });
    let blocks: Result<Vec<[i64; 4]>, _> = blocks.expect("blocks").collect();
    let mut previous: Hash = [0; 32];
    for [block, sealed_at_us, operations, postings] in blocks.expect("blocks") {
        let mut hasher = Sha256::new();
        hasher.update(previous);
        hasher.update(b"ledger-block-1");
        hasher.update(block.to_be_bytes());
        hasher.update(sealed_at_us.to_be_bytes());
        let of_block =
            format!("SELECT operation_id FROM operations WHERE block = {block} ORDER BY place");
        for id in names(db, &of_block) {
            let row = format!("operations WHERE operation_id = '{id}'");
            hasher.update(encoded(db, b'O', &OPERATION, &row));
            let rows = format!("postings WHERE operation_id = '{id}' ORDER BY ordinal");
            hasher.update(encoded(db, b'P', &POSTING, &rows));
        }
        hasher.update(b"E");
        hasher.update(operations.to_be_bytes());
        hasher.update(postings.to_be_bytes());
        let hash: Hash = hasher.finalize().into();
        let sql = "UPDATE audit_blocks SET previous_hash = ?2, hash = ?3 WHERE block = ?1";
        let changed = db.execute(sql, rusqlite::params![block, previous, hash]);
        assert_eq!(changed, Ok(1));
        previous = hash;
    }
}

/// Makes the audit records of a ledger a chain as they are.
fn chain_records(db: &Connection) {
    let records = "SELECT sequence, at_us, actor, action, object_id, before, after, reason, \
         request_id, correlation_id FROM audit_records ORDER BY sequence";
    let mut records = db.prepare(records).expect("prepared");
    let records = records.query_map([], |row| {
        let texts = (2..10usize).map(|at| row.get::<_, String>(at));
        let texts: Vec<String> = texts.collect::<Result<_, _>>()?;
        Ok((row.get(0)?, row.get(1)?, texts))
    });
    let records: Result<Vec<(i64, i64, Vec<String>)>, _> = records.expect("records").collect();
    let (_, mut previous) = BEGINNING;
    for (sequence, at_us, texts) in records.expect("records") {
        let record = AuditRecord {
            sequence,
            at_us,
            act: Act {
                actor: &texts[0],
                action: &texts[1],
                object_id: &texts[2],
                before: &texts[3],
                after: &texts[4],
                reason: &texts[5],
                request_id: &texts[6],
                correlation_id: &texts[7],
            },
        };
        let hash = record.hash("ledger", &previous);
        let sql = "UPDATE audit_records SET previous_hash = ?2, hash = ?3 WHERE sequence = ?1";
        let changed = db.execute(sql, rusqlite::params![sequence, previous, hash]);
        assert_eq!(changed, Ok(1));
        previous = hash;
    }
}

/// A stopped platform with two anchors on the chain, the second one after an audit record of the
/// ledger. Its rows and its anchors are right.
async fn anchored() -> Platform {
    let env = [("PLATFORM_CFA__ANCHOR_INTERVAL_S", "1")];
    let mut platform = Platform::start_with(&env).await;
    let user = platform.rich("50.00").await;
    platform.anchored(1).await;
    let freeze = json!({
        "subaccountId": user.cash(), "status": "SUB_ACCOUNT_STATUS_FROZEN", "reason": "a drill",
    });
    let name = "ledger.SetSubAccountStatus";
    platform.ok("sandbox.compliance", name, freeze).await;
    platform.rich("10.00").await;
    // The first after the last change.
    platform
        .until("the last anchor", "cfa.ListAnchors", json!({}), |answer| {
            let newest = &answer["anchors"][0];
            let is_on_chain = newest["onChain"].as_str().is_some_and(|on| !on.is_empty());
            is_on_chain && newest["record"] != json!("0") && newest["record"] != Value::Null
        })
        .await;
    platform.full_proof().await.success();
    platform.stop().await;
    check(&platform).await.success();
    platform
}

/// A person who can write the ledger's file rewrites its past together with the chain over it: the
/// rows agree then. The anchors on the chain have the end of the chain as it was.
// rows: R215
#[test]
fn r215_a_past_of_the_ledger_that_is_rewritten_with_its_chain_is_found_by_the_anchors() {
    // A repeat of the call that made the first operation would be executed once more.
    const KEY: &str = "UPDATE operations SET idempotency_key = idempotency_key || 'x' \
         WHERE block = 1 AND place = 0";
    const REASON: &str = "UPDATE audit_records SET reason = reason || 'x' WHERE sequence = 1";
    let cases: [(&str, fn(&Connection), &str); 2] = [
        (KEY, chain_blocks, ": block "),
        (REASON, chain_records, ": audit record "),
    ];
    run(async {
        let mut platform = anchored().await;
        let store = Store::open(&platform.data_dir(), "ledger/ledger.sqlite");
        for (sql, chain, part) in cases {
            assert_eq!(store.execute(sql), 1, "{sql}");
            let found = check(&platform).await;
            assert!(!found.status.success(), "{sql}: the chain agrees");
            let db = Connection::open(&store.path).expect("opens");
            chain(&db);
            db.close().expect("closed");
            check(&platform).await.success();

            platform.restart().await;
            let found = platform.full_proof().await;
            assert!(!found.status.success(), "{found:?}");
            let found = named(&found.json()["check"]);
            let is_named = |text: &String| {
                let is_anchor = text.starts_with("anchor ") && text.contains(part);
                is_anchor && text.ends_with(" has another hash, or is missing")
            };
            assert!(
                !found.is_empty() && found.iter().all(is_named),
                "{sql}: {found:?}"
            );
            platform.stop().await;
            store.restore();
        }
        check(&platform).await.success();
    });
}

/// The last block of a ledger.
fn last_block(file: &Path) -> i64 {
    let db = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY).expect("opens");
    let block = db.query_row("SELECT MAX(block) FROM audit_blocks", [], |row| row.get(0));
    block.expect("a block")
}

/// Removes the last block of a ledger with its operations; puts the balances and the links of their
/// sub-accounts back.
fn remove_last_block(store: &Store) {
    let last = last_block(&store.path);
    let own = format!("(SELECT operation_id FROM operations WHERE block = {last})");
    let db = Connection::open(&store.path).expect("opens");
    let postings = format!(
        "SELECT CAST(posting_no AS TEXT) FROM postings WHERE operation_id IN {own} \
         ORDER BY posting_no DESC"
    );
    let postings = names(&db, &postings);
    db.close().expect("closed");
    assert!(!postings.is_empty(), "block {last} has no posting");
    for posting in postings {
        for (side, sign) in [("debit", "+"), ("credit", "-")] {
            let back = format!(
                "UPDATE sub_accounts SET balance = balance {sign} p.amount, \
                 version = version - 1, last_posting = p.{side}_previous FROM postings p \
                 WHERE p.posting_no = {posting} AND subaccount_id = p.{side}_subaccount_id"
            );
            assert_eq!(store.execute(&back), 1, "{back}");
        }
    }
    // An operation may not be in the index of its user yet.
    store.execute(&format!(
        "DELETE FROM operations_of_users WHERE operation_id IN {own}"
    ));
    for sql in [
        format!("UPDATE operations_listed SET through_block = MIN(through_block, {last} - 1)"),
        format!("DELETE FROM postings WHERE operation_id IN {own}"),
        format!("DELETE FROM operations WHERE block = {last}"),
        format!("DELETE FROM audit_blocks WHERE block = {last}"),
    ] {
        assert!(store.execute(&sql) > 0, "{sql}");
    }
}

/// The files agree then, with one another too: an operation that the ledger does not have is not
/// asked for.
// rows: R215
#[test]
fn r215_a_last_operation_that_is_removed_with_its_block_is_found_by_the_anchors() {
    const LEDGER: &str = "ledger/ledger.sqlite";
    run(async {
        let env = [("PLATFORM_CFA__ANCHOR_INTERVAL_S", "1")];
        let mut platform = Platform::start_with(&env).await;
        platform.rich("50.00").await;
        platform.rich("10.00").await;
        let file = platform.data_dir().join(LEDGER);
        let what = "the anchor of the last block";
        platform
            .until(what, "cfa.ListAnchors", json!({}), |answer| {
                let newest = &answer["anchors"][0];
                let is_on_chain = newest["onChain"].as_str().is_some_and(|on| !on.is_empty());
                is_on_chain && newest["block"] == json!(last_block(&file).to_string())
            })
            .await;
        platform.stop().await;
        check(&platform).await.success();
        let store = Store::open(&platform.data_dir(), LEDGER);
        remove_last_block(&store);
        check(&platform).await.success();

        platform.restart().await;
        let found = platform.full_proof().await;
        assert!(!found.status.success(), "{found:?}");
        let found = named(&found.json()["check"]);
        let is_named = |text: &String| {
            let is_anchor = text.starts_with("anchor ") && text.contains(": block ");
            is_anchor && text.ends_with(" has another hash, or is missing")
        };
        assert!(found.iter().any(is_named), "{found:?}");
        platform.stop().await;
    });
}

/// The rows of the anchors have seals. Without them the chain has what was signed.
// rows: R215
#[test]
fn r215_an_altered_anchor_is_found_by_its_seal_and_by_the_chain() {
    let of_another = "UPDATE ledger_anchor SET tx_hash = \
         (SELECT tx_hash FROM ledger_anchor WHERE number = 2) WHERE number = 1";
    let unknown = format!(
        "UPDATE ledger_anchor SET tx_hash = '0x{:064x}' WHERE number = 1",
        7
    );
    let cases = [
        (
            "UPDATE ledger_anchor SET data = zeroblob(length(data)) WHERE number = 1",
            "has other bytes on the chain",
        ),
        (of_another, "has other bytes on the chain"),
        (unknown.as_str(), "is not final on the chain"),
    ];
    run(async {
        let mut platform = anchored().await;
        let store = Store::open(&platform.data_dir(), "cfa/cfa.sqlite");
        for (sql, part) in cases {
            assert_eq!(store.execute(sql), 1, "{sql}");
            let found = named(&check(&platform).await.json());
            let is_row = |text: &String| text.starts_with("ledger_anchor");
            assert!(found.iter().any(is_row), "{sql}: {found:?}");

            platform.restart().await;
            let found = platform.full_proof().await;
            assert!(!found.status.success(), "{found:?}");
            let found = named(&found.json()["check"]);
            let is_anchor = |text: &String| text.starts_with("anchor 1: ") && text.ends_with(part);
            assert!(found.iter().any(is_anchor), "{sql}: {found:?}");
            platform.stop().await;
            store.restore();
        }
        check(&platform).await.success();
    });
}
