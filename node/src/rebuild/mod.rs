//! `platform ledger rebuild`: the ledger as a projection of the chain (R217, D21). Reads the
//! chain's own log of token transfers again from its first block, folds it into balances, and
//! compares these with the ledger's, holds excluded. Changes nothing.
//!
//! What a payout has burned and the bank has not paid yet has left the chain and not the ledger: an
//! active hold that ends in the reserve explains that much. Anything else is a difference. Both
//! sides are read while they may move, so a difference is believed when it stays.

mod compare;

use std::time::Duration;

use anyhow::{Context, bail};
use proto::cfa::v1 as cfa;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1::{PaginationRequest, PaginationResponse};
use proto::ledger::v1 as ledger;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use rpc::Channel;
use serde::Serialize;

use crate::cli::call::Target;
use crate::cli::output;
use compare::{Chain, Difference, Ledger, add, compare, number, own_name};

const PAGE: i32 = 1_000;
/// Readings before a difference is believed, and the time between two.
const READINGS_MAX: u32 = 10;
const PAUSE: Duration = Duration::from_millis(500);

/// The result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rebuilt {
    /// No difference without an explanation.
    pub ok: bool,
    /// The last block that was replayed.
    pub through_block: u64,
    pub transfers: u64,
    /// Sub-accounts compared.
    pub subaccounts: u64,
    pub readings: u32,
    pub differences: Vec<Difference>,
}

/// Replays, compares, prints; a difference that nothing explains is an error.
///
/// # Errors
/// A service that does not answer; balances that differ.
pub async fn run(target: &Target, json: bool) -> anyhow::Result<()> {
    let channel = Channel::remote(&target.url, &target.token).context("address of the platform")?;
    let mut chain = Chain::default();
    let mut readings = 0;
    let rebuilt = loop {
        readings += 1;
        chain.replay(&channel).await?;
        let ledger = read_ledger(&channel).await?;
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
        bail!("the ledger differs from what the chain's log gives");
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
    /// Folds the log from where the last call ended to its end.
    async fn replay(&mut self, channel: &Channel) -> anyhow::Result<()> {
        let mut client = CfaRegistryServiceClient::new(channel.clone())
            .max_decoding_message_size(4 * rpc::MESSAGE_BYTES_MAX);
        loop {
            let request = cfa::ReplayChainTransfersRequest {
                context: None,
                from_block: self.next_block,
            };
            let part = client
                .replay_chain_transfers(request)
                .await
                .context("log of the chain")?
                .into_inner();
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

async fn read_ledger(channel: &Channel) -> anyhow::Result<Ledger> {
    let mut client = LedgerServiceClient::new(channel.clone())
        .max_decoding_message_size(4 * rpc::MESSAGE_BYTES_MAX);
    let mut read = Ledger::default();
    let mut token = String::new();
    loop {
        let request = ledger::ListSubAccountsRequest {
            pagination: page(token),
            ..Default::default()
        };
        let answer = client
            .list_sub_accounts(request)
            .await
            .context("sub-accounts of the ledger")?
            .into_inner();
        for row in answer.subaccounts {
            read.subaccounts += 1;
            let key = (row.instrument_id, own_name(&row.subaccount_id));
            add(&mut read.balances, key, number(row.balance.as_ref())?)?;
        }
        token = next(answer.pagination);
        if token.is_empty() {
            break;
        }
    }
    loop {
        let request = ledger::ListHoldsRequest {
            status: ledger::HoldStatus::Active.into(),
            pagination: page(token),
            ..Default::default()
        };
        let answer = client
            .list_holds(request)
            .await
            .context("holds of the ledger")?
            .into_inner();
        for hold in answer.holds {
            let Some(left) = hold.remaining_amount else {
                continue;
            };
            let reserve = types::subaccount::reserve(&left.currency_code);
            if hold.destination_subaccount_id.as_deref() == Some(&reserve) {
                let amount = number(left.amount.as_ref())?;
                let key = (left.currency_code.clone(), own_name(&hold.subaccount_id));
                add(&mut read.in_flight, key, amount)?;
                add(&mut read.in_flight, (left.currency_code, reserve), amount)?;
            }
        }
        token = next(answer.pagination);
        if token.is_empty() {
            return Ok(read);
        }
    }
}

fn page(page_token: String) -> Option<PaginationRequest> {
    Some(PaginationRequest {
        page_size: PAGE,
        page_token,
    })
}

fn next(pagination: Option<PaginationResponse>) -> String {
    pagination
        .map(|page| page.next_page_token)
        .unwrap_or_default()
}
