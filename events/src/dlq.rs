//! Dead letters and their replay (D26). A record that a group gave up is on `<topic>.dlq`, with the
//! reason in its headers.

use std::collections::{BTreeSet, HashSet};

use async_recursion::async_recursion as boxed;
use uuid::Uuid;

use crate::{Delivery, Error, Log, Position, Record, event::rfc3339, topics};

pub const REASON: &str = "dlq_reason";
pub const GROUP: &str = "dlq_group";
pub const ATTEMPTS: &str = "dlq_attempts";
pub const POSITION: &str = "dlq_position";
pub const AT: &str = "dlq_at";
/// Header of a replayed record: the group that handles it. Other groups skip it.
pub const REPLAY_FOR: &str = "replay_for";

/// Group that lists dead letters. It never commits, so each listing has all of them.
const READER: &str = "dlq-reader";
/// Maximum length of a stored reason, in bytes.
const REASON_BYTES_MAX: usize = 1_024;

/// The dead letter of a record.
pub(crate) fn letter(delivery: &Delivery, group: &str, attempts: u32, reason: &str) -> Record {
    let mut event = delivery.record.event.clone();
    event.topic = topics::dlq(&event.topic);
    let reason_end = reason.floor_char_boundary(REASON_BYTES_MAX);
    let headers = [
        (REASON, reason[..reason_end].to_owned()),
        (GROUP, group.to_owned()),
        (ATTEMPTS, attempts.to_string()),
        (POSITION, delivery.position.to_string()),
        (AT, rfc3339(service_kit::clock::now_us())),
    ];
    Record {
        event,
        headers: headers
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    }
}

/// A dead letter, without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// Position in the dead-letter topic.
    pub position: Position,
    /// Original topic.
    pub topic: String,
    pub event_id: Uuid,
    pub key: String,
    pub type_name: String,
    /// The group that gave the record up, and its number of attempts.
    pub group: String,
    pub attempts: String,
    pub reason: String,
    /// RFC 3339.
    pub given_up_at: String,
    /// Already replayed.
    pub is_replayed: bool,
}

impl DeadLetter {
    fn read(delivery: Delivery) -> Self {
        let record = delivery.record;
        let header = |name| record.header(name).unwrap_or_default().to_owned();
        DeadLetter {
            topic: topics::of_dlq(&record.event.topic).to_owned(),
            group: header(GROUP),
            attempts: header(ATTEMPTS),
            reason: header(REASON),
            given_up_at: header(AT),
            position: delivery.position,
            event_id: record.event.id,
            key: record.event.key,
            type_name: record.event.type_name,
            is_replayed: false,
        }
    }
}

/// All dead letters of these topics (of one group if given), in partition order. Read-only.
///
/// # Errors
/// [`Error`] of the log.
#[boxed]
pub async fn list(
    log: &dyn Log,
    topics: &[&str],
    group: Option<&str>,
) -> Result<Vec<DeadLetter>, Error> {
    let dead: Vec<String> = topics.iter().map(|topic| topics::dlq(topic)).collect();
    let dead: Vec<&str> = dead.iter().map(String::as_str).collect();
    let mut letters: Vec<DeadLetter> = log
        .backlog(READER, &dead)
        .await?
        .into_iter()
        .map(DeadLetter::read)
        .filter(|letter| group.is_none_or(|group| letter.group == group))
        .collect();
    let groups: BTreeSet<String> = letters.iter().map(|letter| letter.group.clone()).collect();
    for group in groups {
        let waiting: HashSet<Position> = log
            .backlog(&replay_group(&group), &dead)
            .await?
            .into_iter()
            .map(|delivery| delivery.position)
            .collect();
        for letter in letters.iter_mut().filter(|letter| letter.group == group) {
            letter.is_replayed = !waiting.contains(&letter.position);
        }
    }
    Ok(letters)
}

/// Replays the dead letters of these topics to the groups that gave them up, once each.
///
/// With `group`, only the letters of that group. Returns the replayed letters. Concurrent replays
/// of one group may replay a letter twice; handlers must be idempotent.
///
/// # Errors
/// [`Error`] of the log; letters replayed so far remain replayed.
#[boxed]
pub async fn replay(
    log: &dyn Log,
    topics: &[&str],
    group: Option<&str>,
) -> Result<Vec<DeadLetter>, Error> {
    let groups: BTreeSet<String> = list(log, topics, group)
        .await?
        .into_iter()
        .filter(|letter| !letter.is_replayed)
        .map(|letter| letter.group)
        .collect();
    let dead: Vec<String> = topics.iter().map(|topic| topics::dlq(topic)).collect();
    let dead: Vec<&str> = dead.iter().map(String::as_str).collect();
    let mut replayed = Vec::new();
    for group in groups {
        let replay_group = replay_group(&group);
        for delivery in log.backlog(&replay_group, &dead).await? {
            let position = delivery.position.clone();
            if delivery.record.header(GROUP) == Some(group.as_str()) {
                let mut record = Record::from(delivery.record.event.clone());
                record.event.topic = topics::of_dlq(&position.topic).to_owned();
                record.headers.push((REPLAY_FOR.to_owned(), group.clone()));
                log.append(std::slice::from_ref(&record)).await?;
                replayed.push(DeadLetter {
                    is_replayed: true,
                    ..DeadLetter::read(delivery)
                });
            }
            log.commit(&replay_group, &position).await?;
        }
    }
    Ok(replayed)
}

/// Replay progress is stored per group, so one group can be replayed without the others.
fn replay_group(group: &str) -> String {
    format!("dlq-replay.{group}")
}
