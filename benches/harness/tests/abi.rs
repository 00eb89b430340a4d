//! Calls the exported functions as the harness does, one call at a time. The report queue is full
//! at every other push.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use harness::abi::{
    Amend, BUY, CANCEL_ACK, CANCEL_REJECT, Cancel, MODIFY_ACK, MODIFY_REJECT, NewOrder, ORDER_ACK,
    Report, SELL, TRADE, Transport,
};

/// The library has one engine, so the tests run one at a time.
static ENGINE: Mutex<()> = Mutex::new(());

/// Received reports in order. The first and every second push returns 0 (queue full), so the
/// library must retry.
#[derive(Default)]
struct Queue {
    reports: Vec<Report>,
    pushes: usize,
}

#[allow(unsafe_code)]
unsafe extern "C" fn push(sink: *mut c_void, report: *const Report) -> c_int {
    // SAFETY: the sink is the `Queue` of the `Engine` under test, which only the library accesses
    // during a call, and the library passes its own report.
    let (queue, report) = unsafe { (&mut *sink.cast::<Queue>(), *report) };
    queue.pushes += 1;
    if queue.pushes % 2 == 1 {
        return 0;
    }
    queue.reports.push(report);
    1
}

/// The engine between `engine_init` and `engine_shutdown`.
struct Engine {
    queue: *mut Queue,
    sequence: u64,
    _guard: MutexGuard<'static, ()>,
}

#[allow(unsafe_code)]
impl Engine {
    fn new() -> Self {
        let guard = ENGINE.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = Box::into_raw(Box::new(Queue::default()));
        let transport = Transport {
            create: None,
            push: Some(push),
            drain: None,
            flush: None,
            destroy: None,
        };
        // SAFETY: the lock excludes other calls; `queue` lives until `drop`, after
        // `engine_shutdown`.
        unsafe { harness::engine_init(7, &raw const transport, queue.cast()) };
        Self {
            queue,
            sequence: 0,
            _guard: guard,
        }
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Takes the reports from the queue as (kind, order id, price, quantity). [`trade`] is the form
    /// of a trade.
    fn reports(&mut self) -> Vec<(u8, u64, u64, u64)> {
        // SAFETY: the library accesses the queue during its calls only, and none is in progress.
        let reports = std::mem::take(unsafe { &mut (*self.queue).reports });
        let row = |report: Report| {
            assert_eq!(
                report.sequence, self.sequence,
                "a report has the sequence of its message"
            );
            match report.kind {
                TRADE => (
                    TRADE,
                    report.price as u64 * 1_000 + u64::from(report.quantity),
                    report.maker_order_id,
                    report.taker_order_id,
                ),
                kind => (
                    kind,
                    report.order_id,
                    report.price as u64,
                    report.quantity.into(),
                ),
            }
        };
        reports.into_iter().map(row).collect()
    }

    fn new_order(
        &mut self,
        order_id: u64,
        side: u8,
        quantity: u32,
        price: i64,
        ioc: u8,
    ) -> Vec<(u8, u64, u64, u64)> {
        let message = NewOrder {
            order_id,
            sequence: self.next_sequence(),
            price,
            quantity,
            side,
            ioc,
            reserved: [0; 2],
        };
        // SAFETY: `self` holds the lock, and the message outlives the call.
        unsafe { harness::engine_on_new_order(&raw const message) };
        self.reports()
    }

    fn rest(&mut self, order_id: u64, side: u8, quantity: u32, price: i64) {
        let reports = self.new_order(order_id, side, quantity, price, 0);
        assert_eq!(
            reports,
            [(ORDER_ACK, order_id, price as u64, quantity.into())]
        );
    }

    fn cancel(&mut self, order_id: u64) -> Vec<(u8, u64, u64, u64)> {
        let message = Cancel {
            order_id,
            sequence: self.next_sequence(),
        };
        // SAFETY: as in `new_order`.
        unsafe { harness::engine_on_cancel(&raw const message) };
        self.reports()
    }

    fn amend(
        &mut self,
        order_id: u64,
        side: u8,
        quantity: u32,
        price: i64,
    ) -> Vec<(u8, u64, u64, u64)> {
        let message = Amend {
            order_id,
            sequence: self.next_sequence(),
            price,
            quantity,
            side,
            reserved: [0; 3],
        };
        // SAFETY: as in `new_order`.
        unsafe { harness::engine_on_modify(&raw const message) };
        self.reports()
    }

    fn best_bid_and_ask(&self) -> (i64, i64) {
        // SAFETY: `self` holds the lock.
        unsafe {
            (
                harness::engine_query_best_bid(),
                harness::engine_query_best_ask(),
            )
        }
    }

    fn depth(&self, side: u8, price: i64) -> u64 {
        // SAFETY: `self` holds the lock.
        unsafe { harness::engine_query_depth_at(price, side) }
    }
}

#[allow(unsafe_code)]
impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: `self` holds the lock; after the shutdown the queue has no other reference.
        unsafe {
            harness::engine_shutdown();
            drop(Box::from_raw(self.queue));
        }
    }
}

/// A trade in [`Engine::reports`]: price and quantity in one number, maker id, taker id.
const fn trade(price: u64, quantity: u64, maker: u64, taker: u64) -> (u8, u64, u64, u64) {
    (TRADE, price * 1_000 + quantity, maker, taker)
}

#[test]
fn orders_rest_trade_and_end() {
    let mut engine = Engine::new();
    assert_eq!(engine.best_bid_and_ask(), (i64::MIN, i64::MAX));
    engine.rest(1, SELL, 10, 101);
    engine.rest(2, SELL, 10, 100);
    engine.rest(3, SELL, 5, 100);
    assert_eq!(engine.best_bid_and_ask(), (i64::MIN, 100));
    assert_eq!(engine.depth(SELL, 100), 15);
    assert_eq!((engine.depth(SELL, 102), engine.depth(BUY, 100)), (0, 0));
    // Trades in price-time priority at the makers' prices. The remainder rests at its own price.
    assert_eq!(
        engine.new_order(4, BUY, 30, 105, 0),
        [
            (ORDER_ACK, 4, 105, 30),
            trade(100, 10, 2, 4),
            trade(100, 5, 3, 4),
            trade(101, 10, 1, 4),
        ]
    );
    assert_eq!(engine.best_bid_and_ask(), (105, i64::MAX));
    assert_eq!(engine.depth(BUY, 105), 5);
    assert_eq!(engine.cancel(4), [(CANCEL_ACK, 4, 105, 5)]);
    assert_eq!(engine.best_bid_and_ask(), (i64::MIN, i64::MAX));
    // A filled order, a cancelled one and two unknown ids.
    for order_id in [2, 4, 2_000_000, u64::MAX] {
        assert_eq!(engine.cancel(order_id), [(CANCEL_REJECT, order_id, 0, 0)]);
        assert_eq!(
            engine.amend(order_id, BUY, 1, 1),
            [(MODIFY_REJECT, order_id, 0, 0)]
        );
    }
}

#[test]
fn an_ioc_order_never_rests() {
    let mut engine = Engine::new();
    engine.rest(1, BUY, 10, 100);
    assert_eq!(
        engine.new_order(2, SELL, 15, 100, 1),
        [
            (ORDER_ACK, 2, 100, 15),
            trade(100, 10, 1, 2),
            (CANCEL_ACK, 2, 100, 5)
        ]
    );
    assert_eq!(
        engine.new_order(3, SELL, 5, 100, 1),
        [(ORDER_ACK, 3, 100, 5), (CANCEL_ACK, 3, 100, 5)]
    );
    assert_eq!(engine.best_bid_and_ask(), (i64::MIN, i64::MAX));
}

#[test]
fn an_amend_sets_the_open_quantity_and_an_increase_loses_priority() {
    let mut engine = Engine::new();
    engine.rest(1, SELL, 10, 100);
    engine.rest(2, SELL, 10, 100);
    engine.new_order(3, BUY, 4, 100, 1);
    assert_eq!(engine.amend(1, SELL, 7, 100), [(MODIFY_ACK, 1, 100, 7)]);
    assert_eq!(engine.depth(SELL, 100), 17);
    assert_eq!(
        engine.new_order(4, BUY, 12, 100, 1),
        [
            (ORDER_ACK, 4, 100, 12),
            trade(100, 10, 2, 4),
            trade(100, 2, 1, 4)
        ]
    );
    engine.rest(5, BUY, 9, 90);
    // An amend that crosses the spread trades at the maker's price. The remainder rests.
    assert_eq!(
        engine.amend(5, BUY, 9, 110),
        [(MODIFY_ACK, 5, 110, 9), trade(100, 5, 1, 5)]
    );
    assert_eq!(engine.best_bid_and_ask(), (110, i64::MAX));
    assert_eq!(engine.depth(BUY, 110), 4);
}

#[test]
fn an_id_is_reusable_once_its_order_has_ended_and_ids_may_be_sparse() {
    let mut engine = Engine::new();
    // Ids below the initial length of the table, above it, and above the table's maximum.
    for order_id in [0, 1, (1 << 21) + 5, 1 << 30, u64::MAX] {
        engine.rest(order_id, BUY, 10, 100);
        assert_eq!(engine.cancel(order_id), [(CANCEL_ACK, order_id, 100, 10)]);
        engine.rest(order_id, SELL, 10, 200);
        // A new order with the id of a live order is ignored.
        assert_eq!(engine.new_order(order_id, SELL, 3, 199, 0), []);
        assert_eq!(
            engine.new_order(7, BUY, 10, 200, 1),
            [(ORDER_ACK, 7, 200, 10), trade(200, 10, order_id, 7)]
        );
        assert_eq!(engine.cancel(order_id), [(CANCEL_REJECT, order_id, 0, 0)]);
    }
    // An order rejected by the book leaves no state.
    for (quantity, price) in [(0, 100), (1, 0), (1, -5), (1, i64::MAX)] {
        assert_eq!(engine.new_order(9, BUY, quantity, price, 0), []);
        assert_eq!(engine.cancel(9), [(CANCEL_REJECT, 9, 0, 0)]);
    }
}

#[test]
fn a_deep_level_fills_in_time_priority() {
    let mut engine = Engine::new();
    for order_id in 1..=5_000 {
        engine.rest(order_id, SELL, 1, 100);
    }
    let reports = engine.new_order(5_001, BUY, 5_000, 100, 1);
    assert_eq!(reports.len(), 5_001);
    for (order_id, report) in (1..).zip(&reports[1..]) {
        assert_eq!(*report, trade(100, 1, order_id, 5_001));
    }
    assert_eq!(engine.best_bid_and_ask(), (i64::MIN, i64::MAX));
}
