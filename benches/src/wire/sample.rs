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
/// Minimum share of the flow's seconds that have a sample.
const SAMPLED_MIN: f64 = 0.9;

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
    fn of(metrics: &BTreeMap<String, f64>) -> anyhow::Result<Self> {
        let value = |name: &str| value(metrics, name);
        // Absent until its first change.
        let or_zero = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
        Ok(Self {
            at: Instant::now(),
            assigned: value("journal_assigned_sequence")?,
            replica_lag: value("replica_lag_records")?,
            replica_lag_max: value("replica_lag_records_max")?,
            history_lag: value("market_history_lag_records")?,
            settlement_lag: value("settlement_lag_records")?,
            trades_pending: value("settlement_trades_pending")?,
            trades_final: or_zero("trades_settled_total"),
            stage: or_zero("market_intake_stage"),
            resident_bytes: value("process_resident_memory_bytes")?,
            page_faults: value("hot_thread_page_faults_total")?,
        })
    }
}

/// A missing metric is an error, since a lag of 0 would meet each goal.
fn value(metrics: &BTreeMap<String, f64>, name: &str) -> anyhow::Result<f64> {
    let value = metrics.get(name).copied();
    value.with_context(|| format!("the platform's metrics have no {name}"))
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

impl Samples {
    /// Checks that enough seconds of a flow of `flow_s` seconds have a sample.
    fn check_count(&self, flow_s: f64) -> anyhow::Result<()> {
        let count = self.seconds.len();
        // Rates need two.
        let min = (flow_s * SAMPLED_MIN).max(2.0);
        anyhow::ensure!(
            count as f64 >= min,
            "{count} samples of the metrics in {flow_s:.1} s, the minimum is {min:.1}"
        );
        Ok(())
    }
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

    /// Waits for the last sample, at most a little longer than [`GAUGE_AGE_MAX`]. The flow has
    /// taken `flow_s` seconds.
    ///
    /// # Errors
    /// A metric is missing, more than a tenth of the seconds have no sample, or the platform did
    /// not answer at the end of the flow or after it.
    pub fn finish(self, flow_s: f64) -> anyhow::Result<Samples> {
        self.flow_ended();
        let samples = self.thread.join();
        let samples = samples.map_err(|_| anyhow::anyhow!("the sampling thread panicked"))??;
        samples.check_count(flow_s)?;
        Ok(samples)
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
        if let Ok(metrics) = platform.metrics() {
            seconds.push(Sample::of(&metrics)?);
        }
        // After a late answer the next sample follows at once, but no two in its place.
        due = (due + EVERY).max(Instant::now());
    }
    let end = Sample::of(&platform.metrics()?).context("at the end of the flow")?;
    std::thread::sleep(GAUGE_AGE_MAX);
    let after = Sample::of(&platform.metrics()?).context("after the flow")?;
    Ok(Samples {
        seconds,
        end,
        after,
    })
}

/// Records that settlement and history have not processed, as of the last update of the gauges.
///
/// # Errors
/// The platform does not answer, or a gauge is missing.
pub fn followers_lag(platform: &PlatformClient) -> anyhow::Result<f64> {
    lag_of(&platform.metrics()?)
}

fn lag_of(metrics: &BTreeMap<String, f64>) -> anyhow::Result<f64> {
    let settlement = value(metrics, "settlement_lag_records")?;
    Ok(settlement + value(metrics, "market_history_lag_records")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metrics of a platform that has traded nothing yet.
    const PRESENT: [&str; 8] = [
        "journal_assigned_sequence",
        "replica_lag_records",
        "replica_lag_records_max",
        "market_history_lag_records",
        "settlement_lag_records",
        "settlement_trades_pending",
        "process_resident_memory_bytes",
        "hot_thread_page_faults_total",
    ];

    fn metrics() -> BTreeMap<String, f64> {
        PRESENT.map(|name| (name.to_owned(), 7.0)).into()
    }

    #[test]
    fn a_missing_metric_is_an_error_and_no_zero() {
        let sample = Sample::of(&metrics()).expect("all are present");
        assert_eq!((sample.stage, sample.trades_final), (0.0, 0.0));
        assert_eq!(lag_of(&metrics()).expect("both are present"), 14.0);
        for name in PRESENT {
            let mut metrics = metrics();
            metrics.remove(name);
            let error = Sample::of(&metrics).expect_err(name).to_string();
            assert!(error.contains(name), "{error}");
        }
        let mut metrics = metrics();
        metrics.remove("market_history_lag_records");
        assert!(lag_of(&metrics).is_err());
    }

    #[test]
    fn a_run_with_too_few_samples_is_an_error() {
        let sample = Sample::of(&metrics()).expect("all are present");
        let samples = Samples {
            seconds: vec![sample; 54],
            end: sample,
            after: sample,
        };
        samples.check_count(60.0).expect("nine tenths");
        let error = samples.check_count(60.1).expect_err("fewer").to_string();
        assert!(error.contains("54 samples"), "{error}");
    }
}
