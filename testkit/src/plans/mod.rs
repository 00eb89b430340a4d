//! Query plans: no statement may cost more the more rows are stored. This file is about SQLite,
//! [`postgres`] about PostgreSQL.
//!
//! A test records the text of every statement that runs ([`record`]), drives its service through
//! the life of what it stores, and explains the statements on the databases that they ran on
//! ([`judge`]). The record is process-wide, so such a test is a test program of its own with one
//! test.
//!
//! What counts as a scan on SQLite:
//! - a walk over a table or a full index (`SCAN`), and an index that SQLite builds for one
//!   statement (`AUTOMATIC`). A walk over a partial index is none: what is open, queued or refused
//!   ends where that does. Nor is one over the rows of a subquery, whose own lines are judged, or
//!   over a table of one row;
//! - a search by a bare code (`status=?`): most rows may have it;
//! - a page found by time (or sequence) alone, whose other conditions are tested row by row: the rows
//!   that fit may be the oldest;
//! - a page out of several indexes joined by `OR`: every row of each is read and sorted, for each page.

pub mod postgres;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Mutex;

use sqlx::{AssertSqlSafe, Connection, Row, SqliteConnection};
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

static STATEMENTS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A statement that scans with good reason.
pub struct Allowed {
    /// Part of its text; white space is one blank.
    pub statement: &'static str,
    pub reason: &'static str,
}

/// What the databases say about the recorded statements.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Statements that one of the databases can run.
    explained: Vec<String>,
    /// (statement, lines of its plan that scan)
    scans: Vec<(String, Vec<String>)>,
}

impl Verdict {
    /// # Panics
    /// A statement scans that is not allowed to, or one that is allowed to was never seen to scan.
    pub fn assert_no_scans(&self, allowed: &[Allowed]) {
        let is_allowed = |statement: &str| {
            let fits = |allowed: &Allowed| statement.contains(allowed.statement);
            allowed.iter().any(fits)
        };
        let found: Vec<_> = (self.scans.iter())
            .filter(|(statement, _)| !is_allowed(statement))
            .collect();
        assert!(found.is_empty(), "statements that scan: {found:#?}");
        for Allowed { statement, reason } in allowed {
            let scans = self.scans.iter().any(|(text, _)| text.contains(statement));
            assert!(scans, "`{statement}` ({reason}) does not scan");
        }
    }

    /// # Panics
    /// No explained statement contains one of these parts: the test does not drive the service far enough.
    pub fn assert_explained(&self, parts: &[&str]) {
        let is_missing =
            |part: &&&str| !(self.explained.iter()).any(|statement| statement.contains(**part));
        let missing: Vec<_> = parts.iter().filter(is_missing).collect();
        assert!(missing.is_empty(), "never explained: {missing:#?}");
    }

    fn add(&mut self, statement: String, scans: Vec<String>) {
        if !scans.is_empty() {
            self.scans.push((statement.clone(), scans));
        }
        self.explained.push(statement);
    }
}

/// Records the text of every statement from here on, in the whole process.
///
/// # Panics
/// The process has a subscriber to its traces already.
pub fn record() {
    tracing::subscriber::set_global_default(Statements).expect("one test per program");
}

/// Explains each recorded statement on the first of these SQLite files that can run it. Statements
/// of other stores are passed over.
///
/// # Panics
/// A file cannot be read.
pub async fn judge(files: &[&Path]) -> Verdict {
    let mut databases = Vec::new();
    for file in files {
        let url = format!("sqlite://{}?mode=ro", file.display());
        databases.push(SqliteConnection::connect(&url).await.expect("opens"));
    }
    let statements = STATEMENTS.lock().expect("no panic with the lock").clone();
    let mut verdict = Verdict::default();
    for statement in statements {
        for database in &mut databases {
            if let Some(scans) = scans(database, &statement).await {
                verdict.add(statement, scans);
                break;
            }
        }
    }
    verdict
}

/// Lines of the statement's plan that visit rows which it does not ask for. `None`: it does not run on this database.
async fn scans(database: &mut SqliteConnection, statement: &str) -> Option<Vec<String>> {
    let explain = format!("EXPLAIN QUERY PLAN {statement}");
    let plan = sqlx::query(AssertSqlSafe(explain)).fetch_all(&mut *database);
    let plan = plan.await.ok()?;
    let mut names = async |sql: &'static str| -> Vec<String> {
        let names = sqlx::query_scalar(sql).fetch_all(&mut *database);
        names.await.expect("schema")
    };
    let bounded = Bounded {
        partial: names(
            "SELECT name FROM sqlite_schema WHERE type = 'index' AND sql LIKE '% WHERE %'",
        )
        .await,
        singles: names(
            "SELECT name FROM sqlite_schema WHERE sql LIKE '%PRIMARY KEY CHECK (% = 1)%'",
        )
        .await,
    };
    let lines: Vec<String> = plan.iter().map(|row| row.get("detail")).collect();
    let is_scan = |line: &&String| is_scan(line, &lines, statement, &bounded);
    Some(lines.iter().filter(is_scan).cloned().collect())
}

/// What may be walked.
struct Bounded {
    /// Partial indexes.
    partial: Vec<String>,
    /// Tables of one row.
    singles: Vec<String>,
}

/// Whether a step of the plan makes what another one calls by this name.
fn makes(step: &str, name: &str, statement: &str) -> bool {
    let made = ["CO-ROUTINE ", "MATERIALIZE "];
    let made = made.iter().find_map(|how| step.strip_prefix(how));
    made.is_some_and(|made| made == name || statement.contains(&format!(" {made} {name} ")))
}

fn is_scan(line: &str, plan: &[String], statement: &str, bounded: &Bounded) -> bool {
    let index = line.split_once(" INDEX ").map_or("", |(_, rest)| rest);
    let index = index.split(' ').next().unwrap_or_default();
    let is_partial = bounded.partial.iter().any(|name| name == index);
    if let Some(walked) = line.strip_prefix("SCAN ") {
        return !is_partial
            && !bounded.singles.iter().any(|name| name == walked)
            && !plan.iter().any(|step| makes(step, walked, statement))
            && !line.contains("VIRTUAL TABLE")
            && !line.ends_with(" VALUES CLAUSE")
            && !line.contains("CONSTANT ROW");
    }
    let by_code = ["(flow=?)", "(kind=?)", "(status=?)"];
    let is_page = statement.contains(") < (") || statement.contains("sequence < ?");
    line.contains(" AUTOMATIC ")
        || by_code.iter().any(|code| line.ends_with(code))
        || is_page && line == "MULTI-INDEX OR"
        || is_page && !is_partial && is_by_time_alone(line) && has_filter(statement)
}

/// A search whose only bound is a position in time.
fn is_by_time_alone(line: &str) -> bool {
    let bounds = line.split_once(" (").map_or("", |(_, bounds)| bounds);
    (bounds.ends_with("<?)") || bounds.ends_with("<(?,?))")) && !bounds.contains("=?")
}

/// The statement compares something with a value beside its position in time.
fn has_filter(statement: &str) -> bool {
    let conditions = statement.split_once(" WHERE ");
    let conditions = conditions.map_or("", |(_, conditions)| conditions);
    [" = ?", " = $"]
        .iter()
        .any(|term| conditions.contains(term))
}

/// Keeps the text of every statement that sqlx runs, and of those that the ledger's writer runs by itself.
struct Statements;

#[derive(Default)]
struct Statement {
    summary: String,
    full: String,
}

impl Visit for Statement {
    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "summary" => value.clone_into(&mut self.summary),
            "db.statement" => value.clone_into(&mut self.full),
            _ => {}
        }
    }
}

impl Subscriber for Statements {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ["sqlx::query", "events::statements"].contains(&metadata.target())
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut statement = Statement::default();
        event.record(&mut statement);
        // A short statement is its own summary.
        let text = if statement.full.is_empty() {
            statement.summary
        } else {
            statement.full
        };
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        // Settings, transactions and migrations have no plan.
        let planned = ["SELECT ", "WITH ", "INSERT ", "UPDATE ", "DELETE "];
        if !planned.iter().any(|verb| text.starts_with(verb)) {
            return;
        }
        let mut statements = STATEMENTS.lock().expect("no panic with the lock");
        statements.insert(text);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
