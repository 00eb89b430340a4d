//! Reads of accounts and sub-accounts, their statuses, and what users may see.

use proto::ledger::v1::*;
use tonic::Code;

use crate::harness::*;

async fn account(world: &World, account_id: &str) -> Answer<GetAccountResponse> {
    let request = GetAccountRequest {
        context: None,
        account_id: account_id.to_owned(),
    };
    world.client.clone().get_account(request).await
}

async fn accounts(client: &mut Client, user_id: &str) -> Vec<Account> {
    let request = ListAccountsRequest {
        user_id: user_id.to_owned(),
        ..Default::default()
    };
    client
        .list_accounts(request)
        .await
        .unwrap()
        .into_inner()
        .accounts
}

// rows: R192 R193 R204
#[tokio::test]
async fn r192_accounts_are_read_one_by_one_and_as_a_list() {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    world.fund("u1", BOND, "1").await;
    world.fund("u2", RUB, "1").await;
    let request = operation(
        proto::common::v1::OperationType::Payment,
        "u1",
        "seize",
        &[("u1:CFA-RUB", "u1:CFA-RUB:blocked", "1", RUB)],
    );
    world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap();
    let mut found = accounts(&mut world.client.clone(), "u1").await;
    found.sort_by_key(|account| account.r#type);
    let types: Vec<_> = found.iter().map(Account::r#type).collect();
    assert_eq!(
        types,
        [AccountType::Main, AccountType::Invest, AccountType::Blocked]
    );
    for listed in found {
        assert_eq!(listed.user_id, "u1");
        assert!(listed.created_at.is_some() && listed.updated_at.is_some());
        let read = account(&world, &listed.account_id)
            .await
            .unwrap()
            .into_inner()
            .account
            .unwrap();
        assert_eq!(read, listed);
    }
    refused(
        account(&world, "nope").await,
        Code::NotFound,
        "ACCOUNT_NOT_FOUND",
        "Account not found",
    );
    assert!(
        accounts(&mut world.client.clone(), "unknown")
            .await
            .is_empty()
    );
}

// rows: R211 R212
#[tokio::test]
async fn r211_system_sub_accounts_exist_on_a_fresh_ledger() {
    let world = World::new().await;
    for (id, instrument) in [
        ("system:reserve:CFA-RUB", RUB),
        ("system:reserve:CFA-EQ", "CFA-EQ"),
        ("system:fees:CFA-RUB", RUB),
    ] {
        let request = GetSubAccountRequest {
            context: None,
            subaccount_id: id.to_owned(),
        };
        let found = world
            .client
            .clone()
            .get_sub_account(request)
            .await
            .unwrap()
            .into_inner()
            .subaccount
            .unwrap();
        assert_eq!(
            (found.subaccount_id.as_str(), found.instrument_id.as_str()),
            (id, instrument)
        );
        assert_eq!(found.status(), SubAccountStatus::Active);
    }
    let types: Vec<_> = accounts(&mut world.client.clone(), "system")
        .await
        .iter()
        .map(Account::r#type)
        .collect();
    assert!(types.contains(&AccountType::Main) && types.contains(&AccountType::Invest));
}

// rows: R194 R205 R211
#[tokio::test]
async fn r194_sub_account_shows_what_it_has() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    world.hold("u1", RUB, "30").await;
    let request = GetSubAccountRequest {
        context: None,
        subaccount_id: "u1:CFA-RUB".to_owned(),
    };
    let found = world
        .client
        .clone()
        .get_sub_account(request)
        .await
        .unwrap()
        .into_inner()
        .subaccount
        .unwrap();
    assert_eq!(
        (found.subaccount_id.as_str(), found.account_id.as_str()),
        ("u1:CFA-RUB", "u1:MAIN")
    );
    assert_eq!(found.instrument_id, RUB);
    assert_eq!(found.status(), SubAccountStatus::Active);
    let numbers = [
        &found.balance,
        &found.held,
        &found.unsettled,
        &found.available,
    ]
    .map(|n| n.clone().unwrap().value);
    assert_eq!(numbers, ["100.00", "30.00", "0.00", "70.00"]);
    assert_eq!(numbers, world.balance("u1:CFA-RUB").await);
    assert!(found.created_at.is_some() && found.updated_at.is_some());
    assert_eq!(found.version, 1);
    let request = ListSubAccountsRequest {
        user_id: "u1".to_owned(),
        instrument_id: RUB.to_owned(),
        ..Default::default()
    };
    let listed = world
        .client
        .clone()
        .list_sub_accounts(request)
        .await
        .unwrap()
        .into_inner()
        .subaccounts;
    assert_eq!(listed, [found]);
    let request = GetSubAccountRequest {
        context: None,
        subaccount_id: "u9:CFA-RUB".to_owned(),
    };
    let answer = world.client.clone().get_sub_account(request).await;
    refused(
        answer,
        Code::NotFound,
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    );
}

async fn by_ids(
    client: &Client,
    ids: &[&str],
    instrument_id: &str,
) -> Answer<ListSubAccountsResponse> {
    let request = ListSubAccountsRequest {
        subaccount_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        instrument_id: instrument_id.to_owned(),
        ..Default::default()
    };
    client.clone().list_sub_accounts(request).await
}

#[tokio::test]
async fn sub_accounts_are_listed_by_their_ids() {
    let world = World::new().await;
    for user in ["u1", "u2", "u3"] {
        world.fund(user, RUB, "1").await;
    }
    world.fund("u1", BOND, "1").await;
    let listed = async |client: &Client, ids: &[&str], instrument_id: &str| {
        let answer = by_ids(client, ids, instrument_id).await.unwrap();
        let rows = answer.into_inner().subaccounts.into_iter();
        let mut ids: Vec<_> = rows.map(|row| row.subaccount_id).collect();
        ids.sort();
        ids
    };
    let ids = ["u2:CFA-RUB", "u9:CFA-RUB", "u1:BOND-1", "u1:CFA-RUB"];
    let all = listed(&world.client, &ids, "").await;
    assert_eq!(all, ["u1:BOND-1", "u1:CFA-RUB", "u2:CFA-RUB"]);
    let rubles = listed(&world.client, &ids, RUB).await;
    assert_eq!(rubles, ["u1:CFA-RUB", "u2:CFA-RUB"]);
    let own = listed(&world.as_caller("sandbox.investor.u1"), &ids, "").await;
    assert_eq!(
        own,
        ["u1:BOND-1", "u1:CFA-RUB"],
        "a user sees only its own sub-accounts"
    );
    let none = listed(&world.client, &["u9:CFA-RUB"], "").await;
    assert!(none.is_empty(), "{none:?}");

    let thousand = vec!["u1:CFA-RUB"; 1_000];
    let one = listed(&world.client, &thousand, "").await;
    assert_eq!(one, ["u1:CFA-RUB"]);
    let more = vec!["u1:CFA-RUB"; 1_001];
    for (ids, text) in [
        (more.as_slice(), "subaccount_ids: must be at most 1000"),
        (&[""], "subaccount_ids: must not be empty"),
        (
            &["a\0"],
            "subaccount_ids[0]: must have no control characters",
        ),
    ] {
        let answer = by_ids(&world.client, ids, "").await;
        refused(answer, Code::InvalidArgument, "INVALID_ARGUMENT", text);
    }
}

// rows: R324
#[tokio::test]
async fn d15_frozen_takes_credit_and_pays_only_out_of_holds() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold = world.hold("u1", RUB, "40").await;
    let set = |key: &str, id: &str, status: SubAccountStatus| SetSubAccountStatusRequest {
        context: write(key),
        subaccount_id: id.to_owned(),
        status: status as i32,
        reason: "court".to_owned(),
    };
    let mut compliance = world.as_caller("sandbox.compliance");
    let frozen = compliance
        .set_sub_account_status(set("s1", "u1:CFA-RUB", SubAccountStatus::Frozen))
        .await
        .unwrap();
    assert_eq!(
        frozen.into_inner().subaccount.unwrap().status(),
        SubAccountStatus::Frozen
    );
    let answer = world.open_hold("h1", new_hold("u1", RUB, "1")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
    use proto::common::v1::OperationType::{Issuance, Payment};
    let of_kind = |kind, key: &str, hold_id: Option<String>| {
        let mut request = operation(kind, "u1", key, &[("u1:CFA-RUB", "u2:CFA-RUB", "10", RUB)]);
        request.postings[0].hold_id = hold_id;
        request
    };
    let pay = |key: &str, hold_id| of_kind(Payment, key, hold_id);
    let issue = of_kind(Issuance, "i1", Some(hold.hold_id.clone()));
    let answer = world.client.clone().create_operation(issue).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
    let answer = world.client.clone().create_operation(pay("p1", None)).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
    world
        .client
        .clone()
        .create_operation(pay("p2", Some(hold.hold_id.clone())))
        .await
        .unwrap();
    world.fund("u1", RUB, "5").await;
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["95.00", "30.00", "0.00", "65.00"]
    );
    let answer = compliance
        .set_sub_account_status(set("s2", "u1:CFA-RUB", SubAccountStatus::Closed))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
    // Freezing takes one person, lifting the freeze two (D32).
    let alone = compliance
        .set_sub_account_status(set("s7", "u1:CFA-RUB", SubAccountStatus::Active))
        .await;
    refused(
        alone,
        Code::FailedPrecondition,
        "APPROVAL_REQUIRED",
        "This call needs an approval",
    );
    let mut approved = world.as_caller(testkit::APPROVED);
    approved
        .set_sub_account_status(set("s3", "u1:CFA-RUB", SubAccountStatus::Active))
        .await
        .unwrap();
    let answer = compliance
        .set_sub_account_status(set("s4", "u1:CFA-RUB", SubAccountStatus::Closed))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_NOT_EMPTY",
        "Sub-account is not empty",
    );
    world
        .client
        .clone()
        .create_operation(pay("p3", None))
        .await
        .unwrap();
    let empty = world.fund("u3", RUB, "1").await;
    let reverse = ReverseOperationRequest {
        context: write("r1"),
        operation_id: empty.operation_id,
        reason: String::new(),
    };
    world
        .client
        .clone()
        .reverse_operation(reverse)
        .await
        .unwrap();
    compliance
        .set_sub_account_status(set("s5", "u3:CFA-RUB", SubAccountStatus::Closed))
        .await
        .unwrap();
    let credit = operation(
        proto::common::v1::OperationType::Deposit,
        "u3",
        "late",
        &[("system:reserve:CFA-RUB", "u3:CFA-RUB", "1", RUB)],
    );
    let closed = |answer| {
        refused(
            answer,
            Code::FailedPrecondition,
            "SUB_ACCOUNT_CLOSED",
            "Sub-account is closed",
        );
    };
    closed(world.open_hold("h-late", new_hold("u3", RUB, "1")).await);
    let answer = approved
        .set_sub_account_status(set("s6", "u3:CFA-RUB", SubAccountStatus::Active))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_CLOSED",
        "Sub-account is closed",
    );
    // Only a credit reopens it (T37).
    world.client.clone().create_operation(credit).await.unwrap();
    world.hold("u3", RUB, "1").await;
    world.assert_books_balance().await;
}

// rows: R324
#[tokio::test]
async fn r324_redemption_by_a_service_debits_frozen_units_and_nothing_else_does() {
    let world = World::new().await;
    world.fund("u1", BOND, "10").await;
    world.fund("u1", RUB, "10").await;
    world.fund("u2", BOND, "10").await;
    let offered = world.hold("u1", BOND, "2").await;
    let mut compliance = world.as_caller("sandbox.compliance");
    for (key, subaccount) in [("f1", "u1:BOND-1"), ("f2", "u1:CFA-RUB")] {
        let freeze = SetSubAccountStatusRequest {
            context: write(key),
            subaccount_id: subaccount.to_owned(),
            status: SubAccountStatus::Frozen as i32,
            reason: "court".to_owned(),
        };
        compliance.set_sub_account_status(freeze).await.unwrap();
    }
    use proto::common::v1::OperationType::{P2pTransfer, Redemption};
    let (units, reserve) = ("u1:BOND-1", "system:reserve:BOND-1");
    let frozen = |answer: Answer<CreateOperationResponse>| {
        refused(
            answer,
            Code::FailedPrecondition,
            "SUB_ACCOUNT_FROZEN",
            "Sub-account is frozen",
        );
    };
    // Another type, destination or instrument.
    for (kind, leg) in [
        (P2pTransfer, (units, reserve, "4", BOND)),
        (Redemption, (units, "u2:BOND-1", "4", BOND)),
        (Redemption, (units, "system:redemption:BOND-1", "4", BOND)),
        (
            Redemption,
            ("u1:CFA-RUB", "system:reserve:CFA-RUB", "4", RUB),
        ),
    ] {
        let request = operation(kind, "u1", &fresh(), &[leg]);
        frozen(world.client.clone().create_operation(request).await);
    }
    // Units that their holder had offered before the freeze.
    let mut request = operation(Redemption, "u1", &fresh(), &[(units, reserve, "2", BOND)]);
    request.postings[0].hold_id = Some(offered.hold_id);
    frozen(world.client.clone().create_operation(request).await);
    let redeem = |key: &str, value: &str| {
        let payout = ("system:redemption:CFA-RUB", "u1:CFA-RUB", "5", RUB);
        operation(
            Redemption,
            "u1",
            key,
            &[(units, "system:reserve:CFA-EQ", value, BOND), payout],
        )
    };
    let fund = operation(
        P2pTransfer,
        "u1",
        "fund",
        &[(
            "system:reserve:CFA-RUB",
            "system:redemption:CFA-RUB",
            "20",
            RUB,
        )],
    );
    world.client.clone().create_operation(fund).await.unwrap();
    let legs = [(units, reserve, "4", BOND)];
    let by_persons = operation(Redemption, "u1", &fresh(), &legs);
    let by_persons = testkit::messages::approved(by_persons);
    let mut approved = world.as_caller(testkit::APPROVED);
    frozen(approved.create_operation(by_persons).await);
    let answer = world
        .client
        .clone()
        .create_operation(redeem("m1", "11"))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    world
        .client
        .clone()
        .create_operation(redeem("m2", "4"))
        .await
        .unwrap();
    assert_eq!(world.balance(units).await[0], "6");
    // The payout belongs to the user and stays frozen.
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "15.00");
    let hold = world.open_hold("h1", new_hold("u1", RUB, "1")).await;
    refused(
        hold,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
    world.assert_books_balance().await;
}

// rows: R333
#[tokio::test]
async fn d32_users_see_their_own_only() {
    let world = World::new().await;
    let deposit = world.fund("u1", RUB, "10").await;
    let hold = world.hold("u1", RUB, "1").await;
    world.fund("u2", RUB, "10").await;
    let (mut own, mut other) = (
        world.as_caller("sandbox.investor.u1"),
        world.as_caller("sandbox.investor.u2"),
    );
    let balance = GetBalanceRequest {
        context: None,
        subaccount_id: "u1:CFA-RUB".to_owned(),
        as_of: None,
    };
    own.get_balance(balance.clone()).await.unwrap();
    assert_eq!(
        other.get_balance(balance).await.unwrap_err().code(),
        Code::PermissionDenied
    );
    let get = GetOperationRequest {
        context: None,
        operation_id: deposit.operation_id,
    };
    own.get_operation(get.clone()).await.unwrap();
    assert_eq!(
        other.get_operation(get).await.unwrap_err().code(),
        Code::NotFound
    );
    let get = GetHoldRequest {
        context: None,
        hold_id: hold.hold_id,
    };
    own.get_hold(get.clone()).await.unwrap();
    assert_eq!(
        other.get_hold(get).await.unwrap_err().code(),
        Code::NotFound
    );
    assert_eq!(
        own.list_holds(ListHoldsRequest::default())
            .await
            .unwrap()
            .into_inner()
            .holds
            .len(),
        1
    );
    assert!(
        other
            .list_holds(ListHoldsRequest::default())
            .await
            .unwrap()
            .into_inner()
            .holds
            .is_empty()
    );
    assert_eq!(accounts(&mut own, "").await.len(), 1);
    let foreign = ListAccountsRequest {
        user_id: "u1".to_owned(),
        ..Default::default()
    };
    assert_eq!(
        other.list_accounts(foreign).await.unwrap_err().code(),
        Code::PermissionDenied
    );
    let write = CreateHoldRequest {
        context: write("k"),
        hold: Some(new_hold("u1", RUB, "1")),
    };
    assert_eq!(
        own.create_hold(write).await.unwrap_err().code(),
        Code::PermissionDenied
    );
}
