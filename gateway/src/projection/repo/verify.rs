//! Reads of the full check: every row of the history that follows from the journal, in one
//! snapshot. Read-only, with or without a running market.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use replica::Names;
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow};
use sqlx::{AssertSqlSafe, Connection, Row, SqliteConnection};
use types::{Decimal, Id128, NodeId, Sequence};

use super::writer::{index, signed};
use super::{INDEX_BITS, ORDER_COLUMNS, order_row, price, quantity, sequence, trade_key};
use crate::Error;
use crate::projection::batch::{Answer, NewTrade};
use crate::projection::rows::OrderRow;

/// Rows of a page of users or instruments.
const PAGE: i64 = 1_000;

/// Answers by the sequence of their command, which has no index in the store.
const ANSWER_KEYS: &str = "CREATE TEMPORARY TABLE answer_keys (sequence INTEGER NOT NULL, key_hash BLOB NOT NULL, \
     PRIMARY KEY (sequence, key_hash)) WITHOUT ROWID";
const FILL_ANSWER_KEYS: &str = "INSERT INTO answer_keys SELECT sequence, key_hash FROM answers WHERE sequence > 0 \
     ORDER BY sequence, key_hash";
const ANSWERS: &str = "SELECT k.value AS name, a.sequence, a.order_sequence, a.cancelled, a.refusal \
     FROM json_each($1) k \
     CROSS JOIN answers a ON a.key_hash = unhex(k.value)";
const ANSWER_KEYS_OF: &str =
    "SELECT sequence, key_hash FROM answer_keys WHERE sequence > $1 AND sequence <= $2";
const ORDER_KEYS: &str =
    "SELECT sequence FROM orders WHERE sequence > $1 AND sequence <= $2 ORDER BY sequence";
/// A missing user or instrument leaves NULL. The client's texts do not follow from the journal, so
/// the number of a client order id is read instead.
const ORDER_NAMES: &str = " LEFT JOIN users u ON u.user = o.user \
     LEFT JOIN instruments i ON i.instrument = o.instrument CROSS JOIN (SELECT NULL AS text) c \
     WHERE o.sequence IN (SELECT value FROM json_each($1))";
const TRADES: &str = "SELECT t.id, t.buy_order, t.sell_order, ub.user_id AS buyer_id, us.user_id AS seller_id, \
     i.instrument_id, i.tick_mantissa, i.tick_scale, i.lot_mantissa, i.lot_scale, t.price, t.quantity, t.fee_minor, \
     t.number, t.aggressor_side, t.executed_ns FROM trades t LEFT JOIN users ub ON ub.user = t.buyer \
     LEFT JOIN users us ON us.user = t.seller LEFT JOIN instruments i ON i.instrument = t.instrument \
     WHERE t.id > $1 AND t.id <= $2 ORDER BY t.id";
const USERS: &str = "SELECT u.user, u.user_id, EXISTS (SELECT 1 FROM orders o WHERE o.user = u.user) FROM users u \
     WHERE u.user > $1 ORDER BY u.user LIMIT $2";
const INSTRUMENTS: &str = "SELECT i.instrument, i.instrument_id, i.tick_mantissa, i.tick_scale, i.lot_mantissa, \
     i.lot_scale, EXISTS (SELECT 1 FROM orders o WHERE o.instrument = i.instrument) FROM instruments i \
     WHERE i.instrument > $1 ORDER BY i.instrument LIMIT $2";

/// Tables with a row per order, trade and call: name, the table to count, and its key.
const COUNTED: [(&str, &str, &str); 3] = [
    ("orders", "orders", "sequence"),
    ("trades", "trades", "id"),
    ("answers", "answer_keys", "sequence"),
];

/// Rows of the tables with a row per order, trade and call.
pub type Counts = [(&'static str, u64); 3];

/// An order. `None`: one of its columns has no valid value.
pub struct StoredOrder {
    pub row: Option<OrderRow>,
    pub created_ns: i64,
}

/// A trade, with the names of its parties and its instrument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTrade {
    buy_order: i64,
    sell_order: i64,
    buyer_id: String,
    seller_id: String,
    instrument_id: String,
    price: Decimal,
    quantity: Decimal,
    fee_minor: i64,
    number: i64,
    aggressor_side: i64,
    executed_ns: i64,
}

/// The answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredAnswer {
    pub sequence: i64,
    pub order: i64,
    pub cancelled: i64,
    pub refusal: Option<i64>,
}

/// A user, or an instrument with its units of price and quantity.
pub struct StoredName {
    pub id: String,
    /// An order names it. Every row is added with its first order.
    pub is_used: bool,
    /// Mantissa and scale of tick and lot. `None` for a user.
    pub units: Option<[Option<i64>; 4]>,
}

/// The market's file, read-only, as it was when it was opened.
pub struct HistorySnapshot {
    db: SqliteConnection,
    node: NodeId,
    /// Last record in the tables. `None`: its row is missing.
    pub position: Option<Sequence>,
}

impl HistorySnapshot {
    /// # Errors
    /// The file cannot be read.
    pub async fn open(path: &Path, node: NodeId) -> Result<Self, Error> {
        let options = SqliteConnectOptions::new().filename(path).read_only(true);
        let mut db = SqliteConnection::connect_with(&options).await?;
        for sql in [ANSWER_KEYS, "BEGIN", FILL_ANSWER_KEYS] {
            sqlx::query(sql).execute(&mut db).await?;
        }
        let position: Option<i64> =
            sqlx::query_scalar("SELECT sequence FROM projection WHERE id = 1")
                .fetch_optional(&mut db)
                .await?;
        Ok(Self {
            db,
            node,
            position: position.map(sequence),
        })
    }

    /// Keys of the orders that commands after `after` through `through` entered, ascending.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn order_keys(
        &mut self,
        after: Sequence,
        through: Sequence,
    ) -> Result<Vec<i64>, Error> {
        let keys = sqlx::query_scalar(ORDER_KEYS)
            .bind(signed(after.get()))
            .bind(signed(through.get()))
            .fetch_all(&mut self.db)
            .await?;
        Ok(keys)
    }

    /// The orders with these keys.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn orders(&mut self, keys: &[i64]) -> Result<HashMap<i64, StoredOrder>, Error> {
        let rows = sqlx::query(AssertSqlSafe(format!("{ORDER_COLUMNS}{ORDER_NAMES}")))
            .bind(serde_json::json!(keys).to_string())
            .fetch_all(&mut self.db)
            .await?;
        let mut found = HashMap::with_capacity(rows.len());
        for row in &rows {
            // Any number but 0 reads as true.
            let post_only: i64 = row.try_get("post_only")?;
            let read = order_row(row, self.node).ok();
            let order = StoredOrder {
                row: read.filter(|read| i64::from(read.post_only) == post_only),
                created_ns: row.try_get("created_ns")?,
            };
            found.insert(row.try_get("sequence")?, order);
        }
        Ok(found)
    }

    /// The trades of commands after `after` through `through`, by key. `None`: one of the trade's
    /// columns has no valid value.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn trades(
        &mut self,
        after: Sequence,
        through: Sequence,
    ) -> Result<BTreeMap<i64, Option<StoredTrade>>, Error> {
        let rows = sqlx::query(TRADES)
            .bind(last_trade(after))
            .bind(last_trade(through))
            .fetch_all(&mut self.db)
            .await?;
        let mut found = BTreeMap::new();
        for row in &rows {
            found.insert(row.try_get("id")?, StoredTrade::read(row).ok());
        }
        Ok(found)
    }

    /// The keys of the answers to commands after `after` through `through`, each with the sequence
    /// of its command.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn answer_keys(
        &mut self,
        after: Sequence,
        through: Sequence,
    ) -> Result<Vec<(i64, Vec<u8>)>, Error> {
        let keys = sqlx::query_as(ANSWER_KEYS_OF)
            .bind(signed(after.get()))
            .bind(signed(through.get()))
            .fetch_all(&mut self.db)
            .await?;
        Ok(keys)
    }

    /// The answers under these keys.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn answers(&mut self, keys: &[Id128]) -> Result<HashMap<Id128, StoredAnswer>, Error> {
        let names: Vec<String> = keys.iter().map(|key| format!("{key:?}")).collect();
        let rows = sqlx::query(ANSWERS)
            .bind(serde_json::json!(names).to_string())
            .fetch_all(&mut self.db)
            .await?;
        let mut found = HashMap::with_capacity(rows.len());
        for row in &rows {
            let name: String = row.try_get("name")?;
            let answer = StoredAnswer {
                sequence: row.try_get("sequence")?,
                order: row.try_get("order_sequence")?,
                cancelled: row.try_get("cancelled")?,
                refusal: row.try_get("refusal")?,
            };
            found.extend(Id128::parse(&name).map(|key| (key, answer)));
        }
        Ok(found)
    }

    /// Rows of commands through `sequence`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn counts_through(&mut self, sequence: Sequence) -> Result<Counts, Error> {
        self.counts("<=", sequence).await
    }

    /// Rows of commands after `sequence`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn counts_after(&mut self, sequence: Sequence) -> Result<Counts, Error> {
        self.counts(">", sequence).await
    }

    async fn counts(&mut self, is: &str, sequence: Sequence) -> Result<Counts, Error> {
        let mut counts = COUNTED.map(|(name, ..)| (name, 0));
        for ((name, count), (_, table, key)) in counts.iter_mut().zip(COUNTED) {
            let bound = match *name {
                "trades" => last_trade(sequence),
                _ => signed(sequence.get()),
            };
            let sql = format!("SELECT COUNT(*) FROM {table} WHERE {key} {is} $1");
            let rows: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
                .bind(bound)
                .fetch_one(&mut self.db)
                .await?;
            *count = rows.unsigned_abs();
        }
        Ok(counts)
    }

    /// A page of the users after row `after`, with the last row; empty after the last.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn users(&mut self, after: i64) -> Result<(i64, Vec<StoredName>), Error> {
        let rows: Vec<(i64, String, i64)> = sqlx::query_as(USERS)
            .bind(after)
            .bind(PAGE)
            .fetch_all(&mut self.db)
            .await?;
        let last = rows.last().map_or(after, |(user, ..)| *user);
        let users = rows.into_iter().map(|(_, id, is_used)| StoredName {
            id,
            is_used: is_used != 0,
            units: None,
        });
        Ok((last, users.collect()))
    }

    /// As [`Self::users`], of the instruments.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn instruments(&mut self, after: i64) -> Result<(i64, Vec<StoredName>), Error> {
        type Found = (
            i64,
            String,
            Option<i64>,
            Option<i64>,
            Option<i64>,
            Option<i64>,
            i64,
        );
        let rows: Vec<Found> = sqlx::query_as(INSTRUMENTS)
            .bind(after)
            .bind(PAGE)
            .fetch_all(&mut self.db)
            .await?;
        let last = rows.last().map_or(after, |row| row.0);
        let instruments = rows.into_iter().map(
            |(_, id, tick, tick_scale, lot, lot_scale, is_used)| StoredName {
                id,
                is_used: is_used != 0,
                units: Some([tick, tick_scale, lot, lot_scale]),
            },
        );
        Ok((last, instruments.collect()))
    }

    /// # Errors
    /// The file cannot be read.
    pub async fn close(self) -> Result<(), Error> {
        Ok(self.db.close().await?)
    }
}

/// The highest key of a trade of this command.
fn last_trade(sequence: Sequence) -> i64 {
    trade_key(sequence, (1 << INDEX_BITS) - 1)
}

impl StoredTrade {
    /// Key and row of a trade of the journal.
    pub fn of(new: &NewTrade<'_>, names: &Names) -> (i64, Self) {
        let trade = new.trade;
        let (buy, sell) = (trade.buy(), trade.sell());
        let spec = names.instrument(trade.instrument);
        let row = Self {
            buy_order: signed(buy.sequence.get()),
            sell_order: signed(sell.sequence.get()),
            buyer_id: names.user(buy.user).to_string(),
            seller_id: names.user(sell.user).to_string(),
            instrument_id: spec.id.to_string(),
            price: spec.price(trade.price),
            quantity: spec.quantity(trade.quantity),
            fee_minor: trade.fee_minor.0,
            number: signed(trade.number),
            aggressor_side: trade.taker.side.code().into(),
            executed_ns: signed(new.executed_ns),
        };
        (trade_key(new.sequence, index(trade)), row)
    }

    fn read(row: &SqliteRow) -> Result<Self, Error> {
        Ok(Self {
            buy_order: row.try_get("buy_order")?,
            sell_order: row.try_get("sell_order")?,
            buyer_id: row.try_get("buyer_id")?,
            seller_id: row.try_get("seller_id")?,
            instrument_id: row.try_get("instrument_id")?,
            price: price(row, row.try_get("price")?)?,
            quantity: quantity(row, "quantity")?,
            fee_minor: row.try_get("fee_minor")?,
            number: row.try_get("number")?,
            aggressor_side: row.try_get("aggressor_side")?,
            executed_ns: row.try_get("executed_ns")?,
        })
    }
}

impl StoredAnswer {
    /// The row of an answer of the journal.
    pub fn of(answer: &Answer) -> Self {
        Self {
            sequence: signed(answer.sequence.get()),
            order: signed(answer.order.get()),
            cancelled: answer.cancelled.into(),
            refusal: answer.refusal.map(|reason| reason.code().into()),
        }
    }

    /// True if `stored` is this answer as a call stores it that is answered before the history has
    /// its command (`repo::note_answer`). Such an answer names no order.
    pub fn is_noted_as(&self, stored: &Self) -> bool {
        let noted = Self {
            sequence: 0,
            ..*self
        };
        self.order == 0 && self.refusal.is_none() && *stored == noted
    }
}
