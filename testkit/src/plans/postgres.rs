//! Query plans on PostgreSQL, as the server reports them per executed statement.
//!
//! The server's `auto_explain` sends each plan, with the rows read per step, as a notice to the
//! executing session. This includes statements inside functions and foreign key look-ups. A session
//! is recorded if its URL has [`SETTINGS`] and its user is a superuser. A recording test may thus
//! share its process with other tests, unlike one on SQLite.
//!
//! What counts as a scan:
//! - a sequential scan of a table, except for its first row alone (`EXISTS (SELECT 1 FROM t)`) and
//!   except of tables that do not grow;
//! - a step that reads more rows than the limit, filtered rows included. The tables hold a multiple
//!   of the limit, and no statement asks for more rows than the limit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Mutex;

use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

use super::Explained;

/// Settings to append to the query of a session's URL.
pub const SETTINGS: &str = "options[session_preload_libraries]=auto_explain\
     &options[auto_explain.log_min_duration]=0\
     &options[auto_explain.log_nested_statements]=on\
     &options[auto_explain.log_analyze]=on\
     &options[auto_explain.log_timing]=off\
     &options[auto_explain.log_format]=json\
     &options[auto_explain.log_level]=notice";

/// Steps of the plans of each statement.
static PLANS: Mutex<BTreeMap<String, BTreeSet<Step>>> = Mutex::new(BTreeMap::new());

/// A plan step with the rows read in all its loops.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Step {
    node: String,
    /// Empty for a step that reads no table.
    table: String,
    index: String,
    rows: u64,
    is_first_row: bool,
}

/// Records the plans of all sessions with [`SETTINGS`] from now on.
///
/// # Panics
/// A trace subscriber is set already.
pub fn record() {
    tracing::subscriber::set_global_default(Notices).expect("one recorder per program");
}

/// Drops the plans recorded before the tables were filled.
pub fn forget() {
    PLANS.lock().expect("no panic with the lock").clear();
}

/// Explains the recorded statements. A step may read at most `rows_max` rows. `small`: tables that
/// do not grow.
pub fn explain(rows_max: u64, small: &[&str]) -> Explained {
    let plans = PLANS.lock().expect("no panic with the lock").clone();
    let mut explained = Explained::default();
    for (statement, steps) in plans {
        let scans = steps.iter().filter(|step| step.is_scan(rows_max, small));
        let scans = scans.map(Step::to_string);
        let scans = scans.collect();
        explained.add(statement, scans);
    }
    explained
}

impl Step {
    fn is_scan(&self, rows_max: u64, small: &[&str]) -> bool {
        let is_grown = !self.table.starts_with("pg_") && !small.contains(&&*self.table);
        let is_sequential = self.node == "Seq Scan" && is_grown && !self.is_first_row;
        is_sequential || self.rows > rows_max
    }

    fn of(plan: &Value) -> Self {
        let text = |field: &str| plan[field].as_str().unwrap_or_default().to_owned();
        // Per loop; whole numbers before PostgreSQL 18.
        let number = |field: &str| plan[field].as_f64().unwrap_or_default();
        let dropped = ["Filter", "Index Recheck", "Join Filter"];
        let dropped = dropped.map(|by| number(&format!("Rows Removed by {by}")));
        let rows = number("Actual Rows") + dropped.iter().sum::<f64>();
        Step {
            node: text("Node Type"),
            table: text("Relation Name"),
            index: text("Index Name"),
            rows: (rows * number("Actual Loops")) as u64,
            is_first_row: number("Actual Loops") == 1.0 && rows <= 1.0 && plan["Filter"].is_null(),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [&self.node, &self.table, &self.index];
        for name in names.into_iter().filter(|name| !name.is_empty()) {
            write!(f, "{name} ")?;
        }
        write!(f, "reads {} rows", self.rows)
    }
}

fn add_steps(plan: &Value, steps: &mut BTreeSet<Step>) {
    steps.insert(Step::of(plan));
    for below in plan["Plans"].as_array().into_iter().flatten() {
        add_steps(below, steps);
    }
}

/// Records an `auto_explain` message; ignores other notices.
fn record_notice(message: &str) {
    let Some((_, report)) = message.split_once("  plan:\n") else {
        return;
    };
    let report: Value = serde_json::from_str(report).expect("the format is JSON");
    let text = report["Query Text"].as_str().unwrap_or_default();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut plans = PLANS.lock().expect("no panic with the lock");
    add_steps(&report["Plan"], plans.entry(text).or_default());
}

/// Receives the server's notices, which sqlx emits as trace events.
struct Notices;

struct Message;

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            record_notice(&format!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            record_notice(value);
        }
    }
}

impl Subscriber for Notices {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "sqlx::postgres::notice"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Message);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
