//! In the steady state `Sessions` allocates nothing per request and answer.

use std::alloc::System;
use std::time::Instant;

use client::{Event, LoginOptions, Sessions};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use types::Id128;
use types::Side;
use wire::{ClientMessage, LoginAccepted, NewOrder, OrderAck, ServerMessage, append};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Number of unanswered requests.
const WINDOW: u64 = 32;

fn ack(client_seq: u64) -> ServerMessage {
    OrderAck {
        client_seq,
        client_order_id: client_seq,
        engine_order_id: client_seq,
        order_id: Id128::from_u128(1),
        instrument: 0,
        side: Side::Buy,
        price_ticks: 1,
        open_lots: 1,
        node_sequence: 1,
        time_ns: 0,
        received_ns: 0,
    }
    .into()
}

/// Sends `count` requests from `first` on. After each, receives the answer to the request
/// [`WINDOW`] before it.
fn trade(sessions: &mut Sessions, bytes: &mut Vec<u8>, first: u64, count: u64) {
    let now = Instant::now();
    for number in first..first + count {
        let order: ClientMessage = NewOrder::limit(number, 0, Side::Buy, 100, 1).into();
        assert_eq!(sessions.send(0, &order).unwrap(), Some(number));
        bytes.clear();
        sessions.poll_transmit(now, bytes);
        assert!(!bytes.is_empty());
        let Some(answered) = number.checked_sub(WINDOW).filter(|number| *number > 0) else {
            continue;
        };
        bytes.clear();
        append(&ack(answered), 0, answered, bytes);
        let received = sessions.receive(now, bytes).unwrap();
        assert!(matches!(received, Some((_, Event::Report(_)))));
    }
}

fn main() {
    let mut sessions = Sessions::new();
    let now = Instant::now();
    sessions.connected(now);
    sessions.login(0, LoginOptions::new("token", "a")).unwrap();
    let accepted: ServerMessage = LoginAccepted {
        session: 0,
        last_client_seq: 0,
        next_sequence: 1,
        node: 1,
        throttle_per_s: 0,
        heartbeat_ms: 1_000,
        cancel_all_at_ns: 0,
        time_ns: 0,
    }
    .into();
    let mut bytes = Vec::new();
    append(&accepted, 0, 0, &mut bytes);
    sessions.receive(now, &bytes).unwrap();
    trade(&mut sessions, &mut bytes, 1, 1_000);

    let region = Region::new(ALLOCATOR);
    trade(&mut sessions, &mut bytes, 1_001, 100_000);
    let spent = region.change();
    assert_eq!(
        (spent.allocations, spent.reallocations),
        (0, 0),
        "{spent:?}"
    );
}
