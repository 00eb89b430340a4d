//! An event log that drops the records a test selects.

use std::sync::{Arc, Mutex};

use events::{Delivery, Embedded, Error, Event, Log, Position, Record, Subscription, Waiting};
use tokio::sync::watch;

/// A log that drops selected records.
pub struct Losing {
    log: Arc<Embedded>,
    /// Short names of the dropped types, and the dropped events.
    lost: Mutex<(Vec<&'static str>, Vec<Event>)>,
}

impl Losing {
    pub fn new(log: Arc<Embedded>) -> Self {
        Self {
            log,
            lost: Mutex::default(),
        }
    }

    pub fn lose(&self, types: &[&'static str]) {
        self.lost.lock().expect("no panic with the lock").0 = types.to_vec();
    }

    pub fn lost(&self) -> Vec<Event> {
        self.lost.lock().expect("no panic with the lock").1.clone()
    }

    fn keep(&self, records: &[Record]) -> Vec<Record> {
        let mut lost = self.lost.lock().expect("no panic with the lock");
        let (gone, kept): (Vec<Record>, Vec<Record>) = records
            .iter()
            .cloned()
            .partition(|record| lost.0.contains(&record.event.short_type()));
        lost.1.extend(gone.into_iter().map(|record| record.event));
        kept
    }
}

#[async_trait::async_trait]
impl Log for Losing {
    async fn append(&self, records: &[Record]) -> Result<(), Error> {
        self.log.append(&self.keep(records)).await
    }

    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error> {
        self.log.subscribe(group, topics).await
    }

    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, Error> {
        self.log.backlog(group, topics).await
    }

    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error> {
        Log::commit(&*self.log, group, position).await
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.log.failing()
    }

    fn waiting(&self) -> &Waiting {
        self.log.waiting()
    }
}
