//! Follows the journal at the commit position and feeds the session streams; reads the gauges off the books.

use std::sync::Arc;
use std::time::Duration;

use rpc::Health;
use sequencer::ReadError;
use tokio_util::sync::CancellationToken;
use types::Side;

use crate::follower::Follower;
use crate::market::Market;

/// Records told under one lock.
const BATCH_RECORDS_MAX: usize = 256;
/// How often the trading path is looked at: two flags.
const PATH_INTERVAL: Duration = Duration::from_millis(250);

/// Runs until shutdown or until the journal cannot be read.
pub async fn run(
    market: Arc<Market>,
    mut reader: Follower,
    shutdown: CancellationToken,
) -> Result<(), ReadError> {
    let mut records = Vec::with_capacity(BATCH_RECORDS_MAX);
    loop {
        let first = tokio::select! {
            record = reader.next() => record?,
            () = shutdown.cancelled() => return Ok(()),
        };
        records.push(first);
        while records.len() < BATCH_RECORDS_MAX {
            match reader.try_next()? {
                Some(record) => records.push(record),
                None => break,
            }
        }
        market
            .streams
            .apply(&records, |spec| market.note_spec(spec));
        records.clear();
        // A long catch-up must not keep the runtime to itself.
        tokio::task::yield_now().await;
    }
}

/// Says in the health read whether orders are taken at all (D41).
pub async fn watch_path(market: Arc<Market>, health: Health, shutdown: CancellationToken) {
    const PART: &str = "trading_path";
    loop {
        let failure = market.commit.failure().map(|failure| failure.to_string());
        let closed = (!market.port.is_open()).then(|| "no more requests are taken".to_owned());
        let stalled = market.commit.stalled().map(|reason| reason.to_string());
        match failure.or(closed).or(stalled) {
            Some(reason) => health.set_failing(PART, reason),
            None => health.set_ok(PART),
        }
        tokio::select! {
            () = tokio::time::sleep(PATH_INTERVAL) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Levels a side of every book, as GetOrderBook counts them (R276).
pub async fn gauges(market: Arc<Market>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(market.config.gauge_interval_ms.max(10));
    loop {
        let depths = market
            .inspect(|core| {
                let levels = |book: &engine::Book, side| book.depth(side).count();
                let lines = core.books().map(|book| {
                    let (bids, asks) = (levels(book, Side::Buy), levels(book, Side::Sell));
                    (book.spec().id.to_string(), bids, asks)
                });
                lines.collect::<Vec<_>>()
            })
            .await;
        for (instrument_id, bids, asks) in depths.unwrap_or_default() {
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
            () = tokio::time::sleep(interval) => {}
            () = shutdown.cancelled() => return,
        }
    }
}
