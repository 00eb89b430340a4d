//! The platform's contracts. A service requests an `Action`; the connector sends it as a `Call`.
//!
//! Bytecode comes from the committed artifacts. Gas limits are fixed per action, not estimated. So
//! an action that the contract refuses reaches a block and leaves a receipt, and two pending
//! actions do not change each other's estimate.

use alloy::primitives::{Bytes, U256, keccak256};
use alloy::sol_types::{SolCall, SolConstructor};

use crate::{Address, TxHash};

mod sol {
    alloy::sol!(
        IdentityRegistry,
        "contracts/artifacts/IdentityRegistry.json"
    );
    alloy::sol!(CfaToken, "contracts/artifacts/CfaToken.json");
    alloy::sol!(Settlement, "contracts/artifacts/Settlement.json");
    alloy::sol!(Redemption, "contracts/artifacts/Redemption.json");
}
pub(crate) use sol::{CfaToken, IdentityRegistry, Redemption, Settlement};

/// Addresses of the contracts shared by all instruments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contracts {
    pub registry: Address,
    /// The token of CFA-RUB.
    pub money: Address,
    pub settlement: Address,
    pub redemption: Address,
}

/// One trade of a batch. `number` 0 is a paid transfer without a trade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trade {
    pub token: Address,
    pub number: u64,
    pub buyer: Address,
    pub seller: Address,
    pub quantity: u128,
    pub payment: u128,
    pub fee: u128,
}

/// A holder's share of a redemption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payout {
    pub holder: Address,
    pub units: u128,
    pub payment: u128,
}

/// Actions on the chain. Amounts are in the token's smallest units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    DeployRegistry,
    DeployToken {
        name: String,
        symbol: String,
        decimals: u8,
        registry: Address,
        agents: Vec<Address>,
    },
    DeploySettlement {
        money: Address,
        fee_account: Address,
    },
    DeployRedemption {
        money: Address,
    },
    AddAgent {
        contract: Address,
        agent: Address,
    },
    RegisterIdentities {
        registry: Address,
        accounts: Vec<Address>,
    },
    Mint {
        token: Address,
        to: Address,
        units: u128,
    },
    Burn {
        token: Address,
        from: Address,
        units: u128,
    },
    Transfer {
        token: Address,
        from: Address,
        to: Address,
        units: u128,
    },
    SetFrozen {
        token: Address,
        account: Address,
        frozen: bool,
    },
    /// Freezes units in addition to frozen ones. Reverts if the holder has fewer free units.
    FreezeUnits {
        token: Address,
        account: Address,
        units: u128,
    },
    UnfreezeUnits {
        token: Address,
        account: Address,
        units: u128,
    },
    /// Enforcement, despite freezes and pause. `reason` is the hash of the document that orders it.
    ForcedTransfer {
        token: Address,
        id: String,
        from: Address,
        to: Address,
        units: u128,
        reason: TxHash,
    },
    /// The contract accepts `id` once, and each trade number once per token.
    SettleTrades {
        settlement: Address,
        id: String,
        trades: Vec<Trade>,
    },
    IssueAgainstPayment {
        settlement: Address,
        id: String,
        token: Address,
        investor: Address,
        units: u128,
        issuer: Address,
        payment: u128,
    },
    /// Parts count from 0 and are accepted in order.
    Distribute {
        redemption: Address,
        id: String,
        part: u64,
        token: Address,
        account: Address,
        payouts: Vec<Payout>,
    },
}

/// Content of a transaction before signing.
#[derive(Debug, Clone)]
pub struct Call {
    /// `None`: a deployment.
    pub to: Option<Address>,
    pub data: Vec<u8>,
    /// `None`: estimated by the node.
    pub gas_limit: Option<u64>,
}

const GAS_SIMPLE: u64 = 200_000;
const GAS_DEPLOY: u64 = 6_000_000;
const GAS_PER_IDENTITY: u64 = 60_000;
const GAS_PER_TRADE: u64 = 150_000;
const GAS_PER_PAYOUT: u64 = 150_000;
/// Base gas of a batch. Exceeds `GAS_RESERVE_PER_TRADE` of `Settlement.sol`.
const GAS_BATCH: u64 = 600_000;

/// keccak256 of an id: contracts store ids in this form.
pub fn id_hash(id: &str) -> TxHash {
    TxHash::from(keccak256(id.as_bytes()))
}

impl Action {
    /// Encodes the action with its gas limit.
    pub fn call(&self) -> Call {
        match self {
            Self::DeployRegistry => deploy(&IdentityRegistry::BYTECODE, Vec::new()),
            Self::DeployToken {
                name,
                symbol,
                decimals,
                registry,
                agents,
            } => deploy(
                &CfaToken::BYTECODE,
                CfaToken::constructorCall {
                    name_: name.clone(),
                    symbol_: symbol.clone(),
                    decimals_: *decimals,
                    registry: registry.raw(),
                    agents_: agents.iter().map(Address::raw).collect(),
                }
                .abi_encode(),
            ),
            Self::DeploySettlement { money, fee_account } => deploy(
                &Settlement::BYTECODE,
                Settlement::constructorCall {
                    money_: money.raw(),
                    feeAccount_: fee_account.raw(),
                }
                .abi_encode(),
            ),
            Self::DeployRedemption { money } => deploy(
                &Redemption::BYTECODE,
                Redemption::constructorCall {
                    money_: money.raw(),
                }
                .abi_encode(),
            ),
            Self::AddAgent { contract, agent } => call(
                contract,
                CfaToken::addAgentCall {
                    account: agent.raw(),
                },
                GAS_SIMPLE,
            ),
            Self::RegisterIdentities { registry, accounts } => call(
                registry,
                IdentityRegistry::batchRegisterIdentityCall {
                    accounts: accounts.iter().map(Address::raw).collect(),
                },
                GAS_SIMPLE + GAS_PER_IDENTITY * accounts.len() as u64,
            ),
            Self::Mint { token, to, units } => call(
                token,
                CfaToken::mintCall {
                    to: to.raw(),
                    amount: U256::from(*units),
                },
                GAS_SIMPLE,
            ),
            Self::Burn { token, from, units } => call(
                token,
                CfaToken::burnCall {
                    from: from.raw(),
                    amount: U256::from(*units),
                },
                GAS_SIMPLE,
            ),
            Self::Transfer {
                token,
                from,
                to,
                units,
            } => call(
                token,
                CfaToken::operatorTransferCall {
                    from: from.raw(),
                    to: to.raw(),
                    amount: U256::from(*units),
                },
                GAS_SIMPLE,
            ),
            Self::SetFrozen { .. }
            | Self::FreezeUnits { .. }
            | Self::UnfreezeUnits { .. }
            | Self::ForcedTransfer { .. } => enforcement(self),
            Self::SettleTrades {
                settlement,
                id,
                trades,
            } => call(
                settlement,
                settle_call(id, trades),
                GAS_BATCH + GAS_PER_TRADE * trades.len() as u64,
            ),
            Self::IssueAgainstPayment {
                settlement,
                id,
                token,
                investor,
                units,
                issuer,
                payment,
            } => call(
                settlement,
                Settlement::issueAgainstPaymentCall {
                    issueId: id_hash(id).raw(),
                    token: token.raw(),
                    investor: investor.raw(),
                    units: U256::from(*units),
                    issuer: issuer.raw(),
                    payment: U256::from(*payment),
                },
                2 * GAS_SIMPLE,
            ),
            Self::Distribute {
                redemption,
                id,
                part,
                token,
                account,
                payouts,
            } => call(
                redemption,
                Redemption::distributeCall {
                    redemptionId: id_hash(id).raw(),
                    part: U256::from(*part),
                    token: token.raw(),
                    account: account.raw(),
                    holders: payouts.iter().map(|payout| payout.holder.raw()).collect(),
                    units: payouts
                        .iter()
                        .map(|payout| U256::from(payout.units))
                        .collect(),
                    payments: payouts
                        .iter()
                        .map(|payout| U256::from(payout.payment))
                        .collect(),
                },
                GAS_SIMPLE + GAS_PER_PAYOUT * payouts.len() as u64,
            ),
        }
    }
}

fn enforcement(action: &Action) -> Call {
    match action {
        Action::SetFrozen {
            token,
            account,
            frozen,
        } => call(
            token,
            CfaToken::setAddressFrozenCall {
                account: account.raw(),
                frozen: *frozen,
            },
            GAS_SIMPLE,
        ),
        Action::FreezeUnits {
            token,
            account,
            units,
        } => call(
            token,
            CfaToken::freezePartialTokensCall {
                account: account.raw(),
                amount: U256::from(*units),
            },
            GAS_SIMPLE,
        ),
        Action::UnfreezeUnits {
            token,
            account,
            units,
        } => call(
            token,
            CfaToken::unfreezePartialTokensCall {
                account: account.raw(),
                amount: U256::from(*units),
            },
            GAS_SIMPLE,
        ),
        // This version of the token knows neither id nor reason.
        Action::ForcedTransfer {
            token,
            from,
            to,
            units,
            ..
        } => call(
            token,
            CfaToken::forcedTransferCall {
                from: from.raw(),
                to: to.raw(),
                amount: U256::from(*units),
            },
            GAS_SIMPLE,
        ),
        other => unreachable!("{other:?} enforces nothing"),
    }
}

/// Encodes each token and member once. A trade is two words with indices (see `Settlement.sol`).
fn settle_call(id: &str, trades: &[Trade]) -> Settlement::settleTradesCall {
    let mut tokens = Vec::new();
    let mut members = Vec::new();
    let index_of = |table: &mut Vec<_>, address: Address| {
        table
            .iter()
            .position(|known| *known == address.raw())
            .unwrap_or_else(|| {
                table.push(address.raw());
                table.len() - 1
            })
    };
    let mut words = Vec::with_capacity(2 * trades.len());
    for trade in trades {
        let token = index_of(&mut tokens, trade.token);
        let buyer = index_of(&mut members, trade.buyer);
        let seller = index_of(&mut members, trade.seller);
        assert!(
            token <= 0xffff && buyer <= 0xff_ffff && seller <= 0xff_ffff,
            "batch has more tokens or members than its index fields can address"
        );
        words.push(
            (U256::from(trade.number) << 192)
                | (U256::from(token) << 176)
                | (U256::from(buyer) << 152)
                | (U256::from(seller) << 128)
                | U256::from(trade.quantity),
        );
        words.push((U256::from(trade.payment) << 128) | U256::from(trade.fee));
    }
    Settlement::settleTradesCall {
        batchId: id_hash(id).raw(),
        tokens,
        members,
        trades: words,
    }
}

fn deploy(bytecode: &Bytes, arguments: Vec<u8>) -> Call {
    let mut data = bytecode.to_vec();
    data.extend_from_slice(&arguments);
    Call {
        to: None,
        data,
        gas_limit: Some(GAS_DEPLOY),
    }
}

fn call<C: SolCall>(to: &Address, call: C, gas_limit: u64) -> Call {
    Call {
        to: Some(*to),
        data: call.abi_encode(),
        gas_limit: Some(gas_limit),
    }
}
