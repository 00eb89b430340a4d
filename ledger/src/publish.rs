//! Encodes effects of the fold as events of specification 6.5 on `platform.ledger.events.v1`.
//!
//! An audit record is published on `platform.audit.events.v1` (D34). The key (D25) is the
//! sub-account for balances and holds, the object for audit records, and otherwise the operation.
//! `type_name` is the full name of the message.

use events::{EventRef, topics};
use prost::{Message, encoding::message};
use proto::{
    audit::v1 as audit,
    common::v1 as common,
    convert::{to_decimal, to_monetary_amount, to_timestamp_us},
    ledger::v1 as wire,
};
use uuid::Uuid;

use crate::{
    effects::Effect,
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
        let (type_name, key, subject) = encode(effect, id, now_us, &mut payload);
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

/// Appends the fields after the context. Returns the full message name, the key and the subject.
fn encode<'a>(
    effect: &'a Effect,
    event_id: Uuid,
    now_us: i64,
    to: &mut Vec<u8>,
) -> (&'static str, &'a Id, &'a Id) {
    let at = Some(to_timestamp_us(now_us));
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
                created_at: at,
            };
            append(&message, to);
            (
                "dfa.ledger.v1.OperationCreatedEvent",
                operation_id,
                operation_id,
            )
        }
        Effect::PostingCreated {
            posting_id,
            operation_id,
            debit_subaccount_id,
            credit_subaccount_id,
            amount: units,
        } => {
            let message = wire::PostingCreatedEvent {
                context: None,
                posting_id: posting_id.to_string(),
                operation_id: operation_id.to_string(),
                debit_subaccount_id: debit_subaccount_id.to_string(),
                credit_subaccount_id: credit_subaccount_id.to_string(),
                amount: amount(units),
                created_at: at,
            };
            append(&message, to);
            (
                "dfa.ledger.v1.PostingCreatedEvent",
                operation_id,
                posting_id,
            )
        }
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
                changed_at: at,
            };
            append(&message, to);
            (
                "dfa.ledger.v1.OperationStatusChangedEvent",
                operation_id,
                operation_id,
            )
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
                updated_at: at,
            };
            append(&message, to);
            (
                "dfa.ledger.v1.BalanceUpdatedEvent",
                subaccount_id,
                subaccount_id,
            )
        }
        Effect::HoldCreated {
            hold_id,
            subaccount_id,
            amount: units,
            reason,
        } => {
            let message = wire::HoldCreatedEvent {
                context: None,
                hold_id: hold_id.to_string(),
                subaccount_id: subaccount_id.to_string(),
                amount: amount(units),
                reason: reason.clone(),
                created_at: at,
            };
            append(&message, to);
            ("dfa.ledger.v1.HoldCreatedEvent", subaccount_id, hold_id)
        }
        Effect::HoldReleased {
            hold_id,
            subaccount_id,
            reason,
        } => {
            let message = wire::HoldReleasedEvent {
                context: None,
                hold_id: hold_id.to_string(),
                reason: reason.clone(),
                released_at: at,
            };
            append(&message, to);
            ("dfa.ledger.v1.HoldReleasedEvent", subaccount_id, hold_id)
        }
        Effect::ActRecorded(act) => {
            let message = audit::AuditRecordEvent {
                context: None,
                record_id: event_id.to_string(),
                service: "ledger".to_owned(),
                action: act.action.to_owned(),
                actor: act.actor.clone(),
                object_id: act.object_id.to_string(),
                before: act.before.clone(),
                after: act.after.clone(),
                reason: act.reason.clone(),
                at,
            };
            append(&message, to);
            let object = &act.object_id;
            ("dfa.audit.v1.AuditRecordEvent", object, object)
        }
        Effect::HoldConsumed {
            hold_id,
            subaccount_id,
        } => {
            let message = wire::HoldConsumedEvent {
                context: None,
                hold_id: hold_id.to_string(),
                consumed_at: at,
            };
            append(&message, to);
            ("dfa.ledger.v1.HoldConsumedEvent", subaccount_id, hold_id)
        }
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
