//! Fronts with rings of their own: every answer, in order, whatever the size of the rings and the pace of the reader.

mod desk;

use std::sync::Arc;

use admission::{CancelRequest, MassCancelRequest, OrderRef, Request};
use desk::{Desk, HANG, Time, config, done, open_desk, start};
use journal::fault::MemoryStorage;
use sequencer::ring_port::Outcome;
use sequencer::{Backlog, Layout, NotTaken, Report, RingPort, Taken, Volatile};
use types::command::MassScope;
use types::{
    CancelReason, Event, Id128, InstrumentIx, Lots, RejectReason, Sequence, SessionIx, Side,
    TimeInForce, UserIx,
};

/// What a front was told, in order.
#[derive(Default)]
struct Told {
    taken: Vec<(Taken, Vec<Event>)>,
    not_taken: Vec<(u64, NotTaken)>,
}

impl Told {
    fn read(&mut self, front: &mut RingPort) -> bool {
        let read = front.poll(|report| match report {
            Report::Taken(taken) => self.taken.push((*taken, Vec::new())),
            Report::Event(event) => {
                let last = self.taken.last_mut().expect("events follow their answer");
                last.1.push(*event);
            }
            Report::NotTaken { tag, reason } => self.not_taken.push((*tag, *reason)),
        });
        read.expect("the node runs")
    }

    /// Reads until there are `count` answers, each with all its events.
    fn wait(&mut self, front: &mut RingPort, count: usize) {
        let since = std::time::Instant::now();
        while self.taken.len() + self.not_taken.len() < count
            || self
                .taken
                .last()
                .is_some_and(|(taken, events)| events.len() < taken.events as usize)
        {
            assert!(since.elapsed() < HANG, "nobody answers");
            if !self.read(front) {
                std::thread::yield_now();
            }
        }
    }
}

fn ask(front: &mut RingPort, told: &mut Told, tag: u64, request: Request) {
    let since = std::time::Instant::now();
    while let Err(no) = front.submit(tag, &request) {
        assert_eq!(no, NotTaken::Busy);
        assert!(since.elapsed() < HANG, "the ring stays full");
        told.read(front);
    }
}

fn mass_cancel(scope: MassScope) -> Request {
    Request::MassCancel(MassCancelRequest {
        scope,
        instrument: InstrumentIx::NONE,
        side: None,
        reason: CancelReason::MassCancel,
        user: UserIx::NONE,
        session: SessionIx::NONE,
        client_seq: 0,
        key_hash: Id128::NONE,
    })
}

#[tokio::test]
async fn a_front_is_told_everything_the_journal_says_in_every_layout() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        let storage = Arc::new(MemoryStorage::default());
        let mut config = config(&Time::new());
        config.layout = layout;
        config.ring_capacity = 64;
        let handle = start(config, &storage);
        let desk = open_desk(handle.port(), 2).await;
        let begun = desk.port.inspect(|core| core.sequence()).await;
        let begun = begun.expect("looked");
        let mut front = desk.port.rings(16).expect("rings");
        let mut told = Told::default();
        let count = 3_000;
        for tag in 0..count {
            let user = usize::from(tag % 2 == 0);
            let side = if tag % 3 == 0 { Side::Buy } else { Side::Sell };
            let price = 10_000 + i64::try_from(tag * 7 % 23).expect("small");
            let mut order = desk.order(user, side, price, tag % 9 + 1);
            order.instrument = desk.instruments[usize::from(tag % 5 == 0)];
            if tag % 11 == 0 {
                order.time_in_force = TimeInForce::Ioc;
            }
            let request = match tag % 100 {
                50 => mass_cancel(MassScope::User(desk.users[0])),
                51 => Request::BindUser(types::UserId::new("alice").expect("id")),
                _ => Request::New(order),
            };
            ask(&mut front, &mut told, tag, request);
        }
        told.wait(&mut front, usize::try_from(count).expect("small"));
        // An engine whose core was taken away for long enough costs an order: `BUSY` is an answer too.
        let of = |is_busy: bool| {
            let refused = told.not_taken.iter();
            let refused = refused.filter(|(_, reason)| (*reason == NotTaken::Busy) == is_busy);
            refused.map(|(tag, _)| *tag).collect::<Vec<u64>>()
        };
        let busy = of(true);
        let expected = |is_bound: bool| {
            let tags = (0..count).filter(|tag| !busy.contains(tag));
            tags.filter(|tag| (tag % 100 == 51) == is_bound)
                .collect::<Vec<u64>>()
        };
        assert!(busy.len() < 300, "{layout:?}: {} BUSY", busy.len());
        assert_eq!(
            of(false),
            expected(true),
            "{layout:?}: who is bound already is told so"
        );
        let tags: Vec<u64> = told.taken.iter().map(|(taken, _)| taken.tag).collect();
        assert_eq!(tags, expected(false), "{layout:?}");

        let last = told.taken.last().expect("some").0.sequence;
        handle.commit().wait(last).await.expect("durable");
        let mut reader = handle.reader(begun);
        for (taken, events) in &told.taken {
            let record = reader.try_next().expect("readable").expect("journalled");
            assert_eq!(taken.sequence, record.command.sequence, "{layout:?}");
            assert_eq!(taken.time_ns, record.command.time_ns);
            // Trades and other people's orders come as events; what became of its own order is in the answer.
            let own = |event: &Event| match event {
                Event::Accepted(e) => e.handle == taken.handle,
                Event::Rested(e) => e.handle == taken.handle,
                Event::Rejected(e) => e.handle == taken.handle,
                Event::Cancelled(e) => e.handle == taken.handle,
                _ => false,
            };
            let others: Vec<Event> = record
                .events
                .iter()
                .map(|event| event.event)
                .filter(|event| !own(event))
                .collect();
            assert_eq!(&others, events, "{layout:?}");
            let rests = record
                .events
                .iter()
                .rev()
                .find_map(|event| match event.event {
                    Event::Accepted(e) if e.rests && e.handle == taken.handle => Some(e.open),
                    Event::Rested(e) if e.handle == taken.handle => Some(e.open),
                    _ => None,
                });
            match taken.outcome {
                Outcome::Rests { open } => assert_eq!(rests, Some(open)),
                _ => assert_eq!(rests, None),
            }
        }
    }
}

#[tokio::test]
async fn a_front_hears_what_became_of_its_order() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let mut front = desk.port.rings(64).expect("rings");
    let mut told = Told::default();
    let mut asked = 0;
    let mut say = |request: Request| {
        asked += 1;
        ask(&mut front, &mut told, asked, request);
        told.wait(&mut front, usize::try_from(asked).expect("small"));
        told.taken.last().cloned().expect("an answer")
    };
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 1);
    let (rests, _) = say(Request::New(order));
    assert_eq!(rests.outcome, Outcome::Rests { open: Lots(5) });
    // More than there is: refused, journalled, told.
    (order.client_seq, order.quantity) = (2, Lots(1_000_000_000_000));
    let (refused, _) = say(Request::New(order));
    assert!(matches!(
        refused.outcome,
        Outcome::Refused(RejectReason::InsufficientBalance | RejectReason::QuantityLot)
    ));
    let amend = admission::AmendRequest {
        order: OrderRef::Handle(rests.handle),
        user: desk.users[0],
        session,
        client_seq: 3,
        price: None,
        quantity: Some(Lots(3)),
        limit_checked: true,
        key_hash: Id128::NONE,
    };
    let (amended, _) = say(Request::Amend(amend));
    assert_eq!(
        amended.outcome,
        Outcome::Amended {
            open: Lots(3),
            kept_priority: true
        }
    );
    let (sold, events) = say(Request::New(desk.order(1, Side::Sell, 10_000, 1)));
    assert_eq!((sold.outcome, events.len()), (Outcome::Nothing, 1));
    let cancel = CancelRequest {
        order: OrderRef::Handle(rests.handle),
        user: desk.users[0],
        session,
        client_seq: 4,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    };
    let (cancelled, events) = say(Request::Cancel(cancel));
    assert_eq!(
        cancelled.outcome,
        Outcome::Cancelled {
            reason: CancelReason::UserRequest,
            quantity: Lots(2)
        }
    );
    assert!(events.is_empty());
    // An order that trades in part and leaves nothing behind.
    done(
        &desk.port,
        Request::New(desk.order(1, Side::Sell, 9_000, 2)),
    )
    .await;
    let mut order = desk.order(0, Side::Buy, 9_000, 5);
    order.time_in_force = TimeInForce::Ioc;
    let (swept, events) = say(Request::New(order));
    assert!(matches!(events[..], [Event::Trade(_)]));
    assert_eq!(
        swept.outcome,
        Outcome::Cancelled {
            reason: CancelReason::IocRemainder,
            quantity: Lots(3)
        }
    );
}

#[tokio::test]
async fn a_front_that_reads_nothing_holds_up_nobody_but_itself() {
    let storage = Arc::new(MemoryStorage::default());
    let mut config = config(&Time::new());
    config.spin_us = 20;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let makers = 2_000;
    for _ in 0..makers {
        done(&desk.port, Request::New(desk.order(0, Side::Sell, 100, 1))).await;
    }
    let mut front = desk.port.rings(8).expect("rings");
    // Far more reports than its ring holds, and more requests behind.
    front
        .submit(0, &Request::New(desk.order(1, Side::Buy, 100, makers)))
        .expect("room");
    let mut behind = 0;
    while front
        .submit(1 + behind, &Request::New(desk.order(1, Side::Buy, 50, 1)))
        .is_ok()
    {
        behind += 1;
        assert!(behind <= 80, "the ring has an end");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    for _ in 0..200 {
        done(&desk.port, Request::New(desk.order(0, Side::Sell, 200, 1))).await;
    }
    let mut told = Told::default();
    told.wait(&mut front, 1 + usize::try_from(behind).expect("small"));
    assert_eq!(told.taken[0].1.len() as u64, makers);
    assert!(told.not_taken.is_empty());

    // It leaves with a question open: answered into the void.
    front
        .submit(99, &Request::New(desk.order(1, Side::Buy, 200, 200)))
        .expect("room");
    drop(front);
    let mut traded = 0;
    while traded < makers + 200 {
        traded = desk.port.inspect(|core| core.trades()).await.expect("runs");
    }
    done(&desk.port, Request::New(desk.order(0, Side::Sell, 200, 1))).await;
    // Nobody waits for its reports any more: the node sleeps as ever.
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    let parks = || {
        let stats = handle.stats();
        stats.parks.load(std::sync::atomic::Ordering::Relaxed)
    };
    let before = parks();
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert!(parks() - before < 30, "it wakes again and again");
    handle.stop();
}

#[tokio::test]
async fn a_front_learns_that_the_node_has_ended() {
    let config = config(&Time::new());
    let node = Volatile::start(config, Arc::new(Backlog::default())).expect("starts");
    let desk: Desk = open_desk(node.port(), 1).await;
    let mut front = desk.port.rings(8).expect("rings");
    front
        .submit(1, &Request::New(desk.order(0, Side::Sell, 100, 1)))
        .expect("room");
    let mut told = Told::default();
    told.wait(&mut front, 1);
    assert_ne!(told.taken[0].0.sequence, Sequence::ZERO);
    drop(node);
    assert_eq!(
        front.submit(2, &Request::New(desk.order(0, Side::Sell, 100, 1))),
        Err(NotTaken::Stopping)
    );
    assert_eq!(front.poll(|_| {}), Err(NotTaken::Stopping));
    assert!(matches!(desk.port.rings(8), Err(NotTaken::Stopping)));
}

/// Reads until the node says that it has ended.
fn read_out(front: &mut RingPort) -> Told {
    let (mut told, since) = (Told::default(), std::time::Instant::now());
    loop {
        assert!(since.elapsed() < HANG, "nobody says that it is over");
        let read = front.poll(|report| match report {
            Report::Taken(taken) => told.taken.push((*taken, Vec::new())),
            Report::Event(event) => told.taken.last_mut().expect("its answer").1.push(*event),
            Report::NotTaken { tag, reason } => told.not_taken.push((*tag, *reason)),
        });
        match read {
            Ok(true) => {}
            Ok(false) => std::thread::yield_now(),
            Err(no) => {
                assert_eq!(no, NotTaken::Stopping);
                return told;
            }
        }
    }
}

#[tokio::test]
async fn a_front_that_is_behind_when_the_node_stops_is_told_everything_all_the_same() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let makers = 700;
    for _ in 0..makers {
        done(&desk.port, Request::New(desk.order(0, Side::Sell, 100, 1))).await;
    }
    let mut front = desk.port.rings(8).expect("rings");
    let sweep = Request::New(desk.order(1, Side::Buy, 100, makers));
    front.submit(0, &sweep).expect("room");
    // The hot thread is behind with its reports once the sweep is done; what comes now stays in the ring.
    while desk.port.inspect(|core| core.trades()).await != Ok(makers) {}
    let mut asked = 1;
    while front
        .submit(asked, &Request::New(desk.order(1, Side::Buy, 50, 1)))
        .is_ok()
    {
        asked += 1;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(asked > 8, "the ring is full");
    handle.stop();
    let told = read_out(&mut front);
    assert_eq!(told.taken[0].1.len() as u64, makers);
    let answered = told.taken.len() + told.not_taken.len();
    assert_eq!(answered as u64, asked, "an answer for each");
    assert!(
        told.not_taken
            .iter()
            .all(|(_, reason)| *reason == NotTaken::Stopping)
    );
    assert_eq!(front.poll(|_| {}), Err(NotTaken::Stopping));
    let again = start(config(&Time::new()), &storage);
    let last = told.taken.last().expect("the sweep").0.sequence;
    assert_eq!(again.recovered(), last, "what is journalled was told");
}

// As for a port: what a front has asked before, while or after the node stops is answered, or is nowhere.
#[test]
fn a_front_that_races_with_the_stop_knows_what_was_taken() {
    for round in 0..60u64 {
        let storage = Arc::new(MemoryStorage::default());
        let mut config = config(&Time::new());
        config.layout = [Layout::Fused, Layout::Shared][usize::from(round % 2 == 1)];
        let handle = start(config.clone(), &storage);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        let desk = runtime.block_on(open_desk(handle.port(), 1));
        let begun = runtime
            .block_on(desk.port.inspect(|core| core.sequence()))
            .expect("looked");
        let mut front = desk.port.rings(16).expect("rings");
        let asking = std::thread::spawn(move || {
            let (mut asked, mut told) = (0, Told::default());
            loop {
                let order = desk.order(usize::from(asked % 2 == 0), Side::Sell, 100, 1);
                match front.submit(asked, &Request::New(order)) {
                    Ok(()) => asked += 1,
                    // Some fronts read now and then, some not before the end.
                    Err(NotTaken::Busy) if round % 3 > 0 && !told.taken.is_empty() => {}
                    Err(NotTaken::Busy) => {
                        let _ = front.poll(|report| match report {
                            Report::Taken(taken) => told.taken.push((*taken, Vec::new())),
                            Report::NotTaken { tag, reason } => {
                                told.not_taken.push((*tag, *reason));
                            }
                            Report::Event(_) => {}
                        });
                    }
                    Err(no) => {
                        assert_eq!(no, NotTaken::Stopping);
                        break;
                    }
                }
            }
            let rest = read_out(&mut front);
            told.taken.extend(rest.taken);
            told.not_taken.extend(rest.not_taken);
            (asked, told)
        });
        for _ in 0..round * 2_000 {
            std::hint::spin_loop();
        }
        handle.stop();
        let (asked, told) = asking.join().expect("joins");
        let mut tags: Vec<u64> = told.taken.iter().map(|(taken, _)| taken.tag).collect();
        tags.extend(told.not_taken.iter().map(|(tag, _)| *tag));
        tags.sort_unstable();
        let answered = tags.len() as u64;
        assert!(
            answered <= asked && asked - answered <= 1,
            "round {round}: {asked} asked, {answered} answered"
        );
        assert_eq!(tags, (0..answered).collect::<Vec<_>>(), "round {round}");
        let last = told.taken.last().map_or(begun, |(taken, _)| taken.sequence);
        let again = start(config, &storage);
        assert_eq!(
            again.recovered(),
            last,
            "round {round}: journalled and told"
        );
    }
}
