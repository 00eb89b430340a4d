//! Missed operations (specification 1.4, R221): what a block of the chain holds and no event told.
//!
//! A while after a block was read, the CFA service is asked what it has of the block's
//! transactions, and each final operation is folded in as its own event would be. That event and
//! this look have one idempotency key, so whichever comes second changes nothing. Trades are left
//! out: settlement brings each to its end. An operation whose end is still open (a payout that the
//! bank has not made) is asked for again now and then, until a restart.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use events::{BatchResult, Event, Failure, Later, Stopped};
use rpc::Context;
use service_clients::{
    CallError, CfaClient, OperationStatus,
    cfa::{Operation, OperationFilter},
};
use tokio_util::sync::CancellationToken;

use crate::{
    api::consumers::{act_of, transactions_of},
    committer::Committer,
    fold::{Act, Answer, Command, Outcome, Replay},
    refusal::Refusal,
};

/// Transactions of one question; the CFA service takes no more.
const HASHES_MAX: usize = 100;
/// Operations with an open end are asked for again after so many times the first pause.
const REVISIT_AFTER: u32 = 5;
const REVISIT_MIN: Duration = Duration::from_millis(100);
/// Transactions with an open end that are kept in mind.
const OPEN_MAX: usize = 10_000;

/// Looks for what blocks hold and the ledger does not.
pub struct Reconciler {
    pub cfa: CfaClient,
    pub committer: Committer,
    /// How long events have before they count as missed.
    pub after: Duration,
    pub shutdown: CancellationToken,
    /// Transactions with operations that are not at their end.
    pub open: Mutex<BTreeSet<String>>,
}

impl Reconciler {
    /// Looks at the blocks among these events.
    pub async fn handle(&self, events: &[Event]) -> BatchResult {
        let mut hashes = BTreeSet::new();
        let mut first = None;
        let mut unreadable = None;
        for (handled, event) in events.iter().enumerate() {
            match transactions_of(event) {
                Ok(found) if found.is_empty() => {}
                Ok(found) => {
                    first.get_or_insert(handled);
                    hashes.extend(found);
                }
                Err(poison) => {
                    let error = poison.into();
                    unreadable = Some(Stopped { handled, error });
                    break;
                }
            }
        }
        if let Some(handled) = first {
            let stopped = |error| Stopped { handled, error };
            self.look(hashes).await.map_err(stopped)?;
        }
        unreadable.map_or(Ok(()), Err)
    }

    async fn look(&self, hashes: BTreeSet<String>) -> Result<(), Failure> {
        let looked = async {
            tokio::time::sleep(self.after).await;
            self.restore_all(hashes).await
        };
        tokio::select! {
            looked = looked => looked,
            () = self.shutdown.cancelled() => Err(Later("the ledger stops".to_owned()).into()),
        }
    }

    /// Asks again for what was open when it was asked for, until shutdown.
    pub async fn revisit(&self) {
        let pause = (self.after * REVISIT_AFTER).max(REVISIT_MIN);
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.shutdown.cancelled() => return,
            }
            let open = std::mem::take(&mut *self.open());
            let restored = tokio::select! {
                restored = self.restore_all(open.clone()) => restored,
                () = self.shutdown.cancelled() => return,
            };
            if let Err(error) = restored {
                tracing::warn!(%error, "open operations of blocks are asked for later");
                self.open().extend(open);
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.open.lock().expect("nothing panics with it")
    }

    async fn restore_all(&self, hashes: BTreeSet<String>) -> Result<(), Failure> {
        let hashes: Vec<String> = hashes.into_iter().collect();
        for part in hashes.chunks(HASHES_MAX) {
            self.restore(part).await?;
        }
        Ok(())
    }

    /// Folds in what these transactions did.
    async fn restore(&self, tx_hashes: &[String]) -> Result<(), Failure> {
        let filter = OperationFilter {
            tx_hashes,
            without_trades: true,
            ..OperationFilter::default()
        };
        let context = Context::new("ledger");
        let operations = self.cfa.operations(&context, filter).await;
        for operation in operations.map_err(|error| failed(&error))? {
            self.fold_in(operation).await?;
        }
        Ok(())
    }

    async fn fold_in(&self, operation: Operation) -> Result<(), Failure> {
        use OperationStatus::{Failed, Finalized, Refunded, Rejected};
        match operation.status {
            Some(Finalized) => {}
            Some(Failed | Rejected | Refunded) => return Ok(()),
            _ => {
                self.keep_open(operation.tx_hash);
                return Ok(());
            }
        }
        let (operation_id, tx_hash) = (operation.operation_id.clone(), operation.tx_hash.clone());
        let act = match act_of(operation) {
            Ok(Some(act)) => act,
            Ok(None) => return Ok(()),
            Err(poison) => {
                tracing::error!(operation_id, %poison, "operation of a block cannot be read");
                return Ok(());
            }
        };
        match self.submit(act, Context::new("ledger")).await? {
            Ok(answered) if is_new(&answered.answer) => {
                tracing::warn!(
                    operation_id,
                    "operation restored from a block, its event was missed"
                );
                metrics::counter!("ledger_operations_restored_total").increment(1);
            }
            Ok(_) => {}
            // Its registration is on its way.
            Err(refused) if refused.refusal == Refusal::InstrumentNotFound => {
                self.keep_open(tx_hash);
            }
            Err(refused) => {
                tracing::error!(operation_id, refusal = %refused.refusal, "operation of a block refused by the ledger");
            }
        }
        Ok(())
    }

    fn keep_open(&self, tx_hash: String) {
        let mut open = self.open();
        open.insert(tx_hash);
        while open.len() > OPEN_MAX {
            let forgotten = open.pop_first();
            tracing::warn!(tx_hash = forgotten, "too many open operations of blocks");
        }
    }

    async fn submit(&self, act: Act, context: Context) -> Result<Outcome, Failure> {
        let command = Command {
            act,
            key: None,
            is_service: true,
        };
        let submitted = self.committer.submit(command, context).await;
        submitted.map_err(|error| match error.is_away() {
            true => Later(error.to_string()).into(),
            false => error.into(),
        })
    }
}

/// A service that is unavailable comes back; what it refuses is tried some times and then given up.
fn failed(error: &CallError) -> Failure {
    let text = format!("operations of a block: {}", error.describe());
    match error.is_unavailable() {
        true => Later(text).into(),
        false => text.into(),
    }
}

fn is_new(answer: &Answer) -> bool {
    match answer {
        Answer::Batch { outcomes } => outcomes
            .iter()
            .flatten()
            .any(|posted| posted.replay == Replay::No),
        Answer::Finalized { moved } => *moved > 0,
        _ => false,
    }
}
