//! Compares the ledger with bare statements that write the same rows: `cargo run --release -p
//! benches --bin ledger -- [--json] [--quick] [--dir DIR]`.
//!
//! Complete operations through the contract, served in memory as in a node: idempotency keys,
//! postings with running balances, outbox events that the relay moves to the log meanwhile, holds
//! if two-phase. Requests are created before the clock runs. Latency is from sending a request to
//! its answer, which follows the durable commit. Service and bare statements run alternately, each
//! on a copy of one seeded file. Each run's books are verified; an error fails the run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use benches::hop::histogram;
use benches::ledger::bare;
use benches::ledger::flow::{Accounts, Ask, Flow, Kind, USERS};
use benches::ledger::judge;
use benches::ledger::place::{Bare, Place};
use clap::{Parser, ValueEnum};
use serde_json::{Value, json};

/// The platform's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TURNS: usize = 2;
/// Longest wait for the relay to drain a turn's events; after it the run continues.
const DRAIN: Duration = Duration::from_secs(4);
/// Longest turn of the service, of the capturing requests, and of the bare statements.
const TURN: Duration = Duration::from_millis(1_600);

#[derive(Clone, Copy, ValueEnum)]
enum Store {
    Sqlite,
    Postgres,
}

/// Operations per second of the ledger, compared with bare statements.
#[derive(Parser)]
struct Args {
    #[arg(long, value_enum, default_value = "sqlite")]
    store: Store,
    /// A PostgreSQL database, `postgres://user@host:port/database`; this run creates its own
    /// databases on the same server.
    #[arg(long)]
    url: Option<String>,
    /// Only a few rows, within half a minute.
    #[arg(long)]
    quick: bool,
    /// Postings per operation, each with a debit and a credit; one corresponds to a transfer in
    /// other ledgers.
    #[arg(long, default_value_t = 1)]
    postings: usize,
    /// Only rows whose name (`batch/clients/accounts/kind`) contains this.
    #[arg(long)]
    only: Option<String>,
    /// Multiplies the load of each row.
    #[arg(long, default_value_t = 1)]
    times: usize,
    /// Measure only bare statements on three tables of integers, to compare with other floors.
    #[arg(long)]
    plain: bool,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the stores; default: the system's temporary folder.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

/// A row of the result table.
#[derive(Clone, Copy)]
struct Cell {
    /// Operations per request.
    batch: usize,
    clients: usize,
    accounts: Accounts,
    kind: Kind,
    /// Operations per turn.
    operations: usize,
    is_quick: bool,
}

impl Store {
    fn name(self) -> &'static str {
        match self {
            Store::Sqlite => "sqlite",
            Store::Postgres => "postgres",
        }
    }
}

impl Args {
    /// URL of the PostgreSQL server, if that is the store.
    fn server(&self) -> Option<&str> {
        self.url.as_deref()
    }
}

impl Cell {
    fn name(&self) -> String {
        let (accounts, kind) = (self.accounts.name(), self.kind.name());
        format!("{}/{}/{accounts}/{kind}", self.batch, self.clients)
    }
}

/// Batches and clients grow along the two edges of the grid; hot accounts and two phases are
/// measured where they differ most. The full product would take a quarter of an hour without
/// further insight.
fn grid() -> Vec<Cell> {
    use Accounts::{Hot, Uniform};
    use Kind::{OnePhase, TwoPhase};
    let cell = |batch, clients, accounts, kind, operations, is_quick| Cell {
        batch,
        clients,
        accounts,
        kind,
        operations,
        is_quick,
    };
    vec![
        cell(1, 1, Uniform, OnePhase, 1_500, true),
        cell(1, 1, Hot, OnePhase, 1_500, false),
        cell(1, 16, Uniform, OnePhase, 4_800, false),
        cell(1, 16, Uniform, TwoPhase, 3_200, false),
        cell(1, 256, Uniform, OnePhase, 10_240, false),
        cell(1, 256, Hot, OnePhase, 10_240, false),
        cell(100, 1, Uniform, OnePhase, 30_000, true),
        cell(100, 1, Hot, OnePhase, 30_000, false),
        cell(100, 1, Uniform, TwoPhase, 20_000, false),
        cell(100, 16, Uniform, OnePhase, 32_000, false),
        cell(500, 1, Uniform, OnePhase, 30_000, true),
        cell(500, 1, Hot, OnePhase, 30_000, true),
        cell(500, 1, Uniform, TwoPhase, 20_000, false),
        cell(500, 1, Hot, TwoPhase, 20_000, false),
        cell(500, 16, Uniform, OnePhase, 30_000, false),
        cell(8_189, 1, Uniform, OnePhase, 3 * 8_189, true),
        cell(8_189, 1, Hot, OnePhase, 3 * 8_189, false),
        cell(8_189, 1, Uniform, TwoPhase, 3 * 8_189, false),
    ]
}

/// Requests of each client for one turn.
fn asks(cell: &Cell, flows: &mut [Flow]) -> Vec<Vec<Ask>> {
    let rounds = (cell.operations / cell.batch / flows.len()).max(1);
    flows
        .iter_mut()
        .map(|flow| (0..rounds).flat_map(|_| flow.next(cell.batch)).collect())
        .collect()
}

fn flows(args: &Args, cell: &Cell, clients: usize, salt: u64) -> Vec<Flow> {
    (0..clients as u64)
        .map(|client| {
            let seed = args.seed.wrapping_mul(1_000_003) + salt * 4_096 + client;
            Flow::new(seed, cell.accounts, cell.kind, args.postings)
        })
        .collect()
}

async fn run(args: &Args, cell: &Cell, seeded: &Place, folder: &Path) -> anyhow::Result<Value> {
    let copy = async |name: &str| {
        let server = args.server();
        seeded.copy(folder.join(name), server, name).await
    };
    let (served, captured, bared) = (
        copy("served").await?,
        copy("captured").await?,
        copy("bare").await?,
    );
    let row = measure(args, cell, [&served, &captured, &bared]).await;
    for place in [served, captured, bared] {
        place.drop().await?;
    }
    row
}

/// Processor time of this process, all threads, in seconds. Excludes a PostgreSQL server.
fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

async fn measure(
    args: &Args,
    cell: &Cell,
    [served, captured, bared]: [&Place; 3],
) -> anyhow::Result<Value> {
    let mut own = flows(args, cell, cell.clients, 1);
    let mut one = flows(args, cell, 1, 2);
    let node = served.start().await?;
    // Not counted: prepares statements and reads pages.
    let mut operations = node
        .run(
            asks(
                &Cell {
                    operations: 1,
                    ..*cell
                },
                &mut own,
            ),
            DRAIN,
        )
        .await?
        .operations;
    served.drain(DRAIN).await?;

    let mut latency = histogram();
    // Operations, seconds, seconds of processor time.
    let (mut service, mut floor) = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0));
    let mut bare: Option<Bare> = None;
    let (mut left, mut drained) = (0, 0.0);
    for _ in 0..TURNS {
        let asked = asks(cell, &mut own);
        let began_cpu_s = cpu_s();
        let turn = node.run(asked, TURN).await?;
        operations += turn.operations;
        latency.add(&turn.latency)?;
        service.0 += turn.operations as f64;
        service.1 += turn.elapsed.as_secs_f64();
        let (rows, took) = served.drain(DRAIN).await?;
        service.2 += cpu_s() - began_cpu_s;
        left += rows;
        drained += took.as_secs_f64();
        let bare = match &mut bare {
            Some(bare) => bare,
            None => {
                let skip = USERS as usize + cell.batch * cell.clients;
                let group = judge::operations_per_transaction(served, skip).await?;
                let phases = if cell.kind == Kind::TwoPhase && cell.clients > 1 {
                    2.0
                } else {
                    1.0
                };
                let merge = ((phases * group / cell.batch as f64).round() as usize).max(1);
                let load = Cell {
                    operations: cell.operations.min(30_000),
                    ..*cell
                };
                let asks = asks(&load, &mut one).into_iter().flatten().collect();
                let rows = captured.capture(asks, TURN).await?;
                bare.insert(bared.bare(rows, merge).await?)
            }
        };
        let half = bare.left().div_ceil(TURNS.min(2));
        let began_cpu_s = cpu_s();
        let (count, elapsed) = bare.run(half, TURN).await?;
        floor.2 += cpu_s() - began_cpu_s;
        floor.0 += count;
        floor.1 += elapsed.as_secs_f64();
    }
    judge::judge_trial_balance(&node.trial_balance().await?)?;
    node.stop().await;
    judge::judge(served, USERS as usize + operations).await?;

    let group = judge::operations_per_transaction(served, USERS as usize).await?;
    let us = |quantile| latency.value_at_quantile(quantile) as f64 / 1e3;
    let (ours, bare) = (service.0 / service.1, floor.0 / floor.1);
    Ok(json!({
        "store": args.store.name(),
        "batch": cell.batch,
        "clients": cell.clients,
        "accounts": cell.accounts.name(),
        "kind": cell.kind.name(),
        "ops_per_s": ours.round(),
        "p50_us": us(0.5).round(),
        "p99_us": us(0.99).round(),
        "bare_ops_per_s": bare.round(),
        "ratio": (ours / bare * 1_000.0).round() / 1_000.0,
        "cpu_us_per_op": (service.2 / service.0 * 1e7).round() / 10.0,
        "bare_cpu_us_per_op": (floor.2 / floor.0 * 1e7).round() / 10.0,
        "ops_per_transaction": (group * 10.0).round() / 10.0,
        "outbox_left": left,
        "drain_s": (drained * 100.0).round() / 100.0,
    }))
}

fn print_head() {
    println!(
        "{:>6} {:>7} {:>8} {:>10} | {:>9} {:>10} {:>10} | {:>9} {:>6} | {:>9} {:>9} | {:>7} {:>11} {:>8}",
        "batch",
        "clients",
        "accounts",
        "kind",
        "ops/s",
        "p50 us",
        "p99 us",
        "bare",
        "ratio",
        "cpu us/op",
        "bare",
        "ops/tx",
        "outbox left",
        "drain s"
    );
}

fn print_row(row: &Value) {
    let text = |name: &str| row[name].as_str().unwrap_or_default();
    let number = |name: &str| row[name].as_f64().unwrap_or_default();
    println!(
        "{:>6} {:>7} {:>8} {:>10} | {:>9} {:>10} {:>10} | {:>9} {:>6.3} | {:>9.1} {:>9.1} | {:>7} {:>11} {:>8.2}",
        number("batch"),
        number("clients"),
        text("accounts"),
        text("kind"),
        number("ops_per_s"),
        number("p50_us"),
        number("p99_us"),
        number("bare_ops_per_s"),
        number("ratio"),
        number("cpu_us_per_op"),
        number("bare_cpu_us_per_op"),
        number("ops_per_transaction"),
        number("outbox_left"),
        number("drain_s")
    );
}

fn plain(args: &Args, folder: &Path) -> anyhow::Result<()> {
    let one = bare::plain(folder, 1, 10_000)?;
    let many = bare::plain(folder, 500, 600)?;
    if args.json {
        let report = json!({ "plain": [
            { "batch": 1, "bare_ops_per_s": one.round() },
            { "batch": 500, "bare_ops_per_s": many.round() },
        ] });
        println!("{report}");
    } else {
        println!(
            "bare statements, three tables of integers, synchronous FULL: \
            {one:.0} ops/s at 1 per transaction, {many:.0} at 500"
        );
    }
    Ok(())
}

fn load(args: &Args) -> String {
    format!(
        "CreateOperations through the contract in memory, {} postings per operation, {USERS} users, \
        balances and keys checked, events relayed to the embedded log meanwhile; {}; seed {}",
        args.postings,
        match args.store {
            Store::Sqlite => "SQLite in WAL mode, synchronous FULL",
            Store::Postgres => "PostgreSQL, synchronous_commit on",
        },
        args.seed
    )
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    match (args.store, &args.url) {
        (Store::Postgres, None) => bail!("--store postgres requires --url"),
        (Store::Sqlite, Some(_)) => bail!("--url requires --store postgres"),
        _ => {}
    }
    anyhow::ensure!(args.postings > 0, "--postings must be at least 1");
    let folder = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    if args.plain {
        return plain(&args, folder.path());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let seeded = Place::new(folder.path().join("seeded"), args.server(), "seeded").await?;
    let rows = rows(&args, &seeded, folder.path(), cores).await;
    seeded.drop().await?;
    let rows = rows?;
    if args.json {
        let report = json!({ "load": load(&args), "cores": cores, "turns": TURNS, "rows": rows });
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(())
}

async fn rows(
    args: &Args,
    seeded: &Place,
    folder: &Path,
    cores: usize,
) -> anyhow::Result<Vec<Value>> {
    let node = seeded.start().await?;
    node.seed().await?;
    seeded.drain(DRAIN).await?;
    node.stop().await;
    if !args.json {
        println!("{}; {cores} cores", load(args));
        print_head();
    }
    let mut rows = Vec::new();
    for mut cell in grid() {
        let name = cell.name();
        let is_asked = match &args.only {
            Some(only) => name.contains(only.as_str()),
            None => !args.quick || cell.is_quick,
        };
        if !is_asked {
            continue;
        }
        cell.operations *= args.times;
        let own = tempfile::tempdir_in(folder)?;
        let row = run(args, &cell, seeded, own.path()).await.context(name)?;
        if !args.json {
            print_row(&row);
        }
        rows.push(row);
    }
    Ok(rows)
}
