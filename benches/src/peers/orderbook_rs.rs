//! OrderBook-rs: a book for several threads, used on one thread here.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use orderbook_rs::{Id, OrderBook, Side, TimeInForce};
use pricelevel::{OrderUpdate, Price, Quantity};

use super::Peer;
use crate::xflow::{Flow, Kind, Op, Record, TapeHash};

/// Maximum duration of a run.
const RUN_TIME_MAX: Duration = Duration::from_secs(120);
/// Commands between two clock reads.
const COMMANDS_PER_CLOCK_READ: usize = 1_024;

/// Maker, taker, price, quantity.
type Trades = Arc<Mutex<Vec<(u64, u64, i64, u64)>>>;

/// Rate and trades of one run. A listener records the trades, which are hashed after the run.
pub fn orderbook_rs(flow: &Flow) -> Peer {
    let header = &flow.header;
    let trades_seen = Trades::default();
    let book = book_with_listener(&trades_seen);
    let (prefill, timed) = flow.records.split_at(header.prefill as usize);
    for record in prefill {
        execute(&book, record);
    }
    let before = trades_seen.lock().expect("one thread").len();
    let start = Instant::now();
    let mut commands = 0;
    for part in timed.chunks(COMMANDS_PER_CLOCK_READ) {
        for record in part {
            execute(&book, record);
        }
        commands += part.len();
        if start.elapsed() > RUN_TIME_MAX {
            break;
        }
    }
    let ops_per_s = commands as f64 / start.elapsed().as_secs_f64();

    let trades_seen = trades_seen.lock().expect("one thread");
    let mut tape = TapeHash::default();
    for (maker, taker, price, quantity) in trades_seen.iter() {
        tape.trade(*maker, *taker, *price, *quantity);
    }
    let trades = (trades_seen.len() - before) as u64;
    let quantity = trades_seen[before..]
        .iter()
        .map(|(.., quantity)| quantity)
        .sum();
    Peer {
        name: "OrderBook-rs 0.10",
        ops_per_s,
        commands: commands as u64,
        trades,
        quantity,
        tape_ok: commands == timed.len()
            && (trades, quantity, tape.0) == (header.trades, header.quantity, header.tape),
    }
}

fn book_with_listener(trades_seen: &Trades) -> OrderBook<()> {
    let trades_seen = trades_seen.clone();
    let mut book = OrderBook::new("FLOW");
    book.set_trade_listener(Arc::new(move |result| {
        let mut trades_seen = trades_seen.lock().expect("one thread");
        for trade in result.match_result.trades().as_vec() {
            trades_seen.push((
                order_number(trade.maker_order_id()),
                order_number(trade.taker_order_id()),
                trade.price().as_u128() as i64,
                trade.quantity().as_u64(),
            ));
        }
    }));
    book
}

fn order_number(id: Id) -> u64 {
    match id {
        Id::Sequential(number) => number,
        Id::Uuid(_) | Id::Ulid(_) => unreachable!("orders have the ids of the file"),
    }
}

/// Executes a record. Ignores rejections: the flow contains fill-or-kill orders that cannot be
/// filled.
fn execute(book: &OrderBook<()>, record: &Record) {
    let id = Id::Sequential(record.id);
    let side = if record.side == 0 {
        Side::Buy
    } else {
        Side::Sell
    };
    // The price is positive, except in cancels and market orders, which do not use it.
    let (price, quantity) = (record.price as u128, record.quantity);
    let limit = |time_in_force| {
        let _ = book.add_limit_order(id, price, quantity, side, time_in_force, None);
    };
    match record.op {
        Op::New(Kind::Gtc) => limit(TimeInForce::Gtc),
        Op::New(Kind::Ioc) => limit(TimeInForce::Ioc),
        Op::New(Kind::Fok) => limit(TimeInForce::Fok),
        Op::New(Kind::Market) => {
            let _ = book.submit_market_order(id, quantity, side);
        }
        Op::Cancel => {
            let _ = book.cancel_order(id);
        }
        Op::Replace { keeps_place: true } => {
            let _ = book.update_order(OrderUpdate::UpdateQuantity {
                order_id: id,
                new_quantity: Quantity::new(quantity),
            });
        }
        Op::Replace { keeps_place: false } => {
            let _ = book.update_order(OrderUpdate::UpdatePriceAndQuantity {
                order_id: id,
                new_price: Price::new(price),
                new_quantity: Quantity::new(quantity),
            });
        }
    }
}
