//! Reads of a token: known code, rights, terms, freezes of a holder.

use alloy::providers::Provider;
use async_recursion::async_recursion as boxed;

use super::{ChainError, Connector, to_units};
use crate::contracts::{CfaToken, Grant, RoleSet, Terms, Version};
use crate::{Address, TxHash};

/// What is at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenCode {
    None,
    /// Another contract, or a token of version 1.
    Unknown,
    Token(Version),
}

/// Who can act on a token of version 2, and which allow-list it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRights {
    pub owner: Address,
    /// May become the owner by its own call.
    pub pending_owner: Option<Address>,
    pub registry: Address,
    /// All accounts with a role, in the order of the accounts.
    pub grants: Vec<Grant>,
}

/// State of a holder in a token, in smallest units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderState {
    pub balance: u128,
    /// Of `balance`.
    pub frozen_units: u128,
    pub frozen: bool,
}

impl Connector {
    /// Reads the code at the address and compares its hash with those of the platform's tokens.
    #[boxed]
    pub async fn token_code(&self, address: &Address) -> Result<TokenCode, ChainError> {
        let code = self.inner.provider.get_code_at(address.raw()).await?;
        if code.is_empty() {
            return Ok(TokenCode::None);
        }
        let known = Version::of_token(&code);
        Ok(known.map_or(TokenCode::Unknown, TokenCode::Token))
    }

    /// Owner, allow-list and roles of a token of version 2.
    #[boxed]
    pub async fn token_rights(&self, token: &Address) -> Result<TokenRights, ChainError> {
        let owner = self.call_view(token, CfaToken::ownerCall {}).await?;
        let pending = self.call_view(token, CfaToken::pendingOwnerCall {}).await?;
        let registry = CfaToken::identityRegistryCall {};
        let registry = self.call_view(token, registry).await?;
        let held = self.call_view(token, CfaToken::roleHoldersCall {}).await?;
        let grants = held.accounts.into_iter().zip(held.roles);
        let grants = grants.map(|(account, roles)| Grant {
            account: Address::from(account),
            roles: RoleSet::of_word(roles),
        });
        let mut grants: Vec<Grant> = grants
            .filter(|grant| grant.roles != RoleSet::NONE)
            .collect();
        grants.sort_unstable();
        Ok(TokenRights {
            owner: Address::from(owner),
            pending_owner: (!pending.is_zero()).then(|| Address::from(pending)),
            registry: Address::from(registry),
            grants,
        })
    }

    /// Owner of a contract of either version.
    #[boxed]
    pub async fn owner_of(&self, contract: &Address) -> Result<Address, ChainError> {
        let owner = self.call_view(contract, CfaToken::ownerCall {}).await?;
        Ok(Address::from(owner))
    }

    /// Document and terms of a token of version 2; `None` until they are set.
    #[boxed]
    pub async fn token_terms(&self, token: &Address) -> Result<Option<Terms>, ChainError> {
        let terms = self.call_view(token, CfaToken::termsCall {}).await?;
        Ok((!terms.document.is_zero()).then(|| Terms {
            document_hash: TxHash::from(terms.document),
            terms_hash: TxHash::from(terms.recorded),
            document_uri: terms.uri,
        }))
    }

    /// Balance and freezes of an address.
    #[boxed]
    pub async fn holder_state(
        &self,
        token: &Address,
        holder: &Address,
    ) -> Result<HolderState, ChainError> {
        let account = holder.raw();
        let frozen_units = CfaToken::getFrozenTokensCall { account };
        let frozen = CfaToken::isFrozenCall { account };
        Ok(HolderState {
            balance: self.balance_of(token, holder).await?,
            frozen_units: to_units(self.call_view(token, frozen_units).await?)?,
            frozen: self.call_view(token, frozen).await?,
        })
    }

    #[boxed]
    pub async fn is_paused(&self, token: &Address) -> Result<bool, ChainError> {
        self.call_view(token, CfaToken::pausedCall {}).await
    }

    /// Roles of an account in a contract of version 2.
    #[boxed]
    pub async fn roles_of(
        &self,
        contract: &Address,
        account: &Address,
    ) -> Result<RoleSet, ChainError> {
        let call = CfaToken::rolesOfCall {
            account: account.raw(),
        };
        Ok(RoleSet::of_word(self.call_view(contract, call).await?))
    }
}
