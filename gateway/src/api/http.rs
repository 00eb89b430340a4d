//! Diagnostic reads of the market (specification 4.6, D43). Each returns the resource of the
//! corresponding RPC.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::routing::get;
use rpc::Caller;
use rpc::json::{HttpError, Json, resource};
use serde::Deserialize;

use super::{depth, find_order, find_trade, render, render_trade};
use crate::market::Market;

pub fn routes(market: Arc<Market>) -> Router {
    Router::new()
        .route("/orderbook", get(order_book))
        .route("/orders/{order_id}", get(order))
        .route("/trades/{trade_id}", get(trade))
        .with_state(market)
}

#[derive(Deserialize)]
struct BookQuery {
    #[serde(default)]
    instrument_id: String,
    #[serde(default)]
    depth: u32,
}

async fn order_book(
    State(market): State<Arc<Market>>,
    Query(query): Query<BookQuery>,
) -> Result<Json, HttpError> {
    let view = depth::book(&market, &query.instrument_id, query.depth).await?;
    Ok(resource(&view, "dfa.market.v1.OrderBookSnapshot"))
}

async fn order(
    State(market): State<Arc<Market>>,
    caller: Caller,
    Path(order_id): Path<String>,
) -> Result<Json, HttpError> {
    let row = find_order(&market, &caller, &order_id).await?;
    Ok(resource(&render::order(&row), "dfa.market.v1.Order"))
}

async fn trade(
    State(market): State<Arc<Market>>,
    caller: Caller,
    Path(trade_id): Path<String>,
) -> Result<Json, HttpError> {
    let row = find_trade(&market, &caller, &trade_id).await?;
    Ok(resource(
        &render_trade(&market, &caller, &row),
        "dfa.market.v1.Trade",
    ))
}
