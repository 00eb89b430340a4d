//! Follows a deposit by its correlation id, and checks the log lines of every service.

use prost::Message;
use proto::cfa::v1::CfaIssuedEvent;
use proto::chain::v1::{ReceiptStatus, TransactionReceiptReadyEvent};
use proto::ledger::v1::{BalanceUpdatedEvent, OperationCreatedEvent};
use proto::payments::v1::FiatDepositedEvent;
use serde_json::{Value, json};
use tests::Platform;
use tests::call::{AUDITOR, OPERATOR, number, text};
use tests::log::Events;
use tests::shared::{platform, run};
use tests::world::{User, rub};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::values::rpc;

/// `keccak256("Transfer(address,address,uint256)")`.
const TRANSFER: &str = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef";

/// Finds request, payment, webhook, FiatDeposited, mint and ledger credit by one id. Needs a
/// platform of its own, since it counts the webhooks.
// rows: R136 R260
#[test]
fn r136_r260_a_deposit_is_followed_from_the_request_over_the_chain_to_the_ledger() {
    run(async {
        let platform = Platform::start().await;
        let mut events = Events::open(&platform).await;
        let user = platform.trader().await;
        let id = format!("deposit-{}", uuid::Uuid::now_v7());
        let payment = paid(&platform, &user, &id).await;
        notified(&platform, &payment).await;

        let wanted = ["PaymentIntentCreatedEvent", "FiatDepositedEvent"];
        let seen = events.until(&wanted, |event| event.correlation_id == id);
        let deposited: FiatDepositedEvent = decoded(&seen.await, "FiatDepositedEvent");
        assert_eq!(
            (&deposited.payment_id, &deposited.user_id),
            (&payment, &user.id)
        );
        let tx_hash = minted(&platform, &mut events, &user, &id).await;
        credited(&platform, &mut events, &user, &id, &tx_hash).await;
        events.close().await;

        // Each service that acts on the request or on one of its events logs the id.
        for (service, message) in [
            ("payments", "payment intent changed status"),
            ("identity", "limit checked"),
            ("cfa", "deposit handled"),
        ] {
            let is_line = |line: &Value| {
                line["correlation_id"] == json!(id)
                    && line["message"] == json!(message)
                    && line["service_name"] == json!(service)
            };
            let what = format!("line `{message}` of {service} for {id}");
            platform
                .until_logged(&what, |lines| lines.iter().any(is_line))
                .await;
        }
    });
}

/// Requests a payment link under the id and pays it at the bank; returns the payment id.
async fn paid(platform: &Platform, user: &User, id: &str) -> String {
    let request = json!({
        "context": { "requestId": "r-1", "correlationId": id, "idempotencyKey": "k-1" },
        "userId": user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("25.00"),
    });
    let token = user.token();
    let intent = platform.ok(&token, "payments.CreatePaymentIntent", request);
    let intent = intent.await["intent"].clone();
    assert_eq!(intent["status"], json!("PAYMENT_STATUS_PENDING"));
    let balance = async || {
        let answer = platform.ok(AUDITOR, "sandbox.GetBankBalance", json!({}));
        number(&answer.await["balance"]["amount"])
    };
    let before = balance().await;
    let pay = json!({ "qrPayload": text(&intent, "/qrPayload") });
    let paid = platform.ok(OPERATOR, "sandbox.Pay", pay).await;
    assert_eq!(paid["status"], json!("PAYMENT_STATUS_SUCCESS"), "{paid}");
    let after = before.checked_add(number(&json!("25"))).expect("a sum");
    assert_eq!(balance().await, after);
    text(&intent, "/paymentId")
}

/// Waits until the bank's webhook has arrived and the payment is successful.
async fn notified(platform: &Platform, payment: &str) {
    let request = json!({ "paymentId": payment });
    let what = "the payment to be successful";
    platform
        .until(what, "payments.GetPaymentIntent", request, |answer| {
            answer["intent"]["status"] == json!("PAYMENT_STATUS_SUCCESS")
        })
        .await;
    // A poll may see the payment before its webhook arrives.
    let deadline = std::time::Instant::now() + tests::process::PATIENCE;
    let labels = [("status", "SUCCESS")];
    while platform
        .metric("payment_webhooks_received_total", &labels)
        .await
        < 1.0
    {
        assert!(std::time::Instant::now() < deadline, "no webhook arrived");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Follows the id to the chain transaction that mints to the holder; returns its hash.
async fn minted(platform: &Platform, events: &mut Events, user: &User, id: &str) -> String {
    let seen = events.until(&["CfaIssuedEvent"], |event| event.correlation_id == id);
    let issued: CfaIssuedEvent = decoded(&seen.await, "CfaIssuedEvent");
    assert_eq!(issued.holder_id, user.id);
    let receipt_of = |event: &events::Event| {
        let is_receipt = event.type_name.ends_with("TransactionReceiptReadyEvent");
        let receipt = || TransactionReceiptReadyEvent::decode(&*event.payload).expect("a receipt");
        is_receipt
            .then(receipt)
            .filter(|one| one.tx_hash == issued.tx_hash)
    };
    let seen = events
        .until(&["TransactionReceiptReadyEvent"], |event| {
            receipt_of(event).is_some()
        })
        .await;
    let receipt = receipt_of(&seen[0]).expect("picked");
    assert_eq!(receipt.status(), ReceiptStatus::Success);

    let request = json!({ "instrumentId": "CFA-RUB" });
    let holders = platform.all(AUDITOR, "cfa.ListHolders", "holders", request);
    let holders = holders.await;
    let holder = holders
        .iter()
        .find(|holder| holder["userId"] == json!(user.id))
        .expect("a holder on chain");
    let address = text(holder, "/address").to_ascii_lowercase();
    let receipt = rpc(
        platform,
        "eth_getTransactionReceipt",
        json!([issued.tx_hash]),
    )
    .await;
    let topics = json!([
        TRANSFER,
        format!("0x{:0>64}", ""),
        format!("0x{:0>64}", address.trim_start_matches("0x")),
    ]);
    // In kopecks.
    let amount = json!(format!("0x{:064x}", 2_500));
    let mut logs = receipt["logs"].as_array().expect("logs").iter();
    assert!(
        logs.any(|log| log["topics"] == topics && log["data"] == amount),
        "no mint of 25.00 to {address}: {receipt}"
    );
    issued.tx_hash
}

/// Follows the id to the ledger operation that credits the user and names the transaction.
async fn credited(platform: &Platform, events: &mut Events, user: &User, id: &str, tx_hash: &str) {
    let balance_of = |event: &events::Event| {
        let is_balance = event.type_name.ends_with("BalanceUpdatedEvent");
        let balance = || BalanceUpdatedEvent::decode(&*event.payload).expect("a balance");
        let balance = (is_balance && event.correlation_id == id).then(balance);
        balance.filter(|one| one.subaccount_id == user.cash())
    };
    let seen = events
        .until(&["BalanceUpdatedEvent"], |event| {
            balance_of(event).is_some()
        })
        .await;
    let operation_id = balance_of(&seen[0]).expect("picked").operation_id;
    let wanted = ["OperationCreatedEvent"];
    let seen = events.until(&wanted, |event| event.correlation_id == id);
    let created: OperationCreatedEvent = decoded(&seen.await, "OperationCreatedEvent");
    assert_eq!(created.operation_id, operation_id);

    let request = json!({ "operationId": operation_id });
    let read = platform.ok(AUDITOR, "ledger.GetOperation", request).await;
    assert_eq!(text(&read, "/operation/onchainTxHash"), tx_hash, "{read}");
    let postings = read["postings"].as_array().expect("postings");
    let credit = postings
        .iter()
        .find(|posting| posting["creditSubaccountId"] == json!(user.cash()))
        .expect("a credit of the user");
    assert_eq!(number(&credit["amount"]["amount"]), number(&json!("25")));
    platform.balance_is(&user.cash(), "25.00").await;
}

/// Decodes the first event with this name.
fn decoded<M: Message + Default>(events: &[events::Event], name: &str) -> M {
    let mut events = events.iter();
    let event = events.find(|event| event.type_name.ends_with(name));
    M::decode(&*event.expect("waited for").payload).expect(name)
}

/// Finds one call to each service in the log by an id of its own, and checks the form of every
/// line.
// rows: R259
#[test]
fn r259_the_lines_of_every_service_are_json_with_ids_name_and_level() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        let run = uuid::Uuid::now_v7();
        let reads = [
            ("ledger", "ledger.GetTrialBalance"),
            ("cfa", "cfa.ListInstruments"),
            ("payments", "payments.ListPayouts"),
            ("market", "market.ListTrades"),
            ("identity", "identity.ListUsers"),
            ("approvals", "approvals.ListApprovals"),
            ("chain", "chain.GetBlock"),
            ("sandbox", "sandbox.GetBankBalance"),
        ];
        for (service, read) in reads {
            let context = json!({
                "requestId": "r-1", "correlationId": format!("{service}-{run}"),
                "traceId": format!("trace-{service}-{run}"), "userId": user.id,
            });
            let request = json!({ "context": context });
            platform.ok(AUDITOR, read, request).await;
        }
        // A context without a user id: the line names the caller's own.
        let context = json!({ "requestId": "r-1", "correlationId": format!("own-{run}") });
        let request = json!({ "context": context, "userId": user.id });
        platform
            .ok(&user.token(), "payments.ListPayouts", request)
            .await;
        let own = format!("own-{run}");
        let lines = platform
            .until_logged("line of the last call", |lines| {
                lines
                    .iter()
                    .any(|line| line["correlation_id"] == json!(own))
            })
            .await;

        let own = ("own", "payments.ListPayouts");
        for (service, read) in reads.into_iter().chain([own]) {
            let id = json!(format!("{service}-{run}"));
            let mut calls = lines.iter();
            let call = calls.find(|line| line["correlation_id"] == id && is_call(line));
            let call = call.unwrap_or_else(|| panic!("no line of the call to {service}"));
            assert_eq!(call["level"], json!("INFO"), "{call}");
            assert_eq!(call["user_id"], json!(user.id), "{call}");
            let (method, (_, name)) = (&call["method"], read.split_once('.').expect("a method"));
            let is_named = method.as_str().is_some_and(|method| method.ends_with(name));
            assert!(is_named, "{read}: {call}");
            if service != "own" {
                assert_eq!(call["service_name"], json!(service), "{call}");
                assert_eq!(call["trace_id"], json!(format!("trace-{service}-{run}")));
            }
        }
        lines.iter().for_each(assert_well_formed);
    });
}

/// True for the line of a successful call.
fn is_call(line: &Value) -> bool {
    line["message"] == json!("call") && line["code"] == json!("ok")
}

/// Asserts the fields of every line, and the ids in the line of a call.
fn assert_well_formed(line: &Value) {
    let of = |name: &str| line[name].as_str().unwrap_or_default();
    assert!(
        OffsetDateTime::parse(of("timestamp"), &Rfc3339).is_ok(),
        "{line}"
    );
    let level = of("level");
    assert!(["INFO", "WARN", "ERROR"].contains(&level), "{line}");
    assert!(!of("service_name").is_empty(), "{line}");
    assert!(
        !of("target").is_empty() && !of("message").is_empty(),
        "{line}"
    );
    if is_call(line) {
        let ids = [of("correlation_id"), of("trace_id")];
        assert!(ids.iter().all(|id| !id.is_empty()), "{line}");
    }
}
