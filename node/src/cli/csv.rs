//! Lists as CSV: statements, registers of holders and trades, audit records (F38).
//!
//! A row per object of all pages, and a column per field of its message, so that two runs of a
//! command have the same columns. The fields of a nested object are columns `outer.inner`; a list
//! in an object is JSON.

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, ArgMatches};
use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor};
use serde_json::{Map, Value, json};

use super::call::{self, Target};
use super::schema;

/// Rows of a page: the most that the services return.
const PAGE: u32 = 1_000;

/// The flag of a command whose answer is a list.
pub fn flag(method: &MethodDescriptor) -> Option<Arg> {
    list(method).map(|_| {
        Arg::new("csv")
            .long("csv")
            .action(ArgAction::SetTrue)
            .conflicts_with("json")
            .help("Print all pages of the list as CSV")
    })
}

/// Prints the list of the call as CSV if [`flag`] is given.
pub async fn print(
    target: &Target,
    path: &str,
    matches: &ArgMatches,
) -> Option<anyhow::Result<()>> {
    // Only calls with a list have the flag.
    let is_given = matches.try_get_one::<bool>("csv").ok().flatten();
    match is_given {
        Some(true) => Some(print_pages(target, path, matches).await),
        _ => None,
    }
}

async fn print_pages(target: &Target, path: &str, matches: &ArgMatches) -> anyhow::Result<()> {
    let method = schema::method(path).with_context(|| format!("unknown call {path}"))?;
    let list = list(&method).with_context(|| format!("{path} returns no list"))?;
    let columns = columns(&list);
    let mut request = call::request(&method, matches)?;
    let names: Vec<&str> = columns.iter().map(|column| &*column.name).collect();
    print!("{}", service_kit::csv::row(&names));
    let mut token = None;
    loop {
        next_page(&mut request, token.as_ref());
        let answer = target.call(path, &Value::Object(request.clone())).await?;
        for object in answer[list.json_name()].as_array().into_iter().flatten() {
            let cells: Vec<String> = columns.iter().map(|column| column.cell(object)).collect();
            let cells: Vec<&str> = cells.iter().map(String::as_str).collect();
            print!("{}", service_kit::csv::row(&cells));
        }
        let next = answer["pagination"]["nextPageToken"].as_str();
        match next.filter(|next| !next.is_empty()).map(str::to_owned) {
            None => return Ok(()),
            next if next == token => bail!("{path} returned the same page token again"),
            next => token = next,
        }
    }
}

/// Sets the page to read. A size or token of the caller's applies to the first page.
fn next_page(request: &mut Map<String, Value>, token: Option<&String>) {
    let page = request.entry("pagination").or_insert_with(|| json!({}));
    if let Some(page) = page.as_object_mut() {
        if !page.contains_key("pageSize") {
            page.entry("page_size").or_insert_with(|| json!(PAGE));
        }
        if let Some(token) = token {
            page.remove("page_token");
            page.insert("pageToken".to_owned(), json!(token));
        }
    }
}

/// The list of an answer that has pages: its only repeated message.
fn list(method: &MethodDescriptor) -> Option<FieldDescriptor> {
    method.input().get_field_by_name("pagination")?;
    let is_list = |field: &FieldDescriptor| {
        field.is_list() && !field.is_map() && matches!(field.kind(), Kind::Message(_))
    };
    let output = method.output();
    let mut lists = output.fields().filter(is_list);
    let found = lists.next()?;
    lists.next().is_none().then_some(found)
}

/// A column: the path of JSON names to its field.
struct Column {
    name: String,
    path: Vec<String>,
    field: FieldDescriptor,
}

impl Column {
    fn cell(&self, object: &Value) -> String {
        let (last, outer) = self.path.split_last().expect("a column has a field");
        let holder = outer.iter().try_fold(object, |value, name| value.get(name));
        let Some(holder) = holder else {
            return String::new();
        };
        match holder.get(last) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Null) | None => self.default().to_owned(),
            // A decimal.
            Some(Value::Object(object)) if is_decimal(&self.field) => {
                let text = object.get("value").and_then(Value::as_str);
                text.unwrap_or_default().to_owned()
            }
            Some(other) => other.to_string(),
        }
    }

    /// The default value of the field, which proto3 JSON omits.
    fn default(&self) -> &'static str {
        if self.field.supports_presence() || self.field.is_list() || self.field.is_map() {
            return "";
        }
        match self.field.kind() {
            Kind::Bool => "false",
            Kind::String | Kind::Bytes | Kind::Enum(_) | Kind::Message(_) => "",
            _ => "0",
        }
    }
}

fn is_decimal(field: &FieldDescriptor) -> bool {
    matches!(field.kind(), Kind::Message(message) if message.full_name() == "dfa.common.v1.Decimal")
}

fn columns(list: &FieldDescriptor) -> Vec<Column> {
    let mut found = Vec::new();
    if let Kind::Message(message) = list.kind() {
        collect(&message, &mut Vec::new(), &mut Vec::new(), &mut found);
    }
    found
}

/// Adds the columns of a message, whose outer fields are `outer`. A message within itself is one
/// column.
fn collect(
    message: &MessageDescriptor,
    outer: &mut Vec<FieldDescriptor>,
    messages: &mut Vec<MessageDescriptor>,
    found: &mut Vec<Column>,
) {
    messages.push(message.clone());
    for field in message.fields() {
        outer.push(field.clone());
        match field.kind() {
            Kind::Message(inner)
                if !field.is_list()
                    && !field.is_map()
                    && !is_decimal(&field)
                    && !inner.full_name().starts_with("google.protobuf.")
                    && !messages.contains(&inner) =>
            {
                collect(&inner, outer, messages, found);
            }
            _ => {
                let names: Vec<&str> = outer.iter().map(FieldDescriptor::name).collect();
                let path = outer.iter().map(|field| field.json_name().to_owned());
                found.push(Column {
                    name: names.join("."),
                    path: path.collect(),
                    field,
                });
            }
        }
        outer.pop();
    }
    messages.pop();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list_of(path: &str) -> Option<FieldDescriptor> {
        list(&schema::method(path).expect("a method"))
    }

    // rows: R350
    #[test]
    fn r350_a_list_has_the_columns_of_its_message_and_defaults_are_written() {
        let trades = list_of("dfa.market.v1.MarketService/ListTrades").expect("a list");
        let columns = columns(&trades);
        let trade = json!({
            "tradeId": "t-1", "price": { "value": "100.5" }, "quantity": {},
            "fee": { "amount": { "currencyCode": "RUB", "amount": { "value": "0.10" } } },
            "executedAt": "2026-11-30T10:00:00Z", "aggressorSide": "ORDER_SIDE_BUY",
        });
        let cell = |name: &str| {
            let column = columns.iter().find(|column| column.name == name);
            column.expect(name).cell(&trade)
        };
        for (name, text) in [
            ("trade_id", "t-1"),
            ("price", "100.5"),
            ("quantity", ""),
            ("fee.amount.currency_code", "RUB"),
            ("fee.amount.amount", "0.10"),
            ("executed_at", "2026-11-30T10:00:00Z"),
            ("buyer_id", ""),
            ("trade_number", "0"),
            ("aggressor_side", "ORDER_SIDE_BUY"),
        ] {
            assert_eq!(cell(name), text, "{name}");
        }
        assert!(list_of("dfa.market.v1.MarketService/GetTrade").is_none());
    }

    // rows: R350
    #[test]
    fn r350_a_further_page_keeps_the_size_and_replaces_the_token() {
        let mut request = Map::new();
        next_page(&mut request, None);
        assert_eq!(request["pagination"], json!({ "page_size": PAGE }));
        let page = json!({ "page_size": "2", "page_token": "a" });
        request.insert("pagination".to_owned(), page);
        next_page(&mut request, Some(&"b".to_owned()));
        let page = json!({ "page_size": "2", "pageToken": "b" });
        assert_eq!(request["pagination"], page);
    }
}
