//! A connection with its sessions: connect, log in, send, resume.
//!
//! Sending never waits for an answer: a request is numbered and put into a buffer that a writer task empties,
//! so many requests share a packet and requests of all channels keep the order of the calls. After a loss,
//! [`Connection::resume`] connects again, logs every session in, receives what was missed through the same
//! [`Reports`] and sends again only what the server has not seen, in the old order.

use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;
use wire::{
    CHANNELS_MAX, ClientMessage, DisconnectCode, InstrumentDefinition, LOGIN_CANCEL_ON_DISCONNECT,
    LOGIN_FROM_NOW, Login, LoginAccepted, ServerMessage, Text, WireError, encode,
};

use crate::Trust;
use crate::channel::Channel;
use crate::endpoint;
use crate::io;

/// Bytes waiting to be written at which `send` waits for the connection.
const OUTBOUND_LEN_MAX: usize = 1 << 20;
/// Reports waiting to be taken at which the connection is no longer read.
const REPORTS_MAX: usize = 1 << 16;
/// How long connecting and one login may take.
const LOGIN_TIMEOUT_MS: u64 = 10_000;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("certificate checks can be skipped for loopback addresses only")]
    TrustNotAllowed,
    #[error("endpoint: {0}")]
    Endpoint(#[source] Arc<std::io::Error>),
    #[error("tls: {0}")]
    Tls(String),
    #[error("connect: {0}")]
    Connect(#[from] quinn::ConnectError),
    #[error("connection lost: {0}")]
    Lost(#[from] quinn::ConnectionError),
    #[error("stream closed")]
    Stream,
    #[error("the server ended the session: {text}")]
    Disconnected {
        code: Option<DisconnectCode>,
        text: String,
    },
    #[error("the server sent bytes that are no message: {0}")]
    Wire(#[from] WireError),
    #[error("numbered message {got} where {expected} was due")]
    Gap { expected: u64, got: u64 },
    #[error("no answer to the login in time")]
    LoginTimeout,
    #[error("token or session name is empty or too long, or no such channel")]
    LoginField,
    #[error("too many requests without an answer")]
    TooManyUnanswered,
    #[error("not logged in on this channel")]
    NotLoggedIn,
}

/// How to log one session in.
#[derive(Clone, Debug)]
pub struct LoginOptions {
    /// Bearer credential, as on the RPC ports.
    pub token: String,
    /// Names the session across connections.
    pub session_name: String,
    pub cancel_on_disconnect: bool,
    /// Do not receive what was numbered before this login.
    pub from_now: bool,
    /// Last number received by an earlier run of this client.
    pub last_sequence: u64,
    /// Longest silence; 0 = the server's default.
    pub heartbeat_ms: u32,
    /// 0 = the user's own group.
    pub stp_group: u32,
    /// CFA-RUB in kopecks that shall be undrawn in the trading hold; 0 = leave it.
    pub money_hold_minor: i64,
}

impl LoginOptions {
    pub fn new(token: &str, session_name: &str) -> Self {
        Self {
            token: token.to_owned(),
            session_name: session_name.to_owned(),
            cancel_on_disconnect: false,
            from_now: false,
            last_sequence: 0,
            heartbeat_ms: 0,
            stp_group: 0,
            money_hold_minor: 0,
        }
    }

    fn message(&self, last_sequence: u64) -> Result<Login, Error> {
        let mut flags = 0;
        if self.cancel_on_disconnect {
            flags |= LOGIN_CANCEL_ON_DISCONNECT;
        }
        if self.from_now && last_sequence == 0 {
            flags |= LOGIN_FROM_NOW;
        }
        Ok(Login {
            token: Text::new(&self.token).ok_or(Error::LoginField)?,
            session_name: Text::new(&self.session_name)
                .filter(|_| !self.session_name.is_empty())
                .ok_or(Error::LoginField)?,
            last_sequence,
            flags,
            heartbeat_ms: self.heartbeat_ms,
            stp_group: self.stp_group,
            money_hold_minor: self.money_hold_minor,
        })
    }
}

/// What the server said to a login.
pub type SessionInfo = LoginAccepted;

/// One message from the server.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    pub channel: u16,
    /// Number in the session's stream; 0 = unnumbered.
    pub sequence: u64,
    pub message: ServerMessage,
    pub received_at: Instant,
}

/// What the server sends, in order, across resumes.
pub struct Reports {
    receiver: mpsc::Receiver<Result<Report, Error>>,
}

impl Reports {
    /// The next report. An error says that the connection is gone: `resume` and go on, or stop. `None` when the
    /// connection was dropped.
    pub async fn recv(&mut self) -> Option<Result<Report, Error>> {
        self.receiver.recv().await
    }

    /// A report that is already here.
    pub fn try_recv(&mut self) -> Option<Result<Report, Error>> {
        self.receiver.try_recv().ok()
    }
}

/// Sessions over one QUIC stream. Cheap to clone; the last clone that goes away closes the connection.
#[derive(Clone)]
pub struct Connection {
    owner: Arc<Owner>,
}

struct Owner {
    server: SocketAddr,
    endpoint: quinn::Endpoint,
    shared: Arc<Shared>,
    link: Mutex<Option<Link>>,
    /// One resume at a time.
    resuming: tokio::sync::Mutex<()>,
}

struct Link {
    quic: quinn::Connection,
    _reader: AbortOnDropHandle<()>,
    _writer: AbortOnDropHandle<()>,
}

/// What callers and the two tasks share.
pub(crate) struct Shared {
    state: Mutex<State>,
    pub(crate) wake: Notify,
    pub(crate) room: Notify,
    pub(crate) reports: mpsc::Sender<Result<Report, Error>>,
}

pub(crate) struct State {
    pub(crate) outbound: BytesMut,
    pub(crate) channels: BTreeMap<u16, Channel>,
    pub(crate) instruments: BTreeMap<u32, InstrumentDefinition>,
    pub(crate) heartbeat: Duration,
    pub(crate) connected: bool,
    next_order: u64,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection {
    /// Connects; no session is logged in yet.
    pub fn connect(
        server: SocketAddr,
        trust: Trust,
    ) -> BoxFuture<'static, Result<(Self, Reports), Error>> {
        Box::pin(async move {
            if !trust.allows(server) {
                return Err(Error::TrustNotAllowed);
            }
            let (reports, receiver) = mpsc::channel(REPORTS_MAX);
            let connection = Self {
                owner: Arc::new(Owner {
                    endpoint: endpoint::endpoint(&trust, server)?,
                    server,
                    shared: Arc::new(Shared {
                        state: Mutex::new(State {
                            outbound: BytesMut::new(),
                            channels: BTreeMap::new(),
                            instruments: BTreeMap::new(),
                            heartbeat: Duration::from_secs(5),
                            connected: false,
                            next_order: 0,
                        }),
                        wake: Notify::new(),
                        room: Notify::new(),
                        reports,
                    }),
                    link: Mutex::new(None),
                    resuming: tokio::sync::Mutex::new(()),
                }),
            };
            connection.link_up().await?;
            Ok((connection, Reports { receiver }))
        })
    }

    /// Logs a session in on a channel (0 to 63) that carries none.
    pub fn login(
        &self,
        channel: u16,
        options: LoginOptions,
    ) -> BoxFuture<'_, Result<SessionInfo, Error>> {
        Box::pin(async move {
            if usize::from(channel) >= CHANNELS_MAX {
                return Err(Error::LoginField);
            }
            let mut session = Channel::new(options);
            let message = session.options.message(session.last_sequence)?;
            let (sender, answer) = oneshot::channel();
            session.login = Some(sender);
            {
                let mut state = self.shared().lock();
                if state.channels.get(&channel).is_some_and(|old| old.live) {
                    return Err(Error::LoginField);
                }
                state.channels.insert(channel, session);
                encode(
                    &ClientMessage::from(message),
                    channel,
                    0,
                    &mut state.outbound,
                );
            }
            self.shared().wake.notify_one();
            let answered = login_answer(answer).await;
            let mut state = self.shared().lock();
            match (&answered, state.channels.get_mut(&channel)) {
                (Ok(_), Some(session)) => session.live = true,
                (Ok(_), None) => return Err(Error::Stream),
                (Err(_), _) => drop(state.channels.remove(&channel)),
            }
            answered
        })
    }

    /// Hands a message to the connection, in call order; waits only while too much is waiting to be written.
    /// Returns the client sequence of a request that acts, 0 otherwise.
    pub async fn send(
        &self,
        channel: u16,
        message: impl Into<ClientMessage>,
    ) -> Result<u64, Error> {
        let message = message.into();
        loop {
            let room = self.shared().room.notified();
            match self.try_send(channel, message)? {
                Some(client_seq) => return Ok(client_seq),
                None => room.await,
            }
        }
    }

    /// As `send`, but `None` at once when too much is waiting.
    pub fn try_send(&self, channel: u16, message: ClientMessage) -> Result<Option<u64>, Error> {
        let mut state = self.shared().lock();
        if state.outbound.len() >= OUTBOUND_LEN_MAX {
            return Ok(None);
        }
        let order = state.next_order;
        let session = state
            .channels
            .get_mut(&channel)
            .filter(|session| session.live)
            .ok_or(Error::NotLoggedIn)?;
        let mut client_seq = 0;
        if acts(&message) {
            if session.is_full() {
                return Err(Error::TooManyUnanswered);
            }
            client_seq = session.sent(order, message);
        }
        state.next_order += 1;
        encode(&message, channel, client_seq, &mut state.outbound);
        drop(state);
        self.shared().wake.notify_one();
        Ok(Some(client_seq))
    }

    /// Last number received in a session's stream.
    pub fn last_sequence(&self, channel: u16) -> u64 {
        self.shared()
            .lock()
            .channels
            .get(&channel)
            .map_or(0, |session| session.last_sequence)
    }

    /// The instruments the server has told of; complete when a login has returned.
    pub fn instruments(&self) -> Vec<InstrumentDefinition> {
        self.shared().lock().instruments.values().copied().collect()
    }

    /// Connects again after a loss and logs every session in: what was missed comes in through the same
    /// [`Reports`], what the server has not seen is sent again in the old order. A session that cannot come
    /// back fails the resume.
    pub fn resume(&self) -> BoxFuture<'_, Result<Vec<(u16, SessionInfo)>, Error>> {
        Box::pin(async move {
            let _one = self.owner.resuming.lock().await;
            let old = self.link().take();
            if let Some(old) = old {
                old.quic.close(0u32.into(), b"");
            }
            self.shared().lost(&Error::Stream);
            self.link_up().await?;
            let mut answers = Vec::new();
            {
                let mut state = self.shared().lock();
                let State {
                    channels, outbound, ..
                } = &mut *state;
                for (channel, session) in channels {
                    let (sender, answer) = oneshot::channel();
                    session.login = Some(sender);
                    let message = session.options.message(session.last_sequence)?;
                    encode(&ClientMessage::from(message), *channel, 0, outbound);
                    answers.push((*channel, answer));
                }
            }
            self.shared().wake.notify_one();
            let mut infos = Vec::new();
            for (channel, answer) in answers {
                infos.push((channel, login_answer(answer).await?));
            }
            self.send_again(&infos);
            Ok(infos)
        })
    }

    fn send_again(&self, infos: &[(u16, SessionInfo)]) {
        let mut state = self.shared().lock();
        let mut again = BTreeMap::new();
        for (channel, info) in infos {
            if let Some(session) = state.channels.get_mut(channel) {
                // Only now may callers send: what is sent again comes first.
                session.live = true;
                for (client_seq, sent) in session.unseen(info.last_client_seq) {
                    again.insert(sent.order, (*channel, client_seq, sent.message));
                }
            }
        }
        for (channel, client_seq, message) in again.into_values() {
            encode(&message, channel, client_seq, &mut state.outbound);
        }
        drop(state);
        self.shared().wake.notify_one();
    }

    /// Drops the connection without a word, as a crash would; [`Reports`] tells of the loss.
    pub fn cut(&self) {
        if let Some(link) = self.link().as_ref() {
            link.quic.close(0u32.into(), b"");
        }
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.owner.shared
    }

    fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.owner
            .link
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn link_up(&self) -> Result<(), Error> {
        let connecting = async {
            let quic = self
                .owner
                .endpoint
                .connect(self.owner.server, "cfa-trade")?
                .await?;
            let (send, receive) = quic.open_bi().await?;
            Ok::<_, Error>((quic, send, receive))
        };
        let (quic, send, receive) =
            tokio::time::timeout(Duration::from_millis(LOGIN_TIMEOUT_MS), connecting)
                .await
                .map_err(|_| Error::LoginTimeout)??;
        {
            let mut state = self.shared().lock();
            state.outbound.clear();
            state.connected = true;
        }
        let reader = io::read(receive, quic.clone(), self.shared().clone());
        let writer = io::write(send, quic.clone(), self.shared().clone());
        *self.link() = Some(Link {
            quic,
            _reader: AbortOnDropHandle::new(tokio::spawn(reader)),
            _writer: AbortOnDropHandle::new(tokio::spawn(writer)),
        });
        Ok(())
    }
}

impl Shared {
    /// The connection is gone: nobody is logged in, nobody waits.
    pub(crate) fn lost(&self, error: &Error) {
        let mut state = self.lock();
        state.connected = false;
        state.outbound.clear();
        for session in state.channels.values_mut() {
            session.live = false;
            if let Some(waiting) = session.login.take() {
                // Whoever logged in may have given up already.
                let _ = waiting.send(Err(error.clone()));
            }
        }
        drop(state);
        self.room.notify_waiters();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let link = self
            .link
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(link) = link {
            link.quic.close(0u32.into(), b"");
        }
    }
}

/// True for requests that carry a client sequence.
fn acts(message: &ClientMessage) -> bool {
    matches!(
        message,
        ClientMessage::NewOrder(_)
            | ClientMessage::Cancel(_)
            | ClientMessage::Amend(_)
            | ClientMessage::MassCancel(_)
            | ClientMessage::CancelAllAfter(_)
    )
}

async fn login_answer(
    answer: oneshot::Receiver<Result<SessionInfo, Error>>,
) -> Result<SessionInfo, Error> {
    match tokio::time::timeout(Duration::from_millis(LOGIN_TIMEOUT_MS), answer).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(Error::Stream),
        Err(_) => Err(Error::LoginTimeout),
    }
}
