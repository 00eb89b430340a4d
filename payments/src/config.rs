//! Settings of the gateway. Every limit is here with its default and nowhere in the code.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use rail::{policy::ClientPolicy, purpose_code::Requisites};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaymentsConfig {
    /// Folder of `payments.db`.
    pub data_dir: PathBuf,
    /// Folder of the keys shared with the bank (`rail/keys.rs`).
    pub keys_dir: PathBuf,
    /// Address of the bank and fast-payment system.
    pub bank_url: String,
    /// The platform's account, where deposits arrive and payouts leave.
    pub requisites: Requisites,
    /// Fixed purpose of a deposit (specification 4.2.3).
    pub deposit_purpose: String,
    /// Purpose of a payout; the payout id follows.
    pub payout_purpose: String,
    /// How long a payer has to pay, in seconds (D30).
    pub intent_life_s: u32,
    /// First status poll of an intent after this time, then doubling.
    pub poll_first_ms: u64,
    pub poll_most_ms: u64,
    /// First repeat or poll of a payout after this time, then doubling.
    pub payout_pause_first_ms: u64,
    pub payout_pause_most_ms: u64,
    /// How often a difference is read again before it is believed: what moves meanwhile is no difference.
    pub reconcile_readings: u32,
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
            requisites: Requisites::default(),
            deposit_purpose: "Пополнение баланса".into(),
            payout_purpose: "Выплата по погашению ЦФА".into(),
            intent_life_s: 900,
            poll_first_ms: 3_000,
            poll_most_ms: 60_000,
            payout_pause_first_ms: 250,
            payout_pause_most_ms: 300_000,
            reconcile_readings: 4,
            reconcile_pause_ms: 250,
            daily_reconciliation: true,
            client: ClientPolicy::default(),
        }
    }
}
