//! A platform as a child process.
//!
//! The binary is `PLATFORM_BIN`, else the one beside the test's own target folder. The child sees
//! no `PLATFORM_*` variable of ours, a working folder and ports of its own; a restart keeps
//! ports and state. A watchdog shell holds a pipe of the test process: when that ends, however it
//! ends, the pipe closes and the watchdog kills the platform and removes its folder, so that
//! statics may own platforms.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// How long anything may take before a test calls it a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long a clean stop may take: twice what is promised, for a loaded machine.
pub const STOP: Duration = Duration::from_secs(10);

/// What listens, as the ready line names it.
pub const LISTENERS: [&str; 10] = [
    "all",
    "ledger",
    "cfa",
    "payments",
    "market",
    "identity",
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

/// A command of the binary that has ended.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// Its standard output as JSON.
    ///
    /// # Panics
    /// When it is none: with everything the command said.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("no JSON ({error}): {self:?}"))
    }

    /// Itself, when it exited with 0.
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
            "PLATFORM_BIN = {} is no file",
            path.display()
        );
        return path;
    }
    let test = std::env::current_exe().expect("a process has an executable");
    let profile = test
        .parent()
        .and_then(Path::parent)
        .expect("tests lie in target/<profile>/deps");
    let path = profile.join("platform");
    assert!(
        path.is_file(),
        "{} does not exist: these tests start the real binary. Run `cargo test --workspace`, or build it first with `cargo build --bin platform` \
         (with the same profile), or name another in PLATFORM_BIN",
        path.display()
    );
    path
}

/// A command of the binary with nothing of our own settings in its environment.
pub fn command(folder: &Path) -> Command {
    limited(folder, None)
}

/// The same in a process with this soft and hard limit of open descriptors.
fn limited(folder: &Path, descriptors: Option<u64>) -> Command {
    let mut command = match descriptors {
        None => Command::new(binary()),
        Some(limit) => {
            // The shell lowers both limits, then becomes the binary.
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!(r#"ulimit -n {limit}; exec "$0" "$@""#)]);
            shell.arg(binary());
            shell
        }
    };
    for (name, _) in std::env::vars_os() {
        let ours = name.to_string_lossy();
        if ours.starts_with("PLATFORM_")
            || ours == "SLACK_WEBHOOK_URL"
            || ours.starts_with("PAGERDUTY_")
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
        .unwrap_or_else(|_| panic!("platform {args:?} did not end"))
        .expect("the binary runs");
    Finished {
        status: output.status,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl Platform {
    /// A platform on ports of its own in a new folder; ready when this returns.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// The same with further environment.
    pub async fn start_with(env: &[(&str, &str)]) -> Self {
        Self::start_in(new_folder(), env).await
    }

    /// A platform in a working folder that the caller has made; removed at the end as any other.
    pub async fn start_in(folder: PathBuf, env: &[(&str, &str)]) -> Self {
        Self::start_limited(folder, None, env).await
    }

    /// A platform whose process may have this many open descriptors: both its soft and its hard limit.
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

    /// A platform whose first starts are killed at these moments, whatever they were at; ready when this returns.
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

    /// Exit code of a first start that is interrupted as soon as it has begun.
    pub async fn interrupted_start() -> Option<i32> {
        let folder = new_folder();
        let mut child = run_command(&folder, &new_ports(), None, &[])
            .spawn()
            .expect("the binary starts");
        let log = || std::fs::read_to_string(folder.join("platform.log")).unwrap_or_default();
        let begun = Instant::now();
        while !log().contains("limit of open files") {
            assert!(begun.elapsed() < PATIENCE, "not begun\n{}", tail(&log()));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let pid = child.id().expect("it runs").to_string();
        let sent = Command::new("kill").args(["-INT", &pid]).status().await;
        assert!(sent.expect("kill runs").success());
        let ended = tokio::time::timeout(STOP, child.wait()).await;
        ended.expect("in time").expect("the child ends").code()
    }

    /// Starts again behind a kill or a stop: same state, same ports.
    pub async fn restart(&mut self) {
        self.restart_with(&[]).await;
    }

    /// The same with further environment.
    pub async fn restart_with(&mut self, env: &[(&str, &str)]) {
        let running = self.child.try_wait().expect("the child can be asked");
        assert!(running.is_some(), "the platform still runs");
        let ports = Some(&self.addresses);
        let (child, addresses) = launch(&self.folder, ports, self.descriptors, env).await;
        assert_eq!(addresses, self.addresses, "a restart keeps its ports");
        self.child = child;
        // Pooled connections lead to the process that is gone.
        self.http = client();
        let mut old = std::mem::replace(&mut self.watchdog, watch(&self.child, &self.folder));
        old.start_kill().expect("the old watchdog can be killed");
    }

    /// Starts again where the start is refused; gives the refusal.
    pub async fn start_refused(&mut self) -> String {
        self.start_refused_with(&[]).await
    }

    /// The same with further environment.
    pub async fn start_refused_with(&mut self, env: &[(&str, &str)]) -> String {
        assert!(!self.is_running(), "the platform still runs");
        let before = self.log().len();
        let mut child = run_command(&self.folder, &self.addresses, self.descriptors, env)
            .spawn()
            .expect("the binary starts");
        let status = tokio::time::timeout(PATIENCE, child.wait()).await;
        let status = status.expect("a start that is refused ends");
        let said = self.log().split_off(before);
        assert!(!status.expect("the child ends").success(), "{said}");
        said
    }

    /// `kill -9`.
    pub async fn kill(&mut self) {
        self.child.start_kill().expect("the child can be killed");
        self.child.wait().await.expect("the child ends");
    }

    /// Process id.
    pub fn pid(&self) -> String {
        self.child.id().expect("the platform runs").to_string()
    }

    /// Waits for a platform that ends by itself, or by the hand of somebody else.
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
            .expect("the child can be asked")
            .is_none()
    }

    /// Ctrl-C: ends in time with exit code 0; the folder stays for a restart.
    pub async fn stop(&mut self) -> Duration {
        self.stop_by("INT").await
    }

    /// A clean stop by a named signal.
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

    /// Folder of its state.
    pub fn data_dir(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// All it has logged, over restarts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("platform.log")).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        tail(&self.log())
    }

    /// A command of the binary against this platform.
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
        // The watchdog sees its pipe close, kills and tidies up; a test that fails names the folder's log first.
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

/// A port of its own for every listener, below those that the kernel gives to outgoing connections
/// (from 32,768 on by default). A port that the kernel chose may be some connection's while the
/// platform restarts, and then for as long as that connection lives.
fn new_ports() -> BTreeMap<String, SocketAddr> {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 22_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Processes that run side by side begin apart; whoever meets another takes the next ports.
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
        // No test is about how long a sync of a busy disk takes.
        .env("PLATFORM_MARKET__REPLICA_WAIT_MS", "5000")
        .envs(env.iter().copied())
        .stdout(Stdio::piped())
        .stderr(log.expect("a log file"));
    command
}

/// What matters of a log: warnings, errors and whatever is no log line, then the very last lines.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let matters = |line: &&&str| !line.contains(r#""level":"INFO""#);
    let mut shown: Vec<&str> = lines.iter().filter(matters).copied().collect();
    shown.drain(..shown.len().saturating_sub(30));
    shown.push("...");
    shown.extend(&lines[lines.len().saturating_sub(5)..]);
    shown.join("\n")
}

/// A client without proxies that gives up where a test would.
pub fn client() -> reqwest::Client {
    // The first of the process stays; a second attempt is refused, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .no_proxy()
        .timeout(PATIENCE)
        .build()
        .expect("an HTTP client")
}

/// Kills the platform and removes its folder once our end of the pipe is closed.
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

/// Starts the process until it is ready: on these ports, or on new ones. When somebody else has one of them,
/// it is tried again.
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

/// The end of the log when it does not become ready.
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
    // Whatever it prints later must not fill the pipe.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    let addresses = LISTENERS
        .iter()
        .map(|name| {
            let address = line["listen"][name]
                .as_str()
                .and_then(|text| text.parse().ok());
            (
                (*name).to_owned(),
                address.unwrap_or_else(|| {
                    panic!("the ready line names no address for {name}: {line}")
                }),
            )
        })
        .collect();
    Ok((child, addresses))
}
