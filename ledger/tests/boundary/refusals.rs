//! Invalid values of every field: code, reason and text are the same in the call, in a batch (with
//! the index) and over the request topics (D23, D26, D45).

use prost::Message;
use prost_types::Timestamp;
use proto::{
    common::v1::{MonetaryAmount, OperationType, PaginationRequest},
    ledger::v1::{hold_step::Step, *},
};
use tonic::{Code, Status};

use crate::{
    harness::*,
    requests::{Reply, ask},
};

/// A change that makes a valid message invalid, and the resulting text.
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
    (|r| terms(r).r#type = 99, "operation.type: has no value 99"),
    (
        |r| terms(r).user_id.clear(),
        "operation.user_id: must not be empty",
    ),
    (
        |r| terms(r).user_id = long(),
        "operation.user_id: must have at most 128 bytes",
    ),
    (
        |r| terms(r).user_id = "a\nb".into(),
        "operation.user_id: must have no control characters",
    ),
    (
        |r| terms(r).operation_id = long(),
        "operation.operation_id: must have at most 128 bytes",
    ),
    (
        |r| terms(r).idempotency_key = long(),
        "operation.idempotency_key: must have at most 128 bytes",
    ),
    (
        |r| terms(r).external_ref = Some(long()),
        "operation.external_ref: must have at most 128 bytes",
    ),
    (
        |r| terms(r).onchain_tx_hash = Some(long()),
        "operation.onchain_tx_hash: must have at most 128 bytes",
    ),
    (
        |r| terms(r).onchain_tx_hash = Some("0xab".into()),
        "operation.onchain_tx_hash: must be `0x` and 64 hex digits",
    ),
    (|r| r.postings.clear(), "postings: must not be empty"),
    (
        |r| r.postings[0].debit_subaccount_id.clear(),
        "postings[0].debit_subaccount_id: must not be empty",
    ),
    (
        |r| r.postings[0].debit_subaccount_id = long(),
        "postings[0].debit_subaccount_id: must have at most 128 bytes",
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
        "postings[0].hold_id: must have at most 128 bytes",
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
        "postings[0].amount: `1e5` is not a decimal number, for example `100.50`",
    ),
    (
        |r| r.postings[0].amount = number("NaN"),
        "postings[0].amount: `NaN` is not a decimal number, for example `100.50`",
    ),
    (
        |r| r.postings[0].amount = number("0.0000000000000000001"),
        "postings[0].amount: has more than 18 digits after the point",
    ),
    (
        |r| r.postings[0].amount = number(&"9".repeat(39)),
        "postings[0].amount: has more than 38 digits",
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
        "postings[0].amount.amount: is too large",
    ),
    (
        |r| r.postings[0].amount = amount("", "1"),
        "postings[0].amount: has no currency_code",
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

/// Refusals that depend on the stored rows: code, reason and text.
const KNOWN: &[(fn(&mut CreateOperationRequest), Code, &str, &str)] = &[
    (
        |r| r.postings[0].debit_subaccount_id = "u9:CFA-RUB".into(),
        Code::NotFound,
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    ),
    (
        |r| r.postings[0].hold_id = Some("missing".into()),
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

/// The invalid operation after a valid one.
fn batch(invalid: CreateOperationRequest) -> CreateOperationsRequest {
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
        operations: vec![keyed(pay(""), fresh()), keyed(invalid, fresh())],
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
    for (invalidate, text) in OPERATIONS {
        let mut request = pay(&fresh());
        invalidate(&mut request);
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
    for (invalidate, code, reason, text) in KNOWN {
        let mut request = pay(&fresh());
        invalidate(&mut request);
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
            // The valid operation before it debits one rouble.
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
        "the refused calls changed nothing"
    );
    world.assert_books_balance().await;
}

pub fn valid_hold() -> CreateHoldRequest {
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
        "hold.hold_id: must have at most 128 bytes",
    ),
    (
        |r| hold(r).subaccount_id.clear(),
        "hold.subaccount_id: must not be empty",
    ),
    (
        |r| hold(r).subaccount_id = long(),
        "hold.subaccount_id: must have at most 128 bytes",
    ),
    (|r| hold(r).amount = None, "hold.amount: is required"),
    (
        |r| hold(r).amount = amount("", "1"),
        "hold.amount: has no currency_code",
    ),
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
        "hold.owner: must have at most 128 bytes",
    ),
    (
        |r| hold(r).destination_subaccount_id = Some(long()),
        "hold.destination_subaccount_id: must have at most 128 bytes",
    ),
    (
        |r| {
            hold(r).expires_at = Some(Timestamp {
                seconds: i64::MAX,
                nanos: 0,
            })
        },
        "hold.expires_at: must be a time of the years 2000 to 2100",
    ),
    (
        |r| {
            hold(r).expires_at = Some(Timestamp {
                seconds: 0,
                nanos: 0,
            })
        },
        "hold.expires_at: must be a time of the years 2000 to 2100",
    ),
];

// rows: R198 R199 R200 R203 R225 R254
#[tokio::test]
async fn d23_every_bad_field_of_a_hold_is_named_in_call_and_topic() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut client = world.client.clone();
    for (invalidate, text) in HOLDS {
        let mut request = valid_hold();
        invalidate(&mut request);
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
    let mut request = valid_hold();
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
                "hold_id: must have at most 128 bytes",
            ),
        ),
        (consume("missing", None), missing),
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
        hold_id: "missing".into(),
        reason: String::new(),
    };
    assert_eq!(
        code_of(&ask(&world, "ledger.releaseHold", &release).await),
        missing
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "10.00", "0.00", "90.00"],
        "the refused calls changed nothing"
    );
}

// rows: R201 R203
#[tokio::test]
async fn d23_reads_of_missing_objects_fail_alike_in_call_and_topic() {
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
    let id = || "missing".to_owned();
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
    // Lists without rows are empty, not missing (D45).
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

/// An empty id, one that is too long, and one with a byte that no database accepts in text, each
/// with the text of its refusal.
fn invalid_ids(field: &str) -> [(String, String); 3] {
    let said = |problem: &str| format!("{field}: {problem}");
    [
        (String::new(), said("must not be empty")),
        (long(), said("must have at most 128 bytes")),
        ("u1\0".to_owned(), said("must have no control characters")),
    ]
}

// rows: R201 R203 R339
#[tokio::test]
async fn d23_ids_and_filters_of_reads_are_refused_like_those_of_writes() {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    // Sends invalid ids in the call, and over its topic if it has one. `$skip` is 1 for a filter,
    // which may be empty.
    macro_rules! read {
        ($method:ident, $request:ident, $field:ident, $topic:expr, $skip:literal) => {
            for (id, text) in invalid_ids(stringify!($field)).into_iter().skip($skip) {
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
        ("x".repeat(1_025), "owner: must have at most 128 bytes"),
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
    let invalid: &[Case<CreateOperationsRequest>] = &[
        (|r| r.mode = 3, "mode: has no value 3"),
        (|r| r.mode = -1, "mode: has no value -1"),
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
    for (invalidate, text) in invalid {
        let mut request = batch(pay(""));
        invalidate(&mut request);
        bad_field(&client.create_operations(request).await.unwrap_err(), text);
    }
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "10.00");
}

pub const RELEASES: &[Case<ReleaseHoldRequest>] = &[
    (|r| r.hold_id.clear(), "hold_id: must not be empty"),
    (
        |r| r.hold_id = long(),
        "hold_id: must have at most 128 bytes",
    ),
    (
        |r| r.hold_id = "h\0".into(),
        "hold_id: must have no control characters",
    ),
    (
        |r| r.reason = "x".repeat(1_025),
        "reason: must have at most 1024 bytes",
    ),
    (
        |r| r.reason = "a\nb".into(),
        "reason: must have no control characters",
    ),
];

pub const CONSUMPTIONS: &[Case<ConsumeHoldRequest>] = &[
    (|r| r.hold_id.clear(), "hold_id: must not be empty"),
    (
        |r| r.hold_id = long(),
        "hold_id: must have at most 128 bytes",
    ),
    (
        |r| r.hold_id = "h\0".into(),
        "hold_id: must have no control characters",
    ),
    (|r| r.operation_type = 99, "operation_type: has no value 99"),
    (|r| r.operation_type = -1, "operation_type: has no value -1"),
    (
        |r| r.external_ref = Some(long()),
        "external_ref: must have at most 128 bytes",
    ),
    (
        |r| r.external_ref = Some("a\0".into()),
        "external_ref: must have no control characters",
    ),
    (
        |r| r.amount = number("-1"),
        "amount: must be greater than zero",
    ),
    (|r| r.amount = number(""), "amount: is required"),
    (
        |r| r.amount = amount(BOND, "1"),
        "amount.currency_code: must be CFA-RUB",
    ),
];

pub const FINALITIES: &[Case<FinalizeOperationRequest>] = &[
    (
        |r| r.operation_id.clear(),
        "operation_id: must not be empty",
    ),
    (
        |r| r.operation_id = long(),
        "operation_id: must have at most 128 bytes",
    ),
    (
        |r| r.operation_id = "o\0".into(),
        "operation_id: must have no control characters",
    ),
    (
        |r| r.onchain_tx_hash = long(),
        "onchain_tx_hash: must have at most 128 bytes",
    ),
    (
        |r| r.onchain_tx_hash = "0x\0".into(),
        "onchain_tx_hash: must have no control characters",
    ),
    (
        |r| r.onchain_tx_hash = "'; DROP TABLE x;--".into(),
        "onchain_tx_hash: must be `0x` and 64 hex digits",
    ),
    (
        |r| r.onchain_tx_hash = "0".repeat(66),
        "onchain_tx_hash: must be `0x` and 64 hex digits",
    ),
    (
        |r| r.onchain_tx_hash = format!("0x{}", "0".repeat(63)),
        "onchain_tx_hash: must be `0x` and 64 hex digits",
    ),
    (
        |r| r.onchain_tx_hash = format!("0x{}g", "0".repeat(63)),
        "onchain_tx_hash: must be `0x` and 64 hex digits",
    ),
];

// rows: R199 R200 R203 R228 R316 R322 R339
#[tokio::test]
async fn d23_bad_fields_of_hold_and_operation_ends_are_named() {
    let world = World::new().await;
    let made = world.fund("u1", RUB, "100").await.operation_id;
    let hold_id = world.hold("u1", RUB, "10").await.hold_id;
    macro_rules! each {
        ($cases:expr, $method:ident, $topic:expr, $good:expr) => {
            for (invalidate, text) in $cases {
                let mut request = $good;
                invalidate(&mut request);
                let topic: Option<&str> = $topic;
                if let Some(topic) = topic {
                    let reply = ask(&world, topic, &request).await;
                    let expected = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", *text);
                    assert_eq!(code_of(&reply), expected, "{topic}");
                }
                bad_field(
                    &world.client.clone().$method(request).await.unwrap_err(),
                    text,
                );
            }
        };
    }
    let release = || ReleaseHoldRequest {
        context: write(&fresh()),
        hold_id: hold_id.clone(),
        reason: String::new(),
    };
    each!(
        RELEASES,
        release_hold,
        Some("ledger.releaseHold"),
        release()
    );
    let consume = || ConsumeHoldRequest {
        context: write(&fresh()),
        hold_id: hold_id.clone(),
        ..Default::default()
    };
    each!(
        CONSUMPTIONS,
        consume_hold,
        Some("ledger.consumeHold"),
        consume()
    );
    let finalize = || FinalizeOperationRequest {
        context: write(&fresh()),
        operation_id: made.clone(),
        onchain_tx_hash: String::new(),
    };
    each!(
        FINALITIES,
        finalize_operation,
        Some("ledger.finalizeOperation"),
        finalize()
    );

    let adjustments: &[Case<AdjustHoldRequest>] = &[
        (|r| r.hold_id.clear(), "hold_id: must not be empty"),
        (
            |r| r.hold_id = long(),
            "hold_id: must have at most 128 bytes",
        ),
        (
            |r| r.hold_id = "h\0".into(),
            "hold_id: must have no control characters",
        ),
        (
            |r| r.remaining_amount = None,
            "remaining_amount: is required",
        ),
        (
            |r| r.remaining_amount = number(""),
            "remaining_amount: is required",
        ),
        (
            |r| r.remaining_amount = number("-1"),
            "remaining_amount.amount: must not be negative",
        ),
        (
            |r| r.remaining_amount = number("0.001"),
            "remaining_amount.amount: has more fraction digits than allowed",
        ),
        (
            |r| r.remaining_amount = amount(BOND, "1"),
            "remaining_amount.currency_code: must be CFA-RUB",
        ),
        (
            |r| r.remaining_amount = amount("", "1"),
            "remaining_amount.currency_code: must be CFA-RUB",
        ),
    ];
    let adjust = || AdjustHoldRequest {
        context: write(&fresh()),
        hold_id: hold_id.clone(),
        remaining_amount: number("5"),
    };
    each!(adjustments, adjust_hold, None, adjust());
    let reversals: &[Case<ReverseOperationRequest>] = &[
        (
            |r| r.operation_id.clear(),
            "operation_id: must not be empty",
        ),
        (
            |r| r.operation_id = long(),
            "operation_id: must have at most 128 bytes",
        ),
        (
            |r| r.operation_id = "o\0".into(),
            "operation_id: must have no control characters",
        ),
        (
            |r| r.reason = "x".repeat(1_025),
            "reason: must have at most 1024 bytes",
        ),
        (
            |r| r.reason = "a\0".into(),
            "reason: must have no control characters",
        ),
    ];
    let reverse = || ReverseOperationRequest {
        context: write(&fresh()),
        operation_id: made.clone(),
        reason: String::new(),
    };
    each!(reversals, reverse_operation, None, reverse());
    let freezes: &[Case<SetSubAccountStatusRequest>] = &[
        (
            |r| r.subaccount_id.clear(),
            "subaccount_id: must not be empty",
        ),
        (
            |r| r.subaccount_id = long(),
            "subaccount_id: must have at most 128 bytes",
        ),
        (
            |r| r.subaccount_id = "u1\0".into(),
            "subaccount_id: must have no control characters",
        ),
        (|r| r.status = 0, "status: must be ACTIVE, FROZEN or CLOSED"),
        (|r| r.status = 99, "status: has no value 99"),
        (
            |r| r.reason = "x".repeat(1_025),
            "reason: must have at most 1024 bytes",
        ),
        (
            |r| r.reason = "a\0".into(),
            "reason: must have no control characters",
        ),
    ];
    let freeze = || SetSubAccountStatusRequest {
        context: write(&fresh()),
        subaccount_id: "u1:CFA-RUB".into(),
        status: SubAccountStatus::Frozen as i32,
        reason: String::new(),
    };
    each!(freezes, set_sub_account_status, None, freeze());
    let finalities: &[Case<FinalizeOperationsRequest>] = &[
        (
            |r| r.operation_ids[1].clear(),
            "operation_ids[1]: must not be empty",
        ),
        (
            |r| r.operation_ids[1] = long(),
            "operation_ids[1]: must have at most 128 bytes",
        ),
        (
            |r| r.operation_ids[1] = "o\0".into(),
            "operation_ids[1]: must have no control characters",
        ),
        (
            |r| r.onchain_tx_hash = long(),
            "onchain_tx_hash: must have at most 128 bytes",
        ),
        (
            |r| r.onchain_tx_hash = "0xab".into(),
            "onchain_tx_hash: must be `0x` and 64 hex digits",
        ),
    ];
    let several = || FinalizeOperationsRequest {
        context: write(&fresh()),
        operation_ids: vec![made.clone(), made.clone()],
        onchain_tx_hash: String::new(),
    };
    each!(finalities, finalize_operations, None, several());

    // Missing objects. A batch names the index.
    let mut client = world.client.clone();
    let missing_id = || "missing".to_owned();
    let mut request = adjust();
    request.hold_id = missing_id();
    let answer = client.adjust_hold(request).await;
    refused(answer, Code::NotFound, "HOLD_NOT_FOUND", "Hold not found");
    let mut request = reverse();
    request.operation_id = missing_id();
    let answer = client.reverse_operation(request).await;
    refused(
        answer,
        Code::NotFound,
        "OPERATION_NOT_FOUND",
        "Operation not found",
    );
    let mut request = freeze();
    request.subaccount_id = "u9:CFA-RUB".into();
    let answer = client.set_sub_account_status(request).await;
    refused(
        answer,
        Code::NotFound,
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    );
    let mut request = several();
    request.operation_ids[1] = missing_id();
    let status = client.finalize_operations(request).await.unwrap_err();
    assert_eq!(status.message(), "Operation not found");
    assert_eq!(fact(&status, "operation_index").as_deref(), Some("1"));
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "10.00", "0.00", "90.00"],
        "the refused calls changed nothing"
    );
    let operation = world.get_operation(&made).await.operation.unwrap();
    assert_eq!(operation.finalized_at, None);
}

/// A step before every operation.
fn step(step: Step) -> HoldStep {
    HoldStep {
        step: Some(step),
        before_operation: 0,
    }
}

/// Every kind of hold step, with an invalid value in every field.
fn invalid_steps(hold_id: &str) -> Vec<(Step, String)> {
    let mut all = Vec::new();
    let mut add = |step: Step, text: &str| all.push((step, text.to_owned()));
    for (invalidate, text) in HOLDS {
        let mut request = valid_hold();
        invalidate(&mut request);
        let text = format!("open.{text}");
        add(Step::Open(OpenHold { hold: request.hold }), &text);
    }
    let amounts = |field: &str, may_lack: bool| {
        let said = |problem: &str| format!("{field}{problem}");
        let mut all = vec![
            (number("0"), said(": must be greater than zero")),
            (number("-1"), said(": must be greater than zero")),
            (
                number("0.001"),
                said(".amount: has more fraction digits than allowed"),
            ),
            (amount(BOND, "1"), said(".currency_code: must be CFA-RUB")),
        ];
        if !may_lack {
            all.push((None, said(": is required")));
        }
        all
    };
    let reasons = |field: &str| {
        [
            (
                "x".repeat(1_025),
                format!("{field}: must have at most 1024 bytes"),
            ),
            (
                "a\0".to_owned(),
                format!("{field}: must have no control characters"),
            ),
        ]
    };
    let split = || SplitHold {
        parent_hold_id: hold_id.to_owned(),
        hold_id: fresh(),
        amount: number("1"),
        reason: String::new(),
    };
    for (id, text) in invalid_ids("split.parent_hold_id") {
        add(
            Step::Split(SplitHold {
                parent_hold_id: id,
                ..split()
            }),
            &text,
        );
    }
    for (id, text) in invalid_ids("split.hold_id") {
        add(
            Step::Split(SplitHold {
                hold_id: id,
                ..split()
            }),
            &text,
        );
    }
    for (amount, text) in amounts("split.amount", false) {
        add(Step::Split(SplitHold { amount, ..split() }), &text);
    }
    for (reason, text) in reasons("split.reason") {
        add(Step::Split(SplitHold { reason, ..split() }), &text);
    }
    let grow = || GrowHold {
        hold_id: hold_id.to_owned(),
        amount: number("1"),
    };
    for (id, text) in invalid_ids("grow.hold_id") {
        add(
            Step::Grow(GrowHold {
                hold_id: id,
                ..grow()
            }),
            &text,
        );
    }
    for (amount, text) in amounts("grow.amount", false) {
        add(Step::Grow(GrowHold { amount, ..grow() }), &text);
    }
    let back = || ReturnHold {
        hold_id: hold_id.to_owned(),
        ..Default::default()
    };
    for (id, text) in invalid_ids("return_to_parent.hold_id") {
        add(
            Step::ReturnToParent(ReturnHold {
                hold_id: id,
                ..back()
            }),
            &text,
        );
    }
    for (amount, text) in amounts("return_to_parent.amount", true) {
        add(Step::ReturnToParent(ReturnHold { amount, ..back() }), &text);
    }
    for (reason, text) in reasons("return_to_parent.reason") {
        add(Step::ReturnToParent(ReturnHold { reason, ..back() }), &text);
    }
    add(
        Step::ReturnToParent(back()),
        "return_to_parent.hold_id: is a hold without parent",
    );
    let shrink = || ShrinkHold {
        hold_id: hold_id.to_owned(),
        ..Default::default()
    };
    for (id, text) in invalid_ids("shrink.hold_id") {
        add(
            Step::Shrink(ShrinkHold {
                hold_id: id,
                ..shrink()
            }),
            &text,
        );
    }
    for (amount, text) in amounts("shrink.amount", true) {
        add(Step::Shrink(ShrinkHold { amount, ..shrink() }), &text);
    }
    for (reason, text) in reasons("shrink.reason") {
        add(Step::Shrink(ShrinkHold { reason, ..shrink() }), &text);
    }
    let spend = |hold_id: &str, amount| {
        let hold_id = hold_id.to_owned();
        Step::Spend(SpendHold { hold_id, amount })
    };
    for (id, text) in invalid_ids("spend.hold_id") {
        add(spend(&id, number("1")), &text);
    }
    for (amount, text) in amounts("spend.amount", false) {
        add(spend(hold_id, amount), &text);
    }
    all
}

// rows: R228 R329 R339
#[tokio::test]
async fn d23_every_bad_field_of_a_hold_step_is_named_by_its_place() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold_id = world.hold("u1", RUB, "10").await.hold_id;
    let mut client = world.client.clone();
    let good = || {
        step(Step::Shrink(ShrinkHold {
            hold_id: hold_id.clone(),
            amount: number("1"),
            ..Default::default()
        }))
    };
    let request = |invalid: HoldStep| CreateOperationsRequest {
        context: write(&fresh()),
        hold_steps: vec![good(), invalid],
        ..Default::default()
    };
    for (invalid, text) in invalid_steps(&hold_id) {
        let answer = client.create_operations(request(step(invalid))).await;
        bad_field(&answer.unwrap_err(), &format!("hold_steps[1].{text}"));
    }
    let answer = client.create_operations(request(HoldStep::default())).await;
    bad_field(&answer.unwrap_err(), "hold_steps[1].step: is required");
    let missing = Step::Grow(GrowHold {
        hold_id: "missing".into(),
        amount: number("1"),
    });
    let status = client
        .create_operations(request(step(missing)))
        .await
        .unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::NotFound, "Hold not found")
    );
    assert_eq!(fact(&status, "hold_step_index").as_deref(), Some("1"));
    assert_eq!(
        world.balance("u1:CFA-RUB").await[1],
        "10.00",
        "the refused calls changed nothing"
    );
}

// rows: R214 R329 R339
#[tokio::test]
async fn d23_every_bad_field_of_a_batch_itself_is_named() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    fn scaled(instrument_id: &str, decimals: u32) -> Vec<InstrumentScale> {
        vec![InstrumentScale {
            instrument_id: instrument_id.to_owned(),
            decimals,
        }]
    }
    fn of_source(r: &mut CreateOperationsRequest, first: u64, through: u64) {
        r.source = "log".into();
        (r.first_sequence, r.through_sequence) = (first, through);
    }
    const ORDER: &str =
        "through_sequence: must not be below first_sequence, and sequences start at 1";
    const MODE: &str = "mode: must be all or nothing with a source or hold steps";
    let invalid: &[Case<CreateOperationsRequest>] = &[
        (|r| r.operations.clear(), "operations: must not be empty"),
        (|r| r.source = long(), "source: must have at most 128 bytes"),
        (
            |r| r.source = "log\0".into(),
            "source: must have no control characters",
        ),
        (|r| of_source(r, 0, 0), ORDER),
        (|r| of_source(r, 0, 1), ORDER),
        (|r| of_source(r, 2, 1), ORDER),
        (
            |r| {
                of_source(r, 1, 1);
                r.mode = BatchMode::Independent as i32;
            },
            MODE,
        ),
        (
            |r| {
                r.hold_steps = vec![HoldStep::default()];
                r.mode = BatchMode::Independent as i32;
            },
            MODE,
        ),
        (
            |r| r.instrument_scales = scaled("", 2),
            "instrument_scales[0].instrument_id: must not be empty",
        ),
        (
            |r| r.instrument_scales = scaled(&long(), 2),
            "instrument_scales[0].instrument_id: must have at most 128 bytes",
        ),
        (
            |r| r.instrument_scales = scaled("NEW-1", 19),
            "instrument_scales[0].decimals: must be at most 18",
        ),
        (
            |r| r.instrument_scales = scaled("NEW-1", 258),
            "instrument_scales[0].decimals: must be at most 18",
        ),
        (
            |r| r.instrument_scales = scaled(RUB, 3),
            "instrument_scales[0].decimals: instrument CFA-RUB has 2 decimals",
        ),
    ];
    let mut client = world.client.clone();
    for (invalidate, text) in invalid {
        let mut request = batch(pay(""));
        invalidate(&mut request);
        bad_field(&client.create_operations(request).await.unwrap_err(), text);
    }
    // The scales of a single operation are checked alike, in the call and over its topic.
    for (scales, text) in [
        (
            scaled("", 2),
            "instrument_scales[0].instrument_id: must not be empty",
        ),
        (
            scaled("NEW-1", 19),
            "instrument_scales[0].decimals: must be at most 18",
        ),
        (
            scaled(RUB, 3),
            "instrument_scales[0].decimals: instrument CFA-RUB has 2 decimals",
        ),
    ] {
        let mut request = pay(&fresh());
        request.instrument_scales = scales;
        let reply = ask(&world, "ledger.createOperation", &request).await;
        assert_eq!(code_of(&reply).2, text);
        bad_field(&client.create_operation(request).await.unwrap_err(), text);
    }
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "100.00");
}

// rows: R201 R203 R010 R339
#[tokio::test]
async fn d23_bad_pages_and_filters_are_refused_over_topics_as_in_the_call() {
    let world = World::new().await;
    fn paged(page_size: i32, page_token: &str) -> Option<PaginationRequest> {
        Some(PaginationRequest {
            page_size,
            page_token: page_token.to_owned(),
        })
    }
    const SIZE: &str = "pagination.page_size: must not be negative";
    const TOKEN: &str = "pagination.page_token: is not a token of this service";
    let operations: &[Case<ListOperationsRequest>] = &[
        (|r| r.pagination = paged(-1, ""), SIZE),
        (|r| r.pagination = paged(0, "nonsense"), TOKEN),
        (|r| r.r#type = 99, "type: has no value 99"),
        (|r| r.status = 99, "status: has no value 99"),
    ];
    let mut client = world.client.clone();
    for (invalidate, text) in operations {
        let mut request = ListOperationsRequest::default();
        invalidate(&mut request);
        let reply = ask(&world, "ledger.listOperations", &request).await;
        assert_eq!(
            code_of(&reply),
            ("INVALID_ARGUMENT", "INVALID_ARGUMENT", *text)
        );
        bad_field(&client.list_operations(request).await.unwrap_err(), text);
    }
    for (pagination, text) in [(paged(-1, ""), SIZE), (paged(0, "nonsense"), TOKEN)] {
        let request = ListAccountsRequest {
            pagination,
            ..Default::default()
        };
        let reply = ask(&world, "ledger.listAccounts", &request).await;
        assert_eq!(
            code_of(&reply),
            ("INVALID_ARGUMENT", "INVALID_ARGUMENT", text)
        );
        bad_field(&client.list_accounts(request).await.unwrap_err(), text);
    }
    world.fund("u1", RUB, "1").await;
    let request = GetBalanceRequest {
        subaccount_id: "u1:CFA-RUB".into(),
        as_of: Some(Timestamp {
            seconds: 4_000_000_000,
            nanos: 0,
        }),
        ..Default::default()
    };
    let reply = ask(&world, "ledger.getBalance", &request).await;
    assert_eq!(code_of(&reply).2, "as_of: must not be in the future");
    bad_field(
        &client.get_balance(request).await.unwrap_err(),
        "as_of: must not be in the future",
    );
}
