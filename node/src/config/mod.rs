//! Configuration layers: defaults, TOML file, `PLATFORM_*` environment variables
//! (`PLATFORM_LISTEN__ALL=127.0.0.1:9080`), command line.

mod alerts;
mod event_log;
mod listen;
mod secrets;
mod trading;

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

pub use alerts::Alerts;
pub use event_log::Events;
pub use listen::{Listen, reachable};
pub use trading::{Disk, Journal, Snapshots, Trading};

use alerts::set_alerts;
use secrets::{MASK, located, mask, merged};
use trading::{BOUND_MIN, ORDERS_MAX, SEGMENT_BYTES_MIN};

/// Default file, read if it exists.
const FILE: &str = "platform.toml";
const PREFIX: &str = "PLATFORM_";

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
    use super::*;

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
    fn a_bad_file_is_refused_with_its_line() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        std::fs::write(&file, "[trading]\nspin = 1\n").expect("written");
        let error = Config::load(Some(&file), None).expect_err("no such name");
        assert!(format!("{error:#}").contains("line 2"), "{error:#}");
        assert!(Config::load(Some(&folder.path().join("none.toml")), None).is_err());
    }
}
