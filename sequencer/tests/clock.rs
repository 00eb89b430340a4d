//! Clock steps: what the market accepts meanwhile, and how it reopens (`design.md` 8).

mod desk;

use std::sync::Arc;

use admission::{
    AmendRequest, CancelAllAfterRequest, CancelRequest, NewRequest, OrderRef, Request,
};
use desk::{Desk, START_NS, Time, config, done, in_time, open_desk, start};
use journal::fault::MemoryStorage;
use sequencer::{Port, SubmitError};
use types::{
    CancelReason, Command, Handle, Id128, Lots, RejectReason, SessionIx, Side, TimeInForce,
};

const HOUR_NS: i64 = 3_600_000_000_000;
const DAY_NS: i64 = 24 * HOUR_NS;

async fn place(desk: &Desk, order: NewRequest) -> Handle {
    match done(&desk.port, Request::New(order)).await.command.command {
        Command::New(new) => new.handle,
        other => panic!("{other:?}"),
    }
}

async fn refused(port: &Port, request: Request) -> RejectReason {
    match port.call(request).await {
        Err(SubmitError::Refused(reject)) => reject.reason,
        other => panic!("{other:?}"),
    }
}

/// Waits until the journalled clock is suspect, or is not.
async fn until_suspect(port: &Port, expected: bool) {
    let waiting = async {
        let is = |core: &sequencer::Core| core.admission().clock().is_suspect();
        while port.inspect(is).await != Ok(expected) {}
    };
    in_time("the hot thread checks the clock", waiting).await;
}

async fn is_open(port: &Port, handle: Handle) -> bool {
    let order = move |core: &sequencer::Core| core.admission().order(handle).is_some();
    port.inspect(order).await.expect("runs")
}

async fn until_gone(port: &Port, handle: Handle) {
    let waiting = async { while is_open(port, handle).await {} };
    in_time("the order ends", waiting).await;
}

async fn state_hash(port: &Port) -> u64 {
    port.inspect(|core| core.state_hash()).await.expect("runs")
}

fn cancel(desk: &Desk, handle: Handle) -> Request {
    Request::Cancel(CancelRequest {
        order: OrderRef::Handle(handle),
        user: desk.users[0],
        session: SessionIx::NONE,
        client_seq: 0,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    })
}

fn amend(desk: &Desk, handle: Handle, quantity: u64) -> Request {
    Request::Amend(AmendRequest {
        order: OrderRef::Handle(handle),
        user: desk.users[0],
        session: SessionIx::NONE,
        client_seq: 0,
        price: None,
        quantity: Some(Lots(quantity)),
        new_client_order_id: 0,
        limit_checked: true,
        key_hash: Id128::NONE,
    })
}

fn confirm(offset_ns: i64, key: u128) -> Request {
    Request::ConfirmClock {
        offset_ns,
        through_ns: 0,
        key_hash: Id128::from_u128(key),
    }
}

fn day_order(desk: &Desk) -> NewRequest {
    NewRequest {
        time_in_force: TimeInForce::Gtd,
        expire_at_ns: START_NS + 2 * HOUR_NS.unsigned_abs(),
        ..desk.order(0, Side::Buy, 100, 5)
    }
}

// H8: one false day ended every good-till-date order and was journalled for good.
#[tokio::test]
async fn forward_clock_step_blocks_orders_until_confirmed() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let order = desk.order(0, Side::Buy, 100, 5);
    let (kept, dated) = (
        place(&desk, order).await,
        place(&desk, day_order(&desk)).await,
    );

    time.set_wrong_by(DAY_NS);
    until_suspect(&desk.port, true).await;
    let reason = refused(&desk.port, Request::New(order)).await;
    assert_eq!(reason, RejectReason::ClockUnconfirmed);
    let reason = refused(&desk.port, amend(&desk, kept, 9)).await;
    assert_eq!(reason, RejectReason::ClockUnconfirmed);
    let reduced = done(&desk.port, amend(&desk, kept, 4)).await;
    assert_eq!(reduced.command.time_ns, START_NS, "time did not step");
    done(&desk.port, cancel(&desk, kept)).await;
    // The dated order stays even when the trusted clock reaches its date.
    time.advance_ms(3 * 3_600_000);
    for _ in 0..3 {
        assert!(is_open(&desk.port, dated).await, "an iteration later");
    }

    let confirmed = done(&desk.port, confirm(DAY_NS, 7)).await;
    until_gone(&desk.port, dated).await;
    let again = refused(&desk.port, confirm(DAY_NS, 7)).await;
    assert_eq!(again, RejectReason::DuplicateRequest);
    let placed = done(&desk.port, Request::New(order)).await;
    let stepped_ns = placed.command.time_ns - confirmed.command.time_ns;
    assert_eq!(stepped_ns, DAY_NS.unsigned_abs());
    let reason = refused(&desk.port, confirm(DAY_NS, 8)).await;
    assert_eq!(reason, RejectReason::DuplicateRequest, "nothing to confirm");

    let hash = state_hash(&desk.port).await;
    handle.stop();
    let handle = start(config(&time.of_next_process()), &storage);
    assert_eq!(
        state_hash(&handle.port()).await,
        hash,
        "the journal replays to the same state"
    );
}

#[tokio::test]
async fn a_recovered_clock_reopens_the_market() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let order = Request::New(desk.order(0, Side::Buy, 100, 5));
    for wrong_ns in [DAY_NS, -DAY_NS] {
        time.set_wrong_by(wrong_ns);
        until_suspect(&desk.port, true).await;
        let reason = refused(&desk.port, order).await;
        assert_eq!(reason, RejectReason::ClockUnconfirmed);
        time.advance_ms(1);
        time.set_wrong_by(0);
        until_suspect(&desk.port, false).await;
        let before = done(&desk.port, order).await;
        time.advance_ms(1);
        let after = done(&desk.port, order).await;
        assert_eq!(after.command.time_ns - before.command.time_ns, 1_000_000);
    }
    let last = done(&desk.port, order).await.command;
    assert_eq!(last.time_ns, START_NS + 4_000_000, "no step was journalled");
}

#[tokio::test]
async fn a_step_of_a_minute_is_followed_without_a_confirmation() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let order = Request::New(desk.order(0, Side::Buy, 100, 5));
    time.set_wrong_by(60_000_000_000);
    let taken = done(&desk.port, order).await;
    assert_eq!(taken.command.time_ns, START_NS + 60_000_000_000);
}

#[tokio::test]
async fn at_a_start_a_clock_before_the_journal_is_confirmed_once() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut settings = config(&time);
    settings.grace_ms = 1_000;
    let handle = start(settings.clone(), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let order = desk.order(0, Side::Buy, 100, 5);
    place(&desk, order).await;
    handle.stop();

    time.set_wrong_by(-DAY_NS);
    let time = time.of_next_process();
    settings.clock = config(&time).clock;
    let handle = start(settings.clone(), &storage);
    let desk = Desk {
        port: handle.port(),
        ..desk
    };
    until_suspect(&desk.port, true).await;
    let reason = refused(&desk.port, Request::New(order)).await;
    assert_eq!(reason, RejectReason::ClockUnconfirmed);
    done(&desk.port, confirm(-DAY_NS, 7)).await;
    let session = desk.session(9, 0).await;
    let mut owned = order;
    (owned.session, owned.client_seq) = (session, 1);
    let owned = place(&desk, owned).await;
    let last = done(&desk.port, Request::New(order)).await.command;
    assert_eq!(last.time_ns, START_NS, "journalled time does not advance");
    assert_eq!(desk.port.time_ns(), START_NS);

    // Timers run meanwhile: a dead man's switch, and the grace period of a session.
    let guarded = desk.session(10, 0).await;
    let mut watched = order;
    (watched.session, watched.client_seq) = (guarded, 1);
    let watched = place(&desk, watched).await;
    let switch = CancelAllAfterRequest {
        user: desk.users[0],
        session: guarded,
        client_seq: 2,
        timeout_s: 1,
    };
    done(&desk.port, Request::CancelAllAfter(switch)).await;
    let close = Request::CloseSession {
        session,
        epoch: None,
        keep_orders: false,
    };
    done(&desk.port, close).await;
    assert!(is_open(&desk.port, owned).await);
    time.advance_ms(1_001);
    until_gone(&desk.port, owned).await;
    until_gone(&desk.port, watched).await;
    handle.stop();

    settings.clock = config(&time.of_next_process()).clock;
    let handle = start(settings, &storage);
    done(&handle.port(), Request::New(order)).await;
}

#[tokio::test]
async fn a_restart_does_not_confirm_a_step() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let order = Request::New(desk.order(0, Side::Buy, 100, 5));
    time.set_wrong_by(DAY_NS);
    until_suspect(&desk.port, true).await;
    handle.stop();

    time.advance_ms(5_000);
    let time = time.of_next_process();
    let handle = start(config(&time), &storage);
    let reason = refused(&handle.port(), order).await;
    assert_eq!(reason, RejectReason::ClockUnconfirmed);
    time.set_wrong_by(0);
    until_suspect(&handle.port(), false).await;
    let taken = done(&handle.port(), order).await;
    assert_eq!(taken.command.time_ns, START_NS + 5_000_000_000);
}
