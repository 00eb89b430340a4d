//! Signed extracts from the register (F33).

use proto::cfa::v1 as pb;
use sha2::Digest as _;
use signatures::CmsVerifier;
use testkit::pdf;

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
    freeze_two(&mut world, "Decision 7").await;
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

async fn freeze_two(world: &mut World, document: &str) {
    let freeze = pb::FreezeUnitsRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        amount: amount("BOND-1", "2"),
        basis: pb::EnforcementBasis::Court.into(),
        document: document.into(),
    };
    world.cfa.freeze_units(freeze).await.expect("frozen");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pdf_states_what_the_text_states() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "3").await;
    freeze_two(&mut world, "Определение № 7 (дело А40-17/2026) «Ёлка» \\ ]").await;
    let operator = "sandbox.operator.anna";
    let as_text = pb::IssueExtractRequest {
        format: pb::ExtractFormat::Text.into(),
        recipient: pb::ExtractRecipient::Bailiff.into(),
        document: "Запрос 12, 中".into(),
        ..extract_of("alice")
    };
    let as_pdf = pb::IssueExtractRequest {
        context: context(&key()),
        format: pb::ExtractFormat::Pdf.into(),
        ..as_text.clone()
    };
    let text = issue(&world, operator, as_text).await.expect("issued");
    let extract = issue(&world, operator, as_pdf.clone()).await;
    let extract = extract.expect("issued");
    assert_eq!(extract.content_type, "application/pdf");
    assert_eq!(extract.format(), pb::ExtractFormat::Pdf);
    let pages = pdf::pages(&extract.content);
    assert_eq!(pages.len(), 1);
    assert_eq!(pages[0].size, (595, 842));
    let shown = &pages[0].text;
    let text = std::str::from_utf8(&text.content).expect("text");
    // These differ between two extracts.
    let own = ["Номер выписки", "По состоянию на", "Дата выдачи"];
    for line in text
        .lines()
        .filter(|line| !own.iter().any(|own| line.starts_with(own)))
    {
        // The font has no Chinese characters.
        assert!(
            shown.contains(&line.replace('中', "\\u{4e2d}")),
            "{line}: {shown}"
        );
    }
    for line in [
        "Количество: 3 из 3",
        "- 2, Определение № 7",
        "страница 1 из 1",
    ] {
        assert!(shown.contains(line), "{line}: {shown}");
    }
    let number = format!("Номер выписки: {}", extract.extract_id);
    assert!(shown.contains(&number), "{shown}");
    let pem = std::fs::read(folder.path().join("keys/ca.pem")).expect("certificate");
    let verifier = CmsVerifier::from_pem(&pem).expect("verifier");
    let digest: [u8; 32] = sha2::Sha256::digest(&extract.content).into();
    let now_us = service_kit::clock::now_us();
    let signed_by = verifier.verify(&digest, &extract.signature, now_us);
    assert_eq!(signed_by.expect("verified").common_name, "operator");
    let again = issue(&world, operator, as_pdf).await;
    assert_eq!(again.expect("the stored one"), extract);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extract_with_many_freezes_has_several_pages_and_states_its_limit() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "3").await;
    freeze_two(&mut world, "Decision 7").await;
    // Older freezes, which are lifted: with the one above 501, one more than an extract has.
    let older = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500) \
         INSERT INTO enforcement_act (act_id, kind, basis, instrument_id, holder_id, to_user_id, \
            units_minor, left_minor, document, lift_document, freeze_id, status, \
            idempotency_key, actor, correlation_id, created_at_us, updated_at_us) \
         SELECT act_id || '-' || i, kind, basis, instrument_id, holder_id, to_user_id, \
            units_minor, 0, 'Постановление ' || i || ' об аресте, исполнительное производство', \
            'Decision 8', freeze_id, 5, idempotency_key || '-' || i, actor, correlation_id, \
            created_at_us - i, updated_at_us FROM enforcement_act, n";
    alter_store(folder.path(), older).await;
    let operator = "sandbox.operator.anna";
    let extract = pb::IssueExtractRequest {
        format: pb::ExtractFormat::Pdf.into(),
        ..extract_of("alice")
    };
    let extract = issue(&world, operator, extract).await.expect("issued");
    let pages = pdf::pages(&extract.content);
    assert!(pages.len() > 9, "{} pages", pages.len());
    for (index, page) in pages.iter().enumerate() {
        let number = format!("страница {} из {}", index + 1, pages.len());
        assert!(page.text.ends_with(&number), "{}", page.text);
        // Rows are below each other and within the margins, the last one is the footer.
        assert!(
            page.heights
                .is_sorted_by(|above, below| above - below >= 14)
        );
        let (footer, rows) = page.heights.split_last().expect("footer");
        assert!(*footer == 34 && rows.iter().all(|height| (57..=785).contains(height)));
    }
    let text: String = pages.iter().map(|page| page.text.as_str()).collect();
    assert!(text.contains("- 2, Decision 7"), "{text}");
    let is_shown = |number: i32| text.contains(&format!("- 2, Постановление {number} об аресте"));
    assert!((1..500).all(is_shown) && !is_shown(500), "{text}");
    let limit = "Указаны последние 500 обременений, более ранние не указаны.";
    assert!(text.contains(limit), "{text}");
    let csv = issue(&world, operator, extract_of("alice")).await;
    let csv = csv.expect("issued").content;
    let csv = std::str::from_utf8(&csv).expect("text");
    assert_eq!(csv.matches("\"freeze\",").count(), 500);
    assert!(csv.ends_with("\"older_freezes\",\"omitted\"\r\n"), "{csv}");
    // A user without freezes.
    let bob = issue(&world, operator, extract_of("bob")).await;
    let bob = bob.expect("issued").content;
    assert!(!String::from_utf8_lossy(&bob).contains("older_freezes"));
    world.stop().await;
}
