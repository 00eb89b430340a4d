//! Amounts are exact decimal texts, and a rouble is one unit of CFA-RUB.

use serde_json::{Value, json};
use tests::Platform;
use tests::call::{AUDITOR, OPERATOR, number, text};
use tests::shared::{platform, run};
use tests::world::{User, amount};

// rows: R007 R311
#[test]
fn r007_amounts_are_text_and_sums_are_exact() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        let intent = platform.intent(&user, "100.00").await;
        assert_eq!(intent["amount"], amount("RUB", "100.00"));
        platform.deposit(&user, "0.10").await;
        platform.deposit(&user, "0.20").await;
        let balance = platform.balance_is(&user.cash(), "0.30").await;
        assert_eq!(balance["balance"]["value"], json!("0.30"), "{balance}");
    });
}

// rows: R024 R023
#[test]
fn r024_a_rouble_paid_is_a_unit_on_chain_and_in_the_ledger() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("100.00").await;
        let holders = platform
            .all(
                AUDITOR,
                "cfa.ListHolders",
                "holders",
                json!({ "instrumentId": "CFA-RUB" }),
            )
            .await;
        let holder = holders
            .iter()
            .find(|holder| holder["userId"] == json!(user.id))
            .expect("a holder on chain");
        assert_eq!(number(&holder["balance"]), number(&json!("100")));
        // The balance of the chain contract, by balanceOf(address), in kopecks.
        let instrument = platform
            .ok(
                AUDITOR,
                "cfa.GetInstrument",
                json!({ "instrumentId": "CFA-RUB" }),
            )
            .await;
        let (contract, address) = (
            text(&instrument, "/instrument/smartContractAddress"),
            text(holder, "/address"),
        );
        let data = format!("0x70a08231{:0>64}", address.trim_start_matches("0x"));
        let result = rpc(
            platform,
            "eth_call",
            json!([{ "to": contract, "data": data }, "latest"]),
        )
        .await;
        let result = result
            .as_str()
            .expect("hex")
            .trim_start_matches("0x")
            .to_owned();
        assert_eq!(u128::from_str_radix(&result, 16), Ok(10_000));
        platform.balance_is(&user.cash(), "100.00").await;
    });
}

/// Calls a JSON-RPC method of the chain; returns its result.
pub async fn rpc(platform: &Platform, method: &str, params: Value) -> Value {
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let answer = tests::process::client()
        .post(platform.url("chain_rpc"))
        .json(&request)
        .send()
        .await;
    let answer: Value = answer.expect("an answer").json().await.expect("JSON");
    assert!(
        answer.get("error").is_none_or(Value::is_null),
        "{method}: {answer}"
    );
    answer["result"].clone()
}

#[test]
fn r009_price_quantity_balance_and_nominal_come_back_to_the_last_digit() {
    run(async {
        let platform = platform().await;
        let holder = platform.trader().await;
        let smallest = "0.000000000000000001";
        let precise = "10000000000000000.000000000000000001";
        let largest = "92233720368547757.123456789012345678";
        // The lot is the smallest unit. The tick makes a lot worth whole kopecks.
        let tick = "10000000000000000";
        let fine = json!({
            "decimals": 18, "issueLimit": { "value": "9" }, "nominal": { "value": precise },
            "lotSize": { "value": smallest }, "tickSize": { "value": tick },
            "priceBandLow": { "value": tick },
            "priceBandHigh": { "value": format!("{tick}00000000000") },
        });
        let fine = platform.instrument(fine).await;
        let large = platform
            .instrument(json!({ "issueLimit": { "value": "1" }, "nominal": { "value": largest } }))
            .await;
        for (instrument, nominal) in [(&fine, precise), (&large, largest)] {
            let request = json!({ "instrumentId": instrument });
            let answer = platform.ok(AUDITOR, "cfa.GetInstrument", request).await;
            assert_eq!(answer["instrument"]["nominal"]["value"], json!(nominal));
        }
        platform.issue(&fine, &holder, smallest).await;
        let request = json!({ "subaccountId": holder.units(&fine) });
        let answer = platform.ok(AUDITOR, "ledger.GetBalance", request).await;
        assert_eq!(answer["balance"]["value"], json!(smallest), "{answer}");
        let request = json!({ "instrumentId": fine });
        let holders = platform.all(AUDITOR, "cfa.ListHolders", "holders", request);
        let holders = holders.await;
        assert_eq!(
            holders[0]["balance"]["value"],
            json!(smallest),
            "{holders:?}"
        );
        // A price of 27 digits: with more, the value of the smallest order exceeds the limit.
        let price = "987654321120000000000000000";
        assert_order_has(platform, &holder, &fine, price, smallest).await;

        // One more digit is refused, not rounded.
        let finer = json!({
            "instrumentId": fine, "investorId": holder.id, "bookbuildingId": "b",
            "amount": amount(&fine, "0.0000000000000000001"),
        });
        let refusal = platform
            .refused(OPERATOR, "cfa.IssueInvestmentCfa", finer)
            .await;
        assert_eq!(
            (refusal.http, refusal.code.as_str()),
            (400, "invalid_argument"),
            "{refusal:?}"
        );
    });
}

/// Places an offer; asserts that order and book contain its exact price and quantity.
async fn assert_order_has(platform: &Platform, user: &User, of: &str, price: &str, quantity: &str) {
    let placed = platform.place(user, of, "SELL", price, quantity).await;
    let request = json!({ "orderId": text(&placed, "/orderId") });
    let order = platform.ok(AUDITOR, "market.GetOrder", request).await;
    let request = json!({ "instrumentId": of });
    let book = platform.ok(AUDITOR, "market.GetOrderBook", request).await;
    let exact = [price, quantity].map(|figure| number(&json!(figure)));
    for side in [&order["order"], &book["snapshot"]["asks"][0]] {
        let shown = ["price", "quantity"].map(|name| number(&side[name]));
        assert_eq!(shown, exact, "{side}");
    }
}

// rows: R008 R011
#[test]
fn r008_a_trade_names_its_fee_as_trading() {
    run(async {
        let platform = platform().await;
        // R011: the instrument has the type under which it was registered.
        let bond = platform.bond().await;
        let answer = platform
            .ok(
                AUDITOR,
                "cfa.GetInstrument",
                json!({ "instrumentId": bond }),
            )
            .await;
        assert_eq!(
            answer["instrument"]["type"],
            json!("INSTRUMENT_TYPE_CFA_BOND")
        );
        let (seller, buyer) = (platform.trader().await, platform.rich("10000.00").await);
        platform.issue(&bond, &seller, "10").await;
        platform.place(&seller, &bond, "SELL", "1010.00", "4").await;
        platform.place(&buyer, &bond, "BUY", "1010.00", "4").await;
        let trades = platform.settled(&bond, 1).await;
        assert_eq!(trades[0]["fee"]["feeType"], json!("TRADING"));
        assert_eq!(trades[0]["fee"]["amount"], amount("RUB", "4.04"));
        platform.balance_is(&buyer.cash(), "5955.96").await;
        platform.balance_is(&seller.cash(), "4040.00").await;
        platform.balance_is(&buyer.units(&bond), "4").await;
    });
}

#[test]
fn r023_cfa_rub_is_there_from_the_start() {
    run(async {
        let platform = platform().await;
        let answer = platform
            .ok(
                AUDITOR,
                "cfa.GetInstrument",
                json!({ "instrumentId": "CFA-RUB" }),
            )
            .await;
        let instrument = &answer["instrument"];
        assert_eq!(
            instrument["type"],
            json!("INSTRUMENT_TYPE_MONEY_CLAIM"),
            "{answer}"
        );
        assert_eq!(instrument["decimals"], json!(2), "{answer}");
        platform
            .all(
                AUDITOR,
                "cfa.ListHolders",
                "holders",
                json!({ "instrumentId": "CFA-RUB" }),
            )
            .await;
    });
}
