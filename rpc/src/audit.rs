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
    let message = pb::AuditRecordEvent {
        context: None,
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
