//! When the bank is called, how often and for how long (D30, R127); the circuit breaker, pure.
//!
//! ```text
//! closed --n failures in a row--> open --time is up--> one probe --ok--> closed
//!                                   ^-----------failed----+
//! ```

use serde::{Deserialize, Serialize};

/// Limits of outgoing calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClientPolicy {
    pub connect_timeout_ms: u64,
    /// One attempt, connect included.
    pub call_timeout_ms: u64,
    /// Attempts of a call that may be repeated, the first one included.
    pub tries: u32,
    /// Pause before the second attempt; doubles.
    pub retry_pause_ms: u64,
    /// Failures in a row that open the breaker.
    pub breaker_failures: u32,
    /// How long it stays open.
    pub breaker_open_ms: u64,
}

impl Default for ClientPolicy {
    fn default() -> Self {
        ClientPolicy {
            connect_timeout_ms: 2_000,
            call_timeout_ms: 10_000,
            tries: 3,
            retry_pause_ms: 200,
            breaker_failures: 5,
            breaker_open_ms: 10_000,
        }
    }
}

/// Whether calls are let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breaker {
    Closed {
        failures: u32,
    },
    /// `probing`: the one call that may test the water is under way.
    Open {
        until_us: i64,
        probing: bool,
    },
}

impl Default for Breaker {
    fn default() -> Self {
        Breaker::Closed { failures: 0 }
    }
}

impl Breaker {
    /// May a call go out now? If it may, its end must be told with [`Breaker::record`].
    pub fn admit(&mut self, now_us: i64) -> bool {
        match self {
            Breaker::Closed { .. } => true,
            Breaker::Open { until_us, probing } => {
                let admitted = !*probing && now_us >= *until_us;
                *probing |= admitted;
                admitted
            }
        }
    }

    pub fn record(&mut self, succeeded: bool, now_us: i64, policy: &ClientPolicy) {
        if succeeded {
            *self = Breaker::default();
            return;
        }
        let failures = match self {
            Breaker::Closed { failures } => failures.saturating_add(1),
            Breaker::Open { .. } => policy.breaker_failures,
        };
        *self = if failures >= policy.breaker_failures {
            let open_us = i64::try_from(policy.breaker_open_ms * 1_000).unwrap_or(i64::MAX);
            Breaker::Open {
                until_us: now_us.saturating_add(open_us),
                probing: false,
            }
        } else {
            Breaker::Closed { failures }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R127
    #[test]
    fn r127_the_breaker_opens_at_its_bound_and_lets_one_probe_through() {
        let policy = ClientPolicy {
            breaker_failures: 3,
            breaker_open_ms: 1,
            ..ClientPolicy::default()
        };
        let mut breaker = Breaker::default();
        for _ in 0..2 {
            assert!(breaker.admit(0));
            breaker.record(false, 0, &policy);
        }
        assert!(breaker.admit(0), "two failures are one below the bound");
        breaker.record(false, 0, &policy);
        assert!(!breaker.admit(999));
        assert!(breaker.admit(1_000));
        assert!(!breaker.admit(1_000), "one probe at a time");
        breaker.record(false, 1_000, &policy);
        assert!(!breaker.admit(1_999));
        assert!(breaker.admit(2_000));
        breaker.record(true, 2_000, &policy);
        assert_eq!(breaker, Breaker::default());
    }
}
