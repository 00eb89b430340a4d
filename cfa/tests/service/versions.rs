//! The platform's contracts at the start. A data folder with contracts of version 1 works on: its
//! contracts stay, and new issues get tokens of version 2.

use std::path::Path;
use std::sync::Arc;

use chain::contracts::Call;
use chain::{
    Action, Address, ChainConfig, ChainDeps, Connector, ReceiptStatus, RoleSet, TokenCode, Version,
    start_chain,
};
use proto::cfa::v1 as pb;
use proto::common::v1::OperationStatus;
use tokio_util::sync::CancellationToken;

use crate::redeem::redeem;
use crate::world::*;

async fn done(connector: &Connector, key: &str, action: &Action) -> Option<Address> {
    let submitted = connector.submit(key, &action.call()).await;
    let hash = submitted.expect("submitted").tx_hash;
    let receipt = connector.wait_receipt(&hash, WAIT).await;
    let receipt = receipt.expect("read").expect("in a block");
    assert_eq!(receipt.status, ReceiptStatus::Success, "{action:?}");
    receipt.contract_address
}

/// Contracts of version 1, deployed as former versions of the service did.
struct Former {
    registry: Address,
    money: Address,
    settlement: Address,
    redemption: Address,
}

async fn deploy_former(connector: &Connector) -> Former {
    let deploy = async |name: &str, action: Action| {
        let address = done(connector, &format!("bootstrap:{name}"), &action).await;
        address.expect("a deployment")
    };
    let registry = deploy("registry", Action::DeployRegistry).await;
    let token = Action::DeployTokenV1 {
        name: "Digital rouble claim".into(),
        symbol: "CFA-RUB".into(),
        decimals: 2,
        registry,
        agents: Vec::new(),
    };
    let money = deploy("money", token).await;
    let fee_account = Address::of_user("system:fees");
    let settlement = Action::DeploySettlement { money, fee_account };
    let settlement = deploy("settlement", settlement).await;
    let redemption = deploy("redemption", Action::DeployRedemption { money }).await;
    for agent in [settlement, redemption] {
        let add = Action::AddAgent {
            contract: money,
            agent,
        };
        done(connector, &format!("agent:{agent}"), &add).await;
    }
    let accounts = Action::RegisterIdentities {
        registry,
        accounts: vec![fee_account, Address::of_user("system:redemption")],
    };
    done(connector, "bootstrap:house-accounts", &accounts).await;
    Former {
        registry,
        money,
        settlement,
        redemption,
    }
}

/// Replaces the contracts of the first start by those of version 1.
async fn make_former(folder: &Path) -> Former {
    let world = World::start(folder).await;
    let former = deploy_former(&world.connector()).await;
    world.stop().await;
    let Former {
        registry,
        money,
        settlement,
        redemption,
    } = &former;
    let stored = serde_json::json!({
        "registry": registry.to_string(), "money": money.to_string(),
        "settlement": settlement.to_string(), "redemption": redemption.to_string(),
    });
    let setting = "UPDATE setting SET value = $1 WHERE name = 'contracts'";
    alter_store_by(folder, setting, &[&stored.to_string()]).await;
    let token = "UPDATE instrument SET contract_address = $1 WHERE instrument_id = 'CFA-RUB'";
    alter_store_by(folder, token, &[&money.to_string()]).await;
    former
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_of_version_1_works_on_with_its_contracts() {
    let folder = tempfile::tempdir().expect("folder");
    let former = make_former(folder.path()).await;
    let mut world = World::start(folder.path()).await;
    let connector = world.connector();
    // CFA-RUB is minted and burned without ids.
    world.deposit("alice", "5000.00").await;
    world.deposit("bob", "5000.00").await;
    let code = connector.token_code(&former.money).await.expect("read");
    assert_eq!(code, TokenCode::Unknown);
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 5_000_00);
    let payout = redeem(&mut world, "1000.00", "payout-1").await;
    let burned = world.receipt(&payout.onchain_tx_hash).await;
    assert_eq!(burned.status, ReceiptStatus::Success);
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 4_000_00);

    // A new issue has a token of version 2 that obeys the contracts of version 1.
    let bond = world.register(|_| {}).await.expect("registered");
    let token = bond.smart_contract_address.parse().expect("address");
    let code = connector.token_code(&token).await.expect("read");
    assert_eq!(code, TokenCode::Token(Version::V2));
    let roles = connector.roles_of(&token, &former.settlement).await;
    assert_eq!(roles.expect("read"), RoleSet::SETTLEMENT);
    let subscribed = world.subscribe("BOND-1", "alice", "3", "3000.00").await;
    subscribed.expect("subscribed");
    let issued = world
        .cfa
        .issue_investment_cfa(issue_request("BOND-1", "alice", "3", Some("3000.00")))
        .await
        .expect("issued")
        .into_inner()
        .operation
        .expect("operation");
    let issued = world.settle(&issued).await;
    assert_eq!(issued.status(), OperationStatus::Finalized);
    assert_eq!(world.tokens("BOND-1", "alice").await, 3);

    let batch = pb::SettleTradesRequest {
        context: context("n1:1-1"),
        batch_id: "n1:1-1".into(),
        trades: vec![pb::TradeLeg {
            trade_id: "t-1".into(),
            instrument_id: "BOND-1".into(),
            trade_number: 1,
            buyer_id: "bob".into(),
            seller_id: "alice".into(),
            quantity: decimal("1"),
            payment: decimal("1000.00"),
            fee: decimal("1.00"),
        }],
    };
    world.cfa.settle_trades(batch).await.expect("submitted");
    let read = pb::GetTradeBatchRequest {
        context: None,
        batch_id: "n1:1-1".into(),
        wait_ms: 5_000,
    };
    let batch = world.cfa.get_trade_batch(read).await.expect("read");
    let batch = batch.into_inner().batch.expect("batch");
    assert_eq!(batch.status(), pb::TradeBatchStatus::Finalized);
    assert_eq!(batch.failed_trade_ids, Vec::<String>::new());
    assert_eq!(world.tokens("BOND-1", "bob").await, 1);
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 3_999_00);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn contracts_of_an_unknown_version_are_refused_at_the_start() {
    let folder = tempfile::tempdir().expect("folder");
    let world = World::start(folder.path()).await;
    let contracts = world.contracts().await;
    world.stop().await;
    // A contract, but no token.
    let stored = serde_json::json!({
        "registry": contracts.registry.to_string(), "money": contracts.registry.to_string(),
        "settlement": contracts.settlement.to_string(),
        "redemption": contracts.redemption.to_string(),
    });
    let setting = "UPDATE setting SET value = $1 WHERE name = 'contracts'";
    alter_store_by(folder.path(), setting, &[&stored.to_string()]).await;
    let refused = World::try_with(folder.path(), Settings::default()).await;
    let refused = refused.err().expect("unknown code");
    assert!(
        refused.to_string().contains("is of an unknown version"),
        "{refused}"
    );
}

/// Submits a call that reverts under the key of the deployment, before the first start.
async fn revert_deployment(folder: &Path) {
    let log = events::Embedded::open(folder.join("other-log")).await;
    let config = ChainConfig {
        data_dir: folder.join("chain"),
        seal_interval_ms: 1,
        ..ChainConfig::default()
    };
    let deps = ChainDeps {
        log: Arc::new(log.expect("log")),
    };
    let shutdown = CancellationToken::new();
    let chain = start_chain(config, deps, shutdown.clone()).await;
    let chain = chain.expect("chain");
    // INVALID.
    let call = Call {
        to: None,
        data: vec![0xfe],
        gas_limit: Some(100_000),
    };
    let connector = chain.connector();
    let sent = connector.submit("bootstrap:platform", &call).await;
    let hash = sent.expect("submitted").tx_hash;
    let receipt = connector.wait_receipt(&hash, WAIT).await;
    let receipt = receipt.expect("read").expect("in a block");
    assert_eq!(receipt.status, ReceiptStatus::Reverted);
    drop(connector);
    shutdown.cancel();
    chain.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_that_reverted_is_repeated_at_the_next_start() {
    let folder = tempfile::tempdir().expect("folder");
    revert_deployment(folder.path()).await;
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "1.00").await;
    let token = world.instrument("CFA-RUB").await.smart_contract_address;
    world.stop().await;
    let mut world = World::start(folder.path()).await;
    let known = world.instrument("CFA-RUB").await.smart_contract_address;
    assert_eq!(known, token);
    world.stop().await;
}
