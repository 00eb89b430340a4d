//! Attacks without credentials: datagrams, handshakes and connections that never log in.

use std::io::Read;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use transport::proto::{ClientConfig, ConnectionError, Endpoint as Proto, EndpointConfig};
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Key, Link};
use wire::{CONNECTION_CHANNEL, ClientMessage, Heartbeat, append};

use super::line::{self, SERVER_NAME, application_code};
use super::{Attack, Outcome, Target};
use crate::flow::Random;

/// Sends datagrams from one socket and counts the answers.
pub struct Datagrams {
    socket: UdpSocket,
    datagrams: Vec<Vec<u8>>,
    are_initials: bool,
    sent_bytes: u64,
    answers: u64,
    answered_bytes: u64,
    retries: u64,
}

impl Datagrams {
    /// Random bytes of random length.
    pub fn garbage(target: &Target) -> Self {
        let mut random = Random::new(crate::seed::seed(20_261_125));
        let datagram = |_| {
            let length = 1 + random.below(1_200);
            (0..length).map(|_| random.below(256) as u8).collect()
        };
        Self::of(target, (0..4_096).map(datagram).collect(), false)
    }

    /// Initial packets, each of another connection.
    pub fn handshakes(target: &Target) -> Self {
        let (now, config) = (Instant::now(), line::config());
        let mut proto = Proto::new(Arc::new(EndpointConfig::default()), None, true, None);
        let initial = |_| {
            let dialled = proto.connect(now, config.clone(), target.trading, SERVER_NAME);
            let (_, mut connection) = dialled.expect("a connection begins");
            let mut datagram = Vec::new();
            let transmit =
                connection.poll_transmit(now, 1.try_into().expect("not 0"), &mut datagram);
            datagram.truncate(transmit.expect("a first packet").size);
            datagram
        };
        Self::of(target, (0..4_096).map(initial).collect(), true)
    }

    fn of(target: &Target, datagrams: Vec<Vec<u8>>, are_initials: bool) -> Self {
        let socket = UdpSocket::bind(("127.0.0.1", 0)).expect("a socket");
        socket.connect(target.trading).expect("an address");
        socket.set_nonblocking(true).expect("a socket");
        Self {
            socket,
            datagrams,
            are_initials,
            sent_bytes: 0,
            answers: 0,
            answered_bytes: 0,
            retries: 0,
        }
    }
}

impl Attack for Datagrams {
    fn packet(&mut self, number: u64) {
        let datagram = &self.datagrams[number as usize % self.datagrams.len()];
        // A full socket buffer drops the datagram, as a network would.
        self.sent_bytes += self.socket.send(datagram).unwrap_or(0) as u64;
    }

    fn poll(&mut self) {
        let mut answer = [0; 2_048];
        while let Ok(length) = self.socket.recv(&mut answer) {
            self.answers += 1;
            self.answered_bytes += length as u64;
            // Long header, type 3: Retry.
            self.retries += u64::from(answer[0] & 0xf0 == 0xf0);
        }
    }

    fn finish(mut self: Box<Self>) -> Outcome {
        self.poll();
        let mut violations = Vec::new();
        if self.answered_bytes > 3 * self.sent_bytes {
            violations.push("answered with more than three times the bytes received".to_owned());
        }
        if self.are_initials && self.retries == 0 {
            violations.push("no handshake was answered by a Retry".to_owned());
        }
        Outcome {
            summary: format!(
                "{} bytes sent, {} answers of {} bytes, {} of them Retry",
                self.sent_bytes, self.answers, self.answered_bytes, self.retries
            ),
            violations,
        }
    }
}

/// Most idle connections per kind.
const IDLE_MAX: usize = 400;
/// Longest life of a QUIC connection without login: the login timeout, plus slack for a busy
/// machine.
const QUIC_MAX: Duration = Duration::from_secs(8);
/// Longest life of a silent TCP connection: the timeout of the first request, plus slack.
const TCP_MAX: Duration = Duration::from_secs(13);

/// Opens connections without a login: TCP connections that send nothing, QUIC connections that send
/// heartbeats.
pub struct Idle {
    trading: SocketAddr,
    rpc: SocketAddr,
    config: ClientConfig,
    endpoint: Endpoint<Instant>,
    ends: Ends,
    silent: Vec<TcpStream>,
    /// TCP connections that could not be opened.
    refused: u64,
    silent_closed: u64,
}

#[derive(Default)]
struct Ends {
    open: Vec<Key>,
    /// Ended since the last poll.
    ended: Vec<Key>,
    /// Closed because no session had logged in.
    expected: u64,
    other: u64,
    longest: Duration,
}

impl Driver<Instant> for Ends {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<Instant> {
        Incoming::Refuse
    }

    fn opened(&mut self, now: Instant, link: &mut Link<Instant>) {
        link.user = now;
        self.open.push(link.key());
    }

    fn data(&mut self, _: Instant, _: &mut Link<Instant>, bytes: &[u8]) -> ConsumedBytes {
        ConsumedBytes {
            bytes: bytes.len(),
            is_paused: false,
        }
    }

    fn finished(&mut self, _: Instant, _: &mut Link<Instant>) {}

    fn closed(&mut self, now: Instant, link: &mut Link<Instant>, reason: &ConnectionError) {
        self.longest = self.longest.max(now - link.user);
        if application_code(reason) == Some(wire::DisconnectCode::LoginExpected as u64) {
            self.expected += 1;
        } else {
            self.other += 1;
        }
        self.ended.push(link.key());
    }
}

impl Idle {
    pub fn begin(target: &Target) -> Self {
        Self {
            trading: target.trading,
            rpc: target.rpc,
            config: line::config(),
            endpoint: Endpoint::bind(([127, 0, 0, 1], 0).into(), None).expect("a socket"),
            ends: Ends::default(),
            silent: Vec::new(),
            refused: 0,
            silent_closed: 0,
        }
    }

    /// Opens one more connection of each kind.
    fn dial(&mut self) {
        let now = Instant::now();
        if self.endpoint.connections() < IDLE_MAX {
            let config = self.config.clone();
            let begun = self
                .endpoint
                .connect(now, config, self.trading, SERVER_NAME, now);
            begun.expect("a connection begins");
        }
        if self.silent.len() < IDLE_MAX {
            match TcpStream::connect(self.rpc) {
                Ok(stream) => {
                    stream.set_nonblocking(true).expect("a socket");
                    self.silent.push(stream);
                }
                Err(_) => self.refused += 1,
            }
        }
    }

    /// Removes the TCP connections that the platform has closed.
    fn remove_closed(&mut self) {
        let before = self.silent.len();
        self.silent.retain_mut(|stream| {
            let read = stream.read(&mut [0; 64]);
            matches!(read, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
        });
        self.silent_closed += (before - self.silent.len()) as u64;
    }
}

impl Attack for Idle {
    fn packet(&mut self, number: u64) {
        if number.is_multiple_of(100) {
            self.dial();
        }
        let open = &self.ends.open;
        if let Some(key) = open.get(number as usize % open.len().max(1))
            && let Some(link) = self.endpoint.link(*key)
        {
            let heartbeat: ClientMessage = Heartbeat {}.into();
            append(&heartbeat, CONNECTION_CHANNEL, 0, link.out());
            self.endpoint.flush(Instant::now(), &mut self.ends);
        }
    }

    fn poll(&mut self) {
        let now = Instant::now();
        while self
            .endpoint
            .receive(now, &mut self.ends)
            .expect("the socket works")
        {}
        self.endpoint.flush(now, &mut self.ends);
        for key in std::mem::take(&mut self.ends.ended) {
            self.ends.open.retain(|open| *open != key);
        }
    }

    fn finish(mut self: Box<Self>) -> Outcome {
        let begun = Instant::now();
        while begun.elapsed() < TCP_MAX && !(self.silent.is_empty() && self.ends.open.is_empty()) {
            self.poll();
            self.remove_closed();
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut violations = Vec::new();
        if self.ends.expected == 0 || !self.ends.open.is_empty() || self.ends.longest > QUIC_MAX {
            violations.push(format!(
                "a QUIC connection without login lived {:?}",
                self.ends.longest
            ));
        }
        if !self.silent.is_empty() {
            violations.push(format!(
                "{} silent TCP connections stay open",
                self.silent.len()
            ));
        }
        Outcome {
            summary: format!(
                "QUIC: {} ended by code 5 after {:.1} s at most, {} otherwise; TCP: {} closed, {} refused",
                self.ends.expected,
                self.ends.longest.as_secs_f64(),
                self.ends.other,
                self.silent_closed,
                self.refused
            ),
            violations,
        }
    }
}
