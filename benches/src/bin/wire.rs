//! Orders over the wire of a running platform, from a spinning client: *accepted* and *durable*
//! latency with one request in flight, durable requests per second of a generated flow with many in
//! flight, and an echo over the same transport for comparison.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use benches::generate::{Shape, generate};
use benches::hop::{self, histogram};
use benches::wire::flow::{Counts, Flow, Load};
use benches::wire::idle::Idle;
use benches::wire::reference::{self, Judged};
use benches::wire::sample::{Sample, Sampler};
use benches::wire::{echo, floors, setup::Caller};
use benches::xflow;
use clap::Parser;
use client::spinning::Connection;
use client::{LoginOptions, Trust};
use hdrhistogram::Histogram;
use sequencer::Layout;
use sequencer::inspect::Folder;
use types::{InstrumentIx, OrderType, Side, StpMode, TimeInForce};
use wire::{Cancel, ClientMessage, NewOrder, ServerMessage};

/// Roubles of each member, half of them in a trading hold, and units.
const ROUBLES: u64 = 20_000_000_000;
const UNITS: u64 = 400_000_000;
/// Price in ticks: so low that nothing trades and money never runs out.
const PRICE: i64 = 100;
/// Bytes of an order and of all its answers until it is durable.
const QUESTION: usize = 55;
const ANSWER: usize = 46 + 99;
/// Durable writes of the floor.
const DURABLE_ROUNDS: u64 = 4_000;

/// Latency and throughput of the trading protocol.
#[derive(Parser)]
struct Args {
    /// RPC port of the platform.
    #[arg(long, default_value = "127.0.0.1:8080")]
    rpc: SocketAddr,
    /// Trading port of the platform.
    #[arg(long, default_value = "127.0.0.1:8090")]
    trading: SocketAddr,
    /// Data folder of the platform, for its certificate.
    #[arg(long, default_value = "data")]
    data_dir: PathBuf,
    /// Requests with one in flight.
    #[arg(long, default_value_t = 20_000)]
    requests: usize,
    /// Members of the flow.
    #[arg(long, default_value_t = 16)]
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
    /// Seconds of the flow.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Additional sessions that only send heartbeats.
    #[arg(long, default_value_t = 0)]
    idle: usize,
    /// Replay the run's journal in the reference book and compare every trade.
    #[arg(long)]
    judge: bool,
    /// File with a flow, format `XFLOW001`; the run ends with it at the latest. Default: a
    /// generated flow.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Requests of a generated flow.
    #[arg(long, default_value_t = 8_000_000)]
    flow: u64,
    /// Seed of a generated flow.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Core of this client, and of the echo's server.
    #[arg(long, default_value_t = 0)]
    core: usize,
    #[arg(long, default_value_t = 1)]
    echo_core: usize,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

fn order(instrument: u32, id: u64) -> ClientMessage {
    NewOrder {
        client_order_id: id,
        instrument,
        side: Side::Buy,
        order_type: OrderType::Limit,
        time_in_force: TimeInForce::Gtc,
        stp: StpMode::CancelNewest,
        flags: 0,
        price_ticks: PRICE,
        quantity_lots: 1,
        expire_at_ns: 0,
    }
    .into()
}

fn cancel(id: u64) -> ClientMessage {
    Cancel {
        client_order_id: id,
        engine_order_id: 0,
    }
    .into()
}

/// The request with this number: an order, then its cancel.
fn request(instrument: u32, number: u64) -> ClientMessage {
    match number % 2 {
        1 => order(instrument, number.div_ceil(2)),
        _ => cancel(number.div_ceil(2)),
    }
}

/// One request at a time, each sent after the durable answer of the previous one.
fn one_at_a_time(
    connection: &mut Connection,
    instrument: u32,
    count: usize,
) -> anyhow::Result<(Histogram<u64>, Histogram<u64>)> {
    let (mut accepted, mut durable) = (histogram(), histogram());
    let warm_up = count / 10;
    for number in 1..=(count + warm_up) as u64 {
        let sent = Instant::now();
        let request = connection.send(0, &request(instrument, number))?;
        let request = request.context("the send buffer is full")?;
        connection.flush();
        let (mut hinted, mut answered) = (None, None);
        while answered.is_none() {
            connection.poll()?;
            while let Some(report) = connection.recv() {
                match &report.message {
                    ServerMessage::Accepted(_) => hinted = Some(sent.elapsed()),
                    ServerMessage::Rejected(m) => {
                        anyhow::bail!("request {number} was rejected: {}", m.reason);
                    }
                    other if other.answers() == request => answered = Some(sent.elapsed()),
                    _ => {}
                }
            }
            anyhow::ensure!(
                sent.elapsed() < Duration::from_secs(30),
                "no answer to request {number}"
            );
        }
        if number as usize > warm_up {
            let ns = |at: Option<Duration>| at.map_or(0, |at| at.as_nanos() as u64);
            accepted.saturating_record(ns(hinted));
            durable.saturating_record(ns(answered));
        }
    }
    Ok((accepted, durable))
}

fn spread(histogram: &Histogram<u64>) -> serde_json::Value {
    let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
    serde_json::json!({ "p50_us": us(0.5), "p99_us": us(0.99), "p999_us": us(0.999) })
}

/// Rates and lags during the flow.
fn observed(samples: &[Sample], counts: &Counts) -> serde_json::Value {
    let per_s = counts.durable as f64 / counts.seconds;
    let most = |of: fn(&Sample) -> f64| samples.iter().map(of).fold(0.0, f64::max);
    // The processed rate of a follower is the arrival rate minus the growth of its lag.
    let done_per_s = |of: fn(&Sample) -> f64| match samples {
        [first, .., last] => {
            let grown = (of(last) - of(first)) / last.at.duration_since(first.at).as_secs_f64();
            (per_s - grown).max(0.0).round()
        }
        _ => 0.0,
    };
    // After the first second of the flow.
    let page_faults = match samples {
        [first, .., last] => last.page_faults - first.page_faults,
        _ => 0.0,
    };
    let lags_ms: Vec<f64> = samples
        .iter()
        .map(|s| (s.replica_lag / per_s * 1e5).round() / 100.0)
        .collect();
    serde_json::json!({
        "replica_lag_ms": lags_ms.iter().copied().fold(0.0, f64::max),
        "replica_lags_ms": lags_ms,
        "replica_lag_p50_ms": benches::median(lags_ms.clone()),
        "history_per_s": done_per_s(|s| s.history_lag),
        "settlement_per_s": done_per_s(|s| s.settlement_lag),
        "settlement_lag_records": most(|s| s.settlement_lag),
        "intake_stage": most(|s| s.stage),
        "hot_page_faults": page_faults,
        "rss_mb": (most(|s| s.resident_bytes) / 1e6).round(),
    })
}

/// One member for single requests, then those of the flow, who also have units.
fn members(caller: &Caller, instrument: &str, count: u16) -> anyhow::Result<Vec<String>> {
    let users = (0..=count)
        .map(|_| caller.member(ROUBLES))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for user in &users[1..] {
        caller.units(user, instrument, UNITS)?;
    }
    Ok(users)
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    anyhow::ensure!(
        args.users > 0 && args.sessions > 0,
        "--users and --sessions must be at least 1"
    );
    anyhow::ensure!(
        args.users * args.sessions < 64,
        "--users times --sessions must be below 64, the channels of a connection"
    );
    // Before this thread is pinned to one of them.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let caller = Caller { address: args.rpc };
    let id = caller.instrument()?;
    let users = members(&caller, &id, args.users)?;
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
    let records = match &args.file {
        Some(file) => xflow::Flow::read(&std::fs::read(file)?)
            .map_err(|error| anyhow::anyhow!("{}: {error}", file.display()))?,
        None => generate(Shape::SINGLE, args.seed, args.flow),
    };
    let mut flow = Flow::new(records, &load, 1);
    let idle = Idle::start(args.trading, &trust, &users[1..], args.idle)?;
    anyhow::ensure!(
        hop::pin(args.core),
        "cannot pin the client to core {}",
        args.core
    );

    let mut connection = Connection::connect(args.trading, &trust)?;
    let kopecks = i64::try_from(ROUBLES * 50)?;
    let mut login = |channel: u16, user: &str, name: &str| {
        let options = LoginOptions {
            money_hold_minor: kopecks,
            ..LoginOptions::new(&format!("sandbox.trader.{user}"), name)
        };
        connection.login(channel, options)
    };
    login(0, &users[0], "bench")?;
    for channel in 1..=args.users * args.sessions {
        let user = &users[usize::from(1 + (channel - 1) / args.sessions)];
        login(channel, user, &format!("bench-{channel}"))?;
    }
    let mut known = connection.instruments();
    let traded = known.find(|definition| definition.id.as_str() == id);
    let instrument = traded
        .context("the gateway does not list the instrument")?
        .instrument;
    drop(known);
    let (accepted, durable) = one_at_a_time(&mut connection, instrument, args.requests)?;
    let sampler = Sampler::start(args.rpc);
    let counts = flow.run(&mut connection, instrument, &load)?;
    let samples = sampler.stop();
    idle.stop()?;
    let status = caller.status(&users[1])?;
    drop(connection);
    let judged = match args.judge {
        true => {
            let journal = Folder::new(&args.data_dir.join("journal"));
            let judged = reference::judge(&journal, InstrumentIx(instrument), status.commit)?;
            anyhow::ensure!(judged.trades >= counts.trades, "{judged:?} of {counts:?}");
            Some(judged)
        }
        false => None,
    };
    let echoed = echo::run(args.echo_core, QUESTION, ANSWER, args.requests)?;
    let net = floors::net(args.echo_core, QUESTION, ANSWER, args.requests)?;
    let durable_floor = floors::durable(&args.data_dir, cores, args.echo_core, DURABLE_ROUNDS)?;

    let share = |part: u64| part as f64 / counts.durable.max(1) as f64;
    let mut line = serde_json::json!({
        "load": { "requests": args.requests, "users": args.users, "sessions": args.users * args.sessions,
                  "idle_sessions": args.idle, "window": args.window, "rate": args.rate,
                  "mix": "45 % orders that rest, 40 % cancels, 8 % amends, 7 % orders that trade" },
        "cores": cores,
        // Layout that the platform uses on this machine unless configured otherwise.
        "layout": format!("{:?}", Layout::for_cores(cores)).to_lowercase(),
        "bounds": status.bounds,
        "echo": spread(&echoed),
        "net": spread(&net),
        "accepted": spread(&accepted),
        "durable": spread(&durable),
        "durable_floor": spread(&durable_floor),
        "orders_per_s": (counts.durable as f64 / counts.seconds).round(),
        "reject_rate": share(counts.refused),
        "too_late_rate": share(counts.too_late),
        "self_trade_rate": share(counts.prevented),
        "trades": counts.trades,
        "trades_per_order": share(counts.trades),
        "duration_s": counts.seconds,
        "judged": judged.map(|Judged { commands, trades }| {
            serde_json::json!({ "commands": commands, "trades": trades })
        }),
    });
    let observed = observed(&samples, &counts);
    for (key, value) in observed.as_object().into_iter().flatten() {
        line[key] = value.clone();
    }
    if args.json {
        println!("{line}");
    } else {
        println!("{}", serde_json::to_string_pretty(&line)?);
    }
    Ok(())
}
