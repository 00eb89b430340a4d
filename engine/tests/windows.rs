//! Price windows whose memory comes from elsewhere.

mod support;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use engine::{Book, BookConfig, Window, WindowSource};
use support::*;
use types::command::{Cancel, Command};
use types::{CancelReason, Id128, SessionIx, Side, Ticks, UserIx};

/// Has a window only when the test has put one there.
#[derive(Debug, Default)]
struct Late {
    ready: Mutex<Option<Window>>,
    requests: AtomicU32,
    returned: AtomicU32,
}

impl WindowSource for Late {
    fn take(&self, ticks: u32) -> Option<Window> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let ready = self.ready.lock().unwrap().take();
        ready.inspect(|window| assert_eq!(window.ticks(), ticks))
    }

    fn free(&self, _: Window) {
        self.returned.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_book_whose_window_comes_late_gives_the_same_results() {
    let book = || {
        let spec = spec_with_band(1, Ticks::ORDER_MAX.0);
        Book::new(spec, BookConfig::default())
    };
    let source = Arc::new(Late::default());
    let (mut plain, mut late) = (Runner::new(book()), Runner::new(book()));
    late.book.set_window_source(source.clone());
    let mut both = |command: Command| {
        let expected: Vec<_> = plain.apply(command).iter().map(|e| e.event).collect();
        let found: Vec<_> = late.apply(command).iter().map(|e| e.event).collect();
        assert_eq!(found, expected, "{command:?}");
        assert_eq!(late.book.state_hash(), plain.book.state_hash());
    };
    both(Command::New(limit(0, Side::Buy, 500_000, 1)));
    // No window is ready: these rest outside, and each asks for one.
    for number in 1..10 {
        both(Command::New(limit(
            number,
            Side::Sell,
            510_000 + i64::from(number),
            2,
        )));
    }
    assert_eq!(source.requests.load(Ordering::Relaxed), 9);
    *source.ready.lock().unwrap() = Some(Window::new(1 << 16));
    both(Command::New(limit(10, Side::Sell, 509_000, 2)));
    assert_eq!(
        source.returned.load(Ordering::Relaxed),
        1,
        "the window grew"
    );
    // Inside the wider window nothing is asked for.
    both(Command::New(limit(11, Side::Sell, 508_000, 2)));
    both(Command::Cancel(Cancel {
        handle: handle(5),
        instrument: IX,
        user: UserIx(5),
        session: SessionIx::NONE,
        reason: CancelReason::UserRequest,
        client_seq: 0,
        key_hash: Id128::NONE,
    }));
    both(Command::New(limit(12, Side::Buy, 510_009, 30)));
    assert_eq!(source.requests.load(Ordering::Relaxed), 10);
}

/// Always has a window.
#[derive(Debug, Default)]
struct Ready {
    returned: AtomicU32,
}

impl WindowSource for Ready {
    fn take(&self, ticks: u32) -> Option<Window> {
        Some(Window::new(ticks))
    }

    fn free(&self, _: Window) {
        self.returned.fetch_add(1, Ordering::Relaxed);
    }
}

/// Each replacement costs a page fault for every page that orders need again.
#[test]
fn orders_that_go_through_the_pages_of_a_window_replace_it_rarely() {
    const PRICES_PER_PAGE: i64 = 256;
    let source = Arc::new(Ready::default());
    let spec = spec_with_band(1, Ticks::ORDER_MAX.0);
    let mut runner = Runner::new(Book::new(spec, BookConfig::default()));
    runner.book.set_window_source(source.clone());
    // The orders outside make the window as wide as it gets.
    for (slot, price) in [(1, 500_000), (2, 503_000), (3, 560_000)] {
        runner.apply(Command::New(limit(slot, Side::Sell, price, 1)));
    }
    let grown = source.returned.load(Ordering::Relaxed);
    for generation in 1..20_000 {
        let page = i64::from(generation) % 1_900;
        let mut bid = limit(4, Side::Buy, (page + 1) * PRICES_PER_PAGE, 1);
        bid.handle.generation = generation;
        runner.apply(Command::New(bid));
        runner.apply(Command::Cancel(Cancel {
            handle: bid.handle,
            instrument: bid.instrument,
            user: bid.user,
            session: bid.session,
            reason: CancelReason::UserRequest,
            client_seq: 0,
            key_hash: Id128::NONE,
        }));
    }
    let replaced = source.returned.load(Ordering::Relaxed) - grown;
    assert!((1..=3).contains(&replaced), "{replaced} replacements");
    runner.book.release_unused();
    let released = source.returned.load(Ordering::Relaxed) - grown;
    assert_eq!(released, replaced + 1, "an idle thread need not wait");
    runner.book.release_unused();
    assert_eq!(source.returned.load(Ordering::Relaxed) - grown, released);
}
