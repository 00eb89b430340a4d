//! Attacks on money, units and authority over the public ports, one test each (`docs/attacks.md`).
//! Each asserts the answer of today and that nothing has moved.

use std::time::Duration;

use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, SERVICE, TREASURY, number, staff, text};
use tests::flow::Random;
use tests::shared::{platform, run};
use tests::world::{User, amount, rub};
use tests::{Platform, Refusal};

const COMPLIANCE: &str = "sandbox.compliance";
const SUPERVISOR: &str = "sandbox.market-supervisor";
const ISSUE: &str = "cfa.IssueInvestmentCfa";
const SYSTEM_TEXT: &str = "System sub-account cannot be frozen, closed, or debited by a person";

#[track_caller]
fn lacks_role(refusal: &Refusal) {
    refusal.is(
        403,
        "permission_denied",
        "Caller lacks the role for this operation",
        "ROLE_REQUIRED",
    );
}

#[track_caller]
fn needs_approval(refusal: &Refusal) {
    refusal.is(
        400,
        "failed_precondition",
        "This call needs an approval",
        "APPROVAL_REQUIRED",
    );
}

/// Number of transfers that the platform has ordered at the bank for an account.
async fn transfers_to(platform: &Platform, user: &User) -> usize {
    let all = platform.all(AUDITOR, "sandbox.ListTransfers", "transfers", json!({}));
    let all = all.await;
    let own = |transfer: &&Value| transfer["recipientAccount"] == json!(user.account);
    all.iter().filter(own).count()
}

// rows: R092
#[test]
fn an_issuer_takes_no_money_without_the_investors_subscription() {
    run(async {
        let platform = platform().await;
        let (user, bond) = (platform.rich("1000.00").await, platform.bond().await);
        let issuer = platform.issuer_of(&bond).await;
        let sale = json!({
            "instrumentId": bond, "investorId": user.id, "bookbuildingId": "b",
            "amount": amount(&bond, "1"), "payment": amount("CFA-RUB", "1000.00"),
        });
        for token in [&*issuer, OPERATOR, SERVICE] {
            platform.refused(token, ISSUE, sale.clone()).await.is(
                400,
                "failed_precondition",
                "No active subscription for this investor",
                "NOT_SUBSCRIBED",
            );
        }
        let subscribe = json!({
            "instrumentId": bond, "investorId": user.id, "amount": amount(&bond, "1"),
            "payment": amount("CFA-RUB", "1000.00"),
        });
        let foreign = platform.refused(&issuer, "cfa.Subscribe", subscribe.clone());
        assert_eq!(foreign.await.reason, "FOREIGN_USER");
        for token in [OPERATOR, SERVICE] {
            lacks_role(
                &platform
                    .refused(token, "cfa.Subscribe", subscribe.clone())
                    .await,
            );
        }
        platform.balance_is(&user.cash(), "1000.00").await;
    });
}

/// Units without a payment are issued by the issuer's own call, or by two persons.
// rows: R092
#[test]
fn one_operator_issues_no_units_and_no_call_ends_an_issue() {
    run(async {
        let platform = platform().await;
        let (user, bond) = (platform.trader().await, platform.bond().await);
        let issuer = platform.issuer_of(&bond).await;
        let mint = json!({
            "instrumentId": bond, "investorId": user.id, "amount": amount(&bond, "1"),
            "bookbuildingId": "placement",
        });
        for token in [OPERATOR, &staff("anna")] {
            needs_approval(&platform.refused(token, ISSUE, mint.clone()).await);
        }
        platform.approved(ISSUE, mint).await;
        platform.balance_is(&user.units(&bond), "1").await;
        // No call ends an issue before its maturity, for which there is no way back.
        let end = json!({ "instrumentId": bond, "status": "INSTRUMENT_STATUS_MATURED" });
        for token in [&*issuer, OPERATOR, SERVICE] {
            let refused = platform.refused(token, "cfa.UpdateInstrument", end.clone());
            assert_eq!(refused.await.reason, "OPERATION_STATE");
        }
    });
}

// rows: R093 R098 R099
#[test]
fn an_issuer_burns_no_units_without_the_holders_offer() {
    run(async {
        let platform = platform().await;
        let (user, bond) = (platform.trader().await, platform.bond().await);
        platform.issue(&bond, &user, "5").await;
        let issuer = platform.issuer_of(&bond).await;
        let burn = json!({
            "instrumentId": bond, "holderId": user.id, "amount": amount(&bond, "5"),
            "redemptionId": uuid::Uuid::now_v7().to_string(),
            "reason": "REDEMPTION_REASON_BUYBACK",
        });
        let buyback = "cfa.RedeemInvestmentCfa";
        needs_approval(&platform.refused(OPERATOR, buyback, burn.clone()).await);
        for token in [&*issuer, SERVICE] {
            platform.refused(token, buyback, burn.clone()).await.is(
                400,
                "failed_precondition",
                "No active offer of this holder",
                "NOT_OFFERED",
            );
        }
        let start = json!({ "instrumentId": bond, "reason": "REDEMPTION_REASON_BUYBACK" });
        let redemption = "cfa.StartRedemption";
        platform
            .refused(&issuer, redemption, start.clone())
            .await
            .is(
                400,
                "failed_precondition",
                "Only two operators may redeem an issue before its maturity",
                "NOT_MATURED",
            );
        // A record date before the units were issued would pay their holders nothing.
        let mut early = start;
        early["recordDate"] = json!("2020-01-01T00:00:00Z");
        let refused = platform.refused(SERVICE, redemption, early).await;
        refused.is_bad_field("record_date");
        platform.balance_is(&user.units(&bond), "5").await;

        // Units without a nominal are worth nothing to a redemption.
        let free = platform.instrument(json!({ "nominal": null })).await;
        platform.issue(&free, &user, "5").await;
        let start = json!({ "instrumentId": free, "reason": "REDEMPTION_REASON_BUYBACK" });
        platform.refused(SERVICE, redemption, start).await.is(
            400,
            "failed_precondition",
            "Instrument has no nominal",
            "NOMINAL_MISSING",
        );
        platform.balance_is(&user.units(&free), "5").await;
    });
}

/// The terms have no call option: before maturity one operator neither burns the holders' units nor
/// takes the issuer's money, whatever reason the call names.
// rows: R098 R333
#[test]
fn r098_one_operator_redeems_no_issue_before_its_maturity() {
    run(async {
        let platform = platform().await;
        let (holder, bond) = (platform.trader().await, platform.bond().await);
        platform.issue(&bond, &holder, "3").await;
        let request = json!({ "instrumentId": bond });
        let terms = platform.ok(AUDITOR, "cfa.GetInstrument", request.clone());
        let issuer = User {
            id: text(&terms.await, "/instrument/issuerId"),
            account: String::new(),
            profile: Value::Null,
        };
        platform.deposit(&issuer, "3000.00").await;
        let redemption = "cfa.StartRedemption";
        let start = |reason: &str| json!({ "instrumentId": bond, "reason": format!("REDEMPTION_REASON_{reason}") });
        for token in [OPERATOR, &staff("anna"), "sandbox.operator+service"] {
            for reason in ["BUYBACK", "MATURITY"] {
                needs_approval(&platform.refused(token, redemption, start(reason)).await);
            }
        }
        let found = platform.ok(AUDITOR, "cfa.GetInstrument", request.clone());
        let status = found.await["instrument"]["status"].clone();
        assert_eq!(status, json!("INSTRUMENT_STATUS_ACTIVE"));
        let none = platform.refused(AUDITOR, "cfa.GetRedemption", request.clone());
        assert_eq!(none.await.reason, "REDEMPTION_NOT_FOUND");
        platform.balance_is(&holder.units(&bond), "3").await;
        platform.balance_is(&issuer.cash(), "3000.00").await;

        platform.approved(redemption, start("BUYBACK")).await;
        platform
            .until("the redemption", "cfa.GetRedemption", request, |answer| {
                answer["redemption"]["status"] == json!("REDEMPTION_STATUS_FINALIZED")
            })
            .await;
        platform.balance_is(&holder.cash(), "3000.00").await;
        platform.balance_is(&issuer.cash(), "0.00").await;
        platform.balance_is(&holder.units(&bond), "0").await;
    });
}

// rows: R087 R123
#[test]
fn no_person_pays_out_and_no_service_without_a_burn() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("100.00").await;
        let payout_id = uuid::Uuid::now_v7().to_string();
        let payout = |account: &str| {
            json!({ "payout": {
                "payoutId": payout_id, "userId": user.id, "amount": rub("77.00"),
                "bankAccount": account,
            } })
        };
        let release = json!({ "payoutId": payout_id });
        for token in [
            TREASURY,
            OPERATOR,
            COMPLIANCE,
            &staff("anna"),
            &user.token(),
        ] {
            let initiate = payout(&user.account);
            lacks_role(
                &platform
                    .refused(token, "payments.InitiatePayout", initiate)
                    .await,
            );
            let release = release.clone();
            lacks_role(
                &platform
                    .refused(token, "payments.ReleasePayout", release)
                    .await,
            );
        }
        // An account that is not the user's.
        let elsewhere = payout("40817810100000000001");
        let refused = platform.refused(SERVICE, "payments.InitiatePayout", elsewhere);
        assert_eq!(refused.await.reason, "BANK_ACCOUNT_MISMATCH");
        let own = payout(&user.account);
        platform.ok(SERVICE, "payments.InitiatePayout", own).await;
        let refused = platform.refused(SERVICE, "payments.ReleasePayout", release.clone());
        refused.await.is(
            400,
            "failed_precondition",
            "No tokens of this user and amount were burned for this payout",
            "NOT_BURNED",
        );
        let cancel = json!({ "payoutId": payout_id, "failureCode": "TEST" });
        for token in [TREASURY, OPERATOR, &staff("anna")] {
            let cancel = cancel.clone();
            needs_approval(
                &platform
                    .refused(token, "payments.CancelPayout", cancel)
                    .await,
            );
        }
        platform.ok(SERVICE, "payments.CancelPayout", cancel).await;
        assert_eq!(transfers_to(platform, &user).await, 0);
        platform.balance_is(&user.cash(), "100.00").await;
    });
}

// rows: R038
#[test]
fn nothing_is_minted_or_refunded_for_an_invented_or_unpaid_payment() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        let intent = platform.intent(&user, "500.00").await;
        let pending = text(&intent, "/paymentId");
        let mint = |payment: &str, value: &str| {
            let amount = rub(value);
            json!({ "userId": user.id, "amount": amount, "paymentId": payment })
        };
        let resolve = |payment: &str| json!({ "paymentId": payment, "refund": true });
        for token in [TREASURY, OPERATOR, &staff("anna")] {
            let invented = mint("invented", "500.00");
            needs_approval(&platform.refused(token, "cfa.IssueCfaRub", invented).await);
            let refused =
                platform.refused(token, "cfa.ResolveSuspendedDeposit", resolve("invented"));
            needs_approval(&refused.await);
        }
        for (payment, value) in [
            ("invented", "500.00"),
            (&*pending, "500.00"),
            (&*pending, "1.00"),
        ] {
            let request = mint(payment, value);
            platform
                .refused(SERVICE, "cfa.IssueCfaRub", request)
                .await
                .is(
                    400,
                    "failed_precondition",
                    "Payment not found or not paid",
                    "PAYMENT_NOT_PAID",
                );
            let request = resolve(payment);
            let refused = platform
                .refused(SERVICE, "cfa.ResolveSuspendedDeposit", request)
                .await;
            assert_eq!(
                refused.message, "Suspended deposit not found",
                "{refused:?}"
            );
        }
        // The refused calls do not take the payment's place: it is issued in full.
        platform.pay(&intent).await;
        platform.balance_is(&user.cash(), "500.00").await;
        let request = json!({ "userId": user.id });
        let operations = platform.all(AUDITOR, "cfa.ListOperations", "operations", request);
        assert_eq!(operations.await.len(), 1);
        assert_eq!(transfers_to(platform, &user).await, 0);
    });
}

/// `design.md` 4: a redemption takes what is not available out of undrawn money. The market admits
/// the call of the CFA service for it.
// rows: R070
#[test]
fn r070_a_redemption_uses_undrawn_trading_money() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("100.00").await;
        platform.trading_hold(&user, "CFA-RUB", "80.00").await;
        let payout = uuid::Uuid::now_v7().to_string();
        let request = json!({ "userId": user.id, "payoutId": payout, "amount": rub("50.00") });
        let token = user.token();
        let redeemed = platform.ok(&token, "cfa.RedeemCfaRub", request).await;
        let operation = text(&redeemed, "/operation/operationId");
        platform.cfa_operation_is(&operation, "FINALIZED").await;
        let balance = platform.balance(&user.cash()).await;
        assert_eq!(balance, number(&json!("50.00")));
        let request = json!({ "userId": user.id });
        let holds = platform
            .ok(&token, "market.ListTradingHolds", request)
            .await;
        let undrawn = number(&holds["tradingHolds"][0]["undrawn"]);
        assert_eq!(undrawn, number(&json!("50.00")), "80.00 less 30.00");
    });
}

// rows: R340
#[test]
fn redemptions_at_once_stay_within_the_limit_of_the_day() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("1000.00").await;
        platform.set_limit(&user, "WITHDRAWAL", "300.00").await;
        let token = user.token();
        let calls = (0..10).map(|_| {
            let payout = uuid::Uuid::now_v7().to_string();
            let request = json!({ "userId": user.id, "payoutId": payout, "amount": rub("100.00") });
            platform.ok(&token, "cfa.RedeemCfaRub", request)
        });
        let answers = futures::future::join_all(calls).await;
        for answer in &answers {
            let id = text(answer, "/operation/operationId");
            let request = json!({ "operationId": id });
            let ended =
                ["FINALIZED", "REJECTED"].map(|end| json!(format!("OPERATION_STATUS_{end}")));
            platform
                .until(
                    "the redemption's end",
                    "cfa.GetOperation",
                    request,
                    |answer| ended.contains(&answer["operation"]["status"]),
                )
                .await;
        }
        platform.balance_is(&user.cash(), "700.00").await;
        assert_eq!(transfers_to(platform, &user).await, 3);
    });
}

/// Makes a call after a pause.
async fn after(
    pause: Duration,
    platform: &Platform,
    (token, name): (&str, &str),
    request: Value,
) -> Result<Value, Refusal> {
    tokio::time::sleep(pause).await;
    platform.call(token, name, request).await
}

/// Starts a redemption, an order and a transfer of `user`, each of 60 roubles, and a block of the
/// user within 40 ms. Returns once no order is open.
async fn at_once(
    platform: &Platform,
    random: &mut Random,
    bond: &str,
    (user, other): (&User, &User),
) {
    let mut pause = || Duration::from_millis(random.below(40));
    let token = user.token();
    let payout = uuid::Uuid::now_v7().to_string();
    let redeem = json!({ "userId": user.id, "payoutId": payout, "amount": rub("60.00") });
    let order = tests::world::limit_order(user, bond, "BUY", "60.00", "1");
    let transfer = json!({
        "instrumentId": "CFA-RUB", "fromUserId": user.id, "toUserId": other.id,
        "amount": amount("CFA-RUB", "60.00"),
    });
    let block = json!({ "userId": user.id, "reason": "a drill" });
    let call = |name| (token.as_str(), name);
    let (redeemed, ordered, transferred, blocked) = tokio::join!(
        after(pause(), platform, call("cfa.RedeemCfaRub"), redeem),
        after(
            pause(),
            platform,
            call("market.PlaceOrder"),
            json!({ "order": order })
        ),
        after(pause(), platform, call("cfa.TransferCfa"), transfer),
        after(pause(), platform, (COMPLIANCE, "identity.BlockUser"), block),
    );
    blocked.expect("blocked");
    for answer in [redeemed, ordered, transferred] {
        if let Err(refusal) = answer {
            assert!(!refusal.is_fault() && refusal.http != 0, "{refusal:?}");
        }
    }
    let request = json!({ "userId": user.id });
    let what = "the end of a blocked user's order";
    let done = |answer: &Value| {
        let mut orders = answer["orders"].as_array().into_iter().flatten();
        !orders.any(tests::ledger::is_open)
    };
    platform
        .until(what, "market.ListOrders", request, done)
        .await;
}

/// Waits until the operations of a user have ended; returns the numbers of redemptions and of
/// transfers that were executed.
async fn executed(platform: &Platform, user: &User) -> [usize; 2] {
    let ends = ["FINALIZED", "REJECTED", "FAILED"];
    let ends = ends.map(|end| json!(format!("OPERATION_STATUS_{end}")));
    let request = json!({ "userId": user.id });
    let what = "the end of the user's operations";
    let done = |answer: &Value| {
        let mut operations = answer["operations"].as_array().into_iter().flatten();
        operations.all(|operation| ends.contains(&operation["status"]))
    };
    let listed = platform
        .until(what, "cfa.ListOperations", request, done)
        .await;
    ["REDEMPTION", "P2P_TRANSFER"].map(|kind| {
        let kind = json!(format!("OPERATION_TYPE_{kind}"));
        let operations = listed["operations"].as_array().into_iter().flatten();
        let is_executed = |one: &&Value| one["type"] == kind && one["status"] == ends[0];
        operations.filter(is_executed).count()
    })
}

/// The money is enough for one of the three calls, and the block ends the order. So any serial
/// sequence of the calls pays the redemption, or the transfer, or neither.
// rows: R071
#[test]
fn r071_redemption_order_transfer_and_block_at_once_spend_the_money_once() {
    run(async {
        let platform = Platform::start().await;
        let bond = platform.bond().await;
        for seed in tests::seed::seeds(1..9) {
            let (user, other) = (platform.rich("100.00").await, platform.trader().await);
            at_once(&platform, &mut Random::new(seed), &bond, (&user, &other)).await;
            // The payout of a blocked user waits.
            let unblock = json!({ "userId": user.id, "reason": "over" });
            platform.approved("identity.UnblockUser", unblock).await;
            let [redeemed, transferred] = executed(&platform, &user).await;
            println!("seed {seed}: {redeemed} redeemed, {transferred} transferred");
            assert!(redeemed + transferred <= 1);
            let left = format!("{}.00", 100 - 60 * (redeemed + transferred));
            platform.balance_is(&user.cash(), &left).await;
            assert_eq!(transfers_to(&platform, &user).await, redeemed);
            if transferred == 1 {
                platform.balance_is(&other.cash(), "60.00").await;
            } else {
                let received = platform.balance(&other.cash()).await;
                assert_eq!(received, number(&Value::Null));
            }
            let request = json!({ "subaccountId": user.cash() });
            let lines = platform.all(AUDITOR, "ledger.GetStatement", "lines", request);
            for line in lines.await {
                assert!(!number(&line["balance"]).is_negative(), "{line}");
            }
        }
        platform.proof().await;
    });
}

// rows: R324
#[test]
fn a_frozen_reserve_would_stop_deposits_and_is_refused() {
    run(async {
        let platform = platform().await;
        for account in ["system:reserve:CFA-RUB", "system:fees:CFA-RUB"] {
            for status in ["FROZEN", "CLOSED"] {
                let request = json!({
                    "subaccountId": account, "status": format!("SUB_ACCOUNT_STATUS_{status}"),
                    "reason": "a drill",
                });
                for token in [COMPLIANCE, OPERATOR, SERVICE] {
                    let call = "ledger.SetSubAccountStatus";
                    platform.refused(token, call, request.clone()).await.is(
                        400,
                        "failed_precondition",
                        SYSTEM_TEXT,
                        "SYSTEM_SUB_ACCOUNT",
                    );
                }
            }
        }
        platform.rich("10.00").await;
    });
}

/// Two persons post no money from a reserve to a user, and one operator blocks no payout of a
/// distribution with a hold on its money.
// rows: R333
#[test]
fn no_person_debits_or_holds_a_system_sub_account() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("10.00").await;
        for account in ["system:reserve:CFA-RUB", "system:redemption:CFA-RUB"] {
            let post = json!({
                "operation": { "type": "OPERATION_TYPE_PAYMENT", "userId": user.id },
                "postings": [{
                    "debitSubaccountId": account, "creditSubaccountId": user.cash(),
                    "amount": amount("CFA-RUB", "1.00"),
                }],
            });
            let ended = platform.decided("ledger.CreateOperation", post).await;
            let failed = json!("APPROVAL_STATUS_FAILED");
            let found = [&ended["status"], &ended["resultText"]];
            assert_eq!(found, [&failed, &json!(SYSTEM_TEXT)], "{ended}");
            let hold = json!({ "hold": {
                "subaccountId": account, "amount": amount("CFA-RUB", "1.00"), "reason": "a drill",
            } });
            for token in [OPERATOR, &staff("anna")] {
                let call = "ledger.CreateHold";
                platform.refused(token, call, hold.clone()).await.is(
                    400,
                    "failed_precondition",
                    SYSTEM_TEXT,
                    "SYSTEM_SUB_ACCOUNT",
                );
            }
        }
        platform.balance_is(&user.cash(), "10.00").await;
    });
}

// rows: R333
#[test]
fn one_person_lifts_no_block_freeze_or_limit() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("10.00").await;
        let block = json!({ "userId": user.id, "reason": "a drill" });
        platform
            .ok(COMPLIANCE, "identity.BlockUser", block.clone())
            .await;
        let status = |status: &str| {
            json!({
                "subaccountId": user.cash(), "status": format!("SUB_ACCOUNT_STATUS_{status}"),
                "reason": "a drill",
            })
        };
        let freeze = "ledger.SetSubAccountStatus";
        platform.ok(COMPLIANCE, freeze, status("FROZEN")).await;
        let raise = json!({
            "userId": user.id, "limitType": "LIMIT_TYPE_WITHDRAWAL",
            "dailyLimit": rub("100000000.00"),
        });
        for token in [COMPLIANCE, OPERATOR, &staff("anna")] {
            let unblock = block.clone();
            needs_approval(
                &platform
                    .refused(token, "identity.UnblockUser", unblock)
                    .await,
            );
            needs_approval(&platform.refused(token, freeze, status("ACTIVE")).await);
            let raise = raise.clone();
            needs_approval(&platform.refused(token, "identity.SetLimit", raise).await);
        }
        let request = json!({ "userId": user.id });
        let profile = platform
            .ok(AUDITOR, "identity.GetUserProfile", request)
            .await;
        assert_eq!(profile["profile"]["status"], json!("USER_STATUS_BLOCKED"));
    });
}

// rows: R333
#[test]
fn staff_moves_no_units_and_signs_no_transaction() {
    run(async {
        let platform = platform().await;
        let (user, other) = (platform.trader().await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &user, "5").await;
        let transfer = json!({
            "instrumentId": bond, "fromUserId": user.id, "toUserId": other.id,
            "amount": amount(&bond, "1"),
        });
        let anna = staff("anna");
        for token in [TREASURY, OPERATOR, COMPLIANCE, SUPERVISOR, AUDITOR, &*anna] {
            lacks_role(
                &platform
                    .refused(token, "cfa.TransferCfa", transfer.clone())
                    .await,
            );
            for name in [
                "cfa.SettleTrades",
                "chain.SubmitTransaction",
                "ledger.CreateOperations",
                "ledger.FinalizeOperations",
                "ledger.AdjustHold",
                "identity.ReserveLimit",
            ] {
                lacks_role(&platform.refused(token, name, json!({})).await);
            }
        }
        let token = other.token();
        let own = platform.refused(&token, "cfa.TransferCfa", transfer.clone());
        assert_eq!(own.await.reason, "FOREIGN_USER");
        // A redemption sends the user's money to a bank: the user's own call.
        let redeem = json!({ "userId": user.id, "payoutId": "p", "amount": rub("1.00") });
        for token in [TREASURY, OPERATOR, COMPLIANCE, SUPERVISOR, SERVICE, &*anna] {
            lacks_role(
                &platform
                    .refused(token, "cfa.RedeemCfaRub", redeem.clone())
                    .await,
            );
        }
        // Not a service either: only the sender transfers without a trade.
        let refused = platform.refused(SERVICE, "cfa.TransferCfa", transfer).await;
        assert_eq!(refused.http, 403, "{refused:?}");
        platform.balance_is(&user.units(&bond), "5").await;
    });
}

// rows: R333
#[test]
fn combined_roles_are_no_more_than_each_alone() {
    run(async {
        let platform = platform().await;
        let (user, bond) = (platform.rich("100.00").await, platform.bond().await);
        let (redeem, order) = (
            json!({ "userId": user.id, "payoutId": "p", "amount": rub("1.00") }),
            tests::world::limit_order(&user, &bond, "BUY", "10.00", "1"),
        );
        for (token, name, request) in [
            (
                "sandbox.investor+auditor.mallory",
                "cfa.RedeemCfaRub",
                redeem,
            ),
            (
                "sandbox.trader+auditor.mallory",
                "market.PlaceOrder",
                json!({ "order": order }),
            ),
            (
                "sandbox.issuer+auditor.mallory",
                "cfa.UpdateInstrument",
                json!({ "instrumentId": bond, "name": "Taken" }),
            ),
        ] {
            let refused = platform.refused(token, name, request).await;
            refused.is(
                403,
                "permission_denied",
                "Caller may act only on its own user id",
                "FOREIGN_USER",
            );
        }
        platform.balance_is(&user.cash(), "100.00").await;
    });
}

// rows: R114
#[test]
fn a_webhook_with_many_signatures_costs_no_time() {
    run(async {
        let platform = platform().await;
        let webhook = platform.signed(
            &tests::bank::notice("no-such-payment", "SUCCESS", "1.00"),
            tests::bank::now_s(),
        );
        let many = tests::bank::Webhook {
            signature: "v1, ".repeat(4_000),
            ..webhook
        };
        let begun = std::time::Instant::now();
        for _ in 0..64 {
            let refusal = platform.post_webhook(&many).await.expect_err("refused");
            assert!((400..500).contains(&refusal.http), "{refusal:?}");
        }
        // An HMAC per signature took minutes.
        assert!(begun.elapsed() < tests::process::PATIENCE);
    });
}

type Nonsense = Vec<(&'static str, Value, &'static str)>;

/// Requests of registry and ledger, with the field that is refused.
fn nonsense_of_units(user: &User, bond: &str, long: &str) -> Nonsense {
    let update = |field: &str, value: &str| json!({ "instrumentId": bond, field: value });
    let hold = |expires_at: &str| {
        json!({ "hold": {
            "subaccountId": user.cash(), "amount": amount("CFA-RUB", "1.00"), "reason": "r",
            "expiresAt": expires_at,
        } })
    };
    let one = amount(bond, "1");
    let redeem = json!({ "userId": user.id, "amount": rub("1.00"), "payoutId": " " });
    let issue = json!({
        "instrumentId": bond, "investorId": user.id, "amount": one, "bookbuildingId": long,
    });
    let burn = json!({
        "instrumentId": bond, "holderId": user.id, "amount": one, "redemptionId": "\u{0}",
    });
    let (past, year_1) = ("2020-01-01T00:00:00Z", "0001-01-01T00:00:00Z");
    let change = "cfa.UpdateInstrument";
    vec![
        (change, update("maturesAt", past), "matures_at"),
        (change, update("maturesAt", year_1), "matures_at"),
        (change, update("name", ""), "name"),
        (change, update("name", "\u{0}"), "name"),
        (change, update("documentHash", long), "document_hash"),
        (change, update("documentUri", long), "document_uri"),
        ("cfa.RedeemCfaRub", redeem, "payout_id"),
        (ISSUE, issue, "bookbuilding_id"),
        ("cfa.RedeemInvestmentCfa", burn, "redemption_id"),
        ("cfa.ListOperations", json!({ "type": 999 }), "type"),
        ("cfa.ListInstruments", json!({ "status": -1 }), "status"),
        (
            "cfa.ListHolders",
            json!({ "instrumentId": bond, "asOf": "2099-01-01T00:00:00Z" }),
            "as_of",
        ),
        ("ledger.CreateHold", hold(past), "hold.expires_at"),
        ("ledger.CreateHold", hold(year_1), "hold.expires_at"),
    ]
}

/// Requests of identity, payments and market, with the field that is refused.
fn nonsense_of_users(user: &User, long: &str) -> Nonsense {
    let create = |account: &str| {
        let level = "KYC_STATUS_STANDARD";
        json!({ "kycStatus": level, "fullName": "A person", "bankAccount": account })
    };
    let check = |field: &str, value: Value| {
        json!({
            "userId": user.id, "limitType": "LIMIT_TYPE_TRADING", "amount": rub("1.00"),
            field: value,
        })
    };
    let tiny = json!({
        "userId": user.id, "limitType": "LIMIT_TYPE_DEPOSIT",
        "dailyLimit": rub("0.000000000000000001"),
    });
    let bounds = json!({
        "userId": user.id, "reason": "r",
        "bounds": {
            "openOrdersPerUser": 10, "openOrdersPerInstrument": 10, "sessionsPerUser": 1,
            "valuePerOrder": { "value": "-1" },
        },
    });
    let path = json!({ "userId": "..%2f../etc/passwd", "kycStatus": "KYC_STATUS_STANDARD" });
    let account = json!({ "userId": user.id, "bankAccount": "1" });
    let day = json!({ "businessDate": "1970-01-01T00:00:00Z" });
    let checks = "identity.CheckLimits";
    let creates = "identity.CreateUser";
    vec![
        (creates, create(long), "bank_account"),
        (creates, create("\u{0}"), "bank_account"),
        // A wrong control key.
        (creates, create("40817810099910004312"), "bank_account"),
        (creates, path, "user_id"),
        ("identity.UpdateUser", account, "bank_account"),
        (checks, check("notional", rub("NaN")), "notional"),
        (checks, check("notional", rub("abc")), "notional"),
        (checks, check("notional", amount("EUR", "1.00")), "notional"),
        (checks, check("operationType", json!(999)), "operation_type"),
        ("identity.SetLimit", tiny, "daily_limit"),
        ("payments.Reconcile", day, "business_date"),
        ("market.SetMemberBounds", bounds, "bounds.value_per_order"),
    ]
}

// rows: R326
#[test]
fn b9_nonsense_that_was_once_accepted_is_refused_under_its_field() {
    run(async {
        let platform = platform().await;
        let (user, bond) = (platform.rich("100.00").await, platform.bond().await);
        let long = "x".repeat(100_000);
        let mut all = nonsense_of_units(&user, &bond, &long);
        all.extend(nonsense_of_users(&user, &long));
        for (name, request, field) in all {
            let token = match name {
                "cfa.RedeemCfaRub" => user.token(),
                _ => SERVICE.to_owned(),
            };
            let refusal = platform.refused(&token, name, request).await;
            let found = (name, refusal.fields.clone());
            assert_eq!(found, (name, vec![field.to_owned()]), "{refusal:?}");
            refusal.is_bad_field(field);
        }
        platform.balance_is(&user.cash(), "100.00").await;
    });
}

// rows: R123 R184
#[test]
fn b9_payouts_without_a_user_and_finality_without_a_hash_are_refused() {
    run(async {
        let platform = platform().await;
        let (user, other) = (platform.rich("100.00").await, platform.rich("1.00").await);
        for (account, reason) in [
            ("", "BANK_ACCOUNT_MISMATCH"),
            ("1", "BANK_ACCOUNT_MISMATCH"),
        ] {
            let payout = json!({ "payout": {
                "payoutId": uuid::Uuid::now_v7().to_string(), "userId": user.id,
                "amount": rub("1.00"), "bankAccount": account,
            } });
            let refused = platform
                .refused(SERVICE, "payments.InitiatePayout", payout)
                .await;
            assert_eq!(refused.reason, reason, "{refused:?}");
        }
        let ghost = json!({ "payout": {
            "payoutId": uuid::Uuid::now_v7().to_string(), "userId": "ghost-user",
            "amount": rub("1.00"), "bankAccount": user.account,
        } });
        let refused = platform.refused(SERVICE, "payments.InitiatePayout", ghost);
        refused
            .await
            .is(404, "not_found", "User not found", "USER_NOT_FOUND");

        let posted = json!({
            "operation": {
                "type": "OPERATION_TYPE_PAYMENT", "userId": user.id, "awaitsChain": true,
            },
            "postings": [{
                "debitSubaccountId": user.cash(), "creditSubaccountId": other.cash(),
                "amount": amount("CFA-RUB", "1.00"),
            }],
        });
        let posted = platform.ok(SERVICE, "ledger.CreateOperation", posted).await;
        let id = text(&posted, "/operation/operationId");
        for hash in ["", "'; DROP TABLE x;--", "0x12"] {
            let finality = json!({ "operationId": id, "onchainTxHash": hash });
            let refused = platform.refused(SERVICE, "ledger.FinalizeOperation", finality);
            refused.await.is_bad_field("onchain_tx_hash");
        }
        let person = json!({ "operationId": id });
        let refused = platform.refused(OPERATOR, "ledger.FinalizeOperation", person);
        assert_eq!(refused.await.reason, "OPERATION_STATUS");
        let undo = json!({ "operationId": id, "reason": "a drill" });
        platform.ok(SERVICE, "ledger.ReverseOperation", undo).await;
        platform.balance_is(&user.cash(), "100.00").await;
    });
}
