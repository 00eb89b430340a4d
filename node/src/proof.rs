//! `platform proof`: prints the proof of balances of a running platform (crate `proof`).

use ::proof::{Difference, Proof, ProofDeps, ProofOptions, prove};
use anyhow::{Context, bail};
use rpc::Channel;

use crate::cli::call::Target;
use crate::cli::output::table;

/// Reads the proof over the public contract.
///
/// # Errors
/// A service does not answer.
pub async fn take(target: &Target) -> anyhow::Result<Proof> {
    let channel =
        |credential| Channel::remote(&target.url, credential).context("address of the platform");
    let deps = ProofDeps {
        ledger: channel("sandbox.auditor")?,
        cfa: channel("sandbox.auditor")?,
        // Reconciliation is a treasury call.
        payments: Some(channel("sandbox.treasury")?),
    };
    let options = ProofOptions {
        progress: |reading, differences| {
            eprintln!("reading {reading}: {differences} unexplained differences, reading again");
        },
        ..ProofOptions::default()
    };
    prove(&deps, options).await.context("proof of balances")
}

/// Differences printed; `--json` prints all of them.
const LINES_MAX: usize = 20;

/// Prints the proof, differences first; an unexplained difference is an error.
///
/// # Errors
/// As [`take`]; the balances differ.
pub async fn run(target: &Target, json: bool) -> anyhow::Result<()> {
    if !json {
        eprintln!("reading ledger, chain and bank of {} ...", target.url);
    }
    let proof = take(target).await?;
    if json {
        println!("{}", serde_json::to_string_pretty(&proof)?);
    } else {
        print!("{}", text(&proof));
    }
    if !proof.ok {
        let wrong = proof
            .differences
            .iter()
            .filter(|found| found.explanation.is_none());
        bail!(
            "the balances differ: {} unexplained differences",
            wrong.count()
        );
    }
    Ok(())
}

fn text(proof: &Proof) -> String {
    let mut out = differences(&proof.differences);
    let totals = proof.instruments.iter().map(|of| {
        [
            of.instrument_id.clone(),
            of.chain_supply.clone(),
            of.ledger_supply.clone(),
            of.chain_holders.clone(),
            of.ledger_holders.clone(),
            of.trial_balance.clone(),
            of.holders.len().to_string(),
        ]
    });
    let head = [
        "instrument",
        "chain supply",
        "ledger supply",
        "on chain at holders",
        "in ledger at holders",
        "sum of sub-accounts",
        "holders",
    ];
    out += &table(head, totals);
    if let Some(bank) = &proof.bank {
        let head = [
            "bank, RUB",
            "CFA-RUB supply",
            "deposits under way",
            "payouts under way",
            "suspense",
        ];
        out.push('\n');
        out += &table(
            head,
            [[
                bank.bank_balance.clone(),
                bank.token_supply.clone(),
                bank.in_flight_deposits.clone(),
                bank.in_flight_payouts.clone(),
                bank.suspense.clone(),
            ]],
        );
    }
    let verdict = if proof.ok {
        "ok: chain = ledger = bank"
    } else {
        "NOT ok"
    };
    out + &format!("\n{verdict}, readings: {}\n", proof.readings)
}

/// Unexplained differences first.
fn differences(found: &[Difference]) -> String {
    if found.is_empty() {
        return String::new();
    }
    let mut found: Vec<&Difference> = found.iter().collect();
    found.sort_by_key(|difference| difference.explanation.is_some());
    let rows = found.iter().take(LINES_MAX).map(|difference| {
        let (left, right) = difference.name.sides();
        [
            format!("{:?}", difference.name),
            difference.instrument_id.clone(),
            difference.holder.clone(),
            format!("{left} {}", difference.left),
            format!("{right} {}", difference.right),
            difference.difference.clone(),
            difference
                .explanation
                .clone()
                .unwrap_or_else(|| "UNEXPLAINED".to_owned()),
        ]
    });
    let head = [
        "difference",
        "instrument",
        "holder",
        "left",
        "right",
        "left - right",
        "explanation",
    ];
    let mut out = table(head, rows);
    if let Some(more) = found.len().checked_sub(LINES_MAX).filter(|more| *more > 0) {
        out += &format!("... and {more} more (--json prints all)\n");
    }
    out + "\n"
}
