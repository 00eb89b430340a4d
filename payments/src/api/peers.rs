//! The services this one asks: identity before money comes or goes, CFA for the other side of the reconciliation.
//!
//! Reads are tried three times (D30). A refusal of the peer passes to the caller as it is; trouble becomes UNAVAILABLE.

use std::{future::Future, time::Duration};

use proto::{
    cfa::v1::{
        GetSupplyRequest, ListOperationsRequest,
        cfa_registry_service_client::CfaRegistryServiceClient,
    },
    common::v1 as common,
    convert,
    identity::v1::{
        CheckLimitsRequest, CheckSanctionsRequest, identity_service_client::IdentityServiceClient,
    },
};
use tonic::{Code, Request, Response, Status};

use super::wire::money;
use crate::{
    rail::policy::ClientPolicy,
    reconcile::{TokenSide, TokenState},
    rub::Rub,
    service::Fault,
};

const SOURCE: &str = "payments";
const CFA_RUB: &str = "CFA-RUB";

/// Why a payout waits when the name is on a list.
const SANCTIONS_HIT: &str = "Sanctions list hit";

/// Identity: limits and sanctions.
pub struct IdentityPeer {
    channel: rpc::Channel,
    policy: ClientPolicy,
}

impl IdentityPeer {
    pub fn new(channel: rpc::Channel, policy: ClientPolicy) -> IdentityPeer {
        IdentityPeer { channel, policy }
    }

    /// Limit type DEPOSIT, operation type DEPOSIT (specification 4.2.1). A refusal is a fault with the refusal reason as its text.
    pub async fn check_deposit_limit(
        &self,
        context: &rpc::Context,
        user_id: &str,
        amount: Rub,
    ) -> Result<(), Fault> {
        let ask = CheckLimitsRequest {
            context: Some(context.child(SOURCE, "").to_proto()),
            user_id: user_id.to_owned(),
            limit_type: common::LimitType::Deposit as i32,
            amount: Some(money(amount)),
            operation_type: common::OperationType::Deposit as i32,
            notional: None,
        };
        let answer = asked("Identity service", &self.policy, async || {
            IdentityServiceClient::new(self.channel.clone())
                .check_limits(self.policy.request(ask.clone()))
                .await
        });
        let answer = answer.await?;
        if answer.allowed {
            return Ok(());
        }
        let reason = answer.reason.filter(|reason| !reason.is_empty());
        Err(Fault::LimitExceeded(
            reason.unwrap_or_else(|| "Limit exceeded".to_owned()),
        ))
    }

    /// `Some(reason)` when money must not go to this user now.
    pub async fn check_sanctions(
        &self,
        user_id: &str,
        payload: &str,
        correlation_id: &str,
    ) -> Result<Option<String>, Fault> {
        let ask = CheckSanctionsRequest {
            context: Some(context(correlation_id)),
            user_id: user_id.to_owned(),
            payload: payload.to_owned(),
        };
        let answer = asked("Identity service", &self.policy, async || {
            IdentityServiceClient::new(self.channel.clone())
                .check_sanctions(self.policy.request(ask.clone()))
                .await
        });
        let answer = answer.await?;
        Ok(answer.hit.then(|| {
            if answer.reason.is_empty() {
                SANCTIONS_HIT.to_owned()
            } else {
                answer.reason
            }
        }))
    }
}

/// CFA service: the token side.
pub struct CfaPeer {
    channel: rpc::Channel,
    policy: ClientPolicy,
}

impl CfaPeer {
    pub fn new(channel: rpc::Channel, policy: ClientPolicy) -> CfaPeer {
        CfaPeer { channel, policy }
    }

    /// Total supply of CFA-RUB on chain, and the block it was read at (D22).
    pub async fn rub_supply(&self, correlation_id: &str) -> Result<(Rub, u64), Fault> {
        let ask = GetSupplyRequest {
            context: Some(context(correlation_id)),
            instrument_id: CFA_RUB.to_owned(),
        };
        let answer = asked("CFA service", &self.policy, async || {
            CfaRegistryServiceClient::new(self.channel.clone())
                .get_supply(self.policy.request(ask.clone()))
                .await
        });
        let answer = answer.await?;
        let supply = convert::decimal(answer.total_supply.as_ref()).map_err(|error| {
            tracing::error!(%error, "CFA service gave a supply that is no number");
            Fault::Away("CFA service")
        })?;
        Ok((Rub::from_decimal(supply)?, answer.block_number))
    }

    /// The operation behind a payment or a payout.
    pub async fn token_side(
        &self,
        external_ref: &str,
        correlation_id: &str,
    ) -> Result<TokenSide, Fault> {
        let ask = ListOperationsRequest {
            context: Some(context(correlation_id)),
            external_ref: external_ref.to_owned(),
            ..ListOperationsRequest::default()
        };
        let answer = asked("CFA service", &self.policy, async || {
            CfaRegistryServiceClient::new(self.channel.clone())
                .list_operations(self.policy.request(ask.clone()))
                .await
        });
        let operations = answer.await?.operations;
        // Newest first. A retried issue is a second operation for the same payment: the one that got furthest counts.
        let sides = operations
            .iter()
            .filter(|operation| operation.external_ref == external_ref)
            .map(|operation| TokenSide {
                state: token_state(operation.status),
                block_number: operation.block_number,
            });
        Ok(sides
            .max_by_key(|side| match side.state {
                TokenState::Missing => 0,
                TokenState::Ended => 1,
                TokenState::Refunded => 2,
                TokenState::Underway => 3,
                TokenState::Finalized => 4,
            })
            .unwrap_or(TokenSide::MISSING))
    }
}

fn token_state(status: i32) -> TokenState {
    use common::OperationStatus as Wire;
    match Wire::try_from(status).unwrap_or_default() {
        Wire::Finalized => TokenState::Finalized,
        Wire::Rejected | Wire::Failed => TokenState::Ended,
        Wire::Refunded => TokenState::Refunded,
        _ => TokenState::Underway,
    }
}

fn context(correlation_id: &str) -> common::RequestContext {
    let mut context = rpc::Context::new(SOURCE);
    if !correlation_id.is_empty() {
        correlation_id.clone_into(&mut context.correlation_id);
    }
    context.to_proto()
}

impl ClientPolicy {
    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(Duration::from_millis(self.call_timeout_ms));
        request
    }
}

/// A read, repeated while the peer is away.
async fn asked<T, F>(
    what: &'static str,
    policy: &ClientPolicy,
    ask: impl Fn() -> F,
) -> Result<T, Fault>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut pause = Duration::from_millis(policy.retry_pause_ms);
    let mut attempt = 1;
    loop {
        let limit = Duration::from_millis(policy.call_timeout_ms);
        let status = match tokio::time::timeout(limit, ask()).await {
            Ok(Ok(answer)) => return Ok(answer.into_inner()),
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded("no answer in time"),
        };
        match status.code() {
            Code::NotFound | Code::FailedPrecondition | Code::InvalidArgument => {
                return Err(Fault::Peer(status));
            }
            _ if attempt >= policy.tries => {
                tracing::warn!(what, code = ?status.code(), message = status.message(), "peer does not answer");
                return Err(Fault::Away(what));
            }
            _ => {}
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
        attempt += 1;
    }
}
