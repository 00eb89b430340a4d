//! A Kafka broker or a PostgreSQL server of the test's own, which the test may stop and kill. The
//! full tests of several crates include this file.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// Killed and removed with the value.
pub struct Server {
    /// Beside this file.
    script: &'static str,
    state: tempfile::TempDir,
    /// As the script prints it; a restart keeps it.
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

    /// A clean stop; the state is kept.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn stop(&self) {
        run(self.script, self.state.path(), "stop").expect("the server stops");
    }

    /// `kill -9`; the state is kept.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn kill(&self) {
        run(self.script, self.state.path(), "kill").expect("the server is killed");
    }

    /// Starts again on the kept state.
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

/// Runs a command of the script, which limits its own waits; returns its last line.
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
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(format!("{script} {command}: {}\n{said}", done.status));
    }
    let printed = String::from_utf8_lossy(&done.stdout);
    Ok(printed.lines().last().unwrap_or_default().to_owned())
}
