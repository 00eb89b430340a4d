//! Reads the chain block by block, in order and without gaps, and publishes events (`publish`).
//!
//! The watcher skips transactions that this connector did not sign. It reads up to the head:
//!
//! | block | effect |
//! |---|---|
//! | fewer than `confirmations` blocks above it | its submissions are included; it may be undone |
//! | enough blocks above it | it is final: the cursor advances and its events are published |
//!
//! Confirmations are counted by the read blocks, each the parent of the next: the chain may change
//! between the question for its head and the one for a block. A block twice as deep is final at
//! once, because a reorganisation within `confirmations` leaves it enough blocks.
//!
//! A block whose parent is not the last read block ends a reorganisation: the watcher undoes the
//! unconfirmed blocks down to the common ancestor and reads the new ones. `upkeep` sends again what
//! the new blocks do not contain. If the last final block is not on the chain any more, effects are
//! in other stores that no longer have a transaction: the watcher stops finalising, and health and
//! submissions show it until the node has the block again. With zero confirmations every
//! reorganisation is of this kind: such a chain is configured as immediately final.

use std::collections::{HashMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alloy::eips::BlockId;
use alloy::providers::Provider;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::node_receipt::NodeReceipt;
use super::repo::{Ours, ReadBlock};
use super::submit::count;
use super::{
    BlockInfo, ChainError, Connector, Receipt, ReceiptStatus, TokenTransfer, to_receipt,
    to_transfer,
};
use crate::{TxHash, publish};

const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Health part of the node and its answers.
const NODE: &str = "node";
/// Health part of a break: a final block was replaced.
const FINALITY: &str = "finality";

pub struct Watcher {
    pub connector: Connector,
    pub confirmations: u64,
    /// Polling interval for new blocks if `head` is `None`.
    pub poll_interval: Duration,
    /// Head of the embedded chain: each change wakes the watcher.
    pub head: Option<watch::Receiver<u64>>,
}

/// The blocks that were read last.
struct ReadBlocks {
    /// Last final block.
    cursor: Option<ReadBlock>,
    /// Unconfirmed blocks above it, ascending.
    unconfirmed: VecDeque<ReadBlock>,
}

impl ReadBlocks {
    fn tip(&self) -> Option<ReadBlock> {
        self.unconfirmed.back().copied().or(self.cursor)
    }
}

impl Watcher {
    pub async fn run(mut self, health: rpc::Health, shutdown: CancellationToken) {
        loop {
            // Shutdown ends the reading as a crash would: each block is one transaction.
            let outcome = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                outcome = self.catch_up() => outcome,
            };
            self.report(&outcome, &health);
            let pause = match (&outcome, &self.head) {
                (Err(_), _) => Some(RETRY_INTERVAL),
                (Ok(()), None) => Some(self.poll_interval),
                (Ok(()), Some(_)) => None,
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = next_block(&mut self.head, pause) => {}
            }
        }
    }

    fn report(&self, outcome: &Result<(), ChainError>, health: &rpc::Health) {
        match outcome {
            Ok(()) => {
                self.set_broken(None);
                health.set_ok(NODE);
                health.set_ok(FINALITY);
            }
            Err(error @ ChainError::Reorganised { .. }) => {
                let is_new = self.set_broken(Some(error.to_string()));
                health.set_ok(NODE);
                health.set_failing(FINALITY, error.to_string());
                if is_new {
                    metrics::counter!("blockchain_reorganisations_total", "depth" => "final")
                        .increment(1);
                    tracing::error!(%error, severity = "critical", "a final block was replaced");
                }
            }
            Err(error) => {
                health.set_failing(NODE, error.to_string());
                tracing::warn!(%error, "reading the chain failed");
            }
        }
    }

    /// Returns whether the break is new.
    fn set_broken(&self, reason: Option<String>) -> bool {
        let broken = self.connector.inner.broken.lock();
        let mut broken = broken.unwrap_or_else(PoisonError::into_inner);
        let is_new = reason.is_some() && broken.is_none();
        *broken = reason;
        is_new
    }

    /// Reads all blocks after the last read one.
    async fn catch_up(&self) -> Result<(), ChainError> {
        let inner = &self.connector.inner;
        let head = self.connector.block_number().await?;
        inner.head.store(head, Ordering::Relaxed);
        let mut read = ReadBlocks {
            cursor: inner.repo.cursor().await?,
            unconfirmed: inner.repo.unconfirmed().await?.into(),
        };
        if let Some((tip, _)) = read.tip() {
            inner.read_tip.store(tip, Ordering::Relaxed);
            if head <= tip {
                return self.check_tip(&mut read, head).await;
            }
        }
        loop {
            let number = read.tip().map_or(0, |(number, _)| number + 1);
            if number > head {
                break;
            }
            let block = self.node_block(number).await?;
            if read
                .tip()
                .is_some_and(|(_, hash)| hash != block.parent_hash)
            {
                self.unwind(&mut read).await?;
                continue;
            }
            let is_deep = number.saturating_add(2 * self.confirmations) <= head;
            if read.unconfirmed.is_empty() && is_deep {
                self.finalise(&block).await?;
                read.cursor = Some((number, block.hash));
            } else {
                let ours = inner.repo.filter_ours(&block.tx_hashes).await?;
                let included = inner.repo.include_block(number, &block.hash, &ours);
                included.await?;
                read.unconfirmed.push_back((number, block.hash));
                self.finalise_confirmed(&mut read, number).await?;
            }
            inner.read_tip.store(number, Ordering::Relaxed);
        }
        Ok(())
    }

    fn is_confirmed(&self, number: u64, tip: u64) -> bool {
        number.saturating_add(self.confirmations) <= tip
    }

    /// Without new blocks: checks that the node still has the last read one.
    async fn check_tip(&self, read: &mut ReadBlocks, head: u64) -> Result<(), ChainError> {
        // The embedded chain has no reorganisations.
        let (None, Some((number, hash))) = (&self.head, read.tip()) else {
            return Ok(());
        };
        if head < number {
            return Err(ChainError::Unavailable(format!(
                "the node's head is block {head}, below the last read block {number}: the node is behind"
            )));
        }
        if self.node_block(number).await?.hash != hash {
            // The next round reads the blocks that replaced the undone ones.
            return self.unwind(read).await;
        }
        self.finalise_confirmed(read, number).await
    }

    /// The node's block. The node said that it has it.
    async fn node_block(&self, number: u64) -> Result<BlockInfo, ChainError> {
        let block = self.connector.block(Some(number)).await?;
        let block = block.ok_or_else(|| {
            ChainError::Unavailable(format!("the node does not have block {number}"))
        })?;
        let limit = &self.connector.inner.block_gas_limit;
        limit.store(block.gas_limit, Ordering::Relaxed);
        Ok(block)
    }

    /// Undoes the unconfirmed blocks that the node does not have.
    ///
    /// # Errors
    /// `Reorganised`: the node does not have the last final block either.
    async fn unwind(&self, read: &mut ReadBlocks) -> Result<(), ChainError> {
        let count_before = read.unconfirmed.len();
        while let Some((number, hash)) = read.unconfirmed.back().copied() {
            if self.node_block(number).await?.hash == hash {
                break;
            }
            read.unconfirmed.pop_back();
        }
        if read.unconfirmed.is_empty()
            && let Some((number, stored)) = read.cursor
        {
            let node = self.node_block(number).await?.hash;
            if node != stored {
                return Err(ChainError::Reorganised {
                    number,
                    stored,
                    node,
                });
            }
        }
        let depth = count_before - read.unconfirmed.len();
        if depth == 0 {
            return Err(ChainError::Unavailable(
                "the node's blocks contradict each other: the chain is changing, or the nodes disagree".into(),
            ));
        }
        let ancestor = read.tip().map(|(number, _)| number);
        let dropped = self.connector.inner.repo.unwind(ancestor).await?;
        let tip = ancestor.unwrap_or_default();
        self.connector.inner.read_tip.store(tip, Ordering::Relaxed);
        metrics::counter!("blockchain_reorganisations_total", "depth" => "unconfirmed")
            .increment(1);
        tracing::warn!(
            depth,
            ancestor = tip,
            dropped,
            "the chain reorganised; the dropped transactions are sent again"
        );
        Ok(())
    }

    /// Finalises the unconfirmed blocks that have their confirmations. `tip`: the last read block.
    async fn finalise_confirmed(&self, read: &mut ReadBlocks, tip: u64) -> Result<(), ChainError> {
        while let Some((number, hash)) = read.unconfirmed.front().copied() {
            if !self.is_confirmed(number, tip) {
                break;
            }
            let block = self.node_block(number).await?;
            if block.hash != hash {
                return Err(ChainError::Unavailable(format!(
                    "block {number} changed while it was read"
                )));
            }
            self.finalise(&block).await?;
            read.unconfirmed.pop_front();
            read.cursor = Some((number, hash));
        }
        Ok(())
    }

    /// Stores and publishes the receipts of the connector's transactions in a final block.
    async fn finalise(&self, block: &BlockInfo) -> Result<(), ChainError> {
        let inner = &self.connector.inner;
        let ours = inner.repo.filter_ours(&block.tx_hashes).await?;
        let (receipts, transfers) = self.receipts(block, ours).await?;
        for (ours, receipt) in &receipts {
            count(match receipt.status {
                _ if !ours.executes() => "NONCE_USED",
                ReceiptStatus::Success => "SUCCESS",
                ReceiptStatus::Reverted => "REVERTED",
            });
        }
        let executed = receipts.iter().filter(|(ours, _)| ours.executes());
        let hashes: Vec<_> = executed.clone().map(|(ours, _)| ours.submission).collect();
        let mut published: Vec<events::Event> = executed
            .map(|(_, receipt)| publish::receipt_ready(block, receipt))
            .collect();
        published.push(publish::block_read(block, &hashes));
        inner
            .repo
            .record_final(block.number, &block.hash, &receipts, &published)
            .await?;
        if !receipts.is_empty() {
            let executed = receipts.into_iter().filter(|(ours, _)| ours.executes());
            let receipts = executed.map(|(_, receipt)| receipt).collect();
            self.connector
                .recent()
                .push(block.number, receipts, transfers);
        }
        inner.last_read_block.send_replace(block.number);
        Ok(())
    }

    /// Receipts of the connector's transactions in a block, under the hashes of their submissions,
    /// and the transfers of all its transactions. Without a transaction of the connector neither is
    /// read.
    async fn receipts(
        &self,
        block: &BlockInfo,
        ours: Vec<Ours>,
    ) -> Result<(Vec<(Ours, Receipt)>, Vec<TokenTransfer>), ChainError> {
        if ours.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let provider = &self.connector.inner.provider;
        let number = BlockId::number(block.number);
        let receipts: Option<Vec<NodeReceipt>> = provider
            .raw_request("eth_getBlockReceipts".into(), (number,))
            .await?;
        let receipts = receipts.ok_or_else(|| {
            ChainError::Unavailable(format!("node has no receipts of block {}", block.number))
        })?;
        let is_in_block =
            |receipt: &&NodeReceipt| receipt.block_hash.map(TxHash::from) == Some(block.hash);
        let of_block = || receipts.iter().filter(is_in_block);
        let logs = of_block().flat_map(|receipt| &receipt.logs);
        let transfers = logs.filter_map(|log| to_transfer(&log.0, block.number));
        let transfers = transfers.collect();
        let mut receipts: HashMap<_, _> = of_block()
            .map(to_receipt)
            .map(|receipt| (receipt.tx_hash, receipt))
            .collect();
        let pair = |ours: Ours| {
            let receipt = receipts.remove(&ours.attempt).ok_or_else(|| {
                ChainError::Unavailable(format!(
                    "the node returned no receipt of transaction {} in block {}",
                    ours.attempt, block.number
                ))
            })?;
            let tx_hash = ours.submission;
            Ok::<_, ChainError>((ours, Receipt { tx_hash, ..receipt }))
        };
        let paired: Result<_, ChainError> = ours.into_iter().map(pair).collect();
        Ok((paired?, transfers))
    }
}

/// Waits for the next block of the embedded chain, if it is given, and for `pause` at most.
async fn next_block(head: &mut Option<watch::Receiver<u64>>, pause: Option<Duration>) {
    let paused = async {
        match pause {
            Some(pause) => tokio::time::sleep(pause).await,
            None => std::future::pending().await,
        }
    };
    let changed = async {
        if let Some(head) = head
            && head.changed().await.is_ok()
        {
            return;
        }
        // The embedded chain ends at shutdown, for which the caller waits too.
        std::future::pending().await
    };
    tokio::select! {
        () = paused => {}
        () = changed => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_failed_read_of_the_embedded_chain_is_retried_without_a_new_block() {
        let (sender, head) = watch::channel(0);
        let mut head = Some(head);
        let paused = next_block(&mut head, Some(SHORT));
        let paused = tokio::time::timeout(LONG, paused).await;
        assert!(paused.is_ok(), "the pause ends without a block");
        let idle = next_block(&mut head, None);
        let idle = tokio::time::timeout(SHORT, idle).await;
        assert!(idle.is_err(), "an idle chain needs no polling");
        sender.send_replace(1);
        let woken = next_block(&mut head, None);
        let woken = tokio::time::timeout(LONG, woken).await;
        assert!(woken.is_ok(), "a block wakes the watcher");
    }
}
