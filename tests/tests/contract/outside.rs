//! Interfaces to outside systems: signatures of chain and bank, alert receivers, requested
//! finalization.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, TREASURY, text};
use tests::shared::{platform, run};
use tests::world::rub;
use tests::{Platform, bank};

use crate::values::rpc;

// rows: R020 R327
#[test]
fn r020_transactions_are_signed_for_the_configured_chain() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        let payment = platform.deposit(&user, "12.00").await;
        let request = json!({ "userId": user.id, "externalRef": payment });
        let operation =
            platform.ok(AUDITOR, "cfa.ListOperations", request).await["operations"][0].clone();
        let hash = text(&operation, "/onchainTxHash");
        let transaction = rpc(platform, "eth_getTransactionByHash", json!([hash])).await;
        let chain_id = rpc(platform, "eth_chainId", json!([])).await;
        assert_eq!(transaction["chainId"], chain_id, "{transaction}");
        let config = platform.cli(&["--json", "config"]).await.success().json();
        let configured = config["chain"]["chain_id"].as_u64().expect("a number");
        assert_eq!(chain_id, json!(format!("0x{configured:x}")));
        // The transaction has one signer and is in a block.
        assert!(
            transaction["from"]
                .as_str()
                .is_some_and(|from| from.len() == 42),
            "{transaction}"
        );
        assert!(
            transaction["r"].is_string() && transaction["s"].is_string(),
            "{transaction}"
        );
        let receipt = platform
            .ok(
                AUDITOR,
                "chain.GetTransactionReceipt",
                json!({ "txHash": hash }),
            )
            .await;
        assert_eq!(
            receipt["receipt"]["status"],
            json!("RECEIPT_STATUS_SUCCESS"),
            "{receipt}"
        );
        // `chain/tests/signed.rs` decodes the raw transaction and recovers its sender.
        for field in ["from", "to"] {
            let of_receipt = text(&receipt, &format!("/receipt/{field}"));
            let of_transaction = text(&transaction, &format!("/{field}"));
            assert_eq!(
                of_transaction.to_lowercase(),
                of_receipt.to_lowercase(),
                "{field}"
            );
        }

        // D42: an operator can request the finalization. For a final operation it changes nothing.
        let again = platform
            .ok(OPERATOR, "cfa.FinalizeIssuance", json!({ "txHash": hash }))
            .await;
        assert_eq!(again["operation"]["operationId"], operation["operationId"]);
        assert_eq!(
            again["operation"]["status"],
            json!("OPERATION_STATUS_FINALIZED")
        );
        platform.balance_is(&user.cash(), "12.00").await;
    });
}

#[test]
fn r327_finalization_is_an_operators_call() {
    run(async {
        let platform = platform().await;
        let unknown = json!({ "txHash": format!("0x{}", "0".repeat(64)) });
        let refusal = platform
            .refused(OPERATOR, "cfa.FinalizeIssuance", unknown.clone())
            .await;
        refusal.is(
            404,
            "not_found",
            "Operation not found",
            "OPERATION_NOT_FOUND",
        );
        let refusal = platform
            .refused(
                OPERATOR,
                "cfa.FinalizeRedemption",
                json!({ "payoutId": "no-such-payout" }),
            )
            .await;
        refusal.is(
            404,
            "not_found",
            "Operation not found",
            "OPERATION_NOT_FOUND",
        );
        let user = platform.rich("20.00").await;
        for token in [user.token().as_str(), AUDITOR] {
            let refusal = platform
                .refused(token, "cfa.FinalizeIssuance", unknown.clone())
                .await;
            refusal.is(
                403,
                "permission_denied",
                "Caller lacks the role for this operation",
                "ROLE_REQUIRED",
            );
        }
        let payout = uuid::Uuid::now_v7().to_string();
        let redeem = json!({ "userId": user.id, "payoutId": payout, "amount": rub("5.00") });
        let operation = platform.ok(&user.token(), "cfa.RedeemCfaRub", redeem).await;
        let id = text(&operation, "/operation/operationId");
        platform.cfa_operation_is(&id, "FINALIZED").await;
        let again = platform
            .ok(
                OPERATOR,
                "cfa.FinalizeRedemption",
                json!({ "payoutId": payout }),
            )
            .await;
        assert_eq!(
            (
                text(&again, "/operation/operationId"),
                &again["operation"]["status"]
            ),
            (id, &json!("OPERATION_STATUS_FINALIZED"))
        );
        platform.balance_is(&user.cash(), "15.00").await;
    });
}

#[test]
fn r021_the_bank_takes_only_signed_requests() {
    run(async {
        let platform = platform().await;
        let http = tests::process::client();
        let url = format!("{}/sbp/v1/balance", platform.url("bank"));
        let unsigned = http.get(&url).send().await.expect("an answer");
        assert_eq!(unsigned.status().as_u16(), 401);
        let forged = http
            .get(&url)
            .header("x-key-id", "0123456789abcdef")
            .header("x-timestamp", bank::now_s().to_string())
            .header("x-signature", "AAAA")
            .send()
            .await
            .expect("an answer");
        assert_eq!(forged.status().as_u16(), 401);
        let transfer = json!({
            "requestId": "r", "accountNumber": "a", "recipientAccount": "b",
            "amount": { "value": "1.00", "currency": "RUB" }, "purpose": "p",
        });
        let before = platform
            .ok(AUDITOR, "sandbox.GetBankBalance", json!({}))
            .await;
        let unsigned = http
            .post(format!("{}/bank/v1/transfers", platform.url("bank")))
            .json(&transfer)
            .send()
            .await;
        assert_eq!(unsigned.expect("an answer").status().as_u16(), 401);
        let transfers = platform
            .all(AUDITOR, "sandbox.ListTransfers", "transfers", json!({}))
            .await;
        assert!(
            transfers
                .iter()
                .all(|one| one["recipientAccount"] != json!("b")),
            "{before}"
        );
        // The platform signs its own requests, so this intent reaches the bank.
        platform.intent(&platform.trader().await, "1.00").await;
    });
}

// rows: R022
#[test]
fn r022_alerts_go_to_the_receiver_of_the_environment_or_to_the_log() {
    run(async {
        let received: Arc<Mutex<Vec<Value>>> = Arc::default();
        let double = Router::new()
            .route(
                "/hook",
                post(
                    async |State(all): State<Arc<Mutex<Vec<Value>>>>, body: axum::Json<Value>| {
                        all.lock().expect("a lock").push(body.0)
                    },
                ),
            )
            .with_state(received.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let hook = format!("http://{}/hook", listener.local_addr().expect("an address"));
        tokio::spawn(async move { axum::serve(listener, double).await });

        let mut platform = Platform::start_with(&[("SLACK_WEBHOOK_URL", &hook)]).await;
        unbalance(&platform).await;
        let deadline = std::time::Instant::now() + tests::process::PATIENCE;
        while received.lock().expect("a lock").is_empty() {
            assert!(std::time::Instant::now() < deadline, "no alert received");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let alert = received.lock().expect("a lock")[0].to_string();
        assert!(alert.contains("CRITICAL"), "{alert}");
        platform.stop().await;

        // Without a receiver the alert goes to the log. The receiver's address is never stored.
        platform.restart().await;
        let count = received.lock().expect("a lock").len();
        let report = platform
            .ok(
                TREASURY,
                "payments.Reconcile",
                json!({ "businessDate": "2026-01-01T00:00:00Z" }),
            )
            .await;
        let id = text(&report, "/report/reportId");
        let is_alert = |line: &Value| {
            line["report_id"] == json!(id)
                && line["level"] == json!("ERROR")
                && line["service_name"] == json!("payments")
                && line["severity"] == json!("critical")
        };
        platform
            .until_logged("critical line of the report", |lines| {
                lines.iter().any(is_alert)
            })
            .await;
        platform.stop().await;
        assert_eq!(received.lock().expect("a lock").len(), count);
        assert!(
            !platform.log().contains(&hook),
            "the log contains the secret address {hook}"
        );
    });
}

/// Issues tokens for money that a signed webhook reports and the bank does not have. Runs the
/// reconciliation that detects the difference.
async fn unbalance(platform: &Platform) {
    let user = platform.trader().await;
    let intent = platform.intent(&user, "1.00").await;
    let notice = bank::notice(&text(&intent, "/paymentId"), "SUCCESS", "1.00");
    let webhook = platform.signed(&notice, bank::now_s());
    platform.post_webhook(&webhook).await.expect("accepted");
    platform.balance_is(&user.cash(), "1.00").await;
    let report = platform
        .ok(
            TREASURY,
            "payments.Reconcile",
            json!({ "businessDate": "2026-01-01T00:00:00Z" }),
        )
        .await;
    assert_eq!(
        report["report"]["notes"],
        json!("Discrepancy detected"),
        "{report}"
    );
}

// rows: R120
/// Needs a platform of its own, since its bank does not have the money.
#[test]
fn d51_a_second_payment_of_a_code_is_listed_and_assigned_by_two_persons() {
    run(async {
        let mut platform = Platform::start().await;
        let user = platform.trader().await;
        let intent = platform.intent(&user, "10.00").await;
        let payment = text(&intent, "/paymentId");
        for transaction in ["first", "second"] {
            let mut notice = bank::notice(&payment, "SUCCESS", "10.00");
            notice["transactionId"] = json!(transaction);
            let webhook = platform.signed(&notice, bank::now_s());
            platform.post_webhook(&webhook).await.expect("accepted");
        }
        platform.balance_is(&user.cash(), "10.00").await;
        let request = json!({ "status": "RECEIPT_STATUS_UNMATCHED" });
        let listed = platform
            .ok(TREASURY, "payments.ListReceipts", request)
            .await;
        let receipts = listed["receipts"].as_array().cloned().unwrap_or_default();
        assert_eq!(receipts.len(), 1, "{listed}");
        assert_eq!(text(&receipts[0], "/transactionId"), "second");
        assert_eq!(text(&receipts[0], "/paymentId"), payment);
        assert_eq!(
            text(&receipts[0], "/reason"),
            "UNMATCHED_REASON_SECOND_PAYMENT"
        );
        assert_eq!(receipts[0]["amount"], rub("10.00"));
        // One person does not assign it. By two it is a deposit of the user.
        let assign = json!({
            "receiptId": text(&receipts[0], "/receiptId"), "userId": user.id, "reason": "letter 7",
        });
        let alone = platform.refused(TREASURY, "payments.AssignReceipt", assign.clone());
        assert_eq!(alone.await.reason, "APPROVAL_REQUIRED");
        let approval = platform.approved("payments.AssignReceipt", assign).await;
        platform.balance_is(&user.cash(), "20.00").await;
        let request = json!({ "objectId": text(&receipts[0], "/receiptId") });
        let listed = platform
            .ok(AUDITOR, "payments.ListAuditRecords", request)
            .await;
        let actor = format!(
            "anna, approved by boris (approval {})",
            text(&approval, "/approvalId")
        );
        assert_eq!(text(&listed, "/records/0/actor"), actor);
        platform.stop().await;
    });
}
