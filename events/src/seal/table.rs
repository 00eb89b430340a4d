//! The statements that seal and check one table.

use std::sync::Arc;

/// Rows per statement of a transaction with many written rows.
pub const CHUNK: i64 = 1_000;

/// A sealed table, and its statements.
pub struct Table {
    pub name: String,
    /// Columns of the primary key.
    keys: Vec<String>,
    /// Columns that the seal covers, the key among them.
    columns: Vec<String>,
    /// The table has other columns too.
    has_others: bool,
    /// Condition of the sealed rows; the row is named `ROW`.
    condition: &'static str,
    /// The table has a total, its rows have no seals.
    pub is_summed: bool,
    /// What the seals depend on.
    pub definition: String,
    /// Next written rows: position in the list of written rows, then key, columns and stored seal;
    /// in a summed table the columns before and after the write.
    pub written: Arc<str>,
    /// Forgets written rows up to a position.
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
        is_summed: bool,
    ) -> Self {
        let mut table = Table {
            name,
            keys,
            columns,
            has_others,
            condition,
            is_summed,
            definition: String::new(),
            written: Arc::default(),
            forget: Arc::default(),
            all: Arc::default(),
            rowless: Arc::default(),
            note_all: Arc::default(),
        };
        table.definition = table.described();
        table.written = table.written_sql().into();
        table.forget = format!("DELETE FROM temp.{} WHERE rowid <= $1", table.noted()).into();
        table.all = table.all_sql().into();
        table.rowless = table.rowless_sql().into();
        table.note_all = table.note_all_sql().into();
        table
    }

    fn described(&self) -> String {
        let (keys, columns) = (self.keys.join(","), self.columns.join(","));
        let kind = if self.is_summed { "summed" } else { "sealed" };
        format!("{kind} {}({keys};{columns};{})", self.name, self.condition)
    }

    /// True if the transaction wrote rows of the table.
    pub fn is_written(&self) -> String {
        format!("EXISTS (SELECT 1 FROM temp.{})", self.noted())
    }

    /// Creates the list of written rows and its triggers. A row is noted more than once rather than
    /// looked for: in a trigger the conflict clause of the firing statement would take effect.
    pub fn install(&self) -> String {
        let (noted, name) = (self.noted(), &self.name);
        let (new, old) = (self.on("new"), self.on("old"));
        let (update, changed) = match self.has_others {
            // A statement that sets no covered column does not even have the trigger.
            true => (
                format!("UPDATE OF {}", Self::quoted(&self.columns)),
                format!("({}) AND ", Self::differ(&self.columns)),
            ),
            false => ("UPDATE".to_owned(), String::new()),
        };
        let (list, inserted, updated, deleted) = match self.is_summed {
            true => self.image_notes(),
            false => self.key_notes(),
        };
        format!(
            "CREATE TEMP TABLE {noted} {list}; \
             CREATE TEMP TRIGGER \"written_{name}_insert\" AFTER INSERT ON main.\"{name}\" WHEN {new} \
             BEGIN {inserted} END; \
             CREATE TEMP TRIGGER \"written_{name}_update\" AFTER {update} ON main.\"{name}\" \
             WHEN {changed}({old} OR {new}) BEGIN {updated} END; \
             CREATE TEMP TRIGGER \"written_{name}_delete\" AFTER DELETE ON main.\"{name}\" WHEN {old} \
             BEGIN {deleted} END;"
        )
    }

    /// List of written rows, and the statements that note an inserted, updated and deleted one: by
    /// key, for rows with seals.
    fn key_notes(&self) -> (String, String, String, String) {
        let (noted, name) = (self.noted(), &self.name);
        let list = |row: &str| Self::list(&self.keys, row);
        let (new, old) = (list("new"), list("old"));
        let keys = list(&format!("\"{name}\""));
        let moved = Self::differ(&self.keys);
        (
            format!("AS SELECT {keys} FROM main.\"{name}\" WHERE 0"),
            format!("INSERT INTO {noted} VALUES ({new});"),
            format!(
                "INSERT INTO {noted} VALUES ({new}); INSERT INTO {noted} SELECT {old} WHERE {moved};"
            ),
            format!("INSERT INTO {noted} VALUES ({old});"),
        )
    }

    /// As [`Self::key_notes`], by the columns before and after the write, for a summed table.
    fn image_notes(&self) -> (String, String, String, String) {
        let noted = self.noted();
        let image = |row: &str| Self::text(&self.columns, row);
        let (new, old) = (image("new"), image("old"));
        let (is_new, is_old) = (self.on("new"), self.on("old"));
        (
            "(old_image TEXT, new_image TEXT)".to_owned(),
            format!("INSERT INTO {noted} VALUES (NULL, {new});"),
            format!(
                "INSERT INTO {noted} VALUES (CASE WHEN {is_old} THEN {old} END, \
                 CASE WHEN {is_new} THEN {new} END);"
            ),
            format!("INSERT INTO {noted} VALUES ({old}, NULL);"),
        )
    }

    /// The list of written rows.
    fn noted(&self) -> String {
        format!("\"written_{}\"", self.name)
    }

    fn quoted(columns: &[String]) -> String {
        let columns: Vec<String> = (columns.iter())
            .map(|column| format!("\"{column}\""))
            .collect();
        columns.join(", ")
    }

    fn list(columns: &[String], row: &str) -> String {
        let columns: Vec<String> = (columns.iter())
            .map(|column| format!("{row}.\"{column}\""))
            .collect();
        columns.join(", ")
    }

    /// Whether an update changes one of the columns.
    fn differ(columns: &[String]) -> String {
        let columns: Vec<String> = (columns.iter())
            .map(|column| format!("old.\"{column}\" IS NOT new.\"{column}\""))
            .collect();
        columns.join(" OR ")
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
        let noted = self.noted();
        if self.is_summed {
            return format!(
                "SELECT k.rowid AS position, k.old_image AS old_image, k.new_image AS new_image \
                 FROM temp.{noted} AS k ORDER BY k.rowid LIMIT {CHUNK}"
            );
        }
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
            name = self.name,
            same = same.join(" AND "),
            on = self.on("t"),
            seal = self.seal("k"),
        )
    }

    /// The comment excludes the statement from the tests of query plans: it reads all rows, when a
    /// store is opened the first time or checked.
    fn all_sql(&self) -> String {
        let (hash, seal) = match self.is_summed {
            true => ("NULL", String::new()),
            false => ("s.hash", self.seal("t")),
        };
        format!(
            "/* all rows */ SELECT {key} AS key, {image} AS image, {hash} AS hash \
             FROM main.\"{name}\" AS t {seal} WHERE {on}",
            key = Self::text(&self.keys, "t"),
            image = Self::text(&self.columns, "t"),
            name = self.name,
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

    fn operation(has_others: bool, is_summed: bool) -> Table {
        let columns = vec!["id".to_owned(), "flow".to_owned()];
        let keys = vec!["id".to_owned()];
        Table::new(
            "operation".to_owned(),
            keys,
            columns,
            has_others,
            "ROW.flow <> 6",
            is_summed,
        )
    }

    #[test]
    fn a_condition_names_the_row_of_each_statement() {
        let table = operation(false, false);
        assert!(table.all.ends_with("WHERE (t.flow <> 6)"), "{}", table.all);
        let install = table.install();
        let update =
            "AFTER UPDATE ON main.\"operation\" WHEN ((old.flow <> 6) OR (new.flow <> 6)) BEGIN";
        assert!(install.contains(update), "{install}");
        let noted = "AS SELECT \"operation\".\"id\" FROM main.\"operation\" WHERE 0;";
        assert!(install.contains(noted), "{install}");
    }

    #[test]
    fn an_update_of_other_columns_fires_no_trigger() {
        let install = operation(true, true).install();
        let update = "AFTER UPDATE OF \"id\", \"flow\" ON main.\"operation\" \
             WHEN (old.\"id\" IS NOT new.\"id\" OR old.\"flow\" IS NOT new.\"flow\") AND (";
        assert!(install.contains(update), "{install}");
        assert!(!install.contains(" AS SELECT "), "{install}");
    }
}
