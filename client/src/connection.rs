//! The async driver: [`Sessions`] on quinn and tokio.
//!
//! Sending never waits for an answer. Requests of all channels are appended to one buffer in the
//! order of the calls, and a writer task drains it, so requests share packets.
//!
//! After a loss, [`Connection::resume`] connects again and logs every session in. The missed
//! messages arrive through the same [`Reports`]. Only requests that the server has not seen are
//! sent again, in their original order.

use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;
use wire::{ClientMessage, InstrumentDefinition};

use crate::sessions::{LOGIN_TIMEOUT, Report, SessionInfo, Sessions};
use crate::{Error, LoginOptions, Trust, endpoint, io};

/// Number of undelivered reports at which reading pauses.
const REPORTS_MAX: usize = 1 << 16;

/// Messages of the server, in order, across resumes. Dropping it closes the connection at the next
/// message.
pub struct Reports {
    receiver: mpsc::Receiver<Result<Report, Error>>,
}

impl Reports {
    /// The next report. After an error the connection is lost: call [`Connection::resume`] or stop.
    /// `None` after the last clone of the connection is dropped.
    pub async fn recv(&mut self) -> Option<Result<Report, Error>> {
        self.receiver.recv().await
    }

    /// The next report if one is available; never waits.
    pub fn try_recv(&mut self) -> Option<Result<Report, Error>> {
        self.receiver.try_recv().ok()
    }
}

/// Sessions over one QUIC stream. Cheap to clone; dropping the last clone closes the connection.
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

/// State shared by callers and the two tasks.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Wakes the writer task.
    pub(crate) wake: Notify,
    /// Wakes callers that wait for space in the send buffer.
    pub(crate) room: Notify,
    pub(crate) reports: mpsc::Sender<Result<Report, Error>>,
}

pub(crate) struct State {
    pub(crate) sessions: Sessions,
    /// Callers waiting for the answer to a login, by channel.
    logins: BTreeMap<u16, oneshot::Sender<Result<SessionInfo, Error>>>,
    /// Incremented when a connection starts or ends. A task with an older epoch changes nothing.
    pub(crate) epoch: u64,
}

impl Connection {
    /// Connects; no session is logged in yet.
    pub fn connect(
        server: SocketAddr,
        trust: Trust,
    ) -> BoxFuture<'static, Result<(Self, Reports), Error>> {
        Box::pin(async move {
            let config = endpoint::config(&trust, server)?;
            let mut endpoint = quinn::Endpoint::client(endpoint::local(server))
                .map_err(|e| Error::Endpoint(Arc::new(e)))?;
            endpoint.set_default_client_config(config);
            let (reports, receiver) = mpsc::channel(REPORTS_MAX);
            let connection = Self {
                owner: Arc::new(Owner {
                    endpoint,
                    server,
                    shared: Arc::new(Shared {
                        state: Mutex::new(State {
                            sessions: Sessions::new(),
                            logins: BTreeMap::new(),
                            epoch: 0,
                        }),
                        wake: Notify::new(),
                        room: Notify::new(),
                        reports,
                    }),
                    link: Mutex::new(None),
                    resuming: tokio::sync::Mutex::new(()),
                }),
            };
            connection.open_link().await?;
            Ok((connection, Reports { receiver }))
        })
    }

    /// Logs a session in on an unused channel (0 to 63).
    pub fn login(
        &self,
        channel: u16,
        options: LoginOptions,
    ) -> BoxFuture<'_, Result<SessionInfo, Error>> {
        Box::pin(async move {
            let answer = {
                let mut state = self.shared().lock();
                state.sessions.login(channel, options)?;
                state.login_receiver(channel)
            };
            let mut pending = PendingLogin {
                shared: self.shared(),
                channel,
                is_answered: false,
            };
            pending.shared.wake.notify_one();
            let answered = login_answer(answer).await;
            pending.is_answered = !matches!(answered, Err(Error::LoginTimeout));
            answered
        })
    }

    /// Queues a message, in call order. Waits only while the send buffer is full. Returns the
    /// client sequence of the request, 0 if the message has none.
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

    /// Like [`Connection::send`], but returns `None` if the send buffer is full.
    pub fn try_send(&self, channel: u16, message: ClientMessage) -> Result<Option<u64>, Error> {
        let sent = self.shared().lock().sessions.send(channel, &message)?;
        if sent.is_some() {
            self.shared().wake.notify_one();
        }
        Ok(sent)
    }

    /// Last number received in a session's stream.
    pub fn last_sequence(&self, channel: u16) -> u64 {
        self.shared().lock().sessions.last_sequence(channel)
    }

    /// Instruments that the server has announced; complete once a login has returned.
    pub fn instruments(&self) -> Vec<InstrumentDefinition> {
        self.shared()
            .lock()
            .sessions
            .instruments()
            .copied()
            .collect()
    }

    /// Connects again after a loss and logs every session in. Missed messages arrive through the
    /// same [`Reports`]. Requests that the server has not seen are sent again in their original
    /// order. Fails if one session cannot be resumed: drop it with [`Connection::forget`] and call
    /// again.
    pub fn resume(&self) -> BoxFuture<'_, Result<Vec<(u16, SessionInfo)>, Error>> {
        Box::pin(async move {
            let _one = self.owner.resuming.lock().await;
            let old = self.link().take();
            if let Some(old) = old {
                old.quic.close(0u32.into(), b"");
            }
            let epoch = self.shared().lock().epoch;
            self.shared().lost(epoch, &Error::Stream);
            self.open_link().await?;
            let answers: Vec<_> = {
                let mut state = self.shared().lock();
                let asked = state.sessions.resume()?;
                let waiting = asked.into_iter();
                waiting
                    .map(|channel| (channel, state.login_receiver(channel)))
                    .collect()
            };
            self.shared().wake.notify_one();
            let mut infos = Vec::new();
            for (channel, answer) in answers {
                infos.push((channel, login_answer(answer).await?));
            }
            // The last answer has appended the unseen requests to the send buffer.
            self.shared().wake.notify_one();
            Ok(infos)
        })
    }

    /// Drops a session. Its messages are ignored, and its requests are not sent again.
    pub fn forget(&self, channel: u16) {
        self.shared().lock().sessions.forget(channel);
        self.shared().wake.notify_one();
    }

    /// Closes the connection without a logout. [`Reports`] returns the loss.
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

    /// Connects, opens the stream and starts the two tasks.
    async fn open_link(&self) -> Result<(), Error> {
        let connecting = async {
            let quic = self
                .owner
                .endpoint
                .connect(self.owner.server, endpoint::SERVER_NAME)?
                .await?;
            let (send, receive) = quic.open_bi().await?;
            Ok::<_, Error>((quic, send, receive))
        };
        let (quic, send, receive) = tokio::time::timeout(LOGIN_TIMEOUT, connecting)
            .await
            .map_err(|_| Error::LoginTimeout)??;
        let epoch = {
            let mut state = self.shared().lock();
            state.epoch += 1;
            state.sessions.connected(Instant::now());
            state.epoch
        };
        let reader = io::read(receive, quic.clone(), self.shared().clone(), epoch);
        let writer = io::write(send, quic.clone(), self.shared().clone(), epoch);
        *self.link() = Some(Link {
            quic,
            _reader: AbortOnDropHandle::new(tokio::spawn(reader)),
            _writer: AbortOnDropHandle::new(tokio::spawn(writer)),
        });
        Ok(())
    }
}

/// Frees the channel of a login without an answer: it timed out, or its future was dropped.
struct PendingLogin<'a> {
    shared: &'a Shared,
    channel: u16,
    is_answered: bool,
}

impl Drop for PendingLogin<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            let mut state = self.shared.lock();
            state.logins.remove(&self.channel);
            state.sessions.forget(self.channel);
        }
    }
}

impl State {
    /// Registers the caller of a channel's login and returns the receiver of the answer.
    fn login_receiver(&mut self, channel: u16) -> oneshot::Receiver<Result<SessionInfo, Error>> {
        let (sender, answer) = oneshot::channel();
        self.logins.insert(channel, sender);
        answer
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers the answer to a login. Wakes the writer, because the answer may have appended
    /// unseen requests.
    pub(crate) fn answer(&self, channel: u16, answer: Result<SessionInfo, Error>) {
        let waiting = self.lock().logins.remove(&channel);
        if let Some(waiting) = waiting {
            // The caller may have stopped waiting.
            let _ = waiting.send(answer);
        }
        self.wake.notify_one();
    }

    /// Ends the sessions of the connection with this epoch, and returns the error to waiting
    /// callers.
    pub(crate) fn lost(&self, epoch: u64, error: &Error) {
        let mut state = self.lock();
        if state.epoch != epoch {
            return;
        }
        state.epoch += 1;
        state.sessions.disconnected();
        for (_, waiting) in std::mem::take(&mut state.logins) {
            // The caller may have stopped waiting.
            let _ = waiting.send(Err(error.clone()));
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

async fn login_answer(
    answer: oneshot::Receiver<Result<SessionInfo, Error>>,
) -> Result<SessionInfo, Error> {
    match tokio::time::timeout(LOGIN_TIMEOUT, answer).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(Error::Stream),
        Err(_) => Err(Error::LoginTimeout),
    }
}
