//! The calls over topics and as HTTP reads.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::body::Body;
use events::{Delivery, Event, Log, Position, Record, Subscription, Waiting};
use ledger::{CORRELATION_HEADER, REQUEST_TOPICS};
use prost::Message;
use proto::{
    common::v1::{Decimal, OperationType},
    convert::to_timestamp_us,
    ledger::v1::*,
};
use tower::ServiceExt;

use crate::harness::*;

/// A record of the reply topic.
pub struct Reply {
    pub headers: HashMap<String, String>,
    pub payload: Vec<u8>,
}

/// Sends a request and waits for the reply with its correlation id.
pub async fn ask(world: &World, topic: &str, message: &impl Message) -> Reply {
    let correlation = fresh();
    let reply_topic = format!("{topic}.reply");
    let mut replies = world
        .log
        .subscribe(&format!("asker-{correlation}"), &[&reply_topic])
        .await
        .unwrap();
    send(world, topic, &correlation, message).await;
    loop {
        let delivery = tokio::time::timeout(PATIENCE, replies.next())
            .await
            .expect("a reply comes")
            .unwrap();
        if delivery.record.header(CORRELATION_HEADER) == Some(&correlation) {
            return Reply {
                headers: delivery.record.headers.into_iter().collect(),
                payload: delivery.record.event.payload,
            };
        }
    }
}

async fn send(world: &World, topic: &str, correlation: &str, message: &impl Message) {
    let event = Event {
        id: uuid::Uuid::now_v7(),
        topic: topic.to_owned(),
        key: correlation.to_owned(),
        type_name: String::new(),
        subject: String::new(),
        source: "test".to_owned(),
        correlation_id: correlation.to_owned(),
        occurred_at_us: START_US,
        payload: message.encode_to_vec(),
    };
    let headers = vec![(CORRELATION_HEADER.to_owned(), correlation.to_owned())];
    world
        .log
        .append(&[Record { event, headers }])
        .await
        .unwrap();
}

// rows: R192 R193 R194 R195 R196 R197 R198 R199 R200 R201 R203
#[tokio::test]
async fn r201_each_call_answers_on_its_topic_like_grpc() {
    let world = World::new().await;
    let mut answered = Vec::new();
    macro_rules! ask {
        ($topic:literal, $request:expr, $response:ident) => {{
            answered.push($topic);
            let reply = ask(&world, $topic, &$request).await;
            assert_eq!(reply.headers.get("error-code"), None);
            $response::decode(reply.payload.as_slice()).unwrap()
        }};
    }
    let deposit = operation(
        OperationType::Deposit,
        "u1",
        "k1",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "100", RUB)],
    );
    let created = ask!("ledger.createOperation", deposit, CreateOperationResponse);
    let again = ask(&world, "ledger.createOperation", &deposit).await;
    assert_eq!(again.headers["idempotent-replayed"], "true");
    assert_eq!(
        CreateOperationResponse::decode(again.payload.as_slice()).unwrap(),
        created
    );
    let operation_id = created.operation.clone().unwrap().operation_id;
    let read = ask!(
        "ledger.getOperation",
        GetOperationRequest {
            operation_id: operation_id.clone(),
            ..Default::default()
        },
        GetOperationResponse
    );
    assert_eq!(
        (read.operation, read.postings),
        (created.operation.clone(), created.postings)
    );
    let listed = ask!(
        "ledger.listOperations",
        ListOperationsRequest {
            user_id: "u1".into(),
            ..Default::default()
        },
        ListOperationsResponse
    );
    assert_eq!(listed.operations, [created.operation.unwrap()]);
    let accounts = ask!(
        "ledger.listAccounts",
        ListAccountsRequest {
            user_id: "u1".into(),
            ..Default::default()
        },
        ListAccountsResponse
    )
    .accounts;
    let account = ask!(
        "ledger.getAccount",
        GetAccountRequest {
            account_id: accounts[0].account_id.clone(),
            ..Default::default()
        },
        GetAccountResponse
    );
    assert_eq!(account.account.as_ref(), Some(&accounts[0]));
    let create = CreateHoldRequest {
        context: write("h1"),
        hold: Some(new_hold("u1", RUB, "40")),
    };
    let hold = ask!("ledger.createHold", create, CreateHoldResponse)
        .hold
        .unwrap();
    let sub = ask!(
        "ledger.getSubAccount",
        GetSubAccountRequest {
            subaccount_id: "u1:CFA-RUB".into(),
            ..Default::default()
        },
        GetSubAccountResponse
    );
    assert_eq!(sub.subaccount.unwrap().held.unwrap().value, "40.00");
    let release = ReleaseHoldRequest {
        context: write("r1"),
        hold_id: hold.hold_id.clone(),
        reason: "x".into(),
    };
    assert_eq!(
        ask!("ledger.releaseHold", release, ReleaseHoldResponse)
            .hold
            .unwrap()
            .status(),
        HoldStatus::Released
    );
    let other = world.hold("u1", RUB, "1").await;
    let consume = ConsumeHoldRequest {
        context: write("c1"),
        hold_id: other.hold_id,
        ..Default::default()
    };
    assert_eq!(
        ask!("ledger.consumeHold", consume, ConsumeHoldResponse)
            .hold
            .unwrap()
            .status(),
        HoldStatus::Consumed
    );
    let balance = ask!(
        "ledger.getBalance",
        GetBalanceRequest {
            subaccount_id: "u1:CFA-RUB".into(),
            ..Default::default()
        },
        GetBalanceResponse
    );
    assert_eq!(balance.available.unwrap().value, "100.00");
    let finalize = FinalizeOperationRequest {
        context: write("f1"),
        operation_id,
        onchain_tx_hash: "0x1".into(),
    };
    assert!(
        ask!(
            "ledger.finalizeOperation",
            finalize,
            FinalizeOperationResponse
        )
        .operation
        .unwrap()
        .finalized_at
        .is_some()
    );
    for (topic, _) in REQUEST_TOPICS {
        assert!(answered.contains(&topic), "{topic}");
    }

    // The errors of gRPC, in headers, with an empty value.
    let consume = ConsumeHoldRequest {
        context: write("c2"),
        hold_id: hold.hold_id,
        ..Default::default()
    };
    let status = world
        .client
        .clone()
        .consume_hold(consume.clone())
        .await
        .unwrap_err();
    let reply = ask(&world, "ledger.consumeHold", &consume).await;
    assert!(reply.payload.is_empty());
    assert_eq!(reply.headers["error-message"], status.message());
    assert_eq!(
        (
            reply.headers["error-code"].as_str(),
            reply.headers["error-reason"].as_str()
        ),
        ("FAILED_PRECONDITION", "HOLD_NOT_ACTIVE")
    );
    let keyless = CreateHoldRequest {
        context: None,
        hold: Some(new_hold("u1", RUB, "40")),
    };
    assert_eq!(
        ask(&world, "ledger.createHold", &keyless).await.headers["error-code"],
        "INVALID_ARGUMENT"
    );
    let garbage = ask(
        &world,
        "ledger.createHold",
        &prost_types::Any {
            type_url: "\u{1}".into(),
            value: vec![0xff; 9],
        },
    )
    .await;
    assert_eq!(garbage.headers["error-code"], "INVALID_ARGUMENT");
}

// rows: R331
#[tokio::test]
async fn r331_a_balance_is_looked_up_in_the_call_and_over_its_topic() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    world.hold("u1", RUB, "30").await;
    let mut unsettled = operation(
        OperationType::TradeSell,
        "u1",
        "k1",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "7", RUB)],
    );
    unsettled.postings[0].unsettled = true;
    world.clock.advance_us(1_000_000);
    { world.client.clone() }
        .create_operation(unsettled)
        .await
        .unwrap();
    let value = |value: &str| {
        Some(Decimal {
            value: value.to_owned(),
        })
    };
    let now = GetBalanceResponse {
        subaccount_id: "u1:CFA-RUB".to_owned(),
        instrument_id: RUB.to_owned(),
        balance: value("107.00"),
        held: value("30.00"),
        unsettled: value("7.00"),
        available: value("70.00"),
        version: 2,
    };
    let before = GetBalanceResponse {
        balance: value("100.00"),
        held: None,
        unsettled: None,
        available: None,
        version: 1,
        ..now.clone()
    };
    for (as_of, expected) in [(None, now), (Some(to_timestamp_us(START_US)), before)] {
        let request = GetBalanceRequest {
            context: None,
            subaccount_id: "u1:CFA-RUB".to_owned(),
            as_of,
        };
        let reply = ask(&world, "ledger.getBalance", &request).await;
        let told = GetBalanceResponse::decode(reply.payload.as_slice()).unwrap();
        assert_eq!(told, expected);
        let called = world.client.clone().get_balance(request).await.unwrap();
        assert_eq!(called.into_inner(), expected);
    }
}

/// A log that refuses replies above a size, and fails temporarily on request.
struct Bounded {
    log: events::Embedded,
    failures: AtomicUsize,
}

const REPLY_BYTES_MAX: usize = 3_000;

#[async_trait::async_trait]
impl Log for Bounded {
    async fn append(&self, records: &[Record]) -> Result<(), events::Error> {
        for Record { event, .. } in records {
            if !event.topic.ends_with(".reply") {
                continue;
            }
            if event.payload.len() > REPLY_BYTES_MAX {
                return Err(events::Error::Refused {
                    topic: event.topic.clone(),
                    bytes: event.payload.len(),
                    reason: "too large".to_owned(),
                });
            }
            let fails = |left: usize| left.checked_sub(1);
            if self
                .failures
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails)
                .is_ok()
            {
                return Err(std::io::Error::other("disk is unavailable").into());
            }
        }
        self.log.append(records).await
    }

    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, events::Error> {
        self.log.subscribe(group, topics).await
    }

    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, events::Error> {
        self.log.backlog(group, topics).await
    }

    async fn commit(&self, group: &str, position: &Position) -> Result<(), events::Error> {
        self.log.commit(group, position).await
    }

    fn failing(&self) -> tokio::sync::watch::Receiver<Option<String>> {
        self.log.failing()
    }

    fn waiting(&self) -> &Waiting {
        self.log.waiting()
    }
}

/// An operation of `count` postings.
pub fn of_many_postings(user: &str, count: usize) -> CreateOperationRequest {
    let own = format!("{user}:{RUB}");
    let leg = ("system:reserve:CFA-RUB", own.as_str(), "1", RUB);
    operation(OperationType::Deposit, user, &fresh(), &vec![leg; count])
}

/// Asserts that the reply was too large; returns the id of the committed operation.
pub fn unsent(reply: &Reply) -> String {
    assert!(reply.payload.is_empty());
    let header = |name: &str| reply.headers[name].as_str();
    let code = (header("error-code"), header("error-reason"));
    assert_eq!(code, ("RESOURCE_EXHAUSTED", "REPLY_TOO_LARGE"));
    let (text, id) = header("error-message")
        .split_once(" bytes is too large, the operation is committed: operation_id ")
        .expect("names the committed operation");
    assert!(text.starts_with("Reply of "));
    id.to_owned()
}

// rows: R202 R253
#[tokio::test]
async fn r202_an_oversized_reply_is_replaced_by_the_committed_ids() {
    let folder = tempfile::TempDir::new().unwrap();
    let log = Arc::new(Bounded {
        log: events::Embedded::open(folder.path()).await.unwrap(),
        failures: AtomicUsize::new(0),
    });
    let world = World::over(log.clone()).await;
    let topic = "ledger.createOperation";
    let id = unsent(&ask(&world, topic, &of_many_postings("u1", 40)).await);
    assert_eq!(world.get_operation(&id).await.postings.len(), 40);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "40.00");
    // A read commits nothing.
    let request = GetOperationRequest {
        context: None,
        operation_id: id,
    };
    let reply = ask(&world, "ledger.getOperation", &request).await;
    assert_eq!(reply.headers["error-code"], "RESOURCE_EXHAUSTED");
    let text = &reply.headers["error-message"];
    assert!(
        text.starts_with("Reply of ") && text.ends_with(" bytes is too large"),
        "{text}"
    );
    // Both topics continue.
    let small = of_many_postings("u1", 1);
    let answer = ask(&world, topic, &small).await;
    let answer = CreateOperationResponse::decode(answer.payload.as_slice()).unwrap();
    let request = GetOperationRequest {
        context: None,
        operation_id: answer.operation.unwrap().operation_id,
    };
    let reply = ask(&world, "ledger.getOperation", &request).await;
    assert_eq!(reply.headers.get("error-code"), None);

    // An unavailable log is retried, and the request acts once.
    log.failures.store(1, Ordering::SeqCst);
    let reply = ask(&world, topic, &of_many_postings("u1", 2)).await;
    assert_eq!(reply.headers.get("error-code"), None);
    assert_eq!(reply.headers["idempotent-replayed"], "true");
    assert_eq!(log.failures.load(Ordering::SeqCst), 0);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "43.00");
}

// rows: R202
#[tokio::test]
async fn r202_two_requests_at_once_find_their_replies() {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    world.fund("u2", RUB, "2").await;
    let request = |user: &str| GetBalanceRequest {
        subaccount_id: format!("{user}:CFA-RUB"),
        ..Default::default()
    };
    let (one, two) = (request("u1"), request("u2"));
    let (first, second) = tokio::join!(
        ask(&world, "ledger.getBalance", &one),
        ask(&world, "ledger.getBalance", &two)
    );
    let value = |reply: Reply| {
        GetBalanceResponse::decode(reply.payload.as_slice())
            .unwrap()
            .balance
            .unwrap()
            .value
    };
    assert_eq!(
        (value(first), value(second)),
        ("1.00".to_owned(), "2.00".to_owned())
    );
}

async fn get(world: &World, path: &str) -> (u16, serde_json::Value) {
    let mut request = http::Request::get(path).body(Body::empty()).unwrap();
    request.extensions_mut().insert(rpc::Caller {
        subject: "staff".to_owned(),
        user_id: None,
        roles: rpc::Roles::of(&[rpc::Role::Operator]),
    });
    let response = world.handle.service().http.oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let body = axum::body::to_bytes(response.into_body(), usize::MAX)
        .await
        .unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}

// rows: R296 R297 R298 R299 R330
#[tokio::test]
async fn r296_http_reads_equal_the_calls() {
    let world = World::new().await;
    let operation = world.fund("u1", RUB, "10").await;
    let hold = world.hold("u1", RUB, "4").await;
    let (status, account) = get(&world, "/accounts/u1:MAIN").await;
    assert_eq!(
        (status, &account["accountId"], &account["type"]),
        (200, &"u1:MAIN".into(), &"MAIN".into())
    );
    let (_, one) = get(&world, &format!("/operations/{}", operation.operation_id)).await;
    assert_eq!(
        (&one["operationId"], &one["type"], &one["status"]),
        (
            &operation.operation_id.as_str().into(),
            &"DEPOSIT".into(),
            &"SETTLED".into()
        )
    );
    let (_, list) = get(&world, "/operations?user_id=u1&type=DEPOSIT").await;
    assert_eq!(
        (&list["items"][0], &list["next_page_token"]),
        (&one, &"".into())
    );
    let (_, postings) = get(
        &world,
        &format!("/postings?operation_id={}", operation.operation_id),
    )
    .await;
    assert_eq!(postings["items"][0]["amount"]["amount"]["value"], "10.00");
    let (_, single) = get(&world, &format!("/holds/{}", hold.hold_id)).await;
    assert_eq!(
        (&single["holdId"], &single["status"]),
        (&hold.hold_id.as_str().into(), &"ACTIVE".into())
    );
    let (_, all) = get(&world, "/holds").await;
    assert_eq!(all["items"][0], single);
    assert_eq!(
        get(&world, "/holds?status=ACTIVE").await.1["items"][0],
        single
    );
    assert_eq!(
        get(&world, "/holds?status=HOLD_STATUS_CONSUMED").await.1["items"],
        serde_json::json!([])
    );
    assert_eq!(get(&world, "/holds?status=BROKEN").await.0, 400);
    let (status, error) = get(&world, "/holds/nope").await;
    assert_eq!(
        (status, &error["code"], &error["message"]),
        (404, &"not_found".into(), &"Hold not found".into())
    );
    assert_eq!(get(&world, "/operations/nope").await.0, 404);
    assert_eq!(get(&world, "/accounts/nope").await.0, 404);
}

// rows: R278 R279 R280 R281
#[tokio::test]
async fn r278_metrics_move_with_the_ledger() {
    // Other tests of this process count too, so only growth of the test's own series is asserted.
    let metrics = rpc::metrics_init();
    let world = World::new().await;
    let mut coupon = operation(
        OperationType::Coupon,
        "u1",
        "k1",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "10", RUB)],
    );
    coupon.operation.as_mut().unwrap().awaits_chain = true;
    world.client.clone().create_operation(coupon).await.unwrap();
    world.hold("u1", RUB, "4").await;
    let text = metrics.render();
    assert!(
        text.contains("ledger_operations_total{type=\"COUPON\",status=\"PROCESSING\"} 1"),
        "{text}"
    );
    for name in [
        "ledger_postings_total ",
        "ledger_holds_total ",
        "ledger_operation_duration_seconds_bucket{",
    ] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name}");
    }
}
