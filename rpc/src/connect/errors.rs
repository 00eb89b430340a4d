//! Converts `tonic::Status` to `ConnectError` and back: code, text, details, metadata.
//!
//! Details travel in `grpc-status-details-bin` as a `google.rpc.Status`. Connect requires the type
//! and base64 value of each. The JSON form of each is added for human readers.

use std::sync::LazyLock;

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use connectrpc::{ConnectError, ErrorCode, error::ErrorDetail};
use http::{HeaderMap, HeaderName};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use tonic::{Code, Status};

/// Descriptors of google.rpc, for the JSON form of details.
static GOOGLE_RPC: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(tonic_types::pb::FILE_DESCRIPTOR_SET)
        .expect("compiled-in google.rpc descriptors decode")
});

/// Converts a status to a Connect error.
pub(super) fn to_connect(status: &Status) -> ConnectError {
    let code = ErrorCode::from_grpc_code(status.code() as u32).unwrap_or(ErrorCode::Unknown);
    let error = ConnectError::new(code, status.message());
    let error = details(status.details())
        .into_iter()
        .fold(error, ConnectError::with_detail);
    error.with_trailers(metadata(status.metadata().clone().into_headers()))
}

/// Converts a Connect error to a status, for a request stream that fails in `connectrpc`.
pub(super) fn to_status(error: &ConnectError) -> Status {
    Status::new(
        Code::from_i32(error.code.grpc_code() as i32),
        error.message.clone().unwrap_or_default(),
    )
}

/// Status of a response or of its trailers; `None` if absent or OK.
pub(super) fn failure(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers).filter(|status| status.code() != Code::Ok)
}

fn details(encoded: &[u8]) -> Vec<ErrorDetail> {
    let Ok(status) = tonic_types::pb::Status::decode(encoded) else {
        return Vec::new();
    };
    status
        .details
        .into_iter()
        .map(|any| {
            let type_name = any.type_url.rsplit('/').next().unwrap_or_default();
            ErrorDetail {
                type_url: type_name.to_owned(),
                value: Some(STANDARD_NO_PAD.encode(&any.value)),
                debug: readable(type_name, &any.value),
            }
        })
        .collect()
}

fn readable(type_name: &str, value: &[u8]) -> Option<serde_json::Value> {
    let descriptor = GOOGLE_RPC.get_message_by_name(type_name)?;
    let message = DynamicMessage::decode(descriptor, value).ok()?;
    serde_json::to_value(message).ok()
}

/// Custom metadata only: removes headers of transport and protocol.
pub(super) fn metadata(mut headers: HeaderMap) -> HeaderMap {
    let names: Vec<HeaderName> = headers.keys().cloned().collect();
    for name in names.iter().filter(|name| is_reserved(name.as_str())) {
        headers.remove(name);
    }
    headers
}

fn is_reserved(name: &str) -> bool {
    const RESERVED: [&str; 14] = [
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "date",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
        "proxy-connection",
    ];
    RESERVED.contains(&name) || name.starts_with("grpc-") || name.starts_with("connect-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status;

    // rows: R009
    #[test]
    fn d23_reason_and_field_violations_are_readable_in_connect_json() {
        let error = to_connect(&status::not_found("HOLD_NOT_FOUND", "Hold not found"));
        let json: serde_json::Value = serde_json::from_slice(&error.to_json()).unwrap();
        assert_eq!(json["code"], "not_found");
        assert_eq!(json["message"], "Hold not found");
        assert_eq!(json["details"][0]["type"], "google.rpc.ErrorInfo");
        assert_eq!(json["details"][0]["debug"]["reason"], "HOLD_NOT_FOUND");
        let error = to_connect(&status::invalid_argument("amount", "must be positive"));
        let json: serde_json::Value = serde_json::from_slice(&error.to_json()).unwrap();
        let violations: Vec<_> = json["details"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|detail| detail["type"] == "google.rpc.BadRequest")
            .collect();
        assert_eq!(
            violations[0]["debug"]["fieldViolations"][0]["field"],
            "amount"
        );
    }
}
