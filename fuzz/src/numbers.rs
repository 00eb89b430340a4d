//! Numbers and ids parsed from text.

use proto::common::v1::{Decimal as WireDecimal, MonetaryAmount, Money};
use proto::convert::{self, monetary_amount, money_minor, optional_decimal, to_decimal};
use rail::Rub;
use types::{
    BusinessDay, Decimal, InstrumentId, OperationType, OrderType, PaymentStatus, RejectReason,
    Rounding, Side, TimeInForce, UserId,
};

/// Maximum digits after the decimal point.
const SCALE_MAX: u8 = 18;

/// Parses the first two lines of any text as numbers, and the first line as a name.
pub fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let mut lines = text.split('\n');
    let (a, b) = (
        lines.next().unwrap_or_default(),
        lines.next().unwrap_or_default(),
    );
    check_conversions(a, b);
    check_names(a);
    let Ok(a) = a.parse::<Decimal>() else {
        return;
    };
    check_number(a);
    if let Ok(b) = b.parse::<Decimal>() {
        check_pair(a, b);
    }
}

fn check_number(a: Decimal) {
    let again: Decimal = a.to_string().parse().expect("formatted text parses");
    assert_eq!((again.mantissa(), again.scale()), (a.mantissa(), a.scale()));
    assert_eq!(a.normalized(), a);
    assert!(a.normalized().scale() <= a.scale());
    for decimals in 0..=SCALE_MAX {
        if let Ok(minor) = a.to_minor(decimals) {
            assert_eq!(Decimal::from_minor(minor, decimals), a);
        }
        if let Ok(exact) = a.rescale(decimals) {
            assert_eq!((exact.scale(), exact), (decimals, a));
        }
        let rounded = |rounding| a.rescale_rounded(decimals, rounding).ok();
        let (down, up) = (rounded(Rounding::Down), rounded(Rounding::Up));
        if let (Some(down), Some(up), Some(half)) = (down, up, rounded(Rounding::HalfUp)) {
            assert!(half == down || half == up);
            assert!((up.mantissa() - down.mantissa()).unsigned_abs() <= 1);
            assert!(down.mantissa().unsigned_abs() <= up.mantissa().unsigned_abs());
        }
    }
    // No number has 255 digits after the point.
    assert!(a.rescale(u8::MAX).is_err());
    if let Ok(amount) = Rub::from_decimal(a) {
        assert_eq!(amount.to_decimal(), a);
    }
}

fn check_pair(a: Decimal, b: Decimal) {
    let sum = a.checked_add(b);
    assert_eq!(sum, b.checked_add(a));
    if let Ok(sum) = sum
        && let Ok(back) = sum.checked_sub(b)
    {
        assert_eq!(back, a);
    }
    let product = a.checked_mul(b);
    assert_eq!(product, b.checked_mul(a));
    if let Ok(steps) = a.steps_of(b) {
        assert!(b.is_positive());
        let steps = Decimal::new(steps, 0).expect("the number of steps is a decimal");
        assert!(steps.checked_mul(b).is_ok_and(|product| product == a));
    }
    assert_eq!(a == b, a.checked_sub(b).is_ok_and(Decimal::is_zero));
    assert_eq!(a.cmp(&b), b.cmp(&a).reverse());
}

fn check_conversions(value: &str, code: &str) {
    let wire = WireDecimal {
        value: value.to_owned(),
    };
    let number = convert::decimal(Some(&wire));
    assert_eq!(number.is_ok(), value.parse::<Decimal>().is_ok());
    let optional = optional_decimal(Some(&wire));
    assert_eq!(optional.is_ok(), value.is_empty() || number.is_ok());
    if let Ok(number) = number {
        assert_eq!(convert::decimal(Some(&to_decimal(number))), Ok(number));
    }
    let money = Money {
        currency_code: code.to_owned(),
        amount: Some(wire.clone()),
    };
    if let Ok(kopecks) = money_minor(Some(&money)) {
        assert!(kopecks > 0 && code == "RUB");
        assert_eq!(money_minor(Some(&convert::to_money(kopecks))), Ok(kopecks));
    }
    let amount = MonetaryAmount {
        currency_code: code.to_owned(),
        amount: Some(wire),
    };
    if let Ok((found, number)) = monetary_amount(Some(&amount)) {
        assert!(found == code && number.is_positive());
    }
    if let Ok(time_us) = value.parse::<i32>() {
        let time_us = i64::from(time_us) * 1_000_003;
        let day = BusinessDay::of(time_us);
        assert!((day.start_us()..day.end_us()).contains(&time_us));
    }
}

/// Ids and codes: accepted text is returned unchanged.
fn check_names(text: &str) {
    if let Ok(id) = UserId::new(text) {
        assert_eq!(id.as_str(), text);
    }
    if let Ok(id) = InstrumentId::new(text) {
        assert_eq!(id.as_str(), text);
    }
    macro_rules! codes {
        ($($name:ident),+) => {$(
            if let Ok(code) = text.parse::<$name>() {
                assert_eq!(code.as_str(), text);
                assert_eq!($name::from_code(code.code()), Some(code));
            }
        )+};
    }
    codes!(
        Side,
        OrderType,
        TimeInForce,
        RejectReason,
        PaymentStatus,
        OperationType
    );
}

pub fn seeds() -> Vec<Vec<u8>> {
    let nines = "9".repeat(38);
    [
        "1.50\n0.25".to_owned(),
        "100.5\nRUB".to_owned(),
        "-0.000000000000000001\n123456789012345678901234567890".to_owned(),
        format!("{nines}\n{nines}"),
        format!("-{nines}\n0.000000000000000001"),
        "92233720368547758.07\n0.01".to_owned(),
        "0\n-0".to_owned(),
        "PRICE_BAND\n".to_owned(),
        "BUY\nSELL".to_owned(),
        "user-1".to_owned(),
        "-2147483648\n1e5".to_owned(),
    ]
    .map(String::into_bytes)
    .to_vec()
}
