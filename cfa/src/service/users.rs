//! Users on chain: whose address is what, and the allow-list.
//!
//! The allow-list transaction goes into the same queue as everything else, so whatever is submitted after it is executed after it: nobody
//! has to wait for its receipt (D27: after UserCreated, and lazily before the first tokens).

use std::sync::PoisonError;

use uuid::Uuid;

use super::Service;
use crate::chain::{Action, Address};
use crate::error::{Error, Refusal};

impl Service {
    /// Puts the users' addresses on the allow-list unless that is under way already.
    ///
    /// # Errors
    /// `AddressTaken` when two ids give one address (T14); the chain's errors.
    pub async fn ensure_registered(&self, user_ids: &[&str]) -> Result<(), Error> {
        let mut missing: Vec<String> = Vec::new();
        for user_id in user_ids {
            if !self.address_noted(user_id).await? && !missing.iter().any(|known| known == user_id)
            {
                missing.push((*user_id).to_owned());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        missing.sort_unstable();
        let accounts: Vec<_> = missing
            .iter()
            .map(|user_id| Address::of_user(user_id))
            .collect();
        let key = format!(
            "identity:{}",
            Uuid::new_v5(&Uuid::NAMESPACE_OID, missing.join("\n").as_bytes())
        );
        let action = Action::RegisterIdentities {
            registry: self.contracts.registry,
            accounts,
        };
        let submitted = self.chain.submit(&key, &action.call()).await?;
        self.repo.mark_registered(&missing).await?;
        tracing::info!(users = missing.len(), tx_hash = %submitted.tx_hash, "addresses put on the allow-list");
        for user_id in &missing {
            self.remember(user_id);
        }
        Ok(())
    }

    /// Notes the user's address; true when it is on the allow-list or on its way there.
    ///
    /// # Errors
    /// A `Refusal` when the id gives no address of its own (T14).
    pub(super) async fn address_noted(&self, user_id: &str) -> Result<bool, Error> {
        if self
            .registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(user_id)
        {
            return Ok(true);
        }
        if user_id.is_empty() || (user_id.contains(':') && !user_id.starts_with("system:")) {
            return Err(Refusal::field("user_id", "must not be empty or contain `:`").into());
        }
        let address = Address::of_user(user_id).to_string();
        let ordered = self
            .repo
            .note_address(user_id, &address, self.now_us())
            .await?;
        if ordered {
            self.remember(user_id);
        }
        Ok(ordered)
    }

    fn remember(&self, user_id: &str) {
        self.registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(user_id.to_owned());
    }
}
