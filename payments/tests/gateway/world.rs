//! A gateway on real ports with the sandbox bank over loopback HTTP and the sandbox identity.
//!
//! The reads of the CFA service and the chain are stubs.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::State, middleware::Next};
use events::{Embedded, Event, Log};
use payments::{AlertSinks, PaymentsConfig, PaymentsDeps, PaymentsHandle};
use prost::Message;
use proto::{
    audit::v1::AuditRecord,
    cfa::v1::{
        CfaOperation, GetSupplyRequest, GetSupplyResponse, ListOperationsRequest,
        ListOperationsResponse,
    },
    chain::v1::{
        GetTransactionReceiptRequest, GetTransactionReceiptResponse, ReceiptStatus,
        TransactionReceipt,
    },
    common::v1 as common,
    identity::v1::{self as identity, identity_service_client::IdentityServiceClient},
    payments::v1::{self as wire, payments_service_client::PaymentsServiceClient},
    sandbox::v1::{self as sandbox_wire, sandbox_bank_service_client::SandboxBankServiceClient},
};
use rail::{account, keys::Keys};
use rpc::{Authenticator, Channel, LocalSlot};
use sandbox::{
    bank::{BankConfig, BankHandle},
    identity::{IdentityConfig, IdentityDeps, IdentityHandle},
};
use tempfile::TempDir;
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, service::Routes};
use uuid::Uuid;

pub use testkit::eventually as until;
pub use testkit::messages::{context as ctx_with, rubles as rub};

pub const ALICE: &str = "alice";

/// The token side, set by the tests.
#[derive(Default)]
pub struct CfaStub {
    pub supply: Mutex<String>,
    pub block: Mutex<u64>,
    /// By external reference. A type left unspecified matches every filter.
    pub operations: Mutex<HashMap<String, CfaOperation>>,
    /// By transaction hash.
    pub receipts: Mutex<HashMap<String, ReceiptStatus>>,
    pub is_away: AtomicBool,
    pub is_chain_away: AtomicBool,
    /// Delay of every answer with the supply.
    pub supply_delay: Mutex<Duration>,
    /// Number of answers with the supply.
    pub supply_reads: AtomicUsize,
    /// Number of answers with operations.
    pub operation_reads: AtomicUsize,
}

impl CfaStub {
    pub fn set_supply(&self, supply: &str, block: u64) {
        *self.supply.lock().unwrap() = supply.into();
        *self.block.lock().unwrap() = block;
    }

    pub fn set_operation(&self, external_ref: &str, status: common::OperationStatus, block: u64) {
        self.change(external_ref, |operation| {
            operation.status = status as i32;
            operation.block_number = block;
        });
    }

    pub fn change(&self, external_ref: &str, change: impl FnOnce(&mut CfaOperation)) {
        let mut operations = self.operations.lock().unwrap();
        change(
            operations
                .entry(external_ref.into())
                .or_insert_with(|| CfaOperation {
                    instrument_id: "CFA-RUB".into(),
                    external_ref: external_ref.into(),
                    ..Default::default()
                }),
        );
    }

    /// Adds a redemption whose tokens are burned by a successful transaction.
    pub fn burn(&self, payout_id: &str, user_id: &str, amount: Option<common::Decimal>) {
        let tx_hash = format!("0x{payout_id}");
        self.change(payout_id, |operation| {
            operation.r#type = common::OperationType::Redemption as i32;
            operation.status = common::OperationStatus::OnchainSubmitted as i32;
            operation.user_id = user_id.into();
            operation.amount = amount;
            operation.onchain_tx_hash.clone_from(&tx_hash);
        });
        let mut receipts = self.receipts.lock().unwrap();
        receipts.insert(tx_hash, ReceiptStatus::Success);
    }
}

/// Settings that a test may change.
pub struct Setup {
    pub payments: PaymentsConfig,
    pub bank: BankConfig,
    pub alerts: AlertSinks,
    pub cfa: Arc<CfaStub>,
    /// Replaces the bank's own address as the target of bank calls.
    pub bank_url: Option<String>,
}

/// Folder of the stores of a world.
pub enum Folder {
    /// Removed on drop.
    Own(TempDir),
    /// Removed by another process.
    Foreign(PathBuf),
}

impl Folder {
    pub fn temporary() -> Arc<Folder> {
        Arc::new(Folder::Own(tempfile::tempdir().unwrap()))
    }

    pub fn path(&self) -> &Path {
        match self {
            Folder::Own(folder) => folder.path(),
            Folder::Foreign(path) => path,
        }
    }
}

pub struct World {
    pub folder: Arc<Folder>,
    pub log: Arc<Embedded>,
    pub cfa: Arc<CfaStub>,
    /// Calls received by identity: `CheckLimits DEPOSIT DEPOSIT alice 100.00`.
    pub identity_calls: Arc<Mutex<Vec<String>>>,
    pub http_url: String,
    pub bank_url: String,
    stop: CancellationToken,
    slots: [LocalSlot; 5],
    handles: Option<(PaymentsHandle, IdentityHandle, BankHandle)>,
    server: Option<JoinHandle<()>>,
}

impl World {
    pub async fn start() -> World {
        World::start_with(|_| ()).await
    }

    pub async fn start_with(change: impl FnOnce(&mut Setup)) -> World {
        let world = World::open(Folder::temporary(), change).await;
        world.create_user(ALICE).await;
        world
    }

    /// Starts all services on the state in a folder.
    pub async fn open(folder: Arc<Folder>, change: impl FnOnce(&mut Setup)) -> World {
        let stop = CancellationToken::new();
        let log = Arc::new(Embedded::open(folder.path().join("log")).await.unwrap());
        let slots: [LocalSlot; 5] = Default::default();
        let auth = Authenticator::Sandbox;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http_url = format!("http://{}", listener.local_addr().unwrap());
        let keys_dir = folder.path().join("keys");

        let cfa = Arc::new(CfaStub::default());
        cfa.set_supply("0", 1);
        let mut setup = Setup {
            payments: PaymentsConfig {
                data_dir: folder.path().join("payments"),
                keys_dir: keys_dir.clone(),
                payout_pause_first_ms: 20,
                payout_pause_most_ms: 200,
                reconcile_pause_ms: 20,
                daily_reconciliation: false,
                ..PaymentsConfig::default()
            },
            bank: BankConfig {
                data_dir: folder.path().join("bank"),
                keys_dir,
                listen: "127.0.0.1:0".parse().unwrap(),
                webhook_url: format!("{http_url}/webhook"),
                ..BankConfig::default()
            },
            alerts: AlertSinks::default(),
            cfa,
            bank_url: None,
        };
        setup.payments.client.retry_pause_ms = 5;
        change(&mut setup);

        let bank = sandbox::bank::start(setup.bank, stop.clone())
            .await
            .unwrap();
        let bank_url = format!("http://{}", bank.address());
        setup.payments.bank_url = setup.bank_url.unwrap_or_else(|| bank_url.clone());
        let identity = sandbox::identity::start(
            IdentityConfig {
                data_dir: folder.path().join("identity"),
                ..IdentityConfig::default()
            },
            IdentityDeps { log: log.clone() },
            stop.clone(),
        )
        .await
        .unwrap();
        let cfa = setup.cfa;
        let identity_calls = Arc::<Mutex<Vec<String>>>::default();
        let payments = payments::start(
            setup.payments,
            PaymentsDeps {
                log: log.clone(),
                identity: Channel::local(&slots[1], "sandbox.service"),
                cfa: Channel::local(&slots[3], "sandbox.service"),
                chain: Channel::local(&slots[4], "sandbox.service"),
                alerts: setup.alerts,
            },
            stop.clone(),
        )
        .await
        .unwrap();
        let recorded = Routes::from(identity.service().routes.into_axum_router().layer(
            axum::middleware::from_fn_with_state(identity_calls.clone(), record),
        ));
        slots[0].fill(rpc::with_auth(payments.service().routes, &auth));
        slots[1].fill(rpc::with_auth(recorded, &auth));
        slots[2].fill(rpc::with_auth(bank.service().routes, &auth));
        slots[3].fill(rpc::with_auth(cfa_routes(cfa.clone()), &auth));
        slots[4].fill(rpc::with_auth(chain_routes(cfa.clone()), &auth));
        let served = rpc::serve(
            listener,
            vec![payments.service()],
            auth,
            rpc::metrics_init(),
            stop.clone(),
        );
        let server = tokio::spawn(async { served.await.unwrap() });
        World {
            folder,
            log,
            cfa,
            identity_calls,
            http_url,
            bank_url,
            stop,
            slots,
            handles: Some((payments, identity, bank)),
            server: Some(server),
        }
    }

    /// Stops all services and returns the folder.
    pub async fn stop(mut self) -> Arc<Folder> {
        self.stop.cancel();
        self.slots.iter().for_each(LocalSlot::clear);
        let server = self.server.take().unwrap();
        let (payments, identity, bank) = self.handles.take().unwrap();
        in_time("the stop of all services", async {
            server.await.unwrap();
            payments.stopped().await;
            identity.stopped().await;
            bank.stopped().await;
            self.log.close().await;
        })
        .await;
        self.folder.clone()
    }

    pub fn payments(&self) -> PaymentsServiceClient<Channel> {
        self.payments_as("sandbox.treasury")
    }

    /// A client with the credential of the platform's services, which alone may initiate, release
    /// and cancel payouts.
    pub fn services(&self) -> PaymentsServiceClient<Channel> {
        self.payments_as("sandbox.service")
    }

    pub fn payments_as(&self, credential: &str) -> PaymentsServiceClient<Channel> {
        PaymentsServiceClient::new(Channel::local(&self.slots[0], credential))
    }

    /// A client as the approvals service, which makes the calls that take two persons.
    pub fn approved(&self) -> PaymentsServiceClient<Channel> {
        self.payments_as(testkit::APPROVED)
    }

    pub async fn audit_records(&self, actor: &str, object_id: &str) -> Vec<AuditRecord> {
        let ask = wire::ListAuditRecordsRequest {
            actor: actor.into(),
            object_id: object_id.into(),
            ..Default::default()
        };
        let listed = self.payments().list_audit_records(ask).await.unwrap();
        listed.into_inner().records
    }

    pub fn identity(&self) -> IdentityServiceClient<Channel> {
        IdentityServiceClient::new(Channel::local(&self.slots[1], "sandbox.operator"))
    }

    /// Identity's client as the approvals service, which makes the calls that take two persons.
    pub fn approved_identity(&self) -> IdentityServiceClient<Channel> {
        IdentityServiceClient::new(Channel::local(&self.slots[1], testkit::APPROVED))
    }

    pub fn bank(&self) -> SandboxBankServiceClient<Channel> {
        SandboxBankServiceClient::new(Channel::local(&self.slots[2], "sandbox.operator"))
    }

    pub async fn create_user(&self, user_id: &str) -> identity::UserProfile {
        let ask = identity::CreateUserRequest {
            context: ctx(),
            user_id: user_id.into(),
            kyc_status: common::KycStatus::Standard as i32,
            bank_account: valid_account(),
            ..Default::default()
        };
        let answer = self.identity().create_user(ask).await.unwrap();
        answer.into_inner().profile.unwrap()
    }

    /// Sets the account directly in identity's store, because identity refuses invalid accounts.
    pub async fn set_account(&self, user_id: &str, bank_account: &str) {
        let file = self.folder.path().join("identity/identity.db");
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(file);
        let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
        let set = sqlx::query("UPDATE users SET bank_account = $1 WHERE user_id = $2");
        let set = set.bind(bank_account).bind(user_id).execute(&pool).await;
        assert_eq!(set.unwrap().rows_affected(), 1);
        pool.close().await;
    }

    /// Cuts the gateway off from identity.
    pub fn cut_identity(&self) {
        self.slots[1].clear();
    }

    pub async fn create_intent(
        &self,
        amount: &str,
        method: wire::PaymentMethod,
    ) -> wire::PaymentIntent {
        let ask = intent_ask(ALICE, amount, method);
        let answer = self.payments().create_payment_intent(ask).await;
        answer.unwrap().into_inner().intent.unwrap()
    }

    pub async fn qr(&self, amount: &str) -> wire::PaymentIntent {
        self.create_intent(amount, wire::PaymentMethod::SbpQr).await
    }

    pub async fn intent(&self, payment_id: &str) -> wire::PaymentIntent {
        let ask = wire::GetPaymentIntentRequest {
            context: None,
            payment_id: payment_id.into(),
        };
        let answer = self.payments().get_payment_intent(ask).await.unwrap();
        answer.into_inner().intent.unwrap()
    }

    pub async fn pay(&self, payload: &str) {
        self.pay_as(payload, None, common::PaymentStatus::Unspecified)
            .await;
    }

    pub async fn pay_as(
        &self,
        payload: &str,
        amount: Option<&str>,
        outcome: common::PaymentStatus,
    ) {
        let ask = sandbox_wire::PayRequest {
            context: ctx(),
            qr_payload: payload.into(),
            amount: amount.and_then(rub),
            outcome: outcome as i32,
        };
        self.bank().pay(ask).await.unwrap();
    }

    pub async fn set_fault(&self, fault: sandbox_wire::BankFault, account: &str) {
        let ask = sandbox_wire::SetFaultRequest {
            context: ctx(),
            fault: fault as i32,
            account: account.into(),
        };
        self.bank().set_fault(ask).await.unwrap();
    }

    pub async fn bank_balance(&self) -> String {
        let ask = sandbox_wire::GetBankBalanceRequest::default();
        let answer = self.bank().get_bank_balance(ask).await.unwrap();
        amount_of(answer.into_inner().balance.as_ref())
    }

    pub async fn transfers(&self) -> Vec<sandbox_wire::BankTransfer> {
        let ask = sandbox_wire::ListTransfersRequest::default();
        self.bank()
            .list_transfers(ask)
            .await
            .unwrap()
            .into_inner()
            .transfers
    }

    /// Records a payout of Alice and sets the account in her profile first.
    pub async fn initiate(
        &self,
        payout_id: &str,
        amount: &str,
        bank_account: &str,
    ) -> wire::Payout {
        self.set_account(ALICE, bank_account).await;
        let recorded = self.try_initiate(payout_id, ALICE, amount, bank_account);
        recorded.await.unwrap()
    }

    pub async fn try_initiate(
        &self,
        payout_id: &str,
        user_id: &str,
        amount: &str,
        bank_account: &str,
    ) -> Result<wire::Payout, Status> {
        let ask = wire::InitiatePayoutRequest {
            context: ctx(),
            payout: Some(wire::PayoutRequest {
                payout_id: payout_id.into(),
                user_id: user_id.into(),
                amount: rub(amount),
                bank_account: bank_account.into(),
            }),
        };
        let answer = self.services().initiate_payout(ask).await?;
        Ok(answer.into_inner().payout.unwrap())
    }

    /// Releases a payout whose tokens are burned.
    pub async fn release(&self, payout_id: &str) -> wire::Payout {
        let payout = self.payout(payout_id).await;
        let amount = payout.amount.unwrap().amount;
        self.cfa.burn(payout_id, &payout.user_id, amount);
        self.try_release(payout_id).await.unwrap()
    }

    pub async fn try_release(&self, payout_id: &str) -> Result<wire::Payout, Status> {
        let ask = wire::ReleasePayoutRequest {
            context: ctx(),
            payout_id: payout_id.into(),
        };
        let answer = self.services().release_payout(ask).await?;
        Ok(answer.into_inner().payout.unwrap())
    }

    pub async fn payout(&self, payout_id: &str) -> wire::Payout {
        let ask = wire::GetPayoutRequest {
            context: None,
            payout_id: payout_id.into(),
        };
        let answer = self.payments().get_payout(ask).await.unwrap();
        answer.into_inner().payout.unwrap()
    }

    pub async fn until_stopped(&self, payout_id: &str, reason: &str) {
        until(async || (self.payout(payout_id).await.stopped_reason == reason).then_some(())).await;
    }

    /// Receipts of a status, the newest first.
    pub async fn receipts(&self, status: wire::ReceiptStatus) -> Vec<wire::Receipt> {
        let ask = wire::ListReceiptsRequest {
            status: status.into(),
            ..Default::default()
        };
        let answer = self.payments().list_receipts(ask).await.unwrap();
        answer.into_inner().receipts
    }

    pub async fn reconcile(&self) -> wire::ReconcileReport {
        let ask = wire::ReconcileRequest {
            context: ctx(),
            business_date: None,
        };
        let answer = self.payments().reconcile(ask).await.unwrap();
        answer.into_inner().report.unwrap()
    }

    /// Funds the bank account by a paid and minted deposit.
    pub async fn fund(&self, amount: &str) -> wire::PaymentIntent {
        let intent = self.qr(amount).await;
        self.pay(&intent.qr_payload).await;
        let intent = self
            .until_status(&intent.payment_id, common::PaymentStatus::Success)
            .await;
        self.cfa
            .set_operation(&intent.payment_id, common::OperationStatus::Finalized, 1);
        intent
    }

    pub async fn until_status(
        &self,
        payment_id: &str,
        status: common::PaymentStatus,
    ) -> wire::PaymentIntent {
        until(async || {
            let intent = self.intent(payment_id).await;
            (intent.status == status as i32).then_some(intent)
        })
        .await
    }

    pub async fn until_payout(
        &self,
        payout_id: &str,
        status: common::PaymentStatus,
    ) -> wire::Payout {
        until(async || {
            let payout = self.payout(payout_id).await;
            (payout.status == status as i32).then_some(payout)
        })
        .await
    }

    /// All payment events so far. A fresh intent marks the end, because the outbox keeps its order.
    pub async fn events(&self) -> Vec<Event> {
        let marker = self
            .create_intent("1.00", wire::PaymentMethod::SbpC2b)
            .await
            .payment_id;
        let group = Uuid::now_v7().to_string();
        let mut subscription = self
            .log
            .subscribe(&group, &[events::topics::PAYMENTS])
            .await
            .unwrap();
        let mut seen = Vec::new();
        loop {
            let delivery = in_time("the marker's event", subscription.next()).await;
            let event = delivery.unwrap().record.event;
            if event.key == marker {
                return seen;
            }
            seen.push(event);
        }
    }

    /// Decoded events of one type and key.
    pub async fn events_of<M: Message + Default>(&self, name: &str, key: &str) -> Vec<M> {
        let events = self.events().await.into_iter();
        let ours = events.filter(|event| event.short_type() == name && event.key == key);
        ours.map(|event| M::decode(event.payload.as_slice()).unwrap())
            .collect()
    }

    /// Posts a body to the webhook, signed with the bank's secret.
    pub async fn post_webhook(&self, webhook_id: &str, body: &str) -> (u16, String) {
        let now_s = service_kit::clock::now_us() / 1_000_000;
        let signature = self.sign(webhook_id, now_s, body);
        self.post_signed(webhook_id, now_s, &signature, body).await
    }

    pub async fn post_signed(
        &self,
        id: &str,
        at_s: i64,
        signature: &str,
        body: &str,
    ) -> (u16, String) {
        let answer = http_client()
            .post(format!("{}/webhook", self.http_url))
            .header("webhook-id", id)
            .header("webhook-timestamp", at_s)
            .header("webhook-signature", signature)
            .body(body.to_owned())
            .send()
            .await
            .unwrap();
        let status = answer.status().as_u16();
        (status, answer.text().await.unwrap())
    }

    pub fn sign(&self, webhook_id: &str, at_s: i64, body: &str) -> String {
        let keys = Keys::load_or_create(&self.folder.path().join("keys")).unwrap();
        keys.webhook_secrets[0].sign(webhook_id, at_s, body.as_bytes())
    }

    pub async fn get(&self, path: &str) -> (u16, serde_json::Value) {
        let answer = http_client()
            .get(format!("{}{path}", self.http_url))
            .bearer_auth("sandbox.auditor")
            .send()
            .await
            .unwrap();
        let status = answer.status().as_u16();
        let body = answer.text().await.unwrap();
        (
            status,
            serde_json::from_str(&body).unwrap_or(serde_json::Value::String(body)),
        )
    }
}

/// Panics if `work` takes longer than [`testkit::PATIENCE`].
pub async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(testkit::PATIENCE, work)
        .await
        .unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// An HTTP client with a timeout.
pub fn http_client() -> reqwest::Client {
    let builder = reqwest::Client::builder().timeout(testkit::PATIENCE);
    builder.build().unwrap()
}

pub fn payment_notice(payment_id: &str, status: &str, amount: &str) -> String {
    format!(
        r#"{{"type":"payment","paymentId":"{payment_id}","status":"{status}",
            "amount":{{"value":"{amount}","currency":"RUB"}},"occurredAt":"2026-11-21T00:00:00Z"}}"#
    )
}

/// A [`payment_notice`] of status SUCCESS with the bank's transaction id.
pub fn money_notice(payment_id: &str, transaction_id: &str, amount: &str) -> String {
    let notice = payment_notice(payment_id, "SUCCESS", amount);
    let named = format!(r#"{{"transactionId":"{transaction_id}","#);
    notice.replacen('{', &named, 1)
}

/// The bank's report of a payout's transfer.
pub fn transfer_notice(transfer_id: &str, payout_id: &str, status: &str, amount: &str) -> String {
    format!(
        r#"{{"type":"transfer","transferId":"{transfer_id}","requestId":"{payout_id}",
            "status":"{status}","amount":{{"value":"{amount}","currency":"RUB"}},
            "occurredAt":"2026-11-21T00:00:00Z"}}"#
    )
}

pub fn intent_ask(
    user_id: &str,
    amount: &str,
    method: wire::PaymentMethod,
) -> wire::CreatePaymentIntentRequest {
    wire::CreatePaymentIntentRequest {
        context: ctx(),
        user_id: user_id.into(),
        amount: rub(amount),
        method: method as i32,
    }
}

/// A context with a fresh key.
pub fn ctx() -> Option<common::RequestContext> {
    ctx_with(&testkit::messages::fresh())
}

pub fn amount_of(money: Option<&common::Money>) -> String {
    money.unwrap().amount.clone().unwrap().value
}

pub fn valid_account() -> String {
    account::number("40817", 7)
}

/// Records the calls to identity in order and passes them on.
async fn record(
    State(identity_calls): State<Arc<Mutex<Vec<String>>>>,
    request: axum::extract::Request,
    next: Next,
) -> axum::response::Response {
    let (parts, body) = request.into_parts();
    let bytes = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let message = bytes.get(5..).unwrap_or_default();
    let line = match parts.uri.path().rsplit('/').next().unwrap() {
        "CheckLimits" => {
            let ask = identity::CheckLimitsRequest::decode(message).unwrap();
            let bare = |name: &'static str, prefix: &str| name.strip_prefix(prefix).unwrap();
            let limit = common::LimitType::try_from(ask.limit_type).unwrap();
            let operation = common::OperationType::try_from(ask.operation_type).unwrap();
            format!(
                "CheckLimits {} {} {} {}",
                bare(limit.as_str_name(), "LIMIT_TYPE_"),
                bare(operation.as_str_name(), "OPERATION_TYPE_"),
                ask.user_id,
                amount_of(ask.amount.as_ref())
            )
        }
        "CheckSanctions" => {
            let ask = identity::CheckSanctionsRequest::decode(message).unwrap();
            format!("CheckSanctions {} {}", ask.user_id, ask.payload)
        }
        other => other.to_owned(),
    };
    identity_calls.lock().unwrap().push(line);
    next.run(axum::extract::Request::from_parts(parts, Body::from(bytes)))
        .await
}

/// The CFA service's two reads that the gateway uses.
fn cfa_routes(stub: Arc<CfaStub>) -> Routes {
    let service = "/dfa.cfa.v1.CfaRegistryService";
    Routes::from(
        Router::new()
            .route(
                &format!("{service}/GetSupply"),
                axum::routing::post(get_supply),
            )
            .route(
                &format!("{service}/ListOperations"),
                axum::routing::post(list_operations),
            )
            .with_state(stub),
    )
}

type Raw = http::Request<Body>;

async fn get_supply(
    State(stub): State<Arc<CfaStub>>,
    request: Raw,
) -> http::Response<tonic::body::Body> {
    let codec = tonic_prost::ProstCodec::<GetSupplyResponse, GetSupplyRequest>::default();
    let answer = tower::service_fn(|request: Request<GetSupplyRequest>| {
        let instrument_id = request.into_inner().instrument_id;
        stub.supply_reads.fetch_add(1, Ordering::SeqCst);
        let supply = GetSupplyResponse {
            instrument_id,
            total_supply: Some(common::Decimal {
                value: stub.supply.lock().unwrap().clone(),
            }),
            block_number: *stub.block.lock().unwrap(),
        };
        let delay = *stub.supply_delay.lock().unwrap();
        async move {
            tokio::time::sleep(delay).await;
            Ok::<_, Status>(Response::new(supply))
        }
    });
    tonic::server::Grpc::new(codec).unary(answer, request).await
}

async fn list_operations(
    State(stub): State<Arc<CfaStub>>,
    request: Raw,
) -> http::Response<tonic::body::Body> {
    let codec = tonic_prost::ProstCodec::<ListOperationsResponse, ListOperationsRequest>::default();
    let answer = tower::service_fn(|request: Request<ListOperationsRequest>| {
        let ask = request.into_inner();
        stub.operation_reads.fetch_add(1, Ordering::SeqCst);
        let operations = stub.operations.lock().unwrap();
        let known = operations.get(&ask.external_ref).cloned();
        let fits = |operation: &CfaOperation| {
            ask.r#type == 0 || operation.r#type == 0 || operation.r#type == ask.r#type
        };
        let page = ListOperationsResponse {
            operations: known.into_iter().filter(fits).collect(),
            pagination: None,
        };
        let is_away = stub.is_away.load(Ordering::SeqCst);
        async move { unless(is_away, page) }
    });
    tonic::server::Grpc::new(codec).unary(answer, request).await
}

/// The chain connector's read that the gateway uses.
fn chain_routes(stub: Arc<CfaStub>) -> Routes {
    let path = "/dfa.chain.v1.ChainConnectorService/GetTransactionReceipt";
    Routes::from(
        Router::new()
            .route(path, axum::routing::post(get_receipt))
            .with_state(stub),
    )
}

async fn get_receipt(
    State(stub): State<Arc<CfaStub>>,
    request: Raw,
) -> http::Response<tonic::body::Body> {
    let codec = tonic_prost::ProstCodec::<
        GetTransactionReceiptResponse,
        GetTransactionReceiptRequest,
    >::default();
    let answer = tower::service_fn(|request: Request<GetTransactionReceiptRequest>| {
        let tx_hash = request.into_inner().tx_hash;
        let status = stub.receipts.lock().unwrap().get(&tx_hash).copied();
        let receipt = status.map(|status| TransactionReceipt {
            tx_hash,
            status: status as i32,
            ..Default::default()
        });
        let is_away = stub.is_chain_away.load(Ordering::SeqCst);
        async move { unless(is_away, GetTransactionReceiptResponse { receipt }) }
    });
    tonic::server::Grpc::new(codec).unary(answer, request).await
}

fn unless<T>(is_away: bool, answer: T) -> Result<Response<T>, Status> {
    if is_away {
        return Err(Status::unavailable("away"));
    }
    Ok(Response::new(answer))
}
