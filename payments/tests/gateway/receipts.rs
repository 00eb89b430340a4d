//! One receipt per bank transaction (D51): unmatched ones are stored, listed and counted.

use proto::common::v1 as common;
use proto::payments::v1::{self as wire, ReceiptStatus, UnmatchedReason};
use proto::sandbox::v1::BankFault;
use tonic::Code;

use crate::world::{World, amount_of, money_notice, payment_notice};

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
        setup.payments.intent_life_s = 1;
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
