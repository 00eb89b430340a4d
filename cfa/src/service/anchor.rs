//! Anchors the ends of the ledger's hash chains on the chain, once per interval.
//!
//! An anchor is stored with its signed bytes before it is submitted, under a key of its number. So
//! a restart submits the same bytes, once.

use std::sync::Arc;
use std::time::Duration;

use service_clients::caused_by;
use tokio_util::sync::CancellationToken;

use super::Service;
use super::workers::log_failure;
use crate::anchor::{Anchor, Key, StoredAnchor};
use crate::error::Error;
use crate::failpoint;
use chain::contracts::Call;

/// Pause between two looks whether an anchor is due.
const TICK: Duration = Duration::from_secs(1);
/// Gas of a transaction with the bytes of an anchor.
const GAS: u64 = 100_000;

/// Attempts in a row that may fail since another service or the chain does not answer, before it is
/// a finding.
const FAILURES_MAX: u32 = 60;

/// Anchors until shutdown.
pub async fn run(service: Arc<Service>, key: Key, shutdown: CancellationToken) {
    let mut failures = 0;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(TICK) => {}
        }
        let anchored = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            anchored = service.anchor_if_due(&key) => anchored,
        };
        failures = match &anchored {
            Ok(()) => 0,
            Err(error) if error.is_transient() => failures + 1,
            Err(_) => FAILURES_MAX,
        };
        let failed = anchored.as_ref().err().filter(|_| failures >= FAILURES_MAX);
        let reason = failed.map(ToString::to_string);
        service.health.set_finding("anchor", reason.as_deref());
        log_failure("anchor", "", anchored);
    }
}

impl Service {
    /// Submits a stored anchor again, or makes the next one if it is due and the ledger has
    /// changed.
    pub async fn anchor_if_due(&self, key: &Key) -> Result<(), Error> {
        let interval_s = i64::try_from(self.config.anchor_interval_s).unwrap_or(i64::MAX);
        if interval_s == 0 {
            return Ok(());
        }
        let now_us = self.now_us();
        let last = self.repo.last_anchor().await?;
        if let Some(unsent) = last.as_ref().filter(|last| last.tx_hash.is_empty()) {
            return self.submit_anchor(unsent).await;
        }
        let due_us = last.as_ref().map_or(i64::MIN, |last| {
            last.at_us
                .saturating_add(interval_s.saturating_mul(1_000_000))
        });
        if now_us < due_us {
            return Ok(());
        }
        let head = self.peers.ledger.chain_head(&caused_by("")).await?;
        let unreadable = || Error::Damaged("head of the ledger's chain".to_owned());
        let hash = |text: &str| -> Result<[u8; 32], Error> {
            let mut hash = [0; 32];
            hex::decode_to_slice(text, &mut hash).map_err(|_| unreadable())?;
            Ok(hash)
        };
        let anchor = Anchor {
            block: head.block,
            hash: hash(&head.hash)?,
            record: head.record,
            record_hash: hash(&head.record_hash)?,
            at_us: now_us,
        };
        let next = StoredAnchor {
            number: last.as_ref().map_or(1, |last| last.number + 1),
            block: i64::try_from(head.block).map_err(|_| unreadable())?,
            record: i64::try_from(head.record).map_err(|_| unreadable())?,
            at_us: now_us,
            data: key.sign(&anchor),
            tx_hash: String::new(),
        };
        let is_known = |last: &StoredAnchor| (last.block, last.record) == (next.block, next.record);
        if next.block == 0 || last.as_ref().is_some_and(is_known) {
            return Ok(());
        }
        self.repo.add_anchor(&next).await?;
        // The anchor is stored; nothing is sent to the chain.
        failpoint::reach("cfa.anchor_stored");
        self.submit_anchor(&next).await
    }

    /// A transaction of the operator to itself: no contract has a part in it.
    async fn submit_anchor(&self, anchor: &StoredAnchor) -> Result<(), Error> {
        let call = Call {
            to: Some(self.chain.operator()),
            data: anchor.data.clone(),
            gas_limit: Some(GAS),
        };
        let key = format!("anchor:{}", anchor.number);
        let submitted = self.chain.submit(&key, &call).await?;
        // The transaction is submitted; its hash is not recorded.
        failpoint::reach("cfa.anchor_submitted");
        let tx_hash = submitted.tx_hash.to_string();
        self.repo.anchor_submitted(anchor.number, &tx_hash).await?;
        tracing::info!(
            number = anchor.number,
            block = anchor.block,
            tx_hash,
            "ledger anchored"
        );
        Ok(())
    }

    /// Anchors, newest first, with a number below `before`; each with the call data that the chain
    /// has, if its transaction is final.
    pub async fn anchors(
        &self,
        before: i64,
        limit: i64,
    ) -> Result<Vec<(StoredAnchor, Vec<u8>)>, Error> {
        let mut read = Vec::new();
        for anchor in self.repo.anchors(before, limit).await? {
            let on_chain = match anchor.tx_hash.parse() {
                Ok(tx_hash) => self.chain.call_data(&tx_hash).await?.unwrap_or_default(),
                Err(_) => Vec::new(),
            };
            read.push((anchor, on_chain));
        }
        Ok(read)
    }
}
