//! Velocity limits.

use proto::{
    common::v1::{
        Decimal,
        OperationType::{self, Deposit, Enforcement, P2pTransfer, Payment, TradeSell},
    },
    ledger::v1::*,
};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::harness::*;

const SECOND_US: i64 = 1_000_000;
const TEXT: &str = "Velocity limit exceeded";

fn limit(limit_id: &str, side: PostingSide, value: &str) -> VelocityLimit {
    VelocityLimit {
        limit_id: limit_id.to_owned(),
        instrument_id: RUB.to_owned(),
        side: side.into(),
        window_seconds: 60,
        amount: Some(Decimal {
            value: value.to_owned(),
        }),
        ..Default::default()
    }
}

async fn set(world: &World, key: &str, limit: VelocityLimit) -> Answer<SetVelocityLimitResponse> {
    set_as(world, "sandbox.compliance", key, limit).await
}

async fn set_as(
    world: &World,
    credential: &str,
    key: &str,
    limit: VelocityLimit,
) -> Answer<SetVelocityLimitResponse> {
    let request = SetVelocityLimitRequest {
        context: write(key),
        limit: Some(limit),
        reason: "test".to_owned(),
    };
    world
        .as_caller(credential)
        .set_velocity_limit(request)
        .await
}

async fn put(world: &World, limit: VelocityLimit) {
    set(world, &fresh(), limit).await.unwrap();
}

fn payment(key: &str, from: &str, to: &str, value: &str) -> CreateOperationRequest {
    let (from, to) = (format!("{from}:CFA-RUB"), format!("{to}:CFA-RUB"));
    operation(Payment, "u1", key, &[(&from, &to, value, RUB)])
}

async fn pay(world: &World, from: &str, value: &str) -> Answer<CreateOperationResponse> {
    let request = payment(&fresh(), from, "shop", value);
    world.client.clone().create_operation(request).await
}

/// Asserts that a limit refuses the call; returns the metadata of the refusal.
#[track_caller]
fn limited<T: std::fmt::Debug>(answer: Answer<T>) -> std::collections::HashMap<String, String> {
    let status: Status = answer.expect_err("is refused");
    assert_eq!(
        (status.code(), status.message()),
        (Code::FailedPrecondition, TEXT)
    );
    assert_eq!(
        rpc::status::reason(&status).as_deref(),
        Some("LIMIT_EXCEEDED")
    );
    status.get_details_error_info().unwrap().metadata
}

async fn world() -> World {
    let world = World::new().await;
    world.fund("u1", RUB, "1000").await;
    world.fund("u2", RUB, "1000").await;
    world
}

// rows: R237 R339
#[tokio::test]
async fn r237_a_limit_is_reached_not_passed_and_the_refusal_names_its_figures() {
    let world = world().await;
    put(&world, limit("daily", PostingSide::Debit, "100")).await;
    pay(&world, "u1", "60").await.unwrap();
    let facts = limited(pay(&world, "u1", "40.01").await);
    let fact = |name: &str| facts[name].as_str();
    assert_eq!(
        [
            fact("limit_id"),
            fact("subaccount_id"),
            fact("instrument_id"),
            fact("window_seconds")
        ],
        ["daily", "u1:CFA-RUB", "CFA-RUB", "60"]
    );
    assert_eq!(
        [fact("limit"), fact("used"), fact("left"), fact("asked")],
        ["100.00", "60.00", "40.00", "40.01"]
    );
    pay(&world, "u1", "40").await.unwrap();
    assert_eq!(limited(pay(&world, "u1", "0.01").await)["left"], "0.00");
    // Each user has a separate count. Credits are the other side. System sub-accounts have no
    // limits.
    pay(&world, "u2", "100").await.unwrap();
    world.fund("u1", RUB, "500").await;
    world.assert_books_balance().await;
}

// rows: R237
#[tokio::test]
async fn r237_a_limit_applies_to_a_user_without_rows() {
    let world = world().await;
    let mut own = limit("newcomer", PostingSide::Credit, "10");
    own.user_id = "u9".to_owned();
    put(&world, own).await;
    let give = |value: &'static str| {
        let request = payment(&fresh(), "u1", "u9", value);
        let mut client = world.client.clone();
        async move { client.create_operation(request).await }
    };
    assert_eq!(limited(give("10.01").await)["left"], "10.00");
    give("10").await.unwrap();
    limited(give("0.01").await);
}

// rows: R237
#[tokio::test]
async fn r237_a_posting_counts_until_it_is_exactly_a_window_old() {
    let world = world().await;
    put(&world, limit("minute", PostingSide::Debit, "100")).await;
    pay(&world, "u1", "70").await.unwrap();
    world.clock.advance_us(SECOND_US);
    pay(&world, "u1", "30").await.unwrap();
    world.clock.advance_us(59 * SECOND_US - 1);
    assert_eq!(limited(pay(&world, "u1", "1").await)["used"], "100.00");
    world.clock.advance_us(1);
    assert_eq!(limited(pay(&world, "u1", "71").await)["used"], "30.00");
    pay(&world, "u1", "70").await.unwrap();
    world.clock.advance_us(SECOND_US);
    pay(&world, "u1", "30").await.unwrap();
}

// rows: R237
#[tokio::test]
async fn r237_a_window_of_many_postings_is_counted_from_its_start() {
    let world = world().await;
    for round in 0..20 {
        world.clock.advance_us(SECOND_US);
        let operations = (0..10)
            .map(|index| {
                let key = format!("{round}-{index}");
                item(
                    Payment,
                    "u1",
                    &key,
                    &[("u1:CFA-RUB", "shop:CFA-RUB", "0.10", RUB)],
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
    }
    // There are 200 postings, ten of 0.10 per second, so a window of five seconds sums to 5.00.
    let mut five = limit("five", PostingSide::Debit, "6");
    five.window_seconds = 5;
    put(&world, five).await;
    assert_eq!(limited(pay(&world, "u1", "2").await)["used"], "5.00");
    pay(&world, "u1", "1").await.unwrap();
}

// rows: R237 R214
#[tokio::test]
async fn r237_commands_of_one_batch_and_of_one_group_see_each_other() {
    let world = world().await;
    put(&world, limit("daily", PostingSide::Debit, "100")).await;
    let legs = [("u1:CFA-RUB", "shop:CFA-RUB", "60", RUB)];
    let two = |mode: BatchMode| CreateOperationsRequest {
        context: write(&fresh()),
        operations: vec![
            item(Payment, "u1", &fresh(), &legs),
            item(Payment, "u1", &fresh(), &legs),
        ],
        mode: mode.into(),
        ..Default::default()
    };
    let mut client = world.client.clone();
    let facts = limited(client.create_operations(two(BatchMode::AllOrNothing)).await);
    assert_eq!(
        (facts["operation_index"].as_str(), facts["used"].as_str()),
        ("1", "60.00")
    );
    // The refused batch was rolled back: the whole limit is available.
    let outcomes = client.create_operations(two(BatchMode::Independent)).await;
    let outcomes = outcomes.unwrap().into_inner().outcomes;
    assert!(outcomes[0].operation.is_some());
    assert_eq!(
        (
            outcomes[1].error_reason.as_str(),
            outcomes[1].error_message.as_str()
        ),
        ("LIMIT_EXCEEDED", TEXT)
    );

    // 40 concurrent calls, of which four fit.
    let tasks: Vec<_> = (0..40)
        .map(|_| {
            let (mut client, request) =
                (world.client.clone(), payment(&fresh(), "u2", "shop", "25"));
            tokio::spawn(async move { client.create_operation(request).await })
        })
        .collect();
    let mut done = 0;
    for task in tasks {
        match task.await.unwrap() {
            Ok(_) => done += 1,
            refused => drop(limited(refused)),
        }
    }
    assert_eq!(done, 4);
    assert_eq!(world.balance("u2:CFA-RUB").await[0], "900.00");
}

// rows: R237 R195
#[tokio::test]
async fn r237_a_refusal_stays_bound_to_its_key() {
    let world = world().await;
    put(&world, limit("minute", PostingSide::Debit, "100")).await;
    let request = payment("bound", "u1", "shop", "101");
    let mut client = world.client.clone();
    limited(client.create_operation(request.clone()).await);
    world.clock.advance_us(3_600 * SECOND_US);
    let remove = RemoveVelocityLimitRequest {
        context: write(&fresh()),
        limit_id: "minute".to_owned(),
        reason: "test".to_owned(),
    };
    let mut approved = world.as_caller(testkit::APPROVED);
    approved.remove_velocity_limit(remove).await.unwrap();
    limited(client.create_operation(request.clone()).await);
    let world = world.restart().await;
    limited(world.client.clone().create_operation(request).await);
    pay(&world, "u1", "101").await.unwrap();
}

// rows: R237
#[tokio::test]
async fn r237_a_limit_is_about_its_user_account_side_and_types() {
    let world = world().await;
    world.fund("u1", BOND, "50").await;
    let mut own = limit("own", PostingSide::Credit, "10");
    own.user_id = "u1".to_owned();
    own.operation_types = vec![Payment.into(), P2pTransfer.into()];
    put(&world, own).await;
    let mut invest = limit("invest", PostingSide::Debit, "5");
    invest.account_type = AccountType::Invest.into();
    invest.instrument_id = BOND.to_owned();
    put(&world, invest).await;

    let send = async |kind, from: &str, to: &str, value: &str, instrument: &str| {
        let (from, to) = (format!("{from}:{instrument}"), format!("{to}:{instrument}"));
        let request = operation(kind, "u2", &fresh(), &[(&from, &to, value, instrument)]);
        world.client.clone().create_operation(request).await
    };
    send(Payment, "u2", "u1", "6", RUB).await.unwrap();
    assert_eq!(
        limited(send(P2pTransfer, "u2", "u1", "5", RUB).await)["used"],
        "6.00"
    );
    send(Deposit, "u2", "u1", "5", RUB).await.unwrap();
    send(Payment, "u1", "u2", "500", RUB).await.unwrap();
    send(TradeSell, "u1", "u2", "5", BOND).await.unwrap();
    assert_eq!(
        limited(send(TradeSell, "u1", "u2", "1", BOND).await)["limit_id"],
        "invest"
    );
    // `u2` has a separate count, and the limit does not apply to the credit of `u1`.
    send(TradeSell, "u2", "u1", "5", BOND).await.unwrap();
}

// rows: R237
#[tokio::test]
async fn r237_an_enforcement_act_of_a_service_passes_limits_and_freezes() {
    let world = world().await;
    world.fund("u1", BOND, "10").await;
    let mut bonds = limit("bonds", PostingSide::Debit, "5");
    bonds.instrument_id = BOND.to_owned();
    put(&world, bonds).await;
    let freeze = SetSubAccountStatusRequest {
        context: write(&fresh()),
        subaccount_id: "u1:BOND-1".to_owned(),
        status: SubAccountStatus::Frozen.into(),
        reason: "court".to_owned(),
    };
    let mut client = world.client.clone();
    client.set_sub_account_status(freeze).await.unwrap();
    let levy = |value: &str| {
        let leg = ("u1:BOND-1", "u2:BOND-1", value, BOND);
        operation(Enforcement, "u1", &fresh(), &[leg])
    };
    client.create_operation(levy("6")).await.unwrap();
    // It takes no more than the available units.
    refused(
        client.create_operation(levy("5")).await,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    let transfer = operation(
        P2pTransfer,
        "u1",
        &fresh(),
        &[("u1:BOND-1", "u2:BOND-1", "1", BOND)],
    );
    refused(
        client.create_operation(transfer).await,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
}

// rows: R237 R216
#[tokio::test]
async fn r237_reversal_frees_the_limit_and_is_never_refused() {
    let world = world().await;
    put(&world, limit("out", PostingSide::Debit, "100")).await;
    put(&world, limit("in", PostingSide::Credit, "100")).await;
    let paid = pay(&world, "u1", "100").await.unwrap().into_inner();
    limited(pay(&world, "u1", "1").await);
    let reverse = ReverseOperationRequest {
        context: write(&fresh()),
        operation_id: paid.operation.unwrap().operation_id,
        reason: "test".to_owned(),
    };
    world
        .client
        .clone()
        .reverse_operation(reverse)
        .await
        .unwrap();
    pay(&world, "u1", "100").await.unwrap();
    assert_eq!(limited(pay(&world, "u1", "1").await)["used"], "100.00");
}

// rows: R237
#[tokio::test]
async fn r237_what_has_happened_already_counts_and_is_not_refused() {
    let world = world().await;
    put(&world, limit("out", PostingSide::Debit, "100")).await;
    let mut client = world.client.clone();
    let legs = [("u1:CFA-RUB", "shop:CFA-RUB", "150", RUB)];
    let batch = CreateOperationsRequest {
        context: write(&fresh()),
        operations: vec![item(OperationType::TradeBuy, "u1", &fresh(), &legs)],
        source: "market".to_owned(),
        first_sequence: 1,
        through_sequence: 1,
        ..Default::default()
    };
    client.create_operations(batch).await.unwrap();
    let facts = limited(pay(&world, "u1", "1").await);
    assert_eq!(
        (facts["used"].as_str(), facts["left"].as_str()),
        ("150.00", "0.00")
    );
    // The limit does not refuse a payment from an earlier hold by the service that opened it.
    // Another caller is refused.
    let mut held = new_hold("u1", RUB, "20");
    held.destination_subaccount_id = Some("shop:CFA-RUB".to_owned());
    let hold = world
        .open_hold(&fresh(), held)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    let request = ConsumeHoldRequest {
        context: write(&fresh()),
        hold_id: hold.hold_id.clone(),
        amount: amount(RUB, "5"),
        ..Default::default()
    };
    let by_persons = testkit::messages::approved(request);
    let mut approved = world.as_caller(testkit::APPROVED);
    assert_eq!(
        limited(approved.consume_hold(by_persons).await)["used"],
        "150.00"
    );
    world.consume(&fresh(), &hold.hold_id, None).await.unwrap();
    assert_eq!(limited(pay(&world, "u1", "1").await)["used"], "170.00");
    world.assert_books_balance().await;
}

/// An offer is one that its user may withdraw. So a limit applies to an issue that a hold pays for,
/// and to units redeemed out of a hold.
#[tokio::test]
async fn r237_an_offer_is_not_used_beyond_a_limit() {
    let world = world().await;
    let hold = world.open_hold(&fresh(), new_hold("u1", RUB, "150")).await;
    let hold = hold.unwrap().into_inner().hold.unwrap();
    put(&world, limit("out", PostingSide::Debit, "100")).await;
    let pay_by = |kind| {
        let legs = [("u1:CFA-RUB", "u2:CFA-RUB", "150", RUB)];
        let mut request = operation(kind, "u1", &fresh(), &legs);
        request.postings[0].hold_id = Some(hold.hold_id.clone());
        let mut client = world.client.clone();
        async move { client.create_operation(request).await }
    };
    limited(pay_by(OperationType::Issuance).await);
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["1000.00", "150.00", "0.00", "850.00"]
    );
    pay_by(Payment).await.unwrap();

    world.fund("u1", BOND, "10").await;
    let offered = world.hold("u1", BOND, "5").await;
    let mut units = limit("units", PostingSide::Debit, "4");
    units.instrument_id = BOND.to_owned();
    put(&world, units).await;
    let legs = [("u1:BOND-1", "system:reserve:BOND-1", "5", BOND)];
    let mut request = operation(OperationType::Redemption, "u1", &fresh(), &legs);
    request.postings[0].hold_id = Some(offered.hold_id);
    limited(world.client.clone().create_operation(request).await);
    world.assert_books_balance().await;
}

// rows: R333 R339
#[tokio::test]
async fn r339_limits_are_set_listed_and_removed_by_staff_once_a_key() {
    let world = world().await;
    let mut audit = world
        .log
        .subscribe(&fresh(), &[events::topics::AUDIT])
        .await
        .unwrap();
    let first = set(&world, "k1", limit("a", PostingSide::Debit, "1.5"))
        .await
        .unwrap();
    let again = set(&world, "k1", limit("a", PostingSide::Debit, "9"))
        .await
        .unwrap();
    assert!(is_replay(&again) && !is_replay(&first));
    let first = first.into_inner().limit.unwrap();
    assert_eq!(again.into_inner().limit.unwrap(), first);
    assert_eq!(first.amount.as_ref().unwrap().value, "1.50");
    world.clock.advance_us(SECOND_US);
    // The same terms under another key change nothing; other terms keep the creation time.
    let same = set(&world, "k2", limit("a", PostingSide::Debit, "1.50"))
        .await
        .unwrap();
    assert_eq!(same.into_inner().limit.unwrap(), first);
    let other = limit("a", PostingSide::Credit, "2");
    let changed = set_as(&world, testkit::APPROVED, "k3", other)
        .await
        .unwrap();
    let changed = changed.into_inner().limit.unwrap();
    assert_eq!(
        (changed.created_at, changed.side()),
        (first.created_at, PostingSide::Credit)
    );
    assert_ne!(changed.updated_at, first.updated_at);
    let mut of_u2 = limit("b", PostingSide::Debit, "0");
    of_u2.user_id = "u2".to_owned();
    put(&world, of_u2).await;

    let list = async |user: &str| {
        let request = ListVelocityLimitsRequest {
            user_id: user.to_owned(),
            ..Default::default()
        };
        let mut auditor = world.as_caller("sandbox.auditor");
        let limits = auditor
            .list_velocity_limits(request)
            .await
            .unwrap()
            .into_inner()
            .limits;
        limits
            .into_iter()
            .map(|limit| limit.limit_id)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (list("").await, list("u1").await),
        (vec!["b".to_owned(), "a".to_owned()], vec!["a".to_owned()])
    );
    let remove = |key: &str| RemoveVelocityLimitRequest {
        context: write(key),
        limit_id: "a".to_owned(),
        reason: "no longer".to_owned(),
    };
    needs_approval(
        world
            .as_caller("sandbox.compliance")
            .remove_velocity_limit(remove("r0"))
            .await,
    );
    let mut staff = world.as_caller(testkit::APPROVED);
    let removed = staff.remove_velocity_limit(remove("r1")).await.unwrap();
    assert_eq!(removed.into_inner().limit.unwrap(), changed);
    assert!(is_replay(
        &staff.remove_velocity_limit(remove("r1")).await.unwrap()
    ));
    refused(
        staff.remove_velocity_limit(remove("r2")).await,
        Code::NotFound,
        "LIMIT_NOT_FOUND",
        "Limit not found",
    );
    assert_eq!(list("").await, ["b"]);

    let mut seen = Vec::new();
    while seen.len() < 4 {
        let event = tokio::time::timeout(PATIENCE, audit.next())
            .await
            .unwrap()
            .unwrap()
            .record
            .event;
        let record = <proto::audit::v1::AuditRecordEvent as prost::Message>::decode(
            event.payload.as_slice(),
        )
        .unwrap();
        seen.push((record.action, record.object_id, record.reason));
    }
    let row = |action: &str, id: &str, reason: &str| {
        (action.to_owned(), id.to_owned(), reason.to_owned())
    };
    assert_eq!(
        seen,
        [
            row("limit.set", "a", "test"),
            row("limit.set", "a", "test"),
            row("limit.set", "b", "test"),
            row("limit.removed", "a", "no longer"),
        ]
    );
}

fn needs_approval<T: std::fmt::Debug>(answer: Answer<T>) {
    refused(
        answer,
        Code::FailedPrecondition,
        "APPROVAL_REQUIRED",
        "This call needs an approval",
    );
}

// rows: R333 R339
#[tokio::test]
async fn d32_one_person_lowers_a_limit_and_two_raise_it() {
    let world = world().await;
    let mut of_u1 = limit("a", PostingSide::Debit, "10");
    of_u1.user_id = "u1".to_owned();
    of_u1.operation_types = vec![Payment.into()];
    set(&world, "new", of_u1.clone()).await.unwrap();
    let changed = |change: &dyn Fn(&mut VelocityLimit)| {
        let mut terms = of_u1.clone();
        change(&mut terms);
        terms
    };
    let value = |text: &str| {
        let value = text.to_owned();
        Some(Decimal { value })
    };
    for (number, looser) in [
        changed(&|l| l.amount = value("10.01")),
        changed(&|l| l.window_seconds = 59),
        changed(&|l| l.side = PostingSide::Credit.into()),
        changed(&|l| l.user_id = "u2".to_owned()),
        changed(&|l| l.account_type = AccountType::Main.into()),
        changed(&|l| l.operation_types = vec![Deposit.into()]),
    ]
    .into_iter()
    .enumerate()
    {
        needs_approval(set(&world, &format!("up-{number}"), looser).await);
    }
    let stricter = changed(&|l| {
        l.amount = value("9");
        l.window_seconds = 61;
        l.user_id.clear();
        l.operation_types.clear();
    });
    set(&world, "down", stricter).await.unwrap();
    // The refusal is not bound to its key: the same call passes by an approval.
    let raised = set_as(&world, testkit::APPROVED, "up-0", of_u1.clone()).await;
    assert_eq!(raised.unwrap().into_inner().limit.unwrap().user_id, "u1");
}

// rows: R339 R333
#[tokio::test]
async fn r339_bad_terms_of_a_limit_are_refused() {
    let world = world().await;
    let good = || limit("x", PostingSide::Debit, "1");
    let bad = async |change: &dyn Fn(&mut VelocityLimit), text: &str| {
        let mut terms = good();
        change(&mut terms);
        refused(
            set(&world, &fresh(), terms).await,
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
            text,
        );
    };
    bad(&|l| l.limit_id.clear(), "limit.limit_id: must not be empty").await;
    bad(
        &|l| l.user_id = "a:b".into(),
        "limit.user_id: must be a user, or empty for every user",
    )
    .await;
    bad(
        &|l| l.user_id = "system".into(),
        "limit.user_id: must be a user, or empty for every user",
    )
    .await;
    bad(
        &|l| l.account_type = 9,
        "limit.account_type: has no value 9",
    )
    .await;
    bad(&|l| l.side = 0, "limit.side: must be DEBIT or CREDIT").await;
    bad(
        &|l| l.window_seconds = 0,
        "limit.window_seconds: must be 1 to 31622400",
    )
    .await;
    bad(
        &|l| l.window_seconds = u32::MAX,
        "limit.window_seconds: must be 1 to 31622400",
    )
    .await;
    bad(
        &|l| l.operation_types = vec![4, 99],
        "limit.operation_types[1]: has no value 99",
    )
    .await;
    let amounts = "limit.amount: must not be negative, with at most 2 decimals";
    bad(
        &|l| l.amount = Some(Decimal { value: "-1".into() }),
        amounts,
    )
    .await;
    bad(
        &|l| {
            l.amount = Some(Decimal {
                value: "0.001".into(),
            })
        },
        amounts,
    )
    .await;
    let mut unknown = good();
    unknown.instrument_id = "NO-SUCH".to_owned();
    refused(
        set(&world, &fresh(), unknown).await,
        Code::NotFound,
        "INSTRUMENT_NOT_FOUND",
        "Instrument not found",
    );
    for credential in ["sandbox.investor.u1", "sandbox.auditor", "sandbox.treasury"] {
        let request = SetVelocityLimitRequest {
            context: write(&fresh()),
            limit: Some(good()),
            ..Default::default()
        };
        let answer = world
            .as_caller(credential)
            .set_velocity_limit(request)
            .await;
        assert_eq!(
            answer.unwrap_err().code(),
            Code::PermissionDenied,
            "{credential}"
        );
    }
}
