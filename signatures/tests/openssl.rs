//! Signatures that OpenSSL 3.0 made: `openssl cms -sign -binary -md sha256 -outform DER`, with an
//! ECDSA P-256 and with an RSA key, by certificates of the authority in `openssl/ca.pem`.

use sha2::Digest as _;
use signatures::{CmsVerifier, SignatureError};

const AUTHORITY: &[u8] = include_bytes!("openssl/ca.pem");
const DOCUMENT: &[u8] = include_bytes!("openssl/document");
const SIGNATURES: [(&str, &[u8]); 2] = [
    ("ECDSA", include_bytes!("openssl/ec.cms").as_slice()),
    ("RSA", include_bytes!("openssl/rsa.cms").as_slice()),
];
/// Within the validity of the certificates, which are of November 2026.
const NOW_US: i64 = 1_800_000_000_000_000;

#[test]
fn signatures_of_openssl_are_verified() {
    let verifier = CmsVerifier::from_pem(AUTHORITY).expect("authority");
    let document = sha2::Sha256::digest(DOCUMENT).into();
    let other = sha2::Sha256::digest("another").into();
    for (name, signature) in SIGNATURES {
        let verified = verifier.verify(&document, signature, NOW_US);
        let signed_by = verified.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(signed_by.common_name, "issuer-1", "{name}");
        assert_eq!(signed_by.subject, "CN=issuer-1,O=Issuer", "{name}");
        let refused = verifier.verify(&other, signature, NOW_US);
        assert!(
            matches!(refused, Err(SignatureError::OtherDocument)),
            "{name}"
        );
    }
}
