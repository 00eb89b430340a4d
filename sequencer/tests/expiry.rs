//! Expiry of orders with a date: one book and a bounded number of orders per command, and for the
//! dates of one millisecond no more commands than that takes.

mod desk;

use std::sync::Arc;
use std::time::Instant;

use admission::{NewRequest, Request};
use desk::{Desk, HANG, START_NS, Time, config, done, in_time, open_desk, start};
use journal::fault::MemoryStorage;
use sequencer::{Backlog, Core, InlineNode, Layout, Reply};
use types::{CancelReason, Command, Event, Side, TimeInForce};

const STEP_NS: u64 = 1_000_000;

/// A sell of one lot that expires `after_ns` after the start.
fn dated(desk: &Desk, after_ns: u64) -> NewRequest {
    NewRequest {
        time_in_force: TimeInForce::Gtd,
        expire_at_ns: START_NS + after_ns,
        ..desk.order(0, Side::Sell, 10_000, 1)
    }
}

/// A node that the test polls, with one instrument.
async fn inline_market(time: &Time) -> (InlineNode, Desk) {
    let mut config = config(time);
    config.layout = Layout::Fused;
    let mut node = InlineNode::volatile(config, Arc::new(Backlog::default()));
    let (opening, since) = (tokio::spawn(open_desk(node.port(), 1)), Instant::now());
    while !opening.is_finished() {
        assert!(since.elapsed() < HANG, "the market does not open");
        // The task runs on this thread too.
        tokio::task::yield_now().await;
        while node.poll() {}
    }
    (node, opening.await.expect("no panic"))
}

fn submit(node: &mut InlineNode, order: NewRequest) {
    let submitted = node.port().submit(Request::New(order), Reply::None);
    submitted.expect("the queue has room");
    while node.poll() {}
}

fn read<T: Send + 'static>(
    node: &mut InlineNode,
    read: impl FnOnce(&Core) -> T + Send + 'static,
) -> T {
    let (tx, rx) = std::sync::mpsc::channel();
    let inspection = move |core: &Core| drop(tx.send(read(core)));
    let inspected = node.port().inspect_with(Box::new(inspection));
    inspected.expect("the queue has room");
    while node.poll() {}
    rx.try_recv().expect("inspected")
}

fn resting(core: &Core) -> u32 {
    core.books().map(engine::Book::resting).sum()
}

#[tokio::test]
async fn an_expiry_in_one_book_leaves_the_other_books_untouched() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
        let mut config = config(&time);
        config.layout = layout;
        let handle = start(config, &storage);
        let desk = open_desk(handle.port(), 3).await;
        let [first, second, third] = desk.instruments[..] else {
            panic!("three instruments");
        };
        for instrument in [first, third] {
            let order = NewRequest {
                instrument,
                ..desk.order(0, Side::Sell, 10_000, 1)
            };
            done(&desk.port, Request::New(order)).await;
        }
        let order = NewRequest {
            instrument: second,
            ..dated(&desk, 5 * STEP_NS)
        };
        let placed = done(&desk.port, Request::New(order)).await;
        let others = move |core: &Core| {
            let others = [first, third].map(|ix| core.book(ix).expect("a book"));
            others.map(|book| (book.sequence(), book.event_number()))
        };
        let before = desk.port.inspect(others).await;

        time.advance_ms(5);
        let mut reader = handle.reader(placed.command.sequence);
        let record = in_time("the expiry", reader.next())
            .await
            .expect("a record");
        let Command::ExpireOrders(expire) = record.command.command else {
            panic!("{layout:?}: {record:?}");
        };
        assert_eq!(expire.instrument, second, "{layout:?}");
        let [event] = &record.events[..] else {
            panic!("{layout:?}: {record:?}");
        };
        assert_eq!(event.instrument, second);
        assert!(
            matches!(event.event, Event::Cancelled(c) if c.reason == CancelReason::Expired),
            "{layout:?}: {event:?}"
        );
        assert_eq!(desk.port.inspect(others).await, before, "{layout:?}");
        let last = desk.port.inspect(Core::sequence).await;
        assert_eq!(last, Ok(record.command.sequence), "{layout:?}: one command");
    }
}

/// One member spaces the dates of its orders, so that none expires with another.
#[tokio::test]
async fn a_thousand_expiries_100_us_apart_take_a_hundred_commands() {
    const ORDERS: u64 = 1_000;
    const APART_NS: u64 = 100_000;
    let time = Time::new();
    let (mut node, desk) = inline_market(&time).await;
    for number in 1..=ORDERS {
        submit(&mut node, dated(&desk, number * APART_NS));
    }
    assert_eq!(u64::from(read(&mut node, resting)), ORDERS);
    let before = read(&mut node, Core::sequence);
    for number in 1..=ORDERS {
        time.advance_ns(APART_NS);
        while node.poll() {}
        let now_ns = START_NS + number * APART_NS;
        let next_ns = read(&mut node, Core::next_expiry_ns);
        assert!(
            next_ns.is_none_or(|next_ns| now_ns < next_ns + STEP_NS),
            "order {number} stays for more than a millisecond"
        );
    }
    assert_eq!(read(&mut node, resting), 0);
    let commands = read(&mut node, Core::sequence).get() - before.get();
    assert_eq!(commands, ORDERS * APART_NS / STEP_NS);
}

/// The book itself ends an expired order before it matches.
#[tokio::test]
async fn an_order_does_not_trade_between_its_expiry_and_its_command() {
    let time = Time::new();
    let (mut node, desk) = inline_market(&time).await;
    submit(&mut node, dated(&desk, STEP_NS / 10));
    time.advance_ns(STEP_NS / 2);
    while node.poll() {}
    assert_eq!(read(&mut node, resting), 1, "its command is not due yet");
    let buy = desk.order(1, Side::Buy, 10_000, 1);
    submit(&mut node, buy);
    assert_eq!(read(&mut node, Core::trades), 0);
    let is_bid = |core: &Core| core.books().all(|book| book.best(Side::Buy).is_some());
    assert!(read(&mut node, is_bid));
    assert_eq!(read(&mut node, resting), 1, "the buy alone");
    // Nothing is left to expire.
    let before = read(&mut node, Core::sequence);
    time.advance_ms(5);
    while node.poll() {}
    assert_eq!(read(&mut node, Core::sequence), before);
}

/// Orders that expire together are cancelled in slices: a request of another member does not wait
/// for all of them.
// rows: R341
#[tokio::test]
async fn r341_requests_get_in_between_the_slices_of_an_expiry() {
    const ORDERS: u32 = 1_000;
    const SLICE: u32 = 256;
    let time = Time::new();
    let (mut node, desk) = inline_market(&time).await;
    for _ in 0..ORDERS {
        submit(&mut node, dated(&desk, STEP_NS));
    }
    let before = read(&mut node, Core::sequence);
    time.advance_ms(1);
    let (tx, rx) = std::sync::mpsc::channel();
    let inspection = move |core: &Core| tx.send(resting(core)).expect("the test waits");
    let inspected = node.port().inspect_with(Box::new(inspection));
    inspected.expect("the queue has room");
    node.poll();
    assert_eq!(rx.try_recv(), Ok(ORDERS - SLICE), "after one round");
    while node.poll() {}
    assert_eq!(read(&mut node, resting), 0);
    let commands = read(&mut node, Core::sequence).get() - before.get();
    assert_eq!(commands, u64::from(ORDERS.div_ceil(SLICE)));
}

#[tokio::test]
async fn an_engine_of_its_own_cancels_every_order_that_expires() {
    const ORDERS: usize = 600;
    for layout in [Layout::Shared, Layout::Pinned] {
        let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
        let mut config = config(&time);
        config.layout = layout;
        let handle = start(config, &storage);
        let desk = open_desk(handle.port(), 1).await;
        let mut last = None;
        for _ in 0..ORDERS {
            last = Some(done(&desk.port, Request::New(dated(&desk, STEP_NS))).await);
        }
        let placed = last.expect("orders").command.sequence;
        time.advance_ms(1);
        let (mut reader, mut slices) = (handle.reader(placed), Vec::new());
        while slices.iter().sum::<usize>() < ORDERS {
            let record = in_time("an expiry", reader.next()).await.expect("a record");
            assert!(matches!(record.command.command, Command::ExpireOrders(_)));
            slices.push(record.events.len());
        }
        assert_eq!(slices, [256, 256, 88], "{layout:?}");
        assert_eq!(desk.port.inspect(resting).await, Ok(0), "{layout:?}");
    }
}
