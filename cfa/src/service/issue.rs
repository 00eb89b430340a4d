//! IssueCfaRub (specification 4.1 rules 1 to 3), IssueInvestmentCfa (T18) and suspended deposits
//! (T24).

use service_clients::{OperationType, PaymentStatus, caused_by};
use types::{Decimal, Minor};
use uuid::Uuid;

use super::drive::{count_ended, suspended};
use super::{OperationResult, RequestMeta, Service, units};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    CFA_RUB, CFA_RUB_DECIMALS, Flow, Instrument, Operation, Rejection, Status, SuspendedDeposit,
    user_rejection,
};
use crate::repo::Inserted;

/// Name of the call under which answers are stored (D50).
const RESOLVE: &str = "ResolveSuspendedDeposit";

/// `refund-<payment>` refunds a deposit; `refund-<payment>:<n>` is a retry.
const REFUND_PREFIX: &str = "refund-";

/// A request for units of an issue.
#[derive(Debug, Clone)]
pub struct IssueInvestment {
    pub instrument_id: String,
    pub investor_id: String,
    pub amount: Decimal,
    pub bookbuilding_id: String,
    /// CFA-RUB paid to the issuer, in kopecks; 0: no payment.
    pub payment_minor: i64,
}

impl Service {
    /// Mints CFA-RUB for a deposit that payments has received (`design.md` 10). A refusal by limit,
    /// KYC or sanctions is stored as a REJECTED operation and suspends the deposit. `delivered` is
    /// the event that caused the call. Its inbox row is written with the operation.
    ///
    /// # Errors
    /// `PaymentUnpaid` unless payments has the deposit as paid by the same user in the same amount.
    /// `Unavailable` while payments does not answer. Nothing is stored in either case.
    pub async fn issue_rub(
        &self,
        meta: &RequestMeta,
        user_id: &str,
        amount: Decimal,
        payment_id: &str,
        delivered: Option<(&str, Uuid)>,
    ) -> Result<OperationResult, Error> {
        let units_minor = units("amount", amount, CFA_RUB_DECIMALS)?;
        if let Some(operation) = self
            .repo
            .operation_by_key(Flow::IssueRub, user_id, &meta.idempotency_key)
            .await?
        {
            return Ok(replayed(operation, |stored| {
                stored.units_minor == units_minor && stored.external_ref == payment_id
            }));
        }
        let mut operation = Operation::new(
            Flow::IssueRub,
            user_id,
            &meta.idempotency_key,
            &meta.correlation_id,
            self.now_us(),
        );
        operation.amount = amount;
        operation.units_minor = units_minor;
        operation.currency_code = "RUB".into();
        operation.instrument_id = CFA_RUB.into();
        operation.external_ref = payment_id.to_owned();
        operation.to_user_id = user_id.to_owned();

        operation.rejection = self.assess_deposit(&operation, delivered.is_some()).await?;
        let next = match operation.rejection {
            Some(_) => Status::Rejected,
            None => Status::Processing,
        };
        operation.set_status(next, self.now_us());
        if let Some(started) = self
            .record_issue(&operation, delivered, &meta.actor)
            .await?
        {
            return Ok(started);
        }
        failpoint::reach(failpoint::ISSUE_RECORDED);
        if operation.status == Status::Rejected {
            count_ended(&operation);
        } else {
            operation = self.drive_best_effort(operation).await?;
        }
        Ok(OperationResult {
            operation,
            replayed: false,
        })
    }

    /// The rejection of a deposit, if there is one. The payment is verified before the deposit is
    /// rejected. Only a call (not an event) for an unknown user is refused before.
    async fn assess_deposit(
        &self,
        operation: &Operation,
        is_delivered: bool,
    ) -> Result<Option<(Rejection, String)>, Error> {
        let context = caused_by(&operation.correlation_id);
        let (user_id, payment_id) = (&operation.user_id, &operation.external_ref);
        let profile = self.peers.profile(&operation.correlation_id, user_id).await;
        let is_known = match profile {
            // The money has arrived, so the event must not be refused.
            Err(Error::Refused(Refusal::UserNotFound)) if is_delivered => false,
            profile => profile.map(|_| true)?,
        };
        let payments = &self.peers.payments;
        let paid = Minor(operation.units_minor);
        match payments
            .deposit(&context, payment_id, user_id, paid)
            .await?
        {
            Some(PaymentStatus::Success) => {}
            // The event was redelivered after the refund.
            Some(PaymentStatus::Refunded) if is_delivered => {
                return Err(Refusal::DepositResolved.into());
            }
            _ => return Err(Refusal::PaymentUnpaid.into()),
        }
        if !is_known {
            return Ok(Some((
                Rejection::KycRequired,
                "KYC: user not found".to_owned(),
            )));
        }
        let refusal = self.peers.check_limits(operation).await?;
        if refusal.is_some() {
            return Ok(refusal);
        }
        let identity = &self.peers.identity;
        let hit = identity.check_sanctions(&context, user_id, payment_id);
        Ok(hit.await?.map(|reason| (Rejection::SanctionsHit, reason)))
    }

    /// Stores an assessed deposit: its operation, the change of a suspended deposit, and the audit
    /// record. If the operation is stored already, returns the stored one.
    async fn record_issue(
        &self,
        operation: &Operation,
        delivered: Option<(&str, Uuid)>,
        caller: &str,
    ) -> Result<Option<OperationResult>, Error> {
        let payment_id = &operation.external_ref;
        let _lock = self.deposits.lock(payment_id).await;
        self.check_undecided(operation).await?;
        let mut tx = self.repo.begin().await?;
        if let Some((consumer, event_id)) = delivered {
            events::inbox::accept_in_tx(&mut tx, consumer, event_id).await?;
        }
        if let Inserted::Exists(stored) =
            self.repo.insert_operation_in_tx(&mut tx, operation).await?
        {
            let started = existing(*stored, operation)?;
            tx.commit().await?;
            return Ok(Some(started));
        }
        if self.repo.is_resolved_in_tx(&mut tx, payment_id).await? {
            return Err(Refusal::DepositResolved.into());
        }
        let action = match &operation.rejection {
            Some((_, message)) => {
                let deposit = suspended(operation, message, operation.created_at_us);
                self.repo.suspend_deposit_in_tx(&mut tx, &deposit).await?;
                "issuance.rejected"
            }
            // A successful retry resolves an earlier refusal of the same payment.
            None => {
                self.repo.resolve_deposit_in_tx(&mut tx, payment_id).await?;
                "issuance.requested"
            }
        };
        let record = publish::audit_request(operation, action, caller);
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        tx.commit().await?;
        Ok(None)
    }

    /// Checks that a suspended deposit is not refunded. The caller holds the deposit's lock.
    ///
    /// # Errors
    /// `DepositResolved` if it is refunded or a refund is open. `ReferenceTaken` if it belongs to
    /// another user.
    async fn check_undecided(&self, operation: &Operation) -> Result<(), Error> {
        let payment_id = &operation.external_ref;
        let Some(deposit) = self.repo.suspended_deposit(payment_id).await? else {
            return Ok(());
        };
        if deposit.user_id != operation.user_id {
            return Err(Refusal::ReferenceTaken.into());
        }
        let issued = self
            .repo
            .operation_by_reference(OperationType::Issuance, payment_id)
            .await?;
        // The deposit is issued already: the insert returns that operation.
        if issued.is_some() {
            return Ok(());
        }
        if deposit.resolved {
            return Err(Refusal::DepositResolved.into());
        }
        // An open refund excludes the issue.
        let (_, refund) = self
            .latest_refund(&operation.correlation_id, payment_id)
            .await?;
        match refund {
            Some(_) => Err(Refusal::DepositResolved.into()),
            None => Ok(()),
        }
    }

    /// Issues units of an instrument. They are reserved in the issue limit, posted in the ledger,
    /// and then exchanged for the payment in one chain transaction.
    ///
    /// # Errors
    /// `PlacementOnly` for an issue with a placement, `NotSubscribed`, `InstrumentNotActive`.
    pub async fn issue_investment(
        &self,
        meta: &RequestMeta,
        request: IssueInvestment,
    ) -> Result<OperationResult, Error> {
        let instrument = self.require_instrument(&request.instrument_id).await?;
        if instrument.instrument_id == CFA_RUB {
            return Err(
                Refusal::field("instrument_id", "CFA-RUB is issued against deposits only").into(),
            );
        }
        let mut operation = Operation::new(
            Flow::IssueInvestment,
            &request.investor_id,
            &meta.idempotency_key,
            &meta.correlation_id,
            self.now_us(),
        );
        operation.amount = request.amount;
        operation.units_minor = units("amount.amount", request.amount, instrument.decimals)?;
        operation.currency_code = instrument.instrument_id.clone();
        operation.instrument_id = instrument.instrument_id.clone();
        operation.bookbuilding_id = request.bookbuilding_id;
        operation.payment_minor = request.payment_minor;
        operation.to_user_id = request.investor_id;
        let (investor, key) = (&operation.user_id, &meta.idempotency_key);
        let known = self
            .repo
            .operation_by_key(operation.flow, investor, key)
            .await?;
        if let Some(known) = known {
            return Ok(replayed(known, |stored| same_terms(stored, &operation)));
        }
        let instrument = self.unplaced_instrument(&request.instrument_id).await?;
        let mut refusal = self.issue_refusal(&operation).await?;
        let mut tx = self.repo.begin().await?;
        self.repo
            .require_movable_in_tx(&mut tx, &instrument.instrument_id)
            .await?;
        if refusal.is_none()
            && !self
                .repo
                .reserve_issue_in_tx(&mut tx, &instrument.instrument_id, operation.units_minor)
                .await?
        {
            refusal = Some((
                Rejection::IssueLimitExceeded,
                "Issue limit exceeded".to_owned(),
            ));
        }
        if refusal.is_some() {
            operation.set_status(Status::Rejected, self.now_us());
            operation.rejection = refusal;
        }
        if let Inserted::Exists(stored) = self
            .repo
            .insert_operation_in_tx(&mut tx, &operation)
            .await?
        {
            // Dropping the transaction rolls back the reservation of the units.
            return Ok(replayed(*stored, |stored| same_terms(stored, &operation)));
        }
        if operation.payment_minor > 0 {
            self.use_offer_in_tx(&mut tx, &mut operation, &meta.actor)
                .await?;
        }
        if operation.status == Status::Rejected {
            let action = "issuance.rejected";
            return self.reject_in_tx(tx, operation, action, &meta.actor).await;
        }
        let action = "issuance.requested";
        self.start_in_tx(tx, operation, action, &meta.actor).await
    }

    /// An ACTIVE instrument without a placement.
    async fn unplaced_instrument(&self, instrument_id: &str) -> Result<Instrument, Error> {
        let instrument = self.active_instrument(instrument_id).await?;
        match self.repo.placement(instrument_id).await? {
            None => Ok(instrument),
            Some(_) => Err(Refusal::PlacementOnly.into()),
        }
    }

    /// Asks identity about the investor: profile, limits, sanctions lists. `Some`: rejected.
    async fn issue_refusal(
        &self,
        operation: &Operation,
    ) -> Result<Option<(Rejection, String)>, Error> {
        let (correlation, investor) = (&operation.correlation_id, &operation.user_id);
        if let Some(refusal) = self.peers.user_refusal(correlation, investor).await? {
            return Ok(Some(user_rejection(&refusal)));
        }
        if let Some(refusal) = self.peers.check_limits(operation).await? {
            return Ok(Some(refusal));
        }
        let hit = self
            .peers
            .identity
            .check_sanctions(&caused_by(correlation), investor, &operation.instrument_id)
            .await?;
        Ok(hit.map(|reason| (Rejection::SanctionsHit, reason)))
    }

    /// Commits a stored operation with the audit record of its request, and drives it.
    pub(super) async fn start_in_tx(
        &self,
        mut tx: events::Tx,
        operation: Operation,
        action: &str,
        caller: &str,
    ) -> Result<OperationResult, Error> {
        let record = publish::audit_request(&operation, action, caller);
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        tx.commit().await?;
        Ok(OperationResult {
            operation: self.drive_best_effort(operation).await?,
            replayed: false,
        })
    }

    /// Ends an operation as rejected, in the transaction that inserted it, with the audit record
    /// `action` of the caller.
    pub(super) async fn reject_in_tx(
        &self,
        mut tx: events::Tx,
        operation: Operation,
        action: &str,
        actor: &str,
    ) -> Result<OperationResult, Error> {
        let record = publish::audit_request(&operation, action, actor);
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        tx.commit().await?;
        count_ended(&operation);
        Ok(OperationResult {
            operation,
            replayed: false,
        })
    }

    /// FinalizeIssuance (D42): reads the receipt now instead of waiting for its event. A repeat is
    /// any call after the operation's end.
    pub async fn finalize_issuance(&self, tx_hash: &str) -> Result<OperationResult, Error> {
        let tx_hash = tx_hash.to_lowercase();
        let found = self
            .repo
            .operations_by_tx(&tx_hash)
            .await?
            .into_iter()
            .next()
            .ok_or(Refusal::OperationNotFound)?;
        self.on_receipt(&tx_hash).await?;
        let operation = self.repo.operation(&found.operation_id).await?;
        Ok(OperationResult {
            operation: operation.ok_or(Refusal::OperationNotFound)?,
            replayed: found.status.is_terminal(),
        })
    }

    /// Resolves a suspended deposit for an operator: retries its issue, or refunds it.
    ///
    /// # Errors
    /// `PaymentUnpaid` unless payments has the deposit as received from the same user in the same
    /// amount. `Unavailable` for a refund during a break of CFA-RUB.
    pub async fn resolve_deposit(
        &self,
        meta: &RequestMeta,
        payment_id: &str,
        refund: bool,
    ) -> Result<OperationResult, Error> {
        let _key = self.lock_key(meta, RESOLVE).await;
        if let Some(refunded) = self.stored_answer(meta, RESOLVE).await? {
            let operation = self.repo.operation(&refunded).await?;
            return Ok(OperationResult {
                operation: operation.ok_or(Refusal::OperationNotFound)?,
                replayed: true,
            });
        }
        let deposit = self
            .repo
            .suspended_deposit(payment_id)
            .await?
            .ok_or(Refusal::DepositNotFound)?;
        if !refund {
            return self.retry_deposit(meta, &deposit).await;
        }
        // The lock excludes another operator, an issue for the same deposit, and the event of a
        // failed refund.
        let _lock = self.deposits.lock(payment_id).await;
        let undecided = self.repo.suspended_deposit(payment_id).await?;
        let deposit = undecided
            .filter(|deposit| !deposit.resolved)
            .ok_or(Refusal::DepositResolved)?;
        let mut operation = self
            .repo
            .operation(&deposit.operation_id)
            .await?
            .ok_or(Refusal::OperationNotFound)?;
        self.pay_refund(meta, &deposit).await?;
        let before = operation.status.as_str();
        let now_us = self.now_us();
        if operation.status == Status::Rejected {
            operation.set_status(Status::Refunded, now_us);
        }
        let mut tx = self.repo.begin().await?;
        self.repo.save_operation_in_tx(&mut tx, &operation).await?;
        self.repo.resolve_deposit_in_tx(&mut tx, payment_id).await?;
        let record = publish::audit(
            "deposit.refunded",
            &operation.operation_id,
            &meta.actor,
            before,
            operation.status.as_str(),
            &deposit.reason,
            &meta.correlation_id,
            now_us,
        );
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        let id = &operation.operation_id;
        self.store_call_in_tx(&mut tx, meta, RESOLVE, id).await?;
        tx.commit().await?;
        Ok(OperationResult {
            operation,
            replayed: false,
        })
    }

    /// Retries the issue of a suspended deposit.
    async fn retry_deposit(
        &self,
        meta: &RequestMeta,
        deposit: &SuspendedDeposit,
    ) -> Result<OperationResult, Error> {
        let (user_id, payment_id) = (&deposit.user_id, &deposit.payment_id);
        let retry = RequestMeta {
            idempotency_key: format!("retry:{payment_id}:{}", meta.idempotency_key),
            ..meta.clone()
        };
        let key = &retry.idempotency_key;
        let known = self.repo.operation_by_key(Flow::IssueRub, user_id, key);
        if deposit.resolved && known.await?.is_none() {
            return Err(Refusal::DepositResolved.into());
        }
        let amount = Decimal::from_minor(deposit.amount_minor, CFA_RUB_DECIMALS);
        let issued = self.issue_rub(&retry, user_id, amount, payment_id, None);
        issued.await
    }

    /// Refunds a suspended deposit through payments. If an earlier call has paid the refund and its
    /// response was lost, only checks that the payment is REFUNDED.
    async fn pay_refund(
        &self,
        meta: &RequestMeta,
        deposit: &SuspendedDeposit,
    ) -> Result<(), Error> {
        let (correlation_id, user_id) = (&meta.correlation_id, &deposit.user_id);
        let refund = self.latest_refund(correlation_id, &deposit.payment_id);
        let (payout_id, state) = refund.await?;
        if state == Some(PaymentStatus::Success) {
            return self
                .require_payment_status(PaymentStatus::Refunded, meta, deposit)
                .await;
        }
        self.require_payment_status(PaymentStatus::Success, meta, deposit)
            .await?;
        if self.is_money_broken() {
            // The deposit stays suspended; the approval repeats the call.
            return Err(Error::Unavailable(
                "Release of payouts during a break of CFA-RUB",
            ));
        }
        let (peers, amount) = (&self.peers, Minor(deposit.amount_minor));
        let account = peers.profile(correlation_id, user_id).await?.bank_account;
        peers
            .initiate_payout(correlation_id, &payout_id, user_id, amount, &account)
            .await?;
        let context = caused_by(correlation_id);
        let released = peers.payments.release_payout(&context, &payout_id);
        Ok(released.await?)
    }

    /// Refuses unless payments has the deposit in this status.
    async fn require_payment_status(
        &self,
        status: PaymentStatus,
        meta: &RequestMeta,
        deposit: &SuspendedDeposit,
    ) -> Result<(), Error> {
        let context = caused_by(&meta.correlation_id);
        let (user_id, amount) = (&deposit.user_id, Minor(deposit.amount_minor));
        let payments = &self.peers.payments;
        let found = payments.deposit(&context, &deposit.payment_id, user_id, amount);
        match found.await? == Some(status) {
            true => Ok(()),
            false => Err(Refusal::PaymentUnpaid.into()),
        }
    }

    /// The id and status of the deposit's latest refund payout. `None`: not recorded yet. A failed
    /// payout is final, so each attempt has its own id.
    async fn latest_refund(
        &self,
        correlation_id: &str,
        payment_id: &str,
    ) -> Result<(String, Option<PaymentStatus>), Error> {
        let mut payout_id = format!("{REFUND_PREFIX}{payment_id}");
        let mut attempts = 1u32;
        loop {
            let context = caused_by(correlation_id);
            let state = self.peers.payments.payout(&context, &payout_id).await?;
            if !matches!(state, Some(PaymentStatus::Failed | PaymentStatus::Expired)) {
                return Ok((payout_id, state));
            }
            attempts += 1;
            payout_id = format!("{REFUND_PREFIX}{payment_id}:{attempts}");
        }
    }

    /// Handles the event of a payout that may be a deposit's refund. If the bank refused it, the
    /// deposit is suspended again for an operator (T24). The operation stays REFUNDED. A late event
    /// after another attempt changes nothing.
    pub async fn on_refund_payout(
        &self,
        correlation_id: &str,
        payout_id: &str,
    ) -> Result<(), Error> {
        let Some(rest) = payout_id.strip_prefix(REFUND_PREFIX) else {
            return Ok(());
        };
        let payment_id = rest
            .split_once(':')
            .map_or(rest, |(payment_id, _)| payment_id);
        let _lock = self.deposits.lock(payment_id).await;
        let Some(deposit) = self.repo.suspended_deposit(payment_id).await? else {
            return Ok(());
        };
        let (_, open_refund) = self.latest_refund(correlation_id, payment_id).await?;
        let issued = self
            .repo
            .operation_by_reference(OperationType::Issuance, payment_id)
            .await?
            .is_some_and(|operation| operation.operation_id != deposit.operation_id);
        if !deposit.resolved || open_refund.is_some() || issued {
            return Ok(());
        }
        tracing::error!(
            payment_id,
            payout_id,
            severity = "critical",
            "refund of a deposit failed: resolve the deposit again"
        );
        let record = publish::audit(
            "deposit.refund_failed",
            &deposit.operation_id,
            "",
            "resolved",
            "suspended",
            payout_id,
            correlation_id,
            self.now_us(),
        );
        let mut tx = self.repo.begin().await?;
        self.repo.reopen_deposit_in_tx(&mut tx, payment_id).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        Ok(tx.commit().await?)
    }
}

/// Returns the stored operation with the same key or reference as `operation`.
///
/// # Errors
/// `ReferenceTaken` if it belongs to another user or flow: the caller must not see it.
pub(super) fn existing(stored: Operation, operation: &Operation) -> Result<OperationResult, Error> {
    if stored.user_id != operation.user_id || stored.flow != operation.flow {
        tracing::error!(
            operation_id = stored.operation_id,
            user_id = operation.user_id,
            "external reference belongs to another operation"
        );
        return Err(Refusal::ReferenceTaken.into());
    }
    Ok(replayed(stored, |stored| same_terms(stored, operation)))
}

/// Whether two operations of one flow have the same request. The payment is compared only for an
/// issue, because that of a redemption depends on the time.
pub(super) fn same_terms(stored: &Operation, asked: &Operation) -> bool {
    let terms = |of: &Operation| {
        (
            of.units_minor,
            of.instrument_id.clone(),
            of.external_ref.clone(),
            of.from_user_id.clone(),
            of.to_user_id.clone(),
            of.bookbuilding_id.clone(),
        )
    };
    let is_paid = asked.flow == Flow::IssueInvestment;
    let paid = |of: &Operation| is_paid.then_some(of.payment_minor);
    terms(stored) == terms(asked) && paid(stored) == paid(asked)
}

/// Returns the stored operation of a used key. Logs and counts a request with other content (D50).
pub(super) fn replayed(
    operation: Operation,
    is_same: impl FnOnce(&Operation) -> bool,
) -> OperationResult {
    if !is_same(&operation) {
        rpc::context::note_difference(operation.flow.as_str(), &operation.idempotency_key);
    }
    OperationResult {
        operation,
        replayed: true,
    }
}
