//! Short constructors of contract values. Those of messages return `Some`, as message fields
//! require.

use proto::common::v1::{Decimal, MonetaryAmount, Money, RequestContext};
use tonic::Request;
use uuid::Uuid;

/// A unique id.
pub fn fresh() -> String {
    Uuid::now_v7().to_string()
}

/// Context of a write with this key; its correlation id is `corr-<key>`.
pub fn context(key: &str) -> Option<RequestContext> {
    Some(RequestContext {
        request_id: fresh(),
        correlation_id: format!("corr-{key}"),
        idempotency_key: key.to_owned(),
        ..Default::default()
    })
}

/// Subject of the caller of an [`approved`] request.
pub const APPROVED_SUBJECT: &str = "anna, approved by boris (approval a-1)";

/// A request as the approvals service makes it for two persons (D32), for a client with the
/// credential [`crate::APPROVED`].
pub fn approved<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    for (name, value) in [
        ("x-approval-id", "a-1"),
        ("x-approval-requester", "anna"),
        ("x-approval-approver", "boris"),
    ] {
        let value = value.parse().expect("a metadata value");
        request.metadata_mut().insert(name, value);
    }
    request
}

pub fn decimal(value: &str) -> Option<Decimal> {
    let value = value.to_owned();
    Some(Decimal { value })
}

/// A transaction hash, the same for the same name.
pub fn tx_hash(name: &str) -> String {
    let half = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes());
    format!("0x{half}{half}", half = half.simple())
}

/// Roubles of the bank.
pub fn rubles(value: &str) -> Option<Money> {
    Some(Money {
        currency_code: "RUB".to_owned(),
        amount: decimal(value),
    })
}

/// Units of an instrument.
pub fn amount(instrument_id: &str, value: &str) -> Option<MonetaryAmount> {
    Some(MonetaryAmount {
        currency_code: instrument_id.to_owned(),
        amount: decimal(value),
    })
}
