//! Compares the journal with a bare append of the same bytes: `cargo run --release -p benches --bin
//! journal -- [--json] [--dir DIR]`.
//!
//! Load: one thread creates records and appends them in batches of 4 KiB, 64 KiB and 1 MiB, as
//! frames of 64 and of 128 bytes, header and checksum included. The bare append copies records of
//! the same size into one aligned buffer and writes it with `O_DIRECT | O_DSYNC` to a file of
//! zeros, without frame, checksum or second thread. Both run alternately in one folder, five times.
//! Ratios are medians of the five. A run takes at most 350 ms. It ends earlier after 128 MiB of the
//! bare append, 64 MiB of the journal's throughput or 32 MiB of its latency.
//!
//! Throughput is measured with one batch being written, one flushed and one being filled. Latency
//! is measured at window 1: from the first record of a batch until the commit position has passed
//! the batch, for the bare append from the first copy until the write has returned. No run reaches
//! the next segment. `sustained` measures the cost of segments, with preallocated ones of 16 MiB.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use hdrhistogram::Histogram;
use journal::aligned::Buffer;
use journal::frame::{HEADER_BYTES, MARK_BYTES};
use journal::{Appender, Commit, Config, FileStorage, FrameKind, Journal, Mode, Stats};
use rustix::fs::OFlags;
use serde_json::{Value, json};

const RUNS: usize = 5;
const RUN_TIME: Duration = Duration::from_millis(350);
const RUN_BYTES: usize = 128 << 20;
/// A run ends before the segment is half full, when the journal would create the next one.
const SEGMENT_BYTES: u64 = (RUN_BYTES as u64) * 2 + (8 << 20);
const BATCHES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
const RECORDS: [usize; 2] = [64, 128];
const SUSTAINED: Duration = Duration::from_secs(2);

/// Compares the journal with a bare append of the same bytes.
#[derive(Parser)]
struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Folder to write in; a temporary folder is created there and removed.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
}

/// Result of one run.
struct Run {
    records_per_s: f64,
    bytes_per_s: f64,
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("valid bounds")
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Baseline: one buffer, one file, one write at a time.
struct Baseline {
    file: File,
    path: PathBuf,
    buffer: Buffer,
}

impl Baseline {
    fn new(dir: &Path) -> std::io::Result<Self> {
        let path = dir.join("bare.dat");
        let file = File::create(&path)?;
        let zeros = vec![0; 1 << 20];
        for at in 0..RUN_BYTES / zeros.len() {
            file.write_all_at(&zeros, (at * zeros.len()) as u64)?;
        }
        file.sync_all()?;
        let flags = OFlags::DIRECT | OFlags::DSYNC;
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(flags.bits().cast_signed());
        Ok(Self {
            file: options.open(&path)?,
            path,
            buffer: Buffer::default(),
        })
    }

    fn run(
        &mut self,
        batch: usize,
        record: usize,
        latency: &mut Histogram<u64>,
    ) -> std::io::Result<Run> {
        let mut source = vec![7u8; record];
        self.buffer.resize(batch);
        let (start, mut offset, mut records) = (Instant::now(), 0, 0u64);
        while start.elapsed() < RUN_TIME && offset + batch <= RUN_BYTES {
            let began = Instant::now();
            for place in self.buffer.bytes_mut().chunks_exact_mut(record) {
                source[0] = source[0].wrapping_add(1);
                place.copy_from_slice(&source);
                records += 1;
            }
            self.file.write_all_at(self.buffer.bytes(), offset as u64)?;
            latency.saturating_record(nanos(began));
            offset += batch;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Run {
            records_per_s: records as f64 / seconds,
            bytes_per_s: offset as f64 / seconds,
        })
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            eprintln!("{}: {error}", self.path.display());
        }
    }
}

/// A journal in its own folder, and its appender.
struct JournalRun {
    journal: Journal,
    appender: Appender,
    commit: Commit,
    sequence: u64,
    payload: Vec<u8>,
    batch_records: u64,
    dir: PathBuf,
}

impl JournalRun {
    fn new(
        dir: &Path,
        segment_bytes: u64,
        batch: usize,
        record: usize,
    ) -> Result<Self, Box<dyn Error>> {
        let dir = dir.join("journal");
        let storage = FileStorage::new(&dir, true)?;
        let config = Config {
            segment_bytes,
            ..Config::default()
        };
        let journal = Journal::open(Arc::new(storage), config, |_| Ok(()))?;
        Ok(Self {
            appender: journal.appender(),
            commit: journal.commit(),
            journal,
            sequence: 0,
            payload: vec![7; record - HEADER_BYTES],
            batch_records: ((batch - MARK_BYTES) / record) as u64,
            dir,
        })
    }

    fn append_batch(&mut self) {
        for _ in 0..self.batch_records {
            self.sequence += 1;
            self.payload[0] = self.payload[0].wrapping_add(1);
            self.appender.append(
                FrameKind::Command,
                true,
                self.sequence,
                self.sequence,
                &self.payload,
            );
        }
    }

    /// Spins until the sequence is durable.
    fn wait(&self, sequence: u64) -> Result<(), Box<dyn Error>> {
        while self.commit.position() < sequence {
            if let Some(failure) = self.commit.failure() {
                return Err(failure.into());
            }
            for _ in 0..64 {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    /// Appends for `time` or until `bytes` are written, with one batch being written, one flushed
    /// and one being filled.
    fn throughput(&mut self, time: Duration, bytes: u64) -> Result<Run, Box<dyn Error>> {
        let (start, before) = (Instant::now(), self.journal.stats().written_bytes);
        let first = self.sequence;
        while start.elapsed() < time && self.journal.stats().written_bytes - before < bytes {
            self.append_batch();
            // Batch n is filled. Waits until n-2 is durable, so that the writer writes n-1 when n
            // is flushed.
            self.wait(self.sequence.saturating_sub(2 * self.batch_records))?;
            self.appender.flush();
        }
        self.wait(self.sequence)?;
        let seconds = start.elapsed().as_secs_f64();
        let written = self.journal.stats().written_bytes - before;
        Ok(Run {
            records_per_s: (self.sequence - first) as f64 / seconds,
            bytes_per_s: written as f64 / seconds,
        })
    }

    fn latency(&mut self, latency: &mut Histogram<u64>) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        let before = self.journal.stats().written_bytes;
        while start.elapsed() < RUN_TIME
            && self.journal.stats().written_bytes - before < RUN_BYTES as u64 / 4
        {
            let began = Instant::now();
            self.append_batch();
            self.appender.flush();
            self.wait(self.sequence)?;
            latency.saturating_record(nanos(began));
        }
        Ok(())
    }

    fn finish(self) -> std::io::Result<Stats> {
        let stats = self.journal.stats();
        drop(self.appender);
        self.journal.close();
        std::fs::remove_dir_all(&self.dir)?;
        Ok(stats)
    }
}

fn quantiles(latency: &Histogram<u64>) -> Value {
    let at = |quantile| latency.value_at_quantile(quantile);
    json!({ "p50_ns": at(0.5), "p99_ns": at(0.99), "p999_ns": at(0.999), "max_ns": latency.max() })
}

fn row(dir: &Path, batch: usize, record: usize) -> Result<Value, Box<dyn Error>> {
    let mut latencies = [histogram(), histogram()];
    let [bare_latency, our_latency] = &mut latencies;
    let (mut bare_runs, mut our_runs, mut bytes) =
        (Vec::new(), Vec::new(), (Vec::new(), Vec::new()));
    let mut ratios = Vec::new();
    let mut mode = Mode::Direct;
    for _ in 0..RUNS {
        let bare = Baseline::new(dir)?.run(batch, record, bare_latency)?;
        let mut ours = JournalRun::new(dir, SEGMENT_BYTES, batch, record)?;
        let run = ours.throughput(RUN_TIME, RUN_BYTES as u64 / 2)?;
        ours.latency(our_latency)?;
        mode = ours.finish()?.mode;
        ratios.push(run.records_per_s / bare.records_per_s);
        bare_runs.push(bare.records_per_s);
        our_runs.push(run.records_per_s);
        bytes.0.push(bare.bytes_per_s);
        bytes.1.push(run.bytes_per_s);
    }
    let mut bare = quantiles(bare_latency);
    bare["records_per_s"] = json!(benches::median(bare_runs).round());
    bare["mb_per_s"] = json!((benches::median(bytes.0) / 1e6).round());
    let mut ours = quantiles(our_latency);
    ours["records_per_s"] = json!(benches::median(our_runs).round());
    ours["mb_per_s"] = json!((benches::median(bytes.1) / 1e6).round());
    Ok(json!({
        "batch_bytes": batch,
        "record_bytes": record,
        "mode": mode.name(),
        "bare": bare,
        "journal": ours,
        "ratio": (benches::median(ratios) * 1_000.0).round() / 1_000.0,
    }))
}

/// Throughput over consecutive segments of the default size.
fn sustained(dir: &Path) -> Result<Value, Box<dyn Error>> {
    let segment_bytes = Config::default().segment_bytes;
    let mut ours = JournalRun::new(dir, segment_bytes, 256 << 10, 128)?;
    let run = ours.throughput(SUSTAINED, u64::MAX)?;
    let stats = ours.finish()?;
    Ok(json!({
        "segment_bytes": segment_bytes,
        "batch_bytes": 256 << 10,
        "record_bytes": 128,
        "records_per_s": run.records_per_s.round(),
        "mb_per_s": (run.bytes_per_s / 1e6).round(),
        "segments": stats.segments,
        "segment_waits": stats.segment_waits,
    }))
}

fn print_row(row: &Value) {
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    let side = |side: &Value| {
        let us = |name: &str| number(&side[name]) / 1e3;
        format!(
            "{:>10.3} M/s {:>6} MB/s  {:>6.0} / {:>6.0} / {:>6.0} us",
            number(&side["records_per_s"]) / 1e6,
            number(&side["mb_per_s"]),
            us("p50_ns"),
            us("p99_ns"),
            us("p999_ns")
        )
    };
    println!(
        "{:>5} KiB x {:>3} B | bare {} | journal ({}) {} | {:.3}",
        number(&row["batch_bytes"]) / 1024.0,
        number(&row["record_bytes"]),
        side(&row["bare"]),
        row["mode"].as_str().unwrap_or_default(),
        side(&row["journal"]),
        number(&row["ratio"])
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let dir = tempfile::tempdir_in(&args.dir)?;
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    if !args.json {
        println!("records framed and durable; latency p50 / p99 / p99.9 of a batch; {cores} cores");
    }
    let mut rows = Vec::new();
    for record in RECORDS {
        for batch in BATCHES {
            let row = row(dir.path(), batch, record)?;
            if !args.json {
                print_row(&row);
            }
            rows.push(row);
        }
    }
    let sustained = sustained(dir.path())?;
    let ratios = rows.iter().filter_map(|row| row["ratio"].as_f64());
    let ratio_min = ratios.fold(f64::INFINITY, f64::min);
    if args.json {
        let report = json!({
            "load": "batches of 4 KiB, 64 KiB and 1 MiB of 64- and 128-byte frames, one appender, one disk",
            "cores": cores,
            "runs": RUNS,
            "rows": rows,
            "ratio_min": ratio_min,
            "sustained": sustained,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("sustained over segments: {sustained}");
        println!("smallest ratio {ratio_min:.3}");
    }
    Ok(())
}
