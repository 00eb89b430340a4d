//! Settings of the running platform, read from its process on this machine.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use serde_json::Value;

/// Held open by the platform that runs in the data folder.
const LOCK_FILE: &str = "platform.lock";

/// Settings in force.
#[derive(Debug)]
pub struct Settings {
    /// Assignment of front and engines to threads.
    pub layout: String,
    /// Lag of each journal follower at which new orders are refused (`trading.bounds`).
    pub lag_bounds: Value,
    /// Amount of an order that counts against the TRADING budget.
    pub trading_limit_basis: Value,
}

/// Settings of the platform that runs in this data folder.
///
/// # Errors
/// No process of this user runs there, or its configuration cannot be read.
pub fn of_platform(data_dir: &Path) -> anyhow::Result<Settings> {
    let process = process_with(&data_dir.join(LOCK_FILE))?;
    let config = config(&process)?;
    let value = |pointer: &str| config.pointer(pointer).cloned().unwrap_or_default();
    let layout = match (has_thread(&process, "front")?, value("/trading/layout")) {
        // The only layout in which the front has no thread of its own.
        (false, _) => "fused".to_owned(),
        (true, Value::String(configured)) => configured,
        (true, _) => "pinned".to_owned(),
    };
    Ok(Settings {
        layout,
        lag_bounds: value("/trading/bounds"),
        trading_limit_basis: value("/market/trading_limit_basis"),
    })
}

/// Folder in `/proc` of the process that has the file open.
fn process_with(file: &Path) -> anyhow::Result<PathBuf> {
    let name = || file.display().to_string();
    let file = file.canonicalize().with_context(name)?;
    for process in std::fs::read_dir("/proc")? {
        let process = process?.path();
        // Fails for what is no process, and for processes of other users.
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

/// Configuration in force: the process's own binary prints it, with the process's environment,
/// working folder and configuration file.
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
        .context("cannot run the platform's binary again")?;
    anyhow::ensure!(
        output.status.success(),
        "the platform's binary printed no configuration: {}",
        output.status
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// File after `--config` in a command line whose words end with a zero byte.
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
        // A thread may end meanwhile.
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
        process_with(file.path()).expect("this process");
        let folder = tempfile::tempdir().expect("a folder");
        let error = process_with(&folder.path().join(LOCK_FILE)).expect_err("no such file");
        assert!(error.to_string().contains(LOCK_FILE), "{error}");
    }
}
