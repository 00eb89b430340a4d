//! The bank's webhook: the signature is verified first.

use prost::Message;
use proto::{
    common::v1 as common,
    payments::v1::{self as wire, HandlePaymentWebhookRequest, PaymentWebhook},
    sandbox::v1::BankFault,
};
use tonic::{Code, Request};

use crate::world::{World, amount_of, ctx, http_client, payment_notice, rub};

const SUCCESS: common::PaymentStatus = common::PaymentStatus::Success;

fn rpc_form(
    world: &World,
    webhook_id: &str,
    payment_id: &str,
    amount: &str,
) -> Request<HandlePaymentWebhookRequest> {
    let body = payment_notice(payment_id, "SUCCESS", amount);
    let now_s = service_kit::clock::now_us() / 1_000_000;
    let signature = world.sign(webhook_id, now_s, &body);
    let mut request = Request::new(HandlePaymentWebhookRequest {
        context: ctx(),
        webhook: Some(PaymentWebhook {
            payment_id: payment_id.into(),
            status: SUCCESS as i32,
            amount: rub(amount),
            provider_payload: body,
            received_at: None,
        }),
    });
    let metadata = request.metadata_mut();
    metadata.insert("webhook-id", webhook_id.parse().unwrap());
    metadata.insert("webhook-timestamp", now_s.to_string().parse().unwrap());
    metadata.insert("webhook-signature", signature.parse().unwrap());
    request
}

// rows: R114 R255 R301 R334
#[tokio::test]
async fn r114_a_bad_signature_is_refused_before_anything_else() {
    let world = World::start().await;
    let intent = world.qr("100.00").await;
    let now_s = service_kit::clock::now_us() / 1_000_000;
    for payment_id in [intent.payment_id.as_str(), "unknown"] {
        let body = payment_notice(payment_id, "SUCCESS", "100.00");
        let good = world.sign("w1", now_s, &body);
        for (id, at_s, signature, sent) in [
            ("w1", now_s, "v1,AAAA", body.clone()),
            ("w1", now_s, "", body.clone()),
            ("w2", now_s, good.as_str(), body.clone()),
            ("w1", now_s, good.as_str(), body.replace("100.00", "900.00")),
            (
                "w1",
                now_s - 1_000,
                world.sign("w1", now_s - 1_000, &body).as_str(),
                body.clone(),
            ),
            ("w1", now_s, "v1,AAAA", "not even JSON".to_owned()),
        ] {
            let (status, answer) = world.post_signed(id, at_s, signature, &sent).await;
            assert_eq!(status, 401);
            assert!(answer.contains("\"Invalid signature\""), "{answer}");
        }
    }
    let mut unsigned = rpc_form(&world, "w1", "unknown", "100.00");
    unsigned.metadata_mut().remove("webhook-signature");
    let refused = world
        .payments()
        .handle_payment_webhook(unsigned)
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unauthenticated, "Invalid signature")
    );
    // Signed bytes of one payment do not authenticate another.
    let mut other = rpc_form(&world, "w1", "unknown", "100.00");
    other.get_mut().webhook.as_mut().unwrap().payment_id = intent.payment_id.clone();
    let refused = world
        .payments()
        .handle_payment_webhook(other)
        .await
        .unwrap_err();
    assert_eq!(refused.message(), "Invalid signature");
    assert_eq!(world.intent(&intent.payment_id).await, intent);
    world.stop().await;
}

// rows: R115 R255 R113
#[tokio::test]
async fn r115_unknown_payment() {
    let world = World::start().await;
    let (status, answer) = world
        .post_webhook("w1", &payment_notice("unknown", "SUCCESS", "1.00"))
        .await;
    assert_eq!(status, 404);
    assert!(answer.contains("\"Payment intent not found\""), "{answer}");
    let ask = rpc_form(&world, "w2", "unknown", "1.00");
    let refused = world
        .payments()
        .handle_payment_webhook(ask)
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::NotFound, "Payment intent not found")
    );
    world.stop().await;
}

// rows: R116 R117 R255 R113
#[tokio::test]
async fn r116_amounts_are_compared_by_value() {
    let world = World::start().await;
    let intent = world.qr("100.00").await;
    let id = intent.payment_id.as_str();
    for amount in ["100.01", "99.99", "100.001"] {
        let (status, answer) = world
            .post_webhook("w1", &payment_notice(id, "SUCCESS", amount))
            .await;
        assert_eq!(status, 409);
        assert!(answer.contains("\"Amount mismatch\""), "{answer}");
    }
    let dollars = payment_notice(id, "SUCCESS", "100.00").replace("RUB", "USD");
    assert_eq!(world.post_webhook("w1", &dollars).await.0, 409);
    let ask = rpc_form(&world, "w2", id, "100.01");
    let refused = world
        .payments()
        .handle_payment_webhook(ask)
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::FailedPrecondition, "Amount mismatch")
    );
    assert_eq!(world.intent(id).await, intent);

    let ask = rpc_form(&world, "w3", id, "100.0");
    let taken = world
        .payments()
        .handle_payment_webhook(ask)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(taken.intent.as_ref().unwrap().status, SUCCESS as i32);
    assert_eq!(world.intent(id).await, taken.intent.unwrap());
    world.stop().await;
}

/// The request form of the webhook (D31), declared here and not from the schema.
#[derive(Clone, PartialEq, Message)]
struct WebhookForm {
    #[prost(string, tag = "1")]
    payment_id: String,
    #[prost(int32, tag = "2")]
    status: i32,
    #[prost(message, optional, tag = "3")]
    amount: Option<common::Money>,
    #[prost(string, tag = "4")]
    provider_payload: String,
    #[prost(message, optional, tag = "5")]
    received_at: Option<prost_types::Timestamp>,
}

#[derive(Clone, PartialEq, Message)]
struct WebhookRequestForm {
    #[prost(message, optional, tag = "2")]
    webhook: Option<WebhookForm>,
}

/// The report of the request form: `notes` is its field 6.
#[derive(Clone, PartialEq, Message)]
struct ReportForm {
    #[prost(string, tag = "1")]
    report_id: String,
    #[prost(message, optional, tag = "2")]
    business_date: Option<prost_types::Timestamp>,
    #[prost(message, optional, tag = "3")]
    bank_balance: Option<common::Money>,
    #[prost(message, optional, tag = "4")]
    token_supply: Option<common::Money>,
    #[prost(bool, tag = "5")]
    balanced: bool,
    #[prost(string, tag = "6")]
    notes: String,
}

#[derive(Clone, PartialEq, Message)]
struct ReportResponseForm {
    #[prost(message, optional, tag = "1")]
    report: Option<ReportForm>,
}

/// Calls a method with these bytes over the port; returns the status and the answer's bytes.
async fn call_bytes(
    world: &World,
    method: &str,
    headers: &[(&str, String)],
    request: &impl Message,
) -> (u16, Vec<u8>) {
    let url = format!(
        "{}/dfa.payments.v1.PaymentsService/{method}",
        world.http_url
    );
    let mut call = http_client()
        .post(url)
        .bearer_auth("sandbox.treasury")
        .header("content-type", "application/proto");
    for (name, value) in headers {
        call = call.header(*name, value);
    }
    let answer = call.body(request.encode_to_vec()).send().await.unwrap();
    let status = answer.status().as_u16();
    (status, answer.bytes().await.unwrap().to_vec())
}

// rows: R121 R122
#[tokio::test]
async fn r122_webhook_and_report_travel_in_the_layout_of_the_request_form() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.cfa.set_supply("99.50", 2);
    let report = world.reconcile().await;
    let (status, bytes) = call_bytes(&world, "GetLatestReport", &[], &()).await;
    assert_eq!(status, 200);
    let form = ReportResponseForm::decode(bytes.as_slice()).unwrap();
    let form = form.report.unwrap();
    assert_eq!(form.report_id, report.report_id);
    assert_eq!(form.business_date, report.business_date);
    assert!(form.business_date.is_some() && !form.balanced);
    assert_eq!(amount_of(form.bank_balance.as_ref()), "100.00");
    assert_eq!(amount_of(form.token_supply.as_ref()), "99.50");
    assert_eq!(form.notes, "Discrepancy detected");

    let intent = world.qr("10.00").await;
    let body = payment_notice(&intent.payment_id, "SUCCESS", "10.00");
    let now_s = service_kit::clock::now_us() / 1_000_000;
    let headers = [
        ("webhook-id", "w1".to_owned()),
        ("webhook-timestamp", now_s.to_string()),
        ("webhook-signature", world.sign("w1", now_s, &body)),
    ];
    let received = async |seconds: i64| {
        let webhook = WebhookForm {
            payment_id: intent.payment_id.clone(),
            status: SUCCESS as i32,
            amount: rub("10.00"),
            provider_payload: body.clone(),
            received_at: Some(prost_types::Timestamp { seconds, nanos: 0 }),
        };
        let form = WebhookRequestForm {
            webhook: Some(webhook),
        };
        call_bytes(&world, "HandlePaymentWebhook", &headers, &form).await
    };
    // Only if field 5 is received_at does the check of times name it.
    let (status, refusal) = received(0).await;
    let refusal = String::from_utf8(refusal).unwrap();
    assert_eq!(status, 400, "{refusal}");
    let text = "webhook.received_at: must be a time of the years 2000 to 2100";
    assert!(refusal.contains(text), "{refusal}");
    assert_eq!(world.intent(&intent.payment_id).await, intent);
    let (status, bytes) = received(now_s).await;
    assert_eq!(status, 200);
    let taken = wire::HandlePaymentWebhookResponse::decode(bytes.as_slice()).unwrap();
    let taken = taken.intent.unwrap();
    assert_eq!(taken.status, SUCCESS as i32);
    assert_eq!(world.intent(&intent.payment_id).await, taken);
    world.stop().await;
}

// rows: R118 R119 R014
#[tokio::test]
async fn r118_the_webhook_sets_the_status_and_success_is_final() {
    let world = World::start().await;
    for (status, expected) in [
        ("FAILED", common::PaymentStatus::Failed),
        ("EXPIRED", common::PaymentStatus::Expired),
        ("SUCCESS", SUCCESS),
    ] {
        let intent = world.qr("10.00").await;
        let id = intent.payment_id.as_str();
        let (answer, _) = world
            .post_webhook(id, &payment_notice(id, status, "10.00"))
            .await;
        assert_eq!(answer, 200);
        assert_eq!(world.intent(id).await.status, expected as i32);
        let deposits: Vec<wire::FiatDepositedEvent> =
            world.events_of("FiatDepositedEvent", id).await;
        assert_eq!(deposits.len(), usize::from(expected == SUCCESS));
        if expected == SUCCESS {
            // A later failure of the same payment changes nothing.
            let late = payment_notice(id, "FAILED", "10.00");
            assert_eq!(world.post_webhook("late", &late).await.0, 200);
            assert_eq!(world.intent(id).await.status, SUCCESS as i32);
        }
    }
    world.stop().await;
}

// rows: R120
#[tokio::test]
async fn r120_a_replayed_success_publishes_nothing_even_concurrently() {
    let world = World::start().await;
    let intent = world.qr("10.00").await;
    let id = intent.payment_id.as_str();
    let body = payment_notice(id, "SUCCESS", "10.00");
    let posts = (0..10).map(|n| {
        // Half are the same delivery, half are new deliveries of the same event.
        let webhook_id = if n % 2 == 0 {
            "same".to_owned()
        } else {
            format!("other-{n}")
        };
        let (world, body) = (&world, &body);
        async move { world.post_webhook(&webhook_id, body).await.0 }
    });
    let answers = futures::future::join_all(posts).await;
    assert!(answers.iter().all(|status| *status == 200), "{answers:?}");
    let deposits: Vec<wire::FiatDepositedEvent> = world.events_of("FiatDepositedEvent", id).await;
    assert_eq!(deposits.len(), 1);
    world.stop().await;
}

// rows: R120 R301
#[tokio::test]
async fn r120_faulty_webhooks_never_deposit_twice_or_falsely() {
    let world = World::start_with(|setup| {
        setup.payments.poll_first_ms = 50;
        setup.payments.poll_most_ms = 100;
    })
    .await;
    world.set_fault(BankFault::WebhookTwice, "").await;
    let twice = world.qr("10.00").await;
    world.pay(&twice.qr_payload).await;
    world.until_status(&twice.payment_id, SUCCESS).await;

    // A forged webhook has no effect; the poll finds the money.
    world.set_fault(BankFault::None, "").await;
    world.set_fault(BankFault::WebhookForged, "").await;
    let forged = world.qr("11.00").await;
    world.pay(&forged.qr_payload).await;
    world.until_status(&forged.payment_id, SUCCESS).await;

    // One kopeck too much: pending until the bank corrects its report.
    world.set_fault(BankFault::None, "").await;
    world.set_fault(BankFault::WebhookAmount, "").await;
    let wrong = world.qr("12.00").await;
    world.pay(&wrong.qr_payload).await;
    let report = world.reconcile().await;
    assert_eq!(
        world.intent(&wrong.payment_id).await.status,
        common::PaymentStatus::Pending as i32
    );
    assert_eq!(amount_of(report.suspense.as_ref()), "12.01");
    world.set_fault(BankFault::None, "").await;
    world.until_status(&wrong.payment_id, SUCCESS).await;

    for intent in [twice, forged, wrong] {
        let deposits: Vec<wire::FiatDepositedEvent> = world
            .events_of("FiatDepositedEvent", &intent.payment_id)
            .await;
        assert_eq!(deposits.len(), 1);
    }
    world.stop().await;
}

// rows: R301
#[tokio::test]
async fn r301_a_signed_invalid_body_is_a_bad_request() {
    let world = World::start().await;
    let (status, answer) = world.post_webhook("w1", r#"{"type":"greeting"}"#).await;
    assert_eq!(status, 400);
    assert!(answer.contains("invalid_argument"), "{answer}");
    world.stop().await;
}

// rows: R114 R301
#[tokio::test]
async fn r114_a_body_over_64_kib_is_refused_without_reading_it() {
    let world = World::start().await;
    let intent = world.qr("10.00").await;
    let notice = payment_notice(&intent.payment_id, "SUCCESS", "10.00");
    let at_bound = format!("{notice}{}", " ".repeat(65_536 - notice.len()));
    let over = format!("{at_bound} ");
    let (status, answer) = world.post_webhook("w1", &over).await;
    assert_eq!(status, 413, "{answer}");
    let mut ask = rpc_form(&world, "w2", &intent.payment_id, "10.00");
    ask.get_mut().webhook.as_mut().unwrap().provider_payload = over;
    let refused = world
        .payments()
        .handle_payment_webhook(ask)
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (
            Code::InvalidArgument,
            "webhook.provider_payload: is longer than 65536 bytes"
        )
    );
    assert_eq!(world.intent(&intent.payment_id).await, intent);
    assert_eq!(world.post_webhook("w3", &at_bound).await.0, 200);
    assert_eq!(
        world.intent(&intent.payment_id).await.status,
        SUCCESS as i32
    );
    world.stop().await;
}

// rows: R114 R334
#[tokio::test]
async fn r114_more_than_eight_signatures_are_refused_even_if_one_is_valid() {
    let world = World::start().await;
    let intent = world.qr("10.00").await;
    let notice = payment_notice(&intent.payment_id, "SUCCESS", "10.00");
    let now_s = service_kit::clock::now_us() / 1_000_000;
    let signed = |webhook_id: &str, others: usize| {
        let good = world.sign(webhook_id, now_s, &notice);
        format!("{}{good}", "v1,AAAA ".repeat(others))
    };
    let (status, answer) = world
        .post_signed("w1", now_s, &signed("w1", 8), &notice)
        .await;
    assert_eq!(status, 401);
    assert!(answer.contains("\"Invalid signature\""), "{answer}");
    let mut ask = rpc_form(&world, "w2", &intent.payment_id, "10.00");
    let nine = signed("w2", 8).parse().unwrap();
    ask.metadata_mut().insert("webhook-signature", nine);
    let refused = world
        .payments()
        .handle_payment_webhook(ask)
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unauthenticated, "Invalid signature")
    );
    assert_eq!(world.intent(&intent.payment_id).await, intent);
    let (status, _) = world
        .post_signed("w3", now_s, &signed("w3", 7), &notice)
        .await;
    assert_eq!(status, 200);
    world.stop().await;
}
