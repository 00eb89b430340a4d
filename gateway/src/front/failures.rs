//! Counts of failed logins (`design.md` 7). The front reads them for each new connection, possibly
//! on the hot thread: it never waits for the lock, and each call under the lock costs a bounded
//! amount.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rpc::connections::source_of;

/// Window in which failed logins are counted.
const WINDOW: Duration = Duration::from_secs(60);
/// An address is locked out after this many times the failures that lock out a session name, so
/// that other users at the address can log in meanwhile.
const NAMES_PER_ADDRESS: u32 = 10;
/// Maximum number of counts. While it is reached, new names and addresses are not counted.
const COUNTED_MAX: usize = 131_072;
/// Maximum expired counts that a call drops. A call adds two counts at most, so that they do not
/// accumulate.
const EXPIRED_PER_CALL: usize = 16;

/// Counts failed authentications by address, and by address and session name. An IPv6 /64 network
/// counts as one address.
#[derive(Default)]
pub struct Failures(Mutex<Counts>);

/// An address, or a session name at it. An IPv6 /64 network is one address: see [`name_at`].
type Name = (IpAddr, Option<Arc<str>>);

fn name_at(address: IpAddr, name: Option<&str>) -> Name {
    (source_of(address), name.map(Arc::from))
}

#[derive(Default)]
struct Counts {
    /// Failures, and the time of the first one.
    rows: HashMap<Name, (u32, Instant)>,
    /// The rows by the time of the first failure, and earlier times of rows that have begun again.
    begun: VecDeque<(Name, Instant)>,
}

impl Failures {
    /// True when logins from the address, under the session name if one is given, have failed too
    /// often within [`WINDOW`].
    pub fn is_locked_out(&self, address: IpAddr, name: Option<&str>, failures_max: u32) -> bool {
        let key = name_at(address, name);
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.is_locked_out(Instant::now(), &key, failures_max)
    }

    /// As [`Failures::is_locked_out`] of an address, but never waits: false while another thread
    /// has the lock. The login check of such a connection finds the lock-out.
    pub fn is_known_locked_out(&self, now: Instant, address: IpAddr, failures_max: u32) -> bool {
        let counts = match self.0.try_lock() {
            Ok(counts) => counts,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        counts.is_locked_out(now, &name_at(address, None), failures_max)
    }

    /// Counts a failed authentication.
    pub fn record(&self, address: IpAddr, name: &str) {
        let keys = [name_at(address, None), name_at(address, Some(name))];
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.record(Instant::now(), keys);
    }
}

impl Counts {
    fn is_locked_out(&self, now: Instant, key: &Name, failures_max: u32) -> bool {
        let failures_max = match key.1 {
            Some(_) => failures_max,
            None => failures_max.saturating_mul(NAMES_PER_ADDRESS),
        };
        self.rows.get(key).is_some_and(|(count, since)| {
            *count >= failures_max && now.saturating_duration_since(*since) < WINDOW
        })
    }

    fn record(&mut self, now: Instant, keys: [Name; 2]) {
        self.drop_expired(now);
        for key in keys {
            if let Some((count, since)) = self.rows.get_mut(&key) {
                if now.saturating_duration_since(*since) < WINDOW {
                    *count += 1;
                    continue;
                }
            } else if self.rows.len() >= COUNTED_MAX {
                continue;
            }
            self.rows.insert(key.clone(), (1, now));
            self.begun.push_back((key, now));
        }
    }

    /// Drops up to [`EXPIRED_PER_CALL`] expired counts.
    fn drop_expired(&mut self, now: Instant) {
        for _ in 0..EXPIRED_PER_CALL {
            let oldest = self.begun.front().map(|(_, since)| *since);
            if oldest.is_none_or(|since| now.saturating_duration_since(since) < WINDOW) {
                return;
            }
            let Some((key, since)) = self.begun.pop_front() else {
                return;
            };
            // A row that has begun again has a later entry.
            let row = self.rows.get(&key);
            if row.is_some_and(|(_, begun)| *begun == since) {
                self.rows.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn keys(name: &str) -> [Name; 2] {
        [(ADDRESS, None), (ADDRESS, Some(Arc::from(name)))]
    }

    /// The lock's holder may be a thread of low priority that has lost its core.
    #[test]
    fn a_new_connection_does_not_wait_while_failures_are_counted() {
        let failures = Failures::default();
        for _ in 0..NAMES_PER_ADDRESS {
            failures.record(ADDRESS, "a");
        }
        let now = Instant::now();
        assert!(failures.is_known_locked_out(now, ADDRESS, 1));
        let counting = failures.0.lock().expect("not poisoned");
        assert!(!failures.is_known_locked_out(now, ADDRESS, 1));
        drop(counting);
        assert!(failures.is_known_locked_out(now, ADDRESS, 1));
        assert!(failures.is_locked_out(ADDRESS, None, 1));
    }

    #[test]
    fn each_call_drops_a_bounded_number_of_expired_counts_until_none_is_left() {
        const NAMES: usize = 1_000;
        let mut counts = Counts::default();
        let begun = Instant::now();
        for name in 0..NAMES {
            counts.record(begun, keys(&name.to_string()));
        }
        assert_eq!(counts.rows.len(), NAMES + 1);
        let later = begun + WINDOW;
        for _ in 0..NAMES.div_ceil(EXPIRED_PER_CALL) + 1 {
            let before = counts.rows.len();
            counts.record(later, keys("new"));
            assert!(counts.rows.len() + EXPIRED_PER_CALL >= before);
        }
        assert_eq!((counts.rows.len(), counts.begun.len()), (2, 2));
        let calls = u32::try_from(NAMES.div_ceil(EXPIRED_PER_CALL) + 1).expect("a few");
        assert!(counts.is_locked_out(later, &keys("new")[1], calls));
        assert!(!counts.is_locked_out(later, &keys("new")[1], calls + 1));
    }

    #[test]
    fn a_count_begins_again_after_its_window() {
        let mut counts = Counts::default();
        let begun = Instant::now();
        let [_, name] = keys("a");
        for second in 0..5 {
            counts.record(begun + Duration::from_secs(second), keys("a"));
        }
        let last = begun + WINDOW - Duration::from_millis(1);
        assert!(counts.is_locked_out(last, &name, 5));
        assert!(!counts.is_locked_out(begun + WINDOW, &name, 5));
        counts.record(begun + WINDOW, keys("a"));
        assert!(counts.is_locked_out(begun + WINDOW, &name, 1));
        assert!(!counts.is_locked_out(begun + WINDOW, &name, 2));
    }

    #[test]
    fn failed_logins_from_an_ipv6_network_count_as_those_of_one_address() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let failures = Failures::default();
        for host in 1..=NAMES_PER_ADDRESS {
            failures.record(address(&format!("2001:db8::{host}")), "desk");
        }
        let is_locked_out = |text: &str| {
            let (at, now) = (address(text), Instant::now());
            let is_named = failures.is_locked_out(at, Some("desk"), NAMES_PER_ADDRESS);
            (is_named, failures.is_known_locked_out(now, at, 1))
        };
        assert_eq!(is_locked_out("2001:db8::ffff"), (true, true));
        let other_network = is_locked_out("2001:db8:0:1::1");
        assert_eq!(other_network, (false, false));
    }
}
