//! Gas of each action. Gas is deterministic: the printed figures are the cost, the limits are those
//! of `design.md` 9. `cargo test -p chain --lib gas -- --nocapture` prints the table.

use alloy::sol_types::SolEvent;

use super::machine::{Done, Market};
use super::member;
use crate::Address;
use crate::contracts::{Action, Grant, Payout, RoleSet, Settlement, Terms, Trade, id_hash};

/// Trades of one transaction.
const BATCH: u64 = 250;
/// Most gas per trade of a batch, by the number of members.
const LIMITS: [(usize, u64); 2] = [(16, 25_000), (1_000, 45_000)];

/// Trades between members in a fixed mixed order.
fn trades(members: &[Address], bond: Address, first: u64) -> Vec<Trade> {
    let mut state = first;
    let mut below = |end: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end
    };
    let made = (first..first + BATCH).map(|number| {
        let buyer = below(members.len());
        // Another member than the buyer.
        let seller = (buyer + 1 + below(members.len() - 1)) % members.len();
        let payment = 990_00;
        Trade {
            token: bond,
            number,
            buyer: members[buyer],
            seller: members[seller],
            quantity: 1,
            payment,
            fee: payment / 1000,
        }
    });
    made.collect()
}

/// Gas per trade of the second of two batches: the fee account has been paid before.
fn per_trade(mut market: Market, members: usize) -> u64 {
    let members = market.members(members, 1_000_000_00, 1_000);
    let bond = market.bond;
    let mut settle = |id: &str, first| -> Done {
        let batch = market.settle(id, trades(&members, bond, first));
        let done = market.done(&batch);
        let settled = done.logs.iter();
        let settled = settled.filter(|log| Settlement::TradeSettled::decode_log(log).is_ok());
        assert_eq!(settled.count() as u64, BATCH);
        done
    };
    settle("n1:1", 1);
    settle("n1:2", 1 + BATCH).gas / BATCH
}

#[test]
fn settlement_costs_at_most_25_000_gas_per_trade_with_16_members_and_45_000_with_1_000() {
    println!("gas per trade, {BATCH} trades per batch | version 2 | version 1 | limit");
    for (members, limit) in LIMITS {
        let gas = per_trade(Market::new(), members);
        let former = per_trade(Market::former(), members);
        println!("{members} members | {gas} | {former} | {limit}");
        assert!(gas <= limit, "{members} members: {gas}");
        assert!(gas <= former, "{members} members: {gas}, before {former}");
    }
}

#[test]
fn gas_of_the_other_actions_is_below_their_limits() {
    let mut market = Market::new();
    let members = market.members(100, 1_000_000, 1_000);
    let (money, token) = (market.contracts.money, market.bond);
    let account = Address::of_user("system:redemption");
    market.register(vec![account]);
    market.mint(money, account, 1_000_000);
    let row = |market: &mut Market, name: &str, action: Action, holders: u64| {
        let limit = action.call().gas_limit.expect("a limit");
        let gas = market.done(&action).gas;
        println!("{name} | {} | {}", gas / holders, limit / holders);
        assert!(gas <= limit);
    };
    println!("action | gas | limit");
    for action in plain(token) {
        let debug = format!("{action:?}");
        let name = debug.split(' ').next().unwrap_or_default();
        row(&mut market, name, action, 1);
    }
    for (name, units) in [("coupon, per holder", 0), ("maturity, per holder", 10)] {
        let payouts = members.iter().map(|holder| Payout {
            holder: *holder,
            units,
            payment: 10,
        });
        let distribute = Action::Distribute {
            redemption: market.contracts.redemption,
            id: name.into(),
            part: 0,
            token,
            account,
            payouts: payouts.collect(),
        };
        row(&mut market, name, distribute, members.len() as u64);
    }
    let new = market.deploy_token("BOND-2", |_| {});
    let account = market.deploy_migration(token, new);
    for (contract, roles) in [(token, RoleSet::REDEEM), (new, RoleSet::MOVE)] {
        let grant = Grant { account, roles };
        let grant = Action::SetRoles { contract, grant };
        market.machine.done(market.owner, &grant);
        let (token, paused) = (contract, true);
        market.done(&Action::SetPaused { token, paused });
    }
    let move_holders = Action::MoveHolders {
        migration: account,
        part: 0,
        holders: members.clone(),
    };
    let holders = members.len() as u64;
    row(&mut market, "move, per holder", move_holders, holders);
}

/// Actions on one token that leave it as it is needed for the next ones.
fn plain(token: Address) -> Vec<Action> {
    let (account, to) = (member(0), member(1));
    vec![
        Action::Mint {
            token,
            to: account,
            units: 100,
            id: Some("m-1".into()),
        },
        Action::Burn {
            token,
            from: account,
            units: 10,
            id: Some("b-1".into()),
        },
        Action::Transfer {
            token,
            from: account,
            to,
            units: 1,
        },
        Action::FreezeUnits {
            token,
            account,
            units: 5,
        },
        Action::UnfreezeUnits {
            token,
            account,
            units: 5,
        },
        Action::SetFrozen {
            token,
            account,
            frozen: true,
        },
        Action::ForcedTransfer {
            token,
            id: "f-1".into(),
            from: account,
            to,
            units: 10,
            reason: id_hash("court order"),
        },
        Action::SetTerms {
            token,
            terms: Terms {
                document_hash: id_hash("decision"),
                terms_hash: id_hash("terms"),
                document_uri: "x".repeat(1_024),
            },
        },
    ]
}

#[test]
fn the_costliest_trade_fits_the_gas_of_one_trade() {
    let mut market = Market::new();
    // The seller has no money yet, the buyer no units, and the fee account nothing.
    let (buyer, seller) = (member(100), member(101));
    market.register(vec![buyer, seller]);
    let (money, bond) = (market.contracts.money, market.bond);
    market.mint(money, buyer, 1_000);
    market.mint(bond, seller, 10);
    let trade = Trade {
        token: bond,
        number: 1,
        buyer,
        seller,
        quantity: 10,
        payment: 900,
        fee: 100,
    };
    let batch = market.settle("n1:1", vec![trade]);
    let done = market.done(&batch);
    println!("costliest trade, with its transaction: {} gas", done.gas);
    assert_eq!(market.machine.balance(bond, buyer), 10);
    assert_eq!(market.machine.balance(money, seller), 900);
}
