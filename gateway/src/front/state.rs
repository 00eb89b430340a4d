//! The front's state without the connections: sessions, the hot thread's ring, messages that wait
//! for durability.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::{Report as Message, Request, SessionRequest};
use metrics::Counter;
use sequencer::{Opened, OrderToTrade, Report, RingPort, Stamp, Submission, SubmitError};
use service_kit::rate::Rate;
use transport::Key;
use types::{InstrumentSpec, RejectReason, Sequence, SessionIx, UserIx};

use super::desk::{FrontRequest, LOGINS_WAITING_MAX, RequestSender, Share};
use super::failures::Failures;
use super::fair_queue::FairQueue;
use super::in_flight::{self, InFlight, Unanswered};
use super::login::Admitted;
use super::pieces::Range;
use super::requests::Received;
use super::resume::Resuming;
use super::session::{At, Limited, Owner, Session, Sessions};
use super::shares::Shares;
use super::sources::Sources;
use super::window::Window;
use crate::market::Market;

/// Capacity of the request ring and of the report ring.
pub const RING_CAPACITY: usize = 4_096;
/// Maximum concurrent look-ups in the journal per user.
const LOOK_UPS_PER_USER: usize = 8;
/// Maximum session openings, and maximum closings, in the ring. Together they fit the slots that
/// requests leave free (`REDUCTIONS_MAX`).
const OPENINGS_MAX: usize = RING_CAPACITY / 16;
const CLOSINGS_MAX: usize = RING_CAPACITY / 16;
/// Bit in the tags of requests that close sessions.
const CLOSING: u64 = 1 << 63;

/// Work to do once a command is durable.
#[derive(Clone, Copy)]
pub enum Due {
    /// The next message of this session.
    Message(At),
    /// The login of this tag.
    Login(u64),
}

/// A login whose opening is in flight, or whose answer is delayed.
pub struct Pending {
    pub to: (Key, u16),
    pub admitted: Box<Admitted>,
    pub opened: Option<Opened>,
}

/// A `CloseSession` to be journalled.
#[derive(Clone, Copy)]
struct Closing {
    session: SessionIx,
    epoch: Sequence,
    keep_orders: bool,
}

/// Metrics. The handles are looked up once, so that counting is one addition.
pub struct Counters {
    pub requests: Counter,
    pub throttled: Counter,
    pub submit_errors: Counter,
    pub resends: Counter,
    /// Reads of the journal for messages that have left a window.
    pub look_ups: Counter,
    pub logins: Counter,
    pub slow_consumers: Counter,
    /// UDP packets of connections. QUIC resends the data of a lost packet.
    pub packets_sent: Counter,
    pub packets_lost: Counter,
}

impl Counters {
    fn new() -> Self {
        Self {
            requests: metrics::counter!("trading_requests_total"),
            throttled: metrics::counter!("trading_requests_throttled_total"),
            submit_errors: metrics::counter!("trading_requests_not_submitted_total"),
            resends: metrics::counter!("trading_answers_resent_total"),
            look_ups: metrics::counter!("trading_look_ups_total"),
            logins: metrics::counter!("trading_logins_total"),
            slow_consumers: metrics::counter!("trading_slow_consumers_total"),
            packets_sent: metrics::counter!("trading_packets_sent_total"),
            packets_lost: metrics::counter!("trading_packets_lost_total"),
        }
    }
}

pub struct State {
    pub market: Arc<Market>,
    pub front_requests: RequestSender,
    pub ring: RingPort,
    pub in_flight: InFlight,
    pub sessions: Sessions,
    /// Work that waits for durability, in journal order.
    pub due: VecDeque<(Sequence, Due)>,
    /// Logins whose opening is in flight, by tag.
    pub logins: HashMap<u64, Pending>,
    /// Last tag of an opening or a closing.
    tag: u64,
    /// Orders that wait for identity, by session.
    pub limited: HashMap<At, Limited>,
    /// Sessions whose client lacks messages, and those with a delayed login.
    pub resuming: Resuming,
    /// Sessions with a piece of a listing or of a retransmission to request or to send.
    pub in_pieces: FairQueue<At>,
    /// Users with sessions that lack ledger balances.
    pub with_balances: FairQueue<UserIx>,
    look_ups: LookUps,
    /// Closings that are not submitted yet.
    closings: VecDeque<Closing>,
    /// Submitted closings, by tag.
    closing: HashMap<u64, Closing>,
    pub specs: Vec<InstrumentSpec>,
    pub failures: Arc<Failures>,
    /// Logins that the desk has not answered, by address. Those of closed connections count too.
    pub waiting_logins: Shares<Share>,
    pub sources: Sources,
    /// Connections by the user that was the first to log in on them.
    pub member_connections: Shares<UserIx>,
    /// Number of rounds so far.
    pub round: u64,
    /// Nanoseconds since 1970, once per round.
    pub now_ns: u64,
    /// Monotonic nanoseconds, for rates.
    pub monotonic_ns: u64,
    /// Set when the platform stops: how long the front waits for the last reports.
    pub stopping: Option<Instant>,
    /// The trading path accepts no more requests.
    pub has_ended: bool,
    pub stats: Counters,
}

impl State {
    pub fn new(
        market: Arc<Market>,
        front_requests: RequestSender,
        ring: RingPort,
        failures: Arc<Failures>,
    ) -> Self {
        let config = &market.config;
        let sessions = Sessions::new(config.window_bytes_max, config.window_messages_max);
        let connections_max = config.connections_max as usize;
        let sources = Sources::new(connections_max, config.connections_per_address_max as usize);
        Self {
            specs: market.replica.names().instruments(),
            market,
            front_requests,
            ring,
            in_flight: InFlight::default(),
            sessions,
            due: VecDeque::with_capacity(1 << 16),
            logins: HashMap::new(),
            tag: 0,
            limited: HashMap::new(),
            resuming: Resuming::default(),
            in_pieces: FairQueue::default(),
            with_balances: FairQueue::default(),
            look_ups: LookUps::default(),
            closings: VecDeque::new(),
            closing: HashMap::new(),
            failures,
            waiting_logins: Shares::new(LOGINS_WAITING_MAX),
            sources,
            member_connections: Shares::new(connections_max),
            round: 0,
            now_ns: 0,
            monotonic_ns: 0,
            stopping: None,
            has_ended: false,
            stats: Counters::new(),
        }
    }

    /// True when no request, message or login waits for the trading path, or when that has ended.
    pub fn is_quiet(&self) -> bool {
        let is_quiet = self.in_flight.is_empty() && self.due.is_empty() && self.logins.is_empty();
        self.has_ended || is_quiet
    }

    /// True when every queued closing is accepted, or when the trading path has ended.
    pub fn has_closed(&self) -> bool {
        self.has_ended || (self.closings.is_empty() && self.closing.is_empty())
    }

    /// Adds or replaces an instrument.
    pub fn set_instrument(&mut self, spec: InstrumentSpec) {
        match self.specs.get_mut(spec.ix.index()) {
            Some(known) => *known = spec,
            None => self.specs.push(spec),
        }
    }

    /// Requests the checks of a login. False when the address has its share of the waiting logins,
    /// or the request queue is full.
    pub fn request_login(&mut self, to: (Key, u16), address: IpAddr, login: &wire::Login) -> bool {
        let share = Share::of_address(address);
        if !self.waiting_logins.begin(share) {
            return false;
        }
        let login = Box::new(*login);
        let front_request = FrontRequest::Login { to, address, login };
        let is_asked = self.front_requests.try_send((share, front_request)).is_ok();
        if !is_asked {
            self.waiting_logins.end(share);
        }
        is_asked
    }

    /// Submits the opening of a session. False when the ring, or its share for openings, is full.
    pub fn open(&mut self, to: (Key, u16), admitted: Box<Admitted>) -> bool {
        self.tag += 1;
        let request = Request::OpenSession(SessionRequest {
            key: admitted.key,
            user: admitted.user,
            stp_group: admitted.stp_group,
            cancel_on_disconnect: admitted.cancel_on_disconnect,
        });
        let submission = Submission {
            tag: self.tag,
            received_ns: self.now_ns,
            ..Submission::default()
        };
        if self.logins.len() >= OPENINGS_MAX || self.ring.submit(submission, &request).is_err() {
            return false;
        }
        let pending = Pending {
            to,
            admitted,
            opened: None,
        };
        self.logins.insert(self.tag, pending);
        true
    }

    /// Detaches a session from its connection, which was lost or logged out, and queues its
    /// closing.
    pub fn detach(&mut self, at: At, keep_orders: bool) {
        let session = self.sessions.row(at);
        let (ix, epoch) = (session.ix, session.epoch);
        self.drop_pieces(at);
        self.sessions.mark_idle(at);
        self.limited.remove(&at);
        self.close(ix, epoch, keep_orders);
    }

    /// Queues a `CloseSession` for a login. The disconnect is journalled so that a replay repeats
    /// it.
    pub fn close(&mut self, session: SessionIx, epoch: Sequence, keep_orders: bool) {
        self.closings.push_back(Closing {
            session,
            epoch,
            keep_orders,
        });
    }

    /// Submits queued closings while the ring has space for them.
    pub fn submit_closings(&mut self) -> bool {
        let mut did_work = false;
        while let Some(closing) = self.closings.front().copied()
            && self.closing.len() < CLOSINGS_MAX
        {
            self.tag += 1;
            let request = Request::CloseSession {
                session: closing.session,
                epoch: Some(closing.epoch),
                keep_orders: closing.keep_orders,
            };
            let submission = Submission {
                tag: CLOSING | self.tag,
                ..Submission::default()
            };
            match self.ring.submit(submission, &request) {
                Ok(()) => drop(self.closing.insert(submission.tag, closing)),
                Err(SubmitError::Busy) => break,
                // The next start treats every session as disconnected.
                Err(_) => self.has_ended = true,
            }
            self.closings.pop_front();
            did_work = true;
        }
        did_work
    }

    /// Reads the available reports. Adds to `actions` what is sent to clients without waiting for
    /// durability.
    pub fn read_reports(&mut self, actions: &mut Vec<ClientAction>) -> bool {
        let Self {
            market,
            ring,
            in_flight,
            sessions,
            due,
            logins,
            closings,
            closing,
            ..
        } = self;
        let node = market.node;
        let read = ring.poll(|report| match report {
            Report::SessionMessage(stamp, report) => {
                let Some(at) = sessions.at(report.session) else {
                    return;
                };
                let message = super::report::message(node, stamp, report);
                sessions.keep(at, report.number, &message, report.client_seq);
                due.push_back((stamp.sequence, Due::Message(at)));
                let session = sessions.row(at);
                if report.client_seq > session.answered {
                    session.answered = report.client_seq;
                    session.unanswered.answered(report.client_seq);
                    in_flight.end(session.user);
                    actions.push(ClientAction::Answered(at, *stamp, *report));
                }
            }
            Report::NotSubmitted {
                tag,
                session,
                client_seq,
                request,
                received_ns,
                reason,
            } => {
                if let Some(ended) = closing.remove(tag) {
                    closings.extend((*reason == SubmitError::Busy).then_some(ended));
                } else if logins.contains_key(tag) {
                    actions.push(ClientAction::OpenRefused(*tag, *reason));
                } else if let Some(user) = in_flight::user_of(*tag) {
                    in_flight.end(user);
                    let received = Received::new(*client_seq, *request, *received_ns);
                    let refused = on_not_submitted(sessions, *session, *tag, received, *reason);
                    actions.extend(refused);
                }
            }
            Report::Opened(opened) => {
                due.push_back((opened.epoch, Due::Login(opened.tag)));
                // At once, since the next report may be a message of the session.
                note_opened(opened, logins, sessions);
            }
            Report::Submitted { tag, .. } => {
                if let Some(user) = in_flight::user_of(*tag) {
                    in_flight.end(user);
                } else {
                    closing.remove(tag);
                }
            }
            Report::OrderToTrade(session, ratio) => {
                let at = sessions.at(*session);
                actions.extend(at.map(|at| ClientAction::OrderToTrade(at, *ratio)));
            }
            Report::TakenOver { session, epoch } => {
                let at = sessions.at(*session);
                actions.extend(at.map(|at| ClientAction::TakenOver(at, *epoch)));
            }
        });
        self.has_ended |= read.is_err();
        read.unwrap_or(false)
    }
}

/// Records that a request was not journalled, so that it may be sent again. Returns the refusal to
/// send. That of an earlier login's request goes to the earlier channel: the new login may have
/// sent the same client sequence.
fn on_not_submitted(
    sessions: &mut Sessions,
    session: SessionIx,
    tag: u64,
    received: Received,
    reason: SubmitError,
) -> Option<ClientAction> {
    let at = sessions.at(session)?;
    let row = sessions.row(at);
    if tag != in_flight::tag(row.user, row.epoch) {
        let (epoch, owner) = row.taken_over?;
        let is_of_previous = tag == in_flight::tag(row.user, epoch);
        return is_of_previous.then_some(ClientAction::RefusedEarlier(owner, received));
    }
    row.unanswered.refused(received.client_seq);
    Some(ClientAction::Refused(at, received, reason))
}

/// Records an opening: from here on the session's messages are kept in its window.
fn note_opened(opened: &Opened, logins: &mut HashMap<u64, Pending>, sessions: &mut Sessions) {
    if let Some(pending) = logins.get_mut(&opened.tag) {
        pending.opened = Some(*opened);
        sessions.on_opened(opened, || new_session(opened, &pending.admitted));
    }
}

impl State {
    /// Requests messages that have left a session's window. False when the user has too many
    /// look-ups in progress or the request queue is full.
    ///
    /// A look-up reads the journal from a checkpoint, and only two run at a time. Without the limit
    /// one user's look-ups would fill the queue, and the resumes of all others would wait.
    pub fn look_up(&mut self, at: At, front_request: FrontRequest) -> bool {
        let user = self.sessions.row(at).user;
        if !self.look_ups.begin(user) {
            return false;
        }
        let queued = (Share::User(user), front_request);
        let is_asked = self.front_requests.try_send(queued).is_ok();
        match is_asked {
            true => self.stats.look_ups.increment(1),
            false => self.look_ups.end(user),
        }
        is_asked
    }

    /// True while the user has fewer look-ups than the limit.
    pub fn may_look_up(&self, user: UserIx) -> bool {
        self.look_ups.has_slot(user)
    }

    /// Ends a session's look-up.
    pub fn end_look_up(&mut self, at: At) {
        let user = self.sessions.row(at).user;
        self.look_ups.end(user);
    }

    /// Drops messages that were read for a resume and not sent, which ends their look-up.
    pub fn drop_fetched(&mut self, at: At) {
        let fetched = std::mem::take(&mut self.sessions.row(at).fetched);
        if !fetched.is_empty() {
            self.end_look_up(at);
        }
    }

    /// Drops messages that were read for a session and not sent, which ends their look-ups. Ends
    /// its retransmission.
    pub fn drop_pieces(&mut self, at: At) {
        self.drop_fetched(at);
        let range = self.sessions.row(at).range.take();
        let of_range = range.map(Range::into_fetched);
        if of_range.is_some_and(|fetched| !fetched.is_empty()) {
            self.end_look_up(at);
        }
    }
}

/// Look-ups in the journal by user, at most [`LOOK_UPS_PER_USER`] each.
#[derive(Default)]
struct LookUps(HashMap<UserIx, usize>);

impl LookUps {
    /// Counts one more; false when the user is at the limit.
    fn begin(&mut self, user: UserIx) -> bool {
        let count = self.0.entry(user).or_default();
        let is_one_more = *count < LOOK_UPS_PER_USER;
        *count += usize::from(is_one_more);
        is_one_more
    }

    fn has_slot(&self, user: UserIx) -> bool {
        let count = self.0.get(&user);
        count.is_none_or(|count| *count < LOOK_UPS_PER_USER)
    }

    fn end(&mut self, user: UserIx) {
        if let Entry::Occupied(mut count) = self.0.entry(user) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// A session that is new to this front.
fn new_session(opened: &Opened, admitted: &Admitted) -> Session {
    Session {
        ix: opened.session,
        user: opened.user,
        user_id: admitted.user_id.clone(),
        epoch: Sequence::ZERO,
        login: Arc::default(),
        stp_group: opened.stp_group,
        window: Window::after(opened.user, opened.last_number, opened.client_seq),
        released: opened.last_number,
        sent: opened.last_number,
        is_following: false,
        owner: None,
        taken_over: None,
        delayed: None,
        answered: opened.client_seq,
        unanswered: Unanswered::default(),
        rate: Rate::default(),
        budget: admitted.budget.clone(),
        parked: None,
        is_checking_limit: false,
        is_setting_hold: false,
        is_fetching: false,
        fetch_through: u64::MAX,
        fetched: VecDeque::new(),
        is_resuming: false,
        listing: None,
        range: None,
        is_in_pieces: false,
        balances_through: 0,
        is_idle: false,
        is_idle_of_user: false,
        is_surplus: false,
    }
}

/// An action for a client that a report causes at once.
pub enum ClientAction {
    /// A request was admitted and matched.
    Answered(At, Stamp, Message),
    /// A request was not journalled: it was refused, or it is a repeat.
    Refused(At, Received, SubmitError),
    /// The same of a login whose session was taken over, with its channel.
    RefusedEarlier(Owner, Received),
    /// The opening of a session was refused, by tag.
    OpenRefused(u64, SubmitError),
    /// A login of this epoch has taken over the session.
    TakenOver(At, Sequence),
    OrderToTrade(At, OrderToTrade),
}

/// The reason that an unnumbered refusal carries.
pub fn reason_of(error: SubmitError) -> RejectReason {
    match error {
        SubmitError::Busy => RejectReason::Busy,
        SubmitError::Stopping | SubmitError::JournalFailed => RejectReason::NotReady,
        SubmitError::Refused(reject) => reject.reason,
    }
}

/// How long a shutdown waits for the last reports of sessions.
pub const LAST_REPORTS: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use admission::RequestName;
    use types::command::RequestKind;

    use super::super::requests::rejected;
    use super::super::session::Member;
    use super::*;

    fn opened(session: SessionIx) -> Opened {
        Opened {
            tag: 0,
            epoch: Sequence(1),
            session,
            user: UserIx(0),
            stp_group: types::StpGroup::of_user(UserIx(0)),
            group: types::command::MemberGroup::NONE,
            rates: admission::Rates::default(),
            client_seq: 0,
            last_number: 0,
            cancel_all_at_ns: 0,
        }
    }

    fn admitted() -> Admitted {
        Admitted {
            user: UserIx(0),
            user_id: "u1".into(),
            key: types::Id128::NONE,
            stp_group: None,
            cancel_on_disconnect: false,
            budget: Arc::default(),
            last_sequence: 0,
            from_now: false,
            heartbeat_ms: 0,
        }
    }

    /// The replica's report of a change may precede the hot thread's report of an earlier opening.
    // rows: R341
    #[test]
    fn r341_the_rates_of_an_opening_replace_no_later_ones() {
        let mut sessions = Sessions::new(0, usize::MAX);
        let member = |session| Member {
            user: UserIx(0),
            group: types::command::MemberGroup(7),
            rates: admission::Rates {
                session,
                user: 0,
                group: 3,
            },
        };
        sessions.set_members(Sequence(2), &[member(5)]);
        let (opened, admitted) = (opened(SessionIx(0)), admitted());
        let at = sessions.on_opened(&opened, || new_session(&opened, &admitted));
        let pass = |sessions: &mut Sessions| {
            let passed = (0..9).filter(|_| sessions.is_in_rate(at, 0));
            passed.count()
        };
        assert_eq!(pass(&mut sessions), 3, "the group's rate");
        assert!(sessions.wait_ns(at, 0) > 0);
        sessions.set_members(Sequence(1), &[member(0)]);
        assert_eq!(sessions.user(UserIx(0)).rates, member(5).rates);
        let later = Opened {
            epoch: Sequence(3),
            ..opened
        };
        sessions.on_opened(&later, || unreachable!("it is known"));
        assert_eq!(pass(&mut sessions), 9, "in no group, without limits");
        assert_eq!(sessions.wait_ns(at, 0), 0);
    }

    /// A change of a trading hold is reported to each session of its user.
    // rows: R341
    #[test]
    fn r341_a_change_of_a_hold_counts_by_the_sessions_of_its_user() {
        const SESSIONS: u32 = 80;
        let mut sessions = Sessions::new(0, usize::MAX);
        let rates = admission::Rates {
            session: 0,
            user: 100,
            group: 0,
        };
        for ix in 0..SESSIONS {
            let opened = Opened {
                rates,
                ..opened(SessionIx(ix))
            };
            sessions.on_opened(&opened, || new_session(&opened, &admitted()));
        }
        sessions.charge_hold_change(0, 0);
        let passed = (0..100).filter(|_| sessions.is_in_rate(1, 0)).count();
        assert_eq!(passed, 90);
    }

    /// A resume reads no more of the journal than it lacks, and more once the window has moved past
    /// all that was read.
    // rows: R343
    #[test]
    fn r343_a_resume_that_the_window_has_overtaken_reads_without_end() {
        let mut sessions = Sessions::new(0, usize::MAX);
        let opened = opened(SessionIx(0));
        let at = sessions.on_opened(&opened, || new_session(&opened, &admitted()));
        keep(&mut sessions, at, 100);
        let session = sessions.row(at);
        assert_eq!(session.next_fetch_through(), 50);
        (session.fetch_through, session.sent) = (50, 49);
        assert_eq!(session.next_fetch_through(), 50, "a read that ended early");
        session.sent = 50;
        assert_eq!(session.next_fetch_through(), u64::MAX);
    }

    fn refusal() -> wire::ServerMessage {
        let name = RequestName {
            kind: RequestKind::New,
            client_order_id: 0,
            engine_order_id: 0,
        };
        rejected(0, &Received::new(1, name, 0), RejectReason::Busy, 0)
    }

    /// Keeps the next `count` messages of a session, all but the last one durable.
    fn keep(sessions: &mut Sessions, at: At, count: usize) {
        for _ in 0..count {
            let window = &sessions.get(at).window;
            let number = window.first() + window.len() as u64;
            sessions.row(at).released = number - 1;
            sessions.keep(at, number, &refusal(), 0);
        }
    }

    /// A user above its share evicts windows of its own sessions, idle ones first, and of no other
    /// user.
    // rows: R341
    #[test]
    fn r341_a_users_windows_stay_within_its_share_of_the_pool() {
        // The smallest pool: 64 pages of 32 messages. A user's share is 16.
        let mut sessions = Sessions::new(0, usize::MAX);
        let admitted = admitted();
        let (one, other) = (UserIx(1), UserIx(2));
        let [foreign, old, growing] = [(other, 0), (one, 1), (one, 2)].map(|(user, ix)| {
            let opened = Opened {
                user,
                ..opened(SessionIx(ix))
            };
            sessions.on_opened(&opened, || new_session(&opened, &admitted))
        });
        for at in [foreign, old] {
            keep(&mut sessions, at, 320);
            sessions.row(at).released = 320;
            sessions.mark_idle(at);
        }
        let lengths =
            |sessions: &Sessions| [foreign, old, growing].map(|at| sessions.get(at).window.len());
        keep(&mut sessions, growing, 192);
        assert_eq!(lengths(&sessions), [320, 320, 192]);
        assert_eq!(
            (sessions.pool.used(one), sessions.pool.used(other)),
            (16, 10)
        );
        keep(&mut sessions, growing, 1);
        assert_eq!(lengths(&sessions), [320, 0, 193], "its idle one is evicted");
        keep(&mut sessions, growing, 10_000);
        let [foreign_kept, _, kept] = lengths(&sessions);
        assert_eq!(foreign_kept, 320);
        assert!((15 * 32..=16 * 32).contains(&kept), "{kept}");
        assert_eq!(
            (sessions.pool.used(one), sessions.pool.used(other)),
            (16, 10)
        );
    }

    /// A full pool evicts the idle sessions of others for a user within its share.
    // rows: R341
    #[test]
    fn r341_a_full_pool_evicts_the_longest_idle_session_first() {
        let mut sessions = Sessions::new(0, usize::MAX);
        let admitted = admitted();
        let rows: Vec<At> = (0..5)
            .map(|ix| {
                let opened = Opened {
                    user: UserIx(ix),
                    ..opened(SessionIx(ix))
                };
                sessions.on_opened(&opened, || new_session(&opened, &admitted))
            })
            .collect();
        // Four users fill the pool.
        for at in &rows[..4] {
            keep(&mut sessions, *at, 16 * 32);
            sessions.row(*at).released = 16 * 32;
            sessions.mark_idle(*at);
        }
        let lengths = |sessions: &Sessions| {
            let lengths = rows.iter().map(|at| sessions.get(*at).window.len());
            lengths.collect::<Vec<_>>()
        };
        assert_eq!(lengths(&sessions), [0, 512, 512, 512, 0]);
        keep(&mut sessions, rows[4], 15 * 32);
        assert_eq!(lengths(&sessions), [0, 512, 512, 512, 480]);
        keep(&mut sessions, rows[0], 1);
        assert_eq!(lengths(&sessions), [1, 0, 512, 512, 480]);
    }

    /// H5: live sessions share one bound, however many messages each may keep.
    // rows: R341
    #[test]
    fn r341_windows_of_live_sessions_share_one_bound() {
        const SESSIONS: u32 = 100;
        const MESSAGES: u64 = 1_000;
        // The smallest pool: 64 pages of 32 messages.
        let mut sessions = Sessions::new(0, usize::MAX);
        let admitted = admitted();
        let rows: Vec<At> = (0..SESSIONS)
            .map(|ix| {
                let opened = opened(SessionIx(ix));
                sessions.on_opened(&opened, || new_session(&opened, &admitted))
            })
            .collect();
        let message = refusal();
        for number in 1..=MESSAGES {
            for at in &rows {
                // Every earlier message is durable.
                sessions.row(*at).released = number - 1;
                sessions.keep(*at, number, &message, 0);
            }
        }
        let kept: usize = rows.iter().map(|at| sessions.get(*at).window.len()).sum();
        // A page of each session is not full, and may exceed the bound.
        assert!(kept <= (64 + SESSIONS as usize) * 32, "{kept} messages");
        let last = |at: &At| sessions.get(*at).window.first() <= MESSAGES;
        assert!(rows.iter().all(last), "each keeps its newest message");
    }

    // rows: R341
    #[test]
    fn r341_look_ups_are_limited_per_user() {
        let (mut look_ups, user, other) = (LookUps::default(), UserIx(1), UserIx(2));
        let begun = (0..20).filter(|_| look_ups.begin(user)).count();
        assert_eq!(begun, LOOK_UPS_PER_USER);
        assert!(look_ups.begin(other), "each user has its own limit");
        look_ups.end(user);
        assert!(look_ups.begin(user) && !look_ups.begin(user));
        (0..LOOK_UPS_PER_USER).for_each(|_| look_ups.end(user));
        look_ups.end(other);
        assert!(look_ups.0.is_empty(), "ended look-ups leave no entry");
    }
}
