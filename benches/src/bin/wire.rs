//! Orders from a spinning client over QUIC to a running platform. Measures *accepted* and *durable*
//! latency with one request in flight, durable requests per second of an order flow with many
//! requests in flight, and an echo over the same transport as the baseline.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use benches::generate::{Shape, generate};
use benches::hop::{self, histogram};
use benches::wire::flow::{Counts, Flow, Load};
use benches::wire::idle::Idle;
use benches::wire::reference::{self, Verified};
use benches::wire::sample::{Sample, Sampler};
use benches::wire::{baselines, echo, settings, setup::PlatformClient};
use benches::xflow;
use clap::Parser;
use client::spinning::Connection;
use client::{LoginOptions, Trust};
use hdrhistogram::Histogram;
use sequencer::inspect::Folder;
use types::{InstrumentIx, Side};
use wire::{Cancel, ClientMessage, NewOrder, ServerMessage};

/// Initial roubles per member. Half of them become the trading hold.
const INITIAL_ROUBLES: u64 = 20_000_000_000;
/// Initial instrument units per member of the flow.
const INITIAL_UNITS: u64 = 400_000_000;
/// Price of the orders of the closed loop. It is low enough that no order trades and the hold
/// always suffices.
const PRICE_TICKS: i64 = 100;
/// Bytes of a request in the echo: those of a `NewOrder`.
const REQUEST_BYTES: usize = 55;
/// Bytes of a response in the echo: those of `Accepted` and `OrderAck`.
const RESPONSE_BYTES: usize = 46 + 99;
/// Writes in the durable-write baseline.
const BASELINE_WRITES: u64 = 4_000;

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
    /// Core of this client.
    #[arg(long, default_value_t = 0)]
    core: usize,
    /// Core of the echo server.
    #[arg(long, default_value_t = 1)]
    echo_core: usize,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

fn order(instrument: u32, id: u64) -> ClientMessage {
    NewOrder::limit(id, instrument, Side::Buy, PRICE_TICKS, 1).into()
}

fn cancel(id: u64) -> ClientMessage {
    Cancel {
        client_order_id: id,
        engine_order_id: 0,
    }
    .into()
}

/// Request of the closed loop: a new order for an odd number, its cancel for the next even number.
fn request(instrument: u32, number: u64) -> ClientMessage {
    match number % 2 {
        1 => order(instrument, number.div_ceil(2)),
        _ => cancel(number.div_ceil(2)),
    }
}

/// Sends each request after the durable answer to the previous one. Returns the latencies to
/// *accepted* and *durable* in nanoseconds.
fn closed_loop(
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
        let (mut accepted_after, mut durable_after) = (None, None);
        while durable_after.is_none() {
            connection.poll()?;
            while let Some(report) = connection.recv() {
                match &report.message {
                    ServerMessage::Accepted(_) => accepted_after = Some(sent.elapsed()),
                    ServerMessage::Rejected(m) => {
                        anyhow::bail!("request {number} was rejected: {}", m.reason);
                    }
                    other if other.answers() == request => durable_after = Some(sent.elapsed()),
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
            accepted.saturating_record(ns(accepted_after));
            durable.saturating_record(ns(durable_after));
        }
    }
    Ok((accepted, durable))
}

fn percentiles(histogram: &Histogram<u64>) -> serde_json::Value {
    let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
    serde_json::json!({ "p50_us": us(0.5), "p99_us": us(0.99), "p999_us": us(0.999) })
}

/// Rates and lags during the flow.
fn load_metrics(samples: &[Sample], counts: &Counts) -> serde_json::Value {
    let per_s = counts.durable as f64 / counts.seconds;
    let max_of = |of: fn(&Sample) -> f64| samples.iter().map(of).fold(0.0, f64::max);
    // The first sample is taken one second into the flow.
    let growth = |of: fn(&Sample) -> f64| match samples {
        [first, .., last] => of(last) - of(first),
        _ => 0.0,
    };
    let sampled_s = match samples {
        [first, .., last] => last.at.duration_since(first.at).as_secs_f64(),
        _ => f64::INFINITY,
    };
    // A follower processes records at the arrival rate minus the growth of its lag.
    let processed_per_s =
        |of: fn(&Sample) -> f64| (per_s - growth(of) / sampled_s).max(0.0).round();
    let trades_per_s = (counts.trades as f64 / counts.seconds).max(1.0);
    // Time to post the records that are not in the ledger, plus time to finalize the posted trades.
    let settlement_lag_s = |s: &Sample| s.settlement_lag / per_s + s.trades_pending / trades_per_s;
    let lags_ms: Vec<f64> = samples
        .iter()
        .map(|s| (s.replica_lag / per_s * 1e5).round() / 100.0)
        .collect();
    serde_json::json!({
        "replica_lag_ms": lags_ms.iter().copied().fold(0.0, f64::max),
        "replica_lags_ms": lags_ms,
        "replica_lag_p50_ms": benches::median(lags_ms.clone()),
        "history_per_s": processed_per_s(|s| s.history_lag),
        "settlement_per_s": processed_per_s(|s| s.settlement_lag),
        "settlement_lag_records": max_of(|s| s.settlement_lag),
        "settlement_lag_end_s": samples.last().map_or(0.0, settlement_lag_s),
        "trades_final_per_s": (growth(|s| s.trades_final) / sampled_s).round(),
        "intake_stage": max_of(|s| s.stage),
        "hot_page_faults": growth(|s| s.page_faults),
        "rss_mb": (max_of(|s| s.resident_bytes) / 1e6).round(),
        "tenths": tenths(samples, settlement_lag_s, per_s),
    })
}

/// Highest lags in seconds and memory of each tenth of the flow.
fn tenths(
    samples: &[Sample],
    settlement_lag_s: impl Fn(&Sample) -> f64,
    per_s: f64,
) -> Vec<serde_json::Value> {
    let tenths = samples.chunks(samples.len().div_ceil(10).max(1));
    let tenths = tenths.map(|tenth| {
        let max = |of: &dyn Fn(&Sample) -> f64| tenth.iter().map(of).fold(0.0, f64::max);
        let rounded = |value: f64| (value * 1e3).round() / 1e3;
        serde_json::json!({
            "settlement_lag_s": rounded(max(&settlement_lag_s)),
            "history_lag_s": rounded(max(&|s| s.history_lag / per_s)),
            "replica_lag_s": rounded(max(&|s| s.replica_lag / per_s)),
            "rss_mb": (max(&|s| s.resident_bytes) / 1e6).round(),
        })
    });
    tenths.collect()
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
    // After this thread is pinned, the result would be 1.
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
    let mut listed = connection.instruments();
    let traded = listed.find(|definition| definition.id.as_str() == id);
    let instrument = traded
        .context("the gateway does not list the instrument")?
        .instrument;
    drop(listed);
    let (accepted, durable) = closed_loop(&mut connection, instrument, args.requests)?;
    let sampler = Sampler::start(args.rpc);
    let counts = flow.run(&mut connection, instrument, &load)?;
    let samples = sampler.stop();
    idle.stop()?;
    let status = platform.status(&users[1])?;
    let trading_budget = platform.trading_budget(&users[1])?;
    drop(connection);
    let verified = match args.verify {
        true => {
            let journal = Folder::new(&args.data_dir.join("journal"));
            let verified = reference::verify(&journal, InstrumentIx(instrument), status.commit)?;
            anyhow::ensure!(
                verified.trades >= counts.trades,
                "{verified:?} of {counts:?}"
            );
            Some(verified)
        }
        false => None,
    };
    // One response: the second one has no bytes.
    let response_bytes = [RESPONSE_BYTES, 0];
    let echoed = echo::run(args.echo_core, REQUEST_BYTES, response_bytes, args.requests)?;
    let net = baselines::net(args.echo_core, REQUEST_BYTES, RESPONSE_BYTES, args.requests)?;
    let durable_baseline =
        baselines::durable(&args.data_dir, cores, args.echo_core, BASELINE_WRITES)?;

    let share = |part: u64| part as f64 / counts.durable.max(1) as f64;
    let mut line = serde_json::json!({
        "load": { "requests": args.requests, "users": args.users, "sessions": args.users * args.sessions,
                  "idle_sessions": args.idle, "window": args.window, "rate": args.rate,
                  "mix": "47 % orders that rest, 38 % cancels, 8 % amends, 7 % orders that trade" },
        "cores": cores,
        "layout": settings.layout,
        "bounds": status.bounds,
        "trading_budget": trading_budget,
        "trading_limit_basis": settings.trading_limit_basis,
        "lag_bounds": settings.lag_bounds,
        "echo": percentiles(&echoed),
        "net": percentiles(&net),
        "accepted": percentiles(&accepted),
        "durable": percentiles(&durable),
        "durable_floor": percentiles(&durable_baseline),
        "orders_per_s": (counts.durable as f64 / counts.seconds).round(),
        "reject_rate": share(counts.refused),
        "too_late_rate": share(counts.too_late),
        "self_trade_rate": share(counts.prevented),
        "trades": counts.trades,
        "trades_per_order": share(counts.trades),
        "duration_s": counts.seconds,
        "judged": verified.map(|Verified { commands, trades }| {
            serde_json::json!({ "commands": commands, "trades": trades })
        }),
    });
    let load_metrics = load_metrics(&samples, &counts);
    for (key, value) in load_metrics.as_object().into_iter().flatten() {
        line[key] = value.clone();
    }
    if args.json {
        println!("{line}");
    } else {
        println!("{}", serde_json::to_string_pretty(&line)?);
    }
    Ok(())
}
