//! Reads all figures of the proof from ledger, CFA service and payments gateway.

use std::collections::BTreeMap;

use rpc::Context;
use service_clients::{Answer, CfaClient, LedgerClient, PaymentsClient, cfa::InstrumentStatus};
use types::{
    CFA_RUB, Decimal,
    address::{eip55, onchain_address},
    subaccount,
};

use crate::compare::{plus, sum};
use crate::progress::{Meter, Part};
use crate::{BankProof, ProofDeps};

/// Name of this crate as the calling service.
const SOURCE: &str = "proof";

/// Figures of both sides, per instrument.
#[derive(Clone, Debug)]
pub struct Reading {
    pub instruments: BTreeMap<String, InstrumentReading>,
    pub bank: Option<BankProof>,
}

/// One instrument on both sides.
#[derive(Clone, Debug, Default)]
pub struct InstrumentReading {
    /// `None`: not registered.
    pub chain_supply: Option<Decimal>,
    /// Units that the CFA service counts as issued; `None` for CFA-RUB, which has no limit.
    pub issued: Option<Decimal>,
    pub ledger_supply: Decimal,
    /// By holder: user id or `system:<purpose>`. Read from the chain.
    pub chain: BTreeMap<String, Decimal>,
    /// The CFA service's registry of the same holders.
    pub registry: BTreeMap<String, Decimal>,
    pub ledger: BTreeMap<String, Decimal>,
    /// Active holds with the reserve as destination: redemptions in progress.
    pub in_flight: BTreeMap<String, Decimal>,
    pub trial_balance: Decimal,
    pub active_holds: Decimal,
    pub held: Decimal,
    pub unsettled: Decimal,
    /// The same, summed over the sub-accounts, which are read later.
    pub unsettled_later: Decimal,
}

impl InstrumentReading {
    /// True if operations await the chain: a credit of theirs is unsettled. One that credits
    /// nothing unsettled, as a mint, is not seen.
    pub fn is_settling(&self) -> bool {
        !self.unsettled.is_zero() || !self.unsettled_later.is_zero()
    }
}

/// Reads all figures once.
pub async fn read(deps: &ProofDeps, meter: &Meter<'_>) -> Answer<Reading> {
    let context = &Context::new(SOURCE);
    let ledger = LedgerClient::new(deps.ledger.clone(), SOURCE);
    let cfa = CfaClient::new(deps.cfa.clone(), SOURCE);
    let mut instruments: BTreeMap<String, InstrumentReading> = BTreeMap::new();

    for line in ledger.trial_balance(context).await? {
        let of = instruments.entry(line.instrument_id).or_default();
        of.trial_balance = line.total;
        of.ledger_supply = line.circulating;
        of.active_holds = line.active_holds;
        of.unsettled = line.unsettled;
    }
    let mut registered = vec![CFA_RUB.to_owned()];
    let known = cfa.instruments(context).await?.into_iter();
    for one in known.filter(|one| one.status != InstrumentStatus::Draft) {
        let of = instruments.entry(one.instrument_id.clone()).or_default();
        of.issued = one.issued.filter(|_| !one.is_money);
        registered.push(one.instrument_id);
    }
    registered.sort();
    registered.dedup();
    for id in &registered {
        instruments.entry(id.clone()).or_default();
    }
    let total = instruments.len();
    meter.update(|counts| (counts.part, counts.instruments_total) = (Part::ChainSupply, total));
    for id in registered {
        let (supply, _) = cfa.supply(context, &id).await?;
        instruments.entry(id).or_default().chain_supply = Some(supply);
    }
    for (done, (id, of)) in instruments.iter_mut().enumerate() {
        meter.update(|counts| {
            counts.part = Part::LedgerHolders;
            counts.instruments = done;
        });
        let names = sub_accounts(&ledger, context, id, of, meter).await?;
        if id == CFA_RUB {
            redemptions(&ledger, context, of).await?;
        }
        if of.chain_supply.is_some() {
            meter.update(|counts| counts.part = Part::ChainHolders);
            holders(&cfa, context, id, of, &names, meter).await?;
        }
    }
    meter.update(|counts| counts.instruments = total);
    // Drops unregistered instruments of which no account has units.
    instruments.retain(|_, of| {
        of.chain_supply.is_some() || of.ledger.values().any(|balance| !balance.is_zero())
    });
    let bank = match &deps.payments {
        Some(channel) => {
            meter.update(|counts| counts.part = Part::Bank);
            Some(bank(PaymentsClient::new(channel.clone(), SOURCE), context).await?)
        }
        None => None,
    };
    Ok(Reading { instruments, bank })
}

/// Reads balances by holder; returns each holder's name by address.
async fn sub_accounts(
    ledger: &LedgerClient,
    context: &Context,
    id: &str,
    of: &mut InstrumentReading,
    meter: &Meter<'_>,
) -> Answer<BTreeMap<String, String>> {
    let mut names = BTreeMap::new();
    let on_page = |rows: usize| meter.update(|counts| counts.ledger_holders += rows);
    let accounts = ledger.sub_accounts(context, id, &on_page).await?;
    of.held = sum(accounts.iter().map(|account| &account.held));
    of.unsettled_later = sum(accounts.iter().map(|account| &account.unsettled));
    for account in accounts {
        if let Some(holder) = subaccount::holder(&account.subaccount_id) {
            names.insert(address(holder), holder.to_owned());
            add(&mut of.ledger, holder.to_owned(), account.balance);
        }
    }
    Ok(names)
}

fn add(side: &mut BTreeMap<String, Decimal>, holder: String, amount: Decimal) {
    let total = side.entry(holder).or_insert(Decimal::ZERO);
    *total = plus(*total, amount);
}

fn address(holder: &str) -> String {
    eip55(&onchain_address(holder)).to_ascii_lowercase()
}

/// Reads active holds with the reserve as destination. Their money leaves the chain before the
/// ledger (T10).
async fn redemptions(
    ledger: &LedgerClient,
    context: &Context,
    of: &mut InstrumentReading,
) -> Answer<()> {
    let reserve = subaccount::reserve(CFA_RUB);
    for hold in ledger.active_hold_amounts(context).await? {
        if hold.destination == reserve
            && let Some(holder) = subaccount::holder(&hold.subaccount_id)
        {
            add(&mut of.in_flight, holder.to_owned(), hold.remaining);
        }
    }
    Ok(())
}

async fn holders(
    cfa: &CfaClient,
    context: &Context,
    id: &str,
    of: &mut InstrumentReading,
    names: &BTreeMap<String, String>,
    meter: &Meter<'_>,
) -> Answer<()> {
    let on_page = |rows: usize| meter.update(|counts| counts.chain_holders += rows);
    for holder in cfa.chain_balances(context, id, &on_page).await? {
        let at = holder.address.to_ascii_lowercase();
        let name = match names.get(&at) {
            Some(name) => name.clone(),
            None if holder.user_id.is_empty() => at,
            None => holder.user_id,
        };
        add(&mut of.chain, name.clone(), holder.on_chain);
        add(&mut of.registry, name, holder.in_registry);
    }
    Ok(())
}

/// Reconciles bank and supply now, and returns the figures.
async fn bank(payments: PaymentsClient, context: &Context) -> Answer<BankProof> {
    let report = payments.reconcile(context).await?;
    Ok(BankProof {
        bank_balance: report.bank_balance.to_string(),
        token_supply: report.token_supply.to_string(),
        in_flight_deposits: report.in_flight_deposits.to_string(),
        in_flight_payouts: report.in_flight_payouts.to_string(),
        suspense: report.suspense.to_string(),
        unexplained_difference: report.unexplained_difference.to_string(),
        notes: report.notes,
    })
}
