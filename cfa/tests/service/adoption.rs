//! Adoption of a token that exists (T32), and an issue's document and terms on the chain (F31).

use chain::contracts::id_hash;
use chain::{Action, Address, Grant, ReceiptStatus, RoleSet, Terms};
use proto::cfa::v1 as pb;

use crate::world::*;

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
