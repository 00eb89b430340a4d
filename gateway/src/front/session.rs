//! The front's state of a session: its window, its owner, and its rate. It outlives connections: a
//! client that comes back finds window and rate as they were.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use admission::{
    AmendRequest, CancelAllAfterRequest, CancelRequest, MassCancelRequest, NewRequest, OrderRef,
    Request,
};
use service_kit::rate::Rate;
use transport::Key;
use types::command::{MassScope, MemberGroup};
use types::{
    CancelReason, Handle, Id128, InstrumentIx, Lots, Sequence, SessionIx, Side, StpGroup, StpMode,
    Ticks, UserIx,
};
use wire::{BOTH_SIDES, ClientMessage, ORDER_POST_ONLY};

use super::balances::Unsent;
use super::pieces::{Listing, Range};
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

/// A request that waits for its session's limit check.
pub struct Parked {
    pub client_seq: u64,
    pub message: ClientMessage,
    /// It arrived past the rate.
    pub is_over_rate: bool,
}

/// Requests per session that may wait for identity; more are `BUSY`.
pub const PARKED_MAX: usize = 64;

pub struct Session {
    pub ix: SessionIx,
    pub user: UserIx,
    pub user_id: Arc<str>,
    /// Epoch of the owning login. Every request carries it.
    pub epoch: Sequence,
    pub stp_group: StpGroup,
    /// The member group of the user, as of the login.
    pub group: MemberGroup,
    pub window: Window,
    /// Number of the last message that is durable.
    pub released: u64,
    /// Number of the last message sent to the owner's connection.
    pub sent: u64,
    /// The owner has every durable message: new ones are sent as they become durable.
    pub is_following: bool,
    pub owner: Option<Owner>,
    /// The last request that has been answered.
    pub answered: u64,
    /// The last request that was passed on. A repeat up to it passes the rate: a `THROTTLE` would
    /// say that it was not seen.
    pub entered: u64,
    pub rate: Rate,
    pub budget: Arc<Budget>,
    /// Set while an order above the budget is with identity: later requests wait here.
    pub parked: Option<VecDeque<Parked>>,
    /// A `SetTradingHold` is in progress: one at a time.
    pub is_setting_hold: bool,
    /// A piece of older messages was requested.
    pub is_fetching: bool,
    /// Open orders that the client has requested.
    pub listing: Option<Listing>,
    /// Retransmission that the client has requested.
    pub range: Option<Range>,
    /// The last balance change sent to the client.
    pub balances_through: u64,
    /// Queued among the sessions whose windows are evicted first.
    pub is_idle: bool,
}

/// A request whose fields are invalid.
#[derive(Debug, PartialEq, Eq)]
pub struct BadField;

impl Session {
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
        // Only the platform's own setting allows self-trades, never a client.
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
            // `wire::ALL_INSTRUMENTS` is the index that means none.
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

/// State of a user over all its sessions.
#[derive(Default)]
pub struct User {
    pub rate: Rate,
    pub sessions: Vec<At>,
    pub unsent: Unsent,
}

/// Every session that has been open at this front.
pub struct Sessions {
    rows: Vec<Session>,
    /// By session index: 0 for none, else the row's index + 1.
    places: Vec<u32>,
    pub users: HashMap<UserIx, User>,
    /// Rate of each group's members together.
    pub groups: HashMap<MemberGroup, Rate>,
    pub pool: PagePool,
    /// Sessions without a connection, longest first: their windows are evicted first.
    idle: VecDeque<At>,
    /// Messages kept per session.
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
            messages_max,
        }
    }

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

    /// Row and pool, borrowed together.
    #[inline]
    pub fn parts(&mut self, at: At) -> (&mut Session, &mut PagePool) {
        (&mut self.rows[at], &mut self.pool)
    }

    /// The index of a session that has just been opened. Adds the session if it is new here.
    pub fn place(&mut self, opened: &sequencer::Opened, make: impl FnOnce() -> Session) -> At {
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

    /// Keeps the next message of a session within the session's and the pool's limits.
    #[inline]
    pub fn keep(&mut self, at: At, number: u64, message: &wire::ServerMessage, answers: u64) {
        let (session, pool) = (&mut self.rows[at], &mut self.pool);
        if session.window.len() >= self.messages_max {
            let through = session.released.min(sent_through(session));
            session.window.shrink(pool, through);
        }
        session.window.push(pool, number, message, answers);
        if pool.is_full() {
            self.make_room(at);
        }
    }

    /// Evicts windows while the pool is full: those of idle sessions, longest first, then the
    /// growing one.
    #[cold]
    fn make_room(&mut self, at: At) {
        while self.pool.is_full() {
            let Some(oldest) = self.idle.pop_front() else {
                let session = &mut self.rows[at];
                let through = session.released.min(sent_through(session));
                session.window.shrink(&mut self.pool, through);
                return;
            };
            let session = &mut self.rows[oldest];
            session.is_idle = false;
            if session.owner.is_none() {
                let through = session.released;
                session.window.clear(&mut self.pool, through);
            }
        }
    }

    /// Marks a session that has lost its connection.
    pub fn idle(&mut self, at: At) {
        let session = &mut self.rows[at];
        session.owner = None;
        session.is_following = false;
        session.parked = None;
        session.listing = None;
        session.range = None;
        if !session.is_idle {
            session.is_idle = true;
            self.idle.push_back(at);
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }
}

/// Last message that may leave the window: a client's unsent ones stay, the journal has the others.
fn sent_through(session: &Session) -> u64 {
    match session.owner {
        Some(_) if session.is_following => session.sent,
        _ => u64::MAX,
    }
}
