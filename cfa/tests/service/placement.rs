//! Placement of an issue among subscribers (F34) and the yearly limit of their purchases (F35).

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use cfa::failpoint;
use events::Event;
use prost::Message;
use proto::cfa::v1 as pb;
use proto::common::v1::{LimitType, OperationStatus};
use proto::ledger::v1 as ledger;
use testkit::{PATIENCE, ServiceDoubles, TestUser};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::crash::{assert_killed, serve};
use crate::redeem::hold;
use crate::world::*;

const DAY_US: i64 = 24 * 3_600 * 1_000_000;
/// Where the worlds' clock starts.
const START_US: i64 = 1_800_000_000_000_000;
const FOLDER: &str = "CFA_PLACEMENT_FOLDER";
const PEERS: &str = "CFA_PLACEMENT_PEERS";
const MINIMUM: &str = "CFA_PLACEMENT_MINIMUM";
const ACCOUNT: &str = "system:placement";

fn at(time_us: i64) -> Option<prost_types::Timestamp> {
    Some(proto::convert::to_timestamp_us(time_us))
}

/// Terms of a placement of one day at the nominal.
fn terms(rule: pb::AllotmentRule) -> pb::PlacementTerms {
    pb::PlacementTerms {
        opens_at: at(START_US),
        closes_at: at(START_US + DAY_US),
        allotment: rule.into(),
        ..Default::default()
    }
}

/// Registers a bond of which 10 units are placed at 1000.00.
async fn register(
    world: &mut World,
    symbol: &str,
    terms: pb::PlacementTerms,
) -> Result<pb::Instrument, Status> {
    let placed = |request: &mut pb::RegisterInstrumentRequest| {
        request.symbol = symbol.into();
        request.context = context(&format!("register-{symbol}"));
        request.issue_limit = decimal("10");
        request.placement = Some(terms);
    };
    world.register(placed).await
}

/// Subscribes at the price of the placement, once per investor and issue.
async fn subscribe(
    world: &World,
    instrument_id: &str,
    investor_id: &str,
    units: i64,
) -> Result<pb::Subscription, Status> {
    let request = pb::SubscribeRequest {
        context: context(&format!("{investor_id}-{instrument_id}")),
        instrument_id: instrument_id.into(),
        investor_id: investor_id.into(),
        amount: amount(instrument_id, &units.to_string()),
        payment: amount("CFA-RUB", &format!("{units}000.00")),
        expires_at: None,
    };
    let mut investor = world.as_caller(&format!("sandbox.investor.{investor_id}"));
    let answer = investor.subscribe(request).await?;
    Ok(answer.into_inner().subscription.expect("subscription"))
}

async fn close(world: &World, instrument_id: &str) -> Result<pb::Placement, Status> {
    let request = pb::ClosePlacementRequest {
        context: context(&key()),
        instrument_id: instrument_id.into(),
    };
    let mut issuer = world.as_caller("sandbox.issuer.issuer");
    let answer = issuer.close_placement(request).await?;
    Ok(answer.into_inner().placement.expect("placement"))
}

async fn cancel(world: &World, subscription: &pb::Subscription) -> Result<(), Status> {
    let request = pb::CancelSubscriptionRequest {
        context: context(&key()),
        subscription_id: subscription.subscription_id.clone(),
    };
    let investor = format!("sandbox.investor.{}", subscription.investor_id);
    let mut investor = world.as_caller(&investor);
    investor.cancel_subscription(request).await.map(drop)
}

async fn subscription(world: &World, of: &pb::Subscription) -> pb::Subscription {
    let request = pb::ListSubscriptionsRequest {
        investor_id: of.investor_id.clone(),
        ..Default::default()
    };
    let mut operator = world.as_caller("sandbox.operator");
    let listed = operator.list_subscriptions(request).await.expect("listed");
    let mut listed = listed.into_inner().subscriptions.into_iter();
    let found = listed.find(|one| one.subscription_id == of.subscription_id);
    found.expect("the subscription")
}

/// Balance and available money of a user.
async fn money(world: &mut World, user_id: &str) -> (String, String) {
    let balance = world.balance(&format!("{user_id}:CFA-RUB")).await;
    (balance.balance.to_string(), balance.available.to_string())
}

fn pair(balance: &str, available: &str) -> (String, String) {
    (balance.to_owned(), available.to_owned())
}

/// Units in the ledger, which are those on chain.
async fn units(world: &mut World, instrument_id: &str, user_id: &str) -> u128 {
    let account = format!("{user_id}:{instrument_id}");
    let balance = world.balance(&account).await.balance;
    let on_chain = world.tokens(instrument_id, user_id).await;
    assert_eq!(balance.to_minor(0), Ok(on_chain as i64), "{account}");
    on_chain
}

/// State and amount in roubles of the yearly reservation of each of these subscriptions.
fn yearly(world: &World, subscriptions: &[&pb::Subscription]) -> Vec<(&'static str, i64)> {
    let of = |stored: &testkit::Reservation| (stored.state, stored.amount_minor / 100);
    world.double.with(|state| {
        let ids = subscriptions.iter();
        let ids = ids.map(|one| format!("{}:year", one.subscription_id));
        ids.map(|id| of(&state.reservations[&id])).collect()
    })
}

async fn events_until_closed(world: &World) -> Vec<Event> {
    world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "PlacementClosedEvent"
        })
        .await
}

/// The placement account has nothing left, and the supply is what was issued.
async fn assert_settled(world: &mut World, instrument_id: &str, supply: &str) {
    assert_eq!(units(world, instrument_id, ACCOUNT).await, 0);
    assert!(
        world
            .balance("system:placement:CFA-RUB")
            .await
            .balance
            .is_zero()
    );
    assert_eq!(world.tokens("CFA-RUB", ACCOUNT).await, 0);
    assert_eq!(world.supply(instrument_id).await, supply);
    let issued = world.instrument(instrument_id).await.issued;
    assert_eq!(issued, decimal(supply));
}

// rows: R019 R304
#[tokio::test(flavor = "multi_thread")]
async fn f34_an_oversubscribed_placement_is_allotted_pro_rata_and_returns_the_rest() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for investor in ["alice", "bob", "carol"] {
        world.deposit(investor, "10000.00").await;
    }
    let rule = pb::AllotmentRule::ProRata;
    register(&mut world, "BOND-1", terms(rule))
        .await
        .expect("registered");
    let alice = subscribe(&world, "BOND-1", "alice", 7)
        .await
        .expect("alice");
    let bob = subscribe(&world, "BOND-1", "bob", 6).await.expect("bob");
    let carol = subscribe(&world, "BOND-1", "carol", 3)
        .await
        .expect("carol");
    assert_eq!(
        money(&mut world, "alice").await,
        pair("10000.00", "3000.00")
    );
    let open = world
        .instrument("BOND-1")
        .await
        .placement
        .expect("placement");
    assert_eq!(open.status(), pb::PlacementStatus::Open);
    assert_eq!((open.subscriptions, open.subscribed), (3, decimal("16")));

    // Until the end of the period nothing issues units or ends the issue.
    let early = close(&world, "BOND-1").await.expect_err("the period runs");
    assert_eq!(reason(&early), "PLACEMENT_UNDER_WAY");
    let by_issuer = issue_request("BOND-1", "alice", "1", None);
    let refused = world.cfa.issue_investment_cfa(by_issuer).await;
    assert_eq!(reason(&refused.expect_err("placed only")), "PLACEMENT_ONLY");
    let redeem = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let refused = world.cfa.start_redemption(redeem).await;
    assert_eq!(reason(&refused.expect_err("placed")), "PLACEMENT_UNDER_WAY");

    world.clock.advance_us(DAY_US);
    let late = subscribe(&world, "BOND-1", "dave", 1).await;
    assert_eq!(reason(&late.expect_err("late")), "PLACEMENT_NOT_OPEN");
    let placed = close(&world, "BOND-1").await.expect("closed");
    assert_eq!(placed.status(), pb::PlacementStatus::Placed);
    assert_eq!(
        (placed.allotted, placed.issued),
        (decimal("10"), decimal("10"))
    );
    assert_eq!(placed.raised, decimal("10000.00"));
    // 70/16, 60/16 and 30/16: two lots go to the largest remainders.
    let expected = [
        (&alice, 4, "6000.00"),
        (&bob, 4, "6000.00"),
        (&carol, 2, "8000.00"),
    ];
    for (of, lots, left) in expected {
        let investor = of.investor_id.as_str();
        assert_eq!(
            units(&mut world, "BOND-1", investor).await,
            lots,
            "{investor}"
        );
        assert_eq!(
            money(&mut world, investor).await,
            pair(left, left),
            "{investor}"
        );
        let stored = subscription(&world, of).await;
        assert_eq!(stored.status(), pb::SubscriptionStatus::Used);
        assert_eq!(stored.allotted, amount("BOND-1", &lots.to_string()));
        let operation = world.operation(&stored.operation_id).await;
        assert_eq!(operation.status(), OperationStatus::Finalized);
        let refused = cancel(&world, of).await.expect_err("used");
        assert_eq!(reason(&refused), "OPERATION_STATE");
    }
    assert_eq!(
        money(&mut world, "issuer").await,
        pair("10000.00", "10000.00")
    );
    assert_settled(&mut world, "BOND-1", "10").await;

    let events = events_until_closed(&world).await;
    let issued = events
        .iter()
        .filter(|event| event.short_type() == "CfaIssuedEvent");
    let issued = issued.map(|event| pb::CfaIssuedEvent::decode(event.payload.as_slice()));
    let issued = issued.map(|event| event.expect("decodes").instrument_id);
    assert_eq!(issued.filter(|id| id == "BOND-1").count(), 3);
    // Only what was allotted counts as purchases of the year.
    world.resume_operations().await;
    let used = [
        ("CONFIRMED", 4_000),
        ("CONFIRMED", 4_000),
        ("CONFIRMED", 2_000),
    ];
    assert_eq!(yearly(&world, &[&alice, &bob, &carol]), used);
    let again = close(&world, "BOND-1").await.expect("the stored one");
    assert_eq!(again.status(), pb::PlacementStatus::Placed);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f34_first_come_allots_in_the_order_of_the_subscriptions() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for investor in ["alice", "bob", "carol"] {
        world.deposit(investor, "10000.00").await;
    }
    let rule = pb::AllotmentRule::FirstCome;
    register(&mut world, "BOND-1", terms(rule))
        .await
        .expect("registered");
    let carol = subscribe(&world, "BOND-1", "carol", 7)
        .await
        .expect("carol");
    let bob = subscribe(&world, "BOND-1", "bob", 5).await.expect("bob");
    let alice = subscribe(&world, "BOND-1", "alice", 1)
        .await
        .expect("alice");
    world.clock.advance_us(DAY_US);
    // The sweep closes it.
    world.resume_operations().await;
    let placed = world
        .instrument("BOND-1")
        .await
        .placement
        .expect("placement");
    assert_eq!(placed.status(), pb::PlacementStatus::Placed);
    for (of, lots, left) in [
        (&carol, 7, "3000.00"),
        (&bob, 3, "7000.00"),
        (&alice, 0, "10000.00"),
    ] {
        let investor = of.investor_id.as_str();
        assert_eq!(
            units(&mut world, "BOND-1", investor).await,
            lots,
            "{investor}"
        );
        assert_eq!(
            money(&mut world, investor).await,
            pair(left, left),
            "{investor}"
        );
    }
    let stored = subscription(&world, &alice).await;
    assert_eq!(stored.status(), pb::SubscriptionStatus::NotAllotted);
    let held = hold(&mut world, &alice.hold_id).await;
    assert_eq!(held.status(), ledger::HoldStatus::Released);
    world.resume_operations().await;
    let used = [
        ("CONFIRMED", 7_000),
        ("CONFIRMED", 3_000),
        ("CANCELLED", 1_000),
    ];
    assert_eq!(yearly(&world, &[&carol, &bob, &alice]), used);
    assert_settled(&mut world, "BOND-1", "10").await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f34_a_placement_below_its_minimum_returns_all_money_and_fails() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "10000.00").await;
    world.deposit("bob", "10000.00").await;
    let least = pb::PlacementTerms {
        minimum_sum: decimal("9000.00"),
        ..terms(pb::AllotmentRule::ProRata)
    };
    register(&mut world, "BOND-1", least)
        .await
        .expect("registered");
    let alice = subscribe(&world, "BOND-1", "alice", 8)
        .await
        .expect("alice");
    let bob = subscribe(&world, "BOND-1", "bob", 2).await.expect("bob");
    cancel(&world, &bob).await.expect("cancelled");
    world.clock.advance_us(DAY_US);
    world.resume_operations().await;
    let failed = world.instrument("BOND-1").await;
    assert_eq!(failed.status(), pb::InstrumentStatus::Halted);
    let placement = failed.placement.expect("placement");
    assert_eq!(placement.status(), pb::PlacementStatus::Failed);
    let stored = subscription(&world, &alice).await;
    assert_eq!(stored.status(), pb::SubscriptionStatus::NotAllotted);
    assert_eq!(
        money(&mut world, "alice").await,
        pair("10000.00", "10000.00")
    );
    assert_eq!(money(&mut world, "bob").await, pair("10000.00", "10000.00"));
    assert_settled(&mut world, "BOND-1", "0").await;
    let events = events_until_closed(&world).await;
    let closed = events.last().expect("the event");
    let closed = pb::PlacementClosedEvent::decode(closed.payload.as_slice()).expect("decodes");
    assert_eq!(closed.reason, "the minimum sum is not reached");
    world.resume_operations().await;
    let cancelled = [("CANCELLED", 8_000), ("CANCELLED", 2_000)];
    assert_eq!(yearly(&world, &[&alice, &bob]), cancelled);
    // A failed issue does not trade.
    let change = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        status: pb::InstrumentStatus::Active.into(),
        ..Default::default()
    };
    let refused = world.cfa.update_instrument(change).await;
    assert_eq!(reason(&refused.expect_err("failed")), "OPERATION_STATE");
    world.stop().await;
}

/// An investor whom identity refuses is left out of the allotment. One whose payment the ledger
/// refuses gets nothing, and the units are burned.
#[tokio::test(flavor = "multi_thread")]
async fn f34_refused_investors_get_their_money_back_and_delay_no_other() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for investor in ["alice", "bob", "carol"] {
        world.deposit(investor, "10000.00").await;
    }
    let rule = pb::AllotmentRule::FirstCome;
    register(&mut world, "BOND-1", terms(rule))
        .await
        .expect("registered");
    let alice = subscribe(&world, "BOND-1", "alice", 4)
        .await
        .expect("alice");
    let bob = subscribe(&world, "BOND-1", "bob", 5).await.expect("bob");
    let carol = subscribe(&world, "BOND-1", "carol", 6)
        .await
        .expect("carol");
    world
        .double
        .upsert_user("alice", |alice| alice.is_sanctioned = true);
    world.freeze_money("bob", true).await;
    world.clock.advance_us(DAY_US);
    let placed = close(&world, "BOND-1").await.expect("closed");
    assert_eq!(placed.status(), pb::PlacementStatus::Placed);
    assert_eq!(
        (placed.allotted, placed.issued),
        (decimal("10"), decimal("5"))
    );
    for (of, lots, left) in [
        (&alice, 0, "10000.00"),
        (&bob, 0, "10000.00"),
        (&carol, 5, "5000.00"),
    ] {
        let investor = of.investor_id.as_str();
        assert_eq!(
            units(&mut world, "BOND-1", investor).await,
            lots,
            "{investor}"
        );
        assert_eq!(money(&mut world, investor).await.0, left, "{investor}");
    }
    world.freeze_money("bob", false).await;
    world.resume_operations().await;
    assert_eq!(
        money(&mut world, "alice").await,
        pair("10000.00", "10000.00")
    );
    assert_eq!(money(&mut world, "bob").await, pair("10000.00", "10000.00"));
    let stored = subscription(&world, &bob).await;
    assert_eq!(stored.status(), pb::SubscriptionStatus::NotAllotted);
    let rejected = world.operation(&stored.operation_id).await;
    assert_eq!(rejected.status(), OperationStatus::Rejected);
    assert_eq!(
        money(&mut world, "issuer").await,
        pair("5000.00", "5000.00")
    );
    let used = [
        ("CANCELLED", 4_000),
        ("CANCELLED", 5_000),
        ("CONFIRMED", 5_000),
    ];
    assert_eq!(yearly(&world, &[&alice, &bob, &carol]), used);
    assert_settled(&mut world, "BOND-1", "5").await;
    world.stop().await;
}

/// Freezes the money of a user on chain only.
async fn freeze_on_chain(world: &mut World, user_id: &str) {
    let money = world.instrument("CFA-RUB").await.smart_contract_address;
    let action = chain::Action::SetFrozen {
        token: money.parse().expect("address"),
        account: chain::Address::of_user(user_id),
        frozen: true,
    };
    let connector = world.connector();
    let submitted = connector.submit(&key(), &action.call()).await;
    let hash = submitted.expect("submitted").tx_hash.to_string();
    let receipt = world.receipt(&hash).await;
    assert_eq!(receipt.status, chain::ReceiptStatus::Success);
}

/// An exchange that the contract leaves out is reversed. The others are not.
#[tokio::test(flavor = "multi_thread")]
async fn f34_an_exchange_that_the_contract_leaves_out_returns_the_payment() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "10000.00").await;
    world.deposit("bob", "10000.00").await;
    let rule = pb::AllotmentRule::FirstCome;
    register(&mut world, "BOND-1", terms(rule))
        .await
        .expect("registered");
    let alice = subscribe(&world, "BOND-1", "alice", 4)
        .await
        .expect("alice");
    let bob = subscribe(&world, "BOND-1", "bob", 5).await.expect("bob");
    freeze_on_chain(&mut world, "alice").await;
    world.clock.advance_us(DAY_US);
    let placed = close(&world, "BOND-1").await.expect("closed");
    assert_eq!(placed.status(), pb::PlacementStatus::Placed);
    assert_eq!(placed.raised, decimal("5000.00"));
    assert_eq!(units(&mut world, "BOND-1", "alice").await, 0);
    assert_eq!(units(&mut world, "BOND-1", "bob").await, 5);
    let all = pair("10000.00", "10000.00");
    assert_eq!(money(&mut world, "alice").await, all);
    assert_eq!(money(&mut world, "bob").await, pair("5000.00", "5000.00"));
    let stored = subscription(&world, &alice).await;
    assert_eq!(stored.status(), pb::SubscriptionStatus::NotAllotted);
    let failed = world.operation(&stored.operation_id).await;
    assert_eq!(failed.status(), OperationStatus::Failed);
    world.resume_operations().await;
    let used = [("CANCELLED", 4_000), ("CONFIRMED", 5_000)];
    assert_eq!(yearly(&world, &[&alice, &bob]), used);
    assert_settled(&mut world, "BOND-1", "5").await;
    world.stop().await;
}

/// A subscription whose hold cannot be made is left out and does not stop the close.
#[tokio::test(flavor = "multi_thread")]
async fn f34_a_hold_that_cannot_be_made_delays_no_other_subscription() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "10000.00").await;
    world.deposit("bob", "10000.00").await;
    let rule = pb::AllotmentRule::FirstCome;
    register(&mut world, "BOND-1", terms(rule))
        .await
        .expect("registered");
    subscribe(&world, "BOND-1", "bob", 3).await.expect("bob");
    let set_away = |world: &World, is_away| {
        world
            .double
            .with(|state| state.reservations_unavailable = is_away);
    };
    set_away(&world, true);
    let away = subscribe(&world, "BOND-1", "alice", 2).await;
    assert_eq!(away.expect_err("away").code(), Code::Unavailable);
    set_away(&world, false);
    let request = pb::ListSubscriptionsRequest {
        investor_id: "alice".into(),
        ..Default::default()
    };
    let listed = world.cfa.list_subscriptions(request).await.expect("listed");
    let pending = listed.into_inner().subscriptions.remove(0);
    assert_eq!(pending.status(), pb::SubscriptionStatus::Pending);
    // The id of its hold is taken by a hold on another sub-account.
    let taken = ledger::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger::Hold {
            hold_id: pending.hold_id.clone(),
            subaccount_id: "bob:CFA-RUB".into(),
            amount: amount("CFA-RUB", "1.00"),
            reason: "another".into(),
            owner: "cfa".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(taken).await.expect("held");
    world.clock.advance_us(DAY_US);
    let placed = close(&world, "BOND-1").await.expect("closed");
    assert_eq!(placed.status(), pb::PlacementStatus::Placed);
    assert_eq!(units(&mut world, "BOND-1", "bob").await, 3);
    let stored = subscription(&world, &pending).await;
    assert_eq!(stored.status(), pb::SubscriptionStatus::NotAllotted);
    let all = pair("10000.00", "10000.00");
    assert_eq!(money(&mut world, "alice").await, all);
    assert_settled(&mut world, "BOND-1", "3").await;
    world.stop().await;
}

async fn set_status(world: &mut World, status: pb::InstrumentStatus) {
    let change = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        status: status.into(),
        ..Default::default()
    };
    world.cfa.update_instrument(change).await.expect("changed");
}

/// A halted issue is not allotted. An investor who is refused during the halt gets no units.
#[tokio::test(flavor = "multi_thread")]
async fn f34_subscribers_of_a_halted_issue_are_screened_after_the_halt() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "10000.00").await;
    world.deposit("bob", "10000.00").await;
    let rule = pb::AllotmentRule::FirstCome;
    register(&mut world, "BOND-1", terms(rule))
        .await
        .expect("registered");
    let alice = subscribe(&world, "BOND-1", "alice", 4)
        .await
        .expect("alice");
    subscribe(&world, "BOND-1", "bob", 5).await.expect("bob");
    set_status(&mut world, pb::InstrumentStatus::Halted).await;
    world.clock.advance_us(DAY_US);
    for _ in 0..2 {
        let waiting = close(&world, "BOND-1").await.expect("answered");
        assert_eq!(waiting.status(), pb::PlacementStatus::Closing);
    }
    world
        .double
        .upsert_user("alice", |alice| alice.is_sanctioned = true);
    set_status(&mut world, pb::InstrumentStatus::Active).await;
    let placed = close(&world, "BOND-1").await.expect("closed");
    assert_eq!(placed.status(), pb::PlacementStatus::Placed);
    assert_eq!(placed.allotted, decimal("5"));
    let all = pair("10000.00", "10000.00");
    assert_eq!(money(&mut world, "alice").await, all);
    let stored = subscription(&world, &alice).await;
    assert_eq!(stored.status(), pb::SubscriptionStatus::NotAllotted);
    assert_settled(&mut world, "BOND-1", "5").await;
    world.stop().await;
}

/// A halted issue whose subscriptions do not reach the minimum fails at once.
#[tokio::test(flavor = "multi_thread")]
async fn f34_a_halted_issue_below_its_minimum_returns_the_money() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "10000.00").await;
    let least = pb::PlacementTerms {
        minimum_sum: decimal("9000.00"),
        ..terms(pb::AllotmentRule::ProRata)
    };
    register(&mut world, "BOND-1", least)
        .await
        .expect("registered");
    subscribe(&world, "BOND-1", "alice", 8)
        .await
        .expect("alice");
    set_status(&mut world, pb::InstrumentStatus::Halted).await;
    world.clock.advance_us(DAY_US);
    let failed = close(&world, "BOND-1").await.expect("closed");
    assert_eq!(failed.status(), pb::PlacementStatus::Failed);
    let all = pair("10000.00", "10000.00");
    assert_eq!(money(&mut world, "alice").await, all);
    world.stop().await;
}

/// Demand that no investor can pay neither reaches the minimum nor makes the placement unreadable.
#[tokio::test(flavor = "multi_thread")]
async fn f34_a_subscription_is_within_the_issue_and_not_the_issuers() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for investor in ["alice", "bob", "issuer"] {
        world.deposit(investor, "20000.00").await;
    }
    let rule = pb::AllotmentRule::ProRata;
    register(&mut world, "BOND-1", terms(rule))
        .await
        .expect("registered");
    for (investor, units, field) in [("issuer", 1, "investor_id"), ("alice", 11, "amount.amount")] {
        let refused = subscribe(&world, "BOND-1", investor, units).await;
        let refused = refused.expect_err(field);
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().starts_with(field), "{refused}");
    }
    // Smallest units of both together exceed 64 bits.
    let fine = |request: &mut pb::RegisterInstrumentRequest| {
        request.symbol = "BOND-2".into();
        request.decimals = 18;
        request.issue_limit = decimal("9");
        request.placement = Some(terms(rule));
    };
    world.register(fine).await.expect("registered");
    subscribe(&world, "BOND-2", "alice", 9)
        .await
        .expect("alice");
    let above = subscribe(&world, "BOND-2", "bob", 9).await;
    assert_eq!(reason(&above.expect_err("above")), "TOO_MANY_SUBSCRIPTIONS");
    let open = world.instrument("BOND-2").await.placement;
    assert_eq!(open.expect("placement").subscriptions, 1);
    assert_eq!(money(&mut world, "bob").await, pair("20000.00", "20000.00"));
    world.stop().await;
}

/// Cancellations at the moment of the close: each subscription is either cancelled or allotted.
#[tokio::test(flavor = "multi_thread")]
async fn f34_a_cancellation_and_the_close_exclude_each_other() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "30000.00").await;
    world.deposit("bob", "30000.00").await;
    let mut left = 30_000;
    for round in 0..6u64 {
        let symbol = format!("BOND-{round}");
        let mut placed = terms(pb::AllotmentRule::FirstCome);
        let now_us = world.clock.now_us();
        (placed.opens_at, placed.closes_at) = (at(now_us), at(now_us + DAY_US));
        register(&mut world, &symbol, placed)
            .await
            .expect("registered");
        let alice = subscribe(&world, &symbol, "alice", 3).await.expect("alice");
        subscribe(&world, &symbol, "bob", 1).await.expect("bob");
        world.clock.advance_us(DAY_US);
        let cancelling = async {
            tokio::time::sleep(Duration::from_millis(round * 3)).await;
            cancel(&world, &alice).await
        };
        let (closed, cancelled) = tokio::join!(close(&world, &symbol), cancelling);
        closed.expect("closed");
        world.resume_operations().await;
        let stored = subscription(&world, &alice).await;
        let expected = match cancelled {
            Ok(()) => {
                assert_eq!(stored.status(), pb::SubscriptionStatus::Cancelled);
                0
            }
            Err(refused) => {
                assert_eq!(reason(&refused), "OPERATION_STATE");
                assert_eq!(stored.status(), pb::SubscriptionStatus::Used);
                left -= 3_000;
                3
            }
        };
        assert_eq!(
            units(&mut world, &symbol, "alice").await,
            expected,
            "{round}"
        );
        let sum = format!("{left}.00");
        assert_eq!(
            money(&mut world, "alice").await,
            pair(&sum, &sum),
            "{round}"
        );
        assert_eq!(units(&mut world, &symbol, "bob").await, 1, "{round}");
    }
    world.stop().await;
}

/// Calls to the ledger grow with the parts of 100 subscriptions, calls to identity with the
/// subscriptions.
#[tokio::test(flavor = "multi_thread")]
async fn f34_the_cost_of_a_close_is_linear() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for (symbol, investors) in [("BOND-1", 1), ("BOND-2", 2)] {
        let mut placed = terms(pb::AllotmentRule::ProRata);
        let now_us = world.clock.now_us();
        (placed.opens_at, placed.closes_at) = (at(now_us), at(now_us + DAY_US));
        placed.price = decimal("1.00");
        let of_200 = |request: &mut pb::RegisterInstrumentRequest| {
            request.symbol = symbol.into();
            request.issue_limit = decimal("200");
            request.placement = Some(placed);
        };
        world.register(of_200).await.expect("registered");
        let subscriptions = 100 * investors;
        for investor in 0..investors {
            let investor = format!("investor-{symbol}-{investor}");
            world.deposit(&investor, "100.00").await;
            for _ in 0..100 {
                let made = world.subscribe(symbol, &investor, "1", "1.00").await;
                made.expect("subscribed");
            }
        }
        world.clock.advance_us(DAY_US);
        world.double.with(|state| state.trail.clear());
        world.faults.take_calls("");
        let closed = close(&world, symbol).await.expect("closed");
        assert_eq!(closed.status(), pb::PlacementStatus::Placed);
        assert_eq!(closed.issued, decimal(&subscriptions.to_string()));
        let calls = world.faults.take_calls("dfa.ledger.v1.LedgerService");
        // Issue, payment of the issuer and each part: posted and made final.
        assert_eq!(calls.len(), 4 + 2 * investors, "{calls:?}");
        let asked = world.double.with(|state| state.trail.len());
        assert_eq!(asked, 2 * subscriptions, "profile and sanctions of each");
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f34_terms_are_checked_once_and_never_change() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "10000.00").await;
    type Change = fn(&mut pb::RegisterInstrumentRequest);
    fn placed(request: &mut pb::RegisterInstrumentRequest) -> &mut pb::PlacementTerms {
        request.placement.as_mut().expect("terms")
    }
    let bad: [(Change, &str); 11] = [
        (|ask| placed(ask).opens_at = None, "placement.opens_at"),
        (
            |ask| placed(ask).closes_at = at(START_US),
            "placement.closes_at",
        ),
        (
            |ask| {
                placed(ask).opens_at = at(START_US - 2 * DAY_US);
                placed(ask).closes_at = at(START_US - DAY_US);
            },
            "placement.closes_at",
        ),
        (
            |ask| placed(ask).closes_at = at(START_US + 367 * DAY_US),
            "placement.closes_at",
        ),
        (|ask| ask.issue_limit = None, "issue_limit"),
        (
            |ask| placed(ask).price = decimal("0.001"),
            "placement.price",
        ),
        (|ask| ask.nominal = None, "placement.price"),
        (
            |ask| placed(ask).minimum_sum = decimal("10000.01"),
            "placement.minimum_sum",
        ),
        (
            |ask| placed(ask).investor_minimum = decimal("11"),
            "placement.investor_minimum",
        ),
        (
            |ask| placed(ask).investor_maximum = decimal("0"),
            "placement.investor_maximum",
        ),
        (|ask| ask.matures_at = at(START_US + DAY_US), "matures_at"),
    ];
    for (change, field) in bad {
        let all = |request: &mut pb::RegisterInstrumentRequest| {
            request.issue_limit = decimal("10");
            request.placement = Some(terms(pb::AllotmentRule::FirstCome));
            change(request);
        };
        let refused = world.register(all).await.expect_err(field);
        assert_eq!(refused.code(), Code::InvalidArgument, "{field}: {refused}");
        assert!(refused.message().starts_with(field), "{field}: {refused}");
    }
    let bounded = pb::PlacementTerms {
        investor_minimum: decimal("2"),
        investor_maximum: decimal("5"),
        ..terms(pb::AllotmentRule::FirstCome)
    };
    register(&mut world, "BOND-1", bounded)
        .await
        .expect("registered");
    for (units, payment, code) in [
        ("1", "1000.00", Code::InvalidArgument),
        ("6", "6000.00", Code::InvalidArgument),
        ("3", "2999.99", Code::InvalidArgument),
    ] {
        let refused = world.subscribe("BOND-1", "alice", units, payment).await;
        assert_eq!(refused.expect_err(units).code(), code, "{units}");
    }
    let first = world.subscribe("BOND-1", "alice", "3", "3000.00").await;
    first.expect("subscribed");
    let above = world.subscribe("BOND-1", "alice", "3", "3000.00").await;
    let above = above.expect_err("five units at most");
    assert_eq!(above.code(), Code::InvalidArgument);
    assert_eq!(
        money(&mut world, "alice").await,
        pair("10000.00", "7000.00")
    );
    for (limit, matures_at) in [(decimal("11"), None), (None, at(START_US + DAY_US))] {
        let change = pb::UpdateInstrumentRequest {
            context: context(&key()),
            instrument_id: "BOND-1".into(),
            issue_limit: limit,
            matures_at,
            ..Default::default()
        };
        let refused = world.cfa.update_instrument(change).await;
        let refused = refused.expect_err("a term of the placement");
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
    let unplaced = close(&world, "CFA-RUB")
        .await
        .expect_err("not the issuer's");
    assert_eq!(unplaced.code(), Code::PermissionDenied);
    world.stop().await;
}

// rows: R019
#[tokio::test(flavor = "multi_thread")]
async fn f35_subscriptions_reserve_the_yearly_limit_and_end_their_reservation() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "10000.00").await;
    world.register(|_| {}).await.expect("registered");
    let investment: i32 = LimitType::Investment.into();
    world
        .double
        .with(|state| state.daily_limits.insert(investment, 500_000));
    let first = world.subscribe("BOND-1", "alice", "3", "3000.00").await;
    let first = first.expect("subscribed");
    let above = world.subscribe("BOND-1", "alice", "3", "3000.00").await;
    let above = above.expect_err("above the limit of the year");
    assert_eq!(above.code(), Code::FailedPrecondition);
    assert_eq!(reason(&above), "LIMIT_EXCEEDED");
    assert_eq!(
        money(&mut world, "alice").await,
        pair("10000.00", "7000.00")
    );
    // More money than alice has: the reservation is cancelled with the refusal.
    world
        .double
        .with(|state| state.daily_limits.insert(investment, 3_000_000));
    let too_much = world.subscribe("BOND-1", "alice", "9", "9000.00").await;
    assert_eq!(
        reason(&too_much.expect_err("no money")),
        "INSUFFICIENT_BALANCE"
    );
    cancel(&world, &first).await.expect("cancelled");
    world.resume_operations().await;
    assert_eq!(yearly(&world, &[&first]), [("CANCELLED", 3_000)]);
    let open = |world: &World| {
        world.double.with(|state| {
            let of_year = |stored: &&testkit::Reservation| stored.limit_type == investment;
            let reserved = state.reservations.values().filter(of_year);
            reserved.filter(|stored| stored.state == "RESERVED").count()
        })
    };
    assert_eq!(open(&world), 0);
    let second = world.subscribe("BOND-1", "alice", "4", "4000.00").await;
    let second = second.expect("subscribed");
    let request = issue_request("BOND-1", "alice", "4", Some("4000.00"));
    let issued = world
        .cfa
        .issue_investment_cfa(request)
        .await
        .expect("issued");
    let issued = issued.into_inner().operation.expect("operation");
    world.settle(&issued).await;
    world.resume_operations().await;
    assert_eq!(yearly(&world, &[&second]), [("CONFIRMED", 4_000)]);
    // While identity does not answer nothing is held. The sweep continues.
    let set_away = |world: &World, is_away| {
        world
            .double
            .with(|state| state.reservations_unavailable = is_away);
    };
    set_away(&world, true);
    let away = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    assert_eq!(away.expect_err("away").code(), Code::Unavailable);
    assert_eq!(money(&mut world, "alice").await, pair("6000.00", "6000.00"));
    set_away(&world, false);
    world.resume_operations().await;
    assert_eq!(money(&mut world, "alice").await, pair("6000.00", "5000.00"));
    assert_eq!(open(&world), 1);
    world.stop().await;
}

/// Registers, deposits and subscribes. A repeat continues: every call has a fixed key. A placement
/// with a minimum has one subscriber and fails.
async fn play(world: &mut World, minimum: &str) {
    let terms = pb::PlacementTerms {
        minimum_sum: decimal(minimum).filter(|_| !minimum.is_empty()),
        ..terms(pb::AllotmentRule::ProRata)
    };
    register(world, "BOND-1", terms).await.expect("registered");
    let investors: &[(&str, i64)] = match minimum {
        "" => &[("alice", 7), ("bob", 6)],
        _ => &[("alice", 3)],
    };
    for (investor, units) in investors {
        let account = format!("{investor}:CFA-RUB");
        if world.balance(&account).await.balance.is_zero() {
            let payment = format!("payment-{investor}");
            world.issue_paid(&payment, investor, "10000.00").await;
        }
        let made = subscribe(world, "BOND-1", investor, *units).await;
        made.expect("subscribed");
    }
    world.clock.advance_us(DAY_US);
}

/// The child process that is killed. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_closes_and_is_killed() {
    let (Ok(folder), Ok(url)) = (std::env::var(FOLDER), std::env::var(PEERS)) else {
        return;
    };
    let settings = Settings {
        peers_url: Some(url),
        ..Settings::default()
    };
    let mut world = World::with(Path::new(&folder), settings).await;
    play(&mut world, &std::env::var(MINIMUM).expect("minimum")).await;
    let driven = async {
        loop {
            world.resume_operations().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let driven = tokio::time::timeout(PATIENCE, driven);
    driven.await.expect("killed at the failpoint");
}

/// Runs a placement in a child process until the failpoint kills it.
async fn kill(folder: &Path, double: &Arc<ServiceDoubles>, place: &str, minimum: &str) {
    double.with(|state| state.default_user = Some(TestUser::default()));
    for investor in ["alice", "bob"] {
        double.paid(&format!("payment-{investor}"), investor, "10000.00");
    }
    let stop = CancellationToken::new();
    let url = serve(double, &stop).await;
    let mut child = tokio::process::Command::new(std::env::current_exe().expect("program"))
        .args(["placement::child_closes_and_is_killed", "--exact"])
        .env(FOLDER, folder)
        .env(PEERS, url)
        .env(MINIMUM, minimum)
        .env("PLATFORM_CRASH_AT", place)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("started");
    let ended = tokio::time::timeout(2 * PATIENCE, child.wait()).await;
    let status = ended.expect("the process ends in time").expect("ended");
    assert_killed(status, place);
    stop.cancel();
}

#[tokio::test(flavor = "multi_thread")]
async fn f34_killed_at_each_step_a_placement_ends_with_the_same_result() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let places = [
        (failpoint::SUBSCRIPTION_RESERVED, ""),
        (failpoint::PLACEMENT_CLOSING, ""),
        (failpoint::PLACEMENT_DECIDED, ""),
        (failpoint::PLACEMENT_MINT_POSTED, ""),
        (failpoint::PLACEMENT_MINTED, ""),
        (failpoint::PLACEMENT_PART_RECORDED, ""),
        (failpoint::PLACEMENT_PART_POSTED, ""),
        (failpoint::PLACEMENT_PART_EXCHANGED, ""),
        (failpoint::PLACEMENT_PART_FINAL, ""),
        (failpoint::PLACEMENT_PAID, ""),
        (failpoint::OFFER_LIMITS_ENDED, ""),
        (failpoint::PLACEMENT_DECIDED, "5000.00"),
        (failpoint::PLACEMENT_RELEASED, "5000.00"),
        (failpoint::OFFER_LIMITS_ENDED, "5000.00"),
    ];
    for (place, minimum) in places {
        let folder = tempfile::tempdir().expect("folder");
        let double = Arc::new(ServiceDoubles::default());
        kill(folder.path(), &double, place, minimum).await;
        let settings = Settings {
            double: Some(double.clone()),
            ..Settings::default()
        };
        let mut world = World::with(folder.path(), settings).await;
        play(&mut world, minimum).await;
        let ended = async {
            loop {
                world.resume_operations().await;
                let placement = world.instrument("BOND-1").await.placement;
                let status = placement.expect("placement").status();
                use pb::PlacementStatus::{Failed, Placed};
                if [Failed, Placed].contains(&status) {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let ended = tokio::time::timeout(PATIENCE, ended).await;
        let status = ended.unwrap_or_else(|_| panic!("{place}: the placement does not end"));
        world.resume_operations().await;
        world.resume_operations().await;
        let is_failed = !minimum.is_empty();
        assert_eq!(status == pb::PlacementStatus::Failed, is_failed, "{place}");
        let (left, lots, supply) = match is_failed {
            true => ("10000.00", 0, "0"),
            false => ("5000.00", 5, "10"),
        };
        assert_eq!(
            money(&mut world, "alice").await,
            pair(left, left),
            "{place}"
        );
        assert_eq!(units(&mut world, "BOND-1", "alice").await, lots, "{place}");
        assert_settled(&mut world, "BOND-1", supply).await;
        if !is_failed {
            assert_eq!(money(&mut world, "bob").await, pair(left, left), "{place}");
            let all = pair("10000.00", "10000.00");
            assert_eq!(money(&mut world, "issuer").await, all, "{place}");
        }
        let open = world.double.with(|state| {
            let reserved = state.reservations.values();
            reserved.filter(|stored| stored.state == "RESERVED").count()
        });
        assert_eq!(open, 0, "{place}: a reservation is left");
        world.stop().await;
    }
}
