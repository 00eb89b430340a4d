//! Restores missed operations: operations in a chain block whose event was lost (specification 1.4,
//! R221).
//!
//! After a delay per block, the reconciler requests the operations of the block's transactions from
//! the CFA service and folds each final one like its event. The event and the reconciler use the
//! same idempotency key, so the later of the two changes nothing. Trades are excluded: settlement
//! completes them. An operation that is not final yet (a payout that the bank has not made) is
//! requested again periodically. The list of these operations is in memory and is lost at a
//! restart.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use events::{BatchResult, Event, Failure, RetryLater, Stopped};
use rpc::Context;
use service_clients::{
    CallError, CfaClient, OperationStatus,
    cfa::{Operation, OperationFilter},
};
use tokio_util::sync::CancellationToken;

use crate::{
    api::consumers::{command_kind_of, transactions_of},
    committer::Committer,
    fold::{Answer, Command, CommandKind, Outcome, Replay},
    refusal::Refusal,
};

/// Transactions per request; the limit of the CFA service.
const HASHES_MAX: usize = 100;
/// Pause between requests for open operations, in multiples of `after`.
const RETRY_AFTER: u32 = 5;
const RETRY_MIN: Duration = Duration::from_millis(100);
/// Maximum number of transactions with open operations.
const OPEN_MAX: usize = 10_000;

/// Restores the missed operations of chain blocks.
pub struct Reconciler {
    pub cfa: CfaClient,
    pub committer: Committer,
    /// Delay after which the event of an operation counts as missed.
    pub after: Duration,
    pub shutdown: CancellationToken,
    /// Hashes of transactions with operations that are not final.
    pub open: Mutex<BTreeSet<String>>,
}

impl Reconciler {
    /// Restores the missed operations of the blocks among these events.
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
            self.restore_after_delay(hashes).await.map_err(stopped)?;
        }
        unreadable.map_or(Ok(()), Err)
    }

    async fn restore_after_delay(&self, hashes: BTreeSet<String>) -> Result<(), Failure> {
        let restored = async {
            tokio::time::sleep(self.after).await;
            self.restore_all(hashes).await
        };
        tokio::select! {
            restored = restored => restored,
            () = self.shutdown.cancelled() => Err(RetryLater("the ledger is stopping".to_owned()).into()),
        }
    }

    /// Requests open operations again, until shutdown.
    pub async fn retry_open(&self) {
        let pause = (self.after * RETRY_AFTER).max(RETRY_MIN);
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
                tracing::warn!(%error, "cannot read open operations of blocks, retrying later");
                self.open().extend(open);
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.open.lock().expect("no panic occurs under this lock")
    }

    async fn restore_all(&self, hashes: BTreeSet<String>) -> Result<(), Failure> {
        let hashes: Vec<String> = hashes.into_iter().collect();
        for part in hashes.chunks(HASHES_MAX) {
            self.restore(part).await?;
        }
        Ok(())
    }

    /// Folds the operations of these transactions.
    async fn restore(&self, tx_hashes: &[String]) -> Result<(), Failure> {
        let filter = OperationFilter {
            tx_hashes,
            exclude_trades: true,
            ..OperationFilter::default()
        };
        let context = Context::new("ledger");
        let operations = self.cfa.operations(&context, filter).await;
        let operations = operations.map_err(|error| failed(&error))?;
        let mut missed = Vec::new();
        let mut commands = Vec::new();
        for operation in operations {
            let names = (operation.operation_id.clone(), operation.tx_hash.clone());
            if let Some(kind) = self.command_of(operation) {
                missed.push(names);
                commands.push(Command {
                    kind,
                    key: None,
                    is_service: true,
                    author: None,
                });
            }
        }
        let outcomes = self.committer.submit_all(commands, &context).await;
        let outcomes = outcomes.map_err(|error| match error.is_away() {
            true => Failure::from(RetryLater(error.to_string())),
            false => error.into(),
        })?;
        for ((operation_id, tx_hash), outcome) in missed.into_iter().zip(outcomes) {
            self.on_outcome(&operation_id, tx_hash, outcome);
        }
        Ok(())
    }

    /// Returns the command of a final operation. Keeps the transaction of an open one for a retry.
    fn command_of(&self, operation: Operation) -> Option<CommandKind> {
        use OperationStatus::{Failed, Finalized, Refunded, Rejected};
        match operation.status {
            Some(Finalized) => {}
            Some(Failed | Rejected | Refunded) => return None,
            _ => {
                self.keep_open(operation.tx_hash);
                return None;
            }
        }
        let operation_id = operation.operation_id.clone();
        command_kind_of(operation).unwrap_or_else(|poison| {
            tracing::error!(operation_id, %poison, "unreadable operation of a block skipped");
            None
        })
    }

    fn on_outcome(&self, operation_id: &str, tx_hash: String, outcome: Outcome) {
        match outcome {
            Ok(result) if is_new(&result.answer) => {
                tracing::warn!(
                    operation_id,
                    "operation restored from a block, its event was missed"
                );
                metrics::counter!("ledger_operations_restored_total").increment(1);
            }
            Ok(_) => {}
            // The registration of the instrument has not arrived yet.
            Err(refused) if refused.refusal == Refusal::InstrumentNotFound => {
                self.keep_open(tx_hash);
            }
            Err(refused) => {
                tracing::error!(
                    operation_id,
                    refusal = %refused.refusal,
                    "operation of a block refused by the ledger"
                );
            }
        }
    }

    fn keep_open(&self, tx_hash: String) {
        let mut open = self.open();
        open.insert(tx_hash);
        while open.len() > OPEN_MAX {
            let dropped = open.pop_first();
            tracing::warn!(
                tx_hash = dropped,
                "too many open operations of blocks, transaction dropped"
            );
        }
    }
}

/// Retries an unavailable service without limit and a refusal a limited number of times.
fn failed(error: &CallError) -> Failure {
    let text = format!("operations of a block: {}", error.describe());
    match error.is_unavailable() {
        true => RetryLater(text).into(),
        false => text.into(),
    }
}

fn is_new(answer: &Answer) -> bool {
    match answer {
        Answer::Batch { outcomes } => outcomes
            .iter()
            .flatten()
            .any(|posted| posted.replay == Replay::No),
        Answer::Finalized { changed } => *changed > 0,
        _ => false,
    }
}
