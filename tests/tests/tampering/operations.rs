//! Altered trades, which have no seals, and final operations of the ledger that are set back.

use rusqlite::Connection;
use serde_json::json;
use tests::shared::run;

use crate::{Store, check, named, names, stopped};

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
