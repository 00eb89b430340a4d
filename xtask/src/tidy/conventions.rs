//! Conventions of source files: module file names, line and function length, bounded channels.

use std::collections::BTreeSet;

use super::Finding;
use super::source::Source;
use super::tokens::{Token, closing, is_at};

const COLUMNS_MAX: usize = 120;
const FUNCTION_LINES_MAX: usize = 70;

/// Checks that a module with submodule files is `name/mod.rs`, and such a test `name/main.rs`.
pub fn check_modules(sources: &[Source]) -> Vec<Finding> {
    let folders: BTreeSet<&str> = sources
        .iter()
        .filter_map(|source| Some(source.path.rsplit_once('/')?.0))
        .collect();
    let has_folder = |source: &&Source| folders.contains(source.path.trim_end_matches(".rs"));
    let finding = |source: &Source| {
        let name = source.path.trim_end_matches(".rs");
        let file = if name.rsplit('/').nth(1) == Some("tests") {
            "main.rs"
        } else {
            "mod.rs"
        };
        Finding {
            file: source.path.clone(),
            line: 1,
            rule: "module-file",
            place: source.path.clone(),
            amount: 1,
            what: format!("a module with files below it is {name}/{file}"),
        }
    };
    sources.iter().filter(has_folder).map(finding).collect()
}

pub fn check(source: &Source) -> Vec<Finding> {
    let mut found = long_lines(source);
    let tokens = source.production_tokens();
    found.extend(unbounded_channels(source, &tokens));
    found.extend(long_functions(source, &tokens));
    found
}

fn long_lines(source: &Source) -> Vec<Finding> {
    let lines = source
        .text
        .lines()
        .map(|line| line.chars().count())
        .enumerate();
    lines
        .filter(|(_, length)| *length > COLUMNS_MAX)
        .map(|(index, length)| Finding {
            file: source.path.clone(),
            line: index + 1,
            rule: "line-length",
            place: source.path.clone(),
            amount: 1,
            what: format!("{length} characters, {COLUMNS_MAX} at most"),
        })
        .collect()
}

/// Finds `unbounded_channel` of tokio, `unbounded` of crossbeam and futures, and the standard
/// library's `channel()`, which has no capacity.
fn unbounded_channels(source: &Source, tokens: &[Token]) -> Vec<Finding> {
    let is_std = |at: usize| {
        let is_channel = is_at(tokens, at, &["mpsc", "::", "channel"]);
        let call = if is_at(tokens, at + 3, &["::", "<"]) {
            after_generics(tokens, at + 4)
        } else {
            at + 3
        };
        is_channel && is_at(tokens, call, &["(", ")"])
            || is_at(
                tokens,
                at,
                &["std", "::", "sync", "::", "mpsc", "::", "channel", ";"],
            )
    };
    let made = tokens.iter().enumerate().filter(|(at, token)| {
        ["unbounded", "unbounded_channel"].contains(&token.text) || is_std(*at)
    });
    made.map(|(_, token)| Finding {
        file: source.path.clone(),
        line: token.line,
        rule: "unbounded-channel",
        place: source.path.clone(),
        amount: 1,
        what: "a queue must have a bound".to_owned(),
    })
    .collect()
}

/// Index after the `>` that closes the `<` at `at`.
fn after_generics(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(at) {
        match token.text {
            "<" => depth += 1,
            ">" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

fn long_functions(source: &Source, tokens: &[Token]) -> Vec<Finding> {
    let mut found = Vec::new();
    for at in 0..tokens.len() {
        let Some(name) = tokens
            .get(at + 1)
            .filter(|name| tokens[at].text == "fn" && name.is_name())
        else {
            continue;
        };
        let lines = body(tokens, at + 2).map_or(0, code_lines);
        if lines > FUNCTION_LINES_MAX {
            found.push(Finding {
                file: source.path.clone(),
                line: name.line,
                rule: "function-length",
                place: format!("{}:{}", source.path, name.text),
                amount: lines,
                what: format!(
                    "`{}` has {lines} lines of code, {FUNCTION_LINES_MAX} at most",
                    name.text
                ),
            });
        }
    }
    found
}

/// Tokens between the braces of the function whose parameters start at or after `at`.
fn body<'t, 'a>(tokens: &'t [Token<'a>], mut at: usize) -> Option<&'t [Token<'a>]> {
    loop {
        match tokens.get(at)?.text {
            ";" => return None,
            "{" => return tokens.get(at + 1..closing(tokens, at)),
            "(" | "[" => at = closing(tokens, at) + 1,
            _ => at += 1,
        }
    }
}

/// Number of lines with a token.
fn code_lines(tokens: &[Token]) -> usize {
    tokens
        .iter()
        .flat_map(|token| token.line..=token.last_line)
        .collect::<BTreeSet<_>>()
        .len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source::new(path.to_owned(), text.to_owned())
    }

    /// Rules that a file with this text violates.
    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        check(&source(path, text))
            .into_iter()
            .map(|finding| finding.rule)
            .collect()
    }

    #[test]
    fn a_line_has_120_characters_at_most() {
        let line = format!("//{}", "я".repeat(118));
        assert!(rules("ledger/tests/a.rs", &line).is_empty());
        assert_eq!(
            rules("ledger/tests/a.rs", &format!("{line}я")),
            ["line-length"]
        );
    }

    #[test]
    fn a_module_with_files_is_a_folder() {
        let paths = [
            "a/src/b.rs",
            "a/src/b/c.rs",
            "a/src/d/mod.rs",
            "a/src/d/e.rs",
            "a/tests/f.rs",
            "a/tests/f/g.rs",
        ];
        let found = check_modules(&paths.map(|path| source(path, "")));
        let what: Vec<_> = found.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(
            what,
            [
                "a module with files below it is a/src/b/mod.rs",
                "a module with files below it is a/tests/f/main.rs"
            ]
        );
    }

    #[test]
    fn channels_have_a_bound() {
        for text in [
            "let (a, b) = tokio::sync::mpsc::unbounded_channel();",
            "use tokio::sync::mpsc::unbounded_channel as open;",
            "let (a, b) = futures::channel::mpsc::unbounded::<u8>();",
            "let (a, b) = crossbeam::channel::unbounded();",
            "let (a, b) = mpsc::channel();",
            "let (a, b) = std::sync::mpsc::channel::<Vec<u8>>();",
            "use std::sync::mpsc::channel;",
        ] {
            assert_eq!(
                rules("ledger/src/book.rs", text),
                ["unbounded-channel"],
                "{text}"
            );
            assert!(rules("ledger/tests/book.rs", text).is_empty(), "{text}");
        }
        for text in [
            "let (a, b) = mpsc::channel(4);",
            "let (a, b) = mpsc::channel::<u8>(BOUND);",
            "let (a, b) = mpsc::sync_channel(1);",
            "let (a, b) = crossbeam::channel::bounded(4);",
            "// unbounded_channel",
        ] {
            assert!(rules("ledger/src/book.rs", text).is_empty(), "{text}");
        }
    }

    #[test]
    fn a_function_has_70_lines_of_code_at_most() {
        let function = |lines: usize| {
            let body = "    // why\n\n    a();\n".repeat(lines);
            format!("impl A {{ fn long(b: [u8; 2]) -> C where D: E {{\n{body}}} }}\nfn other();\n")
        };
        assert!(rules("ledger/src/book.rs", &function(70)).is_empty());
        assert_eq!(
            rules("ledger/src/book.rs", &function(71)),
            ["function-length"]
        );
        let test = format!("#[cfg(test)]\nmod tests {{ {} }}", function(71));
        assert!(rules("ledger/src/book.rs", &test).is_empty());
        assert!(rules("ledger/tests/book.rs", &function(71)).is_empty());
    }
}
