//! The token side of payments and payouts, read from the CFA service and the chain connector.

use rail::Rub;
use rpc::Context;
use service_clients::cfa::{Operation, OperationFilter};
use service_clients::{
    CallError, CfaClient, ChainClient, OperationStatus, OperationType, caused_by,
};
use types::CFA_RUB;

use crate::{
    reconcile::{TokenSide, TokenState},
    service::Fault,
};

/// Clients of the CFA service and the chain connector.
pub struct Tokens {
    pub cfa: CfaClient,
    pub chain: ChainClient,
}

impl Tokens {
    /// Total supply of CFA-RUB on chain, and the block it was read at (D22).
    pub async fn rub_supply(&self, correlation_id: &str) -> Result<(Rub, u64), Fault> {
        let context = caused_by(correlation_id);
        let (total, block_number) = self.cfa.supply(&context, CFA_RUB).await?;
        Ok((Rub::from_decimal(total)?, block_number))
    }

    /// The issue operation of a payment.
    pub async fn issue(&self, payment_id: &str, correlation_id: &str) -> Result<TokenSide, Fault> {
        let context = caused_by(correlation_id);
        let issues = self.operations(&context, OperationType::Issuance, payment_id);
        Ok(token_side(&issues.await?))
    }

    /// The redemption operation of a payout.
    pub async fn redemption(
        &self,
        payout_id: &str,
        correlation_id: &str,
    ) -> Result<TokenSide, Fault> {
        let context = caused_by(correlation_id);
        let redemptions = self.operations(&context, OperationType::Redemption, payout_id);
        Ok(token_side(&redemptions.await?))
    }

    /// The burn of a redemption that waits for its payout. `None` if the redemption has ended or
    /// compliance has stopped it.
    pub async fn burn(
        &self,
        payout_id: &str,
        correlation_id: &str,
    ) -> Result<Option<Operation>, Fault> {
        let context = caused_by(correlation_id);
        let redemptions = self.operations(&context, OperationType::Redemption, payout_id);
        let submitted = Some(OperationStatus::OnchainSubmitted);
        let mut redemptions = redemptions.await?.into_iter();
        Ok(redemptions.find(|operation| operation.status == submitted))
    }

    /// Operations of CFA-RUB with this type and external reference, newest first. Other instruments
    /// and types may use the same reference.
    async fn operations(
        &self,
        context: &Context,
        operation_type: OperationType,
        external_ref: &str,
    ) -> Result<Vec<Operation>, CallError> {
        let filter = OperationFilter {
            operation_type: Some(operation_type),
            external_ref,
            ..OperationFilter::default()
        };
        let mut operations = self.cfa.operations(context, filter).await?;
        operations.retain(|operation| {
            operation.external_ref == external_ref && operation.instrument_id == CFA_RUB
        });
        Ok(operations)
    }
}

/// State of the operation that has progressed furthest: a retried issue is a second operation of
/// the same payment.
fn token_side(operations: &[Operation]) -> TokenSide {
    let sides = operations.iter().map(|operation| TokenSide {
        state: match operation.status {
            Some(OperationStatus::Finalized) => TokenState::Finalized,
            Some(OperationStatus::Rejected | OperationStatus::Failed) => TokenState::Ended,
            Some(OperationStatus::Refunded) => TokenState::Refunded,
            _ => TokenState::Underway,
        },
        block_number: operation.block_number,
    });
    let furthest = sides.max_by_key(|side| match side.state {
        TokenState::Missing => 0,
        TokenState::Ended => 1,
        TokenState::Refunded => 2,
        TokenState::Underway => 3,
        TokenState::Finalized => 4,
    });
    furthest.unwrap_or(TokenSide::MISSING)
}
