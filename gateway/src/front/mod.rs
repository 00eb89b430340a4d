//! The front: trading sessions over QUIC on a polled thread (`design.md` 5). It submits requests to
//! the hot thread's ring. It reads the reports from a ring, keeps them in the session's window, and
//! sends them once the commit position has reached them.
//!
//! | file | contents |
//! |---|---|
//! | `connection` | bytes and timers of a connection, its channels |
//! | `requests`, `in_flight` | requests into the ring; each user's share of the ring |
//! | `state` | sessions, ring, messages that wait for durability |
//! | `session`, `window` | state of a session; its last messages |
//! | `sources` | number of connections by source address |
//! | `report` | reports as messages of the protocol |
//! | `desk` | requests to tokio tasks and their answers: `login`, `limit`, `hold`, `resend` |
//! | `shares` | places that users or addresses share: waiting logins, requests in progress |
//! | `balances` | ledger balances for the sessions of a user |
//! | `compare` | samples of live messages compared with those of the journal |
//! | `failures` | failed logins by address and session name |
//! | `fair_queue` | sessions and users that take turns to be sent messages |
//! | `resume` | messages that a client lacks, and delayed logins, as fast as it reads |
//! | `pieces` | open orders and retransmissions, as fast as the client reads |
//! | `server`, `tls` | assembly; certificate |
//!
//! A round handles messages from tokio, reports, received datagrams, messages that became durable,
//! resumes, long answers, balances, closings of sessions, and datagrams to send. One that sends
//! first (`Front::sends_first`) receives nothing. Nothing in a round blocks.
//!
//! Invariants:
//!
//! - The requests of a session are submitted in the order in which they arrive.
//! - A numbered message is sent only when the commit position has reached it.
//! - The memory per client is bounded (`design.md` 7).

pub mod balances;
pub mod compare;
mod connection;
mod desk;
mod failures;
mod fair_queue;
mod hold;
mod in_flight;
mod limit;
mod login;
mod pieces;
pub mod report;
mod requests;
mod resend;
mod resume;
pub mod server;
mod session;
mod shares;
mod sources;
mod state;
mod tls;
mod window;

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use admission::{RejectDetails, Request};
use sequencer::{Commit, Opened, Polled, Stamp, SubmitError};
use transport::{Endpoint, Key, Link};
use types::{InstrumentIx, InstrumentSpec, RejectReason, UserIx};
use wire::{
    Accepted, DisconnectCode, InstrumentDefinition, LoginAccepted, OrderToTrade, ServerMessage,
    Text,
};

use self::connection::{
    Channel, Conn, append_pulled, check_slow, end_channel, end_connection, send, send_encoded,
};
use self::desk::Share;
pub use self::desk::{FrontMessage, FrontQueue};
use self::requests::{Received, Resend, rejected};
use self::session::{At, Limited, Owner};
use self::state::{ClientAction, Due, LAST_REPORTS, State, reason_of};
use crate::market::monotonic_ns;

/// Unsent bytes of a connection below which a resume continues and a login is answered.
const RESUME_BYTES: usize = 256 << 10;
/// Messages per resume and round.
const RESUME_MESSAGES: usize = 1_024;
/// Messages that a resend is charged in the session's rate, in addition to the request itself.
const RESEND_COST: u64 = 100;

/// The front of the market's trading sessions.
pub struct Front {
    endpoint: Endpoint<Conn>,
    state: State,
    commit: Commit,
    queue: FrontQueue,
    /// Reused in each round.
    actions: Vec<ClientAction>,
    /// When the stopping front ended its connections.
    ended_at: Option<Instant>,
    /// The last round sent something, which may have made space for more.
    has_flushed: bool,
    /// The last round did work.
    did_work: bool,
    /// The last round received a datagram, or a timer fired, after an idle round. If reports wait,
    /// the next round sends the answers and makes no receive call, which most often would return
    /// nothing. Not under load: there an extra round costs more than the call.
    sends_first: bool,
}

impl Front {
    /// Handles a message from tokio.
    fn on_message(&mut self, now: Instant, message: FrontMessage) {
        match message {
            FrontMessage::Login { to, from, outcome } => self.on_login(now, to, from, outcome),
            FrontMessage::Limit { session, outcome } => {
                if self.is_current(session) {
                    self.state.sessions.row(session.0).is_checking_limit = false;
                    self.on_limit_checked(now, session.0, outcome);
                }
            }
            FrontMessage::Hold { session, answer } => {
                if self.is_current(session) {
                    self.state.sessions.row(session.0).is_setting_hold = false;
                    self.send(now, session.0, &answer.into());
                }
            }
            FrontMessage::Messages {
                session,
                after,
                is_retransmit,
                outcome,
            } => match (self.is_current(session), is_retransmit) {
                (false, _) => self.state.end_look_up(session.0),
                (true, false) => self.on_resume_messages(now, session.0, after, outcome),
                (true, true) => self.on_retransmit_messages(now, session.0, after, outcome),
            },
            FrontMessage::OpenOrders { session, piece } => {
                if self.is_current(session) {
                    self.on_open_orders(now, session.0, piece);
                }
            }
            FrontMessage::Answer {
                session,
                received,
                message,
            } => {
                if self.end_look_up(session) {
                    self.on_answer(now, session.0, &received, message);
                }
            }
            FrontMessage::Instrument(spec) => self.state.set_instrument(spec),
            FrontMessage::Announce(instrument) => self.announce(now, instrument),
            FrontMessage::Compare(sample) => self.compare(sample),
            FrontMessage::Balances(balances) => self.on_balances(balances),
            FrontMessage::Members(as_of, members) => {
                self.state.sessions.set_members(as_of, &members);
            }
            FrontMessage::Forget(session) => self.forget(now, session),
            FrontMessage::EndUser(user, code) => {
                // The commands that ended the user's orders are durable: the client reads those
                // reports before the end (B9 of the protocol's review).
                self.read_reports(now);
                self.send_durable(now);
                self.end_user(now, user, code);
            }
            FrontMessage::Shutdown => {
                self.state.stopping.get_or_insert(now + LAST_REPORTS);
            }
        }
    }

    /// Compares a message in a session's window with the journal's.
    fn compare(&mut self, sample: compare::Sample) {
        let sessions = &mut self.state.sessions;
        let compared = match sessions.at(sample.session) {
            Some(at) => {
                let (row, pool) = sessions.parts(at);
                row.window.compare(pool, sample.number, &sample.rebuilt)
            }
            None => window::Compared::NotKept,
        };
        let _ = sample.answer.send(compared);
    }

    /// Sends the original answer to a repeated request, or a refusal if the journal no longer has
    /// it.
    fn on_answer(
        &mut self,
        now: Instant,
        at: At,
        received: &Received,
        message: Option<bytes::Bytes>,
    ) {
        match message {
            Some(bytes) => self.with_owner(at, |link, owner| {
                send_encoded(link, now, owner.channel, &bytes);
            }),
            None => self.refuse(now, at, received, RejectReason::AlreadySeen),
        }
    }

    /// Ends a look-up. True if the login that asked for it still owns the session.
    fn end_look_up(&mut self, session: (At, types::Sequence)) -> bool {
        self.state.end_look_up(session.0);
        self.is_current(session)
    }

    /// True if the login of this epoch still owns the session.
    fn is_current(&mut self, (at, epoch): (At, types::Sequence)) -> bool {
        let session = self.state.sessions.row(at);
        session.epoch == epoch && session.owner.is_some()
    }

    /// Calls `act` with the connection that owns the session, if there is one.
    fn with_owner(&mut self, at: At, act: impl FnOnce(&mut Link<Conn>, Owner)) {
        if let Some(owner) = self.state.sessions.row(at).owner
            && let Some(link) = self.endpoint.link(owner.connection)
        {
            act(link, owner);
        }
    }

    fn send(&mut self, now: Instant, at: At, message: &ServerMessage) {
        if let Some(owner) = self.state.sessions.row(at).owner
            && let Some(link) = self.endpoint.link(owner.connection)
        {
            send(link, now, owner.channel, message);
            check_slow(&mut self.state, now, link);
        }
    }

    /// Sends an unnumbered refusal: the request was not submitted.
    fn refuse(&mut self, now: Instant, at: At, received: &Received, reason: RejectReason) {
        let refusal = rejected(self.state.now_ns, received, reason, 0);
        self.send(now, at, &refusal);
    }

    /// Refuses a request of a login whose session was taken over, on its channel. Says nothing if
    /// the channel has a session again, whose client would take the refusal for one of its own.
    fn refuse_earlier(&mut self, now: Instant, owner: Owner, received: &Received) {
        let refusal = rejected(self.state.now_ns, received, RejectReason::UnknownSession, 0);
        if let Some(link) = self.endpoint.link(owner.connection)
            && !matches!(link.user.channel(owner.channel), Channel::Live(_))
        {
            send(link, now, owner.channel, &refusal);
            check_slow(&mut self.state, now, link);
        }
    }

    /// Submits the opening of a session after a successful login check, else ends the channel.
    fn on_login(
        &mut self,
        now: Instant,
        to: (Key, u16),
        from: IpAddr,
        outcome: Result<Box<login::Admitted>, DisconnectCode>,
    ) {
        self.state.waiting_logins.end(Share::of_address(from));
        let Some(link) = self.endpoint.link(to.0).filter(|link| link.is_open()) else {
            return;
        };
        let code = match outcome {
            Ok(_) if self.state.stopping.is_some() => DisconnectCode::Shutdown,
            Ok(_) if *link.user.channel(to.1) == Channel::LoggingOut => DisconnectCode::Logout,
            Ok(admitted) if !self.state.claim_connection(link, admitted.user) => {
                DisconnectCode::TooManySessions
            }
            Ok(admitted) => match self.state.open(to, admitted) {
                true => return,
                false => DisconnectCode::NotReady,
            },
            Err(code) => code,
        };
        end_channel(link, now, to.1, code);
    }

    /// Submits or refuses the order whose limit identity has checked, then the requests after it.
    fn on_limit_checked(&mut self, now: Instant, at: At, outcome: Result<bool, RejectReason>) {
        let Some(limited) = self.state.limited.remove(&at) else {
            return; // The order was refused for a cancel.
        };
        let Limited {
            mut new,
            received_ns,
        } = limited;
        let session = self.state.sessions.row(at);
        let waiting = session.parked.take();
        let refusal = match outcome {
            // The level may have dropped while identity checked the order.
            Ok(_) if session.budget.is_kyc_too_low() => Some(RejectReason::KycRequired),
            Ok(checked) => {
                new.limit_checked = checked;
                let request = Request::New(new);
                self.state.submit(at, &request, received_ns, false)
            }
            Err(reason) => Some(reason),
        };
        if let Some(reason) = refusal {
            let received = Received::new(new.client_seq, Request::New(new).name(), received_ns);
            self.refuse(now, at, &received, reason);
        }
        for next in waiting.into_iter().flatten() {
            let session = self.state.sessions.row(at);
            if let Some(parked) = &mut session.parked {
                // Another order waits for identity now.
                parked.push_back(next);
                continue;
            }
            let request = session.request(next.client_seq, &next.message);
            let request = request.expect("its form was checked on arrival");
            let received = Received::new(next.client_seq, request.name(), next.received_ns);
            let refusal =
                self.state
                    .submit_within_limit(at, request, next.received_ns, next.is_over_rate);
            if let Some(reason) = refusal {
                self.refuse(now, at, &received, reason);
            }
        }
    }

    /// Ends every session of a user.
    fn end_user(&mut self, now: Instant, user: UserIx, code: DisconnectCode) {
        let Some(user) = self.state.sessions.users.get(&user) else {
            return;
        };
        for at in user.sessions.clone() {
            self.end_session(now, at, code);
        }
    }

    /// Ends the session's channel and queues the closing of the session, if a channel owns it.
    fn end_session(&mut self, now: Instant, at: At, code: DisconnectCode) {
        if let Some(opened) = self.end_delayed(now, at, code) {
            self.state.close(opened.session, opened.epoch, false);
        }
        if self.state.sessions.row(at).owner.is_some() {
            self.with_owner(at, |link, owner| {
                end_channel(link, now, owner.channel, code)
            });
            self.state.detach(at, false);
        }
    }

    /// Ends the channel of a session's delayed login. Returns its opening.
    fn end_delayed(&mut self, now: Instant, at: At, code: DisconnectCode) -> Option<Opened> {
        let pending = self.state.sessions.row(at).delayed.take()?;
        let (key, channel) = pending.to;
        if let Some(link) = self.endpoint.link(key) {
            end_channel(link, now, channel, code);
        }
        pending.opened
    }

    /// Drops a session that the journal has forgotten.
    fn forget(&mut self, now: Instant, session: types::SessionIx) {
        if let Some(at) = self.state.sessions.at(session) {
            // The session is closed in the journal, so no channel may own it.
            self.end_session(now, at, DisconnectCode::Internal);
            self.state.sessions.forget(at);
        }
    }

    /// Sends an instrument to each session. Cost: the channels of all connections.
    fn announce(&mut self, now: Instant, instrument: InstrumentIx) {
        let Some(spec) = self.state.specs.get(instrument.index()) else {
            return;
        };
        let message = instrument_definition(spec).into();
        let is_live = |channel: &Channel| matches!(channel, Channel::Live(_));
        let keys: Vec<Key> = self.endpoint.keys().collect();
        for key in keys {
            let link = self.endpoint.peek(key);
            if !link.is_some_and(|link| link.user.channels.iter().any(is_live)) {
                continue;
            }
            if let Some(link) = self.endpoint.link(key) {
                for channel in 0..wire::CHANNELS_MAX as u16 {
                    if is_live(link.user.channel(channel)) {
                        send(link, now, channel, &message);
                    }
                }
                check_slow(&mut self.state, now, link);
            }
        }
    }

    /// Receives datagrams and handles timers; true when there were any.
    fn receive(&mut self, now: Instant) -> bool {
        let received = self.endpoint.receive(now, &mut self.state);
        received.unwrap_or_else(|error| {
            tracing::error!(%error, "trading socket failed: ending all sessions");
            self.state.stopping.get_or_insert(now);
            false
        })
    }

    /// Reads reports. Sends the messages that do not wait for durability.
    fn read_reports(&mut self, now: Instant) -> bool {
        let mut actions = std::mem::take(&mut self.actions);
        let did_work = self.state.read_reports(&mut actions);
        for action in actions.drain(..) {
            match action {
                ClientAction::Answered(at, stamp, report) => {
                    self.send_accepted(now, at, &stamp, &report)
                }
                ClientAction::Refused(at, received, error) => {
                    self.on_submit_error(now, at, &received, error);
                }
                ClientAction::RefusedEarlier(owner, received) => {
                    self.refuse_earlier(now, owner, &received);
                }
                ClientAction::OpenRefused(tag, reason) => self.on_open_refused(now, tag, reason),
                ClientAction::OrderToTrade(at, sequencer::OrderToTrade { messages, allowed }) => {
                    self.send(now, at, &OrderToTrade { messages, allowed }.into());
                }
                ClientAction::TakenOver(at, epoch) => {
                    if self.state.sessions.row(at).epoch < epoch {
                        self.end_session(now, at, DisconnectCode::TakenOver);
                    }
                }
            }
        }
        self.actions = actions;
        did_work
    }

    /// Sends `Accepted`: a hint before the command is durable. A rejected request gets no hint.
    fn send_accepted(&mut self, now: Instant, at: At, stamp: &Stamp, report: &admission::Report) {
        if let admission::ReportBody::Rejected { reason, .. } = report.body {
            if reason == RejectReason::LimitExceeded {
                self.state.sessions.row(at).budget.exhaust();
            }
            return;
        }
        let hint = Accepted {
            client_seq: report.client_seq,
            client_order_id: report.client_order_id,
            engine_order_id: match report.handle.is_none() {
                true => 0,
                false => report.handle.engine_id(),
            },
            node_sequence: stamp.sequence.0,
        };
        self.send(now, at, &hint.into());
    }

    /// Handles a request that the hot thread did not journal: sends a refusal, or the original
    /// answer if the request is a repeat.
    fn on_submit_error(&mut self, now: Instant, at: At, received: &Received, error: SubmitError) {
        self.state.stats.submit_errors.increment(1);
        if let SubmitError::Refused(reject) = error
            && reject.reason == RejectReason::AlreadySeen
        {
            let seen = match reject.details {
                RejectDetails::ClientSeq(seen) => seen,
                _ => 0,
            };
            return self.resend_answer(now, at, received, seen);
        }
        let reason = reason_of(error);
        let limit = match error {
            // The hot thread refused it for the session's rate.
            SubmitError::Refused(reject) if reject.reason == RejectReason::Throttle => {
                self.state.wait_us(at).max(reject.limit())
            }
            SubmitError::Refused(reject) => reject.limit(),
            _ => 0,
        };
        let refusal = rejected(self.state.now_ns, received, reason, limit);
        self.send(now, at, &refusal);
    }

    /// Sends the original answer to a request again, under its number.
    fn resend_answer(&mut self, now: Instant, at: At, received: &Received, seen: u64) {
        let Some(owner) = self.state.sessions.row(at).owner else {
            return;
        };
        let link = self.endpoint.link(owner.connection);
        let resend = Resend {
            received: *received,
            seen,
            may_look_up: true,
        };
        if let Some(reason) = self.state.resend_answer(now, link, at, &resend) {
            self.refuse(now, at, received, reason);
        }
    }

    /// Ends the channel of a login whose session could not be opened.
    fn on_open_refused(&mut self, now: Instant, tag: u64, error: SubmitError) {
        let Some(pending) = self.state.logins.remove(&tag) else {
            return;
        };
        let code = match error {
            // The self-trade group belongs to another member.
            SubmitError::Refused(reject) if reject.reason == RejectReason::NotOwner => {
                DisconnectCode::BadField
            }
            SubmitError::Refused(reject) if reject.reason == RejectReason::SessionLimit => {
                DisconnectCode::TooManySessions
            }
            SubmitError::Refused(reject) => {
                tracing::error!(%reject, "admission refused to open a session");
                DisconnectCode::Internal
            }
            _ => DisconnectCode::NotReady,
        };
        if let Some(link) = self.endpoint.link(pending.to.0) {
            end_channel(link, now, pending.to.1, code);
        }
    }

    /// Sends the messages that have become durable, and completes the logins.
    fn send_durable(&mut self, now: Instant) -> bool {
        let commit = self.commit.position();
        let mut did_work = false;
        while let Some((sequence, due)) = self.state.due.front().copied() {
            if sequence > commit {
                break;
            }
            self.state.due.pop_front();
            did_work = true;
            match due {
                Due::Message(at) => self.send_next_durable(now, at),
                Due::Login(tag) => self.log_in(now, tag),
            }
        }
        did_work
    }

    /// Marks the session's next message as durable. Sends it unless the client still resumes.
    #[inline]
    fn send_next_durable(&mut self, now: Instant, at: At) {
        let (session, pool) = self.state.sessions.parts(at);
        session.released += 1;
        let Some(owner) = session.owner.filter(|_| session.is_following) else {
            return;
        };
        let Some(link) = self.endpoint.link(owner.connection) else {
            return;
        };
        let bytes = session.window.get(pool, session.released);
        send_encoded(link, now, owner.channel, bytes);
        session.sent = session.released;
        check_slow(&mut self.state, now, link);
    }

    /// Completes a login whose opening is durable, or delays it.
    fn log_in(&mut self, now: Instant, tag: u64) {
        let Some(pending) = self.state.logins.remove(&tag) else {
            return;
        };
        let opened = pending.opened.expect("the report precedes durability");
        let at = self.state.sessions.at(opened.session).expect("placed");
        self.take_over(now, at);
        self.state.sessions.row(at).delayed = Some(Box::new(pending));
        if !self.complete_login(now, at) {
            self.state.begin_resume(at);
        }
    }

    /// Assigns a session to the connection of its delayed login, sends the answer, and begins a
    /// resume if the client lacks messages. Closes the session if the connection has ended. False
    /// while the connection has too many unsent bytes: the instruments of one login may take
    /// hundreds of KiB. Does not poll the connection meanwhile.
    fn complete_login(&mut self, now: Instant, at: At) -> bool {
        let Some(pending) = self.state.sessions.row(at).delayed.take() else {
            return true;
        };
        let opened = pending.opened.expect("the report precedes durability");
        let (key, channel) = pending.to;
        let link = self.endpoint.peek(key).filter(|link| link.is_open());
        let asked = link.map(|link| link.user.channels[usize::from(channel)]);
        if asked.is_none() || self.state.stopping.is_some() {
            self.state.close(opened.session, opened.epoch, false);
            return true;
        }
        if asked == Some(Channel::LoggingOut) {
            if let Some(link) = self.endpoint.link(key) {
                end_channel(link, now, channel, DisconnectCode::Logout);
            }
            self.state.close(opened.session, opened.epoch, true);
            return true;
        }
        if self.has_space(now, key) == Some(false) {
            self.state.sessions.row(at).delayed = Some(pending);
            return false;
        }
        let admitted = pending.admitted;
        let released = self.state.sessions.get(at).released;
        if !admitted.from_now && admitted.last_sequence > released {
            // The session was forgotten after the login check and opened as a new one.
            if let Some(link) = self.endpoint.link(key) {
                end_channel(link, now, channel, DisconnectCode::SequenceAhead);
            }
            self.state.close(opened.session, opened.epoch, false);
            return true;
        }
        self.state.stats.logins.increment(1);
        let balances_through = self.state.sessions.user(opened.user).unsent.newest();
        let session = self.state.sessions.row(at);
        session.balances_through = balances_through;
        session.owner = Some(Owner {
            connection: key,
            channel,
        });
        session.epoch = opened.epoch;
        session.login = Arc::default();
        session.stp_group = opened.stp_group;
        session.parked = None;
        // The hot thread refuses the earlier login's requests: the client may send them again.
        session.unanswered.clear();
        session.is_checking_limit = false;
        session.is_setting_hold = false;
        session.is_fetching = false;
        session.fetch_through = u64::MAX;
        session.listing = None;
        session.range = None;
        session.sent = match admitted.from_now {
            true => session.released,
            false => admitted.last_sequence.min(session.released),
        };
        session.is_following = session.sent == session.released;
        if !session.is_following {
            self.state.begin_resume(at);
        }
        self.welcome(now, at, &opened, admitted.heartbeat_ms);
        true
    }

    /// Detaches the earlier login from a session. No closing is journalled, since the journal
    /// already has the newer opening.
    fn take_over(&mut self, now: Instant, at: At) {
        self.state.drop_pieces(at);
        self.end_delayed(now, at, DisconnectCode::TakenOver);
        if let Some(old) = self.state.sessions.row(at).owner {
            if let Some(link) = self.endpoint.link(old.connection) {
                end_channel(link, now, old.channel, DisconnectCode::TakenOver);
            }
            let session = self.state.sessions.row(at);
            session.taken_over = Some((session.epoch, old));
            self.state.limited.remove(&at);
            self.state.sessions.mark_idle(at);
        }
    }

    /// Sends the instruments, then the acceptance of the login.
    fn welcome(&mut self, now: Instant, at: At, opened: &Opened, heartbeat_ms: u32) {
        let accepted = LoginAccepted {
            session: opened.session.get(),
            last_client_seq: opened.client_seq,
            next_sequence: 0,
            node: self.state.market.node.get(),
            throttle_per_s: self.state.sessions.user(opened.user).rates.session,
            heartbeat_ms,
            cancel_all_at_ns: opened.cancel_all_at_ns,
            time_ns: self.state.now_ns,
        };
        let session = self.state.sessions.row(at);
        let accepted = LoginAccepted {
            next_sequence: session.sent + 1,
            ..accepted
        };
        let Some(owner) = session.owner else { return };
        let Some(link) = self.endpoint.link(owner.connection) else {
            return;
        };
        *link.user.channel(owner.channel) = Channel::Live(at);
        let heartbeat = std::time::Duration::from_millis(u64::from(heartbeat_ms));
        link.user.logged_in(heartbeat);
        link.set_deadline(Some(now));
        append_pulled(link, now, |link| {
            for spec in &self.state.specs {
                send(
                    link,
                    now,
                    owner.channel,
                    &instrument_definition(spec).into(),
                );
            }
        });
        send(link, now, owner.channel, &accepted.into());
    }

    /// Ends the connections of a stopping front once the last reports are sent, or their time is
    /// over.
    fn stop(&mut self, now: Instant) {
        let Some(until) = self.state.stopping else {
            return;
        };
        if self.ended_at.is_none() && (self.state.is_quiet() || until <= now) {
            self.ended_at = Some(now);
            let keys: Vec<Key> = self.endpoint.keys().collect();
            for key in keys {
                if let Some(link) = self.endpoint.link(key) {
                    end_connection(link, now, DisconnectCode::Shutdown);
                }
            }
        }
    }
}

impl Polled for Front {
    fn round(&mut self) -> bool {
        let now = Instant::now();
        self.state.round += 1;
        self.state.now_ns = self.state.market.port.clock().now_ns();
        self.state.monotonic_ns = monotonic_ns();
        let mut did_work = false;
        while let Some(message) = self.queue.pop() {
            did_work = true;
            self.on_message(now, message);
        }
        let has_reports = self.read_reports(now);
        did_work |= has_reports;
        let sends_first = has_reports && self.sends_first;
        let received = !sends_first && self.receive(now);
        did_work |= received;
        self.sends_first = received && !self.did_work;
        did_work |= self.send_durable(now);
        if did_work || self.has_flushed {
            self.state.resuming.retry();
            self.state.in_pieces.retry();
            self.state.with_balances.retry();
        }
        if !self.state.resuming.is_empty() {
            did_work |= self.resume(now);
        }
        if !self.state.in_pieces.is_empty() {
            did_work |= self.send_pieces(now);
        }
        if !self.state.with_balances.is_empty() {
            did_work |= self.send_balances(now);
        }
        did_work |= self.state.submit_closings();
        self.stop(now);
        self.has_flushed = self.endpoint.flush(now, &mut self.state);
        self.did_work = did_work || self.has_flushed;
        self.did_work
    }

    fn has_work(&self) -> bool {
        let durable = self.commit.position();
        let is_due = self.state.due.front().is_some_and(|(at, _)| *at <= durable);
        is_due || !self.queue.is_empty() || self.state.ring.has_report() || self.endpoint.has_work()
    }

    fn next_deadline(&self) -> Option<Instant> {
        let stopping = self.state.stopping.filter(|_| self.ended_at.is_none());
        let next = self.endpoint.next_deadline();
        [stopping, next].into_iter().flatten().min()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.endpoint.as_fd()
    }

    fn is_over(&self) -> bool {
        let Some(since) = self.ended_at else {
            return false;
        };
        let is_done = self.state.sources.connections() == 0 && self.state.has_closed();
        is_done || since.elapsed() >= server::GOODBYE
    }
}

fn instrument_definition(spec: &InstrumentSpec) -> InstrumentDefinition {
    let (tick, lot) = (spec.tick_size(), spec.lot_size());
    let mantissa = |value: types::Decimal| {
        i64::try_from(value.mantissa()).expect("a tick or lot was made from 64 bits")
    };
    InstrumentDefinition {
        instrument: spec.ix.get(),
        id: Text::truncated(spec.id.as_str()),
        decimals: spec.decimals,
        phase: spec.phase,
        tick_mantissa: mantissa(tick),
        tick_scale: tick.scale(),
        lot_mantissa: mantissa(lot),
        lot_scale: lot.scale(),
        value_minor: spec.terms.value_minor,
        units_minor: spec.terms.units_minor,
        band_low_ticks: spec.band_low.0,
        band_high_ticks: spec.band_high.0,
        fee_ppm: spec.fee_rate.0,
    }
}
