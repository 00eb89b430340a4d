//! No statement of the approvals service scans a table on PostgreSQL.
//!
//! The test fills the service's tables, restarts the service and runs its workload. The server
//! reports the plan of each statement that it ran, including those inside triggers.

use events::StoreUrl;
use sqlx::{Connection, PgConnection};
use testkit::plans::postgres;

use crate::{workload, world::World};

/// Maximum rows that one node of a plan may read. A page has 50 rows, the tables have 40,000.
const ROWS_MAX: u64 = 1_000;

/// Small tables: one has a row per migration. The other has a few rows in this test; the ledger's
/// test explains the statements of a filled outbox.
const SMALL: [&str; 2] = ["_sqlx_migrations", "outbox"];

/// Parts of the statements that the test must have run.
const EXPLAINED: &[&str] = &[
    "SELECT * FROM approvals WHERE approval_id = $1 FOR UPDATE",
    "FROM approvals WHERE requester = $1 AND request_key =",
    "FROM approvals WHERE decider = $1 AND decision_key =",
    "SELECT COUNT(*) FROM approvals WHERE requester =",
    "INSERT INTO approvals",
    "UPDATE approvals SET",
    "FROM approvals WHERE (created_at_us, approval_id) <",
    "FROM approvals WHERE status = $4 AND",
    "FROM approvals WHERE status = 'PENDING' AND",
    "FROM approvals WHERE status = 'APPROVED' AND",
    "SELECT MIN(expires_at_us)",
    "SELECT MIN(next_attempt_at_us)",
    "FROM audit_records WHERE sequence = (SELECT MAX(sequence) FROM audit_records)",
    "INSERT INTO audit_records",
    "FROM audit_records WHERE sequence < $1 ORDER BY sequence",
    "FROM audit_records WHERE sequence < $1 AND object_id =",
    "FROM audit_records WHERE sequence < $1 AND actor =",
];

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table() {
    postgres::record();
    let mut world = World::start(|_| ()).await;
    let url = world.config.url.postgres();
    let url = url.expect("this test needs PostgreSQL").to_owned();
    fill(&url).await;
    // Only the sessions of the second start are recorded: the first start's have plans of empty
    // tables.
    world.config.url = StoreUrl::new(format!("{url}&{}", postgres::SETTINGS));
    let world = world.restart().await;

    workload::run(&world).await;
    world.stop().await;

    let explained = postgres::explain(ROWS_MAX, &SMALL);
    explained.assert_no_scans(&[]);
    explained.assert_explained(EXPLAINED);
}

async fn fill(url: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let fill = sqlx::raw_sql(include_str!("fill.sql"));
    fill.execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}
