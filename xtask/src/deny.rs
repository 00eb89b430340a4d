//! Checks licences, banned crates, sources and known vulnerabilities of all dependencies against
//! `deny.toml`. The pinned tool is installed once in `tools` of the target directory. The advisory
//! database is a repository on another host: if it is unreachable, the check prints that it was
//! skipped.

use crate::shell;

/// Pinned version; the workspace's compiler builds it.
const VERSION: &str = "0.20.2";

const DATABASE: &str = "https://github.com/rustsec/advisory-db";

/// Installs cargo-deny if it is missing or of another version, and runs its checks.
///
/// # Errors
/// The tool cannot be installed, or it reports a violation; with `advisories` also if the database
/// is unreachable.
pub fn run(advisories: bool) -> anyhow::Result<()> {
    let root = shell::root();
    let tools = shell::target()?.join("tools");
    let tool = tools.join("bin").join("cargo-deny");
    let tool = tool.to_string_lossy();
    let is_there = tools.join("bin").join("cargo-deny").is_file()
        && shell::output(&root, &tool, &["--version"])?.trim() == format!("cargo-deny {VERSION}");
    if !is_there {
        let (tools, package) = (tools.to_string_lossy(), format!("cargo-deny@{VERSION}"));
        let install = ["install", "--locked", "--debug", "--root", &*tools];
        shell::run(&root, "cargo", &[&install[..], &[&*package]].concat())?;
    }
    let mut check = vec!["--locked", "check", "licenses", "bans", "sources"];
    let is_reachable =
        || shell::run(&root, "git", &["ls-remote", "--quiet", DATABASE, "HEAD"]).is_ok();
    if advisories || is_reachable() {
        check.push("advisories");
    } else {
        println!("advisories: NOT checked, {DATABASE} cannot be reached");
    }
    shell::run(&root, &tool, &check)
}
