//! Proof of balances: chain against ledger per instrument and holder, and CFA-RUB against the bank.
//!
//! | file | contents |
//! |---|---|
//! | `read` | one reading: all figures, over public calls of ledger, CFA service and payments |
//! | `compare` | the differences of a reading, without I/O |
//! | `progress` | what a reading has read so far |
//!
//! A reading is not a snapshot: while money moves, its figures are of different moments. So
//! readings are repeated, up to [`ProofOptions::readings_max`], until one has no unexplained
//! difference. A redemption that is burned and not yet paid explains a difference up to its amount.
//!
//! While trades of an instrument await the chain, the ledger is ahead of it. A reading that differs
//! in balances of such instruments only does not count, for at most
//! [`ProofOptions::settling_wait`].
//!
//! Architecture invariants: no service's code is a dependency, so a service's fault is not repeated
//! here. The CFA service names the holders. Their balances and the supply are read from the chain,
//! and compared with the registry too: a holder that it does not know is missing in the sum.

mod compare;
mod progress;
mod read;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_recursion::async_recursion as boxed;
use serde::Serialize;
use service_clients::CallError;

pub use compare::{Difference, DifferenceName, Holder, InstrumentProof, judge};
pub use progress::{Counts, Part, Progress};
pub use read::Reading;

/// The services to read. All channels carry a service or operator credential.
#[derive(Clone)]
pub struct ProofDeps {
    pub ledger: rpc::Channel,
    pub cfa: rpc::Channel,
    /// `None`: the bank is not checked.
    pub payments: Option<rpc::Channel>,
}

/// Default of [`ProofOptions::settling_wait`]. A batch of trades is final within seconds.
pub const SETTLING_WAIT: Duration = Duration::from_secs(30);

/// Repetition of readings.
#[derive(Clone)]
pub struct ProofOptions {
    /// Maximum readings before a difference is reported.
    pub readings_max: u32,
    /// Pause between two readings.
    pub pause_ms: u64,
    /// How long readings do not count while operations await the chain.
    pub settling_wait: Duration,
    /// Called at each part and each page of a reading, and before a reading is repeated.
    pub progress: Arc<dyn Fn(Progress) + Send + Sync>,
}

impl Default for ProofOptions {
    fn default() -> Self {
        Self {
            readings_max: 10,
            pause_ms: 500,
            settling_wait: SETTLING_WAIT,
            progress: Arc::new(|_| {}),
        }
    }
}

/// CFA-RUB against the bank, as reconciled by the payments gateway. Roubles.
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

/// Result of the proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// True without an unexplained difference.
    pub ok: bool,
    /// Number of readings.
    pub readings: u32,
    /// Operations that awaited the chain may be the cause of each unexplained difference.
    pub is_settling: bool,
    pub instruments: Vec<InstrumentProof>,
    pub bank: Option<BankProof>,
    pub differences: Vec<Difference>,
}

/// Reads and compares all figures. Repeats while there are unexplained differences.
///
/// # Errors
/// The call that failed.
#[boxed]
pub async fn prove(deps: &ProofDeps, options: ProofOptions) -> Result<Proof, CallError> {
    let begun = Instant::now();
    // `counted`: readings whose differences no operation under way may cause, or after the wait.
    let (mut readings, mut counted) = (0, 0);
    loop {
        readings += 1;
        let meter = progress::Meter::new(readings, &*options.progress);
        let reading = read::read(deps, &meter).await?;
        let (instruments, differences) = judge(&reading);
        let is_settling = compare::is_settling(&reading, &differences);
        counted += u32::from(!is_settling || begun.elapsed() >= options.settling_wait);
        let unexplained = differences
            .iter()
            .filter(|found| found.explanation.is_none());
        let unexplained = unexplained.count();
        if unexplained == 0 || counted >= options.readings_max {
            return Ok(Proof {
                ok: unexplained == 0,
                readings,
                is_settling,
                instruments,
                bank: reading.bank,
                differences,
            });
        }
        (options.progress)(Progress::Repeats {
            reading: readings,
            differences: unexplained,
            is_settling,
        });
        tokio::time::sleep(Duration::from_millis(options.pause_ms)).await;
    }
}
