//! Rate of messages or calls (D33): the generic cell rate algorithm with a burst of one second.
//! Pure: the caller passes the time.
//!
//! After a second without use a rate is equal to a new one.

/// Length of the longest burst.
pub const SECOND_NS: u64 = 1_000_000_000;

/// Rate of one sender.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    /// Theoretical arrival time.
    tat_ns: u64,
}

impl Rate {
    /// Admits a message. Returns false and changes nothing if the message is above the rate.
    /// `now_ns` is a monotonic time. `per_second` 0 means no limit.
    pub fn admit(&mut self, now_ns: u64, per_second: u32) -> bool {
        if per_second == 0 {
            return true;
        }
        if self.wait_ns(now_ns, per_second) > 0 {
            return false;
        }
        self.tat_ns = self.tat_ns.max(now_ns) + SECOND_NS / u64::from(per_second);
        true
    }

    /// Nanoseconds until the next message is admitted; 0 = it is admitted now.
    pub fn wait_ns(&self, now_ns: u64, per_second: u32) -> u64 {
        let Some(step) = SECOND_NS.checked_div(u64::from(per_second)) else {
            return 0;
        };
        (self.tat_ns.saturating_sub(now_ns) + step).saturating_sub(SECOND_NS)
    }

    /// Charges an expensive request as `messages` further messages, at most one burst.
    pub fn charge(&mut self, now_ns: u64, per_second: u32, messages: u64) {
        if let Some(step) = SECOND_NS.checked_div(u64::from(per_second)) {
            let tat_ns = self.tat_ns.max(now_ns) + step * messages;
            self.tat_ns = tat_ns.min(now_ns + SECOND_NS);
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
        assert!(!admit(199_999), "200 us replenish one message");
        assert!(admit(200_000));
        assert!(!admit(200_000));
        assert_eq!(
            rate.wait_ns(250_000, 5_000),
            150_000,
            "wait until the next message"
        );
        let mut admit = |at_ns| rate.admit(at_ns, 5_000);
        let admitted = (0..20_000u64).filter(|i| admit(SECOND_NS + i * 100_000));
        // A full burst, then 5,000 per second over two seconds.
        let admitted = admitted.count();
        assert!((14_990..=15_000).contains(&admitted), "{admitted}");
        let mut charged = Rate::default();
        charged.charge(0, 5_000, 4_999);
        assert!(charged.admit(0, 5_000) && !charged.admit(0, 5_000));
        charged.charge(0, 5_000, 5_000);
        assert!(
            charged.admit(SECOND_NS, 5_000),
            "the charge is at most one burst"
        );
        let mut free = Rate::default();
        free.charge(0, 0, 5);
        assert!((0..10_000).all(|_| free.admit(0, 0)));
    }
}
