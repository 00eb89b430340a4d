//! `ChainConnectorService` and the connector's HTTP reads: `POST /getTransactionReceipt`,
//! `/getBlock`, `/estimateGas` (specification 4.6).

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use pb::chain_connector_service_server::{ChainConnectorService, ChainConnectorServiceServer};
use proto::chain::v1 as pb;
use rpc::json::HttpError;
use rpc::status;
use serde::Deserialize;
use serde_json::Value;
use tonic::{Request, Response, Status};

use crate::contracts::{Call, is_listed};
use crate::{Address, BlockInfo, ChainError, Connector, Receipt, ReceiptStatus, TxHash};

#[derive(Clone)]
struct Api {
    connector: Connector,
}

pub(crate) fn service(connector: Connector, health: rpc::Health) -> rpc::Service {
    let api = Api { connector };
    let http = Router::new()
        .route("/getTransactionReceipt", post(http_receipt))
        .route("/getBlock", post(http_block))
        .route("/estimateGas", post(http_estimate_gas))
        .with_state(api.clone());
    let routes =
        tonic::service::Routes::new(rpc::grpc_server!(ChainConnectorServiceServer::new(api)));
    rpc::Service {
        name: "chain",
        routes,
        http,
        health,
    }
}

/// Maps an error to a status: UNAVAILABLE for an unreachable node. A refusal keeps the node's text.
pub fn chain_status(error: &ChainError) -> Status {
    match error {
        ChainError::Unavailable(reason) => {
            tracing::warn!(reason, "chain unavailable");
            status::unavailable("Blockchain", 1_000)
        }
        ChainError::Refused(reason) => status::failed_precondition("CHAIN_REFUSED", reason.clone()),
        other => status::internal(other),
    }
}

fn tx_hash(field: &str, text: &str) -> Result<TxHash, Status> {
    text.parse()
        .map_err(|_| status::invalid_argument(field, "must be `0x` and 64 hex digits"))
}

fn target(field: &str, text: &str) -> Result<Option<Address>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse()
        .map(Some)
        .map_err(|_| status::invalid_argument(field, "must be `0x` and 40 hex digits"))
}

fn bytes(field: &str, text: &str) -> Result<Vec<u8>, Status> {
    hex::decode(text.strip_prefix("0x").unwrap_or(text))
        .map_err(|_| status::invalid_argument(field, "must be `0x` and hex digits"))
}

fn to_receipt(receipt: &Receipt) -> pb::TransactionReceipt {
    pb::TransactionReceipt {
        tx_hash: receipt.tx_hash.to_string(),
        block_number: receipt.block_number,
        block_hash: receipt.block_hash.to_string(),
        status: match receipt.status {
            ReceiptStatus::Success => pb::ReceiptStatus::Success,
            ReceiptStatus::Reverted => pb::ReceiptStatus::Reverted,
        }
        .into(),
        gas_used: receipt.gas_used,
        from: receipt.from.to_string(),
        to: receipt
            .to
            .map(|address| address.to_string())
            .unwrap_or_default(),
        contract_address: receipt
            .contract_address
            .map(|address| address.to_string())
            .unwrap_or_default(),
        included_tx_hash: receipt.included_tx_hash.to_string(),
    }
}

fn to_block(block: &BlockInfo) -> pb::Block {
    pb::Block {
        number: block.number,
        hash: block.hash.to_string(),
        parent_hash: block.parent_hash.to_string(),
        tx_hashes: block.tx_hashes.iter().map(TxHash::to_string).collect(),
        at: Some(prost_types::Timestamp {
            seconds: block.time_s as i64,
            nanos: 0,
        }),
    }
}

impl Api {
    async fn receipt(&self, hash: &str) -> Result<Option<pb::TransactionReceipt>, Status> {
        let receipt = self
            .connector
            .receipt(&tx_hash("tx_hash", hash)?)
            .await
            .map_err(|error| chain_status(&error))?;
        Ok(receipt.as_ref().map(to_receipt))
    }

    async fn block(&self, number: Option<u64>) -> Result<pb::Block, Status> {
        let block = self
            .connector
            .block(number)
            .await
            .map_err(|error| chain_status(&error))?;
        block.as_ref().map(to_block).ok_or_else(block_not_found)
    }

    async fn gas(&self, to: &str, data: &str) -> Result<u64, Status> {
        let to = target("to", to)?;
        let data = bytes("data", data)?;
        self.connector
            .estimate_gas(to.as_ref(), &data)
            .await
            .map_err(|error| chain_status(&error))
    }
}

pub fn block_not_found() -> Status {
    status::not_found("BLOCK_NOT_FOUND", "Block not found")
}

#[tonic::async_trait]
impl ChainConnectorService for Api {
    async fn submit_transaction(
        &self,
        request: Request<pb::SubmitTransactionRequest>,
    ) -> Result<Response<pb::SubmitTransactionResponse>, Status> {
        let request = request.into_inner();
        let context = rpc::context::write(request.context)?;
        let payload = request
            .payload
            .ok_or_else(|| status::invalid_argument("payload", "is required"))?;
        let call = Call {
            to: target("payload.to", &payload.to)?,
            data: bytes("payload.data", &payload.data)?,
            gas_limit: (payload.gas_limit != 0).then_some(payload.gas_limit),
        };
        if !is_listed(&call) {
            let why = "must call a listed function of the platform's contracts";
            return Err(status::invalid_argument("payload.data", why));
        }
        let key = format!("rpc:{}", context.idempotency_key);
        let submitted = self.connector.submit_once(&key, &call).await;
        let (submission, replayed) = submitted.map_err(|error| chain_status(&error))?;
        let answer = pb::SubmitTransactionResponse {
            tx_hash: submission.tx_hash.to_string(),
        };
        Ok(rpc::context::answered(answer, replayed))
    }

    async fn get_transaction_receipt(
        &self,
        request: Request<pb::GetTransactionReceiptRequest>,
    ) -> Result<Response<pb::GetTransactionReceiptResponse>, Status> {
        let request = request.into_inner();
        rpc::context::record_read_context(request.context);
        Ok(Response::new(pb::GetTransactionReceiptResponse {
            receipt: self.receipt(&request.tx_hash).await?,
        }))
    }

    async fn get_block(
        &self,
        request: Request<pb::GetBlockRequest>,
    ) -> Result<Response<pb::GetBlockResponse>, Status> {
        let request = request.into_inner();
        rpc::context::record_read_context(request.context);
        Ok(Response::new(pb::GetBlockResponse {
            block: Some(self.block(request.number).await?),
        }))
    }

    async fn verify_block_hash(
        &self,
        request: Request<pb::VerifyBlockHashRequest>,
    ) -> Result<Response<pb::VerifyBlockHashResponse>, Status> {
        let request = request.into_inner();
        rpc::context::record_read_context(request.context);
        let hash = tx_hash("hash", &request.hash)?;
        let valid = self
            .connector
            .verify_block_hash(request.number, &hash)
            .await
            .map_err(|error| chain_status(&error))?;
        Ok(Response::new(pb::VerifyBlockHashResponse { valid }))
    }

    async fn estimate_gas(
        &self,
        request: Request<pb::EstimateGasRequest>,
    ) -> Result<Response<pb::EstimateGasResponse>, Status> {
        let request = request.into_inner();
        rpc::context::record_read_context(request.context);
        Ok(Response::new(pb::EstimateGasResponse {
            gas: self.gas(&request.to, &request.data).await?,
        }))
    }
}

#[derive(Deserialize)]
struct ReceiptQuery {
    tx_hash: String,
}

#[derive(Deserialize)]
struct BlockQuery {
    block_number: u64,
}

#[derive(Deserialize)]
struct GasQuery {
    #[serde(default)]
    to: String,
    data: String,
}

async fn http_receipt(
    State(api): State<Api>,
    Json(query): Json<ReceiptQuery>,
) -> Result<Json<Value>, HttpError> {
    let receipt = api.receipt(&query.tx_hash).await?;
    let receipt =
        receipt.ok_or_else(|| status::not_found("RECEIPT_NOT_FOUND", "Receipt not found"))?;
    Ok(rpc::json::resource(
        &receipt,
        "dfa.chain.v1.TransactionReceipt",
    ))
}

async fn http_block(
    State(api): State<Api>,
    Json(query): Json<BlockQuery>,
) -> Result<Json<Value>, HttpError> {
    Ok(rpc::json::resource(
        &api.block(Some(query.block_number)).await?,
        "dfa.chain.v1.Block",
    ))
}

async fn http_estimate_gas(
    State(api): State<Api>,
    Json(query): Json<GasQuery>,
) -> Result<Json<Value>, HttpError> {
    let gas = api.gas(&query.to, &query.data).await?;
    Ok(rpc::json::resource(
        &pb::EstimateGasResponse { gas },
        "dfa.chain.v1.EstimateGasResponse",
    ))
}
