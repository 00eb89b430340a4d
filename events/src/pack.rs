//! Many records as one value: a row of an outbox in SQLite, a row of the embedded log.
//!
//! ```text
//! version: 1 | record ... | CRC-32C of all before, 4 bytes little-endian
//! record: id, 16 bytes | topic | key | type | source | correlation id | subject | time | payload | headers
//! text: 0 = that of the record before (subject: this record's key), or length + 1 and the bytes
//! time: microseconds after the record before, zigzag | payload: bytes shared with the payload before, length of the rest, the rest
//! headers: number, then name and value of each, length and bytes
//! ```
//!
//! Numbers are LEB128. Why: a row costs the store far more than its bytes, and neighbours repeat each other. What is read was checked whole
//! first, so a damaged row is an error and never another event.

use uuid::Uuid;

use crate::{Event, Record};

const VERSION: u8 = 1;
/// Records of one row at most: what a reader of a single record has to take apart.
pub const RECORDS_MAX: usize = 128;

/// One value of these records.
pub fn pack<'a>(records: impl IntoIterator<Item = (&'a Event, &'a [(String, String)])>) -> Vec<u8> {
    let mut to = vec![VERSION];
    let mut last: Option<&Event> = None;
    for (event, headers) in records {
        to.extend_from_slice(event.id.as_bytes());
        for field in REPEATED {
            put_text(field(event), last.map(field), &mut to);
        }
        put_text(&event.subject, Some(&event.key), &mut to);
        let last_us = last.map_or(0, |last| last.occurred_at_us);
        let after_us = event.occurred_at_us.wrapping_sub(last_us);
        put_number(
            ((after_us << 1) ^ (after_us >> 63)).cast_unsigned(),
            &mut to,
        );
        let before = last.map_or(&[][..], |last| &last.payload);
        let shared = shared(before, &event.payload);
        put_number(shared as u64, &mut to);
        put_bytes(&event.payload[shared..], &mut to);
        put_number(headers.len() as u64, &mut to);
        for (name, value) in headers {
            put_bytes(name.as_bytes(), &mut to);
            put_bytes(value.as_bytes(), &mut to);
        }
        last = Some(event);
    }
    let check = crc32c::crc32c(&to);
    to.extend_from_slice(&check.to_le_bytes());
    to
}

/// The records of a value, `count` of them.
///
/// # Errors
/// What is wrong with the value.
pub fn unpack(value: &[u8], count: i64) -> Result<Vec<Record>, String> {
    let (body, check) = value.split_last_chunk::<4>().ok_or("is too short")?;
    if crc32c::crc32c(body) != u32::from_le_bytes(*check) {
        return Err("is damaged: its checksum differs".to_owned());
    }
    let (version, body) = body.split_first().ok_or("is too short")?;
    if *version != VERSION {
        return Err(format!("has version {version}, known is {VERSION}"));
    }
    let mut from = Reader(body);
    let mut records: Vec<Record> = Vec::new();
    while !from.0.is_empty() {
        let record = from
            .record(records.last().map(|record| &record.event))
            .ok_or("ends within a record")?;
        records.push(record);
    }
    if usize::try_from(count) != Ok(records.len()) {
        return Err(format!("has {} records instead of {count}", records.len()));
    }
    Ok(records)
}

/// Texts that are compared with those of the record before, in their order.
const REPEATED: [fn(&Event) -> &str; 5] = [
    |event| &event.topic,
    |event| &event.key,
    |event| &event.type_name,
    |event| &event.source,
    |event| &event.correlation_id,
];

fn put_number(mut number: u64, to: &mut Vec<u8>) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

fn put_bytes(bytes: &[u8], to: &mut Vec<u8>) {
    put_number(bytes.len() as u64, to);
    to.extend_from_slice(bytes);
}

fn put_text(text: &str, same_as: Option<&str>, to: &mut Vec<u8>) {
    if same_as == Some(text) {
        to.push(0);
    } else {
        put_number(text.len() as u64 + 1, to);
        to.extend_from_slice(text.as_bytes());
    }
}

/// Bytes that two values begin with alike. Words first: events of one request share their context of some hundred bytes.
fn shared(a: &[u8], b: &[u8]) -> usize {
    let (words_a, words_b) = (a.as_chunks::<8>().0, b.as_chunks::<8>().0);
    let words = words_a.iter().zip(words_b);
    let words = 8 * words.take_while(|(a, b)| a == b).count();
    let rest = a[words..].iter().zip(&b[words..]);
    words + rest.take_while(|(a, b)| a == b).count()
}

/// What is left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        self.take(length)
    }

    fn string(bytes: &[u8]) -> Option<String> {
        Some(str::from_utf8(bytes).ok()?.to_owned())
    }

    fn text(&mut self, same: Option<&str>) -> Option<String> {
        match usize::try_from(self.number()?).ok()? {
            0 => same.map(str::to_owned),
            length => Self::string(self.take(length - 1)?),
        }
    }

    fn record(&mut self, last: Option<&Event>) -> Option<Record> {
        let id = Uuid::from_slice(self.take(16)?).ok()?;
        let [topic, key, type_name, source, correlation_id] =
            REPEATED.map(|field| self.text(last.map(field)));
        let key = key?;
        let subject = self.text(Some(&key))?;
        let after = self.number()?;
        let after_us = (after >> 1).cast_signed() ^ -((after & 1).cast_signed());
        let shared = usize::try_from(self.number()?).ok()?;
        let rest = self.bytes()?;
        let mut payload = last
            .map_or(&[][..], |last| &last.payload)
            .get(..shared)?
            .to_vec();
        payload.extend_from_slice(rest);
        let mut headers = Vec::new();
        for _ in 0..self.number()? {
            headers.push((Self::string(self.bytes()?)?, Self::string(self.bytes()?)?));
        }
        let event = Event {
            id,
            topic: topic?,
            key,
            type_name: type_name?,
            subject,
            source: source?,
            correlation_id: correlation_id?,
            occurred_at_us: last
                .map_or(0, |last| last.occurred_at_us)
                .wrapping_add(after_us),
            payload,
        };
        Some(Record { event, headers })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text() -> impl Strategy<Value = String> {
        prop_oneof![Just(String::new()), "[a-c]{1,2}", "\\PC{0,200}"]
    }

    fn record() -> impl Strategy<Value = Record> {
        let texts = (text(), text(), text(), text(), text(), text());
        let payload = proptest::collection::vec(0..3_u8, 0..200);
        let headers = proptest::collection::vec((text(), text()), 0..3);
        (any::<[u8; 16]>(), texts, any::<i64>(), payload, headers).prop_map(
            |(
                id,
                (topic, key, type_name, subject, source, correlation_id),
                at,
                payload,
                headers,
            )| {
                let event = Event {
                    id: Uuid::from_bytes(id),
                    topic,
                    key,
                    type_name,
                    subject,
                    source,
                    correlation_id,
                    occurred_at_us: at,
                    payload,
                };
                Record { event, headers }
            },
        )
    }

    fn packed(records: &[Record]) -> Vec<u8> {
        pack(
            records
                .iter()
                .map(|record| (&record.event, &*record.headers)),
        )
    }

    proptest! {
        #[test]
        fn records_come_back_as_they_were(records in proptest::collection::vec(record(), 0..20)) {
            let value = packed(&records);
            prop_assert_eq!(unpack(&value, records.len() as i64), Ok(records));
        }

        #[test]
        fn damage_is_told_and_never_another_record(
            records in proptest::collection::vec(record(), 1..5), place: prop::sample::Index, bit in 0..8_u32
        ) {
            let mut value = packed(&records);
            let place = place.index(value.len());
            prop_assert!(unpack(&value[..place], records.len() as i64).is_err());
            value[place] ^= 1 << bit;
            prop_assert!(unpack(&value, records.len() as i64).is_err());
        }

        #[test]
        fn no_body_makes_the_reader_fail_otherwise(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut value = vec![VERSION];
            value.extend_from_slice(&body);
            let check = crc32c::crc32c(&value);
            value.extend_from_slice(&check.to_le_bytes());
            let _ = unpack(&value, 1);
        }
    }

    #[test]
    fn another_version_or_number_of_records_is_refused() {
        let mut value = vec![VERSION + 1];
        let check = crc32c::crc32c(&value);
        value.extend_from_slice(&check.to_le_bytes());
        assert!(unpack(&value, 0).unwrap_err().contains("version"));
        assert!(unpack(&packed(&[]), 1).unwrap_err().contains("records"));
    }
}
