//! Offers of users to buy units of an issue (subscriptions), or to sell them back to its issuer.
//! The ledger holds the payment or the units. An issue against payment uses a subscription with the
//! same units and payment. A redemption before maturity uses an offer to sell the same units for at
//! most its payment (D46).

use futures::future::join_all;
use service_clients::ledger::{Hold, NewHold};
use service_clients::{CallError, LedgerClient, caused_by};
use types::{Amount, Minor, derived, subaccount};

use super::workers::log_failure;
use super::{PEER_CALLS, RequestMeta, Service, units};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    CFA_RUB, Flow, Instrument, Offer, OfferLimit, OfferSide, OfferStatus, Operation, Status,
};
use crate::peers::{self, SOURCE};
use crate::placement::Lot;
use crate::repo::OfferInsert;

const DAY_US: i64 = 24 * 3_600 * 1_000_000;
/// Lifetime of an offer without `expires_at`.
const LIFETIME_US: i64 = 30 * DAY_US;
/// Limit of an offer's lifetime, unless the default is longer.
const LIFETIME_US_MAX: i64 = 366 * DAY_US;
/// Limit of a user's offers per side that are pending, active or not released yet.
const LIVE_MAX: i64 = 100;
/// Limit of such offers to sell units of an issue, which its redemption ends.
const SALES_MAX: i64 = 10_000;
/// Limit of pending and active subscriptions to a placement, which its close decides in one
/// transaction.
const PLACED_MAX: i64 = 50_000;
/// Limit of offers per sweep, and per page of the offers that a redemption ends.
const SWEEP_MAX: i64 = 100;
/// Reason in the ledger of a hold made and released by `void_hold`.
const VOID: &str = "Offer has ended";

/// A request to store an offer.
#[derive(Debug, Clone)]
pub struct NewOffer {
    pub side: OfferSide,
    pub instrument_id: String,
    pub user_id: String,
    pub amount: types::Decimal,
    /// CFA-RUB for all units, in kopecks: of a sale the least.
    pub payment_minor: i64,
    pub expires_at_us: Option<i64>,
}

impl OfferSide {
    /// Name of the call that makes such an offer.
    fn call(self) -> &'static str {
        match self {
            Self::Buy => "Subscribe",
            Self::Sell => "OfferUnits",
        }
    }

    /// Name of the health part that reports a failed step.
    fn health_part(self) -> &'static str {
        match self {
            Self::Buy => "subscriptions",
            Self::Sell => "offers",
        }
    }

    fn unknown(self) -> Refusal {
        match self {
            Self::Buy => Refusal::SubscriptionNotFound,
            Self::Sell => Refusal::OfferNotFound,
        }
    }

    /// Refusal of an operation that needs such an offer.
    fn missing(self) -> Refusal {
        match self {
            Self::Buy => Refusal::NotSubscribed,
            Self::Sell => Refusal::NotOffered,
        }
    }

    fn too_many(self) -> Refusal {
        match self {
            Self::Buy => Refusal::TooManySubscriptions,
            Self::Sell => Refusal::TooManyOffers,
        }
    }

    /// Another call with the key was refused and has deleted the row, so a repeat is a new call.
    fn gone(self) -> Error {
        Error::Unavailable(match self {
            Self::Buy => "Subscription",
            Self::Sell => "Offer",
        })
    }
}

impl Service {
    /// Stores an offer and holds what the user gives, once per key. True for a repeat.
    ///
    /// # Errors
    /// `InstrumentNotActive`, `UserBlocked`, `KycTooLow`, `TooManySubscriptions`, `TooManyOffers`,
    /// `PlacementNotOpen`, `LimitExceeded`, an invalid field; the ledger's refusal to hold the
    /// money or units. Nothing is stored then. After `Unavailable` of identity or the ledger the
    /// sweep or a repeat reserves the limits and makes the hold.
    pub async fn make_offer(
        &self,
        meta: &RequestMeta,
        new: NewOffer,
    ) -> Result<(Offer, bool), Error> {
        let instrument = self.require_instrument(&new.instrument_id).await?;
        if instrument.instrument_id == CFA_RUB {
            return Err(Refusal::field("instrument_id", "must be an issue").into());
        }
        let units_minor = units("amount.amount", new.amount, instrument.decimals)?;
        let (side, user_id, key) = (new.side, &new.user_id, &meta.idempotency_key);
        if let Some(known) = self.repo.offer_by_key(side, user_id, key).await? {
            return self.repeated_offer(known, &new, units_minor).await;
        }
        self.active_instrument(&new.instrument_id).await?;
        if side == OfferSide::Sell && *user_id == instrument.issuer_id {
            return Err(Refusal::field("holder_id", "must be another user than the issuer").into());
        }
        let lifetime_us = self.check_placement(&instrument, &new, units_minor).await?;
        let now_us = self.now_us();
        let default_us = lifetime_us.unwrap_or(LIFETIME_US);
        let expires_at_us = new.expires_at_us.unwrap_or(now_us + default_us);
        let most_us = LIFETIME_US_MAX.max(default_us);
        if expires_at_us <= now_us || expires_at_us > now_us + most_us {
            let why = "must be in the future, at most a year away";
            return Err(Refusal::field("expires_at", why).into());
        }
        let correlation_id = &meta.correlation_id;
        let refusal = self.peers.user_refusal(correlation_id, user_id).await?;
        if let Some(refusal) = refusal {
            return Err(refusal.into());
        }
        let offer = Offer {
            offer_id: uuid::Uuid::now_v7().to_string(),
            side,
            instrument_id: new.instrument_id.clone(),
            user_id: user_id.clone(),
            units_minor,
            payment_minor: new.payment_minor,
            status: OfferStatus::Pending,
            operation_id: String::new(),
            idempotency_key: key.clone(),
            correlation_id: correlation_id.clone(),
            expires_at_us,
            created_at_us: now_us,
            updated_at_us: now_us,
            in_placement: lifetime_us.is_some(),
            limit: match side {
                OfferSide::Buy => OfferLimit::Reserved,
                OfferSide::Sell => OfferLimit::None,
            },
            allotted_minor: 0,
            allotted_payment_minor: 0,
            allotted_number: 0,
        };
        let issue_max = match side {
            OfferSide::Sell => Some(SALES_MAX),
            OfferSide::Buy => offer.in_placement.then_some(PLACED_MAX),
        };
        let inserted = self.repo.insert_offer(&offer, LIVE_MAX, issue_max).await?;
        match inserted {
            OfferInsert::Stored => Ok((self.complete_offer(offer, true).await?, false)),
            OfferInsert::TooMany => Err(side.too_many().into()),
            OfferInsert::KeyUsed => {
                let stored = self.repo.offer_by_key(side, user_id, key).await?;
                let stored = stored.ok_or(side.gone())?;
                self.repeated_offer(stored, &new, units_minor).await
            }
        }
    }

    /// Checks a subscription to a placement. Returns its lifetime if the request has no end: until
    /// after the decision. `None`: the issue has no placement, or the offer is to sell.
    ///
    /// # Errors
    /// `PlacementNotOpen`; the issuer as investor, because its own payment must not reach the
    /// minimum; units or a payment that the terms do not allow.
    async fn check_placement(
        &self,
        instrument: &Instrument,
        new: &NewOffer,
        units_minor: i64,
    ) -> Result<Option<i64>, Error> {
        if new.side != OfferSide::Buy {
            return Ok(None);
        }
        let Some(placement) = self.repo.placement(&instrument.instrument_id).await? else {
            return Ok(None);
        };
        let now_us = self.clock.now_us();
        if !placement.accepts_at(now_us) {
            return Err(Refusal::PlacementNotOpen.into());
        }
        if new.user_id == instrument.issuer_id {
            let why = "must be another user than the issuer";
            return Err(Refusal::field("investor_id", why).into());
        }
        if instrument
            .issue_limit_minor
            .is_some_and(|size| units_minor > size)
        {
            let why = "is above the units of the placement";
            return Err(Refusal::field("amount.amount", why).into());
        }
        let terms = &placement.terms;
        let lot = Lot::new(instrument.lot_size, instrument.decimals, terms.price)?;
        let lots = lot
            .count(units_minor)
            .ok_or_else(|| Refusal::field("amount.amount", "must be a number of whole lots"))?;
        if units_minor < terms.investor_min_minor {
            let why = "is below the least units of a subscription in the placement";
            return Err(Refusal::field("amount.amount", why).into());
        }
        if lot.payment(lots) != Some(new.payment_minor) {
            let why = "must be the placement's price of the units";
            return Err(Refusal::field("payment.amount", why).into());
        }
        Ok(Some(terms.closes_at_us - now_us + LIFETIME_US))
    }

    /// Returns the stored offer of a used key. Logs and counts a request with other content (D50).
    async fn repeated_offer(
        &self,
        stored: Offer,
        new: &NewOffer,
        units_minor: i64,
    ) -> Result<(Offer, bool), Error> {
        let ends_alike = |at_us: i64| at_us == stored.expires_at_us;
        let is_same = stored.instrument_id == new.instrument_id
            && (stored.units_minor, stored.payment_minor) == (units_minor, new.payment_minor)
            && new.expires_at_us.is_none_or(ends_alike);
        if !is_same {
            rpc::context::note_difference(new.side.call(), &stored.idempotency_key);
        }
        Ok((self.complete_offer(stored, false).await?, true))
    }

    /// Cancels a pending or active offer and releases its hold. The sweep retries a failed release.
    /// A repeat changes nothing and returns true.
    ///
    /// # Errors
    /// `SubscriptionNotFound`, `OfferNotFound`; `OperationState` once it is used or expired.
    pub async fn cancel_offer(
        &self,
        meta: &RequestMeta,
        side: OfferSide,
        id: &str,
    ) -> Result<(Offer, bool), Error> {
        let stored = self.require_offer(side, id).await?;
        if stored.status == OfferStatus::Cancelled {
            return Ok((stored, true));
        }
        let cancelled = OfferStatus::Cancelled;
        let Some(ended) = self.end_offer(id, cancelled, &meta.actor, "").await? else {
            // Another call has ended or used it meanwhile.
            let now = self.require_offer(side, id).await?;
            return match now.status {
                OfferStatus::Cancelled => Ok((now, true)),
                _ => Err(Refusal::OperationState.into()),
            };
        };
        log_failure(side.as_str(), id, self.step_offer(id, false).await);
        Ok((ended, false))
    }

    pub async fn require_offer(&self, side: OfferSide, id: &str) -> Result<Offer, Error> {
        let found = self.repo.offer(id).await?;
        let found = found.filter(|offer| offer.side == side);
        Ok(found.ok_or(side.unknown())?)
    }

    /// Uses an offer for an operation, which is paid from its hold. A rejected operation needs an
    /// offer too and does not use it.
    ///
    /// # Errors
    /// `NotSubscribed`, `NotOffered`.
    pub(super) async fn use_offer_in_tx(
        &self,
        tx: &mut events::Tx,
        operation: &mut Operation,
        actor: &str,
    ) -> Result<(), Error> {
        let side = match operation.flow {
            Flow::IssueInvestment => OfferSide::Buy,
            Flow::RedeemInvestment => OfferSide::Sell,
            flow => unreachable!("{} uses no offer", flow.as_str()),
        };
        let now_us = self.now_us();
        let found = self.repo.offer_for_in_tx(tx, side, operation, now_us);
        let found = found.await?.ok_or(side.missing())?;
        if operation.status == Status::Rejected {
            return Ok(());
        }
        let id = &found.offer_id;
        if !self.repo.use_offer_in_tx(tx, id, operation).await? {
            // Another operation has used it, or it was cancelled.
            return Err(side.missing().into());
        }
        operation.hold_id = Some(derived::offer_hold(id).to_string());
        let record = publish::audit(
            &format!("{side}.used"),
            id,
            actor,
            OfferStatus::Active.as_str(),
            OfferStatus::Used.as_str(),
            &operation.operation_id,
            &operation.correlation_id,
            operation.created_at_us,
        );
        self.repo.publish_in_tx(tx, &[record]).await?;
        self.repo.save_operation_in_tx(tx, operation).await
    }

    /// Reactivates the offer of an operation that is deleted. Its hold is still active.
    pub(super) async fn restore_offer_in_tx(
        &self,
        tx: &mut events::Tx,
        operation: &Operation,
    ) -> Result<(), Error> {
        let (id, now_us) = (&operation.operation_id, self.now_us());
        let restored = self.repo.restore_offer_in_tx(tx, id, now_us);
        let Some(restored) = restored.await? else {
            return Ok(());
        };
        let record = publish::audit(
            &format!("{}.active", restored.side),
            &restored.offer_id,
            SOURCE,
            OfferStatus::Used.as_str(),
            OfferStatus::Active.as_str(),
            id,
            &operation.correlation_id,
            now_us,
        );
        self.repo.publish_in_tx(tx, &[record]).await
    }

    /// Ends expired offers, then makes the holds and releases that are left.
    /// Health reports an offer that cannot be read.
    pub(super) async fn sweep_offers(&self, before_us: i64) -> Result<(), Error> {
        let swept = self.sweep_readable_offers(before_us).await;
        if let Err(Error::Damaged(what)) = &swept {
            for side in OfferSide::ALL {
                self.health.set(side.health_part(), Some(what));
            }
        }
        swept
    }

    async fn sweep_readable_offers(&self, before_us: i64) -> Result<(), Error> {
        let expired = self.repo.expired_offers(self.now_us(), SWEEP_MAX);
        for offer in expired.await? {
            let id = &offer.offer_id;
            let ended = self.end_offer(id, OfferStatus::Expired, SOURCE, "");
            log_failure(offer.side.as_str(), id, ended.await.map(drop));
        }
        let open = self.repo.open_offers(before_us, SWEEP_MAX).await?;
        self.retry_steps(&open).await;
        for side in OfferSide::ALL.iter().copied() {
            let failed = self.repo.failed_offer(side).await?;
            let reason = failed.map(|id| format!("{side} {id}: its last step failed"));
            self.health.set(side.health_part(), reason.as_deref());
        }
        Ok(())
    }

    /// Ends the offers to sell units of an issue and releases the units, before the issue is
    /// redeemed. The caller has stopped trading and waited for open operations, so no offer is
    /// added or restored.
    ///
    /// # Errors
    /// `Unavailable` of the ledger. A repeat continues. The sweep retries any other failed release
    /// and health reports it.
    pub(super) async fn end_sales(&self, instrument_id: &str) -> Result<(), Error> {
        let mut after = String::new();
        loop {
            let live = self
                .repo
                .live_sales(instrument_id, &after, SWEEP_MAX)
                .await?;
            let Some(last) = live.last() else {
                return Ok(());
            };
            after.clone_from(&last.offer_id);
            for offer in &live {
                self.end_offer(&offer.offer_id, OfferStatus::Cancelled, SOURCE, "")
                    .await?;
            }
            if self.retry_steps(&live).await {
                return Err(Error::Unavailable(LedgerClient::SERVICE));
            }
        }
    }

    /// Retries the steps of offers. True if the ledger does not answer: then the rest is left out.
    pub(super) async fn retry_steps(&self, offers: &[Offer]) -> bool {
        for round in offers.chunks(PEER_CALLS) {
            let steps = round.iter().map(|offer| self.retry_step(offer));
            if join_all(steps).await.contains(&true) {
                return true;
            }
        }
        false
    }

    /// Retries a step. True if the ledger does not answer. An offer whose step fails moves to the
    /// end of the sweep's queue, so it does not delay the others.
    async fn retry_step(&self, offer: &Offer) -> bool {
        let (what, id) = (offer.side.as_str(), offer.offer_id.as_str());
        let Err(error) = self.step_offer(id, false).await else {
            return false;
        };
        let is_unavailable = matches!(error, Error::Unavailable(_));
        match self.repo.postpone_offer(id, self.now_us()).await {
            Ok(true) => log_failure(what, id, Err(error)),
            Ok(false) => tracing::info!(what, id, %error, "deleted: the ledger refused its hold"),
            Err(store) => log_failure(what, id, Err(store)),
        }
        is_unavailable
    }

    /// Makes the hold of a pending offer and returns the offer. `is_first`: no earlier call can
    /// have requested the hold.
    async fn complete_offer(&self, stored: Offer, is_first: bool) -> Result<Offer, Error> {
        if stored.status != OfferStatus::Pending {
            return Ok(stored);
        }
        self.step_offer(&stored.offer_id, is_first).await?;
        let completed = self.repo.offer(&stored.offer_id).await?;
        completed.ok_or(stored.side.gone())
    }

    /// Ends a pending or active offer. `None` if it is neither. Its hold is still active. Does not
    /// wait for a concurrent step, whose own change of the status then fails.
    pub(super) async fn end_offer(
        &self,
        id: &str,
        status: OfferStatus,
        actor: &str,
        reason: &str,
    ) -> Result<Option<Offer>, Error> {
        loop {
            let Some(mut offer) = self.repo.offer(id).await? else {
                return Ok(None);
            };
            let before = offer.status;
            if !matches!(before, OfferStatus::Pending | OfferStatus::Active) {
                return Ok(None);
            }
            offer.status = status;
            // The status has changed meanwhile. It changes a few times at most: PENDING to ACTIVE,
            // ACTIVE to USED, and back.
            let saved = self.save_offer(&mut offer, before, true, actor, reason);
            if saved.await? {
                return Ok(Some(offer));
            }
        }
    }

    /// Reserves the limits and makes the hold of a pending offer, or releases the hold of an ended
    /// one. A refusal deletes a pending offer.
    pub(super) async fn step_offer(&self, id: &str, is_first: bool) -> Result<(), Error> {
        let _lock = self.object_locks.lock(id).await;
        let Some(mut offer) = self.repo.offer(id).await? else {
            return Ok(());
        };
        let before = offer.status;
        match before {
            OfferStatus::Pending => {
                if let Some(reason) = self.reserve_limits(&offer).await? {
                    self.repo.delete_pending_offer(id).await?;
                    return Err(Refusal::LimitExceeded(reason).into());
                }
                self.make_hold(&offer, is_first).await?;
                failpoint::reach(failpoint::OFFER_HELD);
                offer.status = OfferStatus::Active;
            }
            OfferStatus::Cancelled | OfferStatus::Expired | OfferStatus::NotAllotted => {
                self.release_offered(&offer).await?;
                failpoint::reach(failpoint::OFFER_RELEASED);
            }
            OfferStatus::Active | OfferStatus::Used => return Ok(()),
        }
        let user_id = offer.user_id.clone();
        self.save_offer(&mut offer, before, false, &user_id, "")
            .await
            .map(drop)
    }

    /// What the user of an offer gives: the sub-account and the amount.
    async fn offered(&self, offer: &Offer) -> Result<(String, Amount), Error> {
        let account = |instrument_id: &str| subaccount::of_user(&offer.user_id, instrument_id);
        Ok(match offer.side {
            OfferSide::Buy => (account(CFA_RUB), Amount::rubles(Minor(offer.payment_minor))),
            OfferSide::Sell => {
                let instrument = self.require_instrument(&offer.instrument_id).await?;
                let units = peers::units(&instrument, offer.units_minor)?;
                (account(&offer.instrument_id), units)
            }
        })
    }

    /// Makes the hold of an offer. If the ledger refuses it, deletes the offer.
    async fn make_hold(&self, offer: &Offer, is_first: bool) -> Result<(), Error> {
        let id = &offer.offer_id;
        let hold_id = derived::offer_hold(id);
        let (subaccount_id, amount) = self.offered(offer).await?;
        let reason = match offer.side {
            OfferSide::Buy => format!("Subscription {id} to {}", offer.instrument_id),
            OfferSide::Sell => format!("Offer {id} of {}", offer.instrument_id),
        };
        let new = NewHold {
            hold_id,
            subaccount_id: &subaccount_id,
            amount,
            reason: &reason,
            owner: SOURCE,
            destination: None,
            // The service ends the offer first. This bounds how long a fault could hold it.
            expires_at_us: Some(offer.expires_at_us + DAY_US),
        };
        let context = caused_by(&offer.correlation_id);
        let ledger = &self.peers.ledger;
        let is_made = |hold: &Hold| {
            hold.is_active() && hold.amount == amount.decimal() && hold.reason != VOID
        };
        let refusal = match ledger.create_hold(&context, new).await.map_err(Error::from) {
            Ok(hold) if is_made(&hold) => return Ok(()),
            // The hold of `void_hold`: the amount was refused before, then the process ended.
            Ok(hold) if hold.is_active() || hold.is_money_available() => {
                ledger.release_hold(&context, hold_id, VOID).await?;
                offer.side.gone()
            }
            Ok(_) => return Err(Error::Damaged(format!("hold of {id} is consumed"))),
            Err(error @ Error::Peer(_)) if ledger.hold(&context, hold_id).await?.is_none() => {
                if !is_first {
                    self.void_hold(offer).await?;
                }
                match error.has_reason("SUB_ACCOUNT_NOT_FOUND") {
                    true => Refusal::InsufficientBalance.into(),
                    false => error,
                }
            }
            Err(error) => return Err(error),
        };
        self.cancel_limits(offer).await?;
        self.repo.delete_pending_offer(id).await?;
        Err(refusal)
    }

    /// Invalidates the id of a hold that was not made. A create call whose answer was lost may
    /// still arrive. The ledger accepts an id once, so a released hold of one smallest unit makes
    /// that call a repeat without effect.
    async fn void_hold(&self, offer: &Offer) -> Result<(), Error> {
        let hold_id = derived::offer_hold(&offer.offer_id);
        let (subaccount_id, amount) = self.offered(offer).await?;
        let new = NewHold {
            hold_id,
            subaccount_id: &subaccount_id,
            amount: Amount {
                minor: Minor(1),
                ..amount
            },
            reason: VOID,
            owner: SOURCE,
            destination: None,
            expires_at_us: Some(self.now_us() + DAY_US),
        };
        let context = caused_by(&offer.correlation_id);
        let ledger = &self.peers.ledger;
        match ledger.create_hold(&context, new).await {
            // If the late call has arrived before, this is its hold.
            Ok(_) => Ok(ledger.release_hold(&context, hold_id, VOID).await?),
            // An account without the smallest unit, or a frozen one, refuses the late call too.
            Err(CallError::Refused(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Releases the hold. If it was never made, invalidates its id.
    async fn release_offered(&self, offer: &Offer) -> Result<(), Error> {
        let hold_id = derived::offer_hold(&offer.offer_id);
        let reason = match offer.side {
            OfferSide::Buy => format!("Subscription {}", offer.status),
            OfferSide::Sell => format!("Offer {}", offer.status),
        };
        let context = caused_by(&offer.correlation_id);
        let ledger = &self.peers.ledger;
        match ledger.release_hold(&context, hold_id, &reason).await {
            Err(error) if error.is_not_found() => self.void_hold(offer).await,
            released => Ok(released?),
        }
    }

    /// Stores a new status with its audit record. False if the stored status is not `before`.
    async fn save_offer(
        &self,
        offer: &mut Offer,
        before: OfferStatus,
        has_step: bool,
        actor: &str,
        reason: &str,
    ) -> Result<bool, Error> {
        offer.updated_at_us = self.now_us();
        let status = offer.status.as_str();
        let mut tx = self.repo.begin().await?;
        let saved = self
            .repo
            .save_offer_in_tx(&mut tx, offer, before, has_step)
            .await?;
        // A release after the end does not change the status and has no audit record.
        if saved && offer.status != before {
            let record = publish::audit(
                &format!("{}.{}", offer.side, status.to_lowercase()),
                &offer.offer_id,
                actor,
                before.as_str(),
                status,
                reason,
                &offer.correlation_id,
                offer.updated_at_us,
            );
            self.repo.publish_in_tx(&mut tx, &[record]).await?;
        }
        tx.commit().await?;
        Ok(saved)
    }
}
