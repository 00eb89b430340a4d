//! Exact decimal numbers of the contracts (D03): up to 38 digits, up to 18 of them fractional.
//!
//! Invariants: `scale <= 18`, `|mantissa| < 10^38`. The scale is kept as parsed, so `1.50` prints
//! `1.50`; comparison is by value. Nothing rounds silently: an inexact operation is an error unless
//! a [`Rounding`] is given.

use alloc::string::String;
use core::cmp::Ordering;
use core::fmt;
use core::str::FromStr;

/// Maximum of fraction digits.
pub const SCALE_MAX: u8 = 18;
const MANTISSA_LIMIT: i128 = 10i128.pow(38);

/// Reason why a number cannot be represented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecimalError {
    /// Not `-?digits(.digits)?`.
    Syntax,
    /// More than 18 fraction digits.
    Scale,
    /// More than 38 digits, or minor units of more than 64 bits.
    Overflow,
    /// Digits would be lost.
    Inexact,
}

impl fmt::Display for DecimalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Syntax => "is not a decimal number",
            Self::Scale => "has more than 18 fraction digits",
            Self::Overflow => "is too large",
            Self::Inexact => "has more fraction digits than allowed",
        })
    }
}

impl core::error::Error for DecimalError {}

/// How to round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Towards zero.
    Down,
    /// Away from zero.
    Up,
    /// To the nearest, half away from zero.
    HalfUp,
}

/// An exact decimal: `mantissa * 10^-scale`.
// Two halves instead of one i128 keep the alignment at 8: records stay small, and archives need no
// 16-byte alignment.
#[derive(Clone, Copy, Debug, Default, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct Decimal {
    high: i64,
    low: u64,
    scale: u8,
}

const fn power(exponent: u8) -> i128 {
    10i128.pow(exponent as u32)
}

impl Decimal {
    pub const ZERO: Self = Self {
        high: 0,
        low: 0,
        scale: 0,
    };

    /// Creates a number. `Scale` past 18 fraction digits, `Overflow` past 38 digits.
    pub const fn new(mantissa: i128, scale: u8) -> Result<Self, DecimalError> {
        if scale > SCALE_MAX {
            return Err(DecimalError::Scale);
        }
        if mantissa <= -MANTISSA_LIMIT || mantissa >= MANTISSA_LIMIT {
            return Err(DecimalError::Overflow);
        }
        Ok(Self {
            high: (mantissa >> 64) as i64,
            low: mantissa as u64,
            scale,
        })
    }

    /// A whole number.
    pub const fn from_integer(value: i64) -> Self {
        Self {
            high: if value < 0 { -1 } else { 0 },
            low: value as u64,
            scale: 0,
        }
    }

    /// An amount in minor units of an asset with `decimals` digits (2 for kopecks, at most 18).
    pub const fn from_minor(amount_minor: i64, decimals: u8) -> Self {
        assert!(decimals <= SCALE_MAX);
        Self {
            high: if amount_minor < 0 { -1 } else { 0 },
            low: amount_minor as u64,
            scale: decimals,
        }
    }

    pub const fn mantissa(self) -> i128 {
        ((self.high as i128) << 64) | self.low as i128
    }

    pub const fn scale(self) -> u8 {
        self.scale
    }

    pub const fn is_zero(self) -> bool {
        self.mantissa() == 0
    }

    pub const fn is_negative(self) -> bool {
        self.high < 0
    }

    pub const fn is_positive(self) -> bool {
        self.mantissa() > 0
    }

    /// The same value with another number of fraction digits; `Inexact` when digits would be lost.
    pub fn rescale(self, scale: u8) -> Result<Self, DecimalError> {
        if scale >= self.scale {
            let mantissa = self
                .mantissa()
                .checked_mul(power((scale - self.scale).min(38)))
                .ok_or(DecimalError::Overflow)?;
            return Self::new(mantissa, scale);
        }
        let divisor = power(self.scale - scale);
        if self.mantissa() % divisor != 0 {
            return Err(DecimalError::Inexact);
        }
        Self::new(self.mantissa() / divisor, scale)
    }

    /// As [`Self::rescale`], with rounding.
    pub fn rescale_rounded(self, scale: u8, rounding: Rounding) -> Result<Self, DecimalError> {
        if scale >= self.scale {
            return self.rescale(scale);
        }
        let divisor = power(self.scale - scale);
        let (quotient, rest) = (self.mantissa() / divisor, self.mantissa() % divisor);
        let away = match rounding {
            Rounding::Down => false,
            Rounding::Up => rest != 0,
            Rounding::HalfUp => rest.abs() * 2 >= divisor,
        };
        Self::new(quotient + if away { rest.signum() } else { 0 }, scale)
    }

    /// The amount in minor units of an asset with `decimals` digits: exact, or an error.
    pub fn to_minor(self, decimals: u8) -> Result<i64, DecimalError> {
        let scaled = self.rescale(decimals)?;
        i64::try_from(scaled.mantissa()).map_err(|_| DecimalError::Overflow)
    }

    /// The same value with the fewest fraction digits.
    pub fn normalized(self) -> Self {
        let (mut mantissa, mut scale) = (self.mantissa(), self.scale);
        while scale > 0 && mantissa % 10 == 0 {
            mantissa /= 10;
            scale -= 1;
        }
        Self::new(mantissa, scale).expect("fewer digits are within the limits")
    }

    pub fn checked_add(self, other: Self) -> Result<Self, DecimalError> {
        let scale = self.scale.max(other.scale);
        let (a, b) = (self.rescale(scale)?, other.rescale(scale)?);
        // The sum of two 38-digit numbers may exceed 128 bits.
        let sum = a.mantissa().checked_add(b.mantissa());
        Self::new(sum.ok_or(DecimalError::Overflow)?, scale)
    }

    pub fn checked_sub(self, other: Self) -> Result<Self, DecimalError> {
        self.checked_add(other.negated())
    }

    /// The exact product; `Inexact` when it needs more than 18 fraction digits.
    pub fn checked_mul(self, other: Self) -> Result<Self, DecimalError> {
        let (a, b) = (self.normalized(), other.normalized());
        let mut mantissa = a
            .mantissa()
            .checked_mul(b.mantissa())
            .ok_or(DecimalError::Overflow)?;
        let mut scale = a.scale + b.scale;
        while scale > SCALE_MAX {
            if mantissa % 10 != 0 {
                return Err(DecimalError::Inexact);
            }
            mantissa /= 10;
            scale -= 1;
        }
        Self::new(mantissa, scale)
    }

    /// Quotient by `step`. `Inexact` when it is not a whole number, `Syntax` for a step that is not
    /// positive.
    pub fn steps_of(self, step: Self) -> Result<i128, DecimalError> {
        if !step.is_positive() {
            return Err(DecimalError::Syntax);
        }
        let scale = self.scale.max(step.scale);
        let (value, step) = (
            self.rescale(scale)?.mantissa(),
            step.rescale(scale)?.mantissa(),
        );
        if value % step != 0 {
            return Err(DecimalError::Inexact);
        }
        Ok(value / step)
    }

    pub const fn negated(self) -> Self {
        match Self::new(-self.mantissa(), self.scale) {
            Ok(value) => value,
            Err(_) => unreachable!(),
        }
    }

    /// Whole part and fraction in units of 10^-18, both with the sign: comparable without overflow.
    const fn parts(self) -> (i128, i128) {
        let one = power(self.scale);
        (
            self.mantissa() / one,
            (self.mantissa() % one) * power(SCALE_MAX - self.scale),
        )
    }
}

impl PartialEq for Decimal {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for Decimal {}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parts().cmp(&other.parts())
    }
}

impl From<i64> for Decimal {
    fn from(value: i64) -> Self {
        Self::from_integer(value)
    }
}

impl FromStr for Decimal {
    type Err = DecimalError;

    fn from_str(text: &str) -> Result<Self, DecimalError> {
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (whole, fraction) = match digits.split_once('.') {
            Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
            Some(_) => return Err(DecimalError::Syntax),
            None => (digits, ""),
        };
        let is_digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty() || !is_digits(whole) || !is_digits(fraction) {
            return Err(DecimalError::Syntax);
        }
        if fraction.len() > usize::from(SCALE_MAX) {
            return Err(DecimalError::Scale);
        }
        let mut mantissa: i128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            mantissa = mantissa
                .checked_mul(10)
                .and_then(|m| m.checked_add(i128::from(digit - b'0')))
                .filter(|m| *m < MANTISSA_LIMIT)
                .ok_or(DecimalError::Overflow)?;
        }
        Self::new(
            if negative { -mantissa } else { mantissa },
            fraction.len() as u8,
        )
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let magnitude = self.mantissa().unsigned_abs();
        let one = power(self.scale).unsigned_abs();
        let mut text = String::new();
        use fmt::Write as _;
        write!(text, "{}", magnitude / one)?;
        if self.scale > 0 {
            let width = usize::from(self.scale);
            write!(text, ".{:0width$}", magnitude % one)?;
        }
        f.pad_integral(!self.is_negative(), "", &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use proptest::prelude::*;

    fn d(text: &str) -> Decimal {
        text.parse().unwrap()
    }

    // rows: R009
    #[test]
    fn r009_smallest_fraction_and_thirty_digit_integers_round_trip() {
        for text in [
            "0.000000000000000001",
            "123456789012345678901234567890",
            "-123456789012345678901234567890",
            "99999999999999999999999999999999999999",
            "1.50",
            "-0.05",
            "0",
        ] {
            assert_eq!(d(text).to_string(), text);
        }
    }

    #[test]
    fn refuses_texts_that_are_no_number_or_too_large() {
        for text in [
            "", "-", ".5", "1.", "+1", "1e3", "1 ", "0x1", "1,0", "--1", "१",
        ] {
            assert_eq!(text.parse::<Decimal>(), Err(DecimalError::Syntax), "{text}");
        }
        assert_eq!(
            "0.0000000000000000001".parse::<Decimal>(),
            Err(DecimalError::Scale)
        );
        assert_eq!(
            "100000000000000000000000000000000000000".parse::<Decimal>(),
            Err(DecimalError::Overflow)
        );
    }

    #[test]
    fn a_sum_past_the_longest_number_is_an_overflow() {
        // Two 38-digit numbers: their sum exceeds 128 bits.
        let nines = d("99999999999999999999999999999999999999");
        assert_eq!(nines.checked_add(nines), Err(DecimalError::Overflow));
        assert_eq!(
            nines.negated().checked_sub(nines),
            Err(DecimalError::Overflow)
        );
        assert_eq!(nines.checked_sub(nines), Ok(Decimal::ZERO));
    }

    #[test]
    fn rescale_is_exact_or_uses_the_given_rounding() {
        assert_eq!(d("1.50").rescale(1).unwrap().to_string(), "1.5");
        assert_eq!(d("1.55").rescale(1), Err(DecimalError::Inexact));
        let rounded = |t: &str, r| d(t).rescale_rounded(2, r).unwrap().to_string();
        assert_eq!(rounded("1.005", Rounding::HalfUp), "1.01");
        assert_eq!(rounded("1.004", Rounding::HalfUp), "1.00");
        assert_eq!(rounded("-1.005", Rounding::HalfUp), "-1.01");
        assert_eq!(rounded("1.001", Rounding::Up), "1.01");
        assert_eq!(rounded("-1.009", Rounding::Down), "-1.00");
        assert_eq!(d("12.34").to_minor(2), Ok(1234));
        assert_eq!(d("12.345").to_minor(2), Err(DecimalError::Inexact));
        assert_eq!(Decimal::from_minor(-5, 2).to_string(), "-0.05");
    }

    #[test]
    fn steps_are_whole_or_refused() {
        assert_eq!(d("10.5").steps_of(d("0.25")), Ok(42));
        assert_eq!(d("10.6").steps_of(d("0.25")), Err(DecimalError::Inexact));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 128,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]
        #[test]
        fn text_round_trips(mantissa in -(MANTISSA_LIMIT - 1)..MANTISSA_LIMIT, scale in 0u8..=18) {
            let value = Decimal::new(mantissa, scale).unwrap();
            prop_assert_eq!(value.mantissa(), mantissa);
            let back: Decimal = value.to_string().parse().unwrap();
            let scale = if mantissa == 0 { back.scale() } else { scale };
            prop_assert_eq!((back.mantissa(), back.scale()), (mantissa, scale));
        }

        #[test]
        fn arithmetic_agrees_with_integers(
            a in -1_000_000_000i64..1_000_000_000,
            b in -1_000_000_000i64..1_000_000_000,
        ) {
            let (x, y) = (Decimal::from_minor(a, 4), Decimal::from_minor(b, 4));
            prop_assert_eq!(x.checked_add(y).unwrap(), Decimal::from_minor(a + b, 4));
            prop_assert_eq!(x.checked_sub(y).unwrap(), Decimal::from_minor(a - b, 4));
            prop_assert_eq!(x.checked_mul(y).unwrap(), Decimal::new(i128::from(a) * i128::from(b), 8).unwrap());
            prop_assert_eq!(x.cmp(&y), a.cmp(&b));
        }
    }
}
