//! `platform replay`: sends a file's order flow as trading members would, through wire protocol,
//! book, journal, settlement, ledger and chain. Then prints the results and the proof of balances.

pub mod drive;
pub mod lobster;
pub mod members;
pub mod naive;
pub mod synthetic;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use service_kit::clock::now_ns;

use crate::cli::call::Target;
use crate::demo::Scenario;
use lobster::{Kind, Row};

/// Source of the rows.
pub enum Source {
    Lobster(PathBuf),
    Synthetic { seed: u64, rows: usize },
}

/// Parameters of a replay.
pub struct Replay {
    pub source: Source,
    /// Multiple of the recorded pace; `None`: as fast as the throttles admit.
    pub speed: Option<f64>,
    pub target: Target,
    pub trading: SocketAddr,
    pub json: bool,
}

/// Sends the rows and prints the results.
///
/// # Errors
/// The trades differ from the naive book's, requests were rejected unexpectedly, trades are not
/// settled, or the proof has differences.
pub async fn run(replay: Replay) -> anyhow::Result<()> {
    let rows = match &replay.source {
        Source::Lobster(path) => lobster::read(path)?,
        Source::Synthetic { seed, rows } => synthetic::generate(*seed, *rows),
    };
    let expected = naive::expect(&rows);
    let mut scenario = Scenario::new(replay.target.clone(), replay.json);
    let instrument = list(&mut scenario, &rows).await?;
    let members = members::enter(&mut scenario, &instrument, &members::needs(&rows)?).await?;
    let before = settled_trades(&scenario).await?;

    let bar = bar(rows.len() as u64, replay.json);
    let watch = Watch::start(replay.target.clone(), before);
    let progress = bar.clone();
    let tally = drive::play(
        replay.trading,
        &instrument,
        &members,
        &rows,
        replay.speed,
        move |at| progress.set_position(at),
    )
    .await?;
    bar.finish_and_clear();
    let settled_at = watch.until_settled(tally.trades).await?;
    let proof = crate::proof::take(&replay.target).await?;

    let mut lag = Histogram::<u64>::new_with_bounds(1, 3_600_000, 3)?;
    for (number, executed_ns) in tally.executed_ns.values().enumerate() {
        if let Some(settled_ns) = settled_at.at(number as u64 + 1) {
            lag.saturating_record((settled_ns.saturating_sub(*executed_ns) / 1_000_000).max(1));
        }
    }
    let trades_settled = settled_at.count();
    let report = json!({
        "instrument": instrument,
        "rows": rows.len(),
        "orders": tally.orders,
        "requests": tally.requests,
        "skipped_unknown": tally.skipped_unknown,
        "trades": tally.trades,
        "trades_expected": expected.trades,
        "quantity": tally.quantity,
        "rejects": tally.rejects,
        "executions_of_known_orders": tally.executions_of_known_orders,
        "same_maker": tally.same_maker,
        "same_maker_expected": expected.same_maker,
        "latency_us": micros(&tally.acknowledged),
        "accepted_latency_us": micros(&tally.accepted),
        "orders_per_s": (tally.requests as f64 / tally.elapsed.as_secs_f64()).round(),
        "trades_settled": trades_settled,
        "settled_per_s": settled_per_s(&tally, &settled_at),
        "settlement_lag_ms": {
            "p50": lag.value_at_quantile(0.5),
            "p99": lag.value_at_quantile(0.99),
            "max": lag.max(),
        },
        "proof": if proof.ok { "ok" } else { "differences" },
        "differences": proof.differences,
    });
    if replay.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", crate::cli::output::text(&report));
    }

    check(&tally, &expected, trades_settled, proof.ok)
}

fn check(
    tally: &drive::Tally,
    expected: &naive::Expected,
    trades_settled: u64,
    is_proven: bool,
) -> anyhow::Result<()> {
    if tally.trades != expected.trades || tally.quantity != expected.quantity {
        bail!("expected {} trades, got {}", expected.trades, tally.trades);
    }
    if tally.same_maker != expected.same_maker {
        bail!(
            "expected {} executions to match the named order first, got {}",
            expected.same_maker,
            tally.same_maker
        );
    }
    if tally.rejects_unexpected > 0 {
        bail!(
            "{} requests were rejected for a reason other than an ended order",
            tally.rejects_unexpected
        );
    }
    if trades_settled != tally.trades {
        bail!("{} of {} trades were settled", trades_settled, tally.trades);
    }
    if !is_proven {
        bail!("the proof of balances has differences");
    }
    Ok(())
}

/// Trades settled per second, from the first trade's execution until the last trade is seen
/// settled. So the rate includes a slow start and a slow end.
fn settled_per_s(tally: &drive::Tally, settled_at: &SettledAt) -> Option<f64> {
    let first_ns = *tally.executed_ns.values().min()?;
    let last_ns = *settled_at.0.values().next_back()?;
    let seconds = last_ns.saturating_sub(first_ns) as f64 / 1e9;
    (seconds > 0.0).then(|| (settled_at.count() as f64 / seconds * 10.0).round() / 10.0)
}

fn micros(histogram: &Histogram<u64>) -> Value {
    let at = |quantile| histogram.value_at_quantile(quantile) / 1_000;
    json!({ "p50": at(0.5), "p99": at(0.99), "p999": at(0.999), "max": histogram.max() / 1_000 })
}

fn bar(length: u64, quiet: bool) -> indicatif::ProgressBar {
    if quiet {
        indicatif::ProgressBar::hidden()
    } else {
        indicatif::ProgressBar::new(length)
    }
}

/// Registers an instrument with a band that admits every price of the file.
async fn list(scenario: &mut Scenario, rows: &[Row]) -> anyhow::Result<String> {
    let traded = |row: &&Row| matches!(row.kind, Kind::New | Kind::Execute);
    let prices = || rows.iter().filter(traded).map(|row| row.price_x10000);
    if let Some(odd) = prices().find(|price| price % 100 != 0 || *price <= 0) {
        bail!("a price of {odd} ten-thousandths is not a positive multiple of a hundredth");
    }
    let low = prices().min().context("the file has no orders")? / 100;
    let high = prices().max().context("the file has no orders")? / 100;
    members::list(
        scenario,
        "REPLAY",
        "Replayed order flow",
        ((low / 2).max(1), high * 2),
    )
    .await
}

async fn settled_trades(scenario: &Scenario) -> anyhow::Result<u64> {
    let status = scenario
        .call(
            "sandbox.auditor",
            "dfa.market.v1.MarketService/GetMarketStatus",
            json!({}),
        )
        .await?;
    Ok(count(&status, "tradesSettled"))
}

fn count(status: &Value, name: &str) -> u64 {
    status[name]
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default()
}

/// Poll interval of the settled count. Each poll is a call that competes with orders, and the
/// interval bounds the resolution of the lag.
const POLL: Duration = Duration::from_millis(100);

/// Polls the number of settled trades during the replay.
struct Watch {
    stop: Arc<AtomicBool>,
    polling: tokio::task::JoinHandle<anyhow::Result<BTreeMap<u64, u64>>>,
    target_count: Arc<std::sync::atomic::AtomicU64>,
}

/// By number of settled trades: the time at which it was first seen, in nanoseconds.
struct SettledAt(BTreeMap<u64, u64>);

impl SettledAt {
    fn count(&self) -> u64 {
        self.0.keys().next_back().copied().unwrap_or_default()
    }

    /// Time in nanoseconds at which `number` trades or more were first seen settled.
    fn at(&self, number: u64) -> Option<u64> {
        self.0.range(number..).next().map(|(_, at_ns)| *at_ns)
    }
}

impl Watch {
    fn start(target: Target, before: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let target_count = Arc::new(std::sync::atomic::AtomicU64::new(u64::MAX));
        let (stopping, wanted) = (stop.clone(), target_count.clone());
        let polling = tokio::spawn(async move {
            let scenario = Scenario::new(target, true);
            let mut seen = BTreeMap::new();
            loop {
                let polled = settled_trades(&scenario).await;
                let is_stopping = stopping.load(Ordering::SeqCst);
                // A busy platform may refuse a poll. The count never falls, so the next poll is
                // sufficient.
                let settled = match polled {
                    Ok(settled) => settled.saturating_sub(before),
                    Err(error) if is_stopping => return Err(error),
                    Err(_) => 0,
                };
                if settled > 0 {
                    seen.entry(settled).or_insert_with(now_ns);
                }
                if settled >= wanted.load(Ordering::SeqCst) || is_stopping {
                    return Ok(seen);
                }
                tokio::time::sleep(POLL).await;
            }
        });
        Self {
            stop,
            polling,
            target_count,
        }
    }

    /// Waits until `trades` are settled, at most five minutes.
    async fn until_settled(self, trades: u64) -> anyhow::Result<SettledAt> {
        self.target_count.store(trades, Ordering::SeqCst);
        let mut polling = self.polling;
        if let Ok(done) = tokio::time::timeout(Duration::from_secs(300), &mut polling).await {
            return Ok(SettledAt(done.context("watch")??));
        }
        self.stop.store(true, Ordering::SeqCst);
        Ok(SettledAt(polling.await.context("watch")??))
    }
}
