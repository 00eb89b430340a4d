//! Trading sessions over QUIC.

use client::{Error, LoginOptions, Report};
use proto::common::v1::KycStatus;
use proto::ledger::v1::HoldStatus;
use proto::market::v1::{
    Order, OrderCancelledEvent, OrderStatus, PlaceOrderRequest, SetTradingPhaseRequest,
    TradingPhase,
};
use sequencer::Layout;
use testkit::Machine;
use types::command::RequestKind;
use types::{CancelReason, Phase, RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::checkpoints::cancel_own;
use crate::forgetting::replica_sessions;
use crate::orders::text;
use crate::world::*;

/// A world with two members that have money. Bob also has units in a trading hold.
async fn members(folder: &std::path::Path, settings: Settings) -> World {
    let mut world = World::with(folder, settings).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "1000").await;
    world.open_hold("bob", BOND, "1000").await;
    world
}

/// A client that has lost its state requests its open orders. A second request while the first one
/// is being answered is refused.
// rows: R343
#[tokio::test]
async fn r343_a_client_asks_for_its_open_orders() {
    const ORDERS: u64 = 1_500;
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let mut other = login("ann", "b");
    other.cancel_on_disconnect = false;
    ann.login(1, other).await.unwrap();
    for id in 1..=ORDERS {
        ann.send(0, wire_order(id, Side::Buy, 100, 2))
            .await
            .unwrap();
    }
    ann.send(0, cancel_own(ORDERS)).await.unwrap();
    ann.send(1, wire_order(ORDERS + 1, Side::Buy, 101, 3))
        .await
        .unwrap();
    until(&mut of_ann, |m| {
        ack(m).filter(|ack| ack.client_order_id > ORDERS)
    })
    .await;
    let ask = |request_id, scope| wire::OpenOrders { request_id, scope };
    let mut list = async |request_id| {
        let mut orders = Vec::new();
        let end = loop {
            match next_report(&mut of_ann).await.message {
                ServerMessage::OpenOrder(order) => orders.push(order),
                ServerMessage::OpenOrdersEnd(end) if end.request_id == request_id => break end,
                _ => {}
            }
        };
        (orders, end)
    };
    ann.send(0, ask(7, 0)).await.unwrap();
    ann.send(0, ask(8, 0)).await.unwrap();
    let (_, busy) = list(8).await;
    assert_eq!(busy.outcome, RejectReason::Busy.code());
    let (orders, end) = list(7).await;
    assert_eq!(
        (end.outcome, u64::from(end.count)),
        (wire::REQUEST_DONE, ORDERS - 1)
    );
    let mut ids: Vec<u64> = orders.iter().map(|order| order.client_order_id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (1..ORDERS).collect::<Vec<_>>());
    assert!(
        orders
            .iter()
            .all(|order| order.node_sequence >= end.node_sequence)
    );
    let one = orders[0];
    let shown = (one.side, one.price_ticks, one.quantity_lots, one.open_lots);
    assert_eq!(shown, (Side::Buy, 100, 2, 2));
    ann.send(1, ask(9, 1)).await.unwrap();
    let (orders, end) = list(9).await;
    assert_eq!(
        (orders.len() as u64, end.outcome),
        (ORDERS, wire::REQUEST_DONE)
    );
    world.stop().await;
}

/// Of the orders that enter while a list is sent, the list has those up to the sequence in its end.
// rows: R343
#[tokio::test]
async fn r343_a_list_of_open_orders_has_the_orders_up_to_its_sequence() {
    const BEFORE: u64 = 2_500;
    const MEANWHILE: u64 = 400;
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::unthrottled()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    for id in 1..=BEFORE {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
        if id % 500 == 0 {
            until(&mut of_ann, |m| {
                ack(m).filter(|ack| ack.client_order_id == id)
            })
            .await;
        }
    }
    let wanted = wire::OpenOrders {
        request_id: 1,
        scope: 0,
    };
    ann.send(0, wanted).await.unwrap();
    for id in BEFORE + 1..=BEFORE + MEANWHILE {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
    }
    let (mut listed, mut entered, mut end) = (Vec::new(), Vec::new(), None);
    while end.is_none() || entered.len() < MEANWHILE as usize {
        match next_report(&mut of_ann).await.message {
            ServerMessage::OpenOrder(order) => listed.push(order.client_order_id),
            ServerMessage::OpenOrdersEnd(last) => end = Some(last),
            ServerMessage::OrderAck(ack) => entered.push((ack.client_order_id, ack.node_sequence)),
            ServerMessage::Rejected(refused) => panic!("{refused:?}"),
            _ => {}
        }
    }
    let end = end.unwrap();
    let counted = (end.outcome, end.count as usize);
    assert_eq!(counted, (wire::REQUEST_DONE, listed.len()));
    listed.sort_unstable();
    let earlier = entered.iter();
    let earlier = earlier.filter(|(_, sequence)| *sequence <= end.node_sequence);
    let earlier = earlier.map(|(id, _)| *id);
    assert_eq!(listed, (1..=BEFORE).chain(earlier).collect::<Vec<_>>());
    world.stop().await;
}

/// Numbered messages are retransmitted under their numbers, from memory and from the journal.
/// Ranges with messages that were not sent are refused.
// rows: R343
#[tokio::test]
async fn r343_a_client_asks_for_a_range_of_messages_once_more() {
    const ORDERS: u64 = 300;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.window_messages_max = 100;
    let world = members(folder.path(), settings).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    for id in 1..=ORDERS {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
    }
    let mut first = Vec::new();
    while first.len() < ORDERS as usize {
        let report = next_numbered(&mut of_ann).await;
        first.push((report.sequence, report.message));
    }
    for (request_id, range) in [(1, 1..=ORDERS), (2, 40..=41), (3, ORDERS..=ORDERS)] {
        let (from, to) = (*range.start(), *range.end());
        let wanted = wire::Retransmit {
            request_id,
            first: from,
            last: to,
        };
        ann.send(0, wanted).await.unwrap();
        let mut again = Vec::new();
        let end = loop {
            let report = next_report(&mut of_ann).await;
            match report.message {
                ServerMessage::RetransmitEnd(end) => break end,
                _ if report.sequence > 0 => again.push((report.sequence, report.message)),
                _ => {}
            }
        };
        assert_eq!(
            (end.request_id, end.outcome),
            (request_id, wire::REQUEST_DONE)
        );
        assert_eq!(again, first[from as usize - 1..to as usize]);
    }
    for (from, to) in [(0, 1), (2, 1), (1, ORDERS + 1), (1, u64::MAX)] {
        let wanted = wire::Retransmit {
            request_id: 4,
            first: from,
            last: to,
        };
        ann.send(0, wanted).await.unwrap();
        let outcome = until(&mut of_ann, |m| match m {
            ServerMessage::RetransmitEnd(end) => Some(end.outcome),
            _ => None,
        });
        assert_eq!(outcome.await, RejectReason::Malformed.code());
    }
    // The numbers of new messages continue.
    ann.send(0, wire_order(ORDERS + 1, Side::Buy, 100, 1))
        .await
        .unwrap();
    assert_eq!(next_numbered(&mut of_ann).await.sequence, ORDERS + 1);
    world.stop().await;
}

/// F12: the session sets a timer, and sets it again by the same request only. Neither heartbeats
/// nor other requests restart it. It ends the session's orders at its time, once.
// rows: R345
#[tokio::test]
async fn r345_a_dead_mans_switch_ends_the_sessions_orders() {
    const SECOND_NS: u64 = 1_000_000_000;
    let machine = Machine::at(1_800_000_000 * SECOND_NS);
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        clock: Some(machine.process()),
        ..Settings::default()
    };
    let world = members(folder.path(), settings).await;
    let mut ann = Raw::connect(&world).await;
    ann.login(0, raw_login("ann", "a", 5_000_000)).await;
    ann.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    let placed = ann.pick(ack).await;
    let set = |message: &ServerMessage| match message {
        ServerMessage::CancelAllAfterSet(set) => Some(*set),
        _ => None,
    };
    let switch = |timeout_s| wire::CancelAllAfter { timeout_s };
    ann.send(0, 2, switch(600)).await;
    let armed = ann.pick(set).await;
    assert_eq!(armed.client_seq, 2);
    assert_eq!(armed.cancel_all_at_ns, armed.time_ns + 600 * SECOND_NS);
    ann.send(0, 3, switch(601)).await;
    let refusal = ann.pick(rejected).await;
    let expected = (RejectReason::Malformed, RequestKind::CancelAllAfter, 600);
    assert_eq!((refusal.reason, refusal.request, refusal.limit), expected);
    ann.send(0, 4, switch(60)).await;
    let armed = ann.pick(set).await;
    assert_eq!(armed.cancel_all_at_ns, armed.time_ns + 60 * SECOND_NS);
    for id in 2..=6 {
        machine.pass_ms(10_000);
        ann.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
            .await;
        ann.send(0, id + 3, wire_order(id, Side::Buy, 100, 1)).await;
        assert!(ann.pick(ack).await.time_ns < armed.cancel_all_at_ns);
    }
    let bids = |lots: &str| vec![("1.00".to_owned(), lots.to_owned())];
    assert_eq!(world.book().await.0, bids("6"));
    machine.pass_ms(10_000);
    for _ in 1..=6 {
        let gone = ann.pick(cancelled).await;
        assert_eq!(gone.reason, CancelReason::CancelAllAfter);
        assert_eq!(gone.time_ns, armed.cancel_all_at_ns);
    }
    let stored = world.order(&placed.order_id.to_string()).await.unwrap();
    assert_eq!(stored.cancel_reason, "CANCEL_ALL_AFTER");
    // Later orders stay: the switch is off.
    for id in 7..=8 {
        ann.send(0, id + 3, wire_order(id, Side::Buy, 100, 1)).await;
        ann.pick(ack).await;
        machine.pass_ms(60_000);
    }
    assert_eq!(world.book().await.0, bids("2"));
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_a_session_trades_and_resumes_without_gap_or_duplicate() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        trade_and_resume(layout).await;
    }
}

async fn trade_and_resume(layout: Layout) {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        layout: Some(layout),
        ..Settings::unsettled()
    };
    let world = members(folder.path(), settings).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    let definition = ann.instruments()[0];
    assert_eq!(
        (
            definition.id.as_str(),
            definition.value_minor,
            definition.instrument
        ),
        (BOND, 1, 0)
    );

    ann.send(0, wire_order(1, Side::Buy, 1_000, 10))
        .await
        .unwrap();
    let hint = until(&mut of_ann, |m| match m {
        ServerMessage::Accepted(hint) => Some(*hint),
        _ => None,
    });
    let hint = hint.await;
    let first = next_numbered(&mut of_ann).await;
    let acked = ack(&first.message).unwrap();
    assert_eq!(
        (
            first.sequence,
            acked.client_seq,
            acked.client_order_id,
            acked.open_lots
        ),
        (1, 1, 1, 10)
    );
    assert_eq!(
        (hint.engine_order_id, hint.node_sequence),
        (acked.engine_order_id, acked.node_sequence)
    );

    // Ann is disconnected while the order trades twice.
    cut(&ann, &mut of_ann).await;
    for (id, lots) in [(1, 3), (2, 4)] {
        bob.send(0, wire_order(id, Side::Sell, 1_000, lots))
            .await
            .unwrap();
        let taken = until(&mut of_bob, fill).await;
        assert_eq!(
            (taken.aggressor, taken.counter_order_id, taken.fee_minor),
            (1, acked.engine_order_id, 0)
        );
    }
    let infos = ann.resume().await.unwrap();
    assert_eq!(
        (infos[0].1.next_sequence, infos[0].1.last_client_seq),
        (2, 1)
    );
    for (sequence, open, fee) in [(2, 7, 3), (3, 3, 4)] {
        let report = next_numbered(&mut of_ann).await;
        let missed = fill(&report.message).unwrap();
        assert_eq!(
            (
                report.sequence,
                missed.open_lots,
                missed.aggressor,
                missed.fee_minor
            ),
            (sequence, open, 0, fee)
        );
    }
    // After a restart of the exchange the messages have the same numbers, whatever the first one
    // is.
    world.gateway.caught_up().await;
    drop((ann, bob, of_ann, of_bob));
    let settings = Settings {
        layout: Some(layout),
        ..Settings::default()
    };
    let world = world.restart(settings).await;
    let (_again, mut reports) = world.session(login("ann", "a")).await;
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(next_numbered(&mut reports).await);
    }
    let numbers: Vec<u64> = all.iter().map(|report| report.sequence).collect();
    assert_eq!(numbers, [1, 2, 3]);
    assert_eq!(ack(&all[0].message).unwrap(), acked);
    let (_third, mut reports) = world
        .session(LoginOptions {
            last_sequence: 2,
            ..login("ann", "a")
        })
        .await;
    assert_eq!(next_numbered(&mut reports).await.sequence, 3);
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_a_request_sent_twice_acts_once_and_is_answered_with_its_report() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 5_000_000)).await;
    raw.send(0, 7, wire_order(1, Side::Buy, 1_000, 10)).await;
    let (first, _) = raw.until(|m| ack(m).is_some()).await;
    // A repeat of the client sequence with other content.
    raw.send(0, 7, wire_order(2, Side::Buy, 2_000, 10)).await;
    let (again, message) = raw.until(|m| ack(m).is_some()).await;
    assert_eq!(
        (first, again),
        (1, 1),
        "the original report under its number"
    );
    assert_eq!(ack(&message).unwrap().client_order_id, 1);
    raw.send(0, 8, wire_order(3, Side::Buy, 900, 1)).await;
    assert_eq!(raw.until(|m| ack(m).is_some()).await.0, 2);
    assert_eq!(world.book().await.0.len(), 2);
    // A journalled refusal is numbered too.
    raw.send(
        0,
        9,
        wire::Cancel {
            client_order_id: 77,
            engine_order_id: 0,
        },
    )
    .await;
    let (number, message) = raw.until(|m| rejected(m).is_some()).await;
    assert_eq!(
        (number, rejected(&message).unwrap().reason),
        (3, RejectReason::UnknownOrder)
    );
    world.stop().await;
}

/// Repeats of requests whose reports have left the window are looked up in the journal, at most
/// eight at a time per member. Each repeat is answered once, with the first answer or with
/// `ALREADY_SEEN`. No repeat acts. Another member has its own limit.
// rows: R341
#[tokio::test]
async fn r341_look_ups_are_bounded_per_member_and_every_repeat_is_answered() {
    const REPEATS: u64 = 400;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings {
        linger_ms: 600_000,
        settle_wait_ms: 600_000,
        ..Settings::unthrottled()
    };
    settings.gateway.window_messages_max = 16;
    let world = members(folder.path(), settings).await;
    let mut ann = Raw::connect(&world).await;
    let first_of_ann = evict_from_window(&mut ann, "ann").await;
    let mut bob = Raw::connect(&world).await;
    let first_of_bob = evict_from_window(&mut bob, "bob").await;
    let before = world.status().await;

    let mut repeats = bytes::BytesMut::new();
    for _ in 0..REPEATS {
        wire::encode(&unknown(), 0, 1, &mut repeats);
    }
    ann.send.write_all(&repeats).await.unwrap();
    for _ in 0..8 {
        bob.send(0, 1, unknown()).await;
    }
    let (found, refused) = answers(&mut ann, REPEATS, &first_of_ann).await;
    assert!(found >= 8, "{found} {refused}");
    let of_bob = answers(&mut bob, 8, &first_of_bob).await;
    assert_eq!(of_bob, (8, 0), "not limited by the other member");
    // All lookups are completed, so the next eight are admitted.
    for _ in 0..8 {
        ann.send(0, 1, unknown()).await;
    }
    assert_eq!(answers(&mut ann, 8, &first_of_ann).await, (8, 0));
    let after = world.status().await;
    assert_eq!(after.commit_sequence, before.commit_sequence);
    assert_eq!(after.state_hash, before.state_hash);
    ann.send(0, 65, wire_order(2, Side::Buy, 100, 1)).await;
    let (number, _) = ann.until(|m| ack(m).is_some()).await;
    assert_eq!(number, 65, "no repeat took a number");
    world.stop().await;
}

fn unknown() -> wire::ClientMessage {
    wire::Cancel {
        client_order_id: 77,
        engine_order_id: 0,
    }
    .into()
}

/// Logs in, places an order as request 1, and sends requests until its report has left the window.
/// Returns the report.
async fn evict_from_window(raw: &mut Raw, user: &str) -> (u64, ServerMessage) {
    raw.login(0, raw_login(user, "a", 5_000_000)).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    let first = raw.until(|m| ack(m).is_some()).await;
    for seq in 2..=64 {
        raw.send(0, seq, unknown()).await;
    }
    raw.until(|m| rejected(m).is_some_and(|refused| refused.client_seq == 64))
        .await;
    first
}

/// Reads the answers to `repeats` repeats of request 1. Returns how many equal the first answer and
/// how many are `ALREADY_SEEN`.
async fn answers(raw: &mut Raw, repeats: u64, first: &(u64, ServerMessage)) -> (u64, u64) {
    let (mut found, mut refused) = (0, 0);
    while found + refused < repeats {
        let (header, message) = raw.next_with_heartbeats().await;
        match message {
            ServerMessage::OrderAck(_) => {
                assert_eq!(&(header.sequence, message), first);
                found += 1;
            }
            ServerMessage::Rejected(m) => {
                let got = (header.sequence, m.client_seq, m.reason);
                assert_eq!(got, (0, 1, RejectReason::AlreadySeen));
                refused += 1;
            }
            _ => {}
        }
    }
    (found, refused)
}

// rows: R344
#[tokio::test]
async fn r344_both_protocols_share_one_book() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    ann.send(0, wire_order(5, Side::Buy, 1_000, 10))
        .await
        .unwrap();
    let acked = until(&mut of_ann, ack).await;
    let order = world.order(&acked.order_id.to_string()).await.unwrap();
    assert_eq!(
        (order.engine_order_id, order.client_order_id.as_str()),
        (acked.engine_order_id, "5")
    );
    // Placed by one protocol, cancelled by the other.
    world.cancel("ann", &order.order_id).await.unwrap();
    let gone = until(&mut of_ann, cancelled).await;
    assert_eq!(
        (gone.client_order_id, gone.reason, gone.client_seq),
        (5, CancelReason::UserRequest, 0)
    );
    let placed = world.place(buy("ann", "9", "4")).await.unwrap();
    ann.send(
        0,
        wire::Cancel {
            client_order_id: 0,
            engine_order_id: placed.engine_order_id,
        },
    )
    .await
    .unwrap();
    let gone = until(&mut of_ann, cancelled).await;
    assert_eq!(
        (gone.engine_order_id, gone.client_seq),
        (placed.engine_order_id, 2)
    );
    assert_eq!(
        world.order(&placed.order_id).await.unwrap().status(),
        OrderStatus::Cancelled
    );
    // An order by call draws on the session's trading hold.
    let by_rpc = world.place(buy("ann", "9", "4")).await.unwrap();
    ann.send(
        0,
        wire::Amend {
            client_order_id: 0,
            engine_order_id: by_rpc.engine_order_id,
            price_ticks: 950,
            quantity_lots: 0,
            new_client_order_id: 0,
        },
    )
    .await
    .unwrap();
    let amended = until(&mut of_ann, |m| match m {
        ServerMessage::Amended(amended) => Some(*amended),
        _ => None,
    });
    let amended = amended.await;
    assert_eq!(
        (
            amended.client_seq,
            amended.price_ticks,
            amended.kept_priority
        ),
        (3, 950, 0)
    );
    world.stop().await;
}

/// A client order id is unique among the user's open orders of both protocols. A second order with
/// the id is refused by either protocol. A repeat under its own key or sequence gets the first
/// answer.
// rows: R344
#[tokio::test]
async fn r344_one_client_order_id_sent_by_both_protocols_acts_once() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 5_000_000)).await;
    let call = |id: &str, key: &str| PlaceOrderRequest {
        context: context(key),
        order: Some(Order {
            client_order_id: id.into(),
            ..buy("ann", "9", "4")
        }),
    };
    let bid = |price: &str, quantity: &str| (price.to_owned(), quantity.to_owned());
    let trader = || world.trader("ann");
    let taken = (tonic::Code::AlreadyExists, "DUPLICATE_CLIENT_ORDER_ID");

    // First by the session, then by the call.
    let by_session = wire_order(5, Side::Buy, 1_000, 10);
    raw.send(0, 1, by_session).await;
    let (number, message) = raw.until(|m| ack(m).is_some()).await;
    let acked = ack(&message).unwrap();
    let refusal = refused(trader().place_order(call("5", "k1")).await.unwrap_err());
    assert_eq!((refusal.0, &*refusal.2), taken);
    raw.send(0, 1, by_session).await;
    let again = raw.until(|m| ack(m).is_some()).await;
    assert_eq!(again, (number, message), "the first answer");

    // First by the call, then by the session.
    let placed = trader().place_order(call("6", "k2")).await.unwrap();
    assert!(placed.metadata().get("idempotent-replayed").is_none());
    let placed = placed.into_inner().order.unwrap();
    raw.send(0, 2, wire_order(6, Side::Buy, 800, 1)).await;
    let (_, message) = raw.until(|m| rejected(m).is_some()).await;
    let refusal = rejected(&message).unwrap();
    assert_eq!(
        (refusal.reason, refusal.client_order_id),
        (RejectReason::DuplicateClientOrderId, 6)
    );
    let again = trader().place_order(call("6", "k2")).await.unwrap();
    assert_eq!(again.metadata().get("idempotent-replayed").unwrap(), "true");
    assert_eq!(again.into_inner().order.unwrap(), placed);
    let both = vec![bid("10.00", "10"), bid("9.00", "4")];
    assert_eq!(world.book().await.0, both);

    // Concurrently by both: one of them acts.
    for id in 10..30_u64 {
        raw.send(0, id, wire_order(id, Side::Buy, 700, 1)).await;
        let (text, key) = (id.to_string(), format!("both-{id}"));
        let by_call = trader().place_order(call(&text, &key)).await;
        let answer = raw.until(|m| ack(m).is_some() || rejected(m).is_some());
        let (_, message) = answer.await;
        if let Some(acked) = ack(&message) {
            assert_eq!(acked.client_order_id, id);
            let refusal = refused(by_call.expect_err("the session's order has the id"));
            assert_eq!((refusal.0, &*refusal.2), taken);
        } else {
            let reason = rejected(&message).unwrap().reason;
            assert_eq!(reason, RejectReason::DuplicateClientOrderId);
            by_call.expect("the call's order has the id");
        }
    }
    assert_eq!(world.status().await.instruments[0].open_orders, 22);

    // After an order has ended, the other protocol may use its id. The key and the sequence of the
    // order keep their answers.
    world
        .cancel("ann", &acked.order_id.to_string())
        .await
        .unwrap();
    trader().place_order(call("5", "k3")).await.unwrap();
    world.cancel("ann", &placed.order_id).await.unwrap();
    raw.send(0, 40, wire_order(6, Side::Buy, 800, 1)).await;
    raw.until(|m| ack(m).is_some_and(|ack| ack.client_seq == 40))
        .await;
    let again = trader().place_order(call("6", "k2")).await.unwrap();
    assert_eq!(again.into_inner().order.unwrap().order_id, placed.order_id);
    assert_eq!(world.status().await.instruments[0].open_orders, 22);
    world.stop().await;
}

// rows: R345
#[tokio::test]
async fn r345_orders_are_cancelled_on_disconnect_and_by_mass_cancel() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let guarded = LoginOptions {
        cancel_on_disconnect: true,
        ..with_money("ann", "guarded")
    };
    let (ann, mut of_ann) = world.session(guarded.clone()).await;
    let (plain, mut of_plain) = world.session(login("ann", "plain")).await;
    plain
        .send(0, wire_order(1, Side::Buy, 500, 1))
        .await
        .unwrap();
    until(&mut of_plain, ack).await;
    for id in 2..5 {
        ann.send(0, wire_order(id, Side::Buy, 1_000 + id as i64, 1))
            .await
            .unwrap();
        until(&mut of_ann, ack).await;
    }
    ann.send(
        0,
        wire::MassCancel {
            scope: 0,
            instrument: wire::ALL_INSTRUMENTS,
            side: wire::BOTH_SIDES,
        },
    )
    .await
    .unwrap();
    for _ in 0..3 {
        assert_eq!(
            until(&mut of_ann, cancelled).await.reason,
            CancelReason::MassCancel
        );
    }
    let done = until(&mut of_ann, |m| match m {
        ServerMessage::MassCancelled(done) => Some(*done),
        _ => None,
    });
    let done = done.await;
    assert_eq!((done.client_seq, done.count), (4, 3));

    // A logout cancels nothing.
    ann.send(0, wire_order(5, Side::Buy, 1_100, 1))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    ann.send(0, wire::Logout {}).await.unwrap();
    let ended = until(&mut of_ann, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    });
    assert_eq!(ended.await, DisconnectCode::Logout.code());
    assert_eq!(world.book().await.0.len(), 2);

    // A lost connection cancels after the grace period. The order of the session without the
    // option stays, although its connection was lost before.
    let (ann, mut of_ann) = world
        .session(LoginOptions {
            from_now: true,
            ..guarded.clone()
        })
        .await;
    cut(&plain, &mut of_plain).await;
    cut(&ann, &mut of_ann).await;
    let mut cancelled_events = world
        .events(events::topics::MARKET, 4, |event| {
            event.short_type() == "OrderCancelledEvent"
        })
        .await;
    let last: OrderCancelledEvent =
        prost::Message::decode(&*cancelled_events.pop().unwrap().payload).unwrap();
    assert_eq!(last.reason, "CANCEL_ON_DISCONNECT");
    assert_eq!(world.book().await.0, [("5.00".to_owned(), "1".to_owned())]);
    let (_back, mut reports) = world
        .session(LoginOptions {
            last_sequence: 8,
            ..guarded
        })
        .await;
    assert_eq!(
        until(&mut reports, cancelled).await.reason,
        CancelReason::CancelOnDisconnect
    );
    world.stop().await;
}

#[tokio::test]
async fn sessions_of_one_connection_keep_the_order_of_the_stream() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), Settings::default()).await;
    let (connection, mut reports) = world.connect().await;
    for channel in 0..12u16 {
        let user = format!("member-{channel}");
        world.user(&user, "1000", "0").await;
        let options = LoginOptions {
            money_hold_minor: 90_000,
            ..login(&user, "m")
        };
        connection.login(channel, options).await.unwrap();
    }
    let mut expected = Vec::new();
    for at in 0..240u64 {
        let channel = (at * 7 % 12) as u16;
        connection
            .send(
                channel,
                wire_order(at + 1, Side::Buy, 100 + (at % 5) as i64, 1),
            )
            .await
            .unwrap();
        expected.push((channel, at + 1));
    }
    let mut acks: Vec<(u64, u16, u64)> = Vec::new();
    while acks.len() < 240 {
        let Report {
            channel, message, ..
        } = next_report(&mut reports).await;
        if let Some(ack) = ack(&message) {
            acks.push((ack.node_sequence, channel, ack.client_order_id));
        }
    }
    acks.sort_unstable();
    let entered: Vec<_> = acks
        .iter()
        .map(|(_, channel, id)| (*channel, *id))
        .collect();
    assert_eq!(entered, expected);
    world.stop().await;
}

// rows: R341
#[tokio::test]
async fn d33_a_session_past_its_throttle_is_refused_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 10;
    let world = members(folder.path(), settings).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let begun = std::time::Instant::now();
    for id in 1..=200 {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
    }
    let (mut acks, mut refusals) = (0, 0);
    while acks + refusals < 200 {
        let report = next_report(&mut of_ann).await;
        match report.message {
            ServerMessage::OrderAck(_) => acks += 1,
            ServerMessage::Rejected(m) => {
                assert_eq!(
                    (m.reason, report.sequence),
                    (RejectReason::Throttle, 0),
                    "unnumbered: the request was not seen"
                );
                // The rate replenishes one message in 100 ms.
                assert!((1..=100_000).contains(&m.limit), "{}", m.limit);
                refusals += 1;
            }
            _ => {}
        }
    }
    // A burst, and what the rate has replenished since.
    let most = 10 + 10 * (begun.elapsed().as_secs() + 1);
    assert!((10..=most).contains(&acks), "{acks}, {most} at most");
    assert_eq!(world.status().await.instruments[0].open_orders, acks);
    world.stop().await;
}

/// A repeat above the rate gets the first answer. `THROTTLE` means that the request was not seen,
/// so the client would send it as a new order.
// rows: R341
#[tokio::test]
async fn r341_a_repeat_past_the_rate_gets_the_first_answer() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 10;
    let world = members(folder.path(), settings).await;
    let mut ann = Raw::connect(&world).await;
    ann.login(0, raw_login("ann", "a", 5_000_000)).await;
    ann.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    let first = ann.until(|m| ack(m).is_some()).await;
    for seq in 2..=100 {
        ann.send(0, seq, wire_order(seq, Side::Buy, 100, 1)).await;
    }
    let mut refused = 0;
    for _ in 2..=100 {
        let (_, answer) = ann
            .until(|m| ack(m).is_some() || rejected(m).is_some())
            .await;
        refused += u64::from(rejected(&answer).is_some());
    }
    assert!(refused > 50, "{refused}");
    for _ in 0..20 {
        ann.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    }
    assert_eq!(answers(&mut ann, 20, &first).await, (20, 0));
    world.stop().await;
}

/// A repeat of an answered order is not checked by identity and uses no budget. After a refusal the
/// client would send the same order again.
// rows: R341
#[tokio::test]
async fn r341_a_repeat_of_an_answered_order_is_not_checked_again() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 1_500);
    let mut ann = Raw::connect(&world).await;
    ann.login(0, raw_login("ann", "a", 5_000_000)).await;
    ann.send(0, 1, wire_order(1, Side::Buy, 100, 10)).await;
    let first = ann.until(|m| ack(m).is_some()).await;
    world.identity.take_limit_checks();
    world
        .identity
        .upsert_user("ann", |ann| ann.refuse_with = Some("No more today".into()));
    ann.send(0, 1, wire_order(1, Side::Buy, 100, 10)).await;
    assert_eq!(answers(&mut ann, 1, &first).await, (1, 0));
    assert!(world.identity.take_limit_checks().is_empty());
    world.stop().await;
}

/// A client that can send arbitrary bytes.
pub struct Raw {
    _endpoint: quinn::Endpoint,
    pub connection: quinn::Connection,
    pub send: quinn::SendStream,
    pub receive: quinn::RecvStream,
    buffer: bytes::BytesMut,
}

impl Raw {
    pub async fn connect(world: &World) -> Self {
        Self::try_connect(world).await.unwrap()
    }

    /// Client configuration that trusts the world's gateway.
    fn config(world: &World) -> quinn::ClientConfig {
        Self::config_of(world, wire::ALPN)
    }

    /// As [`Raw::config`], for the protocol of this name.
    fn config_of(world: &World, alpn: &[u8]) -> quinn::ClientConfig {
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let certificate = std::fs::read(world.folder.join("gateway/tls/cert.der")).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate.into()).unwrap();
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![alpn.to_vec()];
        let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
        quinn::ClientConfig::new(std::sync::Arc::new(crypto))
    }

    pub async fn try_connect(world: &World) -> Result<Self, quinn::ConnectionError> {
        let address = world.gateway.trading_address();
        in_time("the handshake", Self::to(address, Self::config(world))).await
    }

    /// Connects from another address of the loopback.
    pub async fn connect_from(world: &World, own: [u8; 4]) -> Self {
        Self::try_connect_from(world, own).await.unwrap()
    }

    pub async fn try_connect_from(
        world: &World,
        own: [u8; 4],
    ) -> Result<Self, quinn::ConnectionError> {
        let connecting = Self::between(own, world.gateway.trading_address(), Self::config(world));
        in_time("the handshake", connecting).await
    }

    async fn to(
        address: std::net::SocketAddr,
        config: quinn::ClientConfig,
    ) -> Result<Self, quinn::ConnectionError> {
        Self::between([127, 0, 0, 1], address, config).await
    }

    async fn between(
        own: [u8; 4],
        address: std::net::SocketAddr,
        config: quinn::ClientConfig,
    ) -> Result<Self, quinn::ConnectionError> {
        let mut endpoint = quinn::Endpoint::client((own, 0).into()).unwrap();
        endpoint.set_default_client_config(config);
        let connection = endpoint.connect(address, "cfa-trade").unwrap().await?;
        let (send, receive) = connection.open_bi().await?;
        Ok(Self {
            _endpoint: endpoint,
            connection,
            send,
            receive,
            buffer: bytes::BytesMut::new(),
        })
    }

    pub async fn send(
        &mut self,
        channel: u16,
        sequence: u64,
        message: impl Into<wire::ClientMessage>,
    ) {
        let mut out = bytes::BytesMut::new();
        wire::encode(&message.into(), channel, sequence, &mut out);
        self.send.write_all(&out).await.unwrap();
    }

    /// Logs in on a channel.
    pub async fn login(&mut self, channel: u16, login: wire::Login) {
        self.send(channel, 0, login).await;
        self.until(|m| matches!(m, ServerMessage::LoginAccepted(_)))
            .await;
    }

    /// Logs the session of a channel out.
    async fn log_out(&mut self, channel: u16) {
        self.send(channel, 0, wire::Logout {}).await;
        let is_end = |m: &ServerMessage| matches!(m, ServerMessage::Disconnect(_));
        self.until(is_end).await;
    }

    /// The next message; `None` after the end of the connection.
    async fn next(&mut self) -> Option<(wire::Header, ServerMessage)> {
        loop {
            if let Some(next) = wire::decode(&mut self.buffer).unwrap() {
                return Some(next);
            }
            let chunk = self.receive.read_chunk(usize::MAX, true).await.ok()??;
            self.buffer.extend_from_slice(&chunk.bytes);
        }
    }

    /// Reads 16 KiB of what waits, without their messages.
    async fn read_a_little(&mut self) {
        const BYTES: usize = 16 << 10;
        let mut read = 0;
        while read < BYTES {
            let chunk = self.receive.read_chunk(BYTES - read, true).await.unwrap();
            let bytes = chunk.expect("the stream is open").bytes;
            read += bytes.len();
            self.buffer.extend_from_slice(&bytes);
        }
    }

    /// The next message within 60 s. Sends a heartbeat every second.
    pub async fn next_with_heartbeats(&mut self) -> (wire::Header, ServerMessage) {
        let beat = std::time::Duration::from_secs(1);
        for _ in 0..60 {
            if let Ok(next) = tokio::time::timeout(beat, self.next()).await {
                return next.expect("the connection is open");
            }
            self.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
                .await;
        }
        panic!("no message within 60 s");
    }

    /// Reads until a message is wanted. Returns its number and the message.
    pub async fn until(&mut self, wanted: impl Fn(&ServerMessage) -> bool) -> (u64, ServerMessage) {
        let reading = async {
            loop {
                let (header, message) = self.next_with_heartbeats().await;
                if wanted(&message) {
                    return (header.sequence, message);
                }
            }
        };
        in_time("the wanted message", reading).await
    }

    /// Reads until `pick` returns a value.
    async fn pick<T>(&mut self, pick: impl Fn(&ServerMessage) -> Option<T>) -> T {
        let (_, message) = self.until(|message| pick(message).is_some()).await;
        pick(&message).unwrap()
    }

    /// Reads to the end. Returns the code of the last `Disconnect` message and of the QUIC close.
    pub async fn end(mut self) -> (Option<u16>, u64) {
        let mut last = None;
        let reading = async {
            while let Some((header, message)) = self.next().await {
                if let ServerMessage::Disconnect(end) = message {
                    assert_eq!(header.channel, wire::CONNECTION_CHANNEL);
                    last = Some(end.code);
                }
            }
            self.connection.closed().await
        };
        match in_time("the end of the connection", reading).await {
            quinn::ConnectionError::ApplicationClosed(close) => {
                (last, close.error_code.into_inner())
            }
            other => panic!("{other}"),
        }
    }
}

pub fn raw_login(user: &str, name: &str, money_hold_minor: i64) -> wire::Login {
    wire::Login {
        token: wire::Text::new(&format!("sandbox.trader.{user}")).unwrap(),
        session_name: wire::Text::new(name).unwrap(),
        last_sequence: 0,
        flags: 0,
        heartbeat_ms: 0,
        stp_group: 0,
        money_hold_minor,
    }
}

#[tokio::test]
async fn garbage_gets_its_code_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let before = world.status().await;
    let mut order = bytes::BytesMut::new();
    wire::encode(
        &wire::ClientMessage::from(wire_order(1, Side::Buy, 1, 1)),
        0,
        1,
        &mut order,
    );
    let mut bad_side = order.clone();
    bad_side[wire::HEADER_LEN + 12] = 9;
    let mut bad_channel = order.clone();
    bad_channel[4] = 200;
    let garbage: Vec<u8> = (0..64u32).map(|i| (i * 37 % 251) as u8).collect();
    for (bytes, code) in [
        (garbage, DisconnectCode::Version),
        (
            vec![14, 0, 0x55, wire::VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            DisconnectCode::UnknownType,
        ),
        (
            vec![13, 0, 0x02, wire::VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            DisconnectCode::Malformed,
        ),
        (bad_side.to_vec(), DisconnectCode::BadField),
        (bad_channel.to_vec(), DisconnectCode::BadField),
        // A valid order without a login.
        (order.to_vec(), DisconnectCode::LoginExpected),
    ] {
        let mut raw = Raw::connect(&world).await;
        raw.send.write_all(&bytes).await.unwrap();
        assert_eq!(
            raw.end().await,
            (Some(code.code()), u64::from(code.code())),
            "{code}"
        );
    }
    // Garbage in a session: its orders stay, and a request after the garbage is not executed.
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 5_000_000)).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 1_000, 10)).await;
    raw.until(|m| ack(m).is_some()).await;
    raw.send.write_all(&[0xff; 20]).await.unwrap();
    raw.send(0, 2, wire_order(2, Side::Buy, 1_000, 10)).await;
    assert_eq!(raw.end().await.1, u64::from(DisconnectCode::Version.code()));
    assert_eq!(
        world.book().await.0,
        [("10.00".to_owned(), "10".to_owned())]
    );
    assert_eq!(before.instruments[0].open_orders, 0);
    world.stop().await;
}

/// The roles that may place orders by calls may log in, and no others. An order is changed by its
/// owner alone.
// rows: R333
#[tokio::test]
async fn r333_sessions_admit_the_roles_and_owners_that_calls_admit() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    for (credential, is_admitted) in [
        ("sandbox.investor.ann", true),
        ("sandbox.trader.ann", true),
        ("sandbox.issuer.ann", false),
        ("sandbox.operator", false),
        ("sandbox.treasury", false),
        ("sandbox.compliance", false),
        ("sandbox.market-supervisor", false),
        ("sandbox.auditor", false),
        ("sandbox.service", false),
    ] {
        let (connection, _reports) = world.connect().await;
        let login = connection.login(0, LoginOptions::new(credential, "role"));
        match in_time("an answer", login).await {
            Ok(_) => assert!(is_admitted, "{credential}"),
            Err(Error::Disconnected { code, .. }) => {
                assert!(!is_admitted, "{credential}");
                assert_eq!(code, Some(DisconnectCode::Role), "{credential}");
            }
            Err(other) => panic!("{credential}: {other:?}"),
        }
    }

    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let (bob, mut of_bob) = world.session(with_money("bob", "b")).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 2)).await.unwrap();
    let engine_order_id = until(&mut of_ann, ack).await.engine_order_id;
    let cancel = wire::Cancel {
        client_order_id: 0,
        engine_order_id,
    };
    let amend = wire::Amend {
        client_order_id: 0,
        engine_order_id,
        price_ticks: 0,
        quantity_lots: 1,
        new_client_order_id: 0,
    };
    bob.send(0, cancel).await.unwrap();
    let refusal = until(&mut of_bob, rejected).await;
    assert_eq!(refusal.reason, RejectReason::NotOwner);
    bob.send(0, amend).await.unwrap();
    let refusal = until(&mut of_bob, rejected).await;
    assert_eq!(refusal.reason, RejectReason::NotOwner);
    assert_eq!(world.book().await.0, [("1.00".to_owned(), "2".to_owned())]);
    world.stop().await;
}

// rows: R332
#[tokio::test]
async fn logins_that_are_refused_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    world
        .identity
        .upsert_user("low", |low| low.kyc = KycStatus::Simplified);
    world.identity.upsert_user("poor", |_| {});
    let refused = async |options: LoginOptions| {
        let (connection, _reports) = world.connect().await;
        match in_time("an answer", connection.login(3, options)).await {
            Err(Error::Disconnected { code, .. }) => code.unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let auditor = LoginOptions::new("sandbox.auditor", "a");
    assert_eq!(refused(auditor).await, DisconnectCode::Role);
    assert_eq!(refused(login("low", "a")).await, DisconnectCode::KycLevel);
    assert_eq!(
        refused(with_money("poor", "a")).await,
        DisconnectCode::TradingHold
    );
    assert_eq!(
        refused(LoginOptions {
            last_sequence: 9,
            ..login("ann", "a")
        })
        .await,
        DisconnectCode::SequenceAhead
    );
    world.stop().await;
}

/// Five invalid tokens within a minute lock out their session name, fifty lock out the address.
/// Logged-in sessions continue.
#[tokio::test]
async fn invalid_tokens_lock_out_a_session_name_then_the_address() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "desk")).await;
    let (connection, _reports) = world.connect().await;
    let refused = async |options: LoginOptions| match connection.login(3, options).await {
        Err(Error::Disconnected { code, .. }) => code.unwrap(),
        other => panic!("{other:?}"),
    };
    for name in 0..10 {
        for _ in 0..5 {
            let wrong = LoginOptions::new("wrong", &format!("n{name}"));
            assert_eq!(refused(wrong).await, DisconnectCode::Credentials);
        }
        let locked = login("bob", &format!("n{name}"));
        assert_eq!(refused(locked).await, DisconnectCode::TooManyLogins);
        if name == 8 {
            let (_bob, _) = world.session(login("bob", "desk")).await;
        }
    }
    let trust: client::Trust = world.gateway.fingerprint().parse().unwrap();
    let again = client::Connection::connect(world.gateway.trading_address(), trust);
    assert!(again.await.is_err());
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    until(&mut of_ann, ack).await;
    world.stop().await;
}

#[tokio::test]
async fn a_newer_login_takes_a_session_over() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let (first, mut of_first) = world.session(with_money("ann", "a")).await;
    let (second, mut of_second) = world.session(login("ann", "a")).await;
    let ended = until(&mut of_first, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    });
    assert_eq!(ended.await, DisconnectCode::TakenOver.code());
    assert!(matches!(
        first.send(0, wire_order(1, Side::Buy, 100, 1)).await,
        Err(Error::NotLoggedIn)
    ));
    drop(first);
    second
        .send(0, wire_order(1, Side::Buy, 100, 1))
        .await
        .unwrap();
    until(&mut of_second, ack).await;
    world.stop().await;
}

#[tokio::test]
async fn a_session_sets_its_trading_holds() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), Settings::default()).await;
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    let mut answer = async |asset: u32, undrawn_minor: i64| {
        bob.send(
            0,
            wire::SetTradingHold {
                request_id: 9,
                asset,
                undrawn_minor,
            },
        )
        .await
        .unwrap();
        until(&mut of_bob, |m| match m {
            ServerMessage::TradingHold(answer) => Some(*answer),
            _ => None,
        })
        .await
    };
    let opened = answer(0, 1_000).await;
    assert_eq!(
        (opened.request_id, opened.outcome, opened.undrawn_minor),
        (9, wire::REQUEST_DONE, 1_000)
    );
    assert_eq!(
        answer(1, 400).await.undrawn_minor,
        400,
        "units of instrument 0, in the hold opened before"
    );
    assert_eq!(
        answer(0, 100_000_000).await.outcome,
        RejectReason::InsufficientBalance.code()
    );
    assert_eq!(
        answer(7, 1).await.outcome,
        RejectReason::UnknownInstrument.code()
    );
    assert_eq!(answer(0, -1).await.outcome, RejectReason::Malformed.code());
    assert_eq!(world.balance("bob", "CFA-RUB").await.1, "10.00");
    world.stop().await;
}

#[tokio::test]
async fn past_the_budget_identity_is_asked_for_the_very_order() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    world.identity.take_limit_checks();
    for id in 1..=2 {
        ann.send(0, wire_order(id, Side::Buy, 100, 10))
            .await
            .unwrap();
        until(&mut of_ann, ack).await;
    }
    assert!(
        world.identity.take_limit_checks().is_empty(),
        "20.00 of 25.00: identity is not asked"
    );
    ann.send(0, wire_order(3, Side::Buy, 100, 10))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    assert_eq!(world.identity.take_limit_checks().len(), 1);
    world
        .identity
        .upsert_user("ann", |ann| ann.refuse_with = Some("No more today".into()));
    ann.send(0, wire_order(4, Side::Buy, 100, 10))
        .await
        .unwrap();
    let report = loop {
        let report = next_numbered(&mut of_ann).await;
        if rejected(&report.message).is_some() {
            break report;
        }
    };
    assert_eq!(
        rejected(&report.message).unwrap().reason,
        RejectReason::LimitExceeded
    );
    world.stop().await;
}

/// The late end of a replaced connection does not close the session. Orders of the new connection
/// stay open, although the grace period is 1 ms.
// rows: R343
#[tokio::test]
async fn r343_late_close_of_old_connection_keeps_resumed_session() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        grace_ms: 1,
        ..Settings::default()
    };
    let world = members(folder.path(), settings).await;
    let options = LoginOptions {
        cancel_on_disconnect: true,
        from_now: true,
        ..login("ann", "a")
    };
    let mut old = world.session(with_money("ann", "a")).await;
    let mut placed = None;
    for id in 1..=40u64 {
        let (connection, mut reports) = world.connect().await;
        assert_open(&world, placed).await;
        // The old connection ends during the new login, at a different moment each time.
        let dying = async {
            for _ in 0..id % 20 {
                tokio::task::yield_now().await;
            }
            old.0.cut();
        };
        let both = async { tokio::join!(connection.login(0, options.clone()), dying) };
        let (infos, ()) = in_time("the login is answered", both).await;
        infos.unwrap();
        connection
            .send(0, wire_order(id, Side::Buy, 1_000, 1))
            .await
            .unwrap();
        placed = Some(until(&mut reports, ack).await);
        old = (connection, reports);
    }
    // The order of a session that is lost last ends last. Then the placed order must still be open.
    let other = LoginOptions {
        cancel_on_disconnect: true,
        ..login("ann", "other")
    };
    let (other, mut of_other) = world.session(other).await;
    other
        .send(0, wire_order(41, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    let last = until(&mut of_other, ack).await.order_id.to_string();
    cut(&other, &mut of_other).await;
    until_true("the order of the lost session ends", async || {
        world.order(&last).await.unwrap().cancel_reason == "CANCEL_ON_DISCONNECT"
    })
    .await;
    assert_open(&world, placed).await;
    world.stop().await;
}

async fn assert_open(world: &World, placed: Option<wire::OrderAck>) {
    if let Some(placed) = placed {
        let order = world.order(&placed.order_id.to_string()).await.unwrap();
        assert_eq!(order.status(), OrderStatus::Open, "{}", order.cancel_reason);
    }
}

// rows: R345
#[tokio::test]
async fn r345_a_refused_login_does_not_save_the_orders_of_a_lost_session() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        grace_ms: 300,
        ..Settings::default()
    };
    let world = members(folder.path(), settings).await;
    let guarded = LoginOptions {
        cancel_on_disconnect: true,
        ..with_money("ann", "a")
    };
    let (ann, mut of_ann) = world.session(guarded.clone()).await;
    ann.send(0, wire_order(1, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    cut(&ann, &mut of_ann).await;
    let (connection, _reports) = world.connect().await;
    let wrong = LoginOptions {
        last_sequence: 99,
        ..guarded
    };
    match in_time("an answer", connection.login(0, wrong)).await {
        Err(Error::Disconnected { code, .. }) => {
            assert_eq!(code, Some(DisconnectCode::SequenceAhead))
        }
        other => panic!("{other:?}"),
    }
    until_no_bids(&world).await;
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_a_client_far_behind_gets_everything_once_and_in_order() {
    const ORDERS: u64 = 12_000;
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::unthrottled()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    for id in 1..=ORDERS {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
    }
    for _ in 0..ORDERS {
        until(&mut of_ann, ack).await;
    }
    let all = wire::MassCancel {
        scope: 0,
        instrument: wire::ALL_INSTRUMENTS,
        side: wire::BOTH_SIDES,
    };
    ann.send(0, all).await.unwrap();
    let last = loop {
        let report = next_numbered(&mut of_ann).await;
        if let ServerMessage::MassCancelled(done) = report.message
            && done.remaining == 0
        {
            assert_eq!((done.client_seq, u64::from(done.count)), (0, ORDERS));
            break report.sequence;
        }
    };
    // One acknowledgement and one cancel per order, and `MassCancelled` after the first and the
    // last slice.
    assert_eq!(last, 2 * ORDERS + 2);
    ann.cut();
    drop(of_ann);
    // Resends everything, more than a window holds, while new messages arrive.
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    raw.send(0, ORDERS + 2, wire_order(ORDERS + 1, Side::Buy, 100, 1))
        .await;
    let mut next = 1;
    while next <= last + 1 {
        let (header, _) = raw.next_with_heartbeats().await;
        if header.sequence != 0 {
            assert_eq!(header.sequence, next);
            next += 1;
        }
    }
    // The answer to a repeat whose report has left the window comes from the journal.
    for again in [5u64, 3] {
        raw.send(0, again, wire_order(again, Side::Buy, 100, 1))
            .await;
        let (number, message) = raw.until(|m| ack(m).is_some()).await;
        assert_eq!(
            (number, ack(&message).unwrap().client_seq),
            (again, again),
            "under its number"
        );
    }
    world.stop().await;
}

#[tokio::test]
async fn sessions_and_logins_per_user_are_limited() {
    const RATE: u64 = 5;
    const LOGINS: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.sessions_per_user_max = 2;
    let world = members(folder.path(), settings).await;
    let mut open = Vec::new();
    for name in ["a", "b", "a"] {
        open.push(world.session(login("ann", name)).await);
    }
    let (connection, _reports) = world.connect().await;
    match in_time("an answer", connection.login(0, login("ann", "c"))).await {
        Err(Error::Disconnected { code, .. }) => {
            assert_eq!(code, Some(DisconnectCode::TooManySessions))
        }
        other => panic!("{other:?}"),
    }
    drop(open);
    world.stop().await;

    // Logins above the rate are refused. All have names of their own, far fewer than the maximum.
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.logins_per_s = RATE as u32;
    let world = members(folder.path(), settings).await;
    let mut ann = Raw::connect(&world).await;
    let begun = std::time::Instant::now();
    for channel in 0..LOGINS as u16 {
        ann.send(channel, 0, raw_login("ann", &format!("s-{channel}"), 0))
            .await;
    }
    let (mut accepted, mut refused) = (0, 0);
    while accepted + refused < LOGINS {
        match ann.next_with_heartbeats().await.1 {
            ServerMessage::LoginAccepted(_) => accepted += 1,
            ServerMessage::Disconnect(end) => {
                assert_eq!(end.code, DisconnectCode::TooManySessions.code());
                refused += 1;
            }
            _ => {}
        }
    }
    // A burst, and what the rate has replenished since.
    let most = RATE + RATE * (begun.elapsed().as_secs() + 1);
    assert!(
        (RATE..=most).contains(&accepted),
        "{accepted}, {most} at most"
    );
    assert!(refused > 0, "no login of {LOGINS} was above the rate");
    world.stop().await;
}

#[tokio::test]
async fn t49_sessions_logging_in_together_share_one_trading_hold() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), Settings::default()).await;
    let _open = tokio::join!(
        world.session(with_money("ann", "a")),
        world.session(with_money("ann", "b")),
        world.session(with_money("ann", "c")),
        world.session(with_money("ann", "d")),
    );
    let holds = world.trading_holds("ann").await;
    let undrawn = holds.iter().map(|hold| text(&hold.undrawn));
    assert_eq!(undrawn.collect::<Vec<_>>(), ["50000.00"]);
    let mut active = world.holds("ann", "CFA-RUB").await;
    active.retain(|hold| hold.status() == HoldStatus::Active);
    let ids = active.iter().map(|hold| &hold.hold_id);
    assert_eq!(ids.collect::<Vec<_>>(), [&holds[0].hold_id]);
    let held = ("100000.00".into(), "50000.00".into(), "50000.00".into());
    assert_eq!(world.balance("ann", "CFA-RUB").await, held);
    world.stop().await;
}

/// Waits until there are no bids.
async fn until_no_bids(world: &World) {
    until_true("no bid is open", async || world.book().await.0.is_empty()).await;
}

// rows: R341
#[tokio::test]
async fn r341_a_new_login_does_not_refill_the_rate() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 50;
    settings.gateway.user_throttle_per_s = 80;
    let world = members(folder.path(), settings).await;
    let begun = std::time::Instant::now();
    let (mut acked, mut refused, mut id) = (0, 0, 0);
    // Two sessions log in by turns, each login on a new connection.
    for round in 0..6 {
        let options = LoginOptions {
            from_now: true,
            ..with_money("ann", if round % 2 == 0 { "a" } else { "b" })
        };
        let (ann, mut reports) = world.session(options).await;
        for _ in 0..60 {
            id += 1;
            ann.send(0, wire_order(id, Side::Buy, 100, 1))
                .await
                .unwrap();
        }
        let mut answers = 0;
        while answers < 60 {
            match next_report(&mut reports).await.message {
                ServerMessage::OrderAck(_) => acked += 1,
                ServerMessage::Rejected(m) => {
                    assert_eq!(m.reason, RejectReason::Throttle);
                    refused += 1;
                }
                _ => continue,
            }
            answers += 1;
        }
    }
    // The user's rate allows a burst and what it has replenished since.
    let most = 80 + 80 * (begun.elapsed().as_secs() + 1);
    assert!(
        acked >= 80 && acked <= most,
        "{acked} of {id}, {most} at most"
    );
    assert!(refused > 0);
    world.stop().await;
}

/// Requests without a client sequence count in the rate too. Above it their answers state the wait.
// rows: R341
#[tokio::test]
async fn r341_answers_without_a_client_sequence_state_the_wait_above_the_rate() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 1;
    let world = members(folder.path(), settings).await;
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    let listing = |request_id| wire::OpenOrders {
        request_id,
        scope: 0,
    };
    // In one write: the first one uses up the rate of the next second.
    let requests: [wire::ClientMessage; 4] = [
        listing(1).into(),
        listing(2).into(),
        wire::Retransmit {
            request_id: 3,
            first: 1,
            last: 1,
        }
        .into(),
        wire::SetTradingHold {
            request_id: 4,
            asset: 0,
            undrawn_minor: 1,
        }
        .into(),
    ];
    let mut out = bytes::BytesMut::new();
    for request in &requests {
        wire::encode(request, 0, 0, &mut out);
    }
    raw.send.write_all(&out).await.unwrap();
    let mut answers = std::collections::BTreeMap::new();
    while answers.len() < requests.len() {
        let (request_id, outcome, limit) = match raw.next_with_heartbeats().await.1 {
            ServerMessage::OpenOrdersEnd(end) => (end.request_id, end.outcome, end.limit),
            ServerMessage::RetransmitEnd(end) => (end.request_id, end.outcome, end.limit),
            ServerMessage::TradingHold(hold) => (hold.request_id, hold.outcome, hold.limit),
            _ => continue,
        };
        answers.insert(request_id, (outcome, limit));
    }
    assert_eq!(answers[&1], (wire::REQUEST_DONE, 0));
    for request_id in 2..=4 {
        let (outcome, wait_us) = answers[&request_id];
        assert_eq!(outcome, RejectReason::Throttle.code(), "{request_id}");
        assert!(
            (1..=1_000_000).contains(&wait_us),
            "{request_id}: {wait_us}"
        );
    }
    world.stop().await;
}

// rows: R345
#[tokio::test]
async fn r345_a_session_past_its_rate_cancels_its_open_orders() {
    const UNKNOWN: u64 = 100;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 5;
    let world = members(folder.path(), settings).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let begun = std::time::Instant::now();
    for id in 1..=5 {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
        until(&mut of_ann, ack).await;
    }
    let named = |client_order_id| wire::Cancel {
        client_order_id,
        engine_order_id: 0,
    };
    // Cancels of an unknown order count in the rate and use it up. The cancels of open orders after
    // them pass.
    for _ in 0..UNKNOWN {
        ann.send(0, named(77)).await.unwrap();
    }
    for id in 1..=4 {
        ann.send(0, named(id)).await.unwrap();
    }
    let all = wire::MassCancel {
        scope: 1,
        instrument: wire::ALL_INSTRUMENTS,
        side: wire::BOTH_SIDES,
    };
    ann.send(0, all).await.unwrap();
    let (mut gone, mut throttled, mut in_rate) = (Vec::new(), 0, 0);
    while gone.len() < 5 {
        match next_report(&mut of_ann).await.message {
            ServerMessage::Cancelled(m) => gone.push(m.client_order_id),
            ServerMessage::Rejected(m) if m.reason == RejectReason::Throttle => {
                assert_eq!((m.request, m.client_order_id), (RequestKind::Cancel, 77));
                throttled += 1;
            }
            ServerMessage::Rejected(m) => {
                assert_eq!(m.reason, RejectReason::UnknownOrder);
                in_rate += 1;
            }
            _ => {}
        }
    }
    assert_eq!(gone, [1, 2, 3, 4, 5]);
    assert_eq!(throttled + in_rate, UNKNOWN);
    // The orders and a part of the unknown cancels are within the rate.
    let most = 5 + 5 * (begun.elapsed().as_secs() + 1);
    assert!(5 + in_rate <= most, "{in_rate}, {most} at most");
    assert!(throttled > 0, "the rate was never used up");
    world.stop().await;
}

#[tokio::test]
async fn in_flight_request_of_an_ended_session_affects_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let mut raw = Raw::connect(&world).await;
    for (channel, name) in [(0, "a"), (1, "b")] {
        raw.login(channel, raw_login("ann", name, 5_000_000)).await;
    }
    // Requests after a logout and after a refused login.
    raw.send(0, 0, wire::Logout {}).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    let unknown =
        |m: &ServerMessage| rejected(m).is_some_and(|m| m.reason == RejectReason::UnknownSession);
    assert_eq!(raw.until(unknown).await.0, 0, "unnumbered: not seen");
    raw.send(2, 0, raw_login("stranger", "x", 0)).await;
    raw.send(2, 1, wire_order(2, Side::Buy, 100, 1)).await;
    raw.until(unknown).await;
    // After a takeover by another connection the session's requests are refused here. The other
    // session continues.
    let (other, mut of_other) = world.session(login("ann", "b")).await;
    raw.until(|m| matches!(m, ServerMessage::Disconnect(end) if end.code == DisconnectCode::TakenOver.code()))
        .await;
    raw.send(1, 1, wire_order(3, Side::Buy, 100, 1)).await;
    raw.until(unknown).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    raw.send(0, 2, wire_order(4, Side::Buy, 100, 1)).await;
    raw.until(|m| ack(m).is_some()).await;
    other
        .send(0, wire_order(5, Side::Buy, 100, 1))
        .await
        .unwrap();
    until(&mut of_other, ack).await;
    world.stop().await;
}

/// M7: a channel is used again after its session has ended with a request in flight. A loss of the
/// connection disconnects the new session, not the one that logged out.
// rows: R345
#[tokio::test]
async fn r345_the_orders_of_a_new_session_on_a_used_channel_are_cancelled_on_disconnect() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let guarded = |name| wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        ..raw_login("ann", name, 5_000_000)
    };
    let mut raw = Raw::connect(&world).await;
    raw.login(0, guarded("a")).await;
    // The first order is in flight when the session ends. The second one arrives later.
    let mut out = bytes::BytesMut::new();
    let order = |id, price| wire::ClientMessage::from(wire_order(id, Side::Buy, price, 1));
    wire::encode(&order(1, 100), 0, 1, &mut out);
    wire::encode(&wire::ClientMessage::from(wire::Logout {}), 0, 0, &mut out);
    wire::encode(&order(2, 200), 0, 2, &mut out);
    raw.send.write_all(&out).await.unwrap();
    raw.until(|m| rejected(m).is_some_and(|m| m.reason == RejectReason::UnknownSession))
        .await;
    raw.login(0, guarded("b")).await;
    raw.send(0, 1, order(3, 300)).await;
    raw.until(|m| ack(m).is_some_and(|ack| ack.client_order_id == 3))
        .await;
    let bids = async || {
        let (bids, _) = world.book().await;
        bids.into_iter().map(|(price, _)| price).collect::<Vec<_>>()
    };
    assert_eq!(bids().await, ["3.00", "1.00"]);
    raw.connection.close(0_u32.into(), b"");
    until_true("the order of the new session ends", async || {
        bids().await == ["1.00"]
    })
    .await;
    world.stop().await;
}

/// Checks that a client that sends these requests and reads nothing is disconnected, and that its
/// orders are cancelled. `request` returns client sequence and message for a number from 2 on.
async fn assert_slow_consumer_closed(request: impl Fn(u64) -> (u64, wire::ClientMessage)) {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::unthrottled()).await;
    let mut raw = Raw::connect(&world).await;
    let guarded = wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        ..raw_login("ann", "a", 5_000_000)
    };
    raw.login(0, guarded).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    raw.until(|m| ack(m).is_some()).await;
    let sending = async {
        for number in 2..2_000_000u64 {
            let (seq, message) = request(number);
            let mut out = bytes::BytesMut::new();
            wire::encode(&message, 0, seq, &mut out);
            if raw.send.write_all(&out).await.is_err() {
                return;
            }
            // Lets the QUIC client read its socket, so that the close is not lost.
            tokio::task::yield_now().await;
        }
        panic!("the exchange does not close the connection");
    };
    in_time("the exchange closes the connection", sending).await;
    match in_time("the end of the connection", raw.connection.closed()).await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let code = u64::from(DisconnectCode::SlowConsumer.code());
            assert_eq!(close.error_code.into_inner(), code);
        }
        // On a busy machine this client may wake up after the exchange has forgotten the
        // connection.
        quinn::ConnectionError::Reset => {}
        // Or its socket loses datagrams until it gives up before the exchange does.
        quinn::ConnectionError::TransportError(error)
            if error.code == quinn::TransportErrorCode::INTERNAL_ERROR => {}
        other => panic!("{other}"),
    }
    until_no_bids(&world).await;
    world.stop().await;
}

/// Each refused cancel causes a numbered report of 72 bytes.
// rows: R345
#[tokio::test]
async fn r345_slow_reader_is_disconnected_and_its_orders_cancelled() {
    let cancel = wire::Cancel {
        client_order_id: 7,
        engine_order_id: 0,
    };
    assert_slow_consumer_closed(|number| (number, cancel.into())).await;
}

/// Repeats are answered with the original report under its number.
// rows: R345
#[tokio::test]
async fn r345_a_client_that_reads_no_repeats_is_disconnected() {
    assert_slow_consumer_closed(|_| (1, wire_order(1, Side::Buy, 100, 1).into())).await;
}

/// Number of instruments whose definitions take 42 KiB per login.
const INSTRUMENTS: usize = 400;

/// A world with [`INSTRUMENTS`], and a client with a small receive window.
async fn many_instruments(folder: &std::path::Path, settings: Settings) -> (World, Raw) {
    let registry = std::sync::Arc::new(testkit::Registry::default());
    registry.list(bond(BOND));
    for number in 1..INSTRUMENTS {
        registry.list(bond(&format!("OTHER-{number}")));
    }
    let identity = std::sync::Arc::default();
    let mut world = World::start(folder, settings, identity, registry).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    let mut transport = quinn::TransportConfig::default();
    transport.stream_receive_window(65_536_u32.into());
    let mut config = Raw::config(&world);
    config.transport_config(std::sync::Arc::new(transport));
    let connecting = Raw::to(world.gateway.trading_address(), config);
    let raw = in_time("the handshake", connecting).await.unwrap();
    (world, raw)
}

/// Waits until ann has this number of sessions. Sends heartbeats meanwhile. Reads less than the
/// answer to one login per second: a client that reads nothing is disconnected after a while.
async fn until_opened(world: &World, raw: &mut Raw, sessions: u16) {
    let mut read_at = std::time::Instant::now();
    until_true("the sessions are open", async || {
        raw.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
            .await;
        if read_at.elapsed() >= std::time::Duration::from_secs(1) {
            raw.read_a_little().await;
            read_at = std::time::Instant::now();
        }
        replica_sessions(world, "ann", "").0 == u32::from(sessions)
    })
    .await;
}

/// H4: instruments of logins do not count as unread. A client that hardly reads is sent those of a
/// few logins. The other logins are answered once it reads.
// rows: R341
#[tokio::test]
async fn r341_logins_on_one_connection_are_answered_as_fast_as_the_client_reads() {
    const SESSIONS: u16 = 64;
    let folder = tempfile::tempdir().unwrap();
    let (world, mut raw) = many_instruments(folder.path(), Settings::default()).await;
    for channel in 0..SESSIONS {
        let login = raw_login("ann", &format!("s-{channel}"), 0);
        raw.send(channel, 0, login).await;
    }
    until_opened(&world, &mut raw, SESSIONS).await;
    // The instruments of a later answer have the new phase.
    let (_bob, mut of_bob) = world.session(login("bob", "b")).await;
    let halt = SetTradingPhaseRequest {
        context: context(&unique()),
        instrument_id: BOND.into(),
        phase: TradingPhase::Halt.into(),
        reason: "test".into(),
    };
    let mut supervisor = world.as_caller("sandbox.market-supervisor");
    supervisor.set_trading_phase(halt).await.unwrap();
    let phase = |message: &ServerMessage| match message {
        ServerMessage::InstrumentDefinition(m) if m.id.as_str() == BOND => Some(m.phase),
        _ => None,
    };
    until(&mut of_bob, |m| {
        phase(m).filter(|phase| *phase == Phase::Halt)
    })
    .await;
    let (mut answered, mut early) = (0, 0);
    let mut definitions = [0; SESSIONS as usize];
    while answered < SESSIONS {
        let (header, message) = raw.next_with_heartbeats().await;
        match message {
            ServerMessage::InstrumentDefinition(_) => {
                definitions[usize::from(header.channel)] += 1;
                early += u16::from(phase(&message) == Some(Phase::Open));
            }
            ServerMessage::LoginAccepted(_) => {
                assert_eq!(definitions[usize::from(header.channel)], INSTRUMENTS);
                answered += 1;
            }
            ServerMessage::Disconnect(end) => panic!("{}", end.text.as_str()),
            _ => {}
        }
    }
    assert!((1..SESSIONS / 2).contains(&early), "{early}");
    raw.send(SESSIONS - 1, 1, unknown()).await;
    raw.until(|m| rejected(m).is_some()).await;
    world.stop().await;
}

/// While logins wait for a client that reads nothing, the front has no work and the hot thread
/// parks. Then the client is disconnected.
// rows: R345
#[tokio::test]
async fn r345_logins_that_wait_for_a_client_that_does_not_read_cost_no_rounds() {
    const SESSIONS: u16 = 16;
    let folder = tempfile::tempdir().unwrap();
    // On a busy machine the hot thread needs some seconds to park.
    let settings = Settings::for_unread(15_000);
    let (world, mut raw) = many_instruments(folder.path(), settings).await;
    for channel in 0..SESSIONS {
        let login = raw_login("ann", &format!("s-{channel}"), 0);
        raw.send(channel, 0, login).await;
    }
    until_opened(&world, &mut raw, SESSIONS).await;
    let parks = world.parks();
    until_true("the hot thread parks", async || world.parks() > parks + 1).await;
    let ended = raw.connection.close_reason();
    assert!(ended.is_none(), "parks only without the client: {ended:?}");
    let closing = raw.connection.closed();
    match in_time("the exchange closes the connection", closing).await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let code = u64::from(DisconnectCode::SlowConsumer.code());
            assert_eq!(close.error_code.into_inner(), code);
        }
        // On a busy machine this client may wake up after the exchange has forgotten the
        // connection.
        quinn::ConnectionError::Reset => {}
        other => panic!("{other}"),
    }
    world.stop().await;
}

/// The session of a login that is not answered yet ends with its connection.
// rows: R345
#[tokio::test]
async fn r345_the_orders_of_a_login_that_waits_for_its_client_are_cancelled_after_a_loss() {
    const SESSIONS: u16 = 41;
    let folder = tempfile::tempdir().unwrap();
    let (world, mut raw) = many_instruments(folder.path(), Settings::default()).await;
    let guarded = LoginOptions {
        cancel_on_disconnect: true,
        ..with_money("ann", "guarded")
    };
    let (ann, mut of_ann) = world.session(guarded).await;
    ann.send(0, wire_order(1, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    let placed = until(&mut of_ann, ack).await;
    for channel in 1..SESSIONS {
        let login = raw_login("ann", &format!("s-{channel}"), 0);
        raw.send(channel, 0, login).await;
    }
    until_opened(&world, &mut raw, SESSIONS).await;
    let again = wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        ..raw_login("ann", "guarded", 0)
    };
    raw.send(0, 0, again).await;
    let ended = until(&mut of_ann, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    });
    assert_eq!(ended.await, DisconnectCode::TakenOver.code());
    assert_open(&world, Some(placed)).await;
    raw.connection.close(0_u32.into(), b"");
    let id = placed.order_id.to_string();
    until_true("the order of the lost session ends", async || {
        world.order(&id).await.unwrap().cancel_reason == "CANCEL_ON_DISCONNECT"
    })
    .await;
    world.stop().await;
}

/// The peer no longer sends packets, not even acknowledgements.
// rows: R345
#[tokio::test]
async fn r345_the_orders_of_a_peer_that_falls_silent_are_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let guarded = wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        // A peer that loses its core for a moment has not fallen silent yet.
        heartbeat_ms: 5_000,
        ..raw_login("ann", "a", 5_000_000)
    };
    let (address, config) = (world.gateway.trading_address(), Raw::config(&world));
    // The peer has its own runtime. It keeps its socket open and is not polled any more.
    let peer = tokio::task::spawn_blocking(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        let raw = runtime.block_on(async {
            let mut raw = Raw::to(address, config).await.unwrap();
            raw.login(0, guarded).await;
            raw.send(0, 1, wire_order(1, Side::Buy, 1_000, 1)).await;
            raw.until(|m| ack(m).is_some()).await;
            raw
        });
        (raw, runtime)
    });
    let (raw, runtime) = peer.await.unwrap();
    let is_cancel = |event: &events::Event| event.short_type() == "OrderCancelledEvent";
    let cancels = world.events(events::topics::MARKET, 1, is_cancel).await;
    let event: OrderCancelledEvent = prost::Message::decode(&*cancels[0].payload).unwrap();
    assert_eq!(event.reason, "CANCEL_ON_DISCONNECT");
    assert_eq!(world.book().await, (vec![], vec![]));
    // The member receives the cancel after its next login.
    let options = LoginOptions {
        last_sequence: 1,
        ..login("ann", "a")
    };
    let (_back, mut reports) = world.session(options).await;
    let gone = until(&mut reports, cancelled).await;
    assert_eq!(gone.reason, CancelReason::CancelOnDisconnect);
    drop(raw);
    runtime.shutdown_background();
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_heartbeats_use_requested_interval_not_replace_login() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.login_timeout_ms = 4_000;
    let world = members(folder.path(), settings).await;
    // A client that sends only heartbeats stays connected for longer than its interval.
    let mut beating = Raw::connect(&world).await;
    let seldom = wire::Login {
        heartbeat_ms: 6_000,
        ..raw_login("bob", "b", 0)
    };
    beating.login(0, seldom).await;
    let beating = tokio::spawn(async move {
        // The server sends a heartbeat after 3 s without a message. `until` sends one every second.
        for _ in 0..3 {
            beating
                .until(|m| matches!(m, ServerMessage::ServerHeartbeat(_)))
                .await;
        }
        beating
            .send(0, 1, wire_order(1, Side::Sell, 1_000, 1))
            .await;
        beating.until(|m| ack(m).is_some()).await;
    });
    // A client that is silent for its requested interval is closed, although the server's default
    // is 10 s.
    let mut silent = Raw::connect(&world).await;
    let often = wire::Login {
        heartbeat_ms: 2_000,
        ..raw_login("ann", "a", 0)
    };
    silent.send(0, 0, often).await;
    let accepted = silent.until(|m| matches!(m, ServerMessage::LoginAccepted(_)));
    let (_, accepted) = accepted.await;
    assert!(matches!(accepted, ServerMessage::LoginAccepted(a) if a.heartbeat_ms == 2_000));
    silent
        .until(|m| matches!(m, ServerMessage::ServerHeartbeat(_)))
        .await;
    let code = DisconnectCode::HeartbeatTimeout.code();
    assert_eq!(silent.end().await, (Some(code), u64::from(code)));
    // Without a login heartbeats do not keep the connection open.
    let mut idle = Raw::connect(&world).await;
    let mut out = bytes::BytesMut::new();
    let beat = wire::ClientMessage::from(wire::Heartbeat {});
    wire::encode(&beat, wire::CONNECTION_CHANNEL, 0, &mut out);
    until_true("the exchange closes the connection", async || {
        idle.send.write_all(&out).await.is_err()
    })
    .await;
    let code = DisconnectCode::LoginExpected.code();
    assert_eq!(idle.end().await.1, u64::from(code));
    beating.await.unwrap();
    world.stop().await;
}

/// M11: QUIC's keep-alive does not extend the time to log in, with or without a stream.
// rows: R343
#[tokio::test]
async fn r343_a_connection_without_a_stream_ends_at_the_login_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.login_timeout_ms = 3_000;
    let world = World::with(folder.path(), settings).await;
    let mut transport = quinn::TransportConfig::default();
    transport.keep_alive_interval(Some(std::time::Duration::from_millis(100)));
    let mut config = Raw::config(&world);
    config.transport_config(std::sync::Arc::new(transport));
    let endpoint = quinn::Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    let address = world.gateway.trading_address();
    let connecting = endpoint.connect_with(config, address, "cfa-trade").unwrap();
    let connection = in_time("the handshake", connecting).await.unwrap();
    let ended = in_time("the exchange closes the connection", connection.closed()).await;
    let quinn::ConnectionError::ApplicationClosed(close) = &ended else {
        panic!("{ended}");
    };
    let code = DisconnectCode::LoginExpected.code();
    assert_eq!(close.error_code.into_inner(), u64::from(code));
    world.stop().await;
}

/// M11: one credential does not keep a connection open after its last session. A session that is
/// left, and a new login, do.
// rows: R343
#[tokio::test]
async fn r343_a_connection_without_a_session_ends_at_the_login_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.login_timeout_ms = 3_000;
    let world = members(folder.path(), settings).await;
    let mut raw = Raw::connect(&world).await;
    let of = |name| wire::Login {
        heartbeat_ms: 4_000,
        ..raw_login("ann", name, 0)
    };
    raw.login(0, of("a")).await;
    raw.log_out(0).await;
    raw.login(0, of("a")).await;
    raw.login(1, of("b")).await;
    raw.log_out(1).await;
    // The server sends a heartbeat after 2 s without a message: two of them exceed the deadline.
    for _ in 0..2 {
        raw.until(|m| matches!(m, ServerMessage::ServerHeartbeat(_)))
            .await;
    }
    raw.log_out(0).await;
    let mut beat = bytes::BytesMut::new();
    let message = wire::ClientMessage::from(wire::Heartbeat {});
    wire::encode(&message, wire::CONNECTION_CHANNEL, 0, &mut beat);
    until_true("the exchange closes the connection", async || {
        raw.send.write_all(&beat).await.is_err()
    })
    .await;
    let ended = raw.connection.close_reason();
    let Some(quinn::ConnectionError::ApplicationClosed(close)) = &ended else {
        panic!("{ended:?}");
    };
    let code = DisconnectCode::LoginExpected.code();
    assert_eq!(close.error_code.into_inner(), u64::from(code));
    world.stop().await;
}

#[tokio::test]
async fn connections_are_limited_per_address_and_in_total() {
    // One address gets half of all places.
    for (per_address, in_all) in [(2, 1_024), (512, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = Settings::default();
        settings.gateway.connections_per_address_max = per_address;
        settings.gateway.connections_max = in_all;
        let world = members(folder.path(), settings).await;
        let first = Raw::connect(&world).await;
        let _second = Raw::connect(&world).await;
        let refused = Raw::try_connect(&world).await.err();
        assert!(
            matches!(refused, Some(quinn::ConnectionError::ConnectionClosed(_))),
            "{refused:?}"
        );
        first.connection.close(0_u32.into(), b"");
        until_true("a connection is accepted again", async || {
            Raw::try_connect(&world).await.is_ok()
        })
        .await;
        world.stop().await;
    }
}

/// A connection whose first packet fails the handshake, here for its protocol, takes no place, in
/// total and of its address.
#[tokio::test]
async fn connections_whose_handshake_fails_take_no_place() {
    const PLACES: u32 = 3;
    /// The TLS alert `no_application_protocol`.
    const NO_APPLICATION_PROTOCOL: u8 = 120;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.connections_per_address_max = PLACES;
    settings.gateway.connections_max = 2 * PLACES;
    let world = members(folder.path(), settings).await;
    let address = world.gateway.trading_address();
    for attempt in 0..=PLACES {
        let connecting = Raw::to(address, Raw::config_of(&world, b"other"));
        let failed = in_time("the handshake fails", connecting).await.err();
        let Some(quinn::ConnectionError::ConnectionClosed(close)) = &failed else {
            panic!("{attempt}: {failed:?}");
        };
        let code = quinn::TransportErrorCode::crypto(NO_APPLICATION_PROTOCOL);
        assert_eq!(close.error_code, code, "{attempt}");
    }
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    world.stop().await;
}

/// `design.md` 7: above the limit, handshakes from spoofed addresses create no state.
#[tokio::test]
async fn address_is_validated_past_64_half_open_connections() {
    use transport::proto as quic;
    const BOUND: usize = 64;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    // On a slow machine the first connections would end before the last one begins.
    settings.gateway.login_timeout_ms = 600_000;
    settings.gateway.heartbeat_ms = 60_000;
    let world = members(folder.path(), settings).await;
    let address = world.gateway.trading_address();
    let config = std::sync::Arc::new(quic::EndpointConfig::default());
    let mut endpoint = quic::Endpoint::new(config, None, true, None);
    let mut sockets = Vec::new();
    for begun in 0..=BOUND {
        let now = std::time::Instant::now();
        let connecting = endpoint.connect(now, Raw::config(&world), address, "cfa-trade");
        let (_, mut connection) = connecting.unwrap();
        let mut initial = Vec::new();
        let sent = connection.poll_transmit(now, 1, &mut initial);
        assert!(sent.is_some());
        // Each handshake has its own socket and sends only its first datagram. The first datagram
        // received is the answer.
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.send_to(&initial, address).await.unwrap();
        let mut answer = [0; 2_048];
        let answered = socket.recv(&mut answer);
        in_time("an answer", answered).await.unwrap();
        let is_retry = answer[0] & 0x30 == 0x30;
        assert_eq!(is_retry, begun == BOUND, "after {begun}");
        sockets.push(socket);
    }
    // A client that completes a Retry is accepted.
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_trades_during_a_login_are_reported_once_and_in_order() {
    const LOTS: u64 = 400;
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::unthrottled()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    ann.send(0, wire_order(1, Side::Buy, 1_000, LOTS))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    drop((ann, of_ann));
    // After a restart the front knows no session. Ann's session opens while its order trades.
    let world = world.restart(Settings::default()).await;
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    let (ann, mut of_ann) = world.connect().await;
    let selling = async {
        for id in 1..=LOTS {
            bob.send(0, wire_order(id, Side::Sell, 1_000, 1))
                .await
                .unwrap();
            tokio::task::yield_now().await;
        }
    };
    let both = async { tokio::join!(ann.login(0, login("ann", "a")), selling) };
    let (logged_in, ()) = in_time("the login is answered", both).await;
    logged_in.unwrap();
    // The acknowledgement of the order, and one fill per lot.
    for number in 1..=LOTS + 1 {
        assert_eq!(next_numbered(&mut of_ann).await.sequence, number);
    }
    until(&mut of_bob, |m| {
        fill(m).filter(|fill| fill.client_order_id == LOTS)
    })
    .await;
    world.stop().await;
}
