//! SettleTrades: many trades in one chain transaction (`design.md` 4 and 7, T02, T11).
//!
//! A trade has one operation, keyed by its trade id. A batch is stored with its trades, then
//! submitted, and final with its receipt. It lists the failed trades for settlement: those that the
//! contract left out, and those left out before the chain, because a party is sanctioned (T46) or
//! the trade can never be executed. So no trade blocks the next batch. A later batch may contain a
//! left-out trade. A settled trade is not sent again.
//!
//! If the node refuses the transaction, the trades may still be valid: the batch waits for an
//! operator. Only the contract's result ends it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use service_clients::caused_by;
use types::Decimal;
use uuid::Uuid;

use super::drive::count_ended;
use super::workers::log_failure;
use super::{PEER_CALLS, RequestMeta, Service, units, unsigned};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    Batch, BatchStatus, Flow, Instrument, InstrumentStatus, Operation, REVERTED_MESSAGE, Rejection,
    Status, TradeLeg,
};
use crate::saga::Chain;
use chain::{Action, Address, ChainError, Receipt, ReceiptStatus, Trade};

const LEFT_OUT_MESSAGE: &str = "Trade left out by the settlement contract";
const BUSTED_MESSAGE: &str = "Trade bust before its settlement";
/// Health part of batches refused by the node.
const HEALTH: &str = "trade batches";

/// A trade as sent to the chain. Stored with the batch, so a resumed batch sends the same.
#[derive(Serialize, Deserialize)]
struct SentTrade {
    trade_id: String,
    token: String,
    number: u64,
    buyer_id: String,
    seller_id: String,
    quantity: i64,
    payment: i64,
    fee: i64,
}

impl Service {
    /// Stores and submits a batch. A repeat of `batch_id` returns the stored batch and true, after
    /// submitting it if necessary.
    ///
    /// # Errors
    /// `Unavailable` also while the holders of one of the instruments are being moved to a new
    /// token: nothing is stored, and the batch is sent again.
    pub async fn settle_trades(
        &self,
        meta: &RequestMeta,
        batch_id: &str,
        legs: &[TradeLeg],
    ) -> Result<(Batch, bool), Error> {
        let _lock = self.object_locks.lock(batch_id).await;
        if let Some(batch) = self.repo.batch(batch_id).await? {
            return Ok((self.submit_batch(batch, None).await?, true));
        }
        self.check_legs(legs)?;
        let instruments = self.instruments_of(legs).await?;
        let ineligible = self.ineligible_parties(meta, legs).await?;
        let now_us = self.now_us();
        let mut contents = Contents::new(batch_id, legs.len());
        let mut tx = self.repo.begin().await?;
        let tokens = instruments.iter();
        let tokens = tokens.map(|(id, of)| (id.as_str(), of.contract_address.as_str()));
        self.repo
            .require_tokens_in_tx(&mut tx, &tokens.collect())
            .await?;
        let trade_ids: Vec<&str> = legs.iter().map(|leg| leg.trade_id.as_str()).collect();
        let mut stored = self.repo.stored_trades_in_tx(&mut tx, &trade_ids).await?;
        for leg in legs {
            // Buyer and seller may be equal, if the member's sessions have different groups. Then
            // only the fee moves.
            match judge(leg, &instruments, &ineligible, meta, now_us) {
                Ok((operation, token)) => {
                    let stored = stored.take(&operation);
                    contents.add(leg, operation, stored, token, now_us)?;
                }
                Err(refusal) => leave_out(&mut contents.batch, leg, &refusal.to_string()),
            }
        }
        let Contents {
            mut batch,
            sent,
            new,
            included,
            settled_before,
        } = contents;
        if sent.is_empty() {
            batch.status = BatchStatus::Finalized;
            batch.tx_hash = settled_before;
        }
        let payload =
            serde_json::to_string(&sent).map_err(|error| Error::Damaged(error.to_string()))?;
        let repo = &self.repo;
        repo.insert_trades_in_tx(&mut tx, &new, Some(batch_id))
            .await?;
        repo.assign_trades_in_tx(&mut tx, &included, batch_id)
            .await?;
        repo.insert_batch_in_tx(&mut tx, &batch, &payload, now_us)
            .await?;
        tx.commit().await?;
        failpoint::reach(failpoint::BATCH_STORED);
        Ok((self.submit_batch(batch, Some(sent)).await?, false))
    }

    /// Ends the operation of a trade that was bust before a batch had it: no batch will. Others end
    /// with their batch.
    pub async fn on_trade_busted(&self, trade_id: &str) -> Result<(), Error> {
        let Some(mut operation) = self.repo.operation_of_trade(trade_id).await? else {
            return Ok(());
        };
        let mut tx = self.repo.begin().await?;
        let id = &operation.operation_id;
        if !self.repo.is_without_batch_in_tx(&mut tx, id).await? {
            return Ok(());
        }
        operation.set_status(Status::Failed, self.now_us());
        operation.rejection = Some((Rejection::IntegrationError, BUSTED_MESSAGE.to_owned()));
        let before = Status::Created.as_str();
        let record = publish::audit_end(&operation, "transfer.failed", before);
        self.repo.save_operation_in_tx(&mut tx, &operation).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        tx.commit().await?;
        count_ended(&operation);
        Ok(())
    }

    fn check_legs(&self, legs: &[TradeLeg]) -> Result<(), Refusal> {
        if legs.is_empty() || legs.len() > self.config.batch_trades_max {
            return Err(Refusal::field(
                "trades",
                format!("must contain 1 to {} trades", self.config.batch_trades_max),
            ));
        }
        let mut seen = BTreeSet::new();
        if !legs
            .iter()
            .all(|leg| !leg.trade_id.is_empty() && seen.insert(leg.trade_id.as_str()))
        {
            return Err(Refusal::field(
                "trades.trade_id",
                "must not be empty or repeated",
            ));
        }
        Ok(())
    }

    /// The instruments of the batch, in any status: trades matched before a halt or maturity are
    /// settled.
    async fn instruments_of(
        &self,
        legs: &[TradeLeg],
    ) -> Result<BTreeMap<String, Instrument>, Error> {
        let wanted: BTreeSet<&str> = legs.iter().map(|leg| leg.instrument_id.as_str()).collect();
        let mut instruments = BTreeMap::new();
        for instrument_id in wanted {
            if let Some(instrument) = self.repo.instrument(instrument_id).await? {
                instruments.insert(instrument_id.to_owned(), instrument);
            }
        }
        Ok(instruments)
    }

    /// Parties that may not or cannot trade on the chain, with the rejection of their trades. A
    /// party is sanctioned, unknown, or has no address of its own. Each party is checked once.
    async fn ineligible_parties(
        &self,
        meta: &RequestMeta,
        legs: &[TradeLeg],
    ) -> Result<HashMap<String, (Rejection, String)>, Error> {
        let parties: BTreeSet<&String> = legs
            .iter()
            .flat_map(|leg| [&leg.buyer_id, &leg.seller_id])
            .collect();
        let parties: Vec<String> = parties.into_iter().cloned().collect();
        // Identity has no call for several users.
        let checked_parties = stream::iter(parties).map(|party| async move {
            let rejection = self.ineligibility(meta, &party).await?;
            Ok::<_, Error>(rejection.map(|rejection| (party, rejection)))
        });
        let checked_parties: Vec<_> = checked_parties
            .buffer_unordered(PEER_CALLS)
            .try_collect()
            .await?;
        Ok(checked_parties.into_iter().flatten().collect())
    }

    /// The rejection of a party's trades; `None`: the party may trade.
    async fn ineligibility(
        &self,
        meta: &RequestMeta,
        party: &str,
    ) -> Result<Option<(Rejection, String)>, Error> {
        match self.store_address(party).await {
            Err(Error::Refused(refusal)) => {
                return Ok(Some((Rejection::IntegrationError, refusal.to_string())));
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        let context = caused_by(&meta.correlation_id);
        let identity = &self.peers.identity;
        let checked = identity.check_sanctions(&context, party, "trade settlement");
        match checked.await {
            Err(error) if error.is_not_found() => {
                Ok(Some((Rejection::IntegrationError, error.to_string())))
            }
            hit => Ok(hit?.map(|reason| (Rejection::SanctionsHit, reason))),
        }
    }

    /// Submits the batch unless it is submitted. The caller holds the batch's lock. `sent`: its
    /// stored trades; `None`: they are read.
    async fn submit_batch(
        &self,
        mut batch: Batch,
        sent: Option<Vec<SentTrade>>,
    ) -> Result<Batch, Error> {
        if batch.status != BatchStatus::Submitted || batch.tx_hash.is_some() {
            return Ok(batch);
        }
        let sent = match sent {
            Some(sent) => sent,
            None => self.sent_trades(&batch.batch_id).await?,
        };
        let users: BTreeSet<&str> = sent
            .iter()
            .flat_map(|trade| [trade.buyer_id.as_str(), trade.seller_id.as_str()])
            .collect();
        let action = Action::SettleTrades {
            settlement: self.contracts.settlement,
            id: batch.batch_id.clone(),
            trades: chain_trades(&sent)?,
        };
        let submitted = async {
            let users: Vec<&str> = users.into_iter().collect();
            self.ensure_registered(&users, &batch.batch_id).await?;
            let key = format!("batch:{}", batch.batch_id);
            Ok::<_, Error>(self.chain.submit(&key, &action.call()).await?)
        };
        match submitted.await {
            Ok(submitted) => {
                failpoint::reach(failpoint::BATCH_SUBMITTED);
                self.health.set_ok(HEALTH);
                batch.tx_hash = Some(submitted.tx_hash.to_string());
                let mut tx = self.repo.begin().await?;
                self.repo.save_batch_in_tx(&mut tx, &batch).await?;
                self.repo
                    .submit_batch_operations_in_tx(&mut tx, &batch, self.now_us())
                    .await?;
                tx.commit().await?;
                self.batch_changes.send_modify(|changes| *changes += 1);
                Ok(batch)
            }
            // Too little gas, no coins, or another nonce expected: nothing was sent and the trades
            // are valid, so the batch waits for an operator.
            Err(Error::Chain(ChainError::Refused(reason))) => {
                tracing::error!(
                    batch_id = batch.batch_id,
                    reason,
                    severity = "critical",
                    "blockchain refuses a batch of trades, retrying at the next sweep"
                );
                self.health
                    .set_failing(HEALTH, "the blockchain refuses a batch of trades");
                Err(ChainError::Unavailable(reason).into())
            }
            Err(error) => Err(error),
        }
    }

    /// The stored trades of a batch.
    async fn sent_trades(&self, batch_id: &str) -> Result<Vec<SentTrade>, Error> {
        serde_json::from_str(&self.repo.batch_payload(batch_id).await?)
            .map_err(|error| Error::Damaged(error.to_string()))
    }

    /// Applies the receipt of a batch.
    pub(super) async fn finish_batch(
        &self,
        batch_id: &str,
        receipt: &Receipt,
    ) -> Result<(), Error> {
        let _lock = self.object_locks.lock(batch_id).await;
        let Some(mut batch) = self.repo.batch(batch_id).await? else {
            return Ok(());
        };
        if batch.status != BatchStatus::Submitted {
            return Ok(());
        }
        batch.block_number = Some(receipt.block_number);
        batch.gas_used = receipt.gas_used;
        if receipt.status == ReceiptStatus::Reverted {
            return self
                .close_batch(&mut batch, &BTreeSet::new(), Some(REVERTED_MESSAGE))
                .await;
        }
        let left_out: BTreeSet<(String, u64)> = receipt
            .failed_trades
            .iter()
            .map(|failed| (failed.token.to_string(), failed.number))
            .collect();
        let sent = match left_out.is_empty() {
            true => Vec::new(),
            false => self.sent_trades(batch_id).await?,
        };
        let failed = sent
            .iter()
            .filter(|trade| left_out.contains(&(trade.token.clone(), trade.number)))
            .map(|trade| trade.trade_id.clone())
            .collect();
        self.close_batch(&mut batch, &failed, None).await
    }

    /// Ends the batch and its operations. With `reason` all fail, otherwise only those in `failed`.
    async fn close_batch(
        &self,
        batch: &mut Batch,
        failed: &BTreeSet<String>,
        reason: Option<&str>,
    ) -> Result<(), Error> {
        let now_us = self.now_us();
        let mut events = Vec::new();
        let mut ended = Vec::new();
        for mut operation in self.repo.operations_of_batch(&batch.batch_id).await? {
            if operation.status.is_terminal() {
                continue;
            }
            operation.block_number = batch.block_number;
            let message = reason.or_else(|| {
                failed
                    .contains(&operation.trade_id)
                    .then_some(LEFT_OUT_MESSAGE)
            });
            match message {
                None => {
                    operation.progress.chain = Chain::Succeeded;
                    operation.progress.settled = true;
                    operation.set_status(Status::Finalized, now_us);
                    events.push(publish::transferred(&operation));
                }
                Some(message) => {
                    operation.progress.chain = Chain::Reverted;
                    operation.set_status(Status::Failed, now_us);
                    operation.rejection = Some((Rejection::IntegrationError, message.to_owned()));
                    batch.failed_trade_ids.push(operation.trade_id.clone());
                    events.push(publish::audit_end(
                        &operation,
                        "transfer.failed",
                        Status::OnchainSubmitted.as_str(),
                    ));
                }
            }
            ended.push(operation);
        }
        batch.status = if reason.is_some() {
            BatchStatus::Failed
        } else {
            BatchStatus::Finalized
        };
        let mut tx = self.repo.begin().await?;
        let is_final = |operation: &&Operation| operation.status == Status::Finalized;
        let (done, refused): (Vec<_>, Vec<_>) = ended.iter().partition(is_final);
        self.repo
            .finalize_trades_in_tx(&mut tx, &done, batch, now_us)
            .await?;
        for operation in refused {
            self.repo.save_operation_in_tx(&mut tx, operation).await?;
        }
        self.repo.save_batch_in_tx(&mut tx, batch).await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        failpoint::reach(failpoint::BATCH_ENDED);
        ended.iter().for_each(count_ended);
        self.batch_changes.send_modify(|changes| *changes += 1);
        Ok(())
    }

    /// Waits up to `wait` for the batch to end and returns it. Reads the receipt at once and at
    /// every block, which is earlier than its event. This also finds the receipt of a block that
    /// was read before the batch's transaction hash was stored.
    pub async fn trade_batch(&self, batch_id: &str, wait: Duration) -> Result<Batch, Error> {
        let deadline = tokio::time::Instant::now() + wait;
        let mut changes = self.batch_changes.subscribe();
        let mut last_read_block = self.chain.last_read_block();
        let mut is_unread = true;
        loop {
            changes.borrow_and_update();
            let batch = self
                .repo
                .batch(batch_id)
                .await?
                .ok_or(Refusal::BatchNotFound)?;
            if batch.status != BatchStatus::Submitted || tokio::time::Instant::now() >= deadline {
                return Ok(batch);
            }
            if is_unread && let Some(tx_hash) = &batch.tx_hash {
                last_read_block.borrow_and_update();
                self.on_receipt(tx_hash).await?;
                is_unread = false;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep_until(deadline) => {}
                _ = changes.changed() => {}
                moved = last_read_block.changed() => {
                    if moved.is_err() {
                        return Ok(batch);
                    }
                    is_unread = true;
                }
            }
        }
    }

    /// Resumes batches after a crash or a missed receipt. If a batch cannot be submitted, later
    /// ones are not submitted either, because they may depend on it. The receipts of later ones are
    /// read.
    pub(super) async fn resume_batches(&self) -> Result<(), Error> {
        let mut first_refused = None;
        for batch in self.repo.open_batches().await? {
            match &batch.tx_hash {
                Some(tx_hash) => {
                    log_failure("batch", &batch.batch_id, self.on_receipt(tx_hash).await);
                }
                None if first_refused.is_none() => {
                    let _lock = self.object_locks.lock(&batch.batch_id).await;
                    if let Some(batch) = self.repo.batch(&batch.batch_id).await? {
                        first_refused = self.submit_batch(batch, None).await.err();
                    }
                }
                None => {}
            }
        }
        first_refused.map_or(Ok(()), Err)
    }

    /// Builds the operation of a TradeExecuted event (T11). Its chain step starts only when
    /// settlement sends the trade, after the ledger transaction.
    pub async fn trade_operation(
        &self,
        meta: &RequestMeta,
        leg: &TradeLeg,
    ) -> Result<Operation, Error> {
        let instrument = self.require_instrument(&leg.instrument_id).await?;
        let units_minor = units("quantity", leg.quantity, instrument.decimals)?;
        Ok(operation_of(leg, units_minor, meta, self.now_us()))
    }

    /// Stores the operations of trades in one transaction, each event once.
    pub async fn store_trades(
        &self,
        consumer: &str,
        trades: Vec<(Uuid, Operation)>,
    ) -> Result<(), Error> {
        if trades.is_empty() {
            return Ok(());
        }
        let event_ids: Vec<Uuid> = trades.iter().map(|(event_id, _)| *event_id).collect();
        let mut tx = self.repo.begin().await?;
        let are_new = events::inbox::accept_many_in_tx(&mut tx, consumer, &event_ids).await?;
        let accepted = trades.into_iter().zip(are_new);
        let accepted = accepted.filter(|(_, is_new)| *is_new);
        let mut operations: Vec<Operation> = accepted.map(|((_, trade), _)| trade).collect();
        let trade_ids: Vec<&str> = operations.iter().map(|of| of.trade_id.as_str()).collect();
        let mut stored = self.repo.stored_trades_in_tx(&mut tx, &trade_ids).await?;
        let mut seen = BTreeSet::new();
        // Each trade once, also if several events name it: `take` finds its operation once.
        operations.retain(|of| seen.insert(of.trade_id.clone()) && stored.take(of).is_none());
        self.repo
            .insert_trades_in_tx(&mut tx, &operations, None)
            .await?;
        Ok(tx.commit().await?)
    }
}

/// The trades as the contract takes them.
fn chain_trades(sent: &[SentTrade]) -> Result<Vec<Trade>, Error> {
    let mut addresses: HashMap<&str, Address> = HashMap::new();
    let mut trades = Vec::with_capacity(sent.len());
    for trade in sent {
        trades.push(Trade {
            token: trade
                .token
                .parse()
                .map_err(|_| Error::Damaged("token of a trade".into()))?,
            number: trade.number,
            buyer: *addresses
                .entry(&trade.buyer_id)
                .or_insert_with(|| Address::of_user(&trade.buyer_id)),
            seller: *addresses
                .entry(&trade.seller_id)
                .or_insert_with(|| Address::of_user(&trade.seller_id)),
            quantity: unsigned(trade.quantity),
            payment: unsigned(trade.payment),
            fee: unsigned(trade.fee),
        });
    }
    Ok(trades)
}

/// A batch that is being composed.
struct Contents {
    batch: Batch,
    sent: Vec<SentTrade>,
    new: Vec<Operation>,
    /// Stored operations that become part of the batch.
    included: Vec<Operation>,
    /// Transaction of an earlier batch that settled one of the trades.
    settled_before: Option<String>,
}

impl Contents {
    fn new(batch_id: &str, trades: usize) -> Self {
        Self {
            batch: Batch {
                batch_id: batch_id.to_owned(),
                status: BatchStatus::Submitted,
                tx_hash: None,
                block_number: None,
                trades: trades as u32,
                failed_trade_ids: Vec::new(),
                gas_used: 0,
            },
            sent: Vec::with_capacity(trades),
            new: Vec::with_capacity(trades),
            included: Vec::new(),
            settled_before: None,
        }
    }

    /// Adds a trade, with its stored operation if there is one.
    ///
    /// # Errors
    /// Another batch has the trade and is not final: the caller retries this batch after it.
    fn add(
        &mut self,
        leg: &TradeLeg,
        wanted: Operation,
        stored: Option<Operation>,
        token: &str,
        now_us: i64,
    ) -> Result<(), Error> {
        let is_new = stored.is_none();
        let operation = match stored.map(|stored| include(stored, &wanted, now_us)) {
            None => wanted,
            Some(BatchInclusion::Included(stored)) => *stored,
            Some(BatchInclusion::Settled(tx_hash)) => {
                self.settled_before = tx_hash.or(self.settled_before.take());
                return Ok(());
            }
            Some(BatchInclusion::UnderWay) => return Err(Error::Unavailable("Trade batch")),
            Some(BatchInclusion::Other) => {
                leave_out(&mut self.batch, leg, "the id belongs to another trade");
                return Ok(());
            }
        };
        match &operation.rejection {
            Some((_, message)) => leave_out(&mut self.batch, leg, message),
            None => self.sent.push(SentTrade {
                trade_id: leg.trade_id.clone(),
                token: token.to_owned(),
                number: leg.trade_number,
                buyer_id: leg.buyer_id.clone(),
                seller_id: leg.seller_id.clone(),
                quantity: operation.units_minor,
                payment: leg.payment_minor,
                fee: leg.fee_minor,
            }),
        }
        match is_new {
            true => self.new.push(operation),
            false => self.included.push(operation),
        }
        Ok(())
    }
}

/// The operation of a trade in a batch, PROCESSING or REJECTED, and the token that it moves.
///
/// # Errors
/// The trade cannot be recorded.
fn judge<'a>(
    leg: &TradeLeg,
    instruments: &'a BTreeMap<String, Instrument>,
    ineligible: &HashMap<String, (Rejection, String)>,
    meta: &RequestMeta,
    now_us: i64,
) -> Result<(Operation, &'a str), Refusal> {
    let instrument = instruments.get(&leg.instrument_id);
    let instrument = instrument.ok_or(Refusal::InstrumentNotFound)?;
    let units_minor = units("trades.quantity", leg.quantity, instrument.decimals)?;
    let mut operation = operation_of(leg, units_minor, meta, now_us);
    operation.rejection = if instrument.status == InstrumentStatus::Draft {
        let message = Refusal::InstrumentNotActive.to_string();
        Some((Rejection::InstrumentNotActive, message))
    } else {
        let found = ineligible.get(&leg.buyer_id);
        found.or_else(|| ineligible.get(&leg.seller_id)).cloned()
    };
    let next = match operation.rejection {
        Some(_) => Status::Rejected,
        None => Status::Processing,
    };
    operation.set_status(next, now_us);
    Ok((operation, instrument.contract_address.as_str()))
}

/// The operation of a trade in status CREATED.
pub(super) fn operation_of(
    leg: &TradeLeg,
    units_minor: i64,
    meta: &RequestMeta,
    now_us: i64,
) -> Operation {
    let mut operation = Operation::new(
        Flow::Trade,
        &leg.seller_id,
        &leg.trade_id,
        &meta.correlation_id,
        now_us,
    );
    operation.amount = if leg.quantity.is_zero() {
        Decimal::ZERO
    } else {
        leg.quantity
    };
    operation.units_minor = units_minor;
    operation.currency_code = leg.instrument_id.clone();
    operation.instrument_id = leg.instrument_id.clone();
    operation.external_ref = leg.trade_id.clone();
    operation.from_user_id = leg.seller_id.clone();
    operation.to_user_id = leg.buyer_id.clone();
    operation.trade_id = leg.trade_id.clone();
    operation.payment_minor = leg.payment_minor;
    operation.fee_minor = leg.fee_minor;
    operation
}

/// How a batch treats a trade that is stored already.
enum BatchInclusion {
    /// The batch contains it. It was stored from its event, or left out of an earlier batch.
    Included(Box<Operation>),
    /// Settled by this transaction.
    Settled(Option<String>),
    /// In another batch that is not final.
    UnderWay,
    /// The id belongs to another trade.
    Other,
}

/// Decides how a batch treats a stored trade; `wanted` is the trade of the request.
fn include(mut stored: Operation, wanted: &Operation, now_us: i64) -> BatchInclusion {
    let is_same = stored.instrument_id == wanted.instrument_id
        && stored.units_minor == wanted.units_minor
        && stored.from_user_id == wanted.from_user_id
        && stored.to_user_id == wanted.to_user_id;
    let is_free = matches!(
        stored.status,
        Status::Created | Status::Failed | Status::Rejected
    );
    if !is_same || (is_free && stored.flow != Flow::Trade) {
        return BatchInclusion::Other;
    }
    if stored.status == Status::Finalized {
        return BatchInclusion::Settled(stored.tx_hash);
    }
    if !is_free {
        return BatchInclusion::UnderWay;
    }
    stored.attempts += 1;
    stored.payment_minor = wanted.payment_minor;
    stored.fee_minor = wanted.fee_minor;
    stored.progress = wanted.progress;
    stored.rejection = wanted.rejection.clone();
    if stored.status == Status::Rejected && wanted.status == Status::Processing {
        // The sanctions hit is cleared, so the trade is processed again.
        stored.status = Status::Created;
    }
    if stored.status == Status::Failed && wanted.status == Status::Rejected {
        stored.status = Status::Created;
    }
    stored.set_status(wanted.status, now_us);
    BatchInclusion::Included(Box::new(stored))
}

/// Lists a trade as failed before the chain. Settlement retries it once and then reverses it.
fn leave_out(batch: &mut Batch, leg: &TradeLeg, reason: &str) {
    tracing::error!(
        batch_id = batch.batch_id,
        trade_id = leg.trade_id,
        instrument_id = leg.instrument_id,
        reason,
        severity = "critical",
        "trade is left out of the chain transaction"
    );
    batch.failed_trade_ids.push(leg.trade_id.clone());
}
