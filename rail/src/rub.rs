//! Roubles in kopecks: the only money of the bank.
//!
//! Parsing is exact: a value that is not whole kopecks is an error and never rounded. Display
//! writes two fraction digits. An amount may be negative, for instance as a reconciliation
//! difference. Arithmetic is checked: overflow returns an error.

use std::{fmt, str::FromStr};

use types::{Decimal, DecimalError};

/// Currency code of bank money.
pub const CURRENCY: &str = "RUB";

const DECIMALS: u8 = 2;

/// An amount of roubles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rub(i64);

/// Why a text or value is not an amount of roubles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RubError {
    #[error("is not a decimal number")]
    Syntax,
    #[error("has more than two digits after the point")]
    Scale,
    #[error("is too large")]
    TooLarge,
    #[error("sum is too large")]
    Overflow,
}

impl Rub {
    pub const ZERO: Rub = Rub(0);

    pub const fn from_kopecks(kopecks: i64) -> Rub {
        Rub(kopecks)
    }

    pub const fn kopecks(self) -> i64 {
        self.0
    }

    pub const fn is_positive(self) -> bool {
        self.0 > 0
    }

    /// Converts an amount in roubles.
    ///
    /// # Errors
    /// [`RubError::Scale`] if the value is not exact in kopecks, [`RubError::TooLarge`].
    pub fn from_decimal(value: Decimal) -> Result<Rub, RubError> {
        let kopecks = value.to_minor(DECIMALS);
        kopecks.map(Rub).map_err(|error| match error {
            DecimalError::Overflow => RubError::TooLarge,
            _ => RubError::Scale,
        })
    }

    pub fn to_decimal(self) -> Decimal {
        Decimal::from_minor(self.0, DECIMALS)
    }

    /// # Errors
    /// [`RubError::Overflow`].
    pub fn plus(self, other: Rub) -> Result<Rub, RubError> {
        self.0
            .checked_add(other.0)
            .map(Rub)
            .ok_or(RubError::Overflow)
    }

    /// # Errors
    /// [`RubError::Overflow`].
    pub fn minus(self, other: Rub) -> Result<Rub, RubError> {
        self.0
            .checked_sub(other.0)
            .map(Rub)
            .ok_or(RubError::Overflow)
    }
}

impl fmt::Display for Rub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_decimal())
    }
}

impl FromStr for Rub {
    type Err = RubError;

    /// Accepts any scale that is exact in kopecks: `100`, `100.0` and `100.00` are equal (T27).
    fn from_str(text: &str) -> Result<Rub, RubError> {
        let value: Decimal = text.parse().map_err(|_| RubError::Syntax)?;
        Rub::from_decimal(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R117
    #[test]
    fn r117_scale_does_not_change_the_amount() {
        let amount = |text: &str| text.parse::<Rub>();
        assert_eq!(amount("100"), amount("100.000"));
        assert_eq!(amount("100.0").unwrap().to_string(), "100.00");
        assert_eq!(amount("100.001"), Err(RubError::Scale));
        assert_eq!(amount("92233720368547758.08"), Err(RubError::TooLarge));
        assert_eq!(amount("1e2"), Err(RubError::Syntax));
        assert_eq!(Rub::from_kopecks(-5).to_string(), "-0.05");
    }
}
