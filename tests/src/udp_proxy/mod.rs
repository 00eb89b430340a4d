//! A faulty UDP proxy: between a client and a server it drops, delays, reorders and duplicates
//! datagrams, each direction with its own seeded generator.
//!
//! Each client address has its own upstream socket, so the server sees one peer per client.
//! Upstream sockets are not connected: while the server is down, only the datagrams sent meanwhile
//! are lost. The queues are bounded: [`WAITING_MAX`] datagrams per direction, [`FLOWS_MAX`] client
//! addresses. The excess is dropped, as a router does.
//!
//! | file | what |
//! |---|---|
//! | `lane` | one direction of one client |

mod lane;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use self::lane::Lane;
use crate::flow::Random;

/// Most datagrams waiting in one direction of one client.
pub const WAITING_MAX: usize = 1_024;
/// Most client addresses at once; a new one evicts the oldest.
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
    pub passed: u64,
    pub dropped: u64,
    pub delayed: u64,
    /// Overtaken by the datagram after it.
    pub reordered: u64,
    pub duplicated: u64,
    /// Dropped because the queue was full, or the socket accepted no more.
    pub overflowed: u64,
    /// Dropped while the proxy was silent or the client cut.
    pub silenced: u64,
}

impl Counts {
    /// Sum of both.
    pub fn and(self, other: Self) -> Self {
        Self {
            received: self.received + other.received,
            passed: self.passed + other.passed,
            dropped: self.dropped + other.dropped,
            delayed: self.delayed + other.delayed,
            reordered: self.reordered + other.reordered,
            duplicated: self.duplicated + other.duplicated,
            overflowed: self.overflowed + other.overflowed,
            silenced: self.silenced + other.silenced,
        }
    }
}

#[derive(Default)]
struct Counters {
    received: AtomicU64,
    passed: AtomicU64,
    dropped: AtomicU64,
    delayed: AtomicU64,
    reordered: AtomicU64,
    duplicated: AtomicU64,
    overflowed: AtomicU64,
    silenced: AtomicU64,
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
    is_silent: AtomicBool,
    /// Flows with a lower number are cut.
    cut_before: AtomicU64,
    counters: Counters,
}

/// A running proxy; dropping it stops forwarding.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// Number of flows created.
    flows: Arc<AtomicU64>,
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
            is_silent: AtomicBool::new(false),
            cut_before: AtomicU64::new(0),
            counters: Counters::default(),
        });
        let flows = Arc::<AtomicU64>::default();
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(shared.clone(), flows.clone()));
        Self {
            address,
            shared,
            flows,
            _tasks: tasks,
        }
    }

    /// Address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Forwards nothing until [`Proxy::restore`].
    pub fn silence(&self) {
        self.shared.is_silent.store(true, Relaxed);
    }

    pub fn restore(&self) {
        self.shared.is_silent.store(false, Relaxed);
    }

    /// Cuts the current client addresses for good; new addresses pass.
    pub fn cut(&self) {
        self.shared
            .cut_before
            .store(self.flows.load(Relaxed), Relaxed);
    }

    pub fn counts(&self) -> Counts {
        let counters = &self.shared.counters;
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        Counts {
            received: of(&counters.received),
            passed: of(&counters.passed),
            dropped: of(&counters.dropped),
            delayed: of(&counters.delayed),
            reordered: of(&counters.reordered),
            duplicated: of(&counters.duplicated),
            overflowed: of(&counters.overflowed),
            silenced: of(&counters.silenced),
        }
    }
}

impl Shared {
    fn is_cut(&self, flow: u64) -> bool {
        self.is_silent.load(Relaxed) || flow < self.cut_before.load(Relaxed)
    }
}

/// A client address with its upstream socket; dropping it ends its tasks.
struct Flow {
    to_server: mpsc::Sender<Bytes>,
    _tasks: JoinSet<()>,
}

/// Reads datagrams of clients and passes each to the flow of its address.
async fn accept(shared: Arc<Shared>, begun: Arc<AtomicU64>) {
    let mut flows: HashMap<SocketAddr, Flow> = HashMap::new();
    let mut oldest = VecDeque::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        // An error concerns one datagram.
        let Ok((length, client)) = shared.downstream.recv_from(&mut buffer).await else {
            continue;
        };
        if !flows.contains_key(&client) {
            if flows.len() >= FLOWS_MAX
                && let Some(first) = oldest.pop_front()
            {
                flows.remove(&first);
            }
            let Some(flow) = Flow::begin(&shared, begun.fetch_add(1, Relaxed), client).await else {
                count(&shared.counters.overflowed);
                continue;
            };
            flows.insert(client, flow);
            oldest.push_back(client);
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
        let mut lane = |socket: Arc<UdpSocket>, to: SocketAddr, direction: u64| {
            let (sender, receiver) = mpsc::channel(WAITING_MAX);
            let seed = shared.seed ^ (number << 1 | direction).wrapping_mul(0x9E37);
            let lane = Lane::new(shared.clone(), number, Random::new(seed), socket, to);
            tasks.spawn(lane.run(receiver));
            sender
        };
        let to_server = lane(upstream.clone(), shared.server, 0);
        let to_client = lane(shared.downstream.clone(), client, 1);
        let counters = shared.clone();
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
                    count(&counters.counters.overflowed);
                }
            }
        });
        Some(Self {
            to_server,
            _tasks: tasks,
        })
    }
}
