//! Reads the journal, seals batches, posts them to the ledger.
//!
//! At the start: batches that were sealed are posted again as they stand (the ledger answers what it knows), the journal is folded from the last checkpoint up to the
//! ledger's position without acting, the holds of orders are taken over from the ledger and compared. From there on the plans go on where they
//! ended. The ledger's position decides, never this store's.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use proto::ledger::v1::CreateOperationsRequest;
use sequencer::CheckpointError;
use tokio::sync::mpsc::UnboundedSender;
use types::{Handle, HoldIx, HoldPart, Id128, Sequence, derived};

use super::check::Checks;
use super::checkpoint::Keeping;
use super::retry::{Stopped, until_done, until_kept};
use super::{Shared, chain, now_ns, now_us, trouble};
use crate::batch::{Batch, Settler};
use crate::fold::FoldError;
use crate::repo::Stored;
use crate::saga::{Answer, Misplaced, Saga, State};
use crate::source::{Record, Source, SourceError};
use crate::{failpoint, wire};

/// Records folded in one go before other work gets its turn.
const TURN: usize = 512;

/// Where a turn of folding ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pulled {
    /// Nothing more is in the journal.
    Tail,
    /// There is more.
    Behind,
}

/// Why the poster stopped for good.
#[derive(Debug, thiserror::Error)]
pub(super) enum Halt {
    #[error("shutting down")]
    Stopped,
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Fold(#[from] FoldError),
    #[error(transparent)]
    Saga(#[from] Misplaced),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(
        "the ledger is at {ledger}, behind every state that is written down, as if an older copy of it had been put back; the journal goes on only from {removed}"
    )]
    Behind { ledger: Sequence, removed: Sequence },
    #[error(
        "sealed batch {batch} settles records up to {last}, the journal ends at {journal}: a journal was lost"
    )]
    Unjournalled {
        batch: String,
        last: Sequence,
        journal: Sequence,
    },
    #[error("stored batch {0} is unreadable")]
    Request(String),
    #[error("the journal ends at {journal}, the ledger is at {ledger}: a journal was lost")]
    JournalLost { journal: Sequence, ledger: Sequence },
}

impl From<Stopped> for Halt {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

/// What is named in the health while the journal cannot be read.
const READING: &str = "reading";
/// Pause before a read that found no file descriptor is tried again.
const READ_RETRY: Duration = Duration::from_millis(250);

pub struct Poster {
    pub(super) shared: Arc<Shared>,
    pub(super) journal: Box<dyn Source>,
    posted: UnboundedSender<chain::Work>,
    /// Read from the journal, not folded yet.
    next: Option<Record>,
    /// The last read found no file descriptor.
    is_short: bool,
    pub(super) checks: Checks,
    batches: u64,
    /// Journal time of the last record folded, and whether more follow: then it is the time by which orders age.
    folded_ns: u64,
    is_behind: bool,
    /// When a batch was sealed last.
    sealed_ns: u64,
    /// Holds of orders that are a break, with the order.
    pub(super) parts: HashMap<Id128, (Handle, HoldPart)>,
    pub(super) keeping: Keeping,
}

impl Poster {
    pub fn new(
        shared: Arc<Shared>,
        journal: Box<dyn Source>,
        posted: UnboundedSender<chain::Work>,
        keeping: Keeping,
    ) -> Self {
        let checks = Checks::new(&shared.config);
        Self {
            shared,
            journal,
            posted,
            next: None,
            is_short: false,
            checks,
            batches: 0,
            folded_ns: 0,
            is_behind: false,
            sealed_ns: 0,
            parts: HashMap::new(),
            keeping,
        }
    }

    /// Runs until shutdown.
    ///
    /// # Errors
    /// [`Halt`]: nothing can be posted any more until the next start.
    pub async fn run(mut self, open: Vec<Stored>) -> Result<(), Halt> {
        match self.work(open).await {
            Ok(()) | Err(Halt::Stopped) => Ok(()),
            Err(halt) => Err(halt),
        }
    }

    async fn work(&mut self, open: Vec<Stored>) -> Result<(), Halt> {
        for row in open {
            let floor = floor(&row.source, row.first, row.covers, self.shared.node);
            self.shared.tracker.take_off(row.number, floor, row.trades);
            if row.saga.state == State::Sealed {
                self.refuse_unjournalled(&row)?;
                self.post(row).await?;
            } else {
                self.hand_over(row)?;
            }
        }
        let mut settler = self.recover().await?;
        loop {
            let pulled = self.pull(&mut settler).await?;
            self.is_behind = pulled == Pulled::Behind;
            // While the chain has enough to do, a larger batch is cheaper than another small one.
            let has_room = self.shared.tracker.flights() < self.shared.config.chain_batches_max;
            let is_eager = !self.is_behind && has_room;
            if settler.is_due(now_ns(), self.carve_due_ns(), is_eager) {
                self.seal(&mut settler).await?;
                continue;
            }
            self.publish(&settler);
            self.keeping.take(&settler);
            if self.is_behind {
                continue;
            }
            if settler.is_empty() && self.checks.is_due(now_ns()) {
                self.check(&settler, Vec::new()).await?;
            }
            self.wait(&mut settler).await?;
        }
    }

    /// The clock by which orders age: design says open one second behind the tail, so behind it the journal's time counts.
    fn carve_ns(&self) -> u64 {
        if self.is_behind {
            self.folded_ns
        } else {
            now_ns()
        }
    }

    /// The same where it may make a batch due. Behind the tail batches fill up, so orders to be carved ask for one once in a while only.
    fn carve_due_ns(&self) -> Option<u64> {
        let waited_ms = now_ns().saturating_sub(self.sealed_ns) / 1_000_000;
        let may_ask = !self.is_behind || waited_ms >= self.shared.config.wait_ms;
        may_ask.then(|| self.carve_ns())
    }

    /// Folds what is there, sealing on the way whenever a batch is full.
    async fn pull(&mut self, settler: &mut Settler) -> Result<Pulled, Halt> {
        for _ in 0..TURN {
            let record = match self.next.take() {
                Some(record) => record,
                None => match self.take().await? {
                    Some(record) => record,
                    None => return Ok(Pulled::Tail),
                },
            };
            // More may follow: what a turn seals on the way is sealed for being full.
            self.is_behind = true;
            if !settler.has_room(record.events.len()) {
                self.seal(settler).await?;
            }
            settler.apply(&record.command, &record.events, now_ns())?;
            self.folded_ns = record.command.time_ns;
            if settler.is_due(now_ns(), None, false) {
                self.seal(settler).await?;
            }
        }
        tokio::task::yield_now().await;
        if self.shared.shutdown.is_cancelled() {
            return Err(Halt::Stopped);
        }
        Ok(Pulled::Behind)
    }

    /// Waits at the journal's tail until there is something to do.
    async fn wait(&mut self, settler: &mut Settler) -> Result<(), Halt> {
        let due_ms = settler
            .due_in_ns(now_ns(), self.carve_due_ns(), false)
            .map(|ns| ns.div_ceil(1_000_000));
        let eager_ms = (settler.open_trades() > 0).then_some(self.shared.config.linger_ms.max(1));
        // Compared only when everything folded is posted.
        let check_ms = self
            .checks
            .due_in_ms(now_ns())
            .filter(|_| settler.is_empty());
        let wait_ms = [due_ms, eager_ms, check_ms]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(60_000);
        let sleep = tokio::time::sleep(Duration::from_millis(wait_ms));
        let record = tokio::select! {
            () = self.shared.shutdown.cancelled() => return Err(Halt::Stopped),
            () = sleep => return Ok(()),
            record = self.journal.next() => record,
        };
        self.next = self.read(record).await?;
        Ok(())
    }

    /// The next record that is there. Waits while there is no file descriptor to read it with.
    pub(super) async fn take(&mut self) -> Result<Option<Record>, Halt> {
        loop {
            let found = self.journal.try_next();
            if let Some(record) = self.read(found).await? {
                return Ok(record);
            }
        }
    }

    /// What was read; `None` after a pause if there was no file descriptor, which the health shows meanwhile.
    pub(super) async fn read<T>(
        &mut self,
        found: Result<T, SourceError>,
    ) -> Result<Option<T>, Halt> {
        match found {
            Ok(found) => {
                if std::mem::take(&mut self.is_short) {
                    self.shared.troubles.clear(trouble::JOURNAL, READING);
                }
                Ok(Some(found))
            }
            Err(error) if error.is_transient => {
                self.pause(&error.to_string()).await?;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits a moment for a file descriptor, which the health shows until something is read.
    pub(super) async fn pause(&mut self, reason: &str) -> Result<(), Halt> {
        self.is_short = true;
        let troubles = &self.shared.troubles;
        troubles.note(trouble::JOURNAL, READING, reason, false);
        tokio::select! {
            () = tokio::time::sleep(READ_RETRY) => Ok(()),
            () = self.shared.shutdown.cancelled() => Err(Halt::Stopped),
        }
    }

    /// Seals what is open, keeps it, posts it.
    async fn seal(&mut self, settler: &mut Settler) -> Result<(), Halt> {
        let batches = settler.seal(self.carve_ns());
        self.sealed_ns = now_ns();
        let rows: Vec<Stored> = batches.iter().map(stored).collect();
        let Some(first) = rows.first() else {
            return Ok(());
        };
        let shared = &self.shared;
        let rows = until_kept(shared, &first.batch_id, || {
            let mut rows = rows.clone();
            async move {
                shared.repo.insert(&mut rows, now_us()).await?;
                Ok(rows)
            }
        })
        .await?;
        for (row, batch) in rows.iter().zip(&batches) {
            let floor = floor(&row.source, row.first, row.covers, self.shared.node);
            self.shared.tracker.take_off(row.number, floor, row.trades);
            tracing::debug!(
                batch = row.batch_id,
                trades = row.trades,
                rows = batch.plan.weight(),
                "batch sealed"
            );
        }
        failpoint::reach(failpoint::SEALED);
        for row in rows {
            self.post(row).await?;
        }
        self.publish(settler);
        self.keeping.take(settler);
        self.batches += 1;
        let touched: HashSet<HoldIx> = batches
            .iter()
            .flat_map(|b| b.plan.pools.iter().copied())
            .collect();
        if self.checks.take(touched, self.batches) {
            let pools = self.checks.touched();
            self.check(settler, pools).await?;
        }
        Ok(())
    }

    /// Sends a sealed batch to the ledger until it has it.
    async fn post(&mut self, mut row: Stored) -> Result<(), Halt> {
        let request = CreateOperationsRequest::decode(&*row.request)
            .map_err(|_| Halt::Request(row.batch_id.clone()))?;
        let (shared, journal) = (&self.shared, &self.journal);
        let started_ns = now_ns();
        let answer = until_done(shared, trouble::LEDGER, &row.batch_id, || {
            // While the ledger does not take the batch the journal grows.
            shared.tracker.behind(journal.bytes_behind());
            let (mut client, request) = (shared.ledger.clone(), request.clone());
            async move { client.create_operations(request).await }
        })
        .await?
        .into_inner();
        failpoint::reach(failpoint::POSTED);
        metrics::histogram!("settlement_post_seconds").record((now_ns() - started_ns) as f64 / 1e9);
        if answer.replayed {
            tracing::info!(batch = row.batch_id, "the ledger had the batch already");
        }
        row.saga.handle_answer(Answer::Posted)?;
        row.request = Vec::new();
        until_kept(shared, &row.batch_id, || {
            shared.repo.advance(&row, &[], now_us())
        })
        .await?;
        self.hand_over(row)
    }

    /// What was sealed and not posted comes from records that were durable: a journal that ends before them is another one.
    fn refuse_unjournalled(&self, row: &Stored) -> Result<(), Halt> {
        let is_main = row.source == derived::settlement_source(self.shared.node);
        let last = Sequence(if is_main { row.through } else { row.covers });
        let journal = self.journal.end();
        if last > journal {
            return Err(Halt::Unjournalled {
                batch: row.batch_id.clone(),
                last,
                journal,
            });
        }
        Ok(())
    }

    /// Leaves the rest of a batch's life to the chain worker. When that has ended, this one ends too.
    fn hand_over(&self, row: Stored) -> Result<(), Halt> {
        if row.saga.state == State::Final {
            self.shared.tracker.land(row.number, [], &[]);
            return Ok(());
        }
        self.posted
            .send(chain::Work::new(row))
            .map_err(|_| Halt::Stopped)
    }

    pub(super) fn publish(&self, settler: &Settler) {
        let fold = settler.fold();
        self.shared.tracker.moved(
            fold.position(),
            settler.covered(),
            fold.trades(),
            settler.open_trades(),
            self.journal.bytes_behind(),
        );
    }
}

/// Everything up to here is settled before the batch.
fn floor(source: &str, first: u64, covers: u64, node: types::NodeId) -> Sequence {
    if source == derived::settlement_source(node) {
        Sequence(first - 1)
    } else {
        Sequence(covers)
    }
}

fn stored(batch: &Batch) -> Stored {
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
        request: wire::create_operations(batch).encode_to_vec(),
        legs: wire::settle_trades(&batch.id, &batch.plan.trades).encode_to_vec(),
        executed_ns: batch
            .plan
            .trades
            .iter()
            .map(|leg| leg.executed_ns)
            .collect(),
    }
}
