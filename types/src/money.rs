//! The two money formulas of an order, for admission and settlement (`design.md` 3, 4, T05, D36).
//!
//! For any sequence of fills, `spent main + main reserve` and `charged fees + fee reserve` never
//! exceed the amount drawn at the start. The returned amount is always `before - after - spent`.

use core::fmt;

use crate::decimal::Decimal;
use crate::derived::HoldPart;
use crate::instrument::{MONEY_DECIMALS, Terms};
use crate::number::{FeeRate, Lots, Minor, Ticks};
use crate::order::Side;
use crate::subaccount::CFA_RUB;
use crate::text::InstrumentId;

/// An amount exceeds 64-bit minor units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoneyError;

impl fmt::Display for MoneyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("amount is out of range")
    }
}

impl core::error::Error for MoneyError {}

/// An amount of one asset in minor units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount {
    pub instrument: InstrumentId,
    pub decimals: u8,
    pub minor: Minor,
}

impl Amount {
    /// Roubles of the ledger, in kopecks.
    pub fn rubles(minor: Minor) -> Self {
        Self {
            instrument: InstrumentId::new(CFA_RUB).expect("CFA-RUB is a valid instrument id"),
            decimals: MONEY_DECIMALS,
            minor,
        }
    }

    pub fn decimal(&self) -> Decimal {
        Decimal::from_minor(self.minor.0, self.decimals)
    }
}

/// Totals of an order's fills so far.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize,
)]
pub struct FillTotals {
    /// Sum of quantity * price of its trades, in kopecks.
    pub value_minor: Minor,
    /// Fees charged to the order, in kopecks (buy orders only).
    pub fee_minor: Minor,
}

/// Reserved amounts of an order.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Reserve {
    /// Buy: kopecks of the open quantity at the order's price. Sell: the instrument's minor units.
    pub main: Minor,
    /// Buy: kopecks for future fees, rounded up. Sell: zero.
    pub fee: Minor,
}

impl Reserve {
    pub const ZERO: Self = Self {
        main: Minor::ZERO,
        fee: Minor::ZERO,
    };

    /// Amount for each hold of an order.
    pub fn parts(self) -> [(HoldPart, Minor); 2] {
        [(HoldPart::Main, self.main), (HoldPart::Fee, self.fee)]
    }

    /// Sum of both parts. They are of one asset, since a sell has no fee part.
    #[inline]
    pub fn total(self) -> Minor {
        self.main + self.fee
    }

    /// Amounts to add to reach `target`, part by part, never negative.
    pub fn growth_to(self, target: Self) -> Self {
        Self {
            main: (target.main - self.main).or_zero(),
            fee: (target.fee - self.fee).or_zero(),
        }
    }

    /// Adds both parts; `None` past 64 bits.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        let sum = Self {
            main: self.main.checked_add(other.main)?,
            fee: self.fee.checked_add(other.fee)?,
        };
        sum.main.checked_add(sum.fee)?;
        Some(sum)
    }
}

/// Amounts to reserve for an order with `open` lots at `price` after the fills in `fill_totals`.
///
/// The fee part is the maximum that the whole order can still be charged: rate times (value so far
/// plus value of the rest), rounded up, minus fees charged.
pub fn reserve(
    terms: &Terms,
    side: Side,
    price: Ticks,
    open: Lots,
    fill_totals: FillTotals,
    rate: FeeRate,
) -> Result<Reserve, MoneyError> {
    if open.is_zero() {
        return Ok(Reserve::ZERO);
    }
    if side == Side::Sell {
        return Ok(Reserve {
            main: terms.units(open).ok_or(MoneyError)?,
            fee: Minor::ZERO,
        });
    }
    // Checked before the multiplication: 2^63 * 10^6 fits, anything near 2^127 does not.
    let main_minor = terms.value(price, open).ok_or(MoneyError)?;
    let value = i128::from(fill_totals.value_minor.0) + i128::from(main_minor.0);
    let fees = rate.rounded_up(value);
    let fee_minor =
        Minor::from_wide(fees - i128::from(fill_totals.fee_minor.0)).ok_or(MoneyError)?;
    main_minor.checked_add(fee_minor).ok_or(MoneyError)?;
    Ok(Reserve {
        main: main_minor,
        fee: fee_minor.or_zero(),
    })
}

/// Fee of a trade worth `trade_value` for a buy order with fills `before`.
///
/// The rounded fee of the cumulative value, minus fees charged. A single fill pays exactly the
/// specification's fee. Many small fills never sum to more than the reserve.
pub fn fee(before: FillTotals, trade_value: Minor, rate: FeeRate) -> Minor {
    let value = i128::from(before.value_minor.0) + i128::from(trade_value.0);
    let fee = rate.half_up(value) - i128::from(before.fee_minor.0);
    let fee = Minor::from_wide(fee).expect("share of a 64-bit value");
    // The rounded share of a growing value never decreases, so at a fixed rate no fee is negative.
    assert!(
        !fee.is_negative(),
        "an order's fee rate changed between its fills"
    );
    fee
}

impl FillTotals {
    /// Totals after another trade. A sell order is charged no fee.
    pub fn after_trade(self, side: Side, trade_value: Minor, rate: FeeRate) -> Self {
        let fee_minor = match side {
            Side::Buy => fee(self, trade_value, rate),
            Side::Sell => Minor::ZERO,
        };
        Self {
            value_minor: self.value_minor + trade_value,
            fee_minor: self.fee_minor + fee_minor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TERMS: Terms = Terms {
        value_minor: 1,
        units_minor: 100,
    };

    // rows: R176
    #[test]
    fn r176_fee_is_a_thousandth_rounded_half_up() {
        let one = |value: i64| fee(FillTotals::default(), Minor(value), FeeRate::TRADING).0;
        assert_eq!(one(100_000), 100); // 10 * 100.00 gives 1.00
        assert_eq!(one(500), 1);
        assert_eq!(one(499), 0);
        assert_eq!(one(1_499), 1);
        assert_eq!(one(1_500), 2);
    }

    #[test]
    fn sell_reserves_units_and_no_fee() {
        let r = reserve(
            &TERMS,
            Side::Sell,
            Ticks(10),
            Lots(7),
            FillTotals::default(),
            FeeRate::TRADING,
        );
        assert_eq!(
            r,
            Ok(Reserve {
                main: Minor(700),
                fee: Minor::ZERO
            })
        );
    }

    #[test]
    fn overflow_is_refused() {
        let r = reserve(
            &TERMS,
            Side::Buy,
            Ticks::MAX,
            Lots::MAX,
            FillTotals::default(),
            FeeRate::TRADING,
        );
        assert_eq!(r, Err(MoneyError));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 128,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]
        #[test]
        fn fills_never_exceed_the_first_reserve(
            price in 1i64..100_000,
            fills in prop::collection::vec((1u64..50, 0i64..100), 1..40),
            rate in 0u32..20_000,
        ) {
            let rate = FeeRate(rate);
            let mut open = Lots(fills.iter().map(|f| f.0).sum());
            let mut fill_totals = FillTotals::default();
            let mut held = reserve(&TERMS, Side::Buy, Ticks(price), open, fill_totals, rate).unwrap();
            for (quantity, better) in fills {
                let value = TERMS.value(Ticks((price - better).max(1)), Lots(quantity)).unwrap();
                let charge = fee(fill_totals, value, rate);
                fill_totals = fill_totals.after_trade(Side::Buy, value, rate);
                open -= Lots(quantity);
                let after = reserve(&TERMS, Side::Buy, Ticks(price), open, fill_totals, rate).unwrap();
                prop_assert!(held.main - value - after.main >= Minor::ZERO);
                prop_assert!(held.fee - charge - after.fee >= Minor::ZERO);
                held = after;
            }
            prop_assert_eq!(i128::from(fill_totals.fee_minor.0), rate.half_up(i128::from(fill_totals.value_minor.0)));
        }
    }
}
