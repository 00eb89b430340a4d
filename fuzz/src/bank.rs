//! Data exchanged with the bank: messages, signatures, links, accounts.

use rail::messages::{
    Balance, ErrorBody, ExpectTransfer, Notice, PaymentReport, QrCreated, TransferExpected,
    TransferOrder, TransferReport, time_text, time_us,
};
use rail::request_signature::{self, Signer};
use rail::sbp_link::{LinkKind, SbpLink};
use rail::webhook::{Secret, Signed, TOLERANCE_S, Verifier};
use rail::{Rub, account, purpose_code};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Time of verification, in seconds since 1970.
const AT_S: i64 = 1_700_000_000;

/// Decodes any bytes as the body of each message.
pub fn check_messages(bytes: &[u8]) {
    if let Some(notice) = round_tripped::<Notice>(bytes) {
        let (amount, occurred_at) = match &notice {
            Notice::Payment {
                amount,
                occurred_at,
                ..
            } => (amount, occurred_at),
            Notice::Transfer {
                report,
                occurred_at,
            } => (&report.amount, occurred_at),
        };
        check_amount(&amount.value, amount.rub());
        check_time(occurred_at);
    }
    if let Some(report) = round_tripped::<TransferReport>(bytes) {
        check_amount(&report.amount.value, report.amount.rub());
    }
    if let Some(balance) = round_tripped::<Balance>(bytes) {
        check_amount(&balance.balance.value, balance.balance.rub());
    }
    if let Some(created) = round_tripped::<QrCreated>(bytes) {
        check_time(&created.expires_at);
    }
    let _ = round_tripped::<PaymentReport>(bytes);
    let _ = round_tripped::<ErrorBody>(bytes);
    let _ = round_tripped::<TransferExpected>(bytes);
    // Requests that the sandbox bank decodes.
    let _ = round_tripped::<ExpectTransfer>(bytes);
    let _ = round_tripped::<TransferOrder>(bytes);
}

/// The decoded message; asserts that it round-trips.
fn round_tripped<M: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
) -> Option<M> {
    let message: M = serde_json::from_slice(bytes).ok()?;
    let written = serde_json::to_vec(&message).expect("message serializes");
    let again: M = serde_json::from_slice(&written).expect("a serialized message parses");
    assert_eq!(again, message);
    Some(message)
}

fn check_amount(text: &str, amount: Option<Rub>) {
    if let Some(amount) = amount {
        assert_eq!(text.parse(), Ok(amount));
        assert_eq!(amount.to_string().parse(), Ok(amount));
        assert_eq!(Rub::from_decimal(amount.to_decimal()), Ok(amount));
    }
}

fn check_time(text: &str) {
    let Some(time) = time_us(text) else {
        return;
    };
    let written = time_text(time);
    // A time whose offset moves it beyond the year 9999 has no text.
    if !written.is_empty() {
        assert_eq!(time_us(&written), Some(time), "{text}");
    }
}

pub fn message_seeds() -> Vec<Vec<u8>> {
    [
        concat!(
            r#"{"type":"payment","paymentId":"p1","status":"SUCCESS","#,
            r#""amount":{"value":"1500.50","currency":"RUB"},"transactionId":"t","#,
            r#""occurredAt":"2026-11-20T20:59:59.999999Z"}"#,
        ),
        concat!(
            r#"{"type":"payment","paymentId":"p1","status":"EXPIRED","#,
            r#""amount":{"value":"-1","currency":"USD"},"#,
            r#""occurredAt":"9999-12-31T23:59:59-23:59"}"#,
        ),
        concat!(
            r#"{"type":"transfer","transferId":"t1","requestId":"r1","#,
            r#""status":"FAILED","amount":{"value":"92233720368547758.07","#,
            r#""currency":"RUB"},"#,
            r#""errorRegister":[{"code":"INVALID_RECIPIENT_ACCOUNT","#,
            r#""message":"no such account"}],"#,
            r#""occurredAt":"0000-01-01T00:00:00+03:00"}"#,
        ),
        concat!(
            r#"{"transferId":"t1","requestId":"r1","status":"PENDING","#,
            r#""amount":{"value":"0.01","currency":"RUB"}}"#,
        ),
        concat!(
            r#"{"accountNumber":"40702810500000000001","balance":{"value":"100.000","#,
            r#""currency":"RUB"}}"#,
        ),
        r#"{"qrPayload":"q","paymentUrl":"u","expiresAt":"1969-12-31T23:59:59.5Z"}"#,
        r#"{"paymentId":"p","status":"PENDING","amount":9223372036854775807,"transactionId":null}"#,
        r#"{"code":"c","message":"\u0440\ud83d\ude00"}"#,
        concat!(
            r#"{"paymentId":"p","amount":{"value":"1","currency":"RUB"},"#,
            r#""purposeCode":"PAY-p","lifeSeconds":900}"#,
        ),
        concat!(
            r#"{"requestId":"r","accountNumber":"a","recipientAccount":"b","#,
            r#""amount":{"value":"1","currency":"RUB"},"purpose":"x"}"#,
        ),
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

/// Three header lines and a body.
struct Signature<'a> {
    id: &'a str,
    timestamp: &'a str,
    signatures: &'a str,
    body: &'a [u8],
}

fn parse_signature(bytes: &[u8]) -> Option<Signature<'_>> {
    let mut parts = bytes.splitn(4, |byte| *byte == b'\n');
    let mut line = || std::str::from_utf8(parts.next()?).ok();
    Some(Signature {
        id: line()?,
        timestamp: line()?,
        signatures: line()?,
        body: parts.next()?,
    })
}

/// Verifies three header lines and a body as a webhook of the bank and as an order to the bank.
pub fn check_signatures(bytes: &[u8]) {
    let Some(signature) = parse_signature(bytes) else {
        return;
    };
    check_webhook(&signature);
    check_order(&signature);
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(secret) = Secret::parse(text)
    {
        let again = Secret::parse(&secret.to_text()).expect("formatted secret parses");
        assert_eq!(again.to_text(), secret.to_text());
    }
}

fn secret() -> Secret {
    Secret::new(vec![5; 32])
}

fn check_webhook(of: &Signature<'_>) {
    let verifier = Verifier::new(vec![Secret::new(vec![6; 32]), secret()]);
    let verify = |signatures: &str, body: &[u8], now_s| {
        let signed = Signed {
            id: of.id,
            timestamp: of.timestamp,
            signatures,
        };
        verifier.verify(signed, body, now_s).is_ok()
    };
    let own = of
        .timestamp
        .parse::<i64>()
        .ok()
        .map(|at| (at, secret().sign(of.id, at, of.body)));
    if verify(of.signatures, of.body, AT_S) {
        let (at, own) = own.as_ref().expect("timestamp parses");
        assert!(at.abs_diff(AT_S) <= TOLERANCE_S.unsigned_abs());
        let is_own = of
            .signatures
            .split_ascii_whitespace()
            .any(|text| text == own);
        assert!(
            is_own || at.to_string() != of.timestamp,
            "accepted a signature not made with our secret"
        );
    }
    if let Some((at, own)) = own
        && at.to_string() == of.timestamp
        && (1..=256).contains(&of.id.len())
    {
        assert!(verify(&own, of.body, at));
        let other = [of.body, b"x"].concat();
        assert!(
            !verify(&own, &other, at),
            "accepted a signature of another body"
        );
    }
}

/// Verifies a transfer order as the sandbox bank does.
fn check_order(of: &Signature<'_>) {
    thread_local! {
        static SIGNER: Signer =
            Signer::from_pkcs8(&Signer::generate().expect("key generated")).expect("generated key loads");
    }
    SIGNER.with(|signer| {
        let key = signer.public_key();
        let verify = |signature: &str, timestamp: &str, path: &str| {
            let signed = request_signature::Signed {
                key_id: signer.key_id(),
                timestamp,
                signature,
            };
            request_signature::verify(&key, signed, "POST", path, of.body, AT_S).is_ok()
        };
        assert!(
            !verify(of.signatures, of.timestamp, of.id),
            "accepted a signature not made with the key"
        );
        let own = signer.sign("POST", of.id, AT_S, of.body);
        let at = AT_S.to_string();
        assert!(verify(&own, &at, of.id));
        assert!(
            !verify(&own, &at, "/another"),
            "accepted a signature of another path"
        );
    });
}

pub fn signature_seeds() -> Vec<Vec<u8>> {
    let body = r#"{"type":"payment"}"#;
    let signature = secret().sign("msg_1", AT_S, body.as_bytes());
    let seed =
        |signatures: &str, at: &str| format!("msg_1\n{at}\n{signatures}\n{body}").into_bytes();
    vec![
        seed(&signature, "1700000000"),
        seed(&format!("v1a,AAAA v1,AAAA {signature}"), "1700000000"),
        seed(&"v1,AAAA ".repeat(9), "-9223372036854775808"),
        seed("", "+1700000000"),
        secret().to_text().into_bytes(),
        b"whsec_AAAA".to_vec(),
    ]
}

/// Parses any text as a link, as requisites, as an account number and as the purpose of a transfer.
pub fn check_links(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(link) = SbpLink::parse(text) {
        assert_eq!(SbpLink::parse(&link.to_string()), Ok(link.clone()));
        assert!(link.sum().is_none_or(Rub::is_positive));
        assert!(link.kind() == LinkKind::Static || link.sum().is_some());
        let signed = text.len() - "&crc=0000".len();
        assert!(
            text[signed..].starts_with("&crc="),
            "the checksum is not at the end: {text}"
        );
    }
    if let Some((id, sum)) = purpose_code::read(text) {
        let written = purpose_code::payload(&purpose_code::Requisites::default(), sum, "x", &id);
        assert_eq!(purpose_code::read(&written), Some((id, sum)));
    }
    if let Some(id) = purpose_code::payment_id(text) {
        assert!(!id.is_empty() && text.ends_with(&purpose_code::code(id)));
    }
    if account::check(text).is_ok() {
        assert!(text.len() == 20 && text.bytes().all(|byte| byte.is_ascii_digit()));
    }
}

pub fn link_seeds() -> Vec<Vec<u8>> {
    let link = |kind, sum: Option<i64>| {
        let (id, bank) = ("AD10001246OADML79D5OP9279JLPI2V6", "100000000001");
        SbpLink::new(id, kind, bank, sum.map(Rub::from_kopecks))
            .expect("valid link")
            .to_string()
    };
    let requisites = purpose_code::Requisites::default();
    let payload =
        purpose_code::payload(&requisites, Rub::from_kopecks(150_050), "top-up", "0190-a");
    let seeds = [
        link(LinkKind::Dynamic, Some(253)),
        link(LinkKind::Static, None),
        link(LinkKind::Static, Some(i64::MAX)),
        // Checksum in the middle: the text after it is not covered.
        link(LinkKind::Static, None) + "&sum=253&cur=RUB",
        payload,
        "for shares PAY-0190-a".to_owned(),
        account::number("40817", 42),
    ];
    seeds.map(String::into_bytes).to_vec()
}
