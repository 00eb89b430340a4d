//! matchcore: a single-threaded book. The records are translated to its commands before the clock
//! starts.

use std::hint::black_box;
use std::time::Instant;

use matchcore::{
    AmendCmd, AmendPatch, CancelCmd, Command, CommandKind, CommandMeta, CommandOutcome,
    CommandReport, LimitOrder, LimitOrderPatch, MarketOrder, NewOrder, OrderBook, OrderFlags,
    OrderId, OrderKind, Price, Quantity, QuantityPolicy, SequenceNumber, Side, SubmitCmd,
    TimeInForce, Timestamp,
};

use super::Peer;
use crate::xflow::{Flow, Kind, Op, Record, TapeHash};

/// Translates records to commands. An order's id is the sequence of its command.
struct Translator {
    /// Ids, by order id of the file.
    ids: Vec<OrderId>,
    next: u64,
}

impl Translator {
    fn command(&mut self, record: &Record) -> Command {
        let number = self.next;
        self.next += 1;
        let side = if record.side == 0 {
            Side::Buy
        } else {
            Side::Sell
        };
        // The price is positive, except in cancels and market orders, which do not use it.
        let price = Price(record.price as u64);
        let quantity = Quantity(record.quantity);
        let kind = match record.op {
            Op::New(kind) => {
                self.ids[record.id as usize] = OrderId(number);
                let time_in_force = match kind {
                    Kind::Gtc | Kind::Market => TimeInForce::Gtc,
                    Kind::Ioc => TimeInForce::Ioc,
                    Kind::Fok => TimeInForce::Fok,
                };
                let order = if kind == Kind::Market {
                    NewOrder::Market(MarketOrder::new(quantity, side, false))
                } else {
                    NewOrder::Limit(LimitOrder::new(
                        price,
                        QuantityPolicy::Standard { quantity },
                        OrderFlags::new(side, false, time_in_force),
                    ))
                };
                CommandKind::Submit(SubmitCmd { order })
            }
            Op::Cancel => CommandKind::Cancel(CancelCmd {
                order_id: self.ids[record.id as usize],
                order_kind: OrderKind::Limit,
            }),
            Op::Replace { .. } => CommandKind::Amend(AmendCmd {
                order_id: self.ids[record.id as usize],
                patch: AmendPatch::Limit(
                    LimitOrderPatch::new()
                        .with_price(price)
                        .with_quantity_policy(QuantityPolicy::Standard { quantity }),
                ),
            }),
        };
        Command {
            meta: CommandMeta {
                sequence_number: SequenceNumber(number),
                timestamp: Timestamp(number),
            },
            kind,
        }
    }
}

/// Rate of matchcore, the median of `runs`, and the trades of one more run.
pub fn matchcore(flow: &Flow, runs: usize) -> Peer {
    let header = &flow.header;
    let mut translator = Translator {
        ids: vec![OrderId(u64::MAX); header.id_max as usize + 1],
        next: 0,
    };
    let commands: Vec<Command> = flow
        .records
        .iter()
        .map(|record| translator.command(record))
        .collect();
    let (prefill, timed) = commands.split_at(header.prefill as usize);
    let mut speeds: Vec<f64> = (0..runs.max(1))
        .map(|_| {
            let mut book = OrderBook::new("FLOW");
            for command in prefill {
                black_box(book.execute(command));
            }
            let start = Instant::now();
            for command in timed {
                black_box(book.execute(command));
            }
            timed.len() as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    speeds.sort_by(f64::total_cmp);

    // Order ids of the file, by command.
    let ids: Vec<u64> = flow.records.iter().map(|record| record.id).collect();
    let mut book = OrderBook::new("FLOW");
    let (mut trades, mut traded, mut tape) = (0, 0, TapeHash::default());
    for (at, command) in commands.iter().enumerate() {
        let CommandOutcome::Applied(CommandReport::Submit(effects) | CommandReport::Amend(effects)) =
            book.execute(command)
        else {
            continue;
        };
        let Some(result) = effects.target_order().match_result() else {
            continue;
        };
        for trade in result.trades() {
            let maker = ids[trade.maker_order_id().0 as usize];
            tape.trade(maker, ids[at], trade.price().0 as i64, trade.quantity().0);
            if at >= prefill.len() {
                trades += 1;
                traded += trade.quantity().0;
            }
        }
    }
    Peer {
        name: "matchcore 0.4",
        ops_per_s: speeds[speeds.len() / 2],
        commands: timed.len() as u64,
        trades,
        quantity: traded,
        tape_ok: (trades, traded, tape.0) == (header.trades, header.quantity, header.tape),
    }
}
