//! Velocity halt (F08): limits how far trades move the price within a window of journalled time.
//!
//! A window begins with the first command that may trade after the previous window has ended. Its
//! reference price is the last traded price before it, or else the price of its own first trade. A
//! trade outside the range around the reference does not happen: the book halts until a `SetPhase`
//! opens it, which also clears the reference. If the rule is off, it costs one comparison per order
//! that meets another.

use types::{Ticks, VelocityRule};

use crate::slab::NEVER;

/// State of the rule; part of the book's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct VelocityState {
    /// End of the window, exclusive; `u64::MAX` without a rule.
    pub until_ns: u64,
    /// Price of the last trade.
    pub last: Option<Ticks>,
    /// Reference price for the window's trades.
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

    /// Restores the state of a snapshot.
    pub fn restore(&mut self, state: VelocityState) {
        self.state = state;
    }

    pub fn state(&self) -> VelocityState {
        self.state
    }

    /// Sets the instrument's rule. A changed rule begins a new window.
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

    /// Clears the prices: the market may open at any price level.
    pub fn reset(&mut self) {
        (self.state.last, self.state.reference) = (None, None);
    }

    /// Called before a command may trade: begins a new window when the last one has ended.
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

    /// Reference price for trades; `None` before the first one.
    pub fn reference(&self) -> Option<Ticks> {
        self.state.reference
    }

    /// True when `reference` allows a trade at `price`.
    pub fn allows(&self, reference: Ticks, price: Ticks) -> bool {
        !self.is_on() || self.rule.allows(reference, price)
    }

    /// True when the next trade must not be at this price.
    pub fn refuses(&self, price: Ticks) -> bool {
        self.reference()
            .is_some_and(|reference| !self.allows(reference, price))
    }

    /// Records a trade.
    pub fn traded(&mut self, price: Ticks) {
        self.state.last = Some(price);
        self.state.reference.get_or_insert(price);
    }
}
