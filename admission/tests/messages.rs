//! Messages that fundings and settlement cause: their sessions, numbers and figures.

mod support;

use admission::*;
use support::*;
use types::command::{Bust, FundingCause, TradeParty};
use types::*;

const ALICE: u32 = 0;
const BOB: u32 = 1;

/// Session, number and body of each message.
fn brief(reports: &[Report]) -> Vec<(u32, u64, ReportBody)> {
    let brief = |r: &Report| {
        assert_eq!(r.client_seq, 0, "the message answers no request: {r:?}");
        (r.session.0, r.number, r.body)
    };
    reports.iter().map(brief).collect()
}

fn trading_hold(market: &Market, user: u32, asset: AssetIx) -> (HoldIx, HoldBalance) {
    let hold = market.room.default_hold(UserIx(user), asset);
    let hold = hold.expect("an open trading hold");
    (hold, *market.room.hold(hold).expect("a known hold"))
}

fn fund(balance: &HoldBalance, kind: HoldKind, amount: i64) -> Request {
    Request::Fund(FundRequest {
        hold_id: match kind {
            HoldKind::Trading => balance.hold_id,
            HoldKind::Order => Id128::from_u128(77_777),
        },
        kind,
        user: balance.user,
        asset: balance.asset,
        amount_minor: Minor(amount),
        funding_seq: balance.funding_seq + 1,
        key_hash: Id128::NONE,
    })
}

fn order(session: SessionIx, client_seq: u64, order: NewRequest) -> Request {
    Request::New(NewRequest {
        session,
        client_seq,
        client_order_id: 100 + client_seq,
        ..order
    })
}

fn settled(posted: Sequence, finalized: Sequence) -> Request {
    Request::Settled {
        posted,
        finalized,
        trades_final: finalized.0,
    }
}

/// Reason and limit of the only message, which refuses a request.
fn refusal(reports: &[Report]) -> (RejectReason, u64) {
    match reports {
        [
            Report {
                body: ReportBody::Rejected { reason, limit, .. },
                ..
            },
        ] => (*reason, *limit),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_for_the_price_band_reports_the_limit_that_the_price_exceeds() {
    let mut market = Market::small();
    let session = market.session(UserIx(ALICE), 77);
    let banded = InstrumentSpec::new(&InstrumentParams {
        decimals: 2,
        band_low: Ticks(9_000),
        band_high: Ticks(11_000),
        ..InstrumentParams::new(InstrumentId::new("BOND-1").unwrap())
    });
    market.instrument(banded.unwrap());
    let mut placed = |client_seq, price| {
        let new = order(session, client_seq, limit(ALICE, Side::Buy, price, 1));
        market.messages_of(new)
    };
    let band = RejectReason::PriceBand;
    assert_eq!(refusal(&placed(1, 8_999)), (band, 9_000));
    assert_eq!(refusal(&placed(2, 11_001)), (band, 11_000));
    let accepted = placed(3, 9_500)[0].handle;

    let change = |client_seq, price: Option<i64>, quantity: Option<u64>| {
        Request::Amend(AmendRequest {
            order: OrderRef::Handle(accepted),
            user: UserIx(ALICE),
            session,
            client_seq,
            price: price.map(Ticks),
            quantity: quantity.map(Lots),
            new_client_order_id: 0,
            limit_checked: false,
            key_hash: Id128::NONE,
        })
    };
    let above = market.messages_of(change(4, Some(12_000), None));
    assert_eq!(refusal(&above), (band, 11_000));
    let below = market.messages_of(change(5, Some(1), None));
    assert_eq!(refusal(&below), (band, 9_000));
    // The band has moved away from the order: it may not grow.
    let moved = InstrumentParams {
        decimals: 2,
        band_low: Ticks(10_000),
        band_high: Ticks(11_000),
        ..InstrumentParams::new(InstrumentId::new("BOND-1").unwrap())
    };
    market.instrument(InstrumentSpec::new(&moved).unwrap());
    let grown = market.messages_of(change(6, None, Some(2)));
    assert_eq!(refusal(&grown), (band, 10_000));
    // Other refusals of the book have no limit.
    let halt = Request::SetPhase {
        instrument: InstrumentIx(0),
        phase: Phase::Halt,
        cancel_orders: false,
        lifts_halt: false,
        key_hash: Id128::NONE,
    };
    market.execute(halt).unwrap();
    let halted = market.messages_of(change(7, None, Some(3)));
    assert_eq!(refusal(&halted), (RejectReason::InstrumentHalted, 0));
}

#[test]
fn every_session_of_the_user_gets_the_hold_after_a_funding() {
    let mut market = Market::small();
    let first = market.session(UserIx(ALICE), 1);
    let other = market.session(UserIx(BOB), 2);
    let second = market.session(UserIx(ALICE), 3);
    market
        .submit(Request::CloseSession {
            session: second,
            epoch: None,
            keep_orders: true,
        })
        .unwrap();
    // 100.00 roubles and 0.10 of fee are drawn.
    let bid = order(first, 1, limit(ALICE, Side::Buy, 10_000, 1));
    assert_eq!(market.messages_of(bid).len(), 1);
    let (hold, balance) = trading_hold(&market, ALICE, AssetIx::MONEY);
    let told = |undrawn, cause| ReportBody::HoldChanged {
        asset: AssetIx::MONEY,
        hold_id: balance.hold_id,
        undrawn: Minor(undrawn),
        drawn: Minor(10_010),
        cause,
    };
    let undrawn = balance.undrawn.0;
    let reports = market.messages_of(fund(&balance, HoldKind::Trading, 5_000));
    let body = told(undrawn + 5_000, FundingCause::Fund);
    // The closed session as well: it gets the message when it resumes.
    assert_eq!(
        brief(&reports),
        [(first.0, 2, body), (second.0, 1, body)],
        "and not session {other:?} of another user"
    );
    let reports = market.messages_of(Request::Defund {
        hold,
        amount_minor: Minor(7_000),
        funding_seq: balance.funding_seq + 2,
        key_hash: Id128::NONE,
    });
    let body = told(undrawn - 2_000, FundingCause::Defund);
    assert_eq!(brief(&reports), [(first.0, 3, body), (second.0, 2, body)]);
    // A single-order hold belongs to the platform and is not reported.
    assert_eq!(
        market.messages_of(fund(&balance, HoldKind::Order, 5_000)),
        []
    );
    let (units, balance) = trading_hold(&market, ALICE, AssetIx::units(InstrumentIx(0)));
    let reports = market.messages_of(Request::CloseHold {
        hold: units,
        funding_seq: balance.funding_seq + 1,
        key_hash: Id128::NONE,
    });
    let body = ReportBody::HoldChanged {
        asset: balance.asset,
        hold_id: balance.hold_id,
        undrawn: Minor::ZERO,
        drawn: Minor::ZERO,
        cause: FundingCause::Close,
    };
    assert_eq!(brief(&reports), [(first.0, 4, body), (second.0, 3, body)]);
}

/// A market in which alice's session has sold `lots` to bob's, one trade per lot.
fn traded(lots: u64) -> (Market, [SessionIx; 3], Vec<Sequence>) {
    let mut market = Market::small();
    let sessions = [
        market.session(UserIx(ALICE), 1),
        market.session(UserIx(BOB), 2),
        market.session(UserIx(BOB), 3),
    ];
    let ask = order(sessions[0], 1, limit(ALICE, Side::Sell, 10_000, lots));
    market.messages_of(ask);
    let trades = (1..=lots).map(|seq| {
        let bid = order(sessions[1], seq, limit(BOB, Side::Buy, 10_000, 1));
        assert_eq!(
            market.messages_of(bid).len(),
            3,
            "acknowledged, and a fill each"
        );
        market.room.sequence()
    });
    let trades = trades.collect();
    (market, sessions, trades)
}

#[test]
fn a_session_gets_a_message_when_settlement_passes_its_trade() {
    let (mut market, [maker, taker, idle], trades) = traded(2);
    let before = |market: &Market, session: SessionIx| {
        let row = market.room.session(session);
        row.expect("a known session").last_number
    };
    let numbers = [before(&market, maker), before(&market, taker)];
    let mut told = 0;
    let mut check = |market: &mut Market, posted: u64, finalized: u64, is_told: bool| {
        let known = *market.room.settlement();
        let reports = market.messages_of(settled(Sequence(posted), Sequence(finalized)));
        // Positions never decrease. They also cover settlement's own records that directly follow.
        let posted = known.posted.max(Sequence(posted));
        let finalized = known.finalized.max(Sequence(finalized));
        told += u64::from(is_told);
        let body = ReportBody::Settled {
            posted,
            finalized,
            trades_final: finalized.0,
        };
        let expected = [
            (maker.0, numbers[0] + told, body),
            (taker.0, numbers[1] + told, body),
        ];
        let expected = if is_told { &expected[..] } else { &[] };
        assert_eq!(brief(&reports), expected, "{posted} {finalized}");
    };
    let [first, second] = [trades[0].0, trades[1].0];
    check(&mut market, first - 1, 0, false);
    check(&mut market, first, 0, true);
    check(&mut market, second, first - 1, true);
    check(&mut market, second, first, true);
    // A trade without a session causes no message.
    market.place(limit(ALICE, Side::Sell, 10_000, 1));
    market.place(limit(BOB, Side::Buy, 10_000, 1));
    let through = market.room.sequence().0;
    check(&mut market, through, first, false);
    check(&mut market, through, second, true);
    check(&mut market, through, through, false);
    assert_eq!(before(&market, idle), 0);
}

#[test]
fn settlement_sends_one_message_per_session_with_open_trades() {
    let (mut market, [maker, taker, _], trades) = traded(20);
    let from = trades[0].0;
    let mut counts = [0; 3];
    let mut rounds = 0;
    for position in from - 1..=trades[19].0 {
        for report in market.messages_of(settled(Sequence(position), Sequence(position))) {
            counts[report.session.index()] += 1;
        }
        rounds += 1;
    }
    assert_eq!((rounds, counts), (21, [20, 20, 0]), "{maker:?} {taker:?}");
    // All trades at once: one message per session.
    let (mut market, _, trades) = traded(20);
    let reports = market.messages_of(settled(trades[19], trades[19]));
    assert_eq!(reports.len(), 2);
    let through = market.room.sequence();
    assert_eq!(market.messages_of(settled(through, through)), []);
}

#[test]
fn both_sessions_of_a_bust_trade_get_a_message() {
    let (mut market, [maker, taker, _], _) = traded(1);
    let party = |session, seq: u64| TradeParty {
        session,
        handle: Handle::from_engine_id(seq << 32),
        client_order_id: 100 + seq,
    };
    let bust = Bust {
        trade: Id128::from_u128(7),
        trade_number: 1,
        instrument: InstrumentIx(0),
        buy: party(taker, 2),
        sell: party(maker, 1),
    };
    let mut unknown = bust;
    unknown.sell.session = SessionIx(3);
    let refused = market.refuse(Request::Bust(unknown));
    assert_eq!(refused.reason, RejectReason::Malformed);
    let reports = market.messages_of(Request::Bust(bust));
    let told = |report: &Report, party: TradeParty, side| {
        assert_eq!(report.instrument, InstrumentIx(0));
        let found = TradeParty {
            session: report.session,
            handle: report.handle,
            client_order_id: report.client_order_id,
        };
        let body = ReportBody::Busted {
            trade: bust.trade,
            trade_number: 1,
            side,
        };
        assert_eq!((found, report.body), (party, body));
    };
    assert_eq!(reports.len(), 2);
    told(&reports[0], bust.buy, Side::Buy);
    told(&reports[1], bust.sell, Side::Sell);
    // A trade of orders without sessions causes no message.
    let other = Bust {
        trade: Id128::from_u128(8),
        buy: TradeParty::NONE,
        ..bust
    };
    assert_eq!(market.messages_of(Request::Bust(other)).len(), 1);
}

#[test]
fn a_restored_state_sends_the_same_messages() {
    let (mut market, _, trades) = traded(3);
    market.messages_of(settled(trades[1], trades[0]));
    let mut restored = Market::small();
    restored.room = Admission::restore(&market.room.image(), AdmissionConfig::default());
    assert_eq!(restored.room.state_hash(), market.room.state_hash());
    restored.time_ns = market.time_ns;
    let request = settled(trades[2], trades[2]);
    assert_eq!(restored.messages_of(request), market.messages_of(request));
    assert_eq!(restored.room.state_hash(), market.room.state_hash());
}

/// `design.md` 2: an idle session is forgotten by command.
#[test]
fn a_closed_session_without_open_business_is_forgotten_and_its_name_is_free() {
    let (mut market, [maker, taker, idle], trades) = traded(1);
    let epoch = |market: &Market, session: SessionIx| market.room.session(session).unwrap().epoch;
    let forget = |market: &Market, session| Request::ForgetSession {
        session,
        epoch: epoch(market, session),
    };
    let close = |session| Request::CloseSession {
        session,
        epoch: None,
        keep_orders: true,
    };
    let reason = |market: &mut Market, session| market.refuse(forget(market, session)).reason;
    assert_eq!(
        reason(&mut market, idle),
        RejectReason::InvalidCombination,
        "it is open"
    );
    market.execute(close(idle)).unwrap();
    let login = Request::ForgetSession {
        session: idle,
        epoch: Sequence(1),
    };
    assert_eq!(
        market.refuse(login).reason,
        RejectReason::InvalidCombination,
        "a later login"
    );
    market.execute(close(maker)).unwrap();
    assert_eq!(
        reason(&mut market, maker),
        RejectReason::InvalidCombination,
        "unsettled"
    );
    let bid = order(taker, 9, limit(BOB, Side::Buy, 5_000, 1));
    let Command::New(bid) = market.execute(bid).unwrap() else {
        panic!("another command");
    };
    market.messages_of(settled(trades[0], trades[0]));
    market.execute(close(taker)).unwrap();
    assert_eq!(
        reason(&mut market, taker),
        RejectReason::InvalidCombination,
        "an open order"
    );
    market
        .execute(cancel(BOB, OrderRef::Handle(bid.handle)))
        .unwrap();
    let number = market.room.session(taker).unwrap().last_number;
    assert!(number > 0);
    for (session, left) in [(idle, 1), (taker, 0)] {
        market.execute(forget(&market, session)).unwrap();
        assert_eq!(market.room.user(UserIx(BOB)).unwrap().sessions, left);
        let unknown = Request::ForgetSession {
            session,
            epoch: epoch(&market, session),
        };
        assert_eq!(market.refuse(unknown).reason, RejectReason::UnknownSession);
    }
    assert_eq!(market.room.session_ix(Id128::from_u128(2)), None);
    let restored = Admission::restore(&market.room.image(), AdmissionConfig::default());
    assert_eq!(restored.state_hash(), market.room.state_hash());
    assert_eq!(restored.session_ix(Id128::from_u128(2)), None);
    // The name starts a session of its own, under an index that was never used.
    let again = market.session(UserIx(BOB), 2);
    assert_eq!(again, SessionIx(3));
    let row = market.room.session(again).unwrap();
    assert_eq!((row.last_number, row.client_seq), (0, 0));
    assert_eq!(market.room.user(UserIx(BOB)).unwrap().sessions, 1);
    let bid = order(again, 1, limit(BOB, Side::Buy, 5_000, 1));
    assert_eq!(market.messages_of(bid)[0].session, again);
    market.room.check_invariants();
}
