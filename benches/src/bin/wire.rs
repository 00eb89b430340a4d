//! Orders from a spinning client over QUIC to a running platform. Measures *accepted* and *durable*
//! latency with one request in flight, and durable requests per second of an order flow with many
//! requests in flight.
//!
//! The latencies and their baselines are measured before the flow, while settlement and history
//! have nothing to do: half of the baselines, then the latencies, then the other half.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use benches::generate::{Shape, generate};
use benches::hop;
use benches::wire::baselines::{self, Baselines, BlockFile};
use benches::wire::closed_loop::{self, Latencies};
use benches::wire::flow::{Flow, Load, lower_priority};
use benches::wire::idle::Idle;
use benches::wire::reference::{self, Verified};
use benches::wire::report::Report;
use benches::wire::sample::{GAUGE_AGE_MAX, Sampler, followers_lag};
use benches::wire::{settings, setup::PlatformClient};
use benches::xflow;
use clap::Parser;
use client::spinning::Connection;
use client::{LoginOptions, Trust};
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use sequencer::inspect::Folder;
use types::InstrumentIx;

/// Initial roubles per member. Half of them become the trading hold.
const INITIAL_ROUBLES: u64 = 20_000_000_000;
/// Initial instrument units per member of the flow.
const INITIAL_UNITS: u64 = 400_000_000;
/// Bytes of a request in the echo: those of a `NewOrder`.
const REQUEST_BYTES: usize = 55;
/// Bytes of a response in the echo: those of `Accepted` and `OrderAck`.
const RESPONSE_BYTES: usize = 46 + 99;
/// Maximum round trips of an echo in a half of the baselines, in which the connection is not
/// polled: half a second.
const ROUNDS_MAX: usize = 20_000;
/// Writes in the durable-write baseline, both halves.
const BASELINE_WRITES: u64 = 4_000;
/// Maximum wait until settlement and history have no more records.
const QUIET_WAIT_MAX: Duration = Duration::from_secs(60);
/// Pause between two readings of the gauges.
const GAUGE_PAUSE: Duration = Duration::from_millis(100);

/// Measures latency and throughput of the trading protocol.
#[derive(Parser)]
struct Args {
    /// RPC port of the platform.
    #[arg(long, default_value = "127.0.0.1:8080")]
    rpc: SocketAddr,
    /// Trading port of the platform.
    #[arg(long, default_value = "127.0.0.1:8090")]
    trading: SocketAddr,
    /// Data folder of the platform, to find its certificate fingerprint, process and journal.
    #[arg(long, default_value = "data")]
    data_dir: PathBuf,
    /// Requests of the closed loop, which has one request in flight.
    #[arg(long, default_value_t = 20_000)]
    requests: usize,
    /// Members that send the flow. With fewer members, self-trade prevention prevents more trades.
    #[arg(long, default_value_t = 31)]
    users: u16,
    /// Sessions per member; at most 63 in total.
    #[arg(long, default_value_t = 2)]
    sessions: u16,
    /// Requests in flight per session.
    #[arg(long, default_value_t = 32)]
    window: u64,
    /// Requests offered per second; default: as many as the windows allow.
    #[arg(long)]
    rate: Option<u64>,
    /// Duration of the flow in seconds.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Additional sessions that only send heartbeats.
    #[arg(long, default_value_t = 0)]
    idle: usize,
    /// Replay the run's journal in the reference book and compare every trade.
    #[arg(long = "judge")]
    verify: bool,
    /// File with a flow in the `XFLOW001` format; default: a generated flow. The run ends with the
    /// last request of the flow at the latest.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Number of requests in a generated flow.
    #[arg(long, default_value_t = 8_000_000)]
    flow: u64,
    /// Seed of a generated flow.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Core of this client while it measures latencies. The flow may use all.
    #[arg(long, default_value_t = 0)]
    core: usize,
    /// Core of the echo server.
    #[arg(long, default_value_t = 1)]
    echo_core: usize,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Creates one member for the closed loop and `count` members of the flow. The latter also get
/// units.
fn members(platform: &PlatformClient, instrument: &str, count: u16) -> anyhow::Result<Vec<String>> {
    let users = (0..=count)
        .map(|_| platform.member(INITIAL_ROUBLES))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for user in &users[1..] {
        platform.units(user, instrument, INITIAL_UNITS)?;
    }
    Ok(users)
}

/// The flow of the file, or a generated one.
fn flow_of(args: &Args) -> anyhow::Result<xflow::Flow> {
    match &args.file {
        Some(file) => xflow::Flow::read(&std::fs::read(file)?)
            .map_err(|error| anyhow::anyhow!("{}: {error}", file.display())),
        None => Ok(generate(Shape::SINGLE, args.seed, args.flow)),
    }
}

/// The load of the run, as JSON. Without a file, the generator of `benches` made the flow.
fn load_of(args: &Args, flow: &xflow::Header, mix: &xflow::Mix) -> serde_json::Value {
    let file = args.file.as_ref().map(|file| file.display().to_string());
    let rounded = |share: f64| (share * 1e4).round() / 1e4;
    serde_json::json!({
        "requests": args.requests, "users": args.users, "sessions": args.users * args.sessions,
        "idle_sessions": args.idle, "window": args.window, "rate": args.rate,
        "seconds": args.seconds,
        "flow": { "file": file, "profile": flow.profile_name(), "seed": flow.seed },
        "mix": {
            "gtc": rounded(mix.gtc), "ioc_fok_market": rounded(mix.immediate),
            "cancel": rounded(mix.cancels), "amend": rounded(mix.replaces),
        },
    })
}

/// Connects and logs all sessions in. That of the closed loop has channel 0 and belongs to the
/// first user.
fn connect(args: &Args, trust: &Trust, users: &[String]) -> anyhow::Result<Connection> {
    let mut connection = Connection::connect(args.trading, trust)?;
    let money_hold_minor = i64::try_from(INITIAL_ROUBLES * 50)?;
    let mut login = |channel: u16, user: &str, name: &str| {
        let options = LoginOptions {
            money_hold_minor,
            ..LoginOptions::new(&format!("sandbox.trader.{user}"), name)
        };
        connection.login(channel, options)
    };
    login(0, &users[0], "bench")?;
    for channel in 1..=args.users * args.sessions {
        let user = &users[usize::from(1 + (channel - 1) / args.sessions)];
        login(channel, user, &format!("bench-{channel}"))?;
    }
    Ok(connection)
}

/// Number of the instrument in the protocol.
fn number_of(connection: &Connection, id: &str) -> anyhow::Result<u32> {
    let mut listed = connection.instruments();
    let traded = listed.find(|definition| definition.id.as_str() == id);
    let traded = traded.context("the gateway does not list the instrument")?;
    Ok(traded.instrument)
}

/// Waits until settlement and history have processed every record.
fn wait_until_quiet(platform: &PlatformClient, connection: &mut Connection) -> anyhow::Result<()> {
    let since = Instant::now();
    loop {
        // Sends heartbeats.
        connection.poll()?;
        let lag = followers_lag(platform)?;
        // Before that the gauges may not include the last records.
        if lag == 0.0 && since.elapsed() > GAUGE_AGE_MAX {
            return Ok(());
        }
        anyhow::ensure!(
            since.elapsed() < QUIET_WAIT_MAX,
            "settlement and history lag by {lag} records: use a platform without a backlog"
        );
        std::thread::sleep(GAUGE_PAUSE);
    }
}

/// Measures the latencies at window 1 between the two halves of the baselines.
fn measure_latencies(
    args: &Args,
    cores: usize,
    platform: &PlatformClient,
    connection: &mut Connection,
    instrument: u32,
) -> anyhow::Result<(Latencies, Baselines)> {
    let half = baselines::Load {
        core: args.echo_core,
        cores,
        request_bytes: REQUEST_BYTES,
        response_bytes: RESPONSE_BYTES,
        rounds: args.requests.div_ceil(2).min(ROUNDS_MAX),
        writes: BASELINE_WRITES / 2,
    };
    let blocks = BlockFile::create(&args.data_dir)?;
    wait_until_quiet(platform, connection)?;
    let mut baselines = Baselines::measure(&half, &blocks)?;
    let latencies = closed_loop::run(connection, instrument, args.requests)?;
    wait_until_quiet(platform, connection)?;
    baselines.add(&Baselines::measure(&half, &blocks)?)?;
    Ok((latencies, baselines))
}

/// Replays the run's journal in the reference book.
fn verify(args: &Args, instrument: u32, commit: u64, trades: u64) -> anyhow::Result<Verified> {
    let journal = Folder::new(&args.data_dir.join("journal"));
    let verified = reference::verify(&journal, InstrumentIx(instrument), commit)?;
    anyhow::ensure!(
        verified.trades >= trades,
        "{verified:?}, the members received {trades} trades"
    );
    Ok(verified)
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    anyhow::ensure!(
        args.users > 0 && args.sessions > 0,
        "--users and --sessions must be at least 1"
    );
    anyhow::ensure!(
        args.users * args.sessions < 64,
        "--users x --sessions must be at most 63 (channels per connection)"
    );
    // Before this thread is pinned, which its children inherit.
    let all = sched_getaffinity(None)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let settings = settings::of_platform(&args.data_dir)?;
    let platform = PlatformClient { address: args.rpc };
    let id = platform.instrument()?;
    let users = members(&platform, &id, args.users)?;
    let fingerprint = args.data_dir.join("market/tls/fingerprint");
    let trust: Trust = std::fs::read_to_string(&fingerprint)
        .with_context(|| fingerprint.display().to_string())?
        .trim()
        .parse()?;
    let load = Load {
        users: args.users,
        sessions_per_user: args.sessions,
        window: args.window,
        rate: args.rate,
        duration: Duration::from_secs(args.seconds),
    };
    let records = flow_of(&args)?;
    let header = records.header;
    let mut flow = Flow::new(records, &load, 1);
    let idle = Idle::start(args.trading, &trust, &users[1..], args.idle)?;
    anyhow::ensure!(
        hop::pin(args.core),
        "cannot pin the client to core {}",
        args.core
    );

    let mut connection = connect(&args, &trust, &users)?;
    let instrument = number_of(&connection, &id)?;
    let (latencies, baselines) =
        measure_latencies(&args, cores, &platform, &mut connection, instrument)?;
    sched_setaffinity(None, &all)?;
    let sampler = Sampler::start(args.rpc);
    lower_priority()?;
    let counts = flow.run(&mut connection, instrument, &load)?;
    sampler.flow_ended();
    flow.drain(&mut connection)?;
    let samples = sampler.finish(counts.seconds)?;
    idle.stop()?;
    let status = platform.status(&users[1])?;
    let trading_budget = platform.trading_budget(&users[1])?;
    drop(connection);
    let verified = match args.verify {
        true => Some(verify(&args, instrument, status.commit, counts.trades)?),
        false => None,
    };
    let report = Report {
        load: load_of(&args, &header, &flow.sent_mix()),
        cores,
        settings,
        status,
        trading_budget,
        latencies,
        baselines,
        counts,
        samples,
        verified,
    };
    let figures = report.json();
    if args.json {
        println!("{figures}");
    } else {
        println!("{}", serde_json::to_string_pretty(&figures)?);
    }
    Ok(())
}
