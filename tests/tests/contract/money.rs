//! Issue and redemption of roubles, settlement of a trade and maturity of an issue, observed only
//! over the public ports and topics.

use prost::Message;
use proto::audit::v1::AuditRecordEvent;
use proto::cfa::v1 as cfa;
use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, context_with_key, number, text};
use tests::log::Events;
use tests::shared::{platform, run};
use tests::world::{User, amount, rub};
use tests::{Platform, bank};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The operation of a payment or payout.
async fn operation_of(platform: &Platform, user: &User, reference: &str) -> Value {
    let request = json!({ "userId": user.id, "externalRef": reference });
    let listed = platform.all(AUDITOR, "cfa.ListOperations", "operations", request);
    let mut listed = listed.await;
    assert_eq!(listed.len(), 1, "{listed:?}");
    listed.remove(0)
}

/// Decodes the first event of this type.
fn event<M: Message + Default>(events: &[events::Event], name: &str) -> M {
    let found = events.iter().find(|event| event.type_name.ends_with(name));
    let found = found.unwrap_or_else(|| panic!("no {name}"));
    M::decode(&*found.payload).expect(name)
}

// rows: R050 R051 R053 R054 R058 R059 R060 R063
#[test]
fn r050_an_issue_is_read_followed_and_audited_from_outside() {
    run(async {
        let platform = platform().await;
        let mut events = Events::open(platform).await;
        let user = platform.trader().await;
        let payment = platform.deposit(&user, "123.45").await;
        let operation = operation_of(platform, &user, &payment).await;
        let id = text(&operation, "/operationId");
        for (field, value) in [
            ("type", json!("OPERATION_TYPE_ISSUANCE")),
            ("status", json!("OPERATION_STATUS_FINALIZED")),
            ("userId", json!(user.id)),
            ("amount", json!({ "value": "123.45" })),
            ("currencyCode", json!("RUB")),
            ("externalRef", json!(payment)),
            ("idempotencyKey", json!(payment)),
            ("instrumentId", json!("CFA-RUB")),
        ] {
            assert_eq!(operation[field], value, "{field}: {operation}");
        }
        assert!(operation.get("holdId").is_none(), "{operation}");
        assert!(operation["finalizedAt"].is_string(), "{operation}");
        let (status, shown) = platform
            .get("cfa", &format!("/operations/{id}"), AUDITOR)
            .await;
        assert_eq!(status, 200, "{shown}");
        for field in ["operationId", "onchainTxHash", "externalRef", "finalizedAt"] {
            assert_eq!(shown[field], operation[field], "{field}");
        }
        let hash = text(&operation, "/onchainTxHash");
        let again = platform.ok(OPERATOR, "cfa.FinalizeIssuance", json!({ "txHash": hash }));
        let found = again.await["operation"].clone();
        assert_eq!(found["operationId"], json!(id), "by its hash");

        assert_published(&mut events, &user, &id, &hash).await;
        events.close().await;
    });
}

/// Asserts the events of the issue of 123.45 and of its balance.
async fn assert_published(events: &mut Events, user: &User, id: &str, hash: &str) {
    let (started, issued) = ("IssuanceStartedEvent", "CfaIssuedEvent");
    let (audited, grown) = ("AuditRecordEvent", "BalanceUpdatedEvent");
    let about = |event: &events::Event| {
        let payload = String::from_utf8_lossy(&event.payload);
        // The audit record of the request comes before that of the end.
        let is_request = payload.contains("issuance.requested");
        !is_request && (payload.contains(id) || payload.contains(&user.cash()))
    };
    let seen = events
        .until(&[started, issued, audited, grown], about)
        .await;
    let started: cfa::IssuanceStartedEvent = event(&seen, started);
    assert_eq!((&*started.operation_id, &*started.tx_hash), (id, hash));
    let issued: cfa::CfaIssuedEvent = event(&seen, issued);
    assert_eq!((&*issued.operation_id, &*issued.tx_hash), (id, hash));
    assert_eq!(
        (&*issued.instrument_id, &issued.holder_id),
        ("CFA-RUB", &user.id)
    );
    let value = issued
        .amount
        .and_then(|amount| amount.amount)
        .expect("an amount");
    assert_eq!(
        (&*value.value, issued.issued_at.is_some()),
        ("123.45", true)
    );
    let audit: AuditRecordEvent = event(&seen, audited);
    assert_eq!(
        (&*audit.action, &*audit.object_id),
        ("issuance.finalized", id)
    );
    let grown = seen.iter().filter(|event| event.type_name.ends_with(grown));
    assert_eq!(grown.count(), 1, "the balance grows once");
}

// rows: R065 R066 R070 R072 R077 R083 R084 R086 R090
#[test]
fn r065_a_redemption_returns_before_the_bank_pays_and_acts_once() {
    run(async {
        let platform = platform().await;
        let mut events = Events::open(platform).await;
        let user = platform.rich("100.00").await;
        let fault = |fault: &str| json!({ "fault": fault, "account": user.account });
        let hold_transfer = fault("BANK_FAULT_HOLD_TRANSFER");
        platform
            .ok(OPERATOR, "sandbox.SetFault", hold_transfer)
            .await;
        let payout = uuid::Uuid::now_v7().to_string();
        let redeem = json!({
            "context": context_with_key(&payout), "userId": user.id, "payoutId": payout,
            "amount": rub("40.00"),
        });
        let token = user.token();
        let first = platform.ok(&token, "cfa.RedeemCfaRub", redeem.clone());
        let first = first.await["operation"].clone();
        let id = text(&first, "/operationId");
        assert_eq!(first["status"], json!("OPERATION_STATUS_ONCHAIN_SUBMITTED"));
        assert_eq!(first["externalRef"], json!(payout));
        let hold_id = text(&first, "/holdId");
        let hold = || platform.ok(AUDITOR, "ledger.GetHold", json!({ "holdId": hold_id }));
        let held = hold().await["hold"].clone();
        assert_eq!(held["subaccountId"], json!(user.cash()));
        assert_eq!(number(&held["amount"]["amount"]), number(&json!("40.00")));
        assert!(text(&held, "/reason").contains(&payout), "{held}");
        let again = platform.ok(&user.token(), "cfa.RedeemCfaRub", redeem).await;
        assert_eq!(text(&again, "/operation/operationId"), id);
        let finalize = json!({ "payoutId": payout });
        let open = platform.ok(OPERATOR, "cfa.FinalizeRedemption", finalize.clone());
        let open = open.await;
        assert_eq!(
            open["operation"]["status"],
            json!("OPERATION_STATUS_ONCHAIN_SUBMITTED")
        );
        let none = fault("BANK_FAULT_NONE");
        platform.ok(OPERATOR, "sandbox.SetFault", none).await;
        let done = platform.cfa_operation_is(&id, "FINALIZED").await;
        let ended = platform
            .ok(OPERATOR, "cfa.FinalizeRedemption", finalize)
            .await;
        assert_eq!(ended["operation"]["status"], done["status"]);
        assert_eq!(
            hold().await["hold"]["status"],
            json!("HOLD_STATUS_CONSUMED")
        );
        platform.balance_is(&user.cash(), "60.00").await;
        let request = json!({ "userId": user.id });
        let payouts = platform.all(AUDITOR, "payments.ListPayouts", "payouts", request);
        assert_eq!(payouts.await.len(), 1);

        let about = |event: &events::Event| String::from_utf8_lossy(&event.payload).contains(&id);
        let seen = events.until(&["CfaRedeemedEvent"], about).await;
        let redeemed: cfa::CfaRedeemedEvent = event(&seen, "CfaRedeemedEvent");
        assert_eq!(
            (redeemed.operation_id, redeemed.holder_id),
            (id.clone(), user.id.clone())
        );
        assert_eq!(redeemed.instrument_id, "CFA-RUB");
        assert_eq!(redeemed.tx_hash, text(&done, "/onchainTxHash"));
        assert!(redeemed.redeemed_at.is_some());
        events.close().await;
    });
}

/// The operation of this key with its postings, as (from, to, amount).
async fn posted(platform: &Platform, key: &str) -> (Value, Vec<(String, String, String)>) {
    let request = json!({ "idempotencyKey": key });
    let listed = platform.all(AUDITOR, "ledger.ListOperations", "operations", request);
    let listed = listed.await;
    assert_eq!(listed.len(), 1, "{key}: {listed:?}");
    let request = json!({ "operationId": listed[0]["operationId"] });
    let found = platform.ok(AUDITOR, "ledger.GetOperation", request).await;
    let row = |posting: &Value| {
        (
            text(posting, "/debitSubaccountId"),
            text(posting, "/creditSubaccountId"),
            number(&posting["amount"]["amount"]).to_string(),
        )
    };
    let rows = found["postings"].as_array().into_iter().flatten().map(row);
    (found["operation"].clone(), rows.collect())
}

// rows: R181 R182 R183 R184 R185 R187
#[test]
fn r181_a_trade_is_two_operations_a_fee_and_one_transfer() {
    run(async {
        let platform = platform().await;
        let (buyer, seller) = (platform.rich("2000.00").await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &seller, "10").await;
        let sell = platform.place(&seller, &bond, "SELL", "100.00", "4").await;
        let buy = platform.place(&buyer, &bond, "BUY", "100.00", "4").await;
        let trade = text(&platform.settled(&bond, 1).await[0], "/tradeId");
        let row = |from: &str, to: &str, amount: &str| {
            (
                from.to_owned(),
                to.to_owned(),
                number(&json!(amount)).to_string(),
            )
        };
        let (reserve, units) = ("system:reserve:CFA-RUB", format!("system:reserve:{bond}"));
        let (cash, goods) = (buyer.cash(), buyer.units(&bond));
        let mut hashes = std::collections::BTreeSet::new();
        for (key, kind, rows) in [
            (
                trade.clone(),
                "TRADE_BUY",
                vec![row(&cash, reserve, "400.00"), row(&units, &goods, "4")],
            ),
            (
                format!("{trade}:sell"),
                "TRADE_SELL",
                vec![
                    row(reserve, &seller.cash(), "400.00"),
                    row(&seller.units(&bond), &units, "4"),
                ],
            ),
            (
                format!("{trade}:fee"),
                "FEE",
                vec![row(&cash, "system:fees:CFA-RUB", "0.40")],
            ),
        ] {
            let (operation, found) = posted(platform, &key).await;
            assert_eq!(operation["type"], json!(format!("OPERATION_TYPE_{kind}")));
            assert_eq!(operation["status"], json!("OPERATION_STATUS_FINALIZED"));
            assert_eq!(found, rows, "{key}");
            hashes.insert(text(&operation, "/onchainTxHash"));
        }
        // One transaction on chain, and one operation of the registry for it.
        let hash = hashes.first().expect("a hash").clone();
        assert_eq!(hashes.len(), 1, "{hashes:?}");
        assert_moved_once(platform, &trade, &hash, [&seller, &buyer]).await;
        for order in [&buy, &sell] {
            assert_hold_consumed(platform, &text(order, "/orderId")).await;
        }
        platform.balance_is(&buyer.cash(), "1599.60").await;
        platform.balance_is(&seller.cash(), "400.00").await;
    });
}

/// Asserts that the registry has one operation of the trade in this transaction, for four units.
async fn assert_moved_once(platform: &Platform, trade: &str, hash: &str, parties: [&User; 2]) {
    let request = json!({ "onchainTxHashes": [hash] });
    let listed = platform.all(AUDITOR, "cfa.ListOperations", "operations", request);
    let listed = listed.await;
    let own = |operation: &&Value| operation["tradeId"] == json!(trade);
    let moved: Vec<&Value> = listed.iter().filter(own).collect();
    assert_eq!(moved.len(), 1, "{moved:?}");
    let [seller, buyer] = parties;
    assert_eq!(moved[0]["fromUserId"], json!(seller.id));
    assert_eq!(moved[0]["toUserId"], json!(buyer.id));
    assert_eq!(number(&moved[0]["amount"]), number(&json!("4")));
}

/// Asserts that the order's hold is consumed and none is active.
async fn assert_hold_consumed(platform: &Platform, order: &str) {
    let holds = platform.all(AUDITOR, "ledger.ListHolds", "holds", json!({}));
    let names = |hold: &&Value| {
        let reason = hold["reason"].as_str();
        reason.is_some_and(|reason| reason.contains(order))
    };
    let holds = holds.await;
    let states = holds.iter().filter(names).map(|hold| &hold["status"]);
    let states: Vec<&Value> = states.collect();
    let has = |status: &str| states.iter().any(|state| **state == json!(status));
    assert!(has("HOLD_STATUS_CONSUMED"), "{order}: {states:?}");
    assert!(!has("HOLD_STATUS_ACTIVE"), "{order}: {states:?}");
}

/// Waits until the redemption of the issue has this status, given without its prefix.
async fn redemption_is(platform: &Platform, bond: &str, status: &str) -> Value {
    let wanted = json!(format!("REDEMPTION_STATUS_{status}"));
    let request = json!({ "instrumentId": bond });
    let what = format!("the redemption to be {status}");
    let found = platform.until(&what, "cfa.GetRedemption", request, |answer| {
        answer["redemption"]["status"] == wanted
    });
    found.await["redemption"].clone()
}

/// The alert that an issuer lacks the money of a redemption.
const SHORTAGE: &str = "issuer lacks the money for a distribution: fund the issuer's CFA-RUB";

/// Waits for the alert of the redemption of three units.
async fn shortage_is_logged(platform: &Platform, bond: &str, redemption_id: &str) {
    let is_alert = |line: &Value| {
        line["message"] == json!(SHORTAGE)
            && line["redemption_id"] == json!(redemption_id)
            && line["instrument_id"] == json!(bond)
            && line["needed_minor"] == json!(300_000)
            && line["level"] == json!("ERROR")
            && line["service_name"] == json!("cfa")
            && line["severity"] == json!("critical")
    };
    let what = format!("critical line of the redemption of {bond}");
    platform
        .until_logged(&what, |lines| lines.iter().any(is_alert))
        .await;
}

/// Waits until the order has ended with its issue; asserts that the market then accepts neither an
/// order nor a hold of units.
async fn trading_has_ended(
    platform: &Platform,
    holder: &User,
    bond: &str,
    order: &str,
    hold: &str,
) {
    let matured = json!("INSTRUMENT_MATURED");
    let cancelled = json!("ORDER_STATUS_CANCELLED");
    let request = json!({ "orderId": order });
    let what = format!("order {order} to be cancelled");
    let ended = platform.until(&what, "market.GetOrder", request, |answer| {
        answer["order"]["status"] == cancelled
    });
    assert_eq!(ended.await["order"]["cancelReason"], matured);
    let late = platform.place(holder, bond, "SELL", "100.00", "1").await;
    assert_eq!(
        (&late["status"], &late["cancelReason"]),
        (&json!("ORDER_STATUS_REJECTED"), &matured)
    );
    let other = platform.trader().await;
    let more = json!({ "holdId": hold, "undrawn": { "value": "3" } });
    let open = json!({ "userId": other.id, "instrumentId": bond, "amount": { "value": "1" } });
    for (user, name, request) in [
        (holder, "market.AdjustTradingHold", more),
        (&other, "market.OpenTradingHold", open),
    ] {
        let refused = platform.refused(&user.token(), name, request).await;
        let message = "Instrument is not traded now";
        refused.is(400, "failed_precondition", message, "INSTRUMENT_MATURED");
    }
}

// rows: R097 R101 R102 R103 R104
/// Needs a platform of its own, for the proof.
#[test]
fn r097_maturity_waits_for_the_money_then_pays_burns_and_notifies() {
    run(async {
        let mut platform = Platform::start().await;
        let mut events = Events::open(&platform).await;
        let holder = platform.trader().await;
        let matures = OffsetDateTime::from_unix_timestamp(bank::now_s() + 20).expect("a time");
        let matures = matures.format(&Rfc3339).expect("a text");
        let bond = platform.instrument(json!({ "maturesAt": matures })).await;
        let request = json!({ "instrumentId": bond });
        let terms = platform
            .ok(AUDITOR, "cfa.GetInstrument", request.clone())
            .await;
        platform.issue(&bond, &holder, "3").await;
        // An order has one unit, the trading hold one more.
        let hold = platform.trading_hold(&holder, &bond, "2").await;
        let order = platform.place(&holder, &bond, "SELL", "100.00", "1").await;
        assert_eq!(order["status"], json!("ORDER_STATUS_OPEN"), "{order}");
        // Due, and the issuer has no money: nothing is paid and nothing is burned.
        let due = redemption_is(&platform, &bond, "UNDERFUNDED").await;
        assert_eq!(due["total"], amount("CFA-RUB", "3000.00"));
        shortage_is_logged(&platform, &bond, &text(&due, "/redemptionId")).await;
        let order = text(&order, "/orderId");
        trading_has_ended(&platform, &holder, &bond, &order, &hold).await;
        let units = platform.balance(&holder.units(&bond)).await;
        assert_eq!(units, number(&json!("3")));
        assert_eq!(platform.balance(&holder.cash()).await, number(&Value::Null));
        let issuer = User {
            id: text(&terms, "/instrument/issuerId"),
            account: String::new(),
            profile: Value::Null,
        };
        platform.set_limit(&issuer, "DEPOSIT", "1000000.00").await;
        let intent = platform.intent(&issuer, "5000.00").await;
        platform.pay(&intent).await;
        let done = redemption_is(&platform, &bond, "FINALIZED").await;
        assert_eq!(done["redemptionId"], due["redemptionId"]);
        platform.balance_is(&holder.cash(), "3000.00").await;
        platform.balance_is(&issuer.cash(), "2000.00").await;
        platform.balance_is(&holder.units(&bond), "0").await;
        let supply = platform.ok(AUDITOR, "cfa.GetSupply", request).await;
        assert_eq!(number(&supply["totalSupply"]), number(&Value::Null));
        let about =
            |event: &events::Event| String::from_utf8_lossy(&event.payload).contains(&holder.id);
        let seen = events.until(&["HolderNotificationEvent"], about).await;
        let told: cfa::HolderNotificationEvent = event(&seen, "HolderNotificationEvent");
        assert_eq!(told.channels, ["push", "email"]);
        assert_eq!(
            (told.instrument_id, told.redemption_id),
            (bond, text(&done, "/redemptionId"))
        );
        events.close().await;
        platform.proof().await;
        platform.stop().await;
    });
}
