//! Checks comments, texts and documents for listed words, and the length of comment lines.

use std::path::{Path, PathBuf};

use regex::{Regex, RegexBuilder};

use super::Finding;
use crate::files;

/// Longest comment line.
const COMMENT_COLUMNS_MAX: usize = 100;

/// Kinds of files with comments, texts or prose.
const EXTENSIONS: &[&str] = &[
    "rs", "md", "proto", "sol", "sql", "sh", "toml", "py", "ts", "go", "yaml",
];

/// Files with comments whose extension is not in [`EXTENSIONS`].
const NAMED: &[&str] = &["Dockerfile", ".ci/run"];

/// Released migrations that contain listed words. They must not change: a database stores the
/// checksum of each migration it has run, comments included. New migrations are checked.
const RELEASED: &[&str] = &[
    "ledger/migrations/postgres/0004_locked_reads.sql",
    "ledger/migrations/postgres/0005_fewer_trips.sql",
    "payments/migrations/sqlite/0001_payments.sql",
];

/// The listed words, split so that this file passes its own rule.
const WORDS: &[&str] = &[
    concat!("who", "ever"),
    concat!("no", "body"),
    concat!("some", "body"),
    concat!("gives? ", "back"),
    concat!("so ", "many"),
    concat!("hears ", "of"),
    concat!("lies ", "(in|beside|behind)"),
];

/// Checks every file of the workspace that has comments, texts or prose.
pub fn check_files(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let words = words();
    let mut found = Vec::new();
    let mut paths = files::below(root, EXTENSIONS)?;
    paths.extend(NAMED.iter().map(PathBuf::from));
    for path in paths {
        if RELEASED.iter().any(|released| path == Path::new(released)) {
            continue;
        }
        let text = std::fs::read_to_string(root.join(&path))?;
        found.extend(check(&path.to_string_lossy(), &text, &words));
    }
    Ok(found)
}

fn words() -> Regex {
    let pattern = format!(r"\b({})\b", WORDS.join("|"));
    let built = RegexBuilder::new(&pattern).case_insensitive(true).build();
    built.expect("the pattern is well formed")
}

fn check(path: &str, text: &str, words: &Regex) -> Vec<Finding> {
    let is_rust = path.ends_with(".rs");
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut add = |rule, what| {
            found.push(Finding {
                file: path.to_owned(),
                line: index + 1,
                rule,
                place: path.to_owned(),
                amount: 1,
                what,
            });
        };
        if let Some(word) = words.find(line) {
            add("word", format!("`{}`: use the plain term", word.as_str()));
        }
        let length = line.chars().count();
        let is_comment = is_rust && line.trim_start().starts_with("//");
        if is_comment && length > COMMENT_COLUMNS_MAX {
            let what = format!("{length} characters, {COMMENT_COLUMNS_MAX} at most");
            add("comment-length", what);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        let found = check(path, text, &words());
        found.into_iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn listed_words_are_found_in_any_case_and_not_inside_names() {
        for word in [
            concat!("Who", "ever"),
            concat!("give ", "back"),
            concat!("gives ", "back"),
            concat!("lies ", "beside"),
        ] {
            let text = format!("/// The part that {word} reads.");
            assert_eq!(rules("a/src/lib.rs", &text), ["word"], "{word}");
            assert_eq!(rules("docs/a.md", &text), ["word"], "{word}");
        }
        let name = format!("fn is_{}_here() {{}}", concat!("no", "body"));
        assert!(rules("a/src/lib.rs", &name).is_empty());
    }

    #[test]
    fn a_migration_is_checked_unless_a_released_one_has_listed_words() {
        let root = crate::shell::root();
        for path in RELEASED {
            let text = std::fs::read_to_string(root.join(path)).expect("the migration");
            assert!(rules(path, &text).contains(&"word"), "{path}");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let write = |path: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
            std::fs::write(path, concat!("-- no", "body\n")).expect("written");
        };
        let checked = [
            "ledger/migrations/sqlite/0099_new.sql",
            "proto/buf.yaml",
            "Dockerfile",
            ".ci/run",
        ];
        RELEASED.iter().chain(&checked).copied().for_each(write);
        let found = check_files(folder.path()).expect("files");
        let files: Vec<_> = found.iter().map(|finding| &*finding.file).collect();
        assert_eq!(files, checked);
    }

    #[test]
    fn a_comment_line_ends_at_column_100() {
        let line = format!("    //{}", "я".repeat(94));
        assert!(rules("a/src/lib.rs", &line).is_empty());
        let longer = format!("{line}я");
        assert_eq!(rules("a/src/lib.rs", &longer), ["comment-length"]);
        assert!(rules("docs/a.md", &longer).is_empty());
        let code = format!("let a = \"{}\";", "b".repeat(99));
        assert!(rules("a/src/lib.rs", &code).is_empty());
    }
}
