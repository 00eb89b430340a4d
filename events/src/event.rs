//! One event and its header form (D24): protobuf bytes as the value, CloudEvents binary headers.

use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

/// An event that a service publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `ce_id`; consumers detect a repeated delivery by it. Derive it (UUIDv5) if the same event
    /// may be emitted again.
    pub id: Uuid,
    /// One of [`crate::topics`].
    pub topic: String,
    /// Events of one key keep their order (D25).
    pub key: String,
    /// Full protobuf name of the payload, `dfa.ledger.v1.HoldCreated`.
    pub type_name: String,
    /// Subject of the event, usually the key.
    pub subject: String,
    /// Emitting service, `ledger`.
    pub source: String,
    /// Correlation id of the causing request (R004, R260).
    pub correlation_id: String,
    /// Microseconds since the epoch.
    pub occurred_at_us: i64,
    /// Encoded message of `type_name`.
    pub payload: Vec<u8>,
}

/// A borrowed [`Event`]: bulk writers avoid the copies.
#[derive(Clone, Copy, Debug)]
pub struct EventRef<'a> {
    pub id: Uuid,
    pub topic: &'a str,
    pub key: &'a str,
    pub type_name: &'a str,
    pub subject: &'a str,
    pub source: &'a str,
    pub correlation_id: &'a str,
    pub occurred_at_us: i64,
    pub payload: &'a [u8],
}

impl EventRef<'_> {
    pub fn to_event(self) -> Event {
        Event {
            id: self.id,
            topic: self.topic.to_owned(),
            key: self.key.to_owned(),
            type_name: self.type_name.to_owned(),
            subject: self.subject.to_owned(),
            source: self.source.to_owned(),
            correlation_id: self.correlation_id.to_owned(),
            occurred_at_us: self.occurred_at_us,
            payload: self.payload.to_owned(),
        }
    }
}

impl<'a> From<&'a Event> for EventRef<'a> {
    fn from(event: &'a Event) -> Self {
        EventRef {
            id: event.id,
            topic: &event.topic,
            key: &event.key,
            type_name: &event.type_name,
            subject: &event.subject,
            source: &event.source,
            correlation_id: &event.correlation_id,
            occurred_at_us: event.occurred_at_us,
            payload: &event.payload,
        }
    }
}

impl Event {
    /// `HoldCreated` of `dfa.ledger.v1.HoldCreated`.
    pub fn short_type(&self) -> &str {
        let name = &self.type_name;
        name.rsplit('.').next().unwrap_or(name)
    }

    /// D24 headers in a fixed order.
    pub fn headers(&self) -> [(&'static str, String); 6] {
        [
            ("ce_id", self.id.to_string()),
            ("ce_type", self.type_name.clone()),
            ("ce_source", self.source.clone()),
            ("ce_time", rfc3339(self.occurred_at_us)),
            ("ce_subject", self.subject.clone()),
            ("correlation_id", self.correlation_id.clone()),
        ]
    }
}

/// An event in a log with additional headers. Only the dead-letter path uses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub event: Event,
    pub headers: Vec<(String, String)>,
}

impl Record {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }
}

impl From<Event> for Record {
    fn from(event: Event) -> Self {
        Record {
            event,
            headers: Vec::new(),
        }
    }
}

/// RFC 3339 with microseconds, in UTC.
pub(crate) fn rfc3339(at_us: i64) -> String {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(at_us) * 1_000)
        .ok()
        .and_then(|at| at.format(&Rfc3339).ok())
        .unwrap_or_default()
}

/// Microseconds of an RFC 3339 text.
pub(crate) fn from_rfc3339(text: &str) -> Option<i64> {
    let at = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    i64::try_from(at.unix_timestamp_nanos() / 1_000).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_survive_their_text_form() {
        for at_us in [0, 1_763_706_000_123_456, -1] {
            assert_eq!(from_rfc3339(&rfc3339(at_us)), Some(at_us));
        }
    }
}
