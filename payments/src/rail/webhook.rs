//! Webhook signatures after Standard Webhooks (D29): `v1,<base64 HMAC-SHA256(secret, id.timestamp.body)>`.
//!
//! The bank signs, the gateway verifies on the raw bytes before it reads anything of them. Compared in constant time; a time more than the
//! tolerance away from ours is refused too. Several signatures (the bank rotates) and several secrets (we rotate) are tried in turn.

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, Mac};
use sha2::Sha256;

pub const ID_HEADER: &str = "webhook-id";
pub const TIMESTAMP_HEADER: &str = "webhook-timestamp";
pub const SIGNATURE_HEADER: &str = "webhook-signature";

/// How far the webhook's time may be from ours, in seconds.
pub const TOLERANCE_S: i64 = 300;

const SECRET_PREFIX: &str = "whsec_";
const SCHEME: &str = "v1,";
const ID_BYTES_MAX: usize = 256;

/// The webhook is not from the bank, or not from now. Says no more to whoever sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Invalid signature")]
pub struct InvalidSignature;

/// A shared secret, written `whsec_<base64>`.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    pub fn new(bytes: Vec<u8>) -> Secret {
        Secret(bytes)
    }

    /// `None` for a text that is not one.
    pub fn parse(text: &str) -> Option<Secret> {
        let encoded = text.trim().strip_prefix(SECRET_PREFIX)?;
        let bytes = STANDARD.decode(encoded).ok()?;
        (bytes.len() >= 24).then_some(Secret(bytes))
    }

    pub fn to_text(&self) -> String {
        format!("{SECRET_PREFIX}{}", STANDARD.encode(&self.0))
    }

    fn mac(&self, id: &str, timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
            mac.update(part);
        }
        mac
    }

    /// Value of the signature header.
    pub fn sign(&self, id: &str, timestamp_s: i64, body: &[u8]) -> String {
        let mac = self.mac(id, &timestamp_s.to_string(), body).finalize();
        format!("{SCHEME}{}", STANDARD.encode(mac.into_bytes()))
    }
}

/// The three headers as they came.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    pub id: &'a str,
    pub timestamp: &'a str,
    pub signatures: &'a str,
}

/// The secrets in force.
#[derive(Clone)]
pub struct Verifier {
    secrets: Vec<Secret>,
}

impl Verifier {
    pub fn new(secrets: Vec<Secret>) -> Verifier {
        Verifier { secrets }
    }

    /// # Errors
    /// [`InvalidSignature`] whatever is wrong.
    pub fn verify(
        &self,
        signed: Signed<'_>,
        body: &[u8],
        now_s: i64,
    ) -> Result<(), InvalidSignature> {
        if signed.id.is_empty() || signed.id.len() > ID_BYTES_MAX {
            return Err(InvalidSignature);
        }
        let timestamp_s: i64 = signed.timestamp.parse().map_err(|_| InvalidSignature)?;
        if now_s.abs_diff(timestamp_s) > TOLERANCE_S.unsigned_abs() {
            return Err(InvalidSignature);
        }
        let valid = signed
            .signatures
            .split(' ')
            .filter_map(|signature| STANDARD.decode(signature.strip_prefix(SCHEME)?).ok())
            .any(|signature| {
                self.secrets.iter().any(|secret| {
                    let mac = secret.mac(signed.id, signed.timestamp, body);
                    mac.verify_slice(&signature).is_ok()
                })
            });
        if valid { Ok(()) } else { Err(InvalidSignature) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const AT_S: i64 = 1_614_265_330;
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn secret() -> Secret {
        Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap()
    }

    fn verify(signatures: &str, timestamp: &str, body: &[u8], now_s: i64) -> bool {
        let other = Secret::new(vec![7; 32]);
        let signed = Signed {
            id: ID,
            timestamp,
            signatures,
        };
        Verifier::new(vec![other, secret()])
            .verify(signed, body, now_s)
            .is_ok()
    }

    // rows: R334
    #[test]
    fn r334_public_vector_of_standard_webhooks() {
        assert_eq!(secret().sign(ID, AT_S, BODY), SIGNATURE);
        assert!(verify(SIGNATURE, "1614265330", BODY, AT_S));
        // Rotation: one of several suffices, whatever the others are.
        let several = format!("v1a,AAAA v1,AAAA {SIGNATURE}");
        assert!(verify(&several, "1614265330", BODY, AT_S));
    }

    // rows: R334 R114
    #[test]
    fn r114_any_change_is_refused() {
        let at = "1614265330";
        assert!(!verify(SIGNATURE, at, br#"{"test": 2432232315}"#, AT_S));
        assert!(!verify(SIGNATURE, "1614265331", BODY, AT_S));
        assert!(!verify(&SIGNATURE.replace("v1,", "v2,"), at, BODY, AT_S));
        assert!(!verify("", at, BODY, AT_S));
        assert!(!verify("v1,", at, BODY, AT_S));
        assert!(!verify(SIGNATURE, "now", BODY, AT_S));
        let truncated = &SIGNATURE[..SIGNATURE.len() - 8];
        assert!(!verify(truncated, at, BODY, AT_S));
    }

    // rows: R334
    #[test]
    fn r334_the_time_window_holds_at_its_bound_and_not_past_it() {
        for (now_s, valid) in [
            (AT_S + TOLERANCE_S, true),
            (AT_S - TOLERANCE_S, true),
            (AT_S + TOLERANCE_S + 1, false),
            (AT_S - TOLERANCE_S - 1, false),
        ] {
            assert_eq!(
                verify(SIGNATURE, "1614265330", BODY, now_s),
                valid,
                "{now_s}"
            );
        }
        assert!(!verify(SIGNATURE, "-9223372036854775808", BODY, i64::MAX));
    }

    #[test]
    fn secrets_round_trip_and_short_ones_are_refused() {
        assert_eq!(secret().to_text(), "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        assert!(Secret::parse("whsec_AAAA").is_none());
        assert!(Secret::parse("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").is_none());
    }
}
