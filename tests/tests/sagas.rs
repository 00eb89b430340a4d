//! The platform is killed at each step of the sagas that move money or units, and trades lose a
//! party between match and settlement. Each saga ends once, and the proof of balances passes.
//!
//! `crash` kills at the steps of settlement and of an order's hold, `issue_sagas` at those of a
//! placement, a coupon, a move of holders and a trading hold.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use prost::Message;
use proto::market::v1::TradeBustedEvent;
use serde_json::{Value, json};
use tests::Platform;
use tests::call::{AUDITOR, OPERATOR, SERVICE, context, context_with_key, number, staff, text};
use tests::flow::Random;
use tests::kill::{asked, killed_at};
use tests::log::Events;
use tests::relay::RelayedChain;
use tests::shared::run;
use tests::world::{User, amount, is_settled, limit_order, rub};

const COMPLIANCE: &str = "sandbox.compliance";

/// Waits until the operation of the payment or payout has this status, given without its prefix;
/// asserts that it is the only one.
async fn ended(platform: &Platform, user: &User, reference: &str, status: &str) {
    let request = json!({ "userId": user.id, "externalRef": reference });
    let wanted = json!(format!("OPERATION_STATUS_{status}"));
    let what = format!("{reference} to be {status}");
    let listed = platform
        .until(&what, "cfa.ListOperations", request, |answer| {
            answer.pointer("/operations/0/status") == Some(&wanted)
        })
        .await;
    assert_eq!(listed["operations"].as_array().map(Vec::len), Some(1));
}

// rows: R039 R062 R064
#[test]
fn a_deposit_killed_at_any_step_is_minted_once() {
    run(async {
        let mut platform = Platform::start().await;
        let user = platform.trader().await;
        let places = [
            "cfa.issue_recorded",
            "cfa.limit_reserved",
            "cfa.mint_submitted",
        ];
        for (done, place) in (1..).zip(places) {
            let intent = platform.intent(&user, "10.00").await;
            let pay = json!({ "qrPayload": text(&intent, "/qrPayload") });
            killed_at(&mut platform, place, OPERATOR, "sandbox.Pay", pay).await;
            let payment = text(&intent, "/paymentId");
            ended(&platform, &user, &payment, "FINALIZED").await;
            let sum = format!("{}.00", 10 * done);
            platform.balance_is(&user.cash(), &sum).await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

// rows: R087 R088 R091
#[test]
fn a_redemption_killed_at_any_step_pays_once_or_returns_the_tokens() {
    run(async {
        let mut platform = Platform::start().await;
        let user = platform.rich("1000.00").await;
        let mut left = 1_000;
        for (place, is_refused) in [
            ("cfa.limit_reserved", false),
            ("cfa.burn_submitted", false),
            ("cfa.payout_started", false),
            ("cfa.burn_final", false),
            ("cfa.payout_released", false),
            ("cfa.hold_consumed", false),
            ("payments.order_begun", false),
            ("payments.order_sent", false),
            ("payments.result_written", false),
            ("payments.event_written", false),
            ("payments.result_committed", false),
            ("payments.result_written", true),
            ("cfa.mint_back_sent", true),
            ("cfa.minted_back", true),
            ("cfa.hold_released", true),
        ] {
            let fault = |fault: &str| json!({ "fault": fault, "account": user.account });
            let refuse = fault("BANK_FAULT_REFUSE_TRANSFER");
            if is_refused {
                platform.ok(OPERATOR, "sandbox.SetFault", refuse).await;
            }
            let payout = uuid::Uuid::now_v7().to_string();
            let redeem = json!({
                "context": context_with_key(&payout), "userId": user.id, "payoutId": payout,
                "amount": rub("10.00"),
            });
            let name = "cfa.RedeemCfaRub";
            killed_at(&mut platform, place, &user.token(), name, redeem).await;
            if is_refused {
                ended(&platform, &user, &payout, "FAILED").await;
                let none = fault("BANK_FAULT_NONE");
                platform.ok(OPERATOR, "sandbox.SetFault", none).await;
            } else {
                ended(&platform, &user, &payout, "FINALIZED").await;
                left -= 10;
            }
            platform
                .balance_is(&user.cash(), &format!("{left}.00"))
                .await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

/// Kills the platform at a step of a call; repeats the call under its key and waits until its
/// operation is final.
async fn final_after(
    platform: &mut Platform,
    place: &str,
    token: &str,
    name: &str,
    request: Value,
) {
    let mut request = request;
    request["context"] = context_with_key(&uuid::Uuid::now_v7().to_string());
    killed_at(platform, place, token, name, request.clone()).await;
    let again = platform.ok(token, name, request).await;
    let id = text(&again, "/operation/operationId");
    platform.cfa_operation_is(&id, "FINALIZED").await;
}

/// Kills the platform while it holds what an offer gives; repeats the call under its key.
async fn held_after(platform: &mut Platform, user: &User, name: &str, mut request: Value) {
    request["context"] = context_with_key(&uuid::Uuid::now_v7().to_string());
    let token = user.token();
    killed_at(platform, "cfa.offer_held", &token, name, request.clone()).await;
    let (field, prefix) = match name {
        "cfa.Subscribe" => ("subscription", "SUBSCRIPTION"),
        _ => ("offer", "OFFER"),
    };
    let active = json!(format!("{prefix}_STATUS_ACTIVE"));
    let deadline = Instant::now() + tests::process::PATIENCE;
    loop {
        let again = platform.ok(&token, name, request.clone()).await;
        if again[field]["status"] == active {
            return;
        }
        assert!(Instant::now() < deadline, "{again}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

// rows: R092 R093 R094 R098
#[test]
fn units_sold_transferred_and_bought_back_move_once_whatever_step_is_killed() {
    run(async {
        let mut platform = Platform::start().await;
        let (user, other) = (platform.rich("5000.00").await, platform.trader().await);
        let bond = platform.bond().await;
        let (one, price) = (amount(&bond, "1"), amount("CFA-RUB", "1000.00"));
        let mut units = 0;
        for place in [
            "cfa.limit_reserved",
            "cfa.units_submitted",
            "cfa.operation_settled",
        ] {
            let subscribe = json!({
                "instrumentId": bond, "investorId": user.id, "amount": one, "payment": price,
            });
            held_after(&mut platform, &user, "cfa.Subscribe", subscribe).await;
            let sell = json!({
                "instrumentId": bond, "investorId": user.id, "amount": one, "payment": price,
                "bookbuildingId": "placement",
            });
            let name = "cfa.IssueInvestmentCfa";
            final_after(&mut platform, place, OPERATOR, name, sell).await;
            units += 1;
            let held = units.to_string();
            platform.balance_is(&user.units(&bond), &held).await;
            platform.proof().await;
        }
        let transfer = json!({
            "instrumentId": bond, "fromUserId": user.id, "toUserId": other.id, "amount": one,
        });
        let token = user.token();
        let (name, place) = ("cfa.TransferCfa", "cfa.units_submitted");
        final_after(&mut platform, place, &token, name, transfer).await;
        platform.balance_is(&other.units(&bond), "1").await;
        platform.proof().await;

        let offer = json!({
            "instrumentId": bond, "holderId": user.id, "amount": one, "payment": price,
        });
        held_after(&mut platform, &user, "cfa.OfferUnits", offer).await;
        let buy = json!({
            "instrumentId": bond, "holderId": user.id, "amount": one,
            "redemptionId": uuid::Uuid::now_v7().to_string(),
            "reason": "REDEMPTION_REASON_BUYBACK",
        });
        let (name, issuer) = ("cfa.RedeemInvestmentCfa", platform.issuer_of(&bond).await);
        final_after(&mut platform, place, &issuer, name, buy).await;
        platform.balance_is(&user.units(&bond), "1").await;
        platform.balance_is(&user.cash(), "3000.00").await;
        platform.proof().await;
        platform.stop().await;
    });
}

// rows: R098 R102 R104
#[test]
fn the_redemption_of_an_issue_killed_at_any_step_pays_each_holder_once() {
    run(async {
        let mut platform = Platform::start().await;
        let (holder, other) = (platform.trader().await, platform.trader().await);
        // The funding, then the part with all holders.
        let places = [
            "cfa.redemption_submitted",
            "cfa.redemption_step",
            "cfa.part_posted",
            "cfa.redemption_submitted:2",
            "cfa.redemption_step:2",
            "cfa.part_ended",
        ];
        for (round, place) in (1..).zip(places) {
            let bond = platform.bond().await;
            let issuer = platform.issuer(&bond).await;
            platform.set_limit(&issuer, "DEPOSIT", "1000000.00").await;
            platform.deposit(&issuer, "3000.00").await;
            platform.issue(&bond, &holder, "2").await;
            platform.issue(&bond, &other, "1").await;
            let start = json!({
                "context": context_with_key(&bond), "instrumentId": bond,
                "reason": "REDEMPTION_REASON_BUYBACK",
            });
            let name = "cfa.StartRedemption";
            killed_at(&mut platform, place, SERVICE, name, start).await;
            let request = json!({ "instrumentId": bond });
            let finalized = json!("REDEMPTION_STATUS_FINALIZED");
            platform
                .until("the redemption", "cfa.GetRedemption", request, |answer| {
                    answer["redemption"]["status"] == finalized
                })
                .await;
            let paid = |each: u32| format!("{}.00", each * round);
            platform.balance_is(&holder.cash(), &paid(2_000)).await;
            platform.balance_is(&other.cash(), &paid(1_000)).await;
            platform.balance_is(&issuer.cash(), "0.00").await;
            platform.balance_is(&holder.units(&bond), "0").await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

// rows: R087
#[test]
fn an_approved_refund_killed_around_its_call_is_paid_once() {
    run(async {
        let mut platform = Platform::start().await;
        for place in ["approvals.call_begun", "approvals.call_answered"] {
            let user = platform.trader().await;
            let intent = platform.intent(&user, "10.00").await;
            let payment = text(&intent, "/paymentId");
            platform.refuse_limit(&user, "DEPOSIT", "not today").await;
            platform.pay(&intent).await;
            ended(&platform, &user, &payment, "REJECTED").await;
            let resolve = json!({ "paymentId": payment, "refund": true });
            let name = "cfa.ResolveSuspendedDeposit";
            let decision = platform.requested(name, &resolve).await;
            let (boris, name) = (staff("boris"), "approvals.Approve");
            killed_at(&mut platform, place, &boris, name, decision.clone()).await;
            platform.executed(&decision).await;
            let refunded = json!("PAYMENT_STATUS_REFUNDED");
            let request = json!({ "paymentId": payment });
            platform
                .until(
                    "the refund",
                    "payments.GetPaymentIntent",
                    request,
                    |answer| answer["intent"]["status"] == refunded,
                )
                .await;
            let payouts = json!({ "userId": user.id });
            let payouts = platform.all(AUDITOR, "payments.ListPayouts", "payouts", payouts);
            assert_eq!(payouts.await.len(), 1);
            platform.proof().await;
        }
        platform.stop().await;
    });
}

/// Waits until the balance of a sub-account equals `expected`, whether it is available or not.
async fn has(platform: &Platform, subaccount: &str, expected: &str) {
    let wanted = number(&json!(expected));
    let request = json!({ "subaccountId": subaccount });
    let what = format!("{subaccount} to have {expected}");
    platform
        .until(&what, "ledger.GetBalance", request, |answer| {
            number(&answer["balance"]) == wanted
        })
        .await;
}

// rows: R186
#[test]
fn trades_of_users_blocked_between_match_and_settlement_are_settled() {
    run(async {
        let platform = Platform::start().await;
        for round in 0..6 {
            // A sell order left by a round without a trade must not be met by the next buyer.
            let bond = platform.bond().await;
            let (seller, buyer) = (platform.trader().await, platform.rich("1000.00").await);
            platform.issue(&bond, &seller, "5").await;
            platform.place(&seller, &bond, "SELL", "100.00", "5").await;
            let order = limit_order(&buyer, &bond, "BUY", "100.00", "5");
            let token = buyer.token();
            let buy = platform.call(&token, "market.PlaceOrder", json!({ "order": order }));
            let blocked = match round % 2 {
                0 => &seller,
                _ => &buyer,
            };
            let block = json!({ "userId": blocked.id, "reason": "a drill" });
            let block = platform.ok(COMPLIANCE, "identity.BlockUser", block);
            // Each party is blocked once after the match. In the other rounds at once, so that the
            // block comes at every moment around match and settlement.
            let is_traded = if round < 2 {
                buy.await.expect("placed before the block");
                block.await;
                true
            } else {
                let (bought, _) = tokio::join!(buy, block);
                bought.is_ok_and(|answer| {
                    let filled = number(&answer["order"]["filledQuantity"]);
                    filled == number(&json!("5"))
                })
            };
            if is_traded {
                // Frozen or not, both parties get what they traded for.
                has(&platform, &buyer.units(&bond), "5").await;
                has(&platform, &seller.cash(), "500.00").await;
            }
            let request = json!({ "instrumentId": bond });
            let trades = platform
                .all(AUDITOR, "market.ListTrades", "trades", request)
                .await;
            let trades = platform.settled(&bond, trades.len()).await;
            assert!(!is_traded || trades.len() == 1, "{round}: {trades:?}");
        }
        platform.proof().await;
    });
}

/// An issue, a seller with 5 units of it, and a buyer with 1000.00 and an order of 4 units at
/// 100.00.
async fn wanted(platform: &Platform) -> (String, User, User) {
    let bond = platform.bond().await;
    let (seller, buyer) = (platform.trader().await, platform.rich("1000.00").await);
    platform.issue(&bond, &seller, "5").await;
    platform.place(&buyer, &bond, "BUY", "100.00", "4").await;
    (bond, seller, buyer)
}

/// Sanctions the buyer of [`wanted`]. The registry leaves the trades of a sanctioned party out, and
/// settlement busts them.
async fn sanctioned(platform: &Platform) -> (String, User, User) {
    let (bond, seller, buyer) = wanted(platform).await;
    let sanction = json!({ "userId": buyer.id, "sanctioned": true });
    platform.ok(SERVICE, "identity.UpdateUser", sanction).await;
    (bond, seller, buyer)
}

/// Waits until the only trade of an issue is bust; asserts that both parties have what they had
/// before, and that there is one case. Returns the id of the trade.
async fn is_bust(platform: &Platform, (bond, seller, buyer): &(String, User, User)) -> String {
    let failed = json!("SETTLEMENT_STATUS_FAILED");
    let request = json!({ "instrumentId": bond });
    let listed = platform
        .until("the bust", "market.ListTrades", request, |answer| {
            answer["trades"][0]["settlementStatus"] == failed
        })
        .await;
    assert_eq!(listed["trades"].as_array().map(Vec::len), Some(1));
    let trade = text(&listed, "/trades/0/tradeId");
    platform.balance_is(&seller.units(bond), "5").await;
    platform.balance_is(&buyer.cash(), "1000.00").await;
    assert_eq!(platform.balance(&seller.cash()).await, number(&Value::Null));
    let name = "settlement.GetSettlementStatus";
    platform
        .until("the count of bust trades", name, json!({}), |answer| {
            answer["tradesBust"] == json!("1")
        })
        .await;
    let cases = platform.all(AUDITOR, "settlement.ListCases", "cases", json!({}));
    let cases = cases.await;
    assert_eq!(cases.len(), 1, "{cases:?}");
    assert_eq!(cases[0]["tradeId"], json!(trade));
    trade
}

/// Asserts what an operator sees of the bust trade and of its case, and closes the case.
async fn assert_settle_commands(platform: &Platform, trade: &str, seller: &User, buyer: &User) {
    let settle = async |args: &[&str]| {
        let mut all = vec!["--json", "settle"];
        all.extend(args);
        platform.cli(&all).await.success().json()
    };
    let status = settle(&["status"]).await;
    for (field, count) in [
        ("tradesBust", "1"),
        ("casesOpen", "1"),
        ("tradesPending", "0"),
    ] {
        let found = number(&status[field]);
        assert_eq!(found, number(&json!(count)), "{field}: {status}");
    }
    let listed = settle(&["cases", "--state", "open"]).await;
    let case = &listed["cases"][0];
    for (field, value) in [
        ("tradeId", trade),
        ("sellerId", seller.id.as_str()),
        ("buyerId", buyer.id.as_str()),
        ("state", "CASE_STATE_OPEN"),
    ] {
        assert_eq!(case[field], json!(value), "{field}: {listed}");
    }
    for (field, value) in [("quantity", "4"), ("payment", "400.00")] {
        let found = number(&case[field]);
        assert_eq!(found, number(&json!(value)), "{field}: {case}");
    }
    let note = "settled with both members";
    let closed = settle(&["close", "--trade-id", trade, "--note", note]).await;
    let case = &closed["case"];
    assert_eq!(case["tradeId"], json!(trade), "{closed}");
    assert_eq!(case["state"], json!("CASE_STATE_CLOSED"), "{closed}");
    assert_eq!(case["note"], json!(note), "{closed}");
    let status = settle(&["status"]).await;
    let open = number(&status["casesOpen"]);
    assert_eq!(open, number(&Value::Null), "{status}");
    let listed = settle(&["cases", "--state", "open"]).await;
    let left = listed["cases"].as_array();
    assert!(left.is_none_or(Vec::is_empty), "{listed}");
}

/// Asserts that the market has published that the trade is bust.
async fn assert_bust_published(platform: &Platform, bond: &str, trade: &str) {
    let mut events = Events::open(platform).await;
    let about = |event: &events::Event| String::from_utf8_lossy(&event.payload).contains(trade);
    let seen = events.until(&["TradeBustedEvent"], about).await;
    let mut seen = seen.iter();
    let bust = seen.find(|event| event.type_name.ends_with("TradeBustedEvent"));
    let bust = bust.expect("the event");
    let told = TradeBustedEvent::decode(&*bust.payload).expect("TradeBustedEvent");
    assert_eq!((&*told.trade_id, &*told.instrument_id), (trade, bond));
    events.close().await;
}

// rows: R186
#[test]
fn a_trade_is_bust_although_its_seller_tried_to_spend_the_proceeds() {
    run(async {
        let platform = Platform::start().await;
        let parties = sanctioned(&platform).await;
        let (bond, seller, buyer) = &parties;
        platform.place(seller, bond, "SELL", "100.00", "4").await;
        let deadline = Instant::now() + tests::process::PATIENCE;
        let trade = loop {
            // Proceeds of a trade that is not final cannot be spent.
            let redeem = json!({
                "userId": seller.id, "amount": rub("400.00"),
                "payoutId": uuid::Uuid::now_v7().to_string(),
            });
            let spent = platform
                .call(&seller.token(), "cfa.RedeemCfaRub", redeem)
                .await;
            let refusal = spent.expect_err("spent before the trade was final");
            assert_eq!(refusal.reason, "INSUFFICIENT_BALANCE", "{refusal:?}");
            let request = json!({ "instrumentId": bond });
            let listed = platform.ok(AUDITOR, "market.ListTrades", request).await;
            let trade = listed["trades"][0].clone();
            assert!(!is_settled(&trade), "{trade}");
            if trade["settlementStatus"] == json!("SETTLEMENT_STATUS_FAILED") {
                break trade;
            }
            assert!(Instant::now() < deadline, "not bust: {trade}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let request = json!({ "idempotencyKey": trade["tradeId"] });
        let operations = platform.all(AUDITOR, "ledger.ListOperations", "operations", request);
        assert_eq!(
            operations.await[0]["status"],
            json!("OPERATION_STATUS_FAILED")
        );
        let trade = is_bust(&platform, &parties).await;
        assert_settle_commands(&platform, &trade, seller, buyer).await;
        assert_bust_published(&platform, bond, &trade).await;
        platform.proof().await;
    });
}

// rows: R186 R190
#[test]
fn a_trade_killed_after_its_operations_are_reversed_is_bust_once() {
    run(async {
        let place = ("PLATFORM_CRASH_AT", "settlement.busted");
        let mut platform = Platform::start_with(&[place]).await;
        let parties = sanctioned(&platform).await;
        let (bond, seller, _) = &parties;
        let sell = json!({ "order": limit_order(seller, bond, "SELL", "100.00", "4") });
        asked(&platform, &seller.token(), "market.PlaceOrder", sell).await;
        platform.aborted().await;
        platform.restart().await;
        is_bust(&platform, &parties).await;
        platform.proof().await;
        platform.stop().await;
    });
}

/// Posts a payment with the reference of a trade, so that the ledger refuses the trade. Returns the
/// id of the operation.
async fn occupied(platform: &Platform, trade: &str, payer: &User, payee: &User) -> String {
    let posted = json!({
        "operation": {
            "type": "OPERATION_TYPE_TRADE_BUY", "userId": payer.id, "externalRef": trade,
            "awaitsChain": true,
        },
        "postings": [{
            "debitSubaccountId": payer.cash(), "creditSubaccountId": payee.cash(),
            "amount": amount("CFA-RUB", "1.00"),
        }],
    });
    let posted = platform.ok(SERVICE, "ledger.CreateOperation", posted).await;
    text(&posted, "/operation/operationId")
}

// rows: R190
#[test]
fn a_trade_that_the_ledger_refuses_killed_at_any_step_of_its_bust_is_bust_once() {
    run(async {
        // The trade waits in its batch for the time that the ledger needs to be prepared.
        let mut platform = Platform::start_with(&[
            ("PLATFORM_SETTLEMENT__LINGER_MS", "5000"),
            ("PLATFORM_SETTLEMENT__WAIT_MS", "5000"),
            ("PLATFORM_CRASH_AT", "settlement.withdrawn"),
        ])
        .await;
        let (payer, payee) = (platform.rich("10.00").await, platform.trader().await);
        let parties = wanted(&platform).await;
        let (bond, seller, _) = &parties;
        platform.place(seller, bond, "SELL", "100.00", "4").await;
        let request = json!({ "instrumentId": bond });
        let listed = platform
            .until("the trade", "market.ListTrades", request, |answer| {
                answer["trades"][0]["tradeId"].is_string()
            })
            .await;
        let trade = text(&listed, "/trades/0/tradeId");
        let occupying = occupied(&platform, &trade, &payer, &payee).await;
        let name = "settlement.GetSettlementStatus";
        platform
            .until("the refused batch", name, json!({}), |answer| {
                let mut waiting = answer["waiting"].as_array().into_iter().flatten();
                waiting.any(|step| step["isStuck"] == json!(true))
            })
            .await;
        let bust = json!({ "tradeId": trade, "reason": "the ledger refuses it" });
        let decision = platform.requested("settlement.BustTrade", &bust).await;
        let (boris, name) = (staff("boris"), "approvals.Approve");
        asked(&platform, &boris, name, decision.clone()).await;
        platform.aborted().await;
        let place = ("PLATFORM_CRASH_AT", "settlement.busted");
        // It may abort before it is ready.
        platform.start_refused_with(&[place]).await;
        platform.restart().await;
        platform.executed(&decision).await;
        assert_eq!(is_bust(&platform, &parties).await, trade);
        let request = json!({ "idempotencyKey": trade });
        let operations = platform.all(AUDITOR, "ledger.ListOperations", "operations", request);
        assert!(operations.await.is_empty());
        let undo = json!({ "operationId": occupying, "reason": "a drill" });
        platform.ok(SERVICE, "ledger.ReverseOperation", undo).await;
        platform.proof().await;
        platform.stop().await;
    });
}

/// Makes a call and kills the platform at a moment of it, at most `most_ms` after its start. Starts
/// the platform again and returns the answer of the same call.
async fn killed_amid(
    platform: &mut Platform,
    most_ms: u64,
    random: &mut Random,
    (token, name): (&str, &str),
    request: &Value,
) -> Value {
    let moment = Duration::from_micros(random.below(most_ms * 1_000));
    let pid = platform.pid();
    let kill = async {
        tokio::time::sleep(moment).await;
        let killed = tokio::process::Command::new("kill")
            .args(["-9", &pid])
            .status()
            .await;
        assert!(killed.expect("kill runs").success());
    };
    tokio::join!(asked(platform, token, name, request.clone()), kill);
    platform.aborted().await;
    platform.restart().await;
    platform.ok(token, name, request.clone()).await
}

#[test]
fn the_activation_of_an_issue_killed_at_any_step_ends_once() {
    run(async {
        let mut platform = Platform::start().await;
        let holder = platform.trader().await;
        for place in [
            "cfa.activation_recorded",
            "cfa.token_submitted",
            "cfa.token_deployed",
            "cfa.issue_active",
        ] {
            let (bond, issuer) = platform.draft(json!({})).await;
            let mut activate = platform.with_signed_decision(&bond, &issuer).await;
            activate["context"] = context();
            let name = "cfa.ActivateInstrument";
            killed_at(&mut platform, place, SERVICE, name, activate.clone()).await;
            platform.ok(SERVICE, name, activate).await;
            platform.is_traded(&bond).await;
            let request = json!({ "objectId": bond });
            let records = platform.all(AUDITOR, "cfa.ListAuditRecords", "records", request);
            let actions: Vec<String> = (records.await.iter())
                .map(|record| text(record, "/action"))
                .collect();
            let expected = ["active", "activated", "signed", "registered"];
            let expected = expected.map(|action| format!("instrument.{action}"));
            assert_eq!(actions, expected, "{place}");
            platform.issue(&bond, &holder, "2").await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

// rows: R215
#[test]
fn r215_an_anchor_killed_at_any_step_is_on_the_chain_once() {
    run(async {
        for place in ["cfa.anchor_stored", "cfa.anchor_submitted"] {
            // The first block of the ledger is anchored within a second.
            let mut platform = Platform::start_with(&[("PLATFORM_CRASH_AT", place)]).await;
            let user = platform.trader().await;
            let intent = platform.intent(&user, "10.00").await;
            let payment = text(&intent, "/paymentId");
            let pay = json!({ "qrPayload": text(&intent, "/qrPayload") });
            asked(&platform, OPERATOR, "sandbox.Pay", pay).await;
            platform.aborted().await;
            platform.restart().await;
            ended(&platform, &user, &payment, "FINALIZED").await;
            platform.balance_is(&user.cash(), "10.00").await;
            let anchors = platform.anchored(1).await;
            assert_eq!(anchors.len(), 1, "{place}: {anchors:?}");
            assert_eq!(anchors[0]["onChain"], anchors[0]["data"], "{place}");
            platform.full_proof().await.success();
            platform.stop().await;
        }
    });
}

/// Waits until an enforcement act has this status, given without its prefix.
async fn act_is(platform: &Platform, holder: &User, act: &str, status: &str) {
    let wanted = json!(format!("ENFORCEMENT_STATUS_{status}"));
    let request = json!({ "holderId": holder.id });
    let what = format!("act {act} to be {status}");
    platform
        .until(&what, "cfa.ListEnforcementActs", request, |answer| {
            let mut acts = answer["acts"].as_array().into_iter().flatten();
            acts.any(|one| one["actId"] == json!(act) && one["status"] == wanted)
        })
        .await;
}

/// The request that freezes units of a holder; `None`: all.
fn freezing(bond: &str, holder: &User, units: Option<&str>) -> Value {
    let mut request = json!({
        "context": context(), "instrumentId": bond, "holderId": holder.id,
        "basis": "ENFORCEMENT_BASIS_COURT", "document": "Decision 2-17/2026",
    });
    if let Some(units) = units {
        request["amount"] = amount(bond, units);
    }
    request
}

/// Makes a call that ends in an abort at the platform's place, and starts the platform again with
/// the next place. Returns the answer of the same call.
async fn killed_before(
    platform: &mut Platform,
    next: &str,
    (token, name): (&str, &str),
    request: &Value,
) -> Value {
    asked(platform, token, name, request.clone()).await;
    platform.aborted().await;
    platform.restart_with(&[("PLATFORM_CRASH_AT", next)]).await;
    platform.ok(token, name, request.clone()).await
}

/// A freeze is in the ledger before it is in the contract, and its lifting the other way around. If
/// one of the two had it twice or not at all, the units would not all be free in the end.
#[test]
fn a_freeze_and_its_lifting_killed_at_any_step_end_once() {
    // A freeze reaches no place of a lifting, and the other way around.
    let freezes = [
        "cfa.freeze_recorded",
        "cfa.freeze_held",
        "cfa.freeze_submitted",
    ];
    let lifts = [
        "cfa.lift_recorded",
        "cfa.lift_submitted",
        "cfa.freeze_released",
    ];
    run(async {
        let mut platform = Platform::start_with(&[("PLATFORM_CRASH_AT", freezes[0])]).await;
        let bond = platform.bond().await;
        let (mut holder, mut other) = (platform.trader().await, platform.trader().await);
        platform.issue(&bond, &holder, "10").await;
        for round in 0..6 {
            let (units, reason) = match round / 3 {
                0 => (Some("6"), "INSUFFICIENT_BALANCE"),
                _ => (None, "SUB_ACCOUNT_FROZEN"),
            };
            let freeze = freezing(&bond, &holder, units);
            let (next, call) = (lifts[round % 3], (COMPLIANCE, "cfa.FreezeUnits"));
            let frozen = killed_before(&mut platform, next, call, &freeze).await;
            let act = text(&frozen, "/act/actId");
            act_is(&platform, &holder, &act, "ACTIVE").await;
            let transfer = |units: &str| {
                json!({
                    "instrumentId": bond, "fromUserId": holder.id, "toUserId": other.id,
                    "amount": amount(&bond, units),
                })
            };
            let (token, name) = (holder.token(), "cfa.TransferCfa");
            let refusal = platform.refused(&token, name, transfer("5")).await;
            assert_eq!(refusal.reason, reason, "{refusal:?}");

            let lift = json!({
                "context": context(), "actId": act, "document": "Decision 2-18/2026",
            });
            let (next, call) = (freezes[(round + 1) % 3], (SERVICE, "cfa.LiftFreeze"));
            killed_before(&mut platform, next, call, &lift).await;
            act_is(&platform, &holder, &act, "LIFTED").await;
            let moved = platform.ok(&token, name, transfer("10")).await;
            let id = text(&moved, "/operation/operationId");
            platform.cfa_operation_is(&id, "FINALIZED").await;
            platform.balance_is(&other.units(&bond), "10").await;
            platform.proof().await;
            std::mem::swap(&mut holder, &mut other);
        }
        platform.stop().await;
    });
}

/// A call that may be answered by its deadline, or not at all.
async fn asked_in_a_stall(platform: &Platform, token: &str, name: &str, request: Value) {
    if let Err(refusal) = platform.call(token, name, request).await {
        assert!(!refusal.is_fault(), "{name}: {refusal:?}");
    }
}

#[test]
fn a_forced_transfer_of_frozen_units_killed_at_any_step_moves_them_once() {
    run(async {
        let mut platform = Platform::start().await;
        let (holder, other) = (platform.trader().await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &holder, "5").await;
        let freeze = freezing(&bond, &holder, Some("4"));
        let frozen = platform.ok(COMPLIANCE, "cfa.FreezeUnits", freeze).await;
        let act = text(&frozen, "/act/actId");
        act_is(&platform, &holder, &act, "ACTIVE").await;
        for (moved, place) in [
            (1, "cfa.gated"),
            (2, "cfa.unfreeze_submitted"),
            (3, "cfa.units_submitted"),
            (4, "cfa.operation_settled"),
        ] {
            let transfer = json!({
                "instrumentId": bond, "fromUserId": holder.id, "toUserId": other.id,
                "amount": amount(&bond, "1"), "basis": "ENFORCEMENT_BASIS_LEVY",
                "document": "Order 5/2026", "freezeId": act,
            });
            let name = "cfa.ForceTransfer";
            final_after(&mut platform, place, SERVICE, name, transfer).await;
            platform
                .balance_is(&other.units(&bond), &moved.to_string())
                .await;
            has(&platform, &holder.units(&bond), &(5 - moved).to_string()).await;
            platform.proof().await;
        }
        act_is(&platform, &holder, &act, "USED").await;
        platform.balance_is(&holder.units(&bond), "1").await;
        platform.stop().await;
    });
}

/// Waits until the market accepts an order of the user.
async fn accepted(platform: &Platform, user: &User, bond: &str) {
    let deadline = Instant::now() + tests::process::PATIENCE;
    loop {
        let order = limit_order(user, bond, "BUY", "100.00", "1");
        let name = "market.PlaceOrder";
        let token = user.token();
        let placed = platform.call(&token, name, json!({ "order": order }));
        let Err(refusal) = placed.await else { return };
        assert!(Instant::now() < deadline, "not accepted: {refusal:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Identity has the block and its event in one transaction; ledger and market apply the event.
#[test]
fn the_block_of_a_user_and_its_end_killed_at_any_moment_reach_ledger_and_market() {
    run(async {
        let mut platform = Platform::start().await;
        let mut random = Random::new(tests::seed::seed(20_261_201));
        let (bond, user) = (platform.bond().await, platform.rich("1000.00").await);
        for _ in 0..4 {
            accepted(&platform, &user, &bond).await;
            for (token, name, status) in [
                (COMPLIANCE, "identity.BlockUser", "FROZEN"),
                (SERVICE, "identity.UnblockUser", "ACTIVE"),
            ] {
                let request = json!({
                    "context": context(), "userId": user.id, "reason": "a drill",
                });
                let call = (token, name);
                killed_amid(&mut platform, 30, &mut random, call, &request).await;
                let wanted = json!(format!("SUB_ACCOUNT_STATUS_{status}"));
                let request = json!({ "subaccountId": user.cash() });
                platform
                    .until(status, "ledger.GetSubAccount", request, |answer| {
                        answer["subaccount"]["status"] == wanted
                    })
                    .await;
                // The order is cancelled.
                platform.balance_is(&user.cash(), "1000.00").await;
                platform.proof().await;
            }
        }
        platform.stop().await;
    });
}

/// Repeats a call until the platform aborts amid it, and starts the platform again on a chain that
/// answers.
async fn aborted_amid(
    platform: &mut Platform,
    chain: &RelayedChain,
    (token, name): (&str, &str),
    request: Value,
) {
    let deadline = Instant::now() + tests::process::PATIENCE;
    loop {
        let answer = platform.call(token, name, request.clone()).await;
        if answer.as_ref().is_err_and(|of| of.code == "transport") {
            break;
        }
        assert!(Instant::now() < deadline, "{name}: {answer:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    platform.aborted().await;
    chain.stall(false);
    platform.restart_with(&chain.env("")).await;
}

// rows: R089
#[test]
fn r089_a_block_its_end_and_a_refund_killed_at_any_step_end_a_redemption_once() {
    run(async {
        let (chain, mut platform) = RelayedChain::start().await;
        let user = platform.rich("100.00").await;
        for is_refunded in [false, true] {
            let payout = uuid::Uuid::now_v7().to_string();
            let block = "cfa.SetRedemptionBlock";
            platform.stop().await;
            let env = chain.env("cfa.block_recorded");
            platform.restart_with(&env).await;
            // A redemption whose burn is in no block can be blocked.
            chain.stall(true);
            let redeem = json!({
                "context": context_with_key(&payout), "userId": user.id, "payoutId": payout,
                "amount": rub("10.00"),
            });
            asked_in_a_stall(&platform, &user.token(), "cfa.RedeemCfaRub", redeem).await;
            let request = json!({ "userId": user.id, "externalRef": payout });
            let listed = platform.ok(AUDITOR, "cfa.ListOperations", request).await;
            let id = text(&listed, "/operations/0/operationId");
            let request = json!({ "operationId": id, "blocked": true, "reason": "115-FZ" });
            aborted_amid(&mut platform, &chain, (OPERATOR, block), request).await;
            platform.cfa_operation_is(&id, "BLOCKED").await;

            let (place, name, end) = match is_refunded {
                false => ("cfa.block_recorded", block, "FINALIZED"),
                true => ("cfa.refund_ordered", "cfa.RefundRedemption", "REFUNDED"),
            };
            let mut request = json!({ "operationId": id, "reason": "cleared" });
            if !is_refunded {
                request["blocked"] = json!(false);
            }
            platform.stop().await;
            platform.restart_with(&chain.env(place)).await;
            aborted_amid(&mut platform, &chain, (SERVICE, name), request).await;
            ended(&platform, &user, &payout, end).await;
            platform.balance_is(&user.cash(), "90.00").await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

/// Rust files below a folder.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
    found
}

/// Text of the Rust files below a folder.
fn rust_text(folder: &Path) -> String {
    let files = rust_files(folder);
    let read = |path: PathBuf| std::fs::read_to_string(path).expect("a source file");
    files.into_iter().map(read).collect()
}

/// Failpoints of a crate: the name of each one's constant, or an empty name, and the place.
fn failpoints<'a>(constants: &'a str, source: &'a str) -> Vec<(&'a str, &'a str)> {
    let constants = constants.lines().filter_map(|line| {
        let (name, place) = line.strip_prefix("pub const ")?.split_once(": &str = \"")?;
        Some((name, place.strip_suffix("\";")?))
    });
    let literals = source.split("failpoint::reach(\"").skip(1);
    let literals = literals.filter_map(|rest| Some(("", rest.split_once('"')?.0)));
    constants.chain(literals).collect()
}

/// True if the text has this name, alone.
fn has_name(text: &str, name: &str) -> bool {
    let is_part = |next: char| next.is_ascii_alphanumeric() || next == '_';
    let mut after = text.split(name).skip(1);
    after.any(|rest| !rest.starts_with(is_part))
}

/// The repeat of a step after a crash is tested by a kill there.
#[test]
fn a_test_kills_the_process_at_every_failpoint() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folders = std::fs::read_dir(&root).expect("the workspace");
    let folders: Vec<PathBuf> = folders
        .map(|entry| entry.expect("an entry").path())
        .collect();
    let tests_of = |folder: &PathBuf| rust_text(&folder.join("tests"));
    let all_tests: String = folders.iter().map(tests_of).collect();
    let (mut found, mut missed) = (0, Vec::new());
    for folder in &folders {
        let constants = std::fs::read_to_string(folder.join("src/failpoint.rs"));
        let (constants, source) = (
            constants.unwrap_or_default(),
            rust_text(&folder.join("src")),
        );
        for (name, place) in failpoints(&constants, &source) {
            found += 1;
            // A place may have the number of the hit after it.
            let is_tested = has_name(&all_tests, &format!("\"{place}"))
                || !name.is_empty() && has_name(&tests_of(folder), &format!("failpoint::{name}"));
            if !is_tested {
                missed.push(place.to_owned());
            }
        }
    }
    assert!(missed.is_empty(), "no test kills the process at {missed:?}");
    assert!(found > 50, "{found} failpoints");
}
