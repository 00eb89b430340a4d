//! Invalid fields of holds, of their ends and steps, and of the ends of operations (D23).

use proto::{
    common::v1::MonetaryAmount,
    ledger::v1::{hold_step::Step, *},
};
use tonic::Code;

use crate::{
    harness::*,
    refusals::{
        CONSUMPTIONS, Case, FINALITIES, HOLDS, RELEASES, bad_field, code_of, fact, hold,
        invalid_ids, long, number, valid_hold,
    },
    requests::ask,
};

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
