//! Mass cancels and kill switches in slices: their turns, and the orders that a slice inspects.

mod support;

use admission::*;
use support::*;
use types::command::MassScope;
use types::*;

const ALICE: UserIx = UserIx(0);
const BOB: UserIx = UserIx(1);
const SLICE: usize = 16;

fn mass_cancel(user: UserIx, side: Option<Side>) -> Request {
    Request::MassCancel(MassCancelRequest {
        scope: MassScope::User(user),
        instrument: InstrumentIx::NONE,
        side,
        reason: CancelReason::MassCancel,
        user,
        session: SessionIx::NONE,
        client_seq: 0,
        key_hash: Id128::NONE,
    })
}

/// Executes the first slice of a request; returns the number of orders inspected and not selected.
fn execute_slice(market: &mut Market, request: Request, orders: usize) -> u64 {
    let bound = SliceBound {
        orders,
        inspected: 200,
    };
    let mut command = market
        .room
        .admit(&request, market.time_ns)
        .expect("admitted");
    let left = market.room.slice(&mut command, bound, &mut Vec::new());
    market.messages_of_command(command);
    left
}

fn place(market: &mut Market, user: UserIx, side: Side) -> Handle {
    let price = match side {
        Side::Buy => 100,
        Side::Sell => 2_000,
    };
    market.place(limit(user.0, side, price, 1))
}

// `design.md` 7: a mass cancel costs the orders it cancels.
#[test]
fn r345_mass_cancel_slices_inspect_each_kept_order_once() {
    const PAIRS: usize = 1_000;
    let mut market = Market::with_two_users(4_096);
    let mut buys = Vec::new();
    for at in 0..PAIRS {
        buys.push(place(&mut market, ALICE, Side::Buy));
        if at >= PAIRS / 2 {
            place(&mut market, ALICE, Side::Sell);
        }
    }
    let mut left = execute_slice(&mut market, mass_cancel(ALICE, Some(Side::Sell)), SLICE);
    let mut slices = 1;
    let mut ended = 0;
    while let Some((owner, of)) = market.room.next_sweep(UserIx::NONE) {
        assert_eq!(owner, ALICE);
        left += execute_slice(&mut market, Request::CancelSlice(of), SLICE);
        slices += 1;
        // Ends the order at which the last slice stopped, and its neighbours.
        if slices % 5 == 0 {
            let at = PAIRS / 2 + slices * SLICE;
            for handle in buys.drain(at - ended - 2..at - ended + 2) {
                market
                    .execute(cancel(ALICE.0, OrderRef::Handle(handle)))
                    .expect("open");
                ended += 1;
            }
        }
        // A node that starts from a snapshot continues with the same slice.
        if slices % 7 == 0 {
            let config = AdmissionConfig {
                orders_max: 4_096,
                ..AdmissionConfig::default()
            };
            let restored = Admission::restore(&market.room.image(), config);
            assert_eq!(restored.state_hash(), market.room.state_hash());
            market.room = restored;
        }
    }
    // The first half of the buys takes slices of its own.
    assert!(
        slices >= (PAIRS / 2).div_ceil(SLICE) + PAIRS / 2 / 200,
        "{slices}"
    );
    let open: Vec<_> = market.room.orders().collect();
    assert!(open.iter().all(|order| order.side == Side::Buy));
    assert_eq!(open.len(), PAIRS - ended);
    let inspected = left as usize;
    assert!(
        inspected <= PAIRS + slices,
        "{inspected} inspections of {PAIRS} orders in {slices} slices"
    );
}

#[test]
fn r345_sweeps_alternate_between_members() {
    let mut market = Market::with_two_users(4_096);
    for user in [ALICE, BOB] {
        for _ in 0..100 {
            place(&mut market, user, Side::Buy);
        }
    }
    for user in [ALICE, ALICE, ALICE, BOB] {
        execute_slice(&mut market, mass_cancel(user, None), 0);
    }
    assert_eq!([ALICE, BOB].map(|user| market.room.sweeps_of(user)), [3, 1]);
    let mut last = UserIx::NONE;
    let mut turns = Vec::new();
    while let Some((owner, of)) = market.room.next_sweep(last) {
        assert!(market.room.is_sweeping(of));
        execute_slice(&mut market, Request::CancelSlice(of), SLICE);
        turns.push((owner, of));
        last = owner;
    }
    let slices = 100usize.div_ceil(SLICE);
    let first: Vec<_> = turns
        .iter()
        .take(2 * slices)
        .map(|(owner, _)| *owner)
        .collect();
    assert_eq!(first, [ALICE, BOB].repeat(slices));
    let of_alice: Vec<_> = turns.iter().filter(|(owner, _)| *owner == ALICE).collect();
    assert!(of_alice.is_sorted_by_key(|(_, of)| *of));
    assert_eq!(
        of_alice.len(),
        slices + 2,
        "the later ones find nothing left"
    );
    assert_eq!(market.room.orders().count(), 0);
}
