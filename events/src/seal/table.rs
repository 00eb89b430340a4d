//! The statements that seal and check one table.

use std::sync::Arc;

/// Rows per statement of a transaction with many written rows.
pub const CHUNK: i64 = 1_000;

/// A sealed table, and its statements.
pub struct Table {
    pub name: String,
    /// Columns of the primary key.
    keys: Vec<String>,
    /// Columns that the seal covers.
    columns: Vec<String>,
    /// The table has other columns too.
    has_others: bool,
    /// Condition of the sealed rows; the row is named `ROW`.
    condition: &'static str,
    /// Next written rows: position in the noted keys, key, columns, stored seal.
    pub written: Arc<str>,
    /// Forgets noted keys up to a position.
    pub forget: Arc<str>,
    /// All rows: key, columns, stored seal.
    pub all: Arc<str>,
    /// Keys of seals without a row.
    pub rowless: Arc<str>,
    /// Notes the keys of all rows.
    pub note_all: Arc<str>,
}

impl Table {
    pub fn new(
        name: String,
        keys: Vec<String>,
        columns: Vec<String>,
        has_others: bool,
        condition: &'static str,
    ) -> Self {
        let mut table = Table {
            name,
            keys,
            columns,
            has_others,
            condition,
            written: Arc::default(),
            forget: Arc::default(),
            all: Arc::default(),
            rowless: Arc::default(),
            note_all: Arc::default(),
        };
        table.written = table.written_sql().into();
        table.forget = format!("DELETE FROM temp.{} WHERE rowid <= $1", table.noted()).into();
        table.all = table.all_sql().into();
        table.rowless = table.rowless_sql().into();
        table.note_all = table.note_all_sql().into();
        table
    }

    /// What the seals of the table depend on.
    pub fn definition(&self) -> String {
        let (keys, columns) = (self.keys.join(","), self.columns.join(","));
        format!("{}({keys};{columns};{})", self.name, self.condition)
    }

    /// True if the transaction wrote rows of the table.
    pub fn is_written(&self) -> String {
        format!("EXISTS (SELECT 1 FROM temp.{})", self.noted())
    }

    /// Creates the list of noted keys and its triggers. Keys are noted more than once rather than
    /// looked for: in a trigger the conflict clause of the firing statement would take effect.
    pub fn install(&self) -> String {
        let (noted, name) = (self.noted(), &self.name);
        let list = |row: &str| Self::list(&self.keys, row);
        let (new, old) = (self.on("new"), self.on("old"));
        let differ = |columns: &[String]| {
            let columns: Vec<String> = (columns.iter())
                .map(|column| format!("old.\"{column}\" IS NOT new.\"{column}\""))
                .collect();
            columns.join(" OR ")
        };
        let changed = match self.has_others {
            true => format!("AND ({}) ", differ(&self.columns)),
            false => String::new(),
        };
        format!(
            "CREATE TEMP TABLE {noted} AS SELECT {keys} FROM main.\"{name}\" WHERE 0; \
             CREATE TEMP TRIGGER \"written_{name}_insert\" AFTER INSERT ON main.\"{name}\" WHEN {new} \
             BEGIN INSERT INTO {noted} VALUES ({news}); END; \
             CREATE TEMP TRIGGER \"written_{name}_update\" AFTER UPDATE ON main.\"{name}\" \
             WHEN ({old} OR {new}) {changed}BEGIN INSERT INTO {noted} VALUES ({news}); \
             INSERT INTO {noted} SELECT {olds} WHERE {moved}; END; \
             CREATE TEMP TRIGGER \"written_{name}_delete\" AFTER DELETE ON main.\"{name}\" WHEN {old} \
             BEGIN INSERT INTO {noted} VALUES ({olds}); END;",
            keys = list(&format!("\"{name}\"")),
            news = list("new"),
            olds = list("old"),
            moved = differ(&self.keys),
        )
    }

    /// The list of keys of written rows.
    fn noted(&self) -> String {
        format!("\"written_{}\"", self.name)
    }

    fn list(columns: &[String], row: &str) -> String {
        let columns: Vec<String> = (columns.iter())
            .map(|column| format!("{row}.\"{column}\""))
            .collect();
        columns.join(", ")
    }

    /// SQL of the text of some columns of a row. `quote` writes each value in one way.
    fn text(columns: &[String], row: &str) -> String {
        let columns: Vec<String> = (columns.iter())
            .map(|column| format!("quote({row}.\"{column}\")"))
            .collect();
        columns.join(" || ',' || ")
    }

    fn on(&self, row: &str) -> String {
        format!("({})", self.condition.replace("ROW", row))
    }

    /// SQL of the stored seal of a row.
    fn seal(&self, row: &str) -> String {
        let key = Self::text(&self.keys, row);
        format!(
            "LEFT JOIN row_seals AS s ON s.name = '{}' AND s.key = {key}",
            self.name
        )
    }

    fn written_sql(&self) -> String {
        let same: Vec<String> = (self.keys.iter())
            .map(|key| format!("t.\"{key}\" = k.\"{key}\""))
            .collect();
        format!(
            "SELECT k.rowid AS position, {key} AS key, \
             CASE WHEN t.\"{first}\" IS NULL THEN NULL ELSE {image} END AS image, s.hash AS hash \
             FROM temp.{noted} AS k LEFT JOIN main.\"{name}\" AS t ON {same} AND {on} {seal} \
             ORDER BY k.rowid LIMIT {CHUNK}",
            key = Self::text(&self.keys, "k"),
            first = self.keys[0],
            image = Self::text(&self.columns, "t"),
            noted = self.noted(),
            name = self.name,
            same = same.join(" AND "),
            on = self.on("t"),
            seal = self.seal("k"),
        )
    }

    fn all_sql(&self) -> String {
        format!(
            "SELECT {key} AS key, {image} AS image, s.hash AS hash \
             FROM main.\"{name}\" AS t {seal} WHERE {on}",
            key = Self::text(&self.keys, "t"),
            image = Self::text(&self.columns, "t"),
            name = self.name,
            seal = self.seal("t"),
            on = self.on("t"),
        )
    }

    fn rowless_sql(&self) -> String {
        format!(
            "SELECT key FROM row_seals WHERE name = '{name}' \
             EXCEPT SELECT {key} FROM main.\"{name}\" AS t WHERE {on} LIMIT {CHUNK}",
            name = self.name,
            key = Self::text(&self.keys, "t"),
            on = self.on("t"),
        )
    }

    fn note_all_sql(&self) -> String {
        format!(
            "INSERT INTO temp.{noted} SELECT {keys} FROM main.\"{name}\" AS t WHERE {on}",
            noted = self.noted(),
            keys = Self::list(&self.keys, "t"),
            name = self.name,
            on = self.on("t"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_names_the_row_of_each_statement() {
        let keys = vec!["id".to_owned()];
        let columns = vec!["id".to_owned(), "flow".to_owned()];
        let table = Table::new(
            "operation".to_owned(),
            keys,
            columns,
            false,
            "ROW.flow <> 6",
        );
        assert!(table.all.ends_with("WHERE (t.flow <> 6)"), "{}", table.all);
        let install = table.install();
        assert!(
            install.contains("WHEN ((old.flow <> 6) OR (new.flow <> 6)) BEGIN"),
            "{install}"
        );
        let noted = "AS SELECT \"operation\".\"id\" FROM main.\"operation\" WHERE 0;";
        assert!(install.contains(noted), "{install}");
    }
}
