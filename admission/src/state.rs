//! State that admission folds from the journal: plain tables, addressed by dense indices.
//!
//! A snapshot stores all of it.

use alloc::vec::Vec;

use types::command::{
    BlockCause, BoundsOf, MassScope, MemberGroup, OrderBounds, RequestKind, SweepPlace,
};
use types::{
    AssetIx, CancelReason, Done, FeeRate, Handle, HoldIx, Id128, InstrumentIx, InstrumentSpec,
    Lots, Minor, PoolKind, Reserve, Sequence, SessionIx, Side, StpGroup, Ticks, UserId, UserIx,
};

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
        /// Why new orders are refused, if they are.
        pub blocks: Blocks,
        /// The user's kill switch is engaged (F11).
        pub is_killed: bool,
        /// Moscow day of the budget, 0 = never set.
        pub budget_day: u32,
        /// Remaining budget of that day.
        pub budget_minor: Minor,
        pub open_orders: u32,
        /// Sessions ever opened.
        pub sessions: u32,
        pub group: MemberGroup,
        /// One more than the row of the user's own bounds, 0 for none.
        pub(crate) own_bounds: u32,
    }
}

table_row! {
    /// Bounds of a member group or a user; `None` after they were removed.
    pub struct BoundsRow {
        pub of: BoundsOf,
        pub bounds: Option<OrderBounds>,
    }
}

table_row! {
    pub struct Session {
        pub key: Id128,
        pub user: UserIx,
        pub stp_group: StpGroup,
        pub cancel_on_disconnect: bool,
        pub open: bool,
        /// Last client sequence seen.
        pub client_seq: u64,
        /// The command that last opened it: requests of an earlier login are refused.
        pub epoch: Sequence,
        /// Number of its last message.
        pub last_number: u64,
        pub open_orders: u32,
        /// When its orders end unless it renews the timer, in journalled nanoseconds; 0 = never.
        pub cancel_all_at_ns: u64,
        /// Its trades that settlement has not passed yet.
        pub(crate) unsettled: Unsettled,
    }
}

table_row! {
    /// Trades of a session that no settlement message has covered, by the sequences of their
    /// commands. Exact at both ends; in between there may be some.
    #[derive(Default)]
    pub struct Unsettled {
        /// No earlier trade lacks a *posted* message; zero = none lacks one.
        first_unposted: Sequence,
        /// No earlier trade lacks a *final* message; zero = none lacks one.
        first_unfinal: Sequence,
        /// The last trade.
        last: Sequence,
    }
}

impl Unsettled {
    /// Commutative: events of several instruments interleave.
    #[inline]
    pub(crate) fn note_trade(&mut self, sequence: Sequence) {
        for first in [&mut self.first_unposted, &mut self.first_unfinal] {
            if *first == Sequence::ZERO || sequence < *first {
                *first = sequence;
            }
        }
        self.last = self.last.max(sequence);
    }

    /// Settlement has reached these positions. True when one of them passes a trade for the first
    /// time.
    pub(crate) fn pass(&mut self, posted: Sequence, finalized: Sequence) -> bool {
        let last = self.last;
        let is_posted = pass(&mut self.first_unposted, last, posted);
        pass(&mut self.first_unfinal, last, finalized) | is_posted
    }

    /// True while a trade is not final.
    pub(crate) fn any(&self) -> bool {
        self.first_unfinal != Sequence::ZERO
    }

    pub(crate) fn words(&self) -> [u64; 3] {
        [self.first_unposted.0, self.first_unfinal.0, self.last.0]
    }
}

fn pass(first: &mut Sequence, last: Sequence, position: Sequence) -> bool {
    let is_passed = *first != Sequence::ZERO && *first <= position;
    if is_passed {
        *first = match last > position {
            true => position.next(),
            false => Sequence::ZERO,
        };
    }
    is_passed
}

table_row! {
    /// Money of a ledger hold: undrawn in `free`, the rest in the reserves of its open orders.
    pub struct HoldBalance {
        pub hold_id: Id128,
        pub kind: PoolKind,
        pub user: UserIx,
        pub asset: AssetIx,
        pub free: Minor,
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
        /// Its command and the command's time: the public order id derives from both.
        pub sequence: Sequence,
        pub time_ns: u64,
        pub instrument: InstrumentIx,
        pub user: UserIx,
        pub session: SessionIx,
        pub stp_group: StpGroup,
        pub pool: HoldIx,
        pub fee_rate: FeeRate,
        pub side: Side,
        /// A market order never rests and cannot be amended.
        pub is_market: bool,
        pub client_order_id: u64,
        pub price: Ticks,
        pub open: Lots,
        /// Total quantity, including the filled part.
        pub quantity: Lots,
        pub done: Done,
        /// Its part of the pool.
        pub reserved: Reserve,
        /// Amends in flight to the book. While there are any, `reserved` covers the worst of their
        /// outcomes.
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
    pub struct Seen {
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
        /// Last event applied.
        pub event_number: u64,
        pub open_orders: u32,
    }
}

table_row! {
    /// Settlement's positions, as journalled. `finalized <= posted <= sequence`.
    #[derive(Default)]
    pub struct Settlement {
        /// The ledger has every posting of the records up to here.
        pub posted: Sequence,
        /// Every trade of the records up to here is final or bust.
        pub finalized: Sequence,
        /// Trades that are final, bust ones included.
        pub trades_final: u64,
        /// The last run of settlement's own records, which need no settlement.
        pub(crate) own_first: Sequence,
        pub(crate) own_last: Sequence,
    }
}

impl Settlement {
    /// Notes a record of settlement's own. It moves no money, so a position that reaches the run of
    /// such records also covers this one: at rest, `posted` is the last record.
    pub(crate) fn note_own(&mut self, sequence: Sequence) {
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
        /// Its first command: later orders stay.
        pub of: Sequence,
        pub scope: MassScope,
        pub instrument: InstrumentIx,
        pub side: Option<Side>,
        pub reason: CancelReason,
        /// The requesting user, `NONE` for the platform and for operators.
        pub user: UserIx,
        pub session: SessionIx,
        pub key_hash: Id128,
        /// Place that the slices have reached; [`SweepPlace::END`] = the last one is in flight.
        pub after: SweepPlace,
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
    pub is_killed: bool,
    pub settlement: Settlement,
    pub clock: crate::clock::ClockState,
    /// Bounds of users without bounds of their own or of a group.
    pub order_bounds: OrderBounds,
    /// In the order of first setting.
    pub bounds: Vec<BoundsRow>,
    /// Bust trades, in journal order: 16 bytes each for the life of the journal. Each one takes
    /// two refusals of the same trade by the chain.
    pub busts: Vec<Id128>,
    pub instruments: Vec<Instrument>,
    pub users: Vec<User>,
    pub sessions: Vec<Session>,
    pub pools: Vec<HoldBalance>,
    pub slots: Vec<Slot>,
    /// In the order of their first commands.
    pub sweeps: Vec<Sweep>,
    /// Keys of the last 24 hours, in journal order.
    pub keys: Vec<(Id128, Seen)>,
}
