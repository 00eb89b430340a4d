//! Operations that leave a sealed batch because the ledger refuses them.

use proto::common::v1::MonetaryAmount;
use proto::ledger::v1 as pb;
use proto::ledger::v1::hold_step::Step;
use tonic::Status;

use crate::CallError;
use crate::ledger::SealedBatch;

impl SealedBatch {
    /// The batch without the operations with this external reference. What these were to pay out of
    /// holds is spent instead: it is available to the owner, as after a reversal, and later batches
    /// find the holds as after the payment.
    #[must_use]
    pub fn without(mut self, external_ref: &str) -> Self {
        let request = &mut self.0;
        // In the order of execution.
        request.hold_steps.sort_by_key(|step| step.before_operation);
        let mut index = 0;
        while let Some(operation) = request.operations.get(index) {
            if !refers_to(operation, external_ref) {
                index += 1;
                continue;
            }
            let at = index as u32;
            for posting in request.operations.remove(index).postings {
                if let Some(hold_id) = posting.hold_id {
                    spend(request, at, hold_id, posting.amount);
                }
            }
            for step in &mut request.hold_steps {
                step.before_operation -= u32::from(step.before_operation > at);
            }
        }
        // The decimals of an instrument may be what the ledger refuses.
        let operations = &request.operations;
        request.instrument_scales.retain(|scale| {
            let mut postings = operations.iter().flat_map(|of| &of.postings);
            postings.any(|posting| {
                let amount = posting.amount.as_ref();
                amount.is_some_and(|amount| amount.currency_code == scale.instrument_id)
            })
        });
        self
    }

    /// A refusal with the refused trade or hold in its text.
    pub(crate) fn locate(&self, error: CallError) -> CallError {
        let CallError::Refused(status) = error else {
            return error;
        };
        let operation = refused_index(&status, "operation_index", "operations")
            .and_then(|index| self.0.operations.get(index)?.operation.as_ref());
        let step = refused_index(&status, "hold_step_index", "hold_steps")
            .and_then(|index| self.0.hold_steps.get(index));
        let item = match (operation, step) {
            (Some(operation), _) => {
                let trade = operation.external_ref.as_deref().unwrap_or_default();
                format!("operation of trade {trade}")
            }
            (None, Some(step)) => self.describe(hold_of(step)),
            (None, None) => return CallError::Refused(status),
        };
        CallError::Refused(Status::with_details_and_metadata(
            status.code(),
            format!("{} ({item})", status.message()),
            status.details().to_vec().into(),
            status.metadata().clone(),
        ))
    }

    /// A hold with the first trade that it pays for.
    fn describe(&self, hold_id: &str) -> String {
        let mut operations = self.0.operations.iter();
        let paid = operations.find(|of| {
            let mut holds = of.postings.iter().map(|posting| posting.hold_id.as_deref());
            holds.any(|paying| paying == Some(hold_id))
        });
        match paid.and_then(|paid| paid.operation.as_ref()?.external_ref.as_deref()) {
            Some(trade) => format!("hold {hold_id} of trade {trade}"),
            None => format!("hold {hold_id}, which pays for no trade of the batch"),
        }
    }
}

/// Spends the amount of a posting of the operation that had index `at`.
fn spend(
    request: &mut pb::CreateOperationsRequest,
    at: u32,
    hold_id: String,
    amount: Option<MonetaryAmount>,
) {
    let steps = &mut request.hold_steps;
    let place = steps.partition_point(|step| step.before_operation <= at);
    let step = pb::HoldStep {
        step: Some(Step::Spend(pb::SpendHold { hold_id, amount })),
        before_operation: at,
    };
    steps.insert(place, step);
}

fn refers_to(operation: &pb::NewOperation, external_ref: &str) -> bool {
    let operation = operation.operation.as_ref();
    operation.is_some_and(|operation| operation.external_ref.as_deref() == Some(external_ref))
}

/// The hold that a step changes; of a split, the child.
fn hold_of(step: &pb::HoldStep) -> &str {
    match &step.step {
        Some(Step::Split(split)) => &split.hold_id,
        Some(Step::Grow(grow)) => &grow.hold_id,
        Some(Step::ReturnToParent(returned)) => &returned.hold_id,
        Some(Step::Shrink(shrink)) => &shrink.hold_id,
        Some(Step::Spend(spend)) => &spend.hold_id,
        Some(Step::Open(_)) | None => "",
    }
}

/// Index of the item that a refusal names, in its details or, for an invalid field, in its text.
fn refused_index(status: &Status, detail: &str, list: &str) -> Option<usize> {
    if let Some(index) = rpc::status::detail(status, detail) {
        return index.parse().ok();
    }
    let (_, after) = status.message().split_once(&format!("{list}["))?;
    after.split(']').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::ledger::{Batch, HoldChange, HoldStep, Operation, Posting};
    use types::{Amount, Id128, Minor, OperationType};

    const POOL: Id128 = Id128::from_u128(1);
    const MAIN: Id128 = Id128::from_u128(2);
    const FEE: Id128 = Id128::from_u128(3);

    fn split(before_operation: u32, hold: Id128, minor: i64) -> HoldStep {
        HoldStep {
            before_operation,
            hold,
            change: HoldChange::SplitFrom { parent: POOL },
            amount: Some(Amount::rubles(Minor(minor))),
            reason: "Order 1".to_owned(),
        }
    }

    fn paid(trade: &str, operation_type: OperationType, hold: Id128, minor: i64) -> Operation {
        Operation {
            operation_id: format!("{trade}-{}", operation_type.as_str()),
            operation_type,
            user_id: "ann".to_owned(),
            idempotency_key: trade.to_owned(),
            external_ref: trade.to_owned(),
            postings: vec![Posting {
                debit: "ann:CFA-RUB".to_owned(),
                credit: "system:reserve:CFA-RUB".to_owned(),
                amount: Amount::rubles(Minor(minor)),
                hold: Some(hold),
                unsettled: false,
            }],
        }
    }

    fn sealed(operations: Vec<Operation>, hold_steps: Vec<HoldStep>) -> SealedBatch {
        let batch = Batch {
            operations,
            hold_steps,
            scales: vec![("CFA-RUB".to_owned(), 2)],
            source: "settlement-1".to_owned(),
            first_sequence: 1,
            through_sequence: 2,
        };
        SealedBatch::new(batch, "settlement", "settlement:1:1-2")
    }

    /// Position, hold and whether the hold is spent, of each step.
    fn steps(batch: &SealedBatch) -> Vec<(u32, String, bool)> {
        let read = |step: &pb::HoldStep| {
            let is_spent = matches!(step.step, Some(Step::Spend(_)));
            (step.before_operation, hold_of(step).to_owned(), is_spent)
        };
        batch.0.hold_steps.iter().map(read).collect()
    }

    #[test]
    fn payments_of_withdrawn_operations_are_spent_at_their_place() {
        let batch = sealed(
            vec![
                paid("t-1", OperationType::TradeBuy, MAIN, 1_000),
                paid("t-1", OperationType::Fee, FEE, 10),
                paid("t-2", OperationType::TradeBuy, MAIN, 500),
            ],
            vec![split(0, MAIN, 1_500), split(0, FEE, 10), split(2, POOL, 5)],
        );
        let rest = batch.without("t-1");
        assert_eq!(rest.0.operations.len(), 1);
        let [pool, main, fee] = [POOL, MAIN, FEE].map(|id| id.to_string());
        assert_eq!(
            steps(&rest),
            [
                (0, main.clone(), false),
                (0, fee.clone(), false),
                (0, main.clone(), true),
                (0, fee, true),
                (0, pool, false),
            ]
        );
        assert_eq!(rest.0.instrument_scales.len(), 1);
        let none = rest.without("t-2");
        assert!(none.0.operations.is_empty() && none.0.instrument_scales.is_empty());
        assert_eq!(steps(&none).last(), Some(&(0, main, true)));
    }

    #[test]
    fn a_refusal_names_the_trade_or_the_hold() {
        let batch = sealed(
            vec![paid("t-1", OperationType::TradeBuy, MAIN, 1_000)],
            vec![split(0, MAIN, 1_500)],
        );
        let metadata = HashMap::from([("hold_step_index".to_owned(), "0".to_owned())]);
        let code = tonic::Code::FailedPrecondition;
        let reason = "HOLD_AMOUNT_EXCEEDED";
        let short = rpc::status::with_metadata(code, reason, "too much", metadata);
        let located = batch.locate(CallError::Refused(short)).to_string();
        let named = format!("(hold {MAIN} of trade t-1)");
        assert!(located.ends_with(&named), "{located}");
        let field = "operations[0].postings[0].amount.amount";
        let invalid = rpc::status::invalid_argument(field, "is out of range");
        let located = batch.locate(CallError::Refused(invalid)).to_string();
        assert!(located.ends_with("(operation of trade t-1)"), "{located}");
    }
}
