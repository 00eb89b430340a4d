//! The book as a snapshot: resting orders in matching order, and the counters.
//!
//! A restored book has the same state hash for every capacity.

use alloc::vec::Vec;

use types::{
    Handle, InstrumentSpec, Lots, Sequence, SessionIx, Side, StpGroup, StpMode, Ticks, UserIx,
};

use crate::book::{Book, BookConfig};
use crate::slab::{NEVER, NIL, Order, Slab};
use crate::velocity::VelocityState;

/// Public view of a resting order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct RestingOrder {
    pub handle: Handle,
    pub side: Side,
    pub price: Ticks,
    pub open: Lots,
    /// Total quantity, filled part included.
    pub quantity: Lots,
    pub user: UserIx,
    pub session: SessionIx,
    pub stp_group: StpGroup,
    pub stp: StpMode,
    pub post_only: bool,
    pub expire_at_ns: Option<u64>,
}

impl RestingOrder {
    pub(crate) fn of(slab: &Slab, link: u32) -> Self {
        let order = slab.at(link);
        Self {
            handle: slab.handle(link),
            side: order.side,
            price: order.price,
            open: order.open,
            quantity: order.quantity,
            user: order.user,
            session: order.session,
            stp_group: order.group,
            stp: order.stp,
            post_only: order.post_only,
            expire_at_ns: (order.expire_at_ns != NEVER).then_some(order.expire_at_ns),
        }
    }
}

/// A book at one sequence.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct BookImage {
    pub spec: InstrumentSpec,
    pub sequence: Sequence,
    pub event_number: u64,
    pub trade_number: u64,
    pub velocity: VelocityState,
    /// Bids best first, then asks best first.
    pub orders: Vec<RestingOrder>,
}

impl Book {
    pub fn image(&self) -> BookImage {
        BookImage {
            spec: self.spec,
            sequence: self.sequence,
            event_number: self.event_number,
            trade_number: self.trade_number,
            velocity: self.velocity.state(),
            orders: [Side::Buy, Side::Sell]
                .into_iter()
                .flat_map(|side| self.orders(side))
                .collect(),
        }
    }

    /// Restores a book. Panics on an image that no book can have written (a checksum guards the
    /// file).
    pub fn restore(image: &BookImage, config: BookConfig) -> Self {
        let mut book = Self::new(image.spec, config);
        book.sequence = image.sequence;
        book.event_number = image.event_number;
        book.trade_number = image.trade_number;
        book.velocity.restore(image.velocity);
        for order in &image.orders {
            let link = book.slab.vacate(order.handle);
            let resting = Order {
                price: order.price,
                open: order.open,
                quantity: order.quantity,
                expire_at_ns: order.expire_at_ns.unwrap_or(NEVER),
                next: NIL,
                prev: NIL,
                generation: order.handle.generation,
                user: order.user,
                session: order.session,
                group: order.stp_group,
                side: order.side,
                stp: order.stp,
                post_only: order.post_only,
                live: false,
            };
            book.link(link, resting);
        }
        book.ladder.has_new_best();
        book.check_invariants();
        book
    }
}
