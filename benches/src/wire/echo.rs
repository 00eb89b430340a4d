//! Baseline: an echo server and its client, both on the platform's transport.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::Context;
use hdrhistogram::Histogram;
use transport::proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use transport::proto::{ClientConfig, ConnectionError, ServerConfig};
use transport::{ConsumedBytes, Driver, Endpoint, Incoming, Key, Link};

use crate::hop;

/// Echo server. Answers each message of `request_bytes` with messages of `response_bytes`. The
/// second one is sent in a datagram of its own; 0 means none.
struct Echo {
    request_bytes: usize,
    response_bytes: [usize; 2],
    /// Bytes of an incomplete request.
    pending: usize,
    /// Number of second messages to send, and their connection.
    due: (usize, Option<Key>),
}

impl Driver<()> for Echo {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Accept(())
    }

    fn data(&mut self, _: Instant, link: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        self.pending += bytes.len();
        let count = self.pending / self.request_bytes;
        self.pending %= self.request_bytes;
        let [first, second] = self.response_bytes;
        let out = link.out();
        out.resize(out.len() + count * first, 7);
        if second > 0 {
            self.due = (self.due.0 + count, Some(link.key()));
        }
        ConsumedBytes {
            bytes: bytes.len(),
            is_paused: false,
        }
    }

    fn finished(&mut self, now: Instant, link: &mut Link<()>) {
        link.finish(now, 0, "");
    }

    fn closed(&mut self, _: Instant, _: &mut Link<()>, _: &ConnectionError) {}
}

/// Client side: counts received bytes.
#[derive(Default)]
pub struct ByteCounter {
    bytes: usize,
    is_open: bool,
}

impl Driver<()> for ByteCounter {
    fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
        Incoming::Refuse
    }

    fn opened(&mut self, _: Instant, _: &mut Link<()>) {
        self.is_open = true;
    }

    fn data(&mut self, _: Instant, _: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
        self.bytes += bytes.len();
        ConsumedBytes {
            bytes: bytes.len(),
            is_paused: false,
        }
    }

    fn finished(&mut self, _: Instant, _: &mut Link<()>) {}

    fn closed(&mut self, _: Instant, _: &mut Link<()>, _: &ConnectionError) {}
}

/// Configurations of server and client with a new self-signed certificate.
fn configs() -> anyhow::Result<(ServerConfig, ClientConfig)> {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()])?;
    let certificate = made.cert.der().clone();
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key.into())?;
    let server = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server)?));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = ClientConfig::new(Arc::new(QuicClientConfig::try_from(client)?));
    Ok((server, client))
}

/// Serves on `core` until `is_stopped` is set or the socket fails.
fn serve(mut endpoint: Endpoint<()>, mut echo: Echo, core: usize, is_stopped: &AtomicBool) {
    hop::pin(core);
    while !is_stopped.load(Ordering::Relaxed) {
        let now = Instant::now();
        let received = endpoint.receive(now, &mut echo);
        endpoint.flush(now, &mut echo);
        if received.is_err() {
            return;
        }
        if let (count @ 1.., Some(key)) = std::mem::take(&mut echo.due)
            && let Some(link) = endpoint.link(key)
        {
            let out = link.out();
            out.resize(out.len() + count * echo.response_bytes[1], 7);
            endpoint.flush(now, &mut echo);
        }
    }
}

/// Measures round trips with one request in flight in nanoseconds, from sending a request to its
/// last response. The server runs on `core`.
///
/// Makes `rounds / 10` more round trips before, which are not measured.
///
/// # Errors
/// A socket cannot be used, or the connection fails.
pub fn run(
    core: usize,
    request_bytes: usize,
    response_bytes: [usize; 2],
    rounds: usize,
) -> anyhow::Result<Histogram<u64>> {
    let (server, client) = configs()?;
    let endpoint = Endpoint::<()>::bind(([127, 0, 0, 1], 0).into(), Some(server))?;
    let address = endpoint.local_address()?;
    let is_stopped = Arc::new(AtomicBool::new(false));
    let server_stop = is_stopped.clone();
    let echo = Echo {
        request_bytes,
        response_bytes,
        pending: 0,
        due: (0, None),
    };
    let serve = move || serve(endpoint, echo, core, &server_stop);
    let serving: JoinHandle<()> = std::thread::spawn(serve);
    let mut endpoint = Endpoint::<()>::bind(([127, 0, 0, 1], 0).into(), None)?;
    let key = endpoint.connect(Instant::now(), client, address, "localhost", ())?;
    let mut count = ByteCounter::default();
    let poll = |endpoint: &mut Endpoint<()>, count: &mut ByteCounter| -> anyhow::Result<()> {
        let now = Instant::now();
        endpoint.receive(now, count)?;
        endpoint.flush(now, count);
        Ok(())
    };
    let since = Instant::now();
    while !count.is_open {
        anyhow::ensure!(
            since.elapsed().as_secs() < 10,
            "timed out connecting to the echo server"
        );
        poll(&mut endpoint, &mut count)?;
    }
    let mut histogram = hop::histogram();
    for round in 0..rounds + rounds / 10 {
        let sent = Instant::now();
        let link = endpoint
            .link(key)
            .context("the echo server closed the connection")?;
        let out = link.out();
        out.resize(out.len() + request_bytes, 7);
        let wanted = count.bytes + response_bytes.iter().sum::<usize>();
        endpoint.flush(sent, &mut count);
        while count.bytes < wanted {
            poll(&mut endpoint, &mut count)?;
        }
        if round >= rounds / 10 {
            histogram.saturating_record(sent.elapsed().as_nanos() as u64);
        }
    }
    is_stopped.store(true, Ordering::Relaxed);
    serving
        .join()
        .map_err(|_| anyhow::anyhow!("the echo server panicked"))?;
    Ok(histogram)
}
