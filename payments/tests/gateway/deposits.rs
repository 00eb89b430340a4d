//! Intents: limits, methods, events, expiry, polls.

use std::{collections::HashSet, sync::Arc, time::Duration};

use events::Embedded;
use payments::{AlertSinks, PaymentsConfig, PaymentsDeps};
use proto::{
    common::v1 as common,
    identity::v1::{BlockUserRequest, SetLimitRequest},
    payments::v1::{self as wire, PaymentMethod},
    sandbox::v1::BankFault,
};
use rail::{purpose_code, sbp_link::SbpLink};
use rpc::{Channel, LocalSlot};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::payouts::Slow;
use crate::world::{
    ALICE, Setup, World, amount_of, ctx, ctx_with, intent_ask, payment_notice, rub,
};

fn us(time: &Option<prost_types::Timestamp>) -> i64 {
    proto::convert::timestamp_us(time.as_ref().unwrap())
}

// rows: R105 R108 R109 R110 R111 R319
#[tokio::test]
async fn r105_each_method_creates_a_pending_intent_that_can_be_paid() {
    let world = World::start().await;
    for method in [
        PaymentMethod::SbpQr,
        PaymentMethod::SbpC2b,
        PaymentMethod::BankTransfer,
    ] {
        let intent = world.create_intent("1500.5", method).await;
        assert!(!intent.payment_id.is_empty());
        assert_eq!(intent.user_id, ALICE);
        assert_eq!(amount_of(intent.amount.as_ref()), "1500.50");
        assert_eq!(intent.method, method as i32);
        assert_eq!(intent.status, common::PaymentStatus::Pending as i32);
        assert!(us(&intent.expires_at) > us(&intent.created_at));
        match method {
            PaymentMethod::BankTransfer => {
                let (id, sum) = purpose_code::read(&intent.qr_payload).unwrap();
                assert_eq!((id, sum.kopecks()), (intent.payment_id.clone(), 150_050));
            }
            _ => {
                let link = SbpLink::parse(&intent.payment_url).unwrap();
                assert_eq!(link.sum().unwrap().kopecks(), 150_050);
                assert_eq!(
                    intent.qr_payload.is_empty(),
                    method == PaymentMethod::SbpC2b
                );
            }
        }
        world.pay(&intent.payment_url).await;
        world
            .until_status(&intent.payment_id, common::PaymentStatus::Success)
            .await;
    }
    assert_eq!(world.bank_balance().await, "4501.50");
    world.stop().await;
}

// rows: R319
#[tokio::test]
async fn r319_a_service_whose_settings_break_the_qr_payload_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let log = Arc::new(Embedded::open(folder.path().join("log")).await.unwrap());
    let slot = LocalSlot::default();
    let channel = || Channel::local(&slot, "sandbox.service");
    let cases: [(&str, fn(&mut PaymentsConfig) -> &mut String); 2] = [
        ("payments.requisites.bank_name", |config| {
            &mut config.requisites.bank_name
        }),
        ("payments.deposit_purpose", |config| {
            &mut config.deposit_purpose
        }),
    ];
    for (setting, text) in cases {
        let mut config = PaymentsConfig {
            data_dir: folder.path().join("payments"),
            keys_dir: folder.path().join("keys"),
            ..PaymentsConfig::default()
        };
        text(&mut config).push_str("|Sum=1");
        let deps = PaymentsDeps {
            log: log.clone(),
            identity: channel(),
            cfa: channel(),
            chain: channel(),
            alerts: AlertSinks::default(),
        };
        let started = payments::start(config, deps, CancellationToken::new()).await;
        let refused = started.err().expect(setting).to_string();
        assert!(
            refused.starts_with(&format!("{setting} contains `|`")),
            "{refused}"
        );
        assert!(!folder.path().join("payments").exists(), "{setting}");
    }
    log.close().await;
}

// rows: R012 R106 R036 R303
#[tokio::test]
async fn r106_the_deposit_limit_is_checked_with_identity() {
    let world = World::start().await;
    world.identity_calls.lock().unwrap().clear();
    world.qr("100.00").await;
    assert_eq!(
        *world.identity_calls.lock().unwrap(),
        ["CheckLimits DEPOSIT DEPOSIT alice 100.00"]
    );
    world.stop().await;
}

// rows: R107 R252
#[tokio::test]
async fn r107_a_refusal_is_returned_verbatim_and_stores_nothing() {
    let world = World::start().await;
    let over = world
        .payments()
        .create_payment_intent(intent_ask(ALICE, "600000.01", PaymentMethod::SbpQr))
        .await
        .unwrap_err();
    assert_eq!(over.code(), Code::FailedPrecondition);
    assert_eq!(over.message(), "Daily deposit limit exceeded");
    assert_eq!(
        rpc::status::reason(&over).as_deref(),
        Some("LIMIT_EXCEEDED")
    );
    let own_text = SetLimitRequest {
        context: ctx(),
        user_id: ALICE.into(),
        limit_type: common::LimitType::Deposit as i32,
        daily_limit: None,
        refuse_with: "KYC is out of date: пройдите проверку".into(),
    };
    world.identity().set_limit(own_text.clone()).await.unwrap();
    let refused = world
        .payments()
        .create_payment_intent(intent_ask(ALICE, "1.00", PaymentMethod::SbpQr))
        .await
        .unwrap_err();
    assert_eq!(refused.message(), "KYC is out of date: пройдите проверку");
    let block = BlockUserRequest {
        context: ctx(),
        user_id: "bob".into(),
        reason: "court order".into(),
    };
    world.create_user("bob").await;
    world.identity().block_user(block).await.unwrap();
    let blocked = world
        .payments()
        .create_payment_intent(intent_ask("bob", "1.00", PaymentMethod::SbpQr))
        .await
        .unwrap_err();
    assert_eq!(blocked.message(), "User is blocked");
    let listed = world
        .payments()
        .list_payment_intents(wire::ListPaymentIntentsRequest::default())
        .await
        .unwrap();
    assert!(listed.into_inner().intents.is_empty());
    world
        .approved_identity()
        .set_limit(SetLimitRequest {
            context: ctx(),
            refuse_with: String::new(),
            ..own_text
        })
        .await
        .unwrap();
    assert!(world.events().await.is_empty());
    world.stop().await;
}

// rows: R105 R332 R333
#[tokio::test]
async fn r105_bad_requests_name_the_field_and_change_nothing() {
    let world = World::start().await;
    let ask = |amount, method| intent_ask(ALICE, amount, method);
    let mut no_key = ask("1.00", PaymentMethod::SbpQr);
    no_key.context.as_mut().unwrap().idempotency_key.clear();
    let mut dollars = ask("1.00", PaymentMethod::SbpQr);
    dollars.amount.as_mut().unwrap().currency_code = "USD".into();
    for (request, field) in [
        (ask("0", PaymentMethod::SbpQr), "amount: "),
        (ask("-5", PaymentMethod::SbpQr), "amount: "),
        (ask("1.001", PaymentMethod::SbpQr), "amount: "),
        (ask("ten", PaymentMethod::SbpQr), "amount: "),
        (ask("1.00", PaymentMethod::Unspecified), "method: "),
        (dollars, "amount: "),
        (no_key, "context.idempotency_key: "),
    ] {
        let refused = world
            .payments()
            .create_payment_intent(request)
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(
            refused.message().starts_with(field),
            "{}",
            refused.message()
        );
    }
    let unknown = intent_ask("unknown", "1.00", PaymentMethod::SbpQr);
    let unknown = world
        .payments()
        .create_payment_intent(unknown)
        .await
        .unwrap_err();
    assert_eq!(
        (unknown.code(), unknown.message()),
        (Code::NotFound, "User not found")
    );
    let foreign = world
        .payments_as("sandbox.investor.bob")
        .create_payment_intent(ask("1.00", PaymentMethod::SbpQr))
        .await
        .unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    let own = world
        .payments_as("sandbox.investor.alice")
        .create_payment_intent(ask("1.00", PaymentMethod::SbpQr))
        .await;
    assert!(own.is_ok());
    world.stop().await;
}

// rows: R112 R245
#[tokio::test]
async fn r112_the_intent_is_stored_and_published() {
    let world = World::start().await;
    let mut ask = intent_ask(ALICE, "10.00", PaymentMethod::SbpQr);
    ask.context = ctx_with("k1");
    let made = world
        .payments()
        .create_payment_intent(ask.clone())
        .await
        .unwrap();
    let made = made.into_inner().intent.unwrap();
    assert_eq!(world.intent(&made.payment_id).await, made);
    let again = world
        .payments()
        .create_payment_intent(ask.clone())
        .await
        .unwrap();
    assert_eq!(again.metadata().get("idempotent-replayed").unwrap(), "true");
    assert_eq!(again.into_inner().intent.unwrap(), made);
    // The key wins although the amount differs (T12).
    ask.amount = rub("11.00");
    let other = world.payments().create_payment_intent(ask).await.unwrap();
    assert_eq!(other.into_inner().intent.unwrap(), made);

    let events = world.events().await;
    assert_eq!(events.len(), 1);
    assert_eq!(
        events[0].type_name,
        "dfa.payments.v1.PaymentIntentCreatedEvent"
    );
    assert_eq!(events[0].correlation_id, "corr-k1");
    let created: Vec<wire::PaymentIntentCreatedEvent> = world
        .events_of("PaymentIntentCreatedEvent", &made.payment_id)
        .await;
    assert_eq!(created[0].user_id, ALICE);
    assert_eq!(amount_of(created[0].amount.as_ref()), "10.00");
    assert_eq!(
        created[0].context.as_ref().unwrap().correlation_id,
        "corr-k1"
    );
    world.stop().await;
}

// rows: R105
#[tokio::test]
async fn r105_concurrent_calls_with_one_key_make_one_intent() {
    let world = World::start().await;
    let mut ask = intent_ask(ALICE, "10.00", PaymentMethod::SbpQr);
    ask.context = ctx_with("same");
    let calls = (0..8).map(|_| {
        let (mut client, ask) = (world.payments(), ask.clone());
        async move {
            client
                .create_payment_intent(ask)
                .await
                .unwrap()
                .into_inner()
                .intent
                .unwrap()
        }
    });
    let intents = futures::future::join_all(calls).await;
    assert!(
        intents
            .iter()
            .all(|intent| intent.payment_id == intents[0].payment_id)
    );
    assert_eq!(world.events().await.len(), 1);
    world.stop().await;
}

/// Asserts that a further intent of Alice is refused.
async fn assert_too_many(world: &World) {
    let ask = intent_ask(ALICE, "1.00", PaymentMethod::SbpQr);
    let refused = world.payments().create_payment_intent(ask).await;
    let refused = refused.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::ResourceExhausted, "Too many unpaid payment intents")
    );
    let reason = rpc::status::reason(&refused);
    assert_eq!(reason.as_deref(), Some("TOO_MANY_PAYMENT_INTENTS"));
}

// rows: R105 R341
#[tokio::test]
async fn r341_pending_intents_of_a_user_are_bounded_and_a_paid_one_frees_a_place() {
    let world = World::start_with(|setup| setup.payments.pending_intents_per_user = 2).await;
    world.create_user("bob").await;
    let first = world.qr("1.00").await;
    let mut ask = intent_ask(ALICE, "1.00", PaymentMethod::SbpQr);
    ask.context = ctx_with("second");
    let second = world.payments().create_payment_intent(ask.clone()).await;
    let second = second.unwrap().into_inner();

    world.identity_calls.lock().unwrap().clear();
    assert_too_many(&world).await;
    // The refusal costs no call.
    assert!(world.identity_calls.lock().unwrap().is_empty());
    let repeat = world.payments().create_payment_intent(ask).await.unwrap();
    assert_eq!(repeat.into_inner(), second);
    let bob = intent_ask("bob", "1.00", PaymentMethod::SbpQr);
    world.payments().create_payment_intent(bob).await.unwrap();

    world.pay(&first.qr_payload).await;
    world
        .until_status(&first.payment_id, common::PaymentStatus::Success)
        .await;
    world.qr("1.00").await;
    assert_too_many(&world).await;
    world.stop().await;
}

// rows: R323 R341
#[tokio::test]
async fn r341_failed_and_expired_intents_free_places_while_few_are_polled() {
    let world = World::start_with(|setup| {
        setup.payments.pending_intents_per_user = 1;
        setup.payments.polled_intents_per_user = 2;
    })
    .await;
    for status in ["FAILED", "EXPIRED"] {
        let intent = world.qr("1.00").await;
        assert_too_many(&world).await;
        let ended = payment_notice(&intent.payment_id, status, "1.00");
        assert_eq!(world.post_webhook(status, &ended).await.0, 200);
        if status == "EXPIRED" {
            // Late money still counts, so both are polled.
            assert_too_many(&world).await;
            let late = payment_notice(&intent.payment_id, "SUCCESS", "1.00");
            assert_eq!(world.post_webhook("late", &late).await.0, 200);
        }
    }
    world.qr("1.00").await;
    world.stop().await;
}

// rows: R341
#[tokio::test]
async fn r341_concurrent_calls_make_no_more_intents_than_the_bound() {
    let world = World::start_with(|setup| setup.payments.pending_intents_per_user = 3).await;
    let calls = (0..8).map(|_| {
        let mut client = world.payments();
        let ask = intent_ask(ALICE, "1.00", PaymentMethod::SbpQr);
        async move { client.create_payment_intent(ask).await }
    });
    let answers = futures::future::join_all(calls).await;
    let refused: Vec<Code> = answers
        .into_iter()
        .filter_map(|answer| answer.err().map(|refused| refused.code()))
        .collect();
    assert_eq!(refused, [Code::ResourceExhausted; 5]);
    let listed = world
        .payments()
        .list_payment_intents(wire::ListPaymentIntentsRequest::default())
        .await
        .unwrap();
    assert_eq!(listed.into_inner().intents.len(), 3);
    world.stop().await;
}

fn poll_often(setup: &mut Setup) {
    setup.payments.poll_first_ms = 20;
    setup.payments.poll_most_ms = 50;
}

// rows: R127 R323
#[tokio::test]
async fn r127_a_slow_status_of_one_payment_delays_no_poll_of_another() {
    let (world, slow, proxy) = Slow::start_with(poll_often).await;
    world.set_fault(BankFault::WebhookLost, "").await;
    let stuck = world.qr("1.00").await;
    let stuck_id = stuck.payment_id.as_str();
    let slow_payments = &slow.slow_payments;
    slow_payments.lock().unwrap().insert(stuck_id.to_owned());
    slow.until_arrived(1).await;
    let mut others = Vec::new();
    for _ in 0..6 {
        let intent = world.qr("1.00").await;
        world.pay(&intent.qr_payload).await;
        others.push(intent);
    }
    for intent in &others {
        world
            .until_status(&intent.payment_id, common::PaymentStatus::Success)
            .await;
    }
    // It is due all the time, but polled once at a time.
    assert_eq!(slow.arrived(), [stuck_id]);
    world.pay(&stuck.qr_payload).await;
    slow.permits.add_permits(1_000);
    world
        .until_status(stuck_id, common::PaymentStatus::Success)
        .await;
    let deposits: Vec<wire::FiatDepositedEvent> =
        world.events_of("FiatDepositedEvent", stuck_id).await;
    assert_eq!(deposits.len(), 1);
    world.stop().await;
    proxy.abort();
}

// rows: R127
#[tokio::test]
async fn r127_at_most_four_payments_are_polled_in_parallel() {
    let (world, slow, proxy) = Slow::start_with(poll_often).await;
    world.set_fault(BankFault::WebhookLost, "").await;
    let mut intents = Vec::new();
    for _ in 0..10 {
        let intent = world.qr("1.00").await;
        let payment_id = intent.payment_id.clone();
        slow.slow_payments.lock().unwrap().insert(payment_id);
        world.pay(&intent.qr_payload).await;
        intents.push(intent);
    }
    slow.until_arrived(4).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let arrived = slow.arrived();
    assert_eq!(arrived.len(), 4);
    assert_eq!(HashSet::<String>::from_iter(arrived).len(), 4);
    slow.permits.add_permits(1_000);
    for intent in &intents {
        world
            .until_status(&intent.payment_id, common::PaymentStatus::Success)
            .await;
    }
    world.stop().await;
    proxy.abort();
}

// rows: R119
#[tokio::test]
async fn r119_a_paid_code_ends_in_success_and_one_deposit_event() {
    const HOUR_MS: u64 = 3_600_000;
    // Without a poll only the bank's webhook brings the success.
    let world = World::start_with(|setup| {
        setup.payments.poll_first_ms = HOUR_MS;
        setup.payments.poll_most_ms = HOUR_MS;
    })
    .await;
    let intent = world.qr("250.00").await;
    let code = SbpLink::parse(&intent.qr_payload).unwrap();
    assert_eq!(code.sum().unwrap().kopecks(), 25_000);
    assert_eq!(world.bank_balance().await, "0.00");
    world.pay(&intent.qr_payload).await;
    assert_eq!(world.bank_balance().await, "250.00");
    world
        .until_status(&intent.payment_id, common::PaymentStatus::Success)
        .await;
    let deposits: Vec<wire::FiatDepositedEvent> = world
        .events_of("FiatDepositedEvent", &intent.payment_id)
        .await;
    assert_eq!(deposits.len(), 1);
    assert_eq!(deposits[0].user_id, ALICE);
    assert_eq!(deposits[0].payment_id, intent.payment_id);
    assert_eq!(amount_of(deposits[0].amount.as_ref()), "250.00");
    assert!(deposits[0].deposited_at.is_some());
    world.stop().await;
}

// rows: R127 R323
#[tokio::test]
async fn r323_a_poll_replaces_a_lost_webhook() {
    let world = World::start_with(|setup| {
        setup.payments.poll_first_ms = 20;
        setup.payments.poll_most_ms = 50;
    })
    .await;
    world.set_fault(BankFault::WebhookLost, "").await;
    let paid = world.qr("250.00").await;
    let failed = world.qr("251.00").await;
    world.pay(&paid.qr_payload).await;
    world
        .pay_as(&failed.qr_payload, None, common::PaymentStatus::Failed)
        .await;
    world
        .until_status(&paid.payment_id, common::PaymentStatus::Success)
        .await;
    world
        .until_status(&failed.payment_id, common::PaymentStatus::Failed)
        .await;
    // The late webhook changes nothing.
    world.set_fault(BankFault::None, "").await;
    let deposits: Vec<wire::FiatDepositedEvent> = world
        .events_of("FiatDepositedEvent", &paid.payment_id)
        .await;
    assert_eq!(deposits.len(), 1);
    let none: Vec<wire::FiatDepositedEvent> = world
        .events_of("FiatDepositedEvent", &failed.payment_id)
        .await;
    assert!(none.is_empty());
    world.stop().await;
}

// rows: R323 R118
#[tokio::test]
async fn r323_an_unpaid_intent_expires_and_a_late_success_still_counts() {
    let world = World::start_with(|setup| setup.payments.intent_life_s = 1).await;
    let intent = world.qr("30.00").await;
    let expired = world
        .until_status(&intent.payment_id, common::PaymentStatus::Expired)
        .await;
    assert!(us(&expired.updated_at) >= us(&intent.expires_at));
    let body = payment_notice(&intent.payment_id, "SUCCESS", "30.00");
    assert_eq!(world.post_webhook("late-1", &body).await.0, 200);
    assert_eq!(
        world.intent(&intent.payment_id).await.status,
        common::PaymentStatus::Success as i32
    );
    let deposits: Vec<wire::FiatDepositedEvent> = world
        .events_of("FiatDepositedEvent", &intent.payment_id)
        .await;
    assert_eq!(deposits.len(), 1);
    world.stop().await;
}

// rows: R010 R105
#[tokio::test]
async fn r010_intents_page_by_two_without_gap_or_repeat() {
    let world = World::start().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(world.qr("1.00").await.payment_id);
    }
    made.reverse();
    let (mut seen, mut token) = (Vec::new(), String::new());
    // Five rows are three pages.
    for page in 1..=3 {
        let ask = wire::ListPaymentIntentsRequest {
            user_id: ALICE.into(),
            status: common::PaymentStatus::Pending as i32,
            pagination: Some(common::PaginationRequest {
                page_size: 2,
                page_token: token,
            }),
            ..Default::default()
        };
        let listed = world.payments().list_payment_intents(ask).await;
        let listed = listed.unwrap().into_inner();
        seen.extend(listed.intents.into_iter().map(|intent| intent.payment_id));
        token = listed.pagination.unwrap().next_page_token;
        assert_eq!(token.is_empty(), page == 3, "page {page}");
    }
    assert_eq!(seen, made);
    world.stop().await;
}

// rows: R248
#[tokio::test]
async fn r248_deposits_continue_after_a_restart() {
    let world = World::start_with(|setup| {
        setup.payments.poll_first_ms = 20;
        setup.payments.poll_most_ms = 50;
    })
    .await;
    world.set_fault(BankFault::WebhookLost, "").await;
    let intent = world.qr("70.00").await;
    let folder = world.stop().await;

    let world = World::open(folder, |setup| {
        setup.payments.poll_first_ms = 20;
        setup.payments.poll_most_ms = 50;
    })
    .await;
    assert_eq!(world.intent(&intent.payment_id).await, intent);
    world.pay(&intent.qr_payload).await;
    world
        .until_status(&intent.payment_id, common::PaymentStatus::Success)
        .await;
    assert_eq!(world.bank_balance().await, "70.00");
    let deposits: Vec<wire::FiatDepositedEvent> = world
        .events_of("FiatDepositedEvent", &intent.payment_id)
        .await;
    assert_eq!(deposits.len(), 1);
    world.stop().await;
}
