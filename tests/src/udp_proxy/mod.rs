//! A UDP proxy that treats datagrams badly: between a client and a server it drops, delays, reorders
//! and duplicates them, each direction by a seeded generator of its own.
//!
//! Each client address has its own upstream socket, so the server sees one peer per client. Upstream
//! sockets are not connected: a server that is gone for a while costs the datagrams sent meanwhile
//! and nothing else. What waits is bounded: [`WAITING_MAX`] datagrams per direction, [`FLOWS_MAX`]
//! client addresses; what is beyond is dropped, as a router does.
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

/// Datagrams that wait in one direction of one client.
pub const WAITING_MAX: usize = 1_024;
/// Client addresses at once; the oldest is forgotten for a new one.
pub const FLOWS_MAX: usize = 64;
const DATAGRAM_MAX: usize = 65_536;

/// How often what happens to a datagram, in parts per million of all.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub drop_ppm: u32,
    pub delay_ppm: u32,
    /// Longest delay; each is uniform up to it.
    pub delay_max: Duration,
    pub reorder_ppm: u32,
    pub duplicate_ppm: u32,
}

/// What has happened to datagrams, both directions together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub received: u64,
    /// Sent on, second copies included.
    pub passed: u64,
    pub dropped: u64,
    pub delayed: u64,
    /// Overtaken by the datagram after it.
    pub reordered: u64,
    pub duplicated: u64,
    /// Dropped because too many waited, or the socket took no more.
    pub overflowed: u64,
    /// Dropped while the line was silent or cut.
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

/// What all tasks of a proxy share.
struct Shared {
    server: SocketAddr,
    faults: Faults,
    seed: u64,
    downstream: Arc<UdpSocket>,
    is_silent: AtomicBool,
    /// Flows begun before this number are cut.
    cut_before: AtomicU64,
    counters: Counters,
}

/// A running proxy; dropped, it forwards nothing any more.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// Flows begun so far.
    flows: Arc<AtomicU64>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    /// A proxy in front of `server` on a loopback port of its own.
    ///
    /// # Panics
    /// There is no UDP port.
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

    /// Where clients send to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From here on nothing passes, until [`Proxy::restore`].
    pub fn silence(&self) {
        self.shared.is_silent.store(true, Relaxed);
    }

    pub fn restore(&self) {
        self.shared.is_silent.store(false, Relaxed);
    }

    /// Nothing passes any more to or from the client addresses of now; other addresses pass.
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

/// A client address with its upstream socket; its tasks end with it.
struct Flow {
    to_server: mpsc::Sender<Bytes>,
    _tasks: JoinSet<()>,
}

/// Reads what clients send and gives each address its flow.
async fn accept(shared: Arc<Shared>, begun: Arc<AtomicU64>) {
    let mut flows: HashMap<SocketAddr, Flow> = HashMap::new();
    let mut oldest = VecDeque::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        // An error is that of one datagram.
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
