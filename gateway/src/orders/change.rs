//! CancelOrder, AmendOrder, MassCancel.

use admission::{AmendRequest, CancelRequest, MassCancelRequest, OrderRef, RejectDetails, Request};
use rpc::Context;
use sequencer::{Record, SubmitError};
use tonic::Status;
use types::command::MassScope;
use types::{
    CancelReason, Decimal, Event, EventEnvelope, HoldKind, Id128, InstrumentSpec, Lots, Minor,
    RejectReason, SessionIx, Side, Ticks, UserIx, derived,
};

use super::replica_rows::{Target, order_after};
use super::{Actor, Answered, find_for_write};
use crate::funding;
use crate::market::{MONEY_DECIMALS, Market};
use crate::projection::rows::{AnswerRow, OrderRow};
use crate::refusal;

/// CancelOrder.
pub async fn cancel(
    market: &Market,
    context: &Context,
    actor: Actor,
    target: &Target,
) -> Result<Answered<OrderRow>, Status> {
    let key_hash = derived::key_hash("CancelOrder", &target.user_id, &context.idempotency_key);
    if let Some(answer) = market.reduction_answered(key_hash).await {
        return replayed_order(market, Some(answer)).await;
    }
    market.note_reduction(context, key_hash).await;
    let (user, reason) = match actor {
        Actor::Owner => (
            market.bind_user(&target.user_id).await?,
            CancelReason::UserRequest,
        ),
        Actor::Staff => (UserIx::NONE, CancelReason::Operator),
    };
    let request = Request::Cancel(CancelRequest {
        order: OrderRef::Handle(target.handle),
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        reason,
        key_hash,
    });
    let record = match market.submit(request).await {
        Ok(record) => record,
        Err(error) => match map_change_error(market, &error, key_hash).await? {
            Some(answered) => return Ok(answered),
            None => return Err(refusal::submit_error(&error)),
        },
    };
    await_changed_order(market, &record, target).await
}

/// Changes of an AmendOrder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub price: Option<Ticks>,
    /// New total, the filled part included.
    pub quantity: Option<Lots>,
    /// Empty = unchanged.
    pub new_client_order_id: String,
}

impl Change {
    /// True if the amend only lowers the quantity. Such a call stores nothing but its correlation
    /// id.
    fn only_reduces(&self, spec: &InstrumentSpec, target: &Target) -> bool {
        let is_smaller = |lots| spec.quantity(lots) < target.quantity;
        self.price.is_none()
            && self.new_client_order_id.is_empty()
            && self.quantity.is_some_and(is_smaller)
    }

    fn new_client_order_number(&self) -> u64 {
        match self.new_client_order_id.as_str() {
            "" => 0,
            text => derived::client_order_number(text),
        }
    }
}

/// AmendOrder (T22).
pub async fn amend(
    market: &Market,
    context: &Context,
    target: &Target,
    spec: &InstrumentSpec,
    change: &Change,
) -> Result<Answered<OrderRow>, Status> {
    let user_id = &target.user_id;
    let key_hash = derived::key_hash("AmendOrder", user_id, &context.idempotency_key);
    if let Some(answer) = market.answered(key_hash).await? {
        return replayed_order(market, Some(answer)).await;
    }
    let new_client_order_id = change.new_client_order_number();
    if change.only_reduces(spec, target) {
        // What only reduces risk needs no answer of identity.
        market.note_reduction(context, key_hash).await;
    } else {
        market.identity.check_may_trade(context, user_id).await?;
        let text = change.new_client_order_id.as_str();
        let new_name = (user_id.as_str(), new_client_order_id, text);
        let new_name = (new_client_order_id != 0).then_some(new_name);
        market.note_request(context, key_hash, new_name).await?;
    }
    let user = market.bind_user(user_id).await?;
    let mut request = AmendRequest {
        order: OrderRef::Handle(target.handle),
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        price: change.price,
        quantity: change.quantity,
        new_client_order_id,
        limit_checked: false,
        key_hash,
    };
    let mut grown = false;
    let record = loop {
        let error = match market.submit(Request::Amend(request)).await {
            Ok(record) => break record,
            Err(error) => error,
        };
        let SubmitError::Refused(reject) = &error else {
            return Err(refusal::submit_error(&error));
        };
        match (reject.reason, reject.details) {
            (RejectReason::LimitExceeded, _) if !request.limit_checked => {
                // A session may have changed the order since `target` was read.
                let current = market.state(|state| state.order(target.handle)).await?;
                let current = current.ok_or_else(refusal::order_not_open)?;
                let current = Target::of(market, &current);
                let quantity = change
                    .quantity
                    .map_or(current.quantity, |lots| spec.quantity(lots));
                let notional = notional(&current, spec, change, quantity)?;
                market
                    .identity
                    .check_trading(context, user_id, quantity, notional)
                    .await?;
                request.limit_checked = true;
            }
            (RejectReason::InsufficientBalance, RejectDetails::Balance { undrawn, main, fee }) => {
                let short = main + fee - undrawn;
                cover_growth(market, context, target, short, grown).await?;
                grown = true;
            }
            _ => match map_change_error(market, &error, key_hash).await? {
                Some(answered) => return Ok(answered),
                None => return Err(refusal::submit_error(&error)),
            },
        }
    };
    await_changed_order(market, &record, target).await
}

fn notional(
    target: &Target,
    spec: &InstrumentSpec,
    change: &Change,
    quantity: Decimal,
) -> Result<Minor, Status> {
    let price = change
        .price
        .map(|ticks| spec.price(ticks))
        .or(target.price)
        .unwrap_or(Decimal::ZERO);
    price
        .checked_mul(quantity)
        .and_then(|value| value.rescale_rounded(MONEY_DECIMALS, types::Rounding::Up))
        .and_then(|value| value.to_minor(MONEY_DECIMALS))
        .map(Minor)
        .map_err(|_| refusal::refused(&RejectReason::AmountOverflow.into()))
}

/// Adds available money to the order's own hold, once per call. An order on a trading hold is
/// refused with `Insufficient balance`.
async fn cover_growth(
    market: &Market,
    context: &Context,
    target: &Target,
    short: Minor,
    grown: bool,
) -> Result<(), Status> {
    let balance = market.state(|state| {
        let admission = state.core().admission();
        admission
            .hold(admission.order(target.handle)?.hold)
            .copied()
    });
    let balance = balance.await?.ok_or_else(refusal::order_not_open)?;
    let asset = market.asset_of(balance.asset);
    if grown || balance.kind != HoldKind::Order {
        return Err(funding::insufficient_balance(
            market,
            context,
            &target.user_id,
            &asset,
            short,
            Some(&balance),
        )
        .await);
    }
    let _lock = market.lock_funding(balance.user).await;
    funding::grow(
        market,
        context,
        &balance,
        &asset,
        short,
        &context.idempotency_key,
        Id128::NONE,
    )
    .await
}

/// Filter of a MassCancel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MassCancel {
    /// Empty = all users.
    pub user_id: String,
    /// `None` = all instruments.
    pub instrument: Option<InstrumentSpec>,
    pub side: Option<Side>,
}

/// MassCancel. Returns the number of cancelled orders.
pub async fn mass_cancel(
    market: &Market,
    context: &Context,
    actor: Actor,
    wanted: &MassCancel,
) -> Result<Answered<u32>, Status> {
    let key_hash = derived::key_hash("MassCancel", &wanted.user_id, &context.idempotency_key);
    if let Some(answer) = market.reduction_answered(key_hash).await {
        return Ok(Answered::replayed(answer.cancelled));
    }
    market.note_reduction(context, key_hash).await;
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
    cancel_all(market, request, key_hash).await
}

/// Submits a command that cancels orders. Waits for its last slice. Returns the number of cancelled
/// orders, which is 0 if the requested state is already reached.
pub(super) async fn cancel_all(
    market: &Market,
    request: Request,
    key_hash: Id128,
) -> Result<Answered<u32>, Status> {
    let record = match market.submit(request).await {
        Ok(record) => record,
        Err(SubmitError::Refused(reject)) if reject.reason == RejectReason::DuplicateRequest => {
            if !matches!(reject.details, RejectDetails::Request(_)) {
                // An earlier command reached this state. It may not be durable yet.
                market.await_durable(market.replica.assigned()).await?;
                market.note_answered(key_hash).await?;
                return Ok(Answered::executed(0));
            }
            let answer = market.answered_by(&reject, key_hash).await?;
            return Ok(Answered::replayed(
                answer.map_or(0, |answer| answer.cancelled),
            ));
        }
        Err(error) => return Err(refusal::submit_error(&error)),
    };
    market.await_durable(record.command.sequence).await?;
    let is_end = |e: &&EventEnvelope| matches!(e.event, Event::Cancelled(_));
    let count = record.events.iter().filter(is_end).count();
    Ok(Answered::executed(u32::try_from(count).unwrap_or(u32::MAX)))
}

/// Answer to a repeated cancel or amend: the refusal of the first call, or the current state of the
/// order that the first call named, even if the repeat names another one (T12).
async fn replayed_order(
    market: &Market,
    answer: Option<AnswerRow>,
) -> Result<Answered<OrderRow>, Status> {
    let Some(answer) = answer else {
        return Err(refusal::order_not_open());
    };
    if let Some(reason) = answer.refusal {
        return Err(refusal::refused(&reason.into()));
    }
    match answer.order_id.as_str() {
        // The first call found the order ended.
        "" => Err(refusal::order_not_open()),
        order_id => find_for_write(market, order_id)
            .await
            .map(Answered::replayed),
    }
}

/// Maps the refusals that have an answer of their own: the order has ended, so that its handle is
/// unused, or the call is a repeat. Returns `None` for every other error.
async fn map_change_error(
    market: &Market,
    error: &SubmitError,
    key_hash: Id128,
) -> Result<Option<Answered<OrderRow>>, Status> {
    let SubmitError::Refused(reject) = error else {
        return Ok(None);
    };
    match reject.reason {
        RejectReason::UnknownOrder | RejectReason::OrderNotOpen => Err(refusal::order_not_open()),
        RejectReason::DuplicateRequest => {
            let answer = market.answered_by(reject, key_hash).await?;
            replayed_order(market, answer).await.map(Some)
        }
        _ => Ok(None),
    }
}

/// Waits until the change is durable, then returns the changed order.
async fn await_changed_order(
    market: &Market,
    record: &Record,
    target: &Target,
) -> Result<Answered<OrderRow>, Status> {
    market.await_durable(record.command.sequence).await?;
    check_change_result(record)?;
    let (sequence, handle) = (record.command.sequence, target.handle);
    let order = order_after(market, sequence, handle, &target.order_id, None).await?;
    Ok(Answered::executed(order))
}

/// Fails if the book found the order ended or refused the change.
fn check_change_result(record: &Record) -> Result<(), Status> {
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
