//! Recently published ids, to detect a repeated publication.
//!
//! A relay that crashed after publishing, or lost its deletes in a power loss, sends the same ids
//! again. So does the market's feed, which saves its position every 16,384 events. Both repeat far
//! fewer ids than are kept here. An id repeated later than that is stored twice, and consumers drop
//! it by their inbox, as with any log. Records with additional headers (dead letters, replays) are
//! repeated on purpose and not tracked. Cost: about 5 MB with all ids. The ids are loaded from the
//! log at the first write, and again if another process has written since.

use std::collections::{HashSet, VecDeque};

use foldhash::fast::RandomState;
use sqlx::SqliteConnection;
use uuid::Uuid;

use super::source::malformed;
use crate::{Error, Event, pack};

/// Number of ids kept.
const RECENT_MAX: usize = 65_536;

#[derive(Default)]
pub(super) struct Recent {
    /// Next position of the log when last written; `None`: reload.
    next: Option<i64>,
    topics: Vec<String>,
    ids: HashSet<(u16, Uuid), RandomState>,
    order: VecDeque<(u16, Uuid)>,
}

impl Recent {
    /// Returns the next position of the log. Without a [`Self::confirm`] the next call reloads the
    /// ids.
    pub async fn begin(&mut self, tx: &mut SqliteConnection) -> Result<i64, Error> {
        const NEXT: &str = "SELECT COALESCE(MAX(position + count), 1) \
                            FROM (SELECT * FROM log ORDER BY position DESC LIMIT 1)";
        let next = sqlx::query_scalar(NEXT).fetch_one(&mut *tx).await?;
        if self.next.take() != Some(next) {
            self.reload(tx, next).await?;
        }
        Ok(next)
    }

    /// Confirms that the ids added since [`Self::begin`] are in the log, up to this position.
    pub fn confirm(&mut self, next: i64) {
        self.next = Some(next);
    }

    /// Adds a record; returns `false` if its id is known.
    pub fn add(&mut self, event: &Event, headers: &[(String, String)]) -> bool {
        if !headers.is_empty() {
            return true;
        }
        let topic = self.topic(&event.topic);
        self.add_id(topic, event.id)
    }

    /// As [`Self::add`], for events of one topic.
    pub fn add_all<'a>(
        &'a mut self,
        topic: &str,
        ids: &'a [Uuid],
    ) -> impl Iterator<Item = bool> + use<'a> {
        let topic = self.topic(topic);
        ids.iter().map(move |id| self.add_id(topic, *id))
    }

    fn add_id(&mut self, topic: u16, id: Uuid) -> bool {
        let id = (topic, id);
        let is_new = self.ids.insert(id);
        if is_new {
            self.order.push_back(id);
        }
        if self.order.len() > RECENT_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        is_new
    }

    fn topic(&mut self, topic: &str) -> u16 {
        let place = self.topics.iter().position(|known| known == topic);
        let place = place.unwrap_or_else(|| {
            self.topics.push(topic.to_owned());
            self.topics.len() - 1
        });
        u16::try_from(place).expect("the platform has some dozen topics")
    }

    async fn reload(&mut self, tx: &mut SqliteConnection, next: i64) -> Result<(), Error> {
        self.ids.clear();
        self.order.clear();
        let rows: Vec<(i64, i64, Vec<u8>)> = sqlx::query_as(
            "SELECT position, count, records FROM log WHERE position >= \
             COALESCE((SELECT MAX(position) FROM log WHERE position <= $1), 0) ORDER BY position",
        )
        .bind(next - RECENT_MAX as i64)
        .fetch_all(tx)
        .await?;
        for (position, count, records) in rows {
            let records = pack::unpack(&records, count)
                .map_err(|reason| malformed(&format!("log {position}"), reason))?;
            for record in &records {
                self.add(&record.event, &record.headers);
            }
        }
        Ok(())
    }
}
