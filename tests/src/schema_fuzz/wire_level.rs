//! Mutations of a request's encoded bytes.

use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_reflect::{FieldDescriptor, Kind, MethodDescriptor};
use serde_json::Value;

use super::{Must, Mutation};
use crate::flow::Random;
use crate::wire;

/// A number of a field that no request has.
const UNKNOWN: u32 = 9_999;
/// Groups within groups.
const NESTED: usize = 10_000;
/// Random changes of the bytes.
const RANDOM: usize = 8;

/// Mutations of this request of the method.
pub fn of(method: &MethodDescriptor, base: &Value, random: &mut Random) -> Vec<Mutation> {
    let bytes = wire::message(method.input(), base).encode_to_vec();
    let mut all = structure(&bytes);
    for field in method.input().fields() {
        all.extend(of_field(&bytes, &field));
    }
    let bound = u64::try_from(bytes.len()).expect("64 bits").max(1);
    let mut place = || usize::try_from(random.below(bound)).expect("an index");
    for _ in 0..RANDOM {
        let (cut, flipped) = (place(), place());
        let what = format!("cut at {cut}");
        all.push(Mutation::proto(what, &bytes[..cut], Must::Answer));
        let mut changed = bytes.clone();
        if let Some(byte) = changed.get_mut(flipped) {
            *byte ^= 0x5a;
        }
        let what = format!("byte {flipped} changed");
        all.push(Mutation::proto(what, changed, Must::Answer));
    }
    all
}

/// Appends to the encoded request; `must` is what the answer has to be.
fn structure(bytes: &[u8]) -> Vec<Mutation> {
    let with = |what: &str, tail: &[u8], must| Mutation::proto(what, [bytes, tail].concat(), must);
    let field = |number, wire_type, value: &[u8]| {
        let mut field = Vec::new();
        encode_key(number, wire_type, &mut field);
        field.extend_from_slice(value);
        field
    };
    let mut long = Vec::new();
    encode_varint(100_000, &mut long);
    long.extend(vec![b'x'; 100_000]);
    let groups = field(UNKNOWN, WireType::StartGroup, &[]).repeat(NESTED);
    vec![
        with(
            "an unknown field",
            &field(UNKNOWN, WireType::Varint, &[1]),
            Must::Answer,
        ),
        with(
            "a long unknown field",
            &field(UNKNOWN, WireType::LengthDelimited, &long),
            Must::Answer,
        ),
        with(
            "an unknown field without its end",
            &field(UNKNOWN, WireType::LengthDelimited, &[0x7f]),
            Must::Refuse,
        ),
        with("nested groups", &groups, Must::Refuse),
        with("field 0", &[0], Must::Refuse),
        with("wire type 7", &[0x0f], Must::Refuse),
        with("a number of 11 bytes", &[0xff; 11], Must::Refuse),
        // All fields are absent: valid in form.
        Mutation::proto("no bytes", Vec::new(), Must::Answer),
        Mutation::proto("twice", bytes.repeat(2), Must::Answer),
        Mutation::proto(
            "without the last byte",
            &bytes[..bytes.len().saturating_sub(1)],
            match bytes.is_empty() {
                true => Must::Answer,
                false => Must::Refuse,
            },
        ),
    ]
}

/// Wrong encodings of a field, appended to the request: later values replace earlier ones.
fn of_field(bytes: &[u8], field: &FieldDescriptor) -> Vec<Mutation> {
    use WireType::{LengthDelimited, SixtyFourBit, ThirtyTwoBit, Varint};
    let with = |what: &str, wire_type, value: &[u8], must| {
        let mut all = bytes.to_vec();
        encode_key(field.number(), wire_type, &mut all);
        all.extend_from_slice(value);
        Mutation::proto(format!("{}: {what}", field.name()), all, must)
    };
    let bad = |what, wire_type, value: &[u8]| with(what, wire_type, value, Must::Refuse);
    let is_delimited = matches!(field.kind(), Kind::String | Kind::Bytes | Kind::Message(_));
    let mut found = if is_delimited {
        vec![
            bad("wire type VARINT", Varint, &[1]),
            bad("wire type I64", SixtyFourBit, &[0; 8]),
            bad("127 bytes that are not there", LengthDelimited, &[0x7f]),
        ]
    } else {
        // A list of numbers may be packed.
        let must = match field.is_list() {
            true => Must::Answer,
            false => Must::Refuse,
        };
        vec![
            with("wire type LEN", LengthDelimited, &[1, 1], must),
            bad("wire type I32", ThirtyTwoBit, &[0; 4]),
        ]
    };
    match field.kind() {
        Kind::String => {
            found.push(bad(
                "bytes that are no text",
                LengthDelimited,
                &[2, 0xff, 0xfe],
            ));
        }
        Kind::Message(inner) if inner.full_name() == "google.protobuf.Timestamp" => {
            let times = times().into_iter();
            found.extend(times.map(|(what, time)| bad(what, LengthDelimited, &time)));
        }
        _ => {}
    }
    found
}

/// Encoded times that no JSON text has.
fn times() -> Vec<(&'static str, Vec<u8>)> {
    [
        ("the last second of 64 bits", i64::MAX, 0),
        ("the first second of 64 bits", i64::MIN, 0),
        ("negative nanoseconds", 1_800_000_000, -1),
        ("a second of nanoseconds", 1_800_000_000, 1_000_000_000),
    ]
    .into_iter()
    .map(|(what, seconds, nanos)| {
        let time = prost_types::Timestamp { seconds, nanos };
        (what, time.encode_length_delimited_to_vec())
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use prost_reflect::DynamicMessage;
    use serde_json::json;

    use super::*;
    use crate::wire::{method, pool};

    #[test]
    fn what_must_be_refused_does_not_decode_or_has_a_bad_value() {
        let pool = pool();
        let method = method(&pool, "cfa.GetInstrument");
        let base = json!({ "context": { "requestId": "r" }, "instrumentId": "B" });
        let all = of(&method, &base, &mut Random::new(1));
        assert!(all.len() > 25, "{}", all.len());
        for one in all.iter().filter(|one| one.must == Must::Refuse) {
            let decoded = DynamicMessage::decode(method.input(), &*one.body);
            assert!(decoded.is_err(), "{}", one.what);
        }
    }
}
