//! One port with one service in every protocol: gRPC, gRPC-Web, Connect, HTTP reads, in-process
//! calls.

mod common;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::exposition::{Family, families};
use common::{BALANCE, Bank, Port, TOKEN, in_time};
use http::StatusCode;
use prost::Message;
use proto::{
    common::v1::RequestContext,
    sandbox::v1::{
        GetBankBalanceRequest, GetBankBalanceResponse, PayRequest, PayResponse,
        sandbox_bank_service_client::SandboxBankServiceClient,
    },
    unary::BytesCodec,
};
use rpc::{Authenticator, Channel, LocalSlot};
use serde_json::{Value, json};
use tonic::Code;
use tonic_types::StatusExt;

const READ: &str = "/dfa.sandbox.v1.SandboxBankService/GetBankBalance";
const WRITE: &str = "/dfa.sandbox.v1.SandboxBankService/Pay";

fn client(port: &Port, credential: &str) -> SandboxBankServiceClient<Channel> {
    SandboxBankServiceClient::new(Channel::remote(&port.url(""), credential).unwrap())
}

// rows: R001
#[tokio::test]
async fn r001_one_method_answers_every_protocol_alike() {
    let port = Port::start().await;
    let grpc = client(&port, TOKEN)
        .get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        grpc.balance
            .as_ref()
            .unwrap()
            .amount
            .as_ref()
            .unwrap()
            .value,
        BALANCE
    );

    let wanted = json!({"balance": {"currencyCode": "RUB", "amount": {"value": BALANCE}}});
    let post = port.post(READ, "application/json", "{}").await;
    assert_eq!(post.status(), StatusCode::OK);
    assert_eq!(post.headers()["content-type"], "application/json");
    assert_eq!(post.json::<Value>().await.unwrap(), wanted);

    let get = port
        .get(&format!("{READ}?connect=v1&encoding=json&message=%7B%7D"))
        .await;
    assert_eq!(get.json::<Value>().await.unwrap(), wanted);

    let proto = port.post(READ, "application/proto", "").await;
    assert_eq!(proto.bytes().await.unwrap(), grpc.encode_to_vec());

    let framed = [0_u8; 5];
    let web = port
        .post(READ, "application/grpc-web+proto", framed.to_vec())
        .await;
    let body = web.bytes().await.unwrap();
    let message = grpc.encode_to_vec();
    assert_eq!(body[5..5 + message.len()], message);
    assert!(String::from_utf8_lossy(&body).contains("grpc-status:0"));
}

#[tokio::test]
async fn connect_get_is_for_methods_without_side_effects_only() {
    let port = Port::start().await;
    let refused = port
        .get(&format!("{WRITE}?connect=v1&encoding=json&message=%7B%7D"))
        .await;
    assert_eq!(refused.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(port.bank.payments(), 0);
}

#[tokio::test]
async fn refusals_keep_their_text_reason_and_details_in_every_protocol() {
    let port = Port::start().await;
    let status = client(&port, TOKEN)
        .pay(PayRequest::default())
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let violations = status.get_details_bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "context.request_id");
    assert_eq!(violations[1].field, "context.idempotency_key");

    let answer = port.post(WRITE, "application/json", "{}").await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    let body = answer.json::<Value>().await.unwrap();
    assert_eq!(body["code"], "invalid_argument");
    let fields = body["details"]
        .as_array()
        .unwrap()
        .iter()
        .find(|detail| detail["type"] == "google.rpc.BadRequest")
        .unwrap();
    assert_eq!(
        fields["debug"]["fieldViolations"][1]["field"],
        "context.idempotency_key"
    );

    let unknown = port
        .post(WRITE, "application/json", r#"{"qrPayloat": "x"}"#)
        .await;
    assert_eq!(unknown.status(), StatusCode::BAD_REQUEST);
    let garbage = port.post(WRITE, "application/json", "not json").await;
    assert_eq!(garbage.status(), StatusCode::BAD_REQUEST);
    let garbage = port
        .post(WRITE, "application/proto", "\u{7}\u{7}\u{7}")
        .await;
    assert_eq!(garbage.status(), StatusCode::BAD_REQUEST);
    let refusal = garbage.json::<Value>().await.unwrap();
    assert_eq!(refusal["code"], "invalid_argument");
    assert_eq!(port.bank.payments(), 0);
}

// rows: R332
#[tokio::test]
async fn r332_without_a_credential_nothing_is_answered_but_health_and_metrics() {
    let port = Port::start().await;
    for (path, media_type) in [
        (READ, "application/json"),
        (READ, "application/proto"),
        (WRITE, "application/json"),
        ("/transfers/t1", "application/json"),
        ("/no/such/path", "application/json"),
    ] {
        let answer = port.request("POST", path, None, media_type, "{}").await;
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(answer.headers()["www-authenticate"], "Bearer");
        assert_eq!(
            answer.json::<Value>().await.unwrap()["code"],
            "unauthenticated"
        );
    }
    let bad = port
        .request("POST", READ, Some("sandbox.root"), "application/json", "{}")
        .await;
    assert_eq!(bad.status(), StatusCode::UNAUTHORIZED);
    for media_type in ["application/grpc", "application/grpc-web"] {
        let answer = port.request("POST", READ, None, media_type, "").await;
        assert_eq!(answer.headers()["grpc-status"], "16", "{media_type}");
    }
    let status = client(&port, "nonsense")
        .get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    for open in ["/health", "/livez", "/readyz", "/metrics"] {
        let answer = port.request("GET", open, None, "text/plain", "").await;
        assert_eq!(answer.status(), StatusCode::OK, "{open}");
    }
}

// rows: R333
#[tokio::test]
async fn r333_a_role_without_a_row_is_refused_in_every_protocol() {
    let port = Port::start().await;
    let investor = "sandbox.investor.u1";
    let status = client(&port, investor)
        .get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    let connect = port
        .request("POST", READ, Some(investor), "application/json", "{}")
        .await;
    assert_eq!(connect.status(), StatusCode::FORBIDDEN);
    let read = port
        .request("GET", "/transfers/t1", Some(investor), "", "")
        .await;
    assert_eq!(read.status(), StatusCode::FORBIDDEN);
    let unknown = "/dfa.sandbox.v1.SandboxBankService/Rob";
    let unknown = port.post(unknown, "application/json", "{}").await;
    assert_eq!(unknown.status(), StatusCode::NOT_IMPLEMENTED);
    // The handler of an admitted method sees the caller.
    let context = RequestContext {
        request_id: "r1".into(),
        idempotency_key: "k1".into(),
        ..Default::default()
    };
    let paid = client(&port, investor)
        .pay(PayRequest {
            context: Some(context),
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(paid.get_ref().transaction_id, "by u1");
    assert_eq!(paid.metadata().get("idempotent-replayed").unwrap(), "true");
}

#[tokio::test]
async fn http_reads_answer_resources_and_errors_in_their_forms() {
    let port = Port::start().await;
    let found = port.get("/transfers/t1").await;
    assert_eq!(found.status(), StatusCode::OK);
    assert_eq!(
        found.json::<Value>().await.unwrap(),
        json!({"transferId": "t1", "status": "SUCCESS"})
    );
    let missing = port.get("/transfers/t2").await;
    assert_eq!(missing.status(), StatusCode::NOT_FOUND);
    let body = missing.json::<Value>().await.unwrap();
    assert_eq!(body["code"], "not_found");
    assert_eq!(body["message"], "Transfer not found");
    assert_eq!(body["details"][0]["debug"]["reason"], "TRANSFER_NOT_FOUND");
    let bad_query = port.get("/transfers/t1?verbose=perhaps").await;
    assert_eq!(bad_query.status(), StatusCode::BAD_REQUEST);
    assert_eq!(
        bad_query.json::<Value>().await.unwrap()["code"],
        "invalid_argument"
    );
    let bad_verb = port.post("/transfers/t1", "application/json", "{}").await;
    assert_eq!(bad_verb.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(bad_verb.headers()["allow"], "GET,HEAD");
    assert_eq!(
        bad_verb.json::<Value>().await.unwrap()["code"],
        "unimplemented"
    );
    let nowhere = port.get("/nowhere").await;
    assert_eq!(nowhere.status(), StatusCode::NOT_FOUND);
    assert_eq!(nowhere.json::<Value>().await.unwrap()["code"], "not_found");
}

// rows: R261
#[tokio::test]
async fn r261_health_is_ok_or_names_the_failing_part() {
    let port = Port::start().await;
    let answer = port.get("/health").await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(
        answer.json::<Value>().await.unwrap(),
        json!({"status": "ok"})
    );

    let mut health = tonic_health::pb::health_client::HealthClient::new(
        Channel::remote(&port.url(""), "none").unwrap(),
    );
    let service = "dfa.sandbox.v1.SandboxBankService";
    let asked = tonic_health::pb::HealthCheckRequest {
        service: service.into(),
    };
    let mut watch = health.watch(asked.clone()).await.unwrap().into_inner();
    let serving = tonic_health::pb::health_check_response::ServingStatus::Serving as i32;
    while in_time(watch.message()).await.unwrap().unwrap().status != serving {}

    port.bank.health.set_failing("kafka", "no broker");
    let answer = port.get("/health").await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        answer.json::<Value>().await.unwrap(),
        json!({"status": "failing", "failing": [{"service": "sandbox", "part": "kafka", "reason": "no broker"}]})
    );
    assert_eq!(
        port.get("/readyz").await.status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(port.get("/livez").await.status(), StatusCode::OK);
    while in_time(watch.message()).await.unwrap().unwrap().status == serving {}
    port.bank.health.set_ok("kafka");
    assert_eq!(port.get("/health").await.status(), StatusCode::OK);

    // A finding in the data takes no port out of service.
    while in_time(watch.message()).await.unwrap().unwrap().status != serving {}
    port.bank.health.set_finding("breaks", Some("BOND-1: 1"));
    let answer = port.get("/health").await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        answer.json::<Value>().await.unwrap()["failing"],
        json!([{"service": "sandbox", "part": "breaks", "reason": "BOND-1: 1"}])
    );
    assert_eq!(port.get("/readyz").await.status(), StatusCode::OK);
    port.bank.health.set_finding("breaks", None);
    assert_eq!(port.get("/health").await.status(), StatusCode::OK);
}

async fn scrape(port: &Port) -> BTreeMap<String, Family> {
    let answer = port.get("/metrics").await;
    assert_eq!(
        answer.headers()["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    let text = answer.text().await.unwrap();
    families(&text).unwrap_or_else(|wrong| panic!("{wrong}\n{text}"))
}

// rows: R262
#[tokio::test]
async fn r262_metrics_are_prometheus_text_with_calls_by_method_and_code() {
    // The recorder is process-wide: no other test calls this method or records the names below.
    let method = "/dfa.sandbox.v1.SandboxBankService/SetFault";
    let port = Port::start().await;
    let before = scrape(&port).await;
    for _ in 0..3 {
        let refused = port.post(method, "application/json", "{}").await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
    metrics::gauge!("r262_level", "side" => "a \"quoted\" \\ one\n").set(3.0);
    metrics::counter!("r262_events_total").increment(2);
    let after = scrape(&port).await;
    let value = |of: &BTreeMap<String, Family>, name: &str, series: &str| {
        let sample = of.get(name).and_then(|family| family.samples.get(series));
        sample.copied().unwrap_or(0.0)
    };
    let calls = format!(r#"rpc_requests_total{{method="{method}",code="unavailable"}}"#);
    let durations = format!(r#"rpc_duration_seconds_count{{method="{method}"}}"#);
    for (name, series) in [
        ("rpc_requests_total", calls.as_str()),
        ("rpc_duration_seconds", durations.as_str()),
    ] {
        let grown = value(&after, name, series) - value(&before, name, series);
        assert_eq!(grown, 3.0, "{series} of {:#?}", after.get(name));
    }
    let level = r#"r262_level{side="a \"quoted\" \\ one\n"}"#;
    assert_eq!(value(&after, "r262_level", level), 3.0);
    assert_eq!(value(&after, "r262_events_total", "r262_events_total"), 2.0);
    for (name, kind) in [
        ("rpc_requests_total", "counter"),
        ("rpc_duration_seconds", "histogram"),
        ("r262_level", "gauge"),
        ("r262_events_total", "counter"),
    ] {
        assert_eq!(after[name].kind, kind, "{name}");
    }
}

#[test]
fn the_check_of_the_metrics_refuses_what_promtool_refuses() {
    const SAMPLE: &str = r#"a{x="1"} 2"#;
    let good = "# HELP a Text.\n# TYPE a counter\na{x=\"1\"} 2\n\n# TYPE h histogram\n\
                h_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 3\nh_count 2\n";
    assert_eq!(families(good).unwrap()["a"].samples[r#"a{x="1"}"#], 2.0);
    for (from, to) in [
        ("h_count 2\n", "h_count 2"),
        ("# TYPE a counter\n", ""),
        ("counter", "number"),
        ("# TYPE h", "# TYPE a counter\n# TYPE h"),
        (SAMPLE, r#"a{x="1"} -2"#),
        (SAMPLE, r#"a{x="1"} two"#),
        (SAMPLE, r#"a{x="1"}"#),
        (SAMPLE, r#"a{x="1} 2"#),
        (SAMPLE, r#"a{x="\d"} 2"#),
        (SAMPLE, r#"a{x="1"y="2"} 2"#),
        (SAMPLE, r#"a{x="1",x="2"} 2"#),
        (SAMPLE, r#"a{9x="1"} 2"#),
        (SAMPLE, r#"a-b{x="1"} 2"#),
        (SAMPLE, "a{x=\"1\"} 2\na{x=\"1\"} 2"),
        ("h_sum 3\n", ""),
        ("h_count 2", "h_count 3"),
        ("le=\"1\"} 1", "le=\"1\"} 3"),
        ("le=\"+Inf\"", "le=\"5\""),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        assert!(families(&bad).is_err(), "accepted: {bad}");
    }
}

#[tokio::test]
async fn messages_are_accepted_up_to_one_mebibyte_and_not_past_it() {
    let port = Port::start().await;
    let context = || {
        Some(RequestContext {
            request_id: "r1".into(),
            idempotency_key: "k1".into(),
            ..Default::default()
        })
    };
    let overhead = Padded::of(context(), rpc::MESSAGE_BYTES_MAX - 100).encoded_len()
        - (rpc::MESSAGE_BYTES_MAX - 100);
    for (past, allowed) in [(0, true), (1, false)] {
        let request = Padded::of(context(), rpc::MESSAGE_BYTES_MAX - overhead + past);
        assert_eq!(request.encoded_len(), rpc::MESSAGE_BYTES_MAX + past);
        let connect = port
            .post(WRITE, "application/proto", request.encode_to_vec())
            .await;
        let grpc = pay_padded(&port, TOKEN, request).await;
        if allowed {
            assert_eq!(connect.status(), StatusCode::OK);
            grpc.unwrap();
        } else {
            assert_eq!(connect.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(grpc.unwrap_err().code(), Code::ResourceExhausted);
        }
    }
}

/// A PayRequest with a field that the server does not know: of any size.
#[derive(Clone, PartialEq, prost::Message)]
struct Padded {
    #[prost(message, optional, tag = "1")]
    context: Option<RequestContext>,
    #[prost(bytes = "vec", tag = "60")]
    padding: Vec<u8>,
}

impl Padded {
    fn of(context: Option<RequestContext>, bytes: usize) -> Self {
        let padding = vec![b'x'; bytes];
        Padded { context, padding }
    }
}

async fn pay_padded(port: &Port, credential: &str, request: Padded) -> Result<(), tonic::Status> {
    let channel = Channel::remote(&port.url(""), credential).unwrap();
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static(WRITE);
    let called = proto::unary::call(&mut grpc, tonic::Request::new(request), path, BytesCodec);
    let answer: Result<tonic::Response<PayResponse>, _> = called.await;
    answer.map(drop)
}

type Raw = http::Request<axum::body::Body>;

async fn marked(request: Raw) -> http::Response<tonic::body::Body> {
    let method = tower::service_fn(
        |request: tonic::Request<GetBankBalanceRequest>| async move {
            let mark = request.metadata().get("x-mark").expect("a mark").clone();
            let mut late = http::HeaderMap::new();
            late.insert("x-late", http::HeaderValue::from_static("late"));
            let mut response = tonic::Response::new(GetBankBalanceResponse::default());
            response.metadata_mut().insert("x-mark", mark);
            response.extensions_mut().insert(rpc::Trailers(late));
            Ok::<_, tonic::Status>(response)
        },
    );
    let mut grpc = tonic::server::Grpc::new(BytesCodec);
    proto::unary::answer::<_, _, GetBankBalanceRequest, _>(&mut grpc, method, request).await
}

async fn garbled(request: Raw) -> http::Response<tonic::body::Body> {
    let method = tower::service_fn(|_: tonic::Request<Bytes>| async {
        let answer = Bytes::from_static(&[0x0a, 0x7f]);
        Ok::<_, tonic::Status>(tonic::Response::new(answer))
    });
    let mut grpc = tonic::server::Grpc::new(BytesCodec);
    grpc.unary(method, request).await
}

#[tokio::test]
async fn a_call_keeps_metadata_and_the_extensions_of_its_answer() {
    let routes = axum::Router::new().route(READ, axum::routing::post(marked));
    let slot = testkit::in_memory(tonic::service::Routes::from(routes));
    let mut request = tonic::Request::new(GetBankBalanceRequest::default());
    request
        .metadata_mut()
        .insert("x-mark", "m1".parse().unwrap());
    let mut bank = SandboxBankServiceClient::new(Channel::local(&slot, TOKEN));
    let answer = in_time(bank.get_bank_balance(request)).await.unwrap();
    assert_eq!(answer.metadata().get("x-mark").unwrap(), "m1");
    assert_eq!(answer.metadata().get("x-late").unwrap(), "late");
}

#[tokio::test]
async fn an_answer_that_is_no_message_is_an_internal_error() {
    let routes = axum::Router::new().route(READ, axum::routing::post(garbled));
    let slot = testkit::in_memory(tonic::service::Routes::from(routes));
    let mut bank = SandboxBankServiceClient::new(Channel::local(&slot, TOKEN));
    let asked = bank.get_bank_balance(GetBankBalanceRequest::default());
    assert_eq!(in_time(asked).await.unwrap_err().code(), Code::Internal);
}

#[tokio::test]
async fn services_may_send_each_other_larger_messages() {
    let port = Port::start().await;
    let context = Some(RequestContext {
        request_id: "r1".into(),
        idempotency_key: "k1".into(),
        ..Default::default()
    });
    let request = Padded::of(context, 4 * rpc::MESSAGE_BYTES_MAX);
    let answer = pay_padded(&port, "sandbox.service", request).await;
    answer.expect("accepted");
}

#[tokio::test]
async fn a_deadline_ends_a_call_that_hangs() {
    let port = Port::start().await;
    port.bank.hang();
    let mut request = tonic::Request::new(GetBankBalanceRequest::default());
    request.set_timeout(Duration::from_millis(50));
    let status = in_time(client(&port, TOKEN).get_bank_balance(request))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    let answer = in_time(
        port.builder("POST", READ, Some(TOKEN))
            .header("content-type", "application/json")
            .header("connect-timeout-ms", "50")
            .body("{}")
            .send(),
    )
    .await
    .unwrap();
    assert_eq!(answer.status(), StatusCode::GATEWAY_TIMEOUT);
}

/// D33: the default deadline.
// rows: R341
#[tokio::test]
async fn r341_a_call_without_a_deadline_ends_after_ten_seconds() {
    let bank = Bank::default();
    bank.hang();
    let slot = testkit::in_memory(bank.service().routes);
    let mut hanging = SandboxBankServiceClient::new(Channel::local(&slot, TOKEN));
    let started = Instant::now();
    let asked = hanging.get_bank_balance(GetBankBalanceRequest::default());
    let status = in_time(asked).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(started.elapsed() >= Duration::from_secs(10));
}

#[tokio::test]
async fn shutdown_lets_calls_finish_and_cuts_what_hangs() {
    let port = Port::start().await;
    port.bank.hang();
    let mut hanging = client(&port, TOKEN);
    let mut request = tonic::Request::new(GetBankBalanceRequest::default());
    request.set_timeout(Duration::from_secs(60));
    let call = tokio::spawn(async move { hanging.get_bank_balance(request).await });
    in_time(port.bank.entered()).await;
    // `stop` returns although the call never ends.
    in_time(port.stop()).await;
    assert!(in_time(call).await.unwrap().is_err());
}

#[tokio::test]
async fn reflection_names_the_services_of_the_port() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let port = Port::start().await;
    let channel = Channel::remote(&port.url(""), "none").unwrap();
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(tokio_stream::iter([request]))
        .await
        .unwrap()
        .into_inner();
    let answer = in_time(answers.message()).await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("no list");
    };
    let names: Vec<_> = list
        .service
        .into_iter()
        .map(|service| service.name)
        .collect();
    assert!(
        names.contains(&"dfa.sandbox.v1.SandboxBankService".to_owned()),
        "{names:?}"
    );
    assert!(!names.contains(&"dfa.ledger.v1.LedgerService".to_owned()));
}

#[tokio::test]
async fn browsers_may_call_from_any_origin_with_a_token() {
    let port = Port::start().await;
    let asked = port
        .builder("OPTIONS", READ, None)
        .header("origin", "https://console.example")
        .header("access-control-request-method", "POST")
        .header(
            "access-control-request-headers",
            "authorization,connect-protocol-version,content-type",
        )
        .send();
    let answer = in_time(asked).await.unwrap();
    assert!(answer.status().is_success());
    assert_eq!(answer.headers()["access-control-allow-origin"], "*");
    let allowed = answer.headers()["access-control-allow-headers"]
        .to_str()
        .unwrap();
    assert!(allowed.contains("authorization") && allowed.contains("connect-protocol-version"));
}

// rows: R332 R333
#[tokio::test]
async fn r333_calls_in_process_pass_the_same_layer() {
    let bank = Bank::default();
    let slot = LocalSlot::new();
    let channel = Channel::local(&slot, "sandbox.auditor");
    // The call is made first; the service is wired later.
    let mut early = SandboxBankServiceClient::new(channel.clone());
    let waiting = tokio::spawn(async move {
        early
            .get_bank_balance(GetBankBalanceRequest::default())
            .await
    });
    tokio::task::yield_now().await;
    slot.fill(rpc::with_auth(
        bank.service().routes,
        &Authenticator::Sandbox,
    ));
    assert!(in_time(waiting).await.unwrap().is_ok());
    let refused = SandboxBankServiceClient::new(channel.clone())
        .pay(PayRequest::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let unknown = channel.with_credential("unknown").unwrap();
    let refused = SandboxBankServiceClient::new(unknown)
        .get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert_eq!(
        rpc::status::reason(&refused).as_deref(),
        Some("CREDENTIALS_INVALID")
    );
}

#[tokio::test]
async fn a_cleared_slot_is_unavailable_at_once() {
    let slot = LocalSlot::new();
    let mut client = SandboxBankServiceClient::new(Channel::local(&slot, "sandbox.auditor"));
    slot.fill(rpc::with_auth(
        Bank::default().service().routes,
        &Authenticator::Sandbox,
    ));
    slot.clear();
    let away = client
        .get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap_err();
    assert_eq!(away.code(), Code::Unavailable);
    assert_eq!(away.message(), "SandboxBankService is unavailable");
    assert!(away.get_details_retry_info().is_some());
}

#[tokio::test]
async fn a_port_with_several_services_keeps_their_reads_apart() {
    let (first, second) = (Bank::default(), Bank::default());
    let mut other = second.service();
    other.name = "ledger";
    other.routes = tonic::service::Routes::default();
    let port = Port::serve(first.clone(), vec![first.service(), other]).await;
    for path in ["/sandbox/transfers/t1", "/ledger/transfers/t1"] {
        assert_eq!(port.get(path).await.status(), StatusCode::OK, "{path}");
    }
    assert_eq!(
        port.get("/transfers/t1").await.status(),
        StatusCode::NOT_FOUND
    );
}
