//! The release archive: the stripped binary, shell completions, licence, README and changelog, the
//! files that they link to, and a table of the crates of third parties.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail};
use regex::Regex;
use serde_json::Value;

use crate::shell;

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];
const FILES: [&str; 3] = ["README.md", "CHANGELOG.md", "LICENSE"];
/// The package of the binary.
const PACKAGE: &str = "node";

/// Writes `dist/platform-<version>-<target>.tar.gz` in the target directory and prints its path.
///
/// # Errors
/// The build fails, a document links to a missing file, or `strip` or `tar` is missing.
pub fn run() -> anyhow::Result<()> {
    let root = shell::root();
    let files = linked(&root, &FILES)?;
    let built = shell::build_release(PACKAGE, "platform")?;
    let name = format!(
        "platform-{}-{}-{}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        std::env::consts::OS
    );
    let dist = shell::target()?.join("dist");
    let folder = dist.join(&name);
    let binary = folder.join("platform");
    fill(&root, &files, &folder).with_context(|| format!("cannot fill {}", folder.display()))?;
    std::fs::write(
        folder.join("THIRD-PARTY.md"),
        third_party(&metadata(&root)?)?,
    )?;
    std::fs::copy(built, &binary).context("the release binary")?;
    let path = binary.to_string_lossy();
    shell::run(&root, "strip", &[&path])?;
    for name in SHELLS {
        let script = shell::output(&root, &path, &["completions", name])?;
        std::fs::write(folder.join("completions").join(name), script)?;
    }
    let archive = format!("{name}.tar.gz");
    shell::run(
        &dist,
        "tar",
        &["--owner=0", "--group=0", "-czf", &archive, &name],
    )?;
    let bytes = std::fs::metadata(dist.join(&archive))?.len();
    println!("{} ({} MiB)", dist.join(&archive).display(), bytes >> 20);
    Ok(())
}

/// Copies `files` of `root` into a new folder.
fn fill(root: &Path, files: &BTreeSet<PathBuf>, folder: &Path) -> std::io::Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    std::fs::create_dir_all(folder.join("completions"))?;
    for name in files {
        let copy = folder.join(name);
        if let Some(parent) = copy.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::copy(root.join(name), copy)?;
    }
    Ok(())
}

/// `documents` and all files that they link to, directly or through other documents, relative to
/// `root`. A link to a folder is a link to each of its files.
///
/// # Errors
/// A link leads to nothing, or out of `root`.
fn linked(root: &Path, documents: &[&str]) -> anyhow::Result<BTreeSet<PathBuf>> {
    let link = Regex::new(r"\]\(([^)\s#]+)[^)]*\)").context("pattern of links")?;
    let mut found = BTreeSet::new();
    let mut open: Vec<PathBuf> = documents.iter().map(PathBuf::from).collect();
    while let Some(file) = open.pop() {
        if !found.insert(file.clone()) || file.extension().is_none_or(|ext| ext != "md") {
            continue;
        }
        let text = std::fs::read_to_string(root.join(&file))
            .with_context(|| format!("cannot read {}", file.display()))?;
        let folder = file.parent().unwrap_or(Path::new(""));
        for capture in link.captures_iter(&text) {
            let target = &capture[1];
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let place = || format!("{}: link to {target}", file.display());
            let path = normal(&folder.join(target)).with_context(place)?;
            add(root, path, &mut open).with_context(place)?;
        }
    }
    Ok(found)
}

/// `path` without `.` and `..`; `None` if it leads out of its root.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => normal.push(name),
            Component::CurDir => {}
            Component::ParentDir => normal.pop().then_some(())?,
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

/// Adds the file `path`, or each file below the folder `path`.
fn add(root: &Path, path: PathBuf, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let full = root.join(&path);
    if full.is_dir() {
        for entry in std::fs::read_dir(full)? {
            add(root, path.join(entry?.file_name()), files)?;
        }
    } else if full.is_file() {
        files.push(path);
    } else {
        bail!("there is no {}", path.display());
    }
    Ok(())
}

/// Packages and resolved dependencies of the workspace on this platform.
fn metadata(root: &Path) -> anyhow::Result<Value> {
    let host = shell::host(root)?;
    let args = ["metadata", "--locked", "--format-version", "1"];
    let args = [&args[..], &["--filter-platform", &host]].concat();
    serde_json::from_str(&shell::output(root, "cargo", &args)?).context("cargo metadata")
}

/// A table of the crates of third parties that the binary is built from: name, version, licence and
/// repository. Crates that only tests or build scripts use are left out.
///
/// # Errors
/// `metadata` is not that of this workspace.
fn third_party(metadata: &Value) -> anyhow::Result<String> {
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
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        let node = nodes.get(id).with_context(|| format!("no node {id}"))?;
        let dependencies = node["deps"].as_array().into_iter().flatten();
        let normal = dependencies.filter(|dependency| {
            let kinds = dependency["dep_kinds"].as_array();
            kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
        });
        open.extend(normal.filter_map(|dependency| dependency["pkg"].as_str()));
    }
    let text = |package: &Value, name: &str| package[name].as_str().unwrap_or("-").to_owned();
    let rows = seen.into_iter().filter_map(|id| packages.get(id));
    let rows = rows.filter(|package| !is_ours(package)).map(|package| {
        let licence = match package["license"].is_null() {
            true => text(package, "license_file"),
            false => text(package, "license"),
        };
        let [name, version, repository] =
            ["name", "version", "repository"].map(|name| text(package, name));
        format!("| {name} | {version} | {licence} | {repository} |\n")
    });
    let mut rows: Vec<String> = rows.collect();
    rows.sort();
    let head = "| crate | version | licence | repository |\n|---|---|---|---|\n";
    Ok(format!(
        "# Crates of third parties in this binary\n\n{head}{}",
        rows.concat()
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_file_that_the_readme_links_to_is_in_the_archive() {
        let root = shell::root();
        let files = linked(&root, &FILES).expect("no link leads to nothing");
        for file in [
            "README.md",
            "CHANGELOG.md",
            "LICENSE",
            "ARCHITECTURE.md",
            "docs/protocol.md",
            "docs/attacks.md",
            "docs/journal.md",
            "docs/measurements/matching.md",
            "benches/README.md",
            "benches/plots/single.svg",
            "proto/dfa/ledger/v1/ledger.proto",
        ] {
            assert!(files.contains(Path::new(file)), "no {file}: {files:?}");
        }
        let folder = tempfile::tempdir().expect("temporary folder");
        let archive = folder.path().join("archive");
        fill(&root, &files, &archive).expect("filled");
        let copied = linked(&archive, &FILES).expect("every link works in the archive");
        assert_eq!(copied, files);
    }

    #[test]
    fn a_link_to_nothing_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |text: &str| std::fs::write(folder.path().join("a.md"), text).expect("written");
        write("[here](#a) [web](https://example.org/x) [self](a.md#b) ![picture](./a.md)");
        let found = linked(folder.path(), &["a.md"]).expect("all links work");
        assert_eq!(found, BTreeSet::from([PathBuf::from("a.md")]));
        for target in ["docs/none.md", "../a.md", "/a.md"] {
            write(&format!("[x]({target})"));
            let error = linked(folder.path(), &["a.md"]).expect_err(target);
            assert!(
                error
                    .to_string()
                    .contains(&format!("a.md: link to {target}"))
            );
        }
    }

    #[test]
    fn the_table_of_crates_has_what_the_binary_is_built_from() {
        let package = |id: &str, licence: Value| {
            json!({
                "id": id, "name": id, "version": "1.0.0", "license": licence, "license_file": "LICENSE.txt",
                "source": "registry", "repository": format!("https://example.org/{id}"),
            })
        };
        let ours = |id: &str| json!({ "id": id, "name": id, "version": "0.1.0", "source": null });
        let on = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [
                ours("node"), ours("types"), package("b", json!("MIT")), package("a", Value::Null),
                package("test", json!("MIT")), package("script", json!("MIT")),
            ],
            "resolve": { "nodes": [
                { "id": "node", "deps": [on("types", Value::Null), on("test", json!("dev"))] },
                { "id": "types", "deps": [on("b", Value::Null), on("script", json!("build"))] },
                { "id": "b", "deps": [on("a", Value::Null)] },
                { "id": "a", "deps": [] },
            ] },
        });
        let table = third_party(&metadata).expect("a table");
        let rows: Vec<&str> = table
            .lines()
            .filter(|line| line.contains("1.0.0"))
            .collect();
        assert_eq!(
            rows,
            [
                "| a | 1.0.0 | LICENSE.txt | https://example.org/a |",
                "| b | 1.0.0 | MIT | https://example.org/b |",
            ]
        );
        assert!(third_party(&json!({})).is_err());
    }
}
