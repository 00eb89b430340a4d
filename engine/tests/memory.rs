//! Resident memory of books. In a process of its own, so that other tests are not counted.
#![cfg(target_os = "linux")]

mod support;

use std::hint::black_box;
use std::time::{Duration, Instant};

use engine::{Book, BookConfig};
use support::*;
use types::command::{Cancel, Command};
use types::{CancelReason, Envelope, Id128, Side, Ticks};

/// The platform's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.unwrap().parse().unwrap()
}

/// A book with capacity for every order of a default node, and a band wider than any window.
fn book() -> Book {
    let config = BookConfig {
        orders: 1 << 20,
        ..BookConfig::default()
    };
    Book::new(spec_with_band(1, Ticks::ORDER_MAX.0), config)
}

/// Uses memory and frees it. Returns once the system has it back: the allocator must not zero it
/// for a book by writing it.
fn use_memory() {
    const USED: usize = 256 << 20;
    const LEFT_KIB: u64 = 32 << 10;
    const WAIT: Duration = Duration::from_secs(60);
    let most = resident_kib() + LEFT_KIB;
    drop(black_box(vec![1_u8; USED]));
    let freed = Instant::now();
    while resident_kib() > most {
        assert!(freed.elapsed() < WAIT, "the allocator keeps free memory");
        // The allocator returns memory when it is called.
        drop(black_box(vec![1_u8; 1 << 20]));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Places an order at each page of a book's price window and cancels it, up to `at_a_time` of them
/// at a time. Returns the growth of the resident memory.
fn kib_of_a_walk(at_a_time: usize) -> u64 {
    const PRICES_PER_PAGE: i64 = 256;
    let mut runner = Runner::new(book());
    // The orders outside make the window as wide as it gets.
    for (slot, price) in [(1, 500_000), (2, 503_000), (3, 560_000)] {
        runner.apply(Command::New(limit(slot, Side::Sell, price, 1)));
    }
    let before = resident_kib();
    let pages: Vec<i64> = (1..499_000 / PRICES_PER_PAGE).collect();
    for some in pages.chunks(at_a_time) {
        let order = |(at, page): (usize, &i64)| {
            let mut bid = limit(4 + at as u32, Side::Buy, page * PRICES_PER_PAGE, 1);
            bid.handle.generation = *page as u32;
            bid
        };
        let bids: Vec<_> = some.iter().enumerate().map(order).collect();
        let cancels = bids.iter().map(|bid| {
            Command::Cancel(Cancel {
                handle: bid.handle,
                instrument: bid.instrument,
                user: bid.user,
                session: bid.session,
                reason: CancelReason::UserRequest,
                client_seq: 0,
                key_hash: Id128::NONE,
            })
        });
        for command in bids.iter().copied().map(Command::New).chain(cancels) {
            runner.sequence = runner.sequence.next();
            let envelope = Envelope {
                sequence: runner.sequence,
                time_ns: runner.time_ns,
                received_ns: runner.time_ns,
                command,
            };
            // Not kept: the events would be memory too.
            apply(&mut runner.book, &envelope, &mut Tape::default());
        }
    }
    // As an idle thread does.
    runner.book.release_unused();
    resident_kib().saturating_sub(before)
}

/// Slots are shared by the whole node. A quiet book must not use memory for other books' slots, nor
/// an idle book for its capacity.
#[test]
fn a_book_costs_what_its_own_orders_touch() {
    const LATE: u64 = 4;
    const IDLE: u64 = 3_000;
    const QUIET: u32 = 64;
    const MOST_KIB: u64 = 256;

    use_memory();
    let before = resident_kib();
    let late: Vec<_> = (0..LATE).map(|_| book()).collect();
    let each = (resident_kib().saturating_sub(before)) / LATE;
    assert!(each <= MOST_KIB, "{each} KiB per book of a used process");

    let before = resident_kib();
    let idle: Vec<_> = (0..IDLE).map(|_| book()).collect();
    let each = (resident_kib() - before) / IDLE;
    assert!(each <= MOST_KIB, "{each} KiB per idle book");

    let before = resident_kib();
    let quiet: Vec<_> = (0..QUIET)
        .map(|at| {
            let mut runner = Runner::new(book());
            let mut slot = (1 << 20) - 1 - at;
            for (side, price) in [(Side::Buy, 10_000), (Side::Sell, 10_010)] {
                runner.apply(Command::New(limit(slot, side, price, 1)));
                slot /= 2;
            }
            runner
        })
        .collect();
    let each = (resident_kib() - before) / u64::from(QUIET);
    assert!(each <= MOST_KIB, "{each} KiB per book of two orders");
    drop((late, idle, quiet));

    // Each walk touches 7 MiB of levels.
    for at_a_time in [1, 700, 5_000] {
        let walk = kib_of_a_walk(at_a_time);
        assert!(
            walk <= 5 * MOST_KIB,
            "{walk} KiB after a walk, {at_a_time} at a time"
        );
    }
}
