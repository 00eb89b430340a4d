//! Redemption of units of one holder by call: its fields, its price, and units without one.

use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, OperationType};

use crate::redemption::{assert_untouched, start};
use crate::world::*;

async fn buy_back(world: &mut World, units: &str) -> Result<pb::CfaOperation, tonic::Status> {
    let request = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", units),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let answer = world.cfa.redeem_investment_cfa(request).await?;
    Ok(answer.into_inner().operation.expect("operation"))
}

type Change = fn(&mut pb::RedeemInvestmentCfaRequest);

/// A buyback of one unit from Alice, with a change.
fn units_redemption(change: Change) -> pb::RedeemInvestmentCfaRequest {
    let mut request = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    change(&mut request);
    request
}

/// Alice has five units with a coupon that is due, the issuer has money. Maturity is an hour later,
/// on the same day.
async fn coupon_world(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    let now = world.clock.now_us() / 1_000_000;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: now + 3_600,
            nanos: 0,
        });
        request.coupons = vec![pb::Coupon {
            pays_at: Some(prost_types::Timestamp {
                seconds: now,
                nanos: 0,
            }),
            amount: decimal("35.50"),
        }];
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "5").await;
    world.deposit("issuer", "3000.00").await;
    world
}

// rows: R326
#[tokio::test(flavor = "multi_thread")]
async fn r326_every_field_of_a_units_redemption_is_checked() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = coupon_world(folder.path()).await;
    let bad: [(&str, Change); 9] = [
        ("context.idempotency_key", |request| {
            request.context = context("")
        }),
        ("instrument_id", |request| {
            (request.instrument_id, request.amount) = ("CFA-RUB".into(), amount("CFA-RUB", "1"))
        }),
        ("holder_id", |request| request.holder_id = "".into()),
        ("holder_id", |request| request.holder_id = "issuer".into()),
        ("amount", |request| request.amount = None),
        ("amount", |request| request.amount = amount("BOND-2", "1")),
        ("amount.amount", |request| {
            request.amount = amount("BOND-1", "0.5")
        }),
        ("redemption_id", |request| {
            request.redemption_id = "a:b".into()
        }),
        ("reason", |request| request.reason = 9),
    ];
    for (field, change) in bad {
        let request = units_redemption(change);
        let refused = world.cfa.redeem_investment_cfa(request).await;
        let refused = refused.expect_err(field);
        let details = tonic_types::StatusExt::get_details_bad_request(&refused);
        let violations = details.expect("details").field_violations;
        assert_eq!(violations[0].field, field, "{refused}");
    }
    let unknown = units_redemption(|request| request.instrument_id = "BOND-9".into());
    let unknown = world.cfa.redeem_investment_cfa(unknown).await;
    assert_eq!(
        unknown.expect_err("unknown").message(),
        "Instrument not found"
    );
    let mut stranger = world.as_caller("sandbox.issuer.other");
    let foreign = stranger.redeem_investment_cfa(units_redemption(|_| {}));
    assert_eq!(
        foreign.await.expect_err("foreign").code(),
        tonic::Code::PermissionDenied
    );
    assert_untouched(&mut world, "5").await;
    world.stop().await;
}

// rows: R326
#[tokio::test(flavor = "multi_thread")]
async fn r326_a_buyback_pays_the_nominal_and_maturity_the_due_coupons_too() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = coupon_world(folder.path()).await;
    let at_maturity: Change = |request| {
        request.redemption_id = "end-1".into();
        request.reason = pb::RedemptionReason::Maturity.into();
    };
    for (change, paid) in [(|_| {}) as Change, at_maturity]
        .into_iter()
        .zip(["1000.00", "2035.50"])
    {
        let asked = units_redemption(change);
        if asked.reason() == pb::RedemptionReason::Maturity {
            world.clock.advance_us(3_600_000_000);
        } else {
            let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
            offered.expect("offered");
        }
        let answer = world.cfa.redeem_investment_cfa(asked.clone()).await;
        let sent = answer.expect("sent").into_inner().operation;
        let done = world.settle(&sent.expect("operation")).await;
        assert_eq!(
            (done.status(), done.r#type()),
            (OperationStatus::Finalized, OperationType::Redemption)
        );
        let key = asked.context.expect("context").idempotency_key;
        assert_eq!(
            (
                done.user_id,
                done.instrument_id,
                done.external_ref,
                done.idempotency_key
            ),
            ("alice".into(), "BOND-1".into(), asked.redemption_id, key)
        );
        assert_eq!(done.amount, decimal("1"));
        let balance = world.balance("alice:CFA-RUB").await;
        assert_eq!(balance.available.to_string(), paid);
    }
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_035_50);
    assert_eq!(world.supply("BOND-1").await, "3");
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r098_units_without_a_nominal_are_not_redeemed() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    world
        .register(|request| {
            request.nominal = None;
            request.matures_at = Some(prost_types::Timestamp {
                seconds: matures_at,
                nanos: 0,
            });
        })
        .await
        .expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    let refused = [
        start(&world, "sandbox.service", None)
            .await
            .expect_err("no nominal"),
        buy_back(&mut world, "1").await.expect_err("no nominal"),
    ];
    for status in refused {
        assert_eq!(
            (status.code(), status.message(), reason(&status).as_str()),
            (
                tonic::Code::FailedPrecondition,
                "Instrument has no nominal",
                "NOMINAL_MISSING"
            )
        );
    }
    // The sweep does not redeem the issue at maturity either.
    world.clock.advance_us(3_600_000_000);
    world.resume_operations().await;
    assert_untouched(&mut world, "2").await;
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r098_units_are_not_redeemed_without_payment() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world
        .register(|request| request.decimals = 18)
        .await
        .expect("registered");
    // At 1000 roubles per unit these units are worth less than half a kopeck.
    let dust = "0.000000000000000001";
    world.issue("BOND-1", "alice", dust).await;
    let refused = [
        start(&world, "sandbox.service", None)
            .await
            .expect_err("nothing to pay"),
        buy_back(&mut world, dust)
            .await
            .expect_err("nothing to pay"),
    ];
    for status in refused {
        assert_eq!(
            (status.code(), status.message(), reason(&status).as_str()),
            (
                tonic::Code::FailedPrecondition,
                "Redemption would burn units without payment",
                "NOTHING_TO_PAY"
            )
        );
    }
    assert_untouched(&mut world, dust).await;
    world.stop().await;
}
