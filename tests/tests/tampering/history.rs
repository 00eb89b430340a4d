//! Altered rows of the market's history and of the registry's.

use rusqlite::Connection;
use serde_json::json;
use tests::shared::run;

use crate::{Store, check, named, names, stopped};

/// The history has no seals: the journal has the same.
#[test]
fn r188_an_altered_deleted_or_added_row_of_the_history_is_found() {
    const ORDER: &str = "(SELECT sequence FROM orders WHERE filled > 0 LIMIT 1)";
    const TRADE: &str = "(SELECT MAX(id) FROM trades)";
    // An answer that names no order may have no sequence: the call may have noted it first.
    const ANSWER: &str = "(SELECT key_hash FROM answers WHERE order_sequence > 0 LIMIT 1)";
    run(async {
        let platform = stopped().await;
        let store = Store::open(&platform.data_dir(), "market/market.db");
        let db = Connection::open(&store.path).expect("opens");
        // Copies a row under another key.
        let copy = |table: &str, key: &str, new: &str, rows: &str| {
            let columns = names(
                &db,
                &format!("SELECT name FROM pragma_table_info('{table}')"),
            );
            let copied = columns.iter().map(|name| match name == key {
                true => new,
                false => name.as_str(),
            });
            let copied = copied.collect::<Vec<_>>().join(", ");
            format!("INSERT INTO {table} SELECT {copied} FROM {table} {rows}")
        };
        let first = "WHERE sequence = (SELECT MIN(sequence) FROM orders)";
        let last = format!("WHERE id = {TRADE}");
        let answer = format!("WHERE key_hash = {ANSWER}");
        let after = "(SELECT sequence + 1 FROM projection)";
        let cases = [
            (
                format!("UPDATE orders SET filled = filled - 1 WHERE sequence = {ORDER}"),
                ("orders ", ": changed"),
            ),
            (
                format!("UPDATE orders SET created_ns = created_ns + 1 WHERE sequence = {ORDER}"),
                ("orders ", ": changed"),
            ),
            (
                format!("DELETE FROM orders WHERE sequence = {ORDER}"),
                ("orders ", ": deleted"),
            ),
            (
                copy("orders", "sequence", "sequence - 1", first),
                ("orders ", ": added"),
            ),
            (
                copy("orders", "sequence", after, first),
                ("orders: 1 rows", ""),
            ),
            (
                format!("UPDATE trades SET price = price + 1 WHERE id = {TRADE}"),
                ("trades ", ": changed"),
            ),
            (
                format!("DELETE FROM trades WHERE id = {TRADE}"),
                ("trades ", ": deleted"),
            ),
            (copy("trades", "id", "id + 1", &last), ("trades ", ": added")),
            (
                format!("UPDATE answers SET cancelled = cancelled + 1 {answer}"),
                ("answers ", ": changed"),
            ),
            (
                format!("UPDATE answers SET sequence = 0 {answer}"),
                ("answers ", ": changed"),
            ),
            (format!("DELETE FROM answers {answer}"), ("answers ", ": deleted")),
            (
                copy("answers", "key_hash", "randomblob(16)", &answer),
                ("answers ", ": added"),
            ),
            (
                "INSERT INTO users (user_id) VALUES ('mallory')".to_owned(),
                ("users mallory: added", ""),
            ),
            (
                "UPDATE instruments SET lot_mantissa = lot_mantissa * 10, lot_scale = lot_scale + 1 \
                 WHERE instrument = (SELECT MIN(instrument) FROM instruments)"
                    .to_owned(),
                ("instruments ", ": changed"),
            ),
        ];
        db.close().expect("closed");
        for (sql, (begin, end)) in cases {
            assert_eq!(store.execute(&sql), 1, "{sql}");
            let found = named(&check(&platform).await.json());
            assert!(
                found
                    .iter()
                    .any(|text| text.starts_with(begin) && text.ends_with(end)),
                "{sql}: {found:?}"
            );
            store.restore();
        }
        let checked = check(&platform).await.success().json();
        let parts = checked["parts"].as_array().expect("parts");
        let history = parts.iter().find(|part| part["name"] == json!("history"));
        let history = history.expect("a part of the history");
        assert!(history["rows"].as_u64() > Some(0), "{history}");
        let unchecked = history["not_checked"].as_array().expect("a list");
        assert_eq!(unchecked.len(), 1, "the journal is whole: {unchecked:?}");
    });
}

/// As an altered transfer of a holder to itself, which has the only row of its block: the tables of
/// the registry agree, and only the chain has the block's time.
#[test]
fn r188_an_altered_time_of_a_whole_block_is_found() {
    const BLOCK: &str = "(SELECT MIN(block_number) FROM holding_history)";
    run(async {
        let platform = stopped().await;
        let store = Store::open(&platform.data_dir(), "cfa/cfa.sqlite");
        for table in ["holding_history", "supply_history"] {
            let sql =
                format!("UPDATE {table} SET time_us = time_us - 1 WHERE block_number = {BLOCK}");
            assert!(store.execute(&sql) > 0, "{sql}");
        }
        for (column, end) in [("since_us", "MIN"), ("updated_at_us", "MAX")] {
            let sql = format!(
                "UPDATE holding SET {column} = (SELECT {end}(time_us) FROM holding_history h \
                 WHERE h.token = holding.token AND h.address = holding.address)"
            );
            assert!(store.execute(&sql) > 0, "{sql}");
        }
        let found = named(&check(&platform).await.json());
        assert_eq!(found.len(), 1, "{found:?}");
        let text = "has another time on the chain";
        assert!(found[0].ends_with(text), "{found:?}");
        store.restore();

        // The time of the last transfer of a holder, also without the blocks of the chain.
        let sql = "UPDATE holding SET updated_at_us = updated_at_us - 1 \
             WHERE (token, address) = (SELECT token, address FROM holding LIMIT 1)";
        assert_eq!(store.execute(sql), 1);
        let found = named(&check(&platform).await.json());
        assert!(found[0].starts_with("holding of token"), "{found:?}");
    });
}
