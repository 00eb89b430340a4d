//! Inbox: ids of the events a consumer has handled, in the database and transaction of the effect
//! (D26).
//!
//! The key is the event id, not its offset, so an event republished after a relay's crash is
//! detected too.

use std::collections::HashSet;

use async_recursion::async_recursion as boxed;
use sqlx::SqliteConnection;
use uuid::Uuid;

use crate::Error;

/// Binds consumer, event id and time in microseconds.
pub(crate) const ACCEPT: &str = "INSERT INTO inbox (consumer, event_id, accepted_at_us) \
                                 VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";

/// Records the event in the caller's transaction. `false` = seen before: do nothing and commit or
/// drop the transaction.
///
/// `consumer` names the handler, not the process: `ledger.chain-receipts`.
///
/// # Errors
/// [`Error::Store`].
#[boxed]
pub async fn accept_in_tx(
    tx: &mut SqliteConnection,
    consumer: &str,
    event_id: Uuid,
) -> Result<bool, Error> {
    let accepted = accept_many_in_tx(tx, consumer, &[event_id]).await?;
    Ok(accepted == [true])
}

/// As [`accept_in_tx`], for several events: whether each is new. Of duplicates in the slice only
/// the first counts.
///
/// # Errors
/// [`Error::Store`].
#[boxed]
pub async fn accept_many_in_tx(
    tx: &mut SqliteConnection,
    consumer: &str,
    event_ids: &[Uuid],
) -> Result<Vec<bool>, Error> {
    let texts: Vec<String> = event_ids.iter().map(Uuid::to_string).collect();
    let accepted: Vec<String> = sqlx::query_scalar(
        "INSERT INTO inbox (consumer, event_id, accepted_at_us) SELECT $1, value, $3 FROM json_each($2) WHERE TRUE \
         ON CONFLICT DO NOTHING RETURNING event_id",
    )
    .bind(consumer)
    .bind(serde_json::json!(texts).to_string())
    .bind(service_kit::clock::now_us())
    .fetch_all(tx)
    .await?;
    Ok(flag_first_occurrences(
        event_ids,
        accepted.into_iter().collect(),
    ))
}

/// Whether each event is in `new` and its first occurrence.
pub(crate) fn flag_first_occurrences(event_ids: &[Uuid], mut new: HashSet<String>) -> Vec<bool> {
    event_ids
        .iter()
        .map(|event_id| new.remove(&event_id.to_string()))
        .collect()
}
