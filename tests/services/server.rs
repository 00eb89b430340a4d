//! A Kafka broker or a PostgreSQL server of the test's own, which the test may stop and kill. Tests
//! of several crates that need these servers include this file.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// A server with its own state. Dropping the value kills the server and removes the state.
pub struct Server {
    /// Name of the script in the folder of this file.
    script: &'static str,
    state: tempfile::TempDir,
    /// Address or URL as the script prints it; a restart keeps it.
    pub address: String,
}

impl Server {
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn kafka() -> Self {
        Self::start("kafka.sh")
    }

    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn postgres() -> Self {
        Self::start("postgres.sh")
    }

    fn start(script: &'static str) -> Self {
        let state = tempfile::tempdir().expect("a folder");
        let address = run(script, state.path(), "start").expect("the server starts");
        Server {
            script,
            state,
            address,
        }
    }

    /// Stops the server cleanly and keeps its state.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn stop(&self) {
        run(self.script, self.state.path(), "stop").expect("the server stops");
    }

    /// Kills the server (SIGKILL) and keeps its state.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn kill(&self) {
        run(self.script, self.state.path(), "kill").expect("the server is killed");
    }

    /// Starts the server again on the kept state.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn start_again(&self) {
        let address = run(self.script, self.state.path(), "start").expect("the server starts");
        assert_eq!(address, self.address, "a restart keeps its port");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(status) = run(self.script, self.state.path(), "clean") {
            eprintln!("{} clean: {status}", self.script);
        }
    }
}

/// Runs a command of the script and returns the last line of its output. The script limits its own
/// waits.
///
/// # Errors
/// The script cannot be started or fails; the text contains its standard error.
fn run(script: &str, state: &Path, command: &str) -> Result<String, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/services");
    let done = Command::new(folder.join(script))
        .arg(command)
        .env("SERVICE_HOME", state)
        .env_remove("KAFKA_PORT")
        .env_remove("POSTGRES_PORT")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{script}: {error}"))?;
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr);
        return Err(format!("{script} {command}: {}\n{stderr}", done.status));
    }
    let printed = String::from_utf8_lossy(&done.stdout);
    Ok(printed.lines().last().unwrap_or_default().to_owned())
}
