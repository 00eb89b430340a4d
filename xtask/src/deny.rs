//! Licences, banned crates, sources and known vulnerabilities of everything the workspace depends on,
//! as `deny.toml` says. The tool is installed once, pinned, under `target/tools`. The advisory
//! database is a repository on another host: without a way to it the check says that it was not made.

use crate::shell;

/// Built with the workspace's own compiler.
const VERSION: &str = "0.20.2";

const DATABASE: &str = "https://github.com/rustsec/advisory-db";

/// # Errors
/// The tool cannot be installed, or it finds something; with `advisories` also when the database cannot
/// be reached.
pub fn run(advisories: bool) -> anyhow::Result<()> {
    let root = shell::root();
    let tools = root.join("target").join("tools");
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
