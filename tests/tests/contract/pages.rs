//! Paged lists: each row is on one page, page sizes have bounds, tokens are valid for their filter
//! only.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tests::Platform;
use tests::call::{AUDITOR, OPERATOR, text};
use tests::shared::{platform, run};
use tests::world::amount;

/// Number of rows that a test creates: the least number of rows of each checked list.
const ROWS: usize = 5;

/// Asserts that pages of two rows contain every row of the whole list once.
async fn assert_pages_of_two(
    platform: &Platform,
    name: &str,
    field: &str,
    id: &str,
    request: Value,
) {
    let ids = |rows: Vec<Value>| {
        rows.iter()
            .map(|row| text(row, &format!("/{id}")))
            .collect::<Vec<_>>()
    };
    let whole = ids(platform.all(AUDITOR, name, field, request.clone()).await);
    assert!(
        whole.len() >= ROWS,
        "{name} {request} has only {} rows",
        whole.len()
    );
    let pages = platform
        .pages(AUDITOR, name, field, request.clone(), 2)
        .await;
    assert!(
        pages.iter().all(|page| page.len() <= 2),
        "{name}: a page has more than two rows"
    );
    let paged = ids(pages.concat());
    let unique: BTreeSet<&String> = paged.iter().collect();
    assert_eq!(unique.len(), paged.len(), "{name}: pages repeat a row");
    let missing: Vec<&String> = whole.iter().filter(|one| !unique.contains(one)).collect();
    assert!(missing.is_empty(), "{name}: pages lack {missing:?}");
}

#[test]
fn r010_pages_by_two_give_every_row_once() {
    run(async {
        let platform = platform().await;
        let bond = platform.bond().await;
        let (seller, buyer) = (platform.trader().await, platform.rich("10000.00").await);
        platform.issue(&bond, &seller, "100").await;
        for _ in 1..ROWS {
            platform.issue(&bond, &platform.trader().await, "1").await;
            platform.intent(&seller, "10.00").await;
            platform.bond().await;
        }
        platform.intent(&seller, "10.00").await;
        for (at, price) in ["10.00", "11.00", "12.00", "13.00", "14.00"]
            .into_iter()
            .enumerate()
        {
            platform.place(&seller, &bond, "SELL", price, "1").await;
            platform.place(&buyer, &bond, "BUY", price, "1").await;
            platform.settled(&bond, at + 1).await;
        }
        let by_user = json!({ "userId": seller.id });
        let by_bond = json!({ "instrumentId": bond });
        assert_pages_of_two(
            platform,
            "cfa.ListHolders",
            "holders",
            "userId",
            by_bond.clone(),
        )
        .await;
        assert_pages_of_two(
            platform,
            "cfa.ListOperations",
            "operations",
            "operationId",
            json!({}),
        )
        .await;
        assert_pages_of_two(
            platform,
            "cfa.ListInstruments",
            "instruments",
            "instrumentId",
            json!({}),
        )
        .await;
        assert_pages_of_two(
            platform,
            "market.ListOrders",
            "orders",
            "orderId",
            by_user.clone(),
        )
        .await;
        assert_pages_of_two(
            platform,
            "market.ListOrders",
            "orders",
            "orderId",
            by_bond.clone(),
        )
        .await;
        assert_pages_of_two(platform, "market.ListTrades", "trades", "tradeId", by_bond).await;
        assert_pages_of_two(
            platform,
            "market.ListTrades",
            "trades",
            "tradeId",
            by_user.clone(),
        )
        .await;
        assert_pages_of_two(
            platform,
            "ledger.ListAccounts",
            "accounts",
            "accountId",
            json!({}),
        )
        .await;
        assert_pages_of_two(
            platform,
            "ledger.ListSubAccounts",
            "subaccounts",
            "subaccountId",
            json!({}),
        )
        .await;
        assert_pages_of_two(
            platform,
            "ledger.ListOperations",
            "operations",
            "operationId",
            by_user.clone(),
        )
        .await;
        assert_pages_of_two(platform, "ledger.ListHolds", "holds", "holdId", json!({})).await;
        assert_pages_of_two(
            platform,
            "payments.ListPaymentIntents",
            "intents",
            "paymentId",
            by_user,
        )
        .await;
        assert_pages_of_two(platform, "identity.ListUsers", "users", "userId", json!({})).await;
    });
}

// rows: R010 R312
#[test]
fn r010_payouts_transfers_and_trading_holds_are_paged_too() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("1000.00").await;
        for _ in 0..ROWS {
            let payout = uuid::Uuid::now_v7().to_string();
            let request =
                json!({ "userId": user.id, "payoutId": payout, "amount": amount("RUB", "10.00") });
            let answer = platform
                .ok(&user.token(), "cfa.RedeemCfaRub", request)
                .await;
            platform
                .cfa_operation_is(&text(&answer, "/operation/operationId"), "FINALIZED")
                .await;
        }
        assert_pages_of_two(
            platform,
            "payments.ListPayouts",
            "payouts",
            "payoutId",
            json!({ "userId": user.id }),
        )
        .await;
        assert_pages_of_two(
            platform,
            "sandbox.ListTransfers",
            "transfers",
            "transferId",
            json!({}),
        )
        .await;

        let holder = platform.trader().await;
        for _ in 0..ROWS {
            let bond = platform.bond().await;
            platform.issue(&bond, &holder, "3").await;
            platform.trading_hold(&holder, &bond, "2").await;
        }
        assert_pages_of_two(
            platform,
            "market.ListTradingHolds",
            "tradingHolds",
            "holdId",
            json!({ "userId": holder.id }),
        )
        .await;
    });
}

#[test]
fn r312_page_sizes_and_tokens_are_validated() {
    run(async {
        let platform = platform().await;
        for _ in 0..3 {
            platform.trader().await;
        }
        let page = |size: i64, token: &str| json!({ "pagination": { "pageSize": size, "pageToken": token } });
        // A size above the maximum is reduced, not refused; 0 is the default of 50.
        platform
            .ok(AUDITOR, "identity.ListUsers", page(1_000_000, ""))
            .await;
        let usual = platform
            .ok(AUDITOR, "identity.ListUsers", page(0, ""))
            .await;
        assert!(
            usual["users"]
                .as_array()
                .is_some_and(|users| (3..=50).contains(&users.len())),
            "{usual}"
        );
        platform
            .refused(AUDITOR, "identity.ListUsers", page(-1, ""))
            .await
            .is_bad_field("pagination.page_size");
        platform
            .refused(AUDITOR, "identity.ListUsers", page(2, "made up"))
            .await
            .is_bad_field("pagination.page_token");

        // A token is invalid with another filter.
        let (user, other) = (platform.trader().await, platform.trader().await);
        for _ in 0..3 {
            platform.intent(&user, "10.00").await;
        }
        let mut request = page(2, "");
        request["userId"] = json!(user.id);
        let first = platform
            .ok(OPERATOR, "payments.ListPaymentIntents", request.clone())
            .await;
        request["pagination"]["pageToken"] = first["pagination"]["nextPageToken"].clone();
        let second = platform
            .ok(OPERATOR, "payments.ListPaymentIntents", request.clone())
            .await;
        assert_eq!(
            second["intents"].as_array().map(Vec::len),
            Some(1),
            "{second}"
        );
        request["userId"] = json!(other.id);
        platform
            .refused(OPERATOR, "payments.ListPaymentIntents", request)
            .await
            .is_bad_field("pagination.page_token");
    });
}

// rows: R312 R339
#[test]
fn r339_lists_of_unknown_filters_are_empty_except_those_of_an_instrument() {
    run(async {
        let platform = platform().await;
        for (name, field) in [
            ("market.ListOrders", "orders"),
            ("market.ListTrades", "trades"),
            ("ledger.ListOperations", "operations"),
            ("ledger.ListAccounts", "accounts"),
            ("payments.ListPayouts", "payouts"),
        ] {
            let rows = platform
                .all(AUDITOR, name, field, json!({ "userId": "no-such-user" }))
                .await;
            assert!(rows.is_empty(), "{name}: {rows:?}");
        }
        let unknown = json!({ "instrumentId": "NO-SUCH-THING" });
        for (name, field) in [
            ("cfa.ListSubscriptions", "subscriptions"),
            ("cfa.ListOffers", "offers"),
        ] {
            let rows = platform.all(AUDITOR, name, field, unknown.clone()).await;
            assert!(rows.is_empty(), "{name}: {rows:?}");
        }
        for name in ["cfa.ListHolders", "market.GetOrderBook"] {
            let refusal = platform
                .refused(AUDITOR, name, json!({ "instrumentId": "NO-SUCH-THING" }))
                .await;
            refusal.is(
                404,
                "not_found",
                "Instrument not found",
                "INSTRUMENT_NOT_FOUND",
            );
        }
    });
}
