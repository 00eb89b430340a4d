//! All log lines of a request have the caller's correlation id, from any crate.

mod common;

use std::sync::{Arc, Mutex};

use common::{Bank, Port};
use proto::{
    common::v1::RequestContext,
    sandbox::v1::{PayRequest, sandbox_bank_service_client::SandboxBankServiceClient},
};
use rpc::{Channel, logging::JsonLines};
use serde_json::Value;
use tracing_subscriber::layer::SubscriberExt;

// rows: R259 R260 R004
#[tokio::test]
async fn r260_a_correlation_id_is_on_every_line_of_its_request() {
    let text = Arc::new(Mutex::new(Vec::<u8>::new()));
    let sink = text.clone();
    let layer = JsonLines::new("platform", move |line: &[u8]| {
        sink.lock().unwrap().extend_from_slice(line);
    });
    // The runtime uses only this thread.
    let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let slot = testkit::in_memory(Bank::default().service().routes);
    let pay = |correlation_id: &str| PayRequest {
        context: Some(RequestContext {
            request_id: "r1".into(),
            correlation_id: correlation_id.into(),
            idempotency_key: "k1".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    SandboxBankServiceClient::new(Channel::local(&slot, "sandbox.investor.u1"))
        .pay(pay("corr-local"))
        .await
        .unwrap();
    let port = Port::start().await;
    SandboxBankServiceClient::new(Channel::remote(&port.url(""), "sandbox.investor.u2").unwrap())
        .pay(pay("corr-remote"))
        .await
        .unwrap();
    port.stop().await;
    drop(guard);

    let text = String::from_utf8(text.lock().unwrap().clone()).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for (correlation_id, user_id) in [("corr-local", "u1"), ("corr-remote", "u2")] {
        let own: Vec<_> = lines
            .iter()
            .filter(|line| line["correlation_id"] == correlation_id)
            .collect();
        let messages: Vec<_> = own
            .iter()
            .map(|line| line["message"].as_str().unwrap())
            .collect();
        assert_eq!(messages, ["paid", "call"], "{text}");
        for line in own {
            assert_eq!(line["service_name"], "sandbox");
            assert_eq!(line["user_id"], user_id);
            assert_eq!(line["level"], "INFO");
        }
    }
}
