//! What the tests of connections over real sockets share.

use std::sync::Arc;
use std::time::Duration;

use transport::proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use transport::proto::{ClientConfig, ServerConfig};

/// Longest wait of a test. It only turns a hang into a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Configurations of a server with a new certificate, and of a client that trusts it.
pub fn configs() -> (ServerConfig, ClientConfig) {
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
