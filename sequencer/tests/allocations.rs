//! The path from ring to ring allocates nothing, in every layout, with and without a journal.
//!
//! Allocations are counted over every thread of the process.

mod desk;

use std::alloc::System;
use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::{
    AmendRequest, CancelRequest, MassCancelRequest, NewRequest, OrderRef, Request, SessionRequest,
};
use desk::{Desk, HANG, Time, config, open_desk};
use sequencer::{
    Backlog, Config, Layout, Port, Report, RingPort, SequencerHandle, Submission, SubmitError,
    Volatile,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use types::command::MassScope;
use types::{CancelReason, Id128, InstrumentIx, SessionIx, Side, StpMode, Ticks, TimeInForce};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The batches of all requests take less than half of it, so that the next segment is not created.
const SEGMENT_BYTES: u64 = 256 << 20;
/// Approximate number of orders open at once.
const OPEN: u64 = 1_000;

/// Lots of an order that takes a whole side: a few hundred makers, more events than most commands.
const SWEEP: u64 = 100_000;

/// Of twenty requests seven are new orders, four cross, one amends and eight cancel orders of a
/// thousand requests earlier. One in a thousand takes a whole side.
fn request(desk: &Desk, sessions: [SessionIx; 2], number: u64) -> Request {
    // The request's order: the number of a new one, or of an older one.
    let number_of = match number % 20 {
        2..=9 => number.saturating_sub(OPEN + 9).max(1),
        10 => number.saturating_sub(OPEN + 14).max(1),
        _ => number,
    };
    let user = usize::from(number_of.is_multiple_of(2));
    let side = if number.is_multiple_of(4) || number % 4 == 3 {
        Side::Buy
    } else {
        Side::Sell
    };
    let away = 1 + i64::try_from(number * 7 % 40).expect("small");
    let passive = match side {
        Side::Buy => 10_000 - away,
        Side::Sell => 10_000 + away,
    };
    let instrument = desk.instruments[usize::try_from(number % 3).expect("small")];
    let (session, client_seq) = (sessions[user], number);
    if number.is_multiple_of(1_000) {
        return Request::New(NewRequest {
            instrument,
            session,
            client_seq,
            time_in_force: TimeInForce::Ioc,
            stp: StpMode::CancelOldest,
            ..desk.order(user, Side::Buy, 10_050, SWEEP)
        });
    }
    if number % 5_000 == 2_500 {
        // More events than the shared event lists have room for.
        return Request::MassCancel(MassCancelRequest {
            scope: MassScope::User(desk.users[user]),
            instrument: InstrumentIx::NONE,
            side: None,
            reason: CancelReason::MassCancel,
            user: desk.users[user],
            session,
            client_seq,
            key_hash: Id128::NONE,
        });
    }
    match number % 20 {
        0 | 1 | 11 | 12 => Request::New(NewRequest {
            instrument,
            session,
            client_seq,
            client_order_id: number,
            time_in_force: TimeInForce::Ioc,
            ..desk.order(user, side, 20_000 - passive, 7)
        }),
        2..=9 if number > 2 * OPEN => Request::Cancel(CancelRequest {
            order: OrderRef::Client(number_of),
            user: desk.users[user],
            session,
            client_seq,
            reason: CancelReason::UserRequest,
            key_hash: Id128::NONE,
        }),
        10 if number > 2 * OPEN => Request::Amend(AmendRequest {
            order: OrderRef::Client(number_of),
            user: desk.users[user],
            session,
            client_seq,
            price: Some(Ticks(passive)),
            quantity: None,
            new_client_order_id: 0,
            limit_checked: true,
            key_hash: Id128::NONE,
        }),
        _ => Request::New(NewRequest {
            instrument,
            session,
            client_seq,
            client_order_id: number,
            ..desk.order(user, side, passive, 5)
        }),
    }
}

/// Sends requests by number, reads every report and returns the number of events.
fn play(
    front: &mut RingPort,
    desk: &Desk,
    sessions: [SessionIx; 2],
    range: std::ops::Range<u64>,
) -> u64 {
    let (mut answered, mut events) = (range.start, 0);
    let mut next = range.start;
    let since = Instant::now();
    while answered < range.end {
        assert!(since.elapsed() < 4 * HANG, "no answer");
        if next < range.end && next - answered < 200 {
            match front.submit(Submission::default(), &request(desk, sessions, next)) {
                Ok(()) => next += 1,
                Err(SubmitError::Busy) => {}
                Err(other) => panic!("{other}"),
            }
        }
        let read = front.poll(|report| match report {
            Report::NotSubmitted { .. } => answered += 1,
            Report::SessionMessage(_, message) => {
                answered += u64::from(message.client_seq != 0);
                events += 1;
            }
            Report::Opened(_)
            | Report::Submitted { .. }
            | Report::OrderToTrade(..)
            | Report::TakenOver { .. } => {}
        });
        if !read.expect("the node runs") {
            std::thread::yield_now();
        }
    }
    events
}

/// Opens a session whose messages go to the front.
fn open(front: &mut RingPort, desk: &Desk, user: usize) -> SessionIx {
    let request = Request::OpenSession(SessionRequest {
        key: Id128::from_u128(1 + user as u128),
        user: desk.users[user],
        stp_group: None,
        cancel_on_disconnect: false,
    });
    front.submit(Submission::default(), &request).expect("room");
    let (mut opened, since) = (None, Instant::now());
    while opened.is_none() {
        assert!(since.elapsed() < HANG, "no answer");
        let read = front.poll(|report| match report {
            Report::Opened(found) => opened = Some(found.session),
            other => panic!("{other:?}"),
        });
        read.expect("the node runs");
    }
    opened.expect("just opened")
}

/// A node without a journal, or one with a journal on real files.
enum Node {
    Volatile(Volatile),
    Journalled(SequencerHandle),
}

impl Node {
    fn start(config: Config, has_journal: bool) -> Self {
        let backlog = Arc::new(Backlog::default());
        if has_journal {
            Self::Journalled(SequencerHandle::start(config, backlog).expect("starts"))
        } else {
            Self::Volatile(Volatile::start(config, backlog).expect("starts"))
        }
    }

    fn port(&self) -> Port {
        match self {
            Self::Volatile(node) => node.port(),
            Self::Journalled(node) => node.port(),
        }
    }
}

/// Waits until no thread allocates any more for the requests so far.
fn wait_for_rest() {
    let since = Instant::now();
    let mut is_at_rest = false;
    while !is_at_rest {
        assert!(
            since.elapsed() < HANG,
            "a thread allocates without a request"
        );
        let region = Region::new(ALLOCATOR);
        std::thread::sleep(Duration::from_millis(5));
        is_at_rest = region.change().allocations == 0;
    }
}

/// A test without the harness, whose threads would be counted too.
fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        for has_journal in [false, true] {
            let dir = tempfile::tempdir().expect("folder");
            let mut config = config(&Time::new());
            config.layout = layout;
            config.spin_us = 1_000;
            config.dir = dir.path().to_path_buf();
            config.snapshot_dir = dir.path().join("snapshots");
            // Large enough that the next segment is not created, since its thread allocates.
            config.segment_bytes = SEGMENT_BYTES;
            config.sync = false;
            let node = Node::start(config, has_journal);
            let desk = runtime.block_on(open_desk(node.port(), 3));
            let mut front = node.port().rings(1_024, Arc::default()).expect("rings");
            let sessions = [0, 1].map(|user| open(&mut front, &desk, user));
            play(&mut front, &desk, sessions, 1..10_000);
            // Counts the path, with the journal's writer.
            wait_for_rest();
            let region = Region::new(ALLOCATOR);
            let events = play(&mut front, &desk, sessions, 10_000..30_000);
            let change = region.change();
            assert!(events > 500, "the flow trades: {events}");
            assert_eq!(
                (change.allocations, change.reallocations),
                (0, 0),
                "{layout:?}, journal: {has_journal}"
            );
            println!("{layout:?}, journal: {has_journal}: nothing allocated, {events} events");
        }
    }
}
