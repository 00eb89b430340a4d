//! The call policy against a payments service that is unavailable or late, or that refuses.

use std::sync::Arc;
use std::time::Duration;

use proto::common::v1::RequestContext;
use proto::payments::v1::Payout;
use rpc::{Channel, Context};
use service_clients::{CallError, PaymentStatus, PaymentsClient, Policy};
use testkit::{Fault, ServiceDoubles};
use tonic::{Code, Status};
use types::Minor;

const POLICY: Policy = Policy {
    call_timeout: Duration::from_secs(2),
    max_attempts: 3,
    initial_backoff: Duration::from_millis(10),
};

/// An answer that no test waits for.
const LATE: Fault = Fault::Late(Duration::from_secs(600));

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
fn attempt_contexts(double: &ServiceDoubles) -> Vec<RequestContext> {
    let contexts = double.with(|state| state.payments_contexts.clone());
    assert!(contexts.iter().all(|context| context.source == "cfa"));
    contexts
}

/// Initiates a payout. `false`: the id has a payout of another user or amount.
async fn initiate(client: &PaymentsClient, id: &str) -> Result<bool, CallError> {
    let context = Context::new("");
    client
        .initiate_payout(&context, id, "ann", Minor(500), "40817")
        .await
}

// rows: R340 R341
#[tokio::test]
async fn r340_a_read_is_retried_within_max_attempts() {
    let unavailable = Fault::Code(Code::Unavailable);
    let (client, double) = client_with([unavailable, LATE]);
    let context = Context::new("");
    let found = client.payout(&context, "p-1").await.unwrap();
    assert_eq!(found, Some(PaymentStatus::Pending));
    assert_eq!(attempt_contexts(&double).len(), 3);
    assert!(
        attempt_contexts(&double)
            .iter()
            .all(|context| context.idempotency_key.is_empty())
    );
}

// rows: R340 R341
#[tokio::test]
async fn r341_a_write_is_retried_under_the_same_key() {
    let busy = [Code::Aborted, Code::ResourceExhausted].map(Fault::Code);
    let (client, double) = client_with(busy);
    let is_own_payout = initiate(&client, "p-1").await.unwrap();
    assert!(is_own_payout);
    let first = attempt_contexts(&double);
    assert_eq!(first.len(), 3);
    assert_eq!(first[0].idempotency_key, "p-1:initiate");
    assert!(
        first.iter().all(|one| *one == first[0]),
        "every attempt sends the same context: {first:?}"
    );
    // A second call has its own key and request id.
    initiate(&client, "p-2").await.unwrap();
    let last = attempt_contexts(&double).pop().unwrap();
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
        assert_eq!(attempt_contexts(&double).len(), 1);
    }
}

#[tokio::test]
async fn a_refused_credential_is_internal() {
    // If the called service refuses our credential, our caller gets INTERNAL.
    let (client, _) = client_with([Fault::Code(Code::PermissionDenied)]);
    let refused = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert_eq!(Status::from(refused).code(), Code::Internal);
}

#[tokio::test]
async fn not_found_is_none() {
    // A read returns `None` for `NOT_FOUND`.
    let (client, _) = client_with([Fault::Code(Code::NotFound)]);
    assert_eq!(client.payout(&Context::new(""), "p-1").await.unwrap(), None);
}

#[tokio::test]
async fn an_unavailable_service_is_named_in_the_error() {
    let (client, double) = client_with([Fault::Code(Code::Unavailable); 4]);
    let unavailable = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert_eq!(
        attempt_contexts(&double).len(),
        3,
        "all attempts of the policy"
    );
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
    assert_eq!(attempt_contexts(&double).len(), 1);
}

#[tokio::test]
async fn a_late_answer_and_a_closed_port_are_unavailable() {
    let (client, double) = client_with([LATE; 3]);
    let late = client.payout(&Context::new(""), "p-1").await.unwrap_err();
    assert!(late.is_unavailable(), "{late:?}");
    assert_eq!(
        attempt_contexts(&double).len(),
        3,
        "each attempt has its own deadline"
    );

    let channel = Channel::remote("http://127.0.0.1:1", "sandbox.service").unwrap();
    let client = PaymentsClient::new(channel, "cfa").with_policy(POLICY);
    let unavailable = initiate(&client, "p-1").await;
    let unavailable = unavailable.unwrap_err();
    assert!(unavailable.is_unavailable(), "{unavailable:?}");
}
