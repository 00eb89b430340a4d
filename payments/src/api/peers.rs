//! Clients of the services that payments calls: identity before money moves, CFA service and chain
//! connector for mints and burns.
//!
//! Reads are tried three times (D30). A refusal of the peer passes to the caller as it is; trouble becomes UNAVAILABLE.

use std::{future::Future, time::Duration};

use proto::{
    cfa::v1::{
        CfaOperation, GetSupplyRequest, ListOperationsRequest,
        cfa_registry_service_client::CfaRegistryServiceClient,
    },
    chain::v1::{
        GetTransactionReceiptRequest, ReceiptStatus,
        chain_connector_service_client::ChainConnectorServiceClient,
    },
    common::v1 as common,
    convert,
    identity::v1::{
        CheckLimitsRequest, CheckSanctionsRequest, GetUserProfileRequest,
        identity_service_client::IdentityServiceClient,
    },
};
use tonic::{Code, Request, Response, Status};
use types::CFA_RUB;

use super::wire::money;
use crate::{
    rail::policy::ClientPolicy,
    reconcile::{TokenSide, TokenState},
    rub::Rub,
    service::Fault,
};

const SOURCE: &str = "payments";

/// Why a payout waits when the name is on a list.
const SANCTIONS_HIT: &str = "Sanctions list hit";

/// Identity: limits, sanctions and bank accounts.
pub struct IdentityPeer {
    channel: rpc::Channel,
    policy: ClientPolicy,
}

impl IdentityPeer {
    pub fn new(channel: rpc::Channel, policy: ClientPolicy) -> IdentityPeer {
        IdentityPeer { channel, policy }
    }

    /// Limit type DEPOSIT, operation type DEPOSIT (specification 4.2.1). A refusal is a fault with
    /// the refusal reason as its text.
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

    /// Where the user's money goes.
    pub async fn bank_account(&self, user_id: &str, correlation_id: &str) -> Result<String, Fault> {
        let ask = GetUserProfileRequest {
            context: Some(context(correlation_id)),
            user_id: user_id.to_owned(),
        };
        let answer = asked("Identity service", &self.policy, async || {
            IdentityServiceClient::new(self.channel.clone())
                .get_user_profile(self.policy.request(ask.clone()))
                .await
        });
        let profile = answer.await?.profile;
        Ok(profile.unwrap_or_default().bank_account)
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

/// A burn that the CFA service has submitted for a payout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Burn {
    pub user_id: String,
    /// `None`: not an amount of roubles.
    pub amount: Option<Rub>,
    pub tx_hash: String,
}

/// How a transaction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipt {
    Succeeded,
    Reverted,
    /// Not in a block with its confirmations yet.
    None,
}

/// CFA service and the chain connector: the token side.
pub struct CfaPeer {
    channel: rpc::Channel,
    chain: rpc::Channel,
    policy: ClientPolicy,
}

impl CfaPeer {
    pub fn new(channel: rpc::Channel, chain: rpc::Channel, policy: ClientPolicy) -> CfaPeer {
        CfaPeer {
            channel,
            chain,
            policy,
        }
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

    /// The issue operation of a payment.
    pub async fn issue(&self, payment_id: &str, correlation_id: &str) -> Result<TokenSide, Fault> {
        self.token_side(common::OperationType::Issuance, payment_id, correlation_id)
            .await
    }

    /// The redemption operation of a payout.
    pub async fn redemption(
        &self,
        payout_id: &str,
        correlation_id: &str,
    ) -> Result<TokenSide, Fault> {
        self.token_side(common::OperationType::Redemption, payout_id, correlation_id)
            .await
    }

    /// The burn of a redemption that waits for its payout. A redemption that has ended, or that
    /// compliance has stopped, has none.
    pub async fn burn(&self, payout_id: &str, correlation_id: &str) -> Result<Option<Burn>, Fault> {
        let submitted = common::OperationStatus::OnchainSubmitted as i32;
        let redemptions = self
            .rub_operations(common::OperationType::Redemption, payout_id, correlation_id)
            .await?;
        let burning = redemptions
            .into_iter()
            .find(|operation| operation.status == submitted);
        Ok(burning.map(|operation| Burn {
            user_id: operation.user_id,
            amount: convert::decimal(operation.amount.as_ref())
                .ok()
                .and_then(|amount| Rub::from_decimal(amount).ok()),
            tx_hash: operation.onchain_tx_hash,
        }))
    }

    /// The receipt of a transaction, as the chain connector has it.
    pub async fn receipt(&self, tx_hash: &str, correlation_id: &str) -> Result<Receipt, Fault> {
        let ask = GetTransactionReceiptRequest {
            context: Some(context(correlation_id)),
            tx_hash: tx_hash.to_owned(),
        };
        let answer = asked("Blockchain", &self.policy, async || {
            ChainConnectorServiceClient::new(self.chain.clone())
                .get_transaction_receipt(self.policy.request(ask.clone()))
                .await
        });
        let receipt = answer.await?.receipt;
        Ok(match receipt.map(|receipt| receipt.status()) {
            Some(ReceiptStatus::Success) => Receipt::Succeeded,
            Some(ReceiptStatus::Reverted) => Receipt::Reverted,
            Some(ReceiptStatus::Unspecified) | None => Receipt::None,
        })
    }

    async fn token_side(
        &self,
        kind: common::OperationType,
        external_ref: &str,
        correlation_id: &str,
    ) -> Result<TokenSide, Fault> {
        let operations = self
            .rub_operations(kind, external_ref, correlation_id)
            .await?;
        // Newest first. A retried issue is a second operation for the same payment: the one that got furthest counts.
        let sides = operations.iter().map(|operation| TokenSide {
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

    /// Operations of CFA-RUB with this external reference, newest first. Other instruments and
    /// kinds may use the same reference.
    async fn rub_operations(
        &self,
        kind: common::OperationType,
        external_ref: &str,
        correlation_id: &str,
    ) -> Result<Vec<CfaOperation>, Fault> {
        let ask = ListOperationsRequest {
            context: Some(context(correlation_id)),
            r#type: kind as i32,
            external_ref: external_ref.to_owned(),
            ..ListOperationsRequest::default()
        };
        let answer = asked("CFA service", &self.policy, async || {
            CfaRegistryServiceClient::new(self.channel.clone())
                .list_operations(self.policy.request(ask.clone()))
                .await
        });
        let mut operations = answer.await?.operations;
        operations.retain(|operation| {
            operation.external_ref == external_ref && operation.instrument_id == CFA_RUB
        });
        Ok(operations)
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
