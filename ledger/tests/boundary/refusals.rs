//! Invalid values of every field: code, reason and text are the same in the call, in a batch (with
//! the index) and over the request topics (D23, D26, D45). Has the tables of invalid values and the
//! tests of operations and batches.

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

/// A change that makes a valid message invalid, and the resulting text.
pub type Case<M> = (fn(&mut M), &'static str);

const LONG: usize = 257;

pub fn long() -> String {
    "x".repeat(LONG)
}

pub fn number(value: &str) -> Option<MonetaryAmount> {
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

pub fn bad_field(status: &Status, text: &str) {
    assert_eq!(status.message(), text);
    assert_eq!(status.code(), Code::InvalidArgument, "{text}");
    let named = rpc::status::reason(status);
    assert_eq!(named.as_deref(), Some("INVALID_ARGUMENT"), "{text}");
}

pub fn fact(status: &Status, name: &str) -> Option<String> {
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

pub fn hold(request: &mut CreateHoldRequest) -> &mut Hold {
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

/// An empty id, one that is too long, and one with a byte that no database accepts in text, each
/// with the text of its refusal.
pub fn invalid_ids(field: &str) -> [(String, String); 3] {
    let said = |problem: &str| format!("{field}: {problem}");
    [
        (String::new(), said("must not be empty")),
        (long(), said("must have at most 128 bytes")),
        ("u1\0".to_owned(), said("must have no control characters")),
    ]
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
