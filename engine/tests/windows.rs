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
