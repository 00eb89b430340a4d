//! The identity service as the market uses it: who may trade, and for how much today.
//!
//! Profiles are cached. Identity's events evict the users they concern ([`Identity::forget`]),
//! [`CACHE_LIFETIME_MS`] evicts the rest. `check_trading` is never cached: it is the check of
//! specification 4.3.2.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rpc::Context;
use serde::{Deserialize, Serialize};
use service_clients::identity::Profile;
use service_clients::{IdentityClient, LimitType, OperationType};
use tonic::Status;
use types::instrument::MONEY_DECIMALS;
use types::{Decimal, Minor};

/// Lifetime of a cached profile without an event.
pub const CACHE_LIFETIME_MS: u64 = 60_000;

/// Amount that is checked against the TRADING limit (T23).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitBasis {
    /// The order's quantity, as the specification says.
    #[default]
    Quantity,
    /// Quantity times price.
    Notional,
}

pub struct Identity {
    pub client: IdentityClient,
    basis: LimitBasis,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    profiles: HashMap<String, (Profile, Instant)>,
    /// Incremented by every event about a user: an answer to an earlier request may predate it.
    generation: u64,
}

impl Identity {
    pub fn new(client: IdentityClient, basis: LimitBasis) -> Self {
        Self {
            client,
            basis,
            cache: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Evicts a user's profile.
    pub fn forget(&self, user_id: &str) {
        let mut cache = self.lock();
        cache.generation += 1;
        cache.profiles.remove(user_id);
    }

    pub async fn profile(&self, context: &Context, user_id: &str) -> Result<Profile, Status> {
        let lifetime = Duration::from_millis(CACHE_LIFETIME_MS);
        let generation = {
            let cache = self.lock();
            if let Some((profile, at)) = cache.profiles.get(user_id)
                && at.elapsed() < lifetime
            {
                return Ok(profile.clone());
            }
            cache.generation
        };
        let profile = self.client.profile(context, user_id).await?;
        let mut cache = self.lock();
        if cache.generation == generation {
            let entry = (profile.clone(), Instant::now());
            cache.profiles.insert(user_id.to_owned(), entry);
        }
        Ok(profile)
    }

    /// KYC level and block, with the texts of specification 7 (R146).
    pub async fn check_may_trade(&self, context: &Context, user_id: &str) -> Result<(), Status> {
        let profile = self.profile(context, user_id).await?;
        if !profile.is_standard {
            return Err(rpc::status::failed_precondition(
                "KYC_LEVEL_TOO_LOW",
                "KYC level too low for trading",
            ));
        }
        if profile.is_blocked {
            return Err(rpc::status::failed_precondition(
                "USER_BLOCKED",
                "User is blocked",
            ));
        }
        Ok(())
    }

    /// Checks one order against the limits: type TRADING, operation TRADING, the quantity as an
    /// amount of roubles, and the notional in addition (R147, T23). A refusal is
    /// FAILED_PRECONDITION with identity's reason as its text (R148).
    pub async fn check_trading(
        &self,
        context: &Context,
        user_id: &str,
        quantity: Decimal,
        notional: Minor,
    ) -> Result<(), Status> {
        let (limit, operation) = (LimitType::Trading, OperationType::Trading);
        let amount = match self.basis {
            LimitBasis::Quantity => quantity,
            LimitBasis::Notional => Decimal::from_minor(notional.0, MONEY_DECIMALS),
        };
        let notional = Some(notional);
        let refused = self
            .client
            .check_limits(context, user_id, limit, operation, amount, notional);
        match refused.await? {
            None => Ok(()),
            Some(reason) => Err(rpc::status::failed_precondition("LIMIT_EXCEEDED", reason)),
        }
    }
}
