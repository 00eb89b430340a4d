//! Transfers and batches of trades (T02, T11, `design.md` 4 and 7).

use std::collections::BTreeMap;
use std::sync::Arc;

use events::Log;
use prost::Message;
use proto::cfa::v1 as pb;
use proto::common::v1::{KycStatus, OperationStatus, RejectionReasonCode};
use proto::identity::v1::UserStatus;
use proto::ledger::v1 as ledger;
use proto::market::v1 as market;

use crate::world::*;

pub fn leg(
    trade_id: &str,
    number: u64,
    buyer: &str,
    seller: &str,
    quantity: &str,
    payment: &str,
    fee: &str,
) -> pb::TradeLeg {
    pb::TradeLeg {
        trade_id: trade_id.into(),
        instrument_id: "BOND-1".into(),
        trade_number: number,
        buyer_id: buyer.into(),
        seller_id: seller.into(),
        quantity: decimal(quantity),
        payment: decimal(payment),
        fee: decimal(fee),
    }
}

pub async fn settle(
    world: &mut World,
    batch_id: &str,
    trades: Vec<pb::TradeLeg>,
) -> Result<pb::TradeBatch, tonic::Status> {
    let request = pb::SettleTradesRequest {
        context: context(&key()),
        batch_id: batch_id.into(),
        trades,
    };
    Ok(world
        .cfa
        .settle_trades(request)
        .await?
        .into_inner()
        .batch
        .expect("batch"))
}

pub async fn wait_batch(world: &mut World, batch_id: &str) -> pb::TradeBatch {
    for _ in 0..10 {
        let request = pb::GetTradeBatchRequest {
            context: None,
            batch_id: batch_id.into(),
            wait_ms: 5_000,
        };
        let batch = world
            .cfa
            .get_trade_batch(request)
            .await
            .expect("found")
            .into_inner()
            .batch
            .expect("batch");
        if batch.status() != pb::TradeBatchStatus::Submitted {
            return batch;
        }
    }
    panic!("batch {batch_id} is not final");
}

async fn operations_of(world: &World, trade_id: &str) -> Vec<pb::CfaOperation> {
    let request = pb::ListOperationsRequest {
        external_ref: trade_id.into(),
        ..Default::default()
    };
    let mut cfa = world.cfa.clone();
    let listed = cfa.list_operations(request).await.expect("listed");
    listed.into_inner().operations
}

async fn trade(world: &mut World, trade_id: &str) -> pb::CfaOperation {
    let mut found = operations_of(world, trade_id).await;
    assert_eq!(found.len(), 1, "one operation for {trade_id}");
    found.remove(0)
}

/// The operation of a trade once its event was consumed.
async fn entered(world: &World, trade_id: &str) -> pb::CfaOperation {
    testkit::eventually(async || operations_of(world, trade_id).await.pop()).await
}

fn executed(trade_id: &str, number: u64) -> events::Event {
    let trade = market::TradeExecutedEvent {
        context: context("trade"),
        trade_id: trade_id.into(),
        buyer_id: "alice".into(),
        seller_id: "bob".into(),
        instrument_id: "BOND-1".into(),
        quantity: decimal("2"),
        price: decimal("1000"),
        fee: None,
        executed_at: None,
        trade_number: number,
    };
    let name = "dfa.market.v1.TradeExecutedEvent";
    event(events::topics::MARKET, "BOND-1", name, &trade)
}

/// A trade that is bust before a batch has it comes to no batch: its operation must end, or the
/// redemption of its issue waits for it for ever.
// rows: R186
#[tokio::test(flavor = "multi_thread")]
async fn r186_the_operation_of_a_trade_bust_before_its_batch_ends() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let settled = vec![leg("t-1", 1, "alice", "bob", "2", "2000.00", "0.00")];
    settle(&mut world, "n1:1-1", settled).await.expect("sent");
    wait_batch(&mut world, "n1:1-1").await;
    let busted = |trade_id: &str| {
        let bust = market::TradeBustedEvent {
            trade_id: trade_id.into(),
            instrument_id: "BOND-1".into(),
            ..Default::default()
        };
        let name = "dfa.market.v1.TradeBustedEvent";
        event(events::topics::MARKET, "BOND-1", name, &bust)
    };
    let told = [
        executed("t-2", 2),
        busted("t-1"),
        busted("t-2"),
        busted("t-3"),
    ];
    world.log.publish(&told).await.expect("published");
    let ended = testkit::eventually(async || {
        let found = operations_of(&world, "t-2").await.pop();
        found.filter(|one| one.status() == OperationStatus::Failed)
    });
    let ended = ended.await;
    assert_eq!(ended.rejection_message, "Trade bust before its settlement");
    let other = trade(&mut world, "t-1").await;
    assert_eq!(other.status(), OperationStatus::Finalized);
    world.stop().await;
}

/// TransferCfa of a trade of two units from Bob to Alice.
fn transfer_of(trade_id: &str) -> pb::TransferCfaRequest {
    pb::TransferCfaRequest {
        context: context(trade_id),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "2"),
        trade_id: trade_id.into(),
        payment: None,
    }
}

/// Alice has money, Bob has bonds.
pub async fn market_world(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    world.register(|_| {}).await.expect("registered");
    world.deposit("alice", "10000.00").await;
    world.issue("BOND-1", "bob", "100").await;
    world
}

// rows: R094 R095
#[tokio::test(flavor = "multi_thread")]
async fn r094_a_batch_exchanges_both_legs_and_leaves_out_failed_trades() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let trades = vec![
        leg("t-1", 1, "alice", "bob", "4", "4000.00", "4.00"),
        leg("t-2", 2, "alice", "bob", "50", "50000.00", "50.00"),
        leg("t-3", 3, "alice", "bob", "1", "1000.00", "1.00"),
    ];
    let submitted = settle(&mut world, "n1:1-3", trades.clone())
        .await
        .expect("submitted");
    assert_eq!((submitted.trades, submitted.onchain_tx_hash.len()), (3, 66));
    let batch = wait_batch(&mut world, "n1:1-3").await;
    assert_eq!(
        (batch.status(), batch.failed_trade_ids.as_slice()),
        (
            pb::TradeBatchStatus::Finalized,
            ["t-2".to_owned()].as_slice()
        )
    );
    assert_eq!(batch.onchain_tx_hash, submitted.onchain_tx_hash);
    assert!(batch.block_number > 0 && batch.gas_used > 0);
    // All repeats have one effect.
    assert_eq!(
        settle(&mut world, "n1:1-3", trades)
            .await
            .expect("answered"),
        batch
    );
    assert_eq!(
        (
            world.tokens("BOND-1", "alice").await,
            world.tokens("BOND-1", "bob").await
        ),
        (5, 95)
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "alice").await,
            world.tokens("CFA-RUB", "bob").await
        ),
        (4_995_00, 5_000_00)
    );
    assert_eq!(world.tokens("CFA-RUB", "system:fees").await, 5_00);
    assert_eq!(
        (
            world.supply("CFA-RUB").await.as_str(),
            world.supply("BOND-1").await.as_str()
        ),
        ("10000.00", "100")
    );
    let first = trade(&mut world, "t-1").await;
    assert_eq!(
        (first.status(), first.onchain_tx_hash.as_str()),
        (OperationStatus::Finalized, batch.onchain_tx_hash.as_str())
    );
    assert_eq!(
        (
            first.from_user_id.as_str(),
            first.to_user_id.as_str(),
            first.trade_id.as_str()
        ),
        ("bob", "alice", "t-1")
    );
    let left_out = trade(&mut world, "t-2").await;
    assert_eq!(
        (left_out.status(), left_out.rejection_reason()),
        (
            OperationStatus::Failed,
            RejectionReasonCode::IntegrationError
        )
    );
    let seen = world.events_until(events::topics::CFA, |event| {
        event.short_type() == "CfaTransferredEvent"
            && pb::CfaTransferredEvent::decode(event.payload.as_slice())
                .is_ok_and(|e| e.trade_id == "t-3")
    });
    let transferred: Vec<_> = seen
        .await
        .iter()
        .filter(|event| event.short_type() == "CfaTransferredEvent")
        .map(|event| pb::CfaTransferredEvent::decode(event.payload.as_slice()).expect("decodes"))
        .collect();
    assert_eq!(
        transferred
            .iter()
            .map(|event| event.trade_id.as_str())
            .collect::<Vec<_>>(),
        ["t-1", "t-3"]
    );
    let event = &transferred[0];
    assert_eq!(
        (
            event.instrument_id.as_str(),
            event.from_user_id.as_str(),
            event.to_user_id.as_str()
        ),
        ("BOND-1", "bob", "alice")
    );
    assert_eq!(
        (event.amount.clone(), event.tx_hash.as_str()),
        (amount("BOND-1", "4"), batch.onchain_tx_hash.as_str())
    );
    assert_eq!(event.operation_id, first.operation_id);
    assert!(event.transferred_at.is_some());
    assert_eq!(event.transferred_at, first.finalized_at);
    // A left-out trade can be sent again, a settled one cannot.
    let again = settle(
        &mut world,
        "n1:4-4",
        vec![leg("t-2", 2, "alice", "bob", "50", "4000.00", "4.00")],
    )
    .await
    .expect("submitted");
    assert_eq!(again.trades, 1);
    assert_eq!(
        wait_batch(&mut world, "n1:4-4").await.failed_trade_ids,
        Vec::<String>::new()
    );
    assert_eq!(
        trade(&mut world, "t-2").await.status(),
        OperationStatus::Finalized
    );
    let twice = settle(
        &mut world,
        "n1:5-5",
        vec![leg("t-1", 1, "alice", "bob", "4", "4000.00", "4.00")],
    )
    .await;
    let twice = twice.expect("settled before");
    assert_eq!(
        (twice.status(), twice.failed_trade_ids),
        (pb::TradeBatchStatus::Finalized, Vec::new())
    );
    assert_eq!(twice.onchain_tx_hash, batch.onchain_tx_hash);
    assert_eq!(world.tokens("BOND-1", "alice").await, 55);
    world.stop().await;
}

/// The block was read before the batch's hash was stored: no further block and no event follow.
// rows: R094
#[tokio::test(flavor = "multi_thread")]
async fn r094_a_receipt_that_came_before_its_hash_was_stored_is_read_at_once() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let trades = vec![leg("t-1", 1, "alice", "bob", "4", "4000.00", "4.00")];
    settle(&mut world, "n1:1-1", trades)
        .await
        .expect("submitted");
    let settled = wait_batch(&mut world, "n1:1-1").await;
    let submitted = "UPDATE batch SET status = 1, block_number = NULL, gas_used = 0";
    alter_store(folder.path(), submitted).await;
    assert_eq!(wait_batch(&mut world, "n1:1-1").await, settled);
    world.stop().await;
}

// rows: R096
#[tokio::test(flavor = "multi_thread")]
async fn r096_event_and_batch_make_one_transfer() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    // The event of t-1 and the batch of t-2 come first.
    let one = executed("t-1", 1);
    world
        .log
        .publish(&[one.clone(), one])
        .await
        .expect("published");
    let first = entered(&world, "t-1").await;
    assert_eq!(
        (first.status(), first.onchain_tx_hash.as_str()),
        (OperationStatus::Created, ""),
        "no chain step before settlement"
    );
    let trades = vec![
        leg("t-1", 1, "alice", "bob", "2", "2000.00", "0"),
        leg("t-2", 2, "alice", "bob", "2", "2000.00", "0"),
    ];
    settle(&mut world, "n1:1-2", trades)
        .await
        .expect("submitted");
    wait_batch(&mut world, "n1:1-2").await;
    let late = [executed("t-2", 2), executed("t-3", 3)];
    world.log.publish(&late).await.expect("published");
    entered(&world, "t-3").await;
    world.resume_operations().await;
    assert_eq!(
        trade(&mut world, "t-1").await.operation_id,
        first.operation_id
    );
    for trade_id in ["t-1", "t-2"] {
        assert_eq!(
            trade(&mut world, trade_id).await.status(),
            OperationStatus::Finalized
        );
    }
    assert_eq!(
        trade(&mut world, "t-3").await.status(),
        OperationStatus::Created
    );
    // TransferCfa of the same trade returns the same transfer.
    let same = world
        .cfa
        .transfer_cfa(transfer_of("t-1"))
        .await
        .expect("answered")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(same.operation_id, first.operation_id);
    assert_eq!(world.tokens("BOND-1", "alice").await, 4);
    world.stop().await;
}

/// The ledger's transaction of a trade of two units, as settlement posts it first.
async fn post(world: &mut World, trade_id: &str) {
    let posted = ledger::CreateOperationRequest {
        context: context(trade_id),
        operation: Some(ledger::Operation {
            r#type: proto::common::v1::OperationType::TradeBuy.into(),
            user_id: "alice".into(),
            idempotency_key: trade_id.into(),
            external_ref: Some(trade_id.into()),
            awaits_chain: true,
            ..Default::default()
        }),
        postings: vec![ledger::Posting {
            debit_subaccount_id: "alice:CFA-RUB".into(),
            credit_subaccount_id: "system:reserve:CFA-RUB".into(),
            amount: amount("CFA-RUB", "2000.00"),
            ..Default::default()
        }],
        ..Default::default()
    };
    world.ledger.create_operation(posted).await.expect("posted");
}

// rows: R096
#[tokio::test(flavor = "multi_thread")]
async fn r096_event_call_and_batch_at_once_make_one_transfer() {
    const TRADES: u64 = 12;
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    world.deposit("alice", "20000.00").await;
    let id = |number: u64| format!("t-{number}");
    for number in 1..=TRADES {
        post(&mut world, &id(number)).await;
    }
    let together = Arc::new(tokio::sync::Barrier::new(3 * TRADES as usize));
    let mut paths = tokio::task::JoinSet::new();
    for number in 1..=TRADES {
        let (trade_id, turn) = (id(number), together.clone());
        let log = world.log.clone();
        paths.spawn(async move {
            let executed = executed(&trade_id, number);
            turn.wait().await;
            // The market's event, redelivered.
            let twice = [executed.clone(), executed];
            log.publish(&twice).await.expect("published");
        });
        let (trade_id, turn, mut cfa) = (id(number), together.clone(), world.cfa.clone());
        paths.spawn(async move {
            turn.wait().await;
            let called = cfa.transfer_cfa(transfer_of(&trade_id)).await;
            let operation = called.expect("called").into_inner().operation;
            assert_eq!(operation.expect("operation").trade_id, trade_id);
        });
        let (trade_id, turn, mut cfa) = (id(number), together.clone(), world.cfa.clone());
        paths.spawn(async move {
            let request = pb::SettleTradesRequest {
                context: context(&key()),
                batch_id: format!("n1:{number}-{number}"),
                trades: vec![leg(&trade_id, number, "alice", "bob", "2", "2000.00", "0")],
            };
            turn.wait().await;
            cfa.settle_trades(request).await.expect("submitted");
        });
    }
    let ended = tokio::time::timeout(testkit::PATIENCE, paths.join_all()).await;
    ended.expect("all paths end in time");
    // A receipt may have arrived before its batch was recorded as submitted: the sweep reads it.
    world.resume_operations().await;
    for number in 1..=TRADES {
        let batch = wait_batch(&mut world, &format!("n1:{number}-{number}")).await;
        assert_eq!(batch.failed_trade_ids, Vec::<String>::new());
    }
    // The events of all trades were consumed before this one.
    let last = id(TRADES + 1);
    let marker = [executed(&last, TRADES + 1)];
    world.log.publish(&marker).await.expect("published");
    entered(&world, &last).await;
    world.resume_operations().await;
    for number in 1..=TRADES {
        let settled = trade(&mut world, &id(number)).await;
        assert_eq!(settled.status(), OperationStatus::Finalized);
    }
    assert_transferred_once(&mut world, TRADES).await;
    assert_eq!(
        world.tokens("BOND-1", "alice").await,
        2 * u128::from(TRADES)
    );
    world.stop().await;
}

/// One transfer on chain and one event for each of the trades `t-1..=t-<trades>`.
pub async fn assert_transferred_once(world: &mut World, trades: u64) {
    // This deposit's event is published after those of the trades.
    let marker = world.deposit("carol", "1.00").await;
    let replayed = world
        .cfa
        .replay_chain_transfers(pb::ReplayChainTransfersRequest::default())
        .await
        .expect("replayed")
        .into_inner();
    assert_eq!(replayed.through_block, replayed.last_block, "one page");
    let to_alice = chain::Address::of_user("alice").to_string();
    let received = replayed
        .transfers
        .iter()
        .filter(|transfer| transfer.instrument_id == "BOND-1" && transfer.to_address == to_alice);
    assert_eq!(received.count() as u64, trades);
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.key == marker.operation_id && event.short_type() == "CfaIssuedEvent"
        })
        .await;
    let mut transferred = BTreeMap::<String, u32>::new();
    for event in seen {
        if event.short_type() == "CfaTransferredEvent" {
            let moved = pb::CfaTransferredEvent::decode(event.payload.as_slice());
            *transferred
                .entry(moved.expect("decodes").trade_id)
                .or_default() += 1;
        }
    }
    let once = (1..=trades).map(|number| (format!("t-{number}"), 1));
    assert_eq!(transferred, once.collect());
}

// A batch that has ended stays without its payload. Without its row a repeat would send the trade
// that was left out under the key of the first transaction, whose receipt says nothing of it.
#[tokio::test(flavor = "multi_thread")]
async fn t46_an_ended_batch_answers_a_repeat_after_a_sanction_was_lifted() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    world.issue("BOND-1", "carol", "10").await;
    let is_sanctioned = |world: &World, is_sanctioned: bool| {
        world
            .double
            .upsert_user("carol", |carol| carol.is_sanctioned = is_sanctioned);
    };
    is_sanctioned(&world, true);
    let trades = vec![
        leg("t-1", 1, "alice", "bob", "1", "1000.00", "0"),
        leg("t-2", 2, "alice", "carol", "1", "1000.00", "0"),
    ];
    let first = settle(&mut world, "n1:1-2", trades.clone()).await;
    first.expect("submitted");
    let ended = wait_batch(&mut world, "n1:1-2").await;
    assert_eq!(ended.failed_trade_ids, ["t-2"]);
    world.stop().await;
    // Fails unless the batch has this payload.
    let without_payload = "UPDATE batch SET payload = '' WHERE status = 2 AND payload = ''";
    alter_store(folder.path(), without_payload).await;

    let mut world = World::start(folder.path()).await;
    is_sanctioned(&world, false);
    world.resume_operations().await;
    let again = settle(&mut world, "n1:1-2", trades).await.expect("known");
    assert_eq!(again, ended);
    let left_out = trade(&mut world, "t-2").await;
    assert_eq!(left_out.status(), OperationStatus::Rejected);
    assert_eq!(world.tokens("BOND-1", "alice").await, 1);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_events_of_a_stored_trade_in_one_batch_do_not_stop_the_consumer() {
    let folder = tempfile::tempdir().expect("folder");
    let world = market_world(folder.path()).await;
    let published = world.log.publish(&[executed("t-1", 1)]).await;
    published.expect("published");
    entered(&world, "t-1").await;
    // Events with ids of their own, read together.
    let repeated = [("t-1", 1), ("t-1", 1), ("t-2", 2), ("t-2", 2), ("t-3", 3)];
    let repeated = repeated.map(|(trade_id, number)| executed(trade_id, number));
    let published = world.log.publish(&repeated).await;
    published.expect("published");
    entered(&world, "t-3").await;
    for trade_id in ["t-1", "t-2", "t-3"] {
        let stored = operations_of(&world, trade_id).await;
        assert_eq!(stored.len(), 1, "{trade_id}");
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t46_trades_of_a_sanctioned_party_are_left_out_before_the_chain() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    world.issue("BOND-1", "carol", "10").await;
    world
        .double
        .upsert_user("carol", |carol| carol.is_sanctioned = true);
    let trades = vec![
        leg("t-1", 1, "alice", "bob", "1", "1000.00", "0"),
        leg("t-2", 2, "alice", "carol", "1", "1000.00", "0"),
    ];
    settle(&mut world, "n1:1-2", trades)
        .await
        .expect("submitted");
    let batch = wait_batch(&mut world, "n1:1-2").await;
    assert_eq!(batch.failed_trade_ids, ["t-2"]);
    let hit = trade(&mut world, "t-2").await;
    assert_eq!(
        (hit.status(), hit.rejection_reason()),
        (OperationStatus::Rejected, RejectionReasonCode::SanctionsHit)
    );
    assert_eq!(
        (
            world.tokens("BOND-1", "alice").await,
            world.tokens("BOND-1", "carol").await
        ),
        (1, 10)
    );
    let none = settle(&mut world, "n1:3-3", Vec::new())
        .await
        .expect_err("empty");
    assert_eq!(none.code(), tonic::Code::InvalidArgument);
    world.stop().await;
}

// rows: R094 R095
#[tokio::test(flavor = "multi_thread")]
async fn t46_transfer_to_or_from_a_blocked_user_is_refused_like_an_own_call() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    world.deposit("mallory", "5000.00").await;
    world.issue("BOND-1", "mallory", "10").await;
    world
        .double
        .upsert_user("mallory", |mallory| mallory.status = UserStatus::Blocked);
    let own_call = pb::RedeemCfaRubRequest {
        context: context(&key()),
        user_id: "mallory".into(),
        amount: roubles("1.00"),
        payout_id: "payout-1".into(),
    };
    let own_call = world.redeem_rub(own_call).await.expect("answered");
    let refused = own_call.into_inner().operation.expect("operation");
    assert_eq!(refused.rejection_message, "User is blocked");
    for instrument_id in ["CFA-RUB", "BOND-1"] {
        for (from, to) in [("bob", "mallory"), ("mallory", "bob")] {
            let request = pb::TransferCfaRequest {
                context: context(&key()),
                instrument_id: instrument_id.into(),
                from_user_id: from.into(),
                to_user_id: to.into(),
                amount: amount(instrument_id, "1"),
                trade_id: String::new(),
                payment: None,
            };
            if instrument_id == "CFA-RUB" && from == "bob" {
                world.deposit("bob", "100.00").await;
            }
            let transfer = world.transfer(request).await.expect("answered");
            assert_eq!(
                (
                    transfer.status(),
                    transfer.rejection_reason(),
                    transfer.rejection_message
                ),
                (
                    refused.status(),
                    refused.rejection_reason(),
                    refused.rejection_message.clone()
                ),
                "{instrument_id} {from} -> {to}"
            );
        }
    }
    assert_eq!(
        (
            world.tokens("BOND-1", "mallory").await,
            world.tokens("CFA-RUB", "mallory").await
        ),
        (10, 5_000_00)
    );
    // A trade matched before the block of its party is settled (D47).
    let trades = vec![leg("t-1", 1, "mallory", "bob", "4", "4000.00", "4.00")];
    settle(&mut world, "n1:1-1", trades)
        .await
        .expect("submitted");
    let batch = wait_batch(&mut world, "n1:1-1").await;
    assert_eq!(batch.failed_trade_ids, Vec::<String>::new());
    assert_eq!(world.tokens("BOND-1", "mallory").await, 14);
    world.stop().await;
}

// rows: R036 R094 R095
#[tokio::test(flavor = "multi_thread")]
async fn r094_plain_transfer_moves_chain_and_ledger() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    world.double.with(|state| state.trail.clear());
    let request = |units: &str| pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", units),
        ..Default::default()
    };
    let operation = world.transfer(request("10")).await.expect("sent");
    assert_eq!(
        world.double.trail(),
        [
            "profile bob",
            "profile alice",
            "limits bob TRADING 10 P2P_TRANSFER",
            "sanctions bob",
            "sanctions alice"
        ]
    );
    assert_eq!(
        (
            operation.from_user_id.as_str(),
            operation.to_user_id.as_str()
        ),
        ("bob", "alice")
    );
    let operation = world.settle(&operation).await;
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert_eq!(
        (
            world.tokens("BOND-1", "alice").await,
            world.tokens("BOND-1", "bob").await
        ),
        (10, 90)
    );
    let balance = world.balance("alice:BOND-1").await;
    assert_eq!(
        (balance.balance.to_string(), balance.available.to_string()),
        ("10".into(), "10".into())
    );
    assert_eq!(world.balance("bob:BOND-1").await.balance.to_string(), "90");
    world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "CfaTransferredEvent"
        })
        .await;
    // Only the sender may call it, and a receiver pays only by the receiver's own call (D46).
    for credential in [
        "sandbox.investor.alice",
        "sandbox.operator",
        "sandbox.service",
    ] {
        let mut foreign = world.as_caller(credential);
        let refused = foreign.transfer_cfa(request("1")).await;
        let code = refused.expect_err(credential).code();
        assert_eq!(code, tonic::Code::PermissionDenied, "{credential}");
    }
    let mut paid = request("1");
    paid.payment = Some(pb::PaymentLeg {
        amount: decimal("1000.00"),
        ..Default::default()
    });
    let refused = world.transfer(paid).await.expect_err("paid");
    assert_eq!(
        refused.message(),
        "payment: needs a trade_id: the receiver pays by an own call only"
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 10_000_00);
    // A transfer of more than the balance is refused and changes nothing.
    let refused = world.transfer(request("1000")).await.expect_err("too many");
    assert_eq!(refused.message(), "Insufficient balance");
    // If the chain reverts, the ledger reverses its posting.
    call_contract(&mut world, "BOND-1", "pause()").await;
    let reverted = world.transfer(request("5")).await.expect("sent");
    assert_eq!(
        world.settle(&reverted).await.status(),
        OperationStatus::Rejected
    );
    assert_eq!(
        world.balance("alice:BOND-1").await.balance.to_string(),
        "10"
    );
    assert_eq!(
        world.balance("bob:BOND-1").await.available.to_string(),
        "90"
    );
    world.stop().await;
}

// A trade that can never be sent is listed as failed and blocks no other.
// rows: R094
#[tokio::test(flavor = "multi_thread")]
async fn r094_trades_that_cannot_be_sent_are_named() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let strange = pb::TradeLeg {
        instrument_id: "NONE-1".into(),
        ..leg("t-2", 2, "alice", "bob", "1", "1000.00", "0")
    };
    let trades = vec![
        leg("t-1", 1, "alice", "bob", "1", "1000.00", "0"),
        strange,
        leg("t-3", 3, "alice", "bob", "0.5", "500.00", "0"),
    ];
    settle(&mut world, "n1:1-3", trades)
        .await
        .expect("accepted");
    let batch = wait_batch(&mut world, "n1:1-3").await;
    assert_eq!(batch.status(), pb::TradeBatchStatus::Finalized);
    assert_eq!(batch.failed_trade_ids, ["t-2", "t-3"]);
    // The id belongs to a different trade.
    let other = vec![
        leg("t-1", 1, "alice", "bob", "2", "2000.00", "0"),
        leg("t-4", 4, "alice", "bob", "1", "1000.00", "0"),
    ];
    settle(&mut world, "n1:4-4", other).await.expect("accepted");
    let batch = wait_batch(&mut world, "n1:4-4").await;
    assert_eq!(batch.failed_trade_ids, ["t-1"]);
    assert_eq!(
        trade(&mut world, "t-1").await.status(),
        OperationStatus::Finalized
    );
    assert_eq!(world.tokens("BOND-1", "alice").await, 2);
    world.stop().await;
}

// rows: R096 R182
#[tokio::test(flavor = "multi_thread")]
async fn r096_transfer_of_a_trade_waits_for_settlement() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let request = |units: &str| pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", units),
        trade_id: "t-1".into(),
        payment: None,
    };
    let nothing = world
        .cfa
        .transfer_cfa(request("2"))
        .await
        .expect_err("unknown trade");
    assert_eq!(
        (nothing.code(), nothing.message()),
        (tonic::Code::NotFound, "Operation not found")
    );
    // The ledger has the trade, so settlement will send it.
    post(&mut world, "t-1").await;
    let entered = world
        .cfa
        .transfer_cfa(request("2"))
        .await
        .expect("entered")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        (entered.status(), entered.onchain_tx_hash.as_str()),
        (OperationStatus::Created, ""),
        "no chain step before settlement"
    );
    let other = world
        .cfa
        .transfer_cfa(request("3"))
        .await
        .expect_err("another trade");
    assert_eq!(reason(&other), "REFERENCE_TAKEN");
    world.resume_operations().await;
    let trades = vec![leg("t-1", 1, "alice", "bob", "2", "2000.00", "0")];
    settle(&mut world, "n1:1-1", trades)
        .await
        .expect("submitted");
    wait_batch(&mut world, "n1:1-1").await;
    let sent = world
        .cfa
        .transfer_cfa(request("2"))
        .await
        .expect("answered")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        (sent.operation_id.as_str(), sent.status()),
        (entered.operation_id.as_str(), OperationStatus::Finalized)
    );
    assert_eq!(world.tokens("BOND-1", "alice").await, 2);
    world.stop().await;
}

// rows: R019 R304
#[tokio::test(flavor = "multi_thread")]
async fn r304_units_are_neither_taken_nor_given_below_the_standard_kyc_level() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let double = world.double.clone();
    let level = |user_id: &str, kyc| double.upsert_user(user_id, |user| user.kyc = kyc);
    let transfer = || pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    for user_id in ["bob", "alice"] {
        level(user_id, KycStatus::Simplified);
        let refused = world.transfer(transfer()).await.expect("recorded");
        assert_kyc_refused(&refused);
        level(user_id, KycStatus::Standard);
    }
    level("alice", KycStatus::Simplified);
    let issue = issue_request("BOND-1", "alice", "1", None);
    let refused = world.cfa.issue_investment_cfa(issue).await;
    assert_kyc_refused(
        &refused
            .expect("recorded")
            .into_inner()
            .operation
            .expect("one"),
    );
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    let refused = subscribed.expect_err("refused");
    assert_eq!(
        (reason(&refused).as_str(), refused.message()),
        ("KYC_LEVEL_TOO_LOW", "KYC level too low")
    );
    // A deposit needs no KYC level (R304). Only the day limit decides.
    world.deposit("alice", "1.00").await;
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 10_001_00);
    assert_eq!(world.tokens("BOND-1", "alice").await, 0);
    level("alice", KycStatus::Standard);
    let sent = world.transfer(transfer()).await.expect("sent");
    assert_eq!(
        world.settle(&sent).await.status(),
        OperationStatus::Finalized
    );
    world.stop().await;
}

fn assert_kyc_refused(operation: &pb::CfaOperation) {
    assert_eq!(
        (
            operation.status(),
            operation.rejection_reason(),
            operation.rejection_message.as_str()
        ),
        (
            OperationStatus::Rejected,
            RejectionReasonCode::KycRequired,
            "KYC level too low"
        )
    );
}

/// The operation of `trade_id` for this caller: in the list of its user and by its id.
async fn operation_read_by(world: &World, user_id: &str, trade_id: &str) -> pb::CfaOperation {
    let mut cfa = world.as_caller(&format!("sandbox.investor.{user_id}"));
    let request = pb::ListOperationsRequest {
        external_ref: trade_id.into(),
        ..Default::default()
    };
    let listed = cfa.list_operations(request).await.expect("listed");
    let mut listed = listed.into_inner().operations;
    assert_eq!(listed.len(), 1, "operations for {user_id}");
    let listed = listed.remove(0);
    let request = pb::GetOperationRequest {
        context: None,
        operation_id: listed.operation_id.clone(),
    };
    let found = cfa.get_operation(request).await.expect("found");
    assert_eq!(found.into_inner().operation.as_ref(), Some(&listed));
    listed
}

// rows: R314
#[tokio::test(flavor = "multi_thread")]
async fn r314_a_party_of_a_trade_reads_no_user_id_of_the_other_and_no_key() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let trades = vec![leg("t-1", 1, "alice", "bob", "2", "2000.00", "0")];
    settle(&mut world, "n1:1-1", trades)
        .await
        .expect("submitted");
    wait_batch(&mut world, "n1:1-1").await;
    // Staff and services read all of it.
    let whole = trade(&mut world, "t-1").await;
    let parties = |operation: &pb::CfaOperation| {
        [
            operation.user_id.clone(),
            operation.from_user_id.clone(),
            operation.to_user_id.clone(),
            operation.idempotency_key.clone(),
        ]
    };
    assert_eq!(parties(&whole), ["bob", "bob", "alice", "t-1"]);
    for (user_id, shown) in [
        ("alice", ["", "", "alice", ""]),
        ("bob", ["bob", "bob", "", ""]),
    ] {
        let read = operation_read_by(&world, user_id, "t-1").await;
        assert_eq!(parties(&read), shown, "{user_id}");
        assert_eq!(
            (&read.trade_id, &read.onchain_tx_hash, read.status()),
            (&whole.trade_id, &whole.onchain_tx_hash, whole.status())
        );
    }
    // A transfer without a trade names both: its sender has chosen the receiver.
    let request = pb::TransferCfaRequest {
        context: context("gift"),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let sent = world.transfer(request).await.expect("sent");
    let request = pb::GetOperationRequest {
        context: None,
        operation_id: sent.operation_id,
    };
    let mut alice = world.as_caller("sandbox.investor.alice");
    let read = alice.get_operation(request).await.expect("found");
    let read = read.into_inner().operation.expect("operation");
    assert_eq!(parties(&read), ["bob", "bob", "alice", "gift"]);
    world.stop().await;
}
