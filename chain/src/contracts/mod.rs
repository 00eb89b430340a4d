//! The platform's contracts. A service requests an `Action`; the connector sends it as a `Call`.
//!
//! Bytecode comes from the committed artifacts. Gas limits are fixed per action, not estimated. So
//! an action that the contract refuses reaches a block and leaves a receipt, and two pending
//! actions do not change each other's estimate.
//!
//! | file | content |
//! |---|---|
//! | `encode` | call data and gas limits of the actions |
//! | `version` | versions of the contracts, known code, roles, terms |
//!
//! Version 2 is deployed. Deployments of version 1 keep their contracts: the calls of both versions
//! are equal, but for mint and burn (`Contracts::operation_id`). Tokens of version 2 work with the
//! other contracts of version 1.

mod encode;
#[cfg(test)]
mod tests;
mod version;

use alloy::primitives::keccak256;

use crate::{Address, TxHash};
pub(crate) use encode::is_listed;
pub use version::{Grant, RoleSet, Terms, Version};

mod sol {
    alloy::sol!(
        IdentityRegistry,
        "contracts/artifacts/IdentityRegistry.json"
    );
    alloy::sol!(CfaToken, "contracts/artifacts/CfaToken.json");
    alloy::sol!(Settlement, "contracts/artifacts/Settlement.json");
    alloy::sol!(Redemption, "contracts/artifacts/Redemption.json");
    alloy::sol!(Migration, "contracts/artifacts/Migration.json");
    alloy::sol!(Platform, "contracts/artifacts/Platform.json");
}
/// Contracts of version 1, which existing deployments have.
mod v1 {
    alloy::sol!(
        IdentityRegistry,
        "contracts/artifacts/v1/IdentityRegistry.json"
    );
    alloy::sol!(CfaToken, "contracts/artifacts/v1/CfaToken.json");
    alloy::sol!(Settlement, "contracts/artifacts/v1/Settlement.json");
    alloy::sol!(Redemption, "contracts/artifacts/v1/Redemption.json");
}
pub(crate) use sol::{CfaToken, IdentityRegistry, Migration, Platform, Redemption, Settlement};
/// For `isAgent`.
pub(crate) use v1::CfaToken as TokenV1;

/// Addresses of the contracts shared by all instruments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contracts {
    /// Of `money`; the others are of the same one.
    pub version: Version,
    pub registry: Address,
    /// The token of CFA-RUB.
    pub money: Address,
    pub settlement: Address,
    pub redemption: Address,
}

impl Contracts {
    /// The contracts that `DeployPlatform` deploys, by the address of its own contract.
    pub fn of_platform(platform: &Address) -> Self {
        // The nonces of the contract's deployments, in their order in `Platform.sol`.
        let child = |nonce| Address::from(platform.raw().create(nonce));
        Self {
            version: Version::V2,
            registry: child(1),
            money: child(2),
            settlement: child(3),
            redemption: child(4),
        }
    }

    /// Roles of the platform's accounts in the token of an issue.
    pub fn token_grants(&self, operator: Address) -> Vec<Grant> {
        let grant = |account, roles| Grant { account, roles };
        vec![
            grant(operator, RoleSet::OPERATOR),
            grant(self.settlement, RoleSet::SETTLEMENT),
            grant(self.redemption, RoleSet::REDEMPTION),
        ]
    }

    /// The id under which `money` accepts a mint or burn once. `None`: it knows no ids.
    pub fn operation_id(&self, id: &str) -> Option<String> {
        match self.version {
            Version::V1 => None,
            Version::V2 => Some(id.to_owned()),
        }
    }
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

/// A holder's share of a distribution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payout {
    pub holder: Address,
    pub units: u128,
    pub payment: u128,
}

/// Actions on the chain. Amounts are in the token's smallest units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Deploys the contracts of `Contracts` with all their roles (`Contracts::of_platform`).
    DeployPlatform {
        name: String,
        symbol: String,
        decimals: u8,
        owner: Address,
        operator: Address,
        fee_account: Address,
        /// On the allow-list from the start.
        accounts: Vec<Address>,
    },
    DeployToken {
        name: String,
        symbol: String,
        decimals: u8,
        registry: Address,
        owner: Address,
        grants: Vec<Grant>,
        /// `None`: set later, once (`SetTerms`).
        terms: Option<Terms>,
    },
    /// For the move of all holders from one token to another one.
    DeployMigration {
        from: Address,
        to: Address,
        owner: Address,
        grants: Vec<Grant>,
    },
    /// Version 1, as the other three: the sender is owner and agent.
    DeployRegistry,
    DeployTokenV1 {
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
    /// Version 1; the sender is the owner.
    AddAgent {
        contract: Address,
        agent: Address,
    },
    /// Replaces the roles of an account; the sender is the owner.
    SetRoles {
        contract: Address,
        grant: Grant,
    },
    /// The new owner has no right before it accepts.
    TransferOwnership {
        contract: Address,
        owner: Address,
    },
    AcceptOwnership {
        contract: Address,
    },
    RegisterIdentities {
        registry: Address,
        accounts: Vec<Address>,
    },
    /// The token accepts each `id` once, also of burns and forced transfers. `None`: a token of
    /// version 1, which knows no ids.
    Mint {
        token: Address,
        to: Address,
        units: u128,
        id: Option<String>,
    },
    /// Of units that are not frozen; version 1 burns frozen units too.
    Burn {
        token: Address,
        from: Address,
        units: u128,
        id: Option<String>,
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
    SetPaused {
        token: Address,
        paused: bool,
    },
    /// Enforcement, despite freezes and pause. `reason` is the hash of the document that orders it.
    /// Version 2 only.
    ForcedTransfer {
        token: Address,
        id: String,
        from: Address,
        to: Address,
        units: u128,
        reason: TxHash,
    },
    /// Enforcement in a token of version 1, which knows neither ids nor reasons.
    ForcedTransferV1 {
        token: Address,
        from: Address,
        to: Address,
        units: u128,
    },
    /// Once, unless the token was deployed with terms. Version 2 only.
    SetTerms {
        token: Address,
        terms: Terms,
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
    /// Pays holders and burns the units that the payment redeems; a coupon redeems none. Parts
    /// count from 0 and are accepted in order and once.
    Distribute {
        redemption: Address,
        id: String,
        part: u64,
        token: Address,
        account: Address,
        payouts: Vec<Payout>,
    },
    /// Moves holders of a replaced token to the new one, with their freezes. Both are paused. Parts
    /// count from 0 and are accepted in order and once.
    MoveHolders {
        migration: Address,
        part: u64,
        holders: Vec<Address>,
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

impl Call {
    /// Fingerprint of contract and data.
    pub fn digest(&self) -> i64 {
        let to = self.to.map_or_else(String::new, |to| to.to_string());
        let hash = keccak256([to.as_bytes(), &self.data].concat());
        let (head, _) = hash.split_first_chunk::<8>().expect("a hash has 32 bytes");
        i64::from_be_bytes(*head)
    }
}

/// keccak256 of an id: contracts store ids in this form.
pub fn id_hash(id: &str) -> TxHash {
    TxHash::from(keccak256(id.as_bytes()))
}
