//! A trading session over one bidirectional QUIC stream.
//!
//! Sending never waits for an answer: [`Session::send`] numbers the request and puts it into a buffer that a writer task empties, so many requests
//! share one packet. A reader task checks the numbers of what comes in: a number already seen is dropped, a gap ends the connection. After a
//! loss, [`Session::resume`] logs in again under the same session name, receives what was missed and sends again only what the server has not
//! seen; [`Reports`] goes on across connections.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn::crypto::rustls::QuicClientConfig;
use tokio::sync::{Notify, mpsc};
use tokio_util::task::AbortOnDropHandle;

use crate::Trust;
use crate::unanswered::Unanswered;
use crate::wire::{
    ALPN, ClientMessage, Disconnect, DisconnectCode, Heartbeat, LOGIN_CANCEL_ON_DISCONNECT,
    LOGIN_FROM_NOW, Login, LoginAccepted, Logout, ServerMessage, Text, WireError, encode, take,
};

/// Bytes waiting to be written at which `send` waits for the connection.
const OUTBOUND_LEN_MAX: usize = 1 << 20;
/// Reports waiting to be taken at which the connection is no longer read.
const REPORTS_MAX: usize = 1 << 16;
/// How long connecting and logging in may take.
const LOGIN_TIMEOUT_MS: u64 = 10_000;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("certificate checks can be skipped for loopback addresses only")]
    TrustNotAllowed,
    #[error("endpoint: {0}")]
    Endpoint(#[source] std::io::Error),
    #[error("tls: {0}")]
    Tls(String),
    #[error("connect: {0}")]
    Connect(#[from] quinn::ConnectError),
    #[error("connection lost: {0}")]
    Connection(#[from] quinn::ConnectionError),
    #[error("stream closed")]
    Stream,
    #[error("the server closed the session: {text}")]
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
    #[error("token or session name is too long or empty")]
    LoginField,
    #[error("too many requests without an answer")]
    TooManyUnanswered,
    #[error("not connected")]
    NotConnected,
}

/// How to log in.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    pub server: SocketAddr,
    pub trust: Trust,
    /// Bearer credential, as on the RPC ports.
    pub token: String,
    /// Names the session across connections.
    pub session_name: String,
    pub cancel_on_disconnect: bool,
    /// Do not receive what was numbered before this login.
    pub from_now: bool,
    /// Last number received by an earlier run of this client.
    pub last_sequence: u64,
    /// 0 = the server's default.
    pub heartbeat_ms: u32,
    /// 0 = the user's own group.
    pub stp_group: u32,
    /// CFA-RUB in kopecks that shall be undrawn in the trading hold; 0 = leave it.
    pub money_hold_minor: i64,
}

impl ConnectOptions {
    pub fn new(server: SocketAddr, trust: Trust, token: &str, session_name: &str) -> Self {
        Self {
            server,
            trust,
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

    fn login(&self, last_sequence: u64) -> Result<Login, Error> {
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

/// What the server said to the login.
pub type LoginInfo = LoginAccepted;

/// One message from the server.
#[derive(Clone, Copy, Debug)]
pub struct Report {
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
    /// The next report. An error says that the connection is gone: `resume` and go on, or stop. `None` when the session was dropped.
    pub async fn recv(&mut self) -> Option<Result<Report, Error>> {
        self.receiver.recv().await
    }

    /// A report that is already here.
    pub fn try_recv(&mut self) -> Option<Result<Report, Error>> {
        self.receiver.try_recv().ok()
    }
}

/// A UDP endpoint that speaks this protocol as a client. One endpoint serves many sessions.
pub fn endpoint(trust: &Trust, bind: SocketAddr) -> Result<quinn::Endpoint, Error> {
    let mut endpoint = quinn::Endpoint::client(bind).map_err(Error::Endpoint)?;
    endpoint.set_default_client_config(client_config(trust)?);
    Ok(endpoint)
}

fn client_config(trust: &Trust) -> Result<quinn::ClientConfig, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| Error::Tls(e.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(trust.verifier())
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let crypto = QuicClientConfig::try_from(tls).map_err(|e| Error::Tls(e.to_string()))?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    let mut transport = quinn::TransportConfig::default();
    transport.max_idle_timeout(Some(
        quinn::IdleTimeout::try_from(Duration::from_secs(10)).expect("ten seconds fit"),
    ));
    transport.keep_alive_interval(Some(Duration::from_secs(3)));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

/// A logged-in session. Cheap to clone; the last clone that goes away closes the connection.
#[derive(Clone)]
pub struct Session {
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: quinn::Endpoint,
    options: ConnectOptions,
    outbound: Arc<Outbound>,
    progress: Arc<Progress>,
    reports: mpsc::Sender<Result<Report, Error>>,
    connection: Mutex<Option<Connection>>,
    /// One resume at a time.
    resuming: tokio::sync::Mutex<()>,
}

struct Connection {
    quic: quinn::Connection,
    _reader: AbortOnDropHandle<()>,
    _writer: AbortOnDropHandle<()>,
}

/// What the reader knows and a resume needs.
struct Progress {
    last_sequence: AtomicU64,
}

struct Outbound {
    state: Mutex<OutboundState>,
    wake: Notify,
    room: Notify,
}

struct OutboundState {
    buffer: BytesMut,
    connected: bool,
    next_client_seq: u64,
    unanswered: Unanswered,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects and logs in.
pub async fn connect(
    endpoint: &quinn::Endpoint,
    options: ConnectOptions,
) -> Result<(Session, Reports, LoginInfo), Error> {
    if !options.trust.allows(options.server) {
        return Err(Error::TrustNotAllowed);
    }
    let (reports, receiver) = mpsc::channel(REPORTS_MAX);
    let shared = Arc::new(Shared {
        endpoint: endpoint.clone(),
        outbound: Arc::new(Outbound {
            state: Mutex::new(OutboundState {
                buffer: BytesMut::new(),
                connected: false,
                next_client_seq: 1,
                unanswered: Unanswered::default(),
            }),
            wake: Notify::new(),
            room: Notify::new(),
        }),
        progress: Arc::new(Progress {
            last_sequence: AtomicU64::new(options.last_sequence),
        }),
        options,
        reports,
        connection: Mutex::new(None),
        resuming: tokio::sync::Mutex::new(()),
    });
    let session = Session { shared };
    let info = session.log_in().await?;
    Ok((session, Reports { receiver }, info))
}

impl Session {
    /// Numbers the request and hands it to the connection; waits only while too much is waiting to be written. Returns its client sequence,
    /// 0 for messages that ask for no act.
    pub async fn send(&self, message: impl Into<ClientMessage>) -> Result<u64, Error> {
        let message = message.into();
        loop {
            let room = self.shared.outbound.room.notified();
            match self.try_send(message)? {
                Some(client_seq) => return Ok(client_seq),
                None => room.await,
            }
        }
    }

    /// As `send`, but `None` at once when too much is waiting.
    pub fn try_send(&self, message: ClientMessage) -> Result<Option<u64>, Error> {
        let mut state = lock(&self.shared.outbound.state);
        if !state.connected {
            return Err(Error::NotConnected);
        }
        if state.buffer.len() >= OUTBOUND_LEN_MAX {
            return Ok(None);
        }
        let client_seq = if acts(&message) {
            if state.unanswered.is_full() {
                return Err(Error::TooManyUnanswered);
            }
            let client_seq = state.next_client_seq;
            state.next_client_seq += 1;
            state.unanswered.sent(client_seq, message);
            client_seq
        } else {
            0
        };
        encode(&message, client_seq, &mut state.buffer);
        drop(state);
        self.shared.outbound.wake.notify_one();
        Ok(Some(client_seq))
    }

    /// Last number received in the session's stream.
    pub fn last_sequence(&self) -> u64 {
        self.shared.progress.last_sequence.load(Ordering::Acquire)
    }

    /// Connects again after a loss: what was missed comes in through the same [`Reports`], what the server has not seen is sent again.
    pub async fn resume(&self) -> Result<LoginInfo, Error> {
        let _one = self.shared.resuming.lock().await;
        self.cut();
        self.log_in().await
    }

    /// Ends the session in order. Open orders stay.
    pub async fn log_out(&self) -> Result<(), Error> {
        self.send(Logout {}).await?;
        let quic = lock(&self.shared.connection)
            .as_ref()
            .map(|connection| connection.quic.clone());
        if let Some(quic) = quic {
            quic.closed().await;
        }
        Ok(())
    }

    /// Drops the connection without a word, as a crash would.
    pub fn cut(&self) {
        lock(&self.shared.outbound.state).connected = false;
        if let Some(connection) = lock(&self.shared.connection).take() {
            connection.quic.close(0u32.into(), b"");
        }
    }

    async fn log_in(&self) -> Result<LoginInfo, Error> {
        let timeout = Duration::from_millis(LOGIN_TIMEOUT_MS);
        tokio::time::timeout(timeout, self.log_in_unbounded())
            .await
            .map_err(|_| Error::LoginTimeout)?
    }

    async fn log_in_unbounded(&self) -> Result<LoginInfo, Error> {
        let shared = &self.shared;
        let last_sequence = self.last_sequence();
        let login = shared.options.login(last_sequence)?;
        let quic = shared
            .endpoint
            .connect(shared.options.server, "cfa-trade")?
            .await?;
        let (mut send, mut receive) = quic.open_bi().await?;
        let mut bytes = BytesMut::new();
        encode(&ClientMessage::from(login), 0, &mut bytes);
        write(&mut send, &bytes, &quic).await?;

        let mut buffer = BytesMut::new();
        let info = match next_message(&mut receive, &mut buffer, &quic).await? {
            (_, ServerMessage::LoginAccepted(info)) => info,
            (_, ServerMessage::Disconnect(message)) => return Err(disconnected(&message)),
            _ => return Err(Error::Stream),
        };
        if info.next_sequence > last_sequence + 1 {
            // Only a login from now may skip numbers.
            if !(shared.options.from_now && last_sequence == 0) {
                return Err(Error::Gap {
                    expected: last_sequence + 1,
                    got: info.next_sequence,
                });
            }
        }
        shared
            .progress
            .last_sequence
            .store(info.next_sequence - 1, Ordering::Release);

        {
            let mut state = lock(&shared.outbound.state);
            state.next_client_seq = state.next_client_seq.max(info.last_client_seq + 1);
            let mut again = BytesMut::new();
            for (client_seq, message) in state.unanswered.after(info.last_client_seq) {
                encode(message, client_seq, &mut again);
            }
            state.buffer = again;
            state.connected = true;
        }
        shared.outbound.wake.notify_one();
        let heartbeat = Duration::from_millis(u64::from(info.heartbeat_ms.max(100)) / 2);
        let reader = read(
            receive,
            buffer,
            quic.clone(),
            shared.progress.clone(),
            shared.outbound.clone(),
            shared.reports.clone(),
        );
        let writer = write_out(send, quic.clone(), shared.outbound.clone(), heartbeat);
        *lock(&shared.connection) = Some(Connection {
            quic,
            _reader: AbortOnDropHandle::new(tokio::spawn(reader)),
            _writer: AbortOnDropHandle::new(tokio::spawn(writer)),
        });
        Ok(info)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(connection) = lock(&self.connection).take() {
            connection.quic.close(0u32.into(), b"");
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
    )
}

fn disconnected(message: &Disconnect) -> Error {
    Error::Disconnected {
        code: DisconnectCode::from_code(message.code),
        text: message.text.as_str().to_owned(),
    }
}

/// The reason of a stream error is the connection's, where there is one.
fn lost(quic: &quinn::Connection) -> Error {
    match quic.close_reason() {
        Some(reason) => Error::Connection(reason),
        None => Error::Stream,
    }
}

async fn write(
    send: &mut quinn::SendStream,
    bytes: &[u8],
    quic: &quinn::Connection,
) -> Result<(), Error> {
    send.write_all(bytes).await.map_err(|_| lost(quic))
}

async fn next_message(
    receive: &mut quinn::RecvStream,
    buffer: &mut BytesMut,
    quic: &quinn::Connection,
) -> Result<(u64, ServerMessage), Error> {
    loop {
        if let Some((header, message)) = take(buffer)? {
            return Ok((header.sequence, message));
        }
        match receive.read_chunk(usize::MAX, true).await {
            Ok(Some(chunk)) => buffer.extend_from_slice(&chunk.bytes),
            Ok(None) | Err(_) => return Err(lost(quic)),
        }
    }
}

async fn read(
    mut receive: quinn::RecvStream,
    mut buffer: BytesMut,
    quic: quinn::Connection,
    progress: Arc<Progress>,
    outbound: Arc<Outbound>,
    reports: mpsc::Sender<Result<Report, Error>>,
) {
    let mut answered = VecDeque::new();
    let error = loop {
        let (sequence, message) = match next_message(&mut receive, &mut buffer, &quic).await {
            Ok(next) => next,
            Err(error) => break error,
        };
        let received_at = Instant::now();
        // The place is taken before the number counts as received: a reader that is stopped here has received nothing.
        let Ok(place) = reports.reserve().await else {
            return;
        };
        if sequence != 0 {
            let last = progress.last_sequence.load(Ordering::Acquire);
            if sequence <= last {
                // The original report of a request that was sent twice.
                continue;
            }
            if sequence != last + 1 {
                break Error::Gap {
                    expected: last + 1,
                    got: sequence,
                };
            }
            progress.last_sequence.store(sequence, Ordering::Release);
        }
        if message.answers() != 0 {
            answered.push_back(message.answers());
        }
        // One lock for what one packet brought.
        if buffer.is_empty() || answered.len() >= 64 {
            let mut state = lock(&outbound.state);
            for client_seq in answered.drain(..) {
                state.unanswered.answered(client_seq);
            }
        }
        let end = match &message {
            ServerMessage::Disconnect(message) => Some(disconnected(message)),
            _ => None,
        };
        let report = Report {
            sequence,
            message,
            received_at,
        };
        place.send(Ok(report));
        if let Some(end) = end {
            break end;
        }
    };
    {
        let mut state = lock(&outbound.state);
        state.connected = false;
        for client_seq in answered.drain(..) {
            state.unanswered.answered(client_seq);
        }
    }
    outbound.room.notify_waiters();
    quic.close(0u32.into(), b"");
    // Nobody listening is no error of the session.
    let _ = reports.send(Err(error)).await;
}

async fn write_out(
    mut send: quinn::SendStream,
    quic: quinn::Connection,
    outbound: Arc<Outbound>,
    heartbeat: Duration,
) {
    let mut bytes = BytesMut::new();
    loop {
        std::mem::swap(&mut bytes, &mut lock(&outbound.state).buffer);
        if bytes.is_empty() {
            let woken = tokio::time::timeout(heartbeat, outbound.wake.notified()).await;
            if woken.is_err() {
                encode(&ClientMessage::from(Heartbeat {}), 0, &mut bytes);
            } else {
                continue;
            }
        }
        outbound.room.notify_waiters();
        if write(&mut send, &bytes, &quic).await.is_err() {
            return; // The reader tells why.
        }
        bytes.clear();
    }
}
