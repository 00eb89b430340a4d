//! Reads numbers from messages. Errors are texts for [`CallError::Unreadable`](crate::CallError).

use proto::common::v1 as common;
use proto::convert;
use types::{Amount, Decimal, Minor};

pub fn number(value: Option<&common::Decimal>) -> Result<Decimal, String> {
    convert::decimal(value).map_err(|error| format!("unreadable number: {error}"))
}

/// A number; zero if unset.
pub fn number_or_zero(value: Option<&common::Decimal>) -> Result<Decimal, String> {
    let value = convert::optional_decimal(value);
    value
        .map(Option::unwrap_or_default)
        .map_err(|error| format!("unreadable number: {error}"))
}

/// An amount of roubles in kopecks; zero if unset.
pub fn kopecks(value: Option<&common::Decimal>) -> Result<Minor, String> {
    let minor = number_or_zero(value)?.to_minor(2);
    minor
        .map(Minor)
        .map_err(|error| format!("unreadable amount: {error}"))
}

pub fn to_amount(amount: &Amount) -> Option<common::MonetaryAmount> {
    Some(convert::to_monetary_amount(
        amount.instrument.as_str(),
        amount.decimal(),
    ))
}
