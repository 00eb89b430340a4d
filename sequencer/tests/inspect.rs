//! Output of `platform journal` for a folder, and the damage that it finds.

mod desk;

use std::path::Path;
use std::sync::Arc;

use admission::Request;
use desk::{Time, done, open_desk};
use replica::SnapshotError;
use sequencer::inspect::{Folder, InspectError};
use sequencer::{Backlog, Config, SequencerHandle, StartError};
use types::{Command, NodeId, Sequence, Side};

fn config(dir: &Path) -> Config {
    let mut config = desk::config(&Time::new());
    config.dir = dir.to_path_buf();
    config.snapshot_dir = dir.join("snapshots");
    config.segment_bytes = 64 << 10;
    config
}

/// A market of two instruments with trades; returns its last sequence and state hash.
async fn market(dir: &Path) -> (Sequence, u64) {
    let handle = SequencerHandle::start(config(dir), Arc::new(Backlog::default())).expect("starts");
    let desk = open_desk(handle.port(), 2).await;
    let mut last = Sequence::ZERO;
    for at in 0..400 {
        let side = if at % 3 == 0 { Side::Buy } else { Side::Sell };
        let order = desk.order(usize::from(at % 2 == 0), side, 10_000 + at * 7 % 23, 5);
        last = done(&desk.port, Request::New(order)).await.command.sequence;
    }
    handle.commit().wait(last).await.expect("durable");
    let hash = handle.port().inspect(|core| core.state_hash()).await;
    handle.stop();
    (last, hash.expect("inspected"))
}

fn node() -> NodeId {
    NodeId::new(1).expect("a node")
}

fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

// rows: R174 R180
#[tokio::test]
async fn r174_r180_folder_is_listed_verified_dumped_and_replayed() {
    let dir = tempfile::tempdir().expect("folder");
    let (last, hash) = market(dir.path()).await;
    let folder = Folder::new(dir.path());

    let listing = folder.list().expect("listed");
    assert!(listing.segments.len() > 1 && listing.snapshots.is_empty());
    let mut next = 1;
    for line in &listing.segments {
        if let (Some(first), Some(last)) = (line.first, line.last) {
            assert_eq!(first, next);
            next = last + 1;
        }
        assert!(line.used_bytes <= line.bytes);
    }
    assert_eq!(next, last.get() + 1);
    assert!(listing.to_string().contains("0000000001.log"));

    let verified = folder.verify().expect("whole");
    assert_eq!((verified.first, verified.last), (1, last.get()));
    assert_eq!(verified.commands, last.get());
    assert_eq!(verified.compared_after, Some(0));
    assert_eq!(verified.state_hash, hex(hash));
    assert!(verified.events > 400 && verified.trades > 50);
    assert_eq!(verified.torn_tail, None);

    let (mut commands, mut events, mut text) = (0, 0, String::new());
    folder
        .dump(1..=u64::MAX, |line| {
            commands += 1;
            events += line.events.len() as u64;
            assert_eq!(line.command.sequence, Sequence(commands));
            let json = serde_json::to_value(&line).map_err(|error| error.to_string())?;
            assert_eq!(json["sequence"], commands);
            assert!(json["command"]["type"].is_string());
            if matches!(line.command.command, Command::New(_)) {
                assert_eq!(json["command"]["type"], "NEW");
                assert_eq!(json["command"]["order_type"], "LIMIT");
                assert_eq!(json["events"][0]["event"]["type"], "ACCEPTED");
                assert!(json["command"]["session"].is_null());
            }
            text += &line.to_string();
            Ok(())
        })
        .expect("readable");
    assert_eq!((commands, events), (verified.commands, verified.events));
    assert!(text.contains("BOND-1") && text.contains("Trade("));
    let mut some = Vec::new();
    folder
        .dump(100..=102, |line| {
            some.push(line.command.sequence.get());
            Ok(())
        })
        .expect("readable");
    assert_eq!(some, [100, 101, 102]);
    let refused = folder.dump(1..=5, |_| Err("enough".to_owned()));
    assert!(refused.expect_err("no").to_string().contains("enough"));

    let state = folder.state(None).expect("replayed");
    assert_eq!(
        (state.sequence, &state.state_hash),
        (last.get(), &hex(hash))
    );
    let book = &state.books[0];
    let orders = |levels: &[sequencer::inspect::Level]| {
        levels.iter().map(|level| level.orders).sum::<usize>()
    };
    assert_eq!(
        orders(&book.bids) + orders(&book.asks),
        book.orders as usize
    );
    assert!(book.orders > 0 && state.to_string().contains("BOND-0 OPEN"));
    let half = Sequence(last.get() / 2);
    let earlier = folder.state(Some(half)).expect("replayed");
    assert_eq!(earlier.sequence, half.get());
    assert_ne!(earlier.state_hash, state.state_hash);
    let beyond = folder.state(Some(last.next())).expect_err("not there");
    assert!(matches!(beyond, InspectError::Beyond { end, .. } if end == last));

    assert_eq!(folder.first().expect("read"), 1);
    let written = replica::snapshot(&folder, node(), Some(half)).expect("written");
    assert_eq!(
        (written.sequence, written.state_hash),
        (half.get(), earlier.state_hash)
    );
    assert_eq!(folder.list().expect("listed").snapshots.len(), 1);
    let verified = folder.verify().expect("whole");
    assert_eq!(verified.snapshots, [half.get()]);
    assert_eq!(verified.state_hash, hex(hash));
    // Snapshots on request remove nothing, in whatever order.
    let old = [last, Sequence(last.get() - 5), Sequence(20), Sequence(30)];
    for until in old {
        replica::snapshot(&folder, node(), Some(until)).expect("written");
    }
    let sequences: Vec<u64> = folder.verify().expect("whole").snapshots;
    let mut expected: Vec<u64> = old.iter().chain([&half]).map(|s| s.get()).collect();
    expected.sort_unstable();
    assert_eq!(sequences, expected);
    // A node starts from it.
    let again =
        SequencerHandle::start(config(dir.path()), Arc::new(Backlog::default())).expect("starts");
    assert_eq!(again.recovered(), last);
    assert!(matches!(
        replica::snapshot(&folder, node(), None),
        Err(SnapshotError::Journal(InspectError::Start(
            StartError::InUse(_)
        )))
    ));
    again.stop();
}

#[tokio::test]
async fn damage_in_a_folder_is_reported_with_its_place() {
    let dir = tempfile::tempdir().expect("folder");
    let missing = dir.path().join("missing");
    let folder = Folder::new(&missing);
    let snapshot = replica::snapshot(&folder, node(), None).expect_err("missing");
    for error in [
        folder.list().expect_err("missing").to_string(),
        folder.verify().expect_err("missing").to_string(),
        folder.state(None).expect_err("missing").to_string(),
        snapshot.to_string(),
    ] {
        assert!(error.contains("No such file"), "{error}");
    }
    assert!(!missing.exists());

    let (last, _) = market(dir.path()).await;
    let folder = Folder::new(dir.path());
    let path = dir.path().join("0000000001.log");
    let whole = std::fs::read(&path).expect("read");
    // The first record, after the first mark.
    let mut damaged = whole.clone();
    damaged[100] ^= 1;
    std::fs::write(&path, &damaged).expect("written");
    let error = folder.verify().expect_err("a hole").to_string();
    assert!(
        error.contains("0000000001.log") && error.contains("offset") && error.contains("record"),
        "{error}"
    );
    std::fs::write(&path, &whole).expect("written");

    // A torn tail, and a damaged snapshot.
    let listing = folder.list().expect("listed");
    let used = listing.segments.iter().rfind(|line| line.last.is_some());
    let used = used.expect("written");
    let file = dir.path().join(format!("{:010}.log", used.number));
    let mut bytes = std::fs::read(&file).expect("read");
    let end = bytes.iter().rposition(|byte| *byte != 0).expect("written");
    bytes[end - 5..=end].fill(0);
    std::fs::write(&file, &bytes).expect("written");
    std::fs::create_dir_all(dir.path().join("snapshots")).expect("made");
    let snapshot = dir.path().join("snapshots/00000000000000000005.snap");
    std::fs::write(&snapshot, b"noise").expect("written");
    let verified = folder.verify().expect("a torn tail is no error");
    assert!(verified.last < last.get());
    let (name, _) = verified.torn_tail.clone().expect("torn");
    assert!(name.ends_with(&format!("{:010}.log", used.number)));
    assert_eq!(verified.bad_snapshots, [5]);

    // The journal's beginning is removed: the rest is shown from where it begins.
    let line = &listing.segments[0];
    std::fs::remove_file(&line.file).expect("removed");
    let first = folder.first().expect("read");
    assert_eq!(Some(first - 1), line.last);
    let mut shown = Vec::new();
    folder
        .dump(first..=u64::MAX, |line| {
            shown.push(line.command.sequence.get());
            Ok(())
        })
        .expect("readable");
    assert_eq!(shown.first(), Some(&first));
    assert!(folder.dump(1..=u64::MAX, |_| Ok(())).is_err());
    assert!(verified.to_string().contains("torn tail"));
}
