//! Inbox: which events a consumer has taken effect of, in the database and the transaction of the effect (D26).
//!
//! The id is the event's own, not its offset, so an event that is published again after a relay's crash is recognised too.

use std::collections::HashSet;

use sqlx::{QueryBuilder, Sqlite, SqliteConnection};
use uuid::Uuid;

use crate::{Error, event::now_us};

/// Rows of one statement.
const ROWS_MAX: usize = 256;
/// Consumer, event, now in microseconds.
pub(crate) const ACCEPT: &str = "INSERT INTO inbox (consumer, event_id, accepted_at_us) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";

/// Notes the event in the caller's transaction. `false` = seen before: do nothing and commit (or drop) the transaction.
///
/// `consumer` names the handler, not the process: `ledger.chain-receipts`.
///
/// # Errors
/// [`Error::Store`].
pub async fn accept_in_tx(
    tx: &mut SqliteConnection,
    consumer: &str,
    event_id: Uuid,
) -> Result<bool, Error> {
    let accepted = accept_many_in_tx(tx, consumer, &[event_id]).await?;
    Ok(accepted == [true])
}

/// As [`accept_in_tx`], for several: whether each is seen for the first time. Of one that is named twice the first counts.
///
/// # Errors
/// [`Error::Store`].
pub async fn accept_many_in_tx(
    tx: &mut SqliteConnection,
    consumer: &str,
    event_ids: &[Uuid],
) -> Result<Vec<bool>, Error> {
    let at_us = now_us();
    let mut new = HashSet::new();
    for part in event_ids.chunks(ROWS_MAX) {
        let mut query =
            QueryBuilder::<Sqlite>::new("INSERT INTO inbox (consumer, event_id, accepted_at_us) ");
        query.push_values(part, |mut row, event_id| {
            row.push_bind(consumer)
                .push_bind(event_id.to_string())
                .push_bind(at_us);
        });
        query.push(" ON CONFLICT DO NOTHING RETURNING event_id");
        let accepted: Vec<String> = query.build_query_scalar().fetch_all(&mut *tx).await?;
        new.extend(accepted);
    }
    Ok(first_of_each(event_ids, new))
}

/// Whether each event is among the new ones, but for its repeats.
pub(crate) fn first_of_each(event_ids: &[Uuid], mut new: HashSet<String>) -> Vec<bool> {
    event_ids
        .iter()
        .map(|event_id| new.remove(&event_id.to_string()))
        .collect()
}
