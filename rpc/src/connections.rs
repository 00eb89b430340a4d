//! Connection limits of this process's ports: in total, per port and per address.
//!
//! A connection costs a file descriptor, and journal, stores and clients of this process need
//! theirs. So the limits reserve part of the descriptor limit. A connection above a limit is closed
//! at once: the newest loses, open ones continue. Cost: one lock per connection.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors reserved for files, stores and outgoing calls: a quarter of the limit, and at least
/// this. A running platform has 120 to 160 open.
const RESERVE_MIN: u64 = 256;
/// Minimum per-address limit, if the total allows it.
const ADDRESS_MIN: usize = 512;
/// Absolute limit of a process: from here memory is the cost (16 KiB to 64 KiB per connection).
const TOTAL_MAX: u64 = 16_384;
/// Refusals are logged once per interval.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// Counter of refused connections, label `bound`.
pub const REFUSED: &str = "rpc_connections_refused_total";
/// Gauge of open connections.
pub const OPEN: &str = "rpc_connections";

/// Raises the soft limit of open files to the hard limit and returns it. Call before the first port
/// opens.
///
/// # Errors
/// The system refuses.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        setrlimit(Resource::Nofile, raised)?;
    }
    Ok(descriptor_limit())
}

/// The current limit of open files.
fn descriptor_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The limit that a connection exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Total,
    Port,
    Address,
}

impl Bound {
    pub fn name(self) -> &'static str {
        match self {
            Bound::Total => "total",
            Bound::Port => "port",
            Bound::Address => "address",
        }
    }
}

/// Connections of several ports under one budget. Clones share it.
#[derive(Clone, Debug)]
pub struct Connections(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    total_max: usize,
    port_max: usize,
    address_max: usize,
    open: Mutex<Open>,
    refusals: Refusals,
}

#[derive(Debug, Default)]
struct Open {
    total: usize,
    ports: Vec<usize>,
    addresses: HashMap<IpAddr, usize>,
}

impl Connections {
    /// The budget of all ports of this process, from the descriptor limit at the first call.
    pub fn process() -> Self {
        static PROCESS: LazyLock<Connections> =
            LazyLock::new(|| Connections::within(descriptor_limit()));
        PROCESS.clone()
    }

    /// A separate budget for a limit of `descriptors`.
    pub fn within(descriptors: u64) -> Self {
        let reserve = (descriptors / 4).max(RESERVE_MIN).min(descriptors / 2);
        let total = (descriptors - reserve).min(TOTAL_MAX) as usize;
        let share = |part: usize| part.max(ADDRESS_MIN).min(total);
        // A port leaves room for other ports, an address for other addresses.
        Self::of(total, share(total / 4 * 3), share(total / 4))
    }

    /// A budget with these limits.
    pub fn of(total_max: usize, port_max: usize, address_max: usize) -> Self {
        Connections(Arc::new(Budget {
            total_max,
            port_max,
            address_max,
            open: Mutex::default(),
            refusals: Refusals::default(),
        }))
    }

    /// Adds a port.
    pub(crate) fn port(&self) -> Port {
        let mut open = self.0.lock();
        open.ports.push(0);
        Port {
            budget: self.0.clone(),
            index: open.ports.len() - 1,
        }
    }
}

impl Budget {
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One port's share.
pub(crate) struct Port {
    budget: Arc<Budget>,
    index: usize,
}

impl Port {
    /// Counts a connection until the permit is dropped. `None` above a limit: the refusal is
    /// counted and logged.
    pub(crate) fn admit(&self, from: IpAddr) -> Option<Permit> {
        let address = source_of(from);
        let budget = &self.budget;
        let mut open = budget.lock();
        let own = open.addresses.get(&address).copied().unwrap_or(0);
        let met = [
            (own >= budget.address_max, Bound::Address),
            (open.ports[self.index] >= budget.port_max, Bound::Port),
            (open.total >= budget.total_max, Bound::Total),
        ];
        if let Some((_, bound)) = met.into_iter().find(|(is_met, _)| *is_met) {
            drop(open);
            budget.refusals.note(bound, address);
            return None;
        }
        open.total += 1;
        open.ports[self.index] += 1;
        open.addresses.insert(address, own + 1);
        ::metrics::gauge!(OPEN).increment(1.0);
        Some(Permit {
            budget: budget.clone(),
            port: self.index,
            address,
        })
    }
}

/// An admitted connection.
pub(crate) struct Permit {
    budget: Arc<Budget>,
    port: usize,
    address: IpAddr,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.budget.lock();
        open.total -= 1;
        open.ports[self.port] -= 1;
        let left = open.addresses.get(&self.address).copied().unwrap_or(1) - 1;
        match left {
            0 => open.addresses.remove(&self.address),
            left => open.addresses.insert(self.address, left),
        };
        ::metrics::gauge!(OPEN).decrement(1.0);
    }
}

/// The unit of the per-address limit. For IPv6 the /64 network, since one machine owns all of it.
fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = address.to_bits() & (u128::MAX << 64);
            Ipv6Addr::from_bits(network).into()
        }
        address => address,
    }
}

#[derive(Debug, Default)]
struct Refusals {
    since_logged: AtomicU64,
    logged_at: Mutex<Option<Instant>>,
}

impl Refusals {
    fn note(&self, bound: Bound, address: IpAddr) {
        ::metrics::counter!(REFUSED, "bound" => bound.name()).increment(1);
        self.since_logged.fetch_add(1, Ordering::Relaxed);
        let mut logged_at = self
            .logged_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if logged_at.is_some_and(|at| at.elapsed() < LOG_EVERY) {
            return;
        }
        *logged_at = Some(Instant::now());
        tracing::warn!(
            bound = bound.name(),
            %address,
            connections = self.since_logged.swap(0, Ordering::Relaxed),
            "closing connections above the limit"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(descriptors: u64) -> (usize, usize, usize) {
        let Connections(budget) = Connections::within(descriptors);
        (budget.total_max, budget.port_max, budget.address_max)
    }

    #[test]
    fn bounds_follow_the_limit_and_leave_a_reserve() {
        assert_eq!(bounds(128), (64, 64, 64));
        assert_eq!(bounds(1_024), (768, 576, 512));
        assert_eq!(bounds(4_096), (3_072, 2_304, 768));
        assert_eq!(bounds(1 << 20), (16_384, 12_288, 4_096));
        assert_eq!(bounds(u64::MAX).0, 16_384);
    }

    #[test]
    fn a_permit_is_granted_at_the_limit_and_refused_above_it() {
        let connections = Connections::of(4, 3, 2);
        let (first, second) = (connections.port(), connections.port());
        let [a, b, c] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let one = first.admit(a).expect("below every bound");
        let _two = first.admit(a).expect("at the address's bound");
        assert!(second.admit(a).is_none(), "the address, on any port");
        let _three = first.admit(b).expect("at the port's bound");
        assert!(first.admit(c).is_none(), "the port");
        let _four = second.admit(c).expect("at the bound of all");
        assert!(second.admit(c).is_none(), "all ports together");
        drop(one);
        assert!(second.admit(a).is_some());
    }

    #[test]
    fn an_ipv6_network_counts_as_one_address() {
        let connections = Connections::of(9, 9, 1);
        let port = connections.port();
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let _held = port.admit(address("2001:db8::1")).expect("the first");
        assert!(port.admit(address("2001:db8::2")).is_none());
        assert!(port.admit(address("2001:db8:0:1::1")).is_some());
        let _v4 = port.admit(address("::ffff:10.0.0.1")).expect("another");
        assert!(port.admit(address("10.0.0.1")).is_none());
    }
}
