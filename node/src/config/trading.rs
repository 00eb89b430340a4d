//! Settings of the trading path: `[journal]`, `[disk]`, `[snapshots]` and `[trading]`.

use std::path::Path;

use serde::{Deserialize, Serialize};

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
pub(super) const SEGMENT_BYTES_MIN: u64 = 64 << 10;

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
pub(super) const ORDERS_MAX: u32 = 10_000_000;
/// Minimum of `trading.bounds`: this amount may be in flight at any time.
pub(super) const BOUND_MIN: u64 = 8_192;

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

#[cfg(test)]
mod tests {
    use sequencer::Layout;

    use crate::config::Config;

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
