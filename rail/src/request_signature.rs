//! Ed25519 signatures of the gateway's requests to the bank (specification 1.2, R021) over
//!
//! ```text
//! METHOD \n path?query \n timestamp \n hex(SHA-256(body))
//! ```
//!
//! in the headers `x-key-id`, `x-timestamp` (seconds) and `x-signature` (base64). The bank has the
//! gateway's public key. It refuses requests that are unsigned or altered, or whose time differs by
//! more than five minutes. A replay within that time has no effect: every write is idempotent by
//! its request id or payment id.

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::{
    rand::SystemRandom,
    signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey},
};
use sha2::{Digest, Sha256};

pub const KEY_ID_HEADER: &str = "x-key-id";
pub const TIMESTAMP_HEADER: &str = "x-timestamp";
pub const SIGNATURE_HEADER: &str = "x-signature";

/// Maximum difference between a request's timestamp and the bank's clock, in seconds.
pub const TOLERANCE_S: i64 = 300;

/// Not a usable Ed25519 key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an Ed25519 key")]
pub struct BadKey;

/// Why the bank refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    #[error("request is not signed")]
    Missing,
    #[error("unknown key")]
    UnknownKey,
    #[error("request is too old or from the future")]
    Time,
    #[error("signature does not match")]
    Mismatch,
}

/// The gateway's signing key.
pub struct Signer {
    pair: Ed25519KeyPair,
    key_id: String,
}

impl Signer {
    /// A new key as PKCS#8 bytes.
    ///
    /// # Errors
    /// [`BadKey`] when the system has no randomness.
    pub fn generate() -> Result<Vec<u8>, BadKey> {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| BadKey)?;
        Ok(pkcs8.as_ref().to_vec())
    }

    /// Loads a key from PKCS#8 bytes.
    ///
    /// # Errors
    /// [`BadKey`].
    pub fn from_pkcs8(pkcs8: &[u8]) -> Result<Signer, BadKey> {
        let pair = Ed25519KeyPair::from_pkcs8(pkcs8).map_err(|_| BadKey)?;
        let key_id = key_id(pair.public_key().as_ref());
        Ok(Signer { pair, key_id })
    }

    pub fn public_key(&self) -> Vec<u8> {
        self.pair.public_key().as_ref().to_vec()
    }

    pub fn key_id(&self) -> &str {
        &self.key_id
    }

    /// Value of `x-signature`.
    pub fn sign(&self, method: &str, path: &str, timestamp_s: i64, body: &[u8]) -> String {
        let text = signed_text(method, path, &timestamp_s.to_string(), body);
        STANDARD.encode(self.pair.sign(text.as_bytes()))
    }
}

/// The three signature headers of a request.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    pub key_id: &'a str,
    pub timestamp: &'a str,
    pub signature: &'a str,
}

/// Checks a request against the gateway's public key.
///
/// # Errors
/// [`SignatureError`].
pub fn verify(
    public_key: &[u8],
    signed: Signed<'_>,
    method: &str,
    path: &str,
    body: &[u8],
    now_s: i64,
) -> Result<(), SignatureError> {
    if signed.key_id != key_id(public_key) {
        return Err(SignatureError::UnknownKey);
    }
    let timestamp_s: i64 = signed.timestamp.parse().map_err(|_| SignatureError::Time)?;
    if now_s.abs_diff(timestamp_s) > TOLERANCE_S.unsigned_abs() {
        return Err(SignatureError::Time);
    }
    let signature = STANDARD
        .decode(signed.signature)
        .map_err(|_| SignatureError::Mismatch)?;
    let text = signed_text(method, path, signed.timestamp, body);
    UnparsedPublicKey::new(&ED25519, public_key)
        .verify(text.as_bytes(), &signature)
        .map_err(|_| SignatureError::Mismatch)
}

fn signed_text(method: &str, path: &str, timestamp: &str, body: &[u8]) -> String {
    let digest = hex::encode(Sha256::digest(body));
    format!("{method}\n{path}\n{timestamp}\n{digest}")
}

/// First eight bytes of the public key's SHA-256, in hex.
fn key_id(public_key: &[u8]) -> String {
    hex::encode(&Sha256::digest(public_key)[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R021
    #[test]
    fn r021_signed_requests_verify_and_altered_ones_do_not() {
        let signer = Signer::from_pkcs8(&Signer::generate().unwrap()).unwrap();
        let public = signer.public_key();
        let (path, body, at) = ("/bank/v1/transfers?x=1", br#"{"amount":"1.00"}"#, 1_000);
        let signature = signer.sign("POST", path, at, body);
        let signed = Signed {
            key_id: signer.key_id(),
            timestamp: "1000",
            signature: &signature,
        };
        let check = |signed, method: &str, path: &str, body: &[u8], now| {
            verify(&public, signed, method, path, body, now)
        };
        assert_eq!(check(signed, "POST", path, body, at + TOLERANCE_S), Ok(()));
        let mismatch = Err(SignatureError::Mismatch);
        assert_eq!(check(signed, "PUT", path, body, at), mismatch);
        assert_eq!(
            check(signed, "POST", "/bank/v1/transfers?x=2", body, at),
            mismatch
        );
        assert_eq!(
            check(signed, "POST", path, br#"{"amount":"9.00"}"#, at),
            mismatch
        );
        let later = Signed {
            timestamp: "1001",
            ..signed
        };
        assert_eq!(check(later, "POST", path, body, at), mismatch);
        assert_eq!(
            check(signed, "POST", path, body, at + TOLERANCE_S + 1),
            Err(SignatureError::Time)
        );
        let other = Signer::from_pkcs8(&Signer::generate().unwrap()).unwrap();
        assert_eq!(
            verify(&other.public_key(), signed, "POST", path, body, at),
            Err(SignatureError::UnknownKey)
        );
    }
}
