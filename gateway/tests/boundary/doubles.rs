//! A double of the event log.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use events::Log;
use tokio::sync::watch;

/// An event log that refuses events while it is unavailable.
pub struct UnavailableLog {
    pub log: Arc<dyn Log>,
    pub is_unavailable: Arc<AtomicBool>,
    /// While unavailable, `publish` blocks like a Kafka client instead of returning an error.
    pub hangs: bool,
}

impl UnavailableLog {
    fn check(&self) -> Result<(), events::Error> {
        match self.is_unavailable.load(Ordering::SeqCst) {
            true => Err(events::Error::Closed),
            false => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl Log for UnavailableLog {
    async fn publish(&self, events: &[events::Event]) -> Result<(), events::Error> {
        while self.hangs && self.is_unavailable.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.check()?;
        self.log.publish(events).await
    }

    async fn append(&self, records: &[events::Record]) -> Result<(), events::Error> {
        self.check()?;
        self.log.append(records).await
    }

    async fn subscribe(
        &self,
        group: &str,
        topics: &[&str],
    ) -> Result<events::Subscription, events::Error> {
        self.log.subscribe(group, topics).await
    }

    async fn backlog(
        &self,
        group: &str,
        topics: &[&str],
    ) -> Result<Vec<events::Delivery>, events::Error> {
        self.log.backlog(group, topics).await
    }

    async fn commit(&self, group: &str, position: &events::Position) -> Result<(), events::Error> {
        self.log.commit(group, position).await
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.log.failing()
    }

    fn waiting(&self) -> &events::Waiting {
        self.log.waiting()
    }
}
