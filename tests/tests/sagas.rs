//! The platform is killed at each step of the sagas that move money or units, and trades lose a
//! party between match and settlement. Each saga ends once, and the proof of balances passes.
//!
//! `crash` kills at the steps of settlement and of an order's hold.

use serde_json::{Value, json};
use tests::Platform;
use tests::call::{AUDITOR, OPERATOR, SERVICE, context_with_key, number, staff, text};
use tests::shared::run;
use tests::world::{User, amount, is_settled, rub};

/// A call that the platform may not survive.
async fn asked(platform: &Platform, token: &str, name: &str, request: Value) {
    if let Err(refusal) = platform.call(token, name, request).await {
        assert_eq!(refusal.code, "transport", "{name}: {refusal:?}");
    }
}

/// Makes a call that ends in an abort at `place`; starts the platform again.
async fn killed_at(platform: &mut Platform, place: &str, token: &str, name: &str, request: Value) {
    platform.stop().await;
    platform.restart_with(&[("PLATFORM_CRASH_AT", place)]).await;
    asked(platform, token, name, request).await;
    platform.aborted().await;
    platform.restart().await;
}

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
    let deadline = std::time::Instant::now() + tests::process::PATIENCE;
    loop {
        let again = platform.ok(&token, name, request.clone()).await;
        if again[field]["status"] == active {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{again}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
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
        let places = ["cfa.redemption_step", "cfa.redemption_step:2"];
        for (round, place) in (1..).zip(places) {
            let bond = platform.bond().await;
            let request = json!({ "instrumentId": bond });
            let terms = platform
                .ok(AUDITOR, "cfa.GetInstrument", request.clone())
                .await;
            let issuer = User {
                id: text(&terms, "/instrument/issuerId"),
                account: String::new(),
                profile: Value::Null,
            };
            platform.set_limit(&issuer, "DEPOSIT", "1000000.00").await;
            platform.deposit(&issuer, "3000.00").await;
            platform.issue(&bond, &holder, "2").await;
            platform.issue(&bond, &other, "1").await;
            let start = json!({
                "context": context_with_key(&bond), "instrumentId": bond,
                "reason": "REDEMPTION_REASON_BUYBACK",
            });
            let name = "cfa.StartRedemption";
            killed_at(&mut platform, place, OPERATOR, name, start).await;
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
            let ask = json!({
                "method": tests::path_of("cfa.ResolveSuspendedDeposit"),
                "requestJson": resolve.to_string(), "reason": "refused",
            });
            let asked = platform
                .ok(&staff("anna"), "approvals.RequestApproval", ask)
                .await;
            let id = text(&asked, "/approval/approvalId");
            let decision = json!({ "approvalId": id, "hash": asked["approval"]["hash"] });
            let boris = staff("boris");
            killed_at(&mut platform, place, &boris, "approvals.Approve", decision).await;
            let executed = json!("APPROVAL_STATUS_EXECUTED");
            let request = json!({ "approvalId": id });
            platform
                .until("the approval", "approvals.GetApproval", request, |answer| {
                    answer["approval"]["status"] == executed
                })
                .await;
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
        let (mut matched, mut found) = (0, 0);
        for round in 0..6 {
            // A sell order left by a round without a trade must not be met by the next buyer.
            let bond = platform.bond().await;
            let (seller, buyer) = (platform.trader().await, platform.rich("1000.00").await);
            platform.issue(&bond, &seller, "5").await;
            platform.place(&seller, &bond, "SELL", "100.00", "5").await;
            let order = tests::world::limit_order(&buyer, &bond, "BUY", "100.00", "5");
            let token = buyer.token();
            let buy = platform.call(&token, "market.PlaceOrder", json!({ "order": order }));
            let blocked = match round % 2 {
                0 => &seller,
                _ => &buyer,
            };
            let block = json!({ "userId": blocked.id, "reason": "a drill" });
            // At once, so that the block comes at every moment around match and settlement.
            let block = platform.ok("sandbox.compliance", "identity.BlockUser", block);
            let (bought, _) = tokio::join!(buy, block);
            let is_traded = bought.is_ok_and(|answer| {
                let filled = number(&answer["order"]["filledQuantity"]);
                filled == number(&json!("5"))
            });
            if is_traded {
                matched += 1;
                // Frozen or not, both parties get what they traded for.
                has(&platform, &buyer.units(&bond), "5").await;
                has(&platform, &seller.cash(), "500.00").await;
            }
            let request = json!({ "instrumentId": bond });
            let trades = platform
                .all(AUDITOR, "market.ListTrades", "trades", request)
                .await;
            platform.settled(&bond, trades.len()).await;
            found += trades.len();
        }
        println!("{found} trades, {matched} seen by their buyers");
        platform.proof().await;
    });
}

// rows: R186
#[test]
fn a_trade_is_bust_although_its_seller_tried_to_spend_the_proceeds() {
    run(async {
        let platform = Platform::start().await;
        let bond = platform.bond().await;
        let (seller, buyer) = (platform.trader().await, platform.rich("1000.00").await);
        platform.issue(&bond, &seller, "5").await;
        platform.place(&buyer, &bond, "BUY", "100.00", "4").await;
        // The registry leaves the trades of a sanctioned party out, and settlement busts them.
        let sanction = json!({ "userId": buyer.id, "sanctioned": true });
        platform.ok(SERVICE, "identity.UpdateUser", sanction).await;
        platform.place(&seller, &bond, "SELL", "100.00", "4").await;
        let deadline = std::time::Instant::now() + tests::process::PATIENCE;
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
            assert!(std::time::Instant::now() < deadline, "not bust: {trade}");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        };
        let request = json!({ "idempotencyKey": trade["tradeId"] });
        let operations = platform.all(AUDITOR, "ledger.ListOperations", "operations", request);
        assert_eq!(
            operations.await[0]["status"],
            json!("OPERATION_STATUS_FAILED")
        );
        platform.balance_is(&seller.units(&bond), "5").await;
        platform.balance_is(&buyer.cash(), "1000.00").await;
        assert_eq!(platform.balance(&seller.cash()).await, number(&Value::Null));
        platform.proof().await;
    });
}
