//! Reservations of limits (T24, F35). An operation reserves its amount before it acts and confirms
//! or cancels it when it ends. Reserved amounts count as used in the period of the reservation: its
//! day, of INVESTMENT its calendar year.

use proto::{common::v1 as common, identity::v1 as pb};
use rpc::context::answered;
use rpc::status::{failed_precondition, invalid_argument, not_found};
use tonic::{Response, Status};
use types::{Decimal, LimitType};

use super::convert::{amount, limit_type, money};
use super::{Api, events_status, sql_status, unknown_user};
use crate::identity::repo::{self, Reservation};
use crate::identity::rules::{self, ReservationState};

/// Answer to the repeat of a reservation that was cancelled.
const CANCELLED: &str = "Reservation was cancelled";

impl Api {
    /// Checks and reserves in one transaction, so concurrent calls together cannot exceed a limit.
    ///
    /// # Errors
    /// `User not found`; INVALID_ARGUMENT with the field's name.
    pub(super) async fn reserve(
        &self,
        mut ask: pb::ReserveLimitRequest,
    ) -> Result<Response<pb::ReserveLimitResponse>, Status> {
        rpc::context::write(ask.context.take())?;
        let limit_type = limit_type(ask.limit_type)?;
        if ask.operation_type() == common::OperationType::Unspecified {
            return Err(invalid_argument("operation_type", "is required"));
        }
        let mut wanted = Reservation {
            reservation_id: checked_id(ask.reservation_id)?,
            amount: amount("amount", ask.amount.as_ref())?,
            day: self.period(limit_type),
            user_id: ask.user_id,
            limit_type,
            state: ReservationState::Reserved,
            reason: String::new(),
        };
        let mut tx = self.0.db.write().await.map_err(events_status)?;
        let stored = repo::reservation(&mut *tx, &wanted.reservation_id);
        if let Some(stored) = stored.await.map_err(sql_status)? {
            note_difference(&stored, &wanted);
            drop(tx);
            return self.stored_answer(stored).await;
        }
        let user = repo::get(&mut *tx, &wanted.user_id)
            .await
            .map_err(sql_status)?;
        let user = user.ok_or_else(unknown_user)?;
        let limit = repo::limit(&mut *tx, &wanted.user_id, limit_type);
        let limit = limit.await.map_err(sql_status)?;
        let limit = limit.unwrap_or_else(|| self.0.defaults.of(limit_type));
        let used = repo::used(&mut *tx, &wanted.user_id, wanted.day, limit_type);
        let used = used.await.map_err(sql_status)?;
        let verdict = rules::check(user.standing(), limit_type, &limit, used, wanted.amount);
        let mut remaining = verdict.remaining;
        match verdict.allowed {
            Ok(()) => {
                let Reservation {
                    user_id,
                    day,
                    amount,
                    ..
                } = &wanted;
                let used = repo::add_use_in_tx(&mut tx, user_id, *day, limit_type, *amount);
                used.await.map_err(sql_status)?;
                remaining = remaining.checked_sub(*amount).unwrap_or(Decimal::ZERO);
            }
            // The refusal is stored too: a delayed first attempt must not reserve after its repeat
            // was refused.
            Err(reason) => {
                wanted.state = ReservationState::Refused;
                wanted.reason = reason;
            }
        }
        let saved = repo::save_reservation_in_tx(&mut tx, &wanted);
        saved.await.map_err(sql_status)?;
        tx.commit().await.map_err(events_status)?;
        tracing::info!(user_id = wanted.user_id, reservation_id = wanted.reservation_id,
            limit_type = %limit_type, amount = %wanted.amount, state = %wanted.state,
            "limit reservation decided");
        Ok(answered(response(wanted, remaining), false))
    }

    /// Ends an open reservation; returns true if it has ended in this state before. A confirmation
    /// keeps `used` of the reserved amount, or all of it, and returns the rest.
    ///
    /// # Errors
    /// `Reservation not found`; FAILED_PRECONDITION if it was refused or ended differently;
    /// INVALID_ARGUMENT if `used` exceeds the reserved amount.
    pub(super) async fn end_reservation(
        &self,
        context: Option<common::RequestContext>,
        reservation_id: String,
        end: ReservationState,
        used: Option<Decimal>,
    ) -> Result<bool, Status> {
        rpc::context::write(context)?;
        let reservation_id = checked_id(reservation_id)?;
        let mut tx = self.0.db.write().await.map_err(events_status)?;
        let stored = repo::reservation(&mut *tx, &reservation_id);
        let stored = stored.await.map_err(sql_status)?;
        let mut stored =
            stored.ok_or_else(|| not_found("RESERVATION_NOT_FOUND", "Reservation not found"))?;
        if stored.state == end {
            if used.is_some_and(|used| used != stored.amount) {
                rpc::context::note_difference("ConfirmLimit", &reservation_id);
            }
            return Ok(true);
        }
        if stored.state != ReservationState::Reserved {
            let message = format!("Reservation is {}", stored.state);
            return Err(failed_precondition("RESERVATION_ENDED", message));
        }
        stored.state = end;
        let kept = match end {
            ReservationState::Cancelled => Decimal::ZERO,
            _ => used.unwrap_or(stored.amount),
        };
        let change = kept.checked_sub(stored.amount);
        let change = change.map_err(|error| rpc::status::internal(&error))?;
        if change.is_positive() {
            return Err(invalid_argument("amount", "exceeds the reserved amount"));
        }
        if end == ReservationState::Confirmed {
            stored.amount = kept;
        }
        let saved = repo::save_reservation_in_tx(&mut tx, &stored);
        saved.await.map_err(sql_status)?;
        if !change.is_zero() {
            let (user_id, day) = (&stored.user_id, stored.day);
            let used = repo::add_use_in_tx(&mut tx, user_id, day, stored.limit_type, change);
            used.await.map_err(sql_status)?;
        }
        tx.commit().await.map_err(events_status)?;
        tracing::info!(reservation_id, state = %end, "reservation ended");
        Ok(false)
    }

    /// Answer to a repeated reservation, with the amount that currently remains of the limit.
    async fn stored_answer(
        &self,
        stored: Reservation,
    ) -> Result<Response<pb::ReserveLimitResponse>, Status> {
        let limit = self.limit(&stored.user_id, stored.limit_type).await?;
        let used = self.used(&stored.user_id, stored.limit_type).await?;
        let left = limit.daily.checked_sub(used).unwrap_or(Decimal::ZERO);
        let remaining = if left.is_negative() {
            Decimal::ZERO
        } else {
            left
        };
        Ok(answered(response(stored, remaining), true))
    }
}

fn response(stored: Reservation, remaining: Decimal) -> pb::ReserveLimitResponse {
    let reason = match stored.state {
        ReservationState::Reserved | ReservationState::Confirmed => None,
        ReservationState::Refused => Some(stored.reason),
        ReservationState::Cancelled => Some(CANCELLED.to_owned()),
    };
    pb::ReserveLimitResponse {
        allowed: reason.is_none(),
        reason,
        remaining: Some(money(remaining)),
    }
}

/// Logs and counts a repeat with other content, which still receives the stored answer (D50).
fn note_difference(stored: &Reservation, wanted: &Reservation) {
    let content = |of: &Reservation| -> (String, LimitType, Decimal) {
        (of.user_id.clone(), of.limit_type, of.amount)
    };
    if content(stored) != content(wanted) {
        rpc::context::note_difference("ReserveLimit", &stored.reservation_id);
    }
}

fn checked_id(id: String) -> Result<String, Status> {
    if id.is_empty() {
        return Err(invalid_argument("reservation_id", "must not be empty"));
    }
    Ok(id)
}
