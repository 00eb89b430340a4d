//! A UDP proxy that drops, delays, reorders and duplicates datagrams between clients and a server.
//! Each direction of each client has its own seeded generator.
//!
//! Each client address has its own upstream socket, so the server sees one peer per client.
//! Upstream sockets are unconnected: while the server is down an ICMP error breaks no flow, and
//! only the datagrams of that time are lost. Each direction queues at most [`WAITING_MAX`] received
//! and as many delayed datagrams; a full queue drops new ones. The proxy keeps at most
//! [`FLOWS_MAX`] client addresses; a new address evicts the oldest one.
//!
//! | file | what |
//! |---|---|
//! | `direction` | one direction of one client |

mod direction;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use self::direction::Direction;
use crate::flow::Random;

/// Maximum datagrams received and not yet processed, and maximum delayed datagrams, per client and
/// direction.
pub const WAITING_MAX: usize = 1_024;
/// Maximum client addresses; a new one evicts the oldest.
pub const FLOWS_MAX: usize = 64;
const DATAGRAM_MAX: usize = 65_536;

/// Probability of each fault, in parts per million of all datagrams.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub drop_ppm: u32,
    pub delay_ppm: u32,
    /// Longest delay; delays are uniform up to it.
    pub delay_max: Duration,
    pub reorder_ppm: u32,
    pub duplicate_ppm: u32,
}

/// Counters of datagrams, both directions together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub received: u64,
    /// Forwarded, duplicates included.
    pub forwarded: u64,
    pub dropped: u64,
    pub delayed: u64,
    /// Overtaken by the datagram after it.
    pub reordered: u64,
    pub duplicated: u64,
    /// Dropped because a queue was full, a socket could not be made, or a send failed.
    pub overflowed: u64,
    /// Dropped while the proxy forwarded nothing or the client address was blocked.
    pub blocked: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.received += other.received;
        self.forwarded += other.forwarded;
        self.dropped += other.dropped;
        self.delayed += other.delayed;
        self.reordered += other.reordered;
        self.duplicated += other.duplicated;
        self.overflowed += other.overflowed;
        self.blocked += other.blocked;
    }
}

#[derive(Default)]
struct Counters {
    received: AtomicU64,
    forwarded: AtomicU64,
    dropped: AtomicU64,
    delayed: AtomicU64,
    reordered: AtomicU64,
    duplicated: AtomicU64,
    overflowed: AtomicU64,
    blocked: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// State shared by all tasks of a proxy.
struct Shared {
    server: SocketAddr,
    faults: Faults,
    seed: u64,
    downstream: Arc<UdpSocket>,
    is_blackhole: AtomicBool,
    /// Flows with a lower number are blocked.
    blocked_before: AtomicU64,
    counters: Counters,
}

/// A running proxy; dropping it stops forwarding.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    flows_created: Arc<AtomicU64>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    /// Starts a proxy for `server` on a loopback port.
    ///
    /// # Panics
    /// If no UDP port is free.
    pub async fn start(server: SocketAddr, faults: Faults, seed: u64) -> Self {
        let downstream = UdpSocket::bind("127.0.0.1:0").await.expect("a UDP port");
        let address = downstream.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            server,
            faults,
            seed,
            downstream: Arc::new(downstream),
            is_blackhole: AtomicBool::new(false),
            blocked_before: AtomicU64::new(0),
            counters: Counters::default(),
        });
        let flows_created = Arc::<AtomicU64>::default();
        let mut tasks = JoinSet::new();
        tasks.spawn(dispatch(shared.clone(), flows_created.clone()));
        Self {
            address,
            shared,
            flows_created,
            _tasks: tasks,
        }
    }

    /// Address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Forwards nothing until [`Proxy::restore`].
    pub fn blackhole(&self) {
        self.shared.is_blackhole.store(true, Relaxed);
    }

    pub fn restore(&self) {
        self.shared.is_blackhole.store(false, Relaxed);
    }

    /// Drops all further datagrams of the current client addresses; new addresses are forwarded.
    pub fn block_current_clients(&self) {
        self.shared
            .blocked_before
            .store(self.flows_created.load(Relaxed), Relaxed);
    }

    pub fn counts(&self) -> Counts {
        let counters = &self.shared.counters;
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        Counts {
            received: of(&counters.received),
            forwarded: of(&counters.forwarded),
            dropped: of(&counters.dropped),
            delayed: of(&counters.delayed),
            reordered: of(&counters.reordered),
            duplicated: of(&counters.duplicated),
            overflowed: of(&counters.overflowed),
            blocked: of(&counters.blocked),
        }
    }
}

impl Shared {
    fn is_blocked(&self, flow: u64) -> bool {
        self.is_blackhole.load(Relaxed) || flow < self.blocked_before.load(Relaxed)
    }
}

/// A client address with its upstream socket; dropping it ends its tasks.
struct Flow {
    to_server: mpsc::Sender<Bytes>,
    _tasks: JoinSet<()>,
}

/// Reads datagrams of clients and passes each to the flow of its address.
async fn dispatch(shared: Arc<Shared>, flows_created: Arc<AtomicU64>) {
    let mut flows: HashMap<SocketAddr, Flow> = HashMap::new();
    let mut by_age = VecDeque::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        // A receive error (ICMP) concerns one earlier datagram only.
        let Ok((length, client)) = shared.downstream.recv_from(&mut buffer).await else {
            continue;
        };
        if !flows.contains_key(&client) {
            if flows.len() >= FLOWS_MAX
                && let Some(first) = by_age.pop_front()
            {
                flows.remove(&first);
            }
            let number = flows_created.fetch_add(1, Relaxed);
            let Some(flow) = Flow::begin(&shared, number, client).await else {
                count(&shared.counters.overflowed);
                continue;
            };
            flows.insert(client, flow);
            by_age.push_back(client);
        }
        let datagram = Bytes::copy_from_slice(&buffer[..length]);
        if flows[&client].to_server.try_send(datagram).is_err() {
            count(&shared.counters.overflowed);
        }
    }
}

impl Flow {
    async fn begin(shared: &Arc<Shared>, number: u64, client: SocketAddr) -> Option<Self> {
        let upstream = Arc::new(UdpSocket::bind("127.0.0.1:0").await.ok()?);
        let mut tasks = JoinSet::new();
        let mut start = |socket: Arc<UdpSocket>, to: SocketAddr, index: u64| {
            let (sender, receiver) = mpsc::channel(WAITING_MAX);
            let seed = shared.seed ^ (number << 1 | index).wrapping_mul(0x9E37);
            let direction = Direction::new(shared.clone(), number, Random::new(seed), socket, to);
            tasks.spawn(direction.run(receiver));
            sender
        };
        let to_server = start(upstream.clone(), shared.server, 0);
        let to_client = start(shared.downstream.clone(), client, 1);
        let shared = shared.clone();
        tasks.spawn(async move {
            let mut buffer = vec![0; DATAGRAM_MAX];
            loop {
                let Ok((length, _)) = upstream.recv_from(&mut buffer).await else {
                    continue;
                };
                if to_client
                    .try_send(Bytes::copy_from_slice(&buffer[..length]))
                    .is_err()
                {
                    count(&shared.counters.overflowed);
                }
            }
        });
        Some(Self {
            to_server,
            _tasks: tasks,
        })
    }
}
