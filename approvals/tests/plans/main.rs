//! No statement of the approvals service scans a table. A test binary of its own, because the
//! record of statements is process-wide.

#[path = "../boundary/database.rs"]
mod database;
#[path = "../boundary/world.rs"]
#[allow(dead_code, reason = "each test target uses its part")]
mod world;

use proto::approvals::v1::{self as pb, ApprovalStatus};
use testkit::plans::{self, Allowed};

use world::{ANNA, BORIS, HOUR_US, World, unblock};

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
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    let mut anna = world.as_caller(ANNA);
    anna.request_approval(unblock("r-1")).await.unwrap();
    world.approve(BORIS, &asked, "a-1").await.unwrap();
    let expiring = world.request("r-2").await;
    world.clock.advance_us(25 * HOUR_US);
    let id = &expiring.approval_id;
    world.until(id, ApprovalStatus::Expired).await;
    for status in [ApprovalStatus::Unspecified, ApprovalStatus::Executed] {
        let list = pb::ListApprovalsRequest {
            status: status.into(),
            ..Default::default()
        };
        anna.list_approvals(list).await.unwrap();
    }
    for (actor, object_id) in [("", ""), ("anna", ""), ("", id), ("anna", id)] {
        let records = world.records(actor, object_id).await;
        assert!(!records.is_empty(), "{actor} {object_id}");
    }
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
