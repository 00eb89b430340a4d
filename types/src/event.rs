//! Events of a book, order by order: depth and best prices are derivable from them alone.
//!
//! Every order event contains the open quantity after it. Events of one instrument are numbered
//! gaplessly from 1 and name the command that caused them. Rules for building a book from events:
//! - `Accepted` with `rests`, and `Rested`, add the order at the tail of its price.
//! - `Trade` reduces the maker.
//! - `Amended` with `kept_priority` changes the order in place. Without it, it removes the order,
//!   which may trade and then be `Rested` again.
//! - `Reduced` shrinks the order in place.
//! - `Cancelled` removes the order.
//! - An order with open 0 is closed.

use core::mem::size_of;

use crate::command::record;
use crate::ids::{Handle, Id128, InstrumentIx, NodeId, Sequence};
use crate::number::{Lots, Ticks};
use crate::order::{Phase, PhaseCause, Side};
use crate::reason::{CancelReason, RejectReason};

record! {
    /// The book has accepted the order. It rests in full, or trades, `Rested` or `Cancelled`
    /// follow.
    pub struct Accepted {
        pub handle: Handle,
        pub side: Side,
        /// The order rests in full at the tail of its price: no `Rested` follows.
        pub rests: bool,
        /// Limit or protection price.
        pub price: Ticks,
        pub open: Lots,
    }
}

record! {
    /// The book has rejected the order: it is closed, without a trade.
    pub struct Rejected {
        pub handle: Handle,
        pub reason: RejectReason,
    }
}

record! {
    /// The remainder after trades or an amend rests at the tail of its price.
    pub struct Rested {
        pub handle: Handle,
        pub side: Side,
        pub price: Ticks,
        pub open: Lots,
    }
}

record! {
    /// One match, at the resting order's price (R167).
    #[repr(C)]
    pub struct Trade {
        pub taker_side: Side,
        pub maker: Handle,
        pub taker: Handle,
        pub price: Ticks,
        pub quantity: Lots,
        pub maker_open: Lots,
        pub taker_open: Lots,
        /// Gapless per instrument, from 1.
        pub trade_number: u64,
    }
}

record! {
    /// Price or total quantity changed.
    pub struct Amended {
        pub handle: Handle,
        pub side: Side,
        /// Same price and no higher quantity: queue priority is kept (T22).
        pub kept_priority: bool,
        pub price: Ticks,
        /// New total quantity.
        pub quantity: Lots,
        pub open: Lots,
    }
}

record! {
    /// The amend was rejected; the order is unchanged (open 0 when it was already closed).
    pub struct AmendRejected {
        pub handle: Handle,
        pub reason: RejectReason,
        pub open: Lots,
    }
}

record! {
    /// The cancel was rejected: the order was already closed.
    pub struct CancelRejected {
        pub handle: Handle,
        pub reason: RejectReason,
    }
}

record! {
    /// Open quantity was removed without a trade (self-trade mode DECREMENT); the order stays open.
    /// The total quantity shrinks by the same amount.
    pub struct Reduced {
        pub handle: Handle,
        pub reason: CancelReason,
        pub quantity: Lots,
        pub open: Lots,
    }
}

record! {
    /// The order was closed with this quantity unfilled; open is 0 after it.
    pub struct Cancelled {
        pub handle: Handle,
        pub reason: CancelReason,
        pub quantity: Lots,
    }
}

record! {
    /// The phase from this event on.
    pub struct PhaseChanged {
        pub phase: Phase,
        pub cause: PhaseCause,
    }
}

/// One change on one instrument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(
    feature = "serde",
    serde(tag = "type", rename_all = "SCREAMING_SNAKE_CASE")
)]
pub enum Event {
    Accepted(Accepted),
    Rejected(Rejected),
    Rested(Rested),
    Trade(Trade),
    Amended(Amended),
    AmendRejected(AmendRejected),
    CancelRejected(CancelRejected),
    Reduced(Reduced),
    Cancelled(Cancelled),
    PhaseChanged(PhaseChanged),
}

impl Event {
    /// Orders that this event closes: at most the maker and the taker of a trade.
    pub fn closed(&self) -> [Option<Handle>; 2] {
        match self {
            Self::Rejected(e) => [Some(e.handle), None],
            Self::Cancelled(e) => [Some(e.handle), None],
            Self::Trade(e) => [
                e.maker_open.is_zero().then_some(e.maker),
                e.taker_open.is_zero().then_some(e.taker),
            ],
            Self::Accepted(_)
            | Self::Rested(_)
            | Self::Amended(_)
            | Self::AmendRejected(_)
            | Self::CancelRejected(_)
            | Self::Reduced(_)
            | Self::PhaseChanged(_) => [None, None],
        }
    }

    /// Short name for logs and dumps.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Accepted(_) => "ACCEPTED",
            Self::Rejected(_) => "REJECTED",
            Self::Rested(_) => "RESTED",
            Self::Trade(_) => "TRADE",
            Self::Amended(_) => "AMENDED",
            Self::AmendRejected(_) => "AMEND_REJECTED",
            Self::CancelRejected(_) => "CANCEL_REJECTED",
            Self::Reduced(_) => "REDUCED",
            Self::Cancelled(_) => "CANCELLED",
            Self::PhaseChanged(_) => "PHASE_CHANGED",
        }
    }
}

/// An event with its position: the command that caused it, and its number on the instrument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[repr(C)]
pub struct EventEnvelope {
    /// Sequence of the command that caused the event.
    pub sequence: Sequence,
    /// The command's time.
    pub time_ns: u64,
    /// Gapless per instrument, from 1.
    pub number: u64,
    pub instrument: InstrumentIx,
    /// Index among the events of its command on this instrument, from 0.
    pub index: u32,
    pub event: Event,
}

impl EventEnvelope {
    /// Public id of the trade that this event reports.
    pub fn trade_uuid(&self, node: NodeId) -> Id128 {
        crate::derived::trade_uuid(self.time_ns, node, self.sequence, self.index)
    }
}

/// Best prices of an instrument as last published. Derivable from the events, so not journalled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quote {
    pub bid: Option<Ticks>,
    pub ask: Option<Ticks>,
}

impl Quote {
    /// The best price that an order of `side` could match.
    pub fn opposite(&self, side: Side) -> Option<Ticks> {
        match side {
            Side::Buy => self.ask,
            Side::Sell => self.bid,
        }
    }
}

const _: () = assert!(size_of::<Event>() == 64);
const _: () = assert!(size_of::<EventEnvelope>() == 96);
const _: () = assert!(size_of::<ArchivedEventEnvelope>() <= 104);
const _: () = assert!(align_of::<EventEnvelope>() == 8);
