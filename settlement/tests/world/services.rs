//! The real ledger in process, with a chain double that survives a killed process.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use proto::common::v1::MonetaryAmount;
use proto::ledger::v1 as wire;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::settlement::v1::settlement_service_client::SettlementServiceClient;
use replica::{Names, Replica, ReplicaError};
use sequencer::{Backlog, Durable, SubmitError};
use settlement::trading_state::amount;
use settlement::{JournalPort, SettlementConfig, SettlementDeps, SettlementHandle};
use testkit::Registry;
use tokio_util::sync::CancellationToken;
use types::{Command, Decimal};

use super::journalled::Journalled;
use super::{Market, Record, in_time};

/// Commands that settlement submitted to the journal.
pub type Submitted = Arc<Mutex<Vec<Command>>>;

/// A client of settlement's calls, and what serves it.
pub type Operators = (SettlementServiceClient<rpc::Channel>, rpc::LocalSlot);

/// A journal port that accepts every command, and the list of them.
pub fn journal_double() -> (JournalPort, Submitted) {
    journal_of_busy_engines(Arc::default())
}

/// The same, but mass cancels fail while the engines are busy.
pub fn journal_of_busy_engines(are_busy: Arc<AtomicBool>) -> (JournalPort, Submitted) {
    let submitted = Submitted::default();
    let noted = submitted.clone();
    let port: JournalPort = Arc::new(move |command| {
        let is_cancel = matches!(command, Command::MassCancel(_));
        let answer = match is_cancel && are_busy.load(Ordering::SeqCst) {
            true => Err(SubmitError::Busy),
            false => {
                noted.lock().unwrap().push(command);
                Ok(None)
            }
        };
        Box::pin(std::future::ready(answer))
    });
    (port, submitted)
}

/// Ledger, chain double and settlement over one folder.
pub struct Platform {
    pub chain: Arc<Registry>,
    pub ledger: LedgerServiceClient<rpc::Channel>,
    pub settlement: SettlementHandle,
    pub backlog: Arc<Backlog>,
    /// Commands that settlement submitted to the journal, in order.
    pub submitted: Submitted,
    /// `None` if the test has a node of its own.
    journal: Option<Journalled>,
    ledger_handle: ledger::LedgerHandle,
    ledger_slot: rpc::LocalSlot,
    stop_ledger: CancellationToken,
    stop_settlement: CancellationToken,
}

pub fn config(folder: &Path) -> SettlementConfig {
    SettlementConfig {
        data_dir: folder.join("settlement"),
        batch_trades_max: 20,
        batch_rows_max: 200,
        linger_ms: 0,
        wait_ms: 20,
        check_batches: 2,
        short_ms: 10,
        refused_retry_ms: 20,
        ..SettlementConfig::default()
    }
}

/// Opens settlement's store.
pub async fn store(folder: &Path) -> sqlx::SqliteConnection {
    let file = config(folder).data_dir.join("settlement.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(file);
    let opening = <sqlx::SqliteConnection as sqlx::Connection>::connect_with(&options);
    opening.await.unwrap()
}

impl Platform {
    /// Starts ledger, replica and settlement over a journal, after appending the missing records.
    pub async fn start(folder: &Path, config: SettlementConfig, records: &[Record]) -> Self {
        Self::try_start(folder, config, records).await.unwrap()
    }

    /// Like [`Platform::start`], but returns the replica's error.
    ///
    /// # Errors
    /// The replica does not start.
    pub async fn try_start(
        folder: &Path,
        config: SettlementConfig,
        records: &[Record],
    ) -> Result<Self, ReplicaError> {
        Self::start_on(folder, config, records, journal_double()).await
    }

    /// Like [`Platform::start`], with a journal port for settlement's commands.
    ///
    /// # Errors
    /// The replica does not start.
    pub async fn start_on(
        folder: &Path,
        config: SettlementConfig,
        records: &[Record],
        (port, submitted): (JournalPort, Submitted),
    ) -> Result<Self, ReplicaError> {
        let backlog = Arc::<Backlog>::default();
        let journal = Journalled::open(folder, backlog.clone())?;
        journal.feed(records);
        let mut platform = Self::over(folder, config, journal.replica(), backlog, port).await;
        (platform.journal, platform.submitted) = (Some(journal), submitted);
        Ok(platform)
    }

    /// Like [`Platform::start`], over any replica.
    pub async fn over(
        folder: &Path,
        config: SettlementConfig,
        replica: Replica,
        backlog: Arc<Backlog>,
        journal: JournalPort,
    ) -> Self {
        let log: Arc<dyn events::Log> =
            Arc::new(events::Embedded::open(folder.join("events")).await.unwrap());
        let stop_ledger = CancellationToken::new();
        let stop_settlement = CancellationToken::new();
        let ledger_config = ledger::LedgerConfig {
            data_dir: folder.join("ledger"),
            ..Default::default()
        };
        let (ledger_slot, cfa_slot) = (rpc::LocalSlot::new(), rpc::LocalSlot::new());
        let cfa_channel = rpc::Channel::local(&cfa_slot, "sandbox.service");
        let ledger_handle = ledger::start(
            ledger_config,
            ledger::LedgerDeps::new(log.clone(), cfa_channel),
            stop_ledger.clone(),
        )
        .await
        .unwrap();
        let auth = rpc::Authenticator::Sandbox;
        ledger_slot.fill(rpc::with_auth(ledger_handle.service().routes, &auth));
        let chain = Registry::open(folder);
        cfa_slot.fill(rpc::with_auth(chain.routes(), &auth));
        let channel = rpc::Channel::local(&ledger_slot, "sandbox.service");
        let deps = SettlementDeps {
            replica,
            durable: Durable::new("settlement"),
            backlog: backlog.clone(),
            journal,
            ledger: channel.clone(),
            cfa: rpc::Channel::local(&cfa_slot, "sandbox.service"),
            log,
        };
        let settlement = settlement::start(config, deps, stop_settlement.clone());
        Self {
            chain,
            ledger: LedgerServiceClient::new(channel),
            settlement: settlement.await.unwrap(),
            backlog,
            submitted: Submitted::default(),
            journal: None,
            ledger_handle,
            ledger_slot,
            stop_ledger,
            stop_settlement,
        }
    }

    /// Deposits and blocks the market users' assets, as the gateway does before it journals a Fund.
    /// Idempotent.
    pub async fn fund(&mut self, market: &Market) {
        for record in &market.records {
            self.fund_one(market.names(), &record.command.command).await;
        }
    }

    /// The same for one command.
    pub async fn fund_one(&mut self, names: &Names, command: &Command) {
        if let Command::Fund(fund) = command {
            let user = names.user(fund.user);
            let amount = amount(names, fund.asset, fund.amount_minor);
            let instrument = amount.instrument.to_string();
            let money = Some(MonetaryAmount {
                currency_code: instrument.clone(),
                amount: Some(proto::convert::to_decimal(amount.decimal())),
            });
            let subaccount = format!("{user}:{instrument}");
            self.ledger
                .create_operation(wire::CreateOperationRequest {
                    context: context(&format!("deposit-{}", fund.hold)),
                    operation: Some(wire::Operation {
                        r#type: proto::common::v1::OperationType::Deposit.into(),
                        user_id: user.to_string(),
                        ..Default::default()
                    }),
                    postings: vec![wire::Posting {
                        debit_subaccount_id: format!("system:reserve:{instrument}"),
                        credit_subaccount_id: subaccount.clone(),
                        amount: money.clone(),
                        ..Default::default()
                    }],
                    instrument_scales: vec![wire::InstrumentScale {
                        instrument_id: instrument,
                        decimals: amount.decimals.into(),
                    }],
                })
                .await
                .unwrap();
            self.ledger
                .create_hold(wire::CreateHoldRequest {
                    context: context(&format!("hold-{}", fund.hold)),
                    hold: Some(wire::Hold {
                        hold_id: fund.hold_id.to_string(),
                        subaccount_id: subaccount,
                        amount: money,
                        reason: format!("Trading hold {}", fund.hold_id),
                        owner: "market".into(),
                        ..Default::default()
                    }),
                })
                .await
                .unwrap();
        }
    }

    /// Settlement's calls, also those that take two persons (D32).
    pub fn operators(&self) -> Operators {
        let slot = testkit::in_memory(self.settlement.service().routes);
        let channel = rpc::Channel::local(&slot, testkit::APPROVED);
        (SettlementServiceClient::new(channel), slot)
    }

    /// Creates an operation under the trade's reference, so the ledger refuses the trade for good.
    pub async fn occupy(&mut self, trade: &str) {
        self.ledger
            .create_operation(wire::CreateOperationRequest {
                context: context(&format!("occupy-{trade}")),
                operation: Some(wire::Operation {
                    r#type: proto::common::v1::OperationType::TradeBuy.into(),
                    user_id: "user-5".into(),
                    external_ref: Some(trade.into()),
                    ..Default::default()
                }),
                postings: vec![wire::Posting {
                    debit_subaccount_id: "system:reserve:CFA-RUB".into(),
                    credit_subaccount_id: "user-5:CFA-RUB".into(),
                    amount: Some(proto::convert::to_monetary_amount_minor("CFA-RUB", 1, 2)),
                    ..Default::default()
                }],
                instrument_scales: Vec::new(),
            })
            .await
            .unwrap();
    }

    /// Whether settlement has submitted a command.
    pub fn has_submitted(&self, command: Command) -> bool {
        self.submitted.lock().unwrap().contains(&command)
    }

    /// Waits until settlement has journalled that everything up to `sequence` is final.
    pub async fn reported(&self, sequence: types::Sequence) {
        let is_final = |command: &Command| match command {
            Command::Settled(settled) => settled.finalized >= sequence,
            _ => false,
        };
        let waiting = async {
            while !self.submitted.lock().unwrap().iter().any(is_final) {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(testkit::PATIENCE, waiting).await;
        waited.unwrap_or_else(|_| panic!("not reported: {:?}", self.submitted.lock().unwrap()));
    }

    /// Whether settlement has journalled that a trade is bust.
    pub fn is_bust(&self, trade: &str) -> bool {
        let trade = types::Id128::parse(trade).expect("a public id");
        let is_same =
            |command: &Command| matches!(command, Command::Bust(bust) if bust.trade == trade);
        self.submitted.lock().unwrap().iter().any(is_same)
    }

    pub fn feed(&self, records: &[Record]) {
        let journal = self.journal.as_ref().expect("its own journal");
        journal.feed(records);
    }

    pub async fn operation(&mut self, key: &str) -> Option<(wire::Operation, Vec<wire::Posting>)> {
        let request = wire::ListOperationsRequest {
            idempotency_key: key.to_owned(),
            ..Default::default()
        };
        let found = self
            .ledger
            .list_operations(request)
            .await
            .unwrap()
            .into_inner()
            .operations;
        assert!(found.len() <= 1, "{key} names {} operations", found.len());
        let operation_id = found.first()?.operation_id.clone();
        let request = wire::GetOperationRequest {
            operation_id,
            ..Default::default()
        };
        let answer = self
            .ledger
            .get_operation(request)
            .await
            .unwrap()
            .into_inner();
        Some((answer.operation.unwrap(), answer.postings))
    }

    pub async fn hold(&mut self, id: types::Id128) -> wire::Hold {
        let request = wire::GetHoldRequest {
            hold_id: id.to_string(),
            ..Default::default()
        };
        self.ledger
            .get_hold(request)
            .await
            .unwrap()
            .into_inner()
            .hold
            .unwrap()
    }

    /// Balance, held, unsettled and available.
    pub async fn balance(&mut self, subaccount_id: &str) -> [String; 4] {
        let request = wire::GetBalanceRequest {
            subaccount_id: subaccount_id.to_owned(),
            ..Default::default()
        };
        let b = self.ledger.get_balance(request).await.unwrap().into_inner();
        [b.balance, b.held, b.unsettled, b.available].map(|d| d.unwrap().value)
    }

    /// Asserts that the sum of every instrument is zero.
    pub async fn assert_zero_sum(&mut self) {
        let lines = self
            .ledger
            .get_trial_balance(wire::GetTrialBalanceRequest::default())
            .await
            .unwrap()
            .into_inner()
            .lines;
        assert!(!lines.is_empty());
        for line in lines {
            let total: Decimal = line.total.unwrap().value.parse().unwrap();
            assert!(total.is_zero(), "{} sums to {total}", line.instrument_id);
        }
    }

    /// Asserts the invariant of `design.md` 4 for every hold, and that nothing is unsettled.
    pub async fn assert_agrees(&mut self, market: &Market) {
        let mut totals: BTreeMap<String, Decimal> = BTreeMap::new();
        let mut page_token = String::new();
        loop {
            let request = wire::ListHoldsRequest {
                status: wire::HoldStatus::Active.into(),
                owner: "market".into(),
                pagination: Some(proto::common::v1::PaginationRequest {
                    page_size: 1_000,
                    page_token,
                }),
                ..Default::default()
            };
            let page = self.ledger.list_holds(request).await.unwrap().into_inner();
            for hold in page.holds {
                let of = hold.parent_hold_id.unwrap_or(hold.hold_id);
                let left = proto::convert::decimal(hold.remaining_amount.unwrap().amount.as_ref())
                    .unwrap();
                let total = totals.entry(of).or_insert(Decimal::from_integer(0));
                *total = total.checked_add(left).unwrap();
            }
            page_token = page.pagination.unwrap_or_default().next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        for (ix, hold) in market.trading_state().holds() {
            let found = totals
                .get(&hold.hold_id.to_string())
                .copied()
                .unwrap_or(Decimal::from_integer(0));
            let expected = amount(market.names(), hold.asset, hold.held).decimal();
            assert_eq!(found, expected, "hold {ix}");
        }
        self.assert_zero_sum().await;
    }

    /// Stops settlement at its current step, and the ledger.
    pub async fn stop(self) {
        self.stop_settlement.cancel();
        in_time("settlement's stop", self.settlement.stopped()).await;
        drop(self.journal);
        self.ledger_slot.clear();
        drop(self.ledger);
        self.stop_ledger.cancel();
        in_time("the ledger's stop", self.ledger_handle.stopped()).await;
    }
}

pub use testkit::messages::context;
