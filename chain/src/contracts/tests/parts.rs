//! Distributions and the move of all holders of a token, in parts.

use alloy::sol_types::SolEvent;

use super::machine::Market;
use super::member;
use crate::Address;
use crate::contracts::{Action, Grant, Migration, Payout, Redemption, RoleSet, Version};

fn payout(holder: Address, units: u128, payment: u128) -> Payout {
    Payout {
        holder,
        units,
        payment,
    }
}

fn distribute(market: &Market, id: &str, part: u64, payouts: Vec<Payout>) -> Action {
    Action::Distribute {
        redemption: market.contracts.redemption,
        id: id.into(),
        part,
        token: market.bond,
        account: Address::of_user("system:redemption"),
        payouts,
    }
}

/// Members with bonds, and money in the redemption account.
fn funded(members: usize, money: u128) -> (Market, Vec<Address>) {
    let mut market = Market::new();
    let members = market.members(members, 0, 100);
    let account = Address::of_user("system:redemption");
    market.register(vec![account]);
    let token = market.contracts.money;
    market.mint(token, account, money);
    (market, members)
}

#[test]
fn a_coupon_is_paid_in_parts_once_each_and_burns_nothing() {
    let (mut market, members) = funded(5, 500);
    let payouts: Vec<Payout> = members.iter().map(|to| payout(*to, 0, 100)).collect();
    let first = distribute(&market, "coupon-1", 0, payouts[..3].to_vec());
    let second = distribute(&market, "coupon-1", 1, payouts[3..].to_vec());
    assert!(!market.send(&second).success, "parts have an order");
    let done = market.done(&first);
    let events = done.logs.iter();
    let paid = events.filter_map(|log| Redemption::Distributed::decode_log(log).ok());
    assert_eq!(paid.count(), 3);
    assert!(!market.send(&first).success, "a part is accepted once");
    market.done(&second);
    for repeat in [&first, &second] {
        assert!(!market.send(repeat).success);
    }
    let money = market.contracts.money;
    for member in &members {
        assert_eq!(market.machine.balance(money, *member), 100);
        assert_eq!(market.machine.balance(market.bond, *member), 100);
    }
    assert_eq!(market.machine.supply(market.bond), 500);
    // Another distribution has its own parts.
    let unfunded = distribute(&market, "coupon-2", 0, payouts[..1].to_vec());
    assert!(!market.send(&unfunded).success, "the account is empty");
}

#[test]
fn the_parts_of_a_distribution_are_atomic_bounded_and_of_one_token() {
    let (mut market, members) = funded(3, 1_000);
    let too_many = vec![payout(members[0], 0, 1); 257];
    assert!(
        !market
            .send(&distribute(&market, "d-1", 0, too_many))
            .success
    );
    let none = distribute(&market, "d-1", 0, Vec::new());
    assert!(!market.send(&none).success);
    // The last holder has fewer units: the payments before are undone.
    let payouts = vec![payout(members[0], 100, 100), payout(members[1], 101, 100)];
    assert!(!market.send(&distribute(&market, "d-1", 0, payouts)).success);
    let money = market.contracts.money;
    assert_eq!(market.machine.balance(money, members[0]), 0);
    assert_eq!(market.machine.supply(market.bond), 300);
    // Frozen holders are paid and their units end.
    let bond = market.bond;
    for token in [money, bond] {
        let freeze = Action::SetFrozen {
            token,
            account: members[0],
            frozen: true,
        };
        market.done(&freeze);
    }
    let first = vec![payout(members[0], 100, 100)];
    market.done(&distribute(&market, "d-1", 0, first));
    assert_eq!(market.machine.balance(money, members[0]), 100);
    assert!(market.machine.is_frozen(money, members[0]));
    market.bond = market.deploy_token("BOND-2", |_| {});
    let other = vec![payout(members[1], 0, 1)];
    let other = distribute(&market, "d-1", 1, other);
    assert!(!market.send(&other).success, "another token");
    // A frozen account pays nothing.
    market.bond = bond;
    let freeze = Action::SetFrozen {
        token: money,
        account: Address::of_user("system:redemption"),
        frozen: true,
    };
    market.done(&freeze);
    let second = vec![payout(members[1], 100, 100)];
    assert!(!market.send(&distribute(&market, "d-1", 1, second)).success);
}

/// A move of `market.bond` to a new token. Returns the new token and the migration contract.
fn prepare(market: &mut Market) -> (Address, Address) {
    let from = market.bond;
    let to = market.deploy_token("BOND-1", |_| {});
    let migration = market.deploy_migration(from, to);
    let grant = |contract, roles| Action::SetRoles {
        contract,
        grant: Grant {
            account: migration,
            roles,
        },
    };
    let burn = match market.contracts.version {
        Version::V1 => Action::AddAgent {
            contract: from,
            agent: migration,
        },
        Version::V2 => grant(from, RoleSet::REDEEM),
    };
    for right in [burn, grant(to, RoleSet::MOVE)] {
        market.machine.done(market.owner, &right);
    }
    (to, migration)
}

fn all_holders_move(mut market: Market) {
    let members = market.members(7, 0, 100);
    let from = market.bond;
    let freezes = [
        Action::FreezeUnits {
            token: from,
            account: members[1],
            units: 40,
        },
        Action::SetFrozen {
            token: from,
            account: members[2],
            frozen: true,
        },
        Action::SetFrozen {
            token: from,
            account: member(9),
            frozen: true,
        },
    ];
    for freeze in &freezes {
        market.done(freeze);
    }
    let (to, migration) = prepare(&mut market);
    let part = |part, holders: &[Address]| Action::MoveHolders {
        migration,
        part,
        holders: holders.to_vec(),
    };
    let pause = |token, paused| Action::SetPaused { token, paused };
    assert!(!market.send(&part(0, &members[..4])).success, "not paused");
    market.done(&pause(from, true));
    assert!(!market.send(&part(0, &members[..4])).success, "not paused");
    market.done(&pause(to, true));
    market.done(&part(0, &members[..4]));
    for repeat in [part(0, &members[..4]), part(2, &members[4..])] {
        assert!(!market.send(&repeat).success, "parts have an order");
    }
    let stranger = Address::of_user("stranger");
    let second = part(1, &[&members[3..], &[member(9)]].concat());
    assert!(!market.machine.send(stranger, &second).success);
    // A holder of an earlier part has nothing left to move.
    let done = market.done(&second);
    let events = done.logs.iter();
    let moved = events.filter_map(|log| Migration::HolderMoved::decode_log(log).ok());
    assert_eq!(moved.count(), 4);
    let machine = &market.machine;
    assert_eq!((machine.supply(from), machine.supply(to)), (0, 700));
    for member in &members {
        assert_eq!(machine.balance(from, *member), 0);
        assert_eq!(machine.balance(to, *member), 100);
    }
    assert_eq!(machine.frozen_units(to, members[1]), 40);
    assert!(machine.is_frozen(to, members[2]) && machine.is_frozen(to, member(9)));
    market.done(&pause(to, false));
    let transfer = |token| Action::Transfer {
        token,
        from: members[0],
        to: members[1],
        units: 1,
    };
    market.done(&transfer(to));
    assert!(!market.send(&transfer(from)).success);
}

#[test]
fn all_holders_of_a_token_move_to_a_new_one_in_parts() {
    all_holders_move(Market::new());
}

#[test]
fn all_holders_of_a_token_of_version_1_move_to_a_new_one_in_parts() {
    all_holders_move(Market::former());
}

#[test]
fn holders_move_only_with_the_migrations_roles_in_both_tokens() {
    let mut market = Market::new();
    let other = market.deploy_token("BOND-2", |_| {});
    let (token, members) = (market.bond, market.members(1, 0, 100));
    let migration = market.deploy_migration(token, other);
    for token in [token, other] {
        let paused = true;
        market.done(&Action::SetPaused { token, paused });
    }
    let move_holders = Action::MoveHolders {
        migration,
        part: 0,
        holders: members,
    };
    let refused = market.send(&move_holders);
    assert!(!refused.success, "the migration has no role in the tokens");
    let grant = |contract, roles| Action::SetRoles {
        contract,
        grant: Grant {
            account: migration,
            roles,
        },
    };
    // With one of the two roles, units would be lost or made.
    for (redeem, take_over) in [
        (RoleSet::REDEEM, RoleSet::NONE),
        (RoleSet::NONE, RoleSet::MOVE),
    ] {
        for right in [grant(token, redeem), grant(other, take_over)] {
            market.machine.done(market.owner, &right);
        }
        assert!(!market.send(&move_holders).success);
    }
    assert_eq!(market.machine.supply(token), 100);
    assert_eq!(market.machine.supply(other), 0);
}

#[test]
fn a_migration_is_of_two_different_tokens_with_equal_decimals() {
    let mut market = Market::new();
    let (bond, money, owner) = (market.bond, market.contracts.money, market.owner);
    for (from, to) in [(bond, bond), (bond, money), (bond, owner)] {
        let deploy = Action::DeployMigration {
            from,
            to,
            owner,
            grants: Vec::new(),
        };
        assert!(!market.send(&deploy).success, "{deploy:?}");
    }
}
