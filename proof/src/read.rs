//! Asks ledger, CFA service and payments gateway for every figure of the proof.

use std::collections::BTreeMap;

use proto::cfa::v1 as cfa;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1::{PaginationRequest, PaginationResponse, RequestContext};
use proto::convert;
use proto::ledger::v1 as ledger;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::payments::v1 as payments;
use proto::payments::v1::payments_service_client::PaymentsServiceClient;
use tonic::{Code, Status};
use types::address::{eip55, onchain_address};
use types::{CFA_RUB, Decimal, subaccount};

use crate::compare::{plus, sum};
use crate::{BankProof, ProofDeps};

const PAGE: i32 = 1_000;

/// Everything both sides say, per instrument.
#[derive(Clone, Debug)]
pub struct Reading {
    pub instruments: BTreeMap<String, InstrumentReading>,
    pub bank: Option<BankProof>,
}

/// One instrument on both sides.
#[derive(Clone, Debug)]
pub struct InstrumentReading {
    /// None: not registered.
    pub chain_supply: Option<Decimal>,
    pub ledger_supply: Decimal,
    /// By holder: user id or `system:<purpose>`.
    pub chain: BTreeMap<String, Decimal>,
    pub ledger: BTreeMap<String, Decimal>,
    /// Holds that end in the reserve: redemptions under way.
    pub in_flight: BTreeMap<String, Decimal>,
    pub trial_balance: Decimal,
    pub active_holds: Decimal,
    pub held: Decimal,
    pub unsettled: Decimal,
}

impl Default for InstrumentReading {
    fn default() -> Self {
        let zero = Decimal::from_integer(0);
        Self {
            chain_supply: None,
            ledger_supply: zero,
            chain: BTreeMap::new(),
            ledger: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            trial_balance: zero,
            active_holds: zero,
            held: zero,
            unsettled: zero,
        }
    }
}

/// Reads all of it once.
pub async fn read(deps: &ProofDeps) -> Result<Reading, Status> {
    let mut ledger = LedgerServiceClient::new(deps.ledger.clone())
        .max_decoding_message_size(4 * rpc::MESSAGE_BYTES_MAX);
    let mut cfa = CfaRegistryServiceClient::new(deps.cfa.clone())
        .max_decoding_message_size(4 * rpc::MESSAGE_BYTES_MAX);
    let mut instruments: BTreeMap<String, InstrumentReading> = BTreeMap::new();

    let lines = ledger
        .get_trial_balance(ledger::GetTrialBalanceRequest::default())
        .await?
        .into_inner()
        .lines;
    for line in lines {
        let of = instruments.entry(line.instrument_id.clone()).or_default();
        of.trial_balance = number(line.total.as_ref())?;
        of.ledger_supply = number(line.circulating.as_ref())?;
        of.active_holds = number(line.active_holds.as_ref())?;
        of.unsettled = number(line.unsettled.as_ref())?;
    }
    for id in registered(&mut cfa).await? {
        let supply = cfa
            .get_supply(cfa::GetSupplyRequest {
                instrument_id: id.clone(),
                ..Default::default()
            })
            .await?
            .into_inner();
        instruments.entry(id).or_default().chain_supply =
            Some(number(supply.total_supply.as_ref())?);
    }
    for (id, of) in &mut instruments {
        let mut names = BTreeMap::new();
        sub_accounts(&mut ledger, id, of, &mut names).await?;
        if id == CFA_RUB {
            redemptions(&mut ledger, of).await?;
        }
        if of.chain_supply.is_some() {
            holders(&mut cfa, id, of, &names).await?;
        }
    }
    // A house account that never had units of an instrument says nothing.
    instruments.retain(|_, of| {
        of.chain_supply.is_some() || of.ledger.values().any(|balance| !balance.is_zero())
    });
    let bank = match &deps.payments {
        Some(channel) => Some(bank(channel.clone()).await?),
        None => None,
    };
    Ok(Reading { instruments, bank })
}

/// Every instrument of the registry, CFA-RUB included.
async fn registered(
    cfa: &mut CfaRegistryServiceClient<rpc::Channel>,
) -> Result<Vec<String>, Status> {
    let mut ids = vec![CFA_RUB.to_owned()];
    let mut token = String::new();
    loop {
        let request = cfa::ListInstrumentsRequest {
            pagination: page(token),
            ..Default::default()
        };
        let answer = cfa.list_instruments(request).await?.into_inner();
        ids.extend(
            answer
                .instruments
                .into_iter()
                .filter(|i| i.status() != cfa::InstrumentStatus::Draft)
                .map(|i| i.instrument_id),
        );
        token = next(answer.pagination);
        if token.is_empty() {
            ids.sort();
            ids.dedup();
            return Ok(ids);
        }
    }
}

/// Balances by holder, and the address of each holder's name.
async fn sub_accounts(
    client: &mut LedgerServiceClient<rpc::Channel>,
    id: &str,
    of: &mut InstrumentReading,
    names: &mut BTreeMap<String, String>,
) -> Result<(), Status> {
    let mut token = String::new();
    let mut held = Vec::new();
    loop {
        let request = ledger::ListSubAccountsRequest {
            instrument_id: id.to_owned(),
            pagination: page(token),
            ..Default::default()
        };
        let answer = client.list_sub_accounts(request).await?.into_inner();
        for account in &answer.subaccounts {
            held.push(number(account.held.as_ref())?);
            let Some(holder) = holder_of(&account.subaccount_id) else {
                continue;
            };
            let balance = number(account.balance.as_ref())?;
            names.insert(address(holder), holder.to_owned());
            let total = of
                .ledger
                .entry(holder.to_owned())
                .or_insert(Decimal::from_integer(0));
            *total = plus(*total, balance);
        }
        token = next(answer.pagination);
        if token.is_empty() {
            of.held = sum(&held);
            return Ok(());
        }
    }
}

/// Whose tokens a sub-account is about; `None` for the reserve. `<user>:<instrument>[:blocked]`,
/// `system:<purpose>:<instrument>`.
fn holder_of(subaccount_id: &str) -> Option<&str> {
    let (first, rest) = subaccount_id.split_once(':')?;
    if first != "system" {
        return Some(first);
    }
    let (purpose, _) = rest.split_once(':')?;
    (purpose != "reserve").then(|| &subaccount_id[..first.len() + 1 + purpose.len()])
}

fn address(holder: &str) -> String {
    eip55(&onchain_address(holder)).to_ascii_lowercase()
}

/// Active holds with the reserve as destination: their money leaves the chain before it leaves the ledger (T10).
async fn redemptions(
    client: &mut LedgerServiceClient<rpc::Channel>,
    of: &mut InstrumentReading,
) -> Result<(), Status> {
    let mut token = String::new();
    let reserve = subaccount::reserve(CFA_RUB);
    loop {
        let request = ledger::ListHoldsRequest {
            status: ledger::HoldStatus::Active.into(),
            pagination: page(token),
            ..Default::default()
        };
        let answer = client.list_holds(request).await?.into_inner();
        for hold in &answer.holds {
            if hold.destination_subaccount_id.as_deref() != Some(&reserve) {
                continue;
            }
            let Some(holder) = holder_of(&hold.subaccount_id) else {
                continue;
            };
            let remaining = hold
                .remaining_amount
                .as_ref()
                .and_then(|amount| amount.amount.as_ref());
            let total = of
                .in_flight
                .entry(holder.to_owned())
                .or_insert(Decimal::from_integer(0));
            *total = plus(*total, number(remaining)?);
        }
        token = next(answer.pagination);
        if token.is_empty() {
            return Ok(());
        }
    }
}

async fn holders(
    client: &mut CfaRegistryServiceClient<rpc::Channel>,
    id: &str,
    of: &mut InstrumentReading,
    names: &BTreeMap<String, String>,
) -> Result<(), Status> {
    let mut token = String::new();
    loop {
        let request = cfa::ListHoldersRequest {
            instrument_id: id.to_owned(),
            pagination: page(token),
            ..Default::default()
        };
        let answer = client.list_holders(request).await?.into_inner();
        for holder in &answer.holders {
            let at = holder.address.to_ascii_lowercase();
            let name = names.get(&at).cloned().unwrap_or_else(|| {
                if holder.user_id.is_empty() {
                    at
                } else {
                    holder.user_id.clone()
                }
            });
            let balance = number(holder.balance.as_ref())?;
            let total = of.chain.entry(name).or_insert(Decimal::from_integer(0));
            *total = plus(*total, balance);
        }
        token = next(answer.pagination);
        if token.is_empty() {
            return Ok(());
        }
    }
}

/// Bank against supply, reconciled now.
async fn bank(channel: rpc::Channel) -> Result<BankProof, Status> {
    let key = uuid::Uuid::now_v7().to_string();
    let request = payments::ReconcileRequest {
        context: Some(context(&format!("proof:{key}"))),
        business_date: Some(std::time::SystemTime::now().into()),
    };
    let report = PaymentsServiceClient::new(channel)
        .reconcile(request)
        .await?
        .into_inner()
        .report
        .ok_or_else(|| Status::data_loss("reconciliation without a report"))?;
    let roubles = |money: &Option<proto::common::v1::Money>| {
        money
            .as_ref()
            .and_then(|money| money.amount.as_ref())
            .map_or_else(|| "0.00".to_owned(), |amount| amount.value.clone())
    };
    Ok(BankProof {
        bank_balance: roubles(&report.bank_balance),
        token_supply: roubles(&report.token_supply),
        in_flight_deposits: roubles(&report.in_flight_deposits),
        in_flight_payouts: roubles(&report.in_flight_payouts),
        suspense: roubles(&report.suspense),
        unexplained_difference: roubles(&report.unexplained_difference),
        notes: report.notes,
    })
}

/// The key is new for each reading: a repeat would return the report of an earlier one.
fn context(key: &str) -> RequestContext {
    RequestContext {
        request_id: key.to_owned(),
        correlation_id: key.to_owned(),
        idempotency_key: key.to_owned(),
        source: "proof".to_owned(),
        ..Default::default()
    }
}

fn page(page_token: String) -> Option<PaginationRequest> {
    Some(PaginationRequest {
        page_size: PAGE,
        page_token,
    })
}

fn next(pagination: Option<PaginationResponse>) -> String {
    pagination.map(|p| p.next_page_token).unwrap_or_default()
}

fn number(value: Option<&proto::common::v1::Decimal>) -> Result<Decimal, Status> {
    convert::optional_decimal(value)
        .map(|value| value.unwrap_or(Decimal::from_integer(0)))
        .map_err(|error| Status::new(Code::DataLoss, format!("an amount {error}")))
}
