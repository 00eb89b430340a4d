//! Payouts: recorded, released, ordered once, confirmed or failed.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Bytes, extract::State};
use http::HeaderMap;
use proto::{
    chain::v1::ReceiptStatus,
    common::v1 as common,
    identity::v1::{BlockUserRequest, UnblockUserRequest, UpdateUserRequest},
    payments::v1::{self as wire, PaymentMethod},
    sandbox::v1::BankFault,
};
use rail::{account, messages::TransferOrder};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle};
use tonic::Code;

use crate::world::{
    ALICE, Setup, World, amount_of, ctx, ctx_with, http_client, in_time, intent_ask, rub,
    transfer_notice, until, valid_account,
};

const PENDING: i32 = common::PaymentStatus::Pending as i32;
const SUCCESS: common::PaymentStatus = common::PaymentStatus::Success;
const FAILED: common::PaymentStatus = common::PaymentStatus::Failed;

async fn cancel(world: &World, payout_id: &str, code: &str) -> Result<wire::Payout, tonic::Status> {
    let ask = wire::CancelPayoutRequest {
        context: ctx(),
        payout_id: payout_id.into(),
        failure_code: code.into(),
    };
    // One person does not cancel a payout (D32).
    let alone = world.payments().cancel_payout(ask.clone()).await;
    let reason = rpc::status::reason(&alone.unwrap_err());
    assert_eq!(reason.as_deref(), Some("APPROVAL_REQUIRED"));
    let answer = world.services().cancel_payout(ask).await?;
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
    // Nothing is sent before the release.
    let (status, body) = world.get("/payouts/po-1").await;
    assert_eq!((status, body["status"].as_str()), (200, Some("PENDING")));
    assert!(world.transfers().await.is_empty());

    world.identity_calls.lock().unwrap().clear();
    world.release("po-1").await;
    let paid = world.until_payout("po-1", SUCCESS).await;
    assert!(paid.sent && !paid.bank_transfer_id.is_empty());
    assert_eq!(
        *world.identity_calls.lock().unwrap(),
        ["CheckSanctions alice po-1"]
    );
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
    let again = world.try_initiate("po-1", ALICE, "90.00", "another");
    assert_eq!(again.await.unwrap(), first);
    world.release("po-1").await;
    world.release("po-1").await;
    let paid = world.until_payout("po-1", SUCCESS).await;
    assert_eq!(world.release("po-1").await, paid);
    assert_eq!(cancel(&world, "po-1", "BURN_REVERTED").await.unwrap(), paid);
    assert_eq!(world.transfers().await.len(), 1);
    let refused = world.try_release("none").await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::NotFound, "Payout not found")
    );
    world.stop().await;
}

// rows: R123 R318
#[tokio::test]
async fn r123_a_repeated_key_returns_its_payout() {
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
    // The key decides, also with other fields.
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
    world.stop().await;
}

// rows: R123 R333
#[tokio::test]
async fn r333_market_supervisors_see_no_whole_account_of_a_payout() {
    let world = World::start().await;
    let whole = valid_account();
    let masked = account::masked(&whole);
    world.initiate("po-1", "10.00", &whole).await;
    let own = format!("investor.{ALICE}");
    for (caller, seen) in [
        ("operator", &whole),
        ("treasury", &whole),
        ("compliance", &whole),
        ("service", &whole),
        (own.as_str(), &whole),
        ("auditor", &whole),
        ("market-supervisor", &masked),
    ] {
        let mut client = world.payments_as(&format!("sandbox.{caller}"));
        let ask = wire::GetPayoutRequest {
            context: None,
            payout_id: "po-1".into(),
        };
        let read = client.get_payout(ask).await.unwrap();
        let payout = read.into_inner().payout.unwrap();
        assert_eq!(&payout.bank_account, seen, "{caller}");
        let ask = wire::ListPayoutsRequest {
            user_id: ALICE.into(),
            ..Default::default()
        };
        let listed = client.list_payouts(ask).await.unwrap();
        assert_eq!(listed.into_inner().payouts, [payout], "{caller}");
    }
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

/// Asserts that the release is refused as `expected` and the payout stays unreleased.
async fn assert_unreleased(world: &World, payout_id: &str, expected: (Code, &str, &str)) {
    let refused = world.try_release(payout_id).await.unwrap_err();
    let reason = rpc::status::reason(&refused).unwrap_or_default();
    assert_eq!(
        (refused.code(), reason.as_str(), refused.message()),
        expected,
        "{payout_id}"
    );
    assert!(!world.payout(payout_id).await.released, "{payout_id}");
}

const NOT_BURNED: (Code, &str, &str) = (
    Code::FailedPrecondition,
    "NOT_BURNED",
    "No tokens of this user and amount were burned for this payout",
);
const NOT_REFUNDABLE: (Code, &str, &str) = (
    Code::FailedPrecondition,
    "DEPOSIT_NOT_REFUNDABLE",
    "Deposit is not open for a refund",
);

// rows: R333 R087
#[tokio::test]
async fn r333_no_token_of_a_person_records_or_releases_a_payout() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.initiate("po-1", "77.00", &valid_account()).await;
    world.cfa.burn("po-1", ALICE, rub("77.00").unwrap().amount);
    for role in [
        "treasury",
        "operator",
        "compliance",
        "auditor",
        "investor.alice",
    ] {
        let mut person = world.payments_as(&format!("sandbox.{role}"));
        let ask = wire::InitiatePayoutRequest {
            context: ctx(),
            payout: Some(wire::PayoutRequest {
                payout_id: "po-2".into(),
                user_id: ALICE.into(),
                amount: rub("77.00"),
                bank_account: valid_account(),
            }),
        };
        let refused = person.initiate_payout(ask).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{role}");
        let ask = wire::ReleasePayoutRequest {
            context: ctx(),
            payout_id: "po-1".into(),
        };
        let refused = person.release_payout(ask).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{role}");
    }
    assert!(!world.payout("po-1").await.released);
    assert!(world.transfers().await.is_empty());
    world.stop().await;
}

// rows: R087 R123
#[tokio::test]
async fn t06_money_leaves_only_for_a_burn_that_succeeded() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.create_user("bob").await;
    world.initiate("po-1", "40.00", &valid_account()).await;
    let amount = || rub("40.00").unwrap().amount;
    assert_unreleased(&world, "po-1", NOT_BURNED).await;
    // Another user's burn, another amount, instrument or kind, or an ended redemption.
    world.cfa.burn("po-1", "bob", amount());
    assert_unreleased(&world, "po-1", NOT_BURNED).await;
    world.cfa.burn("po-1", ALICE, rub("39.99").unwrap().amount);
    assert_unreleased(&world, "po-1", NOT_BURNED).await;
    world.cfa.burn("po-1", ALICE, amount());
    world
        .cfa
        .change("po-1", |burn| burn.instrument_id = "BOND-1".into());
    assert_unreleased(&world, "po-1", NOT_BURNED).await;
    world.cfa.change("po-1", |burn| {
        burn.instrument_id = "CFA-RUB".into();
        burn.r#type = common::OperationType::Issuance as i32;
    });
    assert_unreleased(&world, "po-1", NOT_BURNED).await;
    for status in [
        common::OperationStatus::Created,
        common::OperationStatus::Processing,
        common::OperationStatus::Blocked,
        common::OperationStatus::Rejected,
        common::OperationStatus::Failed,
    ] {
        world.cfa.burn("po-1", ALICE, amount());
        world.cfa.set_operation("po-1", status, 1);
        assert_unreleased(&world, "po-1", NOT_BURNED).await;
    }
    world.cfa.burn("po-1", ALICE, amount());
    let receipt = |status: Option<ReceiptStatus>| {
        let mut receipts = world.cfa.receipts.lock().unwrap();
        receipts.clear();
        receipts.extend(status.map(|status| ("0xpo-1".to_owned(), status)));
    };
    receipt(Some(ReceiptStatus::Reverted));
    assert_unreleased(&world, "po-1", NOT_BURNED).await;
    receipt(None);
    let not_final = (
        Code::FailedPrecondition,
        "BURN_NOT_FINAL",
        "Burn is not final",
    );
    assert_unreleased(&world, "po-1", not_final).await;

    receipt(Some(ReceiptStatus::Success));
    world.cfa.is_chain_away.store(true, Ordering::SeqCst);
    let away = (
        Code::Unavailable,
        "UNAVAILABLE",
        "Blockchain is unavailable",
    );
    assert_unreleased(&world, "po-1", away).await;
    world.cfa.is_chain_away.store(false, Ordering::SeqCst);
    world.cfa.is_away.store(true, Ordering::SeqCst);
    let away = (
        Code::Unavailable,
        "UNAVAILABLE",
        "CFA service is unavailable",
    );
    assert_unreleased(&world, "po-1", away).await;
    assert!(world.transfers().await.is_empty());
    world.cfa.is_away.store(false, Ordering::SeqCst);
    world.try_release("po-1").await.unwrap();
    world.until_payout("po-1", SUCCESS).await;
    assert_eq!(world.bank_balance().await, "60.00");
    world.stop().await;
}

// rows: R300 R318
#[tokio::test]
async fn t24_only_a_refused_deposit_is_refunded_and_only_once() {
    let world = World::start().await;
    world.create_user("bob").await;
    world.fund("100.00").await;
    let account = valid_account();
    let deposit = world.fund("40.00").await.payment_id;
    let refund = format!("refund-{deposit}");
    let rejected = common::OperationStatus::Rejected;

    // Unknown deposit, unpaid, another user's, another amount, tokens already issued.
    let unpaid = world.qr("10.00").await.payment_id;
    world.cfa.set_operation(&unpaid, rejected, 0);
    world.cfa.set_operation(&deposit, rejected, 0);
    let issued = world.fund("10.00").await.payment_id;
    for (payout_id, user_id, amount) in [
        ("refund-invented", ALICE, "40.00"),
        (&format!("refund-{unpaid}"), ALICE, "10.00"),
        (&format!("{refund}:7"), "bob", "40.00"),
        (&format!("{refund}:8"), ALICE, "40.01"),
        (&format!("refund-{issued}"), ALICE, "10.00"),
    ] {
        let recorded = world.try_initiate(payout_id, user_id, amount, &account);
        let refused = recorded.await.unwrap_err();
        let reason = rpc::status::reason(&refused).unwrap_or_default();
        let refused = (refused.code(), reason.as_str(), refused.message());
        assert_eq!(refused, NOT_REFUNDABLE, "{payout_id}");
    }

    // Tokens issued between record and release, by an operator's retry.
    world.initiate(&refund, "40.00", &account).await;
    let second = format!("{refund}:2");
    world.initiate(&second, "40.00", &account).await;
    for status in [
        common::OperationStatus::Processing,
        common::OperationStatus::OnchainSubmitted,
        common::OperationStatus::Finalized,
    ] {
        world.cfa.set_operation(&deposit, status, 5);
        assert_unreleased(&world, &refund, NOT_REFUNDABLE).await;
    }
    world.cfa.set_operation(&deposit, rejected, 0);
    world.cfa.is_away.store(true, Ordering::SeqCst);
    let away = (
        Code::Unavailable,
        "UNAVAILABLE",
        "CFA service is unavailable",
    );
    assert_unreleased(&world, &refund, away).await;
    world.cfa.is_away.store(false, Ordering::SeqCst);

    world.set_fault(BankFault::HoldTransfer, "").await;
    world.try_release(&refund).await.unwrap();
    assert_unreleased(&world, &second, NOT_REFUNDABLE).await;
    world.set_fault(BankFault::None, "").await;
    world.until_payout(&refund, SUCCESS).await;
    world
        .until_status(&deposit, common::PaymentStatus::Refunded)
        .await;
    assert_unreleased(&world, &second, NOT_REFUNDABLE).await;
    assert_eq!(world.transfers().await.len(), 1);
    assert_eq!(world.bank_balance().await, "110.00");
    world.stop().await;
}

// rows: R300
#[tokio::test]
async fn t24_a_refund_refused_by_the_bank_can_be_retried() {
    let world = World::start().await;
    let deposit = world.fund("40.00").await.payment_id;
    let rejected = common::OperationStatus::Rejected;
    world.cfa.set_operation(&deposit, rejected, 0);
    let closed = account::number("40817", 8);
    world.set_fault(BankFault::RefuseTransfer, &closed).await;
    let refund = format!("refund-{deposit}");
    world.initiate(&refund, "40.00", &closed).await;
    world.try_release(&refund).await.unwrap();
    world.until_payout(&refund, FAILED).await;
    let refunded = common::OperationStatus::Refunded;
    world.cfa.set_operation(&deposit, refunded, 0);
    let second = format!("{refund}:2");
    world.initiate(&second, "40.00", &valid_account()).await;
    world.try_release(&second).await.unwrap();
    world.until_payout(&second, SUCCESS).await;
    assert_eq!(world.bank_balance().await, "0.00");
    world.stop().await;
}

// rows: R123
#[tokio::test]
async fn t24_a_redemption_with_an_id_like_a_refund_is_not_a_refund() {
    let world = World::start().await;
    let deposit = world.fund("40.00").await.payment_id;
    world.fund("40.00").await;
    let rejected = common::OperationStatus::Rejected;
    world.cfa.set_operation(&deposit, rejected, 0);
    let payout_id = format!("refund-{deposit}");
    let amount = rub("40.00").unwrap().amount;
    world.cfa.burn(&payout_id, ALICE, amount);
    world.initiate(&payout_id, "40.00", &valid_account()).await;
    world.try_release(&payout_id).await.unwrap();
    world.until_payout(&payout_id, SUCCESS).await;
    assert_eq!(world.intent(&deposit).await.status, SUCCESS as i32);
    world.stop().await;
}

// rows: R123 R318
#[tokio::test]
async fn r123_a_payout_goes_only_to_the_account_of_the_profile() {
    let world = World::start().await;
    let other = account::number("40817", 9);
    let refusal = async |payout_id: &str, user_id: &str, account: &str| {
        let recorded = world.try_initiate(payout_id, user_id, "10.00", account);
        let refused = recorded.await.unwrap_err();
        let reason = rpc::status::reason(&refused).unwrap_or_default();
        (refused.code(), reason, refused.message().to_owned())
    };
    let expected = |code: Code, reason: &str, text: &str| (code, reason.into(), text.to_owned());
    for account in [other.as_str(), "", "not an account"] {
        assert_eq!(
            refusal("po-1", ALICE, account).await,
            expected(
                Code::FailedPrecondition,
                "BANK_ACCOUNT_MISMATCH",
                "Bank account is not that of the user's profile"
            )
        );
    }
    assert_eq!(
        refusal("po-1", "ghost", &valid_account()).await,
        expected(Code::NotFound, "USER_NOT_FOUND", "User not found")
    );
    let first = world.initiate("po-2", "10.00", &valid_account()).await;
    // A repeat returns the stored payout although the profile has changed.
    world.set_account(ALICE, &other).await;
    let again = world.try_initiate("po-2", ALICE, "10.00", &first.bank_account);
    assert_eq!(again.await.unwrap(), first);
    world.cut_identity();
    assert_eq!(
        refusal("po-1", ALICE, &other).await,
        expected(
            Code::Unavailable,
            "UNAVAILABLE",
            "Identity service is unavailable"
        )
    );
    let listed = world
        .payments()
        .list_payouts(wire::ListPayoutsRequest::default())
        .await
        .unwrap();
    assert_eq!(listed.into_inner().payouts.len(), 1);
    world.stop().await;
}

#[tokio::test]
async fn the_account_in_the_readme_accepts_a_payout() {
    let readme = include_str!("../../../README.md");
    let (_, rest) = readme.split_once(r#""bankAccount":""#).unwrap();
    let (account, _) = rest.split_once('"').unwrap();
    assert_eq!(account::check(account), Ok(()));
    let world = World::start().await;
    world.fund("100.00").await;
    world.initiate("po-1", "10.00", account).await;
    world.release("po-1").await;
    world.until_payout("po-1", SUCCESS).await;
    world.stop().await;
}

// rows: R321
#[tokio::test]
async fn r321_a_refusal_of_the_bank_fails_the_payout_with_its_reason() {
    let world = World::start().await;
    world.fund("100.00").await;
    // Refused on acceptance: an invalid account, or more than the balance. Refused at clearing: an
    // account that is closed at the recipient's bank.
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
async fn r321_pending_ends_nothing_and_an_expired_transfer_fails_the_payout() {
    let world = World::start().await;
    world.fund("100.00").await;
    world.set_fault(BankFault::HoldTransfer, "").await;
    world.initiate("po-1", "40.00", &valid_account()).await;
    world.release("po-1").await;
    let transfer_id = until(async || {
        let transfer_id = world.payout("po-1").await.bank_transfer_id;
        (!transfer_id.is_empty()).then_some(transfer_id)
    })
    .await;
    let report = async |webhook_id: &str, status: &str| {
        let notice = transfer_notice(&transfer_id, "po-1", status, "40.00");
        let (answer, text) = world.post_webhook(webhook_id, &notice).await;
        assert_eq!(answer, 200, "{text}");
        world.payout("po-1").await
    };
    let events = async |name: &str| -> Vec<String> {
        let events = world.events().await.into_iter();
        let ours = events.filter(|event| event.short_type() == name && event.key == "po-1");
        ours.map(|event| event.type_name).collect()
    };
    for webhook_id in ["w1", "w2"] {
        assert_eq!(report(webhook_id, "PENDING").await.status, PENDING);
    }
    assert!(events("PayoutConfirmedEvent").await.is_empty());
    assert!(events("PayoutFailedEvent").await.is_empty());

    let failed = report("w3", "EXPIRED").await;
    assert_eq!(
        (failed.status, failed.failure_code.as_str()),
        (FAILED as i32, "REFUSED_BY_BANK")
    );
    assert_eq!(events("PayoutFailedEvent").await.len(), 1);
    assert!(events("PayoutConfirmedEvent").await.is_empty());
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
        "no token is missing, so none must be minted"
    );
    let published: Vec<wire::PayoutFailedEvent> =
        world.events_of("PayoutFailedEvent", "other").await;
    assert_eq!(published.len(), 1);

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
async fn r127_an_unavailable_bank_delays_a_payout_and_repeats_nothing() {
    let world = World::start_with(|setup| setup.payments.client.breaker_open_ms = 30).await;
    world.fund("100.00").await;
    world.set_fault(BankFault::Unavailable, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    until(async || world.payout("po-1").await.sent.then_some(())).await;
    // Health reports it.
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
async fn r127_the_bank_is_called_again_after_its_failure_under_load() {
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

/// Proxy to the bank that drops the first responses to transfer orders.
#[derive(Clone, Default)]
struct Lossy {
    bank_url: Arc<std::sync::OnceLock<String>>,
    to_lose: Arc<AtomicU32>,
    /// When transfer orders arrived, on the clock of the service.
    ordered_at_us: Arc<Mutex<Vec<i64>>>,
    /// Transfers are no longer found.
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
    if is_order {
        let now_us = service_kit::clock::now_us();
        lossy.ordered_at_us.lock().unwrap().push(now_us);
    }
    let is_status = method == "GET" && uri.path().starts_with("/bank/v1/transfers/");
    if is_status && lossy.forgetful.load(Ordering::SeqCst) {
        return (http::StatusCode::NOT_FOUND, Bytes::new());
    }
    let url = format!("{}{uri}", lossy.bank_url.get().unwrap());
    let mut request = http_client().request(method, url).body(body);
    for name in ["content-type", "x-key-id", "x-timestamp", "x-signature"] {
        request = request.header(name, &headers[name]);
    }
    let answer = request.send().await.unwrap();
    let (status, bytes) = (answer.status(), answer.bytes().await.unwrap());
    if is_order {
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
async fn r127_a_lost_response_is_retried_with_the_same_request_id() {
    let lossy = Lossy {
        bank_url: Arc::default(),
        to_lose: Arc::new(AtomicU32::new(3)),
        ordered_at_us: Arc::default(),
        forgetful: Arc::default(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy_url = format!("http://{}", listener.local_addr().unwrap());
    let proxy = Router::new().fallback(pass_on).with_state(lossy.clone());
    let proxy = tokio::spawn(async move { axum::serve(listener, proxy).await.unwrap() });
    let world = World::start_with(|setup| {
        setup.bank_url = Some(proxy_url);
        setup.payments.payout_pause_first_ms = 50;
        setup.payments.payout_pause_most_ms = 100;
    })
    .await;
    lossy.bank_url.set(world.bank_url.clone()).unwrap();
    world.fund("100.00").await;
    // Otherwise the bank's webhook would end the payout before the order is repeated.
    world.set_fault(BankFault::WebhookLost, "").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    let released_at_us = service_kit::clock::now_us();
    world.release("po-1").await;
    world.until_payout("po-1", SUCCESS).await;
    // Pauses of 50, 100 and 100 ms: doubled, up to the longest one.
    let ordered_at_us = lossy.ordered_at_us.lock().unwrap().clone();
    assert_eq!(ordered_at_us.len(), 4);
    for (at_us, least_ms) in ordered_at_us.iter().zip([0, 50, 150, 250]) {
        let waited_us = at_us - released_at_us;
        assert!(
            waited_us >= least_ms * 1_000,
            "{waited_us} us, {least_ms} ms"
        );
    }
    assert_eq!(world.transfers().await.len(), 1);
    assert_eq!(world.bank_balance().await, "90.00");
    world.stop().await;
    proxy.abort();
}

/// Proxy to the bank that passes on an order of a payout `slow…`, and a status poll of a slow
/// payment, only with a permit.
#[derive(Clone)]
pub struct Slow {
    bank: Lossy,
    pub permits: Arc<Semaphore>,
    pub slow_payments: Arc<Mutex<HashSet<String>>>,
    /// Request ids of all orders that arrived, and payment ids of all slow polls.
    arrived: Arc<Mutex<Vec<String>>>,
}

impl Slow {
    async fn start() -> (World, Slow, JoinHandle<()>) {
        Slow::start_with(|_| ()).await
    }

    /// A funded world whose calls to the bank never time out within a test.
    pub async fn start_with(change: impl FnOnce(&mut Setup)) -> (World, Slow, JoinHandle<()>) {
        let slow = Slow {
            bank: Lossy::default(),
            permits: Arc::new(Semaphore::new(0)),
            slow_payments: Arc::default(),
            arrived: Arc::default(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy_url = format!("http://{}", listener.local_addr().unwrap());
        let proxy = Router::new().fallback(pass_on_slowly);
        let proxy = proxy.with_state(slow.clone());
        let proxy = tokio::spawn(async move { axum::serve(listener, proxy).await.unwrap() });
        let world = World::start_with(|setup| {
            setup.bank_url = Some(proxy_url);
            setup.payments.client.call_timeout_ms = 600_000;
            change(setup);
        })
        .await;
        slow.bank.bank_url.set(world.bank_url.clone()).unwrap();
        world.fund("100.00").await;
        (world, slow, proxy)
    }

    pub fn arrived(&self) -> Vec<String> {
        self.arrived.lock().unwrap().clone()
    }

    pub async fn until_arrived(&self, requests: usize) {
        until(async || (self.arrived().len() == requests).then_some(())).await;
    }
}

async fn pass_on_slowly(
    State(slow): State<Slow>,
    method: http::Method,
    uri: http::Uri,
    headers: HeaderMap,
    body: Bytes,
) -> (http::StatusCode, Bytes) {
    if method == "POST" && uri.path() == "/bank/v1/transfers" {
        let order: TransferOrder = serde_json::from_slice(&body).unwrap();
        let is_slow = order.request_id.starts_with("slow");
        slow.arrived.lock().unwrap().push(order.request_id);
        if is_slow {
            slow.permits.acquire().await.unwrap().forget();
        }
    }
    let payment_id = uri.path().strip_prefix("/sbp/v1/payments/");
    let payment_id = payment_id.filter(|id| slow.slow_payments.lock().unwrap().contains(*id));
    if let Some(payment_id) = payment_id {
        slow.arrived.lock().unwrap().push(payment_id.to_owned());
        slow.permits.acquire().await.unwrap().forget();
    }
    pass_on(State(slow.bank), method, uri, headers, body).await
}

// rows: R127
#[tokio::test]
async fn r127_a_slow_response_of_the_bank_delays_only_its_payout() {
    let (world, slow, proxy) = Slow::start().await;
    world.initiate("slow", "10.00", &valid_account()).await;
    world.release("slow").await;
    slow.until_arrived(1).await;
    for payout_id in ["po-1", "po-2", "po-3"] {
        world.initiate(payout_id, "10.00", &valid_account()).await;
        world.release(payout_id).await;
        world.until_payout(payout_id, SUCCESS).await;
    }
    // Longer than the longest pause between attempts: the order is due again, but under way.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(world.payout("slow").await.status, PENDING);
    slow.permits.add_permits(1);
    world.until_payout("slow", SUCCESS).await;
    assert_eq!(slow.arrived(), ["slow", "po-1", "po-2", "po-3"]);
    assert_eq!(world.transfers().await.len(), 4);
    assert_eq!(world.bank_balance().await, "60.00");
    world.stop().await;
    proxy.abort();
}

// rows: R127
#[tokio::test]
async fn r127_at_most_four_payouts_are_at_the_bank_in_parallel() {
    let (world, slow, proxy) = Slow::start().await;
    let payout_ids: Vec<String> = (0..10).map(|n| format!("slow-{n}")).collect();
    for payout_id in &payout_ids {
        world.initiate(payout_id, "1.00", &valid_account()).await;
        world.release(payout_id).await;
    }
    slow.until_arrived(4).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut arrived = slow.arrived();
    arrived.sort();
    assert_eq!(arrived, payout_ids[..4]);
    slow.permits.add_permits(payout_ids.len());
    for payout_id in &payout_ids {
        world.until_payout(payout_id, SUCCESS).await;
    }
    arrived = slow.arrived();
    arrived.sort();
    assert_eq!(arrived, payout_ids, "each payout is ordered once");
    assert_eq!(world.bank_balance().await, "90.00");
    world.stop().await;
    proxy.abort();
}

// rows: R127 R248
#[tokio::test]
async fn r248_a_stop_does_not_wait_for_the_bank_and_the_payout_is_paid_once() {
    let (world, slow, proxy) = Slow::start().await;
    world.initiate("slow", "10.00", &valid_account()).await;
    world.release("slow").await;
    slow.until_arrived(1).await;
    let folder = world.stop().await;
    proxy.abort();
    let world = World::open(folder, |_| ()).await;
    world.until_payout("slow", SUCCESS).await;
    assert_eq!(world.transfers().await.len(), 1);
    assert_eq!(world.bank_balance().await, "90.00");
    world.stop().await;
}

// rows: R128
#[tokio::test]
async fn r128_unpollable_payout_does_not_stop_reconciliation() {
    let lossy = Lossy {
        bank_url: Arc::default(),
        to_lose: Arc::default(),
        ordered_at_us: Arc::default(),
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
async fn r126_an_order_that_the_bank_rejects_fails_the_payout() {
    // The ordering account differs from our account at the bank.
    let world =
        World::start_with(|setup| setup.bank.account_number = account::number("40702", 99)).await;
    world.fund("100.00").await;
    world.initiate("po-1", "10.00", &valid_account()).await;
    world.release("po-1").await;
    let failed = world.until_payout("po-1", FAILED).await;
    assert_eq!(failed.failure_code, "UNKNOWN_ACCOUNT");
    let published: Vec<wire::PayoutFailedEvent> =
        world.events_of("PayoutFailedEvent", "po-1").await;
    assert_eq!(published.len(), 1);
    assert!(world.transfers().await.is_empty());
    world.stop().await;
}

/// Arrival and body of each request.
type Requests = Arc<Mutex<Vec<(Instant, Bytes)>>>;

async fn refuse(State(requests): State<Requests>, body: Bytes) -> http::StatusCode {
    requests.lock().unwrap().push((Instant::now(), body));
    http::StatusCode::SERVICE_UNAVAILABLE
}

// rows: R127
#[tokio::test]
async fn r127_attempts_of_a_bank_call_wait_for_the_configured_pauses() {
    let requests = Requests::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let bank = Router::new().fallback(refuse).with_state(requests.clone());
    let bank = tokio::spawn(async move { axum::serve(listener, bank).await.unwrap() });
    let world = World::start_with(|setup| {
        setup.bank_url = Some(url);
        setup.payments.client.tries = 4;
        setup.payments.client.retry_pause_ms = 50;
    })
    .await;
    let ask = intent_ask(ALICE, "1.00", PaymentMethod::SbpQr);
    let mut payments = world.payments();
    let refused = in_time("the refusal", payments.create_payment_intent(ask)).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    let requests = requests.lock().unwrap().clone();
    assert_eq!(requests.len(), 4);
    // The pause begins after the answer to an attempt, so after its arrival, and doubles.
    for (pair, pause_ms) in requests.windows(2).zip([50, 100, 200]) {
        let waited = pair[1].0 - pair[0].0;
        assert!(
            waited >= Duration::from_millis(pause_ms),
            "{waited:?}, {pause_ms} ms"
        );
        assert_eq!(
            pair[1].1, pair[0].1,
            "every attempt has the same payment id"
        );
    }
    world.stop().await;
    bank.abort();
}

// rows: R127 R341
#[tokio::test]
async fn r127_a_hanging_bank_costs_bounded_time_and_attempts() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let attempts = Arc::<Mutex<Vec<Instant>>>::default();
    let seen = attempts.clone();
    let hanging = tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            held.push(listener.accept().await.unwrap());
            seen.lock().unwrap().push(Instant::now());
        }
    });
    let world = World::start_with(|setup| {
        setup.bank_url = Some(url);
        setup.payments.client.call_timeout_ms = 200;
        setup.payments.client.retry_pause_ms = 50;
    })
    .await;
    let ask = intent_ask(ALICE, "1.00", PaymentMethod::SbpQr);
    let mut payments = world.payments();
    let began = Instant::now();
    let refused = in_time("the refusal", payments.create_payment_intent(ask)).await;
    let took = began.elapsed();
    let refused = refused.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unavailable, "Bank is unavailable")
    );
    // Each attempt lasts the timeout; pauses of 50 and 100 ms follow the first two.
    let attempts = attempts.lock().unwrap().clone();
    assert_eq!(attempts.len(), 3);
    for (at, least_ms) in attempts.iter().zip([0, 250, 550]) {
        let waited = *at - began;
        assert!(
            waited >= Duration::from_millis(least_ms),
            "{waited:?}, {least_ms} ms"
        );
    }
    assert!(took >= Duration::from_millis(750), "{took:?}");
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
async fn t48_payouts_of_a_blocked_or_sanctioned_user_wait() {
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
    // It waits even when released, while another user's later release is paid.
    assert!(world.release("po-1").await.released);
    world
        .try_initiate("bobs", "bob", "1.00", &valid_account())
        .await
        .unwrap();
    world.release("bobs").await;
    world.until_payout("bobs", SUCCESS).await;
    assert!(!world.payout("po-1").await.sent);

    // Unblocked, but still on a sanctions list.
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
    world
        .approved_identity()
        .unblock_user(unblock)
        .await
        .unwrap();
    world.until_stopped("po-1", "Sanctions list hit").await;
    let mut approved = world.approved_identity();
    approved.update_user(listed(false)).await.unwrap();
    world.until_payout("po-1", SUCCESS).await;
    assert_eq!(world.transfers().await.len(), 2);
    world.stop().await;
}

// rows: R248
#[tokio::test]
async fn r248_a_payout_continues_after_a_restart() {
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
