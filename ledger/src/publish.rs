//! Encodes effects of the fold as events of specification 6.5 on `platform.ledger.events.v1`.
//!
//! An audit record is published on `platform.audit.events.v1` (D34). The key (D25) is the
//! sub-account for balances and holds, the object for audit records, and otherwise the operation.
//! `type_name` is the full name of the message.

use events::{EventRef, topics};
use prost::{Message, encoding::message};
use prost_types::Timestamp;
use proto::{
    audit::v1 as audit,
    common::v1 as common,
    convert::{to_decimal, to_monetary_amount, to_timestamp_us},
    ledger::v1 as wire,
};
use uuid::Uuid;

use crate::{
    audit::Act,
    effects::{Effect, HoldChange, PostingCreated},
    ids::IdGenerator,
    model::{Id, Units},
};

/// Number of the field `context` in every event.
const CONTEXT_TAG: u32 = 1;

/// Emits the events of these effects in order. Each effect has the index of its command in
/// `contexts`.
pub fn emit_events(
    effects: &[(usize, Effect)],
    contexts: &[&rpc::Context],
    now_us: i64,
    to: &mut dyn FnMut(EventRef<'_>),
) {
    let contexts_encoded: Vec<Vec<u8>> = contexts
        .iter()
        .map(|context| encode_context(context, now_us))
        .collect();
    let mut ids = IdGenerator::at(now_us);
    let mut payload = Vec::new();
    for (command, effect) in effects {
        let id = ids.uuid();
        payload.clear();
        payload.extend_from_slice(&contexts_encoded[*command]);
        encode(effect, id, to_timestamp_us(now_us), &mut payload);
        let (type_name, key, subject) = head(effect);
        to(EventRef {
            id,
            topic: match effect {
                Effect::ActRecorded(_) => topics::AUDIT,
                _ => topics::LEDGER,
            },
            key,
            type_name,
            subject,
            source: "ledger",
            correlation_id: &contexts[*command].correlation_id,
            occurred_at_us: now_us,
            payload: &payload,
        });
    }
}

/// Encodes the context, the first field of every event, once for all events of a command.
fn encode_context(context: &rpc::Context, now_us: i64) -> Vec<u8> {
    let context = common::RequestContext {
        occurred_at: Some(to_timestamp_us(now_us)),
        source: "ledger".to_owned(),
        ..context.to_proto()
    };
    let mut bytes = Vec::new();
    message::encode(CONTEXT_TAG, &context, &mut bytes);
    bytes
}

fn append(message: &impl Message, to: &mut Vec<u8>) {
    message.encode(to).expect("a Vec grows to any length");
}

fn amount(units: &Units) -> Option<common::MonetaryAmount> {
    Some(to_monetary_amount(&units.instrument_id, units.decimal()))
}

/// Full name of the message, key and subject of an effect's event.
fn head(effect: &Effect) -> (&'static str, &Id, &Id) {
    match effect {
        Effect::OperationCreated { operation_id, .. } => {
            let name = "dfa.ledger.v1.OperationCreatedEvent";
            (name, operation_id, operation_id)
        }
        Effect::PostingCreated(posting) => {
            let name = "dfa.ledger.v1.PostingCreatedEvent";
            (name, &posting.operation_id, &posting.posting_id)
        }
        Effect::StatusChanged { operation_id, .. } => {
            let name = "dfa.ledger.v1.OperationStatusChangedEvent";
            (name, operation_id, operation_id)
        }
        Effect::BalanceUpdated { subaccount_id, .. } => {
            let name = "dfa.ledger.v1.BalanceUpdatedEvent";
            (name, subaccount_id, subaccount_id)
        }
        Effect::HoldChanged {
            hold_id,
            subaccount_id,
            change,
        } => {
            let name = match change {
                HoldChange::Created { .. } => "dfa.ledger.v1.HoldCreatedEvent",
                HoldChange::Released { .. } => "dfa.ledger.v1.HoldReleasedEvent",
                HoldChange::Consumed => "dfa.ledger.v1.HoldConsumedEvent",
            };
            (name, subaccount_id, hold_id)
        }
        Effect::ActRecorded(act) => {
            let name = "dfa.audit.v1.AuditRecordEvent";
            (name, &act.object_id, &act.object_id)
        }
    }
}

/// Appends the fields after the context.
fn encode(effect: &Effect, event_id: Uuid, at: Timestamp, to: &mut Vec<u8>) {
    match effect {
        Effect::OperationCreated {
            operation_id,
            kind,
            user_id,
            amount: units,
            status: _,
        } => {
            let message = wire::OperationCreatedEvent {
                context: None,
                operation_id: operation_id.to_string(),
                r#type: kind.code(),
                user_id: user_id.to_string(),
                amount: amount(units),
                created_at: Some(at),
            };
            append(&message, to);
        }
        Effect::PostingCreated(posting) => append(&posting_created(posting, at), to),
        Effect::StatusChanged {
            operation_id,
            old,
            new,
            reason,
        } => {
            let message = wire::OperationStatusChangedEvent {
                context: None,
                operation_id: operation_id.to_string(),
                old_status: old.code(),
                new_status: new.code(),
                reason: reason.clone(),
                changed_at: Some(at),
            };
            append(&message, to);
        }
        Effect::BalanceUpdated {
            subaccount_id,
            old,
            new,
            operation_id,
        } => {
            let message = wire::BalanceUpdatedEvent {
                context: None,
                subaccount_id: subaccount_id.to_string(),
                old_balance: Some(to_decimal(*old)),
                new_balance: Some(to_decimal(*new)),
                operation_id: operation_id.to_string(),
                updated_at: Some(at),
            };
            append(&message, to);
        }
        Effect::HoldChanged {
            hold_id,
            subaccount_id,
            change,
        } => encode_hold(hold_id, subaccount_id, change, at, to),
        Effect::ActRecorded(act) => append(&act_recorded(act, event_id, at), to),
    }
}

fn posting_created(posting: &PostingCreated, at: Timestamp) -> wire::PostingCreatedEvent {
    wire::PostingCreatedEvent {
        context: None,
        posting_id: posting.posting_id.to_string(),
        operation_id: posting.operation_id.to_string(),
        debit_subaccount_id: posting.debit_subaccount_id.to_string(),
        credit_subaccount_id: posting.credit_subaccount_id.to_string(),
        amount: amount(&posting.amount),
        created_at: Some(at),
    }
}

fn encode_hold(
    hold_id: &Id,
    subaccount_id: &Id,
    change: &HoldChange,
    at: Timestamp,
    to: &mut Vec<u8>,
) {
    let hold_id = hold_id.to_string();
    match change {
        HoldChange::Created {
            amount: units,
            reason,
        } => {
            let message = wire::HoldCreatedEvent {
                context: None,
                hold_id,
                subaccount_id: subaccount_id.to_string(),
                amount: amount(units),
                reason: reason.clone(),
                created_at: Some(at),
            };
            append(&message, to);
        }
        HoldChange::Released { reason } => {
            let message = wire::HoldReleasedEvent {
                context: None,
                hold_id,
                reason: reason.clone(),
                released_at: Some(at),
            };
            append(&message, to);
        }
        HoldChange::Consumed => {
            let message = wire::HoldConsumedEvent {
                context: None,
                hold_id,
                consumed_at: Some(at),
            };
            append(&message, to);
        }
    }
}

fn act_recorded(act: &Act, event_id: Uuid, at: Timestamp) -> audit::AuditRecordEvent {
    audit::AuditRecordEvent {
        context: None,
        record_id: event_id.to_string(),
        service: "ledger".to_owned(),
        action: act.action.to_owned(),
        actor: act.actor.clone(),
        object_id: act.object_id.to_string(),
        before: act.before.clone(),
        after: act.after.clone(),
        reason: act.reason.clone(),
        at: Some(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{OperationStatus, OperationType};
    use types::Minor;

    #[test]
    fn an_event_is_the_bytes_of_its_message() {
        let effects = [(
            0,
            Effect::OperationCreated {
                operation_id: "o1".into(),
                kind: OperationType::Fee,
                user_id: "u1".into(),
                amount: Units {
                    instrument_id: "CFA-RUB".into(),
                    decimals: 2,
                    minor: Minor(150),
                },
                status: OperationStatus::Settled,
            },
        )];
        let context = rpc::Context {
            correlation_id: "c1".to_owned(),
            ..rpc::Context::new("test")
        };
        let mut emitted = Vec::new();
        emit_events(&effects, &[&context], 1_780_000_000_000_001, &mut |event| {
            emitted.push(event.to_event())
        });
        let event = emitted.remove(0);
        let message = wire::OperationCreatedEvent::decode(&*event.payload).unwrap();
        assert_eq!(message.encode_to_vec(), event.payload);
        assert_eq!(message.operation_id, "o1");
        let context = message.context.unwrap();
        assert_eq!(
            (&*context.correlation_id, &*context.source),
            ("c1", "ledger")
        );
        assert_eq!(event.type_name, "dfa.ledger.v1.OperationCreatedEvent");
    }
}
