//! Reads the journal, seals batches, posts them to the ledger.
//!
//! At the start: batches that were sealed are posted again as they stand (the ledger answers what it knows), the journal is folded up to the
//! ledger's position without acting, the holds of orders are taken over from the ledger and compared. From there on the plans go on where they
//! ended. The ledger's position decides, never this store's.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use proto::ledger::v1::CreateOperationsRequest;
use tokio::sync::mpsc::UnboundedSender;
use types::{HoldIx, Sequence, UserIx};

use super::check::Checks;
use super::retry::{Stopped, until_done};
use super::{Shared, chain, now_ns, now_us};
use crate::batch::{Batch, Settler};
use crate::fold::FoldError;
use crate::repo::{StoreError, Stored};
use crate::saga::{Answer, Misplaced, Saga, State};
use crate::source::{Record, Source, SourceError};
use crate::{failpoint, ids, wire};

/// Records folded in one go before other work gets its turn.
const TURN: usize = 512;

/// Where a turn of folding ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pulled {
    /// Nothing more is in the journal.
    Tail,
    /// There is more.
    Behind,
    /// The next record waits for a cleared break.
    Blocked,
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
    Store(#[from] StoreError),
    #[error(transparent)]
    Saga(#[from] Misplaced),
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

pub struct Poster {
    pub(super) shared: Arc<Shared>,
    pub(super) journal: Box<dyn Source>,
    posted: UnboundedSender<chain::Work>,
    /// Read from the journal, not folded yet.
    next: Option<Record>,
    pub(super) checks: Checks,
    batches: u64,
    /// Journal time of the last record folded, and whether more follow: then it is the time by which orders age.
    folded_ns: u64,
    is_behind: bool,
    /// When a batch was sealed last.
    sealed_ns: u64,
    /// Users with a break.
    pub(super) halted: HashSet<UserIx>,
}

impl Poster {
    pub fn new(
        shared: Arc<Shared>,
        journal: Box<dyn Source>,
        posted: UnboundedSender<chain::Work>,
    ) -> Self {
        let checks = Checks::new(&shared.config);
        Self {
            shared,
            journal,
            posted,
            next: None,
            checks,
            batches: 0,
            folded_ns: 0,
            is_behind: false,
            sealed_ns: 0,
            halted: HashSet::new(),
        }
    }

    pub async fn run(mut self, open: Vec<Stored>) {
        match self.work(open).await {
            Ok(()) | Err(Halt::Stopped) => {}
            Err(halt) => {
                tracing::error!(error = %halt, "settlement has halted");
                self.shared.health.set_failing("journal", halt.to_string());
                self.shared.tracker.halt(&halt.to_string());
            }
        }
    }

    async fn work(&mut self, open: Vec<Stored>) -> Result<(), Halt> {
        for row in open {
            let floor = floor(&row.source, row.first, row.covers, self.shared.node);
            self.shared.tracker.take_off(row.number, floor, row.trades);
            if row.saga.state == State::Sealed {
                self.post(row).await?;
            } else {
                self.hand_over(row);
            }
        }
        let mut settler = self.recover().await?;
        loop {
            let pulled = self.pull(&mut settler).await?;
            let at_tail = pulled == Pulled::Tail;
            self.is_behind = pulled == Pulled::Behind;
            // While the chain has enough to do, a larger batch is cheaper than another small one.
            let is_eager =
                at_tail && self.shared.tracker.flights() < self.shared.config.chain_batches_max;
            if settler.is_due(now_ns(), self.carve_due_ns(), is_eager) {
                self.seal(&mut settler).await?;
                continue;
            }
            self.publish(&settler);
            if self.is_behind {
                continue;
            }
            if at_tail && settler.is_empty() && self.checks.is_due(now_ns()) {
                self.check(&settler, Vec::new()).await?;
            }
            self.wait(&mut settler, at_tail).await?;
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
                None => match self.journal.try_next()? {
                    Some(record) => record,
                    None => return Ok(Pulled::Tail),
                },
            };
            if self.must_wait(settler, &record).await? {
                self.next = Some(record);
                return Ok(Pulled::Blocked);
            }
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

    /// A record that touches the money of a user with a break waits until the break is cleared, and everything behind it with it.
    async fn must_wait(&mut self, settler: &Settler, record: &Record) -> Result<bool, Halt> {
        if self.halted.is_empty() {
            return Ok(false);
        }
        let touched = settler.fold().touched(&record.command, &record.events);
        if !touched.iter().any(|user| self.halted.contains(user)) {
            return Ok(false);
        }
        let rows = self.shared.repo.breaks().await?;
        let names: HashSet<&str> = rows.iter().map(|row| row.user_id.as_str()).collect();
        self.halted
            .retain(|user| names.contains(settler.fold().user(*user).as_str()));
        let waits = touched.iter().any(|user| self.halted.contains(user));
        let why = if waits {
            format!(
                "record {} waits: a user it touches has a break",
                record.command.sequence
            )
        } else {
            String::new()
        };
        self.shared.tracker.halt(&why);
        Ok(waits)
    }

    async fn wait(&mut self, settler: &mut Settler, at_tail: bool) -> Result<(), Halt> {
        let due_ms = settler
            .due_in_ns(now_ns(), self.carve_due_ns(), false)
            .map(|ns| ns.div_ceil(1_000_000));
        let eager_ms = (settler.open_trades() > 0).then_some(self.shared.config.linger_ms.max(1));
        let check_ms = self.checks.due_in_ms(now_ns());
        // A record that waits for a cleared break is tried again now and then.
        let blocked_ms = (!at_tail && !self.halted.is_empty()).then_some(500);
        let wait_ms = [due_ms, eager_ms, check_ms, blocked_ms]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(60_000);
        let sleep = tokio::time::sleep(Duration::from_millis(wait_ms));
        tokio::select! {
            () = self.shared.shutdown.cancelled() => return Err(Halt::Stopped),
            () = sleep => {}
            record = self.journal.next(), if at_tail => self.next = Some(record?),
        }
        Ok(())
    }

    /// Seals what is open, keeps it, posts it.
    async fn seal(&mut self, settler: &mut Settler) -> Result<(), Halt> {
        let batches = settler.seal(self.carve_ns());
        self.sealed_ns = now_ns();
        let mut rows: Vec<Stored> = batches.iter().map(stored).collect();
        if rows.is_empty() {
            return Ok(());
        }
        self.shared.repo.insert(&mut rows, now_us()).await?;
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
        let shared = &self.shared;
        let started_ns = now_ns();
        let answer = until_done(
            "ledger",
            &row.batch_id,
            &shared.shutdown,
            &shared.health,
            || {
                let (mut client, request) = (shared.ledger.clone(), request.clone());
                async move { client.create_operations(request).await }
            },
        )
        .await?
        .into_inner();
        failpoint::reach(failpoint::POSTED);
        metrics::histogram!("settlement_post_seconds").record((now_ns() - started_ns) as f64 / 1e9);
        if answer.replayed {
            tracing::info!(batch = row.batch_id, "the ledger had the batch already");
        }
        row.saga.handle_answer(Answer::Posted)?;
        row.request = Vec::new();
        shared.repo.advance(&row, &[], now_us()).await?;
        self.hand_over(row);
        Ok(())
    }

    /// Leaves the rest of a batch's life to the chain worker.
    fn hand_over(&self, row: Stored) {
        if row.saga.state == State::Final {
            self.shared.tracker.land(row.number, [], &[]);
        } else if self.posted.send(chain::Work::new(row)).is_err() {
            tracing::error!("the chain worker has ended");
        }
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
    if source == ids::source(node) {
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
