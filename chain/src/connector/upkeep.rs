//! Gets stored transactions into blocks, whatever happened to their first send.
//!
//! Each round visits the transactions that are in no read block, in nonce order. Trouble with one
//! never keeps the round from the next ones.
//!
//! | the node | the round |
//! |---|---|
//! | has it, or takes it | raises the fee after `replace_after_blocks` read blocks without it |
//! | wants a higher fee | replaces it |
//! | says that the account has no coins | waits: the others need coins too |
//! | refuses it in 3 rounds, or in an unknown text in 15 | cancels it: a transfer gets the nonce |
//! | says that its nonce is used | parks it once this is final and no attempt of it is the user |
//!
//! A visit holds the lock of the key and reads the submission again: the transaction may have been
//! withdrawn since the round began. Sent after that, its call would act although the caller was
//! told that it does not.
//!
//! A parked submission, the call of a cancelled one among them, gets a new nonce. Its key and hash
//! stay. The old nonce is used up in a final block before, so the call acts once.
//!
//! A nonce that is assigned to no submission is filled: a reorganisation can remove a transaction
//! of another program with the same account.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use alloy::providers::Provider;
use tokio_util::sync::CancellationToken;

use super::fees::Fees;
use super::node_error::Meaning;
use super::repo::{Attempt, OnRefusal, Stored};
use super::submit::{Sent, count, transaction, with_fees};
use super::{ChainError, Connector};

/// Transactions per round.
const WAITING_MAX: usize = 128;
/// Parked submissions per round.
const PARKED_MAX: usize = 16;
/// Nonces per round that are searched for a gap.
const GAP_MAX: u64 = 128;
/// Signed transactions per nonce. This number of raises multiplies a fee by more than 40.
const ATTEMPTS_MAX: usize = 32;
/// Transactions whose visit fails before the round ends: the node, signer or store is away.
const FAILURES_MAX: u32 = 3;
/// Rounds after which a transaction is cancelled that no block can contain.
const REFUSED_ROUNDS: u32 = 3;
/// Rounds after which a transaction is cancelled that the node refuses in an unknown text.
const UNCLEAR_ROUNDS: u32 = 15;
/// Rounds after which a missing nonce is filled: a submission may just be storing it.
const GAP_ROUNDS: u32 = 3;
/// Rounds between two attempts for a parked submission that the node refuses.
const PARKED_ROUNDS: u32 = 15;
/// Parked submissions with a pause.
const PAUSED_MAX: usize = 1_024;
/// Limit of a node's text in health, in characters.
const REASON_MAX: usize = 300;
/// Health part.
const HEALTH: &str = "transactions";

pub(crate) struct Upkeep {
    connector: Connector,
    /// Between two rounds.
    interval: Duration,
    /// Refusals in a row, by nonce.
    troubles: HashMap<u64, u32>,
    /// Missing nonces and the rounds since they are missing.
    gaps: HashMap<u64, u32>,
    /// Nonces whose last visit failed: they are visited last.
    failed: HashSet<u64>,
    /// Lowest waiting nonce, and the last read block when it became that.
    first: Option<u64>,
    first_since: u64,
    /// Rounds until a parked submission is tried again, by key.
    paused: HashMap<String, u32>,
    /// Last visited row of the parked ones; 0: the next round begins with the first row.
    parked_after: i64,
    /// What is wrong in this round.
    notes: Vec<String>,
    /// Fees in this round.
    estimate: Option<Fees>,
}

impl Upkeep {
    pub fn new(connector: Connector, interval: Duration) -> Self {
        Self {
            connector,
            interval,
            troubles: HashMap::new(),
            gaps: HashMap::new(),
            failed: HashSet::new(),
            first: None,
            first_since: 0,
            paused: HashMap::new(),
            parked_after: 0,
            notes: Vec::new(),
            estimate: None,
        }
    }

    pub async fn run(mut self, health: rpc::Health, shutdown: CancellationToken) {
        let mut interval = tokio::time::interval(self.interval);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = interval.tick() => {}
            }
            // Shutdown ends a round as a crash would: every step is stored before it acts.
            let round = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                round = self.round() => round,
            };
            match round {
                Ok(()) => health.set(HEALTH, self.note().as_deref()),
                Err(error) => {
                    tracing::warn!(%error, "transactions in no read block: the round failed");
                    if let Some(note) = self.note() {
                        health.set_failing(HEALTH, note);
                    }
                }
            }
        }
    }

    /// The first thing that is wrong, and how many more there are.
    fn note(&self) -> Option<String> {
        let first = self.notes.first()?;
        Some(match self.notes.len() - 1 {
            0 => first.clone(),
            more => format!("{first} (and {more} more)"),
        })
    }

    async fn round(&mut self) -> Result<(), ChainError> {
        self.notes.clear();
        self.estimate = None;
        if self.connector.check_unbroken().is_err() {
            // The watcher reports the break.
            return Ok(());
        }
        let waiting = self.connector.inner.repo.waiting(WAITING_MAX).await?;
        self.compare(&waiting);
        let (failed, others): (Vec<_>, Vec<_>) =
            (waiting.iter()).partition(|(_, attempt)| self.failed.contains(&attempt.nonce));
        let mut failures = 0;
        let mut away = None;
        for (stored, attempt) in others.into_iter().chain(failed) {
            if self.connector.is_marked(attempt.nonce) {
                continue;
            }
            let Err(error) = self.visit(stored, attempt).await else {
                self.failed.remove(&attempt.nonce);
                continue;
            };
            self.failed.insert(attempt.nonce);
            self.add_note(attempt, &error.to_string());
            failures += 1;
            if failures >= FAILURES_MAX {
                away = Some(error);
                break;
            }
        }
        self.fill_gaps().await?;
        self.renew_parked().await?;
        away.map_or(Ok(()), Err)
    }

    /// Compares the waiting transactions with those of the round before.
    fn compare(&mut self, waiting: &[(Stored, Attempt)]) {
        let nonces: HashSet<u64> = waiting.iter().map(|(_, attempt)| attempt.nonce).collect();
        self.troubles.retain(|nonce, _| nonces.contains(nonce));
        self.failed.retain(|nonce| nonces.contains(nonce));
        let first = waiting.first().map(|(_, attempt)| attempt.nonce);
        if self.first.is_some() && self.first != first {
            self.first_since = self.connector.read_tip();
        }
        self.first = first;
    }

    /// Sends a transaction again, if it still waits.
    async fn visit(&mut self, stored: &Stored, attempt: &Attempt) -> Result<(), ChainError> {
        let inner = &self.connector.inner;
        let _held = inner.keys.lock(stored.key.as_str()).await;
        let now = inner.repo.by_key(&stored.key).await?;
        let is_waiting = now.is_some_and(|now| {
            now.nonce == Some(attempt.nonce)
                && now.latest == attempt.tx_hash
                && now.included.is_none()
                && !now.is_final
        });
        if !is_waiting {
            return Ok(());
        }
        match self.connector.send(attempt).await {
            Sent::Away(reason) => {
                // A node that answers other requests does not take this one: too large, perhaps.
                self.connector.block_number().await?;
                self.refused(stored, attempt, UNCLEAR_ROUNDS, &reason).await
            }
            Sent::Accepted => {
                self.troubles.remove(&attempt.nonce);
                self.replace_if_due(stored, attempt).await
            }
            // The watcher reads the block.
            Sent::InBlock => {
                self.troubles.remove(&attempt.nonce);
                Ok(())
            }
            Sent::Refused(Meaning::NonceTaken, _) => self.replace_if_due(stored, attempt).await,
            Sent::Refused(Meaning::NonceTooLow, _) => self.nonce_used(stored, attempt).await,
            Sent::Refused(Meaning::Underpriced, _) => self.replace(stored, attempt).await,
            Sent::Refused(Meaning::NoFunds, reason) => {
                let operator = self.connector.operator();
                self.add_note(attempt, &format!("{reason}; {operator} needs coins"));
                Ok(())
            }
            Sent::Refused(_, reason) => {
                self.refused(stored, attempt, REFUSED_ROUNDS, &reason).await
            }
            Sent::Unclear(reason) => self.refused(stored, attempt, UNCLEAR_ROUNDS, &reason).await,
        }
    }

    fn add_note(&mut self, attempt: &Attempt, reason: &str) {
        let (nonce, tx_hash) = (attempt.nonce, attempt.tx_hash);
        let reason: String = reason.chars().take(REASON_MAX).collect();
        tracing::warn!(nonce, %tx_hash, reason, "transaction waits");
        self.notes
            .push(format!("transaction {tx_hash} (nonce {nonce}): {reason}"));
    }

    async fn estimate(&mut self) -> Result<Fees, ChainError> {
        if let Some(fees) = self.estimate {
            return Ok(fees);
        }
        let fees = self.connector.estimate_fees().await?;
        self.estimate = Some(fees);
        Ok(fees)
    }

    /// Raises the fee of a transaction that enough read blocks do not contain. The blocks in which
    /// the lowest nonce waited for a lower one do not count. Higher nonces may wait for the lowest
    /// one only, so their fee must also be below the present one.
    async fn replace_if_due(
        &mut self,
        stored: &Stored,
        attempt: &Attempt,
    ) -> Result<(), ChainError> {
        let after = self.connector.inner.settings.replace_after_blocks;
        let is_first = self.first == Some(attempt.nonce);
        let since = match is_first {
            true => attempt.signed_block.max(self.first_since),
            false => attempt.signed_block,
        };
        let age = self.connector.read_tip().saturating_sub(since);
        if after == 0 || age < after {
            return Ok(());
        }
        if !is_first {
            let fees = Fees::of(&transaction(attempt)?);
            if fees.max >= self.estimate().await?.max {
                return Ok(());
            }
        }
        self.replace(stored, attempt).await
    }

    async fn replace(&mut self, stored: &Stored, attempt: &Attempt) -> Result<(), ChainError> {
        let estimate = self.estimate().await?;
        let inner = &self.connector.inner;
        let tx = transaction(attempt)?;
        let Some(fees) = Fees::of(&tx).raised(estimate, inner.settings.max_fee_per_gas) else {
            self.add_note(
                attempt,
                "no block contains it, and chain.max_fee_per_gas_gwei allows no higher fee",
            );
            return Ok(());
        };
        let attempts = inner.repo.attempts(&stored.key, attempt.nonce).await?;
        if attempts.len() >= ATTEMPTS_MAX {
            self.add_note(
                attempt,
                &format!("no block contains it after {ATTEMPTS_MAX} fees"),
            );
            return Ok(());
        }
        let next = self
            .connector
            .sign(with_fees(tx, fees), attempt.cancels)
            .await?;
        self.exchange(stored, attempt, &next, "REPLACED").await
    }

    /// Stores and sends another attempt with the same nonce.
    async fn exchange(
        &mut self,
        stored: &Stored,
        attempt: &Attempt,
        next: &Attempt,
        status: &'static str,
    ) -> Result<(), ChainError> {
        let repo = &self.connector.inner.repo;
        if !repo.add_attempt(&stored.key, next).await? {
            return Ok(());
        }
        match self.connector.send(next).await {
            Sent::Accepted | Sent::InBlock => {
                tracing::info!(nonce = next.nonce, old = %attempt.tx_hash, new = %next.tx_hash,
                    status, "transaction replaced");
                count(status);
                Ok(())
            }
            Sent::Refused(meaning, reason) => {
                repo.drop_attempt(&stored.key, &next.tx_hash, &attempt.tx_hash)
                    .await?;
                // Otherwise a block contains the nonce by now.
                if meaning != Meaning::NonceTooLow {
                    self.add_note(attempt, &reason);
                }
                Ok(())
            }
            Sent::Unclear(reason) => {
                self.add_note(attempt, &reason);
                Ok(())
            }
            Sent::Away(reason) => Err(ChainError::Unavailable(reason)),
        }
    }

    /// Cancels a transaction that was refused in `rounds` rounds and that the node does not have.
    async fn refused(
        &mut self,
        stored: &Stored,
        attempt: &Attempt,
        rounds: u32,
        reason: &str,
    ) -> Result<(), ChainError> {
        self.add_note(attempt, reason);
        let refusals = self.troubles.entry(attempt.nonce).or_default();
        *refusals += 1;
        if attempt.cancels || *refusals < rounds {
            return Ok(());
        }
        *refusals = 0;
        let provider = &self.connector.inner.provider;
        let known = provider.get_transaction_by_hash(attempt.tx_hash.raw());
        if known.await?.is_some() {
            return Ok(());
        }
        let estimate = self.estimate().await?;
        let tx = transaction(attempt)?;
        let fees = Fees::of(&tx);
        let cap = self.connector.inner.settings.max_fee_per_gas;
        let fees = fees.raised(estimate, cap).unwrap_or(fees);
        let next = self
            .connector
            .sign(self.connector.cancellation(&tx, fees), true)
            .await?;
        tracing::warn!(nonce = attempt.nonce, tx_hash = %attempt.tx_hash, reason,
            "cancelling a transaction that the node refuses");
        self.exchange(stored, attempt, &next, "CANCELLED").await
    }

    /// Parks a submission whose nonce a transaction of another program used.
    ///
    /// All blocks up to the cursor are final and were searched for every attempt. If the account's
    /// nonce is higher in the state after the cursor's block, the user of the nonce is final too
    /// and none of the attempts.
    async fn nonce_used(&mut self, stored: &Stored, attempt: &Attempt) -> Result<(), ChainError> {
        let inner = &self.connector.inner;
        let nonce = attempt.nonce;
        let Some((_, cursor)) = inner.repo.cursor().await? else {
            return Ok(());
        };
        // By hash: a second node on another branch or chain may have another block of this number.
        let count = inner.provider.get_transaction_count(inner.signer.address());
        if count.hash(cursor.raw()).await? <= nonce {
            return Ok(());
        }
        for hash in inner.repo.attempts(&stored.key, nonce).await? {
            if self.connector.unconfirmed_receipt(&hash).await?.is_some() {
                return Ok(());
            }
        }
        tracing::warn!(nonce, tx_hash = %stored.submission.tx_hash,
            "another program used the nonce of a transaction, which gets a new one");
        inner.repo.park(stored, nonce).await
    }

    async fn fill_gaps(&mut self) -> Result<(), ChainError> {
        let inner = &self.connector.inner;
        let address = inner.signer.address();
        let on_chain = inner.provider.get_transaction_count(address).await?;
        let next_nonce = *inner.next_nonce.lock().await;
        let to = next_nonce.min(on_chain.saturating_add(GAP_MAX));
        if on_chain >= to {
            self.gaps.clear();
            return Ok(());
        }
        let known = inner.repo.nonces(on_chain, to).await?;
        let known: HashSet<u64> = known.into_iter().collect();
        let missing: Vec<u64> = (on_chain..to)
            .filter(|nonce| !known.contains(nonce))
            .collect();
        self.gaps.retain(|nonce, _| missing.contains(nonce));
        for nonce in missing {
            let rounds = self.gaps.entry(nonce).or_default();
            *rounds += 1;
            if *rounds >= GAP_ROUNDS
                && let Err(error) = self.connector.fill(nonce).await
            {
                self.notes
                    .push(format!("nonce {nonce} without a transaction: {error}"));
            }
        }
        Ok(())
    }

    /// Gives parked submissions a new nonce.
    async fn renew_parked(&mut self) -> Result<(), ChainError> {
        let after = self.parked_after;
        let parked = self.connector.inner.repo.parked(after, PARKED_MAX).await?;
        let last = parked.last().map(|(row, _)| *row);
        self.parked_after = last
            .filter(|_| parked.len() == PARKED_MAX)
            .unwrap_or_default();
        if after == 0 && self.parked_after == 0 {
            self.paused
                .retain(|key, _| parked.iter().any(|(_, stored)| stored.key == *key));
        } else if self.paused.len() > PAUSED_MAX {
            self.paused.clear();
        }
        for (_, stored) in parked {
            if let Some(rounds) = self.paused.get_mut(&stored.key)
                && *rounds > 0
            {
                *rounds -= 1;
                self.note_parked(&stored, "the node refuses it");
                continue;
            }
            let _held = self.connector.inner.keys.lock(stored.key.as_str()).await;
            let known = self.connector.inner.repo.by_key(&stored.key).await?;
            let Some(known) = known.filter(|known| known.nonce.is_none()) else {
                continue;
            };
            match self.connector.renew(&known, OnRefusal::Park).await {
                Ok(_) => {}
                Err(ChainError::Unavailable(reason)) => self.note_parked(&stored, &reason),
                Err(error) => {
                    self.paused.insert(stored.key.clone(), PARKED_ROUNDS);
                    self.note_parked(&stored, &error.to_string());
                }
            }
        }
        Ok(())
    }

    fn note_parked(&mut self, stored: &Stored, reason: &str) {
        let tx_hash = stored.submission.tx_hash;
        let reason: String = reason.chars().take(REASON_MAX).collect();
        self.notes
            .push(format!("transaction {tx_hash} (without a nonce): {reason}"));
    }
}
