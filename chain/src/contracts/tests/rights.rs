//! Roles, ownership in two steps, ids that are accepted once, terms, freezes and enforcement.

use alloy::primitives::U256;
use alloy::sol_types::SolEvent;

use super::machine::{Machine, Market};
use super::member;
use crate::contracts::{
    Action, Call, CfaToken, Grant, Payout, RoleSet, Settlement, Terms, Trade, Version, id_hash,
    is_listed,
};
use crate::{Address, TxHash};

fn roles(machine: &Machine, contract: Address, account: Address) -> RoleSet {
    let account = account.raw();
    RoleSet::of_word(machine.read(contract, CfaToken::rolesOfCall { account }))
}

fn owner(machine: &Machine, contract: Address) -> Address {
    Address::from(machine.read(contract, CfaToken::ownerCall {}))
}

#[test]
fn the_deployer_keeps_no_right() {
    let mut market = Market::new();
    let deployer = Address::of_user("deployer");
    let contracts = market.contracts.clone();
    let all = [
        contracts.registry,
        contracts.money,
        contracts.settlement,
        contracts.redemption,
        market.bond,
    ];
    for contract in all {
        let machine = &market.machine;
        assert_eq!(roles(machine, contract, deployer), RoleSet::NONE);
        assert_eq!(roles(machine, contract, market.owner), RoleSet::NONE);
        assert_eq!(owner(machine, contract), market.owner);
        let grant = Action::SetRoles {
            contract,
            grant: Grant {
                account: deployer,
                roles: RoleSet::MINT,
            },
        };
        for account in [deployer, market.operator] {
            assert!(!market.machine.send(account, &grant).success);
        }
    }
    let machine = &market.machine;
    let settlement = roles(machine, contracts.money, contracts.settlement);
    let redemption = roles(machine, contracts.money, contracts.redemption);
    let operator = roles(machine, contracts.money, market.operator);
    assert_eq!(
        (operator, settlement, redemption),
        (RoleSet::OPERATOR, RoleSet::SETTLEMENT, RoleSet::REDEMPTION)
    );
    assert_eq!(
        Version::of_token(&machine.code(contracts.money)),
        Some(Version::V2)
    );
    assert_eq!(
        machine.code(contracts.money),
        machine.code(market.bond),
        "the code does not depend on the constructor's arguments"
    );
}

#[test]
fn ownership_needs_the_acceptance_of_the_new_owner() {
    let mut market = Market::new();
    let (next, contract) = (Address::of_user("next"), market.bond);
    let accept = Action::AcceptOwnership { contract };
    let offer = |owner| Action::TransferOwnership { contract, owner };
    assert!(!market.machine.send(next, &accept).success, "no offer yet");
    assert!(!market.send(&offer(next)).success, "not the owner's call");
    market.machine.done(market.owner, &offer(next));
    assert_eq!(owner(&market.machine, contract), market.owner);
    let stranger = Address::of_user("stranger");
    assert!(!market.machine.send(stranger, &accept).success);
    // The owner can offer it to another account instead.
    market.machine.done(market.owner, &offer(stranger));
    assert!(!market.machine.send(next, &accept).success, "withdrawn");
    market.machine.done(market.owner, &offer(next));
    market.machine.done(next, &accept);
    assert_eq!(owner(&market.machine, contract), next);
    assert!(!market.machine.send(next, &accept).success, "accepted once");
    let former_owner = market.owner;
    assert!(!market.machine.send(former_owner, &offer(stranger)).success);
    let grant = Action::SetRoles {
        contract,
        grant: Grant {
            account: market.operator,
            roles: RoleSet::NONE,
        },
    };
    market.machine.done(next, &grant);
    let mint = mint(contract, "after", 1);
    assert!(!market.send(&mint).success, "the roles were taken");
}

fn mint(token: Address, id: &str, units: u128) -> Action {
    Action::Mint {
        token,
        to: member(0),
        units,
        id: Some(id.into()),
    }
}

/// Every call of a token that needs a role, with that role. Member 0 has units.
fn guarded(token: Address) -> Vec<(RoleSet, Action)> {
    let (account, to, units) = (member(0), member(1), 1);
    let mint = |id: Option<&str>| Action::Mint {
        token,
        to: account,
        units,
        id: id.map(Into::into),
    };
    let burn = |id: Option<&str>| Action::Burn {
        token,
        from: account,
        units,
        id: id.map(Into::into),
    };
    let transfer = Action::Transfer {
        token,
        from: account,
        to,
        units,
    };
    let freeze = Action::FreezeUnits {
        token,
        account,
        units,
    };
    let unfreeze = Action::UnfreezeUnits {
        token,
        account,
        units,
    };
    let frozen = false;
    let set_frozen = Action::SetFrozen {
        token,
        account,
        frozen,
    };
    let terms = terms("decision");
    let pause = |paused| Action::SetPaused { token, paused };
    vec![
        (RoleSet::MINT, mint(Some("m"))),
        (RoleSet::MINT, burn(Some("b"))),
        (RoleSet::ISSUE, mint(None)),
        (RoleSet::REDEEM, burn(None)),
        (RoleSet::SETTLE, transfer),
        (RoleSet::FREEZE, freeze),
        (RoleSet::FREEZE, unfreeze),
        (RoleSet::FREEZE, set_frozen),
        (RoleSet::ENFORCE, forced(token, "f", units)),
        (RoleSet::TERMS, Action::SetTerms { token, terms }),
        (RoleSet::PAUSE, pause(true)),
        (RoleSet::PAUSE, pause(false)),
    ]
}

fn terms(document: &str) -> Terms {
    Terms {
        document_hash: id_hash(document),
        terms_hash: id_hash("terms"),
        document_uri: "https://issuer.example/decisions/1 of 2027, as published on the site".into(),
    }
}

fn forced(token: Address, id: &str, units: u128) -> Action {
    Action::ForcedTransfer {
        token,
        id: id.into(),
        from: member(0),
        to: member(1),
        units,
        reason: id_hash("court order"),
    }
}

#[test]
fn each_call_of_a_token_needs_its_role_and_no_other_one() {
    let mut market = Market::new();
    let account = Address::of_user("employee");
    market.members(2, 0, 100);
    let bond = market.bond;
    let all = [
        RoleSet::MINT,
        RoleSet::SETTLE,
        RoleSet::FREEZE,
        RoleSet::PAUSE,
        RoleSet::ENFORCE,
        RoleSet::ISSUE,
        RoleSet::REDEEM,
        RoleSet::REGISTER,
        RoleSet::TERMS,
        RoleSet::MOVE,
    ];
    for (needed, action) in guarded(bond) {
        let others = all.iter().filter(|role| **role != needed);
        let others = others.fold(RoleSet::NONE, |sum, role| sum.and(*role));
        for (roles, is_done) in [(RoleSet::NONE, false), (others, false), (needed, true)] {
            let grant = Action::SetRoles {
                contract: bond,
                grant: Grant { account, roles },
            };
            market.machine.done(market.owner, &grant);
            let sent = market.machine.send(account, &action);
            assert_eq!(sent.success, is_done, "{action:?} with {roles:?}");
        }
    }
}

#[test]
fn the_shared_contracts_refuse_accounts_without_their_role() {
    let mut market = Market::new();
    market.members(2, 100, 100);
    let (bond, contracts) = (market.bond, market.contracts.clone());
    let payout = Payout {
        holder: member(0),
        units: 1,
        payment: 0,
    };
    let calls = [
        market.settle("b-1", Vec::new()),
        Action::IssueAgainstPayment {
            settlement: contracts.settlement,
            id: "i-1".into(),
            token: bond,
            investor: member(0),
            units: 1,
            issuer: member(1),
            payment: 0,
        },
        Action::Distribute {
            redemption: contracts.redemption,
            id: "d-1".into(),
            part: 0,
            token: bond,
            account: member(1),
            payouts: vec![payout],
        },
        Action::RegisterIdentities {
            registry: contracts.registry,
            accounts: vec![member(7)],
        },
    ];
    for call in &calls {
        for account in ["stranger", "deployer", "owner"] {
            let account = Address::of_user(account);
            assert!(!market.machine.send(account, call).success, "{call:?}");
        }
        market.done(call);
    }
}

#[test]
fn mint_burn_and_forced_transfer_share_ids_that_are_accepted_once() {
    let mut market = Market::new();
    market.members(2, 0, 100);
    let bond = market.bond;
    let burn = |id: &str, units| Action::Burn {
        token: bond,
        from: member(0),
        units,
        id: Some(id.into()),
    };
    let refused = market.send(&burn("op-1", 101));
    assert!(!refused.success, "more than the balance");
    market.done(&burn("op-1", 10));
    for repeat in [
        burn("op-1", 10),
        mint(bond, "op-1", 10),
        forced(bond, "op-1", 10),
    ] {
        assert!(!market.send(&repeat).success, "{repeat:?}");
    }
    market.done(&mint(bond, "op-1:mint-back", 10));
    assert_eq!(market.machine.balance(bond, member(0)), 100);
    assert_eq!(market.machine.supply(bond), 200);
}

#[test]
fn f31_terms_are_set_once() {
    let mut market = Market::new();
    let bond = market.bond;
    let set = |terms| Action::SetTerms { token: bond, terms };
    let none = Terms {
        document_uri: "https://issuer.example".into(),
        ..Terms::default()
    };
    assert!(!market.send(&set(none)).success, "no document");
    market.done(&set(terms("decision")));
    assert!(!market.send(&set(terms("decision"))).success);
    assert!(!market.send(&set(terms("other"))).success);
    let stored = market.machine.read(bond, CfaToken::termsCall {});
    assert_eq!(TxHash::from(stored.document), id_hash("decision"));
    assert_eq!(TxHash::from(stored.recorded), id_hash("terms"));
    assert_eq!(stored.uri, terms("").document_uri);
}

#[test]
fn a_frozen_part_stays_and_the_free_part_moves() {
    let mut market = Market::new();
    market.members(2, 0, 100);
    let token = market.bond;
    let (account, other) = (member(0), member(1));
    let freeze = |units| Action::FreezeUnits {
        token,
        account,
        units,
    };
    let transfer = |units| Action::Transfer {
        token,
        from: account,
        to: other,
        units,
    };
    market.done(&freeze(60));
    assert!(!market.send(&freeze(41)).success, "60 of 100 are frozen");
    assert!(!market.send(&transfer(41)).success);
    market.done(&transfer(40));
    market.done(&Action::UnfreezeUnits {
        token,
        account,
        units: 10,
    });
    market.done(&transfer(10));
    assert!(!market.send(&transfer(1)).success);
    assert_eq!(market.machine.balance(token, account), 50);
    assert_eq!(market.machine.frozen_units(token, account), 50);
}

#[test]
fn a_burn_under_an_id_takes_no_frozen_units_and_none_of_a_paused_token() {
    let mut market = Market::new();
    market.members(2, 0, 100);
    let token = market.bond;
    let account = member(0);
    let burn = |units| Action::Burn {
        token,
        from: account,
        units,
        id: Some("op-1".into()),
    };
    market.done(&Action::FreezeUnits {
        token,
        account,
        units: 60,
    });
    assert!(!market.send(&burn(41)).success, "60 of 100 are frozen");
    let pause = |paused| Action::SetPaused { token, paused };
    market.done(&pause(true));
    assert!(!market.send(&burn(40)).success, "paused");
    market.done(&pause(false));
    let freeze = |frozen| Action::SetFrozen {
        token,
        account,
        frozen,
    };
    market.done(&freeze(true));
    assert!(!market.send(&burn(40)).success, "frozen");
    market.done(&freeze(false));
    // The refused calls have not used the id.
    market.done(&burn(40));
    assert_eq!(market.machine.balance(token, account), 60);
    assert_eq!(market.machine.frozen_units(token, account), 60);
    assert_eq!(market.machine.supply(token), 160);
}

#[test]
fn a_forced_transfer_moves_frozen_units_of_a_paused_token_and_names_its_reason() {
    let mut market = Market::new();
    market.members(2, 0, 100);
    let token = market.bond;
    let account = member(0);
    for action in [
        Action::FreezeUnits {
            token,
            account,
            units: 90,
        },
        Action::SetFrozen {
            token,
            account,
            frozen: true,
        },
        Action::SetPaused {
            token,
            paused: true,
        },
    ] {
        market.done(&action);
    }
    let without_reason = Action::ForcedTransfer {
        token,
        id: "case-1".into(),
        from: account,
        to: member(1),
        units: 30,
        reason: Terms::default().document_hash,
    };
    assert!(!market.send(&without_reason).success);
    let done = market.done(&forced(token, "case-1", 30));
    let events = done.logs.iter();
    let named: Vec<_> = events
        .filter_map(|log| CfaToken::ForcedTransfer::decode_log(log).ok())
        .collect();
    assert_eq!(named.len(), 1);
    assert_eq!(TxHash::from(named[0].operationId), id_hash("case-1"));
    assert_eq!(TxHash::from(named[0].reasonHash), id_hash("court order"));
    assert_eq!(named[0].value, U256::from(30));
    let machine = &market.machine;
    assert_eq!(machine.balance(token, account), 70);
    assert_eq!(machine.balance(token, member(1)), 130);
    assert_eq!(
        machine.frozen_units(token, account),
        70,
        "the rest is frozen"
    );
    assert!(machine.is_frozen(token, account));
    assert_eq!(machine.supply(token), 200);
    let beyond = forced(token, "case-2", 71);
    assert!(!market.send(&beyond).success, "more than the balance");
}

#[test]
fn a_forced_transfer_of_version_1_moves_frozen_units() {
    let mut market = Market::former();
    market.members(2, 0, 100);
    let (token, from) = (market.bond, member(0));
    market.done(&Action::SetFrozen {
        token,
        account: from,
        frozen: true,
    });
    let transfer = Action::ForcedTransferV1 {
        token,
        from,
        to: member(1),
        units: 30,
    };
    market.done(&transfer);
    assert_eq!(market.machine.balance(token, from), 70);
    assert_eq!(market.machine.balance(token, member(1)), 130);
    assert!(!is_listed(&transfer.call()));
}

#[test]
fn a_service_submits_listed_functions_only() {
    let (token, account) = (member(0), member(1));
    let grant = Grant {
        account,
        roles: RoleSet::MINT,
    };
    let listed = [
        mint(token, "m", 1),
        Action::Transfer {
            token,
            from: account,
            to: token,
            units: 1,
        },
    ];
    let others = [
        forced(token, "f", 1),
        Action::SetRoles {
            contract: token,
            grant,
        },
        Action::TransferOwnership {
            contract: token,
            owner: account,
        },
        Action::AddAgent {
            contract: token,
            agent: account,
        },
        Action::SetTerms {
            token,
            terms: terms("decision"),
        },
        Action::DeployRegistry,
    ];
    assert!(listed.iter().all(|action| is_listed(&action.call())));
    assert!(!others.iter().any(|action| is_listed(&action.call())));
    // A deployment whose code begins with a listed selector.
    let deployment = Call {
        to: None,
        ..listed[0].call()
    };
    assert!(!is_listed(&deployment));
    let short = Call {
        data: vec![1, 2, 3],
        ..listed[0].call()
    };
    assert!(!is_listed(&short));
}

/// Code that the platform did not write, as a token.
fn foreign(market: &mut Market, runtime: &[u8]) -> Address {
    let length = u8::try_from(runtime.len()).expect("short");
    // Copies the bytes after itself and returns them.
    let mut data = vec![0x60, length, 0x60, 0x0c, 0x60, 0, 0x39];
    data.extend([0x60, length, 0x60, 0, 0xf3]);
    data.extend(runtime);
    let call = Call {
        to: None,
        data,
        gas_limit: Some(1_000_000),
    };
    let deployed = market.machine.call(market.operator, call);
    deployed.contract.expect("deployed")
}

#[test]
fn a_token_that_wastes_gas_or_returns_much_data_leaves_the_batch_alone() {
    let mut market = Market::new();
    let members = market.members(2, 1_000_000, 1_000);
    // An endless loop; a revert with 64 KiB.
    let waster = foreign(&mut market, &[0x5b, 0x60, 0, 0x56]);
    let talker = foreign(&mut market, &[0x62, 1, 0, 0, 0x60, 0, 0xfd]);
    let tokens = [market.bond, waster, talker];
    let trades = (0..300).map(|n: u64| Trade {
        token: tokens[n as usize % 3],
        number: n / 3 + 1,
        buyer: members[0],
        seller: members[1],
        quantity: 1,
        payment: 10,
        fee: 1,
    });
    let batch = market.settle("n1:1-300", trades.collect());
    let done = market.done(&batch);
    let failed: Vec<_> = done
        .logs
        .iter()
        .filter_map(|log| Settlement::TradeFailed::decode_log(log).ok())
        .collect();
    assert_eq!(failed.len(), 200);
    assert!(failed.iter().all(|failed| failed.reason.len() <= 256));
    assert!(
        failed
            .iter()
            .all(|failed| failed.token != market.bond.raw())
    );
    assert_eq!(market.machine.balance(market.bond, members[0]), 1_100);
    assert_eq!(
        market.machine.balance(market.contracts.money, market.fees),
        100
    );
}
