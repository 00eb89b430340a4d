//! A small bank service on its own port.

#![allow(dead_code, reason = "each test target uses its part")]

pub mod exposition;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use axum::{
    extract::{Path, Query},
    routing::get,
};
use proto::{
    common::v1::{Decimal, Money, PaymentStatus},
    ledger::v1::{GetBalanceRequest, ledger_service_client::LedgerServiceClient},
    sandbox::v1::{
        BankTransfer, GetBankBalanceRequest, GetBankBalanceResponse, ListTransfersRequest,
        ListTransfersResponse, PayRequest, PayResponse, SetFaultRequest, SetFaultResponse,
        SignDocumentRequest, SignDocumentResponse,
        sandbox_bank_service_server::{SandboxBankService, SandboxBankServiceServer},
    },
};
use rpc::{Authenticator, Channel, Health, Limits, Service, json::HttpError, json::Json};
use tokio::{net::TcpListener, sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, service::Routes};

pub const TOKEN: &str = "sandbox.operator";
pub const BALANCE: &str = "123456789012345678.000000000000000001";

/// Ends a test that would hang.
pub async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(testkit::PATIENCE, future)
        .await
        .expect("in time")
}

#[derive(Clone)]
pub struct Bank {
    pub health: Health,
    hanging: Arc<AtomicBool>,
    panicking: Arc<AtomicBool>,
    entered: Arc<Notify>,
    payments: Arc<AtomicUsize>,
    /// Channel on which a payment reads a balance, if set.
    ledger: Option<Channel>,
}

impl Default for Bank {
    fn default() -> Self {
        Bank {
            health: Health::new("sandbox"),
            hanging: Arc::default(),
            panicking: Arc::default(),
            entered: Arc::default(),
            payments: Arc::default(),
            ledger: None,
        }
    }
}

impl Bank {
    pub fn with_ledger(ledger: Channel) -> Bank {
        Bank {
            ledger: Some(ledger),
            ..Bank::default()
        }
    }

    /// Reads never answer from now on.
    pub fn hang(&self) {
        self.hanging.store(true, Ordering::SeqCst);
    }

    /// Sets whether reads panic.
    pub fn panics(&self, panicking: bool) {
        self.panicking.store(panicking, Ordering::SeqCst);
    }

    /// Waits until a read has begun.
    pub async fn entered(&self) {
        self.entered.notified().await;
    }

    pub fn payments(&self) -> usize {
        self.payments.load(Ordering::SeqCst)
    }

    pub fn service(&self) -> Service {
        let server = rpc::grpc_server!(SandboxBankServiceServer::new(self.clone()));
        Service {
            name: "sandbox",
            routes: Routes::new(server),
            http: axum::Router::new().route("/transfers/{id}", get(transfer)),
            health: self.health.clone(),
        }
    }
}

#[derive(serde::Deserialize)]
struct Options {
    #[serde(default)]
    verbose: bool,
}

async fn transfer(
    caller: rpc::Caller,
    Path(id): Path<String>,
    Query(options): Query<Options>,
) -> Result<Json, HttpError> {
    assert!(!options.verbose);
    assert!(caller.acts_for_any_user());
    match id.as_str() {
        "hangs" => std::future::pending().await,
        "panics" => panic!("on purpose"),
        _ => {}
    }
    tracing::info!(transfer_id = id, "read");
    if id != "t1" {
        return Err(rpc::status::not_found("TRANSFER_NOT_FOUND", "Transfer not found").into());
    }
    let transfer = BankTransfer {
        transfer_id: id,
        status: PaymentStatus::Success as i32,
        ..Default::default()
    };
    Ok(rpc::json::resource(
        &transfer,
        "dfa.sandbox.v1.BankTransfer",
    ))
}

#[tonic::async_trait]
impl SandboxBankService for Bank {
    async fn pay(&self, request: Request<PayRequest>) -> Result<Response<PayResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let context = rpc::context::write(request.into_inner().context)?;
        self.payments.fetch_add(1, Ordering::SeqCst);
        if let Some(ledger) = &self.ledger {
            let asked = GetBalanceRequest {
                context: Some(context.child("sandbox", "").to_proto()),
                ..Default::default()
            };
            let mut ledger = LedgerServiceClient::new(ledger.clone());
            ledger.get_balance(asked).await?;
        }
        tracing::info!(key = context.idempotency_key, "paid");
        let mut response = Response::new(PayResponse {
            transaction_id: format!("by {}", caller.subject),
            status: PaymentStatus::Success as i32,
        });
        let replayed = tonic::metadata::MetadataValue::from_static("true");
        response
            .metadata_mut()
            .insert("idempotent-replayed", replayed);
        Ok(response)
    }

    async fn set_fault(
        &self,
        _: Request<SetFaultRequest>,
    ) -> Result<Response<SetFaultResponse>, Status> {
        Err(rpc::status::unavailable("Bank", 1_000))
    }

    async fn get_bank_balance(
        &self,
        _: Request<GetBankBalanceRequest>,
    ) -> Result<Response<GetBankBalanceResponse>, Status> {
        self.entered.notify_one();
        assert!(!self.panicking.load(Ordering::SeqCst), "on purpose");
        if self.hanging.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(GetBankBalanceResponse {
            balance: Some(Money {
                currency_code: "RUB".into(),
                amount: Some(Decimal {
                    value: BALANCE.into(),
                }),
            }),
        }))
    }

    async fn list_transfers(
        &self,
        _: Request<ListTransfersRequest>,
    ) -> Result<Response<ListTransfersResponse>, Status> {
        // Like a row stored before times were checked.
        let transfer = BankTransfer {
            transfer_id: "t1".into(),
            created_at: Some(prost_types::Timestamp {
                seconds: i64::MAX,
                nanos: -1,
            }),
            ..Default::default()
        };
        Ok(Response::new(ListTransfersResponse {
            transfers: vec![transfer],
            ..Default::default()
        }))
    }

    async fn sign_document(
        &self,
        _: Request<SignDocumentRequest>,
    ) -> Result<Response<SignDocumentResponse>, Status> {
        Err(rpc::status::unavailable("Bank", 1_000))
    }
}

pub struct Port {
    pub bank: Bank,
    address: String,
    shutdown: CancellationToken,
    served: JoinHandle<Result<(), rpc::Error>>,
    http: reqwest::Client,
}

impl Port {
    pub async fn start() -> Self {
        let bank = Bank::default();
        let services = vec![bank.service()];
        Self::serve(bank, services).await
    }

    pub async fn serve(bank: Bank, services: Vec<Service>) -> Self {
        Self::serve_within(bank, services, Limits::default()).await
    }

    pub async fn within(limits: Limits) -> Self {
        let bank = Bank::default();
        let services = vec![bank.service()];
        Self::serve_within(bank, services, limits).await
    }

    async fn serve_within(bank: Bank, services: Vec<Service>, limits: Limits) -> Self {
        // reqwest is built without a TLS provider and uses the process's.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(rpc::serve::serve_within(
            listener,
            services,
            Authenticator::Sandbox,
            rpc::metrics_init(),
            limits,
            shutdown.clone(),
        ));
        Port {
            bank,
            address,
            shutdown,
            served,
            http: reqwest::Client::builder()
                .timeout(testkit::PATIENCE)
                .build()
                .expect("an HTTP client"),
        }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn builder(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
    ) -> reqwest::RequestBuilder {
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        let builder = self.http.request(method, self.url(path));
        match token {
            Some(token) => builder.bearer_auth(token),
            None => builder,
        }
    }

    pub async fn request(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        media_type: &str,
        body: impl Into<reqwest::Body>,
    ) -> reqwest::Response {
        let builder = self.builder(method, path, token);
        let builder = match media_type {
            "" => builder,
            media_type => builder.header("content-type", media_type),
        };
        in_time(builder.body(body).send()).await.unwrap()
    }

    pub async fn post(
        &self,
        path: &str,
        media_type: &str,
        body: impl Into<reqwest::Body>,
    ) -> reqwest::Response {
        self.request("POST", path, Some(TOKEN), media_type, body)
            .await
    }

    pub async fn get(&self, path: &str) -> reqwest::Response {
        in_time(self.builder("GET", path, Some(TOKEN)).send())
            .await
            .unwrap()
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        in_time(self.served).await.unwrap().unwrap();
    }
}
