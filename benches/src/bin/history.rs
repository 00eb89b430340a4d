//! Write rate of the market's history:
//! `cargo run --release -p benches --bin history -- [--records N] [--json]`.
//!
//! Load: records of a generated flow (45 % resting orders, 40 % cancels, 8 % replaces, 7 % trading
//! orders) of 1,000 users. Admission and book produce the records before the clock runs. Then a
//! thread applies them as the live replica does (`State::apply`, batches of 256) and sends the
//! effects over a queue of 256 batches. The history drains the queue and writes, as in a platform.
//! Both are timed, per 100,000 records. After each 100,000, bare statements write the same rows
//! into a separate file, in the same transactions; computing their values is not timed.

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
const PART: usize = 100_000;
/// Records that the replica applies per batch, and queue capacity in batches.
const REPLICA_BATCH: usize = 256;
const QUEUE: usize = 256;

/// Rate of the history compared with bare statements.
#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 2_000_000)]
    records: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Most records per transaction; default: the history's own number.
    #[arg(long, default_value_t = BATCH_RECORDS)]
    batch: usize,
    /// Folder for the files; default: the system's temporary folder.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Measurements of one part of the run.
struct Part {
    history: Duration,
    bare: Duration,
    transactions: usize,
}

impl Part {
    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "history_per_s": (PART as f64 / self.history.as_secs_f64()) as u64,
            "bare_per_s": (PART as f64 / self.bare.as_secs_f64()) as u64,
            "ratio": self.bare.as_secs_f64() / self.history.as_secs_f64(),
            "transactions": self.transactions,
        })
    }

    fn line(&self, from: usize) -> String {
        let rate = |spent: Duration| PART as f64 / spent.as_secs_f64();
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
fn apply(state: &mut State, records: &[Record], hand_on: impl Fn(Batch)) {
    for records in records.chunks(REPLICA_BATCH) {
        let applied = records.iter().map(|record| {
            state
                .apply(record)
                .expect("replica accepts the core's events")
        });
        hand_on(Batch::new(applied.collect()));
    }
}

/// Writes until the queue is closed; returns the transactions.
async fn write(
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
    let mut parts: Vec<Part> = Vec::new();
    loop {
        let records: Vec<Record> = source.by_ref().take(PART).collect();
        if records.len() < PART {
            break;
        }
        let (hand_on, queue) = sync_channel(QUEUE);
        let start = Instant::now();
        let applying = std::thread::spawn(move || {
            apply(&mut state, &records, |batch| {
                hand_on.send(batch).expect("the history receives")
            });
            state
        });
        let transactions = write(&writer, queue, args.batch).await?;
        let spent = start.elapsed();
        state = applying
            .join()
            .map_err(|_| anyhow::anyhow!("the replica thread panicked"))?;
        let rows: Vec<BaselineRows> = transactions
            .iter()
            .map(|batches| BaselineRows::of(batches))
            .collect();
        let part = Part {
            history: spent,
            bare: bare.write(&rows)?,
            transactions: transactions.len(),
        };
        if !args.json {
            println!("{}", part.line(parts.len() * PART));
        }
        parts.push(part);
    }
    history.db.file.close().await;
    drop(bare);
    let digests = (Baseline::digest(&file)?, Baseline::digest(&bare_file)?);
    ensure!(digests.0 == digests.1, "the files differ: {digests:?}");
    let (first, last) = (
        parts.first().context("fewer records than one part")?,
        parts.last().context("last part")?,
    );
    if args.json {
        let result = serde_json::json!({
            "records": parts.len() * PART,
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
        println!("last  {}", last.line((parts.len() - 1) * PART));
    }
    Ok(())
}
