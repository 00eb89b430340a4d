//! PlaceOrder: the user's trading hold where it covers the order, else a hold of the order's own.

use std::sync::Arc;

use admission::{NewRequest, Reject, Request};
use rpc::Context;
use sequencer::{NotTaken, Record};
use service_clients::ledger::NewHold;
use tonic::Status;
use types::{
    Done, HoldIx, Id128, InstrumentSpec, Lots, OrderType, PoolKind, RejectReason, SessionIx, Side,
    StpMode, Ticks, TimeInForce, derived, order_uuid, reserve,
};

use super::{Answered, find, shown};
use crate::failpoint;
use crate::funding;
use crate::market::{Asset, Market, SOURCE, now_us};
use crate::projection::repo;
use crate::projection::rows::OrderRow;
use crate::refusal;

/// Reason text of a hold of an order's own. The order's number is not known before the journal has it; the holds that settlement splits out of it name
/// the order.
pub const ORDER_REASON: &str = "Order of request";

/// A well-formed order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewOrder {
    pub user_id: String,
    pub spec: InstrumentSpec,
    pub side: Side,
    pub order_type: OrderType,
    pub time_in_force: TimeInForce,
    pub post_only: bool,
    pub stp: StpMode,
    pub expire_at_ns: u64,
    pub price: Option<Ticks>,
    pub quantity: Lots,
    /// Empty for none.
    pub client_order_id: String,
}

impl NewOrder {
    fn asset(&self) -> Asset {
        match self.side {
            Side::Buy => Asset::MONEY,
            Side::Sell => Asset::units(self.spec),
        }
    }
}

/// PlaceOrder.
pub async fn place(
    market: &Arc<Market>,
    context: &Context,
    order: &NewOrder,
) -> Result<Answered<OrderRow>, Status> {
    let user_id = &order.user_id;
    let key_hash = derived::key_hash("PlaceOrder", user_id, &context.idempotency_key);
    if let Some(answer) = market.answered(key_hash).await? {
        return find(market, &answer.order_id).await.map(Answered::before);
    }
    market.identity.check_may_trade(context, user_id).await?;
    let user = market.bind_user(user_id).await?;
    note(market, context, key_hash, order).await?;

    let mut request = NewRequest {
        instrument: order.spec.ix,
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        client_order_id: match order.client_order_id.as_str() {
            "" => 0,
            text => derived::client_order_number(text),
        },
        stp_group: None,
        stp: order.stp,
        side: order.side,
        order_type: order.order_type,
        time_in_force: order.time_in_force,
        post_only: order.post_only,
        expire_at_ns: order.expire_at_ns,
        price: spending_price(market, order).await?,
        quantity: order.quantity,
        pool: None,
        limit_checked: false,
        key_hash,
    };
    let pool = market.default_pool(user, order.asset().ix).await?;
    if pool.is_some() {
        match draw_on_trading_hold(market, context, order, &mut request).await? {
            Drawn::Done(record) => return placed(market, &record).await,
            Drawn::AnsweredBefore => return before(market, key_hash).await,
            Drawn::NotCovered => {}
        }
    }
    if !request.limit_checked {
        check_limit(market, context, order, request.price).await?;
        request.limit_checked = true;
    }
    match own_hold(market, context, order, &mut request).await? {
        Some(record) => placed(market, &record).await,
        None => before(market, key_hash).await,
    }
}

async fn placed(market: &Market, record: &Record) -> Result<Answered<OrderRow>, Status> {
    let envelope = &record.command;
    let id = order_uuid(envelope.time_ns, market.node, envelope.sequence);
    shown(market, record, &id.to_string())
        .await
        .map(Answered::now)
}

/// Another call under the same key was faster.
async fn before(market: &Market, key_hash: Id128) -> Result<Answered<OrderRow>, Status> {
    match market.answered(key_hash).await? {
        Some(answer) => find(market, &answer.order_id).await.map(Answered::before),
        None => Err(refusal::request_expired()),
    }
}

async fn note(
    market: &Market,
    context: &Context,
    key_hash: Id128,
    order: &NewOrder,
) -> Result<(), Status> {
    let text = order.client_order_id.as_str();
    let client_order =
        (!text.is_empty()).then(|| (&*order.user_id, derived::client_order_number(text), text));
    repo::note_request(
        &market.projection.db,
        key_hash,
        &context.correlation_id,
        client_order,
        now_us(),
    )
    .await
    .map_err(|error| rpc::status::internal(&error))
}

/// The price the money is counted with. A market buy without its own price and without an offer in the book gets the lowest price of the band: it
/// costs next to nothing and ends `NO_LIQUIDITY` (T19).
async fn spending_price(market: &Market, order: &NewOrder) -> Result<Option<Ticks>, Status> {
    if order.order_type == OrderType::Limit || order.price.is_some() {
        return Ok(order.price);
    }
    let (ix, side) = (order.spec.ix, order.side);
    let best = market
        .inspect(move |core| core.admission().quote(ix).opposite(side))
        .await?;
    let protection = match (side, best) {
        (Side::Buy, None) => None,
        (_, best) => order.spec.protection_price(side, best),
    };
    Ok(Some(protection.unwrap_or(order.spec.band_low)))
}

async fn check_limit(
    market: &Market,
    context: &Context,
    order: &NewOrder,
    price: Option<Ticks>,
) -> Result<(), Status> {
    let terms = order.spec.terms;
    let notional = terms
        .value(price.unwrap_or(order.spec.band_low), order.quantity)
        .ok_or_else(|| refusal::refused(&RejectReason::AmountOverflow.into()))?;
    let quantity = order.spec.quantity(order.quantity);
    market
        .identity
        .check_trading(context, &order.user_id, quantity, notional)
        .await
}

enum Drawn {
    Done(Record),
    /// The key is known by now.
    AnsweredBefore,
    /// The trading hold does not cover it: the order may still have a hold of its own.
    NotCovered,
}

async fn draw_on_trading_hold(
    market: &Market,
    context: &Context,
    order: &NewOrder,
    request: &mut NewRequest,
) -> Result<Drawn, Status> {
    loop {
        match market.ask(Request::New(*request)).await {
            Ok(record) => return Ok(Drawn::Done(record)),
            Err(NotTaken::Refused(reject)) => match reject.reason {
                // Past the budget of the day identity is asked for this order.
                RejectReason::LimitExceeded if !request.limit_checked => {
                    check_limit(market, context, order, request.price).await?;
                    request.limit_checked = true;
                }
                RejectReason::InsufficientBalance | RejectReason::NoTradingHold => {
                    return Ok(Drawn::NotCovered);
                }
                RejectReason::DuplicateRequest => return Ok(Drawn::AnsweredBefore),
                _ => return Err(refusal::refused(&reject)),
            },
            Err(error) => return Err(refusal::not_taken(&error)),
        }
    }
}

/// Makes the order's own hold and enters the order with it. `None` when the key is known by now.
async fn own_hold(
    market: &Arc<Market>,
    context: &Context,
    order: &NewOrder,
    request: &mut NewRequest,
) -> Result<Option<Record>, Status> {
    // While the journal has no room the hold would lock money for an order that cannot enter.
    if market.commit.stalled().is_some() {
        return Err(refusal::not_taken(&NotTaken::Busy));
    }
    let asset = order.asset();
    let price = request.price.unwrap_or(order.spec.band_low);
    let need = reserve(
        &order.spec.terms,
        order.side,
        price,
        order.quantity,
        Done::default(),
        order.spec.fee_rate,
    )
    .map_err(|_| refusal::refused(&RejectReason::AmountOverflow.into()))?
    .total();
    let hold_id = derived::dedicated_hold(&order.user_id, &context.idempotency_key);
    let subaccount_id = asset.subaccount(&order.user_id);
    let new = NewHold {
        hold_id,
        subaccount_id: &subaccount_id,
        amount: asset.amount(need),
        reason: &format!("{ORDER_REASON} {}", context.idempotency_key),
        owner: SOURCE,
        destination: None,
    };
    let turn = market.funding_turn(request.user).await;
    funding::cover(market, context, request.user, &order.user_id, &asset, &new).await?;
    let hold = match market.ledger.create_hold(context, new).await {
        Err(error) if funding::is_insufficient(&error) => {
            return Err(funding::short(market, context, &order.user_id, &asset, need, None).await);
        }
        other => other?,
    };
    failpoint::crash_at(failpoint::HOLD_PLACED);
    if !hold.is_active() {
        return Err(refusal::request_expired());
    }
    // The key is the order's.
    let (kind, key_hash) = (PoolKind::Order, Id128::NONE);
    let pool = funding::bring_up(market, request.user, &asset, kind, &hold, key_hash).await?;
    drop(turn);
    request.pool = Some(pool);
    enter(market, pool, request).await
}

/// Enters the order; when it is refused, its hold is given back.
async fn enter(
    market: &Arc<Market>,
    pool: HoldIx,
    request: &NewRequest,
) -> Result<Option<Record>, Status> {
    let error = match market.ask(Request::New(*request)).await {
        Ok(record) => return Ok(Some(record)),
        Err(NotTaken::Refused(Reject {
            reason: RejectReason::DuplicateRequest,
            ..
        })) => return Ok(None),
        Err(error) => error,
    };
    if let Err(status) = funding::close_idle(market, pool).await {
        // The sweeper closes it later.
        tracing::warn!(%status, pool = pool.get(), "the hold of a refused order stays open for now");
    }
    match &error {
        // Closed by the sweeper while this call was on its way.
        NotTaken::Refused(reject) if reject.reason == RejectReason::UnknownHold => {
            Err(refusal::request_expired())
        }
        error => Err(refusal::not_taken(error)),
    }
}
