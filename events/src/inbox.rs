//! Inbox: which events a consumer has taken effect of, in the database and the transaction of the effect (D26).
//!
//! The id is the event's own, not its offset, so an event that is published again after a relay's crash is recognised too.

use sqlx::SqliteConnection;
use uuid::Uuid;

use crate::{Error, event::now_us};

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
    let inserted = sqlx::query(ACCEPT)
        .bind(consumer)
        .bind(event_id.to_string())
        .bind(now_us())
        .execute(tx)
        .await?;
    Ok(inserted.rows_affected() == 1)
}
