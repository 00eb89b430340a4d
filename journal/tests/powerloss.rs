//! Nothing reported durable is lost, over seeds.
//!
//! A seed is a few process lifetimes of a log on a disk that loses power in any write or sync,
//! while a segment is created, or while the log is opened. The disk then keeps, drops, tears and
//! reorders unsynced data. `POWERLOSS_SEEDS` sets the number of seeds; `cargo xtask powerloss` runs
//! all.

#[path = "../../testkit/src/seed.rs"]
mod seed;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use journal::fault::MemoryStorage;
use journal::{Appender, Config, FrameKind, Journal};

const CONFIG: Config = Config {
    segment_bytes: 8 << 10,
    pending_bytes_max: 1 << 20,
    recent_bytes: 64 << 10,
};
const LIVES: u64 = 5;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }
}

/// A record contains the lifetime that wrote it, so that a record of an earlier one is detected.
fn payload(sequence: u64, index: u64, life: u64) -> Vec<u8> {
    let length = 24 + usize::try_from((sequence * 31 + index * 7 + life) % 180).expect("small");
    let mut payload = vec![(sequence + index) as u8; length];
    for (at, word) in [sequence, index, life].into_iter().enumerate() {
        payload[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    payload
}

fn append(appender: &mut Appender, sequence: u64, life: u64) {
    let events = (sequence + life) % 4;
    for index in 0..=events {
        let kind = match index {
            0 => FrameKind::Command,
            _ => FrameKind::Event,
        };
        let payload = payload(sequence, index, life);
        appender.append(kind, index == events, sequence, 1, &payload);
    }
}

/// Opens the log and checks each record; `lives[n]` is the lifetime that wrote record `n + 1`.
fn check(storage: &Arc<MemoryStorage>, lives: &[u64]) -> Result<(Journal, u64), String> {
    let (mut last, mut index) = (0, 0);
    let journal = Journal::open(Arc::new(storage.clone()), CONFIG, |frame| {
        if frame.kind == FrameKind::Command {
            last += 1;
            index = 0;
        } else {
            index += 1;
        }
        let life = *lives
            .get(usize::try_from(last).expect("small") - 1)
            .ok_or("a record that was never written")?;
        let is_end = index == (last + life) % 4;
        if frame.sequence != last
            || frame.unit_end != is_end
            || frame.payload != payload(last, index, life)
        {
            return Err(format!("record {last} is not what was written"));
        }
        Ok(())
    });
    journal
        .map(|journal| (journal, last))
        .map_err(|error| error.to_string())
}

/// A few lifetimes, each ended by a power loss or a kill; the error says what was lost.
fn run(seed: u64, sync_is_lost: bool) -> Result<(), String> {
    let mut random = Random(seed);
    let storage = Arc::new(MemoryStorage::default());
    storage.sync_is_lost.store(sync_is_lost, Ordering::SeqCst);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("runtime");
    let mut lives: Vec<u64> = Vec::new();
    let mut reported = 0;
    for life in 1..=LIVES {
        if life < LIVES {
            storage.power_off_after(random.below(24));
        }
        match check(&storage, &lives) {
            Ok((journal, found)) => {
                if found < reported {
                    return Err(format!(
                        "life {life}: {reported} reported durable, {found} found"
                    ));
                }
                lives.truncate(usize::try_from(found).expect("small"));
                let (mut appender, commit) = (journal.appender(), journal.commit());
                assert_eq!(commit.position(), found);
                for _ in 0..random.below(12) {
                    for _ in 0..=random.below(9) {
                        lives.push(life);
                        append(&mut appender, lives.len() as u64, life);
                    }
                    appender.flush();
                    if runtime.block_on(commit.wait(lives.len() as u64)).is_err() {
                        break;
                    }
                }
                drop(journal);
                reported = commit.position();
            }
            // The power went during opening.
            Err(error) if error.contains("power is off") => {}
            Err(error) => return Err(format!("life {life}: {error}")),
        }
        match random.below(4) {
            0 => storage.revive(),
            _ => storage.crash(seed ^ life << 32),
        }
    }
    Ok(())
}

fn seeds() -> Range<u64> {
    let count = std::env::var("POWERLOSS_SEEDS").map_or(500, |seeds| {
        seeds.parse().expect("POWERLOSS_SEEDS is a number")
    });
    seed::seeds(0..count)
}

// rows: R174
#[test]
fn r174_no_power_loss_loses_a_record_reported_durable() {
    let seeds = seeds();
    for seed in seeds.clone() {
        if let Err(loss) = run(seed, false) {
            panic!("seed {seed}: {loss}");
        }
    }
    println!("seeds {seeds:?}, nothing lost");
}

#[test]
fn without_the_sync_the_same_seeds_lose_reported_records() {
    let seeds = seeds();
    let count = seeds.end - seeds.start;
    let losses = seeds.filter(|seed| run(*seed, true).is_err()).count() as u64;
    println!("{losses} of {count} seeds lose records when a sync does nothing");
    assert!(losses * 4 > count, "only {losses} of {count}");
}
