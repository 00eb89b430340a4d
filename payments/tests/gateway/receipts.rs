//! One receipt per bank transaction (D51): unmatched ones are stored, listed and counted.

use proto::common::v1 as common;
use proto::payments::v1::{self as wire, ReceiptStatus, UnmatchedReason};
use proto::sandbox::v1::BankFault;
use testkit::messages::{APPROVED_SUBJECT, approved};
use tonic::{Code, Response, Status};

use crate::world::{
    ALICE, World, amount_of, ctx_with, money_notice, payment_notice, valid_account,
};

const SUCCESS: common::PaymentStatus = common::PaymentStatus::Success;

/// Transaction, payment, amount and reason of the unmatched receipts, by transaction.
async fn unmatched(world: &World) -> Vec<(String, String, String, UnmatchedReason)> {
    let receipts = world.receipts(ReceiptStatus::Unmatched).await;
    let mut read: Vec<_> = receipts
        .into_iter()
        .map(|receipt| {
            let (reason, amount) = (receipt.reason(), amount_of(receipt.amount.as_ref()));
            (receipt.transaction_id, receipt.payment_id, amount, reason)
        })
        .collect();
    read.sort();
    read
}

async fn deposits(world: &World, payment_id: &str) -> usize {
    let events = world.events_of("FiatDepositedEvent", payment_id);
    let events: Vec<wire::FiatDepositedEvent> = events.await;
    events.len()
}

// rows: R120
#[tokio::test]
async fn r120_a_second_payment_of_one_code_is_a_second_receipt() {
    let world = World::start().await;
    let intent = world.qr("10.00").await;
    let id = intent.payment_id.as_str();
    for (webhook, transaction) in [("w1", "t-1"), ("w2", "t-2"), ("w3", "t-2"), ("w4", "t-1")] {
        let body = money_notice(id, transaction, "10.00");
        let (status, answer) = world.post_webhook(webhook, &body).await;
        assert_eq!(status, 200, "{webhook}: {answer}");
        assert_eq!(world.intent(id).await.status, SUCCESS as i32);
    }
    assert_eq!(deposits(&world, id).await, 1);
    let second = UnmatchedReason::SecondPayment;
    let expected = ("t-2".to_owned(), id.to_owned(), "10.00".to_owned(), second);
    assert_eq!(unmatched(&world).await, [expected]);
    let matched = world.receipts(ReceiptStatus::Matched).await;
    assert_eq!(matched.len(), 1);
    assert_eq!(matched[0].transaction_id, "t-1");
    assert_eq!(
        amount_of(world.reconcile().await.suspense.as_ref()),
        "10.00"
    );

    // Another amount after the payment is a receipt as well.
    let body = money_notice(id, "t-3", "1.00");
    assert_eq!(world.post_webhook("w5", &body).await.0, 409);
    assert_eq!(unmatched(&world).await.len(), 2);
    assert_eq!(
        amount_of(world.reconcile().await.suspense.as_ref()),
        "11.00"
    );
    world.stop().await;
}

// rows: R115 R116
#[tokio::test]
async fn d51_every_wrong_payment_is_a_receipt_and_stays_one() {
    let world = World::start().await;
    let intent = world.qr("10.00").await;
    let id = intent.payment_id.as_str();
    for (transaction, amount) in [("t-1", "9.00"), ("t-2", "8.00")] {
        let body = money_notice(id, transaction, amount);
        assert_eq!(world.post_webhook(transaction, &body).await.0, 409);
    }
    let unknown = money_notice("unknown", "t-3", "1.00");
    for webhook in ["n1", "n2"] {
        assert_eq!(world.post_webhook(webhook, &unknown).await.0, 404);
    }
    let right = money_notice(id, "t-4", "10.00");
    assert_eq!(world.post_webhook("w4", &right).await.0, 200);
    assert_eq!(deposits(&world, id).await, 1);
    let row = |transaction: &str, payment: &str, amount: &str, reason| {
        let texts = [transaction, payment, amount].map(str::to_owned);
        let [transaction, payment, amount] = texts;
        (transaction, payment, amount, reason)
    };
    let expected = [
        row("t-1", id, "9.00", UnmatchedReason::AmountDiffers),
        row("t-2", id, "8.00", UnmatchedReason::AmountDiffers),
        row("t-3", "unknown", "1.00", UnmatchedReason::UnknownPayment),
    ];
    assert_eq!(unmatched(&world).await, expected);
    assert_eq!(
        amount_of(world.reconcile().await.suspense.as_ref()),
        "18.00"
    );
    world.stop().await;
}

// rows: R116
#[tokio::test]
async fn d51_a_corrected_report_matches_its_own_receipt() {
    let world = World::start().await;
    for (first, corrected) in [
        (Some("t-1"), Some("t-1")),
        (None, Some("t-2")),
        (None, None),
    ] {
        let intent = world.qr("10.00").await;
        let id = intent.payment_id.as_str();
        let notice = |transaction: Option<&str>, amount: &str| match transaction {
            Some(transaction) => money_notice(id, transaction, amount),
            None => payment_notice(id, "SUCCESS", amount),
        };
        let case = format!("{first:?} {corrected:?}");
        let (wrong, right) = (notice(first, "10.01"), notice(corrected, "10.00"));
        let wrong = world.post_webhook(&format!("{id}-1"), &wrong).await;
        assert_eq!(wrong.0, 409, "{case}");
        assert_eq!(unmatched(&world).await.len(), 1, "{case}");
        let right = world.post_webhook(&format!("{id}-2"), &right).await;
        assert_eq!(right.0, 200, "{case}");
        assert_eq!(unmatched(&world).await, [], "{case}");
        assert_eq!(deposits(&world, id).await, 1, "{case}");
        // The transaction id is reported later: it is the same receipt.
        let named = corrected.unwrap_or("t-3");
        let again = money_notice(id, named, "10.00");
        let again = world.post_webhook(&format!("{id}-3"), &again).await;
        assert_eq!(again.0, 200, "{case}");
        assert_eq!(unmatched(&world).await, [], "{case}");
    }
    let matched = world.receipts(ReceiptStatus::Matched).await;
    let named: Vec<_> = matched
        .iter()
        .map(|receipt| &receipt.transaction_id)
        .collect();
    assert_eq!(named, ["t-3", "t-2", "t-1"]);
    world.stop().await;
}

// rows: R120
#[tokio::test]
async fn r120_two_transactions_reported_at_once_are_one_deposit_and_one_receipt() {
    let world = World::start().await;
    let intent = world.qr("10.00").await;
    let id = intent.payment_id.as_str();
    let posts = (0..16).map(|n| {
        let body = money_notice(id, &format!("t-{}", n % 2), "10.00");
        let world = &world;
        async move { world.post_webhook(&format!("w-{n}"), &body).await.0 }
    });
    let answers = futures::future::join_all(posts).await;
    assert!(answers.iter().all(|status| *status == 200), "{answers:?}");
    assert_eq!(deposits(&world, id).await, 1);
    assert_eq!(world.receipts(ReceiptStatus::Matched).await.len(), 1);
    assert_eq!(unmatched(&world).await.len(), 1);
    world.stop().await;
}

// rows: R120
#[tokio::test]
async fn d51_one_transaction_pays_one_intent() {
    let world = World::start().await;
    let (first, second) = (world.qr("10.00").await, world.qr("10.00").await);
    for intent in [&first, &second] {
        let body = money_notice(&intent.payment_id, "t-1", "10.00");
        let webhook = format!("w-{}", intent.payment_id);
        assert_eq!(world.post_webhook(&webhook, &body).await.0, 200);
    }
    assert_eq!(world.intent(&second.payment_id).await, second);
    assert_eq!(deposits(&world, &second.payment_id).await, 0);
    assert_eq!(world.receipts(ReceiptStatus::Unspecified).await.len(), 1);
    world.stop().await;
}

// rows: R115 R120
#[tokio::test]
async fn d51_a_transaction_reported_for_a_wrong_payment_first_pays_the_right_one_once() {
    let world = World::start().await;
    let (dear, right, other) = (
        world.qr("99.00").await,
        world.qr("10.00").await,
        world.qr("10.00").await,
    );
    let payments = [
        "unknown",
        &dear.payment_id,
        &right.payment_id,
        &other.payment_id,
    ];
    let mut answers = Vec::new();
    for payment in payments {
        let body = money_notice(payment, "t-1", "10.00");
        answers.push(world.post_webhook(&format!("w-{payment}"), &body).await.0);
    }
    assert_eq!(answers, [404, 409, 200, 200]);
    assert_eq!(world.intent(&right.payment_id).await.status, SUCCESS as i32);
    for intent in [dear, other] {
        assert_eq!(world.intent(&intent.payment_id).await, intent);
        assert_eq!(deposits(&world, &intent.payment_id).await, 0);
    }
    assert_eq!(deposits(&world, &right.payment_id).await, 1);
    let receipts = world.receipts(ReceiptStatus::Unspecified).await;
    assert_eq!(receipts.len(), 1, "{receipts:?}");
    assert_eq!(receipts[0].payment_id, right.payment_id);
    assert_eq!(receipts[0].status(), ReceiptStatus::Matched);
    world.stop().await;
}

// rows: R120
#[tokio::test]
async fn d51_payments_without_a_transaction_id_are_told_apart_by_payment_and_amount() {
    let world = World::start().await;
    let (first, second) = (world.qr("10.00").await, world.qr("10.00").await);
    // An empty id counts as absent.
    for intent in [&first, &second] {
        let body = money_notice(&intent.payment_id, "", "10.00");
        let webhook = format!("w-{}", intent.payment_id);
        assert_eq!(world.post_webhook(&webhook, &body).await.0, 200);
        assert_eq!(deposits(&world, &intent.payment_id).await, 1);
    }
    // Another amount after the payment is a receipt as well.
    let other = payment_notice(&first.payment_id, "SUCCESS", "1.00");
    for webhook in ["o1", "o2"] {
        assert_eq!(world.post_webhook(webhook, &other).await.0, 409);
    }
    let found = unmatched(&world).await;
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].2, "1.00");
    world.stop().await;
}

// rows: R323
#[tokio::test]
async fn r323_late_money_is_found_by_a_poll_when_its_webhook_is_lost() {
    let world = World::start_with(|setup| {
        setup.payments.poll_first_ms = 20;
        setup.payments.poll_most_ms = 50;
        setup.payments.late_poll_pause_ms = 50;
    })
    .await;
    world.set_fault(BankFault::WebhookLost, "").await;
    for status in ["FAILED", "EXPIRED"] {
        let intent = world.qr("30.00").await;
        let id = intent.payment_id.as_str();
        let ended = payment_notice(id, status, "30.00");
        assert_eq!(world.post_webhook(status, &ended).await.0, 200);
        world.pay(&intent.qr_payload).await;
        world.until_status(id, SUCCESS).await;
        assert_eq!(deposits(&world, id).await, 1, "{status}");
    }
    world.stop().await;
}

// rows: R118 R323
#[tokio::test]
async fn r323_a_code_paid_with_another_amount_expires() {
    let world = World::start_with(|setup| {
        // The payment comes within it, also on a slow machine.
        setup.payments.intent_life_s = 5;
        setup.payments.poll_first_ms = 20;
        setup.payments.poll_most_ms = 50;
    })
    .await;
    let intent = world.qr("10.00").await;
    let other = common::PaymentStatus::Unspecified;
    world.pay_as(&intent.qr_payload, Some("9.00"), other).await;
    world
        .until_status(&intent.payment_id, common::PaymentStatus::Expired)
        .await;
    assert_eq!(unmatched(&world).await.len(), 1);
    assert_eq!(deposits(&world, &intent.payment_id).await, 0);
    world.stop().await;
}

#[tokio::test]
async fn d51_receipts_are_listed_for_staff_by_status_and_page() {
    let world = World::start().await;
    for n in 0..5 {
        let body = money_notice("unknown", &format!("t-{n}"), "1.00");
        assert_eq!(world.post_webhook(&format!("w-{n}"), &body).await.0, 404);
    }
    let (mut seen, mut token) = (Vec::new(), String::new());
    for page in 1..=3 {
        let ask = wire::ListReceiptsRequest {
            status: ReceiptStatus::Unmatched.into(),
            pagination: Some(common::PaginationRequest {
                page_size: 2,
                page_token: token,
            }),
            ..Default::default()
        };
        let listed = world.payments().list_receipts(ask).await.unwrap();
        let listed = listed.into_inner();
        seen.extend(
            listed
                .receipts
                .into_iter()
                .map(|receipt| receipt.transaction_id),
        );
        token = listed.pagination.unwrap().next_page_token;
        assert_eq!(token.is_empty(), page == 3, "page {page}");
    }
    assert_eq!(seen, ["t-4", "t-3", "t-2", "t-1", "t-0"]);
    let unknown = wire::ListReceiptsRequest {
        status: 9,
        ..Default::default()
    };
    let refused = world.payments().list_receipts(unknown).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::InvalidArgument, "status: has no value 9")
    );
    let mut investor = world.payments_as("sandbox.investor.alice");
    let refused = investor
        .list_receipts(wire::ListReceiptsRequest::default())
        .await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    world.stop().await;
}

fn assign(key: &str, receipt_id: &str, payment_id: &str, user: &str) -> wire::AssignReceiptRequest {
    wire::AssignReceiptRequest {
        context: ctx_with(key),
        receipt_id: receipt_id.into(),
        payment_id: payment_id.into(),
        user_id: user.into(),
        reason: "letter 7".into(),
    }
}

fn refund(key: &str, receipt_id: &str, account: &str) -> wire::RefundReceiptRequest {
    wire::RefundReceiptRequest {
        context: ctx_with(key),
        receipt_id: receipt_id.into(),
        bank_account: account.into(),
        reason: "sent by mistake".into(),
    }
}

fn is_repeat<T>(answer: &Response<T>) -> bool {
    answer.metadata().contains_key("idempotent-replayed")
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Status>) -> String {
    rpc::status::reason(&answer.unwrap_err()).unwrap_or_default()
}

async fn suspense(world: &World) -> String {
    amount_of(world.reconcile().await.suspense.as_ref())
}

/// The only unmatched receipt.
async fn open_receipt(world: &World) -> wire::Receipt {
    let mut receipts = world.receipts(ReceiptStatus::Unmatched).await;
    assert_eq!(receipts.len(), 1, "{receipts:?}");
    receipts.remove(0)
}

// rows: R120 R333
#[tokio::test]
async fn d51_two_persons_assign_a_receipt_to_a_user_once() {
    let world = World::start().await;
    let intent = world.qr("10.00").await;
    let id = intent.payment_id.as_str();
    let short = money_notice(id, "t-1", "9.00");
    assert_eq!(world.post_webhook("w1", &short).await.0, 409);
    let receipt = open_receipt(&world).await.receipt_id;
    let ask = assign("k1", &receipt, "", ALICE);
    for alone in ["sandbox.treasury", "sandbox.operator.anna"] {
        let alone = world.payments_as(alone).assign_receipt(ask.clone()).await;
        assert_eq!(refused(alone), "APPROVAL_REQUIRED");
    }
    let unknown = assign("k2", &receipt, "", "ghost");
    let unknown = world.approved().assign_receipt(unknown).await;
    assert_eq!(refused(unknown), "USER_NOT_FOUND");
    let mut desk = world.approved();
    let first = desk.assign_receipt(approved(ask.clone())).await.unwrap();
    let again = desk.assign_receipt(approved(ask)).await.unwrap();
    assert!(is_repeat(&again) && !is_repeat(&first));
    let answer = first.into_inner();
    assert_eq!(again.into_inner(), answer);
    let (paid, resolved) = (answer.intent.unwrap(), answer.receipt.unwrap());
    assert_eq!(resolved.status(), ReceiptStatus::Matched);
    assert_eq!(resolved.assigned_payment_id, paid.payment_id);
    assert_eq!(resolved.payment_id, id);
    assert_eq!(
        (paid.user_id.as_str(), paid.status),
        (ALICE, SUCCESS as i32)
    );
    assert_eq!(amount_of(paid.amount.as_ref()), "9.00");
    assert_eq!(deposits(&world, &paid.payment_id).await, 1);
    assert_eq!(world.intent(&paid.payment_id).await, paid);
    // The bank repeats its reports, also without the transaction: the money counts once.
    for (webhook, notice) in [("w2", short), ("w3", payment_notice(id, "SUCCESS", "9.00"))] {
        assert_eq!(world.post_webhook(webhook, &notice).await.0, 409);
    }
    assert_eq!(unmatched(&world).await, []);
    assert_eq!(suspense(&world).await, "0.00");
    // Nor is it assigned or refunded again.
    for key in ["k3", "k4"] {
        let twice = desk.assign_receipt(assign(key, &receipt, "", ALICE)).await;
        assert_eq!(refused(twice), "RECEIPT_NOT_OPEN");
        let back = refund(&format!("{key}-back"), &receipt, &valid_account());
        assert_eq!(refused(desk.refund_receipt(back).await), "RECEIPT_NOT_OPEN");
    }
    let records = world.audit_records(APPROVED_SUBJECT, &receipt).await;
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!(records[0].action, "receipt.assigned");
    assert_eq!(records[0].reason, "letter 7");
    let states = (records[0].before.as_str(), records[0].after.as_str());
    let after = format!("MATCHED, assigned to payment {}", paid.payment_id);
    assert_eq!(states, ("UNMATCHED", after.as_str()));
    // A repeat needs no other service.
    world.cut_identity();
    let late = approved(assign("k1", &receipt, "", ALICE));
    assert!(is_repeat(&desk.assign_receipt(late).await.unwrap()));
    world.stop().await;
}

// rows: R120
#[tokio::test]
async fn d51_a_receipt_of_an_unknown_payment_is_assigned_to_an_unpaid_intent_of_its_amount() {
    let world = World::start().await;
    let (paid, open, dear) = (
        world.qr("10.00").await,
        world.qr("10.00").await,
        world.qr("11.00").await,
    );
    let body = money_notice(&paid.payment_id, "t-0", "10.00");
    assert_eq!(world.post_webhook("w0", &body).await.0, 200);
    let body = money_notice("unknown", "t-1", "10.00");
    assert_eq!(world.post_webhook("w1", &body).await.0, 404);
    let receipt = open_receipt(&world).await.receipt_id;
    let mut desk = world.approved();
    for (key, payment_id, reason) in [
        ("k1", paid.payment_id.as_str(), "PAYMENT_INTENT_PAID"),
        ("k2", dear.payment_id.as_str(), "AMOUNT_MISMATCH"),
        ("k3", "nope", "PAYMENT_INTENT_NOT_FOUND"),
    ] {
        let wrong = desk.assign_receipt(assign(key, &receipt, payment_id, ""));
        assert_eq!(refused(wrong.await), reason);
    }
    for (payment_id, user_id) in [("", ""), (open.payment_id.as_str(), ALICE)] {
        let wrong = desk.assign_receipt(assign("k4", &receipt, payment_id, user_id));
        assert_eq!(refused(wrong.await), "INVALID_ARGUMENT");
    }
    let missing = desk.assign_receipt(assign("k5", "nope", &open.payment_id, ""));
    assert_eq!(refused(missing.await), "RECEIPT_NOT_FOUND");
    let assigned = desk.assign_receipt(assign("k6", &receipt, &open.payment_id, ""));
    let intent = assigned.await.unwrap().into_inner().intent.unwrap();
    assert_eq!(
        (&intent.payment_id, intent.status),
        (&open.payment_id, SUCCESS as i32)
    );
    assert_eq!(deposits(&world, &open.payment_id).await, 1);
    // The intent's own payment comes later: it is a second one.
    let body = money_notice(&open.payment_id, "t-2", "10.00");
    assert_eq!(world.post_webhook("w2", &body).await.0, 200);
    assert_eq!(deposits(&world, &open.payment_id).await, 1);
    assert_eq!(unmatched(&world).await[0].3, UnmatchedReason::SecondPayment);
    world.stop().await;
}

// rows: R120 R135
#[tokio::test]
async fn d51_two_persons_refund_a_second_payment_and_it_stays_in_suspense_until_then() {
    let world = World::start().await;
    let intent = world.fund("10.00").await;
    let id = intent.payment_id.as_str();
    // The payer's second payment is at the bank.
    world.fund("10.00").await;
    let body = money_notice(id, "t-2", "10.00");
    assert_eq!(world.post_webhook("w2", &body).await.0, 200);
    let receipt = open_receipt(&world).await.receipt_id;
    let account = valid_account();
    let ask = refund("k1", &receipt, &account);
    let alone = world.payments().refund_receipt(ask.clone()).await;
    assert_eq!(refused(alone), "APPROVAL_REQUIRED");
    let wrong = refund("k0", &receipt, "4081781");
    assert_eq!(
        refused(world.approved().refund_receipt(wrong).await),
        "INVALID_ARGUMENT"
    );
    world.set_fault(BankFault::HoldTransfer, "").await;
    let mut desk = world.approved();
    let first = desk.refund_receipt(approved(ask.clone())).await.unwrap();
    let again = desk.refund_receipt(approved(ask)).await.unwrap();
    // Other content under the key gets the stored answer.
    let other = approved(refund("k1", &receipt, "4081781"));
    let other = desk.refund_receipt(other).await.unwrap();
    assert!(is_repeat(&again) && is_repeat(&other) && !is_repeat(&first));
    let answer = first.into_inner();
    let stored = other.into_inner().receipt.unwrap();
    let (waiting, payout) = (answer.receipt.unwrap(), answer.payout.unwrap());
    assert_eq!(waiting.status(), ReceiptStatus::Unmatched);
    assert_eq!(waiting.refund_payout_id, payout.payout_id);
    assert_eq!(stored, waiting);
    assert_eq!((payout.user_id.as_str(), payout.released), (ALICE, true));
    assert_eq!(payout.refunds_receipt_id, receipt);
    assert_eq!(suspense(&world).await, "10.00");
    // No correction of the bank and no person touches it now.
    assert_eq!(world.post_webhook("w3", &body).await.0, 200);
    let twice = desk.assign_receipt(assign("k2", &receipt, "", ALICE)).await;
    assert_eq!(refused(twice), "RECEIPT_NOT_OPEN");

    world.set_fault(BankFault::None, "").await;
    world.until_payout(&payout.payout_id, SUCCESS).await;
    let refunded = world.receipts(ReceiptStatus::Refunded).await;
    assert_eq!(refunded.len(), 1, "{refunded:?}");
    assert_eq!(refunded[0].receipt_id, receipt);
    assert_eq!(suspense(&world).await, "0.00");
    let transfers = world.transfers().await;
    assert_eq!(transfers.len(), 1);
    assert_eq!(transfers[0].recipient_account, account);
    assert!(transfers[0].purpose.starts_with("Возврат"), "{transfers:?}");
    // No event: no tokens wait for this payout.
    let events = world.events_of("PayoutConfirmedEvent", &payout.payout_id);
    let events: Vec<wire::PayoutConfirmedEvent> = events.await;
    assert!(events.is_empty());
    world.stop().await;
}

// rows: R120 R135
#[tokio::test]
async fn d51_a_failed_or_cancelled_refund_leaves_the_receipt_open() {
    let world = World::start().await;
    world.fund("50.00").await;
    let body = money_notice("unknown", "t-1", "10.00");
    assert_eq!(world.post_webhook("w1", &body).await.0, 404);
    let receipt = open_receipt(&world).await.receipt_id;
    let mut desk = world.approved();
    let account = valid_account();
    world.set_fault(BankFault::RefuseTransfer, "").await;
    let failing = desk.refund_receipt(refund("k1", &receipt, &account)).await;
    let failing = failing.unwrap().into_inner().payout.unwrap();
    assert_eq!(failing.user_id, "system");
    world
        .until_payout(&failing.payout_id, common::PaymentStatus::Failed)
        .await;
    let open = open_receipt(&world).await;
    assert_eq!(open.refund_payout_id, "");
    // A late repeat orders nothing.
    let repeat = desk.refund_receipt(refund("k1", &receipt, &account)).await;
    assert!(is_repeat(&repeat.unwrap()));
    assert_eq!(open_receipt(&world).await.refund_payout_id, "");

    world.set_fault(BankFault::None, "").await;
    let second = desk.refund_receipt(refund("k2", &receipt, &account)).await;
    let second = second.unwrap().into_inner().payout.unwrap();
    world.until_payout(&second.payout_id, SUCCESS).await;
    assert_eq!(world.receipts(ReceiptStatus::Refunded).await.len(), 1);
    let records = world.audit_records("", &receipt).await;
    assert_eq!(records.len(), 2, "{records:?}");
    assert!(records[0].after.ends_with(&format!(" to {account}")));
    world.stop().await;
}

// rows: R321 R333
#[tokio::test]
async fn d34_a_cancelled_payout_is_recorded_with_both_persons_and_one_of_a_service_is_not() {
    let world = World::start().await;
    world.fund("50.00").await;
    for payout_id in ["po-1", "po-2"] {
        world.initiate(payout_id, "10.00", &valid_account()).await;
    }
    let cancel = |key: &str, payout_id: &str| wire::CancelPayoutRequest {
        context: ctx_with(key),
        payout_id: payout_id.into(),
        failure_code: "OPERATOR".into(),
    };
    let by_service = world.services().cancel_payout(cancel("k1", "po-1")).await;
    by_service.unwrap();
    let mut desk = world.approved();
    let first = desk.cancel_payout(approved(cancel("k2", "po-2"))).await;
    // Other content under the key gets the stored answer.
    let again = desk.cancel_payout(approved(cancel("k2", "po-1"))).await;
    let (first, again) = (first.unwrap(), again.unwrap());
    assert!(is_repeat(&again) && !is_repeat(&first));
    assert_eq!(again.into_inner(), first.into_inner());
    let records = world.audit_records("", "").await;
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!(records[0].actor, APPROVED_SUBJECT);
    assert_eq!(
        (records[0].object_id.as_str(), records[0].reason.as_str()),
        ("po-2", "OPERATOR")
    );
    let folder = world.stop().await;
    let config = payments::PaymentsConfig {
        data_dir: folder.path().join("payments"),
        ..Default::default()
    };
    let verified = payments::verify_audit(&config).await.unwrap();
    assert_eq!((verified.records, verified.broken), (1, None));
    assert_eq!(verified.head, records[0].hash);
}

// rows: R116
#[tokio::test]
async fn d49_an_invalid_payment_id_of_the_bank_is_replaced_and_its_money_recorded() {
    let world = World::start().await;
    let long = "x".repeat(5_000);
    for (webhook, id) in [("w1", long.as_str()), ("w2", " "), ("w3", long.as_str())] {
        let body = money_notice(id, webhook, "1.00");
        assert_eq!(world.post_webhook(webhook, &body).await.0, 404, "{webhook}");
    }
    let receipts = world.receipts(ReceiptStatus::Unmatched).await;
    assert_eq!(receipts.len(), 3);
    for receipt in &receipts {
        assert!(receipt.payment_id.starts_with("invalid-") && receipt.payment_id.len() < 60);
    }
    assert_eq!(receipts[0].payment_id, receipts[2].payment_id);
    assert_ne!(receipts[0].payment_id, receipts[1].payment_id);
    world.stop().await;
}
