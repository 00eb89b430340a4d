//! Test environment with a real chain, ledger and event log. Identity, payments and the market are
//! doubles that record their calls in one list.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cfa::{AuditedService, CfaConfig, CfaDeps, CfaHandle, Clock};
use chain::{
    Action, ChainConfig, ChainDeps, ChainHandle, Connector, Contracts, TxHash, start_chain,
};
use events::{Event, Log};
use prost::Message;
use proto::cfa::v1 as pb;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1 as common;
use proto::ledger::v1 as ledger_pb;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::payments::v1::FiatDepositedEvent;
use sha2::Digest as _;
use testkit::{ServiceDoubles, TestUser};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::faults::Faults;
use crate::losing::Losing;

pub use testkit::messages::{amount, context, decimal, rubles as roubles};

pub const WAIT: Duration = Duration::from_secs(30);

pub struct World {
    /// Identity, payments and the market.
    pub double: Arc<ServiceDoubles>,
    pub log: Arc<events::Embedded>,
    /// The log for this service's writes.
    pub losing: Arc<Losing>,
    pub chain: ChainHandle,
    pub ledger: LedgerServiceClient<rpc::Channel>,
    pub cfa: CfaRegistryServiceClient<rpc::Channel>,
    pub clock: Clock,
    pub slot: rpc::LocalSlot,
    pub service: rpc::Service,
    /// Faults of the calls that the service makes.
    pub faults: Faults,
    /// The certificate authority of the issuers.
    pub ca: sandbox::bank::Ca,
    handle: CfaHandle,
    ledger_handle: ledger::LedgerHandle,
    services: CancellationToken,
    below: CancellationToken,
    ledger_events: events::Subscription,
}

/// What a test may change at the start of a world.
#[derive(Default)]
pub struct Settings {
    /// A remote node instead of the embedded chain.
    pub rpc_url: Option<String>,
    /// Unset: only the test runs sweeps.
    pub sweep_interval_ms: Option<u64>,
    /// Interval and window of the comparison of chain and ledger. Unset: none takes place.
    pub compare_ms: Option<(u64, u64)>,
    /// Interval of the anchors. Unset: none.
    pub anchor_interval_s: Option<u64>,
    /// Doubles that outlive the world. `None`: new ones.
    pub double: Option<Arc<ServiceDoubles>>,
    /// Address of doubles in another process, called instead of `double`.
    pub peers_url: Option<String>,
    /// Configures no certificate authority.
    pub without_authority: bool,
    /// Verifies signatures of decisions. Empty: the platform does.
    pub signature_command: Vec<String>,
}

impl World {
    /// Starts with an embedded chain.
    pub async fn start(folder: &Path) -> Self {
        Self::with(folder, Settings::default()).await
    }

    pub async fn with(folder: &Path, settings: Settings) -> Self {
        let started = Self::try_with(folder, settings).await;
        started.unwrap_or_else(|error| panic!("cfa: {error}"))
    }

    /// # Errors
    /// The error of the service's start.
    pub async fn try_with(folder: &Path, settings: Settings) -> Result<Self, cfa::Error> {
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
            rpc_url: settings.rpc_url,
            ..ChainConfig::default()
        };
        let losing = Arc::new(Losing::new(log.clone()));
        let chain_deps = ChainDeps {
            log: losing.clone(),
        };
        let chain = start_chain(chain_config, chain_deps, below.clone());
        let chain = chain.await.expect("chain");
        let [ledger_slot, faulty_slot, slot] = std::array::from_fn(|_| rpc::LocalSlot::new());
        let channel = |slot: &rpc::LocalSlot| rpc::Channel::local(slot, "sandbox.service");
        let ledger_handle =
            start_ledger(folder, log.clone(), channel(&slot), services.clone()).await;
        let double = settings.double.unwrap_or_default();
        double.with(|state| {
            state.default_user = Some(TestUser::default());
            state.ledger = Some(LedgerServiceClient::new(channel(&ledger_slot)));
        });
        let faults = Faults::default();
        let peers = match settings.peers_url {
            Some(url) => rpc::Channel::remote(&url, "sandbox.service").expect("address"),
            None => channel(&testkit::in_memory(faults.before(double.routes()))),
        };
        let auth = rpc::Authenticator::Sandbox;
        ledger_slot.fill(rpc::with_auth(ledger_handle.service().routes, &auth));
        let faulty = faults.before(ledger_handle.service().routes);
        faulty_slot.fill(rpc::with_auth(faulty, &auth));
        let clock = Clock::manual(1_800_000_000_000_000);
        let deps = CfaDeps {
            log: losing.clone(),
            ledger: channel(&faulty_slot),
            payments: peers.clone(),
            identity: peers.clone(),
            market: peers.clone(),
            audited: vec![(AuditedService::Payments, peers)],
            chain: chain.connector(),
            clock: clock.clone(),
        };
        let keys = folder.join("keys");
        let ca = sandbox::bank::Ca::open(&keys).expect("certificate authority");
        let config = CfaConfig {
            data_dir: folder.join("cfa"),
            ca_file: (!settings.without_authority).then(|| keys.join("ca.pem")),
            signature_command: settings.signature_command,
            extract_key_file: Some(keys.join("extracts.pk8")),
            extract_certificate_file: Some(keys.join("extracts.der")),
            sweep_interval_ms: settings.sweep_interval_ms.unwrap_or(3_600_000),
            submit_attempts_max: 3,
            anchor_interval_s: settings.anchor_interval_s.unwrap_or_default(),
            compare_interval_ms: settings
                .compare_ms
                .map_or(3_600_000, |(interval, _)| interval),
            compare_window_ms: settings.compare_ms.map_or(60_000, |(_, window)| window),
            ..CfaConfig::default()
        };
        let handle = match cfa::start(config, deps, services.clone()).await {
            Ok(handle) => handle,
            Err(error) => {
                services.cancel();
                ledger_handle.stopped().await;
                below.cancel();
                chain.stopped().await;
                return Err(error);
            }
        };
        slot.fill(rpc::with_auth(handle.service().routes, &auth));
        let ledger_events = log
            .subscribe("test-ledger", &[events::topics::LEDGER])
            .await
            .expect("subscription");
        Ok(Self {
            ledger: LedgerServiceClient::new(channel(&ledger_slot)),
            cfa: CfaRegistryServiceClient::new(channel(&slot)),
            service: handle.service(),
            faults,
            double,
            log,
            losing,
            chain,
            clock,
            slot,
            ca,
            handle,
            ledger_handle,
            services,
            below,
            ledger_events,
        })
    }

    pub async fn stop(self) {
        self.services.cancel();
        self.handle.stopped().await;
        self.ledger_handle.stopped().await;
        self.below.cancel();
        self.chain.stopped().await;
    }

    /// Stops the sealer: later submissions are in no block.
    pub async fn stop_sealing(&self) {
        self.below.cancel();
    }

    /// Serves the service on a port; returns its address.
    pub async fn listen(&self) -> String {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0");
        let listener = listener.await.expect("port");
        let url = format!("http://{}", listener.local_addr().expect("address"));
        let served = rpc::serve(
            listener,
            vec![self.handle.service()],
            rpc::Authenticator::Sandbox,
            rpc::metrics_init(),
            self.services.clone(),
        );
        tokio::spawn(served);
        url
    }

    /// A client with another caller's credential.
    pub fn as_caller(&self, credential: &str) -> CfaRegistryServiceClient<rpc::Channel> {
        CfaRegistryServiceClient::new(rpc::Channel::local(&self.slot, credential))
    }

    /// Sets the service's clock to `by_us` microseconds before the current time of the chain.
    pub fn turn_back_us(&self, by_us: i64) {
        let now_us = Clock::System.now_us();
        self.clock.advance_us(now_us - by_us - self.clock.now_us());
    }

    pub fn connector(&self) -> Connector {
        self.chain.connector()
    }

    /// The contracts that the first start deployed.
    pub async fn contracts(&self) -> Contracts {
        let deployed = self.connector().submission("bootstrap:platform").await;
        let deployed = deployed.expect("read").expect("deployed");
        Contracts::of_platform(&deployed.contract.expect("a deployment"))
    }

    /// Deploys a token as the platform does. Returns its address.
    pub async fn deploy_token(
        &self,
        symbol: &str,
        change: impl FnOnce(&mut Action),
    ) -> chain::Address {
        let (connector, contracts) = (self.connector(), self.contracts().await);
        let mut deploy = Action::DeployToken {
            name: "x".into(),
            symbol: symbol.into(),
            decimals: 0,
            registry: contracts.registry,
            owner: connector.owner(),
            grants: contracts.token_grants(connector.operator()),
            terms: None,
        };
        change(&mut deploy);
        let submitted = connector.submit(&key(), &deploy.call()).await;
        let submitted = submitted.expect("submitted");
        let receipt = self.receipt(&submitted.tx_hash.to_string()).await;
        receipt.contract_address.expect("contract")
    }

    /// Runs one sweep: resumes all open operations.
    pub async fn resume_operations(&self) {
        self.handle.sweep().await.expect("sweep");
    }

    /// Waits for the receipt of an operation's transaction and delivers it to the service.
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
            .expect("receipt lookup")
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

    /// Makes a deposit and issues CFA-RUB for it by RPC. Waits for the ledger.
    pub async fn deposit(&mut self, user_id: &str, amount: &str) -> pb::CfaOperation {
        let payment_id = key();
        self.double.paid(&payment_id, user_id, amount);
        self.issue_paid(&payment_id, user_id, amount).await
    }

    /// Issues CFA-RUB for a paid payment. Waits for the ledger.
    pub async fn issue_paid(
        &mut self,
        payment_id: &str,
        user_id: &str,
        amount: &str,
    ) -> pb::CfaOperation {
        let before = self.balance(&format!("{user_id}:CFA-RUB")).await.balance;
        let request = pb::IssueCfaRubRequest {
            context: context(&key()),
            user_id: user_id.to_owned(),
            amount: roubles(amount),
            payment_id: payment_id.to_owned(),
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

    /// Publishes the event of a paid payment.
    pub async fn publish_deposit(&self, payment_id: &str, user_id: &str, amount: &str) {
        let event = deposited(payment_id, user_id, amount);
        self.log.publish(&[event]).await.expect("published");
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

    /// Waits for ledger events until the balance has this value.
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

    /// Balance on chain, in smallest units.
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

    /// Registers an issue, signs its decision and activates it.
    ///
    /// # Errors
    /// The refusal of the registration or of the activation.
    pub async fn register(
        &mut self,
        change: impl FnOnce(&mut pb::RegisterInstrumentRequest),
    ) -> Result<pb::Instrument, Status> {
        let draft = self.draft(change).await?;
        // A repeat returns the issue as it is.
        if draft.status() != pb::InstrumentStatus::Draft {
            return Ok(draft);
        }
        let document = match draft.document_hash.as_str() {
            "" => document_of(&draft.instrument_id),
            hash => {
                let mut document = [0; 32];
                hex::decode_to_slice(hash, &mut document).expect("a hash");
                document
            }
        };
        self.sign_document(&draft.instrument_id, &draft.issuer_id, document)
            .await
            .expect("signed");
        self.activate_document(&draft.instrument_id, document).await
    }

    pub async fn draft(
        &mut self,
        change: impl FnOnce(&mut pb::RegisterInstrumentRequest),
    ) -> Result<pb::Instrument, Status> {
        let mut request = bond("BOND-1");
        change(&mut request);
        let registered = self.cfa.register_instrument(request).await?;
        Ok(registered.into_inner().instrument.expect("instrument"))
    }

    /// Stores a signature of the decision by this user.
    pub async fn sign(
        &mut self,
        instrument_id: &str,
        signer: &str,
    ) -> Result<pb::IssueDecision, Status> {
        let document = document_of(instrument_id);
        self.sign_document(instrument_id, signer, document).await
    }

    /// `document`: SHA-256 of the decision.
    async fn sign_document(
        &mut self,
        instrument_id: &str,
        signer: &str,
        document: [u8; 32],
    ) -> Result<pb::IssueDecision, Status> {
        let signature = self.ca.sign(signer, &document).expect("signature");
        let request = pb::SignIssueDecisionRequest {
            context: context(&key()),
            instrument_id: instrument_id.into(),
            document_hash: hex::encode(document),
            signature: signature.into(),
            ..Default::default()
        };
        let signed = self.cfa.sign_issue_decision(request).await?;
        Ok(signed.into_inner().decision.expect("decision"))
    }

    pub async fn activate(&mut self, instrument_id: &str) -> Result<pb::Instrument, Status> {
        self.activate_document(instrument_id, document_of(instrument_id))
            .await
    }

    /// `document`: SHA-256 of the decision.
    async fn activate_document(
        &mut self,
        instrument_id: &str,
        document: [u8; 32],
    ) -> Result<pb::Instrument, Status> {
        let request = pb::ActivateInstrumentRequest {
            context: context(&key()),
            instrument_id: instrument_id.into(),
            document_hash: hex::encode(document),
        };
        let activated = self.cfa.activate_instrument(request).await?;
        Ok(activated.into_inner().instrument.expect("instrument"))
    }

    /// Issues units without payment and waits until they are final.
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

    /// An investor's own offer to buy units.
    pub async fn subscribe(
        &self,
        instrument_id: &str,
        investor_id: &str,
        units: &str,
        payment: &str,
    ) -> Result<pb::Subscription, Status> {
        let request = pb::SubscribeRequest {
            context: context(&key()),
            instrument_id: instrument_id.into(),
            investor_id: investor_id.into(),
            amount: amount(instrument_id, units),
            payment: amount("CFA-RUB", payment),
            expires_at: None,
        };
        let mut investor = self.as_caller(&format!("sandbox.investor.{investor_id}"));
        let answer = investor.subscribe(request).await?;
        Ok(answer.into_inner().subscription.expect("subscription"))
    }

    /// A holder's own offer to sell units back to the issuer.
    pub async fn offer(
        &self,
        instrument_id: &str,
        holder_id: &str,
        units: &str,
        payment: &str,
    ) -> Result<pb::Offer, Status> {
        let request = pb::OfferUnitsRequest {
            context: context(&key()),
            instrument_id: instrument_id.into(),
            holder_id: holder_id.into(),
            amount: amount(instrument_id, units),
            payment: amount("CFA-RUB", payment),
            expires_at: None,
        };
        let mut holder = self.as_caller(&format!("sandbox.investor.{holder_id}"));
        let answer = holder.offer_units(request).await?;
        Ok(answer.into_inner().offer.expect("offer"))
    }

    /// CancelOffer by the holder.
    pub async fn cancel_offer(&self, offer: &pb::Offer) -> Result<pb::Offer, Status> {
        let request = pb::CancelOfferRequest {
            context: context(&key()),
            offer_id: offer.offer_id.clone(),
        };
        let mut holder = self.as_caller(&format!("sandbox.investor.{}", offer.holder_id));
        let answer = holder.cancel_offer(request).await?;
        Ok(answer.into_inner().offer.expect("offer"))
    }

    /// RedeemCfaRub by the owner of the money.
    pub async fn redeem_rub(
        &self,
        request: pb::RedeemCfaRubRequest,
    ) -> Result<tonic::Response<pb::RedeemCfaRubResponse>, Status> {
        let owner = format!("sandbox.investor.{}", request.user_id);
        self.as_caller(&owner).redeem_cfa_rub(request).await
    }

    /// TransferCfa by the sender.
    pub async fn transfer(
        &self,
        request: pb::TransferCfaRequest,
    ) -> Result<pb::CfaOperation, Status> {
        let sender = format!("sandbox.investor.{}", request.from_user_id);
        let answer = self.as_caller(&sender).transfer_cfa(request).await?;
        Ok(answer.into_inner().operation.expect("operation"))
    }

    /// Holds money or units of a user in the ledger. An empty owner: no service. Returns the hold's
    /// id.
    pub async fn hold(
        &mut self,
        user_id: &str,
        instrument_id: &str,
        value: &str,
        owner: &str,
    ) -> String {
        let hold_id = key();
        let request = ledger_pb::CreateHoldRequest {
            context: context(&key()),
            hold: Some(ledger_pb::Hold {
                hold_id: hold_id.clone(),
                subaccount_id: format!("{user_id}:{instrument_id}"),
                amount: amount(instrument_id, value),
                reason: format!("Trading hold {hold_id}"),
                owner: owner.into(),
                ..Default::default()
            }),
        };
        self.ledger.create_hold(request).await.expect("held");
        hold_id
    }

    /// Redeems BOND-1 before its maturity.
    pub async fn redeem_issue(&mut self) -> Result<pb::IssueRedemption, Status> {
        let request = pb::StartRedemptionRequest {
            context: context(&key()),
            instrument_id: "BOND-1".into(),
            record_date: None,
            reason: pb::RedemptionReason::Buyback.into(),
        };
        let started = self.cfa.start_redemption(request).await?;
        Ok(started.into_inner().redemption.expect("redemption"))
    }

    /// Releases a hold in the ledger.
    pub async fn release_hold(&mut self, hold_id: &str) {
        let request = ledger_pb::ReleaseHoldRequest {
            context: context(&key()),
            hold_id: hold_id.into(),
            reason: "cancelled".into(),
        };
        self.ledger.release_hold(request).await.expect("released");
    }

    /// Freezes or unfreezes the user's CFA-RUB in the ledger.
    pub async fn freeze_money(&mut self, user_id: &str, frozen: bool) {
        self.freeze(&format!("{user_id}:CFA-RUB"), frozen).await;
    }

    /// Freezes or unfreezes a sub-account in the ledger.
    pub async fn freeze(&mut self, subaccount_id: &str, frozen: bool) {
        let status = match frozen {
            true => ledger_pb::SubAccountStatus::Frozen,
            false => ledger_pb::SubAccountStatus::Active,
        };
        let request = ledger_pb::SetSubAccountStatusRequest {
            context: context(&key()),
            subaccount_id: subaccount_id.into(),
            status: status.into(),
            reason: "test".into(),
        };
        let set = self.ledger.set_sub_account_status(request).await;
        set.expect("set");
    }

    pub async fn holders(&mut self, instrument_id: &str) -> Vec<(String, String)> {
        self.holders_at(instrument_id, None).await
    }

    /// Current holders, or those at `as_of_s`, with their units.
    pub async fn holders_at(
        &mut self,
        instrument_id: &str,
        as_of_s: Option<i64>,
    ) -> Vec<(String, String)> {
        let request = pb::ListHoldersRequest {
            instrument_id: instrument_id.to_owned(),
            as_of: as_of_s.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
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

    /// All events of a topic up to the matching one.
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
                .expect("the event arrives")
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

async fn start_ledger(
    folder: &Path,
    log: Arc<events::Embedded>,
    cfa: rpc::Channel,
    shutdown: CancellationToken,
) -> ledger::LedgerHandle {
    let config = ledger::LedgerConfig {
        data_dir: folder.join("ledger"),
        reconcile_after_ms: 50,
        ..Default::default()
    };
    let deps = ledger::LedgerDeps::new(log, cfa);
    let started = ledger::start(config, deps, shutdown).await;
    started.expect("ledger")
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Balance {
    pub balance: types::Decimal,
    pub held: types::Decimal,
    pub available: types::Decimal,
}

/// Changes the service's store to the state after a crash, or to that of another time.
pub async fn alter_store(folder: &Path, statement: &'static str) {
    alter_store_by(folder, statement, &[]).await;
}

/// Like `alter_store`, with arguments.
pub async fn alter_store_by(folder: &Path, statement: &'static str, arguments: &[&str]) {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.join("cfa/cfa.sqlite"));
    let pool = sqlx::SqlitePool::connect_with(options)
        .await
        .expect("store");
    let query = arguments
        .iter()
        .fold(sqlx::query(statement), |query, argument| {
            query.bind((*argument).to_owned())
        });
    let done = query.execute(&pool).await.expect("done");
    assert!(done.rows_affected() > 0);
    pool.close().await;
}

/// Sets the other times of the registry after its holders' history was moved to another time.
pub async fn follow_history(folder: &Path) {
    alter_store(
        folder,
        "UPDATE holding SET since_us = (SELECT MIN(time_us) FROM holding_history h \
         WHERE h.token = holding.token AND h.address = holding.address)",
    )
    .await;
    alter_store(
        folder,
        "UPDATE supply_history SET time_us = (SELECT MAX(time_us) FROM holding_history h \
         WHERE h.token = supply_history.token AND h.block_number = supply_history.block_number)",
    )
    .await;
}

/// Numbers from a seed (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// SHA-256 of the decision on an issue.
pub fn document_of(instrument_id: &str) -> [u8; 32] {
    sha2::Sha256::digest(instrument_id).into()
}

/// A fresh key.
pub fn key() -> String {
    uuid::Uuid::now_v7().to_string()
}

/// The event of a paid payment.
pub fn deposited(payment_id: &str, user_id: &str, amount: &str) -> Event {
    let message = FiatDepositedEvent {
        context: context("deposit"),
        user_id: user_id.to_owned(),
        amount: roubles(amount),
        payment_id: payment_id.to_owned(),
        deposited_at: None,
    };
    let name = "dfa.payments.v1.FiatDepositedEvent";
    event(events::topics::PAYMENTS, payment_id, name, &message)
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

/// Calls a contract's function without arguments as the operator, e.g. `pause()`.
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
        .expect("receipt lookup")
        .expect("in a block");
    assert_eq!(receipt.status, chain::ReceiptStatus::Success);
}

pub fn reason(status: &Status) -> String {
    rpc::status::reason(status).unwrap_or_default()
}
