//! Consumed events (specification 6.6): deposits, payouts, trades, new users, receipts.
//!
//! Each topic has its own consumer group, so a blocked topic delays no other. If the state is
//! stored already, a handler leaves a failed step to the sweep. Otherwise the handler returns an
//! error and the event is redelivered. Events of a terminal operation are acknowledged (T50).

use std::sync::Arc;

use events::{
    BatchResult, Event, Failure, HandlerResult, Log, Poison, RetryLater, Stopped, topics,
};
use prost::Message;
use proto::convert;
use proto::{
    chain::v1 as chain, identity::v1 as identity, market::v1 as market, payments::v1 as payments,
};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::{Error, Refusal};
use crate::model::{Operation, TradeLeg};
use crate::service::{RequestMeta, Service};

const DEPOSITS: &str = "cfa.deposits";
/// Limit of events per batch of the market topic.
const MARKET_EVENTS_MAX: usize = 256;

/// One consumer group per topic.
const GROUPS: [(&str, &str); 4] = [
    ("cfa.payments", topics::PAYMENTS),
    ("cfa.market", topics::MARKET),
    ("cfa.identity", topics::IDENTITY),
    ("cfa.chain", topics::CHAIN),
];

/// Reports blocked event consumers to health, until `shutdown`.
pub async fn report_consumer_health(
    log: Arc<dyn Log>,
    health: rpc::Health,
    shutdown: CancellationToken,
) {
    let set_health = |part: &str, reason: Option<&str>| health.set(part, reason);
    events::report_health(log, &GROUPS.map(|(group, _)| group), set_health, shutdown).await;
}

/// Spawns one consumer per topic.
pub fn spawn(
    service: &Arc<Service>,
    log: &Arc<dyn Log>,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) {
    for (group, topic) in GROUPS {
        let (service, log, shutdown) = (service.clone(), log.clone(), shutdown.clone());
        tasks.spawn(async move {
            let handler = |events: Vec<Event>| {
                let service = service.clone();
                async move { handle_in_order(&service, group, &events).await }
            };
            // A handler of another event calls services: shutdown is checked between two events.
            let at_once = if topic == topics::MARKET {
                MARKET_EVENTS_MAX
            } else {
                1
            };
            if let Err(error) =
                events::consume_batches(log, group, &[topic], at_once, handler, shutdown).await
            {
                tracing::error!(group, %error, "consumer stopped");
            }
        });
    }
}

fn decode<M: Message + Default>(event: &Event) -> Result<M, Poison> {
    M::decode(event.payload.as_slice())
        .map_err(|error| Poison(format!("{}: {error}", event.type_name)))
}

fn request_meta(event: &Event, key: &str) -> RequestMeta {
    RequestMeta {
        idempotency_key: key.to_owned(),
        correlation_id: event.correlation_id.clone(),
        actor: event.source.clone(),
        digest: 0,
    }
}

/// Maps an error to a consumer failure. A refusal is poison. A transient error is retried later,
/// any other error a limited number of times.
fn to_failure(error: Error) -> Failure {
    match error {
        Error::Refused(refusal) => Poison(refusal.to_string()).into(),
        error if error.is_transient() => RetryLater(error.to_string()).into(),
        error => error.into(),
    }
}

/// Handles events in order. Consecutive trades share one transaction.
async fn handle_in_order(service: &Service, group: &str, events: &[Event]) -> BatchResult {
    let mut handled = 0;
    while handled < events.len() {
        let rest = &events[handled..];
        let trades = rest.iter().take_while(|event| is_trade(event)).count();
        let done = if trades == 0 {
            let done = handle(service, &rest[0]).await;
            done.map_err(|error| Stopped { handled: 0, error })
        } else {
            store_trades(service, group, &rest[..trades]).await
        };
        if let Err(stopped) = done {
            let handled = handled + stopped.handled;
            return Err(Stopped { handled, ..stopped });
        }
        handled += trades.max(1);
    }
    Ok(())
}

fn is_trade(event: &Event) -> bool {
    event.short_type().trim_end_matches("Event") == "TradeExecuted"
}

async fn handle(service: &Service, event: &Event) -> HandlerResult {
    match event.short_type().trim_end_matches("Event") {
        "FiatDeposited" => on_deposited(service, event).await,
        "PayoutConfirmed" => {
            let message: payments::PayoutConfirmedEvent = decode(event)?;
            on_payout_ended(service, event, &message.payout_id).await
        }
        "PayoutFailed" => {
            let message: payments::PayoutFailedEvent = decode(event)?;
            on_payout_ended(service, event, &message.payout_id).await
        }
        "TradeBusted" => {
            let message: market::TradeBustedEvent = decode(event)?;
            let ended = service.on_trade_busted(&message.trade_id).await;
            ended.map_err(to_failure)
        }
        "UserCreated" => {
            let message: identity::UserCreatedEvent = decode(event)?;
            let user = message.user_id.as_str();
            match service
                .ensure_registered(&[user], &event.correlation_id)
                .await
            {
                Err(error) => Err(to_failure(error)),
                Ok(()) => Ok(()),
            }
        }
        "TransactionReceiptReady" => {
            let message: chain::TransactionReceiptReadyEvent = decode(event)?;
            match service.on_receipt(&message.tx_hash).await {
                Err(error) => {
                    // The sweep reads the receipt again.
                    tracing::warn!(tx_hash = message.tx_hash, %error, "operation is left to the sweep");
                    Ok(())
                }
                Ok(()) => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

async fn on_deposited(service: &Service, event: &Event) -> HandlerResult {
    let message: payments::FiatDepositedEvent = decode(event)?;
    let amount_minor = convert::money_minor(message.amount.as_ref())
        .map_err(|error| Poison(format!("amount {error}")))?;
    let amount = types::Decimal::from_minor(amount_minor, 2);
    let meta = request_meta(event, &message.payment_id);
    match service
        .issue_rub(
            &meta,
            &message.user_id,
            amount,
            &message.payment_id,
            Some((DEPOSITS, event.id)),
        )
        .await
    {
        Ok(started) => {
            tracing::info!(
                payment_id = message.payment_id,
                operation_id = started.operation.operation_id,
                "deposit handled"
            );
            Ok(())
        }
        // The deposit is refunded already.
        Err(Error::Refused(Refusal::DepositResolved)) => {
            tracing::warn!(
                payment_id = message.payment_id,
                "deposit was redelivered after its refund"
            );
            Ok(())
        }
        Err(error) => Err(to_failure(error)),
    }
}

async fn on_payout_ended(service: &Service, event: &Event, payout_id: &str) -> HandlerResult {
    match service.finalize_redemption(payout_id).await {
        Ok(_) => Ok(()),
        // The redemption has ended.
        Err(Error::Refused(Refusal::PayoutFailed)) => Ok(()),
        // The payout is a deposit's refund or belongs to another service.
        Err(Error::Refused(Refusal::OperationNotFound)) => service
            .on_refund_payout(&event.correlation_id, payout_id)
            .await
            .map_err(to_failure),
        Err(error) => Err(to_failure(error)),
    }
}

/// Stores the operations of trades, up to the first failure.
async fn store_trades(service: &Service, group: &str, events: &[Event]) -> BatchResult {
    let mut trades = Vec::with_capacity(events.len());
    let mut failure = None;
    for event in events {
        match operation_of(service, event).await {
            Ok(operation) => trades.push((event.id, operation)),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    let handled = trades.len();
    if let Err(error) = service.store_trades(group, trades).await {
        let error = to_failure(error);
        return Err(Stopped { handled: 0, error });
    }
    failure.map_or(Ok(()), |error| Err(Stopped { handled, error }))
}

/// Builds the operation of a trade.
async fn operation_of(service: &Service, event: &Event) -> Result<Operation, Failure> {
    let leg = trade_leg(event)?;
    let meta = request_meta(event, &leg.trade_id);
    service
        .trade_operation(&meta, &leg)
        .await
        .map_err(to_failure)
}

fn trade_leg(event: &Event) -> Result<TradeLeg, Poison> {
    let message: market::TradeExecutedEvent = decode(event)?;
    if message.trade_id.is_empty() {
        return Err(Poison("trade_id is empty".to_owned()));
    }
    let poison = |error: convert::ConvertError| Poison(error.to_string());
    let quantity = convert::positive(message.quantity.as_ref()).map_err(poison)?;
    let price = convert::positive(message.price.as_ref()).map_err(poison)?;
    let payment = quantity
        .checked_mul(price)
        .and_then(|value| value.to_minor(2))
        .map_err(|error| Poison(error.to_string()))?;
    let fee = match message.fee.as_ref().and_then(|fee| fee.amount.as_ref()) {
        Some(fee) => convert::decimal(fee.amount.as_ref())
            .map_err(poison)?
            .to_minor(2)
            .map_err(|error| Poison(error.to_string()))?,
        None => 0,
    };
    Ok(TradeLeg {
        trade_id: message.trade_id,
        instrument_id: message.instrument_id,
        trade_number: message.trade_number,
        buyer_id: message.buyer_id,
        seller_id: message.seller_id,
        quantity,
        payment_minor: payment,
        fee_minor: fee,
    })
}
