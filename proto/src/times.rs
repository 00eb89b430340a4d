//! Validation of the times in requests, for all transports (D49).
//!
//! The generated servers decode with [`Codec`], so gRPC, gRPC-Web, Connect and in-process calls are
//! checked here; requests from a topic call [`check`]. The encoded bytes are walked by descriptor,
//! and only fields that lead to a `google.protobuf.Timestamp` are entered: one pass, no copy.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::LazyLock;

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{Message, Name};
use prost_types::field_descriptor_proto::Label;
use prost_types::{DescriptorProto, FileDescriptorSet, Timestamp};
use tonic::codec::{DecodeBuf, Decoder};
use tonic::{Code, Status};
use tonic_prost::{ProstDecoder, ProstEncoder};
use tonic_types::{ErrorDetails, StatusExt};

/// Valid times of a request, in seconds since 1970: the years 2000 to 2100.
pub const SECONDS: Range<i64> = 946_684_800..4_133_980_800;

/// Times with a JSON form (RFC 3339), in seconds since 1970: the years 1 to 9999.
pub const JSON_SECONDS: Range<i64> = -62_135_596_800..253_402_300_800;

const NANOS: Range<i32> = 0..1_000_000_000;

/// Deepest nesting walked. prost refuses deeper messages.
const DEPTH_MAX: usize = 100;

const TIMESTAMP: &str = ".google.protobuf.Timestamp";

/// Invalid times of an encoded request: field path and defect. Empty if the message is no request
/// of the contract. Malformed bytes end the walk: decoding refuses them.
pub fn problems(full_name: &str, message: &[u8]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    if let Some(root) = CONTRACT.requests.get(full_name) {
        // Bytes that cannot be walked cannot be decoded either.
        let _ = walk(*root, message, "", 0, &mut found);
    }
    found
}

/// INVALID_ARGUMENT with every time out of range in an encoded request.
///
/// # Errors
/// If a time is out of range.
pub fn check<M: Name>(message: &[u8]) -> Result<(), Status> {
    let problems = problems(&M::full_name(), message);
    match problems.is_empty() {
        true => Ok(()),
        false => Err(refusal(problems)),
    }
}

/// Clamps a time to the range with a JSON form.
pub fn clamped(time: Timestamp) -> Timestamp {
    if time.seconds < JSON_SECONDS.start {
        return Timestamp {
            seconds: JSON_SECONDS.start,
            nanos: 0,
        };
    }
    if time.seconds >= JSON_SECONDS.end {
        return Timestamp {
            seconds: JSON_SECONDS.end - 1,
            nanos: NANOS.end - 1,
        };
    }
    Timestamp {
        nanos: time.nanos.clamp(NANOS.start, NANOS.end - 1),
        ..time
    }
}

/// Like `rpc::status::invalid_arguments`, which this crate cannot use.
fn refusal(problems: Vec<(String, String)>) -> Status {
    let mut details = ErrorDetails::new();
    let mut message = None;
    for (field, description) in problems {
        message.get_or_insert_with(|| format!("{field}: {description}"));
        details.add_bad_request_violation(field, description);
    }
    details.set_error_info("INVALID_ARGUMENT", "platform", HashMap::new());
    let message = message.unwrap_or_default();
    Status::with_error_details(Code::InvalidArgument, message, details)
}

/// Codec of the generated servers and clients: prost, plus the check of requests.
#[derive(Debug)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Name + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = CheckedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        let full_name = U::full_name();
        CheckedDecoder {
            inner: ProstDecoder::default(),
            request: CONTRACT
                .requests
                .contains_key(&full_name)
                .then_some(full_name),
        }
    }
}

/// Decodes like prost; refuses a request with invalid times or malformed bytes.
#[derive(Debug)]
pub struct CheckedDecoder<U> {
    inner: ProstDecoder<U>,
    /// Full name of a request, `None` for a response.
    request: Option<String>,
}

impl<U: Message + Default> Decoder for CheckedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let Some(full_name) = &self.request else {
            return self.inner.decode(buffer);
        };
        // A message is in one contiguous buffer, so its chunk is the whole message.
        let problems = problems(full_name, bytes::Buf::chunk(buffer));
        if !problems.is_empty() {
            return Err(refusal(problems));
        }
        self.inner.decode(buffer).map_err(|error| {
            let name = full_name.rsplit('.').next().unwrap_or_default();
            refusal(vec![(
                "request".to_owned(),
                format!("is not a {name}: {}", error.message()),
            )])
        })
    }
}

/// The fields of all messages that lead to a time.
struct Contract {
    messages: Vec<Vec<Field>>,
    /// Inputs of the methods, by full name.
    requests: HashMap<String, usize>,
}

struct Field {
    number: u32,
    name: String,
    is_repeated: bool,
    leads_to: Target,
}

#[derive(Clone, Copy)]
enum Target {
    Time,
    /// Index of a message.
    Message(usize),
}

static CONTRACT: LazyLock<Contract> = LazyLock::new(|| {
    let files = FileDescriptorSet::decode(crate::FILE_DESCRIPTOR_SET)
        .expect("compiled-in descriptors decode");
    let mut descriptors = Vec::new();
    for file in &files.file {
        collect(file.package(), &file.message_type, &mut descriptors);
    }
    let by_name: HashMap<_, _> = descriptors
        .iter()
        .enumerate()
        .map(|(at, (name, _))| (name.clone(), at))
        .collect();
    let target = |type_name: &str| match type_name {
        TIMESTAMP => Some(Target::Time),
        name => by_name.get(name).copied().map(Target::Message),
    };
    let mut messages: Vec<Vec<Field>> = descriptors
        .iter()
        .map(|(_, descriptor)| {
            let fields = descriptor.field.iter().filter_map(|field| {
                Some(Field {
                    number: field.number().cast_unsigned(),
                    name: field.name().to_owned(),
                    is_repeated: field.label() == Label::Repeated,
                    leads_to: target(field.type_name())?,
                })
            });
            fields.collect()
        })
        .collect();
    // Removes fields that lead to no time, until none is left.
    let mut leads = vec![false; messages.len()];
    loop {
        let before = leads.iter().filter(|leads| **leads).count();
        for (at, fields) in messages.iter().enumerate() {
            leads[at] |= fields.iter().any(|field| match field.leads_to {
                Target::Time => true,
                Target::Message(to) => leads[to],
            });
        }
        if leads.iter().filter(|leads| **leads).count() == before {
            break;
        }
    }
    for fields in &mut messages {
        fields.retain(|field| match field.leads_to {
            Target::Time => true,
            Target::Message(to) => leads[to],
        });
    }
    let methods = files.file.iter().flat_map(|file| &file.service);
    let requests = methods
        .flat_map(|service| &service.method)
        .filter_map(|method| {
            let name = method.input_type();
            Some((name.trim_start_matches('.').to_owned(), *by_name.get(name)?))
        })
        .collect();
    Contract { messages, requests }
});

/// Messages with their absolute names (`.package.Outer.Inner`), nested ones included.
fn collect<'a>(
    scope: &str,
    messages: &'a [DescriptorProto],
    into: &mut Vec<(String, &'a DescriptorProto)>,
) {
    for message in messages {
        let name = format!("{}.{}", scope.trim_start_matches('.'), message.name());
        collect(&name, &message.nested_type, into);
        into.push((format!(".{name}"), message));
    }
}

/// `None` if the bytes are malformed.
fn walk(
    message: usize,
    mut bytes: &[u8],
    path: &str,
    depth: usize,
    found: &mut Vec<(String, String)>,
) -> Option<()> {
    if depth > DEPTH_MAX {
        return None;
    }
    let fields = &CONTRACT.messages[message];
    let mut counts = vec![0_usize; fields.len()];
    while !bytes.is_empty() {
        let (number, wire_type) = decode_key(&mut bytes).ok()?;
        let at = fields.iter().position(|field| field.number == number);
        let Some(at) = at.filter(|_| wire_type == WireType::LengthDelimited) else {
            skip_field(wire_type, number, &mut bytes, DecodeContext::default()).ok()?;
            continue;
        };
        let length = usize::try_from(decode_varint(&mut bytes).ok()?).ok()?;
        let (value, rest) = bytes.split_at_checked(length)?;
        bytes = rest;
        let field = &fields[at];
        let mut path = match path {
            "" => field.name.clone(),
            path => format!("{path}.{}", field.name),
        };
        if field.is_repeated {
            path.push_str(&format!("[{}]", counts[at]));
            counts[at] += 1;
        }
        match field.leads_to {
            Target::Message(to) => walk(to, value, &path, depth + 1, found)?,
            Target::Time => {
                let time = Timestamp::decode(value).ok()?;
                if let Some(problem) = problem(&time) {
                    found.push((path, problem.to_owned()));
                }
            }
        }
    }
    Some(())
}

fn problem(time: &Timestamp) -> Option<&'static str> {
    if !NANOS.contains(&time.nanos) {
        return Some("must have 0 to 999999999 nanoseconds");
    }
    (!SECONDS.contains(&time.seconds)).then_some("must be a time of the years 2000 to 2100")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cfa::v1 as cfa, common::v1::RequestContext, payments::v1 as payments};

    fn at(seconds: i64, nanos: i32) -> Option<Timestamp> {
        Some(Timestamp { seconds, nanos })
    }

    fn problems_of<M: Name + Message>(message: &M) -> Vec<String> {
        let found = problems(&M::full_name(), &message.encode_to_vec());
        found.into_iter().map(|(field, _)| field).collect()
    }

    #[test]
    fn d49_every_time_of_a_request_is_held_to_the_years_2000_to_2100() {
        for (seconds, nanos, is_good) in [
            (SECONDS.start, 0, true),
            (SECONDS.start - 1, 999_999_999, false),
            (SECONDS.end - 1, 999_999_999, true),
            (SECONDS.end, 0, false),
            (0, 0, false),
            (i64::MIN, 0, false),
            (i64::MAX, 0, false),
            (1_700_000_000, -1, false),
            (1_700_000_000, 1_000_000_000, false),
        ] {
            let request = payments::ReconcileRequest {
                business_date: at(seconds, nanos),
                ..Default::default()
            };
            let expected: &[&str] = if is_good { &[] } else { &["business_date"] };
            assert_eq!(problems_of(&request), expected, "{seconds} {nanos}");
        }
    }

    #[test]
    fn d49_nested_and_repeated_fields_are_named_by_their_path() {
        let request = cfa::RegisterInstrumentRequest {
            context: Some(RequestContext {
                occurred_at: at(-1, 0),
                ..Default::default()
            }),
            symbol: "BOND".into(),
            coupons: vec![
                cfa::Coupon {
                    pays_at: at(1_800_000_000, 0),
                    ..Default::default()
                },
                cfa::Coupon {
                    pays_at: at(i64::MAX, 0),
                    ..Default::default()
                },
            ],
            matures_at: at(1_900_000_000, 0),
            ..Default::default()
        };
        let mut found = problems_of(&request);
        found.sort();
        assert_eq!(found, ["context.occurred_at", "coupons[1].pays_at"]);
        let status = check::<cfa::RegisterInstrumentRequest>(&request.encode_to_vec()).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations.len(), 2);
    }

    #[test]
    fn responses_and_bytes_that_are_no_message_are_not_judged_here() {
        let response = payments::ReconcileReport {
            business_date: at(0, 0),
            ..Default::default()
        };
        assert!(problems_of(&response).is_empty());
        let name = payments::ReconcileRequest::full_name();
        for bytes in [
            &[0x12, 0x7f][..],
            &[0xff; 12],
            &[0x12, 0x02, 0x08],
            &[0x0b; 300],
        ] {
            assert!(problems(&name, bytes).is_empty(), "{bytes:?}");
        }
    }

    #[test]
    fn a_time_without_a_json_form_is_moved_to_the_nearest_that_has_one() {
        for (seconds, text) in [
            (i64::MIN, "0001-01-01T00:00:00Z"),
            (i64::MAX, "9999-12-31T23:59:59.999999999Z"),
            (0, "1970-01-01T00:00:00Z"),
        ] {
            assert_eq!(clamped(Timestamp { seconds, nanos: 0 }).to_string(), text);
        }
        let nanos = clamped(Timestamp {
            seconds: 1,
            nanos: -5,
        })
        .nanos;
        assert_eq!(nanos, 0);
    }
}
