//! Ports: limits that no test reaches, and raw sockets.

use std::time::Duration;

use rpc::{CallRateConfig, CallRates, ConnectionBudget, Limits};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::PATIENCE;

/// Limits that no test reaches.
pub fn patient() -> Limits {
    let hour = Duration::from_secs(3_600);
    Limits {
        first_request: hour,
        idle: hour,
        silence: hour,
        body: hour,
        http: hour,
        connections: ConnectionBudget::with_limits(1_000, 1_000, 1_000),
        rates: CallRates::new(CallRateConfig::NONE),
    }
}

/// Reads until the port closes the connection.
pub async fn until_closed(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    // A reset also closes the connection.
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
        .await
        .expect("closed");
    String::from_utf8_lossy(&answer).into_owned()
}

/// Reads up to and including `text`.
pub async fn until(stream: &mut TcpStream, text: &str) -> String {
    let mut answer = Vec::new();
    loop {
        let so_far = String::from_utf8_lossy(&answer).into_owned();
        if so_far.contains(text) {
            return so_far;
        }
        let read = tokio::time::timeout(PATIENCE, stream.read_buf(&mut answer)).await;
        let read = read.expect("in time").expect("read");
        assert_ne!(read, 0, "closed after {so_far}");
    }
}
