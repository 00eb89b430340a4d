//! One RPC from the command line. Builds the request from flags, calls over Connect with JSON, and
//! prints the answer.

use anyhow::{Context, bail};
use clap::{Arg, ArgMatches, Command};
use prost_reflect::MethodDescriptor;
use serde_json::{Map, Value, json};

use super::{export, ledger, output, schema, table, units};

/// Address and credential of calls.
#[derive(Clone)]
pub struct Target {
    pub url: String,
    pub token: String,
    pub http: reqwest::Client,
}

impl Target {
    /// A `url` without a scheme is an `http` URL.
    pub fn new(url: &str, token: &str) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .build()
            .context("cannot set up the HTTP client")?;
        Ok(Self {
            url: base(url),
            token: token.to_owned(),
            http,
        })
    }

    /// The same address with another credential.
    pub fn with_token(&self, token: impl Into<String>) -> Self {
        Self {
            token: token.into(),
            ..self.clone()
        }
    }

    /// Calls `<package>.<Service>/<Method>` with a request in proto3 JSON.
    ///
    /// # Errors
    /// [`Refusal`] if the platform answers with an error, another error if it does not answer.
    pub async fn call(&self, path: &str, request: &Value) -> anyhow::Result<Value> {
        let response = self
            .http
            .post(format!("{}/{path}", self.url))
            .bearer_auth(&self.token)
            .header("content-type", "application/json")
            .json(request)
            .send()
            .await
            .with_context(|| format!("no answer from {} (is the platform running?)", self.url))?;
        let status = response.status();
        let body: Value = response.json().await.unwrap_or_default();
        if status.is_success() {
            return Ok(body);
        }
        Err(Refusal {
            code: body["code"].as_str().unwrap_or(status.as_str()).to_owned(),
            message: body["message"].as_str().unwrap_or_default().to_owned(),
            body,
        }
        .into())
    }
}

/// The base URL for the paths of calls: with a scheme, without a trailing slash.
fn base(url: &str) -> String {
    let url = url.trim_end_matches('/');
    if url.contains("://") {
        url.to_owned()
    } else {
        format!("http://{url}")
    }
}

/// An error answered by the platform: Connect code and message.
#[derive(Debug)]
pub struct Refusal {
    pub code: String,
    pub message: String,
    pub body: Value,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Refusal {}

/// The commands of every noun in the table.
pub fn commands() -> Vec<Command> {
    table::NOUNS
        .iter()
        .map(|(noun, about)| {
            let verbs = table::ENTRIES
                .iter()
                .filter(|entry| entry.noun == *noun)
                .map(|entry| verb(entry.verb, entry.path));
            Command::new(*noun)
                .about(*about)
                .subcommand_required(true)
                .arg_required_else_help(true)
                .subcommands(verbs)
        })
        .collect()
}

/// The command of one call.
pub fn verb(name: &'static str, path: &str) -> Command {
    let method = schema::method(path).expect("the table names methods of the contract");
    let about = schema::comment(&method.parent_file(), method.path())
        .unwrap_or_else(|| method.name().to_owned());
    let approval = rpc::roles::approval(path).map(|_| {
        Arg::new("approval")
            .long("approval")
            .value_name("REASON")
            .help("Request the call for this reason; another person approves it")
    });
    Command::new(name)
        .about(about)
        .args(schema::flags(&method.input()))
        .args(approval)
        .args(export::flags(&method))
        .arg(
            Arg::new("idempotency-key")
                .long("idempotency-key")
                .value_name("TEXT")
                .help("Idempotency key; generated if omitted"),
        )
        .arg(
            Arg::new("data")
                .long("data")
                .value_name("JSON")
                .help("The whole request as proto3 JSON; flags override its fields"),
        )
}

/// Runs `platform <noun> <verb> ...`; `None` if the table has no such noun and verb.
pub async fn run(
    target: &Target,
    noun: &str,
    matches: &ArgMatches,
    json: bool,
) -> Option<anyhow::Result<()>> {
    let (verb, matches) = matches.subcommand()?;
    let entry = table::ENTRIES
        .iter()
        .find(|entry| entry.noun == noun && entry.verb == verb)?;
    let title = format!("{noun} {verb}");
    if let Some(exported) = export::run(target, &title, entry.path, matches).await {
        return Some(exported);
    }
    Some(ask(target, entry.path, matches).await.and_then(|answer| {
        if json {
            println!("{}", serde_json::to_string_pretty(&answer)?);
        } else {
            print!("{}", text(entry.path, answer.clone()));
        }
        check_report(entry.path, &answer)
    }))
}

/// The answer of a call as text. Amounts of the ledger have units.
fn text(path: &str, mut answer: Value) -> String {
    if path.starts_with(units::CALLS) {
        units::add(&mut answer);
    }
    match path {
        ledger::BALANCE => ledger::balance(&answer),
        _ => output::text(&answer),
    }
}

/// A reconciliation that does not balance is an error of the command, for schedulers.
fn check_report(path: &str, answer: &Value) -> anyhow::Result<()> {
    if !path.ends_with("/Reconcile") || answer["report"]["balanced"] == json!(true) {
        return Ok(());
    }
    let difference = &answer["report"]["unexplainedDifference"]["amount"]["value"];
    bail!(
        "discrepancy of {} RUB between bank and supply",
        difference.as_str().unwrap_or("unknown")
    )
}

/// The request from the flags of [`verb`].
///
/// # Errors
/// Flags that are not a valid request.
pub fn request(
    method: &MethodDescriptor,
    matches: &ArgMatches,
) -> anyhow::Result<Map<String, Value>> {
    let mut request = match matches.get_one::<String>("data") {
        Some(text) => match serde_json::from_str(text).context("--data is not JSON")? {
            Value::Object(object) => object,
            _ => bail!("--data: expected a JSON object"),
        },
        None => Map::new(),
    };
    for (name, value) in schema::request(&method.input(), matches)? {
        merge(&mut request, name, value);
    }
    request.entry("context").or_insert_with(|| {
        context(
            matches
                .get_one::<String>("idempotency-key")
                .map(String::as_str),
        )
    });
    Ok(request)
}

/// Builds the request and calls.
///
/// # Errors
/// As [`request`] and [`Target::call`].
pub async fn ask(target: &Target, path: &str, matches: &ArgMatches) -> anyhow::Result<Value> {
    let method = schema::method(path).with_context(|| format!("unknown call {path}"))?;
    let mut request = request(&method, matches)?;
    // Only calls that take two persons have the flag.
    let Ok(Some(reason)) = matches.try_get_one::<String>("approval") else {
        return target.call(path, &Value::Object(request)).await;
    };
    let context = request.remove("context");
    let approval = json!({
        "context": context,
        "method": path,
        "requestJson": Value::Object(request).to_string(),
        "reason": reason,
    });
    target.call(rpc::status::REQUEST_APPROVAL, &approval).await
}

fn merge(object: &mut Map<String, Value>, name: String, value: Value) {
    match (object.get_mut(&name), value) {
        (Some(Value::Object(old)), Value::Object(new)) => {
            for (name, value) in new {
                merge(old, name, value);
            }
        }
        (_, value) => {
            object.insert(name, value);
        }
    }
}

/// A fresh RequestContext.
pub fn context(idempotency_key: Option<&str>) -> Value {
    let id = uuid::Uuid::now_v7().to_string();
    json!({
        "requestId": id,
        "correlationId": id,
        "idempotencyKey": idempotency_key.unwrap_or(&id),
        "source": "platform-cli",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R350
    #[test]
    fn r350_an_address_without_a_scheme_is_http() {
        for (given, url) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("localhost:8080/", "http://localhost:8080"),
            ("[::1]:8080", "http://[::1]:8080"),
            ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
            ("https://platform.example", "https://platform.example"),
        ] {
            assert_eq!(base(given), url);
        }
    }

    // rows: R350
    #[test]
    fn r350_the_words_for_a_balance_print_the_same_table() {
        let answer = json!({
            "subaccountId": "anna:CFA-RUB", "instrumentId": "CFA-RUB",
            "balance": { "value": "100.50" },
        });
        let mut entries = table::ENTRIES.iter();
        let entry = entries.find(|entry| (entry.noun, entry.verb) == ("subaccount", "balance"));
        assert_eq!(entry.map(|entry| entry.path), Some(ledger::BALANCE));
        let shown = text(ledger::BALANCE, answer);
        assert!(shown.starts_with("SUB-ACCOUNT "), "{shown}");
        assert!(shown.contains("anna:CFA-RUB  100.50 CFA-RUB"), "{shown}");
    }

    // rows: R350
    #[test]
    fn r350_calls_that_take_two_persons_can_be_requested() {
        let has_flag = |path: &str| {
            let command = verb("verb", path);
            let mut flags = command.get_arguments();
            flags.any(|flag| flag.get_id() == "approval")
        };
        for entry in table::ENTRIES {
            let takes_two = rpc::roles::approval(entry.path).is_some();
            assert_eq!(has_flag(entry.path), takes_two, "{}", entry.path);
        }
    }

    // rows: R350
    #[test]
    fn r350_a_reconciliation_with_a_discrepancy_is_an_error_of_the_command() {
        let run = "dfa.payments.v1.PaymentsService/Reconcile";
        let latest = "dfa.payments.v1.PaymentsService/GetLatestReport";
        let differs =
            json!({ "report": { "unexplainedDifference": { "amount": { "value": "-0.01" } } } });
        let error = check_report(run, &differs).expect_err("not balanced");
        assert_eq!(
            error.to_string(),
            "discrepancy of -0.01 RUB between bank and supply"
        );
        assert!(check_report(run, &json!({})).is_err(), "no report");
        let balanced = json!({ "report": { "balanced": true } });
        check_report(run, &balanced).expect("balanced");
        check_report(latest, &differs).expect("a read of an old report");
    }
}
