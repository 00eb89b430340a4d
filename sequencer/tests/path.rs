//! The trading path through its port: orders in, records out, power loss, recovery.

mod desk;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use admission::{
    CancelRequest, FundRequest, NewRequest, OrderRef, Reject, RejectDetails, Request,
    SessionRequest,
};
use desk::in_time;
use journal::fault::MemoryStorage;
use sequencer::{Backlog, Bounds, Config, Port, Record, SequencerHandle, SubmitError};
use types::{
    AssetIx, CancelReason, Command, Event, HoldKind, Id128, InstrumentId, InstrumentIx,
    InstrumentParams, InstrumentSpec, Lots, Minor, RejectReason, Sequence, SessionIx, Side, Ticks,
    UserId, UserIx,
};

struct Desk {
    port: Port,
    users: [UserIx; 2],
    instrument: InstrumentIx,
}

fn config() -> Config {
    let mut config = Config::new(std::path::Path::new("unused"));
    let tick = AtomicU64::new(1_700_000_000_000_000_000);
    config.clock = Arc::new(move || tick.fetch_add(1_000, Ordering::SeqCst));
    config.segment_bytes = 64 << 10;
    config.grace_ms = 0;
    config
}

fn start(storage: &Arc<MemoryStorage>) -> SequencerHandle {
    SequencerHandle::start_on(
        config(),
        Arc::new(Backlog::default()),
        Arc::new(storage.clone()),
    )
    .expect("starts")
}

async fn done(port: &Port, request: Request) -> Record {
    let called = in_time("an answer", port.call(request)).await;
    called.expect("taken")
}

/// Two users with money and units in their trading holds.
async fn open_desk(port: Port) -> Desk {
    let spec = InstrumentSpec::new(&InstrumentParams {
        band_high: Ticks(10_000_000),
        ..InstrumentParams::new(InstrumentId::new("BOND-1").expect("id"))
    })
    .expect("spec");
    let instrument = match done(&port, Request::SetInstrument(spec))
        .await
        .command
        .command
    {
        Command::SetInstrument(set) => set.spec.ix,
        other => panic!("{other:?}"),
    };
    let mut users = [UserIx::NONE; 2];
    for (at, name) in ["alice", "bob"].into_iter().enumerate() {
        users[at] = match done(&port, Request::BindUser(UserId::new(name).expect("id")))
            .await
            .command
            .command
        {
            Command::BindUser(bind) => bind.user,
            other => panic!("{other:?}"),
        };
        for (asset, amount) in [
            (AssetIx::MONEY, 100_000_000),
            (AssetIx::units(instrument), 100_000),
        ] {
            done(
                &port,
                Request::Fund(FundRequest {
                    hold_id: Id128::from_u128(1 + at as u128 * 10 + u128::from(asset.is_money())),
                    kind: HoldKind::Trading,
                    user: users[at],
                    asset,
                    amount_minor: Minor(amount),
                    funding_seq: 1,
                    key_hash: Id128::NONE,
                }),
            )
            .await;
        }
    }
    Desk {
        port,
        users,
        instrument,
    }
}

fn order(desk: &Desk, user: usize, side: Side, price: i64, quantity: u64) -> NewRequest {
    let (price, quantity) = (Ticks(price), Lots(quantity));
    NewRequest {
        limit_checked: true,
        ..NewRequest::limit(desk.instrument, desk.users[user], side, price, quantity)
    }
}

fn trades(record: &Record) -> usize {
    record
        .events
        .iter()
        .filter(|event| matches!(event.event, Event::Trade(_)))
        .count()
}

// rows: R174 R180
#[tokio::test]
async fn r174_r180_replay_after_power_loss_restores_the_books() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(&storage);
    let desk = open_desk(handle.port()).await;
    let mut last = Sequence(0);
    let mut records = Vec::new();
    for at in 0..400u64 {
        let side = if at % 3 == 0 { Side::Buy } else { Side::Sell };
        let price = 10_000 + i64::try_from(at * 7 % 23).expect("small") - 11;
        let request = order(
            &desk,
            usize::try_from(at % 2).expect("small"),
            side,
            price,
            at % 9 + 1,
        );
        let record = done(&desk.port, Request::New(request)).await;
        last = record.command.sequence;
        records.push(record);
    }
    assert!(
        records.iter().map(trades).sum::<usize>() > 50,
        "the flow trades"
    );
    handle.commit().wait(last).await.expect("durable");
    let (hash, resting) = desk
        .port
        .inspect(|core| {
            (
                core.state_hash(),
                core.books().map(|book| book.resting()).sum::<u32>(),
            )
        })
        .await
        .expect("inspected");
    assert!(resting > 10);

    let image = Arc::new(storage.image());
    image.crash(9);
    drop(handle);
    let again = start(&image);
    assert_eq!(again.recovered(), last);
    let after = again
        .port()
        .inspect(|core| core.state_hash())
        .await
        .expect("inspected");
    assert_eq!(after, hash, "same books, same priorities, same money");

    let mut reader = again.reader(Sequence(0));
    let mut read = Vec::new();
    while let Some(record) = reader.try_next().expect("readable") {
        read.push(record);
    }
    assert_eq!(
        read.split_off(read.len() - records.len()),
        records,
        "the journal holds what was answered"
    );
}

async fn open_session(desk: &Desk) -> SessionIx {
    let open = Request::OpenSession(SessionRequest {
        key: Id128::from_u128(77),
        user: desk.users[0],
        stp_group: None,
        cancel_on_disconnect: true,
    });
    match done(&desk.port, open).await.command.command {
        Command::OpenSession(open) => open.session,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_refusal_after_login_is_journalled_and_a_repeat_has_no_effect() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(&storage);
    let desk = open_desk(handle.port()).await;
    let session = open_session(&desk).await;
    let mut request = order(&desk, 0, Side::Buy, 10_000, 5);
    (request.session, request.client_seq) = (session, 1);
    let placed = done(&desk.port, Request::New(request)).await;
    match desk.port.call(Request::New(request)).await {
        Err(SubmitError::Refused(Reject {
            reason: RejectReason::AlreadySeen,
            details: RejectDetails::ClientSeq(1),
        })) => {}
        other => panic!("a repeat was answered with {other:?}"),
    }
    (request.client_seq, request.quantity) = (2, Lots(1_000_000_000));
    match done(&desk.port, Request::New(request))
        .await
        .command
        .command
    {
        Command::Refused(refused) => {
            assert_eq!(
                (refused.reason, refused.client_seq),
                (RejectReason::InsufficientBalance, 2)
            );
        }
        other => panic!("{other:?}"),
    }

    // The session ends; its order is cancelled after the grace period.
    done(
        &desk.port,
        Request::CloseSession {
            session,
            epoch: None,
            keep_orders: false,
        },
    )
    .await;
    let mut reader = handle.reader(placed.command.sequence);
    loop {
        let record = in_time("a cancel", reader.next()).await.expect("record");
        if let Some(event) = record.events.first()
            && let Event::Cancelled(cancelled) = event.event
        {
            assert_eq!(cancelled.reason, CancelReason::CancelOnDisconnect);
            break;
        }
    }
}

#[tokio::test]
async fn past_the_backlog_orders_are_refused_and_cancels_pass() {
    let storage = Arc::new(MemoryStorage::default());
    let backlog = Arc::new(Backlog::new(Bounds {
        trades: 10,
        ..Bounds::NONE
    }));
    let handle = SequencerHandle::start_on(config(), backlog.clone(), Arc::new(storage.clone()))
        .expect("starts");
    let desk = open_desk(handle.port()).await;
    let session = open_session(&desk).await;
    let placed = done(
        &desk.port,
        Request::New(order(&desk, 0, Side::Buy, 10_000, 5)),
    )
    .await;
    backlog.pending_trades.store(8, Ordering::Relaxed);
    done(
        &desk.port,
        Request::New(order(&desk, 0, Side::Buy, 9_999, 5)),
    )
    .await;
    backlog.pending_trades.store(11, Ordering::Relaxed);
    let refused = async || {
        let order = order(&desk, 0, Side::Buy, 9_998, 5);
        match desk.port.call(Request::New(order)).await {
            Err(SubmitError::Refused(Reject { reason, .. })) => Some(reason),
            Ok(_) => None,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused().await, Some(RejectReason::SettlementBacklog));
    backlog.pending_trades.store(0, Ordering::Relaxed);
    assert_eq!(refused().await, None);
    backlog.set_disk_low(true);
    assert_eq!(refused().await, Some(RejectReason::DiskLow));
    let Command::New(new) = placed.command.command else {
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
    let record = done(&desk.port, Request::Cancel(cancel)).await;
    assert!(matches!(record.events[0].event, Event::Cancelled(_)));

    // A session's cancel that ends no order gets no record: it would fill the disk.
    let unknown = CancelRequest {
        order: OrderRef::Client(77),
        session,
        client_seq: 1,
        ..cancel
    };
    match desk.port.call(Request::Cancel(unknown)).await {
        Err(SubmitError::Refused(reject)) => assert_eq!(reject.reason, RejectReason::UnknownOrder),
        other => panic!("{other:?}"),
    }
    // It was not seen: once the market is open again, it is answered under the same number.
    backlog.set_disk_low(false);
    match done(&desk.port, Request::Cancel(unknown))
        .await
        .command
        .command
    {
        Command::Refused(refused) => assert_eq!(refused.reason, RejectReason::UnknownOrder),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn one_taker_sweeps_many_makers_through_a_small_ring() {
    let storage = Arc::new(MemoryStorage::default());
    let mut config = config();
    (config.layout, config.ring_capacity) = (sequencer::Layout::Shared, 16);
    config.segment_bytes = 32 << 20;
    let handle = SequencerHandle::start_on(
        config,
        Arc::new(Backlog::default()),
        Arc::new(storage.clone()),
    )
    .expect("starts");
    let desk = open_desk(handle.port()).await;
    for _ in 0..20_000 {
        done(
            &desk.port,
            Request::New(order(&desk, 0, Side::Sell, 100, 1)),
        )
        .await;
    }
    let sweep = done(
        &desk.port,
        Request::New(order(&desk, 1, Side::Buy, 100, 20_000)),
    )
    .await;
    assert_eq!(trades(&sweep), 20_000);
    handle
        .commit()
        .wait(sweep.command.sequence)
        .await
        .expect("durable");
}

#[tokio::test]
async fn a_full_disk_stops_orders_with_a_clear_answer() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(&storage);
    let desk = open_desk(handle.port()).await;
    let placed = done(
        &desk.port,
        Request::New(order(&desk, 0, Side::Buy, 10_000, 5)),
    )
    .await;
    handle
        .commit()
        .wait(placed.command.sequence)
        .await
        .expect("durable");
    storage.is_full.store(true, Ordering::SeqCst);
    let lost = done(
        &desk.port,
        Request::New(order(&desk, 0, Side::Buy, 10_000, 5)),
    )
    .await;
    handle
        .commit()
        .wait(lost.command.sequence)
        .await
        .expect_err("not durable");
    let refused = async {
        loop {
            let order = Request::New(order(&desk, 0, Side::Buy, 10_000, 5));
            match desk.port.call(order).await {
                Err(SubmitError::JournalFailed) => break,
                Ok(_) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
    };
    in_time("the node refuses what it cannot journal", refused).await;
}
