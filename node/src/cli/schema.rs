//! Maps descriptors to the command line: methods to commands, request fields to flags.
//!
//! Forms of values: a `Decimal` is `100.50`, a `Money` is `100.50` or `100.50 RUB`, a
//! `MonetaryAmount` is `100.50 CFA-RUB`, an enumeration value is its name without prefix in any
//! case (`buy`, `SBP_QR`), a time is RFC 3339. Each field of a nested message is a flag. Repeated
//! messages are JSON.

use std::sync::OnceLock;

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, ArgMatches};
use prost_reflect::{
    DescriptorPool, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
};
use serde_json::{Map, Value, json};

/// Every schema of the platform.
pub fn pool() -> &'static DescriptorPool {
    static POOL: OnceLock<DescriptorPool> = OnceLock::new();
    POOL.get_or_init(|| {
        DescriptorPool::decode(proto::FILE_DESCRIPTOR_SET)
            .expect("the build wrote a valid descriptor set")
    })
}

/// The method of the path `<package>.<Service>/<Method>`.
pub fn method(path: &str) -> Option<MethodDescriptor> {
    let (service, name) = path.split_once('/')?;
    pool()
        .get_service_by_name(service)?
        .methods()
        .find(|method| method.name() == name)
}

/// A descriptor's comment as one line, for the help.
pub fn comment(file: &prost_reflect::FileDescriptor, path: &[i32]) -> Option<String> {
    let info = file.file_descriptor_proto().source_code_info.as_ref()?;
    let location = info
        .location
        .iter()
        .find(|location| location.path == path)?;
    let text = location.leading_comments.as_deref()?;
    let words: Vec<&str> = text.split_whitespace().collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// Form of a field on the command line.
enum Shape {
    Flag,
    Nested(MessageDescriptor),
    Json,
}

fn shape(field: &FieldDescriptor) -> Shape {
    match field.kind() {
        Kind::Message(message) if is_text(&message) && !field.is_list() => Shape::Flag,
        Kind::Message(message)
            if !field.is_list()
                && !field.is_map()
                && field
                    .containing_oneof()
                    .is_none_or(|oneof| oneof.is_synthetic()) =>
        {
            Shape::Nested(message)
        }
        Kind::Message(_) => Shape::Json,
        _ => Shape::Flag,
    }
}

/// True for a message that is written as one token.
fn is_text(message: &MessageDescriptor) -> bool {
    matches!(
        message.full_name(),
        "dfa.common.v1.Decimal"
            | "dfa.common.v1.Money"
            | "dfa.common.v1.MonetaryAmount"
            | "google.protobuf.Timestamp"
    )
}

/// Names of the flags that every command has.
const RESERVED: &[&str] = &[
    "approval",
    "idempotency-key",
    "csv",
    "pdf",
    "data",
    "json",
    "config",
    "data-dir",
    "url",
    "token",
    "help",
    "version",
];

/// Flag of a field. A field with a reserved name has the flag `--field-<name>`.
fn flag_name(field: &FieldDescriptor) -> String {
    let name = field.name().replace('_', "-");
    if RESERVED.contains(&name.as_str()) {
        format!("field-{name}")
    } else {
        name
    }
}

/// Flags of a request's fields, except `context`, which the command line fills in.
pub fn flags(message: &MessageDescriptor) -> Vec<Arg> {
    let mut args: Vec<Arg> = Vec::new();
    collect(message, true, &mut args);
    args
}

fn collect(message: &MessageDescriptor, top: bool, args: &mut Vec<Arg>) {
    for field in message.fields() {
        if top && field.name() == "context" {
            continue;
        }
        match shape(&field) {
            Shape::Nested(nested) => collect(&nested, false, args),
            kind => {
                let name = flag_name(&field);
                if args.iter().any(|arg| arg.get_id() == name.as_str()) {
                    continue;
                }
                let mut arg = Arg::new(name.clone())
                    .long(name)
                    .value_name(value_name(&field))
                    .allow_hyphen_values(true);
                let mut help = comment(&field.parent_file(), field.path()).unwrap_or_default();
                if let Kind::Enum(values) = field.kind() {
                    help = format!("{help} [{}]", bare_names(&values).join(", "))
                        .trim()
                        .to_owned();
                }
                if matches!(kind, Shape::Json) {
                    help = format!("{help} (JSON, repeatable)").trim().to_owned();
                }
                if !help.is_empty() {
                    arg = arg.help(help);
                }
                if field.kind() == Kind::Bool && !field.is_list() {
                    arg = arg.num_args(0..=1).default_missing_value("true");
                }
                if field.is_list() {
                    arg = arg.action(ArgAction::Append);
                }
                args.push(arg);
            }
        }
    }
}

fn value_name(field: &FieldDescriptor) -> &'static str {
    match field.kind() {
        Kind::Bool => "BOOL",
        Kind::String | Kind::Bytes => "TEXT",
        Kind::Enum(_) => "NAME",
        Kind::Message(message) => match message.name() {
            "Money" | "MonetaryAmount" => "AMOUNT",
            "Decimal" => "DECIMAL",
            "Timestamp" => "TIME",
            _ => "JSON",
        },
        _ => "NUMBER",
    }
}

fn prefix(values: &EnumDescriptor) -> String {
    values
        .values()
        .find_map(|value| value.name().strip_suffix("UNSPECIFIED").map(str::to_owned))
        .unwrap_or_default()
}

fn bare_names(values: &EnumDescriptor) -> Vec<String> {
    let prefix = prefix(values);
    values
        .values()
        .filter(|value| value.number() != 0)
        .map(|value| {
            value
                .name()
                .strip_prefix(&prefix)
                .unwrap_or(value.name())
                .to_owned()
        })
        .collect()
}

/// The request as proto3 JSON, except `context`.
///
/// # Errors
/// A value does not fit its field; the error names the flag.
pub fn request(
    message: &MessageDescriptor,
    matches: &ArgMatches,
) -> anyhow::Result<Map<String, Value>> {
    build(message, true, matches)
}

fn build(
    message: &MessageDescriptor,
    top: bool,
    matches: &ArgMatches,
) -> anyhow::Result<Map<String, Value>> {
    let mut object = Map::new();
    for field in message.fields() {
        if top && field.name() == "context" {
            continue;
        }
        if let Shape::Nested(nested) = shape(&field) {
            let inner = build(&nested, false, matches)?;
            if !inner.is_empty() {
                object.insert(field.name().to_owned(), Value::Object(inner));
            }
            continue;
        }
        let name = flag_name(&field);
        let Some(words) = matches.get_many::<String>(&name) else {
            continue;
        };
        let values = words
            .map(|word| value(&field, word).with_context(|| format!("--{name} {word}")))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let value = if field.is_list() {
            Value::Array(values)
        } else {
            values.into_iter().next_back().unwrap_or_default()
        };
        object.insert(field.name().to_owned(), value);
    }
    Ok(object)
}

fn value(field: &FieldDescriptor, word: &str) -> anyhow::Result<Value> {
    Ok(match field.kind() {
        Kind::Bool => Value::Bool(word.parse().context("expected true or false")?),
        Kind::String => json!(word),
        Kind::Enum(values) => {
            let prefix = prefix(&values);
            let upper = word.to_uppercase().replace('-', "_");
            let full = format!("{prefix}{upper}");
            match [full.as_str(), upper.as_str()]
                .into_iter()
                .find(|name| values.get_value_by_name(name).is_some())
            {
                Some(name) => json!(name),
                None => bail!("expected one of {}", bare_names(&values).join(", ")),
            }
        }
        Kind::Message(message) => match message.full_name() {
            "dfa.common.v1.Decimal" => json!({ "value": word }),
            "dfa.common.v1.Money" => amount(word, "RUB"),
            "dfa.common.v1.MonetaryAmount" => amount(word, types::CFA_RUB),
            "google.protobuf.Timestamp" => json!(word),
            _ => serde_json::from_str(word).context("expected JSON of the message")?,
        },
        Kind::Float | Kind::Double | Kind::Bytes => json!(word),
        _ => {
            word.parse::<i128>().context("expected a whole number")?;
            json!(word)
        }
    })
}

fn amount(word: &str, currency: &str) -> Value {
    let (amount, currency) = word.trim().split_once(' ').unwrap_or((word, currency));
    json!({ "currency_code": currency.trim(), "amount": { "value": amount } })
}
