//! Message bytes: JSON to protobuf and back by descriptor, and the five-byte gRPC prefix.
//!
//! Input is canonical proto3 JSON. Unknown fields are refused, so a misspelt amount is not read as
//! unset.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use connectrpc::{CodecFormat, ConnectError};
use prost::Message;
use prost_reflect::{DynamicMessage, MessageDescriptor};

use crate::json;

/// Length of the prefix before each gRPC and Connect stream message.
pub(super) const PREFIX_BYTES: usize = 5;

/// Converts a request message to protobuf bytes.
pub(super) fn to_proto(
    body: Bytes,
    format: CodecFormat,
    descriptor: &MessageDescriptor,
) -> Result<Bytes, ConnectError> {
    if format == CodecFormat::Proto {
        return Ok(body);
    }
    let bad = |error: serde_json::Error| {
        ConnectError::invalid_argument(format!("not a {}: {error}", descriptor.full_name()))
    };
    let mut json = serde_json::Deserializer::from_slice(&body);
    let message = DynamicMessage::deserialize(descriptor.clone(), &mut json).map_err(bad)?;
    json.end().map_err(bad)?;
    Ok(message.encode_to_vec().into())
}

/// Converts a response message to the caller's format.
pub(super) fn from_proto(
    body: Bytes,
    format: CodecFormat,
    descriptor: &MessageDescriptor,
) -> Result<Bytes, ConnectError> {
    if format == CodecFormat::Proto {
        return Ok(body);
    }
    let failed = |error: &dyn std::fmt::Display| {
        ConnectError::internal(format!(
            "{} has no JSON form: {error}",
            descriptor.full_name()
        ))
    };
    let message =
        DynamicMessage::decode(descriptor.clone(), body).map_err(|error| failed(&error))?;
    json::written(message, serde_json::to_vec)
        .map(Bytes::from)
        .map_err(|error| failed(&error))
}

/// One uncompressed gRPC message.
pub(super) fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.put_slice(message);
    framed.freeze()
}

/// Removes the first complete message from `buffer`, if there is one.
pub(super) fn take_message(buffer: &mut BytesMut) -> Option<Bytes> {
    let (prefix, rest) = buffer.split_first_chunk::<PREFIX_BYTES>()?;
    let [_, length @ ..] = *prefix;
    let length = u32::from_be_bytes(length) as usize;
    if rest.len() < length {
        return None;
    }
    buffer.advance(PREFIX_BYTES);
    Some(buffer.split_to(length).freeze())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Contract;

    // rows: R001 R003 R009
    #[test]
    fn r009_json_keeps_decimals_and_refuses_unknown_fields() {
        let contract = Contract::platform();
        let money = contract
            .pool()
            .get_message_by_name("dfa.common.v1.Money")
            .unwrap();
        for amount in ["0.000000000000000001", "123456789012345678901234567890"] {
            let json = format!(r#"{{"currencyCode":"RUB","amount":{{"value":"{amount}"}}}}"#);
            let bytes = to_proto(Bytes::from(json.clone()), CodecFormat::Json, &money).unwrap();
            let back = from_proto(bytes, CodecFormat::Json, &money).unwrap();
            assert_eq!(back, json);
        }
        for bad in [
            "",
            "{",
            "{} {}",
            r#"{"amuont":{}}"#,
            r#"{"amount":{"value":1.5}}"#,
        ] {
            assert!(
                to_proto(Bytes::from(bad), CodecFormat::Json, &money).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn only_whole_frames_are_taken() {
        let framed = frame(b"abc");
        let mut buffer = BytesMut::from(&framed[..framed.len() - 1]);
        assert_eq!(take_message(&mut buffer), None);
        buffer.extend_from_slice(b"c");
        buffer.extend_from_slice(&frame(b""));
        assert_eq!(take_message(&mut buffer).as_deref(), Some(&b"abc"[..]));
        assert_eq!(take_message(&mut buffer).as_deref(), Some(&b""[..]));
        assert!(buffer.is_empty());
    }
}
