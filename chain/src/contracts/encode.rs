//! Call data and gas limits of the actions.

use alloy::primitives::{Bytes, U256};
use alloy::sol_types::{SolCall, SolConstructor};

use super::{
    Action, Call, CfaToken, Grant, IdentityRegistry, Migration, Payout, Platform, Redemption,
    RoleSet, Settlement, Terms, Trade, id_hash, v1,
};
use crate::Address;

const GAS_SIMPLE: u64 = 200_000;
const GAS_DEPLOY: u64 = 6_000_000;
/// Deploys four contracts.
const GAS_PLATFORM: u64 = 12_000_000;
const GAS_PER_IDENTITY: u64 = 60_000;
/// Exceeds `TRADE_GAS` of `Settlement.sol` and the gas of the trade's event, so that trades which
/// use all their gas do not make their batch fail.
const GAS_PER_TRADE: u64 = 170_000;
const GAS_PER_PAYOUT: u64 = 150_000;
const GAS_PER_MOVED_HOLDER: u64 = 150_000;
/// A stored word of text.
const GAS_PER_WORD: u64 = 25_000;
/// Base gas of a batch. Exceeds `GAS_RESERVE_PER_TRADE` of `Settlement.sol`.
const GAS_BATCH: u64 = 600_000;

/// Functions that a service may call by `SubmitTransaction`: those of its operations. The other
/// ones change rights, pause or terms, or transfer despite freezes.
const LISTED: [[u8; 4]; 14] = [
    IdentityRegistry::registerIdentityCall::SELECTOR,
    IdentityRegistry::batchRegisterIdentityCall::SELECTOR,
    CfaToken::mintOnceCall::SELECTOR,
    CfaToken::mintCall::SELECTOR,
    CfaToken::burnOnceCall::SELECTOR,
    CfaToken::burnCall::SELECTOR,
    CfaToken::operatorTransferCall::SELECTOR,
    CfaToken::operatorPayCall::SELECTOR,
    CfaToken::setAddressFrozenCall::SELECTOR,
    CfaToken::freezePartialTokensCall::SELECTOR,
    CfaToken::unfreezePartialTokensCall::SELECTOR,
    Settlement::settleTradesCall::SELECTOR,
    Settlement::issueAgainstPaymentCall::SELECTOR,
    Redemption::distributeCall::SELECTOR,
];

/// Whether the call is one of the listed functions, of whichever contract.
pub(crate) fn is_listed(call: &Call) -> bool {
    let selector = call.data.first_chunk::<4>();
    call.to.is_some() && selector.is_some_and(|selector| LISTED.contains(selector))
}

impl Action {
    /// Encodes the action with its gas limit.
    pub fn call(&self) -> Call {
        match self {
            Self::DeployPlatform { .. }
            | Self::DeployToken { .. }
            | Self::DeployMigration { .. }
            | Self::DeployRegistry
            | Self::DeployTokenV1 { .. }
            | Self::DeploySettlement { .. }
            | Self::DeployRedemption { .. } => deployment(self),
            Self::AddAgent { .. }
            | Self::SetRoles { .. }
            | Self::TransferOwnership { .. }
            | Self::AcceptOwnership { .. }
            | Self::RegisterIdentities { .. } => administration(self),
            Self::Mint { .. } | Self::Burn { .. } => supply(self),
            Self::Transfer { .. } | Self::ForcedTransfer { .. } | Self::ForcedTransferV1 { .. } => {
                movement(self)
            }
            Self::SetFrozen { .. }
            | Self::FreezeUnits { .. }
            | Self::UnfreezeUnits { .. }
            | Self::SetPaused { .. }
            | Self::SetTerms { .. } => token_state(self),
            Self::SettleTrades { .. }
            | Self::IssueAgainstPayment { .. }
            | Self::Distribute { .. }
            | Self::MoveHolders { .. } => batch(self),
        }
    }
}

fn deployment(action: &Action) -> Call {
    match action {
        Action::DeployPlatform {
            name,
            symbol,
            decimals,
            owner,
            operator,
            fee_account,
            accounts,
        } => {
            let arguments = Platform::constructorCall {
                name: name.clone(),
                symbol: symbol.clone(),
                decimals: *decimals,
                owner: owner.raw(),
                operator: operator.raw(),
                operatorRoles: RoleSet::OPERATOR.word(),
                feeAccount: fee_account.raw(),
                accounts: raw(accounts),
            };
            Call {
                gas_limit: Some(GAS_PLATFORM),
                ..deploy(&Platform::BYTECODE, arguments.abi_encode())
            }
        }
        Action::DeployToken {
            name,
            symbol,
            decimals,
            registry,
            owner,
            grants,
            terms,
        } => {
            let (accounts, roles) = split(grants);
            let terms = terms.clone().unwrap_or_default();
            let arguments = CfaToken::constructorCall {
                name_: name.clone(),
                symbol_: symbol.clone(),
                decimals_: *decimals,
                registry: registry.raw(),
                owner_: owner.raw(),
                accounts,
                roles,
                documentHash_: terms.document_hash.raw(),
                termsHash_: terms.terms_hash.raw(),
                documentUri_: terms.document_uri,
            };
            deploy(&CfaToken::BYTECODE, arguments.abi_encode())
        }
        Action::DeployMigration {
            from,
            to,
            owner,
            grants,
        } => {
            let (accounts, roles) = split(grants);
            let arguments = Migration::constructorCall {
                oldToken_: from.raw(),
                newToken_: to.raw(),
                owner_: owner.raw(),
                accounts,
                roles,
            };
            deploy(&Migration::BYTECODE, arguments.abi_encode())
        }
        of_v1 => deployment_v1(of_v1),
    }
}

fn deployment_v1(action: &Action) -> Call {
    match action {
        Action::DeployRegistry => deploy(&v1::IdentityRegistry::BYTECODE, Vec::new()),
        Action::DeployTokenV1 {
            name,
            symbol,
            decimals,
            registry,
            agents,
        } => {
            let arguments = v1::CfaToken::constructorCall {
                name_: name.clone(),
                symbol_: symbol.clone(),
                decimals_: *decimals,
                registry: registry.raw(),
                agents_: raw(agents),
            };
            deploy(&v1::CfaToken::BYTECODE, arguments.abi_encode())
        }
        Action::DeploySettlement { money, fee_account } => {
            let arguments = v1::Settlement::constructorCall {
                money_: money.raw(),
                feeAccount_: fee_account.raw(),
            };
            deploy(&v1::Settlement::BYTECODE, arguments.abi_encode())
        }
        Action::DeployRedemption { money } => {
            let arguments = v1::Redemption::constructorCall {
                money_: money.raw(),
            };
            deploy(&v1::Redemption::BYTECODE, arguments.abi_encode())
        }
        other => unreachable!("{other:?} deploys nothing"),
    }
}

fn administration(action: &Action) -> Call {
    match action {
        Action::AddAgent { contract, agent } => call(
            contract,
            v1::CfaToken::addAgentCall {
                account: agent.raw(),
            },
            GAS_SIMPLE,
        ),
        Action::SetRoles { contract, grant } => call(
            contract,
            CfaToken::setRolesCall {
                account: grant.account.raw(),
                roles: grant.roles.word(),
            },
            GAS_SIMPLE,
        ),
        Action::TransferOwnership { contract, owner } => call(
            contract,
            CfaToken::transferOwnershipCall {
                newOwner: owner.raw(),
            },
            GAS_SIMPLE,
        ),
        Action::AcceptOwnership { contract } => {
            call(contract, CfaToken::acceptOwnershipCall {}, GAS_SIMPLE)
        }
        Action::RegisterIdentities { registry, accounts } => call(
            registry,
            IdentityRegistry::batchRegisterIdentityCall {
                accounts: raw(accounts),
            },
            GAS_SIMPLE + GAS_PER_IDENTITY * accounts.len() as u64,
        ),
        other => unreachable!("{other:?} administers nothing"),
    }
}

fn supply(action: &Action) -> Call {
    match action {
        Action::Mint {
            token,
            to,
            units,
            id,
        } => {
            let (to, amount) = (to.raw(), U256::from(*units));
            match id.as_deref().map(|id| id_hash(id).raw()) {
                Some(id) => {
                    let mint = CfaToken::mintOnceCall {
                        operationId: id,
                        to,
                        amount,
                    };
                    call(token, mint, GAS_SIMPLE)
                }
                None => call(token, CfaToken::mintCall { to, amount }, GAS_SIMPLE),
            }
        }
        Action::Burn {
            token,
            from,
            units,
            id,
        } => {
            let (from, amount) = (from.raw(), U256::from(*units));
            match id.as_deref().map(|id| id_hash(id).raw()) {
                Some(id) => {
                    let burn = CfaToken::burnOnceCall {
                        operationId: id,
                        from,
                        amount,
                    };
                    call(token, burn, GAS_SIMPLE)
                }
                None => call(token, CfaToken::burnCall { from, amount }, GAS_SIMPLE),
            }
        }
        other => unreachable!("{other:?} changes no supply"),
    }
}

fn movement(action: &Action) -> Call {
    match action {
        Action::Transfer {
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
        Action::ForcedTransfer {
            token,
            id,
            from,
            to,
            units,
            reason,
        } => call(
            token,
            CfaToken::forcedTransferCall {
                operationId: id_hash(id).raw(),
                from: from.raw(),
                to: to.raw(),
                amount: U256::from(*units),
                reasonHash: reason.raw(),
            },
            GAS_SIMPLE,
        ),
        Action::ForcedTransferV1 {
            token,
            from,
            to,
            units,
        } => call(
            token,
            v1::CfaToken::forcedTransferCall {
                from: from.raw(),
                to: to.raw(),
                amount: U256::from(*units),
            },
            GAS_SIMPLE,
        ),
        other => unreachable!("{other:?} moves nothing"),
    }
}

fn token_state(action: &Action) -> Call {
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
        Action::SetPaused { token, paused } => match paused {
            true => call(token, CfaToken::pauseCall {}, GAS_SIMPLE),
            false => call(token, CfaToken::unpauseCall {}, GAS_SIMPLE),
        },
        Action::SetTerms { token, terms } => set_terms(token, terms),
        other => unreachable!("{other:?} sets no state of a token"),
    }
}

fn set_terms(token: &Address, terms: &Terms) -> Call {
    let words = 2 + terms.document_uri.len() as u64 / 32;
    call(
        token,
        CfaToken::setTermsCall {
            documentHash_: terms.document_hash.raw(),
            termsHash_: terms.terms_hash.raw(),
            documentUri_: terms.document_uri.clone(),
        },
        GAS_SIMPLE + GAS_PER_WORD * words,
    )
}

fn batch(action: &Action) -> Call {
    match action {
        Action::SettleTrades {
            settlement,
            id,
            trades,
        } => call(
            settlement,
            settle_call(id, trades),
            GAS_BATCH + GAS_PER_TRADE * trades.len() as u64,
        ),
        Action::IssueAgainstPayment {
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
        Action::Distribute {
            redemption,
            id,
            part,
            token,
            account,
            payouts,
        } => {
            let gas = GAS_SIMPLE + GAS_PER_PAYOUT * payouts.len() as u64;
            call(
                redemption,
                distribute_call(id, *part, token, account, payouts),
                gas,
            )
        }
        Action::MoveHolders {
            migration,
            part,
            holders,
        } => call(
            migration,
            Migration::moveHoldersCall {
                part: U256::from(*part),
                holders: raw(holders),
            },
            GAS_SIMPLE + GAS_PER_MOVED_HOLDER * holders.len() as u64,
        ),
        other => unreachable!("{other:?} is no batch"),
    }
}

fn distribute_call(
    id: &str,
    part: u64,
    token: &Address,
    account: &Address,
    payouts: &[Payout],
) -> Redemption::distributeCall {
    let column = |of: fn(&Payout) -> u128| payouts.iter().map(|row| U256::from(of(row))).collect();
    Redemption::distributeCall {
        distributionId: id_hash(id).raw(),
        part: U256::from(part),
        token: token.raw(),
        account: account.raw(),
        holders: payouts.iter().map(|payout| payout.holder.raw()).collect(),
        units: column(|payout| payout.units),
        payments: column(|payout| payout.payment),
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

fn raw(addresses: &[Address]) -> Vec<alloy::primitives::Address> {
    addresses.iter().map(Address::raw).collect()
}

/// Accounts and roles as the constructors take them.
fn split(grants: &[Grant]) -> (Vec<alloy::primitives::Address>, Vec<U256>) {
    let pairs = grants.iter();
    pairs
        .map(|grant| (grant.account.raw(), grant.roles.word()))
        .unzip()
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
