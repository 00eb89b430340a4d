//! Bad input of every field: the same code, reason and text in the call, in a batch (with its place) and over the request topics (D23, D26, D45).

use prost::Message;
use prost_types::Timestamp;
use proto::{
    common::v1::{MonetaryAmount, OperationType},
    ledger::v1::*,
};
use tonic::{Code, Status};

use crate::{
    harness::*,
    requests::{Reply, ask},
};

/// How a good message is spoilt, and the text that says so.
pub type Case<M> = (fn(&mut M), &'static str);

const LONG: usize = 257;

fn long() -> String {
    "x".repeat(LONG)
}

fn number(value: &str) -> Option<MonetaryAmount> {
    amount(RUB, value)
}

pub fn pay(key: &str) -> CreateOperationRequest {
    operation(
        OperationType::Payment,
        "u1",
        key,
        &[("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)],
    )
}

fn terms(request: &mut CreateOperationRequest) -> &mut Operation {
    request.operation.as_mut().unwrap()
}

pub const OPERATIONS: &[Case<CreateOperationRequest>] = &[
    (|r| r.operation = None, "operation: is required"),
    (
        |r| terms(r).r#type = 0,
        "operation.type: must be one of the operation types",
    ),
    (
        |r| terms(r).r#type = 99,
        "operation.type: must be one of the operation types",
    ),
    (
        |r| terms(r).user_id.clear(),
        "operation.user_id: must not be empty",
    ),
    (
        |r| terms(r).user_id = long(),
        "operation.user_id: must have at most 256 bytes",
    ),
    (
        |r| terms(r).user_id = "a\nb".into(),
        "operation.user_id: must have no control characters",
    ),
    (
        |r| terms(r).operation_id = long(),
        "operation.operation_id: must have at most 256 bytes",
    ),
    (
        |r| terms(r).idempotency_key = long(),
        "operation.idempotency_key: must have at most 256 bytes",
    ),
    (
        |r| terms(r).external_ref = Some(long()),
        "operation.external_ref: must have at most 256 bytes",
    ),
    (
        |r| terms(r).onchain_tx_hash = Some(long()),
        "operation.onchain_tx_hash: must have at most 256 bytes",
    ),
    (|r| r.postings.clear(), "postings: must not be empty"),
    (
        |r| r.postings[0].debit_subaccount_id.clear(),
        "postings[0].debit_subaccount_id: must not be empty",
    ),
    (
        |r| r.postings[0].debit_subaccount_id = long(),
        "postings[0].debit_subaccount_id: must have at most 256 bytes",
    ),
    (
        |r| r.postings[0].credit_subaccount_id.clear(),
        "postings[0].credit_subaccount_id: must not be empty",
    ),
    (
        |r| r.postings[0].credit_subaccount_id = "u2:CFA-RUB\0".into(),
        "postings[0].credit_subaccount_id: must have no control characters",
    ),
    (
        |r| r.postings[0].credit_subaccount_id = "u1:CFA-RUB".into(),
        "postings[0].credit_subaccount_id: must differ from the debit side",
    ),
    (
        |r| r.postings[0].credit_subaccount_id = "u2:BOND-1".into(),
        "postings[0].credit_subaccount_id: must be of instrument CFA-RUB",
    ),
    (
        |r| r.postings[0].hold_id = Some(long()),
        "postings[0].hold_id: must have at most 256 bytes",
    ),
    (
        |r| r.postings[0].amount = None,
        "postings[0].amount: is required",
    ),
    (
        |r| r.postings[0].amount.as_mut().unwrap().amount = None,
        "postings[0].amount: is required",
    ),
    (
        |r| r.postings[0].amount = number(""),
        "postings[0].amount: is required",
    ),
    (
        |r| r.postings[0].amount = number("1e5"),
        "postings[0].amount: `1e5` is not a decimal number: digits with at most 18 after the point are expected",
    ),
    (
        |r| r.postings[0].amount = number("NaN"),
        "postings[0].amount: `NaN` is not a decimal number: digits with at most 18 after the point are expected",
    ),
    (
        |r| r.postings[0].amount = number("0"),
        "postings[0].amount: must be greater than zero",
    ),
    (
        |r| r.postings[0].amount = number("-1"),
        "postings[0].amount: must be greater than zero",
    ),
    (
        |r| r.postings[0].amount = number("0.001"),
        "postings[0].amount.amount: has more fraction digits than allowed",
    ),
    (
        |r| r.postings[0].amount = number("99999999999999999999"),
        "postings[0].amount.amount: has more than 38 digits",
    ),
    (
        |r| r.postings[0].amount = amount("", "1"),
        "postings[0].amount: is required",
    ),
    (
        |r| r.postings[0].amount = amount(BOND, "1"),
        "postings[0].amount.currency_code: must be CFA-RUB",
    ),
    (
        |r| r.postings.push(Posting::default()),
        "postings[1].debit_subaccount_id: must not be empty",
    ),
];

/// Refused for what the ledger knows: code and reason beside the text.
const KNOWN: &[(fn(&mut CreateOperationRequest), Code, &str, &str)] = &[
    (
        |r| r.postings[0].debit_subaccount_id = "u9:CFA-RUB".into(),
        Code::NotFound,
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    ),
    (
        |r| r.postings[0].hold_id = Some("nobody's".into()),
        Code::NotFound,
        "HOLD_NOT_FOUND",
        "Hold not found",
    ),
    (
        |r| r.postings = postings(&[("system:reserve:NEW-1", "u1:NEW-1", "1", "NEW-1")]),
        Code::NotFound,
        "INSTRUMENT_NOT_FOUND",
        "Instrument not found",
    ),
    (
        |r| r.postings[0].amount = number("100.01"),
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    ),
];

pub fn code_of(reply: &Reply) -> (&str, &str, &str) {
    assert!(reply.payload.is_empty(), "an error has no value");
    let header = |name: &str| reply.headers[name].as_str();
    (
        header("error-code"),
        header("error-reason"),
        header("error-message"),
    )
}

fn bad_field(status: &Status, text: &str) {
    assert_eq!(status.message(), text);
    assert_eq!(status.code(), Code::InvalidArgument, "{text}");
    let named = rpc::status::reason(status);
    assert_eq!(named.as_deref(), Some("INVALID_ARGUMENT"), "{text}");
}

fn fact(status: &Status, name: &str) -> Option<String> {
    use tonic_types::StatusExt;
    let info = status.get_details_error_info()?;
    info.metadata.get(name).cloned()
}

/// The spoilt one behind a good one.
fn batch(spoilt: CreateOperationRequest) -> CreateOperationsRequest {
    let keyed = |request: CreateOperationRequest, key: String| NewOperation {
        operation: request.operation.map(|operation| Operation {
            idempotency_key: match operation.idempotency_key.is_empty() {
                true => key,
                false => operation.idempotency_key.clone(),
            },
            ..operation
        }),
        postings: request.postings,
    };
    CreateOperationsRequest {
        context: write(&fresh()),
        operations: vec![keyed(pay(""), fresh()), keyed(spoilt, fresh())],
        ..Default::default()
    }
}

// rows: R195 R203 R223 R253 R329 R339
#[tokio::test]
async fn d23_every_bad_field_of_an_operation_is_named_in_call_batch_and_topic() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    world.fund("u1", BOND, "5").await;
    let mut client = world.client.clone();
    for (spoil, text) in OPERATIONS {
        let mut request = pay(&fresh());
        spoil(&mut request);
        let status = client.create_operation(request.clone()).await.unwrap_err();
        bad_field(&status, text);
        let reply = ask(&world, "ledger.createOperation", &request).await;
        assert_eq!(
            code_of(&reply),
            ("INVALID_ARGUMENT", "INVALID_ARGUMENT", *text)
        );
        let status = client.create_operations(batch(request)).await.unwrap_err();
        bad_field(&status, &format!("operations[1].{text}"));
    }
    for (spoil, code, reason, text) in KNOWN {
        let mut request = pay(&fresh());
        spoil(&mut request);
        refused(
            client.create_operation(request.clone()).await,
            *code,
            reason,
            text,
        );
        request.context = write(&fresh());
        let reply = ask(&world, "ledger.createOperation", &request).await;
        assert_eq!((code_of(&reply).1, code_of(&reply).2), (*reason, *text));
        let mut request = batch(request);
        if *reason == "INSUFFICIENT_BALANCE" {
            // The good one before it takes one rouble, too.
            request.operations[1].postings[0].amount = number("99.01");
        }
        let status = client.create_operations(request).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (*code, *text));
        assert_eq!(fact(&status, "operation_index").as_deref(), Some("1"));
    }
    let keyless = client.create_operation(pay("")).await.unwrap_err();
    assert_eq!(keyless.code(), Code::InvalidArgument);
    assert!(keyless.message().starts_with("context.idempotency_key: "));
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"],
        "nothing of it left a trace"
    );
    world.assert_books_balance().await;
}

pub fn block() -> CreateHoldRequest {
    CreateHoldRequest {
        context: write(&fresh()),
        hold: Some(new_hold("u1", RUB, "1")),
    }
}

fn hold(request: &mut CreateHoldRequest) -> &mut Hold {
    request.hold.as_mut().unwrap()
}

pub const HOLDS: &[Case<CreateHoldRequest>] = &[
    (|r| r.hold = None, "hold: is required"),
    (
        |r| hold(r).hold_id = long(),
        "hold.hold_id: must have at most 256 bytes",
    ),
    (
        |r| hold(r).subaccount_id.clear(),
        "hold.subaccount_id: must not be empty",
    ),
    (
        |r| hold(r).subaccount_id = long(),
        "hold.subaccount_id: must have at most 256 bytes",
    ),
    (|r| hold(r).amount = None, "hold.amount: is required"),
    (
        |r| hold(r).amount = number("0"),
        "hold.amount: must be greater than zero",
    ),
    (
        |r| hold(r).amount = number("-5"),
        "hold.amount: must be greater than zero",
    ),
    (
        |r| hold(r).amount = number("0.001"),
        "hold.amount.amount: has more fraction digits than allowed",
    ),
    (
        |r| hold(r).amount = amount(BOND, "1"),
        "hold.amount.currency_code: must be CFA-RUB",
    ),
    (
        |r| hold(r).reason = "x".repeat(1_025),
        "hold.reason: must have at most 1024 bytes",
    ),
    (
        |r| hold(r).owner = "x".repeat(1_025),
        "hold.owner: must have at most 1024 bytes",
    ),
    (
        |r| hold(r).destination_subaccount_id = Some(long()),
        "hold.destination_subaccount_id: must have at most 256 bytes",
    ),
    (
        |r| {
            hold(r).expires_at = Some(Timestamp {
                seconds: i64::MAX,
                nanos: 0,
            })
        },
        "hold.expires_at: is out of range",
    ),
];

// rows: R198 R199 R200 R203 R225 R254
#[tokio::test]
async fn d23_every_bad_field_of_a_hold_is_named_in_call_and_topic() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut client = world.client.clone();
    for (spoil, text) in HOLDS {
        let mut request = block();
        spoil(&mut request);
        bad_field(
            &client.create_hold(request.clone()).await.unwrap_err(),
            text,
        );
        let reply = ask(&world, "ledger.createHold", &request).await;
        assert_eq!(
            code_of(&reply),
            ("INVALID_ARGUMENT", "INVALID_ARGUMENT", *text)
        );
    }
    let mut request = block();
    hold(&mut request).subaccount_id = "u9:CFA-RUB".into();
    let unknown = (
        "NOT_FOUND",
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    );
    assert_eq!(
        code_of(&ask(&world, "ledger.createHold", &request).await),
        unknown
    );
    refused(
        client.create_hold(request).await,
        Code::NotFound,
        unknown.1,
        unknown.2,
    );

    let made = world.hold("u1", RUB, "10").await;
    let consume = |hold_id: &str, amount: Option<MonetaryAmount>| ConsumeHoldRequest {
        context: write(&fresh()),
        hold_id: hold_id.to_owned(),
        amount,
        ..Default::default()
    };
    let missing = ("NOT_FOUND", "HOLD_NOT_FOUND", "Hold not found");
    let cases = [
        (
            consume("", None),
            (
                "INVALID_ARGUMENT",
                "INVALID_ARGUMENT",
                "hold_id: must not be empty",
            ),
        ),
        (
            consume(&long(), None),
            (
                "INVALID_ARGUMENT",
                "INVALID_ARGUMENT",
                "hold_id: must have at most 256 bytes",
            ),
        ),
        (consume("nobody's", None), missing),
        (
            consume(&made.hold_id, number("0")),
            (
                "INVALID_ARGUMENT",
                "INVALID_ARGUMENT",
                "amount: must be greater than zero",
            ),
        ),
        (
            consume(&made.hold_id, number("0.001")),
            (
                "INVALID_ARGUMENT",
                "INVALID_ARGUMENT",
                "amount.amount: has more fraction digits than allowed",
            ),
        ),
        (
            consume(&made.hold_id, number("10.01")),
            (
                "FAILED_PRECONDITION",
                "HOLD_AMOUNT_EXCEEDED",
                "Amount exceeds what remains of the hold",
            ),
        ),
    ];
    for (request, expected) in cases {
        let status = client.consume_hold(request.clone()).await.unwrap_err();
        assert_eq!(status.message(), expected.2);
        assert_eq!(rpc::status::reason(&status).as_deref(), Some(expected.1));
        assert_eq!(
            code_of(&ask(&world, "ledger.consumeHold", &request).await),
            expected
        );
    }
    let release = ReleaseHoldRequest {
        context: write(&fresh()),
        hold_id: "nobody's".into(),
        reason: String::new(),
    };
    assert_eq!(
        code_of(&ask(&world, "ledger.releaseHold", &release).await),
        missing
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "10.00", "0.00", "90.00"],
        "nothing of it left a trace"
    );
}

// rows: R201 R203
#[tokio::test]
async fn d23_reads_of_what_is_not_there_say_so_on_both_ways() {
    let world = World::new().await;
    macro_rules! both {
        ($topic:literal, $method:ident, $request:expr, $reason:literal, $text:literal) => {{
            let request = $request;
            let reply = ask(&world, $topic, &request).await;
            assert_eq!(code_of(&reply), ("NOT_FOUND", $reason, $text));
            refused(
                world.client.clone().$method(request).await,
                Code::NotFound,
                $reason,
                $text,
            );
        }};
    }
    let id = || "nobody's".to_owned();
    both!(
        "ledger.getAccount",
        get_account,
        GetAccountRequest {
            account_id: id(),
            ..Default::default()
        },
        "ACCOUNT_NOT_FOUND",
        "Account not found"
    );
    both!(
        "ledger.getSubAccount",
        get_sub_account,
        GetSubAccountRequest {
            subaccount_id: id(),
            ..Default::default()
        },
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found"
    );
    both!(
        "ledger.getBalance",
        get_balance,
        GetBalanceRequest {
            subaccount_id: id(),
            ..Default::default()
        },
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found"
    );
    both!(
        "ledger.getOperation",
        get_operation,
        GetOperationRequest {
            operation_id: id(),
            ..Default::default()
        },
        "OPERATION_NOT_FOUND",
        "Operation not found"
    );
    both!(
        "ledger.finalizeOperation",
        finalize_operation,
        FinalizeOperationRequest {
            context: write(&fresh()),
            operation_id: id(),
            ..Default::default()
        },
        "OPERATION_NOT_FOUND",
        "Operation not found"
    );
    // Lists of nothing are empty, not missing (D45).
    let reply = ask(
        &world,
        "ledger.listOperations",
        &ListOperationsRequest {
            user_id: id(),
            ..Default::default()
        },
    )
    .await;
    assert_eq!(
        ListOperationsResponse::decode(reply.payload.as_slice())
            .unwrap()
            .operations,
        []
    );
    let reply = ask(
        &world,
        "ledger.listAccounts",
        &ListAccountsRequest {
            user_id: id(),
            ..Default::default()
        },
    )
    .await;
    assert_eq!(
        ListAccountsResponse::decode(reply.payload.as_slice())
            .unwrap()
            .accounts,
        []
    );
}

/// No id, one that is too long, and bytes that no database takes for text.
fn no_ids(field: &str) -> [(String, String); 3] {
    let said = |problem: &str| format!("{field}: {problem}");
    [
        (String::new(), said("must not be empty")),
        (long(), said("must have at most 256 bytes")),
        ("u1\0".to_owned(), said("must have no control characters")),
    ]
}

// rows: R201 R203 R339
#[tokio::test]
async fn d23_ids_and_filters_of_reads_are_refused_like_those_of_writes() {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    // Required ids, in the call and where it has a topic; then filters, which may be empty.
    macro_rules! read {
        ($method:ident, $request:ident, $field:ident, $topic:expr, $skip:literal) => {
            for (id, text) in no_ids(stringify!($field)).into_iter().skip($skip) {
                let request = $request {
                    $field: id,
                    ..Default::default()
                };
                let topic: Option<&str> = $topic;
                if let Some(topic) = topic {
                    let reply = ask(&world, topic, &request).await;
                    let expected = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", text.as_str());
                    assert_eq!(code_of(&reply), expected, "{topic}");
                }
                let status = world.client.clone().$method(request).await.unwrap_err();
                bad_field(&status, &text);
            }
        };
    }
    read!(
        get_account,
        GetAccountRequest,
        account_id,
        Some("ledger.getAccount"),
        0
    );
    read!(
        get_sub_account,
        GetSubAccountRequest,
        subaccount_id,
        Some("ledger.getSubAccount"),
        0
    );
    read!(
        get_balance,
        GetBalanceRequest,
        subaccount_id,
        Some("ledger.getBalance"),
        0
    );
    read!(
        get_operation,
        GetOperationRequest,
        operation_id,
        Some("ledger.getOperation"),
        0
    );
    read!(get_hold, GetHoldRequest, hold_id, None, 0);
    read!(get_statement, GetStatementRequest, subaccount_id, None, 0);
    read!(
        get_source_position,
        GetSourcePositionRequest,
        source,
        None,
        0
    );
    read!(
        list_accounts,
        ListAccountsRequest,
        user_id,
        Some("ledger.listAccounts"),
        1
    );
    read!(
        list_operations,
        ListOperationsRequest,
        user_id,
        Some("ledger.listOperations"),
        1
    );
    read!(
        list_operations,
        ListOperationsRequest,
        idempotency_key,
        Some("ledger.listOperations"),
        1
    );
    read!(list_sub_accounts, ListSubAccountsRequest, user_id, None, 1);
    read!(
        list_sub_accounts,
        ListSubAccountsRequest,
        instrument_id,
        None,
        1
    );
    read!(list_holds, ListHoldsRequest, subaccount_id, None, 1);
    read!(list_holds, ListHoldsRequest, parent_hold_id, None, 1);
    read!(
        get_trial_balance,
        GetTrialBalanceRequest,
        instrument_id,
        None,
        1
    );
    read!(
        list_velocity_limits,
        ListVelocityLimitsRequest,
        user_id,
        None,
        1
    );
    read!(
        list_velocity_limits,
        ListVelocityLimitsRequest,
        instrument_id,
        None,
        1
    );
    let owners = [
        ("x".repeat(1_025), "owner: must have at most 1024 bytes"),
        ("a\0".to_owned(), "owner: must have no control characters"),
    ];
    for (owner, text) in owners {
        let request = ListHoldsRequest {
            owner,
            ..Default::default()
        };
        bad_field(
            &world.client.clone().list_holds(request).await.unwrap_err(),
            text,
        );
    }
}

// rows: R329 R339
#[tokio::test]
async fn d23_an_unknown_mode_and_sequences_of_no_source_are_refused() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let spoilt: &[Case<CreateOperationsRequest>] = &[
        (
            |r| r.mode = 3,
            "mode: must be ALL_OR_NOTHING or INDEPENDENT",
        ),
        (
            |r| r.mode = -1,
            "mode: must be ALL_OR_NOTHING or INDEPENDENT",
        ),
        (
            |r| r.first_sequence = 1,
            "source: must be given with first_sequence and through_sequence",
        ),
        (
            |r| r.through_sequence = 1,
            "source: must be given with first_sequence and through_sequence",
        ),
    ];
    let mut client = world.client.clone();
    for (spoil, text) in spoilt {
        let mut request = batch(pay(""));
        spoil(&mut request);
        bad_field(&client.create_operations(request).await.unwrap_err(), text);
    }
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "10.00");
}
