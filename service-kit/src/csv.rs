//! Rows of CSV (RFC 4180).

/// A row of quoted fields, with its line end. A field that a spreadsheet would execute gets an
/// apostrophe; a negative number stays one.
pub fn row(fields: &[&str]) -> String {
    let quoted = fields.iter().map(|field| {
        let mark = if is_formula(field) { "'" } else { "" };
        format!("\"{mark}{}\"", field.replace('"', "\"\""))
    });
    quoted.collect::<Vec<_>>().join(",") + "\r\n"
}

fn is_formula(field: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || byte == b'.';
    match field.strip_prefix('-') {
        Some(number) => number.is_empty() || !number.bytes().all(is_digit),
        None => field.starts_with(['=', '+', '@', '\t', '\r']),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_quoted_and_formulas_are_marked() {
        assert_eq!(row(&["a", "b \"c\", d"]), "\"a\",\"b \"\"c\"\", d\"\r\n");
        assert_eq!(row(&["=1+1", "-1+1"]), "\"'=1+1\",\"'-1+1\"\r\n");
        assert_eq!(row(&["-1.50", "-", ""]), "\"-1.50\",\"'-\",\"\"\r\n");
    }
}
