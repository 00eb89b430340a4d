//! No statement of the payments gateway scans a table.
//!
//! Every statement executed in the life of deposits, payouts, refunds and reconciliations is
//! explained on the database it ran on. A test binary of its own, because the record of statements
//! is process-wide.

#[path = "../gateway/world.rs"]
#[allow(dead_code)]
mod world;

use proto::common::v1::{self as common, OperationStatus, PaymentStatus};
use proto::identity::v1::{BlockUserRequest, UnblockUserRequest};
use proto::payments::v1 as wire;
use rail::account;
use testkit::plans::{self, Allowed};

use crate::world::{
    ALICE, World, ctx, ctx_with, money_notice, payment_notice, until, valid_account,
};

const ALLOWED: [Allowed; 2] = [
    Allowed {
        statement: "FROM reports ORDER BY created_at_us DESC, report_id DESC LIMIT 1",
        reason: "the first entry of an index",
    },
    Allowed {
        statement: "FROM _sqlx_migrations",
        reason: "one row per migration, at startup",
    },
];

async fn deposits(world: &World) {
    world.fund("100.00").await;
    // Paid twice, reported twice, and with another amount first.
    let intent = world.qr("10.00").await;
    let id = intent.payment_id.as_str();
    let short = payment_notice(id, "SUCCESS", "9.00");
    let (status, _) = world.post_webhook("w1", &short).await;
    assert_eq!(status, 409);
    // Named by its transaction, and paid once more by another.
    let whole = money_notice(id, "t-1", "10.00");
    let second = money_notice(id, "t-2", "10.00");
    for _ in 0..2 {
        let (status, answer) = world.post_webhook("w2", &whole).await;
        assert_eq!(status, 200, "{answer}");
    }
    world.until_status(id, PaymentStatus::Success).await;
    assert_eq!(world.post_webhook("w3", &second).await.0, 200);
    let ask = |key: &str| wire::CreatePaymentIntentRequest {
        context: ctx_with(key),
        ..world::intent_ask(ALICE, "1.00", wire::PaymentMethod::BankTransfer)
    };
    for _ in 0..2 {
        let made = world.payments().create_payment_intent(ask("twice")).await;
        made.unwrap();
    }
}

async fn payouts(world: &World) {
    world.initiate("po-1", "30.00", &valid_account()).await;
    let block = BlockUserRequest {
        context: ctx(),
        user_id: ALICE.into(),
        reason: "court order".into(),
    };
    world.identity().block_user(block).await.unwrap();
    world.until_stopped("po-1", "court order").await;
    world.release("po-1").await;
    let unblock = UnblockUserRequest {
        context: ctx(),
        user_id: ALICE.into(),
        reason: "lifted".into(),
    };
    world
        .approved_identity()
        .unblock_user(unblock)
        .await
        .unwrap();
    world.until_payout("po-1", PaymentStatus::Success).await;
    world.initiate("po-2", "20.00", "not an account").await;
    world.release("po-2").await;
    world.until_payout("po-2", PaymentStatus::Failed).await;
    let (status, _) = world.get("/payouts/po-2").await;
    assert_eq!(status, 200);
}

async fn refund(world: &World) {
    let intent = world.fund("40.00").await;
    let id = intent.payment_id.as_str();
    world.cfa.set_operation(id, OperationStatus::Refunded, 0);
    let refund_id = format!("refund-{id}");
    let account = account::number("40817", 7);
    world.initiate(&refund_id, "40.00", &account).await;
    world.try_release(&refund_id).await.unwrap();
    world.until_status(id, PaymentStatus::Refunded).await;
}

async fn resolutions(world: &World) {
    let mut desk = world.approved();
    let notices = [("u1", "unknown"), ("u2", "unknown too")];
    for (webhook, payment_id) in notices {
        let body = money_notice(payment_id, webhook, "1.00");
        assert_eq!(world.post_webhook(webhook, &body).await.0, 404);
    }
    let open = world.receipts(wire::ReceiptStatus::Unmatched).await;
    let assign = wire::AssignReceiptRequest {
        context: ctx(),
        receipt_id: open[0].receipt_id.clone(),
        user_id: ALICE.into(),
        reason: "letter".into(),
        ..Default::default()
    };
    let refund = wire::RefundReceiptRequest {
        context: ctx(),
        receipt_id: open[1].receipt_id.clone(),
        bank_account: valid_account(),
        reason: "letter".into(),
    };
    for _ in 0..2 {
        desk.assign_receipt(assign.clone()).await.unwrap();
        desk.refund_receipt(refund.clone()).await.unwrap();
    }
    let refunded = desk.refund_receipt(refund).await.unwrap().into_inner();
    let payout_id = refunded.payout.unwrap().payout_id;
    world.until_payout(&payout_id, PaymentStatus::Success).await;
    let receipt_id = open[0].receipt_id.as_str();
    let actor = "approvals";
    for (actor, object_id) in [("", ""), (actor, ""), ("", receipt_id), (actor, receipt_id)] {
        let records = world.audit_records(actor, object_id).await;
        assert!(!records.is_empty(), "{actor} {object_id}");
    }
}

async fn lists(world: &World) {
    for user_id in ["", ALICE] {
        for status in [PaymentStatus::Unspecified, PaymentStatus::Success] {
            let ask = wire::ListPaymentIntentsRequest {
                user_id: user_id.into(),
                status: status.into(),
                ..Default::default()
            };
            let listed = world.payments().list_payment_intents(ask).await.unwrap();
            let intents = listed.into_inner().intents;
            assert!(!intents.is_empty(), "{user_id} {status:?}");
            let ask = wire::ListPayoutsRequest {
                user_id: user_id.into(),
                status: status.into(),
                ..Default::default()
            };
            let listed = world.payments().list_payouts(ask).await.unwrap();
            let payouts = listed.into_inner().payouts;
            assert!(!payouts.is_empty(), "{user_id} {status:?}");
        }
    }
    for status in [
        wire::ReceiptStatus::Unspecified,
        wire::ReceiptStatus::Unmatched,
    ] {
        assert!(!world.receipts(status).await.is_empty(), "{status:?}");
    }
}

async fn reconciliations(world: &World) {
    world.reconcile().await;
    let ask = wire::ReconcileRequest {
        context: Some(common::RequestContext {
            idempotency_key: "one report".into(),
            ..ctx().unwrap()
        }),
        business_date: None,
    };
    for _ in 0..2 {
        world.payments().reconcile(ask.clone()).await.unwrap();
    }
    until(async || (world.get("/reconciliation/latest").await.0 == 200).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_a_table() {
    plans::record();
    let world = World::start_with(|setup| setup.payments.daily_reconciliation = true).await;
    deposits(&world).await;
    payouts(&world).await;
    refund(&world).await;
    resolutions(&world).await;
    lists(&world).await;
    reconciliations(&world).await;
    let folder = world.stop().await;

    let explained = plans::explain(&[&folder.path().join("payments/payments.db")]).await;
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(&[
        "FROM intents INDEXED BY intents_by_time",
        "FROM intents INDEXED BY intents_by_status",
        "FROM intents INDEXED BY intents_by_user",
        "FROM intents INDEXED BY intents_pending",
        "FROM intents INDEXED BY intents_polled_of_user",
        "FROM intents INDEXED BY intents_polled",
        "FROM intents INDEXED BY intents_unsettled",
        "FROM intents WHERE user_id = $1 AND idempotency_key = $2",
        "FROM intents WHERE created_at_us <",
        "UPDATE intents SET settled",
        "FROM payouts INDEXED BY payouts_by_time",
        "FROM payouts INDEXED BY payouts_by_status",
        "FROM payouts INDEXED BY payouts_by_user",
        "FROM payouts INDEXED BY payouts_open",
        "FROM payouts WHERE NOT settled",
        "FROM payouts WHERE refunds =",
        "UPDATE payouts INDEXED BY payouts_by_user SET stopped = $2",
        "UPDATE payouts INDEXED BY payouts_by_user SET stopped = NULL",
        "FROM receipts WHERE bank_id = $1 AND transaction_id = $2",
        "FROM receipts INDEXED BY receipts_by_payment WHERE payment_id = $1",
        "AND transaction_id IS NULL ORDER BY status, created_at_us DESC",
        "FROM receipts WHERE receipt_id =",
        "UPDATE receipts SET status = 'REFUNDED'",
        "FROM audit_records WHERE sequence =",
        "FROM audit_records WHERE sequence <",
        "AND object_id =",
        "AND actor =",
        "INSERT INTO audit_records",
        "FROM calls WHERE call =",
        "DELETE FROM calls WHERE rowid IN",
        "FROM receipts INDEXED BY receipts_unmatched",
        "FROM receipts INDEXED BY receipts_by_status",
        "FROM receipts INDEXED BY receipts_by_time",
        "INSERT INTO webhooks",
        "FROM reports WHERE idempotency_key =",
        "FROM reports INDEXED BY reports_by_time WHERE created_at_us >",
        "DELETE FROM outbox WHERE position <=",
        "INSERT INTO inbox",
    ]);
}
