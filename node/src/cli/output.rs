//! Answers as text: one `name: value` per line, nested names indented, amounts as one token.

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

/// Maximum width of a table in characters; wider lists are printed as indented text.
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

/// Lines with aligned columns. Widths are counted in characters, not bytes: names may be Russian.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for line in lines {
        let cells = line.iter().zip(&widths);
        let cells: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// A list of objects as a table, if each field fits one token. `None` for other lists, single
/// objects and wide tables.
fn as_table(values: &[Value]) -> Option<String> {
    let objects: Vec<&Map<String, Value>> =
        values.iter().map(Value::as_object).collect::<Option<_>>()?;
    let mut head: Vec<String> = Vec::new();
    for name in objects.iter().flat_map(|object| object.keys()) {
        if !head.contains(name) {
            head.push(name.clone());
        }
    }
    let row = |object: &&Map<String, Value>| -> Option<Vec<String>> {
        let cell = |name: &String| object.get(name).map_or(Some(String::new()), word);
        head.iter().map(cell).collect()
    };
    let rows: Vec<Vec<String>> = objects.iter().map(row).collect::<Option<_>>()?;
    let lines: Vec<Vec<String>> = std::iter::once(head.clone()).chain(rows).collect();
    let table = aligned(&lines);
    let is_narrow = |line: &str| line.chars().count() <= TABLE_WIDTH_MAX;
    (values.len() > 1 && table.lines().all(is_narrow)).then_some(table)
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
            for value in values {
                if let Some(word) = word(value) {
                    line(out, depth, &format!("- {word}"));
                } else {
                    line(out, depth, "-");
                    write_value(out, value, depth + 1);
                }
            }
        }
        other => line(out, depth, &word(other).unwrap_or_default()),
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

/// The value as one token, if it is a scalar, a decimal, an amount or empty.
fn word(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some(String::new()),
        Value::Bool(flag) => Some(flag.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(text) => Some(text.clone()),
        Value::Array(values) => values.is_empty().then(|| "[]".to_owned()),
        Value::Object(object) => {
            if object.len() == 1
                && let Some(Value::String(text)) = object.get("value")
            {
                return Some(text.clone());
            }
            match (
                object.get("currencyCode"),
                object.get("amount"),
                object.len(),
            ) {
                (Some(Value::String(currency)), Some(amount), 2) => {
                    Some(format!("{} {currency}", word(amount)?))
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
    fn amounts_are_one_token_and_lists_are_indented() {
        let answer = json!({
            "trades": [{
                "price": { "value": "100.5" },
                "fee": { "amount": { "currencyCode": "RUB", "amount": { "value": "0.10" } } }
            }],
            "pagination": {},
        });
        assert_eq!(
            text(&answer),
            "trades:\n  -\n    price: 100.5\n    fee:\n      amount: 0.10 RUB\npagination: {}\n"
        );
    }
}
