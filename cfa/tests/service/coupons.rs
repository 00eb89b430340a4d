//! Coupons by the calendar of an issue (F32, R099 to R103).

use std::cell::Cell;

use prost::Message;
use proto::cfa::v1 as pb;
use proto::common::v1 as common;

use crate::world::*;

const DAY_US: i64 = 24 * 3_600 * 1_000_000;
/// Longer than the service waits after the end of a day.
const GRACE_US: i64 = 120_000_000;

fn coupon(pays_at_us: i64, amount: &str) -> pb::Coupon {
    pb::Coupon {
        pays_at: Some(proto::convert::to_timestamp_us(pays_at_us)),
        amount: decimal(amount),
    }
}

/// A page of coupons, and the token of the next one.
async fn page(
    world: &mut World,
    instrument_id: &str,
    (page_size, page_token): (i32, String),
) -> (Vec<pb::CouponPayment>, String) {
    let request = pb::ListCouponsRequest {
        instrument_id: instrument_id.into(),
        pagination: Some(common::PaginationRequest {
            page_size,
            page_token,
        }),
        ..Default::default()
    };
    let listed = world.cfa.list_coupons(request).await.expect("listed");
    let listed = listed.into_inner();
    let next = listed.pagination.unwrap_or_default().next_page_token;
    (listed.coupons, next)
}

/// The coupons of BOND-1, first to last.
async fn coupons(world: &mut World) -> Vec<pb::CouponPayment> {
    let (mut coupons, next) = page(world, "BOND-1", (0, String::new())).await;
    assert_eq!(next, "");
    coupons.reverse();
    coupons
}

async fn statuses(world: &mut World) -> Vec<pb::CouponStatus> {
    let listed = coupons(world).await;
    listed.iter().map(pb::CouponPayment::status).collect()
}

/// Sweeps until the coupon has this status.
pub async fn coupon_becomes(world: &mut World, number: usize, status: pb::CouponStatus) {
    for _ in 0..3_000 {
        world.resume_operations().await;
        if statuses(world).await[number - 1] == status {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("coupon {number}: {:?}", coupons(world).await);
}

async fn available(world: &mut World, user_id: &str) -> String {
    let balance = world.balance(&format!("{user_id}:CFA-RUB")).await;
    balance.available.to_string()
}

/// Alice has one unit and Bob three since four days; the first coupon was due three days ago, the
/// clock is at that time.
pub async fn past_world(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    world.turn_back_us(3 * DAY_US);
    let pays_at_us = world.clock.now_us() + 60_000_000;
    let register = world.register(|request| {
        // Numbered by date, not in the order of registration.
        request.coupons = vec![
            coupon(pays_at_us + 30 * DAY_US, "10"),
            coupon(pays_at_us, "35.505"),
        ];
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "1").await;
    world.issue("BOND-1", "bob", "3").await;
    assert_eq!(world.holders("BOND-1").await.len(), 2);
    let past = "UPDATE holding_history SET time_us = time_us - 345600000000";
    alter_store(folder, past).await;
    follow_history(folder).await;
    world
}

/// Alice has two units, Bob three and Carol one since four days; Alice sold one back before. The
/// issue matured three days ago and trading has not stopped, the clock is at that time.
pub async fn matured_world(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    world.turn_back_us(3 * DAY_US);
    let matures_at_us = world.clock.now_us() + 60_000_000;
    let register = world.register(|request| {
        request.matures_at = Some(proto::convert::to_timestamp_us(matures_at_us));
        request.coupons = vec![coupon(matures_at_us, "7.25")];
    });
    register.await.expect("registered");
    for (holder, units) in [("alice", "3"), ("bob", "3"), ("carol", "1")] {
        world.issue("BOND-1", holder, units).await;
    }
    world.deposit("issuer", "11000.00").await;
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    offered.expect("offered");
    let sold = redeem_unit(&mut world, pb::RedemptionReason::Buyback).await;
    let sold = world.settle(&sold.expect("sold")).await;
    assert_eq!(sold.status(), common::OperationStatus::Finalized);
    assert_eq!(world.holders("BOND-1").await.len(), 3);
    let past = "UPDATE holding_history SET time_us = time_us - 345600000000";
    alter_store(folder, past).await;
    follow_history(folder).await;
    world.clock.advance_us(60_000_000);
    world
}

/// Sweeps until the issue is redeemed.
pub async fn issue_ends(world: &mut World) -> pb::IssueRedemption {
    for _ in 0..3_000 {
        world.resume_operations().await;
        if world.instrument("BOND-1").await.status() == pb::InstrumentStatus::Redeemed {
            let request = pb::GetRedemptionRequest {
                instrument_id: "BOND-1".into(),
                ..Default::default()
            };
            let found = world.cfa.get_redemption(request).await.expect("recorded");
            return found.into_inner().redemption.expect("redemption");
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("{:?}", world.service.health.failing());
}

/// RedeemInvestmentCfa of a unit of Alice.
pub async fn redeem_unit(
    world: &mut World,
    reason: pb::RedemptionReason,
) -> Result<pb::CfaOperation, tonic::Status> {
    redeem_units(world, "alice", "1", reason).await
}

async fn redeem_units(
    world: &mut World,
    holder_id: &str,
    units: &str,
    reason: pb::RedemptionReason,
) -> Result<pb::CfaOperation, tonic::Status> {
    let request = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: holder_id.into(),
        amount: amount("BOND-1", units),
        redemption_id: String::new(),
        reason: reason.into(),
    };
    let answer = world.cfa.redeem_investment_cfa(request).await?;
    Ok(answer.into_inner().operation.expect("operation"))
}

async fn transfer(world: &mut World, from: &str, to: &str, units: &str) {
    let request = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: from.into(),
        to_user_id: to.into(),
        amount: amount("BOND-1", units),
        ..Default::default()
    };
    let sent = world.transfer(request).await.expect("sent");
    let done = world.settle(&sent).await;
    assert_eq!(done.status(), common::OperationStatus::Finalized);
}

// rows: R099 R100 R101 R102
#[tokio::test(flavor = "multi_thread")]
async fn r099_a_coupon_is_paid_to_the_holders_at_the_end_of_its_day_once_it_is_funded() {
    use pb::CouponStatus::{Paid, Scheduled, Underfunded};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = past_world(folder.path()).await;
    // After the record date: Carol gets no coupon.
    transfer(&mut world, "bob", "carol", "3").await;
    world.resume_operations().await;
    assert_eq!(statuses(&mut world).await, [Scheduled, Scheduled]);
    assert_eq!(coupons(&mut world).await[0].total, None);

    world.turn_back_us(0);
    coupon_becomes(&mut world, 1, Underfunded).await;
    let due = coupons(&mut world).await.remove(0);
    assert_eq!(due.amount, decimal("35.505"));
    // 35.51 and 106.52: rounded half up per holder.
    assert_eq!(due.total, amount("CFA-RUB", "142.03"));
    let findings = world.service.health.findings();
    assert_eq!(findings["underfunded distributions"], "coupon 1 of BOND-1");
    world.resume_operations().await;
    for holder in ["alice", "bob", "system:redemption"] {
        assert_eq!(world.tokens("CFA-RUB", holder).await, 0, "{holder}");
    }

    world.deposit("issuer", "200.00").await;
    let supply = world.supply("CFA-RUB").await;
    coupon_becomes(&mut world, 1, Paid).await;
    let paid = coupons(&mut world).await.remove(0);
    assert!(paid.finalized_at.is_some() && paid.recorded_at.is_some());
    let findings = world.service.health.findings();
    assert!(!findings.contains_key("underfunded distributions"));
    // A sweep and a restart pay nothing again.
    world.resume_operations().await;
    assert_eq!(coupons(&mut world).await[0], paid);
    for (holder, minor, kept) in [
        ("alice", 35_51, "35.51"),
        ("bob", 106_52, "106.52"),
        ("issuer", 57_97, "57.97"),
    ] {
        assert_eq!(world.tokens("CFA-RUB", holder).await, minor, "{holder}");
        assert_eq!(available(&mut world, holder).await, kept, "{holder}");
    }
    assert_eq!(world.tokens("CFA-RUB", "carol").await, 0);
    assert_eq!(world.tokens("CFA-RUB", "system:redemption").await, 0);
    assert_eq!(world.supply("CFA-RUB").await, supply);
    assert_eq!(world.supply("BOND-1").await, "4", "no unit is burned");
    assert_eq!(world.tokens("BOND-1", "carol").await, 3);
    world.stop().await;
}

// rows: R101
#[tokio::test(flavor = "multi_thread")]
async fn r101_a_sweep_asks_for_the_money_of_a_coupon_and_reads_no_holder() {
    use pb::CouponStatus::{Paid, Underfunded};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = past_world(folder.path()).await;
    world.turn_back_us(0);
    coupon_becomes(&mut world, 1, Underfunded).await;
    // A read of the lines would fail.
    let raised = "UPDATE coupon_line SET payment_minor = payment_minor + 1";
    alter_store(folder.path(), raised).await;
    for _ in 0..3 {
        world.faults.take_calls("");
        world.resume_operations().await;
        let calls = world.faults.take_calls("dfa.ledger.v1.LedgerService");
        assert_eq!(calls, ["GetBalance"]);
        assert_eq!(statuses(&mut world).await[0], Underfunded);
    }
    let lowered = "UPDATE coupon_line SET payment_minor = payment_minor - 1";
    alter_store(folder.path(), lowered).await;
    world.deposit("issuer", "142.03").await;
    coupon_becomes(&mut world, 1, Paid).await;
    assert_eq!(available(&mut world, "alice").await, "35.51");
    world.stop().await;
}

// rows: R103
#[tokio::test(flavor = "multi_thread")]
async fn r103_each_holder_of_a_paid_coupon_is_notified_and_has_its_operation() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = past_world(folder.path()).await;
    world.deposit("issuer", "200.00").await;
    // A frozen account is credited (D47).
    world.deposit("bob", "1.00").await;
    world.freeze_money("bob", true).await;
    world.turn_back_us(0);
    coupon_becomes(&mut world, 1, pb::CouponStatus::Paid).await;
    let paid = coupons(&mut world).await.remove(0);
    let left = Cell::new(2);
    let seen = world
        .events_until(events::topics::CFA, |event| {
            if event.short_type() == "HolderNotificationEvent" {
                left.set(left.get() - 1);
            }
            left.get() == 0
        })
        .await;
    let told = seen
        .iter()
        .filter(|event| event.short_type() == "HolderNotificationEvent");
    let mut told: Vec<_> = told
        .map(|event| {
            let payload = event.payload.as_slice();
            let told = pb::HolderNotificationEvent::decode(payload).expect("decodes");
            assert_eq!(told.redemption_id, paid.payment_id);
            assert_eq!(
                (told.instrument_id.as_str(), told.coupon_number),
                ("BOND-1", 1)
            );
            assert_eq!(told.channels, ["push", "email"]);
            (told.user_id, told.amount)
        })
        .collect();
    told.sort_by(|one, other| one.0.cmp(&other.0));
    let owed = [("alice", "35.51"), ("bob", "106.52")];
    let owed = owed.map(|(user, paid)| (user.to_owned(), amount("CFA-RUB", paid)));
    assert_eq!(told, owed);
    // A coupon moves no position of the market.
    assert!(
        !seen
            .iter()
            .any(|event| event.short_type() == "CfaRedeemedEvent")
    );

    let address = chain::Address::of_user("alice");
    let request = pb::ListOperationsRequest {
        external_ref: format!("{}:{address}", paid.payment_id),
        ..Default::default()
    };
    let listed = world.cfa.list_operations(request).await.expect("listed");
    let operation = listed.into_inner().operations.remove(0);
    assert_eq!(operation.r#type(), common::OperationType::Coupon);
    assert_eq!(operation.status(), common::OperationStatus::Finalized);
    assert_eq!(operation.amount, decimal("35.51"));
    assert_eq!(operation.currency_code, "CFA-RUB");
    assert_eq!(operation.to_user_id, "alice");
    let postings = world.postings(&operation.operation_id).await;
    let from = "system:redemption:CFA-RUB".to_owned();
    assert_eq!(
        postings,
        [(from, "alice:CFA-RUB".to_owned(), "35.51".to_owned())]
    );
    world.stop().await;
}

// rows: R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_the_coupon_of_the_day_of_maturity_is_paid_with_the_redemption() {
    use pb::CouponStatus::{Paid, Redeemed, Scheduled};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let now_us = world.clock.now_us();
    let matures_at_us = now_us + 2 * DAY_US;
    let register = world.register(|request| {
        request.matures_at = Some(proto::convert::to_timestamp_us(matures_at_us));
        request.coupons = vec![coupon(now_us, "35.50"), coupon(matures_at_us, "7.25")];
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "5000.00").await;
    world.clock.advance_us(DAY_US + GRACE_US);
    coupon_becomes(&mut world, 1, Paid).await;
    assert_eq!(statuses(&mut world).await, [Paid, Scheduled]);
    assert_eq!(available(&mut world, "alice").await, "71.00");

    world.clock.advance_us(DAY_US);
    coupon_becomes(&mut world, 2, Redeemed).await;
    let request = pb::GetRedemptionRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let found = world.cfa.get_redemption(request).await.expect("recorded");
    let redemption = found.into_inner().redemption.expect("redemption");
    assert_eq!(redemption.total, amount("CFA-RUB", "2014.50"));
    world.clock.advance_us(2 * DAY_US);
    world.resume_operations().await;
    assert_eq!(statuses(&mut world).await, [Paid, Redeemed]);
    assert_eq!(available(&mut world, "alice").await, "2085.50");
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r098_an_early_redemption_cancels_later_coupons_and_earlier_ones_are_still_paid() {
    use pb::CouponStatus::{Cancelled, Paid, Scheduled};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = past_world(folder.path()).await;
    world.deposit("issuer", "5000.00").await;
    world.turn_back_us(0);
    assert_eq!(statuses(&mut world).await, [Scheduled, Scheduled]);
    let start = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let started = world.cfa.start_redemption(start).await.expect("started");
    let redemption = started.into_inner().redemption.expect("redemption");
    assert_eq!(redemption.status(), pb::RedemptionStatus::Finalized);
    // The nominal alone: the first coupon was due three days ago.
    assert_eq!(redemption.total, amount("CFA-RUB", "4000.00"));
    assert_eq!(statuses(&mut world).await, [Scheduled, Cancelled]);
    coupon_becomes(&mut world, 1, Paid).await;
    assert_eq!(available(&mut world, "alice").await, "1035.51");
    assert_eq!(available(&mut world, "bob").await, "3106.52");
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_a_unit_bought_back_on_the_day_of_a_coupon_gets_the_coupon_once() {
    use pb::CouponStatus::{Paid, Scheduled};
    use pb::RedemptionReason::{Buyback, Maturity};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = past_world(folder.path()).await;
    world.deposit("issuer", "5000.00").await;
    // By the clock the coupon is due today. The burn is in a block after the end of the day.
    world.clock.advance_us(60_000_000);
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    offered.expect("offered");
    let early = redeem_unit(&mut world, Maturity).await;
    let early = early.expect_err("before maturity");
    assert_eq!(
        (early.code(), reason(&early).as_str()),
        (tonic::Code::FailedPrecondition, "NOT_MATURED")
    );
    // The refusal has left the offer active.
    let bought = redeem_unit(&mut world, Buyback).await.expect("bought");
    let bought = world.settle(&bought).await;
    assert_eq!(bought.status(), common::OperationStatus::Finalized);
    assert_eq!(available(&mut world, "alice").await, "1000.00");

    world.turn_back_us(0);
    coupon_becomes(&mut world, 1, Paid).await;
    world.resume_operations().await;
    assert_eq!(statuses(&mut world).await, [Paid, Scheduled]);
    for (holder, minor, kept) in [
        ("alice", 1_035_51, "1035.51"),
        ("bob", 106_52, "106.52"),
        ("issuer", 3_857_97, "3857.97"),
    ] {
        assert_eq!(world.tokens("CFA-RUB", holder).await, minor, "{holder}");
        assert_eq!(available(&mut world, holder).await, kept, "{holder}");
    }
    assert_eq!(world.supply("BOND-1").await, "3");
    world.stop().await;
}

// rows: R097 R100
#[tokio::test(flavor = "multi_thread")]
async fn r097_units_redeemed_alone_at_maturity_get_the_coupon_of_the_day_once() {
    use pb::CouponStatus::{Redeemed, Scheduled};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let matures_at_us = world.clock.now_us() + 2 * DAY_US;
    let register = world.register(|request| {
        request.matures_at = Some(proto::convert::to_timestamp_us(matures_at_us));
        request.coupons = vec![coupon(matures_at_us, "7.25")];
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "5000.00").await;
    world.clock.advance_us(2 * DAY_US);
    let sent = redeem_unit(&mut world, pb::RedemptionReason::Maturity).await;
    let done = world.settle(&sent.expect("sent")).await;
    assert_eq!(done.status(), common::OperationStatus::Finalized);
    assert_eq!(available(&mut world, "alice").await, "1007.25");
    assert_eq!(statuses(&mut world).await, [Scheduled]);

    // After the end of the day: the redemption of the issue, not the calendar, pays the other unit.
    world.clock.advance_us(DAY_US + GRACE_US);
    coupon_becomes(&mut world, 1, Redeemed).await;
    world.resume_operations().await;
    assert_eq!(statuses(&mut world).await, [Redeemed]);
    assert_eq!(available(&mut world, "alice").await, "2014.50");
    assert_eq!(available(&mut world, "issuer").await, "2985.50");
    assert_eq!(world.supply("BOND-1").await, "0");
    world.stop().await;
}

/// Each holder has the money of all units, and the issuer the rest.
async fn assert_paid(world: &mut World, paid: [(&str, u128, &str); 4]) {
    for (user, minor, kept) in paid {
        assert_eq!(world.tokens("CFA-RUB", user).await, minor, "{user}");
        assert_eq!(available(world, user).await, kept, "{user}");
    }
    assert_eq!(world.tokens("CFA-RUB", "system:redemption").await, 0);
    assert_eq!(world.supply("BOND-1").await, "0");
}

// rows: R097 R099 R100
#[tokio::test(flavor = "multi_thread")]
async fn r099_units_burned_alone_after_the_record_day_are_not_paid_again_with_the_issue() {
    use pb::RedemptionReason::{Buyback, Maturity};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = matured_world(folder.path()).await;
    // The holders at the end of the record day still have these units.
    for holder in ["alice", "carol"] {
        let sent = redeem_units(&mut world, holder, "1", Maturity).await;
        let done = world.settle(&sent.expect("sent")).await;
        assert_eq!(done.status(), common::OperationStatus::Finalized);
    }
    let offered = world.offer("BOND-1", "bob", "1", "1000.00").await;
    offered.expect("offered");
    // May be open when trading stops.
    let sent = redeem_units(&mut world, "bob", "1", Buyback).await;
    sent.expect("sent");

    world.turn_back_us(0);
    let redemption = issue_ends(&mut world).await;
    let mut payments: Vec<_> = redemption
        .payments
        .iter()
        .map(|payment| (payment.user_id.as_str(), payment.amount.clone()))
        .collect();
    payments.sort_by_key(|(user, _)| *user);
    let due = [("alice", "1007.25"), ("bob", "2014.50")];
    assert_eq!(
        payments,
        due.map(|(user, due)| (user, amount("CFA-RUB", due)))
    );
    assert_eq!(redemption.total, amount("CFA-RUB", "3021.75"));
    let paid = [
        ("alice", 3_014_50, "3014.50"),
        ("bob", 3_014_50, "3014.50"),
        ("carol", 1_007_25, "1007.25"),
        ("issuer", 3_963_75, "3963.75"),
    ];
    assert_paid(&mut world, paid).await;
    world.stop().await;
}

// rows: R097 R099 R100
#[tokio::test(flavor = "multi_thread")]
async fn r099_an_issue_whose_units_were_all_burned_alone_after_the_record_day_ends() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = matured_world(folder.path()).await;
    for (holder, units) in [("alice", "2"), ("bob", "3"), ("carol", "1")] {
        let sent = redeem_units(&mut world, holder, units, pb::RedemptionReason::Maturity).await;
        let done = world.settle(&sent.expect("sent")).await;
        assert_eq!(done.status(), common::OperationStatus::Finalized);
    }
    world.turn_back_us(0);
    let redemption = issue_ends(&mut world).await;
    assert!(redemption.payments.is_empty());
    assert_eq!(redemption.total, amount("CFA-RUB", "0.00"));
    let paid = [
        ("alice", 3_014_50, "3014.50"),
        ("bob", 3_021_75, "3021.75"),
        ("carol", 1_007_25, "1007.25"),
        ("issuer", 3_956_50, "3956.50"),
    ];
    assert_paid(&mut world, paid).await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_coupon_is_restarted_by_its_issuer() {
    use pb::CouponStatus::{Failed, Paid, Underfunded};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = past_world(folder.path()).await;
    world.turn_back_us(0);
    coupon_becomes(&mut world, 1, Underfunded).await;
    let request = |number: u32, key: &str| pb::RestartCouponRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        number,
    };
    let mut issuer = world.as_caller("sandbox.issuer.issuer");
    let early = issuer.restart_coupon(request(1, "k-1")).await;
    assert_eq!(reason(&early.expect_err("not failed")), "OPERATION_STATE");
    let unknown = issuer.restart_coupon(request(9, "k-1")).await;
    assert_eq!(reason(&unknown.expect_err("unknown")), "COUPON_NOT_FOUND");
    let mut stranger = world.as_caller("sandbox.issuer.other");
    let foreign = stranger.restart_coupon(request(1, "k-1")).await;
    let foreign = foreign.expect_err("another issuer");
    assert_eq!(foreign.code(), tonic::Code::PermissionDenied);
    // As after a reverted transaction.
    alter_store(
        folder.path(),
        "UPDATE coupon SET status = 6 WHERE number = 1",
    )
    .await;
    world.resume_operations().await;
    assert_eq!(statuses(&mut world).await[0], Failed);
    let findings = world.service.health.findings();
    assert_eq!(findings["failed coupons"], "coupon 1 of BOND-1");
    world.deposit("issuer", "200.00").await;
    world.resume_operations().await;
    assert_eq!(statuses(&mut world).await[0], Failed);
    let restarted = issuer.restart_coupon(request(1, "k-2")).await;
    let coupon = restarted.expect("restarted").into_inner().coupon;
    assert_eq!(coupon.expect("coupon").status(), Paid);
    let again = issuer.restart_coupon(request(1, "k-2")).await;
    let again = again.expect("stored");
    assert!(again.metadata().contains_key("idempotent-replayed"));
    world.resume_operations().await;
    assert_eq!(available(&mut world, "alice").await, "35.51");
    assert_eq!(available(&mut world, "issuer").await, "57.97");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn coupons_are_listed_page_by_page() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let now_us = world.clock.now_us();
    for symbol in ["BOND-1", "BOND-2"] {
        let register = world.register(|request| {
            request.symbol = symbol.into();
            // Two of one time.
            request.coupons = vec![
                coupon(now_us + DAY_US, "1"),
                coupon(now_us + DAY_US, "2"),
                coupon(now_us + 2 * DAY_US, "3"),
            ];
        });
        register.await.expect("registered");
    }
    let draft = world.draft(|request| {
        request.symbol = "BOND-3".into();
        request.coupons = vec![coupon(now_us + DAY_US, "9")];
    });
    draft.await.expect("a draft");
    let named = |coupon: pb::CouponPayment| (coupon.instrument_id, coupon.number);
    let all: [(&str, u32); 6] = [
        ("BOND-2", 3),
        ("BOND-1", 3),
        ("BOND-2", 2),
        ("BOND-2", 1),
        ("BOND-1", 2),
        ("BOND-1", 1),
    ];
    let of_one: [(&str, u32); 3] = [("BOND-2", 3), ("BOND-2", 2), ("BOND-2", 1)];
    for (instrument_id, expected) in [("", all.as_slice()), ("BOND-2", of_one.as_slice())] {
        for page_size in [1, 2, 4, 0] {
            let (mut listed, mut token) = (Vec::new(), String::new());
            loop {
                let (rows, next) = page(&mut world, instrument_id, (page_size, token)).await;
                listed.extend(rows.into_iter().map(named));
                token = next;
                if token.is_empty() {
                    break;
                }
            }
            let listed: Vec<(&str, u32)> = listed
                .iter()
                .map(|(id, number)| (id.as_str(), *number))
                .collect();
            assert_eq!(listed, expected, "pages of {page_size}");
        }
    }
    world.stop().await;
}
