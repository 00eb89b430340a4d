//! Subscriptions. A subscription is an investor's own offer to buy units of an issue. The ledger
//! holds its payment. Only an issue with the same units and payment may use it (D46).

use futures::future::join_all;
use service_clients::ledger::NewHold;
use service_clients::{CallError, caused_by};
use types::{Amount, Minor, derived, subaccount};

use super::workers::log_failure;
use super::{PEER_CALLS, RequestMeta, Service, units};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::model::{CFA_RUB, Operation, Subscription, SubscriptionStatus};
use crate::peers::SOURCE;
use crate::repo::SubscriptionInsert;

const DAY_US: i64 = 24 * 3_600 * 1_000_000;
/// Lifetime of a subscription without `expires_at`.
const LIFETIME_US: i64 = 30 * DAY_US;
/// Limit of a subscription's lifetime.
const LIFETIME_US_MAX: i64 = 366 * DAY_US;
/// Limit of an investor's subscriptions that are pending, active or not released yet.
const LIVE_MAX: i64 = 100;
/// Limit of subscriptions per sweep.
const SWEEP_MAX: i64 = 100;
/// Another call with the key was refused and has deleted the row, so a repeat is a new call.
const GONE: Error = Error::Unavailable("Subscription");
/// Reason in the ledger of a hold made and released by `void_hold`.
const VOID: &str = "Subscription has ended";

/// An offer to buy units.
#[derive(Debug, Clone)]
pub struct NewSubscription {
    pub instrument_id: String,
    pub investor_id: String,
    pub amount: types::Decimal,
    /// CFA-RUB for all units, in kopecks.
    pub payment_minor: i64,
    pub expires_at_us: Option<i64>,
}

impl Service {
    /// Stores an offer and holds its payment, once per key. True for a repeat.
    ///
    /// # Errors
    /// `InstrumentNotActive`, `UserBlocked`, `KycTooLow`, `TooManySubscriptions`, an invalid field;
    /// the ledger's refusal to hold the payment. Nothing is stored then. After `Unavailable` of the
    /// ledger the sweep or a repeat makes the hold.
    pub async fn subscribe(
        &self,
        meta: &RequestMeta,
        new: NewSubscription,
    ) -> Result<(Subscription, bool), Error> {
        let instrument = self.require_instrument(&new.instrument_id).await?;
        if instrument.instrument_id == CFA_RUB {
            let why = "CFA-RUB is issued against deposits only";
            return Err(Refusal::field("instrument_id", why).into());
        }
        let units_minor = units("amount.amount", new.amount, instrument.decimals)?;
        let (investor_id, key) = (&new.investor_id, &meta.idempotency_key);
        if let Some(known) = self.repo.subscription_by_key(investor_id, key).await? {
            return self.repeated_subscription(known, &new, units_minor).await;
        }
        self.active_instrument(&new.instrument_id).await?;
        let now_us = self.now_us();
        let expires_at_us = new.expires_at_us.unwrap_or(now_us + LIFETIME_US);
        if expires_at_us <= now_us || expires_at_us > now_us + LIFETIME_US_MAX {
            let why = "must be in the future, at most a year away";
            return Err(Refusal::field("expires_at", why).into());
        }
        let correlation_id = &meta.correlation_id;
        let refusal = self.peers.user_refusal(correlation_id, investor_id).await?;
        if let Some(refusal) = refusal {
            return Err(refusal.into());
        }
        let subscription = Subscription {
            subscription_id: uuid::Uuid::now_v7().to_string(),
            instrument_id: new.instrument_id.clone(),
            investor_id: new.investor_id.clone(),
            units_minor,
            payment_minor: new.payment_minor,
            status: SubscriptionStatus::Pending,
            operation_id: String::new(),
            idempotency_key: key.clone(),
            correlation_id: meta.correlation_id.clone(),
            expires_at_us,
            created_at_us: now_us,
            updated_at_us: now_us,
        };
        match self
            .repo
            .insert_subscription(&subscription, LIVE_MAX)
            .await?
        {
            SubscriptionInsert::Stored => {
                Ok((self.complete_subscription(subscription, true).await?, false))
            }
            SubscriptionInsert::TooMany => Err(Refusal::TooManySubscriptions.into()),
            SubscriptionInsert::KeyUsed => {
                let stored = self.repo.subscription_by_key(&new.investor_id, key).await?;
                let stored = stored.ok_or(GONE)?;
                self.repeated_subscription(stored, &new, units_minor).await
            }
        }
    }

    /// Returns the stored subscription of a used key. Logs and counts a request with other content
    /// (D50).
    async fn repeated_subscription(
        &self,
        stored: Subscription,
        new: &NewSubscription,
        units_minor: i64,
    ) -> Result<(Subscription, bool), Error> {
        let ends_alike = |at_us: i64| at_us == stored.expires_at_us;
        let is_same = stored.instrument_id == new.instrument_id
            && (stored.units_minor, stored.payment_minor) == (units_minor, new.payment_minor)
            && new.expires_at_us.is_none_or(ends_alike);
        if !is_same {
            rpc::context::note_difference("Subscribe", &stored.idempotency_key);
        }
        Ok((self.complete_subscription(stored, false).await?, true))
    }

    /// Cancels a pending or active subscription and releases its payment. The sweep retries a
    /// failed release. A repeat changes nothing and returns true.
    ///
    /// # Errors
    /// `SubscriptionNotFound`; `OperationState` once it is used or expired.
    pub async fn cancel_subscription(
        &self,
        meta: &RequestMeta,
        id: &str,
    ) -> Result<(Subscription, bool), Error> {
        let stored = self.require_subscription(id).await?;
        if stored.status == SubscriptionStatus::Cancelled {
            return Ok((stored, true));
        }
        let cancelled = SubscriptionStatus::Cancelled;
        let ended = self.end_subscription(id, cancelled, &meta.actor).await?;
        let Some(ended) = ended else {
            // Another call has ended or used it meanwhile.
            let now = self.require_subscription(id).await?;
            return match now.status {
                SubscriptionStatus::Cancelled => Ok((now, true)),
                _ => Err(Refusal::OperationState.into()),
            };
        };
        log_failure("subscription", id, self.step_subscription(id, false).await);
        Ok((ended, false))
    }

    pub async fn require_subscription(&self, id: &str) -> Result<Subscription, Error> {
        let found = self.repo.subscription(id).await?;
        Ok(found.ok_or(Refusal::SubscriptionNotFound)?)
    }

    /// Refuses an issue against payment that the investor has not subscribed to.
    pub(super) async fn require_subscribed_in_tx(
        &self,
        tx: &mut events::Tx,
        issue: &Operation,
    ) -> Result<(), Error> {
        if issue.payment_minor == 0 {
            return Ok(());
        }
        let found = self.repo.subscription_for_in_tx(tx, issue, self.now_us());
        found.await?.map(drop).ok_or(Refusal::NotSubscribed.into())
    }

    /// Uses a subscription for an issue against payment. The issue is paid from its hold.
    pub(super) async fn use_subscription_in_tx(
        &self,
        tx: &mut events::Tx,
        issue: &mut Operation,
    ) -> Result<(), Error> {
        if issue.payment_minor == 0 {
            return Ok(());
        }
        let found = self.repo.subscription_for_in_tx(tx, issue, self.now_us());
        let found = found.await?.ok_or(Refusal::NotSubscribed)?;
        let id = &found.subscription_id;
        if !self.repo.use_subscription_in_tx(tx, id, issue).await? {
            // Another issue has used it, or it was cancelled.
            return Err(Refusal::NotSubscribed.into());
        }
        issue.hold_id = Some(derived::subscription_hold(id).to_string());
        let (active, used) = (SubscriptionStatus::Active, SubscriptionStatus::Used);
        let record = publish::audit(
            "subscription.used",
            id,
            SOURCE,
            active.as_str(),
            used.as_str(),
            &issue.operation_id,
            &issue.correlation_id,
            issue.created_at_us,
        );
        self.repo.publish_in_tx(tx, &[record]).await?;
        self.repo.save_operation_in_tx(tx, issue).await
    }

    /// Reactivates the subscription of an issue that is deleted. Its payment is still held.
    pub(super) async fn restore_subscription_in_tx(
        &self,
        tx: &mut events::Tx,
        issue: &Operation,
    ) -> Result<(), Error> {
        let (id, now_us) = (&issue.operation_id, self.now_us());
        let restored = self.repo.restore_subscription_in_tx(tx, id, now_us);
        let Some(restored) = restored.await? else {
            return Ok(());
        };
        let record = publish::audit(
            "subscription.active",
            &restored,
            SOURCE,
            SubscriptionStatus::Used.as_str(),
            SubscriptionStatus::Active.as_str(),
            id,
            &issue.correlation_id,
            now_us,
        );
        self.repo.publish_in_tx(tx, &[record]).await
    }

    /// Ends expired subscriptions, then makes the holds and releases that are left.
    pub(super) async fn sweep_subscriptions(&self, before_us: i64) -> Result<(), Error> {
        let expired = self.repo.expired_subscriptions(self.now_us(), SWEEP_MAX);
        for subscription in expired.await? {
            let id = &subscription.subscription_id;
            let ended = self.end_subscription(id, SubscriptionStatus::Expired, SOURCE);
            log_failure("subscription", id, ended.await.map(drop));
        }
        let open = self.repo.open_subscriptions(before_us, SWEEP_MAX).await?;
        for round in open.chunks(PEER_CALLS) {
            let steps = round.iter().map(|of| self.retry_step(&of.subscription_id));
            // While the ledger does not answer, one round per sweep is enough.
            if join_all(steps).await.contains(&true) {
                break;
            }
        }
        let failed = self.repo.failed_subscription().await?;
        let reason = failed.map(|id| format!("subscription {id}: its last step failed"));
        self.health.set("subscriptions", reason.as_deref());
        Ok(())
    }

    /// Retries a step in the sweep. True if the ledger does not answer. A subscription whose step
    /// fails moves to the end of the queue, so it does not delay the others.
    async fn retry_step(&self, id: &str) -> bool {
        let Err(error) = self.step_subscription(id, false).await else {
            return false;
        };
        let is_unavailable = matches!(error, Error::Unavailable(_));
        match self.repo.postpone_subscription(id, self.now_us()).await {
            Ok(true) => log_failure("subscription", id, Err(error)),
            Ok(false) => {
                tracing::info!(id, %error, "subscription deleted: its payment is not held")
            }
            Err(store) => log_failure("subscription", id, Err(store)),
        }
        is_unavailable
    }

    /// Holds the payment of a pending subscription and returns the subscription. `is_first`: no
    /// earlier call can have requested the hold.
    async fn complete_subscription(
        &self,
        stored: Subscription,
        is_first: bool,
    ) -> Result<Subscription, Error> {
        if stored.status != SubscriptionStatus::Pending {
            return Ok(stored);
        }
        self.step_subscription(&stored.subscription_id, is_first)
            .await?;
        let completed = self.repo.subscription(&stored.subscription_id).await?;
        completed.ok_or(GONE)
    }

    /// Ends a pending or active subscription. `None` if it is neither. Its payment is still held.
    /// Does not wait for a concurrent step, whose own change of the status then fails.
    async fn end_subscription(
        &self,
        id: &str,
        status: SubscriptionStatus,
        actor: &str,
    ) -> Result<Option<Subscription>, Error> {
        loop {
            let mut subscription = self.require_subscription(id).await?;
            let before = subscription.status;
            if !matches!(
                before,
                SubscriptionStatus::Pending | SubscriptionStatus::Active
            ) {
                return Ok(None);
            }
            subscription.status = status;
            // The status has changed meanwhile. It changes a few times at most: PENDING to ACTIVE,
            // ACTIVE to USED, and back.
            if self
                .save_subscription(&mut subscription, before, true, actor)
                .await?
            {
                return Ok(Some(subscription));
            }
        }
    }

    /// Makes the hold of a pending subscription, or releases the hold of an ended one.
    async fn step_subscription(&self, id: &str, is_first: bool) -> Result<(), Error> {
        let _lock = self.object_locks.lock(id).await;
        let Some(mut subscription) = self.repo.subscription(id).await? else {
            return Ok(());
        };
        let before = subscription.status;
        match before {
            SubscriptionStatus::Pending => {
                self.hold_payment(&subscription, is_first).await?;
                subscription.status = SubscriptionStatus::Active;
            }
            SubscriptionStatus::Cancelled | SubscriptionStatus::Expired => {
                self.release_payment(&subscription).await?;
            }
            SubscriptionStatus::Active | SubscriptionStatus::Used => return Ok(()),
        }
        let investor_id = subscription.investor_id.clone();
        self.save_subscription(&mut subscription, before, false, &investor_id)
            .await
            .map(drop)
    }

    /// Makes the hold of the payment. If the ledger refuses it, deletes the subscription.
    async fn hold_payment(&self, subscription: &Subscription, is_first: bool) -> Result<(), Error> {
        let (investor_id, id) = (&subscription.investor_id, &subscription.subscription_id);
        let hold_id = derived::subscription_hold(id);
        let payment = Amount::rubles(Minor(subscription.payment_minor));
        let new = NewHold {
            hold_id,
            subaccount_id: &subaccount::of_user(investor_id, CFA_RUB),
            amount: payment,
            reason: &format!("Subscription {id} to {}", subscription.instrument_id),
            owner: SOURCE,
            destination: None,
            // The service ends the subscription first. This bounds how long a fault could hold
            // money.
            expires_at_us: Some(subscription.expires_at_us + DAY_US),
        };
        let context = caused_by(&subscription.correlation_id);
        let ledger = &self.peers.ledger;
        let refusal = match ledger.create_hold(&context, new).await.map_err(Error::from) {
            Ok(hold) if hold.is_active() && hold.amount == payment.decimal() => return Ok(()),
            // The hold of `void_hold`: the payment was refused before, then the process ended.
            Ok(hold) if hold.is_active() || hold.is_money_available() => {
                ledger.release_hold(&context, hold_id, VOID).await?;
                GONE
            }
            Ok(_) => return Err(Error::Damaged(format!("hold of {id} is consumed"))),
            Err(error @ Error::Peer(_)) if ledger.hold(&context, hold_id).await?.is_none() => {
                if !is_first {
                    self.void_hold(subscription).await?;
                }
                match error.has_reason("SUB_ACCOUNT_NOT_FOUND") {
                    true => Refusal::InsufficientBalance.into(),
                    false => error,
                }
            }
            Err(error) => return Err(error),
        };
        self.repo.delete_pending_subscription(id).await?;
        Err(refusal)
    }

    /// Invalidates the id of a hold that was not made. A create call whose answer was lost may
    /// still arrive. The ledger accepts an id once, so a released hold of one kopeck makes that
    /// call a repeat without effect.
    async fn void_hold(&self, subscription: &Subscription) -> Result<(), Error> {
        let hold_id = derived::subscription_hold(&subscription.subscription_id);
        let new = NewHold {
            hold_id,
            subaccount_id: &subaccount::of_user(&subscription.investor_id, CFA_RUB),
            amount: Amount::rubles(Minor(1)),
            reason: VOID,
            owner: SOURCE,
            destination: None,
            expires_at_us: Some(self.now_us() + DAY_US),
        };
        let context = caused_by(&subscription.correlation_id);
        let ledger = &self.peers.ledger;
        match ledger.create_hold(&context, new).await {
            // If the late call has arrived before, this is its hold.
            Ok(_) => Ok(ledger.release_hold(&context, hold_id, VOID).await?),
            // An account without a kopeck, or a frozen one, refuses the late call too.
            Err(CallError::Refused(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Releases the hold. If it was never made, invalidates its id.
    async fn release_payment(&self, subscription: &Subscription) -> Result<(), Error> {
        let hold_id = derived::subscription_hold(&subscription.subscription_id);
        let reason = format!("Subscription {}", subscription.status);
        let context = caused_by(&subscription.correlation_id);
        let ledger = &self.peers.ledger;
        match ledger.release_hold(&context, hold_id, &reason).await {
            Err(error) if error.is_not_found() => self.void_hold(subscription).await,
            released => Ok(released?),
        }
    }

    /// Stores a new status with its audit record. False if the stored status is not `before`.
    async fn save_subscription(
        &self,
        subscription: &mut Subscription,
        before: SubscriptionStatus,
        has_step: bool,
        actor: &str,
    ) -> Result<bool, Error> {
        subscription.updated_at_us = self.now_us();
        let status = subscription.status.as_str();
        let mut tx = self.repo.begin().await?;
        let saved = self
            .repo
            .save_subscription_in_tx(&mut tx, subscription, before, has_step)
            .await?;
        // A release after the end does not change the status and has no audit record.
        if saved && subscription.status != before {
            let record = publish::audit(
                &format!("subscription.{}", status.to_lowercase()),
                &subscription.subscription_id,
                actor,
                before.as_str(),
                status,
                "",
                &subscription.correlation_id,
                subscription.updated_at_us,
            );
            self.repo.publish_in_tx(&mut tx, &[record]).await?;
        }
        tx.commit().await?;
        Ok(saved)
    }
}
