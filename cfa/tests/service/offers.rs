//! A redemption before maturity needs the holder's own offer (D46).

use prost::Message;
use proto::audit::v1 as audit;
use proto::cfa::v1 as pb;
use proto::common::v1::{KycStatus, OperationStatus, PaginationRequest, RejectionReasonCode};
use proto::identity::v1::UserStatus;
use proto::ledger::v1 as ledger;
use tonic::Code;

use crate::redeem::hold;
use crate::world::*;

use pb::OfferStatus::{Active, Cancelled, Expired, Used};

/// Alice has five units of BOND-1, and the issuer has 5000.00.
async fn with_units(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "5").await;
    world.deposit("issuer", "5000.00").await;
    world
}

/// Alice's offer to sell a bond for one rouble.
fn offer() -> pb::OfferUnitsRequest {
    pb::OfferUnitsRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        payment: amount("CFA-RUB", "1.00"),
        expires_at: None,
    }
}

fn redemption(units: &str) -> pb::RedeemInvestmentCfaRequest {
    pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", units),
        redemption_id: String::new(),
        reason: pb::RedemptionReason::Buyback.into(),
    }
}

async fn buy_back(world: &mut World, units: &str) -> Result<pb::CfaOperation, tonic::Status> {
    let answer = world.cfa.redeem_investment_cfa(redemption(units)).await?;
    Ok(answer.into_inner().operation.expect("operation"))
}

/// Balance and available units of Alice.
async fn units(world: &mut World) -> (String, String) {
    let balance = world.balance("alice:BOND-1").await;
    (balance.balance.to_string(), balance.available.to_string())
}

fn pair(balance: &str, available: &str) -> (String, String) {
    (balance.to_owned(), available.to_owned())
}

async fn list(
    world: &World,
    credential: &str,
    holder_id: &str,
    instrument_id: &str,
) -> Result<Vec<pb::Offer>, tonic::Status> {
    let request = pb::ListOffersRequest {
        holder_id: holder_id.into(),
        instrument_id: instrument_id.into(),
        pagination: Some(PaginationRequest {
            page_size: 1_000,
            ..Default::default()
        }),
        ..Default::default()
    };
    let listed = world.as_caller(credential).list_offers(request).await?;
    Ok(listed.into_inner().offers)
}

/// The offer as it is now.
async fn current(world: &World, offer: &pb::Offer) -> pb::Offer {
    let listed = list(world, "sandbox.operator", &offer.holder_id, "").await;
    let mut found = listed.expect("listed").into_iter();
    let found = found.find(|one| one.offer_id == offer.offer_id);
    found.expect("listed")
}

async fn status_of(world: &World, offer: &pb::Offer) -> pb::OfferStatus {
    current(world, offer).await.status()
}

/// The audit records up to the first with this action.
async fn audit_until(world: &World, last: &str) -> Vec<audit::AuditRecordEvent> {
    let decoded = |event: &events::Event| {
        audit::AuditRecordEvent::decode(event.payload.as_slice()).expect("decodes")
    };
    let seen = world.events_until(events::topics::AUDIT, |event| decoded(event).action == last);
    seen.await.iter().map(decoded).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_no_issuer_takes_units_without_the_holders_own_offer() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    for (credential, expected) in [
        ("sandbox.issuer.issuer", "NOT_OFFERED"),
        // It is the issuer who pays.
        ("sandbox.operator", "APPROVAL_REQUIRED"),
        ("sandbox.service", "NOT_OFFERED"),
    ] {
        let mut caller = world.as_caller(credential);
        let refused = caller.redeem_investment_cfa(redemption("1")).await;
        let refused = refused.expect_err(credential);
        assert_eq!(
            (refused.code(), reason(&refused).as_str()),
            (Code::FailedPrecondition, expected)
        );
        // Neither can any of them offer for the holder.
        let refused = caller.offer_units(offer()).await.expect_err(credential);
        assert_eq!(refused.code(), Code::PermissionDenied, "{credential}");
    }
    assert_eq!(units(&mut world).await, pair("5", "5"));

    let offered = world.offer("BOND-1", "alice", "3", "3000.00").await;
    let offered = offered.expect("offered");
    assert_eq!(offered.status(), Active);
    assert_eq!(units(&mut world).await, pair("5", "2"));
    // One unit is offered above the nominal.
    let dear = world.offer("BOND-1", "alice", "1", "1000.01").await;
    let dear = dear.expect("offered");
    for other in ["1", "2", "4"] {
        let refused = buy_back(&mut world, other).await.expect_err("differs");
        assert_eq!(reason(&refused), "NOT_OFFERED", "{other}");
    }
    let bought = buy_back(&mut world, "3").await.expect("bought");
    assert_eq!(bought.hold_id.as_ref(), Some(&offered.hold_id));
    let bought = world.settle(&bought).await;
    assert_eq!(bought.status(), OperationStatus::Finalized);
    assert_eq!(units(&mut world).await, pair("2", "1"));
    let money = world.balance("alice:CFA-RUB").await.available;
    assert_eq!(money.to_string(), "3000.00");
    let held = hold(&mut world, &offered.hold_id).await;
    assert_eq!(held.status(), ledger::HoldStatus::Consumed);
    // An offer is used once.
    let refused = buy_back(&mut world, "3").await.expect_err("used");
    assert_eq!(reason(&refused), "NOT_OFFERED");
    let used = current(&world, &offered).await;
    assert_eq!(
        (used.status(), used.operation_id),
        (Used, bought.operation_id)
    );
    let late = world.cancel_offer(&offered).await.expect_err("used");
    assert_eq!(reason(&late), "OPERATION_STATE");
    assert_eq!(status_of(&world, &dear).await, Active);
    let records = audit_until(&world, "redemption.finalized").await;
    for (action, actor) in [("offer.active", "alice"), ("offer.used", "service")] {
        let mut found = records.iter();
        let found = found.find(|one| one.action == action && one.object_id == offered.offer_id);
        assert_eq!(found.map(|one| one.actor.as_str()), Some(actor), "{action}");
    }
    world.stop().await;
}

/// The terms redeem units at maturity without an offer; a buyback still needs one.
#[tokio::test(flavor = "multi_thread")]
async fn d46_maturity_by_the_terms_needs_no_offer() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let seconds = world.clock.now_us() / 1_000_000 + 3_600;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp { seconds, nanos: 0 });
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "5").await;
    world.deposit("issuer", "5000.00").await;
    let mut matured = redemption("2");
    matured.reason = pb::RedemptionReason::Maturity.into();
    let early = world.cfa.redeem_investment_cfa(matured.clone()).await;
    assert_eq!(reason(&early.expect_err("early")), "NOT_MATURED");
    world.clock.advance_us(3_600_000_000);
    let refused = buy_back(&mut world, "2").await.expect_err("a buyback");
    assert_eq!(reason(&refused), "NOT_OFFERED");
    // A blocked holder is paid at maturity too.
    world
        .double
        .upsert_user("alice", |alice| alice.status = UserStatus::Blocked);
    let answer = world.cfa.redeem_investment_cfa(matured).await;
    let sent = answer.expect("sent").into_inner().operation;
    let done = world.settle(&sent.expect("operation")).await;
    assert_eq!(done.status(), OperationStatus::Finalized);
    assert_eq!(units(&mut world).await, pair("3", "3"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_two_redemptions_at_once_use_one_offer_once() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    offered.expect("offered");
    let calls = (0..8).map(|_| {
        let mut cfa = world.cfa.clone();
        tokio::spawn(async move { cfa.redeem_investment_cfa(redemption("1")).await })
    });
    let mut bought = Vec::new();
    for call in calls.collect::<Vec<_>>() {
        match call.await.expect("no panic") {
            Ok(answer) => bought.push(answer.into_inner().operation.expect("operation")),
            Err(refused) => assert_eq!(reason(&refused), "NOT_OFFERED"),
        }
    }
    assert_eq!(bought.len(), 1);
    world.settle(&bought[0]).await;
    assert_eq!(units(&mut world).await, pair("4", "4"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d50_a_repeated_redemption_uses_one_offer() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    for _ in 0..2 {
        let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
        offered.expect("offered");
    }
    let request = redemption("1");
    let first = world.cfa.redeem_investment_cfa(request.clone()).await;
    let first = first.expect("sent").into_inner().operation;
    let first = first.expect("operation");
    let again = world.cfa.redeem_investment_cfa(request).await;
    let again = again.expect("the stored answer");
    assert!(again.metadata().contains_key("idempotent-replayed"));
    let again = again.into_inner().operation.expect("operation");
    assert_eq!(again.operation_id, first.operation_id);
    world.settle(&first).await;
    assert_eq!(units(&mut world).await, pair("4", "3"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_a_cancelled_offer_and_a_redemption_at_once_exclude_each_other() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let mut left = 5;
    for _ in 0..5 {
        let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
        let offered = offered.expect("offered");
        let mut cfa = world.cfa.clone();
        let bought = async move { cfa.redeem_investment_cfa(redemption("1")).await };
        let bought = tokio::spawn(bought);
        let cancelled = world.cancel_offer(&offered).await;
        match bought.await.expect("no panic") {
            Ok(bought) => {
                assert_eq!(reason(&cancelled.expect_err("used")), "OPERATION_STATE");
                let bought = bought.into_inner().operation.expect("operation");
                world.settle(&bought).await;
                left -= 1;
            }
            Err(refused) => {
                assert_eq!(reason(&refused), "NOT_OFFERED");
                assert_eq!(cancelled.expect("cancelled").status(), Cancelled);
            }
        }
        let left = left.to_string();
        assert_eq!(units(&mut world).await, pair(&left, &left));
    }
    world.stop().await;
}

/// An offer, a transfer and the hold of an order compete for the same units: one wins.
#[tokio::test(flavor = "multi_thread")]
async fn d46_units_are_offered_transferred_or_held_for_an_order_once() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    for _ in 0..5 {
        world.issue("BOND-1", "alice", "2").await;
        let transfer = pb::TransferCfaRequest {
            context: context(&key()),
            instrument_id: "BOND-1".into(),
            from_user_id: "alice".into(),
            to_user_id: "bob".into(),
            amount: amount("BOND-1", "2"),
            ..Default::default()
        };
        let order = ledger::CreateHoldRequest {
            context: context(&key()),
            hold: Some(ledger::Hold {
                subaccount_id: "alice:BOND-1".into(),
                amount: amount("BOND-1", "2"),
                owner: "market".into(),
                ..Default::default()
            }),
        };
        let mut market = world.ledger.clone();
        let (offered, moved, held) = tokio::join!(
            world.offer("BOND-1", "alice", "2", "1.00"),
            world.transfer(transfer.clone()),
            market.create_hold(order),
        );
        let wins = [offered.is_ok(), moved.is_ok(), held.is_ok()];
        assert_eq!(wins.into_iter().filter(|won| *won).count(), 1, "{wins:?}");
        if let Ok(moved) = moved {
            world.settle(&moved).await;
            assert_eq!(units(&mut world).await, pair("0", "0"));
            continue;
        }
        assert_eq!(units(&mut world).await, pair("2", "0"));
        if let Ok(offered) = offered {
            world.cancel_offer(&offered).await.expect("cancelled");
        }
        if let Ok(held) = held {
            let hold_id = held.into_inner().hold.expect("hold").hold_id;
            let release = ledger::ReleaseHoldRequest {
                context: context(&key()),
                hold_id,
                reason: "test".into(),
            };
            world.ledger.release_hold(release).await.expect("released");
        }
        let transfer = pb::TransferCfaRequest {
            context: context(&key()),
            ..transfer
        };
        let moved = world.transfer(transfer).await.expect("moved");
        world.settle(&moved).await;
    }
    assert_eq!(world.tokens("BOND-1", "bob").await, 10);
    world.stop().await;
}

/// The redemption of the whole issue ends the offers first, so each holder is paid at once.
#[tokio::test(flavor = "multi_thread")]
async fn d46_the_redemption_of_an_issue_ends_its_offers() {
    for by_sweep in [false, true] {
        let folder = tempfile::tempdir().expect("folder");
        let mut world = World::start(folder.path()).await;
        let seconds = world.clock.now_us() / 1_000_000 + 3_600;
        let register = world.register(|request| {
            request.matures_at = Some(prost_types::Timestamp { seconds, nanos: 0 });
        });
        register.await.expect("registered");
        world.issue("BOND-1", "alice", "5").await;
        world.issue("BOND-1", "bob", "3").await;
        world.deposit("issuer", "8000.00").await;
        let mut offers = Vec::new();
        for (holder, units) in [("alice", "2"), ("alice", "1"), ("bob", "3")] {
            let offered = world.offer("BOND-1", holder, units, "1.00").await;
            offers.push(offered.expect("offered"));
        }
        if by_sweep {
            world.clock.advance_us(3_600_000_000);
            world.resume_operations().await;
        } else {
            world.redeem_issue().await.expect("started");
        }
        assert_eq!(
            world.instrument("BOND-1").await.status(),
            pb::InstrumentStatus::Redeemed
        );
        for offered in &offers {
            assert_eq!(status_of(&world, offered).await, Cancelled);
            let held = hold(&mut world, &offered.hold_id).await;
            assert_eq!(held.status(), ledger::HoldStatus::Released);
        }
        assert_eq!(units(&mut world).await, pair("0", "0"));
        let money = world.balance("bob:CFA-RUB").await.available;
        assert_eq!(money.to_string(), "3000.00");
        world.resume_operations().await;
        assert!(world.service.health.failing().is_empty());
        let late = world.offer("BOND-1", "alice", "1", "1.00").await;
        assert_eq!(
            reason(&late.expect_err("redeemed")),
            "INSTRUMENT_NOT_ACTIVE"
        );
        world.stop().await;
    }
}

/// A crash after trading has stopped and before the offers have ended, and one between an end and
/// its release.
#[tokio::test(flavor = "multi_thread")]
async fn d46_a_redemption_continues_to_end_offers_after_a_crash() {
    let folder = tempfile::tempdir().expect("folder");
    let world = with_units(folder.path()).await;
    let mut offers = Vec::new();
    for units in ["1", "2"] {
        let offered = world.offer("BOND-1", "alice", units, "1.00").await;
        offers.push(offered.expect("offered"));
    }
    world.stop().await;
    for statement in [
        "UPDATE instrument SET status = 4 WHERE instrument_id = 'BOND-1'",
        "UPDATE offer SET status = 4, step = 1 WHERE units_minor = 2",
    ] {
        alter_store(folder.path(), statement).await;
    }
    let mut world = World::start(folder.path()).await;
    let started = world.redeem_issue().await.expect("started");
    assert_eq!(started.status(), pb::RedemptionStatus::Finalized);
    for offered in &offers {
        assert_eq!(status_of(&world, offered).await, Cancelled);
    }
    assert_eq!(units(&mut world).await, pair("0", "0"));
    world.stop().await;
}

/// While the ledger does not answer, the redemption is not recorded. A repeat continues.
#[tokio::test(flavor = "multi_thread")]
async fn d46_lost_calls_delay_the_redemption_of_an_issue_with_offers() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "100").await;
    world.deposit("issuer", "100000.00").await;
    // A call is repeated twice, so one of eight releases fails.
    for _ in 0..100 {
        let offered = world.offer("BOND-1", "alice", "1", "1.00").await;
        offered.expect("offered");
    }
    world.faults.start(46);
    let mut lost = 0;
    while let Err(refused) = world.redeem_issue().await {
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        let status = world.instrument("BOND-1").await.status();
        assert_eq!(status, pb::InstrumentStatus::Matured);
        lost += 1;
        assert!(lost < 1_000);
    }
    assert!(lost > 0);
    world.faults.stop();
    world.resume_operations().await;
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Redeemed);
    let listed = list(&world, "sandbox.investor.alice", "alice", "").await;
    for one in listed.expect("listed") {
        assert_eq!(one.status(), Cancelled);
        let held = hold(&mut world, &one.hold_id).await;
        assert_eq!(held.status(), ledger::HoldStatus::Released);
    }
    assert_eq!(units(&mut world).await, pair("0", "0"));
    world.resume_operations().await;
    assert!(world.service.health.failing().is_empty());
    world.stop().await;
}

/// A crash between a step and its record.
#[tokio::test(flavor = "multi_thread")]
async fn d46_an_offer_continues_after_a_crash_at_each_step() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    let offered = offered.expect("offered");
    for (crashed, expected, available) in [
        // The units are held; the hold is not recorded.
        (
            "UPDATE offer SET status = 1, step = 1 WHERE offer_id = $1",
            Active,
            "4",
        ),
        // The offer is cancelled; its units are not released.
        (
            "UPDATE offer SET status = 4, step = 1 WHERE offer_id = $1",
            Cancelled,
            "5",
        ),
        // The units are released; the release is not recorded.
        (
            "UPDATE offer SET status = 4, step = 1 WHERE offer_id = $1",
            Cancelled,
            "5",
        ),
    ] {
        world.stop().await;
        alter_store_by(folder.path(), crashed, &[&offered.offer_id]).await;
        world = World::start(folder.path()).await;
        world.resume_operations().await;
        assert_eq!(status_of(&world, &offered).await, expected, "{crashed}");
        assert_eq!(units(&mut world).await.1, available, "{crashed}");
    }
    world.stop().await;
}

/// The ledger refused the hold of an offer of one unit, and the process ended while the hold that
/// invalidates its id was active. It is not taken for the offer's hold.
#[tokio::test(flavor = "multi_thread")]
async fn d46_a_void_hold_of_one_unit_is_not_that_of_the_offer() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let void = ledger::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger::Hold {
            hold_id: types::derived::offer_hold("o-1").to_string(),
            subaccount_id: "alice:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            owner: "cfa".into(),
            reason: "Offer has ended".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(void).await.expect("held");
    world.stop().await;
    let pending = "INSERT INTO offer (offer_id, side, instrument_id, user_id, units_minor, \
        payment_minor, status, step, idempotency_key, correlation_id, expires_at_us, \
        created_at_us, updated_at_us)
        VALUES ($1, 2, 'BOND-1', 'alice', 1, 100000, 1, 1, $1, 'c', 3786912000000000, 1, 1)";
    alter_store_by(folder.path(), pending, &["o-1"]).await;
    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    let left = list(&world, "sandbox.investor.alice", "alice", "").await;
    assert!(left.expect("listed").is_empty());
    assert_eq!(units(&mut world).await, pair("5", "5"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_an_expired_offer_is_not_used_and_returns_its_units() {
    let folder = tempfile::tempdir().expect("folder");
    let world = with_units(folder.path()).await;
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    let offered = offered.expect("offered");
    world.stop().await;
    let past = "UPDATE offer SET expires_at_us = 1 WHERE offer_id = $1";
    alter_store_by(folder.path(), past, &[&offered.offer_id]).await;
    let mut world = World::start(folder.path()).await;
    let refused = buy_back(&mut world, "1").await.expect_err("expired");
    assert_eq!(reason(&refused), "NOT_OFFERED");
    world.resume_operations().await;
    assert_eq!(status_of(&world, &offered).await, Expired);
    assert_eq!(units(&mut world).await, pair("5", "5"));
    world.stop().await;
}

/// A redemption that is refused before units move leaves the offer active.
#[tokio::test(flavor = "multi_thread")]
async fn d46_a_refused_redemption_keeps_the_offer() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "5").await;
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    let offered = offered.expect("offered");
    // The issuer has no money.
    let refused = buy_back(&mut world, "1").await.expect_err("no money");
    assert_eq!(refused.message(), "Insufficient balance");
    assert_eq!(status_of(&world, &offered).await, Active);
    world.deposit("issuer", "5000.00").await;
    // Frozen units stay with their holder, also if offered before.
    world.freeze("alice:BOND-1", true).await;
    let refused = buy_back(&mut world, "1").await.expect_err("frozen");
    assert_eq!(reason(&refused), "SUB_ACCOUNT_FROZEN");
    world.freeze("alice:BOND-1", false).await;
    // Identity refuses the holder.
    let double = world.double.clone();
    let refused_as = async |world: &mut World, expected: RejectionReasonCode| {
        let rejected = buy_back(world, "1").await.expect("recorded");
        assert_eq!(
            (rejected.status(), rejected.rejection_reason()),
            (OperationStatus::Rejected, expected)
        );
        rejected.operation_id
    };
    double.upsert_user("alice", |alice| alice.is_sanctioned = true);
    let sanctioned = refused_as(&mut world, RejectionReasonCode::SanctionsHit).await;
    double.upsert_user("alice", |alice| alice.is_sanctioned = false);
    double.upsert_user("alice", |alice| alice.kyc = KycStatus::Simplified);
    refused_as(&mut world, RejectionReasonCode::KycRequired).await;
    double.upsert_user("alice", |alice| alice.kyc = KycStatus::Standard);
    assert_eq!(status_of(&world, &offered).await, Active);
    assert_eq!(units(&mut world).await, pair("5", "4"));
    let records = audit_until(&world, "redemption.rejected").await;
    let rejected = records.last().expect("the last one");
    assert_eq!(
        (rejected.object_id.as_str(), rejected.after.as_str()),
        (sanctioned.as_str(), "REJECTED")
    );
    let bought = buy_back(&mut world, "1").await.expect("bought");
    world.settle(&bought).await;
    assert_eq!(status_of(&world, &offered).await, Used);
    assert_eq!(units(&mut world).await, pair("4", "4"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d34_a_rejected_transfer_has_an_audit_record() {
    let folder = tempfile::tempdir().expect("folder");
    let world = with_units(folder.path()).await;
    world
        .double
        .upsert_user("alice", |alice| alice.is_sanctioned = true);
    let transfer = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "alice".into(),
        to_user_id: "bob".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let rejected = world.transfer(transfer).await.expect("recorded");
    assert_eq!(rejected.status(), OperationStatus::Rejected);
    let records = audit_until(&world, "transfer.rejected").await;
    let record = records.last().expect("the last one");
    assert_eq!(
        (record.object_id.as_str(), record.actor.as_str()),
        (rejected.operation_id.as_str(), "alice")
    );
    world.stop().await;
}

/// After lost calls and answers, the held units are those of the active offers.
#[tokio::test(flavor = "multi_thread")]
async fn d46_lost_calls_leave_no_units_held() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "100").await;
    world.faults.start(46);
    for turn in 0..40 {
        // A lost call is answered UNAVAILABLE; the sweep completes it.
        let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
        if let (Ok(offered), true) = (offered, turn % 2 == 0) {
            let _ = world.cancel_offer(&offered).await;
        }
    }
    let (calls, answers) = world.faults.lost();
    assert!(calls > 5 && answers > 5);
    world.faults.stop();
    for _ in 0..3 {
        world.resume_operations().await;
    }
    let listed = list(&world, "sandbox.investor.alice", "alice", "").await;
    let listed = listed.expect("listed");
    let count = |status| listed.iter().filter(|one| one.status() == status).count();
    assert_eq!(count(pb::OfferStatus::Pending), 0);
    let available = (100 - count(Active)).to_string();
    assert_eq!(units(&mut world).await, pair("100", &available));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_offers_are_bounded_checked_and_shown_to_their_parties() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "200").await;
    type Change = fn(&mut pb::OfferUnitsRequest);
    let bad: [(Change, Code); 6] = [
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
                let seconds = 946_684_800;
                ask.expires_at = Some(prost_types::Timestamp { seconds, nanos: 0 });
            },
            Code::InvalidArgument,
        ),
        (
            |ask| ask.amount = amount("BOND-1", "201"),
            Code::FailedPrecondition,
        ),
    ];
    let mut alice = world.as_caller("sandbox.investor.alice");
    for (change, code) in bad {
        let mut ask = offer();
        change(&mut ask);
        let refused = alice.offer_units(ask.clone()).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{ask:?}: {refused}");
    }
    let mut issuer = world.as_caller("sandbox.issuer.issuer");
    let mut own = offer();
    own.holder_id = "issuer".into();
    let own = issuer.offer_units(own).await.expect_err("the issuer");
    assert_eq!(own.code(), Code::InvalidArgument);
    assert_eq!(units(&mut world).await, pair("200", "200"));
    // A repeat makes no second offer. The key of a subscription is another one.
    let ask = offer();
    let first = alice.offer_units(ask.clone()).await.expect("offered");
    let again = alice
        .offer_units(ask.clone())
        .await
        .expect("the stored one");
    assert!(again.metadata().contains_key("idempotent-replayed"));
    let first = first.into_inner().offer.expect("offer");
    assert_eq!(again.into_inner().offer.as_ref(), Some(&first));
    let buy = pb::SubscribeRequest {
        context: ask.context,
        instrument_id: "BOND-1".into(),
        investor_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        payment: amount("CFA-RUB", "1.00"),
        expires_at: None,
    };
    let poor = alice.subscribe(buy).await.expect_err("no money");
    assert_eq!(poor.message(), "Insufficient balance");
    // Each call finds only its own kind.
    let cancel = pb::CancelSubscriptionRequest {
        context: context(&key()),
        subscription_id: first.offer_id.clone(),
    };
    let other = alice.cancel_subscription(cancel).await;
    assert_eq!(
        reason(&other.expect_err("an offer")),
        "SUBSCRIPTION_NOT_FOUND"
    );
    for _ in 1..100 {
        alice.offer_units(offer()).await.expect("offered");
    }
    let many = alice.offer_units(offer()).await.expect_err("too many");
    assert_eq!(reason(&many), "TOO_MANY_OFFERS");
    assert_eq!(units(&mut world).await, pair("200", "100"));

    for (credential, holder, instrument) in [
        ("sandbox.investor.alice", "alice", "BOND-1"),
        ("sandbox.issuer.issuer", "", "BOND-1"),
        ("sandbox.operator", "alice", ""),
    ] {
        let listed = list(&world, credential, holder, instrument).await;
        assert_eq!(listed.expect("listed").len(), 100, "{credential}");
    }
    for (credential, holder, instrument, code) in [
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
        let refused = list(&world, credential, holder, instrument).await;
        assert_eq!(refused.expect_err(credential).code(), code, "{credential}");
    }
    let foreign = pb::CancelOfferRequest {
        context: context(&key()),
        offer_id: first.offer_id,
    };
    let mut bob = world.as_caller("sandbox.investor.bob");
    let foreign = bob.cancel_offer(foreign).await.expect_err("foreign");
    assert_eq!(foreign.code(), Code::PermissionDenied);
    world.stop().await;
}
