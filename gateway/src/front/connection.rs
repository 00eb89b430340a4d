//! Handles a connection's messages: sessions on channels, requests into the ring.
//!
//! Bytes that are no message end the connection with their code. A session's own mistake, its end
//! or its refused login ends its channel alone. A request that is in flight then is refused
//! `UNKNOWN_SESSION`, because its sender could not know.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use admission::{Request, RequestName};
use sequencer::{Submission, SubmitError};
use transport::proto::ConnectionError;
use transport::{ConsumedBytes, Driver, Incoming, Link, Packets};
use types::RejectReason;
use types::command::RequestKind;
use wire::{
    CHANNELS_MAX, CONNECTION_CHANNEL, ClientMessage, Disconnect, DisconnectCode, Header, Rejected,
    ServerHeartbeat, ServerMessage, SetTradingHold, Text, append,
};

use super::desk::FrontRequest;
use super::session::{At, PARKED_MAX, Parked};
use super::state::{IN_FLIGHT_MAX, State};
use super::{RESEND_COST, RESUME_BYTES, hold, limit, pieces};

/// Client sequences below 2^48: enough for 89 years at 100,000 per second.
const CLIENT_SEQ_MAX: u64 = (1 << 48) - 1;
/// Messages per connection and round.
const MESSAGES_MAX: usize = 32;
/// Unsent bytes that a client may leave for [`SLOW_FOR`], and those that close its connection.
const SLOW_BYTES: usize = 1 << 20;
const SLOW_BYTES_MAX: usize = 16 << 20;
const SLOW_FOR: Duration = Duration::from_secs(1);
/// Half-open connections above which a peer must prove that it owns its address.
const HALF_OPEN_MAX: usize = 64;

/// State of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Channel {
    #[default]
    Free,
    LoggingIn,
    Live(At),
    /// A session was there, or a login was refused.
    Ended,
}

/// The front's state of a connection.
pub struct Conn {
    pub address: IpAddr,
    pub channels: Box<[Channel; CHANNELS_MAX]>,
    /// Longest silence on either side: the shortest heartbeat of its sessions.
    heartbeat: Duration,
    last_received: Instant,
    last_sent: Instant,
    /// Deadline of the first login. Heartbeats do not extend it.
    login_by: Option<Instant>,
    /// Since when more than [`SLOW_BYTES`] are unsent.
    slow_since: Option<Instant>,
    /// Upper bound of the unsent bytes that do not count as unread reports: resends, lists, and the
    /// instruments of a login.
    pulled: usize,
    /// Packets that the metrics already have.
    counted: Packets,
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

    fn next_look(&self) -> Instant {
        let silent = self.last_received + self.heartbeat;
        let quiet = self.last_sent + self.heartbeat / 2;
        let slow = self.slow_since.map(|since| since + SLOW_FOR);
        let others = [self.login_by, slow].into_iter().flatten();
        others.fold(silent.min(quiet), Instant::min)
    }
}

/// Appends a message for the peer.
pub fn send(link: &mut Link<Conn>, now: Instant, channel: u16, message: &ServerMessage) {
    append(message, channel, 0, link.out());
    link.user.last_sent = now;
}

/// Appends an encoded message under the owner's channel.
#[inline]
pub fn send_encoded(link: &mut Link<Conn>, now: Instant, channel: u16, bytes: &[u8]) {
    let out = link.out();
    let start = out.len();
    out.extend_from_slice(bytes);
    wire::set_channel(&mut out[start..], channel);
    link.user.last_sent = now;
}

/// Appends what the client asked for at once, or pulls at its own pace (resends, lists). It does
/// not count as unread reports (`design.md` 7).
pub fn pulled(link: &mut Link<Conn>, append: impl FnOnce(&mut Link<Conn>)) {
    let before = link.waiting_bytes();
    append(link);
    let added = link.waiting_bytes() - before;
    link.user.pulled = link.user.pulled.min(before) + added;
}

/// As [`send_encoded`], for several messages that the client pulls.
pub fn send_pulled<'a>(
    link: &mut Link<Conn>,
    now: Instant,
    channel: u16,
    messages: impl IntoIterator<Item = &'a [u8]>,
) {
    pulled(link, |link| {
        for bytes in messages {
            send_encoded(link, now, channel, bytes);
        }
    });
}

/// Ends a channel's session and sends the reason.
pub fn end_channel(link: &mut Link<Conn>, now: Instant, channel: u16, code: DisconnectCode) {
    *link.user.channel(channel) = Channel::Ended;
    send(link, now, channel, &disconnect(code));
}

/// Sends the reason and ends the connection once the client has received it.
pub fn end_connection(link: &mut Link<Conn>, now: Instant, code: DisconnectCode) {
    if link.is_open() {
        send(link, now, CONNECTION_CHANNEL, &disconnect(code));
        link.finish(now, u32::from(code.code()), &code.to_string());
    }
}

/// Closes the connection of a client with too many unsent bytes, without those of resends. Call it
/// after each append of anything else.
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
        state.stats.slow_consumers.increment(1);
        let code = DisconnectCode::SlowConsumer;
        link.close(u32::from(code.code()), &code.to_string());
    } else {
        let at = link.user.next_look();
        link.set_deadline(Some(at));
    }
}

fn disconnect(code: DisconnectCode) -> ServerMessage {
    Disconnect {
        code: code.code(),
        text: Text::truncated(&code.to_string()),
    }
    .into()
}

/// What a refusal of the message names.
fn name(message: &ClientMessage) -> Option<RequestName> {
    let (kind, client_order_id, engine_order_id) = match message {
        ClientMessage::NewOrder(m) => (RequestKind::New, m.client_order_id, 0),
        ClientMessage::Cancel(m) => (RequestKind::Cancel, m.client_order_id, m.engine_order_id),
        ClientMessage::Amend(m) => (RequestKind::Amend, m.client_order_id, m.engine_order_id),
        ClientMessage::MassCancel(_) => (RequestKind::MassCancel, 0, 0),
        ClientMessage::CancelAllAfter(_) => (RequestKind::CancelAllAfter, 0, 0),
        ClientMessage::Login(_)
        | ClientMessage::Logout(_)
        | ClientMessage::Heartbeat(_)
        | ClientMessage::SetTradingHold(_)
        | ClientMessage::OpenOrders(_)
        | ClientMessage::Retransmit(_) => return None,
    };
    Some(RequestName {
        kind,
        client_order_id,
        engine_order_id,
    })
}

/// An unnumbered refusal: the request was not seen.
pub fn rejected(
    now_ns: u64,
    client_seq: u64,
    request: RequestName,
    reason: RejectReason,
    limit: u64,
) -> ServerMessage {
    Rejected {
        client_seq,
        client_order_id: request.client_order_id,
        engine_order_id: request.engine_order_id,
        request: request.kind,
        reason,
        limit,
        node_sequence: 0,
        time_ns: now_ns,
        received_ns: now_ns,
    }
    .into()
}

/// A repeated request.
pub struct Resend {
    pub client_seq: u64,
    pub request: RequestName,
    /// The last request of the session that was seen.
    pub seen: u64,
    /// The answer may be read from the journal.
    pub may_look_up: bool,
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
        let count = self.addresses.get(&address).copied().unwrap_or(0);
        if self
            .failures
            .is_locked_out(address, None, config.failed_logins_max)
            || self.stopping.is_some()
            || count >= config.connections_per_address_max
            || self.connections >= config.connections_max as usize
        {
            return Incoming::Refuse;
        }
        if half_open >= HALF_OPEN_MAX && !is_validated {
            return Incoming::Retry;
        }
        *self.addresses.entry(address).or_default() += 1;
        self.connections += 1;
        let heartbeat = Duration::from_millis(u64::from(config.heartbeat_ms.max(100)));
        Incoming::Accept(Conn {
            address,
            channels: Box::new([Channel::Free; CHANNELS_MAX]),
            heartbeat,
            last_received: now,
            last_sent: now,
            login_by: Some(now + Duration::from_millis(config.login_timeout_ms)),
            slow_since: None,
            pulled: 0,
            counted: Packets::default(),
        })
    }

    fn opened(&mut self, _: Instant, link: &mut Link<Conn>) {
        let at = link.user.next_look();
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

    fn timeout(&mut self, now: Instant, link: &mut Link<Conn>) {
        if link.user.login_by.is_some_and(|by| by <= now) {
            return end_connection(link, now, DisconnectCode::LoginExpected);
        }
        if link.user.last_received + link.user.heartbeat <= now {
            // The grace begins now, not when the transport gives up on the close.
            self.lose_sessions(link);
            return end_connection(link, now, DisconnectCode::HeartbeatTimeout);
        }
        check_slow(self, now, link);
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
        let at = link.user.next_look();
        link.set_deadline(Some(at));
    }

    fn closed(&mut self, _: Instant, link: &mut Link<Conn>, _: &ConnectionError) {
        self.count_packets(link);
        self.connections -= 1;
        if let Some(count) = self.addresses.get_mut(&link.user.address) {
            *count -= 1;
            if *count == 0 {
                self.addresses.remove(&link.user.address);
            }
        }
        self.lose_sessions(link);
    }
}

fn done(bytes: usize) -> ConsumedBytes {
    ConsumedBytes {
        bytes,
        is_paused: false,
    }
}

impl State {
    /// Handles the messages of a round.
    fn read(&mut self, now: Instant, link: &mut Link<Conn>, bytes: &[u8]) -> ConsumedBytes {
        let mut at = 0;
        for _ in 0..MESSAGES_MAX {
            if self.in_flight >= IN_FLIGHT_MAX || self.stopping.is_some() {
                break;
            }
            match wire::parse::<ClientMessage>(&bytes[at..]) {
                Ok(Some((header, message))) => {
                    at += usize::from(header.length);
                    if let Err(code) = self.handle(now, link, &header, &message) {
                        end_connection(link, now, code);
                        return done(bytes.len());
                    }
                }
                Ok(None) => return done(at),
                Err(error) => {
                    end_connection(link, now, error.disconnect_code());
                    return done(bytes.len());
                }
            }
        }
        ConsumedBytes {
            bytes: at,
            is_paused: at < bytes.len(),
        }
    }

    /// Releases the sessions of a connection that is gone or given up.
    fn lose_sessions(&mut self, link: &mut Link<Conn>) {
        for channel in link.user.channels.iter_mut() {
            if let Channel::Live(at) = *channel {
                *channel = Channel::Ended;
                self.lose(at, false);
            }
        }
    }

    fn count_packets(&mut self, link: &mut Link<Conn>) {
        let now = link.packets();
        let before = std::mem::replace(&mut link.user.counted, now);
        self.stats.packets_sent.increment(now.sent - before.sent);
        self.stats.packets_lost.increment(now.lost - before.lost);
    }

    /// Handles one message; an error ends the connection.
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
                    self.lose(at, true);
                    end_channel(link, now, channel, DisconnectCode::Logout);
                    Ok(())
                }
                Channel::Free => Err(DisconnectCode::LoginExpected),
                Channel::LoggingIn | Channel::Ended => Ok(()),
            },
            ClientMessage::SetTradingHold(wanted) => {
                self.set_trading_hold(now, link, channel, wanted)
            }
            ClientMessage::OpenOrders(wanted) if wanted.scope > 1 => Err(DisconnectCode::BadField),
            ClientMessage::OpenOrders(wanted) => {
                self.in_session(now, link, channel, |state, at| {
                    let reason = match at {
                        Some(at) => state.list_orders(at, wanted)?,
                        None => RejectReason::UnknownSession,
                    };
                    Some(pieces::not_listed(wanted, reason).into())
                })
            }
            ClientMessage::Retransmit(wanted) => {
                self.in_session(now, link, channel, |state, at| {
                    let reason = match at {
                        Some(at) => state.retransmit(at, wanted)?,
                        None => RejectReason::UnknownSession,
                    };
                    Some(pieces::not_sent(wanted, reason).into())
                })
            }
            _ => self.act(now, link, header, message),
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
            Channel::LoggingIn | Channel::Live(_) => return Err(DisconnectCode::LoginExpected),
        }
        let login = Box::new(*login);
        let front_request = FrontRequest::Login { to, address, login };
        match self.front_requests.try_send(front_request) {
            Ok(()) => *link.user.channel(channel) = Channel::LoggingIn,
            Err(_) => end_channel(link, now, channel, DisconnectCode::NotReady),
        }
        Ok(())
    }

    fn set_trading_hold(
        &mut self,
        now: Instant,
        link: &mut Link<Conn>,
        channel: u16,
        wanted: &SetTradingHold,
    ) -> Result<(), DisconnectCode> {
        let reason = match *link.user.channel(channel) {
            Channel::Live(at) => self.request_hold(at, wanted),
            Channel::Free => return Err(DisconnectCode::LoginExpected),
            Channel::LoggingIn | Channel::Ended => Some(RejectReason::UnknownSession),
        };
        if let Some(reason) = reason {
            send(link, now, channel, &hold::refused(wanted, reason).into());
        }
        Ok(())
    }

    /// Runs `act` for the session on the channel, `None` once it has ended, and sends its immediate
    /// answer.
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
            Channel::LoggingIn | Channel::Ended => None,
        };
        if let Some(answer) = act(self, at) {
            send(link, now, channel, &answer);
        }
        Ok(())
    }

    /// Starts a change of a trading hold, one at a time per session. Each counts as a message.
    /// Returns the reason of a refusal.
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
            user_id: session.user_id.clone(),
            wanted: *wanted,
        };
        if self.front_requests.try_send(front_request).is_err() {
            session.is_setting_hold = false;
            return Some(RejectReason::NotReady);
        }
        None
    }

    /// Handles a request: rate, limit, then the ring.
    fn act(
        &mut self,
        now: Instant,
        link: &mut Link<Conn>,
        header: &Header,
        message: &ClientMessage,
    ) -> Result<(), DisconnectCode> {
        let (channel, client_seq) = (header.channel, header.sequence);
        let name = name(message).ok_or(DisconnectCode::BadField)?;
        if client_seq == 0 || client_seq > CLIENT_SEQ_MAX {
            return Err(DisconnectCode::BadField);
        }
        let refusal = match *link.user.channel(channel) {
            Channel::Live(at) => self.enter(now, link, at, client_seq, message)?,
            Channel::Free => return Err(DisconnectCode::LoginExpected),
            Channel::LoggingIn | Channel::Ended => Some(RejectReason::UnknownSession),
        };
        if let Some(reason) = refusal {
            let limit = match (reason, *link.user.channel(channel)) {
                (RejectReason::Throttle, Channel::Live(at)) => self.wait_us(at),
                _ => 0,
            };
            let refusal = rejected(self.now_ns, client_seq, name, reason, limit);
            send(link, now, channel, &refusal);
        }
        Ok(())
    }

    /// Enters a session's request, or returns why it was not seen.
    fn enter(
        &mut self,
        now: Instant,
        link: &mut Link<Conn>,
        at: At,
        client_seq: u64,
        message: &ClientMessage,
    ) -> Result<Option<RejectReason>, DisconnectCode> {
        self.stats.requests.increment(1);
        let is_over_rate = !self.is_in_rate(at);
        let may_reduce = matches!(
            message,
            ClientMessage::Cancel(_) | ClientMessage::MassCancel(_)
        );
        let session = self.sessions.row(at);
        if is_over_rate && !may_reduce && client_seq > session.entered {
            self.stats.throttled.increment(1);
            return Ok(Some(RejectReason::Throttle));
        }
        let request = session.request(client_seq, message);
        let request = request.map_err(|_| DisconnectCode::BadField)?;
        let answered = session.answered;
        if client_seq <= answered {
            let resend = Resend {
                client_seq,
                request: request.name(),
                seen: answered,
                may_look_up: !is_over_rate,
            };
            return Ok(self.resend_answer(now, Some(link), at, &resend));
        }
        if let Some(parked) = &mut session.parked {
            // Requests stay in session order: none overtakes one that waits for identity.
            if parked.len() >= PARKED_MAX {
                return Ok(Some(RejectReason::Busy));
            }
            parked.push_back(Parked {
                client_seq,
                message: *message,
                is_over_rate,
            });
            session.entered = session.entered.max(client_seq);
            return Ok(None);
        }
        let refusal = self.submit_within_limit(at, request, is_over_rate);
        if refusal.is_none() {
            let session = self.sessions.row(at);
            session.entered = session.entered.max(client_seq);
        }
        Ok(refusal)
    }

    /// Sends the original answer to a request under its number: from the window, else after a
    /// lookup. Returns the reason of a refusal.
    ///
    /// Past the rate nothing is looked up: lookups read the journal, which logins and resumes read
    /// too.
    pub fn resend_answer(
        &mut self,
        now: Instant,
        link: Option<&mut Link<Conn>>,
        at: At,
        resend: &Resend,
    ) -> Option<RejectReason> {
        let client_seq = resend.client_seq;
        self.stats.resends.increment(1);
        let (session, pool) = self.sessions.parts(at);
        let owner = session.owner?;
        if let Some(number) = session.window.answer(pool, client_seq) {
            // A message that is not durable, or on its way to a client that catches up, is sent
            // anyway.
            if number <= session.released
                && (session.is_following || number <= session.sent)
                && let Some(link) = link
            {
                send_encoded(link, now, owner.channel, session.window.get(pool, number));
            }
            return None;
        }
        if client_seq > session.answered && client_seq <= resend.seen {
            return None; // Its report is in flight.
        }
        if !resend.may_look_up {
            return Some(RejectReason::AlreadySeen);
        }
        let rate = self.market.config.throttle_per_s;
        session.rate.charge(self.monotonic_ns, rate, RESEND_COST);
        let front_request = FrontRequest::Answer {
            session: (at, session.epoch),
            ix: session.ix,
            client_seq,
            request: resend.request,
        };
        let is_asked = self.look_up(at, front_request);
        (!is_asked).then_some(RejectReason::AlreadySeen)
    }

    /// Submits a request. An order above the budget goes to identity first, and its session waits.
    pub fn submit_within_limit(
        &mut self,
        at: At,
        request: Request,
        is_over_rate: bool,
    ) -> Option<RejectReason> {
        // Past the rate it is a repeat, which needs no check, or is refused.
        if let Request::New(new) = &request
            && !is_over_rate
        {
            let session = self.sessions.row(at);
            let spec = self.specs.get(new.instrument.index());
            let market = &self.market;
            if !limit::is_in_budget(spec, &session.budget, new, || market.day()) {
                let front_request = FrontRequest::Limit {
                    session: (at, session.epoch),
                    user: session.user,
                    user_id: session.user_id.clone(),
                    budget: session.budget.clone(),
                    new: Box::new(*new),
                };
                if self.front_requests.try_send(front_request).is_err() {
                    return Some(RejectReason::NotReady);
                }
                session.parked = Some(VecDeque::new());
                self.limited.insert(at, *new);
                return None;
            }
        }
        self.submit(at, &request, is_over_rate)
    }

    /// Puts a request into the ring, or returns why it cannot.
    pub fn submit(
        &mut self,
        at: At,
        request: &Request,
        is_over_rate: bool,
    ) -> Option<RejectReason> {
        let asked = Submission {
            tag: 0,
            epoch: self.sessions.row(at).epoch,
            received_ns: self.now_ns,
            is_over_rate,
        };
        match self.ring.submit(asked, request) {
            Ok(()) => {
                self.in_flight += 1;
                None
            }
            Err(SubmitError::Busy) => Some(RejectReason::Busy),
            Err(_) => Some(RejectReason::NotReady),
        }
    }

    /// Microseconds until the rates of the session, its user and its group admit the next request.
    pub fn wait_us(&mut self, at: At) -> u64 {
        let (now_ns, config) = (self.monotonic_ns, &self.market.config);
        let session = self.sessions.row(at);
        let of_session = session.rate.wait_ns(now_ns, config.throttle_per_s);
        let (user, group) = (session.user, session.group);
        let user = self.sessions.users.entry(user).or_default();
        let of_user = user.rate.wait_ns(now_ns, config.user_throttle_per_s);
        let of_group = self.sessions.groups.get(&group);
        let of_group = of_group.map_or(0, |rate| rate.wait_ns(now_ns, config.group_throttle_per_s));
        of_session.max(of_user).max(of_group).div_ceil(1_000)
    }

    /// True within the rates of the session, of its user over all sessions, and of its group.
    pub fn is_in_rate(&mut self, at: At) -> bool {
        let config = &self.market.config;
        let session = self.sessions.row(at);
        let (user, group) = (session.user, session.group);
        if !session.rate.admit(self.monotonic_ns, config.throttle_per_s) {
            return false;
        }
        let user = self.sessions.users.entry(user).or_default();
        if !user
            .rate
            .admit(self.monotonic_ns, config.user_throttle_per_s)
        {
            return false;
        }
        if group.is_none() {
            return true;
        }
        let rate = self.sessions.groups.entry(group).or_default();
        rate.admit(self.monotonic_ns, config.group_throttle_per_s)
    }
}
