//! Bulk transfer over two real sockets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transport::proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use transport::proto::{ClientConfig, ConnectionError, ServerConfig};
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Link, Packets};

const BYTES: usize = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Answers the first bytes with [`BYTES`].
#[derive(Default)]
struct Server {
    has_answered: bool,
    packets: Packets,
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

fn configs() -> (ServerConfig, ClientConfig) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]);
    let made = made.expect("a certificate");
    let certificate = made.cert.der().clone();
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = &[&rustls::version::TLS13];
    let server = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key.into())
        .expect("its key");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate).expect("a certificate");
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .expect("TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let server = QuicServerConfig::try_from(server).expect("a QUIC suite");
    let client = QuicClientConfig::try_from(client).expect("a QUIC suite");
    (
        ServerConfig::with_crypto(Arc::new(server)),
        ClientConfig::new(Arc::new(client)),
    )
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
}
