//! Audit records of approvals on `platform.audit.events.v1` (D34).

use events::Event;
use prost::Message;
use proto::{audit::v1::AuditRecordEvent, convert::to_timestamp_us};
use uuid::Uuid;

use crate::{
    SOURCE,
    model::{Approval, Status},
};

/// The audit record of a change. `before` is the former status, `None` for a new request. The id
/// derives from approval and status, each of which is reached once.
pub fn changed(approval: &Approval, before: Option<Status>, now_us: i64) -> Event {
    let (action, actor, reason) = match approval.status {
        Status::Pending => ("requested", &approval.requester, &approval.reason),
        Status::Approved => ("approved", &approval.decider, &approval.reason),
        Status::Executed => ("executed", &approval.decider, &approval.reason),
        Status::Failed => ("failed", &approval.decider, &approval.result_text),
        Status::Rejected => ("rejected", &approval.decider, &approval.decision_reason),
        Status::Expired => ("expired", &approval.requester, &approval.reason),
    };
    let name = format!("{SOURCE}:{}:{action}", approval.approval_id);
    let id = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes());
    let mut context = rpc::Context::new(SOURCE);
    approval
        .correlation_id
        .clone_into(&mut context.correlation_id);
    context.occurred_at_us = now_us;
    let record = AuditRecordEvent {
        context: Some(context.to_proto()),
        record_id: id.to_string(),
        service: SOURCE.to_owned(),
        action: format!("approval.{action}"),
        actor: actor.clone(),
        object_id: approval.approval_id.clone(),
        before: before.map_or("", Status::as_str).to_owned(),
        // The exact call: its method and hash.
        after: format!(
            "{} {} {}",
            approval.status.as_str(),
            approval.method,
            approval.hash
        ),
        reason: reason.clone(),
        at: Some(to_timestamp_us(now_us)),
    };
    Event {
        id,
        topic: events::topics::AUDIT.to_owned(),
        key: approval.approval_id.clone(),
        type_name: "dfa.audit.v1.AuditRecordEvent".to_owned(),
        subject: approval.approval_id.clone(),
        source: SOURCE.to_owned(),
        correlation_id: approval.correlation_id.clone(),
        occurred_at_us: now_us,
        payload: record.encode_to_vec(),
    }
}
