//! The match loop: best price, then time, at the resting order's price (R162 to R170).
//!
//! Includes self-trade prevention at each match (D38) and the look-ahead for fill-or-kill (R172).

use types::event::{Cancelled, Event, Reduced, Trade};
use types::{CancelReason, Handle, Lots, Side, StpGroup, StpMode, Ticks};

use crate::book::Book;
use crate::sink::{Emitter, EventSink};
use crate::slab::{NEVER, NIL};

/// The incoming order while it matches.
pub(crate) struct Taker {
    pub handle: Handle,
    pub side: Side,
    /// Worst price at which the order may trade.
    pub limit: Ticks,
    pub open: Lots,
    /// Total quantity, without what self-trade prevention has removed.
    pub quantity: Lots,
    pub group: StpGroup,
    pub stp: StpMode,
}

/// Reason why matching ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Filled, or nothing left inside the limit.
    Limit,
    /// Self-trade prevention cancels the incoming order.
    SelfTrade,
    /// The next trade would move the price too far: the market halts. The remainder cannot rest,
    /// since it would cross the book.
    Velocity,
}

impl Book {
    /// Matches until filled, out of the limit, or stopped by STP or the velocity rule.
    #[inline(always)]
    pub(crate) fn take<S: EventSink>(&mut self, taker: &mut Taker, out: &mut Emitter<S>) -> Stop {
        if self.velocity.is_on() {
            self.take_watched(taker, out)
        } else {
            self.take_each::<S, false>(taker, out)
        }
    }

    #[inline(never)]
    fn take_watched<S: EventSink>(&mut self, taker: &mut Taker, out: &mut Emitter<S>) -> Stop {
        self.velocity.begin(out.time_ns());
        self.take_each::<S, true>(taker, out)
    }

    /// The match loop; `WATCHED` = a velocity rule applies.
    #[inline(always)]
    fn take_each<S: EventSink, const WATCHED: bool>(
        &mut self,
        taker: &mut Taker,
        out: &mut Emitter<S>,
    ) -> Stop {
        let side = taker.side.opposite();
        while !taker.open.is_zero() && self.ladder.crosses(taker.side, taker.limit) {
            let Some(price) = self.ladder.best(side) else {
                break;
            };
            let mut level = self.ladder.level(side, price);
            let mut stop = Stop::Limit;
            let is_too_far = WATCHED && self.velocity.refuses(price);
            let trades_before = self.trade_number;
            // Makers leave the level only at its head, so the level is written back once.
            while level.head != NIL && !taker.open.is_zero() {
                let link = level.head;
                let maker = self.slab.at_mut(link);
                let before = maker.open;
                if maker.group == taker.group && taker.stp != StpMode::None {
                    stop = self.prevent_self_trade(link, taker, out);
                } else if is_too_far {
                    stop = Stop::Velocity;
                } else {
                    let quantity = before.min(taker.open);
                    maker.open = before - quantity;
                    taker.open -= quantity;
                    self.trade_number += 1;
                    out.emit(Event::Trade(Trade {
                        maker: Handle {
                            slot: link - 1,
                            generation: maker.generation,
                        },
                        taker: taker.handle,
                        price,
                        quantity,
                        maker_open: maker.open,
                        taker_open: taker.open,
                        trade_number: self.trade_number,
                        taker_side: taker.side,
                    }));
                }
                let maker = self.slab.at(link);
                level.open -= before - maker.open;
                if maker.open.is_zero() {
                    level.head = maker.next;
                    let has_date = maker.expire_at_ns != NEVER;
                    self.slab.close(link);
                    if has_date {
                        self.date_ends(link);
                    }
                }
                if stop != Stop::Limit {
                    break;
                }
            }
            // The head has no predecessor. For an empty level this writes to the record of link 0.
            self.slab.at_mut(level.head).prev = NIL;
            level.tail = if level.head == NIL { NIL } else { level.tail };
            self.ladder.set_level(side, price, level);
            if WATCHED && self.trade_number != trades_before {
                self.velocity.traded(price);
            }
            if stop != Stop::Limit {
                return stop;
            }
        }
        Stop::Limit
    }

    /// Applies the incoming order's mode where two orders of one group meet, without a trade.
    ///
    /// A maker that is cancelled is left with an open quantity of 0.
    #[cold]
    #[inline(never)]
    fn prevent_self_trade<S: EventSink>(
        &mut self,
        link: u32,
        taker: &mut Taker,
        out: &mut Emitter<S>,
    ) -> Stop {
        let handle = self.slab.handle(link);
        let maker = self.slab.at_mut(link);
        match taker.stp {
            StpMode::CancelNewest => return Stop::SelfTrade,
            StpMode::CancelOldest | StpMode::CancelBoth => {
                let quantity = maker.open;
                maker.open = Lots::ZERO;
                out.emit(cancelled(handle, quantity));
                if taker.stp == StpMode::CancelBoth {
                    return Stop::SelfTrade;
                }
            }
            StpMode::Decrement => {
                let quantity = maker.open.min(taker.open);
                maker.open -= quantity;
                maker.quantity -= quantity;
                taker.open -= quantity;
                taker.quantity -= quantity;
                out.emit(shrunk(handle, quantity, maker.open));
                out.emit(shrunk(taker.handle, quantity, taker.open));
            }
            StpMode::None => unreachable!("mode NONE allows self-trades"),
        }
        Stop::Limit
    }

    /// True when trades alone would fill a fill-or-kill order, self-trade prevention included.
    ///
    /// The level sums refuse most orders that cannot be filled. Single orders are visited only if
    /// the sums suffice and a group or the velocity rule may matter, and no more of them than the
    /// order would meet. If the velocity rule forbids a trade of the fill, the order cannot be
    /// filled: nothing trades and nothing halts. Levels and orders visited for an order that cannot
    /// be filled are counted. The sequencer limits them per member.
    pub(crate) fn can_fill(&mut self, taker: &Taker, now_ns: u64) -> bool {
        self.velocity.begin(now_ns);
        let (can, looks) = self.look_ahead(taker);
        if !can {
            self.fok_visits = self.fok_visits.saturating_add(looks);
        }
        can
    }

    /// Returns whether the order can be filled, and the number of levels and orders visited.
    fn look_ahead(&self, taker: &Taker) -> (bool, u32) {
        let mut looks = 0;
        let side = taker.side.opposite();
        let inside = |price: &Ticks| match taker.side {
            Side::Buy => *price <= taker.limit,
            Side::Sell => *price >= taker.limit,
        };
        let mut missing = taker.open;
        let enough = self.ladder.prices(side).take_while(inside).any(|price| {
            looks += 1;
            let open = self.ladder.level(side, price).open;
            missing -= open.min(missing);
            missing.is_zero()
        });
        if !enough || (taker.stp == StpMode::None && !self.velocity.is_on()) {
            return (enough, looks);
        }
        let mut missing = taker.open;
        let mut reference = self.velocity.reference();
        for price in self.ladder.prices(side).take_while(inside) {
            let mut link = self.ladder.level(side, price).head;
            while link != NIL {
                looks += 1;
                let maker = self.slab.at(link);
                if maker.group != taker.group || taker.stp == StpMode::None {
                    let reference = *reference.get_or_insert(price);
                    if !self.velocity.allows(reference, price) {
                        return (false, looks);
                    }
                    if maker.open >= missing {
                        return (true, looks);
                    }
                    missing -= maker.open;
                } else if taker.stp != StpMode::CancelOldest {
                    // Every other mode cancels or shrinks the taker here without a trade.
                    return (false, looks);
                }
                link = maker.next;
            }
        }
        (false, looks)
    }
}

fn cancelled(handle: Handle, quantity: Lots) -> Event {
    Event::Cancelled(Cancelled {
        handle,
        reason: CancelReason::SelfTrade,
        quantity,
    })
}

/// The event for a smaller open quantity: a cancel at 0, else a reduction.
fn shrunk(handle: Handle, quantity: Lots, open: Lots) -> Event {
    if open.is_zero() {
        return cancelled(handle, quantity);
    }
    Event::Reduced(Reduced {
        handle,
        reason: CancelReason::SelfTrade,
        quantity,
        open,
    })
}
