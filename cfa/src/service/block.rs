//! Compliance blocks, unblocks or refunds a redemption before the bank has its payout (115-FZ,
//! specification 1.5, R089).

use super::{OperationResult, RequestMeta, Service};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{Flow, Operation, Rejection, Status};
use crate::saga::{Chain, LimitReservation, Payout};

/// Name of the call under which answers are stored (D50).
const SET_BLOCK: &str = "SetRedemptionBlock";

impl Service {
    /// Blocks a redemption, or unblocks it so that it continues.
    ///
    /// # Errors
    /// `OperationNotFound`. `OperationState`: the operation is no redemption of CFA-RUB, the refund
    /// was ordered, or a block comes after the bank has the payout, after the limit is refused, or
    /// in a status that cannot become BLOCKED.
    pub async fn set_redemption_block(
        &self,
        meta: &RequestMeta,
        operation_id: &str,
        blocked: bool,
        reason: &str,
    ) -> Result<OperationResult, Error> {
        let lock = self.lock_call(meta, SET_BLOCK, operation_id).await;
        if let Some(stored_operation_id) = self.stored_answer(meta, SET_BLOCK).await? {
            return Ok(OperationResult {
                operation: self.redemption(&stored_operation_id).await?,
                replayed: true,
            });
        }
        let mut operation = self.redemption(operation_id).await?;
        if operation.progress.refunding {
            return Err(Refusal::OperationState.into());
        }
        let previous_status = operation.status;
        let mut tx = self.repo.begin().await?;
        let is_change = operation.progress.blocked != blocked;
        if is_change {
            let now_us = self.now_us();
            let action = match blocked {
                true => block(&mut operation, reason, now_us)?,
                false => unblock(&mut operation, now_us)?,
            };
            let record = publish::audit(
                action,
                operation_id,
                &meta.actor,
                previous_status.as_str(),
                operation.status.as_str(),
                reason,
                &meta.correlation_id,
                now_us,
            );
            self.repo.save_operation_in_tx(&mut tx, &operation).await?;
            self.repo.publish_in_tx(&mut tx, &[record]).await?;
        }
        self.store_call_in_tx(&mut tx, meta, SET_BLOCK, operation_id)
            .await?;
        tx.commit().await?;
        // The block, or its end, is recorded; nothing follows from it yet.
        failpoint::reach("cfa.block_recorded");
        drop(lock);
        if is_change && !blocked {
            // The receipt may have arrived while the redemption was blocked.
            if let Some(tx_hash) = &operation.tx_hash {
                self.on_receipt(tx_hash).await?;
            }
            operation = self.drive_best_effort(operation).await?;
        }
        Ok(OperationResult {
            operation,
            replayed: false,
        })
    }

    /// Refunds a blocked redemption: undoes its completed steps and ends it as REFUNDED. If the
    /// bank already has the payout, the redemption continues instead.
    ///
    /// # Errors
    /// `OperationState` unless the redemption is BLOCKED or its refund was ordered before.
    pub async fn refund_redemption(
        &self,
        meta: &RequestMeta,
        operation_id: &str,
        reason: &str,
    ) -> Result<OperationResult, Error> {
        let lock = self.object_locks.lock(operation_id).await;
        let mut operation = self.redemption(operation_id).await?;
        let replayed = operation.progress.refunding;
        if !replayed {
            if operation.status != Status::Blocked {
                return Err(Refusal::OperationState.into());
            }
            operation.progress.refunding = true;
            self.save_refund(&mut operation, meta, "redemption.refund_ordered", reason)
                .await?;
            // The refund is recorded; no step is undone.
            failpoint::reach("cfa.refund_ordered");
        }
        drop(lock);
        Ok(OperationResult {
            operation: self.drive_best_effort(operation).await?,
            replayed,
        })
    }

    /// Looks up a burn whose submission a crash kept from being recorded. If the chain service has
    /// none, none will be submitted: a refund never sends a burn.
    pub(super) async fn find_burn(&self, operation: &mut Operation) -> Result<(), Error> {
        let key = format!("op:{}", operation.operation_id);
        operation.progress.chain = match self.chain.submission(&key).await? {
            Some(sent) => {
                operation.tx_hash = Some(sent.tx_hash.to_string());
                Chain::Sent
            }
            None => Chain::Refused,
        };
        operation.updated_at_us = self.now_us();
        self.repo.save_operation(operation).await
    }

    /// Continues a redemption whose payout the bank has, as if it had not been blocked.
    pub(super) async fn abandon_refund(&self, operation: &mut Operation) -> Result<(), Error> {
        tracing::error!(
            operation_id = operation.operation_id,
            severity = "critical",
            "refund of redemption abandoned: the bank has the payout, the redemption continues; \
             recover the money from the user if the block stands"
        );
        operation.progress.refunding = false;
        operation.progress.blocked = false;
        operation.status_before_block = None;
        operation.rejection = None;
        let now_us = self.now_us();
        operation.set_status(Status::OnchainSubmitted, now_us);
        let meta = RequestMeta {
            idempotency_key: String::new(),
            correlation_id: operation.correlation_id.clone(),
            actor: crate::peers::SOURCE.to_owned(),
            digest: 0,
        };
        let reason = "the bank has the payout";
        self.save_refund(operation, &meta, "redemption.refund_abandoned", reason)
            .await
    }

    async fn save_refund(
        &self,
        operation: &mut Operation,
        meta: &RequestMeta,
        action: &str,
        reason: &str,
    ) -> Result<(), Error> {
        operation.updated_at_us = self.now_us();
        let record = publish::audit(
            action,
            &operation.operation_id,
            &meta.actor,
            Status::Blocked.as_str(),
            operation.status.as_str(),
            reason,
            &meta.correlation_id,
            operation.updated_at_us,
        );
        let mut tx = self.repo.begin().await?;
        self.repo.save_operation_in_tx(&mut tx, operation).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        Ok(tx.commit().await?)
    }

    /// Loads a CFA-RUB redemption.
    ///
    /// # Errors
    /// `OperationNotFound`; `OperationState` if the operation is no redemption of CFA-RUB.
    async fn redemption(&self, operation_id: &str) -> Result<Operation, Error> {
        let found = self.repo.operation(operation_id).await?;
        let operation = found.ok_or(Refusal::OperationNotFound)?;
        match operation.flow {
            Flow::RedeemRub => Ok(operation),
            _ => Err(Refusal::OperationState.into()),
        }
    }
}

/// Blocks the redemption. Returns the action for the audit record.
fn block(operation: &mut Operation, reason: &str, now_us: i64) -> Result<&'static str, Refusal> {
    let progress = &operation.progress;
    let is_at_bank = matches!(
        progress.payout,
        Payout::Released | Payout::Succeeded | Payout::Failed
    );
    let is_refused = progress.limit == LimitReservation::Refused;
    if is_at_bank || is_refused || !operation.status.may_become(Status::Blocked) {
        return Err(Refusal::OperationState);
    }
    operation.status_before_block = Some(operation.status);
    operation.set_status(Status::Blocked, now_us);
    operation.rejection = Some((Rejection::AmlBlocked, reason.to_owned()));
    operation.progress.blocked = true;
    Ok("redemption.blocked")
}

/// Restores the status before the block. Returns the action for the audit record.
fn unblock(operation: &mut Operation, now_us: i64) -> Result<&'static str, Refusal> {
    let previous_status = operation.status_before_block.take();
    operation.set_status(previous_status.ok_or(Refusal::OperationState)?, now_us);
    operation.rejection = None;
    operation.progress.blocked = false;
    Ok("redemption.cleared")
}
