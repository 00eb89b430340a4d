//! Conversion between the core and the contract.

use proto::{approvals::v1 as pb, convert::to_timestamp_us};
use rpc::forward;
use tonic::Status as RpcStatus;

use crate::{
    model::{Approval, Refusal, Status},
    service::Fault,
};

/// Retry hint for a person with too many open requests, in milliseconds.
const RETRY_MS: u64 = 60_000;

pub fn approval(approval: &Approval) -> pb::Approval {
    // Empty in lists.
    let request_json = match approval.request.is_empty() {
        true => String::new(),
        false => forward::request_json(&approval.method, &approval.request).unwrap_or_default(),
    };
    let at = |at_us: i64| (at_us != 0).then(|| to_timestamp_us(at_us));
    pb::Approval {
        approval_id: approval.approval_id.clone(),
        status: approval.status.code(),
        method: approval.method.clone(),
        request: approval.request.clone().into(),
        request_json,
        hash: approval.hash.clone(),
        reason: approval.reason.clone(),
        document: approval.document.clone(),
        requested_by: approval.requester.clone(),
        decided_by: approval.decider.clone(),
        decision_reason: approval.decision_reason.clone(),
        attempts: approval.attempts,
        result_code: approval.result_code,
        result_text: approval.result_text.clone(),
        created_at: at(approval.created_at_us),
        expires_at: at(approval.expires_at_us),
        decided_at: at(approval.decided_at_us),
        ended_at: at(approval.ended_at_us),
    }
}

/// The status of a filter; `None` for any.
pub fn status(number: i32) -> Result<Option<Status>, RpcStatus> {
    if number == 0 {
        return Ok(None);
    }
    let unknown = || rpc::status::invalid_argument("status", format!("has no value {number}"));
    Status::from_code(number).map(Some).ok_or_else(unknown)
}

impl From<Fault> for RpcStatus {
    fn from(fault: Fault) -> RpcStatus {
        use rpc::status::{
            failed_precondition, internal, invalid_argument, not_found, permission_denied,
            resource_exhausted,
        };

        let text = fault.to_string();
        match fault {
            Fault::NotFound => not_found("APPROVAL_NOT_FOUND", text),
            Fault::NoPerson => permission_denied("PERSON_REQUIRED", text),
            Fault::RoleRequired => permission_denied("ROLE_REQUIRED", text),
            Fault::NoApproval => failed_precondition("NO_APPROVAL", text),
            Fault::TooManyOpen => resource_exhausted("TOO_MANY_APPROVALS", text, RETRY_MS),
            Fault::Decision(Refusal::NotPending) => {
                failed_precondition("APPROVAL_NOT_PENDING", text)
            }
            Fault::Decision(Refusal::Expired) => failed_precondition("APPROVAL_EXPIRED", text),
            Fault::Decision(Refusal::SamePerson) => permission_denied("SAME_PERSON", text),
            Fault::Decision(Refusal::HashMismatch) => failed_precondition("HASH_MISMATCH", text),
            Fault::Invalid { field, problem } => invalid_argument(field, problem),
            Fault::Request(status) => status,
            fault @ (Fault::Store(_) | Fault::Sql(_)) => internal(&fault),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_number_and_name_of_the_contract() {
        for known in Status::ALL {
            let named = pb::ApprovalStatus::try_from(known.code()).expect("a known number");
            assert_eq!(named.as_str_name(), format!("APPROVAL_STATUS_{known}"));
            assert_eq!(status(known.code()).expect("accepted"), Some(*known));
        }
        assert_eq!(status(0).expect("any"), None);
        let unknown = status(Status::Expired.code() + 1);
        assert!(unknown.is_err(), "{unknown:?}");
    }
}
