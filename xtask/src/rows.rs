//! Rows of the specification's checklist that tests name. A test names rows in its own name
//! (`fn r223_...`) or in a line `// rows: R223 R224` above it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, bail};

use crate::{files, shell};

/// The checklist has the rows R001 to R350.
const ROW_LAST: u32 = 350;

/// A test that names more rows may not assert each of them.
const ROWS_PER_TEST: usize = 10;

/// A test and the rows that it names.
type Named = (String, BTreeSet<u32>);

/// Tests with their outcomes, by the row that they name.
type Rows = BTreeMap<u32, BTreeMap<String, Option<Outcome>>>;

/// Outcome of a test in the recorded test runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    NotRun,
}

impl Outcome {
    fn text(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::NotRun => "not run",
        }
    }
}

/// Prints each row with its tests and, with `results` (output of `cargo test`), their outcomes.
///
/// # Errors
/// A row of `require` has no test. With `results`: none of its tests passed, or one failed.
pub fn run(json: bool, require: &[String], results: Option<&Path>) -> anyhow::Result<()> {
    let root = shell::root();
    let outcomes = match results {
        Some(file) => Some(outcomes(&std::fs::read_to_string(file).with_context(
            || format!("cannot read the results in {}", file.display()),
        )?)),
        None => None,
    };
    let mut rows = Rows::new();
    for path in files::below(&root, &["rs"])? {
        for (test, named) in tests_of(&std::fs::read_to_string(root.join(&path))?) {
            let outcome = outcomes
                .as_ref()
                .map(|outcomes| outcomes.get(&test).copied().unwrap_or(Outcome::NotRun));
            for row in named {
                let shown = format!("{}:{test}", path.to_string_lossy());
                rows.entry(row).or_default().insert(shown, outcome);
            }
        }
    }
    let passed = |row: &u32| rows.get(row).is_some_and(is_passed);
    let (tested, missing): (Vec<u32>, Vec<u32>) = (1..=ROW_LAST).partition(passed);
    if json {
        let shown = |tests: &BTreeMap<String, Option<Outcome>>| -> serde_json::Value {
            let tests = tests.iter();
            tests
                .map(|(test, outcome)| {
                    (test.clone(), serde_json::json!(outcome.map(Outcome::text)))
                })
                .collect()
        };
        let named = rows.iter().map(|(row, tests)| (name(*row), shown(tests)));
        let named: serde_json::Map<String, serde_json::Value> = named.collect();
        let report = serde_json::json!({
            "rows": named,
            "passed": tested.iter().map(|row| name(*row)).collect::<Vec<_>>(),
            "missing": missing.iter().map(|row| name(*row)).collect::<Vec<_>>(),
            "crowded": crowded(&rows).into_keys().map(name).collect::<Vec<_>>(),
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print_rows(&rows, &tested, &missing, results.is_some());
    }
    let lacking: Vec<String> = parse_ranges(require)?
        .iter()
        .filter(|row| !passed(row))
        .map(|row| name(*row))
        .collect();
    if !lacking.is_empty() {
        let what = if results.is_some() {
            "rows without a passed test"
        } else {
            "rows without a test"
        };
        bail!("{what}: {}", lacking.join(" "));
    }
    Ok(())
}

/// True if at least one test passed and none failed. Without results: if a test exists.
fn is_passed(tests: &BTreeMap<String, Option<Outcome>>) -> bool {
    let has = |wanted| tests.values().any(|outcome| *outcome == Some(wanted));
    let is_recorded = tests.values().any(Option::is_some);
    !is_recorded || has(Outcome::Passed) && !has(Outcome::Failed)
}

/// Rows with one test, which names more than [`ROWS_PER_TEST`] rows.
fn crowded(rows: &Rows) -> BTreeMap<u32, &str> {
    let mut named: BTreeMap<&str, usize> = BTreeMap::new();
    for test in rows.values().flat_map(BTreeMap::keys) {
        *named.entry(test).or_default() += 1;
    }
    rows.iter()
        .filter(|(_, tests)| tests.len() == 1)
        .filter_map(|(row, tests)| Some((*row, tests.keys().next()?.as_str())))
        .filter(|(_, test)| named[test] > ROWS_PER_TEST)
        .collect()
}

fn print_rows(rows: &Rows, tested: &[u32], missing: &[u32], is_recorded: bool) {
    for (row, tests) in rows {
        for (test, outcome) in tests {
            let outcome = outcome.map_or("", Outcome::text);
            println!("{}  {outcome:7}  {test}", name(*row));
        }
    }
    let what = if is_recorded {
        "a passed test"
    } else {
        "a test"
    };
    println!(
        "\n{} rows have {what}, {} do not:",
        tested.len(),
        missing.len()
    );
    let missing: Vec<String> = missing.iter().map(|row| name(*row)).collect();
    for chunk in missing.chunks(16) {
        println!("  {}", chunk.join(" "));
    }
    let crowded = crowded(rows);
    if !crowded.is_empty() {
        println!(
            "\n{} rows whose only test names more than {ROWS_PER_TEST} rows:",
            crowded.len()
        );
        for (row, test) in crowded {
            println!("  {}  {test}", name(row));
        }
    }
}

/// Outcomes by test name without modules, from the lines `test module::name ... ok`. A name that
/// occurs in several binaries passes if it passes in each.
fn outcomes(output: &str) -> BTreeMap<String, Outcome> {
    let mut found = BTreeMap::new();
    for line in output.lines() {
        let Some((test, outcome)) = line
            .strip_prefix("test ")
            .and_then(|line| line.split_once(" ... "))
        else {
            continue;
        };
        let outcome = match outcome.trim() {
            "ok" => Outcome::Passed,
            "FAILED" => Outcome::Failed,
            _ => continue,
        };
        let test = test
            .rsplit("::")
            .next()
            .unwrap_or(test)
            .trim_end_matches(" - should panic");
        let entry = found.entry(test.to_owned()).or_insert(outcome);
        if outcome == Outcome::Failed {
            *entry = outcome;
        }
    }
    found
}

fn name(row: u32) -> String {
    format!("R{row:03}")
}

/// Tests of one source text that name rows.
fn tests_of(text: &str) -> Vec<Named> {
    let mut tests = Vec::new();
    let mut announced: Vec<u32> = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if let Some(list) = line.strip_prefix("// rows:") {
            announced.extend(list.split([' ', ',']).filter_map(row_number));
        } else if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some(rest) = line
            .strip_prefix("fn ")
            .or_else(|| line.strip_prefix("async fn "))
        {
            if is_test {
                let test = rest.split('(').next().unwrap_or(rest);
                let mut rows: BTreeSet<u32> = announced.drain(..).collect();
                rows.extend(test.split('_').map_while(row_number));
                tests.push((test.to_owned(), rows));
            }
            announced.clear();
            is_test = false;
        }
    }
    tests
}

/// 41 for `R041`, `r041` and `R041a`.
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
    fn rows_are_read_from_names_and_from_comments() {
        let text = concat!(
            "// rows: R001 R002a\n#[test]\nfn anything() {}\n",
            "#[tokio::test]\nasync fn r223_r224_refuses() {}\nfn r111_no_test() {}\n"
        );
        let named = [
            ("anything", vec![1, 2]),
            ("r223_r224_refuses", vec![223, 224]),
        ];
        let named = named.map(|(test, rows)| (test.to_owned(), BTreeSet::from_iter(rows)));
        assert_eq!(tests_of(text), named);
    }

    #[test]
    fn a_row_passes_if_its_tests_ran_and_none_failed() {
        let found = outcomes(concat!(
            "running 3 tests\ntest a::r001_one ... ok\ntest r002_two ... FAILED\n",
            "test r002_two ... ok\ntest slow has been running for over 60 seconds\n",
            "test r004_skipped ... ignored\n"
        ));
        let of = |test: &str| Some(found.get(test).copied().unwrap_or(Outcome::NotRun));
        let row = |tests: &[&str]| {
            is_passed(
                &tests
                    .iter()
                    .map(|test| ((*test).to_owned(), of(test)))
                    .collect(),
            )
        };
        assert!(row(&["r001_one"]) && row(&["r001_one", "r004_skipped"]));
        assert!(!row(&["r001_one", "r002_two"]) && !row(&["r004_skipped"]));
    }

    #[test]
    fn a_row_is_crowded_if_its_only_test_names_more_than_ten_rows() {
        let test = |name: &str| (name.to_owned(), None);
        let mut rows: Rows = (1..=11)
            .map(|row| (row, BTreeMap::from([test("file.rs:many")])))
            .collect();
        rows.get_mut(&2)
            .expect("a row")
            .extend([test("file.rs:own")]);
        rows.insert(12, BTreeMap::from([test("file.rs:other")]));
        let found: Vec<u32> = crowded(&rows).into_keys().collect();
        assert_eq!(found, [&[1][..], &[3, 4, 5, 6, 7, 8, 9, 10, 11]].concat());
        // Ten rows are not too many.
        rows.remove(&11);
        assert!(crowded(&rows).is_empty());
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
