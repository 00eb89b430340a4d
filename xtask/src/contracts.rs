//! Checks that the committed Solidity artifacts match the committed sources, or rewrites them.

use crate::shell;

/// Recompiles the sources. Compares with the committed artifacts, or replaces them if `write`.
pub fn run(write: bool) -> anyhow::Result<()> {
    let dir = shell::root().join("chain/contracts");
    shell::npm_tools(&dir)?;
    let mode = if write { "--write" } else { "--check" };
    shell::run(&dir, "node", &["compile.mjs", mode])
}
