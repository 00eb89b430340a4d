//! Bulk transfer over two real sockets.

mod common;

use std::net::SocketAddr;
use std::time::Instant;

use common::{PATIENCE, configs};
use transport::proto::ConnectionError;
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Link, Packets};

const BYTES: usize = 8 << 20;

/// Answers the first bytes with [`BYTES`].
#[derive(Default)]
struct Server {
    has_answered: bool,
    packets: Packets,
    /// Capacity of the buffer of waiting bytes at the end.
    kept: usize,
}

impl Driver<()> for Server {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Accept(())
    }

    fn data(&mut self, _: Instant, link: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        if !std::mem::replace(&mut self.has_answered, true) {
            link.out().resize(BYTES, 7);
        }
        ConsumedBytes {
            bytes: bytes.len(),
            is_paused: false,
        }
    }

    fn finished(&mut self, now: Instant, link: &mut Link<()>) {
        self.packets = link.packets();
        self.kept = link.out().capacity();
        link.finish(now, 0, "");
    }

    fn closed(&mut self, _: Instant, _: &mut Link<()>, _: &ConnectionError) {}
}

#[derive(Default)]
struct Client {
    bytes: usize,
    is_closed: bool,
}

impl Driver<()> for Client {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Refuse
    }

    fn opened(&mut self, _: Instant, link: &mut Link<()>) {
        link.out().push(1);
    }

    fn data(&mut self, now: Instant, link: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        self.bytes += bytes.len();
        if self.bytes == BYTES {
            link.finish(now, 0, "");
        }
        ConsumedBytes {
            bytes: bytes.len(),
            is_paused: false,
        }
    }

    fn finished(&mut self, _: Instant, _: &mut Link<()>) {}

    fn closed(&mut self, _: Instant, _: &mut Link<()>, _: &ConnectionError) {
        self.is_closed = true;
    }
}

/// The kernel drops a run of datagrams that is longer than one system call may send, and quinn-udp
/// reports no error. Without a limit a busy connection lost a third of its packets.
#[test]
fn long_answer_loses_no_packets_over_loopback() {
    let (server_config, client_config) = configs();
    let any = ([127, 0, 0, 1], 0).into();
    let mut server_end = Endpoint::bind(any, Some(server_config)).expect("a socket");
    let mut client_end = Endpoint::bind(any, None).expect("a socket");
    let (mut server, mut client) = (Server::default(), Client::default());
    let to = server_end.local_address().expect("an address");
    let begun = Instant::now();
    let connected = client_end.connect(begun, client_config, to, "localhost", ());
    connected.expect("a connection");
    while !client.is_closed {
        assert!(
            begun.elapsed() < PATIENCE,
            "received {} bytes",
            client.bytes
        );
        let now = Instant::now();
        client_end.receive(now, &mut client).expect("the socket");
        client_end.flush(now, &mut client);
        server_end.receive(now, &mut server).expect("the socket");
        server_end.flush(now, &mut server);
    }
    assert_eq!(client.bytes, BYTES);
    assert!(server.packets.sent > 5_000, "{:?}", server.packets);
    // While this thread is descheduled a few packets may count as lost.
    let Packets { sent, lost } = server.packets;
    assert!(lost * 100 < sent, "{:?}", server.packets);
    // A client that does not read for a moment costs memory for that moment.
    assert!(server.kept <= 512 << 10, "{} bytes kept", server.kept);
}
