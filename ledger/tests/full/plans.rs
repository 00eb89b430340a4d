//! The index used for key lookups on a server without statistics.

use std::time::Duration;

use proto::{common::v1::OperationType, ledger::v1::*};
use sqlx::PgPool;

use crate::{harness::*, rows::Rows};

/// Number of entries read from an index so far.
async fn read(rows: &PgPool, world: &World, index: &str) -> i64 {
    // A session reports its reads at most once a second, when a transaction ends.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    send(world, &fresh(), 0..1).await;
    let sql = "SELECT COALESCE(idx_tup_read, 0) FROM pg_stat_user_indexes WHERE schemaname = $1 AND indexrelname = $2";
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

/// A session that planned while the tables were empty keeps its plans until the tables are
/// analyzed.
// rows: R214
#[tokio::test]
async fn r214_a_key_is_found_by_its_own_index_however_many_keys_its_user_has() {
    let world = World::new().await;
    let Rows::Postgres(rows) = world.rows().await else {
        panic!("this is about PostgreSQL");
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
    let before = read(&rows, &world, "operations_by_user").await;
    // New keys, half of them stored, all stored.
    send(&world, "g", 0..500).await;
    send(&world, "g", 250..750).await;
    send(&world, "g", 250..750).await;
    let read = read(&rows, &world, "operations_by_user").await - before;
    assert!(read < 10_000, "{read} entries of its user were read");
    world.assert_books_balance().await;
    rows.close().await;
}
