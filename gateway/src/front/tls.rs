//! The server's self-signed certificate: created at the first start, kept in the data directory,
//! and pinned by clients through its fingerprint.

use std::path::Path;

use events::files;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use transport::proto::crypto::rustls::QuicServerConfig;

use crate::Error;

/// A certificate with its key.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    /// SHA-256 of the certificate's DER form, 64 hexadecimal digits.
    pub fingerprint: String,
}

/// Reads `cert.der` and `key.der` from the folder, or creates them. Stores the fingerprint as text
/// in the file `fingerprint`.
pub fn load_or_make(folder: &Path) -> Result<Identity, Error> {
    std::fs::create_dir_all(folder)?;
    let (certificate_path, key_path) = (folder.join("cert.der"), folder.join("key.der"));
    if !exists_non_empty(&certificate_path) || !exists_non_empty(&key_path) {
        let names = vec!["cfa-trade".to_owned(), "localhost".to_owned()];
        let made =
            rcgen::generate_simple_self_signed(names).map_err(|e| Error::Tls(e.to_string()))?;
        // The certificate is written last: if it exists, its key exists.
        files::replace(&key_path, &made.signing_key.serialize_der(), files::PRIVATE)?;
        files::replace(&certificate_path, made.cert.der(), files::PUBLIC)?;
    }
    let certificate = CertificateDer::from(std::fs::read(&certificate_path)?);
    let key = PrivatePkcs8KeyDer::from(std::fs::read(&key_path)?);
    let fingerprint = hex::encode(Sha256::digest(&certificate));
    let (shown, text) = (folder.join("fingerprint"), format!("{fingerprint}\n"));
    if std::fs::read(&shown).ok().as_deref() != Some(text.as_bytes()) {
        files::replace(&shown, text.as_bytes(), files::PUBLIC)?;
    }
    Ok(Identity {
        certificate,
        key: PrivateKeyDer::from(key),
        fingerprint,
    })
}

/// False for an empty file too: an interrupted start of an older version may have left one.
fn exists_non_empty(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.len() > 0)
}

/// The QUIC server's TLS configuration: TLS 1.3 with the protocol's ALPN.
pub fn server_crypto(identity: &Identity) -> Result<QuicServerConfig, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls_error = |error: rustls::Error| Error::Tls(error.to_string());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_error)?
        .with_no_client_auth()
        .with_single_cert(vec![identity.certificate.clone()], identity.key.clone_key())
        .map_err(tls_error)?;
    tls.alpn_protocols = vec![wire::ALPN.to_vec()];
    QuicServerConfig::try_from(tls).map_err(|error| Error::Tls(error.to_string()))
}
