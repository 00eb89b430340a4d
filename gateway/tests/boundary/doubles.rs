//! Doubles of the services around the market: identity remembers every question, the registry lists what a test
//! registers and settles every trade.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use events::Log;
use proto::cfa::v1::cfa_registry_service_server::{CfaRegistryService, CfaRegistryServiceServer};
use proto::cfa::v1::*;
use proto::common::v1::{KycStatus, LimitType, Money};
use proto::convert::to_money;
use proto::identity::v1::identity_service_server::{IdentityService, IdentityServiceServer};
use proto::identity::v1::*;
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// A question to identity, in its order.
#[derive(Clone, Debug, PartialEq)]
pub enum Asked {
    Profile(String),
    Limits(CheckLimitsRequest),
}

pub struct Person {
    pub kyc: KycStatus,
    pub status: UserStatus,
    /// Left of the day's TRADING limit, in kopecks.
    pub trading_minor: i64,
    /// Every CheckLimits is refused with this.
    pub refuse_with: Option<String>,
}

impl Default for Person {
    fn default() -> Self {
        Self {
            kyc: KycStatus::Standard,
            status: UserStatus::Active,
            trading_minor: 1_000_000_000_000,
            refuse_with: None,
        }
    }
}

/// Identity: everybody it was not told about does not exist.
#[derive(Default)]
pub struct Identity {
    pub people: Mutex<HashMap<String, Person>>,
    pub asked: Mutex<Vec<Asked>>,
}

impl Identity {
    pub fn change(&self, user_id: &str, change: impl FnOnce(&mut Person)) {
        change(
            self.people
                .lock()
                .unwrap()
                .entry(user_id.to_owned())
                .or_default(),
        );
    }

    /// The limit questions since the last call.
    pub fn limit_questions(&self) -> Vec<CheckLimitsRequest> {
        let asked = std::mem::take(&mut *self.asked.lock().unwrap());
        let limits = asked.into_iter().filter_map(|asked| match asked {
            Asked::Limits(request) => Some(request),
            Asked::Profile(_) => None,
        });
        limits.collect()
    }

    pub fn routes(self: &Arc<Self>) -> Routes {
        Routes::new(IdentityServiceServer::new(IdentityApi(self.clone())))
    }
}

struct IdentityApi(Arc<Identity>);

#[tonic::async_trait]
impl IdentityService for IdentityApi {
    async fn get_user_profile(
        &self,
        request: Request<GetUserProfileRequest>,
    ) -> Result<Response<GetUserProfileResponse>, Status> {
        let user_id = request.into_inner().user_id;
        let people = self.0.people.lock().unwrap();
        let person = people
            .get(&user_id)
            .ok_or_else(|| rpc::status::not_found("USER_NOT_FOUND", "User not found"))?;
        self.0
            .asked
            .lock()
            .unwrap()
            .push(Asked::Profile(user_id.clone()));
        Ok(Response::new(GetUserProfileResponse {
            profile: Some(UserProfile {
                user_id,
                kyc_status: person.kyc.into(),
                status: person.status.into(),
                ..UserProfile::default()
            }),
        }))
    }

    async fn check_limits(
        &self,
        request: Request<CheckLimitsRequest>,
    ) -> Result<Response<CheckLimitsResponse>, Status> {
        let request = request.into_inner();
        let people = self.0.people.lock().unwrap();
        let refuse_with = people
            .get(&request.user_id)
            .and_then(|person| person.refuse_with.clone());
        self.0.asked.lock().unwrap().push(Asked::Limits(request));
        Ok(Response::new(CheckLimitsResponse {
            allowed: refuse_with.is_none(),
            reason: refuse_with,
            remaining: None,
        }))
    }

    async fn get_limits(
        &self,
        request: Request<GetLimitsRequest>,
    ) -> Result<Response<GetLimitsResponse>, Status> {
        let user_id = request.into_inner().user_id;
        let people = self.0.people.lock().unwrap();
        let left = people
            .get(&user_id)
            .map_or(0, |person| person.trading_minor);
        let limit = |amount: i64| -> Option<Money> { Some(to_money(amount)) };
        Ok(Response::new(GetLimitsResponse {
            user_id,
            limits: vec![LimitUse {
                limit_type: LimitType::Trading.into(),
                daily_limit: limit(left + 500),
                used_today: limit(500),
            }],
        }))
    }

    testkit::unanswered!(
        list_users: ListUsersRequest => ListUsersResponse,
        check_sanctions: CheckSanctionsRequest => CheckSanctionsResponse,
        create_user: CreateUserRequest => CreateUserResponse,
        update_user: UpdateUserRequest => UpdateUserResponse,
        set_limit: SetLimitRequest => SetLimitResponse,
        block_user: BlockUserRequest => BlockUserResponse,
        unblock_user: UnblockUserRequest => UnblockUserResponse,
    );
}

/// The registry and the chain behind it.
#[derive(Default)]
pub struct Registry {
    pub instruments: Mutex<HashMap<String, Instrument>>,
    batches: Mutex<HashMap<String, TradeBatch>>,
}

impl Registry {
    pub fn list(&self, instrument: Instrument) {
        let id = instrument.instrument_id.clone();
        self.instruments.lock().unwrap().insert(id, instrument);
    }

    pub fn routes(self: &Arc<Self>) -> Routes {
        Routes::new(CfaRegistryServiceServer::new(RegistryApi(self.clone())))
    }
}

struct RegistryApi(Arc<Registry>);

#[tonic::async_trait]
impl CfaRegistryService for RegistryApi {
    async fn get_instrument(
        &self,
        request: Request<GetInstrumentRequest>,
    ) -> Result<Response<GetInstrumentResponse>, Status> {
        let id = request.into_inner().instrument_id;
        let instruments = self.0.instruments.lock().unwrap();
        let instrument = instruments.get(&id).cloned().ok_or_else(|| {
            rpc::status::not_found("INSTRUMENT_NOT_FOUND", "Instrument not found")
        })?;
        Ok(Response::new(GetInstrumentResponse {
            instrument: Some(instrument),
        }))
    }

    async fn list_instruments(
        &self,
        _: Request<ListInstrumentsRequest>,
    ) -> Result<Response<ListInstrumentsResponse>, Status> {
        let instruments = self.0.instruments.lock().unwrap();
        Ok(Response::new(ListInstrumentsResponse {
            instruments: instruments.values().cloned().collect(),
            pagination: None,
        }))
    }

    async fn settle_trades(
        &self,
        request: Request<SettleTradesRequest>,
    ) -> Result<Response<SettleTradesResponse>, Status> {
        let request = request.into_inner();
        let batch = TradeBatch {
            onchain_tx_hash: format!("0xhash-{}", request.batch_id),
            status: TradeBatchStatus::Finalized.into(),
            trades: request.trades.len() as u32,
            block_number: 1,
            gas_used: 1,
            failed_trade_ids: Vec::new(),
            batch_id: request.batch_id.clone(),
        };
        let mut batches = self.0.batches.lock().unwrap();
        let batch = batches.entry(request.batch_id).or_insert(batch).clone();
        Ok(Response::new(SettleTradesResponse { batch: Some(batch) }))
    }

    async fn get_trade_batch(
        &self,
        request: Request<GetTradeBatchRequest>,
    ) -> Result<Response<GetTradeBatchResponse>, Status> {
        let id = request.into_inner().batch_id;
        let batches = self.0.batches.lock().unwrap();
        let batch = batches.get(&id).cloned();
        let batch = batch
            .ok_or_else(|| rpc::status::not_found("BATCH_NOT_FOUND", "Trade batch not found"))?;
        Ok(Response::new(GetTradeBatchResponse { batch: Some(batch) }))
    }

    testkit::unanswered!(
        register_instrument: RegisterInstrumentRequest => RegisterInstrumentResponse,
        update_instrument: UpdateInstrumentRequest => UpdateInstrumentResponse,
        issue_cfa_rub: IssueCfaRubRequest => IssueCfaRubResponse,
        redeem_cfa_rub: RedeemCfaRubRequest => RedeemCfaRubResponse,
        issue_investment_cfa: IssueInvestmentCfaRequest => IssueInvestmentCfaResponse,
        redeem_investment_cfa: RedeemInvestmentCfaRequest => RedeemInvestmentCfaResponse,
        start_redemption: StartRedemptionRequest => StartRedemptionResponse,
        get_redemption: GetRedemptionRequest => GetRedemptionResponse,
        transfer_cfa: TransferCfaRequest => TransferCfaResponse,
        list_holders: ListHoldersRequest => ListHoldersResponse,
        replay_chain_transfers: ReplayChainTransfersRequest => ReplayChainTransfersResponse,
        check_integrity: CheckIntegrityRequest => CheckIntegrityResponse,
        get_supply: GetSupplyRequest => GetSupplyResponse,
        get_operation: GetOperationRequest => GetOperationResponse,
        list_operations: ListOperationsRequest => ListOperationsResponse,
        finalize_issuance: FinalizeIssuanceRequest => FinalizeIssuanceResponse,
        finalize_redemption: FinalizeRedemptionRequest => FinalizeRedemptionResponse,
        list_suspended_deposits: ListSuspendedDepositsRequest => ListSuspendedDepositsResponse,
        resolve_suspended_deposit: ResolveSuspendedDepositRequest => ResolveSuspendedDepositResponse,
        set_redemption_block: SetRedemptionBlockRequest => SetRedemptionBlockResponse,
    );
}

/// A log that takes no events while it is away.
pub struct LogThatGoesAway {
    pub log: Arc<dyn Log>,
    pub is_away: Arc<AtomicBool>,
    /// Away it answers nothing, as a Kafka does, instead of an error.
    pub hangs: bool,
}

impl LogThatGoesAway {
    fn check(&self) -> Result<(), events::Error> {
        match self.is_away.load(Ordering::SeqCst) {
            true => Err(events::Error::Closed),
            false => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl Log for LogThatGoesAway {
    async fn publish(&self, events: &[events::Event]) -> Result<(), events::Error> {
        while self.hangs && self.is_away.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.check()?;
        self.log.publish(events).await
    }

    async fn append(&self, records: &[events::Record]) -> Result<(), events::Error> {
        self.check()?;
        self.log.append(records).await
    }

    async fn subscribe(
        &self,
        group: &str,
        topics: &[&str],
    ) -> Result<events::Subscription, events::Error> {
        self.log.subscribe(group, topics).await
    }

    async fn backlog(
        &self,
        group: &str,
        topics: &[&str],
    ) -> Result<Vec<events::Delivery>, events::Error> {
        self.log.backlog(group, topics).await
    }

    async fn commit(&self, group: &str, position: &events::Position) -> Result<(), events::Error> {
        self.log.commit(group, position).await
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.log.failing()
    }

    fn waiting(&self) -> &events::Waiting {
        self.log.waiting()
    }
}
