//! The log's beginning is removed during writes: the rest has no gap after any power loss.
//!
//! Readers of removed records get an error.

use std::sync::Arc;

use journal::fault::MemoryStorage;
use journal::reader::ReadError;
use journal::{
    Appender, Config, FrameKind, Journal, JournalError, Storage, removed_through, visit_frames,
};

const CONFIG: Config = Config {
    segment_bytes: 4 << 10,
    pending_bytes_max: 1 << 20,
    recent_bytes: 0,
};

fn append(appender: &mut Appender, sequence: u64) {
    let payload = [sequence as u8; 64];
    appender.append(FrameKind::Command, false, sequence, 1, &payload);
    appender.append(FrameKind::Event, true, sequence, 1, &payload);
}

/// Writes records one by one, each durable before the next.
fn fill(journal: &Journal, appender: &mut Appender, records: std::ops::RangeInclusive<u64>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("runtime");
    for sequence in records {
        append(appender, sequence);
        appender.flush();
        runtime
            .block_on(journal.commit().wait(sequence))
            .expect("durable");
    }
}

fn open_after(
    storage: &Arc<MemoryStorage>,
    after: u64,
) -> Result<(Journal, Vec<u64>), JournalError> {
    let mut sequences = Vec::new();
    let journal = Journal::open_after(Arc::new(storage.clone()), CONFIG, after, |frame| {
        if frame.unit_end {
            sequences.push(frame.sequence);
        }
        Ok(())
    });
    journal.map(|journal| (journal, sequences))
}

#[test]
fn whole_segments_are_removed_and_the_requested_bytes_are_kept() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = open_after(&storage, 0).expect("opens");
    let truncator = journal.truncator();
    assert_eq!(
        truncator.removable_above_bytes(0).expect("read"),
        0,
        "nothing is durable yet"
    );
    let mut appender = journal.appender();
    fill(&journal, &mut appender, 1..=100);
    let segments = storage.segments().expect("listed").len() as u64;
    assert!(segments > 8);
    assert_eq!(truncator.removable_above_bytes(u64::MAX).expect("read"), 0);
    assert_eq!(
        truncator
            .removable_above_bytes(segments * CONFIG.segment_bytes)
            .expect("read"),
        0
    );

    let limit = truncator
        .removable_above_bytes(3 * CONFIG.segment_bytes)
        .expect("read");
    assert!(limit > 50 && limit < 100, "{limit}");
    let mut late = journal.reader(0);
    assert_eq!(
        late.try_next().expect("there").expect("a frame").sequence,
        1
    );
    // `limit / 2` is inside a segment: that one stays.
    assert_eq!(truncator.remove(limit / 2).expect("removed"), {
        let through = truncator.removed_through().expect("read");
        assert!(through > 0 && through <= limit / 2);
        segments as usize - storage.segments().expect("listed").len()
    });
    truncator.remove(limit).expect("removed");
    assert_eq!(truncator.removed_through().expect("read"), limit);
    assert_eq!(
        truncator
            .removable_above_bytes(3 * CONFIG.segment_bytes)
            .expect("read"),
        limit
    );
    assert_eq!(truncator.remove(limit).expect("nothing"), 0);

    // A reader of removed records gets an error, and so does a new one.
    let error = loop {
        match late.try_next() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the reader reached the end without an error"),
            Err(error) => break error,
        }
    };
    let removed = |error: &ReadError| match error {
        ReadError::Log(JournalError::Removed { through, .. }) => *through == limit,
        _ => false,
    };
    assert!(removed(&error), "{error}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("begins with {}", limit + 1)),
        "{text}"
    );
    assert!(removed(
        &journal.reader(limit - 1).check().expect_err("removed")
    ));
    journal.reader(limit).check().expect("the rest is there");

    // Everything may be removed but the segment with the commit position.
    truncator.remove(u64::MAX).expect("removed");
    fill(&journal, &mut appender, 101..=120);
    drop(appender);
    journal.close();
    let through = removed_through(&storage).expect("read");
    let (journal, found) = open_after(&storage, through).expect("opens");
    assert_eq!(found, (through + 1..=120).collect::<Vec<_>>());
    journal.close();
}

#[test]
fn a_power_loss_during_removal_leaves_a_log_without_a_gap() {
    for operations in 0..12 {
        for seed in 0..4 {
            let storage = Arc::new(MemoryStorage::default());
            let (journal, _) = open_after(&storage, 0).expect("opens");
            let mut appender = journal.appender();
            fill(&journal, &mut appender, 1..=60);
            let truncator = journal.truncator();
            let limit = truncator
                .removable_above_bytes(CONFIG.segment_bytes)
                .expect("read");
            storage.power_off_after(operations);
            let is_done = truncator.remove(limit).is_ok();
            drop((appender, journal));
            match seed {
                0 => storage.revive(),
                seed => storage.crash(seed),
            }
            let through = removed_through(&storage).expect("read");
            assert!(through <= limit && (!is_done || through == limit));
            assert_eq!(visit_frames(&storage, |_| Ok(())).expect("no gap"), 60);
            let (journal, found) = open_after(&storage, limit).expect("opens");
            assert_eq!(found.last(), Some(&60));
            // The rest is removed by a later call.
            journal.truncator().remove(limit).expect("removed");
            assert_eq!(removed_through(&storage).expect("read"), limit);
            journal.close();
        }
    }
}

// A segment of whole chunks, filled to its last block: only another read shows that it contains
// nothing more, and by then it may be removed.
#[test]
fn a_reader_at_the_exact_end_of_a_removed_segment_continues_in_the_next() {
    let storage = Arc::new(MemoryStorage::default());
    let config = Config {
        segment_bytes: 1 << 20,
        ..CONFIG
    };
    let opened = Journal::open_after(Arc::new(storage.clone()), config, 0, |_| Ok(()));
    let journal = opened.expect("opens");
    let mut appender = journal.appender();
    fill(&journal, &mut appender, 1..=5_000);
    let truncator = journal.truncator();
    // Records of one block each fill it to the last byte.
    let limit = truncator.removable_through(4_999).expect("read");
    let first = truncator.removable_through(limit - 1).expect("read");
    assert_eq!((first, limit), (2_048, 4_096));
    let read = |reader: &mut journal::Reader, through: u64| {
        let mut last = 0;
        while last < through {
            let frame = reader.try_next()?.expect("durable");
            last = frame.sequence - u64::from(!frame.unit_end);
        }
        Ok::<_, ReadError>(last)
    };
    let mut at_the_end = journal.reader(0);
    assert_eq!(read(&mut at_the_end, first).expect("read"), first);
    let mut before = journal.reader(0);
    read(&mut before, first).expect("read");
    assert_eq!(truncator.remove(first).expect("removed"), 1);
    assert_eq!(read(&mut at_the_end, 5_000).expect("continues"), 5_000);
    // A removed segment in between is an error.
    truncator.remove(limit).expect("removed");
    let error = read(&mut before, 5_000).expect_err("removed");
    assert!(
        matches!(error, ReadError::Log(JournalError::Removed { through, .. }) if through == limit),
        "{error}"
    );
    drop(appender);
    journal.close();
}
