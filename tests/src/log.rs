//! Reads the embedded event log of a running platform in a consumer group of its own. Events arrive
//! at most one second after they were published.

use std::time::Instant;

use events::{Embedded, Event, Log, Subscription};

use crate::Platform;
use crate::process::PATIENCE;

/// A reader that starts at the first event.
pub struct Events {
    log: Embedded,
    subscription: Subscription,
    /// Events read so far.
    pub seen: Vec<Event>,
}

impl Events {
    /// Opens the log under a new group.
    pub async fn open(platform: &Platform) -> Self {
        let log = Embedded::open(platform.data_dir().join("events"))
            .await
            .expect("the event log");
        let group = format!("tests-{}", uuid::Uuid::now_v7());
        let subscription = log
            .subscribe(&group, &events::topics::ALL)
            .await
            .expect("a subscription");
        Self {
            log,
            subscription,
            seen: Vec::new(),
        }
    }

    /// Reads until every name of `wanted` (a message's short name) was seen among the events that
    /// `pick` accepts; returns all accepted events.
    ///
    /// # Panics
    /// If one does not arrive within a minute.
    pub async fn until(&mut self, wanted: &[&str], pick: impl Fn(&Event) -> bool) -> Vec<Event> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let picked: Vec<&Event> = self.seen.iter().filter(|event| pick(event)).collect();
            let missing: Vec<&&str> = wanted
                .iter()
                .filter(|name| !picked.iter().any(|event| event.type_name.ends_with(**name)))
                .collect();
            if missing.is_empty() {
                return picked.into_iter().cloned().collect();
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            let delivery = tokio::time::timeout(rest, self.subscription.next())
                .await
                .unwrap_or_else(|_| {
                    let names: Vec<&str> = picked
                        .iter()
                        .map(|event| event.type_name.as_str())
                        .collect();
                    panic!("timed out: no {missing:?} among {names:?}")
                });
            self.seen.push(delivery.expect("a record").record.event);
        }
    }

    /// Closes the files.
    pub async fn close(self) {
        drop(self.subscription);
        self.log.close().await;
    }
}
