//! The number and cost of look-ups in the journal.

use types::RejectReason;

use crate::sessions::{Raw, raw_login};
use crate::shares::{OneCounter, is_answer, members, unknown};
use crate::world::*;

/// Records after those that the look-ups need.
const LATER: u64 = 3_000;
/// More records than these tests journal before.
const EARLIER_MAX: u64 = 200;

/// Sends requests in session `a` of a user and reads their refusals. The connection then ends.
async fn refused_requests(world: &World, user: &str, count: u64) {
    let mut raw = Raw::connect(world).await;
    raw.login(0, raw_login(user, "a", 0)).await;
    for seq in 1..=count {
        raw.send(0, seq, unknown()).await;
    }
    for _ in 1..=count {
        raw.until(is_answer).await;
    }
}

/// A world in which ann has sent requests with these client sequences, followed by [`LATER`]
/// requests of bob. A restart has emptied the windows.
async fn world_of(folder: &std::path::Path, of_ann: &[u64]) -> World {
    let world = members(folder, Settings::unthrottled()).await;
    let mut ann = Raw::connect(&world).await;
    ann.login(0, raw_login("ann", "a", 0)).await;
    for seq in of_ann {
        ann.send(0, *seq, unknown()).await;
        ann.until(is_answer).await;
    }
    refused_requests(&world, "bob", LATER).await;
    world.restart(Settings::unthrottled()).await
}

// rows: R343
#[tokio::test]
async fn r343_a_resume_reads_no_record_after_the_last_message_that_is_missing() {
    let records = OneCounter::new("trading_look_up_records_total");
    let _recording = metrics::set_default_local_recorder(&records);
    let folder = tempfile::tempdir().unwrap();
    let world = world_of(folder.path(), &[1, 2, 3, 4, 5]).await;
    let mut ann = Raw::connect(&world).await;
    ann.send(0, 0, raw_login("ann", "a", 0)).await;
    for number in 1..=5 {
        assert_eq!(ann.until(is_answer).await.0, number);
    }
    let read = records.count();
    assert!((1..EARLIER_MAX).contains(&read), "{read} records");
    world.stop().await;
}

/// While the journal is read, the session's window moves on. The messages that leave it meanwhile
/// are not read in another look-up.
// rows: R343
#[tokio::test]
async fn r343_a_resume_of_a_session_that_trades_takes_one_look_up() {
    const MESSAGES: u64 = 3_000;
    const MEANWHILE: u64 = 200;
    let look_ups = OneCounter::new("trading_look_ups_total");
    let _recording = metrics::set_default_local_recorder(&look_ups);
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    settings.gateway.window_messages_max = 1_024;
    let world = members(folder.path(), settings).await;
    refused_requests(&world, "ann", MESSAGES).await;
    let mut again = Raw::connect(&world).await;
    again.login(0, raw_login("ann", "a", 0)).await;
    for seq in MESSAGES + 1..=MESSAGES + MEANWHILE {
        again.send(0, seq, unknown()).await;
    }
    for number in 1..=MESSAGES + MEANWHILE {
        assert_eq!(again.until(is_answer).await.0, number);
    }
    assert_eq!(look_ups.count(), 1);
    world.stop().await;
}

// rows: R341
#[tokio::test]
async fn r341_the_repeat_of_a_skipped_sequence_reads_no_record_after_its_place() {
    let records = OneCounter::new("trading_look_up_records_total");
    let _recording = metrics::set_default_local_recorder(&records);
    let folder = tempfile::tempdir().unwrap();
    let world = world_of(folder.path(), &[1_000, 1_001]).await;
    let mut ann = Raw::connect(&world).await;
    let from_now = wire::Login {
        flags: wire::LOGIN_FROM_NOW,
        ..raw_login("ann", "a", 0)
    };
    ann.login(0, from_now).await;
    ann.send(0, 7, unknown()).await;
    let (number, answer) = ann.until(is_answer).await;
    let reason = rejected(&answer).unwrap().reason;
    assert_eq!((number, reason), (0, RejectReason::AlreadySeen));
    let read = records.count();
    assert!((1..EARLIER_MAX).contains(&read), "{read} records");
    world.stop().await;
}
