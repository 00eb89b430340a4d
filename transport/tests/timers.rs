//! Deadlines of a driver whose thread was stalled: the peer's data waits in the socket.

mod common;

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use common::{PATIENCE, configs};
use transport::proto::ConnectionError;
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Key, Link};

/// The server's deadline after the last data.
const SILENCE: Duration = Duration::from_secs(10);
/// Datagrams per round of an endpoint.
const PER_ROUND: usize = 64;
/// The longest backlog that an endpoint reports.
const BACKLOG_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Data,
    Timeout { has_backlog: bool },
}

/// Records its calls. Data moves the deadline, and so does a timeout during a backlog.
#[derive(Default)]
struct Server {
    calls: Vec<Call>,
}

impl Driver<()> for Server {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Accept(())
    }

    fn data(&mut self, now: Instant, link: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        self.calls.push(Call::Data);
        link.set_deadline(Some(now + SILENCE));
        ConsumedBytes {
            bytes: bytes.len(),
            is_paused: false,
        }
    }

    fn finished(&mut self, _: Instant, _: &mut Link<()>) {}

    fn timeout(&mut self, now: Instant, link: &mut Link<()>, has_backlog: bool) {
        self.calls.push(Call::Timeout { has_backlog });
        link.set_deadline(has_backlog.then_some(now));
    }

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
        link.out().push(1);
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

/// A server and a connected client. The test passes the time to both.
struct Ends {
    server_end: Endpoint<()>,
    server: Server,
    client_end: Endpoint<()>,
    client: Client,
    /// When the server's deadline passes if no more data arrives.
    deadline: Instant,
}

impl Ends {
    fn connected() -> Self {
        /// Rounds of a millisecond in which the last acknowledgements are sent.
        const LAST_ROUNDS: usize = 100;
        let (server_config, client_config) = configs();
        let any = ([127, 0, 0, 1], 0).into();
        let mut ends = Self {
            server_end: Endpoint::bind(any, Some(server_config)).expect("a socket"),
            server: Server::default(),
            client_end: Endpoint::bind(any, None).expect("a socket"),
            client: Client::default(),
            deadline: Instant::now(),
        };
        let to = ends.address();
        let (begun, mut now) = (Instant::now(), Instant::now());
        let connected = ends
            .client_end
            .connect(now, client_config, to, "localhost", ());
        connected.expect("a connection");
        let mut rounds_left = LAST_ROUNDS;
        while rounds_left > 0 {
            assert!(begun.elapsed() < PATIENCE, "no connection");
            now += Duration::from_millis(1);
            let received = ends.client_end.receive(now, &mut ends.client);
            received.expect("the socket");
            ends.client_end.flush(now, &mut ends.client);
            let is_open = !ends.server.calls.is_empty();
            ends.server_round(now);
            if is_open {
                rounds_left -= 1;
            } else {
                ends.deadline = now + SILENCE;
            }
        }
        assert_eq!(std::mem::take(&mut ends.server.calls), [Call::Data]);
        ends
    }

    fn address(&self) -> SocketAddr {
        self.server_end.local_address().expect("an address")
    }

    /// The client sends a byte.
    fn send(&mut self, now: Instant) {
        let key = self.client.opened.expect("the connection is open");
        let link = self.client_end.link(key).expect("the connection is open");
        link.out().push(1);
        self.client_end.flush(now, &mut self.client);
    }

    /// Sends the server one datagram more than it handles in a round. They are of no connection.
    fn send_round_of_garbage(&self) {
        let stranger = UdpSocket::bind(("127.0.0.1", 0)).expect("a socket");
        for _ in 0..=PER_ROUND {
            stranger.send_to(&[0], self.address()).expect("sent");
        }
    }

    fn server_round(&mut self, now: Instant) {
        let received = self.server_end.receive(now, &mut self.server);
        received.expect("the socket");
        self.server_end.flush(now, &mut self.server);
    }

    /// One round of the server after everything sent has arrived. Returns the calls of its driver.
    fn calls_of_round(&mut self, now: Instant) -> Vec<Call> {
        // The loopback delivers what this thread sends in order.
        let last = UdpSocket::bind(("127.0.0.1", 0)).expect("a socket");
        let own = last.local_addr().expect("an address");
        last.send_to(&[0], own).expect("sent");
        last.recv(&mut [0]).expect("a datagram");
        self.server_round(now);
        std::mem::take(&mut self.server.calls)
    }
}

#[test]
fn data_that_arrived_during_a_stall_is_read_before_a_deadline_passes() {
    let mut ends = Ends::connected();
    let now = ends.deadline + Duration::from_secs(5);
    ends.send(now);
    assert_eq!(ends.calls_of_round(now), [Call::Data]);
    let is_silent = Call::Timeout { has_backlog: false };
    assert_eq!(ends.calls_of_round(now + SILENCE), [is_silent]);
}

/// A round handles 64 datagrams. The client's follows those of others.
#[test]
fn a_deadline_that_passes_during_a_backlog_is_marked_for_at_most_a_second() {
    let is_behind = Call::Timeout { has_backlog: true };
    let is_silent = Call::Timeout { has_backlog: false };
    let mut ends = Ends::connected();
    let now = ends.deadline;
    ends.send_round_of_garbage();
    ends.send(now);
    assert_eq!(ends.calls_of_round(now), [is_behind]);
    assert_eq!(ends.calls_of_round(now), [Call::Data]);
    // From here on the client is silent, and the flood goes on.
    let silent_at = now + SILENCE;
    for (at, call) in [(silent_at, is_behind), (silent_at + BACKLOG_MAX, is_silent)] {
        ends.send_round_of_garbage();
        assert_eq!(ends.calls_of_round(at), [call]);
    }
}
