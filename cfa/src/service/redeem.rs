//! RedeemCfaRub (specification 4.1 rules 4, 5, 7; T06 to T10) and its finalization;
//! RedeemInvestmentCfa (D09).

use service_clients::{OperationType, PaymentStatus, caused_by};
use types::Decimal;

use super::issue::{existing, replayed, same_terms};
use super::{OperationResult, RequestMeta, Service, units};
use crate::error::{Error, Refusal};
use crate::model::{
    CFA_RUB, CFA_RUB_DECIMALS, Flow, Instrument, InstrumentStatus, Operation, RedemptionReason,
    Rejection, Status, user_rejection,
};
use crate::plan;
use crate::repo::Inserted;
use crate::saga::Payout;

/// Audit actions of a redemption.
const REQUESTED: &str = "redemption.requested";
const REJECTED: &str = "redemption.rejected";

/// A request to redeem units of one holder.
#[derive(Debug, Clone)]
pub struct RedeemInvestment {
    pub instrument_id: String,
    pub holder_id: String,
    pub amount: Decimal,
    /// The caller's reference; may be empty.
    pub redemption_id: String,
    pub reason: RedemptionReason,
}

impl Service {
    /// Burns CFA-RUB and pays the user. A refusal by limit or sanctions is stored as a REJECTED
    /// operation.
    ///
    /// # Errors
    /// `KycTooLowForWithdrawal` before all other checks; the ledger's refusal to hold the money.
    pub async fn redeem_rub(
        &self,
        meta: &RequestMeta,
        user_id: &str,
        amount: Decimal,
        payout_id: &str,
    ) -> Result<OperationResult, Error> {
        let units_minor = units("amount", amount, CFA_RUB_DECIMALS)?;
        if let Some(operation) = self
            .repo
            .operation_by_key(Flow::RedeemRub, user_id, &meta.idempotency_key)
            .await?
        {
            return Ok(replayed(operation, |stored| {
                stored.units_minor == units_minor && stored.external_ref == payout_id
            }));
        }
        let profile = self.peers.profile(&meta.correlation_id, user_id).await?;
        if !profile.is_standard {
            return Err(Refusal::KycTooLowForWithdrawal.into());
        }
        let mut operation = Operation::new(
            Flow::RedeemRub,
            user_id,
            &meta.idempotency_key,
            &meta.correlation_id,
            self.now_us(),
        );
        operation.amount = amount;
        operation.units_minor = units_minor;
        operation.currency_code = "RUB".into();
        operation.instrument_id = CFA_RUB.into();
        operation.external_ref = payout_id.to_owned();
        operation.from_user_id = user_id.to_owned();
        let mut refusal = self.peers.check_limits(&operation).await?;
        if refusal.is_none() {
            let context = caused_by(&meta.correlation_id);
            let identity = &self.peers.identity;
            let hit = identity.check_sanctions(&context, user_id, payout_id);
            refusal = hit.await?.map(|reason| (Rejection::SanctionsHit, reason));
        }
        if refusal.is_some() {
            operation.set_status(Status::Rejected, self.now_us());
            operation.rejection = refusal;
        }
        let mut tx = self.repo.begin().await?;
        if let Inserted::Exists(stored) = self
            .repo
            .insert_operation_in_tx(&mut tx, &operation)
            .await?
        {
            return existing(*stored, &operation);
        }
        if operation.status == Status::Rejected {
            let rejected = self.reject_in_tx(tx, operation, REJECTED, &meta.actor);
            let rejected = rejected.await?;
            count_request(&rejected.operation);
            return Ok(rejected);
        }
        let started = self.start_in_tx(tx, operation, REQUESTED, &meta.actor);
        let started = started.await?;
        count_request(&started.operation);
        Ok(started)
    }

    /// FinalizeRedemption (D42), also for PayoutConfirmed and PayoutFailed. An open payout changes
    /// nothing (T08). A repeat is any call after the operation's end.
    ///
    /// # Errors
    /// `OperationNotFound`; `PayoutFailed` if the redemption has ended as FAILED.
    pub async fn finalize_redemption(&self, payout_id: &str) -> Result<OperationResult, Error> {
        let found = self
            .repo
            .operation_by_reference(OperationType::Redemption, payout_id)
            .await?
            .ok_or(Refusal::OperationNotFound)?;
        if found.flow != Flow::RedeemRub {
            return Err(Refusal::OperationNotFound.into());
        }
        if !found.status.is_terminal() {
            let context = caused_by(&found.correlation_id);
            let state = self.peers.payments.payout(&context, payout_id).await?;
            let _lock = self.object_locks.lock(&found.operation_id).await;
            let mut operation = self
                .repo
                .operation(&found.operation_id)
                .await?
                .ok_or(Refusal::OperationNotFound)?;
            let outcome = match state {
                Some(PaymentStatus::Success) => Some(Payout::Succeeded),
                Some(PaymentStatus::Failed | PaymentStatus::Expired) => Some(Payout::Failed),
                _ => None,
            };
            if let (Some(outcome), Payout::Started | Payout::Released) =
                (outcome, operation.progress.payout)
            {
                operation.progress.payout = outcome;
                operation.updated_at_us = self.now_us();
                self.repo.save_operation(&operation).await?;
            }
        }
        let operation = self.drive(&found.operation_id).await?;
        if operation.status == Status::Failed {
            return Err(Refusal::PayoutFailed.into());
        }
        Ok(OperationResult {
            operation,
            replayed: found.status.is_terminal(),
        })
    }

    /// Burns a holder's units. The issuer pays the nominal (buyback, with an offer of the holder),
    /// or the nominal and the coupon of the day of maturity (maturity, by the terms).
    ///
    /// # Errors
    /// Nothing is stored: `InstrumentNotActive`, `UnitsNotMatured`, `NominalMissing`,
    /// `NothingToPay`, `UserNotFound`, `ReferenceTaken`, an invalid field; `NotOffered` without an
    /// active offer of the same units for at most the payment; the ledger's refusal, which leaves
    /// the offer active.
    pub async fn redeem_investment(
        &self,
        meta: &RequestMeta,
        request: RedeemInvestment,
    ) -> Result<OperationResult, Error> {
        let instrument = self.require_instrument(&request.instrument_id).await?;
        if instrument.instrument_id == CFA_RUB {
            return Err(
                Refusal::field("instrument_id", "CFA-RUB is redeemed with RedeemCfaRub").into(),
            );
        }
        let units_minor = units("amount.amount", request.amount, instrument.decimals)?;
        self.require_not_quarantined(&instrument.contract_address)
            .await?;
        let (holder_id, key) = (&request.holder_id, &meta.idempotency_key);
        let mut operation = Operation::new(
            Flow::RedeemInvestment,
            holder_id,
            key,
            &meta.correlation_id,
            self.now_us(),
        );
        operation.amount = request.amount;
        operation.units_minor = units_minor;
        operation.currency_code = instrument.instrument_id.clone();
        operation.instrument_id = instrument.instrument_id.clone();
        operation.external_ref = request.redemption_id;
        operation.from_user_id = holder_id.clone();
        let known = self
            .repo
            .operation_by_key(operation.flow, holder_id, key)
            .await?;
        if let Some(known) = known {
            return Ok(replayed(known, |stored| same_terms(stored, &operation)));
        }
        if instrument.status == InstrumentStatus::Draft {
            return Err(Refusal::InstrumentNotActive.into());
        }
        if *holder_id == instrument.issuer_id {
            return Err(Refusal::field("holder_id", "must be another user than the issuer").into());
        }
        let matured_us = maturity_us(&instrument, request.reason, self.clock.now_us())?;
        operation.payment_minor = payment_minor(&instrument, units_minor, matured_us)?;
        let by_terms = matured_us.is_some();
        operation.rejection = self.holder_refusal(&operation, by_terms).await?;
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
            return existing(*stored, &operation);
        }
        if !by_terms {
            self.use_offer_in_tx(&mut tx, &mut operation, &meta.actor)
                .await?;
        }
        if operation.status == Status::Rejected {
            return self
                .reject_in_tx(tx, operation, REJECTED, &meta.actor)
                .await;
        }
        self.start_in_tx(tx, operation, REQUESTED, &meta.actor)
            .await
    }

    /// Asks identity about the holder: sanctions lists and, unless the terms redeem the units,
    /// whether the holder may give units. `Some`: rejected.
    async fn holder_refusal(
        &self,
        operation: &Operation,
        by_terms: bool,
    ) -> Result<Option<(Rejection, String)>, Error> {
        let (correlation, holder) = (&operation.correlation_id, &operation.user_id);
        let refusal = self.peers.user_refusal(correlation, holder).await?;
        if let Some(refusal) = refusal.filter(|_| !by_terms) {
            return Ok(Some(user_rejection(&refusal)));
        }
        let (context, identity) = (caused_by(correlation), &self.peers.identity);
        let hit = identity.check_sanctions(&context, holder, &operation.external_ref);
        Ok(hit.await?.map(|reason| (Rejection::SanctionsHit, reason)))
    }
}

/// The time of maturity, if the terms redeem the units. `None`: the issuer buys them back.
///
/// # Errors
/// `UnitsNotMatured`: until maturity the terms redeem nothing (specification 1.5).
fn maturity_us(
    instrument: &Instrument,
    reason: RedemptionReason,
    now_us: i64,
) -> Result<Option<i64>, Refusal> {
    if reason != RedemptionReason::Maturity {
        return Ok(None);
    }
    let matured_us = instrument.matures_at_us.filter(|at_us| *at_us <= now_us);
    matured_us.map(Some).ok_or(Refusal::UnitsNotMatured)
}

/// The holder's payment, in kopecks. Contains no coupon that is paid by the calendar: the burn may
/// be final only after the end of the coupon's day, whose holders get it.
fn payment_minor(
    instrument: &Instrument,
    units_minor: i64,
    matured_us: Option<i64>,
) -> Result<i64, Refusal> {
    let nominal = instrument.nominal.ok_or(Refusal::NominalMissing)?;
    let worth = match matured_us {
        // As the redemption of the whole issue: the coupon of the day of maturity.
        Some(at_us) => {
            plan::worth_per_unit(nominal, &instrument.coupons, plan::end_of_day_us(at_us))
        }
        None => Ok(nominal),
    };
    let payment =
        worth.and_then(|worth| plan::payment_minor(units_minor, instrument.decimals, worth));
    match payment {
        Ok(0) => Err(Refusal::NothingToPay),
        Ok(payment_minor) => Ok(payment_minor),
        Err(_) => Err(Refusal::field("amount.amount", "is too large")),
    }
}

/// Counts a request in the metrics by its status (T39).
fn count_request(operation: &Operation) {
    let (kind, status) = (operation.flow.as_str(), operation.status.as_str());
    metrics::counter!("redemptions_total", "type" => kind, "status" => status).increment(1);
}
