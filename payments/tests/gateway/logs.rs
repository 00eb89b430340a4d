//! The log of the gateway and the services around it.

use std::collections::BTreeSet;

use proto::{
    common::v1::PaymentStatus,
    payments::v1::{self as wire, PaymentMethod},
};
use serde_json::Value;

use crate::lines::Lines;
use crate::world::{ALICE, World, ctx_with, intent_ask, payment_notice, rub, valid_account};

/// Services and stubs of a world, and `platform` for lines of no service.
const SERVICES: [&str; 8] = [
    "payments", "identity", "sandbox", "bank", "cfa", "chain", "rpc", "platform",
];

fn field<'a>(line: &'a Value, name: &str) -> &'a str {
    let text = line[name].as_str().filter(|text| !text.is_empty());
    text.unwrap_or_else(|| panic!("no {name}: {line}"))
}

fn services(lines: &[Value]) -> BTreeSet<&str> {
    let names = lines.iter().map(|line| field(line, "service_name"));
    names.collect()
}

/// The line with this message; panics unless there is exactly one.
fn single_line<'a>(lines: &'a [Value], message: &str) -> &'a Value {
    let mut found = lines.iter().filter(|line| line["message"] == message);
    let line = found
        .next()
        .unwrap_or_else(|| panic!("no {message}: {lines:#?}"));
    assert!(found.next().is_none(), "twice {message}: {lines:#?}");
    line
}

/// A deposit and a payout, each under its correlation id, and two refusals.
async fn work(world: &World) {
    let mut ask = intent_ask(ALICE, "100.00", PaymentMethod::SbpQr);
    ask.context = ctx_with("deposit");
    let made = world.payments().create_payment_intent(ask).await.unwrap();
    let intent = made.into_inner().intent.unwrap();
    world.pay(&intent.qr_payload).await;
    let success = PaymentStatus::Success;
    world.until_status(&intent.payment_id, success).await;

    let ask = wire::InitiatePayoutRequest {
        context: ctx_with("payout"),
        payout: Some(wire::PayoutRequest {
            payout_id: "po-1".into(),
            user_id: ALICE.into(),
            amount: rub("40.00"),
            bank_account: valid_account(),
        }),
    };
    world.set_account(ALICE, &valid_account()).await;
    world.services().initiate_payout(ask).await.unwrap();
    world.release("po-1").await;
    world.until_payout("po-1", success).await;

    let notice = payment_notice(&intent.payment_id, "FAILED", "100.00");
    let (status, _) = world.post_signed("forged", 1, "v1,AAAA", &notice).await;
    assert_eq!(status, 401);
    let mut stranger = world.payments_as("sandbox.investor.bob");
    let ask = intent_ask(ALICE, "1.00", PaymentMethod::SbpQr);
    stranger.create_payment_intent(ask).await.unwrap_err();
}

// rows: R259 R260
#[tokio::test]
async fn r260_a_correlation_id_leads_through_the_log_of_every_service() {
    let lines = Lines::record();
    let world = World::start().await;
    work(&world).await;
    world.stop().await;

    let all = lines.all();
    for line in &all {
        let time = field(line, "timestamp").parse::<prost_types::Timestamp>();
        assert!(time.is_ok(), "{line}");
        let level = field(line, "level");
        assert!(["INFO", "WARN", "ERROR"].contains(&level), "{line}");
        let service = field(line, "service_name");
        assert!(SERVICES.contains(&service), "{line}");
        field(line, "message");
    }
    let seen = services(&all);
    for service in ["payments", "identity", "sandbox"] {
        assert!(seen.contains(service), "{service} is not among {seen:?}");
    }

    let deposit = lines.with("correlation_id", "corr-deposit");
    assert_eq!(services(&deposit), BTreeSet::from(["payments", "identity"]));
    let checked = single_line(&deposit, "limit checked");
    assert_eq!(checked["service_name"], "identity");
    single_line(&deposit, "payment intent created");
    // The handler of the bank's webhook writes this line, which is no RPC.
    let paid = single_line(&deposit, "payment intent changed status");
    assert_eq!(paid["service_name"], "payments");

    let payout = lines.with("correlation_id", "corr-payout");
    assert_eq!(services(&payout), BTreeSet::from(["payments", "identity"]));
    single_line(&payout, "payout recorded");
    for line in [checked, paid, single_line(&payout, "payout recorded")] {
        assert_eq!(line["user_id"], ALICE, "{line}");
    }
    let calls = deposit.iter().chain(&payout);
    for call in calls.filter(|line| line["message"] == "call") {
        field(call, "trace_id");
    }

    let forged = single_line(&all, "webhook with an invalid signature");
    assert_eq!(
        (&forged["level"], &forged["service_name"]),
        (&"WARN".into(), &"payments".into())
    );
}
