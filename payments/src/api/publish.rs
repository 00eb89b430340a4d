//! Events on `platform.payments.events.v1` (specification 6.3). An event's id derives from its type
//! and key, so a repeat publishes the same id.

use events::Event;
use prost::Message;
use proto::{convert::to_timestamp_us, payments::v1 as pb};
use uuid::Uuid;

use super::convert::money;
use crate::{intent::Intent, payout::Payout, repo::reports::Report};

const SOURCE: &str = "payments";

pub fn intent_created(intent: &Intent) -> Event {
    let message = pb::PaymentIntentCreatedEvent {
        context: context(&intent.correlation_id, intent.created_at_us),
        payment_id: intent.payment_id.clone(),
        user_id: intent.user_id.clone(),
        amount: Some(money(intent.amount)),
        method: intent.method.code(),
        at: Some(to_timestamp_us(intent.created_at_us)),
    };
    event(
        "PaymentIntentCreatedEvent",
        &intent.payment_id,
        &intent.correlation_id,
        intent.created_at_us,
        &message,
    )
}

pub fn fiat_deposited(intent: &Intent, now_us: i64) -> Event {
    let message = pb::FiatDepositedEvent {
        context: context(&intent.correlation_id, now_us),
        user_id: intent.user_id.clone(),
        amount: Some(money(intent.amount)),
        payment_id: intent.payment_id.clone(),
        deposited_at: Some(to_timestamp_us(now_us)),
    };
    event(
        "FiatDepositedEvent",
        &intent.payment_id,
        &intent.correlation_id,
        now_us,
        &message,
    )
}

pub fn payout_confirmed(payout: &Payout, now_us: i64) -> Event {
    let message = pb::PayoutConfirmedEvent {
        context: context(&payout.correlation_id, now_us),
        user_id: payout.user_id.clone(),
        amount: Some(money(payout.amount)),
        payout_id: payout.payout_id.clone(),
        confirmed_at: Some(to_timestamp_us(now_us)),
    };
    event(
        "PayoutConfirmedEvent",
        &payout.payout_id,
        &payout.correlation_id,
        now_us,
        &message,
    )
}

pub fn payout_failed(payout: &Payout, now_us: i64) -> Event {
    let message = pb::PayoutFailedEvent {
        context: context(&payout.correlation_id, now_us),
        user_id: payout.user_id.clone(),
        amount: Some(money(payout.amount)),
        payout_id: payout.payout_id.clone(),
        failure_code: payout.failure_code.clone(),
        failed_at: Some(to_timestamp_us(now_us)),
    };
    event(
        "PayoutFailedEvent",
        &payout.payout_id,
        &payout.correlation_id,
        now_us,
        &message,
    )
}

pub fn reconciliation_alert(report: &Report, correlation_id: &str) -> Event {
    let message = pb::ReconciliationAlertEvent {
        context: context(correlation_id, report.created_at_us),
        report_id: report.report_id.clone(),
        severity: "critical".to_owned(),
        text: report.assessment.to_string(),
        at: Some(to_timestamp_us(report.created_at_us)),
    };
    event(
        "ReconciliationAlertEvent",
        &report.report_id,
        correlation_id,
        report.created_at_us,
        &message,
    )
}

/// Report id and text of an alert event; `None` for any other event.
pub fn read_alert(event: &Event) -> Option<(String, String)> {
    if event.short_type() != "ReconciliationAlertEvent" {
        return None;
    }
    let alert = pb::ReconciliationAlertEvent::decode(event.payload.as_slice()).ok()?;
    Some((alert.report_id, alert.text))
}

/// A change of a user that affects payouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserChange {
    Blocked(String),
    Unblocked,
    /// The profile changed: a name may have left a sanctions list.
    Updated,
}

/// The user of an identity event and what changed; `None` for any other event.
pub fn read_user_change(event: &Event) -> Option<(String, UserChange)> {
    use proto::identity::v1::{UserBlockedEvent, UserUnblockedEvent, UserUpdatedEvent};
    let bytes = event.payload.as_slice();
    match event.short_type() {
        "UserBlockedEvent" => UserBlockedEvent::decode(bytes)
            .ok()
            .map(|blocked| (blocked.user_id, UserChange::Blocked(blocked.reason))),
        "UserUnblockedEvent" => UserUnblockedEvent::decode(bytes)
            .ok()
            .map(|unblocked| (unblocked.user_id, UserChange::Unblocked)),
        "UserUpdatedEvent" => UserUpdatedEvent::decode(bytes)
            .ok()
            .map(|updated| (updated.user_id, UserChange::Updated)),
        _ => None,
    }
}

fn context(correlation_id: &str, now_us: i64) -> Option<proto::common::v1::RequestContext> {
    let mut context = rpc::Context::new(SOURCE);
    correlation_id.clone_into(&mut context.correlation_id);
    context.occurred_at_us = now_us;
    Some(context.to_proto())
}

fn event(
    name: &str,
    key: &str,
    correlation_id: &str,
    occurred_at_us: i64,
    message: &impl Message,
) -> Event {
    let id_name = format!("{SOURCE}:{name}:{key}");
    Event {
        id: Uuid::new_v5(&Uuid::NAMESPACE_OID, id_name.as_bytes()),
        topic: events::topics::PAYMENTS.to_owned(),
        key: key.to_owned(),
        type_name: format!("dfa.payments.v1.{name}"),
        subject: key.to_owned(),
        source: SOURCE.to_owned(),
        correlation_id: correlation_id.to_owned(),
        occurred_at_us,
        payload: message.encode_to_vec(),
    }
}
