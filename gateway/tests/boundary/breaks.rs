//! Users whose money differs between journal and ledger.

use std::time::Duration;

use proto::ledger::v1 as books;
use proto::market::v1::OrderStatus;

use crate::world::*;

/// Sets what the ledger has left in a hold.
async fn adjust(world: &mut World, hold_id: &str, remaining: &str) {
    let request = books::AdjustHoldRequest {
        context: context(&format!("adjust-{}", unique())),
        hold_id: hold_id.to_owned(),
        remaining_amount: Some(proto::common::v1::MonetaryAmount {
            currency_code: "CFA-RUB".into(),
            amount: decimal(remaining),
        }),
    };
    world.ledger.adjust_hold(request).await.unwrap();
}

/// True once an order has a hold of its own, split out of Ann's trading hold.
async fn is_carved(world: &mut World) -> bool {
    let holds = world.holds("ann", "CFA-RUB").await;
    holds.iter().any(|hold| hold.parent_hold_id.is_some())
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    // What is mended here by hand is not to be healed in between.
    settings.gateway.sweep_interval_ms = 3_600_000;
    settings
}

#[tokio::test]
async fn a_user_whose_hold_is_short_may_not_trade_until_it_agrees() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), settings()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "1000", "0").await;
    let hold = world.open_hold("ann", "CFA-RUB", "600").await;
    let order = world.place(buy("ann", "10", "10")).await.unwrap();
    let other = world.place(buy("bob", "9", "10")).await.unwrap();
    // An order that stays open has its own hold a second later: only then stands still what is adjusted here.
    while !is_carved(&mut world).await {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    adjust(&mut world, &hold.hold_id, "499.8").await;

    // A start compares everything; what stays different stops the user, and nobody else.
    let mut world = world.restart(settings()).await;
    while world.order(&order.order_id).await.unwrap().status() == OrderStatus::Open {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let cancelled = world.order(&order.order_id).await.unwrap();
    assert_eq!(cancelled.cancel_reason, "USER_BLOCKED");
    world.place(buy("ann", "10", "1")).await.unwrap_err();
    let other = world.order(&other.order_id).await.unwrap();
    assert_eq!(other.status(), OrderStatus::Open);
    assert!(world.settlement.suspensions().contains_key("ann"));

    // Repaired, the user goes on without anybody's help.
    world.settled().await;
    adjust(&mut world, &hold.hold_id, "600").await;
    while world.place(buy("ann", "10", "1")).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(world.settlement.breaks().await.unwrap().is_empty());
    while !world.settlement.suspensions().is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    world.stop().await;
}
