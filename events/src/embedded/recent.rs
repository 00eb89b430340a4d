//! Which records were published last, so that a repeated publication of the same ids is recognised.
//!
//! A relay that crashed after publishing, or whose deletes a power loss took back, sends the same
//! ids again: at most some batches, far fewer than are remembered here; so does the market's feed,
//! which saves its position after 16,384 events. What is older than that
//! comes twice, and consumers drop it by their inbox as they do with any log. Records with headers
//! of their own (dead letters, replays) are meant to repeat and are not remembered. Cost: 48 bytes
//! a record; read from the log at the first write, and again where another process has written
//! since.

use std::collections::{HashSet, VecDeque};

use foldhash::fast::RandomState;
use sqlx::SqliteConnection;
use uuid::Uuid;

use super::source::malformed;
use crate::{Error, Event, pack};

/// Records remembered.
const RECENT_MAX: usize = 65_536;

#[derive(Default)]
pub(super) struct Recent {
    /// Next position of the log as it is known here; `None`: to be read.
    next: Option<i64>,
    topics: Vec<String>,
    ids: HashSet<(u16, Uuid), RandomState>,
    order: VecDeque<(u16, Uuid)>,
}

impl Recent {
    /// The next position in the log. Until [`Self::keep`] nothing is taken as known.
    pub async fn begin(&mut self, tx: &mut SqliteConnection) -> Result<i64, Error> {
        let next = sqlx::query_scalar("SELECT COALESCE(MAX(position + count), 1) FROM (SELECT * FROM log ORDER BY position DESC LIMIT 1)")
            .fetch_one(&mut *tx)
            .await?;
        if self.next.take() != Some(next) {
            self.read(tx, next).await?;
        }
        Ok(next)
    }

    /// What was added since [`Self::begin`] is in the log, up to this position.
    pub fn keep(&mut self, next: i64) {
        self.next = Some(next);
    }

    /// Remembers a record, an event with these further headers; `false` where it is known.
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

    async fn read(&mut self, tx: &mut SqliteConnection, next: i64) -> Result<(), Error> {
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
