//! Every committed seed of the fuzz target `frames`, and mutations of it that a seed decides.
//! `WRITE_SEEDS=1` makes the seeds again.

#[path = "../fuzz/targets/check_frames.rs"]
mod check_frames;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use check_frames::check;
use journal::fault::MemoryStorage;
use journal::{Config, FrameKind, Journal};

/// Mutations of each seed.
const MUTATIONS: u64 = 400;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/frames")
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % bound.max(1) as u64).expect("below a size")
    }
}

/// A few bytes changed, a piece zeroed, doubled or cut off.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len());
        let length = random.below(80).min(bytes.len() - at);
        match random.below(5) {
            0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at..at + length].fill(0),
            3 => {
                let piece = bytes[at..at + length].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            _ => bytes.truncate(bytes.len() - length),
        }
    }
}

/// A log of one segment, a batch for each number of commands.
fn log(batches: &[u64]) -> Vec<u8> {
    let storage = Arc::new(MemoryStorage::default());
    let config = Config {
        segment_bytes: 8 << 10,
        pending_bytes_max: 1 << 16,
    };
    let journal = Journal::open(Arc::new(storage.clone()), config, |_| Ok(())).expect("opens");
    let (mut appender, commit) = (journal.appender(), journal.commit());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("runtime");
    let mut sequence = 0;
    for commands in batches {
        for _ in 0..*commands {
            sequence += 1;
            let payload = vec![sequence as u8; 30 + sequence as usize % 50];
            let events = sequence % 3;
            appender.append(FrameKind::Command, events == 0, sequence, 1, &payload);
            for event in 1..=events {
                appender.append(FrameKind::Event, event == events, sequence, 1, &payload);
            }
        }
        appender.flush();
        runtime.block_on(commit.wait(sequence)).expect("durable");
    }
    journal.close();
    storage.bytes(1)
}

fn write_seeds() {
    let three = log(&[1, 3, 2]);
    let mut torn = three.clone();
    let end = torn.iter().rposition(|byte| *byte != 0).expect("written");
    torn[end - 9..].fill(0);
    let mut hole = three.clone();
    hole[100] ^= 0x40;
    let mut version = three.clone();
    version[512 + 6] = 3;
    let frame = three[64..512].to_vec();
    for (name, bytes) in [
        ("empty", Vec::new()),
        ("one-command", log(&[1])),
        ("three-batches", three),
        ("large-batch", log(&[40])),
        ("torn", torn),
        ("hole", hole),
        ("version", version),
        ("frame", frame),
    ] {
        std::fs::write(folder().join(name), bytes).expect("written");
    }
}

// rows: R174
#[test]
fn r174_no_bytes_confuse_the_reader_of_frames_or_the_opening_of_a_log() {
    if std::env::var_os("WRITE_SEEDS").is_some() {
        write_seeds();
    }
    let mut seeds: Vec<PathBuf> = std::fs::read_dir(folder())
        .expect("seeds")
        .map(|entry| entry.expect("entry").path())
        .collect();
    seeds.sort();
    assert!(seeds.len() >= 8);
    for (number, seed) in seeds.iter().enumerate() {
        let bytes = std::fs::read(seed).expect("read");
        check(&bytes);
        let mut random = Random(number as u64);
        for _ in 0..MUTATIONS {
            let mut mutated = bytes.clone();
            mutate(&mut mutated, &mut random);
            check(&mutated);
        }
    }
}
