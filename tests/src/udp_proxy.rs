//! A UDP proxy that treats datagrams badly: between a client and a server it drops, delays, reorders
//! and duplicates them, each direction by a seeded generator of its own.
//!
//! Each client address has its own upstream socket, so the server sees one peer per client. Upstream
//! sockets are not connected: a server that is gone for a while costs the datagrams sent meanwhile
//! and nothing else. What waits is bounded: [`WAITING_MAX`] datagrams per direction, [`FLOWS_MAX`]
//! client addresses; what is beyond is dropped, as a router does.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::flow::Random;

/// Datagrams that wait in one direction of one client.
pub const WAITING_MAX: usize = 1_024;
/// Client addresses at once; the oldest is forgotten for a new one.
pub const FLOWS_MAX: usize = 64;
/// How long a datagram is held back for the next one to overtake it.
const HELD_MAX: Duration = Duration::from_millis(20);
const DATAGRAM_MAX: usize = 65_536;
const MILLION: u64 = 1_000_000;

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
            let lane = Lane {
                shared: shared.clone(),
                flow: number,
                random: Random::new(shared.seed ^ (number << 1 | direction).wrapping_mul(0x9E37)),
                socket,
                to,
                waiting: BinaryHeap::new(),
                ticket: 0,
                held: None,
            };
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

/// One direction of one client.
struct Lane {
    shared: Arc<Shared>,
    flow: u64,
    random: Random,
    socket: Arc<UdpSocket>,
    to: SocketAddr,
    /// Delayed datagrams by the moment they are due; the ticket keeps the order of equal moments.
    waiting: BinaryHeap<Reverse<(Instant, u64, Bytes)>>,
    ticket: u64,
    /// Held back until the next one has passed, or this moment.
    held: Option<(Instant, Bytes)>,
}

impl Lane {
    async fn run(mut self, mut receiver: mpsc::Receiver<Bytes>) {
        loop {
            let waiting = self.waiting.peek().map(|Reverse((at, ..))| *at);
            let held = self.held.as_ref().map(|(at, _)| *at);
            let next = [waiting, held].into_iter().flatten().min();
            let due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                datagram = receiver.recv() => match datagram {
                    Some(datagram) => self.take(datagram).await,
                    None => return,
                },
                () = due => self.send_due().await,
            }
        }
    }

    fn happens(&mut self, ppm: u32) -> bool {
        self.random.below(MILLION) < u64::from(ppm)
    }

    async fn take(&mut self, datagram: Bytes) {
        let faults = self.shared.faults;
        count(&self.shared.counters.received);
        if self.happens(faults.drop_ppm) {
            return count(&self.shared.counters.dropped);
        }
        if self.happens(faults.duplicate_ppm) {
            count(&self.shared.counters.duplicated);
            self.pass(datagram.clone()).await;
        }
        self.pass(datagram).await;
    }

    async fn pass(&mut self, datagram: Bytes) {
        let faults = self.shared.faults;
        if self.happens(faults.delay_ppm) {
            if self.waiting.len() >= WAITING_MAX {
                return count(&self.shared.counters.overflowed);
            }
            let longest = u64::try_from(faults.delay_max.as_micros()).unwrap_or(u64::MAX);
            let delay = Duration::from_micros(1 + self.random.below(longest.max(1)));
            self.ticket += 1;
            let entry = (Instant::now() + delay, self.ticket, datagram);
            self.waiting.push(Reverse(entry));
            return count(&self.shared.counters.delayed);
        }
        if self.held.is_none() && self.happens(faults.reorder_ppm) {
            self.held = Some((Instant::now() + HELD_MAX, datagram));
            return;
        }
        self.send(&datagram).await;
        if let Some((_, overtaken)) = self.held.take() {
            count(&self.shared.counters.reordered);
            self.send(&overtaken).await;
        }
    }

    async fn send_due(&mut self) {
        let now = Instant::now();
        if self.held.as_ref().is_some_and(|(at, _)| *at <= now)
            && let Some((_, datagram)) = self.held.take()
        {
            self.send(&datagram).await;
        }
        while let Some(Reverse((at, ..))) = self.waiting.peek()
            && *at <= now
            && let Some(Reverse((.., datagram))) = self.waiting.pop()
        {
            self.send(&datagram).await;
        }
    }

    async fn send(&self, datagram: &[u8]) {
        let counters = &self.shared.counters;
        if self.shared.is_cut(self.flow) {
            return count(&counters.silenced);
        }
        match self.socket.send_to(datagram, self.to).await {
            Ok(_) => count(&counters.passed),
            Err(_) => count(&counters.overflowed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A server that keeps what it receives, and a client that sends to it through a proxy.
    struct Bench {
        server: UdpSocket,
        client: UdpSocket,
        proxy: Proxy,
    }

    impl Bench {
        async fn with(faults: Faults) -> Self {
            let server = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
            let client = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
            let proxy = Proxy::start(server.local_addr().expect("bound"), faults, 7).await;
            Self {
                server,
                client,
                proxy,
            }
        }

        async fn send(&self, number: u32) {
            let bytes = number.to_le_bytes();
            let sent = self.client.send_to(&bytes, self.proxy.address());
            sent.await.expect("sent");
        }

        /// Sends the numbers below `count`, few enough for every socket's buffer.
        async fn send_all(&self, count: u32) {
            for number in 0..count {
                self.send(number).await;
            }
        }

        async fn until(&self, done: impl Fn(&Counts) -> bool) -> Counts {
            let deadline = Instant::now() + PATIENCE;
            loop {
                let counts = self.proxy.counts();
                if done(&counts) {
                    return counts;
                }
                assert!(Instant::now() < deadline, "{counts:?}");
                tokio::task::yield_now().await;
            }
        }

        async fn receive(&self, count: usize) -> Vec<u32> {
            let mut numbers = Vec::new();
            while numbers.len() < count {
                numbers.push(number(&self.server).await.0);
            }
            numbers
        }
    }

    async fn number(socket: &UdpSocket) -> (u32, SocketAddr) {
        let mut bytes = [0; 4];
        let received = tokio::time::timeout(PATIENCE, socket.recv_from(&mut bytes)).await;
        let (length, from) = received.expect("in time").expect("a datagram");
        assert_eq!(length, 4);
        (u32::from_le_bytes(bytes), from)
    }

    #[tokio::test]
    async fn without_faults_everything_passes_both_ways_in_order() {
        let bench = Bench::with(Faults::default()).await;
        bench.send_all(150).await;
        let expected: Vec<u32> = (0..150).collect();
        assert_eq!(bench.receive(150).await, expected);
        bench.send(0).await;
        let (_, upstream) = number(&bench.server).await;
        for answer in 0..20u32 {
            let sent = bench.server.send_to(&answer.to_le_bytes(), upstream).await;
            sent.expect("sent");
            assert_eq!(number(&bench.client).await, (answer, bench.proxy.address()));
        }
        let expected = Counts {
            received: 171,
            passed: 171,
            ..Counts::default()
        };
        assert_eq!(bench.until(|counts| counts.passed >= 171).await, expected);
    }

    #[tokio::test]
    async fn datagrams_are_dropped_and_duplicated() {
        let faults = Faults {
            drop_ppm: 200_000,
            duplicate_ppm: 200_000,
            ..Faults::default()
        };
        let bench = Bench::with(faults).await;
        bench.send_all(150).await;
        let counts = bench.until(|counts| {
            counts.received == 150 && counts.passed + counts.dropped == 150 + counts.duplicated
        });
        let counts = counts.await;
        assert!(counts.dropped > 10 && counts.duplicated > 10, "{counts:?}");
        let passed = usize::try_from(counts.passed).expect("few");
        let mut received = bench.receive(passed).await;
        assert!(received.is_sorted(), "{received:?}");
        received.dedup();
        assert_eq!(received.len() as u64, 150 - counts.dropped);
    }

    #[tokio::test]
    async fn datagrams_are_overtaken_and_delayed_and_none_is_lost() {
        for faults in [
            Faults {
                reorder_ppm: 200_000,
                ..Faults::default()
            },
            Faults {
                delay_ppm: 300_000,
                delay_max: Duration::from_millis(20),
                ..Faults::default()
            },
        ] {
            let bench = Bench::with(faults).await;
            bench.send_all(150).await;
            let mut received = bench.receive(150).await;
            assert!(!received.is_sorted(), "{faults:?}");
            received.sort_unstable();
            assert_eq!(received, (0..150).collect::<Vec<u32>>());
            let counts = bench.proxy.counts();
            assert!(counts.reordered + counts.delayed > 10, "{counts:?}");
            assert_eq!((counts.dropped, counts.overflowed), (0, 0));
        }
    }

    #[tokio::test]
    async fn a_cut_client_stays_silent_and_another_address_passes() {
        let mut bench = Bench::with(Faults::default()).await;
        bench.send(1).await;
        assert_eq!(number(&bench.server).await.0, 1);
        bench.proxy.cut();
        bench.send(2).await;
        bench.client = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        bench.send(3).await;
        assert_eq!(number(&bench.server).await.0, 3);
        bench.proxy.silence();
        bench.send(4).await;
        bench.until(|counts| counts.silenced == 2).await;
        bench.proxy.restore();
        bench.send(5).await;
        assert_eq!(number(&bench.server).await.0, 5);
    }

    #[tokio::test]
    async fn a_server_that_comes_back_on_its_port_is_reached_again() {
        let mut bench = Bench::with(Faults::default()).await;
        bench.send(1).await;
        assert_eq!(number(&bench.server).await.0, 1);
        let address = bench.server.local_addr().expect("bound");
        drop(std::mem::replace(
            &mut bench.server,
            UdpSocket::bind("127.0.0.1:0").await.expect("a port"),
        ));
        bench.send_all(20).await;
        bench.until(|counts| counts.passed == 21).await;
        bench.server = UdpSocket::bind(address).await.expect("the port is free");
        bench.send(99).await;
        assert_eq!(number(&bench.server).await.0, 99);
    }
}
