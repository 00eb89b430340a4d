//! Dead letters: records a group gave up, on `<topic>.dlq` with the reason in headers, and the way back (D26).

use std::time::Duration;

use crate::{
    Delivery, Error, Log, Record,
    event::{now_us, rfc3339},
    topics,
};

pub const REASON: &str = "dlq_reason";
pub const GROUP: &str = "dlq_group";
pub const ATTEMPTS: &str = "dlq_attempts";
pub const POSITION: &str = "dlq_position";
pub const AT: &str = "dlq_at";
/// On a replayed record: the only group that shall handle it.
pub const REPLAY_FOR: &str = "replay_for";

/// Group that reads dead-letter topics for [`replay`].
const REPLAY_GROUP: &str = "dlq-replay";
/// Longest reason kept, in bytes.
const REASON_BYTES_MAX: usize = 1_024;

pub(crate) fn letter(delivery: &Delivery, group: &str, attempts: u32, reason: &str) -> Record {
    let mut event = delivery.record.event.clone();
    event.topic = topics::dlq(&event.topic);
    let reason_end = reason.floor_char_boundary(REASON_BYTES_MAX);
    let headers = [
        (REASON, reason[..reason_end].to_owned()),
        (GROUP, group.to_owned()),
        (ATTEMPTS, attempts.to_string()),
        (POSITION, delivery.position.to_string()),
        (AT, rfc3339(now_us())),
    ];
    Record {
        event,
        headers: headers
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    }
}

/// Puts the dead letters of `topic` back, each for the group that gave it up. Stops when no letter comes for `idle`; returns how many.
///
/// # Errors
/// [`Error`] of the log; letters put back so far stay put back.
pub async fn replay(log: &dyn Log, topic: &str, idle: Duration) -> Result<usize, Error> {
    let dead = topics::dlq(topic);
    let mut subscription = log.subscribe(REPLAY_GROUP, &[&dead]).await?;
    let mut replayed = 0;
    while let Ok(next) = tokio::time::timeout(idle, subscription.next()).await {
        let delivery = next?;
        let group = delivery.record.header(GROUP).unwrap_or_default().to_owned();
        let mut record = Record::from(delivery.record.event);
        record.event.topic = topic.to_owned();
        record.headers.push((REPLAY_FOR.to_owned(), group));
        log.append(std::slice::from_ref(&record)).await?;
        subscription.commit(&delivery.position).await?;
        replayed += 1;
    }
    Ok(replayed)
}
