//! What a client that has lost messages gets again: open orders, ranges of messages, the messages
//! after a resume, and the first answer to a repeat, from the window or from the journal.

use client::LoginOptions;
use sequencer::Layout;
use types::{RejectReason, Side};
use wire::ServerMessage;

use crate::checkpoints::cancel_own;
use crate::sessions::{Raw, members, raw_login, unknown};
use crate::world::*;

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
pub async fn answers(raw: &mut Raw, repeats: u64, first: &(u64, ServerMessage)) -> (u64, u64) {
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
