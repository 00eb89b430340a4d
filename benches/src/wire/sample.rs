//! Samples the metrics of the platform once per second on a separate thread.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::setup::PlatformClient;

const EVERY: Duration = Duration::from_secs(1);
/// Maximum age of the platform's gauges, which are set once per second.
pub const GAUGE_AGE_MAX: Duration = Duration::from_millis(1_500);

/// One sample. Lags are in records.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub at: Instant,
    /// Last sequence that the hot thread has assigned.
    pub assigned: f64,
    pub replica_lag: f64,
    /// Highest lag of the replica in the last minute.
    pub replica_lag_max: f64,
    pub history_lag: f64,
    /// Records whose postings are not in the ledger.
    pub settlement_lag: f64,
    /// Trades with postings in the ledger that are not final.
    pub trades_pending: f64,
    /// Final trades since the platform's start.
    pub trades_final: f64,
    /// `market_intake_stage`: 0 open, 1 warns, 2 throttles, 3 refuses new orders.
    pub stage: f64,
    pub resident_bytes: f64,
    /// Page faults of the hot thread since the platform's start.
    pub page_faults: f64,
}

impl Sample {
    fn of(metrics: &BTreeMap<String, f64>) -> Self {
        let value = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
        Self {
            at: Instant::now(),
            assigned: value("journal_assigned_sequence"),
            replica_lag: value("replica_lag_records"),
            replica_lag_max: value("replica_lag_records_max"),
            history_lag: value("market_history_lag_records"),
            settlement_lag: value("settlement_lag_records"),
            trades_pending: value("settlement_trades_pending"),
            trades_final: value("trades_settled_total"),
            stage: value("market_intake_stage"),
            resident_bytes: value("process_resident_memory_bytes"),
            page_faults: value("hot_thread_page_faults_total"),
        }
    }
}

/// Samples of a flow.
#[derive(Clone, Debug)]
pub struct Samples {
    /// One per second of the flow. A sample that the platform did not answer is missing.
    pub seconds: Vec<Sample>,
    /// Read when the flow ended.
    pub end: Sample,
    /// Read after the gauges include the end of the flow.
    pub after: Sample,
}

/// A running sampling thread.
pub struct Sampler {
    flow_end: SyncSender<()>,
    thread: JoinHandle<anyhow::Result<Samples>>,
}

impl Sampler {
    /// Starts to sample the platform with this RPC port.
    pub fn start(address: SocketAddr) -> Self {
        let (flow_end, ended) = sync_channel(1);
        let thread = std::thread::spawn(move || collect(&PlatformClient { address }, &ended));
        Self { flow_end, thread }
    }

    /// Ends the samples of the flow. Does not wait.
    pub fn flow_ended(&self) {
        // If the thread has failed, `finish` returns its error.
        let _ = self.flow_end.try_send(());
    }

    /// Waits for the last sample, at most a little longer than [`GAUGE_AGE_MAX`].
    ///
    /// # Errors
    /// The platform did not answer at the end of the flow or after it.
    pub fn finish(self) -> anyhow::Result<Samples> {
        self.flow_ended();
        let samples = self.thread.join();
        samples.map_err(|_| anyhow::anyhow!("the sampling thread panicked"))?
    }
}

fn collect(platform: &PlatformClient, ended: &Receiver<()>) -> anyhow::Result<Samples> {
    let mut seconds = Vec::new();
    let mut due = Instant::now() + EVERY;
    loop {
        let wait = due.saturating_duration_since(Instant::now());
        // The sender is dropped if the flow fails.
        let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(wait) else {
            break;
        };
        seconds.extend(take_sample(platform).ok());
        // After a late answer the next sample follows at once, but no two in its place.
        due = (due + EVERY).max(Instant::now());
    }
    let end = take_sample(platform).context("metrics at the end of the flow")?;
    std::thread::sleep(GAUGE_AGE_MAX);
    let after = take_sample(platform).context("metrics after the flow")?;
    Ok(Samples {
        seconds,
        end,
        after,
    })
}

/// Records that settlement and history have not processed, as of the last update of the gauges.
///
/// # Errors
/// The platform does not answer.
pub fn followers_lag(platform: &PlatformClient) -> anyhow::Result<f64> {
    let metrics = platform.metrics()?;
    let lags = ["settlement_lag_records", "market_history_lag_records"];
    Ok(lags.iter().filter_map(|name| metrics.get(*name)).sum())
}

fn take_sample(platform: &PlatformClient) -> anyhow::Result<Sample> {
    Ok(Sample::of(&platform.metrics()?))
}
