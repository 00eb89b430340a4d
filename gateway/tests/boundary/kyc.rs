//! The KYC level of a user with an open session.

use client::Error;
use proto::common::v1::KycStatus;
use types::command::RequestKind;
use types::{RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::budget::{publish_updated, until_limit};
use crate::checkpoints::cancel_own;
use crate::shares::block_profile;
use crate::world::*;

/// Changes a user's KYC level in identity, and waits until the market has read it. `left_minor`: a
/// new remaining limit of the user, which the market reads after the level and journals.
pub async fn set_kyc(world: &World, user_id: &str, kyc: KycStatus, left_minor: i64) {
    world.identity.upsert_user(user_id, |user| {
        user.kyc = kyc;
        user.trading_remaining_minor = left_minor;
    });
    publish_updated(world, user_id).await;
    // The double has counted another 5.00.
    until_limit(world, user_id, left_minor + 500).await;
}

/// An amend of the order's price.
fn reprice(client_order_id: u64, price_ticks: i64) -> wire::Amend {
    wire::Amend {
        client_order_id,
        engine_order_id: 0,
        price_ticks,
        quantity_lots: 0,
        new_client_order_id: 0,
    }
}

fn mass_cancel() -> wire::MassCancel {
    wire::MassCancel {
        scope: 0,
        instrument: wire::ALL_INSTRUMENTS,
        side: wire::BOTH_SIDES,
    }
}

/// A session stays open when its user's KYC level drops. Its orders and amends are refused as those
/// by call are, without a question to identity. Resting orders stay, and cancels pass.
// rows: R146 R344
#[tokio::test]
async fn r146_a_kyc_level_that_drops_stops_the_orders_of_an_open_session_until_it_is_raised() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    for id in 1..=3 {
        let order = wire_order(id, Side::Buy, 100, 1);
        ann.send(0, order).await.unwrap();
        until(&mut of_ann, ack).await;
    }
    set_kyc(&world, "ann", KycStatus::Simplified, 4_000_000).await;
    world.identity.with(|state| state.trail.clear());
    let order = wire_order(4, Side::Buy, 100, 1);
    ann.send(0, order).await.unwrap();
    ann.send(0, reprice(1, 101)).await.unwrap();
    for (id, kind) in [(4, RequestKind::New), (1, RequestKind::Amend)] {
        let refusal = until(&mut of_ann, rejected).await;
        assert_eq!(refusal.reason, RejectReason::KycRequired);
        assert_eq!((refusal.client_order_id, refusal.request), (id, kind));
        assert_eq!(refusal.node_sequence, 0, "not journalled");
    }
    assert!(world.identity.trail().is_empty(), "identity is not asked");
    let by_call = refused(world.place(buy("ann", "1", "1")).await.unwrap_err());
    assert_eq!(by_call.1, "KYC level too low for trading");
    assert_eq!(world.book().await.0, [("1.00".to_owned(), "3".to_owned())]);
    ann.send(0, cancel_own(1)).await.unwrap();
    assert_eq!(until(&mut of_ann, cancelled).await.client_order_id, 1);
    ann.send(0, mass_cancel()).await.unwrap();
    let done = until(&mut of_ann, |m| match m {
        ServerMessage::MassCancelled(done) => Some(*done),
        _ => None,
    });
    assert_eq!(done.await.count, 2);
    set_kyc(&world, "ann", KycStatus::Standard, 5_000_000).await;
    ann.send(0, order).await.unwrap();
    assert_eq!(until(&mut of_ann, ack).await.client_order_id, 4);
    world.stop().await;
}

/// Identity does not answer about one user while the level of another drops.
// rows: R146
#[tokio::test]
async fn r146_a_level_is_read_while_identity_does_not_answer_about_another_user() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    let (_ann, _of_ann) = world.session(with_money("ann", "a")).await;
    let (bob, mut of_bob) = world.session(with_money("bob", "b")).await;
    let latch = block_profile(&world, "ann");
    publish_updated(&world, "ann").await;
    set_kyc(&world, "bob", KycStatus::Simplified, 4_000_000).await;
    bob.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    let refusal = until(&mut of_bob, rejected).await;
    assert_eq!(refusal.reason, RejectReason::KycRequired);
    latch.close();
    world.stop().await;
}

/// Every session of the user is concerned. A session logs out at the low level, a login is refused,
/// and one at the raised level may order.
// rows: R146
#[tokio::test]
async fn r146_a_session_logs_out_and_in_across_changes_of_the_kyc_level() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let (_first, _of_first) = world.session(with_money("ann", "a")).await;
    let (ann, mut of_ann) = world.session(login("ann", "b")).await;
    set_kyc(&world, "ann", KycStatus::Simplified, 4_000_000).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    let refusal = until(&mut of_ann, rejected).await;
    assert_eq!(refusal.reason, RejectReason::KycRequired);
    ann.send(0, wire::Logout {}).await.unwrap();
    let ended = until(&mut of_ann, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    });
    assert_eq!(ended.await, DisconnectCode::Logout.code());
    let (connection, _reports) = world.connect().await;
    match in_time("an answer", connection.login(0, login("ann", "b"))).await {
        Err(Error::Disconnected { code, .. }) => assert_eq!(code, Some(DisconnectCode::KycLevel)),
        other => panic!("{other:?}"),
    }
    set_kyc(&world, "ann", KycStatus::Standard, 5_000_000).await;
    let (ann, mut of_ann) = world.session(login("ann", "b")).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    assert_eq!(until(&mut of_ann, ack).await.client_order_id, 1);
    world.stop().await;
}
