//! Runs other programs. Their output goes to the terminal; the error of a failed program names the
//! command.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, bail};
use serde_json::Value;

/// Root of the workspace, independent of the current directory.
///
/// The environment variable takes precedence over the folder of the build: checkouts that share a
/// target directory share this binary.
pub fn root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR");
    package
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from)
        .parent()
        .expect("xtask is one folder below the workspace root")
        .to_path_buf()
}

/// Cargo's target directory for this workspace, as environment and configuration select it. It is
/// read once.
///
/// # Errors
/// `cargo metadata` fails.
pub fn target() -> anyhow::Result<PathBuf> {
    static TARGET: OnceLock<PathBuf> = OnceLock::new();
    if let Some(target) = TARGET.get() {
        return Ok(target.clone());
    }
    let target = target_by(&mut command("cargo"))?;
    Ok(TARGET.get_or_init(|| target).clone())
}

fn target_by(cargo: &mut Command) -> anyhow::Result<PathBuf> {
    let output = cargo
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot start `cargo metadata`")?;
    if !output.status.success() {
        bail!("`cargo metadata` ended with {}", output.status);
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let target = metadata["target_directory"].as_str();
    Ok(target
        .context("cargo metadata has no target directory")?
        .into())
}

/// Host triple of the compiler.
///
/// # Errors
/// `rustc` does not run, or prints no host.
pub fn host(root: &Path) -> anyhow::Result<String> {
    let version = output(root, "rustc", &["--version", "--verbose"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc prints no host triple")?.to_owned())
}

/// A command without the variables that `cargo run` sets for xtask's own package. Build scripts
/// that read these variables would run again, and their dependents would be rebuilt.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs `program` in `dir`; an exit code other than 0 is an error that names the command.
pub fn run(dir: &Path, program: &str, args: &[&str]) -> anyhow::Result<()> {
    run_with(dir, program, args, &[])
}

/// Builds a binary of a package for release, and returns its path.
///
/// # Errors
/// The build fails.
pub fn build_release(package: &str, binary: &str) -> anyhow::Result<PathBuf> {
    let root = root();
    let args = [
        "build",
        "--release",
        "--locked",
        "--package",
        package,
        "--bin",
        binary,
    ];
    run(&root, "cargo", &args)?;
    Ok(target()?.join("release").join(binary))
}

/// Installs a folder's npm tools if they are missing: with `npm ci` if the folder has a lock file,
/// otherwise with `npm install`.
pub fn npm_tools(dir: &Path) -> anyhow::Result<()> {
    if !dir.join("node_modules").is_dir() {
        let how = if dir.join("package-lock.json").is_file() {
            "ci"
        } else {
            "install"
        };
        run(dir, "npm", &[how, "--silent"])?;
    }
    Ok(())
}

/// As [`run`], with further environment variables.
pub fn run_with(
    dir: &Path,
    program: &str,
    args: &[&str],
    environment: &[(&str, &str)],
) -> anyhow::Result<()> {
    let status = command(program)
        .args(args)
        .envs(environment.iter().copied())
        .current_dir(dir)
        .status()
        .with_context(|| format!("cannot start `{program}`"))?;
    if !status.success() {
        bail!("`{program} {}` ended with {status}", args.join(" "));
    }
    Ok(())
}

/// Runs `program` and returns its standard output.
pub fn output(dir: &Path, program: &str, args: &[&str]) -> anyhow::Result<String> {
    output_with(dir, program, args, &[])
}

/// As [`output`], with further environment variables.
pub fn output_with(
    dir: &Path,
    program: &str,
    args: &[&str],
    environment: &[(&str, &str)],
) -> anyhow::Result<String> {
    let output = command(program)
        .args(args)
        .envs(environment.iter().copied())
        .current_dir(dir)
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{program}`"))?;
    if !output.status.success() {
        bail!(
            "`{program} {}` ended with {}",
            args.join(" "),
            output.status
        );
    }
    String::from_utf8(output.stdout).context("the output is not UTF-8")
}

/// Runs `program` and returns its standard output, regardless of the exit code.
pub fn stdout_of(dir: &Path, program: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = command(program)
        .args(args)
        .current_dir(dir)
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{program}`"))?;
    String::from_utf8(output.stdout).context("the output is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_directory_is_the_one_that_cargo_uses() {
        let folder = tempfile::tempdir().expect("temporary folder");
        for name in ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"] {
            let mut cargo = command("cargo");
            cargo
                .env_remove("CARGO_TARGET_DIR")
                .env(name, folder.path());
            let target = target_by(&mut cargo).expect("a target directory");
            assert_eq!(target, folder.path(), "{name}");
        }
    }
}
