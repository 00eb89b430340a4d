//! The match loop: best price first, earliest order first, at the resting order's price (R162 to R170), with self-trade prevention at each match
//! (D38), and the look-ahead of fill-or-kill orders (R172).

use types::event::{Cancelled, Event, Reduced, Trade};
use types::{CancelReason, Handle, Lots, Side, StpGroup, StpMode, Ticks};

use crate::book::Book;
use crate::sink::{Emitter, EventSink};
use crate::slab::NIL;

/// The incoming order while it matches.
pub(crate) struct Taker {
    pub handle: Handle,
    pub side: Side,
    /// Worst price it takes.
    pub limit: Ticks,
    pub open: Lots,
    /// Total quantity; shrinks when self-trade prevention takes some of it.
    pub quantity: Lots,
    pub group: StpGroup,
    pub stp: StpMode,
}

/// Why matching ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Filled, or nothing left inside the limit.
    Limit,
    /// The incoming order has to go because of its own group's order.
    SelfTrade,
}

impl Book {
    /// Matches the taker until it is filled, its limit is reached or self-trade prevention stops it.
    pub(crate) fn take<S: EventSink>(&mut self, taker: &mut Taker, out: &mut Emitter<S>) -> Stop {
        let side = taker.side.opposite();
        while !taker.open.is_zero() && self.crosses(taker.side, taker.limit) {
            let price = self.ladder.best[side.index()];
            let level = self.ladder.level(side, price);
            let (mut head, mut level_open) = (level.head, level.open);
            let mut stop = Stop::Limit;
            // Makers leave the level at its head only, so the level is written back once.
            while head != NIL && !taker.open.is_zero() {
                let own = taker.stp != StpMode::None && self.slab.at(head).group == taker.group;
                let before = self.slab.at(head).open;
                if own {
                    stop = self.prevent_self_trade(head, taker, out);
                } else {
                    self.trade(head, price, taker, out);
                }
                let maker = self.slab.at(head);
                level_open -= before - maker.open;
                if maker.open.is_zero() {
                    let next = maker.next;
                    self.slab.close(head);
                    head = next;
                }
                if stop == Stop::SelfTrade {
                    break;
                }
            }
            if head == NIL {
                assert!(level_open.is_zero(), "level sum equals its orders");
                self.ladder.remove(side, price);
            } else {
                self.slab.at_mut(head).prev = NIL;
                let level = self.ladder.level_mut(side, price);
                level.head = head;
                level.open = level_open;
            }
            if stop == Stop::SelfTrade {
                return stop;
            }
        }
        Stop::Limit
    }

    #[inline]
    fn trade<S: EventSink>(
        &mut self,
        slot: u32,
        price: Ticks,
        taker: &mut Taker,
        out: &mut Emitter<S>,
    ) {
        let maker = self.slab.at_mut(slot);
        let quantity = maker.open.min(taker.open);
        maker.open -= quantity;
        taker.open -= quantity;
        self.trade_number += 1;
        let event = Trade {
            maker: Handle {
                slot,
                generation: maker.generation,
            },
            taker: taker.handle,
            price,
            quantity,
            maker_open: maker.open,
            taker_open: taker.open,
            trade_number: self.trade_number,
            taker_side: taker.side,
        };
        out.emit(Event::Trade(event));
    }

    /// Two orders of one group meet: no trade, the incoming order's mode decides. Leaves a maker that has to go with nothing open.
    #[cold]
    fn prevent_self_trade<S: EventSink>(
        &mut self,
        slot: u32,
        taker: &mut Taker,
        out: &mut Emitter<S>,
    ) -> Stop {
        let handle = self.slab.handle(slot);
        let maker = self.slab.at_mut(slot);
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
            StpMode::None => unreachable!("self-trades are allowed in this mode"),
        }
        Stop::Limit
    }

    /// True when a fill-or-kill order would be filled completely by trades, self-trade prevention included.
    pub(crate) fn can_fill(&self, taker: &Taker) -> bool {
        let side = taker.side.opposite();
        let inside = |price: &Ticks| match taker.side {
            Side::Buy => *price <= taker.limit,
            Side::Sell => *price >= taker.limit,
        };
        let mut missing = taker.open;
        for price in self.ladder.prices(side).take_while(inside) {
            let level = self.ladder.level(side, price);
            if taker.stp == StpMode::None {
                if level.open >= missing {
                    return true;
                }
                missing -= level.open;
                continue;
            }
            let mut slot = level.head;
            while slot != NIL {
                let maker = self.slab.at(slot);
                if maker.group != taker.group {
                    if maker.open >= missing {
                        return true;
                    }
                    missing -= maker.open;
                } else if taker.stp != StpMode::CancelOldest {
                    // Every other mode ends or shrinks the taker here without a trade.
                    return false;
                }
                slot = maker.next;
            }
        }
        false
    }
}

fn cancelled(handle: Handle, quantity: Lots) -> Event {
    Event::Cancelled(Cancelled {
        handle,
        reason: CancelReason::SelfTrade,
        quantity,
    })
}

/// The end of an order that has nothing left open, or what it keeps.
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
