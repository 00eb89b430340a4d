//! Settings of the running platform, read by means of its process on this machine.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use serde_json::Value;

/// Lock file that the running platform has open in its data folder.
const LOCK_FILE: &str = "platform.lock";

/// Settings of the platform that are in force.
#[derive(Debug)]
pub struct Settings {
    /// Assignment of front, hot thread and engines to threads.
    pub layout: String,
    /// Section `trading`, as configured: among others the cores of hot thread and journal, and the
    /// lag of each journal follower at which new orders are refused (`bounds`).
    pub trading: Value,
    /// Value of `market.trading_limit_basis`: what counts against the TRADING budget.
    pub trading_limit_basis: Value,
}

/// Reads the settings of the platform that runs in this data folder.
///
/// # Errors
/// No process of this user runs there, or its configuration cannot be read.
pub fn of_platform(data_dir: &Path) -> anyhow::Result<Settings> {
    let process = process_with_open_file(&data_dir.join(LOCK_FILE))?;
    let config = config(&process)?;
    let value = |pointer: &str| config.pointer(pointer).cloned().unwrap_or_default();
    let layout = match (has_thread(&process, "front")?, value("/trading/layout")) {
        // Only in this layout the front has no thread of its own.
        (false, _) => "fused".to_owned(),
        (true, Value::String(configured)) => configured,
        (true, _) => "pinned".to_owned(),
    };
    Ok(Settings {
        layout,
        trading: value("/trading"),
        trading_limit_basis: value("/market/trading_limit_basis"),
    })
}

/// Returns the `/proc` folder of the process that has the file open.
fn process_with_open_file(file: &Path) -> anyhow::Result<PathBuf> {
    let name = || file.display().to_string();
    let file = file.canonicalize().with_context(name)?;
    for process in std::fs::read_dir("/proc")? {
        let process = process?.path();
        // Entries that are no process, and processes of other users, cannot be read.
        let Ok(descriptors) = std::fs::read_dir(process.join("fd")) else {
            continue;
        };
        let is_file = |path: PathBuf| std::fs::read_link(path).is_ok_and(|open| open == file);
        if descriptors.flatten().any(|entry| is_file(entry.path())) {
            return Ok(process);
        }
    }
    anyhow::bail!(
        "no process of this user has {} open: start the platform in that data folder",
        file.display()
    )
}

/// Reads the configuration of a process: runs its binary with its environment, working folder and
/// configuration file, and the command that prints the configuration.
fn config(process: &Path) -> anyhow::Result<Value> {
    let read = |name: &str| {
        let path = process.join(name);
        std::fs::read(&path).with_context(|| path.display().to_string())
    };
    let (environment, arguments) = (read("environ")?, read("cmdline")?);
    let mut command = Command::new(process.join("exe"));
    command.current_dir(process.join("cwd")).env_clear();
    for variable in environment.split(|byte| *byte == 0) {
        if let Some(at) = variable.iter().position(|byte| *byte == b'=') {
            let (name, value) = (&variable[..at], &variable[at + 1..]);
            command.env(OsStr::from_bytes(name), OsStr::from_bytes(value));
        }
    }
    if let Some(file) = config_file(&arguments) {
        command.arg("--config").arg(file);
    }
    let output = command
        .args(["--json", "config"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run the platform's binary to print its configuration")?;
    anyhow::ensure!(
        output.status.success(),
        "the platform's binary failed to print its configuration: {}",
        output.status
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Value of `--config` in a command line whose arguments end with a zero byte.
fn config_file(arguments: &[u8]) -> Option<&OsStr> {
    let mut words = arguments.split(|byte| *byte == 0);
    while let Some(word) = words.next() {
        if word == b"--config" {
            return words.next().map(OsStr::from_bytes);
        }
        if let Some(file) = word.strip_prefix(b"--config=") {
            return Some(OsStr::from_bytes(file));
        }
    }
    None
}

/// True if the process has a thread of this name.
fn has_thread(process: &Path, name: &str) -> anyhow::Result<bool> {
    for thread in std::fs::read_dir(process.join("task"))? {
        // The read fails if the thread has ended meanwhile.
        let found = std::fs::read_to_string(thread?.path().join("comm"));
        if found.is_ok_and(|found| found.trim() == name) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_file_is_found_in_both_forms() {
        let file = |line: &str| config_file(line.as_bytes()).map(OsStr::to_owned);
        let expected = |name: &str| Some(name.into());
        assert_eq!(file("platform\0--config\0a b\0run\0"), expected("a b"));
        assert_eq!(file("platform\0run\0--config=c\0"), expected("c"));
        assert_eq!(file("platform\0run\0--data-dir\0data\0"), None);
    }

    #[test]
    fn a_process_is_found_by_its_open_file() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        process_with_open_file(file.path()).expect("this process");
        let folder = tempfile::tempdir().expect("a folder");
        let error =
            process_with_open_file(&folder.path().join(LOCK_FILE)).expect_err("no such file");
        assert!(error.to_string().contains(LOCK_FILE), "{error}");
    }
}
