//! Nothing reported durable is lost: over power losses of a disk that drops, keeps or tears what was not synced, and over every cut of the tail.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use journal::fault::MemoryStorage;
use journal::{Appender, Config, Frame, FrameKind, Journal, JournalError, Storage};

const CONFIG: Config = Config {
    segment_bytes: 16 << 10,
    pending_bytes_max: 1 << 20,
};

fn payload(sequence: u64, index: u64) -> Vec<u8> {
    let length = 8 + usize::try_from((sequence * 31 + index * 7) % 190).expect("small");
    (0..length)
        .map(|at| (sequence as usize * 131 + index as usize * 17 + at) as u8)
        .collect()
}

/// A command and `sequence % 3` events.
fn append(appender: &mut Appender, sequence: u64) {
    let events = sequence % 3;
    appender.append(
        FrameKind::Command,
        events == 0,
        sequence,
        sequence * 10,
        &payload(sequence, 0),
    );
    for index in 1..=events {
        appender.append(
            FrameKind::Event,
            index == events,
            sequence,
            sequence * 10,
            &payload(sequence, index),
        );
    }
}

/// Opens the log, checks that what it holds is a prefix of what was appended, and gives the last sequence.
fn reopen(storage: &Arc<MemoryStorage>) -> Result<(Journal, u64), JournalError> {
    let mut seen: Vec<Frame> = Vec::new();
    let journal = Journal::open(Arc::new(storage.clone()), CONFIG, |frame| {
        seen.push(frame.clone());
        Ok(())
    })?;
    let (mut sequence, mut index) = (0, 0);
    for frame in &seen {
        if frame.kind == FrameKind::Command {
            assert_eq!(frame.sequence, sequence + 1, "commands are gapless");
            (sequence, index) = (frame.sequence, 0);
        } else {
            index += 1;
            assert_eq!(frame.sequence, sequence, "events follow their command");
        }
        assert_eq!(frame.payload, payload(sequence, index));
        assert_eq!(frame.unit_end, index == sequence % 3);
    }
    assert!(
        seen.last().is_none_or(|frame| frame.unit_end),
        "whole units only"
    );
    Ok((journal, sequence))
}

/// One life that ends in a power loss while the writer may be anywhere; true when what was reported is found again.
fn run(seed: u64, sync_is_lost: bool) -> bool {
    let storage = Arc::new(MemoryStorage::default());
    storage.sync_is_lost.store(sync_is_lost, Ordering::SeqCst);
    let (journal, _) = reopen(&storage).expect("an empty disk opens");
    let mut appender = journal.appender();
    let mut next = 1;
    for batch in 0..seed % 17 + 1 {
        for _ in 0..(seed * 7 + batch) % 11 + 1 {
            append(&mut appender, next);
            next += 1;
        }
        appender.flush();
    }
    for _ in 0..seed % 5_000 {
        std::hint::spin_loop();
    }
    let reported = journal.commit().position();
    let image = Arc::new(storage.image());
    drop(journal);
    image.crash(seed);
    reopen(&image).is_ok_and(|(_, found)| found >= reported && found < next)
}

#[test]
fn a_power_loss_takes_nothing_that_was_reported_durable() {
    for seed in 0..1_000 {
        assert!(run(seed, false), "seed {seed}");
    }
}

#[test]
fn without_the_sync_the_same_losses_are_noticed() {
    assert!(
        (0..1_000).any(|seed| !run(seed, true)),
        "a disk that lies must be caught"
    );
}

#[test]
fn every_cut_of_the_tail_leaves_a_prefix() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = reopen(&storage).expect("open");
    let mut appender = journal.appender();
    for sequence in 1..=40 {
        append(&mut appender, sequence);
        if sequence % 8 == 0 {
            appender.flush();
        }
    }
    appender.flush();
    journal.close();
    let whole = storage.bytes(1);
    let end = whole.iter().rposition(|byte| *byte != 0).expect("written") + 1;
    for cut in end.saturating_sub(4_096)..=end {
        let image = Arc::new(MemoryStorage::default());
        image.create(1, CONFIG.segment_bytes).expect("create");
        let mut bytes = whole.clone();
        bytes[cut..].fill(0);
        image.damage(1, 0, &bytes);
        let (journal, found) = reopen(&image).expect("a torn tail is cut");
        assert!(found <= 40);
        // The log goes on where it was cut.
        let mut appender = journal.appender();
        append(&mut appender, found + 1);
        appender.flush();
        journal.close();
        let (_, again) = reopen(&image).expect("open again");
        assert_eq!(again, found + 1, "cut at {cut}");
    }
}

#[test]
fn damage_in_the_middle_is_refused_with_its_place() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = reopen(&storage).expect("open");
    let mut appender = journal.appender();
    let commit = journal.commit();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("runtime");
    for sequence in 1..=30 {
        append(&mut appender, sequence);
        appender.flush();
        runtime.block_on(commit.wait(sequence)).expect("durable");
    }
    journal.close();
    storage.damage(1, 200, &[0xFF; 3]);
    match reopen(&storage) {
        Err(JournalError::Hole { file, offset }) => {
            assert!(file.contains("segment 1") && offset <= 200)
        }
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("a hole was not noticed"),
    }
}

#[test]
fn a_full_disk_latches_and_keeps_what_was_reported() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = reopen(&storage).expect("open");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("runtime");
    let (mut appender, commit) = (journal.appender(), journal.commit());
    append(&mut appender, 1);
    appender.flush();
    runtime.block_on(commit.wait(1)).expect("durable");
    storage.is_full.store(true, Ordering::SeqCst);
    append(&mut appender, 2);
    appender.flush();
    runtime
        .block_on(commit.wait(2))
        .expect_err("the disk is full");
    assert!(appender.is_failed());
    storage.is_full.store(false, Ordering::SeqCst);
    append(&mut appender, 3);
    appender.flush();
    runtime
        .block_on(commit.wait(3))
        .expect_err("a failed log stays failed");
    journal.close();
    let (_, found) = reopen(&storage).expect("open");
    assert_eq!(found, 1);
}

#[test]
fn a_reader_follows_across_segments_and_stops_at_the_commit_position() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = reopen(&storage).expect("open");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("runtime");
    let (mut appender, commit) = (journal.appender(), journal.commit());
    let mut reader = journal.reader(100);
    for sequence in 1..=600 {
        append(&mut appender, sequence);
        if sequence % 7 == 0 {
            appender.flush();
        }
    }
    appender.flush();
    runtime.block_on(commit.wait(600)).expect("durable");
    assert!(
        storage.segments().expect("segments").len() > 3,
        "several segments were used"
    );
    let mut last = 100;
    while let Some(frame) = reader.try_next().expect("readable") {
        if frame.kind == FrameKind::Command {
            assert_eq!(frame.sequence, last + 1);
            last = frame.sequence;
        }
    }
    assert_eq!(last, 600);
    append(&mut appender, 601);
    assert!(reader.try_next().expect("readable").is_none());
    appender.flush();
    let frame = runtime.block_on(reader.next()).expect("the next frame");
    assert_eq!(frame.sequence, 601);
}
