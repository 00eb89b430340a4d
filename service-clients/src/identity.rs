//! Client of the identity service: profiles, limits, sanctions.

use async_recursion::async_recursion as boxed;
use proto::common::v1 as common;
use proto::common::v1::KycStatus;
use proto::convert::{to_decimal, to_money};
use proto::identity::v1::identity_service_client::IdentityServiceClient;
use proto::identity::v1::{
    CancelLimitRequest, CheckLimitsRequest, CheckSanctionsRequest, ConfirmLimitRequest,
    GetLimitsRequest, GetUserProfileRequest, ReserveLimitRequest, UserStatus,
};
use rpc::Context;
use types::{Decimal, Minor, Rounding};

use crate::convert::number_or_zero;
use crate::policy::{call, client};
use crate::{Answer, LimitType, OperationType};

/// Texts of a refusal without a reason.
const LIMIT_EXCEEDED: &str = "Limit exceeded";
const SANCTIONS_HIT: &str = "Sanctions list hit";

/// The profile fields that services use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// KYC level is STANDARD or higher (D08: an ordered level).
    pub is_standard: bool,
    pub is_blocked: bool,
    /// A qualified investor: buys without a yearly limit (F35).
    pub is_qualified: bool,
    pub bank_account: String,
}

/// A user's limit per period, in kopecks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DayLimit {
    pub limit: Minor,
    pub left: Minor,
}

client! {
    /// Client of the identity service.
    IdentityClient, IdentityServiceClient, "Identity service"
}

impl IdentityClient {
    /// The user's profile. A user without a profile is refused (`NOT_FOUND`).
    #[boxed]
    pub async fn profile(&self, context: &Context, user_id: &str) -> Answer<Profile> {
        let request = GetUserProfileRequest {
            context: self.peer.context(context),
            user_id: user_id.to_owned(),
        };
        let answer = self.peer.call(request, call!(get_user_profile)).await?;
        let profile = answer
            .profile
            .ok_or_else(|| self.peer.malformed_response("profile is missing"))?;
        Ok(Profile {
            is_standard: profile.kyc_status >= i32::from(KycStatus::Standard),
            is_blocked: profile.status() == UserStatus::Blocked,
            is_qualified: profile.qualified_investor,
            bank_account: profile.bank_account,
        })
    }

    /// Checks a limit. Returns the reason if the check refuses. `amount` is in roubles. `notional`
    /// is the order value if `amount` is a quantity (T23).
    #[boxed]
    pub async fn check_limits(
        &self,
        context: &Context,
        user_id: &str,
        limit: LimitType,
        operation: OperationType,
        amount: Decimal,
        notional: Option<Minor>,
    ) -> Answer<Option<String>> {
        let request = CheckLimitsRequest {
            context: self.peer.context(context),
            user_id: user_id.to_owned(),
            limit_type: limit.code(),
            amount: Some(rubles(amount)),
            operation_type: operation.code(),
            notional: notional.map(|notional| to_money(notional.0)),
        };
        let answer = self.peer.call(request, call!(check_limits)).await?;
        let reason = answer.reason.unwrap_or_default();
        Ok((!answer.allowed).then(|| text_or(reason, LIMIT_EXCEEDED)))
    }

    /// Checks a limit and reserves the amount, once per operation (T24). Returns the reason if the
    /// check refuses. `amount` is in roubles.
    #[boxed]
    pub async fn reserve_limit(
        &self,
        context: &Context,
        operation_id: &str,
        user_id: &str,
        limit: LimitType,
        operation: OperationType,
        amount: Decimal,
    ) -> Answer<Option<String>> {
        let request = ReserveLimitRequest {
            context: self.peer.keyed(context, &format!("{operation_id}:reserve")),
            reservation_id: operation_id.to_owned(),
            user_id: user_id.to_owned(),
            limit_type: limit.code(),
            amount: Some(rubles(amount)),
            operation_type: operation.code(),
        };
        let answer = self.peer.call(request, call!(reserve_limit)).await?;
        let reason = answer.reason.unwrap_or_default();
        Ok((!answer.allowed).then(|| text_or(reason, LIMIT_EXCEEDED)))
    }

    /// Confirms an operation's reservation. `used` of its amount counts as used, `None`: all of it.
    #[boxed]
    pub async fn confirm_limit(
        &self,
        context: &Context,
        operation_id: &str,
        used: Option<Minor>,
    ) -> Answer<()> {
        let request = ConfirmLimitRequest {
            context: self.peer.keyed(context, &format!("{operation_id}:confirm")),
            reservation_id: operation_id.to_owned(),
            amount: used.map(|used| to_money(used.0)),
        };
        self.peer.send(request, call!(confirm_limit)).await
    }

    /// Cancels an operation's reservation. Its amount is available again.
    #[boxed]
    pub async fn cancel_limit(&self, context: &Context, operation_id: &str) -> Answer<()> {
        let request = CancelLimitRequest {
            context: self.peer.keyed(context, &format!("{operation_id}:cancel")),
            reservation_id: operation_id.to_owned(),
        };
        self.peer.send(request, call!(cancel_limit)).await
    }

    /// The user's daily limit and what is left of it; zeros if identity has no such limit.
    #[boxed]
    pub async fn day_limit(
        &self,
        context: &Context,
        user_id: &str,
        limit: LimitType,
    ) -> Answer<DayLimit> {
        Ok(self
            .limit(context, user_id, limit)
            .await?
            .unwrap_or_default())
    }

    /// What is left of the user's limit for purchases of the year, in kopecks (F35). `None`: no
    /// such limit applies to the user.
    #[boxed]
    pub async fn purchases_left(&self, context: &Context, user_id: &str) -> Answer<Option<Minor>> {
        let limit = self.limit(context, user_id, LimitType::Investment).await?;
        Ok(limit.map(|limit| limit.left))
    }

    #[boxed]
    async fn limit(
        &self,
        context: &Context,
        user_id: &str,
        limit: LimitType,
    ) -> Answer<Option<DayLimit>> {
        let request = GetLimitsRequest {
            context: self.peer.context(context),
            user_id: user_id.to_owned(),
        };
        let limits = self.peer.call(request, call!(get_limits)).await?.limits;
        let named = limits
            .into_iter()
            .find(|named| named.limit_type == limit.code());
        let Some(named) = named else {
            return Ok(None);
        };
        let kopecks = |money: Option<common::Money>| {
            let amount = money.and_then(|money| money.amount);
            number_or_zero(amount.as_ref())
                .ok()
                .and_then(|value| value.rescale_rounded(2, Rounding::Down).ok())
                .and_then(|value| value.to_minor(2).ok())
                .ok_or_else(|| self.peer.malformed_response("limit is not an amount"))
        };
        let (limit, used) = (kopecks(named.daily_limit)?, kopecks(named.used_today)?);
        Ok(Some(DayLimit {
            limit: Minor(limit),
            left: Minor(limit.saturating_sub(used).max(0)),
        }))
    }

    /// Screens a user and a payload against the sanctions lists. Returns the reason of a hit.
    #[boxed]
    pub async fn check_sanctions(
        &self,
        context: &Context,
        user_id: &str,
        payload: &str,
    ) -> Answer<Option<String>> {
        let request = CheckSanctionsRequest {
            context: self.peer.context(context),
            user_id: user_id.to_owned(),
            payload: payload.to_owned(),
        };
        let answer = self.peer.call(request, call!(check_sanctions)).await?;
        Ok(answer.hit.then(|| text_or(answer.reason, SANCTIONS_HIT)))
    }
}

fn rubles(amount: Decimal) -> common::Money {
    common::Money {
        currency_code: "RUB".to_owned(),
        amount: Some(to_decimal(amount)),
    }
}

/// The text, or the default if it is empty.
fn text_or(text: String, default: &str) -> String {
    if text.is_empty() {
        default.to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R044
    #[test]
    fn r044_a_refusal_without_a_reason_has_a_text() {
        assert_eq!(text_or(String::new(), LIMIT_EXCEEDED), "Limit exceeded");
        assert_eq!(text_or("KYC".to_owned(), LIMIT_EXCEEDED), "KYC");
    }
}
