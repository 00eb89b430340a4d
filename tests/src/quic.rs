//! A QUIC stream to the trading port without the client library: a test writes any bytes to it.

use std::net::SocketAddr;
use std::sync::Arc;

use quinn::crypto::rustls::QuicClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

use crate::process::PATIENCE;

/// A connection with one open stream.
pub struct Raw {
    _endpoint: quinn::Endpoint,
    pub connection: quinn::Connection,
    pub send: quinn::SendStream,
    _receive: quinn::RecvStream,
}

impl Raw {
    /// Connects under an ALPN name and opens a stream.
    ///
    /// # Errors
    /// The server refuses the connection.
    pub async fn open(server: SocketAddr, alpn: &[u8]) -> Result<Self, quinn::ConnectionError> {
        let config = client_config(alpn);
        let endpoint = quinn::Endpoint::client(([127, 0, 0, 1], 0).into()).expect("a socket");
        let connection = endpoint
            .connect_with(config, server, "cfa-trade")
            .expect("a name")
            .await?;
        let (send, receive) = connection.open_bi().await?;
        Ok(Self {
            _endpoint: endpoint,
            connection,
            send,
            _receive: receive,
        })
    }

    /// Waits until the server ends the connection.
    ///
    /// # Panics
    /// If it stays open for a minute.
    pub async fn closed(&self) -> quinn::ConnectionError {
        tokio::time::timeout(PATIENCE, self.connection.closed())
            .await
            .expect("the server ends the connection")
    }
}

/// TLS 1.3 under an ALPN name; accepts any certificate.
///
/// # Panics
/// If TLS cannot be set up.
pub fn client_config(alpn: &[u8]) -> quinn::ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth();
    tls.alpn_protocols = vec![alpn.to_vec()];
    let crypto = QuicClientConfig::try_from(tls).expect("a QUIC client");
    quinn::ClientConfig::new(Arc::new(crypto))
}

#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
