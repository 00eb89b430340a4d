//! Arithmetic of issues and redemptions: exact, as pure functions.

use types::{Decimal, DecimalError, Rounding};

use crate::model::{
    CFA_RUB_DECIMALS, Coupon, FEES, Holder, PLACEMENT_ACCOUNT, REDEMPTION_ACCOUNT, RedemptionLine,
};

/// Roubles per unit at the record date: nominal plus the coupons of its day that are due by then
/// (specification 1.5). Coupons of earlier days are paid to the holders of those days.
pub fn worth_per_unit(
    nominal: Decimal,
    coupons: &[Coupon],
    record_date_us: i64,
) -> Result<Decimal, DecimalError> {
    let (first_us, _) = day_us(record_date_us);
    let mut due = coupons
        .iter()
        .filter(|coupon| (first_us..=record_date_us).contains(&coupon.pays_at_us));
    due.try_fold(nominal, |sum, coupon| sum.checked_add(coupon.amount))
}

/// Roubles per unit over the life of the issue: nominal plus all coupons.
pub fn total_per_unit(nominal: Decimal, coupons: &[Coupon]) -> Result<Decimal, DecimalError> {
    let mut all = coupons.iter();
    all.try_fold(nominal, |sum, coupon| sum.checked_add(coupon.amount))
}

/// Kopecks for a number of units, rounded half up per holder.
pub fn payment_minor(
    units_minor: i64,
    decimals: u8,
    worth_per_unit: Decimal,
) -> Result<i64, DecimalError> {
    let units = Decimal::from_minor(units_minor, decimals).normalized();
    let worth = worth_per_unit.normalized();
    // The product is exact: the scales sum to at most 36, and an overflow of the mantissa is
    // checked.
    let mantissa = units
        .mantissa()
        .checked_mul(worth.mantissa())
        .ok_or(DecimalError::Overflow)?;
    let scale = units.scale() + worth.scale();
    let kopecks = if scale <= CFA_RUB_DECIMALS {
        mantissa
            .checked_mul(10i128.pow(u32::from(CFA_RUB_DECIMALS - scale)))
            .ok_or(DecimalError::Overflow)?
    } else {
        let divisor = 10i128.pow(u32::from(scale - CFA_RUB_DECIMALS));
        let (quotient, rest) = (mantissa / divisor, mantissa % divisor);
        quotient
            + if rest.abs().saturating_mul(2) >= divisor {
                rest.signum()
            } else {
                0
            }
    };
    i64::try_from(kopecks).map_err(|_| DecimalError::Overflow)
}

/// The payment of each holder of the snapshot, and the sum that the issuer must fund.
pub fn redemption(
    holders: &[Holder],
    decimals: u8,
    worth_per_unit: Decimal,
) -> Result<(Vec<RedemptionLine>, i64), DecimalError> {
    let mut total_minor = 0i64;
    let mut lines = Vec::with_capacity(holders.len());
    for holder in holders {
        let payment = payment_minor(holder.units_minor, decimals, worth_per_unit)?;
        total_minor = total_minor
            .checked_add(payment)
            .ok_or(DecimalError::Overflow)?;
        lines.push(RedemptionLine {
            user_id: holder.user_id.clone(),
            address: holder.address.clone(),
            units_minor: holder.units_minor,
            payment_minor: payment,
        });
    }
    Ok((lines, total_minor))
}

/// The payment of a coupon to each holder of the snapshot, and the sum that the issuer must fund
/// (R100). Leaves out holders whose payment rounds to zero, and the platform's accounts: units of
/// a placement that are not delivered yet have no holder.
pub fn coupon(
    holders: &[Holder],
    decimals: u8,
    amount: Decimal,
) -> Result<(Vec<RedemptionLine>, i64), DecimalError> {
    let (mut lines, _) = redemption(holders, decimals, amount)?;
    lines.retain(|line| line.payment_minor > 0 && !is_house(&line.user_id));
    let total_minor = lines.iter().try_fold(0i64, |sum, line| {
        sum.checked_add(line.payment_minor)
            .ok_or(DecimalError::Overflow)
    })?;
    Ok((lines, total_minor))
}

fn is_house(user_id: &str) -> bool {
    [FEES, PLACEMENT_ACCOUNT, REDEMPTION_ACCOUNT].contains(&user_id)
}

/// Share of the supply in percent, with six decimal places.
pub fn share_percent(units_minor: i64, supply_minor: i64) -> Decimal {
    if supply_minor <= 0 {
        return Decimal::ZERO;
    }
    // A share is no ledger amount, so `rust_decimal` may divide and round it.
    let share = rust_decimal::Decimal::from(units_minor) * rust_decimal::Decimal::ONE_HUNDRED
        / rust_decimal::Decimal::from(supply_minor);
    let share =
        share.round_dp_with_strategy(6, rust_decimal::RoundingStrategy::MidpointAwayFromZero);
    Decimal::new(share.mantissa(), share.scale() as u8)
        .and_then(|share| share.rescale_rounded(6, Rounding::HalfUp))
        .unwrap_or(Decimal::ZERO)
}

/// A day in microseconds.
pub const DAY: i64 = 24 * 3_600 * 1_000_000;

/// First and last microsecond of the Moscow day that contains `time_us`.
pub fn day_us(time_us: i64) -> (i64, i64) {
    let last_us = end_of_day_us(time_us);
    (last_us - DAY + 1, last_us)
}

/// Last microsecond of the Moscow day (UTC+3, no summer time) that contains `time_us`.
pub fn end_of_day_us(time_us: i64) -> i64 {
    const OFFSET: i64 = 3 * 3_600 * 1_000_000;
    (time_us + OFFSET).div_euclid(DAY) * DAY + DAY - OFFSET - 1
}

/// Whether `time_us`, which may be any number, is in the Moscow day of `day_us`.
pub fn is_same_day(time_us: i64, day_us: i64) -> bool {
    let (first_us, last_us) = self::day_us(day_us);
    (first_us..=last_us).contains(&time_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn d(text: &str) -> Decimal {
        text.parse().expect("number")
    }

    fn holder(user: &str, units_minor: i64) -> Holder {
        Holder {
            user_id: user.into(),
            address: user.into(),
            units_minor,
            since_us: 0,
            as_of_block: 1,
            updated_at_us: 0,
        }
    }

    // rows: R100
    #[test]
    fn r100_amounts_are_nominal_plus_due_coupons_and_sum_to_the_funding() {
        let coupons = [
            Coupon {
                pays_at_us: 10,
                amount: d("35.505"),
            },
            Coupon {
                pays_at_us: 20,
                amount: d("35.50"),
            },
            Coupon {
                pays_at_us: 30,
                amount: d("99"),
            },
        ];
        let worth = worth_per_unit(d("1000"), &coupons, 20).expect("worth");
        assert_eq!(worth, d("1071.005"));
        let holders = [holder("a", 1), holder("b", 3), holder("c", 10)];
        let (lines, total) = redemption(&holders, 0, worth).expect("plan");
        let amounts: Vec<_> = lines.iter().map(|line| line.payment_minor).collect();
        assert_eq!(amounts, [107_101, 321_302, 1_071_005], "half up per holder");
        assert_eq!(total, amounts.iter().sum::<i64>());
        let (fine, _) = redemption(&[holder("a", 5)], 3, worth).expect("plan");
        assert_eq!(
            fine[0].payment_minor, 536,
            "0.005 units at 1071.005 are 5.355025 roubles"
        );
    }

    // rows: R100
    #[test]
    fn r100_a_redemption_pays_the_coupon_of_its_day_and_no_other() {
        const AT: i64 = 1_795_294_799_000_000;
        let coupon = |pays_at_us, amount| Coupon {
            pays_at_us,
            amount: d(amount),
        };
        let coupons = [
            coupon(AT - DAY, "1"),
            coupon(AT, "10"),
            coupon(AT + 1_000_000, "100"),
        ];
        let worth = worth_per_unit(d("1000"), &coupons, end_of_day_us(AT)).expect("worth");
        assert_eq!(worth, d("1010"));
        let whole = total_per_unit(d("1000"), &coupons).expect("total");
        assert_eq!(whole, d("1111"));
    }

    // rows: R100
    #[test]
    fn r100_a_coupon_is_rounded_per_holder_and_pays_no_house_account() {
        let holders = [
            holder("a", 1),
            holder("b", 3),
            holder("c", 0),
            holder(PLACEMENT_ACCOUNT, 10),
        ];
        let (lines, total) = coupon(&holders, 0, d("35.505")).expect("plan");
        let paid: Vec<_> = lines
            .iter()
            .map(|line| (line.user_id.as_str(), line.units_minor, line.payment_minor))
            .collect();
        assert_eq!(paid, [("a", 1, 3_551), ("b", 3, 10_652)]);
        assert_eq!(total, 14_203);
        let (none, total) = coupon(&holders, 0, d("0.001")).expect("plan");
        assert_eq!((none.len(), total), (0, 0));
    }

    #[test]
    fn shares_and_days() {
        assert_eq!(share_percent(1, 3).to_string(), "33.333333");
        assert_eq!(share_percent(5, 0), Decimal::ZERO);
        // 2026-11-21T20:59:59Z is 23:59:59 in Moscow, 21:00:00Z is the next day there
        let at = 1_795_294_799_000_000;
        assert_eq!(end_of_day_us(at), at + 999_999);
        assert_eq!(
            end_of_day_us(at + 1_000_000),
            at + 999_999 + 24 * 3_600 * 1_000_000
        );
        assert!(is_same_day(at + 999_999, at) && !is_same_day(at + 1_000_000, at));
        assert!(!is_same_day(i64::MAX, at) && !is_same_day(i64::MIN, at));
    }
}
