//! Commands of the trading path: fixed-size structs, journalled in admission order and replayed.
//!
//! A command contains everything its effect depends on: `apply` reads no clock and no
//! configuration. Variants are part of the journal format: add new ones at the end, never reorder.
//! Fields named `client_seq` are 0 without a session.

use core::mem::size_of;

use crate::ids::{
    AssetIx, Handle, HoldIx, Id128, InstrumentIx, Sequence, SessionIx, StpGroup, UserIx,
};
use crate::instrument::InstrumentSpec;
use crate::money::Reserve;
use crate::number::{FeeRate, Lots, Minor, Ticks};
use crate::order::{HoldKind, OrderType, Phase, Side, StpMode, TimeInForce};
use crate::reason::{CancelReason, RejectReason};
use crate::text::UserId;

/// Version of the commands and events in the journal. Increment it with every change after which an
/// older journal or checkpoint cannot be read; the formats of data folder and checkpoints follow.
pub const FORMAT: u32 = 8;

/// Declares a struct of a journal record with the shared derives.
macro_rules! record {
    ($(#[$meta:meta])* pub struct $name:ident { $($body:tt)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        pub struct $name { $($body)* }
    };
}
pub(crate) use record;

record! {
    /// Assigns a user its dense index.
    pub struct BindUser {
        pub user: UserIx,
        pub id: UserId,
    }
}

record! {
    /// Adds an instrument or changes its band, collar, fee rate or velocity rule. Admission refuses
    /// a change of tick, lot or decimals. A known instrument keeps its phase: only [`SetPhase`]
    /// changes it.
    pub struct SetInstrument {
        pub spec: InstrumentSpec,
    }
}

record! {
    /// Changes the phase of a market.
    pub struct SetPhase {
        pub instrument: InstrumentIx,
        pub phase: Phase,
        /// Also cancels every resting order (`INSTRUMENT_HALTED`). Maturity always does
        /// (`INSTRUMENT_MATURED`).
        pub cancel_orders: bool,
        /// Hash of (call, user, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

record! {
    /// Opens or resumes a session: the same index keeps its client sequence.
    pub struct OpenSession {
        pub session: SessionIx,
        pub user: UserIx,
        /// Default group of the session's orders.
        pub stp_group: StpGroup,
        pub cancel_on_disconnect: bool,
        /// Identifies the session across connections.
        pub key: Id128,
    }
}

record! {
    /// Closes a session whose connection has ended. Its client sequence stays.
    pub struct CloseSession {
        pub session: SessionIx,
        /// The client logged out: the session's orders stay despite cancel-on-disconnect.
        pub keep_orders: bool,
    }
}

record! {
    /// Forgets a session that has been closed for long (`design.md` 2). Its name may be opened
    /// again as a new session. Its index is never used again.
    pub struct ForgetSession {
        pub session: SessionIx,
    }
}

record! {
    /// Adds money of a ledger hold to its balance in admission. The first `Fund` of a hold creates
    /// the balance.
    pub struct Fund {
        pub hold: HoldIx,
        pub kind: HoldKind,
        pub user: UserIx,
        pub asset: AssetIx,
        pub amount_minor: Minor,
        /// Increases with each `Fund`, `Defund` and `CloseHold` of the hold; equal or lower =
        /// already applied.
        pub funding_seq: u64,
        /// The ledger hold.
        pub hold_id: Id128,
        /// Hash of (call, user, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

record! {
    /// Removes undrawn money from a hold. The ledger releases it after the commit.
    pub struct Defund {
        pub hold: HoldIx,
        pub amount_minor: Minor,
        pub funding_seq: u64,
        /// Hash of (call, user, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

record! {
    /// Closes a hold without open orders and removes its undrawn money.
    pub struct CloseHold {
        pub hold: HoldIx,
        pub funding_seq: u64,
        /// Hash of (call, user, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

crate::code_enum! {
    /// Command that changed a trading hold.
    FundingCause {
        Fund = 0 "FUND",
        Defund = 1 "DEFUND",
        Close = 2 "CLOSE",
    }
}

crate::code_enum! {
    /// Cause of a block. A user is blocked while any cause is active; each is lifted separately. No
    /// code is 0, so that a record from before causes were journalled does not read as one with a
    /// cause.
    BlockCause {
        /// The identity service has blocked the user.
        Identity = 1 "IDENTITY",
        /// Journal and ledger differ about the user's money (`design.md` 4).
        Difference = 2 "DIFFERENCE",
    }
}

record! {
    /// Refuses further orders of this user. A following `MassCancel` cancels the open ones.
    pub struct BlockUser {
        pub user: UserIx,
        pub cause: BlockCause,
    }
}

record! {
    /// Lifts one cause. The user may trade when no cause is left.
    pub struct UnblockUser {
        pub user: UserIx,
        pub cause: BlockCause,
    }
}

record! {
    /// Progress of settlement (`design.md` 4). Positions never decrease; `finalized <= posted`.
    pub struct Settled {
        /// The ledger has every posting of the records up to this one.
        pub posted: Sequence,
        /// Every trade of the records up to this one is final: on chain, or bust.
        pub finalized: Sequence,
        /// Number of final trades, bust ones included, anywhere in the journal.
        pub trades_final: u64,
    }
}

record! {
    /// One order of a trade, as known to the session that entered it.
    pub struct TradeParty {
        /// `NONE` for an order without a session.
        pub session: SessionIx,
        pub handle: Handle,
        /// After the trade; 0 = none.
        pub client_order_id: u64,
    }
}

impl TradeParty {
    /// No session is notified.
    pub const NONE: Self = Self {
        session: SessionIx::NONE,
        handle: Handle::NONE,
        client_order_id: 0,
    };
}

record! {
    /// The chain has refused a trade for good. Its operations are reversed; its orders stay as they
    /// are. Both orders may have left every table, so the command carries the data for their
    /// sessions' messages.
    pub struct Bust {
        /// Public id.
        pub trade: Id128,
        /// Gapless per instrument, from 1.
        pub trade_number: u64,
        pub instrument: InstrumentIx,
        pub buy: TradeParty,
        pub sell: TradeParty,
    }
}

record! {
    /// A user's TRADING limit of a day, from identity.
    pub struct SetBudget {
        pub user: UserIx,
        /// Moscow day, in days since 1970-01-01.
        pub day: u32,
        pub limit_minor: Minor,
        /// What is left of the limit by identity's count. Used from the day's first command only:
        /// afterwards admission counts.
        pub left_minor: Minor,
    }
}

record! {
    /// A new order, admitted: money drawn, slot assigned.
    ///
    /// The fields for the engines come first, in one cache line with the envelope.
    #[repr(C)]
    pub struct New {
        pub post_only: bool,
        pub side: Side,
        pub order_type: OrderType,
        pub time_in_force: TimeInForce,
        pub stp: StpMode,
        pub handle: Handle,
        /// Limit price; for a market order its protection price (0 for a buy and `Ticks::MAX` for a
        /// sell without a reference price).
        pub price: Ticks,
        pub quantity: Lots,
        pub instrument: InstrumentIx,
        pub stp_group: StpGroup,
        pub user: UserIx,
        pub session: SessionIx,
        /// Expiry of the order, journalled nanoseconds, exclusive. 0 = none.
        pub expire_at_ns: u64,
        /// Hold that the order draws on.
        pub hold: HoldIx,
        /// Fee rate of its trades, fixed at entry.
        pub fee_rate: FeeRate,
        /// Unique among the user's open orders; 0 = none.
        pub client_order_id: u64,
        pub client_seq: u64,
        /// Amount drawn from the hold.
        pub draw: Reserve,
        /// Amount charged to the user's budget (0 if identity has approved this order).
        pub budget_minor: Minor,
        /// Hash of (call, user, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

impl New {
    /// A good-till-cancelled limit order that draws nothing: for a book without admission.
    pub fn limit(
        instrument: InstrumentIx,
        handle: Handle,
        user: UserIx,
        side: Side,
        price: Ticks,
        quantity: Lots,
    ) -> Self {
        Self {
            post_only: false,
            side,
            order_type: OrderType::Limit,
            time_in_force: TimeInForce::Gtc,
            stp: StpMode::CancelNewest,
            handle,
            price,
            quantity,
            instrument,
            stp_group: StpGroup::of_user(user),
            user,
            session: SessionIx::NONE,
            expire_at_ns: 0,
            hold: HoldIx(0),
            fee_rate: FeeRate::TRADING,
            client_order_id: 0,
            client_seq: 0,
            draw: Reserve::ZERO,
            budget_minor: Minor::ZERO,
            key_hash: Id128::NONE,
        }
    }
}

record! {
    /// Cancels one order. Admission has resolved a client order id to the handle.
    pub struct Cancel {
        pub handle: Handle,
        pub instrument: InstrumentIx,
        pub user: UserIx,
        pub session: SessionIx,
        pub reason: CancelReason,
        pub client_seq: u64,
        pub key_hash: Id128,
    }
}

record! {
    /// Changes price, total quantity or both (T22). The growth of the order's reserve has been
    /// drawn; a rejected amend returns it. An order outside the band, which may have moved, keeps
    /// its price and may only shrink.
    pub struct Amend {
        pub handle: Handle,
        pub instrument: InstrumentIx,
        pub user: UserIx,
        pub session: SessionIx,
        /// True if the charge to the budget is added to the order's charge and returns with it.
        /// False for an order of an earlier day.
        pub budget_returns: bool,
        pub client_seq: u64,
        /// Client order id after the amend (D37), if accepted; 0 = unchanged.
        pub new_client_order_id: u64,
        /// New price; none = unchanged.
        pub price: Option<Ticks>,
        /// New total quantity, filled part included; none = unchanged.
        pub quantity: Option<Lots>,
        pub draw: Reserve,
        pub budget_minor: Minor,
        pub key_hash: Id128,
    }
}

/// Scope of a mass cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum MassScope {
    All,
    User(UserIx),
    Session(SessionIx),
    Group(StpGroup),
}

record! {
    /// Position of a member's sweep: by session, those without one last, then by entry sequence.
    #[derive(PartialOrd, Ord)]
    pub struct SweepPosition {
        pub session: SessionIx,
        pub sequence: Sequence,
    }
}

impl SweepPosition {
    /// Before every order.
    pub const START: Self = Self {
        session: SessionIx(0),
        sequence: Sequence::ZERO,
    };
    /// After every order.
    pub const END: Self = Self {
        session: SessionIx::NONE,
        sequence: Sequence(u64::MAX),
    };
}

record! {
    /// Cancels many orders, on one instrument or on all. In a member's scope this command ends
    /// orders up to `through`. [`CancelSlice`]s end the rest, so that other members' requests are
    /// sequenced in between (`design.md` 7).
    pub struct MassCancel {
        pub scope: MassScope,
        /// `NONE` = every instrument of the node.
        pub instrument: InstrumentIx,
        /// Only this side.
        pub side: Option<Side>,
        pub reason: CancelReason,
        /// Requesting user (`NONE` for the platform).
        pub user: UserIx,
        pub session: SessionIx,
        pub client_seq: u64,
        pub key_hash: Id128,
        /// Last order in the scope that this command ends; [`SweepPosition::END`] = all.
        pub through: SweepPosition,
        /// Upper bound of the orders left to the slices.
        pub remaining: u32,
    }
}

record! {
    /// Continues a mass cancel or kill switch: ends the orders of its scope after `after`, up to
    /// `through`. Orders entered after the first command stay.
    pub struct CancelSlice {
        /// Sequence of the first command.
        pub of: Sequence,
        pub after: SweepPosition,
        /// [`SweepPosition::END`] = the last slice.
        pub through: SweepPosition,
        /// Reason of the first command.
        pub reason: CancelReason,
        pub user: UserIx,
        pub key_hash: Id128,
    }
}

impl MassCancel {
    /// Cancels every open order of a blocked user.
    pub const fn of_blocked(user: UserIx) -> Self {
        Self {
            scope: MassScope::User(user),
            instrument: InstrumentIx::NONE,
            side: None,
            reason: CancelReason::UserBlocked,
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
            through: SweepPosition::END,
            remaining: 0,
        }
    }
}

/// Maximum timeout of a [`CancelAllAfter`], in seconds.
pub const CANCEL_ALL_AFTER_MAX_S: u32 = 600;

record! {
    /// Starts, restarts or stops the session's dead man's switch. Unless a later command replaces
    /// it, the session's orders are cancelled `timeout_s` after this command, by journalled time
    /// (`CANCEL_ALL_AFTER`). The switch survives a disconnect and a restart, and fires once.
    pub struct CancelAllAfter {
        pub user: UserIx,
        pub session: SessionIx,
        pub client_seq: u64,
        /// Seconds, at most [`CANCEL_ALL_AFTER_MAX_S`]; 0 = off.
        pub timeout_s: u32,
    }
}

impl CancelAllAfter {
    /// Time in nanoseconds at which the switch fires for a command at `time_ns`; 0 = never.
    pub const fn at_ns(&self, time_ns: u64) -> u64 {
        match self.timeout_s {
            0 => 0,
            timeout_s => time_ns + timeout_s as u64 * 1_000_000_000,
        }
    }
}

record! {
    /// Kill switch of one user or of all users (F11). Engaged: open orders are cancelled
    /// (`KILL_SWITCH`), and neither new orders nor amends are accepted until a command lifts it.
    /// The two levels are separate: lifting the switch of all users leaves a user's own engaged.
    pub struct SetKillSwitch {
        /// `NONE` = all users.
        pub user: UserIx,
        pub is_engaged: bool,
        /// Hash of (call, caller, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
        /// As [`MassCancel::through`].
        pub through: SweepPosition,
    }
}

record! {
    /// The machine's clock differs from the node's time by more than the node corrects itself, or
    /// agrees again. While it differs, new orders are refused (`design.md` 8).
    pub struct SuspectClock {
        /// Nanoseconds by which the machine's clock is ahead; 0 = it agrees again.
        pub offset_ns: i64,
    }
}

record! {
    /// Confirms the machine's clock: the node's time continues from it, and new orders are accepted
    /// again. Journalled time never decreases: it stays constant while the machine's clock is
    /// earlier.
    pub struct ConfirmClock {
        /// Nanoseconds by which the machine's clock was ahead.
        pub offset_ns: i64,
        /// Latest time in any store of the node: accepted, even if the clock is earlier.
        pub through_ns: u64,
        /// Hash of (call, caller, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

record! {
    /// Cancels orders whose expiry is due at the command's time, those with the earliest dates
    /// first.
    pub struct ExpireOrders {
        /// `NONE` = every instrument of the node, as in journals of earlier versions.
        pub instrument: InstrumentIx,
        /// Maximum orders to cancel per book; 0 = all, as in journals of earlier versions.
        pub orders_max: u32,
    }
}

record! {
    /// A request that was rejected after login, journalled so that its numbered answer survives.
    pub struct Refused {
        pub user: UserIx,
        pub session: SessionIx,
        pub instrument: InstrumentIx,
        pub reason: RejectReason,
        /// Limit value of the reason, 0 for none (`admission::Reject::limit`).
        pub limit: u64,
        /// Kind of the request.
        pub request: RequestKind,
        pub client_seq: u64,
        pub client_order_id: u64,
        /// The order that a cancel or amend named.
        pub handle: Handle,
        pub key_hash: Id128,
    }
}

crate::code_enum! {
    /// Kind of a client's request.
    RequestKind {
        New = 0 "NEW",
        Cancel = 1 "CANCEL",
        Amend = 2 "AMEND",
        MassCancel = 3 "MASS_CANCEL",
        Other = 4 "OTHER",
        CancelAllAfter = 5 "CANCEL_ALL_AFTER",
    }
}

/// One journalled command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "type", rename_all = "SCREAMING_SNAKE_CASE")
)]
pub enum Command {
    BindUser(BindUser),
    SetInstrument(SetInstrument),
    SetPhase(SetPhase),
    OpenSession(OpenSession),
    CloseSession(CloseSession),
    Fund(Fund),
    Defund(Defund),
    CloseHold(CloseHold),
    BlockUser(BlockUser),
    UnblockUser(UnblockUser),
    SetBudget(SetBudget),
    New(New),
    Cancel(Cancel),
    Amend(Amend),
    MassCancel(MassCancel),
    ExpireOrders(ExpireOrders),
    Refused(Refused),
    SetKillSwitch(SetKillSwitch),
    Settled(Settled),
    Bust(Bust),
    SetOrderBounds(SetOrderBounds),
    CancelAllAfter(CancelAllAfter),
    SetMemberGroup(SetMemberGroup),
    SuspectClock(SuspectClock),
    ConfirmClock(ConfirmClock),
    CancelSlice(CancelSlice),
    ForgetSession(ForgetSession),
}

/// A group of members with common order bounds and a common message rate. Not a self-trade group. A
/// user is in at most one.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MemberGroup(pub u32);

impl MemberGroup {
    /// No group.
    pub const NONE: Self = Self(0);

    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

/// Scope of order bounds. A user's own bounds take precedence over the group's, and the group's
/// over the node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum BoundsOf {
    /// Every user without other bounds.
    Node,
    Group(MemberGroup),
    User(UserIx),
}

record! {
    /// Limits of one user (`design.md` 7). A change leaves open orders and sessions as they are.
    pub struct OrderBounds {
        /// Open orders on all instruments together.
        pub per_user: u32,
        /// Open orders on one instrument.
        pub per_instrument: u32,
        /// Total quantity of one order.
        pub lots_per_order: Lots,
        /// Total quantity of one order at its limit or protection price; of a sell, at the best bid
        /// if that is higher.
        pub value_per_order: Minor,
        /// Journal bytes per minute of the user's requests and their effects.
        pub journal_bytes_per_minute: u64,
        /// Maximum of new orders, amends and cancels of a day per trade of that day, beyond a free
        /// number.
        pub messages_per_trade: u32,
        /// Trading sessions, open or not.
        pub sessions: u32,
        /// Messages per second of each session, and of all the user's sessions; 0 = no limit.
        pub session_rate: u32,
        pub user_rate: u32,
        /// Messages per second of all sessions of a group's users; 0 = no limit. Unused in a user's
        /// own bounds.
        pub group_rate: u32,
    }
}

impl OrderBounds {
    /// No limits.
    pub const NONE: Self = Self {
        per_user: u32::MAX,
        per_instrument: u32::MAX,
        lots_per_order: Lots(u64::MAX),
        value_per_order: Minor(i64::MAX),
        journal_bytes_per_minute: u64::MAX,
        messages_per_trade: u32::MAX,
        sessions: u32::MAX,
        session_rate: 0,
        user_rate: 0,
        group_rate: 0,
    };

    /// True if these bounds allow what the others refuse.
    pub fn is_above(&self, other: &Self) -> bool {
        // A rate of 0 is no limit.
        let rate = |rate: u32| rate.wrapping_sub(1);
        self.per_user > other.per_user
            || self.per_instrument > other.per_instrument
            || self.lots_per_order > other.lots_per_order
            || self.value_per_order > other.value_per_order
            || self.journal_bytes_per_minute > other.journal_bytes_per_minute
            || self.messages_per_trade > other.messages_per_trade
            || self.sessions > other.sessions
            || rate(self.session_rate) > rate(other.session_rate)
            || rate(self.user_rate) > rate(other.user_rate)
            || rate(self.group_rate) > rate(other.group_rate)
    }

    /// Converts a quota from MiB to bytes; 0 = no limit.
    pub fn journal_mib(mib: u32) -> u64 {
        match mib {
            0 => Self::NONE.journal_bytes_per_minute,
            mib => u64::from(mib) << 20,
        }
    }
}

impl Default for OrderBounds {
    fn default() -> Self {
        Self::NONE
    }
}

record! {
    /// Sets the bounds of a scope; `None` removes those of a group or user.
    pub struct SetOrderBounds {
        pub of: BoundsOf,
        pub bounds: Option<OrderBounds>,
        /// Hash of (call, caller, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

record! {
    /// Puts a user into a member group, or removes the user from the group.
    pub struct SetMemberGroup {
        pub user: UserIx,
        pub group: MemberGroup,
        /// Hash of (call, caller, idempotency key) of a gRPC call; none otherwise.
        pub key_hash: Id128,
    }
}

impl Command {
    /// Position after which the next slice continues; `None` when nothing is left.
    pub fn next_slice_after(&self) -> Option<SweepPosition> {
        let through = match self {
            Self::MassCancel(c) => c.through,
            Self::SetKillSwitch(c) => c.through,
            Self::CancelSlice(c) => c.through,
            _ => return None,
        };
        (through != SweepPosition::END).then_some(through)
    }
}

/// Engines that a command goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Admission only.
    Admission,
    /// Admission and the engine of this instrument.
    Instrument(InstrumentIx),
    /// Admission and every engine.
    AllInstruments,
    /// Admission, and the engines of the orders that it lists for the command. Cancelling one
    /// member's orders then costs only those orders, however many others rest.
    Listed,
}

/// An order that a command of [`Route::Listed`] cancels, if it still rests in its book.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed {
    pub instrument: InstrumentIx,
    pub handle: Handle,
}

impl Listed {
    /// Splits a sorted list by instrument.
    pub fn by_instrument(listed: &[Self]) -> impl Iterator<Item = &[Self]> {
        listed.chunk_by(|one, other| one.instrument == other.instrument)
    }
}

impl Command {
    /// Route of the command.
    #[inline]
    pub fn route(&self) -> Route {
        let one_or_all = |ix: InstrumentIx| {
            if ix.is_none() {
                Route::AllInstruments
            } else {
                Route::Instrument(ix)
            }
        };
        match self {
            Self::SetInstrument(c) => Route::Instrument(c.spec.ix),
            Self::SetPhase(c) => Route::Instrument(c.instrument),
            Self::New(c) => Route::Instrument(c.instrument),
            Self::Cancel(c) => Route::Instrument(c.instrument),
            Self::Amend(c) => Route::Instrument(c.instrument),
            Self::MassCancel(c) if c.scope == MassScope::All => one_or_all(c.instrument),
            Self::MassCancel(_) | Self::CancelSlice(_) => Route::Listed,
            Self::ExpireOrders(c) => one_or_all(c.instrument),
            Self::SetKillSwitch(c) if c.is_engaged => match c.user.is_none() {
                true => Route::AllInstruments,
                false => Route::Listed,
            },
            Self::BindUser(_)
            | Self::OpenSession(_)
            | Self::CloseSession(_)
            | Self::ForgetSession(_)
            | Self::Fund(_)
            | Self::Defund(_)
            | Self::CloseHold(_)
            | Self::BlockUser(_)
            | Self::UnblockUser(_)
            | Self::SetBudget(_)
            | Self::SetKillSwitch(_)
            | Self::Refused(_)
            | Self::Settled(_)
            | Self::Bust(_)
            | Self::SuspectClock(_)
            | Self::ConfirmClock(_)
            | Self::SetOrderBounds(_)
            | Self::SetMemberGroup(_)
            | Self::CancelAllAfter(_) => Route::Admission,
        }
    }

    /// Session, client sequence, idempotency key hash and kind of the request. They are `NONE`, 0
    /// and `NONE` if the request has none; the kind is `Other` for a command that is not a client's
    /// request.
    #[inline]
    pub fn origin(&self) -> (SessionIx, u64, Id128, RequestKind) {
        use RequestKind as Kind;
        let (session, client_seq, key_hash, kind) = match self {
            Self::New(c) => (c.session, c.client_seq, c.key_hash, Kind::New),
            Self::Cancel(c) => (c.session, c.client_seq, c.key_hash, Kind::Cancel),
            Self::Amend(c) => (c.session, c.client_seq, c.key_hash, Kind::Amend),
            Self::MassCancel(c) => (c.session, c.client_seq, c.key_hash, Kind::MassCancel),
            Self::Refused(c) => (c.session, c.client_seq, c.key_hash, c.request),
            Self::CancelAllAfter(c) => (c.session, c.client_seq, Id128::NONE, Kind::CancelAllAfter),
            _ => (SessionIx::NONE, 0, self.key_of_call(), Kind::Other),
        };
        match session.is_none() {
            true => (SessionIx::NONE, 0, key_hash, kind),
            false => (session, client_seq, key_hash, kind),
        }
    }

    /// Requesting member; `NONE` for the platform or an operator.
    #[inline]
    pub fn member(&self) -> UserIx {
        match self {
            Self::New(c) => c.user,
            Self::Cancel(c) => c.user,
            Self::Amend(c) => c.user,
            Self::MassCancel(c) => c.user,
            Self::Refused(c) => c.user,
            Self::CancelAllAfter(c) => c.user,
            Self::CancelSlice(c) => c.user,
            _ => UserIx::NONE,
        }
    }

    /// The idempotency key hash of a call that no session can send.
    #[cold]
    fn key_of_call(&self) -> Id128 {
        match self {
            Self::SetPhase(c) => c.key_hash,
            Self::SetKillSwitch(c) => c.key_hash,
            Self::SetOrderBounds(c) => c.key_hash,
            Self::SetMemberGroup(c) => c.key_hash,
            Self::ConfirmClock(c) => c.key_hash,
            Self::Fund(c) => c.key_hash,
            Self::Defund(c) => c.key_hash,
            Self::CloseHold(c) => c.key_hash,
            Self::CancelSlice(c) => c.key_hash,
            _ => Id128::NONE,
        }
    }

    /// Short name for logs and dumps.
    pub fn name(&self) -> &'static str {
        match self {
            Self::BindUser(_) => "BIND_USER",
            Self::SetInstrument(_) => "SET_INSTRUMENT",
            Self::SetPhase(_) => "SET_PHASE",
            Self::OpenSession(_) => "OPEN_SESSION",
            Self::CloseSession(_) => "CLOSE_SESSION",
            Self::ForgetSession(_) => "FORGET_SESSION",
            Self::Fund(_) => "FUND",
            Self::Defund(_) => "DEFUND",
            Self::CloseHold(_) => "CLOSE_HOLD",
            Self::BlockUser(_) => "BLOCK_USER",
            Self::UnblockUser(_) => "UNBLOCK_USER",
            Self::SetBudget(_) => "SET_BUDGET",
            Self::SetOrderBounds(_) => "SET_ORDER_BOUNDS",
            Self::New(_) => "NEW",
            Self::Cancel(_) => "CANCEL",
            Self::Amend(_) => "AMEND",
            Self::MassCancel(_) => "MASS_CANCEL",
            Self::ExpireOrders(_) => "EXPIRE_ORDERS",
            Self::Refused(_) => "REFUSED",
            Self::SetKillSwitch(_) => "SET_KILL_SWITCH",
            Self::SuspectClock(_) => "SUSPECT_CLOCK",
            Self::ConfirmClock(_) => "CONFIRM_CLOCK",
            Self::Settled(_) => "SETTLED",
            Self::Bust(_) => "BUST",
            Self::CancelAllAfter(_) => "CANCEL_ALL_AFTER",
            Self::SetMemberGroup(_) => "SET_MEMBER_GROUP",
            Self::CancelSlice(_) => "CANCEL_SLICE",
        }
    }
}

/// A sequenced command. In the journal, sequence and time are in the frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[repr(C)]
pub struct Envelope {
    pub sequence: Sequence,
    /// Journalled time, nanoseconds since 1970, monotonic on its node.
    pub time_ns: u64,
    pub command: Command,
    /// Time at which the gateway read the request, in nanoseconds since 1970 by the clock of
    /// `time_ns`; `time_ns` for other commands. At most 4.29 s before `time_ns`.
    pub received_ns: u64,
}

/// Cause of events: sequence and times of the command, and the client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    pub sequence: Sequence,
    pub time_ns: u64,
    pub received_ns: u64,
    /// Requesting session, `NONE` without one.
    pub session: SessionIx,
    pub client_seq: u64,
    pub key_hash: Id128,
    /// [`Amend::new_client_order_id`], 0 for none.
    pub new_client_order_id: u64,
    /// [`Amend::price`], zero for none.
    pub amended_price: Ticks,
    pub request: RequestKind,
}

impl Cause {
    #[inline]
    pub fn of(envelope: &Envelope) -> Self {
        let command = &envelope.command;
        let (session, client_seq, key_hash, request) = command.origin();
        let (new_client_order_id, amended_price) = match command {
            Command::Amend(c) => (c.new_client_order_id, c.price.unwrap_or(Ticks::ZERO)),
            _ => (0, Ticks::ZERO),
        };
        Self {
            sequence: envelope.sequence,
            time_ns: envelope.time_ns,
            received_ns: envelope.received_ns,
            session,
            client_seq,
            key_hash,
            new_client_order_id,
            amended_price,
            request,
        }
    }
}

const _: () = assert!(size_of::<New>() == 120);
const _: () = assert!(size_of::<Command>() == 120);
const _: () = assert!(size_of::<Envelope>() == 144);
const _: () = assert!(align_of::<Envelope>() == 8);
const _: () = assert!(size_of::<ArchivedCommand>() <= 128);
const _: () = assert!(align_of::<ArchivedCommand>() == 8);
