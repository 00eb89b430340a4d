//! Plans as requests to the ledger and to the chain.

use service_clients::OperationType;
use service_clients::cfa::{Trade, TradeBatch};
use service_clients::ledger::{self, HoldChange, HoldStep, Operation, Posting, SealedBatch};
use types::{Amount, CFA_RUB, HoldPart, Id128, InstrumentId, UserId, derived, subaccount};

use crate::batch::Batch;
use crate::plan::{HoldMovement, Kind, Plan, Step, TradeLeg};

/// This service's name in its calls.
pub const SOURCE: &str = "settlement";

/// The ledger request of a batch.
pub fn ledger_batch(batch: &Batch) -> SealedBatch {
    let plan = &batch.plan;
    let operations = plan.operations.iter();
    let request = ledger::Batch {
        operations: operations
            .map(|o| operation(o.kind, &plan.trades[o.trade as usize]))
            .collect(),
        hold_steps: plan.steps.iter().map(hold_step).collect(),
        scales: scales(plan),
        source: batch.source.clone(),
        first_sequence: batch.first,
        through_sequence: batch.through,
    };
    SealedBatch::new(request, SOURCE, &format!("{SOURCE}:{}", batch.id))
}

fn scales(plan: &Plan) -> Vec<(String, u8)> {
    let mut seen: Vec<(InstrumentId, u8)> = Vec::new();
    for leg in &plan.trades {
        if !seen.iter().any(|(id, _)| *id == leg.units.instrument) {
            seen.push((leg.units.instrument, leg.units.decimals));
        }
    }
    let scales = seen.into_iter();
    scales
        .map(|(id, decimals)| (id.to_string(), decimals))
        .collect()
}

/// The ledger operation TRADE_BUY, TRADE_SELL or FEE of a trade (T01, T05, T16).
fn operation(kind: Kind, leg: &TradeLeg) -> Operation {
    let units = leg.units.instrument.as_str();
    let (operation_type, user, postings) = match kind {
        Kind::TradeBuy => (
            OperationType::TradeBuy,
            leg.buyer,
            vec![
                hold_posting(
                    leg.value,
                    account(leg.buyer, CFA_RUB),
                    subaccount::reserve(CFA_RUB),
                    Some(leg.holds.buyer_main),
                ),
                unsettled_posting(
                    leg.units,
                    subaccount::reserve(units),
                    account(leg.buyer, units),
                ),
            ],
        ),
        Kind::TradeSell => (
            OperationType::TradeSell,
            leg.seller,
            vec![
                unsettled_posting(
                    leg.value,
                    subaccount::reserve(CFA_RUB),
                    account(leg.seller, CFA_RUB),
                ),
                hold_posting(
                    leg.units,
                    account(leg.seller, units),
                    subaccount::reserve(units),
                    Some(leg.holds.seller_main),
                ),
            ],
        ),
        Kind::Fee => (
            OperationType::Fee,
            leg.buyer,
            vec![hold_posting(
                leg.fee,
                account(leg.buyer, CFA_RUB),
                subaccount::fees(CFA_RUB),
                leg.holds.buyer_fee,
            )],
        ),
    };
    Operation {
        operation_id: kind.operation_id(leg.trade).to_string(),
        operation_type,
        user_id: user.to_string(),
        idempotency_key: kind.key(leg.trade),
        external_ref: leg.trade.to_string(),
        postings,
    }
}

fn account(user: UserId, instrument: &str) -> String {
    subaccount::of_user(user.as_str(), instrument)
}

/// Posting out of an order's hold.
fn hold_posting(amount: Amount, debit: String, credit: String, hold: Option<Id128>) -> Posting {
    Posting {
        debit,
        credit,
        amount,
        hold,
        unsettled: false,
    }
}

/// Posting that stays unsettled until the chain is final.
fn unsettled_posting(amount: Amount, debit: String, credit: String) -> Posting {
    Posting {
        debit,
        credit,
        amount,
        hold: None,
        unsettled: true,
    }
}

fn hold_step(step: &Step) -> HoldStep {
    let (hold, change, amount, reason) = match step.movement {
        HoldMovement::Split {
            parent,
            hold,
            amount,
            order,
            part,
        } => {
            let reason = match part {
                HoldPart::Main => format!("Order {order}"),
                HoldPart::Fee => format!("Fee for order {order}"),
            };
            (hold, HoldChange::SplitFrom { parent }, Some(amount), reason)
        }
        HoldMovement::Grow { hold, amount } => {
            (hold, HoldChange::Grow, Some(amount), String::new())
        }
        HoldMovement::Return {
            hold,
            amount,
            order,
            reason,
        } => {
            let reason = format!("Order {order}: {}", reason.as_str());
            (hold, HoldChange::ReturnToParent, Some(amount), reason)
        }
        HoldMovement::Release {
            hold,
            order,
            reason,
        } => {
            let reason = format!("Order {order}: {}", reason.as_str());
            (hold, HoldChange::Shrink, None, reason)
        }
    };
    HoldStep {
        before_operation: step.before_operation,
        hold,
        change,
        amount,
        reason,
    }
}

/// The chain request of a batch.
pub fn trade_batch(batch: &Batch) -> TradeBatch {
    let trades = batch.plan.trades.iter();
    TradeBatch {
        batch_id: batch.id.clone(),
        trades: trades
            .map(|leg| Trade {
                trade_id: leg.trade,
                instrument_id: leg.instrument,
                trade_number: leg.trade_number,
                buyer_id: leg.buyer,
                seller_id: leg.seller,
                quantity: leg.units.decimal(),
                payment: leg.value.decimal(),
                fee: leg.fee.decimal(),
            })
            .collect(),
    }
}

/// The chain request of an attempt, for some of the trades.
pub fn attempt(first: &TradeBatch, attempt: u32, trades: &[u32]) -> TradeBatch {
    let trades = trades.iter();
    TradeBatch {
        batch_id: derived::attempt_id(&first.batch_id, attempt),
        trades: trades.map(|index| first.trades[*index as usize]).collect(),
    }
}

/// Ids of a trade's ledger operations.
pub fn operation_ids(trade: &Trade) -> Vec<String> {
    let kinds = Kind::ALL.into_iter();
    kinds
        .filter(|kind| *kind != Kind::Fee || trade.fee.is_positive())
        .map(|kind| kind.operation_id(trade.trade_id).to_string())
        .collect()
}
