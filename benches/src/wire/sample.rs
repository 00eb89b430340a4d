//! Samples the metrics of the platform once per second on a separate thread.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::setup::PlatformClient;

const EVERY: Duration = Duration::from_secs(1);

/// One sample. Lags are in records.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub at: Instant,
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

/// A running sampling thread.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    /// Starts to sample the platform with this RPC port.
    pub fn start(address: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let platform = PlatformClient { address };
            let mut samples = Vec::new();
            while !is_stopped.load(Ordering::Relaxed) {
                std::thread::sleep(EVERY);
                samples.extend(take_sample(&platform));
            }
            samples
        });
        Self { stop, thread }
    }

    /// Stops and returns the samples. A sample that the platform did not answer is missing.
    pub fn stop(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
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

fn take_sample(platform: &PlatformClient) -> Option<Sample> {
    let metrics = platform.metrics().ok()?;
    let value = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
    Some(Sample {
        at: Instant::now(),
        replica_lag: value("replica_lag_records"),
        replica_lag_max: value("replica_lag_records_max"),
        history_lag: value("market_history_lag_records"),
        settlement_lag: value("settlement_lag_records"),
        trades_pending: value("settlement_trades_pending"),
        trades_final: value("trades_settled_total"),
        stage: value("market_intake_stage"),
        resident_bytes: value("process_resident_memory_bytes"),
        page_faults: value("hot_thread_page_faults_total"),
    })
}
