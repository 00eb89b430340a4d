//! What admission draws, returns and refuses: one example per rule.

mod support;

use admission::*;
use support::*;
use types::command::{
    BlockCause, BoundsOf, Bust, MassScope, OrderBounds, RequestKind, SetBudget, SetOrderBounds,
    TradeParty,
};
use types::*;

const ALICE: u32 = 0;
const BOB: u32 = 1;

fn minor(main: i64, fee: i64) -> Reserve {
    Reserve {
        main: Minor(main),
        fee: Minor(fee),
    }
}

// rows: R151
#[test]
fn r151_buy_draws_total_and_fee_reserve_rounded_up() {
    let mut market = Market::small();
    market.place(limit(ALICE, Side::Buy, 10_001, 7));
    let totals = market.money(ALICE);
    assert_eq!(totals.reserved, minor(70_007, 71));
    assert_eq!(totals.undrawn, Minor(1_000_000 - 70_007 - 71));
    assert_eq!(totals.held(), Minor(1_000_000));
}

// rows: R152
#[test]
fn r152_sell_draws_units_and_a_short_sell_is_refused() {
    let mut market = Market::small();
    market.place(limit(ALICE, Side::Sell, 10_000, 600));
    assert_eq!(market.units(ALICE).reserved, minor(60_000, 0));
    let reject = market.refuse(Request::New(limit(ALICE, Side::Sell, 10_000, 401)));
    assert_eq!(reject.reason, RejectReason::InsufficientBalance);
    let details = RejectDetails::Balance {
        undrawn: Minor(40_000),
        main: Minor(40_100),
        fee: Minor::ZERO,
    };
    assert_eq!(reject.details, details);
    market.place(limit(ALICE, Side::Sell, 10_000, 400));
}

#[test]
fn t05_the_fee_reserve_must_be_covered_too() {
    let mut market = Market::small();
    // 100 * 100.00 is all of the money: nothing is left for the fee.
    let reject = market.refuse(Request::New(limit(ALICE, Side::Buy, 10_000, 100)));
    assert_eq!(reject.reason, RejectReason::InsufficientBalance);
    let details = RejectDetails::Balance {
        undrawn: Minor(1_000_000),
        main: Minor(1_000_000),
        fee: Minor(1_000),
    };
    assert_eq!(reject.details, details);
}

#[test]
fn t20_price_improvement_goes_back_to_the_trading_hold() {
    let mut market = Market::small();
    market.place(limit(BOB, Side::Sell, 10_000, 10));
    let order = market.place(limit(ALICE, Side::Buy, 10_500, 20));
    // 10 filled at 100.00 (fee 1.00), 10 still open at 105.00.
    let totals = market.money(ALICE);
    assert_eq!(market.room.order(order).unwrap().open, Lots(10));
    assert_eq!(totals.reserved, minor(105_000, 105));
    assert_eq!(
        totals.undrawn,
        Minor(1_000_000 - 100_000 - 100 - 105_000 - 105)
    );
    let trade: Vec<_> = market
        .effects
        .iter()
        .filter(|e| e.spent != Reserve::ZERO)
        .collect();
    assert_eq!(trade.len(), 2, "maker and taker");
    assert!(trade[0].closed && trade[0].spent == minor(1_000, 0));
    assert_eq!(trade[1].spent, minor(100_000, 100));
    assert_eq!(trade[1].returned, minor(5_000, 5));
    assert!(!trade[1].closed);
}

// rows: R160 R161
#[test]
fn r160_cancel_returns_everything_once_and_r161_again_is_refused() {
    let mut market = Market::small();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 10));
    market
        .execute(cancel(ALICE, OrderRef::Handle(order)))
        .unwrap();
    assert_eq!(market.money(ALICE).undrawn, Minor(1_000_000));
    assert_eq!(market.money(ALICE).orders, 0);
    let again = market.refuse(cancel(ALICE, OrderRef::Handle(order)));
    assert_eq!(again.reason, RejectReason::OrderNotOpen);
    let unknown = Handle {
        slot: 63,
        generation: 1,
    };
    let reject = market.refuse(cancel(ALICE, OrderRef::Handle(unknown)));
    assert_eq!(reject.reason, RejectReason::UnknownOrder);
}

#[test]
fn a_cancel_needs_the_owner_or_the_platform() {
    let mut market = Market::small();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 1));
    let reject = market.refuse(cancel(BOB, OrderRef::Handle(order)));
    assert_eq!(reject.reason, RejectReason::NotOwner);
    let operator = UserIx::NONE.0;
    market
        .execute(cancel(operator, OrderRef::Handle(order)))
        .unwrap();
    assert!(market.room.order(order).is_none());
}

#[test]
fn a_refusal_of_the_book_returns_the_draw() {
    let mut market = Market::small();
    market
        .submit(Request::SetPhase {
            instrument: InstrumentIx(0),
            phase: Phase::Halt,
            cancel_orders: false,
            lifts_halt: true,
            key_hash: Id128::NONE,
        })
        .unwrap();
    market.place(limit(ALICE, Side::Buy, 10_000, 10));
    assert_eq!(market.money(ALICE).undrawn, Minor(1_000_000));
    let closed = market.effects.last().unwrap();
    assert!(closed.closed);
    assert_eq!(closed.returned, minor(100_000, 100));
}

// rows: R173
#[test]
fn r173_t19_market_order_gets_a_protection_price() {
    let mut market = Market::small();
    let ask = |market: &Market, request: NewRequest| {
        let command = market
            .room
            .admit(&Request::New(request), START_NS + 1_000_000);
        let Ok(Command::New(c)) = command else {
            panic!("{command:?}");
        };
        (c.price, c.draw)
    };
    // No best price: a buy is limited by the band; a sell draws only its units.
    assert_eq!(
        ask(&market, market_order(ALICE, Side::Buy, 1)),
        (Ticks(100_000), minor(100_000, 100))
    );
    assert_eq!(
        ask(&market, market_order(ALICE, Side::Sell, 1)),
        (Ticks(1), minor(100, 0))
    );
    market.place(limit(BOB, Side::Sell, 10_000, 10));
    assert_eq!(
        ask(&market, market_order(ALICE, Side::Buy, 1)),
        (Ticks(10_500), minor(10_500, 11))
    );
    // Its own protection, capped by the band.
    let own = NewRequest {
        price: Some(Ticks(10_100)),
        ..market_order(ALICE, Side::Buy, 1)
    };
    assert_eq!(ask(&market, own).0, Ticks(10_100));
    let far = NewRequest {
        price: Some(Ticks(200_000)),
        ..own
    };
    assert_eq!(ask(&market, far).0, Ticks(100_000));
    // Within the band its own price applies: a protection is capped, never widened.
    let mut narrower = spec("BOND-1", 100_000);
    narrower.band_low = Ticks(9_000);
    market.execute(Request::SetInstrument(narrower)).unwrap();
    let short = NewRequest {
        price: Some(Ticks(8_500)),
        ..own
    };
    assert_eq!(ask(&market, short).0, Ticks(8_500));
    let dear = NewRequest {
        price: Some(Ticks(120_000)),
        ..market_order(ALICE, Side::Sell, 1)
    };
    assert_eq!(ask(&market, dear).0, Ticks(120_000));
    market.place(market_order(ALICE, Side::Buy, 4));
    assert_eq!(market.money(ALICE).undrawn, Minor(1_000_000 - 40_000 - 40));
    let gtc = NewRequest {
        time_in_force: TimeInForce::Gtc,
        ..own
    };
    let reject = market.refuse(Request::New(gtc));
    assert_eq!(reject.reason, RejectReason::InvalidCombination);
}

#[test]
fn t19_without_band_and_best_price_nothing_is_spent() {
    let mut market = Market::empty();
    let ix = market.instrument(spec("FREE-1", Ticks::ORDER_MAX.0));
    let user = market.user("alice");
    market.fund(user, AssetIx::MONEY, 5);
    market.fund(user, AssetIx::units(ix), 100);
    for side in [Side::Buy, Side::Sell] {
        let order = market.place(market_order(0, side, 1_000));
        let effect = market.effects.last().unwrap();
        assert_eq!(effect.order.handle, order);
        assert!(effect.closed && effect.returned == Reserve::ZERO);
    }
}

#[test]
fn t22_amend_draws_the_growth_and_returns_the_rest() {
    let mut market = Market::small();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 10));
    market
        .execute(amend(ALICE, order, Some(11_000), None))
        .unwrap();
    assert_eq!(market.money(ALICE).reserved, minor(110_000, 110));
    market.execute(amend(ALICE, order, None, Some(4))).unwrap();
    assert_eq!(market.money(ALICE).reserved, minor(44_000, 44));
    // Refused by the book: the growth is returned.
    market
        .execute(amend(ALICE, order, Some(200_000), None))
        .unwrap();
    assert_eq!(market.money(ALICE).reserved, minor(44_000, 44));
    assert_eq!(market.money(ALICE).held(), Minor(1_000_000));
    let reject = market.refuse(amend(ALICE, order, None, Some(1_000)));
    assert_eq!(reject.reason, RejectReason::InsufficientBalance);
    let reject = market.refuse(amend(ALICE, order, None, None));
    assert_eq!(reject.reason, RejectReason::InvalidAmend);
}

#[test]
fn amends_in_flight_cover_the_worst_of_their_outcomes() {
    let mut market = Market::small();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 10));
    market
        .submit(amend(ALICE, order, Some(9_000), None))
        .unwrap();
    market
        .submit(amend(ALICE, order, Some(11_000), None))
        .unwrap();
    market
        .submit(amend(ALICE, order, Some(8_000), Some(12)))
        .unwrap();
    assert_eq!(
        market.money(ALICE).reserved,
        minor(132_000, 132),
        "worst price times worst quantity"
    );
    market.drain();
    assert_eq!(market.money(ALICE).reserved, minor(96_000, 96));
    // The order is gone when its amend arrives.
    market
        .submit(cancel(ALICE, OrderRef::Handle(order)))
        .unwrap();
    market
        .submit(amend(ALICE, order, Some(9_500), None))
        .unwrap();
    market.drain();
    assert_eq!(market.money(ALICE).undrawn, Minor(1_000_000));
}

#[test]
fn d37_client_order_ids_are_unique_among_open_orders() {
    let mut market = Market::small();
    let named = |user, id| NewRequest {
        client_order_id: id,
        ..limit(user, Side::Buy, 10_000, 1)
    };
    let order = market.place(named(ALICE, 5));
    let reject = market.refuse(Request::New(named(ALICE, 5)));
    assert_eq!(reject.reason, RejectReason::DuplicateClientOrderId);
    assert_eq!(reject.details, RejectDetails::Order(order));
    market.place(named(BOB, 5));
    market.execute(cancel(ALICE, OrderRef::Client(5))).unwrap();
    assert!(market.room.order(order).is_none());
    let reject = market.refuse(cancel(ALICE, OrderRef::Client(5)));
    assert_eq!(reject.reason, RejectReason::UnknownOrder);
    let again = market.place(named(ALICE, 5));
    assert_ne!(again, order, "the handle is never the same");
}

#[test]
fn a_resend_has_no_effect() {
    let mut market = Market::small();
    let session = market.session(UserIx(ALICE), 77);
    let order = |client_seq| {
        Request::New(NewRequest {
            session,
            client_seq,
            ..limit(ALICE, Side::Buy, 10_000, 1)
        })
    };
    market.execute(order(3)).unwrap();
    for seq in [1, 3] {
        let reject = market.refuse(order(seq));
        assert_eq!(reject.reason, RejectReason::AlreadySeen);
        assert_eq!(reject.details, RejectDetails::ClientSeq(3));
        assert_eq!(market.room.refusal(&order(seq), &reject), None);
    }
    market.execute(order(4)).unwrap();
    assert_eq!(market.money(ALICE).orders, 2);
    // Resumed by its key, the session keeps its state.
    market
        .execute(Request::CloseSession {
            session,
            epoch: None,
            keep_orders: false,
        })
        .unwrap();
    let reject = market.refuse(order(5));
    assert_eq!(reject.reason, RejectReason::UnknownSession);
    assert_eq!(market.session(UserIx(ALICE), 77), session);
    assert_eq!(market.room.session(session).unwrap().client_seq, 4);
    market.execute(order(5)).unwrap();
}

#[test]
fn a_refusal_after_login_is_journalled_and_uses_its_number() {
    let mut market = Market::small();
    let session = market.session(UserIx(ALICE), 77);
    let request = Request::New(NewRequest {
        session,
        client_seq: 9,
        ..limit(ALICE, Side::Buy, 10_000, 1_000)
    });
    let reject = market.refuse(request);
    let refused = market.room.refusal(&request, &reject).unwrap();
    assert_eq!(
        refused.origin(),
        (session, 9, Id128::NONE, RequestKind::New)
    );
    market.run(refused);
    assert_eq!(market.room.session(session).unwrap().client_seq, 9);
    let without = Request::New(limit(ALICE, Side::Buy, 10_000, 1_000));
    let reject = market.refuse(without);
    assert_eq!(market.room.refusal(&without, &reject), None);
}

#[test]
fn a_session_serves_its_own_user() {
    let mut market = Market::small();
    let session = market.session(UserIx(ALICE), 77);
    let foreign = Request::New(NewRequest {
        session,
        client_seq: 1,
        ..limit(BOB, Side::Buy, 10_000, 1)
    });
    assert_eq!(market.refuse(foreign).reason, RejectReason::NotOwner);
    let stolen = Request::OpenSession(SessionRequest {
        key: Id128::from_u128(77),
        user: UserIx(BOB),
        stp_group: None,
        cancel_on_disconnect: false,
    });
    assert_eq!(market.refuse(stolen).reason, RejectReason::NotOwner);
}

#[test]
fn an_idempotency_key_answers_for_a_day() {
    let mut market = Market::small();
    let keyed = NewRequest {
        key_hash: Id128::from_u128(0xfeed),
        ..limit(ALICE, Side::Buy, 10_000, 1)
    };
    let order = market.place(keyed);
    let sequence = market.room.sequence();
    let reject = market.refuse(Request::New(keyed));
    assert_eq!(reject.reason, RejectReason::DuplicateRequest);
    let RejectDetails::Request(seen) = reject.details else {
        panic!("{reject:?}");
    };
    assert_eq!((seen.sequence, seen.handle), (sequence, order));
    assert_eq!(seen.time_ns, market.time_ns);
    market.time_ns += KEY_LIFETIME_NS - 2_000;
    let reject = market.refuse(Request::New(keyed));
    assert_eq!(reject.reason, RejectReason::DuplicateRequest);
    market.time_ns += 1_000;
    market.budget(UserIx(ALICE), 1_000_000);
    assert_ne!(market.place(keyed), order);
}

#[test]
fn the_rows_of_the_state_hash_include_slots_without_an_order() {
    let mut market = Market::small();
    let before = market.room.hashed_rows();
    let order = market.place(NewRequest {
        key_hash: Id128::from_u128(0xfeed),
        ..limit(ALICE, Side::Buy, 10_000, 1)
    });
    assert_eq!(market.room.hashed_rows(), before + 2, "a slot and a key");
    let cancelled = market.execute(cancel(ALICE, OrderRef::Handle(order)));
    cancelled.unwrap();
    assert_eq!(market.room.hashed_rows(), before + 2);
    let user = market.user("dora");
    market.session(user, 99);
    assert_eq!(market.room.hashed_rows(), before + 4, "a user, a session");
}

#[test]
fn the_budget_shrinks_with_each_order_and_ends_with_the_day() {
    let mut market = Market::small();
    market.budget(UserIx(ALICE), 25_000);
    market.place(limit(ALICE, Side::Buy, 10_000, 2));
    let reject = market.refuse(Request::New(limit(ALICE, Side::Sell, 10_000, 1)));
    assert_eq!(reject.reason, RejectReason::LimitExceeded);
    let details = RejectDetails::Budget {
        left: Minor(5_000),
        needed: Minor(10_000),
    };
    assert_eq!(reject.details, details);
    // Identity has approved this order.
    market.place(NewRequest {
        limit_checked: true,
        ..limit(ALICE, Side::Sell, 10_000, 1)
    });
    let order = market.place(limit(ALICE, Side::Buy, 2_500, 2));
    let reject = market.refuse(amend(ALICE, order, Some(2_600), None));
    assert_eq!(reject.reason, RejectReason::LimitExceeded);
    // Midnight in Moscow, 12 hours later.
    market.budget(UserIx(ALICE), 35_000);
    market.time_ns += 12 * 3_600 * 1_000_000_000 - 1_000;
    let reject = market.refuse(Request::New(limit(ALICE, Side::Buy, 100, 1)));
    assert_eq!(reject.reason, RejectReason::LimitExceeded);
}

#[test]
fn a_blocked_user_may_cancel_only() {
    let mut market = Market::small();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 1));
    let (user, cause) = (UserIx(ALICE), BlockCause::Identity);
    market.execute(Request::BlockUser { user, cause }).unwrap();
    let reject = market.refuse(Request::New(limit(ALICE, Side::Buy, 10_000, 1)));
    assert_eq!(reject.reason, RejectReason::UserBlocked);
    let reject = market.refuse(amend(ALICE, order, Some(9_000), None));
    assert_eq!(reject.reason, RejectReason::UserBlocked);
    market
        .execute(cancel(ALICE, OrderRef::Handle(order)))
        .unwrap();
    market
        .execute(Request::UnblockUser { user, cause })
        .unwrap();
    market.place(limit(ALICE, Side::Buy, 10_000, 1));
}

#[test]
fn a_user_is_blocked_while_any_cause_holds() {
    let mut market = Market::small();
    let user = UserIx(ALICE);
    let block = |cause| Request::BlockUser { user, cause };
    let lift = |cause| Request::UnblockUser { user, cause };
    let order = || Request::New(limit(ALICE, Side::Buy, 10_000, 1));
    for cause in BlockCause::ALL.iter().copied() {
        market.execute(block(cause)).unwrap();
        let repeated = market.refuse(block(cause));
        assert_eq!(repeated.reason, RejectReason::DuplicateRequest);
    }
    for cause in BlockCause::ALL.iter().copied() {
        assert_eq!(market.refuse(order()).reason, RejectReason::UserBlocked);
        market.execute(lift(cause)).unwrap();
        let repeated = market.refuse(lift(cause));
        assert_eq!(repeated.reason, RejectReason::DuplicateRequest);
    }
    market.execute(order()).unwrap();
    let unknown = Request::BlockUser {
        user: UserIx(999),
        cause: BlockCause::Difference,
    };
    assert_eq!(market.refuse(unknown).reason, RejectReason::UnknownUser);
}

fn settled(posted: u64, finalized: u64) -> Request {
    Request::Settled {
        posted: Sequence(posted),
        finalized: Sequence(finalized),
        trades_final: finalized,
    }
}

fn bust(trade: Id128) -> Request {
    Request::Bust(Bust {
        trade,
        trade_number: 1,
        instrument: InstrumentIx(0),
        buy: TradeParty::NONE,
        sell: TradeParty::NONE,
    })
}

#[test]
fn settlements_positions_never_go_back_and_never_pass_the_journal() {
    let mut market = Market::small();
    market.place(limit(ALICE, Side::Buy, 10_000, 1));
    let last = market.room.sequence().get();
    let reason = |reject: Reject| reject.reason;
    for wrong in [settled(last + 1, 0), settled(last - 2, last - 1)] {
        assert_eq!(reason(market.refuse(wrong)), RejectReason::Malformed);
    }
    // The market is closed to new orders until settlement advances; settlement's commands pass.
    market
        .room
        .refuse_orders(Some(RejectReason::SettlementBacklog));
    market.execute(settled(last - 1, last - 2)).unwrap();
    for known in [settled(last - 1, last - 2), settled(last - 2, 0)] {
        assert_eq!(reason(market.refuse(known)), RejectReason::DuplicateRequest);
    }
    let Ok(Command::Settled(both)) = market.execute(settled(last, 0)) else {
        panic!("expected a Settled command");
    };
    assert_eq!((both.posted.0, both.finalized.0), (last, last - 2));
    let trade = Id128::from_u128(7);
    market.execute(bust(trade)).unwrap();
    assert!(market.room.is_bust(trade));
    let repeated = market.refuse(bust(trade));
    assert_eq!(repeated.reason, RejectReason::DuplicateRequest);
    let none = market.refuse(bust(Id128::NONE));
    assert_eq!(none.reason, RejectReason::Malformed);
    market.room.check_invariants();
}

#[test]
fn a_settled_position_covers_settlements_own_records() {
    let mut market = Market::small();
    market.place(limit(ALICE, Side::Buy, 10_000, 1));
    let last = market.room.sequence().get();
    let at = |market: &Market| {
        let known = market.room.settlement();
        (known.posted.0, known.finalized.0)
    };
    market.execute(settled(last, last - 1)).unwrap();
    assert_eq!(at(&market), (last + 1, last - 1));
    market.execute(bust(Id128::from_u128(7))).unwrap();
    assert_eq!(at(&market), (last + 2, last - 1));
    // Settlement had not read its own records yet.
    market.execute(settled(last, last)).unwrap();
    assert_eq!(at(&market), (last + 3, last + 3));
    // A record of another origin ends the run.
    market.place(limit(ALICE, Side::Buy, 10_000, 1));
    market.execute(bust(Id128::from_u128(8))).unwrap();
    assert_eq!(at(&market), (last + 3, last + 3));
}

#[test]
fn under_a_kill_switch_only_cancels_pass() {
    let mut market = Market::small();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 1));
    let switch = |user, is_engaged| Request::SetKillSwitch {
        user,
        is_engaged,
        key_hash: Id128::NONE,
    };
    for user in [UserIx(ALICE), UserIx::NONE] {
        market.execute(switch(user, true)).unwrap();
        let reject = market.refuse(switch(user, true));
        assert_eq!(reject.reason, RejectReason::DuplicateRequest);
        for request in [
            Request::New(limit(ALICE, Side::Buy, 10_000, 1)),
            Request::New(limit(ALICE, Side::Sell, 10_000, 1)),
        ] {
            assert_eq!(market.refuse(request).reason, RejectReason::KillSwitch);
        }
        assert!(market.room.order(order).is_none(), "the switch ended it");
        market.execute(switch(user, false)).unwrap();
        assert!(!market.room.kill_switch(user));
    }
    market.place(limit(ALICE, Side::Buy, 10_000, 1));
    let reject = market.refuse(switch(UserIx(999), true));
    assert_eq!(reject.reason, RejectReason::UnknownUser);
}

#[test]
fn while_new_orders_are_refused_cancels_pass() {
    let mut market = Market::small();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 2));
    let refusing = Some(RejectReason::SettlementBacklog);
    market.room.refuse_orders(refusing);
    let reject = market.refuse(Request::New(limit(ALICE, Side::Buy, 10_000, 1)));
    assert_eq!(reject.reason, RejectReason::SettlementBacklog);
    // An amend causes no trade when it neither improves the price nor adds quantity.
    for (price, quantity) in [
        (Some(10_100), None),
        (None, Some(3)),
        (Some(9_900), Some(3)),
    ] {
        let reject = market.refuse(amend(ALICE, order, price, quantity));
        assert_eq!(reject.reason, RejectReason::SettlementBacklog);
    }
    for (price, quantity) in [
        (Some(10_000), Some(1)),
        (None, Some(1)),
        (Some(9_900), None),
    ] {
        market
            .execute(amend(ALICE, order, price, quantity))
            .unwrap();
    }
    // While another amend is in flight, the terms that the next one starts from are unknown.
    market
        .submit(amend(ALICE, order, Some(9_800), None))
        .unwrap();
    let reject = market.submit(amend(ALICE, order, Some(9_900), None));
    assert_eq!(reject.unwrap_err().reason, RejectReason::SettlementBacklog);
    market.drain();
    market
        .execute(cancel(ALICE, OrderRef::Handle(order)))
        .unwrap();
}

// `design.md` 7.
#[test]
fn open_orders_of_a_user_are_bounded_in_all_and_per_instrument() {
    let mut market = Market::small();
    let other = market.instrument(spec("BOND-2", 100_000));
    let bounds = OrderBounds {
        per_user: 5,
        per_instrument: 3,
        ..OrderBounds::NONE
    };
    let set = Request::SetOrderBounds(SetOrderBounds {
        of: BoundsOf::Node,
        bounds: Some(bounds),
        key_hash: Id128::NONE,
    });
    market.execute(set).unwrap();
    let again = market.refuse(set);
    assert_eq!(again.reason, RejectReason::DuplicateRequest);
    let order = limit(ALICE, Side::Buy, 1, 1);
    let on_other = NewRequest {
        instrument: other,
        ..order
    };
    let first = [(); 3].map(|()| market.place(order))[0];
    let reject = market.refuse(Request::New(order));
    let expected = (
        RejectReason::InstrumentOrderLimit,
        RejectDetails::MaxCount(3),
    );
    assert_eq!((reject.reason, reject.details), expected);
    for _ in 0..2 {
        market.place(on_other);
    }
    let reject = market.refuse(Request::New(on_other));
    let expected = (RejectReason::UserOrderLimit, RejectDetails::MaxCount(5));
    assert_eq!((reject.reason, reject.details), expected);
    // Other users are not affected, and after a cancel the user may order again.
    market.place(limit(BOB, Side::Buy, 1, 1));
    market
        .execute(cancel(ALICE, OrderRef::Handle(first)))
        .unwrap();
    market.place(order);
    // A restored state knows both.
    let restored = Admission::restore(&market.room.image(), AdmissionConfig::default());
    assert_eq!(restored.state_hash(), market.room.state_hash());
    let reject = restored.admit(&Request::New(on_other), market.time_ns);
    assert_eq!(reject.unwrap_err().reason, RejectReason::UserOrderLimit);
}

// A damaged image panics before it allocates a row for each of 2^32 users.
#[test]
#[should_panic(expected = "a hold belongs to a user")]
fn an_image_with_a_hold_of_an_unknown_user_is_refused() {
    let mut image = Market::small().room.image();
    image.holds[0].user = UserIx(u32::MAX - 1);
    let _ = Admission::restore(&image, AdmissionConfig::default());
}

// `design.md` 7: the last eighth is for users with fewer than 1,000 open orders.
#[test]
fn the_last_slots_are_for_users_with_few_orders() {
    let mut market = Market::with_two_users(1_200);
    for _ in 0..1_050 {
        market.place(limit(ALICE, Side::Buy, 1, 1));
    }
    let reject = market.refuse(Request::New(limit(ALICE, Side::Buy, 1, 1)));
    assert_eq!(reject.reason, RejectReason::TooManyOrders);
    for _ in 0..150 {
        market.place(limit(BOB, Side::Buy, 1, 1));
    }
    let reject = market.refuse(Request::New(limit(BOB, Side::Buy, 1, 1)));
    assert_eq!(reject.reason, RejectReason::TooManyOrders);
}

#[test]
fn the_order_table_is_bounded() {
    let mut market = Market::small();
    for _ in 0..64 {
        market.place(limit(ALICE, Side::Buy, 1, 1));
    }
    let reject = market.refuse(Request::New(limit(ALICE, Side::Buy, 1, 1)));
    assert_eq!(reject.reason, RejectReason::TooManyOrders);
    let first = Handle {
        slot: 0,
        generation: 1,
    };
    market
        .execute(cancel(ALICE, OrderRef::Handle(first)))
        .unwrap();
    let reused = market.place(limit(ALICE, Side::Buy, 1, 1));
    assert_eq!((reused.slot, reused.generation), (0, 2));
}

#[test]
fn funding_is_counted_once_and_only_undrawn_money_leaves() {
    let mut market = Market::small();
    let hold = market
        .room
        .default_hold(UserIx(ALICE), AssetIx::MONEY)
        .unwrap();
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 50));
    let fund = |seq| {
        Request::Fund(FundRequest {
            hold_id: Id128::from_u128(1_000),
            kind: HoldKind::Trading,
            user: UserIx(ALICE),
            asset: AssetIx::MONEY,
            amount_minor: Minor(500),
            funding_seq: seq,
            key_hash: Id128::NONE,
        })
    };
    let reject = market.refuse(fund(1));
    assert_eq!(
        (reject.reason, reject.details),
        (RejectReason::DuplicateRequest, RejectDetails::Hold(hold))
    );
    market.execute(fund(2)).unwrap();
    assert_eq!(market.money(ALICE).held(), Minor(1_000_500));
    let defund = |amount, funding_seq| Request::Defund {
        hold,
        amount_minor: Minor(amount),
        funding_seq,
        key_hash: Id128::NONE,
    };
    let reject = market.refuse(defund(500_001, 3));
    assert_eq!(reject.reason, RejectReason::HoldInUse);
    market.execute(defund(500_000, 3)).unwrap();
    assert_eq!(market.money(ALICE).undrawn, Minor::ZERO);
    let close = |funding_seq| Request::CloseHold {
        hold,
        funding_seq,
        key_hash: Id128::NONE,
    };
    assert_eq!(market.refuse(close(4)).reason, RejectReason::HoldInUse);
    market
        .execute(cancel(ALICE, OrderRef::Handle(order)))
        .unwrap();
    market.execute(close(4)).unwrap();
    let reject = market.refuse(Request::New(limit(ALICE, Side::Buy, 1, 1)));
    assert_eq!(reject.reason, RejectReason::NoTradingHold);
    assert_eq!(market.refuse(fund(5)).reason, RejectReason::UnknownHold);
    // A second trading hold only after the first has closed.
    let second = |id| {
        Request::Fund(FundRequest {
            hold_id: Id128::from_u128(id),
            kind: HoldKind::Trading,
            user: UserIx(ALICE),
            asset: AssetIx::MONEY,
            amount_minor: Minor(500),
            funding_seq: 1,
            key_hash: Id128::NONE,
        })
    };
    market.execute(second(5_000)).unwrap();
    assert_eq!(market.refuse(second(5_001)).reason, RejectReason::HoldInUse);
}

#[test]
fn a_hold_of_size_one_backs_one_order() {
    let mut market = Market::small();
    let request = FundRequest {
        hold_id: Id128::from_u128(9_999),
        kind: HoldKind::Order,
        user: UserIx(ALICE),
        asset: AssetIx::MONEY,
        amount_minor: Minor(10_010),
        funding_seq: 1,
        key_hash: Id128::NONE,
    };
    market.execute(Request::Fund(request)).unwrap();
    let hold = market.room.hold_ix(Id128::from_u128(9_999));
    let on_it = |user| NewRequest {
        hold,
        ..limit(user, Side::Buy, 5_000, 1)
    };
    let reject = market.refuse(Request::New(on_it(BOB)));
    assert_eq!(reject.reason, RejectReason::NotOwner);
    market.place(on_it(ALICE));
    let reject = market.refuse(Request::New(on_it(ALICE)));
    assert_eq!(reject.reason, RejectReason::HoldInUse);
    let sell = NewRequest {
        hold,
        ..limit(ALICE, Side::Sell, 10_000, 1)
    };
    assert_eq!(
        market.refuse(Request::New(sell)).reason,
        RejectReason::UnknownHold
    );
}

#[test]
fn bad_numbers_and_combinations_are_refused() {
    let mut market = Market::small();
    let base = limit(ALICE, Side::Buy, 10_000, 1);
    let cases = [
        (
            NewRequest {
                price: None,
                ..base
            },
            RejectReason::PriceTick,
        ),
        (
            NewRequest {
                price: Some(Ticks(0)),
                ..base
            },
            RejectReason::PriceTick,
        ),
        (
            NewRequest {
                price: Some(Ticks(-1)),
                ..base
            },
            RejectReason::PriceTick,
        ),
        (
            NewRequest {
                quantity: Lots(0),
                ..base
            },
            RejectReason::QuantityLot,
        ),
        (
            NewRequest {
                quantity: Lots(Lots::ORDER_MAX.0 + 1),
                ..base
            },
            RejectReason::QuantityLot,
        ),
        (
            NewRequest {
                price: Some(Ticks::ORDER_MAX),
                quantity: Lots::ORDER_MAX,
                ..base
            },
            RejectReason::AmountOverflow,
        ),
        (
            NewRequest {
                instrument: InstrumentIx(9),
                ..base
            },
            RejectReason::UnknownInstrument,
        ),
        (
            NewRequest {
                user: UserIx(9),
                ..base
            },
            RejectReason::UnknownUser,
        ),
        (
            NewRequest {
                post_only: true,
                time_in_force: TimeInForce::Ioc,
                ..base
            },
            RejectReason::InvalidCombination,
        ),
        (
            NewRequest {
                expire_at_ns: 1,
                ..base
            },
            RejectReason::InvalidCombination,
        ),
        (
            NewRequest {
                time_in_force: TimeInForce::Gtd,
                expire_at_ns: START_NS,
                ..base
            },
            RejectReason::Expired,
        ),
        (
            NewRequest {
                hold: Some(HoldIx(99)),
                ..base
            },
            RejectReason::UnknownHold,
        ),
    ];
    for (request, reason) in cases {
        let reject = market.refuse(Request::New(request));
        assert_eq!(reject.reason, reason, "{request:?}");
        let is_number = matches!(reason, RejectReason::PriceTick | RejectReason::QuantityLot);
        let most = if is_number { 1 << 40 } else { 0 };
        assert_eq!(reject.limit(), most, "{request:?}");
    }
    let placed = market.place(base);
    let most = Ticks::ORDER_MAX.0 + 1;
    for (price, quantity) in [
        (Some(0), None),
        (Some(most), None),
        (None, Some(most as u64)),
    ] {
        let reject = market.refuse(amend(ALICE, placed, price, quantity));
        assert_eq!(reject.limit(), 1 << 40, "{reject:?}");
    }
}

#[test]
fn mass_cancel_is_for_ones_own_orders_unless_the_platform_asks() {
    let mut market = Market::small();
    for _ in 0..3 {
        market.place(limit(ALICE, Side::Buy, 10_000, 1));
        market.place(limit(BOB, Side::Buy, 10_000, 1));
    }
    let ask = |user, scope| {
        Request::MassCancel(MassCancelRequest {
            scope,
            instrument: InstrumentIx::NONE,
            side: None,
            reason: CancelReason::MassCancel,
            user: UserIx(user),
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
        })
    };
    for scope in [
        MassScope::All,
        MassScope::User(UserIx(BOB)),
        MassScope::Group(StpGroup::of_user(UserIx(BOB))),
        MassScope::Session(SessionIx(0)),
    ] {
        assert_eq!(
            market.refuse(ask(ALICE, scope)).reason,
            RejectReason::NotOwner
        );
    }
    market
        .execute(ask(ALICE, MassScope::User(UserIx(ALICE))))
        .unwrap();
    assert_eq!(
        (market.money(ALICE).orders, market.money(BOB).orders),
        (0, 3)
    );
    market.execute(ask(UserIx::NONE.0, MassScope::All)).unwrap();
    assert_eq!(market.money(BOB).undrawn, Minor(1_000_000));
}

#[test]
fn binding_twice_returns_the_index_and_an_instrument_keeps_its_steps() {
    let mut market = Market::small();
    let bob = UserId::new("bob").unwrap();
    let reject = market.refuse(Request::BindUser(bob));
    assert_eq!(reject.details, RejectDetails::User(UserIx(BOB)));
    market
        .execute(Request::SetPhase {
            instrument: InstrumentIx(0),
            phase: Phase::Halt,
            cancel_orders: false,
            lifts_halt: true,
            key_hash: Id128::NONE,
        })
        .unwrap();
    let same = spec("BOND-1", 100_000);
    let reject = market.refuse(Request::SetInstrument(same));
    assert_eq!(reject.details, RejectDetails::Instrument(InstrumentIx(0)));
    market
        .execute(Request::SetInstrument(spec("BOND-1", 50_000)))
        .unwrap();
    let now = market.room.spec(InstrumentIx(0)).unwrap();
    assert_eq!((now.band_high, now.phase), (Ticks(50_000), Phase::Halt));
    assert_eq!(market.books[0].phase(), Phase::Halt);
    let mut other = InstrumentSpec::new(&InstrumentParams {
        decimals: 2,
        tick_size: "0.1".parse().unwrap(),
        band_high: Ticks(100),
        collar_ppm: 0,
        ..InstrumentParams::new(same.id)
    })
    .unwrap();
    let reject = market.refuse(Request::SetInstrument(other));
    assert_eq!(reject.reason, RejectReason::InvalidCombination);
    other.id = InstrumentId::new("BOND-2").unwrap();
    assert_eq!(market.instrument(other), InstrumentIx(1));
}

fn budget_left(market: &Market) -> i64 {
    let budget = market.room.user(UserIx(ALICE)).unwrap().budget;
    budget.left(moscow_day(market.time_ns)).0
}

#[test]
fn within_a_day_the_budget_changes_only_with_the_limit() {
    let mut market = Market::empty_day();
    let day = moscow_day(market.time_ns);
    let read = |market: &mut Market, day, limit, left| {
        let request = Request::SetBudget(SetBudget {
            user: UserIx(ALICE),
            day,
            limit_minor: Minor(limit),
            left_minor: Minor(left),
        });
        market.execute(request).map(|_| budget_left(market))
    };
    assert_eq!(read(&mut market, day, 30_000, 25_000), Ok(25_000));
    market.place(limit(ALICE, Side::Buy, 10_000, 2));
    // Identity has not counted the order yet, or has counted this and other orders.
    for left in [25_000, 4_000] {
        let again = read(&mut market, day, 30_000, left);
        let again = again.map_err(|reject| reject.reason);
        assert_eq!(again, Err(RejectReason::DuplicateRequest));
        assert_eq!(budget_left(&market), 5_000);
    }
    assert_eq!(read(&mut market, day, 40_000, 35_000), Ok(15_000));
    assert_eq!(
        read(&mut market, day, 20_000, 15_000),
        Ok(0),
        "never negative"
    );
    let (wrong, known) = (RejectReason::Malformed, RejectReason::DuplicateRequest);
    for (day, limit, left, reason) in [
        (day - 1, 1, 1, known),
        (day, 5, 6, wrong),
        (day, 5, -1, wrong),
    ] {
        let refused = read(&mut market, day, limit, left);
        assert_eq!(refused.map_err(|reject| reject.reason), Err(reason));
    }
    market.time_ns += 24 * 3_600 * 1_000_000_000;
    assert_eq!(budget_left(&market), 0, "yesterday's budget is void");
    assert_eq!(read(&mut market, day + 1, 20_000, 20_000), Ok(20_000));
}

/// A sell at the lowest price trades at the best bid, so it is charged at the best bid.
#[test]
fn a_sell_below_the_best_bid_is_charged_what_it_gets() {
    let mut market = Market::empty_day();
    market.budget(UserIx(ALICE), 25_000);
    market.budget(UserIx(BOB), 1_000_000);
    market.place(limit(BOB, Side::Buy, 10_000, 5));
    let reject = market.refuse(Request::New(limit(ALICE, Side::Sell, 1, 3)));
    let details = RejectDetails::Budget {
        left: Minor(25_000),
        needed: Minor(30_000),
    };
    assert_eq!(
        (reject.reason, reject.details),
        (RejectReason::LimitExceeded, details)
    );
    market.place(limit(ALICE, Side::Sell, 1, 2));
    assert_eq!(budget_left(&market), 5_000);
}

/// `design.md` 3: what an order did not trade returns to the budget when it ends.
#[test]
fn an_ended_order_returns_what_it_did_not_trade() {
    let mut market = Market::empty_day();
    market.budget(UserIx(ALICE), 100_000);
    market.budget(UserIx(BOB), 1_000_000);
    let order = market.place(limit(ALICE, Side::Buy, 10_000, 6));
    market.execute(amend(ALICE, order, None, Some(9))).unwrap();
    assert_eq!(budget_left(&market), 10_000);
    market.place(limit(BOB, Side::Sell, 9_000, 2));
    assert_eq!(
        budget_left(&market),
        10_000,
        "while it is open, all is charged"
    );
    market
        .execute(cancel(ALICE, OrderRef::Handle(order)))
        .unwrap();
    assert_eq!(budget_left(&market), 80_000, "two were traded at 10,000");
    // Quotes that are cancelled use nothing, however often.
    for _ in 0..20 {
        let order = market.place(limit(ALICE, Side::Buy, 9_000, 8));
        market
            .execute(cancel(ALICE, OrderRef::Handle(order)))
            .unwrap();
    }
    assert_eq!(budget_left(&market), 80_000);
    // Identity approved this order: its value is not counted, but its growth is.
    let free = market.place(NewRequest {
        limit_checked: true,
        ..limit(ALICE, Side::Buy, 10_000, 20)
    });
    market.execute(amend(ALICE, free, None, Some(23))).unwrap();
    assert_eq!(budget_left(&market), 50_000);
    market.place(limit(BOB, Side::Sell, 10_000, 21));
    market
        .execute(cancel(ALICE, OrderRef::Handle(free)))
        .unwrap();
    assert_eq!(
        budget_left(&market),
        70_000,
        "one more than identity allowed"
    );
    // An order pays once for its highest value, however often it is amended.
    let quoted = market.place(limit(ALICE, Side::Buy, 1_000, 1));
    for _ in 0..100 {
        for (price, quantity) in [(2_000, 3), (1_500, 5), (1_000, 1)] {
            let change = amend(ALICE, quoted, Some(price), Some(quantity));
            market.execute(change).unwrap();
        }
    }
    // The highest price with the largest quantity: both amends may be in flight at once.
    assert_eq!(budget_left(&market), 70_000 - 10_000);
    market
        .execute(cancel(ALICE, OrderRef::Handle(quoted)))
        .unwrap();
    assert_eq!(budget_left(&market), 70_000);
    // An order of yesterday returns nothing to today, and its growth is spent.
    let old = market.place(limit(ALICE, Side::Buy, 5_000, 2));
    market.time_ns += 24 * 3_600 * 1_000_000_000;
    market.budget(UserIx(ALICE), 50_000);
    market.execute(amend(ALICE, old, None, Some(4))).unwrap();
    assert_eq!(budget_left(&market), 40_000);
    market
        .execute(cancel(ALICE, OrderRef::Handle(old)))
        .unwrap();
    assert_eq!(budget_left(&market), 40_000);
}

// rows: R345
#[test]
fn r345_a_chosen_group_is_its_first_users() {
    let mut market = Market::small();
    let group = StpGroup::explicit(7);
    let login = |user, key| {
        Request::OpenSession(SessionRequest {
            key: Id128::from_u128(key),
            user: UserIx(user),
            stp_group: Some(group),
            cancel_on_disconnect: false,
        })
    };
    let cancel_group = |user| {
        Request::MassCancel(MassCancelRequest {
            scope: MassScope::Group(group),
            instrument: InstrumentIx::NONE,
            side: None,
            reason: CancelReason::MassCancel,
            user: UserIx(user),
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
        })
    };
    market.execute(login(ALICE, 70)).unwrap();
    assert_eq!(market.refuse(login(BOB, 71)).reason, RejectReason::NotOwner);
    assert_eq!(
        market.refuse(cancel_group(BOB)).reason,
        RejectReason::NotOwner
    );
    market.execute(login(ALICE, 72)).unwrap();
    market.execute(cancel_group(ALICE)).unwrap();
    // A snapshot keeps the group's owner too.
    let restored = Admission::restore(&market.room.image(), AdmissionConfig::default());
    let refused = restored.admit(&login(BOB, 71), market.time_ns + 1_000);
    assert_eq!(refused.unwrap_err().reason, RejectReason::NotOwner);
}

/// Otherwise a member that logs in with ever new groups would use memory for all of them.
// rows: R345
#[test]
fn r345_a_chosen_group_is_free_once_no_session_and_no_open_order_has_it() {
    let mut market = Market::small();
    let login = |user, key, number| {
        Request::OpenSession(SessionRequest {
            key: Id128::from_u128(key),
            user: UserIx(user),
            stp_group: Some(StpGroup::explicit(number)),
            cancel_on_disconnect: false,
        })
    };
    for number in 1..=100 {
        market.execute(login(ALICE, 70, number)).unwrap();
    }
    let session = market.room.session_ix(Id128::from_u128(70)).unwrap();
    let open = market.place(NewRequest {
        session,
        client_seq: 1,
        ..limit(ALICE, Side::Buy, 100, 1)
    });
    market.execute(login(ALICE, 70, 101)).unwrap();
    for number in 1u32..100 {
        market
            .execute(login(BOB, 1_000 + u128::from(number), number))
            .unwrap();
    }
    let refused_live_and_restored = |market: &mut Market, request: Request| {
        let restored = Admission::restore(&market.room.image(), AdmissionConfig::default());
        let refused = restored.admit(&request, market.time_ns + 1_000);
        assert_eq!(refused.unwrap_err().reason, RejectReason::NotOwner);
        assert_eq!(market.refuse(request).reason, RejectReason::NotOwner);
    };
    refused_live_and_restored(&mut market, login(BOB, 71, 101));
    // The open order still has the group.
    refused_live_and_restored(&mut market, login(BOB, 71, 100));
    market
        .execute(cancel(ALICE, OrderRef::Handle(open)))
        .unwrap();
    market.execute(login(BOB, 71, 100)).unwrap();
    refused_live_and_restored(&mut market, login(ALICE, 70, 100));
    // A forgotten session has no group.
    let session = market.room.session_ix(Id128::from_u128(71)).unwrap();
    let close = Request::CloseSession {
        session,
        epoch: None,
        keep_orders: true,
    };
    market.execute(close).unwrap();
    let epoch = market.room.session(session).unwrap().epoch;
    market
        .execute(Request::ForgetSession { session, epoch })
        .unwrap();
    let restored = Admission::restore(&market.room.image(), AdmissionConfig::default());
    assert_eq!(restored.state_hash(), market.room.state_hash());
    market.execute(login(ALICE, 70, 100)).unwrap();
}

#[test]
fn a_key_answers_for_phases_and_holds_too() {
    let mut market = Market::small();
    let hold = market
        .room
        .default_hold(UserIx(ALICE), AssetIx::MONEY)
        .unwrap();
    let phase = |phase, key| Request::SetPhase {
        instrument: InstrumentIx(0),
        phase,
        cancel_orders: false,
        lifts_halt: true,
        key_hash: Id128::from_u128(key),
    };
    let defund = |funding_seq, key| Request::Defund {
        hold,
        amount_minor: Minor(10),
        funding_seq,
        key_hash: Id128::from_u128(key),
    };
    market.execute(phase(Phase::Halt, 1)).unwrap();
    market.execute(phase(Phase::Open, 2)).unwrap();
    market.execute(defund(2, 3)).unwrap();
    for repeat in [phase(Phase::Halt, 1), defund(3, 3)] {
        let reject = market.refuse(repeat);
        assert_eq!(reject.reason, RejectReason::DuplicateRequest);
        assert!(
            matches!(reject.details, RejectDetails::Request(_)),
            "{reject:?}"
        );
    }
    market.execute(defund(3, 4)).unwrap();
}

/// `design.md` 10: halting is one call, only market supervision lifts a halt.
#[test]
fn a_halt_stays_until_it_is_lifted_explicitly() {
    let mut market = Market::small();
    let phase = |phase, lifts_halt| Request::SetPhase {
        instrument: InstrumentIx(0),
        phase,
        cancel_orders: false,
        lifts_halt,
        key_hash: Id128::NONE,
    };
    market.execute(phase(Phase::Halt, false)).unwrap();
    for other in [Phase::Open, Phase::PreOpen, Phase::Closed] {
        let reject = market.refuse(phase(other, false));
        assert_eq!(reject.reason, RejectReason::InstrumentHalted);
    }
    let again = market.refuse(phase(Phase::Halt, false));
    assert_eq!(again.reason, RejectReason::DuplicateRequest);
    market.execute(phase(Phase::Open, true)).unwrap();
    market.execute(phase(Phase::Halt, false)).unwrap();
    market.execute(phase(Phase::Matured, false)).unwrap();
    let reject = market.refuse(phase(Phase::Open, true));
    assert_eq!(reject.reason, RejectReason::InstrumentMatured);
}

/// State of an order after its last event, by D13, and the quantity and value filled.
fn state(market: &Market, order: Handle) -> (OrderStatus, u64, i64) {
    let mut effects = market.effects.iter().rev();
    let last = effects.find(|e| e.order.handle == order);
    let mut events = market.steps.iter().filter_map(|step| match step {
        Step::Event(e) => Some(e.event),
        Step::Command(_) => None,
    });
    let is_rejected = |e: Event| matches!(e, Event::Rejected(e) if e.handle == order);
    let Some(effect) = last else {
        return (OrderStatus::Open, 0, 0);
    };
    let filled = effect.order.filled();
    let status = match (effect.closed, filled) {
        (false, Lots::ZERO) => OrderStatus::Open,
        (false, _) => OrderStatus::PartiallyFilled,
        (true, filled) if filled == effect.order.quantity => OrderStatus::Filled,
        (true, _) if events.any(is_rejected) => OrderStatus::Rejected,
        (true, _) => OrderStatus::Cancelled,
    };
    (status, filled.0, effect.order.fill_totals.value_minor.0)
}

// rows: R324
#[test]
fn r324_d13_an_order_goes_from_open_over_partly_filled_to_its_end() {
    use OrderStatus::*;
    let mut market = Market::small();
    let resting = market.place(limit(ALICE, Side::Buy, 10_000, 10));
    assert_eq!(state(&market, resting), (Open, 0, 0));
    market.place(limit(BOB, Side::Sell, 10_000, 4));
    assert_eq!(state(&market, resting), (PartiallyFilled, 4, 40_000));
    market.place(limit(BOB, Side::Sell, 10_000, 6));
    assert_eq!(state(&market, resting), (Filled, 10, 100_000));

    // The filled quantity and its average price survive the cancel of the rest.
    market.place(limit(BOB, Side::Sell, 9_000, 2));
    market.place(limit(BOB, Side::Sell, 9_500, 1));
    let taker = market.place(limit(ALICE, Side::Buy, 10_000, 10));
    assert_eq!(state(&market, taker), (PartiallyFilled, 3, 27_500));
    market
        .execute(cancel(ALICE, OrderRef::Handle(taker)))
        .unwrap();
    assert_eq!(state(&market, taker), (Cancelled, 3, 27_500));

    let unfilled = market.place(limit(ALICE, Side::Buy, 9_000, 1));
    market
        .execute(cancel(ALICE, OrderRef::Handle(unfilled)))
        .unwrap();
    assert_eq!(state(&market, unfilled), (Cancelled, 0, 0));

    // Orders that may not rest end filled or cancelled, whatever they meet.
    for time_in_force in [TimeInForce::Ioc, TimeInForce::Fok] {
        for (quantity, filled) in [(2, 2), (5, 3)] {
            market.place(limit(BOB, Side::Sell, 9_000, 3));
            let order = market.place(NewRequest {
                time_in_force,
                ..limit(ALICE, Side::Buy, 9_000, quantity)
            });
            let expected = match time_in_force {
                _ if quantity == filled => (Filled, filled, 9_000 * filled as i64),
                TimeInForce::Ioc => (Cancelled, filled, 9_000 * filled as i64),
                _ => (Cancelled, 0, 0),
            };
            assert_eq!(state(&market, order), expected);
            let order = market.place(NewRequest {
                price: Some(Ticks(9_000)),
                ..market_order(ALICE, Side::Buy, 9)
            });
            // It takes what the fill-or-kill order left.
            let left = if (time_in_force, quantity) == (TimeInForce::Fok, 5) {
                3
            } else {
                3 - filled
            };
            let expected = (Cancelled, left, 9_000 * left as i64);
            assert_eq!(state(&market, order), expected);
        }
    }

    market
        .execute(Request::SetPhase {
            instrument: InstrumentIx(0),
            phase: Phase::Halt,
            cancel_orders: false,
            lifts_halt: true,
            key_hash: Id128::NONE,
        })
        .unwrap();
    let refused = market.place(limit(ALICE, Side::Buy, 9_000, 1));
    assert_eq!(state(&market, refused), (Rejected, 0, 0));
}

/// Ends an order of Alice for this reason. A reason without an arm does not compile.
fn end_for(market: &mut Market, reason: CancelReason) -> Handle {
    let platform = UserIx::NONE;
    let resting = limit(ALICE, Side::Buy, 9_000, 1);
    let fill_or_kill = NewRequest {
        time_in_force: TimeInForce::Fok,
        ..resting
    };
    let immediate = NewRequest {
        time_in_force: TimeInForce::Ioc,
        ..resting
    };
    let dated = NewRequest {
        time_in_force: TimeInForce::Gtd,
        expire_at_ns: market.time_ns + 1_000_000,
        ..resting
    };
    let cancel_by = |user: UserIx, order| {
        Request::Cancel(CancelRequest {
            order: OrderRef::Handle(order),
            user,
            session: SessionIx::NONE,
            client_seq: 0,
            reason,
            key_hash: Id128::NONE,
        })
    };
    let mass = |scope, user| {
        Request::MassCancel(MassCancelRequest {
            scope,
            instrument: InstrumentIx::NONE,
            side: None,
            reason,
            user,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
        })
    };
    let phase = |phase, cancel_orders| Request::SetPhase {
        instrument: InstrumentIx(0),
        phase,
        cancel_orders,
        lifts_halt: true,
        key_hash: Id128::NONE,
    };
    let alice = UserIx(ALICE);
    let (order, then) = match reason {
        CancelReason::UserRequest => {
            let order = market.place(resting);
            (order, vec![cancel_by(alice, order)])
        }
        CancelReason::HoldExpired | CancelReason::HoldReleased | CancelReason::Operator => {
            let order = market.place(resting);
            (order, vec![cancel_by(platform, order)])
        }
        CancelReason::IocRemainder => (market.place(immediate), vec![]),
        CancelReason::FokNotFillable => (market.place(fill_or_kill), vec![]),
        CancelReason::NoLiquidity => (market.place(market_order(ALICE, Side::Buy, 1)), vec![]),
        CancelReason::SelfTrade => {
            market.place(limit(ALICE, Side::Sell, 9_000, 1));
            (market.place(resting), vec![])
        }
        CancelReason::CancelOnDisconnect => {
            let session = market.session(alice, 1);
            let order = market.place(NewRequest {
                session,
                client_seq: 1,
                ..resting
            });
            let gone = [
                Request::CloseSession {
                    session,
                    epoch: None,
                    keep_orders: false,
                },
                mass(MassScope::Session(session), platform),
            ];
            (order, gone.to_vec())
        }
        CancelReason::CancelAllAfter => {
            let session = market.session(alice, 1);
            let order = market.place(NewRequest {
                session,
                client_seq: 1,
                ..resting
            });
            let switch = Request::CancelAllAfter(CancelAllAfterRequest {
                user: alice,
                session,
                client_seq: 2,
                timeout_s: 1,
            });
            let fired = mass(MassScope::Session(session), platform);
            (order, vec![switch, fired])
        }
        CancelReason::MassCancel => (
            market.place(resting),
            vec![mass(MassScope::User(alice), alice)],
        ),
        CancelReason::KillSwitch => (market.place(resting), vec![mass(MassScope::All, platform)]),
        CancelReason::UserBlocked => {
            let block = Request::BlockUser {
                user: alice,
                cause: BlockCause::Identity,
            };
            (
                market.place(resting),
                vec![block, mass(MassScope::User(alice), platform)],
            )
        }
        CancelReason::InstrumentHalted => (market.place(resting), vec![phase(Phase::Halt, true)]),
        CancelReason::InstrumentMatured => {
            (market.place(resting), vec![phase(Phase::Matured, false)])
        }
        CancelReason::Expired => {
            let order = market.place(dated);
            market.time_ns = dated.expire_at_ns;
            (order, vec![Request::ExpireOrders(InstrumentIx::NONE)])
        }
    };
    for request in then {
        market.execute(request).unwrap();
    }
    order
}

// rows: R324
#[test]
fn r324_d14_every_cancel_reason_is_reported_once_and_refunds() {
    for reason in CancelReason::ALL.iter().copied() {
        let mut market = Market::small();
        let order = end_for(&mut market, reason);
        let told: Vec<_> = market
            .steps
            .iter()
            .filter_map(|step| match step {
                Step::Event(e) => match e.event {
                    Event::Cancelled(e) if e.handle == order => Some((e.reason, e.quantity)),
                    _ => None,
                },
                Step::Command(_) => None,
            })
            .collect();
        assert_eq!(told, [(reason, Lots(1))]);
        assert_eq!(state(&market, order), (OrderStatus::Cancelled, 0, 0));
        assert_eq!(market.money(ALICE).undrawn, Minor(1_000_000), "{reason}");
        assert_eq!(market.money(ALICE).reserved, Reserve::ZERO);
    }
}

/// A market that halts past 1 %, with an offer at 100.00 and one at 102.00.
fn halting_market() -> (Market, InstrumentIx) {
    let mut market = Market::empty();
    let mut wanted = spec("BOND-1", 100_000);
    wanted.velocity = VelocityRule {
        width_ppm: 10_000,
        window_ms: 1_000,
    };
    let ix = market.instrument(wanted);
    for name in ["alice", "bob"] {
        let user = market.user(name);
        market.fund(user, AssetIx::MONEY, 1_000_000);
        market.fund(user, AssetIx::units(ix), 100_000);
        market.budget(user, i64::MAX);
    }
    market.place(limit(BOB, Side::Sell, 10_000, 1));
    market.place(limit(BOB, Side::Sell, 10_200, 1));
    (market, ix)
}

#[test]
fn f08_a_market_that_has_halted_by_itself_is_opened_by_a_command() {
    let (mut market, ix) = halting_market();
    let order = market.place(limit(ALICE, Side::Buy, 10_500, 2));
    assert_eq!(
        state(&market, order),
        (OrderStatus::Cancelled, 1, 10_000),
        "no trade past the velocity limit"
    );
    assert_eq!(market.room.spec(ix).unwrap().phase, Phase::Halt);
    // Meanwhile the registry changes the instrument: it stays halted.
    let mut changed = *market.room.spec(ix).unwrap();
    (changed.band_high, changed.phase) = (Ticks(90_000), Phase::Open);
    market.execute(Request::SetInstrument(changed)).unwrap();
    assert_eq!(market.room.spec(ix).unwrap().phase, Phase::Halt);
    assert_eq!(market.books[0].phase(), Phase::Halt);
    let phase = |phase| Request::SetPhase {
        instrument: ix,
        phase,
        cancel_orders: false,
        lifts_halt: true,
        key_hash: Id128::NONE,
    };
    let again = market.refuse(phase(Phase::Halt));
    assert_eq!(again.details, RejectDetails::Instrument(ix));
    market.execute(phase(Phase::Open)).unwrap();
    let order = market.place(limit(ALICE, Side::Buy, 10_500, 1));
    assert_eq!(state(&market, order), (OrderStatus::Filled, 1, 10_200));
}

/// A change of the instrument that was admitted before the halt was known does not reopen it.
#[test]
fn f08_a_change_in_flight_does_not_undo_the_halt() {
    let (mut market, ix) = halting_market();
    let order = limit(ALICE, Side::Buy, 10_500, 2);
    market.submit(Request::New(order)).unwrap();
    let mut changed = *market.room.spec(ix).unwrap();
    assert_eq!(changed.phase, Phase::Open, "the halt is still in flight");
    changed.band_high = Ticks(90_000);
    market.submit(Request::SetInstrument(changed)).unwrap();
    market.drain();
    assert_eq!(market.room.spec(ix).unwrap().phase, Phase::Halt);
    assert_eq!(market.books[0].phase(), Phase::Halt);
}
