//! Vocabulary of refusals (D23): an exact message text, and a machine-readable reason in
//! `google.rpc.ErrorInfo` with domain `platform`.
//!
//! A reason has one meaning, so a caller never parses the text. [`internal`] is for failures of the
//! platform: it logs the error chain and hides it from the caller.

use std::{collections::HashMap, error::Error, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// `ErrorInfo.domain` of every error.
pub const DOMAIN: &str = "platform";

/// The call that requests an approval.
pub const REQUEST_APPROVAL: &str = "dfa.approvals.v1.ApprovalService/RequestApproval";

fn with_reason(code: Code, reason: &str, message: impl Into<String>) -> Status {
    with_metadata(code, reason, message, HashMap::new())
}

/// An error with a reason and metadata in `ErrorInfo`.
///
/// For instance the balance breakdown of `Insufficient balance`.
pub fn with_metadata(
    code: Code,
    reason: &str,
    message: impl Into<String>,
    metadata: HashMap<String, String>,
) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(reason, DOMAIN, metadata);
    Status::with_error_details(code, message, details)
}

/// 404, for instance `not_found("HOLD_NOT_FOUND", "Hold not found")`.
pub fn not_found(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::NotFound, reason, message)
}

/// 400: the request is well formed, but the state refuses it.
pub fn failed_precondition(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::FailedPrecondition, reason, message)
}

/// 400: a person calls a method that needs an approval (D32). The metadata names the method, and
/// the call that requests the approval.
pub fn approval_required(method: &str) -> Status {
    let metadata = HashMap::from([
        (
            "method".to_owned(),
            method.trim_start_matches('/').to_owned(),
        ),
        ("request_with".to_owned(), REQUEST_APPROVAL.to_owned()),
    ]);
    let text = "This call needs an approval";
    with_metadata(
        Code::FailedPrecondition,
        "APPROVAL_REQUIRED",
        text,
        metadata,
    )
}

/// 400: one bad field, named as in the schema with dots (`context.idempotency_key`).
pub fn invalid_argument(field: impl Into<String>, description: impl Into<String>) -> Status {
    invalid_arguments([(field.into(), description.into())])
}

/// 400: several bad fields. The message is that of the first.
///
/// # Panics
/// Bug: called with no field.
pub fn invalid_arguments(fields: impl IntoIterator<Item = (String, String)>) -> Status {
    let mut details = ErrorDetails::new();
    let mut message = None;
    for (field, description) in fields {
        message.get_or_insert_with(|| format!("{field}: {description}"));
        details.add_bad_request_violation(field, description);
    }
    let message = message.expect("invalid_arguments names at least one field");
    details.set_error_info("INVALID_ARGUMENT", DOMAIN, HashMap::new());
    Status::with_error_details(Code::InvalidArgument, message, details)
}

/// 409.
pub fn already_exists(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::AlreadyExists, reason, message)
}

/// 401.
pub fn unauthenticated(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::Unauthenticated, reason, message)
}

/// 403.
pub fn permission_denied(reason: &str, message: impl Into<String>) -> Status {
    with_reason(Code::PermissionDenied, reason, message)
}

/// 501.
pub fn unimplemented(message: impl Into<String>) -> Status {
    with_reason(Code::Unimplemented, "UNIMPLEMENTED", message)
}

/// 503 with RetryInfo: `what` names the unavailable dependency (bank, chain, identity, Kafka,
/// another service).
pub fn unavailable(what: &str, retry_ms: u64) -> Status {
    retryable(
        Code::Unavailable,
        "UNAVAILABLE",
        format!("{what} is unavailable"),
        retry_ms,
    )
}

/// 429 with RetryInfo.
pub fn resource_exhausted(reason: &str, message: impl Into<String>, retry_ms: u64) -> Status {
    retryable(Code::ResourceExhausted, reason, message, retry_ms)
}

fn retryable(code: Code, reason: &str, message: impl Into<String>, retry_ms: u64) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(reason, DOMAIN, HashMap::new());
    details.set_retry_info(Some(Duration::from_millis(retry_ms)));
    Status::with_error_details(code, message, details)
}

/// 500. The log has the whole error chain, the caller gets `Internal error`.
pub fn internal(error: &dyn Error) -> Status {
    let mut chain = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        chain.push_str(": ");
        chain.push_str(&cause.to_string());
        source = cause.source();
    }
    tracing::error!(error = %chain, "internal error");
    Status::internal("Internal error")
}

/// `ErrorInfo.reason` of a status, if it carries one.
pub fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

/// A value of `ErrorInfo.metadata` of a status.
pub fn detail(status: &Status, name: &str) -> Option<String> {
    status.get_details_error_info()?.metadata.remove(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d23_reason_domain_and_text_survive_the_wire_form() {
        let status = not_found("HOLD_NOT_FOUND", "Hold not found");
        let headers = status.clone().into_http::<()>().into_parts().0.headers;
        let read = Status::from_header_map(&headers).unwrap();
        assert_eq!(read.code(), Code::NotFound);
        assert_eq!(read.message(), "Hold not found");
        let info = read.get_details_error_info().unwrap();
        assert_eq!(
            (info.reason.as_str(), info.domain.as_str()),
            ("HOLD_NOT_FOUND", "platform")
        );
    }

    #[test]
    fn d23_bad_field_names_the_field_and_retry_is_told() {
        let status = invalid_argument("context.idempotency_key", "must not be empty");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "context.idempotency_key");
        let away = unavailable("Identity service", 1_500);
        assert_eq!(away.message(), "Identity service is unavailable");
        assert_eq!(
            away.get_details_retry_info().unwrap().retry_delay,
            Some(Duration::from_millis(1_500))
        );
        let hidden = internal(&std::io::Error::other("password=1"));
        assert!(!hidden.message().contains("password"));
    }
}
