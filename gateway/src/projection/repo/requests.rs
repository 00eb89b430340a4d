//! Data that the market stores outside the journal: requests and answers of calls, positions, the
//! registry's status of instruments, and the feed's position.

use std::collections::{BTreeMap, HashMap};

use events::DirectTx;
use types::{Decimal, Id128, Sequence};
use uuid::Uuid;

use super::writer::insert_answer;
use super::{Store, sequence};
use crate::Error;
use crate::projection::batch::Answer;

/// Stores an empty answer for a call that changed nothing, unless the key has an answer.
pub async fn note_answer(db: &Store, key_hash: Id128) -> Result<(), Error> {
    let answer = Answer {
        key_hash,
        sequence: Sequence::ZERO,
        order: Sequence::ZERO,
        cancelled: 0,
        refusal: None,
    };
    let note = move |tx: &DirectTx| insert_answer(tx, &answer);
    db.file.transact(note).await
}

/// Stores the data of a call that its command does not contain: the correlation id and the text of
/// the client's order id.
pub async fn note_request(
    db: &Store,
    key_hash: Id128,
    correlation_id: &str,
    client_order: Option<(&str, u64, &str)>,
    now_us: i64,
) -> Result<(), Error> {
    let request = (key_hash.to_string(), correlation_id.to_owned(), now_us);
    let client_order = client_order
        .map(|(user_id, number, text)| (user_id.to_owned(), number.to_string(), text.to_owned()));
    let note = move |tx: &DirectTx| {
        tx.prepare_cached(
            "INSERT INTO requests (key_hash, correlation_id, created_at_us) VALUES (?1, ?2, ?3) \
             ON CONFLICT (key_hash) DO NOTHING",
        )?
        .execute(request)?;
        if let Some(values) = client_order {
            tx.prepare_cached(
                "INSERT INTO client_order_ids (user_id, number, text) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (user_id, number) DO NOTHING",
            )?
            .execute(values)?;
        }
        Ok::<_, events::Error>(())
    };
    Ok(db.file.transact(note).await?)
}

/// Removes those of the `limit` oldest requests that were stored before `before_us`. Returns how
/// many. Rows are numbered in the order in which they were stored.
pub async fn forget_requests(db: &Store, before_us: i64, limit: i64) -> Result<u64, Error> {
    let forget = move |tx: &DirectTx| {
        let removed = tx
            .prepare_cached(
                "DELETE FROM requests WHERE rowid IN \
                 (SELECT rowid FROM requests WHERE rowid > 0 ORDER BY rowid LIMIT ?2) \
                 AND created_at_us < ?1",
            )?
            .execute((before_us, limit))?;
        Ok::<_, events::Error>(removed as u64)
    };
    Ok(db.file.transact(forget).await?)
}

/// The text of a client order id with a number; `None` if no call has sent it.
pub async fn client_order_text(
    db: &Store,
    user_id: &str,
    number: u64,
) -> Result<Option<String>, Error> {
    let text =
        sqlx::query_scalar("SELECT text FROM client_order_ids WHERE user_id = $1 AND number = $2")
            .bind(user_id)
            .bind(number.to_string())
            .fetch_optional(db.read())
            .await?;
    Ok(text)
}

/// Known correlation ids of the calls with these keys. One statement.
pub async fn correlations(db: &Store, keys: &[Id128]) -> Result<HashMap<Id128, String>, Error> {
    let texts: Vec<String> = keys.iter().map(Id128::to_string).collect();
    let rows: Vec<(String, String)> = sqlx::query_as(
        "SELECT r.key_hash, r.correlation_id FROM json_each($1) k CROSS JOIN requests r ON r.key_hash = k.value",
    )
    .bind(serde_json::json!(texts).to_string())
    .fetch_all(db.read())
    .await?;
    let known = rows
        .into_iter()
        .filter_map(|(key, id)| Some((Id128::parse(&key)?, id)));
    Ok(known.collect())
}

/// The registry's status of an instrument at its last import.
pub async fn listed_status(db: &Store, instrument_id: &str) -> Result<Option<u8>, Error> {
    let code: Option<i64> =
        sqlx::query_scalar("SELECT status FROM listed WHERE instrument_id = $1")
            .bind(instrument_id)
            .fetch_optional(db.read())
            .await?;
    Ok(code.and_then(|code| u8::try_from(code).ok()))
}

pub async fn save_listed_status(db: &Store, instrument_id: &str, status: u8) -> Result<(), Error> {
    let values = (instrument_id.to_owned(), status);
    let save = move |tx: &DirectTx| {
        tx.prepare_cached(
            "INSERT INTO listed (instrument_id, status) VALUES (?1, ?2) \
             ON CONFLICT (instrument_id) DO UPDATE SET status = excluded.status",
        )?
        .execute(values)?;
        Ok::<_, events::Error>(())
    };
    Ok(db.file.transact(save).await?)
}

/// Changes of an instrument's positions by an event of the CFA service.
#[derive(Clone, Debug)]
pub struct Moves {
    pub event_id: Uuid,
    pub instrument_id: String,
    /// By user.
    pub changes: Vec<(String, Decimal)>,
}

/// Applies each event once. Writes each position once, with the sum of its changes. `consumer` is
/// the name in the inbox.
pub async fn move_positions(
    db: &Store,
    consumer: &'static str,
    run: Vec<Moves>,
) -> Result<(), Error> {
    let save = move |tx: &DirectTx| {
        let mut sums: BTreeMap<(&str, &str), Decimal> = BTreeMap::new();
        for moves in &run {
            if !tx.accept(consumer, moves.event_id)? {
                continue;
            }
            for (user_id, change) in &moves.changes {
                let sum = sums.entry((user_id, &moves.instrument_id)).or_default();
                *sum = sum
                    .checked_add(*change)
                    .map_err(|e| Error::Stored(e.to_string()))?;
            }
        }
        for ((user_id, instrument_id), change) in sums {
            move_position(tx, user_id, instrument_id, change)?;
        }
        Ok(())
    };
    db.file.transact(save).await
}

/// Adds a positive or negative change to a position.
fn move_position(
    tx: &DirectTx,
    user_id: &str,
    instrument_id: &str,
    change: Decimal,
) -> Result<(), Error> {
    let known = || -> Result<Option<String>, events::Error> {
        let mut select = tx.prepare_cached(
            "SELECT quantity FROM positions WHERE user_id = ?1 AND instrument_id = ?2",
        )?;
        let mut rows = select.query((user_id, instrument_id))?;
        Ok(rows.next()?.map(|row| row.get(0)).transpose()?)
    };
    let known = known()?.map_or(Ok(Decimal::ZERO), |text| number(&text))?;
    let quantity = known
        .checked_add(change)
        .map_err(|e| Error::Stored(e.to_string()))?;
    let save = || -> Result<(), events::Error> {
        tx.prepare_cached(
            "INSERT INTO positions (user_id, instrument_id, quantity) VALUES (?1, ?2, ?3) \
             ON CONFLICT (user_id, instrument_id) DO UPDATE SET quantity = excluded.quantity",
        )?
        .execute((user_id, instrument_id, quantity.to_string()))?;
        Ok(())
    };
    Ok(save()?)
}

pub async fn position_of(db: &Store, user_id: &str, instrument_id: &str) -> Result<Decimal, Error> {
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
        .map_err(|_| Error::Stored(format!("{text} is not a number")))
}

/// Last record whose events are published.
pub async fn feed_position(db: &Store) -> Result<Sequence, Error> {
    let stored = sqlx::query_scalar("SELECT sequence FROM feed WHERE id = 1")
        .fetch_one(db.read())
        .await?;
    Ok(sequence(stored))
}

pub async fn save_feed_position(db: &Store, through: Sequence) -> Result<(), Error> {
    let set = move |tx: &DirectTx| {
        tx.prepare_cached("UPDATE feed SET sequence = ?1 WHERE id = 1")?
            .execute([through.get().cast_signed()])?;
        Ok::<_, events::Error>(())
    };
    Ok(db.file.transact(set).await?)
}
