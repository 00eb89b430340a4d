//! A request to an unknown method is answered before its body has ended.

use std::net::SocketAddr;

use tests::call::OPERATOR;
use tests::grpc;
use tests::process::PATIENCE;
use tests::shared::{platform, run};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_stream::StreamExt;
use tonic::Code;

/// Of a known service.
const METHOD: &str = "dfa.ledger.v1.LedgerService/NoSuchMethod";

/// Status and body, once the answer is complete. A chunked body ends with an empty chunk.
fn complete(answer: &[u8]) -> Option<(u16, String)> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().expect("a status");
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.parse::<usize>().expect("a length"))
    });
    let is_complete = match length {
        Some(length) => body.len() >= length,
        None => body.ends_with("0\r\n\r\n"),
    };
    is_complete.then(|| (status, body.to_owned()))
}

/// Sends a part of the body over HTTP/1.1; returns the answer. The rest is never sent.
async fn answer_to_a_part(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let begun = format!(
        "POST /{path} HTTP/1.1\r\nhost: platform\r\nauthorization: Bearer {OPERATOR}\r\n\
         content-type: application/json\r\ncontent-length: 100000\r\n\r\n{{\"context\":"
    );
    stream.write_all(begun.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    loop {
        if let Some(complete) = complete(&answer) {
            return complete;
        }
        let read = tokio::time::timeout(PATIENCE, stream.read_buf(&mut answer)).await;
        let read = read.unwrap_or_else(|_| panic!("no answer at {address} to /{path}"));
        let so_far = String::from_utf8_lossy(&answer);
        assert_ne!(read.expect("read"), 0, "closed after {so_far}");
    }
}

/// The body's own time limit has another status: 504.
// rows: R325
#[test]
fn r325_an_unknown_method_is_answered_over_http_1_before_its_body_ends() {
    run(async {
        let platform = platform().await;
        for (listener, status) in [
            ("all", 501),
            ("ledger", 501),
            ("market", 501),
            ("bank", 404),
            ("chain_rpc", 404),
        ] {
            let address = platform.address(listener);
            let answer = answer_to_a_part(address, METHOD).await;
            assert_eq!(answer.0, status, "{listener}: {}", answer.1);
            assert!(
                answer.1.contains(r#""unimplemented""#) && answer.1.contains("Unknown method"),
                "{listener}: {}",
                answer.1
            );
            let missing = answer_to_a_part(address, "no/such/path").await;
            assert_eq!(missing.0, 404, "{listener}: {}", missing.1);
        }
    });
}

// rows: R325
#[test]
fn r325_an_unknown_method_is_answered_over_grpc_before_its_stream_ends() {
    run(async {
        let platform = platform().await;
        for listener in ["all", "ledger", "market", "bank", "chain_rpc"] {
            let endless = tokio_stream::once(Vec::new()).chain(tokio_stream::pending());
            let asked = grpc::streamed(platform, listener, OPERATOR, METHOD, endless);
            let answer = tokio::time::timeout(PATIENCE, asked).await;
            let answer = answer.unwrap_or_else(|_| panic!("no answer at {listener}"));
            let refusal = answer.expect_err("an unknown method");
            assert_eq!(
                (refusal.code(), refusal.message()),
                (Code::Unimplemented, "Unknown method"),
                "{listener}"
            );
        }
    });
}
