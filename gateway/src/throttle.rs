//! Token bucket of one session (D33): so many messages a second, with a burst of one second's worth. Pure: time is passed in.

/// Credit in billionths of a message, so that a nanosecond is worth `rate_per_s` of them and nothing is rounded.
const ONE: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
pub struct Throttle {
    rate_per_s: u32,
    credit: u64,
    last_ns: u64,
}

impl Throttle {
    /// A full bucket. Rate 0 = no limit.
    pub fn new(rate_per_s: u32, now_ns: u64) -> Self {
        Self {
            rate_per_s,
            credit: u64::from(rate_per_s) * ONE,
            last_ns: now_ns,
        }
    }

    /// Takes one message's worth; false when the session is too fast.
    pub fn admit(&mut self, now_ns: u64) -> bool {
        if self.rate_per_s == 0 {
            return true;
        }
        let elapsed = now_ns.saturating_sub(self.last_ns);
        self.last_ns = self.last_ns.max(now_ns);
        let full = u64::from(self.rate_per_s) * ONE;
        let earned = elapsed.saturating_mul(u64::from(self.rate_per_s));
        self.credit = self.credit.saturating_add(earned).min(full);
        if self.credit < ONE {
            return false;
        }
        self.credit -= ONE;
        true
    }

    /// Takes more off for something dear that was admitted already, as far as there is credit.
    pub fn charge(&mut self, messages: u32) {
        self.credit = self.credit.saturating_sub(u64::from(messages) * ONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R341
    #[test]
    fn r341_throttle_admits_its_rate_and_not_one_more() {
        let mut throttle = Throttle::new(5_000, 0);
        assert_eq!((0..6_000).filter(|_| throttle.admit(0)).count(), 5_000);
        assert!(!throttle.admit(199_999), "one message is earned in 200 us");
        assert!(throttle.admit(200_000));
        assert!(!throttle.admit(200_000));
        let second = 1_000_000_000;
        let admitted = (0..20_000u64)
            .filter(|i| throttle.admit(second + i * 100_000))
            .count();
        // A full bucket, then 5,000 a second over two seconds.
        assert!((14_990..=15_000).contains(&admitted), "{admitted}");
        let mut charged = Throttle::new(5_000, 0);
        charged.charge(4_999);
        assert!(charged.admit(0) && !charged.admit(0));
        charged.charge(5_000);
        assert!(charged.admit(second), "no debt is left behind");
        let mut free = Throttle::new(0, 0);
        assert!((0..10_000).all(|_| free.admit(0)));
    }
}
