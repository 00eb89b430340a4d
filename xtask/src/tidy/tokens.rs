//! Splits Rust source into tokens: enough to find names and bodies without a parser.
//!
//! Comments and lifetimes are dropped and the contents of literals are not kept, so that a name in
//! a comment or a string does not count as a use. Macro bodies are tokens like other code.

/// A name, a number, `::`, one character of punctuation, or `""` for a literal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a> {
    pub text: &'a str,
    /// First line, from 1.
    pub line: usize,
    /// Last line: differs for a literal that spans several lines.
    pub last_line: usize,
}

impl Token<'_> {
    pub fn is_name(&self) -> bool {
        self.text.starts_with(is_name_char) && !self.text.starts_with(|c: char| c.is_ascii_digit())
    }
}

fn is_name_char(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

pub fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(first) = rest.chars().next() {
        let (length, kept) = next(rest, first);
        let (taken, after) = rest.split_at(length);
        let last_line = line + taken.matches('\n').count();
        if let Some(text) = kept {
            tokens.push(Token {
                text,
                line,
                last_line,
            });
        }
        (rest, line) = (after, last_line);
    }
    tokens
}

/// Length in bytes of the next element of `rest`, and its token text; `None` if it is dropped.
fn next(rest: &str, first: char) -> (usize, Option<&str>) {
    const LITERAL: Option<&str> = Some("\"\"");
    if first.is_whitespace() {
        return (first.len_utf8(), None);
    }
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), None);
    }
    if rest.starts_with("/*") {
        return (block_comment(rest), None);
    }
    if let Some(length) = string(rest) {
        return (length, LITERAL);
    }
    if first == '\'' {
        return match character(rest) {
            Some(length) => (length, LITERAL),
            None => (1 + name_length(&rest[1..]), None),
        };
    }
    if is_name_char(first) {
        let length = name_length(rest);
        return (length, Some(&rest[..length]));
    }
    let length = if rest.starts_with("::") {
        2
    } else {
        first.len_utf8()
    };
    (length, Some(&rest[..length]))
}

fn name_length(rest: &str) -> usize {
    rest.find(|c| !is_name_char(c)).unwrap_or(rest.len())
}

/// Length of the block comment that `rest` starts with. Block comments nest.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        let here = &rest.as_bytes()[at..];
        if here.starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if here.starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of the string literal that `rest` starts with: plain, byte, C or raw.
fn string(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "b", "c", "r"]
        .into_iter()
        .find(|prefix| {
            rest.strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with(['"', '#']))
        })
        .unwrap_or("");
    let body = &rest[prefix.len()..];
    if prefix.ends_with('r') {
        let hashes = body.len() - body.trim_start_matches('#').len();
        let quoted = body[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", &body[..hashes]);
        let length = quoted.find(&end).map_or(quoted.len(), |at| at + end.len());
        return Some(prefix.len() + hashes + 1 + length);
    }
    let quoted = body.strip_prefix('"')?;
    let length = escaped(quoted, '"').unwrap_or(quoted.len());
    Some(prefix.len() + 1 + length)
}

/// Length of the character literal that `rest` starts with; `None` for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let quoted = &rest[1..];
    let first = quoted.chars().next()?;
    if first == '\\' || quoted[first.len_utf8()..].starts_with('\'') {
        return escaped(quoted, '\'').map(|length| 1 + length);
    }
    None
}

/// Bytes up to and including the first unescaped `end`.
fn escaped(text: &str, end: char) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == end => return Some(at + c.len_utf8()),
            _ => {}
        }
    }
    None
}

/// Tokens outside `#[cfg(test)]` items, and the names of the test modules in separate files.
pub fn without_tests<'a>(tokens: &[Token<'a>]) -> (Vec<Token<'a>>, Vec<&'a str>) {
    const TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut kept, mut modules) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < tokens.len() {
        if is_at(tokens, at, &TEST) {
            let item = after_attributes(tokens, at);
            if is_at(tokens, item, &["mod"]) && is_at(tokens, item + 2, &[";"]) {
                modules.push(tokens[item + 1].text);
            }
            at = end_of_item(tokens, item);
        } else {
            kept.push(tokens[at]);
            at += 1;
        }
    }
    (kept, modules)
}

/// True if the tokens from `at` on have these texts.
pub fn is_at(tokens: &[Token], at: usize, texts: &[&str]) -> bool {
    tokens.get(at..at + texts.len()).is_some_and(|here| {
        here.iter()
            .zip(texts)
            .all(|(token, text)| token.text == *text)
    })
}

fn after_attributes(tokens: &[Token], mut at: usize) -> usize {
    while is_at(tokens, at, &["#", "["]) {
        at = closing(tokens, at + 1) + 1;
    }
    at
}

/// Index of the bracket that closes the one at `at`.
pub fn closing(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(at) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return index;
        }
    }
    tokens.len().saturating_sub(1)
}

/// Index after an item, a statement, a field or a match arm.
fn end_of_item(tokens: &[Token], mut at: usize) -> usize {
    const ITEMS: [&str; 16] = [
        "async",
        "const",
        "enum",
        "extern",
        "fn",
        "impl",
        "let",
        "macro_rules",
        "mod",
        "pub",
        "static",
        "struct",
        "trait",
        "type",
        "unsafe",
        "use",
    ];
    let is_item = tokens
        .get(at)
        .is_some_and(|token| ITEMS.contains(&token.text));
    while at < tokens.len() {
        match tokens[at].text {
            ";" => return at + 1,
            "," if !is_item => return at + 1,
            "}" | ")" | "]" => return at,
            "{" => return closing(tokens, at) + 1,
            "(" | "[" => at = closing(tokens, at) + 1,
            _ => at += 1,
        }
    }
    at
}

/// A path that starts with a given crate or module, from code or from a `use` tree.
#[derive(Debug, PartialEq, Eq)]
pub struct Path<'a> {
    pub segments: Vec<&'a str>,
    pub line: usize,
    /// Imported under another name, or exported: its items then have other paths.
    pub is_rebound: bool,
}

/// Words that may stand before a path that starts with `::`.
const BEFORE_PATH: [&str; 17] = [
    "as", "break", "dyn", "else", "for", "if", "impl", "in", "match", "move", "mut", "ref",
    "return", "unsafe", "use", "where", "while",
];

/// Every path that starts with `root`, with `use` trees expanded.
pub fn paths<'a>(tokens: &[Token<'a>], root: &str) -> Vec<Path<'a>> {
    let mut paths = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at].text == "use" {
            let is_exported = at > 0 && [")", "pub"].contains(&tokens[at - 1].text);
            at = imports(tokens, at + 1, root, is_exported, &mut paths);
            continue;
        }
        let before = |back: usize| at.checked_sub(back).map(|at| tokens[at]);
        let is_segment = before(1).is_some_and(|token| token.text == "::")
            && before(2).is_some_and(|token| {
                token.is_name() && !BEFORE_PATH.contains(&token.text) || token.text == ">"
            });
        let is_method = before(1).is_some_and(|token| token.text == ".");
        let is_renamed_crate = before(1).is_some_and(|token| token.text == "crate")
            && is_at(tokens, at, &[root, "as"]);
        if is_renamed_crate || !is_segment && !is_method && is_at(tokens, at, &[root, "::"]) {
            expand(tokens, at, &mut Vec::new(), &mut paths);
        }
        at += 1;
    }
    paths
}

/// Adds the paths below `root` of the `use` tree at `at`; returns the index of the token after it.
fn imports<'a>(
    tokens: &[Token<'a>],
    at: usize,
    root: &str,
    is_exported: bool,
    paths: &mut Vec<Path<'a>>,
) -> usize {
    let start = at + usize::from(is_at(tokens, at, &["::"]));
    if start >= tokens.len() {
        return start;
    }
    let mut found = Vec::new();
    let end = expand(tokens, start, &mut Vec::new(), &mut found);
    for mut path in found {
        path.is_rebound |= is_exported;
        if path.segments.first() == Some(&root) {
            paths.push(path);
        }
    }
    end
}

/// Adds the paths of the tree that starts at `at`; returns the index of the token after it.
fn expand<'a>(
    tokens: &[Token<'a>],
    mut at: usize,
    segments: &mut Vec<&'a str>,
    paths: &mut Vec<Path<'a>>,
) -> usize {
    let depth = segments.len();
    let line = tokens[at].line;
    loop {
        if is_at(tokens, at, &["{"]) {
            let end = closing(tokens, at);
            at += 1;
            while at < end {
                at = expand(tokens, at, segments, paths);
                // Skip the comma, or `as name`.
                while at < end && tokens[at].text != "," {
                    at += 1;
                }
                at += 1;
            }
            at = end + 1;
            break;
        }
        let is_segment = tokens
            .get(at)
            .is_some_and(|token| token.is_name() || token.text == "*");
        if is_segment {
            segments.push(tokens[at].text);
            at += 1;
        }
        if !is_segment || !is_at(tokens, at, &["::"]) {
            paths.push(Path {
                segments: segments.clone(),
                line,
                is_rebound: is_at(tokens, at, &["as"]),
            });
            break;
        }
        at += 1;
    }
    segments.truncate(depth);
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        tokens(source).iter().map(|token| token.text).collect()
    }

    #[test]
    fn comments_literals_and_lifetimes_hide_names() {
        let source = concat!(
            "// sqlx::a\n/* sqlx /* nested */ sqlx */ let a = \"sqlx \\\" sqlx\";\n",
            "let b = r#\"sqlx \" sqlx\"#; let c = b'\\''; let d: &'sqlx str = 'x'.into(); let r#e = br\"sqlx\";"
        );
        assert!(!texts(source).contains(&"sqlx"));
        assert_eq!(
            texts("a::b('\"', \"::\") // c"),
            ["a", "::", "b", "(", "\"\"", ",", "\"\"", ")"]
        );
    }

    #[test]
    fn a_token_has_its_lines() {
        let tokens = tokens("a\n\"b\nc\"\n/* d\n */ e");
        let lines: Vec<_> = tokens
            .iter()
            .map(|token| (token.line, token.last_line))
            .collect();
        assert_eq!(lines, [(1, 1), (2, 3), (5, 5)]);
    }

    #[test]
    fn test_items_are_left_out() {
        let source = concat!(
            "use a; #[cfg(test)] #[path = \"x.rs\"] mod outline; #[cfg(test)] mod tests { fn b() { c } }\n",
            "struct D { #[cfg(test)] e: F<G>, h: I }\n",
            "#[cfg(test)] fn j<K, L>(m: [u8; 2]) -> N { o } fn p() {}"
        );
        let tokens = tokens(source);
        let (kept, modules) = without_tests(&tokens);
        let names: Vec<_> = kept
            .iter()
            .filter(|token| token.is_name())
            .map(|token| token.text)
            .collect();
        assert_eq!(names, ["use", "a", "struct", "D", "h", "I", "fn", "p"]);
        assert_eq!(modules, ["outline"]);
    }

    #[test]
    fn use_trees_are_expanded() {
        let tokens =
            tokens("use a::{b::{C, d::E as F}, g::*, self};\nx.a::<y>(); z::a::b(); a::h::<I>()");
        let found: Vec<_> = paths(&tokens, "a")
            .into_iter()
            .map(|path| (path.segments.join("::"), path.line))
            .collect();
        let expected =
            ["a::b::C", "a::b::d::E", "a::g::*", "a::self"].map(|path| (path.to_owned(), 1));
        assert_eq!(found[..4], expected);
        assert_eq!(found[4..], [("a::h".to_owned(), 2)]);
    }

    #[test]
    fn imports_are_found_in_every_form() {
        let source = "use a as b; use a::{self as c, d}; use {x, a as e}; use ::a::f; pub use a;\n\
             pub(crate) use a::g; extern crate a as h; return ::a::i(); x::a::j(); y as ::a::K;\n\
             let l = a as u64; f(a::m as u64)";
        let tokens = tokens(source);
        let found: Vec<_> = paths(&tokens, "a")
            .into_iter()
            .map(|path| (path.segments.join("::"), path.is_rebound))
            .collect();
        let expected = [
            ("a", true),
            ("a::self", true),
            ("a::d", false),
            ("a", true),
            ("a::f", false),
            ("a", true),
            ("a::g", true),
            ("a", true),
            ("a::i", false),
            ("a::K", false),
            ("a::m", true),
        ];
        let expected = expected.map(|(path, is_rebound)| (path.to_owned(), is_rebound));
        assert_eq!(found, expected);
    }
}
