//! Users' on-chain addresses and the allow-list.
//!
//! A user is put on the allow-list after UserCreated, or at the latest before the first tokens
//! (D27). The allow-list transaction has a nonce below that of later submissions, so they need not
//! wait for its receipt. Its submission and its confirmation are published on the ledger's topic
//! (6.5).

use std::sync::PoisonError;

use events::Event;
use uuid::Uuid;

use super::Service;
use crate::api::publish;
use crate::error::{Error, Refusal};
use chain::{Action, Address, Receipt, ReceiptStatus};

/// Limit of allow-list transactions per sweep.
const REGISTRATIONS_MAX: i64 = 100;

impl Service {
    /// Submits an allow-list transaction for those of the users that have none yet.
    ///
    /// # Errors
    /// `AddressTaken` if another user has the same address (T14); errors of the chain.
    pub async fn ensure_registered(
        &self,
        user_ids: &[&str],
        correlation_id: &str,
    ) -> Result<(), Error> {
        let mut missing: Vec<String> = Vec::new();
        for user_id in user_ids {
            if !self.store_address(user_id).await? && !missing.iter().any(|known| known == user_id)
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
        let tx_hash = submitted.tx_hash.to_string();
        let requested: Vec<Event> = missing
            .iter()
            .map(|user_id| {
                publish::registration_requested(user_id, &tx_hash, correlation_id, self.now_us())
            })
            .collect();
        self.repo
            .mark_submitted(&missing, &tx_hash, correlation_id, &requested)
            .await?;
        tracing::info!(users = missing.len(), tx_hash = %submitted.tx_hash,
            "allow-list transaction submitted");
        for user_id in &missing {
            self.cache_registered(user_id);
        }
        Ok(())
    }

    /// Applies the receipt of an allow-list transaction: publishes that its users are on the list.
    /// A reverted transaction stays open and is logged.
    ///
    /// # Errors
    /// Errors of the chain and the store.
    pub(super) async fn confirm_registration(
        &self,
        tx_hash: &str,
        receipt: &Receipt,
    ) -> Result<(), Error> {
        let users = self.repo.users_to_confirm(tx_hash).await?;
        if users.is_empty() {
            return Ok(());
        }
        if receipt.status != ReceiptStatus::Success {
            tracing::error!(
                tx_hash,
                users = users.len(),
                "allow-list transaction reverted"
            );
            return Ok(());
        }
        let confirmed: Vec<Event> = users
            .iter()
            .map(|(user_id, correlation_id)| {
                publish::registration_confirmed(user_id, tx_hash, correlation_id, self.now_us())
            })
            .collect();
        self.repo.confirm_registered(tx_hash, &confirmed).await
    }

    /// Reads the receipts of unconfirmed allow-list transactions. Their event may be lost, or may
    /// have arrived before the hash was stored.
    pub(super) async fn confirm_registrations(&self) -> Result<(), Error> {
        for tx_hash in self.repo.open_registrations(REGISTRATIONS_MAX).await? {
            self.on_receipt(&tx_hash).await?;
        }
        Ok(())
    }

    /// Stores the user's address. True if its allow-list transaction was submitted.
    ///
    /// # Errors
    /// A `Refusal` if the id is invalid or another user has the address (T14).
    pub(super) async fn store_address(&self, user_id: &str) -> Result<bool, Error> {
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
        let submitted = self
            .repo
            .store_address(user_id, &address, self.now_us())
            .await?;
        if submitted {
            self.cache_registered(user_id);
        }
        Ok(submitted)
    }

    fn cache_registered(&self, user_id: &str) {
        self.registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(user_id.to_owned());
    }
}
