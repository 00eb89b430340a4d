//! QUIC configuration of both drivers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;
use wire::ALPN;

use crate::{Error, Trust};

/// Server name in the TLS handshake; [`Trust`] alone decides on the certificate.
pub const SERVER_NAME: &str = "cfa-trade";

/// Local address for connections to this server: any port.
pub fn local(server: SocketAddr) -> SocketAddr {
    if server.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0u16; 8], 0).into()
    }
}

/// Configuration of a connection to this server.
///
/// # Errors
/// [`Error::TrustNotAllowed`], [`Error::Tls`].
pub fn config(trust: &Trust, server: SocketAddr) -> Result<quinn::ClientConfig, Error> {
    if !trust.allows(server) {
        return Err(Error::TrustNotAllowed);
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| Error::Tls(e.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(trust.verifier())
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let crypto = QuicClientConfig::try_from(tls).map_err(|e| Error::Tls(e.to_string()))?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport());
    Ok(config)
}

fn transport() -> Arc<quinn::TransportConfig> {
    let mut transport = quinn::TransportConfig::default();
    let idle = Duration::from_secs(10);
    transport.max_idle_timeout(Some(
        quinn::IdleTimeout::try_from(idle).expect("ten seconds fit an idle timeout"),
    ));
    transport.keep_alive_interval(Some(Duration::from_secs(3)));
    Arc::new(transport)
}
