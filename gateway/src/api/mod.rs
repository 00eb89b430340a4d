//! MarketService (specification 4.3): parses the message, executes the call, renders the answer.
//! Only this folder uses the contract's incoming messages.

pub mod consumers;
mod depth;
pub mod http;
mod parse;
pub mod render;

use std::sync::Arc;

use events::audit::{RecordFilter, RecordRow};
use proto::convert::to_decimal;
use proto::market::v1::market_service_server::MarketService;
use proto::market::v1::*;
use rpc::page::Key;
use rpc::{Caller, OverRate, Role, caller};
use tonic::{Request, Response, Status};
use types::command::MemberGroup;
use types::derived;

use crate::acts::NewAct;
use crate::funding::{self, HoldView};
use crate::instruments;
use crate::market::Market;
use crate::orders::members::{self, Member};
use crate::orders::{self, Actor, Answered, MassCancel};
use crate::projection::repo::{self, OrderFilter, PageBound, TradeFilter};
use crate::projection::rows::{OrderRow, TradeRow};
use crate::refusal;

/// Object of an act on every user. No user has an id with a blank.
const ALL_USERS: &str = "all users";
/// States of the kill switch after an act.
const ENGAGED: &str = "ENGAGED";
const LIFTED: &str = "LIFTED";
/// State of a member's bounds after an act that removes them.
const NO_BOUNDS: &str = "none";
/// Type of the bounds of a member, whose JSON is their state after an act.
const BOUNDS: &str = "dfa.market.v1.OrderBounds";

/// Implements MarketService.
pub struct Api {
    pub market: Arc<Market>,
}

/// Splits a request into caller and message.
fn into_parts<M>(request: Request<M>) -> Result<(Caller, M), Status> {
    let caller = caller(&request)?.clone();
    Ok((caller, request.into_inner()))
}

fn reply<T, M>(answered: Answered<T>, message: impl FnOnce(T) -> M) -> Response<M> {
    rpc::context::answered(message(answered.value), answered.replayed)
}

/// `Owner` if the caller is the user, else `Staff`.
fn actor(caller: &Caller, user_id: &str) -> Actor {
    match caller.user_id.as_deref() == Some(user_id) {
        true => Actor::Owner,
        false => Actor::Staff,
    }
}

/// The user filter that a caller may use. An investor's empty filter means the investor; a foreign
/// user id is PERMISSION_DENIED.
pub(crate) fn own_filter(caller: &Caller, user_id: String) -> Result<String, Status> {
    if user_id.is_empty() && !caller.acts_for_any_user() {
        return Ok(caller.user_id.clone().unwrap_or_default());
    }
    if !user_id.is_empty() {
        caller.require_user(&user_id)?;
    }
    Ok(user_id)
}

/// Start of a page of orders or trades. Refuses a token of the older version that ordered lists by
/// time and id: its number has another meaning.
fn page_bound(page: &rpc::page::Page) -> Result<PageBound, Status> {
    let (key, id) = match &page.after {
        Some(after) => (after.created_us, after.id.as_str()),
        None => (i64::MAX, ""),
    };
    if !id.is_empty() {
        let why = "is of an earlier version: restart the list without a token";
        return Err(rpc::status::invalid_argument("pagination.page_token", why));
    }
    let limit = page.rows_limit();
    Ok(PageBound { key, limit })
}

/// Position of a row in a list of orders or trades, for the page token.
fn page_key(key: i64) -> Key {
    Key {
        created_us: key,
        id: String::new(),
    }
}

/// The trade with an id, if the caller may see it: as a party of the trade or as staff.
pub(crate) async fn find_trade(
    market: &Market,
    caller: &Caller,
    trade_id: &str,
) -> Result<TradeRow, Status> {
    let fresh = market.await_fresh_history().await;
    let row = repo::trade(&market.projection.db, trade_id);
    let row = match market.access_store(row).await? {
        Some(row) => row,
        None => return fresh.and(Err(refusal::trade_not_found())),
    };
    caller
        .require_user(&row.buyer_id)
        .or_else(|_| caller.require_user(&row.seller_id))?;
    Ok(row)
}

/// A trade with its settlement status from the journal. Only staff get the counterparty's user id.
pub(crate) fn render_trade(market: &Market, caller: &Caller, row: &TradeRow) -> Trade {
    let sequence = types::Sequence(row.sequence);
    let trade = types::Id128::parse(&row.trade_id).unwrap_or(types::Id128::NONE);
    let status = market
        .replica
        .read(|state| state.trade_status(sequence, trade));
    let mut trade = render::trade(row, status);
    for user_id in [&mut trade.buyer_id, &mut trade.seller_id] {
        if caller.require_user(user_id).is_err() {
            user_id.clear();
        }
    }
    trade
}

/// The order with an id, if the caller may see it: as its owner or as staff.
pub(crate) async fn find_order(
    market: &Market,
    caller: &Caller,
    order_id: &str,
) -> Result<OrderRow, Status> {
    let row = orders::find(market, order_id).await?;
    caller.require_user(&row.user_id)?;
    Ok(row)
}

#[tonic::async_trait]
impl MarketService for Api {
    async fn place_order(
        &self,
        request: Request<PlaceOrderRequest>,
    ) -> Result<Response<PlaceOrderResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let mut context = rpc::context::write(message.context)?;
        let order = parse::required_order(message.order)?;
        caller.require_user(&order.user_id)?;
        context.user_id.clone_from(&order.user_id);
        let form = parse::order(&order)?;
        let client_order_id = parse::client_order_id(&order)?;
        let spec = self.market.instrument(&order.instrument_id).await?;
        let request = parse::to_ticks_and_lots(form, &spec)?;
        let answered =
            orders::place(&self.market, &context, spec, client_order_id, request).await?;
        Ok(reply(answered, |row| PlaceOrderResponse {
            order: Some(render::order(&row)),
        }))
    }

    async fn cancel_order(
        &self,
        request: Request<CancelOrderRequest>,
    ) -> Result<Response<CancelOrderResponse>, Status> {
        let over_rate = OverRate::of(&request);
        let (caller, message) = into_parts(request)?;
        let mut context = rpc::context::write(message.context)?;
        let order_id = &message.order_id;
        orders::over_rate::check_cancel(&self.market, over_rate, &caller, order_id).await?;
        let target = orders::find_to_change(&self.market, &message.order_id).await?;
        caller.require_user(&target.user_id)?;
        context.user_id.clone_from(&target.user_id);
        let actor = actor(&caller, &target.user_id);
        let cancel = orders::cancel(&self.market, &context, actor, &target);
        let key = &context.idempotency_key;
        let act = NewAct {
            key_hash: derived::key_hash("CancelOrder", &target.user_id, key),
            object_id: target.order_id.clone(),
            after: "CANCELLED".to_owned(),
            ..act(&caller, &context, "order.cancelled", true)
        };
        let answered = self.as_staff(actor, act, cancel).await?;
        Ok(reply(answered, |row| CancelOrderResponse {
            order: Some(render::order(&row)),
        }))
    }

    async fn amend_order(
        &self,
        request: Request<AmendOrderRequest>,
    ) -> Result<Response<AmendOrderResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let mut context = rpc::context::write(message.context)?;
        let target = orders::find_to_change(&self.market, &message.order_id).await?;
        caller.require_user(&target.user_id)?;
        context.user_id.clone_from(&target.user_id);
        let spec = self.market.instrument(&target.instrument_id).await?;
        let (price, quantity) = (message.price.as_ref(), message.quantity.as_ref());
        let change = parse::change(&spec, price, quantity, message.new_client_order_id)?;
        let answered = orders::amend(&self.market, &context, &target, &spec, &change).await?;
        Ok(reply(answered, |row| AmendOrderResponse {
            order: Some(render::order(&row)),
        }))
    }

    async fn mass_cancel(
        &self,
        request: Request<MassCancelRequest>,
    ) -> Result<Response<MassCancelResponse>, Status> {
        let over_rate = OverRate::of(&request);
        let (caller, message) = into_parts(request)?;
        let context = rpc::context::write(message.context)?;
        let user_id = own_filter(&caller, message.user_id)?;
        let instrument = match message.instrument_id.as_str() {
            "" => None,
            id => Some(self.market.instrument(id).await?),
        };
        let wanted = MassCancel {
            instrument,
            side: parse::side("side", message.side)?,
            user_id,
        };
        orders::over_rate::check_mass_cancel(&self.market, over_rate, &wanted).await?;
        let actor = actor(&caller, &wanted.user_id);
        let cancel = orders::mass_cancel(&self.market, &context, actor, &wanted);
        let instrument = wanted.instrument.map(|spec| spec.id.to_string());
        let side = wanted.side.map_or("both sides", |side| side.as_str());
        let instrument = instrument.unwrap_or_else(|| "every instrument".to_owned());
        let act = NewAct {
            key_hash: derived::key_hash("MassCancel", &wanted.user_id, &context.idempotency_key),
            object_id: of_user(&wanted.user_id),
            after: format!("CANCELLED, {instrument}, {side}"),
            ..act(&caller, &context, "orders.cancelled", true)
        };
        let answered = self.as_staff(actor, act, cancel).await?;
        Ok(reply(answered, |cancelled| MassCancelResponse {
            cancelled,
        }))
    }

    async fn get_order(
        &self,
        request: Request<GetOrderRequest>,
    ) -> Result<Response<GetOrderResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        rpc::context::record_read_context(message.context);
        let row = find_order(&self.market, &caller, &message.order_id).await?;
        Ok(Response::new(GetOrderResponse {
            order: Some(render::order(&row)),
        }))
    }

    async fn list_orders(
        &self,
        request: Request<ListOrdersRequest>,
    ) -> Result<Response<ListOrdersResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        rpc::context::record_read_context(message.context);
        let filter = OrderFilter {
            user_id: own_filter(&caller, message.user_id)?,
            instrument_id: message.instrument_id,
            status: parse::status("status", message.status)?,
        };
        let status = filter.status.map_or("", |status| status.as_str());
        let hash = rpc::page::filter_hash(&[&filter.user_id, &filter.instrument_id, status]);
        let page = rpc::page::parse(message.pagination, hash)?;
        self.market.await_fresh_history().await?;
        let rows = repo::orders(&self.market.projection.db, &filter, page_bound(&page)?);
        let mut rows = self.market.access_store(rows).await?;
        let pagination = page.finish(&mut rows, |row| page_key(row.sequence.cast_signed()));
        Ok(Response::new(ListOrdersResponse {
            orders: rows.iter().map(render::order).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn get_trade(
        &self,
        request: Request<GetTradeRequest>,
    ) -> Result<Response<GetTradeResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        rpc::context::record_read_context(message.context);
        let row = find_trade(&self.market, &caller, &message.trade_id).await?;
        Ok(Response::new(GetTradeResponse {
            trade: Some(render_trade(&self.market, &caller, &row)),
        }))
    }

    async fn get_position(
        &self,
        request: Request<GetPositionRequest>,
    ) -> Result<Response<GetPositionResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        rpc::context::record_read_context(message.context);
        let user_id = own_filter(&caller, message.user_id)?;
        if user_id.is_empty() {
            return Err(rpc::status::invalid_argument(
                "user_id",
                "must not be empty",
            ));
        }
        let spec = self.market.instrument(&message.instrument_id).await?;
        let instrument_id = spec.id.to_string();
        let position = repo::position_of(&self.market.projection.db, &user_id, &instrument_id);
        let quantity = self.market.access_store(position).await?;
        Ok(Response::new(GetPositionResponse {
            user_id,
            instrument_id,
            quantity: Some(to_decimal(quantity)),
        }))
    }

    async fn list_trades(
        &self,
        request: Request<ListTradesRequest>,
    ) -> Result<Response<ListTradesResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        rpc::context::record_read_context(message.context);
        let filter = TradeFilter {
            user_id: own_filter(&caller, message.user_id)?,
            instrument_id: message.instrument_id,
        };
        let hash = rpc::page::filter_hash(&[&filter.user_id, &filter.instrument_id]);
        let page = rpc::page::parse(message.pagination, hash)?;
        self.market.await_fresh_history().await?;
        let rows = repo::trades(&self.market.projection.db, &filter, page_bound(&page)?);
        let mut rows = self.market.access_store(rows).await?;
        let pagination = page.finish(&mut rows, |row| page_key(row.key));
        Ok(Response::new(ListTradesResponse {
            trades: rows
                .iter()
                .map(|row| render_trade(&self.market, &caller, row))
                .collect(),
            pagination: Some(pagination),
        }))
    }

    async fn get_order_book(
        &self,
        request: Request<GetOrderBookRequest>,
    ) -> Result<Response<GetOrderBookResponse>, Status> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let view = depth::book(&self.market, &message.instrument_id, message.depth).await?;
        Ok(Response::new(GetOrderBookResponse {
            snapshot: Some(view),
        }))
    }

    async fn open_trading_hold(
        &self,
        request: Request<OpenTradingHoldRequest>,
    ) -> Result<Response<OpenTradingHoldResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let mut context = rpc::context::write(message.context)?;
        types::UserId::new(&message.user_id)
            .map_err(|error| rpc::status::invalid_argument("user_id", error.to_string()))?;
        caller.require_user(&message.user_id)?;
        context.user_id = message.user_id.clone();
        let asset = self.market.asset(&message.instrument_id).await?;
        let amount = parse::amount(&asset, "amount", message.amount.as_ref())?;
        self.market
            .identity
            .check_may_trade(&context, &message.user_id)
            .await?;
        let view = funding::open(&self.market, &context, &message.user_id, &asset, amount).await?;
        Ok(Response::new(OpenTradingHoldResponse {
            trading_hold: Some(render::trading_hold(&view)),
        }))
    }

    async fn adjust_trading_hold(
        &self,
        request: Request<AdjustTradingHoldRequest>,
    ) -> Result<Response<AdjustTradingHoldResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let mut context = rpc::context::write(message.context)?;
        let (hold, view) = self.own_hold(&caller, &message.hold_id).await?;
        context.user_id = view.user_id.clone();
        let asset = self.market.asset(&view.instrument_id).await?;
        let undrawn = parse::amount_or_zero(&asset, "undrawn", message.undrawn.as_ref())?;
        let key = &context.idempotency_key;
        let key_hash = derived::key_hash("AdjustTradingHold", &view.user_id, key);
        let actor = actor(&caller, &view.user_id);
        let answered =
            funding::adjust(&self.market, &context, actor, hold, undrawn, key_hash).await?;
        Ok(reply(answered, |view| AdjustTradingHoldResponse {
            trading_hold: Some(render::trading_hold(&view)),
        }))
    }

    async fn close_trading_hold(
        &self,
        request: Request<CloseTradingHoldRequest>,
    ) -> Result<Response<CloseTradingHoldResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let context = rpc::context::write(message.context)?;
        let (hold, view) = self.own_hold(&caller, &message.hold_id).await?;
        let key = &context.idempotency_key;
        let key_hash = derived::key_hash("CloseTradingHold", &view.user_id, key);
        let view = funding::close(&self.market, hold, key_hash).await?;
        Ok(Response::new(CloseTradingHoldResponse {
            trading_hold: Some(render::trading_hold(&view)),
        }))
    }

    async fn list_trading_holds(
        &self,
        request: Request<ListTradingHoldsRequest>,
    ) -> Result<Response<ListTradingHoldsResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        rpc::context::record_read_context(message.context);
        let user_id = own_filter(&caller, message.user_id)?;
        let hash = rpc::page::filter_hash(&[&user_id, &message.instrument_id]);
        let page = rpc::page::parse(message.pagination, hash)?;
        let key = |hold: types::HoldIx| Key {
            created_us: i64::from(hold.get()),
            id: String::new(),
        };
        let (before, _) = page.bound();
        let (instrument_id, limit) = (&message.instrument_id, page.rows_limit() as usize);
        let mut rows = funding::list(&self.market, &user_id, instrument_id, before, limit).await?;
        let pagination = page.finish(&mut rows, |(hold, _)| key(*hold));
        Ok(Response::new(ListTradingHoldsResponse {
            trading_holds: rows
                .iter()
                .map(|(_, view)| render::trading_hold(view))
                .collect(),
            pagination: Some(pagination),
        }))
    }

    async fn set_trading_phase(
        &self,
        request: Request<SetTradingPhaseRequest>,
    ) -> Result<Response<SetTradingPhaseResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let context = rpc::context::write(message.context)?;
        let phase = parse::phase("phase", message.phase)?;
        let spec = self.market.instrument(&message.instrument_id).await?;
        let key = &context.idempotency_key;
        let key_hash = derived::key_hash("SetTradingPhase", &caller.subject, key);
        // A person lifts a halt by an approval, which a service executes (D32).
        let lifts_halt = caller.is_service();
        let set = instruments::set_phase_once(&self.market, spec.ix, phase, lifts_halt, key_hash);
        let before = |state: &replica::State| state.core().book(spec.ix).map(|book| book.phase());
        let before = self.market.replica.read(before);
        let act = NewAct {
            key_hash,
            object_id: spec.id.to_string(),
            before: before.map_or_else(String::new, |phase| phase.to_string()),
            after: phase.to_string(),
            reason: message.reason.clone(),
            ..act(&caller, &context, "phase.set", phase == types::Phase::Halt)
        };
        let (answered, set) = self.market.acts.set(act, set).await?;
        if !answered.replayed {
            tracing::info!(
                instrument_id = %spec.id,
                %phase,
                reason = message.reason,
                by = caller.subject,
                "trading phase set"
            );
        }
        let phase = TradingPhase::from_str_name(&format!("TRADING_PHASE_{}", set.after));
        let phase = phase.ok_or_else(|| set.unreadable())?.into();
        Ok(reply(answered, |()| SetTradingPhaseResponse {
            instrument_id: set.object_id,
            phase,
        }))
    }

    async fn set_kill_switch(
        &self,
        request: Request<SetKillSwitchRequest>,
    ) -> Result<Response<SetKillSwitchResponse>, Status> {
        let over_rate = OverRate::of(&request);
        let (caller, message) = into_parts(request)?;
        let context = rpc::context::write(message.context)?;
        let user_id = own_filter(&caller, message.user_id)?;
        let is_own = !user_id.is_empty() && caller.user_id.as_deref() == Some(&user_id);
        if !(is_own && message.engaged) {
            caller.require(&[Role::Operator, Role::MarketSupervisor, Role::Service])?;
        }
        if !message.engaged {
            caller.require_approval("dfa.market.v1.MarketService/SetKillSwitch")?;
        }
        let (market, engaged) = (&self.market, message.engaged);
        orders::over_rate::check_kill_switch(market, over_rate, &user_id, engaged).await?;
        let key = &context.idempotency_key;
        let key_hash = derived::key_hash("SetKillSwitch", &caller.subject, key);
        if !is_own && !user_id.is_empty() && !market.is_bound(&user_id) {
            // Refuses a mistyped id, which would otherwise be bound as a new user.
            market.identity.profile(&context, &user_id).await?;
        }
        let act = NewAct {
            key_hash,
            object_id: of_user(&user_id),
            after: if engaged { ENGAGED } else { LIFTED }.to_owned(),
            reason: message.reason.clone(),
            ..act(&caller, &context, "kill_switch.set", engaged)
        };
        let set = orders::set_kill_switch(market, &user_id, engaged, key_hash);
        let (answered, set) = market.acts.set(act, set).await?;
        if !answered.replayed {
            tracing::warn!(
                user_id,
                engaged,
                cancelled = answered.value,
                reason = message.reason,
                by = caller.subject,
                "kill switch set"
            );
        }
        let engaged = match &*set.after {
            ENGAGED => true,
            LIFTED => false,
            _ => return Err(set.unreadable()),
        };
        Ok(reply(answered, |cancelled| SetKillSwitchResponse {
            user_id: match set.object_id == ALL_USERS {
                true => String::new(),
                false => set.object_id,
            },
            engaged,
            cancelled,
        }))
    }

    async fn confirm_clock(
        &self,
        request: Request<ConfirmClockRequest>,
    ) -> Result<Response<ConfirmClockResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let context = rpc::context::write(message.context)?;
        let (offset_seconds, key) = (message.offset_seconds, &context.idempotency_key);
        let key_hash = derived::key_hash("ConfirmClock", &caller.subject, key);
        let act = NewAct {
            key_hash,
            object_id: "clock".to_owned(),
            after: format!("{offset_seconds} s"),
            reason: message.reason.clone(),
            ..act(&caller, &context, "clock.confirmed", false)
        };
        let confirm = crate::clock::confirm(&self.market, offset_seconds, key_hash);
        let (answered, set) = self.market.acts.set(act, confirm).await?;
        if !answered.replayed {
            tracing::warn!(
                offset_seconds,
                reason = message.reason,
                by = caller.subject,
                "machine clock confirmed"
            );
        }
        let offset_seconds = set.after.strip_suffix(" s").and_then(|s| s.parse().ok());
        let offset_seconds = offset_seconds.ok_or_else(|| set.unreadable())?;
        Ok(reply(answered, |()| ConfirmClockResponse {
            offset_seconds,
        }))
    }

    async fn set_member_bounds(
        &self,
        request: Request<SetMemberBoundsRequest>,
    ) -> Result<Response<SetMemberBoundsResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let context = rpc::context::write(message.context)?;
        let member = parse::member(message.user_id, message.group)?;
        if let Member::User(user_id) = &member {
            // Refuses a mistyped id, which would otherwise be bound as a new user.
            self.market.identity.profile(&context, user_id).await?;
        }
        let most = self.market.open_orders_per_user_max();
        let default = members::default_bounds(&self.market).await?;
        let bounds = message.bounds.as_ref();
        let wanted = bounds.map(|b| parse::bounds(b, &member, &default, most));
        let wanted = wanted.transpose()?;
        let bounds = message.bounds.zip(wanted);
        let bounds = bounds.map(|(given, set)| render::bounds(given, &set, &member));
        let text = |bounds: &OrderBounds| rpc::json::value(bounds, BOUNDS).to_string();
        let key = &context.idempotency_key;
        let key_hash = derived::key_hash("SetMemberBounds", &caller.subject, key);
        let act = NewAct {
            key_hash,
            object_id: match &member {
                Member::User(user_id) => user_id.clone(),
                Member::Group(group) => format!("group {}", group.0),
            },
            after: bounds.as_ref().map_or_else(|| NO_BOUNDS.to_owned(), text),
            reason: message.reason.clone(),
            ..act(&caller, &context, "bounds.set", false)
        };
        let set = members::set_bounds(&self.market, &caller, &member, wanted, key_hash);
        let (answered, set) = self.market.acts.set(act, set).await?;
        if !answered.replayed {
            let (reason, by) = (message.reason, caller.subject);
            tracing::warn!(?member, ?wanted, reason, by, "order bounds set");
        }
        let bounds = match &*set.after {
            NO_BOUNDS => None,
            // An earlier release stored a text of another form.
            after => rpc::json::message(after, BOUNDS).or(bounds),
        };
        Ok(reply(answered, |()| SetMemberBoundsResponse { bounds }))
    }

    async fn set_member_group(
        &self,
        request: Request<SetMemberGroupRequest>,
    ) -> Result<Response<SetMemberGroupResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        let context = rpc::context::write(message.context)?;
        let (user_id, group) = (message.user_id, message.group);
        self.market.identity.profile(&context, &user_id).await?;
        let key = &context.idempotency_key;
        let key_hash = derived::key_hash("SetMemberGroup", &caller.subject, key);
        let to = MemberGroup(group);
        let act = NewAct {
            key_hash,
            object_id: user_id.clone(),
            after: format!("group {group}"),
            reason: message.reason.clone(),
            ..act(&caller, &context, "group.set", false)
        };
        let set = members::set_group(&self.market, &caller, &user_id, to, key_hash);
        let (answered, set) = self.market.acts.set(act, set).await?;
        if !answered.replayed {
            let (reason, by) = (message.reason, caller.subject);
            tracing::warn!(user_id, group, reason, by, "member group set");
        }
        let group = set.after.strip_prefix("group ");
        let group = group.and_then(|group| group.parse().ok());
        let group = group.ok_or_else(|| set.unreadable())?;
        Ok(reply(answered, |()| SetMemberGroupResponse {
            user_id: set.object_id,
            group,
        }))
    }

    async fn get_market_status(
        &self,
        request: Request<GetMarketStatusRequest>,
    ) -> Result<Response<GetMarketStatusResponse>, Status> {
        let (caller, message) = into_parts(request)?;
        rpc::context::record_read_context(message.context);
        let own = match caller.acts_for_any_user() {
            true => None,
            false => caller.user_id.as_deref(),
        };
        let view = depth::status(&self.market, own).await?;
        Ok(Response::new(view))
    }

    async fn list_audit_records(
        &self,
        request: Request<ListAuditRecordsRequest>,
    ) -> Result<Response<ListAuditRecordsResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let hash = rpc::page::filter_hash(&[&ask.actor, &ask.object_id]);
        let page = rpc::page::parse(ask.pagination, hash)?;
        let (before, _) = page.bound();
        let filter = RecordFilter {
            actor: &ask.actor,
            object_id: &ask.object_id,
        };
        let rows = self.market.acts.records(filter, before, page.rows_limit());
        let mut rows = self.market.access_store(rows).await?;
        let pagination = page.finish(&mut rows, |row| page_key(row.sequence));
        let listed =
            |row: &RecordRow| rpc::audit::listed(&row.record(), &row.previous_hash, &row.hash);
        Ok(Response::new(ListAuditRecordsResponse {
            records: rows.iter().map(listed).collect(),
            pagination: Some(pagination),
        }))
    }
}

/// An act without key, object, states and reason.
fn act<'a>(
    caller: &'a Caller,
    context: &'a rpc::Context,
    action: &'static str,
    reduces_risk: bool,
) -> NewAct<'a> {
    NewAct {
        caller,
        context,
        key_hash: types::Id128::NONE,
        action,
        object_id: String::new(),
        before: String::new(),
        after: String::new(),
        reason: String::new(),
        reduces_risk,
    }
}

/// A user as the object of an act.
fn of_user(user_id: &str) -> String {
    match user_id {
        "" => ALL_USERS.to_owned(),
        user_id => user_id.to_owned(),
    }
}

impl Api {
    /// Makes a call, and records it unless the caller is the owner of the orders.
    async fn as_staff<T>(
        &self,
        actor: Actor,
        act: NewAct<'_>,
        call: impl Future<Output = Result<Answered<T>, Status>>,
    ) -> Result<Answered<T>, Status> {
        match actor {
            Actor::Owner => call.await,
            Actor::Staff => self.market.acts.perform(act, call).await,
        }
    }

    /// The trading hold with an id, if the caller may change it.
    async fn own_hold(
        &self,
        caller: &Caller,
        hold_id: &str,
    ) -> Result<(types::HoldIx, HoldView), Status> {
        let (hold, view) = funding::find(&self.market, hold_id).await?;
        caller.require_user(&view.user_id)?;
        Ok((hold, view))
    }
}

#[cfg(test)]
mod tests {
    use proto::common::v1::PaginationRequest;

    use super::*;

    // rows: R010
    #[test]
    fn r010_a_token_holds_the_key_and_one_of_the_earlier_version_is_refused() {
        let page = |page_token: String| {
            let request = PaginationRequest {
                page_size: 1,
                page_token,
            };
            rpc::page::parse(Some(request), 9).unwrap()
        };
        let first = page(String::new());
        assert_eq!(page_bound(&first).unwrap().key, i64::MAX);
        let after = |key: Key| {
            let next = first.finish(&mut vec![(), ()], |()| key.clone());
            page(next.next_page_token)
        };
        assert_eq!(page_bound(&after(page_key(77))).unwrap().key, 77);
        let old = Key {
            created_us: 1_700_000_000_123_456,
            id: "018bcfe5-687b-774f-8500-00004d000000".to_owned(),
        };
        let refused = page_bound(&after(old)).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }
}
