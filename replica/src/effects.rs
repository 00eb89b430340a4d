//! Effects of a journal record: of the command, then of each of its events, in order.
//!
//! An effect contains its orders and holds as they are after it. Followers read effects and apply
//! no record.

use std::ops::Deref;
use std::sync::Arc;

use admission::Report;
use types::command::{Bust, Cause, New};
use types::{
    AssetIx, CancelReason, FeeRate, FillTotals, Handle, HoldIx, HoldKind, Id128, InstrumentIx,
    InstrumentSpec, Lots, Minor, OrderStatus, OrderType, RejectReason, Reserve, Sequence,
    SessionIx, Side, StpGroup, StpMode, Ticks, TimeInForce, UserId, UserIx,
};

/// Terms of an order that no amend changes, as journalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct OrderTerms {
    pub order_type: OrderType,
    pub time_in_force: TimeInForce,
    pub post_only: bool,
    pub stp: StpMode,
    pub expire_at_ns: u64,
    pub key_hash: Id128,
}

impl From<&New> for OrderTerms {
    fn from(c: &New) -> Self {
        Self {
            order_type: c.order_type,
            time_in_force: c.time_in_force,
            post_only: c.post_only,
            stp: c.stp,
            expire_at_ns: c.expire_at_ns,
            key_hash: c.key_hash,
        }
    }
}

/// An order as it is after the effect that carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Public id.
    pub id: Id128,
    pub handle: Handle,
    pub instrument: InstrumentIx,
    pub user: UserIx,
    pub session: SessionIx,
    pub hold: HoldIx,
    pub client_order_id: u64,
    pub side: Side,
    pub terms: OrderTerms,
    pub price: Ticks,
    /// Total, filled quantity included.
    pub quantity: Lots,
    pub open: Lots,
    pub filled: Lots,
    pub fill_totals: FillTotals,
    pub fee_rate: FeeRate,
    pub status: OrderStatus,
    /// Sequence of the command that entered it.
    pub sequence: Sequence,
    /// Time of that command.
    pub created_ns: u64,
    /// Amount that it keeps of its hold.
    pub reserved: Reserve,
}

/// Money movements of an effect, for one order and its hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Paid out of the order's reserve by a trade.
    pub spent: Reserve,
    /// Returned to the hold; negative where an amend drew more than it returned.
    pub returned: Reserve,
    /// Amount that the ledger must still hold in the hold and its children: undrawn money plus the
    /// reserves of all open orders.
    pub held: Minor,
    /// Open orders that draw on the hold.
    pub hold_orders: u32,
}

/// One match, with both orders as they are after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trade {
    pub id: Id128,
    pub instrument: InstrumentIx,
    pub number: u64,
    pub price: Ticks,
    pub quantity: Lots,
    pub value_minor: Minor,
    /// Traded units, in minor units of the instrument.
    pub units_minor: Minor,
    /// Charged to the buyer.
    pub fee_minor: Minor,
    pub maker: Order,
    pub taker: Order,
    pub maker_moved: Moved,
    pub taker_moved: Moved,
}

impl Trade {
    pub fn buy(&self) -> &Order {
        match self.taker.side {
            Side::Buy => &self.taker,
            Side::Sell => &self.maker,
        }
    }

    pub fn sell(&self) -> &Order {
        match self.taker.side {
            Side::Buy => &self.maker,
            Side::Sell => &self.taker,
        }
    }
}

/// A ledger hold that orders draw on, as journalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    pub hold: HoldIx,
    pub hold_id: Id128,
    pub kind: HoldKind,
    pub user: UserIx,
    pub asset: AssetIx,
    /// Undrawn money plus the reserves of its open orders.
    pub held: Minor,
    /// Sum of all `Fund`s: all money ever added to the ledger hold.
    pub funded: Minor,
    /// Sum of all `Defund`s: what the ledger must release while the hold is open.
    pub defunded: Minor,
    pub funding_seq: u64,
    pub open_orders: u32,
    /// Number of orders that ever drew on it.
    pub orders: u64,
    pub closed: bool,
    /// Sequence of the last `Defund` or `CloseHold`. The ledger releases the amount once settlement
    /// has passed it.
    pub taken_at: Sequence,
    /// Time of the last funding or closing.
    pub changed_ns: u64,
    /// Time of the last funding, or of the last order that entered or closed.
    pub used_ns: u64,
}

/// A trading session as journalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    pub session: SessionIx,
    pub user: UserIx,
    pub key: Id128,
    pub open: bool,
    pub cancel_on_disconnect: bool,
    /// Self-trade group of its orders.
    pub stp_group: StpGroup,
    pub client_seq: u64,
    /// Time of the last opening or closing.
    pub changed_ns: u64,
    /// Number of its last message.
    pub last_number: u64,
}

/// One change that a record made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    User(UserIx, UserId),
    /// New or changed.
    Instrument(InstrumentSpec),
    Session(Session),
    /// Funded, defunded or closed.
    Hold(Hold),
    /// The order has drawn its money. The book's events follow.
    Entered(Order),
    /// The book has accepted the order. One that rests at once gets no [`Effect::Rested`].
    Accepted(Order),
    /// The book has rejected the order: it is closed.
    Refused(Order, Moved, RejectReason),
    /// The remainder of an order rests after its trades.
    Rested(Order),
    /// Boxed: three times as large as any other variant.
    Traded(Box<Trade>),
    Amended {
        order: Order,
        moved: Moved,
        kept_priority: bool,
    },
    Reduced {
        order: Order,
        moved: Moved,
        quantity: Lots,
        reason: CancelReason,
    },
    Cancelled {
        order: Order,
        moved: Moved,
        quantity: Lots,
        reason: CancelReason,
    },
    /// The book has rejected a cancel or an amend.
    ChangeRefused(RejectReason),
    /// Settlement's positions have advanced.
    Settled {
        posted: Sequence,
        finalized: Sequence,
    },
    /// The trade is bust.
    Bust(Bust),
}

/// Settlement state of a trade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TradeStatus {
    /// Not final.
    Pending,
    /// Final on chain and in the ledger.
    Settled,
    /// Bust: its operations are reversed.
    Failed,
}

/// A record and all its effects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    pub cause: Cause,
    pub effects: Vec<Effect>,
    /// The sessions' numbered messages.
    pub reports: Vec<Report>,
}

impl Applied {
    pub fn sequence(&self) -> Sequence {
        self.cause.sequence
    }

    /// True for a record of settlement's own progress.
    pub fn is_settlement_progress(&self) -> bool {
        let own = |effect: &Effect| matches!(effect, Effect::Settled { .. } | Effect::Bust(_));
        self.effects.iter().any(own)
    }
}

/// Consecutive records, shared by all followers. Never empty.
#[derive(Clone, Debug)]
pub struct Batch {
    applied: Arc<Vec<Applied>>,
    /// Number of leading records that the follower already has.
    skip: usize,
}

impl Batch {
    /// # Panics
    /// `applied` is empty.
    pub fn new(applied: Vec<Applied>) -> Self {
        assert!(!applied.is_empty(), "a batch must not be empty");
        Self {
            applied: Arc::new(applied),
            skip: 0,
        }
    }

    /// The records after `position`; `None` if there are none.
    pub(crate) fn after(mut self, position: Sequence) -> Option<Self> {
        let had = self.applied.partition_point(|a| a.sequence() <= position);
        self.skip = self.skip.max(had);
        (self.skip < self.applied.len()).then_some(self)
    }

    pub fn first(&self) -> Sequence {
        self[0].sequence()
    }

    pub fn last(&self) -> Sequence {
        self[self.len() - 1].sequence()
    }
}

impl Deref for Batch {
    type Target = [Applied];

    fn deref(&self) -> &[Applied] {
        &self.applied[self.skip..]
    }
}
