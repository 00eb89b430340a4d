//! The process is killed between a step of an issue or redemption and its record, then restarted.
//! A deposit is minted once (T24). A redeeming user has either the money or the tokens (R087).

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use cfa::failpoint;
use proto::cfa::v1 as pb;
use proto::common::v1::{LimitType, OperationStatus, PaymentStatus};
use proto::identity::v1::identity_service_server::IdentityServiceServer;
use proto::ledger::v1 as ledger;
use proto::market::v1::market_service_server::MarketServiceServer;
use proto::payments::v1::payments_service_server::PaymentsServiceServer;
use testkit::{PATIENCE, Reservation, ServiceDoubles, TestUser};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::coupons::{coupon_becomes, issue_ends, matured_world, past_world, redeem_unit};
use crate::issues::revert_under;
use crate::moves::{ended as move_ended, moving, set_status};
use crate::redeem::{hold, redeem};
use crate::trades::{assert_transferred_once, leg, market_world, settle, wait_batch};
use crate::world::*;

const FOLDER: &str = "CFA_CRASH_FOLDER";
const PEERS: &str = "CFA_CRASH_PEERS";
/// Folder of the child that issues and transfers units.
const UNITS_FOLDER: &str = "CFA_CRASH_UNITS_FOLDER";
/// Folder of the child that redeems an issue.
const ISSUE_FOLDER: &str = "CFA_CRASH_ISSUE_FOLDER";
/// Folder of the child that pays a coupon.
const COUPON_FOLDER: &str = "CFA_CRASH_COUPON_FOLDER";
/// File in that folder: the chain reverts the first part.
const REVERTS: &str = "reverts";
/// Folder of the child that redeems a unit on the day of a coupon.
const COUPON_DAY_FOLDER: &str = "CFA_CRASH_COUPON_DAY_FOLDER";
/// Folder of the child that redeems a unit of a matured issue, then the issue.
const MATURED_FOLDER: &str = "CFA_CRASH_MATURED_FOLDER";
/// Folder of the child that moves the holders of an issue.
const MOVES_FOLDER: &str = "CFA_CRASH_MOVES_FOLDER";
/// Folder of the child that settles trades.
const TRADES_FOLDER: &str = "CFA_CRASH_TRADES_FOLDER";
/// File in a child's folder: the redemption is already begun.
const BEGUN: &str = "begun";
/// The deposit that is issued, then redeemed in part.
const PAYMENT: &str = "payment-1";
/// Signal of `abort`.
const SIGABRT: i32 = 6;

/// The child process that is killed. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_redeems_and_is_killed() {
    let (Ok(folder), Ok(url)) = (std::env::var(FOLDER), std::env::var(PEERS)) else {
        return;
    };
    let settings = Settings {
        peers_url: Some(url),
        ..Settings::default()
    };
    let mut world = World::with(Path::new(&folder), settings).await;
    if !Path::new(&folder).join(BEGUN).exists() {
        world.issue_paid(PAYMENT, "alice", "100.00").await;
        redeem(&mut world, "40.00", "payout-1").await;
    }
    let driven = async {
        loop {
            world.resume_operations().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let driven = tokio::time::timeout(PATIENCE, driven);
    driven.await.expect("killed at the failpoint");
}

/// Serves the doubles on a port of this process, which is not killed.
pub async fn serve(double: &Arc<ServiceDoubles>, stop: &CancellationToken) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0");
    let listener = listener.await.expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let identity = IdentityServiceServer::from_arc(double.clone());
    let payments = PaymentsServiceServer::from_arc(double.clone());
    let market = MarketServiceServer::from_arc(double.clone());
    let services = [
        ("identity", Routes::new(identity)),
        ("payments", Routes::new(payments)),
        ("market", Routes::new(market)),
    ];
    let services = services.map(|(name, routes)| rpc::Service {
        name,
        routes,
        http: axum::Router::new(),
        health: rpc::Health::new(name),
    });
    let auth = rpc::Authenticator::Sandbox;
    let metrics = rpc::metrics_init();
    let services = Vec::from(services);
    tokio::spawn(rpc::serve(listener, services, auth, metrics, stop.clone()));
    url
}

/// Runs an issue and a redemption in a child process until the failpoint kills it. The bank answers
/// as soon as it has the payout.
async fn crash(folder: &Path, double: &Arc<ServiceDoubles>, place: &str, answer: PaymentStatus) {
    double.with(|state| state.default_user = Some(TestUser::default()));
    double.paid(PAYMENT, "alice", "100.00");
    let stop = CancellationToken::new();
    let url = serve(double, &stop).await;
    let mut child = tokio::process::Command::new(std::env::current_exe().expect("program"))
        .args(["crash::child_redeems_and_is_killed", "--exact"])
        .env(FOLDER, folder)
        .env(PEERS, url)
        .env("PLATFORM_CRASH_AT", place)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("started");
    let ended = async {
        loop {
            tokio::select! {
                status = child.wait() => return status.expect("ended"),
                () = tokio::time::sleep(Duration::from_millis(5)) => bank_answers(double, answer),
            }
        }
    };
    let ended = tokio::time::timeout(2 * PATIENCE, ended).await;
    let status = ended.expect("the process ends in time");
    assert_killed(status, place);
    stop.cancel();
}

/// Checks that a child process was killed at a failpoint.
pub fn assert_killed(status: std::process::ExitStatus, place: &str) {
    assert_eq!(status.signal(), Some(SIGABRT), "{place} was not reached");
}

/// Sets the bank's answer for all payouts that payments has sent.
fn bank_answers(double: &ServiceDoubles, answer: PaymentStatus) {
    double.with(|state| {
        for payout in state.payouts.values_mut().filter(|payout| payout.sent) {
            payout.status = answer.into();
        }
    });
}

/// The redemption after a restart, once it has ended.
async fn ended(
    world: &mut World,
    double: &ServiceDoubles,
    answer: PaymentStatus,
) -> pb::CfaOperation {
    let ended = async {
        loop {
            bank_answers(double, answer);
            world.resume_operations().await;
            let request = pb::ListOperationsRequest {
                external_ref: "payout-1".into(),
                ..Default::default()
            };
            let listed = world.cfa.list_operations(request).await.expect("listed");
            let mut listed = listed.into_inner().operations;
            assert_eq!(listed.len(), 1);
            let operation = listed.remove(0);
            let ends = [OperationStatus::Finalized, OperationStatus::Failed];
            if ends.contains(&operation.status()) {
                return operation;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let ended = tokio::time::timeout(PATIENCE, ended).await;
    ended.expect("the redemption ends")
}

// rows: R087
#[tokio::test(flavor = "multi_thread")]
async fn r087_killed_between_burn_and_payout_a_redemption_still_pays_or_returns_the_tokens() {
    use PaymentStatus::{Failed, Success};
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cases = [
        (failpoint::GATED, Success),
        (failpoint::BURN_SUBMITTED, Success),
        (failpoint::PAYOUT_STARTED, Success),
        (failpoint::BURN_FINAL, Success),
        (failpoint::PAYOUT_RELEASED, Success),
        (failpoint::HOLD_CONSUMED, Success),
        (failpoint::LIMITS_ENDED, Success),
        (failpoint::PAYOUT_RELEASED, Failed),
        (failpoint::MINT_BACK_SENT, Failed),
        (failpoint::MINTED_BACK, Failed),
        (failpoint::HOLD_RELEASED, Failed),
    ];
    for (place, answer) in cases {
        let folder = tempfile::tempdir().expect("folder");
        let double = Arc::new(ServiceDoubles::default());
        crash(folder.path(), &double, place, answer).await;
        let settings = Settings {
            double: Some(double.clone()),
            ..Settings::default()
        };
        let mut world = World::with(folder.path(), settings).await;
        let operation = ended(&mut world, &double, answer).await;
        let is_paid = answer == Success;
        let (status, rest, units, hold_status) = if is_paid {
            let consumed = ledger::HoldStatus::Consumed;
            (OperationStatus::Finalized, "60.00", 60_00, consumed)
        } else {
            let released = ledger::HoldStatus::Released;
            (OperationStatus::Failed, "100.00", 100_00, released)
        };
        assert_eq!(operation.status(), status, "{place}");
        let payouts = double.with(|state| state.payouts.clone());
        let payout = &payouts["payout-1"];
        assert_eq!(payouts.len(), 1, "{place}");
        assert_eq!((payout.sent, payout.status()), (true, answer), "{place}");
        assert_eq!(payout.amount, roubles("40.00"), "{place}");
        assert_eq!(world.tokens("CFA-RUB", "alice").await, units, "{place}");
        assert_eq!(world.supply("CFA-RUB").await, rest, "{place}");
        let balance = world.balance("alice:CFA-RUB").await;
        let rest: types::Decimal = rest.parse().expect("number");
        assert_eq!(
            (balance.balance, balance.available),
            (rest, rest),
            "{place}"
        );
        let held = hold(&mut world, &operation.hold_id.expect("hold")).await;
        assert_eq!(held.status(), hold_status, "{place}");
        world.resume_operations().await;
        let open = |stored: &Reservation| stored.state == "RESERVED";
        let is_open = double.with(|state| state.reservations.values().any(open));
        assert!(!is_open, "{place}: a reservation is left");
        world.stop().await;
    }
}

/// Blocks the redemption in the store, before the restarted service drives it.
async fn block_in_store(folder: &Path) {
    let block = "UPDATE operation SET status_before_block = status, status = 11, fact_blocked = 1, \
         rejection = 5, rejection_message = '115-FZ' WHERE external_ref = 'payout-1'";
    alter_store(folder, block).await;
}

/// Orders the refund of the blocked redemption in the store. A second process is killed at a place
/// of the refund.
async fn killed_in_refund(folder: &Path, double: &Arc<ServiceDoubles>, place: &str) {
    let order = "UPDATE operation SET fact_refunding = 1 WHERE external_ref = 'payout-1'";
    alter_store(folder, order).await;
    std::fs::write(folder.join(BEGUN), "").expect("written");
    crash(folder, double, place, PaymentStatus::Success).await;
}

// rows: R087 R089
#[tokio::test(flavor = "multi_thread")]
async fn r089_a_refund_finds_what_a_killed_process_had_done() {
    use PaymentStatus::{Failed, Success};
    let _ = rustls::crypto::ring::default_provider().install_default();
    let refunded = (OperationStatus::Refunded, "100.00", 100_00, Failed);
    // The bank has paid before the refund: the redemption ends as if it had not been blocked.
    let paid = (OperationStatus::Finalized, "60.00", 60_00, Success);
    for (place, in_refund, expected) in [
        (failpoint::BURN_SUBMITTED, None, refunded),
        (failpoint::PAYOUT_STARTED, None, refunded),
        (failpoint::BURN_FINAL, None, refunded),
        (
            failpoint::BURN_FINAL,
            Some(failpoint::PAYOUT_CANCELLED),
            refunded,
        ),
        (failpoint::PAYOUT_RELEASED, None, paid),
    ] {
        let folder = tempfile::tempdir().expect("folder");
        let double = Arc::new(ServiceDoubles::default());
        crash(folder.path(), &double, place, Success).await;
        bank_answers(&double, Success);
        block_in_store(folder.path()).await;
        if let Some(place) = in_refund {
            killed_in_refund(folder.path(), &double, place).await;
        }
        let settings = Settings {
            double: Some(double.clone()),
            ..Settings::default()
        };
        let mut world = World::with(folder.path(), settings).await;
        let request = pb::ListOperationsRequest {
            external_ref: "payout-1".into(),
            ..Default::default()
        };
        let listed = world.cfa.list_operations(request).await.expect("listed");
        let operation_id = listed.into_inner().operations.remove(0).operation_id;
        let request = pb::RefundRedemptionRequest {
            context: context(&key()),
            operation_id: operation_id.clone(),
            reason: "documents were not given".into(),
        };
        let mut approved = world.as_caller(testkit::APPROVED);
        approved.refund_redemption(request).await.expect(place);
        let (status, supply, tokens, payout_status) = expected;
        let ended = async {
            while world.operation(&operation_id).await.status() != status {
                world.resume_operations().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let ended = tokio::time::timeout(PATIENCE, ended).await;
        ended.unwrap_or_else(|_| panic!("{place}: the redemption does not end"));
        assert_eq!(world.supply("CFA-RUB").await, supply, "{place}");
        assert_eq!(world.tokens("CFA-RUB", "alice").await, tokens, "{place}");
        let balance = world.balance("alice:CFA-RUB").await;
        assert_eq!(balance.available.to_string(), supply, "{place}");
        let payouts = double.with(|state| state.payouts.clone());
        let is_expected = |payout: &proto::payments::v1::Payout| payout.status() == payout_status;
        assert!(payouts.values().all(is_expected), "{place}: {payouts:?}");
        world.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_killed_while_a_limit_is_refused_the_money_is_available_again() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let double = Arc::new(ServiceDoubles::default());
    let withdrawal = LimitType::Withdrawal.into();
    double.with(|state| state.daily_limits.insert(withdrawal, 10_00));
    let place = failpoint::LIMIT_REFUSED;
    crash(folder.path(), &double, place, PaymentStatus::Success).await;
    let settings = Settings {
        double: Some(double.clone()),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.resume_operations().await;
    let request = pb::ListOperationsRequest {
        external_ref: "payout-1".into(),
        ..Default::default()
    };
    let listed = world.cfa.list_operations(request).await.expect("listed");
    let refused = listed.into_inner().operations.remove(0);
    assert_eq!(refused.status(), OperationStatus::Rejected);
    let held = hold(&mut world, &refused.hold_id.expect("hold")).await;
    assert_eq!(held.status(), ledger::HoldStatus::Released);
    let balance = world.balance("alice:CFA-RUB").await;
    assert_eq!(balance.available.to_string(), "100.00");
    assert!(double.with(|state| state.payouts.is_empty()));
    world.stop().await;
}

// rows: R039 R048
#[tokio::test(flavor = "multi_thread")]
async fn t24_killed_while_a_deposit_is_issued_it_is_minted_once() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let places = [
        failpoint::ISSUE_RECORDED,
        failpoint::LIMIT_RESERVED,
        failpoint::MINT_SUBMITTED,
    ];
    for place in places {
        let folder = tempfile::tempdir().expect("folder");
        let double = Arc::new(ServiceDoubles::default());
        crash(folder.path(), &double, place, PaymentStatus::Success).await;
        let settings = Settings {
            double: Some(double.clone()),
            ..Settings::default()
        };
        let mut world = World::with(folder.path(), settings).await;
        // The deposit's event arrives too.
        world.publish_deposit(PAYMENT, "alice", "100.00").await;
        let minted = async {
            while world.balance("alice:CFA-RUB").await.balance.is_zero() {
                world.resume_operations().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let minted = tokio::time::timeout(PATIENCE, minted);
        minted.await.expect("the deposit is minted");
        world.deposit("bob", "1.00").await;
        world.balance_becomes("alice:CFA-RUB", "100.00").await;
        world.resume_operations().await;
        assert_eq!(world.supply("CFA-RUB").await, "101.00", "{place}");
        let reserved = double.with(|state| state.reservations.clone());
        let confirmed = |stored: &Reservation| stored.state == "CONFIRMED" && stored.end_calls == 1;
        assert!(
            reserved.len() == 2 && reserved.values().all(confirmed),
            "{place}: {reserved:?}"
        );
        world.stop().await;
    }
}

/// Runs a child, a test and the variable of its folder, until the failpoint kills it.
pub async fn killed((test, variable): (&str, &str), folder: &Path, place: &str) {
    let mut child = tokio::process::Command::new(std::env::current_exe().expect("program"))
        .args([test, "--exact"])
        .env(variable, folder)
        .env("PLATFORM_CRASH_AT", place)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("started");
    let ended = tokio::time::timeout(2 * PATIENCE, child.wait()).await;
    let status = ended.expect("the process ends in time").expect("ended");
    assert_eq!(status.signal(), Some(SIGABRT), "{place} was not reached");
}

/// Bob's transfer of ten units to Alice.
fn ten_units() -> pb::TransferCfaRequest {
    pb::TransferCfaRequest {
        context: context("transfer"),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "10"),
        ..Default::default()
    }
}

/// The child process that is killed while it issues or transfers units. Does nothing in an ordinary
/// test run. With a file `limit` the transfer's day limit is refused. With a file `offer` an offer
/// of ten units is cancelled first.
#[tokio::test(flavor = "multi_thread")]
async fn child_moves_units_and_is_killed() {
    let Ok(folder) = std::env::var(UNITS_FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let mut world = World::start(folder).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "bob", "100").await;
    if folder.join("limit").exists() {
        let trading = LimitType::Trading.into();
        world
            .double
            .with(|state| state.daily_limits.insert(trading, 1));
    }
    if folder.join("offer").exists() {
        let offered = world.offer("BOND-1", "bob", "10", "10000.00").await;
        let _ = world.cancel_offer(&offered.expect("offered")).await;
    }
    let _ = world.transfer(ten_units()).await;
    let driven = async {
        loop {
            world.resume_operations().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let driven = tokio::time::timeout(PATIENCE, driven);
    driven.await.expect("killed at the failpoint");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_between_two_steps_of_an_issue_or_a_transfer_units_move_once() {
    let places = [
        failpoint::GATED,
        failpoint::UNITS_SUBMITTED,
        failpoint::OPERATION_SETTLED,
    ];
    for place in places {
        // The issue reaches the place first, then the transfer.
        for (time, bob, alice) in [(1, "100", "0"), (2, "90", "10")] {
            let place = format!("{place}:{time}");
            let folder = tempfile::tempdir().expect("folder");
            let child = ("crash::child_moves_units_and_is_killed", UNITS_FOLDER);
            killed(child, folder.path(), &place).await;
            let mut world = World::start(folder.path()).await;
            let units: u128 = alice.parse().expect("number");
            let [bob, alice]: [types::Decimal; 2] =
                [bob, alice].map(|number| number.parse().expect("number"));
            let moved = async {
                while world.balance("bob:BOND-1").await.available != bob
                    || world.balance("alice:BOND-1").await.available != alice
                    || world.tokens("BOND-1", "alice").await != units
                {
                    world.resume_operations().await;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let moved = tokio::time::timeout(PATIENCE, moved).await;
            moved.unwrap_or_else(|_| panic!("{place}: not bob {bob}, alice {alice}"));
            world.resume_operations().await;
            assert_eq!(world.tokens("BOND-1", "alice").await, units, "{place}");
            assert_eq!(world.tokens("BOND-1", "bob").await, 100 - units, "{place}");
            assert_eq!(world.supply("BOND-1").await, "100", "{place}");
            world.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d46_killed_after_the_release_of_a_cancelled_offer_its_units_are_available_once() {
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(folder.path().join("offer"), "").expect("written");
    let child = ("crash::child_moves_units_and_is_killed", UNITS_FOLDER);
    killed(child, folder.path(), failpoint::OFFER_RELEASED).await;
    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    let balance = world.balance("bob:BOND-1").await;
    assert_eq!(balance.available.to_string(), "100");
    let again = world.offer("BOND-1", "bob", "100", "100000.00").await;
    assert_eq!(again.expect("offered").status(), pb::OfferStatus::Active);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_killed_after_a_refused_transfer_is_reversed_its_units_are_available_once() {
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(folder.path().join("limit"), "").expect("written");
    let child = ("crash::child_moves_units_and_is_killed", UNITS_FOLDER);
    killed(child, folder.path(), failpoint::REVERSED).await;
    let mut world = World::start(folder.path()).await;
    let repeated = world.transfer(ten_units()).await.expect("known");
    let ended = async {
        loop {
            world.resume_operations().await;
            let operation = world.operation(&repeated.operation_id).await;
            if operation.status() == OperationStatus::Rejected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let ended = tokio::time::timeout(PATIENCE, ended).await;
    ended.expect("the transfer ends");
    world.balance_becomes("bob:BOND-1", "100").await;
    assert_eq!(world.tokens("BOND-1", "alice").await, 0);
    assert_eq!(world.tokens("BOND-1", "bob").await, 100);
    world.stop().await;
}

/// The child process that is killed while it moves the holders of an issue. Does nothing in an
/// ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_moves_holders_and_is_killed() {
    let Ok(folder) = std::env::var(MOVES_FOLDER) else {
        return;
    };
    let mut world = World::start(Path::new(&folder)).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "bob", "100").await;
    let halted = set_status(&mut world, pb::InstrumentStatus::Halted).await;
    halted.expect("halted");
    let started = world.cfa.move_holders(moving("BOND-1")).await;
    started.expect("moving");
    let driven = tokio::time::timeout(PATIENCE, move_ended(&mut world)).await;
    panic!("not killed at the failpoint: {driven:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_each_step_of_a_move_all_holders_are_in_the_new_token() {
    // One part, and nine other transactions.
    let steps = (1..=10).map(|time| format!("{}:{time}", failpoint::MOVE_STEP));
    let submitted = [2, 7].map(|time| format!("{}:{time}", failpoint::MOVE_SUBMITTED));
    let others = [failpoint::MOVE_LISTED, failpoint::MOVE_ENDED].map(str::to_owned);
    for place in steps.chain(submitted).chain(others) {
        let folder = tempfile::tempdir().expect("folder");
        let child = ("crash::child_moves_holders_and_is_killed", MOVES_FOLDER);
        killed(child, folder.path(), &place).await;
        let mut world = World::start(folder.path()).await;
        let moved = move_ended(&mut world).await;
        let token = world.instrument("BOND-1").await.smart_contract_address;
        assert_eq!(moved.new_contract_address, token, "{place}");
        assert_eq!(moved.parts_done, 1, "{place}");
        assert_eq!(world.tokens("BOND-1", "bob").await, 100, "{place}");
        assert_eq!(world.supply("BOND-1").await, "100", "{place}");
        let holders = [("bob".to_owned(), "100".to_owned())];
        assert_eq!(world.holders("BOND-1").await, holders, "{place}");
        let old = moved.old_contract_address.parse().expect("address");
        let (left, _) = world.connector().total_supply(&old).await.expect("read");
        assert_eq!(left, 0, "{place}");
        world.stop().await;
    }
}

/// Two trades of one batch.
fn trades() -> Vec<pb::TradeLeg> {
    vec![
        leg("t-1", 1, "alice", "bob", "2", "2000.00", "2.00"),
        leg("t-2", 2, "alice", "bob", "3", "3000.00", "3.00"),
    ]
}

/// The child process that is killed while it settles. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_settles_and_is_killed() {
    let Ok(folder) = std::env::var(TRADES_FOLDER) else {
        return;
    };
    let mut world = market_world(Path::new(&folder)).await;
    settle(&mut world, "n1:1-2", trades())
        .await
        .expect("settled");
    wait_batch(&mut world, "n1:1-2").await;
}

// rows: R094 R186
#[tokio::test(flavor = "multi_thread")]
async fn r094_killed_between_two_steps_of_a_batch_its_trades_are_moved_once() {
    for place in [
        failpoint::BATCH_STORED,
        failpoint::BATCH_SUBMITTED,
        failpoint::BATCH_ENDED,
    ] {
        let folder = tempfile::tempdir().expect("folder");
        let child = ("crash::child_settles_and_is_killed", TRADES_FOLDER);
        killed(child, folder.path(), place).await;

        let mut world = World::start(folder.path()).await;
        // Settlement repeats the call of which it has no answer.
        let repeated = settle(&mut world, "n1:1-2", trades()).await;
        repeated.expect("known");
        let batch = wait_batch(&mut world, "n1:1-2").await;
        assert_eq!(batch.status(), pb::TradeBatchStatus::Finalized, "{place}");
        assert!(batch.failed_trade_ids.is_empty(), "{place}");
        world.resume_operations().await;
        assert_transferred_once(&mut world, 2).await;
        assert_eq!(world.tokens("BOND-1", "alice").await, 5, "{place}");
        world.stop().await;
    }
}

/// The child process that is killed while it redeems an issue. Does nothing in an ordinary test
/// run.
#[tokio::test(flavor = "multi_thread")]
async fn child_redeems_an_issue_and_is_killed() {
    let Ok(folder) = std::env::var(ISSUE_FOLDER) else {
        return;
    };
    let mut world = World::start(Path::new(&folder)).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let request = pb::StartRedemptionRequest {
        context: context("redemption"),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    world.cfa.start_redemption(request).await.expect("started");
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r098_killed_between_two_steps_of_a_redemption_every_holder_is_paid_once() {
    // The first submission funds the redemption, the second distributes.
    let places = [
        format!("{}:1", failpoint::REDEMPTION_SUBMITTED),
        failpoint::PART_POSTED.to_owned(),
        format!("{}:2", failpoint::REDEMPTION_SUBMITTED),
        failpoint::PART_ENDED.to_owned(),
    ];
    for place in places {
        let folder = tempfile::tempdir().expect("folder");
        let child = ("crash::child_redeems_an_issue_and_is_killed", ISSUE_FOLDER);
        killed(child, folder.path(), &place).await;
        let mut world = World::start(folder.path()).await;
        let redeemed = async {
            while world.instrument("BOND-1").await.status() != pb::InstrumentStatus::Redeemed {
                world.resume_operations().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let redeemed = tokio::time::timeout(PATIENCE, redeemed).await;
        redeemed.unwrap_or_else(|_| panic!("{place}: the redemption does not end"));
        world.balance_becomes("alice:CFA-RUB", "2000.00").await;
        let issuer = world.balance("issuer:CFA-RUB").await.balance;
        assert!(issuer.is_zero(), "{place}: {issuer}");
        assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00, "{place}");
        assert_eq!(world.supply("BOND-1").await, "0", "{place}");
        assert_eq!(world.supply("CFA-RUB").await, "2000.00", "{place}");
        world.stop().await;
    }
}

/// The child process that is killed while it pays a coupon. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_pays_a_coupon_and_is_killed() {
    let Ok(folder) = std::env::var(COUPON_FOLDER) else {
        return;
    };
    let mut world = World::start(Path::new(&folder)).await;
    let now_us = world.clock.now_us();
    let register = world.register(|request| {
        request.coupons = vec![pb::Coupon {
            pays_at: Some(proto::convert::to_timestamp_us(now_us)),
            amount: decimal("35.505"),
        }];
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.issue("BOND-1", "bob", "1").await;
    world.deposit("issuer", "200.00").await;
    if Path::new(&folder).join(REVERTS).exists() {
        let id = types::derived::coupon("BOND-1", 1);
        revert_under(&mut world, &format!("{id}:part:0")).await;
    }
    world.clock.advance_us(2 * 24 * 3_600 * 1_000_000);
    let driven = async {
        loop {
            world.resume_operations().await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let driven = tokio::time::timeout(PATIENCE, driven);
    driven.await.expect("killed at the failpoint");
}

// rows: R100 R101
#[tokio::test(flavor = "multi_thread")]
async fn r100_killed_between_two_steps_of_a_coupon_every_holder_is_paid_once() {
    // The first submission funds the coupon, the second distributes it.
    let places = [
        failpoint::COUPON_RECORDED.to_owned(),
        format!("{}:1", failpoint::REDEMPTION_SUBMITTED),
        format!("{}:1", failpoint::REDEMPTION_STEP),
        failpoint::PART_POSTED.to_owned(),
        format!("{}:2", failpoint::REDEMPTION_SUBMITTED),
        format!("{}:2", failpoint::REDEMPTION_STEP),
        failpoint::PART_ENDED.to_owned(),
    ];
    for place in places {
        let folder = tempfile::tempdir().expect("folder");
        let child = ("crash::child_pays_a_coupon_and_is_killed", COUPON_FOLDER);
        killed(child, folder.path(), &place).await;
        let mut world = World::start(folder.path()).await;
        let paid = async {
            loop {
                let request = pb::ListCouponsRequest {
                    instrument_id: "BOND-1".into(),
                    ..Default::default()
                };
                let listed = world.cfa.list_coupons(request).await.expect("listed");
                if listed.into_inner().coupons[0].status() == pb::CouponStatus::Paid {
                    break;
                }
                world.resume_operations().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let paid = tokio::time::timeout(PATIENCE, paid).await;
        paid.unwrap_or_else(|_| panic!("{place}: the coupon is not paid"));
        world.resume_operations().await;
        for (user, minor, kept) in [
            ("alice", 71_01, "71.01"),
            ("bob", 35_51, "35.51"),
            ("issuer", 93_48, "93.48"),
        ] {
            assert_eq!(world.tokens("CFA-RUB", user).await, minor, "{place} {user}");
            let balance = world.balance(&format!("{user}:CFA-RUB")).await;
            assert_eq!(balance.available.to_string(), kept, "{place} {user}");
        }
        assert_eq!(world.supply("BOND-1").await, "3", "{place}");
        world.stop().await;
    }
}

// rows: R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_killed_after_a_reverted_part_a_coupon_has_failed_and_is_paid_once_restarted() {
    let folder = tempfile::tempdir().expect("folder");
    std::fs::write(folder.path().join(REVERTS), "").expect("written");
    let child = ("crash::child_pays_a_coupon_and_is_killed", COUPON_FOLDER);
    killed(child, folder.path(), failpoint::PART_ENDED).await;
    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    let request = pb::ListCouponsRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let listed = world.cfa.list_coupons(request).await.expect("listed");
    let failed = listed.into_inner().coupons.remove(0);
    assert_eq!(failed.status(), pb::CouponStatus::Failed);
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 0);
    let request = pb::RestartCouponRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        number: 1,
    };
    let mut issuer = world.as_caller("sandbox.issuer.issuer");
    let restarted = issuer.restart_coupon(request).await.expect("restarted");
    let paid = restarted.into_inner().coupon.expect("coupon");
    assert_eq!(paid.status(), pb::CouponStatus::Paid);
    for (user, minor) in [("alice", 71_01), ("bob", 35_51), ("issuer", 93_48)] {
        assert_eq!(world.tokens("CFA-RUB", user).await, minor, "{user}");
    }
    world.stop().await;
}

/// Waits until each user has this money in the ledger; the chain has it then too, in kopecks.
async fn have_money(world: &mut World, place: &str, expected: &[(&str, u128, &str)]) {
    for (user, minor, kept) in expected {
        let account = format!("{user}:CFA-RUB");
        world.balance_becomes(&account, kept).await;
        let on_chain = world.tokens("CFA-RUB", user).await;
        assert_eq!(on_chain, *minor, "{place} {user}");
    }
}

/// The child process that is killed while it redeems a unit on the day of a coupon: with reason
/// MATURITY, which is refused, or else BUYBACK. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_redeems_a_unit_on_a_coupons_day_and_is_killed() {
    let Ok(folder) = std::env::var(COUPON_DAY_FOLDER) else {
        return;
    };
    let mut world = past_world(Path::new(&folder)).await;
    world.deposit("issuer", "5000.00").await;
    world.clock.advance_us(60_000_000);
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    offered.expect("offered");
    let _ = redeem_unit(&mut world, pb::RedemptionReason::Maturity).await;
    let _ = redeem_unit(&mut world, pb::RedemptionReason::Buyback).await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_killed_while_a_unit_is_redeemed_on_a_coupons_day_the_coupon_is_paid_once() {
    for place in [failpoint::GATED, failpoint::UNITS_SUBMITTED] {
        let folder = tempfile::tempdir().expect("folder");
        let child = (
            "crash::child_redeems_a_unit_on_a_coupons_day_and_is_killed",
            COUPON_DAY_FOLDER,
        );
        // The two issues reach the place first.
        killed(child, folder.path(), &format!("{place}:3")).await;
        // The clock of a start is ahead of the chain's: it would pay this coupon too.
        let later = "UPDATE coupon SET status = 9 WHERE number = 2";
        alter_store(folder.path(), later).await;
        let mut world = World::start(folder.path()).await;
        world.turn_back_us(0);
        coupon_becomes(&mut world, 1, pb::CouponStatus::Paid).await;
        let burned = async {
            while world.supply("BOND-1").await != "3" {
                world.resume_operations().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let burned = tokio::time::timeout(PATIENCE, burned).await;
        burned.unwrap_or_else(|_| panic!("{place}: the unit is not burned"));
        world.resume_operations().await;
        let paid = [
            ("alice", 1_035_51, "1035.51"),
            ("bob", 106_52, "106.52"),
            ("issuer", 3_857_97, "3857.97"),
        ];
        have_money(&mut world, place, &paid).await;
        world.stop().await;
    }
}

/// The child process that is killed while it redeems a unit after the record day of a matured
/// issue, or then the issue. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_redeems_a_matured_issue_and_is_killed() {
    let Ok(folder) = std::env::var(MATURED_FOLDER) else {
        return;
    };
    let mut world = matured_world(Path::new(&folder)).await;
    let _ = redeem_unit(&mut world, pb::RedemptionReason::Maturity).await;
    world.turn_back_us(0);
    issue_ends(&mut world).await;
}

// rows: R097 R099 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_killed_while_a_unit_is_redeemed_after_the_record_day_each_unit_is_paid_once() {
    // Three issues and a buy-back reach the first places before. The first submission funds the
    // redemption of the issue, the second distributes.
    let places = [
        format!("{}:5", failpoint::GATED),
        format!("{}:5", failpoint::UNITS_SUBMITTED),
        format!("{}:5", failpoint::OPERATION_SETTLED),
        format!("{}:1", failpoint::REDEMPTION_SUBMITTED),
        failpoint::PART_POSTED.to_owned(),
        format!("{}:2", failpoint::REDEMPTION_SUBMITTED),
        failpoint::PART_ENDED.to_owned(),
    ];
    for place in places {
        let folder = tempfile::tempdir().expect("folder");
        let child = (
            "crash::child_redeems_a_matured_issue_and_is_killed",
            MATURED_FOLDER,
        );
        killed(child, folder.path(), &place).await;
        let mut world = World::start(folder.path()).await;
        let redemption = issue_ends(&mut world).await;
        assert_eq!(redemption.total, amount("CFA-RUB", "5036.25"), "{place}");
        let paid = [
            ("alice", 3_014_50, "3014.50"),
            ("bob", 3_021_75, "3021.75"),
            ("carol", 1_007_25, "1007.25"),
            ("issuer", 3_956_50, "3956.50"),
        ];
        have_money(&mut world, &place, &paid).await;
        assert_eq!(world.tokens("CFA-RUB", "system:redemption").await, 0);
        assert_eq!(world.supply("BOND-1").await, "0", "{place}");
        world.stop().await;
    }
}
