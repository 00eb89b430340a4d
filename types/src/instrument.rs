//! Trading parameters of an instrument.
//!
//! Built once from decimals by [`InstrumentSpec::new`], which enforces rule D35 (tick times lot is
//! a whole number of kopecks). All later arithmetic uses integers.

use core::fmt;

use crate::decimal::{Decimal, DecimalError, Rounding};
use crate::ids::InstrumentIx;
use crate::money::Amount;
use crate::number::{FeeRate, Lots, Minor, Ticks};
use crate::order::{Phase, Side};
use crate::text::InstrumentId;

/// Fraction digits of CFA-RUB.
pub const MONEY_DECIMALS: u8 = 2;

/// Why an instrument cannot be traded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecError {
    /// More than 18 decimals.
    Decimals,
    /// Tick or lot is zero, negative or out of range.
    Step,
    /// Tick times lot is not a whole number of kopecks (D35).
    TickTimesLot,
    /// The lot has more fraction digits than the instrument's decimals.
    LotTooFine,
    /// Band is empty or not positive.
    Band,
    /// Fee rate above 100 %.
    FeeRate,
    /// Only one half of a velocity rule is set.
    Velocity,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Decimals => "decimals must be at most 18",
            Self::Step => "tick size and lot size must be positive",
            Self::TickTimesLot => "tick size times lot size must be a multiple of 0.01",
            Self::LotTooFine => "lot size is finer than the instrument's decimals",
            Self::Band => "price band must be positive and not empty",
            Self::FeeRate => "fee rate must be at most 1",
            Self::Velocity => "velocity width and window must both be given or both be zero",
        })
    }
}

impl core::error::Error for SpecError {}

/// Input for [`InstrumentSpec::new`].
#[derive(Clone, Copy, Debug)]
pub struct InstrumentParams {
    pub ix: InstrumentIx,
    pub id: InstrumentId,
    /// Fraction digits of a unit in the ledger.
    pub decimals: u8,
    /// Price step, in roubles per unit.
    pub tick_size: Decimal,
    /// Quantity step, in units.
    pub lot_size: Decimal,
    pub fee_rate: FeeRate,
    /// Lowest and highest price of an order, both inclusive.
    pub band_low: Ticks,
    pub band_high: Ticks,
    /// Maximum distance of a market order from the last best price, in parts per million.
    pub collar_ppm: u32,
    pub velocity: VelocityRule,
    pub phase: Phase,
}

impl InstrumentParams {
    /// An instrument as the registry lists it without market parameters: ticks of one kopeck, lots
    /// of one unit, no band, open. Its index is not assigned yet.
    pub fn new(id: InstrumentId) -> Self {
        Self {
            ix: InstrumentIx::NONE,
            id,
            decimals: 0,
            tick_size: Decimal::from_minor(1, 2),
            lot_size: Decimal::from_integer(1),
            fee_rate: FeeRate::TRADING,
            band_low: Ticks(1),
            band_high: Ticks::ORDER_MAX,
            collar_ppm: 50_000,
            velocity: VelocityRule::OFF,
            phase: Phase::Open,
        }
    }

    /// An instrument with the steps and the price band that the registry lists for it. A limit of
    /// the band between two ticks is rounded into the band.
    ///
    /// # Errors
    /// `Step` or `Band` for values out of range.
    pub fn listed(
        id: InstrumentId,
        decimals: u8,
        tick_size: Option<Decimal>,
        lot_size: Option<Decimal>,
        band: (Option<Decimal>, Option<Decimal>),
    ) -> Result<Self, SpecError> {
        let unlisted = Self::new(id);
        let tick_size = tick_size.unwrap_or(unlisted.tick_size);
        let ticks = |price, rounding| band_ticks(price, tick_size, rounding);
        Ok(Self {
            decimals,
            tick_size,
            lot_size: lot_size.unwrap_or(unlisted.lot_size),
            band_low: match band.0 {
                Some(price) => ticks(price, Rounding::Up)?.max(Ticks(1)),
                None => unlisted.band_low,
            },
            band_high: match band.1 {
                Some(price) => ticks(price, Rounding::Down)?,
                None => unlisted.band_high,
            },
            ..unlisted
        })
    }
}

/// A price limit in ticks.
fn band_ticks(price: Decimal, tick: Decimal, rounding: Rounding) -> Result<Ticks, SpecError> {
    if !tick.is_positive() {
        return Err(SpecError::Step);
    }
    let scale = price.scale().max(tick.scale());
    let wide = |value: Decimal| value.rescale(scale).map(|value| value.mantissa());
    let (Ok(price), Ok(tick)) = (wide(price), wide(tick)) else {
        return Err(SpecError::Band);
    };
    let up = i128::from(rounding == Rounding::Up && price % tick > 0);
    let steps = i64::try_from(price / tick + up);
    steps.map(Ticks).map_err(|_| SpecError::Band)
}

/// Velocity halt of a market (F08): how far trades may move the price within a window.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct VelocityRule {
    /// Maximum distance of a trade from the window's reference price, in parts per million of it; 0
    /// = no rule.
    pub width_ppm: u32,
    /// Length of a window, in milliseconds of journalled time; 0 = no rule.
    pub window_ms: u32,
}

impl VelocityRule {
    pub const OFF: Self = Self {
        width_ppm: 0,
        window_ms: 0,
    };

    #[inline(always)]
    pub const fn is_on(self) -> bool {
        self.width_ppm != 0
    }

    pub const fn window_ns(self) -> u64 {
        self.window_ms as u64 * 1_000_000
    }

    /// True when a trade at `price` is within the limits around the reference, inclusive.
    pub fn allows(self, reference: Ticks, price: Ticks) -> bool {
        let distance = i128::from(price.0) - i128::from(reference.0);
        distance.abs() * 1_000_000 <= i128::from(reference.0) * i128::from(self.width_ppm)
    }
}

/// Factors that convert prices and quantities to money.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Terms {
    /// Kopecks per lot and tick.
    pub value_minor: i64,
    /// Minor units of the instrument per lot.
    pub units_minor: i64,
}

/// An instrument in the trading path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct InstrumentSpec {
    pub ix: InstrumentIx,
    pub id: InstrumentId,
    pub decimals: u8,
    pub phase: Phase,
    tick_scale: u8,
    lot_scale: u8,
    tick_mantissa: i64,
    lot_mantissa: i64,
    pub terms: Terms,
    pub band_low: Ticks,
    pub band_high: Ticks,
    pub fee_rate: FeeRate,
    pub collar_ppm: u32,
    pub velocity: VelocityRule,
}

impl InstrumentSpec {
    /// An amount of the instrument's units.
    pub fn amount(&self, minor: Minor) -> Amount {
        Amount {
            instrument: self.id,
            decimals: self.decimals,
            minor,
        }
    }

    /// Checks the parameters and derives the integers.
    pub fn new(params: &InstrumentParams) -> Result<Self, SpecError> {
        let (tick, lot) = (params.tick_size.normalized(), params.lot_size.normalized());
        if params.decimals > crate::decimal::SCALE_MAX {
            return Err(SpecError::Decimals);
        }
        if !tick.is_positive() || !lot.is_positive() {
            return Err(SpecError::Step);
        }
        if params.band_low.0 < 1 || params.band_high < params.band_low {
            return Err(SpecError::Band);
        }
        if i128::from(params.fee_rate.0) > FeeRate::SCALE {
            return Err(SpecError::FeeRate);
        }
        if (params.velocity.width_ppm == 0) != (params.velocity.window_ms == 0) {
            return Err(SpecError::Velocity);
        }
        let value_minor = tick
            .checked_mul(lot)
            .and_then(|v| v.to_minor(MONEY_DECIMALS))
            .map_err(|_| SpecError::TickTimesLot)?;
        let units_minor = lot
            .to_minor(params.decimals)
            .map_err(|_| SpecError::LotTooFine)?;
        Ok(Self {
            ix: params.ix,
            id: params.id,
            decimals: params.decimals,
            phase: params.phase,
            tick_scale: tick.scale(),
            lot_scale: lot.scale(),
            tick_mantissa: i64::try_from(tick.mantissa()).map_err(|_| SpecError::Step)?,
            lot_mantissa: i64::try_from(lot.mantissa()).map_err(|_| SpecError::Step)?,
            terms: Terms {
                value_minor,
                units_minor,
            },
            band_low: params.band_low,
            band_high: params.band_high,
            fee_rate: params.fee_rate,
            collar_ppm: params.collar_ppm,
            velocity: params.velocity,
        })
    }

    /// Price step in roubles per unit.
    pub fn tick_size(&self) -> Decimal {
        Decimal::from_minor(self.tick_mantissa, self.tick_scale)
    }

    /// Quantity step in units.
    pub fn lot_size(&self) -> Decimal {
        Decimal::from_minor(self.lot_mantissa, self.lot_scale)
    }

    /// Converts a price to ticks. Does not check the sign.
    ///
    /// `Inexact` when it is no multiple of the tick, `Overflow` past 64 bits.
    pub fn ticks(&self, price: Decimal) -> Result<Ticks, DecimalError> {
        let steps = price.steps_of(self.tick_size())?;
        i64::try_from(steps)
            .map(Ticks)
            .map_err(|_| DecimalError::Overflow)
    }

    /// Converts a quantity to lots.
    ///
    /// `Inexact` when it is no multiple of the lot, `Overflow` when negative or past 64 bits.
    pub fn lots(&self, quantity: Decimal) -> Result<Lots, DecimalError> {
        let steps = quantity.steps_of(self.lot_size())?;
        u64::try_from(steps)
            .map(Lots)
            .map_err(|_| DecimalError::Overflow)
    }

    /// Converts a price to roubles per unit.
    pub fn price(&self, price: Ticks) -> Decimal {
        Decimal::new(
            i128::from(price.0) * i128::from(self.tick_mantissa),
            self.tick_scale,
        )
        .expect("price exceeds 38 digits")
    }

    /// Converts a quantity to units.
    pub fn quantity(&self, quantity: Lots) -> Decimal {
        Decimal::new(
            i128::from(quantity.0) * i128::from(self.lot_mantissa),
            self.lot_scale,
        )
        .expect("quantity exceeds 38 digits")
    }

    /// True inside the price band, inclusive.
    pub fn in_band(&self, price: Ticks) -> bool {
        self.band_low <= price && price <= self.band_high
    }

    /// False when the band has no upper limit: it cannot protect a market order.
    pub fn has_band(&self) -> bool {
        self.band_high < Ticks::ORDER_MAX
    }

    /// Protection price of a market order (T19); `None` without best price and band limit.
    ///
    /// Best opposite price plus (minus) the collar, clamped to the band; without a best price the
    /// band's far limit.
    pub fn protection_price(&self, side: Side, best_opposite: Option<Ticks>) -> Option<Ticks> {
        let Some(best) = best_opposite else {
            return self.has_band().then_some(match side {
                Side::Buy => self.band_high,
                Side::Sell => self.band_low,
            });
        };
        let width = i128::from(best.0) * i128::from(self.collar_ppm) / 1_000_000;
        let raw = match side {
            Side::Buy => i128::from(best.0) + width,
            Side::Sell => i128::from(best.0) - width,
        };
        let bounded = raw.clamp(i128::from(self.band_low.0), i128::from(self.band_high.0));
        Some(Ticks(
            i64::try_from(bounded).expect("clamped to a 64-bit band"),
        ))
    }

    /// True when prices and quantities have the same meaning in both specs: open orders may stay.
    pub fn same_steps(&self, other: &Self) -> bool {
        self.ix == other.ix
            && self.id == other.id
            && self.terms == other.terms
            && self.tick_size() == other.tick_size()
            && self.lot_size() == other.lot_size()
    }
}

impl Terms {
    /// Kopecks of a quantity at a price, exact.
    pub fn value_wide(&self, price: Ticks, quantity: Lots) -> Option<i128> {
        i128::from(price.0)
            .checked_mul(i128::from(quantity.0))?
            .checked_mul(i128::from(self.value_minor))
    }

    /// Kopecks of a quantity at a price; `None` past 64 bits.
    #[inline]
    pub fn value(&self, price: Ticks, quantity: Lots) -> Option<Minor> {
        let narrow = i64::try_from(quantity.0)
            .ok()
            .and_then(|lots| price.0.checked_mul(lots))
            .and_then(|value| value.checked_mul(self.value_minor));
        match narrow {
            Some(value) => Some(Minor(value)),
            None => self.value_wide(price, quantity).and_then(Minor::from_wide),
        }
    }

    /// Minor units of the instrument in a quantity; `None` past 64 bits.
    pub fn units(&self, quantity: Lots) -> Option<Minor> {
        i128::from(quantity.0)
            .checked_mul(i128::from(self.units_minor))
            .and_then(Minor::from_wide)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn params(tick: &str, lot: &str, decimals: u8) -> InstrumentParams {
        InstrumentParams {
            decimals,
            tick_size: tick.parse().unwrap(),
            lot_size: lot.parse().unwrap(),
            band_high: Ticks(1_000_000),
            ..InstrumentParams::new(InstrumentId::new("BOND-1").unwrap())
        }
    }

    #[test]
    fn a_listed_band_is_rounded_into_itself() {
        let id = InstrumentId::new("BOND-1").unwrap();
        let listed = |tick: &str, low: Option<&str>, high: Option<&str>| {
            let number = |text: &str| text.parse::<Decimal>().unwrap();
            let band = (low.map(number), high.map(number));
            let listed = InstrumentParams::listed(id, 0, Some(number(tick)), None, band);
            listed.map(|params| (params.band_low.0, params.band_high.0))
        };
        let whole = Ticks::ORDER_MAX.0;
        assert_eq!(listed("0.05", None, None), Ok((1, whole)));
        assert_eq!(listed("0.05", Some("10.01"), None), Ok((201, whole)));
        assert_eq!(listed("0.05", Some("10"), Some("10.04")), Ok((200, 200)));
        assert_eq!(listed("0.05", Some("0.01"), Some("0.05")), Ok((1, 1)));
        for tick in ["0", "-0.05"] {
            assert_eq!(listed(tick, Some("1"), None), Err(SpecError::Step));
        }
        let huge = "99999999999999999999999999999999999999";
        assert_eq!(listed("0.05", None, Some(huge)), Err(SpecError::Band));
        assert_eq!(listed("1", Some(huge), None), Err(SpecError::Band));
    }

    #[test]
    fn tick_times_lot_must_be_whole_kopecks() {
        assert!(InstrumentSpec::new(&params("0.01", "1", 0)).is_ok());
        assert!(InstrumentSpec::new(&params("0.1", "0.1", 4)).is_ok());
        assert_eq!(
            InstrumentSpec::new(&params("0.01", "0.1", 4)),
            Err(SpecError::TickTimesLot)
        );
        assert_eq!(
            InstrumentSpec::new(&params("10", "0.1", 0)),
            Err(SpecError::LotTooFine)
        );
        assert_eq!(
            InstrumentSpec::new(&params("0", "1", 0)),
            Err(SpecError::Step)
        );
        let mut half = params("0.01", "1", 0);
        half.velocity.width_ppm = 1;
        assert_eq!(InstrumentSpec::new(&half), Err(SpecError::Velocity));
    }

    #[test]
    fn f08_a_velocity_rule_measures_from_its_reference() {
        let rule = VelocityRule {
            width_ppm: 50_000,
            window_ms: 1,
        };
        let allows = |price| rule.allows(Ticks(1_010), Ticks(price));
        // 5 % of 1,010 is 50.5 ticks.
        assert_eq!(
            [959, 960, 1_060, 1_061].map(allows),
            [false, true, true, false]
        );
        assert!(!VelocityRule::OFF.is_on());
    }

    #[test]
    fn converts_both_ways() {
        let spec = InstrumentSpec::new(&params("0.05", "10", 2)).unwrap();
        assert_eq!(
            spec.terms,
            Terms {
                value_minor: 50,
                units_minor: 1000
            }
        );
        let price = spec.ticks("100.15".parse().unwrap()).unwrap();
        assert_eq!(price, Ticks(2003));
        assert_eq!(spec.price(price).to_string(), "100.15");
        assert!(spec.ticks("100.12".parse().unwrap()).is_err());
        assert_eq!(spec.lots("120".parse().unwrap()), Ok(Lots(12)));
        assert!(spec.lots("-10".parse().unwrap()).is_err());
        assert_eq!(spec.quantity(Lots(12)).to_string(), "120");
        assert_eq!(spec.terms.value(price, Lots(12)), Some(Minor(120 * 10015)));
    }

    #[test]
    fn protection_price_stays_in_the_band() {
        let mut p = params("1", "1", 0);
        p.band_low = Ticks(90);
        p.band_high = Ticks(110);
        let spec = InstrumentSpec::new(&p).unwrap();
        let price =
            |side, best: Option<i64>| spec.protection_price(side, best.map(Ticks)).map(|p| p.0);
        assert_eq!(price(Side::Buy, Some(100)), Some(105));
        assert_eq!(price(Side::Buy, Some(109)), Some(110));
        assert_eq!(price(Side::Sell, Some(100)), Some(95));
        assert_eq!(price(Side::Sell, Some(91)), Some(90));
        assert_eq!(price(Side::Buy, None), Some(110));
        assert_eq!(price(Side::Sell, None), Some(90));
        p.band_high = Ticks::ORDER_MAX;
        let open = InstrumentSpec::new(&p).unwrap();
        assert_eq!(open.protection_price(Side::Buy, None), None);
        assert_eq!(open.protection_price(Side::Sell, None), None);
    }
}
