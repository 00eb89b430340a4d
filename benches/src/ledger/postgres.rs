//! The ledger benchmark on PostgreSQL: its databases, the captured rows, and bare statements that
//! write them.
//!
//! Rows are passed as text, one array per column, and the server casts them. This code is therefore
//! independent of the schema.

use std::time::{Duration, Instant};

use anyhow::Context;
use rusqlite::types::Value;
use sqlx::{
    AssertSqlSafe, Connection, PgConnection, Row,
    postgres::{PgConnectOptions, PgRow},
};

use super::baseline::{Write, net_writes};
use super::capture::{Captured, Rows, TABLE_ORDER, Table};
use super::flow::Request;
use super::node::Node;

/// A database of this run. [`PostgresDatabase::drop`] drops it.
pub struct PostgresDatabase {
    server: String,
    name: String,
}

impl PostgresDatabase {
    /// Creates an empty database on the server, or a copy of `of`, which must have no connections.
    ///
    /// # Errors
    /// The server cannot be reached or refuses to create databases for this user.
    pub async fn create(server: &str, name: &str, of: Option<&Self>) -> anyhow::Result<Self> {
        let name = format!("bench_{}_{name}", std::process::id());
        let template = of.map_or_else(String::new, |of| format!(" TEMPLATE {}", of.name));
        let mut db = PgConnection::connect(server).await.context("PostgreSQL")?;
        run(&mut db, &format!("CREATE DATABASE {name}{template}")).await?;
        Ok(Self {
            server: server.to_owned(),
            name,
        })
    }

    /// URL of the database.
    pub fn url(&self) -> String {
        let (head, query) = self
            .server
            .split_once('?')
            .unwrap_or((self.server.as_str(), ""));
        let scheme_ends = head.find("://").map_or(0, |at| at + 3);
        let server = match head[scheme_ends..].find('/') {
            Some(at) => &head[..scheme_ends + at],
            None => head,
        };
        format!("{server}/{}?{query}", self.name)
    }

    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        Ok(PgConnection::connect(&self.url()).await?)
    }

    /// Runs a query that returns one number.
    pub async fn number(&self, sql: &str) -> anyhow::Result<i64> {
        let mut db = self.connect().await?;
        let sql = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()));
        Ok(sql.fetch_one(&mut db).await?)
    }

    /// Closes all connections of the database and drops it.
    pub async fn drop(self) -> anyhow::Result<()> {
        let mut db = PgConnection::connect(&self.server).await?;
        run(
            &mut db,
            &format!("DROP DATABASE {} WITH (FORCE)", self.name),
        )
        .await
    }
}

async fn run(db: &mut PgConnection, sql: &str) -> anyhow::Result<()> {
    let statements = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
    statements
        .execute(db)
        .await
        .with_context(|| sql.to_owned())?;
    Ok(())
}

/// A table with the types of its columns.
struct Typed {
    table: Table,
    types: Vec<String>,
}

/// As [`super::capture::capture`].
///
/// # Errors
/// The ledger refuses a request, or its rows cannot be read.
pub async fn capture(
    database: &PostgresDatabase,
    folder: &std::path::Path,
    requests: Vec<Request>,
    limit: Duration,
) -> anyhow::Result<Captured> {
    let mut db = database.connect().await?;
    let mut tables: Vec<Table> = (tables(&mut db).await?.into_iter())
        .map(|typed| typed.table)
        .collect();
    for table in &tables {
        run(&mut db, &triggers(table)).await?;
    }
    let node = Node::start(folder, &database.url()).await?;
    let mut client = node.client();
    let (mut ends, mut operations) = (Vec::with_capacity(requests.len()), 0);
    let began = Instant::now();
    for request in requests {
        if began.elapsed() > limit {
            break;
        }
        operations += request.operations;
        client.create_operations(request.message).await?;
        let mut end = Vec::with_capacity(tables.len());
        for table in &tables {
            let sql = format!("SELECT COALESCE(MAX(seq), 0) FROM captured_{}", table.name);
            let last: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
                .fetch_one(&mut db)
                .await?;
            end.push(last);
        }
        ends.push(end);
    }
    node.stop().await;
    let mut requests: Vec<Vec<Rows>> = ends
        .iter()
        .map(|_| tables.iter().map(|_| Rows::default()).collect())
        .collect();
    for (place, table) in tables.iter_mut().enumerate() {
        read_rows(&mut db, place, table, &ends, &mut requests).await?;
    }
    db.close().await?;
    Ok(Captured {
        tables,
        requests,
        operations,
    })
}

async fn tables(db: &mut PgConnection) -> anyhow::Result<Vec<Typed>> {
    let mut names: Vec<String> = sqlx::query_scalar(
        "SELECT c.relname::text FROM pg_class c WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace \
         AND c.relname NOT LIKE '\\_%' AND c.relname NOT LIKE 'captured\\_%'",
    )
    .fetch_all(&mut *db)
    .await?;
    names.sort_by_key(|name| {
        let place = TABLE_ORDER.iter().position(|known| known == name);
        (place.unwrap_or(TABLE_ORDER.len()), name.clone())
    });
    let mut tables = Vec::with_capacity(names.len());
    for name in names {
        let columns: Vec<PgRow> = sqlx::query(
            "SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), \
             EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisprimary \
             AND a.attnum = ANY(i.indkey)) \
             FROM pg_attribute a WHERE a.attrelid = $1::regclass AND a.attnum > 0 \
             AND NOT a.attisdropped ORDER BY a.attnum",
        )
        .bind(&name)
        .fetch_all(&mut *db)
        .await?;
        let mut typed = Typed {
            table: Table {
                name,
                columns: Vec::new(),
                key: Vec::new(),
                changed: Vec::new(),
            },
            types: Vec::new(),
        };
        for (place, column) in columns.iter().enumerate() {
            typed
                .table
                .columns
                .push(format!("\"{}\"", column.get::<String, _>(0)));
            typed.types.push(column.get(1));
            if column.get(2) {
                typed.table.key.push(place);
            }
        }
        tables.push(typed);
    }
    Ok(tables)
}

/// Table and triggers that capture the writes of a table. `written` is 0 for an insert. For an
/// update it has a bit per changed column.
fn triggers(table: &Table) -> String {
    let Table { name, columns, .. } = table;
    let each = |term: &dyn Fn(usize, &String) -> String, between: &str| {
        let terms: Vec<String> = columns
            .iter()
            .enumerate()
            .map(|(place, column)| term(place, column))
            .collect();
        terms.join(between)
    };
    let texts = each(&|_, column| format!("{column} TEXT"), ", ");
    let all = columns.join(", ");
    let new = each(&|_, column| format!("new.{column}::text"), ", ");
    let bits = each(
        &|place, column| {
            format!(
                "(new.{column} IS DISTINCT FROM old.{column})::int::bigint * {}",
                1_u64 << place
            )
        },
        " + ",
    );
    format!(
        "CREATE UNLOGGED TABLE captured_{name} (seq BIGSERIAL PRIMARY KEY, written BIGINT NOT NULL, {texts}); \
         CREATE FUNCTION capture_{name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF TG_OP = 'INSERT' THEN INSERT INTO captured_{name} (written, {all}) VALUES (0, {new}); \
         ELSE INSERT INTO captured_{name} (written, {all}) VALUES ({bits}, {new}); END IF; RETURN NULL; END $$; \
         CREATE TRIGGER capture_{name} AFTER INSERT OR UPDATE ON {name} FOR EACH ROW EXECUTE FUNCTION capture_{name}();"
    )
}

async fn read_rows(
    db: &mut PgConnection,
    place: usize,
    table: &mut Table,
    ends: &[Vec<i64>],
    requests: &mut [Vec<Rows>],
) -> anyhow::Result<()> {
    let sql = format!(
        "SELECT seq, written, {} FROM captured_{} ORDER BY seq",
        table.columns.join(", "),
        table.name
    );
    let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(db).await?;
    let (mut request, mut changed) = (0, 0_i64);
    for row in rows {
        let seq: i64 = row.get(0);
        while ends.get(request).is_some_and(|ends| ends[place] < seq) {
            request += 1;
        }
        // Background tasks wrote these rows after the last answer.
        let Some(of) = requests.get_mut(request) else {
            break;
        };
        let written: i64 = row.get(1);
        let values = (0..table.columns.len())
            .map(|column| match row.get::<Option<String>, _>(column + 2) {
                Some(text) => Value::Text(text),
                None => Value::Null,
            })
            .collect();
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
    Ok(())
}

/// Rows as one array of texts per column.
type Columns = Vec<Vec<Option<String>>>;

/// Prepared transactions of bare statements: one INSERT and one UPDATE per table.
pub struct Baseline {
    db: PgConnection,
    /// INSERT and UPDATE, by table.
    sql: Vec<[String; 2]>,
    /// Per transaction: index of the table, inserts and updates.
    transactions: std::vec::IntoIter<Vec<(usize, Columns, Columns)>>,
    operations: f64,
}

impl Baseline {
    /// Prepares the transactions, `merge` requests each.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn new(
        database: &PostgresDatabase,
        captured: Captured,
        merge: usize,
    ) -> anyhow::Result<Self> {
        // The settings of the service's own writer.
        let options = database.url().parse::<PgConnectOptions>()?.options([
            ("synchronous_commit", "on"),
            ("enable_seqscan", "off"),
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
            ("jit", "off"),
        ]);
        let mut db = PgConnection::connect_with(&options).await?;
        let typed = tables(&mut db).await?;
        let sql = captured
            .tables
            .iter()
            .map(|table| {
                let of = typed.iter().find(|typed| typed.table.name == table.name);
                Ok(statements(
                    table,
                    &of.context("a captured table is missing")?.types,
                ))
            })
            .collect::<anyhow::Result<_>>()?;
        let count = captured.requests.len().div_ceil(merge);
        let operations = captured.operations as f64 / count as f64;
        let mut transactions = Vec::with_capacity(count);
        let tables = captured.tables;
        let mut requests = captured.requests.into_iter().peekable();
        while requests.peek().is_some() {
            let group: Vec<Vec<Rows>> = requests.by_ref().take(merge).collect();
            let writes = net_writes(&tables, group);
            let writes = writes.into_iter().map(|write| by_column(&tables, write));
            transactions.push(writes.collect());
        }
        Ok(Self {
            db,
            sql,
            transactions: transactions.into_iter(),
            operations,
        })
    }

    /// Number of transactions that have not run.
    pub fn remaining(&self) -> usize {
        self.transactions.len()
    }

    /// Runs up to `transactions` transactions within `limit`. Returns operations and time.
    ///
    /// # Errors
    /// The store rejects a row.
    pub async fn run(
        &mut self,
        transactions: usize,
        limit: Duration,
    ) -> anyhow::Result<(f64, Duration)> {
        let mut done = Vec::with_capacity(transactions);
        let began = Instant::now();
        while done.len() < transactions && began.elapsed() <= limit {
            let Some(writes) = self.transactions.next() else {
                break;
            };
            let mut tx = self.db.begin().await?;
            for (table, inserts, updates) in &writes {
                for (sql, columns) in self.sql[*table].iter().zip([inserts, updates]) {
                    if columns.first().is_none_or(Vec::is_empty) {
                        continue;
                    }
                    let mut query = sqlx::query(AssertSqlSafe(sql.clone()));
                    for column in columns {
                        query = query.bind(column.as_slice());
                    }
                    query.execute(&mut *tx).await?;
                }
            }
            tx.commit().await?;
            done.push(writes);
        }
        let elapsed = began.elapsed();
        Ok((self.operations * done.len() as f64, elapsed))
    }
}

fn statements(table: &Table, types: &[String]) -> [String; 2] {
    let names = |places: &[usize]| -> String {
        let names: Vec<String> = places.iter().map(|place| format!("c{place}")).collect();
        names.join(", ")
    };
    let arrays = |places: &[usize]| -> String {
        let arrays: Vec<String> = (1..=places.len())
            .map(|at| format!("${at}::text[]"))
            .collect();
        arrays.join(", ")
    };
    let terms = |places: &[usize], prefix: &str, between: &str| -> String {
        let terms: Vec<String> = places
            .iter()
            .map(|place| {
                let (column, of) = (&table.columns[*place], &types[*place]);
                format!("{prefix}{column} = v.c{place}::{of}")
            })
            .collect();
        terms.join(between)
    };
    let all: Vec<usize> = (0..table.columns.len()).collect();
    let cast: Vec<String> = all
        .iter()
        .map(|place| format!("v.c{place}::{}", types[*place]))
        .collect();
    let written: Vec<usize> = table.changed.iter().chain(&table.key).copied().collect();
    [
        format!(
            "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM UNNEST({}) AS v ({})",
            table.name,
            table.columns.join(", "),
            cast.join(", "),
            arrays(&all),
            names(&all)
        ),
        format!(
            "UPDATE {} AS t SET {} FROM UNNEST({}) AS v ({}) WHERE {}",
            table.name,
            terms(&table.changed, "", ", "),
            arrays(&written),
            names(&written),
            terms(&table.key, "t.", " AND ")
        ),
    ]
}

fn by_column(tables: &[Table], write: Write) -> (usize, Columns, Columns) {
    let table = &tables[write.table];
    let text = |value: Value| match value {
        Value::Text(text) => Some(text),
        _ => None,
    };
    let mut inserts: Columns = vec![Vec::new(); table.columns.len()];
    let values = write.inserts.into_iter().flat_map(|(_, values)| values);
    for (at, value) in values.enumerate() {
        inserts[at % table.columns.len()].push(text(value));
    }
    let mut updates: Columns = vec![Vec::new(); table.changed.len() + table.key.len()];
    for row in write.updates {
        for (column, value) in updates.iter_mut().zip(row) {
            column.push(text(value));
        }
    }
    (write.table, inserts, updates)
}
