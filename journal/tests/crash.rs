//! Nothing reported durable is lost when a disk drops, keeps or tears unsynced data.
//!
//! The tail is also cut at every byte.

#[path = "../../testkit/src/seed.rs"]
mod seed;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use journal::fault::MemoryStorage;
use journal::frame::{self, Found};
use journal::{Appender, Config, Frame, FrameKind, Journal, JournalError, Storage, visit_frames};

const CONFIG: Config = Config {
    segment_bytes: 16 << 10,
    pending_bytes_max: 1 << 20,
    recent_bytes: 64 << 10,
};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("runtime")
}

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

/// Opens the log and checks that it contains a prefix of what was appended.
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

/// One process lifetime, ended by a power loss at any point of the writer.
///
/// Returns true when everything reported durable is found again.
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
fn a_power_loss_loses_nothing_that_was_reported_durable() {
    for seed in seed::seeds(0..500) {
        assert!(run(seed, false), "seed {seed}");
    }
}

#[test]
fn the_same_power_losses_without_the_sync_are_detected() {
    assert!(
        seed::seeds(0..500).any(|seed| !run(seed, true)),
        "a disk that does not sync must be detected"
    );
}

/// Ends of the whole units in a segment: after the last byte, and after the last nonzero byte.
fn unit_ends(bytes: &[u8]) -> Vec<(usize, usize)> {
    let (mut at, mut extent_end, mut ends) = (0, 0, Vec::new());
    while at < bytes.len() {
        match frame::read(&bytes[at..]) {
            Found::Mark(mark) => {
                extent_end = at + usize::try_from(mark.extent).expect("small");
                at += frame::MARK_BYTES;
            }
            Found::Frame(frame) => {
                at += frame::frame_bytes(frame.payload.len());
                if frame.unit_end {
                    let written = bytes[..at].iter().rposition(|byte| *byte != 0);
                    ends.push((at, written.expect("written") + 1));
                }
            }
            _ if at < extent_end => at = extent_end,
            _ => break,
        }
    }
    ends
}

// rows: R174
#[test]
fn r174_cut_at_any_byte_keeps_the_whole_units_before_it() {
    const BYTES: u64 = 128 << 10;
    const CUT: usize = 64 << 10;
    let config = Config {
        segment_bytes: BYTES,
        // Each start touches the whole buffer.
        pending_bytes_max: 64 << 10,
        ..CONFIG
    };
    let storage = Arc::new(MemoryStorage::default());
    let open = |storage: &Arc<MemoryStorage>| {
        let mut last = 0;
        let journal = Journal::open(Arc::new(storage.clone()), config, |frame| {
            assert_eq!(frame.payload.len(), payload(frame.sequence, 0).len().max(1));
            last = frame.sequence;
            Ok(())
        });
        (journal.expect("a torn tail is truncated"), last)
    };
    let append = |appender: &mut Appender, sequence| {
        let payload = payload(sequence, 0);
        let is_single = sequence % 3 == 0;
        appender.append(FrameKind::Command, is_single, sequence, 1, &payload);
        if !is_single {
            appender.append(FrameKind::Event, true, sequence, 1, &payload);
        }
    };
    let (journal, _) = open(&storage);
    let (mut appender, commit) = (journal.appender(), journal.commit());
    let runtime = runtime();
    let mut sequence = 0;
    for batch in 0..60 {
        for _ in 0..batch % 13 + 1 {
            sequence += 1;
            append(&mut appender, sequence);
        }
        appender.flush();
        runtime.block_on(commit.wait(sequence)).expect("durable");
    }
    journal.close();
    let whole = storage.bytes(1);
    let ends = unit_ends(&whole);
    assert_eq!(ends.len() as u64, sequence);
    let end = ends.last().expect("units").0;
    assert!(end > CUT, "more was written than is cut");
    let check = |cut: usize, runtime: &tokio::runtime::Runtime| {
        let image = Arc::new(MemoryStorage::default());
        image.create(1, BYTES).expect("create");
        let mut bytes = whole.clone();
        bytes[cut..].fill(0);
        image.corrupt(1, 0, &bytes);
        let (journal, found) = open(&image);
        let expected = ends.iter().filter(|(_, written)| *written <= cut).count() as u64;
        assert_eq!(found, expected, "cut at {cut}");
        assert_eq!(journal.commit().position(), found);
        if cut.is_multiple_of(16) {
            // The log continues where it was truncated.
            let (mut appender, commit) = (journal.appender(), journal.commit());
            append(&mut appender, found + 1);
            appender.flush();
            runtime.block_on(commit.wait(found + 1)).expect("durable");
            journal.close();
            assert_eq!(open(&image).1, found + 1, "cut at {cut}");
        }

        // The same with the end of the file missing.
        image.corrupt(1, 0, &whole);
        image.shorten(1, cut);
        let expected = ends.iter().filter(|(end, _)| *end <= cut).count() as u64;
        let found = visit_frames(&image, |_| Ok(())).expect("a torn tail is skipped");
        assert_eq!(found, expected, "shortened at {cut}");
        if cut.is_multiple_of(64) {
            let (journal, found) = open(&image);
            let (mut appender, commit) = (journal.appender(), journal.commit());
            append(&mut appender, found + 1);
            appender.flush();
            runtime.block_on(commit.wait(found + 1)).expect("durable");
            journal.close();
            assert_eq!(open(&image).1, found + 1, "shortened at {cut}");
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for first in end - CUT..end - CUT + workers {
            let check = &check;
            scope.spawn(move || {
                let own = self::runtime();
                for cut in (first..=end).step_by(workers) {
                    check(cut, &own);
                }
            });
        }
    });
}

/// Twenty-five commands, each a batch of its own.
fn singles() -> Arc<MemoryStorage> {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = reopen(&storage).expect("open");
    let (mut appender, commit) = (journal.appender(), journal.commit());
    let runtime = runtime();
    for sequence in 1..=25 {
        append(&mut appender, sequence);
        appender.flush();
        runtime.block_on(commit.wait(sequence)).expect("durable");
    }
    journal.close();
    storage
}

#[test]
fn damage_in_the_middle_is_refused_with_its_place() {
    // Zeros, noise and a single flipped bit, in a mark and in a frame, of every batch.
    let whole = singles();
    let bytes = whole.bytes(1);
    let ends = unit_ends(&bytes);
    assert_eq!(ends.len(), 25, "all in one segment");
    for (unit, (end, _)) in ends.iter().enumerate() {
        let start = (end - 1) / 512 * 512;
        for offset in [start, start + 30, end - 20] {
            for noise in [vec![0; 20], vec![0xA5; 20], vec![bytes[offset] ^ 4]] {
                let storage = Arc::new(whole.image());
                storage.corrupt(1, offset, &noise);
                let is_last = unit + 1 == ends.len();
                let is_same = storage.bytes(1) == bytes;
                match reopen(&storage) {
                    Err(JournalError::Hole {
                        file,
                        offset: at,
                        sequence,
                    }) => {
                        assert!(file.contains("segment 1") && at <= offset as u64);
                        assert!(at + 1024 > start as u64, "{at} is near {offset}");
                        assert_eq!(sequence, unit as u64);
                        assert!(!is_last);
                    }
                    Err(other) => panic!("another error: {other}"),
                    // Nothing shows that the last batch was ever whole.
                    Ok((_, found)) => assert!(
                        (is_last && found == 24) || is_same,
                        "a hole in unit {unit} was not detected"
                    ),
                }
            }
        }
    }
}

#[test]
fn a_missing_or_emptied_segment_is_refused() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = reopen(&storage).expect("open");
    let (mut appender, commit) = (journal.appender(), journal.commit());
    for sequence in 1..=400 {
        append(&mut appender, sequence);
        if sequence % 9 == 0 || sequence == 400 {
            appender.flush();
            runtime().block_on(commit.wait(sequence)).expect("durable");
        }
    }
    journal.close();
    let segments = storage.segments().expect("listed");
    assert!(segments.len() > 4);
    for segment in &segments[..segments.len() - 2] {
        let emptied = Arc::new(storage.image());
        emptied.corrupt(*segment, 0, &vec![0; storage.bytes(*segment).len()]);
        match reopen(&emptied) {
            Err(JournalError::Hole { file, .. }) => {
                assert!(file.contains(&format!("segment {segment}")), "{file}");
            }
            Err(other) => panic!("another error: {other}"),
            Ok((_, found)) => panic!("a lost segment was not detected: opened up to {found}"),
        }
        let gone = Arc::new(storage.image());
        gone.lose(*segment);
        match reopen(&gone) {
            Err(JournalError::SegmentMissing { missing, .. }) => assert_eq!(missing, *segment),
            // The first segment may have been archived: a start without a snapshot reports that.
            Err(JournalError::Removed { .. }) => assert_eq!(*segment, 1),
            Err(other) => panic!("another error: {other}"),
            Ok(_) => panic!("a missing segment {segment} was not detected"),
        }
    }
}

/// Offsets of the batches.
fn marks(bytes: &[u8]) -> Vec<usize> {
    let (mut at, mut marks) = (0, Vec::new());
    while let Some(rest) = bytes.get(at..)
        && let Found::Mark(mark) = frame::read(rest)
    {
        marks.push(at);
        at += usize::try_from(mark.extent).expect("small");
    }
    marks
}

/// Sets the version of the frame or mark at `offset`, with the checksum a later version would have.
fn set_version(storage: &Arc<MemoryStorage>, segment: u64, offset: usize, version: u16) {
    let mut head: Vec<u8> = storage.bytes(segment)[offset..].to_vec();
    let length = u32::from_le_bytes(head[..4].try_into().expect("four bytes"));
    head.truncate(frame::frame_bytes(length as usize));
    head[6..8].copy_from_slice(&version.to_le_bytes());
    head[36..40].fill(0);
    let crc = crc32c::crc32c(&head);
    head[36..40].copy_from_slice(&crc.to_le_bytes());
    storage.corrupt(segment, offset, &head);
}

#[test]
fn a_log_of_another_version_is_named_as_such() {
    let whole = singles();
    let before = whole.bytes(1);
    let marks = marks(&before);
    assert_eq!(marks.len(), 25);
    for version in [1, 2, 16, 700] {
        let refused = |storage: &Arc<MemoryStorage>, place: usize| {
            let bytes = storage.bytes(1);
            match reopen(storage) {
                Err(JournalError::Version {
                    file,
                    version: found,
                }) => assert_eq!((file.as_str(), found), ("memory segment 1", version)),
                Err(other) => panic!("version {version} at {place}: {other}"),
                Ok((_, found)) => panic!("version {version} at {place}: opened up to {found}"),
            }
            assert_eq!(storage.bytes(1), bytes, "a refused log is unchanged");
        };
        // At the segment's start and anywhere after it: a mark of a near version, whose checksum we
        // cannot know, and the frame after the mark.
        for mark in marks.iter().copied() {
            let storage = Arc::new(whole.image());
            if version == 700 {
                set_version(&storage, 1, mark, version);
            } else {
                storage.corrupt(1, mark + 6, &u16::to_le_bytes(version));
            }
            refused(&storage, mark);
            let storage = Arc::new(whole.image());
            set_version(&storage, 1, mark + frame::MARK_BYTES, version);
            refused(&storage, mark + frame::MARK_BYTES);
        }
        // After a torn batch: data that a later version has appended.
        let storage = Arc::new(whole.image());
        let (torn, last) = (marks[23], marks[24]);
        set_version(&storage, 1, last, version);
        storage.corrupt(1, torn, &[0; 512]);
        refused(&storage, last);
    }
}

// A batch that does not fit goes to the next segment. The end of the segment before stays zero, and
// noise there is no torn tail.
#[test]
fn noise_after_the_end_of_a_segment_does_not_lose_the_last_batch() {
    let mut cases = 0;
    for last in 40..70 {
        let storage = Arc::new(MemoryStorage::default());
        let (journal, _) = reopen(&storage).expect("open");
        let (mut appender, commit) = (journal.appender(), journal.commit());
        for range in [1..=1, 2..=last] {
            let end = *range.end();
            range.for_each(|sequence| append(&mut appender, sequence));
            appender.flush();
            runtime().block_on(commit.wait(end)).expect("durable");
        }
        journal.close();
        let first = storage.bytes(1);
        let written = first.iter().rposition(|byte| *byte != 0).expect("written");
        if written >= 1_024 || marks(&storage.bytes(2)).len() != 1 {
            continue;
        }
        cases += 1;
        for offset in [1_024, 1_030, 8_192, (16 << 10) - 3] {
            let noisy = Arc::new(storage.image());
            noisy.corrupt(1, offset, &[0xA5; 3]);
            let before = noisy.bytes(2);
            match reopen(&noisy) {
                Err(JournalError::Hole { sequence: 1, .. }) => {}
                Err(other) => panic!("another error: {other}"),
                Ok((_, found)) => panic!("noise at {offset}: opened up to {found}"),
            }
            assert_eq!(noisy.bytes(2), before, "nothing was truncated");
        }
        assert_eq!(reopen(&storage).expect("opens").1, last);
    }
    assert!(cases > 0, "no batch went to the next segment");
}

#[test]
fn log_ending_before_a_durable_record_is_refused_unchanged() {
    let storage = singles();
    let ends = unit_ends(&storage.bytes(1));
    // The last record is torn, but the caller knows that it was durable.
    storage.corrupt(1, ends[24].0 - 20, &[0; 8]);
    let before = storage.bytes(1);
    let open = |after| {
        let journal = Journal::open_after(Arc::new(storage.clone()), CONFIG, after, |_| Ok(()));
        journal.map(|journal| journal.commit().position())
    };
    assert!(matches!(
        open(25),
        Err(JournalError::Lost { end: 24, after: 25 })
    ));
    assert_eq!(storage.bytes(1), before, "nothing was truncated");
    assert_eq!(open(24).expect("a torn tail is truncated"), 24);
    let empty = Arc::new(MemoryStorage::default());
    let opened = Journal::open_after(Arc::new(empty.clone()), CONFIG, 1, |_| Ok(()));
    assert!(matches!(opened, Err(JournalError::Lost { end: 0, .. })));
    assert!(empty.segments().expect("listed").is_empty());
}

#[test]
fn a_disk_error_in_write_or_sync_is_final_and_keeps_the_reported_records() {
    // In the write and in the sync. A shortage for the next segment only stalls the log: `room.rs`.
    for fault in 0..2 {
        let storage = Arc::new(MemoryStorage::default());
        let (journal, _) = reopen(&storage).expect("open");
        let (mut appender, commit) = (journal.appender(), journal.commit());
        append(&mut appender, 1);
        appender.flush();
        runtime().block_on(commit.wait(1)).expect("durable");
        let next = 2;
        match fault {
            0 => storage.is_full.store(true, Ordering::SeqCst),
            _ => storage.is_broken.store(true, Ordering::SeqCst),
        }
        let reported = commit.position();
        for sequence in next..next + 40 {
            append(&mut appender, sequence);
        }
        appender.flush();
        let failed = runtime()
            .block_on(commit.wait(next + 39))
            .expect_err("the disk fails");
        assert!(!failed.to_string().is_empty());
        assert!(appender.is_failed() && commit.failure().is_some());
        for fault in [&storage.is_full, &storage.is_broken] {
            fault.store(false, Ordering::SeqCst);
        }
        append(&mut appender, next + 40);
        appender.flush();
        runtime()
            .block_on(commit.wait(next + 40))
            .expect_err("a failed log stays failed");
        assert!(commit.position() >= reported);
        journal.close();
        let (_, found) = reopen(&storage).expect("open");
        assert!(found >= reported && found < next + 40);
    }
}

#[test]
fn a_full_disk_is_final_and_keeps_the_reported_records() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = reopen(&storage).expect("open");
    let runtime = runtime();
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
    let runtime = runtime();
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
