//! Answers as text: one `name: value` per line, nested names indented, amounts as one token. A list
//! of objects is a table; if it is too wide or a field does not fit a cell, each object is a block.
//! Both show every field. Control characters of texts are escaped: a stored text forges no line.

use std::fmt::Write;

use serde_json::{Map, Value};

/// The answer as indented text.
pub fn text(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, 0);
    if out.is_empty() {
        out.push_str("(empty)\n");
    }
    out
}

/// Maximum width of a table in characters; the objects of a wider list are printed as blocks.
const TABLE_WIDTH_MAX: usize = 180;

/// A table with columns as wide as their widest cell.
pub fn table<const N: usize>(
    head: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let head = head.map(str::to_owned).to_vec();
    let rows = rows.into_iter().map(|row| row.to_vec());
    aligned(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

/// Lines with aligned columns: text at the left, numbers at the right with their units after them.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.first().map_or(0, Vec::len);
    let column = |at: usize| padded(&lines.iter().map(|line| &*line[at]).collect::<Vec<_>>());
    let columns: Vec<Vec<String>> = (0..columns).map(column).collect();
    let mut out = String::new();
    for row in 0..lines.len() {
        let cells: Vec<&str> = columns.iter().map(|column| &*column[row]).collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// The cells of a column, its heading first, as wide as the widest. Widths are counted in
/// characters, not bytes: names may be Russian.
fn padded(column: &[&str]) -> Vec<String> {
    let cells = column.iter().skip(1).filter(|cell| !cell.is_empty());
    let numbers: Option<Vec<(&str, &str)>> = cells.map(|cell| number(cell)).collect();
    let numbers = numbers.unwrap_or_default();
    if numbers.is_empty() {
        let width = widest(column.iter().copied());
        return column.iter().map(|cell| format!("{cell:width$}")).collect();
    }
    let digits = widest(numbers.iter().map(|(number, _)| *number));
    let units = widest(numbers.iter().map(|(_, unit)| *unit));
    let cell = |(row, cell): (usize, &&str)| match number(cell).filter(|_| row > 0) {
        Some((number, _)) if units == 0 => format!("{number:>digits$}"),
        Some((number, unit)) => format!("{number:>digits$} {unit:units$}"),
        None => (*cell).to_owned(),
    };
    let cells: Vec<String> = column.iter().enumerate().map(cell).collect();
    let width = widest(cells.iter().map(String::as_str));
    cells.iter().map(|cell| format!("{cell:>width$}")).collect()
}

fn widest<'a>(cells: impl Iterator<Item = &'a str>) -> usize {
    cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
}

/// Number and unit of a cell such as `-100.50 CFA-RUB` or `7`; `None` for other text.
fn number(cell: &str) -> Option<(&str, &str)> {
    let (number, unit) = cell.split_once(' ').unwrap_or((cell, ""));
    let digits = number.strip_prefix('-').unwrap_or(number);
    let is_number = digits.starts_with(|first: char| first.is_ascii_digit())
        && digits
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.');
    (is_number && !unit.contains(' ')).then_some((number, unit))
}

/// A list of two or more objects as a table. `None` if a field does not fit a cell or the table is
/// too wide.
fn as_table(values: &[Value]) -> Option<String> {
    let rows: Vec<Vec<(String, String)>> = values
        .iter()
        .map(|value| columns(value.as_object()?))
        .collect::<Option<_>>()?;
    let mut head: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flatten() {
        if !head.contains(&&**name) {
            head.push(name);
        }
    }
    let line = |row: &Vec<(String, String)>| -> Vec<String> {
        let cell = |name: &&str| row.iter().find(|(known, _)| known == name);
        let text = |name: &&str| cell(name).map_or_else(String::new, |(_, text)| text.clone());
        head.iter().map(text).collect()
    };
    let names: Vec<String> = head.iter().map(|name| (*name).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(names)
        .chain(rows.iter().map(line))
        .collect();
    let table = aligned(&lines);
    let is_narrow = |line: &str| line.chars().count() <= TABLE_WIDTH_MAX;
    let is_table = values.len() > 1 && !head.is_empty() && table.lines().all(is_narrow);
    is_table.then_some(table)
}

/// Name and text of each column of an object. The fields of a nested object are columns
/// `outer.inner`. `None` if a field does not fit a cell.
fn columns(object: &Map<String, Value>) -> Option<Vec<(String, String)>> {
    let mut found = Vec::new();
    flatten("", object, &mut found).then_some(found)
}

/// Adds the columns of `object`; false if a field does not fit a cell or a name repeats.
fn flatten(outer: &str, object: &Map<String, Value>, found: &mut Vec<(String, String)>) -> bool {
    object.iter().all(|(name, value)| {
        let name = format!("{outer}{name}");
        match (cell(value), value) {
            (Some(text), _) => {
                let is_new = found.iter().all(|(known, _)| *known != name);
                found.push((name, text));
                is_new
            }
            (None, Value::Object(inner)) => flatten(&format!("{name}."), inner, found),
            (None, _) => false,
        }
    })
}

/// The value on one line of a table: a token, or the tokens of a list joined by commas.
fn cell(value: &Value) -> Option<String> {
    match value {
        Value::Array(values) if !values.is_empty() => {
            let words: Vec<String> = values.iter().map(word).collect::<Option<_>>()?;
            let has_comma = words.iter().any(|word| word.contains(','));
            (!has_comma).then(|| words.join(", "))
        }
        other => word(other),
    }
}

fn write_value(out: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                write_named(out, name, value, depth);
            }
        }
        Value::Array(values) => {
            if let Some(table) = as_table(values) {
                table.lines().for_each(|row| line(out, depth, row));
                return;
            }
            for (index, value) in values.iter().enumerate() {
                match (word(value), value) {
                    (Some(word), _) => line(out, depth, &format!("- {word}")),
                    (None, Value::Object(object)) => {
                        if index > 0 {
                            out.push('\n');
                        }
                        write_block(out, object, depth);
                    }
                    (None, _) => {
                        line(out, depth, "-");
                        write_value(out, value, depth + 1);
                    }
                }
            }
        }
        other => line(out, depth, &word(other).unwrap_or_default()),
    }
}

/// An object of a list: its first field of one token as heading, the other fields indented.
fn write_block(out: &mut String, object: &Map<String, Value>, depth: usize) {
    let mut fields = object.iter();
    let heading = fields.find_map(|(name, value)| Some((name, word(value)?)));
    match &heading {
        Some((name, word)) => line(out, depth, &format!("{name}: {word}")),
        None => line(out, depth, "-"),
    }
    let heading = heading.map(|(name, _)| name);
    for (name, value) in object.iter().filter(|(name, _)| Some(*name) != heading) {
        write_named(out, name, value, depth + 1);
    }
}

fn write_named(out: &mut String, name: &str, value: &Value, depth: usize) {
    match word(value) {
        Some(word) => line(out, depth, &format!("{name}: {word}")),
        None => {
            line(out, depth, &format!("{name}:"));
            write_value(out, value, depth + 1);
        }
    }
}

/// `text` with its control characters escaped: `\n`, `\u{1b}`.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter.is_control() {
            true => out.extend(letter.escape_default()),
            false => out.push(letter),
        }
    }
    out
}

/// The value as one token, if it is a scalar, a decimal, an amount or empty.
pub(super) fn word(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some(String::new()),
        Value::Bool(flag) => Some(flag.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(text) => Some(escaped(text)),
        Value::Array(values) => values.is_empty().then(|| "[]".to_owned()),
        Value::Object(object) => {
            if object.len() == 1
                && let Some(Value::String(text)) = object.get("value")
            {
                return Some(escaped(text));
            }
            match (
                object.get("currencyCode"),
                object.get("amount"),
                object.len(),
            ) {
                (Some(Value::String(currency)), Some(amount), 2) => {
                    Some(format!("{} {}", word(amount)?, escaped(currency)))
                }
                _ => object.is_empty().then(|| "{}".to_owned()),
            }
        }
    }
}

fn line(out: &mut String, depth: usize, text: &str) {
    writeln!(out, "{:indent$}{text}", "", indent = depth * 2)
        .expect("writing to a string never fails");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_list_of_flat_objects_is_a_table_with_units_and_aligned_columns() {
        let answer = json!({ "users": [
            { "name": "Анна", "limit": { "currencyCode": "RUB", "amount": { "value": "10" } } },
            { "name": "Константин", "limit": {} , "note": "n" },
        ] });
        assert_eq!(
            text(&answer),
            "users:\n  name        limit   note\n  Анна        10 RUB\n  Константин  {}      n\n"
        );
    }

    #[test]
    fn amounts_are_one_token_and_an_object_of_a_list_is_a_block() {
        let answer = json!({
            "trades": [{
                "price": { "value": "100.5" },
                "fee": { "amount": { "currencyCode": "RUB", "amount": { "value": "0.10" } } }
            }],
            "pagination": {},
        });
        assert_eq!(
            text(&answer),
            "trades:\n  price: 100.5\n    fee:\n      amount: 0.10 RUB\npagination: {}\n"
        );
    }

    #[test]
    fn numbers_are_aligned_at_the_right_and_their_units_at_the_left() {
        let amount =
            |value: &str, unit: &str| json!({ "currencyCode": unit, "amount": { "value": value } });
        let answer = json!([
            { "id": "a", "n": 7, "sum": amount("-5.00", "CFA-RUB") },
            { "id": "b", "n": 12, "sum": amount("1500.00", "BOND") },
            { "id": "c", "n": 3 },
        ]);
        assert_eq!(
            text(&answer),
            "id   n              sum\n\
             a    7    -5.00 CFA-RUB\n\
             b   12  1500.00 BOND\n\
             c    3\n"
        );
    }

    #[test]
    fn fields_of_nested_objects_and_lists_of_scalars_are_columns() {
        let answer = json!({ "users": [
            { "id": "a", "limit": { "day": { "value": "5" }, "used": {} }, "roles": ["x", "y"] },
            { "id": "b", "limit": { "day": { "value": "10" } }, "roles": [] },
        ] });
        assert_eq!(
            text(&answer),
            "users:\n  \
             id  limit.day  limit.used  roles\n  \
             a           5  {}          x, y\n  \
             b          10              []\n"
        );
    }

    #[test]
    fn control_characters_are_escaped_and_stay_in_a_table() {
        let answer = json!({
            "name": "a\nlimit: 5\u{1b}[2J",
            "sum": { "currencyCode": "R\r", "amount": { "value": "1\t" } },
            "users": [{ "id": "a\nb", "roles": ["x\u{9b}", "y"] }, { "id": "Анна" }],
        });
        assert_eq!(
            text(&answer),
            "name: a\\nlimit: 5\\u{1b}[2J\n\
             sum: 1\\t R\\r\n\
             users:\n  \
             id    roles\n  \
             a\\nb  x\\u{9b}, y\n  \
             Анна\n"
        );
    }

    #[test]
    fn a_list_that_is_no_table_is_printed_as_blocks_with_every_field() {
        let nested = json!({ "orders": [
            { "orderId": "1", "fills": [{ "price": "5", "note": "a" }, { "price": "6" }] },
            { "empty": [{}], "orderId": "2", "lines": "a\nb" },
        ] });
        assert_eq!(
            text(&nested),
            "orders:\n  \
             orderId: 1\n    \
             fills:\n      \
             price  note\n          \
             5  a\n          \
             6\n\n  \
             orderId: 2\n    \
             empty:\n      \
             - {}\n    \
             lines: a\\nb\n"
        );

        let object = |id: &str| {
            let fields = (0..20).map(|n| (format!("field{n}"), json!(format!("{id}-value{n}"))));
            Value::Object(fields.collect())
        };
        let wide = text(&json!([object("a"), object("b")]));
        for id in ["a", "b"] {
            for n in 0..20 {
                let line = format!("field{n}: {id}-value{n}");
                assert!(
                    wide.lines().any(|found| found.trim() == line),
                    "{line}\n{wide}"
                );
            }
        }
        assert!(
            wide.starts_with("field0: a-value0\n  field1: a-value1\n"),
            "{wide}"
        );
        assert!(
            wide.contains("field19: a-value19\n\nfield0: b-value0\n"),
            "{wide}"
        );
    }
}
