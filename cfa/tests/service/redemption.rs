//! Part E of the checklist: redemption of an issue at its maturity and by call, its record date.

use prost::Message;
use proto::audit::v1 as audit;
use proto::cfa::v1 as pb;

use crate::world::*;

pub async fn redemption(world: &mut World) -> pb::IssueRedemption {
    let request = pb::GetRedemptionRequest {
        context: None,
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    world
        .cfa
        .get_redemption(request)
        .await
        .expect("found")
        .into_inner()
        .redemption
        .expect("redemption")
}

// rows: R097 R100 R101 R102 R103 R104
#[tokio::test(flavor = "multi_thread")]
async fn r097_maturity_pays_every_holder_and_ends_the_issue() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
    world
        .register(|request| {
            request.matures_at = at(matures_at);
            request.coupons = vec![pb::Coupon {
                pays_at: at(matures_at),
                amount: decimal("35.505"),
            }];
        })
        .await
        .expect("registered");
    for (investor, units) in [("alice", "1"), ("bob", "3")] {
        world.issue("BOND-1", investor, units).await;
    }
    world.resume_operations().await;
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Active,
        "not yet"
    );
    world.clock.advance_us(3_600_000_000);
    world.resume_operations().await;
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Matured
    );
    let waiting = redemption(&mut world).await;
    assert_eq!(
        waiting.status(),
        pb::RedemptionStatus::Underfunded,
        "no money, no distribution"
    );
    let payments: Vec<_> = waiting
        .payments
        .iter()
        .map(|payment| (payment.user_id.clone(), payment.amount.clone()))
        .collect();
    assert!(
        payments.contains(&("alice".into(), amount("CFA-RUB", "1035.51")))
            && payments.contains(&("bob".into(), amount("CFA-RUB", "3106.52")))
    );
    assert_eq!(waiting.total, amount("CFA-RUB", "4142.03"));
    assert_eq!(world.supply("BOND-1").await, "4");
    world.resume_operations().await;
    for holder in ["alice", "bob", "system:redemption"] {
        assert_eq!(world.tokens("CFA-RUB", holder).await, 0);
    }
    world.deposit("issuer", "5000.00").await;
    let supply = world.supply("CFA-RUB").await;
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    assert!(done.finalized_at.is_some());
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Redeemed
    );
    assert_eq!(
        (
            world.supply("BOND-1").await.as_str(),
            world.supply("CFA-RUB").await
        ),
        ("0", supply)
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "alice").await,
            world.tokens("CFA-RUB", "bob").await
        ),
        (1_035_51, 3_106_52)
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "issuer").await,
            world.tokens("CFA-RUB", "system:redemption").await
        ),
        (857_97, 0)
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "1035.51"
    );
    assert_eq!(
        world.balance("bob:CFA-RUB").await.available.to_string(),
        "3106.52"
    );
    assert_eq!(
        world.balance("issuer:CFA-RUB").await.balance.to_string(),
        "857.97"
    );
    assert_eq!(
        world
            .balance("system:redemption:CFA-RUB")
            .await
            .balance
            .to_string(),
        "0.00"
    );
    assert_eq!(world.balance("bob:BOND-1").await.balance.to_string(), "0");
    assert_eq!(
        world
            .balance("system:reserve:BOND-1")
            .await
            .balance
            .to_string(),
        "0"
    );
    assert_eq!(world.holders("BOND-1").await, []);
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "InstrumentUpdatedEvent"
                && event.correlation_id == done.redemption_id
        })
        .await;
    let told: Vec<_> = seen
        .iter()
        .filter(|event| event.short_type() == "HolderNotificationEvent")
        .map(|event| {
            pb::HolderNotificationEvent::decode(event.payload.as_slice()).expect("decodes")
        })
        .collect();
    assert_eq!(told.len(), 2);
    assert!(
        told.iter().all(|event| event.channels == ["push", "email"]
            && event.redemption_id == done.redemption_id)
    );
    assert_eq!(
        seen.iter()
            .filter(|event| event.short_type() == "CfaRedeemedEvent")
            .count(),
        2
    );
    assert_alert(&world, &done.redemption_id).await;
    // Another sweep and another call change nothing.
    world.resume_operations().await;
    assert_eq!(redemption(&mut world).await, done);
    let closed = world
        .cfa
        .issue_investment_cfa(issue_request("BOND-1", "alice", "1", None))
        .await
        .expect_err("closed");
    assert_eq!(reason(&closed), "INSTRUMENT_NOT_ACTIVE");
    world.stop().await;
}

// rows: R097
#[tokio::test(flavor = "multi_thread")]
async fn r097_the_timer_redeems_an_issue_at_its_maturity_and_no_other() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = Settings {
        sweep_interval_ms: Some(10),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    let now = world.clock.now_us() / 1_000_000;
    for (symbol, hours) in [("BOND-1", 1), ("BOND-2", 2)] {
        let register = world.register(|request| {
            request.symbol = symbol.into();
            request.matures_at = Some(prost_types::Timestamp {
                seconds: now + hours * 3_600,
                nanos: 0,
            });
        });
        register.await.expect("registered");
        world.issue(symbol, "alice", "2").await;
    }
    world.deposit("issuer", "4000.00").await;
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Active,
        "not before its maturity"
    );
    world.clock.advance_us(3_600_000_000);
    let redeemed = async || {
        let request = pb::GetInstrumentRequest {
            context: None,
            instrument_id: "BOND-1".into(),
        };
        let mut cfa = world.cfa.clone();
        let answer = cfa.get_instrument(request).await.expect("found");
        let bond = answer.into_inner().instrument.expect("instrument");
        (bond.status() == pb::InstrumentStatus::Redeemed).then_some(())
    };
    testkit::eventually(redeemed).await;
    assert_eq!(
        redemption(&mut world).await.reason(),
        pb::RedemptionReason::Maturity
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    assert_eq!(
        world.instrument("BOND-2").await.status(),
        pb::InstrumentStatus::Active
    );
    world.stop().await;
}

/// One audit record reports that the issuer lacked the money, although several sweeps found it
/// (R101).
async fn assert_alert(world: &World, redemption_id: &str) {
    let decoded = |event: &events::Event| {
        audit::AuditRecordEvent::decode(event.payload.as_slice()).expect("decodes")
    };
    let seen = world
        .events_until(events::topics::AUDIT, |event| {
            decoded(event).action == "redemption.finalized"
        })
        .await;
    let records: Vec<_> = seen
        .iter()
        .filter(|event| event.correlation_id == redemption_id)
        .map(decoded)
        .collect();
    let actions: Vec<_> = records
        .iter()
        .map(|record| record.action.as_str())
        .collect();
    assert_eq!(actions, ["redemption.underfunded", "redemption.finalized"]);
    let alert = &records[0];
    assert_eq!(
        (alert.object_id.as_str(), alert.actor.as_str()),
        ("BOND-1", "issuer")
    );
    assert_eq!(
        (alert.before.as_str(), alert.after.as_str()),
        ("SNAPSHOT", "UNDERFUNDED")
    );
}

// rows: R098 R093
#[tokio::test(flavor = "multi_thread")]
async fn r098_buyback_of_the_whole_issue_by_call() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let start = |key: &str| pb::StartRedemptionRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let done = world
        .cfa
        .start_redemption(start("k-1"))
        .await
        .expect("started")
        .into_inner()
        .redemption
        .expect("redemption");
    assert_eq!(
        (done.status(), done.reason()),
        (
            pb::RedemptionStatus::Finalized,
            pb::RedemptionReason::Buyback
        )
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "2000.00"
    );
    assert_eq!(world.supply("BOND-1").await, "0");
    let again = world
        .cfa
        .start_redemption(start("k-1"))
        .await
        .expect("answered")
        .into_inner()
        .redemption
        .expect("redemption");
    assert_eq!(again.redemption_id, done.redemption_id);
    let other = world
        .cfa
        .start_redemption(start("k-2"))
        .await
        .expect_err("one redemption per issue");
    assert_eq!(other.code(), tonic::Code::AlreadyExists);
    world.stop().await;
}

/// Starts the redemption of BOND-1 as the caller.
pub async fn start(
    world: &World,
    credential: &str,
    record_date_s: Option<i64>,
) -> Result<pb::IssueRedemption, tonic::Status> {
    let request = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: record_date_s.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let mut client = world.as_caller(credential);
    let answer = client.start_redemption(request).await?;
    Ok(answer.into_inner().redemption.expect("redemption"))
}

/// The issue still trades and its holder still has the units.
pub async fn assert_untouched(world: &mut World, units: &str) {
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Active
    );
    assert_eq!(world.supply("BOND-1").await, units);
    assert_eq!(
        world.balance("alice:BOND-1").await.available.to_string(),
        units
    );
}

// rows: R098 R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_record_date_is_the_day_of_maturity_or_today() {
    const DAY: i64 = 24 * 3_600;
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let now = world.clock.now_us() / 1_000_000;
    let matures_at = now + 10 * DAY;
    world
        .register(|request| {
            request.matures_at = Some(prost_types::Timestamp {
                seconds: matures_at,
                nanos: 0,
            });
        })
        .await
        .expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    // 2000-01-01 is before the first holder.
    for date in [946_684_800, now - DAY, now + DAY, matures_at] {
        let refused = start(&world, "sandbox.service", Some(date))
            .await
            .expect_err("another day");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{date}");
        assert!(
            refused.message().contains("must be the current day"),
            "{refused}"
        );
        assert_untouched(&mut world, "2").await;
    }
    // Before maturity neither the issuer nor one operator may call it.
    for (credential, why) in [
        ("sandbox.issuer.issuer", "NOT_MATURED"),
        ("sandbox.operator", "APPROVAL_REQUIRED"),
    ] {
        for date in [None, Some(now)] {
            let refused = start(&world, credential, date).await;
            let refused = refused.expect_err("too early");
            assert_eq!(
                (refused.code(), reason(&refused).as_str()),
                (tonic::Code::FailedPrecondition, why)
            );
            assert_untouched(&mut world, "2").await;
        }
    }
    world.clock.advance_us(12 * DAY * 1_000_000);
    for date in [now, now + 12 * DAY] {
        let refused = start(&world, "sandbox.operator", Some(date))
            .await
            .expect_err("another day");
        assert!(
            refused.message().contains("must be the day of maturity"),
            "{refused}"
        );
        assert_untouched(&mut world, "2").await;
    }
    world.deposit("issuer", "2000.00").await;
    let done = start(&world, "sandbox.issuer.issuer", Some(matures_at))
        .await
        .expect("started");
    assert_eq!(
        (done.status(), done.total),
        (
            pb::RedemptionStatus::Finalized,
            amount("CFA-RUB", "2000.00")
        )
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "2000.00"
    );
    world.stop().await;
}
