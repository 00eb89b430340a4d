//! Converts between records and Kafka messages (D24).
//!
//! Decoding is lenient: external producers may omit headers. Without a UUID in `ce_id` the id is
//! derived from that text or from the position, so repeated deliveries are still detected.

use rdkafka::{
    Message,
    message::{BorrowedMessage, Header, Headers, OwnedHeaders},
};
use uuid::Uuid;

use crate::{Delivery, Event, Position, Record, event::from_rfc3339};

pub(super) fn headers(record: &Record) -> OwnedHeaders {
    let own = record.event.headers();
    let further = record.headers.iter().map(|(name, value)| (&**name, value));
    own.iter()
        .map(|(name, value)| (*name, value))
        .chain(further)
        .fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header {
                key,
                value: Some(value),
            })
        })
}

pub(super) fn delivery(message: &BorrowedMessage<'_>) -> Delivery {
    let position = Position {
        topic: message.topic().to_owned(),
        partition: message.partition(),
        offset: message.offset(),
    };
    let mut headers: Vec<(String, String)> = message
        .headers()
        .map(|headers| {
            let pair = |header: Header<'_, &[u8]>| {
                let value = String::from_utf8_lossy(header.value.unwrap_or_default());
                (header.key.to_owned(), value.into_owned())
            };
            headers.iter().map(pair).collect()
        })
        .unwrap_or_default();
    let mut take = |name: &str| {
        let index = headers.iter().position(|(key, _)| key == name)?;
        Some(headers.remove(index).1)
    };
    let given_id = take("ce_id").filter(|id| !id.is_empty());
    let name = given_id.unwrap_or_else(|| position.to_string());
    let id = Uuid::parse_str(&name)
        .unwrap_or_else(|_| Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes()));
    let occurred_at_us = take("ce_time")
        .and_then(|text| from_rfc3339(&text))
        .or_else(|| message.timestamp().to_millis()?.checked_mul(1_000))
        .unwrap_or_default();
    let event = Event {
        id,
        topic: position.topic.clone(),
        key: String::from_utf8_lossy(message.key().unwrap_or_default()).into_owned(),
        type_name: take("ce_type").unwrap_or_default(),
        subject: take("ce_subject").unwrap_or_default(),
        source: take("ce_source").unwrap_or_default(),
        correlation_id: take("correlation_id").unwrap_or_default(),
        occurred_at_us,
        payload: message.payload().unwrap_or_default().to_vec(),
    };
    Delivery {
        record: Record { event, headers },
        position,
    }
}
