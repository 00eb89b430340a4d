//! Client of the chain connector: receipts.

use async_recursion::async_recursion as boxed;
use proto::chain::v1 as pb;
use proto::chain::v1::chain_connector_service_client::ChainConnectorServiceClient;
use rpc::Context;

use crate::Answer;
use crate::policy::{call, client};

client! {
    /// Client of the chain connector.
    ChainClient, ChainConnectorServiceClient, "Blockchain"
}

impl ChainClient {
    /// Whether a transaction succeeded; `None` until it is in a block and confirmed.
    #[boxed]
    pub async fn has_succeeded(&self, context: &Context, tx_hash: &str) -> Answer<Option<bool>> {
        let request = pb::GetTransactionReceiptRequest {
            context: self.peer.context(context),
            tx_hash: tx_hash.to_owned(),
        };
        let answer = self.peer.call(request, call!(get_transaction_receipt));
        let receipt = answer.await?.receipt;
        Ok(match receipt.map(|receipt| receipt.status()) {
            Some(pb::ReceiptStatus::Success) => Some(true),
            Some(pb::ReceiptStatus::Reverted) => Some(false),
            Some(pb::ReceiptStatus::Unspecified) | None => None,
        })
    }
}
