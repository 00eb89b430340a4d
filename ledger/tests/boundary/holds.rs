//! Holds: creation, release, consumption, expiry, adjustment, ownership.

use proto::{
    common::v1::OperationType,
    convert::to_timestamp_us,
    ledger::v1::{hold_step::Step, *},
};
use tonic::Code;

use crate::{harness::*, rows::audit};

const SECOND_US: i64 = 1_000_000;

// rows: R198 R208 R224
#[tokio::test]
async fn r198_create_hold_blocks_the_amount() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let wanted = Hold {
        expires_at: Some(to_timestamp_us(START_US + SECOND_US)),
        ..new_hold("u1", RUB, "40")
    };
    let hold = world
        .open_hold("h1", wanted)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert!(!hold.hold_id.is_empty() && hold.created_at.is_some());
    assert_eq!(hold.subaccount_id, "u1:CFA-RUB");
    assert_eq!(hold.amount, amount(RUB, "40.00"));
    assert_eq!(hold.remaining_amount, amount(RUB, "40.00"));
    assert_eq!(hold.status(), HoldStatus::Active);
    assert_eq!(hold.reason, "test hold");
    assert_eq!(hold.expires_at, Some(to_timestamp_us(START_US + SECOND_US)));
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "40.00", "0.00", "60.00"]
    );
    assert_eq!(world.get_hold(&hold.hold_id).await, hold);
    let again = world
        .open_hold("h1", new_hold("u1", RUB, "40"))
        .await
        .unwrap();
    assert!(is_replay(&again));
    assert_eq!(again.into_inner().hold.unwrap(), hold);
    assert_eq!(world.balance("u1:CFA-RUB").await[1], "40.00");
    for status in HoldStatus::Active as i32..=HoldStatus::Expired as i32 {
        let request = ListHoldsRequest {
            status,
            ..Default::default()
        };
        let found = world
            .client
            .clone()
            .list_holds(request)
            .await
            .unwrap()
            .into_inner()
            .holds;
        assert_eq!(
            found.len(),
            usize::from(status == HoldStatus::Active as i32)
        );
    }
}

// rows: R223
#[tokio::test]
async fn r223_hold_above_available_is_refused_and_equal_passes() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let answer = world.open_hold("h1", new_hold("u1", RUB, "100.01")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    world
        .open_hold("h2", new_hold("u1", RUB, "100"))
        .await
        .unwrap();
    // The available amount counts, not the balance (T04).
    let answer = world.open_hold("h3", new_hold("u1", RUB, "0.01")).await;
    let status = answer.unwrap_err();
    assert_eq!(status.message(), "Insufficient balance");
    use tonic_types::StatusExt;
    let facts = status.get_details_error_info().unwrap().metadata;
    assert_eq!(
        (
            facts["balance"].as_str(),
            facts["held"].as_str(),
            facts["available"].as_str()
        ),
        ("100.00", "100.00", "0.00")
    );
    // A known user without the instrument has an insufficient balance; an unknown user has no
    // sub-account.
    world.fund("u2", BOND, "1").await;
    let answer = world.open_hold("h4", new_hold("u1", BOND, "1")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    let answer = world.open_hold("h5", new_hold("u9", RUB, "1")).await;
    refused(
        answer,
        Code::NotFound,
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    );
    for bad in ["0", "-1", "1.001", "x", ""] {
        let status = world
            .open_hold(&fresh(), new_hold("u1", RUB, bad))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{bad}");
    }
    let spend = operation(
        OperationType::Payment,
        "u1",
        "p1",
        &[("u1:CFA-RUB", "u2:CFA-RUB", "0.01", RUB)],
    );
    let answer = world.client.clone().create_operation(spend).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    world.assert_books_balance().await;
}

// rows: R199 R322
#[tokio::test]
async fn r199_release_returns_the_amount_once() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold = world.hold("u1", RUB, "40").await;
    let released = world
        .release("r1", &hold.hold_id)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(released.status(), HoldStatus::Released);
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"]
    );
    let again = world.release("r1", &hold.hold_id).await.unwrap();
    assert!(is_replay(&again));
    assert_eq!(again.into_inner().hold.unwrap(), released);
    let answer = world.release("r2", &hold.hold_id).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    let answer = world.release("r3", "nope").await;
    refused(answer, Code::NotFound, "HOLD_NOT_FOUND", "Hold not found");
}

// rows: R200 R225 R226 R228 R254
#[tokio::test]
async fn r200_consume_ends_the_hold_once() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let answer = world.consume("c0", "nope", None).await;
    refused(answer, Code::NotFound, "HOLD_NOT_FOUND", "Hold not found");
    let hold = world.hold("u1", RUB, "40").await;
    let consumed = world
        .consume("c1", &hold.hold_id, None)
        .await
        .unwrap()
        .into_inner();
    assert!(consumed.operation.is_none());
    assert_eq!(
        consumed.hold.as_ref().unwrap().status(),
        HoldStatus::Consumed
    );
    let answer = world.consume("c2", &hold.hold_id, None).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    assert_eq!(
        world.get_hold(&hold.hold_id).await.status(),
        HoldStatus::Consumed
    );
    let again = world.consume("c1", &hold.hold_id, None).await.unwrap();
    assert!(is_replay(&again));
    assert_eq!(again.into_inner(), consumed);
    // The refusal is bound to its key and returned again.
    let answer = world.consume("c2", &hold.hold_id, None).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    let released = world.hold("u1", RUB, "1").await;
    world.release("r1", &released.hold_id).await.unwrap();
    let answer = world.consume("c3", &released.hold_id, None).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
}

// rows: R190 R228
#[tokio::test]
async fn t03_hold_is_consumed_part_by_part_and_the_rest_released() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold = world.hold("u1", RUB, "10").await;
    for (key, left) in [("c1", "7.00"), ("c2", "4.00")] {
        let part = world
            .consume(key, &hold.hold_id, amount(RUB, "3"))
            .await
            .unwrap()
            .into_inner()
            .hold
            .unwrap();
        assert_eq!(part.status(), HoldStatus::Active);
        assert_eq!(part.remaining_amount, amount(RUB, left));
    }
    let answer = world
        .consume("c3", &hold.hold_id, amount(RUB, "4.01"))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_AMOUNT_EXCEEDED",
        "Amount exceeds what remains of the hold",
    );
    // A replay returns the hold at the time of the first answer.
    let then = world
        .consume("c1", &hold.hold_id, amount(RUB, "3"))
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(then.remaining_amount, amount(RUB, "7.00"));
    let rest = world
        .release("r1", &hold.hold_id)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(rest.status(), HoldStatus::Released);
    assert_eq!(
        (rest.consumed.unwrap().value, rest.released.unwrap().value),
        ("6.00".to_owned(), "4.00".to_owned())
    );
    assert_eq!(world.balance("u1:CFA-RUB").await[1], "0.00");
    let hold = world.hold("u1", RUB, "10").await;
    world
        .consume("c4", &hold.hold_id, amount(RUB, "4"))
        .await
        .unwrap();
    let all = world
        .consume("c5", &hold.hold_id, amount(RUB, "6"))
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(all.status(), HoldStatus::Consumed);
}

// rows: R227 R308 R254
#[tokio::test]
async fn r227_expired_hold_fails_and_stays_expired() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut watch = world.watch().await;
    let expiring = |at_us| Hold {
        expires_at: Some(to_timestamp_us(at_us)),
        ..new_hold("u1", RUB, "40")
    };
    // A hold with a past expiry is refused.
    let past = world.open_hold("h0", expiring(START_US)).await;
    refused(
        past,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
        "hold.expires_at: must be in the future",
    );
    let touched = world
        .open_hold("h1", expiring(START_US + SECOND_US))
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    let swept = world
        .open_hold("h2", expiring(START_US + SECOND_US))
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    world.clock.advance_us(SECOND_US - 1);
    world
        .consume("c0", &touched.hold_id, amount(RUB, "1"))
        .await
        .unwrap();
    assert_eq!(world.handle.sweep().await.unwrap(), 0);
    world.clock.advance_us(1);
    let answer = world.consume("c1", &touched.hold_id, None).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_EXPIRED",
        "Hold has expired",
    );
    assert_eq!(
        world.get_hold(&touched.hold_id).await.status(),
        HoldStatus::Expired
    );
    let (_, event): (_, HoldReleasedEvent) = watch.next_of("HoldReleasedEvent").await;
    assert_eq!(
        (event.hold_id, event.reason),
        (touched.hold_id.clone(), "Expired".to_owned())
    );
    let answer = world.consume("c2", &touched.hold_id, None).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    assert_eq!(
        world.get_hold(&touched.hold_id).await.status(),
        HoldStatus::Expired
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "40.00", "0.00", "60.00"]
    );
    // The sweeper finds the expiry. The first caller still gets the text of a call that found it.
    assert_eq!(world.handle.sweep().await.unwrap(), 1);
    assert_eq!(
        world.get_hold(&swept.hold_id).await.status(),
        HoldStatus::Expired
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"]
    );
    let (_, event): (_, HoldReleasedEvent) = watch.next_of("HoldReleasedEvent").await;
    assert_eq!(
        (event.hold_id, event.reason),
        (swept.hold_id.clone(), "Expired".to_owned())
    );
    let answer = world.consume("c3", &swept.hold_id, None).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_EXPIRED",
        "Hold has expired",
    );
    let answer = world.consume("c4", &swept.hold_id, None).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    world.assert_books_balance().await;
}

// rows: R227
#[tokio::test]
async fn t31_expiry_stays_although_the_batch_that_found_it_is_refused() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold = Hold {
        expires_at: Some(to_timestamp_us(START_US + SECOND_US)),
        ..new_hold("u1", RUB, "40")
    };
    let hold = world
        .open_hold("h1", hold)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    world.clock.advance_us(2 * SECOND_US);
    let mut paid = item(
        OperationType::Payment,
        "u1",
        "p1",
        &[("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)],
    );
    paid.postings[0].hold_id = Some(hold.hold_id.clone());
    let request = CreateOperationsRequest {
        context: write("b1"),
        operations: vec![paid],
        ..Default::default()
    };
    let answer = world.client.clone().create_operations(request).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_EXPIRED",
        "Hold has expired",
    );
    assert_eq!(
        world.get_hold(&hold.hold_id).await.status(),
        HoldStatus::Expired
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"]
    );
}

// rows: R229
#[tokio::test]
async fn r229_hold_without_expiry_never_expires() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold = world.hold("u1", RUB, "40").await;
    world.clock.advance_us(100 * 365 * 86_400 * SECOND_US);
    assert_eq!(world.handle.sweep().await.unwrap(), 0);
    let consumed = world
        .consume("c1", &hold.hold_id, None)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(consumed.status(), HoldStatus::Consumed);
}

/// The instrument has 18 decimals, so the sum of two amounts of five units exceeds 64 bits.
// rows: R228
#[tokio::test]
async fn r228_a_hold_survives_turnover_above_64_bits() {
    const FINE: &str = "FINE-18";
    let world = World::new().await;
    let mut deposit = operation(
        OperationType::Deposit,
        "u1",
        "k1",
        &[("system:reserve:FINE-18", "u1:FINE-18", "9", FINE)],
    );
    deposit.instrument_scales = vec![InstrumentScale {
        instrument_id: FINE.to_owned(),
        decimals: 18,
    }];
    let mut client = world.client.clone();
    client.create_operation(deposit).await.unwrap();
    let parent = world.hold("u1", FINE, "6").await.hold_id;
    let steps = async |steps: Vec<Step>| {
        let request = CreateOperationsRequest {
            context: write(&fresh()),
            hold_steps: steps
                .into_iter()
                .map(|step| HoldStep {
                    step: Some(step),
                    before_operation: 0,
                })
                .collect(),
            ..Default::default()
        };
        world.client.clone().create_operations(request).await
    };
    let split_of = |hold_id: &str, value: &str| {
        Step::Split(SplitHold {
            parent_hold_id: parent.clone(),
            hold_id: hold_id.to_owned(),
            amount: amount(FINE, value),
            reason: "order".to_owned(),
        })
    };
    let split = |hold_id: &str| split_of(hold_id, "5");
    // Two returned children, so an added amount can be netted against `returned_by_children`.
    for small in ["small-0", "small-1"] {
        let back = Step::ReturnToParent(ReturnHold {
            hold_id: small.to_owned(),
            ..Default::default()
        });
        steps(vec![split_of(small, "1"), back]).await.unwrap();
    }
    let returned = world.get_hold(&parent).await.returned_by_children;
    assert_eq!(
        returned.unwrap().value.parse::<types::Decimal>().unwrap(),
        "2".parse().unwrap()
    );
    // The three ways to return an amount to the parent, in turn.
    for turn in 0..6 {
        let child = format!("child-{turn}");
        let back = Step::ReturnToParent(ReturnHold {
            hold_id: child.clone(),
            ..Default::default()
        });
        match turn % 3 {
            0 => drop(steps(vec![split(&child), back]).await.unwrap()),
            1 => {
                steps(vec![split(&child)]).await.unwrap();
                world.release(&fresh(), &child).await.unwrap();
            }
            _ => {
                steps(vec![split(&child)]).await.unwrap();
                let part = amount(FINE, "0.25");
                world.consume(&fresh(), &child, part).await.unwrap();
                steps(vec![back]).await.unwrap();
            }
        }
        let hold = world.get_hold(&parent).await;
        let used = ["6", "6", "5.75", "5.75", "5.75", "5.5"][turn];
        let left = |value: &str| value.parse::<types::Decimal>().unwrap();
        let remaining = hold.remaining_amount.unwrap().amount.unwrap().value;
        assert_eq!(left(&remaining), left(used), "turn {turn}");
        let of_children =
            [hold.split_off, hold.returned_by_children].map(|value| left(&value.unwrap().value));
        let had = left("6").checked_add(of_children[1]).unwrap();
        let went = left(used).checked_add(of_children[0]).unwrap();
        assert_eq!(had, went, "turn {turn}");
    }
    // An order that is amended up and down: its hold grows and returns money each time.
    let amended = "amended".to_owned();
    steps(vec![split_of(&amended, "1")]).await.unwrap();
    for _ in 0..4 {
        let grow = GrowHold {
            hold_id: amended.clone(),
            amount: amount(FINE, "4"),
        };
        steps(vec![Step::Grow(grow)]).await.unwrap();
        let back = ReturnHold {
            hold_id: amended.clone(),
            amount: amount(FINE, "4"),
            ..Default::default()
        };
        steps(vec![Step::ReturnToParent(back)]).await.unwrap();
    }
    let back = Step::ReturnToParent(ReturnHold {
        hold_id: amended,
        ..Default::default()
    });
    steps(vec![back]).await.unwrap();
    let rows = world.rows().await;
    audit(&rows, "after all turns").await;
    rows.close().await;

    // An added amount is netted to fit into 64 bits. It is refused once netting is not sufficient.
    let adjust = async |value: &str| {
        let request = AdjustHoldRequest {
            context: write(&fresh()),
            hold_id: parent.clone(),
            remaining_amount: amount(FINE, value),
        };
        world.client.clone().adjust_hold(request).await
    };
    let hold = adjust("8").await.unwrap().into_inner().hold.unwrap();
    assert_eq!(hold.added.unwrap().value.trim_end_matches('0'), "2.5");
    adjust("1").await.unwrap();
    refused(
        adjust("8").await,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
        "remaining_amount.amount: is out of range",
    );
    world.release(&fresh(), &parent).await.unwrap();
    let balance = world.balance("u1:FINE-18").await;
    assert!(balance[1].trim_end_matches('0') == "0.", "{balance:?}");
    world.assert_books_balance().await;
    assert_eq!(ledger::verify(&world.config()).await.unwrap().fault, None);
}

// rows: R228
#[tokio::test]
async fn t10_consumption_with_a_destination_posts_in_the_same_step() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold = Hold {
        destination_subaccount_id: Some("system:reserve:CFA-RUB".to_owned()),
        hold_id: "redemption-1".to_owned(),
        ..new_hold("u1", RUB, "40")
    };
    let hold = world
        .open_hold("h1", hold)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(hold.hold_id, "redemption-1");
    let request = ConsumeHoldRequest {
        context: write("c1"),
        hold_id: hold.hold_id.clone(),
        external_ref: Some("cfa-op-1".to_owned()),
        ..Default::default()
    };
    let answer = world
        .client
        .clone()
        .consume_hold(request.clone())
        .await
        .unwrap()
        .into_inner();
    let operation = answer.operation.clone().unwrap();
    assert_eq!(operation.r#type(), OperationType::Redemption);
    assert_eq!(operation.external_ref.as_deref(), Some("cfa-op-1"));
    let posted = world.get_operation(&operation.operation_id).await.postings;
    assert_eq!(posted[0].credit_subaccount_id, "system:reserve:CFA-RUB");
    assert_eq!(posted[0].hold_id.as_deref(), Some("redemption-1"));
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["60.00", "0.00", "0.00", "60.00"]
    );
    let again = world.client.clone().consume_hold(request).await.unwrap();
    assert!(is_replay(&again));
    assert_eq!(again.into_inner(), answer);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "60.00");
    // The same id on the same sub-account returns the same hold; on another one it is refused.
    let again = world
        .open_hold(
            "h2",
            Hold {
                hold_id: "redemption-1".to_owned(),
                ..new_hold("u1", RUB, "40")
            },
        )
        .await
        .unwrap();
    assert!(is_replay(&again));
    world.fund("u2", RUB, "100").await;
    let answer = world
        .open_hold(
            "h3",
            Hold {
                hold_id: "redemption-1".to_owned(),
                ..new_hold("u2", RUB, "40")
            },
        )
        .await;
    refused(
        answer,
        Code::AlreadyExists,
        "HOLD_EXISTS",
        "Hold already exists",
    );
    world.assert_books_balance().await;
}

// rows: R199 R200
#[tokio::test]
async fn r199_holds_of_services_are_in_use_for_anyone_else() {
    let world = World::new().await;
    for owner in ["market", "cfa"] {
        assert_only_the_owner_uses(&world, owner).await;
    }
}

async fn assert_only_the_owner_uses(world: &World, owner: &str) {
    world.fund("u1", RUB, "100").await;
    let owned = Hold {
        owner: owner.to_owned(),
        ..new_hold("u1", RUB, "40")
    };
    let hold = world
        .open_hold(&format!("h1-{owner}"), owned.clone())
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    let mut operator = world.as_caller("sandbox.operator");
    let release = ReleaseHoldRequest {
        context: write(&format!("r1-{owner}")),
        hold_id: hold.hold_id.clone(),
        reason: String::new(),
    };
    let answer = operator.release_hold(release).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_IN_USE",
        "Hold is in use",
    );
    let consume = ConsumeHoldRequest {
        context: write(&format!("c1-{owner}")),
        hold_id: hold.hold_id.clone(),
        ..Default::default()
    };
    // One person consumes no hold (D32), and two persons none of a service.
    refused(
        operator.consume_hold(consume.clone()).await,
        Code::FailedPrecondition,
        "APPROVAL_REQUIRED",
        "This call needs an approval",
    );
    let mut approved = world.as_caller(testkit::APPROVED);
    refused(
        approved
            .consume_hold(testkit::messages::approved(consume))
            .await,
        Code::FailedPrecondition,
        "HOLD_IN_USE",
        "Hold is in use",
    );
    let create = CreateHoldRequest {
        context: write(&format!("h2-{owner}")),
        hold: Some(owned),
    };
    assert_eq!(
        operator.create_hold(create).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    assert_eq!(
        world.get_hold(&hold.hold_id).await.status(),
        HoldStatus::Active
    );
    world
        .release(&format!("r2-{owner}"), &hold.hold_id)
        .await
        .unwrap();
}

#[tokio::test]
async fn adjust_sets_what_remains() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold = world.hold("u1", RUB, "40").await;
    let adjust = |key: &str, value: &str| AdjustHoldRequest {
        context: write(key),
        hold_id: hold.hold_id.clone(),
        remaining_amount: amount(RUB, value),
    };
    let grown = world
        .client
        .clone()
        .adjust_hold(adjust("a1", "70"))
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(
        (grown.amount.clone(), grown.added.clone().unwrap().value),
        (amount(RUB, "70.00"), "30.00".to_owned())
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "70.00", "0.00", "30.00"]
    );
    let answer = world
        .client
        .clone()
        .adjust_hold(adjust("a2", "100.01"))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    let shrunk = world
        .client
        .clone()
        .adjust_hold(adjust("a3", "0"))
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap();
    assert_eq!(
        (shrunk.status(), shrunk.released.unwrap().value),
        (HoldStatus::Active, "70.00".to_owned())
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"]
    );
    assert_eq!(
        world
            .client
            .clone()
            .adjust_hold(adjust("a4", "-1"))
            .await
            .unwrap_err()
            .code(),
        Code::InvalidArgument
    );
}
