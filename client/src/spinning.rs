//! The spinning driver: [`Sessions`] on [`transport`], polled by a thread with a dedicated core.
//!
//! Nothing happens between two calls. [`Connection::connect`], [`Connection::login`] and
//! [`Connection::resume`] poll until they are answered. No other call waits. In the steady state
//! this library allocates nothing per message.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use transport::proto::{ClientConfig, ConnectionError};
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Key, Link};
use wire::{ClientMessage, InstrumentDefinition};

use crate::sessions::{Event, LOGIN_TIMEOUT, Report, SessionInfo, Sessions};
use crate::{Error, LoginOptions, Trust, endpoint};

/// Number of undelivered reports at which reading pauses.
const REPORTS_MAX: usize = 1 << 16;
/// Bytes in the stream's buffer at which no more are moved to it. Further requests stay in the
/// bounded send buffer of [`Sessions`].
const STREAM_BYTES_MAX: usize = 64 << 10;

/// Sessions over one QUIC stream, driven by the caller.
pub struct Connection {
    server: SocketAddr,
    config: ClientConfig,
    endpoint: Endpoint<()>,
    key: Key,
    inbox: Inbox,
}

/// State received from the connection.
struct Inbox {
    sessions: Sessions,
    reports: VecDeque<Report>,
    /// Login answers that are not yet returned to the caller.
    answers: Vec<(u16, Result<SessionInfo, Error>)>,
    is_open: bool,
    /// Error that ended the connection.
    ended: Option<Error>,
}

impl Driver<()> for Inbox {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Refuse
    }

    fn opened(&mut self, now: Instant, _: &mut Link<()>) {
        self.is_open = true;
        self.sessions.connected(now);
    }

    fn data(&mut self, now: Instant, link: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        let mut at = 0;
        while self.reports.len() < REPORTS_MAX {
            match self.sessions.receive(now, &bytes[at..]) {
                Ok(Some((length, event))) => {
                    at += length;
                    self.event(link, event);
                }
                Ok(None) => {
                    return ConsumedBytes {
                        bytes: at,
                        is_paused: false,
                    };
                }
                Err(error) => {
                    self.end(link, error);
                    break;
                }
            }
        }
        // Too many undelivered reports, so flow control pauses the server, or the connection ended.
        ConsumedBytes {
            bytes: at,
            is_paused: true,
        }
    }

    fn finished(&mut self, _: Instant, link: &mut Link<()>) {
        self.end(link, Error::Stream);
    }

    fn closed(&mut self, _: Instant, _: &mut Link<()>, reason: &ConnectionError) {
        self.sessions.disconnected();
        self.ended
            .get_or_insert_with(|| Error::of_close(reason.clone()));
    }
}

impl Inbox {
    #[inline]
    fn event(&mut self, link: &mut Link<()>, event: Event) {
        match event {
            Event::Report(report) => self.reports.push_back(report),
            Event::LoggedIn { report, info } => {
                self.reports.push_back(report);
                self.answers.push((report.channel, Ok(info)));
            }
            Event::LoginFailed { channel, error } => self.answers.push((channel, Err(error))),
            Event::Ended { report, error } => {
                self.reports.push_back(report);
                self.end(link, error);
            }
            Event::Ignored => {}
        }
    }

    fn end(&mut self, link: &mut Link<()>, error: Error) {
        self.sessions.disconnected();
        self.ended.get_or_insert(error);
        link.close(0, "");
    }
}

impl Connection {
    /// Connects; no session is logged in yet.
    ///
    /// # Errors
    /// [`Error::TrustNotAllowed`], no socket, or no connection within ten seconds.
    pub fn connect(server: SocketAddr, trust: &Trust) -> Result<Self, Error> {
        let config = endpoint::config(trust, server)?;
        let (endpoint, key) = dial(server, &config)?;
        let mut connection = Self {
            server,
            config,
            endpoint,
            key,
            inbox: Inbox {
                sessions: Sessions::new(),
                reports: VecDeque::with_capacity(1_024),
                answers: Vec::new(),
                is_open: false,
                ended: None,
            },
        };
        connection.poll_until_open()?;
        Ok(connection)
    }

    /// Logs a session in on an unused channel (0 to 63), and polls until the answer arrives.
    ///
    /// # Errors
    /// The server's rejection, [`Error::LoginTimeout`], or the end of the connection.
    pub fn login(&mut self, channel: u16, options: LoginOptions) -> Result<SessionInfo, Error> {
        self.inbox.sessions.login(channel, options)?;
        let answer = self.poll_login(channel);
        if matches!(answer, Err(Error::LoginTimeout)) {
            self.inbox.sessions.forget(channel);
        }
        answer
    }

    /// Appends a message. [`Connection::flush`] or the next [`Connection::poll`] sends it. Returns
    /// the client sequence of the request, 0 if the message has none, `None` if the send buffer is
    /// full.
    ///
    /// # Errors
    /// [`Error::NotLoggedIn`], [`Error::TooManyUnanswered`].
    #[inline]
    pub fn send(&mut self, channel: u16, message: &ClientMessage) -> Result<Option<u64>, Error> {
        self.inbox.sessions.send(channel, message)
    }

    /// Sends the appended messages.
    #[inline]
    pub fn flush(&mut self) {
        let now = Instant::now();
        self.transmit(now);
        self.endpoint.flush(now, &mut self.inbox);
    }

    /// Receives, and sends the appended messages and due heartbeats. [`Connection::recv`] returns
    /// the received reports, also after an error.
    ///
    /// # Errors
    /// The connection is lost: call [`Connection::resume`], or stop.
    #[inline]
    pub fn poll(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        if self
            .inbox
            .sessions
            .poll_timeout()
            .is_some_and(|at| at <= now)
        {
            self.inbox.sessions.handle_timeout(now);
        }
        loop {
            let received = self.endpoint.receive(now, &mut self.inbox);
            received.map_err(|e| Error::Endpoint(Arc::new(e)))?;
            // A caller that sleeps on the descriptor is not woken for datagrams that are left.
            if !self.endpoint.has_datagrams() {
                break;
            }
        }
        self.transmit(now);
        self.endpoint.flush(now, &mut self.inbox);
        match &self.inbox.ended {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// The next received report.
    #[inline]
    pub fn recv(&mut self) -> Option<Report> {
        self.inbox.reports.pop_front()
    }

    /// Last number received in a session's stream.
    pub fn last_sequence(&self, channel: u16) -> u64 {
        self.inbox.sessions.last_sequence(channel)
    }

    /// Instruments that the server has announced; complete once a login has returned.
    pub fn instruments(&self) -> impl Iterator<Item = &InstrumentDefinition> {
        self.inbox.sessions.instruments()
    }

    /// Connects again after a loss and logs every session in. Missed messages arrive through
    /// [`Connection::recv`]. Requests that the server has not seen are sent again in their original
    /// order. Fails if one session cannot be resumed: drop it with [`Connection::forget`] and call
    /// again.
    ///
    /// # Errors
    /// As [`Connection::connect`] and [`Connection::login`].
    pub fn resume(&mut self) -> Result<Vec<(u16, SessionInfo)>, Error> {
        self.cut();
        self.inbox.sessions.disconnected();
        self.inbox.answers.clear();
        (self.inbox.is_open, self.inbox.ended) = (false, None);
        (self.endpoint, self.key) = dial(self.server, &self.config)?;
        self.poll_until_open()?;
        let asked = self.inbox.sessions.resume()?;
        let mut infos = Vec::with_capacity(asked.len());
        for channel in asked {
            infos.push((channel, self.poll_login(channel)?));
        }
        self.flush();
        Ok(infos)
    }

    /// Drops a session. Its messages are ignored, and its requests are not sent again.
    pub fn forget(&mut self, channel: u16) {
        self.inbox.sessions.forget(channel);
    }

    /// Closes the connection without a logout. [`Connection::poll`] returns the loss.
    pub fn cut(&mut self) {
        if let Some(link) = self.endpoint.link(self.key) {
            link.close(0, "");
        }
        self.endpoint.flush(Instant::now(), &mut self.inbox);
    }

    /// Moves the appended bytes into the stream.
    #[inline]
    fn transmit(&mut self, now: Instant) {
        let sessions = &mut self.inbox.sessions;
        if sessions.waiting_bytes() == 0 {
            return;
        }
        if let Some(link) = self.endpoint.link(self.key)
            && link.waiting_bytes() < STREAM_BYTES_MAX
        {
            sessions.poll_transmit(now, link.out());
        }
    }

    /// Polls until the stream is open.
    fn poll_until_open(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        while !self.inbox.is_open {
            self.poll()?;
            if begun.elapsed() > LOGIN_TIMEOUT {
                return Err(Error::LoginTimeout);
            }
        }
        Ok(())
    }

    /// Polls until the login of a channel is answered.
    fn poll_login(&mut self, channel: u16) -> Result<SessionInfo, Error> {
        let begun = Instant::now();
        loop {
            let answers = &mut self.inbox.answers;
            if let Some(at) = answers.iter().position(|(of, _)| *of == channel) {
                return answers.swap_remove(at).1;
            }
            if begun.elapsed() > LOGIN_TIMEOUT {
                return Err(Error::LoginTimeout);
            }
            self.poll()?;
        }
    }
}

/// The socket, for a caller that sleeps until a datagram arrives. Timers run only in
/// [`Connection::poll`], so the caller must still call it every few milliseconds.
impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.cut();
    }
}

/// Starts a connection on its own socket.
fn dial(server: SocketAddr, config: &ClientConfig) -> Result<(Endpoint<()>, Key), Error> {
    let bound = Endpoint::bind(endpoint::local(server), None);
    let mut endpoint = bound.map_err(|e| Error::Endpoint(Arc::new(e)))?;
    let now = Instant::now();
    let key = endpoint.connect(now, config.clone(), server, endpoint::SERVER_NAME, ())?;
    Ok((endpoint, key))
}
