//! Limits and timeouts of a port: connections, first requests, bodies, idle time, reads, panics.

mod common;

use std::{convert::Infallible, time::Duration};

use axum::{Router, body::Body, routing::get};
use common::{BALANCE, Port, TOKEN, in_time};
use http::StatusCode;
use proto::{
    common::v1::RequestContext,
    sandbox::v1::{
        GetBankBalanceRequest, ListTransfersRequest, PayRequest,
        sandbox_bank_service_client::SandboxBankServiceClient,
    },
};
use rpc::{Channel, ConnectionBudget, Limits};
use serde_json::Value;
use testkit::ports::{patient, until, until_closed};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic_types::StatusExt;

const READ: &str = "/dfa.sandbox.v1.SandboxBankService/GetBankBalance";
const LIST: &str = "/dfa.sandbox.v1.SandboxBankService/ListTransfers";
const PAY: &str = "/dfa.sandbox.v1.SandboxBankService/Pay";
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The preface and an empty SETTINGS frame.
const HTTP2_SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

const SHORT: Duration = Duration::from_millis(200);

fn client(port: &Port) -> SandboxBankServiceClient<Channel> {
    SandboxBankServiceClient::new(Channel::remote(&port.url(""), TOKEN).unwrap())
}

async fn connect(port: &Port) -> TcpStream {
    TcpStream::connect(port.address()).await.unwrap()
}

fn head(path: &str, body_bytes: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {TOKEN}\r\n\
         content-type: application/json\r\ncontent-length: {body_bytes}\r\n\r\n"
    )
}

async fn answered(stream: &mut TcpStream) {
    let request = format!("{}{{}}", head(READ, 2));
    stream.write_all(request.as_bytes()).await.unwrap();
    until(stream, BALANCE).await;
}

#[tokio::test]
async fn connections_over_the_bound_are_closed_and_open_ones_go_on() {
    let port = Port::within(Limits {
        connections: ConnectionBudget::with_limits(8, 8, 8),
        ..patient()
    })
    .await;
    let mut first = connect(&port).await;
    answered(&mut first).await;
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(connect(&port).await);
    }
    // The first connection and seven of these are within the limit.
    for stream in &mut silent[7..] {
        assert_eq!(until_closed(stream).await, "");
    }
    answered(&mut first).await;
    answered(&mut silent[6]).await;
    drop(silent);
    // Closed connections make room for new ones.
    in_time(async {
        while client(&port)
            .get_bank_balance(GetBankBalanceRequest::default())
            .await
            .is_err()
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let metrics = rpc::metrics_init().render();
    assert!(metrics.contains(r#"rpc_connections_refused_total{bound="address"}"#));
}

#[tokio::test]
async fn a_connection_that_never_sends_a_request_is_closed() {
    let port = Port::within(Limits {
        first_request: SHORT,
        ..patient()
    })
    .await;
    for begun in [
        &b""[..],
        b"PRI * HT",
        HTTP2_PREFACE,
        HTTP2_SETTINGS,
        b"POST /x HTTP/1.1\r\nhost: h\r\n",
    ] {
        let mut stream = connect(&port).await;
        stream.write_all(begun).await.unwrap();
        let answer = until_closed(&mut stream).await;
        assert!(!answer.contains("200"), "{begun:?}: {answer}");
    }
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_a_stream_is_not_idle() {
    let port = Port::within(Limits {
        idle: SHORT,
        ..patient()
    })
    .await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(
        Channel::remote(&port.url(""), "none").unwrap(),
    );
    let asked = tonic_health::pb::HealthCheckRequest::default();
    let mut watch = health.watch(asked).await.unwrap().into_inner();
    in_time(watch.message()).await.unwrap().unwrap();

    let mut stream = connect(&port).await;
    answered(&mut stream).await;
    assert_eq!(until_closed(&mut stream).await, "");
    // An HTTP/2 client is told to close and opens another connection.
    let mut bank = client(&port);
    for _ in 0..2 {
        let read = bank.get_bank_balance(GetBankBalanceRequest::default());
        in_time(read).await.unwrap();
        tokio::time::sleep(3 * SHORT).await;
    }
    let still = tokio::time::timeout(SHORT, watch.message()).await;
    assert!(still.is_err(), "the stream has ended: {still:?}");
}

#[tokio::test]
async fn an_unread_stream_loses_its_connection() {
    let endless = futures::stream::repeat_with(|| Ok::<_, Infallible>(vec![0_u8; 65_536]));
    let app = Router::new().route("/endless", get(async || Body::from_stream(endless)));
    let limits = Limits {
        silence: SHORT,
        connections: ConnectionBudget::with_limits(1, 1, 1),
        ..patient()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(rpc::serve::listen_within(
        listener,
        app,
        limits,
        stop.clone(),
    ));
    let request = b"GET /endless HTTP/1.1\r\nhost: h\r\n\r\n";
    let mut unread = TcpStream::connect(address).await.unwrap();
    unread.write_all(request).await.unwrap();
    until(&mut unread, "200 OK").await;
    in_time(async {
        loop {
            let mut next = TcpStream::connect(address).await.unwrap();
            // A connection above the limit is closed at once.
            let _ = next.write_all(request).await;
            if matches!(next.read_u8().await, Ok(b'H')) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    stop.cancel();
}

#[tokio::test]
async fn a_late_body_is_refused_in_the_protocol_of_the_request() {
    let port = Port::within(Limits {
        body: SHORT,
        ..patient()
    })
    .await;
    for path in [PAY, "/transfers/t1"] {
        let mut stream = connect(&port).await;
        stream.write_all(head(path, 10).as_bytes()).await.unwrap();
        stream.write_all(b"{").await.unwrap();
        let answer = until(&mut stream, r#""code":"#).await;
        // A read needs no body and is answered without it.
        let expected = if path == PAY { "504" } else { "405" };
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {expected}")),
            "{answer}"
        );
    }
    assert_eq!(port.bank.payments(), 0);
    // gRPC: the prefix of a message arrives and the message does not.
    let mut stream = connect(&port).await;
    let head = head(PAY, 14).replace("application/json", "application/grpc-web+proto");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&[0, 0, 0, 0, 9]).await.unwrap();
    until(&mut stream, "grpc-status: 4").await;
}

#[tokio::test]
async fn an_http_read_has_a_time_limit() {
    let port = Port::within(Limits {
        http: SHORT,
        ..patient()
    })
    .await;
    let answer = port.get("/transfers/hangs").await;
    assert_eq!(answer.status(), StatusCode::GATEWAY_TIMEOUT);
    let body = answer.json::<Value>().await.unwrap();
    assert_eq!(body["code"], "deadline_exceeded");
    assert_eq!(port.get("/transfers/t1").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_panic_is_an_internal_error_in_every_protocol() {
    let port = Port::start().await;
    let mut bank = client(&port);
    port.bank.panics(true);
    let refused = bank
        .get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Internal, "Internal error")
    );
    let connect = port.post(READ, "application/json", "{}").await;
    assert_eq!(connect.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(connect.json::<Value>().await.unwrap()["code"], "internal");
    let web = port
        .post(READ, "application/grpc-web+proto", vec![0_u8; 5])
        .await;
    assert_eq!(web.status(), StatusCode::OK);
    let status = match web.headers().get("grpc-status") {
        Some(status) => status.to_str().unwrap().to_owned(),
        None => web.text().await.unwrap(),
    };
    assert!(status.contains("13"), "{status}");
    let read = port.get("/transfers/panics").await;
    assert_eq!(read.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(
        read.json::<Value>().await.unwrap()["message"],
        "Internal error"
    );
    let slot = testkit::in_memory(port.bank.service().routes);
    let refused = SandboxBankServiceClient::new(Channel::local(&slot, TOKEN))
        .get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Internal);
    // The connection remains usable.
    port.bank.panics(false);
    bank.get_bank_balance(GetBankBalanceRequest::default())
        .await
        .unwrap();
    let metrics = port.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains(&format!(r#"rpc_panics_total{{method="{READ}"}}"#)));
}

fn pay(seconds: i64) -> PayRequest {
    PayRequest {
        context: Some(RequestContext {
            request_id: "r1".into(),
            idempotency_key: "k1".into(),
            occurred_at: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[tokio::test]
async fn d49_a_time_out_of_range_is_refused_by_its_field_in_every_protocol() {
    let port = Port::start().await;
    let slot = testkit::in_memory(port.bank.service().routes);
    let mut local = SandboxBankServiceClient::new(Channel::local(&slot, TOKEN));
    let gzip = tonic::codec::CompressionEncoding::Gzip;
    let mut compressed = client(&port).send_compressed(gzip);
    for refused in [
        client(&port).pay(pay(0)).await.unwrap_err(),
        local.pay(pay(i64::MAX)).await.unwrap_err(),
        compressed.pay(pay(-62_135_596_800)).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::InvalidArgument);
        let violations = refused.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "context.occurred_at");
        assert_eq!(
            rpc::status::reason(&refused).as_deref(),
            Some("INVALID_ARGUMENT")
        );
    }
    let json = r#"{"context":{"requestId":"r1","idempotencyKey":"k1","occurredAt":"0001-01-01T00:00:00Z"}}"#;
    let answer = port.post(PAY, "application/json", json).await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    let body = answer.json::<Value>().await.unwrap();
    assert_eq!(
        body["message"],
        "context.occurred_at: must be a time of the years 2000 to 2100"
    );
    assert_eq!(port.bank.payments(), 0);
    client(&port).pay(pay(1_700_000_000)).await.unwrap();
    // Bytes that are not a message are also the caller's error.
    let garbage = port
        .post(PAY, "application/proto", vec![0x0a_u8, 0x7f])
        .await;
    assert_eq!(garbage.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_stored_time_out_of_range_is_shown_clamped() {
    let port = Port::start().await;
    let answer = port.post(LIST, "application/json", "{}").await;
    assert_eq!(answer.status(), StatusCode::OK);
    let body = answer.json::<Value>().await.unwrap();
    assert_eq!(
        body["transfers"][0]["createdAt"],
        "9999-12-31T23:59:59.999999999Z"
    );
    // A binary answer is sent as the handler returned it.
    let listed = client(&port)
        .list_transfers(ListTransfersRequest::default())
        .await
        .unwrap();
    assert_eq!(listed.into_inner().transfers.len(), 1);
}

async fn pay_bytes(channel: Channel, message: &'static [u8]) -> Result<(), tonic::Status> {
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.unwrap();
    let request = tonic::Request::new(bytes::Bytes::from_static(message));
    let path = http::uri::PathAndQuery::from_static(PAY);
    let answer = grpc.unary(request, path, proto::unary::BytesCodec).await;
    answer.map(drop)
}

#[tokio::test]
async fn bytes_that_are_no_request_are_refused_over_grpc_and_in_process() {
    let port = Port::start().await;
    let slot = testkit::in_memory(port.bank.service().routes);
    let remote = Channel::remote(&port.url(""), TOKEN).unwrap();
    for channel in [remote, Channel::local(&slot, TOKEN)] {
        let refused = in_time(pay_bytes(channel, &[0x0a, 0x7f]))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        let message = refused.message();
        assert!(
            message.starts_with("request: is not a PayRequest: "),
            "{message}"
        );
        let violations = refused.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "request");
    }
    assert_eq!(port.bank.payments(), 0);
}
