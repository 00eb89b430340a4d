//! A member's connection without the client library's rules. It sends any message under any client
//! sequence, one datagram per flush, and only counts the answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use transport::proto::{ClientConfig, ConnectionError};
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Key, Link};
use wire::{
    ALPN, CONNECTION_CHANNEL, ClientMessage, DisconnectCode, Header, Heartbeat, LOGIN_FROM_NOW,
    Login, ServerMessage, Text, append, parse,
};

use crate::process::PATIENCE;
use crate::quic::client_config;

/// Server name in the TLS handshake.
pub const SERVER_NAME: &str = "cfa-trade";
/// Bytes waiting in the stream's buffer at which [`Line::append`] refuses more.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Time between the heartbeats of [`Line::wait`].
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Counts of the server's messages.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Answers to requests, by message or reject reason.
    pub answers: BTreeMap<&'static str, u64>,
    /// Accepted logins.
    pub logins: u64,
    /// Last client sequence that the exchange had seen at the login, by channel.
    pub last_seqs: BTreeMap<u16, u64>,
    /// Number of the next numbered message, by channel.
    pub next_numbers: BTreeMap<u16, u64>,
    /// Numbered messages, repeated ones included.
    pub numbered: u64,
    /// Numbered messages whose predecessor was not received.
    pub gaps: u64,
    /// `Disconnect` messages, by code.
    pub ends: BTreeMap<u64, u64>,
}

impl Counts {
    pub fn of(&self, name: &str) -> u64 {
        self.answers.get(name).copied().unwrap_or(0)
    }

    pub fn answered(&self) -> u64 {
        self.answers.values().sum()
    }

    /// Logins that were accepted, or refused with code `TooManySessions`.
    pub fn answered_logins(&self) -> u64 {
        let code = u64::from(DisconnectCode::TooManySessions.code());
        self.logins + self.ends.get(&code).copied().unwrap_or(0)
    }

    fn count(&mut self, header: &Header, message: &ServerMessage) {
        if header.sequence > 0 {
            let next = self.next_numbers.entry(header.channel).or_default();
            self.numbered += 1;
            self.gaps += u64::from(header.sequence > *next);
            *next = (*next).max(header.sequence + 1);
        }
        let name = match message {
            ServerMessage::Rejected(m) => m.reason.as_str(),
            ServerMessage::LoginAccepted(m) => {
                self.logins += 1;
                self.last_seqs.insert(header.channel, m.last_client_seq);
                self.next_numbers.insert(header.channel, m.next_sequence);
                return;
            }
            ServerMessage::Disconnect(m) => {
                *self.ends.entry(u64::from(m.code)).or_default() += 1;
                return;
            }
            other if other.answers() == 0 => return,
            ServerMessage::OrderAck(_) => "order",
            ServerMessage::Cancelled(_) => "cancelled",
            ServerMessage::MassCancelled(_) => "mass cancelled",
            _ => "other",
        };
        *self.answers.entry(name).or_default() += 1;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let answers = self
            .answers
            .iter()
            .map(|(name, count)| format!("{name} {count}"));
        let ends = self
            .ends
            .iter()
            .map(|(code, count)| format!("end {code}: {count}"));
        let all: Vec<String> = answers.chain(ends).collect();
        f.write_str(&all.join(", "))
    }
}

/// One connection on its own socket.
pub struct Line {
    endpoint: Endpoint<()>,
    key: Key,
    inbox: Inbox,
}

struct Inbox {
    counts: Counts,
    is_open: bool,
    /// False: flow control grants the server no further credit.
    reads: bool,
    /// Application code of the close; inner `None` for any other end.
    ended: Option<Option<u64>>,
}

impl Driver<()> for Inbox {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Refuse
    }

    fn opened(&mut self, _: Instant, _: &mut Link<()>) {
        self.is_open = true;
    }

    fn data(&mut self, _: Instant, link: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        let mut at = 0;
        while self.reads {
            match parse::<ServerMessage>(&bytes[at..]) {
                Ok(Some((header, message))) => {
                    at += usize::from(header.length);
                    self.counts.count(&header, &message);
                }
                Ok(None) => break,
                Err(_) => {
                    link.close(1, "");
                    break;
                }
            }
        }
        ConsumedBytes {
            bytes: at,
            is_paused: !self.reads,
        }
    }

    fn finished(&mut self, _: Instant, link: &mut Link<()>) {
        link.close(0, "");
    }

    fn closed(&mut self, _: Instant, _: &mut Link<()>, reason: &ConnectionError) {
        self.ended.get_or_insert(application_code(reason));
    }
}

/// Code with which the server's application closed a connection.
pub fn application_code(reason: &ConnectionError) -> Option<u64> {
    match reason {
        ConnectionError::ApplicationClosed(close) => Some(close.error_code.into_inner()),
        _ => None,
    }
}

fn login(token: &str, session: &str, flags: u8) -> ClientMessage {
    Login {
        token: Text::new(token).expect("a short token"),
        session_name: Text::new(session).expect("a short name"),
        last_sequence: 0,
        flags,
        heartbeat_ms: 0,
        stp_group: 0,
        money_hold_minor: 0,
    }
    .into()
}

/// Client configuration of [`Line::open`].
pub fn config() -> ClientConfig {
    client_config(ALPN)
}

impl Line {
    /// Connects and opens the stream.
    ///
    /// # Panics
    /// If that takes longer than [`PATIENCE`].
    pub fn open(server: SocketAddr, config: ClientConfig) -> Self {
        let mut endpoint = Endpoint::bind(([127, 0, 0, 1], 0).into(), None).expect("a socket");
        let key = endpoint.connect(Instant::now(), config, server, SERVER_NAME, ());
        let mut line = Self {
            endpoint,
            key: key.expect("a connection begins"),
            inbox: Inbox {
                counts: Counts::default(),
                is_open: false,
                reads: true,
                ended: None,
            },
        };
        line.until("the connection to open", |inbox| inbox.is_open);
        line
    }

    /// Polls until a condition holds.
    ///
    /// # Panics
    /// If it does not hold within a minute, or the connection ends before.
    fn until(&mut self, what: &str, done: impl Fn(&Inbox) -> bool) {
        let begun = Instant::now();
        while !done(&self.inbox) {
            let lost = self.inbox.ended.is_some() || begun.elapsed() > PATIENCE;
            assert!(
                !lost,
                "timed out or ended while waiting for {what}: {:?}, {}",
                self.inbox.ended, self.inbox.counts
            );
            std::thread::sleep(Duration::from_micros(100));
            self.poll();
        }
    }

    /// Login message that requests no earlier messages of the session.
    pub fn login_message(token: &str, session: &str, flags: u8) -> ClientMessage {
        login(token, session, flags | LOGIN_FROM_NOW)
    }

    /// Login message that requests all messages of the session.
    pub fn resume_message(token: &str, session: &str) -> ClientMessage {
        login(token, session, 0)
    }

    /// Logs a session in and waits until the login is accepted.
    pub fn login(&mut self, channel: u16, token: &str, session: &str, flags: u8) {
        let expected = self.inbox.counts.logins + 1;
        self.append(channel, 0, &Self::login_message(token, session, flags));
        self.until("a login", |inbox| inbox.counts.logins >= expected);
    }

    /// Appends a message; [`Line::flush`] or [`Line::poll`] sends it. False if the buffer is full.
    pub fn append(&mut self, channel: u16, client_seq: u64, message: &ClientMessage) -> bool {
        match self.endpoint.link(self.key) {
            Some(link) if link.waiting_bytes() < WAITING_BYTES_MAX => {
                append(message, channel, client_seq, link.out());
                true
            }
            _ => false,
        }
    }

    /// Sends the appended messages.
    pub fn flush(&mut self) {
        self.endpoint.flush(Instant::now(), &mut self.inbox);
    }

    /// Receives and sends.
    pub fn poll(&mut self) {
        let now = Instant::now();
        while self
            .endpoint
            .receive(now, &mut self.inbox)
            .expect("the socket works")
        {}
        self.endpoint.flush(now, &mut self.inbox);
    }

    /// Polls until this many requests are answered, the connection ends or `patience` has elapsed.
    pub fn drain(&mut self, requests: u64, patience: Duration) {
        self.wait(patience, |counts| counts.answered() >= requests);
    }

    /// Polls until `done`, the connection ends or `patience` has elapsed. Sends heartbeats, without
    /// which the exchange would end the connection.
    pub fn wait(&mut self, patience: Duration, done: impl Fn(&Counts) -> bool) {
        let begun = Instant::now();
        let mut heartbeat_at = begun;
        while !done(&self.inbox.counts) && self.inbox.ended.is_none() && begun.elapsed() < patience
        {
            if Instant::now() >= heartbeat_at {
                self.append(CONNECTION_CHANNEL, 0, &Heartbeat {}.into());
                heartbeat_at += HEARTBEAT_INTERVAL;
            }
            self.poll();
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Stops reading for good.
    pub fn stop_reading(&mut self) {
        self.inbox.reads = false;
    }

    pub fn counts(&self) -> &Counts {
        &self.inbox.counts
    }

    /// How the connection ended; `None` while it is open. The inner value is the code with which
    /// the server's application closed it, if it did.
    pub fn ended(&self) -> Option<Option<u64>> {
        self.inbox.ended
    }

    /// Datagrams sent.
    pub fn packets(&mut self) -> u64 {
        let link = self.endpoint.link(self.key);
        link.map_or(0, |link| link.packets().sent)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(link) = self.endpoint.link(self.key) {
            link.close(0, "");
        }
        self.flush();
    }
}
