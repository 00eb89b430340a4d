//! One connection: its stream is cut into messages by one task and each is handled in order, whatever its channel, so that requests reach the
//! trading path in the order of the stream. Logins and trading holds are answered from tasks of their own: they ask other services.
//!
//! Bytes that are no message end the connection with their code; a session's own mistake ends its channel. When the connection is gone every session on it
//! is closed in the journal, and cancel-on-disconnect's grace begins there.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use admission::{Request, SessionRequest};
use bytes::BytesMut;
use sequencer::{NotTaken, Reply};
use tokio::sync::mpsc;
use types::{RejectReason, SessionIx};
use wire::{
    CHANNELS_MAX, CONNECTION_CHANNEL, ClientMessage, DisconnectCode, Header, MESSAGE_LEN_MAX,
    ServerHeartbeat, SetTradingHold, take,
};

use super::answers::{self, CLIENT_SEQ_MAX};
use super::channel::{self, Channel, State};
use super::login::{self, Opened};
use super::outbound::{Next, Outbound};
use super::server::Shared;
use super::{hold, limit, resume};
use crate::market::now_ns;

/// How long a shutdown waits for the reports of what a session has sent.
const LAST_REPORTS: Duration = Duration::from_millis(500);

/// The sessions of a connection.
#[derive(Clone, Default)]
pub struct Channels(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    by_number: HashMap<u16, State>,
    /// The connection is gone: a login that arrives now is let go at once.
    closed: bool,
}

impl Channels {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn session(&self, channel: u16) -> Option<SessionIx> {
        match self.lock().by_number.get(&channel) {
            Some(State::Live(live)) => Some(live.session),
            Some(State::LoggingIn) | None => None,
        }
    }

    /// Makes an opened session the channel's, before the client is told: its first request may come at once. `attach` tells it and gives the claim. `None`
    /// when the connection is gone.
    fn take_on(
        &self,
        channel: u16,
        mut live: Channel,
        attach: impl FnOnce() -> u64,
    ) -> Option<u64> {
        let mut table = self.lock();
        if table.closed {
            return None;
        }
        let claim = attach();
        live.claim = claim;
        table.by_number.insert(channel, State::Live(Box::new(live)));
        Some(claim)
    }

    /// Takes more off a session's throttle.
    pub fn charge(&self, channel: u16, messages: u32) {
        if let Some(State::Live(live)) = self.lock().by_number.get_mut(&channel) {
            live.throttle.charge(messages);
        }
    }
}

struct Connection {
    shared: Arc<Shared>,
    quic: quinn::Connection,
    outbound: Arc<Outbound>,
    channels: Channels,
    answers: mpsc::UnboundedSender<(u64, sequencer::Outcome)>,
}

/// Serves one connection to its end.
pub async fn serve(incoming: quinn::Incoming, shared: Arc<Shared>) {
    let Ok(quic) = incoming.await else { return };
    let first = Duration::from_millis(shared.market.config.login_timeout_ms);
    let stream = tokio::select! {
        stream = tokio::time::timeout(first, quic.accept_bi()) => stream,
        () = shared.shutdown.cancelled() => return,
    };
    let Ok(Ok((send, receive))) = stream else {
        let code = DisconnectCode::LoginExpected;
        quic.close(u32::from(code.code()).into(), code.to_string().as_bytes());
        return;
    };
    let (answers, heard) = mpsc::unbounded_channel();
    let connection = Connection {
        outbound: Arc::new(Outbound::default()),
        channels: Channels::default(),
        shared,
        quic,
        answers,
    };
    let passing = tokio::spawn(answers::pass_on(
        connection.shared.market.clone(),
        connection.outbound.clone(),
        connection.channels.clone(),
        heard,
    ));
    let writing = tokio::spawn(write_out(
        send,
        connection.quic.clone(),
        connection.outbound.clone(),
        connection.shared.market.config.heartbeat_ms,
    ));
    let end = connection.read(receive).await;
    if end == DisconnectCode::Shutdown {
        connection.hear_out().await;
    }
    connection.let_go().await;
    connection.outbound.end(end);
    // The last words are written, or the client does not take them.
    let _ = tokio::time::timeout(Duration::from_secs(1), writing).await;
    let reason = end.to_string();
    connection
        .quic
        .close(u32::from(end.code()).into(), reason.as_bytes());
    passing.abort();
}

impl Connection {
    /// Reads until the end and says why it ended.
    async fn read(&self, mut receive: quinn::RecvStream) -> DisconnectCode {
        let config = &self.shared.market.config;
        let silence = Duration::from_millis(u64::from(config.heartbeat_ms.max(100)));
        let first = Duration::from_millis(config.login_timeout_ms);
        let mut buffer = BytesMut::with_capacity(MESSAGE_LEN_MAX);
        loop {
            let is_new = self.channels.lock().by_number.is_empty();
            let patience = if is_new { first.min(silence) } else { silence };
            let chunk = tokio::select! {
                chunk = tokio::time::timeout(patience, receive.read_chunk(64 << 10, true)) => chunk,
                () = self.shared.shutdown.cancelled() => return DisconnectCode::Shutdown,
            };
            match chunk {
                Ok(Ok(Some(chunk))) => buffer.extend_from_slice(&chunk.bytes),
                Ok(Ok(None) | Err(_)) => return DisconnectCode::Logout,
                Err(_) if is_new => return DisconnectCode::LoginExpected,
                Err(_) => return DisconnectCode::HeartbeatTimeout,
            }
            self.forget_ended();
            loop {
                match take::<ClientMessage>(&mut buffer) {
                    Ok(Some((header, message))) => {
                        if let Err(code) = self.handle(&header, &message).await {
                            return code;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => return error.disconnect_code(),
                }
            }
        }
    }

    /// Sessions that another connection has taken over are not this one's any more.
    fn forget_ended(&self) {
        let ended = self.outbound.take_ended();
        if !ended.is_empty() {
            let mut table = self.channels.lock();
            for channel in ended {
                table.by_number.remove(&channel);
            }
        }
    }

    /// Handles one message; an error ends the connection.
    async fn handle(&self, header: &Header, message: &ClientMessage) -> Result<(), DisconnectCode> {
        if let ClientMessage::Heartbeat(_) = message {
            return Ok(());
        }
        let channel = header.channel;
        if usize::from(channel) >= CHANNELS_MAX {
            return Err(DisconnectCode::BadField);
        }
        match message {
            ClientMessage::Login(login) => {
                let earlier = {
                    let mut table = self.channels.lock();
                    let earlier = table.by_number.contains_key(&channel);
                    if !earlier {
                        table.by_number.insert(channel, State::LoggingIn);
                    }
                    earlier
                };
                if earlier {
                    return Err(DisconnectCode::LoginExpected);
                }
                self.log_in(channel, *login);
                Ok(())
            }
            ClientMessage::Logout(_) => self.log_out(channel).await,
            ClientMessage::SetTradingHold(wanted) => self.set_trading_hold(channel, *wanted),
            _ => self.act(header, message).await,
        }
    }

    fn log_in(&self, channel: u16, login: wire::Login) {
        let address = self.quic.remote_address().ip();
        let (shared, outbound) = (self.shared.clone(), self.outbound.clone());
        let channels = self.channels.clone();
        tokio::spawn(async move {
            let opened = match login::open(&shared, address, channel, &login).await {
                Ok(opened) => opened,
                Err(code) => {
                    channels.lock().by_number.remove(&channel);
                    outbound.refuse_channel(channel, code);
                    return;
                }
            };
            let Opened { live, attach, turn } = opened;
            let (market, session, key) = (&shared.market, live.session, live.key);
            let attach = || market.streams.attach(&outbound, &attach);
            match channels.take_on(channel, live, attach) {
                Some(claim) => {
                    drop(turn);
                    resume::catch_up(market, &outbound, (session, key), claim).await;
                }
                None => login::close_if_left(market, session).await,
            }
        });
    }

    async fn log_out(&self, channel: u16) -> Result<(), DisconnectCode> {
        let removed = {
            let mut table = self.channels.lock();
            match table.by_number.get(&channel) {
                Some(State::Live(_)) => table.by_number.remove(&channel),
                Some(State::LoggingIn) | None => None,
            }
        };
        let Some(State::Live(live)) = removed else {
            return Err(DisconnectCode::LoginExpected);
        };
        let market = &self.shared.market;
        let _turn = market.sessions.lock(live.key).await;
        if live.cancel_on_disconnect && market.streams.is_of(live.session, live.claim) {
            // An orderly end cancels nothing: the journal is told before it is told of the end.
            let request = SessionRequest {
                key: live.key,
                user: live.user,
                stp_group: Some(live.stp_group),
                cancel_on_disconnect: false,
            };
            if let Err(error) = market.ask(Request::OpenSession(request)).await {
                tracing::warn!(%error, "a session's orders may be cancelled after its logout");
            }
        }
        if market.streams.detach(live.session, live.claim) {
            login::close_if_left(market, live.session).await;
        }
        self.outbound
            .refuse_channel(channel, DisconnectCode::Logout);
        Ok(())
    }

    /// One change at a time and session; every one counts as a message.
    fn set_trading_hold(&self, channel: u16, wanted: SetTradingHold) -> Result<(), DisconnectCode> {
        let refuse = |reason| {
            self.outbound
                .send(channel, &hold::refused(&wanted, reason).into());
        };
        let (user_id, pending) = {
            let mut table = self.channels.lock();
            let Some(State::Live(live)) = table.by_number.get_mut(&channel) else {
                return Err(DisconnectCode::LoginExpected);
            };
            if !live.throttle.admit(now_ns()) {
                refuse(RejectReason::Throttle);
                return Ok(());
            }
            if live.hold_pending.swap(true, Ordering::AcqRel) {
                refuse(RejectReason::Busy);
                return Ok(());
            }
            (live.user_id.clone(), live.hold_pending.clone())
        };
        let (shared, outbound) = (self.shared.clone(), self.outbound.clone());
        tokio::spawn(async move {
            let answer = hold::answer(&shared.market, &user_id, wanted).await;
            // Before the answer: the client's next one may come at once.
            pending.store(false, Ordering::Release);
            outbound.send(channel, &answer.into());
        });
        Ok(())
    }

    /// A request: throttle, limit, then the trading path.
    async fn act(&self, header: &Header, message: &ClientMessage) -> Result<(), DisconnectCode> {
        let Header {
            channel, sequence, ..
        } = *header;
        let ids = channel::names(message).ok_or(DisconnectCode::BadField)?;
        if sequence == 0 || sequence > CLIENT_SEQ_MAX {
            return Err(DisconnectCode::BadField);
        }
        let refuse = |reason| {
            self.outbound
                .send(channel, &answers::rejected(sequence, ids, reason).into());
        };
        let (mut request, budget, user, user_id) = {
            let mut table = self.channels.lock();
            let Some(State::Live(live)) = table.by_number.get_mut(&channel) else {
                return Err(DisconnectCode::LoginExpected);
            };
            if !live.throttle.admit(now_ns()) {
                refuse(RejectReason::Throttle);
                return Ok(());
            }
            let request = live
                .request(sequence, message)
                .map_err(|_| DisconnectCode::BadField)?;
            let needs_limit = matches!(request, Request::New(_))
                && !limit::is_in_budget(&self.shared.market, live, &request);
            let user_id = if needs_limit {
                live.user_id.clone()
            } else {
                String::new()
            };
            (request, live.budget.clone(), live.user, user_id)
        };
        if !user_id.is_empty()
            && let Request::New(new) = &mut request
        {
            match limit::check(&self.shared.market, user, &user_id, &budget, new).await {
                Ok(checked) => new.limit_checked = checked,
                Err(reason) => {
                    refuse(reason);
                    return Ok(());
                }
            }
        }
        let reply = Reply::Channel {
            tx: self.answers.clone(),
            tag: answers::tag(channel, sequence),
        };
        match self.shared.market.port.submit(request, reply) {
            Ok(()) => {}
            Err(NotTaken::Busy) => refuse(RejectReason::Busy),
            Err(_) => refuse(RejectReason::NotReady),
        }
        Ok(())
    }

    /// What the sessions have sent is reported before a shutdown ends the connection, within bounds.
    async fn hear_out(&self) {
        let market = &self.shared.market;
        let heard = async {
            // A barrier in the queue behind the connection's own requests.
            let Ok(sequence) = market.port.inspect(|core| core.sequence()).await else {
                return;
            };
            if market.durable(sequence).await.is_ok() {
                market.streams.wait(sequence).await;
            }
        };
        let _ = tokio::time::timeout(LAST_REPORTS, heard).await;
    }

    /// The connection is gone: the journal is told of each session that no other one has taken over.
    async fn let_go(&self) {
        let sessions: Vec<Box<Channel>> = {
            let mut table = self.channels.lock();
            table.closed = true;
            let live = table
                .by_number
                .drain()
                .filter_map(|(_, state)| match state {
                    State::Live(live) => Some(live),
                    State::LoggingIn => None,
                });
            live.collect()
        };
        let market = &self.shared.market;
        for live in sessions {
            let _turn = market.sessions.lock(live.key).await;
            if market.streams.detach(live.session, live.claim) {
                login::close_if_left(market, live.session).await;
            }
        }
    }
}

async fn write_out(
    mut send: quinn::SendStream,
    quic: quinn::Connection,
    outbound: Arc<Outbound>,
    heartbeat_ms: u32,
) {
    let quiet = Duration::from_millis(u64::from(heartbeat_ms.max(100)) / 2);
    loop {
        match outbound.next() {
            Next::Write(bytes) => {
                if send.write_all(&bytes).await.is_err() {
                    return; // The reader sees it too.
                }
            }
            Next::End(code) => {
                let reason = code.to_string();
                if code == DisconnectCode::SlowConsumer {
                    quic.close(u32::from(code.code()).into(), reason.as_bytes());
                } else {
                    let _ = send.finish();
                    let _ = send.stopped().await;
                }
                return;
            }
            Next::Wait => {
                tokio::select! {
                    () = outbound.woken() => {}
                    () = tokio::time::sleep(quiet) => {
                        let message = ServerHeartbeat { time_ns: now_ns() };
                        outbound.send(CONNECTION_CHANNEL, &message.into());
                    }
                    _ = quic.closed() => return,
                }
            }
        }
    }
}
