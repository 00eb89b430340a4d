//! No statement of the ledger, its outbox or its inbox scans a table on PostgreSQL.
//!
//! The test fills every growing table and runs a ledger's workload. The server reports the plan of
//! each statement that it ran, including those inside functions.

use ledger::{LedgerConfig, LedgerDeps, StoreUrl};
use sqlx::PgPool;
use testkit::plans::{Allowed, postgres};
use tokio_util::sync::CancellationToken;

use crate::{
    harness::*,
    rows::{Database, Rows},
    workload,
};

/// Maximum rows that one node of a plan may read. The relay reads 2,048 rows at a time, and no
/// other statement of this test reads more. The tables have 40,000 rows.
const ROWS_MAX: u64 = 4_096;

/// Small tables: one has a row per migration, the other the limits that staff set.
const SMALL: [&str; 2] = ["_sqlx_migrations", "velocity_limits"];

const ALLOWED: [Allowed; 3] = [
    Allowed {
        statement: "SELECT COUNT(*) FROM holds WHERE status = 1",
        reason: "counts the active holds for a gauge at the start, by their own index",
    },
    Allowed {
        statement: "SELECT EXISTS (SELECT 1 FROM operations) AND NOT EXISTS (SELECT 1 FROM audit_blocks",
        reason: "the first row of each table, at the start",
    },
    Allowed {
        statement: "FROM sub_accounts s LEFT JOIN instruments i ON i.instrument_id = s.instrument_id WHERE $1 = ''",
        reason: "the trial balance is a sum over all sub-accounts",
    },
];

/// Parts of the statements that the test must have run.
const EXPLAINED: &[&str] = &[
    // locks of a group
    "FROM sources WHERE source = ANY($1) ORDER BY source FOR UPDATE",
    "WITH RECURSIVE chain AS",
    "SELECT DISTINCT p.debit_subaccount_id, p.credit_subaccount_id",
    "WHERE s.subaccount_id = ANY(ids) ORDER BY s.subaccount_id FOR UPDATE",
    "WHERE s.subaccount_id = ANY(ids) OR s.user_id = ANY(users)",
    "FROM sub_accounts s WHERE s.subaccount_id = ANY(locked)",
    "FROM users WHERE user_id = ANY($1) ORDER BY user_id FOR UPDATE",
    "FROM users WHERE user_id = ANY($1) ORDER BY user_id FOR SHARE",
    "FROM velocity_limits WHERE limit_id = ANY($1) ORDER BY limit_id FOR UPDATE",
    "UNNEST(answer_users, answer_keys, answer_calls)",
    // rows that a group's fold depends on
    "SELECT subaccount_id FROM sub_accounts WHERE user_id = ANY($1)",
    "WHERE h.hold_id = ANY($1)",
    "FROM operations WHERE operation_id = ANY($1)",
    "SELECT o.* FROM UNNEST($1::text[], $2::text[], $3::int[]) AS j (user_id, key, scope) JOIN operations",
    "AS j (reference, kind) JOIN operations",
    "FROM operations WHERE tx_hash = ANY($1)",
    "WHERE p.operation_id = ANY($1)",
    "FROM accounts WHERE account_id = ANY($1)",
    "SELECT user_id, blocked FROM users WHERE user_id = ANY($1)",
    "FROM instruments WHERE instrument_id = ANY($1)",
    "AS j (user_id, key, call) JOIN answers a ON a.user_id",
    "through_sequence, digest FROM sources WHERE source = ANY($1)",
    "FROM parked WHERE match_key = ANY($1)",
    "WHERE l.instrument_id = ANY($1)",
    "JOIN postings p ON p.debit_subaccount_id = j.id",
    // writes
    "WITH updated AS (UPDATE sub_accounts",
    "UPDATE sub_accounts s SET balance",
    "SELECT 1 FROM audit_blocks b WHERE b.block = (SELECT MAX(block) FROM audit_blocks)",
    "INSERT INTO users",
    "UPDATE users u SET blocked",
    "INSERT INTO accounts",
    "INSERT INTO sub_accounts",
    "INSERT INTO holds",
    "UPDATE holds h SET amount",
    "WITH sealed AS (INSERT INTO audit_blocks",
    "FROM audit_records WHERE sequence = (SELECT MAX(sequence) FROM audit_records)",
    "INSERT INTO audit_records",
    "UPDATE operations o SET status",
    "INSERT INTO sources",
    "UPDATE sources s SET",
    "INSERT INTO parked",
    "DELETE FROM parked WHERE match_key = ANY($1)",
    "DELETE FROM parked WHERE at_us < $1",
    // reads
    "FROM accounts WHERE account_id = $1",
    "FROM accounts WHERE (created_at_us, account_id) <",
    "WHERE s.subaccount_id = $1",
    "s.user_id =",
    "s.instrument_id =",
    "s.subaccount_id = ANY(ARRAY(",
    "FROM operations WHERE operation_id = $1",
    "WHERE p.operation_id = $1",
    "SELECT o.* FROM operations o WHERE o.user_id =",
    "AND o.idempotency_key =",
    "WHERE h.hold_id = $1",
    "AND h.user_id =",
    "AND h.subaccount_id =",
    "AND h.parent_hold_id =",
    "AND h.status = 1",
    "FROM holds WHERE status = 1 AND expires_at_us IS NOT NULL",
    "SELECT through_sequence FROM sources WHERE source = $1",
    "SELECT created_at_us FROM entries",
    "FROM entries e JOIN operations o ON o.operation_id = e.operation_id ORDER BY e.version",
    "FROM velocity_limits l LEFT JOIN instruments i",
    "FROM audit_records WHERE sequence < $1 ORDER BY sequence",
    "FROM audit_records WHERE sequence < $1 AND object_id =",
    "FROM audit_records WHERE sequence < $1 AND actor =",
    // outbox and inbox
    "INSERT INTO outbox",
    "FROM outbox ORDER BY position LIMIT $1",
    "DELETE FROM outbox WHERE position = ANY($1)",
    "INSERT INTO inbox",
];

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reads_a_whole_table() {
    postgres::record();
    let database = Database::fresh().await;
    let url = format!("{}&{}", database.url, postgres::SETTINGS);
    let world = World::on(database, Some(url.clone())).await;
    let Rows::Postgres(rows) = world.rows().await else {
        panic!("this test needs PostgreSQL");
    };
    let fill = sqlx::raw_sql(include_str!("fill.sql"));
    fill.execute(&rows).await.unwrap();
    until_replanned(&rows, &world).await;
    postgres::forget();

    workload::run(&world).await;
    timer_tasks(&world, url, &rows).await;
    until_none(&rows, "SELECT COUNT(*) FROM outbox").await;

    let explained = postgres::explain(ROWS_MAX, &SMALL);
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(EXPLAINED);
    rows.close().await;
}

/// Waits until every statement that the ledger planned before now has ended.
async fn until_replanned(rows: &PgPool, world: &World) {
    let now = sqlx::query_scalar("SELECT clock_timestamp()::text");
    let now: String = now.fetch_one(rows).await.unwrap();
    eventually(async || {
        let sql = "SELECT COUNT(*) FROM pg_stat_activity WHERE application_name = $1 \
                   AND state <> 'idle' AND query_start <= $2::timestamptz";
        let left = sqlx::query_scalar::<_, i64>(sql);
        let left = left.bind(&world.database.schema).bind(&now);
        (left.fetch_one(rows).await.unwrap() == 0).then_some(())
    })
    .await;
}

/// Runs the start and the timer tasks of a second ledger. The ledger of the test runs these tasks
/// only on request.
async fn timer_tasks(world: &World, url: String, rows: &PgPool) {
    let config = LedgerConfig {
        url: StoreUrl::new(url),
        hold_sweep_interval_ms: 20,
        ..world.config()
    };
    let deps = LedgerDeps {
        log: world.log.clone(),
        cfa: rpc::Channel::local(&rpc::LocalSlot::new(), "sandbox.service"),
        clock: world.clock.clone(),
    };
    let shutdown = CancellationToken::new();
    let second = ledger::start(config, deps, shutdown.clone()).await.unwrap();
    until_none(rows, "SELECT COUNT(*) FROM parked WHERE at_us = 0").await;
    shutdown.cancel();
    second.stopped().await;
}

async fn until_none(rows: &PgPool, count: &'static str) {
    eventually(|| async {
        let count: i64 = sqlx::query_scalar(count).fetch_one(rows).await.unwrap();
        (count == 0).then_some(())
    })
    .await;
}
