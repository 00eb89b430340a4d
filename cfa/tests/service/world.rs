//! The service in its world: real chain, real ledger, real event log; identity and payments are
//! doubles that write down what they were asked, in one trail with each other.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cfa::{CfaConfig, CfaDeps, CfaHandle, Clock};
use chain::{ChainConfig, ChainDeps, ChainHandle, Connector, TxHash, start_chain};
use events::{Event, Log};
use prost::Message;
use proto::cfa::v1 as pb;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1 as common;
use proto::identity::v1 as identity;
use proto::ledger::v1 as ledger_pb;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::market::v1 as market;
use proto::payments::v1 as payments;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::losing::Losing;

pub use testkit::messages::{amount, context, decimal, rubles as roubles};

pub const WAIT: Duration = Duration::from_secs(30);

#[derive(Default)]
pub struct Outside {
    /// What identity and payments were asked, in order.
    pub trail: Vec<String>,
    pub unknown_users: HashSet<String>,
    pub low_kyc: HashSet<String>,
    pub sanctioned: HashSet<String>,
    pub blocked: HashSet<String>,
    pub limit_refusal: Option<String>,
    pub payments_away: bool,
    /// Payments refuses to release payouts.
    pub release_refused: bool,
    pub intents: HashMap<String, payments::PaymentIntent>,
    pub payouts: HashMap<String, payments::Payout>,
    /// The trading hold that the market tells of; its money comes back through `ledger`.
    pub trading_hold: Option<market::TradingHold>,
    pub market_away: bool,
    pub ledger: Option<LedgerServiceClient<rpc::Channel>>,
}

#[derive(Clone, Default)]
pub struct Double(pub Arc<Mutex<Outside>>);

impl Double {
    pub fn with<T>(&self, act: impl FnOnce(&mut Outside) -> T) -> T {
        act(&mut self.0.lock().expect("no test panics with the lock"))
    }

    pub fn trail(&self) -> Vec<String> {
        self.with(|outside| outside.trail.clone())
    }

    /// A deposit that the bank reported as paid.
    pub fn paid(&self, payment_id: &str, user_id: &str, amount: &str) {
        let intent = payments::PaymentIntent {
            payment_id: payment_id.to_owned(),
            user_id: user_id.to_owned(),
            amount: roubles(amount),
            status: common::PaymentStatus::Success.into(),
            ..Default::default()
        };
        self.with(|outside| outside.intents.insert(payment_id.to_owned(), intent));
    }

    /// What the bank says about a payout.
    pub fn payout_becomes(&self, payout_id: &str, status: common::PaymentStatus) {
        self.with(|outside| {
            outside
                .payouts
                .get_mut(payout_id)
                .expect("payout is there")
                .status = status.into()
        });
    }
}

#[tonic::async_trait]
impl identity::identity_service_server::IdentityService for Double {
    async fn get_user_profile(
        &self,
        request: Request<identity::GetUserProfileRequest>,
    ) -> Result<Response<identity::GetUserProfileResponse>, Status> {
        let user_id = request.into_inner().user_id;
        self.with(|outside| {
            outside.trail.push(format!("profile {user_id}"));
            if outside.unknown_users.contains(&user_id) {
                return Err(rpc::status::not_found("USER_NOT_FOUND", "User not found"));
            }
            let status = if outside.blocked.contains(&user_id) {
                identity::UserStatus::Blocked
            } else {
                identity::UserStatus::Active
            };
            let kyc = if outside.low_kyc.contains(&user_id) {
                common::KycStatus::Simplified
            } else {
                common::KycStatus::Standard
            };
            Ok(Response::new(identity::GetUserProfileResponse {
                profile: Some(identity::UserProfile {
                    bank_account: format!("account of {user_id}"),
                    kyc_status: kyc.into(),
                    status: status.into(),
                    user_id,
                    ..Default::default()
                }),
            }))
        })
    }

    async fn check_limits(
        &self,
        request: Request<identity::CheckLimitsRequest>,
    ) -> Result<Response<identity::CheckLimitsResponse>, Status> {
        let request = request.into_inner();
        self.with(|outside| {
            let amount = request
                .amount
                .clone()
                .unwrap_or_default()
                .amount
                .unwrap_or_default()
                .value;
            outside.trail.push(format!(
                "limits {} {} {amount} {}",
                request.user_id,
                request
                    .limit_type()
                    .as_str_name()
                    .trim_start_matches("LIMIT_TYPE_"),
                request
                    .operation_type()
                    .as_str_name()
                    .trim_start_matches("OPERATION_TYPE_"),
            ));
            let is_blocked = outside.blocked.contains(&request.user_id);
            let reason = if is_blocked {
                Some("User is blocked".to_owned())
            } else {
                outside.limit_refusal.clone()
            };
            Ok(Response::new(identity::CheckLimitsResponse {
                allowed: reason.is_none(),
                reason,
                remaining: None,
            }))
        })
    }

    async fn check_sanctions(
        &self,
        request: Request<identity::CheckSanctionsRequest>,
    ) -> Result<Response<identity::CheckSanctionsResponse>, Status> {
        let user_id = request.into_inner().user_id;
        self.with(|outside| {
            outside.trail.push(format!("sanctions {user_id}"));
            Ok(Response::new(identity::CheckSanctionsResponse {
                hit: outside.sanctioned.contains(&user_id),
                reason: "on the list".into(),
            }))
        })
    }

    testkit::unanswered! {
        list_users: identity::ListUsersRequest => identity::ListUsersResponse,
        get_limits: identity::GetLimitsRequest => identity::GetLimitsResponse,
        create_user: identity::CreateUserRequest => identity::CreateUserResponse,
        update_user: identity::UpdateUserRequest => identity::UpdateUserResponse,
        set_limit: identity::SetLimitRequest => identity::SetLimitResponse,
        block_user: identity::BlockUserRequest => identity::BlockUserResponse,
        unblock_user: identity::UnblockUserRequest => identity::UnblockUserResponse,
    }
}

impl Double {
    fn payout(
        &self,
        what: &str,
        payout_id: &str,
        act: impl FnOnce(&mut payments::Payout),
    ) -> Result<payments::Payout, Status> {
        self.with(|outside| {
            if outside.payments_away {
                return Err(rpc::status::unavailable("Payments service", 100));
            }
            outside.trail.push(format!("{what} {payout_id}"));
            let payout = outside
                .payouts
                .get_mut(payout_id)
                .ok_or_else(|| rpc::status::not_found("PAYOUT_NOT_FOUND", "Payout not found"))?;
            act(payout);
            Ok(payout.clone())
        })
    }
}

#[tonic::async_trait]
impl payments::payments_service_server::PaymentsService for Double {
    async fn initiate_payout(
        &self,
        request: Request<payments::InitiatePayoutRequest>,
    ) -> Result<Response<payments::InitiatePayoutResponse>, Status> {
        let asked = request.into_inner().payout.expect("a payout");
        self.with(|outside| {
            if outside.payments_away {
                return Err(rpc::status::unavailable("Payments service", 100));
            }
            let amount = asked
                .amount
                .clone()
                .unwrap_or_default()
                .amount
                .unwrap_or_default()
                .value;
            outside.trail.push(format!(
                "initiate {} {} {amount} {}",
                asked.payout_id, asked.user_id, asked.bank_account
            ));
            let payout =
                outside
                    .payouts
                    .entry(asked.payout_id.clone())
                    .or_insert(payments::Payout {
                        payout_id: asked.payout_id,
                        user_id: asked.user_id,
                        amount: asked.amount,
                        bank_account: asked.bank_account,
                        status: common::PaymentStatus::Pending.into(),
                        ..Default::default()
                    });
            Ok(Response::new(payments::InitiatePayoutResponse {
                payout: Some(payout.clone()),
            }))
        })
    }

    async fn release_payout(
        &self,
        request: Request<payments::ReleasePayoutRequest>,
    ) -> Result<Response<payments::ReleasePayoutResponse>, Status> {
        if self.with(|outside| outside.release_refused) {
            return Err(rpc::status::failed_precondition(
                "NOT_BURNED",
                "No tokens of this user and amount were burned for this payout",
            ));
        }
        let payout = self.payout("release", &request.into_inner().payout_id, |payout| {
            payout.sent = true
        })?;
        Ok(Response::new(payments::ReleasePayoutResponse {
            payout: Some(payout),
        }))
    }

    async fn cancel_payout(
        &self,
        request: Request<payments::CancelPayoutRequest>,
    ) -> Result<Response<payments::CancelPayoutResponse>, Status> {
        let request = request.into_inner();
        let payout = self.payout("cancel", &request.payout_id, |payout| {
            payout.status = common::PaymentStatus::Failed.into();
            payout.failure_code = request.failure_code;
        })?;
        Ok(Response::new(payments::CancelPayoutResponse {
            payout: Some(payout),
        }))
    }

    async fn get_payout(
        &self,
        request: Request<payments::GetPayoutRequest>,
    ) -> Result<Response<payments::GetPayoutResponse>, Status> {
        let payout = self.payout("ask", &request.into_inner().payout_id, |_| {})?;
        Ok(Response::new(payments::GetPayoutResponse {
            payout: Some(payout),
        }))
    }

    async fn get_payment_intent(
        &self,
        request: Request<payments::GetPaymentIntentRequest>,
    ) -> Result<Response<payments::GetPaymentIntentResponse>, Status> {
        let payment_id = request.into_inner().payment_id;
        self.with(|outside| {
            if outside.payments_away {
                return Err(rpc::status::unavailable("Payments service", 100));
            }
            let intent = outside.intents.get(&payment_id).cloned();
            let intent = intent
                .ok_or_else(|| rpc::status::not_found("PAYMENT_NOT_FOUND", "Payment not found"))?;
            Ok(Response::new(payments::GetPaymentIntentResponse {
                intent: Some(intent),
            }))
        })
    }

    testkit::unanswered! {
        create_payment_intent: payments::CreatePaymentIntentRequest => payments::CreatePaymentIntentResponse,
        list_payment_intents: payments::ListPaymentIntentsRequest => payments::ListPaymentIntentsResponse,
        handle_payment_webhook: payments::HandlePaymentWebhookRequest => payments::HandlePaymentWebhookResponse,
        list_payouts: payments::ListPayoutsRequest => payments::ListPayoutsResponse,
        reconcile: payments::ReconcileRequest => payments::ReconcileResponse,
        get_latest_report: payments::GetLatestReportRequest => payments::GetLatestReportResponse,
    }
}

#[tonic::async_trait]
impl market::market_service_server::MarketService for Double {
    async fn list_trading_holds(
        &self,
        request: Request<market::ListTradingHoldsRequest>,
    ) -> Result<Response<market::ListTradingHoldsResponse>, Status> {
        let user_id = request.into_inner().user_id;
        self.with(|outside| {
            if outside.market_away {
                return Err(rpc::status::unavailable("Market", 100));
            }
            outside.trail.push(format!("trading holds {user_id}"));
            Ok(Response::new(market::ListTradingHoldsResponse {
                trading_holds: outside.trading_hold.clone().into_iter().collect(),
                pagination: None,
            }))
        })
    }

    /// As the market: answers first, the ledger follows.
    async fn adjust_trading_hold(
        &self,
        request: Request<market::AdjustTradingHoldRequest>,
    ) -> Result<Response<market::AdjustTradingHoldResponse>, Status> {
        let request = request.into_inner();
        let undrawn = request.undrawn.unwrap_or_default().value;
        let (hold, ledger) = self.with(|outside| {
            outside
                .trail
                .push(format!("adjust {} {undrawn}", request.hold_id));
            let hold = outside.trading_hold.as_mut().expect("a trading hold");
            hold.undrawn = decimal(&undrawn);
            (hold.clone(), outside.ledger.clone())
        });
        let drawn = hold.drawn.clone().unwrap_or_default().value;
        let number = |text: &str| text.parse::<types::Decimal>().expect("number");
        let rest = number(&undrawn).checked_add(number(&drawn)).expect("sum");
        let mut ledger = ledger.expect("a ledger");
        tokio::spawn(async move {
            let request = ledger_pb::AdjustHoldRequest {
                context: context(&key()),
                hold_id: request.hold_id,
                remaining_amount: amount("CFA-RUB", &rest.to_string()),
            };
            ledger.adjust_hold(request).await.expect("adjusted");
        });
        Ok(Response::new(market::AdjustTradingHoldResponse {
            trading_hold: Some(hold),
        }))
    }

    testkit::unanswered! {
        place_order: market::PlaceOrderRequest => market::PlaceOrderResponse,
        cancel_order: market::CancelOrderRequest => market::CancelOrderResponse,
        amend_order: market::AmendOrderRequest => market::AmendOrderResponse,
        mass_cancel: market::MassCancelRequest => market::MassCancelResponse,
        get_order: market::GetOrderRequest => market::GetOrderResponse,
        list_orders: market::ListOrdersRequest => market::ListOrdersResponse,
        get_trade: market::GetTradeRequest => market::GetTradeResponse,
        list_trades: market::ListTradesRequest => market::ListTradesResponse,
        get_order_book: market::GetOrderBookRequest => market::GetOrderBookResponse,
        open_trading_hold: market::OpenTradingHoldRequest => market::OpenTradingHoldResponse,
        close_trading_hold: market::CloseTradingHoldRequest => market::CloseTradingHoldResponse,
        set_trading_phase: market::SetTradingPhaseRequest => market::SetTradingPhaseResponse,
        set_kill_switch: market::SetKillSwitchRequest => market::SetKillSwitchResponse,
        get_market_status: market::GetMarketStatusRequest => market::GetMarketStatusResponse,
    }
}

pub struct World {
    pub double: Double,
    pub log: Arc<events::Embedded>,
    /// The log as this service writes to it.
    pub losing: Arc<Losing>,
    pub chain: ChainHandle,
    pub ledger: LedgerServiceClient<rpc::Channel>,
    pub cfa: CfaRegistryServiceClient<rpc::Channel>,
    pub clock: Clock,
    pub slot: rpc::LocalSlot,
    pub service: rpc::Service,
    handle: CfaHandle,
    ledger_handle: ledger::LedgerHandle,
    services: CancellationToken,
    below: CancellationToken,
    ledger_events: events::Subscription,
}

impl World {
    /// On a chain inside the process.
    pub async fn start(folder: &Path) -> Self {
        Self::start_on(folder, None).await
    }

    /// On a node at the address, if one is given.
    pub async fn start_on(folder: &Path, rpc_url: Option<String>) -> Self {
        let log = Arc::new(
            events::Embedded::open(folder.join("log"))
                .await
                .expect("log"),
        );
        let below = CancellationToken::new();
        let services = CancellationToken::new();
        let chain_config = ChainConfig {
            data_dir: folder.join("chain"),
            seal_interval_ms: 1,
            poll_interval_ms: 5,
            rpc_url,
            ..ChainConfig::default()
        };
        let chain = start_chain(chain_config, ChainDeps { log: log.clone() }, below.clone())
            .await
            .expect("chain");
        let ledger_config = ledger::LedgerConfig {
            data_dir: folder.join("ledger"),
            reconcile_after_ms: 50,
            ..Default::default()
        };
        let [ledger_slot, payments_slot, identity_slot, market_slot, slot] =
            std::array::from_fn(|_| rpc::LocalSlot::new());
        let channel = |slot: &rpc::LocalSlot| rpc::Channel::local(slot, "sandbox.service");
        let ledger_handle = ledger::start(
            ledger_config,
            ledger::LedgerDeps::new(log.clone(), channel(&slot)),
            services.clone(),
        )
        .await
        .expect("ledger");
        let double = Double::default();
        let auth = rpc::Authenticator::Sandbox;
        ledger_slot.fill(rpc::with_auth(ledger_handle.service().routes, &auth));
        let payments =
            payments::payments_service_server::PaymentsServiceServer::new(double.clone());
        payments_slot.fill(rpc::with_auth(tonic::service::Routes::new(payments), &auth));
        let identity =
            identity::identity_service_server::IdentityServiceServer::new(double.clone());
        identity_slot.fill(rpc::with_auth(tonic::service::Routes::new(identity), &auth));
        let market = market::market_service_server::MarketServiceServer::new(double.clone());
        market_slot.fill(rpc::with_auth(tonic::service::Routes::new(market), &auth));
        let clock = Clock::manual(1_800_000_000_000_000);
        let losing = Arc::new(Losing::new(log.clone()));
        let deps = CfaDeps {
            log: losing.clone(),
            ledger: channel(&ledger_slot),
            payments: channel(&payments_slot),
            identity: channel(&identity_slot),
            market: channel(&market_slot),
            chain: chain.connector(),
            clock: clock.clone(),
        };
        // sweeps run when a test says so
        let config = CfaConfig {
            data_dir: folder.join("cfa"),
            sweep_interval_ms: 3_600_000,
            submit_attempts_max: 3,
            ..CfaConfig::default()
        };
        let handle = cfa::start(config, deps, services.clone())
            .await
            .expect("cfa");
        slot.fill(rpc::with_auth(handle.service().routes, &auth));
        double.with(|outside| {
            outside.ledger = Some(LedgerServiceClient::new(channel(&ledger_slot)));
        });
        let ledger_events = log
            .subscribe("test-ledger", &[events::topics::LEDGER])
            .await
            .expect("subscription");
        Self {
            ledger: LedgerServiceClient::new(channel(&ledger_slot)),
            cfa: CfaRegistryServiceClient::new(channel(&slot)),
            service: handle.service(),
            double,
            log,
            losing,
            chain,
            clock,
            slot,
            handle,
            ledger_handle,
            services,
            below,
            ledger_events,
        }
    }

    pub async fn stop(self) {
        self.services.cancel();
        self.handle.stopped().await;
        self.ledger_handle.stopped().await;
        self.below.cancel();
        self.chain.stopped().await;
    }

    /// Stops the chain alone: what is submitted from now on is in no block.
    pub async fn stop_sealing(&self) {
        self.below.cancel();
    }

    /// The service as somebody else sees it.
    pub fn as_caller(&self, credential: &str) -> CfaRegistryServiceClient<rpc::Channel> {
        CfaRegistryServiceClient::new(rpc::Channel::local(&self.slot, credential))
    }

    /// Sets the service's clock this far before the time of the blocks that are sealed now.
    pub fn turn_back_us(&self, by_us: i64) {
        let now_us = Clock::System.now_us();
        self.clock.advance_us(now_us - by_us - self.clock.now_us());
    }

    pub fn connector(&self) -> Connector {
        self.chain.connector()
    }

    pub async fn sweep(&self) {
        self.handle.sweep().await.expect("sweep");
    }

    /// Waits for the receipt of an operation's transaction and lets the service look at it.
    pub async fn settle(&mut self, operation: &pb::CfaOperation) -> pb::CfaOperation {
        self.receipt(&operation.onchain_tx_hash).await;
        let request = pb::FinalizeIssuanceRequest {
            context: context(&key()),
            tx_hash: operation.onchain_tx_hash.clone(),
        };
        self.cfa
            .finalize_issuance(request)
            .await
            .expect("finalized")
            .into_inner()
            .operation
            .expect("operation")
    }

    pub async fn receipt(&self, tx_hash: &str) -> chain::Receipt {
        let hash: TxHash = tx_hash.parse().expect("hash");
        self.connector()
            .wait_receipt(&hash, WAIT)
            .await
            .expect("asked")
            .expect("in a block")
    }

    pub async fn operation(&mut self, operation_id: &str) -> pb::CfaOperation {
        let request = pb::GetOperationRequest {
            context: None,
            operation_id: operation_id.to_owned(),
        };
        self.cfa
            .get_operation(request)
            .await
            .expect("found")
            .into_inner()
            .operation
            .expect("operation")
    }

    /// Deposit by RPC, through to the ledger.
    pub async fn deposit(&mut self, user_id: &str, amount: &str) -> pb::CfaOperation {
        let before = self.balance(&format!("{user_id}:CFA-RUB")).await.balance;
        let request = pb::IssueCfaRubRequest {
            context: context(&key()),
            user_id: user_id.to_owned(),
            amount: roubles(amount),
            payment_id: key(),
        };
        let operation = self
            .cfa
            .issue_cfa_rub(request)
            .await
            .expect("issued")
            .into_inner()
            .operation
            .expect("operation");
        let operation = self.settle(&operation).await;
        let sum = before
            .checked_add(amount.parse().expect("number"))
            .expect("sum");
        self.balance_becomes(&format!("{user_id}:CFA-RUB"), &sum.to_string())
            .await;
        operation
    }

    pub async fn balance(&mut self, subaccount_id: &str) -> Balance {
        let request = ledger_pb::GetBalanceRequest {
            context: None,
            subaccount_id: subaccount_id.to_owned(),
            ..Default::default()
        };
        let number = |value: Option<common::Decimal>| {
            value.unwrap_or_default().value.parse().unwrap_or_default()
        };
        match self.ledger.get_balance(request).await {
            Ok(response) => {
                let response = response.into_inner();
                Balance {
                    balance: number(response.balance),
                    held: number(response.held),
                    available: number(response.available),
                }
            }
            Err(status) if status.code() == tonic::Code::NotFound => Balance::default(),
            Err(status) => panic!("{status}"),
        }
    }

    /// Debit, credit and amount of each posting of an operation in the ledger.
    pub async fn postings(&mut self, operation_id: &str) -> Vec<(String, String, String)> {
        let request = ledger_pb::GetOperationRequest {
            operation_id: operation_id.to_owned(),
            ..Default::default()
        };
        let answer = self.ledger.get_operation(request).await.expect("operation");
        let postings = answer.into_inner().postings.into_iter();
        postings
            .map(|posting| {
                let amount = posting.amount.and_then(|amount| amount.amount);
                let value = amount.unwrap_or_default().value;
                (
                    posting.debit_subaccount_id,
                    posting.credit_subaccount_id,
                    value,
                )
            })
            .collect()
    }

    /// Follows the ledger's events until the balance is this.
    pub async fn balance_becomes(&mut self, subaccount_id: &str, wanted: &str) {
        let wanted: types::Decimal = wanted.parse().expect("number");
        loop {
            let now = self.balance(subaccount_id).await.balance;
            if now == wanted {
                return;
            }
            let next = tokio::time::timeout(WAIT, self.ledger_events.next()).await;
            let delivery = next
                .unwrap_or_else(|_| panic!("{subaccount_id} has {now}, not {wanted}"))
                .expect("event");
            self.ledger_events
                .commit(&delivery.position)
                .await
                .expect("committed");
        }
    }

    /// On chain, in smallest units.
    pub async fn tokens(&mut self, instrument_id: &str, user_id: &str) -> u128 {
        let token = self
            .instrument(instrument_id)
            .await
            .smart_contract_address
            .parse()
            .expect("address");
        self.connector()
            .balance_of(&token, &chain::Address::of_user(user_id))
            .await
            .expect("read")
    }

    pub async fn supply(&mut self, instrument_id: &str) -> String {
        let request = pb::GetSupplyRequest {
            context: None,
            instrument_id: instrument_id.to_owned(),
        };
        self.cfa
            .get_supply(request)
            .await
            .expect("supply")
            .into_inner()
            .total_supply
            .expect("number")
            .value
    }

    pub async fn instrument(&mut self, instrument_id: &str) -> pb::Instrument {
        let request = pb::GetInstrumentRequest {
            context: None,
            instrument_id: instrument_id.to_owned(),
        };
        self.cfa
            .get_instrument(request)
            .await
            .expect("found")
            .into_inner()
            .instrument
            .expect("instrument")
    }

    pub async fn register(
        &mut self,
        change: impl FnOnce(&mut pb::RegisterInstrumentRequest),
    ) -> Result<pb::Instrument, Status> {
        let mut request = bond("BOND-1");
        change(&mut request);
        Ok(self
            .cfa
            .register_instrument(request)
            .await?
            .into_inner()
            .instrument
            .expect("instrument"))
    }

    /// Issues units without payment, through to finality.
    pub async fn issue(
        &mut self,
        instrument_id: &str,
        investor_id: &str,
        amount: &str,
    ) -> pb::CfaOperation {
        let request = issue_request(instrument_id, investor_id, amount, None);
        let operation = self
            .cfa
            .issue_investment_cfa(request)
            .await
            .expect("issued")
            .into_inner()
            .operation
            .expect("operation");
        let operation = self.settle(&operation).await;
        assert_eq!(
            operation.status(),
            common::OperationStatus::Finalized,
            "{operation:?}"
        );
        operation
    }

    pub async fn holders(&mut self, instrument_id: &str) -> Vec<(String, String)> {
        let request = pb::ListHoldersRequest {
            context: None,
            instrument_id: instrument_id.to_owned(),
            ..Default::default()
        };
        let holders = self
            .cfa
            .list_holders(request)
            .await
            .expect("listed")
            .into_inner()
            .holders;
        let mut holders: Vec<_> = holders
            .into_iter()
            .map(|holder| (holder.user_id, holder.balance.unwrap_or_default().value))
            .collect();
        holders.sort();
        holders
    }

    /// Everything published so far on a topic, through the end of the named event.
    pub async fn events_until(&self, topic: &str, last: impl Fn(&Event) -> bool) -> Vec<Event> {
        let mut subscription = self
            .log
            .subscribe(&format!("test-{}", key()), &[topic])
            .await
            .expect("subscription");
        let mut seen = Vec::new();
        loop {
            let delivery = tokio::time::timeout(WAIT, subscription.next())
                .await
                .expect("the event comes")
                .expect("event");
            let event = delivery.record.event;
            let found = last(&event);
            seen.push(event);
            if found {
                return seen;
            }
        }
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Balance {
    pub balance: types::Decimal,
    pub held: types::Decimal,
    pub available: types::Decimal,
}

/// Changes the service's store as a crash or time would have left it.
pub async fn alter_store(folder: &Path, statement: &'static str) {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.join("cfa/cfa.sqlite"));
    let pool = sqlx::SqlitePool::connect_with(options)
        .await
        .expect("store");
    let done = sqlx::query(statement).execute(&pool).await.expect("done");
    assert!(done.rows_affected() > 0);
    pool.close().await;
}

/// A fresh key.
pub fn key() -> String {
    uuid::Uuid::now_v7().to_string()
}

pub fn bond(symbol: &str) -> pb::RegisterInstrumentRequest {
    pb::RegisterInstrumentRequest {
        context: context(&key()),
        symbol: symbol.into(),
        name: "A bond".into(),
        r#type: common::InstrumentType::CfaBond.into(),
        decimals: 0,
        issuer_id: "issuer".into(),
        currency_code: "RUB".into(),
        nominal: decimal("1000"),
        ..Default::default()
    }
}

pub fn issue_request(
    instrument_id: &str,
    investor_id: &str,
    units: &str,
    payment: Option<&str>,
) -> pb::IssueInvestmentCfaRequest {
    pb::IssueInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: instrument_id.into(),
        investor_id: investor_id.into(),
        amount: amount(instrument_id, units),
        bookbuilding_id: "book-1".into(),
        payment: payment.and_then(|payment| amount("CFA-RUB", payment)),
    }
}

pub fn event<M: Message>(topic: &str, key: &str, type_name: &str, message: &M) -> Event {
    Event {
        id: uuid::Uuid::now_v7(),
        topic: topic.into(),
        key: key.into(),
        type_name: type_name.into(),
        subject: key.into(),
        source: "test".into(),
        correlation_id: format!("correlation of {key}"),
        occurred_at_us: 1,
        payload: message.encode_to_vec(),
    }
}

/// Calls a function without arguments of a contract as its owner, e.g. `pause()`.
pub async fn call_contract(world: &mut World, instrument_id: &str, signature: &str) {
    let token = world.instrument(instrument_id).await.smart_contract_address;
    let hash = chain::keccak256(signature.as_bytes());
    let data = hex::decode(&hash[2..10]).expect("hex");
    let call = chain::contracts::Call {
        to: Some(token.parse().expect("address")),
        data,
        gas_limit: Some(200_000),
    };
    let connector = world.connector();
    let submitted = connector.submit(&key(), &call).await.expect("submitted");
    let receipt = connector
        .wait_receipt(&submitted.tx_hash, WAIT)
        .await
        .expect("asked")
        .expect("in a block");
    assert_eq!(receipt.status, chain::ReceiptStatus::Success);
}

pub fn reason(status: &Status) -> String {
    rpc::status::reason(status).unwrap_or_default()
}
