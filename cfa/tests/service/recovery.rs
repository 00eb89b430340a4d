//! Recovery after a crash and while the node is unavailable (T13).

use chain::{Action, Address, ReceiptStatus};
use events::{Event, Log, topics};
use prost::Message;
use proto::cfa::v1 as pb;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1::{OperationStatus, OperationType, RejectionReasonCode};
use proto::ledger::v1 as ledger_pb;

use crate::node::*;
use crate::trades::wait_batch;
use crate::world::*;

const DAY_US: i64 = 24 * 3_600 * 1_000_000;

/// Issues CFA-RUB for a payment of alice, which is paid.
async fn issue(world: &World, key: &str) -> pb::CfaOperation {
    let payment_id = format!("payment of {key}");
    world.double.paid(&payment_id, "alice", "100.00");
    let request = pb::IssueCfaRubRequest {
        context: context(key),
        user_id: "alice".into(),
        amount: roubles("100.00"),
        payment_id,
    };
    let issued = world.cfa.clone().issue_cfa_rub(request).await;
    let issued = issued.expect("a result").into_inner().operation;
    issued.expect("operation")
}

// rows: R047 R064
#[tokio::test(flavor = "multi_thread")]
async fn r047_operation_stays_in_processing_while_the_node_is_away() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::start(folder.path(), "127.0.0.1:0").await;
    let address = node.address.to_string();
    Node::share_key(folder.path());
    let settings = Settings {
        rpc_url: Some(format!("http://{address}")),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    node.stop().await;
    let stuck = issue(&world, "k-1").await;
    assert_eq!(
        (stuck.status(), stuck.onchain_tx_hash.as_str()),
        (OperationStatus::Processing, "")
    );
    let again = issue(&world, "k-1").await;
    assert_eq!(
        (again.operation_id.clone(), again.status()),
        (stuck.operation_id.clone(), OperationStatus::Processing)
    );
    let node = Node::start(folder.path(), &address).await;
    world.resume_operations().await;
    let sent = world.operation(&stuck.operation_id).await;
    assert_ne!(sent.onchain_tx_hash, "");
    assert_eq!(
        world.settle(&sent).await.status(),
        OperationStatus::Finalized
    );
    world.balance_becomes("alice:CFA-RUB", "100.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "100.00", "minted once");
    world.stop().await;
    node.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_transaction_lost_by_the_node_is_resent() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("bob", "1.00").await;
    world.stop_sealing().await;
    let sent = issue(&world, "k-1").await;
    assert_ne!(sent.status(), OperationStatus::Finalized);
    world.stop().await;
    // The node's pool was lost with its memory. The connector's store has the raw transaction.
    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    let resumed = world.operation(&sent.operation_id).await;
    assert_eq!(
        world.settle(&resumed).await.status(),
        OperationStatus::Finalized
    );
    world.balance_becomes("alice:CFA-RUB", "100.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "101.00");
    world.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_store_of_another_chain_is_refused_at_start() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "1.00").await;
    let token = world.instrument("CFA-RUB").await.smart_contract_address;
    world.stop().await;
    std::fs::remove_dir_all(folder.path().join("chain")).expect("removed");
    let refused = World::try_with(folder.path(), Settings::default()).await;
    let refused = refused.err().expect("its contracts are missing");
    let text = format!("no CFA-RUB contract at {token}: this store belongs to another chain");
    assert!(refused.to_string().contains(&text), "{refused}");
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_units_of_a_missing_contract_are_not_issued() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.deposit("alice", "1000.00").await;
    let missing = "UPDATE instrument SET contract_address = ? WHERE instrument_id = 'BOND-1'";
    let address = format!("0x{}", "11".repeat(20));
    alter_store_by(folder.path(), missing, &[&address]).await;
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    subscribed.expect("subscribed");
    let request = issue_request("BOND-1", "alice", "1", Some("1000.00"));
    let sent = world.cfa.issue_investment_cfa(request).await.expect("sent");
    let sent = sent.into_inner().operation.expect("operation");
    let ended = world.settle(&sent).await;
    assert_eq!(
        (ended.status(), ended.rejection_reason()),
        (
            OperationStatus::Rejected,
            RejectionReasonCode::IntegrationError
        )
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 1_000_00);
    let money = world.balance("alice:CFA-RUB").await;
    assert_eq!(
        (money.balance.to_string(), money.available.to_string()),
        ("1000.00".into(), "1000.00".into())
    );
    let units = world.balance("alice:BOND-1").await;
    assert!(units.balance.is_zero(), "{units:?}");
    assert_eq!(world.instrument("BOND-1").await.issued, decimal("0"));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_a_deposit_can_be_issued_again_after_the_node_refused_its_mint() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "1.00").await;
    gate.refuse(NO_COINS);
    let refused = issue(&world, "k-1").await;
    assert_eq!(refused.status(), OperationStatus::Processing);
    for _ in 0..3 {
        world.resume_operations().await;
    }
    let refused = world.operation(&refused.operation_id).await;
    assert_eq!(refused.status(), OperationStatus::Rejected);
    gate.pass();
    let request = pb::ResolveSuspendedDepositRequest {
        context: context(&key()),
        payment_id: "payment of k-1".into(),
        refund: false,
    };
    let again = world
        .cfa
        .resolve_suspended_deposit(request)
        .await
        .expect("tried again")
        .into_inner()
        .operation
        .expect("operation");
    assert_ne!(again.operation_id, refused.operation_id);
    assert_eq!(
        world.settle(&again).await.status(),
        OperationStatus::Finalized
    );
    assert_eq!(world.supply("CFA-RUB").await, "101.00");
    world.stop().await;
    node.stop().await;
}

// rows: R094
#[tokio::test(flavor = "multi_thread")]
async fn r094_a_batch_survives_refusals_of_the_node() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.deposit("alice", "1000.00").await;
    world.issue("BOND-1", "bob", "1").await;
    gate.refuse(NO_COINS);
    let request = pb::SettleTradesRequest {
        context: context(&key()),
        batch_id: "n1:1-1".into(),
        trades: vec![pb::TradeLeg {
            trade_id: "t-1".into(),
            instrument_id: "BOND-1".into(),
            trade_number: 1,
            buyer_id: "alice".into(),
            seller_id: "bob".into(),
            quantity: decimal("1"),
            payment: decimal("1000.00"),
            fee: decimal("0"),
        }],
    };
    // More attempts than any other retry limit allows.
    for _ in 0..5 {
        let refused = world
            .cfa
            .settle_trades(request.clone())
            .await
            .expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::Unavailable);
        world.resume_operations().await;
    }
    assert!(!world.service.health.failing().is_empty());
    gate.pass();
    world.cfa.settle_trades(request).await.expect("submitted");
    let batch = wait_batch(&mut world, "n1:1-1").await;
    assert_eq!(batch.status(), pb::TradeBatchStatus::Finalized);
    assert_eq!(batch.failed_trade_ids, Vec::<String>::new());
    assert_eq!(world.tokens("BOND-1", "alice").await, 1);
    assert!(world.service.health.failing().is_empty());
    world.stop().await;
    node.stop().await;
}

// rows: R030
#[tokio::test(flavor = "multi_thread")]
async fn r030_events_of_a_drafts_adopted_token_are_counted_once() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "1").await;
    let connector = world.connector();
    let token = world.deploy_token("BOND-2", |_| {}).await;
    // The node refuses the issuer's entry in the allow-list: the issue stays a draft.
    gate.refuse(NO_COINS);
    let activated = world.register(|request| {
        request.symbol = "BOND-2".into();
        request.issuer_id = "issuer-2".into();
        request.smart_contract_address = token.to_string();
    });
    activated.await.expect("left to the sweep");
    gate.pass();
    assert_eq!(
        world.instrument("BOND-2").await.status(),
        pb::InstrumentStatus::Draft
    );
    let mint = Action::Mint {
        token,
        to: Address::of_user("alice"),
        units: 5,
        id: Some("mint".into()),
    };
    let minted = connector.submit("mint", &mint.call()).await;
    let minted = minted.expect("submitted").tx_hash.to_string();
    assert_eq!(world.receipt(&minted).await.status, ReceiptStatus::Success);
    // The registry reads the block of the mint while the issue is a draft.
    let alice = |units: &str| [("alice".to_owned(), units.to_owned())];
    assert_eq!(world.holders("BOND-1").await, alice("1"));
    world.resume_operations().await;
    assert_eq!(
        world.instrument("BOND-2").await.status(),
        pb::InstrumentStatus::Active
    );
    assert_eq!(world.holders("BOND-2").await, alice("5"));
    world.stop().await;
    node.stop().await;
}

async fn start_redemption(
    mut cfa: CfaRegistryServiceClient<rpc::Channel>,
) -> Result<pb::IssueRedemption, tonic::Status> {
    let request = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let answer = cfa.start_redemption(request).await?;
    Ok(answer.into_inner().redemption.expect("redemption"))
}

/// Repeats StartRedemption of BOND-1 until its open operations are final.
async fn redeem_once_final(world: &World) -> Result<pb::IssueRedemption, tonic::Status> {
    let started = async {
        loop {
            match start_redemption(world.cfa.clone()).await {
                Err(status) if reason(&status) == "OPERATIONS_OPEN" => {}
                started => return started,
            }
        }
    };
    let started = tokio::time::timeout(WAIT, started).await;
    started.expect("the operations become final")
}

/// Posts a trade in the ledger whose batch the node refuses. Returns the call that sends it again.
async fn open_trade(world: &mut World, gate: &Gate) -> pb::SettleTradesRequest {
    world.deposit("alice", "1000.00").await;
    world.deposit("issuer", "3000.00").await;
    world.issue("BOND-1", "bob", "3").await;
    // The ledger posts first, as in settlement.
    let posting = |debit: &str, credit: &str, amount| ledger_pb::Posting {
        debit_subaccount_id: debit.into(),
        credit_subaccount_id: credit.into(),
        amount,
        ..Default::default()
    };
    let posted = ledger_pb::CreateOperationRequest {
        context: context("t-1"),
        operation: Some(ledger_pb::Operation {
            r#type: OperationType::TradeBuy.into(),
            user_id: "alice".into(),
            idempotency_key: "t-1".into(),
            external_ref: Some("t-1".into()),
            ..Default::default()
        }),
        postings: vec![
            posting("bob:BOND-1", "alice:BOND-1", amount("BOND-1", "1")),
            posting("alice:CFA-RUB", "bob:CFA-RUB", amount("CFA-RUB", "1000.00")),
        ],
        ..Default::default()
    };
    world.ledger.create_operation(posted).await.expect("posted");
    gate.refuse(NO_COINS);
    let trade = pb::SettleTradesRequest {
        context: context(&key()),
        batch_id: "n1:1-1".into(),
        trades: vec![pb::TradeLeg {
            trade_id: "t-1".into(),
            instrument_id: "BOND-1".into(),
            trade_number: 1,
            buyer_id: "alice".into(),
            seller_id: "bob".into(),
            quantity: decimal("1"),
            payment: decimal("1000.00"),
            fee: decimal("0"),
        }],
    };
    let kept = world.cfa.settle_trades(trade.clone()).await;
    kept.expect_err("the node refuses");
    trade
}

// rows: R098 R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_redemption_waits_for_units_in_flight() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let trade = open_trade(&mut world, &gate).await;
    let refused = start_redemption(world.cfa.clone()).await;
    let refused = refused.expect_err("a trade is open");
    assert_eq!(
        (refused.code(), reason(&refused).as_str()),
        (tonic::Code::FailedPrecondition, "OPERATIONS_OPEN")
    );
    let part = "redemption of BOND-1";
    assert_eq!(
        world.service.health.failing()[part],
        "waits for 1 open operations"
    );
    world.resume_operations().await;
    assert_eq!(
        world.service.health.failing()[part],
        "trading has stopped and no redemption is recorded: start it again"
    );
    // Trading has stopped, so that no further operation moves units.
    let transfer = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let buy_back = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "bob".into(),
        amount: amount("BOND-1", "1"),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let refused = [
        world.transfer(transfer).await.expect_err("stopped"),
        world
            .cfa
            .redeem_investment_cfa(buy_back)
            .await
            .expect_err("stopped"),
    ];
    for status in refused {
        assert_eq!(reason(&status), "INSTRUMENT_NOT_ACTIVE");
    }

    // Trading stopped on the record day; the trade settles three days after it.
    for statement in [
        "UPDATE instrument SET updated_at_us = updated_at_us - 259200000000",
        "UPDATE holding_history SET time_us = time_us - 259200000000",
    ] {
        alter_store(folder.path(), statement).await;
    }
    follow_history(folder.path()).await;
    world.turn_back_us(3 * DAY_US);
    gate.pass();
    world.cfa.settle_trades(trade).await.expect("submitted");
    let done = redeem_once_final(&world).await.expect("started");
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    assert!(!world.service.health.failing().contains_key(part));
    assert_eq!(
        (
            world.tokens("CFA-RUB", "alice").await,
            world.tokens("CFA-RUB", "bob").await
        ),
        (1_000_00, 3_000_00),
        "each holder is paid for the burned units"
    );
    world.stop().await;
    node.stop().await;
}

async fn trading_stops(mut cfa: CfaRegistryServiceClient<rpc::Channel>) {
    let stopped = async {
        loop {
            let request = pb::GetInstrumentRequest {
                context: None,
                instrument_id: "BOND-1".into(),
            };
            let answer = cfa.get_instrument(request).await.expect("found");
            let instrument = answer.into_inner().instrument.expect("instrument");
            if instrument.status() == pb::InstrumentStatus::Matured {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(WAIT, stopped).await.expect("stops");
}

// rows: R097 R099
#[tokio::test(flavor = "multi_thread")]
async fn r097_a_sweep_does_not_wait_for_units_in_flight() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: matures_at,
            nanos: 0,
        });
    });
    register.await.expect("registered");
    let trade = open_trade(&mut world, &gate).await;
    world.clock.advance_us(DAY_US / 24);
    let part = "redemption of BOND-1";
    let mut cfa = world.cfa.clone();
    let settled = async {
        trading_stops(cfa.clone()).await;
        // The sweep counts at once. If it waited for the trade, it would not count within 3 s.
        let counted = async {
            while !world.service.health.failing().contains_key(part) {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        let _ = tokio::time::timeout(std::time::Duration::from_secs(3), counted).await;
        gate.pass();
        cfa.settle_trades(trade).await.expect("submitted");
        let request = pb::GetTradeBatchRequest {
            context: None,
            batch_id: "n1:1-1".into(),
            wait_ms: 5_000,
        };
        let answer = cfa.get_trade_batch(request).await.expect("found");
        let batch = answer.into_inner().batch.expect("batch");
        assert_eq!(batch.status(), pb::TradeBatchStatus::Finalized);
    };
    // The trade becomes final after the sweep has counted open operations.
    tokio::join!(world.resume_operations(), settled);
    assert_eq!(
        world.service.health.failing()[part],
        "waits for 1 open operations"
    );
    let request = pb::GetRedemptionRequest {
        context: None,
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let none = world.cfa.get_redemption(request.clone()).await;
    assert_eq!(
        none.expect_err("not by this sweep").code(),
        tonic::Code::NotFound
    );
    world.resume_operations().await;
    let answer = world.cfa.get_redemption(request).await.expect("recorded");
    let redemption = answer.into_inner().redemption.expect("redemption");
    assert_eq!(redemption.status(), pb::RedemptionStatus::Finalized);
    assert!(!world.service.health.failing().contains_key(part));
    world.stop().await;
    node.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_units_issued_while_trading_stops_are_not_redeemed_without_payment() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world
        .register(|request| request.decimals = 18)
        .await
        .expect("registered");
    gate.refuse(NO_COINS);
    let dust = "0.000000000000000001";
    let request = issue_request("BOND-1", "alice", dust, None);
    let issued = world.cfa.issue_investment_cfa(request).await;
    let issued = issued.expect("a result").into_inner();
    let issued = issued.operation.expect("operation");
    // No holder before trading stops, one after.
    let redeeming = tokio::spawn(start_redemption(world.cfa.clone()));
    trading_stops(world.cfa.clone()).await;
    gate.pass();
    world.resume_operations().await;
    let issued = world.operation(&issued.operation_id).await;
    world.settle(&issued).await;
    let mut refused = redeeming.await.expect("joined").expect_err("refused");
    if reason(&refused) == "OPERATIONS_OPEN" {
        refused = redeem_once_final(&world).await.expect_err("refused");
    }
    assert_eq!(reason(&refused), "NOTHING_TO_PAY");
    let request = pb::GetRedemptionRequest {
        context: None,
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let none = world.cfa.get_redemption(request).await;
    assert_eq!(
        none.expect_err("none recorded").code(),
        tonic::Code::NotFound
    );
    assert_eq!(world.supply("BOND-1").await, dust);
    assert_eq!(
        world.balance("alice:BOND-1").await.available.to_string(),
        dust
    );
    world.stop().await;
    node.stop().await;
}

// rows: R234
#[tokio::test(flavor = "multi_thread")]
async fn r234_allow_list_request_and_confirmation_of_a_new_user_are_published() {
    let folder = tempfile::tempdir().expect("folder");
    let world = World::start(folder.path()).await;
    let created = proto::identity::v1::UserCreatedEvent {
        user_id: "nina".into(),
        ..Default::default()
    };
    let name = "dfa.identity.v1.UserCreatedEvent";
    let created = event(topics::IDENTITY, "nina", name, &created);
    // Published twice, as by a relay that crashed.
    let twice = [created.clone(), created];
    world.log.publish(&twice).await.expect("published");
    let confirmed = "UserOnchainRegistrationConfirmedEvent";
    let seen = world
        .events_until(topics::LEDGER, |event| event.short_type() == confirmed)
        .await;
    let of_nina: Vec<&Event> = seen.iter().filter(|event| event.key == "nina").collect();
    let names: Vec<&str> = of_nina.iter().map(|event| event.short_type()).collect();
    assert_eq!(names, ["UserOnchainRegistrationRequestedEvent", confirmed]);
    let requested = ledger_pb::UserOnchainRegistrationRequestedEvent::decode(&*of_nina[0].payload);
    let requested = requested.expect("decoded");
    let done = ledger_pb::UserOnchainRegistrationConfirmedEvent::decode(&*of_nina[1].payload);
    let done = done.expect("decoded");
    assert_eq!((&*requested.user_id, &*done.user_id), ("nina", "nina"));
    assert_eq!(
        (&requested.address, &requested.tx_hash),
        (&done.address, &done.tx_hash)
    );
    assert_eq!(requested.address, Address::of_user("nina").to_string());
    let receipt = world.receipt(&done.tx_hash).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    world.stop().await;
}
