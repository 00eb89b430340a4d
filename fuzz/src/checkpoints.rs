//! Snapshot files and the states in them.

use std::path::PathBuf;

use journal::Snapshots;
use replica::restore;
use rkyv::util::AlignedVec;
use sequencer::Core;
use sequencer::image::CoreImage;
use tempfile::TempDir;
use types::Sequence;

use crate::expect_panics;
use crate::market::{Market, limits, node};

const SEQUENCE: u64 = 7;

/// A temporary folder per thread, with one snapshot file.
struct Folder {
    dir: TempDir,
    file: PathBuf,
}

thread_local! {
    static FOLDER: Folder = {
        let dir = tempfile::tempdir().expect("temporary folder");
        let file = Snapshots::new(dir.path()).write(SEQUENCE, b"").expect("snapshot written");
        Folder { dir, file }
    };
}

/// Reads any bytes as a snapshot file.
pub fn check_file(bytes: &[u8]) {
    FOLDER.with(|folder| {
        let snapshots = Snapshots::new(folder.dir.path());
        std::fs::write(&folder.file, bytes).expect("snapshot file written");
        let found = snapshots.newest(u64::MAX).expect("folder readable");
        assert_eq!(snapshots.is_good(SEQUENCE), found.is_some());
        assert_eq!(snapshots.newest(SEQUENCE - 1).expect("read"), None);
        let good: &[u64] = if found.is_some() { &[SEQUENCE] } else { &[] };
        assert_eq!(snapshots.good().expect("read"), good);
        if let Some(found) = found {
            assert_eq!(found.sequence, SEQUENCE);
            snapshots
                .write(SEQUENCE, &found.payload)
                .expect("snapshot written");
            let again = std::fs::read(&folder.file).expect("read");
            assert_eq!(again, bytes, "equal payloads have equal files");
        }
    });
}

pub fn file_seeds() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = |payload: &[u8]| {
        let path = Snapshots::new(folder.path())
            .write(SEQUENCE, payload)
            .expect("snapshot written");
        std::fs::read(path).expect("read")
    };
    vec![file(b""), file(b"a state"), file(&[0; 300])]
}

/// Restores any bytes as the payload of a checkpoint. The checksum is not checked: damage that it
/// does not detect must be rejected too.
pub fn check_state(bytes: &[u8]) {
    let payload = aligned(bytes);
    let image = CoreImage::decode(&payload);
    let core = image.as_ref().ok().and_then(|image| {
        let restored = expect_panics(|| Core::restore(image, limits()));
        restored
            .inspect_err(|error| assert!(!error.to_string().is_empty()))
            .ok()
    });
    if let (Ok(image), Some(core)) = (&image, &core) {
        // The core is the whole image except the replica's part.
        let same = core
            .image()
            .with_replica_tables(image.replica_tables().to_vec());
        let again = Core::restore(&same, limits()).expect("a core restores its own image");
        assert_eq!(again.state_hash(), core.state_hash());
    }
    let restored = expect_panics(|| restore(node(), limits(), &payload));
    match restored {
        Ok(state) => {
            let core = core.expect("the replica's state contains a core");
            assert_eq!(state.core().state_hash(), core.state_hash());
            let written = state.checkpoint().encode().expect("state encoded");
            let again =
                restore(node(), limits(), &written).expect("a replica restores its own checkpoint");
            assert_eq!(again.sequence(), state.sequence());
            assert!(again.orders().eq(state.orders()));
            assert!(again.trading_holds().eq(state.trading_holds()));
            assert!(again.sequence() >= Sequence::ZERO);
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}

fn aligned(bytes: &[u8]) -> AlignedVec {
    let mut payload = AlignedVec::with_capacity(bytes.len());
    payload.extend_from_slice(bytes);
    payload
}

pub fn state_seeds() -> Vec<Vec<u8>> {
    let of = |commands| {
        let state = Market::new(1, commands).state;
        state.checkpoint().encode().expect("state encoded").to_vec()
    };
    vec![of(0), of(5), of(60)]
}
