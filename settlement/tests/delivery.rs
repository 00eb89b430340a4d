//! Delivery versus payment on the real chain: ledger, CFA service, contracts and devchain in
//! process. At the end every on-chain balance equals the ledger balance.

mod world;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use proof::{Part, Progress, ProofDeps, ProofOptions, prove};
use proto::cfa::v1 as cfa_wire;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1::{InstrumentType, KycStatus, OperationStatus};
use proto::convert::{to_monetary_amount_minor, to_money};
use proto::identity::v1::CreateUserRequest;
use proto::identity::v1::identity_service_client::IdentityServiceClient;
use proto::ledger::v1 as ledger_wire;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use rand::Rng;
use settlement::trading_state::amount;
use settlement::{SettlementConfig, SettlementDeps};
use tokio_util::sync::CancellationToken;
use types::*;
use world::journalled::Journalled;
use world::services::context;
use world::{FUNDED, INSTRUMENTS, Market, USERS, in_time, node};

const PATIENCE: Duration = Duration::from_secs(120);
const CREDENTIAL: &str = "sandbox.service";

/// Options of a proof that records its progress.
fn with_progress() -> (ProofOptions, Arc<Mutex<Vec<Progress>>>) {
    let seen: Arc<Mutex<Vec<Progress>>> = Arc::default();
    let recorded = seen.clone();
    let options = ProofOptions {
        progress: Arc::new(move |progress| recorded.lock().unwrap().push(progress)),
        ..ProofOptions::default()
    };
    (options, seen)
}

/// Credits 0.01 to `user-0` in the ledger alone. Returns the operation.
async fn forge(ledger: &rpc::Channel, key: &str, unsettled: bool) -> String {
    LedgerServiceClient::new(ledger.clone())
        .create_operation(ledger_wire::CreateOperationRequest {
            context: context(key),
            operation: Some(ledger_wire::Operation {
                r#type: proto::common::v1::OperationType::Deposit.into(),
                user_id: "user-0".into(),
                awaits_chain: unsettled,
                ..Default::default()
            }),
            postings: vec![ledger_wire::Posting {
                debit_subaccount_id: "system:reserve:CFA-RUB".into(),
                credit_subaccount_id: "user-0:CFA-RUB".into(),
                amount: Some(to_monetary_amount_minor("CFA-RUB", 1, 2)),
                unsettled,
                ..Default::default()
            }],
            ..Default::default()
        })
        .await
        .unwrap()
        .into_inner()
        .operation
        .unwrap()
        .operation_id
}

/// Asserts that a proof without a bank reported supplies, ledger and chain
/// holders, with counts that reach all instruments and users and never decrease within a reading.
fn assert_progress(seen: &[Progress]) {
    let reads = seen.iter().filter_map(|progress| match progress {
        Progress::Reads(counts) => Some(*counts),
        Progress::Repeats { .. } => None,
    });
    let reads: Vec<_> = reads.collect();
    let parts: Vec<_> = reads.iter().map(|counts| counts.part).collect();
    assert_eq!(parts.first(), Some(&Part::ChainSupply));
    assert!(parts.contains(&Part::LedgerHolders), "{parts:?}");
    assert!(parts.contains(&Part::ChainHolders), "{parts:?}");
    assert!(!parts.contains(&Part::Bank), "{parts:?}");
    for pair in reads
        .windows(2)
        .filter(|pair| pair[0].reading == pair[1].reading)
    {
        assert!(pair[0].instruments <= pair[1].instruments, "{pair:?}");
        assert!(pair[0].ledger_holders <= pair[1].ledger_holders, "{pair:?}");
        assert!(pair[0].chain_holders <= pair[1].chain_holders, "{pair:?}");
    }
    let last = reads.last().expect("progress");
    let total = last.instruments_total;
    assert!(reads.iter().all(|counts| counts.instruments_total == total));
    assert_eq!(last.instruments, total, "{last:?}");
    let holders = 3 * USERS as usize;
    assert!(last.ledger_holders >= holders, "{last:?}");
    assert!(last.chain_holders >= holders, "{last:?}");
}

struct Services {
    ledger: rpc::Channel,
    cfa: rpc::Channel,
    identity: rpc::Channel,
    ca: sandbox::bank::Ca,
    payments: Arc<testkit::ServiceDoubles>,
    log: Arc<dyn events::Log>,
    token: CancellationToken,
    _slots: Vec<rpc::LocalSlot>,
}

impl Services {
    async fn start(folder: &std::path::Path) -> Self {
        let token = CancellationToken::new();
        let auth = rpc::Authenticator::Sandbox;
        let log: Arc<dyn events::Log> =
            Arc::new(events::Embedded::open(folder.join("events")).await.unwrap());
        let slots: Vec<_> = (0..4).map(|_| rpc::LocalSlot::new()).collect();
        let channel = |at: usize| rpc::Channel::local(&slots[at], CREDENTIAL);
        let chain_config = chain::ChainConfig {
            data_dir: folder.join("chain"),
            ..Default::default()
        };
        let chain = chain::start_chain(
            chain_config,
            chain::ChainDeps { log: log.clone() },
            token.clone(),
        )
        .await
        .unwrap();
        let ledger_config = ledger::LedgerConfig {
            data_dir: folder.join("ledger"),
            ..Default::default()
        };
        let ledger = ledger::start(
            ledger_config,
            ledger::LedgerDeps::new(log.clone(), channel(2)),
            token.clone(),
        )
        .await
        .unwrap();
        slots[0].fill(rpc::with_auth(ledger.service().routes, &auth));
        let identity_config = sandbox::identity::IdentityConfig {
            data_dir: folder.join("identity"),
            trading_daily: "1000000000".into(),
            ..Default::default()
        };
        let identity = sandbox::identity::start(
            identity_config,
            sandbox::identity::IdentityDeps { log: log.clone() },
            token.clone(),
        )
        .await
        .unwrap();
        slots[1].fill(rpc::with_auth(identity.service().routes, &auth));
        let payments = Arc::new(testkit::ServiceDoubles::default());
        slots[3].fill(rpc::with_auth(payments.routes(), &auth));
        let cfa_deps = cfa::CfaDeps {
            log: log.clone(),
            ledger: channel(0),
            payments: channel(3),
            identity: channel(1),
            market: rpc::Channel::local(&rpc::LocalSlot::new(), "sandbox.service"),
            audited: Vec::new(),
            chain: chain.connector(),
            clock: cfa::Clock::default(),
        };
        let keys = folder.join("keys");
        let ca = sandbox::bank::Ca::open(&keys).unwrap();
        let cfa_config = cfa::CfaConfig {
            data_dir: folder.join("cfa"),
            ca_file: Some(keys.join("ca.pem")),
            ..Default::default()
        };
        let cfa = cfa::start(cfa_config, cfa_deps, token.clone())
            .await
            .unwrap();
        slots[2].fill(rpc::with_auth(cfa.service().routes, &auth));
        Self {
            ledger: channel(0),
            cfa: channel(2),
            identity: channel(1),
            ca,
            payments,
            log,
            token,
            _slots: slots,
        }
    }

    async fn user(&self, user_id: &str) {
        IdentityServiceClient::new(self.identity.clone())
            .create_user(CreateUserRequest {
                context: context(&format!("user-{user_id}")),
                user_id: user_id.to_owned(),
                kyc_status: KycStatus::Standard.into(),
                ..Default::default()
            })
            .await
            .unwrap();
    }

    /// Issues the market's instruments and every user's money and units on the chain.
    async fn issue(&self, market: &Market) {
        let mut cfa = CfaRegistryServiceClient::new(self.cfa.clone());
        self.user("issuer-1").await;
        for ix in 0..INSTRUMENTS {
            let spec = market.names().instrument(InstrumentIx(ix));
            cfa.register_instrument(cfa_wire::RegisterInstrumentRequest {
                context: context(&format!("register-{ix}")),
                symbol: spec.id.to_string(),
                name: format!("Bond {ix}"),
                r#type: InstrumentType::CfaBond.into(),
                decimals: spec.decimals.into(),
                issuer_id: "issuer-1".into(),
                currency_code: "RUB".into(),
                ..Default::default()
            })
            .await
            .unwrap();
            // A document decides on one issue.
            let document = [u8::try_from(ix).unwrap(); 32];
            let document_hash = format!("{ix:02x}").repeat(32);
            let signature = self.ca.sign("issuer-1", &document).unwrap();
            cfa.sign_issue_decision(cfa_wire::SignIssueDecisionRequest {
                context: context(&format!("sign-{ix}")),
                instrument_id: spec.id.to_string(),
                document_hash: document_hash.clone(),
                signature: signature.into(),
                ..Default::default()
            })
            .await
            .unwrap();
            cfa.activate_instrument(cfa_wire::ActivateInstrumentRequest {
                context: context(&format!("activate-{ix}")),
                instrument_id: spec.id.to_string(),
                document_hash,
            })
            .await
            .unwrap();
        }
        for user in 0..USERS {
            let user_id = format!("user-{user}");
            self.user(&user_id).await;
            let payment_id = format!("payment-{user}");
            self.payments.paid(
                &payment_id,
                &user_id,
                &Decimal::from_minor(FUNDED, 2).to_string(),
            );
            cfa.issue_cfa_rub(cfa_wire::IssueCfaRubRequest {
                context: context(&format!("issue-{user}")),
                user_id: user_id.clone(),
                amount: Some(to_money(FUNDED)),
                payment_id,
            })
            .await
            .unwrap();
            for ix in 0..INSTRUMENTS {
                let spec = market.names().instrument(InstrumentIx(ix));
                cfa.issue_investment_cfa(cfa_wire::IssueInvestmentCfaRequest {
                    context: context(&format!("issue-{user}-{ix}")),
                    instrument_id: spec.id.to_string(),
                    investor_id: user_id.clone(),
                    amount: Some(to_monetary_amount_minor(
                        spec.id.as_str(),
                        FUNDED,
                        spec.decimals,
                    )),
                    bookbuilding_id: format!("book-{user}-{ix}"),
                    payment: None,
                })
                .await
                .unwrap();
            }
        }
    }

    async fn available(&self, subaccount_id: &str) -> Option<Decimal> {
        let request = ledger_wire::GetBalanceRequest {
            subaccount_id: subaccount_id.to_owned(),
            ..Default::default()
        };
        let answer = LedgerServiceClient::new(self.ledger.clone())
            .get_balance(request)
            .await
            .ok()?
            .into_inner();
        answer.available?.value.parse().ok()
    }

    /// Opens the trading holds of the market's Fund commands once the money has arrived.
    async fn open_holds(&self, market: &Market) {
        for record in &market.records {
            let Command::Fund(fund) = &record.command.command else {
                continue;
            };
            let amount = amount(market.names(), fund.asset, fund.amount_minor);
            let subaccount_id = format!("{}:{}", market.names().user(fund.user), amount.instrument);
            while self.available(&subaccount_id).await != Some(amount.decimal()) {
                tokio::task::yield_now().await;
            }
            LedgerServiceClient::new(self.ledger.clone())
                .create_hold(ledger_wire::CreateHoldRequest {
                    context: context(&format!("hold-{}", fund.hold)),
                    hold: Some(ledger_wire::Hold {
                        hold_id: fund.hold_id.to_string(),
                        subaccount_id,
                        amount: Some(to_monetary_amount_minor(
                            amount.instrument.as_str(),
                            amount.minor.0,
                            amount.decimals,
                        )),
                        reason: format!("Trading hold {}", fund.hold_id),
                        owner: "market".into(),
                        ..Default::default()
                    }),
                })
                .await
                .unwrap();
        }
    }
}

fn trades_with_itself(market: &Market, record: &world::Record) -> bool {
    let user_of = |handle: Handle| {
        market
            .records
            .iter()
            .find_map(|r| match &r.command.command {
                Command::New(new) if new.handle == handle => Some(new.user),
                _ => None,
            })
    };
    record.events.iter().any(|e| match &e.event {
        Event::Trade(trade) => user_of(trade.maker) == user_of(trade.taker),
        _ => false,
    })
}

// rows: R182 R184 R186 R187 R188
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r187_both_legs_of_every_trade_are_on_chain_as_in_the_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let services = Services::start(folder.path()).await;
    let mut market = Market::new(21);
    services.issue(&market).await;
    if tokio::time::timeout(PATIENCE, services.open_holds(&market))
        .await
        .is_err()
    {
        let request = cfa_wire::ListOperationsRequest::default();
        let operations = CfaRegistryServiceClient::new(services.cfa.clone())
            .list_operations(request)
            .await;
        panic!(
            "issued assets did not all arrive: {:#?}",
            operations.unwrap().into_inner().operations
        );
    }
    // Members may trade with themselves: such a trade must not delay the others.
    market.stp = StpMode::None;
    for _ in 0..150 {
        let (user, ix) = (
            market.rng.random_range(0..USERS),
            market.rng.random_range(0..INSTRUMENTS),
        );
        let side = if market.rng.random() {
            Side::Buy
        } else {
            Side::Sell
        };
        let (price, quantity) = (
            market.rng.random_range(95..=105),
            market.rng.random_range(1..=60),
        );
        market.order(user, ix, side, price, quantity, TimeInForce::Gtc);
    }
    let own = market
        .records
        .iter()
        .filter(|r| trades_with_itself(&market, r))
        .count();
    assert!(own > 5, "{own}");
    let journal = Journalled::open(folder.path(), Arc::default()).unwrap();
    journal.feed(&market.records);
    let settlement = settlement::start(
        SettlementConfig {
            data_dir: folder.path().join("settlement"),
            batch_trades_max: 25,
            wait_ms: 50,
            ..SettlementConfig::default()
        },
        SettlementDeps {
            replica: journal.replica(),
            durable: sequencer::Durable::new("settlement"),
            backlog: Arc::default(),
            journal: world::services::journal_double().0,
            ledger: services.ledger.clone(),
            cfa: services.cfa.clone(),
            log: services.log.clone(),
        },
        services.token.clone(),
    )
    .await
    .unwrap();
    tokio::time::timeout(PATIENCE, settlement.drained(market.position()))
        .await
        .unwrap_or_else(|_| panic!("not drained: {:?}", settlement.stats()));
    let stats = settlement.stats();
    assert_eq!(
        (stats.trades_failed, stats.trades_settled),
        (0, market.trades())
    );
    assert!(stats.trades_settled > 50);

    // One CFA operation per trade, with the trade's id, all final (R182).
    let trade = market
        .records
        .iter()
        .flat_map(|r| &r.events)
        .find(|e| matches!(e.event, Event::Trade(_)))
        .unwrap()
        .trade_uuid(node())
        .to_string();
    let operations = CfaRegistryServiceClient::new(services.cfa.clone())
        .list_operations(cfa_wire::ListOperationsRequest {
            external_ref: trade.clone(),
            ..Default::default()
        })
        .await
        .unwrap()
        .into_inner()
        .operations;
    assert_eq!(operations.len(), 1);
    assert_eq!(operations[0].status(), OperationStatus::Finalized);
    assert_eq!(operations[0].trade_id, trade);

    let deps = ProofDeps {
        ledger: services.ledger.clone(),
        cfa: services.cfa.clone(),
        payments: None,
    };
    let (options, seen) = with_progress();
    let proof = prove(&deps, options).await.unwrap();
    assert!(proof.ok, "{:#?}", proof.differences);
    assert_progress(&seen.lock().unwrap());
    assert_eq!(proof.instruments.len(), 3);
    for instrument in &proof.instruments {
        assert_eq!(
            instrument.trial_balance.parse::<Decimal>().unwrap(),
            Decimal::from_integer(0)
        );
        assert_eq!(
            instrument.unsettled.parse::<Decimal>().unwrap(),
            Decimal::from_integer(0)
        );
        assert!(instrument.holders.len() >= USERS as usize);
    }

    // A difference is detected: the ledger has units that the chain does not know.
    forge(&services.ledger, "forged", false).await;
    let impatient = ProofOptions {
        readings_max: 1,
        pause_ms: 0,
        settling_wait: Duration::ZERO,
        ..ProofOptions::default()
    };
    let proof = prove(&deps, impatient.clone()).await.unwrap();
    assert!(!proof.ok && !proof.is_settling);
    assert_eq!(proof.readings, 1);
    let named: Vec<_> = proof
        .differences
        .iter()
        .map(|d| (d.holder.as_str(), d.difference.as_str()))
        .collect();
    assert_eq!(named, vec![("", "-0.01"), ("user-0", "-0.01")]);

    // While a credit awaits the chain, readings do not count, unless the wait for it is over.
    let unsettled = forge(&services.ledger, "unsettled", true).await;
    let proof = prove(&deps, impatient.clone()).await.unwrap();
    assert!(!proof.ok && proof.is_settling);
    assert_eq!(proof.readings, 1);
    let (repeats, mut repeated) = tokio::sync::mpsc::channel(1);
    let patient = ProofOptions {
        pause_ms: 10,
        settling_wait: PATIENCE,
        progress: Arc::new(move |progress| {
            if let Progress::Repeats { is_settling, .. } = progress {
                let _ = repeats.try_send(is_settling);
            }
        }),
        ..impatient
    };
    let finalized = async {
        for _ in 0..2 {
            assert_eq!(repeated.recv().await, Some(true));
        }
        let request = ledger_wire::FinalizeOperationRequest {
            context: context("finalized"),
            operation_id: unsettled,
            onchain_tx_hash: testkit::messages::tx_hash("finalized"),
        };
        LedgerServiceClient::new(services.ledger.clone())
            .finalize_operation(request)
            .await
            .unwrap();
    };
    let (proof, ()) = in_time("a proof", async {
        tokio::join!(prove(&deps, patient), finalized)
    })
    .await;
    let proof = proof.unwrap();
    assert!(!proof.ok && !proof.is_settling);
    assert!(proof.readings > 2, "{}", proof.readings);

    services.token.cancel();
    in_time("settlement's stop", settlement.stopped()).await;
}
