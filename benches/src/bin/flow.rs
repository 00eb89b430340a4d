//! The order book alone, on a file of order flow: `cargo run --release -p benches --bin flow --
//! FILE [--json] [--peers] [--plot FILE.svg]`. `flow --generate single|deep SEED COMMANDS FILE`
//! generates such a file.
//!
//! Load: one thread applies every command of the file with `Book::apply` and writes the events to a
//! preallocated ring. Each order has its own account. Assertions, phase and band checks are on. The
//! commands are translated before the clock starts.
//!
//! Book and baseline run alternately with the same input, in two ways. Figures are medians of five
//! runs.
//!
//! - `ops_per_s` and `ratio`: both read from a ring of 1,024, as an engine reads its commands. The
//!   book reads batches of 64 with look-ahead. Filling the ring is not timed.
//! - `streamed`: both read from an array of the whole input, with 136 bytes per command for the
//!   book and 32 per record for the baseline.
//!
//! `--peers` (built with `--features peers`) then runs open-source books.
//!
//! Service times are those of single streamed commands without look-ahead, minus the cost of the
//! clock. A fence between command and clock read would need `unsafe`. Without it the processor
//! overlaps them, so compare service times only with those of the baseline in the same run.

use std::error::Error;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use benches::baseline_book::BaselineBook;
use benches::generate::{Shape, generate};
use benches::hop::histogram;
use benches::prepared::{PreparedFlow, new_book};
use benches::xflow::{Flow, Record};
use engine::{Book, EventSink};
use hdrhistogram::Histogram;
use latency::plot::{self, Curve};
use quanta::Clock;
use serde_json::{Value, json};
use types::{Envelope, EventEnvelope, InstrumentIx, Quote};

const USAGE: &str = "usage: flow FILE [--json] [--peers] [--plot FILE.svg], \
    or flow --generate single|deep SEED COMMANDS FILE";
/// Runs of book and baseline; a result is the median.
const RUNS: usize = 5;
/// Capacity of the command and event rings, equal to that of an engine's rings.
const EVENTS: usize = 1_024;
/// Commands per batch of an engine.
const BATCH: usize = 64;

/// Preallocated ring of events. New events overwrite the oldest.
struct Ring {
    kept: Box<[EventEnvelope; EVENTS]>,
    count: usize,
    quote: Quote,
}

impl Ring {
    fn new() -> Self {
        let empty = EventEnvelope {
            sequence: types::Sequence::ZERO,
            time_ns: 0,
            number: 0,
            instrument: InstrumentIx(0),
            index: 0,
            event: types::Event::Rested(types::event::Rested {
                handle: types::Handle::NONE,
                side: types::Side::Buy,
                price: types::Ticks::ZERO,
                open: types::Lots::ZERO,
            }),
        };
        let events = vec![empty; EVENTS].into_boxed_slice();
        Self {
            kept: events
                .try_into()
                .unwrap_or_else(|_| unreachable!("the length is the constant")),
            count: 0,
            quote: Quote::default(),
        }
    }
}

impl EventSink for Ring {
    #[inline(always)]
    fn event(&mut self, event: &EventEnvelope) {
        self.kept[self.count & (EVENTS - 1)] = *event;
        self.count = self.count.wrapping_add(1);
    }

    #[inline(always)]
    fn quote(&mut self, _: InstrumentIx, quote: Quote) {
        self.quote = quote;
    }
}

/// Input of book and baseline.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Feed {
    /// From a ring. Filling it is not timed.
    Ring,
    /// From the array of the whole input. Includes the time to fetch it from memory.
    Stream,
}

#[inline(never)]
fn feed_in_batches(book: &mut Book, events: &mut Ring, commands: &[Envelope]) {
    for batch in commands.chunks(BATCH) {
        book.each_of_batch(
            batch,
            |envelope: &Envelope| Some(envelope),
            |book, envelope| {
                book.apply(envelope, events);
            },
        );
    }
}

/// Commands per second of one run.
fn run_book(prepared: &PreparedFlow, feed: Feed) -> f64 {
    let (mut book, mut events) = (new_book(prepared.spec), Ring::new());
    feed_in_batches(&mut book, &mut events, &prepared.prefill);
    let mut spent = Duration::ZERO;
    if feed == Feed::Stream {
        let start = Instant::now();
        feed_in_batches(&mut book, &mut events, &prepared.timed);
        spent = start.elapsed();
    } else {
        let mut ring = Vec::with_capacity(EVENTS);
        for commands in prepared.timed.chunks(EVENTS) {
            ring.clear();
            ring.extend_from_slice(commands);
            let start = Instant::now();
            feed_in_batches(&mut book, &mut events, black_box(&ring));
            spent += start.elapsed();
        }
    }
    verify_state(prepared, &book, &events);
    prepared.timed.len() as f64 / spent.as_secs_f64()
}

/// Panics unless the timed book has the state, events and quote of the verified run.
fn verify_state(prepared: &PreparedFlow, book: &Book, ring: &Ring) {
    black_box(&ring.kept);
    assert_eq!(
        book.state_hash(),
        prepared.result.state_hash,
        "two runs differ"
    );
    assert_eq!(ring.count as u64, prepared.result.events, "two runs differ");
    assert_eq!(
        book.quote(),
        ring.quote,
        "the published quote is not the book's"
    );
}

#[inline(never)]
fn feed_baseline(baseline: &mut BaselineBook, records: &[Record]) {
    for record in records {
        baseline.apply(record);
    }
}

fn run_baseline(flow: &Flow, feed: Feed) -> Result<f64, String> {
    let mut baseline = BaselineBook::new(&flow.header);
    let (prefill, timed) = flow.records.split_at(flow.header.prefill as usize);
    feed_baseline(&mut baseline, prefill);
    (baseline.trades, baseline.quantity) = (0, 0);
    let mut spent = Duration::ZERO;
    if feed == Feed::Stream {
        let start = Instant::now();
        feed_baseline(&mut baseline, timed);
        spent = start.elapsed();
    } else {
        let mut ring = Vec::with_capacity(EVENTS);
        for records in timed.chunks(EVENTS) {
            ring.clear();
            ring.extend_from_slice(records);
            let start = Instant::now();
            feed_baseline(&mut baseline, black_box(&ring));
            spent += start.elapsed();
        }
    }
    black_box(baseline.digest());
    let header = &flow.header;
    if (baseline.trades, baseline.quantity, baseline.tape.0)
        != (header.trades, header.quantity, header.tape)
    {
        return Err("the baseline's tape differs from the file's".into());
    }
    Ok(timed.len() as f64 / spent.as_secs_f64())
}

/// Service times in tenths of a nanosecond.
struct Latency(Histogram<u64>);

impl Latency {
    fn ns(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 10.0
    }
}

/// Times each call separately and subtracts the smallest cost of two clock reads.
fn time_each<T>(clock: &Clock, items: &[T], mut each: impl FnMut(&T)) -> Latency {
    let empty = (0..100_000).map(|_| {
        let start = clock.raw();
        clock.raw().wrapping_sub(start)
    });
    let overhead = empty.min().unwrap_or(0);
    let mut times: Vec<u64> = Vec::with_capacity(items.len());
    for item in items {
        let start = clock.raw();
        each(item);
        times.push(clock.raw().wrapping_sub(start));
    }
    // `delta_as_nanos` rounds to nanoseconds. Many ticks make that error negligible.
    let ns_per_tick = clock.delta_as_nanos(0, 1 << 30) as f64 / (1u64 << 30) as f64;
    let mut histogram = histogram();
    for ticks in times {
        let tenths = ticks.saturating_sub(overhead) as f64 * ns_per_tick * 10.0;
        histogram.saturating_record(tenths.round() as u64);
    }
    Latency(histogram)
}

fn time_book(clock: &Clock, prepared: &PreparedFlow) -> (Latency, f64) {
    let (mut book, mut ring) = (new_book(prepared.spec), Ring::new());
    feed_in_batches(&mut book, &mut ring, &prepared.prefill);
    let latency = time_each(clock, &prepared.timed, |envelope| {
        book.apply(envelope, &mut ring);
    });
    verify_state(prepared, &book, &ring);
    let bytes = book.footprint_bytes() as f64 / f64::from(book.resting().max(1));
    (latency, bytes)
}

fn time_baseline(clock: &Clock, flow: &Flow) -> Latency {
    let mut baseline = BaselineBook::new(&flow.header);
    let (prefill, timed) = flow.records.split_at(flow.header.prefill as usize);
    feed_baseline(&mut baseline, prefill);
    time_each(clock, timed, |record| baseline.apply(record))
}

fn highest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn rounded(value: f64) -> f64 {
    (value * 1_000.0).round() / 1_000.0
}

/// Rates of alternating runs of book and baseline with the same input, in commands per second.
#[derive(Default)]
struct Runs {
    book: Vec<f64>,
    baseline: Vec<f64>,
}

impl Runs {
    fn run_pair(&mut self, prepared: &PreparedFlow, flow: &Flow, feed: Feed) -> Result<(), String> {
        self.book.push(run_book(prepared, feed));
        self.baseline.push(run_baseline(flow, feed)?);
        Ok(())
    }
}

fn measure(flow: &Flow, plot: Option<&Path>) -> Result<Value, Box<dyn Error>> {
    let prepared = PreparedFlow::new(flow);
    let (mut ring, mut stream) = (Runs::default(), Runs::default());
    for _ in 0..RUNS {
        ring.run_pair(&prepared, flow, Feed::Ring)?;
        stream.run_pair(&prepared, flow, Feed::Stream)?;
    }
    let clock = Clock::new();
    let (latency, bytes) = time_book(&clock, &prepared);
    let baseline_latency = time_baseline(&clock, flow);
    if let Some(path) = plot {
        let title = format!(
            "Service time of one command, {} book",
            flow.header.profile_name()
        );
        let curves = [
            Curve::new("book", &latency.0, 10.0),
            Curve::new("baseline", &baseline_latency.0, 10.0),
        ];
        std::fs::write(path, plot::svg(&title, "ns", &curves))
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let (best, baseline_best) = (highest(&ring.book), highest(&ring.baseline));
    let (ops, baseline_ops) = (benches::median(ring.book), benches::median(ring.baseline));
    let (streamed, baseline_streamed) = (
        benches::median(stream.book),
        benches::median(stream.baseline),
    );
    let header = &flow.header;
    Ok(json!({
        "load": {
            "profile": header.profile_name(),
            "seed": header.seed,
            "prefill": header.prefill,
            "commands": header.timed,
            "resting_mean": header.resting_mean,
            "levels_mean": header.levels_mean,
            "threads": 1,
            "runs": RUNS,
            "batch": BATCH,
            "ring": EVENTS,
            "fed": "book and baseline: from a ring; streamed: from an array of the whole input",
        },
        "ops_per_s": ops.round(),
        "best_ops_per_s": best.round(),
        "streamed_ops_per_s": streamed.round(),
        "p50_ns": latency.ns(0.5),
        "p99_ns": latency.ns(0.99),
        "p999_ns": latency.ns(0.999),
        "trades": prepared.result.trades,
        "quantity": prepared.result.quantity,
        "tape_ok": prepared.tape_ok(flow),
        "stp_checks": prepared.result.stp_checks,
        "bytes_per_order": (bytes * 10.0).round() / 10.0,
        "floor": {
            "ops_per_s": baseline_ops.round(),
            "best_ops_per_s": baseline_best.round(),
            "streamed_ops_per_s": baseline_streamed.round(),
            "p50_ns": baseline_latency.ns(0.5),
            "p99_ns": baseline_latency.ns(0.99),
            "p999_ns": baseline_latency.ns(0.999),
        },
        "ratio": rounded(ops / baseline_ops),
        "ratio_of_best": rounded(best / baseline_best),
        "ratio_streamed": rounded(streamed / baseline_streamed),
    }))
}

#[cfg(feature = "peers")]
fn peers(flow: &Flow) -> Result<Value, Box<dyn Error>> {
    let peers = [
        benches::peers::matchcore(flow, RUNS),
        benches::peers::orderbook_rs(flow),
    ];
    let rows = peers.map(|peer| {
        json!({
            "name": peer.name,
            "ops_per_s": peer.ops_per_s.round(),
            "commands": peer.commands,
            "trades": peer.trades,
            "quantity": peer.quantity,
            "tape_ok": peer.tape_ok,
        })
    });
    Ok(json!(rows))
}

#[cfg(not(feature = "peers"))]
fn peers(_: &Flow) -> Result<Value, Box<dyn Error>> {
    Err("built without peers: cargo run --release -p benches --features peers --bin flow".into())
}

/// Writes a file of generated flow.
fn write_flow(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [shape, seed, commands, file] = arguments else {
        return Err(USAGE.into());
    };
    let shape = match shape.as_str() {
        "single" => Shape::SINGLE,
        "deep" => Shape::DEEP,
        other => return Err(format!("unknown profile {other}; {USAGE}").into()),
    };
    let seed = seed
        .parse()
        .map_err(|e| format!("seed {seed}: {e}; {USAGE}"))?;
    let commands = commands
        .parse()
        .map_err(|e| format!("commands {commands}: {e}; {USAGE}"))?;
    let flow = generate(shape, seed, commands);
    std::fs::write(file, flow.write()).map_err(|e| format!("{file}: {e}"))?;
    let header = &flow.header;
    println!(
        "{file}: {} records after a prefill of {}, {} trades, tape {:016x}",
        header.timed, header.prefill, header.trades, header.tape
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, rest @ ..] = arguments.as_slice()
        && first == "--generate"
    {
        return write_flow(rest);
    }
    let (mut file, mut plot) = (None, None);
    let (mut as_json, mut with_peers) = (false, false);
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--json" => as_json = true,
            "--peers" => with_peers = true,
            "--plot" => plot = Some(PathBuf::from(rest.next().ok_or(USAGE)?)),
            other if !other.starts_with('-') && file.is_none() => file = Some(argument),
            other => return Err(format!("unknown argument {other}; {USAGE}").into()),
        }
    }
    let file = file.ok_or(USAGE)?;
    let bytes = std::fs::read(&file).map_err(|e| format!("{file}: {e}"))?;
    let flow = Flow::read(&bytes).map_err(|e| format!("{file}: {e}"))?;
    drop(bytes);
    let mut result = measure(&flow, plot.as_deref())?;
    if with_peers {
        result["peers"] = peers(&flow)?;
    }
    if as_json {
        println!("{result:#}");
    } else {
        print_text(&result);
    }
    if result["tape_ok"] != Value::Bool(true) {
        return Err("the tape differs from the file's".into());
    }
    Ok(())
}

fn millions(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0) / 1e6
}

fn print_text(result: &Value) {
    println!("load      {}", result["load"]);
    println!(
        "book      {:.2} M/s (best {:.2}, streamed {:.2}), p50 {} p99 {} p99.9 {} ns, {} bytes per order",
        millions(&result["ops_per_s"]),
        millions(&result["best_ops_per_s"]),
        millions(&result["streamed_ops_per_s"]),
        result["p50_ns"],
        result["p99_ns"],
        result["p999_ns"],
        result["bytes_per_order"],
    );
    let baseline = &result["floor"];
    println!(
        "baseline  {:.2} M/s (best {:.2}, streamed {:.2}), p50 {} p99 {} p99.9 {} ns; \
        book / baseline {} (of the best runs {}, streamed {})",
        millions(&baseline["ops_per_s"]),
        millions(&baseline["best_ops_per_s"]),
        millions(&baseline["streamed_ops_per_s"]),
        baseline["p50_ns"],
        baseline["p99_ns"],
        baseline["p999_ns"],
        result["ratio"],
        result["ratio_of_best"],
        result["ratio_streamed"],
    );
    println!(
        "tape      {} trades, {} lots, tape ok: {}, self-trade checks {}",
        result["trades"], result["quantity"], result["tape_ok"], result["stp_checks"],
    );
    for peer in result["peers"].as_array().into_iter().flatten() {
        println!(
            "peer      {}: {:.2} M/s, {} trades, tape ok: {}",
            peer["name"].as_str().unwrap_or_default(),
            millions(&peer["ops_per_s"]),
            peer["trades"],
            peer["tape_ok"],
        );
    }
}
