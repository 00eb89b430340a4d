//! Followers get equal records from memory and from files, after any record.
//!
//! No follower can make the replica wait.

#[path = "../../sequencer/tests/desk/mod.rs"]
mod desk;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use admission::{AmendRequest, CancelRequest, MassCancelRequest, OrderRef, Request};
use desk::{Desk, HANG, Time, done, in_time, open_desk};
use journal::{FileStorage, Journal, Storage};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica::{Applied, CatchUp, Effect, Follower, LiveReplica, Replica, ReplicaError, State};
use sequencer::{Backlog, Config, Reader, Record, SequencerHandle, SnapshotConfig, SubmitError};
use types::command::{BlockCause, BlockUser, Bust, MassScope, Settled, TradeParty, UnblockUser};
use types::{
    CancelReason, Command, Handle, HoldPart, Id128, InstrumentIx, Lots, NodeId, RejectReason,
    Sequence, SessionIx, Side, Ticks, UserIx, order_hold, order_uuid, trade_uuid,
};

fn node() -> NodeId {
    NodeId::new(1).expect("a node")
}

fn config(dir: &Path) -> Config {
    let mut config = desk::config(&Time::new());
    config.dir = dir.to_path_buf();
    config.snapshot_dir = dir.join("snapshots");
    config.sync = false;
    config
}

fn start(dir: &Path) -> SequencerHandle {
    SequencerHandle::start(config(dir), Arc::new(Backlog::default())).expect("starts")
}

fn every(commands: u64) -> Option<SnapshotConfig> {
    Some(SnapshotConfig {
        every_commands: commands,
        every: Duration::from_secs(3_600),
        ..SnapshotConfig::default()
    })
}

fn follow(handle: &SequencerHandle, checkpoints: Option<SnapshotConfig>) -> LiveReplica {
    LiveReplica::start(node(), handle.replica_parts(), checkpoints).expect("a replica")
}

/// Orders, amends, cancels and mass cancels of two sessions, with settlement commands in between.
///
/// Returns the last sequence.
async fn trade(desk: &Desk, sessions: [SessionIx; 2], from: u64, count: u64) -> Sequence {
    let mut rng = SmallRng::seed_from_u64(from);
    let mut last = Sequence::ZERO;
    for client_seq in from..from + count {
        let at = rng.random_range(0..2);
        let (user, session) = (desk.users[at], sessions[at]);
        if client_seq.is_multiple_of(40) && last > Sequence::ZERO {
            last = settle(desk, user, last).await;
        }
        let named = OrderRef::Client(rng.random_range(1..60));
        let price = Ticks(rng.random_range(9_990..10_010));
        let request = match rng.random_range(0..100) {
            0..60 => {
                let side = if rng.random() { Side::Buy } else { Side::Sell };
                let mut order = desk.order(at, side, price.0, rng.random_range(1..9));
                order.instrument = desk.instruments[rng.random_range(0..desk.instruments.len())];
                order.client_order_id = rng.random_range(1..60);
                (order.session, order.client_seq) = (session, client_seq);
                Request::New(order)
            }
            60..80 => Request::Cancel(CancelRequest {
                order: named,
                user,
                session,
                client_seq,
                reason: CancelReason::UserRequest,
                key_hash: Id128::NONE,
            }),
            80..97 => Request::Amend(AmendRequest {
                order: named,
                user,
                session,
                client_seq,
                price: Some(price),
                quantity: Some(Lots(rng.random_range(1..12))),
                new_client_order_id: 0,
                limit_checked: true,
                key_hash: Id128::NONE,
            }),
            _ => Request::MassCancel(MassCancelRequest {
                scope: MassScope::User(user),
                instrument: InstrumentIx::NONE,
                side: None,
                reason: CancelReason::MassCancel,
                user,
                session,
                client_seq,
                key_hash: Id128::NONE,
            }),
        };
        if let Ok(record) = desk.port.call(request).await {
            last = record.command.sequence;
        }
    }
    last
}

/// Journals progress of settlement, a bust trade, and a block with its lifting.
async fn settle(desk: &Desk, user: UserIx, last: Sequence) -> Sequence {
    let cause = BlockCause::Difference;
    let commands = [
        Command::Settled(Settled {
            posted: last,
            finalized: Sequence(last.get() / 2),
            trades_final: last.get() / 4,
        }),
        Command::Bust(Bust {
            trade: Id128::from_u128(last.get().into()),
            trade_number: 1,
            instrument: desk.instruments[0],
            buy: TradeParty {
                session: SessionIx(0),
                handle: Handle::from_engine_id(1 << 32),
                client_order_id: 5,
            },
            sell: TradeParty {
                session: SessionIx(1),
                handle: Handle::from_engine_id(2 << 32),
                client_order_id: 0,
            },
        }),
        Command::BlockUser(BlockUser { user, cause }),
        Command::UnblockUser(UnblockUser { user, cause }),
    ];
    let mut sequence = None;
    for command in commands {
        sequence = desk.port.settlement(command).await.expect("journalled");
        let repeated = desk.port.settlement(command).await;
        assert!(
            sequence.is_some() && repeated == Ok(None),
            "{command:?} twice: {repeated:?}"
        );
    }
    sequence.expect("four commands")
}

/// A follower of the live replica.
async fn attached(replica: &Replica, name: &'static str) -> Follower {
    let opened = replica.follow_from(name, replica.position(), |_| ()).await;
    opened.expect("runs").1
}

async fn read_to(follower: &mut Follower, last: Sequence) -> Vec<Applied> {
    let mut all = Vec::new();
    while follower.position() < last {
        let batch = tokio::time::timeout(HANG, follower.next()).await;
        all.extend_from_slice(&batch.expect("in time").expect("follows"));
    }
    // A batch may extend past `last`.
    all.retain(|applied| applied.sequence() <= last);
    all
}

/// Checks that every session's message numbers are gapless; returns the number of messages.
fn check_numbers(all: &[Applied]) -> usize {
    let mut last = std::collections::HashMap::new();
    for report in all.iter().flat_map(|applied| &applied.reports) {
        let before = last.insert(report.session, report.number).unwrap_or(0);
        assert_eq!(report.number, before + 1, "{report:?}");
    }
    last.values().map(|number| *number as usize).sum()
}

// rows: R180 R189
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r180_followers_read_equal_records_from_every_source() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 2).await;
    let live = follow(&handle, every(300));
    let replica = live.replica();
    let mut from_memory = attached(&replica, "memory").await;
    let begun = from_memory.position();
    let sessions = [desk.session(1, 0).await, desk.session(2, 1).await];
    let last = trade(&desk, sessions, 1, 3_000).await;
    handle.commit().wait(last).await.expect("durable");
    let followed = read_to(&mut from_memory, last).await;
    assert_eq!(followed[0].sequence(), begun.next());
    assert!(check_numbers(&followed) > 1_000);
    let has = |wanted: fn(&Effect) -> bool| {
        let effects = followed.iter().flat_map(|applied| &applied.effects);
        effects.filter(|effect| wanted(effect)).count() > 10
    };
    assert!(
        has(|e| matches!(e, Effect::Traded(_))) && has(|e| matches!(e, Effect::Amended { .. }))
    );
    assert!(has(|e| matches!(e, Effect::Cancelled { .. })));
    assert!(has(|e| matches!(e, Effect::Settled { .. })) && has(|e| matches!(e, Effect::Bust(_))));
    let hash = handle.port().inspect(|core| core.state_hash()).await;
    let hash = hash.expect("inspected");
    replica.wait(last).await.expect("follows");
    assert_eq!(replica.read(|state| state.core().state_hash()), hash);

    // From the first record, without a checkpoint.
    let reader = handle.reader(Sequence::ZERO);
    let mut first = CatchUp::new(State::new(node(), sequencer::limits()), &reader);
    first.run_to(begun).expect("read");
    for expected in &followed {
        assert_eq!(first.apply_next().expect("read").as_ref(), Some(expected));
    }
    assert_eq!(first.state().core().state_hash(), hash);
    drop(live);

    // A replica that starts at a checkpoint, and followers of records before it.
    let live = follow(&handle, None);
    let replica = live.replica();
    replica.wait(last).await.expect("follows");
    assert_eq!(replica.read(|state| state.core().state_hash()), hash);
    let mut followers = Vec::new();
    for after in [
        begun,
        Sequence(begun.get() + 700),
        Sequence(last.get() - 3),
        last,
    ] {
        let at = (after.get() - begun.get()) as usize;
        let wanted = replica.follow_from("from", after, |state| state.sequence());
        let (begun_at, mut follower) = wanted.await.expect("opened");
        assert_eq!(begun_at, after);
        assert_eq!(read_to(&mut follower, last).await, followed[at..]);
        let mut detached = replica.follow_detached("detached", after);
        assert_eq!(read_to(&mut detached, last).await, followed[at..]);
        followers.extend([follower, detached]);
    }
    // All of them continue with new records.
    let next = done(&desk.port, Request::New(desk.order(0, Side::Buy, 9_000, 1))).await;
    let next = next.command.sequence;
    for mut follower in followers {
        let read = read_to(&mut follower, next).await;
        assert_eq!(read.last().unwrap().sequence(), next);
    }
    let beyond = replica
        .follow_from("beyond", Sequence(u64::MAX), |_| ())
        .await;
    let error = beyond.map(|_| ()).expect_err("not there").to_string();
    assert!(error.contains("the journal ends at"), "{error}");
    drop(live);
    handle.stop();
}

/// A gating follower gets a catch-up permit while other followers wait for one.
async fn gating_follower_gets_a_permit(replica: &Replica, from: Sequence) {
    let is_named = |name| replica.troubles().borrow().contains_key(name);
    // The first follower keeps its permit while it reads nothing.
    let mut first = replica.follow_detached("first", from);
    in_time("a permit", first.next()).await.expect("read");
    let mut second = replica.follow_detached("second", from);
    let mut troubles = replica.troubles();
    let reported = async {
        tokio::select! {
            read = second.next() => panic!("the second follower has a permit: {read:?}"),
            troubles = troubles.wait_for(|all| all.contains_key("second")) => {
                drop(troubles.expect("runs"));
            }
        }
    };
    in_time("the second follower waits, and health reports it", reported).await;
    let gating = replica.follow_from("gating", from, |state| state.sequence());
    let begun = tokio::time::timeout(HANG, gating).await.expect("in time");
    assert_eq!(begun.expect("opened").0, from);
    first.release_permit();
    let read = tokio::time::timeout(HANG, second.next())
        .await
        .expect("in time");
    assert!(read.is_ok() && !is_named("second"));
    // A follower that released its permit continues where it was.
    drop(second);
    let after = first.position();
    let more = tokio::time::timeout(HANG, first.next())
        .await
        .expect("in time");
    assert_eq!(more.expect("read").first(), after.next());
}

// A follower that does not read has a full queue and later reads from files.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_does_not_read_is_detached_and_loses_nothing() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 1).await;
    let live = follow(&handle, every(5_000));
    let replica = live.replica();
    let mut slow = attached(&replica, "slow").await;
    let mut quick = attached(&replica, "quick").await;
    let begun = slow.position();
    // Far more records than queue and window have capacity for.
    let mut last = Sequence::ZERO;
    for _ in 0..40_000 {
        let order = Request::New(desk.order(0, Side::Buy, 9_000, 1));
        last = done(&desk.port, order).await.command.sequence;
        if last.get().is_multiple_of(500) {
            read_to(&mut quick, Sequence(last.get() - 500)).await;
        }
    }
    handle.commit().wait(last).await.expect("durable");
    tokio::time::timeout(HANG, replica.wait(last))
        .await
        .expect("the replica waited for a follower")
        .expect("runs");
    let mut all = Vec::new();
    while replica.effects(slow.position().next(), |_| ()).is_none() {
        let batch = in_time("a batch from the files", slow.next()).await;
        all.extend_from_slice(&batch.expect("follows"));
    }
    // Attached before its last batch from the files was returned: the window could move on later.
    let attached = slow.try_next();
    all.extend_from_slice(&attached.expect("attached with its last batch from the files"));
    all.extend(read_to(&mut slow, last).await);
    assert_eq!(all.len() as u64, last.get() - begun.get());
    let gapless = all
        .windows(2)
        .all(|pair| pair[0].sequence().next() == pair[1].sequence());
    assert!(gapless && all[0].sequence() == begun.next());
    gating_follower_gets_a_permit(&replica, begun).await;
    drop(live);
    handle.stop();
}

// rows: R178
#[tokio::test]
async fn r178_a_read_is_never_older_than_the_answer_before_it() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 1).await;
    let live = follow(&handle, None);
    let replica = live.replica();
    for _ in 0..300 {
        let order = Request::New(desk.order(0, Side::Buy, 9_000, 1));
        let answered = done(&desk.port, order).await.command.sequence;
        let read = replica.read_fresh(HANG, |state| state.sequence()).await;
        assert!(read.expect("fresh") >= answered);
    }
    drop(live);
    handle.stop();
}

// Samples of the lag miss what happens between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_highest_lag_is_kept_until_it_is_taken() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 1).await;
    let live = follow(&handle, None);
    let replica = live.replica();
    let order = || Request::New(desk.order(0, Side::Buy, 9_000, 1));
    let before = done(&desk.port, order()).await.command.sequence;
    in_time("the replica follows", replica.wait(before))
        .await
        .expect("runs");
    replica.take_lag_max();

    // The replica cannot apply a record while its state is read.
    let (has_begun, begun) = std::sync::mpsc::sync_channel(1);
    let (end, ended) = std::sync::mpsc::sync_channel(1);
    let read = replica.clone();
    let reader = std::thread::spawn(move || {
        read.read(|_| {
            has_begun.send(()).expect("the test waits");
            ended.recv_timeout(HANG)
        })
    });
    begun.recv_timeout(HANG).expect("reads");
    let mut last = before;
    for _ in 0..50 {
        last = done(&desk.port, order()).await.command.sequence;
    }
    let assigned = async {
        while replica.assigned() < last {
            tokio::task::yield_now().await;
        }
    };
    in_time("the sequences are published", assigned).await;
    end.send(()).expect("the reader waits");
    reader.join().expect("no panic").expect("in time");
    in_time("the replica follows", replica.wait(last))
        .await
        .expect("runs");
    assert_eq!(replica.position(), replica.assigned(), "a sample");
    assert_eq!(replica.take_lag_max(), last.get() - before.get());
    assert_eq!(replica.take_lag_max(), 0);
    drop(live);
    handle.stop();
}

// A preempted reader would hold the lock that the next batch needs.
#[tokio::test]
async fn a_long_read_is_the_live_threads_and_its_panic_ends_only_itself() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 1).await;
    let live = follow(&handle, None);
    let replica = live.replica();
    let thread = || replica.read_on_thread(|_| std::thread::current().name().map(str::to_owned));
    let name = in_time("a read while idle", thread()).await;
    assert_eq!(name, Some(Some("replica".to_owned())));

    let panics = replica.read_on_thread::<()>(|_| panic!("on purpose"));
    assert_eq!(in_time("a read that panics", panics).await, None);
    let order = Request::New(desk.order(0, Side::Buy, 9_000, 1));
    let last = done(&desk.port, order).await.command.sequence;
    in_time("the replica goes on", replica.wait(last))
        .await
        .expect("runs");
    let sequence = replica.read_on_thread(|state| state.sequence());
    assert_eq!(in_time("a read", sequence).await, Some(last));

    drop(live);
    assert_eq!(in_time("a read after the end", thread()).await, None);
    handle.stop();
}

#[tokio::test]
async fn sixteen_reads_wait_for_a_long_one_and_one_without_a_caller_is_left_out() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let live = follow(&handle, None);
    let replica = live.replica();
    let (has_begun, begun) = std::sync::mpsc::sync_channel(1);
    let (end, ended) = std::sync::mpsc::sync_channel(1);
    let long = replica.read_on_thread(move |_| {
        has_begun.send(()).expect("the test waits");
        ended.recv_timeout(HANG).is_ok()
    });
    let mut long = Box::pin(long);
    assert!(futures::poll!(&mut long).is_pending());
    begun.recv_timeout(HANG).expect("reads");
    let has_run = Arc::new(AtomicBool::new(false));
    let flag = has_run.clone();
    let mut abandoned =
        Box::pin(replica.read_on_thread(move |_| flag.store(true, Ordering::SeqCst)));
    assert!(futures::poll!(&mut abandoned).is_pending());
    drop(abandoned);
    let read = || Box::pin(replica.read_on_thread(|state| state.sequence()));
    let mut waiting: Vec<_> = (0..16).map(|_| read()).collect();
    for (at, read) in waiting.iter_mut().enumerate() {
        assert_eq!(futures::poll!(read).is_ready(), at == 15, "read {at}");
    }
    waiting.pop();
    end.send(()).expect("the reader waits");
    assert_eq!(in_time("the long read", long).await, Some(true));
    for read in waiting {
        assert!(in_time("a read that waited", read).await.is_some());
    }
    assert!(!has_run.load(Ordering::SeqCst), "its caller has gone");
    drop(live);
    handle.stop();
}

#[tokio::test]
async fn frequent_reads_do_not_put_off_a_checkpoint_of_an_idle_node() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 1).await;
    let order = Request::New(desk.order(0, Side::Buy, 9_000, 1));
    let last = done(&desk.port, order).await.command.sequence;
    let config = SnapshotConfig {
        every_commands: u64::MAX,
        every: Duration::from_secs(1),
        ..SnapshotConfig::default()
    };
    let live = follow(&handle, Some(config));
    let replica = live.replica();
    in_time("the replica follows", replica.wait(last))
        .await
        .expect("runs");
    let saved = || {
        let newest = replica.catch_up_from_newest(|_| true).expect("readable");
        newest.state().sequence()
    };
    let read_until_saved = async {
        while saved() < last {
            replica.read_on_thread(|_| ()).await;
        }
    };
    in_time("a checkpoint", read_until_saved).await;
    drop(live);
    handle.stop();
}

// An id finds its order while it is open; a checkpoint keeps the order, not the time of its change.
#[tokio::test]
async fn an_open_order_is_found_by_its_public_id() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 1).await;
    let live = follow(&handle, None);
    let replica = live.replica();
    let order = Request::New(desk.order(0, Side::Buy, 9_000, 5));
    let entered = done(&desk.port, order).await.command;
    let id = order_uuid(entered.time_ns, node(), entered.sequence);
    let find = async || replica.read_fresh(HANG, |state| state.open_order(id)).await;
    let (order, updated_ns) = find().await.expect("fresh").expect("is open");
    assert_eq!((order.id, updated_ns), (id, Some(entered.time_ns)));
    let sale = Request::New(desk.order(1, Side::Sell, 9_000, 2));
    let sold = done(&desk.port, sale).await.command;
    let (order, updated_ns) = find().await.expect("fresh").expect("is open");
    assert_eq!((order.open, updated_ns), (Lots(3), Some(sold.time_ns)));

    let checkpoint = replica.read(State::checkpoint).encode().expect("encodes");
    let restored = replica::restore(node(), sequencer::limits(), &checkpoint).expect("restores");
    assert_eq!(restored.open_order(id), Some((order, None)));
    let (hold, [buyer, seller]) = (
        order_hold(id, HoldPart::Main),
        [0, 1].map(|at| desk.users[at]),
    );
    let found = [
        restored.order_with_main_hold(buyer, hold),
        restored.order_with_main_hold(seller, hold),
        restored.order_with_main_hold(buyer, order_hold(id, HoldPart::Fee)),
    ];
    assert_eq!(found, [Some(order.handle), None, None]);
    let trade = trade_uuid(sold.time_ns, node(), sold.sequence, 0);
    let ended = order_uuid(sold.time_ns, node(), sold.sequence);
    for other in [trade, ended, Id128::NONE] {
        assert_eq!(restored.open_order(other), None);
    }
    let cancel = Request::Cancel(CancelRequest {
        order: OrderRef::Handle(order.handle),
        user: desk.users[0],
        session: SessionIx::NONE,
        client_seq: 0,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    });
    let cancelled = done(&desk.port, cancel).await.command;
    assert_eq!(find().await, Ok(None));
    let by_hold = replica.read(|state| state.order_with_main_hold(buyer, hold));
    assert_eq!(by_hold, None, "the order has ended");
    let cause = |applied: &Applied| applied.sequence();
    let sequence = cancelled.sequence;
    assert_eq!(replica.effects(sequence, cause), Some(sequence));
    assert_eq!(replica.effects(sequence.next(), cause), None);
    drop(live);
    handle.stop();
}

/// Defect of the journal that the replica reads.
#[derive(Clone, Copy, PartialEq)]
enum Defect {
    /// An event is missing; all checksums match.
    Event,
    /// A byte of a record is wrong.
    Byte,
    /// A command names a user that does not exist, which admission never writes: the core panics.
    User,
}

// One of two cores that differ is wrong: publishing ends, and new orders are refused.
#[tokio::test]
async fn a_journal_that_differs_ends_the_replica_and_closes_admission() {
    ends_and_closes(Defect::Event, "other events").await;
}

// Otherwise the market would continue without reports, history and blocks.
#[tokio::test]
async fn an_unreadable_journal_ends_the_replica_and_closes_admission() {
    ends_and_closes(Defect::Byte, "").await;
}

// A bug in the replica must not leave a market without reports, or followers that wait for ever.
#[tokio::test]
async fn a_panic_ends_the_replica_and_closes_admission() {
    ends_and_closes(Defect::User, "index out of bounds").await;
}

async fn ends_and_closes(defect: Defect, text: &str) {
    let (dir, other) = (
        tempfile::tempdir().expect("folder"),
        tempfile::tempdir().expect("folder"),
    );
    let handle = start(dir.path());
    let desk = open_desk(handle.port(), 1).await;
    let resting = done(&desk.port, Request::New(desk.order(0, Side::Buy, 9_000, 1))).await;

    // The same records in another log.
    handle
        .commit()
        .wait(resting.command.sequence)
        .await
        .expect("durable");
    let mut reader = handle.reader(Sequence::ZERO);
    let records = std::iter::from_fn(|| reader.try_next().expect("read"));
    let mut records: Vec<Record> = records.collect();
    if defect == Defect::Event {
        records.last_mut().expect("records").events.pop();
    }
    if defect == Defect::User
        && let Command::New(new) = &mut records.last_mut().expect("records").command.command
    {
        new.user = UserIx(1_000_000);
    }
    let storage: Arc<dyn Storage> =
        Arc::new(FileStorage::new(other.path(), false).expect("a folder"));
    let on_disk = journal::Config {
        recent_bytes: 0,
        ..journal::Config::default()
    };
    let tampered = Journal::open(storage, on_disk, |_| Ok(())).expect("a log");
    let mut appender = tampered.appender();
    for record in &records {
        sequencer::record::append(&mut appender, &record.command, &record.events);
    }
    appender.flush();
    tampered
        .commit()
        .wait(records.len() as u64)
        .await
        .expect("durable");
    if defect == Defect::Byte {
        let segment = other.path().join("0000000001.log");
        let mut bytes = std::fs::read(&segment).expect("read");
        // In the first record, after the first mark.
        bytes[100] ^= 1;
        std::fs::write(&segment, bytes).expect("written");
    }
    let mut parts = handle.replica_parts();
    parts.reader = Reader::new(tampered.reader(0));
    let live = LiveReplica::start(node(), parts, None).expect("a replica");
    let replica = live.replica();
    let mut follower = replica.follow_detached("follower", Sequence::ZERO);
    let ended = loop {
        match tokio::time::timeout(HANG, follower.next())
            .await
            .expect("in time")
        {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(
        matches!(&ended, ReplicaError::Ended(reason) if reason.contains(text)),
        "{ended}"
    );
    assert!(replica.troubles().borrow().contains_key(replica::PART));
    assert!(
        replica.wait(Sequence(u64::MAX)).await.is_err(),
        "a waiter was not woken"
    );
    let refused = desk
        .port
        .call(Request::New(desk.order(0, Side::Buy, 9_000, 1)))
        .await;
    match refused.expect_err("closed") {
        SubmitError::Refused(reject) => assert_eq!(reject.reason, RejectReason::ReplicaEnded),
        other => panic!("{other:?}"),
    }
    // Cancels still pass.
    let Command::New(new) = resting.command.command else {
        panic!("an order")
    };
    let cancel = CancelRequest {
        order: OrderRef::Handle(new.handle),
        user: desk.users[0],
        session: SessionIx::NONE,
        client_seq: 0,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    };
    done(&desk.port, Request::Cancel(cancel)).await;
    drop(live);
    handle.stop();
}
