//! Health checks and gauges of the trading path.

use std::sync::Arc;
use std::time::Duration;

use rpc::Health;
use sequencer::Stage;
use tokio_util::sync::CancellationToken;
use types::{Sequence, Side};

use crate::market::Market;

/// Interval between checks of the trading path. A check only reads state in memory.
const PATH_INTERVAL: Duration = Duration::from_millis(250);
/// Gauge intervals that `replica_lag_records_max` covers, a minute by default: a scrape per minute
/// misses no peak.
const LAG_INTERVALS: usize = 60;

/// Maximum of the last [`LAG_INTERVALS`] values.
struct RecentMaximum {
    values: [u64; LAG_INTERVALS],
    next: usize,
}

impl RecentMaximum {
    fn new() -> Self {
        Self {
            values: [0; LAG_INTERVALS],
            next: 0,
        }
    }

    /// Adds a value in place of the oldest one; returns the maximum.
    fn add(&mut self, value: u64) -> u64 {
        self.values[self.next] = value;
        self.next = (self.next + 1) % LAG_INTERVALS;
        self.values.into_iter().fold(0, u64::max)
    }
}

/// Shows in the health read what the replica and its followers wait for.
pub async fn watch_replica(market: Arc<Market>, health: Health, shutdown: CancellationToken) {
    let mut troubles = market.replica.troubles();
    let mut failing: Vec<&'static str> = Vec::new();
    loop {
        let now = troubles.borrow_and_update().clone();
        for (part, reason) in &now {
            health.set_failing(part, reason);
        }
        for part in failing.iter().filter(|part| !now.contains_key(*part)) {
            health.set_ok(part);
        }
        failing = now.into_keys().collect();
        tokio::select! {
            changed = troubles.changed() => if changed.is_err() { return },
            () = shutdown.cancelled() => return,
        }
    }
}

/// Shows in the health read whether orders are accepted at all (D41), and the state of the clock.
pub async fn watch_path(market: Arc<Market>, health: Health, shutdown: CancellationToken) {
    const PART: &str = "trading_path";
    const CLOCK: &str = "clock";
    let mut last_stage = Stage::Open;
    loop {
        let failure = market.commit.failure().map(|failure| failure.to_string());
        let closed = (!market.port.is_open()).then(|| "no more requests are accepted".to_owned());
        let stalled = market.commit.stalled().map(|reason| reason.to_string());
        let stage = market.port.stage();
        if stage != last_stage {
            tracing::warn!(%stage, "order intake stage changed");
            metrics::gauge!("market_intake_stage").set(f64::from(stage.level()));
            last_stage = stage;
        }
        // Earlier stages still accept requests, so they do not fail the health read.
        let lags = matches!(stage, Stage::Closed(_)).then(|| stage.to_string());
        health.set(
            CLOCK,
            market.port.clock().state().operator_message().as_deref(),
        );
        match failure.or(closed).or(stalled).or(lags) {
            Some(reason) => health.set_failing(PART, reason),
            None => health.set_ok(PART),
        }
        tokio::select! {
            () = tokio::time::sleep(PATH_INTERVAL) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Sets the gauges until shutdown: levels per side of every book, as GetOrderBook counts them
/// (R276), the last assigned sequence, the lags of replica, history and settlement, and page faults
/// of the hot thread.
///
/// `replica_lag_records` is a sample. `replica_lag_records_max` is the highest lag of the last
/// [`LAG_INTERVALS`] intervals, which the replica keeps itself.
pub async fn gauges(market: Arc<Market>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(market.config.gauge_interval_ms.max(10));
    let mut lag_max = RecentMaximum::new();
    loop {
        let next = tokio::time::Instant::now() + interval;
        let lag = |position: Sequence| {
            let assigned = market.replica.assigned();
            assigned.get().saturating_sub(position.get()) as f64
        };
        metrics::gauge!("journal_assigned_sequence").set(market.replica.assigned().get() as f64);
        metrics::gauge!("replica_lag_records").set(lag(market.replica.position()));
        let highest = lag_max.add(market.replica.take_lag_max());
        metrics::gauge!("replica_lag_records_max").set(highest as f64);
        metrics::gauge!("market_history_lag_records").set(lag(market.projection.position()));
        metrics::gauge!("settlement_lag_records").set(market.replica.settlement_lag() as f64);
        if let Some(faults) = market.replica.hot_stats().page_faults() {
            metrics::counter!("hot_thread_page_faults_total").absolute(faults);
        }
        let depths = market.replica.read_on_thread(|state| {
            let lines = state.core().books().map(|book| {
                let levels = |side| book.depth(side).count();
                (
                    book.spec().id.to_string(),
                    levels(Side::Buy),
                    levels(Side::Sell),
                )
            });
            lines.collect::<Vec<_>>()
        });
        let depths = tokio::select! {
            depths = depths => depths.unwrap_or_default(),
            // The lags are reported while the replica hangs.
            () = tokio::time::sleep_until(next) => Vec::new(),
            () = shutdown.cancelled() => return,
        };
        for (instrument_id, bids, asks) in depths {
            for (side, levels) in [(Side::Buy, bids), (Side::Sell, asks)] {
                metrics::gauge!(
                    "order_book_depth",
                    "instrument_id" => instrument_id.clone(),
                    "side" => side.as_str()
                )
                .set(levels as f64);
            }
        }
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_the_maximum_until_its_interval_is_too_old() {
        let mut maximum = RecentMaximum::new();
        assert_eq!(maximum.add(7), 7);
        for _ in 1..LAG_INTERVALS {
            assert_eq!(maximum.add(2), 7);
        }
        assert_eq!(maximum.add(3), 3);
    }
}
