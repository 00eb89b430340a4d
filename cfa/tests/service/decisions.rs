//! Decisions on issues: draft, signature, activation, immutable terms.

use proto::cfa::v1 as pb;
use sha2::Digest as _;

use crate::node::{NO_COINS, gated_world};
use crate::world::*;

fn update(change: impl FnOnce(&mut pb::UpdateInstrumentRequest)) -> pb::UpdateInstrumentRequest {
    let mut request = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    change(&mut request);
    request
}

fn field(status: &tonic::Status) -> String {
    let details = tonic_types::StatusExt::get_details_bad_request(status);
    details.expect("details").field_violations[0].field.clone()
}

/// Asserts that every call but reads refuses BOND-1.
async fn is_refused(world: &mut World) {
    let not_active = |call: &str, refused: tonic::Status| {
        assert_eq!(reason(&refused), "INSTRUMENT_NOT_ACTIVE", "{call}");
        assert_eq!(refused.message(), "Instrument is not active", "{call}");
    };
    let issue = issue_request("BOND-1", "alice", "1", None);
    let issued = world.cfa.issue_investment_cfa(issue).await;
    not_active("issue", issued.expect_err("a draft"));
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    not_active("subscribe", subscribed.expect_err("a draft"));
    let offered = world.offer("BOND-1", "alice", "1", "1000.00").await;
    not_active("offer", offered.expect_err("a draft"));
    let transfer = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "alice".into(),
        to_user_id: "bob".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let mut alice = world.as_caller("sandbox.investor.alice");
    let transferred = alice.transfer_cfa(transfer).await;
    not_active("transfer", transferred.expect_err("a draft"));
    let redeem = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let redeemed = world.cfa.redeem_investment_cfa(redeem).await;
    not_active("redeem", redeemed.expect_err("a draft"));
    let start = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let started = world.cfa.start_redemption(start).await;
    not_active("redemption", started.expect_err("a draft"));
    let activate = update(|change| change.status = pb::InstrumentStatus::Active.into());
    let updated = world.cfa.update_instrument(activate).await;
    not_active("update", updated.expect_err("a draft"));
}

// rows: R025 R028
#[tokio::test(flavor = "multi_thread")]
async fn r025_a_draft_is_readable_and_refused_until_its_signed_decision_is_activated() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let draft = world.draft(|_| {}).await.expect("registered");
    assert_eq!(draft.status(), pb::InstrumentStatus::Draft);
    assert_eq!(draft.smart_contract_address, "", "no contract of a draft");
    is_refused(&mut world).await;
    assert_eq!(world.supply("BOND-1").await, "0");
    assert!(world.holders("BOND-1").await.is_empty());

    let unsigned = world.activate("BOND-1").await.expect_err("unsigned");
    assert_eq!(reason(&unsigned), "DECISION_UNSIGNED");
    // Only the issuer's own certificate counts.
    let other = world.sign("BOND-1", "issuer-2").await;
    assert_eq!(field(&other.expect_err("another signer")), "signature");
    let signed = world.sign("BOND-1", "issuer").await.expect("signed");
    assert_eq!(signed.document_hash, hex::encode(document_of("BOND-1")));
    assert!(signed.signer.contains("CN=issuer"), "{}", signed.signer);
    is_refused(&mut world).await;
    // The sweep activates nothing.
    world.resume_operations().await;
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Draft);

    let request = pb::ActivateInstrumentRequest {
        context: context("activation"),
        instrument_id: "BOND-1".into(),
        document_hash: "08".repeat(32),
    };
    let refused = world.cfa.activate_instrument(request.clone()).await;
    assert_eq!(field(&refused.expect_err("another hash")), "document_hash");
    let request = pb::ActivateInstrumentRequest {
        document_hash: hex::encode(document_of("BOND-1")),
        ..request
    };
    // One person cannot activate it.
    let mut anna = world.as_caller("sandbox.operator.anna");
    let alone = anna.activate_instrument(request.clone()).await;
    assert_eq!(reason(&alone.expect_err("one person")), "APPROVAL_REQUIRED");
    let activated = world.cfa.activate_instrument(request.clone()).await;
    let activated = activated.expect("activated").into_inner().instrument;
    let activated = activated.expect("instrument");
    assert_eq!(activated.status(), pb::InstrumentStatus::Active);
    assert_ne!(activated.smart_contract_address, "");
    let repeated = world.cfa.activate_instrument(request).await;
    let repeated = repeated.expect("the stored answer");
    assert!(repeated.metadata().contains_key("idempotent-replayed"));
    assert_eq!(repeated.into_inner().instrument, Some(activated));
    world.issue("BOND-1", "alice", "1").await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_decision_of_an_active_issue_and_its_terms_do_not_change() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let before = world
        .register(|request| request.issue_limit = decimal("10"))
        .await
        .expect("registered");
    type Change = fn(&mut pb::UpdateInstrumentRequest);
    let changes: [(&str, Change); 5] = [
        ("name", |change| change.name = Some("Another".into())),
        ("issue_limit", |change| change.issue_limit = decimal("11")),
        ("matures_at", |change| {
            let seconds = 2_000_000_000;
            change.matures_at = Some(prost_types::Timestamp { seconds, nanos: 0 });
        }),
        ("document_hash", |change| {
            change.document_hash = Some("08".repeat(32));
        }),
        ("document_uri", |change| {
            change.document_uri = Some("https://other".into());
        }),
    ];
    for (name, change) in changes {
        let refused = world.cfa.update_instrument(update(change)).await;
        let refused = refused.expect_err(name);
        assert_eq!(reason(&refused), "TERMS_IMMUTABLE", "{name}");
    }
    assert_eq!(world.instrument("BOND-1").await, before);
    let signed = world.sign("BOND-1", "issuer").await.expect_err("active");
    assert_eq!(reason(&signed), "OPERATION_STATE");
    // The status is no term.
    let halt = update(|change| change.status = pb::InstrumentStatus::Halted.into());
    world.cfa.update_instrument(halt).await.expect("halted");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registered_document_is_the_signed_one() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let document = b"Decision on BOND-1";
    let hash: [u8; 32] = sha2::Sha256::digest(document).into();
    let other_hash = world.draft(|request| {
        request.document = document.to_vec().into();
        request.document_hash = hex::encode(document_of("BOND-1"));
    });
    let refused = other_hash.await.expect_err("the hash of another document");
    assert_eq!(field(&refused), "document_hash");
    let draft = world.draft(|request| request.document = document.to_vec().into());
    assert_eq!(draft.await.expect("draft").document_hash, hex::encode(hash));
    // `sign` signs another document.
    let other = world.sign("BOND-1", "issuer").await;
    assert_eq!(field(&other.expect_err("another")), "document_hash");
    let request = pb::SignIssueDecisionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        signature: world.ca.sign("issuer", &hash).expect("signature").into(),
        ..Default::default()
    };
    let mut stranger = world.as_caller("sandbox.issuer.other");
    let refused = stranger.sign_issue_decision(request.clone()).await;
    let refused = refused.expect_err("another issuer");
    assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    let mut issuer = world.as_caller("sandbox.issuer.issuer");
    let signed = issuer.sign_issue_decision(request).await;
    signed.expect("signed");
    let request = pb::GetIssueDecisionRequest {
        context: None,
        instrument_id: "BOND-1".into(),
    };
    let found = world.cfa.get_issue_decision(request).await.expect("found");
    let decision = found.into_inner().decision.expect("decision");
    assert_eq!(decision.document.as_ref(), document.as_slice());
    assert!(!decision.signature.is_empty());
    assert!(decision.signed_at.is_some() && decision.activated_at.is_none());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signature_does_not_sign_another_issue() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let request = pb::GetIssueDecisionRequest {
        context: None,
        instrument_id: "BOND-1".into(),
    };
    let found = world.cfa.get_issue_decision(request).await.expect("found");
    let decision = found.into_inner().decision.expect("decision");
    let other_terms = world.draft(|request| {
        request.symbol = "BOND-2".into();
        request.nominal = decimal("1");
    });
    other_terms.await.expect("registered");
    let replay = pb::SignIssueDecisionRequest {
        context: context(&key()),
        instrument_id: "BOND-2".into(),
        document_hash: decision.document_hash,
        signature: decision.signature,
        ..Default::default()
    };
    let refused = world.cfa.sign_issue_decision(replay).await;
    assert_eq!(field(&refused.expect_err("signed before")), "document_hash");
    world.sign("BOND-2", "issuer").await.expect("signed");
    world.activate("BOND-2").await.expect("activated");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_certificate_authority_no_decision_is_signed() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = Settings {
        without_authority: true,
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.draft(|_| {}).await.expect("registered");
    let refused = world.sign("BOND-1", "issuer").await.expect_err("no CA");
    assert_eq!(reason(&refused), "NO_CERTIFICATE_AUTHORITY");
    assert!(refused.message().contains("cfa.ca_file"), "{refused}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configured_command_verifies_decisions_when_they_are_signed_and_activated() {
    let folder = tempfile::tempdir().expect("folder");
    // The command accepts the content of one file. It does not verify signatures.
    let program = folder.path().join("verify");
    let accepted = folder.path().join("accepted");
    let script = format!("cmp -s \"$1\" '{}'", accepted.display());
    let program_name = program.to_str().expect("UTF-8");
    let command = [program_name, "-c", script.as_str(), "sh"];
    let files = ["{content}", "{signature}", "{certificate}", "{ca}"];
    let command = [command, files].concat();
    let settings = Settings {
        signature_command: command.iter().map(|part| (*part).to_owned()).collect(),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.draft(|_| {}).await.expect("registered");
    let absent = world.sign("BOND-1", "issuer").await.expect_err("absent");
    assert_eq!(absent.code(), tonic::Code::Unavailable, "{absent}");
    let found = world.service.health.findings();
    assert!(found["signatures"].contains("cannot run"), "{found:?}");

    std::os::unix::fs::symlink("/bin/sh", &program).expect("installed");
    let refused = world.sign("BOND-1", "issuer").await.expect_err("refused");
    assert_eq!(field(&refused), "signature");
    let findings = world.service.health.findings();
    assert!(!findings.contains_key("signatures"), "{findings:?}");
    // Only the hash of this document is known.
    std::fs::write(&accepted, document_of("BOND-1")).expect("written");
    let other = world.sign("BOND-1", "issuer-2").await;
    assert_eq!(field(&other.expect_err("another signer")), "signature");
    let signed = world.sign("BOND-1", "issuer").await.expect("signed");
    assert!(signed.signer.contains("CN=issuer"), "{}", signed.signer);
    assert_ne!(signed.certificate_serial, "");

    let second = world.draft(|request| {
        request.symbol = "BOND-2".into();
        request.document = b"BOND-2".to_vec().into();
    });
    second.await.expect("registered");
    std::fs::write(&accepted, "BOND-2").expect("written");
    world.sign("BOND-2", "issuer").await.expect("signed");
    // The content of the first decision is not accepted any more.
    let refused = world.activate("BOND-1").await.expect_err("refused");
    assert_eq!(field(&refused), "signature");
    world.activate("BOND-2").await.expect("activated");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_activation_that_the_node_refuses_is_completed_by_the_sweep() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.draft(|_| {}).await.expect("registered");
    world.sign("BOND-1", "issuer").await.expect("signed");
    gate.refuse(NO_COINS);
    let waiting = world.activate("BOND-1").await.expect("stored");
    assert_eq!(waiting.status(), pb::InstrumentStatus::Draft);
    let again = world.activate("BOND-1").await.expect_err("activated");
    assert_eq!(reason(&again), "OPERATION_STATE");
    let subscribed = world.subscribe("BOND-1", "alice", "1", "1000.00").await;
    let subscribed = subscribed.expect_err("a draft");
    assert_eq!(reason(&subscribed), "INSTRUMENT_NOT_ACTIVE");
    gate.pass();
    world.resume_operations().await;
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Active);
    world.issue("BOND-1", "alice", "1").await;
    world.stop().await;
    node.stop().await;
}
