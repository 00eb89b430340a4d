//! Events of this service missing from the log, and recovery by the ledger from blocks (R221).

use events::{Event, Log};
use prost::Message;
use proto::cfa::v1 as pb;
use proto::chain::v1 as chain;
use proto::ledger::v1 as ledger;

use crate::world::*;

// rows: R221
#[tokio::test(flavor = "multi_thread")]
async fn r221_a_block_restores_operations_whose_events_were_missed_once() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world
        .losing
        .lose(&["CfaIssuedEvent", "CfaTransferredEvent"]);
    world.double.paid("pay-1", "user-a", "100.00");
    world.double.paid("pay-2", "user-a", "1.00");
    let issue = pb::IssueCfaRubRequest {
        context: context("k-1"),
        user_id: "user-a".into(),
        amount: roubles("100.00"),
        payment_id: "pay-1".into(),
    };
    let issued = world.cfa.issue_cfa_rub(issue).await.expect("issued");
    let issued = issued.into_inner().operation.expect("operation");
    world.settle(&issued).await;
    // No event was published: the ledger reads the operation from its block.
    world.balance_becomes("user-a:CFA-RUB", "100.00").await;
    let lost = world.losing.lost();
    assert_eq!(lost.len(), 1, "{lost:?}");

    // The event arrives late, and the block's event again under another id. Later operations are
    // again read from their block only.
    let is_its_block = |event: &Event| {
        let block = chain::BlockReadEvent::decode(event.payload.as_slice());
        event.short_type() == "BlockReadEvent"
            && block.is_ok_and(|block| block.tx_hashes.contains(&issued.onchain_tx_hash))
    };
    let blocks = world
        .events_until(events::topics::CHAIN, is_its_block)
        .await;
    let mut again = blocks.last().expect("found").clone();
    again.id = uuid::Uuid::new_v4();
    let events = [lost[0].clone(), again];
    world.log.publish(&events).await.expect("published");
    // When this later event of the same topic is posted, the late one is consumed. Its transaction
    // is in no block, so only the event can post it.
    let marker = pb::CfaIssuedEvent {
        operation_id: key(),
        instrument_id: "CFA-RUB".into(),
        holder_id: "user-b".into(),
        amount: amount("CFA-RUB", "7.00"),
        tx_hash: format!("0x{}", "ab".repeat(32)),
        ..Default::default()
    };
    let name = "dfa.cfa.v1.CfaIssuedEvent";
    let marker = event(events::topics::CFA, &lost[0].key, name, &marker);
    world.log.publish(&[marker]).await.expect("published");
    world.balance_becomes("user-b:CFA-RUB", "7.00").await;
    let issue = pb::IssueCfaRubRequest {
        context: context("k-2"),
        user_id: "user-a".into(),
        amount: roubles("1.00"),
        payment_id: "pay-2".into(),
    };
    world.cfa.issue_cfa_rub(issue).await.expect("issued");
    world.balance_becomes("user-a:CFA-RUB", "101.00").await;
    let request = ledger::ListOperationsRequest {
        user_id: "user-a".into(),
        ..Default::default()
    };
    let operations = world.ledger.list_operations(request).await.expect("listed");
    let operations = operations.into_inner().operations;
    assert_eq!(operations.len(), 2, "{operations:?}");
    assert!(
        operations
            .iter()
            .all(|operation| operation.onchain_tx_hash.is_some()),
        "{operations:?}"
    );
    world.stop().await;
}
