//! Statements and balances as of a time.

use proto::{
    common::v1::{OperationType, PaginationRequest},
    convert::to_timestamp_us,
    ledger::v1::*,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tonic::Code;

use crate::harness::*;

const SECOND_US: i64 = 1_000_000;

fn request(from_us: Option<i64>, to_us: Option<i64>) -> GetStatementRequest {
    GetStatementRequest {
        subaccount_id: "u1:CFA-RUB".to_owned(),
        from: from_us.map(to_timestamp_us),
        to: to_us.map(to_timestamp_us),
        ..Default::default()
    }
}

async fn ask(client: &Client, request: GetStatementRequest) -> GetStatementResponse {
    client
        .clone()
        .get_statement(request)
        .await
        .unwrap()
        .into_inner()
}

async fn pay(world: &World, from: &str, to: &str, value: &str) {
    let legs = [(from, to, value, RUB)];
    let request = operation(OperationType::Payment, "u1", &fresh(), &legs);
    let answer = world.client.clone().create_operation(request).await;
    answer.unwrap();
}

fn number(value: &Option<proto::common::v1::Decimal>) -> types::Decimal {
    value.as_ref().unwrap().value.parse().unwrap()
}

/// Asserts that a statement is consistent, line by line and as a whole.
fn assert_consistent(head: &GetStatementResponse, lines: &[StatementLine]) {
    let mut balance = number(&head.opening_balance);
    let (mut sum_in, mut sum_out) = (types::Decimal::ZERO, types::Decimal::ZERO);
    for (line, version) in lines.iter().zip(head.opening_version + 1..) {
        let amount = number(&line.amount);
        balance = balance.checked_add(amount).unwrap();
        assert_eq!((line.version, number(&line.balance)), (version, balance));
        if amount.is_negative() {
            sum_out = sum_out.checked_sub(amount).unwrap();
        } else {
            sum_in = sum_in.checked_add(amount).unwrap();
        }
    }
    assert_eq!(number(&head.closing_balance), balance);
    assert_eq!(
        head.closing_version,
        head.opening_version + lines.len() as u64
    );
    assert_eq!(
        (number(&head.sum_in), number(&head.sum_out)),
        (sum_in, sum_out)
    );
}

// rows: R194 R215
#[tokio::test]
async fn r194_a_statement_has_opening_postings_and_closing_of_a_period() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    world.clock.advance_us(SECOND_US);
    pay(&world, "u1:CFA-RUB", "u2:CFA-RUB", "30.50").await;
    world.clock.advance_us(SECOND_US);
    pay(&world, "u2:CFA-RUB", "u1:CFA-RUB", "0.25").await;
    world.clock.advance_us(SECOND_US);

    let whole = ask(&world.client, request(None, None)).await;
    assert_consistent(&whole, &whole.lines);
    assert_eq!(whole.lines.len(), 3);
    let second = &whole.lines[1];
    assert_eq!(second.counterparty_subaccount_id, "u2:CFA-RUB");
    assert_eq!(second.operation_type(), OperationType::Payment);
    assert_eq!(number(&second.amount).to_string(), "-30.50");
    assert_eq!(second.at, Some(to_timestamp_us(START_US + SECOND_US)));
    let operation = world.get_operation(&second.operation_id).await;
    assert_eq!(operation.postings[0].posting_id, second.posting_id);

    // `from` is inclusive and `to` is exclusive, so periods can be adjacent.
    let middle = START_US + SECOND_US;
    let before = ask(&world.client, request(None, Some(middle))).await;
    let after = ask(&world.client, request(Some(middle), None)).await;
    assert_consistent(&before, &before.lines);
    assert_consistent(&after, &after.lines);
    assert_eq!((before.lines.len(), after.lines.len()), (1, 2));
    assert_eq!(before.closing_balance, after.opening_balance);
    let empty = ask(&world.client, request(Some(middle), Some(middle))).await;
    assert_consistent(&empty, &[]);
    assert_eq!(number(&empty.opening_balance).to_string(), "100.00");
}

// rows: R194
#[tokio::test]
async fn r194_a_balance_is_that_after_the_last_posting_at_or_before_the_time() {
    let world = World::new().await;
    let as_of = async |at_us: i64| {
        let request = GetBalanceRequest {
            context: None,
            subaccount_id: "u1:CFA-RUB".to_owned(),
            as_of: Some(to_timestamp_us(at_us)),
        };
        world.client.clone().get_balance(request).await
    };
    world.fund("u1", RUB, "100").await;
    world.clock.advance_us(SECOND_US);
    pay(&world, "u1:CFA-RUB", "u2:CFA-RUB", "1").await;
    pay(&world, "u1:CFA-RUB", "u2:CFA-RUB", "2").await;
    world.hold("u1", RUB, "10").await;
    let paid_us = START_US + SECOND_US;
    for (at_us, balance, version) in [
        (START_US - 1, "0.00", 0),
        (START_US, "100.00", 1),
        (paid_us - 1, "100.00", 1),
        (paid_us, "97.00", 3),
    ] {
        let answer = as_of(at_us).await.unwrap().into_inner();
        assert_eq!(answer.balance.unwrap().value, balance);
        assert_eq!((answer.version, answer.held), (version, None));
    }
    refused(
        as_of(paid_us + 1).await,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
        "as_of: must not be in the future",
    );
}

// rows: R194 R010
#[tokio::test]
async fn r194_pages_of_a_statement_never_shift() {
    let world = World::new().await;
    world.fund("u1", RUB, "1000").await;
    world.fund("u2", RUB, "1000").await;
    let mut rng = StdRng::seed_from_u64(20);
    for _ in 0..40 {
        world.clock.advance_us(rng.random_range(0..2) * SECOND_US);
        let value = rng.random_range(1..9).to_string();
        let (from, to) = if rng.random_bool(0.5) {
            ("u1", "u2")
        } else {
            ("u2", "u1")
        };
        let (from, to) = (format!("{from}:CFA-RUB"), format!("{to}:CFA-RUB"));
        pay(&world, &from, &to, &value).await;
    }
    let (mut lines, mut heads, mut token) = (Vec::new(), Vec::new(), String::new());
    loop {
        let mut page = request(None, None);
        page.pagination = Some(PaginationRequest {
            page_size: 7,
            page_token: token,
        });
        let mut page = ask(&world.client, page).await;
        lines.append(&mut page.lines);
        token = page.pagination.take().unwrap().next_page_token;
        heads.push(page);
        // Later postings are not part of this statement.
        pay(&world, "u1:CFA-RUB", "u2:CFA-RUB", "1").await;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!((lines.len(), heads.len()), (41, 6));
    assert!(heads.iter().all(|head| *head == heads[0]));
    assert_consistent(&heads[0], &lines);

    // A token of another statement is refused.
    let mut other = request(Some(START_US), None);
    other.pagination = Some(PaginationRequest {
        page_size: 1,
        page_token: String::new(),
    });
    let token = ask(&world.client, other).await.pagination.unwrap();
    let mut wrong = request(None, None);
    wrong.pagination = Some(PaginationRequest {
        page_size: 1,
        page_token: token.next_page_token,
    });
    refused(
        world.client.clone().get_statement(wrong).await,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
        "pagination.page_token: was given for other filters",
    );
}

// rows: R194 R237
#[tokio::test]
async fn r194_balances_as_of_any_time_are_found_in_a_long_history() {
    let world = World::new().await;
    world.fund("u1", RUB, "1000").await;
    let mut times = vec![START_US];
    let mut rng = StdRng::seed_from_u64(21);
    for round in 0..30 {
        world.clock.advance_us(rng.random_range(0..3));
        let operations = (0..10)
            .map(|index| {
                // Payments in both directions: each sub-account is debited and credited.
                let legs = match (round + index) % 3 {
                    2 => [("u2:CFA-RUB", "u1:CFA-RUB", "0.01", RUB)],
                    _ => [("u1:CFA-RUB", "u2:CFA-RUB", "0.01", RUB)],
                };
                item(
                    OperationType::Payment,
                    "u1",
                    &format!("{round}-{index}"),
                    &legs,
                )
            })
            .collect();
        let request = CreateOperationsRequest {
            context: write(&fresh()),
            operations,
            ..Default::default()
        };
        world
            .client
            .clone()
            .create_operations(request)
            .await
            .unwrap();
        times.extend([world.clock.now_us(); 10]);
    }
    for at_us in START_US - 1..=world.clock.now_us() {
        let statement = ask(&world.client, request(None, Some(at_us))).await;
        let expected = times.iter().filter(|time| **time < at_us).count();
        assert_eq!(statement.closing_version as usize, expected, "{at_us}");
    }
    // The other sub-account, in pages whose size is no divisor of its versions.
    let (mut lines, mut token) = (Vec::new(), String::new());
    let head = loop {
        let mut page = request(None, None);
        page.subaccount_id = "u2:CFA-RUB".to_owned();
        page.pagination = Some(PaginationRequest {
            page_size: 37,
            page_token: token,
        });
        let mut page = ask(&world.client, page).await;
        lines.append(&mut page.lines);
        token = page.pagination.take().unwrap().next_page_token;
        if token.is_empty() {
            break page;
        }
    };
    assert_eq!(lines.len(), 300);
    assert_consistent(&head, &lines);
}

// rows: R215
#[tokio::test]
async fn r215_ledger_time_does_not_go_back_with_the_clock() {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    world.clock.advance_us(-10 * SECOND_US);
    world.fund("u1", RUB, "1").await;
    let lines = ask(&world.client, request(None, None)).await.lines;
    assert_eq!((lines.len(), &lines[1].at), (2, &lines[0].at));
}

// rows: R339 R333
#[tokio::test]
async fn r339_a_statement_is_refused_with_a_clear_text() {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    let invalid = async |asked: GetStatementRequest, text: &str| {
        refused(
            world.client.clone().get_statement(asked).await,
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
            text,
        );
    };
    let (now, later) = (Some(START_US), Some(START_US + 1));
    invalid(
        request(now, Some(START_US - 1)),
        "from: must not be after to",
    )
    .await;
    invalid(request(later, None), "from: must not be in the future").await;
    invalid(request(None, later), "to: must not be in the future").await;
    let mut unknown = request(None, None);
    unknown.subaccount_id = "u9:CFA-RUB".to_owned();
    refused(
        world.client.clone().get_statement(unknown).await,
        Code::NotFound,
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    );
    let own = world.as_caller("sandbox.investor.u1");
    assert_eq!(ask(&own, request(None, None)).await.lines.len(), 1);
    let auditor = world.as_caller("sandbox.auditor");
    assert_eq!(ask(&auditor, request(None, None)).await.lines.len(), 1);
    let other = world.as_caller("sandbox.investor.u2");
    let answer = other.clone().get_statement(request(None, None)).await;
    assert_eq!(answer.unwrap_err().code(), Code::PermissionDenied);
}
