//! Orders over RPC: place, cancel, amend, mass cancel (specification 4.3, D13, D23, T22).
//!
//! Order of checks when placing: idempotency key, KYC, limit, money, book (R150). Money: the user's trading hold where he has one and it covers the
//! order; otherwise a hold of the order's own, made in the ledger first and then journalled (`design.md` 4). Every answer waits until it is durable and
//! the history shows it. Cancel safe: what a dropped call leaves behind the sweeper takes up.

use std::sync::Arc;

use admission::{
    AmendRequest, CancelRequest, Known, MassCancelRequest, NewRequest, OrderRef, Reject, Request,
};
use rpc::Context;
use sequencer::{NotTaken, Record};
use tonic::Status;
use types::command::MassScope;
use types::{
    CancelReason, Decimal, Done, Event, Handle, HoldIx, Id128, InstrumentSpec, Lots, Minor,
    OrderType, PoolKind, RejectReason, SessionIx, Side, StpMode, Ticks, TimeInForce, UserIx,
    order_uuid, reserve,
};

use crate::calls::ledger::NewHold;
use crate::failpoint;
use crate::funding;
use crate::ids;
use crate::market::{Asset, MONEY_DECIMALS, Market, now_us};
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

/// Who asks, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// The owner of the orders.
    Owner,
    /// Staff or a service, for anybody.
    Staff,
}

/// The answer to a write: the order as it stands, and whether the call was answered before.
pub struct Answered<T> {
    pub value: T,
    pub replayed: bool,
}

impl<T> Answered<T> {
    fn now(value: T) -> Self {
        Self {
            value,
            replayed: false,
        }
    }

    fn before(value: T) -> Self {
        Self {
            value,
            replayed: true,
        }
    }
}

/// The order of an id, as it now stands; `Order not found`.
pub async fn find(market: &Market, order_id: &str) -> Result<OrderRow, Status> {
    if ids::parse(order_id).is_none() {
        return Err(refusal::order_not_found());
    }
    market.freshen().await;
    stored(market, order_id)
        .await?
        .ok_or_else(refusal::order_not_found)
}

async fn stored(market: &Market, order_id: &str) -> Result<Option<OrderRow>, Status> {
    repo::order(&market.projection.db, order_id)
        .await
        .map_err(|error| rpc::status::internal(&error))
}

/// The order once everything up to the record is durable and shown.
async fn shown(market: &Market, record: &Record, order_id: &str) -> Result<OrderRow, Status> {
    let sequence = record.command.sequence;
    market.durable(sequence).await?;
    market.projection.wait(sequence).await;
    stored(market, order_id)
        .await?
        .ok_or_else(refusal::order_not_found)
}

/// PlaceOrder.
pub async fn place(
    market: &Arc<Market>,
    context: &Context,
    order: &NewOrder,
) -> Result<Answered<OrderRow>, Status> {
    let user_id = &order.user_id;
    let key_hash = ids::key_hash("PlaceOrder", user_id, &context.idempotency_key);
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
            text => ids::client_order_number(text),
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
        (!text.is_empty()).then(|| (&*order.user_id, ids::client_order_number(text), text));
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
    let hold_id = ids::order_hold(&order.user_id, &context.idempotency_key);
    let subaccount_id = asset.subaccount(&order.user_id);
    let new = NewHold {
        hold_id,
        subaccount_id: &subaccount_id,
        currency: asset.id(),
        amount: need,
        decimals: asset.decimals(),
        reason: &format!("{ORDER_REASON} {}", context.idempotency_key),
    };
    let turn = market.funding_turn(request.user).await;
    let hold = match market.ledger.create_hold(context, &new).await {
        Err(status) if funding::is_insufficient(&status) => {
            let pool = market.default_pool(request.user, asset.ix).await?;
            let pool = pool.as_ref().map(|(_, pool)| pool);
            return Err(funding::short(market, context, &order.user_id, &asset, need, pool).await);
        }
        other => other?,
    };
    failpoint::crash_at(failpoint::HOLD_PLACED);
    if !hold.active {
        return Err(refusal::request_expired());
    }
    let pool = funding::bring_up(market, request.user, &asset, PoolKind::Order, &hold).await?;
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

/// CancelOrder.
pub async fn cancel(
    market: &Market,
    context: &Context,
    actor: Actor,
    row: &OrderRow,
) -> Result<Answered<OrderRow>, Status> {
    let key_hash = ids::key_hash("CancelOrder", &row.user_id, &context.idempotency_key);
    if let Some(answer) = market.answered(key_hash).await? {
        return answered_order(market, &answer.order_id, row).await;
    }
    note_key(market, context, key_hash).await?;
    let (user, reason) = match actor {
        Actor::Owner => (
            market.bind_user(&row.user_id).await?,
            CancelReason::UserRequest,
        ),
        Actor::Staff => (UserIx::NONE, CancelReason::Operator),
    };
    let request = Request::Cancel(CancelRequest {
        order: OrderRef::Handle(Handle::from_engine_id(row.engine_order_id)),
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        reason,
        key_hash,
    });
    let record = match market.ask(request).await {
        Ok(record) => record,
        Err(error) => match gone_or_before(market, &error, key_hash, row).await? {
            Some(answered) => return Ok(answered),
            None => return Err(refusal::not_taken(&error)),
        },
    };
    let row = shown(market, &record, &row.order_id).await?;
    refuse_if_gone(&record)?;
    Ok(Answered::now(row))
}

/// What AmendOrder changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub price: Option<Ticks>,
    /// New total, what was filled included.
    pub quantity: Option<Lots>,
}

/// AmendOrder (T22).
pub async fn amend(
    market: &Market,
    context: &Context,
    row: &OrderRow,
    spec: &InstrumentSpec,
    change: Change,
) -> Result<Answered<OrderRow>, Status> {
    let key_hash = ids::key_hash("AmendOrder", &row.user_id, &context.idempotency_key);
    if let Some(answer) = market.answered(key_hash).await? {
        return answered_order(market, &answer.order_id, row).await;
    }
    market
        .identity
        .check_may_trade(context, &row.user_id)
        .await?;
    note_key(market, context, key_hash).await?;
    let user = market.bind_user(&row.user_id).await?;
    let handle = Handle::from_engine_id(row.engine_order_id);
    let mut request = AmendRequest {
        order: OrderRef::Handle(handle),
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        price: change.price,
        quantity: change.quantity,
        limit_checked: false,
        key_hash,
    };
    let mut grown = false;
    let record = loop {
        let error = match market.ask(Request::Amend(request)).await {
            Ok(record) => break record,
            Err(error) => error,
        };
        let NotTaken::Refused(reject) = &error else {
            return Err(refusal::not_taken(&error));
        };
        match (reject.reason, reject.known) {
            (RejectReason::LimitExceeded, _) if !request.limit_checked => {
                let quantity = change
                    .quantity
                    .map_or(row.quantity, |lots| spec.quantity(lots));
                let notional = notional(row, spec, change, quantity)?;
                market
                    .identity
                    .check_trading(context, &row.user_id, quantity, notional)
                    .await?;
                request.limit_checked = true;
            }
            (RejectReason::InsufficientBalance, Known::Balance { free, main, fee }) => {
                let short = main + fee - free;
                cover_growth(market, context, row, handle, short, grown).await?;
                grown = true;
            }
            _ => match gone_or_before(market, &error, key_hash, row).await? {
                Some(answered) => return Ok(answered),
                None => return Err(refusal::not_taken(&error)),
            },
        }
    };
    let row = shown(market, &record, &row.order_id).await?;
    refuse_if_gone(&record)?;
    Ok(Answered::now(row))
}

fn notional(
    row: &OrderRow,
    spec: &InstrumentSpec,
    change: Change,
    quantity: Decimal,
) -> Result<Minor, Status> {
    let price = change
        .price
        .map(|ticks| spec.price(ticks))
        .or(row.price)
        .unwrap_or(Decimal::ZERO);
    price
        .checked_mul(quantity)
        .and_then(|value| value.rescale_rounded(MONEY_DECIMALS, types::Rounding::Up))
        .and_then(|value| value.to_minor(MONEY_DECIMALS))
        .map(Minor)
        .map_err(|_| refusal::refused(&RejectReason::AmountOverflow.into()))
}

/// More money for the growth of an order that has a hold of its own; an order on a trading hold has to make do with that.
async fn cover_growth(
    market: &Market,
    context: &Context,
    row: &OrderRow,
    handle: Handle,
    short: Minor,
    grown: bool,
) -> Result<(), Status> {
    let hold = market
        .inspect(move |core| core.admission().order(handle).map(|order| order.pool))
        .await?
        .ok_or_else(refusal::order_not_open)?;
    let pool = funding::pool_row(market, hold).await?;
    let asset = market
        .asset_of(pool.asset)
        .await?
        .expect("a pool's instrument is known");
    if grown || pool.kind != PoolKind::Order {
        return Err(
            funding::short(market, context, &row.user_id, &asset, short, Some(&pool)).await,
        );
    }
    let _turn = market.funding_turn(pool.user).await;
    funding::grow(
        market,
        context,
        &pool,
        &asset,
        short,
        &context.idempotency_key,
    )
    .await
}

/// What MassCancel cancels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MassCancel {
    /// Empty = everybody's.
    pub user_id: String,
    /// `None` = on every instrument.
    pub instrument: Option<InstrumentSpec>,
    pub side: Option<Side>,
}

/// MassCancel: how many orders it took.
pub async fn mass_cancel(
    market: &Market,
    context: &Context,
    actor: Actor,
    wanted: &MassCancel,
) -> Result<Answered<u32>, Status> {
    let key_hash = ids::key_hash("MassCancel", &wanted.user_id, &context.idempotency_key);
    if let Some(answer) = market.answered(key_hash).await? {
        return Ok(Answered::before(answer.cancelled));
    }
    note_key(market, context, key_hash).await?;
    let scope = match wanted.user_id.as_str() {
        "" => MassScope::All,
        user_id => MassScope::User(market.bind_user(user_id).await?),
    };
    let (user, reason) = match (actor, scope) {
        (Actor::Owner, MassScope::User(user)) => (user, CancelReason::MassCancel),
        (Actor::Staff, MassScope::All) => (UserIx::NONE, CancelReason::KillSwitch),
        (_, _) => (UserIx::NONE, CancelReason::Operator),
    };
    let request = Request::MassCancel(MassCancelRequest {
        scope,
        instrument: wanted
            .instrument
            .map_or(types::InstrumentIx::NONE, |spec| spec.ix),
        side: wanted.side,
        reason,
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        key_hash,
    });
    let record = match market.ask(request).await {
        Ok(record) => record,
        Err(NotTaken::Refused(reject)) if reject.reason == RejectReason::DuplicateRequest => {
            let answer = market.answered(key_hash).await?;
            return Ok(Answered::before(
                answer.map_or(0, |answer| answer.cancelled),
            ));
        }
        Err(error) => return Err(refusal::not_taken(&error)),
    };
    let sequence = record.command.sequence;
    market.durable(sequence).await?;
    market.projection.wait(sequence).await;
    let count = record.events.iter().map(|e| match e.event {
        Event::MassCancelled(done) => done.count,
        _ => 0,
    });
    Ok(Answered::now(count.sum()))
}

/// What a repeated cancel or amend is told: the order as it stands. The key may name another order than the repeat does: the first one counts (T12).
async fn answered_order(
    market: &Market,
    order_id: &str,
    row: &OrderRow,
) -> Result<Answered<OrderRow>, Status> {
    if order_id.is_empty() {
        // The first call found the order gone.
        return Err(refusal::order_not_open());
    }
    if order_id == row.order_id {
        return Ok(Answered::before(row.clone()));
    }
    find(market, order_id).await.map(Answered::before)
}

async fn note_key(market: &Market, context: &Context, key_hash: Id128) -> Result<(), Status> {
    repo::note_request(
        &market.projection.db,
        key_hash,
        &context.correlation_id,
        None,
        now_us(),
    )
    .await
    .map_err(|error| rpc::status::internal(&error))
}

/// The answers to a refusal that are no plain error: the order has ended (its handle names nobody any more), or the call was answered before.
async fn gone_or_before(
    market: &Market,
    error: &NotTaken,
    key_hash: Id128,
    row: &OrderRow,
) -> Result<Option<Answered<OrderRow>>, Status> {
    let NotTaken::Refused(reject) = error else {
        return Ok(None);
    };
    match reject.reason {
        RejectReason::UnknownOrder | RejectReason::OrderNotOpen => Err(refusal::order_not_open()),
        RejectReason::DuplicateRequest => {
            let answer = market.answered(key_hash).await?;
            let order_id = answer.map(|answer| answer.order_id).unwrap_or_default();
            answered_order(market, &order_id, row).await.map(Some)
        }
        _ => Ok(None),
    }
}

/// The book found the order gone, or refused the change.
fn refuse_if_gone(record: &Record) -> Result<(), Status> {
    for envelope in &record.events {
        match &envelope.event {
            Event::CancelRejected(_) => return Err(refusal::order_not_open()),
            Event::AmendRejected(event) if event.open.is_zero() => {
                return Err(refusal::order_not_open());
            }
            Event::AmendRejected(event) => return Err(refusal::refused(&event.reason.into())),
            _ => {}
        }
    }
    Ok(())
}
