//! Settlement that goes on from a checkpoint: the same state as from the first record, also after a kill, and without the records before it.

mod world;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use sequencer::Checkpoints;
use settlement::StartError;
use settlement::fold::{Fold, FoldImage};
use types::{Event, Sequence};
use world::services::{Platform, config};
use world::{Market, Record, node};

const FOLDER: &str = "SETTLEMENT_CHECKPOINT_FOLDER";
const PATIENCE: Duration = Duration::from_secs(60);

fn market(seed: u64) -> Market {
    let mut market = Market::new(seed);
    for _ in 0..200 {
        market.random();
    }
    market
}

fn folded(mut fold: Fold, records: &[Record]) -> (FoldImage, Vec<settlement::fold::Change>) {
    let mut changes = Vec::new();
    for record in records {
        fold.apply(&record.command, &record.events, &mut changes)
            .unwrap();
    }
    (fold.image(), changes)
}

// rows: R189
#[test]
fn r189_a_fold_from_any_checkpoint_and_the_records_behind_it_is_the_fold_from_the_first() {
    for seed in 0..4 {
        let records = market(seed).records;
        for at in (0..=records.len()).step_by(7) {
            let mut first = Fold::new(node());
            for record in &records[..at] {
                first
                    .apply(&record.command, &record.events, &mut Vec::new())
                    .unwrap();
            }
            let bytes = rkyv::to_bytes::<rkyv::rancor::Error>(&first.image()).unwrap();
            let image = rkyv::from_bytes::<FoldImage, rkyv::rancor::Error>(&bytes).unwrap();
            let restored = Fold::restore(image, node()).unwrap();
            assert_eq!(restored.position(), Sequence(at as u64));
            let (tail, whole) = (
                folded(restored, &records[at..]),
                folded(first, &records[at..]),
            );
            assert_eq!(tail, whole, "seed {seed}, checkpoint {at}");
        }
    }
}

#[test]
fn an_image_that_no_journal_has_made_is_refused() {
    let market = market(5);
    let image = market.admission.image();
    let other = types::NodeId::new(2).unwrap();
    let error = Fold::restore(image, other).unwrap_err();
    assert!(error.contains("node 1"), "{error}");
}

async fn settled(folder: &Path, market: &Market, records: &[Record]) -> Platform {
    let mut settings = config(folder);
    settings.batch_trades_max = 2;
    let funded = folder.join("funded");
    let platform = if funded.exists() {
        Platform::start(folder, settings, records).await
    } else {
        let mut platform = Platform::start(folder, settings, &[]).await;
        platform.fund(market).await;
        std::fs::write(&funded, "").unwrap();
        platform.feed(records);
        platform
    };
    let end = market.admission.position();
    tokio::time::timeout(PATIENCE, platform.settlement.drained(end))
        .await
        .unwrap_or_else(|_| panic!("not drained: {:?}", platform.settlement.stats()));
    platform
}

/// The process that is killed; does nothing unless a parent test started it.
#[tokio::test]
async fn child() {
    if let Ok(folder) = std::env::var(FOLDER) {
        let market = market(12);
        settled(Path::new(&folder), &market, &market.records).await;
    }
}

fn newest(folder: &Path) -> Option<u64> {
    let checkpoints = Checkpoints::new(&folder.join("settlement/checkpoints"));
    checkpoints
        .newest(Sequence(u64::MAX), |sequence, _| Ok(sequence.0))
        .unwrap()
}

// rows: R186 R189
#[tokio::test]
async fn r189_killed_behind_a_checkpoint_the_rest_is_settled_once_without_the_records_before_it() {
    let market = market(12);
    for place in ["settlement.posted:12", "settlement.submitted:12"] {
        let folder = tempfile::tempdir().unwrap();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(FOLDER, folder.path())
            .env("PLATFORM_CRASH_AT", place)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(!status.success(), "{place} was not reached");
        let from = newest(folder.path()).expect("a checkpoint") as usize;
        assert!(from > 0 && from < market.records.len());

        // The journal's beginning is gone.
        let mut platform = settled(folder.path(), &market, &market.records[from..]).await;
        let moved = platform.chain.moved();
        let mut trades = 0;
        for event in market.records.iter().flat_map(|r| &r.events) {
            if matches!(event.event, Event::Trade(_)) {
                trades += 1;
                let id = event.trade_uuid(node()).to_string();
                assert_eq!(moved.get(&id), Some(&1), "{place}: trade {id}");
            }
        }
        assert!(trades > 10);
        assert_eq!(moved.len(), trades);
        assert_eq!(platform.settlement.stats().trades_settled, trades as u64);
        platform.assert_agrees(&market).await;
        platform.stop().await;
    }
}

fn damage(folder: &Path) {
    for entry in std::fs::read_dir(folder.join("settlement/checkpoints")).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    assert_eq!(newest(folder), None);
}

// A damaged checkpoint costs time alone: the one before it, or the journal's first record.
#[tokio::test]
async fn damaged_checkpoints_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let market = market(13);
    settled(folder.path(), &market, &market.records)
        .await
        .stop()
        .await;
    let from = newest(folder.path()).expect("a checkpoint") as usize;
    damage(folder.path());
    // With the journal's beginning gone, nothing is left to go on from.
    let behind = &market.records[from - 1..];
    let refused = Platform::try_start(folder.path(), config(folder.path()), behind).await;
    let error = refused.map(|_| ()).unwrap_err();
    let removed = Sequence(from as u64 - 1);
    assert!(
        matches!(error, StartError::Begin { removed: told } if told == removed),
        "{error}"
    );
    let mut platform = settled(folder.path(), &market, &market.records).await;
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

// Databases of an earlier moment: states that are ahead of the ledger are of no use. With the whole journal it is brought on from its own position, without the
// journal's beginning it cannot be, and that is said.
#[tokio::test]
async fn an_older_ledger_put_back_is_brought_on_by_the_whole_journal_and_by_nothing_less() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let market = market(14);
    let half = market.records.len() / 2;
    let mut platform = Platform::start(folder, config(folder), &[]).await;
    platform.fund(&market).await;
    std::fs::write(folder.join("funded"), "").unwrap();
    platform.feed(&market.records[..half]);
    let at = market.records[half - 1].command.sequence;
    let drained = platform.settlement.drained(at);
    tokio::time::timeout(PATIENCE, drained).await.unwrap();
    platform.stop().await;
    let rooms = ["ledger", "settlement"];
    for room in rooms {
        copy(&folder.join(room), &folder.join("copies").join(room));
    }
    settled(folder, &market, &market.records).await.stop().await;
    let from = newest(folder).expect("a checkpoint") as usize;
    assert!(from > half + 20);

    let put_back = || {
        std::fs::remove_dir_all(folder.join("ledger")).unwrap();
        for room in rooms {
            copy(&folder.join("copies").join(room), &folder.join(room));
        }
    };
    put_back();
    let platform = Platform::start(folder, config(folder), &market.records[from - 1..]).await;
    let mut failing = platform.settlement.health().watch();
    let told = failing.wait_for(|parts| {
        let journal = parts.get("settlement-journal");
        journal.is_some_and(|reason| reason.contains("older copy"))
    });
    tokio::time::timeout(PATIENCE, told).await.unwrap().unwrap();
    platform.stop().await;

    put_back();
    let mut platform = settled(folder, &market, &market.records).await;
    platform.assert_agrees(&market).await;
    platform.stop().await;
}
