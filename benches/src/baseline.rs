//! Baseline of `pipeline`: the same open loop over two rings and a thread that only echoes messages
//! of the same size. There is no admission, no book and no frame.
//!
//! With a journal, another thread writes as many bytes at the same interval to the same file
//! system, on the same cores. The measured latency is that of the machine. With a service time it
//! also contains the queueing delay of a server with that service time.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use disruptor::{BusySpin, Producer, build_single_producer};
use journal::{FileStorage, Storage, aligned::Buffer};

use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

use crate::hop::{self, Percentiles, Timer, histogram};

/// Messages per ring.
const RING: usize = 4_096;
/// Maximum due messages that a client sends before it polls, like a front that submits the requests
/// of a datagram.
pub const SENT_TOGETHER: usize = 8;
/// Bytes of a segment, like the journal's.
const SEGMENT_BYTES: u64 = 16 << 20;

/// A request of two cache lines.
type RequestMessage = [u64; 16];
/// A report of one cache line.
type ReportMessage = [u64; 8];

/// The load.
#[derive(Clone, Copy)]
pub struct Load {
    /// Messages per second.
    pub rate: u64,
    pub seconds: u64,
    /// Warm-up in seconds, not measured.
    pub warm_up: u64,
    /// Core of the echo thread.
    pub core: usize,
    /// Nanoseconds that the echo thread spins for each message.
    pub service_ns: u64,
}

/// Writes of the writer thread.
#[derive(Clone, Copy, Debug)]
pub struct Writes {
    /// Bytes per write, whole blocks.
    pub bytes: usize,
    /// Time between the starts of two writes. After a write that takes longer the next one starts
    /// at once.
    pub every: Duration,
}

impl Writes {
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({ "bytes": self.bytes, "per_s": 1.0 / self.every.as_secs_f64() })
    }
}

/// Runs the load and returns its latencies, counted from each message's due time.
///
/// The calling thread is the client; it must already be pinned to a core.
///
/// # Errors
/// The folder cannot be written.
pub fn run(load: Load, journal_writes: Option<(Writes, &Path)>) -> anyhow::Result<Percentiles> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let failed = Arc::new(AtomicU64::new(0));
    let writer = match journal_writes {
        Some((writes, dir)) => Some(spawn_writer(writes, dir, load.core, &is_stopped, &failed)?),
        None => None,
    };
    let percentiles = run_echo(load);
    is_stopped.store(true, Ordering::Relaxed);
    if let Some(writer) = writer {
        writer.join().expect("the writer panicked");
    }
    anyhow::ensure!(
        failed.load(Ordering::Relaxed) == 0,
        "the writer thread could not write"
    );
    Ok(percentiles)
}

/// Sends messages at the rate of the load and reads their echoes.
fn run_echo(load: Load) -> Percentiles {
    let (mut requests, builder) =
        build_single_producer(RING, || [0u64; 16], BusySpin).new_event_poller();
    let mut request_producer = builder.build();
    let (mut reports, builder) =
        build_single_producer(RING, || [0u64; 8], BusySpin).new_event_poller();
    let mut report_producer = builder.build();
    let total = load.rate * (load.warm_up + load.seconds);
    let other = std::thread::spawn(move || {
        hop::pin(load.core);
        let timer = Timer::start();
        let mut left = total;
        while left > 0 {
            let Ok(mut messages) = requests.poll() else {
                spin_loop();
                continue;
            };
            for message in &mut messages {
                let message: &RequestMessage = message;
                if load.service_ns > 0 {
                    let end_ns = timer.ns() + load.service_ns;
                    while timer.ns() < end_ns {}
                }
                let report: ReportMessage = message[..8].try_into().expect("the first line");
                report_producer.publish(|slot| *slot = report);
                left -= 1;
            }
        }
        // Dropping the producer closes the ring: keep it until the client has read the last report.
        report_producer
    });
    let mut times = histogram();
    let warm_up_end_ns = load.warm_up * 1_000_000_000;
    let due_ns = |number: u64| number * 1_000_000_000 / load.rate;
    let mut in_flight = VecDeque::with_capacity(RING);
    let (mut sent, mut answered, mut next_due_ns) = (0, 0, 0);
    let timer = Timer::start();
    while answered < total {
        for _ in 0..SENT_TOGETHER {
            let is_sent = sent < total
                && in_flight.len() < RING
                && timer.ns() >= next_due_ns
                && request_producer
                    .try_publish(|slot| *slot = [sent; 16])
                    .is_ok();
            if !is_sent {
                break;
            }
            in_flight.push_back(next_due_ns);
            sent += 1;
            next_due_ns = due_ns(sent);
        }
        let Ok(mut messages) = reports.poll() else {
            continue;
        };
        for _ in &mut messages {
            answered += 1;
            let Some(due_ns) = in_flight.pop_front() else {
                continue;
            };
            if due_ns >= warm_up_end_ns {
                times.saturating_record(timer.ns().saturating_sub(due_ns).max(1));
            }
        }
    }
    drop(other.join().expect("the echo panicked"));
    Percentiles::of(&times)
}

/// Starts the writer thread. Like the journal's thread it does not run on the hot core, here the
/// core of the echo thread.
fn spawn_writer(
    writes: Writes,
    dir: &Path,
    core: usize,
    is_stopped: &Arc<AtomicBool>,
    failed: &Arc<AtomicU64>,
) -> anyhow::Result<JoinHandle<()>> {
    let storage = FileStorage::new(dir, true)?;
    storage.create(1, SEGMENT_BYTES)?;
    let mut buffer = Buffer::default();
    buffer.resize(writes.bytes);
    buffer.bytes_mut().fill(7);
    let (is_stopped, failed) = (is_stopped.clone(), failed.clone());
    let room = SEGMENT_BYTES - writes.bytes as u64;
    Ok(std::thread::spawn(move || {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // With two cores the writer shares the client's.
        if cores == 2 {
            hop::pin(1 - core.min(1));
        }
        // The journal's thread also has real-time priority if the system allows it.
        let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::RoundRobin);
        let _ = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy);
        let mut offset = 0;
        let mut due = Instant::now();
        while !is_stopped.load(Ordering::Relaxed) {
            let blocks = buffer.padded(storage.block_bytes());
            let written = storage
                .write(1, offset, blocks)
                .and_then(|()| storage.sync(1));
            if written.is_err() {
                failed.fetch_add(1, Ordering::Relaxed);
                return;
            }
            offset += writes.bytes as u64;
            if offset > room {
                offset = 0;
            }
            due += writes.every;
            let now = Instant::now();
            if let Some(left) = due.checked_duration_since(now) {
                std::thread::sleep(left);
            } else {
                due = now;
            }
        }
    }))
}
