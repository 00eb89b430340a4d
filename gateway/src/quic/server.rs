//! The endpoint of the trading protocol: takes connections, one task each, until shutdown; then says why and waits for them.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use types::UserIx;
use wire::DisconnectCode;

use super::connection;
use super::tls;
use crate::Error;
use crate::market::{Market, now_ns};
use crate::throttle::Throttle;

/// Window in which failed logins of an address are counted.
const FAILURES_WINDOW: Duration = Duration::from_secs(60);
/// How long connections may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(2);

/// A listening endpoint.
pub struct Server {
    endpoint: quinn::Endpoint,
    address: SocketAddr,
    fingerprint: String,
}

/// What every connection has at hand.
pub struct Shared {
    pub market: Arc<Market>,
    pub auth: rpc::Authenticator,
    pub shutdown: CancellationToken,
    failures: Mutex<HashMap<IpAddr, (u32, Instant)>>,
    logins: Mutex<HashMap<UserIx, Throttle>>,
}

impl Shared {
    /// True when the address has failed too often lately.
    pub fn is_shut_out(&self, address: IpAddr) -> bool {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = self.market.config.failed_logins_max;
        failures
            .get(&address)
            .is_some_and(|(count, since)| *count >= limit && since.elapsed() < FAILURES_WINDOW)
    }

    /// False when the user logs in too fast: every login asks other services and is journalled.
    pub fn admit_login(&self, user: UserIx) -> bool {
        let mut logins = self.logins.lock().unwrap_or_else(PoisonError::into_inner);
        let (rate, now_ns) = (self.market.config.logins_per_s, now_ns());
        let throttle = logins
            .entry(user)
            .or_insert_with(|| Throttle::new(rate, now_ns));
        throttle.admit(now_ns)
    }

    pub fn login_failed(&self, address: IpAddr) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|_, (_, since)| since.elapsed() < FAILURES_WINDOW);
        let (count, _) = failures.entry(address).or_insert((0, Instant::now()));
        *count += 1;
    }
}

impl Server {
    /// Binds the endpoint; takes nobody yet.
    pub fn bind(market: &Market) -> Result<Self, Error> {
        let identity = tls::load_or_make(&market.config.data_dir.join("tls"))?;
        let crypto = tls::server_crypto(&identity)?;
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(transport(market.config.heartbeat_ms));
        let endpoint = quinn::Endpoint::server(config, market.config.quic_listen)?;
        Ok(Self {
            address: endpoint.local_addr()?,
            fingerprint: identity.fingerprint,
            endpoint,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// SHA-256 of the certificate, 64 hexadecimal digits.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Serves until shutdown.
    pub async fn run(
        self,
        market: Arc<Market>,
        auth: rpc::Authenticator,
        shutdown: CancellationToken,
    ) {
        let shared = Arc::new(Shared {
            market,
            auth,
            shutdown: shutdown.clone(),
            failures: Mutex::new(HashMap::new()),
            logins: Mutex::new(HashMap::new()),
        });
        let connections = TaskTracker::new();
        loop {
            let incoming = tokio::select! {
                incoming = self.endpoint.accept() => incoming,
                () = shutdown.cancelled() => break,
            };
            let Some(incoming) = incoming else { break };
            if shared.is_shut_out(incoming.remote_address().ip()) {
                incoming.refuse();
                continue;
            }
            connections.spawn(connection::serve(incoming, shared.clone()));
        }
        connections.close();
        if tokio::time::timeout(GOODBYE, connections.wait())
            .await
            .is_err()
        {
            tracing::warn!("trading connections did not close in time");
        }
        let code = DisconnectCode::Shutdown;
        self.endpoint
            .close(u32::from(code.code()).into(), code.to_string().as_bytes());
        let _ = tokio::time::timeout(GOODBYE, self.endpoint.wait_idle()).await;
    }
}

/// One bidirectional stream, nothing else.
fn transport(heartbeat_ms: u32) -> Arc<quinn::TransportConfig> {
    let mut transport = quinn::TransportConfig::default();
    transport.max_concurrent_bidi_streams(1u8.into());
    transport.max_concurrent_uni_streams(0u8.into());
    transport.datagram_receive_buffer_size(None);
    let idle = Duration::from_millis(u64::from(heartbeat_ms.max(1_000)) * 2);
    if let Ok(idle) = quinn::IdleTimeout::try_from(idle) {
        transport.max_idle_timeout(Some(idle));
    }
    Arc::new(transport)
}
