//! Checks which index PostgreSQL uses for key lookups without statistics.

use proto::{common::v1::OperationType, ledger::v1::*};
use sqlx::PgPool;

use crate::{harness::*, rows::Rows};

/// Ends the ledger's sessions. A session reports its index reads at the latest when it ends.
async fn end_sessions(rows: &PgPool, world: &World) {
    let sql = "SELECT pid FROM pg_stat_activity WHERE application_name = $1";
    let sessions = sqlx::query_scalar(sql).bind(&world.database.schema);
    let sessions: Vec<i32> = sessions.fetch_all(rows).await.unwrap();
    assert!(!sessions.is_empty());
    let sql = "SELECT COUNT(pg_terminate_backend(pid)) FROM UNNEST($1::int[]) AS pid";
    let sent = sqlx::query_scalar::<_, i64>(sql).bind(&sessions);
    sent.fetch_one(rows).await.unwrap();
    eventually(async || {
        let sql = "SELECT COUNT(*) FROM pg_stat_activity WHERE pid = ANY($1)";
        let left = sqlx::query_scalar::<_, i64>(sql).bind(&sessions);
        (left.fetch_one(rows).await.unwrap() == 0).then_some(())
    })
    .await;
}

/// Number of entries read from an index by sessions that have ended.
async fn read(rows: &PgPool, world: &World, index: &str) -> i64 {
    let sql = "SELECT COALESCE(idx_tup_read, 0) FROM pg_stat_user_indexes \
               WHERE schemaname = $1 AND indexrelname = $2";
    let read = sqlx::query_scalar(sql).bind(&world.database.schema);
    read.bind(index).fetch_one(rows).await.unwrap()
}

async fn send(world: &World, call: &str, keys: std::ops::Range<usize>) {
    let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "0.01", RUB)];
    let operations = keys.map(|key| {
        let key = format!("{call} {key}");
        item(OperationType::Payment, "u1", &key, &legs)
    });
    let request = CreateOperationsRequest {
        context: write(&fresh()),
        operations: operations.collect(),
        ..Default::default()
    };
    let answer = world.client.clone().create_operations(request).await;
    answer.unwrap();
}

/// A session that planned its statements on empty tables keeps the plans until the tables are
/// analyzed.
// rows: R214
#[tokio::test]
async fn r214_a_key_is_found_by_its_own_index_however_many_keys_its_user_has() {
    let world = World::new().await;
    let Rows::Postgres(rows) = world.rows().await else {
        panic!("this test needs PostgreSQL");
    };
    for table in ["operations", "answers", "postings", "sub_accounts"] {
        let sql = format!("ALTER TABLE {table} SET (autovacuum_enabled = false)");
        sqlx::query(sqlx::AssertSqlSafe(sql))
            .execute(&rows)
            .await
            .unwrap();
    }
    world.fund("u1", RUB, "1000").await;
    for _ in 0..12 {
        send(&world, &fresh(), 0..1).await;
    }
    for call in ["a", "b", "c", "d", "e", "f"] {
        send(&world, call, 0..500).await;
    }
    // First no key is stored, then half of them, then all.
    send(&world, "g", 0..500).await;
    send(&world, "g", 250..750).await;
    send(&world, "g", 250..750).await;
    world.assert_books_balance().await;
    end_sessions(&rows, &world).await;
    let of_user = read(&rows, &world, "operations_by_user").await;
    assert!(of_user < 10_000, "{of_user} entries of its user were read");
    let of_keys = read(&rows, &world, "operations_by_key").await;
    assert!(
        of_keys >= 500,
        "only {of_keys} keys were found by their index"
    );
    rows.close().await;
}
