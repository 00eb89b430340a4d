//! No statement of the approvals service scans a table on SQLite. A test binary of its own,
//! because the record of statements is process-wide.

#[path = "../boundary/database.rs"]
mod database;
mod workload;
#[path = "../boundary/world.rs"]
#[allow(dead_code, reason = "each test target uses its part")]
mod world;

use testkit::plans::{self, Allowed};

use world::World;

const ALLOWED: [Allowed; 1] = [Allowed {
    statement: "FROM _sqlx_migrations",
    reason: "one row per migration, at startup",
}];

/// The plans of SQLite.
fn server() -> Option<String> {
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_a_table() {
    plans::record();
    let world = World::start(|_| ()).await;
    workload::run(&world).await;
    let file = world.folder.path().join("approvals.db");
    let explained = plans::explain(&[&file]).await;
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(&[
        "SELECT * FROM approvals WHERE approval_id =",
        "FROM approvals WHERE requester = $1 AND request_key =",
        "FROM approvals WHERE decider = $1 AND decision_key =",
        "SELECT COUNT(*) FROM approvals",
        "INSERT INTO approvals",
        "UPDATE approvals SET",
        "FROM approvals WHERE (created_at_us, approval_id) <",
        "FROM approvals INDEXED BY approvals_by_status WHERE status =",
        "FROM approvals INDEXED BY approvals_expiring WHERE status = 'PENDING' AND",
        "FROM approvals INDEXED BY approvals_due WHERE status = 'APPROVED' AND",
        "SELECT MIN(expires_at_us)",
        "SELECT MIN(next_attempt_at_us)",
        "FROM audit_records WHERE sequence = (SELECT MAX(sequence) FROM audit_records)",
        "INSERT INTO audit_records",
        "FROM audit_records WHERE sequence < ? ORDER BY sequence",
        "FROM audit_records WHERE sequence < ? AND object_id =",
        "FROM audit_records WHERE sequence < ? AND actor =",
    ]);
    world.stop().await;
}
