//! Answers as text: one `name: value` per line, nested names indented, amounts as one token.

use std::fmt::Write;

use serde_json::Value;

/// The answer as indented text.
pub fn text(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, 0);
    if out.is_empty() {
        out.push_str("(empty)\n");
    }
    out
}

/// A table with columns as wide as their widest cell.
pub fn table<const N: usize>(
    head: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(rows);
    let widths: [usize; N] = std::array::from_fn(|column| {
        lines
            .iter()
            .map(|line| line[column].len())
            .max()
            .unwrap_or(0)
    });
    let mut out = String::new();
    for line in lines {
        let cells: Vec<String> = line
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

fn write_value(out: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                write_named(out, name, value, depth);
            }
        }
        Value::Array(values) => {
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

/// Values that fit on one line: scalars, decimals, amounts.
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
