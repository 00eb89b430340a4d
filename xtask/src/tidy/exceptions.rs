//! Known violations of the rules, by rule and place, with the issue that fixes each. The list only
//! shrinks.

use std::collections::BTreeMap;

use anyhow::{Context, bail};

use super::{EXCEPTIONS, Finding};

/// Issues that remove exceptions.
const ISSUES: [&str; 3] = ["E1", "E2", "F"];

struct Exception {
    /// Line in the exceptions file, from 1.
    line: usize,
    rule: String,
    place: String,
    count: usize,
}

pub struct Exceptions(Vec<Exception>);

impl Exceptions {
    /// One exception per line: rule, place, count, issue. `#` starts a comment.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let mut exceptions: Vec<Exception> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let at = || format!("{EXCEPTIONS}:{}", index + 1);
            let words: Vec<&str> = line.split_whitespace().collect();
            let [rule, place, count, issue] = words[..] else {
                bail!("{}: expected rule, place, count and issue", at());
            };
            let count = count.parse().with_context(at)?;
            if !ISSUES.contains(&issue) {
                bail!(
                    "{}: unknown issue `{issue}`: the issues are {ISSUES:?}",
                    at()
                );
            }
            let (rule, place) = (rule.to_owned(), place.to_owned());
            if exceptions
                .iter()
                .any(|other| (&other.rule, &other.place) == (&rule, &place))
            {
                bail!("{}: {rule} {place} is listed twice", at());
            }
            exceptions.push(Exception {
                line: index + 1,
                rule,
                place,
                count,
            });
        }
        Ok(Self(exceptions))
    }

    /// Returns the findings without an exception, and a finding per exception that allows more than
    /// was found.
    pub fn apply(&self, found: Vec<Finding>) -> Vec<Finding> {
        let counts = counts(&found);
        let count_of = |exception: &Exception| {
            counts
                .get(&(exception.rule.clone(), exception.place.clone()))
                .copied()
                .unwrap_or(0)
        };
        let is_covered = |finding: &Finding| {
            self.0.iter().any(|exception| {
                exception.rule == finding.rule
                    && exception.place == finding.place
                    && count_of(exception) <= exception.count
            })
        };
        let mut left: Vec<Finding> = found
            .into_iter()
            .filter(|finding| !is_covered(finding))
            .collect();
        for exception in &self.0 {
            let count = count_of(exception);
            if count < exception.count {
                left.push(Finding {
                    file: EXCEPTIONS.to_owned(),
                    line: exception.line,
                    rule: "exception",
                    place: exception.place.clone(),
                    amount: 1,
                    what: format!(
                        "{} {}: {} allowed, {count} found; run `cargo xtask tidy --shrink`",
                        exception.rule, exception.place, exception.count
                    ),
                });
            }
        }
        left
    }

    /// Text of the file with each count lowered to the found one, without exceptions that are not
    /// needed.
    pub fn shrink(&self, found: &[Finding], text: &str) -> String {
        let counts = counts(found);
        let mut shrunk = String::new();
        for (index, line) in text.lines().enumerate() {
            let mut line = line.to_owned();
            if let Some(exception) = self.0.iter().find(|exception| exception.line == index + 1) {
                let key = (exception.rule.clone(), exception.place.clone());
                let Some(count) = counts.get(&key) else {
                    continue;
                };
                if *count < exception.count {
                    // The count stays right-aligned in its column.
                    let old = format!(" {} ", exception.count);
                    let new = format!(" {count:>width$} ", width = old.len() - 2);
                    line = line.replacen(&old, &new, 1);
                }
            }
            shrunk.push_str(&line);
            shrunk.push('\n');
        }
        shrunk
    }
}

/// Sum of the findings' amounts, by rule and place.
fn counts(found: &[Finding]) -> BTreeMap<(String, String), usize> {
    let mut counts = BTreeMap::new();
    for finding in found {
        let key = (finding.rule.to_owned(), finding.place.clone());
        *counts.entry(key).or_default() += finding.amount;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Long lines.\nline-length  a.rs   2  E2\nline-length  b.rs  10  E2\n";

    fn found(places: &[&str]) -> Vec<Finding> {
        let finding = |place: &&str| Finding {
            file: (*place).to_owned(),
            line: 7,
            rule: "line-length",
            place: (*place).to_owned(),
            amount: 1,
            what: String::new(),
        };
        places.iter().map(finding).collect()
    }

    fn left(text: &str, places: &[&str]) -> Vec<String> {
        let exceptions = Exceptions::parse(text).expect("well formed");
        exceptions
            .apply(found(places))
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn an_exception_covers_its_count_and_no_more() {
        let text = "line-length a.rs 2 E2\n";
        assert!(left(text, &["a.rs", "a.rs"]).is_empty());
        assert_eq!(left(text, &["a.rs", "a.rs", "a.rs"]).len(), 3);
        assert_eq!(
            left(text, &["a.rs", "a.rs", "b.rs"]),
            ["b.rs:7: line-length: "]
        );
    }

    #[test]
    fn an_exception_that_is_not_needed_is_an_error() {
        let text = "line-length a.rs 2 E2\n";
        let shrink = "run `cargo xtask tidy --shrink`";
        let one =
            format!("xtask/tidy.txt:1: exception: line-length a.rs: 2 allowed, 1 found; {shrink}");
        assert_eq!(left(text, &["a.rs"]), [one]);
        let none =
            format!("xtask/tidy.txt:1: exception: line-length a.rs: 2 allowed, 0 found; {shrink}");
        assert_eq!(left(text, &[]), [none]);
    }

    #[test]
    fn shrinking_lowers_and_removes_and_never_raises() {
        let exceptions = Exceptions::parse(TEXT).expect("well formed");
        let shrunk = exceptions.shrink(&found(&["b.rs"; 9]), TEXT);
        assert_eq!(shrunk, "# Long lines.\nline-length  b.rs   9  E2\n");
        let shrunk = exceptions.shrink(&found(&["a.rs"; 3]), TEXT);
        assert_eq!(shrunk, "# Long lines.\nline-length  a.rs   2  E2\n");
    }

    #[test]
    fn a_malformed_list_is_refused() {
        for text in [
            "line-length a.rs 2",
            "line-length a.rs two E2",
            "line-length a.rs 2 Z9",
            "a b 1 F\na b 2 F",
        ] {
            assert!(Exceptions::parse(text).is_err(), "{text}");
        }
    }
}
