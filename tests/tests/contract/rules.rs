//! Rules of identity and payments: limits by type, reasons of refused operations, KYC as an ordered
//! level, the profile's bank account, statuses of a payment.

use proto::common::v1::OperationType;
use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, SERVICE, number, text};
use tests::shared::{platform, run};
use tests::world::{User, amount, limit_order, rub};
use tests::{Platform, Refusal};

/// Redeems roubles as the user; returns the operation.
async fn redeem(platform: &Platform, user: &User, value: &str) -> Result<Value, Refusal> {
    let payout = uuid::Uuid::now_v7().to_string();
    let request = json!({ "userId": user.id, "payoutId": payout, "amount": rub(value) });
    Ok(platform
        .call(&user.token(), "cfa.RedeemCfaRub", request)
        .await?["operation"]
        .clone())
}

/// Pays the intent and waits for the deposit's operation; returns it.
async fn paid(platform: &Platform, user: &User, intent: &Value) -> Value {
    platform.pay(intent).await;
    let payment = text(intent, "/paymentId");
    let request = json!({ "userId": user.id, "externalRef": payment });
    let is_decided = |answer: &Value| answer.pointer("/operations/0").is_some();
    let call = "cfa.ListOperations";
    let listed = platform.until("the deposit", call, request, is_decided);
    listed.await["operations"][0].clone()
}

/// Waits until identity's use of today under the limit type equals `expected`.
async fn until_used(platform: &Platform, user: &User, limit: &str, expected: &str) {
    let kind = json!(format!("LIMIT_TYPE_{limit}"));
    let what = format!("{limit} of {expected} to be counted");
    platform
        .until(
            &what,
            "identity.GetLimits",
            json!({ "userId": user.id }),
            |answer| {
                let limits = answer["limits"].as_array().cloned().unwrap_or_default();
                let used = limits
                    .iter()
                    .find(|one| one["limitType"] == kind)
                    .map(|one| number(&one["usedToday"]["amount"]));
                used == Some(number(&json!(expected)))
            },
        )
        .await;
}

/// Limit checks of a user in the log: limit type and operation type.
fn checks(platform: &Platform, user: &User) -> Vec<(String, OperationType)> {
    let lines = platform.log();
    let lines = lines
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines
        .filter(|line| {
            line["message"] == json!("limit checked") && line["user_id"] == json!(user.id)
        })
        .map(|line| {
            let operation = line["operation_type"]
                .as_i64()
                .and_then(|number| i32::try_from(number).ok());
            let operation = operation.and_then(|number| OperationType::try_from(number).ok());
            (
                text(&line, "/limit_type"),
                operation.expect("an operation type"),
            )
        })
        .collect()
}

// rows: R012 R040 R068 R303
#[test]
fn r012_identity_counts_each_use_under_its_type() {
    run(async {
        let platform = platform().await;
        let (buyer, seller) = (platform.rich("5000.00").await, platform.trader().await);
        until_used(platform, &buyer, "DEPOSIT", "5000").await;
        let operation = redeem(platform, &buyer, "30.00").await.expect("accepted");
        platform
            .cfa_operation_is(&text(&operation, "/operationId"), "FINALIZED")
            .await;
        until_used(platform, &buyer, "WITHDRAWAL", "30").await;

        let bond = platform.bond().await;
        platform.issue(&bond, &seller, "10").await;
        // The units of an issue count when they are reserved.
        until_used(platform, &seller, "TRADING", "10").await;
        platform.place(&seller, &bond, "SELL", "100.00", "4").await;
        platform.place(&buyer, &bond, "BUY", "100.00", "4").await;
        platform.settled(&bond, 1).await;
        until_used(platform, &buyer, "TRADING", "4").await;
        until_used(platform, &seller, "TRADING", "14").await;
        until_used(platform, &seller, "DEPOSIT", "0").await;
        until_used(platform, &seller, "WITHDRAWAL", "0").await;

        // Intent, issue, redemption and order each checked their own type.
        let logged = checks(platform, &buyer);
        for wanted in [
            ("DEPOSIT".to_owned(), OperationType::Deposit),
            ("DEPOSIT".to_owned(), OperationType::Issuance),
            ("WITHDRAWAL".to_owned(), OperationType::Withdrawal),
            ("TRADING".to_owned(), OperationType::Trading),
        ] {
            assert!(
                logged.contains(&wanted),
                "{wanted:?} is not among {logged:?}"
            );
        }

        // The refusal names the type under which a call is checked.
        let user = platform.rich("100.00").await;
        for limit in ["DEPOSIT", "WITHDRAWAL", "TRADING"] {
            platform
                .refuse_limit(&user, limit, &format!("no {limit} today"))
                .await;
        }
        let intent =
            json!({ "userId": user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("10.00") });
        let refusal = platform
            .refused(&user.token(), "payments.CreatePaymentIntent", intent)
            .await;
        refusal.is(
            400,
            "failed_precondition",
            "no DEPOSIT today",
            "LIMIT_EXCEEDED",
        );
        let operation = redeem(platform, &user, "10.00")
            .await
            .expect("a refusal by limit is a result");
        assert_eq!(text(&operation, "/rejectionMessage"), "no WITHDRAWAL today");
        let order = json!({ "order": limit_order(&user, &bond, "BUY", "10.00", "1") });
        let refusal = platform
            .refused(&user.token(), "market.PlaceOrder", order)
            .await;
        refusal.is(
            400,
            "failed_precondition",
            "no TRADING today",
            "LIMIT_EXCEEDED",
        );
    });
}

// rows: R013 R019 R041 R042 R043 R044 R046
#[test]
fn r013_refused_and_failed_operations_say_which_kind_it_was() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("500.00").await;
        // Before the refusals, which would refuse the codes as well.
        let codes = [
            platform.intent(&user, "10.00").await,
            platform.intent(&user, "10.00").await,
        ];
        let refusals = [
            ("KYC level too low", "KYC_REQUIRED"),
            ("Daily limit", "LIMIT_EXCEEDED"),
        ];
        for (code, (refusal, reason)) in codes.iter().zip(refusals) {
            platform.refuse_limit(&user, "DEPOSIT", refusal).await;
            let operation = paid(platform, &user, code).await;
            assert_rejected(&operation, "ISSUANCE", reason, refusal);
        }
        // The bank refuses the account: the burned tokens return and the operation fails.
        let fault = |fault: &str| json!({ "fault": fault, "account": user.account });
        platform
            .ok(
                OPERATOR,
                "sandbox.SetFault",
                fault("BANK_FAULT_REFUSE_TRANSFER"),
            )
            .await;
        let operation = redeem(platform, &user, "100.00").await.expect("accepted");
        let failed = platform
            .cfa_operation_is(&text(&operation, "/operationId"), "FAILED")
            .await;
        platform
            .ok(OPERATOR, "sandbox.SetFault", fault("BANK_FAULT_NONE"))
            .await;
        assert_eq!(
            failed["rejectionReason"],
            json!("REJECTION_REASON_CODE_INTEGRATION_ERROR"),
            "{failed}"
        );
        assert_eq!(
            failed["rejectionMessage"],
            json!("Payout failed, tokens returned"),
            "{failed}"
        );
        platform.balance_is(&user.cash(), "500.00").await;
    });
}

#[track_caller]
fn assert_rejected(operation: &Value, kind: &str, reason: &str, message: &str) {
    assert_eq!(
        operation["type"],
        json!(format!("OPERATION_TYPE_{kind}")),
        "{operation}"
    );
    assert_eq!(
        operation["status"],
        json!("OPERATION_STATUS_REJECTED"),
        "{operation}"
    );
    assert_eq!(
        operation["rejectionReason"],
        json!(format!("REJECTION_REASON_CODE_{reason}")),
        "{operation}"
    );
    assert_eq!(operation["rejectionMessage"], json!(message), "{operation}");
    // No transaction went to the chain.
    assert_eq!(
        operation["onchainTxHash"].as_str().unwrap_or_default(),
        "",
        "{operation}"
    );
}

/// Needs a platform of its own, since it counts the calls.
#[test]
fn r019_operations_check_identity_before_the_chain() {
    run(async {
        let platform = Platform::start().await;
        let user = platform.rich("500.00").await;
        let (other, bond) = (platform.trader().await, platform.bond().await);
        platform.issue(&bond, &user, "5").await;
        let before = identity_calls(&platform).await;
        platform.issue(&bond, &user, "1").await;
        assert_identity_asked(&platform, before, "an accepted placement").await;
        // Before the refusals, which would refuse the codes as well.
        let codes = [
            platform.intent(&user, "10.00").await,
            platform.intent(&user, "10.00").await,
        ];
        let refusals = [
            ("LIMIT_EXCEEDED", "not today"),
            ("KYC_REQUIRED", "KYC level too low"),
        ];
        for (code, refusal) in codes.iter().zip(refusals) {
            let message = refusal.1;
            for limit in ["DEPOSIT", "WITHDRAWAL", "TRADING"] {
                platform.refuse_limit(&user, limit, message).await;
            }
            assert_all_rejected(&platform, &user, &other, &bond, code, refusal).await;
        }
        platform.balance_is(&user.cash(), "500.00").await;
        platform.balance_is(&user.units(&bond), "6").await;
    });
}

/// Asserts that issue, redemption, transfer and placement are each rejected, after the profile read
/// and the limit check.
async fn assert_all_rejected(
    platform: &Platform,
    user: &User,
    other: &User,
    bond: &str,
    code: &Value,
    (reason, message): (&str, &str),
) {
    let before = identity_calls(platform).await;
    let issue = paid(platform, user, code).await;
    assert_rejected(&issue, "ISSUANCE", reason, message);
    let before = assert_identity_asked(platform, before, "an issue").await;

    let redemption = redeem(platform, user, "10.00").await.expect("a result");
    assert_rejected(&redemption, "REDEMPTION", reason, message);
    let before = assert_identity_asked(platform, before, "a redemption").await;

    let transfer = json!({
        "instrumentId": bond, "fromUserId": user.id, "toUserId": other.id,
        "amount": amount(bond, "1"),
    });
    let transfer = platform
        .ok(&user.token(), "cfa.TransferCfa", transfer)
        .await;
    assert_rejected(&transfer["operation"], "P2P_TRANSFER", reason, message);
    let before = assert_identity_asked(platform, before, "a transfer").await;

    let placement = json!({
        "instrumentId": bond, "investorId": user.id, "bookbuildingId": "b",
        "amount": amount(bond, "1"),
    });
    let issuer = platform.issuer_of(bond).await;
    let placement = platform
        .ok(&issuer, "cfa.IssueInvestmentCfa", placement)
        .await;
    assert_rejected(&placement["operation"], "ISSUANCE", reason, message);
    assert_identity_asked(platform, before, "a placement").await;
}

/// Numbers of answered calls of identity: reads of a profile, and checks of a limit.
async fn identity_calls(platform: &Platform) -> [f64; 2] {
    let mut counts = [0.0; 2];
    for (count, method) in counts.iter_mut().zip(["GetUserProfile", "CheckLimits"]) {
        let method = format!("/dfa.identity.v1.IdentityService/{method}");
        let labels = [("method", method.as_str()), ("code", "ok")];
        *count = platform.metric("rpc_requests_total", &labels).await;
    }
    counts
}

/// Asserts that since `before` a profile was read (KYC) and one limit was checked; returns the new
/// counts.
async fn assert_identity_asked(platform: &Platform, before: [f64; 2], what: &str) -> [f64; 2] {
    let now = identity_calls(platform).await;
    assert!(now[0] > before[0], "{what} read no profile");
    let checks = now[1] - before[1];
    assert!(
        (checks - 1.0).abs() < f64::EPSILON,
        "{what} made {checks} checks of a limit"
    );
    now
}

// rows: R014 R110
#[test]
fn r014_a_payment_is_pending_then_success_failed_or_expired() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        for outcome in ["SUCCESS", "FAILED", "EXPIRED"] {
            for method in ["SBP_QR", "SBP_C2B", "BANK_TRANSFER"] {
                let request = json!({
                    "userId": user.id, "method": format!("PAYMENT_METHOD_{method}"), "amount": rub("11.00"),
                });
                let intent = platform
                    .ok(&user.token(), "payments.CreatePaymentIntent", request)
                    .await["intent"]
                    .clone();
                assert_eq!(
                    intent["status"],
                    json!("PAYMENT_STATUS_PENDING"),
                    "{intent}"
                );
                let pay = json!({
                    "qrPayload": text(&intent, "/paymentUrl"),
                    "outcome": format!("PAYMENT_STATUS_{outcome}"),
                });
                platform.ok(OPERATOR, "sandbox.Pay", pay).await;
                let request = json!({ "paymentId": text(&intent, "/paymentId") });
                let wanted = json!(format!("PAYMENT_STATUS_{outcome}"));
                let what = format!("{method} to be {outcome}");
                platform
                    .until(&what, "payments.GetPaymentIntent", request, |answer| {
                        answer["intent"]["status"] == wanted
                    })
                    .await;
            }
        }
        // Only the successful payments were issued.
        platform.balance_is(&user.cash(), "33.00").await;
    });
}

// rows: R015 R067 R146 R304
#[test]
fn r015_standard_and_above_may_trade_and_withdraw() {
    run(async {
        let platform = platform().await;
        let bond = platform.bond().await;
        for level in ["NONE", "SIMPLIFIED"] {
            let user = platform.user(level).await;
            let order = json!({ "order": limit_order(&user, &bond, "BUY", "10.00", "1") });
            let refusal = platform
                .refused(&user.token(), "market.PlaceOrder", order)
                .await;
            refusal.is(
                400,
                "failed_precondition",
                "KYC level too low for trading",
                "KYC_LEVEL_TOO_LOW",
            );
            let refusal = redeem(platform, &user, "10.00").await.expect_err("refused");
            refusal.is(
                400,
                "failed_precondition",
                "KYC level too low for withdrawal",
                "KYC_LEVEL_TOO_LOW",
            );
            let operations = platform
                .all(
                    AUDITOR,
                    "cfa.ListOperations",
                    "operations",
                    json!({ "userId": user.id }),
                )
                .await;
            assert!(operations.is_empty(), "{operations:?}");
            // A deposit needs no level.
            platform.deposit(&user, "10.00").await;
            platform.balance_is(&user.cash(), "10.00").await;
        }
        for level in ["STANDARD", "ENHANCED"] {
            let user = platform.user(level).await;
            platform.deposit(&user, "100.00").await;
            let order = platform.place(&user, &bond, "BUY", "10.00", "1").await;
            assert_eq!(order["status"], json!("ORDER_STATUS_OPEN"), "{order}");
            let request = json!({ "orderId": text(&order, "/orderId") });
            platform
                .ok(&user.token(), "market.CancelOrder", request)
                .await;
            platform.balance_is(&user.cash(), "100.00").await;
            let operation = redeem(platform, &user, "10.00").await.expect("accepted");
            platform
                .cfa_operation_is(&text(&operation, "/operationId"), "FINALIZED")
                .await;
        }
    });
}

#[test]
fn r016_the_payout_goes_to_the_account_of_the_profile() {
    run(async {
        let platform = platform().await;
        let user = platform.rich("50.00").await;
        let profile = platform
            .ok(
                &user.token(),
                "identity.GetUserProfile",
                json!({ "userId": user.id }),
            )
            .await;
        assert_eq!(
            profile["profile"]["kycStatus"],
            json!("KYC_STATUS_STANDARD")
        );
        let account = text(&profile, "/profile/bankAccount");
        let operation = redeem(platform, &user, "20.00").await.expect("accepted");
        platform
            .cfa_operation_is(&text(&operation, "/operationId"), "FINALIZED")
            .await;
        let request = json!({ "payoutId": text(&operation, "/externalRef") });
        let payout = platform.ok(AUDITOR, "payments.GetPayout", request).await;
        assert_eq!(text(&payout, "/payout/bankAccount"), account);
        let transfers = platform
            .all(AUDITOR, "sandbox.ListTransfers", "transfers", json!({}))
            .await;
        let id = text(&payout, "/payout/bankTransferId");
        let transfer = transfers
            .iter()
            .find(|transfer| transfer["transferId"] == json!(id))
            .expect("the bank's transfer");
        assert_eq!(text(transfer, "/recipientAccount"), account);
        assert_eq!(number(&transfer["amount"]["amount"]), number(&json!("20")));
    });
}

// rows: R318
#[test]
fn r318_initiate_payout_answers_the_stored_payout_and_again_the_same() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        let payout = json!({
            "payoutId": uuid::Uuid::now_v7().to_string(), "userId": user.id, "amount": rub("5.00"),
            "bankAccount": user.account,
        });
        let request = json!({ "payout": payout });
        let first = platform
            .ok(SERVICE, "payments.InitiatePayout", request.clone())
            .await;
        let (second, headers) = platform
            .call_with_headers(SERVICE, "payments.InitiatePayout", request)
            .await
            .expect("answered");
        for name in ["payoutId", "userId", "amount", "bankAccount"] {
            assert_eq!(first["payout"][name], payout[name], "{name}");
        }
        assert_eq!(first["payout"]["status"], json!("PAYMENT_STATUS_PENDING"));
        assert_eq!(first["payout"], second["payout"]);
        assert_eq!(
            headers
                .get("idempotent-replayed")
                .map(|value| value.as_bytes()),
            Some(&b"true"[..])
        );
        // No tokens were burned for this payout, so it must not be paid.
        let cancel = json!({ "payoutId": payout["payoutId"], "failureCode": "TEST" });
        platform.approved("payments.CancelPayout", cancel).await;
    });
}
