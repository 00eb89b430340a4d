//! Versions of the contracts, the code that is known, roles and terms.

use alloy::primitives::{B256, U256, b256, keccak256};

use crate::{Address, TxHash};

/// Version of the contracts. A change of their code is a new version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One owner and agents with all rights; mint and burn without ids.
    V1,
    /// Roles; mint, burn and forced transfer under an id; terms.
    V2,
}

/// Code hashes of the tokens that can be adopted. A token of version 1 has none: its code depends
/// on its decimals, and its agents cannot be listed. Rows of former versions stay.
const TOKENS: [(B256, Version); 1] = [(
    b256!("deeef3c3dbaf5f0da4a5343bffbbca34a62b601acbabedee3975d0231005b5cc"),
    Version::V2,
)];

impl Version {
    /// The version of a token with this code. `None`: unknown, or of version 1.
    pub(crate) fn of_token(code: &[u8]) -> Option<Self> {
        let hash = keccak256(code);
        let known = TOKENS.iter().find(|(known, _)| *known == hash);
        known.map(|(_, version)| *version)
    }
}

/// Roles of an account in a contract of version 2 (`Roles.sol`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RoleSet(u64);

impl RoleSet {
    pub const NONE: Self = Self(0);
    pub const MINT: Self = Self(1);
    pub const SETTLE: Self = Self(2);
    pub const FREEZE: Self = Self(4);
    pub const PAUSE: Self = Self(8);
    pub const ENFORCE: Self = Self(16);
    pub const ISSUE: Self = Self(32);
    pub const REDEEM: Self = Self(64);
    pub const REGISTER: Self = Self(128);
    pub const TERMS: Self = Self(256);
    pub const MOVE: Self = Self(512);

    /// Of the platform's operator in a token. The functions that accept their operations without an
    /// id are left to the contracts that count them.
    pub const OPERATOR: Self = Self::MINT
        .and(Self::SETTLE)
        .and(Self::FREEZE)
        .and(Self::PAUSE)
        .and(Self::ENFORCE)
        .and(Self::TERMS);
    /// Of the settlement contract in a token.
    pub const SETTLEMENT: Self = Self::SETTLE.and(Self::ISSUE);
    /// Of the redemption contract in a token.
    pub const REDEMPTION: Self = Self::REDEEM;

    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) fn word(self) -> U256 {
        U256::from(self.0)
    }

    /// Of a contract's answer. Bits that do not exist stay visible.
    pub(crate) fn of_word(word: U256) -> Self {
        Self(word.saturating_to())
    }
}

/// The roles of one account in a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grant {
    pub account: Address,
    pub roles: RoleSet,
}

/// Document and terms of an issue, set once (F31).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// Not zero.
    pub document_hash: TxHash,
    pub terms_hash: TxHash,
    pub document_uri: String,
}

impl Default for Terms {
    /// Terms that are not set.
    fn default() -> Self {
        Self {
            document_hash: TxHash::from(B256::ZERO),
            terms_hash: TxHash::from(B256::ZERO),
            document_uri: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CfaToken;
    use super::*;

    #[test]
    fn the_code_of_the_deployed_token_is_known() {
        let code = &CfaToken::DEPLOYED_BYTECODE;
        let hash = keccak256(code);
        assert_eq!(
            Version::of_token(code),
            Some(Version::V2),
            "the contracts have changed: {hash} is a new version"
        );
        assert_eq!(Version::of_token(&code[1..]), None);
        assert_eq!(Version::of_token(&[]), None);
    }
}
