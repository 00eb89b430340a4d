//! The embedded log after power losses: whichever unsynced writes a disk kept, no acknowledged
//! event is lost and no event is partial.
//!
//! A child process publishes and records each acknowledgement. A small preloaded library records
//! every write, truncation, removal and sync of its files in order. From these records the test
//! derives disk states: all synced writes, and a random subset of the others, torn at sectors.
//! SQLite must recover a valid log from each. `POWERLOSS_SEEDS` sets the number of states.

#[path = "../../testkit/src/seed.rs"]
mod seed;
#[path = "common/victim.rs"]
#[allow(dead_code, reason = "this test does not kill its child")]
mod victim;

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
    process::Command,
};

use events::{Embedded, Event, Log};
use uuid::Uuid;
use victim::Victim;

/// Folder for the child process; without it the child test does nothing.
const CHILD_FOLDER: &str = "EVENTS_POWERLOSS_FOLDER";
/// Publications of the child, and the size of each: together more than SQLite's checkpoint
/// threshold.
const PUBLISHED: usize = 90;
const PAYLOAD: usize = 60_000;
const SECTOR: usize = 512;
const ACKS: &str = "acks";
/// File name of the records of the folder itself.
const FOLDER: &str = "";

fn event(number: usize) -> Event {
    Event {
        id: Uuid::from_u128(number as u128 + 1),
        topic: "t".to_owned(),
        key: "k".to_owned(),
        type_name: "Numbered".to_owned(),
        subject: number.to_string(),
        source: "test".to_owned(),
        correlation_id: String::new(),
        occurred_at_us: 0,
        payload: vec![number as u8; PAYLOAD],
    }
}

/// Not a test: the recorded process.
#[tokio::test]
async fn child_publishes_and_records_acknowledgements() {
    let Ok(folder) = std::env::var(CHILD_FOLDER) else {
        return;
    };
    use std::io::Write;
    let log = Embedded::open(Path::new(&folder)).await.unwrap();
    let mut acks = std::fs::File::create(Path::new(&folder).join(ACKS)).unwrap();
    for number in 0..PUBLISHED {
        log.publish(&[event(number)]).await.unwrap();
        acks.write_all(b"x").unwrap();
    }
    // Nothing is closed, as in a power loss.
    std::process::abort();
}

enum Step {
    Write { offset: usize, data: Vec<u8> },
    Truncate(usize),
    Sync,
    Remove,
}

struct Record {
    /// Name of the file in the folder.
    file: String,
    step: Step,
}

fn take<const N: usize>(from: &mut &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).expect("a whole record");
    bytes
}

fn read_records(folder: &Path, mut bytes: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let [kind] = take(&mut bytes);
        let path_length = u16::from_ne_bytes(take(&mut bytes)) as usize;
        let offset = i64::from_ne_bytes(take(&mut bytes)) as usize;
        let length = u64::from_ne_bytes(take(&mut bytes)) as usize;
        let (path, rest) = bytes.split_at(path_length);
        let (data, rest) = rest.split_at(length);
        bytes = rest;
        let path = PathBuf::from(String::from_utf8(path.to_vec()).expect("a path"));
        let Ok(file) = path.strip_prefix(folder) else {
            continue;
        };
        let step = match kind {
            b'w' => Step::Write {
                offset,
                data: data.to_vec(),
            },
            b't' => Step::Truncate(offset),
            b's' => Step::Sync,
            _ => Step::Remove,
        };
        records.push(Record {
            file: file.to_string_lossy().into_owned(),
            step,
        });
    }
    records
}

/// Records the child in a fresh folder.
fn record() -> Vec<Record> {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("recorder.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/disk/recorder.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(&source)
        .args(["-ldl", "-lpthread"])
        .status()
        .expect("a C compiler");
    assert!(compiled.success(), "the recorder does not compile");
    let files = folder.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let kept = folder.path().join("record");
    let name = "child_publishes_and_records_acknowledgements";
    let mut child = Victim::spawn(
        name,
        [
            (CHILD_FOLDER, &files),
            ("DISK_FOLDER", &files),
            ("DISK_RECORD", &kept),
            ("LD_PRELOAD", &library),
        ],
    );
    assert!(!child.end().success(), "the child ends as by a power loss");
    let records = read_records(&files, &std::fs::read(kept).unwrap());
    let acks = records.iter().filter(|record| record.file == ACKS).count();
    assert_eq!(acks, PUBLISHED, "every publication was acknowledged");
    records
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) % bound as u64) as usize
    }
}

fn apply(file: &mut Option<Vec<u8>>, step: &Step, bytes_max: usize) {
    match step {
        Step::Write { offset, data } => {
            let content = file.get_or_insert_default();
            let data = &data[..data.len().min(bytes_max)];
            if content.len() < offset + data.len() {
                content.resize(offset + data.len(), 0);
            }
            content[*offset..offset + data.len()].copy_from_slice(data);
        }
        Step::Truncate(length) => file.get_or_insert_default().resize(*length, 0),
        Step::Remove => *file = None,
        Step::Sync => {}
    }
}

/// Disk contents that are possible if power is lost after `cut` records, and the number of
/// publications acknowledged by then.
fn crash(
    records: &[Record],
    cut: usize,
    random: &mut Random,
    honours_sync: bool,
) -> (BTreeMap<String, Vec<u8>>, usize) {
    let records = &records[..cut];
    let acknowledged = records.iter().filter(|record| record.file == ACKS).count();
    let synced = |file: &str| {
        let is_sync = |record: &Record| record.file == file && matches!(record.step, Step::Sync);
        records.iter().rposition(is_sync).filter(|_| honours_sync)
    };
    // A removed file is permanently gone once the folder is synced.
    let folder_synced = synced(FOLDER);
    let mut steps: BTreeMap<&str, Vec<(usize, &Step)>> = BTreeMap::new();
    for (at, record) in records.iter().enumerate() {
        if record.file != ACKS && record.file != FOLDER {
            let steps = steps.entry(&record.file).or_default();
            steps.push((at, &record.step));
        }
    }
    let mut files = BTreeMap::new();
    for (name, steps) in steps {
        let file_synced = synced(name);
        let mut file = None;
        for (at, step) in steps {
            let until = match step {
                Step::Remove => folder_synced,
                _ => file_synced,
            };
            let is_synced = until.is_some_and(|until| at < until);
            let is_kept = is_synced || random.below(2) == 0;
            let torn = match step {
                Step::Write { data, .. } if !is_synced && random.below(4) == 0 => {
                    SECTOR * random.below(data.len() / SECTOR + 1)
                }
                _ => usize::MAX,
            };
            if is_kept {
                apply(&mut file, step, torn);
            }
        }
        // Shared memory does not survive.
        if let Some(content) = file.filter(|_| !name.ends_with("-shm")) {
            files.insert(name.to_owned(), content);
        }
    }
    (files, acknowledged)
}

/// Number of intact leading events in the recovered log, or why it cannot be read.
async fn recovered(files: &BTreeMap<String, Vec<u8>>) -> Result<usize, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).map_err(|error| error.to_string())?;
    }
    let log = Embedded::open(folder.path())
        .await
        .map_err(|error| format!("does not open: {error}"))?;
    let found = log
        .backlog("reader", &["t"])
        .await
        .map_err(|error| format!("cannot be read: {error}"));
    log.close().await;
    let found = found?;
    for (number, delivery) in found.iter().enumerate() {
        if delivery.record.event != event(number) {
            return Err(format!("event {number} is not what was published"));
        }
    }
    Ok(found.len())
}

/// Checks one disk state; returns the fault found.
async fn find_fault(records: &[Record], seed: u64, honours_sync: bool) -> Option<String> {
    let mut random = Random(seed);
    // After the first acknowledgement: before it the log is being created.
    let first = records.iter().position(|record| record.file == ACKS)? + 1;
    let cut = first + random.below(records.len() - first + 1);
    let (files, acknowledged) = crash(records, cut, &mut random, honours_sync);
    match recovered(&files).await {
        Err(reason) => Some(format!("seed {seed}: {reason}")),
        Ok(found) if found < acknowledged => {
            Some(format!("seed {seed}: {found} of {acknowledged}"))
        }
        Ok(_) => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_events_survive_a_power_loss() {
    let seeds = std::env::var("POWERLOSS_SEEDS")
        .map_or(200, |text| text.parse().expect("a number of seeds"));
    let records = record();
    assert!(
        records
            .iter()
            .any(|record| record.file == "log.db" && matches!(record.step, Step::Write { .. })),
        "the run must include a checkpoint: a write to log.db itself, not only to its WAL"
    );
    for seed in seed::seeds(0..seeds) {
        let fault = find_fault(&records, seed, true).await;
        assert_eq!(fault, None);
    }
    println!("{seeds} states of {} records", records.len());
    // Counter-check: a disk that ignores syncs must lose acknowledged events.
    let mut lost = 0;
    for seed in 0..20 {
        lost += usize::from(find_fault(&records, seed, false).await.is_some());
    }
    assert!(lost > 0, "a missing sync was not detected");
}
