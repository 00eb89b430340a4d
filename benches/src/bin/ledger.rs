//! Compares the ledger with raw SQL that writes the same rows: `cargo run --release -p benches
//! --bin ledger -- [--json] [--quick] [--dir DIR]`.
//!
//! The clients call the ledger through its RPC contract, served in memory. Each operation is
//! complete: idempotency key, postings with running balances, outbox events (relayed concurrently)
//! and, in two-phase rows, a hold. Requests are created before the clock starts. Latency is the
//! time from sending a request to its answer, which follows the durable commit.
//!
//! Service and baseline run alternately, each on a copy of one seeded database. The ledger is
//! verified after each row. A violation fails the run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use benches::hop::histogram;
use benches::ledger::baseline;
use benches::ledger::database::{Baseline, Database};
use benches::ledger::flow::{Accounts, Flow, Kind, Request, USERS};
use benches::ledger::verify;
use clap::{Parser, ValueEnum};
use serde_json::{Value, json};

/// The allocator of the `node` binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Alternating rounds of service and baseline per row.
const ROUNDS: usize = 2;
/// Maximum wait for the relay to drain a round's events. The run then continues.
const DRAIN_MAX: Duration = Duration::from_secs(4);
/// Maximum duration of a round of the service, of the capture, and of a round of the baseline.
const ROUND_MAX: Duration = Duration::from_millis(1_600);

#[derive(Clone, Copy, ValueEnum)]
enum Store {
    Sqlite,
    Postgres,
}

/// Compares operations per second of the ledger with raw SQL.
#[derive(Parser)]
struct Args {
    #[arg(long, value_enum, default_value = "sqlite")]
    store: Store,
    /// A PostgreSQL database, `postgres://user@host:port/database`. The run creates its own
    /// databases on that server.
    #[arg(long)]
    url: Option<String>,
    /// Measure only a few rows; takes less than half a minute.
    #[arg(long)]
    quick: bool,
    /// Postings per operation. A posting has a debit and a credit side: other ledgers call it a
    /// transfer.
    #[arg(long, default_value_t = 1)]
    postings: usize,
    /// Measure only rows whose name (`batch/clients/accounts/kind`) contains this.
    #[arg(long)]
    only: Option<String>,
    /// Multiplies the number of operations of each row.
    #[arg(long, default_value_t = 1)]
    scale: usize,
    /// Measure only raw SQL on a minimal schema (accounts, operations and postings of integers), to
    /// compare the baseline with published figures.
    #[arg(long)]
    minimal_schema: bool,
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
struct GridRow {
    /// Operations per request.
    batch: usize,
    clients: usize,
    accounts: Accounts,
    kind: Kind,
    /// Operations per round.
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

impl GridRow {
    fn name(&self) -> String {
        let (accounts, kind) = (self.accounts.name(), self.kind.name());
        format!("{}/{}/{accounts}/{kind}", self.batch, self.clients)
    }
}

/// Batches of 1 with 1, 16 and 256 clients; one client with batches of 1 to 8,189; 16 clients with
/// batches of 100 and 500. Some of them also with hot accounts or two phases. All combinations
/// would take a quarter of an hour without further insight.
fn grid() -> Vec<GridRow> {
    use Accounts::{Hot, Uniform};
    use Kind::{OnePhase, TwoPhase};
    let row = |batch, clients, accounts, kind, operations, is_quick| GridRow {
        batch,
        clients,
        accounts,
        kind,
        operations,
        is_quick,
    };
    vec![
        row(1, 1, Uniform, OnePhase, 1_500, true),
        row(1, 1, Hot, OnePhase, 1_500, false),
        row(1, 16, Uniform, OnePhase, 4_800, false),
        row(1, 16, Uniform, TwoPhase, 3_200, false),
        row(1, 256, Uniform, OnePhase, 10_240, false),
        row(1, 256, Hot, OnePhase, 10_240, false),
        row(100, 1, Uniform, OnePhase, 30_000, true),
        row(100, 1, Hot, OnePhase, 30_000, false),
        row(100, 1, Uniform, TwoPhase, 20_000, false),
        row(100, 16, Uniform, OnePhase, 32_000, false),
        row(500, 1, Uniform, OnePhase, 30_000, true),
        row(500, 1, Hot, OnePhase, 30_000, true),
        row(500, 1, Uniform, TwoPhase, 20_000, false),
        row(500, 1, Hot, TwoPhase, 20_000, false),
        row(500, 16, Uniform, OnePhase, 30_000, false),
        row(8_189, 1, Uniform, OnePhase, 3 * 8_189, true),
        row(8_189, 1, Hot, OnePhase, 3 * 8_189, false),
        row(8_189, 1, Uniform, TwoPhase, 3 * 8_189, false),
    ]
}

/// Requests of each client for one round.
fn requests(row: &GridRow, flows: &mut [Flow]) -> Vec<Vec<Request>> {
    let rounds = (row.operations / row.batch / flows.len()).max(1);
    flows
        .iter_mut()
        .map(|flow| (0..rounds).flat_map(|_| flow.next(row.batch)).collect())
        .collect()
}

fn flows(args: &Args, row: &GridRow, clients: usize, salt: u64) -> Vec<Flow> {
    (0..clients as u64)
        .map(|client| {
            let seed = args.seed.wrapping_mul(1_000_003) + salt * 4_096 + client;
            Flow::new(seed, row.accounts, row.kind, args.postings)
        })
        .collect()
}

async fn run(
    args: &Args,
    row: &GridRow,
    seeded: &Database,
    folder: &Path,
) -> anyhow::Result<Value> {
    let copy = async |name: &str| {
        let server = args.server();
        seeded.copy(folder.join(name), server, name).await
    };
    let databases = [
        copy("served").await?,
        copy("captured").await?,
        copy("baseline").await?,
    ];
    let result = measure(args, row, &databases).await;
    for database in databases {
        database.drop().await?;
    }
    result
}

/// Work of the service or of the baseline, over all rounds.
#[derive(Clone, Copy, Default)]
struct Totals {
    operations: f64,
    elapsed_s: f64,
    cpu_s: f64,
}

impl Totals {
    fn ops_per_s(&self) -> f64 {
        self.operations / self.elapsed_s
    }

    /// Microseconds of processor time per operation, to a tenth.
    fn cpu_us_per_op(&self) -> f64 {
        (self.cpu_s / self.operations * 1e7).round() / 10.0
    }
}

/// Processor time of all threads of this process in seconds, without that of a PostgreSQL server.
fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Prepares the baseline: captures the rows that requests write, and groups them into transactions
/// with as many operations as those of the service.
async fn prepare_baseline(
    row: &GridRow,
    flows: &mut [Flow],
    [served, captured, raw]: &[Database; 3],
) -> anyhow::Result<Baseline> {
    let skip = USERS as usize + row.batch * row.clients;
    let group = verify::operations_per_transaction(served, skip).await?;
    // In two-phase rows with several clients a transaction has as many requests that open holds as
    // requests that write operations. With one client each request is a transaction.
    let requests_per_write = match row.kind == Kind::TwoPhase && row.clients > 1 {
        true => 2.0,
        false => 1.0,
    };
    let requests_per_transaction =
        ((requests_per_write * group / row.batch as f64).round() as usize).max(1);
    let shortened = GridRow {
        operations: row.operations.min(30_000),
        ..*row
    };
    let requests = requests(&shortened, flows).into_iter().flatten().collect();
    let rows = captured.capture(requests, ROUND_MAX).await?;
    raw.baseline(rows, requests_per_transaction).await
}

/// Measures one row. `databases` are those of the service, the capture and the baseline.
async fn measure(args: &Args, row: &GridRow, databases: &[Database; 3]) -> anyhow::Result<Value> {
    let served = &databases[0];
    let mut client_flows = flows(args, row, row.clients, 1);
    let mut baseline_flows = flows(args, row, 1, 2);
    let node = served.start().await?;
    // The warm-up is not measured. It prepares statements and reads pages.
    let one = GridRow {
        operations: 1,
        ..*row
    };
    let warm_up = node
        .run(requests(&one, &mut client_flows), DRAIN_MAX)
        .await?;
    let mut operations = warm_up.operations;
    served.drain(DRAIN_MAX).await?;

    let mut latency = histogram();
    let (mut service, mut bare) = (Totals::default(), Totals::default());
    let mut baseline: Option<Baseline> = None;
    let (mut outbox_left, mut drain_s) = (0, 0.0);
    for round_at in 0..ROUNDS {
        let requests = requests(row, &mut client_flows);
        let cpu_before_s = cpu_s();
        let round = node.run(requests, ROUND_MAX).await?;
        operations += round.operations;
        latency.add(&round.latency)?;
        service.operations += round.operations as f64;
        service.elapsed_s += round.elapsed.as_secs_f64();
        let (rows, took) = served.drain(DRAIN_MAX).await?;
        service.cpu_s += cpu_s() - cpu_before_s;
        outbox_left += rows;
        drain_s += took.as_secs_f64();
        let baseline = match &mut baseline {
            Some(baseline) => baseline,
            None => baseline.insert(prepare_baseline(row, &mut baseline_flows, databases).await?),
        };
        let transactions = baseline.remaining().div_ceil(ROUNDS - round_at);
        let cpu_before_s = cpu_s();
        let (count, elapsed) = baseline.run(transactions, ROUND_MAX).await?;
        bare.cpu_s += cpu_s() - cpu_before_s;
        bare.operations += count;
        bare.elapsed_s += elapsed.as_secs_f64();
    }
    verify::verify_trial_balance(&node.trial_balance().await?)?;
    node.stop().await;
    verify::verify_rows(served, USERS as usize + operations).await?;

    let group = verify::operations_per_transaction(served, USERS as usize).await?;
    let us = |quantile| (latency.value_at_quantile(quantile) as f64 / 1e3).round();
    let (ops_per_s, bare_ops_per_s) = (service.ops_per_s(), bare.ops_per_s());
    Ok(json!({
        "store": args.store.name(),
        "batch": row.batch,
        "clients": row.clients,
        "accounts": row.accounts.name(),
        "kind": row.kind.name(),
        "ops_per_s": ops_per_s.round(),
        "p50_us": us(0.5),
        "p99_us": us(0.99),
        "bare_ops_per_s": bare_ops_per_s.round(),
        "ratio": (ops_per_s / bare_ops_per_s * 1_000.0).round() / 1_000.0,
        "cpu_us_per_op": service.cpu_us_per_op(),
        "bare_cpu_us_per_op": bare.cpu_us_per_op(),
        "ops_per_transaction": (group * 10.0).round() / 10.0,
        "outbox_left": outbox_left,
        "drain_s": (drain_s * 100.0).round() / 100.0,
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
        "raw ops/s",
        "ratio",
        "cpu us/op",
        "raw us/op",
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

fn minimal_schema(args: &Args, folder: &Path) -> anyhow::Result<()> {
    let one = baseline::minimal_schema(folder, 1, 10_000)?;
    let many = baseline::minimal_schema(folder, 500, 600)?;
    if args.json {
        let report = json!({ "plain": [
            { "batch": 1, "bare_ops_per_s": one.round() },
            { "batch": 500, "bare_ops_per_s": many.round() },
        ] });
        println!("{report}");
    } else {
        println!(
            "raw SQL, minimal schema, synchronous FULL: \
            {one:.0} ops/s at 1 per transaction, {many:.0} at 500"
        );
    }
    Ok(())
}

fn describe_load(args: &Args) -> String {
    format!(
        "CreateOperations through the contract in memory, {} postings per operation, {USERS} users, \
        balances and keys checked, events relayed concurrently to the embedded log; {}; seed {}",
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
    if args.minimal_schema {
        return minimal_schema(&args, folder.path());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let seeded = Database::new(folder.path().join("seeded"), args.server(), "seeded").await?;
    let rows = rows(&args, &seeded, folder.path(), cores).await;
    seeded.drop().await?;
    let rows = rows?;
    if args.json {
        let report =
            json!({ "load": describe_load(&args), "cores": cores, "rounds": ROUNDS, "rows": rows });
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(())
}

async fn rows(
    args: &Args,
    seeded: &Database,
    folder: &Path,
    cores: usize,
) -> anyhow::Result<Vec<Value>> {
    let node = seeded.start().await?;
    node.seed().await?;
    seeded.drain(DRAIN_MAX).await?;
    node.stop().await;
    if !args.json {
        println!("{}; {cores} cores", describe_load(args));
        print_head();
    }
    let mut rows = Vec::new();
    for mut row in grid() {
        let name = row.name();
        let is_selected = match &args.only {
            Some(only) => name.contains(only.as_str()),
            None => !args.quick || row.is_quick,
        };
        if !is_selected {
            continue;
        }
        row.operations *= args.scale;
        let own = tempfile::tempdir_in(folder)?;
        let result = run(args, &row, seeded, own.path()).await.context(name)?;
        if !args.json {
            print_row(&result);
        }
        rows.push(result);
    }
    Ok(rows)
}
