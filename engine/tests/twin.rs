//! Compares the book with a naive reference model: the same seeded commands, every event.
//!
//! The model keeps each side as a plain vector sorted by (price, arrival) and does everything by
//! linear search: slow and obvious. The book's structure is checked on the way.

#[path = "../../testkit/src/seed.rs"]
mod seed;
mod support;

use std::collections::{BTreeMap, HashMap};

use engine::{Book, BookConfig, BookImage, DepthLevel};
use support::*;
use types::command::{
    Amend, Cancel, Command, ExpireOrders, MassCancel, MassScope, New, SetInstrument, SetKillSwitch,
    SetPhase, SweepPosition,
};
use types::event::*;
use types::*;

/// Xorshift with a multiplier; seeds are part of the test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 33) % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[derive(Clone, Debug)]
struct Naive {
    new: New,
    price: Ticks,
    open: u64,
    total: u64,
}

/// The reference model. Sides list orders in matching order.
struct Twin {
    sides: [Vec<Naive>; 2],
    phase: Phase,
    band: (Ticks, Ticks),
    trades: u64,
    events: Vec<Event>,
    velocity: VelocityRule,
    window_end: u64,
    last: Option<i64>,
    reference: Option<i64>,
}

impl Twin {
    fn better(side: Side, a: Ticks, b: Ticks) -> bool {
        if side == Side::Buy { a > b } else { a < b }
    }

    fn crosses(&self, side: Side, limit: Ticks) -> bool {
        self.sides[side.opposite().index()]
            .first()
            .is_some_and(|o| !Self::better(side.opposite(), limit, o.price))
    }

    fn find(&self, h: Handle) -> Option<(usize, usize)> {
        (0..2).find_map(|s| {
            let at = self.sides[s].iter().position(|o| o.new.handle == h)?;
            Some((s, at))
        })
    }

    fn insert(&mut self, order: Naive) {
        let side = order.new.side;
        let list = &mut self.sides[side.index()];
        let at = list
            .iter()
            .position(|o| Self::better(side, order.price, o.price))
            .unwrap_or(list.len());
        list.insert(at, order);
    }

    fn rest(&mut self, order: Naive) {
        self.events.push(Event::Rested(Rested {
            handle: order.new.handle,
            side: order.new.side,
            price: order.price,
            open: Lots(order.open),
        }));
        self.insert(order);
    }

    fn cancelled(&mut self, handle: Handle, reason: CancelReason, quantity: u64) {
        let quantity = Lots(quantity);
        self.events.push(Event::Cancelled(Cancelled {
            handle,
            reason,
            quantity,
        }));
    }

    fn shrink(&mut self, handle: Handle, quantity: u64, open: u64) {
        if open == 0 {
            return self.cancelled(handle, CancelReason::SelfTrade, quantity);
        }
        self.events.push(Event::Reduced(Reduced {
            handle,
            reason: CancelReason::SelfTrade,
            quantity: Lots(quantity),
            open: Lots(open),
        }));
    }

    /// Matches the taker; returns a reason when it may neither continue nor rest.
    fn take(&mut self, taker: &mut Naive) -> Option<CancelReason> {
        let (side, opposite) = (taker.new.side, taker.new.side.opposite().index());
        while taker.open > 0 && self.crosses(side, taker.price) {
            let maker = &mut self.sides[opposite][0];
            let quantity = maker.open.min(taker.open);
            let maker_handle = maker.new.handle;
            let own = maker.new.stp_group == taker.new.stp_group;
            match taker.new.stp {
                StpMode::CancelNewest if own => return Some(CancelReason::SelfTrade),
                StpMode::CancelOldest | StpMode::CancelBoth if own => {
                    let open = maker.open;
                    self.sides[opposite].remove(0);
                    self.cancelled(maker_handle, CancelReason::SelfTrade, open);
                    if taker.new.stp == StpMode::CancelBoth {
                        return Some(CancelReason::SelfTrade);
                    }
                }
                StpMode::Decrement if own => {
                    maker.open -= quantity;
                    maker.total -= quantity;
                    taker.open -= quantity;
                    taker.total -= quantity;
                    let left = maker.open;
                    if left == 0 {
                        self.sides[opposite].remove(0);
                    }
                    self.shrink(maker_handle, quantity, left);
                    self.shrink(taker.new.handle, quantity, taker.open);
                }
                _ => {
                    if self.velocity.is_on() {
                        let reference = *self.reference.get_or_insert(maker.price.0);
                        let moved = i128::from((maker.price.0 - reference).abs());
                        let width = i128::from(reference) * i128::from(self.velocity.width_ppm);
                        if moved * 1_000_000 > width {
                            return Some(CancelReason::InstrumentHalted);
                        }
                        self.last = Some(maker.price.0);
                    }
                    maker.open -= quantity;
                    taker.open -= quantity;
                    self.trades += 1;
                    self.events.push(Event::Trade(Trade {
                        maker: maker_handle,
                        taker: taker.new.handle,
                        price: maker.price,
                        quantity: Lots(quantity),
                        maker_open: Lots(maker.open),
                        taker_open: Lots(taker.open),
                        trade_number: self.trades,
                        taker_side: side,
                    }));
                    if maker.open == 0 {
                        self.sides[opposite].remove(0);
                    }
                }
            }
        }
        None
    }

    /// Called before anything may trade: begins a new window when the last one has ended.
    fn begin_window(&mut self, now: u64) {
        if self.velocity.is_on() && now >= self.window_end {
            self.window_end = now + u64::from(self.velocity.window_ms) * 1_000_000;
            self.reference = self.last;
        }
    }

    /// Cancels an order for this reason; a velocity stop also halts the market.
    fn stop(&mut self, handle: Handle, reason: CancelReason, open: u64) {
        self.cancelled(handle, reason, open);
        if reason == CancelReason::InstrumentHalted {
            self.phase_changes(Phase::Halt, PhaseCause::Velocity);
        }
    }

    fn phase_refusal(&self, trades: bool) -> Option<RejectReason> {
        match self.phase {
            Phase::Open => None,
            Phase::PreOpen => trades.then_some(RejectReason::InstrumentPreOpen),
            Phase::Matured => Some(RejectReason::InstrumentMatured),
            Phase::Halt => Some(RejectReason::InstrumentHalted),
            Phase::Closed => Some(RejectReason::InstrumentClosed),
        }
    }

    fn new_order(&mut self, c: &New, now: u64) {
        self.expire(now, 0);
        let crosses = self.crosses(c.side, c.price);
        let rests = matches!(c.time_in_force, TimeInForce::Gtc | TimeInForce::Gtd);
        let market = c.order_type == OrderType::Market;
        let banded = self.band.0 <= c.price && c.price <= self.band.1;
        let refusal = if let Some(reason) = self.phase_refusal(crosses || !rests) {
            Some(reason)
        } else if c.quantity.0 == 0 || c.quantity > Lots::ORDER_MAX {
            Some(RejectReason::QuantityLot)
        } else if !market && (c.price.0 < 1 || c.price > Ticks::ORDER_MAX) {
            Some(RejectReason::PriceTick)
        } else if !market && !banded {
            Some(RejectReason::PriceBand)
        } else if (market && rests) || (c.post_only && !rests) {
            Some(RejectReason::InvalidCombination)
        } else if c.post_only && crosses {
            Some(RejectReason::PostOnly)
        } else if c.time_in_force == TimeInForce::Gtd && c.expire_at_ns <= now {
            Some(RejectReason::Expired)
        } else {
            None
        };
        let handle = c.handle;
        if let Some(reason) = refusal {
            self.events
                .push(Event::Rejected(Rejected { handle, reason }));
            return;
        }
        self.events.push(Event::Accepted(Accepted {
            handle,
            side: c.side,
            rests: rests && !crosses,
            price: c.price,
            open: c.quantity,
        }));
        let mut taker = Naive {
            new: *c,
            price: c.price,
            open: c.quantity.0,
            total: c.quantity.0,
        };
        if !rests || crosses {
            self.begin_window(now);
        }
        if c.time_in_force == TimeInForce::Fok && !self.fills(&taker) {
            let empty = self.sides[c.side.opposite().index()].is_empty();
            let reason = if market && empty {
                CancelReason::NoLiquidity
            } else {
                CancelReason::FokNotFillable
            };
            return self.cancelled(handle, reason, taker.open);
        }
        if rests && !crosses {
            return self.insert(taker);
        }
        let stopped = self.take(&mut taker);
        if taker.open == 0 {
            return;
        }
        let open = taker.open;
        if let Some(reason) = stopped {
            self.stop(handle, reason, open);
        } else if rests {
            self.rest(taker);
        } else if market && open == c.quantity.0 {
            self.cancelled(handle, CancelReason::NoLiquidity, open);
        } else {
            self.cancelled(handle, CancelReason::IocRemainder, open);
        }
    }

    /// Tries the order on a copy: true when trades alone fill it.
    fn fills(&self, taker: &Naive) -> bool {
        let mut copy = Twin {
            sides: self.sides.clone(),
            phase: self.phase,
            band: self.band,
            events: Vec::new(),
            ..*self
        };
        let mut taker = taker.clone();
        copy.take(&mut taker);
        let traded: u64 = copy
            .events
            .iter()
            .map(|e| match e {
                Event::Trade(t) => t.quantity.0,
                _ => 0,
            })
            .sum();
        traded == taker.new.quantity.0
    }

    fn amend(&mut self, c: &Amend, now: u64) {
        self.expire(now, 0);
        let refuse = |reason, open| {
            Event::AmendRejected(AmendRejected {
                handle: c.handle,
                reason,
                open: Lots(open),
            })
        };
        let Some((side, at)) = self.find(c.handle) else {
            self.events.push(refuse(RejectReason::OrderNotOpen, 0));
            return;
        };
        let old = self.sides[side][at].clone();
        let price = c.price.unwrap_or(old.price);
        let total = c.quantity.map_or(old.total, |q| q.0);
        let kept = price == old.price && total <= old.total;
        let crosses = !kept && self.crosses(old.new.side, price);
        let filled = old.total - old.open;
        let banded = self.band.0 <= price && price <= self.band.1;
        let refusal = if let Some(reason) = self.phase_refusal(crosses) {
            Some(reason)
        } else if total <= filled {
            Some(RejectReason::InvalidAmend)
        } else if total > Lots::ORDER_MAX.0 {
            Some(RejectReason::QuantityLot)
        } else if price != old.price && (price.0 < 1 || price > Ticks::ORDER_MAX) {
            Some(RejectReason::PriceTick)
        } else if !kept && !banded {
            Some(RejectReason::PriceBand)
        } else if old.new.post_only && crosses {
            Some(RejectReason::PostOnly)
        } else {
            None
        };
        if let Some(reason) = refusal {
            self.events.push(refuse(reason, old.open));
            return;
        }
        let mut order = old;
        order.price = price;
        order.total = total;
        order.open = total - filled;
        self.events.push(Event::Amended(Amended {
            handle: c.handle,
            side: order.new.side,
            kept_priority: kept,
            price,
            quantity: Lots(total),
            open: Lots(order.open),
        }));
        if kept {
            self.sides[side][at] = order;
            return;
        }
        self.sides[side].remove(at);
        if crosses {
            self.begin_window(now);
        }
        let stopped = self.take(&mut order);
        if order.open == 0 {
            return;
        }
        if let Some(reason) = stopped {
            self.stop(c.handle, reason, order.open);
        } else {
            self.rest(order);
        }
    }

    fn cancel_where(&mut self, reason: CancelReason, chosen: impl Fn(&Naive) -> bool) {
        let mut gone: Vec<Naive> = self
            .sides
            .iter()
            .flatten()
            .filter(|o| chosen(o))
            .cloned()
            .collect();
        gone.sort_by_key(|o| o.new.handle.slot);
        for order in &gone {
            self.sides[order.new.side.index()].retain(|o| o.new.handle != order.new.handle);
            self.cancelled(order.new.handle, reason, order.open);
        }
    }

    /// Earliest date first, then the lower slot.
    fn expire(&mut self, now: u64, orders_max: u32) {
        let due = |o: &&Naive| o.new.time_in_force == TimeInForce::Gtd && o.new.expire_at_ns <= now;
        let key = |o: &Naive| (o.new.expire_at_ns, o.new.handle.slot);
        let mut count = 0;
        while let Some((_, slot)) = self.sides.iter().flatten().filter(due).map(key).min() {
            self.cancel_where(CancelReason::Expired, |o| o.new.handle.slot == slot);
            count += 1;
            if count == orders_max {
                return;
            }
        }
    }

    fn phase_changes(&mut self, phase: Phase, cause: PhaseCause) {
        self.phase = phase;
        let change = PhaseChanged { phase, cause };
        self.events.push(Event::PhaseChanged(change));
    }

    fn set_phase(&mut self, phase: Phase, cancel_orders: bool) {
        self.phase_changes(phase, PhaseCause::Command);
        if phase == Phase::Open {
            (self.last, self.reference) = (None, None);
        }
        if phase == Phase::Matured {
            self.cancel_where(CancelReason::InstrumentMatured, |_| true);
        } else if cancel_orders {
            self.cancel_where(CancelReason::InstrumentHalted, |_| true);
        }
    }

    fn apply(&mut self, command: &Command, now: u64) -> Vec<Event> {
        self.events.clear();
        match command {
            Command::New(c) => self.new_order(c, now),
            Command::Amend(c) => self.amend(c, now),
            Command::Cancel(c) => match self.find(c.handle) {
                Some((side, at)) => {
                    let order = self.sides[side].remove(at);
                    self.cancelled(c.handle, c.reason, order.open);
                }
                None => self.events.push(Event::CancelRejected(CancelRejected {
                    handle: c.handle,
                    reason: RejectReason::OrderNotOpen,
                })),
            },
            Command::MassCancel(c) => {
                self.cancel_where(c.reason, |o| {
                    let scope = match c.scope {
                        MassScope::All => true,
                        MassScope::User(user) => o.new.user == user,
                        MassScope::Session(session) => o.new.session == session,
                        MassScope::Group(group) => o.new.stp_group == group,
                    };
                    scope && c.side.is_none_or(|side| o.new.side == side)
                });
            }
            Command::SetKillSwitch(c) => {
                self.cancel_where(CancelReason::KillSwitch, |o| {
                    c.user.is_none() || o.new.user == c.user
                });
            }
            Command::ExpireOrders(c) => self.expire(now, c.orders_max),
            Command::SetPhase(c) => self.set_phase(c.phase, c.cancel_orders),
            Command::SetInstrument(c) => {
                self.band = (c.spec.band_low, c.spec.band_high);
                if c.spec.velocity != self.velocity {
                    self.velocity = c.spec.velocity;
                    (self.window_end, self.reference) = (0, None);
                    self.last = self.last.filter(|_| self.velocity.is_on());
                }
                // The phase stays and is published again.
                if c.spec.phase != self.phase {
                    self.phase_changes(self.phase, PhaseCause::Command);
                }
            }
            other => panic!("not part of the flow: {other:?}"),
        }
        self.events.clone()
    }
}

/// Generates commands: slots are assigned as by admission, live orders are known from the events.
struct Flow {
    random: Random,
    live: Vec<Handle>,
    closed: Vec<Handle>,
    generations: Vec<u32>,
    low: i64,
    high: i64,
    centre: i64,
    /// The current band.
    band: (i64, i64),
    run: Run,
}

impl Flow {
    fn command(&mut self, now: u64) -> Command {
        self.centre = (self.centre + self.random.below(3) as i64 - 1).clamp(self.low, self.high);
        match self.random.below(1000) {
            0..=3 => Command::SetPhase(SetPhase {
                instrument: IX,
                phase: Phase::ALL[self.random.below(Phase::ALL.len() as u64) as usize],
                cancel_orders: self.random.chance(20),
                key_hash: Id128::NONE,
            }),
            // The band moves away from resting orders, which stay.
            4..=6 => {
                let width = 10 + self.random.below(400) as i64;
                let (low, high) = (self.centre - width, self.centre + width);
                self.set_band(low.max(self.low), high.min(self.high))
            }
            7..=8 => self.set_band(self.low, self.high),
            9..=23 => Command::SetPhase(SetPhase {
                instrument: IX,
                phase: Phase::Open,
                cancel_orders: false,
                key_hash: Id128::NONE,
            }),
            24..=30 => Command::MassCancel(self.mass_cancel()),
            31 => Command::SetKillSwitch(SetKillSwitch {
                user: match self.random.chance(20) {
                    true => UserIx::NONE,
                    false => UserIx(self.random.below(4) as u32),
                },
                is_engaged: true,
                key_hash: Id128::NONE,
                through: SweepPosition::END,
            }),
            32..=44 => Command::ExpireOrders(ExpireOrders {
                instrument: InstrumentIx::NONE,
                orders_max: self.random.below(3) as u32,
            }),
            45..=299 if !self.live.is_empty() => Command::Cancel(Cancel {
                handle: self.some_order(),
                instrument: IX,
                user: UserIx::NONE,
                session: SessionIx::NONE,
                reason: CancelReason::UserRequest,
                client_seq: 0,
                key_hash: Id128::NONE,
            }),
            300..=449 if !self.live.is_empty() => Command::Amend(Amend {
                handle: self.some_order(),
                instrument: IX,
                user: UserIx::NONE,
                session: SessionIx::NONE,
                client_seq: 0,
                new_client_order_id: 0,
                price: self.random.chance(50).then(|| self.price()),
                quantity: self
                    .random
                    .chance(60)
                    .then(|| Lots(self.random.below(40) + 1)),
                draw: Reserve::ZERO,
                budget_minor: Minor::ZERO,
                budget_returns: false,
                key_hash: Id128::NONE,
            }),
            _ => Command::New(self.new_order(now)),
        }
    }

    fn set_band(&mut self, low: i64, high: i64) -> Command {
        self.band = (low, high);
        // The rule is switched off and on at random.
        let velocity = if self.random.chance(20) {
            VelocityRule::OFF
        } else {
            self.run.velocity
        };
        Command::SetInstrument(SetInstrument {
            spec: spec_with(low, high, velocity),
        })
    }

    /// Mostly an open order, sometimes a closed one whose event the sender has not seen yet.
    fn some_order(&mut self) -> Handle {
        let from = if self.random.chance(5) && !self.closed.is_empty() {
            &self.closed
        } else {
            &self.live
        };
        let handle = from[self.random.below(from.len() as u64) as usize];
        // Admission never names a slot that a newer order occupies.
        if self.generations[handle.slot as usize] == handle.generation {
            handle
        } else {
            self.live[0]
        }
    }

    fn price(&mut self) -> Ticks {
        if self.random.chance(1) {
            return [Ticks::ZERO, Ticks(Ticks::ORDER_MAX.0 + 1)][self.random.below(2) as usize];
        }
        let distance = match self.random.below(20) {
            0 => self.random.below(2_000) as i64,
            1..=5 => self.random.below(60) as i64,
            _ => self.random.below(6) as i64,
        };
        let sign = if self.random.chance(50) { 1 } else { -1 };
        Ticks(self.centre + sign * distance)
    }

    fn mass_cancel(&mut self) -> MassCancel {
        let who = self.random.below(8) as u32;
        MassCancel {
            scope: match self.random.below(10) {
                0 => MassScope::All,
                1..=4 => MassScope::User(UserIx(who)),
                5..=7 => MassScope::Session(SessionIx(who % 4)),
                _ => MassScope::Group(StpGroup::of_user(UserIx(who))),
            },
            instrument: IX,
            side: [None, Some(Side::Buy), Some(Side::Sell)][self.random.below(3) as usize],
            reason: CancelReason::MassCancel,
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
            through: SweepPosition::END,
            remaining: 0,
        }
    }

    fn new_order(&mut self, now: u64) -> New {
        // The lowest slot without a live order, now and then a far one.
        let mut slot = if self.random.chance(2) { 700 } else { 0 };
        while self.live.iter().any(|h| h.slot == slot) {
            slot += 1;
        }
        if self.generations.len() <= slot as usize {
            self.generations.resize(slot as usize + 1, 0);
        }
        self.generations[slot as usize] += 1;
        let random = &mut self.random;
        let side = Side::ALL[random.below(2) as usize];
        let mut order = limit(slot, side, 1, random.below(30) + 1);
        order.handle.generation = self.generations[slot as usize];
        order.user = UserIx(random.below(8) as u32);
        order.session = SessionIx(order.user.0 % 4);
        order.stp_group = StpGroup::of_user(order.user);
        order.stp = StpMode::ALL[random.below(5) as usize];
        order.time_in_force = match random.below(10) {
            0 => TimeInForce::Ioc,
            1 => TimeInForce::Fok,
            2 => TimeInForce::Gtd,
            _ => TimeInForce::Gtc,
        };
        if order.time_in_force.rests() && random.chance(self.run.dates) {
            order.time_in_force = TimeInForce::Gtd;
        }
        // Often the same date for several orders, sometimes one in the past or practically never.
        order.expire_at_ns = match random.below(8) {
            0 => (now + random.below(200_000)).next_multiple_of(20_000),
            1 => now + random.below(20) * 1_000_000,
            2 => u64::MAX - random.below(2),
            _ => now + random.below(200_000),
        };
        order.post_only = random.chance(10);
        if random.chance(8) {
            order.order_type = OrderType::Market;
            if random.chance(90) {
                order.time_in_force =
                    [TimeInForce::Ioc, TimeInForce::Fok][random.below(2) as usize];
            }
        }
        if random.chance(1) {
            order.quantity = [Lots::ZERO, Lots(Lots::ORDER_MAX.0 + 1)][random.below(2) as usize];
        }
        order.price = self.price();
        if order.order_type == OrderType::Market {
            // The protection price that admission sets.
            order.price = if self.random.chance(5) {
                [Ticks::ZERO, Ticks::MAX][side.index()]
            } else {
                Ticks(match side {
                    Side::Buy => order.price.0.min(self.band.1),
                    Side::Sell => order.price.0.max(self.band.0),
                })
            };
        }
        order
    }

    /// Updates the generator's open orders from the events.
    fn learn(&mut self, events: &[Event]) {
        for event in events {
            let rests = match event {
                Event::Accepted(e) if e.rests => Some(e.handle),
                Event::Rested(e) => Some(e.handle),
                _ => None,
            };
            self.live
                .extend(rests.filter(|handle| !self.live.contains(handle)));
            for handle in event.closed().into_iter().flatten() {
                if let Some(at) = self.live.iter().position(|h| *h == handle) {
                    self.live.swap_remove(at);
                    self.closed.push(handle);
                }
            }
        }
    }
}

/// A book kept from the events only, by the reading rule of `types::event`: order by order (L3),
/// from which depth (L2) and best prices (L1) follow.
#[derive(Default)]
struct Mirror {
    /// By side and price, in time order: handle and open quantity.
    sides: [BTreeMap<Ticks, Vec<(Handle, Lots)>>; 2],
    /// Side and price of a resting order.
    places: HashMap<Handle, (Side, Ticks)>,
    /// Orders that are neither resting nor ended: side and open quantity.
    in_hand: HashMap<Handle, (Side, Lots)>,
    /// Filled quantity by side, derived from the changes of open quantities.
    filled: [u64; 2],
    traded: u64,
}

impl Mirror {
    fn add(&mut self, handle: Handle, side: Side, price: Ticks, open: Lots) {
        let level = self.sides[side.index()].entry(price).or_default();
        level.push((handle, open));
        assert_eq!(self.places.insert(handle, (side, price)), None);
    }

    /// Removes an order, wherever it is; returns its side and open quantity.
    fn take_out(&mut self, handle: Handle) -> (Side, Lots) {
        let Some((side, price)) = self.places.remove(&handle) else {
            return self.in_hand.remove(&handle).expect("a known order");
        };
        let levels = &mut self.sides[side.index()];
        let level = levels.get_mut(&price).expect("a level of a known order");
        let at = level
            .iter()
            .position(|(h, _)| *h == handle)
            .expect("the order rests");
        let (_, open) = level.remove(at);
        if level.is_empty() {
            levels.remove(&price);
        }
        (side, open)
    }

    /// Sets an order's open quantity, 0 = closed; returns its side and former quantity.
    fn set_open(&mut self, handle: Handle, open: Lots) -> (Side, Lots) {
        if open.is_zero() {
            return self.take_out(handle);
        }
        let Some((side, price)) = self.places.get(&handle) else {
            let (side, known) = self.in_hand.get_mut(&handle).expect("a known order");
            return (*side, std::mem::replace(known, open));
        };
        let level = self.sides[side.index()].get_mut(price).expect("a level");
        let found = level.iter_mut().find(|(h, _)| *h == handle);
        let (_, known) = found.expect("the order rests");
        (*side, std::mem::replace(known, open))
    }

    fn fill(&mut self, handle: Handle, open: Lots) {
        let (side, before) = self.set_open(handle, open);
        self.filled[side.index()] += (before - open).0;
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Accepted(e) if e.rests => self.add(e.handle, e.side, e.price, e.open),
            Event::Accepted(e) => {
                self.in_hand.insert(e.handle, (e.side, e.open));
            }
            Event::Rested(e) => {
                assert_eq!(self.in_hand.remove(&e.handle), Some((e.side, e.open)));
                self.add(e.handle, e.side, e.price, e.open);
            }
            Event::Trade(e) => {
                self.fill(e.maker, e.maker_open);
                self.fill(e.taker, e.taker_open);
                self.traded += e.quantity.0;
            }
            Event::Amended(e) if e.kept_priority => {
                self.set_open(e.handle, e.open);
            }
            Event::Amended(e) => {
                self.take_out(e.handle);
                self.in_hand.insert(e.handle, (e.side, e.open));
            }
            Event::Reduced(e) => {
                let (_, before) = self.set_open(e.handle, e.open);
                assert_eq!(before, e.open + e.quantity);
            }
            Event::Cancelled(e) => {
                let (_, open) = self.take_out(e.handle);
                assert_eq!(open, e.quantity);
            }
            Event::Rejected(_)
            | Event::AmendRejected(_)
            | Event::CancelRejected(_)
            | Event::PhaseChanged(_) => {}
        }
    }

    /// Levels of a side, best first.
    fn levels(&self, side: Side) -> Vec<(&Ticks, &Vec<(Handle, Lots)>)> {
        let levels = self.sides[side.index()].iter();
        match side {
            Side::Buy => levels.rev().collect(),
            Side::Sell => levels.collect(),
        }
    }

    fn compare(&self, book: &Book) {
        for side in [Side::Buy, Side::Sell] {
            let levels = self.levels(side);
            let orders = levels
                .iter()
                .flat_map(|(price, level)| level.iter().map(|(h, open)| (*h, **price, *open)));
            assert!(
                book.orders(side)
                    .map(|o| (o.handle, o.price, o.open))
                    .eq(orders)
            );
            let depth = levels.iter().map(|(price, level)| DepthLevel {
                price: **price,
                open: level.iter().fold(Lots::ZERO, |sum, (_, open)| sum + *open),
            });
            assert!(book.depth(side).eq(depth));
            assert_eq!(book.best(side), levels.first().map(|(price, _)| **price));
        }
    }
}

fn compare(seed: u64, commands: u32, band: (i64, i64), levels: u32) -> u64 {
    let run = Run {
        seed,
        commands,
        band,
        levels,
        dates: 10,
        restores: false,
        velocity: VelocityRule::OFF,
    };
    run.compare().book.state_hash()
}

/// A random run, determined by its seed.
#[derive(Clone, Copy, Debug)]
struct Run {
    seed: u64,
    commands: u32,
    band: (i64, i64),
    levels: u32,
    /// Share of resting orders that get a date, in percent.
    dates: u64,
    /// True if the book is restored from its image at random.
    restores: bool,
    velocity: VelocityRule,
}

impl Run {
    /// Runs book and model side by side; returns the book and all its events.
    fn compare(self) -> Runner {
        let Run {
            seed,
            commands,
            band,
            levels,
            ..
        } = self;
        let spec = spec_with(band.0, band.1, self.velocity);
        let mut runner = Runner::new(Book::new(spec, BookConfig { orders: 4, levels }));
        let mut twin = Twin {
            sides: [Vec::new(), Vec::new()],
            phase: Phase::Open,
            band: (spec.band_low, spec.band_high),
            trades: 0,
            events: Vec::new(),
            velocity: self.velocity,
            window_end: 0,
            last: None,
            reference: None,
        };
        let mut flow = Flow {
            random: Random(seed),
            live: Vec::new(),
            closed: Vec::new(),
            generations: Vec::new(),
            low: band.0,
            high: band.1,
            centre: (band.0 + band.1) / 2,
            band,
            run: self,
        };
        let mut mirror = Mirror::default();
        for number in 0..commands {
            let now = runner.time_ns + 1_000;
            let command = flow.command(now);
            let expected = twin.apply(&command, now);
            let found: Vec<Event> = runner.apply(command).iter().map(|e| e.event).collect();
            assert_eq!(
                found, expected,
                "seed {seed}, command {number}: {command:?}"
            );
            flow.learn(&expected);
            for event in &expected {
                mirror.apply(event);
            }
            mirror.compare(&runner.book);
            if self.restores && number % 97 == 0 {
                let (hash, next) = (runner.book.state_hash(), runner.book.next_expiry_ns());
                let config = BookConfig { orders: 4, levels };
                runner.book = Book::restore(&runner.book.image(), config);
                assert_eq!(runner.book.state_hash(), hash);
                assert_eq!(runner.book.next_expiry_ns(), next);
            }
            if number % 64 == 0 {
                runner.book.check_invariants();
                for side in [Side::Buy, Side::Sell] {
                    let book: Vec<_> = runner
                        .book
                        .orders(side)
                        .map(|o| (o.handle, o.open.0))
                        .collect();
                    let naive: Vec<_> = twin.sides[side.index()]
                        .iter()
                        .map(|o| (o.new.handle, o.open))
                        .collect();
                    assert_eq!(book, naive, "seed {seed}, command {number}");
                }
            }
        }
        let [bought, sold] = mirror.filled;
        assert_eq!(bought, sold, "buyers and sellers were filled differently");
        assert_eq!(bought, mirror.traded);
        assert!(
            mirror.in_hand.is_empty(),
            "an order neither rests nor has ended"
        );
        assert!(
            runner.book.trade_number()
                > u64::from(commands) / if self.velocity.is_on() { 100 } else { 20 },
            "too few trades"
        );
        runner
    }
}

// rows: R162 R163 R164 R165 R166 R167 R168 R169 R170 R171 R172 R173 R177 R179
#[test]
fn r179_every_event_equals_the_reference_models() {
    for seed in seed::seeds(1..25) {
        compare(seed, 3_000, (1, 4_000), 4_096);
    }
}

/// Prefetching changes nothing, even for commands that name closed orders, slots past the end and
/// prices outside the window.
// rows: R180
#[test]
fn r180_a_batch_has_the_same_result_as_its_commands_one_by_one() {
    let band = (1, 1 << 30);
    for (seed, levels) in seed::seeds(201..203).zip([4_096, 64]) {
        let config = BookConfig { orders: 4, levels };
        let spec = spec_with_band(band.0, band.1);
        let mut one_by_one = Runner::new(Book::new(spec, config));
        let mut random = Random(seed);
        let mut commands = Vec::new();
        // Enough orders for the book to prefetch.
        for number in 0..12_000 {
            let side = Side::ALL[random.below(2) as usize];
            let distance = 1 + random.below(900) as i64;
            let price = if side == Side::Buy {
                -distance
            } else {
                distance
            };
            let order = limit(number, side, 5_000 + price, random.below(9) + 1);
            commands.push(Command::New(order));
        }
        for number in 0..6_000 {
            commands.push(match random.below(4) {
                0 => Command::New(limit(
                    12_000 + number,
                    Side::Buy,
                    5_000 + random.below(40) as i64,
                    5,
                )),
                1 => Command::ExpireOrders(ExpireOrders {
                    instrument: IX,
                    orders_max: 0,
                }),
                choice => {
                    let named = handle(random.below(12_000) as u32);
                    let user = UserIx::NONE;
                    let (session, key_hash) = (SessionIx::NONE, Id128::NONE);
                    if choice == 2 {
                        let reason = CancelReason::UserRequest;
                        Command::Cancel(Cancel {
                            handle: named,
                            instrument: IX,
                            user,
                            session,
                            reason,
                            client_seq: 0,
                            key_hash,
                        })
                    } else {
                        let price = random
                            .chance(70)
                            .then(|| Ticks(4_900 + random.below(200) as i64));
                        Command::Amend(Amend {
                            handle: named,
                            instrument: IX,
                            user,
                            session,
                            client_seq: 0,
                            new_client_order_id: 0,
                            price,
                            quantity: Some(Lots(3)),
                            draw: Reserve::ZERO,
                            budget_minor: Minor::ZERO,
                            budget_returns: false,
                            key_hash,
                        })
                    }
                }
            });
        }
        let envelopes: Vec<Envelope> = commands
            .iter()
            .zip(1..)
            .map(|(command, number)| Envelope {
                sequence: Sequence(number),
                time_ns: number * 1_000,
                received_ns: number * 1_000,
                command: *command,
            })
            .collect();
        for command in commands {
            one_by_one.apply(command);
        }
        let (mut book, mut tape) = (Book::new(spec, config), Tape::default());
        for batch in envelopes.chunks(64) {
            book.each_of_batch(
                batch,
                |envelope: &Envelope| Some(envelope),
                |book, envelope| {
                    apply(book, envelope, &mut tape);
                },
            );
        }
        assert!(book.resting() > 8_192, "the book is too small to prefetch");
        assert!(book.trade_number() > 100);
        assert_eq!(tape.events, one_by_one.tape.events);
        assert_eq!(book.state_hash(), one_by_one.book.state_hash());
        book.check_invariants();
    }
}

/// Orders with an expiry, with any mix of fills, amends, cancels and restarts, expire as in the
/// model: by date, then by slot.
// rows: R174 R180
#[test]
fn r174_orders_expire_like_the_reference_models_across_restarts() {
    for seed in seed::seeds(301..317) {
        let run = Run {
            seed,
            commands: 3_000,
            band: (1, 4_000),
            levels: 1_024,
            dates: 70,
            restores: true,
            velocity: VelocityRule::OFF,
        };
        run.compare();
    }
}

/// A window of a millisecond is a thousand commands. A width of 3 to 30 ticks around 2,000 is far
/// enough to trade and near enough to halt.
#[test]
fn f08_velocity_halts_equal_the_reference_models() {
    let mut halts = 0;
    for (seed, width_ppm) in seed::seeds(401..425).zip([1_500, 5_000, 15_000].into_iter().cycle()) {
        let run = Run {
            seed,
            commands: 3_000,
            band: (1, 4_000),
            levels: 1_024,
            dates: 10,
            restores: seed % 2 == 0,
            velocity: VelocityRule {
                width_ppm,
                window_ms: 1,
            },
        };
        let events = run.compare().tape.events;
        let is_halt = |e: &&EventEnvelope| matches!(e.event, Event::PhaseChanged(e) if e.cause == PhaseCause::Velocity);
        halts += events.iter().filter(is_halt).count();
    }
    assert!(halts > 24, "too few halts: {halts}");
}

#[test]
fn prices_outside_the_window_behave_the_same() {
    for seed in seed::seeds(101..113) {
        compare(seed, 3_000, (1, 1 << 30), 64);
    }
}

// rows: R180
#[test]
fn r180_the_same_commands_give_the_same_hash_at_any_capacity() {
    let hash = compare(7, 4_000, (1, 4_000), 4_096);
    assert_eq!(hash, compare(7, 4_000, (1, 4_000), 4_096));
    assert_eq!(hash, compare(7, 4_000, (1, 4_000), 64));
}

// rows: R174
#[test]
fn r174_a_restored_book_continues_like_one_that_never_stopped() {
    let spec = spec();
    let mut random = Random(99);
    let mut live = Runner::new(small_book(spec));
    for number in 0..400 {
        let side = Side::ALL[random.below(2) as usize];
        live.apply(Command::New(limit(
            number,
            side,
            490 + random.below(20) as i64,
            random.below(9) + 1,
        )));
    }
    let bytes = rkyv::to_bytes::<rkyv::rancor::Error>(&live.book.image()).expect("writes");
    let image = rkyv::from_bytes::<BookImage, rkyv::rancor::Error>(&bytes).expect("reads");
    let restored = Book::restore(
        &image,
        BookConfig {
            orders: 1,
            levels: 64,
        },
    );
    assert_eq!(restored.state_hash(), live.book.state_hash());
    assert_eq!(restored.image(), live.book.image());
    let mut back = Runner::new(restored);
    (back.sequence, back.time_ns) = (live.sequence, live.time_ns);
    back.tape.quote = live.tape.quote;
    for number in 400..800 {
        let side = Side::ALL[random.below(2) as usize];
        let command = Command::New(limit(
            number,
            side,
            490 + random.below(20) as i64,
            random.below(9) + 1,
        ));
        let expected: Vec<Event> = live.apply(command).iter().map(|e| e.event).collect();
        back.sequence = back.sequence.next();
        back.time_ns += 1_000;
        let envelope = Envelope {
            sequence: back.sequence,
            time_ns: back.time_ns,
            received_ns: back.time_ns,
            command,
        };
        let from = back.tape.events.len();
        apply(&mut back.book, &envelope, &mut back.tape);
        let found: Vec<Event> = back.tape.events[from..].iter().map(|e| e.event).collect();
        assert_eq!(found, expected);
    }
    assert_eq!(back.book.state_hash(), live.book.state_hash());
}
