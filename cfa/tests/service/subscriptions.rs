//! An issue against payment needs the investor's own subscription (D46).

use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, PaginationRequest};
use proto::ledger::v1 as ledger;
use tonic::Code;

use crate::redeem::hold;
use crate::world::*;

/// BOND-1 is registered, and alice has 5000.00.
async fn with_money(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    world.register(|_| {}).await.expect("registered");
    world.deposit("alice", "5000.00").await;
    world
}

/// Alice's offer to buy a bond for one rouble.
fn offer() -> pb::SubscribeRequest {
    pb::SubscribeRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        investor_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        payment: amount("CFA-RUB", "1.00"),
        expires_at: None,
    }
}

async fn money(world: &mut World, user_id: &str) -> (String, String) {
    let balance = world.balance(&format!("{user_id}:CFA-RUB")).await;
    (balance.balance.to_string(), balance.available.to_string())
}

fn pair(balance: &str, available: &str) -> (String, String) {
    (balance.to_owned(), available.to_owned())
}

async fn buy(
    world: &mut World,
    units: &str,
    payment: &str,
) -> Result<pb::CfaOperation, tonic::Status> {
    let request = issue_request("BOND-1", "alice", units, Some(payment));
    let answer = world.cfa.issue_investment_cfa(request).await?;
    Ok(answer.into_inner().operation.expect("operation"))
}

async fn status_of(world: &mut World, id: &str) -> pb::SubscriptionStatus {
    let listed = list(world, "sandbox.investor.alice", "alice", "").await;
    let found = listed.expect("listed").into_iter();
    let mut found = found.filter(|one| one.subscription_id == id);
    found.next().expect("listed").status()
}

async fn list(
    world: &World,
    credential: &str,
    investor_id: &str,
    instrument_id: &str,
) -> Result<Vec<pb::Subscription>, tonic::Status> {
    let request = pb::ListSubscriptionsRequest {
        investor_id: investor_id.into(),
        instrument_id: instrument_id.into(),
        pagination: Some(PaginationRequest {
            page_size: 1_000,
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut caller = world.as_caller(credential);
    let listed = caller.list_subscriptions(request).await?;
    Ok(listed.into_inner().subscriptions)
}

async fn cancel(
    world: &World,
    credential: &str,
    id: &str,
) -> Result<pb::Subscription, tonic::Status> {
    let request = pb::CancelSubscriptionRequest {
        context: context(&key()),
        subscription_id: id.into(),
    };
    let answer = world
        .as_caller(credential)
        .cancel_subscription(request)
        .await?;
    Ok(answer.into_inner().subscription.expect("subscription"))
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_no_issuer_takes_money_without_the_investors_own_subscription() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    for credential in [
        "sandbox.issuer.issuer",
        "sandbox.operator",
        "sandbox.service",
    ] {
        let request = issue_request("BOND-1", "alice", "1", Some("1000.00"));
        let refused = world
            .as_caller(credential)
            .issue_investment_cfa(request)
            .await;
        let refused = refused.expect_err(credential);
        assert_eq!(
            (refused.code(), refused.message()),
            (
                Code::FailedPrecondition,
                "No active subscription for this investor"
            )
        );
        // Neither can any of them subscribe for the investor.
        let refused = world.as_caller(credential).subscribe(offer()).await;
        assert_eq!(
            refused.expect_err(credential).code(),
            Code::PermissionDenied
        );
    }
    assert_eq!(money(&mut world, "alice").await, pair("5000.00", "5000.00"));
    assert_eq!(world.instrument("BOND-1").await.issued, decimal("0"));

    let subscription = world.subscribe("BOND-1", "alice", "4", "4000.00").await;
    let subscription = subscription.expect("subscribed");
    assert_eq!(subscription.status(), pb::SubscriptionStatus::Active);
    assert_eq!(money(&mut world, "alice").await, pair("5000.00", "1000.00"));
    // An issue with more or fewer units, or more or less money, is refused.
    for (units, payment) in [("4", "4000.01"), ("4", "3999.99"), ("3", "4000.00")] {
        let refused = buy(&mut world, units, payment).await.expect_err("differs");
        assert_eq!(reason(&refused), "NOT_SUBSCRIBED");
    }
    let issued = buy(&mut world, "4", "4000.00").await.expect("issued");
    let issued = world.settle(&issued).await;
    assert_eq!(issued.status(), OperationStatus::Finalized);
    assert_eq!(money(&mut world, "alice").await, pair("1000.00", "1000.00"));
    let held = hold(&mut world, &subscription.hold_id).await;
    assert_eq!(held.status(), ledger::HoldStatus::Consumed);
    // A subscription is used once.
    let refused = buy(&mut world, "4", "4000.00").await.expect_err("used");
    assert_eq!(reason(&refused), "NOT_SUBSCRIBED");
    let id = &subscription.subscription_id;
    let used = pb::SubscriptionStatus::Used;
    assert_eq!(status_of(&mut world, id).await, used);
    let late = cancel(&world, "sandbox.investor.alice", id).await;
    assert_eq!(reason(&late.expect_err("used")), "OPERATION_STATE");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_two_issues_at_once_use_one_subscription_once() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    subscribed.expect("subscribed");
    let calls = (0..8).map(|_| {
        let mut cfa = world.cfa.clone();
        let request = issue_request("BOND-1", "alice", "1", Some("1000.00"));
        tokio::spawn(async move { cfa.issue_investment_cfa(request).await })
    });
    let mut issued = Vec::new();
    for call in calls.collect::<Vec<_>>() {
        match call.await.expect("no panic") {
            Ok(answer) => issued.push(answer.into_inner().operation.expect("operation")),
            Err(refused) => assert_eq!(reason(&refused), "NOT_SUBSCRIBED"),
        }
    }
    assert_eq!(issued.len(), 1);
    world.settle(&issued[0]).await;
    assert_eq!(money(&mut world, "alice").await, pair("4000.00", "4000.00"));
    assert_eq!(world.instrument("BOND-1").await.issued, decimal("1"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_calls_at_once_with_one_key_make_one_subscription() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let request = offer();
    let calls = (0..8).map(|_| {
        let mut alice = world.as_caller("sandbox.investor.alice");
        let request = request.clone();
        tokio::spawn(async move { alice.subscribe(request).await })
    });
    let mut ids = std::collections::BTreeSet::new();
    for call in calls.collect::<Vec<_>>() {
        let answer = call.await.expect("no panic").expect("subscribed");
        let subscription = answer.into_inner().subscription.expect("subscription");
        assert_eq!(subscription.status(), pb::SubscriptionStatus::Active);
        ids.insert(subscription.subscription_id);
    }
    assert_eq!(ids.len(), 1);
    assert_eq!(money(&mut world, "alice").await, pair("5000.00", "4999.00"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_a_cancelled_or_expired_subscription_returns_its_money() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let subscribe = async |world: &World| {
        let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
        subscribed.expect("subscribed").subscription_id
    };
    let first = subscribe(&world).await;
    let foreign = cancel(&world, "sandbox.investor.bob", &first).await;
    assert_eq!(foreign.expect_err("foreign").code(), Code::PermissionDenied);
    for _ in 0..2 {
        let cancelled = cancel(&world, "sandbox.investor.alice", &first).await;
        let status = cancelled.expect("cancelled").status();
        assert_eq!(status, pb::SubscriptionStatus::Cancelled);
    }
    assert_eq!(money(&mut world, "alice").await, pair("5000.00", "5000.00"));
    let refused = buy(&mut world, "1", "1000.00")
        .await
        .expect_err("cancelled");
    assert_eq!(reason(&refused), "NOT_SUBSCRIBED");

    // An expired subscription is not used, and the sweep releases its money.
    let second = subscribe(&world).await;
    world.stop().await;
    let past = "UPDATE offer SET expires_at_us = 1 WHERE offer_id = $1";
    alter_store_by(folder.path(), past, &[&second]).await;
    let mut world = World::start(folder.path()).await;
    let refused = buy(&mut world, "1", "1000.00").await.expect_err("expired");
    assert_eq!(reason(&refused), "NOT_SUBSCRIBED");
    world.resume_operations().await;
    let expired = pb::SubscriptionStatus::Expired;
    assert_eq!(status_of(&mut world, &second).await, expired);
    assert_eq!(money(&mut world, "alice").await, pair("5000.00", "5000.00"));
    world.stop().await;
}

/// A crash between a step and its record.
#[tokio::test(flavor = "multi_thread")]
async fn d46_a_subscription_continues_after_a_crash_at_each_step() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    let id = subscribed.expect("subscribed").subscription_id;
    use pb::SubscriptionStatus::{Active, Cancelled};
    for (crashed, expected, available) in [
        // The payment is held; the hold is not recorded.
        ("status = 1, step = 1", Active, "4000.00"),
        // The subscription is cancelled; its payment is not released.
        ("status = 4, step = 1", Cancelled, "5000.00"),
        // The payment is released; the release is not recorded.
        ("status = 4, step = 1", Cancelled, "5000.00"),
    ] {
        world.stop().await;
        let statement = match crashed {
            "status = 1, step = 1" => "UPDATE offer SET status = 1, step = 1 WHERE offer_id = $1",
            _ => "UPDATE offer SET status = 4, step = 1 WHERE offer_id = $1",
        };
        alter_store_by(folder.path(), statement, &[&id]).await;
        world = World::start(folder.path()).await;
        world.resume_operations().await;
        assert_eq!(status_of(&mut world, &id).await, expected, "{crashed}");
        assert_eq!(money(&mut world, "alice").await.1, available, "{crashed}");
    }
    world.stop().await;
}

/// Subscriptions in the table of an earlier release are used and cancelled like new ones.
#[tokio::test(flavor = "multi_thread")]
async fn d46_subscriptions_of_an_earlier_release_go_on() {
    let folder = tempfile::tempdir().expect("folder");
    let world = with_money(folder.path()).await;
    let first = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    let first = first.expect("subscribed");
    let second = world.subscribe("BOND-1", "alice", "2", "2000.00").await;
    let second = second.expect("subscribed");
    world.stop().await;
    let store = folder.path().join("cfa/cfa.sqlite");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(store);
    let pool = sqlx::SqlitePool::connect_with(options).await;
    let pool = pool.expect("store");
    for statement in [
        include_str!("../../migrations/sqlite/0009_subscriptions.sql"),
        "INSERT INTO subscription SELECT offer_id, instrument_id, user_id, units_minor, \
            payment_minor, status, step, operation_id, idempotency_key, correlation_id, \
            expires_at_us, created_at_us, updated_at_us FROM offer",
        "DROP TABLE offer",
        "DROP TABLE placement",
        // The migration of coupons replaces an index of that of placements.
        "DROP TABLE coupon_line",
        "DROP TABLE coupon",
        "DELETE FROM _sqlx_migrations WHERE version IN (10, 12, 18)",
    ] {
        let done = sqlx::raw_sql(statement).execute(&pool).await;
        done.expect("done");
    }
    pool.close().await;

    let mut world = World::start(folder.path()).await;
    let listed = list(&world, "sandbox.investor.alice", "alice", "").await;
    assert_eq!(listed.expect("listed"), [second.clone(), first.clone()]);
    let id = &first.subscription_id;
    let cancelled = cancel(&world, "sandbox.investor.alice", id).await;
    cancelled.expect("cancelled");
    let issued = buy(&mut world, "2", "2000.00").await.expect("issued");
    world.settle(&issued).await;
    assert_eq!(money(&mut world, "alice").await, pair("3000.00", "3000.00"));
    let used = status_of(&mut world, &second.subscription_id).await;
    assert_eq!(used, pb::SubscriptionStatus::Used);
    world.stop().await;
}

/// Health reports an ended subscription whose held money is gone, because an operator must act.
#[tokio::test(flavor = "multi_thread")]
async fn d46_health_names_a_subscription_whose_money_cannot_be_released() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    let id = subscribed.expect("subscribed").subscription_id;
    let issued = buy(&mut world, "1", "1000.00").await.expect("issued");
    world.settle(&issued).await;
    world.resume_operations().await;
    assert!(world.service.health.failing().is_empty());
    let damages = [
        // A contradiction: the sweep cannot read the offer.
        (
            "UPDATE offer SET status = 4, step = 1 WHERE offer_id = $1",
            true,
        ),
        (
            "UPDATE offer SET operation_id = '' WHERE offer_id = $1",
            true,
        ),
        (
            "UPDATE offer SET status = 3, step = 0, operation_id = (SELECT operation_id \
             FROM operation WHERE flow = 3 ORDER BY created_at_us DESC LIMIT 1) \
             WHERE offer_id = $1",
            false,
        ),
    ];
    for (damage, is_failing) in damages {
        world.stop().await;
        alter_store_by(folder.path(), damage, &[&id]).await;
        world = World::start(folder.path()).await;
        let since = std::time::Instant::now();
        loop {
            world.resume_operations().await;
            let failing = world.service.health.failing();
            let reason = failing.get("subscriptions");
            if reason.is_some_and(|text| text.contains(&id)) == is_failing {
                break;
            }
            // The worker's first sweep, which reads older offers only, may end after this one.
            assert!(since.elapsed() < WAIT, "{damage}");
        }
    }
    assert_eq!(money(&mut world, "alice").await, pair("4000.00", "4000.00"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_a_cancellation_and_an_issue_at_once_exclude_each_other() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let mut left = 500_000;
    for _ in 0..10 {
        let subscribed = world.subscribe("BOND-1", "alice", "1", "100.00").await;
        let id = subscribed.expect("subscribed").subscription_id;
        let mut cfa = world.cfa.clone();
        let request = issue_request("BOND-1", "alice", "1", Some("100.00"));
        let issue = tokio::spawn(async move { cfa.issue_investment_cfa(request).await });
        let cancelled = cancel(&world, "sandbox.investor.alice", &id).await;
        match issue.await.expect("no panic") {
            Ok(issued) => {
                assert_eq!(reason(&cancelled.expect_err("used")), "OPERATION_STATE");
                let issued = issued.into_inner().operation.expect("operation");
                world.settle(&issued).await;
                left -= 10_000;
            }
            Err(refused) => {
                assert_eq!(reason(&refused), "NOT_SUBSCRIBED");
                cancelled.expect("cancelled");
            }
        }
        let available = world.balance("alice:CFA-RUB").await.available;
        assert_eq!(available.to_minor(2), Ok(left));
    }
    world.stop().await;
}

/// The ledger refuses the hold of a pending subscription in the sweep, with a crash after each step
/// of `void_hold`. Nothing stays held, and no late call can hold anything.
#[tokio::test(flavor = "multi_thread")]
async fn d46_a_hold_refused_to_the_sweep_uses_up_its_id_and_deletes_the_subscription() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let pending = "INSERT INTO offer (offer_id, side, instrument_id, user_id, units_minor, \
        payment_minor, status, step, idempotency_key, correlation_id, expires_at_us, \
        created_at_us, updated_at_us)
        VALUES ($1, 1, 'BOND-1', 'alice', 1, $2, $3, 1, $1, 'c', 3786912000000000, 1, 1)";
    let kopeck = |id: &str| ledger::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger::Hold {
            hold_id: types::derived::offer_hold(id).to_string(),
            subaccount_id: "alice:CFA-RUB".into(),
            amount: amount("CFA-RUB", "0.01"),
            owner: "cfa".into(),
            ..Default::default()
        }),
    };
    for (id, kopecks, status, held_before) in [
        // The ledger refuses the hold now.
        ("s-1", "600000", "1", false),
        // The process ended after the kopeck was held. The money has arrived meanwhile.
        ("s-2", "100000", "1", true),
        // The process ended after the kopeck was released: the hold of `s-1` exists.
        ("s-1", "600000", "1", false),
        // The subscription was cancelled before the hold was made.
        ("s-3", "100000", "4", false),
    ] {
        if held_before {
            world.ledger.create_hold(kopeck(id)).await.expect("held");
        }
        world.stop().await;
        alter_store_by(folder.path(), pending, &[id, kopecks, status]).await;
        world = World::start(folder.path()).await;
        world.resume_operations().await;
        let listed = list(&world, "sandbox.investor.alice", "alice", "").await;
        let mut left = listed.expect("listed").into_iter();
        let is_left = left.any(|one| one.subscription_id == id);
        assert_eq!(is_left, status == "4", "{id}");
        let hold_id = types::derived::offer_hold(id).to_string();
        let held = hold(&mut world, &hold_id).await;
        assert_eq!(held.status(), ledger::HoldStatus::Released, "{id}");
        assert_eq!(money(&mut world, "alice").await, pair("5000.00", "5000.00"));
        let failing = world.service.health.failing();
        assert!(!failing.contains_key("subscriptions"), "{failing:?}");
    }
    world.stop().await;
}

/// A frozen account does not pay for an issue out of the subscription's hold.
#[tokio::test(flavor = "multi_thread")]
async fn d46_a_frozen_investor_pays_for_no_issue_and_keeps_the_subscription() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    let id = subscribed.expect("subscribed").subscription_id;
    world.freeze_money("alice", true).await;
    let refused = buy(&mut world, "1", "1000.00").await.expect_err("frozen");
    assert_eq!(reason(&refused), "SUB_ACCOUNT_FROZEN");
    let active = pb::SubscriptionStatus::Active;
    assert_eq!(status_of(&mut world, &id).await, active);
    assert_eq!(world.instrument("BOND-1").await.issued, decimal("0"));
    world.freeze_money("alice", false).await;
    // An issue that compliance refuses before money moves keeps the subscription too.
    world
        .double
        .upsert_user("alice", |alice| alice.is_sanctioned = true);
    let rejected = buy(&mut world, "1", "1000.00").await.expect("recorded");
    assert_eq!(rejected.status(), OperationStatus::Rejected);
    assert_eq!(status_of(&mut world, &id).await, active);
    world
        .double
        .upsert_user("alice", |alice| alice.is_sanctioned = false);
    let issued = buy(&mut world, "1", "1000.00").await.expect("issued");
    world.settle(&issued).await;
    assert_eq!(money(&mut world, "alice").await, pair("4000.00", "4000.00"));
    world.stop().await;
}

/// After lost calls and answers, the held money is that of the active subscriptions.
#[tokio::test(flavor = "multi_thread")]
async fn d46_lost_calls_leave_no_money_held() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    world.faults.start(46);
    for turn in 0..40 {
        // A lost call is answered UNAVAILABLE; the sweep completes it.
        let subscribed = world.subscribe("BOND-1", "alice", "1", "100.00").await;
        if let (Ok(subscription), true) = (subscribed, turn % 2 == 0) {
            let id = &subscription.subscription_id;
            let _ = cancel(&world, "sandbox.investor.alice", id).await;
        }
    }
    let (calls, answers) = world.faults.lost();
    assert!(calls > 5 && answers > 5);
    world.faults.stop();
    for _ in 0..3 {
        world.resume_operations().await;
    }
    let listed = list(&world, "sandbox.investor.alice", "alice", "").await;
    let statuses = listed.expect("listed").into_iter().map(|one| one.status());
    let (active, pending) = statuses.fold((0, 0), |(active, pending), status| match status {
        pb::SubscriptionStatus::Active => (active + 1, pending),
        pb::SubscriptionStatus::Pending => (active, pending + 1),
        _ => (active, pending),
    });
    assert_eq!(pending, 0);
    let available = world.balance("alice:CFA-RUB").await.available;
    assert_eq!(available.to_minor(2), Ok(500_000 - 10_000 * active));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_subscriptions_are_bounded_checked_and_shown_to_their_parties() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_money(folder.path()).await;
    type Change = fn(&mut pb::SubscribeRequest);
    let bad: [(Change, Code); 7] = [
        (|ask| ask.payment = None, Code::InvalidArgument),
        (|ask| ask.amount = None, Code::InvalidArgument),
        (
            |ask| ask.amount = amount("BOND-1", "0.5"),
            Code::InvalidArgument,
        ),
        (
            |ask| {
                ask.instrument_id = "CFA-RUB".into();
                ask.amount = amount("CFA-RUB", "1");
            },
            Code::InvalidArgument,
        ),
        (
            |ask| {
                ask.instrument_id = "BOND-9".into();
                ask.amount = amount("BOND-9", "1");
            },
            Code::NotFound,
        ),
        (
            |ask| {
                let seconds = 946_684_800;
                ask.expires_at = Some(prost_types::Timestamp { seconds, nanos: 0 });
            },
            Code::InvalidArgument,
        ),
        (
            |ask| ask.payment = amount("CFA-RUB", "5000.01"),
            Code::FailedPrecondition,
        ),
    ];
    let mut alice = world.as_caller("sandbox.investor.alice");
    for (change, code) in bad {
        let mut ask = offer();
        change(&mut ask);
        let refused = alice.subscribe(ask.clone()).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{ask:?}: {refused}");
    }
    assert_eq!(money(&mut world, "alice").await, pair("5000.00", "5000.00"));
    // A repeat makes no second subscription.
    let ask = offer();
    let first = alice.subscribe(ask.clone()).await.expect("subscribed");
    let again = alice.subscribe(ask).await.expect("the stored one");
    assert!(again.metadata().contains_key("idempotent-replayed"));
    assert_eq!(again.into_inner(), first.into_inner());
    for _ in 1..100 {
        alice.subscribe(offer()).await.expect("subscribed");
    }
    let many = alice.subscribe(offer()).await.expect_err("too many");
    assert_eq!(reason(&many), "TOO_MANY_SUBSCRIPTIONS");
    assert_eq!(money(&mut world, "alice").await.1, "4900.00");

    let own = list(&world, "sandbox.investor.alice", "alice", "BOND-1").await;
    assert_eq!(own.expect("listed").len(), 100);
    let of_issue = list(&world, "sandbox.issuer.issuer", "", "BOND-1").await;
    assert_eq!(of_issue.expect("listed").len(), 100);
    for (credential, investor, instrument, code) in [
        ("sandbox.investor.bob", "alice", "", Code::PermissionDenied),
        (
            "sandbox.investor.alice",
            "",
            "BOND-1",
            Code::PermissionDenied,
        ),
        ("sandbox.issuer.other", "", "BOND-1", Code::PermissionDenied),
        ("sandbox.operator", "", "", Code::InvalidArgument),
    ] {
        let refused = list(&world, credential, investor, instrument).await;
        assert_eq!(refused.expect_err(credential).code(), code, "{credential}");
    }
    world.stop().await;
}
