//! Identity as the market uses it: who may trade, and for how much today.
//!
//! Profiles and what is left of the day's limit are cached; identity's events drop what they concern ([`Identity::forget`]), a new Moscow day and
//! [`CACHE_LIFETIME_MS`] drop the rest. `check_trading` is never cached: it is the question of specification 4.3.2.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::common::v1::{KycStatus, LimitType, Money, OperationType};
use proto::convert::{decimal, to_decimal, to_money};
use proto::identity::v1::identity_service_client::IdentityServiceClient;
use proto::identity::v1::{
    CheckLimitsRequest, GetLimitsRequest, GetUserProfileRequest, UserStatus,
};
use rpc::Context;
use serde::{Deserialize, Serialize};
use tonic::{Code, Status};
use types::{Decimal, Minor};

/// How long a profile is believed without an event saying otherwise.
pub const CACHE_LIFETIME_MS: u64 = 60_000;

/// Which figure the TRADING limit is checked with (T23).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitBasis {
    /// The order's quantity, as the text says.
    #[default]
    Quantity,
    /// Quantity times price.
    Notional,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// KYC level is STANDARD or higher.
    pub may_trade: bool,
    pub blocked: bool,
}

pub struct Identity {
    client: IdentityServiceClient<rpc::Channel>,
    basis: LimitBasis,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    profiles: HashMap<String, (Profile, Instant)>,
    /// Raised by every word about anybody: an answer asked for before may be older than it.
    generation: u64,
}

impl Identity {
    pub fn new(channel: rpc::Channel, basis: LimitBasis) -> Self {
        Self {
            client: IdentityServiceClient::new(channel),
            basis,
            cache: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what is cached of a user.
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
                return Ok(*profile);
            }
            cache.generation
        };
        let request = GetUserProfileRequest {
            context: Some(context.child("market", "").to_proto()),
            user_id: user_id.to_owned(),
        };
        let answer = self.client.clone().get_user_profile(request).await;
        let found = answer.map_err(away)?.into_inner().profile;
        let found = found.ok_or_else(|| broken("without the profile"))?;
        let profile = Profile {
            may_trade: found.kyc_status >= i32::from(KycStatus::Standard),
            blocked: found.status() == UserStatus::Blocked,
        };
        let mut cache = self.lock();
        if cache.generation == generation {
            let entry = (profile, Instant::now());
            cache.profiles.insert(user_id.to_owned(), entry);
        }
        Ok(profile)
    }

    /// KYC level and block, with the texts of specification 7 (R146).
    pub async fn check_may_trade(&self, context: &Context, user_id: &str) -> Result<(), Status> {
        let profile = self.profile(context, user_id).await?;
        if !profile.may_trade {
            return Err(rpc::status::failed_precondition(
                "KYC_LEVEL_TOO_LOW",
                "KYC level too low for trading",
            ));
        }
        if profile.blocked {
            return Err(rpc::status::failed_precondition(
                "USER_BLOCKED",
                "User is blocked",
            ));
        }
        Ok(())
    }

    /// Asks for one order: type TRADING, operation TRADING, the quantity as an amount of roubles and the notional beside it (R147, T23). A refusal is
    /// FAILED_PRECONDITION with identity's reason as its text (R148).
    pub async fn check_trading(
        &self,
        context: &Context,
        user_id: &str,
        quantity: Decimal,
        notional: Minor,
    ) -> Result<(), Status> {
        let amount = match self.basis {
            LimitBasis::Quantity => Money {
                currency_code: "RUB".to_owned(),
                amount: Some(to_decimal(quantity)),
            },
            LimitBasis::Notional => to_money(notional.0),
        };
        let request = CheckLimitsRequest {
            context: Some(context.child("market", "").to_proto()),
            user_id: user_id.to_owned(),
            limit_type: LimitType::Trading.into(),
            amount: Some(amount),
            operation_type: OperationType::Trading.into(),
            notional: Some(to_money(notional.0)),
        };
        let answer = self.client.clone().check_limits(request).await;
        let answer = answer.map_err(away)?.into_inner();
        if answer.allowed {
            return Ok(());
        }
        let reason = answer
            .reason
            .filter(|reason| !reason.is_empty())
            .unwrap_or_else(|| "Limit exceeded".to_owned());
        Err(rpc::status::failed_precondition("LIMIT_EXCEEDED", reason))
    }

    /// The day's TRADING limit and what identity says is left of it, in kopecks: the budget that admission counts down.
    pub async fn trading_left(
        &self,
        context: &Context,
        user_id: &str,
    ) -> Result<(Minor, Minor), Status> {
        let request = GetLimitsRequest {
            context: Some(context.child("market", "").to_proto()),
            user_id: user_id.to_owned(),
        };
        let answer = self.client.clone().get_limits(request).await;
        let limits = answer.map_err(away)?.into_inner().limits;
        let Some(trading) = limits
            .iter()
            .find(|limit| limit.limit_type() == LimitType::Trading)
        else {
            return Ok((Minor::ZERO, Minor::ZERO));
        };
        let kopecks = |money: Option<&Money>| {
            money
                .map_or(Ok(Decimal::ZERO), |money| decimal(money.amount.as_ref()))
                .ok()
                .and_then(|value| {
                    value
                        .rescale_rounded(2, types::Rounding::Down)
                        .ok()?
                        .to_minor(2)
                        .ok()
                })
                .ok_or_else(|| broken("a limit that is no amount"))
        };
        let limit = kopecks(trading.daily_limit.as_ref())?;
        let used = kopecks(trading.used_today.as_ref())?;
        let left = limit.saturating_sub(used).max(0);
        Ok((Minor(limit), Minor(left)))
    }
}

fn away(status: Status) -> Status {
    match status.code() {
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
            rpc::status::unavailable("Identity service", 1_000)
        }
        Code::Unauthenticated | Code::PermissionDenied => rpc::status::internal(&status),
        _ => status,
    }
}

fn broken(what: &str) -> Status {
    rpc::status::internal(&std::io::Error::other(format!("identity answered {what}")))
}
