//! Settlement from the journal of trades to finality on chain:
//! `cargo run --release -p benches --bin settle -- [--trades N] [--members N] [--json]`.
//!
//! Load: trades between members of one instrument, made by admission and order book before the
//! clock starts. Ledger, CFA service, embedded chain and settlement are those of production, with
//! their default configuration. The clock runs from the first record that is written to the journal
//! to the last final trade.
//!
//! The trades are settled in tenths. Before each, the floor of the same tenth is measured in the
//! same process, settlement paused: the same batches in bare revm on one thread, and the rows of
//! settlement, ledger and CFA service as bare statements on another, both at once. A second
//! platform settles the same records to capture these rows and batches. The floor is the slower of
//! the two threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use benches::settle::capture::Capture;
use benches::settle::files::{self, Figures};
use benches::settle::floor::{Floor, Spent};
use benches::settle::flow::Flow;
use benches::settle::members;
use benches::settle::platform::Platform;
use clap::Parser;
use sequencer::Record;
use serde_json::{Value, json};
use types::Sequence;

const TENTHS: u64 = 10;
/// Trades captured at once: bounds the memory of the prepared statements.
const SLICE_TRADES: u64 = 5_000;
/// Pause between two writes of the paced load.
const PACE: Duration = Duration::from_millis(10);

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures settlement and its floor.
#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 100_000)]
    trades: u64,
    /// Members that trade; an even number.
    #[arg(long, default_value_t = 16)]
    members: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds of the load at half of the measured rate, which gives the lag.
    #[arg(long, default_value_t = 5)]
    lag_seconds: u64,
    /// Skip capture and floor.
    #[arg(long)]
    no_floor: bool,
    /// Folder for the data; default: the system's temporary folder.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Measurements of a tenth.
#[derive(Clone, Copy, Default)]
struct Tenth {
    trades: u64,
    /// From the first record to the last final trade.
    settle: Duration,
    /// From then to the last commit of relays and consumers.
    rest: Duration,
    floor: Spent,
}

fn per_s(count: u64, spent: Duration) -> f64 {
    let seconds = spent.as_secs_f64();
    if seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    }
}

impl Tenth {
    fn settle_per_s(&self) -> f64 {
        per_s(self.trades, self.settle)
    }

    /// Rate of the slower thread of the floor; 0 without one.
    fn floor_per_s(&self) -> f64 {
        per_s(self.trades, self.floor.rows.max(self.floor.evm))
    }

    /// Rate of the bare statements.
    fn rows_per_s(&self) -> f64 {
        per_s(self.trades, self.floor.rows)
    }

    fn json(&self) -> Value {
        json!({
            "trades": self.trades,
            "trades_per_s": self.settle_per_s().round(),
            "floor_rows_per_s": self.rows_per_s().round(),
            "floor_ledger_rows_per_s": per_s(self.trades, self.floor.ledger).round(),
            "floor_evm_per_s": per_s(self.trades, self.floor.evm).round(),
            "rest_s": round3(self.rest.as_secs_f64()),
        })
    }
}

fn round3(value: f64) -> f64 {
    (value * 1_000.0).round() / 1_000.0
}

/// The second platform and the floor.
struct Reference {
    platform: Platform,
    capture: Capture,
    floor: Floor,
}

impl Reference {
    async fn open(seeded: &Path, folder: &Path) -> anyhow::Result<Self> {
        let (captured, bare) = (folder.join("captured"), folder.join("bare"));
        files::copy(seeded, &captured)?;
        files::copy(seeded, &bare)?;
        let capture = Capture::install(&captured)?;
        Ok(Self {
            floor: Floor::open(&bare).await?,
            platform: Platform::start(&captured).await?,
            capture,
        })
    }

    /// Settles the records with capture, then measures their floor.
    async fn run(&mut self, records: &Arc<[Record]>) -> anyhow::Result<Spent> {
        let last = last_sequence(records)?;
        self.platform.feed(records.clone()).await?;
        self.platform.drained(last).await?;
        let folder = self.platform.folder.clone();
        files::quiet(&folder).await?;
        self.floor.run(&mut self.capture, &folder).await
    }

    /// Rows written per trade, in all and by table.
    fn rows(&self, trades: u64) -> anyhow::Result<(f64, Value)> {
        let counts = self.capture.rows()?;
        let counts = counts.into_iter().filter(|(_, count)| *count > 0);
        let each = counts.map(|(table, count)| (table, count as f64 / trades as f64));
        let each: Vec<(String, f64)> = each.collect();
        let all = each.iter().map(|(_, rows)| rows).sum();
        let by_table = each.into_iter();
        let by_table = by_table.map(|(table, rows)| (table, json!(round3(rows))));
        Ok((all, Value::Object(by_table.collect())))
    }

    async fn end(self) -> anyhow::Result<()> {
        self.platform.stop().await?;
        self.capture.end()
    }
}

fn last_sequence(records: &[Record]) -> anyhow::Result<Sequence> {
    let last = records.last().context("records of a tenth")?;
    Ok(last.command.sequence)
}

/// Writes records to the journal and waits until their trades are final.
async fn settle(platform: &Platform, records: &Arc<[Record]>) -> anyhow::Result<Duration> {
    let last = last_sequence(records)?;
    let began = Instant::now();
    platform.feed(records.clone()).await?;
    platform.drained(last).await?;
    Ok(began.elapsed())
}

/// Creates a platform with members whose journal has their holds, and stops it.
async fn seed(folder: &Path, members: u32, setup: Vec<Record>) -> anyhow::Result<()> {
    let platform = Platform::start(folder).await?;
    members::create(&platform, members).await?;
    settle(&platform, &setup.into()).await?;
    files::quiet(folder).await?;
    platform.stop().await
}

/// Settles all tenths, each after its floor.
async fn tenths(
    args: &Args,
    flow: &mut Flow,
    platform: &Platform,
    reference: &mut Option<Reference>,
) -> anyhow::Result<Vec<Tenth>> {
    let mut tenths = Vec::new();
    for number in 1..=TENTHS {
        let mut tenth = Tenth::default();
        let before = flow.trades();
        let wanted = (args.trades * number / TENTHS).saturating_sub(before);
        let mut records: Vec<Record> = Vec::new();
        while flow.trades() < before + wanted {
            let left = before + wanted - flow.trades();
            let slice: Arc<[Record]> = flow.take(left.min(SLICE_TRADES)).into();
            if let Some(reference) = reference {
                tenth.floor += reference.run(&slice).await?;
            }
            records.extend(slice.iter().cloned());
        }
        if let Some(reference) = reference {
            // Nothing reads its events. Without them a long run needs less disk space.
            reference.platform.archive().await?;
        }
        tenth.trades = flow.trades() - before;
        ensure!(tenth.trades > 0, "fewer trades than tenths");
        tenth.settle = settle(platform, &records.into()).await?;
        tenth.rest = files::quiet(&platform.folder).await?;
        if !args.json {
            println!("tenth {number:>2}: {}", tenth.json());
        }
        tenths.push(tenth);
    }
    Ok(tenths)
}

/// Time from execution to finality at a fixed rate of trades. Settlement restarts before it, so
/// its statistics begin anew.
async fn lag(
    platform: Platform,
    flow: &mut Flow,
    rate: f64,
    time: Duration,
) -> anyhow::Result<(Platform, Value)> {
    let platform = platform.restart_settlement().await?;
    let (began, first) = (Instant::now(), flow.trades());
    let mut last = None;
    while began.elapsed() < time {
        let due = (began.elapsed().as_secs_f64() * rate) as u64;
        let missing = (first + due).saturating_sub(flow.trades());
        if missing > 0 {
            let records: Arc<[Record]> = flow.take(missing).into();
            last = Some(last_sequence(&records)?);
            platform.feed(records).await?;
        }
        tokio::time::sleep(PACE).await;
    }
    if let Some(last) = last {
        platform.drained(last).await?;
    }
    let stats = platform.stats();
    let lag = stats.settlement_lag_ms;
    let trades_per_s = per_s(flow.trades() - first, time).round();
    let found = json!({
        "p50": lag.p50, "p99": lag.p99, "max": lag.max, "trades_per_s": trades_per_s,
    });
    Ok((platform, found))
}

/// What all tenths together wrote.
struct Written {
    before: Figures,
    after: Figures,
    bytes_before: Vec<(&'static str, i64)>,
    bytes_after: Vec<(&'static str, i64)>,
    /// After the retention of the event log.
    bytes_archived: Vec<(&'static str, i64)>,
}

impl Written {
    fn bytes_per_trade(&self, used: &[(&'static str, i64)], trades: u64) -> (f64, Value) {
        let stores = self.bytes_before.iter().zip(used);
        let each = stores.map(|((name, before), (_, after))| {
            let bytes = (after - before) as f64 / trades as f64;
            ((*name).to_owned(), bytes)
        });
        let each: Vec<(String, f64)> = each.collect();
        let all = each.iter().map(|(_, bytes)| bytes).sum();
        let by_store = each.into_iter();
        let by_store = by_store.map(|(name, bytes)| (name, json!(bytes.round())));
        (all, Value::Object(by_store.collect()))
    }
}

/// The figures of all tenths. `rows`: per trade, in all and by table.
fn report(
    tenths: &[Tenth],
    written: &Written,
    rows: Option<(f64, Value)>,
) -> anyhow::Result<Value> {
    let (first, last) = (tenths.first(), tenths.last());
    let (first, last) = (first.context("tenths")?, last.context("tenths")?);
    let sum = tenths.iter().fold(Tenth::default(), |mut sum, tenth| {
        sum.trades += tenth.trades;
        sum.settle += tenth.settle;
        sum.rest += tenth.rest;
        sum.floor += tenth.floor;
        sum
    });
    let trades = sum.trades;
    let operations = written.after.ledger_operations - written.before.ledger_operations;
    let chain_trades = (written.after.trades - written.before.trades).max(1);
    let gas = written.after.gas - written.before.gas;
    let (bytes, bytes_by_store) = written.bytes_per_trade(&written.bytes_after, trades);
    let (archived, archived_by_store) = written.bytes_per_trade(&written.bytes_archived, trades);
    let mut found = json!({
        "trades": trades,
        "trades_per_s": sum.settle_per_s().round(),
        "first_tenth_per_s": first.settle_per_s().round(),
        "last_tenth_per_s": last.settle_per_s().round(),
        "chain_txs": written.after.chain_txs - written.before.chain_txs,
        "gas_per_trade": gas / chain_trades,
        "ledger_ops_per_s": per_s(operations.unsigned_abs(), sum.settle).round(),
        "bytes_per_trade": bytes.round(),
        "bytes_by_store": bytes_by_store,
        "archived_bytes_per_trade": archived.round(),
        "archived_bytes_by_store": archived_by_store,
        "rest_s": round3(sum.rest.as_secs_f64()),
        "tenths": tenths.iter().map(Tenth::json).collect::<Vec<_>>(),
    });
    if let Some((rows, by_table)) = rows {
        let relative = |tenth: &Tenth| tenth.settle_per_s() / tenth.rows_per_s();
        found["rows_per_trade"] = json!(round3(rows));
        found["rows_by_table"] = by_table;
        found["floor_trades_per_s"] = json!(sum.floor_per_s().round());
        found["floor_rows_per_s"] = json!(sum.rows_per_s().round());
        found["floor_ledger_rows_per_s"] = json!(per_s(trades, sum.floor.ledger).round());
        found["floor_evm_per_s"] = json!(per_s(trades, sum.floor.evm).round());
        found["ratio"] = json!(round3(sum.settle_per_s() / sum.floor_per_s()));
        found["last_to_first"] = json!(round3(relative(last) / relative(first)));
    }
    Ok(found)
}

async fn run(args: &Args, folder: &Path) -> anyhow::Result<Value> {
    let (mut flow, setup) = Flow::new(args.members, args.seed);
    let seeded = folder.join("seeded");
    seed(&seeded, args.members, setup)
        .await
        .context("members")?;
    let mut reference = match args.no_floor {
        true => None,
        false => Some(Reference::open(&seeded, folder).await?),
    };
    let settled = folder.join("settled");
    files::copy(&seeded, &settled)?;
    let platform = Platform::start(&settled).await?;
    files::quiet(&settled).await?;
    let (before, bytes_before) = (files::figures(&settled)?, files::used_bytes(&settled)?);
    let tenths = tenths(args, &mut flow, &platform, &mut reference).await?;
    let (after, bytes_after) = (files::figures(&settled)?, files::used_bytes(&settled)?);
    platform.archive().await?;
    let written = Written {
        before,
        after,
        bytes_before,
        bytes_after,
        bytes_archived: files::used_bytes(&settled)?,
    };
    let rows = match reference {
        Some(reference) => {
            let rows = reference.rows(flow.trades())?;
            reference.end().await?;
            Some(rows)
        }
        None => None,
    };
    let mut found = report(&tenths, &written, rows)?;
    let rate = found["trades_per_s"].as_f64().unwrap_or_default() / 2.0;
    let time = Duration::from_secs(args.lag_seconds);
    let (platform, lag_ms) = lag(platform, &mut flow, rate, time).await?;
    let proof = platform.proof().await?;
    found["lag_ms"] = lag_ms;
    found["members"] = json!(args.members);
    found["proof"] = json!(proof.ok);
    let stats = platform.stats();
    platform.stop().await?;
    ensure!(proof.ok, "the balances differ: {:?}", proof.differences);
    ensure!(
        stats.trades_failed == 0,
        "{} trades are bust",
        stats.trades_failed
    );
    Ok(found)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    ensure!(
        args.members >= 2 && args.members.is_multiple_of(2),
        "--members must be an even number"
    );
    service_kit::clock::start_discipline().context("clock")?;
    let folder = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let found = run(&args, folder.path()).await?;
    match args.json {
        true => println!("{found}"),
        false => println!("{}", serde_json::to_string_pretty(&found)?),
    }
    Ok(())
}
