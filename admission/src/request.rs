//! Requests to admission.
//!
//! The caller has resolved texts to indices, and decimals to ticks and lots. Admission checks the
//! rest.

use types::command::{
    BlockCause, Bust, MassCancel, MassScope, RequestKind, SetBudget, SetMemberGroup, SetOrderBounds,
};
use types::{
    AssetIx, CancelReason, Command, Handle, HoldIx, HoldKind, Id128, InstrumentIx, InstrumentSpec,
    Lots, Minor, OrderType, Phase, RejectReason, Sequence, SessionIx, Side, StpGroup, StpMode,
    Ticks, TimeInForce, UserId, UserIx,
};

/// Reference to an open order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderRef {
    Handle(Handle),
    /// The user's own id.
    Client(u64),
}

/// A new order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRequest {
    pub instrument: InstrumentIx,
    pub user: UserIx,
    /// `NONE` for a call without session.
    pub session: SessionIx,
    /// Strictly increasing per session; ignored without one.
    pub client_seq: u64,
    /// Unique among the user's open orders; 0 = none.
    pub client_order_id: u64,
    /// None: the session's group, or the user's own.
    pub stp_group: Option<StpGroup>,
    pub stp: StpMode,
    pub side: Side,
    pub order_type: OrderType,
    pub time_in_force: TimeInForce,
    pub post_only: bool,
    /// Good till date only.
    pub expire_at_ns: u64,
    /// Limit price, or an optional protection price of a market order.
    pub price: Option<Ticks>,
    pub quantity: Lots,
    /// None: the user's trading hold for the asset.
    pub hold: Option<HoldIx>,
    /// True if identity has approved this order: the budget is neither checked nor charged.
    pub limit_checked: bool,
    /// Hash of (call, user, idempotency key); `NONE` without a key.
    pub key_hash: Id128,
}

impl NewRequest {
    /// A good-till-cancelled limit order without session, paid for by the user's trading hold.
    pub fn limit(
        instrument: InstrumentIx,
        user: UserIx,
        side: Side,
        price: Ticks,
        quantity: Lots,
    ) -> Self {
        Self {
            instrument,
            user,
            session: SessionIx::NONE,
            client_seq: 0,
            client_order_id: 0,
            stp_group: None,
            stp: StpMode::CancelNewest,
            side,
            order_type: OrderType::Limit,
            time_in_force: TimeInForce::Gtc,
            post_only: false,
            expire_at_ns: 0,
            price: Some(price),
            quantity,
            hold: None,
            limit_checked: false,
            key_hash: Id128::NONE,
        }
    }
}

/// Cancel one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CancelRequest {
    pub order: OrderRef,
    /// Owner of the order; `NONE` = the platform or an operator, who may cancel any (by handle).
    pub user: UserIx,
    pub session: SessionIx,
    pub client_seq: u64,
    pub reason: CancelReason,
    pub key_hash: Id128,
}

/// Change an order (T22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmendRequest {
    pub order: OrderRef,
    pub user: UserIx,
    pub session: SessionIx,
    pub client_seq: u64,
    pub price: Option<Ticks>,
    /// New total, including the filled part.
    pub quantity: Option<Lots>,
    /// New client order id (D37); 0 = unchanged.
    pub new_client_order_id: u64,
    pub limit_checked: bool,
    pub key_hash: Id128,
}

/// Cancel many orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MassCancelRequest {
    pub scope: MassScope,
    /// `NONE` = every instrument.
    pub instrument: InstrumentIx,
    pub side: Option<Side>,
    pub reason: CancelReason,
    /// `NONE` = the platform or an operator.
    pub user: UserIx,
    pub session: SessionIx,
    pub client_seq: u64,
    pub key_hash: Id128,
}

impl From<&MassCancel> for MassCancelRequest {
    fn from(c: &MassCancel) -> Self {
        Self {
            scope: c.scope,
            instrument: c.instrument,
            side: c.side,
            reason: c.reason,
            user: c.user,
            session: c.session,
            client_seq: c.client_seq,
            key_hash: c.key_hash,
        }
    }
}

/// Start, restart or (with 0 seconds) stop the session's dead man's switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CancelAllAfterRequest {
    pub user: UserIx,
    pub session: SessionIx,
    pub client_seq: u64,
    pub timeout_s: u32,
}

/// Open or resume a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRequest {
    /// The same key resumes the same session.
    pub key: Id128,
    pub user: UserIx,
    /// None: the user's own group.
    pub stp_group: Option<StpGroup>,
    pub cancel_on_disconnect: bool,
}

/// Add blocked money to a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FundRequest {
    /// The ledger hold. A new id creates a new hold.
    pub hold_id: Id128,
    pub kind: HoldKind,
    pub user: UserIx,
    pub asset: AssetIx,
    pub amount_minor: Minor,
    pub funding_seq: u64,
    /// Hash of (call, user, idempotency key); `NONE` without a key.
    pub key_hash: Id128,
}

/// A request to admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    New(NewRequest),
    Cancel(CancelRequest),
    Amend(AmendRequest),
    MassCancel(MassCancelRequest),
    CancelAllAfter(CancelAllAfterRequest),
    /// Binds a user; for a bound one the refusal has [`RejectDetails::User`].
    BindUser(UserId),
    /// A new instrument (its `ix` is assigned here: `NONE` in the spec) or a change of a known one.
    SetInstrument(InstrumentSpec),
    SetPhase {
        instrument: InstrumentIx,
        phase: Phase,
        cancel_orders: bool,
        /// Required to leave a halt other than by maturity: market supervision does that.
        lifts_halt: bool,
        key_hash: Id128,
    },
    OpenSession(SessionRequest),
    /// Closes a session whose connection has ended. With `epoch`, only if no later login has it.
    CloseSession {
        session: SessionIx,
        epoch: Option<Sequence>,
        /// The client logged out: cancel-on-disconnect does not run.
        keep_orders: bool,
    },
    /// Forgets the session unless a later login has opened it.
    ForgetSession {
        session: SessionIx,
        epoch: Sequence,
    },
    Fund(FundRequest),
    Defund {
        hold: HoldIx,
        amount_minor: Minor,
        funding_seq: u64,
        key_hash: Id128,
    },
    CloseHold {
        hold: HoldIx,
        funding_seq: u64,
        key_hash: Id128,
    },
    BlockUser {
        user: UserIx,
        cause: BlockCause,
    },
    UnblockUser {
        user: UserIx,
        cause: BlockCause,
    },
    SetBudget(SetBudget),
    /// `NONE` = every instrument.
    ExpireOrders(InstrumentIx),
    /// Engages or lifts the kill switch of a user, or of all users (`NONE`).
    SetKillSwitch {
        user: UserIx,
        is_engaged: bool,
        key_hash: Id128,
    },
    /// The machine's clock differs from the node's time by `offset_ns`; 0 = no longer.
    SuspectClock {
        offset_ns: i64,
    },
    /// Confirms that the machine's clock is right; see [`types::command::ConfirmClock`].
    ConfirmClock {
        offset_ns: i64,
        through_ns: u64,
        key_hash: Id128,
    },
    SetOrderBounds(SetOrderBounds),
    SetMemberGroup(SetMemberGroup),
    /// The next slice of a mass cancel or kill switch in progress.
    CancelSlice(Sequence),
    /// Settlement's positions. Those at or before the known ones change nothing.
    Settled {
        posted: Sequence,
        finalized: Sequence,
        /// Final trades, bust ones included.
        trades_final: u64,
    },
    /// A trade is bust.
    Bust(Bust),
}

impl Request {
    /// The request for a settlement command; `None` for any other command.
    pub fn of_settlement(command: &Command) -> Option<Self> {
        let request = match command {
            Command::Settled(c) => Self::Settled {
                posted: c.posted,
                finalized: c.finalized,
                trades_final: c.trades_final,
            },
            Command::Bust(c) => Self::Bust(*c),
            Command::BlockUser(c) => Self::BlockUser {
                user: c.user,
                cause: c.cause,
            },
            Command::UnblockUser(c) => Self::UnblockUser {
                user: c.user,
                cause: c.cause,
            },
            Command::MassCancel(c) => Self::MassCancel(c.into()),
            _ => return None,
        };
        Some(request)
    }

    /// The idempotency key hash of a gRPC call, `NONE` without a key.
    pub fn key_hash(&self) -> Id128 {
        match self {
            Self::New(r) => r.key_hash,
            Self::Cancel(r) => r.key_hash,
            Self::Amend(r) => r.key_hash,
            Self::MassCancel(r) => r.key_hash,
            Self::Fund(r) => r.key_hash,
            Self::SetOrderBounds(r) => r.key_hash,
            Self::SetMemberGroup(r) => r.key_hash,
            Self::SetPhase { key_hash, .. }
            | Self::Defund { key_hash, .. }
            | Self::SetKillSwitch { key_hash, .. }
            | Self::ConfirmClock { key_hash, .. }
            | Self::CloseHold { key_hash, .. } => *key_hash,
            _ => Id128::NONE,
        }
    }

    /// Session and client sequence of a session's own request.
    pub fn client(&self) -> Option<(SessionIx, u64)> {
        let (session, client_seq) = match self {
            Self::New(r) => (r.session, r.client_seq),
            Self::Cancel(r) => (r.session, r.client_seq),
            Self::Amend(r) => (r.session, r.client_seq),
            Self::MassCancel(r) => (r.session, r.client_seq),
            Self::CancelAllAfter(r) => (r.session, r.client_seq),
            _ => return None,
        };
        (!session.is_none()).then_some((session, client_seq))
    }

    /// The member in whose bounds a request counts; `NONE` for those of the platform and of
    /// operators.
    #[inline]
    pub fn member(&self) -> UserIx {
        match self {
            Self::New(r) => r.user,
            Self::Cancel(r) => r.user,
            Self::Amend(r) => r.user,
            Self::MassCancel(r) => r.user,
            Self::CancelAllAfter(r) => r.user,
            _ => UserIx::NONE,
        }
    }

    /// Kind of a client's request; `Other` for the platform's.
    pub fn kind(&self) -> RequestKind {
        match self {
            Self::New(_) => RequestKind::New,
            Self::Cancel(_) => RequestKind::Cancel,
            Self::Amend(_) => RequestKind::Amend,
            Self::MassCancel(_) => RequestKind::MassCancel,
            Self::CancelAllAfter(_) => RequestKind::CancelAllAfter,
            _ => RequestKind::Other,
        }
    }

    /// Kind and order ids by which a refusal names the request.
    pub fn name(&self) -> RequestName {
        let (client_order_id, engine_order_id) = match self {
            Self::New(r) => (r.client_order_id, 0),
            Self::Cancel(CancelRequest { order, .. }) | Self::Amend(AmendRequest { order, .. }) => {
                match order {
                    OrderRef::Client(id) => (*id, 0),
                    OrderRef::Handle(handle) => (0, handle.engine_id()),
                }
            }
            _ => (0, 0),
        };
        RequestName {
            kind: self.kind(),
            client_order_id,
            engine_order_id,
        }
    }
}

/// A request's kind, and the ids by which it names its order, 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestName {
    pub kind: RequestKind,
    pub client_order_id: u64,
    pub engine_order_id: u64,
}

/// Details of a refusal: the existing object that a duplicate names, or the figures of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectDetails {
    None,
    /// The user is bound under this index.
    User(UserIx),
    /// The instrument is known under this index.
    Instrument(InstrumentIx),
    /// The hold of that ledger id (or the trading hold that exists already).
    Hold(HoldIx),
    /// The session's last client sequence: the request was seen.
    ClientSeq(u64),
    /// The call with this key was answered, by this command.
    Request(crate::KeyedCall),
    /// The open order that has the client order id.
    Order(Handle),
    /// What the hold has undrawn and what was needed, in minor units of its asset.
    Balance {
        undrawn: Minor,
        main: Minor,
        fee: Minor,
    },
    /// Maximum count.
    MaxCount(u32),
    /// Maximum of one order, in lots, ticks or minor units; of a rate or quota, microseconds to
    /// wait.
    Max(u64),
    /// What is left of the day's budget (zero if none is known), and what was needed.
    Budget {
        left: Minor,
        needed: Minor,
    },
}

/// A business refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reject {
    pub reason: RejectReason,
    pub details: RejectDetails,
}

impl Reject {
    pub(crate) const fn new(reason: RejectReason) -> Self {
        Self {
            reason,
            details: RejectDetails::None,
        }
    }

    pub(crate) const fn with(reason: RejectReason, details: RejectDetails) -> Self {
        Self { reason, details }
    }

    /// Limit value of the reason, 0 for none: a count, a quantity in lots, a price in ticks, an
    /// amount in minor units (of an order's bound, or left in the hold or budget), or microseconds
    /// to wait.
    pub fn limit(&self) -> u64 {
        match self.details {
            RejectDetails::MaxCount(count) => u64::from(count),
            RejectDetails::Max(max) => max,
            RejectDetails::Balance { undrawn: left, .. } | RejectDetails::Budget { left, .. } => {
                u64::try_from(left.0).unwrap_or(0)
            }
            _ => 0,
        }
    }
}

impl From<RejectReason> for Reject {
    fn from(reason: RejectReason) -> Self {
        Self::new(reason)
    }
}

impl core::fmt::Display for Reject {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.reason.as_str())
    }
}
