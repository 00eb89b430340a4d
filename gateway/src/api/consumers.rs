//! Consumers of other services' events (specification 6.6, D28).
//!
//! - identity: a blocked user enters no more orders and loses open orders (`USER_BLOCKED`),
//!   sessions and trading holds (`design.md` 4). Any event about a user evicts what is cached of
//!   that user.
//! - cfa: instruments are registered, change and end; issues, redemptions and transfers move the
//!   positions kept here.
//! - ledger: balances are sent to the sessions of their user; a hold that another service has ended
//!   cancels the open orders that draw on it.

use std::sync::Arc;

use admission::{CancelRequest, OpenOrder, OrderRef, Request};
use events::{BatchResult, Event, Failure, HandlerResult, Poison, RetryLater, Stopped, topics};
use prost::Message;
use proto::convert::timestamp_us;
use proto::{
    cfa::v1 as cfa, common::v1::MonetaryAmount, identity::v1 as identity, ledger::v1 as ledger,
};
use replica::State;
use rpc::Context;
use sequencer::SubmitError;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::RejectReason::DuplicateRequest;
use types::command::{BlockCause, MassCancel};
use types::subaccount::{Purpose, SubAccountName};
use types::{
    CFA_RUB, CancelReason, Decimal, Handle, HoldIx, HoldKind, HoldPart, Id128, InstrumentId, Minor,
    SessionIx, UserId, UserIx, order_hold, order_uuid,
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
/// Events per batch on the topic whose events move positions.
const MOVES_MAX: usize = 256;

/// Consumed topics and their health parts. Each has a consumer of its own, so that a block does not
/// queue after the ledger's many events.
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
    // Events of the other topics make calls, and a stop must take effect between two of them.
    let at_once = if topic == topics::CFA { MOVES_MAX } else { 1 };
    events::consume_batches(log, GROUP, &[topic], at_once, handler, shutdown).await?;
    Ok(())
}

/// Shows in the market's health what keeps events from being handled, until shutdown.
pub async fn show_events(
    log: Arc<dyn events::Log>,
    health: rpc::Health,
    shutdown: CancellationToken,
) {
    let tell = |part: &str, reason: Option<&str>| health.set(part, reason);
    events::report_health(log, &[GROUP], tell, shutdown).await;
}

fn read<M: Message + Default>(event: &Event) -> Result<M, Poison> {
    M::decode(&*event.payload).map_err(|error| Poison(error.to_string()))
}

/// Handles events in order. A run of events that move positions shares a transaction.
async fn handle_in_order(market: &Arc<Market>, events: &[Event]) -> BatchResult {
    let mut handled = 0;
    while handled < events.len() {
        let run = match moves_at_front(&events[handled..]) {
            Ok(run) => run,
            Err(poison) => return stopped(handled, poison.into()),
        };
        let count = run.len().max(1);
        let done = if run.is_empty() {
            handle(market, &events[handled]).await.map_err(or_later)
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

/// The leading events that move positions, up to the first other or unreadable one.
fn moves_at_front(events: &[Event]) -> Result<Vec<Moves>, Poison> {
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

fn moves(event: &Event) -> Result<Option<Moves>, Poison> {
    let (instrument_id, changes) = match event.short_type() {
        "CfaIssuedEvent" => {
            let m: cfa::CfaIssuedEvent = read(event)?;
            (
                m.instrument_id,
                vec![(m.holder_id, amount(m.amount.as_ref())?)],
            )
        }
        "CfaRedeemedEvent" => {
            let m: cfa::CfaRedeemedEvent = read(event)?;
            let change = negative(amount(m.amount.as_ref())?)?;
            (m.instrument_id, vec![(m.holder_id, change)])
        }
        "CfaTransferredEvent" => {
            let m: cfa::CfaTransferredEvent = read(event)?;
            let change = amount(m.amount.as_ref())?;
            let given = (m.from_user_id, negative(change)?);
            (m.instrument_id, vec![given, (m.to_user_id, change)])
        }
        _ => return Ok(None),
    };
    Ok(Some(Moves {
        event_id: event.id,
        instrument_id,
        changes,
    }))
}

/// Marks a failure for redelivery if only a store, a peer or the journal can resolve it.
fn or_later(error: Failure) -> Failure {
    use tonic::Code::{Aborted, DeadlineExceeded, Internal, ResourceExhausted, Unavailable};
    let is_away = if let Some(status) = error.downcast_ref::<Status>() {
        let away = [
            Aborted,
            DeadlineExceeded,
            Internal,
            ResourceExhausted,
            Unavailable,
        ];
        away.contains(&status.code())
    } else {
        matches!(
            error.downcast_ref(),
            Some(SubmitError::Busy | SubmitError::Stopping | SubmitError::JournalFailed)
        )
    };
    if is_away {
        RetryLater(error.to_string()).into()
    } else {
        error
    }
}

async fn handle(market: &Arc<Market>, event: &Event) -> HandlerResult {
    match event.short_type() {
        "UserBlockedEvent" => {
            let message: identity::UserBlockedEvent = read(event)?;
            block(market, &message.user_id).await?;
        }
        "UserUnblockedEvent" => {
            let message: identity::UserUnblockedEvent = read(event)?;
            unblock(market, &message.user_id).await?;
        }
        "UserUpdatedEvent" => {
            let message: identity::UserUpdatedEvent = read(event)?;
            forget(market, &message.user_id);
            if let Some(user) = bound(market, &message.user_id) {
                market.budgets.reset(user);
            }
        }
        "InstrumentRegisteredEvent" => {
            let message: cfa::InstrumentRegisteredEvent = read(event)?;
            let context = Context::new("market");
            instruments::sync_one(market, &context, &message.instrument_id).await?;
        }
        "InstrumentUpdatedEvent" => {
            let message: cfa::InstrumentUpdatedEvent = read(event)?;
            let context = Context::new("market");
            instruments::sync_one(market, &context, &message.instrument_id).await?;
        }
        "HoldReleasedEvent" => {
            let message: ledger::HoldReleasedEvent = read(event)?;
            let reason = match message.reason.as_str() {
                "Expired" => CancelReason::HoldExpired,
                _ => CancelReason::HoldReleased,
            };
            hold_vanished(market, event, &message.hold_id, reason).await?;
        }
        "HoldConsumedEvent" => {
            let message: ledger::HoldConsumedEvent = read(event)?;
            hold_vanished(market, event, &message.hold_id, CancelReason::HoldReleased).await?;
        }
        "BalanceUpdatedEvent" => balance(market, &read(event)?)?,
        _ => {}
    }
    Ok(())
}

/// Forwards a user's balance to its sessions. House sub-accounts and users unknown here have none.
fn balance(market: &Market, event: &ledger::BalanceUpdatedEvent) -> Result<(), Failure> {
    let name = SubAccountName::parse(&event.subaccount_id);
    let name = name.filter(|name| name.purpose == Purpose::User);
    let owner = name.and_then(|name| Some((name, bound(market, name.user_id)?)));
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
    // An instrument that is not listed here has no index to send.
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

/// The index of a user who has traded here.
fn bound(market: &Market, user_id: &str) -> Option<UserIx> {
    market.replica.names().user_ix(&UserId::new(user_id).ok()?)
}

/// Evicts what is cached of a user. Its next order reads the budget again.
fn forget(market: &Market, user_id: &str) {
    market.identity.forget(user_id);
    if let Some(user) = bound(market, user_id) {
        market.budgets.of(user).drop_figure();
    }
}

async fn block(market: &Arc<Market>, user_id: &str) -> HandlerResult {
    market.identity.forget(user_id);
    if UserId::new(user_id).is_err() {
        return Ok(()); // No valid user id: it could not be bound.
    }
    // Another call may be binding the user now, with the profile from before the block.
    let user = market.bind_user(user_id).await?;
    market.budgets.of(user).drop_figure();
    stop_trading(market, user).await?;
    let end = FrontMessage::EndUser(user, DisconnectCode::UserBlocked);
    market.front.send(end).await;
    tracing::info!(user_id, "user blocked, orders cancelled");
    // The next event does not wait for the user's money: the sweeper closes what stays open.
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

async fn unblock(market: &Market, user_id: &str) -> HandlerResult {
    forget(market, user_id);
    if UserId::new(user_id).is_err() {
        return Ok(()); // No valid user id: it could not be bound.
    }
    // Bound, so that a block of a moment ago is found without waiting for the replica.
    let user = market.bind_user(user_id).await?;
    let cause = BlockCause::Identity;
    submit_or_existing(market, Request::UnblockUser { user, cause }).await?;
    Ok(())
}

/// Submits the request and waits until it, or the state that it repeats, is durable: the event that
/// caused it is not redelivered after the handler returns.
async fn submit_or_existing(market: &Market, request: Request) -> Result<(), Status> {
    match market.submit_unless(request, &[DuplicateRequest]).await? {
        Some(_) => Ok(()),
        None => market.durable(market.replica.assigned()).await,
    }
}

/// The open orders that a user's ledger hold covers, and its index if it is an open trading hold.
fn behind(market: &Market, user: UserIx, hold_id: Id128) -> (Option<HoldIx>, Vec<Handle>) {
    market.replica.read(|state| {
        let Some(hold) = state.hold_of(hold_id) else {
            return (None, order_of(state, user, hold_id).into_iter().collect());
        };
        if hold.closed {
            return (None, Vec::new());
        }
        let orders = match hold.open_orders {
            // Settlement releases the hold of an order that has ended: no need to look.
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

/// The user's open order whose own main hold this is. The ids of both begin with the same time, so
/// few orders need both comparisons.
fn order_of(state: &State, user: UserIx, hold_id: Id128) -> Option<Handle> {
    let time = |id: Id128| id.as_u128() >> 80;
    let (node, wanted) = (state.node(), time(hold_id));
    let open = state.core().admission().orders_of(user);
    let id = |order: &OpenOrder| order_uuid(order.time_ns, node, order.sequence);
    let mut same = open.filter(|order| time(id(order)) == wanted);
    let found = same.find(|order| order_hold(id(order), HoldPart::Main) == hold_id);
    found.map(|order| order.handle)
}

/// Cancels the orders that a vanished hold covered: those that draw on it, or the one whose main
/// hold it was.
///
/// The market and settlement end a hold only after the journal: it is closed there, or its order
/// has ended, before the ledger reports it. A hold that still covers open orders was ended by
/// another service. An order that has just ended is not found and needs no cancel. (The fee hold of
/// an open order may run out by rounding alone, so it is ignored.)
async fn hold_vanished(
    market: &Arc<Market>,
    event: &Event,
    hold_id: &str,
    reason: CancelReason,
) -> HandlerResult {
    // The key of an event about a hold is its sub-account.
    let Some(owner) = SubAccountName::parse(&event.key) else {
        return Err(Poison(format!("key {} is no sub-account", event.key)).into());
    };
    let (Some(user), Some(id)) = (bound(market, owner.user_id), Id128::parse(hold_id)) else {
        return Ok(()); // Not one of the market's: those are UUIDs, of users that trade here.
    };
    let (hold, orders) = behind(market, user, id);
    if hold.is_none() && orders.is_empty() {
        return Ok(());
    }
    tracing::error!(hold_id, %reason, orders = orders.len(), "hold of open orders ended elsewhere: cancelling them");
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
    market.durable(sequence).await?;
    if let Some(hold) = hold {
        funding::close_idle(market, hold).await?;
    }
    Ok(())
}
