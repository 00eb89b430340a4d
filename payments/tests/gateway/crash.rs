//! The process is killed between a payout's order, the bank's result and its event, then restarted
//! on the same stores: the bank has one transfer, the payout one result, and one event is published
//! (R087, R248).

use std::{os::unix::process::ExitStatusExt, path::Path, sync::Arc};

use payments::failpoint;
use proto::{
    common::v1 as common,
    payments::v1::{self as wire, ReceiptStatus},
    sandbox::v1::BankFault,
};
use sqlx::SqlitePool;
use testkit::PATIENCE;

use crate::world::{
    ALICE, Folder, World, amount_of, ctx, in_time, money_notice, transfer_notice, until,
    valid_account,
};

const FOLDER: &str = "PAYMENTS_CRASH_FOLDER";
const FLOW: &str = "PAYMENTS_CRASH_FLOW";
/// Signal of `abort`.
const SIGABRT: i32 = 6;

/// What the killed process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Payout,
    /// The bank refuses the transfer after it has accepted the order.
    RefusedPayout,
    Refund,
    /// The refund of an unmatched receipt, which publishes no event.
    ReceiptRefund,
}

const FLOWS: [Flow; 4] = [
    Flow::Payout,
    Flow::RefusedPayout,
    Flow::Refund,
    Flow::ReceiptRefund,
];

impl Flow {
    fn result(self) -> common::PaymentStatus {
        match self {
            Flow::RefusedPayout => common::PaymentStatus::Failed,
            Flow::Payout | Flow::Refund | Flow::ReceiptRefund => common::PaymentStatus::Success,
        }
    }
}

/// The process that is killed; does nothing in an ordinary run.
#[tokio::test(flavor = "multi_thread")]
async fn child_pays_and_is_killed() {
    let (Ok(folder), Ok(name)) = (std::env::var(FOLDER), std::env::var(FLOW)) else {
        return;
    };
    let flow = FLOWS.into_iter().find(|flow| format!("{flow:?}") == name);
    let flow = flow.unwrap();
    let folder = Arc::new(Folder::Foreign(folder.into()));
    let world = World::open(folder, |_| ()).await;
    world.create_user(ALICE).await;
    world.fund("100.00").await;
    let account = valid_account();
    // The bank executes the transfer only after the answer to its order is recorded.
    world.set_fault(BankFault::HoldTransfer, &account).await;
    if flow == Flow::RefusedPayout {
        world.set_fault(BankFault::RefuseTransfer, "").await;
    }
    let payout_id = if flow == Flow::Refund {
        let deposit = world.fund("40.00").await.payment_id;
        let rejected = common::OperationStatus::Rejected;
        world.cfa.set_operation(&deposit, rejected, 0);
        let refund = format!("refund-{deposit}");
        world.initiate(&refund, "40.00", &account).await;
        world.try_release(&refund).await.unwrap();
        refund
    } else if flow == Flow::ReceiptRefund {
        refund_receipt(&world).await
    } else {
        world.initiate("po-1", "40.00", &account).await;
        world.release("po-1").await;
        "po-1".to_owned()
    };
    until(async || {
        let transfer_id = world.payout(&payout_id).await.bank_transfer_id;
        (!transfer_id.is_empty()).then_some(())
    })
    .await;
    world.set_fault(BankFault::None, &account).await;
    in_time("the kill at the failpoint", std::future::pending::<()>()).await;
}

/// Orders the refund of money for an unknown payment; returns the payout's id.
async fn refund_receipt(world: &World) -> String {
    let body = money_notice("unknown", "t-1", "40.00");
    assert_eq!(world.post_webhook("w-1", &body).await.0, 404);
    let receipts = world.receipts(ReceiptStatus::Unmatched).await;
    let ask = wire::RefundReceiptRequest {
        context: ctx(),
        receipt_id: receipts[0].receipt_id.clone(),
        bank_account: valid_account(),
        reason: "sent by mistake".into(),
    };
    let ordered = world.approved().refund_receipt(ask).await.unwrap();
    ordered.into_inner().payout.unwrap().payout_id
}

/// Runs a flow in a process of its own until the failpoint kills it.
async fn crash(folder: &Path, flow: Flow, place: &str) {
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap());
    child
        // Without the capture of the test harness, a panic is written to stderr.
        .args(["crash::child_pays_and_is_killed", "--exact", "--nocapture"])
        .env(FOLDER, folder)
        .env(FLOW, format!("{flow:?}"))
        .env("PLATFORM_CRASH_AT", place)
        .kill_on_drop(true);
    let ended = tokio::time::timeout(2 * PATIENCE, child.output()).await;
    let output = ended.expect("the process ends in time").unwrap();
    let signal = output.status.signal();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let failure = format!(
        "{flow:?}: {place} was not reached: {}\n{stderr}",
        output.status
    );
    assert_eq!(signal, Some(SIGABRT), "{failure}");
}

/// What the killed process has left: the number of transfers at the bank, the payout's status, and
/// whether payments has recorded the transfer.
async fn stored(folder: &Path) -> (i64, String, bool) {
    let open = async |file: &str| {
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.join(file));
        SqlitePool::connect_with(options).await.unwrap()
    };
    let bank = open("bank/bank.db").await;
    let transfers = sqlx::query_scalar("SELECT COUNT(*) FROM transfers");
    let transfers = transfers.fetch_one(&bank).await.unwrap();
    bank.close().await;
    let payments = open("payments/payments.db").await;
    let payout = sqlx::query_as("SELECT status, bank_transfer_id FROM payouts");
    let (status, transfer_id): (String, String) = payout.fetch_one(&payments).await.unwrap();
    payments.close().await;
    (transfers, status, !transfer_id.is_empty())
}

/// Asserts one transfer, one result and one event of the payout, also after repeated and
/// contradicting reports of the bank.
async fn assert_ended_once(world: &World, flow: Flow, place: &str) {
    let ask = wire::ListPayoutsRequest::default();
    let listed = world.payments().list_payouts(ask).await.unwrap();
    let payouts = listed.into_inner().payouts;
    assert_eq!(payouts.len(), 1, "{flow:?} {place}");
    let payout_id = payouts[0].payout_id.as_str();
    let ended = world.until_payout(payout_id, flow.result()).await;
    let transfer_id = ended.bank_transfer_id.as_str();
    for status in ["SUCCESS", "FAILED"] {
        let notice = transfer_notice(transfer_id, payout_id, status, "40.00");
        let (answer, text) = world.post_webhook(status, &notice).await;
        assert_eq!(answer, 200, "{flow:?} {place} {status}: {text}");
    }
    assert_eq!(world.payout(payout_id).await, ended, "{flow:?} {place}");

    let transfers = world.transfers().await;
    assert_eq!(transfers.len(), 1, "{flow:?} {place}: {transfers:?}");
    assert_eq!(transfers[0].transfer_id, transfer_id, "{flow:?} {place}");
    assert_eq!(transfers[0].status(), flow.result(), "{flow:?} {place}");
    assert_eq!(amount_of(transfers[0].amount.as_ref()), "40.00");
    let events = world.events().await;
    let events = events.iter().filter(|event| event.key == payout_id);
    let events: Vec<&str> = events.map(|event| event.short_type()).collect();
    let (expected, balance): (&[&str], &str) = match flow {
        Flow::Payout => (&["PayoutConfirmedEvent"], "60.00"),
        Flow::RefusedPayout => (&["PayoutFailedEvent"], "100.00"),
        Flow::Refund => (&["PayoutConfirmedEvent"], "100.00"),
        Flow::ReceiptRefund => (&[], "60.00"),
    };
    assert_eq!(events, expected, "{flow:?} {place}");
    assert_eq!(world.bank_balance().await, balance, "{flow:?} {place}");
    if let Some(deposit) = payout_id.strip_prefix("refund-") {
        let refunded = common::PaymentStatus::Refunded;
        let deposit = world.intent(deposit).await;
        assert_eq!(deposit.status(), refunded, "{place}");
    }
    if flow == Flow::ReceiptRefund {
        let refunded = world.receipts(ReceiptStatus::Refunded).await;
        assert_eq!(refunded.len(), 1, "{place}");
        assert_eq!(refunded[0].refund_payout_id, payout_id, "{place}");
        let report = world.reconcile().await;
        assert_eq!(amount_of(report.suspense.as_ref()), "0.00", "{place}");
    }
}

/// Kills a process at each place and restarts the services on its stores.
async fn assert_survives_every_crash(flow: Flow) {
    let end = flow.result().as_str_name();
    let end = end.strip_prefix("PAYMENT_STATUS_").unwrap();
    for (place, transfers, status, is_known) in [
        (failpoint::ORDER_BEGUN, 0, "PENDING", false),
        (failpoint::ORDER_SENT, 1, "PENDING", false),
        (failpoint::RESULT_WRITTEN, 1, "PENDING", true),
        (failpoint::EVENT_WRITTEN, 1, "PENDING", true),
        (failpoint::RESULT_COMMITTED, 1, end, true),
    ] {
        let folder = Folder::temporary();
        crash(folder.path(), flow, place).await;
        // The stores have the state of the kill at this place.
        let left = stored(folder.path()).await;
        let expected = (transfers, status.to_owned(), is_known);
        assert_eq!(left, expected, "{flow:?} {place}");
        let world = World::open(folder, |_| ()).await;
        world.set_fault(BankFault::None, &valid_account()).await;
        assert_ended_once(&world, flow, place).await;
        world.stop().await;
    }
}

// rows: R087 R248 R127
#[tokio::test(flavor = "multi_thread")]
async fn r087_a_payout_of_a_killed_process_is_paid_and_reported_once() {
    assert_survives_every_crash(Flow::Payout).await;
}

// rows: R248 R126
#[tokio::test(flavor = "multi_thread")]
async fn r248_a_refused_payout_of_a_killed_process_fails_and_is_reported_once() {
    assert_survives_every_crash(Flow::RefusedPayout).await;
}

// rows: R087 R248 R300
#[tokio::test(flavor = "multi_thread")]
async fn r248_a_refund_of_a_killed_process_is_paid_and_reported_once() {
    assert_survives_every_crash(Flow::Refund).await;
}

// rows: R087 R120 R248
#[tokio::test(flavor = "multi_thread")]
async fn d51_a_refund_of_a_receipt_of_a_killed_process_is_paid_once() {
    assert_survives_every_crash(Flow::ReceiptRefund).await;
}
