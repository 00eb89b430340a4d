//! Bounds of members and groups, the dead man's switch of a session, new client order ids.

mod support;

use std::collections::BTreeSet;

use admission::*;
use support::*;
use types::command::{
    BoundsOf, CancelAllAfter, MassScope, MemberGroup, OrderBounds, SetMemberGroup, SetOrderBounds,
};
use types::*;

const ALICE: UserIx = UserIx(0);
const BOB: UserIx = UserIx(1);

fn set_bounds(of: BoundsOf, bounds: Option<OrderBounds>) -> Request {
    Request::SetOrderBounds(SetOrderBounds {
        of,
        bounds,
        key_hash: Id128::NONE,
    })
}

fn set_group(user: UserIx, group: u32) -> Request {
    Request::SetMemberGroup(SetMemberGroup {
        user,
        group: MemberGroup(group),
        key_hash: Id128::NONE,
    })
}

fn lots(lots_per_order: u64) -> OrderBounds {
    OrderBounds {
        lots_per_order: Lots(lots_per_order),
        ..OrderBounds::NONE
    }
}

/// Checks that the state restored from its image has the same hash, and returns it.
fn restored(market: &Market) -> Admission {
    let restored = Admission::restore(&market.room.image(), AdmissionConfig::default());
    assert_eq!(restored.state_hash(), market.room.state_hash());
    restored
}

// F07, `design.md` 7.
#[test]
fn orders_are_bounded_in_lots_and_value() {
    let mut market = Market::small();
    let bounds = OrderBounds {
        lots_per_order: Lots(50),
        value_per_order: Minor(100_000),
        ..OrderBounds::NONE
    };
    market
        .execute(set_bounds(BoundsOf::Node, Some(bounds)))
        .unwrap();
    let reject = market.refuse(Request::New(limit(0, Side::Sell, 1, 51)));
    assert_eq!(
        (reject.reason, reject.limit()),
        (RejectReason::OrderSizeLimit, 50)
    );
    let order = market.place(limit(0, Side::Buy, 2_000, 50));
    let reject = market.refuse(Request::New(limit(0, Side::Buy, 2_001, 50)));
    let expected = (RejectReason::OrderValueLimit, 100_000);
    assert_eq!((reject.reason, reject.limit()), expected);
    // An amend may not raise an order above either bound.
    let reject = market.refuse(amend(0, order, Some(2_001), None));
    assert_eq!(reject.reason, RejectReason::OrderValueLimit);
    let reject = market.refuse(amend(0, order, Some(1_000), Some(51)));
    assert_eq!(reject.reason, RejectReason::OrderSizeLimit);
    // Lowered bounds leave open orders, and amends that reduce them pass.
    market
        .execute(set_bounds(BoundsOf::Node, Some(lots(10))))
        .unwrap();
    market.execute(amend(0, order, None, Some(40))).unwrap();
    let reject = market.refuse(amend(0, order, None, Some(41)));
    assert_eq!(reject.reason, RejectReason::OrderSizeLimit);
    let reject = restored(&market).admit(&Request::New(limit(0, Side::Buy, 1, 11)), market.time_ns);
    assert_eq!(reject.unwrap_err().reason, RejectReason::OrderSizeLimit);
}

#[test]
fn user_bounds_override_group_bounds_override_node_bounds() {
    let mut market = Market::small();
    let most = |market: &Market| {
        let user = market.room.user(ALICE).unwrap();
        market.room.bounds(user).lots_per_order.0
    };
    market
        .execute(set_bounds(BoundsOf::Node, Some(lots(10))))
        .unwrap();
    market.execute(set_group(ALICE, 7)).unwrap();
    assert_eq!(most(&market), 10, "the group has none");
    let of_group = BoundsOf::Group(MemberGroup(7));
    market
        .execute(set_bounds(of_group, Some(lots(20))))
        .unwrap();
    assert_eq!(most(&market), 20);
    let own = BoundsOf::User(ALICE);
    market.execute(set_bounds(own, Some(lots(30)))).unwrap();
    assert_eq!(most(&market), 30);
    assert_eq!(market.room.bounds_of(own), Some(lots(30)));
    let restored = restored(&market);
    let user = restored.user(ALICE).unwrap();
    assert_eq!(restored.bounds(user).lots_per_order, Lots(30));
    market.execute(set_bounds(own, None)).unwrap();
    assert_eq!(most(&market), 20);
    market.execute(set_group(ALICE, 0)).unwrap();
    assert_eq!(most(&market), 10);
    // In another group, whose bounds are set later.
    market.execute(set_group(ALICE, 8)).unwrap();
    assert_eq!(most(&market), 10);
    let other = BoundsOf::Group(MemberGroup(8));
    market.execute(set_bounds(other, Some(lots(5)))).unwrap();
    assert_eq!(most(&market), 5);
    let bob = market.room.user(BOB).unwrap();
    assert_eq!(market.room.bounds(bob).lots_per_order, Lots(10));
    for (request, reason) in [
        (set_group(ALICE, 8), RejectReason::DuplicateRequest),
        (set_group(UserIx(9), 8), RejectReason::UnknownUser),
        (
            set_bounds(other, Some(lots(5))),
            RejectReason::DuplicateRequest,
        ),
        (set_bounds(BoundsOf::Node, None), RejectReason::Malformed),
        (
            set_bounds(BoundsOf::Group(MemberGroup::NONE), Some(lots(1))),
            RejectReason::Malformed,
        ),
        (
            set_bounds(BoundsOf::User(UserIx(9)), Some(lots(1))),
            RejectReason::UnknownUser,
        ),
    ] {
        assert_eq!(market.refuse(request).reason, reason, "{request:?}");
    }
}

/// Number of sessions and message rates, each with another value.
fn rates(first: u32) -> OrderBounds {
    OrderBounds {
        sessions: first,
        session_rate: first + 1,
        user_rate: first + 2,
        group_rate: first + 3,
        ..OrderBounds::NONE
    }
}

// `design.md` 7.
#[test]
fn sessions_and_rates_of_user_override_group_override_node() {
    let mut market = Market::small();
    let known = |admission: &Admission| {
        let user = admission.user(ALICE).unwrap();
        let rates = admission.rates(user);
        let sessions = admission.bounds(user).sessions;
        [sessions, rates.session, rates.user, rates.group]
    };
    assert_eq!(known(&market.room), [u32::MAX, 0, 0, 0], "no limits");
    let of_group = BoundsOf::Group(MemberGroup(7));
    let own = BoundsOf::User(ALICE);
    for (request, expected) in [
        (
            set_bounds(BoundsOf::Node, Some(rates(10))),
            [10, 11, 12, 13],
        ),
        // The group has no bounds yet.
        (set_group(ALICE, 7), [10, 11, 12, 13]),
        (set_bounds(of_group, Some(rates(20))), [20, 21, 22, 23]),
        // A user's own bounds do not change the group's rate.
        (set_bounds(own, Some(rates(30))), [30, 31, 32, 23]),
        (set_bounds(of_group, None), [30, 31, 32, 13]),
        (set_bounds(of_group, Some(rates(40))), [30, 31, 32, 43]),
        (set_group(ALICE, 0), [30, 31, 32, 13]),
        (set_bounds(own, None), [10, 11, 12, 13]),
    ] {
        market.execute(request).unwrap();
        assert_eq!(known(&market.room), expected, "{request:?}");
        assert_eq!(known(&restored(&market)), expected, "{request:?}");
    }
    let bob = market.room.user(BOB).unwrap();
    assert_eq!(market.room.bounds(bob).sessions, 10);
}

#[test]
fn every_bound_changes_the_state_hash() {
    let changes: [fn(&mut OrderBounds); 10] = [
        |bounds| bounds.per_user = 1,
        |bounds| bounds.per_instrument = 1,
        |bounds| bounds.lots_per_order = Lots(1),
        |bounds| bounds.value_per_order = Minor(1),
        |bounds| bounds.journal_bytes_per_minute = 1,
        |bounds| bounds.messages_per_trade = 1,
        |bounds| bounds.sessions = 1,
        |bounds| bounds.session_rate = 1,
        |bounds| bounds.user_rate = 1,
        |bounds| bounds.group_rate = 1,
    ];
    let hashes = changes.map(|change| {
        let mut bounds = OrderBounds::NONE;
        change(&mut bounds);
        let mut market = Market::small();
        market
            .execute(set_bounds(BoundsOf::Node, Some(bounds)))
            .unwrap();
        market.room.state_hash()
    });
    let different: BTreeSet<u64> = hashes.into_iter().collect();
    assert_eq!(different.len(), changes.len());
}

fn switch(session: SessionIx, client_seq: u64, timeout_s: u32) -> Request {
    Request::CancelAllAfter(CancelAllAfterRequest {
        user: ALICE,
        session,
        client_seq,
        timeout_s,
    })
}

// F12.
#[test]
fn a_dead_mans_switch_is_set_moved_and_fires_once() {
    let mut market = Market::small();
    let session = market.session(ALICE, 1);
    let at = |market: &Market| market.room.session(session).unwrap().cancel_all_at_ns;
    let command = market.execute(switch(session, 1, 600)).unwrap();
    let expected = CancelAllAfter {
        user: ALICE,
        session,
        client_seq: 1,
        timeout_s: 600,
    };
    assert_eq!(command, Command::CancelAllAfter(expected));
    assert_eq!(at(&market), market.time_ns + 600_000_000_000);
    assert_eq!(
        restored(&market).session(session).unwrap().cancel_all_at_ns,
        at(&market)
    );
    market.execute(switch(session, 2, 1)).unwrap();
    assert_eq!(at(&market), market.time_ns + 1_000_000_000);
    let reject = market.refuse(switch(session, 2, 5));
    assert_eq!(reject.reason, RejectReason::AlreadySeen);
    let reject = market.refuse(switch(session, 3, 601));
    assert_eq!(
        (reject.reason, reject.limit()),
        (RejectReason::Malformed, 600)
    );
    let reject = market.refuse(switch(SessionIx::NONE, 3, 5));
    assert_eq!(reject.reason, RejectReason::UnknownSession);
    // The switch ends only the session's orders and is off afterwards. Another mass cancel does not
    // stop it.
    let own = market.place(NewRequest {
        session,
        client_seq: 3,
        ..limit(0, Side::Buy, 100, 1)
    });
    let other = market.place(limit(0, Side::Buy, 100, 1));
    let mass_cancel = |reason| {
        Request::MassCancel(MassCancelRequest {
            scope: MassScope::Session(session),
            instrument: InstrumentIx::NONE,
            side: Some(Side::Sell),
            reason,
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
        })
    };
    market
        .execute(mass_cancel(CancelReason::MassCancel))
        .unwrap();
    assert_ne!(at(&market), 0);
    let Request::MassCancel(mut fired) = mass_cancel(CancelReason::CancelAllAfter) else {
        unreachable!()
    };
    fired.side = None;
    market.execute(Request::MassCancel(fired)).unwrap();
    assert_eq!(at(&market), 0);
    assert!(market.room.order(own).is_none() && market.room.order(other).is_some());
    market.execute(switch(session, 4, 5)).unwrap();
    market.execute(switch(session, 5, 0)).unwrap();
    assert_eq!(at(&market), 0);
}

fn rename(order: OrderRef, price: Option<i64>, new_client_order_id: u64) -> Request {
    Request::Amend(AmendRequest {
        order,
        user: ALICE,
        session: SessionIx::NONE,
        client_seq: 0,
        price: price.map(Ticks),
        quantity: None,
        new_client_order_id,
        limit_checked: false,
        key_hash: Id128::NONE,
    })
}

// D37.
#[test]
fn amend_replaces_client_order_id_unless_rejected() {
    let mut market = Market::small();
    let own = |id: u64| NewRequest {
        client_order_id: id,
        ..limit(0, Side::Buy, 100, 10)
    };
    let order = market.place(own(1));
    let other = market.place(NewRequest {
        quantity: Lots(1),
        ..own(2)
    });
    let unnamed = market.place(own(0));
    let named = |market: &Market, id| market.room.client_order(ALICE, id);
    for taken in [1, 2] {
        let reject = market.refuse(rename(OrderRef::Client(1), Some(99), taken));
        let expected = RejectReason::DuplicateClientOrderId;
        assert_eq!(reject.reason, expected);
    }
    market
        .execute(rename(OrderRef::Client(1), Some(99), 7))
        .unwrap();
    assert_eq!((named(&market, 1), named(&market, 7)), (None, Some(order)));
    // The old id is free for another order, and an amend may change the id alone.
    let again = market.place(own(1));
    market
        .execute(rename(OrderRef::Handle(unnamed), None, 8))
        .unwrap();
    assert_eq!(named(&market, 8), Some(unnamed));
    assert_eq!(market.room.order(unnamed).unwrap().price, Ticks(100));
    // The book refuses a price outside the band: the order keeps its id.
    let spec = market.room.spec(InstrumentIx(0)).unwrap();
    let outside = spec.band_high.0 + 1;
    market
        .execute(rename(OrderRef::Client(2), Some(outside), 9))
        .unwrap();
    assert_eq!((named(&market, 2), named(&market, 9)), (Some(other), None));
    assert_eq!(restored(&market).client_order(ALICE, 7), Some(order));
    for id in [1, 2, 7, 8] {
        market.execute(cancel(0, OrderRef::Client(id))).unwrap();
        assert_eq!(named(&market, id), None);
    }
    assert!(market.room.order(again).is_none());
}

/// The order ends while its amend is in flight: neither id is left over.
#[test]
fn an_order_that_ends_before_its_amend_arrives_leaves_no_id() {
    let mut market = Market::small();
    let order = market.place(NewRequest {
        client_order_id: 1,
        ..limit(0, Side::Buy, 100, 10)
    });
    market.submit(cancel(0, OrderRef::Handle(order))).unwrap();
    market
        .submit(rename(OrderRef::Handle(order), Some(99), 5))
        .unwrap();
    market.drain();
    for id in [1, 5] {
        assert_eq!(market.room.client_order(ALICE, id), None);
        market.place(NewRequest {
            client_order_id: id,
            ..limit(0, Side::Buy, 100, 1)
        });
    }
}

/// Admission checks the number of a user's sessions when one is opened: several logins may have
/// passed the gateway's check at once.
#[test]
fn a_session_beyond_the_users_bound_is_refused_and_known_ones_open() {
    let mut market = Market::small();
    let bounds = OrderBounds {
        sessions: 2,
        ..OrderBounds::NONE
    };
    let own = BoundsOf::User(ALICE);
    market.execute(set_bounds(own, Some(bounds))).unwrap();
    let open = |key| {
        Request::OpenSession(SessionRequest {
            key: Id128::from_u128(key),
            user: ALICE,
            stp_group: None,
            cancel_on_disconnect: false,
        })
    };
    for key in [1, 2, 1] {
        market.execute(open(key)).unwrap();
    }
    let reject = market.refuse(open(3));
    assert_eq!(
        (reject.reason, reject.limit()),
        (RejectReason::SessionLimit, 2)
    );
}
