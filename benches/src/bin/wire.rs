//! Orders over the wire of a running platform, from a client that spins: what *accepted* and *durable*
//! take with one request under way, how many requests a second become durable with many, and the echo
//! over the same transport beside them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use benches::hop::{self, histogram};
use benches::wire::{echo, setup::Caller, trader::Trader};
use clap::Parser;
use hdrhistogram::Histogram;
use types::{OrderType, Side, StpMode, TimeInForce};
use wire::{Cancel, ClientMessage, NewOrder, ServerMessage};

/// Roubles of each member, and the part that is blocked for trading.
const ROUBLES: u64 = 10_000_000;
/// Price in ticks: next to nothing, so that nothing trades and money never runs out.
const PRICE: i64 = 100;
/// Bytes of an order and of all that answers it until it is durable.
const QUESTION: usize = 55;
const ANSWER: usize = 46 + 99;

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
    /// Requests with one under way.
    #[arg(long, default_value_t = 20_000)]
    requests: usize,
    /// Sessions of the throughput part, each of a user of its own.
    #[arg(long, default_value_t = 16)]
    sessions: u16,
    /// Requests under way per session.
    #[arg(long, default_value_t = 64)]
    window: u64,
    /// Seconds of it.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
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

/// The request of this number: an order, then its cancel.
fn request(instrument: u32, number: u64) -> ClientMessage {
    match number % 2 {
        1 => order(instrument, number.div_ceil(2)),
        _ => cancel(number.div_ceil(2)),
    }
}

/// One request at a time: the next one leaves after the durable answer of the last.
fn one_at_a_time(
    trader: &mut Trader,
    instrument: u32,
    count: usize,
) -> anyhow::Result<(Histogram<u64>, Histogram<u64>)> {
    let (mut accepted, mut durable) = (histogram(), histogram());
    let warm_up = count / 10;
    for number in 1..=(count + warm_up) as u64 {
        let sent = Instant::now();
        trader.send(0, number, &request(instrument, number))?;
        trader.flush();
        let (mut hinted, mut answered) = (None, None);
        while answered.is_none() {
            trader.poll()?;
            let mut refused = None;
            trader.take(|_, message| match message {
                ServerMessage::Accepted(_) => hinted = Some(sent.elapsed()),
                ServerMessage::Rejected(m) => refused = Some(m.reason),
                other if other.answers() == number => answered = Some(sent.elapsed()),
                _ => {}
            });
            if let Some(reason) = refused {
                anyhow::bail!("request {number} was refused: {reason}");
            }
            anyhow::ensure!(
                sent.elapsed() < Duration::from_secs(30),
                "no answer to {number}"
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

/// What the throughput part has counted.
#[derive(Default)]
struct Flood {
    durable: u64,
    refused: u64,
    seconds: f64,
}

/// As many as the windows allow: the next request of a session leaves when one of its has become
/// durable.
fn flood(trader: &mut Trader, instrument: u32, args: &Args) -> anyhow::Result<Flood> {
    let sessions = usize::from(args.sessions);
    let (mut sent, mut answered) = (vec![0u64; sessions], vec![0u64; sessions]);
    let (mut counted, mut from) = (Flood::default(), None);
    let begun = Instant::now();
    let warm_up = Duration::from_secs(1);
    let end = begun + warm_up + Duration::from_secs(args.seconds);
    loop {
        let now = Instant::now();
        for at in 0..sessions {
            while now < end && sent[at] - answered[at] < args.window {
                sent[at] += 1;
                let channel = u16::try_from(at + 1)?;
                trader.send(channel, sent[at], &request(instrument, sent[at]))?;
            }
        }
        trader.poll()?;
        trader.take(|header, message| {
            let answers = message.answers();
            if answers != 0 {
                let at = usize::from(header.channel) - 1;
                answered[at] += 1;
                counted.durable += 1;
                counted.refused += u64::from(matches!(message, ServerMessage::Rejected(_)));
            }
        });
        if from.is_none() && now >= begun + warm_up {
            counted = Flood::default();
            from = Some(now);
        }
        if now >= end {
            let from = from.context("no time")?;
            counted.seconds = now.duration_since(from).as_secs_f64();
            return Ok(counted);
        }
    }
}

fn spread(histogram: &Histogram<u64>) -> serde_json::Value {
    let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
    serde_json::json!({ "p50_us": us(0.5), "p99_us": us(0.99), "p999_us": us(0.999) })
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // Before this thread is bound to one of them.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let caller = Caller { address: args.rpc };
    let id = caller.instrument()?;
    let users = (0..=args.sessions)
        .map(|_| caller.member(ROUBLES))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let certificate = args.data_dir.join("market/tls/cert.der");
    let certificate =
        std::fs::read(&certificate).with_context(|| certificate.display().to_string())?;
    anyhow::ensure!(hop::pin(args.core), "there is no core {}", args.core);

    let config = echo::client(&certificate, wire::ALPN)?;
    let mut trader = Trader::connect(args.trading, config)?;
    let kopecks = i64::try_from(ROUBLES * 50)?;
    for (channel, user) in users.iter().enumerate() {
        trader.login(u16::try_from(channel)?, user, "bench", kopecks)?;
    }
    let instrument = trader
        .instrument(&id)
        .context("the instrument is not traded")?;
    let (accepted, durable) = one_at_a_time(&mut trader, instrument, args.requests)?;
    let flooded = flood(&mut trader, instrument, &args)?;
    drop(trader);
    let echoed = echo::run(args.echo_core, QUESTION, ANSWER, args.requests)?;

    let per_s = flooded.durable as f64 / flooded.seconds;
    let line = serde_json::json!({
        "load": { "requests": args.requests, "sessions": args.sessions, "window": args.window,
                  "mix": "an order that rests, then its cancel; nothing trades" },
        "cores": cores,
        "echo": spread(&echoed),
        "accepted": spread(&accepted),
        "durable": spread(&durable),
        "orders_per_s": per_s.round(),
        "reject_rate": flooded.refused as f64 / flooded.durable.max(1) as f64,
        "duration_s": flooded.seconds,
    });
    if args.json {
        println!("{line}");
    } else {
        println!("{}", serde_json::to_string_pretty(&line)?);
    }
    Ok(())
}
