//! Enforcement (259-FZ): arrest, levy, inheritance, lost access. Freezes of a holder's units, and
//! forced transfers, each ordered by a document.
//!
//! A freeze of a number of units is a hold in the ledger and a partial freeze in the contract. A
//! freeze of all units freezes the sub-account and the address, so it also covers later units, and
//! cancels the holder's open orders. The ledger freezes before the contract and releases after it:
//! what the ledger has available, the contract lets pass. A trade that was matched before and that
//! the contract refuses leaves its batch and is resolved as a case (`design.md` 4).
//!
//! The redemption of an issue ends its freezes (`proceeds`).
//!
//! A forced transfer takes available units, despite a freeze of the sub-account, or units of one
//! freeze. It takes no unit out of a hold of the holder. It is an operation of the flow
//! `ForceTransfer`, driven as the others.
//!
//! One person freezes, two persons lift a freeze or transfer (`design.md` 10).

use std::time::Duration;

use chain::contracts::id_hash;
use chain::{Action, Address, ReceiptStatus, TokenCode, Version};
use service_clients::caused_by;
use service_clients::ledger::NewHold;
use types::{Decimal, derived, subaccount};

use super::issue::{replayed, same_terms};
use super::workers::log_failure;
use super::{OperationResult, RequestMeta, Service, call_wait, units, unsigned};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    ActBasis, ActKind, ActStatus, CFA_RUB, EnforcementAct, Flow, Instrument, InstrumentStatus,
    Operation,
};
use crate::peers::{self, MARKET, SOURCE};
use crate::repo::{FreezeInsert, Inserted};

/// Names of the calls in logs and stored answers (D50).
const FREEZE: &str = "FreezeUnits";
const LIFT: &str = "LiftFreeze";
/// Limit of a holder's live freezes.
const FREEZES_MAX: i64 = 100;
/// Limit of freezes per sweep.
const SWEEP_MAX: i64 = 100;
const HEALTH_PART: &str = "enforcement";

/// Arguments of `freeze_units`.
#[derive(Debug, Clone)]
pub struct NewFreeze {
    pub instrument_id: String,
    pub holder_id: String,
    /// `None`: all units, also later ones.
    pub amount: Option<Decimal>,
    pub basis: ActBasis,
    pub document: String,
}

/// Arguments of `force_transfer`.
#[derive(Debug, Clone)]
pub struct NewForcedTransfer {
    pub instrument_id: String,
    pub from_user_id: String,
    pub to_user_id: String,
    pub amount: Decimal,
    pub basis: ActBasis,
    pub document: String,
    /// Empty: available units.
    pub freeze_id: String,
}

impl Service {
    /// Freezes a holder's units. True for a repeat. Until the chain answers, and for all units
    /// until the market has cancelled the holder's orders, the freeze is PENDING; the ledger has
    /// frozen the units already.
    ///
    /// # Errors
    /// `InstrumentNotActive`, `AlreadyFrozen`, `TooManyFreezes`, an invalid field; the ledger's
    /// refusal, for example `Insufficient balance` beyond the available units. Nothing is stored
    /// then.
    pub async fn freeze_units(
        &self,
        meta: &RequestMeta,
        new: NewFreeze,
    ) -> Result<(EnforcementAct, bool), Error> {
        let instrument = self.require_instrument(&new.instrument_id).await?;
        let units_minor = match new.amount {
            Some(amount) => units("amount.amount", amount, instrument.decimals)?,
            None => 0,
        };
        if let Some(known) = self.known_freeze(meta, &new, units_minor).await? {
            return Ok((self.step_best_effort(&known).await?, true));
        }
        self.enforceable(&new.instrument_id).await?;
        let act = freeze_act(meta, new.clone(), units_minor, self.now_us());
        match self.record_freeze(&act).await? {
            FreezeInsert::Stored => {}
            FreezeInsert::TooMany => return Err(Refusal::TooManyFreezes.into()),
            // Another call with this key may have stored it meanwhile.
            FreezeInsert::Frozen => {
                let known = self.known_freeze(meta, &new, units_minor).await?;
                let known = known.ok_or(Refusal::AlreadyFrozen)?;
                return Ok((self.step_best_effort(&known).await?, true));
            }
        }
        match self.freeze_first(&act.act_id).await {
            Err(error) if error.is_transient() => {
                tracing::warn!(act_id = act.act_id, %error, "freeze is left to the sweep");
            }
            frozen => frozen?,
        }
        Ok((self.step_best_effort(&act.act_id).await?, false))
    }

    async fn record_freeze(&self, act: &EnforcementAct) -> Result<FreezeInsert, Error> {
        let record = self.record(act, "freeze.requested", "", &act.actor);
        let mut tx = self.repo.begin().await?;
        let inserted = self.repo.insert_freeze_in_tx(&mut tx, act, FREEZES_MAX);
        let inserted = inserted.await?;
        if inserted == FreezeInsert::Stored {
            self.repo.publish_in_tx(&mut tx, &[record]).await?;
            tx.commit().await?;
            failpoint::reach(failpoint::FREEZE_RECORDED);
        }
        Ok(inserted)
    }

    /// The freeze of an earlier call with this key (D50). Logs and counts other content.
    async fn known_freeze(
        &self,
        meta: &RequestMeta,
        new: &NewFreeze,
        units_minor: i64,
    ) -> Result<Option<String>, Error> {
        let key = &meta.idempotency_key;
        let Some(known) = self.repo.freeze_by_key(&meta.actor, key).await? else {
            return Ok(None);
        };
        let is_same = known.units_minor == units_minor
            && known.instrument_id == new.instrument_id
            && known.holder_id == new.holder_id
            && (known.basis, &known.document) == (new.basis, &new.document);
        if !is_same {
            rpc::context::note_difference(FREEZE, key);
        }
        Ok(Some(known.act_id))
    }

    /// Freezes in the ledger, unless it has frozen already.
    pub(super) async fn freeze_first(&self, act_id: &str) -> Result<(), Error> {
        let _lock = self.object_locks.lock(act_id).await;
        let mut act = self.require_freeze(act_id).await?;
        match act.held || act.status != ActStatus::Pending {
            true => Ok(()),
            false => self.hold(&mut act).await,
        }
    }

    /// Freezes in the ledger. The caller holds the act's lock. Deletes the act of a call that the
    /// ledger refuses; units of a failed transfer stay ordered to be frozen.
    async fn hold(&self, act: &mut EnforcementAct) -> Result<(), Error> {
        let error = match self.freeze_in_ledger(act).await {
            Ok(()) => {
                failpoint::reach(failpoint::FREEZE_HELD);
                act.held = true;
                return self.save_act(act).await;
            }
            Err(error) if error.is_transient() || act.actor == SOURCE => return Err(error),
            Err(error) => error,
        };
        let before = act.status.as_str();
        act.status = ActStatus::Failed;
        act.updated_at_us = self.now_us();
        let record = self.record(act, "freeze.refused", before, SOURCE);
        let mut tx = self.repo.begin().await?;
        self.repo.delete_act_in_tx(&mut tx, &act.act_id).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        tx.commit().await?;
        Err(match error.has_reason("SUB_ACCOUNT_NOT_FOUND") {
            true => Refusal::InsufficientBalance.into(),
            false => error,
        })
    }

    /// Like `hold`. False for the payment of redeemed units on a sub-account that is frozen as a
    /// whole, as that of a blocked user: its money is held once the sub-account is active.
    async fn hold_or_wait(&self, act: &mut EnforcementAct) -> Result<bool, Error> {
        match self.hold(act).await {
            Err(error) if act.actor == SOURCE && error.has_reason("SUB_ACCOUNT_FROZEN") => {
                // Behind the others in the next sweep.
                self.save_act(act).await?;
                Ok(false)
            }
            held => held.map(|()| true),
        }
    }

    /// Lifts a freeze: what is left of its units, or all. True for a repeat.
    ///
    /// # Errors
    /// `ActNotFound`; `OperationState` for an act that is no live freeze, that waits for the chain,
    /// or whose units a forced transfer is taking.
    pub async fn lift_freeze(
        &self,
        meta: &RequestMeta,
        act_id: &str,
        document: &str,
    ) -> Result<(EnforcementAct, bool), Error> {
        let lock = self.lock_call(meta, LIFT, act_id).await;
        if let Some(known) = self.stored_answer(meta, LIFT).await? {
            return Ok((self.require_freeze(&known).await?, true));
        }
        let mut act = self.require_freeze(act_id).await?;
        // A freeze that waits for the chain might become active after its lifting.
        let is_stuck = !act.held || self.is_exhausted(&act);
        let is_live = match act.status {
            // Only the market has not answered yet if the contract has frozen.
            ActStatus::Pending => is_stuck || act.frozen,
            status => status == ActStatus::Active,
        };
        if !is_live || self.repo.is_freeze_in_use(act_id).await? {
            return Err(Refusal::OperationState.into());
        }
        let before = act.status.as_str();
        act.status = ActStatus::Lifting;
        act.lift_document = document.to_owned();
        act.attempts = 0;
        act.updated_at_us = self.now_us();
        let record = self.record(&act, "freeze.lifting", before, &meta.actor);
        let mut tx = self.repo.begin().await?;
        self.repo.save_act_in_tx(&mut tx, &act).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, LIFT, act_id).await?;
        tx.commit().await?;
        failpoint::reach(failpoint::LIFT_RECORDED);
        drop(lock);
        Ok((self.step_best_effort(act_id).await?, false))
    }

    /// Transfers a holder's units by the order of a document, once per key.
    ///
    /// # Errors
    /// `InstrumentNotActive`; `UserNotFound`, `UserBlocked`, `KycTooLow` or a sanctions hit of the
    /// receiver; `ActNotFound` or `Insufficient balance` of the freeze; the ledger's refusal, for
    /// example `Insufficient balance` beyond the available units. Nothing is stored then.
    pub async fn force_transfer(
        &self,
        meta: &RequestMeta,
        new: NewForcedTransfer,
    ) -> Result<OperationResult, Error> {
        let instrument = self.require_instrument(&new.instrument_id).await?;
        let mut operation = Operation::new(
            Flow::ForceTransfer,
            &new.from_user_id,
            &meta.idempotency_key,
            &meta.correlation_id,
            self.now_us(),
        );
        operation.amount = new.amount;
        operation.units_minor = units("amount.amount", new.amount, instrument.decimals)?;
        operation.currency_code = instrument.instrument_id.clone();
        operation.instrument_id = instrument.instrument_id.clone();
        operation.from_user_id = new.from_user_id.clone();
        operation.to_user_id = new.to_user_id.clone();
        let (from, key) = (&operation.user_id, &meta.idempotency_key);
        let known = self
            .repo
            .operation_by_key(Flow::ForceTransfer, from, key)
            .await?;
        if let Some(known) = known {
            return self.repeated_transfer(known, &operation, &new).await;
        }
        self.enforceable(&new.instrument_id).await?;
        if new.from_user_id == new.to_user_id {
            let why = "must be another user than from_user_id";
            return Err(Refusal::field("to_user_id", why).into());
        }
        self.check_receiver(&operation).await?;
        let act = transfer_act(&operation, &new, &meta.actor);
        if !act.freeze_id.is_empty() {
            operation.hold_id = Some(derived::enforcement_hold(&act.freeze_id).to_string());
        }
        if let Some(stored) = self.record_transfer(&act, &operation).await? {
            return self.repeated_transfer(stored, &operation, &new).await;
        }
        Ok(OperationResult {
            operation: self.drive_best_effort(operation).await?,
            replayed: false,
        })
    }

    /// The stored operation of a used key. Logs and counts a request with other content (D50).
    async fn repeated_transfer(
        &self,
        stored: Operation,
        asked: &Operation,
        new: &NewForcedTransfer,
    ) -> Result<OperationResult, Error> {
        let act = self.repo.act(&stored.operation_id).await?;
        let is_same_act = act.is_none_or(|act| {
            (act.basis, &act.document, &act.freeze_id) == (new.basis, &new.document, &new.freeze_id)
        });
        Ok(replayed(stored, |stored| {
            is_same_act && same_terms(stored, asked)
        }))
    }

    /// Stores a forced transfer with its act. Returns the stored operation if the key is used.
    async fn record_transfer(
        &self,
        act: &EnforcementAct,
        operation: &Operation,
    ) -> Result<Option<Operation>, Error> {
        // Excludes a lift of the freeze between the check and the insert.
        let _lock = match act.freeze_id.is_empty() {
            true => None,
            false => Some(self.object_locks.lock(&act.freeze_id).await),
        };
        if !act.freeze_id.is_empty() {
            self.require_freeze(&act.freeze_id).await?;
        }
        let record = self.record(act, "forced_transfer.requested", "", &act.actor);
        let mut tx = self.repo.begin().await?;
        self.repo
            .require_movable_in_tx(&mut tx, &operation.instrument_id)
            .await?;
        if let Inserted::Exists(stored) =
            self.repo.insert_operation_in_tx(&mut tx, operation).await?
        {
            return Ok(Some(*stored));
        }
        self.repo.insert_act_in_tx(&mut tx, act).await?;
        let takes_frozen = !act.freeze_id.is_empty();
        if takes_frozen && !self.repo.take_frozen_in_tx(&mut tx, act).await? {
            return Err(Refusal::InsufficientBalance.into());
        }
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        tx.commit().await?;
        Ok(None)
    }

    /// Refuses a receiver that may not hold units (R019). The holder's own state does not matter.
    async fn check_receiver(&self, operation: &Operation) -> Result<(), Error> {
        let (correlation_id, to) = (&operation.correlation_id, &operation.to_user_id);
        if let Some(refusal) = self.peers.user_refusal(correlation_id, to).await? {
            return Err(refusal.into());
        }
        let (context, identity) = (caused_by(correlation_id), &self.peers.identity);
        let hit = identity.check_sanctions(&context, to, &operation.operation_id);
        match hit.await? {
            Some(reason) => Err(Refusal::ReceiverSanctioned(reason).into()),
            None => Ok(()),
        }
    }

    /// Ends the act of a forced transfer with its operation, and returns its event. The units of a
    /// failed one are frozen again by a new act: its reversal has made them available.
    pub(super) async fn end_transfer_act_in_tx(
        &self,
        tx: &mut events::Tx,
        operation: &Operation,
        has_failed: bool,
    ) -> Result<Option<events::Event>, Error> {
        let Some(mut act) = self.repo.act(&operation.operation_id).await? else {
            return Ok(None);
        };
        act.status = match has_failed {
            true => ActStatus::Failed,
            false => ActStatus::Done,
        };
        act.tx_hash = operation.tx_hash.clone().unwrap_or_default();
        act.updated_at_us = operation.updated_at_us;
        self.repo.save_act_in_tx(tx, &act).await?;
        if has_failed && !act.freeze_id.is_empty() {
            let sent = self.chain.submission(&unfreeze_key(operation)).await?;
            let again = EnforcementAct {
                act_id: uuid::Uuid::now_v7().to_string(),
                kind: ActKind::Freeze,
                to_user_id: String::new(),
                left_minor: act.units_minor,
                freeze_id: String::new(),
                status: ActStatus::Pending,
                // The contract has not unfrozen them.
                frozen: sent.is_none(),
                idempotency_key: again_key(&act.act_id),
                actor: SOURCE.to_owned(),
                tx_hash: String::new(),
                created_at_us: act.updated_at_us,
                ..act.clone()
            };
            let record = self.record(&again, "freeze.requested", "", SOURCE);
            self.repo.insert_act_in_tx(tx, &again).await?;
            self.repo.save_act_in_tx(tx, &again).await?;
            self.repo.publish_in_tx(tx, &[record]).await?;
        }
        let instrument = self.require_instrument(&act.instrument_id).await?;
        Ok(Some(publish::enforcement(&act, instrument.decimals)))
    }

    /// Freezes the units of a failed forced transfer in the ledger again. Called at once, because
    /// they are available until then; the sweep does the rest.
    pub(super) async fn freeze_again(&self, operation_id: &str) -> Result<(), Error> {
        let key = again_key(operation_id);
        match self.repo.freeze_by_key(SOURCE, &key).await? {
            Some(again) => self.freeze_first(&again.act_id).await,
            None => Ok(()),
        }
    }

    /// Deletes the act of a forced transfer that the ledger refused.
    pub(super) async fn delete_transfer_act_in_tx(
        &self,
        tx: &mut events::Tx,
        operation: &Operation,
    ) -> Result<(), Error> {
        let Some(mut act) = self.repo.act(&operation.operation_id).await? else {
            return Ok(());
        };
        act.updated_at_us = self.now_us();
        if !act.freeze_id.is_empty() {
            self.repo.return_frozen_in_tx(tx, &act).await?;
        }
        let record = self.record(
            &act,
            "forced_transfer.refused",
            act.status.as_str(),
            &act.actor,
        );
        self.repo.publish_in_tx(tx, &[record]).await?;
        self.repo.delete_act_in_tx(tx, &act.act_id).await
    }

    /// The chain action of a forced transfer. Before it, the units of a freeze are unfrozen in the
    /// contract: transactions have an order, so the transfer need not wait for that one.
    pub(super) async fn forced_transfer_action(
        &self,
        operation: &Operation,
        instrument: &Instrument,
    ) -> Result<Action, Error> {
        let act = self.repo.act(&operation.operation_id).await?;
        let act = act.ok_or_else(|| {
            Error::Damaged(format!("operation {} has no act", operation.operation_id))
        })?;
        let token = self.token(instrument)?;
        let from = Address::of_user(&operation.from_user_id);
        let units = unsigned(operation.units_minor);
        if operation.hold_id.is_some() {
            let unfreeze = Action::UnfreezeUnits {
                token,
                account: from,
                units,
            };
            let key = unfreeze_key(operation);
            self.chain.submit(&key, &unfreeze.call()).await?;
            failpoint::reach(failpoint::UNFREEZE_SUBMITTED);
        }
        let to = Address::of_user(&operation.to_user_id);
        Ok(match self.chain.token_code(&token).await? {
            TokenCode::Token(Version::V2) => Action::ForcedTransfer {
                token,
                id: operation.operation_id.clone(),
                from,
                to,
                units,
                reason: id_hash(&act.document),
            },
            // A token of version 1 has no known code. It knows neither ids nor reasons.
            TokenCode::None | TokenCode::Unknown | TokenCode::Token(Version::V1) => {
                Action::ForcedTransferV1 {
                    token,
                    from,
                    to,
                    units,
                }
            }
        })
    }

    /// Continues the freezes that are not complete, and reports those that the chain refuses.
    pub(super) async fn sweep_freezes(&self, before_us: i64) -> Result<(), Error> {
        let (mut failing, mut is_market_unavailable) = (None, false);
        for act in self.repo.open_freezes(before_us, SWEEP_MAX).await? {
            // The next sweep reads the receipts of the transactions that this one sends.
            let stepped = self.step_freeze(&act.act_id, Duration::ZERO, !is_market_unavailable);
            let stepped = stepped.await;
            // One timeout of the market per sweep is enough.
            is_market_unavailable |= matches!(stepped, Err(Error::Unavailable(of)) if of == MARKET);
            if act.attempts > 0 || stepped.is_err() {
                failing = Some(format!("freeze {} is not complete", act.act_id));
            }
            log_failure("freeze", &act.act_id, stepped);
        }
        self.health.set(HEALTH_PART, failing.as_deref());
        Ok(())
    }

    /// Executes the steps of a freeze, or leaves them to the sweep. Returns the stored act, or the
    /// refusal of the ledger that has deleted it.
    async fn step_best_effort(&self, act_id: &str) -> Result<EnforcementAct, Error> {
        let stepped = self.step_freeze(act_id, call_wait(), true).await;
        match (self.repo.act(act_id).await?, stepped) {
            (Some(act), stepped) => {
                log_failure("freeze", act_id, stepped);
                Ok(act)
            }
            (None, Err(refused)) => Err(refused),
            (None, Ok(())) => Err(Refusal::ActNotFound.into()),
        }
    }

    /// Executes the steps of a freeze or of its lifting, until it has waited `wait` for the chain
    /// or ends. Without `asks_market` a freeze whose orders are to be cancelled does not end.
    async fn step_freeze(
        &self,
        act_id: &str,
        wait: Duration,
        asks_market: bool,
    ) -> Result<(), Error> {
        let _lock = self.object_locks.lock(act_id).await;
        let mut act = self.require_freeze(act_id).await?;
        match act.status {
            ActStatus::Pending => {
                if !act.held && !self.hold_or_wait(&mut act).await? {
                    return Ok(());
                }
                let whole = act.is_whole().then(|| act.clone());
                // Neither waits for the other: the market may be unavailable, or the chain.
                let (cancelled, frozen) = tokio::join!(
                    self.cancel_orders(whole, asks_market),
                    self.freeze_on_chain(&mut act, true, wait)
                );
                if !frozen? {
                    return cancelled;
                }
                cancelled?;
                self.end_step(&mut act, ActStatus::Active).await
            }
            ActStatus::Lifting => {
                if !self.freeze_on_chain(&mut act, false, wait).await? {
                    return Ok(());
                }
                // A freeze whose call was lost may have reached the ledger.
                self.release_in_ledger(&act).await?;
                failpoint::reach(failpoint::FREEZE_RELEASED);
                act.held = false;
                self.end_step(&mut act, ActStatus::Lifted).await
            }
            _ => Ok(()),
        }
    }

    async fn save_act(&self, act: &mut EnforcementAct) -> Result<(), Error> {
        act.updated_at_us = self.now_us();
        let mut tx = self.repo.begin().await?;
        self.repo.save_act_in_tx(&mut tx, act).await?;
        Ok(tx.commit().await?)
    }

    /// Stores the new status with its event and audit record.
    async fn end_step(&self, act: &mut EnforcementAct, status: ActStatus) -> Result<(), Error> {
        let before = act.status.as_str();
        act.status = status;
        act.attempts = 0;
        act.updated_at_us = self.now_us();
        let instrument = self.require_instrument(&act.instrument_id).await?;
        let action = format!("freeze.{}", status.as_str().to_lowercase());
        let events = [
            publish::enforcement(act, instrument.decimals),
            self.record(act, &action, before, SOURCE),
        ];
        let mut tx = self.repo.begin().await?;
        self.repo.save_act_in_tx(&mut tx, act).await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        Ok(tx.commit().await?)
    }

    /// Holds the units, or freezes the sub-account. A repeat changes nothing.
    async fn freeze_in_ledger(&self, act: &EnforcementAct) -> Result<(), Error> {
        let context = caused_by(&act.correlation_id);
        let account = subaccount::of_user(&act.holder_id, &act.instrument_id);
        let ledger = &self.peers.ledger;
        let reason = format!("{}: {}", act.basis, act.document);
        if act.is_whole() {
            let key = format!("{}:freeze", act.act_id);
            let frozen = ledger.set_frozen(&context, &key, &account, true, &reason);
            return Ok(frozen.await?);
        }
        let instrument = self.require_instrument(&act.instrument_id).await?;
        let new = NewHold {
            hold_id: derived::enforcement_hold(&act.act_id),
            subaccount_id: &account,
            amount: peers::units(&instrument, act.units_minor)?,
            reason: &reason,
            owner: SOURCE,
            destination: None,
            expires_at_us: None,
        };
        ledger.create_hold(&context, new).await?;
        Ok(())
    }

    /// Releases what is left of the hold, or makes the sub-account active.
    async fn release_in_ledger(&self, act: &EnforcementAct) -> Result<(), Error> {
        let context = caused_by(&act.correlation_id);
        let ledger = &self.peers.ledger;
        if act.is_whole() {
            let key = format!("{}:lift", act.act_id);
            let account = subaccount::of_user(&act.holder_id, &act.instrument_id);
            let lifted = ledger.set_frozen(&context, &key, &account, false, &act.lift_document);
            return Ok(lifted.await?);
        }
        let hold_id = derived::enforcement_hold(&act.act_id);
        match ledger
            .release_hold(&context, hold_id, "Freeze lifted")
            .await
        {
            // The hold was never made.
            Err(error) if error.is_not_found() && !act.held => Ok(()),
            released => Ok(released?),
        }
    }

    /// Cancels the open orders of a holder whose units are all frozen: the contract would refuse
    /// their trades. Frozen money stops the orders on all instruments. Orders that the market
    /// accepts afterwards are not cancelled.
    async fn cancel_orders(
        &self,
        whole: Option<EnforcementAct>,
        asks_market: bool,
    ) -> Result<(), Error> {
        let Some(act) = whole else { return Ok(()) };
        if !asks_market {
            return Err(Error::Unavailable(MARKET));
        }
        let context = caused_by(&act.correlation_id);
        let key = format!("{}:cancel", act.act_id);
        let instrument_id = match act.instrument_id.as_str() {
            CFA_RUB => "",
            id => id,
        };
        let market = &self.peers.market;
        let called = market.cancel_orders(&context, &key, &act.holder_id, instrument_id);
        match tokio::time::timeout(call_wait(), called).await {
            Err(_) => Err(Error::Unavailable(MARKET)),
            // The market does not trade the instrument.
            Ok(Err(error)) if error.is_not_found() => Ok(()),
            Ok(cancelled) => {
                let cancelled = cancelled?;
                tracing::info!(
                    act_id = act.act_id,
                    cancelled,
                    "orders of a frozen holder cancelled"
                );
                Ok(())
            }
        }
    }

    /// Freezes or unfreezes in the contract, unless that is done. False while the transaction is in
    /// no block, while the holders are being moved to a new token, or if the contract has refused
    /// it; the sweep retries a limited number of times.
    async fn freeze_on_chain(
        &self,
        act: &mut EnforcementAct,
        is_frozen: bool,
        wait: Duration,
    ) -> Result<bool, Error> {
        if act.frozen == is_frozen {
            return Ok(true);
        }
        // The holders may be on their way to another token: the ledger has frozen, the chain waits.
        if self.is_exhausted(act) || self.repo.is_moving(&act.instrument_id).await? {
            return Ok(false);
        }
        let instrument = self.require_instrument(&act.instrument_id).await?;
        let action = freeze_action(self.token(&instrument)?, act, is_frozen);
        let (name, place) = match is_frozen {
            true => ("freeze", failpoint::FREEZE_SUBMITTED),
            false => ("lift", failpoint::LIFT_SUBMITTED),
        };
        let key = format!("{name}:{}:{}", act.act_id, act.attempts);
        let submitted = self.chain.submit(&key, &action.call()).await?;
        failpoint::reach(place);
        let receipt = self.chain.wait_receipt(&submitted.tx_hash, wait);
        let Some(receipt) = receipt.await? else {
            return Ok(false);
        };
        act.tx_hash = receipt.tx_hash.to_string();
        let is_done = receipt.status == ReceiptStatus::Success;
        if is_done {
            act.frozen = is_frozen;
        } else {
            act.attempts += 1;
            tracing::error!(
                act_id = act.act_id,
                tx_hash = act.tx_hash,
                attempts = act.attempts,
                severity = "critical",
                "contract refuses a freeze: the ledger has frozen the units, check the holder's \
                 units on the chain"
            );
        }
        self.save_act(act).await?;
        Ok(is_done)
    }

    /// Whether the contract has refused as many transactions as are tried.
    fn is_exhausted(&self, act: &EnforcementAct) -> bool {
        act.attempts >= i64::from(self.config.submit_attempts_max)
    }

    /// # Errors
    /// `ActNotFound` for an unknown id and for a forced transfer.
    async fn require_freeze(&self, act_id: &str) -> Result<EnforcementAct, Error> {
        let found = self.repo.act(act_id).await?;
        let freeze = found.filter(|act| act.kind == ActKind::Freeze);
        Ok(freeze.ok_or(Refusal::ActNotFound)?)
    }

    /// An instrument whose units exist.
    async fn enforceable(&self, instrument_id: &str) -> Result<Instrument, Error> {
        let instrument = self.require_instrument(instrument_id).await?;
        match instrument.status {
            InstrumentStatus::Draft | InstrumentStatus::Redeemed => {
                Err(Refusal::InstrumentNotActive.into())
            }
            _ => Ok(instrument),
        }
    }

    /// The audit record of an act.
    pub(super) fn record(
        &self,
        act: &EnforcementAct,
        action: &str,
        before: &str,
        actor: &str,
    ) -> events::Event {
        let document = match act.lift_document.is_empty() {
            true => &act.document,
            false => &act.lift_document,
        };
        publish::audit(
            action,
            &act.act_id,
            actor,
            before,
            act.status.as_str(),
            &format!("{}: {document}", act.basis),
            &act.correlation_id,
            act.updated_at_us,
        )
    }
}

/// Key of the freeze of a failed transfer's units.
fn again_key(transfer_id: &str) -> String {
    format!("{transfer_id}:again")
}

/// Key of the transaction that unfreezes the units of a forced transfer.
fn unfreeze_key(operation: &Operation) -> String {
    format!("op:{}:unfreeze", operation.operation_id)
}

fn freeze_act(meta: &RequestMeta, new: NewFreeze, units_minor: i64, now_us: i64) -> EnforcementAct {
    EnforcementAct {
        act_id: uuid::Uuid::now_v7().to_string(),
        kind: ActKind::Freeze,
        basis: new.basis,
        instrument_id: new.instrument_id,
        holder_id: new.holder_id,
        to_user_id: String::new(),
        units_minor,
        left_minor: units_minor,
        document: new.document,
        lift_document: String::new(),
        freeze_id: String::new(),
        status: ActStatus::Pending,
        held: false,
        frozen: false,
        attempts: 0,
        tx_hash: String::new(),
        idempotency_key: meta.idempotency_key.clone(),
        actor: meta.actor.clone(),
        correlation_id: meta.correlation_id.clone(),
        created_at_us: now_us,
        updated_at_us: now_us,
    }
}

fn transfer_act(operation: &Operation, new: &NewForcedTransfer, actor: &str) -> EnforcementAct {
    EnforcementAct {
        act_id: operation.operation_id.clone(),
        kind: ActKind::Transfer,
        basis: new.basis,
        instrument_id: new.instrument_id.clone(),
        holder_id: new.from_user_id.clone(),
        to_user_id: new.to_user_id.clone(),
        units_minor: operation.units_minor,
        left_minor: 0,
        document: new.document.clone(),
        lift_document: String::new(),
        freeze_id: new.freeze_id.clone(),
        status: ActStatus::Pending,
        held: false,
        frozen: false,
        attempts: 0,
        tx_hash: String::new(),
        idempotency_key: operation.idempotency_key.clone(),
        actor: actor.to_owned(),
        correlation_id: operation.correlation_id.clone(),
        created_at_us: operation.created_at_us,
        updated_at_us: operation.created_at_us,
    }
}

fn freeze_action(token: Address, act: &EnforcementAct, is_frozen: bool) -> Action {
    let account = Address::of_user(&act.holder_id);
    let units = unsigned(act.left_minor);
    match (act.is_whole(), is_frozen) {
        (true, frozen) => Action::SetFrozen {
            token,
            account,
            frozen,
        },
        (false, true) => Action::FreezeUnits {
            token,
            account,
            units,
        },
        (false, false) => Action::UnfreezeUnits {
            token,
            account,
            units,
        },
    }
}
