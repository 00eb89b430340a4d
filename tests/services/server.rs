//! A Kafka broker, a PostgreSQL server or a node of a chain of the test's own, which the test may
//! stop and kill. Tests of several crates that need these servers include this file.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// A server with its own state. Dropping the value kills the server and removes the state.
pub struct Server {
    /// Name of the script in the folder of this file.
    script: &'static str,
    state: tempfile::TempDir,
    /// Settings of the script.
    settings: &'static [(&'static str, &'static str)],
    /// Address or URL as the script prints it; a restart keeps it.
    pub address: String,
}

impl Server {
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn kafka() -> Self {
        Self::start("kafka.sh", &[])
    }

    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn postgres() -> Self {
        Self::start("postgres.sh", &[])
    }

    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn anvil(settings: &'static [(&'static str, &'static str)]) -> Self {
        Self::start("anvil.sh", settings)
    }

    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn geth(settings: &'static [(&'static str, &'static str)]) -> Self {
        Self::start("geth.sh", settings)
    }

    fn start(script: &'static str, settings: &'static [(&'static str, &'static str)]) -> Self {
        let state = tempfile::tempdir().expect("a folder");
        let address = run(script, state.path(), settings, "start").expect("the server starts");
        Server {
            script,
            state,
            settings,
            address,
        }
    }

    fn run(&self, command: &str) -> Result<String, String> {
        run(self.script, self.state.path(), self.settings, command)
    }

    /// Stops the server cleanly and keeps its state.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn stop(&self) {
        self.run("stop").expect("the server stops");
    }

    /// Kills the server (SIGKILL) and keeps its state.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn kill(&self) {
        self.run("kill").expect("the server is killed");
    }

    /// Starts the server again on the kept state.
    #[allow(dead_code, reason = "each test target uses its part")]
    pub fn start_again(&self) {
        let address = self.run("start").expect("the server starts");
        assert_eq!(address, self.address, "a restart keeps its port");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(status) = self.run("clean") {
            eprintln!("{} clean: {status}", self.script);
        }
    }
}

/// Runs a command of the script and returns the last line of its output. The script limits its own
/// waits.
///
/// # Errors
/// The script cannot be started or fails; the text contains its standard error.
fn run(
    script: &str,
    state: &Path,
    settings: &[(&str, &str)],
    command: &str,
) -> Result<String, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/services");
    let done = Command::new(folder.join(script))
        .arg(command)
        .env("SERVICE_HOME", state)
        .env_remove("ANVIL_OPTIONS")
        .env_remove("ANVIL_PORT")
        .env_remove("GETH_GAS")
        .env_remove("GETH_PERIOD")
        .env_remove("GETH_PORT")
        .env_remove("KAFKA_PORT")
        .env_remove("POSTGRES_PORT")
        .envs(settings.iter().copied())
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
