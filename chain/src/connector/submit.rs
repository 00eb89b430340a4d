//! Submission of calls: nonces, signatures, sending.
//!
//! | step | held |
//! |---|---|
//! | estimate gas and fees | lock of the key |
//! | assign a nonce, sign, store | lock of the key, lock of the nonces |
//! | send | lock of the key, mark of the nonce |
//! | a refusal: take the nonce back, or fill it | lock of the key, lock of the nonces |
//!
//! The lock of the nonces is held over no request to a node. A remote signer is asked under it,
//! because a signature contains the nonce. `upkeep` leaves marked nonces alone: only the submission
//! may decide about a refusal of its first send.
//!
//! A crash after any step leaves a stored attempt, which `upkeep` sends, replaces or cancels.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use alloy::consensus::{TxEip1559, TxEnvelope};
use alloy::eips::{Decodable2718, Encodable2718};
use alloy::primitives::{Bytes, TxKind, U256};
use alloy::providers::Provider;
use alloy::transports::RpcError;

use super::fees::Fees;
use super::node_error::{Meaning, meaning};
use super::repo::{Attempt, OnRefusal, Stored, filler_key};
use super::{ChainError, Connector, Submission};
use crate::contracts::Call;
use crate::{Address, TxHash};

/// Gas of a transfer without data.
const TRANSFER_GAS: u64 = 21_000;
/// Gas limit of a transaction on chains with EIP-7825.
const TRANSACTION_GAS_MAX: u64 = 1 << 24;

/// Answer of the node to a sent transaction.
#[derive(Debug)]
pub(super) enum Sent {
    /// The node has the transaction.
    Accepted,
    /// A block of the node contains it.
    InBlock,
    /// The node does not have it and refuses these bytes.
    Refused(Meaning, String),
    /// The node refused with a text that is not known. It may have the transaction.
    Unclear(String),
    /// No answer. The node may have the transaction.
    Away(String),
}

/// Nonces whose first send is not answered yet.
pub(super) type Marks = Arc<Mutex<HashSet<u64>>>;

/// Marks a nonce until it is dropped.
pub(super) struct Sending {
    marks: Marks,
    nonce: u64,
}

impl Drop for Sending {
    fn drop(&mut self) {
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        marks.remove(&self.nonce);
    }
}

pub(super) fn count(status: &'static str) {
    metrics::counter!("blockchain_transactions_total", "status" => status).increment(1);
}

/// Whether another transaction has the nonce.
fn is_nonce_taken(meaning: Meaning) -> bool {
    matches!(meaning, Meaning::NonceTooLow | Meaning::NonceTaken)
}

/// Decodes the transaction of an attempt.
pub(super) fn transaction(attempt: &Attempt) -> Result<TxEip1559, ChainError> {
    let corrupt = || ChainError::Corrupt(format!("malformed transaction {}", attempt.tx_hash));
    let envelope = TxEnvelope::decode_2718_exact(&attempt.raw).map_err(|_| corrupt())?;
    let signed = envelope.as_eip1559().ok_or_else(corrupt)?;
    Ok(signed.tx().clone())
}

impl Connector {
    /// Submits a call; true: it is a repeat of a known key. The caller holds the lock of the key.
    pub(super) async fn submit_held(
        &self,
        key: &str,
        call: &Call,
    ) -> Result<(Submission, bool), ChainError> {
        self.check_unbroken()?;
        if let Some(known) = self.inner.repo.by_key(key).await? {
            let is_known = |digest: i64| digest == call.digest();
            if !known.call_digest.is_none_or(is_known) {
                rpc::context::note_difference("SubmitTransaction", key);
            }
            return Ok((self.submit_again(&known).await?, true));
        }
        let gas_needed = match call.gas_limit {
            Some(gas_limit) => gas_limit,
            None => self.estimate_gas(call.to.as_ref(), &call.data).await?,
        };
        let fees = self.estimate_fees().await?;
        // A later attempt takes the nonce from the node, in case another program sent transactions
        // from the signing account, or the gas limit that the chain allows.
        for is_last in [false, false, true] {
            let gas_limit = self.allowed_gas(gas_needed);
            let (attempt, _sending) = self.assign(key, call, gas_limit, fees).await?;
            let submission = Submission {
                tx_hash: attempt.tx_hash,
                nonce: attempt.nonce,
                contract: self.contract(call.to.is_none(), attempt.nonce),
            };
            let (meaning, reason) = match self.send(&attempt).await {
                Sent::Accepted | Sent::InBlock => {
                    count("SUBMITTED");
                    return Ok((submission, false));
                }
                Sent::Unclear(reason) | Sent::Away(reason) => {
                    return Err(ChainError::Unavailable(reason));
                }
                Sent::Refused(meaning, reason) => (meaning, reason),
            };
            if !self
                .withdraw(key, &attempt, meaning, OnRefusal::Forget)
                .await?
            {
                return Ok((submission, false));
            }
            count("REFUSED");
            let is_above_cap = meaning == Meaning::GasAboveCap && self.cap_gas(gas_limit);
            if is_last || !(is_above_cap || is_nonce_taken(meaning)) {
                return Err(self.refusal(meaning, reason));
            }
            if is_nonce_taken(meaning) {
                self.skip_nonce(meaning, attempt.nonce).await?;
            }
        }
        unreachable!("the last attempt returns")
    }

    /// At most the gas of the last read block and of a transaction: nodes refuse more. Most actions
    /// use far less than their limit, and one that needs more reverts.
    fn allowed_gas(&self, gas_needed: u64) -> u64 {
        let of_transaction = self.inner.transaction_gas_limit.load(Ordering::Relaxed);
        let gas_limit = gas_needed.min(of_transaction);
        match self.inner.block_gas_limit.load(Ordering::Relaxed) {
            0 => gas_limit,
            of_block => gas_limit.min(of_block),
        }
    }

    /// Notes that the chain limits the gas of a transaction. False: the refused gas is within that
    /// limit, so the refusal has another cause.
    fn cap_gas(&self, refused: u64) -> bool {
        if refused <= TRANSACTION_GAS_MAX {
            return false;
        }
        let limit = &self.inner.transaction_gas_limit;
        limit.store(TRANSACTION_GAS_MAX, Ordering::Relaxed);
        true
    }

    /// A repeat of a known key.
    async fn submit_again(&self, known: &Stored) -> Result<Submission, ChainError> {
        if known.is_final {
            return Ok(known.submission.clone());
        }
        if known.nonce.is_none() {
            return self.renew(known, OnRefusal::Forget).await;
        }
        let attempt = known.included.as_ref().unwrap_or(&known.latest);
        let attempt = self.inner.repo.attempt(attempt).await?;
        if attempt.cancels {
            return Err(ChainError::Unavailable(format!(
                "the node refuses transaction {}; it is cancelled before it is tried again",
                known.submission.tx_hash
            )));
        }
        // Without bytes it has become final since it was read.
        if known.included.is_some() || attempt.raw.is_empty() {
            return Ok(known.submission.clone());
        }
        match self.send(&attempt).await {
            Sent::Accepted | Sent::InBlock => Ok(known.submission.clone()),
            // The stored transaction is resent and can still enter a block: the refusal is not
            // final.
            Sent::Refused(_, reason) | Sent::Unclear(reason) | Sent::Away(reason) => {
                Err(ChainError::Unavailable(reason))
            }
        }
    }

    /// Signs the call of a parked submission under a new nonce and sends it. The caller holds the
    /// lock of the key.
    ///
    /// # Errors
    /// `Refused`: the submission is forgotten or parked again.
    pub(super) async fn renew(
        &self,
        known: &Stored,
        on_refusal: OnRefusal,
    ) -> Result<Submission, ChainError> {
        let first = self.inner.repo.attempt(&known.submission.tx_hash).await?;
        let tx = transaction(&first)?;
        let fees = self.estimate_fees().await?;
        let (attempt, contract, _sending) = {
            let mut next_nonce = self.inner.next_nonce.lock().await;
            let nonce = *next_nonce;
            let contract = self.contract(tx.to.is_create(), nonce);
            let gas_limit = self.allowed_gas(tx.gas_limit);
            let tx = TxEip1559 {
                nonce,
                gas_limit,
                ..tx
            };
            let attempt = self.sign(with_fees(tx, fees), false).await?;
            let sending = self.mark(nonce);
            let text = address_text(contract);
            let stored = self.inner.repo.renew(&known.key, &attempt, &text).await;
            if matches!(stored, Ok(false)) {
                let changed = format!("submission {} has changed", known.submission.tx_hash);
                return Err(ChainError::Unavailable(changed));
            }
            self.advance(&mut next_nonce, stored.map(|_| ())).await?;
            (attempt, contract, sending)
        };
        let submission = Submission {
            tx_hash: known.submission.tx_hash,
            nonce: attempt.nonce,
            contract,
        };
        let (meaning, reason) = match self.send(&attempt).await {
            Sent::Accepted | Sent::InBlock => {
                count("RENEWED");
                return Ok(submission);
            }
            Sent::Unclear(reason) | Sent::Away(reason) => {
                return Err(ChainError::Unavailable(reason));
            }
            Sent::Refused(meaning, reason) => (meaning, reason),
        };
        if !self
            .withdraw(&known.key, &attempt, meaning, on_refusal)
            .await?
        {
            return Ok(submission);
        }
        if is_nonce_taken(meaning) {
            self.skip_nonce(meaning, attempt.nonce).await?;
            return Err(ChainError::Unavailable(reason));
        }
        let gas_limit = transaction(&attempt)?.gas_limit;
        if meaning == Meaning::GasAboveCap && self.cap_gas(gas_limit) {
            return Err(ChainError::Unavailable(reason));
        }
        Err(self.refusal(meaning, reason))
    }

    /// Assigns the next nonce to a new submission and stores it.
    async fn assign(
        &self,
        key: &str,
        call: &Call,
        gas_limit: u64,
        fees: Fees,
    ) -> Result<(Attempt, Sending), ChainError> {
        let mut next_nonce = self.inner.next_nonce.lock().await;
        let nonce = *next_nonce;
        let tx = TxEip1559 {
            chain_id: self.inner.chain_id,
            nonce,
            gas_limit,
            max_fee_per_gas: fees.max,
            max_priority_fee_per_gas: fees.priority,
            to: call.to.map_or(TxKind::Create, |to| TxKind::Call(to.raw())),
            value: U256::ZERO,
            access_list: Default::default(),
            input: Bytes::from(call.data.clone()),
        };
        let attempt = self.sign(tx, false).await?;
        let sending = self.mark(nonce);
        let contract = address_text(self.contract(call.to.is_none(), nonce));
        let digest = Some(call.digest());
        let stored = self.inner.repo.insert(key, &attempt, &contract, digest);
        let stored = stored.await;
        self.advance(&mut next_nonce, stored).await?;
        Ok((attempt, sending))
    }

    /// Counts a nonce as assigned. After a failed write it may be assigned or not: the store knows.
    async fn advance(
        &self,
        next_nonce: &mut u64,
        stored: Result<(), ChainError>,
    ) -> Result<(), ChainError> {
        match stored {
            Ok(()) => *next_nonce += 1,
            Err(error) => {
                if let Ok(in_store) = self.inner.repo.next_nonce().await {
                    *next_nonce = (*next_nonce).max(in_store);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes a refused attempt from its submission. The last assigned nonce is reused. An earlier
    /// one is filled, unless another transaction has it. False: a block contains the submission.
    async fn withdraw(
        &self,
        key: &str,
        attempt: &Attempt,
        meaning: Meaning,
        on_refusal: OnRefusal,
    ) -> Result<bool, ChainError> {
        let mut next_nonce = self.inner.next_nonce.lock().await;
        let is_last = *next_nonce == attempt.nonce + 1;
        let filler = if is_last || is_nonce_taken(meaning) {
            None
        } else {
            let tx = transaction(attempt)?;
            Some(
                self.sign(self.cancellation(&tx, Fees::of(&tx)), true)
                    .await?,
            )
        };
        let filler_key = filler_key(attempt.nonce);
        let filler = filler.as_ref().map(|filler| (filler_key.as_str(), filler));
        let withdrawn = self
            .inner
            .repo
            .withdraw(key, attempt, on_refusal, filler)
            .await?;
        if withdrawn && is_last {
            *next_nonce -= 1;
        }
        Ok(withdrawn)
    }

    /// Skips nonces that transactions of another program have.
    async fn skip_nonce(&self, meaning: Meaning, nonce: u64) -> Result<(), ChainError> {
        let address = self.inner.signer.address();
        let count = self.inner.provider.get_transaction_count(address);
        let next = match meaning {
            Meaning::NonceTaken => count.pending().await?.max(nonce + 1),
            _ => count.await?,
        };
        let mut next_nonce = self.inner.next_nonce.lock().await;
        *next_nonce = (*next_nonce).max(next);
        Ok(())
    }

    /// Stores and sends a transaction that fills an assigned nonce without a submission.
    pub(super) async fn fill(&self, nonce: u64) -> Result<(), ChainError> {
        let fees = self.estimate_fees().await?;
        let (attempt, _sending) = {
            let mut next_nonce = self.inner.next_nonce.lock().await;
            if nonce >= *next_nonce {
                return Ok(());
            }
            let tx = TxEip1559 {
                chain_id: self.inner.chain_id,
                nonce,
                ..TxEip1559::default()
            };
            let attempt = self.sign(self.cancellation(&tx, fees), true).await?;
            let sending = self.mark(nonce);
            let stored = self
                .inner
                .repo
                .insert(&filler_key(nonce), &attempt, "", None)
                .await;
            if let Err(error) = stored {
                return self.advance(&mut next_nonce, Err(error)).await;
            }
            (attempt, sending)
        };
        tracing::warn!(nonce, "nonce without a transaction, filling it");
        count("FILLED");
        // Whatever the node answers, the filler is stored and upkeep continues with it.
        let answer = self.send(&attempt).await;
        tracing::debug!(nonce, ?answer, "filler sent");
        Ok(())
    }

    /// A transfer of nothing to the own account with the nonce of `tx`.
    pub(super) fn cancellation(&self, tx: &TxEip1559, fees: Fees) -> TxEip1559 {
        let cancellation = TxEip1559 {
            chain_id: tx.chain_id,
            nonce: tx.nonce,
            gas_limit: TRANSFER_GAS,
            to: TxKind::Call(self.inner.signer.address()),
            ..TxEip1559::default()
        };
        with_fees(cancellation, fees)
    }

    pub(super) async fn sign(&self, tx: TxEip1559, cancels: bool) -> Result<Attempt, ChainError> {
        let nonce = tx.nonce;
        let envelope = self.inner.signer.sign(tx).await?;
        Ok(Attempt {
            tx_hash: TxHash::from(*envelope.tx_hash()),
            nonce,
            raw: envelope.encoded_2718(),
            cancels,
            signed_block: self.inner.head.load(Ordering::Relaxed),
        })
    }

    /// Fees for a new transaction, within the configured cap. Every failure is `Unavailable`: it
    /// is no refusal of a transaction, after which a caller would give the call up.
    pub(super) async fn estimate_fees(&self) -> Result<Fees, ChainError> {
        let fees = self.inner.provider.estimate_eip1559_fees().await;
        let fees = fees.map_err(|error| ChainError::Unavailable(error.to_string()))?;
        let fees = Fees {
            max: fees.max_fee_per_gas,
            priority: fees.max_priority_fee_per_gas,
        };
        Ok(fees.capped(self.inner.settings.max_fee_per_gas))
    }

    /// Sends signed bytes.
    pub(super) async fn send(&self, attempt: &Attempt) -> Sent {
        let sent = self.inner.provider.send_raw_transaction(&attempt.raw).await;
        let reason = match sent {
            Ok(_) => return Sent::Accepted,
            Err(RpcError::ErrorResp(payload)) => payload.message.into_owned(),
            Err(error) => return Sent::Away(error.to_string()),
        };
        match meaning(&reason) {
            Meaning::AlreadyKnown => Sent::Accepted,
            Meaning::Unknown => Sent::Unclear(reason),
            Meaning::NonceTooLow => match self.unconfirmed_receipt(&attempt.tx_hash).await {
                Ok(Some(_)) => Sent::InBlock,
                Ok(None) => Sent::Refused(Meaning::NonceTooLow, reason),
                Err(error) => Sent::Away(error.to_string()),
            },
            meaning => Sent::Refused(meaning, reason),
        }
    }

    fn refusal(&self, meaning: Meaning, reason: String) -> ChainError {
        let reason = match meaning {
            Meaning::NoFunds => format!("{reason}; {} needs coins", self.operator()),
            _ => reason,
        };
        ChainError::Refused(reason)
    }

    fn contract(&self, is_deployment: bool, nonce: u64) -> Option<Address> {
        is_deployment.then(|| Address::from(self.inner.signer.address().create(nonce)))
    }

    fn mark(&self, nonce: u64) -> Sending {
        let marks = self.inner.marks.clone();
        let mut marked = marks.lock().unwrap_or_else(PoisonError::into_inner);
        marked.insert(nonce);
        drop(marked);
        Sending { marks, nonce }
    }

    pub(super) fn is_marked(&self, nonce: u64) -> bool {
        let marks = self.inner.marks.lock();
        marks
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&nonce)
    }
}

pub(super) fn with_fees(tx: TxEip1559, fees: Fees) -> TxEip1559 {
    TxEip1559 {
        max_fee_per_gas: fees.max,
        max_priority_fee_per_gas: fees.priority,
        ..tx
    }
}

fn address_text(address: Option<Address>) -> String {
    address
        .map(|address| address.to_string())
        .unwrap_or_default()
}
