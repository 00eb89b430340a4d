//! The only file of this room that speaks SQL.

use events::{Sqlite, Tx};
use rpc::page::Page;
use serde_json::json;
use sqlx::{QueryBuilder, Row, sqlite::SqliteRow};
use types::{Decimal, Id128, OrderStatus, OrderType, Side, StpMode, TimeInForce};

use super::rows::{AnswerRow, OrderRow, TradeRow};
use crate::Error;

/// Which orders a list shows; empty text = any.
#[derive(Clone, Debug, Default)]
pub struct OrderFilter {
    pub user_id: String,
    pub instrument_id: String,
    pub status: Option<OrderStatus>,
}

/// Which trades a list shows; empty text = any.
#[derive(Clone, Debug, Default)]
pub struct TradeFilter {
    /// Buyer or seller.
    pub user_id: String,
    pub instrument_id: String,
}

const ORDER_COLUMNS: &str = "o.order_id, o.user_id, o.instrument_id, o.side, o.order_type, o.time_in_force, o.post_only, o.stp, \
    o.expires_at_us, o.price, o.quantity, o.filled, o.value_minor, o.status, o.cancel_reason, o.client_order_id, \
    o.engine_order_id, o.own_hold, o.sequence, o.created_at_us, o.updated_at_us, c.text AS client_text";
const ORDER_TEXT: &str =
    " LEFT JOIN client_order_ids c ON c.user_id = o.user_id AND c.number = o.client_order_id";
const TRADE_COLUMNS: &str = "t.trade_id, t.buy_order_id, t.sell_order_id, t.buyer_id, t.seller_id, t.instrument_id, t.price, \
    t.quantity, t.fee_minor, t.trade_number, t.aggressor_side, t.executed_at_us, t.sequence";

pub async fn position(db: &Sqlite) -> Result<u64, Error> {
    let sequence: i64 = sqlx::query_scalar("SELECT sequence FROM projection WHERE id = 1")
        .fetch_one(db.read())
        .await?;
    Ok(sequence.unsigned_abs())
}

pub async fn set_position_in_tx(tx: &mut Tx, sequence: u64) -> Result<(), Error> {
    sqlx::query("UPDATE projection SET sequence = $1 WHERE id = 1")
        .bind(sequence.cast_signed())
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// Writes orders as they now stand: one statement, whatever their number.
pub async fn save_orders_in_tx(tx: &mut Tx, rows: &[OrderRow]) -> Result<(), Error> {
    let values: Vec<_> = rows
        .iter()
        .map(|row| {
            json!([
                row.order_id,
                row.user_id,
                row.instrument_id,
                row.side.code(),
                row.order_type.code(),
                row.time_in_force.code(),
                u8::from(row.post_only),
                row.stp.code(),
                row.expires_at_us,
                row.price.map(|price| price.to_string()).unwrap_or_default(),
                row.quantity.to_string(),
                row.filled.to_string(),
                row.value_minor,
                row.status.code(),
                row.cancel_reason,
                row.client_order_id,
                row.engine_order_id.to_string(),
                u8::from(row.own_hold),
                row.sequence.cast_signed(),
                row.created_at_us,
                row.updated_at_us,
            ])
        })
        .collect();
    sqlx::query(
        "INSERT INTO orders (order_id, user_id, instrument_id, side, order_type, time_in_force, post_only, stp, expires_at_us, price, \
         quantity, filled, value_minor, status, cancel_reason, client_order_id, engine_order_id, own_hold, sequence, created_at_us, updated_at_us) \
         SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5, value->>6, value->>7, value->>8, value->>9, value->>10, \
         value->>11, value->>12, value->>13, value->>14, value->>15, value->>16, value->>17, value->>18, value->>19, value->>20 \
         FROM json_each($1) WHERE true \
         ON CONFLICT (order_id) DO UPDATE SET price = excluded.price, quantity = excluded.quantity, filled = excluded.filled, \
         value_minor = excluded.value_minor, status = excluded.status, cancel_reason = excluded.cancel_reason, \
         updated_at_us = excluded.updated_at_us",
    )
    .bind(json!(values).to_string())
    .execute(&mut **tx)
    .await?;
    Ok(())
}

/// Writes trades: one statement, whatever their number.
pub async fn save_trades_in_tx(tx: &mut Tx, rows: &[TradeRow]) -> Result<(), Error> {
    let values: Vec<_> = rows
        .iter()
        .map(|row| {
            json!([
                row.trade_id,
                row.buy_order_id,
                row.sell_order_id,
                row.buyer_id,
                row.seller_id,
                row.instrument_id,
                row.price.to_string(),
                row.quantity.to_string(),
                row.fee_minor,
                row.trade_number.cast_signed(),
                row.aggressor_side.code(),
                row.executed_at_us,
                row.sequence.cast_signed(),
            ])
        })
        .collect();
    sqlx::query(
        "INSERT INTO trades (trade_id, buy_order_id, sell_order_id, buyer_id, seller_id, instrument_id, price, quantity, fee_minor, \
         trade_number, aggressor_side, executed_at_us, sequence) \
         SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5, value->>6, value->>7, value->>8, value->>9, value->>10, \
         value->>11, value->>12 FROM json_each($1) WHERE true ON CONFLICT (trade_id) DO NOTHING",
    )
    .bind(json!(values).to_string())
    .execute(&mut **tx)
    .await?;
    Ok(())
}

pub async fn save_answer_in_tx(
    tx: &mut Tx,
    key_hash: Id128,
    answer: &AnswerRow,
) -> Result<(), Error> {
    sqlx::query(
        "INSERT INTO answers (key_hash, sequence, order_id, cancelled) VALUES ($1, $2, $3, $4) ON CONFLICT (key_hash) DO NOTHING",
    )
    .bind(key_hash.to_string())
    .bind(answer.sequence.cast_signed())
    .bind(&answer.order_id)
    .bind(answer.cancelled)
    .execute(&mut **tx)
    .await?;
    Ok(())
}

/// The answer of a call that left nothing in the journal.
pub async fn note_answer(db: &Sqlite, key_hash: Id128) -> Result<(), Error> {
    let answer = AnswerRow {
        sequence: 0,
        order_id: String::new(),
        cancelled: 0,
    };
    let mut tx = db.write().await?;
    save_answer_in_tx(&mut tx, key_hash, &answer).await?;
    tx.commit().await?;
    Ok(())
}

pub async fn answer(db: &Sqlite, key_hash: Id128) -> Result<Option<AnswerRow>, Error> {
    let row = sqlx::query("SELECT sequence, order_id, cancelled FROM answers WHERE key_hash = $1")
        .bind(key_hash.to_string())
        .fetch_optional(db.read())
        .await?;
    row.map(|row| {
        Ok(AnswerRow {
            sequence: row.try_get::<i64, _>("sequence")?.unsigned_abs(),
            order_id: row.try_get("order_id")?,
            cancelled: row.try_get("cancelled")?,
        })
    })
    .transpose()
}

/// Keeps what a call said beside the journal: its correlation id and the text of the client's order id.
pub async fn note_request(
    db: &Sqlite,
    key_hash: Id128,
    correlation_id: &str,
    client_order: Option<(&str, u64, &str)>,
    now_us: i64,
) -> Result<(), Error> {
    let mut tx = db.write().await?;
    sqlx::query(
        "INSERT INTO requests (key_hash, correlation_id, created_at_us) VALUES ($1, $2, $3) ON CONFLICT (key_hash) DO NOTHING",
    )
    .bind(key_hash.to_string())
    .bind(correlation_id)
    .bind(now_us)
    .execute(&mut *tx)
    .await?;
    if let Some((user_id, number, text)) = client_order {
        sqlx::query(
            "INSERT INTO client_order_ids (user_id, number, text) VALUES ($1, $2, $3) ON CONFLICT (user_id, number) DO NOTHING",
        )
        .bind(user_id)
        .bind(number.to_string())
        .bind(text)
        .execute(&mut *tx)
        .await?;
    }
    Ok(tx.commit().await?)
}

/// Correlation id of the call behind a journalled key.
pub async fn correlation(db: &Sqlite, key_hash: Id128) -> Result<Option<String>, Error> {
    Ok(
        sqlx::query_scalar("SELECT correlation_id FROM requests WHERE key_hash = $1")
            .bind(key_hash.to_string())
            .fetch_optional(db.read())
            .await?,
    )
}

/// The index that leads to the rows of a list. Named, since SQLite would as soon walk all rows of an instrument as those of a user.
fn index_of(user_id: &str, of_user: &'static str, instrument_id: &str) -> &'static str {
    match (user_id, instrument_id) {
        ("", "") => "time",
        ("", _) => "instrument",
        _ => of_user,
    }
}

pub async fn order(db: &Sqlite, order_id: &str) -> Result<Option<OrderRow>, Error> {
    let mut query = QueryBuilder::new("SELECT ");
    query
        .push(ORDER_COLUMNS)
        .push(" FROM orders o")
        .push(ORDER_TEXT);
    query.push(" WHERE o.order_id = ").push_bind(order_id);
    let row = query.build().fetch_optional(db.read()).await?;
    row.map(|row| order_row(&row)).transpose()
}

pub async fn orders(
    db: &Sqlite,
    filter: &OrderFilter,
    page: &Page,
) -> Result<Vec<OrderRow>, Error> {
    let (created_us, id) = page.bound();
    let by = index_of(&filter.user_id, "user", &filter.instrument_id);
    let mut query = QueryBuilder::new("SELECT ");
    query.push(ORDER_COLUMNS);
    query.push(" FROM orders o INDEXED BY orders_by_").push(by);
    query.push(ORDER_TEXT);
    query.push(" WHERE (o.created_at_us, o.order_id) < (");
    query
        .push_bind(created_us)
        .push(", ")
        .push_bind(id)
        .push(")");
    if !filter.user_id.is_empty() {
        query.push(" AND o.user_id = ").push_bind(&filter.user_id);
    }
    if !filter.instrument_id.is_empty() {
        query
            .push(" AND o.instrument_id = ")
            .push_bind(&filter.instrument_id);
    }
    if let Some(status) = filter.status {
        query.push(" AND o.status = ").push_bind(status.code());
    }
    query.push(" ORDER BY o.created_at_us DESC, o.order_id DESC LIMIT ");
    query.push_bind(page.rows_limit());
    let rows = query.build().fetch_all(db.read()).await?;
    rows.iter().map(order_row).collect()
}

pub async fn trade(db: &Sqlite, trade_id: &str) -> Result<Option<TradeRow>, Error> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(TRADE_COLUMNS).push(" FROM trades t");
    query.push(" WHERE t.trade_id = ").push_bind(trade_id);
    let row = query.build().fetch_optional(db.read()).await?;
    row.map(|row| trade_row(&row)).transpose()
}

pub async fn trades(
    db: &Sqlite,
    filter: &TradeFilter,
    page: &Page,
) -> Result<Vec<TradeRow>, Error> {
    let (executed_us, id) = page.bound();
    // Of each side a page of its own: out of two indexes at once SQLite would read and sort all trades of the user.
    let sides = [
        ("buyer", " AND t.buyer_id = "),
        (
            "seller",
            " AND t.buyer_id <> t.seller_id AND t.seller_id = ",
        ),
    ];
    let sides = match filter.user_id.as_str() {
        "" => &sides[..1],
        _ => &sides[..],
    };
    let mut query = QueryBuilder::new("");
    let mut between = "SELECT * FROM (SELECT ";
    for (side, condition) in sides {
        let by = index_of(&filter.user_id, side, &filter.instrument_id);
        query.push(between).push(TRADE_COLUMNS);
        query.push(" FROM trades t INDEXED BY trades_by_").push(by);
        query.push(" WHERE (t.executed_at_us, t.trade_id) < (");
        query.push_bind(executed_us).push(", ");
        query.push_bind(id).push(")");
        if !filter.user_id.is_empty() {
            query.push(condition).push_bind(&filter.user_id);
        }
        if !filter.instrument_id.is_empty() {
            query.push(" AND t.instrument_id = ");
            query.push_bind(&filter.instrument_id);
        }
        query.push(" ORDER BY t.executed_at_us DESC, t.trade_id DESC LIMIT ");
        query.push_bind(page.rows_limit());
        between = ") UNION ALL SELECT * FROM (SELECT ";
    }
    query.push(") ORDER BY executed_at_us DESC, trade_id DESC LIMIT ");
    query.push_bind(page.rows_limit());
    let rows = query.build().fetch_all(db.read()).await?;
    rows.iter().map(trade_row).collect()
}

/// The registry's status of an instrument when it was last taken over.
pub async fn listed_status(db: &Sqlite, instrument_id: &str) -> Result<Option<u8>, Error> {
    let code: Option<i64> =
        sqlx::query_scalar("SELECT status FROM listed WHERE instrument_id = $1")
            .bind(instrument_id)
            .fetch_optional(db.read())
            .await?;
    Ok(code.and_then(|code| u8::try_from(code).ok()))
}

pub async fn save_listed_status(db: &Sqlite, instrument_id: &str, status: u8) -> Result<(), Error> {
    let mut tx = db.write().await?;
    sqlx::query(
        "INSERT INTO listed (instrument_id, status) VALUES ($1, $2) ON CONFLICT (instrument_id) DO UPDATE SET status = excluded.status",
    )
    .bind(instrument_id)
    .bind(status)
    .execute(&mut *tx)
    .await?;
    Ok(tx.commit().await?)
}

/// Adds to (or takes from) a position that the CFA service's events tell.
pub async fn move_position_in_tx(
    tx: &mut Tx,
    user_id: &str,
    instrument_id: &str,
    change: Decimal,
) -> Result<(), Error> {
    let known: Option<String> = sqlx::query_scalar(
        "SELECT quantity FROM positions WHERE user_id = $1 AND instrument_id = $2",
    )
    .bind(user_id)
    .bind(instrument_id)
    .fetch_optional(&mut **tx)
    .await?;
    let known = known.map_or(Ok(Decimal::ZERO), |text| number(&text))?;
    let quantity = known
        .checked_add(change)
        .map_err(|e| Error::Stored(e.to_string()))?;
    sqlx::query(
        "INSERT INTO positions (user_id, instrument_id, quantity) VALUES ($1, $2, $3) \
         ON CONFLICT (user_id, instrument_id) DO UPDATE SET quantity = excluded.quantity",
    )
    .bind(user_id)
    .bind(instrument_id)
    .bind(quantity.to_string())
    .execute(&mut **tx)
    .await?;
    Ok(())
}

pub async fn position_of(
    db: &Sqlite,
    user_id: &str,
    instrument_id: &str,
) -> Result<Decimal, Error> {
    let text: Option<String> = sqlx::query_scalar(
        "SELECT quantity FROM positions WHERE user_id = $1 AND instrument_id = $2",
    )
    .bind(user_id)
    .bind(instrument_id)
    .fetch_optional(db.read())
    .await?;
    text.map_or(Ok(Decimal::ZERO), |text| number(&text))
}

fn number(text: &str) -> Result<Decimal, Error> {
    text.parse()
        .map_err(|_| Error::Stored(format!("{text} is no number")))
}

fn code<T>(row: &SqliteRow, column: &str, from: fn(u8) -> Option<T>) -> Result<T, Error> {
    let value: i64 = row.try_get(column)?;
    u8::try_from(value)
        .ok()
        .and_then(from)
        .ok_or_else(|| Error::Stored(format!("{value} is no code of {column}")))
}

fn order_row(row: &SqliteRow) -> Result<OrderRow, Error> {
    let price: String = row.try_get("price")?;
    let client_text: Option<String> = row.try_get("client_text")?;
    let client_number: String = row.try_get("client_order_id")?;
    let engine_order_id: String = row.try_get("engine_order_id")?;
    Ok(OrderRow {
        order_id: row.try_get("order_id")?,
        user_id: row.try_get("user_id")?,
        instrument_id: row.try_get("instrument_id")?,
        side: code(row, "side", Side::from_code)?,
        order_type: code(row, "order_type", OrderType::from_code)?,
        time_in_force: code(row, "time_in_force", TimeInForce::from_code)?,
        post_only: row.try_get("post_only")?,
        stp: code(row, "stp", StpMode::from_code)?,
        expires_at_us: row.try_get("expires_at_us")?,
        price: match price.as_str() {
            "" => None,
            text => Some(number(text)?),
        },
        quantity: number(row.try_get("quantity")?)?,
        filled: number(row.try_get("filled")?)?,
        value_minor: row.try_get("value_minor")?,
        status: code(row, "status", OrderStatus::from_code)?,
        cancel_reason: row.try_get("cancel_reason")?,
        client_order_id: client_text.unwrap_or(match client_number.as_str() {
            "0" => String::new(),
            _ => client_number,
        }),
        engine_order_id: engine_order_id
            .parse()
            .map_err(|_| Error::Stored(format!("{engine_order_id} is no engine order id")))?,
        own_hold: row.try_get("own_hold")?,
        sequence: row.try_get::<i64, _>("sequence")?.unsigned_abs(),
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
    })
}

fn trade_row(row: &SqliteRow) -> Result<TradeRow, Error> {
    Ok(TradeRow {
        trade_id: row.try_get("trade_id")?,
        buy_order_id: row.try_get("buy_order_id")?,
        sell_order_id: row.try_get("sell_order_id")?,
        buyer_id: row.try_get("buyer_id")?,
        seller_id: row.try_get("seller_id")?,
        instrument_id: row.try_get("instrument_id")?,
        price: number(row.try_get("price")?)?,
        quantity: number(row.try_get("quantity")?)?,
        fee_minor: row.try_get("fee_minor")?,
        trade_number: row.try_get::<i64, _>("trade_number")?.unsigned_abs(),
        aggressor_side: code(row, "aggressor_side", Side::from_code)?,
        executed_at_us: row.try_get("executed_at_us")?,
        sequence: row.try_get::<i64, _>("sequence")?.unsigned_abs(),
    })
}
