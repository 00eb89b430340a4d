//! Configuration layers: defaults, TOML file, `PLATFORM_*` environment variables
//! (`PLATFORM_LISTEN__ALL=127.0.0.1:9080`), command line.

use std::ffi::OsString;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// Default file, read if it exists.
const FILE: &str = "platform.toml";
const PREFIX: &str = "PLATFORM_";
/// Variables without the prefix, and the settings in `[alerts]` that they set.
const ALERT_VARIABLES: [(&str, &str); 2] = [
    ("SLACK_WEBHOOK_URL", "slack_webhook_url"),
    ("PAGERDUTY_API_KEY", "pagerduty_api_key"),
];
/// Variables with the prefix that are no settings: those of the command line and of crash tests.
const NO_SETTINGS: [&str; 5] = ["url", "token", "config", "crash_at", "bin"];

/// All settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Folder of all state.
    pub data_dir: PathBuf,
    pub listen: Listen,
    pub calls: rpc::CallRateConfig,
    pub log: Log,
    pub sandbox: Sandbox,
    pub events: Events,
    pub ledger: ledger::LedgerConfig,
    pub chain: chain::ChainConfig,
    pub cfa: cfa::CfaConfig,
    pub payments: payments::PaymentsConfig,
    pub approvals: approvals::ApprovalsConfig,
    pub alerts: Alerts,
    pub market: gateway::GatewayConfig,
    pub settlement: settlement::SettlementConfig,
    pub trading: Trading,
    pub snapshots: Snapshots,
    pub journal: Journal,
    pub disk: Disk,
    pub identity: sandbox::identity::IdentityConfig,
    pub bank: sandbox::bank::BankConfig,
}

/// Listening addresses of the services. Port 0 selects a free one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// All RPCs on one port, with reflection.
    pub all: SocketAddr,
    pub ledger: SocketAddr,
    pub cfa: SocketAddr,
    pub payments: SocketAddr,
    pub market: SocketAddr,
    pub identity: SocketAddr,
    pub approvals: SocketAddr,
    /// The bank's HTTP API.
    pub bank: SocketAddr,
    pub chain: SocketAddr,
    /// JSON-RPC of devchain.
    pub chain_rpc: SocketAddr,
    /// Trading sessions, QUIC.
    pub trading: SocketAddr,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// `tracing` filter, for example `info` or `ledger=debug,info`.
    pub filter: String,
}

/// Stand-ins for external systems.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sandbox {
    /// Identity, bank and tokens of the sandbox. Required: this version has no real connections.
    pub enabled: bool,
}

/// Transport of events between services.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Events {
    /// Kafka brokers (`host:port,host:port`); unset: the embedded log.
    pub kafka_brokers: Option<String>,
    /// Days for which the embedded log keeps a record, at least 7; 0: for ever. A record is removed
    /// only once every consumer group that has ever read its topic has it, and never one of the
    /// last 200,000. A topic without a group and the topics of dead letters keep all. A day after
    /// the records of a time the services forget the ids of the events that they handled then.
    pub retain_days: u32,
    /// Records that the embedded log keeps, at least 200,000, if it is to keep fewer than those of
    /// `retain_days`.
    pub retain_records: Option<u64>,
    /// Days after which the brokers have no record of the platform's topics any more, at least 7.
    /// The services forget the ids of handled events a day later. Unset: never.
    pub kafka_retention_days: Option<u32>,
}

/// Minimum of `retain_days` and `kafka_retention_days`: a stopped service may take some days.
const RETAIN_DAYS_MIN: u32 = 7;
const SECONDS_PER_DAY: u64 = 86_400;

impl Default for Events {
    fn default() -> Self {
        Self {
            kafka_brokers: None,
            retain_days: 30,
            retain_records: None,
            kafka_retention_days: None,
        }
    }
}

impl Events {
    fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.retain_days == 0 || self.retain_days >= RETAIN_DAYS_MIN,
            "configuration: events.retain_days is {}, the minimum is {RETAIN_DAYS_MIN}; 0 keeps all",
            self.retain_days
        );
        let kafka_days = self.kafka_retention_days.unwrap_or(RETAIN_DAYS_MIN);
        anyhow::ensure!(
            kafka_days >= RETAIN_DAYS_MIN,
            "configuration: events.kafka_retention_days is {kafka_days}, \
             the minimum is {RETAIN_DAYS_MIN}"
        );
        Ok(())
    }

    /// Which records the embedded log keeps.
    pub fn retention(&self) -> events::Retention {
        events::Retention {
            records: self.retain_records,
            age: (self.retain_days > 0).then(|| days(self.retain_days)),
        }
    }

    /// Age at which the brokers have no record any more, if the operator states it.
    pub fn kafka_retention(&self) -> Option<std::time::Duration> {
        self.kafka_retention_days.map(days)
    }
}

fn days(count: u32) -> std::time::Duration {
    std::time::Duration::from_secs(u64::from(count) * SECONDS_PER_DAY)
}

/// Receivers of critical alerts besides the log. Their addresses and keys are secrets.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Alerts {
    /// An incoming webhook of Slack. Also set by the variable `SLACK_WEBHOOK_URL`.
    pub slack_webhook_url: Option<String>,
    /// An integration key of PagerDuty. Also set by the variable `PAGERDUTY_API_KEY`.
    pub pagerduty_api_key: Option<String>,
}

impl Alerts {
    /// The receivers for the payments gateway.
    pub fn sinks(&self) -> payments::AlertSinks {
        payments::AlertSinks::new(
            self.slack_webhook_url.clone(),
            self.pagerduty_api_key.clone(),
        )
    }

    /// Refuses an address to which no alert can be sent. The error does not contain it.
    fn check(&self) -> anyhow::Result<()> {
        let slack = self.slack_webhook_url.as_deref().unwrap_or_default();
        let is_http = |url: reqwest::Url| matches!(url.scheme(), "http" | "https");
        anyhow::ensure!(
            slack.trim().is_empty() || reqwest::Url::parse(slack).is_ok_and(is_http),
            "configuration: alerts.slack_webhook_url is not an http(s) URL"
        );
        Ok(())
    }
}

/// Shows which receivers are set, not their secrets.
impl std::fmt::Debug for Alerts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.sinks(), f)
    }
}

/// The log of the trading path.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Journal {
    /// Size of a preallocated segment file in bytes, at least 64 KiB. Existing segments keep
    /// theirs.
    pub segment_bytes: u64,
    /// Minimum bytes of journal to retain. Older whole segments are removed at run time once
    /// snapshots, settlement, sessions and history no longer need them. Unset: nothing is removed.
    /// Requires snapshots.
    pub retain_bytes: Option<u64>,
}

/// Minimum of `segment_bytes`. Each new segment creates a file and waits for the disk.
const SEGMENT_BYTES_MIN: u64 = 64 << 10;

impl Default for Journal {
    fn default() -> Self {
        Self {
            segment_bytes: 16 << 20,
            retain_bytes: None,
        }
    }
}

/// Free space on the disks of the data folder.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Disk {
    /// Free MiB below which the market refuses new orders (`DISK_LOW`). 0: free space is not
    /// checked.
    pub reserve_mib: u32,
}

impl Default for Disk {
    fn default() -> Self {
        Self { reserve_mib: 512 }
    }
}

/// Snapshots of the trading path and checkpoints of journal readers, at the same intervals. A
/// restart replays the journal after the last ones.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Snapshots {
    /// Off: a restart replays the whole journal.
    pub enabled: bool,
    /// Commands between snapshots.
    pub every_commands: u64,
    /// Seconds between snapshots, if there were commands.
    pub every_seconds: u64,
    /// Valid snapshots to keep, at least 2.
    pub kept: usize,
}

impl Default for Snapshots {
    fn default() -> Self {
        let settings = sequencer::SnapshotConfig::default();
        Self {
            enabled: true,
            every_commands: settings.every_commands,
            every_seconds: settings.every.as_secs(),
            kept: settings.kept,
        }
    }
}

impl Snapshots {
    /// The sequencer's snapshot settings with these followers of the replica; `None` if off.
    pub fn settings(
        &self,
        followers: Vec<sequencer::Durable>,
    ) -> Option<sequencer::SnapshotConfig> {
        self.enabled.then(|| sequencer::SnapshotConfig {
            every_commands: self.every_commands.max(1),
            every: std::time::Duration::from_secs(self.every_seconds.max(1)),
            kept: self.kept,
            followers,
        })
    }
}

/// Threads of the trading path.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Trading {
    /// Which threads have the books: `fused`, the hot thread itself; `shared`, one engine thread;
    /// `pinned`, several. Unset: `fused` below four free cores, else `pinned`.
    pub layout: Option<sequencer::Layout>,
    /// Core of the hot thread; engine threads use the next ones. Unset: the scheduler chooses.
    pub core: Option<usize>,
    /// Core of the journal's threads. Unset: the scheduler chooses; if `core` is set, among the
    /// cores without hot thread and engine threads. With two cores and a client on this machine,
    /// the hot thread's core: they would interrupt the client on the other one.
    pub journal_core: Option<usize>,
    /// Maximum engine threads of `pinned`; instruments share them round-robin. Unset: number of
    /// cores minus two.
    pub engine_threads_max: Option<usize>,
    /// Microseconds that a thread spins after the last request. Unset: 50 below four cores, else
    /// 2,000.
    pub spin_us: Option<u64>,
    /// Grace period of cancel-on-disconnect, in milliseconds. Unset: 10,000.
    ///
    /// The period starts at the end of a session's connection. Its open orders are cancelled unless
    /// the session reconnects within the period (`docs/protocol.md`, session rule 6).
    pub grace_ms: Option<u64>,
    /// New orders, amends and cancels per second that the journal buffers for one second while its
    /// disk does not answer. Unset: 200,000, which takes two buffers of 37 MiB.
    pub orders_per_s: Option<u32>,
    /// Lag of journal followers above which new orders are refused (`design.md` 6).
    pub bounds: sequencer::Bounds,
}

/// Maximum of `trading.orders_per_s`: it takes two buffers of 1.8 GiB.
const ORDERS_MAX: u32 = 10_000_000;
/// Minimum of `trading.bounds`: this amount may be in flight at any time.
const BOUND_MIN: u64 = 8_192;

impl Trading {
    /// Settings of the engine node with its journal in `dir`.
    pub fn settings(&self, dir: &Path) -> sequencer::Config {
        let free = sequencer::Config::new(dir);
        sequencer::Config {
            layout: self.layout.unwrap_or(free.layout),
            core: self.core.or(free.core),
            journal_core: self.journal_core.or(free.journal_core),
            engine_threads_max: self.engine_threads_max.unwrap_or(free.engine_threads_max),
            spin_us: self.spin_us.unwrap_or(free.spin_us),
            grace_ms: self.grace_ms.unwrap_or(free.grace_ms),
            pending_bytes_max: self
                .orders_per_s
                .map_or(free.pending_bytes_max, sequencer::Config::pending_bytes_for),
            ..free
        }
    }
}

/// A path segment of a URL from this length on may be an access key.
const KEY_LENGTH_MIN: usize = 16;

/// Shown in place of a secret.
const MASK: &str = "***";

/// Masks possible secrets in URLs: user, password, query, long path segments (access keys).
fn mask(value: &mut Value) {
    match value {
        Value::Table(table) => table.iter_mut().for_each(|(_, value)| mask(value)),
        Value::Array(values) => values.iter_mut().for_each(mask),
        Value::String(text) if text.contains("://") => *text = masked_url(text),
        _ => {}
    }
}

fn masked_url(text: &str) -> String {
    let Ok(mut url) = reqwest::Url::parse(text) else {
        return MASK.to_owned();
    };
    if url.password().is_some() {
        let _ = url.set_password(Some(MASK));
    } else if !url.username().is_empty() {
        let _ = url.set_username(MASK);
    }
    if url.query().is_some() {
        url.set_query(Some(MASK));
    }
    let is_key = |segment: &str| segment.len() >= KEY_LENGTH_MIN;
    if url.path().split('/').any(is_key) {
        let shown = |segment| if is_key(segment) { MASK } else { segment };
        let path: Vec<&str> = url.path().split('/').map(shown).collect();
        url.set_path(&path.join("/"));
    }
    url.to_string()
}

/// The address to connect to for a listener of this machine: loopback for an unspecified address.
pub fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.is_ipv4() {
            true => Ipv4Addr::LOCALHOST.into(),
            false => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            all: local(8080),
            ledger: local(8081),
            cfa: local(8082),
            payments: local(8083),
            market: local(8084),
            identity: local(8085),
            approvals: local(8088),
            bank: local(8086),
            chain: local(8087),
            chain_rpc: local(8545),
            trading: local(8090),
        }
    }
}

impl Listen {
    /// A free port for every service.
    pub fn on_free_ports() -> Self {
        let any = local(0);
        Self {
            all: any,
            ledger: any,
            cfa: any,
            payments: any,
            market: any,
            identity: any,
            approvals: any,
            bank: any,
            chain: any,
            chain_rpc: any,
            trading: any,
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            filter: "info".to_owned(),
        }
    }
}

impl Default for Sandbox {
    fn default() -> Self {
        Self { enabled: true }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("data"),
            listen: Listen::default(),
            calls: rpc::CallRateConfig::default(),
            log: Log::default(),
            sandbox: Sandbox::default(),
            events: Events::default(),
            ledger: ledger::LedgerConfig::default(),
            chain: chain::ChainConfig::default(),
            cfa: cfa::CfaConfig::default(),
            payments: payments::PaymentsConfig::default(),
            approvals: approvals::ApprovalsConfig::default(),
            alerts: Alerts::default(),
            market: gateway::GatewayConfig::default(),
            settlement: settlement::SettlementConfig::default(),
            trading: Trading::default(),
            snapshots: Snapshots::default(),
            journal: Journal::default(),
            disk: Disk::default(),
            identity: sandbox::identity::IdentityConfig::default(),
            bank: sandbox::bank::BankConfig::default(),
        }
    }
}

/// The message of `error` without the refused value, which may be a secret.
fn without_value(error: &toml::de::Error) -> String {
    let message = error.message();
    for kind in ["invalid type", "invalid value"] {
        if message.starts_with(&format!("{kind}: ")) {
            let expected = message.rfind(", expected ").map(|at| &message[at..]);
            return format!("{kind}{}", expected.unwrap_or_default());
        }
    }
    message.to_owned()
}

/// An error in the file `text`, without the source line, which may contain a secret.
fn located(text: &str, error: &toml::de::Error) -> anyhow::Error {
    let message = without_value(error);
    let before = error.span().and_then(|span| text.get(..span.start));
    let Some(before) = before else {
        return anyhow::Error::msg(message);
    };
    let line = before.matches('\n').count() + 1;
    let last = before.rsplit('\n').next().unwrap_or_default();
    let column = last.chars().count() + 1;
    anyhow::anyhow!("line {line}, column {column}: {message}")
}

/// An error in the merged settings. It names the setting and does not contain its value.
fn merged(error: &toml::de::Error) -> anyhow::Error {
    let shown = error.to_string();
    let shown = shown.replacen(error.message(), &without_value(error), 1);
    anyhow::Error::msg(shown.trim_end().replace('\n', " "))
}

/// Reads a file; unknown or malformed settings are refused with line and column.
fn read(file: &Path) -> anyhow::Result<Table> {
    let place = || format!("configuration: {}", file.display());
    let text = std::fs::read_to_string(file).with_context(place)?;
    let located = |error: toml::de::Error| located(&text, &error);
    toml::from_str::<Config>(&text)
        .map_err(located)
        .with_context(place)?;
    toml::from_str(&text).map_err(located).with_context(place)
}

/// Sets a setting by its path, for example `ledger__url`, to the TOML value `text`, or to the text
/// itself if it is not TOML. All settings below `alerts` are text: a key may be digits only.
fn set(settings: &mut Table, name: &str, text: &str) -> anyhow::Result<()> {
    let (folders, last) = name.rsplit_once("__").unwrap_or(("", name));
    let mut table = settings;
    for folder in folders.split("__").filter(|folder| !folder.is_empty()) {
        table = table
            .entry(folder)
            .or_insert_with(|| Table::new().into())
            .as_table_mut()
            .with_context(|| format!("configuration: {PREFIX}{name}: {folder} is not a table"))?;
    }
    let value = toml::from_str::<Table>(&format!("value = {text}"))
        .ok()
        .and_then(|mut parsed| parsed.remove("value"))
        .filter(|value| value.is_str() || !name.starts_with("alerts__"))
        .unwrap_or_else(|| Value::String(text.into()));
    table.insert(last.into(), value);
    Ok(())
}

/// Sets the receivers of alerts by their variables without the prefix. A blank variable is unset.
fn set_alerts(
    settings: &mut Table,
    variable: impl Fn(&'static str) -> Option<OsString>,
) -> anyhow::Result<()> {
    for (name, setting) in ALERT_VARIABLES {
        let Some(text) = variable(name) else {
            continue;
        };
        let text = text.to_str();
        let text = text.with_context(|| format!("configuration: {name} is not UTF-8"))?;
        if text.trim().is_empty() {
            continue;
        }
        let alerts = settings
            .entry("alerts")
            .or_insert_with(|| Table::new().into());
        let alerts = alerts.as_table_mut();
        let alerts = alerts.context("configuration: alerts is not a table")?;
        alerts.insert(setting.into(), text.into());
    }
    Ok(())
}

impl Config {
    /// Merges the layers.
    ///
    /// # Errors
    /// An unreadable file, an unknown name, a malformed value, or a value out of range. The error
    /// names the setting.
    pub fn load(file: Option<&Path>, data_dir: Option<&Path>) -> anyhow::Result<Self> {
        let mut settings = match file {
            Some(file) => read(file)?,
            None if Path::new(FILE).exists() => read(Path::new(FILE))?,
            None => Table::new(),
        };
        set_alerts(&mut settings, std::env::var_os)?;
        for (name, text) in std::env::vars_os() {
            let Some(name) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else {
                continue;
            };
            let name = name.to_ascii_lowercase();
            if NO_SETTINGS.contains(&name.as_str()) {
                continue;
            }
            let text = text
                .to_str()
                .with_context(|| format!("configuration: {PREFIX}{name} is not UTF-8"))?;
            set(&mut settings, &name, text)?;
        }
        if let Some(dir) = data_dir {
            let dir = dir
                .to_str()
                .context("configuration: data_dir is not UTF-8")?;
            settings.insert("data_dir".into(), dir.into());
        }
        let config: Self = settings
            .try_into()
            .map_err(|error| merged(&error))
            .context("configuration")?;
        config.alerts.check()?;
        config.events.check()?;
        anyhow::ensure!(
            config.journal.retain_bytes.is_none() || config.snapshots.enabled,
            "configuration: journal.retain_bytes needs snapshots.enabled: \
             without snapshots a start needs the whole journal"
        );
        anyhow::ensure!(
            config.journal.segment_bytes >= SEGMENT_BYTES_MIN,
            "configuration: journal.segment_bytes is {}, the minimum is {SEGMENT_BYTES_MIN}",
            config.journal.segment_bytes
        );
        let orders = config.trading.orders_per_s.unwrap_or_default();
        anyhow::ensure!(
            orders <= ORDERS_MAX,
            "configuration: trading.orders_per_s is {orders}, the maximum is {ORDERS_MAX}"
        );
        let (name, bound) = config.trading.bounds.least();
        anyhow::ensure!(
            bound >= BOUND_MIN,
            "configuration: trading.bounds.{name} is {bound}, the minimum is {BOUND_MIN}"
        );
        Ok(config.with_derived_settings())
    }

    /// The settings in force, for display. Receivers of alerts and secrets in URLs are masked.
    pub fn masked(&self) -> anyhow::Result<Table> {
        let mut settings = Table::try_from(self).context("configuration")?;
        settings.iter_mut().for_each(|(_, value)| mask(value));
        if let Some(Value::Table(alerts)) = settings.get_mut("alerts") {
            alerts
                .iter_mut()
                .for_each(|(_, secret)| *secret = MASK.into());
        }
        Ok(settings)
    }

    /// Folder of the journal.
    pub fn journal_dir(&self) -> PathBuf {
        self.data_dir.join("journal")
    }

    /// Retention with these followers of the replica; `None`: nothing is removed.
    pub fn retention(&self, followers: Vec<sequencer::Durable>) -> Option<sequencer::Retention> {
        let bytes = self.journal.retain_bytes?;
        Some(sequencer::Retention::new(bytes, followers))
    }

    /// Sets the addresses that derive from `listen`, as `platform config` prints them. Bank and
    /// payments get the address at which they reach each other's listener. A listener with port 0
    /// gets its port at the bind, after which the start calls this again.
    pub fn set_addresses(&mut self) {
        self.bank.listen = self.listen.bank;
        self.bank.webhook_url = format!("http://{}/webhook", reachable(self.listen.payments));
        self.payments.bank_url = format!("http://{}", reachable(self.listen.bank));
        self.market.quic_listen = self.listen.trading;
    }

    /// Derives from `data_dir` and `listen` the folder and the addresses of each service.
    pub fn with_derived_settings(mut self) -> Self {
        self.set_addresses();
        let dir = self.data_dir.clone();
        self.ledger.data_dir = dir.join("ledger");
        self.chain.data_dir = dir.join("chain");
        self.cfa.data_dir = dir.join("cfa");
        self.payments.data_dir = dir.join("payments");
        self.payments.keys_dir = dir.join("keys");
        self.approvals.data_dir = dir.join("approvals");
        self.market.data_dir = dir.join("market");
        self.settlement.data_dir = dir.join("settlement");
        self.identity.data_dir = dir.join("identity");
        self.bank.data_dir = dir.join("bank");
        self.bank.keys_dir = dir.join("keys");
        if self.sandbox.enabled {
            // The files of the sandbox's certificate authority. A command has one of its own.
            let keys = &self.bank.keys_dir;
            if self.cfa.signature_command.is_empty() {
                self.cfa.ca_file = Some(keys.join("ca.pem"));
            }
            self.cfa.extract_key_file = Some(keys.join("extracts.pk8"));
            self.cfa.extract_certificate_file = Some(keys.join("extracts.der"));
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use sequencer::Layout;

    use super::*;

    #[test]
    fn passwords_and_keys_in_urls_are_masked_for_display() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        let text = "[ledger]\nurl = \"postgres://platform:s3cret@db/ledger?sslkey=k\"\n";
        std::fs::write(&file, text).expect("written");
        let config = Config::load(Some(file.as_path()), Some(folder.path())).expect("loaded");
        let shown = config.masked().expect("shown").to_string();
        assert!(
            shown.contains("postgres://platform:***@db/ledger"),
            "{shown}"
        );
        assert!(!shown.contains("s3cret"), "{shown}");
        for (url, shown) in [
            (
                "https://node.example/v3/0123456789abcdef",
                "https://node.example/v3/***",
            ),
            ("https://token@node.example/", "https://***@node.example/"),
            (
                "http://127.0.0.1:8083/webhook",
                "http://127.0.0.1:8083/webhook",
            ),
            ("postgres://a:b/c?d@host:x", "***"),
        ] {
            assert_eq!(masked_url(url), shown);
        }
    }

    #[test]
    fn services_reach_a_listener_on_all_addresses_on_the_loopback() {
        let mut config = Config::default();
        config.listen.payments = "0.0.0.0:8083".parse().expect("an address");
        config.listen.bank = "[::]:8086".parse().expect("an address");
        let config = config.with_derived_settings();
        assert_eq!(config.bank.webhook_url, "http://127.0.0.1:8083/webhook");
        assert_eq!(config.payments.bank_url, "http://[::1]:8086");
        assert_eq!(config.bank.listen, config.listen.bank, "the listener stays");
    }

    // rows: R022
    #[test]
    fn r022_receivers_of_alerts_are_settings_and_are_masked() {
        let key = "0123456789abcdef";
        let mut settings: Table = toml::from_str(
            "[alerts]\nslack_webhook_url = \"https://old.example/\"\npagerduty_api_key = \"k\"\n",
        )
        .expect("TOML");
        // The environment outranks the file; a blank variable is unset.
        let variables = |name: &str| match name {
            "SLACK_WEBHOOK_URL" => Some(OsString::from("https://hooks.example/T0/B0/secret")),
            _ => Some(OsString::from(" ")),
        };
        set_alerts(&mut settings, variables).expect("set");
        set(&mut settings, "alerts__pagerduty_api_key", key).expect("set");
        let config: Config = settings.try_into().expect("settings");
        let slack = config.alerts.slack_webhook_url.as_deref();
        assert_eq!(slack, Some("https://hooks.example/T0/B0/secret"));
        assert_eq!(config.alerts.pagerduty_api_key.as_deref(), Some(key));

        let expected = payments::AlertSinks::new(slack.map(str::to_owned), Some(key.to_owned()));
        assert!(config.alerts.sinks() == expected, "the receivers are used");
        assert!(Alerts::default().sinks() == payments::AlertSinks::default());

        let masked = config.masked().expect("shown");
        assert_eq!(masked["alerts"]["slack_webhook_url"].as_str(), Some("***"));
        for shown in [masked.to_string(), format!("{config:?}")] {
            assert!(!shown.contains("hooks.example"), "{shown}");
            assert!(!shown.contains(key), "{shown}");
        }
    }

    // rows: R022
    #[test]
    fn r022_a_receiver_of_digits_is_text() {
        for (text, expected) in [
            ("0123456789", "0123456789"),
            ("\"12\"", "12"),
            ("1e5", "1e5"),
        ] {
            let mut settings = Table::new();
            set(&mut settings, "alerts__pagerduty_api_key", text).expect("set");
            let config: Config = settings.try_into().expect("settings");
            let key = config.alerts.pagerduty_api_key.as_deref();
            assert_eq!(key, Some(expected));
        }
    }

    // rows: R022
    #[test]
    fn r022_slack_needs_an_http_address_and_the_refusal_does_not_show_it() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        let load = |url: &str| {
            let text = format!("[alerts]\nslack_webhook_url = \"{url}\"\n");
            std::fs::write(&file, text).expect("written");
            Config::load(Some(file.as_path()), Some(folder.path()))
        };
        for url in [
            "hooks.example/s3cret",
            "ftp://hooks.example/s3cret",
            "s3cret",
        ] {
            let error = format!("{:#}", load(url).expect_err(url));
            assert_eq!(
                error,
                "configuration: alerts.slack_webhook_url is not an http(s) URL"
            );
        }
        for url in ["https://hooks.example/T0", "http://127.0.0.1:1/", " "] {
            assert!(load(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn an_error_in_a_file_has_its_position_and_no_secret() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        for (text, position, expected) in [
            (
                "[alerts]\nslack_url = \"4711\"\n",
                Some((2, 1)),
                "slack_url",
            ),
            (
                "[alerts]\npagerduty_api_key = \"4711\n[log]\n",
                None,
                "string",
            ),
            (
                "[alerts]\npagerduty_api_key = 4711\n",
                Some((2, 21)),
                "invalid type, expected a string",
            ),
            (
                "alerts = { pagerduty_api_key = 4711 }\n",
                Some((1, 32)),
                "string",
            ),
            ("# Ключ\nalerts = \"4711\"\n", Some((2, 10)), "invalid type"),
            (
                "[ledger]\nurls = \"postgres://a:4711@db\"\n",
                Some((2, 1)),
                "urls",
            ),
            (
                "[ledger]\nurl = \"postgres://a:4711@db\n[log]\n",
                None,
                "string",
            ),
            (
                "ledger = \"postgres://a:4711@db\"\n",
                Some((1, 10)),
                "invalid type",
            ),
        ] {
            std::fs::write(&file, text).expect("written");
            let error = Config::load(Some(file.as_path()), None).expect_err(text);
            let shown = format!("{error:#} {error:?}");
            // The file's path may contain the digits.
            let shown = shown.replace(&file.display().to_string(), "");
            assert!(!shown.contains("4711"), "{shown}");
            assert!(shown.contains(expected), "{shown}");
            let by_toml = toml::from_str::<Config>(text).expect_err(text).to_string();
            let by_toml = by_toml.lines().next().expect("a line");
            let place = by_toml
                .strip_prefix("TOML parse error at ")
                .expect("a place");
            assert!(shown.contains(&format!(": {place}: ")), "{place}: {shown}");
            if let Some((line, column)) = position {
                assert_eq!(place, format!("line {line}, column {column}"), "{text}");
            }
        }
    }

    #[test]
    fn an_error_in_the_environment_names_the_setting_and_has_no_secret() {
        let mut settings = Table::new();
        let text = "{ pagerduty_api_key = 4711 }";
        set(&mut settings, "alerts", text).expect("set");
        let error = settings.try_into::<Config>().expect_err("a number");
        let shown = merged(&error).to_string();
        assert!(!shown.contains("4711"), "{shown}");
        assert!(shown.contains("invalid type, expected a string"), "{shown}");
        assert!(shown.contains("pagerduty_api_key"), "{shown}");
    }

    #[test]
    fn the_threads_of_the_trading_path_are_set_by_name_or_by_the_machine() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        let load = |text: &str| {
            std::fs::write(&file, text).expect("written");
            Config::load(Some(file.as_path()), Some(folder.path()))
        };
        for (name, layout) in [
            ("fused", Layout::Fused),
            ("shared", Layout::Shared),
            ("pinned", Layout::Pinned),
        ] {
            let text = format!(
                "[trading]\nlayout = \"{name}\"\ncore = 1\njournal_core = 2\nspin_us = 7\n\
                 grace_ms = 500\norders_per_s = 300000\n"
            );
            let settings = load(&text).expect("loaded").trading.settings(folder.path());
            assert_eq!(settings.layout, layout);
            assert_eq!((settings.core, settings.journal_core), (Some(1), Some(2)));
            assert_eq!(settings.spin_us, 7);
            assert_eq!(settings.grace_ms, 500);
            assert_eq!(settings.pending_bytes_max, 300_000 * 192);
        }
        let settings = load("").expect("loaded").trading.settings(folder.path());
        assert_eq!(settings.grace_ms, 10_000);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(settings.layout, Layout::for_cores(cores));
        for wrong in ["layout = \"other\"", "orders_per_s = 10000001"] {
            assert!(load(&format!("[trading]\n{wrong}\n")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_environment_setting_is_a_toml_value_or_text() {
        let mut settings = toml::from_str("[log]\nfilter = \"warn\"\n").expect("TOML");
        for (name, text) in [
            ("log__filter", "ledger=debug,info"),
            ("snapshots__enabled", "false"),
            ("listen__all", "[::1]:9080"),
            ("market__sweep_interval_ms", "100"),
        ] {
            set(&mut settings, name, text).expect(name);
        }
        let config: Config = settings.clone().try_into().expect("settings");
        assert_eq!(config.log.filter, "ledger=debug,info");
        assert!(!config.snapshots.enabled);
        assert_eq!(config.listen.all.port(), 9080);
        assert_eq!(config.market.sweep_interval_ms, 100);
        assert_eq!(config.listen.ledger, Listen::default().ledger);
        set(&mut settings, "ledger__urls", "a").expect("set");
        let error = settings
            .clone()
            .try_into::<Config>()
            .expect_err("no such name");
        assert!(error.to_string().contains("urls"), "{error}");
        set(&mut settings, "data_dir", "data").expect("set");
        assert!(set(&mut settings, "data_dir__x", "1").is_err());
    }

    #[test]
    fn bounds_of_the_market_are_set_one_by_one() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        let load = |text: &str| {
            std::fs::write(&file, text).expect("written");
            Config::load(Some(file.as_path()), Some(folder.path()))
        };
        let set = load("[trading.bounds]\nsettlement = 50000000\n").expect("loaded");
        let expected = sequencer::Bounds {
            settlement: 50_000_000,
            ..sequencer::Bounds::default()
        };
        assert_eq!(set.trading.bounds, expected);
        let error = load("[trading.bounds]\ntrades = 100\n").expect_err("too small");
        assert!(
            format!("{error:#}").contains("trading.bounds.trades is 100"),
            "{error:#}"
        );
    }

    #[test]
    fn a_bad_file_is_refused_with_its_line() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        std::fs::write(&file, "[trading]\nspin = 1\n").expect("written");
        let error = Config::load(Some(&file), None).expect_err("no such name");
        assert!(format!("{error:#}").contains("line 2"), "{error:#}");
        assert!(Config::load(Some(&folder.path().join("none.toml")), None).is_err());
    }

    #[test]
    fn the_whole_journal_is_retained_by_default() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        let load = |text: &str| {
            std::fs::write(&file, text).expect("written");
            Config::load(Some(file.as_path()), Some(folder.path()))
        };
        let whole = load("").expect("loaded");
        assert!(whole.retention(Vec::new()).is_none());
        let kept = load("[journal]\nretain_bytes = 1000000\n").expect("loaded");
        let followers = vec![sequencer::Durable::new("history")];
        let kept = kept.retention(followers).expect("set");
        assert_eq!((kept.bytes, kept.followers.len()), (1_000_000, 1));
        let events =
            "[events]\nretain_days = 7\nretain_records = 300000\nkafka_retention_days = 7\n";
        let events = load(events).expect("loaded").events;
        let age = std::time::Duration::from_secs(7 * 86_400);
        assert_eq!(events.retention().age, Some(age));
        assert_eq!(events.retention().records, Some(300_000));
        assert_eq!(events.kafka_retention(), Some(age));
        let all = load("[events]\nretain_days = 0\n").expect("loaded").events;
        assert_eq!(all.retention(), events::Retention::default());
        assert_eq!(all.kafka_retention(), None);
        for name in ["retain_days", "kafka_retention_days"] {
            let error = load(&format!("[events]\n{name} = 6\n")).expect_err("too short");
            assert!(error.to_string().contains(name), "{error}");
        }
        let text = "[journal]\nretain_bytes = 1\n[snapshots]\nenabled = false\n";
        let error = load(text).expect_err("nothing to start from").to_string();
        assert!(error.contains("snapshots.enabled"), "{error}");
    }
}
