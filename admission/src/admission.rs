//! `Admission`: state tables, their indexes, and caches that checks read outside the state.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use types::command::{ExpireOrders, MemberGroup, Refused};
use types::{
    BusinessDay, Command, Handle, HoldIx, Id128, InstrumentId, InstrumentIx, Quote, RejectReason,
    SessionIx, StpGroup, UserId, UserIx,
};

use crate::client_ids::ClientIds;
use crate::counts::OpenCounts;
use crate::default_holds::DefaultHolds;
use crate::order_lists::OrderLists;
use crate::request::{OrderRef, Reject, Request};
use crate::session_set::SessionSet;
use crate::slots::FreeSlots;
use crate::state::{AdmissionImage, KeyedCall, OpenOrder};

/// Lifetime of an idempotency key in admission, in journalled time. Older keys are in the history.
pub const KEY_LIFETIME_NS: u64 = 24 * 3_600 * 1_000_000_000;

/// Configuration of [`Admission`].
#[derive(Clone, Copy, Debug)]
pub struct AdmissionConfig {
    /// Maximum number of open orders of the node, over all instruments.
    pub orders_max: u32,
    /// Secret key of the hash table of client order ids. Clients choose the ids and must not be
    /// able to choose colliding ones. Never visible in any answer or state.
    pub client_id_key: [u64; 2],
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            orders_max: 1 << 20,
            client_id_key: [0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93],
        }
    }
}

/// Use of an explicit self-trade group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupUse {
    /// The first user to name it.
    pub owner: UserIx,
    /// Number of sessions and open orders that have it. The row is removed at 0.
    pub count: u64,
}

/// State of admission. See the crate's documentation.
#[derive(Clone, Debug)]
pub struct Admission {
    pub(crate) config: AdmissionConfig,
    /// The state: only `apply_command` and `apply_event` change it. Its `keys` stay empty:
    /// the field `keys` has them.
    pub(crate) tables: AdmissionImage,
    pub(crate) slots: FreeSlots,
    pub(crate) users: BTreeMap<UserId, UserIx>,
    pub(crate) instruments: BTreeMap<InstrumentId, InstrumentIx>,
    pub(crate) sessions: BTreeMap<Id128, SessionIx>,
    pub(crate) holds: BTreeMap<Id128, HoldIx>,
    /// The open trading hold of a (user, asset).
    pub(crate) default_holds: DefaultHolds,
    /// Explicit self-trade groups in use. A restore rebuilds them from sessions and open orders.
    pub(crate) groups: BTreeMap<StpGroup, GroupUse>,
    pub(crate) client_ids: ClientIds,
    pub(crate) order_lists: OrderLists,
    /// Sessions with trades that are not final.
    pub(crate) awaiting: SessionSet,
    pub(crate) counts: OpenCounts,
    /// Row in `tables.bounds` of each member group that was given bounds.
    pub(crate) groups_at: BTreeMap<MemberGroup, u32>,
    pub(crate) busts: BTreeSet<Id128>,
    pub(crate) keys: BTreeMap<Id128, KeyedCall>,
    /// (Journalled time in nanoseconds, key), oldest first.
    pub(crate) key_queue: VecDeque<(u64, Id128)>,
    // Caches: read by checks, not part of the state.
    quotes: Vec<Quote>,
    refusing: Option<RejectReason>,
}

impl Admission {
    pub fn new(config: AdmissionConfig) -> Self {
        Self {
            config,
            tables: AdmissionImage {
                // Full capacity from the start: reallocating a table would stop the market.
                slots: Vec::with_capacity(config.orders_max as usize),
                ..AdmissionImage::default()
            },
            slots: FreeSlots::new(config.orders_max),
            users: BTreeMap::new(),
            instruments: BTreeMap::new(),
            sessions: BTreeMap::new(),
            holds: BTreeMap::new(),
            default_holds: DefaultHolds::default(),
            groups: BTreeMap::new(),
            client_ids: ClientIds::new(config.orders_max, config.client_id_key),
            order_lists: OrderLists::new(config.orders_max),
            awaiting: SessionSet::default(),
            counts: OpenCounts::default(),
            groups_at: BTreeMap::new(),
            busts: BTreeSet::new(),
            keys: BTreeMap::new(),
            key_queue: VecDeque::new(),
            quotes: Vec::new(),
            refusing: None,
        }
    }

    /// Turns a request into the command to journal and apply, or returns why not. Reads only: two
    /// calls without an apply between them return the same. `now_ns` is the time the command will
    /// be stamped with.
    pub fn admit(&self, request: &Request, now_ns: u64) -> Result<Command, Reject> {
        let mut command = Command::ExpireOrders(ExpireOrders {
            instrument: InstrumentIx::NONE,
            orders_max: 0,
        });
        self.admit_into(request, now_ns, &mut command)?;
        Ok(command)
    }

    /// As [`Admission::admit`], writing the command in place; a refusal leaves `place` as it was.
    #[inline]
    pub fn admit_into(
        &self,
        request: &Request,
        now_ns: u64,
        place: &mut Command,
    ) -> Result<(), Reject> {
        match request {
            Request::New(r) => self.admit_new(r, now_ns, place),
            Request::Cancel(r) => self.admit_cancel(r, now_ns, place),
            Request::Amend(r) => self.admit_amend(r, now_ns, place),
            _ => {
                *place = self.admit_rarely(request, now_ns)?;
                Ok(())
            }
        }
    }

    /// Admits a request above a rate of its session or user only if it reduces risk: a cancel of an
    /// own open order, or a mass cancel of a session, user or group with open orders (`design.md`
    /// 5). The number of own open orders thus limits such requests, except with engine threads: an
    /// order counts as open until its engine has reported its end, and further cancels of it pass
    /// until then. The caller refuses a filtered mass cancel whose first slice ends no order.
    ///
    /// # Errors
    /// `AlreadySeen` or `DuplicateRequest` for a request seen before. `over` for any other, whose
    /// client sequence stays unused.
    #[cold]
    pub fn admit_reduction(
        &self,
        request: &Request,
        now_ns: u64,
        over: Reject,
        place: &mut Command,
    ) -> Result<(), Reject> {
        self.check_unseen(request)?;
        self.check_key(request.key_hash(), now_ns)?;
        let reduces = match request {
            Request::Cancel(_) => true,
            Request::MassCancel(r) => self.open_orders_in(&r.scope, r.user) > 0,
            _ => false,
        };
        match reduces && self.admit_into(request, now_ns, place).is_ok() {
            true => Ok(()),
            false => Err(over),
        }
    }

    /// Refuses a request whose client sequence its session has used: it was answered before.
    ///
    /// # Errors
    /// [`RejectReason::AlreadySeen`].
    pub fn check_unseen(&self, request: &Request) -> Result<(), Reject> {
        let Some((session, client_seq)) = request.client() else {
            return Ok(());
        };
        match self.check_session(session, request.member(), client_seq) {
            Err(reject) if reject.reason == RejectReason::AlreadySeen => Err(reject),
            _ => Ok(()),
        }
    }

    #[cold]
    #[inline(never)]
    fn admit_rarely(&self, request: &Request, now_ns: u64) -> Result<Command, Reject> {
        match request {
            Request::MassCancel(r) => self.admit_mass_cancel(r, now_ns).map(Command::MassCancel),
            Request::CancelAllAfter(r) => self.admit_cancel_all_after(r),
            Request::CancelSlice(of) => self.admit_slice(*of),
            _ => self.admit_control(request, now_ns),
        }
    }

    /// The command that journals a refusal, so that its numbered answer survives (`design.md` 2).
    /// `None` for calls without session, for requests seen before, for requests that are not a
    /// client's, and while [`Admission::refuse_orders`] gives the reason.
    pub fn refusal(&self, request: &Request, reject: &Reject) -> Option<Command> {
        let is_not_journalled = self.refusing() == Some(reject.reason)
            || matches!(
                reject.reason,
                RejectReason::AlreadySeen | RejectReason::UnknownSession
            );
        if is_not_journalled {
            return None;
        }
        let (user, session, client_seq, key_hash) = match request {
            Request::New(r) => (r.user, r.session, r.client_seq, r.key_hash),
            Request::Cancel(r) => (r.user, r.session, r.client_seq, r.key_hash),
            Request::Amend(r) => (r.user, r.session, r.client_seq, r.key_hash),
            Request::MassCancel(r) => (r.user, r.session, r.client_seq, r.key_hash),
            Request::CancelAllAfter(r) => (r.user, r.session, r.client_seq, Id128::NONE),
            _ => return None,
        };
        if session.is_none() || self.check_session(session, user, client_seq).is_err() {
            return None;
        }
        let (instrument, client_order_id, handle) = match request {
            Request::New(r) => (r.instrument, r.client_order_id, Handle::NONE),
            Request::Cancel(r) => self.named(r.order, user),
            Request::Amend(r) => self.named(r.order, user),
            _ => (InstrumentIx::NONE, 0, Handle::NONE),
        };
        Some(Command::Refused(Refused {
            user,
            session,
            instrument,
            reason: reject.reason,
            limit: reject.limit(),
            request: request.kind(),
            client_seq,
            client_order_id,
            handle,
            key_hash,
        }))
    }

    /// Instrument and ids of the order that a refused request names, as far as they are known.
    fn named(&self, order: OrderRef, user: UserIx) -> (InstrumentIx, u64, Handle) {
        match (self.find_order(order, user), order) {
            (Ok(open), _) => (open.instrument, open.client_order_id, open.handle),
            (Err(_), OrderRef::Client(id)) => (InstrumentIx::NONE, id, Handle::NONE),
            (Err(_), OrderRef::Handle(handle)) => (InstrumentIx::NONE, 0, handle),
        }
    }

    /// Stores the last published best prices, for the protection price of market orders.
    pub fn set_quote(&mut self, instrument: InstrumentIx, quote: Quote) {
        if self.quotes.len() <= instrument.index() {
            self.quotes.resize(instrument.index() + 1, Quote::default());
        }
        self.quotes[instrument.index()] = quote;
    }

    pub fn quote(&self, instrument: InstrumentIx) -> Quote {
        self.quotes
            .get(instrument.index())
            .copied()
            .unwrap_or_default()
    }

    /// Sets the reason for which new orders, and amends that improve the price or add quantity, are
    /// refused. `None` admits them again. Cancels always pass.
    pub fn refuse_orders(&mut self, reason: Option<RejectReason>) {
        self.refusing = reason;
    }

    pub(crate) fn refusing(&self) -> Option<RejectReason> {
        let is_suspect = self.tables.clock.is_suspect();
        self.refusing
            .or(is_suspect.then_some(RejectReason::ClockUnconfirmed))
    }

    /// The open order of a handle.
    #[inline]
    pub fn order(&self, handle: Handle) -> Option<&OpenOrder> {
        self.tables
            .slots
            .get(handle.slot as usize)?
            .order
            .as_ref()
            .filter(|order| order.handle == handle)
    }
}

/// Number of the business day of a journalled time.
pub const fn moscow_day(time_ns: u64) -> u32 {
    BusinessDay::of((time_ns / 1_000) as i64).number() as u32
}
