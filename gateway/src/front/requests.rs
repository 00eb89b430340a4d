//! Handles requests: checks rate, KYC level and budget, then submits to the ring. A request that is
//! refused here is not journalled, so that its client sequence may be sent again.
//!
//! Connections are read regardless of the requests in flight. A request of a user without a free
//! slot waits in its stream for a moment, then it is refused as `BUSY`, so that a cancel after it
//! is read (`design.md` 5). A repeat of a request that has no report yet gets no answer: a refusal
//! would contradict the report of the first one.
//!
//! While identity checks an order, later orders and amends of its session wait. A cancel does not:
//! the order and the requests that wait are refused as `BUSY`, since their client sequences are
//! below that of the cancel.

use std::collections::VecDeque;
use std::time::Instant;

use admission::{Request, RequestName};
use sequencer::{Submission, SubmitError};
use transport::Link;
use types::RejectReason;
use types::command::RequestKind;
use wire::{ClientMessage, DisconnectCode, Header, Rejected, ServerMessage};

use super::connection::{Channel, Conn, send, send_encoded};
use super::desk::{FrontRequest, Share};
use super::session::{At, Limited, PARKED_MAX, Parked};
use super::state::State;
use super::window::KeptAnswer;
use super::{RESEND_COST, in_flight, limit};

/// Highest client sequence: enough for 89 years at 100,000 per second.
const CLIENT_SEQ_MAX: u64 = (1 << 48) - 1;

/// The request that a refusal of the message names; `None` if the message is not a trading request.
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

/// True for a request that does not wait for identity. The front does not know whether an amend
/// reduces its order.
fn passes_waiting(message: &ClientMessage) -> bool {
    matches!(
        message,
        ClientMessage::Cancel(_) | ClientMessage::MassCancel(_) | ClientMessage::CancelAllAfter(_)
    )
}

/// What a refusal states about a request.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    pub client_seq: u64,
    pub name: RequestName,
    /// When the front read the request, in nanoseconds since 1970.
    pub at_ns: u64,
}

impl Received {
    pub fn new(client_seq: u64, name: RequestName, at_ns: u64) -> Self {
        Self {
            client_seq,
            name,
            at_ns,
        }
    }
}

/// An unnumbered refusal: the request was not journalled. `limit`: depends on the reason, for
/// `THROTTLE` microseconds to wait.
pub fn rejected(
    now_ns: u64,
    received: &Received,
    reason: RejectReason,
    limit: u64,
) -> ServerMessage {
    Rejected {
        client_seq: received.client_seq,
        client_order_id: received.name.client_order_id,
        engine_order_id: received.name.engine_order_id,
        request: received.name.kind,
        reason,
        limit,
        node_sequence: 0,
        time_ns: now_ns,
        received_ns: received.at_ns,
    }
    .into()
}

/// A repeated request whose answer is to be sent again.
pub struct Resend {
    pub received: Received,
    /// The last request of the session that was journalled.
    pub seen: u64,
    /// The answer may be read from the journal.
    pub may_look_up: bool,
}

impl State {
    /// True while the next message of a connection waits in its stream for a slot. Other
    /// connections are read meanwhile.
    pub fn waits_for_slot(
        &mut self,
        now: Instant,
        link: &Link<Conn>,
        header: &Header,
        message: &ClientMessage,
    ) -> bool {
        let channel = link.user.channels.get(usize::from(header.channel));
        let Some(Channel::Live(at)) = channel else {
            return false;
        };
        let session = self.sessions.get(*at);
        if self.in_flight.has_slot(session.user, false) {
            return false;
        }
        // A repeat needs no slot. A request that will be parked needs none yet.
        let will_be_parked = session.parked.is_some() && !passes_waiting(message);
        if will_be_parked || self.is_repeat(*at, header.sequence) {
            return false;
        }
        let Ok(request) = session.request(header.sequence, message) else {
            return false;
        };
        let (user, reduces) = (session.user, in_flight::reduces(&request));
        !self.in_flight.has_slot(user, reduces) && self.in_flight.waits(user, reduces, now)
    }

    /// Handles a request. An error ends the connection.
    pub fn handle_request(
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
            Channel::Live(at) => self.enter(now, link, at, header, message)?,
            Channel::Free => return Err(DisconnectCode::LoginExpected),
            Channel::LoggingIn | Channel::LoggingOut | Channel::Ended => {
                Some(RejectReason::UnknownSession)
            }
        };
        if let Some(reason) = refusal {
            let at = match *link.user.channel(channel) {
                Channel::Live(at) => Some(at),
                _ => None,
            };
            let limit = self.limit_of(reason, at);
            let received = Received::new(client_seq, name, self.now_ns);
            let refusal = rejected(self.now_ns, &received, reason, limit);
            send(link, now, channel, &refusal);
        }
        Ok(())
    }

    /// Submits a session's request, parks it, or answers a repeat. Returns the reason of a refusal.
    fn enter(
        &mut self,
        now: Instant,
        link: &mut Link<Conn>,
        at: At,
        header: &Header,
        message: &ClientMessage,
    ) -> Result<Option<RejectReason>, DisconnectCode> {
        let client_seq = header.sequence;
        self.stats.requests.increment(1);
        let is_over_rate = !self.is_in_rate(at);
        let may_reduce = matches!(
            message,
            ClientMessage::Cancel(_) | ClientMessage::MassCancel(_)
        );
        // A repeat passes the rate: a THROTTLE would state that the first one was not journalled.
        if is_over_rate && !may_reduce && !self.is_repeat(at, client_seq) {
            self.stats.throttled.increment(1);
            return Ok(Some(RejectReason::Throttle));
        }
        let session = self.sessions.row(at);
        let request = session.request(client_seq, message);
        let request = request.map_err(|_| DisconnectCode::BadField)?;
        let answered = session.answered;
        if client_seq <= answered {
            let resend = Resend {
                received: Received::new(client_seq, request.name(), self.now_ns),
                seen: answered,
                may_look_up: !is_over_rate,
            };
            return Ok(self.resend_answer(now, Some(link), at, &resend));
        }
        if self.is_unanswered(at, client_seq) {
            return Ok(None); // The report of the first one follows.
        }
        let session = self.sessions.row(at);
        if session.parked.is_some() && passes_waiting(message) {
            let refusal = self.submit(at, &request, self.now_ns, is_over_rate);
            if refusal.is_none() {
                self.refuse_waiting(now, link, header.channel, at);
            }
            return Ok(refusal);
        }
        if let Some(parked) = &mut session.parked {
            // Orders and amends stay in session order.
            if 1 + parked.len() >= PARKED_MAX {
                return Ok(Some(RejectReason::Busy));
            }
            parked.push_back(Parked {
                client_seq,
                message: *message,
                received_ns: self.now_ns,
                is_over_rate,
            });
            return Ok(None);
        }
        Ok(self.submit_within_limit(at, request, self.now_ns, is_over_rate))
    }

    /// Refuses the order that waits for identity and the requests parked after it: a request with a
    /// higher client sequence was submitted. Identity's answer will find no order.
    #[cold]
    fn refuse_waiting(&mut self, now: Instant, link: &mut Link<Conn>, channel: u16, at: At) {
        let checked = self
            .limited
            .remove(&at)
            .map(|Limited { new, received_ns }| {
                Received::new(new.client_seq, Request::New(new).name(), received_ns)
            });
        let parked = self.sessions.row(at).parked.take();
        let parked = parked.into_iter().flatten().filter_map(|next| {
            let name = name(&next.message)?;
            Some(Received::new(next.client_seq, name, next.received_ns))
        });
        for received in checked.into_iter().chain(parked) {
            let refusal = rejected(self.now_ns, &received, RejectReason::Busy, 0);
            send(link, now, channel, &refusal);
        }
    }

    /// True for a request that was answered or is unanswered.
    fn is_repeat(&self, at: At, client_seq: u64) -> bool {
        client_seq <= self.sessions.get(at).answered || self.is_unanswered(at, client_seq)
    }

    /// True for a request that is parked or in flight: its report follows.
    fn is_unanswered(&self, at: At, client_seq: u64) -> bool {
        let session = self.sessions.get(at);
        let is_parked = session.parked.as_ref().is_some_and(|parked| {
            let mut others = parked.iter();
            let checked = self.limited.get(&at);
            checked.is_some_and(|limited| limited.new.client_seq == client_seq)
                || others.any(|next| next.client_seq == client_seq)
        });
        is_parked || session.unanswered.contains(client_seq)
    }

    /// Sends the original answer to a request again, under its number: from the window, else after
    /// a look-up in the journal. Returns the reason of a refusal.
    ///
    /// Above the session's rate there is no look-up, since look-ups compete with resumes for reads
    /// of the journal.
    pub fn resend_answer(
        &mut self,
        now: Instant,
        link: Option<&mut Link<Conn>>,
        at: At,
        resend: &Resend,
    ) -> Option<RejectReason> {
        let client_seq = resend.received.client_seq;
        self.stats.resends.increment(1);
        let (session, pool) = self.sessions.parts(at);
        let owner = session.owner?;
        match session.window.answer(pool, client_seq) {
            KeptAnswer::Number(number) => {
                // A message that is not durable yet, or that a resume has not reached, is sent
                // anyway.
                if number <= session.released
                    && (session.is_following || number <= session.sent)
                    && let Some(link) = link
                {
                    send_encoded(link, now, owner.channel, session.window.get(pool, number));
                }
                return None;
            }
            KeptAnswer::NeverSent => return Some(RejectReason::AlreadySeen),
            KeptAnswer::Unknown => {}
        }
        if client_seq > session.answered && client_seq <= resend.seen {
            return None; // Its report is in flight.
        }
        if !resend.may_look_up {
            return Some(RejectReason::AlreadySeen);
        }
        let front_request = FrontRequest::Answer {
            session: (at, session.epoch),
            login: session.login(),
            ix: session.ix,
            received: resend.received,
        };
        self.sessions.charge(at, self.monotonic_ns, RESEND_COST);
        let is_asked = self.look_up(at, front_request);
        (!is_asked).then_some(RejectReason::AlreadySeen)
    }

    /// Submits a request. Refuses new orders and amends of a user whose KYC level is too low.
    /// Identity first checks an order above the budget estimate; the session's later orders and
    /// amends wait meanwhile.
    ///
    /// `received_ns`: when the front read the request, in nanoseconds since 1970.
    /// Returns the reason of a refusal.
    pub fn submit_within_limit(
        &mut self,
        at: At,
        request: Request,
        received_ns: u64,
        is_over_rate: bool,
    ) -> Option<RejectReason> {
        let adds_risk = matches!(request, Request::New(_) | Request::Amend(_));
        if adds_risk && self.sessions.row(at).budget.is_kyc_too_low() {
            return Some(RejectReason::KycRequired);
        }
        // Above the rate the order is a repeat, which needs no check, or the hot thread refuses it.
        if let Request::New(new) = &request
            && !is_over_rate
        {
            let session = self.sessions.row(at);
            if !self.in_flight.has_slot(session.user, false) {
                // Checked before the budget, which a refused order must not reduce.
                return Some(RejectReason::Busy);
            }
            let spec = self.specs.get(new.instrument.index());
            let market = &self.market;
            if !limit::is_in_budget(spec, &session.budget, new, || market.day()) {
                if session.is_checking_limit {
                    // The order of that check was refused for a cancel. Its answer must not release
                    // this one, and a session may not fill the queue with checks.
                    return Some(RejectReason::Busy);
                }
                let front_request = FrontRequest::Limit {
                    session: (at, session.epoch),
                    user: session.user,
                    user_id: session.user_id.clone(),
                    budget: session.budget.clone(),
                    new: Box::new(*new),
                };
                let queued = (Share::User(session.user), front_request);
                if self.front_requests.try_send(queued).is_err() {
                    return Some(RejectReason::NotReady);
                }
                session.is_checking_limit = true;
                session.parked = Some(VecDeque::new());
                let new = *new;
                self.limited.insert(at, Limited { new, received_ns });
                return None;
            }
        }
        self.submit(at, &request, received_ns, is_over_rate)
    }

    /// Submits a request to the ring. `received_ns`: when the front read it, in nanoseconds since
    /// 1970. Returns the reason of a refusal.
    pub fn submit(
        &mut self,
        at: At,
        request: &Request,
        received_ns: u64,
        is_over_rate: bool,
    ) -> Option<RejectReason> {
        let session = self.sessions.row(at);
        let (user, reduces) = (session.user, in_flight::reduces(request));
        if !self.in_flight.has_slot(user, reduces) {
            return Some(RejectReason::Busy);
        }
        let submission = Submission {
            tag: in_flight::tag(user, session.epoch),
            epoch: session.epoch,
            received_ns,
            is_over_rate,
        };
        match self.ring.submit(submission, request) {
            Ok(()) => {
                self.in_flight.begin(user, reduces);
                if let Some((_, client_seq)) = request.client() {
                    session.unanswered.insert(client_seq);
                }
                None
            }
            Err(SubmitError::Busy) => Some(RejectReason::Busy),
            Err(_) => Some(RejectReason::NotReady),
        }
    }
}
