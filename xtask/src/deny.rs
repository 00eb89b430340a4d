//! Licences, banned crates and sources of everything the workspace depends on, as `deny.toml` says.
//! The tool is installed once, pinned, under `target/tools`. The advisory database is a repository
//! of its own on another host: asked for by option.

use crate::shell;

/// Built with the workspace's own compiler.
const VERSION: &str = "0.20.2";

/// # Errors
/// The tool cannot be installed, or it finds something.
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
    if advisories {
        check.push("advisories");
    }
    shell::run(&root, &tool, &check)
}
