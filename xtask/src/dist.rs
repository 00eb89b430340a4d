//! The release archive: the stripped binary, shell completions, licence, README and changelog.

use std::path::Path;

use anyhow::Context;

use crate::shell;

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];
const FILES: [&str; 3] = ["README.md", "CHANGELOG.md", "LICENSE"];

/// Writes `target/dist/platform-<version>-<target>.tar.gz` and prints its path.
///
/// # Errors
/// The build fails, or `strip` or `tar` is missing.
pub fn run() -> anyhow::Result<()> {
    let root = shell::root();
    let built = shell::build_release("node", "platform")?;
    let name = format!(
        "platform-{}-{}-{}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        std::env::consts::OS
    );
    let dist = root.join("target/dist");
    let folder = dist.join(&name);
    let binary = folder.join("platform");
    fill(&root, &folder).with_context(|| format!("cannot fill {}", folder.display()))?;
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

fn fill(root: &Path, folder: &Path) -> std::io::Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    std::fs::create_dir_all(folder.join("completions"))?;
    for name in FILES {
        std::fs::copy(root.join(name), folder.join(name))?;
    }
    Ok(())
}
