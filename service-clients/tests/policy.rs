//! The policy of calls against a payments gateway that is away, late, refusing or unavailable for a
//! while.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proto::payments::v1::payments_service_server::{PaymentsService, PaymentsServiceServer};
use proto::payments::v1::*;
use rpc::{Channel, Context};
use service_clients::{CallError, PaymentStatus, PaymentsClient, Policy};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};
use types::Minor;

#[derive(Clone, Copy)]
enum Fault {
    Late(Duration),
    Code(Code),
}

/// Answers with the faults in their order, then properly.
#[derive(Clone, Default)]
struct Double(Arc<Mutex<Script>>);

#[derive(Default)]
struct Script {
    faults: VecDeque<Fault>,
    /// Idempotency key and request id of each attempt.
    seen: Vec<(String, String)>,
}

impl Double {
    async fn attempt(
        &self,
        context: Option<proto::common::v1::RequestContext>,
    ) -> Result<Response<InitiatePayoutResponse>, Status> {
        let context = context.expect("every call has a context");
        assert_eq!(context.source, "cfa");
        let fault = {
            let mut script = self.0.lock().unwrap();
            let ids = (context.idempotency_key, context.request_id);
            script.seen.push(ids);
            script.faults.pop_front()
        };
        match fault {
            Some(Fault::Code(code)) => return Err(Status::new(code, "no")),
            Some(Fault::Late(by)) => tokio::time::sleep(by).await,
            None => {}
        }
        Ok(Response::new(InitiatePayoutResponse {
            payout: Some(Payout {
                user_id: "ann".to_owned(),
                amount: Some(proto::convert::to_money(500)),
                status: PaymentStatus::Pending.code(),
                ..Payout::default()
            }),
        }))
    }
}

#[tonic::async_trait]
impl PaymentsService for Double {
    async fn initiate_payout(
        &self,
        request: Request<InitiatePayoutRequest>,
    ) -> Result<Response<InitiatePayoutResponse>, Status> {
        self.attempt(request.into_inner().context).await
    }

    async fn get_payout(
        &self,
        request: Request<GetPayoutRequest>,
    ) -> Result<Response<GetPayoutResponse>, Status> {
        let answer = self.attempt(request.into_inner().context).await?;
        let payout = answer.into_inner().payout;
        Ok(Response::new(GetPayoutResponse { payout }))
    }

    testkit::unanswered!(
        create_payment_intent: CreatePaymentIntentRequest => CreatePaymentIntentResponse,
        get_payment_intent: GetPaymentIntentRequest => GetPaymentIntentResponse,
        list_payment_intents: ListPaymentIntentsRequest => ListPaymentIntentsResponse,
        handle_payment_webhook: HandlePaymentWebhookRequest => HandlePaymentWebhookResponse,
        release_payout: ReleasePayoutRequest => ReleasePayoutResponse,
        cancel_payout: CancelPayoutRequest => CancelPayoutResponse,
        list_payouts: ListPayoutsRequest => ListPayoutsResponse,
        reconcile: ReconcileRequest => ReconcileResponse,
        get_latest_report: GetLatestReportRequest => GetLatestReportResponse,
    );
}

const POLICY: Policy = Policy {
    call_timeout: Duration::from_millis(200),
    tries: 3,
    pause: Duration::from_millis(10),
};

fn world(faults: impl IntoIterator<Item = Fault>) -> (PaymentsClient, Double) {
    let double = Double::default();
    double.0.lock().unwrap().faults = faults.into_iter().collect();
    let routes = Routes::new(PaymentsServiceServer::new(double.clone()));
    let channel = Channel::local(&testkit::in_memory(routes), "sandbox.service");
    (
        PaymentsClient::new(channel, "cfa").with_policy(POLICY),
        double,
    )
}

fn seen(double: &Double) -> Vec<(String, String)> {
    double.0.lock().unwrap().seen.clone()
}

async fn initiate(client: &PaymentsClient, id: &str) -> Result<bool, CallError> {
    let context = Context::new("");
    client
        .initiate_payout(&context, id, "ann", Minor(500), "40817")
        .await
}

// rows: R340 R341
#[tokio::test]
async fn r340_a_read_is_repeated_until_the_service_is_back() {
    let unavailable = Fault::Code(Code::Unavailable);
    let (client, double) = world([unavailable, Fault::Late(Duration::from_secs(5))]);
    let context = Context::new("");
    let found = client.payout(&context, "p-1").await.unwrap();
    assert_eq!(found, Some(PaymentStatus::Pending));
    assert_eq!(seen(&double).len(), 3);
    assert!(seen(&double).iter().all(|(key, _)| key.is_empty()));
}

// rows: R340 R341
#[tokio::test]
async fn r341_a_write_is_repeated_under_the_same_key_only() {
    let busy = [Code::Aborted, Code::ResourceExhausted].map(Fault::Code);
    let (client, double) = world(busy);
    let stored = initiate(&client, "p-1").await;
    assert!(stored.unwrap());
    let first = seen(&double);
    assert_eq!(first.len(), 3);
    assert_eq!(first[0].0, "p-1:initiate");
    assert!(
        first.iter().all(|one| *one == first[0]),
        "one message: {first:?}"
    );
    // Another call is another request.
    initiate(&client, "p-2").await.unwrap();
    let last = seen(&double).pop().unwrap();
    assert_eq!(last.0, "p-2:initiate");
    assert_ne!(last.1, first[0].1);
}

#[tokio::test]
async fn a_refusal_passes_through_at_once_with_its_text() {
    for code in [
        Code::FailedPrecondition,
        Code::InvalidArgument,
        Code::AlreadyExists,
    ] {
        let (client, double) = world([Fault::Code(code)]);
        let refused = initiate(&client, "p-1").await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.to_string(), "no");
        assert!(!refused.is_unavailable());
        assert_eq!(Status::from(refused).code(), code);
        assert_eq!(seen(&double).len(), 1);
    }
    // A credential of our own that is refused is no answer to the caller of this service.
    let (client, _) = world([Fault::Code(Code::PermissionDenied)]);
    let refused = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert_eq!(Status::from(refused).code(), Code::Internal);
    // What the service does not know is an answer of a read.
    let (client, _) = world([Fault::Code(Code::NotFound)]);
    assert_eq!(client.payout(&Context::new(""), "p-1").await.unwrap(), None);
}

#[tokio::test]
async fn a_service_that_stays_unavailable_is_named() {
    let (client, double) = world([Fault::Code(Code::Unavailable); 4]);
    let away = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert_eq!(seen(&double).len(), 3, "as many attempts as the policy has");
    assert_eq!(away.to_string(), "Payments service is unavailable");
    assert!(matches!(&away, CallError::Unavailable { reason, .. } if reason.contains("no")));
    let status = Status::from(away);
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(rpc::status::reason(&status).as_deref(), Some("UNAVAILABLE"));

    let (client, double) = world([Fault::Code(Code::Unavailable)]);
    let client = client.with_policy(Policy::once());
    assert!(
        client
            .payout(&Context::new(""), "p-1")
            .await
            .unwrap_err()
            .is_unavailable()
    );
    assert_eq!(seen(&double).len(), 1);
}

#[tokio::test]
async fn a_late_answer_and_a_closed_port_are_unavailable_within_the_deadline() {
    let late = Fault::Late(Duration::from_secs(60));
    let (client, _) = world([late; 3]);
    let begun = Instant::now();
    let late = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert!(late.is_unavailable(), "{late:?}");
    assert!(begun.elapsed() < 10 * POLICY.call_timeout, "three attempts");

    let channel = Channel::remote("http://127.0.0.1:1", "sandbox.service").unwrap();
    let client = PaymentsClient::new(channel, "cfa").with_policy(POLICY);
    let away = initiate(&client, "p-1").await;
    let away = away.unwrap_err();
    assert!(away.is_unavailable(), "{away:?}");
}
