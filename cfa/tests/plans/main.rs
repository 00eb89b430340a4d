//! No SQL statement of the service costs more as its stores grow.
//!
//! The test runs deposits, trades, redemptions and sweeps, then explains every executed statement
//! on its database. It is a separate test binary, because the record of statements is process-wide.
#![allow(clippy::inconsistent_digit_grouping)]

#[path = "../service/faults.rs"]
#[allow(dead_code)]
mod faults;
#[path = "../service/losing.rs"]
#[allow(dead_code)]
mod losing;
#[path = "../service/world.rs"]
#[allow(dead_code)]
mod world;

use std::path::Path;

use events::Log;
use proto::cfa::v1 as pb;
use proto::common::v1 as common;
use proto::market::v1 as market;
use testkit::plans::{self, Allowed};
use types::derived;

use crate::world::*;

const ALLOWED: [Allowed; 12] = [
    Allowed {
        statement: "SELECT hash, bytecode FROM code",
        reason: "the embedded chain reads its whole state at startup",
    },
    Allowed {
        statement: "SELECT address, nonce, balance, code_hash FROM account",
        reason: "the embedded chain reads its whole state at startup",
    },
    Allowed {
        statement: "SELECT address, key, value FROM slot",
        reason: "the embedded chain reads its whole state at startup",
    },
    Allowed {
        statement: "SELECT * FROM accepted_difference",
        reason: "one row per difference that two persons have accepted, read at startup",
    },
    Allowed {
        statement: "FROM registry_quarantine",
        reason: "one row per token with impossible transfers",
    },
    Allowed {
        statement: "FROM token_move AS m CROSS JOIN instrument",
        reason: "one row per move of the holders of an issue",
    },
    Allowed {
        statement: "FROM _sqlx_migrations",
        reason: "one row per version, read at startup",
    },
    Allowed {
        statement: "FROM block ORDER BY number DESC LIMIT 1",
        reason: "the last row alone, by the primary key",
    },
    Allowed {
        statement: "AND ((kind IN (3, 5, 6, 10) AND external_ref =",
        reason: "a payment, payout or trade has few operations",
    },
    Allowed {
        statement: "FROM operation WHERE (created_at_us, operation_id) < (?, ?) AND kind = ? AND status =",
        reason: "only staff lists operations without a user",
    },
    Allowed {
        statement: "FROM instrument WHERE (registered_at_us, instrument_id) <",
        reason: "there are few issues",
    },
    Allowed {
        statement: "FROM log ORDER BY position DESC LIMIT 1)",
        reason: "the last row alone, by the primary key",
    },
];

async fn batch_is_final(world: &mut World, batch_id: &str) {
    for _ in 0..10 {
        let request = pb::GetTradeBatchRequest {
            context: None,
            batch_id: batch_id.into(),
            wait_ms: 5_000,
        };
        let answer = world.cfa.get_trade_batch(request).await.expect("found");
        let batch = answer.into_inner().batch.expect("batch");
        if batch.status() == pb::TradeBatchStatus::Finalized {
            return;
        }
    }
    panic!("batch {batch_id} is not final");
}

async fn operations_of(world: &mut World, reference: &str) -> Vec<pb::CfaOperation> {
    let request = pb::ListOperationsRequest {
        external_ref: reference.into(),
        ..Default::default()
    };
    let listed = world.cfa.list_operations(request).await.expect("listed");
    listed.into_inner().operations
}

/// Trades from events and from settlement, and one that stays open.
async fn trade(world: &mut World) {
    let executed = |number: u64| market::TradeExecutedEvent {
        context: context("trade"),
        trade_id: format!("t-{number}"),
        buyer_id: "alice".into(),
        seller_id: "bob".into(),
        instrument_id: "BOND-1".into(),
        quantity: decimal("2"),
        price: decimal("1000"),
        trade_number: number,
        ..Default::default()
    };
    let name = "dfa.market.v1.TradeExecutedEvent";
    let told =
        [1, 9].map(|number| event(events::topics::MARKET, "BOND-1", name, &executed(number)));
    world.log.publish(&told).await.expect("published");
    for _ in 0..3_000 {
        if !operations_of(world, "t-9").await.is_empty() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(operations_of(world, "t-9").await.len(), 1);
    let trades = (1..=3).map(|number| pb::TradeLeg {
        trade_id: format!("t-{number}"),
        instrument_id: "BOND-1".into(),
        trade_number: number,
        buyer_id: "alice".into(),
        seller_id: "bob".into(),
        quantity: decimal("2"),
        payment: decimal("2000.00"),
        fee: decimal("2.00"),
    });
    let request = pb::SettleTradesRequest {
        context: context(&key()),
        batch_id: "n1:1-3".into(),
        trades: trades.collect(),
    };
    world.cfa.settle_trades(request).await.expect("submitted");
    batch_is_final(world, "n1:1-3").await;
    let request = pb::TransferCfaRequest {
        context: context("t-2"),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "2"),
        trade_id: "t-2".into(),
        payment: None,
    };
    world.cfa.transfer_cfa(request).await.expect("the trade");
    let request = pb::TransferCfaRequest {
        context: context("t-8"),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "2"),
        trade_id: "t-8".into(),
        payment: None,
    };
    world
        .cfa
        .transfer_cfa(request)
        .await
        .expect_err("no such trade");
}

async fn redeem(world: &mut World) {
    let request = pb::RedeemCfaRubRequest {
        context: context(&key()),
        user_id: "alice".into(),
        amount: roubles("10.00"),
        payout_id: "payout-1".into(),
    };
    let answer = world.redeem_rub(request).await.expect("redeemed");
    let burn = answer.into_inner().operation.expect("operation");
    world.settle(&burn).await;
    let request = pb::FinalizeRedemptionRequest {
        context: context(&key()),
        payout_id: "payout-1".into(),
    };
    world
        .cfa
        .finalize_redemption(request)
        .await
        .expect("finalized");
    // The trades above have no ledger postings, so these units are of another issue.
    world
        .register(|request| request.symbol = "BOND-2".into())
        .await
        .expect("registered");
    world.issue("BOND-2", "bob", "100").await;
    // The redemption of the issue ends it.
    let offered = world.offer("BOND-2", "bob", "1", "1000.00").await;
    offered.expect("offered");
    let freeze = pb::FreezeUnitsRequest {
        context: context(&key()),
        instrument_id: "BOND-2".into(),
        holder_id: "bob".into(),
        amount: amount("BOND-2", "2"),
        basis: pb::EnforcementBasis::Court.into(),
        document: "Decision 3".into(),
    };
    world.cfa.freeze_units(freeze).await.expect("frozen");
    let request = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-2".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let answer = world.cfa.start_redemption(request).await.expect("started");
    let redemption = answer.into_inner().redemption.expect("redemption");
    assert_eq!(redemption.status(), pb::RedemptionStatus::Finalized);
    read_payments(world).await;
}

/// All payments of the redemption for a service, the own ones for a holder.
async fn read_payments(world: &World) {
    for mut reader in [world.cfa.clone(), world.as_caller("sandbox.investor.bob")] {
        let request = pb::GetRedemptionRequest {
            instrument_id: "BOND-2".into(),
            ..Default::default()
        };
        let read = reader.get_redemption(request).await.expect("recorded");
        let read = read.into_inner().redemption.expect("redemption");
        assert_eq!(read.payments.len(), 1);
    }
}

/// Subscriptions that are used, cancelled and left active.
async fn subscribe(world: &mut World) {
    for _ in 0..3 {
        let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
        subscribed.expect("subscribed");
    }
    let above = world.subscribe("BOND-1", "alice", "1", "99999999.00").await;
    above.expect_err("more than alice has");
    let buy = || issue_request("BOND-1", "alice", "1", Some("1000.00"));
    world.freeze_money("alice", true).await;
    let frozen = world.cfa.issue_investment_cfa(buy()).await;
    frozen.expect_err("frozen");
    world.freeze_money("alice", false).await;
    world.cfa.issue_investment_cfa(buy()).await.expect("issued");
    for (investor_id, instrument_id) in [("alice", "BOND-1"), ("alice", ""), ("", "BOND-1")] {
        let request = pb::ListSubscriptionsRequest {
            investor_id: investor_id.into(),
            instrument_id: instrument_id.into(),
            ..Default::default()
        };
        let listed = world.cfa.list_subscriptions(request).await;
        // The oldest was used.
        let newest = listed.expect("listed").into_inner().subscriptions.remove(0);
        let request = pb::CancelSubscriptionRequest {
            context: context(&key()),
            subscription_id: newest.subscription_id,
        };
        let mut alice = world.as_caller("sandbox.investor.alice");
        alice.cancel_subscription(request).await.expect("cancelled");
    }
}

/// A placement with a full, a partial, a refused and no allotment.
async fn place(world: &mut World) {
    let now_us = world.clock.now_us();
    let at = |time_us| Some(proto::convert::to_timestamp_us(time_us));
    let placed = |request: &mut pb::RegisterInstrumentRequest| {
        request.symbol = "BOND-3".into();
        request.issue_limit = decimal("10");
        request.placement = Some(pb::PlacementTerms {
            opens_at: at(now_us),
            closes_at: at(now_us + 1_000_000),
            price: decimal("10.00"),
            investor_maximum: decimal("6"),
            ..Default::default()
        });
    };
    world.register(placed).await.expect("registered");
    for (investor, units, payment) in [
        ("carol", "6", "60.00"),
        ("dave", "3", "30.00"),
        ("erin", "4", "40.00"),
        ("frank", "1", "10.00"),
    ] {
        world.deposit(investor, "100.00").await;
        let subscribed = world.subscribe("BOND-3", investor, units, payment).await;
        subscribed.expect("subscribed");
    }
    world.freeze_money("dave", true).await;
    world.clock.advance_us(1_000_000);
    let request = pb::ClosePlacementRequest {
        context: context(&key()),
        instrument_id: "BOND-3".into(),
    };
    let closed = world.cfa.close_placement(request).await.expect("closed");
    let closed = closed.into_inner().placement.expect("placement");
    assert_eq!(closed.status(), pb::PlacementStatus::Placed);
}

/// A freeze that is partly used and then lifted, and an extract.
async fn enforce(world: &mut World) {
    let freeze = pb::FreezeUnitsRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "bob".into(),
        amount: amount("BOND-1", "2"),
        basis: pb::EnforcementBasis::Court.into(),
        document: "Decision 1".into(),
    };
    let frozen = world.cfa.freeze_units(freeze).await.expect("frozen");
    let act = frozen.into_inner().act.expect("act");
    let transfer = pb::ForceTransferRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "heir".into(),
        amount: amount("BOND-1", "1"),
        basis: pb::EnforcementBasis::Levy.into(),
        document: "Decision 1".into(),
        freeze_id: act.act_id.clone(),
    };
    let transferred = world.cfa.force_transfer(transfer).await;
    let transferred = transferred.expect("transferred").into_inner().operation;
    world.settle(&transferred.expect("operation")).await;
    let lift = pb::LiftFreezeRequest {
        context: context(&key()),
        act_id: act.act_id,
        document: "Decision 2".into(),
    };
    world.cfa.lift_freeze(lift).await.expect("lifted");
    for holder_id in ["", "bob"] {
        let request = pb::ListEnforcementActsRequest {
            holder_id: holder_id.into(),
            ..Default::default()
        };
        let listed = world.cfa.list_enforcement_acts(request).await;
        assert_eq!(listed.expect("listed").into_inner().acts.len(), 2);
    }
    let extract = pb::IssueExtractRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "bob".into(),
        ..Default::default()
    };
    for _ in 0..2 {
        let issued = world.cfa.issue_extract(extract.clone()).await;
        issued.expect("issued");
    }
    for (actor, object_id) in [("", ""), ("cfa", ""), ("", "BOND-1"), ("cfa", "BOND-1")] {
        let request = pb::ListAuditRecordsRequest {
            actor: actor.into(),
            object_id: object_id.into(),
            ..Default::default()
        };
        let listed = world.cfa.list_audit_records(request).await;
        listed.expect("listed");
    }
}

/// A coupon that is paid.
async fn pay_coupon(world: &mut World) {
    let now_us = world.clock.now_us();
    let register = world.register(|request| {
        request.symbol = "BOND-4".into();
        request.coupons = vec![pb::Coupon {
            pays_at: Some(proto::convert::to_timestamp_us(now_us)),
            amount: decimal("1"),
        }];
    });
    register.await.expect("registered");
    world.issue("BOND-4", "bob", "2").await;
    world.clock.advance_us(2 * 24 * 3_600 * 1_000_000);
    for instrument_id in ["", "BOND-4"] {
        world.resume_operations().await;
        let request = pb::ListCouponsRequest {
            instrument_id: instrument_id.into(),
            ..Default::default()
        };
        world.cfa.list_coupons(request).await.expect("listed");
    }
    // Refused: it is paid.
    let request = pb::RestartCouponRequest {
        context: context(&key()),
        instrument_id: "BOND-4".into(),
        number: 1,
    };
    let refused = world.cfa.restart_coupon(request).await;
    refused.expect_err("paid");
}

/// A move of all holders of an issue, one of whom has a frozen address.
async fn move_holders(world: &mut World) {
    let register = world.register(|request| request.symbol = "BOND-5".into());
    register.await.expect("registered");
    world.issue("BOND-5", "bob", "2").await;
    let freeze = pb::FreezeUnitsRequest {
        context: context(&key()),
        instrument_id: "BOND-5".into(),
        holder_id: "bob".into(),
        amount: None,
        basis: pb::EnforcementBasis::Court.into(),
        document: "Decision 4".into(),
    };
    world.cfa.freeze_units(freeze).await.expect("frozen");
    let halt = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-5".into(),
        status: pb::InstrumentStatus::Halted.into(),
        ..Default::default()
    };
    world.cfa.update_instrument(halt).await.expect("halted");
    let request = pb::MoveHoldersRequest {
        context: context(&key()),
        instrument_id: "BOND-5".into(),
        reason: "test".into(),
    };
    world.cfa.move_holders(request).await.expect("moving");
    for _ in 0..3_000 {
        world.resume_operations().await;
        let request = pb::GetHolderMoveRequest {
            context: None,
            instrument_id: "BOND-5".into(),
        };
        let found = world.cfa.get_holder_move(request).await.expect("a move");
        let found = found.into_inner().holder_move.expect("a move");
        if found.status() == pb::HolderMoveStatus::Done {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let replay = pb::ReplayChainTransfersRequest::default();
    let replayed = world.cfa.replay_chain_transfers(replay).await;
    replayed.expect("replayed");
}

/// Every list with the filters of its callers.
async fn lists(world: &mut World, tx_hash: String) {
    for user_id in ["", "alice"] {
        let of_tx = Some(tx_hash.clone());
        for (r#type, status, tx_hash, without_trades) in [
            (0, 0, None, false),
            (3, 7, None, false),
            (0, 0, of_tx.clone(), false),
            (0, 0, of_tx, true),
        ] {
            let request = pb::ListOperationsRequest {
                user_id: user_id.into(),
                r#type,
                status,
                without_trades,
                onchain_tx_hashes: tx_hash.into_iter().collect(),
                ..Default::default()
            };
            world.cfa.list_operations(request).await.expect("listed");
        }
    }
    for include_resolved in [false, true] {
        let request = pb::ListSuspendedDepositsRequest {
            include_resolved,
            ..Default::default()
        };
        let listed = world.cfa.list_suspended_deposits(request).await;
        listed.expect("listed");
    }
    for status in [0, 2] {
        let request = pb::ListInstrumentsRequest {
            status,
            ..Default::default()
        };
        world.cfa.list_instruments(request).await.expect("listed");
    }
    for as_of in [None, Some(1_700_000_000)] {
        let request = pb::ListHoldersRequest {
            instrument_id: "BOND-1".into(),
            as_of: as_of.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
            ..Default::default()
        };
        world.cfa.list_holders(request).await.expect("listed");
    }
}

/// Accepts the difference of an open break.
async fn accept(world: &mut World, found: &pb::ChainBreak) {
    let value = |of: &Option<common::Decimal>| -> types::Decimal {
        let text = of.as_ref().map(|of| of.value.clone());
        text.expect("an amount").parse().expect("a number")
    };
    let difference = value(&found.on_chain).checked_sub(value(&found.in_ledger));
    let request = pb::AcceptChainBreakRequest {
        context: context(&key()),
        instrument_id: found.instrument_id.clone(),
        address: found.address.clone(),
        difference: Some(common::Decimal {
            value: difference.expect("in range").to_string(),
        }),
        reason: "test".into(),
    };
    world
        .cfa
        .accept_chain_break(request)
        .await
        .expect("accepted");
}

/// A difference between chain and ledger, and the lists of what the comparison and the anchors
/// store.
async fn compare(world: &mut World) {
    let token = world.instrument("BOND-1").await.smart_contract_address;
    let mint = chain::Action::Mint {
        token: token.parse().expect("address"),
        to: chain::Address::of_user("bob"),
        units: 1,
        id: Some(key()),
    };
    let submitted = world.connector().submit(&key(), &mint.call()).await;
    let hash = submitted.expect("submitted").tx_hash.to_string();
    world.receipt(&hash).await;
    tokio::time::sleep(std::time::Duration::from_millis(2_000)).await;
    for (instrument_id, open_only) in [("", false), ("", true), ("BOND-1", false), ("BOND-1", true)]
    {
        let request = pb::ListChainBreaksRequest {
            instrument_id: instrument_id.into(),
            open_only,
            ..Default::default()
        };
        world.cfa.list_chain_breaks(request).await.expect("listed");
    }
    let request = pb::ListChainBalancesRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    world
        .cfa
        .list_chain_balances(request)
        .await
        .expect("listed");
    let request = pb::ListAnchorsRequest::default();
    world.cfa.list_anchors(request).await.expect("listed");
    let request = pb::ListChainBreaksRequest {
        open_only: true,
        ..Default::default()
    };
    let mut found = Vec::new();
    // A slow machine may need longer than the pause above.
    for _ in 0..3_000 {
        let listed = world.cfa.list_chain_breaks(request.clone()).await;
        found = listed.expect("listed").into_inner().breaks;
        if !found.is_empty() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    accept(world, &found.remove(0)).await;
}

/// The steps without an operation that the full check finds final.
async fn final_steps(file: &Path) {
    let redemption = derived::issue_redemption("BOND-2");
    let coupon = derived::coupon("BOND-4", 1);
    let ids = [
        format!("{redemption}:fund"),
        format!("{redemption}:fund:try-1"),
        format!("{coupon}:fund"),
        "placement:BOND-3:mint".to_owned(),
        "placement:BOND-3:pay".to_owned(),
        "placement:BOND-3:burn".to_owned(),
        "placement:BOND-1:mint".to_owned(),
        format!("{redemption}:part:0"),
    ];
    let mut records = cfa::OperationRecords::open(file).await.expect("opens");
    let found = records.final_steps(&ids).await.expect("read");
    assert_eq!(found, ids[..6]);
    records.close().await.expect("closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_a_table() {
    let folder = tempfile::tempdir().expect("folder");
    // Before startup: the log's first write may follow at any time.
    plans::record();
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.deposit("alice", "10000.00").await;
    world.deposit("issuer", "200000.00").await;
    world.issue("BOND-1", "bob", "100").await;
    enforce(&mut world).await;
    trade(&mut world).await;
    subscribe(&mut world).await;
    place(&mut world).await;
    redeem(&mut world).await;
    pay_coupon(&mut world).await;
    move_holders(&mut world).await;
    world.resume_operations().await;
    let burn = operations_of(&mut world, "payout-1").await.remove(0);
    lists(&mut world, burn.onchain_tx_hash).await;
    world
        .double
        .with(|state| state.limit_refusal = Some("Daily limit".into()));
    world.double.paid("refused", "alice", "1.00");
    let request = pb::IssueCfaRubRequest {
        context: context(&key()),
        user_id: "alice".into(),
        amount: roubles("1.00"),
        payment_id: "refused".into(),
    };
    let refused = world.cfa.issue_cfa_rub(request).await.expect("answered");
    let refused = refused.into_inner().operation.expect("operation");
    assert_eq!(refused.status(), common::OperationStatus::Rejected);
    assert_eq!(operations_of(&mut world, "refused").await, [refused]);
    world.stop().await;
    // The trades were not posted to the ledger, so chain and ledger differ.
    let settings = Settings {
        compare_ms: Some((10, 200)),
        anchor_interval_s: Some(1),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    compare(&mut world).await;
    world.stop().await;
    final_steps(&folder.path().join("cfa/cfa.sqlite")).await;

    // The service's stores, and those of the embedded log and the embedded chain.
    let files = [
        "cfa/cfa.sqlite",
        "chain/connector.sqlite",
        "log/log.db",
        "log/offsets.db",
        "chain/chain.sqlite",
    ];
    let files = files.map(|file| folder.path().join(file));
    let files: Vec<_> = files.iter().map(|file| file.as_path()).collect();
    let explained = plans::explain(&files).await;
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(&[
        "FROM log WHERE position >=",
        "FROM log WHERE topic = $1",
        "FROM offsets WHERE consumer_group =",
        "INSERT INTO offsets",
        "INSERT INTO transaction_",
        "FROM operation WHERE kind =",
        "FROM operation WHERE (flow =",
        "FROM operation WHERE tx_hash =",
        "FROM operation WHERE batch_id =",
        "FROM operation WHERE (created_at_us, operation_id) <",
        "FROM operation INDEXED BY operation_of_user",
        "FROM operation INDEXED BY operation_from_user",
        "FROM operation INDEXED BY operation_to_user",
        "FROM suspended_deposit WHERE (created_at_us, payment_id) <",
        "FROM holding LEFT JOIN user_address",
        "FROM holding INDEXED BY holding_since",
        "FROM supply_history WHERE token = $1 ORDER BY block_number",
        "FROM supply_history WHERE token = $1 AND time_us <=",
        "INSERT INTO supply_history",
        "FROM operation WHERE status NOT IN (7, 8, 9, 12)",
        "FROM operation WHERE fact_limit = 1",
        "UPDATE operation SET status",
        "UPDATE operation SET fact_limit",
        "AND external_ref IN (SELECT value FROM json_each(",
        "WHERE operation_id IN (SELECT value FROM json_each($1))",
        "UPDATE operation SET batch_id = $2",
        "CROSS JOIN holding ON token =",
        "FROM operation INDEXED BY operation_tx_other",
        "FROM operation INDEXED BY operation_of_batch",
        "FROM registry_quarantine WHERE token =",
        "FROM offer WHERE offer_id =",
        "FROM offer WHERE user_id = $1 AND side = $2 AND idempotency_key =",
        "WHERE user_id = $1 AND side = $2 AND (status < 3 OR step > 0)",
        "WHERE instrument_id = $1 AND side = $2 AND (status < 3 OR step > 0)",
        "WHERE instrument_id = $1 AND side = 2 AND offer_id > $2 AND (status < 3 OR step > 0)",
        "FROM offer INDEXED BY offer_active",
        "FROM offer WHERE instrument_id = ? AND side =",
        "FROM offer WHERE user_id = ? AND instrument_id = ? AND side =",
        "FROM offer WHERE user_id = ? AND side = ? AND (created_at_us",
        "FROM offer WHERE step > 0",
        "FROM offer INDEXED BY offer_failed",
        "FROM offer WHERE status < 3 AND expires_at_us <=",
        "DELETE FROM offer WHERE offer_id =",
        "UPDATE offer SET status = 2, operation_id = ''",
        "UPDATE offer SET status = 3",
        "UPDATE offer SET status = $2",
        "UPDATE offer SET status = 3, updated_at_us = $2, allotted_minor",
        "UPDATE offer INDEXED BY offer_live_of_issue SET status = 6",
        "UPDATE offer SET status = 6, step = $3",
        "UPDATE offer SET step = 0",
        "UPDATE offer SET operation_id = $2",
        "UPDATE offer SET limit_state = $2",
        "UPDATE offer SET limit_state = 0",
        "FROM offer INDEXED BY offer_limit",
        "FROM offer INDEXED BY offer_allotted",
        "SELECT COALESCE(SUM(units_minor), 0) FROM offer INDEXED BY offer_live",
        "SELECT offer_id, units_minor, status FROM offer INDEXED BY offer_live_of_issue",
        "side = 1 AND offer_id > $2 AND (status < 3 OR step > 0) AND status < 3",
        "side = 1 AND offer_id > $2 AND (status < 3 OR step > 0) AND status = 6",
        "FROM placement WHERE instrument_id = $1",
        "FROM placement WHERE instrument_id IN",
        "FROM placement INDEXED BY placement_open",
        "WHERE stage < 8 AND stage >=",
        "UPDATE placement SET stage",
        "FROM issue_decision WHERE instrument_id =",
        "FROM instrument INDEXED BY instrument_of_issuer",
        "FROM instrument INDEXED BY instrument_document",
        "FROM enforcement_act WHERE act_id =",
        "FROM enforcement_act WHERE kind = 1 AND actor =",
        "FROM enforcement_act INDEXED BY act_listed",
        "FROM enforcement_act INDEXED BY act_of_holder",
        "FROM enforcement_act INDEXED BY act_of_freeze",
        "FROM enforcement_act INDEXED BY act_live WHERE holder_id =",
        "FROM enforcement_act INDEXED BY act_live WHERE kind = 1",
        "FROM enforcement_act INDEXED BY act_open",
        "FROM enforcement_act INDEXED BY act_freezes",
        "UPDATE enforcement_act SET left_minor = left_minor",
        "UPDATE enforcement_act SET left_minor = $2",
        "FROM holding_history INDEXED BY holding_history_at",
        "FROM operation INDEXED BY operation_maturing",
        "CROSS JOIN operation AS o INDEXED BY operation_redeemed",
        "FROM token_move WHERE move_id =",
        "FROM token_move INDEXED BY token_move_of",
        "FROM token_move INDEXED BY token_move_open WHERE instrument_id =",
        "FROM token_move INDEXED BY token_move_open WHERE finished_at_us IS NULL",
        "FROM token_move INDEXED BY token_move_past",
        "UPDATE token_move SET",
        "FROM json_each($1) AS v WHERE EXISTS (SELECT 1 FROM token_move",
        "FROM enforcement_act INDEXED BY act_whole_of",
        "FROM holding WHERE token = $1 AND address >",
        "FROM extract INDEXED BY extract_of_actor",
        "FROM extract WHERE extract_id =",
        "FROM audit_records WHERE sequence = (SELECT MAX(sequence) FROM audit_records)",
        "INSERT INTO audit_records",
        "FROM audit_records WHERE sequence < ? ORDER BY sequence",
        "FROM audit_records WHERE sequence < ? AND object_id =",
        "FROM audit_records WHERE sequence < ? AND actor =",
        "FROM batch WHERE status = 1",
        "FROM instrument WHERE status",
        "FROM issue_redemption WHERE status",
        "FROM issue_redemption WHERE (redemption_id, attempt) >",
        "FROM coupon WHERE (instrument_id, number) >",
        "FROM placement WHERE (instrument_id, stage) >",
        "FROM issue_redemption WHERE status NOT IN (5, 6) AND status = 2",
        "FROM issue_redemption AS r INDEXED BY redemption_open",
        "FROM coupon AS c INDEXED BY coupon_open",
        "SELECT user_id, instrument_id, units_minor, payment_minor FROM operation",
        "FROM coupon INDEXED BY coupon_due",
        "FROM coupon INDEXED BY coupon_open",
        "FROM coupon INDEXED BY coupon_listed",
        "FROM coupon WHERE instrument_id = $1 AND number <",
        "FROM coupon WHERE instrument_id = $1 AND number = $2",
        "FROM coupon WHERE instrument_id = $1 AND pays_at_us BETWEEN",
        "FROM coupon_line WHERE instrument_id =",
        "FROM redemption_line WHERE redemption_id = $1 ORDER BY position",
        "FROM redemption_line WHERE redemption_id = $1 AND position > $2",
        "FROM redemption_line INDEXED BY redemption_line_of_user",
        "UPDATE coupon SET status = $3, total_minor",
        "UPDATE coupon SET status = $3, parts_done",
        "UPDATE coupon SET status = CASE",
        "FROM holding WHERE (token, address) >",
        "CROSS JOIN user_address AS u ON u.address = k.value",
        "FROM operation AS o INDEXED BY operation_open",
        "FROM chain_break WHERE cleared_at_us IS NULL",
        "FROM chain_break WHERE instrument_id = ?",
        "FROM chain_break WHERE instrument_id = $1 AND address = $2",
        "UPDATE chain_break SET cleared_at_us",
        "INSERT INTO accepted_difference",
        "FROM ledger_anchor WHERE number <",
        "INSERT INTO inbox",
        "FROM submission WHERE",
        "FROM submission JOIN attempt",
        "FROM attempt JOIN submission",
    ]);
}
