//! What a record says, fact by fact, and the rows of the fold that facts carry.

use types::command::RequestKind;
use types::{
    AssetIx, CancelReason, Command, Done, Envelope, FeeRate, Handle, HoldIx, Id128, InstrumentIx,
    InstrumentSpec, Lots, Minor, OrderStatus, OrderType, PoolKind, RejectReason, Sequence,
    SessionIx, Side, StpGroup, StpMode, Ticks, TimeInForce, UserId, UserIx,
};

/// An order as it stands after the fact that carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct Order {
    /// Public id.
    pub id: Id128,
    pub handle: Handle,
    pub instrument: InstrumentIx,
    pub user: UserIx,
    pub session: SessionIx,
    pub pool: HoldIx,
    pub client_order_id: u64,
    pub side: Side,
    pub order_type: OrderType,
    pub time_in_force: TimeInForce,
    pub post_only: bool,
    pub stp: StpMode,
    pub expire_at_ns: u64,
    pub price: Ticks,
    /// Total, what was filled included.
    pub quantity: Lots,
    pub open: Lots,
    pub filled: Lots,
    pub done: Done,
    pub fee_rate: FeeRate,
    pub status: OrderStatus,
    /// The command that brought it.
    pub sequence: Sequence,
    pub created_ns: u64,
    pub key_hash: Id128,
}

/// One match with both orders as it leaves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trade {
    pub id: Id128,
    pub instrument: InstrumentIx,
    pub number: u64,
    pub price: Ticks,
    pub quantity: Lots,
    pub value_minor: Minor,
    /// Charged to the buyer.
    pub fee_minor: Minor,
    pub maker: Order,
    pub taker: Order,
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

/// Money behind orders, as journalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct Pool {
    pub hold: HoldIx,
    pub hold_id: Id128,
    pub kind: PoolKind,
    pub user: UserIx,
    pub asset: AssetIx,
    /// Sum of all `Fund`s: what the ledger hold was ever given.
    pub funded: Minor,
    pub funding_seq: u64,
    pub open_orders: u32,
    pub closed: bool,
    /// Time of the last funding or closing.
    pub changed_ns: u64,
    /// Sum of all `Defund`s: what the ledger has to give back of an open pool.
    pub defunded: Minor,
    /// The last `Defund` or `CloseHold`: the ledger gives back once settlement has passed it.
    pub taken_at: Sequence,
    /// Orders that ever drew on it.
    pub orders: u64,
    /// Time of the last funding, or of the last order that came or ended.
    pub used_ns: u64,
}

/// A session as journalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
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
}

/// One thing that is now so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    User(UserIx, UserId),
    /// New or changed.
    Instrument(InstrumentSpec),
    Session(Session),
    Pool(Pool),
    /// Its last open order has ended.
    PoolIdle(Pool),
    /// The book has taken the order on.
    Entered(Order),
    /// The book has refused the order: it is closed.
    Refused(Order, RejectReason),
    Rested(Order),
    Traded(Trade),
    Amended {
        order: Order,
        kept_priority: bool,
    },
    Reduced {
        order: Order,
        quantity: Lots,
        reason: CancelReason,
    },
    Cancelled {
        order: Order,
        quantity: Lots,
        reason: CancelReason,
    },
    /// A cancel or amend found its order gone.
    RequestRefused {
        request: RequestKind,
        handle: Handle,
        client_order_id: u64,
        reason: RejectReason,
    },
    MassCancelled {
        instrument: InstrumentIx,
        count: u32,
    },
}

/// The command behind the facts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    pub sequence: Sequence,
    pub time_ns: u64,
    /// Who asked, `NONE` without session.
    pub session: SessionIx,
    pub client_seq: u64,
    pub key_hash: Id128,
    pub request: RequestKind,
}

/// What caused a record's facts.
pub(super) fn cause(envelope: &Envelope) -> Cause {
    let (session, client_seq) = envelope.command.client().unwrap_or((SessionIx::NONE, 0));
    Cause {
        sequence: envelope.sequence,
        time_ns: envelope.time_ns,
        session,
        client_seq,
        key_hash: envelope.command.key_hash().unwrap_or(Id128::NONE),
        request: match &envelope.command {
            Command::New(_) => RequestKind::New,
            Command::Cancel(_) => RequestKind::Cancel,
            Command::Amend(_) => RequestKind::Amend,
            Command::MassCancel(_) => RequestKind::MassCancel,
            Command::Refused(c) => c.request,
            _ => RequestKind::Other,
        },
    }
}
