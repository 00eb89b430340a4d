//! Bounds of the bank's port: each at the bound and one past it.

use std::time::Duration;

use rpc::{ConnectionBudget, Limits};
use sandbox::bank::{BankConfig, BankHandle};
use tempfile::TempDir;
use testkit::ports::{patient, until, until_closed};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_util::sync::CancellationToken;

use crate::in_time;

const SHORT: Duration = Duration::from_millis(200);
const BODY_BYTES_MAX: usize = 64 * 1024;

struct Port {
    bank: BankHandle,
    stop: CancellationToken,
    _folder: TempDir,
}

impl Port {
    async fn within(limits: Limits) -> Port {
        let folder = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let config = BankConfig {
            data_dir: folder.path().into(),
            keys_dir: folder.path().join("keys"),
            listen: "127.0.0.1:0".parse().unwrap(),
            ..BankConfig::default()
        };
        let bank = sandbox::bank::start_within(config, limits, stop.clone())
            .await
            .unwrap();
        Port {
            bank,
            stop,
            _folder: folder,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.bank.address()).await.unwrap()
    }

    async fn stop(self) {
        self.stop.cancel();
        in_time("the bank's stop", self.bank.stopped()).await;
    }
}

async fn answered(stream: &mut TcpStream) {
    let request = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n";
    stream.write_all(request).await.unwrap();
    until(stream, "\"ok\"}").await;
}

fn order(body_bytes: usize) -> String {
    format!(
        "POST /bank/v1/transfers HTTP/1.1\r\nhost: h\r\n\
         content-type: application/json\r\ncontent-length: {body_bytes}\r\n\r\n"
    )
}

#[tokio::test]
async fn connections_over_the_bound_are_closed_and_open_ones_go_on() {
    let port = Port::within(Limits {
        connections: ConnectionBudget::with_limits(2, 2, 2),
        ..patient()
    })
    .await;
    let (mut first, mut second) = (port.connect().await, port.connect().await);
    answered(&mut first).await;
    answered(&mut second).await;
    assert_eq!(until_closed(&mut port.connect().await).await, "");
    answered(&mut first).await;
    port.stop().await;
}

#[tokio::test]
async fn a_connection_that_never_sends_a_request_is_closed() {
    let port = Port::within(Limits {
        first_request: SHORT,
        ..patient()
    })
    .await;
    for begun in ["", "POST /bank/v1/transfers HTTP/1.1\r\nhost: h\r\n"] {
        let mut stream = port.connect().await;
        stream.write_all(begun.as_bytes()).await.unwrap();
        let answer = until_closed(&mut stream).await;
        assert!(!answer.contains("200"), "{begun}: {answer}");
    }
    port.stop().await;
}

#[tokio::test]
async fn an_idle_connection_is_closed() {
    let port = Port::within(Limits {
        idle: SHORT,
        ..patient()
    })
    .await;
    let mut stream = port.connect().await;
    answered(&mut stream).await;
    assert_eq!(until_closed(&mut stream).await, "");
    port.stop().await;
}

#[tokio::test]
async fn an_overdue_body_is_refused() {
    let port = Port::within(Limits {
        body: SHORT,
        ..patient()
    })
    .await;
    let mut stream = port.connect().await;
    let begun = format!("{}{{", order(100));
    stream.write_all(begun.as_bytes()).await.unwrap();
    until(&mut stream, "did not arrive in time").await;
    port.stop().await;
}

#[tokio::test]
async fn the_body_limit_accepts_its_bound_and_refuses_one_byte_more() {
    let port = Port::within(patient()).await;
    // The bank checks the signature after it has read the body, and this request has none.
    for (bytes, status) in [(BODY_BYTES_MAX, "401"), (BODY_BYTES_MAX + 1, "413")] {
        let mut stream = port.connect().await;
        let request = order(bytes) + &" ".repeat(bytes);
        stream.write_all(request.as_bytes()).await.unwrap();
        until(&mut stream, &format!("HTTP/1.1 {status}")).await;
    }
    port.stop().await;
}
