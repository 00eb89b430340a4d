//! Validation of requests by their descriptors, for all transports: texts and times (D49) and
//! values of enumerations (D48).
//!
//! The generated servers check requests before they decode them, so gRPC, gRPC-Web, Connect and
//! in-process calls are checked here. Consumers of requests from a topic call [`check`]. The
//! encoded bytes are scanned in one pass, which allocates nothing unless it finds a problem.
//! Whether a field may be empty is the service's rule.

use std::collections::HashMap;
use std::fmt::{Display, Formatter};
use std::sync::LazyLock;

use bytes::Bytes;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message, Name};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet, Timestamp,
};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::times;

/// Longest id of an object, in bytes (D49).
pub const ID_BYTES_MAX: usize = 128;

/// Longest id of a request's context, in bytes. Longer than an object's, because services derive
/// keys from the ids of objects.
pub const CONTEXT_ID_BYTES_MAX: usize = 256;

/// Longest other text, in bytes (D49).
pub const TEXT_BYTES_MAX: usize = 1_024;

/// Deepest nesting scanned. prost refuses deeper messages.
const DEPTH_MAX: usize = 100;

const TIMESTAMP: &str = ".google.protobuf.Timestamp";
const CONTEXT: &str = ".dfa.common.v1.RequestContext";

/// Maximum of problems reported per request: more would not fit the headers of its answer.
const PROBLEMS_MAX: usize = 20;

/// Upper bound of checked field numbers (exclusive), so that a scan counts them on the stack.
const NUMBERS: usize = 64;

/// Invalid values of an encoded request: field path and defect. Empty if the message is not a
/// request of the contract. Malformed bytes end the scan: decoding refuses them.
pub fn problems(full_name: &str, message: &[u8]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    if let Some(root) = CONTRACT.requests.get(full_name) {
        // Bytes that cannot be scanned to their end cannot be decoded either.
        let _ = scan(*root, message, None, 0, &mut found);
    }
    found
}

/// INVALID_ARGUMENT with every invalid value of an encoded request.
///
/// # Errors
/// If a value is invalid.
pub fn check<M: Name>(message: &[u8]) -> Result<(), Status> {
    let problems = problems(&M::full_name(), message);
    match problems.is_empty() {
        true => Ok(()),
        false => Err(refusal(problems)),
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

/// Decodes a request after its check.
///
/// # Errors
/// INVALID_ARGUMENT if a value is invalid or the bytes are malformed.
pub(crate) fn decode<M: Message + Name + Default>(message: Bytes) -> Result<M, Status> {
    check::<M>(&message)?;
    M::decode(message).map_err(|error| undecodable(M::NAME, &error))
}

fn undecodable(name: &str, error: &DecodeError) -> Status {
    let problem = format!("is not a {name}: {error}");
    refusal(vec![("request".to_owned(), problem)])
}

/// Rules for the fields of all messages.
struct Contract {
    /// Fields by number.
    messages: Vec<Vec<Option<Field>>>,
    /// Inputs of the methods, by full name.
    requests: HashMap<String, usize>,
}

struct Field {
    name: String,
    is_repeated: bool,
    rule: Rule,
}

enum Rule {
    Time,
    Id {
        bytes_max: usize,
    },
    Text,
    /// Numbers of the values, sorted.
    Enumeration(Vec<i32>),
    /// Index of a message.
    Message(usize),
}

/// Texts whose length their service limits: a bank's message as it was signed, a transaction's
/// code, a request as JSON.
const UNBOUNDED: [(&str, &str); 4] = [
    (".dfa.payments.v1.PaymentWebhook", "provider_payload"),
    (".dfa.chain.v1.TransactionPayload", "data"),
    (".dfa.chain.v1.EstimateGasRequest", "data"),
    (".dfa.approvals.v1.RequestApprovalRequest", "request_json"),
];

/// True if a text is an id: it is looked up and compared, never shown as prose.
fn is_id(name: &str) -> bool {
    const IDS: [&str; 5] = [
        "symbol",
        "idempotency_key",
        "external_ref",
        "source",
        "owner",
    ];
    const ENDS: [&str; 4] = ["_id", "_ids", "tx_hash", "tx_hashes"];
    ENDS.iter().any(|end| name.ends_with(end)) || IDS.contains(&name)
}

static CONTRACT: LazyLock<Contract> = LazyLock::new(|| {
    let files = FileDescriptorSet::decode(crate::FILE_DESCRIPTOR_SET)
        .expect("compiled-in descriptors decode");
    let mut descriptors = Vec::new();
    let mut enumerations = HashMap::new();
    for file in &files.file {
        collect(
            file.package(),
            &file.message_type,
            &mut descriptors,
            &mut enumerations,
        );
        add(file.package(), &file.enum_type, &mut enumerations);
    }
    let by_name: HashMap<_, _> = descriptors
        .iter()
        .enumerate()
        .map(|(at, (name, _))| (name.clone(), at))
        .collect();
    let rule = |message: &str, field: &FieldDescriptorProto| match field.r#type() {
        Type::Message if field.type_name() == TIMESTAMP => Some(Rule::Time),
        Type::Message => by_name.get(field.type_name()).copied().map(Rule::Message),
        Type::Enum => enumerations
            .get(field.type_name())
            .cloned()
            .map(Rule::Enumeration),
        Type::String if UNBOUNDED.contains(&(message, field.name())) => None,
        Type::String if message == CONTEXT => Some(Rule::Id {
            bytes_max: CONTEXT_ID_BYTES_MAX,
        }),
        Type::String if is_id(field.name()) => Some(Rule::Id {
            bytes_max: ID_BYTES_MAX,
        }),
        Type::String => Some(Rule::Text),
        _ => None,
    };
    let messages = descriptors.iter().map(|(message, descriptor)| {
        let mut fields: Vec<Option<Field>> = Vec::new();
        for field in &descriptor.field {
            let number = field.number().cast_unsigned() as usize;
            let Some(rule) = rule(message, field) else {
                continue;
            };
            assert!(
                number < NUMBERS,
                "{message}.{} is above {NUMBERS}",
                field.name()
            );
            fields.resize_with(fields.len().max(number + 1), || None);
            fields[number] = Some(Field {
                name: field.name().to_owned(),
                is_repeated: field.label() == Label::Repeated,
                rule,
            });
        }
        fields
    });
    let messages = messages.collect();
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

/// Messages and enumerations with their absolute names (`.package.Outer.Inner`), nested ones
/// included.
fn collect<'a>(
    scope: &str,
    messages: &'a [DescriptorProto],
    into: &mut Vec<(String, &'a DescriptorProto)>,
    enumerations: &mut HashMap<String, Vec<i32>>,
) {
    for message in messages {
        let name = format!("{}.{}", scope.trim_start_matches('.'), message.name());
        collect(&name, &message.nested_type, into, enumerations);
        add(&name, &message.enum_type, enumerations);
        into.push((format!(".{name}"), message));
    }
}

fn add(scope: &str, named: &[EnumDescriptorProto], into: &mut HashMap<String, Vec<i32>>) {
    for enumeration in named {
        let numbers = enumeration.value.iter().map(|value| value.number());
        let mut numbers: Vec<i32> = numbers.collect();
        numbers.sort_unstable();
        into.insert(format!(".{scope}.{}", enumeration.name()), numbers);
    }
}

/// Path to a field, from the request's root; formatted only for a problem.
struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    name: &'a str,
    index: Option<usize>,
}

impl Display for Path<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        if let Some(parent) = self.parent {
            write!(f, "{parent}.")?;
        }
        f.write_str(self.name)?;
        self.index.map_or(Ok(()), |index| write!(f, "[{index}]"))
    }
}

/// Adds the problems of a message to `found`. `None` if the bytes are malformed or enough problems
/// are found.
fn scan(
    message: usize,
    mut bytes: &[u8],
    parent: Option<&Path<'_>>,
    depth: usize,
    found: &mut Vec<(String, String)>,
) -> Option<()> {
    if depth > DEPTH_MAX {
        return None;
    }
    let fields = &CONTRACT.messages[message];
    let mut counts = [0_u32; NUMBERS];
    while !bytes.is_empty() {
        let (number, wire_type) = decode_key(&mut bytes).ok()?;
        let at = number as usize;
        let Some(field) = fields.get(at).and_then(Option::as_ref) else {
            skip_field(wire_type, number, &mut bytes, DecodeContext::default()).ok()?;
            continue;
        };
        let mut path = Path {
            parent,
            name: &field.name,
            index: field.is_repeated.then_some(counts[at] as usize),
        };
        counts[at] += u32::from(field.is_repeated);
        let problem = match (wire_type, &field.rule) {
            (WireType::Varint, Rule::Enumeration(known)) => {
                unknown(known, decode_varint(&mut bytes).ok()?)
            }
            (WireType::LengthDelimited, rule) => {
                let length = usize::try_from(decode_varint(&mut bytes).ok()?).ok()?;
                let (value, rest) = bytes.split_at_checked(length)?;
                bytes = rest;
                match rule {
                    Rule::Message(to) => {
                        scan(*to, value, Some(&path), depth + 1, found)?;
                        None
                    }
                    Rule::Time => {
                        times::problem(&Timestamp::decode(value).ok()?).map(str::to_owned)
                    }
                    Rule::Id { bytes_max } => {
                        id_problem(std::str::from_utf8(value).ok()?, *bytes_max)
                    }
                    Rule::Text => text_problem(std::str::from_utf8(value).ok()?, TEXT_BYTES_MAX),
                    Rule::Enumeration(known) => {
                        let (index, problem) = packed(known, value)?;
                        path.index = Some(index);
                        problem
                    }
                }
            }
            _ => {
                skip_field(wire_type, number, &mut bytes, DecodeContext::default()).ok()?;
                None
            }
        };
        if let Some(problem) = problem {
            found.push((path.to_string(), problem));
            if found.len() == PROBLEMS_MAX {
                return None;
            }
        }
    }
    Some(())
}

/// Why an id is invalid (D49); `None` if it is valid or empty.
pub fn id_problem(id: &str, bytes_max: usize) -> Option<String> {
    let problem = text_problem(id, bytes_max);
    let blank = || "must not begin or end with a blank".to_owned();
    problem.or_else(|| (id.trim() != id).then(blank))
}

/// Why a text is invalid (D49); `None` if it is valid.
pub fn text_problem(text: &str, bytes_max: usize) -> Option<String> {
    if text.len() > bytes_max {
        return Some(format!("must have at most {bytes_max} bytes"));
    }
    // Bytes first: almost every text is plain ASCII.
    let is_plain = text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    let is_bad = !is_plain && text.chars().any(char::is_control);
    is_bad.then(|| "must have no control characters".to_owned())
}

/// Why a value of an enumeration is invalid. An unknown value is never replaced by a default (D48).
fn unknown(known: &[i32], number: u64) -> Option<String> {
    // An enumeration is encoded as a 64-bit number; decoding keeps its lower half.
    let number = number as i32;
    known
        .binary_search(&number)
        .is_err()
        .then(|| format!("has no value {number}"))
}

/// The first problem of a repeated enumeration in its packed form, with its index; `None`:
/// malformed.
fn packed(known: &[i32], mut values: &[u8]) -> Option<(usize, Option<String>)> {
    let mut index = 0;
    while !values.is_empty() {
        let problem = unknown(known, decode_varint(&mut values).ok()?);
        if problem.is_some() {
            return Some((index, problem));
        }
        index += 1;
    }
    Some((index, None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::times::SECONDS;
    use crate::{
        cfa::v1 as cfa, common::v1::RequestContext, ledger::v1 as ledger, payments::v1 as payments,
    };

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

    fn texts(change: impl FnOnce(&mut cfa::RegisterInstrumentRequest)) -> Vec<(String, String)> {
        let mut request = cfa::RegisterInstrumentRequest::default();
        change(&mut request);
        problems(
            "dfa.cfa.v1.RegisterInstrumentRequest",
            &request.encode_to_vec(),
        )
    }

    fn one(field: &str, problem: &str) -> Vec<(String, String)> {
        vec![(field.to_owned(), problem.to_owned())]
    }

    #[test]
    fn d49_an_id_has_128_bytes_without_control_characters_and_surrounding_blanks() {
        for good in ["", "B", "BOND 1", "облигация", &"x".repeat(ID_BYTES_MAX)] {
            assert_eq!(texts(|request| request.symbol = good.into()), [], "{good}");
        }
        let long = "x".repeat(ID_BYTES_MAX + 1);
        for (bad, problem) in [
            (long.as_str(), "must have at most 128 bytes"),
            ("\0", "must have no control characters"),
            ("a\nb", "must have no control characters"),
            ("a\u{85}b", "must have no control characters"),
            (" a", "must not begin or end with a blank"),
            ("a ", "must not begin or end with a blank"),
            (" ", "must not begin or end with a blank"),
        ] {
            let found = texts(|request| request.issuer_id = bad.into());
            assert_eq!(found, one("issuer_id", problem), "{bad:?}");
        }
        // Keys are derived from ids of objects.
        let context = |key: String| RequestContext {
            idempotency_key: key,
            ..Default::default()
        };
        let key = "k".repeat(CONTEXT_ID_BYTES_MAX);
        let good = texts(|request| request.context = Some(context(key.clone())));
        assert_eq!(good, []);
        let bad = texts(|request| request.context = Some(context(format!("{key}k"))));
        let problem = "must have at most 256 bytes";
        assert_eq!(bad, one("context.idempotency_key", problem));
    }

    #[test]
    fn d49_other_texts_have_1024_bytes_without_control_characters() {
        for good in [" Name ", "Имя", &"x".repeat(TEXT_BYTES_MAX)] {
            assert_eq!(texts(|request| request.name = good.into()), [], "{good}");
        }
        let found = texts(|request| request.document_hash = "x".repeat(100_000));
        assert_eq!(found, one("document_hash", "must have at most 1024 bytes"));
        let found = texts(|request| request.name = "\0".into());
        assert_eq!(found, one("name", "must have no control characters"));
        // The payments service limits what a bank has signed.
        let webhook = payments::HandlePaymentWebhookRequest {
            webhook: Some(payments::PaymentWebhook {
                provider_payload: "\0".repeat(5_000),
                ..Default::default()
            }),
            ..Default::default()
        };
        assert_eq!(problems_of(&webhook), [""; 0]);
    }

    #[test]
    fn d49_a_request_with_many_problems_has_an_answer_of_bounded_size() {
        let request = ledger::ListSubAccountsRequest {
            subaccount_ids: vec!["\0".into(); 100_000],
            ..Default::default()
        };
        let refused = check::<ledger::ListSubAccountsRequest>(&request.encode_to_vec());
        let details = refused.unwrap_err().get_details_bad_request().unwrap();
        assert_eq!(details.field_violations.len(), PROBLEMS_MAX);
        assert_eq!(details.field_violations[19].field, "subaccount_ids[19]");
    }

    #[test]
    fn d48_unknown_values_of_enumerations_are_named() {
        let found = texts(|request| request.r#type = 999);
        assert_eq!(found, one("type", "has no value 999"));
        let found = texts(|request| request.r#type = -1);
        assert_eq!(found, one("type", "has no value -1"));
        assert_eq!(texts(|request| request.r#type = 1), []);
        let request = ledger::SetVelocityLimitRequest {
            limit: Some(ledger::VelocityLimit {
                operation_types: vec![1, 77],
                ..Default::default()
            }),
            ..Default::default()
        };
        assert_eq!(problems_of(&request), ["limit.operation_types[1]"]);
        // A filter as well.
        let request = cfa::ListInstrumentsRequest {
            status: 999,
            ..Default::default()
        };
        assert_eq!(problems_of(&request), ["status"]);
    }
}
