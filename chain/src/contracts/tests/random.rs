//! Random sequences of calls, each compared with a twin that keeps the balances in a table: the
//! outcome, every balance and freeze, and the supply. So the supply is the sum of the balances, a
//! trade moves both legs or none, ids and parts act once, and a call without its role does nothing.

use std::collections::BTreeSet;

use alloy::sol_types::SolEvent;
use proptest::prelude::*;

use super::machine::Market;
use super::member;
use crate::Address;
use crate::contracts::{Action, Payout, Settlement, Trade, id_hash};

/// Members; the last one is not on the allow-list.
const MEMBERS: usize = 5;
/// Accounts: the members, then the fee account.
const ACCOUNTS: usize = MEMBERS + 1;
const FEES: usize = MEMBERS;
const MONEY: usize = 0;
const BOND: usize = 1;
/// Of every verified member in both tokens at the start.
const UNITS: u128 = 60;

/// A call. Accounts are below `MEMBERS`, tokens are `MONEY` and `BOND`.
#[derive(Debug, Clone)]
enum Step {
    Mint(usize, usize, u128, u8),
    Burn(usize, usize, u128, u8),
    Transfer(usize, usize, usize, u128),
    Forced(usize, usize, usize, u128, u8),
    Freeze(usize, usize, bool),
    FreezeUnits(usize, usize, u128),
    UnfreezeUnits(usize, usize, u128),
    Pause(usize, bool),
    Settle(u8, Vec<Exchange>),
    Issue(u8, usize, u128, usize, u128),
    Distribute(u64, usize, Vec<(usize, u128, u128)>),
}

#[derive(Debug, Clone)]
struct Exchange {
    number: u64,
    buyer: usize,
    seller: usize,
    quantity: u128,
    payment: u128,
    fee: u128,
}

#[derive(Clone, Default)]
struct Token {
    balances: [u128; ACCOUNTS],
    frozen_units: [u128; ACCOUNTS],
    frozen: [bool; ACCOUNTS],
    paused: bool,
    ids: BTreeSet<u8>,
}

impl Token {
    fn free(&self, account: usize) -> u128 {
        self.balances[account] - self.frozen_units[account]
    }

    /// A transfer without the checks of pause and allow-list.
    fn shift(&mut self, from: usize, to: usize, units: u128) -> bool {
        if self.frozen[from] || self.frozen[to] || self.free(from) < units {
            return false;
        }
        self.balances[from] -= units;
        self.balances[to] += units;
        true
    }

    fn transfer(&mut self, from: usize, to: usize, units: u128) -> bool {
        !self.paused && is_verified(to) && self.shift(from, to, units)
    }

    fn take(&mut self, from: usize, units: u128) -> bool {
        if self.balances[from] < units {
            return false;
        }
        self.balances[from] -= units;
        self.frozen_units[from] = self.frozen_units[from].min(self.balances[from]);
        true
    }

    fn mint(&mut self, to: usize, units: u128) -> bool {
        if self.paused || !is_verified(to) {
            return false;
        }
        self.balances[to] += units;
        true
    }

    /// The payment of a distribution.
    fn pay_holder(&mut self, from: usize, to: usize, units: u128) -> bool {
        if !is_verified(to) || self.frozen[from] || self.free(from) < units {
            return false;
        }
        self.balances[from] -= units;
        self.balances[to] += units;
        true
    }
}

fn is_verified(account: usize) -> bool {
    account != MEMBERS - 1
}

#[derive(Clone, Default)]
struct Twin {
    tokens: [Token; 2],
    trades: BTreeSet<u64>,
    batches: BTreeSet<u8>,
    issues: BTreeSet<u8>,
    parts: u64,
    /// Failed trades of the last batch.
    failed: usize,
}

impl Twin {
    /// Applies a step as the contracts do. False: it is refused and changes nothing.
    fn apply(&mut self, step: &Step) -> bool {
        self.failed = 0;
        let before = self.clone();
        let done = self.try_apply(step);
        if !done {
            *self = before;
        }
        done
    }

    fn try_apply(&mut self, step: &Step) -> bool {
        match step {
            Step::Mint(token, to, units, id) => {
                let token = &mut self.tokens[*token];
                token.ids.insert(*id) && token.mint(*to, *units)
            }
            Step::Burn(token, from, units, id) => {
                let token = &mut self.tokens[*token];
                let is_allowed = !token.paused && !token.frozen[*from];
                token.ids.insert(*id)
                    && is_allowed
                    && token.free(*from) >= *units
                    && token.take(*from, *units)
            }
            Step::Transfer(token, from, to, units) => {
                self.tokens[*token].transfer(*from, *to, *units)
            }
            Step::Forced(token, from, to, units, id) => {
                let token = &mut self.tokens[*token];
                let taken = token.ids.insert(*id) && is_verified(*to) && token.take(*from, *units);
                token.balances[*to] += if taken { *units } else { 0 };
                taken
            }
            Step::Freeze(token, account, frozen) => {
                self.tokens[*token].frozen[*account] = *frozen;
                true
            }
            Step::FreezeUnits(token, account, units) => {
                let token = &mut self.tokens[*token];
                let is_free = token.free(*account) >= *units;
                token.frozen_units[*account] += if is_free { *units } else { 0 };
                is_free
            }
            Step::UnfreezeUnits(token, account, units) => {
                let frozen = &mut self.tokens[*token].frozen_units[*account];
                let left = frozen.checked_sub(*units);
                *frozen = left.unwrap_or(*frozen);
                left.is_some()
            }
            Step::Pause(token, paused) => {
                self.tokens[*token].paused = *paused;
                true
            }
            Step::Settle(batch, exchanges) => {
                let is_new = self.batches.insert(*batch);
                for exchange in exchanges.iter().filter(|_| is_new) {
                    self.exchange(exchange);
                }
                is_new
            }
            Step::Issue(id, investor, units, issuer, payment) => {
                let [money, bond] = &mut self.tokens;
                self.issues.insert(*id)
                    && (*payment == 0 || money.transfer(*investor, *issuer, *payment))
                    && bond.mint(*investor, *units)
            }
            Step::Distribute(part, account, payouts) => self.distribute(*part, *account, payouts),
        }
    }

    fn exchange(&mut self, exchange: &Exchange) {
        let before = self.clone();
        let [money, bond] = &mut self.tokens;
        let (buyer, seller) = (exchange.buyer, exchange.seller);
        let done = self.trades.insert(exchange.number)
            && bond.transfer(seller, buyer, exchange.quantity)
            && money.transfer(buyer, seller, exchange.payment)
            && (exchange.fee == 0 || money.shift(buyer, FEES, exchange.fee));
        if !done {
            *self = before;
            self.failed += 1;
        }
    }

    fn distribute(&mut self, part: u64, account: usize, payouts: &[(usize, u128, u128)]) -> bool {
        let [money, bond] = &mut self.tokens;
        let needed: u128 = payouts.iter().map(|(.., payment)| payment).sum();
        if part != self.parts || payouts.is_empty() || money.balances[account] < needed {
            return false;
        }
        self.parts += 1;
        payouts.iter().all(|(holder, units, payment)| {
            (*payment == 0 || money.pay_holder(account, *holder, *payment))
                && (*units == 0 || bond.take(*holder, *units))
        })
    }
}

struct Pair {
    market: Market,
    twin: Twin,
}

impl Pair {
    fn new() -> Self {
        let mut market = Market::new();
        market.members(MEMBERS - 1, UNITS, UNITS);
        let mut twin = Twin::default();
        for token in &mut twin.tokens {
            token.balances[..MEMBERS - 1].fill(UNITS);
        }
        Self { market, twin }
    }

    fn account(&self, index: usize) -> Address {
        match index {
            FEES => self.market.fees,
            member_index => member(member_index),
        }
    }

    fn token(&self, index: usize) -> Address {
        [self.market.contracts.money, self.market.bond][index]
    }

    fn action(&self, step: &Step) -> Action {
        let contracts = &self.market.contracts;
        let of = |index: &usize| self.account(*index);
        match step {
            Step::Settle(batch, exchanges) => {
                let trade = |exchange: &Exchange| Trade {
                    token: self.market.bond,
                    number: exchange.number,
                    buyer: of(&exchange.buyer),
                    seller: of(&exchange.seller),
                    quantity: exchange.quantity,
                    payment: exchange.payment,
                    fee: exchange.fee,
                };
                let id = format!("batch {batch}");
                self.market
                    .settle(&id, exchanges.iter().map(trade).collect())
            }
            Step::Issue(id, investor, units, issuer, payment) => Action::IssueAgainstPayment {
                settlement: contracts.settlement,
                id: format!("issue {id}"),
                token: self.market.bond,
                investor: of(investor),
                units: *units,
                issuer: of(issuer),
                payment: *payment,
            },
            Step::Distribute(part, account, payouts) => Action::Distribute {
                redemption: contracts.redemption,
                id: "distribution".into(),
                part: *part,
                token: self.market.bond,
                account: of(account),
                payouts: payouts
                    .iter()
                    .map(|(holder, units, payment)| Payout {
                        holder: of(holder),
                        units: *units,
                        payment: *payment,
                    })
                    .collect(),
            },
            of_token => self.token_action(of_token),
        }
    }

    fn token_action(&self, step: &Step) -> Action {
        let of = |index: &usize| self.account(*index);
        let id = |id: &u8| Some(format!("operation {id}"));
        match step {
            Step::Mint(token, to, units, op) => Action::Mint {
                token: self.token(*token),
                to: of(to),
                units: *units,
                id: id(op),
            },
            Step::Burn(token, from, units, op) => Action::Burn {
                token: self.token(*token),
                from: of(from),
                units: *units,
                id: id(op),
            },
            Step::Transfer(token, from, to, units) => Action::Transfer {
                token: self.token(*token),
                from: of(from),
                to: of(to),
                units: *units,
            },
            Step::Forced(token, from, to, units, op) => Action::ForcedTransfer {
                token: self.token(*token),
                id: format!("operation {op}"),
                from: of(from),
                to: of(to),
                units: *units,
                reason: id_hash("court order"),
            },
            Step::Freeze(token, account, frozen) => Action::SetFrozen {
                token: self.token(*token),
                account: of(account),
                frozen: *frozen,
            },
            Step::FreezeUnits(token, account, units) => Action::FreezeUnits {
                token: self.token(*token),
                account: of(account),
                units: *units,
            },
            Step::UnfreezeUnits(token, account, units) => Action::UnfreezeUnits {
                token: self.token(*token),
                account: of(account),
                units: *units,
            },
            Step::Pause(token, paused) => Action::SetPaused {
                token: self.token(*token),
                paused: *paused,
            },
            other => unreachable!("{other:?} is no call of a token"),
        }
    }

    /// Executes the step on both, first from an account without roles.
    fn step(&mut self, step: &Step) {
        let action = self.action(step);
        let stranger = Address::of_user("stranger");
        let refused = self.market.machine.send(stranger, &action);
        assert!(!refused.success, "{step:?} of an account without roles");
        let done = self.market.send(&action);
        assert_eq!(done.success, self.twin.apply(step), "{step:?}");
        let logs = done.logs.iter();
        let failed = logs.filter(|log| Settlement::TradeFailed::decode_log(log).is_ok());
        assert_eq!(failed.count(), self.twin.failed, "{step:?}");
        self.compare(step);
    }

    fn compare(&self, step: &Step) {
        let machine = &self.market.machine;
        for index in [MONEY, BOND] {
            let (token, twin) = (self.token(index), &self.twin.tokens[index]);
            for number in 0..ACCOUNTS {
                let account = self.account(number);
                let found = (
                    machine.balance(token, account),
                    machine.frozen_units(token, account),
                    machine.is_frozen(token, account),
                );
                let wanted = (
                    twin.balances[number],
                    twin.frozen_units[number],
                    twin.frozen[number],
                );
                assert_eq!(found, wanted, "account {number} after {step:?}");
            }
            let sum: u128 = twin.balances.iter().sum();
            assert_eq!(machine.supply(token), sum, "supply after {step:?}");
        }
    }
}

fn steps() -> impl Strategy<Value = Step> {
    let token = || 0..2_usize;
    let who = || 0..MEMBERS;
    let units = || 0..40_u128;
    let id = || 0..12_u8;
    let exchange = (1..20_u64, who(), who(), units(), units(), 0..3_u128).prop_map(
        |(number, buyer, seller, quantity, payment, fee)| Exchange {
            number,
            buyer,
            seller,
            quantity,
            payment,
            fee,
        },
    );
    let exchanges = prop::collection::vec(exchange, 1..6);
    let payouts = prop::collection::vec((who(), 0..10_u128, 0..10_u128), 1..4);
    prop_oneof![
        1 => (token(), who(), units(), id()).prop_map(|(t, a, n, i)| Step::Mint(t, a, n, i)),
        1 => (token(), who(), units(), id()).prop_map(|(t, a, n, i)| Step::Burn(t, a, n, i)),
        1 => (token(), who(), who(), units()).prop_map(|(t, a, b, n)| Step::Transfer(t, a, b, n)),
        1 => (token(), who(), who(), units(), id())
            .prop_map(|(t, a, b, n, i)| Step::Forced(t, a, b, n, i)),
        1 => (token(), who(), any::<bool>()).prop_map(|(t, a, is)| Step::Freeze(t, a, is)),
        1 => (token(), who(), units()).prop_map(|(t, a, n)| Step::FreezeUnits(t, a, n)),
        1 => (token(), who(), units()).prop_map(|(t, a, n)| Step::UnfreezeUnits(t, a, n)),
        1 => (token(), prop::bool::weighted(0.3)).prop_map(|(t, is)| Step::Pause(t, is)),
        3 => (id(), exchanges).prop_map(|(i, exchanges)| Step::Settle(i, exchanges)),
        1 => (id(), who(), units(), who(), units())
            .prop_map(|(i, a, n, b, m)| Step::Issue(i, a, n, b, m)),
        2 => (0..4_u64, who(), payouts).prop_map(|(part, a, of)| Step::Distribute(part, a, of)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn random_sequences_of_calls_agree_with_the_twin(steps in prop::collection::vec(steps(), 1..40)) {
        let mut pair = Pair::new();
        for step in &steps {
            pair.step(step);
        }
    }
}
