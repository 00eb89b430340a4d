//! Lists as CSV or PDF: statements, registers of holders and trades, audit records (F38).
//!
//! A row per object of all pages, and a column per field of its message, so that two runs of a
//! command have the same columns. The fields of a nested object are columns `outer.inner`; a list
//! in an object is JSON. A PDF has a bounded number of rows, since it is written at the end.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor};
use serde_json::{Map, Value, json};
use service_kit::pdf::Table;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::call::{self, Target};
use super::{output, schema};

/// Rows of a page: the most that the services return.
const PAGE: u32 = 1_000;
/// The most rows of a PDF.
const PDF_ROWS_MAX: usize = 100_000;

/// The flags of a command whose answer is a list.
pub fn flags(method: &MethodDescriptor) -> Vec<Arg> {
    if list(method).is_none() {
        return Vec::new();
    }
    vec![
        Arg::new("csv")
            .long("csv")
            .action(ArgAction::SetTrue)
            .conflicts_with("json")
            .help("Print all pages of the list as CSV"),
        Arg::new("pdf")
            .long("pdf")
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .conflicts_with_all(["csv", "json"])
            .help(format!(
                "Write all pages of the list to a new PDF file, up to {PDF_ROWS_MAX} rows"
            )),
    ]
}

/// Prints the list of the call `path` as CSV, or writes it as PDF, if one of [`flags`] is given.
/// `title` is the title of the PDF.
pub async fn run(
    target: &Target,
    title: &str,
    path: &str,
    matches: &ArgMatches,
) -> Option<anyhow::Result<()>> {
    // Only calls with a list have the flags.
    let is_csv = matches!(matches.try_get_one::<bool>("csv"), Ok(Some(true)));
    let file = matches.try_get_one::<PathBuf>("pdf").ok().flatten();
    if !is_csv && file.is_none() {
        return None;
    }
    let ask = async |request: &Value| target.call(path, request).await;
    Some(match (List::new(ask, path, matches), file) {
        (Err(error), _) => Err(error),
        (Ok(list), Some(file)) => write_pdf(list, title, file).await,
        (Ok(list), None) => print_csv(list).await,
    })
}

async fn print_csv<A>(mut list: List<A>) -> anyhow::Result<()>
where
    A: AsyncFn(&Value) -> anyhow::Result<Value>,
{
    print!("{}", service_kit::csv::row(&list.names()));
    while let Some(rows) = list.page().await? {
        for row in rows {
            let cells: Vec<&str> = row.iter().map(String::as_str).collect();
            print!("{}", service_kit::csv::row(&cells));
        }
    }
    Ok(())
}

/// Writes the list to a new file. The file is created before the first call, and removed if there
/// is no document.
async fn write_pdf<A>(list: List<A>, title: &str, file: &Path) -> anyhow::Result<()>
where
    A: AsyncFn(&Value) -> anyhow::Result<Value>,
{
    let mut created = match File::create_new(file) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            bail!("{} exists: remove it or name another file", file.display())
        }
        created => created.with_context(|| format!("cannot create {}", file.display()))?,
    };
    let written = document(list, title).await.and_then(|document| {
        let written = created.write_all(&document);
        written.with_context(|| format!("cannot write {}", file.display()))
    });
    if written.is_err() {
        let _ = fs::remove_file(file);
    }
    written
}

/// The list as a PDF.
async fn document<A>(mut list: List<A>, title: &str) -> anyhow::Result<Vec<u8>>
where
    A: AsyncFn(&Value) -> anyhow::Result<Value>,
{
    let notes = notes(&list.request, OffsetDateTime::now_utc())?;
    let id = uuid::Uuid::now_v7().to_string();
    let mut table: Option<Table> = None;
    let mut count = 0;
    while let Some(rows) = list.page().await? {
        count += rows.len();
        ensure!(
            count <= PDF_ROWS_MAX,
            "the list has more than {PDF_ROWS_MAX} rows, the most of a PDF: select fewer rows, or use --csv"
        );
        let names = list.names();
        let table = table.get_or_insert_with(|| Table::new(title, &id, &notes, &names, &rows));
        for row in &rows {
            table.push(row);
        }
    }
    Ok(table.context("the list has no page")?.finish())
}

/// The filter of a list, a field per line, and the time at which the document is made.
fn notes(request: &Map<String, Value>, now: OffsetDateTime) -> anyhow::Result<Vec<String>> {
    let fields = request.iter().filter(|(name, _)| *name != "context");
    let mut notes: Vec<String> = fields
        .map(|(name, value)| {
            let text = output::word(value).unwrap_or_else(|| value.to_string());
            format!("{name}: {text}")
        })
        .collect();
    if notes.is_empty() {
        notes.push("No filter".to_owned());
    }
    let now = now.replace_nanosecond(0)?.format(&Rfc3339)?;
    notes.push(format!("Made at {now} (UTC)"));
    Ok(notes)
}

/// The list of a call, read page by page.
struct List<A> {
    /// Calls with a request and returns the answer.
    ask: A,
    path: String,
    field: FieldDescriptor,
    columns: Vec<Column>,
    request: Map<String, Value>,
    /// Token of the next page; `None` for the first page.
    token: Option<String>,
    is_read: bool,
}

impl<A: AsyncFn(&Value) -> anyhow::Result<Value>> List<A> {
    fn new(ask: A, path: &str, matches: &ArgMatches) -> anyhow::Result<Self> {
        let method = schema::method(path).with_context(|| format!("unknown call {path}"))?;
        let field = list(&method).with_context(|| format!("{path} returns no list"))?;
        Ok(Self {
            ask,
            path: path.to_owned(),
            columns: columns(&field),
            field,
            request: call::request(&method, matches)?,
            token: None,
            is_read: false,
        })
    }

    /// The names of the columns.
    fn names(&self) -> Vec<&str> {
        self.columns.iter().map(|column| &*column.name).collect()
    }

    /// The rows of the next page, with a text per column; `None` after the last page.
    async fn page(&mut self) -> anyhow::Result<Option<Vec<Vec<String>>>> {
        if self.is_read {
            return Ok(None);
        }
        next_page(&mut self.request, self.token.as_ref());
        let request = Value::Object(self.request.clone());
        let answer = (self.ask)(&request).await?;
        let row = |object: &Value| -> Vec<String> {
            let cells = self.columns.iter().map(|column| column.cell(object));
            cells.collect()
        };
        let objects = answer[self.field.json_name()].as_array();
        let rows = objects.into_iter().flatten().map(row).collect();
        let next = answer["pagination"]["nextPageToken"].as_str();
        let next = next.filter(|next| !next.is_empty()).map(str::to_owned);
        if next.is_some() && next == self.token {
            bail!("{} returned the same page token again", self.path);
        }
        self.is_read = next.is_none();
        self.token = next;
        Ok(Some(rows))
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
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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

    /// A list of users whose answers are `pages`, and the number of calls that it made.
    fn users<'a>(
        pages: &'a [Value],
        calls: &'a AtomicUsize,
    ) -> List<impl AsyncFn(&Value) -> anyhow::Result<Value>> {
        let ask = async move |_: &Value| {
            let call = calls.fetch_add(1, Relaxed);
            anyhow::Ok(pages[call].clone())
        };
        let matches = crate::cli::command().get_matches_from(["platform", "user", "list"]);
        let (_, matches) = matches.subcommand().expect("a noun");
        let (_, matches) = matches.subcommand().expect("a verb");
        let path = "dfa.identity.v1.IdentityService/ListUsers";
        List::new(ask, path, matches).expect("a list")
    }

    // rows: R350
    #[tokio::test]
    async fn r350_a_pdf_is_written_to_a_new_file_only_and_before_the_first_call() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("users.pdf");
        let calls = AtomicUsize::new(0);
        let page = |name: &str, token: &str| {
            json!({
                "users": [{ "userId": name }],
                "pagination": { "nextPageToken": token },
            })
        };
        let pages = [page("Анна", "2"), page("Борис", "")];
        let written = write_pdf(users(&pages, &calls), "user list", &file).await;
        written.expect("written");
        assert_eq!(calls.load(Relaxed), 2);
        let document = fs::read(&file).expect("the file");
        assert!(document.starts_with(b"%PDF-1.7\n"));

        let again = write_pdf(users(&pages, &calls), "user list", &file).await;
        let error = again.expect_err("the file exists").to_string();
        assert!(error.ends_with("users.pdf exists: remove it or name another file"));
        assert_eq!(fs::read(&file).expect("the same file"), document);
        let nowhere = folder.path().join("none/users.pdf");
        let nowhere = write_pdf(users(&pages, &calls), "user list", &nowhere).await;
        let error = nowhere.expect_err("no such folder").to_string();
        assert!(error.starts_with("cannot create "), "{error}");
        assert_eq!(calls.load(Relaxed), 2, "no call without a file");
    }

    // rows: R350
    #[tokio::test]
    async fn r350_a_pdf_of_too_many_rows_is_refused_and_leaves_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("users.pdf");
        let calls = AtomicUsize::new(0);
        let pages = [json!({ "users": vec![json!({}); PDF_ROWS_MAX + 1] })];
        let refused = write_pdf(users(&pages, &calls), "user list", &file).await;
        let error = refused.expect_err("too many rows").to_string();
        assert!(error.contains("more than 100000 rows") && error.contains("--csv"));
        assert!(!file.exists());
    }

    // rows: R350
    #[test]
    fn r350_a_pdf_has_its_filter_and_time() {
        let now = OffsetDateTime::from_unix_timestamp(1_796_032_800).expect("a time");
        let request = json!({
            "context": { "requestId": "1" },
            "subaccount_id": "anna:CFA-RUB",
            "pagination": { "page_size": "2", "page_token": "a" },
        });
        let request = request.as_object().expect("an object");
        let time = "Made at 2026-11-30T10:00:00Z (UTC)";
        assert_eq!(
            notes(request, now).expect("a time"),
            [
                "subaccount_id: anna:CFA-RUB",
                r#"pagination: {"page_size":"2","page_token":"a"}"#,
                time
            ]
        );
        let notes = notes(&Map::new(), now).expect("a time");
        assert_eq!(notes, ["No filter", time]);
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
