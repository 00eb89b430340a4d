//! `THIRD-PARTY.md`: a table of the crates of third parties, and their licence texts and notices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use super::PACKAGE;
use crate::shell;

const HEAD: &str = "# Crates of third parties that the build resolves

Cargo unifies the features of all packages of the workspace, so the table can contain crates that
the binary does not use. Crates that only tests or build scripts use are left out, and so are
procedural macros. The licence texts of the crates and of the sources that they bundle follow the
table. A crate that has no licence file is listed only in the table.

| crate | version | licence | repository |
|---|---|---|---|
";
/// Beginnings of the names of licence and notice files, in upper case.
const NAMES: [&str; 6] = [
    "LICENSE",
    "LICENCE",
    "COPYING",
    "COPYRIGHT",
    "NOTICE",
    "UNLICENSE",
];
/// Extensions of source files, for example of `license.rs`.
const SOURCES: [&str; 9] = ["rs", "c", "cc", "cpp", "h", "py", "sh", "js", "json"];
/// Levels of folders below the package's folder that are searched. `ring` and `libmimalloc-sys`
/// have licences at the third.
const DEPTH: usize = 3;
/// Longer than any fence in a licence text.
const FENCE: &str = "~~~~~~~~";

/// Packages and resolved dependencies of the workspace on this platform.
fn metadata(root: &Path) -> anyhow::Result<Value> {
    let host = shell::host(root)?;
    let args = ["metadata", "--locked", "--format-version", "1"];
    let args = [&args[..], &["--filter-platform", &host]].concat();
    serde_json::from_str(&shell::output(root, "cargo", &args)?).context("cargo metadata")
}

/// The document for the workspace in `root`.
///
/// # Errors
/// `cargo metadata` fails, or a licence file cannot be read.
pub fn document(root: &Path) -> anyhow::Result<String> {
    document_of(&metadata(root)?)
}

fn document_of(metadata: &Value) -> anyhow::Result<String> {
    let packages = resolved(metadata)?;
    let mut rows: Vec<String> = packages.iter().map(|package| row(package)).collect();
    rows.sort();
    let texts = texts(&packages)?;
    Ok(format!(
        "{HEAD}{}\n## Licence texts\n{texts}",
        rows.concat()
    ))
}

/// The packages of third parties that the binary depends on, without procedural macros and what
/// only they use.
///
/// # Errors
/// `metadata` is not that of this workspace.
fn resolved(metadata: &Value) -> anyhow::Result<Vec<&Value>> {
    let by_id = |list: &'static str| {
        let list = metadata.pointer(list).and_then(Value::as_array);
        let list = list.into_iter().flatten();
        list.filter_map(|one| Some((one["id"].as_str()?, one)))
            .collect::<BTreeMap<&str, &Value>>()
    };
    let (packages, nodes) = (by_id("/packages"), by_id("/resolve/nodes"));
    let is_ours = |package: &Value| package["source"].is_null();
    let binary = packages
        .iter()
        .find(|(_, package)| is_ours(package) && package["name"] == PACKAGE)
        .with_context(|| format!("cargo metadata has no package {PACKAGE}"))?;
    let (mut seen, mut open) = (BTreeSet::new(), vec![*binary.0]);
    let mut found = Vec::new();
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        let package = packages
            .get(id)
            .with_context(|| format!("no package {id}"))?;
        if is_macro(package) {
            continue;
        }
        if !is_ours(package) {
            found.push(*package);
        }
        let node = nodes.get(id).with_context(|| format!("no node {id}"))?;
        let dependencies = node["deps"].as_array().into_iter().flatten();
        let normal = dependencies.filter(|dependency| {
            let kinds = dependency["dep_kinds"].as_array();
            kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
        });
        open.extend(normal.filter_map(|dependency| dependency["pkg"].as_str()));
    }
    Ok(found)
}

/// Whether the package's library is a procedural macro. Cargo allows one library per package, so
/// its other targets are tests, examples and build scripts.
fn is_macro(package: &Value) -> bool {
    let targets = package["targets"].as_array().into_iter().flatten();
    let mut kinds = targets.flat_map(|target| target["kind"].as_array().into_iter().flatten());
    kinds.any(|kind| kind == "proc-macro")
}

fn text<'a>(package: &'a Value, name: &str) -> &'a str {
    package[name].as_str().unwrap_or("-")
}

fn row(package: &Value) -> String {
    let licence = match package["license"].is_null() {
        true => text(package, "license_file"),
        false => text(package, "license"),
    };
    let [name, version, repository] =
        ["name", "version", "repository"].map(|name| text(package, name));
    format!("| {name} | {version} | {licence} | {repository} |\n")
}

/// Each licence text once, after the list of the packages that have it. A package is followed by
/// the folder of the bundled source, if the file is not in the package's own folder.
///
/// # Errors
/// A package has no folder, or a file cannot be read.
fn texts(packages: &[&Value]) -> anyhow::Result<String> {
    let mut by_text: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages {
        let (name, version) = (text(package, "name"), text(package, "version"));
        let manifest = Path::new(text(package, "manifest_path"));
        let folder = manifest
            .parent()
            .with_context(|| format!("{name} has no folder"))?;
        let mut files = Vec::new();
        licence_files(folder, DEPTH, &mut files)
            .with_context(|| format!("cannot list the licences in {}", folder.display()))?;
        let named = package["license_file"].as_str();
        let named = named.map(|file| folder.join(file));
        files.extend(named.filter(|file| file.is_file()));
        for file in files {
            let bytes =
                std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let parent = file.strip_prefix(folder).ok().and_then(Path::parent);
            let label = match parent.filter(|parent| *parent != Path::new("")) {
                Some(parent) => format!("{name} {version} ({})", parent.display()),
                None => format!("{name} {version}"),
            };
            let text = normal(&String::from_utf8_lossy(&bytes));
            by_text.entry(text).or_default().insert(label);
        }
    }
    let mut sections: Vec<String> = by_text
        .iter()
        .map(|(text, labels)| {
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            format!("\n{}:\n\n{FENCE}text\n{text}\n{FENCE}\n", labels.join(", "))
        })
        .collect();
    sections.sort();
    Ok(sections.concat())
}

/// The text without the differences in white space at the ends of lines and of the file.
fn normal(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned()
}

/// Adds the licence and notice files of `folder` and of `depth` levels of folders below it.
/// Symlinks are not followed.
fn licence_files(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() && depth > 0 {
            licence_files(&path, depth - 1, files)?;
        } else if kind.is_file() && is_licence(&path) {
            files.push(path);
        }
    }
    Ok(())
}

/// Whether the file is a licence or notice by its name, or is in a folder `LICENSES`.
fn is_licence(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_ascii_uppercase();
    let folder = path.parent().and_then(Path::file_name).unwrap_or_default();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    (folder == "LICENSES" || NAMES.iter().any(|beginning| name.starts_with(beginning)))
        && !SOURCES.contains(&&*extension.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Metadata of a package of a third party in `folder`; `kind` is that of its library.
    fn package(folder: &Path, id: &str, kind: &str, licence: Value) -> Value {
        let manifest = folder.join(id).join("Cargo.toml");
        std::fs::create_dir_all(folder.join(id)).expect("a folder");
        json!({
            "id": id, "name": id, "version": "1.0.0", "license": licence, "license_file": "terms.txt",
            "source": "registry", "repository": format!("https://example.org/{id}"),
            "manifest_path": manifest,
            "targets": [{ "kind": [kind] }, { "kind": ["custom-build"] }, { "kind": ["test"] }],
        })
    }

    /// The binary depends on `a`, `b` and the macro `derive`, which depends on `quote`.
    fn workspace(folder: &Path) -> Value {
        let ours = |id: &str| json!({ "id": id, "name": id, "version": "0.1.0", "source": null });
        let on = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let theirs = |id: &str, licence: Value| package(folder, id, "lib", licence);
        json!({
            "packages": [
                ours("node"), ours("types"), theirs("b", json!("MIT")), theirs("a", Value::Null),
                theirs("test", json!("MIT")), theirs("script", json!("MIT")),
                package(folder, "derive", "proc-macro", json!("MIT")), theirs("quote", json!("MIT")),
            ],
            "resolve": { "nodes": [
                { "id": "node", "deps": [on("types", Value::Null), on("test", json!("dev"))] },
                { "id": "types", "deps": [on("b", Value::Null), on("script", json!("build"))] },
                { "id": "b", "deps": [on("a", Value::Null), on("derive", Value::Null)] },
                { "id": "a", "deps": [] },
                { "id": "derive", "deps": [on("quote", Value::Null)] },
                { "id": "quote", "deps": [] },
            ] },
        })
    }

    #[test]
    fn the_table_of_crates_has_what_the_binary_is_built_from() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let document = document_of(&workspace(folder.path())).expect("a document");
        let rows: Vec<&str> = document
            .lines()
            .filter(|line| line.contains("1.0.0"))
            .collect();
        assert_eq!(
            rows,
            [
                "| a | 1.0.0 | terms.txt | https://example.org/a |",
                "| b | 1.0.0 | MIT | https://example.org/b |",
            ]
        );
        assert!(document_of(&json!({})).is_err());
    }

    #[test]
    fn each_licence_text_is_there_once_after_the_packages_that_have_it() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let metadata = workspace(folder.path());
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
            std::fs::write(path, text).expect("written");
        };
        write("a/terms.txt", "terms of a\n");
        write("a/LICENSE-MIT", "shared\r\nlines\r\n");
        write("b/license-mit", "\nshared\nlines");
        write("b/c/NOTICE", "notice of c");
        write("b/c/src/lib/COPYING.md", "copying of lib");
        write("b/c/src/lib/deep/LICENSE", "too deep");
        write("b/src/license.rs", "source");
        write("b/LICENSES/MIT.txt", "text of MIT");
        write("derive/LICENSE", "of a macro");
        write("outside/LICENSE", "outside");
        let outside = folder.path().join("outside");
        std::os::unix::fs::symlink(&outside, folder.path().join("b/linked")).expect("a link");
        std::os::unix::fs::symlink(outside.join("LICENSE"), folder.path().join("b/LICENSE"))
            .expect("a link");
        let document = document_of(&metadata).expect("a document");
        let (_, texts) = document.split_once("## Licence texts\n").expect("texts");
        let section =
            |labels: &str, text: &str| format!("\n{labels}:\n\n{FENCE}text\n{text}\n{FENCE}\n");
        let mut expected = [
            section("a 1.0.0", "terms of a"),
            section("a 1.0.0, b 1.0.0", "shared\nlines"),
            section("b 1.0.0 (LICENSES)", "text of MIT"),
            section("b 1.0.0 (c)", "notice of c"),
            section("b 1.0.0 (c/src/lib)", "copying of lib"),
        ];
        expected.sort();
        assert_eq!(texts, expected.concat());
    }

    #[test]
    fn the_document_of_this_workspace_has_the_crates_of_the_binary_and_their_notices() {
        let document = document(&shell::root()).expect("a document");
        let has = |name: &str| document.contains(&format!("\n| {name} | "));
        for name in ["tokio", "rdkafka-sys", "libsqlite3-sys", "ring"] {
            assert!(has(name), "no {name}");
        }
        // Dependencies of tests and benchmarks, a procedural macro, a crate of build scripts.
        for name in [
            "stats_alloc",
            "criterion",
            "tokio-macros",
            "tonic-prost-build",
            "node",
        ] {
            assert!(!has(name), "{name}");
        }
        // Of tokio, of librdkafka and of the parts of ring from BoringSSL.
        for label in ["\ntokio 1.", " (librdkafka):\n", "\nring 0."] {
            assert!(document.contains(label), "no {label:?}");
        }
        assert!(document.contains("Magnus Edenhill"));
    }
}
