//! Three layouts: the same requests produce the same journal and the same state.

mod desk;
#[path = "../../testkit/src/seed.rs"]
mod seed;

use std::sync::Arc;
use std::time::Instant;

use admission::{AmendRequest, CancelRequest, MassCancelRequest, NewRequest, OrderRef, Request};
use desk::{Desk, HANG, Time, config, done, open_desk, start, trades};
use journal::fault::MemoryStorage;
use sequencer::{Backlog, Config, Core, Layout, Record, Reply, SequencerHandle, SubmitError};
use types::command::MassScope;
use types::{
    CancelReason, Event, EventEnvelope, Handle, Id128, InstrumentIx, Lots, Phase, Sequence,
    SessionIx, Side, Ticks, TimeInForce, UserIx,
};

const LAYOUTS: [Layout; 3] = [Layout::Fused, Layout::Shared, Layout::Pinned];

fn with(layout: Layout, ring_capacity: usize) -> Config {
    with_time(&Time::new(), layout, ring_capacity)
}

fn with_time(time: &Time, layout: Layout, ring_capacity: usize) -> Config {
    let mut config = config(time);
    config.layout = layout;
    config.ring_capacity = ring_capacity;
    config
}

/// A seeded stream of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (z ^ (z >> 27)) % bound
    }
}

/// Date of all orders that have one: they expire together in each book.
const EXPIRE_AT_NS: u64 = desk::START_NS + 1_000_000_000;

/// Some name open orders, some closed ones, some unknown ones.
fn any_order(random: &mut Random) -> OrderRef {
    OrderRef::Handle(Handle {
        slot: u32::try_from(random.below(60)).expect("small"),
        generation: 1 + u32::try_from(random.below(3)).expect("small"),
    })
}

fn request(desk: &Desk, random: &mut Random) -> Request {
    let user = usize::try_from(random.below(2)).expect("small");
    let instrument = desk.instruments[random.below(desk.instruments.len() as u64) as usize];
    match random.below(80) {
        kind @ 0..=2 => Request::MassCancel(MassCancelRequest {
            scope: match kind {
                0 => MassScope::All,
                _ => MassScope::User(desk.users[user]),
            },
            instrument: if random.below(2) == 0 {
                InstrumentIx::NONE
            } else {
                instrument
            },
            side: None,
            reason: CancelReason::MassCancel,
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
        }),
        3 => Request::SetKillSwitch {
            user: [UserIx::NONE, desk.users[user]][random.below(2) as usize],
            is_engaged: random.below(8) == 0,
            key_hash: Id128::NONE,
        },
        4 => Request::SetPhase {
            instrument,
            phase: [Phase::Halt, Phase::Open][usize::from(random.below(4) > 0)],
            cancel_orders: random.below(2) == 0,
            lifts_halt: true,
            key_hash: Id128::NONE,
        },
        5..=11 => Request::Cancel(CancelRequest {
            order: any_order(random),
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            reason: CancelReason::UserRequest,
            key_hash: Id128::NONE,
        }),
        12..=15 => Request::Amend(AmendRequest {
            order: any_order(random),
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            price: Some(Ticks(10_000 + random.below(30).cast_signed())),
            quantity: (random.below(2) == 0).then(|| Lots(random.below(9) + 1)),
            new_client_order_id: random.below(2) * (1_000_000 + random.below(1_000_000)),
            limit_checked: true,
            key_hash: Id128::NONE,
        }),
        kind => {
            let side = if random.below(2) == 0 {
                Side::Buy
            } else {
                Side::Sell
            };
            let price = 10_000 + random.below(30).cast_signed();
            let order = desk.order(user, side, price, random.below(9) + 1);
            let time_in_force = match kind {
                16 | 17 => TimeInForce::Ioc,
                18 | 19 => TimeInForce::Fok,
                20 | 21 => TimeInForce::Gtd,
                _ => TimeInForce::Gtc,
            };
            let is_dated = time_in_force == TimeInForce::Gtd;
            Request::New(NewRequest {
                instrument,
                time_in_force,
                expire_at_ns: if is_dated { EXPIRE_AT_NS } else { 0 },
                ..order
            })
        }
    }
}

/// Sends seeded requests one after another, then lets the orders with a date expire. Returns the
/// records and the state hash.
async fn play(layout: Layout, seed: u64) -> (Vec<Record>, u64) {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(with_time(&time, layout, 16), &storage);
    let desk = open_desk(handle.port(), 3).await;
    let mut random = Random(seed);
    let mut records = Vec::new();
    // One at a time, so that slots are freed in the same order in every layout.
    for _ in 0..600 {
        // Refusals leave no record and must be the same ones: only accepted requests are kept.
        if let Ok(record) = desk.port.call(request(&desk, &mut random)).await {
            records.push(record);
        }
    }
    let mut dated = desk.order(0, Side::Buy, 5_000, 1);
    (dated.time_in_force, dated.expire_at_ns) = (TimeInForce::Gtd, EXPIRE_AT_NS);
    for instrument in desk.instruments.clone() {
        let opened = Request::SetPhase {
            instrument,
            phase: Phase::Open,
            cancel_orders: false,
            lifts_halt: true,
            key_hash: Id128::NONE,
        };
        let _ = desk.port.call(opened).await;
        for user in [UserIx::NONE, desk.users[0]] {
            let lifted = Request::SetKillSwitch {
                user,
                is_engaged: false,
                key_hash: Id128::NONE,
            };
            let _ = desk.port.call(lifted).await;
        }
        dated.instrument = instrument;
        done(&desk.port, Request::New(dated)).await;
    }
    let read = |core: &Core| {
        let is_dated = |book: &&engine::Book| book.next_expiry_ns().is_some();
        (core.sequence(), core.books().filter(is_dated).count())
    };
    let (before, dated_books) = desk.port.inspect(read).await.expect("inspected");
    time.advance_ms(1_000);
    let since = Instant::now();
    let next_ns = || async {
        let next_ns = desk.port.inspect(Core::next_expiry_ns).await;
        next_ns.expect("inspected")
    };
    while next_ns().await.is_some() {
        assert!(since.elapsed() < HANG, "{layout:?}: a dated order stays");
    }
    let read = |core: &Core| (core.sequence(), core.state_hash());
    let (after, hash) = desk.port.inspect(read).await.expect("inspected");
    assert_eq!(
        after.get() - before.get(),
        dated_books as u64,
        "{layout:?}: one command per book ends them all"
    );
    handle.stop();
    (records, hash)
}

// rows: R180
#[tokio::test]
async fn r180_every_layout_gives_the_same_trades_ids_and_state() {
    let mut traded = 0;
    for seed in seed::seeds(0..6) {
        let (records, hash) = play(Layout::Fused, seed).await;
        traded += records.iter().map(trades).sum::<usize>();
        for layout in [Layout::Shared, Layout::Pinned] {
            let (other, other_hash) = play(layout, seed).await;
            for (one, other) in records.iter().zip(&other) {
                assert_eq!(other, one, "{layout:?}, seed {seed}");
            }
            assert_eq!(other.len(), records.len(), "{layout:?}, seed {seed}");
            assert_eq!(other_hash, hash, "{layout:?}, seed {seed}");
        }
    }
    assert!(traded > 100, "the flow trades: {traded}");
}

/// Sends requests without waiting for their answers, which come in sequence after `last`. Returns
/// the sequence of the last one.
async fn flood(desk: &Desk, layout: Layout, random: &mut Random, mut last: Sequence) -> Sequence {
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let count = 6_000;
    for tag in 0..count {
        let reply = Reply::Channel {
            tx: tx.clone(),
            tag,
        };
        desk.port
            .submit(request(desk, random), reply)
            .expect("the queue holds them");
    }
    for _ in 0..count {
        let (_, outcome) = tokio::time::timeout(HANG, rx.recv())
            .await
            .expect("answered")
            .expect("open");
        if let Ok(record) = outcome {
            assert!(
                record.command.sequence > last,
                "{layout:?}: answers come in sequence"
            );
            last = record.command.sequence;
        }
    }
    last
}

// Requests are sent without waiting, so engines lag admission. The journal must still replay to the
// live state. rows: R174 R180
#[tokio::test]
async fn r174_r180_a_flood_in_any_layout_replays_to_the_live_state() {
    for layout in LAYOUTS {
        let storage = Arc::new(MemoryStorage::default());
        let handle = start(with(layout, 16), &storage);
        let desk = open_desk(handle.port(), 3).await;
        let (mut random, mut last) = (Random(99), Sequence::ZERO);
        let since = Instant::now();
        // Nearly all requests of a flood are BUSY if an engine loses its core for that long.
        while desk.port.inspect(Core::trades).await.expect("inspected") <= 200 {
            assert!(since.elapsed() < HANG, "{layout:?}: the flow trades");
            last = flood(&desk, layout, &mut random, last).await;
        }
        let live = desk.port.inspect(|core| {
            core.books().for_each(engine::Book::check_invariants);
            core.admission().check_invariants();
            core.state_hash()
        });
        let live = live.await.expect("inspected");
        handle.commit().wait(last).await.expect("durable");
        drop(handle);
        // Power loss, then a start with another layout.
        storage.crash(5);
        let again = start(with(Layout::Fused, 1_024), &storage);
        assert_eq!(again.recovered(), last, "{layout:?}");
        let replayed = again
            .port()
            .inspect(|core| core.state_hash())
            .await
            .expect("inspected");
        assert_eq!(replayed, live, "{layout:?}: same priorities, same money");
    }
}

/// The last command that the first book has applied.
async fn last_applied(desk: &Desk) -> Sequence {
    let ix = desk.instruments[0];
    let last = move |core: &Core| core.book(ix).map(|book| book.image().sequence);
    let last = desk.port.inspect(last).await;
    last.expect("inspected").expect("it has a book")
}

/// Rests `orders` sell orders of one lot for user 0.
async fn rest(desk: &Desk, layout: Layout, orders: u64) {
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let mut resting = 0;
    let since = Instant::now();
    while resting < orders {
        assert!(since.elapsed() < 8 * HANG, "{layout:?}: {resting}");
        let count = (orders - resting).min(5_000);
        for tag in 0..count {
            let order = Request::New(desk.order(0, Side::Sell, 100, 1));
            let tx = tx.clone();
            desk.port
                .submit(order, Reply::Channel { tx, tag })
                .expect("the queue holds them");
        }
        for _ in 0..count {
            // While an engine lags some are BUSY and are sent again.
            let answer = tokio::time::timeout(HANG, rx.recv()).await;
            let (_, outcome) = answer.expect("answered").expect("open");
            match outcome {
                Ok(_) => resting += 1,
                Err(reason) => assert_eq!(reason, SubmitError::Busy, "{layout:?}"),
            }
        }
    }
}

// `design.md` 3: a ring of 1,024 and many more makers than it holds; no side waits for the other.
#[tokio::test]
async fn one_taker_against_many_makers_never_locks_up() {
    let makers = 100_000;
    for layout in LAYOUTS {
        let storage = Arc::new(MemoryStorage::default());
        let handle = SequencerHandle::start_on(
            with(layout, 1_024),
            Arc::new(Backlog::default()),
            Arc::new(storage.clone()),
        )
        .expect("starts");
        let desk = open_desk(handle.port(), 1).await;
        rest(&desk, layout, makers).await;
        let resting = makers;
        let sweep = done(
            &desk.port,
            Request::New(desk.order(1, Side::Buy, 100, resting)),
        )
        .await;
        assert_eq!(trades(&sweep) as u64, resting, "{layout:?}");
        // The unit is larger than a segment, and durable nevertheless.
        handle
            .commit()
            .wait(sweep.command.sequence)
            .await
            .expect("durable");
        // The reverse: one command ends all orders of a user, more than a ring holds.
        rest(&desk, layout, 3_000).await;
        let cancels = |scope, user| {
            Request::MassCancel(MassCancelRequest {
                scope,
                instrument: InstrumentIx::NONE,
                side: None,
                reason: CancelReason::Operator,
                user,
                session: SessionIx::NONE,
                client_seq: 0,
                key_hash: Id128::NONE,
            })
        };
        let ended = |record: &Record| {
            let is_end = |event: &&EventEnvelope| matches!(event.event, Event::Cancelled(_));
            record.events.iter().filter(is_end).count()
        };
        let [ann, bob] = desk.users;
        // The other user's cancels cost the book nothing, however often they come.
        let before = last_applied(&desk).await;
        for _ in 0..100 {
            let record = done(&desk.port, cancels(MassScope::User(bob), bob)).await;
            assert!(record.events.is_empty(), "{layout:?}");
        }
        assert_eq!(last_applied(&desk).await, before, "{layout:?}");
        let own = done(&desk.port, cancels(MassScope::User(ann), ann)).await;
        assert_eq!(ended(&own), 3_000, "{layout:?}");
        let in_slot_order =
            |pair: &[EventEnvelope]| pair[0].event.closed() < pair[1].event.closed();
        // Oldest first, 256 per slice, and by slot within a slice.
        let mut slices = own.events.chunks(256);
        let is_sorted = |slice: &[EventEnvelope]| slice.windows(2).all(in_slot_order);
        assert!(slices.all(is_sorted), "{layout:?}");
        rest(&desk, layout, 100).await;
        let all = done(&desk.port, cancels(MassScope::All, UserIx::NONE)).await;
        assert_eq!(ended(&all), 100, "{layout:?}");
    }
}
