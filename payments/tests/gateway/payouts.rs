//! Payouts: recorded, released, ordered once, confirmed or failed.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use axum::{Router, body::Bytes, extract::State};
use http::HeaderMap;
use payments::rail::account;
use proto::{
    common::v1 as common,
    identity::v1::{BlockUserRequest, UnblockUserRequest, UpdateUserRequest},
    payments::v1::{self as wire, PaymentMethod},
    sandbox::v1::BankFault,
};
use tokio::net::TcpListener;
use tonic::Code;

use crate::world::{ALICE, World, amount_of, ctx, ctx_with, intent_ask, rub, until};

const PENDING: i32 = common::PaymentStatus::Pending as i32;
const SUCCESS: common::PaymentStatus = common::PaymentStatus::Success;
const FAILED: common::PaymentStatus = common::PaymentStatus::Failed;

fn valid_account() -> String {
    account::number("40817", 7)
}

async fn cancel(world: &World, payout_id: &str, code: &str) -> Result<wire::Payout, tonic::Status> {
    let ask = wire::CancelPayoutRequest {
        context: ctx(),
        payout_id: payout_id.into(),
        failure_code: code.into(),
    };
    let answer = world.payments().cancel_payout(ask).await?;
    Ok(answer.into_inner().payout.unwrap())
}

// rows: R016 R123 R124 R125 R126 R300 R318 R036
#[tokio::test]
async fn r123_a_payout_is_recorded_released_and_confirmed() {
    let world = World::start().await;
    world.fund("100.00").await;
    let recorded = world.initiate("po-1", "40.00", &valid_account()).await;
    assert_eq!(recorded.status, PENDING);
    assert!(!recorded.sent);
    // Not before the burn is final, however long it takes.
    let (status, body) = world.get("/payouts/po-1").await;
    assert_eq!((status, body["status"].as_str()), (200, Some("PENDING")));
    assert!(world.transfers().await.is_empty());

    world.asked.lock().unwrap().clear();
    world.release("po-1").await;
    let paid = world.until_payout("po-1", SUCCESS).await;
    assert!(paid.sent && !paid.bank_transfer_id.is_empty());
    assert_eq!(*world.asked.lock().unwrap(), ["CheckSanctions alice po-1"]);
    let transfers = world.transfers().await;
    assert_eq!(transfers.len(), 1);
    assert_eq!(transfers[0].recipient_account, valid_account());
    assert!(transfers[0].purpose.ends_with("po-1"));
    assert_eq!(world.bank_balance().await, "60.00");

    let confirmed: Vec<wire::PayoutConfirmedEvent> =
        world.events_of("PayoutConfirmedEvent", "po-1").await;
    assert_eq!(confirmed.len(), 1);
    assert_eq!(confirmed[0].user_id, ALICE);
    assert_eq!(amount_of(confirmed[0].amount.as_ref()), "40.00");
    let (status, body) = world.get("/payouts/po-1").await;
    assert_eq!((status, body["status"].as_str()), (200, Some("SUCCESS")));
    let (status, body) = world.get("/payouts/none").await;
    assert_eq!(
        (status, body["message"].as_str()),
        (404, Some("Payout not found"))
    );
    world.stop().await;
}

// rows: R123
#[tokio::test]
async fn r123_the_same_payout_id_is_the_same_payout() {
    let world = World::start().await;
    world.fund("100.00").await;
    let first = world.initiate("po-1", "40.00", &valid_account()).await;
    assert_eq!(world.initiate("po-1", "90.00", "another").await, first);
    world.release("po-1").await;
    world.release("po-1").await;
    let paid = world.until_payout("po-1", SUCCESS).await;
    assert_eq!(world.release("po-1").await, paid);
    assert_eq!(cancel(&world, "po-1", "BURN_REVERTED").await.unwrap(), paid);
    assert_eq!(world.transfers().await.len(), 1);
    let unknown = wire::ReleasePayoutRequest {
        context: ctx(),
        payout_id: "none".into(),
    };
    let refused = world.payments().release_payout(unknown).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::NotFound, "Payout not found")
    );
    world.stop().await;
}

// rows: R123 R318
#[tokio::test]
async fn r123_a_repeated_key_is_the_payout_that_it_made() {
    let world = World::start().await;
    world.create_user("bob").await;
    let ask = |key: &str, user_id: &str, payout_id: &str| wire::InitiatePayoutRequest {
        context: ctx_with(key),
        payout: Some(wire::PayoutRequest {
            payout_id: payout_id.into(),
            user_id: user_id.into(),
            amount: rub("10.00"),
            bank_account: valid_account(),
        }),
    };
    let initiate = async |ask: wire::InitiatePayoutRequest| {
        let answer = world.services().initiate_payout(ask).await.unwrap();
        let replayed = answer.metadata().get("idempotent-replayed").cloned();
        let replayed = replayed.map(|mark| mark.to_str().unwrap().to_owned());
        (answer.into_inner().payout.unwrap(), replayed)
    };
    let yes = Some("true".to_owned());
    let (first, replayed) = initiate(ask("k1", ALICE, "po-1")).await;
    assert_eq!(replayed, None);
    // The key answers, whatever else the call says.
    let again = initiate(ask("k1", ALICE, "po-2")).await;
    assert_eq!(again, (first.clone(), yes.clone()));
    // A payout id is one payout under every key.
    assert_eq!(initiate(ask("k2", ALICE, "po-1")).await, (first, yes));
    // Another user's key is another key.
    let (other, replayed) = initiate(ask("k1", "bob", "po-3")).await;
    assert_eq!((other.payout_id.as_str(), replayed), ("po-3", None));
    let listed = world
        .payments()
        .list_payouts(wire::ListPayoutsRequest::default())
        .await
        .unwrap();
    assert_eq!(listed.into_inner().payouts.len(), 2);
    let metrics = world.get("/metrics").await.1;
    let mismatches = r#"idempotency_mismatch_total{call="InitiatePayout"}"#;
    assert!(metrics.as_str().unwrap().contains(mismatches));
    world.stop().await;
}

// rows: R123
#[tokio::test]
async fn r123_concurrent_calls_with_one_key_record_one_payout() {
    let world = World::start().await;
    let calls = (0..10).map(|n| {
        let ask = wire::InitiatePayoutRequest {
            context: ctx_with("k1"),
            payout: Some(wire::PayoutRequest {
                payout_id: format!("po-{n}"),
                user_id: ALICE.into(),
                amount: rub("10.00"),
                bank_account: valid_account(),
            }),
        };
        let mut services = world.services();
        async move { services.initiate_payout(ask).await.unwrap().into_inner() }
    });
    let answers = futures::future::join_all(calls).await;
    assert!(answers.iter().all(|answer| answer == &answers[0]));
    world.stop().await;
}

// rows: R321
#[tokio::test]
async fn r321_a_refusal_of_the_bank_fails_the_payout_and_says_why() {
    let world = World::start().await;
    world.fund("100.00").await;
    // At once: an account that cannot exist. Later: an account the recipient's bank has closed. Never: more than there is.
    let closed = account::number("40817", 8);
    world.set_fault(BankFault::RefuseTransfer, &closed).await;
    for (payout_id, account, amount, code) in [
        (
            "po-1",
            "40817810000000000000",
            "10.00",
            "INVALID_RECIPIENT_ACCOUNT",
        ),
        ("po-2", "", "10.00", "INVALID_RECIPIENT_ACCOUNT"),
        ("po-3", closed.as_str(), "10.00", "RECIPIENT_ACCOUNT_CLOSED"),
        (
            "po-4",
            valid_account().as_str(),
            "100.01",
            "INSUFFICIENT_FUNDS",
        ),
    ] {
        world.initiate(payout_id, amount, account).await;
        world.release(payout_id).await;
        let failed = world.until_payout(payout_id, FAILED).await;
        assert_eq!(failed.failure_code, code);
        assert!(!failed.failure_message.is_empty());
        let events: Vec<wire::PayoutFailedEvent> =
            world.events_of("PayoutFailedEvent", payout_id).await;
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].failure_code, code);
        assert_eq!(amount_of(events[0].amount.as_ref()), amount);
        let none: Vec<wire::PayoutConfirmedEvent> =
            world.events_of("PayoutConfirmedEvent", payout_id).await;
        assert!(none.is_empty());
    }
    assert_eq!(world.bank_balance().await, "100.00");
    world.stop().await;
}

// rows: R321
#[tokio::test]
async fn r321_a_cancel_ends_what_was_not_sent() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.initiate("reverted", "10.00", &valid_account()).await;
    let ended = cancel(&world, "reverted", "BURN_REVERTED").await.unwrap();
    assert_eq!(
        (ended.status, ended.failure_code.as_str()),
        (FAILED as i32, "BURN_REVERTED")
    );
    assert_eq!(world.release("reverted").await, ended);
    world.initiate("other", "10.00", &valid_account()).await;
    cancel(&world, "other", "OPERATOR").await.unwrap();
    let silent: Vec<wire::PayoutFailedEvent> =
        world.events_of("PayoutFailedEvent", "reverted").await;
    assert!(
        silent.is_empty(),
        "no token is missing, so nobody has to mint one"
    );
    let told: Vec<wire::PayoutFailedEvent> = world.events_of("PayoutFailedEvent", "other").await;
    assert_eq!(told.len(), 1);

    world.set_fault(BankFault::HoldTransfer, "").await;
    world.initiate("sent", "10.00", &valid_account()).await;
    world.release("sent").await;
    until(async || world.payout("sent").await.sent.then_some(())).await;
    let refused = cancel(&world, "sent", "OPERATOR").await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(
        rpc::status::reason(&refused).as_deref(),
        Some("PAYOUT_SENT")
    );
    world.set_fault(BankFault::None, "").await;
    world.until_payout("sent", SUCCESS).await;
    assert_eq!(world.transfers().await.len(), 1);
    world.stop().await;
}

// rows: R127
#[tokio::test]
async fn r127_a_bank_that_is_away_delays_a_payout_and_doubles_nothing() {
    let world = World::start_with(|setup| setup.payments.client.breaker_open_ms = 30).await;
    world.fund("100.00").await;
    world.set_fault(BankFault::Unavailable, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    until(async || world.payout("po-1").await.sent.then_some(())).await;
    // The gateway says so.
    until(async || (world.get("/health").await.0 == 503).then_some(())).await;
    assert_eq!(world.payout("po-1").await.status, PENDING);
    world.set_fault(BankFault::None, "").await;
    world.until_payout("po-1", SUCCESS).await;
    assert_eq!(world.transfers().await.len(), 1);
    until(async || (world.get("/health").await.0 == 200).then_some(())).await;
    world.stop().await;
}

// rows: R127 R087
#[tokio::test]
async fn r127_the_bank_is_asked_again_after_its_failure_while_calls_keep_coming() {
    let world = World::start_with(|setup| {
        setup.payments.client.tries = 1;
        // Longer than the pauses between the calls below and between the orders of the payout.
        setup.payments.client.breaker_open_ms = 500;
    })
    .await;
    world.fund("100.00").await;
    let pays = async || {
        let ask = intent_ask(ALICE, "1.00", PaymentMethod::SbpQr);
        world.payments().create_payment_intent(ask).await.is_ok()
    };
    world.set_fault(BankFault::Unavailable, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    until(async || (world.get("/health").await.0 == 503).then_some(())).await;
    for _ in 0..10 {
        assert!(!pays().await);
    }
    world.set_fault(BankFault::None, "").await;
    until(async || pays().await.then_some(())).await;
    world.until_payout("po-1", SUCCESS).await;
    until(async || {
        pays().await;
        (world.get("/health").await.0 == 200).then_some(())
    })
    .await;
    assert_eq!(world.transfers().await.len(), 1);
    world.stop().await;
}

/// Hands requests on to the bank and loses the first answers to transfer orders.
#[derive(Clone)]
struct Lossy {
    bank_url: Arc<std::sync::OnceLock<String>>,
    to_lose: Arc<AtomicU32>,
    orders: Arc<AtomicU32>,
    /// Transfers are not found any more.
    forgetful: Arc<AtomicBool>,
}

async fn pass_on(
    State(lossy): State<Lossy>,
    method: http::Method,
    uri: http::Uri,
    headers: HeaderMap,
    body: Bytes,
) -> (http::StatusCode, Bytes) {
    let is_order = method == "POST" && uri.path() == "/bank/v1/transfers";
    let is_status = method == "GET" && uri.path().starts_with("/bank/v1/transfers/");
    if is_status && lossy.forgetful.load(Ordering::SeqCst) {
        return (http::StatusCode::NOT_FOUND, Bytes::new());
    }
    let url = format!("{}{uri}", lossy.bank_url.get().unwrap());
    let mut request = reqwest::Client::new().request(method, url).body(body);
    for name in ["content-type", "x-key-id", "x-timestamp", "x-signature"] {
        request = request.header(name, &headers[name]);
    }
    let answer = request.send().await.unwrap();
    let (status, bytes) = (answer.status(), answer.bytes().await.unwrap());
    if is_order {
        lossy.orders.fetch_add(1, Ordering::SeqCst);
        let lost = lossy
            .to_lose
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if lost.is_ok() {
            return (http::StatusCode::BAD_GATEWAY, Bytes::new());
        }
    }
    (status, bytes)
}

// rows: R127
#[tokio::test]
async fn r127_a_lost_answer_is_asked_for_again_with_the_same_request_id() {
    let lossy = Lossy {
        bank_url: Arc::default(),
        to_lose: Arc::new(AtomicU32::new(3)),
        orders: Arc::default(),
        forgetful: Arc::default(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy_url = format!("http://{}", listener.local_addr().unwrap());
    let proxy = Router::new().fallback(pass_on).with_state(lossy.clone());
    let proxy = tokio::spawn(async move { axum::serve(listener, proxy).await.unwrap() });
    let world = World::start_with(|setup| setup.bank_url = Some(proxy_url)).await;
    lossy.bank_url.set(world.bank_url.clone()).unwrap();
    world.fund("100.00").await;
    // Otherwise the bank's own webhook would end it before the orders are repeated.
    world.set_fault(BankFault::WebhookLost, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    world.until_payout("po-1", SUCCESS).await;
    assert_eq!(lossy.orders.load(Ordering::SeqCst), 4);
    assert_eq!(world.transfers().await.len(), 1);
    assert_eq!(world.bank_balance().await, "90.00");
    world.stop().await;
    proxy.abort();
}

// rows: R128
#[tokio::test]
async fn r128_one_payout_that_cannot_be_asked_for_does_not_stop_the_reconciliation() {
    let lossy = Lossy {
        bank_url: Arc::default(),
        to_lose: Arc::default(),
        orders: Arc::default(),
        forgetful: Arc::default(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy_url = format!("http://{}", listener.local_addr().unwrap());
    let proxy = Router::new().fallback(pass_on).with_state(lossy.clone());
    let proxy = tokio::spawn(async move { axum::serve(listener, proxy).await.unwrap() });
    let world = World::start_with(|setup| setup.bank_url = Some(proxy_url)).await;
    lossy.bank_url.set(world.bank_url.clone()).unwrap();
    world.fund("100.00").await;
    world.set_fault(BankFault::HoldTransfer, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    until(async || {
        let id = world.payout("po-1").await.bank_transfer_id;
        (!id.is_empty()).then_some(())
    })
    .await;
    lossy.forgetful.store(true, Ordering::SeqCst);
    world.cfa.set_supply("100.00", 2);
    let report = world.reconcile().await;
    assert_eq!(amount_of(report.bank_balance.as_ref()), "100.00");
    world.stop().await;
    proxy.abort();
}

// rows: R126
#[tokio::test]
async fn r126_an_order_that_the_bank_finds_wrong_fails_the_payout() {
    // The account that orders is not the one the bank keeps for us.
    let world =
        World::start_with(|setup| setup.bank.account_number = account::number("40702", 99)).await;
    world.fund("100.00").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    let failed = world.until_payout("po-1", FAILED).await;
    assert_eq!(failed.failure_code, "UNKNOWN_ACCOUNT");
    let told: Vec<wire::PayoutFailedEvent> = world.events_of("PayoutFailedEvent", "po-1").await;
    assert_eq!(told.len(), 1);
    assert!(world.transfers().await.is_empty());
    world.stop().await;
}

// rows: R127 R341
#[tokio::test]
async fn r127_a_bank_that_hangs_costs_bounded_time_and_bounded_attempts() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let attempts = Arc::new(AtomicU32::new(0));
    let counted = attempts.clone();
    let hanging = tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            held.push(listener.accept().await.unwrap());
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    let world = World::start_with(|setup| {
        setup.bank_url = Some(url);
        setup.payments.client.call_timeout_ms = 100;
    })
    .await;
    let refused = world
        .payments()
        .create_payment_intent(intent_ask(ALICE, "1.00", PaymentMethod::SbpQr))
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unavailable, "Bank is unavailable")
    );
    assert_eq!(attempts.load(Ordering::SeqCst), 3);
    let listed = world
        .payments()
        .list_payment_intents(wire::ListPaymentIntentsRequest::default())
        .await
        .unwrap();
    assert!(listed.into_inner().intents.is_empty());
    world.stop().await;
    hanging.abort();
}

// rows: R125
#[tokio::test]
async fn r125_a_confirmation_is_found_by_poll_when_the_webhook_is_lost() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.set_fault(BankFault::WebhookLost, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    world.until_payout("po-1", SUCCESS).await;
    world.set_fault(BankFault::None, "").await;
    let confirmed: Vec<wire::PayoutConfirmedEvent> =
        world.events_of("PayoutConfirmedEvent", "po-1").await;
    assert_eq!(confirmed.len(), 1);
    world.stop().await;
}

#[tokio::test]
async fn t48_payouts_of_a_blocked_user_or_a_listed_name_wait() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.create_user("bob").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    let block = BlockUserRequest {
        context: ctx(),
        user_id: ALICE.into(),
        reason: "court order".into(),
    };
    world.identity().block_user(block).await.unwrap();
    world.until_stopped("po-1", "court order").await;
    let late = world.initiate("po-2", "10.00", &valid_account()).await;
    assert_eq!(late.stopped_reason, "court order");
    // Released or not, it waits while another user's, released later, is paid.
    assert!(world.release("po-1").await.released);
    let other = wire::InitiatePayoutRequest {
        context: ctx(),
        payout: Some(wire::PayoutRequest {
            payout_id: "bobs".into(),
            user_id: "bob".into(),
            amount: rub("1.00"),
            bank_account: valid_account(),
        }),
    };
    world.payments().initiate_payout(other).await.unwrap();
    world.release("bobs").await;
    world.until_payout("bobs", SUCCESS).await;
    assert!(!world.payout("po-1").await.sent);

    // The block is lifted, the name is still on a list.
    let listed = |sanctioned| UpdateUserRequest {
        context: ctx(),
        user_id: ALICE.into(),
        sanctioned: Some(sanctioned),
        ..Default::default()
    };
    world.identity().update_user(listed(true)).await.unwrap();
    let unblock = UnblockUserRequest {
        context: ctx(),
        user_id: ALICE.into(),
        reason: "lifted".into(),
    };
    world.identity().unblock_user(unblock).await.unwrap();
    world.until_stopped("po-1", "Sanctions list hit").await;
    world.identity().update_user(listed(false)).await.unwrap();
    world.until_payout("po-1", SUCCESS).await;
    assert_eq!(world.transfers().await.len(), 2);
    world.stop().await;
}

// rows: R248
#[tokio::test]
async fn r248_a_payout_goes_on_after_a_restart() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.set_fault(BankFault::HoldTransfer, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    until(async || (!world.payout("po-1").await.bank_transfer_id.is_empty()).then_some(())).await;
    let folder = world.stop().await;
    let world = World::open(folder, |_| ()).await;
    assert_eq!(world.payout("po-1").await.status, PENDING);
    world.set_fault(BankFault::None, "").await;
    world.until_payout("po-1", SUCCESS).await;
    assert_eq!(world.transfers().await.len(), 1);
    assert_eq!(world.bank_balance().await, "90.00");
    world.stop().await;
}
