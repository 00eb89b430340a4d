//! All SQL of the gateway. Reads use sqlx's pool. Writes use the file's only writer
//! ([`events::Direct`]).
//!
//! | file | contents |
//! |---|---|
//! | `mod` | the store, lookups by public id, lists |
//! | `requests` | data outside the journal: requests, positions, registry status, feed position |
//! | `verify` | reads of the full check |
//! | `writer` | writes of a batch of records |

mod requests;
pub mod verify;
pub mod writer;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use events::Direct;
use sqlx::{QueryBuilder, Row, Sqlite, SqlitePool, sqlite::SqliteRow};
use tokio::sync::watch;
use types::derived::{self, DerivedFrom};
use types::{
    Decimal, Id128, NodeId, OrderStatus, OrderType, RejectReason, Sequence, Side, StpMode,
    TimeInForce, order_uuid, trade_uuid,
};

pub use requests::*;

use super::rows::{AnswerRow, OrderRow, TradeRow};
use crate::Error;

/// The schema. Applied after the schema of outbox and inbox.
static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/sqlite": "0001_market", "0002_lists", "0003_integer_keys",
    "0004_refused_changes"
);

/// Pages of SQLite's write-ahead log between two of its checkpoints: 64 MiB. In a busy market every
/// batch changes the last page of each of its users in three indexes. A checkpoint then writes such
/// a page to the file once for many batches.
pub const CHECKPOINT_PAGES: u32 = 16_000;
/// Bits of a trade's key for its index among the command's events.
const INDEX_BITS: u32 = 20;
/// Bits of the sequence in a public id.
const ID_BITS: u32 = 32;

/// The market's file, and the node number that its public ids contain.
#[derive(Clone)]
pub struct Store {
    pub file: Direct,
    node: NodeId,
    /// Last record in the tables.
    pub(super) position: Arc<watch::Sender<Sequence>>,
}

impl Store {
    /// Opens or creates the file and migrates its schema.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub async fn open(path: PathBuf, node: NodeId) -> Result<Self, Error> {
        let file = Direct::open_with(path, &MIGRATOR, CHECKPOINT_PAGES).await?;
        let position = sqlx::query_scalar("SELECT sequence FROM projection WHERE id = 1")
            .fetch_one(file.read())
            .await?;
        Ok(Self {
            file,
            node,
            position: Arc::new(watch::Sender::new(sequence(position))),
        })
    }

    pub fn read(&self) -> &SqlitePool {
        self.file.read()
    }

    /// The sequences that an id may derive from. An id contains the time and the low 32 bits of the
    /// sequence. The high bits follow from the time, since sequences are in order of time: a binary
    /// search over the orders finds them.
    async fn candidates(&self, from: &DerivedFrom) -> Result<[i64; 3], Error> {
        let (mut low, mut high) = (0, self.position.borrow().get() >> ID_BITS);
        let latest_ns = i64::try_from(from.latest_ns).unwrap_or(i64::MAX);
        while low < high {
            let middle = (low + high).div_ceil(2);
            let first: Option<i64> = sqlx::query_scalar(
                "SELECT created_ns FROM orders WHERE sequence >= $1 ORDER BY sequence LIMIT 1",
            )
            .bind((middle << ID_BITS).cast_signed())
            .fetch_optional(self.read())
            .await?;
            match first {
                Some(created_ns) if created_ns <= latest_ns => low = middle,
                _ => high = middle - 1,
            }
        }
        // The high bits may differ by one: an id's time is exact to 245 ns, and the first order
        // found need not be the first command.
        let rounds = [low, low.saturating_sub(1), low + 1];
        let low_bits = u64::from(from.sequence_low);
        Ok(rounds.map(|round| ((round << ID_BITS) | low_bits).cast_signed()))
    }
}

/// Key of a trade: sequence of its command and index among the command's events.
///
/// # Panics
/// The index has more than 20 bits, or the sequence more than 43.
fn trade_key(sequence: Sequence, index: u32) -> i64 {
    let key = i64::try_from(sequence.get())
        .ok()
        .filter(|key| *key < 1 << (63 - INDEX_BITS));
    assert!(
        index < 1 << INDEX_BITS,
        "command {sequence} has too many events for a trade key"
    );
    (key.expect("a sequence of 43 bits") << INDEX_BITS) | i64::from(index)
}

/// Filter of a list of orders; empty text = any.
#[derive(Clone, Debug, Default)]
pub struct OrderFilter {
    pub user_id: String,
    pub instrument_id: String,
    pub status: Option<OrderStatus>,
}

/// Filter of a list of trades; empty text = any.
#[derive(Clone, Debug, Default)]
pub struct TradeFilter {
    /// Buyer or seller.
    pub user_id: String,
    pub instrument_id: String,
}

/// Page of a list: the rows before `key`, newest first, at most `limit`.
#[derive(Clone, Copy, Debug)]
pub struct PageBound {
    pub key: i64,
    pub limit: i64,
}

const ORDER_COLUMNS: &str = "SELECT o.sequence, u.user_id, i.instrument_id, i.tick_mantissa, i.tick_scale, \
     i.lot_mantissa, i.lot_scale, o.side, o.order_type, o.time_in_force, o.post_only, o.stp, o.expires_at_us, o.price, \
     o.quantity, o.filled, o.value_minor, o.status, o.cancel_reason, o.client_order_id, o.engine_order_id, \
     o.created_ns, o.updated_at_us, c.text AS client_text FROM orders o";
const ORDER_NAMES: &str = " CROSS JOIN users u ON u.user = o.user \
     CROSS JOIN instruments i ON i.instrument = o.instrument \
     LEFT JOIN client_order_ids c ON c.user_id = u.user_id AND c.number = printf('%u', o.client_order_id)";
const TRADE_COLUMNS: &str = "SELECT t.id, t.buy_order, t.sell_order, t.price, t.quantity, t.fee_minor, t.number, \
     t.aggressor_side, t.executed_ns, b.created_ns AS bought_ns, s.created_ns AS sold_ns, ub.user_id AS buyer_id, \
     us.user_id AS seller_id, i.instrument_id, i.tick_mantissa, i.tick_scale, i.lot_mantissa, i.lot_scale FROM ";
const TRADE_NAMES: &str = " CROSS JOIN orders b ON b.sequence = t.buy_order \
     CROSS JOIN orders s ON s.sequence = t.sell_order \
     CROSS JOIN users ub ON ub.user = t.buyer CROSS JOIN users us ON us.user = t.seller \
     CROSS JOIN instruments i ON i.instrument = t.instrument";
const OF_USER: &str = " = (SELECT user FROM users WHERE user_id = ";
const OF_INSTRUMENT: &str = " = (SELECT instrument FROM instruments WHERE instrument_id = ";

/// The order with a public id.
pub async fn order(db: &Store, order_id: &str) -> Result<Option<OrderRow>, Error> {
    let id = Id128::parse(order_id);
    let from = id.and_then(|id| derived::derived_from(id, db.node));
    let (Some(id), Some(from)) = (id, from.filter(|from| from.index.is_none())) else {
        return Ok(None);
    };
    let sql = format!("{ORDER_COLUMNS}{ORDER_NAMES} WHERE o.sequence IN (?, ?, ?)");
    let keys = db.candidates(&from).await?;
    let rows = rows_of(db, sql, keys, order_row).await?;
    let id = id.to_string();
    Ok(rows.into_iter().find(|row| row.order_id == id))
}

/// The rows with these keys. `sql` has three placeholders.
async fn rows_of<T>(
    db: &Store,
    sql: String,
    keys: [i64; 3],
    read: fn(&SqliteRow, NodeId) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    let mut query = sqlx::query(sqlx::AssertSqlSafe(sql));
    for key in keys {
        query = query.bind(key);
    }
    let rows = query.fetch_all(db.read()).await?;
    rows.iter().map(|row| read(row, db.node)).collect()
}

/// Restricts a list to a user or an instrument, unless `name` is empty.
fn filter_by(query: &mut QueryBuilder<Sqlite>, column: &str, numbers: &str, name: &str) {
    if !name.is_empty() {
        query.push(column).push(numbers).push_bind(name).push(")");
    }
}

/// The clause that names the index for a list; empty for a list of all rows. Without it SQLite may
/// read all rows of an instrument instead of those of a user.
fn indexed_by(table: &str, user_id: &str, of_user: &str, instrument_id: &str) -> String {
    match (user_id, instrument_id) {
        ("", "") => String::new(),
        ("", _) => format!(" INDEXED BY {table}_by_instrument"),
        _ => format!(" INDEXED BY {table}_by_{of_user}"),
    }
}

pub async fn orders(
    db: &Store,
    filter: &OrderFilter,
    bound: PageBound,
) -> Result<Vec<OrderRow>, Error> {
    let by = indexed_by("orders", &filter.user_id, "user", &filter.instrument_id);
    let mut query = QueryBuilder::new(ORDER_COLUMNS);
    query.push(by).push(ORDER_NAMES);
    query.push(" WHERE o.sequence < ").push_bind(bound.key);
    let (user_id, instrument_id) = (&filter.user_id, &filter.instrument_id);
    filter_by(&mut query, " AND o.user", OF_USER, user_id);
    filter_by(
        &mut query,
        " AND o.instrument",
        OF_INSTRUMENT,
        instrument_id,
    );
    if let Some(status) = filter.status {
        query.push(" AND o.status = ").push_bind(status.code());
    }
    query.push(" ORDER BY o.sequence DESC LIMIT ");
    query.push_bind(bound.limit);
    let rows = query.build().fetch_all(db.read()).await?;
    rows.iter().map(|row| order_row(row, db.node)).collect()
}

/// The trade with a public id.
pub async fn trade(db: &Store, trade_id: &str) -> Result<Option<TradeRow>, Error> {
    let id = Id128::parse(trade_id);
    let from = id.and_then(|id| derived::derived_from(id, db.node));
    let (Some(id), Some(from)) = (id, from) else {
        return Ok(None);
    };
    let Some(index) = from.index.filter(|index| *index < 1 << INDEX_BITS) else {
        return Ok(None);
    };
    let sql = format!("{TRADE_COLUMNS}trades t{TRADE_NAMES} WHERE t.id IN (?, ?, ?)");
    let keys = db.candidates(&from).await?;
    let keys = keys.map(|sequence| (sequence << INDEX_BITS) | i64::from(index));
    let rows = rows_of(db, sql, keys, trade_row).await?;
    let id = id.to_string();
    Ok(rows.into_iter().find(|row| row.trade_id == id))
}

pub async fn trades(
    db: &Store,
    filter: &TradeFilter,
    bound: PageBound,
) -> Result<Vec<TradeRow>, Error> {
    // One page per side. A query over both indexes would read and sort all trades of the user.
    let sides = [
        ("buyer", " AND p.buyer"),
        ("seller", " AND p.buyer <> p.seller AND p.seller"),
    ];
    let (user_id, instrument_id) = (&filter.user_id, &filter.instrument_id);
    let sides = match user_id.as_str() {
        "" => &sides[..1],
        _ => &sides[..],
    };
    let mut query = QueryBuilder::new(TRADE_COLUMNS);
    let mut between = "(SELECT * FROM (SELECT p.* FROM trades p";
    for (side, condition) in sides {
        let by = indexed_by("trades", user_id, side, instrument_id);
        query.push(between).push(by);
        query.push(" WHERE p.id < ").push_bind(bound.key);
        filter_by(&mut query, condition, OF_USER, user_id);
        filter_by(
            &mut query,
            " AND p.instrument",
            OF_INSTRUMENT,
            instrument_id,
        );
        query.push(" ORDER BY p.id DESC LIMIT ");
        query.push_bind(bound.limit);
        between = ") UNION ALL SELECT * FROM (SELECT p.* FROM trades p";
    }
    query.push(") ORDER BY id DESC LIMIT ");
    query.push_bind(bound.limit);
    query
        .push(") t")
        .push(TRADE_NAMES)
        .push(" ORDER BY t.id DESC");
    let rows = query.build().fetch_all(db.read()).await?;
    rows.iter().map(|row| trade_row(row, db.node)).collect()
}

/// The answer stored under a key.
pub async fn answer(db: &Store, key_hash: Id128) -> Result<Option<AnswerRow>, Error> {
    let row = sqlx::query(
        "SELECT a.sequence, a.order_sequence, a.cancelled, a.refusal, o.created_ns FROM answers a \
         LEFT JOIN orders o ON o.sequence = a.order_sequence WHERE a.key_hash = $1",
    )
    .bind(key_hash.as_u128().to_be_bytes().to_vec())
    .fetch_optional(db.read())
    .await?;
    row.map(|row| {
        let created_ns: Option<i64> = row.try_get("created_ns")?;
        let order_id = created_ns.map(|created_ns| {
            let order = row.try_get("order_sequence")?;
            Ok::<_, Error>(
                order_uuid(created_ns.unsigned_abs(), db.node, sequence(order)).to_string(),
            )
        });
        Ok(AnswerRow {
            sequence: row.try_get::<i64, _>("sequence")?.unsigned_abs(),
            order_id: order_id.transpose()?.unwrap_or_default(),
            cancelled: row.try_get("cancelled")?,
            refusal: match row.try_get::<Option<i64>, _>("refusal")? {
                Some(_) => Some(code(&row, "refusal", RejectReason::from_code)?),
                None => None,
            },
        })
    })
    .transpose()
}

fn sequence(stored: i64) -> Sequence {
    Sequence(stored.unsigned_abs())
}

fn code<T>(row: &SqliteRow, column: &str, from: fn(u8) -> Option<T>) -> Result<T, Error> {
    let value: i64 = row.try_get(column)?;
    u8::try_from(value)
        .ok()
        .and_then(from)
        .ok_or_else(|| Error::Stored(format!("{value} is not a code of {column}")))
}

/// `count` ticks or lots as a decimal.
fn units(row: &SqliteRow, count: i64, mantissa: &str, scale: &str) -> Result<Decimal, Error> {
    let (mantissa, scale): (i64, u8) = (row.try_get(mantissa)?, row.try_get(scale)?);
    Decimal::new(i128::from(count) * i128::from(mantissa), scale)
        .map_err(|error| Error::Stored(error.to_string()))
}

fn price(row: &SqliteRow, ticks: i64) -> Result<Decimal, Error> {
    units(row, ticks, "tick_mantissa", "tick_scale")
}

fn quantity(row: &SqliteRow, column: &str) -> Result<Decimal, Error> {
    units(row, row.try_get(column)?, "lot_mantissa", "lot_scale")
}

fn order_row(row: &SqliteRow, node: NodeId) -> Result<OrderRow, Error> {
    let ticks: Option<i64> = row.try_get("price")?;
    let client_text: Option<String> = row.try_get("client_text")?;
    let client_number = row.try_get::<i64, _>("client_order_id")?.cast_unsigned();
    let created_ns: i64 = row.try_get("created_ns")?;
    let sequence = sequence(row.try_get("sequence")?);
    Ok(OrderRow {
        order_id: order_uuid(created_ns.unsigned_abs(), node, sequence).to_string(),
        user_id: row.try_get("user_id")?,
        instrument_id: row.try_get("instrument_id")?,
        side: code(row, "side", Side::from_code)?,
        order_type: code(row, "order_type", OrderType::from_code)?,
        time_in_force: code(row, "time_in_force", TimeInForce::from_code)?,
        post_only: row.try_get("post_only")?,
        stp: code(row, "stp", StpMode::from_code)?,
        expires_at_us: row.try_get("expires_at_us")?,
        price: ticks.map(|ticks| price(row, ticks)).transpose()?,
        quantity: quantity(row, "quantity")?,
        filled: quantity(row, "filled")?,
        value_minor: row.try_get("value_minor")?,
        status: code(row, "status", OrderStatus::from_code)?,
        cancel_reason: row.try_get("cancel_reason")?,
        client_order_id: match (client_text, client_number) {
            (_, 0) => String::new(),
            (Some(text), _) => text,
            (None, number) => number.to_string(),
        },
        engine_order_id: row.try_get::<i64, _>("engine_order_id")?.cast_unsigned(),
        sequence: sequence.get(),
        created_at_us: created_ns / 1_000,
        updated_at_us: row.try_get("updated_at_us")?,
    })
}

fn trade_row(row: &SqliteRow, node: NodeId) -> Result<TradeRow, Error> {
    let key: i64 = row.try_get("id")?;
    let sequence = sequence(key >> INDEX_BITS);
    let index = u32::try_from(key & ((1 << INDEX_BITS) - 1)).expect("20 bits");
    let executed_ns: i64 = row.try_get("executed_ns")?;
    let order_id = |order: &str, created_ns: &str| {
        let order = self::sequence(row.try_get(order)?);
        let created_ns: i64 = row.try_get(created_ns)?;
        Ok::<_, Error>(order_uuid(created_ns.unsigned_abs(), node, order).to_string())
    };
    Ok(TradeRow {
        trade_id: trade_uuid(executed_ns.unsigned_abs(), node, sequence, index).to_string(),
        key,
        buy_order_id: order_id("buy_order", "bought_ns")?,
        sell_order_id: order_id("sell_order", "sold_ns")?,
        buyer_id: row.try_get("buyer_id")?,
        seller_id: row.try_get("seller_id")?,
        instrument_id: row.try_get("instrument_id")?,
        price: price(row, row.try_get("price")?)?,
        quantity: quantity(row, "quantity")?,
        fee_minor: row.try_get("fee_minor")?,
        trade_number: row.try_get::<i64, _>("number")?.unsigned_abs(),
        aggressor_side: code(row, "aggressor_side", Side::from_code)?,
        executed_at_us: executed_ns / 1_000,
        sequence: sequence.get(),
    })
}
