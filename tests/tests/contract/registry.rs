//! Registry of holders: balances as of a time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::Platform;
use tests::bank::now_s;
use tests::call::{AUDITOR, number, text};
use tests::process::PATIENCE;
use tests::shared::{platform, run};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use types::Decimal;

// rows: R099
#[test]
fn r099_holders_as_of_a_time_do_not_change_with_later_trades() {
    run(async {
        let platform = platform().await;
        let (seller, buyer) = (platform.trader().await, platform.rich("1000.00").await);
        let bond = platform.bond().await;
        let issue = platform.issue(&bond, &seller, "10").await;
        let cut_off = block_time(platform, &text(&issue, "/operationId")).await;
        let figure = |value: &str| number(&json!(value));
        let all = BTreeMap::from([(seller.id.clone(), figure("10"))]);
        assert_eq!(holders(platform, &bond, Some(&cut_off)).await, all);

        // Block times are whole seconds: a trade in the same second would count.
        until_after(&cut_off).await;
        platform.place(&seller, &bond, "SELL", "10.00", "4").await;
        platform.place(&buyer, &bond, "BUY", "10.00", "4").await;
        platform.settled(&bond, 1).await;
        let shared = BTreeMap::from([
            (seller.id.clone(), figure("6")),
            (buyer.id.clone(), figure("4")),
        ]);
        assert_eq!(holders(platform, &bond, None).await, shared);
        assert_eq!(holders(platform, &bond, Some(&cut_off)).await, all);
        let before = holders(platform, &bond, Some("2020-01-01T00:00:00Z")).await;
        assert_eq!(before, BTreeMap::new());
    });
}

/// Time of the block that contains the operation's transaction.
async fn block_time(platform: &Platform, operation_id: &str) -> String {
    let operation = platform.cfa_operation_is(operation_id, "FINALIZED").await;
    let request = json!({ "txHash": text(&operation, "/onchainTxHash") });
    let receipt = platform.ok(AUDITOR, "chain.GetTransactionReceipt", request);
    let number = receipt.await["receipt"]["blockNumber"].clone();
    let block = platform.ok(AUDITOR, "chain.GetBlock", json!({ "number": number }));
    text(&block.await, "/block/at")
}

/// Waits until the clock is in a later second than `at`.
async fn until_after(at: &str) {
    let at = OffsetDateTime::parse(at, &Rfc3339).expect("a time");
    let deadline = Instant::now() + PATIENCE;
    while now_s() <= at.unix_timestamp() {
        assert!(Instant::now() < deadline, "the clock does not reach {at}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Balances by user, now or as of a time.
async fn holders(
    platform: &Platform,
    instrument: &str,
    as_of: Option<&str>,
) -> BTreeMap<String, Decimal> {
    let mut request = json!({ "instrumentId": instrument });
    if let Some(as_of) = as_of {
        request["asOf"] = json!(as_of);
    }
    let listed = platform.all(AUDITOR, "cfa.ListHolders", "holders", request);
    let balance = |one: &Value| (text(one, "/userId"), number(&one["balance"]));
    listed.await.iter().map(balance).collect()
}
