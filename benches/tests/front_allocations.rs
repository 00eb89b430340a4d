//! In the steady state the thread that serves trading sessions makes at most 1.25 times the heap
//! allocations of an echo of the same bytes over the same transport. The platform's own code makes
//! none: those beyond the echo's are below a hundredth of one per request.
//!
//! This binary has one test, since its allocator counts every allocation of the process.

#[allow(dead_code)]
#[path = "../../gateway/tests/boundary/doubles.rs"]
mod doubles;
#[allow(dead_code)]
#[path = "../../gateway/tests/boundary/world.rs"]
mod world;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use benches::wire::echo;
use client::Trust;
use client::spinning::Connection;
use testkit::PATIENCE;
use types::Side;
use wire::{Cancel, ClientMessage};
use world::*;

/// Rows of the table. Each thread has one.
const THREADS: usize = 512;
const NO_ROW: usize = usize::MAX;

static SEEN: AtomicUsize = AtomicUsize::new(0);
static IDS: [AtomicI32; THREADS] = [const { AtomicI32::new(0) }; THREADS];
static COUNTS: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];

thread_local! {
    static ROW: Cell<usize> = const { Cell::new(NO_ROW) };
}

/// Counts allocations per thread. Threads beyond the table share its last row.
struct CountingAllocator;

fn count() {
    // A thread may still allocate after its thread-local values are destroyed.
    let _ = ROW.try_with(|row| {
        if row.get() == NO_ROW {
            row.set(SEEN.fetch_add(1, Relaxed).min(THREADS - 1));
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            IDS[row.get()].store(id, Relaxed);
        }
        COUNTS[row.get()].fetch_add(1, Relaxed);
    });
}

// SAFETY: passes every call to the system's allocator. `count` does not allocate.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the same contract.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Allocations so far of the live thread with this name.
fn thread_allocations(wanted: &str) -> Option<u64> {
    (0..SEEN.load(Relaxed).min(THREADS)).find_map(|row| {
        let id = IDS[row].load(Relaxed);
        let name = std::fs::read_to_string(format!("/proc/self/task/{id}/comm")).ok()?;
        (name.trim() == wanted).then(|| COUNTS[row].load(Relaxed))
    })
}

/// Requests before the count, which fill the session's window.
const WARM_UP: u64 = 3_000;
/// Requests per counted run.
const COUNTED: u64 = 3_000;
/// Counted runs. The least count is compared, since other work on the machine adds QUIC's packets.
const RUNS: u64 = 5;
/// Allocations per request beyond the echo's at which the front's own code counts as allocating.
/// Undisturbed, the two differ by 0.002.
const OWN_MAX: f64 = 0.03;
/// Messages kept per session.
const WINDOW: usize = 2_000;
/// Bytes of a `NewOrder`.
const REQUEST_BYTES: usize = 55;
/// Bytes of `Accepted` and `OrderAck`.
const RESPONSE_BYTES: [usize; 2] = [46, 99];

/// Sends `count` requests, orders and their cancels in turn, with one request in flight.
fn trade(connection: &mut Connection, from: u64, count: u64) {
    for number in from..from + count {
        let id = number.div_ceil(2);
        let request: ClientMessage = match number % 2 {
            1 => wire_order(id, Side::Buy, 1_000, 1).into(),
            _ => {
                let client_order_id = id;
                let engine_order_id = 0;
                Cancel {
                    client_order_id,
                    engine_order_id,
                }
                .into()
            }
        };
        let client_seq = connection.send(0, &request).unwrap();
        let sent = Instant::now();
        while !std::iter::from_fn(|| connection.recv())
            .any(|report| Some(report.message.answers()) == client_seq)
        {
            connection.poll().unwrap();
            assert!(
                sent.elapsed() < PATIENCE,
                "timed out waiting for the answer to request {number}"
            );
        }
    }
}

/// Allocations so far of the thread that serves the sessions. With few cores that is the hot
/// thread.
fn front_allocations() -> u64 {
    let front = thread_allocations("front").or_else(|| thread_allocations("hot"));
    front.expect("a thread named front or hot")
}

/// Allocations per request of the thread that serves the sessions, the minimum of the runs.
fn front_allocations_per_request(address: std::net::SocketAddr, trust: &Trust) -> f64 {
    let mut connection = Connection::connect(address, trust).unwrap();
    connection.login(0, with_money("ann", "a")).unwrap();
    trade(&mut connection, 1, WARM_UP);
    let counted = (0..RUNS).map(|run| {
        let before = front_allocations();
        trade(&mut connection, 1 + WARM_UP + run * COUNTED, COUNTED);
        front_allocations() - before
    });
    counted.min().expect("at least one run") as f64 / COUNTED as f64
}

/// Allocations so far of all other threads.
fn other_threads_allocations() -> u64 {
    let all: u64 = COUNTS.iter().map(|count| count.load(Relaxed)).sum();
    all - COUNTS[ROW.get()].load(Relaxed)
}

/// Allocations per request of the echo's server thread, the only other thread. The difference of
/// two minima excludes the handshake.
fn echo_allocations_per_request() -> f64 {
    let run = |rounds: u64| {
        let before = other_threads_allocations();
        let rounds = usize::try_from(rounds).expect("small");
        echo::run(1, REQUEST_BYTES, RESPONSE_BYTES, rounds).unwrap();
        other_threads_allocations() - before
    };
    let least = |rounds| (0..RUNS).map(|_| run(rounds)).min();
    let (few, many) = (least(WARM_UP), least(WARM_UP + COUNTED));
    let (few, many) = few.zip(many).expect("at least one run");
    // `echo::run` makes a tenth more round trips than it measures.
    (many - few) as f64 / (COUNTED as f64 * 1.1)
}

#[test]
fn the_front_allocates_no_more_than_an_echo_of_the_same_bytes() {
    let echo = echo_allocations_per_request();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unsettled();
    settings.gateway.throttle_per_s = 0;
    settings.gateway.user_throttle_per_s = 0;
    settings.gateway.order_messages_per_trade = 0;
    settings.gateway.window_messages_max = WINDOW;
    let world = runtime.block_on(async {
        let mut world = World::with(folder.path(), settings).await;
        world.user("ann", "100000", "0").await;
        world
    });
    let trust: Trust = world.gateway.fingerprint().parse().unwrap();
    let front = front_allocations_per_request(world.gateway.trading_address(), &trust);
    runtime.block_on(world.stop());
    println!("allocations per request: front {front:.3}, echo {echo:.3}");
    assert!(front > 0.0, "QUIC allocates");
    assert!(front <= 1.25 * echo, "front {front:.3}, echo {echo:.3}");
    assert!(
        front - echo < OWN_MAX,
        "the front's own code allocates: front {front:.3}, echo {echo:.3}"
    );
}
