use events::Sqlite;
use sqlx::{AssertSqlSafe, Executor};

use super::*;

const NODE: u8 = 5;
const BEGIN_NS: u64 = 1_700_000_000_123_456_789;

fn node() -> NodeId {
    NodeId::new(NODE).unwrap()
}

fn all() -> PageBound {
    PageBound {
        key: i64::MAX,
        limit: 10,
    }
}

/// A file of the schema before integer keys: two orders, their trade, a market order that never had
/// a price, an answer, and data that is not derived.
async fn old_file(path: PathBuf, ids: [Id128; 4]) {
    let before = events::migrations!("migrations/sqlite": "0001_market", "0002_lists");
    let db = Sqlite::open(&path, &before).await.unwrap();
    let [sell, buy, market, trade] = ids;
    let us = |n: u64| (BEGIN_NS + n * 1_000_777) / 1_000;
    let order = |id: Id128,
                 user: &str,
                 side: u8,
                 price: &str,
                 filled: &str,
                 client: &str,
                 n: u64| {
        format!(
            "('{id}', '{user}', 'BOND-1', {side}, 1, 1, 0, 1, 0, '{price}', '10', '{filled}', 40020, 3, 'WHY', \
             '{client}', '18446744073709551615', 0, {}, {}, {})",
            77 + n,
            us(n),
            us(3)
        )
    };
    let sql = format!(
        "UPDATE projection SET sequence = 90; \
         INSERT INTO orders VALUES {}, {}, {}; \
         INSERT INTO trades VALUES \
         ('{trade}', '{buy}', '{sell}', 'bob', 'ann', 'BOND-1', '100.05', '4', 40, 9, 1, {}, 78); \
         INSERT INTO answers VALUES ('{}', 78, '{buy}', 0), ('{}', 0, '', 2); \
         INSERT INTO requests VALUES ('{}', 'c-1', 1); \
         INSERT INTO client_order_ids VALUES ('bob', '9223372036854775809', 'mine'); \
         INSERT INTO positions VALUES ('ann', 'BOND-1', '6'); INSERT INTO listed VALUES ('BOND-1', 2);",
        order(sell, "ann", Side::Sell.code(), "100.05", "4", "0", 0),
        order(
            buy,
            "bob",
            Side::Buy.code(),
            "101.00",
            "4",
            "9223372036854775809",
            1
        ),
        order(market, "bob", Side::Buy.code(), "", "0", "12", 2),
        us(1),
        Id128::from_u128(1),
        Id128::from_u128(2),
        Id128::from_u128(1),
    );
    let mut tx = db.write().await.unwrap();
    tx.execute(AssertSqlSafe(sql)).await.unwrap();
    tx.commit().await.unwrap();
    db.close().await;
}

#[tokio::test]
async fn rows_of_the_earlier_schema_are_read_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("market.db");
    let at = |n: u64| (BEGIN_NS + n * 1_000_777, Sequence(77 + n));
    let ids = [0, 1, 2].map(|n| order_uuid(at(n).0, node(), at(n).1));
    let [sell, buy, market] = ids;
    let trade = trade_uuid(at(1).0, node(), at(1).1, 300);
    old_file(path.clone(), [sell, buy, market, trade]).await;
    let db = Store::open(path, node()).await.unwrap();

    let row = order(&db, &buy.to_string()).await.unwrap().unwrap();
    assert_eq!(row.order_id, buy.to_string());
    assert_eq!(
        (&*row.user_id, &*row.instrument_id, row.side),
        ("bob", "BOND-1", Side::Buy)
    );
    assert_eq!(
        row.price.map(|price| price.to_string()).as_deref(),
        Some("101.00")
    );
    assert_eq!(
        (row.quantity.to_string(), row.filled.to_string()),
        ("10".into(), "4".into())
    );
    assert_eq!(
        (&*row.cancel_reason, &*row.client_order_id),
        ("WHY", "mine")
    );
    assert_eq!(
        (row.engine_order_id, row.sequence, row.value_minor),
        (u64::MAX, 78, 40_020)
    );
    assert_eq!(row.created_at_us as u64, at(1).0 / 1_000);
    let listed = orders(&db, &OrderFilter::default(), all()).await.unwrap();
    let listed: Vec<_> = listed.iter().map(|row| row.order_id.clone()).collect();
    assert_eq!(listed, [market, buy, sell].map(|id| id.to_string()));
    let row = order(&db, &market.to_string()).await.unwrap().unwrap();
    assert_eq!((row.price, &*row.client_order_id), (None, "12"));

    let row = super::trade(&db, &trade.to_string())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        (row.buy_order_id, row.sell_order_id),
        (buy.to_string(), sell.to_string())
    );
    assert_eq!((&*row.buyer_id, &*row.seller_id), ("bob", "ann"));
    assert_eq!(
        (row.price.to_string(), row.quantity.to_string()),
        ("100.05".into(), "4".into())
    );
    assert_eq!((row.fee_minor, row.trade_number, row.sequence), (40, 9, 78));
    assert_eq!(row.executed_at_us as u64, at(1).0 / 1_000);

    let answered = answer(&db, Id128::from_u128(1)).await.unwrap().unwrap();
    assert_eq!(
        (answered.sequence, answered.order_id),
        (78, buy.to_string())
    );
    let answered = answer(&db, Id128::from_u128(2)).await.unwrap().unwrap();
    assert_eq!((answered.order_id.as_str(), answered.cancelled), ("", 2));
    let keys = [Id128::from_u128(1), Id128::from_u128(9)];
    let known = correlations(&db, &keys).await.unwrap();
    assert_eq!(
        known.into_iter().collect::<Vec<_>>(),
        [(Id128::from_u128(1), "c-1".to_owned())]
    );
    assert_eq!(
        position_of(&db, "ann", "BOND-1").await.unwrap().to_string(),
        "6"
    );
    assert_eq!(listed_status(&db, "BOND-1").await.unwrap(), Some(2));
    // The migration sets the feed's position: earlier events are in the outbox.
    assert_eq!(feed_position(&db).await.unwrap(), Sequence(90));
    assert_eq!(*db.position.borrow(), Sequence(90));
}

#[tokio::test]
async fn correlation_ids_of_old_calls_are_removed_and_younger_ones_stay() {
    let folder = tempfile::tempdir().unwrap();
    let db = Store::open(folder.path().join("market.db"), node())
        .await
        .unwrap();
    let keys: Vec<Id128> = (1..=5).map(Id128::from_u128).collect();
    for (key, at_us) in keys.iter().zip([10, 20, 30, 40, 50]) {
        note_request(&db, *key, "c", None, at_us).await.unwrap();
    }
    let known = async || correlations(&db, &keys).await.unwrap().len();
    assert_eq!(forget_requests(&db, 10, 2).await.unwrap(), 0);
    assert_eq!(forget_requests(&db, 45, 2).await.unwrap(), 2);
    assert_eq!(known().await, 3);
    assert_eq!(forget_requests(&db, 45, 9).await.unwrap(), 2);
    assert!(
        correlations(&db, &keys)
            .await
            .unwrap()
            .contains_key(&keys[4])
    );
    assert_eq!(known().await, 1);
}

async fn insert(db: &Store, rows: &[(u64, u64)]) {
    let values = rows.iter().map(|(sequence, created_ns)| {
        format!("({sequence}, 1, 1, 1, 1, 1, 0, 1, 0, 5, 5, 0, 0, 2, '', 0, 0, {created_ns}, 1)")
    });
    let values = values.collect::<Vec<_>>().join(", ");
    let insert = format!(
        "INSERT OR IGNORE INTO users VALUES (1, 'ann'); \
         INSERT OR IGNORE INTO instruments VALUES (1, 'BOND-1', 5, 2, 10, 0); INSERT INTO orders VALUES {values};"
    );
    let write = move |tx: &events::DirectTx| Ok::<_, events::Error>(tx.execute_batch(&insert)?);
    db.file.transact(write).await.unwrap();
    let last = rows.iter().map(|(sequence, _)| *sequence).max().unwrap();
    db.position.send_replace(Sequence(last));
}

#[tokio::test]
async fn an_id_finds_its_row_beyond_32_bits_of_sequence_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let db = Store::open(folder.path().join("market.db"), node())
        .await
        .unwrap();
    // One order in each round of 2^32 commands, and none in rounds 10 to 19.
    let low = 1_000;
    let rounds = (0..80_u64).filter(|round| !(10..20).contains(round));
    let rows: Vec<(u64, u64)> = rounds
        .map(|round| ((round << 32) | low, BEGIN_NS + round * 1_000_000))
        .collect();
    insert(&db, &rows).await;
    let first = order_uuid(BEGIN_NS, node(), Sequence(low)).to_string();
    let first = order(&db, &first).await.unwrap().unwrap();
    assert_eq!(first.price.unwrap().to_string(), "0.25");
    assert_eq!(first.quantity.to_string(), "50");
    for (sequence, created_ns) in rows {
        let find = async |time_ns, sequence| {
            let id = order_uuid(time_ns, node(), Sequence(sequence)).to_string();
            order(&db, &id).await.unwrap().map(|row| row.sequence)
        };
        assert_eq!(find(created_ns, sequence).await, Some(sequence));
        assert_eq!(find(created_ns + 300, sequence).await, None, "another time");
        assert_eq!(
            find(created_ns, sequence + 1).await,
            None,
            "another command"
        );
    }
    let other = order_uuid(BEGIN_NS, NodeId::new(NODE + 1).unwrap(), Sequence(low));
    for id in [other.to_string(), "nothing".into(), Id128::NONE.to_string()] {
        assert_eq!(order(&db, &id).await.unwrap(), None);
        assert_eq!(trade(&db, &id).await.unwrap(), None);
    }
}
