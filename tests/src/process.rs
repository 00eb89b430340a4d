//! A platform as a child process.
//!
//! The binary is `PLATFORM_BIN`, else the one in the test's own target folder. The child inherits
//! no `PLATFORM_*` variable and has its own working folder and ports. A restart keeps ports and
//! state.
//!
//! A watchdog shell reads from a pipe of the test process. When that process ends, in any way, the
//! pipe closes; the watchdog then kills the platform and removes its folder. A static can therefore
//! own a platform, although statics are never dropped.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// Timeout of a wait, after which the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Timeout of a clean stop: twice the specified time, since the machine may be loaded.
pub const STOP: Duration = Duration::from_secs(10);

/// Names of the listeners in the ready line.
pub const LISTENERS: [&str; 11] = [
    "all",
    "ledger",
    "cfa",
    "payments",
    "market",
    "identity",
    "approvals",
    "bank",
    "chain",
    "chain_rpc",
    "trading",
];

/// A running platform.
pub struct Platform {
    child: Child,
    watchdog: Child,
    folder: PathBuf,
    descriptors: Option<u64>,
    addresses: BTreeMap<String, SocketAddr>,
    pub(crate) http: reqwest::Client,
}

/// A finished command of the binary.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// Standard output as JSON.
    ///
    /// # Panics
    /// If it is not JSON; the message contains the whole output.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("standard output is not JSON ({error}): {self:?}"))
    }

    /// Asserts exit code 0.
    pub fn success(self) -> Self {
        assert!(self.status.success(), "{self:?}");
        self
    }
}

/// The binary under test.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("PLATFORM_BIN") {
        let path = PathBuf::from(path);
        assert!(
            path.is_file(),
            "PLATFORM_BIN = {} is not a file",
            path.display()
        );
        return path;
    }
    let test = std::env::current_exe().expect("a process has an executable");
    let profile = test
        .parent()
        .and_then(Path::parent)
        .expect("tests are in target/<profile>/deps");
    let path = profile.join("platform");
    assert!(
        path.is_file(),
        "{} does not exist: these tests start the real binary. Run `cargo test --workspace`, or build \
        it with `cargo build --bin platform` (same profile), or set PLATFORM_BIN",
        path.display()
    );
    path
}

/// A command of the binary; its environment has none of the test process's platform settings.
pub fn command(folder: &Path) -> Command {
    limited(folder, None)
}

/// Like [`command`], with this soft and hard limit of open descriptors.
fn limited(folder: &Path, descriptors: Option<u64>) -> Command {
    let mut command = match descriptors {
        None => Command::new(binary()),
        Some(limit) => {
            // The shell lowers both limits, then executes the binary in its own process.
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!(r#"ulimit -n {limit}; exec "$0" "$@""#)]);
            shell.arg(binary());
            shell
        }
    };
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("PLATFORM_")
            || text == "SLACK_WEBHOOK_URL"
            || text.starts_with("PAGERDUTY_")
        {
            command.env_remove(&name);
        }
    }
    command
        .current_dir(folder)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

/// Runs a command of the binary to its end.
pub async fn run(folder: &Path, args: &[&str]) -> Finished {
    let running = command(folder).args(args).output();
    let output = tokio::time::timeout(5 * PATIENCE, running)
        .await
        .unwrap_or_else(|_| panic!("timed out: platform {args:?} did not end"))
        .expect("the binary runs");
    Finished {
        status: output.status,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl Platform {
    /// Starts a platform on its own ports in a new folder; returns once it is ready.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Like [`Platform::start`], with further environment variables.
    pub async fn start_with(env: &[(&str, &str)]) -> Self {
        Self::start_in(new_folder(), env).await
    }

    /// Starts a platform in the given working folder. The watchdog removes it at the end.
    pub async fn start_in(folder: PathBuf, env: &[(&str, &str)]) -> Self {
        Self::start_limited(folder, None, env).await
    }

    /// Starts a platform with this limit of open descriptors, soft and hard.
    pub async fn start_with_descriptors(descriptors: u64) -> Self {
        Self::start_limited(new_folder(), Some(descriptors), &[]).await
    }

    async fn start_limited(
        folder: PathBuf,
        descriptors: Option<u64>,
        env: &[(&str, &str)],
    ) -> Self {
        let (child, addresses) = launch(&folder, None, descriptors, env).await;
        let watchdog = watch(&child, &folder);
        Self {
            child,
            watchdog,
            folder,
            descriptors,
            addresses,
            http: client(),
        }
    }

    /// Starts a platform after as many killed starts as there are `moments`. Each start runs for
    /// its moment before the kill.
    pub async fn start_after_kills(moments: &[Duration]) -> Self {
        let folder = new_folder();
        for moment in moments {
            let mut child = run_command(&folder, &new_ports(), None, &[])
                .spawn()
                .expect("the binary starts");
            tokio::time::sleep(*moment).await;
            child.kill().await.expect("the child can be killed");
        }
        Self::start_in(folder, &[]).await
    }

    /// Interrupts a first start as soon as it has logged its limit of open files; returns the exit
    /// code.
    pub async fn interrupted_start() -> Option<i32> {
        let folder = new_folder();
        let mut child = run_command(&folder, &new_ports(), None, &[])
            .spawn()
            .expect("the binary starts");
        let log = || std::fs::read_to_string(folder.join("platform.log")).unwrap_or_default();
        let begun = Instant::now();
        while !log().contains("limit of open files") {
            assert!(
                begun.elapsed() < PATIENCE,
                "the start did not begin\n{}",
                tail(&log())
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let pid = child.id().expect("the platform runs").to_string();
        let sent = Command::new("kill").args(["-INT", &pid]).status().await;
        assert!(sent.expect("kill runs").success());
        let ended = tokio::time::timeout(STOP, child.wait()).await;
        ended.expect("in time").expect("the child ends").code()
    }

    /// Starts again after a kill or a stop, on the same state and ports.
    pub async fn restart(&mut self) {
        self.restart_with(&[]).await;
    }

    /// Like [`Platform::restart`], with further environment variables.
    pub async fn restart_with(&mut self, env: &[(&str, &str)]) {
        let running = self.child.try_wait().expect("the child has a status");
        assert!(running.is_some(), "the platform still runs");
        let ports = Some(&self.addresses);
        let (child, addresses) = launch(&self.folder, ports, self.descriptors, env).await;
        assert_eq!(addresses, self.addresses, "a restart keeps its ports");
        self.child = child;
        // The old client's pooled connections belong to the old process.
        self.http = client();
        let mut old = std::mem::replace(&mut self.watchdog, watch(&self.child, &self.folder));
        old.start_kill().expect("the old watchdog can be killed");
    }

    /// Starts the platform again; the start must fail. Returns what it logged.
    pub async fn start_refused(&mut self) -> String {
        self.start_refused_with(&[]).await
    }

    /// Like [`Platform::start_refused`], with further environment variables.
    pub async fn start_refused_with(&mut self, env: &[(&str, &str)]) -> String {
        assert!(!self.is_running(), "the platform still runs");
        let before = self.log().len();
        let mut child = run_command(&self.folder, &self.addresses, self.descriptors, env)
            .spawn()
            .expect("the binary starts");
        let status = tokio::time::timeout(PATIENCE, child.wait()).await;
        let status = status.expect("a start that is refused ends");
        let logged = self.log().split_off(before);
        assert!(!status.expect("the child ends").success(), "{logged}");
        logged
    }

    /// `kill -9`.
    pub async fn kill(&mut self) {
        self.child.start_kill().expect("the child can be killed");
        self.child.wait().await.expect("the child ends");
    }

    pub fn pid(&self) -> String {
        self.child.id().expect("the platform runs").to_string()
    }

    /// Waits until the process has ended with a failure, by an abort or a kill.
    pub async fn aborted(&mut self) {
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        let Ok(status) = status else {
            panic!("the platform did not abort\n{}", self.log_tail())
        };
        assert!(!status.expect("the child ends").success());
    }

    /// True while the process runs.
    pub fn is_running(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("the child has a status")
            .is_none()
    }

    /// Stops by Ctrl-C. Asserts exit code 0 within [`STOP`]; returns the duration. The folder
    /// stays.
    pub async fn stop(&mut self) -> Duration {
        self.stop_by("INT").await
    }

    /// Like [`Platform::stop`], by a named signal.
    pub async fn stop_by(&mut self, signal: &str) -> Duration {
        let pid = self.child.id().expect("the platform runs").to_string();
        let started = Instant::now();
        let sent = Command::new("kill")
            .args([&format!("-{signal}"), &pid])
            .status()
            .await;
        assert!(sent.expect("kill runs").success());
        let ended = tokio::time::timeout(STOP, self.child.wait()).await;
        let Ok(status) = ended else {
            panic!("not stopped within {STOP:?}\n{}", self.log_tail())
        };
        let status = status.expect("the child ends");
        assert_eq!(
            status.code(),
            Some(0),
            "exit code of a clean stop\n{}",
            self.log_tail()
        );
        started.elapsed()
    }

    /// Address of a listener.
    pub fn address(&self, listener: &str) -> SocketAddr {
        *self
            .addresses
            .get(listener)
            .unwrap_or_else(|| panic!("nothing listens as {listener}"))
    }

    /// `http://host:port` of a listener.
    pub fn url(&self, listener: &str) -> String {
        format!("http://{}", self.address(listener))
    }

    /// Working folder of the process.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Folder of the platform's state.
    pub fn data_dir(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// Complete log, across restarts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("platform.log")).unwrap_or_default()
    }

    /// Lines of the log as objects, without a last line that is being written.
    ///
    /// # Panics
    /// If a line is not JSON.
    pub fn log_lines(&self) -> Vec<Value> {
        let log = self.log();
        let complete = log.rfind('\n').map_or("", |end| &log[..end]);
        let lines = complete.lines().map(|line| {
            serde_json::from_str(line)
                .unwrap_or_else(|error| panic!("not JSON in the log ({error}): {line}"))
        });
        lines.collect()
    }

    /// Waits until `done` accepts the lines of the log; returns them.
    ///
    /// # Panics
    /// After a minute, or if a line is not JSON.
    pub async fn until_logged(&self, what: &str, done: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let lines = self.log_lines();
            if done(&lines) {
                return lines;
            }
            assert!(
                Instant::now() < deadline,
                "timed out: the log has no {what}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn log_tail(&self) -> String {
        tail(&self.log())
    }

    /// Runs a command of the binary against this platform.
    pub async fn cli(&self, args: &[&str]) -> Finished {
        let (url, trading) = (self.url("all"), self.address("trading").to_string());
        let mut all = vec!["--url", url.as_str()];
        all.extend(args);
        if matches!(args, [.., "demo"] | ["demo", ..] | ["replay", ..]) {
            all.extend(["--connect", "--trading", trading.as_str()]);
        }
        if let ["load", ..] = args {
            all.extend(["--trading", trading.as_str()]);
        }
        run(&self.folder, &all).await
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        // Prints before the pipe closes: the watchdog then removes the log.
        if std::thread::panicking() {
            eprintln!("log of the platform:\n{}", tail(&self.log()));
        }
        drop(self.watchdog.stdin.take());
    }
}

fn new_folder() -> PathBuf {
    let folder = tempfile::Builder::new().prefix("platform-").tempdir();
    folder.expect("a temporary folder").keep()
}

/// A port for every listener, below the kernel's range for outgoing connections (32,768 and above
/// by default): an outgoing connection could take a port of that range while the platform restarts.
fn new_ports() -> BTreeMap<String, SocketAddr> {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 22_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Parallel test processes start at different offsets. After a collision `launch` retries with
    // the next ports.
    let start = std::process::id().wrapping_mul(997);
    let port = || {
        let offset = start.wrapping_add(TAKEN.fetch_add(1, Relaxed)) % COUNT;
        u16::try_from(FIRST + offset).expect("below 32,768")
    };
    LISTENERS
        .iter()
        .map(|name| {
            (
                (*name).to_owned(),
                SocketAddr::from(([127, 0, 0, 1], port())),
            )
        })
        .collect()
}

/// `platform run` on these ports, logging into the folder.
fn run_command(
    folder: &Path,
    listen: &BTreeMap<String, SocketAddr>,
    descriptors: Option<u64>,
    env: &[(&str, &str)],
) -> Command {
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("platform.log"));
    let mut command = limited(folder, descriptors);
    command
        .args(["--json", "run", "--data-dir"])
        .arg(folder.join("data"))
        .envs(listen.iter().map(|(name, address)| {
            (
                format!("PLATFORM_LISTEN__{}", name.to_uppercase()),
                address.to_string(),
            )
        }))
        // A read waits this long for replica and history, so that a slow disk fails no test.
        .env("PLATFORM_MARKET__REPLICA_WAIT_MS", "20000")
        .env("PLATFORM_MARKET__READ_WAIT_MS", "20000")
        // All tests call as one operator and one treasury, which would exceed the rate per caller.
        .env("PLATFORM_CALLS__WRITES_PER_S", "0")
        .envs(env.iter().copied())
        .stdout(Stdio::piped())
        .stderr(log.expect("a log file"));
    command
}

/// The last 30 lines of a log that are not INFO, then its last 5 lines.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let is_not_info = |line: &&&str| !line.contains(r#""level":"INFO""#);
    let mut selected: Vec<&str> = lines.iter().filter(is_not_info).copied().collect();
    selected.drain(..selected.len().saturating_sub(30));
    selected.push("...");
    selected.extend(&lines[lines.len().saturating_sub(5)..]);
    selected.join("\n")
}

/// An HTTP client without proxies, with the timeout [`PATIENCE`].
pub fn client() -> reqwest::Client {
    // Fails harmlessly if the process has a provider already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .no_proxy()
        .timeout(PATIENCE)
        .build()
        .expect("an HTTP client")
}

/// Starts the watchdog: it kills the platform and removes its folder (unless `TESTS_KEEP` is set)
/// once the test's end of the pipe is closed.
fn watch(child: &Child, folder: &Path) -> Child {
    let pid = child.id().expect("the platform runs").to_string();
    let keep = if std::env::var_os("TESTS_KEEP").is_some() {
        "keep"
    } else {
        ""
    };
    Command::new("sh")
        .args([
            "-c",
            r#"cat >/dev/null; kill -9 "$1" 2>/dev/null; [ -n "$3" ] || rm -rf -- "$2""#,
            "watchdog",
            &pid,
        ])
        .arg(folder)
        .arg(keep)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell")
}

/// Starts the process on these ports, or on new ones, and waits until it is ready. Retries for up
/// to [`PATIENCE`] while another process has one of the ports.
async fn launch(
    folder: &Path,
    ports: Option<&BTreeMap<String, SocketAddr>>,
    descriptors: Option<u64>,
    env: &[(&str, &str)],
) -> (Child, BTreeMap<String, SocketAddr>) {
    let started = Instant::now();
    loop {
        let listen = ports.cloned().unwrap_or_else(new_ports);
        match try_launch(folder, &listen, descriptors, env).await {
            Ok(launched) => return launched,
            Err(log) if log.contains("Address already in use") && started.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            Err(log) => panic!("the platform did not become ready\n{log}"),
        }
    }
}

/// Starts the process once and waits until it is ready.
///
/// # Errors
/// The end of its log, if it does not become ready within [`PATIENCE`].
async fn try_launch(
    folder: &Path,
    listen: &BTreeMap<String, SocketAddr>,
    descriptors: Option<u64>,
    env: &[(&str, &str)],
) -> Result<(Child, BTreeMap<String, SocketAddr>), String> {
    let mut child = run_command(folder, listen, descriptors, env)
        .spawn()
        .expect("the binary starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let ready = async {
        while let Some(line) = lines.next_line().await.expect("text") {
            if let Ok(line) = serde_json::from_str::<Value>(&line)
                && line["ready"] == Value::Bool(true)
            {
                return Some(line);
            }
        }
        None
    };
    let Ok(Some(line)) = tokio::time::timeout(PATIENCE, ready).await else {
        let log = std::fs::read_to_string(folder.join("platform.log")).unwrap_or_default();
        return Err(tail(&log));
    };
    // Reads later output, so that it does not fill the pipe and block the child.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    let addresses = LISTENERS
        .iter()
        .map(|name| {
            let address = line["listen"][name]
                .as_str()
                .and_then(|text| text.parse().ok());
            (
                (*name).to_owned(),
                address
                    .unwrap_or_else(|| panic!("the ready line has no address of {name}: {line}")),
            )
        })
        .collect();
    Ok((child, addresses))
}
