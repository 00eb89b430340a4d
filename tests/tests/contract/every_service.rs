//! A read and a refusal of each service give the same answer in every protocol.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::call::{AUDITOR, text};
use tests::process::PATIENCE;
use tests::shared::{platform, run};
use tests::wire::{self, Answer};
use tests::{Platform, grpc};

/// The answer as JSON, or code and text.
type Outcome = Result<Value, (i32, String)>;

fn as_json(answer: Answer) -> Outcome {
    answer.map(|message| serde_json::to_value(message).expect("JSON"))
}

/// gRPC's code UNAVAILABLE.
const UNAVAILABLE: i32 = 14;

/// Sends a request in every protocol; asserts that all answers are that of gRPC, and returns it.
///
/// Repeats all calls while one is unavailable: market answers so while its history is too old,
/// which the load of other tests can cause.
async fn same_everywhere(platform: &Platform, name: &str, request: Value) -> Outcome {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let outcomes = in_every_protocol(platform, name, &request).await;
        let unavailable = outcomes
            .iter()
            .find(|(_, outcome)| matches!(outcome, Err((UNAVAILABLE, _))));
        let Some(unavailable) = unavailable else {
            let [(_, first), others @ ..] = outcomes;
            for (protocol, outcome) in others {
                assert_eq!(outcome, first, "{name} {request} over {protocol}");
            }
            return first;
        };
        assert!(
            Instant::now() < deadline,
            "timed out: {name} {request} returned {unavailable:?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The outcome of a request by protocol, gRPC first.
async fn in_every_protocol(
    platform: &Platform,
    name: &str,
    request: &Value,
) -> [(&'static str, Outcome); 5] {
    let answers = [
        ("gRPC", grpc::unary(platform, AUDITOR, name, request).await),
        (
            "gRPC-Web",
            wire::grpc_web(platform, AUDITOR, name, request).await,
        ),
        (
            "Connect, proto",
            wire::connect_proto(platform, AUDITOR, name, request).await,
        ),
        (
            "Connect, JSON",
            wire::connect_json(platform, AUDITOR, name, request).await,
        ),
        (
            "Connect, GET",
            wire::connect_get(platform, AUDITOR, name, request).await,
        ),
    ];
    answers.map(|(protocol, answer)| (protocol, as_json(answer)))
}

// rows: R001
#[test]
fn r001_a_read_of_each_service_answers_the_same_in_every_protocol() {
    run(async {
        let platform = platform().await;
        // Nothing changes the objects of this test while they are read.
        let (user, bond) = (platform.trader().await, platform.bond().await);
        let payment = platform.deposit(&user, "100.00").await;
        let buyer = platform.rich("100.00").await;
        let order = platform.place(&buyer, &bond, "BUY", "10.00", "1").await;
        let order = text(&order, "/orderId");
        let request = json!({ "userId": user.id, "externalRef": payment });
        let operations = platform.ok(AUDITOR, "cfa.ListOperations", request).await;
        let hash = text(&operations, "/operations/0/onchainTxHash");
        let owned = user.cash();
        for (name, field, id, pointer) in [
            (
                "ledger.GetSubAccount",
                "subaccountId",
                &owned,
                "/subaccount/subaccountId",
            ),
            (
                "cfa.GetInstrument",
                "instrumentId",
                &bond,
                "/instrument/instrumentId",
            ),
            (
                "payments.GetPaymentIntent",
                "paymentId",
                &payment,
                "/intent/paymentId",
            ),
            ("market.GetOrder", "orderId", &order, "/order/orderId"),
            (
                "identity.GetUserProfile",
                "userId",
                &user.id,
                "/profile/userId",
            ),
            (
                "chain.GetTransactionReceipt",
                "txHash",
                &hash,
                "/receipt/txHash",
            ),
        ] {
            let answer = same_everywhere(platform, name, json!({ field: id })).await;
            let answer = answer.unwrap_or_else(|refusal| panic!("{name}: {refusal:?}"));
            assert_eq!(&text(&answer, pointer), id, "{name}: {answer}");
        }
    });
}

// rows: R001 R339
#[test]
fn r001_a_refusal_of_each_service_is_the_same_in_every_protocol() {
    run(async {
        let platform = platform().await;
        let unknown = uuid::Uuid::now_v7().to_string();
        let block = u32::MAX.to_string();
        for (name, field, id, message) in [
            (
                "ledger.GetSubAccount",
                "subaccountId",
                &unknown,
                "Sub-account not found",
            ),
            (
                "cfa.GetInstrument",
                "instrumentId",
                &unknown,
                "Instrument not found",
            ),
            (
                "payments.GetPaymentIntent",
                "paymentId",
                &unknown,
                "Payment intent not found",
            ),
            ("market.GetOrder", "orderId", &unknown, "Order not found"),
            (
                "identity.GetUserProfile",
                "userId",
                &unknown,
                "User not found",
            ),
            ("chain.GetBlock", "number", &block, "Block not found"),
        ] {
            let answer = same_everywhere(platform, name, json!({ field: id })).await;
            assert_eq!(answer, Err((5, message.to_owned())), "{name}");
        }
    });
}
