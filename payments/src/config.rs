//! Configuration of the payments service.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use rail::{policy::ClientPolicy, purpose_code::Requisites};

/// A field that the configuration file omits has its default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaymentsConfig {
    /// Folder of `payments.db`.
    pub data_dir: PathBuf,
    /// Folder of the request-signing key and the webhook secrets ([`rail::keys`]); created on first
    /// use.
    pub keys_dir: PathBuf,
    /// Base URL of the bank's API; the fast-payment system (SBP) has the same URL.
    pub bank_url: String,
    /// Identifies the bank in receipts: a transaction id is unique only per bank. Must not change
    /// for a bank, else a repeated report counts as a new transaction.
    pub bank_id: String,
    /// Bank details of the beneficiary of deposits. Payouts are debited from the same account.
    pub requisites: Requisites,
    /// Payment purpose of a deposit (specification 4.2.3). A bank transfer appends
    /// `PAY-<payment id>`.
    pub deposit_purpose: String,
    /// Payment purpose of a payout; the payout id is appended.
    pub payout_purpose: String,
    /// TTL of an intent, in seconds (D30).
    pub intent_life_s: u32,
    /// Maximum pending intents of a user: each is polled at the bank.
    pub pending_intents_per_user: u32,
    /// Maximum polled intents of a user: the pending ones, and those that failed or expired within
    /// `late_poll_window_s`.
    pub polled_intents_per_user: u32,
    /// Initial backoff between status polls of a pending intent; each poll doubles it.
    pub poll_first_ms: u64,
    /// Longest backoff between status polls of a pending intent.
    pub poll_most_ms: u64,
    /// Interval between status polls of a failed or expired intent. Late money still counts (T25),
    /// and its webhook may be lost.
    pub late_poll_pause_ms: u64,
    /// How long an intent is polled after its TTL, in seconds.
    pub late_poll_window_s: u32,
    /// Initial backoff between attempts to order a payout, then between polls of its transfer. Each
    /// attempt or poll doubles it.
    pub payout_pause_first_ms: u64,
    /// Longest backoff between attempts or polls of a payout.
    pub payout_pause_most_ms: u64,
    /// Maximum comparisons before a difference is reported: a mint or transfer that completes
    /// between the bank read and the chain read looks like one.
    pub reconcile_readings: u32,
    /// Interval between comparisons.
    pub reconcile_pause_ms: u64,
    /// Reconcile each business day at its cut-off.
    pub daily_reconciliation: bool,
    /// Timeouts and retries of all outgoing calls, and the circuit breaker of bank calls.
    pub client: ClientPolicy,
}

impl Default for PaymentsConfig {
    fn default() -> Self {
        PaymentsConfig {
            data_dir: "data/payments".into(),
            keys_dir: "data/keys".into(),
            bank_url: "http://127.0.0.1:8086".into(),
            bank_id: "bank".into(),
            requisites: Requisites::default(),
            deposit_purpose: "Пополнение баланса".into(),
            payout_purpose: "Выплата по погашению ЦФА".into(),
            intent_life_s: 900,
            pending_intents_per_user: 32,
            polled_intents_per_user: 256,
            poll_first_ms: 3_000,
            poll_most_ms: 60_000,
            late_poll_pause_ms: 600_000,
            late_poll_window_s: 86_400,
            payout_pause_first_ms: 250,
            payout_pause_most_ms: 300_000,
            reconcile_readings: 4,
            reconcile_pause_ms: 250,
            daily_reconciliation: true,
            client: ClientPolicy::default(),
        }
    }
}
