//! What has happened, as the book reports it: order by order, so that depth and best price can be derived from
//! the events alone.
//!
//! Every order event carries the open quantity after it. Events of one instrument are numbered densely from 1
//! and name the command that caused them. Reading rule for a book kept from events: `Accepted` with `rests`,
//! and `Rested`, add the order at the tail of its price; `Trade` takes from the maker; `Amended` with
//! `kept_priority` changes the order in place, without it takes the order out (it may trade, then `Rested`
//! again); `Reduced` shrinks in place; `Cancelled` takes it out; an order with open 0 is gone.

use core::mem::size_of;

use crate::ids::{Handle, Id128, InstrumentIx, NodeId, Sequence};
use crate::number::{Lots, Ticks};
use crate::order::{Phase, PhaseCause, Side};
use crate::reason::{CancelReason, RejectReason};

macro_rules! record {
    ($(#[$meta:meta])* pub struct $name:ident { $($body:tt)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        pub struct $name { $($body)* }
    };
}

record! {
    /// The book has taken the order on. It meets nobody and rests in full, or trades, resting or the end of it follow.
    pub struct Accepted {
        pub handle: Handle,
        pub side: Side,
        /// It rests already, in full, at the tail of its price: no `Rested` follows.
        pub rests: bool,
        /// Limit or protection price.
        pub price: Ticks,
        pub open: Lots,
    }
}

record! {
    /// The book has refused the order: it is closed, without a trade.
    pub struct Rejected {
        pub handle: Handle,
        pub reason: RejectReason,
    }
}

record! {
    /// What trading or an amend left open rests at the tail of its price.
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
        /// Dense per instrument, from 1.
        pub trade_number: u64,
    }
}

record! {
    /// Price or total quantity changed.
    pub struct Amended {
        pub handle: Handle,
        pub side: Side,
        /// Same price and not more quantity: the place in the queue is kept (T22).
        pub kept_priority: bool,
        pub price: Ticks,
        /// New total quantity.
        pub quantity: Lots,
        pub open: Lots,
    }
}

record! {
    /// The amend was refused; the order is as it was (open 0 when it was already gone).
    pub struct AmendRejected {
        pub handle: Handle,
        pub reason: RejectReason,
        pub open: Lots,
    }
}

record! {
    /// The cancel was refused: the order was already gone.
    pub struct CancelRejected {
        pub handle: Handle,
        pub reason: RejectReason,
    }
}

record! {
    /// Open quantity taken away without a trade, the order lives on (self-trade mode DECREMENT). The total
    /// quantity shrinks with it.
    pub struct Reduced {
        pub handle: Handle,
        pub reason: CancelReason,
        pub quantity: Lots,
        pub open: Lots,
    }
}

record! {
    /// The order has ended with this quantity unfilled; open is 0 after it.
    pub struct Cancelled {
        pub handle: Handle,
        pub reason: CancelReason,
        pub quantity: Lots,
    }
}

record! {
    /// The phase in force from here on.
    pub struct PhaseChanged {
        pub phase: Phase,
        pub cause: PhaseCause,
    }
}

/// One thing that happened on one instrument.
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
    /// Orders that this event has closed: at most the maker and the taker of a trade.
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

/// An event with its place: which command caused it, which number it has on its instrument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[repr(C)]
pub struct EventEnvelope {
    /// The command that caused it.
    pub sequence: Sequence,
    /// The command's time.
    pub time_ns: u64,
    /// Dense per instrument, from 1.
    pub number: u64,
    pub instrument: InstrumentIx,
    /// Place among the events of its command on this instrument, from 0.
    pub index: u32,
    pub event: Event,
}

impl EventEnvelope {
    /// Public id of the trade this event reports.
    pub fn trade_uuid(&self, node: NodeId) -> Id128 {
        crate::derived::trade_uuid(self.time_ns, node, self.sequence, self.index)
    }
}

/// Best prices of an instrument as last published. Derivable from the events, so never journalled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quote {
    pub bid: Option<Ticks>,
    pub ask: Option<Ticks>,
}

impl Quote {
    /// The price an order of `side` would meet first.
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
