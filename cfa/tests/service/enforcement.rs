//! Enforcement acts: freezes and forced transfers that a document orders (F29, F30, D47).

use prost::Message;
use proto::cfa::v1 as pb;
use proto::common::v1::{KycStatus, OperationStatus};
use proto::identity::v1::UserStatus;

use crate::node::{NO_COINS, gated_world};
use crate::world::*;

use pb::EnforcementStatus::{Active, Done, Failed, Lifted, Used};

const DOCUMENT: &str = "Decision 2-17/2026 of 2026-11-20";

/// Alice has ten units of BOND-1.
async fn with_units(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    issue_units(&mut world).await;
    world
}

async fn issue_units(world: &mut World) {
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "10").await;
}

fn freezing(units: Option<&str>) -> pb::FreezeUnitsRequest {
    pb::FreezeUnitsRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: units.and_then(|units| amount("BOND-1", units)),
        basis: pb::EnforcementBasis::Court.into(),
        document: DOCUMENT.into(),
    }
}

async fn freeze(world: &World, units: Option<&str>) -> Result<pb::EnforcementAct, tonic::Status> {
    let mut anna = world.as_caller("sandbox.compliance.anna");
    let answer = anna.freeze_units(freezing(units)).await?;
    Ok(answer.into_inner().act.expect("act"))
}

async fn lift(world: &mut World, act_id: &str) -> Result<pb::EnforcementAct, tonic::Status> {
    let request = pb::LiftFreezeRequest {
        context: context(&key()),
        act_id: act_id.into(),
        document: "Decision 2-18/2026".into(),
    };
    let answer = world.cfa.lift_freeze(request).await?;
    Ok(answer.into_inner().act.expect("act"))
}

fn transferring(units: &str, freeze_id: &str) -> pb::ForceTransferRequest {
    pb::ForceTransferRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "alice".into(),
        to_user_id: "heir".into(),
        amount: amount("BOND-1", units),
        basis: pb::EnforcementBasis::Levy.into(),
        document: DOCUMENT.into(),
        freeze_id: freeze_id.into(),
    }
}

async fn force(
    world: &mut World,
    units: &str,
    freeze_id: &str,
) -> Result<pb::CfaOperation, tonic::Status> {
    let request = transferring(units, freeze_id);
    let answer = world.cfa.force_transfer(request).await?;
    let operation = answer.into_inner().operation.expect("operation");
    let operation = world.settle(&operation).await;
    assert_eq!(operation.status(), OperationStatus::Finalized);
    Ok(operation)
}

async fn transfer(world: &World, units: &str) -> Result<(), tonic::Status> {
    let request = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "alice".into(),
        to_user_id: "bob".into(),
        amount: amount("BOND-1", units),
        ..Default::default()
    };
    let mut alice = world.as_caller("sandbox.investor.alice");
    alice.transfer_cfa(request).await.map(drop)
}

/// Balance and available units of Alice.
async fn units(world: &mut World) -> (String, String) {
    let balance = world.balance("alice:BOND-1").await;
    (balance.balance.to_string(), balance.available.to_string())
}

fn pair(balance: &str, available: &str) -> (String, String) {
    (balance.to_owned(), available.to_owned())
}

async fn act(world: &mut World, act_id: &str) -> pb::EnforcementAct {
    let request = pb::ListEnforcementActsRequest {
        holder_id: "alice".into(),
        ..Default::default()
    };
    let listed = world.cfa.list_enforcement_acts(request).await;
    let acts = listed.expect("listed").into_inner().acts;
    let found = acts.into_iter().find(|act| act.act_id == act_id);
    found.expect("the act")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_is_frozen_by_one_person_and_released_by_two() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let frozen = freeze(&world, Some("4")).await.expect("frozen");
    assert_eq!(frozen.status(), Active);
    assert_eq!(frozen.document, DOCUMENT);
    assert_eq!(units(&mut world).await, pair("10", "6"));
    // Beyond the available units nothing is stored.
    let beyond = freeze(&world, Some("7")).await.expect_err("beyond");
    assert_eq!(reason(&beyond), "INSUFFICIENT_BALANCE");
    let refused = transfer(&world, "7").await.expect_err("frozen units");
    assert_eq!(reason(&refused), "INSUFFICIENT_BALANCE");

    let request = pb::LiftFreezeRequest {
        context: context(&key()),
        act_id: frozen.act_id.clone(),
        document: DOCUMENT.into(),
    };
    let mut anna = world.as_caller("sandbox.compliance.anna");
    let alone = anna.lift_freeze(request).await.expect_err("one person");
    assert_eq!(reason(&alone), "APPROVAL_REQUIRED");
    let lifted = lift(&mut world, &frozen.act_id).await.expect("lifted");
    assert_eq!(lifted.status(), Lifted);
    assert_eq!(lifted.lift_document, "Decision 2-18/2026");
    assert_eq!(units(&mut world).await, pair("10", "10"));
    let again = lift(&mut world, &frozen.act_id).await.expect_err("lifted");
    assert_eq!(reason(&again), "OPERATION_STATE");
    transfer(&world, "10").await.expect("free units");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f29_a_halt_stops_transfers_of_holders_but_no_forced_ones_and_buybacks() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    world.deposit("issuer", "1000.00").await;
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    offered.expect("offered");
    let halt = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        status: pb::InstrumentStatus::Halted.into(),
        ..Default::default()
    };
    world.cfa.update_instrument(halt).await.expect("halted");
    let refused = transfer(&world, "1").await.expect_err("halted");
    assert_eq!(reason(&refused), "INSTRUMENT_NOT_ACTIVE");
    assert_eq!(units(&mut world).await, pair("10", "9"));
    force(&mut world, "4", "").await.expect("transferred");
    let buy_back = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let bought = world.cfa.redeem_investment_cfa(buy_back).await;
    let bought = bought.expect("bought").into_inner().operation;
    let bought = world.settle(&bought.expect("operation")).await;
    assert_eq!(bought.status(), OperationStatus::Finalized);
    assert_eq!(units(&mut world).await, pair("5", "5"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_of_all_units_covers_later_ones_and_yields_to_a_forced_transfer() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let frozen = freeze(&world, None).await.expect("frozen");
    assert_eq!((frozen.status(), frozen.amount), (Active, None));
    let twice = freeze(&world, None).await.expect_err("frozen already");
    assert_eq!(reason(&twice), "ALREADY_FROZEN");
    let refused = transfer(&world, "1").await.expect_err("frozen");
    assert_eq!(reason(&refused), "SUB_ACCOUNT_FROZEN");
    let operation = force(&mut world, "3", "").await.expect("transferred");
    assert_eq!(
        act(&mut world, &operation.operation_id).await.status(),
        Done
    );
    assert_eq!(units(&mut world).await, pair("7", "7"));
    assert_eq!(world.tokens("BOND-1", "heir").await, 3);
    lift(&mut world, &frozen.act_id).await.expect("lifted");
    transfer(&world, "7").await.expect("free units");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_transfer_takes_no_hold_of_the_holder() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let offer = world.offer("BOND-1", "alice", "4", "4000.00").await;
    offer.expect("offered");
    let beyond = force(&mut world, "7", "").await.expect_err("beyond");
    assert_eq!(reason(&beyond), "INSUFFICIENT_BALANCE");
    let request = transferring("6", "");
    let mut anna = world.as_caller("sandbox.compliance.anna");
    let alone = anna.force_transfer(request.clone()).await;
    assert_eq!(reason(&alone.expect_err("one person")), "APPROVAL_REQUIRED");
    let first = world.cfa.force_transfer(request.clone()).await;
    let first = first.expect("transferred").into_inner().operation;
    let first = world.settle(&first.expect("operation")).await;
    // A repeat transfers nothing.
    let again = world.cfa.force_transfer(request).await.expect("stored");
    let again = again.into_inner().operation.expect("operation");
    assert_eq!(again.operation_id, first.operation_id);
    assert_eq!(units(&mut world).await, pair("4", "0"));
    assert_eq!(world.tokens("BOND-1", "alice").await, 4);
    assert_eq!(world.tokens("BOND-1", "heir").await, 6);
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.type_name == "dfa.cfa.v1.EnforcementActEvent"
        })
        .await;
    let payload = seen.last().expect("event").payload.as_slice();
    let event = pb::EnforcementActEvent::decode(payload).expect("decodes");
    assert_eq!(
        (event.status.as_str(), event.document.as_str()),
        ("DONE", DOCUMENT)
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_levy_takes_units_of_an_arrest_and_the_rest_stays_frozen() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let arrest = freeze(&world, Some("6")).await.expect("frozen");
    let id = arrest.act_id.as_str();
    force(&mut world, "4", id).await.expect("transferred");
    assert_eq!(units(&mut world).await, pair("6", "4"));
    let left = act(&mut world, id).await;
    assert_eq!((left.status(), left.left), (Active, amount("BOND-1", "2")));
    let beyond = force(&mut world, "3", id).await.expect_err("beyond");
    assert_eq!(reason(&beyond), "INSUFFICIENT_BALANCE");
    force(&mut world, "2", id).await.expect("transferred");
    assert_eq!(act(&mut world, id).await.status(), Used);
    // The free units stayed free, in the contract too.
    transfer(&world, "4").await.expect("free units");
    world.resume_operations().await;
    assert_eq!(world.tokens("BOND-1", "heir").await, 6);
    assert_eq!(world.tokens("BOND-1", "bob").await, 4);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_transfer_has_any_basis_and_its_act_keeps_it() {
    use pb::EnforcementBasis::{Court, Inheritance, Levy, Recovery};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    for basis in [Court, Levy, Inheritance, Recovery] {
        let request = pb::ForceTransferRequest {
            basis: basis.into(),
            ..transferring("2", "")
        };
        let sent = world.cfa.force_transfer(request).await.expect("sent");
        let operation = sent.into_inner().operation.expect("operation");
        let operation = world.settle(&operation).await;
        assert_eq!(operation.status(), OperationStatus::Finalized, "{basis:?}");
        let act = act(&mut world, &operation.operation_id).await;
        assert_eq!((act.status(), act.basis()), (Done, basis));
    }
    assert_eq!(units(&mut world).await, pair("2", "2"));
    assert_eq!(world.tokens("BOND-1", "heir").await, 8);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r019_a_receiver_of_a_forced_transfer_is_a_known_user_with_standard_kyc() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    type Change = fn(&mut testkit::TestUser);
    let changes: [(&str, Change); 2] = [
        ("USER_BLOCKED", |user| user.status = UserStatus::Blocked),
        ("KYC_LEVEL_TOO_LOW", |user| user.kyc = KycStatus::Simplified),
    ];
    for (why, change) in changes {
        world.double.with(|state| state.users.clear());
        world.double.upsert_user("heir", change);
        let refused = force(&mut world, "1", "").await.expect_err(why);
        assert_eq!(reason(&refused), why);
    }
    world.double.with(|state| {
        state.users.clear();
        state.default_user = None;
    });
    let refused = force(&mut world, "1", "").await.expect_err("unknown");
    assert_eq!(reason(&refused), "USER_NOT_FOUND");
    assert_eq!(units(&mut world).await, pair("10", "10"));
    let request = pb::ListEnforcementActsRequest::default();
    let listed = world.cfa.list_enforcement_acts(request).await;
    assert!(listed.expect("listed").into_inner().acts.is_empty());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d50_a_repeated_freeze_or_transfer_answers_with_the_stored_one() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let request = freezing(Some("4"));
    let [mut one, mut two] = ["", ""].map(|_| world.as_caller("sandbox.compliance.anna"));
    let (first, second) =
        tokio::join!(one.freeze_units(request.clone()), two.freeze_units(request));
    let [first, second] = [first, second].map(|answer| {
        let answer = answer.expect("frozen").into_inner();
        answer.act.expect("act").act_id
    });
    assert_eq!(first, second);
    assert_eq!(units(&mut world).await, pair("10", "6"));
    let request = transferring("4", &first);
    let sent = world.cfa.force_transfer(request.clone()).await;
    let sent = sent.expect("sent").into_inner().operation;
    let sent = world.settle(&sent.expect("operation")).await;
    // The issue has ended meanwhile.
    let ended = "UPDATE instrument SET status = 5 WHERE instrument_id = 'BOND-1'";
    alter_store(folder.path(), ended).await;
    let repeated = world.cfa.force_transfer(request).await.expect("stored");
    assert!(repeated.metadata().contains_key("idempotent-replayed"));
    let repeated = repeated.into_inner().operation.expect("operation");
    assert_eq!(repeated.operation_id, sent.operation_id);
    let other = force(&mut world, "1", "").await.expect_err("ended");
    assert_eq!(reason(&other), "INSTRUMENT_NOT_ACTIVE");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn units_of_a_transfer_that_the_chain_refuses_are_frozen_again() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    issue_units(&mut world).await;
    let arrest = freeze(&world, Some("6")).await.expect("frozen");
    assert_eq!(arrest.status(), Active);
    gate.refuse(NO_COINS);
    let request = transferring("4", &arrest.act_id);
    let sent = world.cfa.force_transfer(request).await.expect("stored");
    let sent = sent.into_inner().operation.expect("operation");
    for _ in 0..3 {
        world.resume_operations().await;
    }
    let ended = act(&mut world, &sent.operation_id).await;
    assert_eq!(ended.status(), Failed);
    assert_eq!(units(&mut world).await, pair("10", "4"));
    let refused = transfer(&world, "5").await.expect_err("frozen units");
    assert_eq!(reason(&refused), "INSUFFICIENT_BALANCE");
    gate.pass();
    world.resume_operations().await;
    let request = pb::ListEnforcementActsRequest::default();
    let listed = world.cfa.list_enforcement_acts(request).await;
    let acts = listed.expect("listed").into_inner().acts;
    let again = acts.first().expect("the new freeze");
    assert_eq!(again.status(), Active);
    assert_eq!(again.left, amount("BOND-1", "4"));
    for freeze in [&arrest.act_id, &again.act_id] {
        let lifted = lift(&mut world, freeze).await.expect("lifted");
        assert_eq!(lifted.status(), Lifted);
    }
    assert_eq!(units(&mut world).await, pair("10", "10"));
    world.stop().await;
    node.stop().await;
}

/// A call that crashed before its answer, beyond the available units.
#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_that_the_ledger_refuses_after_a_crash_is_deleted() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let frozen = freeze(&world, Some("4")).await.expect("frozen");
    lift(&mut world, &frozen.act_id).await.expect("lifted");
    let crashed = "UPDATE enforcement_act SET act_id = 'crashed', status = 1, held = 0, \
         frozen = 0, units_minor = 11, left_minor = 11";
    alter_store(folder.path(), crashed).await;
    world.resume_operations().await;
    let request = pb::ListEnforcementActsRequest::default();
    let listed = world.cfa.list_enforcement_acts(request).await;
    assert!(listed.expect("listed").into_inner().acts.is_empty());
    assert_eq!(units(&mut world).await, pair("10", "10"));
    world.stop().await;
}

/// Redeems the issue before its maturity.
async fn redeem_issue(world: &mut World) -> pb::IssueRedemption {
    let start = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let started = world.cfa.start_redemption(start).await.expect("started");
    started.into_inner().redemption.expect("redemption")
}

/// Balance and available money of Alice.
async fn money(world: &mut World) -> (String, String) {
    let balance = world.balance("alice:CFA-RUB").await;
    (balance.balance.to_string(), balance.available.to_string())
}

/// The only freeze of Alice's money, once the contract has it.
async fn frozen_money(world: &mut World) -> pb::EnforcementAct {
    for _ in 0..3_000 {
        world.resume_operations().await;
        let request = pb::ListEnforcementActsRequest::default();
        let listed = world.cfa.list_enforcement_acts(request).await;
        let acts = listed.expect("listed").into_inner().acts.into_iter();
        let mut found: Vec<_> = acts.filter(|act| act.instrument_id == "CFA-RUB").collect();
        assert_eq!(found.len(), 1, "one freeze of the payment");
        if found[0].status() == Active {
            return found.remove(0);
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("the payment is not frozen in the contract");
}

// rows: R102
#[tokio::test(flavor = "multi_thread")]
async fn r102_frozen_units_are_redeemed_and_their_payment_is_frozen() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    world.deposit("issuer", "10000.00").await;
    let arrest = freeze(&world, Some("4")).await.expect("frozen");
    let redemption = redeem_issue(&mut world).await;
    assert_eq!(redemption.status(), pb::RedemptionStatus::Finalized);
    assert_eq!(world.supply("BOND-1").await, "0");
    assert_eq!(units(&mut world).await, pair("0", "0"));
    // At once, before the contract has frozen it.
    assert_eq!(money(&mut world).await, pair("10000.00", "6000.00"));
    let ended = act(&mut world, &arrest.act_id).await;
    assert_eq!((ended.status(), ended.left), (Used, amount("BOND-1", "0")));
    let proceeds = frozen_money(&mut world).await;
    assert_eq!(proceeds.left, amount("CFA-RUB", "4000.00"));
    assert_eq!(proceeds.document, DOCUMENT);
    let lifted = lift(&mut world, &proceeds.act_id).await.expect("lifted");
    assert_eq!(lifted.status(), Lifted);
    assert_eq!(money(&mut world).await, pair("10000.00", "10000.00"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_of_all_units_freezes_the_whole_payment() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    world.deposit("issuer", "10000.00").await;
    freeze(&world, Some("4")).await.expect("frozen");
    freeze(&world, None).await.expect("frozen");
    let redemption = redeem_issue(&mut world).await;
    assert_eq!(redemption.status(), pb::RedemptionStatus::Finalized);
    assert_eq!(money(&mut world).await, pair("10000.00", "0.00"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_of_all_units_cancels_the_orders_of_the_holder() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_units(folder.path()).await;
    let cancelled = |world: &World| {
        let trail = world.double.trail();
        let of_alice = trail
            .iter()
            .filter(|call| *call == "cancel orders alice BOND-1");
        of_alice.count()
    };
    let part = freeze(&world, Some("4")).await.expect("frozen");
    assert_eq!((part.status(), cancelled(&world)), (Active, 0));
    world.double.with(|state| state.market_unavailable = true);
    let frozen = freeze(&world, None).await.expect("frozen");
    // Ledger and contract do not wait for the market.
    assert_eq!(frozen.status(), pb::EnforcementStatus::Pending);
    let refused = transfer(&world, "1").await.expect_err("frozen");
    assert_eq!(reason(&refused), "SUB_ACCOUNT_FROZEN");
    world.double.with(|state| state.market_unavailable = false);
    world.resume_operations().await;
    let act = act(&mut world, &frozen.act_id).await;
    assert_eq!((act.status(), cancelled(&world)), (Active, 1));
    world.stop().await;
}
