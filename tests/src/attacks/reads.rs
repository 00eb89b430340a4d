//! Reads over the RPC port. Each connection sends its next call after the answer to the last one.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use super::{Attack, Outcome, Target};
use crate::call::{AUDITOR, context, path_of};

/// Number of connections, each with at most one call in flight.
const CONNECTIONS: usize = 32;

struct Caller {
    stream: TcpStream,
    answer: Vec<u8>,
    is_waiting: bool,
}

/// Alternating calls of `GetOrderBook` and `GetMarketStatus`.
pub struct Reads {
    callers: Vec<Caller>,
    requests: [Vec<u8>; 2],
    sent: u64,
    lost: u64,
    /// Answers by HTTP status.
    answers: BTreeMap<String, u64>,
}

impl Reads {
    pub fn begin(target: &Target) -> Self {
        let caller = |_| {
            let stream = TcpStream::connect(target.rpc).expect("a connection");
            stream.set_nodelay(true).expect("a socket");
            stream.set_nonblocking(true).expect("a socket");
            Caller {
                stream,
                answer: Vec::new(),
                is_waiting: false,
            }
        };
        let book = json!({ "instrumentId": target.instrument_id, "depth": 100 });
        Self {
            callers: (0..CONNECTIONS).map(caller).collect(),
            requests: [
                request("market.GetOrderBook", book),
                request("market.GetMarketStatus", json!({})),
            ],
            sent: 0,
            lost: 0,
            answers: BTreeMap::new(),
        }
    }
}

/// Bytes of an HTTP/1.1 request for a call.
fn request(name: &str, mut body: Value) -> Vec<u8> {
    body["context"] = context();
    let (path, body) = (path_of(name), body.to_string());
    let length = body.len();
    format!(
        "POST /{path} HTTP/1.1\r\nhost: market\r\nauthorization: Bearer {AUDITOR}\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// HTTP status of an answer; `None` while it is incomplete.
fn status(answer: &[u8]) -> Option<String> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
    let field = |name: &str| {
        let mut lines = head.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
    };
    let is_complete = match field("content-length:") {
        Some(length) => answer.len() >= end + 4 + length.parse::<usize>().ok()?,
        None => answer.ends_with(b"0\r\n\r\n"),
    };
    is_complete.then(|| head.split(' ').nth(1).unwrap_or_default().to_owned())
}

impl Attack for Reads {
    fn packet(&mut self, number: u64) {
        let Some(caller) = self.callers.iter_mut().find(|caller| !caller.is_waiting) else {
            return;
        };
        let request = &self.requests[number as usize % 2];
        match caller.stream.write(request) {
            Ok(length) if length == request.len() => {
                caller.is_waiting = true;
                self.sent += 1;
            }
            _ => self.lost += 1,
        }
    }

    fn poll(&mut self) {
        let mut bytes = [0; 65_536];
        for caller in self.callers.iter_mut().filter(|caller| caller.is_waiting) {
            match caller.stream.read(&mut bytes) {
                Ok(length) if length > 0 => caller.answer.extend(&bytes[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                _ => {
                    self.lost += 1;
                    caller.is_waiting = false;
                }
            }
            if let Some(status) = status(&caller.answer) {
                *self.answers.entry(status).or_default() += 1;
                caller.answer.clear();
                caller.is_waiting = false;
            }
        }
    }

    fn finish(self: Box<Self>) -> Outcome {
        let mut violations = Vec::new();
        let is_unexpected = |status: &&String| !matches!(status.as_str(), "200" | "429");
        violations.extend(
            self.answers
                .keys()
                .find(is_unexpected)
                .map(|status| format!("answer {status}")),
        );
        if self.lost > 0 || !self.answers.contains_key("200") {
            violations.push(format!("{} calls lost", self.lost));
        }
        let answers = self.answers.iter();
        let answers: Vec<String> = answers
            .map(|(status, n)| format!("{status}: {n}"))
            .collect();
        Outcome {
            summary: format!("{} calls; {}", self.sent, answers.join(", ")),
            violations,
        }
    }
}
