//! Reservations of limits for subscriptions: the limit of the year for purchases (F35), in a
//! placement also that of the day.
//!
//! A subscription reserves its payment before its hold is made. The operation that uses it confirms
//! the reservation, in a placement only the allotted part. Any other end cancels it. Only the sweep
//! ends reservations, so no call waits for identity at its end.

use futures::{StreamExt, stream};
use service_clients::{CallError, LimitType, caused_by};
use types::Minor;

use super::{PEER_CALLS, Service};
use crate::error::Error;
use crate::failpoint;
use crate::model::{Offer, OfferLimit};

/// Limit of subscriptions whose reservations a sweep ends.
const LIMITS_PER_SWEEP: i64 = 500;
const ENDED: &str = "RESERVATION_ENDED";

impl Service {
    /// Reserves the limits of a pending subscription. Returns the reason if one is refused: then
    /// none is reserved.
    ///
    /// # Errors
    /// `Unavailable` of identity. A repeat continues.
    pub(super) async fn reserve_limits(&self, offer: &Offer) -> Result<Option<String>, Error> {
        if offer.limit != OfferLimit::Reserved {
            return Ok(None);
        }
        for (id, limit) in reservations(offer) {
            let refused = self.peers.reserve_payment(offer, &id, limit).await?;
            if refused.is_some() {
                self.cancel_limits(offer).await?;
                return Ok(refused);
            }
        }
        failpoint::reach(failpoint::SUBSCRIPTION_RESERVED);
        Ok(None)
    }

    /// Cancels the reservations of a subscription.
    pub(super) async fn cancel_limits(&self, offer: &Offer) -> Result<(), Error> {
        if offer.limit == OfferLimit::None {
            return Ok(());
        }
        for (id, limit) in reservations(offer) {
            self.cancel_limit(offer, &id, limit).await?;
        }
        Ok(())
    }

    async fn cancel_limit(&self, offer: &Offer, id: &str, limit: LimitType) -> Result<(), Error> {
        let context = caused_by(&offer.correlation_id);
        let identity = &self.peers.identity;
        match identity.cancel_limit(&context, id).await {
            Ok(()) => Ok(()),
            // Identity has refused it.
            Err(error) if error.reason().as_deref() == Some(ENDED) => Ok(()),
            // The call that reserves it may still arrive. After a cancelled reservation that call
            // is a repeat without effect.
            Err(error) if error.is_not_found() => {
                if self
                    .peers
                    .reserve_payment(offer, id, limit)
                    .await?
                    .is_none()
                {
                    identity.cancel_limit(&context, id).await?;
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Confirms or cancels the oldest reservations of ended subscriptions.
    pub(super) async fn end_offer_limits(&self) -> Result<(), Error> {
        let offers = self.repo.unended_offer_limits(LIMITS_PER_SWEEP).await?;
        let open = offers.len();
        let calls = stream::iter(offers).map(|offer| async move {
            // A step that reserves for the subscription ends first.
            let _lock = self.object_locks.lock(&offer.offer_id).await;
            let ended = match offer.limit {
                OfferLimit::ToConfirm => self.confirm_limits(&offer).await,
                _ => self.cancel_limits(&offer).await,
            };
            (offer.offer_id, ended)
        });
        let answers: Vec<_> = calls.buffer_unordered(PEER_CALLS).collect().await;
        let (mut ended, mut failing) = (Vec::new(), None);
        for (offer_id, answer) in answers {
            match answer {
                Ok(()) => ended.push(offer_id),
                Err(error) => failing = Some(error.to_string()),
            }
        }
        if !ended.is_empty() {
            failpoint::reach(failpoint::OFFER_LIMITS_ENDED);
        }
        self.repo.end_offer_limits(&ended).await?;
        let left = open - ended.len();
        let reason = failing.map(|reason| format!("{left} reservations cannot be ended: {reason}"));
        self.health.set("subscription limits", reason.as_deref());
        Ok(())
    }

    async fn confirm_limits(&self, offer: &Offer) -> Result<(), Error> {
        let context = caused_by(&offer.correlation_id);
        let used = offer
            .in_placement
            .then_some(Minor(offer.allotted_payment_minor));
        for (id, _) in reservations(offer) {
            let identity = &self.peers.identity;
            match identity.confirm_limit(&context, &id, used).await {
                Err(error) if is_gone(&error) => {
                    tracing::error!(
                        reservation_id = id,
                        error = error.describe(),
                        "limit reservation is unknown to identity or already ended"
                    );
                }
                confirmed => confirmed?,
            }
        }
        Ok(())
    }
}

/// Whether identity has no open reservation with this id.
fn is_gone(error: &CallError) -> bool {
    error.is_not_found() || error.reason().as_deref() == Some(ENDED)
}

/// The ids and types of a subscription's reservations.
fn reservations(offer: &Offer) -> impl Iterator<Item = (String, LimitType)> {
    let year = (format!("{}:year", offer.offer_id), LimitType::Investment);
    let day = (format!("{}:day", offer.offer_id), LimitType::Trading);
    [Some(year), offer.in_placement.then_some(day)]
        .into_iter()
        .flatten()
}
