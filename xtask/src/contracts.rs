//! Checks that the committed Solidity artifacts match the committed sources.

use crate::shell;

pub fn run(write: bool) -> anyhow::Result<()> {
    let dir = shell::root().join("chain/contracts");
    shell::npm_tools(&dir)?;
    let mode = if write { "--write" } else { "--check" };
    shell::run(&dir, "node", &["compile.mjs", mode])
}
