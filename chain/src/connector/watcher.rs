//! Reads the chain block by block, in order and without gaps, and publishes events (`publish`).
//!
//! The watcher skips transactions that this connector did not submit, and resends stored
//! transactions that are in no read block. A block is read when it is `confirmations` below the
//! head. A permissioned chain with immediate finality needs no confirmations.

use std::time::Duration;

use alloy::eips::BlockId;
use alloy::providers::Provider;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{BlockInfo, ChainError, Connector, ReceiptStatus, to_receipt};
use crate::publish;

const RESEND_INTERVAL: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

pub struct Watcher {
    pub connector: Connector,
    pub confirmations: u64,
    /// Polling interval for new blocks if `head` is `None`.
    pub poll_interval: Duration,
    /// Head of the embedded chain: each change wakes the watcher.
    pub head: Option<watch::Receiver<u64>>,
}

impl Watcher {
    pub async fn run(mut self, health: rpc::Health, shutdown: CancellationToken) {
        let mut resend = tokio::time::interval(RESEND_INTERVAL);
        resend.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let outcome = self.catch_up().await;
            let pause = match &outcome {
                Ok(()) => {
                    health.set_ok("node");
                    self.poll_interval
                }
                Err(error) => {
                    health.set_failing("node", error.to_string());
                    tracing::warn!(%error, "reading the chain failed");
                    RETRY_INTERVAL
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = next_block(&mut self.head, pause) => {}
                _ = resend.tick() => {
                    if let Err(error) = self.connector.resend_not_included().await {
                        tracing::warn!(%error, "resending transactions that are in no read block failed");
                    }
                }
            }
        }
    }

    /// Reads all confirmed blocks after the cursor.
    async fn catch_up(&self) -> Result<(), ChainError> {
        let inner = &self.connector.inner;
        let readable = self
            .connector
            .block_number()
            .await?
            .checked_sub(self.confirmations);
        let Some(readable) = readable else {
            return Ok(());
        };
        let mut cursor = inner.repo.cursor().await?;
        loop {
            let number = cursor.as_ref().map_or(0, |(number, _)| number + 1);
            if number > readable {
                return Ok(());
            }
            let Some(block) = self.connector.block(Some(number)).await? else {
                return Ok(());
            };
            if let Some((_, hash)) = &cursor
                && block.parent_hash.to_string() != *hash
            {
                return Err(ChainError::Malformed(format!(
                    "block {number} is not a child of the last read block: reorganised or replaced chain"
                )));
            }
            self.read_block(&block).await?;
            cursor = Some((number, block.hash.to_string()));
            inner.last_read_block.send_replace(number);
        }
    }

    /// Stores and publishes the receipts of the connector's transactions in a block.
    async fn read_block(&self, block: &BlockInfo) -> Result<(), ChainError> {
        let inner = &self.connector.inner;
        let ours = inner.repo.filter_submitted(&block.tx_hashes).await?;
        let receipts = if ours.is_empty() {
            Vec::new()
        } else {
            let receipts = inner
                .provider
                .get_block_receipts(BlockId::number(block.number))
                .await?;
            receipts.ok_or_else(|| {
                ChainError::Unavailable(format!("node has no receipts of block {}", block.number))
            })?
        };
        let mut receipts: Vec<_> = receipts.iter().map(to_receipt).collect();
        receipts.retain(|receipt| ours.contains(&receipt.tx_hash));
        if receipts.len() != ours.len() {
            return Err(ChainError::Unavailable(format!(
                "block {} has {} transactions of this connector but the node returned {} of their receipts",
                block.number,
                ours.len(),
                receipts.len()
            )));
        }
        for receipt in &receipts {
            let label = status_label(receipt.status);
            metrics::counter!("blockchain_transactions_total", "status" => label).increment(1);
        }
        let mut published: Vec<events::Event> = receipts
            .iter()
            .map(|receipt| publish::receipt_ready(block, receipt))
            .collect();
        published.push(publish::block_read(block, &ours));
        inner
            .repo
            .record_block(block.number, &block.hash, &receipts, &published)
            .await
    }
}

/// Waits for the next block of the embedded chain, or for `pause` with a remote node.
async fn next_block(head: &mut Option<watch::Receiver<u64>>, pause: Duration) {
    match head {
        Some(head) => {
            if head.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        None => tokio::time::sleep(pause).await,
    }
}

fn status_label(status: ReceiptStatus) -> &'static str {
    match status {
        ReceiptStatus::Success => "SUCCESS",
        ReceiptStatus::Reverted => "REVERTED",
    }
}
