//! The answer to PlaceOrder comes from the order's record, not from the history.

use proto::market::v1::{
    Order, OrderSide, OrderStatus, OrderType, SelfTradePrevention, TimeInForce,
};
use sqlx::{Connection, SqliteConnection};

use crate::world::*;

/// Locks a database against writes of other connections.
pub async fn lock_database(folder: &std::path::Path, file: &str) -> SqliteConnection {
    let url = format!("sqlite:{}", folder.join(file).display());
    let mut lock = SqliteConnection::connect(&url).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE")
        .execute(&mut lock)
        .await
        .unwrap();
    lock
}

/// The history is locked after the call has stored its request and before its order enters.
#[tokio::test]
async fn place_order_is_answered_while_the_history_cannot_write() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let requests = async || {
        let url = format!(
            "sqlite:{}",
            folder.path().join("gateway/market.db").display()
        );
        let mut reader = SqliteConnection::connect(&url).await.unwrap();
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM requests");
        count.fetch_one(&mut reader).await.unwrap()
    };
    let before = requests().await;
    let ledger = lock_database(folder.path(), "ledger/ledger.sqlite").await;
    let order = world.place(buy("ann", "1", "1"));
    let history = async {
        until_true("the request is stored", async || requests().await > before).await;
        let history = lock_database(folder.path(), "gateway/market.db").await;
        ledger.close().await.unwrap();
        history
    };
    let both = async { tokio::join!(order, history) };
    let (order, history) = in_time("the order is answered", both).await;
    let order = order.unwrap();
    assert_eq!(order.status(), OrderStatus::Open);
    history.close().await.unwrap();
    assert_eq!(world.order(&order.order_id).await.unwrap(), order);
    world.stop().await;
}

/// For every outcome of an order that enters, the answer equals a later read.
#[tokio::test]
async fn the_answer_to_place_order_equals_a_later_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "10000", "10").await;
    world.user("bob", "0", "1000").await;
    let with_time_in_force = |order: Order, time_in_force: TimeInForce| Order {
        time_in_force: time_in_force.into(),
        ..order
    };
    let named = Order {
        client_order_id: "a-7".to_owned(),
        ..buy("ann", "10", "5")
    };
    let dated = Order {
        expires_at: Some(proto::convert::to_timestamp_us(4_000_000_000_000_000)),
        ..with_time_in_force(sell("bob", "20", "1"), TimeInForce::Gtd)
    };
    let market = Order {
        r#type: OrderType::Market.into(),
        price: None,
        ..with_time_in_force(sell("bob", "10", "50"), TimeInForce::Ioc)
    };
    let post_only = Order {
        post_only: true,
        ..sell("bob", "8", "1")
    };
    let decrement = Order {
        self_trade_prevention: SelfTradePrevention::Decrement.into(),
        ..limit("ann", OrderSide::Sell, "8", "1")
    };
    for (order, status) in [
        (named, OrderStatus::Open),
        (dated, OrderStatus::Open),
        (sell("bob", "10", "2"), OrderStatus::Filled),
        (sell("bob", "9", "7"), OrderStatus::PartiallyFilled),
        (buy("ann", "8", "3"), OrderStatus::Open),
        (
            with_time_in_force(buy("ann", "9", "9"), TimeInForce::Ioc),
            OrderStatus::Cancelled,
        ),
        (
            with_time_in_force(sell("bob", "8", "90"), TimeInForce::Fok),
            OrderStatus::Cancelled,
        ),
        (post_only, OrderStatus::Rejected),
        (decrement, OrderStatus::Cancelled),
        (market, OrderStatus::Cancelled),
    ] {
        let answer = world.place(order).await.unwrap();
        assert_eq!(answer.status(), status, "{answer:?}");
        assert_eq!(world.order(&answer.order_id).await.unwrap(), answer);
    }
    world.stop().await;
}
