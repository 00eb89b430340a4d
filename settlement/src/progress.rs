//! Settlement progress, published to the sequencer, the journal and waiting callers.
//!
//! The sequencer receives the backlog, the journal `Settled` and `Bust`.
//!
//! `folded >= settled >= finalized`. `folded`: applied from the journal. `settled`: in the ledger.
//! `finalized`: final on chain and in the ledger. Each position includes all earlier records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use hdrhistogram::Histogram;
use sequencer::Backlog;
use tokio::sync::watch;
use types::command::Bust;
use types::{Id128, Sequence};

/// Largest lag that the histogram resolves, in microseconds.
const LAG_US_MAX: u64 = 3_600_000_000;

/// Positions in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Progress {
    pub folded: Sequence,
    pub settled: Sequence,
    pub finalized: Sequence,
    /// Last record read that settlement did not journal itself.
    #[serde(skip)]
    pub others: Sequence,
    /// Number of bust trades since the first start of the store.
    #[serde(skip)]
    pub busts: u64,
    /// Number of final trades, at any journal position.
    #[serde(skip)]
    pub trades_final: u64,
}

impl Progress {
    /// `settled`, `finalized` and `trades_final` for a `Settled`. Settlement's own records do not
    /// move these positions; otherwise each `Settled` would cause the next one.
    pub fn reportable(&self) -> (Sequence, Sequence, u64) {
        (
            self.settled.min(self.others),
            self.finalized.min(self.others),
            self.trades_final,
        )
    }
}

/// Time from execution to finality, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Lag {
    pub p50: u64,
    pub p99: u64,
    pub max: u64,
}

/// Statistics of settlement.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    pub progress: Progress,
    pub trades_pending: u64,
    pub trades_settled: u64,
    pub trades_failed: u64,
    pub batches_pending: u64,
    pub settlement_lag_ms: Lag,
    /// Failures that need an operator; empty if there are none.
    pub halted: String,
}

/// Required market action for a user with a difference between journal and ledger (`design.md` 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspension {
    /// Block the user and cancel the open orders.
    Differs,
    /// Journal and ledger agree again: unblock the user.
    Agrees,
}

/// A batch that is not final.
struct InFlight {
    /// Records up to here are final once all earlier batches are.
    floor: Sequence,
    trades: u64,
}

impl InFlight {
    fn new(floor: Sequence, trades: u32) -> Self {
        let trades = trades.into();
        Self { floor, trades }
    }
}

struct Inner {
    in_flight: BTreeMap<i64, InFlight>,
    open_trades: u64,
    trades_folded: u64,
    bust: BTreeSet<Id128>,
    /// Bust trades not yet returned by [`Tracker::report`].
    unreported: Vec<Bust>,
    /// Own records journalled since the start and not yet read back.
    own_unread: i64,
    /// Last record applied; zero before the first start of the workers.
    applied: Sequence,
    /// A worker of this run has failed.
    has_failed: bool,
    lag_us: Histogram<u64>,
}

/// Positions and statistics of settlement, shared by the workers and the handle.
pub struct Tracker {
    inner: Mutex<Inner>,
    progress: watch::Sender<Progress>,
    /// Changes when a batch is complete.
    completed: watch::Sender<()>,
    backlog: Arc<Backlog>,
}

impl Tracker {
    /// `bust`: trades from earlier runs.
    pub fn new(backlog: Arc<Backlog>, bust: Vec<Bust>) -> Self {
        let progress = Progress {
            busts: bust.len() as u64,
            ..Progress::default()
        };
        let lag_us =
            Histogram::new_with_bounds(1, LAG_US_MAX, 2).expect("the bounds are constants");
        Self {
            inner: Mutex::new(Inner {
                in_flight: BTreeMap::new(),
                open_trades: 0,
                trades_folded: 0,
                bust: ids(&bust).collect(),
                unreported: bust,
                own_unread: 0,
                applied: Sequence::ZERO,
                has_failed: false,
                lag_us,
            }),
            progress: watch::Sender::new(progress),
            completed: watch::Sender::default(),
            backlog,
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner
            .lock()
            .expect("no code panics while it holds the lock")
    }

    /// Registers a batch as in flight.
    pub fn register(&self, number: i64, floor: Sequence, trades: u32) {
        let batch = InFlight::new(floor, trades);
        self.inner().in_flight.insert(number, batch);
        self.publish(|_| {});
    }

    /// Removes a final batch. `lags_us`: one per settled trade.
    pub fn complete(&self, number: i64, lags_us: impl IntoIterator<Item = u64>, bust: &[Bust]) {
        {
            let mut inner = self.inner();
            inner.in_flight.remove(&number);
            inner.bust.extend(ids(bust));
            inner.unreported.extend(bust);
            for lag_us in lags_us {
                inner.lag_us.saturating_record(lag_us.clamp(1, LAG_US_MAX));
            }
        }
        self.completed.send_modify(|_| {});
        self.publish(|_| {});
    }

    /// Waits until all batches with a lower number are final.
    pub async fn until_first(&self, number: i64) {
        let mut completed = self.completed.subscribe();
        let is_first = |_: &()| self.inner().in_flight.range(..number).next().is_none();
        let waited = completed.wait_for(is_first).await;
        drop(waited.expect("the tracker has the sender"));
    }

    /// Batches that are not final.
    pub fn in_flight(&self) -> usize {
        self.inner().in_flight.len()
    }

    /// Sets the poster's positions. `others`: last record read that is not settlement's own.
    pub fn set_positions(
        &self,
        folded: Sequence,
        others: Sequence,
        settled: Sequence,
        trades_folded: u64,
        open_trades: usize,
    ) {
        {
            let mut inner = self.inner();
            inner.trades_folded = trades_folded;
            inner.open_trades = open_trades as u64;
        }
        self.set_applied(folded);
        self.publish(|progress| {
            // Restarted workers begin at an earlier position.
            progress.folded = progress.folded.max(folded);
            progress.others = progress.others.max(others);
            progress.settled = progress.settled.max(settled);
        });
    }

    /// A record of settlement's own has been assigned a sequence.
    pub fn own_journalled(&self) {
        self.notify_backlog(|inner| inner.own_unread += 1);
    }

    /// A record that settlement journalled since the start was read back.
    pub fn own_read(&self) {
        self.inner().own_unread -= 1;
    }

    /// All records up to `sequence` are applied.
    pub fn set_applied(&self, sequence: Sequence) {
        self.notify_backlog(|inner| inner.applied = sequence);
    }

    fn notify_backlog(&self, change: impl FnOnce(&mut Inner)) {
        let mut inner = self.inner();
        change(&mut inner);
        let own = inner.own_unread.max(0).cast_unsigned();
        self.backlog.settlement_has(inner.applied, own);
    }

    /// A worker has failed: the market stops accepting orders.
    pub fn suspend(&self) {
        let mut inner = self.inner();
        inner.has_failed = true;
        self.backlog.settlement_failed(true);
    }

    /// Lets the market accept orders again. Returns false if a worker of this run has failed.
    pub fn resume(&self) -> bool {
        let inner = self.inner();
        if !inner.has_failed {
            self.backlog.settlement_failed(false);
        }
        !inner.has_failed
    }

    /// Until the ledger's position is known, records up to `sequence` are no backlog. No effect if
    /// an earlier run of the workers has applied records.
    pub fn start_at(&self, sequence: Sequence) {
        self.notify_backlog(|inner| {
            if inner.applied == Sequence::ZERO {
                inner.applied = sequence;
            }
        });
    }

    /// Sets the bust trades and the batches in flight (number, floor, trades) of a new run. Sets
    /// them under one lock, so no position is published from a partial set.
    pub fn begin(&self, bust: Vec<Bust>, in_flight: impl Iterator<Item = (i64, Sequence, u32)>) {
        let mut inner = self.inner();
        inner.has_failed = false;
        inner.bust = ids(&bust).collect();
        inner.in_flight = in_flight
            .map(|(number, floor, trades)| (number, InFlight::new(floor, trades)))
            .collect();
        inner.open_trades = 0;
        inner.own_unread = 0;
        // `report_progress` skips those that are journalled already.
        inner.unreported = bust;
    }

    fn publish(&self, change: impl FnOnce(&mut Progress)) {
        let inner = self.inner();
        let pending = inner.pending();
        let floor = inner.in_flight.values().map(|batch| batch.floor).min();
        self.backlog
            .pending_trades
            .store(pending, Ordering::Relaxed);
        // Under the lock, so positions never decrease.
        self.progress.send_if_modified(|progress| {
            let before = *progress;
            change(progress);
            progress.busts = inner.bust.len() as u64;
            progress.trades_final = inner.trades_folded.saturating_sub(pending);
            let finalized = floor.map_or(progress.settled, |floor| floor.min(progress.settled));
            progress.finalized = progress.finalized.max(finalized);
            *progress != before
        });
        drop(inner);
        metrics::gauge!("settlement_trades_pending").set(pending as f64);
    }

    /// `halted`: failures that need an operator.
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
            batches_pending: inner.in_flight.len() as u64,
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

    /// One consistent snapshot for the journal: positions, and bust trades since the last report.
    /// It includes every bust trade up to the final position. The first report includes those of
    /// earlier runs.
    pub fn report(&self) -> (Progress, Vec<Bust>) {
        let mut inner = self.inner();
        let bust = std::mem::take(&mut inner.unreported);
        (*self.progress.borrow(), bust)
    }

    pub fn watch(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }
}

impl Inner {
    fn pending(&self) -> u64 {
        self.open_trades
            + self
                .in_flight
                .values()
                .map(|batch| batch.trades)
                .sum::<u64>()
    }
}

fn ids(bust: &[Bust]) -> impl Iterator<Item = Id128> + '_ {
    bust.iter().map(|bust| bust.trade)
}
