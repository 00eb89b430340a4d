//! Reports on money that a session did not move itself: trading holds, settlement, bust trades,
//! ledger balances.

use client::{Report, Reports};
use proto::market::v1::*;
use types::command::{Bust, FundingCause, TradeParty};
use types::{Command, Handle, Id128, InstrumentIx, SessionIx, Side};
use wire::{ServerMessage, SettlementProgress, TradeBusted, TradingHoldChanged};

use crate::world::*;

fn changed(message: &ServerMessage) -> Option<TradingHoldChanged> {
    match message {
        ServerMessage::TradingHoldChanged(changed) => Some(*changed),
        _ => None,
    }
}

fn progress(message: &ServerMessage) -> Option<SettlementProgress> {
    match message {
        ServerMessage::SettlementProgress(progress) => Some(*progress),
        _ => None,
    }
}

fn busted(message: &ServerMessage) -> Option<TradeBusted> {
    match message {
        ServerMessage::TradeBusted(busted) => Some(*busted),
        _ => None,
    }
}

/// Sets the undrawn amount by call, without a session.
async fn adjust(world: &World, user: &str, hold_id: &str, undrawn: &str) {
    let request = AdjustTradingHoldRequest {
        context: context(&unique()),
        hold_id: hold_id.into(),
        undrawn: decimal(undrawn),
    };
    let adjusted = world.trader(user).adjust_trading_hold(request).await;
    adjusted.expect("there is enough");
}

/// Reads numbered messages up to the number `last`.
async fn read_to(reports: &mut Reports, last: u64) -> Vec<(u64, ServerMessage)> {
    let mut all = Vec::new();
    while all.last().is_none_or(|(number, _)| *number < last) {
        let report = next_numbered(reports).await;
        all.push((report.sequence, report.message));
    }
    all
}

// rows: R160 R343
#[tokio::test]
async fn r343_trading_hold_changes_are_reported_and_resent() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let hold = world.open_hold("ann", "CFA-RUB", "600").await;
    let hold_id = Id128::parse(&hold.hold_id).unwrap();
    let (ann, mut of_ann) = world.session(login("ann", "a")).await;
    let (_other, mut of_other) = world.session(login("ann", "b")).await;
    // Draws 100.00 and the fee of 0.10.
    ann.send(0, wire_order(1, Side::Buy, 10_000, 1))
        .await
        .unwrap();
    assert_eq!(next_numbered(&mut of_ann).await.sequence, 1);
    let check = |report: Report, number: u64, undrawn: i64, cause: FundingCause| {
        let change = changed(&report.message).unwrap_or_else(|| panic!("{report:?}"));
        assert_eq!((report.sequence, change.asset), (number, 0));
        let figures = (change.undrawn_minor, change.drawn_minor);
        assert_eq!(figures, (undrawn, 10_010), "{cause}");
        assert_eq!((change.hold_id, change.cause), (hold_id, cause));
        change
    };
    adjust(&world, "ann", &hold.hold_id, "700").await;
    let funded = check(
        next_numbered(&mut of_ann).await,
        2,
        70_000,
        FundingCause::Fund,
    );
    // The user's other session gets the same message under its own number.
    let same = check(
        next_numbered(&mut of_other).await,
        1,
        70_000,
        FundingCause::Fund,
    );
    assert_eq!(same, funded);

    // A change while the client is disconnected.
    cut(&ann, &mut of_ann).await;
    adjust(&world, "ann", &hold.hold_id, "50").await;
    let infos = ann.resume().await.unwrap();
    assert_eq!(infos[0].1.next_sequence, 3);
    let defunded = next_numbered(&mut of_ann).await;
    let defunded = check(defunded, 3, 5_000, FundingCause::Defund);
    assert!(defunded.node_sequence > funded.node_sequence);
    // The session's own request causes a report too. Report and answer arrive in any order.
    let set = wire::SetTradingHold {
        request_id: 9,
        asset: 0,
        undrawn_minor: 6_000,
    };
    ann.send(0, set).await.unwrap();
    let (mut is_reported, mut is_answered) = (false, false);
    while !(is_reported && is_answered) {
        let report = next_report(&mut of_ann).await;
        if report.sequence != 0 {
            check(report, 4, 6_000, FundingCause::Fund);
            is_reported = true;
        } else if let ServerMessage::TradingHold(hold) = report.message {
            assert_eq!((hold.undrawn_minor, hold.drawn_minor), (6_000, 10_010));
            is_answered = true;
        }
    }

    let service = world.gateway.service();
    assert!(!service.health.failing().contains_key("session-messages"));

    // All messages are resent from memory, and after a restart from the journal.
    let (again, mut reports) = world.session(login("ann", "a")).await;
    let live = read_to(&mut reports, 4).await;
    assert_eq!(live[1], (2, funded.into()));
    assert_eq!(live[2], (3, defunded.into()));
    drop((ann, of_ann, again, reports));
    let world = world.restart(Settings::default()).await;
    let (_again, mut reports) = world.session(login("ann", "a")).await;
    assert_eq!(read_to(&mut reports, 4).await, live);
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_both_sessions_of_a_trade_get_a_report_when_it_is_final_or_bust() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "0", "10").await;
    world.open_hold("ann", "CFA-RUB", "600").await;
    world.open_hold("bob", BOND, "10").await;
    let (ann, mut of_ann) = world.session(login("ann", "a")).await;
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    let (_idle, mut of_idle) = world.session(login("bob", "idle")).await;
    ann.send(0, wire_order(41, Side::Buy, 1_000, 2))
        .await
        .unwrap();
    bob.send(0, wire_order(42, Side::Sell, 1_000, 2))
        .await
        .unwrap();
    let bought = until(&mut of_ann, fill).await;
    let sold = until(&mut of_bob, fill).await;
    for reports in [&mut of_ann, &mut of_bob] {
        let passes = |m: &ServerMessage| {
            let body = progress(m)?;
            assert!(body.finalized_sequence <= body.posted_sequence);
            assert!(body.posted_sequence >= bought.node_sequence);
            (body.finalized_sequence >= bought.node_sequence).then_some(body)
        };
        let last = until(reports, passes).await;
        assert_eq!(last.trades_final, 1);
    }
    // Settlement journals this command when the chain has refused a trade for good.
    let party = |session: SessionIx, fill: &wire::Fill| TradeParty {
        session,
        handle: Handle::from_engine_id(fill.engine_order_id),
        client_order_id: fill.client_order_id,
    };
    let session_of = |name| {
        let sessions = |state: &replica::State| -> Vec<SessionIx> {
            let admission = state.core().admission();
            let user = admission.user_ix(&types::UserId::new(name).unwrap());
            let own = admission.sessions();
            let own = own.filter(|(_, row)| Some(row.user) == user);
            own.map(|(session, _)| session).collect()
        };
        world.replica().read(sessions)[0]
    };
    let bust = Bust {
        trade: bought.trade_id,
        trade_number: bought.trade_number,
        instrument: InstrumentIx(bought.instrument),
        buy: party(session_of("ann"), &bought),
        sell: party(session_of("bob"), &sold),
    };
    world.journal(Command::Bust(bust)).await;
    for (reports, fill) in [(&mut of_ann, &bought), (&mut of_bob, &sold)] {
        let body = until(reports, busted).await;
        assert_eq!(
            (body.client_order_id, body.engine_order_id, body.side),
            (fill.client_order_id, fill.engine_order_id, fill.side)
        );
        assert_eq!(
            (body.trade_id, body.trade_number, body.instrument),
            (bought.trade_id, bought.trade_number, bought.instrument)
        );
    }
    let is_bust = |event: &events::Event| event.short_type() == "TradeBustedEvent";
    let event = world
        .events(events::topics::MARKET, 1, is_bust)
        .await
        .remove(0);
    let told: TradeBustedEvent = prost::Message::decode(&*event.payload).unwrap();
    assert_eq!(
        (
            told.trade_id,
            told.instrument_id.as_str(),
            told.trade_number
        ),
        (bought.trade_id.to_string(), BOND, bought.trade_number)
    );
    // The session without a trade has got no message.
    adjust_units(&world, "bob", "3").await;
    let first = next_numbered(&mut of_idle).await;
    assert_eq!(first.sequence, 1);
    assert_eq!(changed(&first.message).map(|body| body.asset), Some(1));

    // The messages from the journal have the same numbers and contents.
    let last = ann.last_sequence(0);
    let (again, mut reports) = world.session(login("ann", "a")).await;
    let live = read_to(&mut reports, last).await;
    drop((ann, bob, of_ann, of_bob, of_idle, again, reports));
    let world = world.restart(Settings::default()).await;
    let (_again, mut reports) = world.session(login("ann", "a")).await;
    assert_eq!(read_to(&mut reports, last).await, live);
    world.stop().await;
}

async fn adjust_units(world: &World, user: &str, undrawn: &str) {
    let hold = world.trading_holds(user).await.remove(0);
    adjust(world, user, &hold.hold_id, undrawn).await;
}

fn balance(message: &ServerMessage) -> Option<(u32, i64)> {
    match message {
        ServerMessage::LedgerBalance(m) if m.time_ns > 0 => Some((m.asset, m.balance_minor)),
        _ => None,
    }
}

// rows: R343
#[tokio::test]
async fn r343_sessions_receive_own_balances_only_unnumbered() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "1000", "10").await;
    let (_ann, mut of_ann) = world.session(login("ann", "a")).await;
    let (_same, mut of_same) = world.session(login("ann", "b")).await;
    let (_bob, mut of_bob) = world.session(login("bob", "a")).await;
    // Balances are conflated: only the last one is certain to arrive.
    for _ in 0..20 {
        world.deposit("ann", "CFA-RUB", "1").await;
    }
    world.deposit("ann", BOND, "3").await;
    world.deposit("bob", BOND, "5").await;
    for reports in [&mut of_ann, &mut of_same] {
        let mut last = std::collections::BTreeMap::from([(0, 0), (1, 0)]);
        while last != [(0, 102_000), (1, 3)].into() {
            let report = next_report(reports).await;
            let Some((asset, minor)) = balance(&report.message) else {
                continue;
            };
            assert_eq!(report.sequence, 0, "no number, so no retransmission");
            let before = last.insert(asset, minor);
            assert!(before.is_some_and(|before| before < minor), "{last:?}");
        }
    }
    let of_bonds = |m: &ServerMessage| balance(m).filter(|body| *body == (1, 15));
    until(&mut of_bob, of_bonds).await;
    world.stop().await;
}
