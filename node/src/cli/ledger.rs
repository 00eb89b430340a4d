//! `platform ledger ...`: tables for accountants and auditors. `balance`, `statement`, `holds` and
//! `trial-balance` call a running platform; `rebuild` compares it with the chain; `verify` reads
//! the ledger's rows and the audit records of all services, with or without a running platform.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Arg, ArgMatches, Command, value_parser};
use ledger::LedgerConfig;
use serde_json::{Value, json};

use super::call::{self, Target};
use super::export;
use super::output::{self, table};
use super::units;
use crate::check;
use crate::config::Config;
use crate::rebuild;

/// `platform subaccount balance` and `platform ledger balance` print the same table.
pub const BALANCE: &str = "dfa.ledger.v1.LedgerService/GetBalance";
const STATEMENT: &str = "dfa.ledger.v1.LedgerService/GetStatement";
const HOLDS: &str = "dfa.ledger.v1.LedgerService/ListHolds";
const TRIAL_BALANCE: &str = "dfa.ledger.v1.LedgerService/GetTrialBalance";

/// Verbs of the noun `ledger` that the table of calls does not contain.
pub fn verbs() -> [Command; 4] {
    [
        call::verb("balance", BALANCE),
        call::verb("holds", HOLDS),
        Command::new("rebuild").about(
            "Replay the chain's log from its first block and compare the balances with the ledger's",
        ),
        Command::new("verify")
            .about("Check every row of the ledger and every audit record of all services; name the first bad record")
            .arg(
                Arg::new("dir")
                    .long("dir")
                    .value_name("DIR")
                    .value_parser(value_parser!(PathBuf))
                    .help("Folder of a ledger in SQLite, checked alone [default: the stores of the settings]"),
            ),
    ]
}

/// Runs `platform ledger <verb>`; `None` for a verb that this module does not print.
pub async fn run(
    target: &Target,
    config: impl FnOnce() -> anyhow::Result<Config>,
    matches: &ArgMatches,
    json: bool,
) -> Option<anyhow::Result<()>> {
    let (verb, matches) = matches.subcommand()?;
    let (path, show): (&str, fn(&Value) -> String) = match verb {
        "balance" => (BALANCE, balance),
        "statement" => (STATEMENT, statement),
        "holds" => (HOLDS, holds),
        "trial-balance" => (TRIAL_BALANCE, trial_balance),
        "rebuild" => return Some(rebuild::run(target, json).await),
        "verify" => return Some(verify(config, matches, json).await),
        _ => return None,
    };
    let title = format!("ledger {verb}");
    if let Some(exported) = export::run(target, &title, path, matches).await {
        return Some(exported);
    }
    Some(
        call::ask(target, path, matches)
            .await
            .and_then(|mut answer| {
                if json {
                    println!("{}", serde_json::to_string_pretty(&answer)?);
                } else {
                    units::add(&mut answer);
                    print!("{}", show(&answer));
                }
                Ok(())
            }),
    )
}

async fn verify(
    config: impl FnOnce() -> anyhow::Result<Config>,
    matches: &ArgMatches,
    json: bool,
) -> anyhow::Result<()> {
    let (config, records) = match matches.get_one::<PathBuf>("dir") {
        Some(dir) => {
            let config = LedgerConfig {
                data_dir: dir.clone(),
                ..LedgerConfig::default()
            };
            (config, Vec::new())
        }
        None => {
            let config = config()?;
            let records = check::audit_records(&config).await?;
            (config.ledger, records)
        }
    };
    let verified = ledger::verify(&config).await.with_context(|| {
        if config.url.is_empty() {
            format!("ledger in {}", config.data_dir.display())
        } else {
            format!("ledger at {}", config.url)
        }
    })?;
    if json {
        let mut shown = serde_json::to_value(&verified)?;
        let of_services = records.iter().map(|(service, verified)| {
            let (records, head) = (verified.records, &verified.head);
            json!({ "service": service, "audit_records": records, "head": head })
        });
        shown["services"] = of_services.collect();
        println!("{}", serde_json::to_string_pretty(&shown)?);
    } else {
        print!("{verified}");
        for (service, verified) in &records {
            println!("audit records of {service}: {}", verified.records);
        }
    }
    if let Some(fault) = verified.fault {
        bail!("the ledger differs from what was written: {fault}");
    }
    match check::broken(&records) {
        Some(what) => bail!("audit records differ from what was written: {what}"),
        None => Ok(()),
    }
}

/// A field as one token.
fn word(value: &Value, name: &str) -> String {
    output::word(&value[name]).unwrap_or_default()
}

fn rows<const N: usize>(list: &Value, names: [&str; N]) -> Vec<[String; N]> {
    list.as_array()
        .into_iter()
        .flatten()
        .map(|row| names.map(|name| word(row, name)))
        .collect()
}

/// Strips the prefix of an enumeration column.
fn bare(mut rows: Vec<[String; 7]>, column: usize, prefix: &str) -> Vec<[String; 7]> {
    for row in &mut rows {
        if let Some(name) = row[column].strip_prefix(prefix) {
            row[column] = name.to_owned();
        }
    }
    rows
}

fn with_next(mut out: String, answer: &Value) -> String {
    if let Some(token) = answer["pagination"]["nextPageToken"]
        .as_str()
        .filter(|token| !token.is_empty())
    {
        out.push_str(&format!("more: --page-token {token}\n"));
    }
    out
}

/// The table of a balance, whose decimals have units.
pub fn balance(answer: &Value) -> String {
    let names = [
        "subaccountId",
        "balance",
        "held",
        "unsettled",
        "available",
        "version",
    ];
    let head = [
        "SUB-ACCOUNT",
        "BALANCE",
        "HELD",
        "UNSETTLED",
        "AVAILABLE",
        "VERSION",
    ];
    table(head, [names.map(|name| word(answer, name))])
}

fn statement(answer: &Value) -> String {
    let names = [
        "version",
        "at",
        "operationType",
        "operationId",
        "counterpartySubaccountId",
        "amount",
        "balance",
    ];
    let head = [
        "VERSION",
        "AT",
        "TYPE",
        "OPERATION",
        "COUNTERPARTY",
        "AMOUNT",
        "BALANCE",
    ];
    let lines = bare(rows(&answer["lines"], names), 2, "OPERATION_TYPE_");
    let mut out = format!(
        "{}, opening balance {}\n",
        word(answer, "subaccountId"),
        word(answer, "openingBalance")
    );
    if !lines.is_empty() {
        out.push_str(&table(head, lines));
    }
    out.push_str(&format!(
        "in {}, out {}, closing balance {}\n",
        word(answer, "sumIn"),
        word(answer, "sumOut"),
        word(answer, "closingBalance")
    ));
    with_next(out, answer)
}

fn holds(answer: &Value) -> String {
    let names = [
        "holdId",
        "subaccountId",
        "status",
        "amount",
        "remainingAmount",
        "consumed",
        "reason",
    ];
    let head = [
        "HOLD",
        "SUB-ACCOUNT",
        "STATUS",
        "AMOUNT",
        "REMAINING",
        "CONSUMED",
        "REASON",
    ];
    let lines = bare(rows(&answer["holds"], names), 2, "HOLD_STATUS_");
    with_next(table(head, lines), answer)
}

fn trial_balance(answer: &Value) -> String {
    let names = [
        "instrumentId",
        "total",
        "circulating",
        "holders",
        "activeHolds",
        "unsettled",
    ];
    let head = [
        "INSTRUMENT",
        "TOTAL",
        "CIRCULATING",
        "HOLDERS",
        "HELD",
        "UNSETTLED",
    ];
    table(head, rows(&answer["lines"], names))
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R350
    #[test]
    fn r350_a_statement_is_a_table_between_its_balances() {
        let mut answer = json!({
            "subaccountId": "u1:CFA-RUB",
            "instrumentId": "CFA-RUB",
            "openingBalance": { "value": "0.00" },
            "closingBalance": { "value": "9.50" },
            "sumIn": { "value": "9.50" },
            "sumOut": { "value": "0.00" },
            "lines": [{
                 "version": "1", "at": "2026-11-21T10:00:00Z",
                 "operationType": "OPERATION_TYPE_DEPOSIT", "operationId": "op-1",
                 "counterpartySubaccountId": "system:reserve:CFA-RUB",
                 "amount": { "value": "9.50" }, "balance": { "value": "9.50" },
            }],
            "pagination": { "nextPageToken": "abc" },
        });
        units::add(&mut answer);
        assert_eq!(
            statement(&answer),
            "u1:CFA-RUB, opening balance 0.00 CFA-RUB\n\
             VERSION  AT                    TYPE     OPERATION  COUNTERPARTY                  AMOUNT       BALANCE\n\
             \x20     1  2026-11-21T10:00:00Z  DEPOSIT  op-1       system:reserve:CFA-RUB  9.50 CFA-RUB  9.50 CFA-RUB\n\
             in 9.50 CFA-RUB, out 0.00 CFA-RUB, closing balance 9.50 CFA-RUB\n\
             more: --page-token abc\n"
        );
    }

    // rows: R350
    #[test]
    fn r350_holds_balances_and_totals_have_units() {
        let mut answer = json!({ "holds": [{
            "holdId": "h", "subaccountId": "s", "status": "HOLD_STATUS_ACTIVE",
            "amount": { "currencyCode": "CFA-RUB", "amount": { "value": "5" } },
            "consumed": { "value": "0" }, "reason": "why",
        }] });
        units::add(&mut answer);
        assert_eq!(
            holds(&answer),
            "HOLD  SUB-ACCOUNT  STATUS     AMOUNT  REMAINING   CONSUMED  REASON\n\
             h     s            ACTIVE  5 CFA-RUB             0 CFA-RUB  why\n"
        );

        let mut answer = json!({
            "subaccountId": "u1:BOND-1", "instrumentId": "BOND-1", "version": "3",
            "balance": { "value": "12" }, "held": { "value": "2" },
            "unsettled": { "value": "0" }, "available": { "value": "10" },
        });
        units::add(&mut answer);
        assert_eq!(
            balance(&answer),
            "SUB-ACCOUNT    BALANCE      HELD  UNSETTLED  AVAILABLE  VERSION\n\
             u1:BOND-1    12 BOND-1  2 BOND-1   0 BOND-1  10 BOND-1        3\n"
        );

        let line = |id: &str| json!({ "instrumentId": id, "total": { "value": "0" } });
        let mut answer = json!({ "lines": [line("BOND-1"), line("CFA-RUB")] });
        units::add(&mut answer);
        let shown = trial_balance(&answer);
        assert!(
            shown.contains(" 0 BOND-1\n") && shown.contains(" 0 CFA-RUB\n"),
            "{shown}"
        );
    }

    // rows: R350 R215
    #[tokio::test]
    async fn r350_verify_fails_where_there_is_no_ledger() {
        let folder = tempfile::tempdir().expect("folder");
        let dir = folder.path().to_str().expect("text");
        let [_, _, _, verify] = verbs();
        let matches = verify.get_matches_from(["verify", "--dir", dir]);
        let config = || bail!("--dir needs no configuration");
        let error = super::verify(config, &matches, false).await;
        let error = format!("{:#}", error.expect_err("no ledger"));
        assert!(error.contains("there is no ledger in"), "{error}");
    }
}
