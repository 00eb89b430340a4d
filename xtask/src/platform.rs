//! A platform as a child process of a task.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::shell;

/// Time limit of a start and of a clean stop.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Suffixes of the `PLATFORM_LISTEN__*` variables.
const LISTENERS: [&str; 11] = [
    "ALL",
    "LEDGER",
    "CFA",
    "PAYMENTS",
    "MARKET",
    "IDENTITY",
    "APPROVALS",
    "BANK",
    "CHAIN",
    "CHAIN_RPC",
    "TRADING",
];

/// Sets every listener to a free port: the default ports may be in use.
pub fn on_free_ports(program: &mut Command) {
    for listener in LISTENERS {
        program.env(format!("PLATFORM_LISTEN__{listener}"), "127.0.0.1:0");
    }
}

/// A started program. Dropping the value kills it.
pub struct Running {
    child: Child,
    /// The ready line.
    pub ready: Value,
}

impl Running {
    /// Starts a program and waits for its ready line.
    ///
    /// # Errors
    /// The program does not become ready in time.
    pub fn start(mut program: Command) -> anyhow::Result<Self> {
        let child = program.stdout(Stdio::piped()).spawn();
        let mut running = Self {
            child: child.context("the program does not start")?,
            ready: Value::Null,
        };
        running.ready = ready(&mut running.child)?;
        Ok(running)
    }

    /// Sends the signal to the program and expects exit code 0.
    ///
    /// # Errors
    /// The program does not stop in time, or ends with another exit code.
    pub fn stop(mut self, signal: &str) -> anyhow::Result<()> {
        // `cargo run` has replaced itself with the program (exec), so the id is the program's.
        let pid = self.child.id().to_string();
        shell::run(&shell::root(), "kill", &["-s", signal, &pid])?;
        let status = ended(&mut self.child)?;
        ensure!(status.success(), "the program ended with {status}");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for the ready line.
fn ready(child: &mut Child) -> anyhow::Result<Value> {
    let output = BufReader::new(child.stdout.take().context("no output")?);
    let (sender, receiver) = mpsc::sync_channel(1);
    // The thread reads to the end, so later output does not fill the pipe.
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if let Some(line) = ready_line(&line) {
                let _ = sender.try_send(line);
            }
        }
    });
    match receiver.recv_timeout(TIMEOUT) {
        Ok(line) => Ok(line),
        Err(mpsc::RecvTimeoutError::Timeout) => bail!("not ready within {TIMEOUT:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            bail!("the program ended before it was ready")
        }
    }
}

fn ready_line(line: &str) -> Option<Value> {
    let line: Value = serde_json::from_str(line).ok()?;
    (line["ready"] == Value::Bool(true)).then_some(line)
}

fn ended(child: &mut Child) -> anyhow::Result<ExitStatus> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        ensure!(Instant::now() < deadline, "not stopped within {TIMEOUT:?}");
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
        let ready = r#"echo starting; echo '{"ready":true,"listen":"x"}'"#;
        let started = |code: u8| {
            let script = format!("trap 'exit {code}' TERM; {ready}; {waits}");
            Running::start(shell_of(&script)).expect("ready")
        };
        let running = started(0);
        assert_eq!(running.ready["listen"], "x");
        running.stop("TERM").expect("a clean stop");
        let error = started(3).stop("TERM").expect_err("an unclean stop");
        assert!(error.to_string().contains("ended with"), "{error}");
    }

    #[test]
    fn a_program_that_is_never_ready_is_an_error() {
        let never = shell_of(r#"echo '{"ready":false}'"#);
        let error = Running::start(never).map(drop).expect_err("not ready");
        assert!(error.to_string().contains("before it was ready"), "{error}");
    }
}
