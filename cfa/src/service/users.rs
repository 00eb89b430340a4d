//! Users on chain: whose address is what, and the allow-list.
//!
//! The allow-list transaction goes into the same queue as everything else, so whatever is submitted
//! after it is executed after it: nobody has to wait for its receipt (D27: after UserCreated, and
//! lazily before the first tokens). Both are told on the ledger's topic (6.5): that it was ordered,
//! and that it is done.

use std::sync::PoisonError;

use events::Event;
use uuid::Uuid;

use super::Service;
use crate::api::publish;
use crate::error::{Error, Refusal};
use chain::{Action, Address, Receipt, ReceiptStatus};

/// Allow-list transactions asked for in one sweep.
const REGISTRATIONS_MAX: i64 = 100;

impl Service {
    /// Puts the users' addresses on the allow-list unless that is under way already.
    ///
    /// # Errors
    /// `AddressTaken` when two ids give one address (T14); the chain's errors.
    pub async fn ensure_registered(
        &self,
        user_ids: &[&str],
        correlation_id: &str,
    ) -> Result<(), Error> {
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
        let tx_hash = submitted.tx_hash.to_string();
        let requested: Vec<Event> = missing
            .iter()
            .map(|user_id| {
                publish::registration_requested(user_id, &tx_hash, correlation_id, self.now_us())
            })
            .collect();
        self.repo
            .mark_ordered(&missing, &tx_hash, correlation_id, &requested)
            .await?;
        tracing::info!(users = missing.len(), tx_hash = %submitted.tx_hash, "addresses put on the allow-list");
        for user_id in &missing {
            self.remember(user_id);
        }
        Ok(())
    }

    /// Tells that users are on the allow-list, once the receipt of their transaction is here. One
    /// that was reverted stays open and is told in the log.
    ///
    /// # Errors
    /// The chain's and the store's.
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
                "the allow-list transaction was reverted"
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

    /// Asks for receipts of allow-list transactions whose event came before their hash was noted, or not at all.
    pub(super) async fn confirm_registrations(&self) -> Result<(), Error> {
        for tx_hash in self.repo.open_registrations(REGISTRATIONS_MAX).await? {
            self.on_receipt(&tx_hash).await?;
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
