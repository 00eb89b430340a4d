//! Reads of missing objects, and invalid ids, filters and pages of reads (D23, D45).

use prost::Message;
use prost_types::Timestamp;
use proto::{common::v1::PaginationRequest, ledger::v1::*};
use tonic::Code;

use crate::{
    harness::*,
    refusals::{Case, bad_field, code_of, invalid_ids},
    requests::ask,
};

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
