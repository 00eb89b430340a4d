//! `platform proof`: prints the proof of balances of a running platform (crate `proof`).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::proof::{Difference, Progress, Proof, ProofDeps, ProofOptions, SETTLING_WAIT, prove};
use anyhow::{Context, bail};
use clap::ArgMatches;
use indicatif::ProgressBar;
use rpc::Channel;
use serde::Serialize;
use service_clients::CfaClient;

use crate::check::{self, Checked};
use crate::cli::call::Target;
use crate::cli::output::table;
use crate::config::Config;

/// Reads all balances over public calls and compares them.
///
/// # Errors
/// A service does not answer.
pub async fn take(target: &Target) -> anyhow::Result<Proof> {
    take_within(target, SETTLING_WAIT).await
}

/// [`take`] with a limit of the wait for operations that await the chain.
async fn take_within(target: &Target, settling_wait: Duration) -> anyhow::Result<Proof> {
    let channel =
        |credential| Channel::remote(&target.url, credential).context("address of the platform");
    let deps = ProofDeps {
        ledger: channel("sandbox.auditor")?,
        cfa: channel("sandbox.auditor")?,
        // Reconciliation is a treasury call.
        payments: Some(channel("sandbox.treasury")?),
    };
    let display = Arc::new(Display::new());
    let shown = display.clone();
    let options = ProofOptions {
        settling_wait,
        progress: Arc::new(move |progress| shown.show(progress)),
        ..ProofOptions::default()
    };
    let proof = prove(&deps, options).await;
    display.bar.finish_and_clear();
    proof.with_context(|| format!("proof of balances of {}", target.url))
}

/// Pause before the first line of progress and between two, if standard error is no terminal.
const PAUSE: Duration = Duration::from_secs(1);

/// Shows progress on standard error: at once on one line of a terminal, otherwise as lines.
struct Display {
    /// Hidden if standard error is no terminal.
    bar: ProgressBar,
    /// Earliest time of the next line.
    next: Mutex<Instant>,
}

impl Display {
    fn new() -> Self {
        Self {
            bar: ProgressBar::new_spinner(),
            next: Mutex::new(Instant::now() + PAUSE),
        }
    }

    fn show(&self, progress: Progress) {
        match progress {
            Progress::Reads(counts) if !self.bar.is_hidden() => {
                self.bar.set_message(counts.to_string());
            }
            Progress::Reads(counts) => {
                if is_due(&self.next, Instant::now()) {
                    eprintln!("{counts}");
                }
            }
            Progress::Repeats {
                reading,
                differences,
                is_settling,
            } => self.bar.suspend(|| {
                let why = if is_settling {
                    " while operations await the chain"
                } else {
                    ""
                };
                eprintln!(
                    "reading {reading}: {differences} unexplained differences{why}, reading again"
                );
            }),
        }
    }
}

/// True at most once per [`PAUSE`].
fn is_due(next: &Mutex<Instant>, now: Instant) -> bool {
    let mut next = next.lock().expect("no panic under the lock");
    let is_due = now >= *next;
    if is_due {
        *next = now + PAUSE;
    }
    is_due
}

/// Maximum differences in the printed table; `--json` prints all of them.
const LINES_MAX: usize = 20;

/// The proof with the full check.
#[derive(Serialize)]
struct Full<'a> {
    #[serde(flatten)]
    proof: &'a Proof,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<&'a Checked>,
}

/// Prints the proof, differences first. With `--full` also checks every row of the stores of the
/// settings.
///
/// # Errors
/// As [`take`]; a store cannot be read; there are unexplained differences or altered rows.
pub async fn run(
    target: &Target,
    config: impl FnOnce() -> anyhow::Result<Config>,
    matches: &ArgMatches,
    json: bool,
) -> anyhow::Result<()> {
    if !json {
        eprintln!("reading ledger, chain and bank of {} ...", target.url);
    }
    // First: what was altered may stop the platform from answering.
    let check = match matches.get_flag("full") {
        true => Some(checked(target, &config()?).await?),
        false => None,
    };
    if let Some(check) = check.as_ref().filter(|_| !json) {
        print!("{check}");
    }
    let wait = matches.get_one("wait").copied();
    let proof = take_within(target, wait.map_or(SETTLING_WAIT, Duration::from_secs)).await?;
    if json {
        let printed = Full {
            proof: &proof,
            check: check.as_ref(),
        };
        println!("{}", serde_json::to_string_pretty(&printed)?);
    } else {
        print!("{}", text(&proof));
    }
    check.as_ref().map_or(Ok(()), Checked::result)?;
    if !proof.ok {
        let wrong = proof
            .differences
            .iter()
            .filter(|found| found.explanation.is_none());
        let wrong = wrong.count();
        if proof.is_settling {
            bail!(
                "{wrong} unexplained differences while operations await the chain: repeat with a \
                 longer --wait, or see `platform settle status`"
            );
        }
        bail!("the balances differ: {wrong} unexplained differences");
    }
    Ok(())
}

async fn checked(target: &Target, config: &Config) -> anyhow::Result<Checked> {
    let mut checked = check::full(config).await.context("full check")?;
    let channel =
        Channel::remote(&target.url, "sandbox.auditor").context("address of the platform")?;
    let cfa = CfaClient::new(channel, "proof");
    checked.add(check::anchors(&cfa, config).await?);
    Ok(checked)
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
    } else if proof.is_settling {
        "NOT ok: operations await the chain"
    } else {
        "NOT ok"
    };
    out + &format!("\n{verdict}, readings: {}\n", proof.readings)
}

/// The table of differences, unexplained ones first; empty if there are none.
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

#[cfg(test)]
mod tests {
    use ::proof::DifferenceName;

    use super::*;

    fn difference(holder: &str, explanation: Option<&str>) -> Difference {
        Difference {
            name: DifferenceName::Holder,
            instrument_id: "CFA-RUB".to_owned(),
            holder: holder.to_owned(),
            left: "5.00".to_owned(),
            right: "4.00".to_owned(),
            difference: "1.00".to_owned(),
            explanation: explanation.map(str::to_owned),
        }
    }

    #[test]
    fn the_verdict_says_that_operations_await_the_chain() {
        let mut proof = Proof {
            ok: false,
            readings: 3,
            is_settling: true,
            instruments: Vec::new(),
            bank: None,
            differences: vec![difference("anna", None)],
        };
        let verdict = |proof: &Proof| text(proof).lines().last().map(str::to_owned);
        let settling = "NOT ok: operations await the chain, readings: 3";
        assert_eq!(verdict(&proof).as_deref(), Some(settling));
        proof.is_settling = false;
        assert_eq!(verdict(&proof).as_deref(), Some("NOT ok, readings: 3"));
        proof.ok = true;
        assert_eq!(
            verdict(&proof).as_deref(),
            Some("ok: chain = ledger = bank, readings: 3")
        );
    }

    fn printed(differences: Vec<Difference>) -> String {
        text(&Proof {
            ok: differences.is_empty(),
            readings: 1,
            is_settling: false,
            instruments: Vec::new(),
            bank: None,
            differences,
        })
    }

    /// Lines of the table of differences.
    fn rows(text: &str) -> Vec<&str> {
        text.lines()
            .filter(|line| line.contains("CFA-RUB"))
            .collect()
    }

    // rows: R350
    #[test]
    fn r350_unexplained_differences_are_printed_first_with_both_sides() {
        let text = printed(vec![
            difference("anna", Some("redemption in progress")),
            difference("boris", None),
        ]);
        assert!(text.starts_with("difference "), "{text}");
        let rows = rows(&text);
        assert_eq!(rows.len(), 2, "{text}");
        for (row, holder, explanation) in [
            (rows[0], "boris", "UNEXPLAINED"),
            (rows[1], "anna", "redemption in progress"),
        ] {
            assert!(row.contains(holder) && row.ends_with(explanation), "{text}");
            assert!(
                row.contains("chain 5.00") && row.contains("ledger 4.00"),
                "{text}"
            );
        }
        assert!(text.ends_with("NOT ok, readings: 1\n"), "{text}");
    }

    // rows: R350
    #[test]
    fn r350_at_most_twenty_differences_are_printed() {
        let mut differences = vec![difference("anna", Some("redemption in progress")); LINES_MAX];
        let text = printed(differences.clone());
        assert_eq!(rows(&text).len(), LINES_MAX, "{text}");
        assert!(!text.contains("more (--json prints all)"), "{text}");

        differences.extend([difference("boris", None), difference("boris", None)]);
        let text = printed(differences);
        let rows = rows(&text);
        assert_eq!(rows.len(), LINES_MAX, "{text}");
        let is_first = |row: &&str| row.contains("boris");
        assert_eq!(rows.iter().filter(|row| is_first(row)).count(), 2);
        assert!(rows[..2].iter().all(is_first), "{text}");
        assert!(
            text.contains("... and 2 more (--json prints all)\n"),
            "{text}"
        );
    }

    // rows: R350
    #[test]
    fn r350_progress_is_printed_after_a_second_and_then_once_a_second() {
        let start = Instant::now();
        let next = Mutex::new(start + PAUSE);
        let printed = |ms: &u64| is_due(&next, start + Duration::from_millis(*ms));
        let times = [0, 999, 1_000, 1_001, 1_999, 2_500, 3_499, 3_500];
        let printed: Vec<u64> = times.into_iter().filter(printed).collect();
        assert_eq!(printed, [1_000, 2_500, 3_500]);
    }

    // rows: R350
    #[test]
    fn r350_a_proof_without_differences_has_no_table_of_them() {
        let text = printed(Vec::new());
        assert!(text.starts_with("instrument "), "{text}");
        assert!(
            text.ends_with("ok: chain = ledger = bank, readings: 1\n"),
            "{text}"
        );
    }
}
