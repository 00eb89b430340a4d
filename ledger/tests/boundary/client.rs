//! The ledger as other services call it: the workspace's typed client.

use rpc::Context;
use service_clients::{
    HoldStatus, LedgerClient, OperationStatus, OperationType,
    ledger::{Balance, Batch, NewHold, Operation, Posting},
};
use types::{Amount, Decimal, Id128, Minor};

use crate::harness::*;

fn rubles(whole: i64) -> Amount {
    Amount::rubles(Minor(whole * 100))
}

/// A deposit of 100 that becomes final by the chain.
fn deposit(operation_id: &str) -> Batch {
    let posting = Posting {
        debit: "system:reserve:CFA-RUB".to_owned(),
        credit: "u1:CFA-RUB".to_owned(),
        amount: rubles(100),
        hold: None,
        unsettled: false,
    };
    Batch {
        operations: vec![Operation {
            operation_id: operation_id.to_owned(),
            operation_type: OperationType::Deposit,
            user_id: "u1".to_owned(),
            idempotency_key: "deposit-1".to_owned(),
            external_ref: "payment-1".to_owned(),
            postings: vec![posting],
        }],
        ..Batch::default()
    }
}

async fn balance(client: &LedgerClient, subaccount: &str) -> [Decimal; 4] {
    let read = client.balance(&Context::new("test"), subaccount).await;
    let Balance {
        balance,
        held,
        unsettled,
        available,
    } = read.unwrap();
    [balance, held, unsettled, available]
}

/// Covers createOperation, getOperation, createHold, consumeHold, finalizeOperation, getBalance.
// rows: R037
#[tokio::test]
async fn r037_the_ledger_client_has_every_call_that_its_peers_need() {
    let world = World::new().await;
    let client = LedgerClient::new(world.channel("sandbox.service"), "test");
    let context = Context::new("test");
    let whole = |numbers: [i64; 4]| numbers.map(Decimal::from);
    let own = "u1:CFA-RUB";
    assert_eq!(balance(&client, own).await, whole([0, 0, 0, 0]));

    let operation_id = fresh();
    for _ in 0..2 {
        let batch = deposit(&operation_id);
        let made = client.create_operations(&context, "batch-1", batch).await;
        made.unwrap();
    }
    assert_eq!(balance(&client, own).await, whole([100, 0, 0, 100]));
    let status = client.operation_status(&context, &operation_id).await;
    assert_eq!(status.unwrap(), OperationStatus::Processing);
    let made = world.get_operation(&operation_id).await.operation.unwrap();
    assert_eq!(made.external_ref.as_deref(), Some("payment-1"));

    let new = NewHold {
        hold_id: Id128::from_u128(7),
        subaccount_id: own,
        amount: rubles(40),
        reason: "an order",
        owner: "",
        destination: Some("shop:CFA-RUB"),
        expires_at_us: None,
    };
    // A repeat with the hold's id acts once.
    for _ in 0..2 {
        let hold = client.create_hold(&context, new).await.unwrap();
        assert_eq!(hold.hold_id, new.hold_id);
        assert_eq!(hold.status, HoldStatus::Active);
        assert_eq!([hold.amount, hold.remaining], [Decimal::from(40); 2]);
    }
    assert_eq!(balance(&client, own).await, whole([100, 40, 0, 60]));

    for _ in 0..2 {
        let kind = OperationType::Payment;
        let consumed = client.consume_hold(&context, new.hold_id, kind, "order-1");
        consumed.await.unwrap();
    }
    let hold = client.hold(&context, new.hold_id).await.unwrap().unwrap();
    assert_eq!(hold.status, HoldStatus::Consumed);
    assert!(hold.remaining.is_zero());
    assert_eq!(balance(&client, own).await, whole([60, 0, 0, 60]));
    assert_eq!(
        balance(&client, "shop:CFA-RUB").await,
        whole([40, 0, 0, 40])
    );

    // More ids than one call takes, with the existing ones in its first and its last.
    let mut wanted = vec!["none:CFA-RUB".to_owned(); 1_001];
    (wanted[0], wanted[1_000]) = (own.to_owned(), "shop:CFA-RUB".to_owned());
    let found = client.sub_accounts_by_id(&context, &wanted).await.unwrap();
    let found: Vec<_> = found
        .iter()
        .map(|row| (row.subaccount_id.as_str(), row.balance, row.held))
        .collect();
    let row = |id, balance| (id, Decimal::from(balance), Decimal::ZERO);
    assert_eq!(found, [row(own, 60), row("shop:CFA-RUB", 40)]);

    let ids = [operation_id.clone()];
    client
        .finalize(&context, "final-1", &ids, &tx_hash("k1"))
        .await
        .unwrap();
    let status = client.operation_status(&context, &operation_id).await;
    assert_eq!(status.unwrap(), OperationStatus::Finalized);
    let unknown = client.operation_status(&context, "none").await;
    assert!(unknown.unwrap_err().is_not_found());
    world.assert_books_balance().await;
}
