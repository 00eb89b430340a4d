//! Webhook signatures by Standard Webhooks (D29): `v1,<base64 HMAC-SHA256>` of `id.timestamp.body`.
//!
//! The bank signs. The gateway verifies the raw bytes before it parses them, compares in constant
//! time, and refuses a timestamp outside the tolerance. It accepts several signatures (rotation at
//! the bank) and has several secrets (rotation at the gateway).
//!
//! The endpoint has no other access control. A request costs at most one MAC per secret over
//! [`BODY_BYTES_MAX`] bytes, independent of its headers.

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, Mac, digest::CtOutput};
use sha2::Sha256;

pub const ID_HEADER: &str = "webhook-id";
pub const TIMESTAMP_HEADER: &str = "webhook-timestamp";
pub const SIGNATURE_HEADER: &str = "webhook-signature";

/// Maximum difference between the webhook's timestamp and the local clock, in seconds.
pub const TOLERANCE_S: i64 = 300;

/// Longest accepted body, in bytes: many times the bank's longest webhook.
pub const BODY_BYTES_MAX: usize = 64 * 1024;

const SECRET_PREFIX: &str = "whsec_";
const SCHEME: &str = "v1,";
const ID_BYTES_MAX: usize = 256;
/// Maximum signatures in one header, of any scheme. Rotation needs two.
const SIGNATURES_MAX: usize = 8;
const MAC_BYTES: usize = 32;

/// The webhook is not authentic or not recent. The sender receives no further reason.
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

    /// `None` if the text is not a secret.
    pub fn parse(text: &str) -> Option<Secret> {
        let encoded = text.trim().strip_prefix(SECRET_PREFIX)?;
        let bytes = STANDARD.decode(encoded).ok()?;
        (bytes.len() >= 24).then_some(Secret(bytes))
    }

    pub fn to_text(&self) -> String {
        format!("{SECRET_PREFIX}{}", STANDARD.encode(&self.0))
    }

    fn mac(&self, id: &str, timestamp: &str, body: &[u8]) -> CtOutput<Hmac<Sha256>> {
        #[cfg(test)]
        tests::MACS.set(tests::MACS.get() + 1);
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
            mac.update(part);
        }
        mac.finalize()
    }

    /// Value of the signature header.
    pub fn sign(&self, id: &str, timestamp_s: i64, body: &[u8]) -> String {
        let mac = self.mac(id, &timestamp_s.to_string(), body);
        format!("{SCHEME}{}", STANDARD.encode(mac.into_bytes()))
    }
}

/// The three signature headers, unparsed.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    pub id: &'a str,
    pub timestamp: &'a str,
    pub signatures: &'a str,
}

/// The active secrets.
#[derive(Clone)]
pub struct Verifier {
    secrets: Vec<Secret>,
}

impl Verifier {
    pub fn new(secrets: Vec<Secret>) -> Verifier {
        Verifier { secrets }
    }

    /// Verifies a webhook against all active secrets.
    ///
    /// # Errors
    /// [`InvalidSignature`] for any defect.
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
        let signatures = candidates(signed.signatures)?;
        let valid = !signatures.is_empty()
            && self.secrets.iter().any(|secret| {
                let mac = secret.mac(signed.id, signed.timestamp, body);
                signatures.contains(&mac)
            });
        if valid { Ok(()) } else { Err(InvalidSignature) }
    }
}

/// Signatures of scheme `v1` with the length of a MAC. `CtOutput` compares in constant time.
fn candidates(header: &str) -> Result<Vec<CtOutput<Hmac<Sha256>>>, InvalidSignature> {
    let signatures = header.split_ascii_whitespace();
    if signatures.clone().nth(SIGNATURES_MAX).is_some() {
        return Err(InvalidSignature);
    }
    let macs = signatures.filter_map(|signature| {
        let bytes = STANDARD.decode(signature.strip_prefix(SCHEME)?).ok()?;
        let mac = <[u8; MAC_BYTES]>::try_from(bytes).ok()?;
        Some(CtOutput::new(mac.into()))
    });
    Ok(macs.collect())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// MACs computed on this thread.
        pub static MACS: Cell<usize> = const { Cell::new(0) };
    }

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
        // Rotation: one matching signature is enough.
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
    // rows: R114 R334
    #[test]
    fn r114_each_secret_costs_one_mac_invalid_headers_none() {
        let wrong = Secret::new(vec![9; 32]).sign(ID, AT_S, BODY);
        let with_good =
            |others: usize| format!("{}{SIGNATURE}", format!("{wrong} ").repeat(others));
        for (signatures, valid, macs) in [
            (String::new(), false, 0),
            ("v1,".into(), false, 0),
            ("v1,AAAA v1, v2,AAAA".into(), false, 0),
            (SIGNATURE.to_owned(), true, 2),
            (wrong.clone(), false, 2),
            (with_good(7), true, 2),
            (with_good(8), false, 0),
            ("v1, ".repeat(90_000), false, 0),
        ] {
            MACS.set(0);
            assert_eq!(
                verify(&signatures, "1614265330", BODY, AT_S),
                valid,
                "{signatures:.80}"
            );
            assert_eq!(MACS.get(), macs, "{signatures:.80}");
        }
    }
}
