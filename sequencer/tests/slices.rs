//! Mass cancels of many orders run in slices: other requests run in between, also across a crash.

mod desk;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use admission::{MassCancelRequest, NewRequest, Request};
use desk::{Desk, Time, open_desk};
use sequencer::{Backlog, Config, InlineNode, Port, Record, SubmitError, replay};
use tokio::task::JoinHandle;
use types::command::MassScope;
use types::{
    CancelReason, Command, Event, Id128, InstrumentIx, RejectReason, Sequence, SessionIx, Side,
    UserIx,
};

/// As in `sequencer/src/hot/lists.rs`.
const SLICE: usize = 256;

fn files(dir: &Path) -> Config {
    let mut config = desk::config(&Time::new());
    config.dir = dir.to_path_buf();
    config.snapshot_dir = dir.join("snapshots");
    config
}

fn inline_node(dir: &Path) -> InlineNode {
    InlineNode::start(files(dir), Arc::new(Backlog::default())).expect("starts")
}

/// Polls until nothing is left to do; returns the number of iterations with work.
async fn poll_all(node: &mut InlineNode) -> usize {
    let mut polls = 0;
    for _ in 0..4 {
        // The callers run on this thread too.
        tokio::task::yield_now().await;
        while node.poll() {
            polls += 1;
        }
    }
    polls
}

fn spawn_call(port: &Port, request: Request) -> JoinHandle<Result<Record, SubmitError>> {
    let port = port.clone();
    tokio::spawn(async move { port.call(request).await })
}

async fn call(node: &mut InlineNode, request: Request) -> Result<Record, SubmitError> {
    let answer = spawn_call(&node.port(), request);
    poll_all(node).await;
    answer.await.expect("no panic")
}

/// A market with two members, `orders` resting orders of the first and one of the second.
async fn market(node: &mut InlineNode, orders: usize) -> Desk {
    let opening = tokio::spawn(open_desk(node.port(), 2));
    let since = std::time::Instant::now();
    while !opening.is_finished() {
        assert!(since.elapsed() < desk::HANG, "the market does not open");
        poll_all(node).await;
    }
    let desk = opening.await.expect("no panic");
    for at in 0..orders {
        let order = rests(&desk, 0, at);
        call(node, Request::New(order)).await.expect("taken");
    }
    let order = rests(&desk, 1, 0);
    call(node, Request::New(order)).await.expect("taken");
    desk
}

/// Alternates between both sides of both instruments.
fn rests(desk: &Desk, user: usize, at: usize) -> NewRequest {
    let (side, price) = match at % 2 {
        0 => (Side::Buy, 1_000),
        _ => (Side::Sell, 2_000),
    };
    NewRequest {
        instrument: desk.instruments[at / 2 % 2],
        ..desk.order(user, side, price, 1)
    }
}

fn mass_cancel(user: UserIx, side: Option<Side>, key: u128) -> Request {
    Request::MassCancel(MassCancelRequest {
        scope: MassScope::User(user),
        instrument: InstrumentIx::NONE,
        side,
        reason: CancelReason::MassCancel,
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        key_hash: Id128::from_u128(key),
    })
}

fn ended(record: &Record) -> usize {
    let is_end = |event: &&types::EventEnvelope| matches!(event.event, Event::Cancelled(_));
    record.events.iter().filter(is_end).count()
}

async fn open_orders(node: &mut InlineNode) -> Vec<(UserIx, Sequence)> {
    let port = node.port();
    let inspecting = tokio::spawn(async move {
        let inspection = |core: &sequencer::Core| -> Vec<_> {
            let open = core.admission().orders();
            open.map(|order| (order.user, order.sequence)).collect()
        };
        port.inspect(inspection).await
    });
    poll_all(node).await;
    inspecting.await.expect("no panic").expect("inspected")
}

// rows: R341
#[tokio::test]
async fn r341_others_orders_get_in_between_the_slices_of_a_mass_cancel() {
    let dir = tempfile::tempdir().expect("folder");
    let mut node = inline_node(dir.path());
    let desk = market(&mut node, 1_000).await;
    let port = node.port();
    let cancel = spawn_call(&port, mass_cancel(desk.users[0], None, 7));
    let others = spawn_call(&port, Request::New(rests(&desk, 1, 1)));
    let own = spawn_call(&port, Request::New(rests(&desk, 0, 0)));
    let polls = poll_all(&mut node).await;
    let (cancel, others, own) = tokio::join!(cancel, others, own);
    let [cancel, others, own] =
        [cancel, others, own].map(|answer| answer.expect("no panic").expect("taken"));

    assert_eq!(ended(&cancel), 1_000, "the caller gets all slices together");
    let Command::CancelSlice(last) = &cancel.command.command else {
        panic!("{cancel:?}");
    };
    assert_eq!(
        others.command.sequence,
        last.of.next(),
        "right after the first"
    );
    assert_eq!(
        cancel.command.sequence.get(),
        own.command.sequence.get() + 3
    );
    assert!(
        polls >= 1_000usize.div_ceil(SLICE) - 1,
        "one further slice per iteration: {polls}"
    );
    // An order after the mass cancel stays.
    let left = open_orders(&mut node).await;
    assert_eq!(left.len(), 3);
    let is_left = |order: &Record| left.iter().any(|(_, at)| *at == order.command.sequence);
    assert!(is_left(&own) && is_left(&others));
    // A repeat of the call is recognised by its key.
    let again = call(&mut node, mass_cancel(desk.users[0], None, 7)).await;
    let SubmitError::Refused(reject) = again.expect_err("seen") else {
        panic!("refused for what it is");
    };
    assert_eq!(reject.reason, RejectReason::DuplicateRequest);
}

// rows: R180
#[tokio::test]
async fn r180_slices_replay_to_the_live_state_and_leave_what_the_filter_leaves() {
    let dir = tempfile::tempdir().expect("folder");
    let mut node = inline_node(dir.path());
    let desk = market(&mut node, 1_200).await;
    let sells = mass_cancel(desk.users[0], Some(Side::Sell), 0);
    let record = call(&mut node, sells).await.expect("taken");
    assert_eq!(ended(&record), 600);
    assert_eq!(open_orders(&mut node).await.len(), 601);
    let key_hash = Id128::from_u128(9);
    let switch = Request::SetKillSwitch {
        user: desk.users[0],
        is_engaged: true,
        key_hash,
    };
    let record = call(&mut node, switch).await.expect("taken");
    assert_eq!(
        ended(&record),
        600,
        "the kill switch also ends orders in slices"
    );
    let Command::CancelSlice(last) = record.command.command else {
        panic!("{record:?}");
    };
    assert_eq!(last.key_hash, key_hash, "its answer counts all of them");
    let port = node.port();
    let inspecting = tokio::spawn(async move { port.inspect(|core| core.state_hash()).await });
    poll_all(&mut node).await;
    let live = inspecting.await.expect("no panic").expect("inspected");
    drop(node);
    let replayed = replay(dir.path(), None).expect("replays");
    assert_eq!(replayed.state_hash(), live);
}

// rows: R174
#[tokio::test]
async fn r174_a_mass_cancel_goes_on_after_a_crash_between_its_slices() {
    const ORDERS: usize = 8_000;
    let (dir, crashed) = (tempfile::tempdir(), tempfile::tempdir());
    let (dir, crashed) = (dir.expect("folder"), crashed.expect("folder"));
    let mut node = inline_node(dir.path());
    let desk = market(&mut node, ORDERS).await;
    let _answer = spawn_call(&node.port(), mass_cancel(desk.users[0], None, 7));
    tokio::task::yield_now().await;
    // The command and a slice or two after it; then the machine crashes.
    let commit = node.commit().expect("a journal");
    let first = Sequence(ORDERS as u64 + 1 + desk_commands(&desk) + 1);
    // Far fewer polls than slices, so that a slow disk does not see all of it done. A further one
    // is needed only if the writer had the lock when the first handed its records over.
    for _ in 0..ORDERS / SLICE / 2 {
        assert!(node.poll(), "all of it is done");
        let durable = tokio::time::timeout(Duration::from_secs(2), commit.wait(first));
        if durable.await.is_ok() {
            break;
        }
    }
    let durable = desk::in_time("the first slice is durable", commit.wait(first));
    durable.await.expect("the journal runs");
    copy(dir.path(), crashed.path());
    let at_crash = replay(crashed.path(), None).expect("replays");
    let left = at_crash.admission().orders().count();
    assert!(
        (2..=ORDERS).contains(&left),
        "it was in progress: {left} are left"
    );

    let mut again = inline_node(crashed.path());
    poll_all(&mut again).await;
    let left = open_orders(&mut again).await;
    assert_eq!(left.len(), 1, "the other member's: {left:?}");
    assert_eq!(left[0].0, desk.users[1]);
}

// rows: R345
#[tokio::test]
async fn r345_mass_cancels_of_members_are_scheduled_fairly() {
    let dir = tempfile::tempdir().expect("folder");
    let mut node = inline_node(dir.path());
    let desk = market(&mut node, 4_000).await;
    for at in 1..600 {
        let order = rests(&desk, 1, at);
        call(&mut node, Request::New(order)).await.expect("taken");
    }
    let all = |user: UserIx| mass_cancel(user, None, 0);
    let port = node.port();
    let many: Vec<_> = (0..20)
        .map(|_| spawn_call(&port, all(desk.users[0])))
        .collect();
    let others = spawn_call(&port, all(desk.users[1]));
    poll_all(&mut node).await;
    let others = others.await.expect("no panic").expect("taken");
    assert_eq!(ended(&others), 600);
    let mut counts = Vec::new();
    for answer in many {
        let answer = answer.await.expect("no panic");
        let record = answer.expect("a mass cancel is not refused");
        assert!(
            others.command.sequence < record.command.sequence || ended(&record) == 0,
            "the other member waits for none of them"
        );
        counts.push(ended(&record));
    }
    assert_eq!(counts.iter().sum::<usize>(), 4_000, "{counts:?}");
    assert_eq!(open_orders(&mut node).await, []);
    let later = call(&mut node, all(desk.users[0])).await;
    assert_eq!(later.map(|record| ended(&record)), Ok(0));
}

/// Commands of [`open_desk`].
fn desk_commands(desk: &Desk) -> u64 {
    let (instruments, users) = (desk.instruments.len() as u64, desk.users.len() as u64);
    instruments + users * (1 + 1 + instruments)
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("listed") {
        let entry = entry.expect("listed");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("known").is_dir() {
            std::fs::create_dir_all(&target).expect("made");
            copy(&entry.path(), &target);
            continue;
        }
        // The journal prepares its next segment meanwhile and then renames it; it has no records.
        let prepared = entry.path().extension().is_some_and(|end| end == "part");
        match std::fs::copy(entry.path(), &target) {
            Err(error) if prepared && error.kind() == ErrorKind::NotFound => {}
            copied => drop(copied.expect("copied")),
        }
    }
}
