//! The whole trading path under an open loop: request ring, admission, matching, journal, report
//! ring.
//!
//! The client ([`benches::open_loop`]) sends requests at a fixed rate regardless of the answers.
//! The baseline is a client that only counts, over bare rings; the same client over bare rings
//! shows what the client costs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use benches::baseline::{self, EchoLoad, RING, Writes};
use benches::hop::{self, Percentiles, ping_pong, ring_hop};
use benches::load::Load;
use benches::open_loop::{Client, Timing};
use clap::{Parser, ValueEnum};
use latency::plot::{self, Curve};
use sequencer::{
    Backlog, Bounds, Commit, Config, InlineNode, Layout, Port, SequencerHandle, Stats, Volatile,
};

/// Round trips of each round-trip measurement.
const ROUNDS: u64 = 200_000;
/// Maximum duration of the baseline run, in seconds.
const BASELINE_SECONDS_MAX: u64 = 5;
/// Duration of the jitter probe.
const JITTER_PROBE_TIME: Duration = Duration::from_secs(3);
const MIX: &str = "47 % new, 38 % cancel, 8 % amend, 7 % crossing IOC";

#[derive(Clone, Copy, ValueEnum)]
enum LayoutArg {
    Fused,
    Shared,
    Pinned,
}

/// Latency of the path from ring to ring at a given rate.
#[derive(Parser)]
struct Args {
    /// Requests per second.
    #[arg(long, default_value_t = 1_000_000)]
    rate: u64,
    /// Duration of the measurement in seconds.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Warm-up in seconds, not measured.
    #[arg(long, default_value_t = 2)]
    warm_up: u64,
    /// Assignment of the engines to threads.
    #[arg(long, value_enum, default_value = "fused")]
    layout: LayoutArg,
    #[arg(long, default_value_t = 1)]
    instruments: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run without the journal and its thread.
    #[arg(long)]
    no_journal: bool,
    /// Folder for the journal; default: the system's temporary folder.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Core of the client.
    #[arg(long, default_value_t = 0)]
    client_core: usize,
    /// Core of the hot thread; engine threads use the following cores.
    #[arg(long, default_value_t = 1)]
    hot_core: usize,
    /// Microseconds that the idle hot thread spins before it parks.
    #[arg(long, default_value_t = 2_000)]
    spin_us: u64,
    /// Microseconds between the starts of two large journal writes; default: the platform's value
    /// for this number of cores.
    #[arg(long)]
    gather_us: Option<u64>,
    /// Core of the journal's threads. Default: any core without hot thread and engines.
    #[arg(long)]
    journal_core: Option<usize>,
    /// Measure the cost per command of this many commands on a single thread, with 1, 8 and 64
    /// requests per poll.
    #[arg(long, alias = "by-hand", value_name = "COMMANDS")]
    inline: Option<usize>,
    /// Run the baseline a second time with this service time per message in nanoseconds, for
    /// instance the cost that `--inline` measures. Shows the queueing delay of such a server.
    #[arg(long)]
    service_ns: Option<u64>,
    /// Plot the latencies into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

/// A node with or without a journal.
enum Node {
    Journaled(SequencerHandle),
    Volatile(Volatile),
}

impl Node {
    fn start(args: &Args, dir: &std::path::Path) -> anyhow::Result<Self> {
        let mut config = Config::new(dir);
        config.layout = match args.layout {
            LayoutArg::Fused => Layout::Fused,
            LayoutArg::Shared => Layout::Shared,
            LayoutArg::Pinned => Layout::Pinned,
        };
        config.core = Some(args.hot_core);
        config.journal_core = args.journal_core;
        config.spin_us = args.spin_us;
        config.gather_us = args.gather_us.unwrap_or(config.gather_us);
        let backlog = Arc::new(Backlog::new(Bounds::NONE));
        Ok(if args.no_journal {
            Self::Volatile(Volatile::start(config, backlog)?)
        } else {
            Self::Journaled(SequencerHandle::start(config, backlog)?)
        })
    }

    fn port(&self) -> Port {
        match self {
            Self::Journaled(node) => node.port(),
            Self::Volatile(node) => node.port(),
        }
    }

    fn stats(&self) -> &Arc<Stats> {
        match self {
            Self::Journaled(node) => node.stats(),
            Self::Volatile(node) => node.stats(),
        }
    }

    /// Mean size and interval of the journal's writes in a run of this many seconds.
    fn mean_write(&self, seconds: u64) -> Option<Writes> {
        let Self::Journaled(node) = self else {
            return None;
        };
        let stats = node.journal_stats();
        let batches = stats.batches.max(1);
        let bytes = usize::try_from(stats.written_bytes / batches).unwrap_or(usize::MAX);
        Some(Writes {
            bytes: bytes
                .next_multiple_of(stats.block_bytes)
                .max(stats.block_bytes),
            every: Duration::from_secs(seconds) / u32::try_from(batches).unwrap_or(u32::MAX),
        })
    }

    fn commit(&self) -> Option<Commit> {
        match self {
            Self::Journaled(node) => Some(node.commit()),
            Self::Volatile(_) => None,
        }
    }
}

/// Reads the hot thread's page faults at the end of the warm-up, on a separate thread, so that the
/// client thread makes no system call under load.
fn page_faults_at(stats: &Arc<Stats>, warm_up_s: u64) -> JoinHandle<Option<u64>> {
    let stats = stats.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(warm_up_s));
        stats.page_faults()
    })
}

/// Page faults of the hot thread since the reading of [`page_faults_at`].
fn page_faults_since(at_warm_up_end: JoinHandle<Option<u64>>, stats: &Stats) -> Option<u64> {
    let before = at_warm_up_end.join().ok()??;
    Some(stats.page_faults()?.saturating_sub(before))
}

/// Describes the assignment of threads to cores.
fn describe_threads(args: &Args, cores: usize) -> String {
    let engines = match args.layout {
        LayoutArg::Fused => format!("hot thread with the books on core {}", args.hot_core),
        LayoutArg::Shared => format!(
            "hot thread on core {}, all engines on core {}",
            args.hot_core,
            args.hot_core + 1
        ),
        LayoutArg::Pinned => format!(
            "hot thread on core {}, {} engines on the cores from {} on",
            args.hot_core,
            args.instruments,
            args.hot_core + 1
        ),
    };
    let journal = match (args.no_journal, args.journal_core) {
        (true, _) => "no journal".to_owned(),
        (false, Some(core)) => format!("journal on core {core}"),
        (false, None) => "journal on any other core".to_owned(),
    };
    format!(
        "{cores} cores: client on core {}, {engines}, {journal}",
        args.client_core
    )
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let folder = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let dir = folder.path().join("journal");
    if let Some(commands) = args.inline {
        return run_inline(&args, &dir, commands);
    }
    let node = Node::start(&args, &dir)?;
    anyhow::ensure!(
        hop::pin(args.client_core),
        "cannot pin the client to core {}",
        args.client_core
    );
    let mut ring = node.port().rings(RING, Arc::default())?;
    let mut load = Load::open(&node.port(), &mut ring, args.instruments, args.seed)
        .map_err(|error| anyhow::anyhow!("cannot open the load: {error}"))?;
    let threads = describe_threads(&args, cores);
    if !args.json {
        println!("{threads}");
        println!(
            "load: {} requests/s for {} s after {} s of warm-up, {} instruments, {} users, {MIX}, seed {}",
            args.rate,
            args.seconds,
            args.warm_up,
            args.instruments,
            benches::load::USERS,
            args.seed
        );
    }
    // Lets the hot thread park, since the echo uses its core.
    std::thread::sleep(Duration::from_millis(20));
    let before = ping_pong(args.hot_core, ROUNDS);
    let hop_before = ring_hop(args.hot_core, ROUNDS);

    let mut client = Client::new(ring, &mut load, node.commit());
    if !args.json {
        println!("running");
    }
    let at_warm_up_end = page_faults_at(node.stats(), args.warm_up);
    client.run(Timing {
        rate: args.rate,
        seconds: args.seconds,
        warm_up: args.warm_up,
    })?;
    let page_faults = page_faults_since(at_warm_up_end, node.stats());
    let results = client.results;
    std::thread::sleep(Duration::from_millis(20));
    let after = ping_pong(args.hot_core, ROUNDS);
    let hop_after = ring_hop(args.hot_core, ROUNDS);
    let (client_jitter, hot_jitter) =
        hop::jitter_probe(args.hot_core, args.rate, JITTER_PROBE_TIME);
    let writes = node.mean_write(args.warm_up + args.seconds);
    let echo = |service_ns| EchoLoad {
        timing: Timing {
            rate: args.rate,
            seconds: args.seconds.min(BASELINE_SECONDS_MAX),
            warm_up: 1,
        },
        core: args.hot_core,
        writer_core: args.journal_core,
        service_ns,
    };
    let dir_of = |name: &str| folder.path().join(format!("baseline-{name}"));
    let mut bare_rings = |service_ns: u64| {
        let dir = dir_of(&service_ns.to_string());
        let writes = writes.map(|writes| (writes, dir.as_path()));
        baseline::run(echo(service_ns), writes, &mut load, node.commit())
    };
    let same_client = bare_rings(0)?;
    let serving = args.service_ns.map(bare_rings).transpose()?;
    let dir = dir_of("plain");
    let plain_writes = writes.map(|writes| (writes, dir.as_path()));
    let plain = baseline::run_with_plain_client(echo(0), plain_writes)?;
    let accepted = Percentiles::of(&results.accepted);
    let durable = (!args.no_journal).then(|| Percentiles::of(&results.durable));
    if let Some(path) = &args.plot {
        let mut curves = vec![Curve::new("accepted", &results.accepted, 1_000.0)];
        if !args.no_journal {
            curves.push(Curve::new("durable", &results.durable, 1_000.0));
        }
        let title = format!("From intended send to report, {} requests/s", args.rate);
        std::fs::write(path, plot::svg(&title, "us", &curves))
            .with_context(|| path.display().to_string())?;
    }
    let stats = node.stats();
    if args.json {
        println!(
            "{}",
            serde_json::json!({
                "load": {
                    "rate": args.rate,
                    "seconds": args.seconds,
                    "warm_up_s": args.warm_up,
                    "instruments": args.instruments,
                    "users": benches::load::USERS,
                    "mix": MIX,
                    "seed": args.seed,
                    "journal": !args.no_journal,
                },
                "rate": args.rate,
                "requests": results.requests,
                "layout": threads,
                "cores": cores,
                "accepted": accepted.json(),
                "durable": durable.map(|percentiles| percentiles.json()),
                "pingpong_p50_ns": before.p50_ns,
                "pingpong_after_p50_ns": after.p50_ns,
                "floor": same_client.json(),
                "floor_service": serving.map(|percentiles| percentiles.json()),
                "floor_plain": plain.json(),
                "floor_writes": writes.map(|writes| writes.json()),
                "ring_hop": hop_before.json(),
                "ring_hop_after": hop_after.json(),
                "clock_watch": { "client_core": client_jitter.json(), "hot_core": hot_jitter.json() },
                "refused": results.rejected,
                "not_submitted": results.not_submitted,
                "ring_full": results.ring_full,
                "events": results.events,
                "trades": stats.trades.load(Ordering::Relaxed),
                "hot_page_faults": page_faults,
                "parks": stats.parks.load(Ordering::Relaxed),
            })
        );
        return Ok(());
    }
    println!("cache line round trip: before {before}; after {after}");
    println!("ring round trip: before {hop_before}; after {hop_after}");
    println!("jitter of a thread that only reads the clock: client's core {client_jitter}");
    println!("                                              hot thread's  {hot_jitter}");
    println!(
        "{} requests, {} rejected, {} not submitted, ring full {} times, {} events, {} trades",
        results.requests,
        results.rejected,
        results.not_submitted,
        results.ring_full,
        results.events,
        stats.trades.load(Ordering::Relaxed)
    );
    if let Some(faults) = page_faults {
        println!("{faults} page faults of the hot thread after the warm-up");
    }
    println!("accepted: {accepted}");
    println!("baseline: {plain} (the same rate over bare rings, a client that only counts)");
    println!("          {same_client} (the client and load of the run over bare rings)");
    if let (Some(serving), Some(service_ns)) = (&serving, args.service_ns) {
        println!("          {serving} (that with {service_ns} ns of work per message)");
    }
    if let Some(writes) = writes {
        println!(
            "          with {} bytes written every {:.0} us, like the journal",
            writes.bytes,
            writes.every.as_secs_f64() * 1e6
        );
    }
    if let Some(durable) = durable {
        println!("durable:  {durable}");
    }
    println!("{}", core_count_note(cores, args.no_journal));
    Ok(())
}

/// Measures the path in the single-threaded driver (`--inline`).
fn run_inline(args: &Args, dir: &std::path::Path, commands: usize) -> anyhow::Result<()> {
    let mut config = Config::new(dir);
    config.layout = Layout::Fused;
    // The journal's settings depend on whether the hot thread is pinned.
    config.core = Some(args.hot_core);
    let backlog = Arc::new(Backlog::new(Bounds::NONE));
    let node = if args.no_journal {
        InlineNode::volatile(config, backlog)
    } else {
        InlineNode::start(config, backlog)?
    };
    anyhow::ensure!(
        hop::pin(args.hot_core),
        "cannot pin the hot thread to core {}",
        args.hot_core
    );
    let costs = benches::inline::run(node, args.instruments, args.seed, commands)?;
    if args.json {
        let costs: Vec<_> = costs.iter().map(|cost| cost.json()).collect();
        println!(
            "{}",
            serde_json::json!({ "commands": commands, "journal": !args.no_journal, "by_hand": costs })
        );
        return Ok(());
    }
    for cost in costs {
        println!(
            "{} requests per poll: {:.0} ns per command, {:.2} M commands/s",
            cost.batch,
            cost.ns_per_command,
            cost.capacity_m()
        );
    }
    Ok(())
}

/// Explains how the number of cores affects the figures.
fn core_count_note(cores: usize, no_journal: bool) -> &'static str {
    match (cores, no_journal) {
        (..=2, true) => {
            "two cores: client and hot thread have one each. Any other thread takes time from one of them. \
            It lengthens the tail, and that of a thread that only reads the clock."
        }
        (..=2, false) => {
            "two cores: client and hot thread spin on one each, and the journal's thread takes time from \
            one of them. Its work per write is a lower bound of the tail. A third core avoids that."
        }
        (3, _) => {
            "three cores: client, hot thread and journal have one each. In layout fused the hot thread has the books."
        }
        _ => {
            "four cores or more: each spinning thread can have a core, so the layouts shared and pinned \
            may be faster."
        }
    }
}
