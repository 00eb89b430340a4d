//! Proof of balances: chain against ledger per instrument and holder, and CFA-RUB against the bank.
//!
//! | file | what |
//! |---|---|
//! | `read` | one reading: every figure, over the public calls of ledger, CFA service and payments |
//! | `compare` | the differences of a reading, pure |
//!
//! A reading is not one snapshot: while money moves its figures are of different moments. It is
//! repeated, up to [`ProofOptions::readings_max`] times, while it has a difference that no rule
//! explains. A redemption that is burned and not paid yet explains one up to its amount.
//!
//! Architecture invariants: no other service's code is a dependency, so a fault of a service is not
//! repeated here; what holders have on chain is what the CFA service's registry reports.

mod compare;
mod read;

use std::time::Duration;

use serde::Serialize;
use service_clients::CallError;

pub use compare::{Difference, DifferenceName, Holder, InstrumentProof, judge};
pub use read::Reading;

/// The services asked. All with the credential of a service or of an operator.
#[derive(Clone)]
pub struct ProofDeps {
    pub ledger: rpc::Channel,
    pub cfa: rpc::Channel,
    /// None: the bank is left out.
    pub payments: Option<rpc::Channel>,
}

/// How patient the proof is.
#[derive(Clone, Copy, Debug)]
pub struct ProofOptions {
    /// Readings before a difference is believed.
    pub readings_max: u32,
    /// Time between two readings.
    pub pause_ms: u64,
}

impl Default for ProofOptions {
    fn default() -> Self {
        Self {
            readings_max: 10,
            pause_ms: 500,
        }
    }
}

/// CFA-RUB against the bank, as the payments gateway reconciles it. Roubles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BankProof {
    pub bank_balance: String,
    pub token_supply: String,
    pub in_flight_deposits: String,
    pub in_flight_payouts: String,
    pub suspense: String,
    pub unexplained_difference: String,
    pub notes: String,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// No difference without an explanation.
    pub ok: bool,
    /// Readings it took.
    pub readings: u32,
    pub instruments: Vec<InstrumentProof>,
    pub bank: Option<BankProof>,
    pub differences: Vec<Difference>,
}

/// Reads everything and judges it, again while there are differences and patience.
///
/// # Errors
/// The call that failed.
pub async fn prove(deps: &ProofDeps, options: ProofOptions) -> Result<Proof, CallError> {
    let mut readings = 0;
    loop {
        readings += 1;
        let reading = read::read(deps).await?;
        let (instruments, differences) = judge(&reading);
        let ok = differences
            .iter()
            .all(|difference| difference.explanation.is_some());
        if ok || readings >= options.readings_max {
            return Ok(Proof {
                ok,
                readings,
                instruments,
                bank: reading.bank,
                differences,
            });
        }
        tokio::time::sleep(Duration::from_millis(options.pause_ms)).await;
    }
}
