//! The client's side of the protocol without I/O: a state machine for the sessions of one
//! connection.
//!
//! It has no socket, no task and no clock. The driver passes the bytes of the stream to
//! [`Sessions::receive`], writes the output of [`Sessions::poll_transmit`], and calls
//! [`Sessions::handle_timeout`] at [`Sessions::poll_timeout`]. It calls [`Sessions::connected`] and
//! [`Sessions::disconnected`] when a connection starts and ends. The drivers are
//! [`crate::Connection`] and [`crate::spinning::Connection`].
//!
//! Invariants:
//!
//! - The numbered messages of a session arrive in order and once, across connections. Messages
//!   requested with [`wire::Retransmit`] arrive again.
//! - A request is sent under one client sequence. It is sent again only if the server has not seen
//!   it.
//! - After a resume, unseen requests are sent before new ones, in the order of the first calls.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use wire::{
    CHANNELS_MAX, CONNECTION_CHANNEL, ClientMessage, Disconnect, Heartbeat, InstrumentDefinition,
    LoginAccepted, ServerMessage, append, parse,
};

use crate::channel::{Channel, Phase, Sent, SequenceCheck};
use crate::{Error, LoginOptions};

/// Bytes waiting to be transmitted at which no further request is accepted.
const OUT_LEN_MAX: usize = 1 << 20;
/// Silence after which a heartbeat is due before the first login is answered.
const HEARTBEAT_FIRST: Duration = Duration::from_secs(5);
/// Time limit of connecting, and of one login.
pub const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The server's answer to a login.
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

/// What a server message means for the driver.
#[derive(Clone, Debug)]
pub enum Event {
    /// For the caller.
    Report(Report),
    /// For the caller; the session is logged in.
    LoggedIn { report: Report, info: SessionInfo },
    /// The login failed. A first login leaves the channel free, a resumed session keeps its state.
    LoginFailed { channel: u16, error: Error },
    /// For the caller; the server has ended the connection.
    Ended { report: Report, error: Error },
    /// Not for the caller: a duplicate, or a message of a forgotten session.
    Ignored,
}

/// The sessions of one connection, kept across connections.
pub struct Sessions {
    /// Indexed by channel.
    channels: Vec<Option<Channel>>,
    instruments: BTreeMap<u32, InstrumentDefinition>,
    out: Vec<u8>,
    /// Position of the next request among those of all sessions.
    next_position: u64,
    /// Half of the shortest heartbeat interval of the sessions.
    heartbeat: Duration,
    /// When bytes were last passed to the connection; `None` without one.
    last_sent: Option<Instant>,
}

impl Default for Sessions {
    fn default() -> Self {
        Self::new()
    }
}

impl Sessions {
    pub fn new() -> Self {
        Self {
            channels: (0..CHANNELS_MAX).map(|_| None).collect(),
            instruments: BTreeMap::new(),
            out: Vec::new(),
            next_position: 0,
            heartbeat: HEARTBEAT_FIRST,
            last_sent: None,
        }
    }

    /// Starts a connection. No session is logged in on it yet.
    pub fn connected(&mut self, now: Instant) {
        self.disconnected();
        self.heartbeat = HEARTBEAT_FIRST;
        self.last_sent = Some(now);
    }

    /// Ends the connection. Untransmitted bytes are dropped. Requests are kept for a resume.
    pub fn disconnected(&mut self) {
        self.last_sent = None;
        self.out.clear();
        for slot in &mut self.channels {
            match slot.as_mut().map(|session| session.phase) {
                // Never logged in: there is nothing to resume.
                Some(Phase::LoggingIn) => *slot = None,
                Some(_) => {
                    set_phase(slot, Phase::LoggedOut);
                    slot.iter_mut().for_each(Channel::clear_resends);
                }
                None => {}
            }
        }
    }

    pub fn is_connected(&self) -> bool {
        self.last_sent.is_some()
    }

    /// Appends the login of a session on an unused channel (0 to 63). The answer is
    /// [`Event::LoggedIn`] or [`Event::LoginFailed`].
    ///
    /// # Errors
    /// [`Error::LoginField`]; [`Error::Stream`] without a connection.
    pub fn login(&mut self, channel: u16, options: LoginOptions) -> Result<(), Error> {
        if !self.is_connected() {
            return Err(Error::Stream);
        }
        let slot = self.channels.get_mut(usize::from(channel));
        let slot = slot.ok_or(Error::LoginField)?;
        if slot
            .as_ref()
            .is_some_and(|old| old.phase != Phase::LoggedOut)
        {
            return Err(Error::LoginField);
        }
        let session = Channel::new(options);
        let message = session.options.message(session.last_sequence)?;
        append(&ClientMessage::from(message), channel, 0, &mut self.out);
        *slot = Some(session);
        Ok(())
    }

    /// Drops a session. Its messages are ignored, and its requests are not sent again.
    pub fn forget(&mut self, channel: u16) {
        if let Some(slot) = self.channels.get_mut(usize::from(channel)) {
            *slot = None;
        }
        self.resend_unseen();
    }

    /// Appends the logins of all sessions after [`Sessions::connected`]. Returns their channels:
    /// each gets its own answer. After the last login, unseen requests are sent again and new
    /// requests are accepted.
    ///
    /// # Errors
    /// [`Error::LoginField`].
    pub fn resume(&mut self) -> Result<Vec<u16>, Error> {
        let mut asked = Vec::new();
        for (channel, slot) in (0u16..).zip(&mut self.channels) {
            let Some(session) = slot.as_mut().filter(|old| old.phase == Phase::LoggedOut) else {
                continue;
            };
            let message = session.options.message(session.last_sequence)?;
            session.phase = Phase::Resuming;
            append(&ClientMessage::from(message), channel, 0, &mut self.out);
            asked.push(channel);
        }
        Ok(asked)
    }

    /// Appends a message of a session that is logged in. Returns its client sequence, 0 if it has
    /// none, `None` if the send buffer is full.
    ///
    /// # Errors
    /// [`Error::NotLoggedIn`], [`Error::TooManyUnanswered`].
    #[inline]
    pub fn send(&mut self, channel: u16, message: &ClientMessage) -> Result<Option<u64>, Error> {
        if self.out.len() >= OUT_LEN_MAX {
            return Ok(None);
        }
        let slot = self.channels.get_mut(usize::from(channel));
        let session = slot.and_then(Option::as_mut);
        let session = session
            .filter(|session| session.phase == Phase::Live)
            .ok_or(Error::NotLoggedIn)?;
        if let ClientMessage::Retransmit(range) = message {
            session.request_resend(range.request_id, range.first..=range.last);
        }
        if !has_client_seq(message) {
            append(message, channel, 0, &mut self.out);
            return Ok(Some(0));
        }
        let client_seq = session.next_client_seq()?;
        let start = self.out.len();
        append(message, channel, client_seq, &mut self.out);
        session.sent(self.next_position, &self.out[start..]);
        self.next_position += 1;
        Ok(Some(client_seq))
    }

    /// Parses the first message of `bytes`. Returns its length in bytes and its event, `None` until
    /// it is complete.
    ///
    /// # Errors
    /// [`Error::Wire`], [`Error::Gap`]: the driver must end the connection.
    pub fn receive(&mut self, now: Instant, bytes: &[u8]) -> Result<Option<(usize, Event)>, Error> {
        let Some((header, message)) = parse::<ServerMessage>(bytes)? else {
            return Ok(None);
        };
        let report = Report {
            channel: header.channel,
            sequence: header.sequence,
            message,
            received_at: now,
        };
        Ok(Some((usize::from(header.length), self.event(report)?)))
    }

    fn event(&mut self, report: Report) -> Result<Event, Error> {
        if let ServerMessage::InstrumentDefinition(definition) = &report.message {
            self.instruments.insert(definition.instrument, *definition);
        }
        if report.channel == CONNECTION_CHANNEL {
            return Ok(match &report.message {
                ServerMessage::Disconnect(end) => Event::Ended {
                    report,
                    error: Error::of_disconnect(end),
                },
                _ => Event::Report(report),
            });
        }
        let slot = self.channels.get_mut(usize::from(report.channel));
        let Some(session) = slot.and_then(Option::as_mut) else {
            return Ok(Event::Ignored);
        };
        match &report.message {
            ServerMessage::LoginAccepted(info) => Ok(self.logged_in(report, *info)),
            ServerMessage::Disconnect(end) => Ok(self.logged_out(report, end)),
            ServerMessage::ServerHeartbeat(_)
            | ServerMessage::InstrumentDefinition(_)
            | ServerMessage::TradingHold(_)
            | ServerMessage::OpenOrder(_)
            | ServerMessage::OpenOrdersEnd(_)
            | ServerMessage::RetransmitEnd(_)
            | ServerMessage::OrderToTrade(_)
            | ServerMessage::LedgerBalance(_)
            | ServerMessage::Accepted(_)
            | ServerMessage::OrderAck(_)
            | ServerMessage::Rejected(_)
            | ServerMessage::Fill(_)
            | ServerMessage::Cancelled(_)
            | ServerMessage::Amended(_)
            | ServerMessage::Reduced(_)
            | ServerMessage::MassCancelled(_)
            | ServerMessage::CancelAllAfterSet(_)
            | ServerMessage::TradingHoldChanged(_)
            | ServerMessage::SettlementProgress(_)
            | ServerMessage::TradeBusted(_) => {
                let check = match report.sequence {
                    0 => SequenceCheck::Next,
                    sequence => session.check_sequence(sequence)?,
                };
                if let ServerMessage::RetransmitEnd(end) = report.message {
                    session.resend_answered(end.request_id);
                }
                let client_seq = report.message.answers();
                if client_seq != 0 {
                    session.answered(client_seq);
                }
                Ok(match check {
                    SequenceCheck::Next | SequenceCheck::Resent => Event::Report(report),
                    SequenceCheck::Duplicate => Event::Ignored,
                })
            }
        }
    }

    fn logged_in(&mut self, report: Report, info: LoginAccepted) -> Event {
        let channel = report.channel;
        let slot = &mut self.channels[usize::from(channel)];
        let Some(session) = slot else {
            return Event::Ignored;
        };
        let is_first = session.phase == Phase::LoggingIn;
        if let Err(error) = session.accepted(&info) {
            if is_first {
                *slot = None;
            } else {
                session.phase = Phase::LoggedOut;
            }
            return Event::LoginFailed { channel, error };
        }
        session.phase = match session.phase {
            Phase::Resuming => Phase::Resumed {
                last_client_seq: info.last_client_seq,
            },
            _ => Phase::Live,
        };
        if info.heartbeat_ms > 0 {
            let half = Duration::from_millis(u64::from(info.heartbeat_ms) / 2);
            self.heartbeat = self.heartbeat.min(half);
        }
        self.resend_unseen();
        Event::LoggedIn { report, info }
    }

    /// Handles the server's end of one session.
    fn logged_out(&mut self, report: Report, end: &Disconnect) -> Event {
        let channel = report.channel;
        let slot = &mut self.channels[usize::from(channel)];
        let failed = Event::LoginFailed {
            channel,
            error: Error::of_disconnect(end),
        };
        match slot.as_ref().map(|session| session.phase) {
            Some(Phase::Resuming) => {
                set_phase(slot, Phase::LoggedOut);
                failed
            }
            Some(Phase::LoggingIn) => {
                *slot = None;
                failed
            }
            _ => {
                *slot = None;
                self.resend_unseen();
                Event::Report(report)
            }
        }
    }

    /// Ends a resume once all sessions are logged in. Appends the unseen requests in the original
    /// order over all sessions, then permits new requests.
    fn resend_unseen(&mut self) {
        let sessions = || self.channels.iter().flatten();
        let is_waiting =
            |session: &Channel| matches!(session.phase, Phase::LoggedOut | Phase::Resuming);
        if sessions().any(is_waiting) {
            return;
        }
        let mut unseen: Vec<&Sent> = Vec::new();
        for session in sessions() {
            if let Phase::Resumed { last_client_seq } = session.phase {
                unseen.extend(session.unseen(last_client_seq));
            }
        }
        unseen.sort_unstable_by_key(|sent| sent.position);
        for sent in unseen {
            self.out.extend_from_slice(sent.bytes());
        }
        for slot in &mut self.channels {
            if let Some(Channel {
                phase: phase @ Phase::Resumed { .. },
                ..
            }) = slot
            {
                *phase = Phase::Live;
            }
        }
    }

    /// Bytes waiting to be transmitted.
    pub fn waiting_bytes(&self) -> usize {
        self.out.len()
    }

    /// Moves the waiting bytes to the end of `out`. They count as sent at `now`.
    #[inline]
    pub fn poll_transmit(&mut self, now: Instant, out: &mut Vec<u8>) {
        if self.out.is_empty() {
            return;
        }
        self.last_sent = self.last_sent.map(|_| now);
        if out.is_empty() {
            // A swap copies nothing.
            std::mem::swap(&mut self.out, out);
        } else {
            out.append(&mut self.out);
        }
    }

    /// When [`Sessions::handle_timeout`] is due; `None` without a connection.
    #[inline]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.last_sent.map(|at| at + self.heartbeat)
    }

    /// Appends a heartbeat if one is due. The transport detects a silent server.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.out.is_empty() && self.poll_timeout().is_some_and(|at| at <= now) {
            let heartbeat = ClientMessage::from(Heartbeat {});
            append(&heartbeat, CONNECTION_CHANNEL, 0, &mut self.out);
        }
    }

    /// Last number received in a session's stream, 0 for none.
    pub fn last_sequence(&self, channel: u16) -> u64 {
        let slot = self.channels.get(usize::from(channel));
        slot.and_then(Option::as_ref)
            .map_or(0, |session| session.last_sequence)
    }

    /// Instruments that the server has announced; complete after a login.
    pub fn instruments(&self) -> impl Iterator<Item = &InstrumentDefinition> {
        self.instruments.values()
    }
}

fn set_phase(slot: &mut Option<Channel>, phase: Phase) {
    if let Some(session) = slot {
        session.phase = phase;
    }
}

/// True for a request that carries a client sequence.
fn has_client_seq(message: &ClientMessage) -> bool {
    match message {
        ClientMessage::NewOrder(_)
        | ClientMessage::Cancel(_)
        | ClientMessage::Amend(_)
        | ClientMessage::MassCancel(_)
        | ClientMessage::CancelAllAfter(_) => true,
        ClientMessage::Login(_)
        | ClientMessage::Logout(_)
        | ClientMessage::Heartbeat(_)
        | ClientMessage::SetTradingHold(_)
        | ClientMessage::OpenOrders(_)
        | ClientMessage::Retransmit(_) => false,
    }
}
