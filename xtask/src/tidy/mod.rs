//! Checks dependency rules and conventions of the workspace: allowed dependencies between crates,
//! where the types of a library may appear, the form of source files and the words of prose. The
//! rules are in [`edges`], [`packages`], [`walls`], [`conventions`] and [`prose`]. Known violations
//! are in `xtask/tidy.txt` with the issue that fixes each.

mod conventions;
mod edges;
mod exceptions;
mod packages;
mod prose;
mod source;
mod tokens;
mod walls;

use std::fmt;
use std::path::Path;

use crate::{files, shell};
use edges::Edge;
use exceptions::Exceptions;
use source::Source;

/// File of the exceptions.
const EXCEPTIONS: &str = "xtask/tidy.txt";

/// Crates that only tests, measurements and tasks run.
#[rustfmt::skip]
const TEST_CRATES: &[&str] = &["benches", "conformance", "fuzz", "harness", "testkit", "tests", "xtask"];

/// A violation of a rule.
#[derive(Debug)]
struct Finding {
    file: String,
    line: usize,
    rule: &'static str,
    /// Key of an exception: the file, the edge, the function.
    place: String,
    /// What the finding adds to the count of its place: 1, or the lines of a function.
    amount: usize,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            line,
            rule,
            what,
            ..
        } = self;
        write!(f, "{file}:{line}: {rule}: {what}")
    }
}

/// Checks the workspace. With `shrink`, exceptions that allow more than was found are lowered or
/// removed first.
pub fn run(shrink: bool) -> anyhow::Result<()> {
    let root = shell::root();
    let mut found = findings(&edges::read(&root)?, &sources(&root)?);
    found.extend(prose::check_files(&root)?);
    let file = root.join(EXCEPTIONS);
    let mut text = std::fs::read_to_string(&file)?;
    if shrink {
        text = Exceptions::parse(&text)?.shrink(&found, &text);
        std::fs::write(&file, &text)?;
    }
    let left = Exceptions::parse(&text)?.apply(found);
    if left.is_empty() {
        println!("tidy: ok");
        return Ok(());
    }
    for finding in &left {
        println!("{finding}");
    }
    println!("tidy: {} findings", left.len());
    // The findings are printed: an error with a backtrace would add nothing.
    std::process::exit(1)
}

fn findings(edges: &[Edge], sources: &[Source]) -> Vec<Finding> {
    let mut found = edges::check(edges);
    found.extend(packages::check(edges));
    found.extend(conventions::check_modules(sources));
    for source in sources {
        found.extend(walls::check(source));
        found.extend(conventions::check(source));
    }
    found.sort_by(|a, b| (&a.file, a.line, a.rule).cmp(&(&b.file, b.line, b.rule)));
    found
}

fn sources(root: &Path) -> anyhow::Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in files::below(root, &["rs"])? {
        let text = std::fs::read_to_string(root.join(&path))?;
        sources.push(Source::new(path.to_string_lossy().into_owned(), text));
    }
    source::mark_test_modules(&mut sources);
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_repository_passes() {
        let root = shell::root();
        let mut found = findings(
            &edges::read(&root).expect("metadata"),
            &sources(&root).expect("sources"),
        );
        found.extend(prose::check_files(&root).expect("files"));
        let text = std::fs::read_to_string(root.join(EXCEPTIONS)).expect("exceptions");
        let left = Exceptions::parse(&text).expect("well formed").apply(found);
        let shown: Vec<_> = left.iter().map(ToString::to_string).collect();
        assert!(shown.is_empty(), "{}", shown.join("\n"));
    }

    #[test]
    fn a_finding_is_one_line_with_its_place() {
        let source = Source::new(
            "a/src/lib.rs".to_owned(),
            format!("\n//{}\n", "x".repeat(120)),
        );
        let found = findings(&[], &[source]);
        assert_eq!(
            found[0].to_string(),
            "a/src/lib.rs:2: line-length: 122 characters, 120 at most"
        );
    }
}
