//! A read and a refusal of each service give the same answer in every protocol.

use serde_json::{Value, json};
use tests::call::{AUDITOR, text};
use tests::shared::{platform, run};
use tests::wire::{self, Answer};
use tests::{Platform, grpc};

/// The answer as JSON, or code and text.
type Told = Result<Value, (i32, String)>;

fn told(answer: Answer) -> Told {
    answer.map(|message| serde_json::to_value(message).expect("JSON"))
}

/// Sends a request in every protocol; asserts that all answers are that of gRPC, and returns it.
async fn same_everywhere(platform: &Platform, name: &str, request: Value) -> Told {
    let answers = [
        (
            "gRPC-Web",
            wire::grpc_web(platform, AUDITOR, name, &request).await,
        ),
        (
            "Connect, proto",
            wire::connect_proto(platform, AUDITOR, name, &request).await,
        ),
        (
            "Connect, JSON",
            wire::connect_json(platform, AUDITOR, name, &request).await,
        ),
        (
            "Connect, GET",
            wire::connect_get(platform, AUDITOR, name, &request).await,
        ),
    ];
    let first = told(grpc::unary(platform, AUDITOR, name, &request).await);
    for (protocol, answer) in answers {
        assert_eq!(told(answer), first, "{name} {request} over {protocol}");
    }
    first
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
