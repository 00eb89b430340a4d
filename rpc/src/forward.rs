//! Calls of any method by its descriptor, without generated types: the approvals service stores a
//! request as bytes and makes the call later.
//!
//! A request is built from its JSON form alone, so its bytes contain nothing that a reader of the
//! JSON form does not see.

use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use prost::Message;
use prost_reflect::{DynamicMessage, Kind, MessageDescriptor, Value};
use proto::unary::BytesCodec;
use tonic::{Request, Status, client::Grpc, metadata::MetadataMap};

use crate::{Approved, Channel, Context, contract::Contract, json, status};

/// Encodes the request of `package.Service/Method` from its proto3 JSON form, with this context in
/// place of its own.
///
/// # Errors
/// INVALID_ARGUMENT for an unknown method, for text that is not such a request, and for values that
/// the method's server refuses by their form (D48, D49).
pub fn encode(method: &str, text: &str, context: &Context) -> Result<Vec<u8>, Status> {
    let input = input_of(method)?;
    let bad = |why: String| status::invalid_argument("request", why);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let not_json =
        |error: serde_json::Error| bad(format!("is not a {}: {error}", input.full_name()));
    let message = DynamicMessage::deserialize(input.clone(), &mut deserializer);
    let mut message = message.map_err(not_json)?;
    deserializer.end().map_err(not_json)?;
    let field = input.get_field_by_name("context");
    let field = field.ok_or_else(|| bad("has no context".to_owned()))?;
    let Kind::Message(kind) = field.kind() else {
        return Err(bad("has no context".to_owned()));
    };
    let context = context.to_proto().encode_to_vec();
    let context = DynamicMessage::decode(kind, context.as_slice());
    let context = context.map_err(|error| status::internal(&error))?;
    message.set_field(&field, Value::Message(context));
    let bytes = message.encode_to_vec();
    let problems = proto::checks::problems(input.full_name(), &bytes);
    if problems.is_empty() {
        return Ok(bytes);
    }
    let fields = problems.into_iter();
    Err(status::invalid_arguments(fields.map(|(field, problem)| {
        (format!("request.{field}"), problem)
    })))
}

/// The proto3 JSON form of a request of `package.Service/Method`.
///
/// # Errors
/// INVALID_ARGUMENT for an unknown method or bytes that are not such a request.
pub fn request_json(method: &str, request: &[u8]) -> Result<String, Status> {
    let input = input_of(method)?;
    let name = input.full_name().to_owned();
    json_of(input, request)
        .ok_or_else(|| status::invalid_argument("request", format!("is not a {name}")))
}

/// The proto3 JSON form of an answer of `package.Service/Method`; `None` for other bytes.
pub fn answer_json(method: &str, answer: &[u8]) -> Option<String> {
    let contract = Contract::platform();
    let output = contract.method(&format!("/{method}"))?.output.clone();
    json_of(output, answer)
}

fn input_of(method: &str) -> Result<MessageDescriptor, Status> {
    let contract = Contract::platform();
    let found = contract.method(&format!("/{method}"));
    let found = found.ok_or_else(|| status::invalid_argument("method", "is unknown"))?;
    Ok(found.input.clone())
}

fn json_of(descriptor: MessageDescriptor, message: &[u8]) -> Option<String> {
    let message = DynamicMessage::decode(descriptor, message).ok()?;
    json::written(message, serde_json::to_string).ok()
}

/// Calls `package.Service/Method` with an encoded request, in the name of an approval. Returns the
/// encoded answer.
///
/// # Errors
/// The status of the answer; UNAVAILABLE or DEADLINE_EXCEEDED if there is none in time.
pub async fn call(
    channel: Channel,
    method: &str,
    request: Vec<u8>,
    approved: &Approved,
    timeout: Duration,
) -> Result<Bytes, Status> {
    let path = PathAndQuery::try_from(format!("/{method}"))
        .map_err(|_| status::invalid_argument("method", "is not a path"))?;
    let mut headers = http::HeaderMap::new();
    let written = approved.write(&mut headers);
    written.map_err(|error| status::internal(&error))?;
    let mut request = Request::new(Bytes::from(request));
    *request.metadata_mut() = MetadataMap::from_headers(headers);
    request.set_timeout(timeout);
    let mut client = Grpc::new(channel);
    let answered = async move {
        client.ready().await?;
        client.unary(request, path, BytesCodec).await
    };
    // The server ends the call at its deadline; this bounds a connection that does not answer.
    match tokio::time::timeout(timeout, answered).await {
        Ok(answered) => Ok(answered?.into_inner()),
        Err(_) => Err(Status::deadline_exceeded("Deadline exceeded")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNBLOCK: &str = "dfa.identity.v1.IdentityService/UnblockUser";

    #[test]
    fn a_request_has_the_given_context_and_what_its_json_shows() {
        let context = Context::new("test").child("test", "a-1");
        let text = r#"{"userId":"u1","reason":"paid","context":{"idempotencyKey":"mine"}}"#;
        let bytes = encode(UNBLOCK, text, &context).unwrap();
        let read = proto::identity::v1::UnblockUserRequest::decode(bytes.as_slice()).unwrap();
        assert_eq!(read.context, Some(context.to_proto()));
        assert_eq!(
            (read.user_id.as_str(), read.reason.as_str()),
            ("u1", "paid")
        );
        let shown = request_json(UNBLOCK, &bytes).unwrap();
        assert!(
            shown.contains(r#""userId":"u1""#) && !shown.contains("mine"),
            "{shown}"
        );
        assert_eq!(encode(UNBLOCK, &shown, &context).unwrap(), bytes);

        let refused = |method: &str, text: &str| {
            let refused = encode(method, text, &context).unwrap_err();
            refused.message().to_owned()
        };
        assert_eq!(refused("a.B/C", "{}"), "method: is unknown");
        assert!(refused(UNBLOCK, r#"{"user":"u1"}"#).starts_with("request: is not a "));
        assert!(refused(UNBLOCK, "{} {}").starts_with("request: is not a "));
        assert_eq!(
            refused(UNBLOCK, r#"{"userId":"u1 "}"#),
            "request.user_id: must not begin or end with a blank"
        );
        assert!(request_json(UNBLOCK, &[0xff]).is_err());
    }
}
