//! Settings of the gateway with their defaults.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use rail::{policy::ClientPolicy, purpose_code::Requisites};

/// Settings of the payments gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaymentsConfig {
    /// Folder of `payments.db`.
    pub data_dir: PathBuf,
    /// Folder of the keys shared with the bank (`rail/keys.rs`).
    pub keys_dir: PathBuf,
    /// Address of the bank and fast-payment system.
    pub bank_url: String,
    /// The bank's name in receipts, because transaction ids are unique per bank. Must not change
    /// for the same bank: a repeated report would count as a new transaction.
    pub bank_id: String,
    /// The platform's account for deposits and payouts.
    pub requisites: Requisites,
    /// Fixed text of a deposit's purpose (specification 4.2.3).
    pub deposit_purpose: String,
    /// Text of a payout's purpose; the payout id follows.
    pub payout_purpose: String,
    /// Lifetime of an intent, in seconds (D30).
    pub intent_life_s: u32,
    /// Delay before the first status poll of an intent; then it doubles.
    pub poll_first_ms: u64,
    /// Longest delay between two polls of a pending intent.
    pub poll_most_ms: u64,
    /// Delay between polls of an intent that has failed or expired: its money may still arrive
    /// while the webhook is lost.
    pub late_poll_pause_ms: u64,
    /// How long an intent is polled after its lifetime, in seconds.
    pub late_poll_window_s: u32,
    /// Delay before the first retry or poll of a payout; then it doubles.
    pub payout_pause_first_ms: u64,
    /// Longest delay between two attempts or polls of a payout.
    pub payout_pause_most_ms: u64,
    /// Maximum readings before a difference is reported: amounts in flight between two reads are no
    /// difference.
    pub reconcile_readings: u32,
    /// Pause between two readings.
    pub reconcile_pause_ms: u64,
    /// Reconcile each business day at its cut-off.
    pub daily_reconciliation: bool,
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
