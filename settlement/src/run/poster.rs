//! Follows the replica, seals batches, posts them to the ledger.
//!
//! Start: sealed batches are posted again unchanged (the ledger ignores known ones), the replica
//! supplies the trading state at the ledger's position, and order holds are loaded from the ledger
//! and compared. Planning continues from there. The ledger's position is authoritative, not that of
//! settlement's store.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use replica::{Batch as Records, Follower, Replica};
use sequencer::Durable;
use service_clients::ledger::SealedBatch;
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;
use types::command::Bust;
use types::{Handle, HoldIx, HoldPart, Id128, Sequence, derived};

use super::check::Checks;
use super::retry::retry_store;
use super::{Halt, Shared, failure, monotonic_ns, now_ns, now_us};
use crate::batch::{Batch, Settler};
use crate::repo::Stored;
use crate::saga::{Saga, State, StepResult};
use crate::{failpoint, request};

/// Interval at which an idle poster checks whether the replica waits for its files.
const IDLE_MS: u64 = 1_000;
/// Replica lag that counts as catching up: more than it applies at once.
const REPLICA_LAG_MAX: u64 = 1_024;

/// Id in the health while the journal cannot be read.
pub(super) const READING: &str = "reading";
/// Pause before a retry of a read that failed for lack of a file descriptor.
const READ_RETRY: Duration = Duration::from_millis(250);

pub struct Poster {
    pub(super) shared: Arc<Shared>,
    pub(super) replica: Replica,
    pub(super) durable: Durable,
    posted: Sender<Stored>,
    /// Reasons why the replica and its followers wait, by name.
    waits: watch::Receiver<BTreeMap<&'static str, String>>,
    /// Records that are received and not applied.
    next: Option<Records>,
    pub(super) checks: Checks,
    batches: u64,
    /// Last record applied. Until the ledger's position is known, the last one assigned at the
    /// start, so only later records are backlog.
    pub(super) position: Sequence,
    /// Last record applied that settlement did not journal itself.
    pub(super) others: Sequence,
    /// Last record assigned at the start.
    started: Sequence,
    /// Journal time of the last record applied. During catch-up it is the clock for order ages.
    applied_ns: u64,
    /// More records are available, or the replica lags.
    is_behind: bool,
    /// Time of the last seal.
    sealed_ns: u64,
    /// Order holds with a break, and their orders.
    pub(super) parts: HashMap<Id128, (Handle, HoldPart)>,
}

impl Poster {
    pub fn new(
        shared: Arc<Shared>,
        replica: Replica,
        durable: Durable,
        posted: Sender<Stored>,
    ) -> Self {
        let checks = Checks::new(&shared.config);
        let started = replica.assigned().max(replica.position());
        shared.tracker.start_at(started);
        Self {
            shared,
            position: started,
            others: Sequence::ZERO,
            started,
            waits: replica.troubles(),
            replica,
            durable,
            posted,
            next: None,
            checks,
            batches: 0,
            applied_ns: 0,
            is_behind: false,
            sealed_ns: 0,
            parts: HashMap::new(),
        }
    }

    /// Runs until shutdown. Begins with the batches that are not final.
    ///
    /// # Errors
    /// [`Halt`]: nothing is posted until the workers restart.
    pub async fn run(mut self, open: Vec<Stored>) -> Result<(), Halt> {
        for row in open {
            if row.saga.state == State::Sealed {
                self.refuse_unjournalled(&row)?;
                let sealed = SealedBatch::from_bytes(&row.request);
                let sealed = sealed.ok_or_else(|| Halt::Request(row.batch_id.clone()))?;
                self.post(row, sealed).await?;
            } else {
                self.hand_over(row).await?;
            }
        }
        let (mut settler, mut follower) = self.recover().await?;
        loop {
            settler.limit_trades(self.shared.chain_size.get());
            let has_more = self.pull(&mut settler, &mut follower).await?;
            self.is_behind = has_more || self.is_catching_up();
            let is_eager = !self.is_behind && !self.is_chain_busy();
            if settler.is_due(monotonic_ns(), self.split_due_ns(&settler), is_eager) {
                self.seal(&mut settler).await?;
                continue;
            }
            self.publish(&settler);
            if has_more {
                continue;
            }
            if settler.is_empty() && self.checks.is_due(monotonic_ns()) {
                self.check(&settler, Vec::new()).await?;
            }
            self.wait(&mut settler, &mut follower).await?;
        }
    }

    /// Whether enough batches are in flight to keep the chain busy. A larger batch with trades is
    /// then cheaper than another small one: each costs a chain transaction and a block.
    fn is_chain_busy(&self) -> bool {
        self.shared.tracker.in_flight() >= self.shared.config.chain_busy_batches
    }

    /// The clock for order ages: wall clock at the journal's tail, journal time during catch-up.
    ///
    /// An order gets its own holds once it has been open for `wait_ms` (`design.md` 4).
    fn age_clock_ns(&self) -> u64 {
        if self.is_behind {
            self.applied_ns
        } else {
            now_ns()
        }
    }

    /// The clock for order ages that decide whether a batch is due; `None`: orders make none due.
    ///
    /// Batches fill up during catch-up, so unsplit orders make one due only once per wait time.
    /// While the chain is busy, only orders of twice the age make a batch with trades due.
    fn split_due_ns(&self, settler: &Settler) -> Option<u64> {
        let wait_ms = self.shared.config.wait_ms;
        if self.is_behind {
            let waited_ms = monotonic_ns().saturating_sub(self.sealed_ns) / 1_000_000;
            return (waited_ms >= wait_ms).then_some(self.applied_ns);
        }
        let is_filling = settler.open_trades() > 0 && self.is_chain_busy();
        let later_ns = if is_filling { wait_ms * 1_000_000 } else { 0 };
        Some(now_ns().saturating_sub(later_ns))
    }

    /// Applies one batch of available records and seals full batches on the way. Returns false if
    /// no record was available.
    async fn pull(&mut self, settler: &mut Settler, follower: &mut Follower) -> Result<bool, Halt> {
        let Some(records) = self.next.take().or_else(|| follower.try_next()) else {
            return Ok(false);
        };
        // More records may follow, so only full batches are sealed on the way.
        self.is_behind = true;
        // A file-reading follower may be ahead of the live replica, which has the names.
        self.wait_for_replica(records.last()).await?;
        for applied in records.iter() {
            if !settler.has_room(applied) {
                self.seal(settler).await?;
            }
            settler.apply(applied, monotonic_ns());
            self.position = applied.sequence();
            if !applied.is_settlement_progress() {
                self.others = self.position;
            } else if self.position > self.started {
                self.shared.tracker.own_read();
            }
            self.applied_ns = applied.cause.time_ns;
            if settler.is_due(monotonic_ns(), None, false) {
                self.seal(settler).await?;
            }
        }
        tokio::task::yield_now().await;
        if self.shared.shutdown.is_cancelled() {
            return Err(Halt::Stopped);
        }
        Ok(true)
    }

    /// Waits until the live replica has applied a record.
    pub(super) async fn wait_for_replica(&self, sequence: Sequence) -> Result<(), Halt> {
        if self.replica.position() >= sequence {
            return Ok(());
        }
        let waiting = self.replica.wait(sequence);
        Ok(self.shared.unless_stopped(waiting).await??)
    }

    /// Whether more records exist than the follower has in memory: it reads from files, or the
    /// replica itself lags.
    fn is_catching_up(&self) -> bool {
        let applied = self.replica.position();
        let lag = self.replica.assigned().get().saturating_sub(applied.get());
        applied > self.position || lag > REPLICA_LAG_MAX
    }

    /// Waits for records, a due batch or comparison, or a change of the replica's waits.
    async fn wait(&mut self, settler: &mut Settler, follower: &mut Follower) -> Result<(), Halt> {
        let due_ms = settler
            .due_in_ns(monotonic_ns(), self.split_due_ns(settler), false)
            .map(|ns| ns.div_ceil(1_000_000));
        let eager_ms = (settler.open_trades() > 0).then_some(self.shared.config.linger_ms.max(1));
        // A comparison requires that everything applied is posted.
        let check_ms = self
            .checks
            .due_in_ms(monotonic_ns())
            .filter(|_| settler.is_empty());
        let wait_ms = [due_ms, eager_ms, check_ms]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(IDLE_MS);
        let sleep = tokio::time::sleep(Duration::from_millis(wait_ms));
        tokio::select! {
            () = self.shared.shutdown.cancelled() => return Err(Halt::Stopped),
            () = sleep => {}
            records = follower.next() => {
                let records = records.map_err(|error| Halt::following(error, settler.sealed()));
                self.next = Some(records?);
            }
            // The sender outlives the poster.
            _ = self.waits.changed() => self.show_waits(),
            () = self.shared.compare.notified() => self.checks.make_due(),
        }
        Ok(())
    }

    /// Shows in the health whether the journal can be read.
    fn show_waits(&mut self) {
        let waits = self.waits.borrow_and_update();
        let own = waits.get(failure::JOURNAL);
        let failures = &self.shared.failures;
        match own.or_else(|| waits.get(replica::PART)) {
            Some(reason) => failures.note(failure::JOURNAL, READING, reason, false),
            None => failures.clear(failure::JOURNAL, READING),
        }
    }

    /// Pauses before a read is retried that failed for lack of a file descriptor. The health fails
    /// until a read succeeds.
    pub(super) async fn pause(&self, reason: &str) -> Result<(), Halt> {
        let failures = &self.shared.failures;
        failures.note(failure::JOURNAL, READING, reason, false);
        let pause = tokio::time::sleep(READ_RETRY);
        self.shared.unless_stopped(pause).await
    }

    /// Seals the open batch, stores it, posts it.
    async fn seal(&mut self, settler: &mut Settler) -> Result<(), Halt> {
        let batches = settler.seal(self.age_clock_ns());
        self.sealed_ns = monotonic_ns();
        let requests: Vec<SealedBatch> = batches.iter().map(request::ledger_batch).collect();
        let rows = batches.iter().zip(&requests);
        let rows: Vec<Stored> = rows.map(|(of, sealed)| stored(of, sealed)).collect();
        let Some(first) = rows.first() else {
            return Ok(());
        };
        let shared = &self.shared;
        let rows = retry_store(shared, &first.batch_id, || {
            let mut rows = rows.clone();
            async move {
                shared.repo.insert(&mut rows, now_us()).await?;
                Ok(rows)
            }
        })
        .await?;
        for (row, batch) in rows.iter().zip(&batches) {
            self.register(row);
            tracing::debug!(
                batch = row.batch_id,
                trades = row.trades,
                rows = batch.plan.weight(),
                "batch sealed"
            );
        }
        failpoint::reach(failpoint::SEALED);
        for (row, sealed) in rows.into_iter().zip(requests) {
            self.post(row, sealed).await?;
        }
        self.publish(settler);
        self.batches += 1;
        let touched: HashSet<HoldIx> = batches
            .iter()
            .flat_map(|b| b.plan.trading_holds.iter().copied())
            .collect();
        if self.checks.add_touched(touched, self.batches) {
            let trading_holds = self.checks.take_round();
            self.check(settler, trading_holds).await?;
        }
        Ok(())
    }

    /// Posts a sealed batch to the ledger, until it succeeds, and passes it on. `sealed`: its
    /// stored request.
    async fn post(&mut self, mut row: Stored, sealed: SealedBatch) -> Result<(), Halt> {
        let started_ns = monotonic_ns();
        let replayed = self.post_or_withdraw(&mut row, sealed).await?;
        let shared = &self.shared;
        failpoint::reach(failpoint::POSTED);
        metrics::histogram!("settlement_post_seconds")
            .record((monotonic_ns() - started_ns) as f64 / 1e9);
        if replayed {
            tracing::info!(batch = row.batch_id, "batch was already in the ledger");
        }
        let unexpected_result = |error| Halt::Saga(row.batch_id.clone(), error);
        row.saga
            .handle_result(StepResult::Posted)
            .map_err(unexpected_result)?;
        row.request = Vec::new();
        retry_store(shared, &row.batch_id, || {
            shared.repo.advance(&row, &[], &[], now_us())
        })
        .await?;
        self.hand_over(row).await
    }

    /// Refuses an unposted batch whose records are not in the journal. They were durable, so this
    /// is another journal or an older copy.
    fn refuse_unjournalled(&self, row: &Stored) -> Result<(), Halt> {
        let is_main = self.is_main(row);
        let last = Sequence(if is_main { row.through } else { row.covers });
        let journal = self.replica.durable();
        if last > journal {
            return Err(Halt::Unjournalled {
                batch: row.batch_id.clone(),
                last,
                journal,
            });
        }
        Ok(())
    }

    /// Passes a posted batch to the chain worker, after a wait if too many wait for the chain. If
    /// that worker has ended, this one ends too.
    async fn hand_over(&self, row: Stored) -> Result<(), Halt> {
        if row.saga.state == State::Final {
            self.shared.tracker.complete(row.number, [], &[]);
            return Ok(());
        }
        let sent = self.shared.unless_stopped(self.posted.send(row)).await?;
        sent.map_err(|_| Halt::Stopped)
    }

    /// Whether the batch moves the ledger's position. Parts and split batches do not.
    fn is_main(&self, row: &Stored) -> bool {
        row.source == derived::settlement_source(self.shared.node)
    }

    /// Registers a sealed batch as in flight.
    fn register(&self, row: &Stored) {
        let floor = self.floor(row);
        self.shared.tracker.register(row.number, floor, row.trades);
    }

    /// Registers the open batches of earlier runs.
    pub fn register_open(&self, bust: Vec<Bust>, open: &[Stored]) {
        let in_flight = open.iter();
        let in_flight = in_flight.map(|row| (row.number, self.floor(row), row.trades));
        self.shared.tracker.begin(bust, in_flight);
    }

    /// Last record that is final without this batch.
    fn floor(&self, row: &Stored) -> Sequence {
        let is_main = self.is_main(row);
        Sequence(if is_main { row.first - 1 } else { row.covers })
    }

    pub(super) fn publish(&self, settler: &Settler) {
        let trading_state = settler.trading_state();
        // Callers have posted every sealed batch.
        self.durable.set(settler.sealed());
        self.shared.tracker.set_positions(
            trading_state.position(),
            self.others,
            settler.covered(),
            trading_state.trades(),
            settler.open_trades(),
        );
    }
}

fn stored(batch: &Batch, sealed: &SealedBatch) -> Stored {
    let trades = u32::try_from(batch.plan.trades.len()).expect("a batch is bounded");
    Stored {
        number: 0,
        batch_id: batch.id.clone(),
        source: batch.source.clone(),
        first: batch.first,
        through: batch.through,
        covers: batch.covers.0,
        saga: Saga::new(trades),
        trades,
        request: sealed.to_bytes(),
        legs: request::trade_batch(batch).to_bytes(),
        executed_ns: batch
            .plan
            .trades
            .iter()
            .map(|leg| leg.executed_ns)
            .collect(),
        busts: batch.plan.trades.iter().map(|leg| leg.bust).collect(),
    }
}
