//! Rows of the history, in the form that its reads return.

use types::{Decimal, OrderStatus, OrderType, RejectReason, Side, StpMode, TimeInForce};

/// An order as a caller reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderRow {
    pub order_id: String,
    pub user_id: String,
    pub instrument_id: String,
    pub side: Side,
    pub order_type: OrderType,
    pub time_in_force: TimeInForce,
    pub post_only: bool,
    pub stp: StpMode,
    /// 0 = never.
    pub expires_at_us: i64,
    pub price: Option<Decimal>,
    pub quantity: Decimal,
    pub filled: Decimal,
    /// Total value of its trades in kopecks.
    pub value_minor: i64,
    pub status: OrderStatus,
    /// Reason of the cancel or the refusal, else empty.
    pub cancel_reason: String,
    /// The caller's text, or the number that a session sent; empty for none.
    pub client_order_id: String,
    pub engine_order_id: u64,
    pub sequence: u64,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

impl OrderRow {
    /// Mean price of its trades, eight digits, rounded half up; `None` without a trade.
    pub fn average_price(&self) -> Option<Decimal> {
        // A quotient is not a ledger amount: `rust_decimal` divides and rounds it.
        use rust_decimal::{Decimal as Quotient, RoundingStrategy};
        if self.filled.is_zero() {
            return None;
        }
        let filled = Quotient::try_from_i128_with_scale(
            self.filled.mantissa(),
            u32::from(self.filled.scale()),
        )
        .ok()?;
        let price = Quotient::new(self.value_minor, 2)
            .checked_div(filled)?
            .round_dp_with_strategy(8, RoundingStrategy::MidpointAwayFromZero);
        Some(
            Decimal::new(price.mantissa(), u8::try_from(price.scale()).ok()?)
                .ok()?
                .normalized(),
        )
    }
}

/// A trade as a caller reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TradeRow {
    pub trade_id: String,
    /// Position in lists: sequence and event index.
    pub key: i64,
    pub buy_order_id: String,
    pub sell_order_id: String,
    pub buyer_id: String,
    pub seller_id: String,
    pub instrument_id: String,
    pub price: Decimal,
    pub quantity: Decimal,
    pub fee_minor: i64,
    pub trade_number: u64,
    pub aggressor_side: Side,
    pub executed_at_us: i64,
    /// Sequence of the command that made it.
    pub sequence: u64,
}

/// The stored answer to a call with an idempotency key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerRow {
    pub sequence: u64,
    pub order_id: String,
    pub cancelled: u32,
    /// Why the book refused the requested change.
    pub refusal: Option<RejectReason>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(filled: &str, value_minor: i64) -> OrderRow {
        OrderRow {
            order_id: String::new(),
            user_id: String::new(),
            instrument_id: String::new(),
            side: Side::Buy,
            order_type: OrderType::Limit,
            time_in_force: TimeInForce::Gtc,
            post_only: false,
            stp: StpMode::CancelNewest,
            expires_at_us: 0,
            price: None,
            quantity: filled.parse().unwrap(),
            filled: filled.parse().unwrap(),
            value_minor,
            status: OrderStatus::Filled,
            cancel_reason: String::new(),
            client_order_id: String::new(),
            engine_order_id: 0,
            sequence: 1,
            created_at_us: 0,
            updated_at_us: 0,
        }
    }

    // rows: R145
    #[test]
    fn r145_average_price_is_exact_or_rounded_half_up() {
        let average = |filled: &str, value| {
            let price = order(filled, value).average_price();
            price.map(|p| p.to_string())
        };
        assert_eq!(average("10", 100_050).as_deref(), Some("100.05"));
        assert_eq!(average("3", 10_000).as_deref(), Some("33.33333333"));
        assert_eq!(average("0.003", 20).as_deref(), Some("66.66666667"));
        assert_eq!(average("0", 0), None);
    }
}
