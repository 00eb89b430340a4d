//! Connection limits of this process's ports: in total, per port and per address.
//!
//! Each connection uses a file descriptor. The journal, the stores and outgoing calls need
//! descriptors too, so the limits reserve part of the descriptor limit. A new connection above a
//! limit is closed at once; open connections are kept. Cost: one lock acquisition when a connection
//! opens and one when it closes.

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

/// Minimum number of descriptors reserved for files, stores and outgoing calls. The reserve is a
/// quarter of the limit if that is more, and at most half of it. A running platform has 120 to 160
/// open.
const RESERVE_MIN: u64 = 256;
/// Minimum of the per-port and the per-address limit, if the total allows it.
const SHARE_MIN: usize = 512;
/// Upper bound on the total limit. Above it memory is the scarce resource (16 to 64 KiB per
/// connection).
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
pub enum Limit {
    Total,
    Port,
    Address,
}

impl Limit {
    pub fn name(self) -> &'static str {
        match self {
            Limit::Total => "total",
            Limit::Port => "port",
            Limit::Address => "address",
        }
    }
}

/// Connection budget of several ports. Clones share it.
#[derive(Clone, Debug)]
pub struct ConnectionBudget(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    total_max: usize,
    port_max: usize,
    address_max: usize,
    open: Mutex<OpenCounts>,
    refusals: Refusals,
}

#[derive(Debug, Default)]
struct OpenCounts {
    total: usize,
    ports: Vec<usize>,
    addresses: HashMap<IpAddr, usize>,
}

impl ConnectionBudget {
    /// The budget of all ports of this process, from the descriptor limit at the first call.
    pub fn for_process() -> Self {
        static PROCESS: LazyLock<ConnectionBudget> =
            LazyLock::new(|| ConnectionBudget::for_descriptor_limit(descriptor_limit()));
        PROCESS.clone()
    }

    /// A separate budget for a limit of `descriptors`.
    pub fn for_descriptor_limit(descriptors: u64) -> Self {
        let reserve = (descriptors / 4).max(RESERVE_MIN).min(descriptors / 2);
        let total = (descriptors - reserve).min(TOTAL_MAX) as usize;
        let share = |connections: usize| connections.max(SHARE_MIN).min(total);
        // One port may use 3/4 of the total and one address 1/4, so that others can still connect.
        Self::with_limits(total, share(total / 4 * 3), share(total / 4))
    }

    /// A budget with these limits.
    pub fn with_limits(total_max: usize, port_max: usize, address_max: usize) -> Self {
        ConnectionBudget(Arc::new(Budget {
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
    fn lock(&self) -> MutexGuard<'_, OpenCounts> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Admits the connections of one port.
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
            (own >= budget.address_max, Limit::Address),
            (open.ports[self.index] >= budget.port_max, Limit::Port),
            (open.total >= budget.total_max, Limit::Total),
        ];
        if let Some((_, limit)) = met.into_iter().find(|(is_met, _)| *is_met) {
            drop(open);
            budget.refusals.note(limit, address);
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

/// The unit of limits per address. For IPv6 the /64 network, since one machine owns all of it.
pub fn source_of(address: IpAddr) -> IpAddr {
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
    fn note(&self, limit: Limit, address: IpAddr) {
        ::metrics::counter!(REFUSED, "bound" => limit.name()).increment(1);
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
            last_address = %address,
            refused_since_last_log = self.since_logged.swap(0, Ordering::Relaxed),
            "connections refused: {} limit reached",
            limit.name()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(descriptors: u64) -> (usize, usize, usize) {
        let ConnectionBudget(budget) = ConnectionBudget::for_descriptor_limit(descriptors);
        (budget.total_max, budget.port_max, budget.address_max)
    }

    #[test]
    fn limits_follow_the_descriptor_limit_and_leave_a_reserve() {
        assert_eq!(limits(128), (64, 64, 64));
        assert_eq!(limits(1_024), (768, 576, 512));
        assert_eq!(limits(4_096), (3_072, 2_304, 768));
        assert_eq!(limits(1 << 20), (16_384, 12_288, 4_096));
        assert_eq!(limits(u64::MAX).0, 16_384);
    }

    #[test]
    fn a_permit_is_granted_at_the_limit_and_refused_above_it() {
        let connections = ConnectionBudget::with_limits(4, 3, 2);
        let (first, second) = (connections.port(), connections.port());
        let [a, b, c] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let one = first.admit(a).expect("below every limit");
        let _two = first.admit(a).expect("at the address's limit");
        assert!(
            second.admit(a).is_none(),
            "expected a refusal: the address limit counts all ports"
        );
        let _three = first.admit(b).expect("at the port's limit");
        assert!(
            first.admit(c).is_none(),
            "expected a refusal: the port limit"
        );
        let _four = second.admit(c).expect("at the total limit");
        assert!(
            second.admit(c).is_none(),
            "expected a refusal: the total limit counts all ports"
        );
        drop(one);
        assert!(second.admit(a).is_some());
    }

    #[test]
    fn an_ipv6_network_counts_as_one_address() {
        let connections = ConnectionBudget::with_limits(9, 9, 1);
        let port = connections.port();
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let _held = port.admit(address("2001:db8::1")).expect("the first");
        assert!(port.admit(address("2001:db8::2")).is_none());
        assert!(port.admit(address("2001:db8:0:1::1")).is_some());
        let _v4 = port.admit(address("::ffff:10.0.0.1")).expect("another");
        assert!(port.admit(address("10.0.0.1")).is_none());
    }
}
