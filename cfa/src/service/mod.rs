//! The use cases of the service: a thin shell around `saga` and `plan`.
//!
//! | file | what |
//! |---|---|
//! | `bootstrap` | the platform's contracts, deployed once |
//! | `drive` | performs what `saga::next` says, for one operation |
//! | `hold` | the money behind a redemption |
//! | `issue`, `redeem`, `transfer` | the calls that start an operation |
//! | `settle` | batches of trades |
//! | `instruments`, `maturity` | the life of an issue |
//! | `registry` | who holds what, from the chain's own events |
//! | `users` | addresses and the allow-list |
//! | `integrity` | CheckIntegrity, GetSupply |
//! | `workers` | recovery and maturity sweeps |

pub mod bootstrap;
mod drive;
mod hold;
mod instruments;
mod integrity;
mod issue;
mod maturity;
mod redeem;
mod registry;
mod settle;
mod transfer;
mod users;
pub mod workers;

use std::collections::HashSet;
use std::sync::Mutex;

use service_kit::{Clock, KeyedMutex, clock};
use tokio::sync::watch;
use types::Decimal;

use crate::CfaConfig;
use crate::error::{Error, Refusal};
use crate::model::{Instrument, InstrumentStatus, Operation};
use crate::peers::Peers;
use crate::repo::Repo;
use chain::{Address, Connector, Contracts};

pub use instruments::{InstrumentChange, NewInstrument};
pub use integrity::HashAlgorithm;
pub use issue::IssueInvestment;
pub use maturity::NewRedemption;
pub use registry::Replayed;
pub use transfer::NewTransfer;

/// Calls to a peer under way at a time, where each row of a page or of a batch needs one.
const PEER_CALLS: usize = 8;

/// Who asks, and under which key.
#[derive(Debug, Clone)]
pub struct Asked {
    pub idempotency_key: String,
    pub correlation_id: String,
    /// Subject of the credential, for audit.
    pub actor: String,
}

/// An operation with how it came to be.
#[derive(Debug)]
pub struct Started {
    pub operation: Operation,
    /// The key (or the payment, payout, trade) was known: this is the stored operation.
    pub replayed: bool,
}

pub struct Service {
    pub repo: Repo,
    pub chain: Connector,
    pub peers: Peers,
    pub contracts: Contracts,
    pub clock: Clock,
    pub config: CfaConfig,
    pub health: rpc::Health,
    /// One worker at a time per operation, batch, instrument or redemption.
    turns: KeyedMutex<String>,
    /// One decision at a time per deposit. Taken before `turns`, never by who has one of those.
    deposits: KeyedMutex<String>,
    registry_turn: tokio::sync::Mutex<()>,
    /// Users whose allow-list transaction is in the queue.
    registered: Mutex<HashSet<String>>,
    /// Counts finished batches; waiters look again when it moves.
    batches_done: watch::Sender<u64>,
}

impl Service {
    pub fn new(
        repo: Repo,
        chain: Connector,
        peers: Peers,
        contracts: Contracts,
        clock: Clock,
        config: CfaConfig,
        health: rpc::Health,
    ) -> Self {
        Self {
            repo,
            chain,
            peers,
            contracts,
            clock,
            config,
            health,
            turns: KeyedMutex::default(),
            deposits: KeyedMutex::default(),
            registry_turn: tokio::sync::Mutex::new(()),
            registered: Mutex::new(HashSet::new()),
            batches_done: watch::Sender::new(0),
        }
    }

    /// Time of rows and events. Maturity looks at `clock` instead, which tests and the sandbox may move.
    fn now_us(&self) -> i64 {
        clock::now_us()
    }

    pub async fn known_instrument(&self, instrument_id: &str) -> Result<Instrument, Error> {
        Ok(self
            .repo
            .instrument(instrument_id)
            .await?
            .ok_or(Refusal::InstrumentNotFound)?)
    }

    async fn active_instrument(&self, instrument_id: &str) -> Result<Instrument, Error> {
        let instrument = self.known_instrument(instrument_id).await?;
        if instrument.status != InstrumentStatus::Active {
            return Err(Refusal::InstrumentNotActive.into());
        }
        Ok(instrument)
    }

    /// The token contract of an instrument that has one.
    fn token(&self, instrument: &Instrument) -> Result<Address, Error> {
        instrument.contract_address.parse().map_err(|_| {
            Error::Damaged(format!("contract address of {}", instrument.instrument_id))
        })
    }
}

/// Smallest units of an amount; a refusal that names the field when digits would be lost (R029).
pub fn units(field: &'static str, amount: Decimal, decimals: u8) -> Result<i64, Refusal> {
    amount.to_minor(decimals).map_err(|_| {
        Refusal::field(
            field,
            format!("has more than {decimals} digits after the point, or is too large"),
        )
    })
}

fn unsigned(units_minor: i64) -> u128 {
    u128::try_from(units_minor).expect("amounts of stored operations are not negative")
}
