//! Packs many records into one value: a row of an outbox in SQLite or of the embedded log.
//!
//! ```text
//! version: 1 | record ... | CRC-32C of all before, 4 bytes little-endian
//! record: id, 16 bytes | topic | key | type | source | correlation id | subject | time | payload |
//!     headers
//! text: 0 = that of the previous record (subject: this record's key), or length + 1 and bytes
//! time: microseconds after the previous record, zigzag
//! payload: bytes shared with the previous payload, length of the rest, the rest
//! headers: number, then name and value of each, length and bytes
//! ```
//!
//! Numbers are LEB128. Records share rows because a row costs the store far more than its bytes.
//! Adjacent records have many fields in common, which the format stores once. A value is verified
//! before it is read, so a damaged row is an error and never another event.

use uuid::Uuid;

use crate::{Error, Event, EventRef, Record};

const VERSION: u8 = 1;
/// Maximum records per row. Reading a single record unpacks its whole row.
pub const RECORDS_MAX: usize = 128;

/// Packs records into a value one by one.
#[derive(Default)]
pub struct Packer {
    value: Vec<u8>,
    count: i64,
    /// The previous record: [`REPEATED`] texts, time, payload.
    texts: [String; REPEATED.len()],
    occurred_at_us: i64,
    payload: Vec<u8>,
}

impl Packer {
    pub fn is_full(&self) -> bool {
        self.count == RECORDS_MAX as i64
    }

    pub fn push(&mut self, event: EventRef<'_>, headers: &[(String, String)]) {
        let to = &mut self.value;
        let is_first = self.count == 0;
        if is_first {
            to.clear();
            to.push(VERSION);
            self.payload.clear();
            self.occurred_at_us = 0;
        }
        to.extend_from_slice(event.id.as_bytes());
        for (field, last) in REPEATED.iter().zip(&mut self.texts) {
            let text = field(&event);
            if !is_first && last == text {
                to.push(0);
            } else {
                put_text(text, to);
                last.clear();
                last.push_str(text);
            }
        }
        if event.subject == event.key {
            to.push(0);
        } else {
            put_text(event.subject, to);
        }
        let after_us = event.occurred_at_us.wrapping_sub(self.occurred_at_us);
        self.occurred_at_us = event.occurred_at_us;
        put_number(((after_us << 1) ^ (after_us >> 63)).cast_unsigned(), to);
        let shared = common_prefix(&self.payload, event.payload);
        let rest = &event.payload[shared..];
        put_number(shared as u64, to);
        put_bytes(rest, to);
        self.payload.truncate(shared);
        self.payload.extend_from_slice(rest);
        put_number(headers.len() as u64, to);
        for (name, value) in headers {
            put_bytes(name.as_bytes(), to);
            put_bytes(value.as_bytes(), to);
        }
        self.count += 1;
    }

    /// Returns the value and its number of records, and starts a new value.
    pub fn take(&mut self) -> (i64, Vec<u8>) {
        self.seal();
        (std::mem::take(&mut self.count), self.value.clone())
    }

    fn seal(&mut self) {
        if self.count == 0 {
            self.value.clear();
            self.value.push(VERSION);
        }
        let check = crc32c::crc32c(&self.value);
        self.value.extend_from_slice(&check.to_le_bytes());
    }
}

/// Packs these records into one value.
pub fn pack<'a>(records: impl IntoIterator<Item = (&'a Event, &'a [(String, String)])>) -> Vec<u8> {
    let mut packer = Packer::default();
    for (event, headers) in records {
        packer.push(event.into(), headers);
    }
    packer.seal();
    packer.value
}

/// A raw outbox row of SQLite: packed events of one transaction.
pub struct OutboxRow {
    pub(crate) position: i64,
    pub(crate) count: i64,
    pub(crate) value: Vec<u8>,
}

impl OutboxRow {
    /// Unpacks the row's events.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub fn events(&self) -> Result<impl Iterator<Item = Event> + use<>, Error> {
        let records = unpack(&self.value, self.count).map_err(|reason| self.malformed(reason))?;
        Ok(records.into_iter().map(|record| record.event))
    }

    /// Scans the row without unpacking it.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub(crate) fn scan(&self) -> Result<Contents, Error> {
        scan(&self.value, self.count).map_err(|reason| self.malformed(reason))
    }

    fn malformed(&self, reason: String) -> Error {
        Error::Malformed {
            position: format!("outbox {}", self.position),
            reason,
        }
    }
}

/// What a log needs to know of a value to store it without unpacking it.
#[derive(Debug, PartialEq, Eq)]
pub struct Contents {
    /// Topics of the records. A value written by [`Packer`] has no adjacent duplicates.
    pub topics: Vec<String>,
    pub has_headers: bool,
    pub ids: Vec<Uuid>,
}

/// Scans a value without unpacking it. Accepts the same values as [`unpack`].
///
/// # Errors
/// As [`unpack`].
pub fn scan(value: &[u8], count: i64) -> Result<Contents, String> {
    let mut from = Reader(body(value)?);
    let mut ids = Vec::with_capacity(RECORDS_MAX);
    let mut has_headers = false;
    let mut topics: Vec<&str> = Vec::new();
    let mut payload_len = 0;
    let mut next = || {
        ids.push(from.id()?);
        for place in 0..REPEATED.len() {
            match from.own_text()? {
                None if ids.len() == 1 => return None,
                Some(own) if place == TOPIC => topics.push(own),
                _ => {}
            }
        }
        // Subject and time.
        from.own_text()?;
        from.number()?;
        let shared = from.length().filter(|shared| *shared <= payload_len)?;
        payload_len = shared + from.bytes()?.len();
        for _ in 0..from.number()? {
            has_headers = true;
            Reader::string(from.bytes()?)?;
            Reader::string(from.bytes()?)?;
        }
        Some(from.0.is_empty())
    };
    if !body(value)?.is_empty() {
        while !next().ok_or("ends within a record")? {}
    }
    check_count(count, ids.len())?;
    Ok(Contents {
        topics: topics.into_iter().map(str::to_owned).collect(),
        has_headers,
        ids,
    })
}

/// Time of the first record of a value, in microseconds.
///
/// # Errors
/// The fault of the value.
pub fn first_occurred_at_us(value: &[u8]) -> Result<i64, String> {
    let mut from = Reader(body(value)?);
    let mut first = || {
        from.id()?;
        // The repeated texts and the subject.
        for _ in 0..=REPEATED.len() {
            from.own_text()?;
        }
        from.number()
    };
    let time = first().ok_or("ends within a record")?;
    Ok((time >> 1).cast_signed() ^ -((time & 1).cast_signed()))
}

fn check_count(count: i64, found: usize) -> Result<(), String> {
    if usize::try_from(count) != Ok(found) {
        return Err(format!("has {found} records instead of {count}"));
    }
    Ok(())
}

/// Verifies a value's frame and returns its packed records.
fn body(value: &[u8]) -> Result<&[u8], String> {
    let (body, check) = value.split_last_chunk::<4>().ok_or("is too short")?;
    if crc32c::crc32c(body) != u32::from_le_bytes(*check) {
        return Err("is damaged: its checksum differs".to_owned());
    }
    let (version, body) = body.split_first().ok_or("is too short")?;
    if *version != VERSION {
        return Err(format!("has version {version}, known is {VERSION}"));
    }
    Ok(body)
}

/// Unpacks the `count` records of a value.
///
/// # Errors
/// The fault of the value.
pub fn unpack(value: &[u8], count: i64) -> Result<Vec<Record>, String> {
    let mut from = Reader(body(value)?);
    let mut records: Vec<Record> = Vec::new();
    while !from.0.is_empty() {
        let record = from
            .record(records.last().map(|record| &record.event))
            .ok_or("ends within a record")?;
        records.push(record);
    }
    check_count(count, records.len())?;
    Ok(records)
}

/// Texts compared with those of the previous record, in order.
const REPEATED: [for<'a> fn(&EventRef<'a>) -> &'a str; 5] = [
    |event| event.topic,
    |event| event.key,
    |event| event.type_name,
    |event| event.source,
    |event| event.correlation_id,
];
/// Index of the topic in [`REPEATED`].
const TOPIC: usize = 0;

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

fn put_text(text: &str, to: &mut Vec<u8>) {
    put_number(text.len() as u64 + 1, to);
    to.extend_from_slice(text.as_bytes());
}

/// Length of the common prefix. Compares words first: events of one request share a context of a
/// few hundred bytes.
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let (words_a, words_b) = (a.as_chunks::<8>().0, b.as_chunks::<8>().0);
    let words = words_a.iter().zip(words_b);
    let words = 8 * words.take_while(|(a, b)| a == b).count();
    let rest = a[words..].iter().zip(&b[words..]);
    words + rest.take_while(|(a, b)| a == b).count()
}

/// The unread bytes.
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

    fn id(&mut self) -> Option<Uuid> {
        Uuid::from_slice(self.take(16)?).ok()
    }

    fn length(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.length()?;
        self.take(length)
    }

    /// The inner `None` means the text of the previous record.
    fn own_text(&mut self) -> Option<Option<&'a str>> {
        match self.length()? {
            0 => Some(None),
            length => Self::string(self.take(length - 1)?).map(Some),
        }
    }

    fn string(bytes: &[u8]) -> Option<&str> {
        str::from_utf8(bytes).ok()
    }

    fn text(&mut self, same: Option<&str>) -> Option<String> {
        self.own_text()?.or(same).map(str::to_owned)
    }

    fn record(&mut self, last: Option<&Event>) -> Option<Record> {
        let id = self.id()?;
        let last_ref = last.map(EventRef::from);
        let [topic, key, type_name, source, correlation_id] =
            REPEATED.map(|field| self.text(last_ref.as_ref().map(field)));
        let key = key?;
        let subject = self.text(Some(&key))?;
        let after = self.number()?;
        let after_us = (after >> 1).cast_signed() ^ -((after & 1).cast_signed());
        let shared = self.length()?;
        let rest = self.bytes()?;
        let mut payload = last
            .map_or(&[][..], |last| &last.payload)
            .get(..shared)?
            .to_vec();
        payload.extend_from_slice(rest);
        let mut headers = Vec::new();
        for _ in 0..self.number()? {
            let name = Self::string(self.bytes()?)?.to_owned();
            headers.push((name, Self::string(self.bytes()?)?.to_owned()));
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
        fn records_round_trip(records in proptest::collection::vec(record(), 0..20)) {
            let value = packed(&records);
            let found = scan(&value, records.len() as i64).unwrap();
            prop_assert!(found.ids.iter().eq(records.iter().map(|record| &record.event.id)));
            prop_assert_eq!(found.has_headers, records.iter().any(|record| !record.headers.is_empty()));
            let mut topics: Vec<&str> = records.iter().map(|record| &*record.event.topic).collect();
            topics.dedup();
            prop_assert_eq!(found.topics, topics);
            let first_us = records.first().map(|record| record.event.occurred_at_us);
            prop_assert_eq!(first_occurred_at_us(&value).ok(), first_us);
            prop_assert_eq!(unpack(&value, records.len() as i64), Ok(records));
        }

        #[test]
        fn damage_is_an_error_and_never_another_record(
            records in proptest::collection::vec(record(), 1..5), place: prop::sample::Index, bit in 0..8_u32
        ) {
            let mut value = packed(&records);
            let place = place.index(value.len());
            prop_assert!(unpack(&value[..place], records.len() as i64).is_err());
            prop_assert!(scan(&value[..place], records.len() as i64).is_err());
            value[place] ^= 1 << bit;
            prop_assert!(unpack(&value, records.len() as i64).is_err());
        }

        #[test]
        fn any_body_is_read_or_refused(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut value = vec![VERSION];
            value.extend_from_slice(&body);
            let check = crc32c::crc32c(&value);
            value.extend_from_slice(&check.to_le_bytes());
            prop_assert_eq!(scan(&value, 1).map(drop), unpack(&value, 1).map(drop));
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
