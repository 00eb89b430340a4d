//! The context of a call: ids and idempotency keys, in the events and log lines that the call
//! causes.

use std::collections::BTreeSet;

use prost::Message;
use proto::common::v1::RequestContext;
use serde_json::{Value, json};
use tests::Platform;
use tests::call::{OPERATOR, SERVICE, context_with_key, text};
use tests::log::Events;
use tests::shared::{platform, run};
use tests::world::rub;

/// Decodes the context of any event.
#[derive(Clone, PartialEq, Message)]
struct OnlyContext {
    #[prost(message, optional, tag = "1")]
    context: Option<RequestContext>,
}

// rows: R004 R006 R018 R023
#[test]
fn r004_one_correlation_id_goes_through_events_and_logs() {
    run(async {
        let platform = platform().await;
        let mut events = Events::open(platform).await;
        let user = platform.trader().await;
        let correlation = format!("correlation-{}", uuid::Uuid::now_v7());
        let request = json!({
            "context": { "requestId": "r-1", "correlationId": correlation, "idempotencyKey": "k-1" },
            "userId": user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("25.00"),
        });
        let intent = platform
            .ok(&user.token(), "payments.CreatePaymentIntent", request)
            .await["intent"]
            .clone();
        platform.pay(&intent).await;
        platform.balance_is(&user.cash(), "25.00").await;

        let caused = events
            .until(
                &[
                    "PaymentIntentCreatedEvent",
                    "FiatDepositedEvent",
                    "CfaIssuedEvent",
                    "OperationCreatedEvent",
                    "BalanceUpdatedEvent",
                ],
                |event| event.correlation_id == correlation,
            )
            .await;
        for event in &caused {
            let seen = OnlyContext::decode(&*event.payload)
                .expect("field 1 alone is enough to decode an event");
            let context = seen
                .context
                .unwrap_or_else(|| panic!("{} has no context", event.type_name));
            assert_eq!(context.correlation_id, correlation, "{}", event.type_name);
            assert!(event.topic.ends_with(".v1"), "{}", event.topic);
        }
        // The type name is the full name of the message. The id of the rouble token is CFA-RUB.
        let issued = caused
            .iter()
            .find(|event| event.type_name == "dfa.cfa.v1.CfaIssuedEvent")
            .expect("full name");
        let issued =
            proto::cfa::v1::CfaIssuedEvent::decode(&*issued.payload).expect("CfaIssuedEvent");
        assert_eq!(
            (issued.instrument_id.as_str(), issued.holder_id.as_str()),
            ("CFA-RUB", user.id.as_str())
        );
        events.close().await;

        // A deposit reaches cfa by an event; a redemption reaches the ledger by a call.
        until_logged_by(platform, &correlation, &["payments", "identity", "cfa"]).await;
        let correlation = format!("correlation-{}", uuid::Uuid::now_v7());
        let mut context = context_with_key("k-2");
        context["correlationId"] = json!(correlation);
        let redeem = json!({ "context": context, "userId": user.id, "amount": rub("5.00"),
            "payoutId": uuid::Uuid::now_v7().to_string() });
        platform.ok(&user.token(), "cfa.RedeemCfaRub", redeem).await;
        let services = ["cfa", "identity", "ledger", "payments"];
        until_logged_by(platform, &correlation, &services).await;
    });
}

/// Waits until each service has logged a line with the correlation id.
async fn until_logged_by(platform: &Platform, correlation: &str, services: &[&str]) {
    let missing = |lines: &[Value]| -> Vec<String> {
        let own = lines
            .iter()
            .filter(|line| line["correlation_id"] == json!(correlation));
        let own: BTreeSet<&str> = own
            .filter_map(|line| line["service_name"].as_str())
            .collect();
        let missing = services.iter().filter(|service| !own.contains(*service));
        missing.map(|service| (*service).to_owned()).collect()
    };
    let what = format!("lines of {services:?} with the correlation id {correlation}");
    platform
        .until_logged(&what, |lines| missing(lines).is_empty())
        .await;
}

#[test]
fn r018_every_topic_has_its_version() {
    run(async {
        let platform = platform().await;
        for topic in events::topics::ALL {
            assert!(
                topic.starts_with("platform.") && topic.ends_with(".events.v1"),
                "{topic}"
            );
        }
        let user = platform.rich("10.00").await;
        let mut events = Events::open(platform).await;
        events
            .until(&["UserCreatedEvent", "CfaIssuedEvent"], |event| {
                event
                    .payload
                    .windows(user.id.len())
                    .any(|at| at == user.id.as_bytes())
            })
            .await;
        for event in &events.seen {
            assert!(
                events::topics::ALL.contains(&event.topic.as_str()),
                "{}",
                event.topic
            );
        }
        events.close().await;
    });
}

#[test]
fn r005_a_key_makes_issue_and_redemption_act_once() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        // The payment's event issued the money under the payment id as the key.
        let payment = platform.deposit(&user, "70.00").await;
        let issue = json!({
            "context": context_with_key(&payment), "userId": user.id, "amount": rub("70.00"),
            "paymentId": payment,
        });
        let first = platform.ok(SERVICE, "cfa.IssueCfaRub", issue.clone()).await;
        platform.balance_is(&user.cash(), "70.00").await;
        let (second, headers) = platform
            .call_with_headers(SERVICE, "cfa.IssueCfaRub", issue)
            .await
            .expect("answered");
        assert_eq!(
            text(&first, "/operation/operationId"),
            text(&second, "/operation/operationId")
        );
        assert_eq!(
            headers
                .get("idempotent-replayed")
                .map(|value| value.as_bytes()),
            Some(&b"true"[..])
        );
        platform.balance_is(&user.cash(), "70.00").await;

        // Only money that came through the bank can be paid out through it.
        let user = platform.rich("70.00").await;
        let payout = uuid::Uuid::now_v7().to_string();
        let redeem = json!({
            "context": context_with_key(&payout), "userId": user.id, "amount": rub("30.00"),
            "payoutId": payout,
        });
        let first = platform
            .ok(&user.token(), "cfa.RedeemCfaRub", redeem.clone())
            .await;
        let second = platform.ok(&user.token(), "cfa.RedeemCfaRub", redeem).await;
        let id = text(&first, "/operation/operationId");
        assert_eq!(id, text(&second, "/operation/operationId"));
        platform.cfa_operation_is(&id, "FINALIZED").await;
        platform.balance_is(&user.cash(), "40.00").await;
        let request = json!({ "userId": user.id });
        let payouts = platform
            .all(OPERATOR, "payments.ListPayouts", "payouts", request)
            .await;
        assert_eq!(payouts.len(), 1, "{payouts:?}");
    });
}

// rows: R005
#[test]
fn r005_a_repeated_submission_gets_the_first_hash_and_is_marked() {
    run(async {
        let platform = platform().await;
        let key = uuid::Uuid::now_v7().to_string();
        // Other content under the key gets the stored answer as well (D50).
        for (account, is_repeat) in [("11", false), ("11", true), ("22", true)] {
            // `setAddressFrozen(0, false)` of an account without code.
            let submit = json!({
                "context": context_with_key(&key),
                "payload": {
                    "to": format!("0x{}", account.repeat(20)),
                    "data": format!("0xc69c09cf{}", "00".repeat(64)),
                },
            });
            let answered = platform.call_with_headers(SERVICE, "chain.SubmitTransaction", submit);
            let (answer, headers) = answered.await.expect("answered");
            let request = json!({ "txHash": text(&answer, "/txHash") });
            let to = json!(format!("0x{}", "11".repeat(20)));
            let is_first = |found: &Value| found["receipt"]["to"] == to;
            let name = "chain.GetTransactionReceipt";
            platform.until("the call", name, request, is_first).await;
            assert_eq!(headers.contains_key("idempotent-replayed"), is_repeat);
        }
    });
}

// rows: R005
#[test]
fn r005_the_same_payment_never_issues_twice_whatever_the_key() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        let payment = platform.deposit(&user, "15.00").await;
        let again = json!({ "userId": user.id, "amount": rub("15.00"), "paymentId": payment });
        // The stored operation and a refusal are both correct answers.
        let answer = platform.call(SERVICE, "cfa.IssueCfaRub", again).await;
        let request = json!({ "userId": user.id, "externalRef": payment });
        let operations = platform
            .all(OPERATOR, "cfa.ListOperations", "operations", request)
            .await;
        assert_eq!(operations.len(), 1, "{answer:?}");
        platform.balance_is(&user.cash(), "15.00").await;
    });
}
