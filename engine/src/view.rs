//! Read access to a book: aggregated depth, order-by-order view, state hash. Not used for matching.

use types::{Lots, Side, StateHasher, Ticks};

use crate::book::Book;
use crate::image::RestingOrder;
use crate::slab::{NEVER, NIL};

/// One price of the public depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DepthLevel {
    pub price: Ticks,
    /// Sum of the open quantities.
    pub open: Lots,
}

impl Book {
    /// Prices of a side with their open quantity, best first (R177).
    pub fn depth(&self, side: Side) -> impl Iterator<Item = DepthLevel> + '_ {
        self.ladder.prices(side).map(move |price| DepthLevel {
            price,
            open: self.ladder.level(side, price).open,
        })
    }

    /// Resting orders of a side in matching order.
    pub fn orders(&self, side: Side) -> impl Iterator<Item = RestingOrder> + '_ {
        self.ladder.prices(side).flat_map(move |price| {
            let head = self.ladder.level(side, price).head;
            core::iter::successors((head != NIL).then_some(head), |link| {
                let next = self.slab.at(*link).next;
                (next != NIL).then_some(next)
            })
            .map(|link| RestingOrder::of(&self.slab, link))
        })
    }

    /// The resting order of a handle; `None` when it has closed.
    pub fn order(&self, handle: types::Handle) -> Option<RestingOrder> {
        let link = self.slab.find(handle)?;
        Some(RestingOrder::of(&self.slab, link))
    }

    /// Bytes used by resting orders: the slots used so far and the occupied price levels.
    pub fn footprint_bytes(&self) -> usize {
        let levels = [Side::Buy, Side::Sell].map(|side| self.ladder.prices(side).count());
        self.slab.bytes() + (levels[0] + levels[1]) * size_of::<crate::ladder::Level>()
    }

    /// Hash of all state that later results depend on.
    pub fn state_hash(&self) -> u64 {
        let mut hash = StateHasher::new();
        let spec = &self.spec;
        hash.write_u64s(&[
            u64::from(spec.ix.0),
            u64::from(spec.phase.code()),
            spec.band_low.0 as u64,
            spec.band_high.0 as u64,
            self.event_number,
            self.trade_number,
        ]);
        if self.velocity.is_on() {
            let state = self.velocity.state();
            hash.write_u64s(&[
                u64::from(spec.velocity.width_ppm) << 32 | u64::from(spec.velocity.window_ms),
                state.until_ns,
                state.last.map_or(0, |price| price.0 as u64),
                state.reference.map_or(0, |price| price.0 as u64),
            ]);
        }
        for side in [Side::Buy, Side::Sell] {
            for order in self.orders(side) {
                hash.write_u64s(&[
                    order.handle.engine_id(),
                    order.price.0 as u64,
                    order.open.0,
                    order.quantity.0,
                    order.expire_at_ns.unwrap_or(NEVER),
                    u64::from(order.user.0) << 32 | u64::from(order.session.0),
                    u64::from(order.stp_group.0) << 32
                        | u64::from(order.side.code()) << 16
                        | u64::from(order.stp.code()) << 8
                        | u64::from(order.post_only),
                ]);
            }
            hash.write_u64(u64::from(side.code()));
        }
        hash.finish()
    }
}
