//! Consumers of other services' events (specification 6.6, D28).
//!
//! - identity: a block refuses a user's new orders, cancels the open ones (`USER_BLOCKED`), ends
//!   the sessions and closes the trading holds (`design.md` 4). Each event about a user evicts the
//!   user's cached profile and budget. After an update the KYC level is read again: one that is too
//!   low stops the new orders and amends of open sessions (R146).
//! - cfa: instrument events update the instruments. Issues, redemptions and transfers change the
//!   positions stored here.
//! - ledger: balances are sent to the sessions of their user. If another service has ended a hold,
//!   the open orders that draw on it are cancelled.

use std::sync::Arc;

use admission::{CancelRequest, OrderRef, Request};
use events::{BatchResult, Event, Failure, HandlerResult, Poison, RetryLater, Stopped, topics};
use prost::Message;
use proto::convert::timestamp_us;
use proto::{
    cfa::v1 as cfa, common::v1::MonetaryAmount, identity::v1 as identity, ledger::v1 as ledger,
};
use rpc::Context;
use sequencer::SubmitError;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::RejectReason::DuplicateRequest;
use types::command::{BlockCause, MassCancel};
use types::subaccount::{Purpose, SubAccountName};
use types::{
    CFA_RUB, CancelReason, Decimal, Handle, HoldIx, HoldKind, Id128, InstrumentId, Minor,
    SessionIx, UserId, UserIx,
};
use wire::DisconnectCode;

use crate::Error;
use crate::front::FrontMessage;
use crate::funding;
use crate::instruments;
use crate::market::{Asset, Market};
use crate::projection::repo::{self, Moves};

/// Consumer group of the gateway.
const GROUP: &str = "market";
/// Consumer name in the inbox.
const POSITIONS: &str = "market.positions";
/// Events per batch on the topic whose events change positions.
const MOVES_MAX: usize = 256;

/// Consumed topics and their health parts. Each topic has its own consumer, so that a block does
/// not wait for the ledger's many events.
pub const TOPICS: [(&str, &str); 3] = [
    (topics::IDENTITY, "identity_events"),
    (topics::CFA, "cfa_events"),
    (topics::LEDGER, "ledger_events"),
];

/// Handles a topic's events until shutdown.
///
/// # Errors
/// The log cannot be read.
pub async fn run(
    market: Arc<Market>,
    log: Arc<dyn events::Log>,
    topic: &'static str,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let handler = move |events: Vec<Event>| {
        let market = market.clone();
        async move { handle_in_order(&market, &events).await }
    };
    // Events of the other topics make calls. They come one per batch, so that a shutdown takes
    // effect between two of them.
    let batch_max = if topic == topics::CFA { MOVES_MAX } else { 1 };
    events::consume_batches(log, GROUP, &[topic], batch_max, handler, shutdown).await?;
    Ok(())
}

/// Shows in the health read why events are not handled, until shutdown.
pub async fn show_events(
    log: Arc<dyn events::Log>,
    health: rpc::Health,
    shutdown: CancellationToken,
) {
    let set_health = |part: &str, reason: Option<&str>| health.set(part, reason);
    events::report_health(log, &[GROUP], set_health, shutdown).await;
}

fn decode<M: Message + Default>(event: &Event) -> Result<M, Poison> {
    M::decode(&*event.payload).map_err(|error| Poison(error.to_string()))
}

/// Handles events in order. Consecutive events that change positions share a transaction.
async fn handle_in_order(market: &Arc<Market>, events: &[Event]) -> BatchResult {
    let mut handled = 0;
    while handled < events.len() {
        let run = match leading_moves(&events[handled..]) {
            Ok(run) => run,
            Err(poison) => return stopped(handled, poison.into()),
        };
        let count = run.len().max(1);
        let done = if run.is_empty() {
            handle(market, &events[handled])
                .await
                .map_err(retry_if_transient)
        } else {
            let moved = repo::move_positions(&market.projection.db, POSITIONS, run).await;
            moved.map_err(Failure::from)
        };
        match done {
            Ok(()) => handled += count,
            Err(error) => return stopped(handled, error),
        }
    }
    Ok(())
}

fn stopped(handled: usize, error: Failure) -> BatchResult {
    Err(Stopped { handled, error })
}

/// The position changes of the leading events, up to the first other or unreadable event.
///
/// # Errors
/// The first event is unreadable.
fn leading_moves(events: &[Event]) -> Result<Vec<Moves>, Poison> {
    let mut run = Vec::new();
    for event in events {
        match moves(event) {
            Ok(Some(moves)) => run.push(moves),
            Err(poison) if run.is_empty() => return Err(poison),
            Ok(None) | Err(_) => break,
        }
    }
    Ok(run)
}

/// The position changes of an event; `None` if its type changes none.
fn moves(event: &Event) -> Result<Option<Moves>, Poison> {
    let (instrument_id, changes) = match event.short_type() {
        "CfaIssuedEvent" => {
            let m: cfa::CfaIssuedEvent = decode(event)?;
            (
                m.instrument_id,
                vec![(m.holder_id, amount(m.amount.as_ref())?)],
            )
        }
        "CfaRedeemedEvent" => {
            let m: cfa::CfaRedeemedEvent = decode(event)?;
            let change = negative(amount(m.amount.as_ref())?)?;
            (m.instrument_id, vec![(m.holder_id, change)])
        }
        "CfaTransferredEvent" => {
            let m: cfa::CfaTransferredEvent = decode(event)?;
            let change = amount(m.amount.as_ref())?;
            let debit = (m.from_user_id, negative(change)?);
            (m.instrument_id, vec![debit, (m.to_user_id, change)])
        }
        _ => return Ok(None),
    };
    Ok(Some(Moves {
        event_id: event.id,
        instrument_id,
        changes,
    }))
}

/// Marks a failure for redelivery if it is transient: a store, a service or the trading path is
/// unavailable.
fn retry_if_transient(error: Failure) -> Failure {
    use tonic::Code::{Aborted, DeadlineExceeded, Internal, ResourceExhausted, Unavailable};
    let is_transient = if let Some(status) = error.downcast_ref::<Status>() {
        let transient = [
            Aborted,
            DeadlineExceeded,
            Internal,
            ResourceExhausted,
            Unavailable,
        ];
        transient.contains(&status.code())
    } else {
        matches!(
            error.downcast_ref(),
            Some(SubmitError::Busy | SubmitError::Stopping | SubmitError::JournalFailed)
        )
    };
    if is_transient {
        RetryLater(error.to_string()).into()
    } else {
        error
    }
}

async fn handle(market: &Arc<Market>, event: &Event) -> HandlerResult {
    match event.short_type() {
        "UserBlockedEvent" => {
            let message: identity::UserBlockedEvent = decode(event)?;
            block_user(market, &message.user_id).await?;
        }
        "UserUnblockedEvent" => {
            let message: identity::UserUnblockedEvent = decode(event)?;
            unblock_user(market, &message.user_id).await?;
        }
        "UserUpdatedEvent" => {
            let message: identity::UserUpdatedEvent = decode(event)?;
            evict(market, &message.user_id);
            if let Some(user) = bound_user(market, &message.user_id) {
                market.budgets.queue_refresh(user);
            }
        }
        "InstrumentRegisteredEvent" => {
            let message: cfa::InstrumentRegisteredEvent = decode(event)?;
            let context = Context::new("market");
            instruments::sync_one(market, &context, &message.instrument_id).await?;
        }
        "InstrumentUpdatedEvent" => {
            let message: cfa::InstrumentUpdatedEvent = decode(event)?;
            let context = Context::new("market");
            instruments::sync_one(market, &context, &message.instrument_id).await?;
        }
        "HoldReleasedEvent" => {
            let message: ledger::HoldReleasedEvent = decode(event)?;
            let reason = match message.reason.as_str() {
                "Expired" => CancelReason::HoldExpired,
                _ => CancelReason::HoldReleased,
            };
            on_hold_ended(market, event, &message.hold_id, reason).await?;
        }
        "HoldConsumedEvent" => {
            let message: ledger::HoldConsumedEvent = decode(event)?;
            on_hold_ended(market, event, &message.hold_id, CancelReason::HoldReleased).await?;
        }
        "BalanceUpdatedEvent" => forward_balance(market, &decode(event)?)?,
        _ => {}
    }
    Ok(())
}

/// Queues a user's balance for its sessions. Ignores house sub-accounts and users that never traded
/// here.
fn forward_balance(market: &Market, event: &ledger::BalanceUpdatedEvent) -> Result<(), Failure> {
    let name = SubAccountName::parse(&event.subaccount_id);
    let name = name.filter(|name| name.purpose == Purpose::User);
    let owner = name.and_then(|name| Some((name, bound_user(market, name.user_id)?)));
    let Some((name, user)) = owner else {
        return Ok(());
    };
    let names = market.replica.names();
    let asset = match name.instrument_id {
        CFA_RUB => Some(Asset::MONEY),
        id => {
            let id = InstrumentId::new(id).map_err(|error| Poison(error.to_string()))?;
            names.instrument_of(&id).map(Asset::units)
        }
    };
    // An instrument that the market does not know has no index to send.
    let Some(asset) = asset else { return Ok(()) };
    let amount = proto::convert::decimal(event.new_balance.as_ref());
    let amount = amount.map_err(|error| Poison(error.to_string()))?;
    let minor = amount.to_minor(asset.decimals());
    let minor = minor.map_err(|error| Poison(error.to_string()))?;
    let time_ns = event
        .updated_at
        .as_ref()
        .map_or(0, |at| u64::try_from(timestamp_us(at)).unwrap_or(0) * 1_000);
    market.balances.note(user, asset.ix, Minor(minor), time_ns);
    Ok(())
}

fn amount(amount: Option<&MonetaryAmount>) -> Result<Decimal, Poison> {
    let value = amount.and_then(|amount| amount.amount.as_ref());
    proto::convert::decimal(value).map_err(|error| Poison(error.to_string()))
}

fn negative(amount: Decimal) -> Result<Decimal, Poison> {
    Decimal::ZERO
        .checked_sub(amount)
        .map_err(|error| Poison(error.to_string()))
}

/// The index of a user that is bound in the journal.
fn bound_user(market: &Market, user_id: &str) -> Option<UserIx> {
    market.replica.names().user_ix(&UserId::new(user_id).ok()?)
}

/// Evicts a user's cached profile and invalidates the budget estimate, which the next order reads
/// again.
fn evict(market: &Market, user_id: &str) {
    market.identity.evict(user_id);
    if let Some(user) = bound_user(market, user_id) {
        market.budgets.of_user(user).invalidate();
    }
}

async fn block_user(market: &Arc<Market>, user_id: &str) -> HandlerResult {
    market.identity.evict(user_id);
    if UserId::new(user_id).is_err() {
        return Ok(()); // An invalid user id cannot be bound.
    }
    // Binds the user even if unknown: a concurrent call may bind it with the profile from before
    // the block.
    let user = market.bind_user(user_id).await?;
    market.budgets.of_user(user).invalidate();
    stop_trading(market, user).await?;
    let end = FrontMessage::EndUser(user, DisconnectCode::UserBlocked);
    market.front.send(end).await;
    tracing::info!(user_id, "user blocked, orders cancelled");
    // In the background, so that the next event does not wait. The sweeper closes what stays open.
    let own = market.clone();
    tokio::spawn(async move {
        let holds = own.state(|state| state.core().admission().trading_holds(user).collect());
        let holds: Vec<HoldIx> = holds.await?;
        for hold in holds {
            funding::close_idle(&own, hold).await?;
        }
        Ok::<_, Status>(())
    });
    Ok(())
}

/// Refuses new orders of a user and cancels the open ones (`USER_BLOCKED`).
async fn stop_trading(market: &Market, user: UserIx) -> Result<(), Status> {
    let cause = BlockCause::Identity;
    submit_or_existing(market, Request::BlockUser { user, cause }).await?;
    let cancel = MassCancel::of_blocked(user);
    submit_or_existing(market, Request::MassCancel((&cancel).into())).await
}

async fn unblock_user(market: &Market, user_id: &str) -> HandlerResult {
    evict(market, user_id);
    if UserId::new(user_id).is_err() {
        return Ok(()); // An invalid user id cannot be bound.
    }
    // Binding also finds a user that was bound by a very recent block, before the replica has it.
    let user = market.bind_user(user_id).await?;
    let cause = BlockCause::Identity;
    submit_or_existing(market, Request::UnblockUser { user, cause }).await?;
    Ok(())
}

/// Submits the request and waits until it is durable, or until the state that it repeats is. Must
/// wait: the event is not redelivered after the handler has returned.
async fn submit_or_existing(market: &Market, request: Request) -> Result<(), Status> {
    match market.submit_unless(request, &[DuplicateRequest]).await? {
        Some(_) => Ok(()),
        None => market.await_durable(market.replica.assigned()).await,
    }
}

/// The hold's index if it is an open trading hold, and the open orders that a user's ledger hold
/// covers.
fn orders_covered_by(
    market: &Market,
    user: UserIx,
    hold_id: Id128,
) -> (Option<HoldIx>, Vec<Handle>) {
    market.replica.read(|state| {
        let Some(hold) = state.hold_of(hold_id) else {
            let order = state.order_with_main_hold(user, hold_id);
            return (None, order.into_iter().collect());
        };
        if hold.closed {
            return (None, Vec::new());
        }
        let orders = match hold.open_orders {
            // No order draws on the hold.
            0 => Vec::new(),
            _ => {
                let all = state.core().admission().orders_of(hold.user);
                let drawing = all.filter(|order| order.hold == hold.hold);
                drawing.map(|order| order.handle).collect()
            }
        };
        let serves = hold.kind == HoldKind::Trading;
        (serves.then_some(hold.hold), orders)
    })
}

/// Cancels the open orders that an ended ledger hold covered: those that draw on it, or the one
/// whose main hold it was.
///
/// When market or settlement end a hold, the journal has closed it, or has ended its order, before
/// the ledger publishes the event. A hold that still covers open orders was therefore ended by
/// another service. The fee hold of an open order is ignored: rounding alone may exhaust it.
async fn on_hold_ended(
    market: &Arc<Market>,
    event: &Event,
    hold_id: &str,
    reason: CancelReason,
) -> HandlerResult {
    // The key of an event about a hold is its sub-account.
    let Some(owner) = SubAccountName::parse(&event.key) else {
        return Err(Poison(format!("key {} is not a sub-account id", event.key)).into());
    };
    let (Some(user), Some(id)) = (bound_user(market, owner.user_id), Id128::parse(hold_id)) else {
        return Ok(()); // Not a hold of the market: its hold ids are UUIDs, its users are bound.
    };
    let (hold, orders) = orders_covered_by(market, user, id);
    if hold.is_none() && orders.is_empty() {
        return Ok(());
    }
    tracing::error!(
        hold_id,
        %reason,
        orders = orders.len(),
        "another service ended the hold of open orders: cancelling the orders"
    );
    for handle in orders {
        let request = Request::Cancel(CancelRequest {
            order: OrderRef::Handle(handle),
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            reason,
            key_hash: Id128::NONE,
        });
        match market.submit(request).await {
            // The order has ended meanwhile.
            Ok(_) | Err(SubmitError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let sequence = market.replica.assigned();
    market.await_durable(sequence).await?;
    if let Some(hold) = hold {
        funding::close_idle(market, hold).await?;
    }
    Ok(())
}
