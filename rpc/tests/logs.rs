//! All log lines of a request have the caller's correlation id, in every crate and service that the
//! request reaches.

mod common;

use std::sync::{Arc, Mutex};

use axum::{Router, body::Body, routing::post};
use common::{Bank, Port, TOKEN, in_time};
use proto::{
    common::v1::RequestContext,
    ledger::v1::{GetBalanceRequest, GetBalanceResponse},
    sandbox::v1::{PayRequest, sandbox_bank_service_client::SandboxBankServiceClient},
    unary::{BytesCodec, answer},
};
use rpc::{Channel, Health, Service};
use serde_json::Value;
use tonic::{Request, Response, Status, service::Routes};
use tracing::subscriber::DefaultGuard;

/// The log of this thread; a test's runtime uses only this one.
struct Lines {
    text: Arc<Mutex<Vec<u8>>>,
    _guard: DefaultGuard,
}

impl Lines {
    fn record() -> Lines {
        let text = Arc::<Mutex<Vec<u8>>>::default();
        let sink = text.clone();
        let write = move |line: &[u8]| sink.lock().unwrap().extend_from_slice(line);
        let subscriber = rpc::logging::subscriber("platform", "info", write).unwrap();
        Lines {
            text,
            _guard: tracing::subscriber::set_default(subscriber),
        }
    }

    /// Every line; each has the fields of every line.
    fn all(&self) -> Vec<Value> {
        let text = String::from_utf8(self.text.lock().unwrap().clone()).unwrap();
        assert!(text.ends_with('\n'));
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
            .collect();
        for line in &lines {
            for field in ["timestamp", "level", "service_name", "target", "message"] {
                assert!(line[field].is_string(), "{field}: {line}");
            }
            let time = line["timestamp"].as_str().unwrap();
            assert!(time.parse::<prost_types::Timestamp>().is_ok(), "{line}");
            let level = line["level"].as_str().unwrap();
            assert!(["INFO", "WARN", "ERROR"].contains(&level), "{line}");
        }
        lines
    }

    /// `service: message` of the lines with this correlation id, sorted.
    fn of(&self, correlation_id: &str) -> Vec<String> {
        let mut own = self.all();
        own.retain(|line| line["correlation_id"] == correlation_id);
        let text = |line: &Value, field: &str| line[field].as_str().unwrap().to_owned();
        let mut own: Vec<_> = own
            .iter()
            .map(|line| {
                assert_eq!(line["user_id"], "u1", "{line}");
                assert_eq!(line["trace_id"], "trace-1", "{line}");
                format!("{}: {}", text(line, "service_name"), text(line, "message"))
            })
            .collect();
        own.sort();
        own
    }
}

async fn get_balance(request: http::Request<Body>) -> http::Response<tonic::body::Body> {
    let method = tower::service_fn(|request: Request<GetBalanceRequest>| async move {
        rpc::context::record_read_context(request.into_inner().context);
        tracing::info!("balance read");
        Ok::<_, Status>(Response::new(GetBalanceResponse::default()))
    });
    let mut grpc = tonic::server::Grpc::new(BytesCodec);
    answer::<_, _, GetBalanceRequest, _>(&mut grpc, method, request).await
}

fn ledger() -> Service {
    let path = "/dfa.ledger.v1.LedgerService/GetBalance";
    Service {
        name: "ledger",
        routes: Routes::from(Router::new().route(path, post(get_balance))),
        http: Router::new(),
        health: Health::new("ledger"),
    }
}

fn pay(correlation_id: &str) -> PayRequest {
    PayRequest {
        context: Some(RequestContext {
            request_id: "r1".into(),
            correlation_id: correlation_id.into(),
            idempotency_key: "k1".into(),
            user_id: "u1".into(),
            trace_id: "trace-1".into(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

// rows: R259 R260 R004
#[tokio::test]
async fn r260_a_correlation_id_is_on_every_line_of_its_request_in_every_service() {
    let lines = Lines::record();
    let slot = testkit::in_memory(ledger().routes);
    let local = Bank::with_ledger(Channel::local(&slot, "sandbox.service"));
    let slot = testkit::in_memory(local.service().routes);
    SandboxBankServiceClient::new(Channel::local(&slot, "sandbox.investor.u1"))
        .pay(pay("corr-local"))
        .await
        .unwrap();

    let ledger_port = Port::serve(Bank::default(), vec![ledger()]).await;
    let ledger = Channel::remote(&ledger_port.url(""), "sandbox.service").unwrap();
    let remote = Bank::with_ledger(ledger);
    let port = Port::serve(remote.clone(), vec![remote.service()]).await;
    let caller = Channel::remote(&port.url(""), "sandbox.investor.u1").unwrap();
    let mut caller = SandboxBankServiceClient::new(caller);
    in_time(caller.pay(pay("corr-remote"))).await.unwrap();
    port.stop().await;
    ledger_port.stop().await;

    for correlation_id in ["corr-local", "corr-remote"] {
        assert_eq!(
            lines.of(correlation_id),
            [
                "ledger: balance read",
                "ledger: call",
                "sandbox: call",
                "sandbox: paid"
            ],
            "{:#?}",
            lines.all()
        );
    }
}

// rows: R259 R260
#[tokio::test]
async fn r259_lines_of_an_http_read_name_their_service_and_the_id_of_its_header() {
    let lines = Lines::record();
    let (first, second) = (Bank::default(), Bank::default());
    let mut other = second.service();
    other.name = "ledger";
    other.routes = Routes::default();
    let port = Port::serve(first.clone(), vec![first.service(), other]).await;
    for service in ["sandbox", "ledger"] {
        let path = format!("/{service}/transfers/t1");
        let read = port
            .builder("GET", &path, Some(TOKEN))
            .header("x-correlation-id", format!("corr-{service}"))
            .send();
        assert_eq!(in_time(read).await.unwrap().status(), 200, "{path}");
    }
    port.stop().await;
    let all = lines.all();
    for service in ["sandbox", "ledger"] {
        let correlation_id = format!("corr-{service}");
        let own: Vec<_> = all
            .iter()
            .filter(|line| line["correlation_id"] == *correlation_id)
            .collect();
        let [line] = own.as_slice() else {
            panic!("{own:?} of {service} in {all:#?}");
        };
        assert_eq!(line["message"], "read");
        assert_eq!(line["service_name"], service);
    }
}
