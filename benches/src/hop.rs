//! State of the machine beside a run of `pipeline`: round trip of a cache line between two cores,
//! round trip of a message over two rings, and jitter of a thread that only reads the clock.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use disruptor::{BusySpin, Producer, build_single_producer};
use hdrhistogram::Histogram;
use quanta::Clock;

/// Percentiles of a distribution of nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percentiles {
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
}

impl Percentiles {
    pub fn of(histogram: &Histogram<u64>) -> Self {
        Self {
            p50_ns: histogram.value_at_quantile(0.5),
            p99_ns: histogram.value_at_quantile(0.99),
            p999_ns: histogram.value_at_quantile(0.999),
            max_ns: histogram.max(),
        }
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "p50_ns": self.p50_ns,
            "p99_ns": self.p99_ns,
            "p999_ns": self.p999_ns,
            "max_ns": self.max_ns,
        })
    }
}

impl std::fmt::Display for Percentiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let us = |ns: u64| ns as f64 / 1e3;
        write!(
            f,
            "p50 {:.2} us, p99 {:.2} us, p99.9 {:.2} us, max {:.0} us",
            us(self.p50_ns),
            us(self.p99_ns),
            us(self.p999_ns),
            us(self.max_ns)
        )
    }
}

/// A histogram of nanoseconds, 1 ns to a minute, with three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("consistent bounds")
}

/// Nanoseconds since creation, read from the processor's counter.
///
/// Reading the system's clock would take a tenth of the client's time at a million requests per
/// second.
pub struct Timer {
    clock: Clock,
    start: u64,
}

impl Timer {
    /// Starts the timer. The first call in a process takes some milliseconds, in which it
    /// calibrates the counter with the system's clock.
    pub fn start() -> Self {
        let clock = Clock::new();
        let start = clock.raw();
        Self { clock, start }
    }

    #[inline]
    pub fn ns(&self) -> u64 {
        self.clock.delta_as_nanos(self.start, self.clock.raw())
    }
}

/// Pins the calling thread to a core. Returns false if the system refuses.
pub fn pin(core: usize) -> bool {
    core_affinity::set_for_current(core_affinity::CoreId { id: core })
}

#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

/// Measures round trips of a cache line between the calling thread and a thread on `core`.
pub fn ping_pong(core: usize, rounds: u64) -> Percentiles {
    let lines: Arc<(Line, Line)> = Arc::default();
    let echo = lines.clone();
    let other = std::thread::spawn(move || {
        pin(core);
        for round in 1..=rounds {
            while echo.0.0.load(Ordering::Acquire) != round {
                spin_loop();
            }
            echo.1.0.store(round, Ordering::Release);
        }
    });
    let (mut times, timer) = (histogram(), Timer::start());
    for round in 1..=rounds {
        let sent_ns = timer.ns();
        lines.0.0.store(round, Ordering::Release);
        while lines.1.0.load(Ordering::Acquire) != round {
            spin_loop();
        }
        times.saturating_record((timer.ns() - sent_ns).max(1));
    }
    other.join().expect("the echo panicked");
    Percentiles::of(&times)
}

/// Measures round trips of 64 bytes over a ring to a thread on `core` and over a ring back.
pub fn ring_hop(core: usize, rounds: u64) -> Percentiles {
    const CAPACITY: usize = 4_096;
    let (mut requests, builder) =
        build_single_producer(CAPACITY, || [0u64; 8], BusySpin).new_event_poller();
    let mut request_producer = builder.build();
    let (mut replies, builder) =
        build_single_producer(CAPACITY, || [0u64; 8], BusySpin).new_event_poller();
    let mut reply_producer = builder.build();
    let other = std::thread::spawn(move || {
        pin(core);
        let mut left = rounds;
        while left > 0 {
            let Ok(mut messages) = requests.poll() else {
                spin_loop();
                continue;
            };
            for message in &mut messages {
                let message = *message;
                reply_producer.publish(|slot| *slot = message);
                left -= 1;
            }
        }
        // Dropping the producer closes the ring: keep it until the caller has read the last reply.
        reply_producer
    });
    let (mut times, timer) = (histogram(), Timer::start());
    for round in 0..rounds {
        let sent_ns = timer.ns();
        request_producer.publish(|slot| *slot = [round; 8]);
        let mut is_back = false;
        while !is_back {
            match replies.poll() {
                Ok(mut messages) => is_back = (&mut messages).any(|message| message[7] == round),
                Err(_) => spin_loop(),
            }
        }
        times.saturating_record((timer.ns() - sent_ns).max(1));
    }
    drop(other.join().expect("the echo panicked"));
    Percentiles::of(&times)
}

/// Measures scheduling jitter concurrently on the caller's core and on `core`, in nanoseconds.
///
/// Jitter is the delay with which a thread that only reads the clock notices each of `rate` due
/// times per second. It shows how long the system and other processes take the core. Returns the
/// percentiles of the caller's core, then those of `core`.
pub fn jitter_probe(core: usize, rate: u64, time: Duration) -> (Percentiles, Percentiles) {
    let other = std::thread::spawn(move || {
        pin(core);
        measure_jitter(rate, time)
    });
    let own = measure_jitter(rate, time);
    (own, other.join().expect("the jitter probe panicked"))
}

fn measure_jitter(rate: u64, time: Duration) -> Percentiles {
    let mut late = histogram();
    let count = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) / 1_000 * rate / 1_000_000;
    let timer = Timer::start();
    let mut seen = 0;
    while seen < count {
        let now_ns = timer.ns();
        while seen < count
            && let Some(late_ns) = now_ns.checked_sub(seen * 1_000_000_000 / rate)
        {
            late.saturating_record(late_ns.max(1));
            seen += 1;
        }
        spin_loop();
    }
    Percentiles::of(&late)
}
