//! Captures the rows that the service writes. Triggers on its tables copy each inserted and updated
//! row, and the last copy of each request is recorded. The bare statements therefore write the same
//! rows under any schema.

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, types::Value};

use super::{flow::Request, node::Node};

/// Tables in the order of their foreign keys. Other tables follow by name.
pub(super) const TABLE_ORDER: [&str; 7] = [
    "instruments",
    "users",
    "accounts",
    "sub_accounts",
    "holds",
    "operations",
    "postings",
];

/// A table, and the columns that updates changed.
pub struct Table {
    pub name: String,
    pub columns: Vec<String>,
    /// Indexes of the primary key's columns.
    pub key: Vec<usize>,
    /// Indexes of the columns that any update changed.
    pub changed: Vec<usize>,
}

/// Rows that one request wrote to one table.
#[derive(Default)]
pub struct Rows {
    pub inserted: Vec<Vec<Value>>,
    /// Whole rows after the update, in order.
    pub updated: Vec<Vec<Value>>,
}

/// Rows that requests wrote: `requests[request][table]`.
pub struct Captured {
    pub tables: Vec<Table>,
    pub requests: Vec<Vec<Rows>>,
    pub operations: usize,
}

/// Starts a ledger on the folder, sends it the requests one after the other for up to `limit`, and
/// returns the rows that each request wrote.
///
/// # Errors
/// The ledger refuses a request, or its file cannot be read.
pub async fn capture(
    folder: &Path,
    requests: Vec<Request>,
    limit: Duration,
) -> anyhow::Result<Captured> {
    let db = Connection::open(folder.join("ledger.sqlite"))?;
    db.busy_timeout(Duration::from_secs(30))?;
    let mut tables = tables(&db)?;
    for table in &tables {
        db.execute_batch(&triggers(table))?;
    }
    let node = Node::start(folder, "").await?;
    let mut client = node.client();
    let mut ends = Vec::with_capacity(requests.len());
    let mut operations = 0;
    let began = Instant::now();
    for request in requests {
        if began.elapsed() > limit {
            break;
        }
        operations += request.operations;
        client.create_operations(request.message).await?;
        ends.push(
            tables
                .iter()
                .map(|table| last_rowid(&db, table))
                .collect::<Result<Vec<i64>, _>>()?,
        );
    }
    node.stop().await;
    let mut requests: Vec<Vec<Rows>> = ends
        .iter()
        .map(|_| tables.iter().map(|_| Rows::default()).collect())
        .collect();
    for (place, table) in tables.iter_mut().enumerate() {
        read_rows(&db, place, table, &ends, &mut requests)?;
    }
    Ok(Captured {
        tables,
        requests,
        operations,
    })
}

/// Tables of a service, without those whose name begins with `_`.
///
/// # Errors
/// The schema cannot be read.
pub(crate) fn tables(db: &Connection) -> anyhow::Result<Vec<Table>> {
    let mut names: Vec<String> = db
        .prepare(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' \
            AND name NOT LIKE '\\_%' ESCAPE '\\'",
        )?
        .query_map([], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    names.sort_by_key(|name| {
        let place = TABLE_ORDER.iter().position(|known| known == name);
        (place.unwrap_or(TABLE_ORDER.len()), name.clone())
    });
    names
        .into_iter()
        .map(|name| {
            let columns: Vec<(String, bool)> = db
                .prepare(&format!("PRAGMA table_info({name})"))?
                .query_map([], |row| {
                    Ok((row.get("name")?, row.get::<_, i64>("pk")? > 0))
                })?
                .collect::<Result<_, _>>()?;
            let key = (0..columns.len())
                .filter(|place| columns[*place].1)
                .collect();
            Ok(Table {
                name,
                key,
                columns: columns.into_iter().map(|(column, _)| column).collect(),
                changed: Vec::new(),
            })
        })
        .collect()
}

/// Table and triggers that capture the writes of a table. `written` is 0 for an insert. For an
/// update it has a bit per changed column; an update that changes nothing is not captured.
pub(crate) fn triggers(table: &Table) -> String {
    let Table { name, columns, .. } = table;
    let all = columns.join(", ");
    let new: Vec<String> = columns
        .iter()
        .map(|column| format!("new.{column}"))
        .collect();
    let new = new.join(", ");
    let bits: Vec<String> = columns
        .iter()
        .enumerate()
        .map(|(place, column)| format!("(new.{column} IS NOT old.{column}) * {}", 1_u64 << place))
        .collect();
    let bits = bits.join(" + ");
    format!(
        "CREATE TABLE captured_{name} AS SELECT 0 AS written, {all} FROM {name} WHERE 0; \
         CREATE TRIGGER capture_insert_{name} AFTER INSERT ON {name} \
         BEGIN INSERT INTO captured_{name} VALUES (0, {new}); END; \
         CREATE TRIGGER capture_update_{name} AFTER UPDATE ON {name} WHEN {bits} <> 0 \
         BEGIN INSERT INTO captured_{name} VALUES ({bits}, {new}); END;"
    )
}

/// Number of the last captured row of a table.
pub(crate) fn last_rowid(db: &Connection, table: &Table) -> rusqlite::Result<i64> {
    let sql = format!(
        "SELECT COALESCE(MAX(rowid), 0) FROM captured_{}",
        table.name
    );
    db.prepare_cached(&sql)?.query_row([], |row| row.get(0))
}

fn read_rows(
    db: &Connection,
    place: usize,
    table: &mut Table,
    ends: &[Vec<i64>],
    requests: &mut [Vec<Rows>],
) -> anyhow::Result<()> {
    let sql = format!(
        "SELECT rowid, written, {} FROM captured_{} ORDER BY rowid",
        table.columns.join(", "),
        table.name
    );
    let mut statement = db.prepare(&sql)?;
    let mut rows = statement.query([])?;
    let (mut request, mut changed) = (0, 0_i64);
    while let Some(row) = rows.next()? {
        let rowid: i64 = row.get(0)?;
        while ends.get(request).is_some_and(|ends| ends[place] < rowid) {
            request += 1;
        }
        // Background tasks wrote these rows after the last answer.
        let Some(of) = requests.get_mut(request) else {
            break;
        };
        let written: i64 = row.get(1)?;
        let values = (0..table.columns.len())
            .map(|column| row.get(column + 2))
            .collect::<Result<Vec<Value>, _>>()?;
        changed |= written;
        let of = &mut of[place];
        if written == 0 {
            of.inserted.push(values);
        } else {
            of.updated.push(values);
        }
    }
    table.changed = (0..table.columns.len())
        .filter(|column| changed & (1 << column) != 0)
        .collect();
    let updates_a_key = table.key.iter().any(|key| table.changed.contains(key));
    anyhow::ensure!(!updates_a_key, "{} changes its key", table.name);
    Ok(())
}
