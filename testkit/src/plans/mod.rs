//! Query plans: the cost of a statement may not grow with the stored rows. This file covers SQLite,
//! [`postgres`] PostgreSQL.
//!
//! A test records the text of every executed statement ([`record`]), drives its service through all
//! states of its stored data, and explains the statements on the same databases ([`explain`]). The
//! recorder is process-wide, so such a test is a test binary of its own with one test.
//!
//! What counts as a scan on SQLite:
//! - a scan of a table or a full index (`SCAN`), and an automatic index for one statement
//!   (`AUTOMATIC`). Exceptions: a partial index, since it holds only open, queued or refused rows;
//!   the rows of a subquery, whose own plan lines are checked; a table of one row;
//! - a search by a bare code (`status=?`): most rows may match;
//! - a page selected by time (or sequence) alone with other conditions tested row by row: the
//!   matching rows may be the oldest;
//! - a page from several indexes joined by `OR`: every row of each is read and sorted for each
//!   page.
//!
//! SQLite files of such tests have few rows: without statistics (no store runs `ANALYZE`) a plan
//! does not depend on the number of rows. PostgreSQL's plans do, so its test fills the tables
//! (`docs/decisions/2026-11-29-explain-sqlites-statements-on-few-rows.md`).

pub mod postgres;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Mutex;

use sqlx::{AssertSqlSafe, Connection, Row, SqliteConnection};
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

static STATEMENTS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A statement that may scan, with the reason.
pub struct Allowed {
    /// Part of its text, with whitespace collapsed.
    pub statement: &'static str,
    pub reason: &'static str,
}

/// The explained statements, and those that scan.
#[derive(Debug, Default)]
pub struct Explained {
    /// Statements that one of the databases can run.
    explained: Vec<String>,
    /// Statement, and the plan lines that scan.
    scans: Vec<(String, Vec<String>)>,
}

impl Explained {
    /// Checks that only the `allowed` statements scan.
    ///
    /// # Panics
    /// A statement scans without permission, or a permitted one does not scan.
    pub fn assert_no_scans(&self, allowed: &[Allowed]) {
        let is_allowed = |statement: &str| {
            let fits = |allowed: &Allowed| statement.contains(allowed.statement);
            allowed.iter().any(fits)
        };
        let found: Vec<_> = (self.scans.iter())
            .filter(|(statement, _)| !is_allowed(statement))
            .collect();
        assert!(
            found.is_empty(),
            "statements that scan without permission: {found:#?}"
        );
        for Allowed { statement, reason } in allowed {
            let scans = self.scans.iter().any(|(text, _)| text.contains(statement));
            assert!(
                scans,
                "`{statement}` ({reason}) does not scan: remove its permission"
            );
        }
    }

    /// Checks that the test has executed a statement with each of these parts.
    ///
    /// # Panics
    /// No explained statement contains one of the parts.
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

/// Records the text of every statement from now on, in the whole process.
///
/// # Panics
/// A trace subscriber is set already.
pub fn record() {
    tracing::subscriber::set_global_default(Statements).expect("one test per program");
}

/// Waits until a statement that contains `part` is recorded: that of a worker may come late.
///
/// # Panics
/// None is within [`crate::PATIENCE`].
pub async fn until_recorded(part: &str) {
    let is_recorded = || {
        let statements = STATEMENTS.lock().expect("no panic with the lock");
        statements.iter().any(|statement| statement.contains(part))
    };
    crate::eventually(async || is_recorded().then_some(())).await;
}

/// Explains each recorded statement on the first of these SQLite files that can run it. Skips
/// statements of other stores.
///
/// # Panics
/// A file cannot be read.
pub async fn explain(files: &[&Path]) -> Explained {
    let mut databases = Vec::new();
    for file in files {
        let url = format!("sqlite://{}?mode=ro", file.display());
        databases.push(SqliteConnection::connect(&url).await.expect("opens"));
    }
    let statements = STATEMENTS.lock().expect("no panic with the lock").clone();
    let mut explained = Explained::default();
    for statement in statements {
        for database in &mut databases {
            if let Some(scans) = scans(database, &statement).await {
                explained.add(statement, scans);
                break;
            }
        }
    }
    explained
}

/// Plan lines that visit rows outside the result. `None`: this database cannot run the statement.
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

/// Objects that may be scanned.
struct Bounded {
    /// Partial indexes.
    partial: Vec<String>,
    /// Tables of one row.
    singles: Vec<String>,
}

/// True if a plan step produces the rows that another step calls `name`.
fn makes(step: &str, name: &str, statement: &str) -> bool {
    let made = ["CO-ROUTINE ", "MATERIALIZE "];
    let made = made.iter().find_map(|how| step.strip_prefix(how));
    made.is_some_and(|made| made == name || statement.contains(&format!(" {made} {name} ")))
}

fn is_scan(line: &str, plan: &[String], statement: &str, bounded: &Bounded) -> bool {
    let index = line.split_once(" INDEX ").map_or("", |(_, rest)| rest);
    let index = index.split(' ').next().unwrap_or_default();
    let is_partial = bounded.partial.iter().any(|name| name == index);
    if let Some(scanned) = line.strip_prefix("SCAN ") {
        return !is_partial
            && !bounded.singles.iter().any(|name| name == scanned)
            && !plan.iter().any(|step| makes(step, scanned, statement))
            && !line.contains("VIRTUAL TABLE")
            && !line.ends_with(" VALUES CLAUSE")
            && !line.contains("CONSTANT ROW");
    }
    let by_code = ["(flow=?)", "(kind=?)", "(status=?)"];
    let is_page = statement.contains(") < (") || statement.contains("sequence < ?");
    line.contains(" AUTOMATIC ")
        || by_code.iter().any(|code| line.ends_with(code))
        || is_page && line == "MULTI-INDEX OR"
        || is_page && !is_partial && is_time_range_only(line) && has_filter(statement)
}

/// True for a search bounded by a position in time only.
fn is_time_range_only(line: &str) -> bool {
    let bounds = line.split_once(" (").map_or("", |(_, bounds)| bounds);
    (bounds.ends_with("<?)") || bounds.ends_with("<(?,?))")) && !bounds.contains("=?")
}

/// True if the statement compares another column with a value, besides the position in time.
fn has_filter(statement: &str) -> bool {
    let conditions = statement.split_once(" WHERE ");
    let conditions = conditions.map_or("", |(_, conditions)| conditions);
    [" = ?", " = $"]
        .iter()
        .any(|term| conditions.contains(term))
}

/// Collects the text of every statement that sqlx or the ledger's own writer executes.
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
