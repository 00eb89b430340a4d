//! Conversions between messages and exact numbers: the only module that parses and formats a
//! `Decimal`, an amount or a time (D03).

use prost_types::Timestamp;
use types::{Decimal, DecimalError};

use crate::common::v1 as wire;

/// An invalid number or amount of a message; the text names the defect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    #[error("is required")]
    Missing,
    #[error("has no currency_code")]
    CurrencyMissing,
    #[error("`{0}` is not a decimal number, for example `100.50`")]
    Malformed(String),
    #[error("has more than 18 digits after the point")]
    FractionTooLong,
    #[error("has more than 38 digits")]
    TooLong,
    #[error("has more digits after the point than the {decimals} that {currency} allows")]
    Scale { currency: String, decimals: u8 },
    #[error("is too large for an amount in {currency}")]
    TooLarge { currency: String },
    #[error("is in `{got}`, `{expected}` is expected")]
    Currency { got: String, expected: String },
    #[error("must be greater than zero")]
    NotPositive,
}

/// Parses a required number.
pub fn decimal(value: Option<&wire::Decimal>) -> Result<Decimal, ConvertError> {
    let text = &value.ok_or(ConvertError::Missing)?.value;
    if text.is_empty() {
        return Err(ConvertError::Missing);
    }
    text.parse::<Decimal>().map_err(|error| match error {
        DecimalError::Scale => ConvertError::FractionTooLong,
        DecimalError::Overflow => ConvertError::TooLong,
        DecimalError::Syntax | DecimalError::Inexact => ConvertError::Malformed(text.clone()),
    })
}

/// Parses an optional number: unset or empty is `None`.
pub fn optional_decimal(value: Option<&wire::Decimal>) -> Result<Option<Decimal>, ConvertError> {
    match value {
        Some(value) if !value.value.is_empty() => decimal(Some(value)).map(Some),
        _ => Ok(None),
    }
}

/// Parses a required number greater than zero.
pub fn positive(value: Option<&wire::Decimal>) -> Result<Decimal, ConvertError> {
    let value = decimal(value)?;
    if value.is_positive() {
        Ok(value)
    } else {
        Err(ConvertError::NotPositive)
    }
}

/// Formats a number.
pub fn to_decimal(value: Decimal) -> wire::Decimal {
    wire::Decimal {
        value: value.to_string(),
    }
}

/// Formats a number of minor units with all its `decimals`, as in amounts (`100.00`).
pub fn to_decimal_minor(amount_minor: i64, decimals: u8) -> wire::Decimal {
    to_decimal(Decimal::from_minor(amount_minor, decimals))
}

/// Converts an exact amount to minor units. Never rounds.
pub fn minor(value: Decimal, currency: &str, decimals: u8) -> Result<i64, ConvertError> {
    value.to_minor(decimals).map_err(|error| {
        let currency = currency.to_owned();
        match error {
            DecimalError::Overflow => ConvertError::TooLarge { currency },
            _ => ConvertError::Scale { currency, decimals },
        }
    })
}

/// Parses an amount of bank money: `RUB`, greater than zero, in kopecks.
pub fn money_minor(value: Option<&wire::Money>) -> Result<i64, ConvertError> {
    let value = value.ok_or(ConvertError::Missing)?;
    currency(&value.currency_code, "RUB")?;
    minor(positive(value.amount.as_ref())?, "RUB", 2)
}

/// Formats roubles.
pub fn to_money(amount_minor: i64) -> wire::Money {
    wire::Money {
        currency_code: "RUB".to_owned(),
        amount: Some(to_decimal_minor(amount_minor, 2)),
    }
}

/// Parses an amount in the ledger: its code and a number greater than zero.
pub fn monetary_amount(
    value: Option<&wire::MonetaryAmount>,
) -> Result<(String, Decimal), ConvertError> {
    let value = value.ok_or(ConvertError::Missing)?;
    if value.currency_code.is_empty() {
        return Err(ConvertError::CurrencyMissing);
    }
    Ok((
        value.currency_code.clone(),
        positive(value.amount.as_ref())?,
    ))
}

/// Formats an amount in the ledger.
pub fn to_monetary_amount(code: &str, amount: Decimal) -> wire::MonetaryAmount {
    wire::MonetaryAmount {
        currency_code: code.to_owned(),
        amount: Some(to_decimal(amount)),
    }
}

/// Formats an amount in minor units.
pub fn to_monetary_amount_minor(
    code: &str,
    amount_minor: i64,
    decimals: u8,
) -> wire::MonetaryAmount {
    to_monetary_amount(code, Decimal::from_minor(amount_minor, decimals))
}

/// Refuses another currency than `expected`.
pub fn currency(got: &str, expected: &str) -> Result<(), ConvertError> {
    if got == expected {
        return Ok(());
    }
    if got.is_empty() {
        return Err(ConvertError::CurrencyMissing);
    }
    Err(ConvertError::Currency {
        got: got.to_owned(),
        expected: expected.to_owned(),
    })
}

/// Converts microseconds since 1970 to a timestamp. A time without a JSON form is clamped, so that
/// a stored row cannot make a list unreadable.
pub fn to_timestamp_us(time_us: i64) -> Timestamp {
    crate::times::clamped(Timestamp {
        seconds: time_us.div_euclid(1_000_000),
        nanos: i32::try_from(time_us.rem_euclid(1_000_000) * 1_000).expect("below one second"),
    })
}

/// Converts a journalled time in nanoseconds since 1970 to a timestamp.
pub fn to_timestamp_ns(time_ns: u64) -> Timestamp {
    Timestamp {
        seconds: i64::try_from(time_ns / 1_000_000_000).expect("before the year 292277026596"),
        nanos: i32::try_from(time_ns % 1_000_000_000).expect("below one second"),
    }
}

/// Converts a timestamp to microseconds since 1970.
pub fn timestamp_us(time: &Timestamp) -> i64 {
    time.seconds
        .saturating_mul(1_000_000)
        .saturating_add(i64::from(time.nanos) / 1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(text: &str) -> wire::Decimal {
        wire::Decimal {
            value: text.to_owned(),
        }
    }

    // rows: R007 R009 R311
    #[test]
    fn r009_numbers_round_trip_exactly() {
        for text in [
            "0.000000000000000001",
            "123456789012345678901234567890",
            "-100.50",
            "0",
            "0.1",
        ] {
            let number = decimal(Some(&wire(text))).expect("a number");
            assert_eq!(to_decimal(number).value, text);
        }
        let sum = decimal(Some(&wire("0.1")))
            .expect("number")
            .checked_add(decimal(Some(&wire("0.2"))).expect("number"));
        assert_eq!(sum.expect("sum").to_string(), "0.3");
    }

    #[test]
    fn malformed_numbers_are_refused_with_their_text() {
        for text in ["1e5", "1,5", "--1", "1.", ".5", "NaN", " 1"] {
            assert_eq!(
                decimal(Some(&wire(text))),
                Err(ConvertError::Malformed(text.to_owned())),
                "{text}"
            );
        }
        assert_eq!(decimal(None), Err(ConvertError::Missing));
        assert_eq!(positive(Some(&wire("0"))), Err(ConvertError::NotPositive));
    }

    #[test]
    fn amounts_keep_their_currency_and_scale() {
        let money = wire::Money {
            currency_code: "RUB".to_owned(),
            amount: Some(wire("100.5")),
        };
        assert_eq!(money_minor(Some(&money)), Ok(10_050));
        let fine = wire::Money {
            currency_code: "RUB".to_owned(),
            amount: Some(wire("100.501")),
        };
        assert!(matches!(
            money_minor(Some(&fine)),
            Err(ConvertError::Scale { .. })
        ));
        let other = wire::Money {
            currency_code: "USD".to_owned(),
            amount: Some(wire("1")),
        };
        assert!(matches!(
            money_minor(Some(&other)),
            Err(ConvertError::Currency { .. })
        ));
        assert_eq!(to_money(10_050).amount.expect("amount").value, "100.50");
    }

    /// Each text names one defect, that of the value (B10 of the review from outside).
    #[test]
    fn b10_each_refusal_names_one_cause() {
        let money = |currency: &str, amount: &str| wire::Money {
            currency_code: currency.to_owned(),
            amount: Some(wire(amount)),
        };
        let long = "9".repeat(39);
        for (currency, amount, text) in [
            ("", "1", "has no currency_code"),
            ("USD", "1", "is in `USD`, `RUB` is expected"),
            ("RUB", "", "is required"),
            (
                "RUB",
                "1,5",
                "`1,5` is not a decimal number, for example `100.50`",
            ),
            (
                "RUB",
                "0.0000000000000000001",
                "has more than 18 digits after the point",
            ),
            ("RUB", long.as_str(), "has more than 38 digits"),
            (
                "RUB",
                "1.001",
                "has more digits after the point than the 2 that RUB allows",
            ),
            (
                "RUB",
                "92233720368547758.08",
                "is too large for an amount in RUB",
            ),
            ("RUB", "0", "must be greater than zero"),
        ] {
            let error = money_minor(Some(&money(currency, amount))).expect_err("refused");
            assert_eq!(error.to_string(), text);
        }
        let no_currency = wire::MonetaryAmount {
            currency_code: String::new(),
            amount: Some(wire("1")),
        };
        assert_eq!(
            monetary_amount(Some(&no_currency)),
            Err(ConvertError::CurrencyMissing)
        );
    }

    #[test]
    fn times_keep_their_sign() {
        assert_eq!(timestamp_us(&to_timestamp_us(-1)), -1);
        assert_eq!(
            timestamp_us(&to_timestamp_us(1_700_000_000_123_456)),
            1_700_000_000_123_456
        );
    }

    #[test]
    fn stored_times_out_of_range_are_shown_clamped() {
        assert_eq!(
            to_timestamp_us(i64::MIN).to_string(),
            "0001-01-01T00:00:00Z"
        );
        let last = to_timestamp_us(i64::MAX).to_string();
        assert_eq!(last, "9999-12-31T23:59:59.999999999Z");
    }
}
