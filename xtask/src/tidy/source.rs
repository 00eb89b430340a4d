//! A source file, and which of its code runs in production.

use std::collections::BTreeSet;

use super::TEST_CRATES;
use super::tokens::{self, Token};

pub struct Source {
    /// Relative to the workspace.
    pub path: String,
    pub text: String,
    /// True for a file below `src` of a crate that is no test module and no test crate.
    pub is_production: bool,
}

impl Source {
    pub fn new(path: String, text: String) -> Self {
        let mut parts = path.split('/');
        let is_production = parts
            .next()
            .is_some_and(|name| !TEST_CRATES.contains(&name))
            && parts.next() == Some("src");
        Self {
            path,
            text,
            is_production,
        }
    }

    /// The crate's folder, which is its name.
    pub fn crate_name(&self) -> &str {
        self.path.split('/').next().unwrap_or_default()
    }

    /// Names of the folders below `src`, then the file's name without `.rs`.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.path.trim_end_matches(".rs").split('/').skip(2)
    }

    /// Tokens outside `#[cfg(test)]` items; none in a file of tests.
    pub fn production_tokens(&self) -> Vec<Token<'_>> {
        if self.is_production {
            tokens::without_tests(&tokens::tokens(&self.text)).0
        } else {
            Vec::new()
        }
    }

    /// Files that may contain the module `name` declared in this file.
    fn files_of(&self, name: &str) -> [String; 2] {
        let (folder, file) = self.path.rsplit_once('/').unwrap_or(("", &self.path));
        let folder = match file {
            "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
            _ => self.path.trim_end_matches(".rs").to_owned(),
        };
        [
            format!("{folder}/{name}.rs"),
            format!("{folder}/{name}/mod.rs"),
        ]
    }
}

/// Excludes files declared by `#[cfg(test)] mod name;` from production.
pub fn mark_test_modules(sources: &mut [Source]) {
    let mut tests = BTreeSet::new();
    for source in sources.iter().filter(|source| source.is_production) {
        let all = tokens::tokens(&source.text);
        for name in tokens::without_tests(&all).1 {
            tests.extend(source.files_of(name));
        }
    }
    for source in sources {
        source.is_production &= !tests.contains(&source.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_files_are_not_production() {
        let source = |path: &str, text: &str| Source::new(path.to_owned(), text.to_owned());
        let mut sources = [
            source("ledger/src/lib.rs", "#[cfg(test)]\nmod tests;\nmod book;"),
            source("ledger/src/tests.rs", ""),
            source("ledger/src/book.rs", "#[cfg(test)] mod twin;"),
            source("ledger/src/book/twin.rs", ""),
            source("ledger/tests/boundary/main.rs", ""),
            source("benches/src/lib.rs", ""),
        ];
        mark_test_modules(&mut sources);
        let production = sources.map(|source| source.is_production);
        assert_eq!(production, [true, false, true, false, false, false]);
    }
}
