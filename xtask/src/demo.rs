//! The README's commands on a release build: its first command, the demonstration, and the tests of
//! both against the same binary.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::shell;

/// Limit of a start, and of a clean stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// `PLATFORM_LISTEN__*` of the platform's listeners.
const LISTENERS: [&str; 10] = [
    "ALL",
    "LEDGER",
    "CFA",
    "PAYMENTS",
    "MARKET",
    "IDENTITY",
    "BANK",
    "CHAIN",
    "CHAIN_RPC",
    "TRADING",
];

/// Tests of `tests/tests/lifecycle.rs`: start with all doubles, demonstration, README.
const TESTS: [&str; 3] = ["r349_", "r350_", "the_commands_of_the_readme_work"];

/// Builds with `cargo run`'s packages and features, runs the README's first command until it is
/// ready, the demonstration in a process of its own, and the tests.
///
/// # Errors
/// The build, a start, a stop, the demonstration or a test fails.
pub fn run() -> anyhow::Result<()> {
    let root = shell::root();
    // The default member alone.
    shell::run(&root, "cargo", &["build", "--release", "--locked"])?;
    println!("demo: cargo run --release");
    let folder = shell::target(&root).join("demo");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("remains of an earlier run")?;
    }
    let mut first = shell::command("cargo");
    first
        .args(["run", "--release", "--locked", "--", "--json", "run"])
        .arg("--data-dir")
        .arg(&folder)
        .current_dir(&root);
    for listener in LISTENERS {
        // Free ports: the machine may use the default ones.
        first.env(format!("PLATFORM_LISTEN__{listener}"), "127.0.0.1:0");
    }
    start_and_stop(first, "INT")?;
    std::fs::remove_dir_all(&folder).context("the data folder")?;
    println!("demo: cargo run --release -- demo");
    let demo = ["run", "--release", "--locked", "--", "demo"];
    shell::run(&root, "cargo", &demo)?;
    let binary = shell::target(&root).join("release/platform");
    let binary = binary.to_string_lossy();
    // The tests keep the artifacts of `cargo test --workspace`.
    let test = ["test", "--workspace", "--test", "lifecycle", "--"];
    let test = [&test[..], &TESTS[..]].concat();
    shell::run_with(&root, "cargo", &test, &[("PLATFORM_BIN", &*binary)])
}

/// Starts a program, waits for its ready line, sends it the signal and expects exit code 0.
///
/// # Errors
/// It does not become ready, or does not stop cleanly, in time.
fn start_and_stop(mut program: Command, signal: &str) -> anyhow::Result<()> {
    let mut child = program
        .stdout(Stdio::piped())
        .spawn()
        .context("the program does not start")?;
    let stopped = (|| {
        ready(&mut child)?;
        // `cargo run` has become the program.
        let pid = child.id().to_string();
        shell::run(&shell::root(), "kill", &["-s", signal, &pid])?;
        let status = ended(&mut child)?;
        ensure!(status.success(), "the program ended with {status}");
        Ok(())
    })();
    if stopped.is_err() {
        // It may have ended.
        let _ = child.kill();
        let _ = child.wait();
    }
    stopped
}

/// Waits for the ready line.
fn ready(child: &mut Child) -> anyhow::Result<()> {
    let output = BufReader::new(child.stdout.take().context("no output")?);
    let (tell, told) = mpsc::sync_channel(1);
    // Reads to the end: later output must not fill the pipe.
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if is_ready(&line) {
                let _ = tell.try_send(());
            }
        }
    });
    match told.recv_timeout(PATIENCE) {
        Ok(()) => Ok(()),
        Err(mpsc::RecvTimeoutError::Timeout) => bail!("not ready within {PATIENCE:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            bail!("the program ended before it was ready")
        }
    }
}

fn is_ready(line: &str) -> bool {
    let line = serde_json::from_str::<serde_json::Value>(line);
    line.is_ok_and(|line| line["ready"] == serde_json::Value::Bool(true))
}

fn ended(child: &mut Child) -> anyhow::Result<ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        ensure!(Instant::now() < deadline, "not stopped within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell_of(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell
    }

    #[test]
    fn a_ready_program_is_stopped_and_must_end_with_zero() {
        // A shell that inherits SIGINT as ignored cannot trap it.
        let waits = "while :; do sleep 0.05; done";
        let ready = r#"echo starting; echo '{"ready":true}'"#;
        let stopped = |code: u8| {
            let script = format!("trap 'exit {code}' TERM; {ready}; {waits}");
            start_and_stop(shell_of(&script), "TERM")
        };
        stopped(0).expect("a clean stop");
        let error = stopped(3).expect_err("an unclean stop");
        assert!(error.to_string().contains("ended with"), "{error}");
    }

    #[test]
    fn a_program_that_is_never_ready_is_an_error() {
        let never = shell_of(r#"echo '{"ready":false}'"#);
        let error = start_and_stop(never, "TERM").expect_err("not ready");
        assert!(error.to_string().contains("before it was ready"), "{error}");
    }
}
