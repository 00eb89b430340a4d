//! Compares the ledger's operations with the CFA service's operations and trades, both ways.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use anyhow::Context;
use cfa::{OperationRecord, OperationRecords};
use ledger::{ReferencedOperation, ReferencedOperations};
use types::{CFA_RUB, Id128, NodeId, OperationType, derived};

use super::{FINDINGS_MAX, PartCheck};
use crate::config::Config;

/// Attempts at an operation that differs, and the pause between them: the two stores are read one
/// after the other.
const ATTEMPTS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(300);
/// Longest delivery of the event by which a redemption of CFA-RUB becomes final in the ledger, in
/// microseconds.
const EVENT_US: i64 = 600_000_000;
/// Why an operation was set back.
const FINAL_AT_CFA: &str = "final at the CFA service";

/// Compares all operations.
///
/// # Errors
/// A store cannot be read.
pub async fn check(config: &Config) -> anyhow::Result<PartCheck> {
    let mut earlier = Earlier::read(config).await?;
    let opened = ReferencedOperations::open(&config.ledger).await;
    let mut ledger = opened.context("ledger")?;
    let mut records = operation_records(config).await?;
    let mut part = PartCheck {
        name: "operations".to_owned(),
        ..PartCheck::default()
    };
    loop {
        let page = ledger.next_page().await.context("ledger")?;
        if page.is_empty() {
            break;
        }
        part.rows += page.len() as u64;
        let (finals, open): (Vec<_>, Vec<_>) = page.into_iter().partition(|one| one.is_final);
        part.findings.extend(earlier.set_back(&open).await?);
        let differing = differing(config, &mut records, finals).await?;
        part.findings.extend(differing);
        if part.findings.len() >= FINDINGS_MAX {
            break;
        }
    }
    part.findings.extend(earlier.set_back_steps().await?);
    let unknown = unknown_trades(config, &mut records, &mut ledger).await?;
    part.findings.extend(unknown);
    ledger.close().await.context("ledger")?;
    let of_trades = records.check_trades().await.context("cfa")?;
    let of_trades = of_trades.into_iter().map(|(name, id)| match &*name {
        "batch" => format!("batch {id}: more trades are final than it has settled"),
        _ => format!("trade {id}: final in no batch"),
    });
    part.findings.extend(of_trades);
    records.close().await.context("cfa")?;
    Ok(part)
}

/// Opens the records of the CFA service.
///
/// # Errors
/// The file cannot be opened.
pub async fn operation_records(config: &Config) -> anyhow::Result<OperationRecords> {
    let path = cfa::sealed_store(&config.cfa).path;
    let opened = OperationRecords::open(&path).await;
    opened.with_context(|| path.display().to_string())
}

/// What was final at the CFA service and at settlement before the snapshot of the ledger was taken.
/// So it is final in the snapshot.
struct Earlier {
    records: OperationRecords,
    /// Time of the last change at the CFA service.
    last_change_us: i64,
    /// Batches that settlement has not made final in the ledger yet.
    open_batches: HashSet<String>,
    /// Steps in the ledger that are in progress, without a transaction.
    open_steps: Vec<String>,
}

impl Earlier {
    async fn read(config: &Config) -> anyhow::Result<Self> {
        let mut records = operation_records(config).await?;
        let last_change_us = records.hold_snapshot().await.context("cfa")?;
        let file = settlement::sealed_store(&config.settlement).path;
        let open_batches = settlement::open_batch_ids(&file).await;
        Ok(Self {
            records,
            last_change_us,
            open_batches: open_batches.with_context(|| file.display().to_string())?,
            open_steps: Vec::new(),
        })
    }

    /// Operations of these, which are not final, that the CFA service has as final, and steps with
    /// the transaction that they get when they become final.
    async fn set_back(&mut self, page: &[ReferencedOperation]) -> anyhow::Result<Vec<String>> {
        if page.is_empty() {
            return Ok(Vec::new());
        }
        let open_steps = page
            .iter()
            .filter(|one| is_step(one) && one.tx_hash.is_empty() && !one.is_failed);
        let open_steps = open_steps.map(|one| one.operation_id.clone());
        self.open_steps.extend(open_steps);
        let references: Vec<&str> = page.iter().map(|one| one.reference.as_str()).collect();
        let found = self.records.find(&references).await.context("cfa")?;
        let fault = |one: &ReferencedOperation| match found.get(&one.reference) {
            Some(record) => {
                let is_final = record.is_final && is_of(one, record) && !self.is_in_flight(record);
                is_final.then_some(FINAL_AT_CFA)
            }
            None => (is_step(one) && !one.tx_hash.is_empty()).then_some("has a final transaction"),
        };
        let faults = page
            .iter()
            .filter_map(|one| Some((&one.operation_id, fault(one)?)));
        Ok(faults.map(|(id, why)| set_back(id, why)).collect())
    }

    /// Steps in progress whose end the distribution or placement has stored. It stores it after the
    /// step is final in the ledger. Closes the records.
    async fn set_back_steps(mut self) -> anyhow::Result<Vec<String>> {
        let found = self.records.final_steps(&self.open_steps).await;
        let found = found.context("cfa")?;
        self.records.close().await.context("cfa")?;
        let faults = found.iter().map(|id| set_back(id, FINAL_AT_CFA));
        Ok(faults.collect())
    }

    /// Whether the ledger may get a final operation's finality later than the CFA service has it.
    /// Other operations become final in the ledger first.
    fn is_in_flight(&self, record: &OperationRecord) -> bool {
        if record.is_trade {
            return self.open_batches.contains(&record.batch_id);
        }
        let is_by_event =
            record.kind == OperationType::Redemption && record.instrument_id == CFA_RUB;
        is_by_event && record.finalized_at_us.saturating_add(EVENT_US) > self.last_change_us
    }
}

fn set_back(operation_id: &str, why: &str) -> String {
    format!("operation {operation_id}: {why}, not final in the ledger")
}

/// Trades of the CFA service that are not final and not in the ledger, although settlement has
/// posted the trades of their commands. It does not post a trade that an operator withdraws before,
/// which is bust. A trade of a later command is in flight.
async fn unknown_trades(
    config: &Config,
    records: &mut OperationRecords,
    ledger: &mut ReferencedOperations,
) -> anyhow::Result<Vec<String>> {
    let node = NodeId::new(config.settlement.node).context("node number")?;
    let source = derived::settlement_source(node);
    let file = settlement::sealed_store(&config.settlement).path;
    let through = ledger.applied_through(&source).await.context("ledger")?;
    let mut findings = Vec::new();
    let mut after = String::new();
    while findings.len() < FINDINGS_MAX {
        let page = records.open_trades(&after).await.context("cfa")?;
        let Some((last, _)) = page.last() else {
            break;
        };
        after.clone_from(last);
        let trades: Vec<&str> = page.iter().map(|(_, trade)| trade.as_str()).collect();
        let known = ledger.known(OperationType::TradeSell, &trades).await;
        let known = known.context("ledger")?;
        let unknown: Vec<&str> = trades
            .into_iter()
            .filter(|trade| !known.contains(*trade) && !is_after(trade, node, through))
            .collect();
        if unknown.is_empty() {
            continue;
        }
        let withdrawn = settlement::bust_or_open(&file, &unknown).await;
        let withdrawn = withdrawn.with_context(|| file.display().to_string())?;
        let unknown = unknown.iter().filter(|trade| !withdrawn.contains(**trade));
        findings.extend(unknown.map(|trade| format!("trade {trade}: never executed")));
    }
    Ok(findings)
}

/// True for the id of a trade whose command is after this sequence.
fn is_after(trade: &str, node: NodeId, sequence: u64) -> bool {
    let from = Id128::parse(trade).and_then(|id| derived::derived_from(id, node));
    let Some(from) = from.filter(|from| from.index.is_some()) else {
        return false;
    };
    // An id has the low 32 bits of its sequence. The distance is below half of their range.
    let passed = sequence.wrapping_sub(from.sequence_low.into()) & u64::from(u32::MAX);
    passed > u64::from(u32::MAX / 2)
}

/// The differences of a page of final operations that remain over all attempts.
async fn differing(
    config: &Config,
    records: &mut OperationRecords,
    mut page: Vec<ReferencedOperation>,
) -> anyhow::Result<Vec<String>> {
    let mut attempt = 1;
    loop {
        let references: Vec<&str> = page.iter().map(|one| one.reference.as_str()).collect();
        let found = records.find(&references).await.context("cfa")?;
        let unknown = unknown_transactions(config, &page, &found).await?;
        let faults = page.iter().map(|one| {
            let record = found.get(&one.reference);
            fault(one, record, &unknown)
        });
        let faults: Vec<Option<Difference>> = faults.collect();
        if faults.iter().all(Option::is_none) || attempt == ATTEMPTS {
            let texts = page.iter().zip(faults);
            return Ok(texts
                .filter_map(|(one, fault)| {
                    fault.map(|fault| format!("operation {}: {fault}", one.operation_id))
                })
                .collect());
        }
        let mut differs = faults.iter().map(Option::is_some);
        page.retain(|_| differs.next().unwrap_or_default());
        attempt += 1;
        tokio::time::sleep(PAUSE).await;
    }
}

/// Transactions of operations without a record, that the chain connector has not submitted either.
/// An issue's redemption moves money under an operation that the CFA service has not stored.
async fn unknown_transactions(
    config: &Config,
    page: &[ReferencedOperation],
    found: &HashMap<String, OperationRecord>,
) -> anyhow::Result<Vec<String>> {
    let hashes = page
        .iter()
        .filter(|one| !one.tx_hash.is_empty() && !found.contains_key(&one.reference));
    let hashes: Vec<&str> = hashes.map(|one| one.tx_hash.as_str()).collect();
    if hashes.is_empty() {
        return Ok(Vec::new());
    }
    let file = chain::sealed_store(&config.chain).path;
    let known = chain::known_transactions(&file, &hashes).await;
    let known = known.with_context(|| file.display().to_string())?;
    let unknown = hashes.into_iter().filter(|hash| !known.contains(*hash));
    Ok(unknown.map(str::to_owned).collect())
}

/// How an operation differs.
enum Difference {
    /// No submission has its transaction.
    UnknownTransaction(String),
    /// A final step without a transaction.
    NoTransaction,
    /// A trade that the CFA service does not have.
    NoTrade,
    NotFinal,
    /// Of the CFA service, and of the ledger.
    Transaction(String, String),
    /// A trade whose transaction is of no batch.
    NoBatch(String),
    /// A party of a trade, of the CFA service and of the ledger.
    Party(String, String),
    Amount {
        instrument_id: String,
        cfa: i64,
        ledger: i64,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownTransaction(hash) => {
                write!(f, "transaction {hash} was never submitted to the chain")
            }
            Self::NoTransaction => write!(f, "final without a transaction"),
            Self::NoTrade => write!(f, "no trade at the CFA service"),
            Self::NotFinal => write!(f, "final in the ledger, not final at the CFA service"),
            Self::Transaction(cfa, ledger) => {
                write!(
                    f,
                    "transaction: {cfa} at the CFA service, {ledger} in the ledger"
                )
            }
            Self::Party(cfa, ledger) => {
                write!(
                    f,
                    "party of the trade: {cfa} at the CFA service, {ledger} in the ledger"
                )
            }
            Self::NoBatch(hash) => write!(f, "transaction {hash} is of no batch of trades"),
            Self::Amount {
                instrument_id,
                cfa,
                ledger,
            } => write!(
                f,
                "amount of {instrument_id} in smallest units: {cfa} at the CFA service, \
                 {ledger} in the ledger"
            ),
        }
    }
}

/// Whether the CFA service's operation is the cause of the ledger's. A caller may post another one
/// with the same reference, but only services name its transaction.
fn is_of(one: &ReferencedOperation, record: &OperationRecord) -> bool {
    match record.is_trade {
        true => is_of_trade(one),
        false => one.kind == Some(record.kind),
    }
}

fn is_of_trade(one: &ReferencedOperation) -> bool {
    use OperationType::{Fee, TradeBuy, TradeSell};
    matches!(one.kind, Some(TradeBuy | TradeSell | Fee))
}

/// Whether an operation funds a distribution or is a step of a placement. The CFA service stores no
/// operation for these. They get their transaction when they become final.
fn is_step(one: &ReferencedOperation) -> bool {
    let id = one.operation_id.as_str();
    let is_of_placement = id.starts_with("placement:")
        && [":mint", ":pay", ":burn"]
            .iter()
            .any(|step| id.ends_with(step));
    // The next attempts end with their number.
    let is_funding = id.ends_with(":fund") || id.contains(":fund:try-");
    id == one.reference && (is_of_placement || is_funding)
}

/// How a final operation differs.
fn fault(
    one: &ReferencedOperation,
    record: Option<&OperationRecord>,
    unknown: &[String],
) -> Option<Difference> {
    let has_transaction = !one.tx_hash.is_empty();
    let Some(record) = record else {
        if has_transaction && is_of_trade(one) {
            return Some(Difference::NoTrade);
        }
        if !has_transaction && is_step(one) {
            return Some(Difference::NoTransaction);
        }
        let is_unknown = unknown.contains(&one.tx_hash);
        return is_unknown.then(|| Difference::UnknownTransaction(one.tx_hash.clone()));
    };
    if !has_transaction && !is_of(one, record) {
        return None;
    }
    if !record.is_final {
        return Some(Difference::NotFinal);
    }
    if !record.tx_hash.eq_ignore_ascii_case(&one.tx_hash) {
        let named = |hash: &str| match hash {
            "" => "none".to_owned(),
            hash => hash.to_owned(),
        };
        let (cfa, ledger) = (named(&record.tx_hash), named(&one.tx_hash));
        return Some(Difference::Transaction(cfa, ledger));
    }
    if !record.is_of_batch {
        return Some(Difference::NoBatch(record.tx_hash.clone()));
    }
    // The blocks of the ledger prove its parties and amounts.
    let of_trade = record.is_trade.then(|| trade_fault(one, record)).flatten();
    of_trade.or_else(|| amount_fault(one, &record.instrument_id, record.units_minor))
}

/// How the user and the money of a trade's operation differ.
fn trade_fault(one: &ReferencedOperation, record: &OperationRecord) -> Option<Difference> {
    let (user_id, money) = match one.kind? {
        OperationType::TradeBuy => (&record.to_user_id, record.payment_minor),
        OperationType::TradeSell => (&record.from_user_id, record.payment_minor),
        OperationType::Fee => (&record.to_user_id, record.fee_minor),
        _ => return None,
    };
    if one.user_id != *user_id {
        let (cfa, ledger) = (user_id.clone(), one.user_id.clone());
        return Some(Difference::Party(cfa, ledger));
    }
    amount_fault(one, CFA_RUB, money)
}

/// How the amount of an instrument differs. A fee has no posting in units; units that are partly
/// seized have two.
fn amount_fault(one: &ReferencedOperation, instrument_id: &str, cfa: i64) -> Option<Difference> {
    let amounts = one.amounts.iter().filter(|(id, _)| id == instrument_id);
    let ledger = amounts
        .map(|(_, amount)| *amount)
        .reduce(i64::saturating_add)?;
    (ledger != cfa).then(|| Difference::Amount {
        instrument_id: instrument_id.to_owned(),
        cfa,
        ledger,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation() -> ReferencedOperation {
        ReferencedOperation {
            operation_id: "op".to_owned(),
            kind: Some(OperationType::TradeBuy),
            is_final: true,
            is_failed: false,
            user_id: "boris".to_owned(),
            reference: "trade".to_owned(),
            tx_hash: "0xab".to_owned(),
            amounts: vec![("CFA-RUB".to_owned(), 500), ("BOND-1".to_owned(), 3)],
        }
    }

    fn record() -> OperationRecord {
        OperationRecord {
            operation_id: "op".to_owned(),
            kind: OperationType::TradeBuy,
            is_final: true,
            finalized_at_us: 1,
            tx_hash: "0xAB".to_owned(),
            batch_id: "batch".to_owned(),
            instrument_id: "BOND-1".to_owned(),
            units_minor: 3,
            from_user_id: "anna".to_owned(),
            to_user_id: "boris".to_owned(),
            payment_minor: 500,
            fee_minor: 1,
            is_trade: true,
            is_of_batch: true,
        }
    }

    #[test]
    fn each_difference_of_an_operation_is_named() {
        let found = |change: fn(&mut OperationRecord)| {
            let mut record = record();
            change(&mut record);
            fault(&operation(), Some(&record), &[]).map(|fault| fault.to_string())
        };
        assert_eq!(found(|_| {}), None);
        let other_fee = found(|record| record.instrument_id = "BOND-2".to_owned());
        assert_eq!(other_fee, None);
        let cases: [(fn(&mut OperationRecord), &str); 6] = [
            (
                |record| record.is_final = false,
                "not final at the CFA service",
            ),
            (
                |record| record.tx_hash = "0xac".to_owned(),
                "0xac at the CFA service",
            ),
            (|record| record.is_of_batch = false, "is of no batch"),
            (
                |record| record.units_minor = 4,
                "4 at the CFA service, 3 in the ledger",
            ),
            (
                |record| record.payment_minor = 499,
                "CFA-RUB in smallest units: 499",
            ),
            (
                |record| record.to_user_id = "clara".to_owned(),
                "clara at the CFA service, boris in the ledger",
            ),
        ];
        for (change, part) in cases {
            let text = found(change).unwrap_or_default();
            assert!(text.contains(part), "{part}: {text}");
        }
        let no_trade = fault(&operation(), None, &[]).map(|fault| fault.to_string());
        assert_eq!(no_trade.as_deref(), Some("no trade at the CFA service"));
        let funding = ReferencedOperation {
            kind: Some(OperationType::Redemption),
            ..operation()
        };
        let unknown = ["0xab".to_owned()];
        assert!(fault(&funding, None, &unknown).is_some());
        assert!(fault(&funding, None, &[]).is_none());
    }

    // rows: R188
    #[test]
    fn r188_a_missing_transaction_is_a_difference_of_the_same_operation_only() {
        let of = |kind| ReferencedOperation {
            kind: Some(kind),
            tx_hash: String::new(),
            ..operation()
        };
        let fault_of = |one: &ReferencedOperation, record: Option<&OperationRecord>| {
            fault(one, record, &[]).map(|fault| fault.to_string())
        };
        let found = fault_of(&of(OperationType::TradeSell), Some(&record()));
        let expected = "transaction: 0xAB at the CFA service, none in the ledger";
        assert_eq!(found.as_deref(), Some(expected));
        let other = of(OperationType::Payment);
        assert_eq!(fault_of(&other, Some(&record())), None);
        assert_eq!(fault_of(&of(OperationType::Fee), None), None);
    }

    // rows: R188
    #[test]
    fn r188_a_step_without_an_operation_of_cfa_has_a_transaction() {
        let step = |id: &str, reference: &str| ReferencedOperation {
            operation_id: id.to_owned(),
            reference: reference.to_owned(),
            tx_hash: String::new(),
            kind: Some(OperationType::Payment),
            ..operation()
        };
        for id in [
            "r:fund",
            "r:fund:try-2",
            "placement:BOND-1:mint",
            "placement:BOND-1:pay",
        ] {
            let found = fault(&step(id, id), None, &[]).map(|fault| fault.to_string());
            assert_eq!(
                found.as_deref(),
                Some("final without a transaction"),
                "{id}"
            );
            // The reference of another operation.
            assert!(fault(&step("op", id), None, &[]).is_none(), "{id}");
        }
        assert!(fault(&step("op", "op"), None, &[]).is_none());
    }

    // rows: R188
    #[test]
    fn r188_a_trade_is_in_flight_only_after_the_position_of_the_ledger() {
        let node = NodeId::new(1).expect("a node");
        let trade = |sequence: u64| {
            let sequence = types::Sequence(sequence);
            derived::trade_uuid(1_700_000_000_000_000_000, node, sequence, 0).to_string()
        };
        assert!(is_after(&trade(8), node, 7));
        assert!(!is_after(&trade(7), node, 7) && !is_after(&trade(1), node, 7));
        // The low 32 bits have begun anew.
        assert!(is_after(&trade((1 << 32) + 1), node, (1 << 32) - 1));
        assert!(!is_after(&trade((1 << 32) - 1), node, (1 << 32) + 1));
        let order = derived::order_uuid(1, node, types::Sequence(8)).to_string();
        assert!(!is_after(&order, node, 7) && !is_after("x", node, 7));
    }
}
