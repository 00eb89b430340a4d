//! The continuous comparison of chain and ledger: a difference that lasts is a break, shown and
//! halted, until both sides agree; and the end of a token's quarantine.

use std::path::Path;
use std::time::Duration;

use cfa::failpoint;
use chain::{Action, Address, ReceiptStatus};
use proto::audit::v1::AuditRecord;
use proto::cfa::v1 as pb;
use proto::common::v1::OperationStatus;
use tonic::Code;

use crate::crash::killed;
use crate::issue::{refused_deposit, resolve};
use crate::metrics::{Scrape, alone};
use crate::redeem::{redeem, trail_has};
use crate::world::*;

const ALONE: &str = "CFA_BREAKS_ALONE";
/// Folder of the child that is killed.
const KILLED: &str = "CFA_BREAKS_KILLED";

async fn compared(folder: &Path) -> World {
    let settings = Settings {
        compare_ms: Some((10, 100)),
        ..Settings::default()
    };
    World::with(folder, settings).await
}

async fn token(world: &mut World, instrument_id: &str) -> Address {
    let address = world.instrument(instrument_id).await.smart_contract_address;
    address.parse().expect("address")
}

/// Acts on the chain past the service.
async fn act(world: &World, action: &Action) {
    let submitted = world.connector().submit(&key(), &action.call()).await;
    let hash = submitted.expect("submitted").tx_hash.to_string();
    assert_eq!(world.receipt(&hash).await.status, ReceiptStatus::Success);
}

async fn mint(world: &mut World, instrument_id: &str, units: u128) {
    let token = token(world, instrument_id).await;
    let to = Address::of_user("alice");
    let id = Some(key());
    let mint = Action::Mint {
        token,
        to,
        units,
        id,
    };
    act(world, &mint).await;
}

async fn burn(world: &mut World, instrument_id: &str, units: u128) {
    let token = token(world, instrument_id).await;
    let from = Address::of_user("alice");
    let id = Some(key());
    let burn = Action::Burn {
        token,
        from,
        units,
        id,
    };
    act(world, &burn).await;
}

/// Waits until health has a finding, or has none.
async fn finding(world: &World, is_there: bool) -> String {
    let waited = async {
        loop {
            let found = world.service.health.findings().remove("reconciliation");
            if found.is_some() == is_there {
                return found.unwrap_or_default();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let found = tokio::time::timeout(WAIT, waited).await;
    found.unwrap_or_else(|_| panic!("health findings: {:?}", world.service.health.findings()))
}

async fn breaks(world: &mut World, open_only: bool) -> Vec<pb::ChainBreak> {
    let request = pb::ListChainBreaksRequest {
        open_only,
        ..Default::default()
    };
    let listed = world.cfa.list_chain_breaks(request).await.expect("listed");
    listed.into_inner().breaks
}

async fn set_status(
    world: &mut World,
    instrument_id: &str,
    status: pb::InstrumentStatus,
) -> Result<(), tonic::Status> {
    let request = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: instrument_id.into(),
        status: status.into(),
        ..Default::default()
    };
    world.cfa.update_instrument(request).await.map(drop)
}

async fn status_is(world: &mut World, instrument_id: &str, status: pb::InstrumentStatus) {
    for _ in 0..3_000 {
        if world.instrument(instrument_id).await.status() == status {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{instrument_id} does not become {status:?}");
}

// rows: R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_a_lasting_difference_halts_its_instrument_alone_until_it_is_cleared_and_lifted() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    for symbol in ["BOND-1", "BOND-2"] {
        let registered = world.register(|request| request.symbol = symbol.into());
        registered.await.expect("registered");
        world.issue(symbol, "alice", "2").await;
    }
    world.deposit("alice", "10.00").await;
    finding(&world, false).await;
    mint(&mut world, "BOND-1", 5).await;
    let named = finding(&world, true).await;
    assert!(named.contains("BOND-1"), "{named}");
    status_is(&mut world, "BOND-1", pb::InstrumentStatus::Halted).await;
    assert_eq!(
        world.instrument("BOND-2").await.status(),
        pb::InstrumentStatus::Active
    );
    // The holder and the supply.
    for _ in 0..3_000 {
        if breaks(&mut world, true).await.len() == 2 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let found = breaks(&mut world, true).await;
    let holder = found
        .iter()
        .find(|row| row.user_id == "alice")
        .expect("the holder");
    let value = |amount: &Option<proto::common::v1::Decimal>| {
        amount
            .as_ref()
            .map(|amount| amount.value.clone())
            .unwrap_or_default()
    };
    assert_eq!(
        (value(&holder.on_chain), value(&holder.in_ledger)),
        ("7".into(), "2".into())
    );
    assert_eq!(
        (holder.owner.as_str(), holder.cleared_at),
        ("operator", None)
    );
    assert!(found.iter().any(|row| row.address.is_empty()), "{found:?}");
    // The other issue and money go on.
    world.issue("BOND-2", "bob", "1").await;
    world.deposit("bob", "1.00").await;
    let refused = set_status(&mut world, "BOND-1", pb::InstrumentStatus::Active).await;
    let refused = refused.expect_err("refused");
    let code = (refused.code(), reason(&refused));
    assert_eq!(code, (Code::FailedPrecondition, "BREAK_OPEN".to_owned()));
    world.stop().await;

    // A restart keeps it.
    let mut world = compared(folder.path()).await;
    assert!(finding(&world, true).await.contains("BOND-1"));
    burn(&mut world, "BOND-1", 5).await;
    finding(&world, false).await;
    assert!(breaks(&mut world, true).await.is_empty());
    let cleared = breaks(&mut world, false).await;
    assert_eq!(cleared.len(), 2);
    assert!(
        cleared.iter().all(|row| row.cleared_at.is_some()),
        "{cleared:?}"
    );
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Halted);
    let lifted = set_status(&mut world, "BOND-1", pb::InstrumentStatus::Active).await;
    lifted.expect("lifted");
    world.stop().await;
}

/// The child process that is killed when it has found a break. Does nothing in an ordinary test
/// run.
#[tokio::test(flavor = "multi_thread")]
async fn child_finds_a_break_and_is_killed() {
    let Ok(folder) = std::env::var(KILLED) else {
        return;
    };
    let mut world = compared(Path::new(&folder)).await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    mint(&mut world, "BOND-1", 5).await;
    status_is(&mut world, "BOND-1", pb::InstrumentStatus::Halted).await;
}

// rows: R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_killed_between_a_break_and_its_halt_its_instrument_is_halted() {
    let folder = tempfile::tempdir().expect("folder");
    let child = ("breaks::child_finds_a_break_and_is_killed", KILLED);
    killed(child, folder.path(), failpoint::BREAK_RECORDED).await;
    let mut world = compared(folder.path()).await;
    assert!(finding(&world, true).await.contains("BOND-1"));
    status_is(&mut world, "BOND-1", pb::InstrumentStatus::Halted).await;
    burn(&mut world, "BOND-1", 5).await;
    finding(&world, false).await;
    assert!(breaks(&mut world, true).await.is_empty());
    world.stop().await;
}

/// Waits until a gauge has such a value.
async fn gauge_becomes(url: &str, name: &str, is_such: impl Fn(f64) -> bool) {
    let such = async || is_such(Scrape::of(url).await.value(name, &[])).then_some(());
    testkit::eventually(such).await;
}

/// The child process that is scraped. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_shows_its_breaks() {
    const OPEN: &str = "cfa_reconciliation_breaks_open";
    const AGE: &str = "cfa_reconciliation_break_age_seconds";
    if std::env::var(ALONE).is_err() {
        return;
    }
    // Before the gauges are set, as in the platform.
    rpc::metrics_init();
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    let url = world.listen().await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    finding(&world, false).await;
    let before = Scrape::of(&url).await;
    assert!(before.value(OPEN, &[]).abs() < 1e-9);
    mint(&mut world, "BOND-1", 5).await;
    // Health has a break last: it is listed and counted then.
    finding(&world, true).await;
    assert!(!breaks(&mut world, true).await.is_empty());
    assert!(Scrape::of(&url).await.value(OPEN, &[]) > 0.5);
    // The holder and the supply.
    gauge_becomes(&url, OPEN, |open| (open - 2.0).abs() < 1e-9).await;
    let listed = breaks(&mut world, true).await;
    assert_eq!(listed.len(), 2, "{listed:?}");
    assert!(listed.iter().all(|row| row.age_seconds < 3_600));

    // One is an hour older: its age is the gauge's.
    let older = "UPDATE chain_break SET found_at_us = found_at_us - 3600000000 WHERE address <> ''";
    alter_store(folder.path(), older).await;
    gauge_becomes(&url, AGE, |age| (3_600.0..7_200.0).contains(&age)).await;
    let listed = breaks(&mut world, true).await;
    let holder = listed.iter().find(|row| row.user_id == "alice");
    let holder = holder.expect("the holder");
    assert!((3_600..7_200).contains(&holder.age_seconds), "{holder:?}");

    burn(&mut world, "BOND-1", 5).await;
    finding(&world, false).await;
    let after = Scrape::of(&url).await;
    for gauge in [OPEN, AGE] {
        assert!(after.value(gauge, &[]).abs() < 1e-9, "{gauge}");
    }
    world.stop().await;
}

/// Runs in a child process: metrics are process-wide, and other tests have breaks too.
// rows: R188
#[tokio::test]
async fn r188_a_break_is_in_the_metrics_with_its_age_as_soon_as_it_is_in_health() {
    alone("breaks::child_shows_its_breaks", ALONE).await;
}

// rows: R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_a_break_of_money_stops_payouts_and_halts_no_market() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    world.deposit("alice", "100.00").await;
    mint(&mut world, "CFA-RUB", 7).await;
    assert!(finding(&world, true).await.contains("CFA-RUB"));
    let operation = redeem(&mut world, "5.00", "payout-1").await;
    world.receipt(&operation.onchain_tx_hash).await;
    world.resume_operations().await;
    let waiting = world.operation(&operation.operation_id).await;
    assert_eq!(waiting.status(), OperationStatus::OnchainSubmitted);
    assert!(!trail_has(&world, "release payout-1"));
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Active
    );

    burn(&mut world, "CFA-RUB", 7).await;
    finding(&world, false).await;
    world.resume_operations().await;
    assert!(trail_has(&world, "release payout-1"));
    world.stop().await;
}

// rows: R133 R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_a_break_of_money_delays_the_refund_of_a_suspended_deposit() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    world.deposit("alice", "1.00").await;
    refused_deposit(&mut world).await;
    mint(&mut world, "CFA-RUB", 7).await;
    assert!(finding(&world, true).await.contains("CFA-RUB"));
    let waiting = resolve(&world, true).await.expect_err("a break");
    assert_eq!(waiting.code(), Code::Unavailable);
    assert!(world.double.with(|state| state.payouts.is_empty()));

    burn(&mut world, "CFA-RUB", 7).await;
    finding(&world, false).await;
    let refunded = resolve(&world, true).await.expect("refunded");
    assert_eq!(refunded.status(), OperationStatus::Refunded);
    assert!(trail_has(&world, "release refund-pay-1"));
    world.stop().await;
}

/// A user id of 40 hexadecimal digits is an address, whose key may exist. Here it is the address of
/// the platform's own key, which the test can sign with.
// rows: R048 R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_a_transfer_by_the_owner_of_a_40_hex_id_halts_the_issue() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    let operator = world.connector().operator();
    let owner = operator.to_string().split_off(2).to_lowercase();
    assert_eq!(Address::of_user(&owner), operator);
    for holder in [owner.as_str(), "bob"] {
        world.issue("BOND-1", holder, "2").await;
    }
    finding(&world, false).await;
    let bob = Address::of_user("bob").to_string();
    // `transfer(address,uint256)` of one unit.
    let data = format!("a9059cbb{:0>64}{:064x}", &bob[2..], 1);
    let transfer = chain::contracts::Call {
        to: Some(token(&mut world, "BOND-1").await),
        data: hex::decode(data).expect("hex"),
        gas_limit: Some(200_000),
    };
    let submitted = world.connector().submit(&key(), &transfer).await;
    let hash = submitted.expect("submitted").tx_hash.to_string();
    assert_eq!(world.receipt(&hash).await.status, ReceiptStatus::Success);
    assert!(finding(&world, true).await.contains("BOND-1"));
    status_is(&mut world, "BOND-1", pb::InstrumentStatus::Halted).await;
    assert_eq!(world.tokens("BOND-1", "bob").await, 3);
    // The units go no further.
    let further = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let refused = world.transfer(further).await.expect_err("halted");
    assert_eq!(reason(&refused), "INSTRUMENT_NOT_ACTIVE");
    world.stop().await;
}

// rows: R102 R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_a_redemption_that_waits_for_a_holder_hides_no_break() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let hold_id = world.hold("alice", "BOND-1", "1", "").await;
    let waiting = world.redeem_issue().await.expect("started");
    assert_eq!(waiting.status(), pb::RedemptionStatus::Funded);
    finding(&world, false).await;
    mint(&mut world, "CFA-RUB", 7).await;
    assert!(finding(&world, true).await.contains("CFA-RUB"));
    burn(&mut world, "CFA-RUB", 7).await;
    finding(&world, false).await;
    mint(&mut world, "BOND-1", 1).await;
    assert!(finding(&world, true).await.contains("BOND-1"));
    burn(&mut world, "BOND-1", 1).await;
    finding(&world, false).await;

    world.release_hold(&hold_id).await;
    status_becomes_redeemed(&mut world).await;
    // Longer than the window.
    tokio::time::sleep(Duration::from_millis(500)).await;
    finding(&world, false).await;
    assert!(breaks(&mut world, true).await.is_empty());
    world.stop().await;
}

/// Sweeps until BOND-1 is redeemed.
async fn status_becomes_redeemed(world: &mut World) {
    for _ in 0..3_000 {
        world.resume_operations().await;
        if world.instrument("BOND-1").await.status() == pb::InstrumentStatus::Redeemed {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?}", world.service.health.failing());
}

/// A redemption of BOND-1 before its maturity.
fn redemption_of_bond() -> pb::StartRedemptionRequest {
    pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    }
}

// rows: R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_the_money_of_a_redemption_on_its_way_is_no_break() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    world.stop_sealing().await;
    // The call waits for the chain.
    let (mut cfa, start) = (world.cfa.clone(), redemption_of_bond());
    let called = tokio::spawn(async move { cfa.start_redemption(start).await });
    // The ledger moves the money.
    world.balance_becomes("issuer:CFA-RUB", "0.00").await;
    tokio::time::sleep(Duration::from_millis(1_000)).await;
    finding(&world, false).await;
    assert!(breaks(&mut world, false).await.is_empty());
    called.abort();
    drop(called.await);
    // One that waits for money moves none.
    let waits = "UPDATE issue_redemption SET status = 2";
    alter_store(folder.path(), waits).await;
    assert!(finding(&world, true).await.contains("CFA-RUB"));
    world.stop().await;
}

// rows: R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_an_explained_difference_is_accepted_by_its_amount_and_watched() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = compared(folder.path()).await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    mint(&mut world, "BOND-1", 5).await;
    finding(&world, true).await;
    status_is(&mut world, "BOND-1", pb::InstrumentStatus::Halted).await;
    for _ in 0..3_000 {
        if breaks(&mut world, true).await.len() == 2 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let accept = |address: &str, difference: &str, key: &str| pb::AcceptChainBreakRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        address: address.into(),
        difference: Some(proto::common::v1::Decimal {
            value: difference.into(),
        }),
        reason: "minted by hand, document 7".into(),
    };
    // One person accepts nothing, and what is accepted is named by its amount.
    let mut operator = world.as_caller("sandbox.operator.anna");
    let refused = operator.accept_chain_break(accept("", "5", &key())).await;
    assert_eq!(reason(&refused.expect_err("refused")), "APPROVAL_REQUIRED");
    let refused = world.cfa.accept_chain_break(accept("", "4", &key())).await;
    assert_eq!(reason(&refused.expect_err("refused")), "BREAK_CHANGED");
    let other = Address::of_user("bob").to_string();
    let refused = world.cfa.accept_chain_break(accept(&other, "5", &key()));
    let refused = refused.await.expect_err("refused");
    assert_eq!(reason(&refused), "BREAK_NOT_FOUND");

    let alice = Address::of_user("alice").to_string();
    for address in ["", alice.as_str()] {
        let request = accept(address, "5", &key());
        let first = world.cfa.accept_chain_break(request.clone()).await;
        first.expect("accepted");
        let again = world.cfa.accept_chain_break(request).await;
        again.expect("a repeat");
    }
    finding(&world, false).await;
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Halted);
    let lifted = set_status(&mut world, "BOND-1", pb::InstrumentStatus::Active).await;
    lifted.expect("lifted");
    world.stop().await;

    // A restart keeps the acceptance. Another difference is a break.
    let mut world = compared(folder.path()).await;
    mint(&mut world, "BOND-1", 1).await;
    assert!(finding(&world, true).await.contains("BOND-1"));
    status_is(&mut world, "BOND-1", pb::InstrumentStatus::Halted).await;
    // So is the former one, once it has gone.
    burn(&mut world, "BOND-1", 6).await;
    finding(&world, false).await;
    mint(&mut world, "BOND-1", 5).await;
    assert!(finding(&world, true).await.contains("BOND-1"));
    world.stop().await;
}

fn lift(key: &str) -> pb::LiftQuarantineRequest {
    pb::LiftQuarantineRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        reason: "burned by the issuer".into(),
    }
}

// rows: R030
#[tokio::test(flavor = "multi_thread")]
async fn r030_a_quarantine_is_lifted_once_the_chains_amounts_are_possible() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let registered = world.register(|_| {}).await;
    registered.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    let refused = world.cfa.lift_quarantine(lift(&key())).await;
    assert_eq!(reason(&refused.expect_err("refused")), "NOT_QUARANTINED");
    mint(&mut world, "BOND-1", 1 << 100).await;
    status_is(&mut world, "BOND-1", pb::InstrumentStatus::Halted).await;
    // One person lifts nothing.
    let mut operator = world.as_caller("sandbox.operator.anna");
    let refused = operator.lift_quarantine(lift(&key())).await;
    assert_eq!(reason(&refused.expect_err("refused")), "APPROVAL_REQUIRED");
    let refused = world.cfa.lift_quarantine(lift(&key())).await;
    assert_eq!(reason(&refused.expect_err("refused")), "STILL_IMPOSSIBLE");

    burn(&mut world, "BOND-1", 1 << 100).await;
    let request = lift(&key());
    let mut lifted = Err(tonic::Status::unavailable("not called"));
    // The registry may not have read the block of the burn yet.
    for _ in 0..3_000 {
        lifted = world.cfa.lift_quarantine(request.clone()).await;
        if lifted.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let instrument = lifted
        .expect("lifted")
        .into_inner()
        .instrument
        .expect("instrument");
    assert_eq!(instrument.status(), pb::InstrumentStatus::Halted);
    world.cfa.lift_quarantine(request).await.expect("a repeat");
    assert_eq!(
        world.holders("BOND-1").await,
        [("alice".to_owned(), "2".to_owned())]
    );
    world.resume_operations().await;
    assert!(world.service.health.findings().is_empty());
    let resumed = set_status(&mut world, "BOND-1", pb::InstrumentStatus::Active).await;
    resumed.expect("resumed");
    // The registry follows the token again.
    world.issue("BOND-1", "bob", "3").await;
    let holders = [("alice".into(), "2".into()), ("bob".into(), "3".into())];
    assert_eq!(world.holders("BOND-1").await, holders);
    let file = folder.path().join("cfa").join("cfa.sqlite");
    let mut records = cfa::OperationRecords::open(&file).await.expect("opens");
    let (rows, found) = records.check_registry().await.expect("checked");
    assert!(rows > 0 && found.is_empty(), "{found:?}");
    world.stop().await;
}

async fn anchors(world: &mut World) -> Vec<pb::Anchor> {
    let request = pb::ListAnchorsRequest::default();
    let listed = world.cfa.list_anchors(request).await.expect("listed");
    listed.into_inner().anchors
}

/// Waits until the newest anchor is such a one and its transaction is final.
async fn anchored(world: &mut World, is_such: impl Fn(&pb::Anchor) -> bool) -> pb::Anchor {
    for _ in 0..3_000 {
        let newest = anchors(world).await.into_iter().next();
        if let Some(newest) = newest.filter(|of| is_such(of) && !of.on_chain.is_empty()) {
            return newest;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no such anchor: {:?}", anchors(world).await);
}

/// The newest anchor, once two intervals have brought no further one. Those made before the end of
/// a deposit are followed by that of its end.
async fn last_anchor(world: &mut World) -> pb::Anchor {
    let mut last = anchored(world, |_| true).await;
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        if anchors(world).await.len() as u64 == last.number {
            return last;
        }
        let before = last.number;
        last = anchored(world, |of| of.number > before).await;
    }
    panic!("anchors of unchanged chains: {:?}", anchors(world).await);
}

/// The anchor that the chain has.
fn signed(folder: &Path, anchor: &pb::Anchor) -> cfa::anchor::Anchor {
    let public_key = cfa::anchor::public_key(&folder.join("cfa")).expect("public key");
    let data = hex::decode(&anchor.on_chain).expect("hex");
    cfa::anchor::Anchor::read(&data, &public_key).expect("signed")
}

fn anchoring() -> Settings {
    Settings {
        anchor_interval_s: Some(1),
        ..Settings::default()
    }
}

// rows: R215
#[tokio::test(flavor = "multi_thread")]
async fn r215_the_ends_of_the_ledgers_chains_are_signed_and_on_the_chain() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::with(folder.path(), anchoring()).await;
    world.deposit("alice", "1.00").await;
    // The next one only after a chain has grown.
    let first = last_anchor(&mut world).await;
    assert_eq!(first.on_chain, first.data);
    let signed = signed(folder.path(), &first);
    assert_eq!((signed.block, signed.record), (first.block, first.record));
    world.deposit("alice", "1.00").await;
    anchored(&mut world, |of| of.block > first.block).await;
    world.stop().await;
}

// rows: R215
#[tokio::test(flavor = "multi_thread")]
async fn r215_the_last_audit_record_of_each_service_is_anchored_once_all_have_answered() {
    let folder = tempfile::tempdir().expect("folder");
    let record = |sequence, hash: &str| AuditRecord {
        sequence,
        hash: hash.repeat(32),
        ..Default::default()
    };
    let mut world = World::with(folder.path(), anchoring()).await;
    let records = |world: &World, newest| {
        let records = vec![newest];
        world.double.with(|state| state.payments_records = records);
    };
    records(&world, record(7, "ab"));
    world.register(|_| {}).await.expect("registered");
    world.deposit("alice", "1.00").await;
    let first = last_anchor(&mut world).await;
    let request = pb::ListAuditRecordsRequest::default();
    let own = world.cfa.list_audit_records(request).await.expect("listed");
    let own = own.into_inner().records.remove(0);
    let services = |anchor: &pb::Anchor| -> Vec<(String, u64, String)> {
        let services = signed(folder.path(), anchor).services.into_iter();
        let services = services.map(|last| (last.service, last.record, hex::encode(last.hash)));
        services.collect()
    };
    let of_payments = |sequence, hash: &str| ("payments".to_owned(), sequence, hash.repeat(32));
    let of_cfa = ("cfa".to_owned(), own.sequence, own.hash);
    assert_eq!(services(&first), [of_cfa.clone(), of_payments(7, "ab")]);

    // A record of one service makes the next one due.
    records(&world, record(8, "cd"));
    let second = anchored(&mut world, |of| of.number > first.number).await;
    let of_ledger = |of: &pb::Anchor| (of.block, of.record);
    assert_eq!(of_ledger(&second), of_ledger(&first));
    assert_eq!(services(&second), [of_cfa.clone(), of_payments(8, "cd")]);

    // An unreadable answer is a finding at once.
    records(&world, record(9, "xy"));
    let finding = async || world.service.health.findings().remove("anchor");
    let found = testkit::eventually(finding).await;
    assert!(found.contains("payments"), "{found}");
    world.double.with(|state| {
        state.payments_records = vec![record(9, "ef")];
        state.payments_unavailable = true;
    });
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(anchors(&mut world).await.len() as u64, second.number);
    world
        .double
        .with(|state| state.payments_unavailable = false);
    let third = anchored(&mut world, |of| of.number > second.number).await;
    assert_eq!(services(&third), [of_cfa, of_payments(9, "ef")]);
    let is_over = async || {
        let findings = world.service.health.findings();
        (!findings.contains_key("anchor")).then_some(())
    };
    testkit::eventually(is_over).await;
    world.stop().await;
}
