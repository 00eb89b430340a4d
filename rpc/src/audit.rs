//! Audit records (D34) as messages of the contract, and the act of a caller.

use prost::Message;
use proto::{audit::v1 as pb, convert::to_timestamp_us};
use service_kit::audit::{Act, AuditRecord, hex};

use crate::{Caller, Context};

/// What a caller did to an object, without states and reason.
pub fn act<'a>(
    caller: &'a Caller,
    context: &'a Context,
    action: &'a str,
    object_id: &'a str,
) -> Act<'a> {
    Act {
        action,
        actor: &caller.subject,
        object_id,
        before: "",
        after: "",
        reason: "",
        request_id: &context.request_id,
        correlation_id: &context.correlation_id,
    }
}

/// A record in a list.
pub fn listed(record: &AuditRecord<'_>, previous_hash: &[u8], hash: &[u8]) -> pb::AuditRecord {
    let act = record.act;
    pb::AuditRecord {
        sequence: record.sequence.unsigned_abs(),
        at: Some(to_timestamp_us(record.at_us)),
        actor: act.actor.to_owned(),
        action: act.action.to_owned(),
        object_id: act.object_id.to_owned(),
        before: act.before.to_owned(),
        after: act.after.to_owned(),
        reason: act.reason.to_owned(),
        request_id: act.request_id.to_owned(),
        correlation_id: act.correlation_id.to_owned(),
        previous_hash: hex(previous_hash),
        hash: hex(hash),
    }
}

/// Content of the event of a service's record.
pub fn event(service: &str, record_id: &str, record: &AuditRecord<'_>) -> Vec<u8> {
    let act = record.act;
    let mut context = Context::new(service);
    act.request_id.clone_into(&mut context.request_id);
    act.correlation_id.clone_into(&mut context.correlation_id);
    context.occurred_at_us = record.at_us;
    let message = pb::AuditRecordEvent {
        context: Some(context.to_proto()),
        record_id: record_id.to_owned(),
        service: service.to_owned(),
        action: act.action.to_owned(),
        actor: act.actor.to_owned(),
        object_id: act.object_id.to_owned(),
        before: act.before.to_owned(),
        after: act.after.to_owned(),
        reason: act.reason.to_owned(),
        at: Some(to_timestamp_us(record.at_us)),
    };
    message.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R003 R260
    #[test]
    fn d34_the_event_of_a_record_has_the_ids_of_its_request() {
        let record = AuditRecord {
            sequence: 1,
            at_us: 1_780_000_000_000_000,
            act: Act {
                action: "payout.cancelled",
                actor: "anna",
                object_id: "po-1",
                before: "PENDING",
                after: "FAILED",
                reason: "OPERATOR",
                request_id: "r-1",
                correlation_id: "c-1",
            },
        };
        let bytes = event("payments", "e-1", &record);
        let event = pb::AuditRecordEvent::decode(bytes.as_slice()).unwrap();
        let context = event.context.unwrap();
        assert_eq!(context.request_id, "r-1");
        assert_eq!(context.correlation_id, "c-1");
        assert_eq!(context.source, "payments");
        assert_eq!(context.occurred_at, event.at);
        assert_eq!(
            (event.action.as_str(), event.actor.as_str()),
            ("payout.cancelled", "anna")
        );
    }
}
