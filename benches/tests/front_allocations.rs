//! Heap allocations of the thread that serves trading sessions, in the steady state: at most 1.25
//! times those of an echo of the same bytes over the same transport.
//!
//! One test alone in its binary, since every allocation of the process is counted.

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

/// Threads with a row of their own.
const THREADS: usize = 512;
const UNSEEN: usize = usize::MAX;

static SEEN: AtomicUsize = AtomicUsize::new(0);
static IDS: [AtomicI32; THREADS] = [const { AtomicI32::new(0) }; THREADS];
static COUNTS: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];

thread_local! {
    static PLACE: Cell<usize> = const { Cell::new(UNSEEN) };
}

/// Counts per thread. Threads beyond the table share its last row.
struct Counting;

fn count() {
    // A thread that ends may free and allocate after its local values are gone.
    let _ = PLACE.try_with(|place| {
        if place.get() == UNSEEN {
            place.set(SEEN.fetch_add(1, Relaxed).min(THREADS - 1));
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            IDS[place.get()].store(id, Relaxed);
        }
        COUNTS[place.get()].fetch_add(1, Relaxed);
    });
}

// SAFETY: passes every call on to the system's allocator; `count` allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations so far of the living thread with this name.
fn of_thread(wanted: &str) -> Option<u64> {
    (0..SEEN.load(Relaxed).min(THREADS)).find_map(|place| {
        let id = IDS[place].load(Relaxed);
        let name = std::fs::read_to_string(format!("/proc/self/task/{id}/comm")).ok()?;
        (name.trim() == wanted).then(|| COUNTS[place].load(Relaxed))
    })
}

/// Requests before the count and during it: the session's window is full before.
const WARM_UP: u64 = 3_000;
const COUNTED: u64 = 3_000;
/// Messages kept per session.
const WINDOW: usize = 2_000;
/// Bytes of a request, of *accepted* and of the durable answer, as `wire` has them.
const REQUEST_BYTES: usize = 55;
const RESPONSE_BYTES: [usize; 2] = [46, 99];

/// One request in flight: an order, then its cancel.
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
                "request {number} is not answered"
            );
        }
    }
}

/// Allocations so far of the thread that serves the sessions: with few cores the hot thread.
fn of_front() -> u64 {
    let front = of_thread("front").or_else(|| of_thread("hot"));
    front.expect("a thread serves sessions")
}

/// Allocations per request of the thread that serves the sessions, the least of three runs.
fn served(address: std::net::SocketAddr, trust: &Trust) -> f64 {
    let mut connection = Connection::connect(address, trust).unwrap();
    connection.login(0, with_money("ann", "a")).unwrap();
    trade(&mut connection, 1, WARM_UP);
    let counted = (0..3).map(|run| {
        let before = of_front();
        trade(&mut connection, 1 + WARM_UP + run * COUNTED, COUNTED);
        of_front() - before
    });
    counted.min().expect("three runs") as f64 / COUNTED as f64
}

/// Allocations so far of all threads but this one.
fn of_others() -> u64 {
    let all: u64 = COUNTS.iter().map(|count| count.load(Relaxed)).sum();
    all - COUNTS[PLACE.get()].load(Relaxed)
}

/// Allocations per request of a bare echo's thread, the only other one: the difference of two runs.
fn echoed() -> f64 {
    let run = |rounds: u64| {
        let before = of_others();
        let rounds = usize::try_from(rounds).expect("small");
        echo::run(1, REQUEST_BYTES, RESPONSE_BYTES, rounds).unwrap();
        of_others() - before
    };
    let (few, many) = (run(WARM_UP), run(WARM_UP + COUNTED));
    // It makes a tenth more rounds than it measures.
    (many - few) as f64 / (COUNTED as f64 * 1.1)
}

#[test]
fn the_front_allocates_no_more_than_an_echo_of_the_same_bytes() {
    let echo = echoed();
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
    let front = served(world.gateway.trading_address(), &trust);
    runtime.block_on(world.stop());
    println!("allocations per request: front {front:.3}, echo {echo:.3}");
    assert!(front > 0.0, "QUIC allocates");
    assert!(front <= 1.25 * echo, "front {front:.3}, echo {echo:.3}");
}
