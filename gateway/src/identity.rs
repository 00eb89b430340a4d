//! The identity service as the market uses it: permission to trade, and the daily limit.
//!
//! Profiles are cached. An event of identity about a user evicts the user's profile
//! ([`Identity::evict`]). Other profiles expire after [`CACHE_LIFETIME_MS`]. `check_trading` is
//! never cached: it is the check of specification 4.3.2.

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
    /// Incremented by each eviction. A profile that was requested earlier is not cached.
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
    pub fn evict(&self, user_id: &str) {
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

    /// Checks KYC level and block. The error texts are those of specification 7 (R146).
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

    /// Checks one order against the limits: type TRADING, operation TRADING (R147, T23). The amount
    /// in roubles is the quantity or the notional ([`LimitBasis`]). The notional is sent in
    /// addition. A refusal is FAILED_PRECONDITION with identity's reason as its text (R148).
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
