//! The release archive: the stripped binary, shell completions, licence, README and changelog, the
//! files that they link to, and the crates of third parties with their licence texts.

mod third_party;

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, ensure};
use regex::Regex;

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
    let files = linked(&root, &FILES, &tracked(&root)?)?;
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
    let crates = third_party::document(&root)?;
    std::fs::write(folder.join("THIRD-PARTY.md"), crates)?;
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

/// The files of the git repository in `root`, relative to it.
///
/// # Errors
/// git is missing, or `root` is in no repository.
fn tracked(root: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    let list = shell::output(root, "git", &["ls-files", "-z"])?;
    let names = list.split_terminator('\0');
    Ok(names.map(PathBuf::from).collect())
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
/// `root`. A link to a folder is a link to each of its files in `tracked`.
///
/// # Errors
/// A link leads to no file in `tracked`, to a symlink, or out of `root`.
fn linked(
    root: &Path,
    documents: &[&str],
    tracked: &BTreeSet<PathBuf>,
) -> anyhow::Result<BTreeSet<PathBuf>> {
    let link = Regex::new(r"\]\(([^)\s#]+)[^)]*\)").context("pattern of links")?;
    let mut found = BTreeSet::new();
    let mut open = Vec::new();
    for document in documents {
        add(root, Path::new(document), tracked, &mut open)?;
    }
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
            add(root, &path, tracked, &mut open).with_context(place)?;
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

/// Adds the tracked file `path`, or each tracked file below the folder `path`.
fn add(
    root: &Path,
    path: &Path,
    tracked: &BTreeSet<PathBuf>,
    files: &mut Vec<PathBuf>,
) -> anyhow::Result<()> {
    let before = files.len();
    for file in tracked.iter().filter(|file| file.starts_with(path)) {
        let kind = std::fs::symlink_metadata(root.join(file))
            .with_context(|| format!("there is no {}", file.display()))?;
        ensure!(kind.is_file(), "{} is not a file", file.display());
        files.push(file.clone());
    }
    ensure!(
        files.len() > before,
        "the repository has no {}",
        path.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_the_readme_links_to_is_in_the_archive() {
        let root = shell::root();
        let files = linked(&root, &FILES, &tracked(&root).expect("a repository"));
        let files = files.expect("no link leads to nothing");
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
            // The binary contains the font.
            "service-kit/fonts/LICENSE",
            "proto/dfa/ledger/v1/ledger.proto",
        ] {
            assert!(files.contains(Path::new(file)), "no {file}: {files:?}");
        }
        let folder = tempfile::tempdir().expect("temporary folder");
        let archive = folder.path().join("archive");
        fill(&root, &files, &archive).expect("filled");
        let copied = linked(&archive, &FILES, &files).expect("every link works in the archive");
        assert_eq!(copied, files);
    }

    #[test]
    fn a_link_to_nothing_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |text: &str| std::fs::write(folder.path().join("a.md"), text).expect("written");
        let tracked = BTreeSet::from([PathBuf::from("a.md")]);
        write("[here](#a) [web](https://example.org/x) [self](a.md#b) ![picture](./a.md)");
        let found = linked(folder.path(), &["a.md"], &tracked).expect("all links work");
        assert_eq!(found, BTreeSet::from([PathBuf::from("a.md")]));
        for target in ["docs/none.md", "../a.md", "/a.md"] {
            write(&format!("[x]({target})"));
            let error = linked(folder.path(), &["a.md"], &tracked).expect_err(target);
            assert!(
                error
                    .to_string()
                    .contains(&format!("a.md: link to {target}"))
            );
        }
    }

    #[test]
    fn a_linked_folder_is_its_files_in_the_repository() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let root = folder.path();
        let git = |args: &[&str]| shell::run(root, "git", args).expect("git runs");
        git(&["init", "--quiet"]);
        std::fs::create_dir(root.join("docs")).expect("created");
        std::fs::write(root.join("a.md"), "[x](docs)").expect("written");
        for name in ["tracked.txt", "untracked.txt"] {
            std::fs::write(root.join("docs").join(name), name).expect("written");
        }
        git(&["add", "a.md", "docs/tracked.txt"]);
        let found = linked(root, &["a.md"], &tracked(root).expect("a repository"));
        let expected = ["a.md", "docs/tracked.txt"].map(PathBuf::from);
        assert_eq!(found.expect("all links work"), BTreeSet::from(expected));

        std::fs::write(root.join("a.md"), "[x](docs/untracked.txt)").expect("written");
        let found = linked(root, &["a.md"], &tracked(root).expect("a repository"));
        found.expect_err("a link to a file that is not in the repository");

        std::fs::write(root.join("a.md"), "[x](docs)").expect("written");
        std::os::unix::fs::symlink("/etc", root.join("docs/link")).expect("a symlink");
        git(&["add", "docs/link"]);
        let found = linked(root, &["a.md"], &tracked(root).expect("a repository"));
        let error = format!("{:#}", found.expect_err("a symlink"));
        assert!(error.contains("docs/link is not a file"), "{error}");
    }
}
