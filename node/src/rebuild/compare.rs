//! The two sides of a rebuild and their differences. Has no I/O.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use service_clients::cfa::ChainTransfer;
use types::{
    Decimal,
    address::{eip55, onchain_address},
    subaccount,
};

/// A balance that differs between the two sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// The on-chain address if the ledger does not know its holder.
    pub subaccount_id: String,
    pub instrument_id: String,
    pub chain: String,
    pub ledger: String,
    /// chain - ledger.
    pub difference: String,
    /// Unset: the difference is a fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explanation: Option<&'static str>,
}

/// Balances of the chain by (instrument, lower-case address). The empty address has the negated
/// supply.
#[derive(Default)]
pub struct Chain {
    pub balances: BTreeMap<(String, String), Decimal>,
    pub through_block: u64,
    pub transfers: u64,
    pub next_block: u64,
}

/// Balances of the ledger by (instrument, sub-account name). Units on a blocked sub-account count
/// as the user's: the chain has both under one address.
#[derive(Default)]
pub struct Ledger {
    pub balances: BTreeMap<(String, String), Decimal>,
    pub in_flight: BTreeMap<(String, String), Decimal>,
    pub subaccounts: u64,
}

impl Chain {
    /// Applies one transfer.
    pub fn apply(&mut self, transfer: &ChainTransfer) -> anyhow::Result<()> {
        // The ledger has no units of a token that is not an instrument.
        if transfer.instrument_id.is_empty() {
            return Ok(());
        }
        self.transfers += 1;
        for (address, change) in [
            (&transfer.from_address, transfer.quantity.negated()),
            (&transfer.to_address, transfer.quantity),
        ] {
            let key = (transfer.instrument_id.clone(), address.to_ascii_lowercase());
            add(&mut self.balances, key, change)?;
        }
        Ok(())
    }
}

/// Adds a change to a balance.
pub fn add(
    balances: &mut BTreeMap<(String, String), Decimal>,
    key: (String, String),
    change: Decimal,
) -> anyhow::Result<()> {
    let balance = balances.entry(key).or_insert(Decimal::ZERO);
    *balance = balance
        .checked_add(change)
        .map_err(|error| anyhow::anyhow!("sum of balances: {error}"))?;
    Ok(())
}

/// Returns the differing balances, sorted by instrument and name.
pub fn compare(chain: &Chain, ledger: &Ledger) -> Vec<Difference> {
    // Chain balances by (instrument, name), looked up by the name's address.
    let mut named: BTreeMap<(String, String), Decimal> = BTreeMap::new();
    let mut known: BTreeSet<(String, String)> = BTreeSet::new();
    for (instrument_id, name) in ledger.balances.keys() {
        let key = (instrument_id.clone(), address_of(name));
        if let Some(balance) = chain.balances.get(&key) {
            named.insert((instrument_id.clone(), name.clone()), *balance);
        }
        known.insert(key);
    }
    for (key, balance) in &chain.balances {
        if !known.contains(key) {
            let name = if key.1.is_empty() {
                subaccount::reserve(&key.0)
            } else {
                key.1.clone()
            };
            named.insert((key.0.clone(), name), *balance);
        }
    }
    let keys: BTreeSet<_> = named.keys().chain(ledger.balances.keys()).collect();
    keys.into_iter()
        .filter_map(|key| {
            let side = |of: &BTreeMap<_, Decimal>| of.get(key).copied().unwrap_or(Decimal::ZERO);
            let (on_chain, in_ledger) = (side(&named), side(&ledger.balances));
            difference(key, on_chain, in_ledger, side(&ledger.in_flight))
        })
        .collect()
}

fn difference(
    (instrument_id, name): &(String, String),
    chain: Decimal,
    ledger: Decimal,
    in_flight: Decimal,
) -> Option<Difference> {
    let rest = chain
        .checked_sub(ledger)
        .expect("64-bit balances differ within 38 digits");
    if rest.is_zero() {
        return None;
    }
    // A payout in progress is burned on chain only. So the chain has a smaller balance of the
    // holder and a smaller supply, which the reserve mirrors.
    let is_reserve = *name == subaccount::reserve(instrument_id);
    let burned = if is_reserve { rest } else { rest.negated() };
    let is_under_way = !burned.is_negative() && burned <= in_flight;
    Some(Difference {
        subaccount_id: name.clone(),
        instrument_id: instrument_id.clone(),
        chain: chain.to_string(),
        ledger: ledger.to_string(),
        difference: rest.to_string(),
        explanation: is_under_way.then_some("payout in progress"),
    })
}

/// The lower-case on-chain address of a sub-account's holder; empty for a reserve.
fn address_of(subaccount_id: &str) -> String {
    subaccount::holder(subaccount_id).map_or_else(String::new, |holder| {
        eip55(&onchain_address(holder)).to_ascii_lowercase()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(from: &str, to: &str, quantity: &str) -> ChainTransfer {
        let address = |holder: &str| match holder {
            "" => String::new(),
            holder => eip55(&onchain_address(holder)),
        };
        ChainTransfer {
            instrument_id: types::CFA_RUB.to_owned(),
            from_address: address(from),
            to_address: address(to),
            quantity: quantity.parse().expect("number"),
        }
    }

    fn chain() -> Chain {
        let mut chain = Chain::default();
        for step in [
            transfer("", "alice", "100.00"),
            transfer("alice", "bob", "30"),
            transfer("bob", "system:fees", "0.50"),
            transfer("alice", "", "20"),
        ] {
            chain.apply(&step).expect("applied");
        }
        let mut foreign = transfer("", "alice", "7");
        foreign.instrument_id.clear();
        chain.apply(&foreign).expect("left out");
        chain
    }

    fn ledger(balances: &[(&str, &str)]) -> Ledger {
        let mut ledger = Ledger::default();
        for (name, balance) in balances {
            let key = (
                types::CFA_RUB.to_owned(),
                subaccount::strip_blocked(name).to_owned(),
            );
            add(&mut ledger.balances, key, balance.parse().expect("number")).expect("added");
        }
        ledger
    }

    const EQUAL: [(&str, &str); 6] = [
        ("alice:CFA-RUB", "40.00"),
        ("alice:CFA-RUB:blocked", "10.00"),
        ("bob:CFA-RUB", "29.50"),
        ("carol:CFA-RUB", "0.00"),
        ("system:fees:CFA-RUB", "0.50"),
        ("system:reserve:CFA-RUB", "-80.00"),
    ];

    // rows: R217
    #[test]
    fn r217_a_ledger_equal_to_the_chain_has_no_difference() {
        let chain = chain();
        assert_eq!(chain.transfers, 4);
        assert_eq!(compare(&chain, &ledger(&EQUAL)), Vec::new());
    }

    // rows: R217
    #[test]
    fn r217_every_difference_is_named_with_both_sides() {
        let mut other = EQUAL;
        other[2] = ("bob:CFA-RUB", "29.40");
        other[3] = ("carol:CFA-RUB", "0.10");
        let found = compare(&chain(), &ledger(&other));
        let found: Vec<_> = found
            .iter()
            .map(|one| {
                (
                    one.subaccount_id.as_str(),
                    one.chain.as_str(),
                    one.ledger.as_str(),
                    one.difference.as_str(),
                    one.explanation,
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                ("bob:CFA-RUB", "29.50", "29.40", "0.10", None),
                ("carol:CFA-RUB", "0", "0.10", "-0.10", None),
            ]
        );
        // A holder unknown to the ledger.
        let found = compare(&chain(), &ledger(&[EQUAL[0], EQUAL[1], EQUAL[4], EQUAL[5]]));
        assert_eq!(found.len(), 1);
        assert!(found[0].subaccount_id.starts_with("0x"), "{found:?}");
        assert_eq!(found[0].chain, "29.50");
    }

    // rows: R217
    #[test]
    fn r217_a_payout_in_progress_is_explained_up_to_its_amount() {
        let mut before = EQUAL;
        before[0] = ("alice:CFA-RUB", "60.00");
        before[5] = ("system:reserve:CFA-RUB", "-100.00");
        let mut ledger = ledger(&before);
        for name in ["alice:CFA-RUB", "system:reserve:CFA-RUB"] {
            let key = (types::CFA_RUB.to_owned(), name.to_owned());
            ledger.in_flight.insert(key, "20".parse().expect("number"));
        }
        let found = compare(&chain(), &ledger);
        assert_eq!(found.len(), 2);
        assert!(
            found.iter().all(|one| one.explanation.is_some()),
            "{found:?}"
        );
        for amount in ledger.in_flight.values_mut() {
            *amount = "19.99".parse().expect("number");
        }
        assert!(
            compare(&chain(), &ledger)
                .iter()
                .all(|one| one.explanation.is_none())
        );
    }
}
