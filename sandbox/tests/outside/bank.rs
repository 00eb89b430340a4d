//! The bank: its signed contract, its stored state, payments by the payer.

use std::path::Path;

use proto::{
    common::v1 as common,
    convert::to_money,
    sandbox::v1::{self as wire, sandbox_bank_service_client::SandboxBankServiceClient},
};
use rail::{
    Rub, account,
    client::{BankClient, BankError, TransferOrderResult},
    keys::Keys,
    messages::{CreateQr, Kopecks, Status},
    policy::ClientPolicy,
    purpose_code::Requisites,
    request_signature::{KEY_ID_HEADER, SIGNATURE_HEADER, Signer, TIMESTAMP_HEADER},
    sbp_link::{LinkKind, SbpLink},
};
use rpc::{Channel, LocalSlot};
use sandbox::bank::{BankConfig, BankHandle};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use uuid::Uuid;

use crate::in_time;

struct World {
    folder: TempDir,
    bank: BankHandle,
    slot: LocalSlot,
    stop: CancellationToken,
}

impl World {
    async fn open(folder: TempDir) -> World {
        let stop = CancellationToken::new();
        let config = BankConfig {
            data_dir: folder.path().into(),
            keys_dir: folder.path().join("keys"),
            listen: "127.0.0.1:0".parse().unwrap(),
            // No listener: webhooks stay queued.
            webhook_url: "http://127.0.0.1:9/webhook".into(),
            ..BankConfig::default()
        };
        let bank = sandbox::bank::start(config, stop.clone()).await.unwrap();
        let slot = testkit::in_memory(bank.service().routes);
        World {
            folder,
            bank,
            slot,
            stop,
        }
    }

    async fn stop(self) -> TempDir {
        self.stop.cancel();
        self.slot.clear();
        in_time("the bank's stop", self.bank.stopped()).await;
        self.folder
    }

    fn url(&self) -> String {
        format!("http://{}", self.bank.address())
    }

    fn client(&self) -> BankClient {
        self.client_with(Keys::load_or_create(&self.keys_dir()).unwrap().signer)
    }

    fn keys_dir(&self) -> Box<Path> {
        self.folder.path().join("keys").into()
    }

    fn client_with(&self, signer: Signer) -> BankClient {
        let account_number = Requisites::default().account_number;
        BankClient::new(
            &self.url(),
            &account_number,
            signer,
            ClientPolicy::default(),
        )
        .unwrap()
    }

    fn operator(&self) -> SandboxBankServiceClient<Channel> {
        SandboxBankServiceClient::new(Channel::local(&self.slot, "sandbox.operator"))
    }

    async fn pay(
        &self,
        payload: &str,
        kopecks: Option<i64>,
    ) -> Result<wire::PayResponse, tonic::Status> {
        let ask = wire::PayRequest {
            context: ctx(),
            qr_payload: payload.into(),
            amount: kopecks.map(to_money),
            outcome: 0,
        };
        Ok(self.operator().pay(ask).await?.into_inner())
    }

    async fn fund(&self, kopecks: i64) {
        let qr = self
            .client()
            .create_qr(&qr(&Uuid::now_v7().to_string(), kopecks))
            .await
            .unwrap();
        self.pay(&qr.qr_payload, None).await.unwrap();
    }
}

async fn new_world() -> World {
    World::open(tempfile::tempdir().unwrap()).await
}

fn ctx() -> Option<common::RequestContext> {
    testkit::messages::context(&testkit::messages::fresh())
}

fn qr(payment_id: &str, kopecks: i64) -> CreateQr {
    CreateQr {
        payment_id: payment_id.into(),
        amount: Kopecks(kopecks),
        purpose: "Пополнение баланса".into(),
        life_seconds: 900,
    }
}

fn rub(kopecks: i64) -> Rub {
    Rub::from_kopecks(kopecks)
}

fn report(ordered: TransferOrderResult) -> rail::messages::TransferReport {
    match ordered {
        TransferOrderResult::Accepted(report) | TransferOrderResult::Refused(report) => report,
    }
}

// rows: R021
#[tokio::test]
async fn r021_the_bank_ignores_requests_not_signed_by_the_gateway() {
    let world = new_world().await;
    world.fund(10_000).await;
    let stranger = Signer::from_pkcs8(&Signer::generate().unwrap()).unwrap();
    let refused = world
        .client_with(stranger)
        .initiate_transfer("r1", &account::number("40817", 1), rub(100), "steal")
        .await;
    assert!(matches!(refused, Err(BankError::Refused { code, .. }) if code == "SIGNATURE"));

    let keys = Keys::load_or_create(&world.keys_dir()).unwrap();
    let http = reqwest::Client::builder().timeout(testkit::PATIENCE);
    let http = http.build().unwrap();
    let path = "/bank/v1/transfers";
    let now_s = service_kit::clock::now_us() / 1_000_000;
    let order = |amount: &str| {
        format!(
            r#"{{"requestId":"r1","accountNumber":"{}","recipientAccount":"{}",
                "amount":{{"value":"{amount}","currency":"RUB"}},"purpose":"x"}}"#,
            Requisites::default().account_number,
            account::number("40817", 1)
        )
    };
    let send = |at_s: i64, signature: String, body: String| {
        http.post(format!("{}{path}", world.url()))
            .header(KEY_ID_HEADER, keys.signer.key_id())
            .header(TIMESTAMP_HEADER, at_s)
            .header(SIGNATURE_HEADER, signature)
            .body(body)
            .send()
    };
    let good = keys
        .signer
        .sign("POST", path, now_s, order("1.00").as_bytes());
    // Another amount than signed, an old request, no signature.
    let altered = send(now_s, good.clone(), order("99.00")).await.unwrap();
    assert_eq!(altered.status(), 401);
    let old_s = now_s - 1_000;
    let old = keys
        .signer
        .sign("POST", path, old_s, order("1.00").as_bytes());
    assert_eq!(send(old_s, old, order("1.00")).await.unwrap().status(), 401);
    let bare = http
        .get(format!("{}/sbp/v1/balance", world.url()))
        .send()
        .await
        .unwrap();
    assert_eq!(bare.status(), 401);
    let transfers = world
        .operator()
        .list_transfers(wire::ListTransfersRequest::default())
        .await;
    assert!(transfers.unwrap().into_inner().transfers.is_empty());
    assert_eq!(
        send(now_s, good, order("1.00")).await.unwrap().status(),
        200
    );
    world.stop().await;
}

// rows: R111 R134
#[tokio::test]
async fn r134_codes_are_real_links_paid_once() {
    let world = new_world().await;
    let client = world.client();
    let made = client.create_qr(&qr("p1", 150_050)).await.unwrap();
    assert_eq!(client.create_qr(&qr("p1", 150_050)).await.unwrap(), made);
    assert!(client.create_qr(&qr("p1", 1)).await.is_err());
    let link = SbpLink::parse(&made.qr_payload).unwrap();
    assert_eq!(
        (link.kind(), link.sum()),
        (LinkKind::Dynamic, Some(rub(150_050)))
    );
    assert!(link.id().starts_with("AD") && link.bank().starts_with("100000000"));
    assert!(rail::messages::time_us(&made.expires_at).unwrap() > service_kit::clock::now_us());
    let pending = client.payment_status("p1").await.unwrap();
    assert_eq!(
        (pending.status, pending.transaction_id),
        (Status::Pending, None)
    );
    assert!(matches!(
        client.payment_status("p2").await,
        Err(BankError::NotFound)
    ));

    let ask = wire::PayRequest {
        context: ctx(),
        qr_payload: made.payment_url.clone(),
        ..Default::default()
    };
    let paid = world
        .operator()
        .pay(ask.clone())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        world.operator().pay(ask).await.unwrap().into_inner(),
        paid,
        "one key, one payment"
    );
    let twice = world.pay(&made.payment_url, None).await.unwrap_err();
    assert_eq!(twice.message(), "Payment code is already paid");
    let report = client.payment_status("p1").await.unwrap();
    assert_eq!(
        (report.status, report.amount),
        (Status::Success, Kopecks(150_050))
    );
    assert_eq!(report.transaction_id, Some(paid.transaction_id));
    assert_eq!(client.balance().await.unwrap(), rub(150_050));

    let forged = made.qr_payload.replace("sum=150050", "sum=1");
    assert_eq!(
        world.pay(&forged, None).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    let stranger = SbpLink::new(&"A".repeat(32), LinkKind::Static, "100000000007", None).unwrap();
    let unknown = world.pay(&stranger.to_string(), None).await.unwrap_err();
    assert_eq!(
        (unknown.code(), unknown.message()),
        (Code::NotFound, "Payment code not found")
    );
    world.stop().await;
}

// rows: R135
#[tokio::test]
async fn r135_one_request_id_is_one_transfer() {
    let world = new_world().await;
    world.fund(10_000).await;
    let client = world.client();
    let to = account::number("40817", 1);
    let first = report(
        client
            .initiate_transfer("r1", &to, rub(4_000), "x")
            .await
            .unwrap(),
    );
    let again = report(
        client
            .initiate_transfer("r1", &to, rub(4_000), "x")
            .await
            .unwrap(),
    );
    assert_eq!(again.transfer_id, first.transfer_id);
    let other = client.initiate_transfer("r1", &to, rub(5_000), "x").await;
    assert!(matches!(other, Err(BankError::Refused { code, .. }) if code == "REQUEST_ID_REUSED"));
    let executed = async {
        while client
            .transfer_status(&first.transfer_id)
            .await
            .unwrap()
            .status
            != Status::Success
        {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    in_time("the transfer is executed", executed).await;
    assert_eq!(client.balance().await.unwrap(), rub(6_000));
    assert!(matches!(
        client.transfer_status("none").await,
        Err(BankError::NotFound)
    ));

    // A refusal on acceptance has an error register, which is the same for every repeat.
    for (request_id, account, kopecks, code) in [
        ("r2", "1234", 1, "INVALID_RECIPIENT_ACCOUNT"),
        ("r3", to.as_str(), 6_001, "INSUFFICIENT_FUNDS"),
    ] {
        for _ in 0..2 {
            let refused = client
                .initiate_transfer(request_id, account, rub(kopecks), "x")
                .await
                .unwrap();
            let TransferOrderResult::Refused(refused) = refused else {
                panic!("{request_id} was accepted");
            };
            assert_eq!(refused.status, Status::Failed);
            assert_eq!(refused.error_register[0].code, code);
        }
    }
    assert_eq!(client.balance().await.unwrap(), rub(6_000));
    world.stop().await;
}

#[tokio::test]
async fn money_and_transfers_survive_a_restart() {
    let world = new_world().await;
    world.fund(10_000).await;
    let hold = wire::SetFaultRequest {
        context: ctx(),
        fault: wire::BankFault::HoldTransfer as i32,
        account: String::new(),
    };
    world.operator().set_fault(hold.clone()).await.unwrap();
    let to = account::number("40817", 1);
    let ordered = world
        .client()
        .initiate_transfer("r1", &to, rub(4_000), "x")
        .await
        .unwrap();
    let ordered = report(ordered);
    // Accepted transfers are reserved.
    let over = world
        .client()
        .initiate_transfer("r2", &to, rub(6_001), "x")
        .await
        .unwrap();
    assert!(matches!(over, TransferOrderResult::Refused(_)));

    let world = World::open(world.stop().await).await;
    let client = world.client();
    assert_eq!(client.balance().await.unwrap(), rub(10_000));
    let held = client.transfer_status(&ordered.transfer_id).await.unwrap();
    assert_eq!(held.status, Status::Pending);
    let clear = wire::SetFaultRequest {
        context: ctx(),
        fault: wire::BankFault::None as i32,
        ..hold
    };
    world.operator().set_fault(clear).await.unwrap();
    let executed = async {
        while client.balance().await.unwrap() != rub(6_000) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    in_time("the transfer is executed", executed).await;
    world.stop().await;
}

fn is_repeat<T>(answer: &tonic::Response<T>) -> bool {
    answer.metadata().contains_key("idempotent-replayed")
}

#[tokio::test]
async fn d50_a_payment_and_a_fault_act_once_per_key() {
    let world = new_world().await;
    let client = world.client();
    let made = client.create_qr(&qr("p1", 1_000)).await.unwrap();
    let other = client.create_qr(&qr("p2", 2_000)).await.unwrap();
    let pay = wire::PayRequest {
        context: ctx(),
        qr_payload: made.qr_payload,
        ..Default::default()
    };
    let first = world.operator().pay(pay.clone()).await.unwrap();
    // Other content under the key gets the stored answer and pays nothing.
    let pay = wire::PayRequest {
        qr_payload: other.qr_payload,
        ..pay
    };
    let again = world.operator().pay(pay).await.unwrap();
    assert!(is_repeat(&again) && !is_repeat(&first));
    assert_eq!(again.into_inner(), first.into_inner());
    let pending = client.payment_status("p2").await.unwrap();
    assert_eq!(pending.status, Status::Pending);
    assert_eq!(client.balance().await.unwrap(), rub(1_000));

    let fault = |context, fault: wire::BankFault| wire::SetFaultRequest {
        context,
        fault: fault.into(),
        account: String::new(),
    };
    let hold = fault(ctx(), wire::BankFault::HoldTransfer);
    world.operator().set_fault(hold.clone()).await.unwrap();
    let clear = fault(ctx(), wire::BankFault::None);
    world.operator().set_fault(clear).await.unwrap();
    // A late repeat does not set the fault again.
    let repeat = world.operator().set_fault(hold).await.unwrap();
    assert!(is_repeat(&repeat));
    let to = account::number("40817", 1);
    let ordered = client.initiate_transfer("r1", &to, rub(400), "x").await;
    let ordered = report(ordered.unwrap());
    until_executed(&client, &ordered.transfer_id).await;
    world.stop().await;
}

async fn until_executed(client: &BankClient, transfer_id: &str) {
    let executed = async {
        while client.transfer_status(transfer_id).await.unwrap().status != Status::Success {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    in_time("the transfer is executed", executed).await;
}

// rows: R134
#[tokio::test]
async fn r134_a_code_that_failed_or_expired_is_not_paid() {
    let world = new_world().await;
    let client = world.client();
    for outcome in [
        common::PaymentStatus::Failed,
        common::PaymentStatus::Expired,
    ] {
        let id = outcome.as_str_name();
        let made = client.create_qr(&qr(id, 1_000)).await.unwrap();
        let fail = wire::PayRequest {
            context: ctx(),
            qr_payload: made.qr_payload.clone(),
            outcome: outcome.into(),
            ..Default::default()
        };
        world.operator().pay(fail).await.unwrap();
        let refused = world.pay(&made.qr_payload, None).await.unwrap_err();
        assert_eq!(refused.message(), "Payment code has ended", "{id}");
        let status = client.payment_status(id).await.unwrap().status;
        assert_ne!(status, Status::Success, "{id}");
    }
    assert_eq!(client.balance().await.unwrap(), rub(0));
    // No payment makes the balance unreadable.
    world.fund(i64::MAX - 1).await;
    let made = client.create_qr(&qr("p3", 2)).await.unwrap();
    let refused = world.pay(&made.qr_payload, None).await.unwrap_err();
    assert_eq!(refused.message(), "Balance would be too large");
    assert_eq!(client.balance().await.unwrap(), rub(i64::MAX - 1));
    world.stop().await;
}

// rows: R135
#[tokio::test]
async fn r135_one_transfer_that_cannot_be_cleared_does_not_stop_the_others() {
    let world = new_world().await;
    world.fund(10_000).await;
    let file = world.folder.path().join("bank.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(file);
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let fails = "CREATE TRIGGER stuck BEFORE UPDATE ON transfers WHEN new.request_id = 'r1' \
        BEGIN SELECT RAISE(ABORT, 'stuck'); END";
    sqlx::query(fails).execute(&pool).await.unwrap();
    let client = world.client();
    let to = account::number("40817", 1);
    let mut ordered = Vec::new();
    for request_id in ["r1", "r2"] {
        let order = client.initiate_transfer(request_id, &to, rub(400), "x");
        ordered.push(report(order.await.unwrap()).transfer_id);
    }
    until_executed(&client, &ordered[1]).await;
    let stuck = client.transfer_status(&ordered[0]).await.unwrap();
    assert_eq!(stuck.status, Status::Pending);
    assert_eq!(client.balance().await.unwrap(), rub(9_600));
    let mends = "DROP TRIGGER stuck";
    sqlx::query(mends).execute(&pool).await.unwrap();
    pool.close().await;
    until_executed(&client, &ordered[0]).await;
    world.stop().await;
}
