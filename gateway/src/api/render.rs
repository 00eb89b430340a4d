//! The market's own shapes as messages of the contract.

use proto::common::v1::Fee;
use proto::convert::{to_decimal, to_money, to_timestamp_us};
use proto::market::v1 as pb;
use replica::TradeStatus;
use types::{Decimal, OrderStatus, OrderType, Phase, Side, StpMode, TimeInForce};

use crate::depth::{BookView, MarketView};
use crate::funding::HoldView;
use crate::projection::rows::{OrderRow, TradeRow};

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

/// Numbers computed from steps lose the zeros behind them: what was asked as `5` reads `5`.
fn number(value: Decimal) -> proto::common::v1::Decimal {
    to_decimal(value)
}

pub fn order(row: &OrderRow) -> pb::Order {
    pb::Order {
        order_id: row.order_id.clone(),
        user_id: row.user_id.clone(),
        instrument_id: row.instrument_id.clone(),
        side: side(row.side).into(),
        r#type: order_type(row.order_type).into(),
        time_in_force: time_in_force(row.time_in_force).into(),
        price: row.price.map(number),
        quantity: Some(number(row.quantity)),
        status: status(row.status).into(),
        client_order_id: row.client_order_id.clone(),
        filled_quantity: Some(number(row.filled)),
        average_price: row.average_price().map(number),
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
        price: Some(number(row.price)),
        quantity: Some(number(row.quantity)),
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
        undrawn: Some(number(view.undrawn)),
        drawn: Some(number(view.drawn)),
        status: match view.closed {
            false => pb::TradingHoldStatus::Open,
            true => pb::TradingHoldStatus::Closed,
        }
        .into(),
    }
}

pub fn book(view: &BookView) -> pb::OrderBookSnapshot {
    let levels = |levels: &[(types::Ticks, types::Lots)]| {
        levels
            .iter()
            .map(|(price, open)| pb::OrderBookLevel {
                price: Some(number(view.spec.price(*price))),
                quantity: Some(number(view.spec.quantity(*open))),
            })
            .collect()
    };
    pb::OrderBookSnapshot {
        instrument_id: view.spec.id.to_string(),
        bids: levels(&view.bids),
        asks: levels(&view.asks),
        captured_at: Some(to_timestamp_us(view.captured_at_us)),
        sequence: view.sequence.0,
        phase: phase(view.phase).into(),
    }
}

pub fn market_status(view: &MarketView) -> pb::GetMarketStatusResponse {
    let instruments = view.instruments.iter().map(|line| {
        let price = |ticks: Option<types::Ticks>| ticks.map(|t| number(line.spec.price(t)));
        pb::InstrumentMarketStatus {
            instrument_id: line.spec.id.to_string(),
            phase: phase(line.phase).into(),
            open_orders: line.open_orders,
            trades: line.trades,
            best_bid: price(line.best_bid),
            best_ask: price(line.best_ask),
        }
    });
    pb::GetMarketStatusResponse {
        commit_sequence: view.commit_sequence,
        settled_sequence: view.settled_sequence,
        trades_pending: view.trades_pending,
        trades_settled: view.trades_settled,
        instruments: instruments.collect(),
        kill_switch_engaged: view.is_killed,
        killed_user_ids: view.killed_users.clone(),
        state_hash: (view.state_hash.map(|hash| format!("{hash:016x}"))).unwrap_or_default(),
    }
}
