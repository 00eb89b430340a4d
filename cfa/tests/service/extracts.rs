//! Signed extracts from the register (F33).

use proto::cfa::v1 as pb;
use sha2::Digest as _;
use signatures::{CmsVerifier, Verifier};

use crate::world::*;

fn extract_of(holder_id: &str) -> pb::IssueExtractRequest {
    pb::IssueExtractRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: holder_id.into(),
        ..Default::default()
    }
}

async fn issue(
    world: &World,
    credential: &str,
    request: pb::IssueExtractRequest,
) -> Result<pb::Extract, tonic::Status> {
    let answer = world.as_caller(credential).issue_extract(request).await?;
    Ok(answer.into_inner().extract.expect("extract"))
}

// rows: R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_an_extract_states_the_units_at_its_time_and_is_signed() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "3").await;
    world.issue("BOND-1", "bob", "1").await;
    world.holders("BOND-1").await;
    let own = extract_of("alice");
    let alice = "sandbox.investor.alice";
    let first = issue(&world, alice, own.clone()).await.expect("issued");
    let csv = std::str::from_utf8(&first.content).expect("text");
    assert!(csv.contains("\"units\",\"3\"\r\n"), "{csv}");
    assert!(csv.contains("\"share_percent\",\"75.000000\""), "{csv}");
    let digest: [u8; 32] = sha2::Sha256::digest(&first.content).into();
    assert_eq!(first.sha256, hex::encode(digest));
    let pem = std::fs::read(folder.path().join("keys/ca.pem")).expect("certificate");
    let verifier = CmsVerifier::from_pem(&pem).expect("verifier");
    let now_us = service_kit::clock::now_us();
    let signed_by = verifier.verify(&digest, &first.signature, now_us);
    assert_eq!(signed_by.expect("verified").common_name, "operator");

    // Sets the history so far back by four days.
    let past = "UPDATE holding_history SET time_us = time_us - 345600000000";
    alter_store(folder.path(), past).await;
    follow_history(folder.path()).await;
    // A repeat returns the same bytes, although the register has changed.
    world.issue("BOND-1", "alice", "1").await;
    world.holders("BOND-1").await;
    let again = issue(&world, alice, own).await.expect("the stored one");
    assert_eq!(again, first);
    // Repeats that arrive together.
    let new = extract_of("alice");
    let calls = std::iter::repeat_with(|| issue(&world, alice, new.clone())).take(4);
    let together = futures::future::try_join_all(calls).await;
    let together = together.expect("issued once");
    assert!(together.iter().all(|of| *of == together[0]));
    // The units of the day before.
    let at = pb::IssueExtractRequest {
        as_of: Some(prost_types::Timestamp {
            seconds: now_us / 1_000_000 - 24 * 3_600,
            nanos: 0,
        }),
        ..extract_of("alice")
    };
    let at = issue(&world, alice, at).await.expect("issued");
    let csv = std::str::from_utf8(&at.content).expect("text");
    assert!(csv.contains("\"units\",\"3\"\r\n"), "{csv}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_court_gets_an_extract_by_its_request_with_the_freezes() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "3").await;
    let freeze = pb::FreezeUnitsRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", "2"),
        basis: pb::EnforcementBasis::Court.into(),
        document: "Decision 7".into(),
    };
    world.cfa.freeze_units(freeze).await.expect("frozen");
    let for_court = pb::IssueExtractRequest {
        format: pb::ExtractFormat::Text.into(),
        recipient: pb::ExtractRecipient::Court.into(),
        document: "Request 12".into(),
        ..extract_of("alice")
    };
    let without = pb::IssueExtractRequest {
        context: context(&key()),
        document: String::new(),
        ..for_court.clone()
    };
    let operator = "sandbox.operator.anna";
    let refused = issue(&world, operator, without)
        .await
        .expect_err("no request");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    let extract = issue(&world, operator, for_court.clone()).await;
    let extract = extract.expect("issued");
    let text = std::str::from_utf8(&extract.content).expect("text");
    assert!(text.contains("Request 12"), "{text}");
    assert!(text.contains("- 2, Decision 7"), "{text}");
    // A user gets own extracts only, and none for a court.
    let own = pb::IssueExtractRequest {
        context: context(&key()),
        ..for_court
    };
    let refused = issue(&world, "sandbox.investor.alice", own).await;
    let refused = refused.expect_err("not for a court");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    let foreign = issue(&world, "sandbox.investor.bob", extract_of("alice")).await;
    let foreign = foreign.expect_err("another user");
    assert_eq!(foreign.code(), tonic::Code::PermissionDenied);
    world.stop().await;
}
