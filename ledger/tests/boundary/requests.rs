//! The calls over topics and as HTTP reads.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use events::{Delivery, Event, Log, Position, Record, Subscription, Waiting};
use ledger::{CORRELATION_HEADER, REQUEST_TOPICS};
use prost::Message;
use proto::{
    common::v1::{Decimal, OperationType},
    convert::to_timestamp_us,
    ledger::v1::*,
};
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{harness::*, victim::Victim};

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
        onchain_tx_hash: tx_hash("k1"),
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
        let found = GetBalanceResponse::decode(reply.payload.as_slice()).unwrap();
        assert_eq!(found, expected);
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
pub fn committed_operation(reply: &Reply) -> String {
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
    let world = World::on_log(log.clone()).await;
    let topic = "ledger.createOperation";
    let id = committed_operation(&ask(&world, topic, &of_many_postings("u1", 40)).await);
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

const OPERATOR: &str = "sandbox.operator";

/// A ledger that serves a port until the value is dropped.
pub struct Port {
    address: SocketAddr,
    _shutdown: DropGuard,
}

impl Port {
    pub async fn of(world: &World) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        tokio::spawn(rpc::serve(
            listener,
            vec![world.handle.service()],
            rpc::Authenticator::Sandbox,
            rpc::metrics_init(),
            shutdown.clone(),
        ));
        Port {
            address,
            _shutdown: shutdown.drop_guard(),
        }
    }

    /// Sends a request; returns status and body. Uses HTTP/1.0, so the body has no chunks.
    async fn ask(&self, method: &str, path: &str, token: &str, body: &str) -> (u16, String) {
        let head = format!(
            "{method} {path} HTTP/1.0\r\nhost: ledger\r\nauthorization: Bearer {token}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = testkit::ports::until_closed(&mut stream).await;
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        let status = head.split(' ').nth(1).expect("a status line");
        (status.parse().unwrap(), body.to_owned())
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        let (status, body) = self.ask("GET", path, OPERATOR, "").await;
        (status, serde_json::from_str(&body).expect(&body))
    }

    /// Answer of an RPC in JSON, with the enum names of the HTTP reads.
    async fn call(&self, method: &str, request: Value) -> Value {
        let path = format!("/dfa.ledger.v1.LedgerService/{method}");
        let body = request.to_string();
        let (status, body) = self.ask("POST", &path, OPERATOR, &body).await;
        assert_eq!(status, 200, "{method}: {body}");
        let mut answer = serde_json::from_str(&body).expect(&body);
        make_bare(&mut answer);
        answer
    }

    /// Scrapes the metrics.
    pub async fn metrics(&self) -> String {
        let (status, text) = self.ask("GET", "/metrics", "", "").await;
        assert_eq!(status, 200, "{text}");
        text
    }
}

/// Strips the prefixes of enum names: `OPERATION_TYPE_DEPOSIT` becomes `DEPOSIT` (T40).
fn make_bare(value: &mut Value) {
    match value {
        Value::String(text) => {
            let prefixes = [
                "OPERATION_TYPE_",
                "OPERATION_STATUS_",
                "HOLD_STATUS_",
                "ACCOUNT_TYPE_",
            ];
            let bare = prefixes.iter().find_map(|prefix| text.strip_prefix(prefix));
            if let Some(bare) = bare.map(str::to_owned) {
                *text = bare;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(make_bare),
        Value::Object(fields) => fields.values_mut().for_each(make_bare),
        _ => {}
    }
}

// rows: R296 R297 R298 R299 R330
#[tokio::test]
async fn r296_http_reads_equal_the_calls() {
    let world = World::new().await;
    let port = Port::of(&world).await;
    let legs: [Leg; 2] = [
        ("system:reserve:CFA-RUB", "u1:CFA-RUB", "10", RUB),
        ("u1:CFA-RUB", "u2:CFA-RUB", "3", RUB),
    ];
    let request = operation(OperationType::Deposit, "u1", "k1", &legs);
    let made = { world.client.clone() }.create_operation(request).await;
    let id = made.unwrap().into_inner().operation.unwrap().operation_id;
    let hold_id = world.hold("u1", RUB, "4").await.hold_id;

    let (status, account) = port.get("/accounts/u1:MAIN").await;
    let called = port
        .call("GetAccount", json!({"accountId": "u1:MAIN"}))
        .await;
    assert_eq!((status, &account), (200, &called["account"]));
    assert_eq!(account["accountId"], "u1:MAIN");
    assert_eq!(account["type"], "MAIN");

    let called = port.call("GetOperation", json!({"operationId": id})).await;
    let (_, one) = port.get(&format!("/operations/{id}")).await;
    assert_eq!(one, called["operation"]);
    assert_eq!(
        (&one["type"], &one["status"]),
        (&json!("DEPOSIT"), &json!("SETTLED"))
    );
    let (_, list) = port.get(&format!("/postings?operation_id={id}")).await;
    assert_eq!(
        list,
        json!({"items": called["postings"], "next_page_token": ""})
    );
    let amounts = [&list["items"][0], &list["items"][1]].map(|leg| &leg["amount"]["amount"]);
    assert_eq!(
        amounts,
        [&json!({"value": "10.00"}), &json!({"value": "3.00"})]
    );
    let (_, list) = port.get("/operations?user_id=u1&type=DEPOSIT").await;
    assert_eq!(list, json!({"items": [one], "next_page_token": ""}));
    let (_, list) = port.get("/operations?user_id=u1&type=PAYMENT").await;
    assert_eq!(list["items"], json!([]));

    let called = port.call("GetHold", json!({"holdId": hold_id})).await;
    let (_, single) = port.get(&format!("/holds/{hold_id}")).await;
    assert_eq!(single, called["hold"]);
    assert_eq!(single["status"], "ACTIVE");
    for query in [
        "",
        "?status=ACTIVE",
        "?status=HOLD_STATUS_ACTIVE",
        "?subaccount_id=u1:CFA-RUB",
    ] {
        let (_, list) = port.get(&format!("/holds{query}")).await;
        assert_eq!(
            list,
            json!({"items": [single], "next_page_token": ""}),
            "{query}"
        );
    }
    let (_, list) = port.get("/holds?status=HOLD_STATUS_CONSUMED").await;
    assert_eq!(list["items"], json!([]));
    assert_eq!(port.get("/holds?status=BROKEN").await.0, 400);
    for (path, text) in [
        ("/holds/nope", "Hold not found"),
        ("/operations/nope", "Operation not found"),
        ("/accounts/nope", "Account not found"),
    ] {
        let (status, error) = port.get(path).await;
        let found = (status, &error["code"], &error["message"]);
        assert_eq!(found, (404, &json!("not_found"), &json!(text)), "{path}");
    }
    // Staff only.
    for (token, expected) in [("", 401), ("sandbox.investor.u1", 403)] {
        let (status, body) = port.ask("GET", "/holds", token, "").await;
        assert_eq!(status, expected, "{token}: {body}");
    }
}

/// True in a process that runs only this test, as metrics are process-wide. Otherwise runs the test
/// in such a process and returns false once it has passed.
pub fn is_alone(test: &str) -> bool {
    const ALONE: &str = "LEDGER_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut child = Victim::spawn(test, [(ALONE, "1")]);
    let lines: Vec<String> = std::iter::from_fn(|| child.next_line()).collect();
    assert!(child.end().success(), "{test}: {}", lines.join("\n"));
    let has_run = lines.iter().any(|line| line.contains("1 passed"));
    assert!(has_run, "{test} is not a test: {}", lines.join("\n"));
    false
}

/// Value of a series; 0 before its first record.
pub fn value(scrape: &str, series: &str) -> f64 {
    let of_series = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
    scrape.lines().find_map(of_series).unwrap_or(0.0)
}

/// Postings, active holds, durable answers to writes, created coupons, final coupons.
const SERIES: [&str; 5] = [
    "ledger_postings_total",
    "ledger_holds_total",
    "ledger_operation_duration_seconds_count",
    "ledger_operations_total{type=\"COUPON\",status=\"PROCESSING\"}",
    "ledger_operations_total{type=\"COUPON\",status=\"FINALIZED\"}",
];

/// Values of [`SERIES`] at the last scrape.
#[derive(Default)]
struct Scraped([f64; SERIES.len()]);

impl Scraped {
    /// Asserts how much each series has changed since the last scrape. `what` names the cause.
    async fn moved(&mut self, port: &Port, by: [i32; SERIES.len()], what: &str) {
        let text = port.metrics().await;
        let now = SERIES.map(|series| value(&text, series));
        let moved = std::array::from_fn(|one| (now[one] - self.0[one]) as i32);
        assert_eq!(moved, by, "{SERIES:?} by {what}");
        self.0 = now;
    }
}

// rows: R278 R279 R280 R281
#[tokio::test]
async fn r278_metrics_move_with_the_ledger() {
    if !is_alone("requests::r278_metrics_move_with_the_ledger") {
        return;
    }
    // The recorder must be installed before the ledger starts.
    rpc::metrics_init();
    let world = World::new().await;
    let (port, mut scraped) = (Port::of(&world).await, Scraped::default());
    scraped.moved(&port, [0; 5], "the start").await;
    let leg: Leg = ("system:reserve:CFA-RUB", "u1:CFA-RUB", "10", RUB);
    let mut coupon = operation(OperationType::Coupon, "u1", "k1", &[leg, leg]);
    coupon.operation.as_mut().unwrap().awaits_chain = true;
    let made = { world.client.clone() }.create_operation(coupon).await;
    let id = made.unwrap().into_inner().operation.unwrap().operation_id;
    scraped
        .moved(&port, [2, 0, 1, 1, 0], "a coupon of two postings")
        .await;
    let finalize = FinalizeOperationRequest {
        context: write("f1"),
        operation_id: id,
        onchain_tx_hash: tx_hash("k1"),
    };
    { world.client.clone() }
        .finalize_operation(finalize)
        .await
        .unwrap();
    scraped.moved(&port, [0, 0, 1, 0, 1], "its finality").await;

    let mut holds = Vec::new();
    for _ in 0..3 {
        holds.push(world.hold("u1", RUB, "4").await.hold_id);
    }
    let until = Hold {
        expires_at: Some(to_timestamp_us(START_US + 1_000_000)),
        ..new_hold("u1", RUB, "4")
    };
    world.open_hold("h4", until).await.unwrap();
    scraped.moved(&port, [0, 4, 4, 0, 0], "four holds").await;
    let poor = world.open_hold("h5", new_hold("u1", RUB, "5")).await;
    assert_eq!(poor.unwrap_err().message(), "Insufficient balance");
    scraped
        .moved(&port, [0, 0, 1, 0, 0], "a refused hold")
        .await;
    world.release("r1", &holds[0]).await.unwrap();
    scraped.moved(&port, [0, -1, 1, 0, 0], "a release").await;
    world
        .consume("c1", &holds[1], amount(RUB, "1"))
        .await
        .unwrap();
    scraped
        .moved(&port, [0, 0, 1, 0, 0], "a partial consumption")
        .await;
    world.consume("c2", &holds[1], None).await.unwrap();
    scraped
        .moved(&port, [0, -1, 1, 0, 0], "the rest of it")
        .await;
    world.clock.advance_us(1_000_000);
    assert_eq!(world.handle.sweep().await.unwrap(), 1);
    scraped.moved(&port, [0, -1, 0, 0, 0], "an expiry").await;
    // A restarted ledger counts the hold that is left.
    drop(port);
    let world = world.restart().await;
    let port = Port::of(&world).await;
    scraped.moved(&port, [0, 0, 0, 0, 0], "a restart").await;
    world.release("r2", &holds[2]).await.unwrap();
    scraped
        .moved(&port, [0, -1, 1, 0, 0], "the last release")
        .await;
    let text = port.metrics().await;
    assert_eq!(value(&text, "ledger_holds_total"), 0.0);
    assert!(text.contains("# TYPE ledger_holds_total gauge"), "{text}");
    let last = "ledger_operation_duration_seconds_bucket{le=\"+Inf\"}";
    assert_eq!(value(&text, last), value(&text, SERIES[2]), "a histogram");
}
