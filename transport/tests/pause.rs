//! A driver that consumes a bounded number of bytes per round.

mod common;

use std::net::SocketAddr;
use std::time::Instant;

use common::{PATIENCE, configs};
use transport::proto::ConnectionError;
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Key, Link};

/// Bytes that the server consumes per round, and bytes per write of the client.
const PER_ROUND: usize = 100;
const WRITES: usize = 20;

/// Consumes up to [`PER_ROUND`] bytes per round.
#[derive(Default)]
struct Server {
    /// Bytes that it may still consume in this round.
    left: usize,
    received: usize,
    has_paused: bool,
}

impl Driver<()> for Server {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Accept(())
    }

    fn data(&mut self, _: Instant, _: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        let count = bytes.len().min(self.left);
        self.left -= count;
        self.received += count;
        self.has_paused = self.left == 0;
        ConsumedBytes {
            bytes: count,
            is_paused: self.has_paused,
        }
    }

    fn finished(&mut self, _: Instant, _: &mut Link<()>) {}

    fn closed(&mut self, _: Instant, _: &mut Link<()>, _: &ConnectionError) {}
}

#[derive(Default)]
struct Client {
    opened: Option<Key>,
}

impl Driver<()> for Client {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Refuse
    }

    fn opened(&mut self, _: Instant, link: &mut Link<()>) {
        self.opened = Some(link.key());
    }

    fn data(&mut self, _: Instant, _: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        ConsumedBytes {
            bytes: bytes.len(),
            is_paused: false,
        }
    }

    fn finished(&mut self, _: Instant, _: &mut Link<()>) {}

    fn closed(&mut self, _: Instant, _: &mut Link<()>, _: &ConnectionError) {}
}

/// Each write of the client arrives by itself, and the driver pauses at its end: nothing of it is
/// left, and only the connection's own state has the rest of the stream.
#[test]
fn a_connection_that_paused_at_the_end_of_a_chunk_continues_in_the_next_round() {
    let (server_config, client_config) = configs();
    let any = ([127, 0, 0, 1], 0).into();
    let mut server_end = Endpoint::bind(any, Some(server_config)).expect("a socket");
    let mut client_end = Endpoint::bind(any, None).expect("a socket");
    let (mut server, mut client) = (Server::default(), Client::default());
    let to = server_end.local_address().expect("an address");
    let begun = Instant::now();
    let connected = client_end.connect(begun, client_config, to, "localhost", ());
    connected.expect("a connection");
    let mut written = 0;
    while server.received < PER_ROUND * WRITES {
        assert!(begun.elapsed() < PATIENCE, "{} bytes", server.received);
        let now = Instant::now();
        client_end.receive(now, &mut client).expect("the socket");
        while let Some(key) = client.opened
            && written < WRITES
        {
            let link = client_end.link(key).expect("the connection is open");
            link.out().extend([7; PER_ROUND]);
            client_end.flush(now, &mut client);
            written += 1;
        }
        client_end.flush(now, &mut client);

        let before = server.received;
        (server.left, server.has_paused) = (PER_ROUND, false);
        server_end.receive(now, &mut server).expect("the socket");
        server_end.flush(now, &mut server);
        let received = server.received - before;
        assert!(received <= PER_ROUND, "{received} bytes in a round");
        assert!(
            !server.has_paused || server_end.has_work(),
            "a paused connection has no turn in the next round"
        );
    }
}
