//! How far settlement is: published to the sequencer (backlog), to the gateway (status of trades, funding) and to whoever waits for the end.
//!
//! `folded >= settled >= finalized`: read from the journal, in the ledger, final on chain and in the ledger. Each means "everything up to here".

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use hdrhistogram::Histogram;
use sequencer::Backlog;
use tokio::sync::watch;
use types::Sequence;

/// Longest lag that is told apart, in microseconds.
const LAG_US_MAX: u64 = 3_600_000_000;

/// Positions in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Progress {
    #[serde(serialize_with = "number")]
    pub folded: Sequence,
    #[serde(serialize_with = "number")]
    pub settled: Sequence,
    #[serde(serialize_with = "number")]
    pub finalized: Sequence,
}

fn number<S: serde::Serializer>(sequence: &Sequence, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(sequence.0)
}

/// Time from execution to finality, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Lag {
    pub p50: u64,
    pub p99: u64,
    pub max: u64,
}

/// What settlement says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    pub progress: Progress,
    pub trades_pending: u64,
    pub trades_settled: u64,
    pub trades_failed: u64,
    pub batches_pending: u64,
    pub settlement_lag_ms: Lag,
    /// What somebody has to look at, because waiting does not mend it; empty while all is well.
    pub halted: String,
}

/// What the market has to do about a user whose money differs between journal and ledger (`design.md` 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspension {
    /// No more orders of his; open ones are cancelled.
    Differs,
    /// Journal and ledger agree again: he may go on.
    Agrees,
}

/// What became of a trade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TradeStatus {
    Pending,
    Settled,
    Failed,
}

struct Flight {
    /// Everything up to here is final once all earlier flights are.
    floor: Sequence,
    trades: u64,
}

struct Inner {
    flights: BTreeMap<i64, Flight>,
    open_trades: u64,
    trades_folded: u64,
    bust: HashSet<String>,
    lag_us: Histogram<u64>,
    given_up: bool,
}

/// Shared by the workers and the handle.
pub struct Tracker {
    inner: Mutex<Inner>,
    progress: watch::Sender<Progress>,
    backlog: Arc<Backlog>,
}

impl Tracker {
    pub fn new(backlog: Arc<Backlog>, bust: Vec<String>) -> Self {
        let lag_us =
            Histogram::new_with_bounds(1, LAG_US_MAX, 2).expect("the bounds are constants");
        Self {
            inner: Mutex::new(Inner {
                flights: BTreeMap::new(),
                open_trades: 0,
                trades_folded: 0,
                bust: bust.into_iter().collect(),
                lag_us,
                given_up: false,
            }),
            progress: watch::Sender::new(Progress::default()),
            backlog,
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no code panics while it counts")
    }

    /// A batch is on its way.
    pub fn take_off(&self, number: i64, floor: Sequence, trades: u32) {
        let flight = Flight {
            floor,
            trades: trades.into(),
        };
        self.inner().flights.insert(number, flight);
        self.publish(|_| {});
    }

    /// A batch is final. `lags_us` of the trades that were settled.
    pub fn land(&self, number: i64, lags_us: impl IntoIterator<Item = u64>, bust: &[String]) {
        {
            let mut inner = self.inner();
            inner.flights.remove(&number);
            inner.bust.extend(bust.iter().cloned());
            for lag_us in lags_us {
                inner.lag_us.saturating_record(lag_us.clamp(1, LAG_US_MAX));
            }
        }
        self.publish(|_| {});
    }

    /// Batches that are not final.
    pub fn flights(&self) -> usize {
        self.inner().flights.len()
    }

    /// What the poster has read and posted.
    pub fn moved(
        &self,
        folded: Sequence,
        settled: Sequence,
        trades_folded: u64,
        open_trades: usize,
        records_behind: u64,
    ) {
        {
            let mut inner = self.inner();
            inner.trades_folded = trades_folded;
            inner.open_trades = open_trades as u64;
        }
        self.behind(records_behind);
        self.publish(|progress| {
            progress.folded = folded;
            progress.settled = settled;
        });
    }

    /// Records that have a sequence and are not applied here yet.
    pub fn behind(&self, records: u64) {
        // Under the lock, so that nothing is written over the end.
        if !self.inner().given_up {
            self.backlog
                .pending_records
                .store(records, Ordering::Relaxed);
        }
    }

    /// Nothing is settled any more until the next start: no more orders are to be taken.
    pub fn give_up(&self) {
        let mut inner = self.inner();
        inner.given_up = true;
        self.backlog
            .pending_records
            .store(u64::MAX, Ordering::Relaxed);
    }

    fn publish(&self, change: impl FnOnce(&mut Progress)) {
        let inner = self.inner();
        let pending = inner.pending();
        let floor = inner.flights.values().map(|flight| flight.floor).min();
        self.backlog
            .pending_trades
            .store(pending, Ordering::Relaxed);
        // Under the lock, so that positions never go back.
        self.progress.send_if_modified(|progress| {
            let before = *progress;
            change(progress);
            let finalized = floor.map_or(progress.settled, |floor| floor.min(progress.settled));
            progress.finalized = progress.finalized.max(finalized);
            *progress != before
        });
        drop(inner);
        metrics::gauge!("settlement_trades_pending").set(pending as f64);
    }

    /// `halted`: what somebody has to look at.
    pub fn stats(&self, halted: String) -> Stats {
        let inner = self.inner();
        let pending = inner.pending();
        let failed = inner.bust.len() as u64;
        let ms = |us: u64| us.div_ceil(1_000);
        Stats {
            progress: *self.progress.borrow(),
            trades_pending: pending,
            trades_settled: inner.trades_folded.saturating_sub(pending + failed),
            trades_failed: failed,
            batches_pending: inner.flights.len() as u64,
            settlement_lag_ms: if inner.lag_us.is_empty() {
                Lag::default()
            } else {
                Lag {
                    p50: ms(inner.lag_us.value_at_quantile(0.5)),
                    p99: ms(inner.lag_us.value_at_quantile(0.99)),
                    max: ms(inner.lag_us.max()),
                }
            },
            halted,
        }
    }

    pub fn status(&self, sequence: Sequence, trade_id: &str) -> TradeStatus {
        if self.inner().bust.contains(trade_id) {
            TradeStatus::Failed
        } else if sequence <= self.progress.borrow().finalized {
            TradeStatus::Settled
        } else {
            TradeStatus::Pending
        }
    }

    pub fn watch(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }
}

impl Inner {
    fn pending(&self) -> u64 {
        self.open_trades
            + self
                .flights
                .values()
                .map(|flight| flight.trades)
                .sum::<u64>()
    }
}
