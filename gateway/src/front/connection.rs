//! Handles a connection's messages and timers: sessions on channels, requests passed to `requests`.
//!
//! Invalid bytes, and messages that the protocol does not allow, end the connection. A refused
//! login, a logout or the end of a session ends only its channel. A request that arrives on an
//! ended channel is refused with `UNKNOWN_SESSION`, because the client could not know of the end.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use transport::proto::ConnectionError;
use transport::{ConsumedBytes, Driver, Incoming, Link, Packets};
use types::{RejectReason, UserIx};
use wire::{
    CHANNELS_MAX, CONNECTION_CHANNEL, ClientMessage, Disconnect, DisconnectCode, Header,
    ServerHeartbeat, ServerMessage, SetTradingHold, Text, append,
};

use super::desk::{FrontRequest, Share};
use super::session::At;
use super::state::State;
use super::{RESUME_BYTES, hold, pieces};

/// Maximum messages handled per connection and round, over all calls of [`Driver::data`]
/// (`design.md` 5). The connection continues in the next round, after the other connections.
const MESSAGES_MAX: usize = 32;
/// Unsent bytes above which a client's connection is closed after [`SLOW_FOR`], and those above
/// which it is closed at once.
const SLOW_BYTES: usize = 1 << 20;
const SLOW_BYTES_MAX: usize = 16 << 20;
const SLOW_FOR: Duration = Duration::from_secs(1);
/// Half-open connections above which a peer must prove that it owns its address.
const HALF_OPEN_MAX: usize = 64;

/// State of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Channel {
    #[default]
    /// No login yet.
    Free,
    LoggingIn,
    /// A logout arrived before the answer to the login.
    LoggingOut,
    /// Owns the session.
    Live(At),
    /// The session has ended, or the login was refused.
    Ended,
}

/// State of a connection.
pub struct Conn {
    pub address: IpAddr,
    /// The first user that logged in: the connection counts for this user.
    pub member: Option<UserIx>,
    pub channels: Box<[Channel; CHANNELS_MAX]>,
    /// Longest silence on either side: the shortest heartbeat of its sessions.
    heartbeat: Duration,
    last_received: Instant,
    last_sent: Instant,
    /// Deadline of the next login while no session is logged in: from the connection's acceptance,
    /// or from the end of its last session. Neither heartbeats, refused logins nor a missing stream
    /// extend it.
    login_by: Option<Instant>,
    login_timeout: Duration,
    /// Time since which more than [`SLOW_BYTES`] are unsent.
    slow_since: Option<Instant>,
    /// Upper bound of the unsent bytes that the slow-consumer check ignores: resends, lists, and
    /// the instruments of a login. Each of them waits until less than [`RESUME_BYTES`] are unsent.
    pulled: usize,
    /// Packets that the metrics already count.
    counted: Packets,
    /// The last round in which messages were read, and how many more it may handle.
    round: u64,
    messages_left: usize,
    /// Bytes of the stream through the last message that the client has asked for.
    pulled_through: u64,
    /// How long the client may read nothing while some of these bytes wait. They do not count as
    /// unsent in the slow-consumer check, but they hold memory and the user's look-ups.
    unread_timeout: Duration,
    /// Set while some of these bytes wait: when the client last read, or when they were appended.
    unread_since: Option<Instant>,
}

impl Conn {
    pub fn channel(&mut self, channel: u16) -> &mut Channel {
        &mut self.channels[usize::from(channel)]
    }

    /// Applies the heartbeat of a session that has logged in.
    pub fn logged_in(&mut self, heartbeat: Duration) {
        self.heartbeat = self.heartbeat.min(heartbeat);
        self.login_by = None;
    }

    /// Starts the time to log in again once no session is left.
    fn logged_out(&mut self, now: Instant) {
        let is_live = |channel: &Channel| matches!(channel, Channel::Live(_));
        if !self.channels.iter().any(is_live) {
            self.login_by.get_or_insert(now + self.login_timeout);
        }
    }

    /// When the next timer of the connection expires.
    fn next_timer(&self) -> Instant {
        let silent = self.last_received + self.heartbeat;
        let quiet = self.last_sent + self.heartbeat / 2;
        let slow = self.slow_since.map(|since| since + SLOW_FOR);
        let unread = self.unread_since.map(|since| since + self.unread_timeout);
        let others = [self.login_by, slow, unread].into_iter().flatten();
        others.fold(silent.min(quiet), Instant::min)
    }
}

/// Appends a message for the peer.
pub fn send(link: &mut Link<Conn>, now: Instant, channel: u16, message: &ServerMessage) {
    append(message, channel, 0, link.out());
    link.user.last_sent = now;
}

/// Appends an encoded message, with its channel replaced.
#[inline]
pub fn send_encoded(link: &mut Link<Conn>, now: Instant, channel: u16, bytes: &[u8]) {
    let out = link.out();
    let start = out.len();
    out.extend_from_slice(bytes);
    wire::set_channel(&mut out[start..], channel);
    link.user.last_sent = now;
}

/// Appends messages that the client has asked for (resends, lists, the instruments of a login). The
/// slow-consumer check ignores them (`design.md` 7), and the client has to read something within
/// `unread_timeout`.
pub fn append_pulled(link: &mut Link<Conn>, now: Instant, append: impl FnOnce(&mut Link<Conn>)) {
    let (before, was_unread) = (link.waiting_bytes(), has_unread_pulled(link));
    append(link);
    let added = link.waiting_bytes() - before;
    link.user.pulled = link.user.pulled.min(before) + added;
    link.user.pulled_through = link.written_bytes() + link.waiting_bytes() as u64;
    if !was_unread {
        link.user.unread_since = Some(now);
        let at = link.user.next_timer();
        link.set_deadline(Some(at));
    }
}

/// True while messages that the client has asked for wait until the client reads.
pub fn has_unread_pulled(link: &Link<Conn>) -> bool {
    link.written_bytes() < link.user.pulled_through
}

/// Like [`send_encoded`], for several messages that the client has asked for.
pub fn send_pulled<'a>(
    link: &mut Link<Conn>,
    now: Instant,
    channel: u16,
    messages: impl IntoIterator<Item = &'a [u8]>,
) {
    append_pulled(link, now, |link| {
        for bytes in messages {
            send_encoded(link, now, channel, bytes);
        }
    });
}

/// Marks a channel as ended and sends the reason.
pub fn end_channel(link: &mut Link<Conn>, now: Instant, channel: u16, code: DisconnectCode) {
    *link.user.channel(channel) = Channel::Ended;
    send(link, now, channel, &disconnect(code));
    link.user.logged_out(now);
    let at = link.user.next_timer();
    link.set_deadline(Some(at));
}

/// Sends the reason and ends the connection once the client has received it.
pub fn end_connection(link: &mut Link<Conn>, now: Instant, code: DisconnectCode) {
    if link.is_open() {
        send(link, now, CONNECTION_CHANNEL, &disconnect(code));
        link.finish(now, u32::from(code.code()), &code.to_string());
    }
}

/// The slow-consumer check: closes the connection of a client with too many unsent bytes. Call it
/// after each append of a message that the client has not asked for.
pub fn check_slow(state: &mut State, now: Instant, link: &mut Link<Conn>) {
    let waiting = link.waiting_bytes();
    if !link.is_open() || (waiting <= RESUME_BYTES && link.user.slow_since.is_none()) {
        return;
    }
    link.user.pulled = link.user.pulled.min(waiting);
    let waiting = waiting - link.user.pulled;
    if waiting <= SLOW_BYTES {
        link.user.slow_since = None;
        return;
    }
    let since = *link.user.slow_since.get_or_insert(now);
    if waiting > SLOW_BYTES_MAX || now.saturating_duration_since(since) >= SLOW_FOR {
        close_slow(state, link);
    } else {
        let at = link.user.next_timer();
        link.set_deadline(Some(at));
    }
}

/// Closes the connection of a client that has read nothing for `unread_timeout` although messages
/// that it has asked for wait. Without this such a client would keep them for as long as it sends
/// heartbeats. Progress is a byte that QUIC accepts: the client has granted flow control, or
/// acknowledged some of the bytes that are sent.
fn check_unread(state: &mut State, now: Instant, link: &mut Link<Conn>) {
    let Some(since) = link.user.unread_since else {
        return;
    };
    if !link.is_open() || !has_unread_pulled(link) {
        link.user.unread_since = None;
        return;
    }
    let since = link.written_at().map_or(since, |at| at.max(since));
    link.user.unread_since = Some(since);
    if now.saturating_duration_since(since) >= link.user.unread_timeout {
        close_slow(state, link);
    }
}

/// Closes the connection of a client that reads too slowly. Its timers end.
fn close_slow(state: &mut State, link: &mut Link<Conn>) {
    state.stats.slow_consumers.increment(1);
    (link.user.slow_since, link.user.unread_since) = (None, None);
    let code = DisconnectCode::SlowConsumer;
    link.close(u32::from(code.code()), &code.to_string());
}

fn disconnect(code: DisconnectCode) -> ServerMessage {
    Disconnect {
        code: code.code(),
        text: Text::truncated(&code.to_string()),
    }
    .into()
}

impl Driver<Conn> for State {
    fn incoming(
        &mut self,
        now: Instant,
        from: SocketAddr,
        is_validated: bool,
        half_open: usize,
    ) -> Incoming<Conn> {
        let address = from.ip();
        let config = &self.market.config;
        if self
            .failures
            .is_known_locked_out(now, address, config.failed_logins_max)
            || self.stopping.is_some()
            || !self.sources.has_place(address)
        {
            return Incoming::Refuse;
        }
        if half_open >= HALF_OPEN_MAX && !is_validated {
            return Incoming::Retry;
        }
        self.sources.begin(address);
        let heartbeat = Duration::from_millis(u64::from(config.heartbeat_ms.max(100)));
        let login_timeout = Duration::from_millis(config.login_timeout_ms);
        Incoming::Accept(Conn {
            address,
            member: None,
            channels: Box::new([Channel::Free; CHANNELS_MAX]),
            heartbeat,
            last_received: now,
            last_sent: now,
            login_by: Some(now + login_timeout),
            login_timeout,
            slow_since: None,
            pulled: 0,
            counted: Packets::default(),
            round: 0,
            messages_left: 0,
            pulled_through: 0,
            unread_timeout: Duration::from_millis(config.unread_timeout_ms),
            unread_since: None,
        })
    }

    fn not_accepted(&mut self, user: Conn) {
        self.sources.end(user.address);
    }

    fn accepted(&mut self, _: Instant, link: &mut Link<Conn>) {
        // A client that opens no stream has the same time to log in. Heartbeats need a stream.
        let login_by = link.user.login_by;
        link.set_deadline(login_by);
    }

    fn opened(&mut self, _: Instant, link: &mut Link<Conn>) {
        let at = link.user.next_timer();
        link.set_deadline(Some(at));
    }

    fn data(&mut self, now: Instant, link: &mut Link<Conn>, bytes: &[u8]) -> ConsumedBytes {
        link.user.last_received = now;
        let consumed = self.read(now, link, bytes);
        // Refusals and repeated answers go to a client that may not read them.
        check_slow(self, now, link);
        consumed
    }

    fn finished(&mut self, now: Instant, link: &mut Link<Conn>) {
        end_connection(link, now, DisconnectCode::StreamFinished);
    }

    fn timeout(&mut self, now: Instant, link: &mut Link<Conn>, has_backlog: bool) {
        if !link.is_open() {
            // The transport ends the close. No check applies, so a time of `next_timer` that has
            // passed would stay the next one, and the front would not park.
            return;
        }
        // The datagrams that are left may contain the client's login, heartbeat or flow control.
        if !has_backlog && self.end_late(now, link) {
            return;
        }
        if link.user.last_sent + link.user.heartbeat / 2 <= now {
            let time_ns = self.now_ns;
            send(
                link,
                now,
                CONNECTION_CHANNEL,
                &ServerHeartbeat { time_ns }.into(),
            );
        }
        self.count_packets(link);
        let at = link.user.next_timer();
        link.set_deadline(Some(at));
    }

    fn closed(&mut self, _: Instant, link: &mut Link<Conn>, _: &ConnectionError) {
        self.count_packets(link);
        self.sources.end(link.user.address);
        if let Some(member) = link.user.member {
            self.member_connections.end(member);
        }
        self.detach_sessions(link);
        // A turn closes the session of a delayed login.
        self.resuming.retry();
    }
}

/// Consumes bytes without a pause of the stream.
fn consumed(bytes: usize) -> ConsumedBytes {
    ConsumedBytes {
        bytes,
        is_paused: false,
    }
}

impl State {
    /// Handles up to [`MESSAGES_MAX`] messages per round. Stops at one that waits for a slot.
    fn read(&mut self, now: Instant, link: &mut Link<Conn>, bytes: &[u8]) -> ConsumedBytes {
        let mut at = 0;
        if link.user.round != self.round {
            link.user.round = self.round;
            link.user.messages_left = MESSAGES_MAX;
        }
        while link.user.messages_left > 0 && self.stopping.is_none() {
            match wire::parse::<ClientMessage>(&bytes[at..]) {
                Ok(Some((header, message))) => {
                    if self.waits_for_slot(now, link, &header, &message) {
                        break;
                    }
                    at += usize::from(header.length);
                    link.user.messages_left -= 1;
                    if let Err(code) = self.handle(now, link, &header, &message) {
                        end_connection(link, now, code);
                        return consumed(bytes.len());
                    }
                }
                Ok(None) => return consumed(at),
                Err(error) => {
                    end_connection(link, now, error.disconnect_code());
                    return consumed(bytes.len());
                }
            }
        }
        ConsumedBytes {
            bytes: at,
            is_paused: at < bytes.len(),
        }
    }

    /// Ends the connection of a client that has not logged in, that is silent, or that reads too
    /// slowly. True if it did.
    fn end_late(&mut self, now: Instant, link: &mut Link<Conn>) -> bool {
        if link.user.login_by.is_some_and(|by| by <= now) {
            end_connection(link, now, DisconnectCode::LoginExpected);
            return true;
        }
        if link.user.last_received + link.user.heartbeat <= now {
            // The grace period of cancel on disconnect begins now, not when the transport has
            // closed.
            self.detach_sessions(link);
            end_connection(link, now, DisconnectCode::HeartbeatTimeout);
            return true;
        }
        check_slow(self, now, link);
        check_unread(self, now, link);
        !link.is_open()
    }

    /// Counts a connection for the first user that logs in on it. False if the user has its share
    /// of all connections.
    pub fn claim_connection(&mut self, link: &mut Link<Conn>, user: UserIx) -> bool {
        let is_claimed = link.user.member.is_some() || self.member_connections.begin(user);
        if is_claimed {
            link.user.member.get_or_insert(user);
        }
        is_claimed
    }

    /// Detaches the sessions of a connection that is lost.
    fn detach_sessions(&mut self, link: &mut Link<Conn>) {
        for channel in link.user.channels.iter_mut() {
            if let Channel::Live(at) = *channel {
                *channel = Channel::Ended;
                self.detach(at, false);
            }
        }
    }

    fn count_packets(&mut self, link: &mut Link<Conn>) {
        let now = link.packets();
        let before = std::mem::replace(&mut link.user.counted, now);
        self.stats.packets_sent.increment(now.sent - before.sent);
        self.stats.packets_lost.increment(now.lost - before.lost);
    }

    /// Handles one message. An error ends the connection.
    fn handle(
        &mut self,
        now: Instant,
        link: &mut Link<Conn>,
        header: &Header,
        message: &ClientMessage,
    ) -> Result<(), DisconnectCode> {
        if let ClientMessage::Heartbeat(_) = message {
            return Ok(());
        }
        let channel = header.channel;
        if usize::from(channel) >= CHANNELS_MAX {
            return Err(DisconnectCode::BadField);
        }
        match message {
            ClientMessage::Login(login) => self.log_in(now, link, channel, login),
            ClientMessage::Logout(_) => match *link.user.channel(channel) {
                Channel::Live(at) => {
                    self.detach(at, true);
                    end_channel(link, now, channel, DisconnectCode::Logout);
                    Ok(())
                }
                Channel::Free => Err(DisconnectCode::LoginExpected),
                Channel::LoggingIn => {
                    *link.user.channel(channel) = Channel::LoggingOut;
                    Ok(())
                }
                Channel::LoggingOut | Channel::Ended => Ok(()),
            },
            ClientMessage::SetTradingHold(wanted) => {
                self.in_session(now, link, channel, |state, at| {
                    let reason = match at {
                        Some(at) => state.request_hold(at, wanted)?,
                        None => RejectReason::UnknownSession,
                    };
                    let limit = state.limit_of(reason, at);
                    Some(hold::refused(wanted, reason, limit).into())
                })
            }
            ClientMessage::OpenOrders(wanted) if wanted.scope > 1 => Err(DisconnectCode::BadField),
            ClientMessage::OpenOrders(wanted) => {
                self.in_session(now, link, channel, |state, at| {
                    let reason = match at {
                        Some(at) => state.list_orders(at, wanted)?,
                        None => RejectReason::UnknownSession,
                    };
                    let limit = state.limit_of(reason, at);
                    Some(pieces::listing_refused(wanted, reason, limit).into())
                })
            }
            ClientMessage::Retransmit(wanted) => {
                self.in_session(now, link, channel, |state, at| {
                    let reason = match at {
                        Some(at) => state.retransmit(at, wanted)?,
                        None => RejectReason::UnknownSession,
                    };
                    let limit = state.limit_of(reason, at);
                    Some(pieces::retransmit_refused(wanted, reason, limit).into())
                })
            }
            _ => self.handle_request(now, link, header, message),
        }
    }

    fn log_in(
        &mut self,
        now: Instant,
        link: &mut Link<Conn>,
        channel: u16,
        login: &wire::Login,
    ) -> Result<(), DisconnectCode> {
        let to = (link.key(), channel);
        let address = link.user.address;
        match link.user.channel(channel) {
            Channel::Free | Channel::Ended => {}
            Channel::LoggingIn | Channel::LoggingOut | Channel::Live(_) => {
                return Err(DisconnectCode::LoginExpected);
            }
        }
        match self.request_login(to, address, login) {
            true => *link.user.channel(channel) = Channel::LoggingIn,
            false => end_channel(link, now, channel, DisconnectCode::NotReady),
        }
        Ok(())
    }

    /// Runs `act` for the session on the channel (`None` if the channel has ended), and sends the
    /// answer that it returns.
    fn in_session(
        &mut self,
        now: Instant,
        link: &mut Link<Conn>,
        channel: u16,
        act: impl FnOnce(&mut Self, Option<At>) -> Option<ServerMessage>,
    ) -> Result<(), DisconnectCode> {
        let at = match *link.user.channel(channel) {
            Channel::Live(at) => Some(at),
            Channel::Free => return Err(DisconnectCode::LoginExpected),
            Channel::LoggingIn | Channel::LoggingOut | Channel::Ended => None,
        };
        if let Some(answer) = act(self, at) {
            send(link, now, channel, &answer);
        }
        Ok(())
    }

    /// Requests a change of a trading hold, one at a time per session. It counts as a message and
    /// by the user's sessions. Returns the reason of a refusal.
    fn request_hold(&mut self, at: At, wanted: &SetTradingHold) -> Option<RejectReason> {
        if !self.is_in_rate(at) {
            self.stats.throttled.increment(1);
            return Some(RejectReason::Throttle);
        }
        let session = self.sessions.row(at);
        if std::mem::replace(&mut session.is_setting_hold, true) {
            return Some(RejectReason::Busy);
        }
        let front_request = FrontRequest::Hold {
            session: (at, session.epoch),
            login: session.login(),
            user_id: session.user_id.clone(),
            wanted: *wanted,
        };
        let queued = (Share::User(session.user), front_request);
        if self.front_requests.try_send(queued).is_err() {
            session.is_setting_hold = false;
            return Some(RejectReason::NotReady);
        }
        self.sessions.charge_hold_change(at, self.monotonic_ns);
        None
    }

    /// Limit value of a refusal by the front: of `THROTTLE` the wait in microseconds, else 0.
    pub fn limit_of(&mut self, reason: RejectReason, at: Option<At>) -> u64 {
        match at {
            Some(at) if reason == RejectReason::Throttle => self.wait_us(at),
            _ => 0,
        }
    }

    /// Microseconds until the rates of the session, its user and its group admit the next request.
    pub fn wait_us(&mut self, at: At) -> u64 {
        let wait_ns = self.sessions.wait_ns(at, self.monotonic_ns);
        wait_ns.div_ceil(1_000)
    }

    /// True if the rates of the session, its user and its group admit a message now.
    pub fn is_in_rate(&mut self, at: At) -> bool {
        self.sessions.is_in_rate(at, self.monotonic_ns)
    }
}
