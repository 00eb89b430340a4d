//! A separate ledger for each test, with helpers for its calls.

use std::sync::Arc;

use events::{Event, Log, Subscription, topics};
use ledger::{Clock, LedgerConfig, LedgerDeps, LedgerHandle, StoreUrl};
use prost::Message;
use proto::{
    common::v1::{Decimal, MonetaryAmount, OperationType, PaginationRequest},
    ledger::v1::{ledger_service_client::LedgerServiceClient, *},
};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tonic::{Response, Status};
use uuid::Uuid;

use crate::rows::{Database, Rows};

pub type Client = LedgerServiceClient<rpc::Channel>;
pub type Answer<T> = Result<Response<T>, Status>;

pub use testkit::messages::{amount, context as write, fresh, tx_hash};
pub use testkit::{PATIENCE, eventually};

pub const START_US: i64 = 1_780_000_000_000_000;
pub const RUB: &str = "CFA-RUB";
pub const BOND: &str = "BOND-1";

pub struct World {
    pub client: Client,
    pub clock: Clock,
    pub log: Arc<dyn Log>,
    /// The CFA service: unavailable until a test fills the slot.
    #[allow(dead_code, reason = "few tests need it")]
    pub cfa: rpc::LocalSlot,
    pub handle: LedgerHandle,
    /// Shared by all ledgers on this database.
    pub database: Arc<Database>,
    folder: Arc<TempDir>,
    slot: rpc::LocalSlot,
    shutdown: CancellationToken,
}

impl World {
    pub async fn new() -> Self {
        Self::on(Database::fresh().await, None).await
    }

    /// A ledger with this clock.
    pub async fn with_clock(clock: Clock) -> Self {
        let folder = TempDir::new().unwrap();
        let (database, log) = (Database::fresh().await, open_log(&folder).await);
        Self::open(Arc::new(database), None, Arc::new(folder), log, clock).await
    }

    /// A separate ledger on a shared log.
    #[allow(dead_code, reason = "not every test binary shares a log")]
    pub async fn on_log(log: Arc<dyn Log>) -> Self {
        let (database, clock) = (Database::fresh().await, Clock::manual(START_US));
        let folder = Arc::new(TempDir::new().unwrap());
        Self::open(Arc::new(database), None, folder, log, clock).await
    }

    /// A separate ledger. With `url` it connects through this URL instead of the database's own.
    pub async fn on(database: Database, url: Option<String>) -> Self {
        let folder = TempDir::new().unwrap();
        let log = open_log(&folder).await;
        let clock = Clock::manual(START_US);
        Self::open(Arc::new(database), url, Arc::new(folder), log, clock).await
    }

    /// A ledger on the SQLite file of a folder.
    #[allow(dead_code, reason = "the full tests use PostgreSQL")]
    pub async fn in_folder(folder: TempDir) -> Self {
        let database = Database::sqlite();
        let log = open_log(&folder).await;
        let clock = Clock::manual(START_US);
        Self::open(Arc::new(database), None, Arc::new(folder), log, clock).await
    }

    async fn open(
        database: Arc<Database>,
        url: Option<String>,
        folder: Arc<TempDir>,
        log: Arc<dyn Log>,
        clock: Clock,
    ) -> Self {
        let shutdown = CancellationToken::new();
        let config = LedgerConfig {
            data_dir: folder.path().to_owned(),
            url: StoreUrl::new(url.unwrap_or_else(|| database.url.clone())),
            // Tests sweep explicitly.
            hold_sweep_interval_ms: 3_600_000,
            reconcile_after_ms: 1,
            ..LedgerConfig::default()
        };
        let cfa = rpc::LocalSlot::new();
        let deps = LedgerDeps {
            log: log.clone(),
            cfa: rpc::Channel::local(&cfa, "sandbox.service"),
            clock: clock.clone(),
        };
        let handle = ledger::start(config, deps, shutdown.clone()).await.unwrap();
        let slot = testkit::in_memory(handle.service().routes);
        World {
            client: LedgerServiceClient::new(rpc::Channel::local(&slot, "sandbox.service")),
            clock,
            log,
            cfa,
            handle,
            database,
            folder,
            slot,
            shutdown,
        }
    }

    /// A second ledger on the same database and log.
    #[allow(dead_code, reason = "only PostgreSQL supports several ledgers")]
    pub async fn second(&self) -> Self {
        let (log, clock) = (self.log.clone(), self.clock.clone());
        let (database, folder) = (self.database.clone(), self.folder.clone());
        Self::open(database, None, folder, log, clock).await
    }

    /// Stops the ledger and starts it again on the same files.
    pub async fn restart(self) -> Self {
        self.restart_after(&[]).await
    }

    /// As [`Self::restart`], with this clock.
    pub async fn restart_by(self, clock: Clock) -> Self {
        self.reopen(&[], clock).await
    }

    /// Stops the ledger, publishes `events`, and starts it again on the same files.
    pub async fn restart_after(self, events: &[Event]) -> Self {
        self.reopen(events, Clock::manual(START_US)).await
    }

    async fn reopen(self, events: &[Event], clock: Clock) -> Self {
        self.shutdown.cancel();
        self.slot.clear();
        self.handle.stopped().await;
        drop(self.log);
        let log = open_log(&self.folder).await;
        log.publish(events).await.unwrap();
        Self::open(self.database, None, self.folder, log, clock).await
    }

    /// The file of the event log.
    pub fn log_file(&self) -> std::path::PathBuf {
        self.folder.path().join("log").join("log.db")
    }

    /// The configuration of this ledger.
    pub fn config(&self) -> LedgerConfig {
        LedgerConfig {
            data_dir: self.folder.path().to_owned(),
            url: StoreUrl::new(self.database.url.clone()),
            ..LedgerConfig::default()
        }
    }

    /// Direct access to the rows of the running ledger.
    pub async fn rows(&self) -> Rows {
        Rows::open(&self.database, self.folder.path()).await
    }

    pub fn as_caller(&self, credential: &str) -> Client {
        LedgerServiceClient::new(self.channel(credential))
    }

    pub fn channel(&self, credential: &str) -> rpc::Channel {
        rpc::Channel::local(&self.slot, credential)
    }

    /// The ledger's events from the beginning.
    pub async fn watch(&self) -> Watch {
        let group = format!("test-{}", Uuid::now_v7());
        Watch(self.log.subscribe(&group, &[topics::LEDGER]).await.unwrap())
    }

    pub async fn publish(
        &self,
        topic: &str,
        name: &str,
        key: &str,
        message: &impl Message,
    ) -> Event {
        let event = event(topic, name, key, message);
        self.log
            .publish(std::slice::from_ref(&event))
            .await
            .unwrap();
        event
    }

    /// Credits a user from the reserve.
    pub async fn fund(&self, user: &str, instrument: &str, amount: &str) -> Operation {
        let mut request = operation(
            OperationType::Deposit,
            user,
            &fresh(),
            &[(
                &format!("system:reserve:{instrument}"),
                &format!("{user}:{instrument}"),
                amount,
                instrument,
            )],
        );
        request.instrument_scales = scale(instrument);
        let answer = self.client.clone().create_operation(request).await.unwrap();
        answer.into_inner().operation.unwrap()
    }

    pub async fn balance(&self, subaccount: &str) -> [String; 4] {
        let request = GetBalanceRequest {
            context: None,
            subaccount_id: subaccount.to_owned(),
            as_of: None,
        };
        let answer = self
            .client
            .clone()
            .get_balance(request)
            .await
            .unwrap()
            .into_inner();
        [
            answer.balance,
            answer.held,
            answer.unsettled,
            answer.available,
        ]
        .map(|value| value.unwrap().value)
    }

    pub async fn hold(&self, user: &str, instrument: &str, amount: &str) -> Hold {
        self.open_hold(&fresh(), new_hold(user, instrument, amount))
            .await
            .unwrap()
            .into_inner()
            .hold
            .unwrap()
    }

    pub async fn open_hold(&self, key: &str, hold: Hold) -> Answer<CreateHoldResponse> {
        let request = CreateHoldRequest {
            context: write(key),
            hold: Some(hold),
        };
        self.client.clone().create_hold(request).await
    }

    pub async fn consume(
        &self,
        key: &str,
        hold_id: &str,
        part: Option<MonetaryAmount>,
    ) -> Answer<ConsumeHoldResponse> {
        let request = ConsumeHoldRequest {
            context: write(key),
            hold_id: hold_id.to_owned(),
            amount: part,
            ..Default::default()
        };
        self.client.clone().consume_hold(request).await
    }

    pub async fn release(&self, key: &str, hold_id: &str) -> Answer<ReleaseHoldResponse> {
        let request = ReleaseHoldRequest {
            context: write(key),
            hold_id: hold_id.to_owned(),
            reason: "test".to_owned(),
        };
        self.client.clone().release_hold(request).await
    }

    pub async fn get_hold(&self, hold_id: &str) -> Hold {
        let request = GetHoldRequest {
            context: None,
            hold_id: hold_id.to_owned(),
        };
        self.client
            .clone()
            .get_hold(request)
            .await
            .unwrap()
            .into_inner()
            .hold
            .unwrap()
    }

    pub async fn get_operation(&self, operation_id: &str) -> GetOperationResponse {
        let request = GetOperationRequest {
            context: None,
            operation_id: operation_id.to_owned(),
        };
        self.client
            .clone()
            .get_operation(request)
            .await
            .unwrap()
            .into_inner()
    }

    /// All sub-accounts of an instrument, from all pages.
    async fn sub_accounts(&self, instrument: &str) -> Vec<SubAccount> {
        let mut all = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListSubAccountsRequest {
                instrument_id: instrument.to_owned(),
                pagination: Some(PaginationRequest {
                    page_size: 1_000,
                    page_token,
                }),
                ..Default::default()
            };
            let answer = self.client.clone().list_sub_accounts(request).await;
            let answer = answer.unwrap().into_inner();
            all.extend(answer.subaccounts);
            page_token = answer.pagination.unwrap_or_default().next_page_token;
            if page_token.is_empty() {
                return all;
            }
        }
    }

    /// Asserts that every instrument sums to zero and that held amounts equal the remainders of
    /// active holds.
    pub async fn assert_books_balance(&self) {
        let lines = self
            .client
            .clone()
            .get_trial_balance(GetTrialBalanceRequest::default())
            .await
            .unwrap()
            .into_inner()
            .lines;
        for line in lines {
            let number =
                |value: Option<Decimal>| value.unwrap().value.parse::<types::Decimal>().unwrap();
            assert!(number(line.total).is_zero(), "{}", line.instrument_id);
            assert_eq!(number(line.circulating), number(line.holders));
            let mut held = types::Decimal::ZERO;
            for row in self.sub_accounts(&line.instrument_id).await {
                held = held.checked_add(number(row.held)).unwrap();
            }
            assert_eq!(held, number(line.active_holds), "{}", line.instrument_id);
        }
    }
}

/// An event of another service.
pub fn event(topic: &str, name: &str, key: &str, message: &impl Message) -> Event {
    Event {
        id: Uuid::now_v7(),
        topic: topic.to_owned(),
        key: key.to_owned(),
        type_name: name.to_owned(),
        subject: key.to_owned(),
        source: "test".to_owned(),
        correlation_id: "corr-event".to_owned(),
        occurred_at_us: START_US,
        payload: message.encode_to_vec(),
    }
}

async fn open_log(folder: &TempDir) -> Arc<dyn Log> {
    let log = events::Embedded::open(folder.path().join("log")).await;
    Arc::new(log.unwrap())
}

/// The ledger's events, in order.
pub struct Watch(Subscription);

impl Watch {
    pub async fn next(&mut self) -> Event {
        tokio::time::timeout(PATIENCE, self.0.next())
            .await
            .expect("an event comes")
            .unwrap()
            .record
            .event
    }

    /// The next event of this message type; skips others.
    pub async fn next_of<M: Message + Default>(&mut self, name: &str) -> (Event, M) {
        loop {
            let event = self.next().await;
            if event.type_name == format!("dfa.ledger.v1.{name}") {
                let message = M::decode(event.payload.as_slice()).unwrap();
                return (event, message);
            }
        }
    }

    /// Every event up to and including the first that matches `last`.
    pub async fn until(&mut self, last: impl Fn(&Event) -> bool) -> Vec<Event> {
        let mut seen = Vec::new();
        loop {
            let event = self.next().await;
            let is_last = last(&event);
            seen.push(event);
            if is_last {
                return seen;
            }
        }
    }
}

pub fn scale(instrument: &str) -> Vec<InstrumentScale> {
    let known = instrument == RUB;
    let scale = InstrumentScale {
        instrument_id: instrument.to_owned(),
        decimals: 0,
    };
    if known { Vec::new() } else { vec![scale] }
}

pub fn new_hold(user: &str, instrument: &str, value: &str) -> Hold {
    Hold {
        subaccount_id: format!("{user}:{instrument}"),
        amount: amount(instrument, value),
        reason: "test hold".to_owned(),
        ..Default::default()
    }
}

/// (debit, credit, amount, instrument)
pub type Leg<'a> = (&'a str, &'a str, &'a str, &'a str);

pub fn postings(legs: &[Leg]) -> Vec<Posting> {
    legs.iter()
        .map(|(debit, credit, value, instrument)| Posting {
            debit_subaccount_id: (*debit).to_owned(),
            credit_subaccount_id: (*credit).to_owned(),
            amount: amount(instrument, value),
            ..Default::default()
        })
        .collect()
}

pub fn operation(
    kind: OperationType,
    user: &str,
    key: &str,
    legs: &[Leg],
) -> CreateOperationRequest {
    CreateOperationRequest {
        context: write(key),
        operation: Some(Operation {
            r#type: kind as i32,
            user_id: user.to_owned(),
            ..Default::default()
        }),
        postings: postings(legs),
        ..Default::default()
    }
}

/// One operation of a batch, with its own key.
pub fn item(kind: OperationType, user: &str, key: &str, legs: &[Leg]) -> NewOperation {
    let request = operation(kind, user, key, legs);
    NewOperation {
        operation: request.operation.map(|operation| Operation {
            idempotency_key: key.to_owned(),
            ..operation
        }),
        postings: request.postings,
    }
}

#[track_caller]
pub fn refused<T: std::fmt::Debug>(answer: Answer<T>, code: tonic::Code, reason: &str, text: &str) {
    let status = answer.expect_err("is refused");
    assert_eq!(status.message(), text);
    assert_eq!(status.code(), code);
    assert_eq!(rpc::status::reason(&status).as_deref(), Some(reason));
}

pub fn is_replay<T>(response: &Response<T>) -> bool {
    response
        .metadata()
        .get("idempotent-replayed")
        .is_some_and(|value| value == "true")
}
