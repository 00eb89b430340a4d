//! TransferCfa (specification 4.1, T02, T11): moves units from one user to another. Only the
//! transfer of a trade has a payment.

use service_clients::{OperationType, caused_by};
use types::Decimal;

use super::issue::{replayed, same_terms};
use super::settle::operation_of;
use super::{OperationResult, RequestMeta, Service, units};
use crate::error::{Error, Refusal};
use crate::model::{
    Flow, InstrumentStatus, Operation, Rejection, Status, TradeLeg, user_rejection,
};
use crate::repo::Inserted;

#[derive(Debug, Clone)]
pub struct NewTransfer {
    pub instrument_id: String,
    pub from_user_id: String,
    pub to_user_id: String,
    pub amount: Decimal,
    /// Empty: a plain transfer. Otherwise the trade, which has one transfer (T11). Settlement
    /// executes it with the payment.
    pub trade_id: String,
    /// Payment of a trade from the receiver to the sender, in kopecks.
    pub payment_minor: i64,
    /// Fee of a trade on top of the payment, in kopecks.
    pub fee_minor: i64,
}

impl Service {
    pub async fn transfer(
        &self,
        meta: &RequestMeta,
        request: NewTransfer,
    ) -> Result<OperationResult, Error> {
        let instrument = self.require_instrument(&request.instrument_id).await?;
        let units_minor = units("amount.amount", request.amount, instrument.decimals)?;
        if let Some(operation) = self
            .repo
            .operation_by_key(Flow::Transfer, &request.from_user_id, &meta.idempotency_key)
            .await?
        {
            return Ok(replayed(operation, |stored| {
                stored.units_minor == units_minor
                    && stored.instrument_id == request.instrument_id
                    && stored.to_user_id == request.to_user_id
                    && stored.trade_id == request.trade_id
                    && stored.payment_minor == request.payment_minor
            }));
        }
        if !request.trade_id.is_empty() {
            return self.trade_transfer(meta, request, units_minor).await;
        }
        if request.payment_minor != 0 || request.fee_minor != 0 {
            let why = "needs a trade_id: the receiver pays by an own call only";
            return Err(Refusal::field("payment", why).into());
        }
        if request.from_user_id == request.to_user_id {
            return Err(
                Refusal::field("to_user_id", "must be another user than from_user_id").into(),
            );
        }
        // A halt also stops moves outside the market. Forced transfers and redemptions go on.
        if instrument.status != InstrumentStatus::Active {
            return Err(Refusal::InstrumentNotActive.into());
        }
        let mut operation = Operation::new(
            Flow::Transfer,
            &request.from_user_id,
            &meta.idempotency_key,
            &meta.correlation_id,
            self.now_us(),
        );
        operation.amount = request.amount;
        operation.units_minor = units_minor;
        operation.currency_code = instrument.instrument_id.clone();
        operation.instrument_id = instrument.instrument_id.clone();
        operation.from_user_id = request.from_user_id.clone();
        operation.to_user_id = request.to_user_id.clone();

        operation.rejection = self.transfer_refusal(&operation).await?;
        if operation.rejection.is_some() {
            operation.set_status(Status::Rejected, self.now_us());
        }
        let mut tx = self.repo.begin().await?;
        self.repo
            .require_movable_in_tx(&mut tx, &operation.instrument_id)
            .await?;
        if let Inserted::Exists(stored) = self
            .repo
            .insert_operation_in_tx(&mut tx, &operation)
            .await?
        {
            return Ok(replayed(*stored, |stored| same_terms(stored, &operation)));
        }
        if operation.status == Status::Rejected {
            let action = "transfer.rejected";
            return self.reject_in_tx(tx, operation, action, &meta.actor).await;
        }
        let action = "transfer.requested";
        self.start_in_tx(tx, operation, action, &meta.actor).await
    }

    /// Asks identity about both sides of a transfer: profile, limits, sanctions lists. `Some`:
    /// rejected.
    async fn transfer_refusal(
        &self,
        operation: &Operation,
    ) -> Result<Option<(Rejection, String)>, Error> {
        let sides = [&operation.from_user_id, &operation.to_user_id];
        let mut refusal = None;
        for user_id in sides {
            // A block of either side gives the refusal of a blocked user's own call (D47).
            let correlation_id = &operation.correlation_id;
            let refused = self.peers.user_refusal(correlation_id, user_id).await?;
            refusal = refusal.or(refused.as_ref().map(user_rejection));
        }
        if refusal.is_none() {
            refusal = self.peers.check_limits(operation).await?;
        }
        let context = caused_by(&operation.correlation_id);
        for user_id in sides {
            if refusal.is_none() {
                let identity = &self.peers.identity;
                let hit = identity.check_sanctions(&context, user_id, &operation.operation_id);
                refusal = hit.await?.map(|reason| (Rejection::SanctionsHit, reason));
            }
        }
        Ok(refusal)
    }

    /// Stores the transfer of a trade, as the trade's event does. Settlement sends it in a batch,
    /// after the trade's ledger transaction (`design.md` 4).
    ///
    /// # Errors
    /// `OperationNotFound` for a trade that neither an event nor the ledger has (T11).
    /// `ReferenceTaken` if the stored trade differs.
    async fn trade_transfer(
        &self,
        meta: &RequestMeta,
        request: NewTransfer,
        units_minor: i64,
    ) -> Result<OperationResult, Error> {
        let leg = TradeLeg {
            trade_id: request.trade_id,
            instrument_id: request.instrument_id,
            trade_number: 0,
            buyer_id: request.to_user_id,
            seller_id: request.from_user_id,
            quantity: request.amount,
            payment_minor: request.payment_minor,
            fee_minor: request.fee_minor,
        };
        let wanted = operation_of(&leg, units_minor, meta, self.now_us());
        if let Some(stored) = self.repo.operation_of_trade(&leg.trade_id).await? {
            return same_trade(stored, &wanted);
        }
        let posted = self
            .peers
            .ledger
            .has_operation(
                &caused_by(&meta.correlation_id),
                &leg.buyer_id,
                OperationType::TradeBuy,
                &leg.trade_id,
                &leg.trade_id,
            )
            .await?;
        if !posted {
            return Err(Refusal::OperationNotFound.into());
        }
        let mut tx = self.repo.begin().await?;
        if let Inserted::Exists(stored) = self.repo.insert_operation_in_tx(&mut tx, &wanted).await?
        {
            return same_trade(*stored, &wanted);
        }
        tx.commit().await?;
        Ok(OperationResult {
            operation: wanted,
            replayed: false,
        })
    }
}

/// Returns the stored operation of a trade as a repeat.
///
/// # Errors
/// `ReferenceTaken` if it differs from `wanted`.
fn same_trade(stored: Operation, wanted: &Operation) -> Result<OperationResult, Error> {
    let is_same = stored.instrument_id == wanted.instrument_id
        && stored.units_minor == wanted.units_minor
        && stored.from_user_id == wanted.from_user_id
        && stored.to_user_id == wanted.to_user_id;
    if !is_same {
        return Err(Refusal::ReferenceTaken.into());
    }
    Ok(OperationResult {
        operation: stored,
        replayed: true,
    })
}
