//! Write rate of the market's history:
//! `cargo run --release -p benches --bin history -- [--records N] [--json]`.
//!
//! Load: records of a generated flow (47 % orders that rest, 38 % cancels, 8 % replaces, 7 %
//! aggressive orders) of 1,000 users. Admission and book produce the records before the clock
//! starts.
//!
//! A thread applies the records as the live replica does (`State::apply`, batches of 256) and sends
//! the effects over a queue of 256 batches. The history drains the queue and writes, as in a
//! platform. Each 100,000 records are timed together. After them, bare statements write the same
//! rows into another file in the same transactions. Computing their values is not timed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use benches::generate::{Shape, generate};
use benches::history::{Baseline, BaselineRows, Source};
use clap::Parser;
use gateway::projection::{BATCH_RECORDS, HistoryWriter, Projection};
use replica::{Batch, State};
use sequencer::{Durable, Record};
use types::NodeId;

/// Records timed together.
const INTERVAL_RECORDS: usize = 100_000;
/// Records that the replica applies per batch.
const REPLICA_BATCH: usize = 256;
/// Capacity of the queue in batches.
const QUEUE: usize = 256;

/// Compares the write rate of the history with bare statements.
#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 2_000_000)]
    records: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Soft limit of records per transaction; default: the history's own.
    #[arg(long, default_value_t = BATCH_RECORDS)]
    batch: usize,
    /// Folder for the files; default: the system's temporary folder.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Measurements of [`INTERVAL_RECORDS`] records.
struct Interval {
    history: Duration,
    bare: Duration,
    transactions: usize,
}

impl Interval {
    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "history_per_s": (INTERVAL_RECORDS as f64 / self.history.as_secs_f64()) as u64,
            "bare_per_s": (INTERVAL_RECORDS as f64 / self.bare.as_secs_f64()) as u64,
            "ratio": self.bare.as_secs_f64() / self.history.as_secs_f64(),
            "transactions": self.transactions,
        })
    }

    fn line(&self, from: usize) -> String {
        let rate = |spent: Duration| INTERVAL_RECORDS as f64 / spent.as_secs_f64();
        let (history, bare) = (rate(self.history), rate(self.bare));
        let ratio = history / bare;
        let transactions = self.transactions;
        format!(
            "from {from:>9}: history {history:>9.0}/s  bare {bare:>9.0}/s  ratio {ratio:.2}  \
             {transactions} transactions"
        )
    }
}

/// Applies the records and sends the effects, as the live replica does.
fn apply_records(state: &mut State, records: &[Record], send: impl Fn(Batch)) {
    for records in records.chunks(REPLICA_BATCH) {
        let applied = records.iter().map(|record| {
            state
                .apply(record)
                .expect("replica accepts the core's events")
        });
        send(Batch::new(applied.collect()));
    }
}

/// Writes until the queue is closed. Returns the batches of each transaction.
async fn write_batches(
    writer: &HistoryWriter,
    queue: Receiver<Batch>,
    batch: usize,
) -> anyhow::Result<Vec<Arc<[Batch]>>> {
    let mut transactions = Vec::new();
    while let Ok(first) = queue.recv() {
        let mut records = first.len();
        let mut batches = vec![first];
        while records < batch
            && let Ok(more) = queue.try_recv()
        {
            records += more.len();
            batches.push(more);
        }
        let batches: Arc<[Batch]> = batches.into();
        writer.write(batches.clone()).await?;
        transactions.push(batches);
    }
    Ok(transactions)
}

async fn open(path: &Path) -> anyhow::Result<Projection> {
    let node = NodeId::new(1).context("node number")?;
    Ok(Projection::open(path.to_owned(), node, Durable::new("history")).await?)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let (file, bare_file) = (
        folder.path().join("history.db"),
        folder.path().join("bare.db"),
    );
    let history = open(&file).await?;
    open(&bare_file).await?.db.file.close().await;
    let mut bare = Baseline::open(&bare_file)?;

    let mut source = Source::new(generate(Shape::SINGLE, args.seed, args.records as u64));
    let mut state = State::new(NodeId::new(1).context("node number")?, sequencer::limits());
    let writer = history.writer(state.names().clone());
    let mut intervals: Vec<Interval> = Vec::new();
    loop {
        let records: Vec<Record> = source.by_ref().take(INTERVAL_RECORDS).collect();
        if records.len() < INTERVAL_RECORDS {
            break;
        }
        let (sender, queue) = sync_channel(QUEUE);
        let start = Instant::now();
        let applying = std::thread::spawn(move || {
            apply_records(&mut state, &records, |batch| {
                sender.send(batch).expect("the history receives")
            });
            state
        });
        let transactions = write_batches(&writer, queue, args.batch).await?;
        let spent = start.elapsed();
        state = applying
            .join()
            .map_err(|_| anyhow::anyhow!("the replica thread panicked"))?;
        let rows: Vec<BaselineRows> = transactions
            .iter()
            .map(|batches| BaselineRows::of(batches))
            .collect();
        let interval = Interval {
            history: spent,
            bare: bare.write(&rows)?,
            transactions: transactions.len(),
        };
        if !args.json {
            println!("{}", interval.line(intervals.len() * INTERVAL_RECORDS));
        }
        intervals.push(interval);
    }
    history.db.file.close().await;
    drop(bare);
    let digests = (Baseline::digest(&file)?, Baseline::digest(&bare_file)?);
    ensure!(digests.0 == digests.1, "the files differ: {digests:?}");
    let (first, last) = (
        intervals.first().context("fewer than 100,000 records")?,
        intervals.last().context("last interval")?,
    );
    if args.json {
        let result = serde_json::json!({
            "records": intervals.len() * INTERVAL_RECORDS,
            "orders": digests.0[0],
            "trades": digests.0[2],
            "first": first.json(),
            "last": last.json(),
        });
        println!("{result}");
    } else {
        println!(
            "{} orders, {} trades; the files are equal",
            digests.0[0], digests.0[2]
        );
        println!("first {}", first.line(0));
        println!(
            "last  {}",
            last.line((intervals.len() - 1) * INTERVAL_RECORDS)
        );
    }
    Ok(())
}
