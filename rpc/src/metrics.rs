//! The process-wide metrics recorder and its text form (T39, R262).

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// Interval at which recorded samples are added to their buckets. Samples are kept until then, so
/// without it memory would grow with the calls if no scraper reads the metrics.
const UPKEEP: Duration = Duration::from_secs(5);

/// Renders `/metrics`.
#[derive(Clone)]
pub struct MetricsHandle(PrometheusHandle);

impl MetricsHandle {
    /// Prometheus text format 0.0.4, names exactly as recorded (T39).
    pub fn render(&self) -> String {
        if let Some(bytes) = resident_bytes() {
            ::metrics::gauge!("process_resident_memory_bytes").set(bytes);
        }
        self.0.run_upkeep();
        self.0.render()
    }
}

/// Resident memory of the process; `None` if the system does not report it.
fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1_024.0)
}

/// Installs the process-wide metrics recorder; later calls return the same handle.
pub fn metrics_init() -> MetricsHandle {
    static HANDLE: OnceLock<MetricsHandle> = OnceLock::new();
    HANDLE
        .get_or_init(|| {
            let seconds = [
                0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
                10.0,
            ];
            let recorder = PrometheusBuilder::new()
                .set_buckets(&seconds)
                .expect("the bucket list is not empty")
                .build_recorder();
            let handle = MetricsHandle(recorder.handle());
            if ::metrics::set_global_recorder(recorder).is_err() {
                tracing::error!("another metrics recorder is installed; /metrics will be empty");
            }
            keep_up(handle.clone());
            handle
        })
        .clone()
}

/// Starts the thread that adds samples to their buckets, for the life of the process.
fn keep_up(handle: MetricsHandle) {
    let thread = std::thread::Builder::new().name("metrics".to_owned());
    let started = thread.spawn(move || {
        loop {
            std::thread::sleep(UPKEEP);
            handle.0.run_upkeep();
        }
    });
    if let Err(error) = started {
        tracing::error!(%error, "samples of histograms are kept until they are scraped");
    }
}
