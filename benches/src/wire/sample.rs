//! Samples the platform under load: one call per second, from a separate thread.

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
    pub history_lag: f64,
    /// Records whose postings are not in the ledger.
    pub settlement_lag: f64,
    /// Trades with postings in the ledger that are not final.
    pub trades_pending: f64,
    /// Final trades since the platform's start.
    pub trades_final: f64,
    /// 0 = open, 1 to 3 = followers of the journal lag.
    pub stage: f64,
    pub resident_bytes: f64,
    /// Page faults of the hot thread since the platform's start.
    pub page_faults: f64,
}

/// Samples until it is stopped.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    /// Samples the platform with this JSON port.
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

    /// Stops and returns the samples; those without an answer of the platform are missing.
    pub fn stop(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

fn take_sample(platform: &PlatformClient) -> Option<Sample> {
    let metrics = platform.metrics().ok()?;
    let value = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
    Some(Sample {
        at: Instant::now(),
        replica_lag: value("replica_lag_records"),
        history_lag: value("market_history_lag_records"),
        settlement_lag: value("settlement_lag_records"),
        trades_pending: value("settlement_trades_pending"),
        trades_final: value("trades_settled_total"),
        stage: value("market_intake_stage"),
        resident_bytes: value("process_resident_memory_bytes"),
        page_faults: value("hot_thread_page_faults_total"),
    })
}
