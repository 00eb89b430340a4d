//! Journal records of a generated flow for the market's history, and bare statements that write the
//! same rows.

use std::path::Path;
use std::time::{Duration, Instant};

use admission::{AmendRequest, CancelRequest, FundRequest, NewRequest, OrderRef, Request};
use events::WRITER_CACHE_KIB;
use gateway::projection::batch::{OrderChange, Rows, limit_price};
use gateway::projection::repo::CHECKPOINT_PAGES;
use gateway::projection::repo::writer::{INSERT_ORDER, INSERT_TRADE, SET_POSITION, UPDATE_ORDER};
use replica::Batch;
use rusqlite::{Connection, Statement};
use sequencer::{Core, Record};
use types::{
    AssetIx, CancelReason, Command, Envelope, Handle, HoldKind, Id128, InstrumentIx, Lots, Minor,
    OrderType, Sequence, SessionIx, Side, StpMode, Ticks, TimeInForce, UserId, UserIx, derived,
};

use crate::xflow::{self, Flow, Kind, Op};

/// Nanoseconds between two commands: 100,000 per second.
const INTERVAL_NS: u64 = 10_000;
/// Time of the first command.
const START_NS: u64 = 1_760_000_000_000_000_000;

/// Applies a flow to admission and book, as the hot thread does, and yields the journal records.
pub struct Source {
    core: Core,
    /// By account of the file.
    users: Vec<UserIx>,
    /// Handles, by order id of the file.
    handles: Vec<Handle>,
    flow: std::vec::IntoIter<xflow::Record>,
    /// Records of instrument, users and holds that are not yet yielded.
    setup: std::vec::IntoIter<Record>,
}

impl Source {
    pub fn new(flow: Flow) -> Self {
        let accounts = flow.records.iter().map(|record| record.account).max();
        let mut source = Self {
            core: Core::new(sequencer::limits()),
            users: vec![UserIx::NONE; accounts.unwrap_or(0) as usize + 1],
            handles: vec![Handle::NONE; flow.header.id_max as usize + 1],
            flow: flow.records.into_iter(),
            setup: Vec::new().into_iter(),
        };
        let mut spec = crate::instrument(InstrumentIx::NONE, "FLOW");
        (spec.band_low, spec.band_high) = (
            Ticks(flow.header.price_low.max(1)),
            Ticks(flow.header.price_high),
        );
        let mut setup = vec![
            source
                .execute(&Request::SetInstrument(spec))
                .expect("a new instrument"),
        ];
        for account in 0..source.users.len() {
            let id = UserId::new(&format!("user-{account}")).expect("an id");
            let bound = source.execute(&Request::BindUser(id)).expect("a new user");
            let Command::BindUser(bind) = &bound.command.command else {
                unreachable!("a BindUser request is journalled as BindUser")
            };
            source.users[account] = bind.user;
            let assets = [AssetIx::MONEY, AssetIx::units(InstrumentIx(0))];
            let funds = assets.map(|asset| {
                Request::Fund(FundRequest {
                    hold_id: Id128::from_u128(
                        1 + 2 * account as u128 + u128::from(asset.is_money()),
                    ),
                    kind: HoldKind::Trading,
                    user: bind.user,
                    asset,
                    amount_minor: Minor(1_000_000_000_000_000),
                    funding_seq: 1,
                    key_hash: Id128::NONE,
                })
            });
            setup.push(bound);
            setup.extend(funds.iter().filter_map(|fund| source.execute(fund)));
        }
        source.setup = setup.into_iter();
        source
    }

    /// Admits and applies a request. Returns `None` if admission rejects it: no record then exists.
    fn execute(&mut self, request: &Request) -> Option<Record> {
        let sequence = self.core.sequence().next();
        let time_ns = START_NS + sequence.get() * INTERVAL_NS;
        let command = self.core.admission().admit(request, time_ns).ok()?;
        let command = Envelope {
            sequence,
            time_ns,
            received_ns: time_ns,
            command,
        };
        let events = self.core.apply(&command).to_vec();
        Some(Record { command, events })
    }

    fn request(&self, record: &xflow::Record) -> Request {
        let user = self.users[record.account as usize];
        let handle = self.handles[record.id as usize];
        match record.op {
            Op::New(kind) => Request::New(NewRequest {
                client_order_id: record.id,
                stp: StpMode::None,
                order_type: match kind {
                    Kind::Market => OrderType::Market,
                    _ => OrderType::Limit,
                },
                time_in_force: match kind {
                    Kind::Gtc => TimeInForce::Gtc,
                    Kind::Ioc | Kind::Market => TimeInForce::Ioc,
                    Kind::Fok => TimeInForce::Fok,
                },
                price: (kind != Kind::Market).then_some(Ticks(record.price)),
                limit_checked: true,
                ..NewRequest::limit(
                    InstrumentIx(0),
                    user,
                    side(record),
                    Ticks(record.price),
                    Lots(record.quantity),
                )
            }),
            Op::Cancel => Request::Cancel(CancelRequest {
                order: OrderRef::Handle(handle),
                // A cancel in the file has a random account, not that of the order.
                user: UserIx::NONE,
                session: SessionIx::NONE,
                client_seq: 0,
                reason: CancelReason::UserRequest,
                key_hash: Id128::NONE,
            }),
            Op::Replace { .. } => {
                let open = self.core.admission().order(handle);
                Request::Amend(AmendRequest {
                    order: OrderRef::Handle(handle),
                    user: open.map_or(user, |order| order.user),
                    session: SessionIx::NONE,
                    client_seq: 0,
                    price: Some(Ticks(record.price)),
                    quantity: open.map(|order| order.filled() + Lots(record.quantity)),
                    new_client_order_id: 0,
                    limit_checked: true,
                    key_hash: Id128::NONE,
                })
            }
        }
    }
}

fn side(record: &xflow::Record) -> Side {
    match record.side {
        0 => Side::Buy,
        _ => Side::Sell,
    }
}

impl Iterator for Source {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        if let Some(record) = self.setup.next() {
            return Some(record);
        }
        loop {
            let flow_record = self.flow.next()?;
            let request = self.request(&flow_record);
            let Some(record) = self.execute(&request) else {
                continue;
            };
            if let Command::New(new) = &record.command.command {
                self.handles[flow_record.id as usize] = new.handle;
            }
            return Some(record);
        }
    }
}

/// Rows of one transaction. A row has its values in the order of the statement's parameters.
pub struct BaselineRows {
    inserts: Vec<Vec<Value>>,
    updates: Vec<Vec<Value>>,
    trades: Vec<Vec<Value>>,
    through: Sequence,
}

#[derive(Clone, Copy)]
enum Value {
    Number(i64),
    Text(&'static str),
    Null,
}

impl BaselineRows {
    /// Number of updates of orders that an earlier transaction has inserted.
    pub fn update_count(&self) -> usize {
        self.updates.len()
    }

    /// Computes the rows of these batches. Assumes that the history numbers users and instruments
    /// in the order in which the node does.
    pub fn of(batches: &[Batch]) -> Self {
        let rows = Rows::of(batches);
        let (new, old): (Vec<_>, Vec<_>) = rows.orders.iter().partition(|change| change.is_new);
        let trades = rows.trades.iter().map(|new| {
            let (trade, buy, sell) = (new.trade, new.trade.buy(), new.trade.sell());
            let index = derived::trade_index(trade.id).expect("a trade id contains its index");
            let key = (new.sequence.get() << 20) | u64::from(index);
            numbers([
                key as i64,
                buy.sequence.get() as i64,
                sell.sequence.get() as i64,
                i64::from(buy.user.get()) + 1,
                i64::from(sell.user.get()) + 1,
                i64::from(trade.instrument.get()) + 1,
                trade.price.0,
                trade.quantity.0 as i64,
                trade.fee_minor.0,
                trade.number as i64,
                i64::from(trade.taker.side.code()),
                new.executed_ns as i64,
            ])
        });
        Self {
            inserts: new.into_iter().map(insert_values).collect(),
            updates: old.into_iter().map(update_values).collect(),
            trades: trades.collect(),
            through: batches.last().expect("at least one batch").last(),
        }
    }
}

fn numbers<const N: usize>(values: [i64; N]) -> Vec<Value> {
    values.map(Value::Number).to_vec()
}

fn changeable_values(change: &OrderChange<'_>) -> [Value; 6] {
    let order = change.order;
    [
        limit_price(order.terms.order_type, order.price)
            .map_or(Value::Null, |ticks| Value::Number(ticks.0)),
        Value::Number(order.quantity.0 as i64),
        Value::Number(order.filled.0 as i64),
        Value::Number(order.fill_totals.value_minor.0),
        Value::Number(i64::from(change.status().code())),
        Value::Text(change.reason),
    ]
}

fn insert_values(change: &OrderChange<'_>) -> Vec<Value> {
    let order = change.order;
    let mut values = numbers([
        change.sequence.get() as i64,
        i64::from(order.user.get()) + 1,
        i64::from(order.instrument.get()) + 1,
        i64::from(order.side.code()),
        i64::from(order.terms.order_type.code()),
        i64::from(order.terms.time_in_force.code()),
        i64::from(order.terms.post_only),
        i64::from(order.terms.stp.code()),
        (order.terms.expire_at_ns / 1_000) as i64,
    ]);
    values.extend(changeable_values(change));
    values.extend(numbers([
        order.client_order_id as i64,
        order.handle.engine_id() as i64,
        order.created_ns as i64,
        (change.updated_ns / 1_000) as i64,
    ]));
    values
}

fn update_values(change: &OrderChange<'_>) -> Vec<Value> {
    let mut values = numbers([change.sequence.get() as i64]);
    values.extend(changeable_values(change));
    values.extend(numbers([
        (change.updated_ns / 1_000) as i64,
        change.order.client_order_id as i64,
    ]));
    values
}

/// Baseline: the history's own statements on a file with the same schema and connection settings.
/// Each statement is prepared once.
pub struct Baseline {
    db: Connection,
}

impl Baseline {
    /// Opens an empty history.
    ///
    /// # Errors
    /// Errors of SQLite.
    pub fn open(path: &Path) -> rusqlite::Result<Self> {
        let db = Connection::open(path)?;
        db.execute_batch(&format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; \
             PRAGMA cache_size = -{WRITER_CACHE_KIB}; PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};"
        ))?;
        Ok(Self { db })
    }

    /// Runs the statements of all transactions. Returns the time taken.
    ///
    /// # Errors
    /// Errors of SQLite.
    pub fn write(&mut self, transactions: &[BaselineRows]) -> rusqlite::Result<Duration> {
        let start = Instant::now();
        for rows in transactions {
            self.db.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
            let mut insert = self.db.prepare_cached(INSERT_ORDER)?;
            for row in &rows.inserts {
                run(&mut insert, row)?;
            }
            let mut update = self.db.prepare_cached(UPDATE_ORDER)?;
            for row in &rows.updates {
                run(&mut update, row)?;
            }
            let mut trade = self.db.prepare_cached(INSERT_TRADE)?;
            for row in &rows.trades {
                run(&mut trade, row)?;
            }
            let mut position = self.db.prepare_cached(SET_POSITION)?;
            position.execute([rows.through.get() as i64])?;
            self.db.prepare_cached("COMMIT")?.execute([])?;
        }
        Ok(start.elapsed())
    }

    /// Number of orders, checksum of orders, number of trades and checksum of trades. Equal for
    /// files with equal rows.
    ///
    /// # Errors
    /// Errors of SQLite.
    pub fn digest(path: &Path) -> rusqlite::Result<[i64; 4]> {
        let db = Connection::open(path)?;
        let read = |sql| db.query_row(sql, [], |row| Ok([row.get(0)?, row.get(1)?]));
        let [orders, of_orders] = read(
            "SELECT count(*), sum(coalesce(price, 3) * 5 + quantity * 11 + filled * 7 + status * 31 \
             + value_minor + client_order_id + engine_order_id % 65537 + side * 13 + stp * 17 \
             + order_type * 19 + time_in_force * 23 + post_only * 29 + expires_at_us \
             + length(cancel_reason) + created_ns % 65537 + updated_at_us % 65537) FROM orders",
        )?;
        let [trades, of_trades] = read(
            "SELECT count(*), sum(quantity * 7 + price * 5 + fee_minor + number * 11 + buy_order \
             + sell_order * 3 + aggressor_side * 13 + executed_ns % 65537 + id % 1048576) FROM trades",
        )?;
        Ok([orders, of_orders, trades, of_trades])
    }
}

fn run(statement: &mut Statement<'_>, values: &[Value]) -> rusqlite::Result<()> {
    for (at, value) in values.iter().enumerate() {
        match value {
            Value::Number(number) => statement.raw_bind_parameter(at + 1, number)?,
            Value::Text(text) => statement.raw_bind_parameter(at + 1, text)?,
            Value::Null => statement.raw_bind_parameter(at + 1, None::<i64>)?,
        }
    }
    statement.raw_execute()?;
    Ok(())
}
