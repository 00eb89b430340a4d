//! A ledger whose past or end is rewritten together with the chain over it, and altered anchors.

use std::path::Path;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use service_kit::audit::{Act, AuditRecord, BEGINNING, Hash};
use sha2::{Digest, Sha256};
use tests::process::Platform;
use tests::shared::run;

use crate::{Store, accept, check, named, names};

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

/// Makes the audit records of a service a chain as they are.
fn chain_records(db: &Connection, service: &str) {
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
        let hash = record.hash(service, &previous);
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
        (REASON, |db| chain_records(db, "ledger"), ": audit record "),
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

/// Sequence and hash (hex) of the last audit record of a service.
fn last_record(file: &Path) -> (i64, String) {
    let db = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY).expect("opens");
    let last = "SELECT MAX(sequence), lower(hex(hash)) FROM audit_records";
    let last = db.query_row(last, [], |row| Ok((row.get(0)?, row.get(1)?)));
    last.expect("a record")
}

/// A person who can write the file of another service, and accepts its altered rows, removes its
/// last audit records together, or rewrites them with their chain: they agree then.
// rows: R215
#[test]
fn r215_audit_records_of_a_service_that_are_cut_or_rewritten_are_found_by_the_anchors() {
    const IDENTITY: &str = "identity/identity.db";
    const LAST: &str = "DELETE FROM audit_records WHERE sequence > 1";
    const REASON: &str = "UPDATE audit_records SET reason = reason || 'x' WHERE sequence = 1";
    run(async {
        for sql in [LAST, REASON] {
            let env = [("PLATFORM_CFA__ANCHOR_INTERVAL_S", "1")];
            let mut platform = Platform::start_with(&env).await;
            platform.rich("50.00").await;
            platform.rich("10.00").await;
            let (sequence, hash) = last_record(&platform.data_dir().join(IDENTITY));
            let what = "the anchor of the last audit record";
            platform
                .until(what, "cfa.ListAnchors", json!({}), |answer| {
                    let on_chain = answer["anchors"][0]["onChain"].as_str();
                    on_chain.is_some_and(|data| data.contains(&hash))
                })
                .await;
            platform.stop().await;
            check(&platform).await.success();
            let store = Store::open(&platform.data_dir(), IDENTITY);
            assert!(store.execute(sql) > 0, "{sql}");
            let db = Connection::open(&store.path).expect("opens");
            chain_records(&db, "identity");
            db.close().expect("closed");
            assert!(!check(&platform).await.status.success(), "{sql}: seals");
            accept(&platform).await;

            platform.restart().await;
            let found = platform.full_proof().await;
            assert!(!found.status.success(), "{found:?}");
            let found = named(&found.json()["check"]);
            let is_anchor = |text: &String| text.starts_with("anchor ");
            assert!(found.iter().all(is_anchor), "{sql}: {found:?}");
            let fault = format!("{sequence} of identity has another hash, or is missing");
            let fault = format!(": audit record {fault}");
            let is_named = |text: &String| text.ends_with(&fault);
            assert!(found.iter().any(is_named), "{sql}: {found:?}");
            platform.stop().await;
        }
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
