//! `[events]`.

use serde::{Deserialize, Serialize};

/// Transport of events between services.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Events {
    /// Kafka brokers (`host:port,host:port`); unset: the embedded log.
    pub kafka_brokers: Option<String>,
    /// Days for which the embedded log keeps a record, at least 7; 0: for ever. A record is removed
    /// only once every consumer group that has ever read its topic has it, and never one of the
    /// last 200,000. A topic without a group and the topics of dead letters keep all. A day after
    /// the records of a time the services forget the ids of the events that they handled then.
    pub retain_days: u32,
    /// Records that the embedded log keeps, at least 200,000, if it is to keep fewer than those of
    /// `retain_days`.
    pub retain_records: Option<u64>,
    /// Days after which the brokers have no record of the platform's topics any more, at least 7.
    /// The services forget the ids of handled events a day later. Unset: never.
    pub kafka_retention_days: Option<u32>,
}

/// Minimum of `retain_days` and `kafka_retention_days`: a stopped service may take some days.
const RETAIN_DAYS_MIN: u32 = 7;
const SECONDS_PER_DAY: u64 = 86_400;

impl Default for Events {
    fn default() -> Self {
        Self {
            kafka_brokers: None,
            retain_days: 30,
            retain_records: None,
            kafka_retention_days: None,
        }
    }
}

impl Events {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.retain_days == 0 || self.retain_days >= RETAIN_DAYS_MIN,
            "configuration: events.retain_days is {}, the minimum is {RETAIN_DAYS_MIN}; 0 keeps all",
            self.retain_days
        );
        let kafka_days = self.kafka_retention_days.unwrap_or(RETAIN_DAYS_MIN);
        anyhow::ensure!(
            kafka_days >= RETAIN_DAYS_MIN,
            "configuration: events.kafka_retention_days is {kafka_days}, \
             the minimum is {RETAIN_DAYS_MIN}"
        );
        Ok(())
    }

    /// Which records the embedded log keeps.
    pub fn retention(&self) -> events::Retention {
        events::Retention {
            records: self.retain_records,
            age: (self.retain_days > 0).then(|| days(self.retain_days)),
        }
    }

    /// Age at which the brokers have no record any more, if the operator states it.
    pub fn kafka_retention(&self) -> Option<std::time::Duration> {
        self.kafka_retention_days.map(days)
    }
}

fn days(count: u32) -> std::time::Duration {
    std::time::Duration::from_secs(u64::from(count) * SECONDS_PER_DAY)
}
