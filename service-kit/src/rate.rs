//! Rate of messages or calls (D33): the generic cell rate algorithm with a burst of one second.
//! Pure: the caller passes the time.
//!
//! A rate that was not used for a second is equal to a new one.

/// Length of the longest burst.
pub const SECOND_NS: u64 = 1_000_000_000;

/// The algorithm's state: the theoretical arrival time of the next message.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    even_ns: u64,
}

impl Rate {
    /// Admits a message; false, and nothing changed, when it comes too fast. `now_ns` is of a
    /// monotonic clock. A rate of 0 has no limit.
    pub fn admit(&mut self, now_ns: u64, per_second: u32) -> bool {
        if per_second == 0 {
            return true;
        }
        if self.wait_ns(now_ns, per_second) > 0 {
            return false;
        }
        self.even_ns = self.even_ns.max(now_ns) + SECOND_NS / u64::from(per_second);
        true
    }

    /// Time until a message is admitted again, 0 if it is now.
    pub fn wait_ns(&self, now_ns: u64, per_second: u32) -> u64 {
        let Some(step) = SECOND_NS.checked_div(u64::from(per_second)) else {
            return 0;
        };
        (self.even_ns.saturating_sub(now_ns) + step).saturating_sub(SECOND_NS)
    }

    /// Charges `messages` more for an expensive request, up to the burst.
    pub fn charge(&mut self, now_ns: u64, per_second: u32, messages: u64) {
        if let Some(step) = SECOND_NS.checked_div(u64::from(per_second)) {
            let even_ns = self.even_ns.max(now_ns) + step * messages;
            self.even_ns = even_ns.min(now_ns + SECOND_NS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R341
    #[test]
    fn r341_a_rate_admits_itself_and_not_one_more() {
        let mut rate = Rate::default();
        let mut admit = |at_ns| rate.admit(at_ns, 5_000);
        assert_eq!((0..6_000).filter(|_| admit(0)).count(), 5_000);
        assert!(!admit(199_999), "one message is earned in 200 us");
        assert!(admit(200_000));
        assert!(!admit(200_000));
        assert_eq!(rate.wait_ns(250_000, 5_000), 150_000, "then it is admitted");
        let mut admit = |at_ns| rate.admit(at_ns, 5_000);
        let admitted = (0..20_000u64).filter(|i| admit(SECOND_NS + i * 100_000));
        // A full burst, then 5,000 per second over two seconds.
        let admitted = admitted.count();
        assert!((14_990..=15_000).contains(&admitted), "{admitted}");
        let mut charged = Rate::default();
        charged.charge(0, 5_000, 4_999);
        assert!(charged.admit(0, 5_000) && !charged.admit(0, 5_000));
        charged.charge(0, 5_000, 5_000);
        assert!(charged.admit(SECOND_NS, 5_000), "no debt is left");
        let mut free = Rate::default();
        free.charge(0, 0, 5);
        assert!((0..10_000).all(|_| free.admit(0, 0)));
    }
}
