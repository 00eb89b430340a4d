//! The development chain's EVM without blocks, signatures and disk, and a market on it.

use alloy::consensus::transaction::Recovered;
use alloy::consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy::primitives::{Bytes, Log, Signature, TxKind, U256};
use alloy::sol_types::SolCall;
use revm::context::TxEnv;

use crate::Address;
use crate::contracts::{Action, Call, CfaToken, Contracts, Grant, RoleSet, Trade, Version};
use crate::dev::state::State;

const CHAIN_ID: u64 = 31_337;
const BLOCK_GAS: u64 = 500_000_000;
const VIEW_GAS: u64 = 50_000_000;

/// Result of a transaction.
pub struct Done {
    pub success: bool,
    pub gas: u64,
    pub logs: Vec<Log>,
    pub contract: Option<Address>,
}

pub struct Machine {
    state: State,
}

impl Machine {
    pub fn new() -> Self {
        let (state, _) = State::genesis(CHAIN_ID, BLOCK_GAS, &[], 1);
        Self { state }
    }

    /// Executes a call of the account. Gas is free.
    pub fn call(&mut self, from: Address, call: Call) -> Done {
        let tx = TxEip1559 {
            chain_id: CHAIN_ID,
            nonce: self.state.account(from.raw()).nonce,
            gas_limit: call.gas_limit.expect("actions have a limit"),
            max_fee_per_gas: 0,
            max_priority_fee_per_gas: 0,
            to: call.to.map_or(TxKind::Create, |to| TxKind::Call(to.raw())),
            value: U256::ZERO,
            access_list: Default::default(),
            input: Bytes::from(call.data),
        };
        let signed = TxEnvelope::from(tx.into_signed(Signature::test_signature()));
        let transaction = Recovered::new_unchecked(signed, from.raw());
        let block = self.state.execute_block(vec![transaction], 1);
        assert!(block.dropped.is_empty(), "{:?}", block.dropped);
        let done = block.transactions.into_iter().next().expect("executed");
        Done {
            success: done.success,
            gas: done.gas_used,
            logs: done.logs,
            contract: done.contract_address.map(Address::from),
        }
    }

    pub fn send(&mut self, from: Address, action: &Action) -> Done {
        self.call(from, action.call())
    }

    pub fn done(&mut self, from: Address, action: &Action) -> Done {
        let done = self.send(from, action);
        assert!(done.success, "{action:?} reverted");
        done
    }

    pub fn deploy(&mut self, from: Address, action: &Action) -> Address {
        self.done(from, action).contract.expect("a deployment")
    }

    pub fn read<C: SolCall>(&self, contract: Address, call: C) -> C::Return {
        let message = TxEnv {
            kind: TxKind::Call(contract.raw()),
            data: Bytes::from(call.abi_encode()),
            gas_limit: VIEW_GAS,
            chain_id: None,
            ..TxEnv::default()
        };
        let result = self.state.call(message).expect("a view");
        let output = result.into_output().expect("an output");
        C::abi_decode_returns(&output).expect("its type")
    }

    pub fn code(&self, contract: Address) -> Bytes {
        self.state.code(contract.raw())
    }

    pub fn balance(&self, token: Address, holder: Address) -> u128 {
        let account = holder.raw();
        let balance = self.read(token, CfaToken::balanceOfCall { account });
        balance.saturating_to()
    }

    pub fn frozen_units(&self, token: Address, holder: Address) -> u128 {
        let account = holder.raw();
        let frozen = self.read(token, CfaToken::getFrozenTokensCall { account });
        frozen.saturating_to()
    }

    pub fn is_frozen(&self, token: Address, holder: Address) -> bool {
        let account = holder.raw();
        self.read(token, CfaToken::isFrozenCall { account })
    }

    pub fn supply(&self, token: Address) -> u128 {
        let supply = self.read(token, CfaToken::totalSupplyCall {});
        supply.saturating_to()
    }
}

/// A platform with one bond.
pub struct Market {
    pub machine: Machine,
    pub contracts: Contracts,
    pub bond: Address,
    pub operator: Address,
    pub owner: Address,
    pub fees: Address,
    next_id: u64,
}

impl Market {
    /// Contracts of version 2, deployed by an account without any right.
    pub fn new() -> Self {
        let mut machine = Machine::new();
        let (operator, owner) = (Address::of_user("operator"), Address::of_user("owner"));
        let fees = Address::of_user("system:fees");
        let deployer = Address::of_user("deployer");
        let platform = Action::DeployPlatform {
            name: "CFA-RUB".into(),
            symbol: "CFA-RUB".into(),
            decimals: 2,
            owner,
            operator,
            fee_account: fees,
            accounts: vec![fees],
        };
        let contracts = Contracts::of_platform(&machine.deploy(deployer, &platform));
        let mut market = Self {
            machine,
            bond: contracts.money,
            contracts,
            operator,
            owner,
            fees,
            next_id: 0,
        };
        market.bond = market.deploy_token("BOND-1", |_| {});
        market
    }

    /// Contracts of version 1: the operator deploys them and owns them.
    pub fn former() -> Self {
        let mut machine = Machine::new();
        let operator = Address::of_user("operator");
        let fees = Address::of_user("system:fees");
        let registry = machine.deploy(operator, &Action::DeployRegistry);
        let token = |symbol: &str, decimals, agents| Action::DeployTokenV1 {
            name: symbol.into(),
            symbol: symbol.into(),
            decimals,
            registry,
            agents,
        };
        let money = machine.deploy(operator, &token("CFA-RUB", 2, Vec::new()));
        let settlement = Action::DeploySettlement {
            money,
            fee_account: fees,
        };
        let settlement = machine.deploy(operator, &settlement);
        let redemption = machine.deploy(operator, &Action::DeployRedemption { money });
        for agent in [settlement, redemption] {
            let add = Action::AddAgent {
                contract: money,
                agent,
            };
            machine.done(operator, &add);
        }
        let bond = machine.deploy(operator, &token("BOND-1", 0, vec![settlement, redemption]));
        let contracts = Contracts {
            version: Version::V1,
            registry,
            money,
            settlement,
            redemption,
        };
        let mut market = Self {
            machine,
            contracts,
            bond,
            operator,
            owner: operator,
            fees,
            next_id: 0,
        };
        market.register(vec![fees]);
        market
    }

    /// Deploys a token as the platform does, from an account without any right.
    pub fn deploy_token(&mut self, symbol: &str, change: impl FnOnce(&mut Vec<Grant>)) -> Address {
        let mut grants = self.contracts.token_grants(self.operator);
        change(&mut grants);
        let deploy = Action::DeployToken {
            name: symbol.into(),
            symbol: symbol.into(),
            decimals: 0,
            registry: self.contracts.registry,
            owner: self.owner,
            grants,
            terms: None,
        };
        self.machine.deploy(Address::of_user("deployer"), &deploy)
    }

    /// Deploys the contract that moves holders. The operator may call it.
    pub fn deploy_migration(&mut self, from: Address, to: Address) -> Address {
        let deploy = Action::DeployMigration {
            from,
            to,
            owner: self.owner,
            grants: vec![Grant {
                account: self.operator,
                roles: RoleSet::MOVE,
            }],
        };
        self.machine.deploy(Address::of_user("deployer"), &deploy)
    }

    pub fn send(&mut self, action: &Action) -> Done {
        self.machine.send(self.operator, action)
    }

    pub fn done(&mut self, action: &Action) -> Done {
        self.machine.done(self.operator, action)
    }

    pub fn register(&mut self, accounts: Vec<Address>) {
        let registry = self.contracts.registry;
        for accounts in accounts.chunks(100) {
            let register = Action::RegisterIdentities {
                registry,
                accounts: accounts.to_vec(),
            };
            self.done(&register);
        }
    }

    pub fn mint(&mut self, token: Address, to: Address, units: u128) {
        self.next_id += 1;
        let id = format!("mint {}", self.next_id);
        let mint = Action::Mint {
            token,
            to,
            units,
            id: self.contracts.operation_id(&id),
        };
        self.done(&mint);
    }

    /// Members on the allow-list, with money and bonds.
    pub fn members(&mut self, count: usize, money: u128, bonds: u128) -> Vec<Address> {
        let members: Vec<Address> = (0..count).map(super::member).collect();
        self.register(members.clone());
        let (money_token, bond) = (self.contracts.money, self.bond);
        for member in &members {
            self.mint(money_token, *member, money);
            self.mint(bond, *member, bonds);
        }
        members
    }

    pub fn settle(&self, id: &str, trades: Vec<Trade>) -> Action {
        Action::SettleTrades {
            settlement: self.contracts.settlement,
            id: id.into(),
            trades,
        }
    }
}
