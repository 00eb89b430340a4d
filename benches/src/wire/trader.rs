//! A member that spins: one connection, some sessions, requests and reports without a task or a lock.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use transport::proto::{ClientConfig, ConnectionError};
use transport::{Driver, Endpoint, Incoming, Key, Link, Taken};
use wire::{ClientMessage, Header, InstrumentDefinition, Login, ServerMessage, Text, append};

/// Silence after which the member says that it is there.
const HEARTBEAT: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(20);

/// What has come, in order.
#[derive(Default)]
struct Inbox {
    messages: Vec<(Header, ServerMessage)>,
    is_open: bool,
    ended: Option<String>,
}

impl Driver<()> for Inbox {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Refuse
    }

    fn opened(&mut self, _: Instant, _: &mut Link<()>) {
        self.is_open = true;
    }

    fn data(&mut self, _: Instant, link: &mut Link<()>, bytes: &[u8]) -> Taken {
        let mut at = 0;
        loop {
            match wire::parse::<ServerMessage>(&bytes[at..]) {
                Ok(Some((header, message))) => {
                    at += usize::from(header.length);
                    self.messages.push((header, message));
                }
                Ok(None) => break,
                Err(error) => {
                    self.ended = Some(error.to_string());
                    link.close(0, "");
                    break;
                }
            }
        }
        Taken {
            bytes: at,
            is_paused: false,
        }
    }

    fn finished(&mut self, now: Instant, link: &mut Link<()>) {
        link.finish(now, 0, "");
    }

    fn closed(&mut self, _: Instant, _: &mut Link<()>, reason: &ConnectionError) {
        self.ended.get_or_insert_with(|| reason.to_string());
    }
}

/// A connected member.
pub struct Trader {
    endpoint: Endpoint<()>,
    inbox: Inbox,
    key: Key,
    instruments: Vec<InstrumentDefinition>,
    last_sent: Instant,
}

impl Trader {
    /// Connects to the exchange.
    ///
    /// # Errors
    /// No socket, or no connection in time.
    pub fn connect(to: SocketAddr, config: ClientConfig) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::bind(([127, 0, 0, 1], 0).into(), None)?;
        let now = Instant::now();
        let key = endpoint.connect(now, config, to, "cfa-trade", ())?;
        let mut trader = Self {
            endpoint,
            inbox: Inbox::default(),
            key,
            instruments: Vec::new(),
            last_sent: now,
        };
        while !trader.inbox.is_open {
            anyhow::ensure!(now.elapsed() < PATIENCE, "no connection");
            trader.poll()?;
        }
        Ok(trader)
    }

    /// Opens and logs in a session whose user has `kopecks` of cash reserved for trading.
    ///
    /// # Errors
    /// It is refused, or not answered in time.
    pub fn login(
        &mut self,
        channel: u16,
        user: &str,
        name: &str,
        kopecks: i64,
    ) -> anyhow::Result<()> {
        let login = Login {
            token: Text::new(&format!("sandbox.trader.{user}")).context("too long a user id")?,
            session_name: Text::new(name).context("too long a session name")?,
            last_sequence: 0,
            flags: 0,
            heartbeat_ms: 0,
            stp_group: 0,
            money_hold_minor: kopecks,
        };
        self.send(channel, 0, &login.into())?;
        self.flush();
        let since = Instant::now();
        loop {
            anyhow::ensure!(since.elapsed() < PATIENCE, "no answer to the login");
            self.poll()?;
            let (mut found, mut refused) = (false, None);
            let instruments = &mut self.instruments;
            for (_, message) in self.inbox.messages.drain(..) {
                match message {
                    ServerMessage::InstrumentDefinition(spec) => instruments.push(spec),
                    ServerMessage::LoginAccepted(_) => found = true,
                    ServerMessage::Disconnect(end) => refused = Some(end.text.as_str().to_owned()),
                    _ => {}
                }
            }
            if let Some(reason) = refused {
                anyhow::bail!("login refused: {reason}");
            }
            if found {
                return Ok(());
            }
        }
    }

    /// Number of an instrument on the wire.
    pub fn instrument(&self, id: &str) -> Option<u32> {
        let mut known = self.instruments.iter();
        known
            .find(|spec| spec.id.as_str() == id)
            .map(|spec| spec.instrument)
    }

    /// Appends a request; it leaves with [`Trader::flush`] or the next [`Trader::poll`].
    ///
    /// # Errors
    /// The connection has ended.
    #[inline]
    pub fn send(
        &mut self,
        channel: u16,
        client_seq: u64,
        message: &ClientMessage,
    ) -> anyhow::Result<()> {
        let link = self
            .endpoint
            .link(self.key)
            .context("the connection has ended")?;
        append(message, channel, client_seq, link.out());
        Ok(())
    }

    /// Sends what was appended.
    pub fn flush(&mut self) {
        self.last_sent = Instant::now();
        self.endpoint.flush(self.last_sent, &mut self.inbox);
    }

    /// One round; what has come is in [`Trader::take`].
    ///
    /// # Errors
    /// The connection has ended.
    #[inline]
    pub fn poll(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        if now.saturating_duration_since(self.last_sent) > HEARTBEAT {
            self.last_sent = now;
            self.send(wire::CONNECTION_CHANNEL, 0, &wire::Heartbeat {}.into())?;
        }
        self.endpoint.receive(now, &mut self.inbox)?;
        self.endpoint.flush(now, &mut self.inbox);
        match &self.inbox.ended {
            Some(reason) => anyhow::bail!("the connection has ended: {reason}"),
            None => Ok(()),
        }
    }

    /// Gives each message that has come to `each`.
    #[inline]
    pub fn take(&mut self, mut each: impl FnMut(&Header, &ServerMessage)) {
        for (header, message) in self.inbox.messages.drain(..) {
            each(&header, &message);
        }
    }
}
