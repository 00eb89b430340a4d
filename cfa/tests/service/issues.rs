//! Parts B and E of the checklist: instruments, primary issue, holders, integrity, maturity.

use chain::contracts::id_hash;
use chain::{Action, Address, Grant, ReceiptStatus, RoleSet, Terms};
use prost::Message;
use proto::audit::v1 as audit;
use proto::cfa::v1 as pb;
use proto::common::v1::{
    HashAlgorithm, InstrumentType, OperationStatus, OperationType, PaginationRequest,
    RejectionReasonCode,
};
use proto::ledger::v1 as ledger_pb;
use sha2::Digest as _;

use crate::node::restated_world;
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

#[tokio::test(flavor = "multi_thread")]
async fn t32_only_a_matching_contract_is_adopted() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let first = world.register(|_| {}).await.expect("registered");
    let adopt = |symbol: &'static str, address: String| {
        move |request: &mut pb::RegisterInstrumentRequest| {
            request.symbol = symbol.into();
            request.smart_contract_address = address;
        }
    };
    let other_symbol = world
        .register(adopt("BOND-2", first.smart_contract_address.clone()))
        .await
        .expect_err("symbol differs");
    assert_eq!(reason(&other_symbol), "CONTRACT_UNFIT");
    let no_code = world
        .register(adopt("BOND-2", format!("0x{}", "11".repeat(20))))
        .await
        .expect_err("no code");
    assert_eq!(reason(&no_code), "CONTRACT_UNFIT");
    let own = world.deploy_token("BOND-2", |_| {}).await;
    let adopted = world
        .register(adopt("BOND-2", own.to_string()))
        .await
        .expect("adopted");
    assert_eq!(adopted.status(), pb::InstrumentStatus::Active);
    world.issue("BOND-2", "alice", "3").await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t32_a_token_with_other_code_or_rights_is_not_adopted() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let (connector, contracts) = (world.connector(), world.contracts().await);
    let (operator, stranger) = (connector.operator(), Address::of_user("stranger"));
    let former = Action::DeployTokenV1 {
        name: "x".into(),
        symbol: "BOND-2".into(),
        decimals: 0,
        registry: contracts.registry,
        agents: vec![contracts.settlement, contracts.redemption],
    };
    // One account more with a role, a role that the operator does not have, and a role less.
    let grants = contracts.token_grants(operator);
    let more = |account, roles| [grants.clone(), vec![Grant { account, roles }]].concat();
    let minter = more(stranger, RoleSet::MINT);
    let issuer = more(operator, RoleSet::OPERATOR.and(RoleSet::ISSUE));
    let fewer = grants[..2].to_vec();
    type Change = Box<dyn FnOnce(&mut Action)>;
    let with_grants = |of: Vec<Grant>| -> Change {
        Box::new(move |action: &mut Action| {
            if let Action::DeployToken { grants, .. } = action {
                *grants = of;
            }
        })
    };
    let refused: [(&str, Change); 7] = [
        ("code", Box::new(|action: &mut Action| *action = former)),
        ("roles", with_grants(minter)),
        ("roles", with_grants(issuer)),
        ("roles", with_grants(fewer)),
        (
            "owner",
            Box::new(move |action: &mut Action| {
                if let Action::DeployToken { owner, .. } = action {
                    *owner = stranger;
                }
            }),
        ),
        (
            "allow-list",
            Box::new(move |action: &mut Action| {
                if let Action::DeployToken { registry, .. } = action {
                    *registry = stranger;
                }
            }),
        ),
        (
            "terms",
            Box::new(move |action: &mut Action| {
                if let Action::DeployToken { terms, .. } = action {
                    *terms = Some(Terms {
                        document_hash: id_hash("another decision"),
                        ..Terms::default()
                    });
                }
            }),
        ),
    ];
    for (what, change) in refused {
        let token = world.deploy_token("BOND-2", change).await;
        let adopted = world.register(|request| {
            request.symbol = "BOND-2".into();
            request.smart_contract_address = token.to_string();
        });
        let refused = adopted.await.expect_err(what);
        assert_eq!(reason(&refused), "CONTRACT_UNFIT");
        assert!(refused.message().contains(what), "{what}: {refused}");
    }
    // An owner who has offered the ownership to another account may lose it at any time.
    let token = world.deploy_token("BOND-2", |_| {}).await;
    let offer = Action::TransferOwnership {
        contract: token,
        owner: stranger,
    };
    let offered = connector.submit("offer", &offer.call()).await;
    let offered = offered.expect("submitted").tx_hash.to_string();
    assert_eq!(world.receipt(&offered).await.status, ReceiptStatus::Success);
    let adopted = world.register(|request| {
        request.symbol = "BOND-2".into();
        request.smart_contract_address = token.to_string();
    });
    assert!(
        adopted
            .await
            .expect_err("offered")
            .message()
            .contains("owner")
    );
    world.stop().await;
}

// rows: R333
#[tokio::test(flavor = "multi_thread")]
async fn d32_a_person_adopts_a_token_by_an_approval_only() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let token = world.deploy_token("BOND-1", |_| {}).await;
    for person in ["sandbox.operator.anna", "sandbox.issuer.issuer"] {
        let request = pb::RegisterInstrumentRequest {
            smart_contract_address: token.to_string(),
            ..bond("BOND-1")
        };
        let alone = world.as_caller(person).register_instrument(request).await;
        assert_eq!(reason(&alone.expect_err(person)), "APPROVAL_REQUIRED");
    }
    // Without an adoption, one person registers.
    let mut operator = world.as_caller("sandbox.operator.anna");
    let registered = operator.register_instrument(bond("BOND-2")).await;
    registered.expect("registered");
    let adopted = world.register(|request| {
        request.smart_contract_address = token.to_string();
    });
    assert_eq!(
        adopted.await.expect("adopted").smart_contract_address,
        token.to_string()
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f31_document_and_terms_are_on_the_chain_from_the_deployment_on() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let document = "ab".repeat(32);
    let bond = world
        .register(|request| {
            request.document_hash = document.clone();
            request.document_uri = "https://issuer.example/decision-1".into();
            request.issue_limit = decimal("100");
        })
        .await
        .expect("registered");
    let token = bond.smart_contract_address.parse().expect("address");
    let connector = world.connector();
    let terms = connector.token_terms(&token).await.expect("read");
    let terms = terms.expect("set");
    assert_eq!(terms.document_hash.to_string(), format!("0x{document}"));
    assert_eq!(terms.document_uri, "https://issuer.example/decision-1");
    let recorded = "instrument=BOND-1\ntype=CFA_BOND\nissuer=issuer\ndecimals=0\ncurrency=RUB\n\
                    nominal=1000\nissue_limit_minor=100\nissued_at_us=\nmatures_at_us=";
    assert_eq!(
        terms.terms_hash.to_string(),
        chain::keccak256(recorded.as_bytes())
    );
    // They are set once.
    let other = Action::SetTerms {
        token,
        terms: Terms {
            document_uri: String::new(),
            ..terms.clone()
        },
    };
    let sent = connector.submit("other", &other.call()).await;
    let sent = sent.expect("submitted").tx_hash.to_string();
    assert_eq!(world.receipt(&sent).await.status, ReceiptStatus::Reverted);
    let known = connector.token_terms(&token).await.expect("read");
    assert_eq!(known, Some(terms));
    // Zero is no hash of a document: that of its text is recorded.
    let zeros = "00".repeat(32);
    let zero = world.register(|request| {
        request.symbol = "BOND-2".into();
        request.document_hash = zeros.clone();
    });
    let zero = zero.await.expect("registered").smart_contract_address;
    let zero = zero.parse().expect("address");
    let terms = connector.token_terms(&zero).await.expect("read");
    assert_eq!(terms.expect("set").document_hash, id_hash(&zeros));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f31_document_and_terms_are_set_in_an_adopted_token() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let connector = world.connector();
    let token = world.deploy_token("BOND-1", |_| {}).await;
    let document = "ab".repeat(32);
    let adopted = world
        .register(|request| {
            request.smart_contract_address = token.to_string();
            request.document_hash = document.clone();
        })
        .await
        .expect("adopted");
    assert_eq!(adopted.status(), pb::InstrumentStatus::Active);
    let terms = connector.token_terms(&token).await.expect("read");
    let terms = terms.expect("set");
    assert_eq!(terms.document_hash.to_string(), format!("0x{document}"));
    // A token that has the terms of its issue is adopted as it is.
    let document = "cd".repeat(32);
    let recorded = "instrument=BOND-2\ntype=CFA_BOND\nissuer=issuer\ndecimals=0\ncurrency=RUB\n\
                    nominal=1000\nissue_limit_minor=\nissued_at_us=\nmatures_at_us=";
    let terms = Terms {
        document_hash: document.parse().expect("a hash"),
        terms_hash: id_hash(recorded),
        ..terms
    };
    let with_terms = |action: &mut Action| {
        if let Action::DeployToken { terms: of, .. } = action {
            *of = Some(terms);
        }
    };
    let token = world.deploy_token("BOND-2", with_terms).await;
    let adopted = world.register(|request| {
        request.symbol = "BOND-2".into();
        request.smart_contract_address = token.to_string();
        request.document_hash = document.clone();
    });
    assert_eq!(
        adopted.await.expect("adopted").status(),
        pb::InstrumentStatus::Active
    );
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

// rows: R010 R030 R031 R217 R326
#[tokio::test(flavor = "multi_thread")]
async fn r031_holders_match_the_chain_and_the_ledger() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    for n in 1..=5 {
        world
            .issue("BOND-1", &format!("investor-{n}"), &n.to_string())
            .await;
    }
    let request = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "investor-5".into(),
        amount: amount("BOND-1", "5"),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    world.deposit("issuer", "5000.00").await;
    let offered = world.offer("BOND-1", "investor-5", "5", "5000.00").await;
    offered.expect("offered");
    let bought = world
        .cfa
        .redeem_investment_cfa(request)
        .await
        .expect("sent")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        world.settle(&bought).await.status(),
        OperationStatus::Finalized
    );
    assert_eq!(
        world
            .balance("investor-5:CFA-RUB")
            .await
            .available
            .to_string(),
        "5000.00"
    );
    let mut seen = Vec::new();
    let mut token = String::new();
    loop {
        let request = pb::ListHoldersRequest {
            instrument_id: "BOND-1".into(),
            pagination: Some(PaginationRequest {
                page_size: 2,
                page_token: token,
            }),
            ..Default::default()
        };
        let page = world
            .cfa
            .list_holders(request)
            .await
            .expect("listed")
            .into_inner();
        assert!(page.holders.len() <= 2);
        seen.extend(page.holders);
        assert!(seen.len() <= 4, "{seen:?}");
        token = page.pagination.expect("pagination").next_page_token;
        if token.is_empty() {
            break;
        }
    }
    seen.sort_by(|a, b| a.user_id.cmp(&b.user_id));
    assert_eq!(
        seen.iter()
            .map(|holder| holder.user_id.as_str())
            .collect::<Vec<_>>(),
        ["investor-1", "investor-2", "investor-3", "investor-4"]
    );
    for (n, holder) in (1..).zip(&seen) {
        let units = n.to_string();
        assert_eq!(
            (holder.balance.clone(), holder.locked.clone()),
            (decimal(&units), decimal("0"))
        );
        assert_eq!(world.tokens("BOND-1", &holder.user_id).await, n);
        assert_eq!(
            world
                .balance(&format!("{}:BOND-1", holder.user_id))
                .await
                .balance
                .to_string(),
            units
        );
    }
    assert_eq!(seen[1].share_percent, decimal("20.000000"));
    assert_replay_gives_the_registry(&mut world).await;
    let unknown = pb::ListHoldersRequest {
        instrument_id: "NO-SUCH".into(),
        ..Default::default()
    };
    assert_eq!(
        world
            .cfa
            .list_holders(unknown)
            .await
            .expect_err("unknown")
            .message(),
        "Instrument not found"
    );
    world.stop().await;
}

// rows: R030
#[tokio::test(flavor = "multi_thread")]
async fn r030_reserved_units_of_a_page_are_read_in_one_call() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    for user in ["alice", "bob", "carol", "dave"] {
        world.issue("BOND-1", user, "5").await;
    }
    let hold = ledger_pb::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger_pb::Hold {
            subaccount_id: "bob:BOND-1".into(),
            amount: amount("BOND-1", "3"),
            reason: "an order".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(hold).await.expect("held");
    for page_size in [1, 4] {
        world.faults.take_calls("");
        let request = pb::ListHoldersRequest {
            instrument_id: "BOND-1".into(),
            pagination: Some(PaginationRequest {
                page_size,
                ..Default::default()
            }),
            ..Default::default()
        };
        let listed = world.cfa.list_holders(request).await.expect("listed");
        let holders = listed.into_inner().holders;
        assert_eq!(holders.len(), page_size as usize);
        for holder in holders {
            let locked = if holder.user_id == "bob" { "3" } else { "0" };
            assert_eq!(holder.locked, decimal(locked), "{}", holder.user_id);
        }
        let calls = world.faults.take_calls("dfa.ledger.v1.LedgerService");
        assert_eq!(calls, ["ListSubAccounts"], "page of {page_size}");
    }
    world.stop().await;
}

/// The answer of CheckIntegrity.
async fn checked(
    world: &World,
    block_number: u64,
    hash: &str,
    algorithm: HashAlgorithm,
) -> pb::CheckIntegrityResponse {
    let request = pb::CheckIntegrityRequest {
        context: None,
        block_number,
        block_hash: hash.into(),
        algorithm: algorithm.into(),
    };
    let checked = world.cfa.clone().check_integrity(request).await;
    checked.expect("checked").into_inner()
}

// rows: R032 R326
#[tokio::test(flavor = "multi_thread")]
async fn r032_block_hashes_are_recomputed() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let operation = world.deposit("alice", "1.00").await;
    let block = world
        .connector()
        .block(Some(operation.block_number))
        .await
        .expect("block lookup")
        .expect("exists");
    let check = async |hash: &str, algorithm: HashAlgorithm| {
        checked(&world, block.number, hash, algorithm).await
    };
    let real = block.hash.to_string();
    for given in [
        real.clone(),
        real.to_uppercase().replace("0X", ""),
        real.trim_start_matches("0x").to_owned(),
    ] {
        let checked = check(&given, HashAlgorithm::Unspecified).await;
        assert_eq!(
            (checked.valid, checked.computed_hash.as_str()),
            (true, real.as_str())
        );
    }
    // One digit differs.
    let digit = if real.ends_with('0') { "1" } else { "0" };
    let other = format!("{}{digit}", &real[..real.len() - 1]);
    assert_eq!(other.len(), real.len());
    let altered = check(&other, HashAlgorithm::Keccak256).await;
    assert_eq!(
        (altered.valid, altered.computed_hash.as_str()),
        (false, real.as_str())
    );
    for algorithm in [HashAlgorithm::Sha256, HashAlgorithm::Streebog256] {
        let computed = check(&real, algorithm).await;
        assert!(!computed.valid && computed.computed_hash.len() == 66);
        assert!(check(&computed.computed_hash, algorithm).await.valid);
    }
    let request = pb::CheckIntegrityRequest {
        block_number: 1_000_000,
        ..Default::default()
    };
    assert_eq!(
        world
            .cfa
            .check_integrity(request)
            .await
            .expect_err("unknown")
            .code(),
        tonic::Code::NotFound
    );
    world.stop().await;
}

// rows: R032
#[tokio::test(flavor = "multi_thread")]
async fn r032_a_block_has_the_hash_that_the_node_states_if_that_of_its_header_differs() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node) = restated_world(folder.path()).await;
    let number = world.deposit("alice", "1.00").await.block_number;
    let block = world.connector().block(Some(number)).await.expect("read");
    let block = block.expect("exists");
    let (stated, of_header) = (block.hash.to_string(), chain::keccak256(&block.header));
    assert_ne!(stated, of_header);
    let sha256 = format!("0x{}", hex::encode(sha2::Sha256::digest(&block.header)));
    for (hash, algorithm, valid) in [
        (&stated, HashAlgorithm::Keccak256, true),
        (&of_header, HashAlgorithm::Keccak256, false),
        (&sha256, HashAlgorithm::Sha256, true),
        (&stated, HashAlgorithm::Sha256, false),
    ] {
        let answer = checked(&world, number, hash, algorithm).await;
        let computed = match algorithm {
            HashAlgorithm::Keccak256 => &stated,
            _ => &sha256,
        };
        assert_eq!((answer.valid, &answer.computed_hash), (valid, computed));
    }
    world.stop().await;
    node.stop().await;
}

async fn redemption(world: &mut World) -> pb::IssueRedemption {
    let request = pb::GetRedemptionRequest {
        context: None,
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    world
        .cfa
        .get_redemption(request)
        .await
        .expect("found")
        .into_inner()
        .redemption
        .expect("redemption")
}

// rows: R097 R100 R101 R102 R103 R104
#[tokio::test(flavor = "multi_thread")]
async fn r097_maturity_pays_every_holder_and_ends_the_issue() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
    world
        .register(|request| {
            request.matures_at = at(matures_at);
            request.coupons = vec![pb::Coupon {
                pays_at: at(matures_at),
                amount: decimal("35.505"),
            }];
        })
        .await
        .expect("registered");
    for (investor, units) in [("alice", "1"), ("bob", "3")] {
        world.issue("BOND-1", investor, units).await;
    }
    world.resume_operations().await;
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Active,
        "not yet"
    );
    world.clock.advance_us(3_600_000_000);
    world.resume_operations().await;
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Matured
    );
    let waiting = redemption(&mut world).await;
    assert_eq!(
        waiting.status(),
        pb::RedemptionStatus::Underfunded,
        "no money, no distribution"
    );
    let payments: Vec<_> = waiting
        .payments
        .iter()
        .map(|payment| (payment.user_id.clone(), payment.amount.clone()))
        .collect();
    assert!(
        payments.contains(&("alice".into(), amount("CFA-RUB", "1035.51")))
            && payments.contains(&("bob".into(), amount("CFA-RUB", "3106.52")))
    );
    assert_eq!(waiting.total, amount("CFA-RUB", "4142.03"));
    assert_eq!(world.supply("BOND-1").await, "4");
    world.resume_operations().await;
    for holder in ["alice", "bob", "system:redemption"] {
        assert_eq!(world.tokens("CFA-RUB", holder).await, 0);
    }
    world.deposit("issuer", "5000.00").await;
    let supply = world.supply("CFA-RUB").await;
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    assert!(done.finalized_at.is_some());
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Redeemed
    );
    assert_eq!(
        (
            world.supply("BOND-1").await.as_str(),
            world.supply("CFA-RUB").await
        ),
        ("0", supply)
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "alice").await,
            world.tokens("CFA-RUB", "bob").await
        ),
        (1_035_51, 3_106_52)
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "issuer").await,
            world.tokens("CFA-RUB", "system:redemption").await
        ),
        (857_97, 0)
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "1035.51"
    );
    assert_eq!(
        world.balance("bob:CFA-RUB").await.available.to_string(),
        "3106.52"
    );
    assert_eq!(
        world.balance("issuer:CFA-RUB").await.balance.to_string(),
        "857.97"
    );
    assert_eq!(
        world
            .balance("system:redemption:CFA-RUB")
            .await
            .balance
            .to_string(),
        "0.00"
    );
    assert_eq!(world.balance("bob:BOND-1").await.balance.to_string(), "0");
    assert_eq!(
        world
            .balance("system:reserve:BOND-1")
            .await
            .balance
            .to_string(),
        "0"
    );
    assert_eq!(world.holders("BOND-1").await, []);
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "InstrumentUpdatedEvent"
                && event.correlation_id == done.redemption_id
        })
        .await;
    let told: Vec<_> = seen
        .iter()
        .filter(|event| event.short_type() == "HolderNotificationEvent")
        .map(|event| {
            pb::HolderNotificationEvent::decode(event.payload.as_slice()).expect("decodes")
        })
        .collect();
    assert_eq!(told.len(), 2);
    assert!(
        told.iter().all(|event| event.channels == ["push", "email"]
            && event.redemption_id == done.redemption_id)
    );
    assert_eq!(
        seen.iter()
            .filter(|event| event.short_type() == "CfaRedeemedEvent")
            .count(),
        2
    );
    assert_alert(&world, &done.redemption_id).await;
    // Another sweep and another call change nothing.
    world.resume_operations().await;
    assert_eq!(redemption(&mut world).await, done);
    let closed = world
        .cfa
        .issue_investment_cfa(issue_request("BOND-1", "alice", "1", None))
        .await
        .expect_err("closed");
    assert_eq!(reason(&closed), "INSTRUMENT_NOT_ACTIVE");
    world.stop().await;
}

// rows: R097
#[tokio::test(flavor = "multi_thread")]
async fn r097_the_timer_redeems_an_issue_at_its_maturity_and_no_other() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = Settings {
        sweep_interval_ms: Some(10),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    let now = world.clock.now_us() / 1_000_000;
    for (symbol, hours) in [("BOND-1", 1), ("BOND-2", 2)] {
        let register = world.register(|request| {
            request.symbol = symbol.into();
            request.matures_at = Some(prost_types::Timestamp {
                seconds: now + hours * 3_600,
                nanos: 0,
            });
        });
        register.await.expect("registered");
        world.issue(symbol, "alice", "2").await;
    }
    world.deposit("issuer", "4000.00").await;
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Active,
        "not before its maturity"
    );
    world.clock.advance_us(3_600_000_000);
    let redeemed = async || {
        let request = pb::GetInstrumentRequest {
            context: None,
            instrument_id: "BOND-1".into(),
        };
        let mut cfa = world.cfa.clone();
        let answer = cfa.get_instrument(request).await.expect("found");
        let bond = answer.into_inner().instrument.expect("instrument");
        (bond.status() == pb::InstrumentStatus::Redeemed).then_some(())
    };
    testkit::eventually(redeemed).await;
    assert_eq!(
        redemption(&mut world).await.reason(),
        pb::RedemptionReason::Maturity
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    assert_eq!(
        world.instrument("BOND-2").await.status(),
        pb::InstrumentStatus::Active
    );
    world.stop().await;
}

/// One audit record reports that the issuer lacked the money, although several sweeps found it
/// (R101).
async fn assert_alert(world: &World, redemption_id: &str) {
    let decoded = |event: &events::Event| {
        audit::AuditRecordEvent::decode(event.payload.as_slice()).expect("decodes")
    };
    let seen = world
        .events_until(events::topics::AUDIT, |event| {
            decoded(event).action == "redemption.finalized"
        })
        .await;
    let records: Vec<_> = seen
        .iter()
        .filter(|event| event.correlation_id == redemption_id)
        .map(decoded)
        .collect();
    let actions: Vec<_> = records
        .iter()
        .map(|record| record.action.as_str())
        .collect();
    assert_eq!(actions, ["redemption.underfunded", "redemption.finalized"]);
    let alert = &records[0];
    assert_eq!(
        (alert.object_id.as_str(), alert.actor.as_str()),
        ("BOND-1", "issuer")
    );
    assert_eq!(
        (alert.before.as_str(), alert.after.as_str()),
        ("SNAPSHOT", "UNDERFUNDED")
    );
}

// rows: R098 R093
#[tokio::test(flavor = "multi_thread")]
async fn r098_buyback_of_the_whole_issue_by_call() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let start = |key: &str| pb::StartRedemptionRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let done = world
        .cfa
        .start_redemption(start("k-1"))
        .await
        .expect("started")
        .into_inner()
        .redemption
        .expect("redemption");
    assert_eq!(
        (done.status(), done.reason()),
        (
            pb::RedemptionStatus::Finalized,
            pb::RedemptionReason::Buyback
        )
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "2000.00"
    );
    assert_eq!(world.supply("BOND-1").await, "0");
    let again = world
        .cfa
        .start_redemption(start("k-1"))
        .await
        .expect("answered")
        .into_inner()
        .redemption
        .expect("redemption");
    assert_eq!(again.redemption_id, done.redemption_id);
    let other = world
        .cfa
        .start_redemption(start("k-2"))
        .await
        .expect_err("one redemption per issue");
    assert_eq!(other.code(), tonic::Code::AlreadyExists);
    world.stop().await;
}

/// Starts the redemption of BOND-1 as the caller.
async fn start(
    world: &World,
    credential: &str,
    record_date_s: Option<i64>,
) -> Result<pb::IssueRedemption, tonic::Status> {
    let request = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: record_date_s.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 }),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let mut client = world.as_caller(credential);
    let answer = client.start_redemption(request).await?;
    Ok(answer.into_inner().redemption.expect("redemption"))
}

/// The issue still trades and its holder still has the units.
async fn assert_untouched(world: &mut World, units: &str) {
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Active
    );
    assert_eq!(world.supply("BOND-1").await, units);
    assert_eq!(
        world.balance("alice:BOND-1").await.available.to_string(),
        units
    );
}

async fn buy_back(world: &mut World, units: &str) -> Result<pb::CfaOperation, tonic::Status> {
    let request = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", units),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let answer = world.cfa.redeem_investment_cfa(request).await?;
    Ok(answer.into_inner().operation.expect("operation"))
}

type Change = fn(&mut pb::RedeemInvestmentCfaRequest);

/// A buyback of one unit from Alice, with a change.
fn units_redemption(change: Change) -> pb::RedeemInvestmentCfaRequest {
    let mut request = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    change(&mut request);
    request
}

/// Alice has five units with a coupon that is due, the issuer has money. Maturity is an hour later,
/// on the same day.
async fn coupon_world(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    let now = world.clock.now_us() / 1_000_000;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: now + 3_600,
            nanos: 0,
        });
        request.coupons = vec![pb::Coupon {
            pays_at: Some(prost_types::Timestamp {
                seconds: now,
                nanos: 0,
            }),
            amount: decimal("35.50"),
        }];
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "5").await;
    world.deposit("issuer", "3000.00").await;
    world
}

// rows: R326
#[tokio::test(flavor = "multi_thread")]
async fn r326_every_field_of_a_units_redemption_is_checked() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = coupon_world(folder.path()).await;
    let bad: [(&str, Change); 9] = [
        ("context.idempotency_key", |request| {
            request.context = context("")
        }),
        ("instrument_id", |request| {
            (request.instrument_id, request.amount) = ("CFA-RUB".into(), amount("CFA-RUB", "1"))
        }),
        ("holder_id", |request| request.holder_id = "".into()),
        ("holder_id", |request| request.holder_id = "issuer".into()),
        ("amount", |request| request.amount = None),
        ("amount", |request| request.amount = amount("BOND-2", "1")),
        ("amount.amount", |request| {
            request.amount = amount("BOND-1", "0.5")
        }),
        ("redemption_id", |request| {
            request.redemption_id = "a:b".into()
        }),
        ("reason", |request| request.reason = 9),
    ];
    for (field, change) in bad {
        let request = units_redemption(change);
        let refused = world.cfa.redeem_investment_cfa(request).await;
        let refused = refused.expect_err(field);
        let details = tonic_types::StatusExt::get_details_bad_request(&refused);
        let violations = details.expect("details").field_violations;
        assert_eq!(violations[0].field, field, "{refused}");
    }
    let unknown = units_redemption(|request| request.instrument_id = "BOND-9".into());
    let unknown = world.cfa.redeem_investment_cfa(unknown).await;
    assert_eq!(
        unknown.expect_err("unknown").message(),
        "Instrument not found"
    );
    let mut stranger = world.as_caller("sandbox.issuer.other");
    let foreign = stranger.redeem_investment_cfa(units_redemption(|_| {}));
    assert_eq!(
        foreign.await.expect_err("foreign").code(),
        tonic::Code::PermissionDenied
    );
    assert_untouched(&mut world, "5").await;
    world.stop().await;
}

// rows: R326
#[tokio::test(flavor = "multi_thread")]
async fn r326_a_buyback_pays_the_nominal_and_maturity_the_due_coupons_too() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = coupon_world(folder.path()).await;
    let at_maturity: Change = |request| {
        request.redemption_id = "end-1".into();
        request.reason = pb::RedemptionReason::Maturity.into();
    };
    for (change, paid) in [(|_| {}) as Change, at_maturity]
        .into_iter()
        .zip(["1000.00", "2035.50"])
    {
        let asked = units_redemption(change);
        if asked.reason() == pb::RedemptionReason::Maturity {
            world.clock.advance_us(3_600_000_000);
        } else {
            let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
            offered.expect("offered");
        }
        let answer = world.cfa.redeem_investment_cfa(asked.clone()).await;
        let sent = answer.expect("sent").into_inner().operation;
        let done = world.settle(&sent.expect("operation")).await;
        assert_eq!(
            (done.status(), done.r#type()),
            (OperationStatus::Finalized, OperationType::Redemption)
        );
        let key = asked.context.expect("context").idempotency_key;
        assert_eq!(
            (
                done.user_id,
                done.instrument_id,
                done.external_ref,
                done.idempotency_key
            ),
            ("alice".into(), "BOND-1".into(), asked.redemption_id, key)
        );
        assert_eq!(done.amount, decimal("1"));
        let balance = world.balance("alice:CFA-RUB").await;
        assert_eq!(balance.available.to_string(), paid);
    }
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_035_50);
    assert_eq!(world.supply("BOND-1").await, "3");
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r098_units_without_a_nominal_are_not_redeemed() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    world
        .register(|request| {
            request.nominal = None;
            request.matures_at = Some(prost_types::Timestamp {
                seconds: matures_at,
                nanos: 0,
            });
        })
        .await
        .expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    let refused = [
        start(&world, "sandbox.service", None)
            .await
            .expect_err("no nominal"),
        buy_back(&mut world, "1").await.expect_err("no nominal"),
    ];
    for status in refused {
        assert_eq!(
            (status.code(), status.message(), reason(&status).as_str()),
            (
                tonic::Code::FailedPrecondition,
                "Instrument has no nominal",
                "NOMINAL_MISSING"
            )
        );
    }
    // The sweep does not redeem the issue at maturity either.
    world.clock.advance_us(3_600_000_000);
    world.resume_operations().await;
    assert_untouched(&mut world, "2").await;
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r098_units_are_not_redeemed_without_payment() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world
        .register(|request| request.decimals = 18)
        .await
        .expect("registered");
    // At 1000 roubles per unit these units are worth less than half a kopeck.
    let dust = "0.000000000000000001";
    world.issue("BOND-1", "alice", dust).await;
    let refused = [
        start(&world, "sandbox.service", None)
            .await
            .expect_err("nothing to pay"),
        buy_back(&mut world, dust)
            .await
            .expect_err("nothing to pay"),
    ];
    for status in refused {
        assert_eq!(
            (status.code(), status.message(), reason(&status).as_str()),
            (
                tonic::Code::FailedPrecondition,
                "Redemption would burn units without payment",
                "NOTHING_TO_PAY"
            )
        );
    }
    assert_untouched(&mut world, dust).await;
    world.stop().await;
}

// rows: R098 R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_record_date_is_the_day_of_maturity_or_today() {
    const DAY: i64 = 24 * 3_600;
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let now = world.clock.now_us() / 1_000_000;
    let matures_at = now + 10 * DAY;
    world
        .register(|request| {
            request.matures_at = Some(prost_types::Timestamp {
                seconds: matures_at,
                nanos: 0,
            });
        })
        .await
        .expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    // 2000-01-01 is before the first holder.
    for date in [946_684_800, now - DAY, now + DAY, matures_at] {
        let refused = start(&world, "sandbox.service", Some(date))
            .await
            .expect_err("another day");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{date}");
        assert!(
            refused.message().contains("must be the current day"),
            "{refused}"
        );
        assert_untouched(&mut world, "2").await;
    }
    // Before maturity neither the issuer nor one operator may call it.
    for (credential, why) in [
        ("sandbox.issuer.issuer", "NOT_MATURED"),
        ("sandbox.operator", "APPROVAL_REQUIRED"),
    ] {
        for date in [None, Some(now)] {
            let refused = start(&world, credential, date).await;
            let refused = refused.expect_err("too early");
            assert_eq!(
                (refused.code(), reason(&refused).as_str()),
                (tonic::Code::FailedPrecondition, why)
            );
            assert_untouched(&mut world, "2").await;
        }
    }
    world.clock.advance_us(12 * DAY * 1_000_000);
    for date in [now, now + 12 * DAY] {
        let refused = start(&world, "sandbox.operator", Some(date))
            .await
            .expect_err("another day");
        assert!(
            refused.message().contains("must be the day of maturity"),
            "{refused}"
        );
        assert_untouched(&mut world, "2").await;
    }
    world.deposit("issuer", "2000.00").await;
    let done = start(&world, "sandbox.issuer.issuer", Some(matures_at))
        .await
        .expect("started");
    assert_eq!(
        (done.status(), done.total),
        (
            pb::RedemptionStatus::Finalized,
            amount("CFA-RUB", "2000.00")
        )
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "2000.00"
    );
    world.stop().await;
}

// rows: R330 R313 R314 R315 R288
#[tokio::test(flavor = "multi_thread")]
async fn r330_http_reads_show_what_the_calls_return() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let operation = world.issue("BOND-1", "alice", "7").await;
    let url = world.listen().await;
    let http = reqwest::Client::builder().timeout(WAIT).build();
    let http = http.expect("an HTTP client");
    let get = async |path: &str, credential: Option<&str>| {
        let mut request = http.get(format!("{url}{path}"));
        if let Some(credential) = credential {
            request = request.bearer_auth(credential);
        }
        let response = request.send().await.expect("answered");
        let status = response.status().as_u16();
        let body: serde_json::Value = response.json().await.expect("JSON");
        (status, body)
    };
    let of_operation = format!("/operations/{}", operation.operation_id);
    for (credential, refused) in [
        (None, 401),
        (Some("sandbox.unknown"), 401),
        (Some("sandbox.investor.alice"), 403),
    ] {
        assert_eq!(get(&of_operation, credential).await.0, refused);
    }
    let staff = Some("sandbox.auditor");
    let (status, body) = get(&of_operation, staff).await;
    let called = world.operation(&operation.operation_id).await;
    let expected = rpc::json::value(&called, "dfa.cfa.v1.CfaOperation");
    assert_eq!((status, &body), (200, &expected));
    assert_eq!(
        (&body["operationId"], &body["status"], &body["type"]),
        (
            &operation.operation_id.clone().into(),
            &"FINALIZED".into(),
            &"ISSUANCE".into()
        )
    );
    let (status, body) = get("/operations/none", staff).await;
    assert_eq!(
        (status, &body["message"]),
        (404, &"Operation not found".into())
    );
    let (_, body) = get("/operations?user_id=alice&status=FINALIZED", staff).await;
    assert_eq!(body["items"], serde_json::json!([expected]));
    let (_, body) = get("/instruments", staff).await;
    let bond = world.instrument("BOND-1").await;
    let bond = rpc::json::value(&bond, "dfa.cfa.v1.Instrument");
    assert_eq!(body["items"][0], bond);
    let (_, body) = get("/holders?instrument_id=BOND-1", staff).await;
    assert_eq!(body["items"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        (
            &body["items"][0]["userId"],
            &body["items"][0]["balance"]["value"]
        ),
        (&"alice".into(), &"7".into())
    );
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

// rows: R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_a_failed_redemption_can_be_restarted() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, b"redemption:BOND-1");
    revert_under(&mut world, &format!("{id}:fund")).await;
    revert_under(&mut world, &format!("{id}:part:0:try-1")).await;
    let start = |key: &str| pb::StartRedemptionRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    // The funding reverts, then the distribution, then both succeed.
    for (key, status) in [
        ("k-1", pb::RedemptionStatus::Failed),
        ("k-2", pb::RedemptionStatus::Failed),
        ("k-3", pb::RedemptionStatus::Finalized),
    ] {
        let redemption = world
            .cfa
            .start_redemption(start(key))
            .await
            .expect("started")
            .into_inner()
            .redemption
            .expect("redemption");
        assert_eq!(redemption.status(), status, "{key}");
    }
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "2000.00"
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "alice").await,
            world.supply("BOND-1").await.as_str()
        ),
        (2_000_00, "0"),
        "paid once"
    );
    assert_eq!(
        world.balance("issuer:CFA-RUB").await.balance.to_string(),
        "0.00"
    );
    world.stop().await;
}

// rows: R098 R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_a_restart_of_a_failed_redemption_is_checked_like_a_start() {
    const DAY: i64 = 24 * 3_600;
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let now = world.clock.now_us() / 1_000_000;
    world
        .register(|request| {
            request.matures_at = Some(prost_types::Timestamp {
                seconds: now + 10 * DAY,
                nanos: 0,
            });
        })
        .await
        .expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, b"redemption:BOND-1");
    revert_under(&mut world, &format!("{id}:fund")).await;
    let failed = start(&world, "sandbox.service", None)
        .await
        .expect("started");
    assert_eq!(failed.status(), pb::RedemptionStatus::Failed);
    world.stop().await;

    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    for (credential, why) in [
        ("sandbox.issuer.issuer", "NOT_MATURED"),
        ("sandbox.operator", "APPROVAL_REQUIRED"),
    ] {
        let refused = start(&world, credential, None).await;
        let refused = refused.expect_err("too early");
        assert_eq!(
            (refused.code(), reason(&refused).as_str()),
            (tonic::Code::FailedPrecondition, why)
        );
    }
    for date in [now - DAY, now + 10 * DAY] {
        let refused = start(&world, "sandbox.service", Some(date))
            .await
            .expect_err("another day");
        assert!(
            refused.message().contains("must be the current day"),
            "{refused}"
        );
    }
    assert_eq!(redemption(&mut world).await, failed);
    assert_eq!(world.supply("BOND-1").await, "2");
    let done = start(&world, "sandbox.service", Some(now))
        .await
        .expect("started again");
    assert_eq!(
        (done.status(), done.total.clone(), done.record_date),
        (
            pb::RedemptionStatus::Finalized,
            failed.total,
            failed.record_date
        )
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_units_issued_after_an_empty_redemption_are_not_burned() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world
        .register(|request| request.decimals = 18)
        .await
        .expect("registered");
    let dust = "0.000000000000000001";
    world.issue("BOND-1", "alice", dust).await;
    world.stop().await;
    // A crash after the record of a redemption without holders; units were issued since.
    let recorded = "INSERT INTO issue_redemption (redemption_id, instrument_id, reason, status, \
            record_date_us, total_minor, parts_done,
            idempotency_key, created_at_us) VALUES ('r-1', 'BOND-1', 2, 1, 1800000000000000, 0, 0, 'k-1', 1)";
    let stopped = "UPDATE instrument SET status = 4 WHERE instrument_id = 'BOND-1'";
    for statement in [recorded, stopped] {
        alter_store(folder.path(), statement).await;
    }

    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    assert_eq!(
        redemption(&mut world).await.status(),
        pb::RedemptionStatus::Failed
    );
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Matured
    );
    assert_eq!(world.supply("BOND-1").await, dust);
    assert_eq!(
        world.balance("alice:BOND-1").await.available.to_string(),
        dust
    );
    world.stop().await;
}

// rows: R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_health_names_an_issue_whose_redemption_is_not_recorded() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: matures_at,
            nanos: 0,
        });
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    world.stop().await;
    // A crash before the record of an early call.
    let stopped = "UPDATE instrument SET status = 4 WHERE instrument_id = 'BOND-1'";
    alter_store(folder.path(), stopped).await;
    let world = World::start(folder.path()).await;
    world.resume_operations().await;
    let part = "redemption of BOND-1";
    assert_eq!(
        world.service.health.failing()[part],
        "trading has stopped and no redemption is recorded: start it again"
    );
    let done = start(&world, "sandbox.service", None).await;
    let done = done.expect("started again");
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    world.resume_operations().await;
    assert!(!world.service.health.failing().contains_key(part));
    world.stop().await;
}

// rows: R099 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_units_moved_after_the_record_day_are_not_burned_unpaid() {
    const DAY_US: i64 = 24 * 3_600 * 1_000_000;
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.turn_back_us(3 * DAY_US);
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: matures_at,
            nanos: 0,
        });
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.issue("BOND-1", "bob", "3").await;
    world.deposit("issuer", "5000.00").await;
    let before = "UPDATE holding_history SET time_us = time_us - 345600000000";
    assert_eq!(world.holders("BOND-1").await.len(), 2);
    alter_store(folder.path(), before).await;
    follow_history(folder.path()).await;
    // Trading stops days after the record day.
    let transfer = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "carol".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let sent = world.transfer(transfer).await.expect("sent");
    world.settle(&sent).await;
    world.turn_back_us(0);
    world.resume_operations().await;
    let part = "redemption of BOND-1";
    assert_eq!(
        redemption(&mut world).await.status(),
        pb::RedemptionStatus::Submitted
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 0);
    assert_eq!(
        world.supply("BOND-1").await,
        "3",
        "nothing is burned unpaid"
    );
    assert_eq!(
        world.service.health.failing()[part],
        "2 holders cannot be paid yet"
    );

    // An operator resolves the difference.
    let back = Action::Transfer {
        token: world
            .instrument("BOND-1")
            .await
            .smart_contract_address
            .parse()
            .expect("address"),
        from: Address::of_user("carol"),
        to: Address::of_user("bob"),
        units: 1,
    };
    let back = world.connector().submit("back", &back.call()).await;
    let back = back.expect("submitted").tx_hash.to_string();
    let receipt = world.receipt(&back).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    let posted = ledger_pb::CreateOperationRequest {
        context: context("back"),
        operation: Some(ledger_pb::Operation {
            r#type: OperationType::TradeBuy.into(),
            user_id: "bob".into(),
            idempotency_key: "back".into(),
            external_ref: Some("back".into()),
            ..Default::default()
        }),
        postings: vec![ledger_pb::Posting {
            debit_subaccount_id: "carol:BOND-1".into(),
            credit_subaccount_id: "bob:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            ..Default::default()
        }],
        ..Default::default()
    };
    world.ledger.create_operation(posted).await.expect("posted");
    world.resume_operations().await;
    assert_eq!(
        redemption(&mut world).await.status(),
        pb::RedemptionStatus::Finalized
    );
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 3_000_00);
    assert_eq!(world.supply("BOND-1").await, "0");
    assert!(!world.service.health.failing().contains_key(part));
    world.stop().await;
}

// rows: R097
#[tokio::test(flavor = "multi_thread")]
async fn r097_a_refused_holder_delays_no_other() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.issue("BOND-1", "bob", "1").await;
    world.deposit("issuer", "3000.00").await;
    let hold_id = key();
    let request = ledger_pb::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger_pb::Hold {
            hold_id: hold_id.clone(),
            subaccount_id: "bob:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            reason: "an order".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(request).await.expect("held");
    let request = pb::StartRedemptionRequest {
        context: context("k-1"),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let started = world
        .cfa
        .start_redemption(request)
        .await
        .expect("started")
        .into_inner()
        .redemption
        .expect("redemption");
    assert_eq!(started.status(), pb::RedemptionStatus::Submitted);
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 0);
    let request = ledger_pb::ReleaseHoldRequest {
        context: context(&key()),
        hold_id,
        reason: "the order is gone".into(),
    };
    world.ledger.release_hold(request).await.expect("released");
    world.resume_operations().await;
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 1_000_00);
    assert_eq!(world.supply("BOND-1").await, "0");
    world.stop().await;
}

/// The chain's transfers, summed here, equal the holder registry (R217).
async fn assert_replay_gives_the_registry(world: &mut World) {
    let mut balances: std::collections::BTreeMap<(String, String), types::Decimal> =
        std::collections::BTreeMap::new();
    let mut from_block = 0;
    loop {
        let request = pb::ReplayChainTransfersRequest {
            context: None,
            from_block,
        };
        let part = world
            .cfa
            .replay_chain_transfers(request)
            .await
            .expect("replayed")
            .into_inner();
        for transfer in part.transfers {
            assert!((from_block..=part.through_block).contains(&transfer.block_number));
            let quantity: types::Decimal = transfer
                .quantity
                .expect("quantity")
                .value
                .parse()
                .expect("number");
            for (address, change) in [
                (transfer.from_address, quantity.negated()),
                (transfer.to_address, quantity),
            ] {
                let key = (transfer.instrument_id.clone(), address);
                let balance = balances.entry(key).or_insert(types::Decimal::ZERO);
                *balance = balance.checked_add(change).expect("in range");
            }
        }
        from_block = part.through_block + 1;
        if from_block > part.last_block {
            break;
        }
    }
    for instrument_id in ["CFA-RUB", "BOND-1"] {
        let request = pb::ListHoldersRequest {
            instrument_id: instrument_id.to_owned(),
            ..Default::default()
        };
        let holders = world.cfa.list_holders(request).await.expect("listed");
        for holder in holders.into_inner().holders {
            let key = (instrument_id.to_owned(), holder.address);
            let replayed = balances.remove(&key).expect("a holder of the log");
            let listed = holder.balance.expect("balance").value;
            assert_eq!(replayed, listed.parse().expect("number"), "{key:?}");
        }
        let issued = (instrument_id.to_owned(), String::new());
        assert!(
            balances
                .remove(&issued)
                .is_some_and(|rest| rest.is_negative())
        );
    }
    assert!(balances.values().all(|balance| balance.is_zero()));
}
