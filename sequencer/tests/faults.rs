//! Faults: full disks, races with the stop, panics in inspections, restarts within a grace period.
//!
//! Every request is answered and no timer is lost.

mod desk;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use admission::{
    AmendRequest, CancelAllAfterRequest, CancelRequest, MassCancelRequest, OrderRef, Reject,
    RejectDetails, Request,
};
use desk::{Desk, HANG, Time, config, done, in_time, open_desk, start};
use journal::fault::MemoryStorage;
use sequencer::{Layout, Reply, SequencerHandle, SubmitError};
use types::command::MassScope;
use types::{
    CancelReason, Command, Envelope, Event, EventEnvelope, Id128, InstrumentIx, Lots, RejectReason,
    Sequence, SessionIx, Side, Ticks, TimeInForce,
};

/// Waits for the record that cancels with `reason`.
async fn cancelled(handle: &SequencerHandle, after: Sequence, reason: CancelReason) {
    let mut reader = handle.reader(after);
    let found = async {
        loop {
            let record = reader.next().await.expect("record");
            if record.events.iter().any(|event| {
                matches!(event.event, Event::Cancelled(cancelled) if cancelled.reason == reason)
            }) {
                return;
            }
        }
    };
    tokio::time::timeout(HANG, found).await.expect("cancelled");
}

// A crash within a session's grace period must not leave its orders in the book for ever.
#[tokio::test]
async fn the_grace_of_a_session_runs_on_after_a_restart() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 1);
    done(&desk.port, Request::New(order)).await;
    let closed = done(
        &desk.port,
        Request::CloseSession {
            session,
            epoch: None,
            keep_orders: false,
        },
    )
    .await;
    handle
        .commit()
        .wait(closed.command.sequence)
        .await
        .expect("durable");
    drop(handle);

    storage.crash(1);
    let handle = start(config(&time), &storage);
    // The grace period restarts before the node answers.
    let back = handle.port().inspect(|core| core.sequence()).await;
    assert_eq!(back, Ok(closed.command.sequence));
    time.advance_ms(60_000);
    cancelled(
        &handle,
        closed.command.sequence,
        CancelReason::CancelOnDisconnect,
    )
    .await;
}

/// A session's dead man's switch (F12): neither a disconnect nor a crash stops it, it counts
/// journalled time, and it fires once.
#[tokio::test]
async fn a_dead_mans_switch_survives_disconnect_and_crash_and_fires_once() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 1);
    done(&desk.port, Request::New(order)).await;
    let switch = |client_seq, timeout_s| {
        Request::CancelAllAfter(CancelAllAfterRequest {
            user: desk.users[0],
            session,
            client_seq,
            timeout_s,
        })
    };
    // A later call replaces an earlier one.
    done(&desk.port, switch(2, 5)).await;
    done(&desk.port, switch(3, 300)).await;
    time.advance_ms(100_000);
    let closed = Request::CloseSession {
        session,
        epoch: None,
        keep_orders: true,
    };
    let closed = done(&desk.port, closed).await.command.sequence;
    handle.commit().wait(closed).await.expect("durable");
    drop(handle);
    storage.crash(1);
    let handle = start(config(&time), &storage);
    let back = handle.port().inspect(|core| core.sequence()).await;
    assert_eq!(back, Ok(closed), "200 s are left");
    time.advance_ms(200_000);
    cancelled(&handle, closed, CancelReason::CancelAllAfter).await;
    // It is off from then on: a later order stays.
    let desk = Desk {
        port: handle.port(),
        ..desk
    };
    assert_eq!(desk.session(7, 0).await, session);
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 4);
    done(&desk.port, Request::New(order)).await;
    time.advance_ms(900_000);
    done(&desk.port, Request::New(desk.order(0, Side::Buy, 9_999, 5))).await;
    let resting = desk
        .port
        .inspect(|core| core.books().map(|book| book.resting()).sum::<u32>());
    assert_eq!(resting.await, Ok(2));
}

#[tokio::test]
async fn a_resumed_session_keeps_its_orders() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 1);
    done(&desk.port, Request::New(order)).await;
    done(
        &desk.port,
        Request::CloseSession {
            session,
            epoch: None,
            keep_orders: false,
        },
    )
    .await;
    time.advance_ms(9_000);
    assert_eq!(desk.session(7, 0).await, session);
    time.advance_ms(60_000);
    // Once a later request is answered every due timer has fired.
    done(&desk.port, Request::New(desk.order(0, Side::Buy, 9_999, 5))).await;
    let resting = desk
        .port
        .inspect(|core| core.books().map(|book| book.resting()).sum::<u32>());
    assert_eq!(resting.await, Ok(2));
}

#[tokio::test]
async fn an_order_with_a_date_ends_in_a_quiet_market() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 2).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    order.time_in_force = TimeInForce::Gtd;
    order.expire_at_ns = desk::START_NS + 5_000_000_000;
    let placed = done(&desk.port, Request::New(order)).await;
    time.advance_ms(5_000);
    cancelled(&handle, placed.command.sequence, CancelReason::Expired).await;
}

// The books' next dates come with the report of the command that ends the earlier ones: none may
// get lost.
#[tokio::test]
async fn gtd_orders_expire_while_another_instrument_trades() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
        let mut config = config(&time);
        config.layout = layout;
        config.ring_capacity = 4;
        let handle = start(config, &storage);
        let desk = open_desk(handle.port(), 3).await;
        let dates = 40;
        for second in 1..=dates {
            let mut order = desk.order(0, Side::Buy, 10_000, 5);
            order.instrument = desk.instruments[usize::from(second % 3 == 0)];
            order.time_in_force = TimeInForce::Gtd;
            order.expire_at_ns = desk::START_NS + second * 1_000_000_000;
            done(&desk.port, Request::New(order)).await;
        }
        let mut other = desk.order(1, Side::Buy, 100, 1);
        other.instrument = desk.instruments[2];
        for second in 1..=dates {
            time.advance_ms(1_000);
            for _ in 0..second % 7 {
                // A full ring of four does not matter here.
                let _ = desk.port.submit(Request::New(other), Reply::None);
            }
            let placed = desk.port.call(Request::New(other)).await;
            assert!(matches!(placed, Ok(_) | Err(SubmitError::Busy)));
            let since = std::time::Instant::now();
            let resting = |core: &sequencer::Core| {
                let dated = core.books().take(2);
                dated.map(|book| u64::from(book.resting())).sum::<u64>()
            };
            while desk.port.inspect(resting).await != Ok(dates - second) {
                assert!(since.elapsed() < HANG, "{layout:?}: {second} stays");
            }
        }
    }
}

// Every request submitted before, while or after the node stops gets an answer.
#[test]
fn a_request_that_races_with_the_stop_is_answered() {
    for round in 0..200 {
        let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
        let handle = start(config(&time), &storage);
        let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let (port, tx) = (handle.port(), tx.clone());
                std::thread::spawn(move || {
                    let mut taken = 0;
                    loop {
                        let reply = Reply::Channel {
                            tx: tx.clone(),
                            tag: taken,
                        };
                        let request = Request::CloseSession {
                            session: SessionIx(9),
                            epoch: None,
                            keep_orders: false,
                        };
                        match port.submit(request, reply) {
                            Ok(()) => taken += 1,
                            Err(SubmitError::Busy) => std::thread::yield_now(),
                            Err(_) => return taken,
                        }
                    }
                })
            })
            .collect();
        for _ in 0..round * 50 {
            std::hint::spin_loop();
        }
        let port = handle.port();
        handle.stop();
        let expected: u64 = callers
            .into_iter()
            .map(|caller| caller.join().expect("joins"))
            .sum();
        drop(tx);
        let mut answers = 0;
        while rx.try_recv().is_ok() {
            answers += 1;
        }
        assert_eq!(answers, expected, "round {round}");
        assert_eq!(
            port.submit(
                Request::CloseSession {
                    session: SessionIx(9),
                    epoch: None,
                    keep_orders: false
                },
                Reply::None
            ),
            Err(SubmitError::Stopping)
        );
    }
}

#[tokio::test]
async fn a_panic_in_an_inspection_does_not_stop_the_market() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let inspected = desk.port.inspect(|_| -> u32 { panic!("on purpose") });
    assert!(
        tokio::time::timeout(HANG, inspected)
            .await
            .expect("answered")
            .is_err()
    );
    done(
        &desk.port,
        Request::New(desk.order(0, Side::Buy, 10_000, 5)),
    )
    .await;
}

/// Ends a stall of the disk, also after a failed assertion: the journal's end waits for its disk.
struct Resumed<'a>(&'a MemoryStorage);

impl Drop for Resumed<'_> {
    fn drop(&mut self) {
        self.0.stall(false);
    }
}

// The disk is behind when the grace period ends: the due cancel waits and is not dropped.
#[tokio::test]
async fn due_timers_wait_for_a_slow_disk() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut config = config(&time);
    config.pending_bytes_max = 4 << 10;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 1);
    done(&desk.port, Request::New(order)).await;
    let closed = done(
        &desk.port,
        Request::CloseSession {
            session,
            epoch: None,
            keep_orders: false,
        },
    )
    .await;
    let after = closed.command.sequence;
    handle.commit().wait(after).await.expect("durable");
    storage.stall(true);
    let _resumed = Resumed(&storage);
    let busy = async |first: i64| {
        let mut placed = Vec::new();
        for price in first..first + 1_000 {
            let order = desk.order(1, Side::Buy, price, 1);
            match desk.port.call(Request::New(order)).await {
                Ok(record) => placed.push(record.command),
                Err(SubmitError::Busy) => return placed,
                Err(other) => panic!("{other:?}"),
            }
        }
        panic!("past the bound requests are refused BUSY");
    };
    let placed = busy(1).await;
    // Cancels fill the reserve too.
    let mut is_full = false;
    for envelope in &placed {
        is_full |= desk.port.call(cancel(&desk, envelope, 1)).await == Err(SubmitError::Busy);
    }
    assert!(is_full, "{} cancels fit the reserve", placed.len());
    time.advance_ms(60_000);
    // The hot thread has checked its timers before it refuses these.
    busy(2_000).await;
    busy(2_000).await;
    storage.stall(false);
    cancelled(&handle, after, CancelReason::CancelOnDisconnect).await;
}

/// The cancel of an order that its user has placed outside of a session.
fn cancel(desk: &Desk, placed: &Envelope, user: usize) -> Request {
    let Command::New(new) = placed.command else {
        panic!("not an order: {placed:?}");
    };
    Request::Cancel(CancelRequest {
        order: OrderRef::Handle(new.handle),
        user: desk.users[user],
        session: SessionIx::NONE,
        client_seq: 0,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    })
}

/// A stalled disk: orders fill the journal's buffer up to its reserve, cancels pass.
#[tokio::test]
async fn cancels_pass_while_a_stalled_disk_refuses_orders() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut config = config(&time);
    config.pending_bytes_max = 64 << 10;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    storage.stall(true);
    let _resumed = Resumed(&storage);
    let mut placed = Vec::new();
    let refused = loop {
        let order = Request::New(desk.order(0, Side::Buy, 9_000, 5));
        match in_time("an answer", desk.port.call(order)).await {
            Ok(record) => placed.push(record.command),
            Err(error) => break error,
        }
        assert!(placed.len() < 10_000, "the journal has no bound");
    };
    let mut cancelled = Vec::new();
    for envelope in placed.iter().take(20) {
        let cancel = cancel(&desk, envelope, 0);
        cancelled.push(in_time("an answer", desk.port.call(cancel)).await);
    }
    // Before the checks: a node whose disk is stalled does not stop.
    storage.stall(false);
    assert_eq!(refused, SubmitError::Busy);
    assert_eq!(cancelled.len(), 20);
    for cancel in cancelled {
        let record = cancel.expect("the reserve has room");
        assert!(matches!(record.events[0].event, Event::Cancelled(_)));
    }
}

/// `BUSY` means that a request was not seen. A repeat of an answered request must not get it: the
/// sender would send the request as a new one.
#[tokio::test]
async fn a_repeat_is_seen_while_the_journal_is_busy() {
    let stall = |storage: &MemoryStorage, is_on| storage.stall(is_on);
    repeats_while(stall).await;
    let no_room = |storage: &MemoryStorage, is_on| {
        storage
            .create_finds_disk_full
            .store(is_on, Ordering::SeqCst)
    };
    repeats_while(no_room).await;
}

async fn repeats_while(shortage: impl Fn(&MemoryStorage, bool)) {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut config = config(&time);
    (config.pending_bytes_max, config.segment_bytes) = (8 << 10, 16 << 10);
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let order = |client_seq| {
        let mut order = desk.order(0, Side::Buy, 10_000, 1);
        (order.session, order.client_seq) = (session, client_seq);
        Request::New(order)
    };
    shortage(&storage, true);
    let mut answered = 0;
    let (refused, [first, last, next]) = loop {
        assert!(answered < 10_000, "the journal has no bound");
        let refused = match in_time("an answer", desk.port.call(order(answered + 1))).await {
            Ok(_) => {
                answered += 1;
                continue;
            }
            Err(error) => error,
        };
        let mut repeats = Vec::new();
        for client_seq in [1, answered, answered + 1] {
            repeats.push(in_time("an answer", desk.port.call(order(client_seq))).await);
        }
        let repeats: [_; 3] = repeats.try_into().expect("three of them");
        match repeats[2].is_ok() {
            // The writer took the first batch after the refusal, so there is room again.
            true => answered += 1,
            false => break (refused, repeats),
        }
    };
    // Before the checks: a node whose disk is stalled does not stop.
    shortage(&storage, false);
    assert_eq!(refused, SubmitError::Busy);
    assert!(answered > 0);
    let seen = SubmitError::Refused(Reject {
        reason: RejectReason::AlreadySeen,
        details: RejectDetails::ClientSeq(answered),
    });
    assert_eq!((first, last), (Err(seen), Err(seen)));
    assert_eq!(next, Err(SubmitError::Busy), "it was not seen");
    // Once the journal continues, it is accepted under the same client sequence, once.
    let taken = async {
        loop {
            match desk.port.call(order(answered + 1)).await {
                Err(SubmitError::Busy) => tokio::task::yield_now().await,
                outcome => return outcome.expect("taken"),
            }
        }
    };
    in_time("the retry", taken).await;
    let resting = desk.port.inspect(|core| {
        core.books()
            .map(|book| u64::from(book.resting()))
            .sum::<u64>()
    });
    assert_eq!(resting.await, Ok(answered + 1));
}

#[tokio::test]
async fn a_request_past_the_queue_capacity_is_busy() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut config = config(&time);
    config.queue_capacity = 4;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let (hold_tx, hold_rx) = std::sync::mpsc::channel::<()>();
    let (at_work_tx, at_work_rx) = tokio::sync::oneshot::channel();
    let port = desk.port.clone();
    let inspecting = tokio::spawn(async move {
        let inspection = port.inspect(move |_| {
            at_work_tx.send(()).expect("the receiver waits");
            hold_rx.recv().expect("released");
        });
        inspection.await
    });
    at_work_rx.await.expect("the hot thread is held");
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    for tag in 0..4 {
        let order = Request::New(desk.order(0, Side::Buy, 10_000, 1));
        desk.port
            .submit(
                order,
                Reply::Channel {
                    tx: tx.clone(),
                    tag,
                },
            )
            .expect("within the bound");
    }
    let order = Request::New(desk.order(0, Side::Buy, 10_000, 1));
    assert_eq!(desk.port.submit(order, Reply::None), Err(SubmitError::Busy));
    hold_tx.send(()).expect("released");
    inspecting.await.expect("joins").expect("inspected");
    for tag in 0..4 {
        let (got, outcome) = tokio::time::timeout(HANG, rx.recv())
            .await
            .expect("answered")
            .expect("open");
        assert_eq!((got, outcome.is_ok()), (tag, true));
    }
}

#[tokio::test]
async fn full_journal_refuses_orders_accepts_cancels_and_recovers() {
    refuses_orders_and_recovers(|storage, is_on| {
        storage
            .create_finds_disk_full
            .store(is_on, Ordering::SeqCst)
    })
    .await;
}

#[tokio::test]
async fn a_journal_without_a_file_descriptor_does_the_same() {
    refuses_orders_and_recovers(|storage, is_on| {
        storage
            .open_fails_every
            .store(is_on.into(), Ordering::SeqCst);
    })
    .await;
}

/// While `shortage` is on, the journal's next segment cannot be created or opened.
async fn refuses_orders_and_recovers(shortage: impl Fn(&MemoryStorage, bool)) {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut config = config(&time);
    config.segment_bytes = 16 << 10;
    let handle = start(config, &storage);
    let (desk, commit) = (open_desk(handle.port(), 1).await, handle.commit());
    let session = desk.session(7, 1).await;
    shortage(&storage, true);
    // Fills the current segment; the rest waits in memory.
    let filled = async {
        for number in 1.. {
            let mut order = desk.order(0, Side::Buy, 9_000, 5);
            order.client_order_id = number;
            let placed = desk.port.call(Request::New(order)).await;
            if commit.stalled().is_some() {
                return;
            }
            // The hot thread may see the stall a moment before `commit` reports it.
            assert!(
                matches!(placed, Ok(_) | Err(SubmitError::Busy)),
                "{placed:?}"
            );
        }
    };
    tokio::time::timeout(HANG, filled).await.expect("stalled");
    let reason = commit.stalled().expect("stalled").to_string();
    assert!(reason.contains("cannot create or open"), "{reason}");
    assert!(commit.failure().is_none());
    let order = desk.order(0, Side::Buy, 9_000, 5);
    assert_eq!(
        desk.port.call(Request::New(order)).await,
        Err(SubmitError::Busy)
    );
    // Requests that reduce risk still pass as far as the buffer allows: an order can be reduced
    // once and cancelled.
    let amend = |price, quantity| {
        Request::Amend(AmendRequest {
            order: OrderRef::Client(2),
            user: desk.users[0],
            session: SessionIx::NONE,
            client_seq: 0,
            price,
            quantity: Some(Lots(quantity)),
            new_client_order_id: 0,
            limit_checked: true,
            key_hash: Id128::NONE,
        })
    };
    for refused in [amend(None, 5), amend(None, 6), amend(Some(Ticks(9_001)), 4)] {
        assert_eq!(desk.port.call(refused).await, Err(SubmitError::Busy));
    }
    let amended = done(&desk.port, amend(Some(Ticks(9_000)), 4)).await;
    assert!(matches!(
        amended.events[..],
        [EventEnvelope {
            event: Event::Amended(_),
            ..
        }]
    ));
    assert_eq!(
        desk.port.call(amend(None, 3)).await,
        Err(SubmitError::Busy),
        "a second time is too much for the buffer"
    );
    useless_cancels_are_busy(&desk, session).await;
    let cancel = CancelRequest {
        order: OrderRef::Client(1),
        user: desk.users[0],
        session: SessionIx::NONE,
        client_seq: 0,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    };
    let cancelled = done(&desk.port, Request::Cancel(cancel)).await;
    assert!(matches!(cancelled.events[0].event, Event::Cancelled(_)));
    let of_instrument = |of| match mass_cancel(&desk, 0, SessionIx::NONE, 0) {
        Request::MassCancel(all) => Request::MassCancel(MassCancelRequest {
            instrument: desk.instruments[0],
            side: Some(of),
            ..all
        }),
        other => other,
    };
    let of_no_order = async || desk.port.call(of_instrument(Side::Sell)).await;
    assert_eq!(of_no_order().await, Err(SubmitError::Busy));
    // What it inspects in vain counts.
    let mut refusal = of_no_order().await;
    for _ in 0..1_000_000 {
        if refusal != Err(SubmitError::Busy) {
            break;
        }
        refusal = of_no_order().await;
    }
    let Err(SubmitError::Refused(reject)) = refusal else {
        panic!("{refusal:?}");
    };
    assert_eq!(reject.reason, RejectReason::Throttle);
    time.advance_ms(5_000);
    let cancelled = done(&desk.port, of_instrument(Side::Buy)).await;
    assert!(cancelled.events.len() > 1);
    assert!(cancelled.command.sequence > commit.position());
    shortage(&storage, false);
    let durable = commit.wait(cancelled.command.sequence);
    tokio::time::timeout(HANG, durable)
        .await
        .expect("resumes")
        .expect("durable");
    assert_eq!(commit.stalled(), None);
    let order = done(&desk.port, Request::New(desk.order(0, Side::Buy, 9_000, 5))).await;
    commit.wait(order.command.sequence).await.expect("durable");
    drop(handle);
    storage.crash(3);
    let handle = start(desk::config(&time), &storage);
    assert_eq!(handle.recovered(), order.command.sequence);
}

/// The buffer of a rate takes a second of it (`design.md` 5): orders that rest, trades, cancels.
#[tokio::test]
async fn a_stalled_disk_delays_no_order_for_a_second_of_the_configured_rate() {
    // Above the rate for which the minimum of the buffer suffices.
    const RATE: u32 = 30_000;
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut config = config(&time);
    config.pending_bytes_max = sequencer::Config::pending_bytes_for(RATE);
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    storage.stall(true);
    let mut number = 0;
    let mut place = |user, side, quantity, time_in_force| {
        number += 1;
        let mut order = desk.order(user, side, 10_000, quantity);
        (order.client_order_id, order.time_in_force) = (number, time_in_force);
        (number, Request::New(order))
    };
    let (mut accepted, mut last) = (0, Sequence::ZERO);
    while accepted < RATE {
        let (resting, buy) = place(0, Side::Buy, 1, TimeInForce::Gtc);
        let end = match resting % 4 {
            0 => place(1, Side::Sell, 1, TimeInForce::Ioc).1,
            _ => Request::Cancel(CancelRequest {
                order: OrderRef::Client(resting),
                user: desk.users[0],
                session: SessionIx::NONE,
                client_seq: 0,
                reason: CancelReason::UserRequest,
                key_hash: Id128::NONE,
            }),
        };
        for request in [buy, end] {
            let answer = desk.port.call(request).await;
            let record = answer.unwrap_or_else(|error| panic!("request {accepted}: {error:?}"));
            (accepted, last) = (accepted + 1, record.command.sequence);
        }
    }
    let commit = handle.commit();
    assert!(commit.position() < last, "the disk did not stall");
    storage.stall(false);
    in_time("all are durable", commit.wait(last))
        .await
        .expect("durable");
}

/// While the journal has no room for orders, cancels of a session of the second user, who has no
/// open order, get no record: they would use up what cancels of open orders need.
async fn useless_cancels_are_busy(desk: &Desk, session: SessionIx) {
    let sequence = async || {
        let read = desk.port.inspect(|core| core.sequence()).await;
        read.expect("runs")
    };
    let before = sequence().await;
    let unknown = |client_seq| {
        Request::Cancel(CancelRequest {
            order: OrderRef::Client(1),
            user: desk.users[1],
            session,
            client_seq,
            reason: CancelReason::UserRequest,
            key_hash: Id128::NONE,
        })
    };
    let of_unknown_instrument = || match mass_cancel(desk, 1, session, 1) {
        Request::MassCancel(all) => Request::MassCancel(MassCancelRequest {
            instrument: InstrumentIx(99),
            ..all
        }),
        other => other,
    };
    for _ in 0..1_000 {
        let of_no_order = mass_cancel(desk, 1, session, 1);
        for useless in [unknown(1), of_no_order, of_unknown_instrument()] {
            assert_eq!(desk.port.call(useless).await, Err(SubmitError::Busy));
        }
    }
    assert_eq!(sequence().await, before);
}

/// A mass cancel of all orders of a user.
fn mass_cancel(desk: &Desk, user: usize, session: SessionIx, client_seq: u64) -> Request {
    Request::MassCancel(MassCancelRequest {
        scope: MassScope::User(desk.users[user]),
        instrument: InstrumentIx::NONE,
        side: None,
        reason: CancelReason::MassCancel,
        user: desk.users[user],
        session,
        client_seq,
        key_hash: Id128::NONE,
    })
}

#[tokio::test]
async fn a_failed_journal_refuses_and_the_idle_thread_still_answers() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    order.time_in_force = TimeInForce::Gtd;
    order.expire_at_ns = desk::START_NS + 5_000_000_000;
    let placed = done(&desk.port, Request::New(order)).await;
    handle
        .commit()
        .wait(placed.command.sequence)
        .await
        .expect("durable");
    storage.is_full.store(true, Ordering::SeqCst);
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    order.quantity = Lots(6);
    let lost = done(&desk.port, Request::New(order)).await;
    handle
        .commit()
        .wait(lost.command.sequence)
        .await
        .expect_err("not durable");
    time.advance_ms(60_000);
    assert_eq!(
        tokio::time::timeout(HANG, desk.port.call(Request::New(order)))
            .await
            .expect("answered"),
        Err(SubmitError::JournalFailed)
    );
    // The state in memory can still be inspected; no timer command was issued.
    let sequence = desk.port.inspect(|core| core.sequence()).await;
    assert_eq!(sequence, Ok(lost.command.sequence));
}
