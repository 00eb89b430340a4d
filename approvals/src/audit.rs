//! Audit records of approvals (D34): one per status that an approval reaches.

use service_kit::audit::Act;

use crate::model::{Approval, Status};

/// State after a change: the status and the exact call, by its method and hash.
pub fn state(approval: &Approval) -> String {
    format!(
        "{} {} {}",
        approval.status.as_str(),
        approval.method,
        approval.hash
    )
}

/// The act that brought an approval into its status. `before` is the former status, `None` for a
/// new request; `after` is its [`state`].
pub fn act<'a>(
    approval: &'a Approval,
    before: Option<Status>,
    after: &'a str,
    request_id: &'a str,
) -> Act<'a> {
    let (action, actor, reason) = match approval.status {
        Status::Pending => ("approval.requested", &approval.requester, &approval.reason),
        Status::Approved => ("approval.approved", &approval.decider, &approval.reason),
        Status::Executed => ("approval.executed", &approval.decider, &approval.reason),
        Status::Failed => ("approval.failed", &approval.decider, &approval.result_text),
        Status::Rejected => (
            "approval.rejected",
            &approval.decider,
            &approval.decision_reason,
        ),
        Status::Expired => ("approval.expired", &approval.requester, &approval.reason),
    };
    Act {
        action,
        actor,
        object_id: &approval.approval_id,
        before: before.map_or("", Status::as_str),
        after,
        reason,
        request_id,
        correlation_id: &approval.correlation_id,
    }
}
