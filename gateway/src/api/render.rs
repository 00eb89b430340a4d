//! Renders the market's types as messages of the contract.

use proto::common::v1::Fee;
use proto::convert::{to_decimal, to_money, to_timestamp_us};
use proto::market::v1 as pb;
use replica::TradeStatus;
use types::command::OrderBounds;
use types::{OrderStatus, OrderType, Phase, Side, StpMode, TimeInForce};

use crate::funding::HoldView;
use crate::orders::members::Member;
use crate::projection::rows::{OrderRow, TradeRow};

/// The bounds of a request, with its unset fields filled from the bounds that were set.
pub fn bounds(given: pb::OrderBounds, set: &OrderBounds, member: &Member) -> pb::OrderBounds {
    let is_group = matches!(member, Member::Group(_));
    pb::OrderBounds {
        sessions_per_user: Some(set.sessions),
        messages_per_second_session: Some(set.session_rate),
        messages_per_second_user: Some(set.user_rate),
        messages_per_second_group: is_group.then_some(set.group_rate),
        ..given
    }
}

pub fn side(side: Side) -> pb::OrderSide {
    match side {
        Side::Buy => pb::OrderSide::Buy,
        Side::Sell => pb::OrderSide::Sell,
    }
}

pub fn order_type(order_type: OrderType) -> pb::OrderType {
    match order_type {
        OrderType::Limit => pb::OrderType::Limit,
        OrderType::Market => pb::OrderType::Market,
    }
}

fn time_in_force(time_in_force: TimeInForce) -> pb::TimeInForce {
    match time_in_force {
        TimeInForce::Gtc => pb::TimeInForce::Gtc,
        TimeInForce::Ioc => pb::TimeInForce::Ioc,
        TimeInForce::Fok => pb::TimeInForce::Fok,
        TimeInForce::Gtd => pb::TimeInForce::Gtd,
    }
}

fn status(status: OrderStatus) -> pb::OrderStatus {
    match status {
        OrderStatus::New | OrderStatus::Open => pb::OrderStatus::Open,
        OrderStatus::PartiallyFilled => pb::OrderStatus::PartiallyFilled,
        OrderStatus::Filled => pb::OrderStatus::Filled,
        OrderStatus::Cancelled => pb::OrderStatus::Cancelled,
        OrderStatus::Rejected => pb::OrderStatus::Rejected,
    }
}

fn stp(stp: StpMode) -> pb::SelfTradePrevention {
    match stp {
        StpMode::CancelNewest => pb::SelfTradePrevention::CancelNewest,
        StpMode::CancelOldest => pb::SelfTradePrevention::CancelOldest,
        StpMode::CancelBoth => pb::SelfTradePrevention::CancelBoth,
        StpMode::Decrement => pb::SelfTradePrevention::Decrement,
        StpMode::None => pb::SelfTradePrevention::Unspecified,
    }
}

pub fn phase(phase: Phase) -> pb::TradingPhase {
    match phase {
        Phase::PreOpen => pb::TradingPhase::PreOpen,
        Phase::Open => pb::TradingPhase::Open,
        Phase::Halt => pb::TradingPhase::Halt,
        Phase::Closed | Phase::Matured => pb::TradingPhase::Closed,
    }
}

pub fn order(row: &OrderRow) -> pb::Order {
    pb::Order {
        order_id: row.order_id.clone(),
        user_id: row.user_id.clone(),
        instrument_id: row.instrument_id.clone(),
        side: side(row.side).into(),
        r#type: order_type(row.order_type).into(),
        time_in_force: time_in_force(row.time_in_force).into(),
        price: row.price.map(to_decimal),
        quantity: Some(to_decimal(row.quantity)),
        status: status(row.status).into(),
        client_order_id: row.client_order_id.clone(),
        filled_quantity: Some(to_decimal(row.filled)),
        average_price: row.average_price().map(to_decimal),
        cancel_reason: row.cancel_reason.clone(),
        post_only: row.post_only,
        self_trade_prevention: stp(row.stp).into(),
        expires_at: (row.expires_at_us != 0).then(|| to_timestamp_us(row.expires_at_us)),
        created_at: Some(to_timestamp_us(row.created_at_us)),
        updated_at: Some(to_timestamp_us(row.updated_at_us)),
        engine_order_id: row.engine_order_id,
        sequence: row.sequence,
    }
}

pub fn trade(row: &TradeRow, settlement: TradeStatus) -> pb::Trade {
    pb::Trade {
        trade_id: row.trade_id.clone(),
        buy_order_id: row.buy_order_id.clone(),
        sell_order_id: row.sell_order_id.clone(),
        instrument_id: row.instrument_id.clone(),
        price: Some(to_decimal(row.price)),
        quantity: Some(to_decimal(row.quantity)),
        fee: Some(Fee {
            fee_type: "TRADING".to_owned(),
            amount: Some(to_money(row.fee_minor)),
        }),
        executed_at: Some(to_timestamp_us(row.executed_at_us)),
        buyer_id: row.buyer_id.clone(),
        seller_id: row.seller_id.clone(),
        settlement_status: match settlement {
            TradeStatus::Pending => pb::SettlementStatus::Pending,
            TradeStatus::Settled => pb::SettlementStatus::Settled,
            TradeStatus::Failed => pb::SettlementStatus::Failed,
        }
        .into(),
        trade_number: row.trade_number,
        aggressor_side: side(row.aggressor_side).into(),
    }
}

pub fn trading_hold(view: &HoldView) -> pb::TradingHold {
    pb::TradingHold {
        hold_id: view.hold_id.to_string(),
        user_id: view.user_id.clone(),
        instrument_id: view.instrument_id.clone(),
        subaccount_id: view.subaccount_id.clone(),
        undrawn: Some(to_decimal(view.undrawn)),
        drawn: Some(to_decimal(view.drawn)),
        status: match view.closed {
            false => pb::TradingHoldStatus::Open,
            true => pb::TradingHoldStatus::Closed,
        }
        .into(),
    }
}
