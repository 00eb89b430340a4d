//! Moves of all holders of an issue to a new token (F29, D32).

use std::time::Duration;

use chain::{Action, Address, HolderState, TokenCode, Version};
use proto::cfa::v1 as pb;
use proto::common::v1::OperationStatus;
use tonic::{Code, Status};

use crate::coupons::{coupon_becomes, past_world};
use crate::issues::revert_under;
use crate::node::gated_world;
use crate::trades::{leg, settle, wait_batch};
use crate::world::*;

use pb::HolderMoveStatus::{Done, Moving, Stopped};
use pb::InstrumentStatus::{Active, Halted};

const BOND: &str = "BOND-1";

pub async fn set_status(world: &mut World, status: pb::InstrumentStatus) -> Result<(), Status> {
    let request = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: BOND.into(),
        status: status.into(),
        ..Default::default()
    };
    world.cfa.update_instrument(request).await.map(drop)
}

pub fn moving(instrument_id: &str) -> pb::MoveHoldersRequest {
    pb::MoveHoldersRequest {
        context: context(&key()),
        instrument_id: instrument_id.into(),
        reason: "a new version of the contract".into(),
    }
}

async fn move_holders(world: &mut World) -> Result<pb::HolderMove, Status> {
    let answer = world.cfa.move_holders(moving(BOND)).await?;
    Ok(answer.into_inner().holder_move.expect("move"))
}

async fn latest(world: &mut World) -> Result<pb::HolderMove, Status> {
    let request = pb::GetHolderMoveRequest {
        context: None,
        instrument_id: BOND.into(),
    };
    let answer = world.cfa.get_holder_move(request).await?;
    Ok(answer.into_inner().holder_move.expect("move"))
}

/// The latest move, once it has ended.
pub async fn ended(world: &mut World) -> pb::HolderMove {
    let ended = async {
        loop {
            let found = latest(world).await.expect("a move");
            if found.status() == Done {
                return found;
            }
            world.resume_operations().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, ended).await.expect("it ends")
}

fn freezing(holder_id: &str, units: Option<&str>) -> pb::FreezeUnitsRequest {
    pb::FreezeUnitsRequest {
        context: context(&key()),
        instrument_id: BOND.into(),
        holder_id: holder_id.into(),
        amount: units.and_then(|units| amount(BOND, units)),
        basis: pb::EnforcementBasis::Court.into(),
        document: "Decision 1".into(),
    }
}

async fn freeze(world: &mut World, holder_id: &str, units: Option<&str>) -> pb::EnforcementAct {
    let request = freezing(holder_id, units);
    let answer = world.cfa.freeze_units(request).await.expect("frozen");
    answer.into_inner().act.expect("act")
}

fn transferring(from: &str, to: &str, units: &str) -> pb::TransferCfaRequest {
    pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: BOND.into(),
        from_user_id: from.into(),
        to_user_id: to.into(),
        amount: amount(BOND, units),
        ..Default::default()
    }
}

async fn token(world: &mut World) -> Address {
    let token = world.instrument(BOND).await.smart_contract_address;
    token.parse().expect("address")
}

async fn state(world: &World, token: &Address, user_id: &str) -> HolderState {
    let holder = Address::of_user(user_id);
    let state = world.connector().holder_state(token, &holder).await;
    state.expect("read")
}

/// Alice has units of which some are frozen, Carol none and a frozen address.
async fn with_holders(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    world.register(|_| {}).await.expect("registered");
    for (holder, units) in [("alice", "10"), ("bob", "20"), ("carol", "5")] {
        world.issue(BOND, holder, units).await;
    }
    freeze(&mut world, "alice", Some("4")).await;
    freeze(&mut world, "carol", None).await;
    let force = pb::ForceTransferRequest {
        context: context(&key()),
        instrument_id: BOND.into(),
        from_user_id: "carol".into(),
        to_user_id: "heir".into(),
        amount: amount(BOND, "5"),
        basis: pb::EnforcementBasis::Levy.into(),
        document: "Decision 2".into(),
        freeze_id: String::new(),
    };
    let forced = world.cfa.force_transfer(force).await.expect("transferred");
    let forced = forced.into_inner().operation.expect("operation");
    let forced = world.settle(&forced).await;
    assert_eq!(forced.status(), OperationStatus::Finalized);
    world
}

/// Stores the move `m-1` before its first step, whose transactions have reverted so often.
async fn store_move(folder: &std::path::Path, world: &mut World, attempts: &str) {
    let token = world.instrument(BOND).await.smart_contract_address;
    let stored = "INSERT INTO token_move (move_id, instrument_id, reason, actor, \
         correlation_id, old_token, new_token, migration, new_block, last_block, supply_minor, \
         step, attempts, parts_done, part, listed_through, tx_hash, moved_at_us, created_at_us, \
         updated_at_us) VALUES ('m-1', 'BOND-1', '', '', '', $1, '', '', 0, 0, 0, 1, $2, 0, '[]', \
         '', '', 0, 1, 1)";
    alter_store_by(folder, stored, &[token.as_str(), attempts]).await;
}

/// Units of a user by the chain's transfers.
async fn replayed(world: &mut World, user_id: &str) -> types::Decimal {
    let address = Address::of_user(user_id).to_string();
    let replay = pb::ReplayChainTransfersRequest::default();
    let replayed = world.cfa.replay_chain_transfers(replay).await;
    let mut units = types::Decimal::ZERO;
    for transfer in replayed.expect("replayed").into_inner().transfers {
        if transfer.instrument_id != BOND {
            continue;
        }
        let quantity = transfer.quantity.expect("quantity").value;
        let quantity: types::Decimal = quantity.parse().expect("number");
        if transfer.to_address == address {
            units = units.checked_add(quantity).expect("in range");
        }
        if transfer.from_address == address {
            units = units.checked_sub(quantity).expect("in range");
        }
    }
    units
}

#[tokio::test(flavor = "multi_thread")]
async fn all_holders_of_an_issue_move_to_a_new_token_with_their_freezes_and_history() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = with_holders(folder.path()).await;
    let before = world.holders(BOND).await;
    let held = [("alice", "10"), ("bob", "20"), ("heir", "5")];
    let held = held.map(|(holder, units)| (holder.to_owned(), units.to_owned()));
    assert_eq!(before, held);
    // Blocks have full seconds: the former holders are of another time.
    let earlier = "UPDATE holding_history SET time_us = time_us - 10000000";
    alter_store(folder.path(), earlier).await;
    follow_history(folder.path()).await;
    let past_s = cfa::Clock::System.now_us() / 1_000_000 - 1;
    let old = token(&mut world).await;
    set_status(&mut world, Halted).await.expect("halted");
    move_holders(&mut world).await.expect("moving");
    let moved = ended(&mut world).await;
    let new = token(&mut world).await;
    assert_eq!(moved.old_contract_address, old.to_string());
    assert_eq!(moved.new_contract_address, new.to_string());
    assert_ne!(old, new);
    // One part of holders, and one of frozen addresses.
    assert_eq!(moved.parts_done, 2);

    let connector = world.connector();
    let supply = connector.total_supply(&old).await.expect("read");
    assert_eq!((supply.0, world.supply(BOND).await.as_str()), (0, "35"));
    let alice = state(&world, &new, "alice").await;
    let of = |balance, frozen_units, frozen| HolderState {
        balance,
        frozen_units,
        frozen,
    };
    assert_eq!(alice, of(10, 4, false));
    assert_eq!(state(&world, &new, "carol").await, of(0, 0, true));
    for (token, is_paused) in [(old, true), (new, false)] {
        assert_eq!(connector.is_paused(&token).await.expect("read"), is_paused);
    }
    // The migration contract has no rights any more.
    let of_old = connector.token_rights(&old).await.expect("read");
    assert_eq!(connector.token_rights(&new).await.expect("read"), of_old);
    let of_old = connector.token_terms(&old).await.expect("read");
    assert_eq!(connector.token_terms(&new).await.expect("read"), of_old);

    assert_eq!(world.holders(BOND).await, before);
    assert_eq!(world.holders_at(BOND, Some(past_s)).await, before);
    let ten: types::Decimal = "10".parse().expect("number");
    assert_eq!(replayed(&mut world, "alice").await, ten);
    let request = pb::ListAuditRecordsRequest {
        object_id: BOND.into(),
        ..Default::default()
    };
    let records = world.cfa.list_audit_records(request).await;
    let mut records = records.expect("listed").into_inner().records.into_iter();
    let of_move = records.find(|record| record.action == "holders.moved");
    assert_eq!(of_move.expect("a record").after, new.to_string());

    // The issue trades on.
    set_status(&mut world, Active).await.expect("resumed");
    let sent = world.transfer(transferring("bob", "heir", "20")).await;
    let sent = world.settle(&sent.expect("sent")).await;
    assert_eq!(sent.status(), OperationStatus::Finalized);
    let after = [("alice", "10"), ("heir", "25")];
    let after = after.map(|(holder, units)| (holder.to_owned(), units.to_owned()));
    assert_eq!(world.holders(BOND).await, after);
    world.stop().await;
    let mut world = World::start(folder.path()).await;
    assert_eq!(world.holders(BOND).await, after);
    assert_eq!(world.holders_at(BOND, Some(past_s)).await, before);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn freezes_go_on_in_the_new_token() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue(BOND, "alice", "10").await;
    let frozen = freeze(&mut world, "alice", Some("4")).await;
    set_status(&mut world, Halted).await.expect("halted");
    move_holders(&mut world).await.expect("moving");
    ended(&mut world).await;
    let request = pb::LiftFreezeRequest {
        context: context(&key()),
        act_id: frozen.act_id,
        document: "Decision 3".into(),
    };
    let lifted = world.cfa.lift_freeze(request).await.expect("lifted");
    let lifted = lifted.into_inner().act.expect("act");
    assert_eq!(lifted.status(), pb::EnforcementStatus::Lifted);
    let new = token(&mut world).await;
    assert_eq!(state(&world, &new, "alice").await.frozen_units, 0);
    world.stop().await;
}

// rows: R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_a_coupon_that_falls_due_during_a_move_pays_the_holders_of_its_day() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = past_world(folder.path()).await;
    world.deposit("issuer", "1000.00").await;
    set_status(&mut world, Halted).await.expect("halted");
    store_move(folder.path(), &mut world, "3").await;
    world.clock.advance_us(2 * 24 * 3_600 * 1_000_000);
    coupon_becomes(&mut world, 1, pb::CouponStatus::Scheduled).await;
    move_holders(&mut world).await.expect("continued");
    ended(&mut world).await;
    coupon_becomes(&mut world, 1, pb::CouponStatus::Paid).await;
    for holder in ["alice", "bob"] {
        let paid = world.balance(&format!("{holder}:CFA-RUB")).await;
        assert_ne!(paid.balance, types::Decimal::ZERO, "{holder}");
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_of_a_token_of_version_1_move_to_one_of_version_2() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let (connector, contracts) = (world.connector(), world.contracts().await);
    let deploy = Action::DeployTokenV1 {
        name: "x".into(),
        symbol: BOND.into(),
        decimals: 0,
        registry: contracts.registry,
        agents: vec![contracts.settlement, contracts.redemption],
    };
    let submitted = connector.submit(&key(), &deploy.call()).await;
    let hash = submitted.expect("submitted").tx_hash.to_string();
    let former = world.receipt(&hash).await.contract_address;
    let former = former.expect("contract").to_string();
    let set = "UPDATE instrument SET contract_address = $1 WHERE instrument_id = 'BOND-1'";
    alter_store_by(folder.path(), set, &[&former]).await;
    world.issue(BOND, "alice", "10").await;
    freeze(&mut world, "alice", Some("4")).await;
    set_status(&mut world, Halted).await.expect("halted");
    move_holders(&mut world).await.expect("moving");
    let moved = ended(&mut world).await;
    assert_eq!(moved.old_contract_address, former);
    let new = token(&mut world).await;
    let code = connector.token_code(&new).await.expect("read");
    assert_eq!(code, TokenCode::Token(Version::V2));
    let terms = connector.token_terms(&new).await.expect("read");
    assert!(terms.is_some(), "the former token had none");
    let alice = state(&world, &new, "alice").await;
    assert_eq!((alice.balance, alice.frozen_units), (10, 4));
    world.stop().await;
}

// rows: R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_a_move_is_no_break_and_the_new_token_is_compared() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = Settings {
        compare_ms: Some((10, 100)),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.register(|_| {}).await.expect("registered");
    world.issue(BOND, "alice", "10").await;
    set_status(&mut world, Halted).await.expect("halted");
    move_holders(&mut world).await.expect("moving");
    ended(&mut world).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let findings = world.service.health.findings();
    assert!(findings.is_empty(), "{findings:?}");
    let mint = Action::Mint {
        token: token(&mut world).await,
        to: Address::of_user("alice"),
        units: 1,
        id: Some(key()),
    };
    let submitted = world.connector().submit(&key(), &mint.call()).await;
    let hash = submitted.expect("submitted").tx_hash.to_string();
    world.receipt(&hash).await;
    let health = &world.service.health;
    let found = async {
        while !health.findings().contains_key("reconciliation") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let found = tokio::time::timeout(WAIT, found).await;
    found.expect("the comparison finds the difference");
    world.stop().await;
}

// rows: R094
#[tokio::test(flavor = "multi_thread")]
async fn r094_a_batch_that_arrives_during_a_move_waits_and_loses_no_trade() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.deposit("alice", "10000.00").await;
    world.issue(BOND, "bob", "100").await;
    set_status(&mut world, Halted).await.expect("halted");
    gate.hide_blocks();
    let started = move_holders(&mut world).await.expect("moving");
    assert_eq!(
        (started.status(), started.step.as_str()),
        (Moving, "PAUSE_OLD")
    );

    let trades = || vec![leg("t-1", 1, "alice", "bob", "4", "4000.00", "4.00")];
    let waiting = settle(&mut world, "n1:1-1", trades()).await;
    assert_eq!(waiting.expect_err("waits").code(), Code::Unavailable);
    let twice = move_holders(&mut world).await.map(drop);
    let resumed = set_status(&mut world, Active).await;
    let request = transferring("bob", "alice", "1");
    let transferred = world.transfer(request).await.map(drop);
    let redeemed = world.redeem_issue().await.map(drop);
    for refused in [twice, resumed, redeemed] {
        let refused = refused.expect_err("refused");
        assert_eq!(reason(&refused), "HOLDERS_MOVING", "{refused}");
    }
    let refused = transferred.expect_err("halted");
    assert_eq!(reason(&refused), "INSTRUMENT_NOT_ACTIVE");
    // The ledger freezes at once, the contract once it has the holders.
    let frozen = freeze(&mut world, "bob", Some("10")).await;
    assert_eq!(frozen.status(), pb::EnforcementStatus::Pending);
    let holders = [("bob".to_owned(), "100".to_owned())];
    assert_eq!(world.holders(BOND).await, holders);

    gate.pass();
    ended(&mut world).await;
    let new = token(&mut world).await;
    let frozen = async {
        while state(&world, &new, "bob").await.frozen_units != 10 {
            world.resume_operations().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let frozen = tokio::time::timeout(WAIT, frozen).await;
    frozen.expect("the contract freezes");
    settle(&mut world, "n1:1-1", trades()).await.expect("sent");
    let batch = wait_batch(&mut world, "n1:1-1").await;
    assert_eq!(batch.status(), pb::TradeBatchStatus::Finalized);
    assert!(batch.failed_trade_ids.is_empty());
    assert_eq!(world.tokens(BOND, "alice").await, 4);
    world.stop().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_move_by_two_persons_and_while_nothing_else_changes_the_token() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue(BOND, "alice", "10").await;
    let none = latest(&mut world).await.expect_err("never moved");
    assert_eq!(reason(&none), "MOVE_NOT_FOUND");
    let mut anna = world.as_caller("sandbox.operator.anna");
    let alone = anna.move_holders(moving(BOND)).await;
    assert_eq!(reason(&alone.expect_err("one person")), "APPROVAL_REQUIRED");
    let active = move_holders(&mut world).await.expect_err("it trades");
    assert_eq!(reason(&active), "TOKEN_IN_USE");
    let money = world.cfa.move_holders(moving("CFA-RUB")).await;
    assert_eq!(money.expect_err("no issue").code(), Code::InvalidArgument);
    let unknown = world.cfa.move_holders(moving("BOND-9")).await;
    assert_eq!(
        reason(&unknown.expect_err("unknown")),
        "INSTRUMENT_NOT_FOUND"
    );

    set_status(&mut world, Halted).await.expect("halted");
    let open = "UPDATE operation SET status = 6, finalized_at_us = NULL WHERE flow = 3";
    let closed = "UPDATE operation SET status = 7, finalized_at_us = 1 WHERE flow = 3";
    alter_store(folder.path(), open).await;
    let refused = move_holders(&mut world).await.expect_err("an open issue");
    assert_eq!(reason(&refused), "OPERATIONS_OPEN");
    alter_store(folder.path(), closed).await;
    let found = "INSERT INTO chain_break VALUES ('BOND-1', '', 1, '', '1', '0', 1, NULL)";
    alter_store(folder.path(), found).await;
    let refused = move_holders(&mut world).await.expect_err("a break");
    assert_eq!(reason(&refused), "BREAK_OPEN");
    alter_store(folder.path(), "UPDATE chain_break SET cleared_at_us = 1").await;
    let due = "INSERT INTO coupon (instrument_id, number, pays_at_us, amount, status) \
         VALUES ('BOND-1', 1, 1, '1', 6)";
    alter_store(folder.path(), due).await;
    let refused = move_holders(&mut world).await.expect_err("a coupon");
    assert_eq!(reason(&refused), "TOKEN_IN_USE");
    alter_store(folder.path(), "UPDATE coupon SET status = 5").await;
    latest(&mut world).await.expect_err("nothing is stored");

    // A repeat of the call returns the move.
    let request = moving(BOND);
    let first = world.cfa.move_holders(request.clone()).await;
    let first = first.expect("moving").into_inner().holder_move;
    ended(&mut world).await;
    let again = world.cfa.move_holders(request).await.expect("a repeat");
    assert!(again.metadata().contains_key("idempotent-replayed"));
    let again = again.into_inner().holder_move.expect("move");
    assert_eq!(again.move_id, first.expect("move").move_id);
    assert_eq!(world.tokens(BOND, "alice").await, 10);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_reverts_is_retried_a_limited_number_of_times_and_then_by_a_call() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue(BOND, "alice", "10").await;
    set_status(&mut world, Halted).await.expect("halted");
    for attempt in 0..3 {
        revert_under(&mut world, &format!("move:m-1:PAUSE_OLD:{attempt}")).await;
    }
    store_move(folder.path(), &mut world, "0").await;
    let stopped = async {
        while latest(&mut world).await.expect("a move").status() != Stopped {
            world.resume_operations().await;
        }
    };
    let stopped = tokio::time::timeout(WAIT, stopped).await;
    stopped.expect("it stops");
    world.resume_operations().await;
    let failing = world.service.health.failing();
    assert!(failing["holder moves"].contains(BOND), "{failing:?}");
    let continued = move_holders(&mut world).await.expect("continued");
    assert_eq!(continued.move_id, "m-1");
    ended(&mut world).await;
    world.resume_operations().await;
    assert!(!world.service.health.failing().contains_key("holder moves"));
    assert_eq!(world.tokens(BOND, "alice").await, 10);
    world.stop().await;
}
