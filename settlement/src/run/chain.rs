//! Drives posted batches to finality: submits one at a time, awaits the outcome of several.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use service_clients::cfa::{TradeBatch, TradeBatchStatus};
use service_clients::{CallError, LedgerClient, OperationStatus, caused_by};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;
use types::command::Bust;
use types::{Id128, derived};

use super::retry::{retry_call, retry_store};
use super::{Halt, Shared, failure, now_ns, now_us};
use crate::repo::{NewCase, Stored};
use crate::request::SOURCE;
use crate::saga::{Step, StepResult};
use crate::{failpoint, request};

/// Longest wait of one poll for a batch, in milliseconds.
const WAIT_MS: u32 = 5_000;
/// Maximum operations per finalize call.
const FINALIZE_MAX: usize = 1_000;

/// Processes batches in posting order, until shutdown.
///
/// # Errors
/// [`Halt`]: no batch is submitted until the workers restart.
pub(super) async fn run(shared: Arc<Shared>, mut posted: Receiver<Stored>) -> Result<(), Halt> {
    let permits = Arc::new(Semaphore::new(shared.config.chain_batches_max.max(1)));
    let mut in_flight = JoinSet::new();
    loop {
        let row = tokio::select! {
            row = posted.recv() => row,
            Some(ended) = in_flight.join_next() => {
                ended.map_err(Halt::Panic)??;
                continue;
            }
            () = shared.shutdown.cancelled() => None,
        };
        let Some(row) = row else { break };
        let permit = loop {
            tokio::select! {
                permit = permits.clone().acquire_owned() => break permit.expect("the semaphore is never closed"),
                Some(ended) = in_flight.join_next() => ended.map_err(Halt::Panic)??,
                () = shared.shutdown.cancelled() => return Err(Halt::Stopped),
            }
        };
        let mut driver = BatchDriver::new(shared.clone(), row)?;
        // Submits in order: a later trade may move assets that an earlier one delivers.
        driver.submit_if_posted().await?;
        in_flight.spawn(async move {
            let ended = driver.finish().await;
            drop(permit);
            ended
        });
    }
    while let Some(ended) = in_flight.join_next().await {
        ended.map_err(Halt::Panic)??;
    }
    Ok(())
}

/// Drives one posted batch through its remaining saga steps.
struct BatchDriver {
    shared: Arc<Shared>,
    row: Stored,
    trade_batch: TradeBatch,
}

impl BatchDriver {
    fn new(shared: Arc<Shared>, row: Stored) -> Result<Self, Halt> {
        match TradeBatch::from_bytes(&row.legs) {
            Some(trade_batch)
                if trade_batch.trades.len() == row.trades as usize
                    && row.busts.len() == trade_batch.trades.len() =>
            {
                Ok(Self {
                    shared,
                    row,
                    trade_batch,
                })
            }
            _ => Err(Halt::Legs(row.batch_id)),
        }
    }

    /// Submits the first attempt.
    async fn submit_if_posted(&mut self) -> Result<(), Halt> {
        // Again after trades were withdrawn.
        while matches!(self.row.saga.next(), Step::Submit { attempt: 1, .. }) {
            self.step().await?;
        }
        Ok(())
    }

    /// Executes the remaining steps. A later attempt waits for all earlier batches: these may
    /// deliver what its trades move, and their own later attempts come after this batch's first.
    async fn finish(&mut self) -> Result<(), Halt> {
        loop {
            match self.row.saga.next() {
                Step::Done => break,
                Step::Submit { .. } => {
                    let first = self.shared.tracker.until_first(self.row.number);
                    self.shared.unless_stopped(first).await?;
                }
                _ => {}
            }
            self.step().await?;
        }
        let bust_commands = self.busts();
        let now_us = now_ns() / 1_000;
        let settled = (0u32..)
            .zip(&self.row.executed_ns)
            .filter(|(trade, _)| !self.row.saga.bust.contains(trade));
        let lags_us: Vec<u64> = settled
            .map(|(_, ns)| now_us.saturating_sub(ns / 1_000))
            .collect();
        metrics::counter!("trades_settled_total").increment(lags_us.len() as u64);
        for lag_us in &lags_us {
            metrics::histogram!("settlement_lag_seconds").record(*lag_us as f64 / 1e6);
        }
        let tracker = &self.shared.tracker;
        tracker.complete(self.row.number, lags_us, &bust_commands);
        let withdrawn = self.trade_ids(&self.row.saga.withdrawn);
        self.shared.forget_requests(&withdrawn);
        Ok(())
    }

    /// Executes the next step and stores its result.
    async fn step(&mut self) -> Result<(), Halt> {
        let result = match self.row.saga.next() {
            Step::Submit { attempt, trades } => self.submit(attempt, &trades).await?,
            Step::Await { attempt } => self.await_final(attempt).await?,
            Step::Finalize { trades, tx_hash } => self.finalize(&trades, &tx_hash).await?,
            Step::Bust { trades } => self.bust(&trades).await?,
            Step::Post | Step::Done => return Ok(()),
        };
        let id = &self.row.batch_id;
        let unexpected_result = |error| Halt::Saga(id.clone(), error);
        self.row
            .saga
            .handle_result(result)
            .map_err(unexpected_result)?;
        let (shared, row) = (&self.shared, &self.row);
        let (bust_commands, cases) = (self.busts(), self.cases());
        let advance = || shared.repo.advance(row, &bust_commands, &cases, now_us());
        retry_store(shared, id, advance).await?;
        Ok(())
    }

    async fn submit(&self, attempt: u32, trades: &[u32]) -> Result<StepResult, Halt> {
        let batch = request::attempt(&self.trade_batch, attempt, trades);
        let context = caused_by(&format!("{SOURCE}:{}", batch.batch_id));
        // The last answer of the chain service was a refusal. After any other one, or before the
        // first, an earlier call of this batch may still be accepted.
        let is_refused = AtomicBool::new(false);
        loop {
            let (this, batch, context, is_refused) = (self, &batch, &context, &is_refused);
            let submitting = self.call(&batch.batch_id, || async move {
                if is_refused.load(Ordering::Relaxed) && !this.requested(trades).is_empty() {
                    return Ok(false);
                }
                let sent = this.shared.cfa.settle_trades(context, batch).await;
                let refused = matches!(sent, Err(CallError::Refused(_)));
                is_refused.store(refused, Ordering::Relaxed);
                sent.map(|()| true)
            });
            if submitting.await? {
                failpoint::reach(failpoint::SUBMITTED);
                return Ok(StepResult::Submitted);
            }
            let requested = self.requested(trades);
            if !self.is_known(&batch.batch_id).await? {
                return Ok(StepResult::Withdrawn { trades: requested });
            }
            // The chain service has the batch after all: the trades are bust only by its outcome.
            tracing::warn!(
                batch = batch.batch_id,
                trades = ?self.trade_id_strings(&requested),
                "trades are with the chain service and cannot be withdrawn"
            );
            self.shared.forget_requests(&self.trade_ids(&requested));
        }
    }

    /// Those of these trades that an operator wants bust.
    fn requested(&self, trades: &[u32]) -> Vec<u32> {
        let requested = self.shared.requested();
        let is_requested = |trade: &&u32| {
            requested.contains_key(&self.trade_batch.trades[**trade as usize].trade_id)
        };
        trades.iter().filter(is_requested).copied().collect()
    }

    /// True if the chain service has accepted a batch of this id.
    async fn is_known(&self, id: &str) -> Result<bool, Halt> {
        let context = caused_by(&format!("{SOURCE}:{id}"));
        let (cfa, context) = (&self.shared.cfa, &context);
        self.call(id, || async move {
            match cfa.trade_batch(context, id, 0).await {
                Ok(_) => Ok(true),
                Err(error) if error.is_not_found() => Ok(false),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Polls until the chain service reports the outcome of the batch.
    async fn await_final(&self, attempt: u32) -> Result<StepResult, Halt> {
        let id = derived::attempt_id(&self.row.batch_id, attempt);
        let context = caused_by(&format!("{SOURCE}:{id}"));
        let (cfa, trades) = (&self.shared.cfa, self.row.saga.open.len());
        loop {
            let poll = self.call(&id, || cfa.trade_batch(&context, &id, WAIT_MS));
            let batch = poll.await?;
            match batch.status {
                TradeBatchStatus::Finalized => {
                    self.shared.chain_size.executed(trades);
                    let failed = self.indices(&batch.failed);
                    if !failed.is_empty() {
                        tracing::warn!(
                            batch = id,
                            trades = ?self.trade_id_strings(&failed),
                            "trades failed on chain: {}",
                            self.after_failure()
                        );
                    }
                    return Ok(StepResult::Included {
                        tx_hash: batch.tx_hash,
                        failed,
                    });
                }
                TradeBatchStatus::Failed => {
                    let next = match trades {
                        0 | 1 => self.after_failure(),
                        _ => "submitting its halves",
                    };
                    tracing::error!(
                        batch = id,
                        trades,
                        "chain batch failed, no trade executed: {next}"
                    );
                    // Once per batch: its halves tell little about the next ones.
                    if attempt == 1 {
                        self.shared.chain_size.failed(trades);
                    }
                    return Ok(StepResult::Failed);
                }
                TradeBatchStatus::Submitted => {}
            }
            if self.shared.shutdown.is_cancelled() {
                return Err(Halt::Stopped);
            }
        }
    }

    async fn finalize(&self, trades: &[u32], tx_hash: &str) -> Result<StepResult, Halt> {
        let operation_ids: Vec<String> = trades
            .iter()
            .flat_map(|trade| request::operation_ids(&self.trade_batch.trades[*trade as usize]))
            .collect();
        for (chunk, operation_ids) in operation_ids.chunks(FINALIZE_MAX).enumerate() {
            let key = format!(
                "settlement:{}:final:{}:{chunk}",
                self.row.batch_id, self.row.saga.attempt
            );
            let ledger = &self.shared.ledger;
            self.call(&self.row.batch_id, || {
                finalize(ledger, &key, operation_ids, tx_hash)
            })
            .await?;
        }
        failpoint::reach(failpoint::FINALIZED);
        Ok(StepResult::Finalized)
    }

    /// Busts trades: reverses their operations, once each (T21), if they are posted. Orders are not
    /// reinstated.
    async fn bust(&self, trades: &[u32]) -> Result<StepResult, Halt> {
        for index in trades {
            let trade = &self.trade_batch.trades[*index as usize];
            let reason = self.bust_reason(*index);
            let operation_ids = match self.row.saga.unposted.contains(index) {
                true => Vec::new(),
                false => request::operation_ids(trade),
            };
            // Reversed in the opposite order of posting: fee, sell, buy.
            for operation_id in operation_ids.into_iter().rev() {
                let (ledger, reason) = (&self.shared.ledger, &reason);
                self.call(&self.row.batch_id, || {
                    reverse(ledger, &operation_id, reason)
                })
                .await?;
            }
            tracing::error!(
                trade_id = %trade.trade_id,
                batch = self.row.batch_id,
                buyer = %trade.buyer_id,
                seller = %trade.seller_id,
                reason,
                severity = "critical",
                "trade is bust: the ledger has none of its operations, or they are reversed; a case is open"
            );
            metrics::counter!("trades_bust_total").increment(1);
        }
        failpoint::reach(failpoint::BUSTED);
        Ok(StepResult::Busted)
    }

    /// What happens to single trades that failed in this attempt, for logs.
    fn after_failure(&self) -> &'static str {
        match self.row.saga.is_retry {
            true => "busting the trades",
            false => "retrying in a new batch",
        }
    }

    /// Why a trade is bust, for the ledger's operations and the case.
    fn bust_reason(&self, index: u32) -> String {
        let trade_id = self.trade_batch.trades[index as usize].trade_id;
        if !self.row.saga.withdrawn.contains(&index) {
            return format!("Trade {trade_id} failed on chain");
        }
        let requested = self.shared.requested();
        let why = requested.get(&trade_id).map_or("", String::as_str);
        format!("Trade {trade_id} bust by an operator: {why}")
    }

    /// The cases of the bust trades.
    fn cases(&self) -> Vec<NewCase> {
        let case = |index: &u32| {
            let trade = &self.trade_batch.trades[*index as usize];
            NewCase {
                trade_id: trade.trade_id,
                instrument_id: trade.instrument_id.to_string(),
                buyer_id: trade.buyer_id.to_string(),
                seller_id: trade.seller_id.to_string(),
                quantity: trade.quantity,
                payment: trade.payment,
                fee: trade.fee,
                reason: self.bust_reason(*index),
            }
        };
        self.row.saga.bust.iter().map(case).collect()
    }

    async fn call<T, F: Future<Output = Result<T, CallError>> + Send>(
        &self,
        id: &str,
        call: impl FnMut() -> F + Send,
    ) -> Result<T, Halt> {
        retry_call(&self.shared, failure::CHAIN, id, call).await
    }

    fn indices(&self, trade_ids: &[Id128]) -> Vec<u32> {
        let ids = self.trade_batch.trades.iter().map(|trade| trade.trade_id);
        let by_id: HashMap<Id128, u32> = ids.zip(0u32..).collect();
        let found = trade_ids.iter().filter_map(|id| by_id.get(id).copied());
        found.collect()
    }

    fn trade_ids(&self, trades: &[u32]) -> Vec<Id128> {
        let id = |trade: &u32| self.trade_batch.trades[*trade as usize].trade_id;
        trades.iter().map(id).collect()
    }

    /// The `Bust` commands of the bust trades.
    fn busts(&self) -> Vec<Bust> {
        let command = |trade: &u32| self.row.busts[*trade as usize];
        self.row.saga.bust.iter().map(command).collect()
    }

    fn trade_id_strings(&self, trades: &[u32]) -> Vec<String> {
        self.trade_ids(trades)
            .iter()
            .map(Id128::to_string)
            .collect()
    }
}

/// Finalizes operations. If the ledger refuses one because of its status, finalizes them one by one
/// and counts operations that are final already as done.
async fn finalize(
    ledger: &LedgerClient,
    key: &str,
    operation_ids: &[String],
    tx_hash: &str,
) -> Result<(), CallError> {
    let context = caused_by(key);
    match ledger.finalize(&context, key, operation_ids, tx_hash).await {
        Ok(()) => return Ok(()),
        Err(error) if !is_status_conflict(&error) => return Err(error),
        Err(_) => {}
    }
    let mut refused = Ok(());
    for operation_id in operation_ids {
        let single = std::slice::from_ref(operation_id);
        match ledger.finalize(&context, key, single, tx_hash).await {
            Ok(()) => {}
            Err(error) if is_status_conflict(&error) => {
                let status = ledger.operation_status(&context, operation_id).await?;
                if status != OperationStatus::Finalized {
                    tracing::error!(
                        operation_id,
                        severity = "critical",
                        "operation is final on chain, but the ledger refuses to finalize it"
                    );
                    refused = Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
    refused
}

/// Reverses an operation. One that is reversed, failed or rejected already counts as done.
async fn reverse(ledger: &LedgerClient, operation_id: &str, reason: &str) -> Result<(), CallError> {
    let key = format!("bust:{operation_id}");
    let context = caused_by(&key);
    let reversed = ledger.reverse(&context, &key, operation_id, reason);
    let Err(error) = reversed.await else {
        return Ok(());
    };
    let is_done = match error.reason().as_deref() {
        Some("ALREADY_REVERSED") => true,
        Some("OPERATION_STATUS") => {
            let now = ledger.operation_status(&context, operation_id).await?;
            matches!(now, OperationStatus::Failed | OperationStatus::Rejected)
        }
        _ => false,
    };
    if is_done { Ok(()) } else { Err(error) }
}

fn is_status_conflict(error: &CallError) -> bool {
    error.reason().as_deref() == Some("OPERATION_STATUS")
}
