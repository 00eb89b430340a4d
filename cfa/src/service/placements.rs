//! Placement of an issue (F34): the end of its period, the decision, and the payments that it
//! returns. `delivery` issues the allotted units.
//!
//! | stage | step |
//! |---|---|
//! | SUBSCRIBE | `Subscribe` makes holds. No subscription is added after the end of the period |
//! | SCREEN | pending holds are made; subscribers whom identity refuses are left out |
//! | decision | one transaction: the allotment with used subscriptions, or the failure. A halted |
//! | | issue waits, and its subscribers are screened again once it is active |
//! | RELEASE | payments without an allotment are released, many per ledger call |
//! | MINT to BURN | see `delivery` |
//!
//! A subscriber may cancel until the decision. It and the decision change the same rows in one
//! store, so one of the two is first. The stage is stored after its step, so a crash repeats the
//! step; every step is idempotent. Each round makes a limited number of steps, so a large placement
//! does not delay the sweep.

use std::collections::HashSet;

use futures::future::join_all;
use service_clients::ledger::{HoldChange, HoldStep};
use service_clients::{LedgerClient, caused_by};
use types::derived;

use super::workers::log_failure;
use super::{PEER_CALLS, RequestMeta, Service, call_wait};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{Instrument, InstrumentStatus, Offer, OfferStatus};
use crate::peers::SOURCE;
use crate::placement::{self, Decision, Lot, Placement, Stage};
use crate::repo::Allotted;
use chain::ChainError;

/// Steps of a placement per sweep or call: pages of subscribers, or parts of the delivery.
const STEPS_PER_ROUND: usize = 20;
/// Subscribers per screening step.
const SCREENED_AT_ONCE: i64 = 100;
/// Payments per ledger call of the release.
const RELEASED_AT_ONCE: i64 = 500;
/// Reason in the ledger of a payment that is released.
const NOT_ALLOTTED: &str = "Subscription NOT_ALLOTTED";

impl Service {
    /// Closes a placement whose period has ended, or continues. Returns it, and true if it had
    /// ended before. A step that fails, or that is not done after `call_wait`, is left to the
    /// sweep.
    ///
    /// # Errors
    /// `PlacementNotFound`; `InstrumentNotActive` for a DRAFT; `PlacementUnderWay` before the end
    /// of the period.
    pub async fn close_placement(
        &self,
        meta: &RequestMeta,
        instrument_id: &str,
    ) -> Result<(Placement, bool), Error> {
        let stored = self.require_placement(instrument_id).await?;
        if stored.stage == Stage::Done {
            return Ok((stored, true));
        }
        let instrument = self.require_instrument(instrument_id).await?;
        if instrument.status == InstrumentStatus::Draft {
            return Err(Refusal::InstrumentNotActive.into());
        }
        if self.clock.now_us() < stored.terms.closes_at_us {
            return Err(Refusal::PlacementUnderWay.into());
        }
        let driven = self.drive_placement(instrument_id, &meta.actor, true);
        // The end of the wait cancels a step as a crash would: every step is idempotent.
        if let Ok(driven) = tokio::time::timeout(call_wait(), driven).await {
            if driven.is_ok() {
                self.health.set_ok(&health_part(instrument_id));
            }
            log_failure("placement", instrument_id, driven);
        }
        Ok((self.require_placement(instrument_id).await?, false))
    }

    pub async fn require_placement(&self, instrument_id: &str) -> Result<Placement, Error> {
        let found = self.repo.placement(instrument_id).await?;
        Ok(found.ok_or(Refusal::PlacementNotFound)?)
    }

    /// Continues the placements whose period has ended, several at once: one that waits for the
    /// chain delays the others little.
    pub(super) async fn close_due_placements(&self) -> Result<(), Error> {
        let due = self.repo.due_placements(self.clock.now_us()).await?;
        for round in due.chunks(PEER_CALLS) {
            let closed = round.iter().map(|id| self.close_due_placement(id));
            join_all(closed).await;
        }
        Ok(())
    }

    async fn close_due_placement(&self, instrument_id: &str) {
        let driven = self.drive_placement(instrument_id, SOURCE, false).await;
        let part = health_part(instrument_id);
        match &driven {
            Ok(()) => self.health.set_ok(&part),
            Err(error) => self.health.set_failing(&part, error.to_string()),
        }
        log_failure("placement", instrument_id, driven);
    }

    /// Makes steps of a placement until it ends or the round is over. `is_asked`: by a call, which
    /// also retries a chain transaction that was reverted too often for the sweep.
    async fn drive_placement(
        &self,
        instrument_id: &str,
        actor: &str,
        is_asked: bool,
    ) -> Result<(), Error> {
        let _lock = self
            .object_locks
            .lock(format!("placement:{instrument_id}"))
            .await;
        for _ in 0..STEPS_PER_ROUND {
            let placement = self.require_placement(instrument_id).await?;
            let instrument = self.require_instrument(instrument_id).await?;
            if !is_asked && placement.attempts >= self.config.submit_attempts_max {
                let text = "the chain reverts a transaction: call ClosePlacement to retry it";
                return Err(ChainError::Refused(text.to_owned()).into());
            }
            match placement.stage {
                Stage::Subscribe => self.begin_closing(placement, actor).await?,
                Stage::Screen => self.screen(placement, &instrument, actor).await?,
                Stage::Release => self.release_unallotted(placement).await?,
                Stage::Mint => self.mint_placed(placement, &instrument).await?,
                Stage::Deliver => self.deliver_part(placement, &instrument).await?,
                Stage::Pay => self.pay_issuer(placement, &instrument).await?,
                Stage::Burn => self.burn_undelivered(placement, &instrument).await?,
                Stage::Done => return Ok(()),
            }
        }
        Ok(())
    }

    /// Stores the progress of a placement with events. The caller holds its lock.
    pub(super) async fn save_placement(
        &self,
        placement: &Placement,
        before: Stage,
        events: &[events::Event],
    ) -> Result<(), Error> {
        let mut tx = self.repo.begin().await?;
        self.save_placement_in_tx(&mut tx, placement, before)
            .await?;
        self.repo.publish_in_tx(&mut tx, events).await?;
        Ok(tx.commit().await?)
    }

    pub(super) async fn save_placement_in_tx(
        &self,
        tx: &mut events::Tx,
        placement: &Placement,
        before: Stage,
    ) -> Result<(), Error> {
        let saved = self.repo.save_placement_in_tx(tx, placement, before);
        match saved.await? {
            true => Ok(()),
            // Only the holder of the placement's lock changes it.
            false => Err(Error::Damaged(format!(
                "placement of {} changed its stage",
                placement.instrument_id
            ))),
        }
    }

    /// Ends the period: from now on no subscription is added.
    async fn begin_closing(&self, mut placement: Placement, actor: &str) -> Result<(), Error> {
        let before = placement.stage;
        placement.stage = placement.next_stage();
        let record = self.audit_placement(&placement, "placement.closing", actor, "");
        self.save_placement(&placement, before, &[record]).await?;
        failpoint::reach(failpoint::PLACEMENT_CLOSING);
        Ok(())
    }

    /// Screens the next page of subscribers, or decides after the last one. Of a halted issue only
    /// the failure is decided.
    async fn screen(
        &self,
        mut placement: Placement,
        instrument: &Instrument,
        actor: &str,
    ) -> Result<(), Error> {
        if instrument.status != InstrumentStatus::Active {
            // A subscriber may be blocked during the halt.
            if !placement.screened_through.is_empty() {
                placement.screened_through.clear();
                self.save_placement(&placement, Stage::Screen, &[]).await?;
            }
            return self.decide(placement, instrument, actor, false).await;
        }
        let (id, after) = (&placement.instrument_id, &placement.screened_through);
        let page = self.repo.live_subscriptions(id, after, SCREENED_AT_ONCE);
        let page = page.await?;
        let Some(last) = page.last() else {
            return self.decide(placement, instrument, actor, true).await;
        };
        placement.screened_through.clone_from(&last.offer_id);
        for round in page.chunks(PEER_CALLS) {
            let screened = round.iter().map(|offer| self.screen_subscriber(offer));
            for outcome in join_all(screened).await {
                outcome?;
            }
        }
        self.save_placement(&placement, Stage::Screen, &[]).await
    }

    /// Makes the hold of a pending subscription, then asks identity about its investor. Ends a
    /// subscription that has expired, whose hold cannot be made, or whose investor may not buy.
    async fn screen_subscriber(&self, offer: &Offer) -> Result<(), Error> {
        let id = &offer.offer_id;
        if offer.expires_at_us <= self.now_us() {
            let ended = self.end_offer(id, OfferStatus::Expired, SOURCE, "");
            return ended.await.map(drop);
        }
        if offer.status == OfferStatus::Pending {
            match self.step_offer(id, false).await {
                Ok(()) => {}
                Err(error) if error.is_transient() || error.is_credential_refused() => {
                    return Err(error);
                }
                // A refusal has deleted it. Any other failure must not delay the others.
                Err(error) => {
                    tracing::warn!(id, %error, "subscription is left out: its hold is not made");
                    let reason = error.to_string();
                    let ended = self.end_offer(id, OfferStatus::NotAllotted, SOURCE, &reason);
                    return ended.await.map(drop);
                }
            }
        }
        let (correlation_id, investor) = (&offer.correlation_id, &offer.user_id);
        let refusal = match self.peers.user_refusal(correlation_id, investor).await {
            Err(Error::Refused(refusal)) => Some(refusal),
            refusal => refusal?,
        };
        let mut reason = refusal.map(|refusal| refusal.to_string());
        if reason.is_none() {
            let (context, identity) = (caused_by(correlation_id), &self.peers.identity);
            let checked = identity.check_sanctions(&context, investor, &offer.instrument_id);
            reason = checked.await?;
        }
        let Some(reason) = reason else { return Ok(()) };
        let ended = self.end_offer(id, OfferStatus::NotAllotted, SOURCE, &reason);
        ended.await.map(drop)
    }

    /// Decides about the active subscriptions, in one transaction with their use or end.
    /// `is_screened`: units may be allotted.
    async fn decide(
        &self,
        mut placement: Placement,
        instrument: &Instrument,
        actor: &str,
        is_screened: bool,
    ) -> Result<(), Error> {
        let id = instrument.instrument_id.as_str();
        let now_us = self.now_us();
        // The decision may halt the issue. Another change of it must not be lost.
        let _lock = self.object_locks.lock(id).await;
        let instrument = self.require_instrument(id).await?;
        let lot = Lot::new(
            instrument.lot_size,
            instrument.decimals,
            placement.terms.price,
        )?;
        let mut tx = self.repo.begin().await?;
        let asked = self.repo.asked_in_tx(&mut tx, id, now_us).await?;
        let (rows, why) = match decision_of(&placement, &instrument, lot, &asked) {
            // Pending subscriptions count here: without them the sum is smaller still.
            Decision::Fail(why) => (Vec::new(), Some(why)),
            Decision::Allot(_) if !is_screened || instrument.status != InstrumentStatus::Active => {
                return Err(Refusal::InstrumentNotActive.into());
            }
            Decision::Allot(_) if asked.iter().any(is_pending) => {
                drop(tx);
                // The next round screens from the start.
                placement.screened_through.clear();
                self.save_placement(&placement, Stage::Screen, &[]).await?;
                return Err(Error::Unavailable(LedgerClient::SERVICE));
            }
            Decision::Allot(lots) => (allotments(&asked, &lots, lot)?, None),
        };
        let allotted: HashSet<&str> = rows.iter().map(|row| row.offer_id.as_str()).collect();
        let left_out = asked.iter().filter(|of| !allotted.contains(of.0.as_str()));
        let records = left_out.map(|of| not_allotted(of, id, now_us));
        let records: Vec<_> = records.collect();
        self.repo.publish_in_tx(&mut tx, &records).await?;
        self.repo.allot_in_tx(&mut tx, &rows, now_us).await?;
        self.repo.end_unallotted_in_tx(&mut tx, id, now_us).await?;
        placement.closed_at_us = Some(now_us);
        placement.allotted_count = rows.len() as i64;
        placement.allotted_minor = rows.iter().map(|row| row.units_minor).sum();
        let units_minor = placement.allotted_minor;
        let reserved = self.repo.reserve_issue_in_tx(&mut tx, id, units_minor);
        if !reserved.await? {
            return Err(Error::Damaged(format!("issue limit of {id}")));
        }
        self.record_decision(tx, placement, instrument, why, actor)
            .await
    }

    /// Stores the decision with its events and commits. `why`: the placement fails.
    async fn record_decision(
        &self,
        mut tx: events::Tx,
        mut placement: Placement,
        instrument: Instrument,
        why: Option<&str>,
        actor: &str,
    ) -> Result<(), Error> {
        let decimals = instrument.decimals;
        placement.stage = placement.next_stage();
        placement.failed = why.is_some();
        self.save_placement_in_tx(&mut tx, &placement, Stage::Screen)
            .await?;
        let action = match why {
            None => "placement.allotted",
            Some(_) => "placement.failed",
        };
        let reason = why.unwrap_or_default();
        let mut events = vec![self.audit_placement(&placement, action, actor, reason)];
        if placement.failed {
            events.extend(self.fail_issue_in_tx(&mut tx, instrument).await?);
            events.push(self.closed_event(&placement, decimals, reason));
        }
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        failpoint::reach(failpoint::PLACEMENT_DECIDED);
        Ok(())
    }

    /// Halts an issue whose placement has failed. Returns its event. The caller holds the
    /// instrument's lock.
    pub(super) async fn fail_issue_in_tx(
        &self,
        tx: &mut events::Tx,
        mut instrument: Instrument,
    ) -> Result<Option<events::Event>, Error> {
        if instrument.status != InstrumentStatus::Active {
            return Ok(None);
        }
        instrument.status = InstrumentStatus::Halted;
        instrument.updated_at_us = self.now_us();
        self.repo.save_instrument_in_tx(tx, &instrument).await?;
        let correlation_id = correlation(&instrument.instrument_id);
        Ok(Some(publish::instrument_updated(
            &instrument,
            &correlation_id,
        )))
    }

    /// Releases the payments of subscriptions without an allotment. The sweep of offers retries
    /// those that the ledger refuses to release.
    async fn release_unallotted(&self, mut placement: Placement) -> Result<(), Error> {
        let id = placement.instrument_id.clone();
        let mut after = String::new();
        for _ in 0..STEPS_PER_ROUND {
            let page = self
                .repo
                .unreleased_subscriptions(&id, &after, RELEASED_AT_ONCE)
                .await?;
            let Some(last) = page.last() else {
                let before = placement.stage;
                placement.stage = placement.next_stage();
                return self.save_placement(&placement, before, &[]).await;
            };
            after.clone_from(&last.offer_id);
            self.release_page(&id, &page).await?;
        }
        Ok(())
    }

    async fn release_page(&self, instrument_id: &str, page: &[Offer]) -> Result<(), Error> {
        // Without an amount a step does nothing on a hold that has ended.
        let steps = page.iter().map(|offer| HoldStep {
            before_operation: 0,
            hold: derived::offer_hold(&offer.offer_id),
            change: HoldChange::Shrink,
            amount: None,
            reason: NOT_ALLOTTED.to_owned(),
        });
        let correlation_id = correlation(instrument_id);
        let released = self
            .peers
            .post_with_steps(&correlation_id, &[], steps.collect(), &[]);
        match released.await {
            Ok(()) => {}
            Err(error) if error.is_transient() => return Err(error),
            // One of them fails: each is released alone.
            Err(error) => {
                tracing::warn!(instrument_id, %error, "payments are released one by one");
                return match self.retry_steps(page).await {
                    true => Err(Error::Unavailable(LedgerClient::SERVICE)),
                    false => Ok(()),
                };
            }
        }
        failpoint::reach(failpoint::PLACEMENT_RELEASED);
        let now_us = self.now_us();
        let mut tx = self.repo.begin().await?;
        self.repo
            .release_offers_in_tx(&mut tx, page, now_us)
            .await?;
        Ok(tx.commit().await?)
    }

    pub(super) fn audit_placement(
        &self,
        placement: &Placement,
        action: &str,
        actor: &str,
        reason: &str,
    ) -> events::Event {
        publish::audit(
            action,
            &placement.instrument_id,
            actor,
            "",
            placement.status().as_str(),
            reason,
            &correlation(&placement.instrument_id),
            self.now_us(),
        )
    }

    /// The event of a placement that has ended.
    pub(super) fn closed_event(
        &self,
        placement: &Placement,
        decimals: u8,
        reason: &str,
    ) -> events::Event {
        let correlation_id = correlation(&placement.instrument_id);
        publish::placement_closed(placement, decimals, reason, &correlation_id, self.now_us())
    }
}

/// Health part of a placement.
fn health_part(instrument_id: &str) -> String {
    format!("placement of {instrument_id}")
}

/// Correlation id of a placement's calls and events.
pub(super) fn correlation(instrument_id: &str) -> String {
    format!("placement:{instrument_id}")
}

/// Id, units and status of a subscription.
type Asked = (String, i64, i32);

fn is_pending((_, _, status): &Asked) -> bool {
    *status == OfferStatus::Pending.code()
}

fn decision_of(
    placement: &Placement,
    instrument: &Instrument,
    lot: Lot,
    asked: &[Asked],
) -> Decision {
    let lots = asked.iter().map(|(_, units, _)| units / lot.units_minor);
    let lots: Vec<i64> = lots.collect();
    let free_minor = instrument.issue_limit_minor.unwrap_or_default() - instrument.issued_minor;
    let size = free_minor.max(0) / lot.units_minor;
    placement::decide(&placement.terms, lot, size, &lots)
}

/// The allotments above zero, numbered from 1.
fn allotments(asked: &[Asked], lots: &[i64], lot: Lot) -> Result<Vec<Allotted>, Error> {
    let pairs = asked.iter().zip(lots).filter(|(_, lots)| **lots > 0);
    pairs
        .zip(1..)
        .map(|(((offer_id, ..), lots), number)| {
            let payment_minor = lot.payment(*lots);
            Ok(Allotted {
                offer_id: offer_id.clone(),
                units_minor: lots * lot.units_minor,
                payment_minor: payment_minor
                    .ok_or_else(|| Error::Damaged("payment of an allotment".into()))?,
                number,
            })
        })
        .collect()
}

/// Audit record of a subscription that the decision gives no units.
fn not_allotted(of: &Asked, instrument_id: &str, now_us: i64) -> events::Event {
    let before = match is_pending(of) {
        true => OfferStatus::Pending,
        false => OfferStatus::Active,
    };
    publish::audit(
        "subscription.not_allotted",
        &of.0,
        SOURCE,
        before.as_str(),
        OfferStatus::NotAllotted.as_str(),
        "",
        &correlation(instrument_id),
        now_us,
    )
}
