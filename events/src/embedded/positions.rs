//! Compares the stored positions of consumer groups with the records of their topics. Read-only,
//! with or without a running platform.
//!
//! A group commits positions of records that it has received, and retention keeps the last record
//! that a group has consumed. So a position after the last record of its topic, or between two
//! records, was altered, or the log is older than the positions: its group skips records. A
//! position before the first record is not a finding: a power loss may set a position back, and
//! its group has consumed the records that were removed. A position that was moved to another
//! record of its topic is not found.

use std::path::Path;

use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};

use crate::Error;

/// Result of [`check_positions`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PositionCheck {
    /// Positions compared: one per group and topic.
    pub positions: u64,
    /// Empty: each position is that of a record, or its group has consumed nothing yet.
    pub findings: Vec<String>,
}

/// Compares all positions of the log in a folder with the records of their topics.
///
/// # Errors
/// [`Error::Store`]: a file is missing or cannot be read.
pub async fn check_positions(folder: &Path) -> Result<PositionCheck, Error> {
    // Before the log is read: a position is committed after its record is stored.
    let mut offsets = connect(&folder.join("offsets.db")).await?;
    let stored: Vec<(String, String, i64)> = sqlx::query_as(
        "SELECT consumer_group, topic, position FROM offsets ORDER BY consumer_group, topic",
    )
    .fetch_all(&mut offsets)
    .await?;
    offsets.close().await?;
    let mut log = connect(&folder.join("log.db")).await?;
    let mut checked = PositionCheck::default();
    for (group, topic, position) in stored {
        checked.positions += 1;
        if let Some(fault) = fault(&mut log, &topic, position).await? {
            let finding = format!("position {position} of group {group} in topic {topic}: {fault}");
            checked.findings.push(finding);
        }
    }
    log.close().await?;
    Ok(checked)
}

async fn connect(file: &Path) -> Result<SqliteConnection, Error> {
    let options = SqliteConnectOptions::new().filename(file).read_only(true);
    Ok(SqliteConnection::connect_with(&options).await?)
}

/// Why a group cannot have this position; `None`: it can.
async fn fault(
    log: &mut SqliteConnection,
    topic: &str,
    position: i64,
) -> Result<Option<String>, Error> {
    // The group has consumed nothing yet.
    if position == 0 {
        return Ok(None);
    }
    if position < 0 {
        return Ok(Some("is negative".to_owned()));
    }
    let last: Option<i64> = sqlx::query_scalar(
        "SELECT position + count - 1 FROM log INDEXED BY log_by_topic WHERE topic = $1 \
         ORDER BY position DESC LIMIT 1",
    )
    .bind(topic)
    .fetch_optional(&mut *log)
    .await?;
    let last = last.unwrap_or(0);
    if position > last {
        let fault = format!("is after the last record, {last}: the group skips records");
        return Ok(Some(fault));
    }
    // End of the row that begins at or before the position; `None`: its record is removed.
    let end: Option<i64> = sqlx::query_scalar(
        "SELECT position + count - 1 FROM log INDEXED BY log_by_topic \
         WHERE topic = $1 AND position <= $2 ORDER BY position DESC LIMIT 1",
    )
    .bind(topic)
    .bind(position)
    .fetch_optional(&mut *log)
    .await?;
    let is_between = end.is_some_and(|end| end < position);
    Ok(is_between.then(|| "is that of no record of the topic".to_owned()))
}
