//! Query plans: no statement may cost more the more rows are stored.
//!
//! A test records the text of every statement that runs ([`record`]), drives its service through the life of what it stores, and explains the
//! statements on the databases that they ran on ([`judge`]). The record is process-wide, so such a test is a test program of its own with one test.
//!
//! What counts as a scan on SQLite:
//! - a walk over a table or a full index (`SCAN`), and an index that SQLite builds for one statement (`AUTOMATIC`). A walk over a partial index is
//!   none: what is open, queued or refused ends where that does;
//! - a search by a bare code (`status=?`): most rows may have it.

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

/// Explains each recorded statement on the first of these SQLite files that can run it. Statements of other stores are passed over.
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
    let partial: Vec<String> = sqlx::query_scalar(
        "SELECT name FROM sqlite_schema WHERE type = 'index' AND sql LIKE '% WHERE %'",
    )
    .fetch_all(database)
    .await
    .expect("schema");
    let lines = plan.iter().map(|row| row.get::<String, _>("detail"));
    Some(lines.filter(|line| is_scan(line, &partial)).collect())
}

fn is_scan(line: &str, partial: &[String]) -> bool {
    if line.starts_with("SCAN ") {
        let by_partial = |index: &String| line.ends_with(&format!(" INDEX {index}"));
        return !partial.iter().any(by_partial)
            && !line.contains("VIRTUAL TABLE")
            && !line.ends_with(" VALUES CLAUSE")
            && line != "SCAN CONSTANT ROW";
    }
    let by_code = ["(flow=?)", "(kind=?)", "(status=?)"];
    line.contains(" AUTOMATIC ") || by_code.iter().any(|code| line.ends_with(code))
}

/// Keeps the text of every statement that sqlx runs.
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
        metadata.target() == "sqlx::query"
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
        let mut statements = STATEMENTS.lock().expect("no panic with the lock");
        statements.insert(text);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
