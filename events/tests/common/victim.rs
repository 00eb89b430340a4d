//! A child process of a test. It runs one test of the same binary, by name. The full tests of the
//! ledger include this file.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::Duration,
};

/// Longest silence of the child. It only turns a hang into a failure.
const SILENCE: Duration = Duration::from_secs(120);

/// A running child process. Dropping the value kills it.
pub struct Victim {
    child: Child,
    lines: Receiver<String>,
}

impl Victim {
    /// Runs the test `name` with these environment variables.
    pub fn spawn<K, V>(name: &str, env: impl IntoIterator<Item = (K, V)>) -> Self
    where
        K: AsRef<OsStr>,
        V: AsRef<OsStr>,
    {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .envs(env)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (tx, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if tx.send(line).is_err() {
                    return;
                }
            }
        });
        Victim { child, lines }
    }

    /// The next line that the process prints; `None` after its end.
    pub fn next_line(&self) -> Option<String> {
        match self.lines.recv_timeout(SILENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the child process hangs"),
        }
    }

    /// Sends SIGKILL. Lines printed before can still be read.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Reads the remaining output and waits for the end of the process.
    pub fn end(&mut self) -> ExitStatus {
        while self.next_line().is_some() {}
        self.child.wait().unwrap()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
