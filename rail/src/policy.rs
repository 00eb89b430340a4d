//! Limits of outgoing bank calls (D30, R127), and a pure circuit breaker.
//!
//! ```text
//! closed --n consecutive failures--> open --pause is over--> one probe --ok--> closed
//!                                     ^-------------failed-----+
//! ```

use serde::{Deserialize, Serialize};

/// Limits of outgoing calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClientPolicy {
    pub connect_timeout_ms: u64,
    /// One attempt, including connect.
    pub call_timeout_ms: u64,
    /// Attempts of a repeatable call, including the first.
    pub tries: u32,
    /// Pause before the second attempt; doubles with each further one.
    pub retry_pause_ms: u64,
    /// Consecutive failures that open the breaker.
    pub breaker_failures: u32,
    /// How long the breaker stays open.
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
            // Payments resume within 10 s after an outage ends.
            breaker_open_ms: 5_000,
        }
    }
}

/// State of the circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breaker {
    Closed {
        failures: u32,
    },
    /// `probing`: the probe call is in flight.
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

/// An admitted call. Only an admitted call records a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// The breaker was closed.
    Normal,
    /// The probe call of an open breaker.
    Probe,
}

impl Breaker {
    /// `None`: no call is allowed now. Otherwise the result must reach [`Breaker::record`].
    pub fn admit(&mut self, now_us: i64) -> Option<Admitted> {
        match self {
            Breaker::Closed { .. } => Some(Admitted::Normal),
            Breaker::Open { until_us, probing } => {
                if *probing || now_us < *until_us {
                    return None;
                }
                *probing = true;
                Some(Admitted::Probe)
            }
        }
    }

    /// Records the result of an admitted call.
    pub fn record(
        &mut self,
        admitted: Admitted,
        succeeded: bool,
        now_us: i64,
        policy: &ClientPolicy,
    ) {
        if succeeded {
            *self = Breaker::default();
            return;
        }
        let failures = match (&*self, admitted) {
            (Breaker::Closed { failures }, _) => failures.saturating_add(1),
            (Breaker::Open { .. }, Admitted::Probe) => policy.breaker_failures,
            // Sent before the breaker opened: a late failure must not extend the open period.
            (Breaker::Open { .. }, Admitted::Normal) => return,
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
    use super::{
        Admitted::{Normal, Probe},
        *,
    };

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
            assert_eq!(breaker.admit(0), Some(Normal));
            breaker.record(Normal, false, 0, &policy);
        }
        assert_eq!(
            breaker.admit(0),
            Some(Normal),
            "two failures are one below the bound"
        );
        breaker.record(Normal, false, 0, &policy);
        assert_eq!(breaker.admit(999), None);
        assert_eq!(breaker.admit(1_000), Some(Probe));
        assert_eq!(breaker.admit(1_000), None, "one probe at a time");
        breaker.record(Probe, false, 1_000, &policy);
        assert_eq!(breaker.admit(1_999), None);
        assert_eq!(breaker.admit(2_000), Some(Probe));
        breaker.record(Probe, true, 2_000, &policy);
        assert_eq!(breaker, Breaker::default());
    }
    // rows: R127
    #[test]
    fn r127_late_failure_does_not_extend_the_open_breaker() {
        let policy = ClientPolicy {
            breaker_failures: 1,
            breaker_open_ms: 1,
            ..ClientPolicy::default()
        };
        let mut breaker = Breaker::default();
        let slow = breaker.admit(0).unwrap();
        let failed = breaker.admit(0).unwrap();
        breaker.record(failed, false, 0, &policy);
        breaker.record(slow, false, 900, &policy);
        assert_eq!(breaker.admit(1_000), Some(Probe));
        breaker.record(slow, false, 1_000, &policy);
        assert_eq!(breaker.admit(1_000), None, "the probe is still under way");
    }
}
