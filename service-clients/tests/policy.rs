//! The call policy against a payments gateway that is unavailable, late or refuses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::common::v1::RequestContext;
use proto::payments::v1::Payout;
use rpc::{Channel, Context};
use service_clients::{CallError, PaymentStatus, PaymentsClient, Policy};
use testkit::{Fault, ServiceDoubles};
use tonic::{Code, Status};
use types::Minor;

const POLICY: Policy = Policy {
    call_timeout: Duration::from_millis(200),
    tries: 3,
    pause: Duration::from_millis(10),
};

fn client_with(faults: impl IntoIterator<Item = Fault>) -> (PaymentsClient, Arc<ServiceDoubles>) {
    let double = Arc::new(ServiceDoubles::default());
    double.with(|state| {
        state.faults = faults.into_iter().collect();
        let payout = Payout {
            user_id: "ann".to_owned(),
            amount: testkit::messages::rubles("5.00"),
            status: PaymentStatus::Pending.code(),
            ..Payout::default()
        };
        state.payouts.insert("p-1".to_owned(), payout);
    });
    let channel = Channel::local(&testkit::in_memory(double.routes()), "sandbox.service");
    let client = PaymentsClient::new(channel, "cfa").with_policy(POLICY);
    (client, double)
}

/// Contexts of all attempts.
fn seen(double: &ServiceDoubles) -> Vec<RequestContext> {
    let seen = double.with(|state| state.payments_contexts.clone());
    assert!(seen.iter().all(|context| context.source == "cfa"));
    seen
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
    let (client, double) = client_with([unavailable, Fault::Late(Duration::from_secs(5))]);
    let context = Context::new("");
    let found = client.payout(&context, "p-1").await.unwrap();
    assert_eq!(found, Some(PaymentStatus::Pending));
    assert_eq!(seen(&double).len(), 3);
    assert!(
        seen(&double)
            .iter()
            .all(|context| context.idempotency_key.is_empty())
    );
}

// rows: R340 R341
#[tokio::test]
async fn r341_a_write_is_repeated_under_the_same_key_only() {
    let busy = [Code::Aborted, Code::ResourceExhausted].map(Fault::Code);
    let (client, double) = client_with(busy);
    let stored = initiate(&client, "p-1").await;
    assert!(stored.unwrap());
    let first = seen(&double);
    assert_eq!(first.len(), 3);
    assert_eq!(first[0].idempotency_key, "p-1:initiate");
    assert!(
        first.iter().all(|one| *one == first[0]),
        "every attempt sends the same message: {first:?}"
    );
    // A second call has its own key and request id.
    initiate(&client, "p-2").await.unwrap();
    let last = seen(&double).pop().unwrap();
    assert_eq!(last.idempotency_key, "p-2:initiate");
    assert_ne!(last.request_id, first[0].request_id);
}

#[tokio::test]
async fn a_refusal_passes_through_at_once_with_its_text() {
    for code in [
        Code::FailedPrecondition,
        Code::InvalidArgument,
        Code::AlreadyExists,
    ] {
        let (client, double) = client_with([Fault::Code(code)]);
        let refused = initiate(&client, "p-1").await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.to_string(), "no");
        assert!(!refused.is_unavailable());
        assert_eq!(Status::from(refused).code(), code);
        assert_eq!(seen(&double).len(), 1);
    }
    // A refusal of this service's own credential is not passed to its caller.
    let (client, _) = client_with([Fault::Code(Code::PermissionDenied)]);
    let refused = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert_eq!(Status::from(refused).code(), Code::Internal);
    // A read answers `None` for `NOT_FOUND`.
    let (client, _) = client_with([Fault::Code(Code::NotFound)]);
    assert_eq!(client.payout(&Context::new(""), "p-1").await.unwrap(), None);
}

#[tokio::test]
async fn an_unavailable_service_is_named_in_the_error() {
    let (client, double) = client_with([Fault::Code(Code::Unavailable); 4]);
    let unavailable = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert_eq!(seen(&double).len(), 3, "all attempts of the policy");
    assert_eq!(unavailable.to_string(), "Payments service is unavailable");
    assert!(matches!(&unavailable, CallError::Unavailable { reason, .. } if reason.contains("no")));
    let status = Status::from(unavailable);
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(rpc::status::reason(&status).as_deref(), Some("UNAVAILABLE"));

    let (client, double) = client_with([Fault::Code(Code::Unavailable)]);
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
    let (client, _) = client_with([late; 3]);
    let begun = Instant::now();
    let late = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert!(late.is_unavailable(), "{late:?}");
    assert!(begun.elapsed() < 10 * POLICY.call_timeout, "three attempts");

    let channel = Channel::remote("http://127.0.0.1:1", "sandbox.service").unwrap();
    let client = PaymentsClient::new(channel, "cfa").with_policy(POLICY);
    let unavailable = initiate(&client, "p-1").await;
    let unavailable = unavailable.unwrap_err();
    assert!(unavailable.is_unavailable(), "{unavailable:?}");
}
