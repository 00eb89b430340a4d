//! Integers of the trading path: prices in ticks, quantities in lots, money in minor units.
//!
//! `+` and `-` panic on overflow in every build: overflow after a check is a bug. Code with
//! external input uses `checked_*`.

use core::fmt;

macro_rules! integer {
    ($(#[$meta:meta])* $name:ident($inner:ty)) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, zerocopy::FromZeros,
        )]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            pub const ZERO: Self = Self(0);
            pub const MAX: Self = Self(<$inner>::MAX);

            pub const fn get(self) -> $inner {
                self.0
            }

            pub const fn is_zero(self) -> bool {
                self.0 == 0
            }

            pub const fn checked_add(self, other: Self) -> Option<Self> {
                match self.0.checked_add(other.0) {
                    Some(value) => Some(Self(value)),
                    None => None,
                }
            }

            pub const fn checked_sub(self, other: Self) -> Option<Self> {
                match self.0.checked_sub(other.0) {
                    Some(value) => Some(Self(value)),
                    None => None,
                }
            }

            pub const fn checked_mul(self, factor: $inner) -> Option<Self> {
                match self.0.checked_mul(factor) {
                    Some(value) => Some(Self(value)),
                    None => None,
                }
            }
        }

        impl core::ops::Add for $name {
            type Output = Self;

            #[inline]
            fn add(self, other: Self) -> Self {
                self.checked_add(other).expect("integer sum overflows")
            }
        }

        impl core::ops::Sub for $name {
            type Output = Self;

            #[inline]
            fn sub(self, other: Self) -> Self {
                self.checked_sub(other).expect("integer difference overflows")
            }
        }

        impl core::ops::AddAssign for $name {
            #[inline]
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl core::ops::SubAssign for $name {
            #[inline]
            fn sub_assign(&mut self, other: Self) {
                *self = *self - other;
            }
        }

        impl core::iter::Sum for $name {
            fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
                items.fold(Self::ZERO, |a, b| a + b)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

integer!(
    /// Price in ticks of its instrument.
    Ticks(i64)
);
integer!(
    /// Quantity in lots of its instrument.
    Lots(u64)
);
integer!(
    /// Amount in minor units of its asset: kopecks, or 10^-decimals of an instrument's unit.
    Minor(i64)
);

impl Ticks {
    /// Highest price of an order. Keeps every sum in the book within 64 bits.
    pub const ORDER_MAX: Self = Self(1 << 40);
}

impl Lots {
    /// Largest quantity of an order. Keeps sums of 2^24 such orders per price within 64 bits.
    pub const ORDER_MAX: Self = Self(1 << 40);
}

impl Minor {
    /// `None` when the amount does not fit 64 bits.
    pub fn from_wide(amount: i128) -> Option<Self> {
        i64::try_from(amount).ok().map(Self)
    }

    pub const fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// The amount, but at least zero.
    pub const fn or_zero(self) -> Self {
        if self.0 < 0 { Self(0) } else { self }
    }
}

/// Fee rate in parts per million of the value (the specification's 0.001 is 1,000).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct FeeRate(pub u32);

impl FeeRate {
    /// Parts per whole.
    pub const SCALE: i128 = 1_000_000;
    /// The specification's trading fee: 0.1 % (D36).
    pub const TRADING: Self = Self(1_000);

    /// Share of a non-negative value, rounded half up (D36).
    pub fn half_up(self, value_minor: i128) -> i128 {
        self.share(value_minor, Self::SCALE / 2)
    }

    /// Share of a non-negative value, rounded up, for reserves.
    pub fn rounded_up(self, value_minor: i128) -> i128 {
        self.share(value_minor, Self::SCALE - 1)
    }

    /// `(value * rate + extra) / SCALE`, in 64 bits if they suffice, which is many times faster.
    #[inline]
    fn share(self, value_minor: i128, extra: i128) -> i128 {
        let sum = value_minor * i128::from(self.0) + extra;
        match i64::try_from(sum) {
            Ok(sum) => i128::from(sum / Self::SCALE as i64),
            Err(_) => sum / Self::SCALE,
        }
    }
}
