//! The use cases of the service. They execute the decisions of `saga` and `plan`.
//!
//! | module | content |
//! |---|---|
//! | `bootstrap` | the platform's contracts, deployed once |
//! | `drive` | executes the steps of `saga::next` for one operation |
//! | `hold` | the hold of a redemption |
//! | `enforcement` | freezes and forced transfers that a document orders |
//! | `proceeds` | freezes of units that a redemption takes |
//! | `block` | redemptions that compliance blocks, clears or refunds |
//! | `issue`, `redeem`, `transfer` | the calls that start an operation |
//! | `offers` | users' offers to buy units of an issue, or to sell them back |
//! | `offer_limits` | limits that subscriptions reserve at identity |
//! | `placements`, `delivery` | the close of a placement, and what it issues |
//! | `settle` | batches of trades |
//! | `instruments`, `decision`, `maturity` | life cycle of an issue |
//! | `coupons` | coupons by the calendar of an issue |
//! | `distribution` | pays the holders for a redemption or a coupon, in parts |
//! | `moves` | moves all holders of an issue to a new token |
//! | `registry`, `extracts` | holders, from the chain's events; signed extracts |
//! | `anchor` | the ends of the hash chains of the ledger and of all audit records, on the chain |
//! | `compare` | the continuous comparison of chain and ledger |
//! | `users` | addresses and the allow-list |
//! | `integrity` | CheckIntegrity, GetSupply |
//! | `workers` | recovery and maturity sweeps |

pub mod anchor;
mod block;
pub mod bootstrap;
pub mod compare;
mod coupons;
mod decision;
mod delivery;
mod distribution;
mod drive;
mod enforcement;
mod extracts;
mod hold;
mod instruments;
mod integrity;
mod issue;
mod maturity;
mod moves;
mod offer_limits;
mod offers;
mod placements;
mod proceeds;
mod redeem;
mod registry;
mod settle;
mod transfer;
mod users;
pub mod workers;

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use events::Tx;
use events::calls::{Answered, CallKey};
use service_kit::{Clock, KeyedMutex, clock};
use tokio::sync::{OwnedMutexGuard, watch};
use types::{Decimal, DecimalError};

use crate::CfaConfig;
use crate::compare::{Comparison, Subject};
use crate::error::{Error, Refusal};
use crate::model::{Instrument, InstrumentStatus, Operation};
use crate::peers::Peers;
use crate::repo::Repo;
use crate::signing::Signing;
use chain::{Address, Connector, Contracts};

pub use decision::NewSignature;
pub use enforcement::{NewForcedTransfer, NewFreeze};
pub use extracts::NewExtract;
pub use instruments::{InstrumentChange, NewInstrument, NewPlacement};
pub use integrity::HashAlgorithm;
pub use issue::IssueInvestment;
pub use maturity::NewRedemption;
pub use offers::NewOffer;
pub use redeem::RedeemInvestment;
pub use registry::Replayed;
pub use transfer::NewTransfer;

/// Concurrent calls to a peer when each party of a batch needs one.
const PEER_CALLS: usize = 8;

/// Longest wait of a call for the chain or a peer. The sweep continues.
const CALL_WAIT: Duration = Duration::from_secs(8);
/// Part of a call's deadline that is left for its answer after a wait.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// How long the current call may still wait: at most `CALL_WAIT`, and until shortly before its
/// deadline. Outside of a call, `CALL_WAIT`.
pub fn call_wait() -> Duration {
    let left = rpc::time_left().map(|left| left.saturating_sub(ANSWER_TIME));
    left.map_or(CALL_WAIT, |left| left.min(CALL_WAIT))
}

/// Metadata of a call: idempotency key, correlation id and caller.
#[derive(Debug, Clone)]
pub struct RequestMeta {
    pub idempotency_key: String,
    pub correlation_id: String,
    /// Subject of the credential, for the audit.
    pub actor: String,
    /// Digest of the request if answers of the call are stored under their key (D50), else 0.
    pub digest: i64,
}

impl RequestMeta {
    /// Scope of the idempotency key for this call.
    fn call(&self, call: &'static str) -> CallKey {
        CallKey {
            call,
            subject: self.actor.clone(),
            key: self.idempotency_key.clone(),
        }
    }
}

/// An operation and how it was obtained.
#[derive(Debug)]
pub struct OperationResult {
    pub operation: Operation,
    /// The operation was stored before, under the same key or for the same payment, payout or
    /// trade.
    pub replayed: bool,
}

pub struct Service {
    pub repo: Repo,
    pub chain: Connector,
    pub peers: Peers,
    pub contracts: Contracts,
    pub clock: Clock,
    pub config: CfaConfig,
    pub signing: Signing,
    pub health: rpc::Health,
    /// One lock per idempotency key of a stored answer or a registration. Lock order: first.
    call_locks: KeyedMutex<CallKey>,
    /// One lock per operation, batch, instrument, redemption, coupon, offer, freeze or move. Lock
    /// order: a move before its instrument.
    object_locks: KeyedMutex<String>,
    /// One lock per deposit: it is issued or refunded, not both. Lock order: before `object_locks`.
    deposits: KeyedMutex<String>,
    registry_lock: tokio::sync::Mutex<()>,
    comparison: Mutex<Comparison>,
    /// The last holder that was compared in turn.
    compared_through: Mutex<Subject>,
    /// CFA-RUB has an open break: no payout is released.
    is_money_broken: AtomicBool,
    /// Users whose allow-list transaction was submitted.
    registered: Mutex<HashSet<String>>,
    /// Count of submitted and ended batches. Its change wakes waiters.
    batch_changes: watch::Sender<u64>,
}

impl Service {
    pub fn new(
        repo: Repo,
        chain: Connector,
        peers: Peers,
        contracts: Contracts,
        clock: Clock,
        config: CfaConfig,
        signing: Signing,
        health: rpc::Health,
    ) -> Self {
        let window_us = i64::try_from(config.compare_window_ms).unwrap_or(i64::MAX / 1_000);
        let comparison = Comparison::new(window_us.saturating_mul(1_000));
        Self {
            comparison: Mutex::new(comparison),
            compared_through: Mutex::new(Subject {
                token: String::new(),
                address: String::new(),
            }),
            is_money_broken: AtomicBool::new(false),
            repo,
            chain,
            peers,
            contracts,
            clock,
            config,
            signing,
            health,
            call_locks: KeyedMutex::default(),
            object_locks: KeyedMutex::default(),
            deposits: KeyedMutex::default(),
            registry_lock: tokio::sync::Mutex::new(()),
            registered: Mutex::new(HashSet::new()),
            batch_changes: watch::Sender::new(0),
        }
    }

    /// Time of rows and events. Maturity uses `clock`, which tests and the sandbox can move.
    pub fn now_us(&self) -> i64 {
        clock::now_us()
    }

    /// Locks the key of a call. A call with the same key for another object waits for the answer of
    /// the first and returns it, as if it had arrived later (D50).
    async fn lock_key(&self, meta: &RequestMeta, call: &'static str) -> OwnedMutexGuard<()> {
        self.call_locks.lock(meta.call(call)).await
    }

    /// Locks the key of a call, then its object.
    async fn lock_call(
        &self,
        meta: &RequestMeta,
        call: &'static str,
        object_id: &str,
    ) -> [OwnedMutexGuard<()>; 2] {
        let key = self.lock_key(meta, call).await;
        [key, self.object_locks.lock(object_id).await]
    }

    /// The id that an earlier call with this key returned (D50). Logs and counts a repeat with
    /// other content.
    async fn stored_answer(
        &self,
        meta: &RequestMeta,
        call: &'static str,
    ) -> Result<Option<String>, Error> {
        let Some(answered) = self.repo.answered_call(&meta.call(call)).await? else {
            return Ok(None);
        };
        if answered.digest != meta.digest {
            rpc::context::note_difference(call, &meta.idempotency_key);
        }
        let id = String::from_utf8(answered.answer);
        id.map(Some)
            .map_err(|_| Error::Damaged(format!("answer of {call}")))
    }

    /// Stores the id that a call returns, in the transaction of its effect.
    async fn store_call_in_tx(
        &self,
        tx: &mut Tx,
        meta: &RequestMeta,
        call: &'static str,
        id: &str,
    ) -> Result<(), Error> {
        let answered = Answered {
            digest: meta.digest,
            answer: id.as_bytes().to_vec(),
        };
        let key = meta.call(call);
        self.repo.store_call_in_tx(tx, &key, &answered).await
    }

    pub async fn require_instrument(&self, instrument_id: &str) -> Result<Instrument, Error> {
        Ok(self
            .repo
            .instrument(instrument_id)
            .await?
            .ok_or(Refusal::InstrumentNotFound)?)
    }

    async fn active_instrument(&self, instrument_id: &str) -> Result<Instrument, Error> {
        let instrument = self.require_instrument(instrument_id).await?;
        if instrument.status != InstrumentStatus::Active {
            return Err(Refusal::InstrumentNotActive.into());
        }
        Ok(instrument)
    }

    /// Parses the address of an instrument's token contract.
    ///
    /// # Errors
    /// `InstrumentNotActive` for a DRAFT without one.
    fn token(&self, instrument: &Instrument) -> Result<Address, Error> {
        if instrument.contract_address.is_empty() {
            return Err(Refusal::InstrumentNotActive.into());
        }
        instrument.contract_address.parse().map_err(|_| {
            Error::Damaged(format!("contract address of {}", instrument.instrument_id))
        })
    }
}

/// Converts an amount to smallest units. Refuses the field if digits would be lost (R029).
pub fn units(field: &'static str, amount: Decimal, decimals: u8) -> Result<i64, Refusal> {
    amount.to_minor(decimals).map_err(|error| {
        let why = match error {
            DecimalError::Overflow => error.to_string(),
            _ => format!("has more than {decimals} digits after the point"),
        };
        Refusal::field(field, why)
    })
}

fn unsigned(units_minor: i64) -> u128 {
    u128::try_from(units_minor).expect("amounts of stored operations are not negative")
}
