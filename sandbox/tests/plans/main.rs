//! No statement of the sandboxes scans a table.
//!
//! Every statement that identity and bank execute in the life of users, limits, codes and transfers
//! is explained on the database it ran on. A test binary of its own, because the record of
//! statements is process-wide.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use events::{Embedded, Log};
use prost::Message;
use proto::cfa::v1::CfaIssuedEvent;
use proto::common::v1::{KycStatus, LimitType, OperationType, RequestContext};
use proto::convert::{to_monetary_amount_minor, to_money, to_timestamp_us};
use proto::identity::v1::{self as identity, identity_service_client::IdentityServiceClient};
use proto::sandbox::v1::{self as bank, sandbox_bank_service_client::SandboxBankServiceClient};
use rail::{
    Rub, account,
    client::BankClient,
    keys::Keys,
    messages::{CreateQr, Kopecks, Status},
    policy::ClientPolicy,
    purpose_code::Requisites,
};
use rpc::Channel;
use sandbox::bank::BankConfig;
use sandbox::identity::{IdentityConfig, IdentityDeps};
use service_kit::Clock;
use testkit::plans::{self, Allowed};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const OPERATOR: &str = "sandbox.operator";

const ALLOWED: [Allowed; 2] = [
    Allowed {
        statement: "DELETE FROM faults",
        reason: "a few faults, set by hand",
    },
    Allowed {
        statement: "FROM _sqlx_migrations",
        reason: "one row per migration, at startup",
    },
];

fn ctx() -> Option<RequestContext> {
    testkit::messages::context(&testkit::messages::fresh())
}

async fn until<F: Future<Output = bool>>(seen: impl Fn() -> F) {
    let waiting = async {
        while !seen().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let waited = tokio::time::timeout(testkit::PATIENCE, waiting);
    waited.await.expect("the expected state arrives in time");
}

async fn users(folder: &Path) {
    let log = Arc::new(Embedded::open(folder.join("log")).await.unwrap());
    let stop = CancellationToken::new();
    let config = IdentityConfig {
        data_dir: folder.into(),
        ..IdentityConfig::default()
    };
    let deps = IdentityDeps { log: log.clone() };
    // The day of the clock is the day of the event below, also if midnight passes meanwhile.
    let now_us = service_kit::clock::now_us();
    let clock = Clock::manual(now_us);
    let handle = sandbox::identity::start_with_clock(config, deps, clock, stop.clone());
    let handle = handle.await.unwrap();
    let slot = testkit::in_memory(handle.service().routes);
    let client = || IdentityServiceClient::new(Channel::local(&slot, OPERATOR));

    for user_id in ["alice", ""] {
        let ask = identity::CreateUserRequest {
            context: ctx(),
            user_id: user_id.into(),
            kyc_status: KycStatus::Standard.into(),
            full_name: "A name".into(),
            ..Default::default()
        };
        for _ in 0..2 {
            client().create_user(ask.clone()).await.unwrap();
        }
    }
    let user_id = "alice".to_owned();
    let update = identity::UpdateUserRequest {
        context: ctx(),
        user_id: user_id.clone(),
        bank_account: Some(account::number("40817", 1)),
        ..Default::default()
    };
    let approved = || IdentityServiceClient::new(Channel::local(&slot, testkit::APPROVED));
    approved().update_user(update).await.unwrap();
    for (actor, user_id) in [
        ("", ""),
        ("operator", ""),
        ("", "alice"),
        ("operator", "alice"),
    ] {
        let list = identity::ListAuditRecordsRequest {
            actor: actor.into(),
            user_id: user_id.into(),
            ..Default::default()
        };
        let listed = client().list_audit_records(list).await.unwrap();
        assert!(!listed.into_inner().records.is_empty(), "{actor} {user_id}");
    }
    let list = identity::ListUsersRequest::default();
    let listed = client().list_users(list).await.unwrap();
    assert_eq!(listed.into_inner().users.len(), 2);
    let limit = identity::SetLimitRequest {
        context: ctx(),
        user_id: user_id.clone(),
        limit_type: LimitType::Deposit.into(),
        daily_limit: Some(to_money(1_000_000)),
        refuse_with: String::new(),
    };
    client().set_limit(limit).await.unwrap();
    let sanctions = identity::CheckSanctionsRequest {
        context: ctx(),
        user_id: user_id.clone(),
        payload: "p".into(),
    };
    client().check_sanctions(sanctions).await.unwrap();
    let service = || IdentityServiceClient::new(Channel::local(&slot, "sandbox.service"));
    let reserve = identity::ReserveLimitRequest {
        context: ctx(),
        reservation_id: "op-1".into(),
        user_id: user_id.clone(),
        limit_type: LimitType::Withdrawal.into(),
        amount: Some(to_money(100)),
        operation_type: OperationType::Withdrawal.into(),
    };
    service().reserve_limit(reserve).await.unwrap();
    let cancel = identity::CancelLimitRequest {
        context: ctx(),
        reservation_id: "op-1".into(),
    };
    service().cancel_limit(cancel).await.unwrap();

    let issued = CfaIssuedEvent {
        instrument_id: "CFA-RUB".into(),
        holder_id: user_id.clone(),
        amount: Some(to_monetary_amount_minor("CFA-RUB", 777, 2)),
        issued_at: Some(to_timestamp_us(now_us)),
        ..Default::default()
    };
    let event = events::Event {
        id: Uuid::now_v7(),
        topic: events::topics::CFA.into(),
        key: "k".into(),
        type_name: "dfa.cfa.v1.CfaIssuedEvent".into(),
        subject: "k".into(),
        source: "test".into(),
        correlation_id: "c".into(),
        occurred_at_us: now_us,
        payload: issued.encode_to_vec(),
    };
    log.publish(&[event]).await.unwrap();
    until(|| async {
        let ask = identity::GetLimitsRequest {
            context: None,
            user_id: user_id.clone(),
        };
        let limits = client().get_limits(ask).await.unwrap().into_inner().limits;
        let used = limits
            .into_iter()
            .filter_map(|limit| limit.used_today?.amount);
        used.into_iter().any(|amount| amount.value == "7.77")
    })
    .await;
    plans::until_recorded("DELETE FROM outbox WHERE position <=").await;
    stop.cancel();
    slot.clear();
    handle.stopped().await;
    log.close().await;
}

async fn money(folder: &Path) {
    let stop = CancellationToken::new();
    let config = BankConfig {
        data_dir: folder.into(),
        keys_dir: folder.join("keys"),
        listen: "127.0.0.1:0".parse().unwrap(),
        // No listener: webhooks stay queued.
        webhook_url: "http://127.0.0.1:9/webhook".into(),
        ..BankConfig::default()
    };
    let handle = sandbox::bank::start(config, stop.clone()).await.unwrap();
    let slot = testkit::in_memory(handle.service().routes);
    let hand = || SandboxBankServiceClient::new(Channel::local(&slot, OPERATOR));
    let client = BankClient::new(
        &format!("http://{}", handle.address()),
        &Requisites::default().account_number,
        Keys::load_or_create(&folder.join("keys")).unwrap().signer,
        ClientPolicy::default(),
    );
    let client = client.unwrap();

    let code = CreateQr {
        payment_id: "p1".into(),
        amount: Kopecks(10_000),
        purpose: "test".into(),
        life_seconds: 900,
    };
    let code = client.create_qr(&code).await.unwrap();
    let pay = bank::PayRequest {
        context: ctx(),
        qr_payload: code.qr_payload,
        ..Default::default()
    };
    for _ in 0..2 {
        hand().pay(pay.clone()).await.unwrap();
    }
    client.payment_status("p1").await.unwrap();
    for fault in [bank::BankFault::HoldTransfer, bank::BankFault::None] {
        let fault = bank::SetFaultRequest {
            context: ctx(),
            fault: fault.into(),
            account: String::new(),
        };
        hand().set_fault(fault).await.unwrap();
    }
    let to = account::number("40817", 1);
    let amount = Rub::from_kopecks(4_000);
    let ordered = client.initiate_transfer("r1", &to, amount, "x").await;
    let transfer_id = match ordered.unwrap() {
        rail::client::TransferOrderResult::Accepted(report)
        | rail::client::TransferOrderResult::Refused(report) => report.transfer_id,
    };
    until(|| async {
        let report = client.transfer_status(&transfer_id).await.unwrap();
        report.status == Status::Success
    })
    .await;
    let list = bank::ListTransfersRequest::default();
    hand().list_transfers(list).await.unwrap();
    let balance = bank::GetBankBalanceRequest::default();
    hand().get_bank_balance(balance).await.unwrap();
    plans::until_recorded("UPDATE webhooks SET state").await;
    stop.cancel();
    slot.clear();
    handle.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_a_table() {
    plans::record();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    users(folder.path()).await;
    money(folder.path()).await;

    let files = ["identity.db", "bank.db"].map(|file| folder.path().join(file));
    let explained = plans::explain(&[&files[0], &files[1]]).await;
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(&[
        "FROM users WHERE user_id =",
        "FROM users WHERE idempotency_key = $1 AND generated",
        "FROM users WHERE onchain_address =",
        "FROM users WHERE (created_at_us, user_id) <",
        "FROM limits WHERE user_id =",
        "FROM uses WHERE user_id =",
        "FROM reservations WHERE reservation_id =",
        "INSERT INTO reservations",
        "FROM audit_records WHERE sequence =",
        "FROM audit_records WHERE sequence <",
        "AND object_id =",
        "INSERT INTO audit_records",
        "FROM calls WHERE call =",
        "DELETE FROM calls WHERE rowid IN",
        "INSERT INTO inbox",
        "DELETE FROM outbox WHERE position <=",
        "FROM account WHERE account_number =",
        "FROM codes WHERE payment_id =",
        "FROM codes WHERE payload =",
        "FROM transfers WHERE request_id =",
        "FROM transfers WHERE transfer_id =",
        "FROM transfers WHERE status = 'PENDING'",
        "FROM transfers WHERE (created_at_us, transfer_id) <",
        "FROM webhooks WHERE state = 'QUEUED'",
        "UPDATE webhooks SET state",
        "FROM faults WHERE fault =",
    ]);
}
