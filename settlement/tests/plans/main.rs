//! The cost of settlement's statements is independent of the number of stored rows. Every statement
//! that runs while batches are sealed, posted and delivered, and while a break is found, repaired
//! and lifted, is explained on the same database.
//!
//! A test binary of its own: the statement log is process-wide.

#[path = "../world/mod.rs"]
mod world;

use std::path::Path;
use std::time::Duration;

use proto::ledger::v1::AdjustHoldRequest;
use proto::settlement::v1 as pb;
use testkit::plans::{self, Allowed};
use types::*;
use world::Market;
use world::services::{Platform, config, context};

const PATIENCE: Duration = Duration::from_secs(60);

const ALLOWED: [Allowed; 2] = [
    Allowed {
        statement: "SELECT trade_id, command FROM bust_trades",
        reason: "loads the tracker's bust trades, at start only",
    },
    Allowed {
        statement: "FROM _sqlx_migrations",
        reason: "one row per migration, at start only",
    },
];

async fn until(what: &str, mut seen: impl FnMut() -> bool) {
    let waiting = async {
        while !seen() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, waiting).await;
    waited.unwrap_or_else(|_| panic!("no {what}"));
}

async fn drained(platform: &Platform, market: &Market) {
    let drained = platform.settlement.drained(market.position());
    let waited = tokio::time::timeout(PATIENCE, drained).await;
    waited.unwrap_or_else(|_| panic!("not drained: {:?}", platform.settlement.stats()));
}

/// A trade of user 1 with user 0, and one of users 2 and 3.
fn trades(market: &mut Market) {
    for (seller, buyer) in [(1, 0), (2, 3)] {
        for (user, side) in [(seller, Side::Sell), (buyer, Side::Buy)] {
            let placed = market.order(user, 0, side, 100, 10, TimeInForce::Gtc);
            placed.expect("is covered");
        }
    }
}

/// Settles two trades. The chain skips the first one once and the second one always.
async fn settle_trades(folder: &Path) {
    let mut platform = Platform::start(folder, config(folder), &[]).await;
    platform.chain.left_out_once.lock().unwrap().insert(1);
    platform.chain.left_out.lock().unwrap().insert(2);
    let mut market = Market::new(1);
    trades(&mut market);
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, &market).await;
    assert_eq!(platform.settlement.stats().trades_failed, 1);
    platform.stop().await;
}

/// Every list of the operators, and a trade that is not stuck.
async fn lists(platform: &Platform) {
    let (mut operators, _slot) = platform.operators();
    let status = pb::GetSettlementStatusRequest::default();
    operators.get_settlement_status(status).await.unwrap();
    let batches = pb::ListBatchesRequest::default();
    operators.list_batches(batches).await.unwrap();
    for instrument_id in ["", "CFA-RUB"] {
        for state in 0..=2 {
            let request = pb::ListBreaksRequest {
                instrument_id: instrument_id.into(),
                state,
                age_seconds_min: 1,
                ..Default::default()
            };
            operators.list_breaks(request).await.unwrap();
        }
    }
    for state in 0..=2 {
        let request = pb::ListCasesRequest {
            state,
            ..Default::default()
        };
        operators.list_cases(request).await.unwrap();
    }
    let close = pb::CloseCaseRequest {
        context: context("close"),
        trade_id: Id128::from_u128(1).to_string(),
        note: "test".into(),
    };
    operators.close_case(close).await.unwrap_err();
    let bust = pb::BustTradeRequest {
        context: context("bust"),
        trade_id: Id128::from_u128(1).to_string(),
        reason: "test".into(),
    };
    operators.bust_trade(bust).await.unwrap_err();
    let retry = pb::RetrySettlementRequest {
        context: context("retry"),
        id: String::new(),
    };
    operators.retry_settlement(retry).await.unwrap();
    let object = "settlement";
    for (actor, object_id) in [("", ""), ("ivan", ""), ("", object), ("ivan", object)] {
        let request = pb::ListAuditRecordsRequest {
            actor: actor.into(),
            object_id: object_id.into(),
            ..Default::default()
        };
        operators.list_audit_records(request).await.unwrap();
    }
}

/// Removes a kopeck from user 0's trading hold in the ledger, then restores it.
async fn break_and_repair(folder: &Path) {
    let mut platform = Platform::start(folder, config(folder), &[]).await;
    let mut market = Market::new(1);
    trades(&mut market);
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, &market).await;
    let trading_hold = Market::trading_hold(UserIx(0), AssetIx::MONEY);
    let trading_hold = *market.admission().hold(trading_hold).unwrap();
    let adjust = |minor: i64, key: &str| AdjustHoldRequest {
        context: context(key),
        hold_id: trading_hold.hold_id.to_string(),
        remaining_amount: Some(proto::convert::to_monetary_amount_minor(
            "CFA-RUB", minor, 2,
        )),
    };
    let taken = adjust(trading_hold.undrawn.0 - 1, "taken");
    platform.ledger.adjust_hold(taken).await.unwrap();
    platform.stop().await;
    let mut platform = Platform::start(folder, config(folder), &market.records).await;
    let is_suspended = || !platform.settlement.suspensions().is_empty();
    until("suspension", is_suspended).await;
    assert_eq!(platform.settlement.breaks().await.unwrap().len(), 1);
    lists(&platform).await;
    let repaired = adjust(trading_hold.undrawn.0, "repaired");
    platform.ledger.adjust_hold(repaired).await.unwrap();
    until("end of the suspension", || {
        platform.settlement.suspensions().is_empty()
    })
    .await;
    platform.stop().await;
}

/// The ledger refuses a trade, which an operator retries and busts.
async fn bust_before_the_ledger(folder: &Path) {
    let mut platform = Platform::start(folder, config(folder), &[]).await;
    let mut market = Market::new(1);
    platform.fund(&market).await;
    trades(&mut market);
    let mut events = market.records.iter().flat_map(|record| &record.events);
    let trade = events.find(|event| matches!(event.event, Event::Trade(_)));
    let trade_id = trade.unwrap().trade_uuid(world::node()).to_string();
    platform.occupy(&trade_id).await;
    platform.feed(&market.records);
    let is_stuck = || !platform.settlement.stats().halted.is_empty();
    until("alarm", is_stuck).await;
    let (mut operators, slot) = platform.operators();
    let retry = pb::RetrySettlementRequest {
        context: context("retry trade"),
        id: trade_id.clone(),
    };
    operators.retry_settlement(retry).await.unwrap();
    let bust = pb::BustTradeRequest {
        context: context("bust trade"),
        trade_id,
        reason: "test".into(),
    };
    operators.bust_trade(bust).await.unwrap();
    drop((operators, slot));
    drained(&platform, &market).await;
    platform.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_a_table() {
    plans::record();
    let folder = tempfile::tempdir().unwrap();
    settle_trades(&folder.path().join("delivered")).await;
    bust_before_the_ledger(&folder.path().join("refused")).await;
    let folder = folder.path().join("differs");
    break_and_repair(&folder).await;

    let explained = plans::explain(&[&folder.join("settlement/settlement.db")]).await;
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(&[
        "INSERT INTO batches",
        "UPDATE batches SET state",
        "FROM batches WHERE state <> 'FINAL'",
        "INSERT INTO bust_trades",
        "UPDATE breaks SET sequence",
        "INSERT INTO breaks",
        "FROM breaks WHERE cleared_at_us IS NULL",
        "UPDATE breaks SET cleared_at_us",
        "FROM breaks WHERE lifted_at_us IS NULL",
        "UPDATE breaks SET lifted_at_us",
        "FROM breaks WHERE (found_at_us, hold_id) <",
        "FROM breaks WHERE cleared_at_us IS NULL AND (found_at_us, hold_id) <",
        "FROM breaks WHERE cleared_at_us IS NOT NULL AND (found_at_us, hold_id) <",
        "FROM breaks WHERE instrument_id = ? AND (found_at_us, hold_id) <",
        "FROM breaks WHERE instrument_id = ? AND cleared_at_us IS NULL",
        "FROM batches INDEXED BY batches_open WHERE state <> 'FINAL' AND number <",
        "FROM batches INDEXED BY batches_open WHERE state <> 'FINAL' ORDER BY number",
        "FROM batches INDEXED BY batches_open WHERE state <> 'FINAL' AND state =",
        "FROM batches WHERE batch_id =",
        "FROM batches b INDEXED BY batches_open CROSS JOIN requested_busts",
        "FROM requested_busts WHERE trade_id =",
        "INSERT INTO cases",
        "UPDATE cases SET closed_at_us",
        "FROM cases WHERE trade_id =",
        "FROM cases INDEXED BY cases_listed_open WHERE closed_at_us IS NULL",
        "FROM cases WHERE (opened_at_us, trade_id) <",
        "FROM cases WHERE closed_at_us IS NULL AND (opened_at_us, trade_id) <",
        "FROM cases WHERE closed_at_us IS NOT NULL AND (opened_at_us, trade_id) <",
        "DELETE FROM batches WHERE number IN",
        "FROM audit_records WHERE sequence = (SELECT MAX(sequence) FROM audit_records)",
        "INSERT INTO audit_records",
        "FROM audit_records WHERE sequence < ? ORDER BY sequence",
        "FROM audit_records WHERE sequence < ? AND object_id =",
        "FROM audit_records WHERE sequence < ? AND actor =",
        "FROM calls WHERE call =",
    ]);
}
