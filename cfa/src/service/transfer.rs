//! TransferCfa (specification 4.1, T02, T11): units from one user to another, optionally against CFA-RUB in the same exchange.

use types::Decimal;

use super::issue::replayed;
use super::{Asked, Service, Started, units};
use crate::api::peers::{CheckedOperation, LimitType};
use crate::error::{Error, Refusal};
use crate::model::{
    CFA_RUB, Flow, InstrumentStatus, Operation, Rejection, Status, limit_rejection,
};
use crate::repo::Inserted;

#[derive(Debug, Clone)]
pub struct NewTransfer {
    pub instrument_id: String,
    pub from_user_id: String,
    pub to_user_id: String,
    pub amount: Decimal,
    /// Set: the money side is settlement's in the ledger; one transfer per trade for ever (T11).
    pub trade_id: String,
    /// Paid by the receiver to the sender, and the fee on top, in kopecks.
    pub payment_minor: i64,
    pub fee_minor: i64,
}

impl Service {
    pub async fn transfer(&self, asked: &Asked, request: NewTransfer) -> Result<Started, Error> {
        let instrument = self.known_instrument(&request.instrument_id).await?;
        let units_minor = units("amount.amount", request.amount, instrument.decimals)?;
        if let Some(operation) = self
            .repo
            .operation_by_key(
                Flow::Transfer,
                &request.from_user_id,
                &asked.idempotency_key,
            )
            .await?
        {
            return Ok(replayed(operation, units_minor));
        }
        if request.from_user_id == request.to_user_id {
            return Err(
                Refusal::field("to_user_id", "must be another user than from_user_id").into(),
            );
        }
        if matches!(
            instrument.status,
            InstrumentStatus::Draft | InstrumentStatus::Redeemed
        ) {
            return Err(Refusal::InstrumentNotActive.into());
        }
        let is_trade = !request.trade_id.is_empty();
        let mut operation = Operation::new(
            Flow::Transfer,
            &request.from_user_id,
            &asked.idempotency_key,
            &asked.correlation_id,
            self.now_us(),
        );
        operation.amount = request.amount;
        operation.units_minor = units_minor;
        operation.currency_code = instrument.instrument_id.clone();
        operation.instrument_id = instrument.instrument_id.clone();
        operation.external_ref = request.trade_id.clone();
        operation.from_user_id = request.from_user_id.clone();
        operation.to_user_id = request.to_user_id.clone();
        operation.trade_id = request.trade_id;
        operation.payment_minor = request.payment_minor;
        operation.fee_minor = request.fee_minor;

        for user_id in [&request.from_user_id, &request.to_user_id] {
            self.peers
                .profile(&asked.correlation_id, user_id)
                .await?
                .ok_or(Refusal::UserNotFound)?;
        }
        // limits were asked at order entry; a matched trade is only looked at for sanctions again (T46)
        let mut refusal = None;
        if !is_trade {
            let limit = if instrument.instrument_id == CFA_RUB {
                LimitType::Withdrawal
            } else {
                LimitType::Trading
            };
            let limits = self
                .peers
                .check_limits(
                    &asked.correlation_id,
                    &request.from_user_id,
                    limit,
                    request.amount,
                    CheckedOperation::Transfer,
                )
                .await?;
            refusal = limits.map(limit_rejection);
        }
        for user_id in [&request.from_user_id, &request.to_user_id] {
            if refusal.is_none() {
                let hit = self
                    .peers
                    .check_sanctions(&asked.correlation_id, user_id, &operation.operation_id)
                    .await?;
                refusal = hit.map(|reason| (Rejection::SanctionsHit, reason));
            }
        }
        if refusal.is_some() {
            operation.set_status(Status::Rejected, self.now_us());
            operation.rejection = refusal;
        } else if is_trade {
            // no gate of its own: settlement has posted the trade
            operation.set_status(Status::Processing, self.now_us());
        }
        let mut tx = self.repo.begin().await?;
        if let Inserted::Exists(stored) = self
            .repo
            .insert_operation_in_tx(&mut tx, &operation)
            .await?
        {
            return Ok(replayed(*stored, units_minor));
        }
        tx.commit().await?;
        if operation.status == Status::Rejected {
            return Ok(Started {
                operation,
                replayed: false,
            });
        }
        Ok(Started {
            operation: self.drive_or_leave(operation).await?,
            replayed: false,
        })
    }
}
