//! Anchors the ends of the ledger's hash chains, and of the audit records of all other services, on
//! the chain, once per interval.
//!
//! An anchor has all services. While one of them does not answer there is none, and after
//! [`FAILURES_MAX`] attempts a finding in health.
//!
//! An anchor is stored with its signed bytes before it is submitted, under a key of its number. So
//! a restart submits the same bytes, once.

use std::sync::Arc;
use std::time::Duration;

use service_clients::caused_by;
use tokio_util::sync::CancellationToken;

use super::Service;
use super::workers::log_failure;
use crate::anchor::{Anchor, Key, LastRecord, StoredAnchor};
use crate::error::Error;
use crate::failpoint;
use crate::peers::SOURCE;
use chain::contracts::Call;
use events::audit::RecordFilter;

/// Pause between two looks whether an anchor is due.
const TICK: Duration = Duration::from_secs(1);
/// Gas of a transaction with the bytes of an anchor: 21,000, and at most 40 per byte (EIP-7623). An
/// anchor of seven services has less than 500 bytes.
const GAS: u64 = 100_000;

/// Attempts in a row that may fail since another service or the chain does not answer, before it is
/// a finding.
const FAILURES_MAX: u32 = 60;

/// Name of the ledger in errors.
const LEDGER: &str = "ledger";

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
    /// Submits a stored anchor again, or makes the next one if it is due and a chain has grown.
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
        let Some(anchor) = self.ends(now_us).await? else {
            return Ok(());
        };
        let known = last.as_ref();
        let known = known.and_then(|last| Anchor::read(&last.data, key.public()));
        if known.is_some_and(|known| known.has_lengths_of(&anchor)) {
            return Ok(());
        }
        let number = |of: u64| i64::try_from(of).map_err(|_| unreadable(LEDGER));
        let next = StoredAnchor {
            number: last.map_or(1, |last| last.number + 1),
            block: number(anchor.block)?,
            record: number(anchor.record)?,
            at_us: now_us,
            data: key.sign(&anchor),
            tx_hash: String::new(),
        };
        self.repo.add_anchor(&next).await?;
        // The anchor is stored; nothing is sent to the chain.
        failpoint::reach("cfa.anchor_stored");
        self.submit_anchor(&next).await
    }

    /// The ends of all chains; `None` before the first block of the ledger.
    async fn ends(&self, at_us: i64) -> Result<Option<Anchor>, Error> {
        let context = caused_by("");
        let head = self.peers.ledger.chain_head(&context).await?;
        if head.block == 0 {
            return Ok(None);
        }
        let own = self
            .repo
            .audit_records(RecordFilter::default(), i64::MAX, 1);
        let own = own.await?.pop();
        let own = own.map(|row| (row.sequence.unsigned_abs(), hex::encode(row.hash)));
        let mut services = vec![last_record(SOURCE, own)?];
        for audited in &self.peers.audited {
            let last = audited.last_record(&context).await?;
            services.push(last_record(audited.service(), last)?);
        }
        Ok(Some(Anchor {
            block: head.block,
            hash: hash_of(LEDGER, &head.hash)?,
            record: head.record,
            record_hash: hash_of(LEDGER, &head.record_hash)?,
            at_us,
            services,
        }))
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
            "chains anchored"
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

fn last_record(service: &str, last: Option<(u64, String)>) -> Result<LastRecord, Error> {
    let (record, hash) = match last {
        Some((record, hash)) => (record, hash_of(service, &hash)?),
        None => (0, [0; 32]),
    };
    Ok(LastRecord {
        service: service.to_owned(),
        record,
        hash,
    })
}

fn hash_of(service: &str, text: &str) -> Result<[u8; 32], Error> {
    let mut hash = [0; 32];
    hex::decode_to_slice(text, &mut hash).map_err(|_| unreadable(service))?;
    Ok(hash)
}

fn unreadable(service: &str) -> Error {
    Error::Damaged(format!("end of a hash chain of {service}"))
}
