//! Blocks of users whose hold differs between journal and ledger.

use admission::Blocks;
use prost::Message;
use proto::identity::v1 as identity;
use proto::ledger::v1 as books;
use proto::market::v1::OrderStatus;
use types::UserId;
use types::command::BlockCause::{Difference, Identity};

use crate::world::*;

/// Sets the remaining amount of a hold in the ledger.
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

/// Waits until an order's hold is split from ann's trading hold.
async fn until_split(world: &mut World) {
    until_true("the order's own hold", async || {
        let holds = world.holds("ann", "CFA-RUB").await;
        holds.iter().any(|hold| hold.parent_hold_id.is_some())
    })
    .await;
}

/// The causes of a user's block in the replica.
fn blocks(world: &World, user_id: &str) -> Blocks {
    let id = UserId::new(user_id).unwrap();
    world.replica().read(|state| {
        let admission = state.core().admission();
        admission
            .user(admission.user_ix(&id).unwrap())
            .unwrap()
            .blocks
    })
}

async fn until_blocks(world: &World, user_id: &str, wanted: impl Fn(Blocks) -> bool) {
    let what = format!("the block of {user_id}");
    until_true(&what, async || wanted(blocks(world, user_id))).await;
}

/// Publishes identity's block or unblock event of a user. Events keep the order of the calls.
async fn publish_block_event(world: &World, user_id: &str, is_blocked: bool) {
    let (context, user_id) = (context(&unique()), user_id.to_owned());
    let (name, payload) = if is_blocked {
        let event = identity::UserBlockedEvent {
            context,
            user_id,
            reason: "court".into(),
            at: None,
        };
        ("UserBlockedEvent", event.encode_to_vec())
    } else {
        let event = identity::UserUnblockedEvent {
            context,
            user_id,
            ..Default::default()
        };
        ("UserUnblockedEvent", event.encode_to_vec())
    };
    let name = format!("dfa.identity.v1.{name}");
    publish(world, events::topics::IDENTITY, "user", &name, payload).await;
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    // The sweeper must not repair the difference that this test creates.
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
    // Settlement splits the order's hold off after a second. The parent does not change after that.
    until_split(&mut world).await;
    adjust(&mut world, &hold.hold_id, "499.8").await;

    // A start compares all holds. A persistent difference blocks only its user.
    let mut world = world.restart(settings()).await;
    world.until_ended(&order).await;
    let cancelled = world.order(&order.order_id).await.unwrap();
    assert_eq!(cancelled.cancel_reason, "USER_BLOCKED");
    world.place(buy("ann", "10", "1")).await.unwrap_err();
    let other = world.order(&other.order_id).await.unwrap();
    assert_eq!(other.status(), OrderStatus::Open);
    assert!(world.settlement.suspensions().contains_key("ann"));

    // After the repair the user is unblocked without a call.
    world.settled().await;
    adjust(&mut world, &hold.hold_id, "600").await;
    until_true("ann trades again", async || {
        world.place(buy("ann", "10", "1")).await.is_ok()
    })
    .await;
    assert!(world.settlement.breaks().await.unwrap().is_empty());
    until_true("no user is suspended", async || {
        world.settlement.suspensions().is_empty()
    })
    .await;
    world.stop().await;
}

#[tokio::test]
async fn a_user_with_two_causes_of_a_block_stays_blocked_until_both_are_gone() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), settings()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "1000", "0").await;
    let hold = world.open_hold("ann", "CFA-RUB", "600").await;
    world.place(buy("ann", "10", "10")).await.unwrap();
    world.place(buy("bob", "9", "10")).await.unwrap();
    until_split(&mut world).await;
    adjust(&mut world, &hold.hold_id, "499.8").await;
    let world = world.restart(settings()).await;
    until_blocks(&world, "ann", |blocks| blocks.has(Difference)).await;

    // Identity's unblock event does not lift the block by settlement.
    publish_block_event(&world, "ann", false).await;
    publish_block_event(&world, "bob", true).await;
    until_blocks(&world, "bob", |blocks| blocks.has(Identity)).await;
    let left = blocks(&world, "ann");
    assert!(left.has(Difference) && !left.has(Identity));

    // Identity's block closes and releases the hold, so journal and ledger agree. The user stays
    // blocked by identity.
    publish_block_event(&world, "ann", true).await;
    until_blocks(&world, "ann", |blocks| blocks.has(Identity)).await;
    until_blocks(&world, "ann", |blocks| !blocks.has(Difference)).await;
    assert!(blocks(&world, "ann").any());
    world.place(buy("ann", "10", "1")).await.unwrap_err();
    publish_block_event(&world, "ann", false).await;
    until_blocks(&world, "ann", |blocks| !blocks.any()).await;
    world.place(buy("ann", "10", "1")).await.unwrap();
    world.stop().await;
}
