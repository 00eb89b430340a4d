//! Packed rows of an outbox and of the embedded log.

use events::pack::{Contents, pack, scan, unpack};
use events::{Event, Record};
use uuid::Uuid;

use crate::Random;

/// The first byte is the row's record count, the rest is its value. The value is checked unchanged
/// and with a valid checksum appended.
pub fn check(bytes: &[u8]) {
    let Some((count, value)) = bytes.split_first() else {
        return;
    };
    let count = i64::from(*count);
    check_value(count, value);
    let mut sealed = value.to_vec();
    sealed.extend_from_slice(&crc32c::crc32c(value).to_le_bytes());
    check_value(count, &sealed);
}

fn check_value(count: i64, value: &[u8]) {
    let (records, contents) = (unpack(value, count), scan(value, count));
    match (records, contents) {
        (Ok(records), Ok(contents)) => check_records(&records, &contents),
        (Err(reason), Err(other)) => assert_eq!(reason, other),
        (records, contents) => panic!("{records:?} but {contents:?}"),
    }
}

fn check_records(records: &[Record], contents: &Contents) {
    assert!(
        records
            .iter()
            .map(|record| record.event.id)
            .eq(contents.ids.iter().copied())
    );
    let has_headers = records.iter().any(|record| !record.headers.is_empty());
    assert_eq!(contents.has_headers, has_headers);
    let mut topics: Vec<String> = records
        .iter()
        .map(|record| record.event.topic.clone())
        .collect();
    topics.dedup();
    // A value may write the topic of the previous record again.
    let mut found = contents.topics.clone();
    found.dedup();
    assert_eq!(found, topics);
    let again = packed(records);
    assert_eq!(unpack(&again, records.len() as i64).as_deref(), Ok(records));
}

fn packed(records: &[Record]) -> Vec<u8> {
    pack(
        records
            .iter()
            .map(|record| (&record.event, &*record.headers)),
    )
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut random = Random(3);
    let mut of = |count: usize| {
        let records: Vec<Record> = (0..count).map(|at| record(at, &mut random)).collect();
        let value = packed(&records);
        let mut seed = vec![count as u8];
        // One seed with its checksum, and one without: the target appends one.
        seed.extend_from_slice(&value);
        [seed.clone(), seed[..seed.len() - 4].to_vec()]
    };
    [0, 1, 2, 7].into_iter().flat_map(&mut of).collect()
}

fn record(at: usize, random: &mut Random) -> Record {
    let topics = ["platform.ledger.events", "platform.cfa.events"];
    let event = Event {
        id: Uuid::from_u128(u128::from(random.long())),
        topic: topics[random.below(2)].to_owned(),
        key: format!("user-{}", random.below(3)),
        type_name: "dfa.ledger.v1.HoldCreated".to_owned(),
        subject: format!("user-{}", random.below(3)),
        source: "ledger".to_owned(),
        correlation_id: "c".repeat(random.below(4)),
        occurred_at_us: 1_700_000_000_000_000 + random.below(3) as i64,
        payload: [&b"common to all of a request"[..], &random.bytes(at)].concat(),
    };
    let headers = (0..random.below(2)).map(|at| (format!("h{at}"), "value".to_owned()));
    Record {
        event,
        headers: headers.collect(),
    }
}
