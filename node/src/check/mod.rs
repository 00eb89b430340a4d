//! The full check of `platform proof --full`: every row of every store, read from the files of this
//! data folder. Read-only, with or without a running platform.
//!
//! | part | finds |
//! |---|---|
//! | rows | a row that was changed, added or deleted past its service ([`events::seal`]) |
//! | ledger | the first bad block, posting, balance, hold or audit record (`ledger::verify`) |
//! | audit records | the first bad record in the chain of each other service |
//! | operations | a ledger operation that differs from cfa's, a trade that only one of them has |
//! | history | a row of `market.db` that differs from the journal ([`gateway::verify_history`]) |
//! | registry | contradictions in the holder registry, times other than those of the chain |
//! | positions of consumers | a position of a consumer group that skips events, or is of no event |
//! | anchors | a block or audit record that differs from what was signed and sent to the chain |
//!
//! The registry and the ledger are compared with the chain by the proof, over public calls. The
//! times of the registry are compared with the blocks of the embedded chain. A remote chain is not
//! in the files: an altered time is then found only if it contradicts another row.

mod operations;

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Context;
use events::SealedStore;
use events::audit::Verified;
use ledger::Heads;
use rpc::Context as CallContext;
use serde::Serialize;
use service_clients::CfaClient;
use service_clients::cfa::Anchor;

use crate::config::Config;
use crate::manifest;

/// Findings per part.
const FINDINGS_MAX: usize = 100;
/// Blocks of the embedded chain that are read at once.
const BLOCKS: usize = 1_000;
/// Tables whose rows no part compares: file, or `every store`, tables, and why.
const NOT_CHECKED: [(&str, &str, &str); 12] = [
    (
        "every store",
        "outbox",
        "a queue: its rows leave within moments",
    ),
    (
        "every store",
        "inbox",
        "ids of applied events: a repeated event changes nothing",
    ),
    (
        "every store",
        "_sqlx_migrations",
        "checksums, checked at each start",
    ),
    (
        "bank/bank.db",
        "all tables",
        "the sandbox bank: reconciliation compares its balance",
    ),
    (
        "chain/chain.sqlite",
        "all tables",
        "the embedded chain: ledger and registry are compared with it",
    ),
    (
        "chain/connector.sqlite",
        "attempt",
        "a changed signed transaction is invalid",
    ),
    (
        "chain/connector.sqlite",
        "cursor, unconfirmed",
        "hashes of read blocks, compared with the chain",
    ),
    (
        "events/log.db",
        "all tables",
        "copies of changes whose rows are checked",
    ),
    (
        "events/offsets.db",
        "offsets",
        "a position that was moved to another event of its topic",
    ),
    (
        "ledger/ledger.sqlite",
        "operations_listed",
        "how far the list of a user reaches",
    ),
    (
        "market/market.db",
        "requests, client_order_ids",
        "texts of calls: the journal has numbers instead",
    ),
    (
        "market/market.db",
        "positions, listed, feed",
        "what other services last published, which is repeated",
    ),
];

/// Result of the full check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Without a finding.
    pub ok: bool,
    pub parts: Vec<PartCheck>,
    /// Rows of all parts.
    pub rows: u64,
    pub elapsed_ms: u64,
    pub rows_per_s: u64,
    /// Tables of the stores that no part checks, and why.
    pub not_checked: Vec<String>,
}

/// One part of the check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PartCheck {
    /// `rows of <store>`, `ledger`, `audit records`, `operations`, `history`, `registry`,
    /// `positions of consumers` or `anchors`.
    pub name: String,
    pub rows: u64,
    pub findings: Vec<String>,
    /// Rows of the part's store that are not checked, and why.
    pub not_checked: Vec<String>,
}

/// Compares the anchors on the chain with the ledger and with the audit records of the other
/// services. Needs a running platform, which reads the chain.
///
/// # Errors
/// The platform does not answer; a store or the public key cannot be read.
pub async fn anchors(cfa: &CfaClient, config: &Config) -> anyhow::Result<PartCheck> {
    let listed = cfa.anchors(&CallContext::new("proof")).await;
    let listed = listed.context("anchors")?;
    let public_key = cfa::anchor::public_key(&config.cfa.data_dir)?;
    let mut heads = Heads::open(&config.ledger).await.context("ledger")?;
    let mut part = PartCheck {
        name: "anchors".to_owned(),
        rows: listed.len() as u64,
        ..PartCheck::default()
    };
    // The newest may not be in a final block yet.
    let is_final =
        |anchor: &&Anchor| anchor.number < listed.len() as u64 || !anchor.on_chain.is_empty();
    for anchor in listed.iter().filter(is_final) {
        if let Some(fault) = anchor_fault(anchor, &public_key, &mut heads, config).await? {
            part.findings
                .push(format!("anchor {}: {fault}", anchor.number));
        }
    }
    heads.close().await.context("ledger")?;
    Ok(part)
}

async fn anchor_fault(
    anchor: &Anchor,
    public_key: &[u8],
    heads: &mut Heads,
    config: &Config,
) -> anyhow::Result<Option<String>> {
    if anchor.on_chain.is_empty() {
        let text = format!("transaction {} is not final on the chain", anchor.tx_hash);
        return Ok(Some(text));
    }
    if anchor.on_chain != anchor.data {
        let text = format!(
            "transaction {} has other bytes on the chain",
            anchor.tx_hash
        );
        return Ok(Some(text));
    }
    let data = hex::decode(&anchor.on_chain).unwrap_or_default();
    let Some(signed) = cfa::anchor::Anchor::read(&data, public_key) else {
        return Ok(Some("not signed by the key of this data folder".to_owned()));
    };
    let block = heads.block_hash(signed.block).await.context("ledger")?;
    if block != Some(hex::encode(signed.hash)) {
        let text = format!(
            "block {} of the ledger has another hash, or is missing",
            signed.block
        );
        return Ok(Some(text));
    }
    if signed.record > 0 {
        let record = heads.record_hash(signed.record).await.context("ledger")?;
        if record != Some(hex::encode(signed.record_hash)) {
            return Ok(Some(record_fault("the ledger", signed.record)));
        }
    }
    for last in signed.services.iter().filter(|last| last.record > 0) {
        let record = record_hash(config, &last.service, last.record).await?;
        if record != Some(hex::encode(last.hash)) {
            return Ok(Some(record_fault(&last.service, last.record)));
        }
    }
    Ok(None)
}

fn record_fault(service: &str, record: u64) -> String {
    format!("audit record {record} of {service} has another hash, or is missing")
}

/// Hash of an audit record of a service other than the ledger, hex. `None`: there is no such record
/// or no such service.
async fn record_hash(
    config: &Config,
    service: &str,
    record: u64,
) -> anyhow::Result<Option<String>> {
    let sequence = i64::try_from(record).unwrap_or(i64::MAX);
    let hash = match config.approvals.url.postgres() {
        Some(url) if service == "approvals" => {
            events::postgres::audit::record_hash(url, service, sequence).await
        }
        _ => {
            let stores = sealed_stores(config);
            let Some(store) = stores.iter().find(|store| store.name == service) else {
                return Ok(None);
            };
            events::audit::record_hash(&store.path, sequence).await
        }
    };
    hash.with_context(|| format!("audit records of {service}"))
}

impl Checked {
    /// Adds a part that was checked elsewhere.
    pub fn add(&mut self, part: PartCheck) {
        self.ok &= part.findings.is_empty();
        self.rows += part.rows;
        self.parts.push(part);
    }

    /// # Errors
    /// There are findings.
    pub fn result(&self) -> anyhow::Result<()> {
        let findings: usize = self.parts.iter().map(|part| part.findings.len()).sum();
        anyhow::ensure!(
            findings == 0,
            "{findings} rows of the stores differ from what was written"
        );
        Ok(())
    }
}

/// Stores with sealed rows of a configuration. The bank and the development chain stand in for
/// outside systems, the event log has copies of events, and the market's history is compared with
/// the journal.
pub fn sealed_stores(config: &Config) -> Vec<SealedStore> {
    let mut stores = vec![
        cfa::sealed_store(&config.cfa),
        payments::sealed_store(&config.payments),
        sandbox::identity::sealed_store(&config.identity),
        settlement::sealed_store(&config.settlement),
        gateway::sealed_store(&config.market),
        chain::sealed_store(&config.chain),
    ];
    stores.extend(ledger::sealed_store(&config.ledger));
    if config.approvals.url.is_empty() {
        stores.push(approvals::sealed_store(&config.approvals));
    }
    stores
}

/// Checks every row of the stores of this configuration.
///
/// # Errors
/// The data folder is none of the platform. A store cannot be read.
pub async fn full(config: &Config) -> anyhow::Result<Checked> {
    manifest::require(&config.data_dir)?;
    let began = Instant::now();
    let mut parts = Vec::new();
    for store in sealed_stores(config) {
        parts.push(sealed_rows(&store).await?);
    }
    parts.push(ledger_rows(config).await?);
    parts.push(audit_chains(config).await?);
    parts.push(operations::check(config).await?);
    parts.push(history(config).await?);
    parts.push(registry(config).await?);
    parts.push(positions(config).await?);
    let elapsed = began.elapsed();
    let rows = parts.iter().map(|part| part.rows).sum::<u64>();
    let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    Ok(Checked {
        ok: parts.iter().all(|part| part.findings.is_empty()),
        parts,
        rows,
        elapsed_ms,
        rows_per_s: rows.saturating_mul(1_000) / elapsed_ms.max(1),
        not_checked: not_checked(config),
    })
}

/// [`NOT_CHECKED`], and the stores on PostgreSQL, whose rows have no seals.
fn not_checked(config: &Config) -> Vec<String> {
    let tables = NOT_CHECKED.iter();
    let mut listed: Vec<String> = tables
        .map(|(file, tables, reason)| format!("{file}, {tables}: {reason}"))
        .collect();
    let on_postgres = [
        ("ledger", ledger::sealed_store(&config.ledger).is_none()),
        ("approvals", !config.approvals.url.is_empty()),
    ];
    for (store, _) in on_postgres.iter().filter(|(_, is_there)| *is_there) {
        listed.push(format!(
            "{store} on PostgreSQL: its rows have no seals, only its chains of records are checked"
        ));
    }
    listed
}

async fn sealed_rows(store: &SealedStore) -> anyhow::Result<PartCheck> {
    let checked = events::seal::check(store).await;
    let checked = checked.with_context(|| format!("rows of {}", store.path.display()))?;
    let altered = checked.altered.iter().take(FINDINGS_MAX);
    Ok(PartCheck {
        name: format!("rows of {}", store.name),
        rows: checked.rows,
        findings: altered.map(ToString::to_string).collect(),
        ..PartCheck::default()
    })
}

async fn ledger_rows(config: &Config) -> anyhow::Result<PartCheck> {
    let verified = ledger::verify(&config.ledger).await.context("ledger")?;
    let rows = [
        verified.blocks,
        verified.operations,
        verified.postings,
        verified.sub_accounts,
        verified.holds,
        verified.audit_records,
    ];
    Ok(PartCheck {
        name: "ledger".to_owned(),
        rows: rows.iter().sum(),
        findings: verified.fault.iter().map(ToString::to_string).collect(),
        ..PartCheck::default()
    })
}

/// A service's name, and its checked audit records.
pub type Records = (&'static str, Verified);

/// Checks the chains of audit records of the services other than the ledger (D34).
///
/// # Errors
/// A store cannot be read.
pub async fn audit_records(config: &Config) -> anyhow::Result<Vec<Records>> {
    let of = |service: &'static str| move || format!("audit records of {service}");
    let payments = payments::verify_audit(&config.payments).await;
    let identity = sandbox::identity::verify_audit(&config.identity).await;
    let approvals = approvals::verify_audit(&config.approvals).await;
    let cfa = cfa::verify_audit(&config.cfa).await;
    let settlement = settlement::verify_audit(&config.settlement).await;
    let market = gateway::verify_audit(&config.market).await;
    Ok(vec![
        ("payments", payments.with_context(of("payments"))?),
        ("identity", identity.with_context(of("identity"))?),
        ("approvals", approvals.with_context(of("approvals"))?),
        ("cfa", cfa.with_context(of("cfa"))?),
        ("settlement", settlement.with_context(of("settlement"))?),
        ("market", market.with_context(of("market"))?),
    ])
}

/// The first record that does not continue its chain.
pub fn broken(records: &[Records]) -> Option<String> {
    records.iter().find_map(|(service, verified)| {
        let broken = verified.broken.as_ref()?;
        Some(format!(
            "{service}, audit record {}: {}, expected {}, found {}",
            broken.sequence, broken.differs, broken.expected, broken.found
        ))
    })
}

/// The audit records of the services other than the ledger, whose part has its own.
async fn audit_chains(config: &Config) -> anyhow::Result<PartCheck> {
    let records = audit_records(config).await?;
    Ok(PartCheck {
        name: "audit records".to_owned(),
        rows: records.iter().map(|(_, verified)| verified.records).sum(),
        findings: records
            .iter()
            .filter_map(|one| broken(std::slice::from_ref(one)))
            .collect(),
        ..PartCheck::default()
    })
}

/// Replays the journal and compares the market's history with it.
async fn history(config: &Config) -> anyhow::Result<PartCheck> {
    let compared = gateway::verify_history(&config.market, &config.journal_dir()).await;
    let compared = compared.context("market.db")?;
    Ok(PartCheck {
        name: "history".to_owned(),
        rows: compared.rows,
        findings: compared.findings,
        not_checked: compared.not_compared,
    })
}

async fn registry(config: &Config) -> anyhow::Result<PartCheck> {
    let mut records = operations::operation_records(config).await?;
    let (rows, found) = records.check_registry().await.context("holder registry")?;
    let times = records.block_times().await.context("holder registry")?;
    records.close().await.context("cfa")?;
    let mut findings: Vec<String> = found
        .into_iter()
        .map(|(table, token, place)| format!("{table} of token {token}: {place} contradicts"))
        .collect();
    // A remote chain is not in a file.
    if config.chain.rpc_url.is_none() {
        findings.extend(other_times(config, &times).await?);
    }
    findings.truncate(FINDINGS_MAX);
    Ok(PartCheck {
        name: "registry".to_owned(),
        rows,
        findings,
        ..PartCheck::default()
    })
}

/// Compares the positions of consumers with the event log.
async fn positions(config: &Config) -> anyhow::Result<PartCheck> {
    let mut part = PartCheck {
        name: "positions of consumers".to_owned(),
        ..PartCheck::default()
    };
    if config.events.kafka_brokers.is_some() {
        part.not_checked
            .push("positions in Kafka: they are in no file".to_owned());
        return Ok(part);
    }
    let checked = events::embedded::check_positions(&config.data_dir.join("events")).await;
    let checked = checked.context("event log")?;
    part.rows = checked.positions;
    part.findings = checked.findings;
    part.findings.truncate(FINDINGS_MAX);
    Ok(part)
}

/// Blocks of the registry that the embedded chain does not have, or has with another time. No other
/// row confirms the time of a transfer of a holder to itself.
async fn other_times(config: &Config, times: &[(u64, i64)]) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for page in times.chunks(BLOCKS) {
        let numbers: Vec<u64> = page.iter().map(|(number, _)| *number).collect();
        let on_chain = chain::block_times(&config.chain.data_dir, &numbers).await;
        let on_chain = on_chain.context("embedded chain")?;
        for (number, time_us) in page {
            let fault = match on_chain.get(number) {
                None => "is not on the chain",
                Some(time_s) if i128::from(*time_s) * 1_000_000 != i128::from(*time_us) => {
                    "has another time on the chain"
                }
                Some(_) => continue,
            };
            found.push(format!("holder registry: block {number} {fault}"));
        }
    }
    Ok(found)
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.parts {
            let state = match part.findings.len() {
                0 => "ok".to_owned(),
                found => format!("{found} findings"),
            };
            writeln!(f, "{}: {} rows, {state}", part.name, part.rows)?;
            for finding in &part.findings {
                writeln!(f, "  {finding}")?;
            }
            for rows in &part.not_checked {
                writeln!(f, "  not checked: {rows}")?;
            }
        }
        for tables in &self.not_checked {
            writeln!(f, "not checked: {tables}")?;
        }
        let (rows, per_s) = (self.rows, self.rows_per_s);
        let seconds = Duration::from_millis(self.elapsed_ms).as_secs_f32();
        writeln!(f, "checked: {rows} rows in {seconds:.1} s, {per_s} rows/s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R188
    #[test]
    fn r188_tables_that_no_part_checks_are_listed() {
        let folder = tempfile::tempdir().expect("folder");
        let mut config = Config::load(None, Some(folder.path())).expect("settings");
        let listed = not_checked(&config);
        assert_eq!(listed.len(), NOT_CHECKED.len(), "{listed:?}");
        let lists = |name: &str| listed.iter().any(|line| line.contains(name));
        let connector = chain::sealed_store(&config.chain).sealing.exempt;
        assert!(!connector.is_empty());
        for (table, _) in connector {
            assert!(lists(table), "{table} has no seals: {listed:?}");
        }
        let checked = Checked {
            not_checked: listed,
            ..Checked::default()
        };
        let text = checked.to_string();
        assert!(
            text.contains("not checked: events/log.db, all tables: "),
            "{text}"
        );
        let json = serde_json::to_value(&checked).expect("JSON");
        let in_json = json["not_checked"].as_array().expect("a list");
        assert_eq!(in_json.len(), NOT_CHECKED.len());

        config.approvals.url = events::StoreUrl::new("postgres://localhost/approvals");
        let listed = not_checked(&config);
        let last = listed.last().expect("a line");
        assert!(last.starts_with("approvals on PostgreSQL: "), "{last}");
    }

    // rows: R188
    #[tokio::test]
    async fn r188_a_consumers_position_after_the_last_event_is_a_finding() {
        let folder = tempfile::tempdir().expect("folder");
        let config = Config::load(None, Some(folder.path())).expect("settings");
        let log = events::Embedded::open(folder.path().join("events")).await;
        let log = log.expect("a log");
        let position = events::Position {
            topic: events::topics::IDENTITY.to_owned(),
            partition: 0,
            offset: 7,
        };
        events::Log::commit(&log, "payments.users", &position)
            .await
            .expect("committed");
        log.close().await;
        let part = positions(&config).await.expect("read");
        assert_eq!((part.rows, part.findings.len()), (1, 1), "{part:?}");
        assert!(part.findings[0].contains("payments.users"), "{part:?}");
    }

    // rows: R350 R215
    #[tokio::test]
    async fn r350_a_changed_audit_record_of_a_service_is_named() {
        let folder = tempfile::tempdir().expect("folder");
        let config = Config::load(None, Some(folder.path())).expect("settings");
        let missing = audit_records(&config).await.expect_err("no stores");
        assert!(
            format!("{missing:#}").contains("audit records of payments: "),
            "{missing:#}"
        );
        let verified = |sequence: Option<i64>| Verified {
            records: 2,
            head: String::new(),
            broken: sequence.map(|sequence| service_kit::audit::Broken {
                sequence,
                differs: "previous hash",
                expected: "aa".to_owned(),
                found: "bb".to_owned(),
            }),
        };
        let sound = ("payments", verified(None));
        assert_eq!(broken(std::slice::from_ref(&sound)), None);
        let found = broken(&[sound, ("identity", verified(Some(3)))]);
        let expected = "identity, audit record 3: previous hash, expected aa, found bb";
        assert_eq!(found.as_deref(), Some(expected));
    }
}
