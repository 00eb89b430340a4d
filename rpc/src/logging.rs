//! JSON log lines (R259): `timestamp`, `level` (INFO, WARN or ERROR), `service_name`, `method`,
//! `trace_id`, `correlation_id`, `user_id`, `target`, `message`, then the event's own fields. One
//! line per event, unbuffered, in one call of the sink.
//!
//! Ids come from the innermost span that has them, as do `service_name` and a call's `method`.
//! Without such a span, `service_name` is the service whose crate logs, or else the name passed to
//! [`init`]. Lines outside a request have no ids. An event's field overrides a span's field of the
//! same name.

use std::{
    fmt,
    io::{self, Write},
};

use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::{
    filter::{ParseError, Targets},
    layer::{Context, Layer, SubscriberExt},
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use crate::Error;

/// Span fields repeated on every line inside the span.
const INHERITED: [&str; 5] = [
    "service_name",
    "method",
    "trace_id",
    "correlation_id",
    "user_id",
];

/// Logs JSON to stderr or stdout. `filter` has levels by target (`info`, `info,sqlx=warn`); the
/// variable `PLATFORM_LOG` overrides it.
///
/// # Errors
/// [`Error::Logging`] if a logger is installed already or the filter is invalid.
pub fn init(service_name: &str, filter: &str, to: Output) -> Result<(), Error> {
    let filter = std::env::var("PLATFORM_LOG").unwrap_or_else(|_| filter.to_owned());
    let write: fn(&[u8]) = match to {
        Output::Stdout => |line| drop(io::stdout().lock().write_all(line)),
        Output::Stderr => |line| drop(io::stderr().lock().write_all(line)),
    };
    subscriber(service_name, &filter, write)?
        .try_init()
        .map_err(|error| Error::Logging(error.to_string()))
}

/// The subscriber that [`init`] installs, with any sink. `tracing::subscriber::set_default`
/// installs it for one thread.
///
/// # Errors
/// [`Error::Logging`] if the filter is invalid.
pub fn subscriber<W>(
    service_name: &str,
    filter: &str,
    write: W,
) -> Result<impl Subscriber + Send + Sync + use<W>, Error>
where
    W: Fn(&[u8]) + Send + Sync + 'static,
{
    let filter: Targets = filter
        .parse()
        .map_err(|error: ParseError| Error::Logging(error.to_string()))?;
    Ok(tracing_subscriber::registry()
        .with(filter)
        .with(JsonLines::new(service_name, write)))
}

/// Destination of the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
}

/// The logging layer; [`init`] installs it for the process.
pub struct JsonLines<W> {
    service_name: String,
    write: W,
}

impl<W: Fn(&[u8])> JsonLines<W> {
    pub fn new(service_name: &str, write: W) -> Self {
        JsonLines {
            service_name: service_name.to_owned(),
            write,
        }
    }
}

struct Inherited(Map<String, Value>);

impl<S, W> Layer<S> for JsonLines<W>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: Fn(&[u8]) + 'static,
{
    fn on_new_span(
        &self,
        attributes: &span::Attributes<'_>,
        id: &span::Id,
        context: Context<'_, S>,
    ) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        fields
            .0
            .retain(|name, _| INHERITED.contains(&name.as_str()));
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(Inherited(fields.0));
        }
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        values.record(&mut fields);
        if let Some(span) = context.span(id)
            && let Some(inherited) = span.extensions_mut().get_mut::<Inherited>()
        {
            let is_inherited = |(name, _): &(String, Value)| INHERITED.contains(&name.as_str());
            inherited
                .0
                .extend(fields.0.into_iter().filter(is_inherited));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut own = Fields::default();
        event.record(&mut own);
        let mut line = Map::new();
        line.insert("timestamp".into(), now().into());
        line.insert("level".into(), level(event.metadata().level()).into());
        let service = service_of(event.metadata().target()).unwrap_or(&self.service_name);
        line.insert("service_name".into(), service.into());
        // From the outermost span inwards, so the innermost value remains.
        for span in context
            .event_scope(event)
            .into_iter()
            .flat_map(|scope| scope.from_root())
        {
            if let Some(inherited) = span.extensions().get::<Inherited>() {
                line.extend(inherited.0.clone());
            }
        }
        line.insert("target".into(), event.metadata().target().into());
        line.extend(own.0);
        let mut text = Value::Object(line).to_string();
        text.push('\n');
        (self.write)(text.as_bytes());
    }
}

/// The service with this log target, for workers that log outside of requests.
fn service_of(target: &str) -> Option<&'static str> {
    let mut path = target.split("::");
    match path.next()? {
        "sandbox" => match path.next()? {
            "identity" => Some("identity"),
            "bank" => Some("bank"),
            _ => None,
        },
        "ledger" => Some("ledger"),
        "cfa" => Some("cfa"),
        "chain" => Some("chain"),
        "payments" => Some("payments"),
        "approvals" => Some("approvals"),
        "settlement" => Some("settlement"),
        "gateway" => Some("market"),
        _ => None,
    }
}

/// The three levels of the specification; finer ones map to INFO.
fn level(level: &Level) -> &'static str {
    match *level {
        Level::ERROR => "ERROR",
        Level::WARN => "WARN",
        _ => "INFO",
    }
}

fn now() -> String {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    prost_types::Timestamp {
        seconds: since.as_secs() as i64,
        nanos: (since.subsec_micros() * 1_000) as i32,
    }
    .to_string()
}

#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    // rows: R259 R260
    #[test]
    fn r259_lines_are_json_with_the_ids_of_their_request() {
        let lines = Arc::new(Mutex::new(Vec::<u8>::new()));
        let sink = lines.clone();
        let layer = JsonLines::new("platform", move |line: &[u8]| {
            sink.lock().unwrap().extend_from_slice(line);
        });
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::debug!("outside \"quotes\"");
            let span = tracing::info_span!(
                "request",
                service_name = "ledger",
                correlation_id = tracing::field::Empty,
                user_id = "u1",
                private = 1
            );
            span.record("correlation_id", "corr-1");
            span.in_scope(|| tracing::warn!(amount_minor = 5, "inside"));
            tracing::info!(target: "gateway::sweeper", "a worker");
        });
        let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines[0]["level"], "INFO");
        assert_eq!(lines[0]["service_name"], "platform");
        assert_eq!(lines[0]["message"], "outside \"quotes\"");
        assert_eq!(lines[1]["level"], "WARN");
        assert_eq!(lines[1]["service_name"], "ledger");
        assert_eq!(lines[1]["correlation_id"], "corr-1");
        assert_eq!(lines[1]["user_id"], "u1");
        assert_eq!(lines[1]["amount_minor"], 5);
        assert!(lines[1].get("private").is_none());
        assert_eq!(lines[2]["service_name"], "market");
    }
}
