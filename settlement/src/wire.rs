//! Plans in the words of the contract. The only file of this room that builds messages.

use proto::cfa::v1 as cfa;
use proto::common::v1 as common;
use proto::convert::{to_decimal, to_monetary_amount};
use proto::ledger::v1 as ledger;
use types::{CFA_RUB, HoldPart, Id128, UserId, derived, subaccount};

use crate::batch::Batch;
use crate::plan::{Amount, Kind, Movement, Plan, Step, TradeLeg};

/// Source of requests, as services see it.
pub const SOURCE: &str = "settlement";

/// A context whose key is the step's own name, so that a repeat is the same call.
pub fn context(key: &str) -> common::RequestContext {
    common::RequestContext {
        request_id: key.to_owned(),
        correlation_id: key.to_owned(),
        idempotency_key: key.to_owned(),
        source: SOURCE.to_owned(),
        ..Default::default()
    }
}

/// The one ledger request of a batch.
pub fn create_operations(batch: &Batch) -> ledger::CreateOperationsRequest {
    let plan = &batch.plan;
    ledger::CreateOperationsRequest {
        context: Some(context(&format!("{SOURCE}:{}", batch.id))),
        operations: plan
            .operations
            .iter()
            .map(|o| operation(o.kind, &plan.trades[o.trade as usize]))
            .collect(),
        hold_steps: plan.steps.iter().map(hold_step).collect(),
        mode: ledger::BatchMode::AllOrNothing.into(),
        source: batch.source.clone(),
        first_sequence: batch.first,
        through_sequence: batch.through,
        instrument_scales: scales(plan),
    }
}

fn scales(plan: &Plan) -> Vec<ledger::InstrumentScale> {
    let mut seen: Vec<(types::InstrumentId, u8)> = Vec::new();
    for leg in &plan.trades {
        if !seen.iter().any(|(id, _)| *id == leg.units.instrument) {
            seen.push((leg.units.instrument, leg.units.decimals));
        }
    }
    seen.into_iter()
        .map(|(id, decimals)| ledger::InstrumentScale {
            instrument_id: id.to_string(),
            decimals: decimals.into(),
        })
        .collect()
}

/// TRADE_BUY, TRADE_SELL or FEE of a trade (T01, T05, T16).
fn operation(kind: Kind, leg: &TradeLeg) -> ledger::NewOperation {
    use common::OperationType;
    let units = leg.units.instrument.as_str();
    let (operation_type, user, postings) = match kind {
        Kind::TradeBuy => (
            OperationType::TradeBuy,
            leg.buyer,
            vec![
                posting(
                    &leg.value,
                    account(leg.buyer, CFA_RUB),
                    subaccount::reserve(CFA_RUB),
                    Some(leg.paid_from.buyer_main),
                    false,
                ),
                posting(
                    &leg.units,
                    subaccount::reserve(units),
                    account(leg.buyer, units),
                    None,
                    true,
                ),
            ],
        ),
        Kind::TradeSell => (
            OperationType::TradeSell,
            leg.seller,
            vec![
                posting(
                    &leg.value,
                    subaccount::reserve(CFA_RUB),
                    account(leg.seller, CFA_RUB),
                    None,
                    true,
                ),
                posting(
                    &leg.units,
                    account(leg.seller, units),
                    subaccount::reserve(units),
                    Some(leg.paid_from.seller_main),
                    false,
                ),
            ],
        ),
        Kind::Fee => (
            OperationType::Fee,
            leg.buyer,
            vec![posting(
                &leg.fee,
                account(leg.buyer, CFA_RUB),
                subaccount::fees(CFA_RUB),
                leg.paid_from.buyer_fee,
                false,
            )],
        ),
    };
    ledger::NewOperation {
        operation: Some(ledger::Operation {
            operation_id: kind.operation_id(leg.trade).to_string(),
            r#type: operation_type.into(),
            user_id: user.to_string(),
            idempotency_key: kind.key(leg.trade),
            external_ref: Some(leg.trade.to_string()),
            awaits_chain: true,
            ..Default::default()
        }),
        postings,
    }
}

fn account(user: UserId, instrument: &str) -> String {
    subaccount::of_user(user.as_str(), instrument)
}

fn amount(amount: &Amount) -> Option<common::MonetaryAmount> {
    Some(to_monetary_amount(
        amount.instrument.as_str(),
        amount.decimal(),
    ))
}

fn posting(
    money: &Amount,
    debit: String,
    credit: String,
    hold: Option<Id128>,
    unsettled: bool,
) -> ledger::Posting {
    ledger::Posting {
        debit_subaccount_id: debit,
        credit_subaccount_id: credit,
        amount: amount(money),
        hold_id: hold.map(|id| id.to_string()),
        unsettled,
        ..Default::default()
    }
}

fn hold_step(step: &Step) -> ledger::HoldStep {
    use ledger::hold_step::Step as Wire;
    let wire = match &step.movement {
        Movement::Split {
            parent,
            hold,
            amount: money,
            order,
            part,
        } => Wire::Split(ledger::SplitHold {
            parent_hold_id: parent.to_string(),
            hold_id: hold.to_string(),
            amount: amount(money),
            reason: match part {
                HoldPart::Main => format!("Order {order}"),
                HoldPart::Fee => format!("Fee for order {order}"),
            },
        }),
        Movement::Grow {
            hold,
            amount: money,
        } => Wire::Grow(ledger::GrowHold {
            hold_id: hold.to_string(),
            amount: amount(money),
        }),
        Movement::Return {
            hold,
            amount: money,
            order,
            ending,
        } => Wire::ReturnToParent(ledger::ReturnHold {
            hold_id: hold.to_string(),
            amount: amount(money),
            reason: format!("Order {order}: {}", ending.as_str()),
        }),
        Movement::Release {
            hold,
            order,
            ending,
        } => Wire::Shrink(ledger::ShrinkHold {
            hold_id: hold.to_string(),
            amount: None,
            reason: format!("Order {order}: {}", ending.as_str()),
        }),
    };
    ledger::HoldStep {
        step: Some(wire),
        before_operation: step.before_operation,
    }
}

/// The trades of a batch as they go to the chain.
pub fn settle_trades(batch_id: &str, trades: &[TradeLeg]) -> cfa::SettleTradesRequest {
    cfa::SettleTradesRequest {
        context: Some(context(&format!("{SOURCE}:{batch_id}"))),
        batch_id: batch_id.to_owned(),
        trades: trades
            .iter()
            .map(|leg| cfa::TradeLeg {
                trade_id: leg.trade.to_string(),
                instrument_id: leg.instrument.to_string(),
                trade_number: leg.trade_number,
                buyer_id: leg.buyer.to_string(),
                seller_id: leg.seller.to_string(),
                quantity: Some(to_decimal(leg.units.decimal())),
                payment: Some(to_decimal(leg.value.decimal())),
                fee: Some(to_decimal(leg.fee.decimal())),
            })
            .collect(),
    }
}

/// The request of another attempt for some of the trades.
pub fn attempt(
    first: &cfa::SettleTradesRequest,
    attempt: u8,
    trades: &[u32],
) -> cfa::SettleTradesRequest {
    let batch_id = derived::attempt_id(&first.batch_id, attempt);
    cfa::SettleTradesRequest {
        context: Some(context(&format!("{SOURCE}:{batch_id}"))),
        trades: trades
            .iter()
            .map(|index| first.trades[*index as usize].clone())
            .collect(),
        batch_id,
    }
}

/// Operation ids of a trade, from what was sent to the chain.
pub fn operation_ids(leg: &cfa::TradeLeg) -> Vec<String> {
    let trade = Id128::parse(&leg.trade_id).expect("trade ids are made here");
    let has_fee = leg
        .fee
        .as_ref()
        .and_then(|fee| fee.value.parse::<types::Decimal>().ok())
        .is_some_and(|fee| fee.is_positive());
    Kind::ALL
        .into_iter()
        .filter(|kind| *kind != Kind::Fee || has_fee)
        .map(|kind| kind.operation_id(trade).to_string())
        .collect()
}
