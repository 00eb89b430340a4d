//! JSON of the HTTP diagnostic reads (D43): proto3 JSON of the matching RPC's resource.
//!
//! Enum names are bare (T40: `OPEN`, not `ORDER_STATUS_OPEN`). A list has the form
//! `{ "items": [..], "next_page_token": ".." }`, an error the Connect form
//! `{ "code", "message", "details" }` with Connect's HTTP status.
//!
//! As in proto3 JSON, default values are omitted and 64-bit integers are text.

use axum::response::{IntoResponse, Response};
use http::{
    StatusCode,
    header::{ALLOW, CONTENT_TYPE},
};
use prost::Message;
use prost_reflect::{
    DynamicMessage, EnumDescriptor, Kind, MessageDescriptor, ReflectMessage, Value as Reflected,
};
use serde_json::{Value, json};
use tonic::Status;

use crate::{connect, contract::Contract, status};

/// Body of an HTTP read.
pub type Json = axum::Json<Value>;

/// Error of an HTTP read: `async fn read(..) -> Result<Json, HttpError>`; `?` converts a `Status`.
#[derive(Debug)]
pub struct HttpError(pub Status);

impl From<Status> for HttpError {
    fn from(status: Status) -> Self {
        HttpError(status)
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        connect::unary_error(&self.0)
    }
}

/// Longest text of a framework refusal that is passed on, in bytes.
const PLAIN_TEXT_BYTES_MAX: usize = 4_096;

/// Converts axum's own refusals (an unreadable query, an unknown method) to the same form; keeps
/// their HTTP status.
pub(crate) async fn plain_errors(response: Response) -> Response {
    let http_status = response.status();
    let is_json = response
        .headers()
        .get(CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
    if is_json || !http_status.is_client_error() {
        return response;
    }
    let (parts, body) = response.into_parts();
    let text = axum::body::to_bytes(body, PLAIN_TEXT_BYTES_MAX)
        .await
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    let text = match text.as_str() {
        "" => http_status.canonical_reason().unwrap_or("Refused"),
        text => text,
    };
    let status = match http_status {
        StatusCode::NOT_FOUND => status::not_found("PATH_NOT_FOUND", "Path not found"),
        StatusCode::METHOD_NOT_ALLOWED => status::unimplemented(text),
        _ => status::invalid_argument("request", text),
    };
    let mut answer = connect::unary_error(&status);
    *answer.status_mut() = http_status;
    if let Some(allow) = parts.headers.get(ALLOW) {
        answer.headers_mut().insert(ALLOW, allow.clone());
    }
    answer
}

/// One resource, for instance `resource(&operation, "dfa.ledger.v1.Operation")`.
///
/// # Panics
/// Bug: a type name that is not in the contract, or a message of another type.
pub fn resource(message: &impl Message, type_name: &str) -> Json {
    axum::Json(bare(message, &descriptor(type_name)))
}

/// A page of resources.
///
/// # Panics
/// As [`resource`].
pub fn list<M: Message>(items: &[M], type_name: &str, next_page_token: &str) -> Json {
    let descriptor = descriptor(type_name);
    let items: Vec<_> = items.iter().map(|item| bare(item, &descriptor)).collect();
    axum::Json(json!({ "items": items, "next_page_token": next_page_token }))
}

/// One resource as a value, for callers that compose their own body.
///
/// # Panics
/// As [`resource`].
pub fn value(message: &impl Message, type_name: &str) -> Value {
    bare(message, &descriptor(type_name))
}

/// The message of a text that [`value`] wrote; `None`: the text is not one. For types without
/// enumerations, whose bare names are not read.
///
/// # Panics
/// A type name that is not in the contract.
pub fn message<M: Message + Default>(text: &str, type_name: &str) -> Option<M> {
    let mut json = serde_json::Deserializer::from_str(text);
    let message = DynamicMessage::deserialize(descriptor(type_name), &mut json).ok()?;
    message.transcode_to().ok()
}

fn descriptor(type_name: &str) -> MessageDescriptor {
    Contract::platform()
        .pool()
        .get_message_by_name(type_name)
        .unwrap_or_else(|| panic!("{type_name} is not a message of the contract"))
}

fn bare(message: &impl Message, descriptor: &MessageDescriptor) -> Value {
    let message = DynamicMessage::decode(descriptor.clone(), message.encode_to_vec().as_slice())
        .unwrap_or_else(|error| panic!("not a {}: {error}", descriptor.full_name()));
    let mut value = written(message, |message| serde_json::to_value(message))
        .expect("a decoded message of the contract has a JSON form");
    strip_message(descriptor, &mut value);
    value
}

/// Writes a message as JSON. Clamps times that have no JSON form, so a stored row never makes a
/// read fail.
pub(crate) fn written<T, E>(
    mut message: DynamicMessage,
    write: impl Fn(&DynamicMessage) -> Result<T, E>,
) -> Result<T, E> {
    write(&message).or_else(|_| {
        clamp_times(&mut message);
        write(&message)
    })
}

fn clamp_times(message: &mut DynamicMessage) {
    if message.descriptor().full_name() == "google.protobuf.Timestamp" {
        if let Ok(time) = message.transcode_to::<prost_types::Timestamp>() {
            message.clear();
            // Both are the same message.
            let _ = message.transcode_from(&proto::times::clamped(time));
        }
        return;
    }
    for (_, value) in message.fields_mut() {
        match value {
            Reflected::Message(message) => clamp_times(message),
            Reflected::List(items) => items
                .iter_mut()
                .filter_map(Reflected::as_message_mut)
                .for_each(clamp_times),
            Reflected::Map(entries) => entries
                .values_mut()
                .filter_map(Reflected::as_message_mut)
                .for_each(clamp_times),
            _ => {}
        }
    }
}

fn strip_message(descriptor: &MessageDescriptor, value: &mut Value) {
    // Well-known types have JSON forms of their own and contain no enum of the contract.
    let Value::Object(members) = value else {
        return;
    };
    for field in descriptor.fields() {
        let Some(value) = members.get_mut(field.json_name()) else {
            continue;
        };
        let kind = match field.kind() {
            Kind::Message(entry) if field.is_map() => entry.map_entry_value_field().kind(),
            kind => kind,
        };
        match value {
            Value::Array(items) => items.iter_mut().for_each(|item| strip(&kind, item)),
            Value::Object(entries) if field.is_map() => {
                entries.values_mut().for_each(|item| strip(&kind, item));
            }
            single => strip(&kind, single),
        }
    }
}

fn strip(kind: &Kind, value: &mut Value) {
    match kind {
        Kind::Message(descriptor) => strip_message(descriptor, value),
        Kind::Enum(descriptor) => {
            if let Value::String(name) = value {
                *name = bare_enum_name(descriptor, name).to_owned();
            }
        }
        _ => {}
    }
}

/// `OPEN` of `ORDER_STATUS_OPEN`: the name without the enum's prefix.
pub fn bare_enum_name<'a>(descriptor: &EnumDescriptor, name: &'a str) -> &'a str {
    let mut prefix = String::new();
    for (index, letter) in descriptor.name().char_indices() {
        if letter.is_ascii_uppercase() && index > 0 {
            prefix.push('_');
        }
        prefix.push(letter.to_ascii_uppercase());
    }
    prefix.push('_');
    name.strip_prefix(&prefix).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use proto::common::v1::OperationStatus;

    use super::*;

    #[test]
    fn a_stored_time_out_of_range_is_shown_clamped() {
        let hold = |expires_at| proto::ledger::v1::Hold {
            hold_id: "hold-1".into(),
            expires_at: Some(expires_at),
            ..Default::default()
        };
        let at = |seconds, nanos| prost_types::Timestamp { seconds, nanos };
        let holds = [
            hold(at(i64::MAX, 0)),
            hold(at(i64::MIN, 5)),
            hold(at(1_700_000_000, -1)),
        ];
        let axum::Json(body) = list(&holds, "dfa.ledger.v1.Hold", "");
        let shown = [
            "9999-12-31T23:59:59.999999999Z",
            "0001-01-01T00:00:00Z",
            "2023-11-14T22:13:19.999999999Z",
        ];
        for (item, expected) in shown.into_iter().enumerate() {
            assert_eq!(body["items"][item]["expiresAt"], expected);
        }
    }

    #[test]
    fn d43_resources_have_bare_enum_names_and_lists_their_token() {
        let pool = Contract::platform();
        let status = pool
            .pool()
            .get_enum_by_name("dfa.common.v1.OperationStatus")
            .unwrap();
        assert_eq!(
            bare_enum_name(&status, OperationStatus::OnchainSubmitted.as_str_name()),
            "ONCHAIN_SUBMITTED"
        );
        let operation = proto::ledger::v1::Operation {
            operation_id: "op-1".into(),
            status: OperationStatus::Finalized as i32,
            ..Default::default()
        };
        let axum::Json(body) = list(&[operation], "dfa.ledger.v1.Operation", "");
        assert_eq!(
            body,
            json!({"items": [{"operationId": "op-1", "status": "FINALIZED"}], "next_page_token": ""})
        );
    }
}
