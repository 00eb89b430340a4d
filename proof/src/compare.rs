//! Finds the differences of a reading and their explanations, without I/O.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use types::{CFA_RUB, Decimal};

use crate::read::{InstrumentReading, Reading};

/// Figures of one instrument, as exact decimal text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstrumentProof {
    pub instrument_id: String,
    pub chain_supply: String,
    /// Negated balance of the reserve.
    pub ledger_supply: String,
    /// Sum over holders on chain.
    pub chain_holders: String,
    /// Sum over holders in the ledger, including fee and other house accounts.
    pub ledger_holders: String,
    /// Sum over all sub-accounts, which must be zero.
    pub trial_balance: String,
    pub active_holds: String,
    /// Amount that is credited and not yet final.
    pub unsettled: String,
    /// Redemptions in progress: their units may be burned on chain already, and stay in the ledger
    /// until the payout is confirmed.
    pub in_flight: String,
    pub holders: Vec<Holder>,
}

/// One holder on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// User id, or `system:<purpose>`.
    pub holder: String,
    pub chain: String,
    pub ledger: String,
}

/// Kind of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DifferenceName {
    /// Chain supply against ledger supply.
    Supply,
    /// Chain supply against the sum of the holders' balances on chain.
    ChainHolders,
    /// A holder's balance on chain against the ledger.
    Holder,
    /// A holder's balance on chain against the CFA service's registry.
    Registry,
    /// The ledger's sub-accounts do not sum to zero.
    TrialBalance,
    /// Active holds against the held amounts of the sub-accounts.
    Holds,
    /// The ledger has units of an unregistered instrument.
    UnknownInstrument,
    /// The chain has more units than the CFA service counts as issued: its limit is not kept.
    Issued,
    /// Bank against CFA-RUB.
    Bank,
}

impl DifferenceName {
    /// Names of [`Difference::left`] and [`Difference::right`].
    pub fn sides(self) -> (&'static str, &'static str) {
        match self {
            Self::Supply | Self::UnknownInstrument | Self::Holder => ("chain", "ledger"),
            Self::Registry => ("chain", "holder registry"),
            Self::ChainHolders => ("chain supply", "sum of balances on chain"),
            Self::Issued => ("chain supply", "counted as issued"),
            Self::TrialBalance => ("sum of sub-accounts", "zero"),
            Self::Holds => ("active holds", "held by sub-accounts"),
            Self::Bank => ("bank", "CFA-RUB supply"),
        }
    }

    /// True if trades that become final during a reading can cause it: its sides are read at
    /// different moments.
    fn is_of_moving_balances(self) -> bool {
        match self {
            Self::Supply | Self::ChainHolders | Self::Holder | Self::Registry | Self::Holds => true,
            Self::TrialBalance | Self::UnknownInstrument | Self::Issued | Self::Bank => false,
        }
    }
}

/// A difference with both amounts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub name: DifferenceName,
    pub instrument_id: String,
    /// Empty unless the difference concerns one holder.
    pub holder: String,
    pub left: String,
    pub right: String,
    /// left - right.
    pub difference: String,
    /// Why the difference is legitimate; `None`: a fault.
    pub explanation: Option<String>,
}

/// Compares all figures of a reading.
pub fn judge(reading: &Reading) -> (Vec<InstrumentProof>, Vec<Difference>) {
    let mut differences = Vec::new();
    let proofs = reading
        .instruments
        .iter()
        .map(|(id, instrument)| judge_instrument(id, instrument, &mut differences))
        .collect();
    if let Some(bank) = &reading.bank {
        let rest: Decimal = bank.unexplained_difference.parse().unwrap_or(ONE);
        if !rest.is_zero() {
            differences.push(Difference {
                name: DifferenceName::Bank,
                instrument_id: CFA_RUB.to_owned(),
                holder: String::new(),
                left: bank.bank_balance.clone(),
                right: bank.token_supply.clone(),
                difference: bank.unexplained_difference.clone(),
                explanation: None,
            });
        }
    }
    (proofs, differences)
}

/// True if there are unexplained differences, and operations that await the chain may be the cause
/// of each: it concerns balances of an instrument that is settling.
pub fn is_settling(reading: &Reading, differences: &[Difference]) -> bool {
    let mut unexplained = differences
        .iter()
        .filter(|found| found.explanation.is_none())
        .peekable();
    unexplained.peek().is_some()
        && unexplained.all(|found| {
            let of = reading.instruments.get(&found.instrument_id);
            found.name.is_of_moving_balances() && of.is_some_and(InstrumentReading::is_settling)
        })
}

/// Replaces an unreadable difference, so that it does not count as zero.
const ONE: Decimal = Decimal::from_integer(1);

const REDEMPTION_IN_PROGRESS: &str =
    "redemption in progress: burned on chain, held in the ledger until it is paid";

fn judge_instrument(
    id: &str,
    of: &InstrumentReading,
    differences: &mut Vec<Difference>,
) -> InstrumentProof {
    use DifferenceName::{ChainHolders, Holds, Issued, Supply, TrialBalance, UnknownInstrument};
    let mut differ = Comparison { id, differences };
    let chain_holders = sum(of.chain.values());
    let ledger_holders = sum(of.ledger.values());
    let in_flight = sum(of.in_flight.values());
    differ.compare(TrialBalance, "", of.trial_balance, Decimal::ZERO, None);
    differ.compare(Holds, "", of.active_holds, of.held, None);
    let names: BTreeSet<&String> = of.chain.keys().chain(of.ledger.keys()).collect();
    if let Some(supply) = of.chain_supply {
        differ.compare(Supply, "", supply, of.ledger_supply, Some(in_flight));
        differ.compare(ChainHolders, "", supply, chain_holders, None);
        // Redeemed units stay counted, and an issue is counted before it is minted.
        let issued = of.issued.filter(|issued| *issued < supply);
        differ.compare(Issued, "", supply, issued.unwrap_or(supply), None);
        for name in &names {
            let (chain, ledger) = (side(&of.chain, name), side(&of.ledger, name));
            let in_flight = of.in_flight.get(*name).copied();
            differ.compare(DifferenceName::Holder, name, chain, ledger, in_flight);
        }
        for (name, registered) in &of.registry {
            let chain = side(&of.chain, name);
            differ.compare(DifferenceName::Registry, name, chain, *registered, None);
        }
    } else {
        differ.compare(UnknownInstrument, "", Decimal::ZERO, ledger_holders, None);
    }
    let holders = names.into_iter().map(|name| Holder {
        holder: name.clone(),
        chain: side(&of.chain, name).to_string(),
        ledger: side(&of.ledger, name).to_string(),
    });
    InstrumentProof {
        instrument_id: id.to_owned(),
        chain_supply: of.chain_supply.unwrap_or_default().to_string(),
        ledger_supply: of.ledger_supply.to_string(),
        chain_holders: chain_holders.to_string(),
        ledger_holders: ledger_holders.to_string(),
        trial_balance: of.trial_balance.to_string(),
        active_holds: of.active_holds.to_string(),
        unsettled: of.unsettled.to_string(),
        in_flight: in_flight.to_string(),
        holders: holders.collect(),
    }
}

/// Collects the differences of one instrument.
struct Comparison<'a> {
    id: &'a str,
    differences: &'a mut Vec<Difference>,
}

impl Comparison<'_> {
    /// Records a difference of `left` and `right`. The amount `in_flight` has left the chain (left)
    /// but not the ledger (right). It explains a difference up to that amount.
    fn compare(
        &mut self,
        name: DifferenceName,
        holder: &str,
        left: Decimal,
        right: Decimal,
        in_flight: Option<Decimal>,
    ) {
        let rest = minus(left, right);
        if rest.is_zero() {
            return;
        }
        let is_explained =
            in_flight.is_some_and(|up_to| rest.is_negative() && rest.negated() <= up_to);
        self.differences.push(Difference {
            name,
            instrument_id: self.id.to_owned(),
            holder: holder.to_owned(),
            left: left.to_string(),
            right: right.to_string(),
            difference: rest.to_string(),
            explanation: is_explained.then(|| REDEMPTION_IN_PROGRESS.to_owned()),
        });
    }
}

fn side(side: &BTreeMap<String, Decimal>, name: &str) -> Decimal {
    side.get(name).copied().unwrap_or(Decimal::ZERO)
}

pub(super) fn sum<'a>(amounts: impl IntoIterator<Item = &'a Decimal>) -> Decimal {
    amounts
        .into_iter()
        .fold(Decimal::ZERO, |total, amount| plus(total, *amount))
}

pub(super) fn plus(a: Decimal, b: Decimal) -> Decimal {
    a.checked_add(b)
        .expect("64-bit balances sum within 38 digits")
}

fn minus(a: Decimal, b: Decimal) -> Decimal {
    a.checked_sub(b)
        .expect("64-bit balances differ within 38 digits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BankProof;

    fn d(text: &str) -> Decimal {
        text.parse().unwrap()
    }

    fn balanced() -> InstrumentReading {
        let sides =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(n, a)| ((*n).to_owned(), d(a))).collect();
        InstrumentReading {
            chain_supply: Some(d("100.00")),
            issued: Some(d("120")),
            ledger_supply: d("100"),
            chain: sides(&[("alice", "99.9"), ("system:fees", "0.10"), ("gone", "0")]),
            ledger: sides(&[("alice", "99.90"), ("system:fees", "0.1")]),
            registry: sides(&[("alice", "99.90"), ("system:fees", "0.10")]),
            in_flight: BTreeMap::new(),
            trial_balance: d("0"),
            active_holds: d("10"),
            held: d("10.00"),
            unsettled: d("0"),
            unsettled_later: d("0"),
        }
    }

    fn judged(instrument: InstrumentReading) -> Vec<Difference> {
        let reading = Reading {
            instruments: [("CFA-RUB".to_owned(), instrument)].into(),
            bank: None,
        };
        judge(&reading).1
    }

    #[test]
    fn only_moving_balances_of_an_instrument_that_is_settling_wait_for_it() {
        let settles = |change: fn(&mut InstrumentReading), unsettled: &str, later: &str| {
            let (mut of, mut other) = (balanced(), balanced());
            change(&mut of);
            (of.unsettled, of.unsettled_later) = (d(unsettled), d(later));
            // Units of another instrument are no reason.
            other.unsettled = d("1");
            let reading = Reading {
                instruments: [("ISSUE".to_owned(), of), ("OTHER".to_owned(), other)].into(),
                bank: None,
            };
            is_settling(&reading, &judge(&reading).1)
        };
        let holder = |of: &mut InstrumentReading| {
            of.ledger.insert("bob".into(), d("0.05"));
        };
        assert!(settles(holder, "1", "0"));
        assert!(settles(holder, "0", "1"));
        assert!(!settles(holder, "0", "0"));
        assert!(!settles(|of| of.trial_balance = d("0.01"), "1", "1"));
        let both = |of: &mut InstrumentReading| {
            of.ledger.insert("bob".into(), d("0.05"));
            of.issued = Some(d("99"));
        };
        assert!(!settles(both, "1", "1"));
        assert!(!settles(|_| {}, "1", "1"));
    }

    #[test]
    fn equal_figures_with_different_digits_are_no_difference() {
        assert_eq!(judged(balanced()), Vec::new());
    }

    // rows: R188
    #[test]
    fn r188_every_difference_is_named() {
        let mut bad = balanced();
        bad.trial_balance = d("0.01");
        bad.held = d("9");
        bad.issued = Some(d("99"));
        bad.chain.insert("alice".into(), d("99.8"));
        bad.ledger.insert("bob".into(), d("0.05"));
        bad.registry.insert("alice".into(), d("99.8"));
        bad.registry.insert("system:fees".into(), d("0.3"));
        let names: Vec<_> = judged(bad)
            .into_iter()
            .map(|x| (x.name, x.holder, x.difference))
            .collect();
        assert_eq!(
            names,
            vec![
                (
                    DifferenceName::TrialBalance,
                    String::new(),
                    "0.01".to_owned()
                ),
                (DifferenceName::Holds, String::new(), "1".to_owned()),
                (
                    DifferenceName::ChainHolders,
                    String::new(),
                    "0.10".to_owned()
                ),
                (DifferenceName::Issued, String::new(), "1.00".to_owned()),
                (
                    DifferenceName::Holder,
                    "alice".to_owned(),
                    "-0.10".to_owned()
                ),
                (DifferenceName::Holder, "bob".to_owned(), "-0.05".to_owned()),
                (
                    DifferenceName::Registry,
                    "system:fees".to_owned(),
                    "-0.20".to_owned()
                ),
            ]
        );
    }

    #[test]
    fn a_redemption_in_progress_is_explained_up_to_its_amount() {
        let mut burned = balanced();
        burned.chain_supply = Some(d("90"));
        burned.chain.insert("alice".into(), d("89.9"));
        burned.registry.insert("alice".into(), d("89.9"));
        burned.in_flight.insert("alice".into(), d("10"));
        let found = judged(burned.clone());
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|x| x.explanation.is_some()));
        burned.in_flight.insert("alice".into(), d("9.99"));
        assert!(judged(burned).iter().all(|x| x.explanation.is_none()));
    }

    #[test]
    fn the_bank_and_an_unknown_instrument_count() {
        let mut unknown = balanced();
        unknown.chain_supply = None;
        assert_eq!(judged(unknown)[0].name, DifferenceName::UnknownInstrument);
        let reading = Reading {
            instruments: BTreeMap::new(),
            bank: Some(BankProof {
                bank_balance: "1".into(),
                token_supply: "2".into(),
                in_flight_deposits: "0".into(),
                in_flight_payouts: "0".into(),
                suspense: "0".into(),
                unexplained_difference: "-1.00".into(),
                notes: "Discrepancy detected".into(),
            }),
        };
        assert_eq!(judge(&reading).1[0].name, DifferenceName::Bank);
    }
}
