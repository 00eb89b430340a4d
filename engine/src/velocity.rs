//! The velocity halt (F08): how far trades may move the price within a window of journalled time.
//!
//! A window begins with the first command that may trade after the one before has ended. Its reference is the
//! last price traded until then; without one, the window's own first trade gives it. A trade outside the
//! reference's range does not happen: the book halts instead, and stays so until a `SetPhase` opens it, which
//! forgets the prices from before. Off, it costs one comparison an order that meets another.

use types::{Ticks, VelocityRule};

use crate::slab::NEVER;

/// What the rule remembers: part of the book's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct VelocityState {
    /// First moment behind the window; `u64::MAX` without a rule.
    pub until_ns: u64,
    /// Price of the last trade.
    pub last: Option<Ticks>,
    /// Price that the window's trades are measured by.
    pub reference: Option<Ticks>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Velocity {
    rule: VelocityRule,
    state: VelocityState,
}

impl Velocity {
    pub fn new(rule: VelocityRule) -> Self {
        let off = VelocityState {
            until_ns: NEVER,
            last: None,
            reference: None,
        };
        let mut velocity = Self {
            rule: VelocityRule::OFF,
            state: off,
        };
        velocity.set_rule(rule);
        velocity
    }

    /// Puts back what a book remembered.
    pub fn restore(&mut self, state: VelocityState) {
        self.state = state;
    }

    pub fn state(&self) -> VelocityState {
        self.state
    }

    /// Follows the instrument. Another rule begins a window of its own.
    pub fn set_rule(&mut self, rule: VelocityRule) {
        if rule == self.rule {
            return;
        }
        self.rule = rule;
        self.state = VelocityState {
            until_ns: if rule.is_on() { 0 } else { NEVER },
            last: self.state.last.filter(|_| rule.is_on()),
            reference: None,
        };
    }

    /// Forgets prices: the market has been opened, wherever it now stands.
    pub fn reset(&mut self) {
        (self.state.last, self.state.reference) = (None, None);
    }

    /// Before anything trades: begins a window when the last one is over.
    #[inline]
    pub fn begin(&mut self, now_ns: u64) {
        if now_ns >= self.state.until_ns {
            self.roll(now_ns);
        }
    }

    fn roll(&mut self, now_ns: u64) {
        self.state.until_ns = now_ns.saturating_add(self.rule.window_ns());
        self.state.reference = self.state.last;
    }

    #[inline(always)]
    pub fn is_on(&self) -> bool {
        self.rule.is_on()
    }

    /// What trades are measured by; `None` before the first one.
    pub fn reference(&self) -> Option<Ticks> {
        self.state.reference
    }

    /// True when a trade at `price` may happen where trades are measured by `reference`.
    pub fn allows(&self, reference: Ticks, price: Ticks) -> bool {
        !self.is_on() || self.rule.allows(reference, price)
    }

    /// True when the next trade may not be at this price.
    pub fn refuses(&self, price: Ticks) -> bool {
        self.reference()
            .is_some_and(|reference| !self.allows(reference, price))
    }

    /// A trade has happened.
    pub fn traded(&mut self, price: Ticks) {
        self.state.last = Some(price);
        self.state.reference.get_or_insert(price);
    }
}
