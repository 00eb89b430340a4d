//! Counts limit use from the platform's events, per business day in Moscow, and purchases per year.
//!
//! A deposit counts when its tokens are issued, not when it is paid, because the issue checks the
//! same limit again (T24) and must not count its own payment. An operation with a reservation
//! counts from its reservation; its event adds nothing. Trading counts the traded amounts of both
//! sides, so a cancelled order uses nothing. The buyer's value also counts against the INVESTMENT
//! limit of the year (F35), whatever the basis of the day's limit.

use std::{collections::BTreeMap, sync::Arc};

use events::{BatchResult, Event, Failure, Poison, Sqlite, Stopped};
use prost::Message;
use proto::{cfa::v1 as cfa, common::v1 as common, convert, market::v1 as market};
use tokio_util::sync::CancellationToken;
use types::{BusinessDay, CFA_RUB, Decimal, LimitType};
use uuid::Uuid;

use crate::identity::{
    repo,
    rules::{TradingBasis, period},
};

const GROUP: &str = "identity.uses";
/// Maximum events per transaction.
const EVENTS_MAX: usize = 256;

/// One user's use of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Use {
    user_id: String,
    limit_type: LimitType,
    amount: Decimal,
    at_us: i64,
    /// The operation, which may have a reservation; empty for a trade.
    operation_id: String,
}

/// Consumes the events of CFA and market until shutdown.
pub async fn run(
    db: Sqlite,
    log: Arc<dyn events::Log>,
    basis: TradingBasis,
    shutdown: CancellationToken,
) {
    let handler = |events: Vec<Event>| {
        let db = db.clone();
        async move { count(&db, &events, basis).await }
    };
    let topics = [events::topics::CFA, events::topics::MARKET];
    if let Err(error) =
        events::consume_batches(log, GROUP, &topics, EVENTS_MAX, handler, shutdown).await
    {
        tracing::error!(%error, "limit use counter stopped");
    }
}

/// Counts the uses of a batch of events, each event once.
async fn count(db: &Sqlite, events: &[Event], basis: TradingBasis) -> BatchResult {
    let mut uses: Vec<(usize, Vec<Use>)> = Vec::new();
    let mut unreadable = None;
    for (index, event) in events.iter().enumerate() {
        match uses_of(event, basis) {
            // Most events use no limit and cost no transaction.
            Ok(of_event) if of_event.is_empty() => {}
            Ok(of_event) => uses.push((index, of_event)),
            Err(reason) => {
                unreadable = Some(Stopped {
                    handled: index,
                    error: Poison(reason).into(),
                });
                break;
            }
        }
    }
    if let Some((first, _)) = uses.first() {
        let handled = *first;
        let stopped = |error| Stopped { handled, error };
        add_uses(db, events, uses).await.map_err(stopped)?;
    }
    unreadable.map_or(Ok(()), Err)
}

/// Adds the uses of new events in one transaction. `uses`: index of the event, and its uses.
async fn add_uses(
    db: &Sqlite,
    events: &[Event],
    uses: Vec<(usize, Vec<Use>)>,
) -> Result<(), Failure> {
    let event_ids: Vec<Uuid> = uses.iter().map(|(index, _)| events[*index].id).collect();
    let mut tx = db.write().await?;
    let are_new = events::inbox::accept_many_in_tx(&mut tx, GROUP, &event_ids).await?;
    let mut sums: BTreeMap<(String, i64, &str), (BusinessDay, LimitType, Decimal)> =
        BTreeMap::new();
    for ((_, of_event), _) in uses.into_iter().zip(are_new).filter(|(_, is_new)| *is_new) {
        for used in of_event {
            let operation_id = &used.operation_id;
            if !operation_id.is_empty() && repo::is_counted_in_tx(&mut tx, operation_id).await? {
                continue;
            }
            let day = period(used.limit_type, BusinessDay::of(used.at_us));
            let key = (used.user_id, day.number(), used.limit_type.as_str());
            let (_, _, sum) = sums
                .entry(key)
                .or_insert((day, used.limit_type, Decimal::ZERO));
            *sum = sum.checked_add(used.amount)?;
        }
    }
    for ((user_id, ..), (day, limit_type, sum)) in sums {
        repo::add_use_in_tx(&mut tx, &user_id, day, limit_type, sum).await?;
    }
    tx.commit().await?;
    Ok(())
}

fn uses_of(event: &Event, basis: TradingBasis) -> Result<Vec<Use>, String> {
    let bytes = event.payload.as_slice();
    let broken = |error: prost::DecodeError| error.to_string();
    let time = |at: Option<&prost_types::Timestamp>| {
        at.map_or(event.occurred_at_us, convert::timestamp_us)
    };
    match event.short_type() {
        "CfaIssuedEvent" => {
            let issued = cfa::CfaIssuedEvent::decode(bytes).map_err(broken)?;
            if issued.instrument_id != CFA_RUB {
                return Ok(Vec::new());
            }
            Ok(vec![Use {
                user_id: issued.holder_id,
                limit_type: LimitType::Deposit,
                amount: amount(issued.amount.as_ref())?,
                at_us: time(issued.issued_at.as_ref()),
                operation_id: issued.operation_id,
            }])
        }
        "CfaRedeemedEvent" => {
            let redeemed = cfa::CfaRedeemedEvent::decode(bytes).map_err(broken)?;
            if redeemed.instrument_id != CFA_RUB {
                return Ok(Vec::new());
            }
            Ok(vec![Use {
                user_id: redeemed.holder_id,
                limit_type: LimitType::Withdrawal,
                amount: amount(redeemed.amount.as_ref())?,
                at_us: time(redeemed.redeemed_at.as_ref()),
                operation_id: redeemed.operation_id,
            }])
        }
        "TradeExecutedEvent" => {
            let trade = market::TradeExecutedEvent::decode(bytes).map_err(broken)?;
            let number = |value| convert::decimal(value).map_err(|error| error.to_string());
            let quantity = number(trade.quantity.as_ref())?;
            let notional = quantity
                .checked_mul(number(trade.price.as_ref())?)
                .map_err(|error| error.to_string())?
                .normalized();
            let amount = match basis {
                TradingBasis::Quantity => quantity,
                TradingBasis::Notional => notional,
            };
            let at_us = time(trade.executed_at.as_ref());
            let side = |user_id| Use {
                user_id,
                limit_type: LimitType::Trading,
                amount,
                at_us,
                operation_id: String::new(),
            };
            let purchase = Use {
                limit_type: LimitType::Investment,
                amount: notional,
                ..side(trade.buyer_id.clone())
            };
            Ok(vec![side(trade.buyer_id), side(trade.seller_id), purchase])
        }
        _ => Ok(Vec::new()),
    }
}

fn amount(value: Option<&common::MonetaryAmount>) -> Result<Decimal, String> {
    let (_, amount) = convert::monetary_amount(value).map_err(|error| error.to_string())?;
    Ok(amount)
}
