//! Follows the journal at the commit position and feeds the session streams; reads the gauges off the books.

use std::sync::Arc;
use std::time::Duration;

use sequencer::{ReadError, Reader};
use tokio_util::sync::CancellationToken;
use types::Side;

use crate::market::Market;

/// Records told under one lock.
const BATCH_RECORDS_MAX: usize = 256;

/// Runs until shutdown or until the journal cannot be read.
pub async fn run(
    market: Arc<Market>,
    mut reader: Reader,
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
