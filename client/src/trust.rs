//! Server certificates that a client accepts.
//!
//! A trading gateway creates its own certificate at the first start and prints its fingerprint. A
//! client pins the fingerprint. [`Trust::Loopback`] skips the check, for a server on the same
//! machine only.

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use sha2::{Digest, Sha256};

/// How the server's identity is verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// SHA-256 of the server's certificate (DER).
    Fingerprint([u8; 32]),
    /// Any certificate, loopback addresses only.
    Loopback,
}

/// The text is not a fingerprint.
#[derive(Debug, thiserror::Error)]
#[error("a fingerprint has 64 hexadecimal digits")]
pub struct FingerprintError;

impl FromStr for Trust {
    type Err = FingerprintError;

    /// 64 hexadecimal digits, colons between bytes allowed.
    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text.replace(':', ""), &mut bytes).map_err(|_| FingerprintError)?;
        Ok(Self::Fingerprint(bytes))
    }
}

impl Trust {
    /// True if connections to this address are permitted.
    pub fn allows(&self, server: SocketAddr) -> bool {
        match self {
            Self::Fingerprint(_) => true,
            Self::Loopback => server.ip().is_loopback(),
        }
    }

    pub(crate) fn verifier(&self) -> Arc<dyn ServerCertVerifier> {
        Arc::new(Verifier {
            trust: self.clone(),
            provider: Arc::new(ring::default_provider()),
        })
    }
}

#[derive(Debug)]
struct Verifier {
    trust: Trust,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.trust {
            Trust::Loopback => Ok(ServerCertVerified::assertion()),
            Trust::Fingerprint(pinned) if Sha256::digest(end_entity.as_ref())[..] == pinned => {
                Ok(ServerCertVerified::assertion())
            }
            Trust::Fingerprint(_) => Err(rustls::Error::General(
                "server certificate does not have the pinned fingerprint".into(),
            )),
        }
    }

    // Signatures are always checked: they prove that the server holds the certificate's key.
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
            &self.provider.signature_verification_algorithms,
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
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_the_check_is_for_loopback_only() {
        assert!(Trust::Loopback.allows("127.0.0.1:8090".parse().unwrap()));
        assert!(Trust::Loopback.allows("[::1]:8090".parse().unwrap()));
        assert!(!Trust::Loopback.allows("10.0.0.1:8090".parse().unwrap()));
        let pinned: Trust = "ab".repeat(32).parse().unwrap();
        assert!(pinned.allows("10.0.0.1:8090".parse().unwrap()));
        assert!("ab".parse::<Trust>().is_err());
    }
}
