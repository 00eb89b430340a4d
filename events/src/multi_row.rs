//! Bulk writes on SQLite in few statements. A statement has VALUES of one of a few fixed sizes and
//! the row count as its LIMIT, so it is prepared once.
//!
//! Every statement costs a round trip to the connection's thread, tens of microseconds. Rows are
//! sent in statements of the largest size; the remainder uses the smallest size that fits.
//! Consecutive small statements are sent as one [`Script`]. Shared texts (`Arc<str>`) are bound
//! without a copy.

use std::sync::{Arc, OnceLock};

use sqlx::{Arguments, AssertSqlSafe, Encode, SqliteConnection, Type, sqlite::SqliteArguments};

/// Rows per statement. The largest size times the columns of the widest table is below SQLite's
/// limit of 32,766 bound values.
const SIZES: [usize; 4] = [8, 32, 128, 512];
const ROWS_MAX: usize = SIZES[SIZES.len() - 1];
/// Statements of at most this number of rows wait in the [`Script`] and are sent together.
const ROWS_WAITING_MAX: usize = 32;

/// A multi-row statement: `head`, the rows, `tail`. The last bound value is the number of rows, so
/// the tail has one `?`, after `LIMIT +`, and the head none. The `+` is required: SQLite inspects
/// the value of a bare `LIMIT ?` when it prepares and re-prepares the statement for each other
/// value.
pub struct MultiRow {
    head: &'static str,
    columns: usize,
    tail: &'static str,
    sql: OnceLock<[Arc<str>; SIZES.len()]>,
}

impl MultiRow {
    pub const fn new(head: &'static str, columns: usize, tail: &'static str) -> Self {
        MultiRow {
            head,
            columns,
            tail,
            sql: OnceLock::new(),
        }
    }

    fn sql(&self, size: usize) -> &Arc<str> {
        let all = self.sql.get_or_init(|| {
            let row = format!("({})", vec!["?"; self.columns].join(","));
            SIZES.map(|size| {
                let rows = vec![row.as_str(); size].join(",");
                format!("{}{rows}{}", self.head, self.tail).into()
            })
        });
        &all[size]
    }

    /// Binds `rows`, pads with NULL and ends with the number of rows; returns the statement's size.
    fn bind<T>(
        &self,
        rows: &[T],
        arguments: &mut SqliteArguments,
        mut bind: impl FnMut(&T, &mut Values),
    ) -> Result<usize, sqlx::Error> {
        let size = SIZES
            .iter()
            .position(|size| rows.len() <= *size)
            .expect("no more rows than the largest statement has");
        arguments.reserve(SIZES[size] * self.columns + 1, 0);
        let before = arguments.len();
        let mut values = Values {
            arguments,
            failed: None,
        };
        for row in rows {
            bind(row, &mut values);
        }
        debug_assert_eq!(
            values.arguments.len() - before,
            rows.len() * self.columns,
            "values of {}",
            self.head
        );
        for _ in rows.len() * self.columns..SIZES[size] * self.columns {
            values.put(None::<i64>);
        }
        values.put(rows.len() as i64);
        match values.failed {
            Some(error) => Err(sqlx::Error::Encode(error)),
            None => Ok(size),
        }
    }
}

/// Values of the rows of a statement, in order.
pub struct Values<'a> {
    arguments: &'a mut SqliteArguments,
    failed: Option<sqlx::error::BoxDynError>,
}

impl Values<'_> {
    pub fn put<'t, V>(&mut self, value: V)
    where
        V: Encode<'t, sqlx::Sqlite> + Type<sqlx::Sqlite>,
    {
        if let Err(error) = self.arguments.add(value) {
            self.failed.get_or_insert(error);
        }
    }
}

/// Writes in order: sends large statements at once and collects small ones.
#[derive(Default)]
pub struct Script {
    sql: String,
    arguments: SqliteArguments,
}

impl Script {
    /// Writes the rows, now or with a later statement.
    ///
    /// # Errors
    /// [`sqlx::Error`] of this or an earlier statement.
    pub async fn add<T>(
        &mut self,
        tx: &mut SqliteConnection,
        statement: &MultiRow,
        rows: &[T],
        mut bind: impl FnMut(&T, &mut Values),
    ) -> Result<(), sqlx::Error> {
        for rows in rows.chunks(ROWS_MAX) {
            if rows.len() > ROWS_WAITING_MAX {
                self.run(tx).await?;
                let mut arguments = SqliteArguments::default();
                let size = statement.bind(rows, &mut arguments, &mut bind)?;
                let sql = AssertSqlSafe(statement.sql(size).clone());
                sqlx::query_with(sql, arguments).execute(&mut *tx).await?;
            } else {
                let size = statement.bind(rows, &mut self.arguments, &mut bind)?;
                self.sql.push_str(statement.sql(size));
                self.sql.push(';');
            }
        }
        Ok(())
    }

    /// Sends the collected statements.
    ///
    /// # Errors
    /// [`sqlx::Error`] of the first statement that fails.
    pub async fn run(&mut self, tx: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        if self.sql.is_empty() {
            return Ok(());
        }
        let sql = AssertSqlSafe(std::mem::take(&mut self.sql));
        let arguments = std::mem::take(&mut self.arguments);
        sqlx::query_with(sql, arguments).execute(tx).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use sqlx::Connection;

    use super::*;

    static PUT: MultiRow = MultiRow::new(
        "INSERT INTO t (a, b) SELECT * FROM (VALUES ",
        2,
        ") WHERE true LIMIT +? ON CONFLICT (a) DO UPDATE SET b = excluded.b",
    );

    #[tokio::test]
    async fn any_number_of_rows_is_written_once() {
        let mut db = SqliteConnection::connect(":memory:").await.unwrap();
        sqlx::raw_sql("CREATE TABLE t (a BIGINT PRIMARY KEY, b TEXT)")
            .execute(&mut db)
            .await
            .unwrap();
        let text = |row: &i64| -> Arc<str> { row.to_string().into() };
        for count in [0, 1, 7, 8, 9, 33, 128, 129, 512, 513, 1_030] {
            let rows: Vec<i64> = (0..count).collect();
            let mut script = Script::default();
            for rows in [&rows[..], &rows[..rows.len().min(3)]] {
                script
                    .add(&mut db, &PUT, rows, |row, to| {
                        to.put(*row);
                        to.put(text(row));
                    })
                    .await
                    .unwrap();
            }
            script.run(&mut db).await.unwrap();
            let found: Vec<(i64, String)> = sqlx::query_as("DELETE FROM t RETURNING a, b")
                .fetch_all(&mut db)
                .await
                .unwrap();
            assert_eq!(found.len(), rows.len());
            assert!(found.iter().all(|(a, b)| *text(a) == **b));
        }
    }
}
