//! The chaos test's checks of a journal detect cancels on disconnect that are early, late or
//! missing.

#[path = "../../sequencer/tests/desk/mod.rs"]
mod desk;

use std::sync::Arc;
use std::time::Duration;

use admission::Request;
use desk::{Time, done, open_desk};
use sequencer::{Backlog, SequencerHandle};
use tests::chaos::judge::{self, Journal, Terms};
use types::{Id128, Side};

const SESSION: u128 = 7;
const TERMS: Terms = Terms {
    grace: Duration::from_secs(1),
    late: Duration::from_millis(500),
};

/// Runs a node with this grace: a session with one open order ends, and two more sessions open
/// `later_ms` later. Returns the findings in its journal.
async fn judged(grace_ms: u64, later_ms: u64) -> Journal {
    let folder = tempfile::tempdir().expect("a folder");
    let time = Time::new();
    let mut config = desk::config(&time);
    config.dir = folder.path().to_path_buf();
    config.snapshot_dir = folder.path().join("snapshots");
    config.sync = false;
    config.grace_ms = grace_ms;
    let handle = SequencerHandle::start(config, Arc::new(Backlog::default())).expect("starts");
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(SESSION, 0).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq, order.client_order_id) = (session, 1, 1);
    done(&desk.port, Request::New(order)).await;
    let close = Request::CloseSession {
        session,
        epoch: None,
        keep_orders: false,
    };
    done(&desk.port, close).await;
    time.advance_ms(later_ms);
    // Two requests wake the node twice, so that it reads the advanced clock.
    desk.session(SESSION + 1, 1).await;
    desk.session(SESSION + 2, 1).await;
    handle.stop();
    judge::read(folder.path(), &[], TERMS)
}

/// Asserts that there are violations and that each contains this text.
fn assert_only(journal: &Journal, text: &str) {
    let violations = &journal.violations;
    assert!(!violations.is_empty(), "{journal:?}");
    assert!(
        violations.iter().all(|one| one.contains(text)),
        "{violations:?}"
    );
}

// rows: R345
#[tokio::test]
async fn r345_early_late_and_missing_cancels_are_detected() {
    let right = judged(1_000, 1_000).await;
    assert_eq!(right.violations, Vec::<String>::new());
    assert_eq!((right.cancels, right.cancelled_orders), (1, 1));
    assert_eq!(right.largest, Some(Duration::from_secs(1)));
    // The acknowledgement and the cancel.
    let messages = &right.messages[&Id128::from_u128(SESSION)];
    assert_eq!(messages.len(), 2);

    assert_only(&judged(900, 900).await, "early");
    assert_only(&judged(1_000, 1_600).await, "still has orders");
    let missing = judged(10_000, 3_000).await;
    assert_only(&missing, "still has orders");
    assert_eq!(missing.cancels, 0);
}
