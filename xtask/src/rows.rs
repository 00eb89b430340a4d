//! Rows of the specification's checklist that tests name: `fn r223_...` or a line `// rows: R223
//! R224` above a test.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::bail;

use crate::{files, shell};

/// The checklist has the rows R001 to R350.
const ROW_LAST: u32 = 350;

pub fn run(json: bool, require: &[String]) -> anyhow::Result<()> {
    let root = shell::root();
    let mut named: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for path in files::below(&root, &["rs", "mjs"])? {
        for row in rows_of(&std::fs::read_to_string(root.join(&path))?) {
            let shown = path.to_string_lossy().into_owned();
            named.entry(row).or_default().insert(shown);
        }
    }
    let missing: Vec<String> = (1..=ROW_LAST)
        .filter(|row| !named.contains_key(row))
        .map(name)
        .collect();

    if json {
        let tested: serde_json::Map<String, serde_json::Value> = named
            .iter()
            .map(|(row, files)| (name(*row), serde_json::json!(files)))
            .collect();
        println!(
            "{}",
            serde_json::to_string_pretty(&serde_json::json!({
                "tested": tested, "missing": missing,
                "tested_count": named.len(), "missing_count": missing.len(),
            }))?
        );
    } else {
        for (row, files) in &named {
            let files: Vec<&str> = files.iter().map(String::as_str).collect();
            println!("{}  {}", name(*row), files.join("  "));
        }
        println!(
            "\n{} rows have a test, {} do not:",
            named.len(),
            missing.len()
        );
        for chunk in missing.chunks(16) {
            println!("  {}", chunk.join(" "));
        }
    }

    let wanted = parse_ranges(require)?;
    let lacking: Vec<String> = wanted
        .iter()
        .filter(|row| !named.contains_key(row))
        .map(|row| name(*row))
        .collect();
    if !lacking.is_empty() {
        bail!("rows without a test: {}", lacking.join(" "));
    }
    Ok(())
}

fn name(row: u32) -> String {
    format!("R{row:03}")
}

/// Rows named by the tests of one source text.
fn rows_of(text: &str) -> BTreeSet<u32> {
    let mut rows = BTreeSet::new();
    let mut announced: Vec<u32> = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if let Some(list) = line.strip_prefix("// rows:") {
            announced.extend(list.split([' ', ',']).filter_map(row_number));
        } else if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if line.starts_with("test(") {
            rows.append(&mut announced.drain(..).collect());
        } else if let Some(rest) = line
            .strip_prefix("fn ")
            .or_else(|| line.strip_prefix("async fn "))
        {
            if is_test {
                rows.extend(announced.drain(..));
                rows.extend(rest.split(['(', '_']).map_while(row_number));
            }
            announced.clear();
            is_test = false;
        }
    }
    rows
}

/// `R041`, `r041`, `R041a` return 41.
fn row_number(word: &str) -> Option<u32> {
    let digits = word.strip_prefix(['R', 'r'])?;
    let digits = digits.trim_end_matches(|c: char| c.is_ascii_lowercase());
    if digits.len() != 3 {
        return None;
    }
    digits
        .parse()
        .ok()
        .filter(|row| (1..=ROW_LAST).contains(row))
}

fn parse_ranges(words: &[String]) -> anyhow::Result<BTreeSet<u32>> {
    let mut rows = BTreeSet::new();
    for word in words {
        let (first, last) = word.split_once('-').unwrap_or((word, word));
        match (row_number(first), row_number(last)) {
            (Some(first), Some(last)) if first <= last => rows.extend(first..=last),
            _ => bail!("`{word}` is not a row: write R001 or R001-R024"),
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_from_names_and_from_announcements() {
        let text = concat!(
            "// rows: R001 R002a\n#[test]\nfn anything() {}\n",
            "#[tokio::test]\nasync fn r223_r224_refuses() {}\nfn r111_no_test() {}\n"
        );
        assert_eq!(rows_of(text), BTreeSet::from([1, 2, 223, 224]));
    }

    #[test]
    fn ranges_are_read_and_nonsense_is_refused() {
        let words = ["R310-R312".to_owned(), "R001".to_owned()];
        assert_eq!(
            parse_ranges(&words).expect("rows"),
            BTreeSet::from([1, 310, 311, 312])
        );
        parse_ranges(&["R9".to_owned()]).expect_err("no row");
    }
}
