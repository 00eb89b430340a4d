//! Plain UDP through the proxy: with each fault, and without faults.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::time::Instant;

use super::{Counts, Faults, Proxy};

const PATIENCE: Duration = Duration::from_secs(20);

/// A server that receives datagrams, and a client that sends to it through a proxy.
struct Bench {
    server: UdpSocket,
    client: UdpSocket,
    proxy: Proxy,
}

impl Bench {
    async fn with(faults: Faults) -> Self {
        Self::on("127.0.0.1:0", faults).await
    }

    /// As [`Bench::with`], with a server on this address.
    async fn on(server: &str, faults: Faults) -> Self {
        let server = UdpSocket::bind(server).await.expect("a port");
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

    /// Sends the numbers below `count`, which must fit every socket's buffer.
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
        forwarded: 171,
        ..Counts::default()
    };
    assert_eq!(
        bench.until(|counts| counts.forwarded >= 171).await,
        expected
    );
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
        counts.received == 150 && counts.forwarded + counts.dropped == 150 + counts.duplicated
    });
    let counts = counts.await;
    assert!(counts.dropped > 10 && counts.duplicated > 10, "{counts:?}");
    let forwarded = usize::try_from(counts.forwarded).expect("few");
    let mut received = bench.receive(forwarded).await;
    assert!(received.is_sorted(), "{received:?}");
    received.dedup();
    assert_eq!(received.len() as u64, 150 - counts.dropped);
}

#[tokio::test]
async fn datagrams_are_reordered_and_delayed_and_none_is_lost() {
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
async fn a_blocked_client_stays_blocked_and_another_address_passes() {
    let mut bench = Bench::with(Faults::default()).await;
    bench.send(1).await;
    assert_eq!(number(&bench.server).await.0, 1);
    bench.proxy.block_current_clients();
    bench.send(2).await;
    bench.client = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
    bench.send(3).await;
    assert_eq!(number(&bench.server).await.0, 3);
    bench.proxy.blackhole();
    bench.send(4).await;
    bench.until(|counts| counts.blocked == 2).await;
    bench.proxy.restore();
    bench.send(5).await;
    assert_eq!(number(&bench.server).await.0, 5);
}

#[tokio::test]
async fn a_server_that_returns_on_its_port_is_reached_again() {
    // An address of its own: another socket could take a port of 127.0.0.1 while it is free.
    let mut bench = Bench::on("127.0.0.77:0", Faults::default()).await;
    bench.send(1).await;
    assert_eq!(number(&bench.server).await.0, 1);
    let address = bench.server.local_addr().expect("bound");
    drop(std::mem::replace(
        &mut bench.server,
        UdpSocket::bind("127.0.0.1:0").await.expect("a port"),
    ));
    bench.send_all(20).await;
    bench.until(|counts| counts.forwarded == 21).await;
    bench.server = UdpSocket::bind(address).await.expect("the port is free");
    bench.send(99).await;
    assert_eq!(number(&bench.server).await.0, 99);
}
