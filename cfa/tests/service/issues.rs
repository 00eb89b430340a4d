//! Part B of the checklist: registration of an issue, its limit and its primary issue.

use chain::{Action, Address, ReceiptStatus};
use prost::Message;
use proto::cfa::v1 as pb;
use proto::common::v1::{InstrumentType, OperationStatus, RejectionReasonCode};

use crate::world::*;

// rows: R011 R025 R026 R028 R029 R326
#[tokio::test(flavor = "multi_thread")]
async fn r025_registration_deploys_an_own_contract() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let first = world
        .register(|request| request.context = context("k-1"))
        .await
        .expect("registered");
    assert_eq!(
        (first.instrument_id.as_str(), first.status(), first.decimals),
        ("BOND-1", pb::InstrumentStatus::Active, 0)
    );
    let second = world
        .register(|request| (request.symbol, request.decimals) = ("bond-2".into(), 18))
        .await
        .expect("registered");
    assert_eq!(second.instrument_id, "BOND-2");
    assert_ne!(first.smart_contract_address, second.smart_contract_address);
    for instrument in [&first, &second] {
        let address = instrument.smart_contract_address.parse().expect("address");
        assert!(
            world
                .connector()
                .has_code(&address)
                .await
                .expect("code lookup")
        );
    }
    let seen = world
        .events_until(events::topics::CFA, |event| event.key == "BOND-1")
        .await;
    let registered =
        pb::InstrumentRegisteredEvent::decode(seen.last().expect("event").payload.as_slice())
            .expect("decodes");
    assert_eq!(
        (
            registered.instrument_id.as_str(),
            registered.symbol.as_str(),
            registered.name.as_str()
        ),
        ("BOND-1", "BOND-1", "A bond")
    );
    assert_eq!(
        (registered.r#type(), registered.issuer_id.as_str()),
        (InstrumentType::CfaBond, "issuer")
    );
    assert!(registered.registered_at.is_some());
    // The same key returns the same instrument. Another key with the same symbol is refused.
    let again = world
        .register(|request| request.context = context("k-1"))
        .await
        .expect("answered");
    assert_eq!(again.smart_contract_address, first.smart_contract_address);
    let taken = world.register(|_| {}).await.expect_err("taken");
    assert_eq!(
        (taken.code(), taken.message()),
        (tonic::Code::AlreadyExists, "Instrument already exists")
    );
    // Amounts must fit the decimals.
    let error = world
        .cfa
        .issue_investment_cfa(issue_request("BOND-1", "alice", "1.5", None))
        .await
        .expect_err("fraction");
    assert_eq!(error.code(), tonic::Code::InvalidArgument);
    world.issue("BOND-2", "alice", "0.000000000000000001").await;
    assert_eq!(world.tokens("BOND-2", "alice").await, 1);
    let bad: [(&str, fn(&mut pb::RegisterInstrumentRequest)); 7] = [
        ("symbol", |request| request.symbol = "a".into()),
        ("symbol", |request| request.symbol = "ОБЛ-1".into()),
        ("decimals", |request| request.decimals = 19),
        ("type", |request| {
            request.r#type = InstrumentType::MoneyClaim.into()
        }),
        ("currency_code", |request| {
            request.currency_code = "USD".into()
        }),
        ("tick_size", |request| request.tick_size = decimal("0.001")),
        ("nominal", |request| request.nominal = decimal("-1")),
    ];
    for (field, change) in bad {
        let error = world
            .register(|request| (request.symbol = "BOND-9".into(), change(request)).1)
            .await
            .expect_err(field);
        let violations = tonic_types::StatusExt::get_details_bad_request(&error)
            .expect("details")
            .field_violations;
        assert_eq!(violations[0].field, field);
    }
    let foreign = world
        .as_caller("sandbox.issuer.other")
        .register_instrument(bond("BOND-8"))
        .await
        .expect_err("foreign");
    assert_eq!(foreign.code(), tonic::Code::PermissionDenied);
    world.stop().await;
}

// rows: R306
#[tokio::test(flavor = "multi_thread")]
async fn r306_an_issue_has_at_most_18_decimals() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    // 256 and 274 would be 0 and 18 if they were truncated to a byte.
    for decimals in [19, 255, 256, 274, u32::MAX] {
        let error = world
            .register(|request| request.decimals = decimals)
            .await
            .expect_err("too many");
        let details = tonic_types::StatusExt::get_details_bad_request(&error);
        let violations = details.expect("details").field_violations;
        assert_eq!(
            (error.code(), violations[0].field.as_str()),
            (tonic::Code::InvalidArgument, "decimals"),
            "{decimals}"
        );
    }
    let listed = world
        .cfa
        .list_instruments(pb::ListInstrumentsRequest::default())
        .await
        .expect("listed");
    let listed = listed.into_inner().instruments;
    assert_eq!(listed.len(), 1, "only CFA-RUB: {listed:?}");
    let finest = world.register(|request| request.decimals = 18).await;
    assert_eq!(finest.expect("registered").decimals, 18);
    assert_eq!(world.instrument("BOND-1").await.decimals, 18);
    world.stop().await;
}

/// Amounts have 64 bits of minor units, of an issue with 18 decimals 9.2 units.
// rows: R027 R306
#[tokio::test(flavor = "multi_thread")]
async fn r306_the_largest_amount_is_issued_and_one_more_minor_unit_is_refused() {
    const LARGEST: &str = "9.223372036854775807";
    const ABOVE: &str = "9.223372036854775808";
    const ONE_MORE: &str = "0.000000000000000001";
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let fine = |symbol: &'static str, limit: Option<&'static str>| {
        move |request: &mut pb::RegisterInstrumentRequest| {
            request.symbol = symbol.into();
            request.decimals = 18;
            request.issue_limit = limit.and_then(decimal);
        }
    };
    let refused = world.register(fine("BOND-1", Some(ABOVE))).await;
    assert_eq!(
        refused.expect_err("above 64 bits").message(),
        "issue_limit: is too large"
    );
    for (symbol, limit) in [("BOND-1", Some(LARGEST)), ("BOND-2", None)] {
        let registered = world.register(fine(symbol, limit)).await;
        registered.expect("registered");
        let above = issue_request(symbol, "alice", ABOVE, None);
        let refused = world.cfa.issue_investment_cfa(above).await;
        assert_eq!(
            refused.expect_err("above 64 bits").message(),
            "amount.amount: is too large"
        );
        world.issue(symbol, "alice", LARGEST).await;
        let tokens = world.tokens(symbol, "alice").await;
        assert_eq!(tokens, u128::from(i64::MAX.unsigned_abs()));
        let account = format!("alice:{symbol}");
        world.balance_becomes(&account, LARGEST).await;
        let more = issue_request(symbol, "bob", ONE_MORE, None);
        let more = world.cfa.issue_investment_cfa(more).await;
        let more = more.expect("a result").into_inner().operation;
        assert_eq!(
            more.expect("operation").rejection_reason(),
            RejectionReasonCode::IssueLimitExceeded,
            "{symbol}"
        );
        assert_eq!(world.instrument(symbol).await.issued, decimal(LARGEST));
        assert_eq!(world.supply(symbol).await, LARGEST);
    }
    world.stop().await;
}

// rows: R027 R092 R307
#[tokio::test(flavor = "multi_thread")]
async fn r027_issue_limit_holds_under_concurrency() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world
        .register(|request| request.issue_limit = decimal("10"))
        .await
        .expect("registered");
    let calls = (0..8).map(|n| {
        let mut client = world.cfa.clone();
        async move {
            client
                .issue_investment_cfa(issue_request("BOND-1", &format!("investor-{n}"), "3", None))
                .await
                .expect("a result")
                .into_inner()
                .operation
                .expect("operation")
        }
    });
    let operations = futures::future::join_all(calls).await;
    let (refused, sent): (Vec<_>, Vec<_>) = operations
        .into_iter()
        .partition(|operation| operation.status() == OperationStatus::Rejected);
    assert_eq!((refused.len(), sent.len()), (5, 3));
    assert!(
        refused.iter().all(
            |operation| operation.rejection_reason() == RejectionReasonCode::IssueLimitExceeded
        )
    );
    for operation in &sent {
        assert_eq!(
            world.settle(operation).await.status(),
            OperationStatus::Finalized
        );
    }
    assert_eq!(world.supply("BOND-1").await, "9");
    assert_eq!(world.instrument("BOND-1").await.issued, decimal("9"));
    world.issue("BOND-1", "investor-9", "1").await;
    world.stop().await;
}

// rows: R092 R219 R326
#[tokio::test(flavor = "multi_thread")]
async fn r092_primary_issue_is_one_exchange_on_chain_and_in_the_ledger() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world
        .register(|request| request.issue_limit = decimal("100"))
        .await
        .expect("registered");
    world.deposit("alice", "5000.00").await;
    let subscribed = world.subscribe("BOND-1", "alice", "4", "4000.00").await;
    subscribed.expect("subscribed");
    let operation = world
        .cfa
        .issue_investment_cfa(issue_request("BOND-1", "alice", "4", Some("4000.00")))
        .await
        .expect("issued")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(operation.bookbuilding_id, "book-1");
    let operation = world.settle(&operation).await;
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert_eq!(
        (
            world.tokens("BOND-1", "alice").await,
            world.tokens("CFA-RUB", "alice").await
        ),
        (4, 1_000_00)
    );
    assert_eq!(world.tokens("CFA-RUB", "issuer").await, 4_000_00);
    assert_eq!(
        world.balance("alice:BOND-1").await.available.to_string(),
        "4"
    );
    assert_eq!(
        world.balance("issuer:CFA-RUB").await.available.to_string(),
        "4000.00"
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.balance.to_string(),
        "1000.00"
    );
    assert_eq!(
        world
            .balance("system:reserve:CFA-RUB")
            .await
            .balance
            .to_string(),
        "-5000.00",
        "the reserve balance is unchanged"
    );
    assert_eq!(
        world
            .balance("system:reserve:BOND-1")
            .await
            .balance
            .to_string(),
        "-4"
    );
    // Money through the reserve to the issuer, units from the issuer's reserve to the investor
    // (T18).
    let expected = [
        ("alice:CFA-RUB", "system:reserve:CFA-RUB", "4000.00"),
        ("system:reserve:CFA-RUB", "issuer:CFA-RUB", "4000.00"),
        ("system:reserve:BOND-1", "alice:BOND-1", "4"),
    ];
    assert_eq!(
        world.postings(&operation.operation_id).await,
        expected.map(|(debit, credit, value)| (debit.into(), credit.into(), value.into()))
    );
    let too_dear = world.subscribe("BOND-1", "alice", "1", "1000.01").await;
    let too_dear = too_dear.expect_err("too dear");
    assert_eq!(too_dear.message(), "Insufficient balance");
    assert_eq!(
        world.instrument("BOND-1").await.issued,
        decimal("4"),
        "the limit is restored"
    );
    call_contract(&mut world, "BOND-1", "pause()").await;
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    subscribed.expect("subscribed");
    let reverted = world
        .cfa
        .issue_investment_cfa(issue_request("BOND-1", "alice", "1", Some("1000.00")))
        .await
        .expect("sent")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        world.settle(&reverted).await.status(),
        OperationStatus::Rejected
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "1000.00"
    );
    assert_eq!(world.instrument("BOND-1").await.issued, decimal("4"));
    world.stop().await;
}

/// Submits a transaction that reverts under the key of a future submission.
pub async fn revert_under(world: &mut World, key: &str) {
    let token = world.instrument("CFA-RUB").await.smart_contract_address;
    let stranger = Action::Mint {
        token: token.parse().expect("address"),
        to: Address::of_user("not on the allow-list"),
        units: 1,
        id: Some(key.into()),
    };
    let connector = world.connector();
    let submitted = connector
        .submit(key, &stranger.call())
        .await
        .expect("submitted");
    let receipt = connector
        .wait_receipt(&submitted.tx_hash, WAIT)
        .await
        .expect("receipt lookup")
        .expect("in a block");
    assert_eq!(receipt.status, ReceiptStatus::Reverted);
}

// rows: R025
#[tokio::test(flavor = "multi_thread")]
async fn r025_a_reverted_deployment_is_retried_under_another_key() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    revert_under(&mut world, "instrument:BOND-1").await;
    let bond = world.register(|_| {}).await.expect("registered");
    assert_eq!(bond.status(), pb::InstrumentStatus::Active);
    world.issue("BOND-1", "alice", "1").await;
    // The number of attempts is limited.
    for key in ["", ":1", ":2"] {
        revert_under(&mut world, &format!("instrument:BOND-2{key}")).await;
    }
    let failed = world.register(|request| request.symbol = "BOND-2".into());
    let failed = failed.await.expect("activated");
    assert_eq!(
        failed.status(),
        pb::InstrumentStatus::Draft,
        "three deployments reverted"
    );
    world.stop().await;
}
