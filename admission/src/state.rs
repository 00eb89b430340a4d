//! State that admission folds from the journal: plain tables with dense indices. A snapshot stores
//! all of it.

use alloc::vec::Vec;

use types::command::{
    BlockCause, BoundsOf, MassScope, MemberGroup, OrderBounds, RequestKind, SweepPosition,
};
use types::{
    AssetIx, CancelReason, FeeRate, FillTotals, Handle, HoldIx, HoldKind, Id128, InstrumentIx,
    InstrumentSpec, Lots, Minor, Reserve, Sequence, SessionIx, Side, StpGroup, Ticks, UserId,
    UserIx,
};

use crate::budget::{Budget, OrderBudget};

macro_rules! table_row {
    ($(#[$meta:meta])* pub struct $name:ident { $($body:tt)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
        pub struct $name { $($body)* }
    };
}

pub(crate) use table_row;

table_row! {
    /// Active causes of a block, one bit each.
    #[derive(Default)]
    pub struct Blocks {
        bits: u8,
    }
}

impl Blocks {
    /// True while any cause is active.
    pub fn any(self) -> bool {
        self.bits != 0
    }

    pub fn has(self, cause: BlockCause) -> bool {
        self.bits & Self::bit(cause) != 0
    }

    pub(crate) fn set(&mut self, cause: BlockCause) {
        self.bits |= Self::bit(cause);
    }

    pub(crate) fn lift(&mut self, cause: BlockCause) {
        self.bits &= !Self::bit(cause);
    }

    pub(crate) fn bits(self) -> u8 {
        self.bits
    }

    const fn bit(cause: BlockCause) -> u8 {
        1 << cause.code()
    }
}

table_row! {
    pub struct User {
        pub id: UserId,
        /// Active block causes; any of them rejects new orders.
        pub blocks: Blocks,
        /// The user's kill switch is engaged (F11).
        pub is_kill_switch_on: bool,
        pub budget: Budget,
        pub open_orders: u32,
        /// Sessions that are not forgotten.
        pub sessions: u32,
        pub group: MemberGroup,
        /// Row of the user's own bounds plus one, 0 = none.
        pub(crate) own_bounds: u32,
    }
}

table_row! {
    /// Bounds of a member group or a user; `None` once removed.
    pub struct BoundsRow {
        pub of: BoundsOf,
        pub bounds: Option<OrderBounds>,
    }
}

table_row! {
    pub struct Session {
        /// None once the session is forgotten.
        pub key: Id128,
        pub user: UserIx,
        pub stp_group: StpGroup,
        pub cancel_on_disconnect: bool,
        pub open: bool,
        /// Last client sequence seen.
        pub client_seq: u64,
        /// Sequence of the command that last opened it. Requests of an earlier login are rejected.
        pub epoch: Sequence,
        /// Number of its last message.
        pub last_number: u64,
        pub open_orders: u32,
        /// Journal time at which the dead man's switch cancels its orders, in nanoseconds; 0 = off.
        pub cancel_all_at_ns: u64,
        /// Its trades that no settlement message covers yet.
        pub(crate) unsettled: Unsettled,
    }
}

table_row! {
    /// Range of command sequences that contains every trade of a session that no settlement message
    /// covers yet. Both ends are exact.
    #[derive(Default)]
    pub struct Unsettled {
        /// First trade without a *posted* message; zero = none.
        first_not_posted: Sequence,
        /// First trade without a *final* message; zero = none.
        first_not_final: Sequence,
        /// The last trade.
        last: Sequence,
    }
}

impl Unsettled {
    /// Adds a trade. Commutative, since events of several instruments interleave.
    #[inline]
    pub(crate) fn note_trade(&mut self, sequence: Sequence) {
        for first in [&mut self.first_not_posted, &mut self.first_not_final] {
            if *first == Sequence::ZERO || sequence < *first {
                *first = sequence;
            }
        }
        self.last = self.last.max(sequence);
    }

    /// Moves the range past these settlement positions. True when one of them passes a trade for
    /// the first time.
    pub(crate) fn advance_to(&mut self, posted: Sequence, finalized: Sequence) -> bool {
        let last = self.last;
        let is_posted = advance_first(&mut self.first_not_posted, last, posted);
        advance_first(&mut self.first_not_final, last, finalized) | is_posted
    }

    /// True while a trade is not final.
    pub(crate) fn any(&self) -> bool {
        self.first_not_final != Sequence::ZERO
    }

    pub(crate) fn hash_words(&self) -> [u64; 3] {
        [self.first_not_posted.0, self.first_not_final.0, self.last.0]
    }
}

fn advance_first(first: &mut Sequence, last: Sequence, position: Sequence) -> bool {
    let is_covered = *first != Sequence::ZERO && *first <= position;
    if is_covered {
        *first = match last > position {
            true => position.next(),
            false => Sequence::ZERO,
        };
    }
    is_covered
}

table_row! {
    /// Money of a ledger hold: `undrawn`, and the rest in the reserves of its open orders.
    pub struct HoldBalance {
        pub hold_id: Id128,
        pub kind: HoldKind,
        pub user: UserIx,
        pub asset: AssetIx,
        pub undrawn: Minor,
        /// Sum of the reserves of its open orders.
        pub reserved: Minor,
        pub open_orders: u32,
        /// Number of the last Fund, Defund or CloseHold.
        pub funding_seq: u64,
        pub closed: bool,
    }
}

table_row! {
    /// An order between its command and its closing event.
    pub struct OpenOrder {
        pub handle: Handle,
        /// Sequence of its command. The public order id derives from it and from `time_ns`.
        pub sequence: Sequence,
        pub time_ns: u64,
        pub instrument: InstrumentIx,
        pub user: UserIx,
        pub session: SessionIx,
        pub stp_group: StpGroup,
        pub hold: HoldIx,
        pub fee_rate: FeeRate,
        pub side: Side,
        /// A market order never rests and cannot be amended.
        pub is_market: bool,
        pub client_order_id: u64,
        pub price: Ticks,
        pub open: Lots,
        /// Total quantity, including the filled part.
        pub quantity: Lots,
        pub fill_totals: FillTotals,
        /// Reserved part of the trading hold.
        pub reserved: Reserve,
        pub budget: OrderBudget,
        /// Amends in flight to the book. Until they are answered, `reserved` covers the worst
        /// outcome.
        pub amends_pending: u32,
        pub price_worst: Ticks,
        pub quantity_worst: Lots,
    }
}

impl OpenOrder {
    /// Filled lots.
    pub fn filled(&self) -> Lots {
        self.quantity - self.open
    }
}

table_row! {
    /// A journalled call with an idempotency key.
    pub struct KeyedCall {
        pub request: RequestKind,
        pub sequence: Sequence,
        pub time_ns: u64,
        /// The order it created or named.
        pub handle: Handle,
    }
}

table_row! {
    pub struct Instrument {
        pub spec: InstrumentSpec,
        /// Number of the last event applied.
        pub event_number: u64,
        pub open_orders: u32,
    }
}

table_row! {
    /// Settlement's positions, as journalled. `finalized <= posted <= sequence`.
    #[derive(Default)]
    pub struct Settlement {
        /// The ledger contains every posting of the records up to this one.
        pub posted: Sequence,
        /// Every trade of the records up to this one is final or bust.
        pub finalized: Sequence,
        /// Number of trades that are final or bust.
        pub trades_final: u64,
        /// Last contiguous run of settlement's own records, which need no settlement.
        pub(crate) own_first: Sequence,
        pub(crate) own_last: Sequence,
    }
}

impl Settlement {
    /// Records a command of settlement's own progress. It moves no money, so a position that
    /// reaches the run of such commands also covers this one. In an idle market `posted` is
    /// therefore the last record.
    pub(crate) fn record_settlement_command(&mut self, sequence: Sequence) {
        if self.own_last.next() != sequence {
            self.own_first = sequence;
        }
        self.own_last = sequence;
        for position in [&mut self.posted, &mut self.finalized] {
            if position.next() >= self.own_first {
                *position = sequence;
            }
        }
    }
}

table_row! {
    /// A mass cancel or a kill switch that continues in slices.
    pub struct Sweep {
        /// Sequence of its first command; orders entered later are not cancelled.
        pub first_command: Sequence,
        pub scope: MassScope,
        pub instrument: InstrumentIx,
        pub side: Option<Side>,
        pub reason: CancelReason,
        /// The requesting user, `NONE` for the platform and for operators.
        pub user: UserIx,
        pub session: SessionIx,
        pub key_hash: Id128,
        /// Position of the slices; [`SweepPosition::END`] = the last one is in flight.
        pub position: SweepPosition,
        /// Orders ended so far.
        pub count: u32,
    }
}

table_row! {
    /// A slot of the order table.
    pub struct Slot {
        /// Generation of its last order; 0 = never used.
        pub generation: u32,
        pub order: Option<OpenOrder>,
    }
}

/// All state folded from the journal up to one sequence. Archived with rkyv as it is; indexes are
/// rebuilt from it.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize,
)]
pub struct AdmissionImage {
    /// Last command applied.
    pub sequence: Sequence,
    pub time_ns: u64,
    /// The kill switch of all users is engaged (F11).
    pub is_kill_switch_on: bool,
    pub settlement: Settlement,
    pub clock: crate::clock::ClockState,
    /// Bounds of users without bounds of their own or of a group.
    pub order_bounds: OrderBounds,
    /// In the order of first setting.
    pub bounds: Vec<BoundsRow>,
    /// Bust trades in journal order, kept for the life of the journal at 16 bytes each. A trade is
    /// bust after the chain has refused it twice.
    pub busts: Vec<Id128>,
    pub instruments: Vec<Instrument>,
    pub users: Vec<User>,
    pub sessions: Vec<Session>,
    pub holds: Vec<HoldBalance>,
    pub slots: Vec<Slot>,
    /// In the order of their first commands.
    pub sweeps: Vec<Sweep>,
    /// Keys of the last 24 hours, in journal order.
    pub keys: Vec<(Id128, KeyedCall)>,
}
