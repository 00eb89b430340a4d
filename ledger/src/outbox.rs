//! Facts of the fold as events of specification 6.5 on `platform.ledger.events.v1`.
//!
//! A velocity limit that changes is an audit record on `platform.audit.events.v1` (D34). Key (D25): the sub-account for balances and holds, the operation for everything else. `type_name` is the full name of the message.

use events::{Event, topics};
use prost::Message;
use proto::{
    audit::v1 as audit,
    common::v1 as common,
    convert::{to_decimal, to_monetary_amount, to_timestamp_us},
    ledger::v1 as wire,
};
use uuid::Uuid;

use crate::{
    facts::Fact,
    model::{Id, Units},
};

/// Events for these facts, in their order. Each fact names its command by index into `contexts`.
pub fn events(facts: &[(usize, Fact)], contexts: &[&rpc::Context], now_us: i64) -> Vec<Event> {
    let wires: Vec<common::RequestContext> = contexts
        .iter()
        .map(|context| common::RequestContext {
            occurred_at: Some(to_timestamp_us(now_us)),
            source: "ledger".to_owned(),
            ..context.to_proto()
        })
        .collect();
    facts
        .iter()
        .map(|(command, fact)| {
            let id = Uuid::now_v7();
            let (topic, package) = match fact {
                Fact::LimitChanged { .. } => (topics::AUDIT, "audit"),
                _ => (topics::LEDGER, "ledger"),
            };
            let (name, key, subject, payload) = encode(fact, id, wires[*command].clone(), now_us);
            Event {
                id,
                topic: topic.to_owned(),
                key: key.to_string(),
                type_name: format!("platform.{package}.v1.{name}"),
                subject: subject.to_string(),
                source: "ledger".to_owned(),
                correlation_id: contexts[*command].correlation_id.clone(),
                occurred_at_us: now_us,
                payload,
            }
        })
        .collect()
}

fn amount(units: &Units) -> Option<common::MonetaryAmount> {
    Some(to_monetary_amount(&units.instrument_id, units.decimal()))
}

/// Message name, key, subject, bytes.
fn encode(
    fact: &Fact,
    event_id: Uuid,
    context: common::RequestContext,
    now_us: i64,
) -> (&'static str, &Id, &Id, Vec<u8>) {
    let context = Some(context);
    let at = Some(to_timestamp_us(now_us));
    match fact {
        Fact::OperationCreated {
            operation_id,
            kind,
            user_id,
            amount: units,
            status: _,
        } => {
            let message = wire::OperationCreatedEvent {
                context,
                operation_id: operation_id.to_string(),
                r#type: kind.code(),
                user_id: user_id.to_string(),
                amount: amount(units),
                created_at: at,
            };
            (
                "OperationCreatedEvent",
                operation_id,
                operation_id,
                message.encode_to_vec(),
            )
        }
        Fact::PostingCreated {
            posting_id,
            operation_id,
            debit_subaccount_id,
            credit_subaccount_id,
            amount: units,
        } => {
            let message = wire::PostingCreatedEvent {
                context,
                posting_id: posting_id.to_string(),
                operation_id: operation_id.to_string(),
                debit_subaccount_id: debit_subaccount_id.to_string(),
                credit_subaccount_id: credit_subaccount_id.to_string(),
                amount: amount(units),
                created_at: at,
            };
            (
                "PostingCreatedEvent",
                operation_id,
                posting_id,
                message.encode_to_vec(),
            )
        }
        Fact::StatusChanged {
            operation_id,
            old,
            new,
            reason,
        } => {
            let message = wire::OperationStatusChangedEvent {
                context,
                operation_id: operation_id.to_string(),
                old_status: old.code(),
                new_status: new.code(),
                reason: reason.clone(),
                changed_at: at,
            };
            (
                "OperationStatusChangedEvent",
                operation_id,
                operation_id,
                message.encode_to_vec(),
            )
        }
        Fact::BalanceUpdated {
            subaccount_id,
            old,
            new,
            operation_id,
        } => {
            let message = wire::BalanceUpdatedEvent {
                context,
                subaccount_id: subaccount_id.to_string(),
                old_balance: Some(to_decimal(*old)),
                new_balance: Some(to_decimal(*new)),
                operation_id: operation_id.to_string(),
                updated_at: at,
            };
            (
                "BalanceUpdatedEvent",
                subaccount_id,
                subaccount_id,
                message.encode_to_vec(),
            )
        }
        Fact::HoldCreated {
            hold_id,
            subaccount_id,
            amount: units,
            reason,
        } => {
            let message = wire::HoldCreatedEvent {
                context,
                hold_id: hold_id.to_string(),
                subaccount_id: subaccount_id.to_string(),
                amount: amount(units),
                reason: reason.clone(),
                created_at: at,
            };
            (
                "HoldCreatedEvent",
                subaccount_id,
                hold_id,
                message.encode_to_vec(),
            )
        }
        Fact::HoldReleased {
            hold_id,
            subaccount_id,
            reason,
        } => {
            let message = wire::HoldReleasedEvent {
                context,
                hold_id: hold_id.to_string(),
                reason: reason.clone(),
                released_at: at,
            };
            (
                "HoldReleasedEvent",
                subaccount_id,
                hold_id,
                message.encode_to_vec(),
            )
        }
        Fact::LimitChanged {
            limit_id,
            before,
            after,
            actor,
            reason,
        } => {
            let message = audit::AuditRecordEvent {
                context,
                record_id: event_id.to_string(),
                service: "ledger".to_owned(),
                action: if after.is_empty() {
                    "limit.removed"
                } else {
                    "limit.set"
                }
                .to_owned(),
                actor: actor.clone(),
                object_id: limit_id.to_string(),
                before: before.clone(),
                after: after.clone(),
                reason: reason.clone(),
                at,
            };
            (
                "AuditRecordEvent",
                limit_id,
                limit_id,
                message.encode_to_vec(),
            )
        }
        Fact::HoldConsumed {
            hold_id,
            subaccount_id,
        } => {
            let message = wire::HoldConsumedEvent {
                context,
                hold_id: hold_id.to_string(),
                consumed_at: at,
            };
            (
                "HoldConsumedEvent",
                subaccount_id,
                hold_id,
                message.encode_to_vec(),
            )
        }
    }
}
