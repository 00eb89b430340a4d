//! `platform ledger rebuild`: the ledger as a projection of the chain (R217, D21). Replays the
//! chain's log of token transfers from its first block into balances and compares them with the
//! ledger's, holds excluded. Read-only.
//!
//! A payout that is burned but not paid is in the ledger and no longer on chain. An active hold
//! with the reserve as destination explains its amount. Any other difference is a fault. Both sides
//! may change while they are read, so only a difference that lasts over all readings is reported.

mod compare;

use std::time::Duration;

use anyhow::{Context, bail};
use rpc::{Channel, Context as CallContext};
use serde::Serialize;
use service_clients::{CfaClient, LedgerClient};
use types::subaccount;

use crate::cli::call::Target;
use crate::cli::output;
use compare::{Chain, Difference, Ledger, add, compare};

/// Name of this command as the source of calls.
const SOURCE: &str = "rebuild";
/// Readings before a difference is reported, and the pause between two readings.
const READINGS_MAX: u32 = 10;
const PAUSE: Duration = Duration::from_millis(500);

/// The result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rebuilt {
    /// No unexplained difference.
    pub ok: bool,
    /// Last replayed block.
    pub through_block: u64,
    pub transfers: u64,
    /// Sub-accounts compared.
    pub subaccounts: u64,
    pub readings: u32,
    pub differences: Vec<Difference>,
}

/// Replays the chain's log, compares and prints.
///
/// # Errors
/// A service does not answer, or there is an unexplained difference.
pub async fn run(target: &Target, json: bool) -> anyhow::Result<()> {
    let channel = Channel::remote(&target.url, &target.token).context("address of the platform")?;
    let cfa = CfaClient::new(channel.clone(), SOURCE);
    let ledger_client = LedgerClient::new(channel, SOURCE);
    let mut chain = Chain::default();
    let mut readings = 0;
    let rebuilt = loop {
        readings += 1;
        chain.replay(&cfa).await.context("log of the chain")?;
        let ledger = read_ledger(&ledger_client).await.context("the ledger")?;
        let differences = compare(&chain, &ledger);
        let ok = differences.iter().all(|found| found.explanation.is_some());
        if ok || readings == READINGS_MAX {
            break Rebuilt {
                ok,
                through_block: chain.through_block,
                transfers: chain.transfers,
                subaccounts: ledger.subaccounts,
                readings,
                differences,
            };
        }
        tokio::time::sleep(PAUSE).await;
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&rebuilt)?);
    } else {
        print!("{}", text(&rebuilt));
    }
    if !rebuilt.ok {
        bail!(
            "the ledger differs from the balances of the chain's log: see the rows marked MISTAKE"
        );
    }
    Ok(())
}

fn text(rebuilt: &Rebuilt) -> String {
    let mut out = format!(
        "replayed: {} transfers through block {}\ncompared: {} sub-accounts\n",
        rebuilt.transfers, rebuilt.through_block, rebuilt.subaccounts
    );
    if rebuilt.differences.is_empty() {
        out.push_str("no difference\n");
        return out;
    }
    let rows = rebuilt.differences.iter().map(|found| {
        [
            found.subaccount_id.clone(),
            found.chain.clone(),
            found.ledger.clone(),
            found.difference.clone(),
            found.explanation.unwrap_or("MISTAKE").to_owned(),
        ]
    });
    let head = ["SUB-ACCOUNT", "CHAIN", "LEDGER", "DIFFERENCE", ""];
    out.push_str(&output::table(head, rows));
    out
}

impl Chain {
    /// Applies the part of the chain's log that is new since the last call.
    async fn replay(&mut self, cfa: &CfaClient) -> anyhow::Result<()> {
        let context = CallContext::new(SOURCE);
        loop {
            let part = cfa.chain_transfers(&context, self.next_block).await?;
            for transfer in &part.transfers {
                self.apply(transfer)?;
            }
            if self.next_block <= part.last_block {
                self.through_block = part.through_block;
                self.next_block = part.through_block + 1;
            }
            if self.next_block > part.last_block {
                return Ok(());
            }
        }
    }
}

async fn read_ledger(ledger: &LedgerClient) -> anyhow::Result<Ledger> {
    let context = CallContext::new(SOURCE);
    let mut read = Ledger::default();
    for row in ledger.sub_accounts(&context, "", &|_: usize| {}).await? {
        read.subaccounts += 1;
        let key = (
            row.instrument_id,
            subaccount::strip_blocked(&row.subaccount_id).to_owned(),
        );
        add(&mut read.balances, key, row.balance)?;
    }
    for hold in ledger.active_hold_amounts(&context).await? {
        let reserve = subaccount::reserve(&hold.instrument_id);
        if hold.destination == reserve {
            let key = (
                hold.instrument_id.clone(),
                subaccount::strip_blocked(&hold.subaccount_id).to_owned(),
            );
            add(&mut read.in_flight, key, hold.remaining)?;
            add(
                &mut read.in_flight,
                (hold.instrument_id, reserve),
                hold.remaining,
            )?;
        }
    }
    Ok(read)
}
