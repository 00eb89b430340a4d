//! No statement of the ledger scans a table on SQLite. The test explains every statement that the
//! writer and the readers run in the workload, on the file that they ran on.
//!
//! This is a separate test binary because the record of statements is process-wide.

#[path = "../boundary/harness.rs"]
#[allow(dead_code)]
mod harness;
#[path = "../boundary/rows.rs"]
#[allow(dead_code)]
mod rows;
mod workload;

use testkit::plans::{self, Allowed};

use crate::harness::*;

const ALLOWED: [Allowed; 6] = [
    Allowed {
        statement: "FROM audit_blocks ORDER BY block DESC LIMIT 1",
        reason: "reads the last row of the table and the first rows of two others",
    },
    Allowed {
        statement: "SELECT EXISTS (SELECT 1 FROM operations) AND NOT EXISTS (SELECT 1 FROM audit_blocks",
        reason: "reads the first row of each table, at the start",
    },
    Allowed {
        statement: "FROM sub_accounts s LEFT JOIN instruments i ON i.instrument_id = s.instrument_id WHERE $1 = ''",
        reason: "the trial balance is a sum over all sub-accounts",
    },
    Allowed {
        statement: "AND ($3 = '' OR l.user_id = $3 OR l.user_id = '')",
        reason: "staff set the limits, so there are few",
    },
    Allowed {
        statement: "FROM operations o WHERE (o.created_at_us, o.operation_id) <",
        reason: "only staff list operations without a user",
    },
    Allowed {
        statement: "FROM _sqlx_migrations",
        reason: "has a row per migration, read at the start",
    },
];

/// URL of the PostgreSQL server: none.
fn server() -> Option<String> {
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_a_table() {
    plans::record();
    let world = World::new().await;
    workload::run(&world).await;
    world.assert_books_balance().await;
    plans::until_recorded("DELETE FROM outbox WHERE position <=").await;

    let file = world.config().data_dir.join("ledger.sqlite");
    let explained = plans::explain(&[&file]).await;
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(&[
        // statements of the writer
        "FROM operations WHERE operation_id = ?1",
        "SELECT MAX(operation_id) FROM operations",
        "SELECT MAX(idempotency_key) FROM operations",
        "SELECT MAX(external_ref) FROM operations",
        "FROM operations WHERE idempotency_key = ?1",
        "FROM operations WHERE external_ref = ?1",
        "FROM operations WHERE tx_hash = ?1 AND status NOT IN (7, 8, 9, 12)",
        "WHERE p.operation_id = ?1",
        "WHERE h.hold_id = ?1",
        "FROM accounts WHERE account_id = ?1",
        "SELECT MAX(idempotency_key) FROM answers",
        "FROM answers WHERE idempotency_key = ?1",
        "FROM sources WHERE source = ?1",
        "FROM parked WHERE match_key < 'tx:'",
        "FROM velocity_limits l",
        "WITH RECURSIVE walk",
        "UPDATE sub_accounts SET balance",
        "UPDATE holds SET amount",
        "UPDATE operations SET status",
        "INSERT INTO postings",
        "INSERT INTO audit_blocks",
        "FROM audit_records WHERE sequence = (SELECT MAX(sequence) FROM audit_records)",
        "INSERT INTO audit_records",
        "INSERT INTO inbox",
        "DELETE FROM outbox WHERE position <=",
        // statements of the readers
        "FROM operations_of_users u CROSS JOIN operations o",
        "AND h.user_id =",
        "AND h.subaccount_id =",
        "AND h.status = 1",
        "AND h.parent_hold_id = ? AND h.status = 1",
        "FROM holds WHERE status = 1 AND expires_at_us IS NOT NULL",
        "FROM accounts WHERE (created_at_us, account_id) <",
        "s.user_id =",
        "s.instrument_id =",
        "s.subaccount_id IN (SELECT value FROM json_each(",
        "WITH RECURSIVE near",
        "FROM audit_records WHERE sequence < ? ORDER BY sequence",
        "FROM audit_records WHERE sequence < ? AND object_id =",
        "FROM audit_records WHERE sequence < ? AND actor =",
    ]);
}
