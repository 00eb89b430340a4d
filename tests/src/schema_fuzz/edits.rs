//! Mutations of the fields of a request, from its descriptor.

use prost::Message;
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor};
use serde_json::{Value, json};

use super::{Must, Mutation};

/// Deepest nesting of messages that is mutated. The contract's requests have six.
const DEPTH_MAX: usize = 7;
/// Items of a repeated field, by the mutation that repeats it.
const REPEATS: usize = 10_000;

const DECIMAL: &str = "dfa.common.v1.Decimal";
const TIMESTAMP: &str = "google.protobuf.Timestamp";

/// Texts that the services limit themselves (`proto/src/checks.rs`).
const OF_ANY_LENGTH: [&str; 3] = ["providerPayload", "data", "requestJson"];

/// The id of a new user, which must not read as a path.
const NEW_USER: &str = "dfa.identity.v1.CreateUserRequest.user_id";

/// Amounts of messages that requests share with answers. Services ignore them in requests.
const IGNORED: [&str; 9] = [
    "filledQuantity",
    "averagePrice",
    "debitBalanceAfter",
    "creditBalanceAfter",
    "splitOff",
    "consumed",
    "released",
    "returnedByChildren",
    "added",
];

/// A step from a message to a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// A field, by its JSON name.
    Field(String),
    /// The first item of a list.
    First,
}

#[derive(Clone, Debug)]
enum Change {
    Remove,
    Set(Value),
    /// The first item, this many times.
    Repeat(usize),
}

/// One change of one field.
#[derive(Clone, Debug)]
pub struct Edit {
    path: Vec<Step>,
    what: String,
    change: Change,
    must: Must,
}

impl Edit {
    /// True for a field of the request's context, which all methods share.
    pub fn is_of_context(&self) -> bool {
        self.path.first() == Some(&Step::Field("context".to_owned()))
    }

    /// The mutated request; binary if `as_proto` and the mutated request has a binary form.
    pub fn render(
        &self,
        method: &MethodDescriptor,
        mut request: Value,
        as_proto: bool,
    ) -> Mutation {
        self.apply(&mut request);
        let what = format!("{}: {}", text_of(&self.path), self.what);
        let binary = as_proto
            .then(|| DynamicMessage::deserialize(method.input(), &request).ok())
            .flatten();
        match binary {
            Some(message) => Mutation::proto(what, message.encode_to_vec(), self.must),
            None => Mutation::json(what, request.to_string(), self.must),
        }
    }

    fn apply(&self, request: &mut Value) {
        match &self.change {
            Change::Remove => remove(request, &self.path),
            Change::Set(value) => *part(request, &self.path) = value.clone(),
            Change::Repeat(count) => {
                let list = part(request, &self.path);
                let first = list.get(0).cloned().unwrap_or_else(|| json!({}));
                *list = Value::Array(vec![first; *count]);
            }
        }
    }
}

/// The part of a request at a path; messages and lists on the way are made.
fn part<'a>(request: &'a mut Value, path: &[Step]) -> &'a mut Value {
    let mut at = request;
    for step in path {
        at = match step {
            Step::Field(name) => {
                if !at.is_object() {
                    *at = json!({});
                }
                let members = at.as_object_mut().expect("an object");
                members.entry(name.clone()).or_insert(Value::Null)
            }
            Step::First => {
                if at.get(0).is_none() {
                    *at = json!([null]);
                }
                &mut at.as_array_mut().expect("a list")[0]
            }
        };
    }
    at
}

fn remove(request: &mut Value, path: &[Step]) {
    let Some((Step::Field(name), parent)) = path.split_last() else {
        return;
    };
    if let Some(members) = part(request, parent).as_object_mut() {
        members.remove(name);
    }
}

/// `postings.amount`.
fn text_of(path: &[Step]) -> String {
    let names: Vec<&str> = path
        .iter()
        .filter_map(|step| match step {
            Step::Field(name) => Some(name.as_str()),
            Step::First => None,
        })
        .collect();
    names.join(".")
}

/// Every edit of a request's fields.
pub fn of(request: &MessageDescriptor) -> Vec<Edit> {
    let mut found = Vec::new();
    of_message(request, &[], 0, &mut found);
    found
}

fn of_message(message: &MessageDescriptor, path: &[Step], depth: usize, into: &mut Vec<Edit>) {
    if depth > DEPTH_MAX {
        return;
    }
    for field in message.fields() {
        let mut at = path.to_vec();
        at.push(Step::Field(field.json_name().to_owned()));
        let mut add = |at: &[Step], what: &str, change, must| {
            into.push(Edit {
                path: at.to_vec(),
                what: what.to_owned(),
                change,
                must,
            });
        };
        add(&at, "absent", Change::Remove, Must::Answer);
        if field.is_list() {
            add(&at, "an empty list", Change::Set(json!([])), Must::Answer);
            add(&at, "no list", Change::Set(json!("x")), Must::Refuse);
            add(
                &at,
                "a list of lists",
                Change::Set(json!([[[]]])),
                Must::Refuse,
            );
            let repeat = Change::Repeat(REPEATS);
            add(&at, "repeated 10000 times", repeat, Must::AnswerOrClose);
            add(&at, "repeated", Change::Repeat(2), Must::Answer);
            at.push(Step::First);
        }
        of_field(&field, &at, depth, into);
    }
}

/// Edits of a field's value, or of the first item of a list.
fn of_field(field: &FieldDescriptor, at: &[Step], depth: usize, into: &mut Vec<Edit>) {
    let values = match field.kind() {
        Kind::Message(inner) if inner.full_name() == DECIMAL => decimals(at),
        Kind::Message(inner) if inner.full_name() == TIMESTAMP => times(),
        Kind::Message(inner) => {
            of_message(&inner, at, depth + 1, into);
            messages()
        }
        Kind::Enum(values) => {
            let known = values.values().map(|value| json!(value.name()));
            let known = known.map(|value| ("a known value", value, Must::Answer));
            known.chain(enumerations()).collect()
        }
        Kind::String => texts(field),
        Kind::Bool => booleans(),
        Kind::Bytes => bytes(),
        Kind::Uint32 => numbers(&["4294967296", "-1"], &["4294967295"]),
        Kind::Uint64 => numbers(
            &["18446744073709551616", "-1"],
            &["18446744073709551615", "9223372036854775808"],
        ),
        Kind::Int32 => numbers(
            &["2147483648", "-2147483649"],
            &["2147483647", "-2147483648", "-1"],
        ),
        _ => numbers(
            &["9223372036854775808", "-9223372036854775809"],
            &["9223372036854775807", "-9223372036854775808", "-1"],
        ),
    };
    into.extend(values.into_iter().map(|(what, value, must)| Edit {
        path: at.to_vec(),
        what: what.to_owned(),
        change: Change::Set(value),
        must,
    }));
}

type Values = Vec<(&'static str, Value, Must)>;

fn texts(field: &FieldDescriptor) -> Values {
    let any = |what, text: &str| (what, json!(text), Must::Answer);
    let bad = |what, value| (what, value, Must::Refuse);
    let long = match OF_ANY_LENGTH.contains(&field.json_name()) {
        true => Must::Answer,
        false => Must::Refuse,
    };
    let path = match field.full_name() == NEW_USER {
        true => Must::Refuse,
        false => Must::Answer,
    };
    // A bank's message is kept as it was signed.
    let control = long;
    vec![
        any("empty", ""),
        any("blank", " "),
        any("surrounded by blanks", " x "),
        ("a path", json!("..%2f../etc/passwd"), path),
        any("SQL", "'; DROP TABLE x;--"),
        any("the text null", "null"),
        any("colons", "a:b:c"),
        any("outside the basic plane", "\u{1f980}\u{10ffff}"),
        any("written from right to left", "\u{202e}abc"),
        any("of 129 bytes", &"x".repeat(129)),
        ("a null character", json!("\u{0}"), control),
        ("a line feed", json!("a\nb"), control),
        (
            "a control character of two bytes",
            json!("a\u{85}b"),
            control,
        ),
        ("of 1025 bytes", json!("x".repeat(1_025)), long),
        ("of 100000 bytes", json!("x".repeat(100_000)), long),
        bad("a number", json!(5)),
        bad("true", json!(true)),
        bad("an object", json!({})),
        bad("a list", json!(["x"])),
        ("null", Value::Null, Must::Answer),
    ]
}

fn decimals(at: &[Step]) -> Values {
    let path = text_of(at);
    let is_ignored = path.split('.').any(|name| IGNORED.contains(&name))
        || path.contains("hold.remainingAmount");
    let bad = match is_ignored {
        true => Must::Answer,
        false => Must::Refuse,
    };
    let set = |what, text: &str, must| (what, json!({ "value": text }), must);
    vec![
        ("without a value", json!({}), Must::Answer),
        set("empty", "", Must::Answer),
        set("zero", "0", Must::Answer),
        set("negative zero", "-0", Must::Answer),
        set("zero with a fraction", "0.00", Must::Answer),
        set("without digits after the point", "1.", Must::Answer),
        set("without digits before the point", ".5", Must::Answer),
        set("with leading zeros", "0001", Must::Answer),
        set("the smallest", "0.000000000000000001", Must::Answer),
        set(
            "the largest of 64 bits",
            "92233720368547758.07",
            Must::Answer,
        ),
        set("above 64 bits", "92233720368547758.08", Must::Answer),
        set("of 30 digits", &"9".repeat(30), Must::Answer),
        set("of 38 digits", &"9".repeat(38), Must::Answer),
        set("negative", "-1", bad),
        set("below 64 bits", "-92233720368547758.09", bad),
        set("of 39 digits", &"9".repeat(39), bad),
        set("of 10000 digits", &"9".repeat(10_000), Must::Refuse),
        set("of 19 digits after the point", "1.0000000000000000001", bad),
        set("no number", "abc", bad),
        set("with a comma", "1,5", bad),
        set("with an exponent", "1e5", bad),
        set("with two signs", "--1", bad),
        set("NaN", "NaN", bad),
        set("infinite", "Infinity", bad),
        set("hexadecimal", "0x10", bad),
        set("of other digits", "\u{661}\u{662}", bad),
        set("a null character", "\u{0}", Must::Refuse),
        ("a number", json!({ "value": 5 }), Must::Refuse),
        ("a fraction", json!({ "value": 1.5 }), Must::Refuse),
        ("a text", json!("1.00"), Must::Refuse),
        ("a list", json!([]), Must::Refuse),
        ("null", Value::Null, Must::Answer),
    ]
}

fn times() -> Values {
    let set = |what, text: &str, must| (what, json!(text), must);
    vec![
        set("the first allowed", "2000-01-01T00:00:00Z", Must::Answer),
        set("the last allowed", "2100-12-31T23:59:59Z", Must::Answer),
        set("another zone", "2030-01-01T00:00:00+03:00", Must::Answer),
        set(
            "nanoseconds",
            "2030-01-01T00:00:00.000000001Z",
            Must::Answer,
        ),
        set("year 1", "0001-01-01T00:00:00Z", Must::Refuse),
        set("before 1970", "1969-12-31T23:59:59Z", Must::Refuse),
        set("1970", "1970-01-01T00:00:00Z", Must::Refuse),
        set(
            "before the first allowed",
            "1999-12-31T23:59:59Z",
            Must::Refuse,
        ),
        set(
            "after the last allowed",
            "2101-01-01T00:00:00Z",
            Must::Refuse,
        ),
        set("year 9999", "9999-12-31T23:59:59Z", Must::Refuse),
        set("year 10000", "10000-01-01T00:00:00Z", Must::Refuse),
        set("no such month", "2026-13-01T00:00:00Z", Must::Refuse),
        set("no time", "yesterday", Must::Refuse),
        set("empty", "", Must::Refuse),
        ("a number", json!(5), Must::Refuse),
        ("an object", json!({}), Must::Refuse),
        ("null", Value::Null, Must::Answer),
    ]
}

fn enumerations() -> Values {
    vec![
        ("value 999", json!(999), Must::Refuse),
        ("value -1", json!(-1), Must::Refuse),
        ("the largest number", json!(i32::MAX), Must::Refuse),
        ("the smallest number", json!(i32::MIN), Must::Refuse),
        ("above 32 bits", json!(4_294_967_297_i64), Must::Refuse),
        ("an unknown name", json!("NO_SUCH_VALUE"), Must::Refuse),
        ("an empty name", json!(""), Must::Refuse),
        ("a fraction", json!(1.5), Must::Refuse),
        ("true", json!(true), Must::Refuse),
        ("a list", json!([]), Must::Refuse),
        ("null", Value::Null, Must::Answer),
    ]
}

/// Numbers, given as text: JSON has no literal for all of them.
fn numbers(too_large: &[&str], allowed: &[&str]) -> Values {
    let of = |texts: &[&str], what, must| -> Values {
        let texts = texts.iter();
        texts.map(|text| (what, json!(text), must)).collect()
    };
    let mut values = of(too_large, "out of range", Must::Refuse);
    values.extend(of(allowed, "at its bound", Must::Answer));
    values.extend(of(&["0", "1"], "small", Must::Answer));
    values.extend([
        ("a fraction", json!(1.5), Must::Refuse),
        ("an exponent", json!(1e300), Must::Refuse),
        ("no number", json!("abc"), Must::Refuse),
        ("NaN", json!("NaN"), Must::Refuse),
        ("true", json!(true), Must::Refuse),
        ("an object", json!({}), Must::Refuse),
        ("a list", json!([1]), Must::Refuse),
        ("null", Value::Null, Must::Answer),
    ]);
    values
}

fn booleans() -> Values {
    vec![
        ("true", json!(true), Must::Answer),
        ("false", json!(false), Must::Answer),
        ("a text", json!("yes"), Must::Refuse),
        ("a number", json!(1), Must::Answer),
        ("an object", json!({}), Must::Refuse),
        ("null", Value::Null, Must::Answer),
    ]
}

fn bytes() -> Values {
    vec![
        ("empty", json!(""), Must::Answer),
        ("one byte", json!("AA=="), Must::Answer),
        ("no base64", json!("!!"), Must::Refuse),
        ("of 75000 bytes", json!("AAAA".repeat(25_000)), Must::Answer),
        ("a number", json!(5), Must::Refuse),
        ("a list", json!([1, 2]), Must::Refuse),
        ("null", Value::Null, Must::Answer),
    ]
}

fn messages() -> Values {
    vec![
        ("an empty message", json!({}), Must::Answer),
        (
            "an unknown field",
            json!({ "noSuchField": 1 }),
            Must::Refuse,
        ),
        ("a text", json!("x"), Must::Refuse),
        ("a number", json!(5), Must::Refuse),
        ("a list", json!([]), Must::Refuse),
        ("null", Value::Null, Must::Answer),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{method, pool};

    #[test]
    fn parts_are_set_and_removed_at_their_path() {
        let path = [
            Step::Field("postings".into()),
            Step::First,
            Step::Field("amount".into()),
        ];
        let mut request = json!({ "a": 1 });
        *part(&mut request, &path) = json!("x");
        assert_eq!(request, json!({ "a": 1, "postings": [{ "amount": "x" }] }));
        remove(&mut request, &path);
        assert_eq!(request, json!({ "a": 1, "postings": [{}] }));
        assert_eq!(text_of(&path), "postings.amount");
    }

    #[test]
    fn nested_and_repeated_fields_are_reached() {
        let pool = pool();
        let found = of(&method(&pool, "ledger.CreateOperations").input());
        let paths: Vec<String> = found.iter().map(|edit| text_of(&edit.path)).collect();
        for wanted in [
            "context.idempotencyKey",
            "operations.postings.amount.amount",
            "holdSteps.open.hold.amount.amount",
            "mode",
        ] {
            assert!(paths.iter().any(|path| path == wanted), "no {wanted}");
        }
        // A large request has more edits than are sent, and a small one's context has enough.
        assert!(found.len() > 300, "{}", found.len());
        let small = of(&method(&pool, "market.GetMarketStatus").input());
        let context = small.iter().filter(|edit| edit.is_of_context());
        assert!(context.count() > 90);
    }

    #[test]
    fn an_edit_without_a_binary_form_is_sent_as_json() {
        let pool = pool();
        let method = method(&pool, "cfa.GetInstrument");
        let edit = |value| Edit {
            path: vec![Step::Field("instrumentId".into())],
            what: "a test".into(),
            change: Change::Set(value),
            must: Must::Answer,
        };
        let binary = edit(json!("BOND")).render(&method, json!({}), true);
        assert_eq!(binary.content_type, "application/proto");
        let number = edit(json!(5)).render(&method, json!({}), true);
        assert_eq!(number.content_type, "application/json");
        assert_eq!(number.body, br#"{"instrumentId":5}"#);
    }
}
