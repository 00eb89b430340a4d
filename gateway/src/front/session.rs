//! The front's state of a session: its window, its owner and its rate. The state outlives
//! connections: window and rate continue after a reconnect.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::{Arc, Weak};

use admission::{
    AmendRequest, CancelAllAfterRequest, CancelRequest, MassCancelRequest, NewRequest, OrderRef,
    Rates, Request,
};
use bytes::Bytes;
use service_kit::rate::Rate;
use transport::Key;
use types::command::{MassScope, MemberGroup};
use types::{
    CancelReason, Handle, Id128, InstrumentIx, Lots, Sequence, SessionIx, Side, StpGroup, StpMode,
    Ticks, UserIx,
};
use wire::{BOTH_SIDES, ClientMessage, ORDER_POST_ONLY};

use super::balances::Unsent;
use super::in_flight::Unanswered;
use super::pieces::{Listing, Range};
use super::state::Pending;
use super::window::{PagePool, Window};
use crate::budget::Budget;

/// Index of a session in the front's table.
pub type At = usize;

/// The connection and channel of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub connection: Key,
    pub channel: u16,
}

/// Names the login that owns a session, in requests to tokio.
#[derive(Clone, Debug, Default)]
pub struct LoginRef(Weak<()>);

impl LoginRef {
    pub fn to(login: &Arc<()>) -> Self {
        Self(Arc::downgrade(login))
    }

    /// True once the login no longer owns the session.
    pub fn has_ended(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// An order that waits until identity has checked it.
pub struct Limited {
    pub new: NewRequest,
    /// When the front read it, in nanoseconds since 1970.
    pub received_ns: u64,
}

/// A request that waits until identity has checked an earlier order of its session.
pub struct Parked {
    pub client_seq: u64,
    pub message: ClientMessage,
    /// When the front read it, in nanoseconds since 1970: its report states this time.
    pub received_ns: u64,
    /// The session was above its rate when the request arrived.
    pub is_over_rate: bool,
}

/// Maximum requests per session that wait for identity, including the order that is checked.
/// Further requests are refused as `BUSY`.
pub const PARKED_MAX: usize = 64;

/// Messages to other sessions of a user that cost about as much as one of its requests.
const REPORTS_PER_MESSAGE: u64 = 8;

pub struct Session {
    pub ix: SessionIx,
    pub user: UserIx,
    pub user_id: Arc<str>,
    /// Epoch of the owning login. Every request carries it.
    pub epoch: Sequence,
    /// Dropped when the login ends, but only at a takeover while its `SetTradingHold` is in
    /// progress, which a logout does not end: see [`LoginRef`].
    pub login: Arc<()>,
    pub stp_group: StpGroup,
    pub window: Window,
    /// Number of the last message that is durable.
    pub released: u64,
    /// Number of the last message sent to the owner's connection.
    pub sent: u64,
    /// The owner was sent every durable message. New messages are sent when they become durable.
    pub is_following: bool,
    pub owner: Option<Owner>,
    /// The last login that another one took the session from: its epoch and its channel.
    pub taken_over: Option<(Sequence, Owner)>,
    /// A login whose session is open and whose connection has no space for the answer yet. The
    /// session has no owner then.
    pub delayed: Option<Box<Pending>>,
    /// Client sequence of the last request that was answered.
    pub answered: u64,
    /// Requests in flight. Their repeats are not submitted.
    pub unanswered: Unanswered,
    pub rate: Rate,
    pub budget: Arc<Budget>,
    /// Set while an order above the budget estimate waits for identity. Later orders and amends
    /// wait here.
    pub parked: Option<VecDeque<Parked>>,
    /// Identity checks an order of this login, which may have been refused meanwhile: one check at
    /// a time.
    pub is_checking_limit: bool,
    /// A `SetTradingHold` is in progress: one at a time.
    pub is_setting_hold: bool,
    /// A read of messages before the window was requested for the resume.
    pub is_fetching: bool,
    /// Number through which the login's resume has last read the journal; `u64::MAX` without end,
    /// or not since the login or a message sent from the window.
    pub fetch_through: u64,
    /// Messages that were read and not sent yet, starting with number `sent + 1`. Until they are
    /// sent, their look-up counts as in progress.
    pub fetched: VecDeque<Bytes>,
    /// Queued among the resuming sessions.
    pub is_resuming: bool,
    /// The listing of open orders in progress.
    pub listing: Option<Listing>,
    /// The retransmission in progress.
    pub range: Option<Range>,
    /// Queued among the sessions with a piece of these to request or to send.
    pub is_in_pieces: bool,
    /// The last balance change sent to the client.
    pub balances_through: u64,
    /// Queued in `Sessions::idle`, and in the user's `idle`.
    pub is_idle: bool,
    pub is_idle_of_user: bool,
    /// Queued in `Sessions::surplus`.
    pub is_surplus: bool,
}

/// A request whose fields are invalid.
#[derive(Debug, PartialEq, Eq)]
pub struct BadField;

impl Session {
    /// Number through which the resume reads the journal next.
    pub fn next_fetch_through(&self) -> u64 {
        match self.sent < self.fetch_through {
            // Half of the window too: it moves on while the journal is read.
            true => self.window.first() - 1 + self.window.len() as u64 / 2,
            // The window has moved past all that was read.
            false => u64::MAX,
        }
    }

    pub fn login(&self) -> LoginRef {
        LoginRef::to(&self.login)
    }

    /// Converts a message to a request of the trading path.
    pub fn request(&self, client_seq: u64, message: &ClientMessage) -> Result<Request, BadField> {
        match message {
            ClientMessage::NewOrder(m) => self.new_order(client_seq, m).map(Request::New),
            ClientMessage::Cancel(m) => Ok(Request::Cancel(CancelRequest {
                order: order_ref(m.engine_order_id, m.client_order_id),
                user: self.user,
                session: self.ix,
                client_seq,
                reason: CancelReason::UserRequest,
                key_hash: Id128::NONE,
            })),
            ClientMessage::Amend(m) => Ok(Request::Amend(AmendRequest {
                order: order_ref(m.engine_order_id, m.client_order_id),
                user: self.user,
                session: self.ix,
                client_seq,
                price: (m.price_ticks != 0).then_some(Ticks(m.price_ticks)),
                quantity: (m.quantity_lots != 0).then_some(Lots(m.quantity_lots)),
                new_client_order_id: m.new_client_order_id,
                limit_checked: false,
                key_hash: Id128::NONE,
            })),
            ClientMessage::MassCancel(m) => self.mass_cancel(client_seq, m),
            ClientMessage::CancelAllAfter(m) => {
                Ok(Request::CancelAllAfter(CancelAllAfterRequest {
                    user: self.user,
                    session: self.ix,
                    client_seq,
                    timeout_s: m.timeout_s,
                }))
            }
            ClientMessage::Login(_)
            | ClientMessage::Logout(_)
            | ClientMessage::Heartbeat(_)
            | ClientMessage::SetTradingHold(_)
            | ClientMessage::OpenOrders(_)
            | ClientMessage::Retransmit(_) => Err(BadField),
        }
    }

    fn new_order(&self, client_seq: u64, m: &wire::NewOrder) -> Result<NewRequest, BadField> {
        // A client may not switch off self-trade prevention.
        if m.stp == StpMode::None || m.flags & !ORDER_POST_ONLY != 0 || m.client_order_id == 0 {
            return Err(BadField);
        }
        Ok(NewRequest {
            instrument: InstrumentIx(m.instrument),
            user: self.user,
            session: self.ix,
            client_seq,
            client_order_id: m.client_order_id,
            stp_group: None,
            stp: m.stp,
            side: m.side,
            order_type: m.order_type,
            time_in_force: m.time_in_force,
            post_only: m.flags & ORDER_POST_ONLY != 0,
            expire_at_ns: m.expire_at_ns,
            price: (m.price_ticks != 0).then_some(Ticks(m.price_ticks)),
            quantity: Lots(m.quantity_lots),
            hold: None,
            limit_checked: false,
            key_hash: Id128::NONE,
        })
    }

    fn mass_cancel(&self, client_seq: u64, m: &wire::MassCancel) -> Result<Request, BadField> {
        let scope = match m.scope {
            0 => MassScope::Session(self.ix),
            1 => MassScope::User(self.user),
            2 => MassScope::Group(self.stp_group),
            _ => return Err(BadField),
        };
        let side = match m.side {
            BOTH_SIDES => None,
            code => Some(Side::from_code(code).ok_or(BadField)?),
        };
        Ok(Request::MassCancel(MassCancelRequest {
            scope,
            // `wire::ALL_INSTRUMENTS` equals `InstrumentIx::NONE`, as asserted below.
            instrument: InstrumentIx(m.instrument),
            side,
            reason: CancelReason::MassCancel,
            user: self.user,
            session: self.ix,
            client_seq,
            key_hash: Id128::NONE,
        }))
    }
}

const _: () = assert!(wire::ALL_INSTRUMENTS == InstrumentIx::NONE.0);

fn order_ref(engine_order_id: u64, client_order_id: u64) -> OrderRef {
    match engine_order_id {
        0 => OrderRef::Client(client_order_id),
        id => OrderRef::Handle(Handle::from_engine_id(id)),
    }
}

/// Reference data of a user: its group, and the rates of its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub user: UserIx,
    pub group: MemberGroup,
    pub rates: Rates,
}

/// State of a user over all its sessions.
#[derive(Default)]
pub struct User {
    pub rate: Rate,
    pub group: MemberGroup,
    pub rates: Rates,
    /// The sequence as of which group and rates are known.
    known_at: Sequence,
    pub sessions: Vec<At>,
    /// Sessions without a connection, longest idle first.
    idle: VecDeque<At>,
    pub unsent: Unsent,
    /// Sessions that began a listing or a retransmission. Those that have ended are removed before
    /// another one begins.
    long_answers: Vec<At>,
}

/// Every session that was opened at this front.
pub struct Sessions {
    rows: Vec<Session>,
    /// By session index: 0 for none, else the index in `rows` + 1.
    places: Vec<u32>,
    pub users: HashMap<UserIx, User>,
    /// Rate of all members of a group together.
    pub groups: HashMap<MemberGroup, Rate>,
    pub pool: PagePool,
    /// Sessions without a connection, longest idle first. Their windows are evicted first.
    idle: VecDeque<At>,
    /// Sessions of users above their share that had no message to drop when they grew.
    surplus: VecDeque<At>,
    /// Maximum messages kept per session.
    messages_max: usize,
}

impl Sessions {
    pub fn new(window_bytes_max: usize, messages_max: usize) -> Self {
        Self {
            rows: Vec::new(),
            places: Vec::new(),
            users: HashMap::new(),
            groups: HashMap::new(),
            pool: PagePool::new(window_bytes_max),
            idle: VecDeque::new(),
            surplus: VecDeque::new(),
            messages_max,
        }
    }

    /// The front's index of a session; `None` if it was not opened here.
    #[inline]
    pub fn at(&self, session: SessionIx) -> Option<At> {
        let place = *self.places.get(session.index())?;
        (place as usize).checked_sub(1)
    }

    #[inline]
    pub fn row(&mut self, at: At) -> &mut Session {
        &mut self.rows[at]
    }

    /// State of a user who has a session here.
    pub fn user(&mut self, user: UserIx) -> &mut User {
        self.users.get_mut(&user).expect("the user has a session")
    }

    pub fn get(&self, at: At) -> &Session {
        &self.rows[at]
    }

    /// A session and the pool, borrowed together.
    #[inline]
    pub fn parts(&mut self, at: At) -> (&mut Session, &mut PagePool) {
        (&mut self.rows[at], &mut self.pool)
    }

    /// Applies the opening of a session: adds the session if it is new here, and updates its user.
    /// Returns the session's index.
    pub fn on_opened(&mut self, opened: &sequencer::Opened, make: impl FnOnce() -> Session) -> At {
        let (user, group, rates) = (opened.user, opened.group, opened.rates);
        self.set_members(opened.epoch, &[Member { user, group, rates }]);
        if let Some(at) = self.at(opened.session) {
            return at;
        }
        let ix = opened.session.index();
        if self.places.len() <= ix {
            self.places.resize(ix + 1, 0);
        }
        let at = self.rows.len();
        self.places[ix] = u32::try_from(at + 1).expect("sessions are numbered by 32 bits");
        self.rows.push(make());
        let user = self.users.entry(opened.user).or_default();
        user.sessions.push(at);
        user.unsent.restart();
        at
    }

    /// Applies the members' data as of a sequence, unless newer data is known. Adds unknown users:
    /// the report of their session's opening may still be in the ring.
    pub fn set_members(&mut self, as_of: Sequence, members: &[Member]) {
        for member in members {
            let user = self.users.entry(member.user).or_default();
            if user.known_at <= as_of {
                (user.group, user.rates) = (member.group, member.rates);
                user.known_at = as_of;
            }
        }
    }

    /// True if the rates of the session, of its user over all sessions, and of its group admit a
    /// message.
    #[inline]
    pub fn is_in_rate(&mut self, at: At, now_ns: u64) -> bool {
        let session = &mut self.rows[at];
        let user = self.users.entry(session.user).or_default();
        let rates = user.rates;
        if !session.rate.admit(now_ns, rates.session) || !user.rate.admit(now_ns, rates.user) {
            return false;
        }
        if user.group.is_none() {
            return true;
        }
        let group = self.groups.entry(user.group).or_default();
        group.admit(now_ns, rates.group)
    }

    /// Nanoseconds until all three rates admit the session's next request.
    pub fn wait_ns(&mut self, at: At, now_ns: u64) -> u64 {
        let session = &self.rows[at];
        let user = self.users.entry(session.user).or_default();
        let rates = user.rates;
        let of_session = session.rate.wait_ns(now_ns, rates.session);
        let of_user = user.rate.wait_ns(now_ns, rates.user);
        let of_group = self.groups.get(&user.group);
        let of_group = of_group.map_or(0, |rate| rate.wait_ns(now_ns, rates.group));
        of_session.max(of_user).max(of_group)
    }

    /// Charges the rates of the session and its user for the messages that a change of a trading
    /// hold causes: one to each session of the user.
    pub fn charge_hold_change(&mut self, at: At, now_ns: u64) {
        let user = self.users.entry(self.rows[at].user).or_default();
        let messages = user.sessions.len() as u64 / REPORTS_PER_MESSAGE;
        user.rate.charge(now_ns, user.rates.user, messages);
        self.charge(at, now_ns, messages);
    }

    /// Charges the session's rate `messages` additional messages for an expensive request.
    pub fn charge(&mut self, at: At, now_ns: u64, messages: u64) {
        let session = &mut self.rows[at];
        let rates = self.users.entry(session.user).or_default().rates;
        session.rate.charge(now_ns, rates.session, messages);
    }

    /// Begins a listing or a retransmission of a session. False when `max` other sessions of its
    /// user have one in progress. Cost: `max` look-ups.
    pub fn begin_long_answer(&mut self, at: At, max: usize) -> bool {
        let Self { rows, users, .. } = self;
        let Some(user) = users.get_mut(&rows[at].user) else {
            return false;
        };
        let in_progress = |row: &Session| row.listing.is_some() || row.range.is_some();
        user.long_answers
            .retain(|other| *other != at && in_progress(&rows[*other]));
        let has_room = user.long_answers.len() < max;
        if has_room {
            user.long_answers.push(at);
        }
        has_room
    }

    /// Keeps the next message of a session, and drops messages to stay within the limits of
    /// session, user and pool. Cost: amortized constant, since a session is queued at most once per
    /// page and disconnect.
    #[inline]
    pub fn keep(&mut self, at: At, number: u64, message: &wire::ServerMessage, answers: u64) {
        let (session, pool) = (&mut self.rows[at], &mut self.pool);
        if session.window.len() >= self.messages_max {
            shrink(session, pool);
        }
        if session.window.push(pool, number, message, answers) {
            self.limit_user(at);
        }
        if self.pool.is_full() {
            self.evict(at);
        }
    }

    /// Keeps a user within its share of the pool. Evicts the windows of the user's idle sessions,
    /// longest idle first, then the oldest messages of the growing session.
    fn limit_user(&mut self, at: At) {
        let session = &self.rows[at];
        let user = session.user;
        if session.owner.is_none() {
            // An idle session can grow. It then has messages that can be evicted again.
            self.queue_idle(at);
        }
        if self.pool.used(user) <= self.pool.share() {
            return;
        }
        let share = self.share(user);
        while self.pool.used(user) > share
            && let Some(oldest) = self.user(user).idle.pop_front()
        {
            self.rows[oldest].is_idle_of_user = false;
            if oldest != at {
                self.clear_idle(oldest);
            }
        }
        let (session, pool) = self.parts(at);
        while pool.used(user) > share && shrink(session, pool) {}
        if pool.used(user) > share && !mem::replace(&mut session.is_surplus, true) {
            self.surplus.push_back(at);
        }
    }

    /// Pages of a user's share: a fraction of the pool, but at least one per session.
    fn share(&mut self, user: UserIx) -> usize {
        let sessions = self.user(user).sessions.len();
        self.pool.share().max(sessions)
    }

    /// Evicts windows while the pool is full, if the growing session's user is within its share:
    /// first messages of users above their share, then windows of idle sessions, longest idle
    /// first. If the pool stays full, the growing session drops its oldest page.
    #[cold]
    fn evict(&mut self, at: At) {
        let user = self.rows[at].user;
        let is_within = self.pool.used(user) <= self.share(user);
        while is_within && self.pool.is_full() {
            if let Some(other) = self.surplus.pop_front() {
                self.rows[other].is_surplus = false;
                self.drop_surplus(other);
            } else if let Some(oldest) = self.idle.pop_front() {
                self.rows[oldest].is_idle = false;
                if oldest != at {
                    self.clear_idle(oldest);
                }
            } else {
                break;
            }
        }
        if self.pool.is_full() {
            let (session, pool) = self.parts(at);
            shrink(session, pool);
        }
    }

    /// Drops a session's oldest messages while its user is above its share.
    fn drop_surplus(&mut self, at: At) {
        let user = self.rows[at].user;
        let share = self.share(user);
        let (session, pool) = self.parts(at);
        while pool.used(user) > share && shrink(session, pool) {}
    }

    /// Empties the window of a session, unless it has a connection again.
    fn clear_idle(&mut self, at: At) {
        let (session, pool) = self.parts(at);
        if session.owner.is_none() {
            session.window.clear(pool, session.released);
        }
    }

    /// Queues a session for eviction.
    fn queue_idle(&mut self, at: At) {
        let session = &mut self.rows[at];
        if !mem::replace(&mut session.is_idle, true) {
            self.idle.push_back(at);
        }
        if !mem::replace(&mut session.is_idle_of_user, true)
            && let Some(user) = self.users.get_mut(&session.user)
        {
            user.idle.push_back(at);
        }
    }

    /// Marks a session that has no connection any more, and drops its pending work.
    pub fn mark_idle(&mut self, at: At) {
        let session = &mut self.rows[at];
        session.owner = None;
        if !session.is_setting_hold {
            session.login = Arc::default();
        }
        session.is_following = false;
        session.parked = None;
        session.listing = None;
        session.range = None;
        self.queue_idle(at);
    }

    /// Drops the window of a session that the journal has forgotten. The row stays until the next
    /// start: messages in the queues contain its index and must not reach another session.
    pub fn forget(&mut self, at: At) {
        let row = &mut self.rows[at];
        row.window.clear(&mut self.pool, u64::MAX);
        self.places[row.ix.index()] = 0;
        if let Some(user) = self.users.get_mut(&row.user) {
            user.sessions.retain(|own| *own != at);
            user.idle.retain(|own| *own != at);
            user.unsent.restart();
        }
    }
}

/// Drops the oldest page of a session's window. False when the page must stay.
fn shrink(session: &mut Session, pool: &mut PagePool) -> bool {
    let through = session.released.min(sent_through(session));
    session.window.shrink(pool, through)
}

/// Last message that may leave the window. Messages that a following client was not sent yet stay.
/// Older ones can be read from the journal.
fn sent_through(session: &Session) -> u64 {
    match session.owner {
        Some(_) if session.is_following => session.sent,
        _ => u64::MAX,
    }
}
